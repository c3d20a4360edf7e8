"""Weight clipping: weights of your choice stay within a bound, in every step.

    w  <-  min(max(w, -bound), bound)       after each optimizer step

Saves: attention and output layers whose weights drift away; critics of WGAN; formats with a narrow range
Costs: one pass over the chosen weights an optimizer step
Source: Arjovsky et al. (2017), https://arxiv.org/abs/1701.07875; Elsayed et al. (2024), https://arxiv.org/abs/2407.01704
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.declaration import Phase, Report, held
from lit_efficient.errors import check_number, refusal
from lit_efficient.mechanisms.averages.weights import local
from lit_efficient.surgery import match_parameters, name_pattern
from lit_efficient.technique import Technique


def clip_weight_(weight: Tensor, bound: float) -> Tensor:
    """Bring all elements of ``weight`` into [-bound, bound], in place, of a DTensor those of this process.

    A bound that the weight's format lacks is the next one below that it has.
    """
    nearest = torch.tensor(bound, dtype=weight.dtype, device="cpu")
    most = torch.nextafter(nearest, torch.zeros_like(nearest)) if nearest.item() > bound else nearest
    local(weight.detach()).clamp_(-most.item(), most.item())
    return weight


class WeightClipping(Technique):
    """Clamp the weights that match, and that the optimizer steps, after each step.

    Averages (`EMA`) are of the clipped weights. Beside adapters what trains is clipped, not the sum that a layer uses.

    Args:
        bound: The largest magnitude of a weight, above 0.
        targets: Regular expressions for the ends of names of parameters, or of modules that hold them.

    Raises:
        ConfigurationError: For an argument out of range, and a pattern that matches nothing that trains.
        ConflictError: With FSDP1 and DeepSpeed, which step other tensors than the module's parameters.
    """

    phase = Phase.CONSTRAIN
    helps: ClassVar[dict[str, tuple[int, str]]] = {"safety": (0, "chosen weights stay within a bound")}

    def __init__(self, bound: float, targets: Sequence[str] = ("weight",)) -> None:
        super().__init__()
        check_number("WeightClipping", "bound", bound, above=0)
        if isinstance(targets, str) or not targets:
            raise refusal("WeightClipping", "targets", "a list of regular expressions", targets)
        for pattern in targets:
            name_pattern(pattern, "WeightClipping: targets")
        self.bound, self.targets = bound, tuple(targets)
        self._names: list[str] | None = None  # of what matches, once a fit has stepped

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
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
            f"{len(found)} tensors of weights, {count:,} parameters, stay in [-{self.bound:g}, {self.bound:g}]",
            tuple(name for name, _ in found),
            count,
        )

    def _matches(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """What trains, now or later in the run."""
        later = {module.get_parameter(name) for name in held(module)}
        return match_parameters(
            module, self.targets, who="WeightClipping", where=lambda p: p.requires_grad or p in later
        )
