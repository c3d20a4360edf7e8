"""A report that states none of something is an error, and steps that no technique saw are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor, nn

from lit_efficient import (
    APOLLO,
    EMA,
    BatchRamp,
    CheckpointAverage,
    ConfigurationError,
    ConflictError,
    DevicePrefetcher,
    FeatureMatching,
    GaLore,
    KeepFloat32,
    PowerEMA,
    Report,
    ResolutionRamp,
    Technique,
    TokenRouting,
    WeightClipping,
    apply,
)
from lit_efficient.application.ledger import reports_of
from lit_efficient.declaration import Phase, overrides
from lit_efficient.testing import Net, Toy, data, trainer
from tests.contract.table import CASES, NAMES, make_all, network_of

NOTHING = [
    Report("AdamW: 0 of 19 matrices in 64 dimensions"),
    Report("30 norms and 2 gated MLPs save 0 B less per token"),
    Report("AdamW: 12% of the parameters have 8-bit states, 0.0 MiB saved"),
    Report("blocks", modules=()),
    Report("weights", modules=("a",), parameters=0),
    Report("states", bytes_saved=0),
    Report("states", bytes_saved=-256),
    Report("tiles", details={"bytes_per_token_saved": 0}),
]
SOMETHING = [
    Report("10 of 19 matrices", ("a",), 4096, 512),
    Report("100 of 200 blocks, 10.0 MiB saved"),
    Report("rates 0.0 to 0.5, weight 0, 0 B saved on a CPU", idle=True),
    Report("stage 0 of the ramp"),
    Report("seed 0, from step 0 on"),
]


class Says(Technique):
    """A technique that reports what it is given."""

    phase = Phase.LAYOUT

    def __init__(self, report: Report, when: str = "transform") -> None:
        super().__init__()
        self.report = report
        self.when = when

    def arguments(self) -> dict[str, Any]:
        return {}

    def transform(self, module: nn.Module) -> Report:
        return self.report if self.when == "transform" else Report("transforms")

    def describe(self, module: nn.Module) -> Report | None:
        return self.report if self.when == "describe" else None


@pytest.mark.parametrize("report", NOTHING, ids=lambda report: report.summary)
def test_nothing_is_no_effect(report: Report) -> None:
    with pytest.raises(ConfigurationError, match=r"Says would change nothing: .* or leave Says out"):
        apply(Net(), Says(report))


def test_a_described_nothing_is_refused_before_the_first_step() -> None:
    module = Toy("init", Net)
    with pytest.raises(ConfigurationError, match="Says would change nothing"):
        trainer([Says(NOTHING[0], "describe")]).fit(module, data(8), data())
    assert module.trainer.global_step == 0


@pytest.mark.parametrize("report", SOMETHING, ids=lambda report: report.summary)
def test_something_and_what_is_idle_for_a_reason_are_kept(report: Report) -> None:
    assert apply(Net(), Says(report))["Says"] is report


@pytest.mark.parametrize("kind", [GaLore, APOLLO])
def test_a_subspace_of_full_rank_is_refused(kind: Any) -> None:
    width = 32
    net = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(ConfigurationError, match=f"rank must be below {width}, the full rank of its largest target"):
        kind(rank=width, targets=["0"]).rewrite_optimizer(optimizer, net)
    report = kind(rank=width - 17, targets=["0"]).rewrite_optimizer(optimizer, net)
    assert report.bytes_saved > 0


class TwoOptimizers(Toy):
    """A module with a second network that is too small to save anything."""

    def __init__(self, network: Any) -> None:
        super().__init__("init", network)
        self.automatic_optimization = False
        self.small = nn.Linear(2, 2)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        (self._sample_loss(batch).mean() + self.small(torch.ones(2)).sum()).backward()
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        held = [[p for p in part.parameters() if p.requires_grad] for part in (self.net, self.small)]
        return [torch.optim.AdamW(one, lr=1e-3, weight_decay=0.1) for one in held]


REWRITES = [name for name in NAMES if overrides(CASES[name].make(), "rewrite_optimizer")]


@pytest.mark.parametrize("name", REWRITES)
def test_of_several_optimizers_the_one_without_gain_does_not_change(name: str, tmp_path: Path) -> None:
    module = TwoOptimizers(network_of(name))
    techniques: list[Any] = make_all(name)
    reports: dict[str, Report] = {}

    class Reads(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            reports.update(reports_of(pl_module, techniques))

    run = trainer([*techniques, Reads()], max_steps=2, default_root_dir=tmp_path, **CASES[name].trainer)
    try:
        run.fit(module, data(8), data())
    except ConflictError:  # manual optimization
        return
    assert not any(report.states_nothing() for report in reports.values())
    assert any(not report.idle for key, report in reports.items() if key.startswith(name))
    if name in ("APOLLO", "GaLore", "LowBitOptimizer"):
        assert type(run.optimizers[1]) is torch.optim.AdamW
        assert type(run.optimizers[0]) is not torch.optim.AdamW


def test_techniques_without_effect_on_this_device_or_precision_say_so() -> None:
    techniques = [KeepFloat32(), DevicePrefetcher()]
    module = Toy("init", Net)
    run = trainer(techniques)
    run.fit(module, data(8), data())
    reports = reports_of(module, techniques)
    assert all(report.idle and "no effect" in report.summary for report in reports.values())
    assert reports["KeepFloat32"].parameters is None


class StepsByItself(Toy):
    """A module that steps an optimizer which Lightning does not know, unless it is ``counted``."""

    def __init__(self, counted: bool = False) -> None:
        super().__init__("init", Net)
        self.automatic_optimization = False
        self.counted = counted

    def on_train_start(self) -> None:
        self.own = torch.optim.SGD(self.parameters(), 0.1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.counted:
            self.own.step()

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        self._sample_loss(batch).mean().backward()
        if self.counted:
            self.optimizers().step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_what_acts_after_a_step_and_saw_none_is_named() -> None:
    techniques: list[L.Callback] = [EMA(), PowerEMA(), WeightClipping(bound=1.0)]
    with pytest.warns(
        UserWarning, match=r"WeightClipping, EMA, PowerEMA: no optimizer step was seen in the \d+ batches"
    ):
        trainer(techniques).fit(StepsByItself(), data(8), data())


@pytest.mark.parametrize("counted", [False, True])
def test_a_resumed_run_counts_its_own_steps(tmp_path: Path, counted: bool, recwarn: pytest.WarningsRecorder) -> None:
    """The steps of the checkpoint are not those of the run."""
    first = trainer([EMA()])
    first.fit(StepsByItself(counted=True), data(8), data())
    assert first.global_step == 2
    first.save_checkpoint(tmp_path / "first.ckpt")
    resumed = trainer([EMA()], max_epochs=3)
    resumed.fit(StepsByItself(counted), data(8), data(), ckpt_path=tmp_path / "first.ckpt")
    assert resumed.current_epoch == 3
    assert resumed.global_step == (6 if counted else 2)
    said = [one for one in recwarn if "EMA: no optimizer step was seen in the 2 batches" in str(one.message)]
    assert len(said) == (not counted)


def test_an_argument_decides_whether_steps_are_counted() -> None:
    assert FeatureMatching("net", Net(), {"": ""}, stop_at=3).counts_steps
    assert not FeatureMatching("net", Net(), {"": ""}).counts_steps
    assert TokenRouting(stop_at=3).counts_steps
    assert not TokenRouting().counts_steps
    assert ResolutionRamp().counts_steps


class CountsValidations(L.Callback):
    """Count the validations of a run, without the sanity check."""

    def __init__(self) -> None:
        self.started = 0

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.started += not trainer.sanity_checking


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_steps": 3},
        {"max_steps": 4},
        {"max_steps": 3, "val_check_interval": 2},
        {"max_epochs": 2, "check_val_every_n_epoch": 3},
        {"max_epochs": 3, "check_val_every_n_epoch": 3},
        {"max_epochs": 2, "limit_val_batches": 0},
        {"max_steps": 3, "callbacks": [BatchRamp([2], factor=2)], "accumulate_grad_batches": 2},
        {"max_steps": 3, "callbacks": [GradientAccumulationScheduler({0: 2})]},
        {"max_epochs": 1, "check_val_every_n_epoch": 2, "callbacks": [GradientAccumulationScheduler({0: 2})]},
    ],
)
def test_a_plain_trainer_warns_of_what_waits_for_validations_in_vain(
    tmp_path: Path, arguments: dict[str, Any], recwarn: pytest.WarningsRecorder
) -> None:
    """The oracle is Lightning: whether a validation started in the run itself."""
    counts = CountsValidations()
    best = ModelCheckpoint(tmp_path, monitor="val/loss")
    callbacks = [EMA(), counts, best, *arguments.pop("callbacks", ())]
    limits = {"max_epochs": -1, "enable_checkpointing": True, **arguments}
    trainer(callbacks, **limits).fit(Toy("init", Net), data(16), data())
    warned = [str(one.message) for one in recwarn if "This fit never validates" in str(one.message)]
    assert len(warned) == (counts.started == 0)
    assert all("in vain: ModelCheckpoint (val/loss)" in one for one in warned)


def test_counted_steps_warn_of_nothing_and_a_late_average_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        trainer([EMA(), WeightClipping(bound=1.0)]).fit(Toy("init", Net), data(8), data())
        assert "no update" not in caplog.text
        trainer([EMA(start_step=10**6)]).fit(Toy("init", Net), data(8), data())
        assert "EMA: no update in the" in caplog.text
        trainer([CheckpointAverage(start_step=10**6)]).fit(Toy("init", Net), data(8), data())
        assert "CheckpointAverage: no update in the" in caplog.text
