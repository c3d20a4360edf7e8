"""The driver of the first minutes on a GPU works, on the CPU: rows, a table, a second call, and cases that go wrong."""

from __future__ import annotations

import importlib
import json
import runpy
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_efficient.catalog import read_cards
from tests import processes

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def drive() -> Any:
    return importlib.import_module("benchmarks.gpu.drive")


def _program(words: list[str]) -> None:
    option, module, *arguments = words
    assert option == "-m"
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def forked(words: list[str], log: Path, limit: float, environment: dict[str, str]) -> int | None:
    return processes.run(_program, words, log=log, env=environment)


@pytest.mark.turns(4, family="whole programs")
def test_three_cases_a_table_and_a_second_call_that_runs_nothing(drive: Any, tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--quick", "--out", str(tmp_path), "--jobs", "1"]
    assert drive.main(arguments, start=forked) == 0
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows] == ["smoke/plain GPT", "smoke/LoRA", "smoke/EMA"]
    for row in rows:
        first, last = row["result"]["32-true"]["loss"]
        assert row["status"] == "ok"
        assert 5 < first < 7  # about log(512)
        assert last != first
    page = (tmp_path / "report.md").read_text()
    assert "Pieces: 3 ok." in page
    assert f"| LoRA | 32-true | ok | {rows[1]['result']['32-true']['loss'][0]} to" in page

    def nothing(*_: object) -> int:
        raise AssertionError("what is done is run again")

    cut = tmp_path / "results.jsonl"
    cut.write_text(cut.read_text() + '{"name": "smoke/EMA", "sta')  # the call was killed while it wrote
    assert drive.main(arguments, start=nothing) == 0
    assert (tmp_path / "report.md").read_text() == page
    header = drive.header("cpu", "", [])
    header["versions"]["torch"] = "2.0"
    assert drive.Driver(tmp_path, header, 1, False, {}, nothing).rows == {}  # another torch's rows are not its own


def test_a_crash_a_hang_and_a_missing_package_are_rows(drive: Any, tmp_path: Path) -> None:
    def piece(name: str, code: str, **more: Any) -> Any:
        return drive.Piece(name, "ladder", ["-c", code], **{"limit": 30, **more})

    plan = [
        piece("crash", "import os; print('RESULT {\"before\": 1}', flush=True); os.abort()"),
        piece("hang", "import time; time.sleep(60)", limit=1),
        piece("missing", "", needs=("no_such_package",)),
        piece("fails", "raise RuntimeError('no luck')"),
        piece("works", "print('RESULT {\"peak_gib\": 3}')"),
    ]
    header = drive.header("cpu", "", [])
    driver = drive.Driver(tmp_path, header, minutes=1, again=False, environment={}, start=drive.launch)
    driver.run(plan, 1)
    rows = {name: row["status"] for name, row in driver.rows.items()}
    assert rows == dict(zip(rows, ["crashed", "out of time", "skipped", "failed", "ok"], strict=True))
    assert driver.rows["crash"]["result"] == {"before": 1}
    page = (tmp_path / "report.md").read_text()
    assert "| missing | skipped: needs no_such_package |" in page
    assert "RuntimeError: no luck" in page
    assert "| works | ok |  | 3 |" in page
    cut = tmp_path / "results.jsonl"
    cut.write_text("\n".join(cut.read_text().splitlines()[:-1]) + '\n{"name": "works", "sta')
    driver = drive.Driver(tmp_path, header, minutes=1, again=False, environment={}, start=drive.launch)
    driver.run(plan, 1)
    late = drive.Driver(tmp_path, header, minutes=0, again=True, environment={}, start=drive.launch)
    late.run(plan, 1)
    assert {name: row["status"] for name, row in late.rows.items()} == rows  # no time: what was found stays
    late.run([*plan, piece("new", "")], 1)
    assert late.rows["new"]["status"] == "not reached"


def test_a_killed_call_takes_the_piece_under_way_with_it(drive: Any, tmp_path: Path) -> None:
    code = f"import time; open({str(tmp_path / 'begun')!r}, 'w'); time.sleep(60)"
    call = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from benchmarks.gpu import drive; from pathlib import Path
drive.launch(["-c", {code!r}], Path({str(tmp_path / "log")!r}), 60, {{}})
"""
    process = subprocess.Popen([sys.executable, "-c", call])
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    for _ in range(200):
        alive = [c for c in children if (p := Path(f"/proc/{c}/stat")).exists() and p.read_text().split()[2] != "Z"]
        if not alive:
            break
        time.sleep(0.05)
    assert children
    assert not alive


def test_the_longest_context_is_the_one_that_the_memory_holds_and_is_run_where_that_is_quick(drive: Any) -> None:
    ladder = importlib.import_module("benchmarks.ladder_gpu")
    lengths: list[int] = []

    class Climb:
        optimizer = types.SimpleNamespace(zero_grad=lambda: None)

        def measure(self, length: int, steps: int, warm: int) -> dict[str, Any]:
            lengths.append(length)
            peak = 6 + 2e-4 * length
            if peak > 23.0:  # of 24: more is lost than what is set aside
                raise torch.OutOfMemoryError
            return {"length": length, "peak_gib": peak, "seconds_a_step": 1e-4 * length + 1e-9 * length**2}

    found = ladder.find_longest(Climb(), 24)
    assert lengths[:2] == [8192, 24576]
    assert lengths[-1] < lengths[-2]  # the first guess did not fit
    assert found["longest was run"]
    assert 0.95 * (23 - 6) / 2e-4 < found["length"] <= (23 - 6) / 2e-4
    found = ladder.find_longest(Climb(), 80)  # more than a minute: said, not run
    assert found["length"] == 24576
    assert abs(found["longest by two lengths"] - (80 - 1.9 - 6) / 2e-4) < 1024
    assert found["seconds expected"] > 45


def test_the_plan_names_every_callback_every_benchmark_and_what_no_machine_of_one_device_shows(drive: Any) -> None:
    plan = drive.pieces("cuda")
    names = [piece.name for piece in plan]
    assert len(set(names)) == len(names)
    cases = sys.modules["benchmarks.gpu.cases"]
    techniques = {card.name for card in read_cards() if card.is_technique and card.slot == "trainer.callbacks"}
    assert techniques - cases.NAMED - cases.CASES.keys() == cases.LEFT_OUT  # nothing else, and nothing that is tried
    others = cases.of_overlays(techniques - {"WeightClipping"})  # as if it were new
    ((name, case),) = others.items()
    (clipping,) = case.callbacks()
    assert (name, type(clipping).__name__, clipping.bound) == ("WeightClipping", "WeightClipping", 1.0)
    no_benchmarks = {"clock", "step_clock", "ladder_gpu", "figures"}
    no_benchmarks |= {"techniques", "technique_runs", "cpu_throughput", "adapters", "tune"}  # of CPUs
    no_benchmarks |= {"trust", "mutations", "warm_checks", "quality", "scaling", "real_size", "width_transfer"}
    no_benchmarks |= {"plan_cells", "plan_truth"}  # parts
    no_benchmarks |= {
        "plan_published",
        "plan_70b",
        "plan_ranks",
        "plan_ladder",
        "plan_beside_torchtune",
        "recipes",
    }  # plans alone
    no_benchmarks |= {"block_counts"}  # of tensors without values
    no_benchmarks |= {
        "compared",
        "config_moves",
        "rate_finder",
        "generation",
        "policy_beside_trl",
        "policy_arithmetic",
    }  # Run on CPUs.
    benchmarks = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - no_benchmarks
    assert benchmarks == {name.split("/")[1].split()[0] for name in names if name.startswith("benchmarks/")}
    for piece in plan:
        if piece.group in ("benchmarks", "ladder"):
            assert piece.expected, piece.name
        if piece.group == "benchmarks":
            source = ROOT / f"{piece.words[1].replace('.', '/')}.py"
            assert '"--device"' in source.read_text(), piece.name
    assert "untested" in next(piece.skip for piece in plan if piece.name.startswith("nccl"))
    needs = {piece.name.partition("::")[0]: piece.needs for piece in plan if "::" in piece.name}
    assert "bitsandbytes" in needs["tests/callbacks/test_low_bit_optimizer.py"]  # or its import would be a failure
    assert "bitsandbytes" not in needs["tests/callbacks/test_offload_optimizer.py"]
    assert all("pytest_timeout" in packages for packages in needs.values())
    assert plan[-4].group == "paging"  # managed memory can hang a device
    assert max(piece.limit for piece in plan if piece.group == "smoke") <= 75  # seconds, of about eighty
