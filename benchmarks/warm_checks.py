"""Preparation of a process that checks many configs. The first check is slow, later ones are fast."""

import contextlib
import functools
import importlib
import io
import os
import tempfile

# The last two import models of diffusers and transformers, which takes longer than a check.
CONFIGS = ("language_model", "latent_diffusion", "diffusion/images_autoencoder", "diffusion/photos_all")
MODULES = ("peft", "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto")


@functools.cache
def warm_up() -> None:
    """Check some configs, and import the modules that other checks need, once in a process."""
    from lit_efficient.__main__ import main

    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        for name in CONFIGS:
            assert main(["check", "-c", name]) == 0
        for name in MODULES:
            importlib.import_module(name)
        os.chdir(before)
