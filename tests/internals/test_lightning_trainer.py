import importlib
import signal

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lit_efficient.internals import lightning_trainer
from tests.internals.leaning import leans_on
from tests.internals.toy_fit import NAMESPACES, fit, module, rows, trainer

both = pytest.mark.parametrize("namespace", NAMESPACES)


@both
@leans_on("lightning", "LightningModule._trainer", "lightning_trainer")
def test_a_module_without_a_trainer_says_so(namespace):
    assert lightning_trainer.trainer_of(nn.Linear(1, 1)) is None
    assert lightning_trainer.trainer_of(module(namespace)) is None
    made, toy = fit(namespace)
    assert lightning_trainer.trainer_of(toy) is made


@both
@leans_on("lightning", "trainer._signal_connector", "lightning_trainer")
def test_lightning_s_handlers_belong_to_its_connector(namespace):
    connector = lightning_trainer.signal_connector(trainer(namespace))
    assert connector.register_signal_handlers.__self__ is connector
    assert connector._sigterm_notifier_fn.__self__ is connector


@both
@leans_on("lightning", "trainer._signal_connector._original_handlers", "lightning_trainer")
def test_what_lightning_puts_back_at_the_end_can_be_changed(namespace):
    connector = lightning_trainer.signal_connector(made := trainer(namespace))
    before = signal.getsignal(signal.SIGUSR1)
    try:
        connector.register_signal_handlers()
        lightning_trainer.original_handlers(made)[signal.SIGUSR1] = signal.SIG_IGN
        connector.teardown()
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


@both
@leans_on("lightning", "trainer._signal_connector._sigterm_notifier_fn", "lightning_trainer")
def test_what_answers_sigterm_stands_in_for_the_broadcast_until_it_is_left(namespace, monkeypatch):
    made, seen, handlers = trainer(namespace, strategy="ddp", devices=2), [], {}

    def answer(connector, number, frame):
        seen.append(number)

    lightning_trainer.answer_sigterm(made, answer)
    connector = lightning_trainer.signal_connector(made)
    monkeypatch.setattr(
        type(connector), "_register_signal", lambda _, number, handler: handlers.update({number: handler})
    )
    connector.register_signal_handlers()
    handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert seen == [signal.SIGTERM]
    lightning_trainer.leave_sigterm(made, answer)
    assert connector._sigterm_notifier_fn.__func__ is type(connector)._sigterm_notifier_fn


@both
@leans_on("lightning", "trainer._logger_connector", "lightning_trainer")
def test_what_was_logged_is_kept_there(namespace):
    made, _ = fit(namespace, {"on_train_epoch_end": lambda _, module: module.log("x", 3.0)})
    assert lightning_trainer.logger_connector(made).callback_metrics["x"] == made.callback_metrics["x"] == 3.0


@both
@leans_on("lightning", "trainer._logger_connector", "lightning_trainer")
def test_the_row_of_a_step_can_be_logged_before_its_last_hook_returns(namespace):
    seen = []

    def log(trainer, module, *_):
        module.log("x", float(trainer.global_step))
        lightning_trainer.log_step(trainer)
        seen.append(dict(trainer.logged_metrics))

    fit(namespace, {"on_train_batch_end": log}, log_every_n_steps=1, max_steps=2)
    assert [row["x"] for row in seen] == [1.0, 2.0]


@both
@leans_on("lightning", "logger._kwargs", "lightning_trainer")
def test_what_tensorboard_has_of_later_steps_is_passed_over(namespace, tmp_path, monkeypatch):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writers = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    # Files are read in their names' order: the second of writing, then a number of the process, where 10 is before 9.
    monkeypatch.setattr(writers, "_global_uid", writers.AtomicCounter(0))
    for begins, value in ((0, 1.0), (2, 5.0)):
        logger = importlib.import_module(f"{namespace}.loggers").TensorBoardLogger(tmp_path, "", "")
        lightning_trainer.purge_from(logger, begins)
        for step in range(begins, 4):
            logger.log_metrics({"x": value}, step)
        logger.finalize("success")
    found = events.EventAccumulator(str(tmp_path)).Reload().Scalars("x")
    assert [(event.step, event.value) for event in found] == [(0, 1.0), (1, 1.0), (2, 5.0), (3, 5.0)]


@both
@leans_on("lightning", "trainer._default_root_dir", "lightning_trainer")
def test_the_root_folder_can_be_set(namespace, tmp_path):
    made = trainer(namespace)
    lightning_trainer.set_default_root_dir(made, str(tmp_path))
    assert made.default_root_dir == str(tmp_path)


@both
@leans_on("lightning", "trainer._checkpoint_connector.dump_checkpoint, LightningModule._trainer", "lightning_trainer")
def test_what_a_checkpoint_would_hold_is_known_and_a_copy_can_be_tied_to_the_trainer(namespace):
    made, toy = fit(namespace)
    saved = lightning_trainer.checkpoint_of(made)
    assert saved["global_step"] == made.global_step
    assert saved["state_dict"].keys() == toy.state_dict().keys()
    assert len(saved["optimizer_states"]) == len(made.optimizers)
    other = module(namespace)
    lightning_trainer.set_trainer(other, made)
    assert lightning_trainer.trainer_of(other) is made


@both
@leans_on("lightning", "module._on_before_batch_transfer, call._call_strategy_hook", "lightning_trainer")
def test_a_batch_arrives_through_the_hooks_of_its_transfer(namespace):
    seen = []

    def look(trainer, module):
        module.on_before_batch_transfer = lambda batch, index: batch + 1
        module.on_after_batch_transfer = lambda batch, index: batch * 2
        seen.append(lightning_trainer.arrived(trainer, torch.ones(1)))
        del module.on_before_batch_transfer, module.on_after_batch_transfer

    fit(namespace, {"on_train_start": look}, max_steps=1)
    assert seen[0].item() == 4


@both
@leans_on("lightning", "call._call_callback_hooks", "lightning_trainer")
def test_a_hook_of_the_callbacks_is_called(namespace):
    seen = []
    hooks = {"on_train_epoch_start": lambda *_: seen.append("epoch")}
    hooks["on_train_start"] = lambda trainer, *_: lightning_trainer.call_callbacks(trainer, "on_train_epoch_start")
    fit(namespace, hooks)
    assert seen == ["epoch", "epoch"]


@both
@leans_on("lightning", "call._call_lightning_module_hook", "lightning_trainer")
def test_a_hook_of_the_module_is_called(namespace):
    seen = []

    def on_train_start(trainer, module):
        module.on_validation_model_zero_grad = lambda: seen.append("called")
        lightning_trainer.call_module(trainer, "on_validation_model_zero_grad")

    fit(namespace, {"on_train_start": on_train_start}, limit_val_batches=0)
    assert seen == ["called"]


@leans_on(
    "lightning",
    "strategy._lightning_module, trainer._data_connector, trainer._callback_connector._attach_model_callbacks, "
    "_parse_loop_limits, _verify_loop_configurations",
    "lightning_trainer",
)
def test_a_fit_can_begin_without_going_on():
    made, toy = trainer("lightning.pytorch", max_epochs=None, max_steps=3), module("lightning.pytorch")
    extra = Timer()
    toy.configure_callbacks = lambda: [extra]
    data = LightningDataModule.from_datasets(rows().dataset, rows().dataset)
    lightning_trainer.begin_fit(made, toy, data)
    assert toy.trainer is made
    assert made.lightning_module is toy
    assert made.datamodule is data
    assert data.trainer is made
    assert extra in made.callbacks
    assert (made.training, made.state.fn, made.max_epochs, made.global_step) == (True, "fit", -1, 0)
    del type(toy).training_step
    with pytest.raises(MisconfigurationException, match="training_step"):
        lightning_trainer.begin_fit(trainer("lightning.pytorch"), toy, data)


@both
@leans_on("lightning", "LightningModule._current_fx_name", "lightning_trainer")
def test_the_hook_that_runs_is_known_by_its_name(namespace):
    seen = []
    hooks = {"on_train_batch_end": lambda trainer, toy, *_: seen.append(lightning_trainer.hook_of(toy))}
    fit(namespace, hooks)
    assert {*seen} == {"on_train_batch_end"}
    assert lightning_trainer.hook_of(module(namespace)) == ""


@both
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
@leans_on("lightning", "val_loop._data_source", "lightning_trainer")
def test_a_fit_without_a_validation_loader_is_known(namespace):
    seen = []
    hooks = {"on_train_start": lambda trainer, *_: seen.append(lightning_trainer.has_validation_data(trainer))}
    trainer(namespace, hooks).fit(module(namespace), rows(), rows(1))
    trainer(namespace, hooks).fit(module(namespace), rows())
    assert seen == [True, False]
