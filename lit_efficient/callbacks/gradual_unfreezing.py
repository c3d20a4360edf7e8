"""Gradual unfreezing: train the head first, then add one group of layers at a time, deeper ones with lower rates.

    number of groups that train at step t = 1 + number of milestones <= t;    rate of group k = rate / lr_decay^k

Saves: gradients and optimizer states of the frozen groups, and the backward pass below the deepest group that trains;
    a pretrained network forgets less
Costs: later groups train for fewer steps; at each unfreezing a broadcast of the weights under DDP, and a recompilation
    of compiled modules
Source: Howard and Ruder (2018), ULMFiT, https://arxiv.org/abs/1801.06146, sections 3.2 and 3.3
"""

import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.application.optimizers import OptimizerHooks, optimized_by, schedulers_of
from lit_efficient.declaration import Phase, Report, held
from lit_efficient.distributed.reducing import renew_reducer
from lit_efficient.errors import ConfigurationError, ConflictError, check_list, check_number, refusal
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_modules import BatchNorm
from lit_efficient.mechanisms.blocks.freezing import depth_groups_and_norms, hold, label, release
from lit_efficient.optimizers.rates import split_groups
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


def thawed(step: int, milestones: Sequence[int]) -> int:
    """Return the number of groups that train after ``step`` steps (or epochs): the head, and one per milestone.

    Args:
        step: Number of finished optimizer steps, at least 0.
        milestones: Steps, ascending.

    Example:
        >>> [thawed(step, [10, 20]) for step in (0, 9, 10, 25)]
        [1, 1, 2, 3]
    """
    return 1 + bisect_right(milestones, step)


class GradualUnfreezing(OptimizerHooks, Technique):
    """Freeze all parameters except those of the head, and unfreeze one group after another down to the stem.

    The optimizer does not change during the run. From the start it has all parameters that will ever train, in one
    group per depth, with rates that fall by depth and in proportion to which schedulers go on. Frozen parameters have
    no gradient, so they have no optimizer state and do not decay. The groups that train depend only on the step (or
    epoch). Parameters that are frozen when optimizers are configured stay frozen; with adapters (LoRA) the groups
    consist of adapters. After the fit ``requires_grad`` is restored.

    Args:
        groups: ``auto``: the head, each repeated block from the last to the first, then stem and embeddings. Or one
            entry per group in this order, each a regular expression or a list of them, for the ends of dotted names of
            modules and parameters. A parameter belongs to the first group that matches, and each parameter that trains
            must be matched.
        every_n_steps: Number of optimizer steps (``trainer.global_step``) after which another group is unfrozen, at
            least 1. Set exactly one of ``every_n_steps``, ``every_n_epochs`` and ``milestones``.
        every_n_epochs: Number of epochs after which another group is unfrozen, at least 1.
        milestones: Optimizer steps at which the second group, the third and so on are unfrozen, ascending, at least 1.
            Further groups stay frozen.
        lr_decay: Quotient of the rates of one group and the next deeper one, at least 1. With 1 all have the same rate.
        train_batchnorm: Update running statistics of BatchNorm layers in frozen groups. Otherwise these layers are set
            to evaluation mode before each batch, and normalise with the statistics that they have. Their weights are
            frozen in either case.

    Raises:
        ConfigurationError: For an argument out of range; for a pattern that matches nothing and a parameter that no
            pattern matches; for an optimizer that lacks a group; for a scheduler under which groups cannot be split.
        ConflictError: With FSDP1, DeepSpeed and ModelParallelStrategy; ShardedStrategy works.
    """

    counts_steps = True
    phase = Phase.FREEZE
    traits = frozenset({Trait.FOLLOWS_PARAMETERS})
    alters = ("optimizer",)
    needs = ("every_n_epochs",)
    conflicts: ClassVar[Mapping[str | Trait, str]] = {
        "BaseFinetuning": "both decide what trains, and it adds groups to the optimizer in the run: keep one of them",
        Trait.VIRTUAL_TOKENS: (
            "in a frozen network only virtual tokens train, so that there are no layers to unfreeze: keep one of them"
        ),
    }
    helps = {"quality": (0, "fine-tuning that forgets less: one group of layers after another")}

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
                f"GradualUnfreezing: set exactly one of every_n_steps, every_n_epochs and milestones, got {chosen}"
            )
        check_number("GradualUnfreezing", "every_n_steps", every_n_steps, least=1, whole=True, null=True)
        check_number("GradualUnfreezing", "every_n_epochs", every_n_epochs, least=1, whole=True, null=True)
        ascending = "steps from 1 on, in ascending order"
        check_list("GradualUnfreezing", "milestones", milestones, ascending, null=True)
        whole = all(type(step) is int and step > 0 for step in milestones or ())
        if milestones is not None and not (whole and [*milestones] == sorted({*milestones})):
            raise refusal("GradualUnfreezing", "milestones", ascending, milestones)
        check_number("GradualUnfreezing", "lr_decay", lr_decay, least=1)
        if groups != "auto":
            check_list("GradualUnfreezing", "groups", groups, "auto or a list of patterns from head to stem")
        self.groups = groups
        self.every_n_steps = every_n_steps
        self.every_n_epochs = every_n_epochs
        self.milestones = milestones
        self.lr_decay = lr_decay
        self.train_batchnorm = train_batchnorm
        self._names: list[list[str]] = []  # names of each group's parameters
        self._norms: list[tuple[int, BatchNorm]] = []  # BatchNorm layers with the numbers of their groups
        self._in_eval: list[tuple[int, BatchNorm]] = []  # those that were set to evaluation mode
        self._open = 0  # number of groups that train now

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        traits = traits_of(trainer.strategy)
        if traits.flattens:
            raise ConflictError(
                f"GradualUnfreezing cannot be combined with {traits.name}, which joins parameters of all groups before "
                "it is known which train: use strategy='ddp'"
            )
        if traits.dtensors and not traits.shards_itself:
            raise ConflictError(
                "GradualUnfreezing cannot be combined with ModelParallelStrategy (FSDP2): it loads optimizer states of "
                "every parameter of the optimizer, but frozen groups have none yet, so that checkpoints could not be "
                "resumed: use ShardedStrategy, or 'ddp'"
            )

    def prepare_parameters(self, module: nn.Module) -> None:
        """Unfreeze all groups, so that ``configure_optimizers`` sees them, and sort their parameters."""
        release(module)
        self._open = 0
        self._group(module)

    def _group(self, module: nn.Module, optimized: set[int] | None = None) -> None:
        """Sort the parameters by depth, without networks that hold none of the ``optimized`` parameters."""
        self._names, self._norms = depth_groups_and_norms(
            module, self.groups, who="GradualUnfreezing", optimized=optimized
        )
        late = len(self.milestones or ())
        if late >= len(self._names):
            allowed = f"at most {len(self._names) - 1}, one for each group except the head"
            raise refusal("GradualUnfreezing", "milestones", allowed, late)

    def trains(self, module: nn.Module) -> list[nn.Parameter]:
        unfrozen = self._names[: len(self._times()) + 1]
        return [module.get_parameter(name) for names in unfrozen for name in names]

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        if type(optimizer).__name__ == "LBFGS":
            raise ConfigurationError(
                "GradualUnfreezing: LBFGS keeps one state for all parameters, also frozen ones: use another optimizer"
            )
        self._group(module, optimized_by(module))
        groups = [[module.get_parameter(name) for name in names] for names in self._names]
        depth: dict[Tensor, int] = {p: k for k, group in enumerate(groups) for p in group}
        split_groups(
            optimizer, schedulers_of(module), lambda p: depth.get(p, 0), self.lr_decay, who="GradualUnfreezing"
        )
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        return self._report([sum(p.numel() for p in group if p in stepped) for group in groups])

    def _report(self, sizes: list[int]) -> Report:
        """Return the report for groups of these sizes."""
        times = self._times()
        unit = "epoch" if self.every_n_epochs else "step"
        start = f"{sizes[0]:,} of {sum(sizes):,} parameters train at the start ({label(self._names[0])})"
        summary = f"{len(sizes)} groups, {start}, "
        if times:
            summary += f"one more at {unit}s {', '.join(map(str, times[:6]))}" + ", ..." * (len(times) > 6)
        else:
            summary += "nothing to unfreeze"
        if self.lr_decay != 1:
            summary += f", rates divided by {self.lr_decay:g} per group"
        never = sizes[len(times) + 1 :]
        if sum(never):
            summary += f"; {len(never)} groups ({sum(never):,} parameters) stay frozen"
        return Report(
            summary,
            modules=tuple(label(names) for names in self._names),
            parameters=sum(sizes),
            details={"groups": len(sizes), "trainable_at_start": sizes[0], f"thaw_{unit}s": ", ".join(map(str, times))},
        )

    def _times(self) -> list[int]:
        """Return the steps or epochs at which groups 1, 2, ... are unfrozen."""
        every = self.every_n_steps or self.every_n_epochs
        return self.milestones or [(every or 1) * k for k in range(1, len(self._names))]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Freeze the groups that do not train at the step, which a checkpoint may have restored."""
        self._unfreeze(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        # Steps and epochs end with an optimizer step, so that gradients are never lost in an accumulation.
        self._unfreeze(trainer, pl_module)
        self._stop_statistics()

    def _unfreeze(self, trainer: Any, module: nn.Module) -> None:
        """Unfreeze the groups that train from this step on."""
        done = trainer.global_step
        if self.every_n_epochs:
            done = trainer.current_epoch
        if self.worst_case:  # all groups
            done = sys.maxsize
        before = self._open
        now = min(thawed(done, self._times()), len(self._names))
        if now == before:
            return
        self._open = now
        frozen = held(module)
        release(module, {name for names in self._names[:now] for name in names})
        hold(module, [name for names in self._names[now:] for name in names])
        if held(module) != frozen:
            renew_reducer(trainer.strategy)
        self._resume_statistics(now)
        if not before:  # the start of the fit, which the report describes
            return
        for names in self._names[before:now]:
            size = sum(module.get_parameter(name).numel() for name in names)
            rank_zero_info(
                f"GradualUnfreezing: step {trainer.global_step}: {label(names)} trains from now on, {size:,} parameters"
            )

    def _stop_statistics(self) -> None:
        """Set BatchNorm layers of frozen groups to evaluation mode, again if ``train()`` was called since."""
        if self.train_batchnorm:
            return
        for group, norm in self._norms:
            if group >= self._open and norm.training:
                norm.eval()
                self._in_eval.append((group, norm))

    def _resume_statistics(self, groups: int) -> None:
        """Set the layers of the first ``groups`` groups back to training mode."""
        for group, norm in self._in_eval:
            if group < groups:
                norm.train()
        self._in_eval = [item for item in self._in_eval if item[0] >= groups]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._resume_statistics(len(self._names))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._resume_statistics(len(self._names))
        release(pl_module)
        super().teardown(trainer, pl_module, stage)
