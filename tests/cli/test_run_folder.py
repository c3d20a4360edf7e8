"""A run lies in a folder of its own, ends with its last step saved, and goes on there."""

import csv
import hashlib
import json
import os
import shutil
import signal
import sys
import zipfile
from pathlib import Path
from threading import Timer

import pytest
import torch
from lightning.pytorch import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_efficient.cli.run_folder import candidates, checkpoints
from lit_efficient.errors import CheckpointError
from lit_efficient.files.checkpoints import load_verified
from lit_efficient.files.hidden_names import temporary_beside
from lit_efficient.files.runs import hold, new_folder, point_latest
from tests import processes
from tests.cli.toy_runs import fit, refused
from tests.support import assert_equal
from tests.support_cli import Recorder, ToyData

SAVE = "--trainer.enable_checkpointing=true"
ROWS = ("--trainer.logger=CSVLogger", "--trainer.log_every_n_steps=1")
BEST = {"monitor": "val/loss", "filename": "best", "enable_version_counter": False}
KEEP = f"--trainer.callbacks+={{class_path: ModelCheckpoint, init_args: {json.dumps(BEST)}}}"
RUNS = Path("runs/base")


def runs() -> list[Path]:
    return sorted(path for path in RUNS.iterdir() if not path.is_symlink() and path.is_dir())


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def last(folder: Path = RUNS / "latest") -> dict:
    return torch.load(folder / "last.ckpt", weights_only=True)


def test_everything_lies_in_a_folder_that_no_other_run_writes_to():
    arguments = [SAVE, KEEP, *ROWS, "--trainer.callbacks+=PowerEMA"]
    assert fit(*arguments) == 0
    (first,) = runs()
    assert (RUNS / "latest").resolve() == first.resolve()
    before = digests(first)
    assert {"config.yaml", "run.json", "metrics.csv", "best.ckpt", "last.ckpt"} <= before.keys()
    assert any(name.startswith("snapshots/") for name in before)
    assert sorted(os.listdir()) == ["base.yaml", "runs"]
    assert fit(*arguments) == 0
    assert len(runs()) == 2
    assert (RUNS / "latest").resolve() == runs()[1].resolve()
    assert digests(first) == before


def test_runs_that_begin_in_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda _: "now")
    assert [new_folder(tmp_path / "x").name for _ in range(3)] == ["now", "now_2", "now_3"]


def test_latest_is_a_file_where_links_are_impossible(monkeypatch):
    def impossible(*_, **__):
        raise OSError("no links on this file system")

    monkeypatch.setattr("os.symlink", impossible)
    assert fit(SAVE) == 0
    assert (RUNS / "latest").read_text() == runs()[0].name
    assert load_verified(RUNS / "latest" / "last.ckpt")["global_step"] == 8
    assert fit(SAVE, f"--ckpt_path={RUNS}/latest/last.ckpt", "--trainer.max_epochs=3") == 0
    assert load_verified(RUNS / "latest" / "last.ckpt")["global_step"] == 12
    assert len(runs()) == 1


@pytest.mark.turns(3)
@pytest.mark.parametrize("val", [[], ["--trainer.val_check_interval=2"], ["--trainer.limit_val_batches=0"]])
def test_a_run_that_ends_amid_an_epoch_goes_on_to_the_bits_of_a_longer_one(val):
    """Its last step is saved whether or not anything is validated, and its table goes on."""
    arguments = [SAVE, *ROWS, "--trainer.callbacks+=ExactResume", "--trainer.max_epochs=9", *val]
    arguments += ["--optimizer=AdamW", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=3", "--model.noise=1"]
    for steps in (2, 3):
        assert fit(*arguments, f"--trainer.max_steps={steps}") == 0
        assert last()["global_step"] == steps
    assert fit(*arguments, "--trainer.max_steps=7", f"--ckpt_path={RUNS}/latest/last.ckpt") == 0
    resumed, folder = last(), (RUNS / "latest").resolve()
    assert len(runs()) == 2
    assert fit(*arguments, "--trainer.max_steps=7") == 0
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_equal(resumed[key], last()[key])
    tables = [list(csv.DictReader((run / "metrics.csv").read_text().splitlines())) for run in (folder, RUNS / "latest")]
    losses = [[row["loss"] for row in table if row["loss"]] for table in tables]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 7


def test_an_older_checkpoint_or_another_config_begins_a_run_that_names_its_parent(capsys):
    every = "{class_path: ModelCheckpoint, init_args: {save_top_k: -1, every_n_train_steps: 2, filename: '{step}'}}"
    arguments = [SAVE, f"--trainer.callbacks+={every}"]
    assert fit(*arguments) == 0
    (first,) = runs()
    assert {path.name for step, _, path in checkpoints(first) if step == 8} == {"last.ckpt", "step=8.ckpt"}
    before = digests(first)
    for changes in ([str(first / "step=4.ckpt")], [str(first / "last.ckpt"), "--trainer.gradient_clip_val=1"]):
        parent = Path(changes[0]).resolve()
        assert fit(*arguments, "--trainer.max_epochs=3", "--ckpt_path", *changes) == 0
        begun = runs()[-1]
        record = json.loads((begun / "run.json").read_text())
        assert (begun / record["parent"]).resolve() == parent
        assert last(begun)["global_step"] == 12
        assert (RUNS / "latest").resolve() == begun.resolve()
    assert len(runs()) == 3
    assert digests(first) == before


def test_a_folder_in_use_is_not_gone_on_in(capsys, caplog):
    caplog.set_level("INFO")
    arguments = [SAVE, "--ckpt_path=last", "--trainer.max_epochs=3"]
    assert fit(SAVE) == 0
    (first,) = runs()
    before, held = digests(first), hold(first)
    assert hold(first) is None
    assert fit(*arguments) == 0
    assert f"{first} is in use by another process: this run gets a folder of its own" in caplog.text
    assert digests(first) == before
    second = runs()[-1]
    assert last(second)["global_step"] == 12
    assert (second / json.loads((second / "run.json").read_text())["parent"]).resolve().parent == first.resolve()
    os.close(held)
    assert fit(SAVE, "--ckpt_path", str(first / "last.ckpt"), "--trainer.max_epochs=3") == 0
    assert last(first)["global_step"] == 12
    assert len(runs()) == 2


def test_a_run_whose_folder_was_moved_keeps_its_best_checkpoint():
    arguments = [SAVE, KEEP, "--optimizer=SGD", "--optimizer.lr=0.5"]  # the first validation is the best
    assert fit(*arguments) == 0
    Path("elsewhere").mkdir()
    moved = Path(shutil.move(str(runs()[0]), "elsewhere"))
    best = digests(moved)["best.ckpt"]
    assert fit(*arguments, f"--ckpt_path={moved}/last.ckpt", "--trainer.max_epochs=3") == 0
    assert digests(moved)["best.ckpt"] == best
    assert last(moved)["global_step"] == 12


def test_last_is_the_newest_whole_checkpoint_of_the_newest_run(caplog):
    arguments = [SAVE, KEEP, "--ckpt_path=last"]
    assert fit(*arguments) == 0  # none is there yet: a launch script says it from the start
    assert fit(*arguments, "--trainer.max_epochs=3") == 0
    assert last()["global_step"] == 12
    damaged = RUNS / "latest" / "last.ckpt"
    with zipfile.ZipFile(damaged) as archive:
        tensor = max((one for one in archive.infolist() if "/data/" in one.filename), key=lambda one: one.file_size)
        value = archive.read(tensor)
    content = bytearray(damaged.read_bytes())
    content[content.index(value, tensor.header_offset)] ^= 1
    damaged.write_bytes(content)
    before = next(path for path in candidates("last", RUNS) if path.name != "last.ckpt")
    step = load_verified(before)["global_step"]
    with pytest.warns(UserWarning, match=r"damaged.*Going on from the one before"):
        assert fit(*arguments, "--trainer.max_epochs=4") == 0
    assert len(Recorder.last.rates) == 16 - step


def test_last_of_a_run_without_any_is_the_one_that_it_started_from(caplog, monkeypatch):
    caplog.set_level("INFO")
    arguments = [SAVE, "--ckpt_path=last"]
    assert fit(*arguments) == 0
    assert "runs/base holds no checkpoint to go on from yet; the run begins anew" in caplog.text
    (first,) = runs()
    assert fit(*arguments, "--model.scale=1e30", "--trainer.max_epochs=3") == 4  # it ends before it saves
    child = next(run for run in runs() if run != first)
    assert not list(child.glob("*.ckpt"))
    shutil.copytree("runs", "elsewhere/runs", symlinks=True)
    with monkeypatch.context() as context:
        context.chdir("elsewhere")
        for root in (RUNS, Path("..", RUNS)):
            assert [path.resolve() for path in candidates("last", root)] == [
                Path(root, first.name, "last.ckpt").resolve()
            ]
    assert fit(*arguments, "--model.scale=2", "--trainer.max_epochs=3") == 0
    assert last()["global_step"] == 12
    assert f"ckpt_path: {first / 'last.ckpt'} starts the run" in caplog.text


def test_last_of_a_run_that_is_just_ending_waits_for_its_name():
    """Another fit may look for it between its writing, as end.ckpt, and its renaming."""
    assert fit(SAVE) == 0
    (run,) = runs()
    named = Path(os.path.relpath(run / "last.ckpt"))
    written = named.rename(run / "end.ckpt")
    assert candidates("last", RUNS) == [written]  # its process was killed: nobody renames it
    held = hold(run)
    assert held
    renaming = Timer(1, written.rename, [named])
    renaming.start()
    assert candidates("last", RUNS) == [named]
    renaming.join()
    os.close(held)


@pytest.mark.parametrize("parent", ["../../../elsewhere/last.ckpt", "elsewhere/last.ckpt"])
def test_a_record_leads_to_no_checkpoint_outside(parent, tmp_path):
    """A run's folder may be somebody else's."""
    run = new_folder(RUNS)
    point_latest(run)
    (run / "run.json").write_text(json.dumps({"parent": str(Path(parent).absolute()) if parent[0] == "e" else parent}))
    with pytest.raises(CheckpointError, match=r"began from .*elsewhere/last\.ckpt, outside of runs/base: give it as"):
        candidates("last", RUNS)


def test_a_truncated_checkpoint_is_passed_over_with_a_warning():
    arguments = [SAVE, KEEP, "--ckpt_path=last"]
    assert fit(*arguments) == 0
    (run,) = runs()
    content = (run / "last.ckpt").read_bytes()
    (run / "last.ckpt").write_bytes(content[: len(content) // 2])
    with pytest.warns(UserWarning, match=r"last\.ckpt cannot be read and is passed over"):
        assert fit(*arguments, "--trainer.max_epochs=3") == 0


def test_a_job_that_its_scheduler_starts_again_goes_on(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert fit(SAVE) == 0
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    assert fit(SAVE) == 0
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert fit(SAVE, "--trainer.max_epochs=3") == 0
    assert [last(run)["global_step"] for run in runs()] == [12, 8]


def test_weights_alone_are_no_checkpoint_to_go_on_from_and_nothing_below_is_searched(capsys):
    weights = KEEP.replace('"best"', '"best", "save_weights_only": true')
    assert fit(SAVE, weights) == 0
    (run,) = runs()
    Path("deep/er").mkdir(parents=True)
    shutil.copy(run / "last.ckpt", "deep/er/hidden.ckpt")
    ToyData.touched = 0
    said = refused(capsys, "--ckpt_path", str(run / "best.ckpt"))
    assert "holds weights alone" in said
    assert f"The newest one there: {run}/last.ckpt" in said
    assert "hidden.ckpt" not in refused(capsys, "--ckpt_path", "nothing.ckpt")
    assert "last.ckpt" in refused(capsys, "--ckpt_path", str(RUNS))


class Terminated(Callback):
    """A SIGTERM in the third step."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_the_step_that_a_signal_interrupts_has_its_row(capsys):
    arguments = [SAVE, *ROWS, "--ckpt_path=last"]
    terminated = "--trainer.callbacks+=tests.cli.test_run_folder.Terminated"
    assert fit(*arguments, terminated) == 128 + signal.SIGTERM
    assert "Interrupted by SIGTERM" in capsys.readouterr().out
    table = list(csv.DictReader((RUNS / "latest/metrics.csv").read_text().splitlines()))
    assert [row["step"] for row in table if row["loss"]] == ["0", "1", "2"]
    assert (RUNS / "latest" / "interrupted-step=3.ckpt").is_file()


def _killed(call: str, name: str, arguments: list[str]) -> None:
    """A fit that is killed, as if from outside, before it removes or renames a file of a name."""
    own = getattr(os, call)

    def die(path, *rest, **options):
        if Path(path).name == name:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(path, *rest, **options)

    setattr(os, call, die)
    sys.exit(fit(*arguments))


KILLS = {
    "its saver's best before": [("unlink", "step=3.ckpt")],
    "where a link led to": [("remove", "last.ckpt")],
    "its table": [("unlink", "step=3.ckpt"), ("replace", "metrics.kept")],
}


@pytest.mark.turns(4, family="killed")
@pytest.mark.parametrize("before", KILLS)
def test_a_run_that_is_killed_between_two_files_ends_with_those_of_one_that_was_not(before):
    each = {"every_n_train_steps": 1, "filename": "{step}", "save_last": "link"}
    saver = f"--trainer.callbacks+={{class_path: ModelCheckpoint, init_args: {json.dumps(each)}}}"
    given = arguments = [SAVE, *ROWS, "--trainer.callbacks+=ExactResume", saver]
    assert fit(*given) == 0
    names, whole = digests(runs()[0]).keys(), last()
    for call, name in KILLS[before]:
        log = Path("log").resolve()
        assert processes.run(_killed, call, name, arguments, log=log) == -signal.SIGKILL, log.read_text()
        arguments = [*given, "--ckpt_path=last"]
    folder = runs()[-1]
    left = set(os.listdir(folder))
    if mine := {"step=3.ckpt"} & left:  # a copy is nobody's but the user's
        shutil.copy(folder / "step=3.ckpt", folder / "mine.ckpt")
    assert digests(folder).keys() != names
    assert fit(*arguments) == 0
    assert len(runs()) == 2
    assert digests(folder).keys() - {"environment_1.json", "mine.ckpt"} == names
    assert (folder / "mine.ckpt").exists() == bool(mine)
    for key in ("state_dict", "optimizer_states", "loops"):
        assert_equal(last()[key], whole[key])


def test_a_run_that_is_killed_after_its_last_step_has_its_checkpoint_and_nothing_left_to_do(capsys):
    arguments = [SAVE, *ROWS, "--trainer.callbacks+=ExactResume"]
    assert fit(*arguments) == 0
    whole = last()
    log = Path("log").resolve()
    assert processes.run(_killed, "replace", "end.ckpt", arguments, log=log) == -signal.SIGKILL, log.read_text()
    half_removed = temporary_beside(runs()[-1] / "last.ckpt")  # with the number of this process, which does not use it
    half_removed.mkdir()
    assert fit(*arguments, "--ckpt_path=last") == 6
    assert f"{runs()[-1]}/last.ckpt is at epoch" in capsys.readouterr().err
    assert not (runs()[-1] / "end.ckpt").exists()
    assert not half_removed.exists()
    for key in ("state_dict", "optimizer_states", "loops"):
        assert_equal(last()[key], whole[key])


class Killed(Callback):
    """The end of a process, in the fourth step."""

    armed = True

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if trainer.global_step == 3 and self.armed:
            raise RuntimeError("killed")


def steps_of(name: str, logger: str) -> list[int]:
    if logger == "CSVLogger":
        table = list(csv.DictReader((RUNS / "latest/metrics.csv").read_text().splitlines()))
        return [int(row["step"]) for row in table if row[name]]
    return [event.step for event in EventAccumulator(str(RUNS / "latest")).Reload().Scalars(name)]


# The checkpoint is of the third step, with its validation, or of the second.
@pytest.mark.parametrize(("every", "logger"), [(1, "CSVLogger"), (2, "CSVLogger"), (1, "TensorBoardLogger")])
def test_a_run_that_was_killed_has_no_row_twice(every, logger, monkeypatch):
    saves = f"{{class_path: ModelCheckpoint, init_args: {{every_n_train_steps: {every}, filename: kept}}}}"
    arguments = [SAVE, *ROWS, "--trainer.val_check_interval=3", f"--trainer.callbacks+={saves}"]
    arguments += ["--trainer.callbacks+=ExactResume", "--trainer.callbacks+=tests.cli.test_run_folder.Killed"]
    arguments += [f"--trainer.logger={logger}"]
    with pytest.raises(RuntimeError, match="killed"):
        fit(*arguments)
    monkeypatch.setattr(Killed, "armed", False)
    arguments += ["--ckpt_path=last"]
    assert fit(*arguments) == 0
    assert len(runs()) == 1
    assert steps_of("loss", logger) == [*range(8)]
    assert steps_of("lr", logger) == [*range(8)]
    assert steps_of("val/loss", logger) == [2, 6]


def test_the_last_step_that_a_saver_has_saved_has_one_name():
    """``end.ckpt`` is a link to it then, and renaming one of two names of a file does nothing."""
    late = "{class_path: ModelCheckpoint, init_args: {every_n_train_steps: 100, save_last: true}}"  # only at the end
    arguments = [SAVE, f"--trainer.callbacks+={late}", "--trainer.max_steps=-1", "--trainer.max_epochs=2"]
    assert fit(*arguments) == 0
    assert [path.name for path in (RUNS / "latest/").glob("*.ckpt")] == ["last.ckpt"]
