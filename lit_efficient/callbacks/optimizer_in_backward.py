"""Optimizer in backward: step each parameter in the backward pass, as soon as its gradient is complete, and free it.

    for each parameter, from the last layer to the first:  g is complete  ->  step(p, g),  g is freed

Saves: all gradients except those of one layer: 4 bytes for each parameter in float32, 2 in bfloat16; temporary tensors
    of foreach kernels
Costs: kernels of the step for each parameter instead of for all together; no accumulation and no clipping by norm
Source: Lv et al. (2023), https://arxiv.org/abs/2306.09782; torch's hooks: https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html

Numbers and checkpoints are identical to those of the same optimizer without the technique, so that a run can be resumed
with or without it. Compiled code computes its gradients together: compile blocks, not the whole network. The gradient
of tied embeddings comes from both ends of the network, and is freed only when the backward pass has reached both.
"""

from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, Report, format_bytes
from lit_efficient.errors import ConfigurationError, ConflictError
from lit_efficient.internals.lightning_loops import accumulates, zeroes_by_hand
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.optimizers.in_backward import InBackward, step_in_backward
from lit_efficient.optimizers.later_reads import kept_by
from lit_efficient.surgery import local
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class OptimizerInBackward(OptimizerHooks, Technique):
    """Step each parameter of the module's optimizer, of any class, during the backward pass.

    Clipping by value is applied to each gradient. There are no gradients in ``on_after_backward`` and
    ``on_before_optimizer_step``; code that reads them there raises an error in the first step. After an exception
    inside a backward pass, some parameters have been stepped and others not: resume from a checkpoint.

    Raises:
        ConflictError: With accumulation, clipping by norm, clipping by the module's own code, a gradient scaler
            (16-mixed), manual optimization, and strategies that keep all gradients (DDP) or join parameters (FSDP1,
            DeepSpeed).
        ConfigurationError: For an optimizer that steps its parameters together, such as LBFGS, for code that reads
            gradients later, and if a step has several backward passes.
    """

    phase = Phase.STEP
    traits = frozenset({Trait.STEPS_IN_BACKWARD})
    conflicts: ClassVar[dict[str, str]] = {
        "GradientAccumulationScheduler": "accumulated gradients stay until the last batch; use larger batches instead",
        "MaxBatchSize(keep_effective_batch=True)": "accumulated gradients stay until the last batch; use "
        "keep_effective_batch=False",
        "NonFiniteGuard(action='skip')": "a part of the step is done when a gradient is found that is not finite; use "
        "action='raise'",
        "BlockSwap(trained=True)": "it keeps gradients in CPU memory and steps them later; leave out trained, or one "
        "of the two techniques",
        "OffloadOptimizer(gradients=True)": "there are no gradients to keep in CPU memory; use gradients=False",
        "Compile(modules='network')": "it computes all gradients of the network together, so that none is freed early; "
        "use modules='blocks'",
    }
    computes: ClassVar[str] = "same"
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (7, "all gradients except those of one layer; no accumulation and no clipping by norm")
    }

    def check(self, trainer: Any, module: Any) -> None:
        way_out = ". Leave out OptimizerInBackward, or "
        if not module.automatic_optimization:
            raise ConflictError(
                f"OptimizerInBackward: {type(module).__name__} uses manual optimization and steps after the backward "
                f"pass{way_out}call step_in_backward(optimizer) yourself, and optimizer.step(closure)"
            )
        self._check_accumulation(trainer)
        norm = getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm) != "value"
        if trainer.gradient_clip_val and norm:
            raise ConflictError(
                "OptimizerInBackward: gradient_clip_val clips by the norm of all gradients, which never exist at the "
                f"same time{way_out}use gradient_clip_algorithm='value', or an optimizer that clips updates (Adafactor)"
            )
        if getattr(module.configure_gradient_clipping, "__qualname__", "") != _CLIPPING:
            raise ConflictError(
                f"OptimizerInBackward: {type(module).__name__}.configure_gradient_clipping finds no gradients"
                f"{way_out}use Trainer(gradient_clip_val=..., gradient_clip_algorithm='value')"
            )
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ConflictError(
                "OptimizerInBackward: a gradient scaler decides about the whole step after the backward pass, when the "
                f"parameters have already been stepped{way_out}use precision='bf16-mixed', which needs no scaler"
            )
        traits = traits_of(trainer.strategy)
        if traits.replicates or traits.flattens:
            reason = "keeps all gradients in its buckets until they are averaged, so that none could be freed early"
            if traits.flattens:
                reason = "steps other tensors than the module's parameters"
            raise ConflictError(
                f"OptimizerInBackward: {traits.name} {reason}{way_out}use ModelParallelStrategy (FSDP2)"
            )

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        step_in_backward(optimizer, who="OptimizerInBackward")
        own = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        total = sum(local(p).nbytes for p in own)
        layers = [sum(local(p).nbytes for p in {*part.parameters(recurse=False)} & own) for part in module.modules()]
        return Report(
            f"{type(optimizer).__name__} steps in the backward pass: of {format_bytes(total)} of gradients, at most "
            f"{format_bytes(max(layers))} exist at a time, those of the largest layer",
            parameters=sum(p.numel() for p in own),
            bytes_saved=total - max(layers),
            details={"gradient_bytes": total, "largest_layer_bytes": max(layers)},
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the module's methods that would read gradients after the backward pass."""
        wrap_method(pl_module, "backward", _backward)
        if zeroes_by_hand(pl_module):
            wrap_method(pl_module, "optimizer_zero_grad", _zero_grad)
        for optimizer in _steps_of(trainer):
            optimizer.in_backward.clip_value = trainer.gradient_clip_val or None
        if trainer.gradient_clip_val:
            wrap_method(pl_module, "configure_gradient_clipping", _clipped_already)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self._check_accumulation(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        for optimizer in _steps_of(trainer):
            if 0 < len(optimizer.in_backward.stepped) == optimizer.in_backward.late:
                raise ConfigurationError(
                    f"OptimizerInBackward: {type(pl_module).__name__} runs the backward pass before optimizer.step, so "
                    "that all gradients exist at the same time. Let its optimizer_step call "
                    "optimizer.step(closure=optimizer_closure)"
                )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for optimizer in _steps_of(trainer):  # a later run with the same optimizer may clip or accumulate
            optimizer.in_backward.on = False
        unwrap_method(pl_module, "backward", _backward)
        unwrap_method(pl_module, "optimizer_zero_grad", _zero_grad)
        unwrap_method(pl_module, "configure_gradient_clipping", _clipped_already)
        super().teardown(trainer, pl_module, stage)

    def _check_accumulation(self, trainer: Trainer) -> None:
        if trainer.accumulate_grad_batches != 1:
            raise ConflictError(
                f"OptimizerInBackward: with accumulate_grad_batches={trainer.accumulate_grad_batches}, all gradients "
                "stay until the last batch of a step. Use accumulate_grad_batches=1 and a larger batch, for which the "
                "freed gradients leave memory, or leave out OptimizerInBackward"
            )


_CLIPPING = "LightningModule.configure_gradient_clipping"


def _steps_of(trainer: Any) -> list[InBackward]:
    """Return the optimizers that step in the backward pass."""
    return [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, InBackward)]


def _backward(self: Any, loss: Tensor, *args: object, **kwargs: object) -> None:
    """Run the module's backward pass, and then refuse reads of gradients, which are gone."""
    inner_method(self, "backward", _backward)(loss, *args, **kwargs)
    if accumulates(self.trainer):
        return
    names = {p: name for name, p in self.named_parameters()}
    for optimizer in _steps_of(self.trainer):
        optimizer.in_backward.refuse_reads(names)


def _zero_grad(self: LightningModule, *args: object, **kwargs: object) -> None:
    """Run the module's own ``optimizer_zero_grad``, and raise if it keeps a gradient."""
    gone = [p for optimizer in _steps_of(self.trainer) for p in optimizer.in_backward.earlier]
    if kept_by(lambda: inner_method(self, "optimizer_zero_grad", _zero_grad)(*args, **kwargs), gone):
        raise ConfigurationError(
            f"OptimizerInBackward: {type(self).__name__}.optimizer_zero_grad keeps gradients of an earlier step, but "
            "they have been freed. Let it zero all gradients, or leave out OptimizerInBackward"
        )


def _clipped_already(self: LightningModule, *_: object, **__: object) -> None:
    """Do nothing: each gradient has been clipped before the step of its parameter."""
