"""Clip gradients by norm or value where ``gradient_clip_val`` cannot: manual optimization, several optimizers.

    by norm:   g  <-  g * min(1, max_norm / ||g||)       ||g|| of all gradients of an optimizer together
    by value:  g  <-  min(max(g, -max_value), max_value)

Saves: runs in which one bad batch would ruin the weights. It also works in modules that step by hand, with sparse
    gradients, and if only some parameters are sharded, where ``gradient_clip_val`` raises or fails
Costs: a norm and a product over the gradients per optimizer step; the host waits for nothing
Source: Pascanu et al. (2013), https://arxiv.org/abs/1211.5063
"""

from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.distributed.gradient_norm import gradient_norm
from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.mechanisms.averages.weights import local
from lit_efficient.mechanisms.clipping import ClipsGradients
from lit_efficient.traits import Trait


class GradientClipping(ClipsGradients):
    """Clip the gradients of each optimizer by their common norm, by value, or by value and then by norm.

    A norm is computed over all gradients of one optimizer, over all processes that hold shards of them. Norms of 16-bit
    gradients are summed in float32.

    Args:
        max_norm: Largest norm of an optimizer's gradients, above 0. ``None``: clip by value only.
        max_value: Largest magnitude of a gradient's element, above 0. ``None``: clip by norm only.

    Raises:
        ConfigurationError: For an argument out of range, and if both are ``None``.
        ConflictError: With ``gradient_clip_val`` or the module's own clipping; with FSDP1 and DeepSpeed; by norm with
            `OptimizerInBackward`.
    """

    phase = Phase.CLIP
    traits = frozenset({Trait.CLIPS, Trait.NEEDS_ALL_GRADIENTS})
    needs = ("max_norm",)
    conflicts = {
        "OptimizerInBackward": "it frees each gradient before the next one exists: use gradient_clip_val with "
        "gradient_clip_algorithm='value', or AdaptiveGradientClipping"
    }
    helps = {"safety": (6, "clips where gradient_clip_val is refused")}

    def __init__(self, max_norm: float | None = None, max_value: float | None = None) -> None:
        super().__init__()
        check_number("GradientClipping", "max_norm", max_norm, above=0, null=True)
        check_number("GradientClipping", "max_value", max_value, above=0, null=True)
        if max_norm is None and max_value is None:
            raise ConfigurationError("GradientClipping: both max_norm and max_value are null: set one of them")
        self.max_norm = max_norm
        self.max_value = max_value

    def clip(self, gradients: dict[Tensor, Tensor]) -> None:
        values = [gradient.values() if gradient.is_sparse else gradient for gradient in gradients.values()]
        if self.max_value is not None:
            for value in values:
                local(value).clamp_(-self.max_value, self.max_value)
        if self.max_norm is None:
            return
        norm = gradient_norm(values)
        if norm is not None:
            scale = (self.max_norm / norm).clamp(max=1.0)
            for value in map(local, values):
                value.mul_(scale.to(value.device))

    def describe(self, module: nn.Module) -> Report:
        limits = []
        if self.max_norm is not None:
            limits.append(f"norm {self.max_norm:g}")
        if self.max_value is not None:
            limits.append(f"value {self.max_value:g}")
        return Report("gradients clipped by " + " and ".join(limits))
