"""Throughput with and without padding, model FLOPs utilisation, memory by kind: `RunMetrics` and more.

    tokens_per_second_padded    including padding; samples_per_second_padded for batches without input_ids
    mfu                 operations that the model needs for tokens without padding, as a fraction of the device's peak
    hfu                 all executed operations (also of recomputation, padding and attention between documents), as a
                        fraction of that peak
    model_tflops        operations that the model needs, in 1e12 per second and device
    memory_KIND_gib     KIND: weights, gradients, optimizer (states), activations (of a forward pass; not on a CPU)
    device_memory_gib   memory in use on the device, by all programs
    host_memory_gib     peak memory of the process

Costs: one wait for the device per logged step; one step is slower, because its operations are counted.
Source: Chowdhery et al. (2022), PaLM, appendix B, https://arxiv.org/abs/2204.02311.
"""

from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.declaration import in_order, techniques_of
from lit_efficient.distributed.row_slices import ROW_POSITIONS
from lit_efficient.errors import check_number, diagnostic
from lit_efficient.internals.lightning_strategies import readers
from lit_efficient.mechanisms.flops import FlopMeter, Flops, peak_flops_of
from lit_efficient.mechanisms.host_waits import unwatch, watch
from lit_efficient.mechanisms.metering import Amount, held_bytes, measure, peak_memory, short_number
from lit_efficient.mechanisms.run_figures import RunFigures
from lit_efficient.traits import Trait

_TRIES = 3  # steps without counted operations before counting is given up
_DRAWS = 16  # steps that are counted if techniques draw at random what a step computes


class ThroughputMeter(RunFigures):
    """Log everything that `RunMetrics` logs, throughput with padding, model FLOPs utilisation, and memory by kind.

    Use it instead of `RunMetrics`, in any Lightning code. The last values are also in the attribute ``figures``, so no
    logger is needed, and a summary is printed at the end of the fit. Operations are counted on the first batch (on 16
    batches if blocks are dropped at random), and again when other parameters train. For other batches they are scaled:
    with the number of tokens, and for attention with the squared lengths of documents. Checkpoints keep the counts.

    Args:
        count_flops: Count operations, for ``mfu``. One step is slower and not compiled.
        peak_flops: Peak operations per second of one device. ``null``: from a table, by the device's name and the
            dtypes of the operations.

    Raises:
        ConfigurationError: If ``peak_flops`` is not above 0.
    """

    def __init__(self, count_flops: bool = True, peak_flops: float | None = None) -> None:
        check_number("ThroughputMeter", "peak_flops", peak_flops, above=0, null=True)
        super().__init__()
        self.count_flops = count_flops
        self.peak_flops = peak_flops
        self.figures: dict[str, float] = {}
        self.flops: Flops | None = None  # operations per position and pair of positions, once they are counted
        self._by_type: Counter[torch.dtype] = Counter()  # counted operations by dtype
        self._trained = 0  # number of trained parameter elements when operations were counted
        self._techniques: list[Any] | None = None  # records of the techniques with which operations were counted
        self._meter: FlopMeter | None = None  # exists during a step that is counted
        self._tries = 0  # steps in which no operation was counted
        self._left = 1  # steps still to count
        self._so_far: tuple[FlopMeter, Amount] | None = None  # sums of earlier steps, if several are counted
        self._counted_in_window = False  # a step since the last logged one was counted and therefore slow
        # Data, seconds and seconds of waiting for data, without windows in which operations were counted.
        self._total = Amount()
        self._seconds = 0.0
        self._seconds_waited = 0.0
        self._gradients = 0  # bytes of gradients
        self._before = 0  # bytes on the device before the batch
        self._activations = 0  # bytes on the device that the forward pass added

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.flops = None
        self.figures = {}
        self._tries = 0
        self._left = _steps_to_count(trainer)
        self._so_far = None
        self._total = Amount()
        self._seconds = 0.0
        self._seconds_waited = 0.0

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop_counting(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop_counting(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self.count_flops and self._left and self._tries < _TRIES:
            with diagnostic("ThroughputMeter", f"the batch, a {type(batch).__name__},"):
                amount, _ = measure(batch)
                if amount.squares:  # tokens in rows
                    rows = batch.get(ROW_POSITIONS, batch["input_ids"])
                    self._meter = FlopMeter(rows.shape[1], sliced=rows is not batch["input_ids"])
                else:
                    self._meter = FlopMeter()
                watch(trainer, self._counting)
        self._before = _allocated(trainer)
        self._activations = 0

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._activations = max(self._activations, _allocated(trainer) - self._before)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._activations = max(self._activations, _allocated(trainer) - self._before)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        if self._logs(trainer):
            with diagnostic("ThroughputMeter", "the memory of gradients"):
                self._gradients = held_bytes(parameter.grad for parameter in pl_module.parameters())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        meter = self._stop_counting(trainer)
        if meter is not None and meter.sums:
            with diagnostic("ThroughputMeter", "the operations of a step"):
                self._add_counts(trainer, pl_module, meter, batch)
        elif meter is not None:
            self._tries += 1
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _add_counts(self, trainer: Trainer, module: LightningModule, meter: FlopMeter, batch: object) -> None:
        """Take over the operations that were counted in a step, and report them after the last counted step."""
        amount, unit = measure(batch)
        if self._so_far is not None:
            earlier_meter, earlier_amount = self._so_far
            meter.sums = earlier_meter.sums + meter.sums
            meter.by_type = earlier_meter.by_type + meter.by_type
            amount = earlier_amount + amount
        self._left -= 1
        self._so_far = (meter, amount) if self._left else None
        self.flops = meter.per(amount)
        self._by_type = meter.by_type
        self._trained = _trained(module)
        self._counted_in_window = True
        if not self._left:
            self._report(trainer, meter, unit, amount)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._so_far is not None:  # the run has ended before the last step to count
            meter, amount = self._so_far
            self._report(trainer, meter, self._unit, amount)
        if not self._seconds:
            return
        real = float(self._total.real) * readers(trainer)
        positions = self._total.positions * readers(trainer)
        throughput = f"{short_number(real / self._seconds)} {self._unit}/s"
        if positions > real:
            throughput += f" ({short_number(positions / self._seconds)} with padding)"
        parts = [throughput]
        for name in ("mfu", "hfu"):
            if name in self.figures:
                parts.append(f"{name.upper()} {self.figures[name]:.1%}")
        parts.append(f"{min(self._seconds_waited / self._seconds, 1.0):.1%} of the time waiting for data")
        sizes = []
        for kind in ("weights", "gradients", "optimizer", "activations"):
            size = self.figures.get(f"memory_{kind}_gib", 0.0)
            if size:
                sizes.append(f"{kind} {size:.3g}")
        parts.append("GiB: " + ", ".join(sizes))
        rank_zero_info(f"ThroughputMeter: {'; '.join(parts)}")

    def state_dict(self) -> dict[str, Any]:
        """Return the counted operations, so that a resumed run does not count again."""
        if self.flops is None:
            return {}
        by_type = {str(dtype).removeprefix("torch."): count for dtype, count in self._by_type.items()}
        return {
            "flops": asdict(self.flops),
            "by_type": by_type,
            "trained": self._trained,
            "techniques": self._techniques,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.flops = Flops(**state_dict["flops"])
        self._trained = state_dict["trained"]
        self._left = 0
        self._by_type = Counter({getattr(torch, name): count for name, count in state_dict["by_type"].items()})
        self._techniques = state_dict.get("techniques")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        techniques = [technique.record() for technique in in_order(techniques_of(trainer))]
        if self._techniques not in (None, techniques):  # a step with other techniques computes something else
            self.flops = None
            self._left = _steps_to_count(trainer)
        self._techniques = techniques

    def _watches(self, trainer: Trainer) -> bool:
        return True

    def _more(self, trainer: Trainer, seconds: float) -> dict[str, float]:
        module = trainer.lightning_module
        device = trainer.strategy.root_device
        values = {f"{self._unit}_per_second_padded": self._amount.positions * readers(trainer) / seconds}
        if self.flops is not None:
            model = self.flops.model(self._amount) / seconds
            values["model_tflops"] = model / 1e12
            peak = self.peak_flops or peak_flops_of(device, self._by_type)
            if peak:
                values["mfu"] = model / peak
                values["hfu"] = self.flops.hardware(self._amount) / seconds / peak
        sizes = {
            "weights": held_bytes([*module.parameters(), *module.buffers()]),
            "gradients": self._gradients,
            "optimizer": held_bytes(_optimizer_states(trainer)),
            "activations": self._activations,
        }
        values |= {f"memory_{name}_gib": size / 2**30 for name, size in sizes.items() if size}
        if device.type != "cpu":
            used = _used(device)
            if used:
                values["device_memory_gib"] = used / 2**30
            peak_host = peak_memory(torch.device("cpu"))
            if peak_host:
                values["host_memory_gib"] = peak_host / 2**30
        if not self._counted_in_window:
            self._total = self._total + self._amount
            self._seconds += seconds
            self._seconds_waited += self._waited
        self._counted_in_window = False
        if self.flops is not None and _trained(module) != self._trained:
            # Other parameters train now, so a step computes other gradients: count again.
            self.flops = None
            self._left = _steps_to_count(trainer)
            self._so_far = None
        self.figures = {"data_wait": min(self._waited / seconds, 1.0), **values}
        return values

    def _stop_counting(self, trainer: Trainer) -> FlopMeter | None:
        meter = self._meter
        self._meter = None
        unwatch(trainer, self._counting)
        return meter

    def _counting(self) -> ExitStack:
        """Return a context for a pass whose operations are counted. Compiled code would hide its operators."""
        stack = ExitStack()
        # The meter is active already in a backward pass that manual optimization runs within training_step.
        if self._meter is not None and not self._meter.active:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self._meter)
        return stack

    def _report(self, trainer: Trainer, meter: FlopMeter, unit: str, amount: Amount) -> None:
        assert self.flops is not None
        model = self.flops.model(amount)
        hardware = self.flops.hardware(amount)
        text = f"{short_number(model / max(float(amount.real), 1.0))} operations per {unit.removesuffix('s')}, "
        text += f"{hardware / max(model, 1.0):.2f} times as many are executed; "
        peak = self.peak_flops or peak_flops_of(trainer.strategy.root_device, self._by_type)
        if peak:
            text += f"peak of the device: {short_number(peak)} per second"
        else:
            text += "no MFU, because the peak of the device is unknown: set peak_flops"
        if meter.unknown:
            text += f". Not counted: {', '.join(sorted(meter.unknown)[:5])}"
        rank_zero_info(f"ThroughputMeter: {text}")


def _steps_to_count(trainer: Trainer) -> int:
    draws = any(Trait.DRAWS_WORK in technique.traits for technique in techniques_of(trainer))
    return _DRAWS if draws else 1


def _trained(module: nn.Module) -> int:
    """Return the number of elements of the parameters that require a gradient."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _optimizer_states(trainer: Trainer) -> list[object]:
    """Return the values in the states of all optimizers."""
    values: list[object] = []
    for optimizer in trainer.optimizers:
        for state in getattr(optimizer, "state", {}).values():  # wrappers of other packages may have no state
            if isinstance(state, dict):
                values += state.values()
    return values


def _allocated(trainer: Trainer) -> int:
    """Return the bytes that an accelerator's allocator has given to tensors, or 0 on a CPU."""
    device = trainer.strategy.root_device
    if device.type == "cpu":
        return 0
    try:
        return int(torch.accelerator.memory_allocated(device))
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return 0


def _used(device: torch.device) -> int:
    """Return the bytes in use on an accelerator by all programs, or 0 if they are unknown."""
    try:
        free, total = torch.accelerator.get_memory_info(device)
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return 0
    return int(total - free)
