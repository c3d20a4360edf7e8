"""Three small trainings, and the comparison of each with and without a technique, for techniques.py.

Runs with and without the technique alternate in one process, from the same seed on the same data. Bytes and loss are
exact. Times are CPU seconds of the process, so that other load slows both runs alike.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import lit_efficient as le
from lit_efficient.internals.torch_dispatch import has_values
from lit_efficient.mechanisms.trials.memory import AllocationMeter, SavedTensors
from tests.state_bytes import measure_state_bytes

CONFIGS = Path(__file__).parent.parent / "configs" / "tasks"
MakeOptimizer = Callable[[Any], Optimizer]
WARM_UP = 4  # steps that are not timed
COUNTED = 3  # the step whose bytes are counted: all states are there by then


class ResNet(nn.Module):
    """The residual network of He et al. (2016) for small images, without layers of this package."""

    class Block(nn.Module):
        def __init__(self, entering: int, leaving: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(entering, leaving, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(leaving)
            self.conv2 = nn.Conv2d(leaving, leaving, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(leaving)
            same = stride == 1 and entering == leaving
            self.shortcut = nn.Identity() if same else nn.Conv2d(entering, leaving, 1, stride, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
            return F.relu(out + self.shortcut(x))

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64), depth: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU())
        blocks = []
        for before, width in zip((widths[0], *widths), widths):
            for i in range(depth):
                stride = 1
                if i == 0 and before != width:
                    stride = 2
                blocks.append(self.Block(before if i == 0 else width, width, stride))
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


class Classifier(L.LightningModule):
    """LightningModule that classifies digits without this package."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ResNet()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Digits(L.LightningDataModule):
    """scikit-learn's digits, in batches of 64."""

    def setup(self, stage: str) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        pixels = F.interpolate(torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, 16)
        rows = TensorDataset(pixels, torch.tensor(labels))
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
        self.val = torch.utils.data.Subset(rows, order[:256])
        self.train = torch.utils.data.Subset(rows, order[256:])

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, 64, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, 128)


def _gpt() -> L.LightningModule:
    shape = le.GPTConfig(dim=128, depth=4, num_heads=4, max_length=512)
    return le.LanguageModeling(shape, learning_rate=2e-3, warmup_steps=0)


def experts() -> L.LightningModule:
    """Return a Qwen3-MoE as large as the GPT, without a balancing loss."""
    fields = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 4}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 2048}
    fields |= {"num_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False, "model_type": "qwen3_moe"}
    return le.LanguageModeling(le.CausalLMConfig(config_fields=fields), learning_rate=2e-3, warmup_steps=0)


def _dit() -> L.LightningModule:
    return le.LatentDiffusion(learning_rate=2e-3)


# name -> what makes the module, and its data
MODELS: dict[str, tuple[Callable[[], L.LightningModule], Callable[[], L.LightningDataModule]]] = {
    "GPT": (_gpt, lambda: le.PythonCorpus(vocab_size=2048, sequence_length=128, batch_size=8, val_batch_size=32)),
    "DiT": (_dit, lambda: le.LatentDigits(image_size=32, batch_size=64)),
    "ResNet": (Classifier, Digits),
}


@dataclass(frozen=True)
class Setting:
    """Settings of one measured technique.

    Args:
        callbacks: Function that returns the callbacks.
        optimizer: Function from the module's parameter groups to an optimizer that replaces AdamW.
        trainer: Arguments of the trainer, also for the plain run.
        plugins: Function that returns the plugins.
        shown: Settings shown in the table. Empty for the defaults.
        beside: Function that returns callbacks of both runs.
        module: Function that returns the module of both runs, in place of the model's.
        traced: Whether every operator of a step can be intercepted. False for a compiled step.
    """

    callbacks: Callable[[], list[Any]] = list
    optimizer: MakeOptimizer | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    plugins: Callable[[], list[Any]] = list
    shown: str = ""
    beside: Callable[[], list[Any]] = list
    traced: bool = True
    module: Callable[[], L.LightningModule] | None = None


class _Steps(L.Callback):
    """Callback that records the CPU seconds of each optimizer step, including its hooks."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == len(self.marks) + 1:  # not within an accumulation window
            self.marks.append(time.process_time())


class _Bytes(L.Callback):
    """Callback that records the bytes of one step by kind, and the most bytes alive at the same time."""

    def __init__(self, before: set[int], traced: bool) -> None:
        self.before = before
        self.traced = traced
        self.found = {}
        self._open: contextlib.ExitStack | None = None
        self._forward: contextlib.ExitStack | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != COUNTED or self.found:
            return
        gc.collect()
        parameters = list(pl_module.parameters())
        held = [p.grad for p in parameters if p.grad is not None]
        alive = [t for t in _tensors() if _address(t) not in self.before]
        self._open = contextlib.ExitStack()
        self._forward = contextlib.ExitStack()
        self._meter = AllocationMeter([*alive, *held])
        self._saved = SavedTensors([*parameters, *pl_module.buffers()])
        if self.traced:
            self._open.enter_context(self._meter)
            self._forward.enter_context(self._saved)
        self.gradients = 0
        for p in (p for p in parameters if p.requires_grad):
            hook = p.register_hook(partial(self._count, parameters))
            self._open.callback(hook.remove)

    def _count(self, parameters: list[nn.Parameter], arriving: Tensor) -> None:
        there = sum(p.grad.nbytes for p in parameters if p.grad is not None)
        self.gradients = max(self.gradients, there + arriving.nbytes)

    def on_before_backward(self, *_: Any) -> None:
        if self._forward is not None:
            self.saved = self._saved.bytes
            self._forward.close()
            self._forward = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self._open is None or trainer.global_step == COUNTED:
            return
        self._open.close()
        self._open = None
        weights = {_address(t): t for t in _flat([*pl_module.parameters(), *pl_module.buffers()])}
        self.found = {
            "weights": sum(t.nbytes for t in weights.values()),
            "gradients": self.gradients,
            "states": sum(measure_state_bytes(optimizer) for optimizer in trainer.optimizers),
        }
        if self.traced:
            self.found |= {"peak": self._meter.peak, "activations": self.saved}


def _flat(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Return the tensors, with each quantised tensor replaced by the tensors it wraps."""
    for tensor in tensors:
        inner = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else None
        if inner is None:
            yield tensor
        else:
            yield from _flat([getattr(tensor, name) for name in inner])


def _tensors() -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [item for item in gc.get_objects() if issubclass(type(item), Tensor) and item.device.type == "cpu"]
    return [tensor for tensor in found if _is_real(tensor)]


def _is_real(tensor: Tensor) -> bool:
    """Return whether a tensor has memory. The fake tensors of a compiler have none."""
    if not has_values(tensor):
        return False
    try:
        _address(tensor)
    except RuntimeError:
        return False
    return True


def _address(tensor: Tensor) -> int:
    return id(tensor) if hasattr(tensor, "__tensor_flatten__") else tensor.untyped_storage().data_ptr()


def _fit(model: str, setting: Setting | None, data: Any, steps: int, watch: list[Any], trainer: dict[str, Any]) -> Any:
    """Train ``steps`` steps with a setting, or without one in the plain run."""
    L.seed_everything(0, verbose=False)
    module = ((setting and setting.module) or MODELS[model][0])()
    plain = type(module).configure_optimizers

    def configure(self: Any = module) -> Any:
        configured = plain(self)
        optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
        groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in optimizer.param_groups]
        lr = optimizer.param_groups[0].get("initial_lr", optimizer.param_groups[0]["lr"])
        make = setting.optimizer if setting and setting.optimizer else partial(torch.optim.AdamW, lr=lr)
        return make(groups)  # a constant rate: schedules are not what is measured

    module.configure_optimizers = configure  # type: ignore[method-assign, assignment]
    own = [*setting.beside(), *setting.callbacks()] if setting else []
    arguments = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, **trainer}
    run = L.Trainer(
        callbacks=[*own, *watch],
        plugins=setting.plugins() if setting else [],
        max_steps=steps,
        max_epochs=-1,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **{"limit_val_batches": 0, **arguments},
    )
    run.fit(module, datamodule=data)
    return run, module


def prepared(model: str) -> Any:
    """Return the data of a model, read once for all of its runs."""
    data = MODELS[model][1]()
    data.prepare_data()
    data.setup("fit")
    data.prepare_data = data.setup = lambda *_, **__: None
    return data


def measure(model: str, setting: Setting, data: Any, steps: int, rounds: int, timed: int) -> dict[str, Any]:
    """Return the figures of the technique and of the plain run.

    Args:
        model: A key of `MODELS`.
        setting: Settings of the technique.
        data: Result of `prepared`.
        steps: Number of steps after which the loss on held-out data is compared.
        rounds: Number of alternating rounds with and without the technique.
        timed: Number of timed steps in a round.
    """
    plain = Setting(trainer=setting.trainer, callbacks=setting.beside, module=setting.module)
    sides = {"with": setting, "plain": plain}
    figures: dict[str, Any] = {name: {} for name in sides}
    before = {_address(tensor) for tensor in _tensors()}
    for name, side in sides.items():
        counted = _Bytes(before, side.traced)
        _fit(model, side, data, COUNTED + 2, [counted], side.trainer)
        figures[name] |= counted.found
        gc.collect()
        judged = {"limit_val_batches": 8, "check_val_every_n_epoch": 10**6}
        run, module = _fit(model, side, data, steps, [], {**side.trainer, **judged})
        (measured,) = run.validate(module, datamodule=data, verbose=False)
        figures[name]["loss"] = measured["val/loss"]
        del run, module
    ratios = []
    for _ in range(rounds):
        medians = {}
        for name, side in sides.items():
            clock = _Steps()
            _fit(model, side, data, WARM_UP + timed, [clock], side.trainer)
            marks = clock.marks[WARM_UP - 1 :]
            medians[name] = statistics.median(b - a for a, b in itertools.pairwise(marks))
        ratios.append(medians["with"] / medians["plain"])
    return {**figures, "time": ratios}
