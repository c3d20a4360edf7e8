"""Exact resume: a run that was interrupted and resumed ends with the same bits as one that was not.

    before batch k of epoch e:  torch, Python and NumPy are seeded by hash(seed, e, k, rank)
    order of epoch e:           a pure function of (seed, e); the loader's state is the number of batches it yielded
    in all steps, under DDP:    gradients of all ranks are added in one order: buckets are never sorted anew
    after a resume:             what was still to do for the last batch: validate, step schedulers, end the epoch

Saves: the work since the last epoch's end, in code that knows nothing of it; stock Lightning shuffles and draws again.
Costs: 0.1 ms a step; a few numbers and the metrics in the checkpoint, inside an accumulation window also the gradients.
Source: Lightning's stateful-loader protocol, https://lightning.ai/docs/pytorch/stable/clouds/fault_tolerant_training_basic.html.

Reseeding was chosen over storing generator states because it needs no state: it holds for every rank although rank 0
alone writes the checkpoint, for every device, and whatever ran in between (validation, sampling, a progress bar).
It is promised for the same machine, versions, thread count and number of processes.
"""

import copy
import inspect
import os
from lightning.pytorch import LightningModule, Trainer
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_efficient.application.gradients import gradients_of
from lit_efficient.declaration import Report
from lit_efficient.distributed.ranks import data_rank
from lit_efficient.distributed.reducing import configure_in_order, keep_order
from lit_efficient.distributed.seeds import mix_seed, seed_all
from lit_efficient.errors import check_number
from lit_efficient.internals.lightning_data import combined_loader, restore_loader_states
from lit_efficient.internals.lightning_loops import (
    accumulates,
    count_batches,
    end_batch,
    end_epoch,
    settle,
    stops_now,
)
from lit_efficient.internals.lightning_metrics import monitored, restore, unfinished
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.mechanisms.order.carried import attributes_of, differs
from lit_efficient.mechanisms.order.resumable_loader import ResumableLoader, examine, make_resumable
from lit_efficient.mechanisms.trials.probes import loaders_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class ExactResume(Technique):
    """Make interrupted and resumed training equal to uninterrupted training, bit for bit.

    Training loaders with torch's or Lightning's own samplers are made resumable, and each batch has random draws of its
    own. Works on existing modules and loaders. What cannot be covered is said once, as a warning: iterable datasets and
    samplers of your own without state, GPU kernels that are not deterministic, generators of your own.

    Args:
        seed: Seed of the data order and of all draws in training steps. ``None``: the checkpoint's when resuming, else
            that of ``seed_everything``, else torch's initial seed.

    Raises:
        ConfigurationError: If the seed is negative.
    """

    traits = frozenset({Trait.SEEDS_BATCHES})
    helps = {
        "safety": (1, "a resumed run gives the bits of one that never stopped")
    }

    def __init__(self, seed: int | None = None) -> None:
        check_number("ExactResume", "seed", seed, least=0, whole=True, null=True)
        super().__init__()
        self.seed = seed
        self._run_seed: int | None = seed
        self._rank = 0
        self._world_size: int | None = None
        self._rows = 0  # of a step of the checkpoint's run, which may have been another
        self._gradients: dict[str, Tensor] | None = None  # of an open accumulation window, to be put back
        self._reached = ""  # what of a batch is over: "batch", "validation" or "epoch"; empty inside a step
        self._resumed: dict[str, Any] = {}  # the same of the checkpoint, with its metrics
        self._cut: dict[str, Any] | None = None  # as it was after a step that ended the fit in the midst of an epoch
        self._said: set[str] = set()
        self._carried: dict[str, object] | None = {}  # attributes after the fit's first batch; None: compared already
        self._loaders: list[ResumableLoader] | None = None  # in a fit

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._rank = data_rank(trainer)
        self._world_size = int(trainer.world_size)
        if self._run_seed is None:
            own = int(os.environ.get("PL_GLOBAL_SEED") or torch.initial_seed()) & (2**63 - 1)
            self._run_seed = int(trainer.strategy.broadcast(own))
        # First in the list: what other callbacks draw at the start of a batch is then reproducible too. A new list,
        # because the trainer is iterating over the old one.
        trainer.callbacks = [self, *(callback for callback in trainer.callbacks if callback is not self)]
        self._loaders, self._carried = [], {}
        wrap_method(trainer.strategy, "process_dataloader", _process_dataloader)
        keep_order(trainer.strategy)
        self._say_limits(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._unwrap(trainer)
        super().teardown(trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._loaders is not None
        assert self._run_seed is not None
        for loader in self._loaders:
            loader.reseed(self._run_seed)  # strategies that restore late made them before the checkpoint was read
        # Lightning forgets to, if something (a scheduler that asks how long the run is) made it load the data early.
        restore_loader_states(trainer)
        self._keep_place(trainer)
        self._go_on(trainer)
        gradients, self._gradients = self._gradients, None
        if gradients:
            for name, parameter in pl_module.named_parameters():
                if name in gradients:
                    parameter.grad = gradients[name].to(parameter.device, parameter.dtype)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reached, self._cut = "", None
        seed_all(self._seed_at(trainer, -1))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self._reached = ""
        seed_all(self._seed_at(trainer, trainer.fit_loop.epoch_loop.batch_idx))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int) -> None:
        self._reached = "batch"
        self._keep_cut(trainer)
        if self._carried is not None:
            self._say_carried(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._reached:  # a resumed run may validate again
            seed_all(self._seed_at(trainer, trainer.fit_loop.epoch_loop.batch_idx, 1))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._reached:
            self._reached = "validation"
            self._keep_cut(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reached = "epoch"
        seed_all(self._seed_at(trainer, -2))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reached = ""

    def describe(self, module: Any) -> Report:
        return Report(f"order and draws of every training batch follow from seed {self._run_seed}, epoch and batch")

    def state_dict(self) -> dict[str, Any]:
        """The run's seed and its number of processes; a checkpoint takes the rows of a batch in all of them, too."""
        return {} if self._run_seed is None else {"seed": self._run_seed, "world_size": self._world_size or 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the checkpoint's seed, and say where the run differs from the interrupted one."""
        if self._loaders is None:  # not a fit
            return
        if self.seed is not None and self.seed != state_dict["seed"]:
            self._say(f"seed={self.seed}, but the checkpoint's run used {state_dict['seed']}: a new order from here on")
        else:
            self._run_seed = state_dict["seed"]
        self._rows = state_dict.get("rows", 0)
        if self._world_size != state_dict["world_size"]:
            known = "" if self._rows else "; its epoch goes on after as many batches, whatever rows they have"
            self._say(f"{self._world_size} processes, but the checkpoint's run used {state_dict['world_size']}{known}")
        self._gradients = state_dict.get("gradients")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        state = checkpoint["callbacks"].setdefault(self.state_key, self.state_dict())
        loaders = loaders_in(combined_loader(trainer))  # others may have been made and left: a search's
        if state and len(loaders) == 1 and isinstance(loaders[0], ResumableLoader):
            state["rows"] = loaders[0].step_rows
        if self._cut is not None and self._reached in ("", "epoch"):  # Lightning ends the epoch of a fit's last step
            checkpoint["loops"]["fit_loop"], checkpoint["epoch"] = copy.deepcopy(self._cut["loop"]), self._cut["epoch"]
            state |= self._cut["stands"]
        elif self._reached:
            state |= self._stands(trainer)
        if not _window_is_open(trainer):
            return
        if trainer.world_size > 1:
            self._say("a checkpoint inside an accumulation window: each process's gradients so far are not in it")
            return
        away = {p: gradient for optimizer in trainer.optimizers for p, gradient in gradients_of(optimizer).items()}
        named = [(name, away.get(p, p.grad)) for name, p in pl_module.named_parameters()]
        state["gradients"] = {name: gradient.detach().clone() for name, gradient in named if gradient is not None}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        if self._loaders is None:
            return
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if state is None:
            self._say("the checkpoint was written without ExactResume: its epoch's data order cannot be known")
        elif "reached" in state:  # older ones have none
            self._resumed = {key: state[key] for key in ("reached", "metrics", "results")}
            settle(checkpoint, epoch=state["reached"] == "epoch")  # the loops are restored after the callbacks

    def _stands(self, trainer: Trainer) -> dict[str, Any]:
        """What of the last batch is over, and the metrics until then."""
        results = unfinished(trainer) if self._reached != "epoch" else []
        if trainer.world_size > 1 and any(result["logged"]["on_epoch"] for result in results):
            self._say("each process's part of the epoch's training metrics is not in the checkpoint")
            results = [result for result in results if not result["logged"]["on_epoch"]]
        return {"reached": self._reached, "metrics": monitored(trainer), "results": results}

    def _keep_cut(self, trainer: Trainer) -> None:
        """If the fit ends here, keep for later checkpoints that the epoch has batches left, for a longer fit."""
        if stops_now(trainer) and not trainer.is_last_batch:
            loop = copy.deepcopy(trainer.fit_loop.state_dict())
            self._cut = {"loop": loop, "epoch": trainer.current_epoch, "stands": self._stands(trainer)}

    def _keep_place(self, trainer: Trainer) -> None:
        """Go on in the epoch where the interrupted run was, whose steps had more rows, or fewer."""
        before, self._rows = self._rows, 0
        loaders = self._loaders or []
        now = loaders[0].step_rows if len(loaders) == 1 and [*loaders_in(combined_loader(trainer))] == loaders else 0
        if before == now or not before:
            return
        state = loaders[0].state_dict() if now else {"epoch": -1}
        if state["epoch"] != _epoch(trainer):
            return
        if not loaders[0].keeps_order:
            self._say(f"a step has {now} rows, not {before}: the epoch goes on after as many batches, of other rows")
            return
        batches, rest = divmod(state["batches"] * before, now)
        loaders[0].load_state_dict({**state, "batches": batches})
        count_batches(trainer, batches)
        self._say(
            f"a step has {now} rows, not {before}: the epoch goes on at its row {batches * now}, {rest} rows back"
        )

    def _go_on(self, trainer: Trainer) -> None:
        """Have the rest of the checkpoint's last batch done: Lightning would go on to the next one."""
        state, self._resumed = self._resumed, {}
        if not state:
            return
        restore(trainer, state["metrics"], state["results"])
        self._reached = state["reached"]
        if self._reached == "epoch":
            end_epoch(trainer)
        else:
            wrap_method(trainer.fit_loop.epoch_loop, "advance", _end_batch)

    def _seed_at(self, trainer: Trainer, batch: int, *purpose: int) -> int:
        assert self._run_seed is not None
        return mix_seed(self._run_seed, _epoch(trainer), batch, self._rank, *purpose)

    def _say_limits(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            self._say("training_step takes dataloader_iter: batches that it fetched ahead are skipped on resume")
        if trainer.strategy.root_device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
            self._say("kernels on this device may not be deterministic; Trainer(deterministic=True) makes them so")

    def _say_carried(self, pl_module: LightningModule) -> None:
        """Name the attributes that the second batch has changed: a resumed run would begin without their values."""
        before, now = self._carried, attributes_of(pl_module)
        self._carried = None if before else now or None
        changed = [name for name in now if before and name in before and differs(before[name], now[name])]
        if changed:
            self._say(
                f"{type(pl_module).__name__} changes {', '.join(changed[:3])}{', ...' if len(changed) > 3 else ''} "
                "from batch to batch, which no checkpoint holds; if later batches read it, make it a buffer or save it "
                "in on_save_checkpoint"
            )

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            rank_zero_warn(f"ExactResume, resuming will not be bit-exact: {what}")

    def _resumable(self, trainer: Trainer, dataloader: Any) -> Any:
        takes, remark = examine(dataloader)
        if remark:
            self._say(remark)
        if not takes:
            return dataloader
        assert self._run_seed is not None
        assert self._loaders is not None
        made = make_resumable(dataloader, self._run_seed, self._rank, partial(_epoch, trainer))
        self._loaders.append(made)
        return made

    def _unwrap(self, trainer: Trainer) -> None:
        self._loaders, self._reached, self._resumed = None, "", {}
        unwrap_method(trainer.fit_loop.epoch_loop, "advance", _end_batch)
        unwrap_method(trainer.strategy, "process_dataloader", _process_dataloader)
        unwrap_method(trainer.strategy, "configure_ddp", configure_in_order)


def _process_dataloader(self: Any, dataloader: Any) -> Any:
    """Around ``strategy.process_dataloader``, the last hand that every loader passes through."""
    trainer = self.lightning_module.trainer
    technique = _of(trainer)
    # The trainer is in its training stage for training loaders only: validation in between changes the stage.
    if technique is not None and technique._loaders is not None and trainer.training:
        dataloader = technique._resumable(trainer, dataloader)
    return inner_method(self, "process_dataloader", _process_dataloader)(dataloader)


def _end_batch(self: Any, data_fetcher: Any) -> None:
    """In the place of ``epoch_loop.advance``, once: after it Lightning validates, steps schedulers, ends the epoch."""
    unwrap_method(self, "advance", _end_batch)
    technique = _of(self.trainer)
    end_batch(self.trainer, validated=technique is not None and technique._reached == "validation")


def _of(trainer: Trainer) -> ExactResume | None:
    return next((callback for callback in trainer.callbacks if isinstance(callback, ExactResume)), None)


def _epoch(trainer: Trainer) -> int:
    """The epoch as Lightning tells it to samplers; ``trainer.current_epoch`` lags behind while one is being resumed."""
    return int(trainer.fit_loop.epoch_progress.current.processed)


def _window_is_open(trainer: Trainer) -> bool:
    """Whether gradients have been gathered that no optimizer step has used yet."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0 and accumulates(trainer)
