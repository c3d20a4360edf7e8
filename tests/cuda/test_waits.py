"""No shipped config waits for its GPU more than once an optimizer step, nor any technique alone; see `meta_device`."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lit_efficient.data.text.chat_tokenizer import train_chat_tokenizer
from lit_efficient.mechanisms import documents
from tests.configs.following import CONFIGS, merge
from tests.cuda.meta_device import MetaStrategy
from tests.data.latents.mds_kit import write_mds
from tests.support_cli import Parts

# recipe_full and recipe_full_24gb are overlays over recipe.yaml. The network of image_text waits in
# each forward: transformers splits its images by their values on the device. The last three wait for each token that
# they write.
NOT_HERE = ("recipe_full", "recipe_full_24gb", "image_text", "grpo", "best_of_n", "on_policy_distillation")
TASKS = sorted(
    path
    for path in CONFIGS.rglob("*.yaml")
    if path.parent.name in ("diffusion", "llm", "tasks") and path.stem not in NOT_HERE
)
# transformers asks of each mask whether there is padding.
MASKED = ("classification", "embedding")
TEXT = "def main(reader, writer):\n    return reader.read(writer)\n" * 60
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 1024}
DIGITS = {"image_size": 8, "autoencoder": {"width": 8}, "autoencoder_steps": 2, "judge_steps": 2, "batch_size": 8}
DIT = {"size": 2, "width": 16, "depth": 2, "heads": 2}
VAE = {"_class_name": "AutoencoderKL", "latent_channels": 4, "block_out_channels": [8], "norm_num_groups": 4}
# What makes a task small, by its class or that of its data.
SMALLER: dict[str, Any] = {
    "PythonCorpus": {"vocab_size": 280, "sequence_length": 16, "val_fraction": 0.3, "files": {"paths": ["texts"]}},
    "DigitImages": {"image_size": 8},
    "LatentDigits": DIGITS,
    "LanguageData": {"train": "rows.jsonl", "tokenizer": "runs/llm/base", "max_length": 64, "num_workers": 0},
    "PreferenceData": {"rows": {"max_rows": 40}, "val_fraction": 0.2},
    "PhotoCrops": {"crops": 6, "batch_size": 4, "judge_steps": 0},
    "ImageData": {"batch_size": 2},
    "EncodedData": {"folder": "latents", "held_out": 4, "batch_size": 4, "num_workers": 0},
    "Preference": {"start_from": None},
    "TextEmbedding": {"sizes": [8, 16]},
    "UnpairedPreference": {"start_from": None},
}
LEFT_OUT = {"SampleText", "SampleImages", "ModelCheckpoint", "Compile"}  # act beside training, or take long


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the configs start from: a base with its tokenizer, texts, rows, images, latents, all tiny."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    folder = tmp_path_factory.mktemp("things")
    base = folder / "runs" / "llm" / "base"
    tokenizer = train_chat_tokenizer([TEXT], 300)
    tokenizer.save_pretrained(base)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**TINY, vocab_size=len(tokenizer))).save_pretrained(base)
    (folder / "texts").mkdir()
    for number in range(8):
        (folder / "texts" / f"{number}.py").write_text(TEXT.replace("main", f"main_{number}"))
    (folder / "rows.jsonl").write_text(
        "".join(f'{{"prompt": "{n} + {n}?", "completion": "{2 * n}"}}\n' for n in range(100))
    )
    comments = [
        line.removeprefix("#").removeprefix("   ")
        for line in (CONFIGS / "diffusion" / "images_autoencoder.yaml").read_text("utf-8").splitlines()
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec("\n".join(comments[comments.index("python - <<'END'") + 1 : comments.index("END")]), {})
    codes = np.random.default_rng(0).integers(0, 256, (24, 4 * 32 * 32), dtype=np.uint8)
    columns = {"label": ("str", None), "label_as_text": ("str", None), "vae_output": ("uint8", None)}
    texts = [str(row % 7).encode() for row in range(24)]
    (folder / "latents").mkdir()
    rows = {"label": texts, "label_as_text": texts, "vae_output": [row.tobytes() for row in codes]}
    write_mds(folder / "latents", columns, rows, [slice(0, 24)])
    return folder


@pytest.fixture(autouse=True)
def _here(things: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(things)
    for tolerance in ("_EXACT", "_COARSE"):
        monkeypatch.setattr(documents, tolerance, 2.0)  # no leak is greater than those that it reads


def smaller(path: Path) -> dict[str, Any]:
    """A task's config on few rows, with nothing compiled and nothing saved."""
    written: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    written["trainer"] |= {"logger": False, "enable_model_summary": False, "enable_checkpointing": False}
    written["trainer"] |= {"limit_val_batches": 0, "num_sanity_val_steps": 0, "precision": "32-true"}
    written["trainer"] |= {"val_check_interval": None}
    callbacks = written["trainer"]["callbacks"]
    written["trainer"]["callbacks"] = [entry for entry in callbacks if entry["class_path"] not in LEFT_OUT]
    for entry in written["trainer"]["callbacks"]:
        if entry["class_path"] == "LowBitOptimizer":
            entry["init_args"]["min_size"] = 0
        if entry["class_path"] == "StochasticDepth":
            entry["init_args"]["rate"] = 0.5  # of the few rows
        if entry["class_path"] == "ThroughputBar":
            entry["init_args"] = {"lines": 1}  # it reads the loss for each
    for key in ("model", "data"):
        part = written[key]
        arguments = part.setdefault("init_args", {})
        merge(arguments, SMALLER.get(part["class_path"], {}))
    model, data = written["model"]["init_args"], written["data"]["init_args"]
    if path.stem == "language_model":
        merge(model, {"model": {"dim": 16, "depth": 2, "num_heads": 2, "max_length": 64}})
    if "config_fields" in model.get("model", {}):
        merge(model, {"model": {"config_fields": TINY}})
    if path.stem.startswith("llama") or path.stem == "recipe":
        merge(model, {"model": {"name_or_path": "runs/llm/base", "dtype": "float32"}})
    if path.stem == "imagenet_int8":
        merge(model, {"backbone": {"init_args": {"width": 16, "depth": 1, "heads": 2}}})
        data["autoencoder"]["init_args"] = {"config_fields": VAE}
    elif "Latent" in written["data"]["class_path"]:
        backbone = model.get("backbone") or model["teacher"]
        if path.stem == "photos_all":
            data["autoencoder"] = {"class_path": "lit_efficient.DiffusersModelConfig"}
            data["autoencoder"]["init_args"] = {"config_fields": {**VAE, "latent_channels": 8, "sample_size": 8}}
            data["build"] = True
            merge(data["images"]["init_args"], SMALLER["PhotoCrops"])
        elif "name_or_path" not in backbone.get("init_args", backbone):  # a tiny pipeline is small enough
            merge(backbone.get("init_args", backbone), DIT)
    return written


LANGUAGE, DIFFUSION = CONFIGS / "tasks" / "language_model.yaml", CONFIGS / "tasks" / "latent_diffusion.yaml"
TUNED = CONFIGS / "llm" / "lora.yaml"  # of transformers' making, on packed rows
PACKED = [{"class_path": "PrefixTuning", "init_args": {"num_virtual_tokens": 2, "init": "random"}}]
SLIDING = {"use_sliding_window": True, "sliding_window": 512, "layer_types": ["sliding_attention"] * 2}
PADDED = {"chat": {"train_on": "assistant"}, "pack": False}
LOGGED = {"logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}}, "log_every_n_steps": 100}
LIVE = {"init_args": {"cached": False, "build": False}}
# Techniques at settings of which no shipped config has any, over the configs that they are put in the place of.
FURTHER: dict[str, tuple[Path, list[Any] | None, dict[str, Any]]] = {
    "prefix on packed rows": (TUNED, PACKED, {}),
    "prefix behind a window": (TUNED, PACKED, {"model": {"init_args": {"model": {"config_fields": SLIDING}}}}),
    "padded rows": (TUNED, None, {"data": {"init_args": PADDED}, "trainer": LOGGED}),
    "encoded live": (CONFIGS / "diffusion" / "photos_all.yaml", [], {"data": LIVE}),
    "cached teacher": (CONFIGS / "llm" / "distillation.yaml", None, {"model": {"init_args": {"cache_top_k": 4}}}),
    "average on the host": (LANGUAGE, [{"class_path": "EMA", "init_args": {"device": "cpu"}}], {}),
    "snapshots on the host": (LANGUAGE, [{"class_path": "CheckpointAverage", "init_args": {"every_n_steps": 1}}], {}),
    "blocks by rows": (DIFFUSION, [{"class_path": "StochasticDepth", "init_args": {"skip": "sample"}}], {}),
    "weighed steps": (DIFFUSION, [{"class_path": "SNRWeighting"}], {}),
    "metered": (TUNED, [{"class_path": "ThroughputMeter"}], {"trainer": LOGGED}),
}


def waits(config: dict[str, Any], *more: str) -> tuple[Counter[str], Counter[str]]:
    """Of a micro-batch that makes no step, and of one that makes it: the most of what lies between start and end."""
    each = config["trainer"]["accumulate_grad_batches"] = min(2, config["trainer"].get("accumulate_grad_batches", 1))
    # The first step checks and fills what later ones use, the last one ends the run.
    config["trainer"] |= {"max_steps": 3, "limit_train_batches": 4 * each}
    Path("small.yaml").write_text(yaml.safe_dump(config))
    with ExitStack() as watching:
        parts: Any = Parts(args=["fit", "-c", "small.yaml", *more])
        connector = parts.trainer._accelerator_connector
        strategy = MetaStrategy(watching)
        strategy.precision_plugin, strategy.checkpoint_io = connector.precision_plugin, None
        connector.strategy = strategy
        parts.trainer.fit(parts.model, datamodule=parts.datamodule)
    steps = [before for before, _ in strategy.batches]
    found: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for number, (before, places) in enumerate(strategy.batches[:-1]):
        if before > 0:
            most = found[steps[number + 1] > before]
            most |= places
    return found


def told(found: tuple[Counter[str], Counter[str]]) -> str:
    named = zip(("micro-batch", "step"), found)
    return "".join(f"\n  {kind}: {n} x {place}" for kind, places in named for place, n in places.items())


@pytest.mark.turns(8, always=["tasks/language_model"])
@pytest.mark.filterwarnings("ignore:Total length of")  # what is read is answered by ones
@pytest.mark.parametrize("path", TASKS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_config_waits_once_a_step(path: Path) -> None:
    config = smaller(path)
    parts = config["trainer"].get("callbacks", [])  # nothing is validated here, by which one could stop
    config["trainer"]["callbacks"] = [part for part in parts if part["class_path"] != "EarlyStopping"]
    check(waits(config), allowed=1 + (path.stem in MASKED))


@pytest.mark.turns(4)
@pytest.mark.filterwarnings("ignore:Total length of")
@pytest.mark.parametrize("name", FURTHER)
def test_a_technique_waits_once_a_step(name: str) -> None:
    path, callbacks, changes = FURTHER[name]
    config = smaller(path)
    if callbacks is not None:
        config["trainer"]["callbacks"] = [{"class_path": "ExactResume"}, *callbacks]
        config["trainer"]["callbacks"].append({"class_path": "ThroughputBar", "init_args": {"lines": 1}})
    merge(config, changes)
    allowed = 2 if "on the host" in name else 1  # it copies there what it keeps there
    check(waits(config), allowed)


def check(found: tuple[Counter[str], Counter[str]], allowed: int = 1) -> None:
    assert found[0].total() == 0, told(found)
    assert found[1].total() <= allowed, told(found)
