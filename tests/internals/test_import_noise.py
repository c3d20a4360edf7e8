"""Importing torchao and bitsandbytes says nothing that is not the user's, and what else these loggers say is heard."""

import logging
import subprocess
import sys
from importlib import import_module

import pytest
import torch

from lit_efficient.internals.import_noise import NOISE, silence_imports
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
"""


@pytest.mark.turns(4, family="whole programs")
@leans_on("torch", "utils._pytree", "import_noise")
def test_imports_are_silent():
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    said = set(done.stdout.split())
    rare = {"bitsandbytes.backends.cpu.ops"}  # on processors with AVX512-BF16 alone
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
    said = [line for line in done.stderr.splitlines() if not line.startswith(("Seed set to", "GPU available"))]
    assert said == []
