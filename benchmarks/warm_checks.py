"""Imported by a server of processes: what it forks has checked two configs already, and checks the next in no time."""

import contextlib
import io
import os
import tempfile

from lit_efficient.__main__ import main

with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
    before = os.getcwd()
    os.chdir(folder)
    for name in ("language_model", "latent_diffusion"):
        assert main(["check", "-c", name]) == 0
    os.chdir(before)
