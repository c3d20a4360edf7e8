"""Base class of techniques that clip gradients."""

from typing import Any

from lit_efficient.application.gradients import GradientHooks
from lit_efficient.declaration import Phase
from lit_efficient.errors import ConflictError
from lit_efficient.technique import Technique

_CLIPPING = "LightningModule.configure_gradient_clipping"


class ClipsGradients(GradientHooks, Technique):
    """Base of techniques that clip gradients right before each step, also with manual optimization."""

    phase = Phase.CLIP

    def check(self, trainer: Any, module: Any) -> None:
        who = type(self).__name__
        if trainer.gradient_clip_val:
            raise ConflictError(
                f"{who}: Trainer(gradient_clip_val={trainer.gradient_clip_val:g}) clips, too, so that neither limit "
                f"would be what it says: set gradient_clip_val to null, or leave {who} out"
            )
        if getattr(module.configure_gradient_clipping, "__qualname__", "") != _CLIPPING:
            raise ConflictError(
                f"{who}: {type(module).__name__} clips in its own configure_gradient_clipping: leave one of them out"
            )
