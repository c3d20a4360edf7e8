"""Configs that name classes and functions, climb out of their folder, or are more than they seem."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.trust_rows.hostile.cases import (
    BORING,
    CANARY,
    PAYLOADS,
    TOUCH,
    Act,
    as_last,
    cases_of,
    checkpoint,
    config,
    dotted,
    fit,
    plant,
    saved,
)

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
    "load": f"{BORING}.BoringModel.load_from_checkpoint",
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
        plant(module)
    sys.path.insert(0, os.getcwd())  # as --allow-import would have it
    saved({**checkpoint(), "hyper_parameters": PAYLOADS["exec"]()})
    arguments = {"load": {"checkpoint_path": "evil.ckpt", "weights_only": False}, "os": {"command": f"touch {CANARY}"}}
    arguments |= {"builtins": {"source": TOUCH}, "subprocess": {"args": ["touch", CANARY]}}
    arguments["load-base"] = arguments["load"]
    arguments["restore"] = arguments["safe-load"] = {"path": "evil.ckpt"}
    spec = {"class_path": _CLASSES[name], "init_args": arguments.get(name, {})}

    def act() -> None:
        main = dotted("lit_efficient.__main__.main")
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
    plant("planted")
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
        return as_last(path, trainer={"plugins": [spec]})
    if name == "weights-only":
        return as_last(path, weights_only=False)
    if name == "weights-only-word":
        return as_last(path, "--weights_only", "false")
    if name == "environment":
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        return as_last(path)
    plugin = {"class_path": "lightning.pytorch.plugins.io.TorchCheckpointIO"}
    strategy = {"class_path": "lightning.pytorch.strategies.SingleDeviceStrategy", "init_args": {}}
    strategy["init_args"] = {"checkpoint_io": plugin, "device": "cpu"}
    return as_last(path, trainer={"strategy": strategy})


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
    plant("planted")
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
    return lambda: [dotted("lit_efficient.__main__.main")(words) for words in _with_url(url)]


def _with_url(url: str) -> list[list[str]]:
    """Return commands that read no address. Those that read a checkpoint read it from any file system of fsspec."""
    return [["fit", "-c", f"{url}.yaml"], ["report", url]]


@cases_of("climbing-filename", ("absolute", "dots", "brackets"))
def _climbing(name: str) -> Act:
    filename = {
        "absolute": os.path.abspath("../outside/x"),
        "dots": "../../../../outside/x",
        "brackets": "../{step}/../x",
    }
    spec = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"filename": filename[name]}}
    return fit(trainer={"callbacks": [spec]})
