"""Checkpoints that hold data alone, in one file or in shards, and mean harm."""

from __future__ import annotations

import functools
import importlib
import io
import json
import os
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

from benchmarks.trust_rows.hostile.cases import (
    COMMANDS,
    PAYLOADS,
    Act,
    Payload,
    cases_of,
    checkpoint,
    dotted,
    model_folder,
    plant,
    restored,
    saved,
    try_each,
)


@cases_of("data", ("instantiator", "class-path", "task", "name-or-path", "auto-map", "technique", "peft", "config"))
def _data(name: str) -> Act:
    plant("planted")
    parts: dict[str, Any] = {
        "instantiator": {"hyper_parameters": {"_instantiator": "planted.f", "_class_path": "planted.Model"}},
        "class-path": {"hyper_parameters": {"class_path": "planted.Model", "_class_path": "planted.Model"}},
        "task": {"language_modeling": {"task": "planted.Model"}, "hyper_parameters": {}},
        "name-or-path": {"language_modeling": {}, "hyper_parameters": {"model": {"name_or_path": model_folder()}}},
        "auto-map": {"lit_efficient": {"adapters": _adapters()}},
        "technique": {"lit_efficient": {"transforms": [{"name": "planted.Model", "phase": 1, "arguments": {}}]}},
        "peft": {"lit_efficient": {"peft": {**_adapters(), "kind": "planted.Model"}}},
        "config": {"lit_efficient": {"config": {"model": {"class_path": "planted.Model"}}}},
    }[name]
    path = saved(checkpoint(**parts))

    def act() -> None:
        main = dotted("lit_efficient.__main__.main")
        commands = [
            functools.partial(main, COMMANDS[command](path)) for command in ("fit", "export-merged", "generate")
        ]
        try_each([*commands, lambda: restored(path)])

    return act


def _adapters() -> dict[str, Any]:
    auto_map = {"AutoConfig": "planted.Model", "AutoModelForCausalLM": "planted.Model"}
    return {"root": "", "class": "planted.Model", "base": ".", "config": json.dumps({"model_type": "evil", **auto_map})}


def _nested(depth: int, width: int = 10) -> Any:
    """``width ** depth`` leaves in ``depth`` lists: a pickle keeps each once."""
    inner: Any = [0] * width
    for _ in range(depth):
        inner = [inner] * width
    return inner


@cases_of("bomb-in", ("hyper_parameters", "datamodule_hyper_parameters", "callbacks", "lit_efficient", "state_dict"))
def _bomb(name: str) -> Act:
    bomb = {"callbacks": {"x": {"y": _nested(12)}}, "lit_efficient": {"config": {"model": _nested(12)}}}
    return COMMANDS["fit"](saved(checkpoint(**{name: bomb.get(name, {"x": _nested(12)})})))


@cases_of("bomb", ("deflated", "overlapping", "long-entry", "expanded", "wide", "deep", "loop", "huge-shape"))
def _bomb_file(name: str) -> Act:
    import torch

    path = Path("evil.ckpt")
    if name in ("deflated", "overlapping"):
        saved(checkpoint())
        _with_zeros(path, overlapping=name == "overlapping")
    elif name == "long-entry":
        saved(checkpoint())
        content = bytearray(path.read_bytes())
        at = content.index(b"PK\x01\x02") + 20
        content[at : at + 8] = b"\xff\xff\xff\x7f" * 2
        path.write_bytes(content)
    elif name in ("expanded", "wide"):
        shape = (1 << 18, 1 << 18) if name == "expanded" else (1 << 40,)
        saved(checkpoint(state_dict={"layer.weight": torch.zeros(1).expand(shape)}))
    elif name == "huge-shape":
        saved({"state_dict": {"layer.weight": torch.zeros(7, 3)}, "optimizer_states": []})
        _with_opcodes(path, b"K\x07K\x03\x86", b"J\xff\xff\xff\x7fK\x03\x86")
    elif name == "deep":  # Python 3.12 writes no such thing itself
        saved(checkpoint(hyper_parameters={"x": "inner"}))
        _with_opcodes(path, b"X\x05\x00\x00\x00inner", b"]" * 900 + b"a" * 899)
    else:
        inner: list[Any] = []
        inner.append(inner)
        saved(checkpoint(hyper_parameters={"x": inner}))
    return COMMANDS["average" if name in ("expanded", "wide", "huge-shape") else "fit"](str(path))


def _with_opcodes(path: Path, old: bytes, new: bytes) -> None:
    """Write other opcodes of pickle into a checkpoint."""
    with zipfile.ZipFile(path) as archive:
        records = {member: archive.read(member) for member in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in records.items():
            archive.writestr(member, content.replace(old, new))


def _with_zeros(path: Path, overlapping: bool) -> None:
    """Add records of 16 GB in all to a checkpoint: of the same 256 MB of zeros, packed, in the same place at wish."""
    size = 1 << 28
    packed = zlib.compressobj(9, zlib.DEFLATED, -15)
    zeros = packed.compress(bytes(size)) + packed.flush()
    with zipfile.ZipFile(path, "a") as archive:
        crc = zlib.crc32(bytes(size))
        for number in range(64):
            info = zipfile.ZipInfo(f"archive/data/{100 + number}" if not overlapping else "archive/data/1")
            info.compress_type = 8
            info.CRC = crc
            info.file_size = size
            info.compress_size = len(zeros)
            assert archive.fp is not None
            if number == 0 or not overlapping:
                info.header_offset = archive.start_dir
                archive.fp.seek(archive.start_dir)
                archive.fp.write(info.FileHeader() + zeros)
                archive.start_dir = archive.fp.tell()
                first = info.header_offset
            info.header_offset = first if overlapping else info.header_offset
            info.filename = f"archive/data/{100 + number}"
            archive.filelist.append(info)
        archive._didModify = True


_SHARDS = (
    "metadata",
    "getattr",
    "meta",
    "piece",
    "absolute",
    "climbing",
    "link",
    "deepspeed",
    "huge",
    "negative",
    "text",
)


@cases_of("shards", _SHARDS)
def _shards(name: str) -> Act:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    folder = Path("evil.ckpt")
    folder.mkdir()
    piece = io.BytesIO()
    import torch

    torch.save(PAYLOADS["exec"]() if name == "piece" else torch.zeros(2), piece)
    (folder / "0.distcp").write_bytes(piece.getvalue())
    saved(PAYLOADS["exec"]() if name == "meta" else checkpoint(state_dict={}), str(folder / "meta.pt"))
    place = {"absolute": os.path.abspath("../outside/shard"), "climbing": "../../outside/shard", "link": "linked"}
    if name == "link":
        os.symlink("../../outside/shard", folder / "linked")
    length = {"huge": 1 << 60, "negative": -5}.get(name, len(piece.getvalue()))
    info = _StorageInfo(place.get(name, "0.distcp"), 0, length)
    content: Any = Metadata({}, storage_data={MetadataIndex("layer.weight"): info})
    evil = PAYLOADS["exec"]()
    content = {"metadata": evil, "text": "text"}.get(name, content)
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    if name == "getattr":
        inside = Payload(getattr, Payload(importlib.import_module, "os"), "mkdir")
        (folder / ".metadata").write_bytes(pickle.dumps(inside))
    if name == "deepspeed":
        (folder / ".metadata").unlink()
        (folder / "latest").write_text("global_step1")
        saved(evil, str(folder / "global_step1/mp_rank_00_model_states.pt"))
    return COMMANDS["fit"](str(folder))
