"""Row 8: change a key of the config before a resume. The change is reported and takes effect, or is refused.

A run is interrupted by SIGTERM after four of seven steps, and resumed with one changed key. It is compared with two
other runs: one without interruption and change, and one with the change from the beginning. The comparison covers
arguments of callbacks, module, data and loggers and of the objects they hold, options of the optimizer with the rate of
the step, loaders, and shapes of batches. Where the two runs differ, the resumed run must equal the second. It must
equal the first if the program reports that the key has no effect on a resumed run.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.trust_rows import Piece
from tests import processes

STOP = 4
STEPS = 7
SOURCE = "source"  # a folder of text
CACHE = "cache"

LANGUAGE: dict[str, Any] = {
    "seed_everything": 0,
    "trainer": {
        "accelerator": "cpu", "devices": 1, "precision": "32-true", "max_steps": STEPS, "val_check_interval": 2,
        "limit_train_batches": 1.0, "limit_val_batches": 1, "num_sanity_val_steps": 0, "gradient_clip_val": 1.0,
        "gradient_clip_algorithm": "norm", "accumulate_grad_batches": 1, "log_every_n_steps": 1, "deterministic": False,
        "detect_anomaly": False, "use_distributed_sampler": True, "reload_dataloaders_every_n_epochs": 0,
        "default_root_dir": "runs/it", "enable_model_summary": False, "logger": {"class_path": "CSVLogger"},
        "callbacks": [
            {"class_path": "FastMatmul", "init_args": {"precision": "high"}},
            {"class_path": "ThroughputBar", "init_args": {"refresh_rate": 1}},
            {"class_path": "SampleText", "init_args": {
                "prompts": ["def"], "max_new_tokens": 2, "temperature": 0.6, "seed": 0}},
            {"class_path": "ExactResume"},
            {"class_path": "ModelCheckpoint", "init_args": {
                "filename": "step{step}", "auto_insert_metric_name": False, "monitor": "val/loss", "mode": "min",
                "save_top_k": 1, "save_last": True, "every_n_epochs": 1}},
        ],
    },
    "model": {"class_path": "LanguageModeling", "init_args": {
        "model": {"dim": 16, "depth": 2, "num_heads": 2, "max_length": 32, "dropout": 0.1},
        "learning_rate": 4e-3, "weight_decay": 0.1, "warmup_steps": 3}},
    "data": {"class_path": "PythonCorpus", "init_args": {
        "vocab_size": 300, "sequence_length": 16, "batch_size": 2, "val_batch_size": 4, "val_fraction": 0.2, "seed": 0,
        "num_workers": 0, "pin_memory": True, "prompts": ["def"], "files": {"paths": [SOURCE]}, "cache_dir": CACHE}},
}  # fmt: skip
DIFFUSION: dict[str, Any] = {
    "seed_everything": 1,
    "trainer": {
        **{key: LANGUAGE["trainer"][key] for key in (
            "accelerator", "devices", "max_steps", "limit_val_batches", "num_sanity_val_steps", "log_every_n_steps",
            "gradient_clip_val", "default_root_dir", "enable_model_summary", "logger")},
        "check_val_every_n_epoch": 17,
        "callbacks": [
            {"class_path": "FastMatmul"},
            {"class_path": "SampleImages", "init_args": {"columns": 10, "rows": 1}},
            {"class_path": "ExactResume"},
        ],
    },
    "model": {"class_path": "LatentDiffusion", "init_args": {
        "backbone": {"channels": 2, "size": 4, "patch_size": 2, "width": 32, "depth": 2, "heads": 2, "num_classes": 10},
        "prediction": "flow", "schedule": "flow", "timestep_sampling": "logit_normal", "label_dropout": 0.1,
        "guidance_scale": 2.0, "sampling_steps": 2, "sampler": "euler", "learning_rate": 3e-3}},
    "data": {"class_path": "LatentDigits", "init_args": {
        "image_size": 16, "batch_size": 16, "autoencoder": {"latent_channels": 2, "width": 8}, "autoencoder_steps": 2,
        "judge_steps": 2, "seed": 0, "num_workers": 0, "cache_dir": CACHE}},
}  # fmt: skip

_LANGUAGE_KEYS: dict[str, Any] = {
    "seed_everything": 5, "trainer.precision": "bf16-mixed", "trainer.max_steps": 9, "trainer.val_check_interval": 3,
    "trainer.limit_train_batches": 6, "trainer.limit_val_batches": 2, "trainer.num_sanity_val_steps": 1,
    "trainer.gradient_clip_val": 0.5, "trainer.gradient_clip_algorithm": "value", "trainer.accumulate_grad_batches": 2,
    "trainer.log_every_n_steps": 2, "trainer.deterministic": True, "trainer.detect_anomaly": True,
    "trainer.use_distributed_sampler": False, "trainer.reload_dataloaders_every_n_epochs": 1,
    "trainer.default_root_dir": "runs/other", "trainer.max_epochs": 50, "trainer.min_steps": 6,
    "trainer.accelerator": "auto", "trainer.devices": "auto", "trainer.logger": {"class_path": "TensorBoardLogger"},
    "trainer.callbacks.0.init_args.precision": "highest", "trainer.callbacks.1.init_args.refresh_rate": 3,
    "trainer.callbacks.2.init_args.prompts": ["class"], "trainer.callbacks.2.init_args.max_new_tokens": 3,
    "trainer.callbacks.2.init_args.temperature": 0.9, "trainer.callbacks.2.init_args.seed": 4,
    "trainer.callbacks.3.init_args": {"seed": 11}, "trainer.callbacks.3": None, "trainer.callbacks.2": None,
    "trainer.callbacks.4": None, "trainer.callbacks.4.init_args.filename": "best",
    "trainer.callbacks.4.init_args.auto_insert_metric_name": True,
    "trainer.callbacks.4.init_args.monitor": "train/loss", "trainer.callbacks.4.init_args.mode": "max",
    "trainer.callbacks.4.init_args.save_top_k": 3, "trainer.callbacks.4.init_args.save_last": False,
    "trainer.callbacks.4.init_args.every_n_epochs": 2, "trainer.callbacks.4.init_args.dirpath": "elsewhere",
    "model.init_args.model.dim": 32, "model.init_args.model.depth": 3, "model.init_args.model.num_heads": 4,
    "model.init_args.model.max_length": 64, "model.init_args.model.dropout": 0.3,
    "model.init_args.learning_rate": 1e-3, "model.init_args.weight_decay": 0.3, "model.init_args.warmup_steps": 6,
    "data.init_args.vocab_size": 310, "data.init_args.sequence_length": 12, "data.init_args.batch_size": 3,
    "data.init_args.val_batch_size": 2, "data.init_args.val_fraction": 0.4, "data.init_args.seed": 3,
    "data.init_args.num_workers": 1, "data.init_args.pin_memory": False, "data.init_args.prompts": ["class"],
    "data.init_args.files.paths": ["source2"], "data.init_args.cache_dir": "cache2",
    "optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.002}},
    "optimizer#2": {"class_path": "SGD", "init_args": {"lr": 0.1}},
}  # fmt: skip
_DIFFUSION_KEYS: dict[str, Any] = {
    "seed_everything": 5, "trainer.check_val_every_n_epoch": 1, "trainer.gradient_clip_val": None,
    "trainer.precision": "bf16-true", "trainer.callbacks.1.init_args.columns": 5,
    "trainer.callbacks.1.init_args.rows": 2, "model.init_args.backbone.channels": 4, "model.init_args.backbone.size": 8,
    "model.init_args.backbone.patch_size": 1, "model.init_args.backbone.width": 64, "model.init_args.backbone.depth": 1,
    "model.init_args.backbone.heads": 4, "model.init_args.backbone.num_classes": 12,
    "model.init_args.prediction": "v", "model.init_args.schedule": "cosine",
    "model.init_args.timestep_sampling": "uniform", "model.init_args.label_dropout": 0.3,
    "model.init_args.guidance_scale": 3.0, "model.init_args.sampling_steps": 3, "model.init_args.sampler": "heun",
    "model.init_args.learning_rate": 1e-3, "data.init_args.image_size": 24, "data.init_args.batch_size": 8,
    "data.init_args.autoencoder.latent_channels": 4, "data.init_args.autoencoder.width": 16,
    "data.init_args.autoencoder_steps": 3, "data.init_args.judge_steps": 3, "data.init_args.seed": 2,
    "data.init_args.num_workers": 1,
}  # fmt: skip
# Techniques beside the tasks, with their arguments as they are and as they become.
_BESIDE: dict[str, tuple[dict[str, Any], dict[str, tuple[Any, Any]]]] = {
    "EMA": (LANGUAGE, {"decay": (0.9, 0.5), "start_step": (0, 2), "every_n_steps": (1, 2)}),
    "PowerEMA": (DIFFUSION, {"sigma_rels": ([0.05, 0.1], [0.05, 0.2]), "snapshot_every_n_steps": (2, 3)}),
    "CheckpointAverage": (LANGUAGE, {"last_k": (2, 3), "every_n_steps": (1, 2)}),
    "LoRA": (LANGUAGE, {"rank": (2, 3), "alpha": (4, 8), "targets": ("all-linear", ["query"]), "dropout": (0.0, 0.2),
                        "variant": ("rslora", "lora")}),
    "MultiTokenPrediction": (LANGUAGE, {"weight": (0.3, 0.1)}),
    "MixtureOfExperts": (LANGUAGE, {"balance_loss": (0.01, 0.0), "bias_rate": (0.001, 0.01)}),
    "StochasticDepth": (LANGUAGE, {"rate": (0.2, 0.5)}),
    "GradualUnfreezing": (LANGUAGE, {"every_n_epochs": (1, 2), "lr_decay": (2.6, 2.0)}),
    "GaLore": (LANGUAGE, {"rank": (4, 8), "update_every": (2, 3), "scale": (0.25, 0.5)}),
    "APOLLO": (LANGUAGE, {"rank": (4, 8), "update_every": (2, 3)}),
    "LowBitOptimizer": (LANGUAGE, {"bits": (8, 4), "min_size": (0, 512)}),
    "ScheduleFree": (LANGUAGE, {"warmup_steps": (2, 5)}),
    "ChunkedCrossEntropy": (LANGUAGE, {"chunk_size": (8, 16)}),
    "QuantizationAwareTraining": (LANGUAGE, {"group_size": (8, 16)}),
    "ActivationCheckpointing": (LANGUAGE, {"every": (1, 2)}),
    "NonFiniteGuard": (LANGUAGE, {"max_consecutive": (3, 5)}),
    "RunMetrics": (LANGUAGE, {}),
    "SNRWeighting": (DIFFUSION, {"rule": ("min_snr", "constant"), "gamma": (5.0, 1.0)}),
    "ChannelsLast": (DIFFUSION, {}),
    "EarlyStopping": (LANGUAGE, {"monitor": ("val/loss", "val/perplexity"), "patience": (9, 5), "mode": ("min", "max"),
                                 "min_delta": (0.0, 0.5)}),
    "LearningRateMonitor": (LANGUAGE, {"logging_interval": ("step", "epoch")}),
    "TokenWeightedAccumulation": (LANGUAGE, {"count": ("auto", "trained")}),
    "Timer": (LANGUAGE, {"interval": ("step", "epoch")}),
    "SignalCheckpoint": (LANGUAGE, {}),
}  # fmt: skip
_OPTIMIZERS: dict[str, dict[str, tuple[Any, Any]]] = {
    "AdamW": {"lr": (0.01, 0.002), "betas": ([0.9, 0.999], [0.8, 0.9]), "eps": (1e-8, 1e-6),
              "weight_decay": (0.01, 0.2), "amsgrad": (False, True)},
    "FusedAdamW": {"lr": (0.01, 0.002), "betas": ([0.9, 0.999], [0.8, 0.9]), "eps": (1e-8, 1e-6),
                   "weight_decay": (0.01, 0.2), "decay_norm_and_bias": (False, True)},
    "SGD": {"lr": (0.1, 0.02), "momentum": (0.9, 0.5), "nesterov": (False, True), "weight_decay": (0.0, 0.1)},
    "Lion": {"lr": (1e-3, 2e-3), "betas": ([0.9, 0.99], [0.8, 0.9]), "weight_decay": (0.1, 0.2)},
    "MuonAdamW": {"lr": (1e-3, 2e-3), "weight_decay": (0.1, 0.2), "momentum": (0.95, 0.9), "ns_steps": (5, 4),
                  "muon_eq": ("row", "column"), "normuon": (0.95, 0.9)},
    "GroupedAdafactor": {"lr": (1e-2, 2e-2), "weight_decay": (0.0, 0.1)},
    "ScheduleFreeAdamW": {"lr": (1e-2, 2e-3), "warmup_steps": (2, 5), "weight_decay": (0.0, 0.1),
                          "betas": ([0.9, 0.999], [0.95, 0.99])},
}  # fmt: skip
_SCHEDULES: dict[str, dict[str, tuple[Any, Any]]] = {
    "CosineAnnealingLR": {"T_max": (7, 12), "eta_min": (0.0, 0.001)},
    "StepLR": {"step_size": (2, 3), "gamma": (0.5, 0.9)},
    "OneCycleLR": {"max_lr": (0.1, 0.05), "total_steps": (20, 30), "pct_start": (0.3, 0.5)},
    "LinearLR": {"start_factor": (0.3, 0.5), "total_iters": (6, 9)},
    "ExponentialLR": {"gamma": (0.9, 0.8)},
    "MultiStepLR": {"milestones": ([2, 5], [3, 6]), "gamma": (0.5, 0.3)},
}  # fmt: skip

# What is noted as a run goes: the highest rate so far, the sum of the squares of all, that logits have been cut once.
STATE = (".lr_max", ".weight_sum", ".chunked_loss_used")
# Keys whose effect is none of what is looked at, and why that is right.
UNSEEN = {
    "trainer.accelerator": "auto is the CPU here",
    "trainer.devices": "auto is one process here",
    "trainer.default_root_dir": "where the run lies, which its first line says",
    "trainer.use_distributed_sampler": "one process has none",
    "OneCycleLR:rate": "its rates are those of max_lr",
    "trainer.callbacks.RunMetrics": "the command line adds one to each fit that has none",
    "trainer.callbacks.SignalCheckpoint": "the command line adds one to each fit that has none",
    "trainer.logger": "another logger, whose arguments are its own",
}


def _set(tree: Any, key: str, value: Any) -> None:
    """Set the value of a dotted key. ``None`` removes an item from a list."""
    *parents, last = key.partition("#")[0].split(".")
    for part in parents:
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    if isinstance(tree, list) and value is None:
        del tree[int(last)]
    else:
        tree[int(last) if isinstance(tree, list) else last] = value


@functools.cache
def _all() -> dict[str, tuple[str, dict[str, Any], str, Any]]:
    """Return, for each case, its base, the config of the base, the key, and the new value."""
    found: dict[str, tuple[str, dict[str, Any], str, Any]] = {}
    for name, config, keys in (("language", LANGUAGE, _LANGUAGE_KEYS), ("diffusion", DIFFUSION, _DIFFUSION_KEYS)):
        for key, value in keys.items():
            found[f"{name}:{key}"] = name, config, key, value
    for name, (task, arguments) in _BESIDE.items():
        config = copy.deepcopy(task)
        given = {key: before for key, (before, _) in arguments.items()}
        entry = {"class_path": name, **({"init_args": given} if given else {})}
        place = len(config["trainer"]["callbacks"])
        found[f"{name}:begins"] = ("language" if task is LANGUAGE else "diffusion"), task, "trainer.callbacks+", entry
        config["trainer"]["callbacks"].append(entry)
        found[f"{name}:ends"] = name, config, f"trainer.callbacks.{place}", None
        for key, (_, after) in arguments.items():
            found[f"{name}:{key}"] = name, config, f"trainer.callbacks.{place}.init_args.{key}", after
    for name, arguments in _OPTIMIZERS.items():
        given = {key: before for key, (before, _) in arguments.items()}
        config = {**LANGUAGE, "optimizer": {"class_path": name, "init_args": given}}
        for key, (_, after) in arguments.items():
            found[f"{name}:{key}"] = name, config, f"optimizer.init_args.{key}", after
    for name, arguments in _SCHEDULES.items():
        given = {key: before for key, (before, _) in arguments.items()}
        config = {**LANGUAGE, "optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1, "momentum": 0.5}}}
        config["lr_scheduler"] = {"class_path": name, "init_args": given}
        found[f"{name}:rate"] = name, config, "optimizer.init_args.lr", 0.05
        for key, (_, after) in arguments.items():
            found[f"{name}:{key}"] = name, config, f"lr_scheduler.init_args.{key}", after
    return found


# What a run looks like from within.


def _plain(value: Any) -> Any:
    """Return a value as numbers, strings and containers of them. Other objects are replaced by their class."""
    if isinstance(value, str):  # folders of runs are named by the time
        return re.sub(r".*/\d{4}-\d\d-\d\d_[\d-]+", "RUN", value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)})
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "numel", lambda: 0)() == 1:
        return _plain(value.item())
    return type(value).__name__


def _arguments(thing: Any) -> dict[str, Any]:
    """Return the attributes named like constructor arguments, of an object and of this package's objects in it."""
    found = {}
    for name in inspect.signature(type(thing).__init__).parameters:
        for attribute in (name, f"_{name}"):
            if attribute in getattr(thing, "__dict__", {}):
                found[name] = _plain(getattr(thing, attribute))
    for name, held in list(getattr(thing, "__dict__", {}).items()):
        if dataclasses.is_dataclass(held) and type(held).__module__.startswith("lit_efficient"):
            found |= {} if name.startswith("_") else {name: _plain(held)}
        elif type(held).__module__.startswith("lit_efficient"):
            names = inspect.signature(type(held).__init__).parameters
            found |= {f"{name}.{own}": _plain(held.__dict__[own]) for own in names if own in vars(held)}
    return found


_TRAINER = (
    "max_steps", "max_epochs", "min_steps", "min_epochs", "val_check_interval", "check_val_every_n_epoch",
    "limit_train_batches", "limit_val_batches", "num_sanity_val_steps", "gradient_clip_val", "gradient_clip_algorithm",
    "accumulate_grad_batches", "log_every_n_steps", "precision", "world_size", "reload_dataloaders_every_n_epochs",
)  # fmt: skip


def _look(trainer: Any, module: Any, batch: Any) -> dict[str, Any]:
    import torch

    from lit_efficient.cli.tree import flat, numbered

    callbacks = [one for one in trainer.callbacks if type(one).__name__ not in ("RunEvents", "RunFolder", "ConfigWins")]
    names = numbered(type(one).__name__ for one in callbacks)
    seen: dict[str, Any] = {f"callback {name}": {"is": True} | _arguments(one) for name, one in zip(names, callbacks)}
    exact = next((one for one in callbacks if type(one).__name__ == "ExactResume"), None)
    seen["seed"] = exact.state_dict()["seed"] if exact else None  # of the order and the draws
    seen |= {f"logger {index}": _arguments(one) for index, one in enumerate(trainer.loggers)}
    seen |= {"trainer": {name: _plain(getattr(trainer, name)) for name in _TRAINER}}
    seen["trainer"]["deterministic"] = torch.are_deterministic_algorithms_enabled()
    seen["trainer"]["anomaly"] = torch.is_anomaly_enabled()
    seen |= {"module": _arguments(module), "data": _arguments(trainer.datamodule)}
    for index, optimizer in enumerate(trainer.optimizers):
        for number, group in enumerate(optimizer.param_groups):
            options = {key: _plain(value) for key, value in group.items() if key != "params"}
            seen[f"optimizer {index} {type(optimizer).__name__} group {number}"] = options
    for part, given in (("train", trainer.train_dataloader), ("val", trainer.val_dataloaders)):
        loader = given[0] if isinstance(given, list) else given
        keys = ("batch_size", "num_workers", "pin_memory")
        sizes = {key: _plain(getattr(loader, key, None)) for key in keys}
        sampler = getattr(loader, "batch_sampler", None)
        seen[f"loader {part}"] = {**sizes, "sampler": _plain(getattr(sampler, "batch_size", None))}
    shapes = {key: list(value.shape) for key, value in batch.items() if hasattr(value, "shape")}
    seen["batch"] = shapes
    for name, part in module.named_modules():
        own = {key: value for key, value in vars(part).items() if isinstance(value, bool | int | float | str)}
        seen[f"layer {name}"] = {key: _plain(value) for key, value in own.items() if key[0] != "_"} | {
            "class": type(part).__name__
        }
    return flat(seen)


def _fit(kind: str, *words: str) -> None:
    """Run a fit that records its settings at each step. ``kind`` is its name, and decides whether it is interrupted."""
    import warnings

    from lit_efficient.__main__ import main
    from lit_efficient.cli.resumed import ConfigWins

    warnings.simplefilter("ignore")
    looks: dict[int, Any] = {}

    def begin(self: Any, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        step = int(trainer.global_step)
        if step not in looks:
            looks[step] = _look(trainer, module, batch)
            Path(f"{kind}.json").write_text(json.dumps(looks))
        if kind == "interrupted" and step == STOP:
            os.kill(os.getpid(), signal.SIGTERM)

    ConfigWins.on_train_batch_start = begin
    sys.exit(main(["fit", *words]))


def _run(kind: str, *words: str) -> tuple[int | None, str]:
    log = Path(f"{kind}.txt")
    process = processes.start(_fit, kind, *words, log=log.resolve(), env={"LIT_EFFICIENT_CACHE": str(Path(CACHE))})
    process.join(180)
    ended = not process.is_alive()
    process.kill()
    process.join()
    return process.exitcode if ended else None, log.read_text(errors="replace")


_bases: dict[str, tempfile.TemporaryDirectory[str]] = {}


def _base(name: str, config: Any) -> Path:
    """Return a folder with an interrupted and an uninterrupted run of a base."""
    if name not in _bases:
        _bases[name] = folder = tempfile.TemporaryDirectory()
        before = Path.cwd()
        os.chdir(folder.name)
        try:
            for source, word in ((SOURCE, "function"), ("source2", "method")):
                Path(source).mkdir()
                for index in range(12):
                    text = f"def {word}_{index}(self):\n    return self.value + {index}\n\n\n" * 6
                    Path(source, f"file{index}.py").write_text(text)
            Path("base.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
            if config["data"]["class_path"] == "LatentDigits" and "diffusion" in _bases and name != "diffusion":
                shutil.copytree(Path(_bases["diffusion"].name, CACHE), CACHE)
            code, text = _run("whole", "-c", "base.yaml")
            assert code == 0, text[-2000:]
            shutil.rmtree("runs")
            code, text = _run("interrupted", "-c", "base.yaml")
            assert code == 143, text[-2000:]
        except BaseException:
            del _bases[name]
            raise
        finally:
            os.chdir(before)
    return Path(_bases[name].name)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(map(_same, one, other))
    return bool(one == other)


def _named(config: Any, key: str) -> str:
    """Return the key as a run reports it: callbacks by class, arguments without ``init_args``."""
    tree = config
    parts = []
    for part in key.partition("#")[0].rstrip("+").split("."):
        if isinstance(tree, list):
            tree = tree[int(part)]
            parts.append(tree["class_path"])
        else:
            tree = (tree or {}).get(part) if isinstance(tree, dict) else None
            parts += [] if part == "init_args" else [part]
    return ".".join(parts)


def _try_change(case: str, folder: Path) -> str:
    name, config, key, value = _all()[case]
    shutil.copytree(_base(name, config), folder, dirs_exist_ok=True, symlinks=True)
    changed = copy.deepcopy(config)
    if key.endswith("+"):
        changed["trainer"]["callbacks"].append(value)
        label = f"trainer.callbacks.{value['class_path']}"
    else:
        label = _named(config, key)
        _set(changed, key, value)
    Path("base.yaml").write_text(yaml.safe_dump(changed, sort_keys=False))
    found = sorted(Path("runs/it").glob("2*/*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    code, text = _run("resumed", "-c", "base.yaml", "--ckpt_path", str(found[-1]))
    if code != 0:
        error = text[text.rfind("error: ") :] if "error: " in text else ""
        if code == 2 and error and "Traceback" not in text and len(error.splitlines()) <= 10:
            if any(word in error for word in ("checkpoint", "ckpt_path", label.rpartition(".")[2])):
                return ""
            code, text = _run("fresh", "-c", "base.yaml")  # what no run can have
            return "" if code == 2 and error in text else f"refused for: {error[:200]}"
        return f"exit code {code}: {(text.strip().splitlines() or ['nothing'])[-1][:200]}"
    shown = [line.strip() for line in text.splitlines() if " in the checkpoint -> " in line]
    about = [line for line in shown if f"{line}.".startswith((f"{label}:", f"{label}."))]
    others = [line for line in shown if line not in about]
    if not about:
        return f"{label} is not said; said: {'; '.join(others)[:150]}"
    if others:
        return f"said beside it: {others[0][:200]}"
    kept = any(", but " in line for line in about)
    shutil.rmtree("runs")
    code, text = _run("fresh", "-c", "base.yaml")
    if code != 0:
        return f"a fit that begins so ends with {code}: {(text.strip().splitlines() or ['nothing'])[-1][:200]}"
    whole, fresh, resumed = (json.loads(Path(f"{kind}.json").read_text()) for kind in ("whole", "fresh", "resumed"))
    both = [step for step in resumed if step in whole and step in fresh]
    if not both:
        return f"no step in common: {list(resumed)}, {list(fresh)}"
    seen = 0
    for step in both:
        old = whole[step]
        new = fresh[step]
        now = resumed[step]
        for path in {**old, **new}:
            if not _same(old.get(path), new.get(path)) and not path.endswith(STATE):
                seen += 1
                wanted = old if kept else new
                if not _same(now.get(path), wanted.get(path)):
                    return f"step {step}: {path} is {now.get(path)!r}, not {wanted.get(path)!r}"
    if not seen and not (label, case)[case in UNSEEN].startswith(tuple(UNSEEN)):
        return "nothing shows that it counts"
    return ""


PIECES = (
    Piece(
        8,
        "changed-keys",
        "A key of a task, a technique, an optimizer or a schedule is changed before an interrupted run goes on: it is "
        "named, and the run is as one that had it from its beginning (rates of that step, options, batches, layers), "
        "or as the one before where the line says so; or it is refused.",
        lambda: list(_all()),
        _try_change,
        in_ci=0,  # three fits a case
    ),
)
