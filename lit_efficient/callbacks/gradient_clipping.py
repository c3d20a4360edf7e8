"""Clip gradients by norm or by value, where ``gradient_clip_val`` cannot: manual optimization, several optimizers.

    by norm:   g  <-  g * min(1, max_norm / ||g||)       ||g|| of all gradients of an optimizer together
    by value:  g  <-  min(max(g, -max_value), max_value)

Saves: what one bad batch does to the weights, in modules that step by hand, with sparse gradients and some of the
    parameters in shards, too, all of which ``gradient_clip_val`` refuses or fails at
Costs: a norm and a product over the gradients an optimizer step; nothing is waited for
Source: Pascanu et al. (2013), https://arxiv.org/abs/1211.5063
"""

from typing import ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.declaration import Phase, Report
from lit_efficient.distributed.gradient_norm import gradient_norm
from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.mechanisms.averages.weights import local
from lit_efficient.mechanisms.clipping import ClipsGradients
from lit_efficient.traits import Trait


class GradientClipping(ClipsGradients):
    """Clip the gradients of each optimizer by their common norm, by value, or by value and then by norm.

    Norms are those of one optimizer's gradients, over all processes that hold shards of them; of 16 bits they are
    summed in float32.

    Args:
        max_norm: The largest norm of an optimizer's gradients, above 0; ``None`` clips by value alone.
        max_value: The largest magnitude of a gradient's element, above 0; ``None`` clips by norm alone.

    Raises:
        ConfigurationError: For an argument out of range, and if both are ``None``.
        ConflictError: Beside ``gradient_clip_val`` or the module's own clipping; with FSDP1 and DeepSpeed; by norm
            beside `OptimizerInBackward`.
    """

    phase = Phase.CLIP
    traits = frozenset({Trait.CLIPS, Trait.NEEDS_ALL_GRADIENTS})
    needs = ("max_norm",)
    conflicts: ClassVar[dict[str, str]] = {
        "OptimizerInBackward": "the gradients are never there together: use gradient_clip_val with "
        "gradient_clip_algorithm='value', or AdaptiveGradientClipping"
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {"safety": (6, "clips where gradient_clip_val is refused")}

    def __init__(self, max_norm: float | None = None, max_value: float | None = None) -> None:
        super().__init__()
        check_number("GradientClipping", "max_norm", max_norm, above=0, null=True)
        check_number("GradientClipping", "max_value", max_value, above=0, null=True)
        if max_norm is None and max_value is None:
            raise ConfigurationError("GradientClipping: give max_norm or max_value; both are null")
        self.max_norm, self.max_value = max_norm, max_value

    def change_gradients(self, gradients: dict[Tensor, Tensor], optimizer: Optimizer, module: nn.Module) -> None:
        values = [gradient.values() if gradient.is_sparse else gradient for gradient in gradients.values()]
        if self.max_value is not None:
            for value in values:
                local(value).clamp_(-self.max_value, self.max_value)
        if self.max_norm is not None and (norm := gradient_norm(values)) is not None:
            scale = (self.max_norm / norm).clamp(max=1.0)
            for value in map(local, values):
                value.mul_(scale.to(value.device))

    def describe(self, module: nn.Module) -> Report:
        limits = {"norm": self.max_norm, "value": self.max_value}
        return Report("gradients clipped by " + " and ".join(f"{k} {v:g}" for k, v in limits.items() if v is not None))
