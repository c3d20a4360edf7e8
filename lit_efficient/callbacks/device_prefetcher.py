"""Device prefetching: the next batch is copied to the GPU on a stream of its own, while this one is computed.

    after the backward pass of batch k is queued:  read batch k + 1, copy it on the side stream
    before batch k + 1:                            the compute stream waits for the copy, the host does not

Saves: the time of the copies from host to device, and of a loader without workers, behind the device's work.
Costs: one more batch on the device, and one more on the host.
Source: torch's tutorial on pin_memory and non_blocking, https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html.
"""

from lightning.pytorch import LightningModule, Trainer
from collections import Counter
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

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

_STATELESS = ("lightning", "pytorch_lightning")  # whose data modules have no state by themselves
_BEFORE = ("on_before_batch_transfer", "transfer_batch_to_device")  # hooks that take a batch on the host


class DevicePrefetcher(Technique):
    """Copy each batch to the GPU on a stream of its own, and that of the next training step while this one runs.

    Order, random draws and resuming stay what they are: a batch that was only read ahead does not count. Where a data
    set draws random numbers in this process, or a hook of the module has a hand in the transfer, it does less, and says
    so. What a callback changes in the data after a step reaches the batch after the next. On a CPU it does nothing.

    In the second step, unless something is compiled, it looks where the host waits for the device, and names file and
    line.

    Args:
        ahead: whether to read the next training batch while this one is computed; without, batches are only copied on
            a stream of their own.
    """

    traits = frozenset({Trait.LEAVES_TRACES})  # it reads the run's own batches
    computes = "same"
    helps = {"speed": (4, "a GPU does not wait for its batches to be copied")}

    def __init__(self, ahead: bool = True) -> None:
        super().__init__()
        self.ahead = ahead
        self._device = torch.device("cpu")
        self._stream: Any = None
        self._reads_ahead: bool | None = None  # None: the second batch will show whether the data draws here
        self._seeded = False  # every loader seeds each batch itself
        self._batches = 0  # that training has read
        self._in_epoch = 0
        self._then: dict[str, Any] | None = None  # states of all generators before a batch was read
        self._after: dict[str, Any] | None = None  # states of all generators after a batch was read ahead
        self._behind: Any = None  # the loaders' states without a batch that waits, or was never used
        self._begun: Any = None  # the event at which the compute stream came to the latest batch
        self._waits: HostWaits | None = None
        self._said: set[str] = set()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._device, self._stream = trainer.strategy.root_device, None
        self._reads_ahead, self._batches = (None if self.ahead else False), 0
        self._behind = self._begun = self._after = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        unwatch(trainer, self._looking)
        super().teardown(trainer, pl_module, stage)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take(trainer, trainer.fit_loop, training=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        fitting = trainer.state.fn == "fit"
        self._take(trainer, trainer.fit_loop.epoch_loop.val_loop if fitting else trainer.validate_loop)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take(trainer, trainer.test_loop)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take(trainer, trainer.predict_loop)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if self._stream is not None and self._waits is None and self._batches > 1:
            self._waits = HostWaits()
            if not counts()[2]:  # the compiler gives up on what it meets for the first time while it is watched
                watch(trainer, self._looking)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._reads_ahead or self._stream is None:
            return
        states = random_states() if self._seeded else None
        behind = read_ahead(trainer)
        if behind is not None:
            self._behind = behind
            if states is not None:  # draws are as if the batch were read when its turn comes
                self._after = random_states()
                set_random_states(states)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int) -> None:
        unwatch(trainer, self._looking)
        if self._waits is not None and self._waits.places:
            places, self._waits.places = self._waits.places, Counter()
            listed = "".join(f"\n  {place}" for place, _ in places.most_common(8))
            rank_zero_warn(f"DevicePrefetcher: in a step the host waits for the device, which then idles:{listed}")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._behind is not None:
            put_states(checkpoint, self._behind)

    def describe(self, module: Any) -> Report:
        if self._device.type != "cuda":
            return Report(f"nothing to do on a {self._device.type}: batches stay where they are")
        return Report("batches are copied on a stream of their own" + ", the next one while this one runs" * self.ahead)

    def _take(self, trainer: Trainer, loop: Any, training: bool = False) -> None:
        if self._stream is None:
            return
        reading = (_nothing, self._move, self._arrived)
        if training:
            reading = (self._asked, self._read, self._trained_on)
        if not arrives_unchanged(trainer, _BEFORE):
            self._say("a hook of the module or its data has a hand in the transfer: its batches are copied as before")
        elif not pass_through(loop, *reading):
            self._say("the module takes the iterator itself: its batches are copied as before")
        elif training:
            loaders = loaders_in(combined_loader(trainer))
            self._seeded, self._in_epoch = all(isinstance(loader, ResumableLoader) for loader in loaders), 0
            keeper = getattr(type(trainer.datamodule), "state_dict", None)
            if not str(getattr(keeper, "__module__", "lightning")).startswith(_STATELESS):
                self._reads_ahead = False
                self._say("the data module has a state, which may count what is read: nothing is read ahead")
            elif self._seeded and self.ahead:
                self._reads_ahead = True

    def _asked(self) -> None:
        # A sampler may draw at an epoch's start, and nothing is read ahead of that.
        probes = self._reads_ahead is not False and not self._seeded and self._in_epoch
        self._then = random_states() if probes else None

    def _read(self, batch: Any) -> Any:
        self._batches, self._in_epoch = self._batches + 1, self._in_epoch + 1
        if self._then is not None:
            self._reads_ahead = same_random_states(self._then, random_states())
            if not self._reads_ahead:
                self._say("reading a batch draws random numbers in this process: it waits for the batch's turn")
        return self._move(batch)

    def _move(self, batch: Any) -> Any:
        if self._begun is not None:  # memory of batches before that is free to be written to
            self._stream.wait_event(self._begun)
        with torch.cuda.stream(self._stream):
            moved = move(batch, self._device)
        if any(not tensor.is_pinned() for tensor in tensors_in(batch) if tensor.device.type == "cpu"):
            self._say("batches are not pinned, the host waits while they are copied: DataLoader(pin_memory=True)")
        return moved

    def _trained_on(self, batch: Any) -> Any:
        self._behind = None
        if self._after is not None:
            set_random_states(self._after)
            self._after = None
        return self._arrived(batch)

    def _arrived(self, batch: Any) -> Any:
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        self._begun = current.record_event()
        for tensor in tensors_in(batch):
            if tensor.device.type == "cuda":
                tensor.record_stream(current)  # or its memory could go to a copy while this stream reads it
        return batch

    def _looking(self) -> HostWaits:
        assert self._waits is not None
        return self._waits

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            rank_zero_info(f"DevicePrefetcher: {what}")


def _nothing() -> None:
    return None
