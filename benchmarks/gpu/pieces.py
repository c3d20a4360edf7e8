"""The pieces that the driver runs, most valuable first, each with the expected figures and their source."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.gpu.cases import CASES, QUICK, Case
from benchmarks.gpu.fingerprint import definition, fingerprint, names_in
from benchmarks.ladder_gpu import RUNGS, Rung
from lit_efficient.catalog import overlay_of
from lit_efficient.files.configs import known

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Group:
    """Chapter of the report.

    Args:
        title: Heading.
        about: Description of the table.
        at_once: Number of pieces that may run at the same time.
    """

    title: str
    about: str
    at_once: int = 1


GROUPS = {
    "smoke": Group(
        "Smoke test",
        "Six steps each on a small network. Waits are CUDA's own warnings of a synchronisation, a step, by the place "
        "that asked: at most one is meant to be left in an optimizer step.",
        at_once=14,
    ),
    "tests": Group("Tests marked gpu", "Each test function in a process of its own.", at_once=14),
    "ladder": Group(
        "Ladder",
        "One network in the shape of Llama-3.2-3B, one technique more a rung, until it does not fit. Rungs run one "
        "after the other in one process, three steps each after warm-up.",
    ),
    "benchmarks": Group("Benchmarks", "Ours beside a peer on the same device in the same run: read the ratios."),
    "paging": Group("Paging", "Last and alone: managed memory can hang a device."),
    "not run": Group("Not run", "What no machine with one GPU can show."),
}


@dataclass(frozen=True)
class Piece:
    """One process, one row.

    Args:
        name: Name of the row.
        group: A key of `GROUPS`.
        words: Arguments of ``python``.
        limit: Time limit in seconds.
        needs: Packages without which the piece is skipped.
        skip: Reason why the piece never runs. Empty if it runs.
        keep: Number of characters of the output to keep in the row.
        expected: Expected figures and their source.
        usual: Seconds that it usually takes. With less time left it is not begun. A measured time takes precedence.
        shares: Whether it runs in one process with the others of its group: the last word is its name there.
        fingerprint: Hash of the code that it runs, by which a later run of the driver knows whether it has changed.
    """

    name: str
    group: str
    words: list[str]
    limit: float = 90
    needs: tuple[str, ...] = ()
    skip: str = ""
    keep: int = 0
    expected: str = ""
    usual: float = 0
    shares: bool = False
    fingerprint: str = ""

    @property
    def command(self) -> str:
        return " ".join(f"'{word}'" if " " in word else word for word in ["python", *self.words])


# Name, arguments, most seconds, packages, and the numbers that are expected.
BENCHMARKS: list[tuple[str, str, float, tuple[str, ...], str]] = [
    (
        "cross_entropy",
        "--tokens 8192 --width 4096 --vocabularies 128256 --chunks 256 4096 --dtype bfloat16 --rounds 2",
        150,
        (),
        "memory at most 0.2 of F.cross_entropy (the promise for a CPU). Time by counting 12 V H bytes a chunk and "
        "6 N V H operations: dense 40 ms, chunks of 256 91 ms, of 4,096 47 ms",
    ),
    (
        "ema",
        "--parameters 5e8 --layers 48 --rounds 9",
        60,
        (),
        "at most 1.3 of the copy (the promise; 1.2 on a CPU): the copy moves 8 bytes a parameter, the update 12",
    ),
    ("ema", "--parameters 5e8 --layers 48 --rounds 9 --dtype bfloat16", 60, (), "1.2 to 1.5: one cast more"),
    (
        "low_bit_optimizer",
        "--width 8192 --layers 4",
        90,
        (),
        "8-bit AdamW 2.03 bytes a parameter, 16 bytes moved instead of 28: 0.6 of the time of fused AdamW or more; "
        "OffloadOptimizer 16 bytes a parameter over the bus: 0.3 s a billion at 50 GB/s",
    ),
    (
        "activation_checkpointing",
        "--layers 16 --width 2048 --batch 4 --length 2048 --steps 4",
        90,
        ("transformers",),
        "kept about 0.07, time about 1.33 (a forward more); equal to transformers' own and torch's; saving attention "
        "must cost less than 1.33 of the time, unlike on a CPU (1.87)",
    ),
    ("dora", "", 60, ("peft",), "0.38 to 0.83 of peft's time on a CPU; below 1 wherever the layer is wide"),
    (
        "stochastic_depth",
        "--blocks 12 --width 1024 --batch 64",
        60,
        (),
        "blocks 0.73, rows 0.71 of the plain step, as on a CPU, where the GPU is busy; DropPath 1.00",
    ),
    (
        "overhead",
        "--rounds 2 --steps 200",
        150,
        ("jsonargparse", "tokenizers"),
        "no figure: 0.95 is the promise for a CPU, and here Python's time is what both wait for",
    ),
    ("exact_resume", "--settings 2", 120, (), "all points with ExactResume, 0 without, as on a CPU"),
    (
        "plan_accuracy",
        "--minutes 8",
        570,
        ("transformers", "diffusers", "peft", "bitsandbytes", "torchao", "sklearn"),
        "as on a CPU: median 1.5 %, worst 8 %, none under by more than 3 %; what kernels take for themselves is not "
        "traced, and weighs most in these small networks",
    ),
    (
        "diffusion_quality",
        "--seeds 1",
        200,
        ("sklearn",),
        "within two spreads of the CPU's table (raw: flow 1.25 ± 0.11, v 1.02 ± 0.14, x0 0.51 ± 0.02)",
    ),
]
NO_DEVICE = ("packing", "startup")
PYTEST = ["-m", "pytest", "-q", "-n", "0", "-W", "default", "--disable-warnings", "--tb=short", "-m", "gpu"]
SUITE = ("pytest", "xdist", "pytest_timeout", "jsonargparse", "transformers")  # pyproject gives pytest their options


def pieces(device: str, *, quick: bool = False) -> list[Piece]:
    """Return all pieces. With ``quick``, return three cases of the smoke test."""
    smoke = _smoke(device, quick)
    if quick:
        return smoke
    reasons = {f"benchmarks/{name}": "no part of it runs on a device" for name in NO_DEVICE}
    reasons["nccl on several GPUs"] = "untested: this is for one device, and DDP and FSDP2 over nccl have run on none"
    tests = _tests(device)
    return [
        *smoke,
        *(test for test in tests if test.group == "tests"),
        *_ladder(device),
        *_benchmarks(device),
        *(test for test in tests if test.group == "paging"),
        *(Piece(name, "not run", [], skip=why) for name, why in reasons.items()),
    ]


def _smoke(device: str, quick: bool) -> list[Piece]:
    return [
        Piece(
            f"smoke/{name}",
            "smoke",
            ["-m", "benchmarks.gpu.smoke", name, "--device", device, *(["--precision", "32-true"] if quick else [])],
            75,
            case.needs,
            case.cuda_only if device == "cpu" else "",
            usual=30,
            fingerprint=_of_case(case),
        )
        for name, case in CASES.items()
        if not quick or name in QUICK
    ]


def _of_case(case: Case) -> str:
    makers = [case.callbacks, case.optimizer]
    names = {name for maker in makers for name in names_in(maker)}
    settings: list[object] = [replace(case, callbacks=list, optimizer=None)]
    if isinstance(case.callbacks, partial):  # the arguments of an overlay
        (card,) = case.callbacks.args
        names.add(card.name)
        settings.append(known()[overlay_of(card)].read_text("utf-8"))
    settings += [definition(maker) for maker in makers]
    return fingerprint(settings, "benchmarks/gpu/smoke.py", names=names)


def _tests(device: str) -> list[Piece]:
    """Return a piece for each test function with the mark ``gpu``. Tests of paged memory come last."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text("utf-8")
        if "mark.gpu" not in text:
            continue
        file = path.relative_to(ROOT).as_posix()
        whole = "pytestmark = pytest.mark.gpu" in text
        tree = ast.parse(text)
        needs = dict.fromkeys([*SUITE, *_imported(tree)])
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            if whole or any(ast.unparse(mark) == "pytest.mark.gpu" for mark in node.decorator_list):
                group = "paging" if "paged" in node.name else "tests"
                words = [*PYTEST, f"{file}::{node.name}"]
                skip = "" if device == "cuda" else "needs a CUDA device"
                found.append(
                    Piece(
                        f"{file}::{node.name}",
                        group,
                        words,
                        180,
                        tuple(needs),
                        skip,
                        keep=300,
                        usual=40,
                        fingerprint=fingerprint(words, file),
                    )
                )
    return found


def _imported(tree: ast.Module) -> list[str]:
    """Return the packages of other authors that a file imports at its top."""
    names = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    roots = {name.partition(".")[0] for name in names} - {"tests", "lit_efficient", "torch", "lightning"}
    return sorted(roots - sys.stdlib_module_names)


def _benchmarks(device: str) -> list[Piece]:
    return [
        Piece(" ".join([f"benchmarks/{name}", *words.split()]), "benchmarks",
              ["-m", f"benchmarks.{name}", *words.split(), "--device", device],
              limit, needs, keep=3500, expected=expected, usual=limit / 2,
              fingerprint=fingerprint(words.split(), f"benchmarks/{name}.py"))
        for name, words, limit, needs, expected in BENCHMARKS
    ]  # fmt: skip


def _ladder(device: str) -> list[Piece]:
    skip = "" if device == "cuda" else "needs a CUDA device"
    return [
        Piece(f"ladder/{name}", "ladder", ["-m", "benchmarks.ladder_gpu", name], 240, rung.needs, skip, keep=300,
              expected=rung.expected, usual=rung.usual, shares=True, fingerprint=_of_rung(rung))
        for name, rung in RUNGS.items()
    ]  # fmt: skip


def _of_rung(rung: Rung) -> str:
    settings = [replace(rung, techniques=list, expected="", usual=0), definition(rung.techniques)]
    return fingerprint(settings, "benchmarks/ladder_gpu.py", names={*names_in(rung.techniques), "GPT"})
