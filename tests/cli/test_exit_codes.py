"""What the command line ends with: every code of `errors.EXIT_CODES`, and what it says of a run that diverges."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, Dataset

from lit_efficient.__main__ import main
from lit_efficient.cli.errors import exit_code, explain
from lit_efficient.errors import EXIT_CODES, CheckpointError, DivergedError, OutOfMemoryError
from lit_efficient.files.checkpoints import load_verified
from tests.cli.toy_runs import ALLOW, fit
from tests.support_cli import Recorder, ToyModel

DIVERGES = ["--model.scale", "1e12"]
SAVES = ["--trainer.enable_checkpointing", "true", "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint"]
SAVES += ["--trainer.callbacks.every_n_train_steps=1", "--trainer.callbacks.dirpath=kept"]
SAVES += ["--trainer.callbacks.save_last=true"]


class Raises(Callback):
    """Raise an error of a kind in a hook that every stage has.

    Args:
        kind: Which one.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_validation_start(self, trainer, pl_module) -> None:
        if self.kind.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, self.kind))
        else:
            raise {
                "out of memory": torch.OutOfMemoryError("tried to allocate 80 GiB"),
                "our limit": OutOfMemoryError("8 bytes of 4"),
                "checkpoint": CheckpointError("damaged"),
                "bug": RuntimeError("a bug"),
            }[self.kind]


def ends(command: str, kind: str) -> int:
    raises = ["--trainer.callbacks+=tests.cli.test_exit_codes.Raises", "--trainer.callbacks.kind", kind]
    return main([command, *ALLOW, "-c", "base.yaml", *raises])


def test_a_run_that_diverges_keeps_its_last_good_checkpoint_and_ends_with_4(capsys):
    assert fit(*DIVERGES, *SAVES) == 4
    captured = capsys.readouterr()
    assert "Done" not in captured.out
    *_, diverged, where, left = captured.err.splitlines()
    assert diverged == "error: the run has diverged"
    assert "gradients are not finite in net.0.weight" in where
    written = [load_verified(path)["state_dict"] for path in Path("kept").glob("*.ckpt")]
    assert written
    assert all(tensor.isfinite().all() for state in written for tensor in state.values())
    last = Path(left.removeprefix("The last good checkpoint: "))
    assert load_verified(last)["global_step"] == max(
        load_verified(path)["global_step"] for path in Path("kept").glob("*.ckpt")
    )


@pytest.mark.filterwarnings("ignore:NonFiniteGuard")
@pytest.mark.parametrize("action", ["raise", "skip"])
def test_a_guard_of_the_configs_is_the_only_one(action):
    guard = ["--trainer.callbacks+=NonFiniteGuard", "--trainer.callbacks.action", action]
    assert fit(*DIVERGES, *guard) == (4 if action == "raise" else 0)
    if action == "skip":
        assert all(parameter.isfinite().all() for parameter in ToyModel.last.parameters())
        assert [type(callback).__name__ for callback in Recorder.last.trainer.callbacks].count("NonFiniteGuard") == 1


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("kind", "code"), [("out of memory", 3), ("our limit", 3), ("checkpoint", 2), ("SIGINT", 130), ("SIGTERM", 143)]
)
def test_errors_and_signals_have_their_codes(kind, code, capsys):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    assert ends("validate", kind) == code
    for number, handler in before.items():
        signal.signal(number, handler)  # Lightning leaves SIGINT ignored
    assert "Traceback" not in capsys.readouterr().err


class Interrupted(ToyModel):
    """Ctrl-C while the parts are built."""

    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        super().__init__()


def test_ctrl_c_before_there_is_a_run_shows_no_traceback(capsys):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert fit("--model=tests.cli.test_exit_codes.Interrupted") == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"


class Rows(Dataset[int]):
    """Its reader dies, or says what is wrong."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        if self.error:
            raise self.error
        os._exit(1)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, "DataLoader worker (pid"),
        (CheckpointError("row 7 is damaged"), "row 7 is damaged"),
        (FileNotFoundError(2, "No such file or directory", "7.txt"), "reading the data: .*'7.txt'"),
    ],
)
def test_of_a_loaders_worker_the_cause_is_said(error, said):
    with pytest.raises((RuntimeError, OSError)) as caught:
        list(DataLoader(Rows(error), num_workers=1, multiprocessing_context="fork"))
    explained = explain(caught.value) or ""
    assert re.match(said.replace("(pid", r"\(pid"), explained)
    assert len(explained.splitlines()) == 1
    assert exit_code(caught.value) == 2


def test_a_full_disk_of_a_logger_is_said():
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(OSError, match="No space left") as caught:
        full.write(b"a row")
    assert explain(caught.value) == "a file of the run cannot be written: No space left on device"


class Warned(Callback):
    """A scheduler's warning while the data are being prepared, and in the last hook of a fit."""

    def setup(self, trainer, pl_module, stage) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    def on_fit_end(self, trainer, pl_module) -> None:
        self.setup(trainer, pl_module, "")


def test_a_warning_before_or_after_training_does_not_kill():
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        assert fit("--trainer.callbacks+=tests.cli.test_exit_codes.Warned") == 0
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_bug_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="a bug"):
        ends("validate", "bug")


def test_help_lists_every_code(capsys):
    assert main(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())  # it is wrapped
    assert [code for code in EXIT_CODES if f"{code} {EXIT_CODES[code]}" in said] == [0, 1, 2, 3, 4, 5, 6]
    assert DivergedError.exit_code == 4


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (["--trainer.max_steps=4", "--trainer.max_epochs=-1"], "is at step 4, and trainer.max_steps is 4"),
        (["--trainer.max_epochs=1"], "is at epoch 1, and trainer.max_epochs is 1"),
    ],
)
def test_a_resumed_run_with_nothing_left_to_do_says_so(limits: list[str], said: str, capsys) -> None:
    assert fit("--trainer.enable_checkpointing=true", *limits) == 0
    capsys.readouterr()
    assert fit("--trainer.enable_checkpointing=true", *limits, "--ckpt_path=last") == 6
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    assert "Done." not in printed.out
    assert len([path for path in Path("runs/base").iterdir() if not path.is_symlink()]) == 1
    assert fit("--trainer.enable_checkpointing=true", "--trainer.max_epochs=3", "--ckpt_path=last") == 0


@pytest.mark.parametrize(
    ("arguments", "validates"),
    [
        (["--trainer.max_steps=3", "--trainer.max_epochs=-1"], False),
        (["--trainer.max_steps=4", "--trainer.max_epochs=-1"], True),
        (["--trainer.max_steps=3", "--trainer.max_epochs=-1", "--trainer.val_check_interval=2"], True),
        (["--trainer.max_steps=3", "--trainer.max_epochs=-1", "--trainer.val_check_interval=0.5"], True),
        (["--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=3"], False),
        (["--trainer.max_epochs=3", "--trainer.check_val_every_n_epoch=3"], True),
        (["--trainer.max_epochs=1", "--trainer.val_check_interval=9", "--trainer.check_val_every_n_epoch=null"], False),
        (["--trainer.max_epochs=3", "--trainer.val_check_interval=9", "--trainer.check_val_every_n_epoch=null"], True),
        (["--trainer.max_epochs=1", "--trainer.limit_val_batches=0"], False),
        (["--trainer.max_steps=3", "--trainer.max_epochs=-1", "--trainer.accumulate_grad_batches=2"], True),
    ],
)
def test_a_run_that_never_validates_says_so_before_it_starts(arguments: list[str], validates: bool, caplog) -> None:
    """The oracle is Lightning: whether a validation started in the run itself."""
    with caplog.at_level("INFO"):
        assert fit(*arguments, "--trainer.callbacks+=tests.cli.test_exit_codes.CountsValidations") == 0
    assert (CountsValidations.started > 0) is validates
    assert ("This fit never validates" in caplog.text) is not validates


class CountsValidations(Callback):
    """Count the validations of a run, without the sanity check."""

    started = 0

    def on_fit_start(self, trainer, pl_module) -> None:
        CountsValidations.started = 0

    def on_validation_start(self, trainer, pl_module) -> None:
        CountsValidations.started += not trainer.sanity_checking
