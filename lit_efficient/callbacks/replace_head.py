"""A new head: replace the last layer of a pretrained network by one with other outputs, and train only this layer.

    y = W h + b,    W [num_outputs, width] ~ N(0, std^2), b = 0, under the names of the old parameters

Saves: gradients and optimizer states of all other layers, which are frozen, and the backward pass below the head
Costs: the weights of the old head; features that do not adapt, unless GradualUnfreezing or LoRA is added
Source: Razavian et al. (2014), https://arxiv.org/abs/1403.6382; head first, then the rest: Howard and Ruder (2018),
    https://arxiv.org/abs/1801.06146
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lit_efficient.application.checkpoints import CheckpointHooks
from lit_efficient.application.ledger import reports_of
from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import CAUSE, CheckpointError, ConfigurationError, check_number
from lit_efficient.mechanisms.adapters.base import added_names, has_frozen_base
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.mechanisms.blocks.freezing import hold, release
from lit_efficient.surgery import NewLayer, WideLayer, count, inputs_first, match_modules, mix_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

_NAMES = ("score", "classifier", "fc", "head", "lm_head")  # names in transformers, timm and most other libraries


def replace_head(module: nn.Module, num_outputs: int, at: str = "auto", *, std: float = 0.02, seed: int = 0) -> str:
    """Give the last layer of ``module`` new weights for ``num_outputs`` outputs, in place.

    The layer keeps its identity, its name, its device and its dtype, and gets a new bias if it had one. If the default
    dtype is narrower than float32, as with ``precision: bf16-true``, it becomes float32, because it would otherwise
    learn poorly. A weight that was tied to an embedding is no longer tied. ``num_labels`` and ``num_classes`` of the
    enclosing modules are updated.

    Args:
        module: Network with its pretrained weights.
        num_outputs: Number of outputs of the new layer, at least 1.
        at: ``auto`` (see :func:`find_head`), or a regular expression for the end of the layer's dotted name.
        std: Standard deviation of the new weights, at least 0. Biases are 0.
        seed: Seed of the new weights. No global generator is used.

    Returns:
        The dotted name of the layer.

    Raises:
        ConfigurationError: For an argument out of range, or if there are no or several such layers.
    """
    _check(num_outputs, std)
    name = find_head(module, at)
    layer: Any = module.get_submodule(name)
    if layer.weight.device.type == "meta":
        raise ConfigurationError(f"ReplaceHead: {name!r} is on the meta device. Load the network's weights first")
    old = outputs_of(layer)
    shape = list(layer.weight.shape)
    output_dimension = 1 if inputs_first(layer) else 0
    shape[output_dimension] = num_outputs
    generator = torch.Generator().manual_seed(seed)
    wide = torch.get_default_dtype().itemsize < torch.float32.itemsize  # with precision: bf16-true
    values = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32) * std
    layer.weight = _parameter(values, layer.weight, wide)
    if layer.bias is not None:
        layer.bias = _parameter(torch.zeros(num_outputs, dtype=torch.float32), layer.bias, wide)
    setattr(layer, _size_attribute(layer), num_outputs)
    mix_in(layer, WideLayer if wide else NewLayer)
    _update_sizes(module, name, old, num_outputs)
    return name


def find_head(module: nn.Module, at: str = "auto") -> str:
    """Return the dotted name of the last layer: ``nn.Linear``, ``nn.Conv2d`` of 1 x 1, or GPT-2's ``Conv1D``.

    With ``auto`` the first of these rules that applies decides. Layers in repeated blocks are never chosen.

    1. The layer that a timm model's ``get_classifier`` returns.
    2. The layer with the name ``score``, ``classifier``, ``fc``, ``head`` or ``lm_head``, or the last layer inside a
       module with such a name.
    3. The last module with parameters, if it is such a layer.

    Args:
        module: Any module.
        at: ``auto``, or a regular expression for the end of the layer's dotted name.

    Raises:
        ConfigurationError: If there are no or several such layers. The message lists the candidates.
    """
    if at != "auto":
        matches = [name for name, _ in match_modules(module, [at], who="ReplaceHead: at", where=_is_layer)]
        return _only(matches, f"{at!r} matches", module)
    outside = _outside_blocks(module)
    layers = {name: part for name, part in outside.items() if _is_layer(part)}
    getters: list[Any] = [getattr(part, "get_classifier", None) for part in outside.values()]
    classifiers = [getter() for getter in getters if getter is not None]
    if classifiers:
        if isinstance(classifiers[0], tuple | list):
            chosen = classifiers[0]
        else:
            chosen = [classifiers[0]]
        return _only([name for name, part in layers.items() if any(part is c for c in chosen)], "timm names", module)
    heads: list[str] = []
    for name in outside:
        if name.rpartition(".")[2] in _NAMES:
            inside = [layer for layer in layers if f"{layer}.".startswith(f"{name}.")]
            if inside and inside[-1] not in heads:
                heads.append(inside[-1])
    if not heads:
        with_parameters = [name for name, part in module.named_modules() if any(True for _ in part.parameters(False))]
        heads = [name for name in with_parameters[-1:] if name in layers]
    return _only(heads, "the network has", module)


def outputs_of(layer: nn.Module) -> int:
    """Return the number of outputs of a layer that :func:`find_head` may return."""
    return int(getattr(layer, _size_attribute(layer)))


class ReplaceHead(OptimizerHooks, CheckpointHooks, Technique):
    """Replace the network's last layer by a new one with ``num_outputs`` outputs, and freeze all other layers.

    Pretrained weights must be loaded before, in ``__init__``, ``setup`` or ``configure_model`` of the module. All other
    parameters are frozen during the fit. With GradualUnfreezing they are unfrozen from the head downwards. With
    adapters (LoRA, IA3) the head and the adapters train together. The fit restores ``requires_grad`` at its end.

    Args:
        num_outputs: Number of outputs of the new layer, at least 1.
        at: ``auto`` finds the last layer, or raises an error that lists the candidates. Otherwise a regular expression
            for the end of the layer's dotted name.
        std: Standard deviation of the new weights, at least 0. With 0 all outputs are equal at the start.
        seed: Seed of the new weights.

    Raises:
        ConfigurationError: For an argument out of range, if there are no or several such layers, or if the optimizer
            does not hold the new weights.
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
                        f"ReplaceHead: the new head has an adapter ({name!r}), but all its weights train. Leave the "
                        "head out of targets"
                    )
                parameter.requires_grad_(True)
        if not has_frozen_base(module):
            hold(module, [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in own])

    def trains(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for part in module.modules() if isinstance(part, NewLayer) for p in part.parameters()]

    adapters = trains

    def read_checkpoint(self, checkpoint: Mapping[str, Any], module: nn.Module) -> None:
        for name, part in module.named_modules():
            if not isinstance(part, NewLayer):
                continue
            for key, own in part.named_parameters(prefix=name):
                given = checkpoint.get("state_dict", {}).get(
                    key
                )  # the shapes of shards are compared when they are read
                if given is not None and given.shape != own.shape:
                    raise CheckpointError(
                        f"{key!r} has the shape {list(given.shape)} in the checkpoint, but {list(own.shape)} in the "
                        "new head of ReplaceHead. To start from that file, load its weights in __init__, setup or "
                        "configure_model of the module, before techniques act, and not with ckpt_path"
                    )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self._trained = True

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Add a note about the new head to an error of the module's own code in the first step."""
        head = next((part for part in pl_module.modules() if isinstance(part, NewLayer)), None)
        of_module = isinstance(exception, Exception) and not isinstance(exception, ConfigurationError)
        if head is not None and not self._trained and of_module:
            summary = reports_of(pl_module)["ReplaceHead"].summary
            if isinstance(exception, IndexError) and "out of bounds" in str(exception):  # as torch's losses say it
                exception.add_note(
                    f"{CAUSE}ReplaceHead: {summary}, but the batch has targets for more outputs. Set num_outputs to "
                    "the number of classes, or for a language model to the size of its vocabulary"
                )
            else:
                exception.add_note(
                    f"ReplaceHead: {summary}. If code of {type(pl_module).__name__} assumes the old number (a reshape, "
                    "a loss, a metric), take the number from the head or an argument"
                )
        super().on_exception(trainer, pl_module, exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        release(pl_module)
        super().teardown(trainer, pl_module, stage)


def _check(num_outputs: int, std: float) -> None:
    check_number("ReplaceHead", "num_outputs", num_outputs, least=1, whole=True)
    check_number("ReplaceHead", "std", std, least=0)


def _is_layer(part: nn.Module) -> bool:
    """Return whether the module is a linear layer or a 1 x 1 convolution."""
    # Subclasses of other libraries are excluded, because they may do more with the weight than multiply by it.
    bases = [cls for cls in type(part).__mro__ if "mixed_from" not in vars(cls) and cls not in WideLayer.__mro__]
    if bases[0] is nn.Conv2d:
        conv: Any = part
        return conv.kernel_size == (1, 1) and conv.groups == 1
    return bases[0] is nn.Linear or inputs_first(part)


def _size_attribute(layer: nn.Module) -> str:
    if inputs_first(layer):
        return "nf"
    if isinstance(layer, nn.Conv2d):
        return "out_channels"
    return "out_features"


def _parameter(values: Tensor, like: Tensor, wide: bool) -> nn.Parameter:
    dtype = like.dtype
    if wide:
        dtype = torch.promote_types(like.dtype, torch.float32)
    return nn.Parameter(values.to(like.device, dtype))


def _outside_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return all modules by name, except repeated blocks and the modules in them."""
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
    if candidates:
        advice = f"Name one with at=..., for example: {', '.join(candidates[-8:])}"
    else:
        advice = "There is no Linear, 1 x 1 Conv2d or Conv1D outside of repeated blocks"
    raise ConfigurationError(
        f"ReplaceHead: {complaint} {len(found) or 'no'} last layers that could be replaced. {advice}"
    )


def _update_sizes(module: nn.Module, name: str, old: int, new: int) -> None:
    """Update the number of outputs in the enclosing modules and their configs, where losses and metrics read it."""
    owner = name
    while owner:
        owner = owner.rpartition(".")[0]
        part = module.get_submodule(owner)
        for holder in (part, getattr(part, "config", None)):
            for attribute in ("num_labels", "num_classes"):
                value = getattr(holder, attribute, None)
                own = getattr(type(holder), attribute, None)
                if isinstance(own, property) and own.fset is None:
                    continue  # derived from another attribute
                if isinstance(value, int) and value == old:
                    setattr(holder, attribute, new)
