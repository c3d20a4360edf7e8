"""Encode all images of a source into a latent cache, shard by shard, and resume after a kill.

    plan (a pure function of the source) -> shards -> texts -> index -> manifest -> rename to the final folder

All files are written atomically into a hidden folder beside the final one, and the last step is one rename. A resumed
build checks the hash that each file holds, and makes missing, damaged or altered files again. A batch never crosses a
shard and nothing is drawn at random, so with the same batch size the result of an interrupted build equals that of an
uninterrupted one, byte for byte.

Costs: one pass over all images and variants; memory for one shard; reading all files once at the end, for their hashes
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_efficient.data.images.image_source import ImageSource, collate_images
from lit_efficient.data.latents.latent_format import (
    Format,
    Moments,
    StoredCondition,
    StoredDtype,
    decode_row,
    encode_pixels,
    encode_rows,
)
from lit_efficient.data.latents.latent_store import (
    INDEX,
    MANIFEST,
    LatentStore,
    caption_digest,
    open_shard,
    read_manifest,
    read_row,
    refuse_other,
    shard_name,
    text_name,
)
from lit_efficient.data.latents.teacher_features import stored_features
from lit_efficient.errors import CheckpointError, ConfigurationError, refusal
from lit_efficient.files.atomic_file import remove_whole
from lit_efficient.files.cache import read_json, write_json
from lit_efficient.files.sums import sha256_of
from lit_efficient.files.tensors import load_tensors, save_tensors
from lit_efficient.mechanisms.order.keyed_batch_sampler import Key, KeyedBatches
from lit_efficient.mechanisms.progress import Progress
from lit_efficient.models.libraries.latent_codec import LatentCodec, hole_of
from lit_efficient.models.libraries.teachers import Teacher
from lit_efficient.models.libraries.text_encoder import TextEncoder

SHARD_ROWS = 1024
TEXT_ROWS = 256
PSNR_IMAGES = 8
# File with the settings of a build that is not finished.
_SETTINGS = "building.json"
# A folder that holds anything else is never removed.
_CONTENT = {MANIFEST, INDEX, _SETTINGS, "shards", "text"}

T = TypeVar("T")
Bars = Callable[[int, int], Any]
"""Make a progress bar with ``update(count)``, of (number of images, number of images that are done)."""


@dataclass
class Encoders:
    """Frozen networks that encode images and captions, and the number formats of their results."""

    codec: LatentCodec  # the autoencoder; its statistics must be 0 and 1
    text: TextEncoder | None = None  # encoder of captions; embeddings are stored in its number format
    teacher: Teacher | None = None  # network whose features of one layer are stored with the latents
    format: Format = "posterior"  # as in `encode_rows`
    dtype: StoredDtype = "float32"  # as in `encode_rows`
    feature_dtype: StoredDtype = "float16"  # number format of the features
    condition: StoredCondition = "pixels"  # what is stored of conditions

    def encode(self, batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """Return a batch without its images, but with ``mean``, ``logvar`` and ``features`` on the CPU."""
        images = batch["images"].to(device)
        mean, logvar = self.codec.moments(images)
        rows = {name: value for name, value in batch.items() if name not in ("images", "mask", "condition")}
        if "mask" in batch:
            rows["mask"] = self.codec.shrink_mask(batch["mask"])
        condition = batch.get("condition")
        if self.condition == "masked":
            if "mask" not in batch:
                raise refusal("LatentData", "condition", "pixels or latents for images without masks", self.condition)
            hole = hole_of(batch["mask"])
            rows["hole"] = self.codec.sample_mask(hole)
            condition = batch["images"] * (1.0 - hole)
        if condition is not None and self.condition == "pixels":
            rows["condition"] = encode_pixels(condition)
        elif condition is not None:
            latents, spread = self.codec.moments(condition.to(device))
            rows["condition_latents"] = latents.cpu()
            if spread is not None:
                rows["condition_logvar"] = spread.cpu()
        rows["mean"] = mean.cpu()
        if logvar is not None:
            rows["logvar"] = logvar.cpu()
        if self.teacher is not None:
            self.teacher.to(device)
            rows["features"] = stored_features(self.teacher, images, self.feature_dtype).cpu()
        return rows


def pixel_variants(images: ImageSource) -> int:
    """Return the number of crop and flip variants. ``variants`` also counts the captions of each of them."""
    return int(getattr(images, "pixel_variants", images.variants))


def plan_shards(images: ImageSource, rows: int) -> list[list[Key]]:
    """Return the keys of each shard: all variants of training images, variant 0 of the others; one shape per shard."""
    train = set(images.train_index)
    shapes: dict[tuple[int, int], list[Key]] = {}
    for index in sorted({*train, *images.val_index, *images.test_index}):
        variants = pixel_variants(images) if index in train else 1
        shapes.setdefault(images.bucket_of(index), []).extend((index, variant) for variant in range(variants))
    shards: list[list[Key]] = []
    for _, keys in sorted(shapes.items()):
        shards += _chunks(keys, rows)
    return shards


@dataclass
class Ranks:
    """Number of this process among several that build one cache."""

    rank: int = 0
    count: int = 1
    wait: Callable[[], object] = lambda: None  # barrier of all processes


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
    progress: Bars | None = None,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Write a latent cache, or resume an unfinished one, or check the one that exists. Return its manifest.

    Several processes share the shards and the texts. Rank 0 finishes the cache, and the others wait.

    Args:
        folder: Folder of the cache.
        images: The source, prepared and set up.
        encoders: Networks that encode the images.
        identity: All that the result depends on, by name.
        batch_size: Images that are encoded together. It changes the rounding of convolutions, by about 1e-7.
        num_workers: Processes that read images.
        device: Device that encodes. ``auto`` is the accelerator, if there is one.
        shard_rows: Rows of a shard.
        overwrite: Replace an existing cache of any identity, and an unfinished one of another identity.
        about: Names for people to read. They are stored and not compared.
        progress: Maker of a progress bar. None: no bar.
        ranks: Number of this process among several, all with the same arguments. None: it is alone.

    Raises:
        ConfigurationError: If the folder holds something else, or encoded numbers are not finite.
    """
    from filelock import FileLock

    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    ranks = ranks or Ranks()
    # The plan depends on the source alone, so every process and every later run divides the work in the same way.
    plan = plan_shards(images, shard_rows)
    partial = folder.with_name(f".{folder.name}.building")
    build = _Build(partial, plan, images, encoders, batch_size, device_of(device), ranks)
    if ranks.rank:
        # Rank 0 looks at the folders first.
        ranks.wait()
        if overwrite or not (folder / MANIFEST).is_file():
            build.write(num_workers, progress)
            ranks.wait()
        return read_manifest(folder)
    with FileLock(folder.with_name(folder.name + ".lock")):
        if (folder / MANIFEST).is_file() and not overwrite:
            manifest = _checked(folder, identity)
        else:
            # --overwrite with a wrong folder must not delete the photographs in it.
            if folder.exists() and not _is_cache(folder):
                raise ConfigurationError(
                    f"{folder} is no latent cache and not empty. Nothing in it is changed. Give another folder."
                )
            # Checked on one image before all of them are encoded.
            if encoders.text is not None and "captions" not in images.dataset[plan[0][0]]:
                raise ConfigurationError(
                    "LatentData: text_encoder needs images with captions, and these have none. Set text_encoder: null."
                )
            settings = {**identity, "shard_rows": str(shard_rows)}
            # The number of rows of a shard is part of the settings: other shards would not fit to those that exist.
            _begin(partial, settings, overwrite)
            ranks.wait()
            build.write(num_workers, progress)
            manifest = build.finish(identity, about or {})
            # Also removes the rest of a cache that a kill left at this place.
            remove_whole(folder)
            os.replace(partial, folder)
            (folder / _SETTINGS).unlink()
        ranks.wait()
        return manifest


def _checked(folder: Path, identity: Mapping[str, str]) -> dict[str, object]:
    """Return the manifest of a complete cache, after comparing its identity and all files."""
    hint = "Give another folder, restore the settings, or replace the cache with --overwrite."
    refuse_other(folder, read_manifest(folder)["identity"], identity, hint)
    # A run that was killed at its very end leaves this file.
    (folder / _SETTINGS).unlink(missing_ok=True)
    return LatentStore(folder, thorough=True).manifest


def _is_cache(folder: Path) -> bool:
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= _CONTENT


def _begin(partial: Path, settings: Mapping[str, str], overwrite: bool) -> None:
    """Create the folder of an unfinished cache, or accept the one that a build with the same settings left."""
    path = partial / _SETTINGS
    if path.is_file():
        try:
            found = read_json(path)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{path} of an unfinished latent cache is damaged. Delete the folder {partial}."
            ) from error
        if found == settings:
            return
        if not overwrite:
            hint = "Finish that cache, give another folder, or discard the unfinished cache with --overwrite."
            refuse_other(partial, found, settings, hint)
    # Files without their settings may belong to any build.
    remove_whole(partial)
    write_json(path, settings)


@dataclass
class _Build:
    """Unfinished cache."""

    folder: Path
    plan: list[list[Key]]
    images: ImageSource
    encoders: Encoders
    batch_size: int
    device: torch.device
    ranks: Ranks

    def write(self, num_workers: int, progress: Bars | None) -> None:
        """Write the shards and texts of this process. The texts are known once all shards exist."""
        own = range(len(self.plan))[self.ranks.rank :: self.ranks.count]
        missing = [number for number in own if not self._is_written(shard_name(number), "keys", self._keys(number))]
        bar = None
        if progress is not None:
            rows = sum(len(self.plan[number]) for number in own)
            bar = progress(rows, rows - sum(len(self.plan[number]) for number in missing))
        batches = self._batches(missing, num_workers)
        for number in missing:
            parts = []
            for _ in _even_parts(self.plan[number], self.batch_size):
                parts.append(self.encoders.encode(next(batches), self.device))
                if bar is not None:
                    bar.update(len(parts[-1]["index"]))
            self._write_shard(number, parts)
        # The distinct captions are known only when the shards of all processes exist.
        self.ranks.wait()
        texts = list(enumerate(_chunks(self._texts(), TEXT_ROWS)))[self.ranks.rank :: self.ranks.count]
        count = sum(len(captions) for _, captions in texts)
        with Progress("encoding", "captions", count, shown=progress is not None) as work:
            for number, captions in texts:
                if self._is_written(text_name(number), "digests", _digests(captions)):
                    work.skip(len(captions))
                else:
                    self._write_texts(number, captions, work)
        self.ranks.wait()

    def finish(self, identity: Mapping[str, str], about: Mapping[str, str]) -> dict[str, Any]:
        """Write the index and the manifest of the files that all processes have written. Return the manifest."""
        texts = self._texts()
        # All files exist now. The manifest comes last, because a folder with a manifest counts as complete.
        save_tensors(self.folder / INDEX, self._index(texts))
        names = [shard_name(number) for number in range(len(self.plan))]
        shapes: Counter[str] = Counter()
        moments: list[Moments] = []
        labelled: list[bool] = []
        for name in names:
            shard = open_shard(self.folder / name)
            rows, *shape = shard["mean" if "mean" in shard else "latents"].shape
            shapes["x".join(map(str, shape))] += rows
            labelled.append(bool((shard["keys"][:, 2] >= 0).all()))
            moments += _moments(shard, self.images.train_index)
        mean, std = Moments.join(moments).mean_and_std()
        names += [text_name(number) for number in range(math.ceil(len(texts) / TEXT_ROWS))]
        sizes = {name: (self.folder / name).stat().st_size for name in sorted([*names, INDEX])}
        rows = sum(shapes.values())
        manifest = {
            "identity": dict(identity),
            "about": dict(about),
            "count": len(self.images.dataset),
            "rows": rows,
            "bytes_per_row": sum(sizes.values()) / rows,
            "latents": shapes,
            "labels": all(labelled),
            "texts": len(texts),
            "text_rows": TEXT_ROWS,
            "statistics": {"mean": mean, "std": std},
            "reconstruction_psnr_db": self._psnr(),
            "files": {name: [size, sha256_of(self.folder / name)] for name, size in sizes.items()},
        }
        write_json(self.folder / MANIFEST, manifest)
        return manifest

    def _is_written(self, name: str, column: str, expected: Tensor) -> bool:
        """Return whether a file matches the hash that it holds, and its rows are those of the plan."""
        try:
            found = load_tensors(self.folder / name).get(column)
        except CheckpointError:
            return False
        return found is not None and torch.equal(found[:, : expected.shape[1]], expected)

    def _keys(self, number: int) -> Tensor:
        """Return index and variant of the rows of a shard, [R, 2] int64."""
        return torch.tensor(self.plan[number])

    def _texts(self) -> list[str]:
        """Return all distinct captions, sorted."""
        if self.encoders.text is None:
            return []
        captions: set[str] = set()
        for number in range(len(self.plan)):
            captions.update(self._captions(number))
        return sorted(captions)

    def _batches(self, missing: list[int], num_workers: int) -> Iterator[dict[str, Any]]:
        """Return the batches of images of all missing shards, in order."""
        keys: list[list[Key]] = []
        for number in missing:
            keys += _even_parts(self.plan[number], self.batch_size)
        loader = DataLoader(
            KeyedBatches(self.images.dataset),
            batch_size=None,
            sampler=keys,
            collate_fn=collate_images,
            num_workers=num_workers,
            generator=torch.Generator().manual_seed(0),  # without it a loader draws from the global generator
        )
        return iter(loader)

    def _write_shard(self, number: int, parts: list[dict[str, Any]]) -> None:
        """Write the rows of the encoded batches of a shard."""
        rows = {name: _joined([part[name] for part in parts]) for name in parts[0]}
        keys = self._keys(number)
        for name in ("mean", "logvar", "features", "condition_latents", "condition_logvar"):
            if name not in rows:
                continue
            finite = rows[name].flatten(1).isfinite().all(1)
            if not finite.all():
                key = keys[int((~finite).nonzero()[0])].tolist()
                raise ConfigurationError(
                    f"LatentData: the {name} of image {key} (index, variant) is not finite. An autoencoder that "
                    "overflows in float16 needs dtype float32 or bfloat16."
                )
        # -1 stands for no label, so that the keys of all caches have three columns.
        labels = rows.get("labels", torch.full((len(keys),), -1))
        conditions = (rows.get("condition_latents"), rows.get("condition_logvar"))
        tensors = encode_rows(rows["mean"], rows.get("logvar"), self.encoders.format, self.encoders.dtype, *conditions)
        tensors["keys"] = torch.cat([keys, labels[:, None]], dim=1)
        for name in ("features", "sizes", "mask", "hole", "condition"):
            if name in rows:
                tensors[name] = rows[name]
        if "captions" in rows:
            tensors |= _packed(self._variants_of(rows["captions"], keys[:, 0].tolist()))
        save_tensors(self.folder / shard_name(number), tensors)

    def _variants_of(self, captions: list[str], index: list[int]) -> list[str]:
        """Return all variants of the captions of some rows, those of the first row first."""
        # Other sources have one caption for each image.
        captions_of = getattr(self.images, "captions_of", None)
        if captions_of is None:
            return captions
        return [caption for number in index for caption in captions_of(number)]

    def _write_texts(self, number: int, captions: list[str], work: Progress) -> None:
        assert self.encoders.text is not None
        # The CPU encodes each caption by itself in any case, and is slow.
        size = 1 if self.device.type == "cpu" else len(captions)
        parts = []
        for few in _chunks(captions, size):
            parts.append(self.encoders.text.encode(few, self.device))
            work.update(len(few))
        hidden, mask, pooled = zip(*parts)
        tensors = {"hidden": torch.cat(hidden).cpu(), "mask": torch.cat(mask).cpu(), "digests": _digests(captions)}
        if pooled[0] is not None:
            tensors["pooled"] = torch.cat(pooled).cpu()
        save_tensors(self.folder / text_name(number), tensors)

    def _index(self, texts: list[str]) -> dict[str, Tensor]:
        """Return the place of each key, and the number of its caption."""
        count, variants = len(self.images.dataset), pixel_variants(self.images)
        places = torch.full((count, variants, 2), -1, dtype=torch.int32)
        several = self.images.variants // variants
        captions = torch.full((count, variants, several), -1, dtype=torch.int32)
        numbers = {caption: number for number, caption in enumerate(texts)}
        for shard in range(len(self.plan)):
            index, variant = self._keys(shard).T
            rows = torch.arange(len(index))
            places[index, variant] = torch.stack([torch.full_like(rows, shard), rows], dim=1).int()
            if numbers:
                found = [numbers[caption] for caption in self._captions(shard)]
                captions[index, variant] = torch.tensor(found, dtype=torch.int32).view(-1, several)
        return {"places": places, "captions": captions}

    def _psnr(self) -> float:
        """Return the PSNR in dB of a few images that are decoded from their stored latents."""
        errors = []
        places = load_tensors(self.folder / INDEX)["places"]
        for index in (self.images.val_index or self.images.train_index)[:PSNR_IMAGES]:
            shard, row = places[index, 0].tolist()
            latents = decode_row(read_row(open_shard(self.folder / shard_name(shard)), row))
            latent = latents["mean"] if "mean" in latents else latents["latents"]
            decoded = self.encoders.codec.decode(latent[None].to(self.device))[0].cpu()
            self.encoders.codec.check_decoded()
            errors.append((decoded - self.images.dataset[index, 0]["images"]).square().mean().item())
        return 10.0 * math.log10(4.0 / max(sum(errors) / len(errors), 1e-12))

    def _captions(self, number: int) -> list[str]:
        """Return the captions of the rows of a shard, with all variants."""
        shard = open_shard(self.folder / shard_name(number))
        data = shard["captions"].numpy().tobytes()
        captions = []
        begin = 0
        for end in shard["caption_ends"].tolist():
            captions.append(data[begin:end].decode())
            begin = end
        return captions


def device_of(name: str) -> torch.device:
    """Return the device of this name. ``auto`` is the accelerator, if there is one, else the CPU.

    Raises:
        ConfigurationError: If no device has this name.
    """
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise refusal("LatentData", "device", "auto, cpu, cuda, ...", name) from error


def _moments(shard: Mapping[str, Tensor], train: Sequence[int]) -> list[Moments]:
    """Return the moments of the training rows of a shard, as they will be read; nothing without training rows."""
    chosen = torch.isin(shard["keys"][:, 0], torch.tensor(train))
    if not chosen.any():
        return []
    rows = {name: shard[name][chosen] for name in ("mean", "logvar", "latents") if name in shard}
    rows |= {name: shard[name] for name in ("scale", "zero") if name in shard}
    read = decode_row(rows)
    return [Moments.of(read["mean"] if "mean" in read else read["latents"], read.get("logvar"))]


def _joined(values: list[Any]) -> Any:
    """Join the tensors or lists of several batches."""
    if isinstance(values[0], Tensor):
        return torch.cat(values)
    return [entry for value in values for entry in value]


def _packed(captions: Sequence[str]) -> dict[str, Tensor]:
    """Return texts as consecutive bytes, and the end of each text."""
    data = [caption.encode() for caption in captions]
    ends = torch.tensor([len(text) for text in data]).cumsum(0)
    joined = bytearray(b"".join(data) or b"\0")  # a tensor must not be empty
    return {"captions": torch.frombuffer(joined, dtype=torch.uint8).clone(), "caption_ends": ends}


def _digests(captions: Sequence[str]) -> Tensor:
    """Return the digests of captions [U, 16] uint8."""
    return torch.tensor([list(caption_digest(caption)) for caption in captions], dtype=torch.uint8)


def _chunks(items: list[T], size: int) -> list[list[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _even_parts(items: list[T], size: int) -> list[list[T]]:
    """Split items into as few parts of at most ``size`` as possible, of nearly equal size.

    A part with one image alone would use other kernels, which round differently.
    """
    count = math.ceil(len(items) / size)
    return [items[len(items) * i // count : len(items) * (i + 1) // count] for i in range(count)]
