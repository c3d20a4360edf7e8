"""Checkpoints with code in them: each payload, each command, each place in a file, each format."""

from __future__ import annotations

import gzip
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

from benchmarks.trust_rows.hostile.cases import COMMANDS, PAYLOADS, Act, cases_of, checkpoint, saved


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

    evil = checkpoint(x=PAYLOADS["exec"]())
    path = Path("evil.ckpt")
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
