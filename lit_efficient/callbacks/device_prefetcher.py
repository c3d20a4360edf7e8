"""Device prefetching: the next batch is copied to the GPU on a separate stream, while the current one is computed.

    after the backward pass of batch k is queued:  read batch k + 1, copy it on the side stream
    before batch k + 1:                            the compute stream waits for the copy, the host does not

Saves: the time of copies from host to device, and of a loader without workers, which overlap with the device's work.
Costs: one more batch on the device, and one more on the host.
Source: torch's tutorial on pin_memory and non_blocking, https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html.
"""

from collections import Counter
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lit_efficient.declaration import Report
from lit_efficient.internals.lightning_data import combined_loader
from lit_efficient.internals.lightning_fetchers import pass_through, put_states, read_ahead
from lit_efficient.internals.lightning_loops import arrives_unchanged
from lit_efficient.internals.torch_compiler import counts
from lit_efficient.mechanisms.host_waits import HostWaits, unwatch, watch
from lit_efficient.mechanisms.moving import move, tensors_in
from lit_efficient.mechanisms.order.resumable_loader import ResumableLoader
from lit_efficient.mechanisms.rewind import random_states, same_random_states, set_random_states
from lit_efficient.mechanisms.trials.probes import loaders_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

_STATELESS = ("lightning", "pytorch_lightning")  # packages whose data modules have no state by themselves
_BEFORE = ("on_before_batch_transfer", "transfer_batch_to_device")  # hooks that get a batch on the host


class DevicePrefetcher(Technique):
    """Copy batches to the GPU on a separate stream, and the next training batch while the current step runs.

    Order, random numbers and resuming do not change: a batch that was only read ahead does not count. If a data set
    draws random numbers in this process, or a hook of the module changes the transfer, less is prefetched, and a log
    line gives the reason. Changes that a callback makes to the data after a step take effect one batch later. On a CPU
    the technique has no effect.

    In the second step, unless modules are compiled, the places where the host waits for the device are recorded and
    logged with file and line.

    Args:
        ahead: Read the next training batch during the current step. Otherwise batches are only copied on a separate
            stream.
    """

    traits = frozenset({Trait.LEAVES_TRACES})  # trial steps would read the run's own batches ahead
    computes = "same"
    helps = {"speed": (4, "a GPU does not wait for copies of its batches")}

    def __init__(self, ahead: bool = True) -> None:
        super().__init__()
        self.ahead = ahead
        self._device = torch.device("cpu")
        self._stream: Any = None
        self._reads_ahead: bool | None = None  # None until the second batch shows whether the data draws here
        self._seeded = False  # True if every loader seeds each batch
        self._batches = 0  # training batches that were read
        self._in_epoch = 0  # the same in this epoch
        self._before: dict[str, object] | None = None  # states of all generators before a batch was read
        self._after: dict[str, object] | None = None  # states of all generators after a batch was read ahead
        self._behind: Any = None  # the loaders' states without a batch that was read ahead and is not used yet
        self._begun: Any = None  # event at which the compute stream began with the latest batch
        self._waits: HostWaits | None = None
        self._said: set[str] = set()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._device = trainer.strategy.root_device
        self._stream = None
        self._reads_ahead = None if self.ahead else False
        self._batches = 0
        self._behind = None
        self._begun = None
        self._after = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)
            self._stream = torch.cuda.Stream(self._device)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        unwatch(trainer, self._watched)
        super().teardown(trainer, pl_module, stage)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wrap_loop(trainer, trainer.fit_loop, training=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        fitting = trainer.state.fn == "fit"
        self._wrap_loop(trainer, trainer.fit_loop.epoch_loop.val_loop if fitting else trainer.validate_loop)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wrap_loop(trainer, trainer.test_loop)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wrap_loop(trainer, trainer.predict_loop)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if self._stream is not None and self._waits is None and self._batches > 1:
            self._waits = HostWaits()
            if not counts()[2]:  # the compiler would not compile functions that it meets first while they are watched
                watch(trainer, self._watched)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._reads_ahead or self._stream is None:
            return
        before = random_states() if self._seeded else None
        behind = read_ahead(trainer)
        if behind is None:
            return
        self._behind = behind
        if before is not None:
            # Reading the batch has seeded the generators. The rest of this step must draw as if it were not read yet.
            self._after = random_states()
            set_random_states(before)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        unwatch(trainer, self._watched)
        if self._waits is not None and self._waits.places:
            places = "".join(f"\n  {place}" for place, _ in self._waits.places.most_common(8))
            self._waits.places = Counter()
            rank_zero_warn(f"DevicePrefetcher: in a step the host waits for the device, which then idles, in:{places}")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._behind is not None:
            put_states(checkpoint, self._behind)

    def describe(self, module: nn.Module) -> Report:
        if self._device.type != "cuda":
            return Report(f"no effect on a {self._device.type}, where batches are not copied", idle=True)
        return Report("batches are copied on a separate stream" + ", the next one during the step" * self.ahead)

    def _wrap_loop(self, trainer: Any, loop: object, training: bool = False) -> None:
        """Have a loop's batches pass through this object, unless a hook or the module needs them on the host."""
        if self._stream is None:
            return
        reading = (_nothing, self._move, self._arrived)
        if training:
            reading = (self._before_read, self._after_read, self._before_step)
        if not arrives_unchanged(trainer, _BEFORE):
            self._say("a hook of the module or its data changes the transfer: its batches are copied as before")
        elif not pass_through(loop, *reading):
            self._say("the module uses the iterator itself: its batches are copied as before")
        elif training:
            loaders = loaders_in(combined_loader(trainer))
            self._seeded = all(isinstance(loader, ResumableLoader) for loader in loaders)
            self._in_epoch = 0
            state_dict = getattr(type(trainer.datamodule), "state_dict", None)
            if not str(getattr(state_dict, "__module__", "lightning")).startswith(_STATELESS):
                self._reads_ahead = False
                self._say("the data module has a state, which may count read batches: nothing is read ahead")
            elif self._seeded and self.ahead:
                self._reads_ahead = True

    def _before_read(self) -> None:
        # A sampler may draw at an epoch's start, before the first batch, which is never read ahead.
        observes = self._reads_ahead is not False and not self._seeded and self._in_epoch
        self._before = random_states() if observes else None

    def _after_read(self, batch: object) -> object:
        self._batches += 1
        self._in_epoch += 1
        if self._before is not None:
            self._reads_ahead = same_random_states(self._before, random_states())
            if not self._reads_ahead:
                self._say("reading a batch draws random numbers in this process: batches are not read ahead")
        return self._move(batch)

    def _move(self, batch: object) -> object:
        if self._begun is not None:  # the copy may then overwrite the memory of batches before the latest one
            self._stream.wait_event(self._begun)
        with torch.cuda.stream(self._stream):
            moved = move(batch, self._device)
        if any(not tensor.is_pinned() for tensor in tensors_in(batch) if tensor.device.type == "cpu"):
            self._say("batches are not pinned, so the host waits during copies: use DataLoader(pin_memory=True)")
        return moved

    def _before_step(self, batch: object) -> object:
        self._behind = None
        if self._after is not None:
            set_random_states(self._after)
            self._after = None
        return self._arrived(batch)

    def _arrived(self, batch: object) -> object:
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        self._begun = current.record_event()
        for tensor in tensors_in(batch):
            if tensor.device.type == "cuda":
                tensor.record_stream(current)  # else a copy could overwrite its memory while this stream reads it
        return batch

    def _watched(self) -> HostWaits:
        assert self._waits is not None
        return self._waits

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            rank_zero_info(f"DevicePrefetcher: {message}")


def _nothing() -> None:
    return None
