"""A new head: swap the last layer of a trained network for one with other outputs, and start with it alone.

    y = W h + b,    W [num_outputs, width] ~ N(0, std^2), b = 0, under the names of the old ones

Saves: with the rest frozen all gradients and optimizer states but the head's, and the backward pass below it
Costs: the old head's weights; alone, a network whose features do not change: add GradualUnfreezing or LoRA
Source: Razavian et al. (2014), https://arxiv.org/abs/1403.6382; head first, then the rest: Howard and Ruder (2018),
    https://arxiv.org/abs/1801.06146
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_efficient.application.checkpoints import CheckpointHooks
from lit_efficient.application.ledger import reports_of
from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import CheckpointError, ConfigurationError, check_number
from lit_efficient.mechanisms.adapters.base import added_names, has_frozen_base
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.mechanisms.blocks.freezing import NewLayer, WideLayer, hold, release
from lit_efficient.surgery import count, inputs_first, match_modules, mix_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

_NAMES = ("score", "classifier", "fc", "head", "lm_head")  # what transformers, timm and most others call it


def replace_head(module: nn.Module, num_outputs: int, at: str = "auto", *, std: float = 0.02, seed: int = 0) -> str:
    """Give the last layer of ``module`` new weights for ``num_outputs`` outputs, in place; return its dotted name.

    The layer stays the same object under the same name, with its device, its format, and a bias if it had one; in a run
    in ``bf16-true`` it is float32, or it would hardly learn. A weight that was tied to an embedding no longer is.
    ``num_labels`` and ``num_classes`` of the modules around it follow.

    Args:
        module: A network that holds its pretrained weights already.
        num_outputs: Outputs of the new layer, at least 1.
        at: ``auto`` (see :func:`find_head`), or a regular expression for the end of the layer's dotted name.
        std: Standard deviation of the new weights, at least 0; biases are 0.
        seed: Seed of the new weights; no global generator is used.

    Raises:
        ConfigurationError: For an argument out of range, and if there is no such layer, or more than one.
    """
    _check(num_outputs, std)
    name = find_head(module, at)
    layer: Any = module.get_submodule(name)
    if layer.weight.device.type == "meta":
        raise ConfigurationError(f"ReplaceHead: {name!r} is on the meta device: give the network its weights first")
    old = outputs_of(layer)
    shape = list(layer.weight.shape)
    shape[1 if inputs_first(layer) else 0] = num_outputs
    generator = torch.Generator().manual_seed(seed)
    wide = torch.get_default_dtype().itemsize < torch.float32.itemsize  # of a run in bf16-true, which would cast it
    values = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32) * std
    layer.weight = _parameter(values, layer.weight, wide)
    if layer.bias is not None:
        layer.bias = _parameter(torch.zeros(num_outputs, dtype=torch.float32), layer.bias, wide)
    setattr(layer, _size_attribute(layer), num_outputs)
    mix_in(layer, WideLayer if wide else NewLayer)
    _tell(module, name, old, num_outputs)
    return name


def find_head(module: nn.Module, at: str = "auto") -> str:
    """Dotted name of the last layer: ``nn.Linear``, ``nn.Conv2d`` of 1 x 1, or GPT-2's ``Conv1D``.

    With ``auto`` the first of these decides: what a timm model's ``get_classifier`` returns; a layer called ``score``,
    ``classifier``, ``fc``, ``head`` or ``lm_head``, or the last one inside a module called so; the layer that is
    defined last of all that have parameters. Repeated blocks are never looked into.

    Args:
        module: Any module.
        at: ``auto``, or a regular expression for the end of the layer's dotted name.

    Raises:
        ConfigurationError: If there is no such layer, or more than one; the message lists the candidates.
    """
    if at != "auto":
        found = [name for name, _ in match_modules(module, [at], who="ReplaceHead: at", where=_is_layer)]
        return _only(found, f"{at!r} matches", module)
    outside = _outside_blocks(module)
    layers = {name: part for name, part in outside.items() if _is_layer(part)}
    getters: list[Any] = [getattr(part, "get_classifier", None) for part in outside.values()]
    classifiers = [getter() for getter in getters if getter is not None]
    if classifiers:
        chosen = classifiers[0] if isinstance(classifiers[0], tuple | list) else [classifiers[0]]
        return _only([name for name, part in layers.items() if any(part is c for c in chosen)], "timm names", module)
    named = [name for name in outside if name.rpartition(".")[2] in _NAMES]
    inside = [[layer for layer in layers if f"{layer}.".startswith(f"{name}.")][-1:] for name in named]
    heads = list(dict.fromkeys(layer for found in inside for layer in found))
    if not heads:
        with_parameters = [name for name, part in module.named_modules() if any(True for _ in part.parameters(False))]
        heads = [name for name in with_parameters[-1:] if name in layers]
    return _only(heads, "the network has", module)


def outputs_of(layer: nn.Module) -> int:
    """Number of outputs of a linear layer of any kind."""
    return int(getattr(layer, _size_attribute(layer)))


class ReplaceHead(OptimizerHooks, CheckpointHooks, Technique):
    """Swap the network's last layer for a new one with ``num_outputs`` outputs, and train it alone.

    Pretrained weights must be loaded before: in ``__init__``, ``setup`` or ``configure_model`` of the module. Then all
    other parameters are frozen for the fit; with GradualUnfreezing they thaw downwards from the head, and with adapters
    (LoRA, IA3) the head and the adapters train together. After the fit ``requires_grad`` is as it was before.

    Args:
        num_outputs: Outputs of the new layer, at least 1.
        at: ``auto`` finds the last layer, or raises and lists the candidates; otherwise a regular expression for the
            end of its dotted name.
        std: Standard deviation of the new weights, at least 0; 0 starts from equal outputs.
        seed: Seed of the new weights.

    Raises:
        ConfigurationError: For an argument out of range, without such a layer or with more than one, and if the
            optimizer does not hold the new weights.
        CheckpointError: For a checkpoint whose head has other shapes.
    """

    phase = Phase.ARCHITECTURE
    traits = frozenset({Trait.REFUSES_EARLY})
    alters = ("weights",)
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "a pretrained network with a head for other classes")}

    def __init__(self, num_outputs: int, at: str = "auto", std: float = 0.02, seed: int = 0) -> None:
        super().__init__()
        _check(num_outputs, std)
        self.num_outputs = num_outputs
        self.at = at
        self.std = std
        self.seed = seed
        self._trained = False

    def transform(self, module: nn.Module) -> Report:
        name = find_head(module, self.at)
        before = outputs_of(module.get_submodule(name))
        replace_head(module, self.num_outputs, name.replace(".", r"\."), std=self.std, seed=self.seed)
        head = module.get_submodule(name)
        return Report(
            f"{name}: {self.num_outputs} new outputs instead of {before}, {count(head.parameters()):,} parameters",
            modules=(name,),
            parameters=count(head.parameters()),
        )

    def prepare_parameters(self, module: nn.Module) -> None:
        release(module)
        heads = [part for part in module.modules() if isinstance(part, NewLayer)]
        own = {id(p) for head in heads for p in head.parameters()}
        added = added_names(module, [name for name, _ in module.named_parameters()])
        for name, parameter in module.named_parameters():
            if id(parameter) in own:
                if name in added:
                    raise ConfigurationError(
                        f"ReplaceHead: the new head has an adapter ({name!r}), but it trains whole: leave it out "
                        "of targets"
                    )
                parameter.requires_grad_(True)
        if not has_frozen_base(module):
            hold(module, [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in own])

    def trains(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for part in module.modules() if isinstance(part, NewLayer) for p in part.parameters()]

    adapters = trains

    def read_checkpoint(self, checkpoint: Mapping[str, Any], module: Any) -> None:
        for name, part in module.named_modules():
            if not isinstance(part, NewLayer):
                continue
            for key, own in part.named_parameters(prefix=name):
                given = checkpoint.get("state_dict", {}).get(key)  # shards are compared as they are read
                if given is not None and given.shape != own.shape:
                    raise CheckpointError(
                        f"the checkpoint's {key!r} has the shape {list(given.shape)}, and the head that ReplaceHead "
                        f"made {list(own.shape)}. To start from that file load its weights before techniques act: "
                        "in __init__, setup or configure_model of the module, not by ckpt_path"
                    )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._trained = True

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Say what the head changed, if the module's own code fails on its first outputs."""
        head = next((part for part in pl_module.modules() if isinstance(part, NewLayer)), None)
        foreign = isinstance(exception, Exception) and not isinstance(exception, ConfigurationError)
        if head is not None and not self._trained and foreign:
            exception.add_note(
                f"ReplaceHead: {reports_of(pl_module)['ReplaceHead'].summary}. If code of {type(pl_module).__name__} "
                "counts on the old number (a reshape, a loss, a metric), take the number from the head or an argument"
            )
        super().on_exception(trainer, pl_module, exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        release(pl_module)
        super().teardown(trainer, pl_module, stage)


def _check(num_outputs: int, std: float) -> None:
    check_number("ReplaceHead", "num_outputs", num_outputs, least=1, whole=True)
    check_number("ReplaceHead", "std", std, least=0)


def _is_layer(part: nn.Module) -> bool:
    """Exact classes: a subclass may do more with its weight than multiply by it."""
    bases = [cls for cls in type(part).__mro__ if "mixed_from" not in vars(cls) and cls not in WideLayer.__mro__]
    if bases[0] is nn.Conv2d:
        conv: Any = part
        return conv.kernel_size == (1, 1) and conv.groups == 1
    return bases[0] is nn.Linear or inputs_first(part)


def _size_attribute(layer: nn.Module) -> str:
    if inputs_first(layer):
        return "nf"
    return "out_channels" if isinstance(layer, nn.Conv2d) else "out_features"


def _parameter(values: Tensor, like: Tensor, wide: bool) -> nn.Parameter:
    return nn.Parameter(values.to(like.device, torch.promote_types(like.dtype, torch.float32) if wide else like.dtype))


def _outside_blocks(module: nn.Module) -> dict[str, nn.Module]:
    try:
        blocks = [name for name, _ in find_blocks(module, who="ReplaceHead", every=True)]
    except ConfigurationError:  # a network without repeated blocks
        blocks = []
    inside = tuple(f"{name}." for name in blocks)
    return {name: part for name, part in module.named_modules() if not f"{name}.".startswith(inside or ("\0",))}


def _only(found: list[str], complaint: str, module: nn.Module) -> str:
    if len(found) == 1:
        return found[0]
    candidates = found or [name for name, part in _outside_blocks(module).items() if _is_layer(part)]
    raise ConfigurationError(
        f"ReplaceHead: {complaint} {'no' if not found else len(found)} last layers that could be replaced; name one "
        f"with at=..., for example: {', '.join(candidates[-8:]) or 'there is no Linear, 1 x 1 Conv2d or Conv1D'}"
    )


def _tell(module: nn.Module, name: str, old: int, new: int) -> None:
    """Let the modules around the head, and their configs, know its size: losses and metrics read it there."""
    owner = name
    while owner:
        owner = owner.rpartition(".")[0]
        part: Any = module.get_submodule(owner)
        for holder in (part, getattr(part, "config", None)):
            for attribute in ("num_labels", "num_classes"):
                value = getattr(holder, attribute, None)
                own = getattr(type(holder), attribute, None)
                if isinstance(own, property) and own.fset is None:
                    continue  # it is derived from something else
                if isinstance(value, int) and value == old:
                    setattr(holder, attribute, new)
