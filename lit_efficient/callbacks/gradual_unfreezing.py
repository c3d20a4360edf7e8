"""Gradual unfreezing: train the head first, then one group of layers more at a time, deeper ones at lower rates.

    groups that train at step t = 1 + number of milestones <= t;    rate of group k = rate / lr_decay^k

Saves: gradients and optimizer states of the frozen groups, the backward pass below the deepest one that trains, and
    forgetting: a pretrained network keeps more of what it knows
Costs: later groups train for fewer steps; under DDP a broadcast of the weights, and compiled modules compile, each thaw
Source: Howard and Ruder (2018), ULMFiT, https://arxiv.org/abs/1801.06146, sections 3.2 and 3.3
"""

import sys
from lightning.pytorch import LightningModule, Trainer
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, ClassVar

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lit_efficient.application.optimizers import OptimizerHooks, optimized_by, schedulers_of
from lit_efficient.declaration import Phase, Report, held
from lit_efficient.distributed.reducing import renew_reducer
from lit_efficient.errors import ConfigurationError, ConflictError, check_number, refusal
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_layers import BatchNorm
from lit_efficient.mechanisms.blocks.freezing import depth_groups_and_norms, hold, label, release
from lit_efficient.optimizers.rates import split_groups
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


def thawed(step: int, milestones: Sequence[int]) -> int:
    """How many groups train after ``step`` steps (or epochs): the head, and one more from each milestone on.

    Args:
        step: Finished optimizer steps, at least 0.
        milestones: Steps, ascending.

    Example:
        >>> [thawed(step, [10, 20]) for step in (0, 9, 10, 25)]
        [1, 1, 2, 3]
    """
    return 1 + bisect_right(milestones, step)


class GradualUnfreezing(OptimizerHooks, Technique):
    """Freeze all but the head, and thaw group after group down to the stem; the optimizer is never touched mid-run.

    The optimizer gets, from the start, all that will ever train, in groups of their own with rates that fall by depth;
    schedulers go on as they were, in proportion. Frozen parameters have no gradient, so they have no optimizer state
    and do not decay. What trains is a function of the step (or epoch) alone. Parameters that are frozen when
    optimizers are configured stay frozen for ever; with adapters (LoRA) it is they that thaw. After the fit
    ``requires_grad`` is as it was before.

    Args:
        groups: ``auto``: the head, each repeated block from the last to the first, then stem and embeddings; or one
            entry a group in that order, each a regular expression or a list of them, for the ends of dotted names of
            modules and parameters. The first group that matches takes a parameter; all that train must be matched.
        every_n_steps: One group more after each n optimizer steps (``trainer.global_step``), at least 1. Give exactly
            one of the three.
        every_n_epochs: One group more after each n epochs, at least 1.
        milestones: Optimizer steps at which the second group, the third and so on thaw, ascending, from 1. Groups
            beyond the last stay frozen.
        lr_decay: Quotient of the rates of one group and the next deeper one, at least 1; 1 gives all the same rate.
        train_batchnorm: Whether running statistics of BatchNorm layers in frozen groups go on moving. If not, those
            layers are in eval mode, set again before each batch, until they thaw: they normalise with the statistics
            that they have. Their weights are frozen in either case.

    Raises:
        ConfigurationError: For an argument out of range; for a pattern that matches nothing and a parameter that no
            pattern matches; for an optimizer that lacks a group; for a scheduler under which groups cannot be split.
        ConflictError: Under FSDP1, DeepSpeed and ModelParallelStrategy; ShardedStrategy takes it.
    """

    phase = Phase.FREEZE
    alters = ("optimizer",)
    needs = ("every_n_epochs",)
    conflicts = {
        "BaseFinetuning": "both decide what trains, and it adds groups to the optimizer in the run: keep one of them",
        Trait.VIRTUAL_TOKENS: (
            "in a frozen network only virtual tokens train, so that there are no layers to unfreeze: keep one of them"
        ),
    }
    helps = {
        "quality": (0, "fine-tuning that forgets less: one group of layers after another")
    }

    def __init__(
        self,
        groups: str | list[str | list[str]] = "auto",
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        milestones: list[int] | None = None,
        lr_decay: float = 2.6,
        train_batchnorm: bool = False,
    ) -> None:
        super().__init__()
        given = {"every_n_steps": every_n_steps, "every_n_epochs": every_n_epochs, "milestones": milestones}
        chosen = {name: value for name, value in given.items() if value is not None}
        if len(chosen) != 1:
            raise ConfigurationError(
                f"GradualUnfreezing: give exactly one of every_n_steps, every_n_epochs and milestones, got {chosen}"
            )
        check_number("GradualUnfreezing", "every_n_steps", every_n_steps, least=1, whole=True, null=True)
        check_number("GradualUnfreezing", "every_n_epochs", every_n_epochs, least=1, whole=True, null=True)
        if milestones is not None and (not milestones or [0, *milestones] != sorted({0, *milestones})):
            raise refusal("GradualUnfreezing", "milestones", "steps from 1 on, each above the one before", milestones)
        check_number("GradualUnfreezing", "lr_decay", lr_decay, least=1)
        if groups != "auto" and (isinstance(groups, str) or not groups):
            raise refusal("GradualUnfreezing", "groups", "auto or a list of patterns from head to stem", groups)
        self.groups = groups
        self.every_n_steps = every_n_steps
        self.every_n_epochs = every_n_epochs
        self.milestones = milestones
        self.lr_decay = lr_decay
        self.train_batchnorm = train_batchnorm
        self._names: list[list[str]] = []  # of each group's parameters
        self._norms: list[tuple[int, BatchNorm]] = []
        self._stilled: list[tuple[int, BatchNorm]] = []  # those that were put into eval mode
        self._open = 0  # groups that train now

    def check(self, trainer: Trainer, module: Any) -> None:
        traits = traits_of(trainer.strategy)
        if traits.flattens:
            raise ConflictError(
                f"GradualUnfreezing cannot be combined with {traits.name}, which joins parameters of all groups before "
                "it knows which train: use strategy='ddp'"
            )
        if traits.dtensors and not traits.shards_itself:
            raise ConflictError(
                "GradualUnfreezing cannot be combined with ModelParallelStrategy (FSDP2): a checkpoint that is written "
                "before all groups have thawed could not be resumed, because optimizer states are loaded for every "
                "parameter of the optimizer there, and frozen groups have none yet: use ShardedStrategy, or 'ddp'"
            )

    def prepare_parameters(self, module: nn.Module) -> None:
        """Show ``configure_optimizers`` all that will ever train, and sort it."""
        release(module)
        self._open = 0
        self._group(module)

    def _group(self, module: nn.Module, optimized: set[int] | None = None) -> None:
        """Sort the parameters by depth, without networks of which the ``optimized`` parameters hold nothing."""
        self._names, self._norms = depth_groups_and_norms(
            module, self.groups, who="GradualUnfreezing", optimized=optimized
        )
        late = len(self.milestones or ())
        if late >= len(self._names):
            allowed = f"at most {len(self._names) - 1}, one for each group but the head's"
            raise refusal("GradualUnfreezing", "milestones", allowed, late)

    def trains(self, module: nn.Module) -> list[nn.Parameter]:
        thawing = self._names[: len(self._times()) + 1]
        return [module.get_parameter(name) for names in thawing for name in names]

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        if type(optimizer).__name__ == "LBFGS":
            raise ConfigurationError(
                "GradualUnfreezing: LBFGS keeps one state for all parameters, frozen ones too: use another optimizer"
            )
        self._group(module, optimized_by(module))
        parameters = dict(module.named_parameters())
        depth = {id(parameters[name]): k for k, names in enumerate(self._names) for name in names}
        split_groups(
            optimizer, schedulers_of(module), lambda p: depth.get(id(p), 0), self.lr_decay, who="GradualUnfreezing"
        )
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        sizes = [sum(parameters[n].numel() for n in names if id(parameters[n]) in stepped) for names in self._names]
        return self._report(sizes)

    def _report(self, sizes: list[int]) -> Report:
        times = self._times()
        unit = "epoch" if self.every_n_epochs else "step"
        shown = ", ".join(map(str, times[:6])) + (", ..." if len(times) > 6 else "")
        when = f"one more at {unit}s {shown}" if times else "nothing to thaw"
        never = sum(sizes[len(times) + 1 :])
        rest = f"; {len(sizes) - len(times) - 1} groups ({never:,} parameters) never thaw" if never else ""
        rates = f", rates divided by {self.lr_decay:g} a group" if self.lr_decay != 1 else ""
        return Report(
            f"{len(sizes)} groups, {sizes[0]:,} of {sum(sizes):,} parameters train at the start "
            f"({label(self._names[0])}), {when}{rates}{rest}",
            modules=tuple(label(names) for names in self._names),
            parameters=sum(sizes),
            details={"groups": len(sizes), "trainable_at_start": sizes[0], f"thaw_{unit}s": ", ".join(map(str, times))},
        )

    def _times(self) -> list[int]:
        """Steps or epochs at which groups 1, 2, ... thaw."""
        every = self.every_n_steps or self.every_n_epochs
        return self.milestones or [(every or 1) * k for k in range(1, len(self._names))]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Freeze what the step, which is restored by now, says."""
        self._thaw(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Thaw when it is time: steps and epochs end with an optimizer step, so an accumulation is never cut."""
        self._thaw(trainer, pl_module)
        self._still()

    def _thaw(self, trainer: Trainer, module: Any) -> None:
        done = trainer.current_epoch if self.every_n_epochs else trainer.global_step
        done = sys.maxsize if self.worst_case else done
        now, before = min(thawed(done, self._times()), len(self._names)), self._open
        if now == before:
            return
        self._open = now
        frozen = held(module)
        release(module, {name for names in self._names[:now] for name in names})
        hold(module, [name for names in self._names[now:] for name in names])
        if held(module) != frozen:
            renew_reducer(trainer.strategy)
        self._wake(now)
        for names in self._names[before:now] if before else ():
            size = sum(module.get_parameter(name).numel() for name in names)
            rank_zero_info(f"GradualUnfreezing: step {trainer.global_step}: {label(names)} thaws, {size:,} parameters")

    def _still(self) -> None:
        """Put BatchNorm layers of frozen groups into eval mode; others may have called ``train()`` since."""
        if self.train_batchnorm:
            return
        for group, norm in self._norms:
            if group >= self._open and norm.training:
                norm.eval()
                self._stilled.append((group, norm))

    def _wake(self, groups: int) -> None:
        """Put back into training mode what :meth:`_still` found in it, in the first ``groups`` groups."""
        for group, norm in self._stilled:
            if group < groups:
                norm.train()
        self._stilled = [item for item in self._stilled if item[0] >= groups]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wake(len(self._names))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._wake(len(self._names))
        release(pl_module)
        super().teardown(trainer, pl_module, stage)
