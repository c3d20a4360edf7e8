"""The driver of the first minutes on a GPU works, on the CPU: rows, a table, a second call, and cases that go wrong."""

from __future__ import annotations

import importlib
import json
import runpy
import subprocess
import sys
import time
import types
from dataclasses import replace
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
    found = {"crash": "crashed", "hang": "out of time", "missing": "skipped", "fails": "failed", "works": "ok"}
    assert rows == found
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


SHARED = """
import faulthandler, json, os, sys, time
names = sys.argv[1:sys.argv.index("--seconds")]
for name in names:
    faulthandler.dump_traceback_later(float(sys.argv[-1]), exit=True)
    print("RESULT", json.dumps({"rung": name, "done": False, "peak_gib": 1, "process": os.getpid()}), flush=True)
    if name == "abort":
        os.abort()
    if name == "hang":
        time.sleep(60)
    if name == "clock":
        sys.exit(0)
    print("words of", name, flush=True)
    print("RESULT", json.dumps({"rung": name, "done": True, "peak_gib": 2, "process": os.getpid()}), flush=True)
"""


def test_pieces_of_one_process_have_rows_of_their_own_whatever_ends_it(drive: Any, tmp_path: Path) -> None:
    def piece(name: str) -> Any:
        return drive.Piece(f"ladder/{name}", "ladder", ["-c", SHARED, name], 2, keep=100, shares=True)

    first, second = [piece(name) for name in ("a", "b", "abort", "c", "hang", "d")], [piece("clock"), piece("e")]
    header = drive.header("cpu", "", [])
    driver = drive.Driver(tmp_path, header, minutes=1, again=False, environment={}, start=drive.launch)
    driver.run([*first, *second], 1)
    rows = {name.removeprefix("ladder/"): row for name, row in driver.rows.items()}
    found = {name: row["status"] for name, row in rows.items()}
    assert found == {"a": "ok", "b": "ok", "abort": "crashed", "c": "ok", "hang": "out of time", "d": "ok"} | {
        "clock": "not reached",
        "e": "not reached",
    }
    assert driver.left_out == ["ladder/clock", "ladder/e"]
    assert [rows[name]["result"]["peak_gib"] for name in found if name not in ("clock", "e")] == [2, 2, 1, 2, 1, 2]
    processes_of = [rows[name]["result"]["process"] for name in ("a", "b", "abort", "c", "hang", "d")]
    assert [processes_of.index(one) for one in processes_of] == [0, 0, 0, 3, 3, 5]  # one until a piece ends it
    assert rows["b"]["output"] == "words of b"
    again = drive.Driver(tmp_path, header, minutes=1, again=False, environment={}, start=drive.launch)
    again.run([*first, piece("e")], 1)
    assert again.rows["ladder/e"]["status"] == "ok"
    assert (again.rows["ladder/a"], again.left_out) == (rows["a"], [])


def test_only_what_has_changed_runs_again_and_what_would_end_late_waits_for_the_next_call(
    drive: Any, tmp_path: Path
) -> None:
    ran: list[str] = []

    def start(words: list[str], log: Path, limit: float, environment: dict[str, str]) -> int:
        ran.append(words[0])
        return 0

    def run(minutes: float, *plan: Any) -> Any:
        ran.clear()
        driver = drive.Driver(tmp_path, drive.header("cpu", "", []), minutes, False, {}, start)
        driver.run(list(plan), 1)
        return driver

    short = drive.Piece("short", "tests", ["short"], usual=9, fingerprint="1")
    long = drive.Piece("long", "tests", ["long"], usual=50, fingerprint="1")
    last = drive.Piece("last", "tests", ["last"], usual=9, fingerprint="1")
    driver = run(0.5, short, long, last)
    assert (ran, driver.left_out) == (["short", "last"], ["long"])
    assert "| long | not reached: it usually takes 50 s, more than was left of 0.5 minutes |" in (
        tmp_path / "report.md"
    ).read_text("utf-8")
    run(2, short, long, last)
    assert ran == ["long"]
    run(0.5, replace(short, fingerprint="2"), replace(long, fingerprint="2"), last)
    assert ran == ["short", "long"]  # the last run of the long one took no time, and this counts


def test_a_recorded_rung_names_its_torch(tmp_path: Path, monkeypatch: Any) -> None:
    record = importlib.import_module("benchmarks.gpu.record")
    figures = {"length": 4096, "peak_gib": 9.5, "tokens_a_second": 20_000, "seconds_a_step": 0.4}
    rows = [
        {
            "name": "ladder/LoRA",
            "status": "ok",
            "on": ["H200", "3.12", "2.11.0"],
            "result": {**figures, "peak_gib": 1.0},
        },
        {"name": "ladder/LoRA", "status": "ok", "on": ["H200", "3.12", "2.13.0"], "result": figures},
        {"name": "ladder/LoRA", "status": "not reached", "on": ["H200", "3.12", "2.13.0"]},
        {"name": "ladder/base", "status": "ok", "on": ["H200", "3.12", "2.11.0"], "result": figures},
    ]
    lines = [json.dumps({"group": "ladder", **row}) for row in rows]
    (tmp_path / "results.jsonl").write_text("\n".join(lines))
    (tmp_path / "report.md").write_text("Device: H200. Versions: python 3.12, torch 2.13.0.\n")
    written = tmp_path / "figures.json"
    written.write_text(json.dumps({"environments": {}, "tables": {}, "records": []}))
    monkeypatch.setattr(record, "FIGURES", written)
    monkeypatch.setattr(sys, "argv", ["record", str(tmp_path), "--date", "2026-12-01"])
    record.main()
    source = json.loads(written.read_text())
    (rung,) = (one for one in source["records"] if one.get("table") == "gpu")  # not base, which another torch has run
    filled = [cell.format(**rung["figures"]) for cell in rung["cells"]]
    assert dict(zip(source["tables"]["gpu"], filled[:5])) == {
        "Rung": "LoRA",
        "Peak": "9.50 GiB",
        "Tokens a second": "20,000",
        "Of the bfloat16 peak": "-",
        "torch": "2.13.0",
    }


def test_a_fingerprint_follows_imports_and_ignores_words_for_people(monkeypatch: Any, tmp_path: Path) -> None:
    module = importlib.import_module("benchmarks.gpu.fingerprint")
    files = {
        "benchmarks/one.py": "import lit_efficient as le\nfrom lit_efficient.a import f\nRUNGS = {'x': 1}\n",
        "lit_efficient/a.py": "def f():\n    from lit_efficient import EMA\n    return EMA\n",
        "lit_efficient/b.py": "B = 1\n",
        "lit_efficient/callbacks/ema.py": "class EMA: pass\n",
        "lit_efficient/callbacks/lora.py": "class LoRA: pass\n",
    }

    def taken(**changed: str) -> tuple[str, str]:
        for name, text in {**files, **{key.replace("__", "/") + ".py": text for key, text in changed.items()}}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for cached in (module._tree, module._code, module._imports, module._file_of):
            cached.cache_clear()
        both = (
            module.fingerprint([1], "benchmarks/one.py"),
            module.fingerprint([1], "benchmarks/one.py", names=["LoRA"]),
        )
        return both

    monkeypatch.setattr(module, "ROOT", tmp_path)
    plain, with_lora = taken()
    assert plain != with_lora
    assert taken(lit_efficient__a='"""Words."""\n\n# More words.\n' + files["lit_efficient/a.py"]) == (plain, with_lora)
    assert taken(lit_efficient__b="B = 2\n") == (plain, with_lora)
    assert taken(benchmarks__one=files["benchmarks/one.py"].replace("1", "2")) == (plain, with_lora)
    assert taken(lit_efficient__callbacks__lora="class LoRA: x = 1\n")[0] == plain
    assert taken(lit_efficient__callbacks__lora="class LoRA: x = 1\n")[1] != with_lora
    assert taken(lit_efficient__callbacks__ema="class EMA: x = 1\n")[0] != plain
    for cached in (module._tree, module._code, module._imports, module._file_of):
        cached.cache_clear()


def test_rungs_of_one_process_measure_what_they_measure_alone(tmp_path: Path) -> None:
    def climbed(*names: str, seconds: str = "100") -> dict[str, dict[str, Any]]:
        log = tmp_path / f"log of {seconds}"
        words = ["-m", "benchmarks.ladder_gpu", *names, "--device", "cpu", "--tiny", "--seconds", seconds]
        assert forked(words, log, 100, {}) == 0
        lines = [line for line in log.read_text().splitlines() if line.startswith("RESULT ")]
        return {row["rung"]: row for row in (json.loads(line.removeprefix("RESULT ")) for line in lines)}

    both = climbed("LoRA", "base")
    assert list(both) == ["LoRA", "base"]
    assert all(row["done"] and row["length"] == 64 and row["tokens_a_second"] > 0 for row in both.values())
    assert climbed("LoRA", "base", seconds="1") == {}


@pytest.mark.turns(6, family="slow")
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


@pytest.mark.turns(6, family="slow")
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
    no_benchmarks |= {"plan_cells", "plan_truth", "data_selection", "merging"}  # parts, and what trains small networks
    no_benchmarks |= {
        "plan_published",
        "plan_70b",
        "plan_ranks",
        "plan_ladder",
        "plan_beside_torchtune",
        "recipes",
        "image_recipes",
    }  # plans alone
    no_benchmarks |= {"block_counts"}  # of tensors without values
    no_benchmarks |= {
        "compared",
        "config_moves",
        "rate_finder",
        "generation",
        "policy_beside_trl",
        "policy_arithmetic",
        "savings",
        "tokenising",
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
    made = [piece.fingerprint for piece in plan if not piece.skip]
    assert len(set(made)) == len(made)  # each of its own code
    rungs = [piece for piece in plan if piece.group == "ladder"]
    assert all(piece.shares for piece in rungs)
    assert sum(piece.usual for piece in rungs) + 60 < 12 * 60  # with the smoke test, 14 at a time
