"""Callbacks of Lightning and of users that change parameters, beside each technique: both work, or it is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    RichModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.utils import parametrizations, prune

from lit_efficient.declaration import Declaration
from lit_efficient.errors import ConflictError, LitEfficientError
from lit_efficient.traits import Trait
from tests.contract.table import CASES, NAMES, make_all, network_of
from tests.support import Toy, assert_equal, data, trainer


def _last(module: Any) -> nn.Linear:
    return [part for part in module.net.modules() if isinstance(part, nn.Linear)][-1]


class Finetuned(Toy):
    """The toy with what Lightning's callbacks ask of a module."""

    lr = 1e-2

    @property
    def backbone(self) -> nn.Module:
        return getattr(self.net, "gpt", self.net).blocks

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr, weight_decay=0.1)


class Data(L.LightningDataModule):
    """Four batches, of a size that a finder may set."""

    batch_size = 4

    def train_dataloader(self) -> Any:
        return data(16, self.batch_size)

    def val_dataloader(self) -> Any:
        return data(8, self.batch_size)


class Prunes(Callback):
    """A user's own pruning."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        prune.l1_unstructured(_last(pl_module), "weight", amount=0.1)


class Parametrizes(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            parametrizations.spectral_norm(_last(pl_module))


class Replaces(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            _last(pl_module).weight = nn.Parameter(_last(pl_module).weight.detach().clone())


class Averages(Callback):
    """A user's own moving average, which is put into the module for validation."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = {p: p.detach().clone() for p in pl_module.parameters() if p.is_floating_point()}
        self.raw: dict[Any, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for p, average in self.average.items():
            average.lerp_(p.detach(), 0.5)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.raw = {p: p.detach().clone() for p in self.average}
        for p, average in self.average.items():
            p.data.copy_(average)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        for p, raw in self.raw.items():
            p.data.copy_(raw)


def _clamp(trainer: Any, pl_module: Any, *_: Any) -> None:
    if _last(pl_module).weight.is_floating_point():
        _last(pl_module).weight.data.clamp_(-0.1, 0.1)


OTHERS: dict[str, Callable[[], Callback]] = {
    "BackboneFinetuning": lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-2),
    "BatchSizeFinder": lambda: BatchSizeFinder(max_trials=1, init_val=2),
    "EMAWeightAveraging": lambda: EMAWeightAveraging(decay=0.5),
    "GradientAccumulationScheduler": lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
    "LambdaCallback": lambda: LambdaCallback(on_train_batch_end=_clamp),
    "LearningRateFinder": lambda: LearningRateFinder(num_training_steps=4, min_lr=1e-5, max_lr=1e-3),
    "ModelPruning": lambda: ModelPruning("l1_unstructured", amount=0.1),
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1),
    "Averages": Averages,
    "Parametrizes": Parametrizes,
    "Prunes": Prunes,
    "Replaces": Replaces,
}
IN_THE_RUN = {"Averages", "Parametrizes", "Prunes", "Replaces"}  # only there it is seen what they do
SHADOWED = {Trait.SWAPS_WEIGHTS, Trait.SCHEDULE_FREE}


def _effect(other: str, module: Any, run: Any) -> None:
    """Assert that the callback has done its work."""
    if other == "ModelPruning":
        zeros = sum(int((part.weight == 0).sum()) for part in module.modules() if isinstance(part, nn.Linear))
        assert zeros > 0
    if other == "BackboneFinetuning":
        held = {id(p) for optimizer in run.optimizers for group in optimizer.param_groups for p in group["params"]}
        assert {id(p) for p in module.backbone.parameters() if p.is_floating_point()} <= held
    if other == "GradientAccumulationScheduler":
        assert run.accumulate_grad_batches == 2
    if other == "LambdaCallback":
        assert not _last(module).weight.is_floating_point() or _last(module).weight.abs().max() <= 0.1
    if other == "Prunes":
        assert prune.is_pruned(_last(module))


def _run(other: str, name: str, folder: Path, first: bool) -> tuple[Any, Any, LitEfficientError | None]:
    module = Finetuned(network=network_of(name))
    arguments = dict(CASES[name].trainer)
    if other == "GradientAccumulationScheduler":
        arguments.pop("accumulate_grad_batches", None)  # which Lightning refuses beside it
    torch.manual_seed(0)
    made: list[Any] = make_all(name)
    callbacks = [OTHERS[other](), *made] if first else [*made, OTHERS[other]()]
    run = trainer(callbacks, max_epochs=3, default_root_dir=folder, **arguments)
    try:
        run.fit(module, datamodule=Data())
    except LitEfficientError as error:
        return module, run, error
    return module, run, None


PAIRS = [f"{other}-{name}" for other, name in itertools.product(sorted(OTHERS), NAMES)]
DIAGONAL = [
    "ModelPruning-EMA",
    "ModelPruning-GradualUnfreezing",
    "BackboneFinetuning-OptimizerSchedule",
    "StochasticWeightAveraging-LoRA",
    "StochasticWeightAveraging-TokenRouting",
    "ModelPruning-MixtureOfExperts",
    "Averages-EMA",
    "Averages-ScheduleFree",
    "Prunes-CheckpointAverage",
    "Replaces-WeightClipping",
]


# Lightning warns of parameters that a technique has added after its callback froze the layers.
@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist")
@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")
@pytest.mark.turns(100, always=DIAGONAL)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_callback_that_changes_parameters_works_beside_a_technique_or_is_refused(pair: str, tmp_path: Path) -> None:
    other, name = pair.split("-")
    if (other in ("Parametrizes", "Prunes", "Replaces") and name == "QuantizeBase") or pair == "Averages-QuantizeBase":
        pytest.skip("a codebook has no gradients, which these callbacks need")
    for first in (True, False):
        module, run, error = _run(other, name, tmp_path, first)
        technique: Declaration = CASES[name].make()
        if error is None:
            assert run.global_step > 0
            _effect(other, module, run)
        elif other not in IN_THE_RUN:
            assert run.global_step == 0, "refused after training has begun"
        if other in ("Parametrizes", "Prunes", "Replaces"):
            follows = Trait.FOLLOWS_PARAMETERS in technique.traits
            assert (error is not None) is follows
            assert error is None or (isinstance(error, ConflictError) and str(error).startswith(f"{other}.on_train"))
        if other == "Averages":
            assert (error is not None) is bool(SHADOWED & technique.traits), error


def _monitors() -> list[Any]:
    return [
        LearningRateMonitor("step", log_momentum=True, log_weight_decay=True),
        DeviceStatsMonitor(cpu_stats=False),
        Timer("00:01:00:00"),
        RichModelSummary(),
        RichProgressBar(),
        EarlyStopping("val/loss", patience=9),
    ]


@pytest.mark.turns(20, always=["EMA", "LoRA"])
@pytest.mark.filterwarnings("ignore:.*RichProgressBar")
@pytest.mark.parametrize("name", NAMES)
def test_monitors_of_lightning_change_nothing_beside_a_technique(name: str, tmp_path: Path) -> None:
    states = []
    for monitors in ([], _monitors()):
        torch.manual_seed(0)
        module = Toy(network=network_of(name))
        torch.manual_seed(0)
        more = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1, "enable_progress_bar": bool(monitors)}
        run = trainer([*monitors, *make_all(name)], max_epochs=2, **{**more, **CASES[name].trainer})
        run.fit(module, data(), data())
        states.append(dict(module.state_dict()))
    assert_equal(*states)
    assert all(rates for rates in monitors[0].lrs.values())
    assert monitors[2].time_elapsed("train") > 0
    assert monitors[5].best_score.isfinite()


def test_what_a_callback_does_after_training_is_its_own_matter() -> None:
    class Folds(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.net.head.weight = nn.Parameter(pl_module.net.head.weight.detach() * 2)

    run = trainer([*make_all("WeightClipping"), Folds()])
    run.fit(Toy(), data(), data())
    assert run.state.status == "finished"


def test_groups_that_a_callback_adds_follow_the_schedule_in_proportion(tmp_path: Path) -> None:
    from lit_efficient import OptimizerSchedule

    class Adds(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                group = {"params": [nn.Parameter(torch.zeros(2))], "weight_decay": 0.05}
                trainer.optimizers[0].add_param_group(group)

    run = trainer([OptimizerSchedule(weight_decay=[0.2, 0.4], until=4), Adds()], max_epochs=3)
    run.fit(Finetuned(), data(), data())
    assert [group["weight_decay"] for group in run.optimizers[0].param_groups] == pytest.approx([0.4, 0.2])


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize("name", ["EMA", "PowerEMA", "CheckpointAverage"])
def test_an_average_survives_a_checkpoint_that_is_restored_during_an_evaluation(name: str, tmp_path: Path) -> None:
    """BatchSizeFinder restores one in inference mode, where tensors are made that cannot be written later."""
    finder = BatchSizeFinder(max_trials=1, init_val=4)
    run = trainer([*make_all(name), finder], max_epochs=2, default_root_dir=tmp_path)
    module = Finetuned()
    run.fit(module, datamodule=Data())
    before = run.validate(module, data(8, 4), verbose=False)
    raw = {key: value.clone() for key, value in module.state_dict().items()}
    assert run.validate(module, datamodule=Data(), verbose=False) == before
    assert_equal(dict(module.state_dict()), raw)
