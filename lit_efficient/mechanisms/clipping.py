"""Base class of techniques that clip gradients."""

from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.application.gradients import GradientHooks, gradients_of
from lit_efficient.application.settings import TOLERANCE, ReadBack
from lit_efficient.declaration import Phase
from lit_efficient.distributed.gradient_norm import gradient_norm
from lit_efficient.errors import ConflictError
from lit_efficient.technique import Technique

_CLIPPING = "LightningModule.configure_gradient_clipping"


class ClipsGradients(GradientHooks, Technique):
    """Base class of techniques that clip gradients directly before each step, also with manual optimization."""

    phase = Phase.CLIP

    def __init__(self) -> None:
        super().__init__()
        self._reads: ReadBack | None = None
        self._clipped: dict[int, Tensor | None] = {}  # norm of the clipped gradients, by the optimizer's id

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

    def clip(self, gradients: dict[Tensor, Tensor]) -> None:
        """Clip gradients in place; see :meth:`change_gradients`."""
        raise NotImplementedError

    def change_gradients(self, gradients: dict[Tensor, Tensor], optimizer: Optimizer, module: nn.Module) -> None:
        self.clip(gradients)
        if self._reads is not None and self._reads.active:
            self._clipped[id(optimizer)] = gradient_norm(gradients.values())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        whole = [one for one in trainer.optimizers if not hasattr(one, "in_backward")]
        self._reads = ReadBack(whole, partial(self._differs, pl_module))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._reads is not None:
            self._reads.stop()
            self._reads = None
        self._clipped = {}
        super().teardown(trainer, pl_module, stage)

    def _differs(self, module: nn.Module, optimizer: Optimizer, step: int) -> str | None:
        if id(optimizer) not in self._clipped:
            return (
                f"{type(self).__name__}: step {step} should have clipped gradients, but nothing has clipped them: "
                f"{type(module).__name__} steps the optimizer in a way that leaves out on_before_optimizer_step. Call "
                "step of the optimizers that self.optimizers() returns"
            )
        clipped = self._clipped.pop(id(optimizer))
        used = gradient_norm(gradients_of(optimizer).values())
        if clipped is None or used is None or not float(used) > TOLERANCE * float(clipped):
            return None
        return (
            f"{type(self).__name__}: step {step} should have gradients of the norm {float(clipped):.3g} after they are "
            f"clipped, but {type(optimizer).__name__} has {float(used):.3g}: it changes them in its step"
        )
