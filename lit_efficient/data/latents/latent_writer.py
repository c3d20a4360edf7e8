"""Encode all images of a source into a latent cache, shard by shard; a run that was killed goes on after the last one.

    plan (a pure function of the source) -> shards -> texts -> index -> manifest -> the folder gets its name

All is written into a hidden folder beside the final one, each file whole or not at all, and noted in a journal with its
hash; the last step is one rename. Going on, files are compared with the journal, and what is missing, torn or altered
is made again. No batch crosses a shard and nothing is drawn at random, so with the same batch size the result of an
interrupted run is byte for byte that of an uninterrupted one.

Costs: one pass over all images and variants; memory for one shard.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_efficient.data.images.image_source import ImageSource, collate_images
from lit_efficient.data.latents.latent_format import Format, Moments, StoredDtype, decode_row, encode_rows
from lit_efficient.data.latents.latent_store import (
    INDEX,
    MANIFEST,
    LatentStore,
    caption_digest,
    read_manifest,
    refuse_other,
)
from lit_efficient.data.latents.teacher_features import stored_features
from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.files.atomic_file import remove_whole, replacing
from lit_efficient.files.cache import with_hash, without_hash, write_json
from lit_efficient.files.sums import sha256_of
from lit_efficient.files.tensors import map_tensors, save_tensors
from lit_efficient.mechanisms.order.keyed_batch_sampler import Key, KeyedBatches
from lit_efficient.models.libraries.latent_codec import LatentCodec
from lit_efficient.models.libraries.teachers import Teacher
from lit_efficient.models.libraries.text_encoder import TextEncoder

SHARD_ROWS = 1024
TEXT_ROWS = 256
PSNR_IMAGES = 8
_JOURNAL = "journal.jsonl"
_CONTENT = {MANIFEST, INDEX, _JOURNAL, "shards", "text"}  # a folder with anything else in it is never removed


@dataclass
class Encoders:
    """What images and captions go through. Nothing in it is trained."""

    codec: LatentCodec  # the autoencoder; its statistics must be 0 and 1
    text: TextEncoder | None = None  # the encoder of captions, or None; embeddings are kept in the format that it gives
    teacher: Teacher | None = None  # a network whose features are kept beside the latents, or None; of one layer
    format: Format = "posterior"  # as in `encode_rows`
    dtype: StoredDtype = "float32"  # as in `encode_rows`
    feature_dtype: StoredDtype = "float16"  # number format of the teacher's features

    def encode(self, batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """A batch of images to its rows: moments and features on the CPU, and what came with the images."""
        images = batch["images"].to(device)
        mean, logvar = self.codec.moments(images)
        rows: dict[str, Any] = {name: value for name, value in batch.items() if name != "images"}
        rows |= {"mean": mean.cpu()} | ({} if logvar is None else {"logvar": logvar.cpu()})
        if self.teacher is not None:
            self.teacher.to(device)
            rows["features"] = stored_features(self.teacher, images, self.feature_dtype).cpu()
        return rows


def plan_shards(images: ImageSource, rows: int) -> list[list[Key]]:
    """The keys of each shard: all variants of images for training, variant 0 of the others; one shape a shard."""
    train = set(images.train_index)
    shapes: dict[tuple[int, int], list[Key]] = {}
    for index in sorted({*train, *images.val_index, *images.test_index}):
        variants = images.variants if index in train else 1
        shapes.setdefault(images.bucket_of(index), []).extend((index, variant) for variant in range(variants))
    return [part for _, keys in sorted(shapes.items()) for part in _chunks(keys, rows)]


def build_latents(
    folder: Path,
    images: ImageSource,
    encoders: Encoders,
    identity: Mapping[str, str],
    *,
    batch_size: int = 64,
    num_workers: int = 0,
    device: str = "auto",
    shard_rows: int = SHARD_ROWS,
    overwrite: bool = False,
    about: Mapping[str, str] | None = None,
    progress: Any = None,
    ranks: "Ranks | None" = None,
) -> dict[str, Any]:
    """Write a latent cache, or go on with one, or do nothing if it is there; return its manifest.

    Several processes share the shards and the texts; the first one puts them together, and the others wait for it.

    Args:
        folder: Where it shall lie.
        images: The source, prepared and set up.
        encoders: What encodes them.
        identity: All that the result depends on, by name.
        batch_size: Images that are encoded at once. How a convolution rounds depends on it, by about 1e-7.
        num_workers: Processes that read images.
        device: Where to encode; ``auto`` is the accelerator, if there is one.
        shard_rows: Images a file.
        overwrite: Replace a cache that is there, of whatever identity, and a half-built one of another.
        about: Names for people to read, that are kept and not compared.
        progress: A bar with ``update(count)``; made by ``progress(total, done)``. None shows none.
        ranks: Which of several processes this is; None: there is one. All must be given the same.

    Raises:
        ConfigurationError: If the folder holds something else, or encoding gives numbers that are not finite.
    """
    from filelock import FileLock

    folder, place = folder.absolute(), device_of(device)
    folder.parent.mkdir(parents=True, exist_ok=True)
    ranks = ranks or Ranks()
    if ranks.rank:  # the first one has looked at what is there
        ranks.wait()
        if (folder / MANIFEST).is_file() and not overwrite:
            return read_manifest(folder)
        partial = folder.with_name(f".{folder.name}.building")
        header = {"identity": dict(identity), "shard_rows": shard_rows}
        journal = _Journal(partial, header, False, ranks.rank)
        plan = plan_shards(images, shard_rows)
        _Build(partial, plan, images, encoders, journal, batch_size, place, ranks).write(num_workers, progress)
        ranks.wait()
        return read_manifest(folder)
    with FileLock(folder.with_name(folder.name + ".lock")):
        if (folder / MANIFEST).is_file() and not overwrite:
            hint = "Give another folder, put the settings back, or replace the cache with --overwrite."
            refuse_other(folder, read_manifest(folder)["identity"], identity, hint)
            (folder / _JOURNAL).unlink(missing_ok=True)  # of a run that was killed at its very end
            found = LatentStore(folder, thorough=True).manifest
            ranks.wait()
            return found
        if folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - _CONTENT):
            raise ConfigurationError(
                f"{folder} is no latent cache and not empty; nothing in it is touched. Give another."
            )
        plan = plan_shards(images, shard_rows)
        if encoders.text is not None and "captions" not in images.dataset[plan[0][0]]:
            raise ConfigurationError("LatentData: text_encoder needs images with captions; these have none.")
        partial = folder.with_name(f".{folder.name}.building")
        journal = _Journal(partial, {"identity": dict(identity), "shard_rows": shard_rows}, overwrite)
        ranks.wait()
        build = _Build(partial, plan, images, encoders, journal, batch_size, place, ranks)
        build.write(num_workers, progress)
        manifest = build.finish(dict(about or {}))
        remove_whole(folder)  # and what a run left that was killed here
        os.replace(partial, folder)
        (folder / _JOURNAL).unlink()
        ranks.wait()
        return manifest


@dataclass
class Ranks:
    """Which of several processes this is."""

    rank: int = 0
    count: int = 1
    wait: Callable[[], object] = lambda: None  # until all of them wait


class _Journal:
    """What of a half-built cache is finished, a line a file; work from another header is refused, or removed."""

    def __init__(self, folder: Path, header: dict[str, Any], overwrite: bool, rank: int = 0) -> None:
        self.folder = folder
        self.header = header
        self.path = folder / _JOURNAL
        if rank:  # what the first process has found whole; what this one adds stands in a file of its own
            self.entries = {line["file"]: line for line in list(self._lines())[1:]}
            self.path = folder / f"{rank}.{_JOURNAL}"
            self.path.write_bytes(b"")
            return
        lines = list(self._lines())
        if lines and lines[0] != header and overwrite:
            remove_whole(folder)
            lines = []
        if lines:
            hint = "Finish that one, give another folder, or drop what was begun with --overwrite."
            found = {**lines[0].get("identity", {}), "shard_rows": str(lines[0].get("shard_rows"))}
            refuse_other(folder, found, {**header["identity"], "shard_rows": str(header["shard_rows"])}, hint)
        self.entries = {line["file"]: line for line in lines[1:] if self._is_whole(line)}
        others = list(folder.glob(f"*.{_JOURNAL}"))
        for path in others:
            self.entries |= {line["file"]: line for line in self._lines(path) if self._is_whole(line)}
        with replacing(self.path) as file:  # without a torn last line, and without what must be made again
            file.writelines(_line(entry) for entry in [header, *self.entries.values()])
        for path in others:
            path.unlink()

    def gather(self) -> None:
        """Take over what the other processes have noted."""
        for path in sorted(self.folder.glob(f"*.{_JOURNAL}")):
            self.entries |= {line["file"]: line for line in self._lines(path)}
            if self.path.name == _JOURNAL:
                with self.path.open("ab") as file:
                    file.write(path.read_bytes())
                    file.flush()
                    os.fsync(file.fileno())

    def drop_others(self) -> None:
        """Remove the other processes' journals, of which all stands in this one."""
        for path in self.folder.glob(f"*.{_JOURNAL}"):
            path.unlink()

    def add(self, entry: dict[str, Any]) -> None:
        """Note a file that is finished."""
        path = self.folder / entry["file"]
        self.entries[entry["file"]] = entry = {**entry, "bytes": path.stat().st_size, "digest": sha256_of(path)}
        with self.path.open("ab") as file:
            file.write(_line(entry))
            file.flush()
            os.fsync(file.fileno())

    def _is_whole(self, entry: dict[str, Any]) -> bool:
        path = self.folder / entry["file"]
        return path.is_file() and path.stat().st_size == entry["bytes"] and sha256_of(path) == entry["digest"]

    def _lines(self, path: Path | None = None) -> Iterator[dict[str, Any]]:
        path = path or self.path
        if not path.is_file():
            return
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                return  # torn
            try:
                yield without_hash(json.loads(line))
            except ValueError as error:
                raise ConfigurationError(
                    f"{path} of a half-built latent cache is damaged: delete the folder {self.folder}."
                ) from error


@dataclass
class _Build:
    """One cache as it is made; the steps are those of `run`."""

    folder: Path
    plan: list[list[Key]]
    images: ImageSource
    encoders: Encoders
    journal: _Journal
    batch_size: int
    device: torch.device
    ranks: Ranks

    def write(self, num_workers: int, progress: Any) -> None:
        """Write this process's part of the shards, and of the texts, which are known when all shards are there."""
        own = range(len(self.plan))[self.ranks.rank :: self.ranks.count]
        missing = [n for n in own if _shard_name(n) not in self.journal.entries]
        rows = sum(len(self.plan[n]) for n in own)
        bar = progress and progress(rows, rows - sum(len(self.plan[n]) for n in missing))
        for number, batches in self._encoded(missing, num_workers, bar):
            self._write_shard(number, batches)
        self.ranks.wait()
        for number, captions in list(enumerate(_chunks(self._texts(), TEXT_ROWS)))[self.ranks.rank :: self.ranks.count]:
            if f"text/{number:05d}.safetensors" not in self.journal.entries:
                self._write_texts(number, captions)
        self.ranks.wait()

    def finish(self, about: dict[str, str]) -> dict[str, Any]:
        """Write the index and the manifest over what all processes have written."""
        self.journal.gather()
        self.journal.drop_others()
        texts = self._texts()
        self._write(INDEX, self._index(texts))
        return self._write_manifest(len(texts), about)

    def _texts(self) -> list[str]:
        """All captions, each once, in order."""
        if self.encoders.text is None:
            return []
        return sorted({caption for n in range(len(self.plan)) for caption in self._captions(_shard_name(n))})

    def _encoded(
        self, missing: list[int], num_workers: int, bar: Any
    ) -> Iterator[tuple[int, Iterator[dict[str, Any]]]]:
        """The encoded batches of each shard that is missing."""
        batches = [(n, keys) for n in missing for keys in _even_parts(self.plan[n], self.batch_size)]
        loader = DataLoader(
            KeyedBatches(self.images.dataset),
            batch_size=None,
            sampler=[keys for _, keys in batches],
            collate_fn=collate_images,
            num_workers=num_workers,
            generator=torch.Generator().manual_seed(0),  # or a loader draws from the global one
        )

        def encode(batch: dict[str, Any]) -> dict[str, Any]:
            rows = self.encoders.encode(batch, self.device)
            if bar is not None:
                bar.update(len(batch["index"]))
            return rows

        for number, pairs in groupby(zip((n for n, _ in batches), loader), key=lambda pair: pair[0]):
            yield number, (encode(batch) for _, batch in pairs)

    def _write_shard(self, number: int, batches: Iterator[dict[str, Any]]) -> None:
        parts = list(batches)
        keys = torch.stack([torch.cat([part[name] for part in parts]) for name in ("index", "variant")], dim=1)
        joined = {n: torch.cat([part[n] for part in parts]) for n in ("mean", "logvar", "features") if n in parts[0]}
        for name, values in joined.items():
            if not (finite := values.flatten(1).isfinite().all(1)).all():
                raise ConfigurationError(
                    f"LatentData: the {name} of image {keys[int((~finite).nonzero()[0])].tolist()} (index, variant) is "
                    "not finite. An autoencoder that overflows in float16 needs dtype float32 or bfloat16."
                )
        labels = torch.cat([part["labels"] for part in parts]) if "labels" in parts[0] else torch.full((len(keys),), -1)
        stored = encode_rows(joined["mean"], joined.get("logvar"), self.encoders.format, self.encoders.dtype)
        tensors = {**stored, "keys": torch.cat([keys, labels[:, None]], dim=1)}
        if "features" in joined:
            tensors["features"] = joined["features"]
        if "sizes" in parts[0]:
            tensors["sizes"] = torch.cat([part["sizes"] for part in parts])
        if "captions" in parts[0]:
            tensors |= _packed([caption for part in parts for caption in part["captions"]])
        self._write(_shard_name(number), tensors, _moments(stored, keys[:, 0], self.images.train_index))

    def _write_texts(self, number: int, captions: list[str]) -> None:
        assert self.encoders.text is not None
        hidden, mask, pooled = self.encoders.text.encode(captions, self.device)
        digests = torch.tensor([list(caption_digest(caption)) for caption in captions], dtype=torch.uint8)
        tensors = {"hidden": hidden.cpu(), "mask": mask.cpu(), "digests": digests}
        if pooled is not None:
            tensors["pooled"] = pooled.cpu()
        self._write(f"text/{number:05d}.safetensors", tensors)

    def _index(self, texts: list[str]) -> dict[str, Tensor]:
        """Where each key lies, and its caption."""
        shape = (len(self.images.dataset), self.images.variants)
        places = torch.full((*shape, 2), -1, dtype=torch.int32)
        captions = torch.full(shape, -1, dtype=torch.int32)
        numbers = {caption: number for number, caption in enumerate(texts)}
        for shard, keys in enumerate(self.plan):
            index, variant = torch.tensor(keys).T
            rows = torch.arange(len(keys))
            places[index, variant] = torch.stack([torch.full_like(rows, shard), rows], dim=1).int()
            if numbers:
                found = [numbers[caption] for caption in self._captions(_shard_name(shard))]
                captions[index, variant] = torch.tensor(found, dtype=torch.int32)
        return {"places": places, "captions": captions}

    def _write_manifest(self, texts: int, about: dict[str, str]) -> dict[str, Any]:
        kept = [self.journal.entries[_shard_name(number)]["moments"] for number in range(len(self.plan))]
        mean, std = Moments.join([Moments(**part) for part in kept if part is not None]).mean_and_std()
        files = {name: [entry["bytes"], entry["digest"]] for name, entry in sorted(self.journal.entries.items())}
        rows = sum(map(len, self.plan))
        manifest = {
            "identity": self.journal.header["identity"],
            "about": about,
            "count": len(self.images.dataset),
            "rows": rows,
            "bytes_per_row": sum(size for size, _ in files.values()) / rows,
            "latents": self._shapes(),
            "labels": bool((self._open(_shard_name(0)).get_tensor("keys")[:, 2] >= 0).all()),
            "texts": texts,
            "text_rows": TEXT_ROWS,
            "statistics": {"mean": mean, "std": std},
            "reconstruction_psnr_db": self._psnr(),
            "files": files,
        }
        write_json(self.folder / MANIFEST, manifest)
        return manifest

    def _shapes(self) -> dict[str, int]:
        """Rows by the shape of their latents."""
        counts: Counter[str] = Counter()
        for number in range(len(self.plan)):
            file = self._open(_shard_name(number))
            rows, *shape = file.get_slice("mean" if "mean" in file.keys() else "latents").get_shape()  # noqa: SIM118
            counts["x".join(map(str, shape))] += rows
        return counts

    def _psnr(self) -> float:
        """Of a few images against what is decoded from what is stored of them, in dB."""
        errors = []
        places = self._open(INDEX).get_tensor("places")
        for index in (self.images.val_index or self.images.train_index)[:PSNR_IMAGES]:
            shard, row = places[index, 0].tolist()
            file = self._open(_shard_name(shard))
            names = [n for n in ("mean", "latents", "scale", "zero") if n in file.keys()]  # noqa: SIM118
            stored = {n: file.get_tensor(n) if n in ("scale", "zero") else file.get_slice(n)[row] for n in names}
            (latent,) = decode_row(stored).values()
            decoded = self.encoders.codec.decode(latent[None].to(self.device))[0].cpu()
            errors.append((decoded - self.images.dataset[index, 0]["images"]).square().mean().item())
        return 10.0 * math.log10(4.0 / max(sum(errors) / len(errors), 1e-12))

    def _write(self, name: str, tensors: dict[str, Tensor], moments: Moments | None = None) -> None:
        save_tensors(self.folder / name, tensors)
        self.journal.add({"file": name, "moments": None if moments is None else asdict(moments)})

    def _captions(self, name: str) -> list[str]:
        file = self._open(name)
        data, ends = file.get_tensor("captions").numpy().tobytes(), file.get_tensor("caption_ends").tolist()
        return [data[begin:end].decode() for begin, end in zip([0, *ends[:-1]], ends)]

    def _open(self, name: str) -> Any:
        return map_tensors(self.folder / name)


def device_of(name: str) -> torch.device:
    """The device of this name; ``auto`` is the accelerator, if there is one.

    Raises:
        ConfigurationError: For no device's name.
    """
    if name != "auto":
        try:
            return torch.device(name)
        except RuntimeError as error:
            raise refusal("LatentData", "device", "auto, cpu, cuda, ...", name) from error
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _moments(stored: Mapping[str, Tensor], index: Tensor, train: Sequence[int]) -> Moments | None:
    """Of the rows that are trained on, as they will be read."""
    chosen = torch.isin(index, torch.tensor(train))
    if not chosen.any():
        return None
    rows = {name: values if name in ("scale", "zero") else values[chosen] for name, values in stored.items()}
    read = decode_row(rows)
    return Moments.of(read["mean"] if "mean" in read else read["latents"], read.get("logvar"))


def _packed(captions: Sequence[str]) -> dict[str, Tensor]:
    """Texts as bytes in a row, and where each ends."""
    data = [caption.encode() for caption in captions]
    ends = torch.tensor([len(text) for text in data]).cumsum(0)
    joined = bytearray(b"".join(data) or b"\0")  # no tensor is empty
    return {"captions": torch.frombuffer(joined, dtype=torch.uint8).clone(), "caption_ends": ends}


def _chunks(items: Sequence[Any], size: int) -> Iterator[Any]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _even_parts(items: Sequence[Any], size: int) -> Iterator[Any]:
    """As few parts of at most ``size`` as there can be: one image alone takes other kernels, and rounds otherwise."""
    count = math.ceil(len(items) / size)
    return (items[len(items) * i // count : len(items) * (i + 1) // count] for i in range(count))


def _line(entry: Mapping[str, Any]) -> bytes:
    return (json.dumps(with_hash(entry)) + "\n").encode()


def _shard_name(number: int) -> str:
    return f"shards/{number:05d}.safetensors"
