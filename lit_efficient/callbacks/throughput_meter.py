"""Tokens a second with and without padding, model FLOPs utilisation, memory by kind: `RunMetrics` and more.

    tokens_per_second_padded    padding counted, too; samples_per_second_padded of what has no input_ids
    mfu, hfu            operations a second over what the device can do: those that the model's real tokens need, and
                        all that are computed, again for the backward pass, for padding and between documents, too
    model_tflops        the former, in 1e12 a second and device
    memory_KIND_gib     weights, gradients, optimizer (its states), activations (a forward pass's; not on a CPU)
    device_memory_gib   in use on the device, by all programs
    host_memory_gib     most that the process took

Costs: one wait for the device a logged step, none between; one step, whose operations are counted, is slower.
Source: Chowdhery et al. (2022), PaLM, appendix B, https://arxiv.org/abs/2204.02311.
"""

from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lit_efficient.declaration import in_order, techniques_of
from lit_efficient.distributed.ranks import readers
from lit_efficient.distributed.row_slices import ROW_POSITIONS
from lit_efficient.errors import check_number
from lit_efficient.mechanisms.flops import FlopMeter, Flops, peak_flops_of
from lit_efficient.mechanisms.host_waits import unwatch, watch
from lit_efficient.mechanisms.metering import Amount, held_bytes, measure, peak_memory, short_number
from lit_efficient.mechanisms.run_figures import RunFigures
from lit_efficient.traits import Trait

_TRIES, _DRAWS = 3, 16


class ThroughputMeter(RunFigures):
    """All of `RunMetrics`, tokens with padding, model FLOPs utilisation, memory by kind; a line at the end of the fit.

    It takes the place of `RunMetrics`, in any Lightning code, and counts without a logger, too: ``figures`` has the
    last ones. Operations are counted on the first batch, on 16 where blocks are dropped, and again when other weights
    train; they grow with the tokens of a batch, and attention with the squares of their documents. A checkpoint keeps
    them.

    Args:
        count_flops: whether to count operations, for ``mfu``; it takes one step that is slower and not compiled.
        peak_flops: operations a second that one device can do. ``null``: by its name and the numbers' types, where that
            is known.

    Raises:
        ConfigurationError: if ``peak_flops`` is not above 0.
    """

    def __init__(self, count_flops: bool = True, peak_flops: float | None = None) -> None:
        check_number("ThroughputMeter", "peak_flops", peak_flops, above=0, null=True)
        super().__init__()
        self.count_flops = count_flops
        self.peak_flops = peak_flops
        self.figures: dict[str, float] = {}
        self.flops: Flops | None = None  # of a position and a pair of positions, once they are counted
        self._by_type: Counter[torch.dtype] = Counter()
        self._trained = 0  # elements of the parameters that trained when it was counted
        self._beside: list[Any] | None = None  # the techniques of the run that counted, of a checkpoint
        self._meter: FlopMeter | None = None  # while it counts
        self._tries = 0  # steps that had no operation to count
        self._left = 1  # steps to count
        self._so_far: tuple[FlopMeter, Amount] | None = None  # where it counts several
        self._total, self._steady = Amount(), [0.0, 0.0]  # without windows in which it counted; seconds, waited
        self._counted_in = False
        self._gradients = 0  # bytes
        self._before = self._activations = 0  # bytes on the device: before a batch, and what it added

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.flops, self.figures, self._tries = None, {}, 0
        self._left, self._so_far = _steps(trainer), None
        self._total, self._steady = Amount(), [0.0, 0.0]

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._stop_counting(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._stop_counting(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self.count_flops and self._left and self._tries < _TRIES:
            rows = batch.get(ROW_POSITIONS, batch["input_ids"]) if measure(batch)[0].squares else None
            self._meter = FlopMeter() if rows is None else FlopMeter(rows.shape[1], rows is not batch["input_ids"])
            watch(trainer, self._counting)
        self._before, self._activations = _allocated(trainer), 0

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        self._activations = max(self._activations, _allocated(trainer) - self._before)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self._activations = max(self._activations, _allocated(trainer) - self._before)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        if self._logs(trainer):
            self._gradients = held_bytes(parameter.grad for parameter in pl_module.parameters())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        meter = self._stop_counting(trainer)
        self._tries += meter is not None and not meter.sums
        if meter is not None and meter.sums:
            amount, unit = measure(batch)
            if self._so_far is not None:
                before, held = self._so_far
                meter.sums, meter.by_type, amount = (
                    before.sums + meter.sums,
                    before.by_type + meter.by_type,
                    held + amount,
                )
            self._left -= 1
            self._so_far = (meter, amount) if self._left else None
            self.flops, self._by_type = meter.per(amount), meter.by_type
            self._trained, self._counted_in = _trained(pl_module), True
            if not self._left:
                self._say(trainer, meter, unit, amount)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._so_far is not None:  # the run is shorter than what is counted
            self._say(trainer, self._so_far[0], self._unit, self._so_far[1])
        seconds, waited = self._steady
        if not seconds:
            return
        kinds = ("weights", "gradients", "optimizer", "activations")
        held = {kind: self.figures.get(f"memory_{kind}_gib", 0.0) for kind in kinds}
        real, positions = (count * readers(trainer) for count in (float(self._total.real), self._total.positions))
        parts = [f"{short_number(real / seconds)} {self._unit}/s"]
        if positions > real:
            parts[0] += f" ({short_number(positions / seconds)} with padding)"
        parts += [f"{name.upper()} {self.figures[name]:.1%}" for name in ("mfu", "hfu") if name in self.figures]
        parts.append(f"{min(waited / seconds, 1.0):.1%} of the time waiting for data")
        parts.append("GiB: " + ", ".join(f"{kind} {size:.3g}" for kind, size in held.items() if size))
        rank_zero_info(f"ThroughputMeter: {'; '.join(parts)}")

    def state_dict(self) -> dict[str, Any]:
        """What was counted: a resumed run does not count again, as the run that went on would not."""
        if self.flops is None:
            return {}
        by_type = {str(dtype).removeprefix("torch."): count for dtype, count in self._by_type.items()}
        return {"flops": asdict(self.flops), "by_type": by_type, "trained": self._trained, "techniques": self._beside}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.flops, self._trained, self._left = Flops(**state_dict["flops"]), state_dict["trained"], 0
        self._by_type = Counter({getattr(torch, name): count for name, count in state_dict["by_type"].items()})
        self._beside = state_dict.get("techniques")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        techniques = [one.record() for one in in_order(techniques_of(trainer))]
        if self._beside not in (None, techniques):
            self.flops, self._left = None, _steps(trainer)  # others may compute more, or less
        self._beside = techniques

    def _watches(self, trainer: Any) -> bool:
        return True

    def _more(self, trainer: Any, seconds: float) -> dict[str, float]:
        module, device = trainer.lightning_module, trainer.strategy.root_device
        values = {f"{self._unit}_per_second_padded": self._amount.positions * readers(trainer) / seconds}
        if self.flops is not None:
            model = self.flops.model(self._amount) / seconds
            values["model_tflops"] = model / 1e12
            if peak := self.peak_flops or peak_flops_of(device, self._by_type):
                values |= {"mfu": model / peak, "hfu": self.flops.hardware(self._amount) / seconds / peak}
        optimizers = [getattr(optimizer, "state", {}) for optimizer in trainer.optimizers]  # some have none
        states = [state for kept in optimizers for state in kept.values() if isinstance(state, dict)]
        sizes = {
            "weights": held_bytes([*module.parameters(), *module.buffers()]),
            "gradients": self._gradients,
            "optimizer": held_bytes(value for state in states for value in state.values()),
            "activations": self._activations,
        }
        values |= {f"memory_{name}_gib": size / 2**30 for name, size in sizes.items() if size}
        if device.type != "cpu":
            if used := _used(device):
                values["device_memory_gib"] = used / 2**30
            if peak_host := peak_memory(torch.device("cpu")):
                values["host_memory_gib"] = peak_host / 2**30
        if not self._counted_in:
            self._total = self._total + self._amount
            self._steady = [self._steady[0] + seconds, self._steady[1] + self._waited]
        self._counted_in = False
        if self.flops is not None and _trained(module) != self._trained:
            self.flops, self._left, self._so_far = None, _steps(trainer), None  # other weights train
        self.figures = {"data_wait": min(self._waited / seconds, 1.0), **values}
        return values

    def _stop_counting(self, trainer: Any) -> FlopMeter | None:
        meter, self._meter = self._meter, None
        unwatch(trainer, self._counting)
        return meter

    def _counting(self) -> ExitStack:
        """What a pass is counted in; a compiled one would hide its operators."""
        stack = ExitStack()
        if self._meter is not None and not self._meter.active:  # manual optimization goes backward within the step
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self._meter)
        return stack

    def _say(self, trainer: Any, meter: FlopMeter, unit: str, amount: Amount) -> None:
        assert self.flops is not None
        model, hardware = self.flops.model(amount), self.flops.hardware(amount)
        peak = self.peak_flops or peak_flops_of(trainer.strategy.root_device, self._by_type)
        text = f"{short_number(model / max(float(amount.real), 1.0))} operations a {unit.removesuffix('s')}, "
        text += f"{hardware / max(model, 1.0):.2f} times that are computed; "
        text += f"the device can do {short_number(peak)} a second" if peak else "no MFU: give peak_flops of the device"
        if meter.unknown:
            text += f". Not counted: {', '.join(sorted(meter.unknown)[:5])}"
        rank_zero_info(f"ThroughputMeter: {text}")


def _steps(trainer: Any) -> int:
    return _DRAWS if any(Trait.DRAWS_WORK in one.traits for one in techniques_of(trainer)) else 1


def _trained(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _allocated(trainer: Any) -> int:
    """Bytes that tensors take on an accelerator now, by its allocator's own books; 0 on a CPU."""
    device = trainer.strategy.root_device
    try:
        return int(torch.accelerator.memory_allocated(device)) if device.type != "cpu" else 0
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return 0


def _used(device: torch.device) -> int:
    try:
        free, total = torch.accelerator.get_memory_info(device)
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return 0
    return int(total - free)
