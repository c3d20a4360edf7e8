"""The launch scripts: a process dies, all begin again from the last checkpoint, and the end is the same to the bit."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests.cli.toy_runs import ALLOW
from tests.processes import await_ends, python, start_ranks
from tests.ranks import watching
from tests.support import assert_equal

ROOT = Path(__file__).parents[2]


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A run of eight steps on two processes that saves at each step and draws in each, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    toys = "tests.support_cli"
    saves = {"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 1, "filename": "{step}"}}
    callbacks = ["ExactResume", f"{toys}.WeightsOfRank", "tests.cli.dying.DiesOnce"]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0}
    trainer = {"accelerator": "cpu", "devices": 2, "max_epochs": 4, "strategy": "ReplicatedStrategy", **quiet}
    config = {
        "trainer": trainer | {"callbacks": [*({"class_path": name} for name in callbacks), saves]},
        "model": {"class_path": f"{toys}.ToyModel", "init_args": {"noise": 1.0}},
        "data": {"class_path": f"{toys}.ToyData"},
    }
    Path("toy.yaml").write_text(yaml.safe_dump(config))
    return [*ALLOW, "-c", "toy.yaml"]


def weights_of_ranks() -> list[dict[str, torch.Tensor]]:
    return [torch.load(f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def undisturbed(words: list[str]) -> list[dict[str, torch.Tensor]]:
    """The weights of a run in which nobody dies."""
    Path("died").touch()
    done = python("-m", "lit_efficient", "fit", *words, "--trainer.default_root_dir", "undisturbed")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    Path("died").unlink()
    return weights_of_ranks()


def launched(script: str, words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    called = ["bash", str(ROOT / "examples" / "launch" / script), *words]
    return subprocess.run(called, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.turns(3, family="ranks")
@pytest.mark.parametrize("taken", [False, True])
def test_a_process_that_waits_for_others_to_start_says_so(taken: bool, tmp_path: Path) -> None:
    """It waited half an hour in silence; of a port that is taken it said that another process had ended."""
    ranks, logs = start_ranks(watching.alone, tmp_path, taken)
    await_ends(ranks, 60)
    said = logs[0].read_text()
    assert ranks[0].exitcode == 2, said[-4000:]
    why = "The server socket has failed to listen" if taken else "Timed out after"
    assert re.search(rf"error: process 0 of 2 has not met the others at 127.0.0.1:\d+: {why}", said), said[-4000:]
    assert taken or "process 0 of 2 waits for the others to start and to reach 127.0.0.1:" in said


@pytest.mark.nightly
def test_torchrun_starts_again_and_ends_as_an_undisturbed_run(words: list[str]) -> None:
    wanted = undisturbed(words)
    done = launched("torchrun.sh", words, DEVICES="2", RESTARTS="1")
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert Path("died").exists()
    assert "error: this process ends, because it would wait forever: process 1 has failed" in done.stderr
    runs = [run for run in Path("runs/toy").iterdir() if not run.is_symlink()]
    assert len(runs) == 1  # the second attempt went on in the folder of the first
    for rank, state in enumerate(weights_of_ranks()):
        assert_equal(state, wanted[rank])


SRUN = """#!/usr/bin/env bash
while [ "${1:0:2}" = -- ]; do shift; done
export SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=2 SLURM_NNODES=1 SLURM_NODEID=0
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & tasks+=($!); done
code=0
for task in "${tasks[@]}"; do wait "$task"; ended=$?; [ "$ended" -gt "$code" ] && code=$ended; done
exit "$code"
"""


def test_what_slurm_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors are asked for again, as SLURM 22.05 forgets them; one that always fails is queued so often only."""
    monkeypatch.chdir(tmp_path)
    for program, says in (("srun", 'echo "$@" > asked; exit "$CODE"'), ("scontrol", 'echo "$@" > queued')):
        Path(program).write_text(f"#!/usr/bin/env bash\n{says}\n")
        Path(program).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "4", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for code, restarts, again in (("138", "0", True), ("143", "19", True), ("143", "20", False), ("2", "0", False)):
        done = launched("slurm.sh", ["-c", "toy.yaml"], **job, CODE=code, SLURM_RESTART_COUNT=restarts)
        assert done.returncode == int(code)
        assert Path("queued").exists() is again
        Path("queued").unlink(missing_ok=True)
    words = "--kill-on-bad-exit=1 --cpus-per-task=4 python -m lit_efficient fit -c toy.yaml -c scale/slurm\n"
    assert Path("asked").read_text() == words


@pytest.mark.nightly
def test_a_job_of_slurm_is_queued_again_and_ends_as_an_undisturbed_run(words: list[str]) -> None:
    """With a stand-in for srun, which starts two tasks, and for scontrol; the signal comes from one of the tasks."""
    text = (
        Path("toy.yaml")
        .read_text()
        .replace(".DiesOnce\n", f".DiesOnce\n    init_args: {{number: {signal.SIGUSR1:d}}}\n")
    )
    Path("toy.yaml").write_text(text)
    wanted = undisturbed(words)
    Path("srun").write_text(SRUN)
    Path("scontrol").write_text('#!/usr/bin/env bash\necho "$@" > queued\n')
    for program in ("srun", "scontrol"):
        Path(program).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = {
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NAME": "toy",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    job["PATH"] = os.pathsep.join([str(Path.cwd()), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = launched("slurm.sh", words, **job)
    assert done.returncode == 128 + signal.SIGUSR1, (done.stdout + done.stderr)[-6000:]
    assert Path("queued").read_text() == "requeue 12345\n"
    done = launched("slurm.sh", words, **job, SLURM_RESTART_COUNT="1")
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    for rank, state in enumerate(weights_of_ranks()):
        assert_equal(state, wanted[rank])
