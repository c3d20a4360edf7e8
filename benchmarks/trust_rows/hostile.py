"""Hostile inputs, each with a canary: a file ``CANARY`` that their code would make, a secret beside the case's folder.

A case makes its files in a folder of its own, beside one with a secret and files to fall victim, and gives them to the
real command or to the reader that takes such a file. An audit hook, the times at which files were read and the folder
itself tell what was done; processor time and memory are limited for what comes after the input was made.
"""

from __future__ import annotations

import functools
import gzip
import importlib
import io
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import tarfile
import timeit
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.trust_rows import Piece
from tests import processes

CANARY, SECRET = "CANARY", "nine-ordinary-herons-2718"
SECONDS, BYTES = 10, 2 << 30
Act = list[str] | Callable[[], object]
_MAKERS: dict[str, Callable[[], Act]] = {}


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
    "import": lambda: Payload(importlib.import_module, _module("planted")),
    "runpy": lambda: Payload(importlib.import_module("runpy").run_path, f"{_module('planted')}.py"),
    "partial": lambda: Payload(functools.reduce, os.mkdir, [CANARY]),
    "write_text": lambda: Payload(Path.write_text, Path(CANARY), "x"),
    "extract": lambda: Payload(_dotted("shutil.unpack_archive"), _archive(), CANARY),
    "copy": lambda: Payload(_dotted("shutil.copy"), "../outside/secret.txt", CANARY),
    "torch_save": lambda: Payload(_dotted("torch.save"), {}, CANARY),
    "runstring": lambda: Payload(_dotted("numpy.testing._private.utils.runstring"), TOUCH, {}),
    "hub": lambda: Payload(_dotted("torch.hub.load"), ".", "hubbed", "local"),
    "listen": lambda: Payload(_dotted("socket.create_connection"), ("127.0.0.1", 9)),
}


def _dotted(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def _module(name: str) -> str:
    Path(f"{name}.py").write_text(f"{TOUCH}\nclass Model: pass\ndef f(*a, **k): {TOUCH}\n")
    return name


def _archive() -> str:
    with zipfile.ZipFile("archive.zip", "w") as archive:
        archive.writestr("x", "x")
    return "archive.zip"


def case(name: str) -> Callable[[Callable[..., Act]], Callable[..., Act]]:
    def added(make: Callable[..., Act]) -> Callable[..., Act]:
        assert name not in _MAKERS, name
        _MAKERS[name] = make
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

_BORING = "lightning.pytorch.demos.boring_classes"


def config(name: str = "hostile.yaml", **parts: Any) -> str:
    """A config of a fit of one step."""
    trainer = {"accelerator": "cpu", "max_steps": 1, "logger": False, "enable_progress_bar": False}
    trainer |= {"enable_model_summary": False, "limit_val_batches": 0, **parts.pop("trainer", {})}
    whole = {"model": {"class_path": f"{_BORING}.BoringModel"}, "data": {"class_path": f"{_BORING}.BoringDataModule"}}
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
    "last": lambda path: _last(path),  # noqa: PLW0108 (it is defined below)
    "average": lambda path: ["average", path, path, "--output", "mean.ckpt"],
    "export": lambda path: ["export", path, "--output", "out"],
    "export-merged": lambda path: ["export", path, "--format", "merged", "--output", "out"],
    "export-base": lambda path: ["export", saved(checkpoint(), "good.ckpt"), "--base", path, "--output", "out"],
    "generate": lambda path: ["generate", "--ckpt", path, "--prompt", "x"],
    "sample": lambda path: ["sample", "--ckpt", path, "--output", "x.png"],
    "report": lambda path: _report(path),  # noqa: PLW0108 (it is defined below)
    "ema-sweep": lambda path: _sweep(path),  # noqa: PLW0108 (it is defined below)
    "restore": lambda path: lambda: _restore(path),
    "io": lambda path: lambda: _dotted("lit_efficient.SafeCheckpointIO")(fallback=True).load_checkpoint(path),
    "tokenizer": lambda path: lambda: _dotted("lit_efficient.data.text.chat_tokenizer.load_chat_tokenizer")(path),
    "autoencoder": lambda path: lambda: _dotted("lit_efficient.models.autoencoders.build_autoencoder")(path),
}


def _words(command: str = "fit") -> list[str]:
    return [command, "-c", config()]


def _last(path: str, *more: str, **parts: Any) -> list[str]:
    folder = Path("runs/hostile/2026-01-01_00-00-00")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text("{}")
    os.rename(path, folder / "last.ckpt")
    os.symlink(folder.name, folder.parent / "latest")
    return ["fit", "-c", config(**parts), "--ckpt_path", "last", *more]


def _report(path: str) -> list[str]:
    _last(path)
    return ["report", "runs/hostile/latest"]


def _sweep(path: str) -> list[str]:
    from safetensors.torch import save_file

    tensors = checkpoint()["state_dict"]
    for step in (1, 2):
        save_file(tensors, f"average-step={step:08d}-sigma_rel=0.05.safetensors")
    return ["ema-sweep", ".", "--sigma_rel", "0.05", "--checkpoint", path]


def _restore(path: str) -> object:
    return _dotted("lit_efficient.restore")(_dotted(f"{_BORING}.BoringModel")(), path)


# Pickles in checkpoints


@cases_of("pickle", [name for name in PAYLOADS if name != "system"])
def _payload(name: str) -> Act:
    return COMMANDS["fit"](saved(checkpoint(state_dict={"layer.weight": PAYLOADS[name]()})))


@cases_of("pickle-for", COMMANDS)
def _command(name: str) -> Act:
    return COMMANDS[name](saved(checkpoint(hyper_parameters=PAYLOADS["system"]())))


_PLACES = ("root", "datamodule_hyper_parameters", "callbacks", "optimizer_states", "lr_schedulers", "loops")


@cases_of("pickle-in", [*_PLACES, "lit_efficient", "language_modeling", "state_dict", "key", "MixedPrecision"])
def _place(name: str) -> Act:
    evil: Any = PAYLOADS["system"]()
    if name == "key":
        return COMMANDS["fit"](saved(checkpoint(**{"x": {(1, evil): 0}})))
    return COMMANDS["fit"](saved(evil if name == "root" else checkpoint(**{name: {"x": evil}})))


_FORMATS = (
    "legacy",
    "bare",
    "protocol-5",
    "protocol-0",
    "gzip",
    "tar",
    "script",
    "prefixed",
    "two-pickles",
    "setstate",
)


@cases_of("format", _FORMATS)
def _format(name: str) -> Act:
    import torch

    evil, path = checkpoint(x=PAYLOADS["exec"]()), Path("evil.ckpt")
    if name == "legacy":
        saved(evil, _use_new_zipfile_serialization=False)
    elif name == "bare":
        path.write_bytes(pickle.dumps({"state_dict": {}, "x": PAYLOADS["exec"]()}))
    elif name.startswith("protocol"):
        saved(evil, pickle_protocol=int(name[-1]))
    elif name == "gzip":
        path.write_bytes(gzip.compress(pickle.dumps(PAYLOADS["exec"]())))
    elif name == "tar":
        with tarfile.open(path, "w") as archive:
            for member in ("storages", "tensors", "pickle"):
                Path(member).write_bytes(pickle.dumps(PAYLOADS["exec"]()))
                archive.add(member)
    elif name == "script":
        torch.jit.script(torch.nn.Linear(1, 1)).save(path)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("evil/code/x.debug_pkl", pickle.dumps(PAYLOADS["exec"]()))
            archive.writestr("evil/constants.pkl", pickle.dumps(PAYLOADS["exec"]()))
    elif name == "prefixed":
        saved(checkpoint())
        path.write_bytes(pickle.dumps(PAYLOADS["exec"]()) + path.read_bytes())
    elif name == "two-pickles":
        saved(checkpoint())
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("other/data.pkl", pickle.dumps(PAYLOADS["exec"]()))
            archive.writestr("data.pkl", pickle.dumps(PAYLOADS["exec"]()))
    else:
        saved(checkpoint(x=_WithState()))
    return COMMANDS["fit"](str(path))


class _WithState:
    def __reduce__(self) -> Any:
        return torch_parameter(), (), {"__setstate__": PAYLOADS["exec"]()}


def torch_parameter() -> Any:
    import collections

    return collections.OrderedDict


# Checkpoints that hold data alone, and mean harm


@cases_of("data", ("instantiator", "class-path", "task", "name-or-path", "auto-map", "technique", "peft", "config"))
def _data(name: str) -> Act:
    _module("planted")
    parts: dict[str, Any] = {
        "instantiator": {"hyper_parameters": {"_instantiator": "planted.f", "_class_path": "planted.Model"}},
        "class-path": {"hyper_parameters": {"class_path": "planted.Model", "_class_path": "planted.Model"}},
        "task": {"language_modeling": {"task": "planted.Model"}, "hyper_parameters": {}},
        "name-or-path": {"language_modeling": {}, "hyper_parameters": {"model": {"name_or_path": _model_folder()}}},
        "auto-map": {"lit_efficient": {"adapters": _adapters()}},
        "technique": {"lit_efficient": {"transforms": [{"name": "planted.Model", "phase": 1, "arguments": {}}]}},
        "peft": {"lit_efficient": {"peft": {**_adapters(), "kind": "planted.Model"}}},
        "config": {"lit_efficient": {"config": {"model": {"class_path": "planted.Model"}}}},
    }[name]
    path = saved(checkpoint(**parts))

    def act() -> None:
        main = _dotted("lit_efficient.__main__.main")
        commands = [
            functools.partial(main, COMMANDS[command](path)) for command in ("fit", "export-merged", "generate")
        ]
        _each([*commands, lambda: _restore(path)])

    return act


def _adapters() -> dict[str, Any]:
    auto_map = {"AutoConfig": "planted.Model", "AutoModelForCausalLM": "planted.Model"}
    return {"root": "", "class": "planted.Model", "base": ".", "config": json.dumps({"model_type": "evil", **auto_map})}


def _nested(depth: int, width: int = 10) -> Any:
    """``width ** depth`` leaves in ``depth`` lists: a pickle keeps each once."""
    inner: Any = [0] * width
    for _ in range(depth):
        inner = [inner] * width
    return inner


@cases_of("bomb-in", ("hyper_parameters", "datamodule_hyper_parameters", "callbacks", "lit_efficient", "state_dict"))
def _bomb(name: str) -> Act:
    bomb = {"callbacks": {"x": {"y": _nested(12)}}, "lit_efficient": {"config": {"model": _nested(12)}}}
    return COMMANDS["fit"](saved(checkpoint(**{name: bomb.get(name, {"x": _nested(12)})})))


@cases_of("bomb", ("deflated", "overlapping", "long-entry", "expanded", "wide", "deep", "loop", "huge-shape"))
def _bomb_file(name: str) -> Act:
    import torch

    path = Path("evil.ckpt")
    if name in ("deflated", "overlapping"):
        saved(checkpoint())
        _with_zeros(path, overlapping=name == "overlapping")
    elif name == "long-entry":
        saved(checkpoint())
        content = bytearray(path.read_bytes())
        at = content.index(b"PK\x01\x02") + 20
        content[at : at + 8] = b"\xff\xff\xff\x7f" * 2
        path.write_bytes(content)
    elif name in ("expanded", "wide"):
        shape = (1 << 18, 1 << 18) if name == "expanded" else (1 << 40,)
        saved(checkpoint(state_dict={"layer.weight": torch.zeros(1).expand(shape)}))
    elif name == "huge-shape":
        saved({"state_dict": {"layer.weight": torch.zeros(7, 3)}, "optimizer_states": []})
        with zipfile.ZipFile(path) as archive:
            records = {member: archive.read(member) for member in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for member, content in records.items():
                archive.writestr(member, content.replace(b"K\x07K\x03\x86", b"J\xff\xff\xff\x7fK\x03\x86"))
    else:
        inner: Any = []
        if name == "loop":
            inner.append(inner)
        else:
            sys.setrecursionlimit(20_000)
            for _ in range(900):
                inner = [inner]
        saved(checkpoint(hyper_parameters={"x": inner}))
        sys.setrecursionlimit(1_000)
    return COMMANDS["average" if name in ("expanded", "wide", "huge-shape") else "fit"](str(path))


def _with_zeros(path: Path, overlapping: bool) -> None:
    """Add records of 16 GB in all to a checkpoint: of the same 256 MB of zeros, packed, in the same place at wish."""
    size = 1 << 28
    packed = zlib.compressobj(9, zlib.DEFLATED, -15)
    zeros = packed.compress(bytes(size)) + packed.flush()
    with zipfile.ZipFile(path, "a") as archive:
        crc = zlib.crc32(bytes(size))
        for number in range(64):
            info = zipfile.ZipInfo(f"archive/data/{100 + number}" if not overlapping else "archive/data/1")
            info.compress_type, info.CRC, info.file_size, info.compress_size = 8, crc, size, len(zeros)
            assert archive.fp is not None
            if number == 0 or not overlapping:
                info.header_offset = archive.start_dir
                archive.fp.seek(archive.start_dir)
                archive.fp.write(info.FileHeader() + zeros)
                archive.start_dir = archive.fp.tell()
                first = info.header_offset
            info.header_offset = first if overlapping else info.header_offset
            info.filename = f"archive/data/{100 + number}"
            archive.filelist.append(info)
        archive._didModify = True


# Sharded checkpoints

_SHARDS = (
    "metadata",
    "getattr",
    "meta",
    "piece",
    "absolute",
    "climbing",
    "link",
    "deepspeed",
    "huge",
    "negative",
    "text",
)


@cases_of("shards", _SHARDS)
def _shards(name: str) -> Act:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    folder = Path("evil.ckpt")
    folder.mkdir()
    piece = io.BytesIO()
    import torch

    torch.save(PAYLOADS["exec"]() if name == "piece" else torch.zeros(2), piece)
    (folder / "0.distcp").write_bytes(piece.getvalue())
    saved(PAYLOADS["exec"]() if name == "meta" else checkpoint(state_dict={}), str(folder / "meta.pt"))
    place = {"absolute": os.path.abspath("../outside/shard"), "climbing": "../../outside/shard", "link": "linked"}
    if name == "link":
        os.symlink("../../outside/shard", folder / "linked")
    length = {"huge": 1 << 60, "negative": -5}.get(name, len(piece.getvalue()))
    info = _StorageInfo(place.get(name, "0.distcp"), 0, length)
    content: Any = Metadata({}, storage_data={MetadataIndex("layer.weight"): info})
    evil = PAYLOADS["exec"]()
    content = {"metadata": evil, "text": "text"}.get(name, content)
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    if name == "getattr":
        inside = Payload(getattr, Payload(importlib.import_module, "os"), "mkdir")
        (folder / ".metadata").write_bytes(pickle.dumps(inside))
    if name == "deepspeed":
        (folder / ".metadata").unlink()
        (folder / "latest").write_text("global_step1")
        saved(evil, str(folder / "global_step1/mp_rank_00_model_states.pt"))
    return COMMANDS["fit"](str(folder))


# Configs

_CLASSES = {
    "os": "os.system",
    "subprocess": "subprocess.Popen",
    "builtins": "builtins.exec",
    "through": "lightning.pytorch.cli.os.system",
    "private": "torch.nn.modules.module.torch.load",
    "hub": "torch.hub.load",
    "planted": "planted.Model",
    "prefix": "lit_efficient_x.Model",
    "prefix-torch": "torch_optim.Model",
    "load": f"{_BORING}.BoringModel.load_from_checkpoint",
    "load-base": "lightning.pytorch.LightningModule.load_from_checkpoint",
    "cli": "lightning.pytorch.cli.LightningCLI",
    "saving": "lightning.pytorch.core.saving._load_state",
    "migrate": "lightning.pytorch.utilities.migration.utils.migrate_checkpoint",
    "restore": "lit_efficient.restore",
    "safe-load": "lit_efficient.files.checkpoints.load_verified",
    "dunder": "lit_efficient.__main__.main",
    "importlib": "lit_efficient.import_module",
}


@cases_of("class", _CLASSES)
def _class(name: str) -> Act:
    for module in ("planted", "lit_efficient_x", "torch_optim"):
        _module(module)
    sys.path.insert(0, os.getcwd())  # as --allow-import would have it
    saved({**checkpoint(), "hyper_parameters": PAYLOADS["exec"]()})
    arguments = {"load": {"checkpoint_path": "evil.ckpt", "weights_only": False}, "os": {"command": f"touch {CANARY}"}}
    arguments |= {"builtins": {"source": TOUCH}, "subprocess": {"args": ["touch", CANARY]}}
    arguments["load-base"] = arguments["load"]
    arguments["restore"] = arguments["safe-load"] = {"path": "evil.ckpt"}
    spec = {"class_path": _CLASSES[name], "init_args": arguments.get(name, {})}

    def act() -> None:
        main = _dotted("lit_efficient.__main__.main")
        for place in ("model", "data", "optimizer"):
            assert main(["fit", "-c", config(**{place: spec})]) == 2
        for slot in ("callbacks", "logger", "plugins", "profiler", "strategy"):
            value = [spec] if slot in ("callbacks", "plugins") else spec
            assert main(["fit", "-c", config(trainer={slot: value})]) == 2

    return act


@cases_of(
    "callable", ("lambda", "lr", "monitor-op", "hook", "any", "dict_kwargs", "activation", "collate", "command-line")
)
def _callable(name: str) -> Act:
    _module("planted")
    sys.path.insert(0, os.getcwd())
    callback = "lightning.pytorch.callbacks"
    if name == "command-line":
        return ["fit", "-c", config(), "--model", "planted.Model", "--trainer.callbacks+=os.system"]
    if name == "lambda":
        given = {"class_path": f"{callback}.LambdaCallback", "init_args": {"on_fit_start": "os.system"}}
    elif name == "hook":
        given = {"class_path": f"{callback}.LambdaCallback", "init_args": {"on_fit_start": "planted.f"}}
    elif name == "monitor-op":
        given = {"class_path": f"{callback}.LambdaCallback", "init_args": {"setup": "torch.load"}}
    elif name == "any":
        spec = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", CANARY]}}
        given = {"class_path": f"{callback}.ModelCheckpoint", "init_args": {"every_n_train_steps": spec}}
    elif name == "dict_kwargs":
        given = {"class_path": f"{callback}.LambdaCallback", "dict_kwargs": {"on_fit_start": "os.system"}}
    elif name == "lr":
        spec = {"class_path": "torch.optim.lr_scheduler.LambdaLR", "init_args": {"lr_lambda": "os.system"}}
        return fit(optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}, lr_scheduler=spec)
    else:
        given = {"class_path": f"{callback}.LambdaCallback", "init_args": {"on_fit_start": "builtins.print.__self__"}}
    return fit(trainer={"callbacks": [given]})


_IOS = ("TorchCheckpointIO", "XLACheckpointIO", "AsyncCheckpointIO")


@cases_of("last", (*_IOS, "weights-only", "weights-only-word", "strategy", "environment"))
def _from_last(name: str) -> Act:
    path = saved(checkpoint(hyper_parameters=PAYLOADS["exec"]()))
    spec: Any = {"class_path": f"lightning.pytorch.plugins.io.{name}"}
    if name == "AsyncCheckpointIO":
        spec["init_args"] = {"checkpoint_io": {"class_path": "lightning.pytorch.plugins.io.TorchCheckpointIO"}}
    if name in _IOS:
        return _last(path, trainer={"plugins": [spec]})
    if name == "weights-only":
        return _last(path, weights_only=False)
    if name == "weights-only-word":
        return _last(path, "--weights_only", "false")
    if name == "environment":
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        return _last(path)
    plugin = {"class_path": "lightning.pytorch.plugins.io.TorchCheckpointIO"}
    strategy = {"class_path": "lightning.pytorch.strategies.SingleDeviceStrategy", "init_args": {}}
    strategy["init_args"] = {"checkpoint_io": plugin, "device": "cpu"}
    return _last(path, trainer={"strategy": strategy})


_TEXTS = {
    "python-apply": "trainer: !!python/object/apply:os.system ['touch CANARY']\n",
    "python-new": "model: !!python/object/new:subprocess.Popen [[touch, CANARY]]\n",
    "python-name": "model: !!python/name:os.system\n",
    "python-module": "model: !!python/module:planted\n",
    "include": "trainer: !include ../outside/secret.yaml\n",
    "env-tag": "trainer: !env PATH\n",
    "interpolation": "trainer:\n  default_root_dir: ${oc.env:TRUST_SECRET}\n",
    "resolver": "trainer:\n  default_root_dir: ${oc.create:${oc.env:TRUST_SECRET}}\n",
    "shell": "trainer:\n  default_root_dir: $(touch CANARY)`touch CANARY`\n",
    "variable": "trainer:\n  default_root_dir: $TRUST_SECRET\n",
    "format": "trainer:\n  default_root_dir: '{0.__class__.__init__.__globals__}'\n",
    "jinja": "trainer:\n  default_root_dir: \"{{ ''.__class__.__mro__ }}\"\n",
    "alias-bomb": "a0: &a0 [x, x]\n"
    + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40)),
    "merge-bomb": "a0: &a0 {x: 1}\n"
    + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 40)),
    "alias-in-model": "x: &x [1]\nmodel:\n  class_path: BoringModel\n  init_args: {a: *x}\n",
    "loop": "trainer: &t\n  callbacks: [*t]\n",
    "deep": "trainer: " + "[" * 20_000 + "]" * 20_000 + "\n",
    "deep-map": "{a: " * 5_000 + "1" + "}" * 5_000 + "\n",
    "regex": "trainer:\n  max_time: " + "1" * 50_000 + ":\n",
    "number": "trainer:\n  max_steps: " + "9" * 400_000 + "\n",
    "base-60": "trainer:\n  max_steps: " + ":".join(["59"] * 20_000) + "\n",
    "directive": "%TAG ! tag:yaml.org,2002:python/object/apply:\n---\ntrainer: !os.system ['touch CANARY']\n",
    "documents": "trainer: {max_steps: 1}\n---\n!!python/object/apply:os.system ['touch CANARY']\n",
    "file": "trainer: named.yaml\n",
    "model-file": "model: named.yaml\n",
    "url": "model: http://127.0.0.1:9/x.yaml\n",
    "url-trainer": "trainer: https://127.0.0.1:9/x.yaml\n",
    "config-in-config": "config: named.yaml\n",
    "fsspec": "trainer: memory://x.yaml\n",
    "chain": "trainer: zip://x.yaml::http://127.0.0.1:9/x.zip\n",
}


@cases_of("yaml", _TEXTS)
def _yaml(name: str) -> Act:
    os.environ["TRUST_SECRET"] = "runs/expanded"
    _module("planted")
    Path("hostile.yaml").write_text(_TEXTS[name])
    Path("named.yaml").write_text(_TEXTS["python-apply"].removeprefix("trainer: "))
    base = config("base.yaml")
    return ["fit", "-c", base, "-c", "hostile.yaml"]


_URLS = (
    "http://127.0.0.1:9/x",
    "s3://bucket/x",
    "gs://bucket/x",
    "file:///dev/zero",
    "github://o:r@main/x",
    "hf://d/x",
)


@cases_of("url-config", [url.partition(":")[0] for url in _URLS])
def _url(name: str) -> Act:
    url = next(url for url in _URLS if url.startswith(name))
    return lambda: [_dotted("lit_efficient.__main__.main")(words) for words in _with_url(url)]


def _with_url(url: str) -> list[list[str]]:
    words = [["fit", "-c", f"{url}.yaml"], ["fit", "-c", config(), "--ckpt_path", f"{url}.ckpt"]]
    words += [["average", f"{url}.ckpt", "--output", "m.ckpt"], ["export", f"{url}.ckpt", "--output", "out"]]
    return [*words, ["generate", "--ckpt", f"{url}.ckpt", "--prompt", "x"], ["report", url]]


@cases_of("climbing-filename", ("absolute", "dots", "brackets"))
def _climbing(name: str) -> Act:
    filename = {
        "absolute": os.path.abspath("../outside/x"),
        "dots": "../../../../outside/x",
        "brackets": "../{step}/../x",
    }
    spec = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"filename": filename[name]}}
    return fit(trainer={"callbacks": [spec]})


# Encoded data, arrays and tables


def _encoded(read: bool = True, **options: Any) -> Act:
    def act() -> object:
        source = _dotted("lit_efficient.data.latents.encoded_sources.open_encoded")("data", **options)
        return [source.read(row, list(source.fields)) for row in range(min(2, len(source)))] if read else source

    return act


def _data_folder() -> Path:
    folder = Path("data")
    folder.mkdir(exist_ok=True)
    return folder


@cases_of(
    "npy", ("object", "huge", "header", "nested-header", "negative", "npz-object", "npz-deflated", "npz-climbing")
)
def _npy(name: str) -> Act:
    import numpy as np

    path = _data_folder() / "latents.npy"
    if name == "object":
        np.save(path, np.array([PAYLOADS["exec"]()], dtype=object), allow_pickle=True)
    elif name == "npz-object":
        np.savez(path.with_suffix(".npz"), latents=np.array([PAYLOADS["exec"]()], dtype=object))
    elif name == "npz-deflated":
        np.savez_compressed(path.with_suffix(".npz"), latents=np.zeros(1 << 26, np.uint8))
    elif name == "npz-climbing":
        with zipfile.ZipFile(path.with_suffix(".npz"), "w") as archive:
            buffer = io.BytesIO()
            np.save(buffer, np.zeros((2, 2)))
            archive.writestr("../../outside/victim.npy", buffer.getvalue())
    else:
        shape = {"huge": "(1099511627776, 1099511627776)", "negative": "(-5, 3)", "nested-header": "(" * 5000}.get(name)
        text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape or '(2, 2)'}}}"
        text = "[" * 60_000 if name == "header" else text
        path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode())
    return _encoded()


@cases_of("listed", ("climbing", "absolute", "backslash", "object", "huge", "nested"))
def _listed(name: str) -> Act:
    import numpy as np

    folder = _data_folder()
    np.save(folder / "a.npy", np.zeros((1, 2)))
    listed = {"climbing": "../../outside/victim.npy", "absolute": os.path.abspath("../outside/victim.npy")}
    listed["backslash"] = "..\\..\\outside\\victim.npy"
    if name == "object":
        np.save(folder / "a.npy", np.array([PAYLOADS["exec"]()], dtype=object), allow_pickle=True)
    if name == "huge":
        text = "{'descr': '<f8', 'fortran_order': False, 'shape': (4398046511104,)}"
        (folder / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode())
    content = json.dumps({"labels": [[listed.get(name, "a.npy"), 0]]})
    (folder / "dataset.json").write_text("[" * 200_000 if name == "nested" else content)
    return _encoded()


_MDS = ("climbing", "absolute", "pkl", "object", "offsets", "shape", "huge-count", "nested-json", "encoding")


@cases_of("mds", _MDS)
def _mds(name: str) -> Act:
    folder = _data_folder()
    sample = struct.pack("<I", 8) + bytes(8)
    head = 12
    raw = struct.pack("<III", 1, head, head + len(sample)) + sample
    if name == "offsets":
        raw = struct.pack("<III", 1, 0xFFFFFFF0, 0xFFFFFFFF) + sample
    if name == "pkl":
        evil = pickle.dumps(PAYLOADS["exec"]())
        sample = struct.pack("<I", len(evil)) + evil
        raw = struct.pack("<III", 1, head, head + len(sample)) + sample
    (folder / "shard.mds").write_bytes(raw)
    base = {"climbing": "../../outside/shard", "absolute": os.path.abspath("../outside/shard")}.get(name, "shard.mds")
    size = Path(folder, base).stat().st_size
    encoding = {"pkl": "pkl", "object": "ndarray:O:1", "shape": "ndarray:uint8:1000000000000", "encoding": "jpeg"}
    shard = {"format": "mds", "column_names": ["latents"], "column_encodings": [encoding.get(name, "bytes")]}
    shard |= {"column_sizes": [None], "raw_data": {"basename": base, "bytes": size}, "zip_data": None, "samples": 1}
    shard["samples"] = 1 << 40 if name == "huge-count" else 1
    (folder / "index.json").write_text("[" * 200_000 if name == "nested-json" else json.dumps({"shards": [shard]}))
    return _encoded()


@cases_of("safetensors", ("header", "offsets", "shape", "json", "nested-json", "overlap"))
def _safetensors(name: str) -> Act:
    tensor = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    tensor |= {"offsets": {"data_offsets": [0, 1 << 60]}, "shape": {"shape": [1 << 40, 1 << 40]}}.get(name, {})
    both = {"latents": tensor, "labels": tensor} if name == "overlap" else {"latents": tensor}
    text = {"json": b"{" * 100_000, "nested-json": b'{"a":' + b"[" * 100_000}.get(name, json.dumps(both).encode())
    size = 1 << 62 if name == "header" else len(text)
    path = _data_folder() / "x.safetensors"
    path.write_bytes(struct.pack("<Q", size) + text + bytes(16))

    def act() -> None:
        for reader in (_encoded(), lambda: _dotted("lit_efficient.files.checkpoints.read")(path)):
            assert callable(reader)
            try:
                reader()
            except _dotted("lit_efficient.LitEfficientError"):
                continue

    return act


@cases_of(
    "tar", ("climbing", "absolute", "link", "hard-link", "pth", "pkl", "npy-object", "sparse", "device", "gzip-member")
)
def _tar(name: str) -> Act:
    import numpy as np

    folder, evil = _data_folder(), pickle.dumps(PAYLOADS["exec"]())
    members: dict[str, bytes] = {"a.cls": b"1", "a.latents.npy": _npy_bytes(np.zeros(2))}
    if name in ("pth", "pkl"):
        buffer = io.BytesIO()
        _dotted("torch.save")(PAYLOADS["exec"](), buffer)
        members[f"a.{name}"] = buffer.getvalue() if name == "pth" else evil
    if name == "npy-object":
        members["a.latents.npy"] = _npy_bytes(np.array([PAYLOADS["exec"]()], dtype=object))
    if name == "gzip-member":
        members["a.txt.gz"] = b"".join(gzip.compress(bytes(64 << 20)) for _ in range(64))
    with tarfile.open(folder / "a.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        for member, content in members.items():
            info = tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("a.txt")
        if name in ("link", "hard-link", "device"):
            link.type = {"link": tarfile.SYMTYPE, "hard-link": tarfile.LNKTYPE}.get(name, tarfile.CHRTYPE)
            link.linkname = os.path.abspath("../outside/secret.txt")
            archive.addfile(link)
        elif name in ("climbing", "absolute"):
            link.name = "../../outside/new.txt" if name == "climbing" else os.path.abspath("../outside/new.txt")
            link.size = 1
            archive.addfile(link, io.BytesIO(b"x"))
        elif name == "sparse":
            archive.fileobj.write(_sparse("a.txt", 1 << 36))  # type: ignore[union-attr]
            archive.offset += 512
    return _encoded()


def _npy_bytes(array: Any) -> bytes:
    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def _sparse(name: str, size: int) -> bytes:
    """The header of a file of zeros, without its bytes."""
    info = tarfile.TarInfo(name)
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT)[:512])
    block[156:157] = b"S"
    block[257:265] = b"ustar  \0"
    block[386:398] = b"%011o\0" % (size - 1)  # one part, at the end, of no length
    block[398:410] = b"%011o\0" % 0
    block[483:495] = b"%011o\0" % min(size, 0o77777777777)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@cases_of("parquet", ("extension", "path", "climbing", "features", "damaged", "pickled-column"))
def _parquet(name: str) -> Act:
    import pyarrow as pa
    from pyarrow import parquet

    folder = _data_folder()
    if name in ("path", "climbing"):
        where = os.path.abspath("../outside/secret.png") if name == "path" else "../../outside/secret.png"
        kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        table = pa.table({"image": pa.array([{"bytes": None, "path": where}] * 2, kind)})
        parquet.write_table(table, folder / "a.parquet")
        return _images
    field = pa.field("latents", pa.binary())
    if name == "extension":
        meta = {
            "ARROW:extension:name": "arrow.py_extension_type",
            "ARROW:extension:metadata": pickle.dumps(PAYLOADS["exec"]()),
        }
        field = pa.field("latents", pa.binary(), metadata=meta)
    evil = pickle.dumps(PAYLOADS["exec"]())
    meta = {"huggingface": json.dumps({"info": {"features": {"latents": {"_type": "planted.Model", "dtype": "x"}}}})}
    schema = pa.schema([field], metadata=meta if name == "features" else None)
    parquet.write_table(pa.table([pa.array([evil, evil], pa.binary())], schema=schema), folder / "a.parquet")
    if name == "damaged":
        content = bytearray((folder / "a.parquet").read_bytes())
        content[-12:-8] = b"\xff\xff\xff\x7f"
        content[40:60] = os.urandom(0) + b"\xff" * 20
        (folder / "a.parquet").write_bytes(content)
    return _encoded()


def _images(folder: str = "data") -> object:
    opened = _dotted("lit_efficient.data.images.image_tables.open_table")
    table = opened(folder, "train", _dotted("lit_efficient.data.images.image_columns.ImageColumns")())
    return [_look(table.read(row)) for row in range(len(table))]


def _look(content: bytes) -> object:
    pixels = importlib.import_module("lit_efficient.data.images.image_pixels")
    view = _dotted("lit_efficient.data.images.image_view.ImageView")(resolution=64)
    try:
        pixels.upright_size(content)
        return view.look(content, (64, 64), _dotted("lit_efficient.mechanisms.order.keyed_batch_sampler.Key")(0, 0), 0)
    except pixels.UnreadableImage as error:
        raise _dotted("lit_efficient.ConfigurationError")(str(error)) from error


def _png(width: int, height: int, bits: int = 1, more: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = bytes(1 + (width * bits + 7) // 8)
    packer = zlib.compressobj(9)
    lines = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + more + chunk(b"IDAT", lines) + chunk(b"IEND", b"")


_IMAGES = ("bomb", "large", "text", "eps", "psd", "fits", "svg", "gif", "tiff", "icc", "exif", "webp", "named-png")


@cases_of("image", _IMAGES)
def _image(name: str) -> Act:
    from PIL import Image

    path = _data_folder() / "a.png"
    if name == "bomb":
        path.write_bytes(_png(60_000, 60_000))
    elif name == "large":
        path.write_bytes(_png(13_000, 13_000))
    elif name == "text":
        packed = zlib.compress(bytes(200 << 20), 9)
        data = b"k\0\0" + packed
        text = struct.pack(">I", len(data)) + b"zTXt" + data + struct.pack(">I", zlib.crc32(b"zTXt" + data))
        path.write_bytes(_png(8, 8, more=text))
    elif name == "eps":
        Path("gs").write_text(f"#!/bin/sh\ntouch {os.path.abspath(CANARY)}\n")
        Path("gs").chmod(0o755)
        os.environ["PATH"] = f"{os.getcwd()}:{os.environ['PATH']}"
        path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(x) run\n%%EOF\n")
    elif name == "psd":
        path.write_bytes(b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 30_000, 30_000, 8, 3) + bytes(14))
    elif name == "fits":
        cards = ["SIMPLE  =                    T", "BITPIX  =                    8", "NAXIS   =                    2"]
        cards += ["NAXIS1  =                90000", "NAXIS2  =                90000", "END"]
        path.write_bytes("".join(card.ljust(80) for card in cards).encode().ljust(2880))
    elif name == "svg":
        entity = '<!DOCTYPE s [<!ENTITY x SYSTEM "../outside/secret.txt">]><svg>&x;</svg>'
        path.write_text(entity)
    elif name == "gif":
        path.write_bytes(
            b"GIF89a" + struct.pack("<HH", 60_000, 60_000) + b"\x80\0\0" + bytes(6) + b",\0\0\0\0`\xea`\xea\0\2\0;"
        )
    elif name == "tiff":
        entries = b"".join(struct.pack("<HHII", tag, 4, 1, 60_000) for tag in (256, 257))
        path.write_bytes(b"II*\0\x08\0\0\0" + struct.pack("<H", 2) + entries + struct.pack("<I", 8))
    else:
        image, buffer = Image.new("RGB", (8, 8)), io.BytesIO()
        if name == "exif":
            exif = Image.Exif()
            exif[0x0112] = 65_535
            exif[0x010E] = "x" * 60_000
            image.save(buffer, "JPEG", exif=exif)
        elif name == "webp":
            image.save(buffer, "WEBP")
            buffer.getbuffer()[20:30] = b"\xff" * 10
        else:
            image.save(buffer, "PNG", icc_profile=b"\xff" * 5_000)
        path.write_bytes(buffer.getvalue())
    return _images


@cases_of("folder", ("script", "readme", "state", "metadata-climbing", "metadata-absolute", "arrow-path", "info"))
def _folder(name: str) -> Act:
    from PIL import Image

    folder = _data_folder()
    _module("data/data")
    if name in ("script", "readme"):
        (folder / "a.jsonl").write_text('{"text": "a b c"}\n')
        front = "---\nconfigs:\n- config_name: default\n  data_files: ../../outside/secret.txt\n---\n"
        (folder / "README.md").write_text(front if name == "readme" else "")
        return _rows
    if name.startswith("metadata"):
        Image.new("RGB", (8, 8)).save(folder / "a.png")
        where = "../../outside/secret.png" if name.endswith("climbing") else os.path.abspath("../outside/secret.png")
        (folder / "metadata.jsonl").write_text(json.dumps({"file_name": where, "text": "x"}) + "\n")
        return _images
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "image": [{"bytes": None, "path": "x.png"}] * 2})
    if name == "arrow-path":
        where = os.path.abspath("../outside/secret.png")
        rows = datasets.Dataset.from_dict({"image": [{"bytes": None, "path": where}] * 2})
    rows.save_to_disk(str(folder))
    if name == "state":
        victim = Path("../outside/secret.arrow").resolve()
        victim.write_bytes((folder / "data-00000-of-00001.arrow").read_bytes())
        _old(victim)
        state = json.loads((folder / "state.json").read_text())
        state["_data_files"] = [{"filename": "../../outside/secret.arrow"}]
        (folder / "state.json").write_text(json.dumps(state))
        return _rows
    if name == "info":
        info = json.loads((folder / "dataset_info.json").read_text())
        info["features"]["text"] = {"_type": "planted.Model", "path": "planted"}
        (folder / "dataset_info.json").write_text(json.dumps(info))
        return _rows
    return _images


def _rows(name: str = "data") -> object:
    sources = _dotted("lit_efficient.data.text.rows.open_sources")(name)
    return [row for source in sources for _, row in source.rows()][:5]


@cases_of("text", ("gzip", "gzip-lines", "bz2", "xz", "nested-json", "long-number", "csv", "surrogates"))
def _text(name: str) -> Act:
    import bz2
    import lzma

    zeros = bytes(64 << 20)
    if name == "gzip":
        Path("a.txt.gz").write_bytes(gzip.compress(zeros) * 64)
    elif name == "gzip-lines":
        Path("a.jsonl.gz").write_bytes(gzip.compress(zeros) * 64)
    elif name == "bz2":
        Path("a.txt.bz2").write_bytes(bz2.compress(zeros) * 64)
    elif name == "xz":
        Path("a.json.xz").write_bytes(lzma.compress(zeros, preset=1) * 64)
    elif name == "csv":
        Path("a.csv").write_text("a,b\n" + '"' + "x" * 1_000_000)
    elif name == "surrogates":
        Path("a.jsonl").write_text('{"text": "\\ud800"}\n' * 10)
    else:
        Path("a.jsonl").write_text(("[" * 200_000 if name == "nested-json" else "9" * 200_000) + "\n")
    return lambda: _rows(next(str(path) for path in Path().glob("a.*")))


# Models and tokenizers of somebody else's


def _model_folder(**fields: Any) -> str:
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
        _module(module)
    small = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 8,
    }
    whole = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **small, **fields}
    (folder / "config.json").write_text(json.dumps({name: value for name, value in whole.items() if value is not None}))
    save_file({"x": _dotted("torch.zeros")(1)}, folder / "model.safetensors")
    backend = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}')
    return str(folder)


_MAP = dict.fromkeys(("AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor"), "modeling_evil.Model")
_MODELS: dict[str, dict[str, Any]] = {
    "auto-map": {"auto_map": {**_MAP, "AutoConfig": "configuration_evil.Model"}},
    "auto-map-unknown": {"model_type": "evil", "auto_map": {**_MAP, "AutoConfig": "configuration_evil.Model"}},
    "auto-map-trust": {"trust_remote_code": True, "auto_map": {**_MAP, "AutoConfig": "configuration_evil.Model"}},
    "auto-map-repository": {"auto_map": {"AutoConfig": "someone/evil--configuration_evil.Model"}},
    "attention": {"_attn_implementation": "kernels-community/evil", "attn_implementation": "someone/evil"},
    "attention-internal": {
        "_attn_implementation_internal": "someone/evil:planted",
        "_attn_implementation": "planted.f",
    },
    "quantizer": {
        "quantization_config": {"quant_method": "evil", "modules": "planted.Model", "linear_class": "planted.Model"}
    },
    "architectures": {"architectures": ["planted.Model", "__import__('os')"]},
    "activation": {"hidden_act": "__import__('os').system('touch CANARY')"},
    "activation-path": {"hidden_act": "planted.f"},
    "torch-dtype": {"torch_dtype": "planted", "dtype": "__import__"},
    "sizes": {"vocab_size": 1 << 40},
    "layers": {"num_hidden_layers": 1 << 30},
    "custom-pipelines": {"custom_pipelines": {"text-generation": {"impl": "planted.Model"}}},
    "base": {"_name_or_path": "../outside/model", "base_model_name_or_path": "../outside/model"},
    "timm": {"model_type": "timm_wrapper", "architecture": "planted", "model_args": {"pretrained": True}},
    "backbone": {"model_type": "maskformer", "backbone": "someone/evil", "use_timm_backbone": True},
    "lightglue": {
        "model_type": "lightglue",
        "keypoint_detector_config": {"model_type": "evil", **{"auto_map": _MAP}},
        "trust_remote_code": True,
    },
}


@cases_of("model", _MODELS)
def _model(name: str) -> Act:
    folder = _model_folder(**_MODELS[name])
    sys.stdin = open(os.devnull)  # noqa: SIM115

    def act() -> None:
        lm = importlib.import_module("lit_efficient.models.causal_lm")
        text = importlib.import_module("lit_efficient.models.text_encoder")
        teacher = _dotted("lit_efficient.models.teachers.find_teacher")
        readers: list[Callable[[], object]] = [
            lambda: lm.build(lm.CausalLMConfig(folder)),
            lambda: teacher(folder, [""], who="FeatureMatching"),
        ]
        if name not in ("sizes", "layers"):
            readers += [
                lambda: lm.build(lm.CausalLMConfig(folder, random_weights=True)),
                lambda: text.TextEncoder.load(text.TextEncoderConfig(folder)),
                lambda: teacher(f"{folder}/config.json", [""], who="FeatureMatching"),
                lambda: _dotted("lit_efficient.data.text.chat_tokenizer.load_chat_tokenizer")(folder),
            ]
        _each(readers)

    return act


def _each(readers: Iterable[Callable[[], object]]) -> None:
    """All of them, whatever one of them says: what they may not do is seen otherwise."""
    for reader in readers:
        try:
            reader()
        except MemoryError:
            raise
        except Exception as error:
            print(f"{type(error).__name__}: {str(error)[:200]}")


@cases_of(
    "weights", ("bin", "bin-index", "index-climbing", "index-absolute", "adapter", "adapter-mapping", "diffusers")
)
def _weights(name: str) -> Act:
    folder = Path(_model_folder())
    if name.startswith(("bin", "index")):
        (folder / "model.safetensors").unlink()
    evil = PAYLOADS["exec"]()
    if name == "bin":
        saved(evil, str(folder / "pytorch_model.bin"))
    elif name == "bin-index":
        saved(evil, str(folder / "part.bin"))
        (folder / "pytorch_model.bin.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": {"x": "part.bin"}})
        )
    elif name.startswith("index"):
        place = (
            "../../outside/secret.safetensors"
            if name.endswith("climbing")
            else os.path.abspath("../outside/secret.safetensors")
        )
        from safetensors.torch import save_file

        save_file({"x": _dotted("torch.zeros")(1)}, "../outside/secret.safetensors")
        _old(Path("../outside/secret.safetensors"))
        text = json.dumps({"metadata": {"total_size": 4}, "weight_map": {"x": place}})
        (folder / "model.safetensors.index.json").write_text(text)
    elif name.startswith("adapter"):
        mapping = {"base_model_class": "Model", "parent_library": "planted"}
        fields = {"peft_type": "LORA", "auto_mapping": mapping, "base_model_name_or_path": "model"}
        (folder / "adapter_config.json").write_text(json.dumps(fields))
        if name == "adapter":
            saved(evil, str(folder / "adapter_model.bin"))
    else:
        (folder / "model_index.json").write_text('{"_class_name": ["pipeline", "Model"], "vae": ["planted", "Model"]}')
        _module("model/pipeline")
        (folder / "config.json").write_text(
            '{"_class_name": "planted.Model", "auto_map": {"AutoModel": "planted.Model"}}'
        )
        saved(evil, str(folder / "diffusion_pytorch_model.bin"))

    def act() -> None:
        lm = importlib.import_module("lit_efficient.models.causal_lm")
        text = importlib.import_module("lit_efficient.models.text_encoder")
        images = importlib.import_module("lit_efficient.models.diffusers_model")
        _each(
            [
                lambda: lm.build(lm.CausalLMConfig(str(folder))),
                lambda: text.TextEncoder.load(text.TextEncoderConfig(str(folder))),
                lambda: _dotted("lit_efficient.models.teachers.find_teacher")(str(folder), [""], who="x"),
                lambda: images.build(images.DiffusersModelConfig(str(folder))),
                lambda: _dotted("lit_efficient.models.autoencoders.build_autoencoder")(str(folder)),
            ]
        )

    return act


_TEMPLATES = {
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "attr-filter": "{{ ('x' | attr('__class__') | attr('__mro__')) }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "format-map": "{{ '{a.__class__.__mro__}'.format_map({'a': messages}) }}",
    "namespace": "{{ namespace.__init__.__globals__ }}{{ raise_exception.__globals__ }}",
    "strftime": "{{ strftime_now.__globals__['datetime'].__class__ }}{{ tojson.__globals__ }}",
    "include": "{% include '../outside/secret.txt' %}",
    "import": "{% import '../outside/secret.txt' as x %}{{ x }}",
    "extends": "{% extends '../outside/secret.txt' %}",
    "repeat": "{{ 'a' * 10000000000 }}",
    "repeat-later": "{% set n = messages | length %}{{ 'a' * (n * 10000000000) }}",
    "doubling": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "loops": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "loops-while-said": "{% for a in range(90000) %}{% for b in range(90000) %}x{% endfor %}{% endfor %}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "power-later": "{% set n = messages | length %}{{ (9 + n) ** 9 ** 9 }}",
    "squares": "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "recursion": "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "branching": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "width": "{{ 'a'.ljust(10000000000) }}{{ '%10000000000d' % 1 }}",
    "format-width": "{{ '{:>10000000000}'.format(1) }}",
    "lipsum": "{{ lipsum(n=1000000000) }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "indent": "{{ ('a\n' * 100000) | indent(100000) }}",
    "mutation": "{% set x = messages.append(messages) %}{{ messages | tojson }}",
    "deep": "{{ " + "(" * 3_000 + "1" + ")" * 3_000 + " }}",
}


@cases_of("template", _TEMPLATES)
def _template(name: str) -> Act:
    folder = Path(_model_folder())
    (folder / "chat_template.jinja").write_text(_TEMPLATES[name])

    def act() -> None:
        tokenizer = _dotted("lit_efficient.data.text.chat_tokenizer.load_chat_tokenizer")(str(folder))
        document = _dotted("lit_efficient.data.text.chat_formats.Document")
        chat = importlib.import_module("lit_efficient.data.text.turn_spans")
        spans = chat.TurnSpans(tokenizer, "assistant", [])
        chats = document((chat.ASKED, chat.ANSWERED))
        _each([lambda: _dotted("lit_efficient.tasks.text_generation.as_chat")(tokenizer, "x"), lambda: spans.of(chats)])

    return act


@cases_of("tokenizer", ("class", "auto-map", "vocab-file", "python-file", "added-tokens", "regex", "json", "nested"))
def _tokenizer(name: str) -> Act:
    folder = Path(_model_folder())
    fields: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    fields |= {
        "class": {"tokenizer_class": "planted.Model"},
        "auto-map": {"auto_map": {"AutoTokenizer": ["tokenization_evil.Model", "tokenization_evil.Model"]}},
        "vocab-file": {"vocab_file": "../outside/secret.txt", "tokenizer_file": "../outside/secret.json"},
        "python-file": {"custom_tokenizer": "tokenization_evil.py"},
        "added-tokens": {"added_tokens_decoder": {"1099511627776": {"content": "x"}}},
    }.get(name, {})
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    if name == "regex":
        backend = json.loads((folder / "tokenizer.json").read_text())
        split = {"type": "Split", "pattern": {"Regex": "(a*)*(a*)*b"}, "behavior": "Isolated", "invert": False}
        (folder / "tokenizer.json").write_text(json.dumps({**backend, "pre_tokenizer": split}))
    elif name in ("json", "nested"):
        (folder / "tokenizer.json").write_text("[" * 200_000 if name == "nested" else '{"version": "1.0", "model": {}}')

    def act() -> None:
        load = _dotted("lit_efficient.data.text.chat_tokenizer.load_chat_tokenizer")
        _each(
            [lambda: load(str(folder)).encode("a" * 64), lambda: load(str(folder / "tokenizer.json")).encode("a" * 64)]
        )

    return act


# Links, which nothing is written through and which are read, manifests and runs of somebody else's


@cases_of(
    "link",
    (
        "config.tmp",
        "log",
        "events",
        "config",
        "environment",
        "run",
        "last",
        "latest-partial",
        "export",
        "lock",
        "report",
        "mean",
    ),
)
def _link(name: str) -> Act:
    victim = os.path.abspath("../outside/victim")
    if name in ("log", "events", "config", "environment", "run", "last", "config.tmp", "report"):
        run = Path("runs/hostile/2026-01-01_00-00-00")
        words = _last(saved(checkpoint(), "good.ckpt"))
        (run / "run.json").write_text('{"parent": null}')
        places = {
            "log": "log.txt",
            "events": "events.jsonl",
            "config": "config.yaml",
            "environment": "environment.json",
        }
        places |= {"run": "run.json", "last": "end.ckpt", "config.tmp": "config.tmp", "report": "report.html"}
        place = run / places[name]
        place.unlink(missing_ok=True)
        os.symlink(victim, place)
        for more in ("config.yaml.tmp", ".config.yaml.partial", "log.txt.tmp", "last.ckpt.tmp"):
            os.symlink(victim, run / more)
        if name == "run":
            return words
        saved_config = checkpoint()
        saved_config["lit_efficient"] = {"config": {}}
        return ["report", str(run)] if name == "report" else [*words, "--trainer.max_steps", "2"]
    if name == "export":
        os.symlink(os.path.dirname(victim), "out")
        return ["export", saved(checkpoint(), "good.ckpt"), "--output", "out"]
    if name == "mean":
        os.symlink(victim, "mean.ckpt")
        return ["average", saved(checkpoint(), "good.ckpt"), "--output", "mean.ckpt"]
    if name == "lock":
        prepared = _dotted("lit_efficient.files.cache.prepared_folder")
        os.symlink(victim, "cache.lock")
        return lambda: prepared(Path("cache"), lambda empty: (empty / "x").touch(), lambda _: None)
    os.makedirs("runs/hostile")
    for number in range(3):
        os.symlink(victim, f"runs/hostile/.latest-{number}")
    os.symlink(victim, "runs/hostile/latest")
    return fit()


@cases_of("manifest", ("sums-climbing", "sums-absolute", "cache-climbing", "cache-absolute", "latents", "nested"))
def _manifest(name: str) -> Act:
    folder = _data_folder()
    place = "../../outside/secret.txt" if name.endswith("climbing") else os.path.abspath("../outside/secret.txt")
    if name.startswith("sums"):
        (folder / "SHA256SUMS").write_text(f"{'0' * 64}  {place}\n")
        return lambda: _dotted("lit_efficient.files.sums.check_sums")(folder)
    listed = {place: [Path("../outside/secret.txt").stat().st_size, "0" * 64]}
    about = {"format": 1, "byteorder": sys.byteorder, "files": listed, "identity": {}, "count": 0, "statistics": {}}
    text = json.dumps({**about, "labels": False, "text_rows": 1})
    (folder / "manifest.json").write_text("[" * 200_000 if name == "nested" else text)
    if name.startswith("cache"):
        return lambda: print(_dotted("lit_efficient.files.file_hashes.broken_seal")(folder, 1, thorough=True))
    return lambda: _dotted("lit_efficient.data.latents.latent_store.LatentStore")(folder, thorough=True)


@cases_of("git", ("fsmonitor", "filter", "hooks", "pager", "include"))
def _git(name: str) -> Act:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@x", *words], check=True, capture_output=True)

    git("init", "-q")
    Path("kept.txt").write_text("kept")
    git("add", "kept.txt")
    git("commit", "-q", "-m", "x")
    Path("kept.txt").write_text("new!")
    touch = f"touch {os.path.abspath(CANARY)}"
    settings = {
        "fsmonitor": ("core.fsmonitor", touch),
        "filter": ("filter.evil.clean", touch),
        "hooks": ("core.hooksPath", "."),
    }
    settings |= {"pager": ("core.pager", touch), "include": ("include.path", "../included")}
    git("config", *settings[name])
    Path(".git/included").write_text(f'[core]\n\tfsmonitor = {touch}\n[filter "evil"]\n\tprocess = {touch}\n')
    Path(".gitattributes").write_text("* filter=evil\n")
    for hook in ("post-index-change", "fsmonitor-watchman", "query-watchman"):
        Path(hook).write_text(f"#!/bin/sh\n{touch}\n")
        Path(hook).chmod(0o755)
    return fit()


@cases_of("run", ("parent", "script", "events", "samples", "loggers", "climbing-parent"))
def _run(name: str) -> Act:
    run = Path("runs/hostile/2026-01-01_00-00-00")
    words = _last(saved(checkpoint(), "good.ckpt"))
    if name in ("parent", "climbing-parent", "loggers"):
        (run / "last.ckpt").unlink()
        saved(checkpoint(x=PAYLOADS["exec"]()), str(run.parent / "evil" / "last.ckpt"))
        parent = {"parent": "../evil/last.ckpt", "climbing-parent": "../../../../outside/secret.ckpt"}.get(name)
        (run / "run.json").write_text(json.dumps({"parent": parent, "loggers": ["../../../../outside"]}))
        return words
    lines = [{"time": 1, "step": 1, "kind": "warning", "text": "<script>alert(1)</script><img src=x onerror=alert(1)>"}]
    lines += [{"time": 1, "step": 1, "kind": "sample", "path": "../../../../outside/secret.txt"}]
    lines += [{"time": 1, "step": n, "kind": "metrics", "epoch": 0, "values": {"</script>": n}} for n in (1, 2)]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "config.yaml").write_text("model: !!python/object/apply:os.system ['touch CANARY']\n")

    def act() -> None:
        main = _dotted("lit_efficient.__main__.main")
        assert main(["report", str(run)]) in (0, 2)
        page = run / "report.html"
        if page.exists() and ("<script>alert" in page.read_text() or "<img src=x" in page.read_text()):
            Path(CANARY).touch()

    return act


# Modules in the working directory, which a new Python finds before any other

_SHADOWS = ("torch", "yaml", "numpy", "lightning", "jsonargparse", "typing", "math", "re", "json", "operator", "shutil")
_SHADOWS += (
    "tomllib",
    "difflib",
    "textwrap",
    "argparse",
    "logging",
    "lit_efficient_x",
    "sitecustomize",
    "usercustomize",
)
_FRESH = (
    ["--version"],
    ["techniques"],
    ["configs"],
    ["fit", "--help"],
    ["fit", "-c", "hostile.yaml"],
    ["average", "x.ckpt", "--output", "y"],
)


@cases_of("shadow", [f"{module}" for module in _SHADOWS])
def _shadow(name: str) -> Act:
    Path(f"{name}.py").write_text(f"import os\nos.mkdir({CANARY!r})\n")
    return lambda: [_fresh(words) for words in _FRESH[:4]]


@cases_of("shadow-all", [words[0] + str(number) for number, words in enumerate(_FRESH)])
def _shadows(name: str) -> Act:
    config()
    for module in _SHADOWS:
        Path(f"{module}.py").write_text(f"import os\nos.mkdir({CANARY!r})\n")
    return lambda: _fresh(_FRESH[int(name[-1])])


def _fresh(words: list[str]) -> None:
    root = str(processes.ROOT)
    environment = {**os.environ, "PYTHONPATH": root}
    command = [sys.executable, "-m", "lit_efficient", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout[-2000:], done.stderr[-2000:])
    assert done.returncode in (0, 2), done.stderr[-300:]


# How a case is tried


def _old(path: Path) -> None:
    """A time of reading that any read changes."""
    os.utime(path, (1, 2))


def _outside(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def trial(name: str, folder: Path) -> str:
    inside, outside = folder / "inside", folder / "outside"
    inside.mkdir()
    outside.mkdir()
    for file in (
        "secret.txt",
        "secret.yaml",
        "secret.png",
        "secret.json",
        "secret.ckpt",
        "victim",
        "victim.npy",
        "shard",
    ):
        (outside / file).write_text(f"default_root_dir: {SECRET}\n")
    homes = {variable: str(inside) for variable in ("HOME", "TMPDIR", "LIT_EFFICIENT_CACHE", "HF_HOME", "TORCH_HOME")}
    homes |= {"HF_DATASETS_CACHE": str(inside / "cache"), "HF_MODULES_CACHE": str(inside / "modules")}
    log, seen, ready = folder / "log", folder / "seen", folder / "ready"
    process = processes.start(_child, name, str(inside), str(outside), str(seen), str(ready), log=str(log), env=homes)
    process.join(300)
    late = process.is_alive()
    process.kill()
    process.join()
    said = log.read_text(errors="replace")
    if not ready.exists():
        return f"the case could not be made: {said[-300:]!r}"
    if any(CANARY in names + files for _, names, files in os.walk(folder)):
        return "its code ran"
    if seen.exists():
        return seen.read_text().splitlines()[0]
    before = json.loads(ready.read_text())
    for path in sorted(outside.rglob("*")):
        if path.is_file() and int(path.stat().st_atime) > 1 and not name.startswith("link"):
            return f"{path.name} outside was read"
    if before != {file: content.decode("latin-1") for file, content in _outside(outside).items()}:
        return "something outside was written"
    if SECRET in said:
        return "the secret was printed"
    for path in inside.rglob("*"):
        if path.is_file() and not path.is_symlink() and SECRET.encode() in path.read_bytes():
            return f"the secret is in {path.relative_to(inside)}"
    if late or process.exitcode in (-24, -9):
        return f"it took more than {SECONDS} s of a processor"
    if "MemoryError" in said or "llocate memory" in said or "bad_alloc" in said:
        return f"it asked for more than {BYTES >> 30} GiB"
    if process.exitcode != 0:
        return f"it ended with {process.exitcode}: {said[-200:]!r}"
    return ""


def _child(name: str, inside: str, outside: str, seen: str, ready: str) -> None:
    os.chdir(inside)
    act = _MAKERS[name]()
    before = {file: content.decode("latin-1") for file, content in _outside(Path(outside)).items()}
    for path in Path(outside).rglob("*"):
        _old(path)
    Path(ready).write_text(json.dumps(before))
    if not name.startswith("shadow"):
        _watch(os.path.realpath(inside), os.path.realpath(outside), seen, not name.startswith("link"))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + SECONDS, int(used) + SECONDS + 5))
    from lit_efficient.errors import LitEfficientError

    try:
        if callable(act):
            act()
            return
        code = _dotted("lit_efficient.__main__.main")(act)
        if code not in (0, 2):
            raise SystemExit(f"the command ended with {code}")
    except LitEfficientError as error:
        print(f"refused: {error}")
    except (AssertionError, ImportError, NameError, AttributeError):
        raise  # of the case itself, most likely
    except Exception as error:  # not pretty, and no harm; MemoryError is seen in what is printed
        print(f"refused with a traceback: {type(error).__name__}: {str(error)[-300:]}")


_WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.symlink", "os.link", "shutil.rmtree")
_STARTS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "socket.getaddrinfo")


def _watch(inside: str, outside: str, seen: str, reads: bool) -> None:
    folder = os.path.dirname(inside)
    output = os.open(seen + ".partial", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    real = os.path.realpath
    busy: list[bool] = []

    def note(what: str) -> None:
        os.write(output, f"{what}\n".encode())
        if not os.path.exists(seen):
            os.link(seen + ".partial", seen)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if busy or (event != "open" and event not in _WRITES and event not in _STARTS):
            return
        busy.append(True)
        try:
            if event in _STARTS:
                words = str(args[:2])
                if not any(word in words for word in ("'git'", "'uname'", "AF_UNIX")):
                    note(f"{event}{words[:120]}")
                return
            led = event != "open" or not args[2] & os.O_NOFOLLOW
            place = (
                (real if led else os.path.abspath)(os.fsdecode(args[0]))
                if isinstance(args[0], str | bytes | os.PathLike)
                else folder
            )
            writes = event != "open" or bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if place.startswith(outside + os.sep) and (writes or reads):
                note(f"{event} of {os.path.basename(place)} outside")
            if writes and not place.startswith((folder, "/dev/", "/proc/")) and "__pycache__" not in place:
                note(f"{event} writes {place}")
        finally:
            busy.pop()

    sys.addaudithook(hook)


PIECES = (
    Piece(
        9,
        "hostile",
        "A hostile file, folder or config is given to the command or reader that takes it: none of its code runs, "
        "nothing outside the case's folder is read or written, no connection is opened, and it ends within 10 s of a "
        "processor and 2 GiB.",
        lambda: tuple(_MAKERS),
        trial,
        in_ci=8,
    ),
)
