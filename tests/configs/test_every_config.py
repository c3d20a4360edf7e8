"""Every config is not only parsed: its parts are built as the command line builds them, with the arguments it gives."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.optim import Optimizer

import lit_efficient
from lit_efficient import ConfigurationError, Technique
from lit_efficient.__main__ import main
from lit_efficient.cli.rehearsal import rehearse
from lit_efficient.declaration import Declaration, Hooks, check_conflicts, techniques_of
from tests.support_cli import Parts

ROOT = Path(__file__).parents[2]
ELSEWHERE = ("diffusion", "llm", "scale")  # test_diffusion.py, test_llm.py and test_scale.py build those
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name not in ELSEWHERE)
TASK = ["--model", "lit_efficient.Autoencoding", "--data", "lit_efficient.DigitImages"]  # below an overlay
# What a fit of it refuses of these: a network with layers that it lacks, or a GPU.
REFUSED = {"apollo", "galore", "ia3", "lora", "prefix_tuning", "prompt_tuning", "qalora", "qlora", "replace_head"}
REFUSED |= {
    "multi_token_prediction",
    "snr_weighting",
    "tiled_mlp",
    "activation_offload",
    "block_swap",
    "float8_precision",
    "offload_optimizer",
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


PACKAGES = {"mlflow": "mlflow", "comet": "comet_ml"}  # of loggers, which .ci/nightly installs


def is_overlay(path: Path) -> bool:
    return path.parent.name in ("techniques", "loggers")


def built(*paths: Path) -> Any:
    """All that a fit with these configs is made of; overlays get a small task below them."""
    configs = [argument for path in paths for argument in ("-c", str(path))]
    return Parts(args=["fit", *(TASK if all(map(is_overlay, paths)) else []), *configs])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_its_parts_are_built_with_its_arguments(path: Path) -> None:
    if path.parent.name == "loggers" and path.stem in PACKAGES:
        pytest.importorskip(PACKAGES[path.stem])
    written = yaml.safe_load(path.read_text("utf-8"))
    parts = built(path)
    callbacks = {type(callback).__name__: callback for callback in parts.trainer.callbacks}
    assert "NonFiniteGuard" in callbacks
    callbacks |= {type(part).__name__: part for part in techniques_of(parts.trainer)}
    for key in ("callbacks", "callbacks+", "plugins+"):
        for named in written.get("trainer", {}).get(key, ()):
            entry = {"class_path": named} if isinstance(named, str) else named
            callback = callbacks[entry["class_path"].rpartition(".")[2]]
            if isinstance(callback, Declaration):
                for name, value in entry.get("init_args", {}).items():
                    given = getattr(callback, name)
                    if is_dataclass(given):  # a block of YAML may name some of its fields
                        given = {field: getattr(given, field) for field in value}
                    assert (list(given) if isinstance(given, tuple) else given) == value, name
    if "logger" in written.get("trainer", {}) and isinstance(written["trainer"]["logger"], dict):
        kinds = {kind.__name__ for kind in type(parts.trainer.logger).__mro__}
        assert written["trainer"]["logger"]["class_path"].rpartition(".")[2] in kinds
    for key, part in (("model", parts.model), ("data", parts.datamodule)):
        if key in written:
            assert type(part).__name__ == written[key]["class_path"].rpartition(".")[2]
    if is_overlay(path):
        with pytest.raises(ConfigurationError) if path.stem in REFUSED else nullcontext():
            rehearse(parts.trainer, parts.model, parts.datamodule)


@pytest.mark.parametrize(("name", "right", "wrong"), [("ema", "decay", "dekay"), ("lora", "rank", "ranc")])
def test_a_misspelt_argument_is_refused(
    name: str, right: str, wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "configs" / "techniques" / f"{name}.yaml").read_text("utf-8")
    (tmp_path / "wrong.yaml").write_text(text.replace(f" {right}:", f" {wrong}:"))
    assert main(["fit", *TASK, "-c", "wrong.yaml"]) == 2
    said = capsys.readouterr().err
    assert wrong in said
    assert right in said


def optimizers() -> list[type[Optimizer]]:
    public = (getattr(lit_efficient, name) for name in lit_efficient.PUBLIC)
    return [kind for kind in public if inspect.isclass(kind) and issubclass(kind, Optimizer)]


@pytest.mark.turns(5)
@pytest.mark.parametrize("kind", optimizers(), ids=lambda kind: kind.__name__)
def test_an_optimizer_has_an_overlay_that_goes_with_every_task(kind: type[Optimizer]) -> None:
    path = ROOT / "configs" / "techniques" / f"{kind.__module__.rpartition('.')[2]}.yaml"
    written = yaml.safe_load(path.read_text("utf-8"))
    arguments = written["optimizer"]["init_args"]
    assert "Learning rate: " in path.read_text("utf-8")
    for task in sorted((ROOT / "configs" / "tasks").glob("*.yaml")):
        parts = built(task, path)
        plan = parts.model.__dict__["_lit_efficient_optimizers"]
        optimizer = plan.check()
        assert type(optimizer) is kind
        assert {name: optimizer.param_groups[0].get(name, value) for name, value in arguments.items()} == arguments
        schedule = "LRScheduler" if plan.scheduler is None else plan.scheduler["class_path"].rpartition(".")[2]
        assert schedule == written.get("lr_scheduler", {"class_path": "LRScheduler"})["class_path"]
        check_conflicts([*parts.trainer.callbacks, optimizer])


def techniques() -> list[type[Declaration]]:
    public = (getattr(lit_efficient, name) for name in lit_efficient.PUBLIC)
    kinds = [kind for kind in public if inspect.isclass(kind) and issubclass(kind, Declaration)]
    return [kind for kind in kinds if kind is not Technique and Hooks not in kind.__bases__]


@pytest.mark.parametrize("kind", techniques(), ids=lambda kind: kind.__name__)
def test_a_technique_has_an_overlay_and_a_test(kind: type[Declaration]) -> None:
    slot, name = kind.__module__.split(".")[-2:]
    overlay = ROOT / "configs" / "techniques" / f"{name}.yaml"
    assert overlay.exists(), f"{kind.__name__} needs an overlay: create configs/techniques/{name}.yaml"
    key = "callbacks+" if issubclass(kind, Technique) else "plugins+"
    entries = yaml.safe_load(overlay.read_text("utf-8"))["trainer"][key]
    assert kind.__name__ in [entry if isinstance(entry, str) else entry["class_path"] for entry in entries]
    assert f"class {kind.__name__}(" in (ROOT / "lit_efficient" / slot / f"{name}.py").read_text("utf-8")
    assert kind.__name__ in (ROOT / "tests" / slot / f"test_{name}.py").read_text("utf-8")
