import os
import signal
import socket
import threading

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lit_efficient.callbacks.exact_resume import ExactResume
from lit_efficient.callbacks.lr_finder import LRFinder
from lit_efficient.callbacks.signal_checkpoint import SignalCheckpoint
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.checkpoints import load_verified
from lit_efficient.plugins.safe_checkpoint_io import SafeCheckpointIO
from tests import processes
from tests.callbacks.interrupted_run import train
from tests.callbacks.resume_kit import Tiny, equal, trainer

NUMBERS = {"SIGTERM": 143, "SIGINT": 130, "SIGUSR1": 138, "SIGHUP": 129}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert processes.run(train, folder, log=folder / "log") == 0
    assert "handlers restored True" in (folder / "log").read_text()
    return torch.load(folder / "final0.pt", weights_only=True)


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("name", "at", "hook", "step", "workers"),
    [
        ("SIGTERM", 4, "train", 3, 0),  # inside an accumulation window: answered at its end
        ("SIGINT", 5, "train", 3, 2),  # a validation run is due, and loader workers are running
        ("SIGHUP", 7, "train", 4, 0),  # the last batch of an epoch
        ("SIGTERM", 15, "train", 8, 0),  # the last batch of all
        ("SIGINT", 2, "validation", 1, 0),  # validation inside an accumulation window
        ("SIGUSR1", 5, "validation", 3, 0),
    ],
)
def test_a_signal_saves_exits_and_resumes_exactly(tmp_path, expected, name, at, hook, step, workers):
    log, path = tmp_path / "log", tmp_path / "checkpoints" / f"interrupted-step={step}.ckpt"
    assert processes.run(train, tmp_path, name, at, hook, num_workers=workers, log=log) == NUMBERS[name]
    said = log.read_text()
    assert f"Interrupted by {name}: the checkpoint is {path}" in said
    assert f"--ckpt_path {path}" in said
    assert "`weights_only` was not set" not in said
    assert "finalized failed" in said
    assert "handlers restored True" in said
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert load_verified(path)["global_step"] == step
    assert processes.run(train, tmp_path, ckpt_path=path, log=log) == 0, log.read_text()
    assert equal(expected, torch.load(tmp_path / "final0.pt", weights_only=True))


def test_before_training_there_is_nothing_to_save(tmp_path):
    assert processes.run(train, tmp_path, "SIGTERM", hook="sanity", log=tmp_path / "log") == 143
    assert "before training began. There is nothing to save" in (tmp_path / "log").read_text()
    assert not (tmp_path / "checkpoints").exists()


class Trying(pl.Callback):
    """Takes part in trials, and gets the signal in the first one."""

    def __init__(self):
        self.begun = bytearray()  # which trials do not put back

    def on_train_batch_start(self, *_):
        self.begun.append(1)
        os.kill(os.getpid(), signal.SIGUSR1)


def test_a_signal_in_trials_before_the_first_step_ends_them(tmp_path, capsys):
    trying, before = Trying(), signal.getsignal(signal.SIGUSR1)
    with pytest.raises(SystemExit) as exit_:
        trainer([SignalCheckpoint(dirpath=tmp_path), LRFinder(num_steps=10), trying]).fit(Tiny())
    assert (exit_.value.code, len(trying.begun)) == (138, 1)
    assert "Interrupted by SIGUSR1 before training began" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGUSR1) == before


class Loading(Tiny):
    number = signal.SIGTERM

    def train_dataloader(self):
        os.kill(os.getpid(), self.number)
        return super().train_dataloader()


def load(folder, name):
    module, before = Loading(), signal.getsignal(signal.Signals[name])
    module.number = signal.Signals[name]
    try:
        trainer([SignalCheckpoint(dirpath=folder / "saved")], num_sanity_val_steps=0).fit(module)
    finally:
        print("handlers restored", signal.getsignal(module.number) == before)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_while_data_are_loaded_is_not_swallowed(tmp_path, name):
    """In a process of its own: Lightning leaves torch's loaders changed where something ends it in there."""
    assert processes.run(load, tmp_path, name, log=tmp_path / "log") == NUMBERS[name]
    assert "handlers restored True" in (tmp_path / "log").read_text()
    assert not (tmp_path / "saved").exists()


def test_a_second_interrupt_exits_at_once(tmp_path):
    assert processes.run(train, tmp_path, "SIGINT", 5, "twice", log=tmp_path / "log") == 130
    assert "the checkpoint is" not in (tmp_path / "log").read_text()
    assert not (tmp_path / "checkpoints").exists() or not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.turns(6, family="ranks")
def test_of_two_processes_one_is_told_and_both_agree(tmp_path):
    def both(**arguments):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "NODE_RANK": "0"}
        ranks = [
            processes.start(
                train,
                tmp_path,
                **arguments,
                devices=2,
                log=tmp_path / f"log{rank}",
                env=env | {"LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]
        for rank in ranks:
            rank.join(120)
        return [rank.exitcode for rank in ranks]

    # The second process alone gets it (see Interrupter); it ends with 0, or Lightning's observer would kill the first.
    assert both(name="SIGTERM", at=2) == [143, 0], (tmp_path / "log0").read_text() + (tmp_path / "log1").read_text()
    path = tmp_path / "checkpoints" / "interrupted-step=2.ckpt"
    assert f"the checkpoint is {path}" in (tmp_path / "log0").read_text()
    assert "the checkpoint is" not in (tmp_path / "log1").read_text()
    assert both(ckpt_path=path) == [0, 0]
    resumed = torch.load(tmp_path / "final0.pt", weights_only=True)
    assert both() == [0, 0]
    assert equal(resumed, torch.load(tmp_path / "final0.pt", weights_only=True))


class Signal(pl.Callback):
    def __init__(self, number=signal.SIGUSR1, error=None):
        self.number, self.error = number, error

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.order = [type(callback).__name__ for callback in trainer.callbacks]
        if self.error:
            raise self.error
        if batch_idx == 3:
            os.kill(os.getpid(), self.number)


def test_it_lies_beside_the_other_checkpoints_and_handlers_of_the_user_are_called(tmp_path):
    called = []
    before = signal.signal(signal.SIGUSR1, mine := lambda number, frame: called.append(number))
    try:
        sender, saver = Signal(), ModelCheckpoint(tmp_path / "mine")
        with pytest.raises(SystemExit) as exit_:
            trainer([SignalCheckpoint(), sender, saver], accumulate_grad_batches=1, enable_checkpointing=True).fit(
                Tiny()
            )
        assert exit_.value.code == 138
        assert (tmp_path / "mine" / "interrupted-step=4.ckpt").exists()
        assert called == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert sender.order[-1] == "SignalCheckpoint"  # after ModelCheckpoint, too
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("error", [None, RuntimeError("on purpose"), KeyboardInterrupt()])
def test_handlers_are_put_back_whatever_happens(tmp_path, error):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    run = trainer([SignalCheckpoint(dirpath=tmp_path), Signal(signal.SIGCONT, error)], max_epochs=1)
    if error is None:
        run.fit(Tiny())
    else:
        with pytest.raises((RuntimeError, SystemExit)):
            run.fit(Tiny())
        signal.signal(signal.SIGINT, before[signal.SIGINT])  # Lightning leaves it ignored after Ctrl-C
    assert {number: signal.getsignal(number) for number in before} == before


def test_under_nohup_the_end_of_a_connection_ends_nothing(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = trainer([Signal(signal.SIGHUP), SignalCheckpoint(dirpath=tmp_path)], max_epochs=1)
        run.fit(Tiny())
        assert run.state.finished
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert list(tmp_path.iterdir()) == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_slurm_keeps_its_signals(tmp_path):
    environment = SLURMEnvironment(auto_requeue=True)
    callback, seen = SignalCheckpoint(dirpath=tmp_path), {}

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer, *args):
            trainer.strategy.cluster_environment = environment
            callback._uninstall(trainer)
            callback._install(trainer)
            seen.update({number: callback._on_signal == signal.getsignal(number) for number in callback._numbers})
            trainer.should_stop = True

    trainer([callback, Look()], max_epochs=1, limit_train_batches=1).fit(Tiny())
    assert seen == {signal.SIGTERM: False, signal.SIGINT: True, signal.SIGUSR1: False, signal.SIGHUP: True}


def test_outside_the_main_thread_it_says_that_it_cannot(tmp_path):
    caught = []

    def work():
        with pytest.warns(UserWarning, match="outside of the main thread, where signals cannot be handled"):
            trainer([SignalCheckpoint(dirpath=tmp_path)], max_epochs=1, limit_train_batches=1).fit(Tiny())
        caught.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert caught == [True]


@pytest.mark.parametrize("signals", [["SIGKILL"], ["SIGTERM", "TERM"], "SIGNAL", [15]])
def test_names_that_are_no_signals_are_refused(signals):
    with pytest.raises(ConfigurationError, match=r"SignalCheckpoint: signals must be (names|a list of texts)"):
        SignalCheckpoint(signals)


def test_the_standalone_package_has_it_all_too(tmp_path):
    package = pytest.importorskip("pytorch_lightning")

    class Module(package.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 1))

        def training_step(self, batch, batch_idx):
            if self.trainer.fit_loop.total_batch_idx == at:
                os.kill(os.getpid(), signal.SIGUSR1)
            return (self.layer(batch) - 1).square().sum()

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.arange(6.0)[:, None], shuffle=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    def run(ckpt_path=None):
        callbacks = [SignalCheckpoint(dirpath=tmp_path), ExactResume()]
        silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        arguments = silent | {"accelerator": "cpu", "enable_checkpointing": False, "max_epochs": 2}
        module = Module()
        package.Trainer(callbacks=callbacks, plugins=[SafeCheckpointIO()], **arguments).fit(module, ckpt_path=ckpt_path)
        return module.state_dict()

    at = None
    whole = run()
    at = 3
    with pytest.raises(SystemExit) as exit_:
        run()
    assert exit_.value.code == 138
    at = None
    assert equal(dict(whole), dict(run(tmp_path / "interrupted-step=4.ckpt")))


def impatient():
    """Somebody who presses Ctrl-C a third time while the exception of the second one is still being handled."""
    callback = SignalCheckpoint()
    callback._process = os.getpid()
    signal.signal(signal.SIGINT, callback._on_signal)
    os.kill(os.getpid(), signal.SIGINT)
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except SystemExit as end:
        print("the second:", end.code, flush=True)
        os.kill(os.getpid(), signal.SIGINT)
    print("the third went unanswered", flush=True)


def test_a_third_interrupt_ends_the_process(tmp_path):
    assert processes.run(impatient, log=tmp_path / "log") == 130
    assert (tmp_path / "log").read_text() == "the second: 130\n"
