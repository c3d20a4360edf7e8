"""Kinds of files for `damage`: how to write each in a small size, and the functions that read it.

All is made and read with the working directory as its place, by public names where there are some.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.trust_rows import OURS

TEXT = "def value(self):\n    return self.x\n\n\nclass Reader:\n    pass\n\n\n" * 12
SMALL = {"dim": 4, "depth": 1, "num_heads": 1, "hidden_dim": 8, "max_length": 16}
WRITES = "--prompt def --max_new_tokens 4 --temperature 0 --device cpu"


@dataclass(frozen=True)
class Command:
    """Command with a function ``seen`` that extracts the relevant results from its output."""

    line: str
    seen: Callable[[str], Any]


@dataclass(frozen=True)
class Kind:
    """Files of a kind.

    Args:
        what: Description for the sentence of the piece.
        make: Function that writes the files into the working directory.
        files: Pattern of the files to damage.
        readers: Functions that read the files and return their content.
        commands: Commands that read the files.
        subject: Package that wrote the files.
        in_ci: Number of cases that CI runs.
        fixed: Whether the files contain their own path, and must be read there.
        kept: Whether a reader leaves the files unchanged.
    """

    what: str
    make: Callable[[], None]
    files: tuple[str, ...]
    readers: dict[str, Callable[[], Any]]
    commands: tuple[Command, ...] = ()
    subject: str = OURS
    in_ci: int = 0
    fixed: bool = False
    kept: bool = True


# What commands leave -------------------------------------------------------------------------------------------------


def printed(text: str) -> Any:
    return text


def tensors_below(pattern: str, text: str) -> Any:
    """All tensors of the files that a command wrote; of its checkpoints what a run goes on with."""
    from safetensors.torch import load_file

    found = {}
    for path in sorted(Path().glob(pattern)):
        if path.suffix == ".safetensors":
            found[path.name] = load_file(path)
        elif path.suffix == ".ckpt":
            content = torch.load(path, weights_only=True)
            kept = ("state_dict", "optimizer_states", "lr_schedulers", "global_step")
            found[path.name] = {key: content[key] for key in kept if key in content}
    assert found, f"nothing written: {text[-300:]}"
    return found


def losses(text: str) -> Any:
    found = re.findall(r"(?:val|test)/\w+\W+([\d.]+)", text)
    assert found, text[-300:]
    return found


# Checkpoints and the tokens of a corpus ------------------------------------------------------------------------------


def _config(**trainer: Any) -> None:
    corpus = {
        **{"files": {"paths": ["text.py"]}, "vocab_size": 257, "sequence_length": 8, "batch_size": 4},
        **{"val_fraction": 0.3, "cache_dir": "cache"},
    }
    saving = {"dirpath": "run", "save_last": True, "save_top_k": 0, "every_n_train_steps": 2}
    config = {
        "trainer": {
            **{"accelerator": "cpu", "max_steps": 2, "logger": False, "enable_progress_bar": False},
            **{"enable_model_summary": False, "num_sanity_val_steps": 0, "limit_val_batches": 2},
            "default_root_dir": "runs",
            "callbacks": [
                "ExactResume",
                {"class_path": "EMA", "init_args": {"decay": 0.7}},
                {"class_path": "ModelCheckpoint", "init_args": saving},
            ],
            **trainer,
        },
        "model": {"class_path": "LanguageModeling", "init_args": {"model": SMALL}},
        "data": {"class_path": "PythonCorpus", "init_args": corpus},
    }
    Path("text.py").write_text(TEXT)
    Path("config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def _command(*words: str) -> None:
    from lit_efficient.__main__ import main

    assert main(list(words)) == 0, words


def make_checkpoint() -> None:
    _config()
    _command("fit", "-c", "config.yaml")
    shutil.rmtree("runs")
    shutil.copy("run/last.ckpt", "whole.ckpt")
    Path("run/last.ckpt").rename("a.ckpt")
    shutil.rmtree("run")


def _module() -> Any:
    from lit_efficient import GPTConfig, LanguageModeling

    return LanguageModeling(GPTConfig(257, **SMALL))


def _read(path: str = "a.ckpt") -> Any:
    from lit_efficient.files.checkpoints import read

    return read(path)


def _load_by_plugin() -> Any:
    from lit_efficient import SafeCheckpointIO

    return SafeCheckpointIO().load_checkpoint("a.ckpt")


def _read_by_fit() -> Any:
    from lit_efficient.cli.checkpoint import read

    return read("a.ckpt", "fit")


def _restored(path: str = "a.ckpt") -> Any:
    from lit_efficient import restore

    return restore(_module(), path).state_dict()


def _averaged(*paths: str) -> Any:
    from lit_efficient.commands.average import average_files

    return average_files(paths)["state_dict"]


def _exported(path: str, form: str = "safetensors", base: str | None = None) -> Any:
    from lit_efficient.export.adapters import export_checkpoint

    export_checkpoint(path, "exported", form, base, check=False)
    found = tensors_below("exported/*.safetensors", "")
    shutil.rmtree("exported")
    return found


def _tokenizer(name: str) -> Any:
    from lit_efficient.data.text.chat_tokenizer import fingerprint, load_chat_tokenizer

    return fingerprint(load_chat_tokenizer(name))


def _written(path: str) -> Any:
    from lit_efficient.tasks.loading import load_language_model

    return load_language_model(path)[0].generate_text(["def"], max_new_tokens=4, temperature=0)


def _corpus() -> Any:
    from lit_efficient import PythonCorpus

    arguments = yaml.safe_load(Path("config.yaml").read_text())["data"]["init_args"]
    from lit_efficient.data.text.arguments import CorpusFiles

    return PythonCorpus(**{**arguments, "files": CorpusFiles(**arguments["files"])})


def _windows() -> Any:
    data = _corpus()
    data.prepare_data()
    data.setup("fit")
    windows = (data.train_windows, data.val_windows)
    return [[split[i] for i in range(len(split))] for split in windows], data.tokenizer.to_str()


def make_tokens() -> None:
    _config()
    _windows()


FIT = Command("fit -c config.yaml --ckpt_path a.ckpt --trainer.max_steps 4", partial(tensors_below, "run/last.ckpt"))
CHECKPOINT = Kind(
    "a checkpoint",
    make_checkpoint,
    ("a.ckpt",),
    {
        "read": _read,
        "SafeCheckpointIO": _load_by_plugin,
        "fit's first look": _read_by_fit,
        "restore": _restored,
        "average": lambda: _averaged("whole.ckpt", "a.ckpt"),
        "export": lambda: _exported("a.ckpt"),
        "generate": lambda: _written("a.ckpt"),
    },
    (
        FIT,
        Command("validate -c config.yaml --ckpt_path a.ckpt", losses),
        Command("test -c config.yaml --ckpt_path a.ckpt", losses),
        Command(f"generate --ckpt a.ckpt {WRITES}", printed),
        Command("export a.ckpt --output out --no-check", partial(tensors_below, "out/*")),
        Command("average whole.ckpt a.ckpt --output out.ckpt", partial(tensors_below, "out.ckpt")),
    ),
    in_ci=1,
)
TOKENS = Kind(
    "the cache of a corpus",
    make_tokens,
    ("cache/**/*",),
    {"PythonCorpus": _windows},
    (Command("fit -c config.yaml", partial(tensors_below, "run/last.ckpt")),
     Command("preview -c config.yaml", printed)),
)  # fmt: skip


# Averages and snapshots ----------------------------------------------------------------------------------------------


def make_averages() -> None:
    make_checkpoint()
    _command("average", "whole.ckpt", "a.ckpt", "--output", "mean.ckpt")
    _command("average", "whole.ckpt", "a.ckpt", "--output", "mean.safetensors")


AVERAGES = Kind(
    "what average wrote",
    make_averages,
    ("mean.*",),
    {
        "read": lambda: (_read("mean.ckpt"), _read("mean.safetensors")),
        "restore": lambda: (_restored("mean.ckpt"), _restored("mean.safetensors")),
        "average": lambda: (_averaged("mean.ckpt"), _averaged("mean.safetensors")),
        "export": lambda: _exported("mean.ckpt"),
        "generate": lambda: _written("mean.ckpt"),
    },
    (
        Command("average mean.safetensors mean.safetensors --output out.ckpt", partial(tensors_below, "out.ckpt")),
        Command("average mean.ckpt --output out.ckpt", partial(tensors_below, "out.ckpt")),
        Command("validate -c config.yaml --ckpt_path mean.ckpt", losses),
        Command(f"generate --ckpt mean.ckpt {WRITES}", printed),
    ),
)


def make_snapshots() -> None:
    from benchmarks.trust_rows.toys import fit_power_ema

    fit_power_ema(Path("a.ckpt"))


def _synthesized() -> Any:
    from lit_efficient.mechanisms.averages.snapshots import synthesize

    return synthesize("snapshots", [0.08])


WIDTHS = ("0.05", "0.1")
NAMED = [f"snapshots/average-step={step:08}-sigma_rel={width}.safetensors" for step in (2, 4, 6) for width in WIDTHS]
SWEEP = "ema-sweep snapshots --sigma_rel 0.08"
SNAPSHOTS = Kind(
    "snapshots of PowerEMA",
    make_snapshots,
    ("snapshots/*",),
    {"synthesize": _synthesized, "average": lambda: _averaged(*NAMED)},
    (
        Command(f"{SWEEP} --output out", partial(tensors_below, "out/*.safetensors")),
        Command(f"{SWEEP} --checkpoint a.ckpt --output out", partial(tensors_below, "out/*.ckpt")),
    ),
    in_ci=1,
)


def make_swept() -> None:
    make_snapshots()
    for more in ([], ["--checkpoint", "a.ckpt"]):
        _command(*SWEEP.split(), "--output", "swept", *more)


def _stranger(path: str) -> Any:
    from benchmarks.trust_rows.toys import Stranger
    from lit_efficient import restore

    return restore(Stranger(), path).state_dict()


SWEPT = Kind(
    "what ema-sweep wrote",
    make_swept,
    ("swept/*",),
    {
        "read": lambda: [_read(str(path)) for path in sorted(Path("swept").iterdir())],
        "restore": lambda: [_stranger(str(path)) for path in sorted(Path("swept").glob("*.ckpt"))],
        "average": lambda: [_averaged(str(path)) for path in sorted(Path("swept").iterdir())],
    },
    (
        Command("average swept/ema-sigma_rel=0.08.ckpt --output out.ckpt", partial(tensors_below, "out.ckpt")),
        Command("average swept/ema-sigma_rel=0.08.safetensors --output out.ckpt", partial(tensors_below, "out.ckpt")),
    ),
)


def make_merges() -> None:
    """Write what average makes of two models that were trained from one base: a merge and a greedy soup."""
    make_checkpoint()
    for seed in (1, 2):
        torch.manual_seed(seed)
        checkpoint = torch.load("a.ckpt", weights_only=True)
        weights = checkpoint["state_dict"]
        floats = {name: weight for name, weight in weights.items() if weight.is_floating_point()}
        weights.update({name: weight + 0.1 * torch.randn_like(weight) for name, weight in floats.items()})
        torch.save(checkpoint, f"tuned{seed}.ckpt")
    tuned = ("average", "tuned1.ckpt", "tuned2.ckpt", "--weights-of", "raw")
    _command(*tuned, "--method", "ties", "--base", "a.ckpt", "--output", "merged.ckpt")
    _command(*tuned, "--greedy", "-c", "config.yaml", "--output", "soup.safetensors")


MERGES = Kind(
    "a merge and a greedy soup that average wrote",
    make_merges,
    ("merged.ckpt", "soup.safetensors"),
    {
        "read": lambda: (_read("merged.ckpt"), _read("soup.safetensors")),
        "restore": lambda: (_restored("merged.ckpt"), _restored("soup.safetensors")),
        "generate": lambda: _written("merged.ckpt"),
    },
    (
        Command("average merged.ckpt --output out.ckpt", partial(tensors_below, "out.ckpt")),
        Command("average soup.safetensors --output out.ckpt", partial(tensors_below, "out.ckpt")),
        Command("validate -c config.yaml --ckpt_path merged.ckpt", losses),
    ),
)


# Exports -------------------------------------------------------------------------------------------------------------


def _fit_adapter() -> None:
    """Write the model folder ``base`` and ``adapter.ckpt``, a checkpoint of adapters over it."""
    from benchmarks.trust_rows.toys import LLAMA, fit_adapter, settle
    from lit_efficient import CausalLMConfig, LanguageModeling

    if not Path("base").exists():
        module = LanguageModeling(CausalLMConfig(config_fields=LLAMA))
        module.configure_model()
        settle(module.network).save_pretrained("base")
    fit_adapter(Path("adapter.ckpt"))


def make_adapter() -> None:
    _fit_adapter()
    _command("export", "adapter.ckpt", "--format", "peft", "--output", "exported_adapter", "--no-check")


def _adapter() -> Any:
    from lit_efficient.mechanisms.adapters.peft_folder import read_adapter
    from lit_efficient.mechanisms.adapters.peft_saved import read_peft_folder

    return read_adapter("exported_adapter"), read_peft_folder("exported_adapter")


def _started(technique: str) -> Any:
    """A network whose adapters begin as the exported ones."""
    import lit_efficient
    from lit_efficient.application import apply

    module = lit_efficient.LanguageModeling(lit_efficient.CausalLMConfig("base"))
    module.configure_model()
    apply(module, [getattr(lit_efficient, technique)(start_from="exported_adapter")])
    return module.state_dict()


ADAPTER = Kind(
    "an exported adapter",
    make_adapter,
    ("exported_adapter/*",),
    {
        "read_adapter": _adapter,
        "LoRA": lambda: _started("LoRA"),
        "a tokenizer": lambda: _tokenizer("exported_adapter"),
        "average": lambda: _averaged("exported_adapter/adapter_model.safetensors"),
    },
    (Command("average exported_adapter/adapter_model.safetensors --output o.ckpt", partial(tensors_below, "o.ckpt")),),
)


def make_merged() -> None:
    """The base of an adapter, exported: a model, and what an adapter stands beside."""
    from benchmarks.trust_rows.toys import Words
    from lit_efficient import CausalLMConfig, LanguageModeling

    _fit_adapter()
    import lightning.pytorch as L

    module = LanguageModeling(CausalLMConfig("base"))
    run = L.Trainer(accelerator="cpu", max_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    run.fit(module, Words())
    run.save_checkpoint("llama.ckpt", weights_only=True)
    _command("export", "llama.ckpt", "--format", "merged", "--output", "merged", "--no-check")
    shutil.rmtree("base")
    Path("prompts.txt").write_text("def return\n")


def _hugging_face() -> Any:
    from lit_efficient import CausalLMConfig
    from lit_efficient.tasks.loading import load_hugging_face

    model = load_hugging_face(CausalLMConfig("merged"))
    return model.network.state_dict(), model.network.config.to_dict(), model.tokenizer_state


def _network() -> Any:
    from lit_efficient.models.libraries.causal_lm import CausalLMConfig, build

    model = build(CausalLMConfig("merged"))
    return model.state_dict(), model.config.to_dict()


def _teacher() -> Any:
    from lit_efficient.models.libraries.teachers import find_teacher

    return find_teacher("merged", ["layers.0"], who="trial").network.state_dict()


def _distilled() -> Any:
    from lit_efficient.models.libraries.causal_lm import CausalLMConfig
    from lit_efficient.tasks.teacher import TeacherSource

    source = TeacherSource(CausalLMConfig("merged"))
    return source.tokenizer_state(), source.load().on(torch.device("cpu")).state_dict()


MERGED = Kind(
    "an exported model of transformers",
    make_merged,
    ("merged/*",),
    {
        "CausalLMConfig": _network,
        "with its tokenizer": _hugging_face,
        "a tokenizer": lambda: _tokenizer("merged"),
        "tokenizer.json": lambda: _tokenizer("merged/tokenizer.json"),
        "a teacher": _teacher,
        "Distillation": _distilled,
        "read": lambda: _read("merged/model.safetensors"),
        "export --base FOLDER": lambda: _exported("adapter.ckpt", "merged", "merged"),
    },
    (
        Command(
            "export adapter.ckpt --format merged --base merged --output o --no-check", partial(tensors_below, "o/*")
        ),
        Command(
            "write-data --model merged --prompts prompts.txt --output out.jsonl --max_new_tokens 3 --device cpu",
            lambda text: Path("out.jsonl").read_text(),
        ),
        Command("average merged/model.safetensors --output out.ckpt", partial(tensors_below, "out.ckpt")),
    ),
    in_ci=1,
)


def make_safetensors() -> None:
    make_checkpoint()
    _command("export", "a.ckpt", "--output", "plain", "--no-check")


PLAIN = "plain/model.safetensors"
SAFETENSORS = Kind(
    "exported safetensors",
    make_safetensors,
    ("plain/*",),
    {
        "read": lambda: _read(PLAIN),
        "restore": lambda: _restored(PLAIN),
        "average": lambda: _averaged(PLAIN),
    },
    (Command(f"average {PLAIN} --output out.ckpt", partial(tensors_below, "out.ckpt")),),
)


def make_pipeline() -> None:
    from lit_efficient.export.pipelines import export_pipeline
    from tests.export.test_pipelines import made, written
    from tests.models.libraries.test_text_encoder_of_pipelines import SPECIAL

    text = {"model_type": "clip_text_model", **SPECIAL, "hidden_size": 16, "intermediate_size": 16}
    text |= {"num_hidden_layers": 1, "num_attention_heads": 2, "projection_dim": 6}
    del text
    export_pipeline(written(made(), Path("a.ckpt")), "pipe", check=False)


def _part(subfolder: str, direct: bool = False) -> Any:
    from lit_efficient import DiffusersModelConfig
    from lit_efficient.models.libraries.diffusers_model import build

    spec = DiffusersModelConfig(f"pipe/{subfolder}") if direct else DiffusersModelConfig("pipe", subfolder=subfolder)
    model = build(spec)
    return model.state_dict(), dict(model.config)


def _autoencoder() -> Any:
    from lit_efficient import DiffusersModelConfig
    from lit_efficient.models.libraries.autoencoders import build_autoencoder, declared_statistics

    model = build_autoencoder(DiffusersModelConfig("pipe", subfolder="vae"))
    return model.state_dict(), declared_statistics(model)


WEIGHTS = "diffusion_pytorch_model.safetensors"
PIPELINE = Kind(
    "an exported pipeline of diffusers",
    make_pipeline,
    ("pipe/**/*",),
    {
        "its network": lambda: _part("transformer"),
        "its network's folder": lambda: _part("transformer", direct=True),
        "its autoencoder": _autoencoder,
        "its autoencoder's folder": lambda: _part("vae", direct=True),
        "read": lambda: _read(f"pipe/transformer/{WEIGHTS}"),
    },
    (Command(f"average pipe/vae/{WEIGHTS} --output out.ckpt", partial(tensors_below, "out.ckpt")),),
)


def make_tokenizer() -> None:
    _config()
    words = "--vocab_size 300 --output tokenizer --paths text.py --kind bpe --val_fraction 0.4"
    _command("tokenizer", *words.split())
    arguments = {"train": "data.jsonl", "tokenizer": "tokenizer", "max_length": 64, "val_fraction": 0.2}
    Path("arguments.json").write_text(json.dumps({**arguments, "batch_size": 2, "cache_dir": "cache"}))
    _rows()


def _rows() -> None:
    rows = [{"text": f"def value{i}(self): return {i} * self.x"} for i in range(12)]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _bare() -> Any:
    from lit_efficient.data.text.token_cache import load_tokenizer

    return load_tokenizer("tokenizer/tokenizer.json").to_str()


def _captions() -> Any:
    from lit_efficient.models.libraries.caption_tokens import load_tokenizer

    return [load_tokenizer(name, "", None, 8, "right").state() for name in ("tokenizer", "tokenizer/tokenizer.json")]


def _language_data() -> Any:
    from lit_efficient import LanguageData

    return LanguageData(**json.loads(Path("arguments.json").read_text()))


def _documents() -> Any:
    data = _language_data()
    data.prepare_data()
    data.setup("fit")
    rows = (data.train_rows, data.val_rows)
    return [[split[i] for i in range(len(split))] for split in rows], data.tokenizer.to_str(), data.stop_ids


def _corpus_of(name: str) -> Any:
    from lit_efficient.data.text.token_cache import load_tokenizer

    return load_tokenizer(name).to_str()


TOKENIZER = Kind(
    "a trained tokenizer",
    make_tokenizer,
    ("tokenizer/*",),
    {
        "LanguageData": _documents,
        "a tokenizer": lambda: _tokenizer("tokenizer"),
        "tokenizer.json": lambda: _tokenizer("tokenizer/tokenizer.json"),
        "PythonCorpus": _bare,
        "captions": _captions,
    },
    (
        Command(
            "fit -c config.yaml --data.tokenizer_file tokenizer/tokenizer.json",
            partial(tensors_below, "run/last.ckpt"),
        ),
    ),
)


SELECT = "select-data --method rho --ckpt model.ckpt --reference reference.ckpt --rest_weight 0.25 --output chosen"
SELECT += " --device cpu -c rows.yaml"


def make_selection() -> None:
    """Train two models on few rows, and let select-data weigh the rows by their losses."""
    _rows()
    arguments = {"train": "data.jsonl", "max_length": 64, "val_fraction": 0.2, "batch_size": 2, "cache_dir": "cache"}
    arguments |= {"pack": False, "chat": {"vocab_size": 300}}
    shape = {**SMALL, "max_length": 64}
    config = {
        "trainer": {"accelerator": "cpu", "max_steps": 1, "logger": False, "default_root_dir": "runs"},
        "model": {"class_path": "LanguageModeling", "init_args": {"model": shape}},
        "data": {"class_path": "LanguageData", "init_args": arguments},
    }
    Path("rows.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    for steps, name in enumerate(("model", "reference"), start=1):
        _command("fit", "-c", "rows.yaml", "--trainer.max_steps", str(steps))
        Path("runs/latest/last.ckpt").resolve().rename(f"{name}.ckpt")
        shutil.rmtree("runs")
    _command(*SELECT.split())
    shutil.copy("chosen/settings.json", "settings.json")


def _selected() -> Any:
    from lit_efficient import LanguageData

    given = yaml.safe_load(Path("rows.yaml").read_text())["data"]["init_args"]
    own = yaml.safe_load(Path("chosen/data.yaml").read_text())["data"]["init_args"]
    del given["chat"]
    data = LanguageData(**{**given, **own})
    data.prepare_data()
    data.setup("fit")
    splits = (data.train_rows, data.val_rows)
    return [[split[i] for i in range(len(split))] for split in splits], data.tokenizer.to_str()


def _scores() -> Any:
    from lit_efficient.commands.select_data import resume

    return resume(Path("chosen"), json.loads(Path("settings.json").read_text()))


SELECTION = Kind(
    "what select-data wrote",
    make_selection,
    ("chosen/selected.jsonl", "chosen/rest.jsonl", "chosen/val.jsonl", "chosen/tokenizer/*"),
    {"LanguageData": _selected},
    (Command("fit -c rows.yaml -c chosen/data.yaml", partial(tensors_below, "runs/*/last.ckpt")),),
    fixed=True,
)
SCORES = Kind(
    "the scores of select-data",
    make_selection,
    ("chosen/scores.jsonl", "chosen/settings.json"),
    {"select-data": _scores},
)


# Caches --------------------------------------------------------------------------------------------------------------


def make_documents() -> None:
    _rows()
    arguments = {"train": "data.jsonl", "max_length": 64, "val_fraction": 0.2, "batch_size": 2, "cache_dir": "cache"}
    Path("arguments.json").write_text(json.dumps(arguments))
    _documents()
    config = {
        "trainer": {"accelerator": "cpu", "max_steps": 1, "logger": False, "default_root_dir": "runs"},
        "model": {"class_path": "LanguageModeling", "init_args": {"model": {**SMALL, "max_length": 64}}},
        "data": {"class_path": "LanguageData", "init_args": arguments},
    }
    Path("config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


DOCUMENTS = Kind(
    "the cache of documents",
    make_documents,
    ("cache/**/*",),
    {"LanguageData": _documents},
    (
        Command("preview -c config.yaml", printed),
        Command("fit -c config.yaml", partial(tensors_below, "runs/*/last.ckpt")),
    ),
)


def make_pairs() -> None:
    rows = [{"prompt": f"def value{i}", "chosen": f" return {i}", "rejected": f" pass {i}"} for i in range(12)]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _pairs()


def _pairs() -> Any:
    from lit_efficient import PreferenceData

    data = PreferenceData(train="data.jsonl", max_length=64, val_fraction=0.2, batch_size=2, cache_dir="cache")
    data.prepare_data()
    data.setup("fit")
    return [list(data.val_dataloader()), data.tokenizer.to_str(), _in_order(data.train_dataloader())]


def _in_order(loader: Any) -> list[Any]:
    return [loader.dataset[i] for i in range(len(loader.dataset))]


PAIRS = Kind(
    "the cache of preferences", make_pairs, ("cache/**/*",), {"PreferenceData": _pairs}, in_ci=0
)  # fmt: skip


def _answers(interrupted: bool = False) -> Any:
    """A teacher that tells by which token it was asked; it may end half-way."""
    from lit_efficient.data.text import teacher_cache
    from tests.data.text.test_teacher_cache import BATCHES, teach

    teacher_cache.SHARD_BATCHES = 1
    asked: list[int] = []

    def teacher(batch: Any) -> Any:
        asked.append(0)
        if interrupted and len(asked) > 2:
            raise KeyboardInterrupt
        return teach(batch)

    try:
        teacher_cache.write_top_k(Path("cache"), BATCHES, teacher)
        return [teacher_cache.TopKCache(Path("cache")).find(batch) for batch in BATCHES]
    except KeyboardInterrupt:
        return None
    finally:
        teacher_cache.SHARD_BATCHES = 64


def make_answers() -> None:
    _answers()


def make_half_answers() -> None:
    _answers(interrupted=True)


TEACHER = Kind(
    "a teacher's answers", make_answers, ("cache/[!.]*",), {"Distillation": _answers}, in_ci=0
)  # fmt: skip
TEACHER_HALF = Kind(
    "a teacher's answers, of which half are there",
    make_half_answers,
    ("cache/shard-00000[01]*",),
    {"Distillation": _answers},
    kept=False,
    in_ci=1,
)


def _latents(folder: str = "latents") -> Any:
    from benchmarks.trust_rows.toys import Patterns
    from lit_efficient import AutoencoderConfig, LatentData

    return LatentData(Patterns(), AutoencoderConfig(1, 2, 8), folder=folder)


def make_latents() -> None:
    data = _latents()
    data.images.setup("fit")
    data.write_cache(shard_rows=6)


def make_half_latents() -> None:
    """As a kill leaves it after its last shard."""
    from lit_efficient.data.latents.latent_writer import _Build

    _Build.finish = _interrupted  # type: ignore[method-assign]
    try:
        make_latents()
    except KeyboardInterrupt:
        return


def _interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def _encoded() -> Any:
    data = _latents()
    data.prepare_data()
    data.setup("fit")
    keys = [(index, 0) for index in range(len(data.images.dataset))]
    return [data.items[key] for key in keys], data.codec.mean, data.codec.std


def _finished() -> Any:
    make_latents()
    return _encoded()


LATENTS = Kind("a cache of latents", make_latents, ("latents/**/*",), {"LatentData": _encoded})
LATENTS_HALF = Kind(
    "a cache of latents that is not finished",
    make_half_latents,
    (".latents.building/**/*", "latents/**/*"),
    {"cache-latents": _finished},
    kept=False,
    in_ci=1,
)


def _digits() -> Any:
    from lit_efficient import AutoencoderConfig, LatentDigits

    data = LatentDigits(
        image_size=16,
        autoencoder=AutoencoderConfig(latent_channels=2, width=8),
        autoencoder_steps=2,
        judge_steps=2,
        cache_dir="cache",
    )
    data.prepare_data()
    data.setup("fit")
    tensors = [data.dataset[i]["mean"] for i in range(0, len(data.dataset), 100)]
    return tensors, data.codec.mean, data.codec.std, data.judge.state_dict(), data.codec.autoencoder.state_dict()


def make_digits() -> None:
    _digits()


DIGITS = Kind("the cache of LatentDigits", make_digits, ("cache/**/*",), {"LatentDigits": _digits})


def make_images() -> None:
    from tests.data.images.image_kit import write

    write(Path("images"), [f"{label}/{number}.png" for label in ("a", "b") for number in range(4)])
    _images()


def _images(train: str = "images") -> Any:
    from lit_efficient import ImageData
    from lit_efficient.data.images.image_view import ImageView

    data = ImageData(train=train, view=ImageView(resolution=16), val_fraction=0.3, batch_size=2, cache_dir="cache")
    data.prepare_data()
    data.setup("fit")
    items = [data.dataset[index, 0] for index in range(len(data.dataset))]
    return items, data.train_index, data.val_index, list(data.class_names)


IMAGES = Kind(
    "what ImageData found out",
    make_images,
    ("cache/images/**/*", "cache/file_hashes/*"),
    {"ImageData": _images},
    fixed=True,
    kept=False,
)


def make_table() -> None:
    import datasets

    from tests.data.images.image_kit import encoded, picture

    rows = {"image": [encoded(picture(number)) for number in range(8)], "label": [number % 2 for number in range(8)]}
    rows["caption"] = [f"number {number}" for number in range(8)]
    datasets.Dataset.from_dict(rows).to_parquet("rows.parquet")
    _images("rows.parquet")


def _mapped() -> Any:
    """As a process that has not compared the copy yet."""
    from lit_efficient.files import tables

    tables._checked.clear()
    return _images("rows.parquet")


TABLE = Kind(
    "the mapped copy of a parquet file",
    make_table,
    ("cache/datasets/**/*",),
    {"ImageData": _mapped},
    fixed=True,
)


# Shards --------------------------------------------------------------------------------------------------------------


def make_shards() -> None:
    saving = {"dirpath": "run", "save_last": True, "save_top_k": 0, "every_n_train_steps": 2}
    toys = "tests.cli.sharded_toy"
    config = {
        "trainer": {
            **{"accelerator": "cpu", "devices": 1, "max_steps": 2, "logger": False, "enable_progress_bar": False},
            **{"enable_model_summary": False, "num_sanity_val_steps": 0, "limit_val_batches": 2},
            "default_root_dir": "runs",
            "callbacks": [{"class_path": "ModelCheckpoint", "init_args": saving}],
            "strategy": {
                "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
                "init_args": {"data_parallel_size": 1, "tensor_parallel_size": 1},
            },
        },
        "model": {"class_path": f"{toys}.ShardedToy"},
        "data": {"class_path": f"{toys}.ToyRows"},
    }
    Path("config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    _command("fit", "--allow-import", "tests", "-c", "config.yaml")
    shutil.rmtree("runs")
    Path("run/last.ckpt").rename("shards.ckpt")
    shutil.rmtree("run")


def _shards() -> Any:
    """All tensors, as torch reads them; what ``fit`` checks is checked before."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint import load as load_shards

    from lit_efficient.cli.checkpoint import read
    from lit_efficient.files.checkpoints import load_verified

    assert read("shards.ckpt", "fit") == {}
    metadata = FileSystemReader("shards.ckpt").read_metadata()
    state = {
        name: torch.zeros(about.size, dtype=about.properties.dtype) if hasattr(about, "size") else None
        for name, about in metadata.state_dict_metadata.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_shards(state, checkpoint_id="shards.ckpt", no_dist=True)
    return state, load_verified("shards.ckpt/meta.pt")


def ended(text: str) -> Any:
    found = re.findall("ended with (.+)", text)
    assert found, text[-300:]
    return found


_ON_SHARDS = "--allow-import tests -c config.yaml --ckpt_path shards.ckpt"
SHARDS = Kind(
    "a checkpoint in shards",
    make_shards,
    ("shards.ckpt/*", "shards.ckpt/.metadata"),
    {"fit's first look": _shards},
    (
        Command(f"fit {_ON_SHARDS} --trainer.max_steps 3", ended),
        Command(f"validate {_ON_SHARDS}", losses),
    ),
)


# Peers: the same run with what each of them does by itself ------------------------------------------------------------


def _stock(steps: int, **fit: Any) -> Any:
    import lightning.pytorch as L

    from benchmarks.trust_rows.toys import Stranger, rows

    L.seed_everything(0, verbose=False)
    run = L.Trainer(
        **{"accelerator": "cpu", "devices": 1, "logger": False, "max_steps": steps, "enable_checkpointing": False},
        **{"enable_progress_bar": False, "enable_model_summary": False},
    )
    module = Stranger()
    run.fit(module, rows(), **fit)
    return run, module


def make_stock() -> None:
    _stock(2)[0].save_checkpoint("stock.ckpt")


def _stock_resumed() -> Any:
    """The state after one more step, which weights, optimizer, scheduler and counters all have a part in."""
    run, module = _stock(3, ckpt_path="stock.ckpt")
    state = run.optimizers[0].state_dict()
    return module.state_dict(), state, run.lr_scheduler_configs[0].scheduler.state_dict(), run.global_step


STOCK = Kind(
    "a checkpoint of stock Lightning",
    make_stock,
    ("stock.ckpt",),
    {"Trainer.fit": _stock_resumed},
    subject="Lightning",
)


def _transformers_trainer(steps: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

    from benchmarks.trust_rows.toys import LLAMA

    set_seed(0)
    fields = {key: value for key, value in LLAMA.items() if key != "model_type"}
    ids = torch.arange(96).reshape(12, 8) % 20
    arguments = TrainingArguments(
        "trainer", max_steps=steps, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ids]
    return Trainer(LlamaForCausalLM(LlamaConfig(**fields)), arguments, train_dataset=rows)


def make_trainer() -> None:
    _transformers_trainer(2).train()


def _trainer_resumed() -> Any:
    run = _transformers_trainer(3)
    run.args.save_strategy = "no"
    run.train(resume_from_checkpoint="trainer/checkpoint-2")
    state = run.optimizer.state_dict()
    return run.model.state_dict(), state, run.lr_scheduler.state_dict(), run.state.global_step, torch.get_rng_state()


TRAINER = Kind(
    "a checkpoint folder of Transformers' Trainer",
    make_trainer,
    ("trainer/checkpoint-2/*",),
    {"Trainer.train": _trainer_resumed},
    subject="Transformers",
)


KINDS: dict[str, Kind] = {
    "checkpoint": CHECKPOINT,
    "shards": SHARDS,
    "average": AVERAGES,
    "merge": MERGES,
    "snapshot": SNAPSHOTS,
    "ema-sweep": SWEPT,
    "adapter": ADAPTER,
    "merged": MERGED,
    "safetensors": SAFETENSORS,
    "diffusers": PIPELINE,
    "tokenizer": TOKENIZER,
    "tokens": TOKENS,
    "documents": DOCUMENTS,
    "selection": SELECTION,
    "scores": SCORES,
    "pairs": PAIRS,
    "teacher": TEACHER,
    "teacher-half": TEACHER_HALF,
    "latents": LATENTS,
    "latents-half": LATENTS_HALF,
    "digits": DIGITS,
    "images": IMAGES,
    "table": TABLE,
}
PEERS = {"lightning": STOCK, "trainer": TRAINER}
