"""Measure every technique on three small trainings: a GPT, a DiT and a ResNet without layers of this package.

    python -m benchmarks.techniques                     measure what the folder lacks; can be interrupted
    python -m benchmarks.techniques --only LoRA EMA --model GPT
    python -m benchmarks.techniques --show              print the table of the measured rows
    python -m benchmarks.techniques --record            write records/figures.json, the source of the documents

Each row gives ratios to the same training without the technique: CPU seconds of a step, bytes at the step's peak and by
kind, loss on held-out data after the same number of steps. A ratio below 1 is less than without the technique. Runs
with and without it alternate in the same process. If a technique refuses a training, the row gives the reason. Each row
runs in a forked process with one thread, two at a time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing.connection
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lit_efficient as le
from benchmarks import figures
from benchmarks.clock import use_one_thread
from benchmarks.technique_runs import MODELS, Setting, experts, measure, prepared
from lit_efficient.catalog import read_cards
from lit_efficient.declaration import Declaration

FOLDER = Path("runs/techniques")
COMMAND = "python -m benchmarks.techniques"
COLUMNS = {
    "time": "Time of a step",
    "peak": "Bytes at its peak",
    "weights": "Weights",
    "gradients": "Gradients",
    "states": "States",
    "activations": "Saved activations",
    "loss": "Loss",
}


def with_callback(name: str, **arguments: Any) -> Setting:
    shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return Setting(lambda: [getattr(le, name)(**arguments)], shown=shown)


def stepped(name: str, **arguments: Any) -> Setting:
    shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return Setting(optimizer=lambda groups: getattr(le, name)(groups, **arguments), shown=shown)


def in_bfloat16(name: str) -> Setting:
    return Setting(lambda: [getattr(le, name)()], trainer={"precision": "bf16-true"}, shown="beside plain bf16-true")


LOKR = {"peft_type": "LOKR", "r": 8, "alpha": 16, "target_modules": "all-linear"}

# Where 16-bit products have no instructions they take 20 times as long: only the smallest network.
# What is not measured with its default arguments, by name and model ("": all models).
SETTINGS: dict[tuple[str, str], Setting] = {
    ("APOLLO", ""): Setting(lambda: [le.APOLLO(rank=16)], partial(torch.optim.AdamW, lr=1e-2), shown="rank=16"),
    ("BatchRamp", ""): with_callback("BatchRamp", milestones=[20]),
    ("CheckpointAverage", ""): with_callback("CheckpointAverage", last_k=5, every_n_steps=5),
    ("Compile", ""): Setting(lambda: [le.Compile()], traced=False),
    ("EMA", ""): with_callback("EMA", decay=0.99),
    ("ExpertsBackend", "GPT"): Setting(
        lambda: [le.ExpertsBackend("eager")], module=experts, shown="eager, Qwen3-MoE, beside its own grouped product"
    ),
    ("FusedAdamW", ""): stepped("FusedAdamW", lr=2e-3),
    ("GroupedAdafactor", ""): stepped("GroupedAdafactor", lr=1e-2),
    ("GaLore", ""): Setting(lambda: [le.GaLore(rank=16)], partial(torch.optim.AdamW, lr=1e-2), shown="rank=16"),
    ("GradientClipping", ""): with_callback("GradientClipping", max_norm=1.0),
    ("GradientNoiseScale", "DiT"): Setting(
        lambda: [le.GradientNoiseScale(every_n_steps=1)],
        trainer={"accumulate_grad_batches": 2},
        shown="each step, 2 batches a step",
    ),
    ("GradualUnfreezing", ""): with_callback("GradualUnfreezing", every_n_steps=20),
    ("KahanSummation", "DiT"): in_bfloat16("KahanSummation"),
    ("KeepFloat32", "GPT"): in_bfloat16("KeepFloat32"),
    ("Lion", ""): stepped("Lion", lr=4e-4, weight_decay=0.1),
    ("MuonAdamW", ""): stepped("MuonAdamW", lr=2e-3),
    ("LowBitOptimizer", ""): with_callback("LowBitOptimizer", bits=8),
    ("LossFreeBalancing", "GPT"): Setting(
        lambda: [le.LossFreeBalancing()], module=experts, shown="Qwen3-MoE, beside no balancing"
    ),
    ("LossCurriculum", ""): with_callback("LossCurriculum", steps=30),
    ("MaxBatchSize", ""): with_callback("MaxBatchSize", max_size=128),
    ("MixtureOfDepths", "GPT"): with_callback("MixtureOfDepths"),
    ("OptimizerSchedule", ""): with_callback("OptimizerSchedule", weight_decay=[0.04, 0.4]),
    ("PeftAdapter", ""): Setting(lambda: [le.PeftAdapter(LOKR)], shown="LoKr, r=8"),
    ("PowerEMA", ""): Setting(lambda: [le.PowerEMA(sigma_rels=[0.05, 0.1])], shown="sigma_rels=[0.05, 0.1]"),
    ("PrefixTuning", ""): with_callback("PrefixTuning", num_virtual_tokens=16, init="random"),
    ("PromptTuning", "GPT"): with_callback("PromptTuning", num_virtual_tokens=16, init="random"),
    ("ResolutionRamp", "ResNet"): with_callback("ResolutionRamp", steps=30),
    ("QuantizeBase", ""): Setting(
        lambda: [le.QuantizeBase(), le.LoRA(rank=8)], beside=lambda: [], shown="nf4, with LoRA(rank=8)"
    ),
    ("QuantizeBase of experts", "GPT"): Setting(
        lambda: [le.QuantizeBase(experts=True), le.LoRA(rank=8, targets="all-linear+experts")],
        module=experts,
        shown="experts, Qwen3-MoE, nf4, with LoRA(rank=8)",
    ),
    ("LoRA", ""): with_callback("LoRA", rank=8),
    ("LoRA", "ResNet"): with_callback("LoRA", rank=8, targets=[r".*conv\d"]),
    ("ReplaceHead", "ResNet"): with_callback("ReplaceHead", num_outputs=10),
    ("SNRWeighting", ""): with_callback("SNRWeighting", gamma=5.0),
    ("ScheduleFree", ""): with_callback("ScheduleFree", warmup_steps=10),
    ("ScheduleFreeAdamW", ""): Setting(
        lambda: [le.ScheduleFree()], partial(le.ScheduleFreeAdamW, lr=2e-3), shown="lr=0.002"
    ),
    ("SequenceLengthRamp", "GPT"): with_callback("SequenceLengthRamp", start=64, end=128, steps=30),
    ("StochasticRounding", "DiT"): in_bfloat16("StochasticRounding"),
    ("StochasticDepth", ""): with_callback("StochasticDepth", rate=0.5),
    ("ThroughputMeter", ""): with_callback("ThroughputMeter"),
    ("TiledMLP", ""): with_callback("TiledMLP", tokens=64),
    ("TokenWeightedAccumulation", ""): Setting(
        lambda: [le.TokenWeightedAccumulation()], trainer={"accumulate_grad_batches": 2}, shown="2 batches a step"
    ),
    ("WeightClipping", ""): with_callback("WeightClipping", bound=1.0),
    ("HiddenAlignment", "DiT"): Setting(
        lambda: [le.HiddenAlignment(2, "data.judge", teacher_layer=r"body\.5", hidden=128)],
        shown="block=2, the data's classifier as teacher",
    ),
}

# What says nothing on these three, and why: that is its row of the table.
ELSEWHERE = {
    "AsyncCheckpoint": "changes only who writes a checkpoint, and none is written here",
    "ActivationOffload": "refused on a CPU, to whose memory it offloads; `benchmarks/ladder_gpu.py` has it",
    "BlockSwap": "refused on a CPU, in whose memory blocks wait; `benchmarks/ladder_gpu.py` has it",
    "ContrastiveFlowMatching": "needs a prediction of the flow, and the DiT here predicts x0",
    "DataLoaderTuner": "what it brings is the data's, and it measures that itself",
    "EmptyCache": "a CPU has no such cache",
    "ExactResume": "`benchmarks/exact_resume.py`",
    "FastMatmul": "sets nothing on a CPU",
    "Float8Precision": "only emulated on a CPU; `benchmarks/ladder_gpu.py` has it",
    "FeatureMatching": "a teacher of one's own is most of its cost",
    "LatentAlignment": "aligns an autoencoder's training, which is none of the three",
    "LRFinder": "ends before the first step that counts",
    "NoBiasBeforeNorm": "none of the three has a bias before a batch norm",
    "OffloadOptimizer": "refused on a CPU, where the states lie already; `benchmarks/ladder_gpu.py` has it",
    "Tiling": "changes nothing: it says what it would pad",
}


def names() -> list[str]:
    """Return the names of techniques and optimizers, sorted."""
    cards = [card for card in read_cards() if card.slot.startswith("trainer") or card.slot == "optimizer"]
    kinds = {card.name: getattr(le, card.name) for card in cards}
    chosen = {name for name, kind in kinds.items() if issubclass(kind, Declaration | torch.optim.Optimizer)}
    return sorted((chosen | {name for name, _ in SETTINGS}) - ELSEWHERE.keys())


def setting_of(name: str, model: str) -> Setting | None:
    """Return the setting of a technique on a model, or ``None`` if the technique does not apply."""
    mine = {key[1]: setting for key, setting in SETTINGS.items() if key[0] == name}
    return mine.get(model, mine.get("")) if mine else Setting(lambda: [getattr(le, name)()])


def row(name: str, model: str, data: Any, options: argparse.Namespace, pipe: Any) -> None:
    """Measure in this process. Send the figures, or the reason of a failure, to ``pipe``."""
    warnings.simplefilter("ignore")
    log = open(options.folder / f"{name}-{model}.log", "w")  # noqa: SIM115 (as long as the process)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.chdir(options.folder)
    start = time.monotonic()
    try:
        setting = setting_of(name, model)
        assert setting is not None
        result = measure(model, setting, data, options.steps, options.rounds, options.timed)
    except le.LitEfficientError as error:
        result = {"refused": str(error).splitlines()[0]}
    except Exception as error:
        traceback.print_exc()
        result = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    pipe.send({"technique": name, "model": model, "seconds": round(time.monotonic() - start, 1), **result})


def run(rows: list[tuple[str, str]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows as they end. Run ``options.jobs`` at a time."""
    context = multiprocessing.get_context("fork")
    data = {model: prepared(model) for model in {model for _, model in rows}}
    waiting = list(rows)
    running = {}
    end = time.monotonic() + 60 * options.minutes
    while running or (waiting and time.monotonic() < end):
        while waiting and len(running) < options.jobs and time.monotonic() < end:
            name, model = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=row, args=(name, model, data[model], options, sender))
            process.start()
            sender.close()
            running[receiver] = (process, name, model)
        for receiver in multiprocessing.connection.wait(list(running)):
            process, name, model = running.pop(receiver)
            try:
                yield receiver.recv()
            except EOFError:
                yield {"technique": name, "model": model, "failed": "the process was killed"}
            process.join()


def ratio(result: dict[str, Any], kind: str) -> str:
    if "time" not in result:
        return "-"
    if kind == "time":
        return f"{statistics.median(result['time']):.2f}"
    with_it, plain = (result[side].get(kind) for side in ("with", "plain"))
    return f"{with_it / plain:.2f}" if plain and with_it is not None else "-"


def load(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    lines = path.read_text().splitlines() if path.is_file() else []
    return {(r["technique"], r["model"]): r for r in map(json.loads, lines)}


def cells(name: str, results: dict[tuple[str, str], dict[str, Any]]) -> dict[str, str]:
    """Return the ratios of a technique on the three models, by column."""
    mine = [results.get((name, model), {}) for model in MODELS]
    return {kind: " / ".join(ratio(result, kind) for result in mine) for kind in COLUMNS}


def measured_names(results: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """Return the techniques that ran on at least one of the three models."""
    return sorted({name for (name, _), result in results.items() if "time" in result})


def show(results: dict[tuple[str, str], dict[str, Any]]) -> None:
    print(f"{'technique':28}" + "".join(f"{kind:>22}" for kind in COLUMNS) + "   on " + " / ".join(MODELS))
    for name in measured_names(results):
        print(f"{name:28}" + "".join(f"{cell:>22}" for cell in cells(name, results).values()))
    for (name, model), result in sorted(results.items()):
        for kind in {"refused", "failed"} & result.keys():
            print(f"{name} on {model} {kind}: {result[kind][:150]}")


def record(results: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Write the rows into figures.json. Rows that the folder lacks stay unchanged."""
    now = figures.here()
    source = json.loads(figures.FILE.read_text("utf-8"))
    environment = f"techniques/{now['date']}"
    source["environments"][environment] = {key: now[key] for key in ("versions", "machine")}
    kept_rows = [record for record in source["records"] if record.get("table") == "techniques"]
    rows = {record["id"].removeprefix("techniques/"): record for record in kept_rows}
    common = {"table": "techniques", "command": COMMAND, "date": now["date"], "threads": 1, "environment": environment}
    for name in measured_names(results):
        found = cells(name, results)
        ran = [model for model in MODELS if "time" in results.get((name, model), {})]
        settings = [setting_of(name, model) for model in ran]
        shown = next((setting.shown for setting in settings if setting), "")
        rows[name] = {
            "id": f"techniques/{name}",
            "technique": name.partition(" ")[0],
            **common,
            "unit": f"with it / without it, on {figures.networks_of(shown)}; '-': refused, or nothing there",
            "figures": found,
            "cells": [
                f"`{name.partition(' ')[0]}`" + (f" ({shown})" if shown else ""),
                *(f"{{{kind}}}" for kind in found),
            ],
        }
    for name, reason in ELSEWHERE.items():
        rows[name] = {
            "id": f"techniques/{name}",
            "technique": name,
            **common,
            "unit": "why there are none",
            "figures": {"reason": reason},
            "cells": [f"`{name}`", "{reason}", *[""] * (len(COLUMNS) - 1)],
        }
    before = source["records"]
    kept = [record for record in before if record.get("table") != "techniques"]
    place = next((i for i, record in enumerate(before) if record.get("table") == "techniques"), len(before))
    source["records"] = [*kept[:place], *(rows[name] for name in sorted(rows)), *kept[place:]]
    figures.FILE.write_text(json.dumps(source, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=None, metavar="NAME")
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timed", type=int, default=6)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=30.0, help="start no row after this many minutes")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    options.folder.mkdir(parents=True, exist_ok=True)
    use_one_thread()
    file = options.folder / "rows.jsonl"
    results = load(file)
    named = [(name, model) for model in options.model for name in options.only or names()]
    wanted = [key for key in named if setting_of(*key)]
    missing = [key for key in wanted if key not in results or options.only]
    if not (options.show or options.record):
        for done, result in enumerate(run(missing, options), start=1):
            results[result["technique"], result["model"]] = result
            file.write_text("".join(json.dumps(r) + "\n" for r in results.values()))
            what = result.get("refused") or result.get("failed") or f"{ratio(result, 'time')} of the time"
            print(f"{done}/{len(missing)} {result['technique']} on {result['model']}: {what[:110]}", flush=True)
    show(results)
    if options.record:
        record(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
