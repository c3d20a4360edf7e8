"""Exact resume: a run that was interrupted and resumed ends with the same bits as an uninterrupted run.

    before batch k of epoch e:  torch, Python and NumPy are seeded by hash(seed, e, k, rank)
    order of epoch e:           a pure function of (seed, e); the loader's state is the number of batches it yielded
    in all steps, under DDP:    gradients of all ranks are added in one order: buckets are never sorted again
    after a resume:             the rest of the last batch is done: validation, schedulers' steps, end of the epoch

Saves: the work since the end of the last epoch, without changes to the code; Lightning alone shuffles and draws again.
Costs: 0.1 ms per step; some numbers and the metrics in checkpoints, and the gradients inside an accumulation window.
Source: Lightning's stateful-loader protocol, https://lightning.ai/docs/pytorch/stable/clouds/fault_tolerant_training_basic.html.

Seeding each batch needs no stored generator states. It therefore works for every rank, although only rank 0 writes the
checkpoint, for every device, and after code that draws in between (validation, sampling, a progress bar). The result
is exact on the same machine with the same versions, number of threads and number of processes.
"""

import copy
import inspect
import os
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lit_efficient.application.gradients import gradients_of
from lit_efficient.declaration import Report, technique_of
from lit_efficient.distributed.reducing import configure_in_order, keep_order
from lit_efficient.distributed.seeds import mix_seed, seed_all
from lit_efficient.errors import ConfigurationError, check_number, diagnostic
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
from lit_efficient.internals.lightning_strategies import data_rank
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.mechanisms.order.carried import attributes_of, differs
from lit_efficient.mechanisms.order.resumable_loader import ResumableLoader, examine, make_resumable
from lit_efficient.mechanisms.trials.probes import loaders_in
from lit_efficient.optimizers.stepping import keep_dtypes
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class ExactResume(Technique):
    """Make interrupted and resumed training equal to uninterrupted training, bit for bit.

    Training loaders with torch's or Lightning's own samplers become resumable, and random numbers are seeded for each
    batch. Modules and loaders need no change. A warning names what cannot be exact: iterable data sets and custom
    samplers without state, GPU kernels that are not deterministic, custom generators.

    Args:
        seed: Seed of the data order and of all random numbers in training steps. ``None``: the seed of the checkpoint
            when resuming, else that of ``seed_everything``, else torch's initial seed.

    Raises:
        ConfigurationError: If the seed is negative.
    """

    traits = frozenset({Trait.SEEDS_BATCHES})
    helps = {"safety": (1, "a resumed run gives the same bits as an uninterrupted run")}

    def __init__(self, seed: int | None = None) -> None:
        check_number("ExactResume", "seed", seed, least=0, whole=True, null=True)
        super().__init__()
        self.seed = seed
        self._run_seed: int | None = seed
        self._rank = 0
        self._world_size: int | None = None
        self._rows = 0  # rows per step in the checkpoint's run
        self._data: list[list[Any]] = []  # rows of each loader of that run, their hash, and batches of an epoch
        self._gradients: dict[str, Tensor] | None = None  # of an open accumulation window in the checkpoint
        self._reached = ""  # the part of a batch that is over: "batch", "validation" or "epoch"; empty inside a step
        self._dtypes: dict[str, torch.dtype] = {}  # of the checkpoint's weights, if they are known
        self._resumed: dict[str, Any] = {}  # "reached" of the checkpoint, and its metrics
        # State of the loops after a step that ended the fit before the end of an epoch.
        self._cut: dict[str, Any] | None = None
        self._said: set[str] = set()
        self._carried: dict[str, object] | None = {}  # attributes after the first batch; None once they are compared
        self._loaders: list[ResumableLoader] | None = None  # training loaders; None outside a fit

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._rank = data_rank(trainer)
        self._world_size = int(trainer.world_size)
        if self._run_seed is None:
            own = int(os.environ.get("PL_GLOBAL_SEED") or torch.initial_seed()) & (2**63 - 1)
            self._run_seed = int(trainer.strategy.broadcast(own))
        # First in the list, so that random numbers that other callbacks draw at the start of a batch are reproducible.
        # A new list, because the trainer iterates over the old one.
        trainer.callbacks = [self, *(callback for callback in trainer.callbacks if callback is not self)]
        self._loaders = []
        self._carried = {}
        wrap_method(trainer.strategy, "process_dataloader", _process_dataloader)
        keep_order(trainer.strategy)
        self._warn_of_limits(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._unwrap(trainer)
        super().teardown(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        for optimizer in trainer.optimizers:
            keep_dtypes(optimizer, partial(self._keeps_dtypes, pl_module))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._loaders is not None
        assert self._run_seed is not None
        for loader in self._loaders:
            loader.reseed(self._run_seed)  # it may have been created before the checkpoint was read
        # Lightning skips this if the data was loaded early, for example by a scheduler that needs the number of steps.
        restore_loader_states(trainer)
        self._check_data(trainer)
        self._keep_place(trainer)
        self._finish_batch(trainer)
        gradients = self._gradients
        self._gradients = None
        if gradients:
            for name, parameter in pl_module.named_parameters():
                if name in gradients:
                    parameter.grad = gradients[name].to(parameter.device, parameter.dtype)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reached = ""
        self._cut = None
        seed_all(self._seed_at(trainer, -1))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self._reached = ""
        seed_all(self._seed_at(trainer, trainer.fit_loop.epoch_loop.batch_idx))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self._reached = "batch"
        self._keep_cut(trainer)
        if self._carried is not None:
            self._warn_of_carried(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._reached:  # not before training; a resumed run may validate a second time
            seed_all(self._seed_at(trainer, trainer.fit_loop.epoch_loop.batch_idx, 1))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._reached:
            self._reached = "validation"
            self._keep_cut(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self._reached = "epoch"
        seed_all(self._seed_at(trainer, -2))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reached = ""

    def describe(self, module: nn.Module) -> Report:
        return Report(f"order and draws of every training batch follow from seed {self._run_seed}, epoch and batch")

    def state_dict(self) -> dict[str, object]:
        """Return the seed and the number of processes. ``on_save_checkpoint`` adds the rows per step."""
        if self._run_seed is None:
            return {}
        return {"seed": self._run_seed, "world_size": self._world_size or 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the checkpoint's seed, and warn if the run differs from the interrupted one."""
        if self._loaders is None:  # not a fit
            return
        if self.seed is not None and self.seed != state_dict["seed"]:
            self._warn(f"seed={self.seed}, but the checkpoint's run used {state_dict['seed']}: the order changes")
        else:
            self._run_seed = state_dict["seed"]
        self._rows = state_dict.get("rows", 0)
        self._data = state_dict.get("data", [])
        if self._world_size != state_dict["world_size"]:
            message = f"{self._world_size} processes, but the checkpoint's run used {state_dict['world_size']}"
            if not self._rows:
                message += "; the epoch continues after the same number of batches, with other rows"
            self._warn(message)
        self._gradients = state_dict.get("gradients")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        state = checkpoint["callbacks"].setdefault(self.state_key, self.state_dict())
        loaders = loaders_in(combined_loader(trainer))  # self._loaders may also have loaders that were replaced
        if state and len(loaders) == 1 and isinstance(loaders[0], ResumableLoader):
            state["rows"] = loaders[0].step_rows
        if state and all(isinstance(loader, ResumableLoader) for loader in loaders):
            state["data"] = [[*loader.rows, len(loader)] for loader in loaders]
        if self._cut is not None and self._reached in ("", "epoch"):
            # Lightning ends the epoch after the last step of a fit, but a longer fit continues it.
            checkpoint["loops"]["fit_loop"] = copy.deepcopy(self._cut["loop"])
            checkpoint["epoch"] = self._cut["epoch"]
            state |= self._cut["progress"]
        elif self._reached:
            state |= self._progress(trainer)
        if not _window_is_open(trainer):
            return
        if trainer.world_size > 1:
            self._warn("a checkpoint inside an accumulation window does not hold the gradients of each process")
            return
        moved = {p: gradient for optimizer in trainer.optimizers for p, gradient in gradients_of(optimizer).items()}
        state["gradients"] = {}
        for name, p in pl_module.named_parameters():
            gradient = moved.get(p, p.grad)
            if gradient is not None:
                state["gradients"][name] = gradient.detach().clone()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        if self._loaders is None:
            return
        self._dtypes = {name: tensor.dtype for name, tensor in checkpoint.get("state_dict", {}).items()}
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if state is None:
            self._warn("the checkpoint was written without ExactResume: the data order of its epoch is unknown")
        elif "reached" in state:
            self._resumed = {key: state[key] for key in ("reached", "metrics", "results")}
            # In the checkpoint, because Lightning restores the loops after the callbacks.
            settle(checkpoint, epoch=state["reached"] == "epoch")

    def _keeps_dtypes(self, module: LightningModule) -> bool:
        """Return whether the weights are known to have the dtypes that they have in the checkpoint."""
        own = {name: p.dtype for name, p in module.named_parameters()}
        return bool(self._dtypes) and all(dtype == own.get(name, dtype) for name, dtype in self._dtypes.items())

    def _progress(self, trainer: Trainer) -> dict[str, object]:
        """Return the part of the last batch that is over, and the metrics until then."""
        results = [] if self._reached == "epoch" else unfinished(trainer)
        if trainer.world_size > 1 and any(result["logged"]["on_epoch"] for result in results):
            self._warn("the training metrics of the epoch on each process are not in the checkpoint")
            results = [result for result in results if not result["logged"]["on_epoch"]]
        return {"reached": self._reached, "metrics": monitored(trainer), "results": results}

    def _keep_cut(self, trainer: Trainer) -> None:
        """Keep the state of the loops for a longer fit if this fit stops before the end of the epoch."""
        if stops_now(trainer) and not trainer.is_last_batch:
            loop = copy.deepcopy(trainer.fit_loop.state_dict())
            self._cut = {"loop": loop, "epoch": trainer.current_epoch, "progress": self._progress(trainer)}

    def _check_data(self, trainer: Trainer) -> None:
        """Refuse to resume inside an epoch of other images, and warn of other rows of text or another number of rows.

        Raises:
            ConfigurationError: If the rows and their number in the epoch are no longer those of the checkpoint.
        """
        saved = self._data
        self._data = []
        for (rows, contents, batches), loader in zip(saved, self._loaders or []):
            state = loader.state_dict()
            inside = state["epoch"] == _epoch(trainer) and 0 < state["batches"] < batches
            now, contents_now = loader.rows
            known = bool(contents and contents_now)
            if not inside or not rows or (now == rows and (not known or contents_now == contents)):
                continue
            changed = f"{rows} rows when the checkpoint was written, and {now} now"
            if now != rows and (not known or loader.keeps_order):
                self._warn(f"the training data had {changed}: the epoch continues in another order")
                continue
            if loader.keeps_order:
                self._warn(
                    "the training data, or settings with which they are read, have changed since the checkpoint was "
                    "written: the rest of the epoch may repeat some rows and leave others out"
                )
                continue
            raise ConfigurationError(
                f"ExactResume: the training images have changed since batch {state['batches']} of an epoch, where the "
                f"checkpoint was written ({changed}; their contents or their shapes differ). The rest of the epoch "
                "would repeat some of them and leave others out. Restore the images and their settings, or resume a "
                "checkpoint of the end of an epoch."
            )

    def _keep_place(self, trainer: Trainer) -> None:
        """Continue at the same row of the epoch if the interrupted run had batches of another size.

        The size is that of all processes together. The place is rounded down to a whole batch. If the order of rows
        depends on the batch size, the number of batches stays the same instead.
        """
        before = self._rows
        self._rows = 0
        loaders = self._loaders or []
        if not before or len(loaders) != 1 or [*loaders_in(combined_loader(trainer))] != loaders:
            return
        loader = loaders[0]
        now = loader.step_rows
        state = loader.state_dict()
        if not now or before == now or state["epoch"] != _epoch(trainer):
            return
        changed = f"a step has {now} rows, not {before}: the epoch continues"
        if not loader.keeps_order:
            self._warn(f"{changed} after the same number of batches, with other rows")
            return
        batches, rest = divmod(state["batches"] * before, now)
        loader.load_state_dict({**state, "batches": batches})
        count_batches(trainer, batches)
        self._warn(f"{changed} at its row {batches * now}, {rest} rows back")

    def _finish_batch(self, trainer: Trainer) -> None:
        """Do the rest of the checkpoint's last batch, because Lightning would begin with the next one."""
        state = self._resumed
        self._resumed = {}
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

    def _warn_of_limits(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            self._warn("training_step takes dataloader_iter: batches that it fetched ahead are skipped on resume")
        if trainer.strategy.root_device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
            self._warn("kernels on this device may not be deterministic; use Trainer(deterministic=True)")

    def _warn_of_carried(self, pl_module: LightningModule) -> None:
        """Warn of attributes that the second batch has changed: a resumed run would start without their values."""
        before = self._carried
        self._carried = None
        changed = []
        with diagnostic("ExactResume", "state that the module carries from batch to batch"):
            now = attributes_of(pl_module)
            if not before:
                self._carried = now or None
                return
            changed = [name for name in now if name in before and differs(before[name], now[name])]
        if changed:
            names = ", ".join(changed[:3]) + ", ..." * (len(changed) > 3)
            self._warn(
                f"{type(pl_module).__name__} changes {names} from batch to batch, but checkpoints do not hold it; if "
                "later batches read it, make it a buffer or save it in on_save_checkpoint",
                "may",
            )

    def _warn(self, message: str, verb: str = "will") -> None:
        if message not in self._said:
            self._said.add(message)
            rank_zero_warn(f"ExactResume: resuming {verb} not be bit-exact: {message}")

    def _resumable(self, trainer: Trainer, dataloader: Any) -> object:
        """Return a resumable copy of a loader, or the loader itself if its sampler cannot be made resumable."""
        takes, remark = examine(dataloader)
        if remark:
            self._warn(remark)
        if not takes:
            return dataloader
        assert self._run_seed is not None
        assert self._loaders is not None
        loader = make_resumable(dataloader, self._run_seed, self._rank, partial(_epoch, trainer))
        self._loaders.append(loader)
        return loader

    def _unwrap(self, trainer: Trainer) -> None:
        self._loaders = None
        self._reached = ""
        self._resumed = {}
        unwrap_method(trainer.fit_loop.epoch_loop, "advance", _end_batch)
        unwrap_method(trainer.strategy, "process_dataloader", _process_dataloader)
        unwrap_method(trainer.strategy, "configure_ddp", configure_in_order)


def _process_dataloader(self: Any, dataloader: Any) -> Any:
    """Wrap of ``strategy.process_dataloader`` that makes training loaders resumable."""
    trainer = self.lightning_module.trainer
    technique = technique_of(trainer, ExactResume)
    # The trainer is in its training stage only while training loaders are processed.
    if technique is not None and technique._loaders is not None and trainer.training:
        dataloader = technique._resumable(trainer, dataloader)
    return inner_method(self, "process_dataloader", _process_dataloader)(dataloader)


def _end_batch(self: LightningModule, data_fetcher: object) -> None:
    """Replace ``epoch_loop.advance`` once. Lightning then validates, steps schedulers and ends the epoch."""
    unwrap_method(self, "advance", _end_batch)
    technique = technique_of(self.trainer, ExactResume)
    end_batch(self.trainer, validated=technique is not None and technique._reached == "validation")


def _epoch(trainer: Any) -> int:
    """Return the epoch that Lightning passes to samplers; ``trainer.current_epoch`` is behind it during a resume."""
    return int(trainer.fit_loop.epoch_progress.current.processed)


def _window_is_open(trainer: Trainer) -> bool:
    """Return whether gradients are accumulated that no optimizer step has used yet."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0 and accumulates(trainer)
