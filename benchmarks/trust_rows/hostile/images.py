"""Pictures, folders of them, and rows of text."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import zlib
from pathlib import Path

from benchmarks.trust_rows.hostile.cases import (
    CANARY,
    Act,
    cases_of,
    data_folder,
    dotted,
    image_data,
    mark_unread,
    plant,
)


def _png(width: int, height: int, bits: int = 1, more: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = bytes(1 + (width * bits + 7) // 8)
    packer = zlib.compressobj(9)
    lines = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + more + chunk(b"IDAT", lines) + chunk(b"IEND", b"")


_IMAGES = ("bomb", "large", "text", "eps", "psd", "fits", "svg", "gif", "tiff", "icc", "exif", "webp", "named-png")


@cases_of("image", _IMAGES)
def _image(name: str) -> Act:
    from PIL import Image

    path = data_folder() / "a.png"
    if name == "bomb":
        path.write_bytes(_png(60_000, 60_000))
    elif name == "large":
        path.write_bytes(_png(13_000, 13_000))
    elif name == "text":
        packed = zlib.compress(bytes(200 << 20), 9)
        data = b"k\0\0" + packed
        text = struct.pack(">I", len(data)) + b"zTXt" + data + struct.pack(">I", zlib.crc32(b"zTXt" + data))
        path.write_bytes(_png(8, 8, more=text))
    elif name == "eps":
        Path("gs").write_text(f"#!/bin/sh\ntouch {os.path.abspath(CANARY)}\n")
        Path("gs").chmod(0o755)
        os.environ["PATH"] = f"{os.getcwd()}:{os.environ['PATH']}"
        path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(x) run\n%%EOF\n")
    elif name == "psd":
        path.write_bytes(b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 30_000, 30_000, 8, 3) + bytes(14))
    elif name == "fits":
        cards = ["SIMPLE  =                    T", "BITPIX  =                    8", "NAXIS   =                    2"]
        cards += ["NAXIS1  =                90000", "NAXIS2  =                90000", "END"]
        path.write_bytes("".join(card.ljust(80) for card in cards).encode().ljust(2880))
    elif name == "svg":
        entity = '<!DOCTYPE s [<!ENTITY x SYSTEM "../outside/secret.txt">]><svg>&x;</svg>'
        path.write_text(entity)
    elif name == "gif":
        path.write_bytes(
            b"GIF89a" + struct.pack("<HH", 60_000, 60_000) + b"\x80\0\0" + bytes(6) + b",\0\0\0\0`\xea`\xea\0\2\0;"
        )
    elif name == "tiff":
        entries = b"".join(struct.pack("<HHII", tag, 4, 1, 60_000) for tag in (256, 257))
        path.write_bytes(b"II*\0\x08\0\0\0" + struct.pack("<H", 2) + entries + struct.pack("<I", 8))
    else:
        image = Image.new("RGB", (8, 8))
        buffer = io.BytesIO()
        if name == "exif":
            exif = Image.Exif()
            exif[0x0112] = 65_535
            exif[0x010E] = "x" * 60_000
            image.save(buffer, "JPEG", exif=exif)
        elif name == "webp":
            image.save(buffer, "WEBP")
            buffer.getbuffer()[20:30] = b"\xff" * 10
        else:
            image.save(buffer, "PNG", icc_profile=b"\xff" * 5_000)
        path.write_bytes(buffer.getvalue())
    return image_data


@cases_of("folder", ("script", "readme", "state", "metadata-climbing", "metadata-absolute", "arrow-path", "info"))
def _folder(name: str) -> Act:
    from PIL import Image

    folder = data_folder()
    plant("data/data")
    if name in ("script", "readme"):
        (folder / "a.jsonl").write_text('{"text": "a b c"}\n')
        front = "---\nconfigs:\n- config_name: default\n  data_files: ../../outside/secret.txt\n---\n"
        (folder / "README.md").write_text(front if name == "readme" else "")
        return _rows
    if name.startswith("metadata"):
        Image.new("RGB", (8, 8)).save(folder / "a.png")
        where = "../../outside/secret.png" if name.endswith("climbing") else os.path.abspath("../outside/secret.png")
        (folder / "metadata.jsonl").write_text(json.dumps({"file_name": where, "text": "x"}) + "\n")
        return image_data
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "image": [{"bytes": None, "path": "x.png"}] * 2})
    if name == "arrow-path":
        where = os.path.abspath("../outside/secret.png")
        rows = datasets.Dataset.from_dict({"image": [{"bytes": None, "path": where}] * 2})
    rows.save_to_disk(str(folder))
    if name == "state":
        victim = Path("../outside/secret.arrow").resolve()
        victim.write_bytes((folder / "data-00000-of-00001.arrow").read_bytes())
        mark_unread(victim)
        state = json.loads((folder / "state.json").read_text())
        state["_data_files"] = [{"filename": "../../outside/secret.arrow"}]
        (folder / "state.json").write_text(json.dumps(state))
        return _rows
    if name == "info":
        info = json.loads((folder / "dataset_info.json").read_text())
        info["features"]["text"] = {"_type": "planted.Model", "path": "planted"}
        (folder / "dataset_info.json").write_text(json.dumps(info))
        return _rows
    return image_data


def _rows(name: str = "data") -> object:
    sources = dotted("lit_efficient.data.text.rows.open_sources")(name)
    return [row for source in sources for _, row in source.rows()][:5]


@cases_of("text", ("gzip", "gzip-lines", "bz2", "xz", "nested-json", "long-number", "csv", "surrogates"))
def _text(name: str) -> Act:
    import bz2
    import lzma

    zeros = bytes(64 << 20)
    if name == "gzip":
        Path("a.txt.gz").write_bytes(gzip.compress(zeros) * 64)
    elif name == "gzip-lines":
        Path("a.jsonl.gz").write_bytes(gzip.compress(zeros) * 64)
    elif name == "bz2":
        Path("a.txt.bz2").write_bytes(bz2.compress(zeros) * 64)
    elif name == "xz":
        Path("a.json.xz").write_bytes(lzma.compress(zeros, preset=1) * 64)
    elif name == "csv":
        Path("a.csv").write_text("a,b\n" + '"' + "x" * 1_000_000)
    elif name == "surrogates":
        Path("a.jsonl").write_text('{"text": "\\ud800"}\n' * 10)
    else:
        Path("a.jsonl").write_text(("[" * 200_000 if name == "nested-json" else "9" * 200_000) + "\n")
    return lambda: _rows(next(str(path) for path in Path().glob("a.*")))
