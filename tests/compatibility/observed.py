"""What can be seen of a checkpoint from outside, as numbers and text: `make` writes it down, the tests see it again.

Everything is reached by public names, or by the command line; the current folder is that of the files.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from lit_efficient.__main__ import main
from lit_efficient.mechanisms.restore import (
    take_weights,
)  # the only name here that is not public: if it moves, this line follows
from tests.compatibility.cases import ALL, END, SAVED_AT, Notes, run
from tests.compatibility.toys import WORDS, latents

# Formats in which the command `export` writes a checkpoint, with further arguments of it.
EXPORTS: dict[str, tuple[str, str, list[str]]] = {
    "gpt": ("gpt", "safetensors", []),
    "llama": ("llama", "merged", []),
    "adapter": ("adapter", "peft", []),
    "adapter_merged": ("adapter", "merged", ["--base", "base"]),
    "preference": ("preference", "peft", []),
    "nf4": ("nf4", "safetensors", []),
    "int4": ("int4", "safetensors", []),
    "ia3": ("ia3", "peft", []),
    "prefix": ("prefix", "peft", []),
    "latent_diffusion": ("latent_diffusion", "safetensors", []),
}
PLAIN = ("llama", "distillation", "autoencoding", "latent_diffusion")  # tasks that Lightning loads without a technique
# What the command `generate` takes.
WRITERS = ("gpt", "llama", "adapter", "alone", "prefix", "preference", "distillation", "fit")
TEXT = "def value(self):\n    return self.x\n\n\nclass Reader:\n    pass\n\n\n" * 12


def figures(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """One number a tensor, in which each of its elements counts differently."""
    return {name: _figure(tensor) for name, tensor in sorted(tensors.items())}


def _figure(tensor: Tensor) -> float:
    flat = tensor.detach().double().flatten()
    weights = 0.5 + torch.arange(len(flat)) % 7 / 7
    return _short(float((flat * weights).sum()))


def _short(number: float) -> float:
    return float(f"{number:.8g}")


def numbers(tensor: Tensor) -> list[float]:
    """All its elements."""
    return [_short(number) for number in tensor.tolist()]


def resumed(name: str, folder: Path) -> tuple[dict[str, Any], Notes]:
    """How a run goes on, and notes of its beginning."""
    module, notes = run(ALL[name], folder, ckpt_path=Path(f"{name}.ckpt"))
    seen = {"losses": [_short(loss) for loss in notes.losses], "weights": figures(module.state_dict())}
    for technique in module.trainer.callbacks:
        if hasattr(technique, "averaged"):
            with technique.averaged(module):
                seen["average"] = figures(dict(module.named_parameters()))
    if (folder / "snapshots").exists():
        seen["snapshots"] = {file.name: figures(load_file(file)) for file in (folder / "snapshots").iterdir()}
    return seen, notes


def restored(name: str) -> dict[str, Any]:
    """What a module computes with the weights of a checkpoint, rebuilt without a trainer."""
    seen: dict[str, Any] = {}
    for weights in ("auto", "raw"):
        if seen and seen["auto"]["weights"] == "raw":
            break
        checkpoint = torch.load(f"{name}.ckpt", map_location="cpu", weights_only=True)
        module = ALL[name].module()
        if "hyper_parameters" in checkpoint:  # a task is built from its checkpoint alone
            module = type(module)(**checkpoint["hyper_parameters"])
        module.configure_model()
        module.on_load_checkpoint(checkpoint)
        held = take_weights(module, checkpoint, weights)
        with torch.no_grad():
            seen[weights] = {"weights": held, "outputs": numbers(ALL[name].probe(module))}
    return seen


def loaded(name: str) -> list[float]:
    """What a task computes that Lightning has loaded from a checkpoint alone."""
    module = type(ALL[name].module()).load_from_checkpoint(f"{name}.ckpt", weights_only=True).eval()
    with torch.no_grad():
        return numbers(ALL[name].probe(module))


def latent_means(folder: Path) -> list[float]:
    """A batch of latents from a copy of the cache, which is refused where it is not of what it is asked for."""
    shutil.copytree("latents", folder / "latents")
    data = latents(str(folder / "latents"))
    data.prepare_data()
    data.setup("fit")
    return numbers(next(iter(data.val_dataloader()))["mean"].flatten())


def sampled() -> list[float]:
    """The mean brightness of the rows of images that a checkpoint of latent diffusion makes alone."""
    module = type(ALL["latent_diffusion"].module()).load_from_checkpoint("latent_diffusion.ckpt", weights_only=True)
    return numbers(module.eval().sample_images(3, seed=1).float().mean(-1).flatten())


# By the command line --------------------------------------------------------------------------------------------------


def command(*arguments: str) -> str:
    """What a command prints. It must succeed."""
    printed, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complained):
        code = main(list(arguments))
    assert code == 0, f"{' '.join(arguments)}: {complained.getvalue()}"
    return printed.getvalue()


def generated(file: str) -> str:
    """What a language model writes."""
    prompt = ["--prompt", WORDS[1], "--max_new_tokens", "8", "--temperature", "0", "--device", "cpu"]
    return command("generate", "--ckpt", file, *prompt)


def exported(name: str, folder: Path) -> dict[str, Any]:
    """What is in an exported folder."""
    case, form, more = EXPORTS[name]
    more = [*more, "--weights", "raw", "--no-check"]  # that release had no choice of weights
    command("export", f"{case}.ckpt", "--format", form, "--output", str(folder / name), *more)
    (file,) = (folder / name).glob("*.safetensors")
    seen: dict[str, Any] = {"tensors": figures(load_file(file))}
    if form == "peft":
        config = json.loads((folder / name / "adapter_config.json").read_text())
        later = ("base_model_name_or_path", "revision")  # which that release did not write
        seen["config"] = {key: value for key, value in config.items() if key not in later}
    return seen


def swept(folder: Path) -> dict[str, float]:
    """An average of a width that was not tracked, made of the snapshots."""
    arguments = ["--sigma_rel", "0.08", "--checkpoint", "power_ema.ckpt", "--output", str(folder)]
    command("ema-sweep", "snapshots", *arguments)
    (file,) = folder.glob("*.ckpt")
    return figures(torch.load(file, weights_only=True)["state_dict"])


def written(folder: Path, parts: dict[str, Any], *callbacks: Any) -> Path:
    """A config of a run of the command line, which writes into ``folder``."""
    saving = {"dirpath": str(folder / "run"), "save_last": True, "save_top_k": 0, "every_n_train_steps": SAVED_AT}
    trainer = {
        **{"accelerator": "cpu", "max_steps": SAVED_AT, "logger": False, "default_root_dir": str(folder)},
        **{"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0},
        "callbacks": ["ExactResume", *callbacks, {"class_path": "ModelCheckpoint", "init_args": saving}],
    }
    (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": trainer, **parts}, sort_keys=False))
    return folder / "config.yaml"


def corpus(folder: Path) -> dict[str, Any]:
    """Arguments of PythonCorpus, under the keys that it has now."""
    (folder / "text.py").write_text(TEXT)
    return {
        **{"files": {"paths": [str(folder / "text.py")]}, "vocab_size": 257, "sequence_length": 8, "batch_size": 4},
        **{"val_fraction": 0.3, "cache_dir": str(folder / "cache")},
    }


def corpus_config(folder: Path) -> Path:
    """A run of a task on data of ours."""
    parts = {
        "model": {
            "class_path": "LanguageModeling",
            "init_args": {"model": {"dim": 2, "depth": 1, "num_heads": 1, "hidden_dim": 8, "max_length": 16}},
        },
        "data": {
            "class_path": "lit_efficient.data.python_corpus.PythonCorpus",
            "init_args": corpus(folder),
        },
        "optimizer": {"class_path": "Lion", "init_args": {"lr": 0.01}},
    }
    return written(folder, parts, {"class_path": "EMA", "init_args": {"decay": 0.7}})


def mixed_config(folder: Path, parts: list[dict[str, Any]]) -> Path:
    """A run of somebody else's classes, which keep what the config names."""
    data = {"class_path": "tests.compatibility.toys.Mixed", "init_args": {"parts": parts}}
    return written(folder, {"model": {"class_path": "tests.compatibility.toys.Plain"}, "data": data})


def fitted(folder: Path) -> dict[str, Any]:
    """How a run of the command line goes on."""
    arguments = ["-c", str(corpus_config(folder)), "--ckpt_path", "fit.ckpt"]
    command("fit", *arguments, "--trainer.max_steps", str(END))
    checkpoint = torch.load(folder / "run" / "last.ckpt", weights_only=True)
    validated = command("validate", *arguments, "--trainer.limit_val_batches", "4")
    (loss,) = re.findall(r"val/loss\D+([\d.]+)", validated)
    return {
        "global_step": checkpoint["global_step"],
        "weights": figures(checkpoint["state_dict"]),
        "average": figures(checkpoint["callbacks"]["EMA"]["average"]),
        "val/loss": float(loss),
    }


def fitted_mixed(folder: Path) -> dict[str, float]:
    """How such a run goes on."""
    arguments = ["-c", str(mixed_config(folder, [{"class_path": "PythonCorpus"}])), "--ckpt_path", "mixed.ckpt"]
    command("fit", "--allow-import", "tests", *arguments, "--trainer.max_steps", str(END))
    return figures(torch.load(folder / "run" / "last.ckpt", weights_only=True)["state_dict"])
