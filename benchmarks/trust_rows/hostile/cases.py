"""The list of hostile cases, and what they are made of: payloads, a config, checkpoints, the commands that take one."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import timeit
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

CANARY = "CANARY"
SECRET = "nine-ordinary-herons-2718"
SECONDS = 10
BYTES = 2 << 30
Act = list[str] | Callable[[], object]
MAKERS: dict[str, Callable[[], Act]] = {}


class Payload:
    """What a pickle makes of it is the result of a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


TOUCH = f"open({CANARY!r}, 'w').close()"
PAYLOADS: dict[str, Callable[[], Payload]] = {
    "system": lambda: Payload(os.system, f"touch {CANARY}"),
    "exec": lambda: Payload(exec, TOUCH),
    "eval": lambda: Payload(eval, TOUCH),
    "popen": lambda: Payload(subprocess.Popen, ["touch", CANARY]),
    "mkdir": lambda: Payload(os.mkdir, CANARY),
    "open": lambda: Payload(open, CANARY, "w"),
    "timeit": lambda: Payload(timeit.timeit, TOUCH, "pass", timeit.default_timer, 1),
    "import": lambda: Payload(importlib.import_module, plant("planted")),
    "runpy": lambda: Payload(importlib.import_module("runpy").run_path, f"{plant('planted')}.py"),
    "partial": lambda: Payload(functools.reduce, os.mkdir, [CANARY]),
    "write_text": lambda: Payload(Path.write_text, Path(CANARY), "x"),
    "extract": lambda: Payload(dotted("shutil.unpack_archive"), _archive(), CANARY),
    "copy": lambda: Payload(dotted("shutil.copy"), "../outside/secret.txt", CANARY),
    "torch_save": lambda: Payload(dotted("torch.save"), {}, CANARY),
    "runstring": lambda: Payload(dotted("numpy.testing._private.utils.runstring"), TOUCH, {}),
    "hub": lambda: Payload(dotted("torch.hub.load"), ".", "hubbed", "local"),
    "listen": lambda: Payload(dotted("socket.create_connection"), ("127.0.0.1", 9)),
}


def dotted(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def plant(name: str) -> str:
    Path(f"{name}.py").write_text(f"{TOUCH}\nclass Model: pass\ndef f(*a, **k): {TOUCH}\n")
    return name


def _archive() -> str:
    with zipfile.ZipFile("archive.zip", "w") as archive:
        archive.writestr("x", "x")
    return "archive.zip"


def case(name: str) -> Callable[[Callable[..., Act]], Callable[..., Act]]:
    def added(make: Callable[..., Act]) -> Callable[..., Act]:
        assert name not in MAKERS, name
        MAKERS[name] = make
        return make

    return added


def cases_of(kind: str, names: Iterable[str]) -> Callable[[Callable[[str], Act]], Callable[[str], Act]]:
    """A function of a name as so many cases."""

    def added(make: Callable[[str], Act]) -> Callable[[str], Act]:
        for name in names:
            case(f"{kind}-{name}")(functools.partial(make, name))
        return make

    return added


# Configs and commands

BORING = "lightning.pytorch.demos.boring_classes"


def config(name: str = "hostile.yaml", **parts: Any) -> str:
    """A config of a fit of two steps; the checkpoints of `checkpoint` are at the first one."""
    trainer = {"accelerator": "cpu", "max_steps": 2, "logger": False, "enable_progress_bar": False}
    trainer |= {"enable_model_summary": False, "limit_val_batches": 0, **parts.pop("trainer", {})}
    whole = {"model": {"class_path": f"{BORING}.BoringModel"}, "data": {"class_path": f"{BORING}.BoringDataModule"}}
    Path(name).write_text(yaml.safe_dump({**whole, "trainer": trainer, **parts}))
    return name


def fit(**parts: Any) -> Act:
    return ["fit", "-c", config(**parts)]


def checkpoint(**parts: Any) -> dict[str, Any]:
    """A checkpoint of the boring model, with parts of it replaced."""
    import torch

    weights = {"layer.weight": torch.zeros(2, 32), "layer.bias": torch.zeros(2)}
    adam = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    whole = {"epoch": 0, "global_step": 1, "pytorch-lightning_version": "2.6.6", "state_dict": weights}
    return {**whole, "callbacks": {}, "optimizer_states": [adam], "lr_schedulers": [], **parts}


def saved(content: Any, path: str = "evil.ckpt", **options: Any) -> str:
    import torch

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path, **options)
    return path


COMMANDS: dict[str, Callable[[str], Act]] = {
    "fit": lambda path: [*_words(), "--ckpt_path", path],
    "validate": lambda path: [*_words("validate"), "--ckpt_path", path],
    "test": lambda path: [*_words("test"), "--ckpt_path", path],
    "predict": lambda path: [*_words("predict"), "--ckpt_path", path],
    "last": lambda path: as_last(path),  # noqa: PLW0108 (it is defined below)
    "average": lambda path: ["average", path, path, "--output", "mean.ckpt"],
    "export": lambda path: ["export", path, "--output", "out"],
    "export-merged": lambda path: ["export", path, "--format", "merged", "--output", "out"],
    "export-base": lambda path: ["export", saved(checkpoint(), "good.ckpt"), "--base", path, "--output", "out"],
    "generate": lambda path: ["generate", "--ckpt", path, "--prompt", "x"],
    "sample": lambda path: ["sample", "--ckpt", path, "--output", "x.png"],
    "report": lambda path: _report(path),  # noqa: PLW0108 (it is defined below)
    "ema-sweep": lambda path: _sweep(path),  # noqa: PLW0108 (it is defined below)
    "restore": lambda path: lambda: restored(path),
    "io": lambda path: lambda: dotted("lit_efficient.SafeCheckpointIO")(fallback=True).load_checkpoint(path),
    "tokenizer": lambda path: lambda: dotted("lit_efficient.data.text.chat_tokenizer.load_chat_tokenizer")(path),
    "autoencoder": lambda path: lambda: dotted("lit_efficient.models.libraries.autoencoders.build_autoencoder")(path),
}


def _words(command: str = "fit") -> list[str]:
    return [command, "-c", config()]


def as_last(path: str, *more: str, **parts: Any) -> list[str]:
    folder = Path("runs/hostile/2026-01-01_00-00-00")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text("{}")
    os.rename(path, folder / "last.ckpt")
    os.symlink(folder.name, folder.parent / "latest")
    return ["fit", "-c", config(**parts), "--ckpt_path", "last", *more]


def _report(path: str) -> list[str]:
    as_last(path)
    return ["report", "runs/hostile/latest"]


def _sweep(path: str) -> list[str]:
    from safetensors.torch import save_file

    tensors = checkpoint()["state_dict"]
    for step in (1, 2):
        save_file(tensors, f"average-step={step:08d}-sigma_rel=0.05.safetensors")
    return ["ema-sweep", ".", "--sigma_rel", "0.05", "--checkpoint", path]


def restored(path: str) -> object:
    return dotted("lit_efficient.restore")(dotted(f"{BORING}.BoringModel")(), path)


def try_each(readers: Iterable[Callable[[], object]]) -> None:
    """All of them, whatever one of them says: what they may not do is seen otherwise."""
    for reader in readers:
        try:
            reader()
        except MemoryError:
            raise
        except Exception as error:
            print(f"{type(error).__name__}: {str(error)[:200]}")


def model_folder(**fields: Any) -> str:
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models

    folder = Path("model")
    folder.mkdir(exist_ok=True)
    for module in (
        "planted",
        "model/planted",
        "model/modeling_evil",
        "model/configuration_evil",
        "model/tokenization_evil",
    ):
        plant(module)
    small = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 8,
    }
    whole = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **small, **fields}
    (folder / "config.json").write_text(json.dumps({name: value for name, value in whole.items() if value is not None}))
    save_file({"x": dotted("torch.zeros")(1)}, folder / "model.safetensors")
    backend = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}')
    return str(folder)


def image_data(folder: str = "data") -> object:
    opened = dotted("lit_efficient.data.images.image_tables.open_table")
    about = dotted("lit_efficient.data.images.image_set.ImageSet")(folder)
    table = opened(about, "train", dotted("lit_efficient.data.images.image_columns.ImageColumns")())
    return [_look(table.read(row)) for row in range(len(table))]


def _look(content: bytes) -> object:
    pixels = importlib.import_module("lit_efficient.data.images.image_pixels")
    view = dotted("lit_efficient.data.images.image_view.ImageView")(resolution=64)
    try:
        pixels.upright_size(content)
        return view.look(content, (64, 64), dotted("lit_efficient.mechanisms.order.keyed_batch_sampler.Key")(0, 0), 0)
    except pixels.UnreadableImage as error:
        raise dotted("lit_efficient.ConfigurationError")(str(error)) from error


def data_folder() -> Path:
    folder = Path("data")
    folder.mkdir(exist_ok=True)
    return folder


def mark_unread(path: Path) -> None:
    """A time of reading that any read changes."""
    os.utime(path, (1, 2))
