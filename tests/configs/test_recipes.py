"""Recipes of pretrained models: the shapes are the published ones, each plan is the table's, each command runs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.recipes import SHAPES, planned
from lit_efficient import StochasticRounding
from lit_efficient.__main__ import main
from lit_efficient.data.text.chat_tokenizer import train_chat_tokenizer
from lit_efficient.files.image_recipes import fitting_images
from lit_efficient.files.recipes import ROWS_OF_STEP, USABLE, Recipe, fitting, recipes
from lit_efficient.models.libraries import causal_lm
from tests.support_cli import Parts

KNOWN = recipes()
CARDS = ("8GB", "16GB", "24GB", "80GB")


def label(recipe: Recipe) -> str:
    return f"{recipe.model.rpartition('/')[2]}-{recipe.method}-{recipe.batch_size}"


FAST = "SmolLM2-135M-lora-1"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.turns(5)
@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        network = causal_lm.from_json(SHAPES[name]["config"])
    assert sum(p.numel() for p in network.parameters()) == SHAPES[name]["parameters"]


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(one, id=label(one), marks=() if label(one) == FAST else pytest.mark.nightly) for one in KNOWN],
)
def test_the_table_holds_what_a_plan_says(recipe: Recipe) -> None:
    """Never more. If less by more than a tenth, plan again: ``python -m benchmarks.recipes --again``."""
    plan = planned(recipe)
    assert 0.9 * recipe.peak <= plan.peak <= 1.01 * recipe.peak
    assert plan.at_least == plan.at_most == ""
    assert plan.batch == recipe.batch_size
    assert plan.amount == 2 * recipe.batch_size * recipe.max_length


@pytest.mark.turns(8)
@pytest.mark.parametrize("recipe", KNOWN, ids=label)
def test_a_command_resolves_to_its_method(recipe: Recipe) -> None:
    parts: Any = Parts(args=["fit", *recipe.options(), "--trainer.accelerator=cpu"])
    names = {type(callback).__name__ for callback in parts.trainer.callbacks}
    assert ("LoRA" in names) == (recipe.method != "full")
    assert ("QuantizeBase" in names) == (recipe.method == "qlora")
    assert any(isinstance(one, StochasticRounding) for one in parts.trainer.callbacks) == (recipe.method == "full")
    assert parts.model.model.name_or_path == parts.datamodule.tokenizer_name == recipe.model
    assert parts.datamodule.max_length == recipe.max_length
    assert parts.datamodule.batch_size * parts.trainer.accumulate_grad_batches == ROWS_OF_STEP
    assert parts.model.learning_rate == (1e-5 if recipe.method == "full" else 2e-4)


def test_each_card_has_what_fits_and_larger_batches_need_more() -> None:
    before: set[tuple[str, str]] = set()
    for card in CARDS:
        found = fitting(int(float(card[:-2]) * 1e9))
        assert all(recipe.peak <= USABLE * float(card[:-2]) * 1e9 for recipe in found)
        pairs = {(recipe.model, recipe.method) for recipe in found}
        assert len(pairs) == len(found)
        assert before < pairs
        before = pairs
    assert {model for model, _ in before} == SHAPES.keys()
    peaks = {(recipe.model, recipe.method, recipe.batch_size): recipe.peak for recipe in KNOWN}
    assert all(peak > peaks[model, method, 1] for (model, method, batch), peak in peaks.items() if batch > 1)


def test_the_list_of_a_card_has_whole_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs", "--for", "24GB"]) == 0
    printed = capsys.readouterr().out
    commands = [shlex.split(line) for line in printed.splitlines() if line.startswith("    python ")]
    found = [*fitting(24_000_000_000), *fitting_images(24_000_000_000)]
    assert found[-1].config == "diffusion/dreambooth_flux"
    assert commands == [["python", "-m", "lit_efficient", "fit", *recipe.options()] for recipe in found]
    assert max(map(len, printed.splitlines())) < 330
    assert main(["configs", "--for", "24GB", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [shlex.split(entry["command"]) for entry in entries] == commands
    assert [entry["peak"] for entry in entries] == [recipe.peak for recipe in found]


def test_a_method_that_is_not_planned_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs", "--for", "80GB"]) == 0
    models = capsys.readouterr().out.split("\n\n")[0].split("\nGPT-OSS: ")
    assert [part.count("not planned: its experts are floats until QuantizeBase") for part in models] == [0, 1]


def test_a_recipe_of_texts_for_a_model_of_images_freezes_its_vision_tower() -> None:
    [recipe] = [one for one in KNOWN if label(one) == "gemma-3-4b-pt-lora-1"]
    parts: Any = Parts(args=["fit", *recipe.options(), "--trainer.accelerator=cpu"])
    assert parts.model.model.frozen == ["vision_tower", "multi_modal_projector"]


def test_a_size_is_needed_and_may_be_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs", "--for", "much"]) == 2
    assert "--for must be a number of bytes above 0 or a text like 12GiB, got 'much'" in capsys.readouterr().err
    assert main(["configs", "--for", "24"]) == 2
    assert "--for must be a size with its unit, such as 24GiB, got '24'" in capsys.readouterr().err
    assert main(["configs", "--for", "24MB"]) == 0
    assert "no recipe fits in 24MB" in capsys.readouterr().out


@pytest.mark.turns(2)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_recipe_goes_from_rows_to_a_model_of_transformers(method: str, tmp_path: Path) -> None:
    """With a tiny model in place of the named one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = train_chat_tokenizer([f"{n} + {n} = {2 * n}" for n in range(50)], 400)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = Qwen3Config(
        vocab_size=len(tokenizer), intermediate_size=512, **sizes
    )  # states in 8 bits need 4,096 weights
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    Path("data").mkdir()
    with Path("data/train.jsonl").open("w") as file:
        for n in range(200):
            turns = [
                {"role": "user", "content": f"{n} + {n}?"},
                {"role": "assistant", "content": f"{n} + {n} = {2 * n}"},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    options = Recipe(str(tmp_path / "base"), "tiny", method, 2048, 4, 0).options()
    options += ["--data.max_length", "64", "--data.num_workers", "0", "--trainer.max_steps", "2"]
    options += ["--trainer.logger", "false", "--trainer.accelerator", "cpu", "--trainer.limit_val_batches", "1"]
    options += ["--trainer.val_check_interval", "8", "--trainer.enable_model_summary", "false"]
    assert main(["fit", *options, "--model.warmup_steps", "0"]) == 0
    run = "recipe_full" if method == "full" else "recipe"
    command = ["export", f"runs/llm/{run}/latest/last.ckpt", "--format", "merged", "--output", "merged"]
    assert main(command) == 0  # compares the outputs of transformers with those of the checkpoint
    trained = AutoModelForCausalLM.from_pretrained("merged").state_dict()
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    changed = {name for name in before if not torch.equal(before[name], trained[name])}
    assert any(name.endswith("q_proj.weight") for name in changed)
    assert AutoTokenizer.from_pretrained("merged").chat_template == tokenizer.chat_template
