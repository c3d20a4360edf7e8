"""Row 4: send signals at named instants. Check the saved checkpoint, the exit code and the exact resume."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.trust_rows import Piece
from benchmarks.trust_rows.interruptible import begin, fit_words, program, rows, struck, trained, write_config
from tests import processes
from tests.callbacks.resume_kit import equal

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
PATIENCE = 120  # seconds for a run; what takes longer hangs
LR = ("--trainer.callbacks+=LRFinder", "--trainer.callbacks.num_steps=10")
BATCH = ("--trainer.callbacks+=MaxBatchSize", "--trainer.callbacks.memory_limit=1GiB", "--trainer.callbacks.max_size=6")
COMPILE = ("--trainer.callbacks+=Compile", "--trainer.callbacks.backend=")
VARIANTS: dict[str, tuple[str, ...]] = {
    "": (),
    "lr": LR,
    "batch": BATCH,
    "workers": ("--data.num_workers=2",),
    "aot": (COMPILE[0], COMPILE[1] + "aot_eager"),
    "inductor": (COMPILE[0], COMPILE[1] + "inductor"),
}
# Instants at which nothing has been trained, and the turns of each.
BEFORE = {
    **dict.fromkeys(("data-init", "model-init", "prepare-data", "data-setup", "callback-setup"), (1,)),
    **dict.fromkeys(("configure-model", "configure-optimizers", "fit-start", "sanity-start", "sanity-end"), (1,)),
    **dict.fromkeys(("train-loader", "train-start", "epoch-start"), (1,)),
    "sanity-step": (1, 2),
    "batch-start": (1,),
    "lr:trial": (1, 7),
    "lr:trial-loss": (3,),
    "batch:trial": (1, 4),
    "batch:trial-loss": (2,),
}
WHILE = {
    "batch-start": (2, 7, 12),
    "forward": (1, 4, 6, 11),
    "loss": (3,),
    "before-backward": (8,),
    "after-backward": (5,),
    "optimizer-step": (1, 4),
    "zero-grad": (2,),
    "batch-end": (1, 3, 6, 12),
    "fetch": (14, 41),
    "validation-start": (1, 2),
    "validation-step": (2, 9),
    "validation-end": (3,),
    "epoch-end": (1,),
    "sample-text": (1, 4),
    "sample-image": (2,),
    "save": (1, 3),
    "before-fsync": (1, 3),
    "after-replace": (1, 3),
    "train-end": (1,),
}
AFTER = {"fit-end": (1,), "teardown": (1,), "end": (1,)}


def parts(case: str) -> tuple[str, str, int, str, str]:
    """variant, place, turn, signal, how"""
    place, turn, name, *how = case.split(" ")
    variant, _, place = place.rpartition(":")
    return variant, place, int(turn), name, " ".join(how)


def _instants(chosen: dict[str, tuple[int, ...]]) -> list[str]:
    return [f"{place} {turn}" for place, turns in chosen.items() for turn in turns]


def cases() -> list[str]:
    found = [f"{at} {name}" for at in _instants({**BEFORE, **WHILE, **AFTER}) for name in SIGNALS]
    found += [f"{at} SIGINT twice" for at in _instants(WHILE)[::2] + _instants(BEFORE)[::4]]
    few = [at for at in _instants(WHILE)[::6] if not at.startswith("fetch")]  # workers do that before the first step
    found += [f"workers:{at} {name} group" for at in few for name in ("SIGINT", "SIGTERM")]
    found += [f"aot:forward {turn} {name} after {delay}" for turn, name, delay in _compiling()]
    return [*found, *(f"inductor:forward 1 {name} after {delay}" for name, delay in zip(SIGNALS, (0.5, 2.0, 4.0, 8.0)))]


def _compiling() -> list[tuple[int, str, float]]:
    return [(1, "SIGTERM", 0.05), (1, "SIGINT", 0.1), (1, "SIGHUP", 0.2), (1, "SIGUSR1", 0.4), (2, "SIGINT", 0.05)]


@cache
def expected(variant: str) -> tuple[dict[str, Any], list[tuple[str, ...]], float]:
    """Return the result of an uninterrupted training, and its seconds."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            write_config()
            start = time.monotonic()
            code, said = ran(program, *fit_words(*VARIANTS[variant]), env=compiler(before))
            assert code == 0, said[-2000:]
            return (*result(), time.monotonic() - start)
        finally:
            os.chdir(before)


def compiler(folder: Path) -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}


def result() -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    run = Path("runs/run/latest").resolve()
    return trained(run / "last.ckpt"), rows(run)


def ran(target: Callable[..., None], *words: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Return the exit code as in a shell (999 for a run that hangs), and the output."""
    log = Path.cwd() / "log"
    log.unlink(missing_ok=True)
    return ended(processes.start(target, *words, log=log, env=env), log)


def ended(process: processes.Process, log: Path) -> tuple[int, str]:
    process.join(PATIENCE)
    hangs = process.is_alive()
    process.kill()
    process.join()
    code = process.exitcode
    if hangs:
        code = 999
    elif code < 0:  # A process that a signal ended has its negative number; a shell shows 128 + number.
        code = 128 - code
    return code, log.read_text(errors="replace") if log.exists() else ""


def trial(case: str, folder: Path) -> str:
    variant, place, turn, name, how = parts(case)
    write_config()
    env = compiler(folder) | ({"TRUST_GROUP": "1"} if how == "group" else {})
    strike = [place, turn, name, 2 if how == "twice" else 1]
    strike += [float(how.split()[1])] if how.startswith("after") else []
    code, said = ran(program, *fit_words(*VARIANTS[variant]), env=env | {"TRUST_STRIKE": json.dumps(strike)})
    if struck() is None:
        return f"it was never struck, and ended with {code}: {said[-300:]!r}"
    early = turn in BEFORE.get(f"{variant}:{place}".lstrip(":"), ())
    return judged(case, name, code, said, early=early, done=place in AFTER, variant=variant, twice=how == "twice")


def judged(
    case: str, name: str, code: int, said: str, early: bool, done: bool, variant: str = "", twice: bool = False
) -> str:
    """Return what went wrong in a run that received a signal, or in the run that resumed it."""
    number = getattr(signal, name)
    for word in ("Traceback", "Exception ignored", "Error:"):
        if word in said:
            return f"{word} was printed: {said[said.index(word) :][-300:]!r}"
    at = struck()
    saved = re.findall(r"Interrupted by \w+: the checkpoint is (.+)", said)
    ignores = name == "SIGUSR1" and (early or done)  # a warning kills no run that has nothing to save: cli/signals.py
    if code == 0 and (done or ignores):
        return compared(variant)
    if code != 128 + number:
        return f"it ended with {code}, not {128 + number}: {said[-200:]!r}"
    if early and at and at[1] > 1:
        return f"before there was anything to save it went on for {at[1]} steps"
    if early and saved:
        return f"it was to end at once, and saved {saved[-1]}"
    if not early and not done and not saved and not twice:
        return f"nothing was saved: {said[-200:]!r}"
    if saved and at:
        step = trained(Path(saved[-1]))["global_step"]
        if not at[0] <= step <= at[0] + 1:
            return f"struck at step {at[0]}, it saved step {step}"
    following = [line for line in said.partition("Next:")[2].splitlines() if " lit_efficient fit " in line]
    if saved and not following:
        return "it does not say how to go on"
    words = shlex.split(following[0])[3:] if saved else fit_words(*VARIANTS[variant], "--ckpt_path=last")
    code, said = ran(program, *words, env=compiler(Path.cwd()))
    if code:
        return f"going on ended with {code}: {said[-300:]!r}"
    return compared(variant, table=not twice)  # what comes after the last checkpoint is done again, and its rows, too


def compared(variant: str, table: bool = True) -> str:
    state, found = result()
    whole, lines, _ = expected(variant)
    if not equal(state, whole):
        return f"what was trained differs in {[key for key in whole if not equal(whole[key], state[key])]}"
    if table and found != lines:
        return f"rows lost: {[row for row in lines if row not in found]}, new or doubled: {_more(found, lines)}"
    return ""


def _more(table: list[tuple[str, ...]], lines: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    left = list(lines)
    return [row for row in table if row not in left or left.remove(row)]  # type: ignore[func-returns-value]


def anywhen_cases() -> list[str]:
    warm = [f"{number} {SIGNALS[number % 4]}" for number in range(60)]
    return [*warm, *(f"cold {number} {SIGNALS[number % 2]}" for number in range(8))]


def anywhen_trial(case: str, folder: Path) -> str:
    """Send a signal at a random time. The interrupted operation is determined afterwards."""
    name = case.rsplit(maxsplit=1)[-1]
    cold = case.startswith("cold")
    write_config()
    log = folder / "log"
    share = random.Random(case).random()
    if cold:  # nothing is imported yet
        words = ["-m", "lit_efficient", *fit_words()]
        environment = {**os.environ, "PYTHONPATH": str(processes.ROOT)}
        server = processes._server("young")
        process = server.start(processes._python, words, str(folder), environment, str(log), str(log))
        time.sleep(0.2 + 4 * share)
    else:
        length = expected("")[2]
        process = processes.start(program, *fit_words(), log=log)
        time.sleep(0.05)  # until it has begun
        time.sleep(share * 1.1 * length)
    alive = process.is_alive()
    if alive:
        os.kill(process.pid, getattr(signal, name))
    code, said = ended(process, log)
    began = "sample at step" in said or any(Path().glob("runs/run/*/kept*"))
    saved = "the checkpoint is" in said
    over = "Done." in said or "stopped: `max_epochs=2` reached" in said
    early = not began and not saved and not over
    if code == 0 and not alive:
        return compared("")
    return judged(case, name, code, said, early=early, done=over or not saved)


def peer_cases() -> list[str]:
    return [case for case in plain_cases() if not case.startswith(("before-fsync", "after-replace"))]


def plain_cases() -> list[str]:
    at = [one for one in _instants(WHILE) if not one.startswith("sample")]
    at = [*at, *_instants({"sanity-step": (1, 2), "sanity-end": (1,), "train-start": (1,)})]
    found = [f"{instant} {name}" for index, instant in enumerate(at) for name in SIGNALS[index % 2 :: 2]]
    return [*found, *(f"no-sanity:train-loader 1 {name}" for name in SIGNALS[:2])]


def plain(ckpt_path: str | None = None, sanity: int = 2, peer: bool = False, devices: int = 1) -> None:
    """A program of somebody's own."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    from benchmarks.trust_rows.interruptible import Data, Net, Strikes
    from lit_efficient import ExactResume, SafeCheckpointIO, SignalCheckpoint

    torch.set_num_threads(1)
    pl.seed_everything(3, verbose=False)
    keeps = ModelCheckpoint("kept", "kept-{step}", every_n_train_steps=2, save_top_k=-1, save_on_exception=peer)
    ours = [] if peer else [SignalCheckpoint(dirpath="kept"), ExactResume()]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=2,
        accumulate_grad_batches=2,
        val_check_interval=3,
        num_sanity_val_steps=sanity,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        callbacks=[Strikes(), keeps, *ours],
        plugins=[] if peer else [SafeCheckpointIO()],
    )
    trainer.fit(Net(), datamodule=Data(), ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    trainer.save_checkpoint("end.ckpt", weights_only=False)


def _plain(*arguments: Any) -> None:
    begin()
    rank = int(os.environ.get("RANK", "0"))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        plain(*arguments)
    finally:
        Path(f"{rank}.over").touch()
        until = time.monotonic() + 20
        while rank == 0 and time.monotonic() < until and len(list(Path().glob("*.over"))) < ranks:
            time.sleep(0.02)  # it holds the store that the other may still ask


@cache
def expected_plain(peer: bool, devices: int = 1) -> dict[str, Any]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            code, said = ran(_plain, None, 2, peer) if devices == 1 else _both(None)
            assert code == 0, said[-2000:]
            return trained(Path("end.ckpt"))
        finally:
            os.chdir(before)


def plain_trial(case: str, folder: Path, peer: bool = False) -> str:
    variant, place, turn, name, _ = parts(case)
    sanity = 0 if variant == "no-sanity" else 2
    strike = f'["{place}", {turn}, "{name}", 1]'
    code, said = ran(_plain, None, sanity, peer, env={"TRUST_STRIKE": strike})
    return plainly_judged(case, code, said, lambda path: ran(_plain, path, sanity, peer), peer)


def plainly_judged(
    case: str, code: int, said: str, go_on: Callable[[str | None], tuple[int, str]], peer: bool, devices: int = 1
) -> str:
    """As `judged`, of a program of somebody's own: it goes on from the newest checkpoint that there is."""
    _, place, turn, name, _ = parts(case)
    number = getattr(signal, name)
    at = struck()
    if at is None:
        return f"it was never struck, and ended with {code}: {said[-300:]!r}"
    if "Traceback" in said and not peer:
        return f"Traceback was printed: {said[-200:]!r}"
    if code != 128 + number and not peer:
        return f"it ended with {code}, not {128 + number}"
    early = turn in BEFORE.get(place, ())
    found = sorted(Path("kept").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    if early:
        if at[1] > 1:
            return f"it went on for {at[1]} steps"
        return f"it saved {found[0]}" if found else ""
    if not found:
        return "nothing was saved"
    step = trained(found[-1])["global_step"]
    if not at[0] <= step <= at[0] + 1:
        return f"struck at step {at[0]}, it saved step {step}"
    code, said = go_on(str(found[-1]))
    if code:
        return f"going on ended with {code}: {said[-200:]!r}"
    whole = expected_plain(peer, devices)
    state = trained(Path("end.ckpt"))
    if not equal(state, whole):
        return f"what was trained differs in {[key for key in whole if not equal(whole[key], state[key])]}"
    return ""


def rank_cases() -> list[str]:
    """One process of two is told, or both are; by torchrun the program that watches them."""
    at = ("batch-start 3", "forward 4", "optimizer-step 2", "batch-end 6", "validation-step 2", "save 2", "train-end 1")
    alone = [f"{one} {SIGNALS[i % 4]} rank {i % 2}" for i, one in enumerate(at)]
    both = [f"{one} {SIGNALS[(i + 1) % 4]} both" for i, one in enumerate(at[:4])]
    return [*alone, *both, "forward 3 SIGTERM torchrun", "forward 6 SIGINT torchrun"]


def _both(path: str | None, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Run two processes as torchrun starts them. Return the larger exit code, and the output of both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none", **(env or {})}
    logs = [Path.cwd() / f"log{rank}" for rank in range(2)]
    for left in [*logs, *Path().glob("*.over")]:
        left.unlink(missing_ok=True)
    ranks = [
        processes.start(_plain, path, 2, False, 2, log=log, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, log in enumerate(logs)
    ]
    ends = [ended(rank, log) for rank, log in zip(ranks, logs, strict=True)]
    codes = {code for code, _ in ends}
    return codes.pop() if len(codes) == 1 else 998, "".join(said for _, said in ends)


def rank_trial(case: str, folder: Path) -> str:
    _, place, turn, name, how = parts(case)
    if how == "torchrun":
        return _torchrun(case, folder)
    env = {"TRUST_STRIKE": f'["{place}", {turn}, "{name}", 1]'}
    env |= {"TRUST_RANK": how.split()[1]} if how != "both" else {}
    code, said = _both(None, env)
    return plainly_judged(case, code, said, _both, False, devices=2)


def _torchrun(case: str, folder: Path) -> str:
    """Run the real torchrun, which starts new Python processes, forwards signals to them and has its own exit code."""
    _, place, turn, name, _ = parts(case)
    script = folder / "program.py"
    script.write_text("from benchmarks.trust_rows.signals import plain\nplain(None, 2, False, 2)\n")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(processes.ROOT)}
    environment |= {"TRUST_STRIKE": f'["{place}", {turn}, "SIGSTOP", 1]', "TRUST_RANK": "0"}
    with open(folder / "log", "wb") as log:
        started = processes.subprocess.Popen(words, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        begin = time.monotonic()
        while struck() is None:  # rank 0 has stopped there
            if time.monotonic() - begin > PATIENCE or started.poll() is not None:
                return f"it was never struck: {(folder / 'log').read_text()[-300:]!r}"
            time.sleep(0.05)
        for pid in _children(started.pid):
            os.kill(pid, signal.SIGCONT)
        started.send_signal(getattr(signal, name))
        started.wait(PATIENCE)
    finally:
        started.poll() is None and os.killpg(started.pid, signal.SIGKILL)
    said = (folder / "log").read_text()
    found = re.findall(r"Interrupted by \w+: the checkpoint is (.+)", said)
    if not found:
        return f"nothing was saved: {said[-300:]!r}"
    step = trained(Path(found[-1]))["global_step"]
    at = struck()
    if at and not at[0] <= step <= at[0] + 2:  # the one that had been stopped begins one more
        return f"struck at step {at[0]}, it saved step {step}"
    code, said = _both(found[-1])
    if code:
        return f"going on ended with {code}: {said[-200:]!r}"
    return "" if equal(trained(Path("end.ckpt")), expected_plain(False, 2)) else "what was trained differs"


def _children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found.append(int(entry.name))
    return found


def lightning_trial(case: str, folder: Path) -> str:
    return plain_trial(case, folder, peer=True)


def transformers_cases() -> list[str]:
    at = ["batch-start 2", "batch-start 7", "forward 4", "forward 6", "forward 11", "optimizer-step 1", "save 1"]
    at += ["optimizer-step 4", "batch-end 1", "batch-end 3", "batch-end 5", "fetch 14", "validation-step 2", "save 2"]
    return [f"{one} {name}" for one in [*at, "train-end 1"] for name in SIGNALS]


def transformers_program(path: str | None = None) -> None:
    """Run the task with Hugging Face's Trainer, which saves on SIGTERM with enable_jit_checkpoint."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from benchmarks.trust_rows.interruptible import _module, strike

    os.setsid()
    torch.set_num_threads(1)

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.blocks = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)) for _ in range(2)
            )
            self.head = torch.nn.Linear(4, 1)

        def forward(self, x: Any = None, labels: Any = None) -> Any:
            strike("forward" if self.training else "validation-step")
            x = x + torch.randn(()) if self.training else x
            for block in self.blocks:
                x = x + block(x)
            return {"loss": (self.head(x) - labels).square().mean(), "logits": self.head(x)}

    class Items(torch.utils.data.Dataset):  # type: ignore[type-arg]
        rows = torch.randn(18, 4, generator=torch.Generator().manual_seed(1))

        def __len__(self) -> int:
            return 18

        def __getitem__(self, index: int) -> dict[str, Any]:
            strike("fetch")
            return {"x": self.rows[index], "labels": torch.zeros(1)}

    class Hooks(TrainerCallback):
        def on_substep_end(self, *_: Any, **__: Any) -> None:
            strike("batch-end")

        on_step_end = on_substep_end

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            strike("batch-start")

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            strike("optimizer-step")

        def on_save(self, *_: Any, **__: Any) -> None:
            strike("save")

        def on_train_end(self, *_: Any, **__: Any) -> None:
            strike("train-end")

    arguments = TrainingArguments(
        output_dir="kept",
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        num_train_epochs=4,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        enable_jit_checkpoint=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(Network(), arguments, train_dataset=Items(), eval_dataset=Items(), callbacks=[Hooks()])
    _module[:] = [_Steps(trainer)]
    trainer.train(resume_from_checkpoint=path)
    torch.save(trainer.model.state_dict(), "end.pt")


class _Steps:
    """What a strike asks of a module and its trainer."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._trainer = self

    @property
    def global_step(self) -> int:
        return int(self.trainer.state.global_step)


@cache
def expected_transformers() -> dict[str, Any]:
    import torch

    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            code, said = ran(transformers_program, None)
            assert code == 0, said[-2000:]
            return dict(torch.load("end.pt", weights_only=True))
        finally:
            os.chdir(before)


def transformers_trial(case: str, folder: Path) -> str:
    import torch

    _, place, turn, name, _ = parts(case)
    code, said = ran(transformers_program, None, env={"TRUST_STRIKE": f'["{place}", {turn}, "{name}", 1]'})
    at = struck()
    if at is None:
        return f"it was never struck, and ended with {code}: {said[-300:]!r}"
    if code == 0 and Path("end.pt").exists():  # it waits 3 s before it saves, and had come to its end by then
        done = equal(dict(torch.load("end.pt", weights_only=True)), expected_transformers())
        return "" if done else "what was trained differs"
    found = sorted(Path("kept").glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    if not found:
        return "nothing was saved"
    step = int(found[-1].name.rpartition("-")[2])
    if not at[0] <= step <= at[0] + 1:
        return f"struck at step {at[0]}, it saved step {step}"
    code, said = ran(transformers_program, str(found[-1]))
    if code:
        return f"going on ended with {code}: {said[-200:]!r}"
    same = equal(dict(torch.load("end.pt", weights_only=True)), expected_transformers())
    return "" if same else "what was trained differs"


SAVES = "within one step, 128 + n, goes on to the same bits, no traceback"
PIECES = (
    Piece(
        4,
        "signals",
        "A signal to the command line at a named instant, from building the parts to after the last line: a checkpoint "
        f"{SAVES}, no row of metrics lost; before the first step it ends at once",
        cases,
        trial,
        in_ci=2,
    ),
    Piece(4, "signals-anywhen", "The same at moments that a clock chooses", anywhen_cases, anywhen_trial, in_ci=0),
    Piece(
        4,
        "signals-plain",
        f"A signal to Trainer.fit with SignalCheckpoint: a checkpoint {SAVES}",
        plain_cases,
        plain_trial,
    ),
    Piece(
        4,
        "signals-ranks",
        f"One of two processes is told, or both are, or torchrun: a checkpoint {SAVES}",
        rank_cases,
        rank_trial,
    ),
    Piece(
        4,
        "signals-lightning",
        "As signals-plain, with ModelCheckpoint(save_on_exception=True), going on from the newest checkpoint; with "
        "whatever code and traceback it ends",
        peer_cases,
        lightning_trial,
        subject="Lightning",
        in_ci=0,
    ),
    Piece(
        4,
        "signals-transformers",
        "The same with Hugging Face's Trainer and enable_jit_checkpoint, ending in its time or "
        "going on from the newest checkpoint; the "
        "weights alone are compared, and it may end with whatever code and traceback",
        transformers_cases,
        transformers_trial,
        subject="Transformers",
        in_ci=0,
    ),
)
