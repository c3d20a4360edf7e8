"""Imported by a server of processes: what it forks has checked some configs already, and checks the next in no time."""

import contextlib
import importlib
import io
import os
import tempfile

from lit_efficient.__main__ import main

with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
    before = os.getcwd()
    os.chdir(folder)
    # The last of these bring models of diffusers and transformers, whose imports take longer than a check.
    for name in ("language_model", "latent_diffusion", "diffusion/images_autoencoder", "diffusion/photos_all"):
        assert main(["check", "-c", name]) == 0
    for name in ("peft", "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto"):
        importlib.import_module(name)
    os.chdir(before)
