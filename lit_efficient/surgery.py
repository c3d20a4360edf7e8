"""Change a network in place: every parameter keeps its module and its name.

The functions work on plain modules and optimizers, without Lightning:

* :func:`mix_in` changes a module's behaviour by a class in front of its own. Deep copies, pickles, FSDP2 and
  ``isinstance`` still work, and no key of ``state_dict`` changes.
* :func:`match_modules` and :func:`match_parameters` select by name, and raise if nothing matches.
* :func:`become` turns an optimizer into one of another class. Schedulers that refer to it stay valid.
* :func:`in_autocast_dtype` does to the input of a matrix product what autocast does.
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

from lit_efficient.errors import ConfigurationError, check_list, listed, refusal
from lit_efficient.internals.contents import contents
from lit_efficient.internals.torch_modules import StaysFloat32
from lit_efficient.internals.torch_optimizers import HOOKS, is_counted, mark_counted, mark_stepped
from lit_efficient.internals.torch_shards import is_sharded as is_sharded  # noqa: PLC0414 (also a name of this module)
from lit_efficient.internals.torch_shards import local as local  # noqa: PLC0414
from lit_efficient.internals.torch_shards import reshard as reshard  # noqa: PLC0414


def mix_in(module: nn.Module, mixin: type, **attributes: object) -> None:
    """Put ``mixin`` in front of the class of ``module``, in place, and set ``attributes`` on the module.

    The class keeps its name, so that policies by class name (FSDP wrapping, ``_no_split_modules``) still find it.
    Mixing in the same class again only updates the attributes.

    Args:
        module: Any module. Its parameters, buffers, hooks and training mode stay.
        mixin: Class whose methods call ``super()``. It should hold no parameters.
        **attributes: Values that the methods of the mix-in read from ``self``.

    Raises:
        TypeError: If ``mixin`` defines ``__init__``, which would never run.
    """
    if "__init__" in vars(mixin):
        raise TypeError(f"mix_in: {mixin.__name__}.__init__ would never run; pass attributes instead")
    if not isinstance(module, mixin):
        cls: Any = type(module)
        module.__class__ = _mixed(mixin, cls)
    for name, value in attributes.items():
        setattr(module, name, value)


def mix_out(module: nn.Module, mixin: type) -> None:
    """Remove a class that :func:`mix_in` put in front of the class of ``module``, if it is there."""
    fronts, cls = _fronts(type(module))
    module.__class__ = _stacked([front for front in fronts if not issubclass(front, mixin)], cls)


def mix_under(module: nn.Module, mixin: type, **attributes: object) -> None:
    """Put ``mixin`` right in front of the module's own class, behind classes that were mixed in before."""
    fronts, cls = _fronts(type(module))
    if mixin not in fronts:
        module.__class__ = _stacked([*fronts, mixin], cls)
    for name, value in attributes.items():
        setattr(module, name, value)


def unmixed(module: nn.Module) -> type:
    """Return the class that a module had before :func:`mix_in`."""
    return _fronts(type(module))[1]


def class_names(modules: Iterable[nn.Module]) -> str:
    """Return the names of the classes of modules before :func:`mix_in`, sorted and joined by commas."""
    return ", ".join(sorted({unmixed(module).__name__ for module in modules}))


def _fronts(cls: Any) -> tuple[list[type], Any]:
    """Return the classes that :func:`mix_in` put in front of a class, the foremost first, and the class itself."""
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
    """Return ``tensor`` on ``device`` and in ``dtype``. The host waits only for copies to the CPU, which it will read.

    A copy to a GPU without ``non_blocking`` would wait until the GPU has finished all earlier work.
    """
    return tensor.to(device, dtype, non_blocking=device is not None and torch.device(device).type != "cpu")


def weightless(tensor: Tensor) -> Tensor:
    """Return a parameter or buffer of the same shape on the meta device, without values."""
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, tensor.requires_grad)
    return empty


def computed(module: nn.Module) -> dict[int, object]:
    """Return a memo for ``copy.deepcopy`` with the values of tensors that a module has computed from its parameters.

    Layers under ``torch.nn.utils.weight_norm`` hold such tensors, and torch refuses to copy them.
    """
    held = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    return {id(tensor): tensor.detach().clone() for tensor in held if not tensor.is_leaf}


def home_of(weight: Tensor) -> torch.device:
    """Return the device for tensors that belong to a weight: its own, or the default device if it is on meta."""
    if weight.is_meta:
        return torch.get_default_device()
    return weight.device


def memory_of(tensor: object) -> object:
    """Return a key that is equal for tensors with the same memory, such as the entries of a tied weight."""
    if is_sharded(tensor):
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    if not isinstance(tensor, Tensor) or tensor.numel() == 0:
        return id(tensor)
    return (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)


@functools.cache
def _mixed(mixin: type, base: type) -> type:
    """Return the class ``mixin(base)``, created once for each pair, so that equal modules have equal classes."""
    namespace: dict[str, object] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    namespace |= {"mixed_from": (mixin, base), "__reduce_ex__": _reduce_mixed}
    if _takes_anything(vars(mixin).get("forward")):
        namespace["forward"] = _with_signature(mixin, base)
    return type(base.__name__, (mixin, base), namespace)


def _takes_anything(forward: Any) -> bool:
    """Return whether a signature is ``(self, *args, **kwargs)``."""
    if forward is None:
        return False
    kinds = [parameter.kind for parameter in inspect.signature(forward).parameters.values()][1:]
    return kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]


def _with_signature(mixin: Any, base: Any) -> Callable[..., object]:
    """Return the mix-in's ``forward`` with the signature of the class's own, which text generation inspects."""

    def forward(self: nn.Module, *args: object, **kwargs: object) -> Any:
        return mixin.forward(self, *args, **kwargs)

    forward.__doc__ = base.forward.__doc__
    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    return forward


def _reduce_mixed(self: nn.Module, protocol: Any) -> str | tuple[object, ...]:
    """Pickle the names of the mixed classes: the class that they form cannot be imported."""
    mixins: list[type] = []
    base: Any = type(self)
    while "mixed_from" in vars(base):
        mixin, base = base.mixed_from
        mixins.append(mixin)
    if not mixins:  # a class made on top of ours, for example by FSDP2
        return object.__reduce_ex__(self, protocol)
    return _new_mixed, (base, *reversed(mixins)), self.__getstate__()  # without compiled code


def _new_mixed(base: Any, *mixins: type) -> nn.Module:
    for mixin in mixins:
        base = _mixed(mixin, base)
    return base.__new__(base)


class NewLayer(nn.Module):
    """Mix-in of a layer with new weights. All of them train, without quantisation and adapters."""


class UnusedPart(nn.Module):
    """Mix-in of a part of a network that the task does not call. It gets no adapters."""


class WideLayer(StaysFloat32, NewLayer):
    """Mix-in of a new layer that computes in float32 in a network of a narrower dtype."""

    float32 = ("",)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer in the dtype of ``x``."""
        own = next(self.parameters()).dtype
        if x.dtype == own or torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        y: Tensor = super().forward(x.to(own))
        return y.to(x.dtype)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast on a device, or ``None`` if autocast is off."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def in_autocast_dtype(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype in which autocast computes a matrix product, or ``x`` itself if autocast is off.

    Like autocast, this leaves float64 and integers as they are.
    """
    dtype = autocast_dtype(x.device)
    if dtype is None or x.dtype == torch.float64 or not x.is_floating_point():
        return x
    return x.to(dtype)


def match_modules(
    root: nn.Module,
    patterns: Sequence[str],
    *,
    who: str,
    kind: type | tuple[type, ...] = nn.Module,
    where: Callable[[nn.Module], object] | None = None,
) -> list[tuple[str, nn.Module]]:
    """Return the modules whose dotted name matches any of ``patterns``, in definition order.

    Args:
        root: Module to search.
        patterns: Regular expressions, each matched against the end of the dotted name at a dot (``"attn"`` matches
            ``blocks.0.attn``) or against the whole name.
        who: Name of the technique, for errors.
        kind: Classes of the modules to return.
        where: Further condition on the modules to return.

    Raises:
        ConfigurationError: If a pattern is not a regular expression or matches nothing. The message lists the ends of
            the names that could match.
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
    """Return the parameters whose dotted name, or that of a module around them, matches any of ``patterns``.

    A tied parameter matches by any of its names and is returned once, under the first.

    Args:
        root: Module to search.
        patterns: Regular expressions as in :func:`match_modules`: ``"norm"`` matches all of ``blocks.0.norm``, and
            ``bias`` each bias.
        who: Name of the technique, for errors.
        where: Further condition on the parameters to return.

    Raises:
        ConfigurationError: If a pattern is not a regular expression or matches nothing.
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
    """Return the compiled pattern for the end of a dotted name, to be used with ``fullmatch``.

    Raises:
        ConfigurationError: If it is not a regular expression.
    """
    if not isinstance(pattern, str):
        raise refusal(who, "a pattern", "a text, for the end of a dotted name", pattern)
    try:
        return re.compile(rf"(?:.*\.)?(?:{pattern})")
    except re.error as error:
        raise ConfigurationError(f"{who}: {pattern!r} is no regular expression: {error}") from error


def _matching(names: Mapping[str, Sequence[str]], patterns: Sequence[str], who: str, what: str) -> list[str]:
    """Return the keys of ``names`` with a value that a pattern matches. Each pattern must match something."""
    matched: set[str] = set()
    check_list(who, "patterns", patterns, "a pattern or a list of patterns", empty=True, text=True)
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
    """Return the distinct ends of dotted names, in order: the last part, with the part before it if it is a number.

    Example:
        >>> endings(["blocks.0.up", "blocks.1.up", "blocks.1.mlp.0"])
        ['up', 'mlp.0']
    """
    found = ((name, re.search(r"[^.]*[^.\d][^.]*(?:\.\d+)*$", name)) for name in names)
    return list(dict.fromkeys(match.group() if match else name for name, match in found))


def parents(name: str) -> Iterator[str]:
    """Yield the names of the modules around a dotted name, the nearest first, without the empty name of the root."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def expert_stacks(root: nn.Module) -> list[tuple[str, nn.Module, list[str]]]:
    """Return modules that hold the matrices of several experts in parameters [experts, ...], and their names.

    Such a module has no children with weights, and each of its parameters has one entry for each expert. Convolutions
    are left out. Quantised parameters have become layers of the same names, which have the ``shape`` of the parameter.
    """
    found = []
    for name, module in root.named_modules():
        if hasattr(module, "expert_shape"):  # our own class, which may be quantised
            found.append((name, module, ["weight"]))
            continue
        codes: list[str] = getattr(module, "quant_stacks", [])  # layers with the codes of such parameters
        own = [(key, p) for key, p in module.named_parameters(recurse=False) if not key.startswith("lora_")]
        stacks = [key for key, p in own if p.ndim == 3 and p.is_floating_point() and min(p.shape) > 1]
        if codes:
            found.append((name, module, [key for key in module.quant_order if key in codes + stacks]))
        if codes or not stacks or hasattr(module, "kernel_size"):
            continue
        alone = not any(True for child in module.children() for _ in child.parameters())
        if alone and len({p.shape[0] for _, p in own}) == 1:
            found.append((name, module, stacks))
    return found


_DROPPED_FLAGS = {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "maximize"}


def call_layers(root: nn.Module) -> None:
    """Make torch's transformer encoders in ``root`` call their layers, whose forward may have been changed.

    In evaluation without gradients they would run a fused kernel on weights such as ``linear1.weight``, and would
    ignore changed forwards silently.
    """
    for part in root.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0  # only the fused path reads it
        elif isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False  # only the fused path needs nested tensors


def become(optimizer: Optimizer, cls: type[Optimizer], **arguments: object) -> None:
    """Turn ``optimizer`` into a new ``cls`` in place, with the same groups, hyper-parameters and hooks.

    The object stays the same, so that every scheduler that refers to it stays valid.

    Args:
        optimizer: An optimizer that has not stepped yet.
        cls: The new class. Arguments that both classes have (in the signature, or in ``options``) keep their values,
            group by group.
        **arguments: Further arguments for ``cls``.

    Raises:
        ConfigurationError: If the optimizer already has state, which would be lost.
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


def _counted(step: Callable[..., object]) -> Callable[..., Any]:
    """Return ``step`` wrapped as a scheduler wraps it, to learn whether it was called before the scheduler's step."""

    @functools.wraps(step)
    def wrapper(self: Optimizer, *args: object, **kwargs: object) -> object:
        mark_stepped(self)
        return step(self, *args, **kwargs)

    mark_counted(wrapper)
    return wrapper


NEW_ROWS = "_lit_efficient_new_rows"  # attribute of a network with rows of new tokens: their ids
WAITS = "_lit_efficient_weights"  # attribute of a network that was built empty: the source of its weights


def inner_optimizer(optimizer: Optimizer) -> tuple[str, Optimizer | None]:
    """Return the optimizer that another one contains, as Lookahead and SAM do, with the name of the attribute."""
    for name, value in vars(optimizer).items():
        for held in (value, *contents(value)):
            if isinstance(held, Optimizer):
                return name, held
    return "", None


def weights_wait(root: nn.Module) -> bool:
    """Return whether ``root`` holds a network without its weights, which are read after it has been sharded."""
    return any(WAITS in part.__dict__ for part in root.modules())


def count(parameters: Iterable[nn.Parameter]) -> int:
    """Return the number of elements, with tied parameters counted once."""
    return sum({id(parameter): parameter.numel() for parameter in parameters}.values())


@contextmanager
def own_draws(seed: int | None = None) -> Iterator[None]:
    """Context with the CPU as default device, after which the state of the CPU's global generator is restored.

    Lightning calls ``configure_model`` with the run's device as the default device: modules that are built in this
    context must be moved there.

    Args:
        seed: Seed of the generator; ``None`` keeps its state.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        if seed is not None:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed those of all devices
        yield


def inputs_first(layer: nn.Module) -> bool:
    """Return whether a layer's weight is [inputs, outputs, ...], as in transposed convolutions and ``Conv1D``."""
    conv1d = any(base.__name__ == "Conv1D" and hasattr(layer, "nf") for base in type(layer).__mro__)
    return conv1d or isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
