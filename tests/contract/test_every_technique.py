"""What holds for every technique, and for every pair of them."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import lit_efficient
from lit_efficient import ConflictError, Technique
from lit_efficient.declaration import check_conflicts, in_order
from tests.contract.table import CASES, TOGETHER, UNCOMPILED, make_all, network_of
from tests.support import Toy, ToyMethods, assert_equal, data, run_script, trainer, weights

NAMES = sorted(CASES)
PAIRS = list(itertools.combinations(NAMES, 2))


class StandaloneToy(ToyMethods, pytorch_lightning.LightningModule):
    """The toy of the standalone namespace."""


_make = make_all


def _toy(names: tuple[str, ...], where: str = "configure_model", scheduler: str = "none", kind: Any = Toy) -> Any:
    return kind(where, scheduler, network=network_of(*names))


def _fit(callbacks: list[Any], module: Any = None, *, ckpt_path: Any = None, **arguments: Any) -> Any:
    names = [type(callback).__name__ for callback in callbacks if type(callback).__name__ in CASES]
    module = module or _toy(tuple(names), scheduler="lambda")
    torch.manual_seed(0)
    run = trainer(callbacks, **arguments)
    run.fit(module, data(), data(), ckpt_path=ckpt_path)
    return run


class _SaveAfterEpoch(Callback):
    """Stateless, so that resuming without it is no difference."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path, weights_only=False)


def _state(run: Any) -> dict[str, Any]:
    optimizers = [optimizer.state_dict() for optimizer in run.optimizers]
    schedulers = [config.scheduler.state_dict() for config in run.lr_scheduler_configs]
    return {"weights": weights(run.lightning_module), "optimizers": optimizers, "schedulers": schedulers}


def _public_techniques() -> dict[str, type[Technique]]:
    public = {name: getattr(lit_efficient, name) for name in lit_efficient.PUBLIC}
    kinds = {name: value for name, value in public.items() if isinstance(value, type) and issubclass(value, Technique)}
    return {name: kind for name, kind in kinds.items() if kind is not Technique}


def test_every_public_technique_has_a_row() -> None:
    assert sorted(_public_techniques()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_attributes_and_primitives(name: str) -> None:
    technique = CASES[name].make()
    again = type(technique)(**technique.arguments())
    assert again.arguments() == technique.arguments()
    pickle.dumps(technique.record())


@pytest.mark.parametrize("where", ["init", "setup", "configure_model"])
@pytest.mark.parametrize("name", NAMES)
def test_acts_wherever_the_network_is_built_and_keeps_every_name(
    name: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = _fit([], _toy((name,), where))
    with caplog.at_level("INFO"):
        _fit(_make(name), module := _toy((name,), where))
    before, after = plain.lightning_module.state_dict(), module.state_dict()
    assert before.keys() <= after.keys()
    assert CASES[name].repacks or all(after[key].shape == tensor.shape for key, tensor in before.items())
    assert sum(f"\n  {name}" in record.getMessage() for record in caplog.records) == 1
    same = all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert same is not CASES[name].changes


@pytest.mark.parametrize("name", [name for name in NAMES if CASES[name].neutral])
def test_neutral_setting_equals_plain_lightning_bit_for_bit(name: str) -> None:
    technique = CASES[name].neutral()  # type: ignore[misc]
    plain, neutral = (_fit(callbacks, _toy((name,), scheduler="lambda")) for callbacks in ([], [technique]))
    assert_equal(_state(plain), _state(neutral))
    assert plain.callback_metrics["val/loss"] == neutral.callback_metrics["val/loss"]


@pytest.mark.parametrize("names", [(name,) for name in NAMES] + PAIRS, ids="+".join)
def test_resumes_bit_exactly_or_is_refused(names: tuple[str, ...], tmp_path: Path) -> None:
    """Two steps, a checkpoint, a fresh module and trainer, two more steps: equal to four steps in one go."""
    try:
        check_conflicts(_make(*names))
    except ConflictError:
        return
    whole = _fit(_make(*names), _toy(names, scheduler="lambda"), max_epochs=2)
    half = [*_make(*names), _SaveAfterEpoch(tmp_path / "half.ckpt")]
    _fit(half, _toy(names, scheduler="lambda"), max_epochs=1)
    resumed = _fit(_make(*names), _toy(names, scheduler="lambda"), max_epochs=2, ckpt_path=tmp_path / "half.ckpt")
    assert resumed.global_step == whole.global_step == 8
    assert_equal(_state(whole), _state(resumed))
    assert whole.callback_metrics["val/loss"] == resumed.callback_metrics["val/loss"]


def test_the_order_of_the_list_never_matters() -> None:
    rotations = [UNCOMPILED[i:] + UNCOMPILED[:i] for i in range(len(UNCOMPILED))]
    for orders in ((*rotations, UNCOMPILED[::-1]), (TOGETHER, TOGETHER[::-1])):
        states = [_state(_fit(_make(*names))) for names in orders]
        for state in states[1:]:
            assert_equal(states[0], state)
    phases = [technique.phase or 0 for technique in in_order(_make(*TOGETHER))]
    assert phases == sorted(phases)


@pytest.mark.parametrize("names", [*((name,) for name in NAMES), TOGETHER], ids="+".join)
def test_one_module_through_all_stages_is_transformed_once(names: tuple[str, ...]) -> None:
    module = _toy(names)
    run = trainer(_make(*names), max_epochs=1)
    for _ in range(2):
        run.fit(module, data(), data())
        before = weights(module)
        kinds = [type(part) for part in module.modules()]
        run.validate(module, data(), verbose=False)
        run.test(module, data(), verbose=False)
        predictions = run.predict(module, data())
        assert_equal(before, weights(module))
        assert kinds == [type(part) for part in module.modules()]
        run = trainer(_make(*names), max_epochs=1)
    with torch.no_grad():
        same = torch.equal(predictions[0], module.eval().net(next(iter(data()))[0]))
    assert same is not any(CASES[name].shadows for name in names)
    ledger = [entry.record["name"] for entry in module.__dict__["_lit_efficient_ledger"]]
    assert len(ledger) == len(set(ledger))


@pytest.mark.parametrize("names", [*((name,) for name in NAMES), TOGETHER], ids="+".join)
def test_wraps_are_gone_after_a_run(names: tuple[str, ...]) -> None:
    module = _toy(names)
    methods = {"configure_model", "configure_optimizers", "training_step", "on_load_checkpoint", "backward"}
    _fit(_make(*names), module)
    assert not methods & module.__dict__.keys()
    assert "_lit_efficient_session" not in module.__dict__


HOOKS = [
    "setup",
    "on_fit_start",
    "on_sanity_check_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_save_checkpoint",
    "on_train_end",
    "on_fit_end",
    "teardown",
]


class _Bomb(Callback):
    def __init__(self, hook: str) -> None:
        def explode(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"bomb in {hook}")

        setattr(self, hook, explode)


@pytest.mark.parametrize("hook", HOOKS)
def test_an_exception_at_any_hook_leaves_the_module_clean(hook: str, tmp_path: Path) -> None:
    names = TOGETHER if hook == "on_after_backward" else UNCOMPILED
    module = _toy(names)
    callbacks = [*_make(*names), _Bomb(hook), ModelCheckpoint(tmp_path, every_n_train_steps=1)]
    with pytest.raises(RuntimeError, match="bomb"):
        _fit(callbacks, module, num_sanity_val_steps=1, enable_checkpointing=True)
    methods = {"configure_model", "configure_optimizers", "training_step", "on_load_checkpoint", "backward"}
    assert not methods & module.__dict__.keys()
    _fit(_make(*names), module.train())  # and it can be trained again


@pytest.mark.parametrize("names", [*((name,) for name in NAMES), TOGETHER], ids="+".join)
def test_a_deep_copy_in_the_middle_of_a_run_is_independent(names: tuple[str, ...]) -> None:
    copies: list[Any] = []

    class Copy(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if not copies:
                run, pl_module._trainer = pl_module._trainer, None
                copies.append(copy.deepcopy(pl_module))
                pl_module._trainer = run

    module = _toy(names)
    _fit([*_make(*names), Copy()], module)
    twin = copies[0]
    kept = weights(twin)
    assert not all(torch.equal(kept[key], tensor) for key, tensor in weights(module).items())
    _fit(_make(*names), module)
    assert_equal(kept, weights(twin))
    original = weights(module)
    _fit(_make(*names), twin)
    assert_equal(original, weights(module))


@pytest.mark.parametrize("names", [*((name,) for name in NAMES), TOGETHER], ids="+".join)
def test_the_standalone_namespace_trains_alike(names: tuple[str, ...]) -> None:
    ours = _fit(_make(*names), _toy(names))
    theirs = _fit(_make(*names), _toy(names, kind=StandaloneToy), namespace=pytorch_lightning)
    assert_equal(_state(ours), _state(theirs))
    one = pytorch_lightning.Trainer(callbacks=CASES[names[0]].make(), logger=False, enable_checkpointing=False)
    assert any(isinstance(callback, Technique) for callback in one.callbacks)


def test_a_fresh_process_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    whole = _fit(_make(*TOGETHER), max_epochs=2)
    torch.save(_state(whole), tmp_path / "whole.pt")
    _fit([*_make(*TOGETHER), _SaveAfterEpoch(tmp_path / "half.ckpt")], max_epochs=1)
    source = f"""
    import torch
    torch.set_num_threads(1)
    from tests.contract.test_every_technique import TOGETHER, _fit, _make, _state, assert_equal
    run = _fit(_make(*TOGETHER), max_epochs=2, ckpt_path={str(tmp_path / "half.ckpt")!r})
    assert_equal(torch.load({str(tmp_path / "whole.pt")!r}, weights_only=True), _state(run))
    print("equal")
    """
    assert "equal" in run_script(source, tmp_path)


def test_callback_states_and_records_load_safely(tmp_path: Path) -> None:
    run = _fit(_make(*TOGETHER))
    run.save_checkpoint(tmp_path / "all.ckpt")
    checkpoint = torch.load(tmp_path / "all.ckpt", weights_only=True, map_location="cpu")
    assert sorted(record["name"] for record in checkpoint["lit_efficient"]["techniques"]) == sorted(TOGETHER)


def test_reports_reach_the_loggers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = L.loggers.CSVLogger(tmp_path)
    with caplog.at_level("INFO"):
        _fit(_make(*TOGETHER), logger=logger)
    text = (Path(logger.log_dir) / "hparams.yaml").read_text()
    for name in ("StochasticDepth", "LowBitOptimizer", "SNRWeighting"):
        assert f"techniques/{name}/summary" in text
        assert sum(f"  {name}" in record.getMessage() for record in caplog.records) == 1
