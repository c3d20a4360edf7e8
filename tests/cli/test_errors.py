"""An error is a sentence of ten lines at most that names key, value and what was meant."""

import inspect
import json
import os
import re
import threading
from dataclasses import fields, is_dataclass
from pathlib import Path

import lightning.pytorch
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from transformers import TrainingArguments

import lit_efficient
from lit_efficient import (
    PUBLIC,
    CausalLMConfig,
    DiffusionProcess,
    Distillation,
    DistillationLoss,
    GPTConfig,
    LanguageData,
    LanguageModeling,
    LatentData,
    LatentDiffusion,
    OnPolicyDistillation,
    PolicyLoss,
    PolicyOptimization,
    Preference,
    RewardModeling,
    Rollout,
    Samples,
    TimestepSampling,
    UnpairedPreference,
)
from lit_efficient.__main__ import main
from lit_efficient.catalog import PACKAGE
from lit_efficient.cli import arguments
from lit_efficient.cli.preflight import check_devices, check_monitors
from lit_efficient.data.text import arguments as text_arguments
from lit_efficient.errors import ConfigurationError
from lit_efficient.tasks import engines
from tests.cli.toy_runs import fit, refused
from tests.support_cli import Recorder, ToyModel

WRONG = {
    "unknown option": (["--trainer.max_epoch", "3"], ["trainer.max_epoch", "did you mean 'trainer.max_epochs'"]),
    "unknown argument of a class": (
        ["--model.hiden", "3"],
        ["ToyModel", "hiden", "did you mean 'hidden'", "accepted: "],
    ),
    "unknown argument of an optimizer": (["--optimizer", "SGD", "--optimizer.lrr", "1"], ["SGD", "did you mean 'lr'"]),
    "wrong type": (["--trainer.max_epochs", "many"], ["trainer.max_epochs", "many", "int, null"]),
    "wrong type in a class": (["--model.hidden", "wide"], ["ToyModel.hidden", "wide", "int"]),
    "wrong type in an optimizer": (["--optimizer", "SGD", "--optimizer.lr", "fast"], ["SGD.lr", "fast", "float"]),
    "wrong type in a schedule": (
        ["--optimizer=SGD", "--optimizer.lr=1", "--lr_scheduler=WarmupStableDecay", "--lr_scheduler.decay=fast"],
        ["WarmupStableDecay.decay", "fast", "float"],
    ),
    "null on the command line": (["--model.hidden", "null"], ["ToyModel.hidden", "null", "int"]),
    "choice": (["--trainer.precision", "bf16-mixd"], ["trainer.precision", "did you mean 'bf16-mixed'"]),
    "an optimizer's value out of range": (["--optimizer=AdamW", "--optimizer.lr=-1"], ["AdamW", "(lr=-1.0)"]),
    "another's precision": (
        ["--trainer.precision=fp16"],
        ["fp16 is not allowed: here it is trainer.precision: 16-mixed"],
    ),
    "no duration": (["--trainer.max_time=2024-13-45"], ["trainer: max_time must be", "2024-13-45"]),
    "value out of range": (["--model.hidden", "0"], ["hidden must be at least 1, got 0", "support_cli.py"]),
    "unknown class": (
        ["--trainer.callbacks+=StochasticDepht"],
        ["trainer.callbacks", "did you mean 'StochasticDepth'"],
    ),
    "unknown strategy": (["--trainer.strategy.class_path=Shardedtrategy"], ["did you mean 'ShardedStrategy'"]),
    "unknown argument of a schedule": (
        ["--optimizer=SGD", "--optimizer.lr=1", "--lr_scheduler=CosineAnnealingLR", "--lr_scheduler.T_ax=3"],
        ["T_ax", "did you mean 'T_max'"],
    ),
    "empty choice": (["--trainer.callbacks+=SpikeGuard", "--trainer.callbacks.action="], ["SpikeGuard.action", "''"]),
    "patience below 0": (
        ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=loss", "--trainer.callbacks.patience=-7"],
        ["patience must be at least 0", "-7"],
    ),
    "pattern that matches nothing": (
        ["--trainer.callbacks+=LoRA", "--trainer.callbacks.targets=[no_such]"],
        ["LoRA: targets: the pattern 'no_such'"],
    ),
    "a number of peft's below 0": (
        ["--trainer.callbacks+=PeftAdapter", "--trainer.callbacks.config={peft_type: LOKR, alpha: -7}"],
        ["config.alpha must be", "-7"],
    ),
    "unknown option of the command": (["--confg", "x.yaml"], ["'confg'", "did you mean 'config'"]),
    "unknown profiler": (["--trainer.profiler=simpl"], ["trainer.profiler", "'simpl'", "did you mean 'simple'"]),
    "unknown logger": (["--trainer.logger=CSVLgger"], ["trainer.logger", "CSVLgger", "did you mean 'CSVLogger'"]),
    "unknown optimizer": (["--optimizer", "AdamX"], ["optimizer", "'AdamX'", "did you mean 'Adam"]),
    "class of another kind": (
        ["--data", "tests.support_cli.ToyModel"],
        ["data", "ToyModel", "is not a LightningDataModule"],
    ),
    "no such class": (
        ["--model", "tests.support_cli.ToyModl"],
        ["'ToyModl'", "tests.support_cli", "did you mean 'ToyModel'"],
    ),
    "no such file": (["-c", "nothing.yaml"], ["config", "nothing.yaml", "no file"]),
    "no such module": (
        ["--data=lit_efficient.data.digitz.DigitImages"],
        ["there is no", "'digitz'", "lit_efficient.data"],
    ),
    "a part taken out as a file does": (["--trainer.callbacks-=EMA"], ["callbacks_", "--without NAME"]),
    "numbers of CPU cores": (["--trainer.devices=0,1"], ["trainer: devices must be auto, a number", "CPU", "'0,1'"]),
    "a list of CPU cores": (["--trainer.devices=[0]"], ["trainer: devices must be auto, a number", "CPU", "[0]"]),
    "all CPU cores": (["--trainer.devices=-1"], ["trainer: devices must be auto, a number", "CPU", "-1"]),
    "a variable of the environment": (
        ["--trainer.default_root_dir=${HOME}/x"],
        ["default_root_dir", "$NAME", "${HOME}"],
    ),
    "the character 0": (["--ckpt_path=a\0.ckpt"], ["ckpt_path", "without the character 0"]),
    "too many devices": (["--trainer.devices", "4096"], ["trainer.devices", "4096", str(os.cpu_count())]),
    "devices that are no number": (["--trainer.devices", "abc"], ["trainer: devices must be auto, a number", "'abc'"]),
    "a seed below 0": (["--seed_everything", "-1"], ["seed_everything", "at least 0", "-1"]),
    "no accumulation": (
        ["--trainer.accumulate_grad_batches", "0"],
        ["trainer: accumulate_grad_batches must be", "at least 1", "got 0"],
    ),
    "validation after 0 batches": (
        ["--trainer.val_check_interval", "0"],
        ["trainer: val_check_interval must be", "above 0", "got 0"],
    ),
    "clipping at infinity": (
        ["--trainer.gradient_clip_val", "1e999"],
        ["trainer: gradient_clip_val must be", "at least 0", "got inf"],
    ),
    "clipping below 0": (
        ["--trainer.gradient_clip_val", "-1"],
        ["trainer: gradient_clip_val must be", "at least 0", "got -1"],
    ),
    "folder below a file": (["--trainer.default_root_dir", "base.yaml/x"], ["trainer.default_root_dir", "base.yaml"]),
    "secret": (
        ["--trainer.callbacks+=tests.support_cli.Recorder", "--trainer.callbacks.api_key=***"],
        ["api_key", "give it once more"],
    ),
    "a name above its folder": (
        ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.filename=../../best"],
        ["filename", "../../best", "dirpath"],
    ),
    "no checkpoint": (["--ckpt_path", "none.ckpt"], ["ckpt_path", "none.ckpt"]),
    "folder as checkpoint": (["--ckpt_path", "."], ["ckpt_path", "folder"]),
    "config as checkpoint": (["--ckpt_path", "base.yaml"], ["ckpt_path", "base.yaml", "damaged"]),
    "empty allow-import": (["--allow-import"], ["--allow-import needs"]),
    "allow everything": (["--allow-import", "*"], ["--allow-import", "'*'"]),
}


@pytest.mark.turns(3)
@pytest.mark.parametrize(("arguments", "words"), WRONG.values(), ids=WRONG)
def test_an_error_is_a_sentence(arguments, words, capsys):
    said = refused(capsys, *arguments)
    assert [word for word in words if word not in said] == [], said


WRONG_YAML = {
    "duplicate key": ("trainer:\n  max_epochs: 1\n  max_epochs: 2\n", ["bad.yaml", "'max_epochs'", "line 2", "line 3"]),
    "no yaml": ("trainer:\n  max_epochs: [1\n", ["bad.yaml", "line 2"]),
    "a number for a section": ("trainer: 3\n", ["trainer", "mapping", "3", "bad.yaml, line 1"]),
    "a number for a group of options": (
        "data:\n  class_path: LatentDigits\n  init_args:\n    autoencoder: 3\n",
        ["LatentDigits.autoencoder", "3", "mapping", "bad.yaml, line 4"],
    ),
    "null for a group of options": (
        "data:\n  class_path: LatentDigits\n  init_args:\n    autoencoder: null\n",
        ["LatentDigits.autoencoder", "null", "bad.yaml, line 4"],
    ),
    "a list": ("- 1\n", ["bad.yaml", "mapping"]),
    "empty": ("", ["bad.yaml", "mapping"]),
    "unknown key": ("trainer:\n  max_epoch: 1\n", ["did you mean 'trainer.max_epochs'", "bad.yaml, line 2"]),
    "unknown top key": ("modle: ToyModel\n", ["did you mean 'model'", "bad.yaml, line 1"]),
    "unknown empty key": ("modle: {}\n", ["did you mean 'model'", "bad.yaml, line 1"]),
    "unknown empty branch": ("optimzer:\n  foo: {}\n", ["optimzer", "accepted: "]),
    "nothing below a key": ("seed_everything: 1\ntrainer:\n", ["trainer"]),
    "null": ("model:\n  init_args:\n    hidden: null\n", ["ToyModel.hidden", "null", "bad.yaml, line 3"]),
    "in a list": (
        "trainer:\n  callbacks:\n  - class_path: ModelCheckpoint\n    init_args:\n      monitr: x\n",
        ["ModelCheckpoint", "did you mean 'monitor'", "bad.yaml, line 5"],
    ),
    "misspelt init_args": (
        "trainer:\n  callbacks:\n  - class_path: EMA\n    init_arg:\n      decay: 0.9\n",
        ["bad.yaml", "'init_arg' in line 4", "did you mean 'init_args'"],
    ),
    "misspelt class_path": (
        "trainer:\n  callbacks:\n  - clas_path: EMA\n",
        ["bad.yaml", "'clas_path' in line 3", "did you mean 'class_path'"],
    ),
    "misspelt class_path of the model": (
        "model:\n  clas_path: ToyModel\n  init_args: {}\n",
        ["'clas_path'", "did you mean 'class_path'"],
    ),
    "arguments that are no mapping": (
        "model:\n  class_path: EMA\n  init_args: 3\n",
        ["bad.yaml", "init_args in line 3 is no mapping"],
    ),
    "a class that is null": (
        "trainer:\n  callbacks:\n  - class_path: null\n",
        ["bad.yaml", "class_path in line 3 names no class"],
    ),
    "a mapping that holds itself": (
        "trainer: &t\n  max_epochs: 1\n  logger: *t\n",
        ["bad.yaml", "line 1", "holds itself"],
    ),
    "aliases of aliases": (
        "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)),
        ["bad.yaml", "has more than 30,000 values"],
    ),
    "a very long text": (
        f"trainer:\n  precision: {300_000 * 'x'}\n",
        ["bad.yaml", "too long: more than 250,000 letters"],
    ),
    "brackets without an end": (10_000 * "[", ["bad.yaml", "nested too deeply"]),
    "one stateful callback twice": (
        "trainer:\n  callbacks:\n" + 2 * "  - class_path: EMA\n",
        ["EMA", "twice"],
    ),
    "an argument beside those of the class": (
        "trainer:\n  callbacks:\n  - class_path: ModelCheckpoint\n    dict_kwargs:\n      monitr: 1\n",
        ["ModelCheckpoint", "monitr"],
    ),
    "misspelt in a part of an argument": (
        "model:\n  class_path: LatentDiffusion\n  init_args:\n    samples:\n      cont: 3\n",
        ["did you mean 'samples.count'", "bad.yaml, line 5"],
    ),
    "wrong type where another class could stand": (
        "model:\n  class_path: LatentDiffusion\n  init_args:\n    backbone: {channels: 4, patch_size: wide}\n",
        ["DiTConfig.backbone.patch_size", "wide", "bad.yaml, line 4"],
    ),
    "misspelt in one of two classes": (
        "model:\n  class_path: LanguageModeling\n  init_args:\n    model:\n      configfields: {model_type: llama}\n",
        ["did you mean 'config_fields'"],
    ),
    "no such choice or null where another class could stand": (
        "model:\n  class_path: LanguageModeling\n  init_args:\n    model: {name_or_path: x, quantize: 4bit}\n",
        ["CausalLMConfig.model.quantize", "4bit", "'nf4', 'int8', null", "bad.yaml, line 4"],
    ),
    "no class_path beside its arguments": (
        "model:\n  class_path: LatentDiffusion\n  init_args:\n    backbone:\n      clas_path: DiTConfig\n"
        "      init_args: {channels: 4}\n",
        ["'clas_path' in line 5", "did you mean 'class_path'"],
    ),
    "the word None": ("trainer:\n  gradient_clip_val: None\n", ["gradient_clip_val: None", "did you mean null?"]),
    "no space after a colon": ("trainer:\n  max_epochs:3\n", ["trainer: 'max_epochs:3' is no mapping", "line 1"]),
    "an equals sign": ("trainer:\n  max_epochs = 3\n", ["trainer: 'max_epochs = 3' is no mapping"]),
    "arguments beside their class": (
        "optimizer:\n  class_path: SGD\n  lr: 0.1\n",
        ["error: no option 'lr'", "below init_args", "bad.yaml, line 3"],
    ),
    "a type instead of a class": ("optimizer:\n  type: SGD\n", ["Optimizer itself cannot stand", "class_path: NAME"]),
    "a section within another": ("trainer:\n  optimizer: SGD\n", ["trainer.optimizer", "did you mean 'optimizer'?"]),
    "a name of Hugging Face's": (
        "trainer:\n  gradient_checkpointing: true\n",
        ["trainer.gradient_checkpointing", "ActivationCheckpointing in trainer.callbacks", "bad.yaml, line 2"],
    ),
    "a name of peft's": (
        "trainer:\n  callbacks:\n  - class_path: LoRA\n    init_args: {lora_alpha: 8}\n",
        ["LoRA", "'lora_alpha': here it is alpha", "bad.yaml, line 4"],
    ),
    "a name of Hydra's": ("model:\n  _target_: ToyModel\n", ["_target_", "class_path"]),
    "a hub's name for a class": ("model: meta-llama/Llama-3.1-8B\n", ["'meta-llama/Llama-3.1-8B'", "name_or_path"]),
    "a call for a class": ("trainer:\n  callbacks: [EMA(decay=0.9)]\n", ["'EMA(decay=0.9)'", "did you mean 'EMA'?"]),
    "ours as Lightning's": (
        "trainer:\n  callbacks: [lightning.pytorch.callbacks.LoRA]\n",
        ["no 'LoRA' in lightning.pytorch.callbacks, did you mean 'LoRA'?"],
    ),
    "of the other Lightning": (
        "trainer:\n  callbacks: [pytorch_lightning.callbacks.EarlyStopping]\n",
        ["pytorch_lightning.callbacks.EarlyStopping is not a Callback", "did you mean 'EarlyStopping'?"],
    ),
    "half a name of a schedule": (
        "optimizer: SGD\nlr_scheduler: cosine\n",
        ["'cosine'", "did you mean 'WarmupCosine'"],
    ),
    "no number": ("trainer:\n  limit_val_batches: .nan\n", ["trainer.limit_val_batches: nan is no number"]),
    "an epoch that is none": ("trainer:\n  check_val_every_n_epoch: 0\n", ["check_val_every_n_epoch must be", "got 0"]),
    "null in the trainer": ("trainer:\n  deterministic: 3.5\n", ["trainer.deterministic", "3.5", "bad.yaml, line 2"]),
}


@pytest.mark.turns(3)
@pytest.mark.parametrize(("text", "words"), WRONG_YAML.values(), ids=WRONG_YAML)
def test_an_error_in_a_file_names_the_file_and_the_line(text, words, capsys, tmp_path):
    (tmp_path / "bad.yaml").write_text(text)
    said = refused(capsys, "-c", "bad.yaml")
    assert [word for word in words if word not in said] == [], said
    assert "--allow-import" not in said


MISSPELT = {
    "a class as a key": ("{EMA: {decay: 0.9}}", ["'EMA'", "is a class", "write class_path: EMA"]),
    "a scheduler as a key": ("{CosineAnnealingLR: {T_max: 3}}", ["write class_path: CosineAnnealingLR"]),
    "a class of somebody's as a key": ("{my_package.Mine: {}}", ["write class_path: my_package.Mine"]),
    "no class": ("{decay: 0.9}", ["'decay'", "callbacks", "is of no class: write class_path: NAME"]),
    "init_arg": ("{class_path: EMA, init_arg: {}}", ["'init_arg'", "did you mean 'init_args'"]),
    "other capitals": ("Ema", ["'Ema'", "did you mean 'EMA'"]),
    "a base": ("lightning.Callback", ["Callback itself cannot stand here: write class_path: NAME"]),
    "a path of a trusted package": ("lightning.callbacks.EarlyStoping", ["lightning.pytorch", "mean 'EarlyStopping'"]),
    "a package that is not there": ("lit_eficient.EMA", ["no module 'lit_eficient', did you mean 'lit_efficient'"]),
}


@pytest.mark.turns(3)
@pytest.mark.parametrize(("entry", "words"), MISSPELT.values(), ids=MISSPELT)
def test_a_misspelt_callback_is_told_how_to_write_it_and_never_to_trust_a_package(entry, words, capsys, tmp_path):
    path = tmp_path / "misspelt.yaml"
    path.write_text(f"trainer:\n  callbacks+:\n    - {entry}\n")
    for said in (refused(capsys, "-c", str(path)), refused(capsys, f"--trainer.callbacks+={entry}")):
        assert all(word in said for word in words), said
        assert "--allow-import" not in said


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--model.init_arg.x=3", ["ToyModel: no option 'init_arg', did you mean 'init_args'?", "accepted: hidden"]),
        ("--trainer.logger.save_di=x", ["trainer.logger: ", "'save_di': 'x'", "is not allowed", "Logger"]),
        ("--trainer.plugins+={Float8: {}}", ["'Float8' of plugins is of no class"]),
    ],
)
def test_a_misspelt_part_on_the_command_line_is_named(option, words, capsys):
    said = refused(capsys, option)
    assert all(word in said for word in words), said


def test_a_package_that_is_there_may_be_trusted(capsys):
    assert "--allow-import peft" in refused(capsys, "--trainer.callbacks+=peft.LoraModel")


@pytest.mark.parametrize("content", [b"\x80\x02}q\x00.", "trainer:\n  max_epochs: 1\n".encode("utf-16"), b"\x00\x01"])
def test_a_file_that_is_no_text_is_refused(content, capsys, tmp_path):
    (tmp_path / "bad.yaml").write_bytes(content)
    assert "bad.yaml" in refused(capsys, "-c", "bad.yaml")


def test_a_section_s_file_that_is_no_text_is_named(capsys, tmp_path):
    (tmp_path / "trainer.yaml").write_bytes(b"max_epochs: 1 # \xff")
    (tmp_path / "outer.yaml").write_text("trainer: trainer.yaml\n")
    assert "trainer.yaml: it is no UTF-8 text" in refused(capsys, "-c", "outer.yaml")


@pytest.mark.parametrize(("content", "key"), [("1: 2", "trainer.1"), ("true: 3", "trainer.True"), ("no: 3", "no"),
                                              ("max_step: 3", "did you mean 'trainer.max_steps'")])  # fmt: skip
def test_a_key_of_a_section_s_file_is_named_and_the_file(content, key, capsys, tmp_path):
    (tmp_path / "trainer.yaml").write_text(f"{content}\n")
    (tmp_path / "outer.yaml").write_text("trainer: trainer.yaml\n")
    said = refused(capsys, "-c", "outer.yaml")
    assert key in said
    assert "trainer.yaml" in said


def test_a_pipe_is_read_where_somebody_writes_into_it(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(arguments, "_PATIENCE", 0.1)
    os.mkfifo(pipe := tmp_path / "pipe.yaml")
    (tmp_path / "outer.yaml").write_text("trainer: pipe.yaml\n")
    assert "pipe.yaml: it is a pipe, and nothing came" in refused(capsys, "-c", "pipe.yaml")
    assert "pipe.yaml is a pipe" in refused(capsys, "-c", "outer.yaml")
    writer = threading.Thread(target=pipe.write_text, args=["trainer:\n  max_step: 3\n"])  # waits for a reader
    writer.start()
    monkeypatch.setattr(arguments, "_PATIENCE", 60)
    assert "did you mean 'trainer.max_steps'" in refused(capsys, "-c", "pipe.yaml")
    writer.join()


def test_no_arguments_are_those_of_the_class(tmp_path):
    (tmp_path / "none.yaml").write_text("optimizer:\n  class_path: SGD\n  init_args:\n")
    assert fit("-c", "none.yaml") == 0


def test_a_monitor_is_refused_where_all_who_log_are_known(capsys):
    class Known(ToyModel):
        logs = ("val/loss",)

    ours = [EarlyStopping("val/los")]
    with pytest.raises(ConfigurationError, match=r"EarlyStopping: nobody logs .*'val/los', did you mean 'val/loss'"):
        check_monitors(ours, None, Known())
    with pytest.raises(ConfigurationError, match="lr_scheduler: nobody logs"):
        check_monitors([], "va/loss", Known())
    check_monitors([EarlyStopping("val/loss_raw")], "mine", Known())
    check_monitors([*ours, Recorder()], None, Known())
    check_monitors(ours, None, ToyModel())


def test_debug_and_bugs_show_the_traceback(monkeypatch):
    with pytest.raises(ConfigurationError):
        fit("--trainer.devices", "4096", "--debug")
    monkeypatch.setenv("LIT_EFFICIENT_DEBUG", "1")
    with pytest.raises(ConfigurationError):
        fit("--trainer.devices", "4096")
    monkeypatch.delenv("LIT_EFFICIENT_DEBUG")
    monkeypatch.setattr(ToyModel, "training_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit()


def test_devices_are_counted(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for devices in ("auto", 1, 2, "2"):
        check_devices("cpu", devices)
    for devices in (3, "3", "0,1", [0, 1], -1, "-1", "2,", 0, -7):  # of numbers Lightning knows nothing on a CPU
        with pytest.raises(ConfigurationError, match=r"trainer(\.|: )devices"):
            check_devices("cpu", devices)


def test_a_strategy_that_pickles_the_run_is_refused(capsys):
    said = refused(capsys, "--trainer.devices=2", "--trainer.strategy=ddp_spawn")
    assert "cannot be pickled: use ddp, or ddp_fork" in said


def test_processes_of_torchrun_that_would_each_train_alone_are_refused(capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = refused(capsys, "--trainer.devices=1")
    assert "torchrun has started 2 processes, and devices times num_nodes is 1" in said


def test_an_interval_beyond_the_epoch_is_refused_and_what_counts_across_epochs_runs(capsys):
    """The number of batches is known once the data is read, so Lightning finds this after the other checks."""
    longer = ("--trainer.val_check_interval", "5")
    assert fit(*longer) == 2
    text = capsys.readouterr().err
    assert "trainer: val_check_interval must be at most 4, the number of batches of an epoch, got 5" in text
    assert "check_val_every_n_epoch: null" in text
    assert "Traceback" not in text
    assert fit(*longer, "--trainer.check_val_every_n_epoch", "null") == 0


ELSEWHERE = json.loads((PACKAGE / "names_elsewhere.json").read_text("utf-8"))


def test_names_elsewhere_lead_to_what_is_here():
    """Each begins with an option of a part that exists, or of the class in front of its dot, or says that none does."""
    own = {"ckpt_path", "seed_everything", "optimizer", "lr_scheduler", "class_path", "--without", "--quiet"}
    own |= {"fit", "validate", "predict"}
    of_data = {field.name for kind in vars(text_arguments).values() if is_dataclass(kind) for field in fields(kind)}
    parts = {
        "trainer": (Trainer,),
        "model": (
            *(LanguageModeling, Preference, UnpairedPreference, RewardModeling, Distillation, LatentDiffusion),
            *(PolicyOptimization, OnPolicyDistillation),
        ),
        "data": (LanguageData, LatentData),
    }
    inner = {"model": (CausalLMConfig, GPTConfig), "schedule": (DiffusionProcess,), "samples": (Samples,)}
    inner |= {"timestep_sampling": (TimestepSampling,), "objective": (DistillationLoss,)}
    inner |= {"rollout": (Rollout,), "loss": (PolicyLoss,)}
    for name, here in ELSEWHERE.items():
        owner, _, old = name.rpartition(".")
        first, *rest = re.split(r"[ ,:]+", here)
        if first == "none":
            assert here.startswith("none, because "), name
            continue
        part, _, option = first.partition(".")
        option, _, field = option.partition(".")
        owner = "" if owner == "Trainer" else owner
        holders = parts.get(part) if option else None
        if holders is None:
            named = getattr(lit_efficient, owner or (rest or ["no"])[-1], None)
            holders = (named,) if named else ()
            option = option or part
        known = {one for holder in holders for one in inspect.signature(holder).parameters} or own
        is_class = first in {*PUBLIC, "ModelCheckpoint", "EarlyStopping"} and "in trainer.callbacks" in here
        assert option in known | own or is_class, name
        if field:
            below = {one for kind in inner.get(option, ()) for one in inspect.signature(kind).parameters} or of_data
            assert field.partition(".")[0] in below, name
        assert not owner or old not in known, name
        for kind, option in re.findall(r"^([A-Z]\w+) in trainer.callbacks,(?: whose| with) ([a-z_]+)", here):
            found = getattr(lit_efficient, kind, None) or getattr(lightning.pytorch.callbacks, kind)
            assert option in {*inspect.signature(found).parameters, "trainer"}, f"{name}: {kind} has no {option}"
        for kind, option in re.findall(r"\bas ([A-Z]\w+) with ([a-z_]+)", here):
            places = (lit_efficient, torch.optim, lightning.pytorch.strategies, lightning.pytorch.loggers, engines)
            found = next(getattr(place, kind) for place in places if hasattr(place, kind))
            # DDPStrategy gives the first two to DistributedDataParallel, and WandbLogger the third to wandb.init
            passed = {"bucket_cap_mb", "broadcast_buffers", "entity"}
            assert option in {*inspect.signature(found).parameters, *passed}, f"{name}: {kind} has no {option}"


def test_every_argument_of_hugging_faces_trainer_is_answered():
    names = {field.name for field in fields(TrainingArguments)}
    assert len(names) > 100
    assert sorted(names - set(ELSEWHERE)) == []


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--tf32", "no option 'tf32': here it is FastMatmul in trainer.callbacks"),
        ("--trainer.warmup_ratio", "no option 'trainer.warmup_ratio': here it is lr_scheduler, as WarmupCosine"),
        ("--data.dataloader_pin_memory", "no option 'dataloader_pin_memory': here it is data.pin_memory"),
        ("--model.push_to_hub", "no option 'push_to_hub': it has no counterpart here, because runs are not uploaded"),
        ("--batch_size", "no option 'batch_size', did you mean 'data.batch_size'?"),
        ("--trainer.files.paths", "no option 'trainer.files', did you mean 'data.files'?"),
        ("--learning_rate", "no option 'learning_rate': here it is model.learning_rate, or lr of the optimizer"),
        ("--peft_config", "no option 'peft_config': here it is PeftAdapter in trainer.callbacks, with config"),
        ("--trainer.seed", "no option 'trainer.seed': here it is seed_everything"),
    ],
)
def test_a_name_of_another_trainer_is_answered(option, said, capsys):
    assert main(["fit", "-c", "language_model", option, "1"]) == 2
    assert said in capsys.readouterr().err


def test_fields_of_another_class_replace_those_of_an_earlier_config(capsys, tmp_path):
    def printed(fields: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(f"model:\n  init_args:\n    model: {fields}\n")
        code = main(["fit", "-c", "language_model", "-c", str(path), "--print_config"])
        text = capsys.readouterr()
        return text.err if code else text.out

    said = printed("{name_or_path: gpt2, quantize: int8}")
    assert "name_or_path: gpt2" in said
    assert "num_heads" not in said
    said = printed("{name_or_path: gpt2, load_in_4bit: true}")
    assert "CausalLMConfig.model: no option 'load_in_4bit': here it is quantize: nf4" in said


def test_a_tilde_is_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert fit("--trainer.default_root_dir=~/runs", "--trainer.max_steps=1") == 0
    assert [*(tmp_path / "home/runs").glob("*/config.yaml")]
    assert not Path("~").exists()
