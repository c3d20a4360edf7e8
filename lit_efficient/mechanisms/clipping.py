"""Base class of techniques that clip gradients."""

from typing import Any

from lit_efficient.application.gradients import GradientHooks
from lit_efficient.declaration import Phase
from lit_efficient.errors import ConflictError
from lit_efficient.technique import Technique

_CLIPPING = "LightningModule.configure_gradient_clipping"


class ClipsGradients(GradientHooks, Technique):
    """Base class of techniques that clip gradients directly before each step, also with manual optimization."""

    phase = Phase.CLIP

    def check(self, trainer: Any, module: Any) -> None:
        who = type(self).__name__
        if trainer.gradient_clip_val:
            raise ConflictError(
                f"{who}: Trainer(gradient_clip_val={trainer.gradient_clip_val:g}) also clips gradients. Set "
                f"gradient_clip_val to null, or leave {who} out"
            )
        if getattr(module.configure_gradient_clipping, "__qualname__", "") != _CLIPPING:
            raise ConflictError(
                f"{who}: {type(module).__name__}.configure_gradient_clipping also clips gradients. Remove this method, "
                f"or leave {who} out"
            )
