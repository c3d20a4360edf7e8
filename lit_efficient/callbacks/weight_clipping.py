"""Weight clipping: chosen weights are clamped to a range after each optimizer step.

    w  <-  min(max(w, -bound), bound)       after each optimizer step

Saves: runs in which weights of attention or output layers grow without bound; needed by critics of WGANs and by number
    formats with a narrow range
Costs: one pass over the chosen weights per optimizer step
Source: Arjovsky et al. (2017), https://arxiv.org/abs/1701.07875; Elsayed et al. (2024), https://arxiv.org/abs/2407.01704
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.declaration import Phase, Report, held
from lit_efficient.errors import check_list, check_number
from lit_efficient.mechanisms.averages.weights import local
from lit_efficient.surgery import match_parameters, name_pattern
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


def clip_weight_(weight: Tensor, bound: float) -> Tensor:
    """Clamp all elements of ``weight`` to [-bound, bound], in place.

    Args:
        weight: Tensor of any shape. Of a DTensor the local shard is clamped.
        bound: Largest magnitude. It is rounded down to the next number of the weight's dtype.
    """
    largest = torch.tensor(bound, dtype=weight.dtype, device="cpu")
    if largest.item() > bound:
        largest = torch.nextafter(largest, torch.zeros_like(largest))
    local(weight.detach()).clamp_(-largest.item(), largest.item())
    return weight


class WeightClipping(Technique):
    """Clamp the trained weights whose names match, after each optimizer step.

    Averages (`EMA`) are computed from the clamped weights. With adapters the adapters' weights are clamped, and not the
    sum of base and adapter that a layer uses.

    Args:
        bound: Largest magnitude of a weight, above 0.
        targets: Regular expressions for the ends of names of parameters or modules.

    Raises:
        ConfigurationError: For an argument out of range, or a pattern that matches no parameter that trains.
        ConflictError: With FSDP1 and DeepSpeed, whose optimizers step other tensors than the module's parameters.
    """

    phase = Phase.CONSTRAIN
    traits = frozenset({Trait.FOLLOWS_PARAMETERS})
    helps: ClassVar[dict[str, tuple[int, str]]] = {"safety": (0, "chosen weights stay within a bound")}

    def __init__(self, bound: float, targets: Sequence[str] = ("weight",)) -> None:
        super().__init__()
        check_number("WeightClipping", "bound", bound, above=0)
        check_list("WeightClipping", "targets", targets, "a list of regular expressions")
        for pattern in targets:
            name_pattern(pattern, "WeightClipping: targets")
        self.bound = bound
        self.targets = tuple(targets)
        self._names: list[str] | None = None  # names of the matching parameters, from the first step on

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._names = None

    def after_step(self, optimizer: Optimizer, module: nn.Module) -> None:
        if self._names is None:
            self._names = [name for name, _ in self._matches(module)]
        stepped = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        for parameter in map(module.get_parameter, self._names):
            if parameter in stepped:
                clip_weight_(parameter, self.bound)

    def describe(self, module: nn.Module) -> Report:
        found = self._matches(module)
        count = sum(p.numel() for _, p in found)
        return Report(
            f"{len(found)} tensors, {count:,} parameters, are clamped to [-{self.bound:g}, {self.bound:g}]",
            modules=tuple(name for name, _ in found),
            parameters=count,
        )

    def _matches(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Return the matching parameters that train now or later in the run, by name."""
        trained_later = {module.get_parameter(name) for name in held(module)}

        def trains(p: nn.Parameter) -> bool:
            return p.requires_grad or p in trained_later

        return match_parameters(module, self.targets, who="WeightClipping", where=trains)
