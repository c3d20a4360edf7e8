"""Change a network in place and leave every parameter where it is, under the name it had.

Everything here works on plain ``nn.Module`` s and optimizers and knows nothing of Lightning:

* :func:`mix_in` changes a module's behaviour by putting a class in front of its own (deep copies, pickles, FSDP2 and
  ``isinstance`` go on working, no key of ``state_dict`` changes);
* :func:`match_modules` and :func:`match_parameters` say where, and raise where there is nothing;
* :func:`become` turns an optimizer into one of another class, with all the schedulers that point at it.
"""

import difflib
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.errors import ConfigurationError, listed, refusal
from lit_efficient.internals.torch_optimizers import HOOKS, is_counted, mark_counted, mark_stepped
from lit_efficient.internals.torch_shards import is_sharded as is_sharded  # noqa: PLC0414 (also a name of this module)
from lit_efficient.internals.torch_shards import local as local  # noqa: PLC0414
from lit_efficient.internals.torch_shards import reshard as reshard  # noqa: PLC0414


def mix_in(module: nn.Module, mixin: type, **attributes: object) -> None:
    """Put ``mixin`` in front of ``module``'s own class, in place, and set ``attributes`` on the module.

    The class keeps its name, so that class-name policies (FSDP wrapping, ``_no_split_modules``) still find it. Mixing
    the same class in a second time only updates the attributes.

    Args:
        module: Any module; parameters, buffers, hooks and training mode stay as they are.
        mixin: A class whose methods call ``super()``; it should hold no parameters of its own.
        **attributes: Plain values that the mix-in's methods read from ``self``.

    Raises:
        TypeError: If ``mixin`` defines ``__init__`` (it would never run).
    """
    if "__init__" in vars(mixin):
        raise TypeError(f"mix_in: {mixin.__name__}.__init__ would never run; pass attributes instead")
    if not isinstance(module, mixin):
        cls: Any = type(module)
        module.__class__ = _mixed(mixin, cls)
    for name, value in attributes.items():
        setattr(module, name, value)


def mix_out(module: nn.Module, mixin: type) -> None:
    """Take a class that :func:`mix_in` put in front of ``module``'s own out again; without it nothing happens."""
    fronts, cls = _fronts(type(module))
    module.__class__ = _stacked([front for front in fronts if not issubclass(front, mixin)], cls)


def mix_under(module: nn.Module, mixin: type, **attributes: object) -> None:
    """:func:`mix_in` right in front of the module's own class: what was mixed in before, such as adapters, calls it."""
    fronts, cls = _fronts(type(module))
    if mixin not in fronts:
        module.__class__ = _stacked([*fronts, mixin], cls)
    for name, value in attributes.items():
        setattr(module, name, value)


def unmixed(module: nn.Module) -> type:
    """The class that a module had before :func:`mix_in`."""
    return _fronts(type(module))[1]


def _fronts(cls: Any) -> tuple[list[type], Any]:
    """What :func:`mix_in` has put in front of a class, the foremost first, and that class."""
    fronts: list[type] = []
    while "mixed_from" in vars(cls):
        front, cls = cls.mixed_from
        fronts.append(front)
    return fronts, cls


def _stacked(fronts: Sequence[type], cls: Any) -> Any:
    for front in reversed(fronts):
        cls = _mixed(front, cls)
    return cls


def moved(tensor: Tensor, device: torch.device | str | None, dtype: torch.dtype | None = None) -> Tensor:
    """``tensor`` on ``device``, in ``dtype``. The host waits only for what comes to itself, which it is going to read.

    A copy to a GPU that is not asked to be ``non_blocking`` waits until the GPU has done all that it was given before.
    """
    return tensor.to(device, dtype, non_blocking=device is not None and torch.device(device).type != "cpu")


def weightless(tensor: Tensor) -> Tensor:
    """A parameter or buffer of the same kind on the meta device, where it has no values."""
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def home_of(weight: Tensor) -> torch.device:
    """Where to put what stands beside a weight: where it is, or will be if it waits for its numbers."""
    return torch.get_default_device() if weight.is_meta else weight.device


def memory_of(tensor: object) -> object:
    """What two tensors of a ``state_dict`` or a file have in common that are one, as a tied weight's are."""
    if is_sharded(tensor):
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    if not isinstance(tensor, Tensor) or tensor.numel() == 0:
        return id(tensor)
    return (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)


@functools.cache
def _mixed(mixin: type, base: type) -> type:
    """The class ``mixin(base)``, made once a pair, so that equal modules keep equal classes."""
    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    namespace |= {"mixed_from": (mixin, base), "__reduce_ex__": _reduce_mixed}
    if _takes_anything(vars(mixin).get("forward")):
        namespace["forward"] = _with_signature(mixin, base)
    return type(base.__name__, (mixin, base), namespace)


def _takes_anything(forward: Any) -> bool:
    """Whether all that a signature says is ``(self, *args, **kwargs)``."""
    if forward is None:
        return False
    kinds = [parameter.kind for parameter in inspect.signature(forward).parameters.values()][1:]
    return kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]


def _with_signature(mixin: Any, base: Any) -> Callable[..., Any]:
    """The mix-in's ``forward`` under the signature of the class's own: generation reads which arguments there are."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mixin.forward(self, *args, **kwargs)

    forward.__doc__ = base.forward.__doc__
    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    return forward


def _reduce_mixed(self: nn.Module, protocol: Any) -> str | tuple[Any, ...]:
    """Pickle by naming the classes that were mixed: the mixed one cannot be found by import."""
    mixins: list[type] = []
    base: Any = type(self)
    while "mixed_from" in vars(base):
        mixin, base = base.mixed_from
        mixins.append(mixin)
    if not mixins:  # a class made on top of ours, by FSDP2 for one
        return object.__reduce_ex__(self, protocol)
    return _new_mixed, (base, *reversed(mixins)), self.__getstate__()  # which leaves out what was compiled


def _new_mixed(base: Any, *mixins: type) -> nn.Module:
    for mixin in mixins:
        base = _mixed(mixin, base)
    return base.__new__(base)


def match_modules(
    root: nn.Module,
    patterns: Sequence[str],
    *,
    who: str,
    kind: type | tuple[type, ...] = nn.Module,
    where: Callable[[nn.Module], object] | None = None,
) -> list[tuple[str, nn.Module]]:
    """Modules whose dotted name matches any of ``patterns``, in definition order.

    Args:
        root: Where to look.
        patterns: Regular expressions, each matched against the end of the dotted name at a dot (``"attn"`` matches
            ``blocks.0.attn``) or against the whole name.
        who: Name of the technique that asks, for the error.
        kind: Only modules of these classes.
        where: Only modules for which this is true.

    Raises:
        ConfigurationError: If a pattern is no regular expression or matches nothing; the message lists how
            the names of those end that could match.
    """
    modules: list[tuple[str, nn.Module]] = list(root.named_modules())
    candidates = {
        name: module
        for name, module in modules
        if name and isinstance(module, kind) and (where is None or where(module))
    }
    names = {name: [name] for name in candidates}
    return [(name, candidates[name]) for name in _matching(names, patterns, who, "modules")]


def match_parameters(
    root: nn.Module, patterns: Sequence[str], *, who: str, where: Callable[[nn.Parameter], object] | None = None
) -> list[tuple[str, nn.Parameter]]:
    """Parameters whose dotted name, or that of a module that holds them, matches any of ``patterns``.

    A tied parameter may be matched by any of its names, and is given once, under the first.

    Args:
        root: Where to look.
        patterns: Regular expressions as in :func:`match_modules`: ``"norm"`` matches all of ``blocks.0.norm``, and
            ``bias`` each bias.
        who: Name of the technique that asks, for the error.
        where: Only parameters for which this is true.

    Raises:
        ConfigurationError: If a pattern is no regular expression or matches nothing, as :func:`match_modules` does.
    """
    named = [item for item in root.named_parameters(remove_duplicate=False) if where is None or where(item[1])]
    candidates: dict[str, nn.Parameter] = {}
    names: dict[str, list[str]] = {}
    first: dict[int, str] = {}
    for name, parameter in named:
        own = first.setdefault(id(parameter), name)
        candidates[own] = parameter
        names.setdefault(own, []).extend((name, *parents(name)))
    return [(name, candidates[name]) for name in _matching(names, patterns, who, "parameters")]


def name_pattern(pattern: str, who: str) -> re.Pattern[str]:
    """The compiled pattern for the end of a dotted name, to be used with ``fullmatch``.

    Raises:
        ConfigurationError: If it is no regular expression.
    """
    if not isinstance(pattern, str):
        raise refusal(who, "a pattern", "a text, for the end of a dotted name", pattern)
    try:
        return re.compile(rf"(?:.*\.)?(?:{pattern})")
    except re.error as error:
        raise ConfigurationError(f"{who}: {pattern!r} is no regular expression: {error}") from error


def _matching(names: Mapping[str, Sequence[str]], patterns: Sequence[str], who: str, what: str) -> list[str]:
    """Those of the keys of ``names`` for which a pattern matches one of the values; each pattern must match one."""
    matched: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        expression = name_pattern(pattern, who)
        hits = {key for key, aliases in names.items() if any(map(expression.fullmatch, aliases))}
        if not hits:
            could = [alias for aliases in names.values() for alias in aliases]
            ends = endings(could)
            near = difflib.get_close_matches(pattern, ends, n=1, cutoff=0.3) or ends[:1]
            others = [end for end in ends if end not in near]
            example = next((f" (as in {name})" for name in could if name.endswith(near[0])), "")
            raise ConfigurationError(
                f"{who}: the pattern {pattern!r} matches none of the {len(names)} {what} that it could, whose names "
                f"end in: {listed(near + others, 20) or 'there are none'}{example}"
            )
        matched |= hits
    return [key for key in names if key in matched]


def endings(names: Iterable[str]) -> list[str]:
    """The distinct ends of dotted names, in order: the last part, with those before it where it is a number.

    Example:
        >>> endings(["blocks.0.up", "blocks.1.up", "blocks.1.mlp.0"])
        ['up', 'mlp.0']
    """
    found = ((name, re.search(r"[^.]*[^.\d][^.]*(?:\.\d+)*$", name)) for name in names)
    return list(dict.fromkeys(match.group() if match else name for name, match in found))


def parents(name: str) -> Iterator[str]:
    """Of a dotted name those of the modules around it, the nearest first; that of the root is empty and left out."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def expert_stacks(root: nn.Module) -> list[tuple[str, nn.Module, list[str]]]:
    """Modules that hold the matrices of several experts in parameters of three dimensions, and these parameters' names.

    Such a module has no parts with weights, and what it has is one entry for each expert. Convolutions are none.
    """
    found = []
    for name, module in root.named_modules():
        if hasattr(module, "expert_shape"):  # our own, which may be quantised
            found.append((name, module, ["weight"]))
            continue
        own = [(key, p) for key, p in module.named_parameters(recurse=False) if not key.startswith("lora_")]
        stacks = [key for key, p in own if p.ndim == 3 and p.is_floating_point() and min(p.shape) > 1]
        if not stacks or hasattr(module, "kernel_size"):
            continue
        alone = not any(True for child in module.children() for _ in child.parameters())
        if alone and len({p.shape[0] for _, p in own}) == 1:
            found.append((name, module, stacks))
    return found


_DROPPED_FLAGS = {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "maximize"}


def call_layers(root: nn.Module) -> None:
    """Keep torch's transformer encoder from reading the weights of layers in ``root`` whose forward has been changed.

    In evaluation without gradients it runs a fused kernel on ``linear1.weight`` and its kin, and calls no layer: what
    was put into their forwards would be left out without a word.
    """
    for part in root.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0  # which nothing but the fused path reads
        elif isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False  # nested tensors exist for the fused path alone


def become(optimizer: Optimizer, cls: type[Optimizer], **arguments: object) -> None:
    """Turn ``optimizer`` into a fresh ``cls`` in place: same object, same groups, same hyper-parameters, same hooks.

    Because the object stays the same, every scheduler that points at it (chained and sequential ones too) stays valid.

    Args:
        optimizer: An optimizer that has not stepped yet.
        cls: The class to turn it into; arguments that both have in common (its signature's, and its ``options``) keep
            their values, group by group.
        **arguments: Further arguments for ``cls``.

    Raises:
        ConfigurationError: If the optimizer holds state already (it would be lost).
    """
    if optimizer.state:
        raise ConfigurationError(f"{type(optimizer).__name__} has stepped already; its state would be lost")
    own = {*inspect.signature(cls).parameters, *getattr(cls, "options", ())} - _DROPPED_FLAGS
    dropped = _DROPPED_FLAGS | {name for name in optimizer.defaults if name not in own}
    groups = [{key: value for key, value in group.items() if key not in dropped} for group in optimizer.param_groups]
    defaults = {name: value for name, value in optimizer.defaults.items() if name in own and name not in arguments}
    hooks = {name: optimizer.__dict__[name] for name in HOOKS if name in optimizer.__dict__}
    tracked = is_counted(optimizer.step)
    optimizer.__dict__.clear()
    optimizer.__class__ = cls
    optimizer.__init__(groups, **defaults, **arguments)  # type: ignore[misc]
    optimizer.__dict__.update(hooks)
    if tracked:
        optimizer.step = types.MethodType(_counted(cls.step), optimizer)  # type: ignore[method-assign]


def _counted(step: Callable[..., Any]) -> Callable[..., Any]:
    """What a scheduler does to its optimizer's ``step`` to learn whether it was called before its own."""

    @functools.wraps(step)
    def wrapper(self: Optimizer, *args: object, **kwargs: object) -> object:
        mark_stepped(self)
        return step(self, *args, **kwargs)

    mark_counted(wrapper)
    return wrapper


WAITS = "_lit_efficient_weights"  # attribute of a network that was built empty: the source of its weights


def weights_wait(root: nn.Module) -> bool:
    """Return whether ``root`` holds a network without its weights, which are read after it has been sharded."""
    return any(WAITS in part.__dict__ for part in root.modules())


def count(parameters: Iterable[nn.Parameter]) -> int:
    """Number of elements, tied parameters once."""
    return sum({id(parameter): parameter.numel() for parameter in parameters}.values())


@contextmanager
def own_draws(seed: int | None = None) -> Iterator[None]:
    """Draw on the CPU, from its global generator, which is as before afterwards; no other device's is touched.

    Lightning calls ``configure_model`` with the run's device as the default: what is built in here must be moved there.

    Args:
        seed: What the generator is seeded with; ``None`` leaves it where it stands.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        if seed is not None:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed those of all devices
        yield


def inputs_first(layer: nn.Module) -> bool:
    """Whether a layer's weight is [inputs, outputs, ...], as of transposed convolutions and of GPT-2's ``Conv1D``."""
    conv1d = any(base.__name__ == "Conv1D" and hasattr(layer, "nf") for base in type(layer).__mro__)
    return conv1d or isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
