"""Mutation testing: put one small fault at a time into the package, and run the tests of the changed file.

    python -m benchmarks.mutations                        try all faults, and print those that survive with their lines
    python -m benchmarks.mutations callbacks/ema.py       try the faults whose names start with this prefix
    python -m benchmarks.mutations --list                 list the faults

A fault survives if no test fails. A fault is a flipped sign or comparison, a negated condition, an exchanged ``and``,
``min`` or factor, a dropped call, or a changed constant. Its name is ``file:function:kind:number``, where the number
counts the faults of one kind in the function. Faults are put into a copy of the repository. The tests run in processes
forked from one that has imported the large libraries but not this package.

The tests of a file first run once with a tracing call before each statement. A fault is then tried with the tests that
reach its line, the fastest first. If none of them fails, the other tests of the file run too, because statements in
child processes (ranks, commands) are not traced.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGE = "lit_efficient"
REACH = ROOT / "runs" / "trust" / "reach"
MOST_TESTS = 120  # of those that reach a line
HEAVY = (
    "torch",
    "lightning.pytorch",
    "torchmetrics",
    "transformers",
    "torch._dynamo",
    "jsonargparse",
    "yaml",
    "pytest",
)
# The tests of each file, and how many of its faults are tried.
TESTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "surgery.py": (8, ("test_surgery.py",)),
    "errors.py": (5, ("test_errors.py",)),
    "files/atomic_file.py": (6, ("files/test_atomic_file.py",)),
    "files/checkpoints.py": (
        8,
        (
            "files/test_checkpoints.py",
            "plugins/test_safe_checkpoint_io.py",
            "commands/test_average.py",
            "callbacks/test_async_checkpoint.py",
        ),
    ),
    "files/cache.py": (4, ("files/test_cache.py", "data/test_python_corpus.py", "data/test_latent_cache.py")),
    "files/tensors.py": (4, ("files/test_tensors.py", "callbacks/test_power_ema.py")),
    "files/sums.py": (3, ("files/test_sums.py",)),
    "plugins/safe_checkpoint_io.py": (5, ("plugins/test_safe_checkpoint_io.py", "callbacks/test_async_checkpoint.py")),
    "callbacks/ema.py": (7, ("callbacks/test_ema.py",)),
    "callbacks/power_ema.py": (6, ("callbacks/test_power_ema.py",)),
    "callbacks/exact_resume.py": (7, ("callbacks/test_exact_resume.py",)),
    "callbacks/signal_checkpoint.py": (7, ("callbacks/test_signal_checkpoint.py", "cli/test_run_folder.py")),
    "callbacks/lora.py": (
        6,
        (
            "callbacks/test_lora.py",
            "callbacks/test_lora_beside.py",
            "mechanisms/adapters/test_peft_folder.py",
            "mechanisms/adapters/test_starts.py",
            "mechanisms/adapters/test_activated.py",
            "export/test_new_tokens.py",
        ),
    ),
    "callbacks/token_weighted_accumulation.py": (7, ("callbacks/test_token_weighted_accumulation.py",)),
    "mechanisms/averages/weights.py": (7, ("mechanisms/averages/test_weights.py", "callbacks/test_power_ema.py")),
    "mechanisms/averages/snapshots.py": (4, ("callbacks/test_power_ema.py", "commands/test_ema_sweep.py")),
    "mechanisms/averages/shadow.py": (
        4,
        ("callbacks/test_ema.py", "callbacks/test_ema_distributed.py", "contract/test_no_effect.py"),
    ),
    "mechanisms/adapters/low_rank.py": (
        6,
        ("mechanisms/adapters/test_low_rank.py", "callbacks/test_lora.py", "mechanisms/adapters/test_starts.py"),
    ),
    "mechanisms/adapters/int4.py": (4, ("mechanisms/adapters/test_int4.py",)),
    "mechanisms/order/resumable_sampler.py": (4, ("mechanisms/order/test_resumable.py",)),
    "mechanisms/order/keyed_batch_sampler.py": (4, ("mechanisms/order/test_keyed_batch_sampler.py",)),
    "losses/snr.py": (5, ("losses/test_snr.py",)),
    "losses/noise_process.py": (6, ("losses/test_diffusion.py", "losses/test_diffusion_sampling.py")),
    "losses/diffusion.py": (5, ("losses/test_diffusion.py",)),
    "losses/diffusion_sampling.py": (4, ("losses/test_diffusion_sampling.py",)),
    "losses/timesteps.py": (4, ("losses/test_timesteps.py",)),
    "losses/chunked_cross_entropy.py": (6, ("losses/test_chunked_cross_entropy.py",)),
    "losses/distillation.py": (4, ("losses/test_distillation.py",)),
    "losses/preference.py": (4, ("losses/test_preference.py",)),
    "losses/feature_matching.py": (4, ("losses/test_feature_matching.py",)),
    "optimizers/lion.py": (3, ("optimizers/test_optimizers.py",)),
    "optimizers/muon_adamw.py": (5, ("optimizers/test_optimizers.py",)),
    "optimizers/schedule_free_adamw.py": (5, ("optimizers/test_optimizers.py", "callbacks/test_schedule_free.py")),
    "optimizers/rates.py": (4, ("optimizers/test_rates.py",)),
    "optimizers/low_rank_adamw.py": (4, ("optimizers/test_low_rank.py", "callbacks/test_galore.py")),
    "optimizers/float32_step.py": (4, ("callbacks/test_kahan_summation.py", "callbacks/test_stochastic_rounding.py")),
    "data/text/packing.py": (5, ("data/text/test_packing.py",)),
    "data/text/collate.py": (4, ("data/text/test_chat_tokens.py", "data/test_language_data.py")),
    "data/text/truncation.py": (4, ("data/text/test_chat_tokens.py",)),
    "data/text/turn_spans.py": (4, ("data/text/test_chat_tokens.py",)),
    "application/__init__.py": (
        10,
        ("contract/test_application.py", "contract/test_trains.py", "contract/test_after_step.py"),
    ),
    "declaration.py": (5, ("contract/test_application.py", "contract/test_promises.py", "test_catalog.py")),
    "protocol.py": (
        4,
        ("contract/test_application.py", "callbacks/test_snr_weighting.py", "cli/test_rehearsal.py"),
    ),
    "technique.py": (3, ("contract/test_application.py", "callbacks/test_ema.py")),
}
# What no test can see, by name, and why.
EQUIVALENT: dict[str, str] = {
    "declaration.py:Phase:constant:13": "the order of the phases stays",
    "losses/preference.py:log1mexp:comparison:1": "where they meet both forms are right",
    "losses/preference.py:dpo_loss:constant:4": "a shortcut of what follows",
    "files/atomic_file.py:_is_stale:constant:3": "of a file that has vanished meanwhile: there is nothing to remove",
    "files/cache.py:write_json:constant:1": "how far lines are indented",
    "callbacks/power_ema.py:PowerEMA.__init__:call:1": "no base has a constructor of its own",
    "callbacks/lora.py:LoRA.__init__:call:1": "the same",
    **dict.fromkeys(
        (
            "callbacks/token_weighted_accumulation.py:TokenWeightedAccumulation.on_train_batch_start:constant:2",
            "callbacks/token_weighted_accumulation.py:TokenWeightedAccumulation._finish:constant:3",
            "callbacks/token_weighted_accumulation.py:TokenWeightedAccumulation._finish:constant:5",
        ),
        "any reference gives the same gradients: it keeps numbers near 1",
    ),
    **dict.fromkeys(
        ("losses/distillation.py:_expectation:sign:1", "losses/distillation.py:coarse:sign:4"),
        "tokens and vocabulary are two dimensions: the last is the second",
    ),
    "optimizers/low_rank_adamw.py:RandomDirections.update_of:constant:6": "the factor of an update of zeros",
    "callbacks/power_ema.py:PowerEMA._write:comparison:1": "no update is written twice; readers take each once",
}


@dataclass(frozen=True)
class Fault:
    """One change of a line.

    Args:
        file: Path of the file in the package.
        owner: Name of the function or class that contains the fault, "" for the module.
        kind: Kind of the change.
        number: Number among the faults of this kind in the owner, from 1.
        line: Line number.
        before: Original source text.
        after: Replacement text.
        span: Start and end of the original text, in bytes of the file.
    """

    file: str
    owner: str
    kind: str
    number: int
    line: int
    before: str
    after: str
    span: tuple[int, int]

    @property
    def name(self) -> str:
        return f"{self.file}:{self.owner}:{self.kind}:{self.number}"

    def __str__(self) -> str:
        return f"line {self.line}: {' '.join(self.before.split())} -> {' '.join(self.after.split())}"


# Faults ---------------------------------------------------------------------------------------------------------------

_COMPARED: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
_SIGNS: dict[type, type] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
_FACTORS: dict[type, type] = {ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
_ENDS = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "any": "all", "all": "any"}


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | None, ast.expr | str]]:
    """Yield the faults of one node: the kind, the replaced part (or the node itself), and the replacement."""
    if isinstance(node, ast.BinOp) and not _is_text(node):
        for kind, table in (("sign", _SIGNS), ("factor", _FACTORS)):
            joined = isinstance(node.op, ast.Div) and any(word in ast.unparse(node.left) for word in ("Path", "folder"))
            if type(node.op) in table and not joined:
                yield kind, None, ast.BinOp(node.left, table[type(node.op)](), node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "sign", None, node.operand
    elif isinstance(node, ast.AugAssign) and type(node.op) in _SIGNS:
        yield "sign", None, ast.unparse(ast.AugAssign(node.target, _SIGNS[type(node.op)](), node.value))
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        yield (
            "comparison",
            None,
            ast.Compare(node.left, [_COMPARED[type(node.ops[0])](), *node.ops[1:]], node.comparators),
        )
    elif isinstance(node, ast.BoolOp):
        other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield "junction", None, ast.BoolOp(other, node.values)
    elif isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.BoolOp):
        plain = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
        yield "condition", node.test, node.test.operand if plain else ast.UnaryOp(ast.Not(), node.test)  # type: ignore[attr-defined]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call", None, "pass"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
        func = node.func
        name = func.id if isinstance(func, ast.Name) else func.attr
        if name in _ENDS:
            new = _ENDS[name]
            yield "end", func, ast.Name(new) if isinstance(func, ast.Name) else ast.Attribute(func.value, new)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield "constant", None, ast.Constant(not node.value)
        elif isinstance(node.value, int):
            yield "constant", None, ast.Constant(node.value + 1)
        elif isinstance(node.value, float):
            yield "constant", None, ast.Constant(node.value * 1.5 + (node.value == 0))


def _is_text(node: ast.BinOp) -> bool:
    """Return whether an operator joins strings or types, where a fault would raise an exception in most cases."""
    parts = [part for part in ast.walk(node) if isinstance(part, ast.JoinedStr | ast.Constant)]
    return any(isinstance(part, ast.JoinedStr) or isinstance(part.value, str) for part in parts)


def _walk(node: ast.AST, owner: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield the nodes that run, in line order, without annotations, defaults, messages, assertions and typing code."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inside = f"{owner}.{child.name}".lstrip(".")
            for statement in child.body:
                yield from _here(statement, inside)
        elif not isinstance(child, ast.arguments):
            yield from _here(child, owner)


def _here(node: ast.AST, owner: str) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield from _walk(ast.Module([node], []), owner)
    elif isinstance(node, ast.AnnAssign):
        if node.value is not None and owner.rpartition(".")[2][:1].islower():
            yield from _here(node.value, owner)
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    elif not isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        yield node, owner
        yield from _walk(node, owner)


@cache
def faults(file: str, root: Path = ROOT) -> tuple[Fault, ...]:
    """Return all faults inside the functions of a file of the package."""
    source = (root / PACKAGE / file).read_bytes()
    starts = [0]
    for line in source.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    found = list[Fault]()
    counts = dict[tuple[str, str], int]()
    for node, owner in _walk(ast.parse(source), ""):
        for kind, place, new in _changes(node) if owner else ():
            at: Any = place if place is not None else node
            begin = starts[at.lineno - 1] + at.col_offset
            end = starts[at.end_lineno - 1] + at.end_col_offset
            after = new if isinstance(new, str) else ast.unparse(ast.fix_missing_locations(new))
            after = after if isinstance(new, str | ast.Constant) else f"({after})"
            counts[owner, kind] = number = counts.get((owner, kind), 0) + 1
            found.append(Fault(file, owner, kind, number, at.lineno, source[begin:end].decode(), after, (begin, end)))
    return tuple(found)


def chosen(file: str) -> list[Fault]:
    """Return the faults of a file to try: the first by the hash of their names, so that edits rarely change the set."""
    drawn = sorted(faults(file), key=lambda fault: hashlib.sha256(fault.name.encode()).digest())
    return sorted(drawn[: TESTS[file][0]], key=lambda fault: fault.span)


def names() -> list[str]:
    """Return the names of all faults that are tried and that a test can detect."""
    return [fault.name for file in TESTS for fault in chosen(file) if fault.name not in EQUIVALENT]


def with_fault(fault: Fault, source: bytes) -> bytes:
    """Return the source of the file with the fault."""
    begin, end = fault.span
    text = source[:begin] + fault.after.encode() + source[end:]
    ast.parse(text)
    return text


# Which tests reach a line ---------------------------------------------------------------------------------------------


class _Reports(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list) and statements and isinstance(statements[0], ast.stmt):
                setattr(node, field, list(self._reported(node, field, statements)))
        return node

    @staticmethod
    def _reported(node: ast.AST, field: str, statements: list[ast.stmt]) -> Iterator[ast.stmt]:
        for number, statement in enumerate(statements):
            text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
            chained = field == "orelse" and isinstance(node, ast.If) and isinstance(statement, ast.If) and number == 0
            if not (text or future or chained or isinstance(node, ast.Module)):
                yield ast.parse(f"_reached({statement.lineno}, {statement.end_lineno})").body[0]
            yield statement


def reporting(source: str) -> str:
    """Return the source with a call of ``builtins._reached`` before each statement, if that function exists."""
    tree = _Reports().visit(ast.parse(source))
    future = [n for n, one in enumerate(tree.body) if isinstance(one, ast.ImportFrom) and one.module == "__future__"]
    head = (
        "import builtins as _b\n_reached = lambda first, last: getattr(_b, '_reach', lambda *lines: None)(first, last)"
    )
    at = future[0] + 1 if future else int(ast.get_docstring(tree) is not None)
    tree.body[at:at] = ast.parse(head).body
    return ast.unparse(ast.fix_missing_locations(tree))


@cache
def _heads(file: str) -> dict[int, int]:
    """Return the last line of the header of each compound statement, by its first line."""
    tree = ast.parse((ROOT / PACKAGE / file).read_bytes())
    held = ((n.lineno, getattr(n, "body", None)) for n in ast.walk(tree) if isinstance(n, ast.stmt))
    return {line: max(line, body[0].lineno - 1) for line, body in held if body}


class _Notes:
    """Pytest plugin that records the lines each test reaches and the time it takes."""

    def __init__(self) -> None:
        self.tests: dict[str, Any] = {}
        self.lines: set[tuple[int, int]] = set()
        self.early: set[tuple[int, int]] = set()

    def reach(self, first: int, last: int) -> None:
        self.lines.add((first, last))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.early |= self.lines if not self.tests else set()
        self.lines.clear()
        self.tests[nodeid] = [time.monotonic(), [], True]

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.tests[report.nodeid][2] &= report.outcome == "passed"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.tests[nodeid][0] = round(time.monotonic() - self.tests[nodeid][0], 3)
        self.tests[nodeid][1] = sorted(self.lines)


# Processes ------------------------------------------------------------------------------------------------------------


class Server:
    """Server that tries faults. It is started once and forks a process for each run of tests."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="faults-"))
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name)
        self.clock = 1_000_000_000  # of what is written: a file's bytecode is known by its time and size

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def written(self, file: str, text: bytes) -> Iterator[None]:
        path = self.folder / PACKAGE / file
        before = path.read_bytes()
        try:
            self._write(path, text)
            yield
        finally:
            self._write(path, before)

    def _write(self, path: Path, text: bytes) -> None:
        path.write_bytes(text)
        self.clock += 10
        os.utime(path, (self.clock, self.clock))

    def reach(self, file: str) -> dict[str, Any]:
        """Return, for each passing test of a file, its seconds and the lines that it reaches."""
        source = (ROOT / PACKAGE / file).read_bytes()
        tests = [f"tests/{name}" for name in TESTS[file][1]]
        state = hashlib.sha256(source + b"".join((ROOT / name).read_bytes() for name in tests)).hexdigest()[:16]
        kept = REACH / f"{file.replace('/', '.')}.json"
        if kept.exists():
            known = json.loads(kept.read_text())
            if known["state"] == state:
                return known["tests"]
        with self.written(file, reporting(source.decode()).encode()):
            out = self.folder / "reach.json"
            out.unlink(missing_ok=True)
            self.run(tests, 1800, out)
        found = json.loads(out.read_text()) if out.exists() else {"tests": {}, "early": []}
        passed = {name: [took, lines + found["early"]] for name, (took, lines, ok) in found["tests"].items() if ok}
        assert passed, f"no test of {file} passes: {self.printed()[-2000:]}"
        REACH.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"state": state, "tests": passed}))
        return passed

    def reaching(self, fault: Fault) -> dict[str, float]:
        """Return the tests that reach a fault's line, with their seconds, fastest first."""
        found = self.reach(fault.file)
        heads = _heads(fault.file)
        reached = {
            name: took
            for name, (took, lines) in found.items()
            if any(first <= fault.line <= heads.get(first, last) for first, last in lines)
        }
        # What nobody has reached may be reached in processes of their own, which report nothing.
        drawn = sorted((took, name) for name, took in (reached or {n: took for n, (took, _) in found.items()}).items())
        return {name: took for took, name in drawn[:MOST_TESTS]}

    def attempt(self, name: str) -> str:
        """Return '' if a test detects the fault, else a line that describes the fault."""
        fault = next((one for one in faults(name.partition(":")[0]) if one.name == name), None)
        if fault is None:
            return "there is no such fault any more"
        tests = self.reaching(fault)
        others = {test: took for test, (took, _) in self.reach(fault.file).items() if test not in tests}
        source = (ROOT / PACKAGE / fault.file).read_bytes()
        code: int | None = 0
        with self.written(fault.file, with_fault(fault, source)):
            for some in (tests, others):  # which may reach it in processes of their own
                if code == 0 and some:
                    code = self.run([*some], 120 + 5 * sum(some.values()), None)
        if code == 0:
            return f"{len(tests | others)} tests do not see it: {fault}"
        assert code in (1, 2, 3, 4, None) or code < 0, f"pytest ended with {code}: {self.printed()[-2000:]}"
        return ""

    def printed(self) -> str:
        return (self.folder / "out.txt").read_text(errors="replace")

    def run(self, tests: Sequence[str], seconds: float, reach: Path | None) -> int | None:
        """Run pytest in a forked process. Return its exit code, or ``None`` after a timeout."""
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = 70
            try:
                code = self._child(tests, reach)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        deadline = time.monotonic() + seconds
        status = None
        while status is None and time.monotonic() < deadline:
            done, code = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if done else time.sleep(0.05)  # type: ignore[func-returns-value]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it has left behind, too
        if status is None:
            os.waitpid(child, 0)
        return status

    def _child(self, tests: Sequence[str], reach: Path | None) -> int:
        import pytest

        os.setsid()
        os.chdir(self.folder)
        out = os.open(self.folder / "out.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(out, number)
        for module in [name for name in sys.modules if name.partition(".")[0] in ("tests", "benchmarks", PACKAGE)]:
            del sys.modules[module]
        sys.path[:] = [str(self.folder), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
        sys.argv = ["pytest"]
        os.environ["PYTHONPATH"] = str(self.folder)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each child compiles all of the package
        sys.dont_write_bytecode = False
        plugins = []
        if reach is not None:
            import builtins

            notes = _Notes()
            plugins = [notes]  # type: ignore[attr-defined]
            builtins._reach = notes.reach  # type: ignore[attr-defined]
        ways = ["-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        ways += ["-m", "not nightly and not gpu"]
        code = int(pytest.main([*ways, *([] if reach else ["-x"]), *tests], plugins=plugins))
        if reach is not None:
            reach.write_text(json.dumps({"tests": notes.tests, "early": sorted(notes.early)}))
        sys.stdout.flush()
        return code


class Client:
    """Client of a server in a separate process, which has not imported this package."""

    def __init__(self) -> None:
        words = [sys.executable, "-m", "benchmarks.mutations", "--serve"]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes)

    def attempt(self, name: str) -> str:
        assert self.process.stdin
        assert self.process.stdout
        print(name, file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        return str(answer["fault"])


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    server = _prepared()
    try:
        for line in sys.stdin:
            print(json.dumps({"fault": server.attempt(line.strip())}), file=answers, flush=True)
    finally:
        server.close()


def _prepared() -> Server:
    import importlib
    import warnings

    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in HEAVY:
            importlib.import_module(module)
    return Server()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("begin", nargs="*", help="prefix of the names")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        _serve()
        return 0
    wanted = [name for name in names() if not given.begin or name.startswith(tuple(given.begin))]
    if given.list:
        every = {fault.name: fault for file in TESTS for fault in chosen(file)}
        print("\n".join(f"{name}  {every[name]}" for name in wanted))
        return 0
    server = _prepared()
    survivors = 0
    try:
        for name in wanted:
            fault = server.attempt(name)
            survivors += bool(fault)
            print(f"{name}: {fault or 'seen'}", flush=True)
    finally:
        server.close()
    print(f"{len(wanted)} tried, {survivors} survived")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
