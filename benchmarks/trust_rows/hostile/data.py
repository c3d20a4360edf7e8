"""Encoded data, arrays, archives and tables of numbers."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

from benchmarks.trust_rows.hostile.cases import PAYLOADS, Act, cases_of, data_folder, dotted, image_data


def _encoded(read: bool = True, **options: Any) -> Act:
    def act() -> object:
        source = dotted("lit_efficient.data.latents.encoded_sources.open_encoded")("data", **options)
        return [source.read(row, list(source.fields)) for row in range(min(2, len(source)))] if read else source

    return act


@cases_of("npy", ("object", "huge", "header", "nested-header", "negative", "array", "archive"))
def _npy(name: str) -> Act:
    import numpy as np

    folder = data_folder()
    content = _npy_bytes(np.array([PAYLOADS["exec"]()], dtype=object))
    if name == "array":
        (folder / "latents.npy").write_bytes(content)
        return _encoded()
    if name == "archive":
        np.savez(folder / "latents.npz", latents=np.array([PAYLOADS["exec"]()], dtype=object))
        return _encoded()
    if name != "object":
        shape = {"huge": "(1099511627776, 1099511627776)", "negative": "(-5, 3)", "nested-header": "(" * 5000}.get(name)
        text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape or '(2, 2)'}}}"
        text = "[" * 60_000 if name == "header" else text
        content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()
    with tarfile.open(folder / "a.tar", "w") as archive:
        info = tarfile.TarInfo("a.latents.npy")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return _encoded()


_MDS = ("climbing", "absolute", "pkl", "object", "offsets", "shape", "huge-count", "nested-json", "encoding")


@cases_of("mds", _MDS)
def _mds(name: str) -> Act:
    folder = data_folder()
    sample = struct.pack("<I", 8) + bytes(8)
    head = 12
    raw = struct.pack("<III", 1, head, head + len(sample)) + sample
    if name == "offsets":
        raw = struct.pack("<III", 1, 0xFFFFFFF0, 0xFFFFFFFF) + sample
    if name == "pkl":
        evil = pickle.dumps(PAYLOADS["exec"]())
        sample = struct.pack("<I", len(evil)) + evil
        raw = struct.pack("<III", 1, head, head + len(sample)) + sample
    (folder / "shard.mds").write_bytes(raw)
    base = {"climbing": "../../outside/shard", "absolute": os.path.abspath("../outside/shard")}.get(name, "shard.mds")
    size = Path(folder, base).stat().st_size
    encoding = {"pkl": "pkl", "object": "ndarray:O:1", "shape": "ndarray:uint8:1000000000000", "encoding": "jpeg"}
    shard = {"format": "mds", "column_names": ["latents"], "column_encodings": [encoding.get(name, "bytes")]}
    shard |= {"column_sizes": [None], "raw_data": {"basename": base, "bytes": size}, "zip_data": None, "samples": 1}
    shard["samples"] = 1 << 40 if name == "huge-count" else 1
    (folder / "index.json").write_text("[" * 200_000 if name == "nested-json" else json.dumps({"shards": [shard]}))
    return _encoded()


@cases_of("safetensors", ("header", "offsets", "shape", "json", "nested-json", "overlap"))
def _safetensors(name: str) -> Act:
    tensor = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    tensor |= {"offsets": {"data_offsets": [0, 1 << 60]}, "shape": {"shape": [1 << 40, 1 << 40]}}.get(name, {})
    both = {"latents": tensor, "labels": tensor} if name == "overlap" else {"latents": tensor}
    text = {"json": b"{" * 100_000, "nested-json": b'{"a":' + b"[" * 100_000}.get(name, json.dumps(both).encode())
    size = 1 << 62 if name == "header" else len(text)
    path = data_folder() / "x.safetensors"
    path.write_bytes(struct.pack("<Q", size) + text + bytes(16))

    def act() -> None:
        for reader in (_encoded(), lambda: dotted("lit_efficient.files.checkpoints.read")(path)):
            assert callable(reader)
            try:
                reader()
            except dotted("lit_efficient.LitEfficientError"):
                continue

    return act


@cases_of(
    "tar", ("climbing", "absolute", "link", "hard-link", "pth", "pkl", "npy-object", "sparse", "device", "gzip-member")
)
def _tar(name: str) -> Act:
    import numpy as np

    folder = data_folder()
    evil = pickle.dumps(PAYLOADS["exec"]())
    members: dict[str, bytes] = {"a.cls": b"1", "a.latents.npy": _npy_bytes(np.zeros(2))}
    if name in ("pth", "pkl"):
        buffer = io.BytesIO()
        dotted("torch.save")(PAYLOADS["exec"](), buffer)
        members[f"a.{name}"] = buffer.getvalue() if name == "pth" else evil
    if name == "npy-object":
        members["a.latents.npy"] = _npy_bytes(np.array([PAYLOADS["exec"]()], dtype=object))
    if name == "gzip-member":
        members["a.txt.gz"] = b"".join(gzip.compress(bytes(64 << 20)) for _ in range(64))
    with tarfile.open(folder / "a.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        for member, content in members.items():
            info = tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("a.txt")
        if name in ("link", "hard-link", "device"):
            link.type = {"link": tarfile.SYMTYPE, "hard-link": tarfile.LNKTYPE}.get(name, tarfile.CHRTYPE)
            link.linkname = os.path.abspath("../outside/secret.txt")
            archive.addfile(link)
        elif name in ("climbing", "absolute"):
            link.name = "../../outside/new.txt" if name == "climbing" else os.path.abspath("../outside/new.txt")
            link.size = 1
            archive.addfile(link, io.BytesIO(b"x"))
        elif name == "sparse":
            archive.fileobj.write(_sparse("a.txt", 1 << 36))  # type: ignore[union-attr]
            archive.offset += 512
    return _encoded()


def _npy_bytes(array: Any) -> bytes:
    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def _sparse(name: str, size: int) -> bytes:
    """The header of a file of zeros, without its bytes."""
    info = tarfile.TarInfo(name)
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT)[:512])
    block[156:157] = b"S"
    block[257:265] = b"ustar  \0"
    block[386:398] = b"%011o\0" % (size - 1)  # one part, at the end, of no length
    block[398:410] = b"%011o\0" % 0
    block[483:495] = b"%011o\0" % min(size, 0o77777777777)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@cases_of("parquet", ("extension", "path", "climbing", "features", "damaged", "pickled-column"))
def _parquet(name: str) -> Act:
    import pyarrow as pa
    from pyarrow import parquet

    folder = data_folder()
    if name in ("path", "climbing"):
        where = os.path.abspath("../outside/secret.png") if name == "path" else "../../outside/secret.png"
        kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        table = pa.table({"image": pa.array([{"bytes": None, "path": where}] * 2, kind)})
        parquet.write_table(table, folder / "a.parquet")
        return image_data
    field = pa.field("latents", pa.binary())
    if name == "extension":
        meta = {
            "ARROW:extension:name": "arrow.py_extension_type",
            "ARROW:extension:metadata": pickle.dumps(PAYLOADS["exec"]()),
        }
        field = pa.field("latents", pa.binary(), metadata=meta)
    evil = pickle.dumps(PAYLOADS["exec"]())
    meta = {"huggingface": json.dumps({"info": {"features": {"latents": {"_type": "planted.Model", "dtype": "x"}}}})}
    schema = pa.schema([field], metadata=meta if name == "features" else None)
    parquet.write_table(pa.table([pa.array([evil, evil], pa.binary())], schema=schema), folder / "a.parquet")
    if name == "damaged":
        content = bytearray((folder / "a.parquet").read_bytes())
        content[-12:-8] = b"\xff\xff\xff\x7f"
        content[40:60] = os.urandom(0) + b"\xff" * 20
        (folder / "a.parquet").write_bytes(content)
    return _encoded()
