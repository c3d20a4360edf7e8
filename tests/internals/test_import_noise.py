"""Importing these libraries says nothing that is not the user's, and what else these loggers say is heard."""

import importlib.util
import logging
import subprocess
import sys
from importlib import import_module

import pytest
import torch

from lit_efficient.internals.import_noise import NOISE, silence_imports
from lit_efficient.optimizers.low_bit import to_low_bit
from lit_efficient.optimizers.low_rank import to_low_rank
from lit_efficient.optimizers.low_rank_adamw import RandomDirections
from tests.internals.leaning import leans_on

# Prints the loggers of which something is left out; what is not left out goes to the standard error.
IMPORT = """
import logging
from lit_efficient.internals.import_noise import NOISE, silence_imports
silence_imports()
for name, text in NOISE.items():
    drop = logging.getLogger(name).filters[0].filter
    def watched(record, name=name, drop=drop):
        kept = drop(record)
        kept or print(name)
        return kept
    logging.getLogger(name).filters[0].filter = watched
import torchao.quantization
import bitsandbytes
from diffusers import StableDiffusionPipeline
"""


@pytest.mark.turns(4, family="whole programs")
@leans_on("torch", "utils._pytree", "import_noise")
def test_imports_are_silent():
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    said = set(done.stdout.split())
    rare = {"bitsandbytes.backends.cpu.ops"}  # on processors with AVX512-BF16 alone
    rare.add("bitsandbytes.autograd._functions")  # in a step of 8-bit layers
    if importlib.util.find_spec("torchvision"):
        rare.add("transformers.utils.import_utils")
    assert set(NOISE) - rare <= said if torch.version.cuda is None else said <= set(NOISE)  # whose libraries load there
    assert done.stderr == ""


def test_other_records_are_heard(caplog, monkeypatch):
    silence_imports()
    silence_imports()
    for name in NOISE:
        import_module(name)
    caplog.clear()
    for name, text in NOISE.items():
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "propagate", False)  # torch's own records do not reach the root
        monkeypatch.setattr(logger, "handlers", [caplog.handler])
        logger.warning("x%sx", text)
        logger.warning("a warning")
    assert caplog.messages == ["a warning"] * len(NOISE)


@pytest.mark.parametrize("low_rank", [False, True])
def test_code_that_converts_an_optimizer_itself_hears_nothing(low_rank, monkeypatch):
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    monkeypatch.setattr(logger, "filters", [])
    optimizer = torch.optim.AdamW([weight := torch.nn.Parameter(torch.zeros(128, 256))])
    if low_rank:
        to_low_rank(optimizer, [weight], RandomDirections(32, 10, 1.0, False), bits=8)
    else:
        to_low_bit(optimizer)
    assert not logger.filter(logger.makeRecord(logger.name, logging.WARNING, "", 0, NOISE[logger.name], (), None))


# What a user sees of the libraries below these techniques, from the programs as they are started.
PROGRAMS = """
from lit_efficient.__main__ import main
assert main(["techniques"]) == 0
for names in (["qlora"], ["peft_adapter"], ["low_bit_optimizer"]):
    words = ["check", "-c", "language_model", "--model.model.depth", "1"]
    assert main([*words, *[word for name in names for word in ("-c", name)]]) == 0
"""


@pytest.mark.turns(4, family="whole programs")
def test_programs_show_nothing_of_the_libraries_that_they_import():
    done = subprocess.run([sys.executable, "-c", PROGRAMS], capture_output=True, text=True, check=True)
    own = ("Seed set to", "GPU available", "check: ")
    said = [line for line in done.stderr.splitlines() if not line.startswith(own)]
    assert said == []


# The programs of a language model, from random weights to exports. What the command line of a fit silences for a
# process is undone after each.
CHAIN = """
import json, warnings
from pathlib import Path
from lightning_utilities.core import rank_zero
from lit_efficient.__main__ import main

def program(*words):
    with warnings.catch_warnings():
        assert main([*words]) == 0, words
    rank_zero.log.filters.clear()

turns = [{"role": "user", "content": "Add 1 and %d."}, {"role": "assistant", "content": "The sum is %d."}]
rows = [json.dumps({"messages": turns}).replace("%d", str(row)) for row in range(40)]
Path("rows.jsonl").write_text("\\n".join(rows))
data = "--data.train rows.jsonl --data.max_length 64 --data.chat.vocab_size 300 --data.val_fraction 0.2".split()
short = "--trainer.max_steps 2 --trainer.limit_val_batches 1 --trainer.val_check_interval 2".split()
short += ["--trainer.callbacks", "[]", *data]
short += "--trainer.enable_progress_bar false --trainer.log_every_n_steps 1".split()
tiny = "{model_type: llama, hidden_size: 64, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2}"
program("fit", "-c", "llm/pretrain", "--model.model.config_fields", tiny, *short)
int8 = "{class_path: QuantizeBase, init_args: {format: int8}}"
new = "runs/llm/{}/latest/last.ckpt".format
program("export", new("pretrain"), "--format", "merged", "--output", "runs/llm/base")
program("preview", "-c", "llm/lora", *data)
program("plan", "-c", "llm/lora", *data)
program("fit", "-c", "llm/lora", *short, "-c", "qlora")
program("fit", "-c", "llm/lora", *short, "-c", "lora", "--trainer.callbacks+", int8)
for kind in ("peft", "merged"):
    program("export", new("lora"), "--format", kind, "--output", kind)
program("generate", "--ckpt", new("lora"), "--prompt", "Add", "--max_new_tokens", "1")
"""
OURS = ("Seed set to", "GPU available", "`Trainer(", "`Trainer.fit`", "LanguageData", "Techniques:", "  ", "LoRA:")
OURS += ("LanguageModeling:", "Parameters:", "raw weights; outputs of", "runs/llm/", "search for", "data.", "warning: ")


@pytest.mark.nightly
@pytest.mark.timeout(1200)  # nine programs, one after another
def test_programs_of_a_language_model_show_nothing_of_the_libraries(tmp_path):
    done = subprocess.run([sys.executable, "-c", CHAIN], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stderr.splitlines() if line and not line.startswith(OURS)] == []
