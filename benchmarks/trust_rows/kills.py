"""Row 1: SIGKILL at any instant while files are written, in a fit that saves each step and in commands that write.

A process is killed before a call that changes a folder, between two such calls, or at a time spread over the whole run.
The calls are counted and timed in an undisturbed run, which also gives the expected result.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.trust_rows import Piece
from tests import processes
from tests.callbacks.resume_kit import equal

_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.truncate"}
_SHM = Path("/dev/shm")
_UPLOADED = re.compile(r"\.ckpt\.[0-9a-f]{8}(?=/)")
_NUMBERED = re.compile(r"(environment|config)_\d+(\.\w+)$")  # what a resumed run keeps of the run before


@dataclass(frozen=True)
class Whole:
    """Record of a run that was not killed."""

    changes: list[tuple[float, str]]  # when, and what, of the calls that change its folder
    seconds: float
    result: Any
    files: set[str]

    def first(self, pattern: str, times: int = 1) -> int:
        """Return the number of the change after so many of a kind."""
        return [n for n, (_, what) in enumerate(self.changes) if re.search(pattern, what)][times - 1] + 1


def _watch(folder: str, journal: str, at: int, delay: float) -> None:
    """Record all changes of a folder with their times. Kill this process before change number ``at``."""
    begun = time.monotonic()
    count = 0
    here = os.path.realpath(folder)
    note = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def die(after: float) -> None:
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGKILL)

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not writes and event not in _CHANGES:
            return
        path = arguments[1] if event in ("os.symlink", "os.rename") else arguments[0]
        if isinstance(path, int) or not os.path.abspath(os.fsdecode(path)).startswith(here + os.sep):
            return
        if count == at:
            if delay:
                threading.Thread(target=die, args=[delay], daemon=True).start()
            else:
                die(0)
        count += 1
        os.write(note, f"{time.monotonic() - begun} {event} {os.fsdecode(path)}\n".encode())

    sys.addaudithook(see)


def _work(job: Callable[..., None], arguments: tuple[Any, ...], journal: str, at: int, delay: float) -> None:
    import torch

    torch.set_num_threads(1)
    _watch(os.getcwd(), journal, at, delay)
    job(*arguments)


@dataclass(frozen=True)
class Killed:
    """One job to kill, in its own folder, and the job that runs after it.

    Args:
        prepare: Function that creates the inputs of the job in the folder.
        job: Function that runs in the folder, in a separate process.
        again: Function that runs there after the kill.
        result: Function that returns the final content of the folder, for comparison.
        since: Pattern of changes that must precede a kill.
        times: Number of such changes that must precede it.
        same: Function that compares two results.
    """

    prepare: Callable[[Path], None]
    job: Callable[[], None]
    again: Callable[[], None]
    result: Callable[[Path], Any]
    since: str = ""
    shm: bool = False
    intact: Callable[[Path, Any], str] = lambda folder, result: ""
    times: int = 1

    @contextlib.contextmanager
    def place(self) -> Iterator[Path]:
        where = _SHM if self.shm and os.access(_SHM, os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=where, ignore_cleanup_errors=True) as name:
            folder = Path(os.path.realpath(name), "here")
            folder.mkdir()
            self.prepare(folder)
            yield folder

    def start(self, folder: Path, job: Callable[[], None], at: int = -1, delay: float = 0.0) -> Any:
        """Start ``job`` in a process. Its output and changes are recorded next to the folder."""
        before = Path.cwd()
        os.chdir(folder)
        try:
            arguments = job, (), str(folder.with_name("changes")), at, delay
            return processes.start(_work, *arguments, log=folder.with_name("log"), env={"TZ": "UTC"})
        finally:
            os.chdir(before)

    def whole(self) -> Whole:
        with self.place() as folder:
            begin = time.monotonic()
            process = self.start(folder, self.job)
            process.join()
            seconds = time.monotonic() - begin
            assert process.exitcode == 0, folder.with_name("log").read_text()[-3000:]
            lines = folder.with_name("changes").read_text().splitlines()
            changes = [(float(line.partition(" ")[0]), line.partition(" ")[2]) for line in lines]
            return Whole(changes, seconds, self.result(folder), files(folder))

    def trial(self, whole: Whole, kind: str, share: float) -> str:
        """Kill the job at a share of its run, run it again, and compare the results."""
        first = whole.first(self.since, self.times) if self.since else 0
        with self.place() as folder:
            if kind == "time":
                begin = whole.changes[first - 1][0] if first else 0.0
                self._kill_late(folder, first, share * (whole.seconds - begin))
            else:
                number = first + int(share * (len(whole.changes) - first))
                times = [when for when, _ in whole.changes] + [whole.seconds]
                delay = random.Random(share).random() * (times[number + 1] - times[number]) if kind == "within" else 0.0
                process = self.start(folder, self.job, number, max(delay, 1e-6 if kind == "within" else 0.0))
                process.join()
                assert process.exitcode in (-signal.SIGKILL, 0), folder.with_name("log").read_text()[-3000:]
            said = self.intact(folder, whole.result)
            if said:
                return said
            log = folder.with_name("log")
            log.unlink(missing_ok=True)  # killed before it has one
            process = self.start(folder, self.again)
            process.join()
            # A fit that is killed after its last checkpoint has ended: what lies there is compared all the same.
            if process.exitcode and "nothing is left to do" not in _last_line(log):
                return f"it does not go on: {_last_line(log)}"
            try:
                found = self.result(folder)
            except Exception as error:
                return f"its result cannot be read: {error!r}"[:300]
            if different(found, whole.result):
                return f"it ends with another result: {', '.join(different(found, whole.result))}"[:300]
            now = files(folder)
            if now != whole.files:
                words = [f"{name} stays" for name in sorted(now - whole.files)]
                return ", ".join([*words, *(f"{name} is missing" for name in sorted(whole.files - now))])[:300]
            return ""

    def _kill_late(self, folder: Path, first: int, seconds: float) -> None:
        """Kill the job from outside, a delay after its ``first`` change."""
        process = self.start(folder, self.job)
        journal = folder.with_name("changes")
        while first and process.is_alive() and (not journal.exists() or journal.read_bytes().count(b"\n") < first):
            time.sleep(0.001)
        process.join(seconds)
        process.kill()
        process.join()


class Ranks:
    """Group of processes, one of which is killed. The others are then terminated, as by torchrun.

    Args:
        victim: Rank of the process to kill.
        log: File for the output of all processes.
    """

    def __init__(self, victim: int, log: Path, ranks: list[Any], logs: list[Path]) -> None:
        self.victim = ranks[victim]
        self.log = log
        self._ranks = ranks
        self._logs = logs
        self.exitcode: int | None = None

    def is_alive(self) -> bool:
        return bool(self.victim.is_alive())

    def kill(self) -> None:
        self.victim.kill()

    def join(self, timeout: float | None = None) -> None:
        self.victim.join(timeout)
        if self.victim.is_alive():
            return
        for rank in self._ranks:
            if self.victim.exitcode:
                rank.kill()
            rank.join()
        codes = [rank.exitcode for rank in self._ranks]
        self.exitcode = self.victim.exitcode or max(codes, key=abs)
        self.log.write_text("".join(log.read_text("utf-8", "replace") for log in self._logs))


def _rank(victim: int, folder: str, *arguments: Any) -> None:
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    rank_zero_only.rank = int(os.environ["RANK"])  # as it is where Lightning is imported by a process of torchrun
    os.chdir(folder)
    job, given, journal, at, delay = arguments
    if rank_zero_only.rank == victim:
        _work(job, given, journal, at, delay)
    else:
        job(*given)


@dataclass(frozen=True)
class KilledRank(Killed):
    """Job of two processes, one of which is killed."""

    victim: int = 0

    def start(self, folder: Path, job: Callable[[], None], at: int = -1, delay: float = 0.0) -> Any:
        arguments = job, (), str(folder.with_name("changes")), at, delay
        ranks = processes.start_ranks(_rank, folder.parent, self.victim, str(folder), *arguments)
        return Ranks(self.victim, folder.with_name("log"), *ranks)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    wrong = [line for line in lines if line.startswith("error: ") or re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (wrong or lines or ["nothing is said"])[-1][:250]


def files(folder: Path) -> set[str]:
    """Return the paths of all files in a folder. A run's folder has the name RUN, that of remote shards FOLDER."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    names = {name + "/" * (path.is_dir() and not path.is_symlink()) for name, path in found.items()}
    names = {_UPLOADED.sub(".ckpt.FOLDER", name) for name in names}
    run = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(?=/)")
    matches = [run.search(name) for name in names]
    runs = {match[0] for match in matches if match}
    named = {name.replace(min(runs), "RUN") for name in names} if runs else names
    return {name for name in named if not _NUMBERED.search(name) and "/__pycache__" not in name}


def content(path: Path, pattern: str = "*") -> dict[str, bytes]:
    """Return the contents of the files below a folder."""
    found = sorted(path.rglob(pattern))
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in found if file.is_file()}


def different(a: Any, b: Any, name: str = "") -> list[str]:
    """Return the places where two results differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [x for k in {**a, **b} for x in different(a.get(k), b.get(k), f"{name}/{k}")]
    return [] if type(a) is type(b) and equal(a, b) else [name]


def instants(counts: dict[str, int]) -> list[str]:
    """Return the names of cases: a number of each kind, spread evenly."""
    return [f"{kind}-{number:03d}of{count:03d}" for kind, count in counts.items() for number in range(count)]


def share_of(case: str) -> tuple[str, float]:
    """Return the kind of an instant and its share of the whole run, from its name."""
    kind, number, count = re.fullmatch(r"(?:.*-)?([a-z]+)-(\d+)of(\d+)", case).groups()  # type: ignore[union-attr]
    return kind, (int(number) + random.Random(case).random()) / int(count)


def piece(
    name: str,
    sentence: str,
    made: dict[str, Callable[[], Killed]],
    counts: dict[str, int],
    subject: str = "lit_efficient",
    in_ci: int = 1,
) -> Piece:
    """Return a piece with a number of instants for each job."""

    @cache
    def whole(job: str) -> tuple[Killed, Whole]:
        killed = made[job]()
        return killed, killed.whole()

    def trial(case: str, folder: Path) -> str:
        job = case.rsplit("-", 2)[0]
        killed, reference = whole(job)
        return killed.trial(reference, *share_of(case))

    cases = [f"{job}-{instant}" for job in made for instant in instants(counts)]
    return Piece(1, name, sentence, lambda: cases, trial, subject, in_ci)


# A fit of the command line.

RUN = {
    "model": {"class_path": "tests.callbacks.resume_kit.Tiny"},
    "trainer": {
        "accelerator": "cpu",
        "max_epochs": 2,
        "accumulate_grad_batches": 2,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "default_root_dir": "runs/base",
        "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "."}},
    },
}


def _command(*words: str) -> None:
    from lit_efficient.__main__ import main

    sys.exit(main([*words]))


_FIT = ("fit", "--allow-import", "tests", "-c", "base.yaml")


def _config(saver: dict[str, Any], extra: Sequence[Any], trainer: dict[str, Any], folder: Path) -> None:
    callbacks = [{"class_path": "ExactResume"}, {"class_path": "ModelCheckpoint", "init_args": saver}, *extra]
    config = {**RUN, "trainer": {**RUN["trainer"], "callbacks": callbacks, **trainer}}
    (folder / "base.yaml").write_text(yaml.safe_dump(config))


def last_of(folder: Path) -> dict[str, Any]:
    """Return the content of the last checkpoint, without paths."""
    from lit_efficient.distributed.shards import read_checkpoint

    return kept_of(read_checkpoint(folder / "runs/base/latest/last.ckpt", optimizers=True))


def kept_of(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint, without paths."""
    states = {key: state for key, state in saved["callbacks"].items() if not key.startswith("ModelCheckpoint")}
    kept = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "loops")
    return {"callbacks": states, **{name: saved[name] for name in kept}}


def _fit(saver: dict[str, Any], shm: bool = False, extra: Sequence[Any] = (), **trainer: Any) -> Killed:
    return Killed(
        partial(_config, saver, extra or [{"class_path": "EMA"}], trainer),
        partial(_command, *_FIT),
        partial(_command, *_FIT, "--ckpt_path", "last"),
        last_of,
        since=r"os\.rename .*\.ckpt$",
        shm=shm,
    )


_ASYNC = [{"class_path": "EMA"}, {"class_path": "AsyncCheckpoint"}]
_EACH = {"every_n_train_steps": 1}


def _async(fit: Killed, since: str = r"os\.remove .*step=\d+\.ckpt$") -> Killed:
    """Kill later: the changes of two threads have another order in each run, and one checkpoint must be whole."""
    return replace(fit, since=since)


_BEST = {"monitor": "val/loss", "save_top_k": 2, "save_last": True}
FITS = {
    "copy-disk": partial(_fit, {**_EACH, "save_last": True}),
    "link-disk": partial(_fit, {**_EACH, "save_last": "link"}),
    "copy-memory": partial(_fit, {**_EACH, "save_last": True}, shm=True),
    "link-memory": partial(_fit, {**_EACH, "save_last": "link"}, shm=True),
    "best-disk": partial(_fit, _BEST, val_check_interval=2),
    "async-disk": lambda: _async(_fit({**_EACH, "save_last": True}, extra=_ASYNC)),
}


_SECOND = r"os\.rename .*epoch=1-step=\d+\.ckpt$"  # of the second epoch
_SHARDS = {"class_path": "ShardedStrategy", "init_args": {"blocks": ["net.0"], "timeout": "00:01:00"}}


def _sharded(last: Any = True, shm: bool = False, victim: int | None = None, extra: Sequence[Any] = ()) -> Killed:
    """A fit whose checkpoints are folders, of one process or of two, of which the ``victim`` is killed."""
    fit = _fit({**_EACH, "save_last": last}, shm, extra, strategy=_SHARDS, devices=1 if victim is None else 2)
    if victim is None:
        return fit
    own = {field.name: getattr(fit, field.name) for field in fields(fit)}
    if victim:  # it writes pieces alone: by its second the first checkpoint is whole
        own["since"] = r"step=2\.ckpt\..*\.distcp$"
    return KilledRank(**own, victim=victim)


# Averages of which each step leaves snapshots; a strategy that writes folders.


def _with_snapshots(folder: Path) -> Any:
    return {**last_of(folder), "snapshots": content(folder / "runs/base/latest/snapshots")}


def _readable(folder: Path, result: Any) -> str:
    """Return whether each existing snapshot is complete."""
    from lit_efficient.errors import LitEfficientError
    from lit_efficient.files.tensors import load_tensors

    for path in sorted((folder / "runs/base/latest/snapshots").glob("average-*")):
        try:
            load_tensors(path)
        except LitEfficientError as error:
            return str(error)
    return ""


def _snapshots(shm: bool) -> Killed:
    power = {"class_path": "PowerEMA", "init_args": {"snapshot_every_n_steps": 1}}
    fit = _fit({**_EACH, "save_last": True}, shm, [power])
    return replace(fit, result=_with_snapshots, intact=_readable)


# The commands that write, and what makes caches.


@cache
def _made(what: str) -> dict[str, bytes]:
    """Return checkpoints to work on. They are created once."""
    with tempfile.TemporaryDirectory() as folder:
        before = Path.cwd()
        os.chdir(folder)
        try:
            code = processes.run(_make, what, log=Path(folder).with_suffix(".log"))
            assert code == 0, Path(folder).with_suffix(".log").read_text()[-3000:]
        finally:
            os.chdir(before)
            Path(folder).with_suffix(".log").unlink()
        return content(Path(folder))


def _make(what: str) -> None:
    import lightning.pytorch as pl

    from lit_efficient import LoRA
    from tests.callbacks.resume_kit import SaveEveryBatch, Tiny, fit
    from tests.export.test_adapters import Language

    if what == "selection":
        from benchmarks.trust_rows.damage_kinds import make_selection

        make_selection()
        shutil.rmtree("chosen")
        return
    if what == "tiny":
        fit(Tiny(), [SaveEveryBatch(".")], max_epochs=1)
        return
    network = _llama()
    network.save_pretrained("base")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(callbacks=[LoRA(rank=2)], accelerator="cpu", max_epochs=1, **quiet)
    trainer.fit(Language(network))
    trainer.save_checkpoint("lora.ckpt", weights_only=True)


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, **sizes))


def _put(what: str, more: dict[str, bytes], folder: Path) -> None:
    for name, data in {**_made(what), **more}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def _unless_there(folder: str, *words: str) -> None:
    if not os.path.exists(folder):
        _command(*words)


def _either(name: str, before: Any, folder: Path, result: Any) -> str:
    """Return an error unless the file is the old one or the complete new one."""
    path = folder / name
    found: Any = None
    if path.is_dir():
        found = content(path)
    elif path.exists():
        found = path.read_bytes()
    return "" if found in (before, result) else f"{name} is neither what it was nor what it becomes"


def _export(what: str, source: str, *words: str) -> Killed:
    words = ("export", source, "--output", "out", "--no_check", *words)
    return Killed(
        partial(_put, what, {}),
        partial(_command, *words),
        partial(_unless_there, "out", *words),
        lambda folder: content(folder / "out"),
        intact=partial(_either, "out", None),
    )


def _average(output: str) -> Killed:
    job = partial(_command, "average", "005.ckpt", "006.ckpt", "007.ckpt", "--output", output)
    before = b"what was there"
    return Killed(
        partial(_put, "tiny", {output: before}),
        job,
        job,
        lambda folder: (folder / output).read_bytes(),
        intact=partial(_either, output, before),
    )


def _selection() -> Killed:
    from benchmarks.trust_rows.damage_kinds import SELECT

    def result(folder: Path) -> dict[str, bytes]:
        found = content(folder / "chosen")
        return {name: found[name] for name in found.keys() - {"data.yaml", "SHA256SUMS"}}  # they depend on the path

    job = partial(_command, *SELECT.split(), "--batch_size", "3")
    return Killed(partial(_put, "selection", {}), job, job, result)


def _latents(overwrite: bool) -> Killed:
    images = {"class_path": "tests.data.images.toy_images.ToyImages", "init_args": {"captions": True, "variants": 2}}
    autoencoder = {"image_channels": 1, "latent_channels": 4, "width": 8}
    data = {"images": images, "autoencoder": autoencoder, "folder": "cache"}
    config = yaml.safe_dump(
        {
            "model": {"class_path": "tests.callbacks.resume_kit.Tiny"},  # which the command needs and does not build
            "data": {"class_path": "LatentData", "init_args": data},
        }
    )
    words = ["cache-latents", "--allow-import", "tests", "-c", "config.yaml", "--shard_rows", "9", "--batch_size", "4"]
    job = partial(_command, *words, *(["--overwrite"] if overwrite else []))

    def prepare(folder: Path) -> None:
        (folder / "config.yaml").write_text(config)
        for name, old in previous().items():
            (folder / "cache" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "cache" / name).write_bytes(old)

    @cache
    def previous() -> dict[str, bytes]:
        if not overwrite:
            return {}
        other = replace(_latents(False), job=partial(_command, *words, "--data.init_args.dtype", "float16"))
        return dict(other.whole().result)

    def intact(folder: Path, result: Any) -> str:
        there = content(folder / "cache")
        there.pop("journal.jsonl", None)  # it goes last
        return "" if there in ({}, previous(), result) else "the cache is neither what it was nor what it becomes"

    return Killed(prepare, job, job, lambda folder: content(folder / "cache"), intact=intact)


def _seal() -> None:
    import torch

    from lit_efficient.files.sealed_folder import make_once, open_checked

    numbers = {name: torch.arange(100_000.0) + shift for shift, name in enumerate("abc")}
    make_once(Path("cache"), "key", lambda: ({f"{n}.safetensors": {n: t} for n, t in numbers.items()}, {"of": "us"}))
    open_checked(Path("cache"), "key")


def _sealed() -> Killed:
    return Killed(
        lambda folder: None,
        _seal,
        _seal,
        lambda folder: content(folder / "cache"),
        intact=partial(_either, "cache", None),
    )


# Peers: the same network, data and instants, their own checkpoints and defaults.


def _lightning(save_last: Any, again: bool) -> None:
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tests.callbacks.resume_kit import Tiny, final_state

    pl.seed_everything(0, workers=True)
    saver = ModelCheckpoint("saved", every_n_train_steps=1, save_last=save_last)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    limits = {"max_epochs": 2, "accumulate_grad_batches": 2, "num_sanity_val_steps": 0}
    trainer = pl.Trainer(accelerator="cpu", callbacks=[saver], deterministic=True, **limits, **quiet)
    trainer.fit(Tiny(), ckpt_path="last" if again else None)
    torch.save(final_state(trainer), "final.pt")


def _transformers(again: bool) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    from tests.callbacks.resume_kit import Augmented, Tiny

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Tiny().net

        def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
            return {"loss": (self.net(x) - torch.randn(())).pow(2).mean()}

    arguments = TrainingArguments(
        "saved", save_strategy="steps", save_steps=1, per_device_train_batch_size=3, gradient_accumulation_steps=2,
        num_train_epochs=2, report_to="none", use_cpu=True, disable_tqdm=True, seed=0, remove_unused_columns=False,
    )  # fmt: skip
    trainer = Trainer(
        Network(), arguments, train_dataset=Augmented(), data_collator=lambda rows: {"x": torch.stack(rows)}
    )
    trainer.train(resume_from_checkpoint=True if again else None)
    states = [trainer.optimizer.state_dict(), trainer.lr_scheduler.state_dict()]
    torch.save([trainer.model.state_dict(), *states, trainer.state.global_step], "final.pt")


def _final(folder: Path) -> Any:
    import torch

    return dict(enumerate(torch.load(folder / "final.pt", weights_only=False)))


def _peer(job: Callable[..., None], since: str, shm: bool = False) -> Killed:
    return Killed(lambda folder: None, partial(job, False), partial(job, True), _final, since=since, shm=shm)


_STOCK = {
    f"{how}-{where}": partial(_peer, partial(_lightning, last), r"saved/last\.ckpt$", where == "memory")
    for how, last in (("copy", True), ("link", "link"))
    for where in ("disk", "memory")
}
_TRAINER = {
    where: partial(_peer, _transformers, r"saved/checkpoint-1/trainer_state\.json$", where == "memory")
    for where in ("disk", "memory")
}
_PEERS = {"before": 16, "within": 12, "time": 8}

PIECES = (
    piece(
        "kill-fit",
        "A fit that saves each step is killed (SIGKILL) after its first save: `--ckpt_path last` goes on, ends "
        "bit-identical to a run that nobody killed, and leaves no other files",
        FITS,
        {"before": 26, "within": 20, "time": 14},
        in_ci=2,
    ),
    piece(
        "kill-snapshots",
        "A fit that writes snapshots of averages each step is killed: those that lie there are whole; the run goes on, "
        "ends bit-identical, with the same snapshots to the byte, and leaves no other files",
        {"disk": partial(_snapshots, False), "memory": partial(_snapshots, True)},
        {"before": 8, "within": 6, "time": 4},
    ),
    piece(
        "kill-shards",
        "The same of a fit whose checkpoints are folders of shards, in one process and in two of which one is killed",
        {
            "copy-disk": _sharded,
            "link-memory": partial(_sharded, "link", True),
            "first-memory": partial(_sharded, shm=True, victim=0),
            "second-memory": partial(_sharded, "link", shm=True, victim=1),
            "async-disk": lambda: _async(_sharded(extra=_ASYNC), _SECOND),
            "async-first-memory": lambda: _async(_sharded(shm=True, victim=0, extra=_ASYNC), _SECOND),
        },
        {"before": 5, "within": 4, "time": 3},
        in_ci=0,
    ),
    piece(
        "kill-export",
        "An export is killed: there is nothing or the whole folder, the next one has the same bytes and no hidden "
        "folder stays",
        {
            "safetensors": partial(_export, "tiny", "007.ckpt"),
            "peft": partial(_export, "lora", "lora.ckpt", "--format", "peft"),
            "merged": partial(_export, "lora", "lora.ckpt", "--format", "merged", "--base", "base"),
        },
        {"before": 6, "within": 5, "time": 3},
    ),
    piece(
        "kill-average",
        "An average over a file is killed: the file is what it was or the whole new one, the next one has the same "
        "bytes and leaves no other files",
        {"checkpoint": partial(_average, "mean.ckpt"), "safetensors": partial(_average, "mean.safetensors")},
        {"before": 4, "within": 5, "time": 4},
    ),
    piece(
        "kill-cache",
        "What makes a cache (latents, in place of others, sealed folders) is killed: there is the old one, the whole "
        "new one or none, the next run makes the same bytes and leaves no other files",
        {"latents": partial(_latents, False), "overwritten": partial(_latents, True), "sealed": _sealed},
        {"before": 10, "within": 6, "time": 4},
    ),
    piece(
        "kill-select-data",
        "A selection of rows is killed: the next one continues, has the same scores and rows to the byte and leaves no "
        "other files",
        {"rho": _selection},
        {"before": 14, "within": 10, "time": 8},
    ),
    piece(
        "kill-fit-lightning",
        'The same fit with Lightning\'s own checkpoints, each step, resumed with `ckpt_path="last"`',
        _STOCK,
        _PEERS,
        "Lightning",
        in_ci=0,
    ),
    piece(
        "kill-fit-transformers",
        "The same network and data under the Trainer of transformers with `save_steps=1`, resumed with "
        "`resume_from_checkpoint=True`",
        _TRAINER,
        _PEERS,
        "Transformers",
        in_ci=0,
    ),
)
