"""Plan each recipe of a pretrained model, and write the table that `configs --for 24GB` prints.

    python -m benchmarks.recipes            plans what the table lacks
    python -m benchmarks.recipes --again    plans all

The shapes of the models are in `records/model_shapes.json`: the fields of https://huggingface.co/NAME/blob/main/config.json
that decide sizes, and the number of parameters. A plan needs no weights, no tokenizer and no data. Each cell is planned
with two accumulated batches, which need as much memory as more of them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from lit_efficient.cli.fits import ConfigFit
from lit_efficient.evidence.planning.plan import Plan, plan
from lit_efficient.files.recipes import CONFIGS, TABLE, USABLE, Recipe
from lit_efficient.mechanisms.trials.steps import quiet

SHAPES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "records" / "model_shapes.json").read_text())
LENGTH = 2048
BATCHES = (1, 4)
MOST = int(USABLE * 80e9)  # bytes
LEAST = {"full": 8, "lora": 2, "qlora": 0.5}  # bytes of a parameter, to leave out what cannot fit
"""Methods, and the fewest bytes of a parameter."""


def planned(recipe: Recipe) -> Plan:
    """Return the plan of a recipe on a GPU."""
    with tempfile.TemporaryDirectory() as folder, quiet(warns=False):
        config = Path(folder, "config.json")
        config.write_text(json.dumps(SHAPES[recipe.model]["config"]))
        options = [*recipe.options(), "--trainer.accelerator=cpu", "--trainer.accumulate_grad_batches=2"]
        options += [f"--model.model.name_or_path={folder}", f"--data.tokenizer={folder}"]
        return plan(ConfigFit(options, folder, "meta"), device="cuda")


def cells() -> list[Recipe]:
    """Return a recipe without a peak for each model, method and batch size that may fit on the largest card."""
    return [
        Recipe(name, shape["family"], method, LENGTH, batch, 0, tuple(shape.get("frozen", ())))
        for name, shape in SHAPES.items()
        for method in CONFIGS
        for batch in BATCHES
        if LEAST[method] * shape["parameters"] <= MOST
        # QuantizeBase does not change the stacked weights of experts.
        and not (method == "qlora" and "num_local_experts" in shape["config"])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Plan the recipes of pretrained models.")
    parser.add_argument("--again", action="store_true", help="also plan what the table has")
    known = [] if parser.parse_args().again or not TABLE.is_file() else json.loads(TABLE.read_text("utf-8"))
    peaks = {(row["model"], row["method"], row["batch_size"]): row["peak"] for row in known}
    for cell in cells():
        key = cell.model, cell.method, cell.batch_size
        if key not in peaks and peaks.get((*key[:2], 1), 0) <= MOST:
            peaks[key] = planned(cell).peak
            print(*key, f"{peaks[key] / 1e9:.2f} GB", flush=True)
            write(peaks)


def write(peaks: dict[tuple[str, str, int], int]) -> None:
    """Write the table: one row a line, in the order of the cells."""
    rows = []
    for cell in cells():
        peak = peaks.get((cell.model, cell.method, cell.batch_size))
        if peak is not None:
            row = {**vars(cell), "peak": peak}
            if not cell.frozen:
                del row["frozen"]
            rows.append(row)
    write_rows(TABLE, rows)


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write a table: one row a line."""
    file.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
