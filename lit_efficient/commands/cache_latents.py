"""``python -m lit_efficient cache-latents --config X``: encode the images of a config once for all runs.

X is the config for ``fit``, with ``data: LatentData``. Under torchrun each process encodes a part of the shards, on one
machine or on several that share the folder (``torchrun --nproc-per-node 8 -m lit_efficient cache-latents ...``). The
same command continues after a kill, with any number of processes. An existing cache is checked completely.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_efficient.errors import check_number, refusal


def run(argv: Sequence[str]) -> int:
    """Run ``cache-latents``."""
    parser = argparse.ArgumentParser(
        "lit_efficient cache-latents",
        description="Encode the images, captions and teacher's features of a config's LatentData into its cache. The "
        "options of fit are accepted, too: -c CONFIG.yaml [-c OVERLAY.yaml ...] [--data.folder DIR ...].",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--batch_size",
        type=int,
        help="images per forward pass of the autoencoder (default: the data's batch size, at most 32)",
    )
    parser.add_argument("--num_workers", type=int, default=0, help="processes that read images (default: 0)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps, ...; auto: the accelerator, if there is one")
    parser.add_argument("--shard_rows", type=int, default=1024, help="images per file (default: 1024)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing or unfinished cache")
    options, rest = parser.parse_known_args(argv)
    check_number("cache-latents", "--batch_size", options.batch_size, least=1, whole=True, null=True)
    check_number("cache-latents", "--num_workers", options.num_workers, least=0, whole=True, null=True)
    check_number("cache-latents", "--shard_rows", options.shard_rows, least=1, whole=True)
    from lit_efficient.distributed.rank_line import joined_processes

    with joined_processes() as (rank, count):
        return _cache(options, rest, rank, count)


def _cache(options: argparse.Namespace, rest: list[str], rank: int, count: int) -> int:
    from torch import distributed

    from lit_efficient.cli import explained
    from lit_efficient.commands.preview import build_data
    from lit_efficient.data.latent_data import LatentData
    from lit_efficient.data.latents.latent_writer import Ranks

    if count > 1:
        ranks = Ranks(rank, count, distributed.barrier)
    else:
        ranks = Ranks()
    with explained(rest):
        data = build_data(rest, "cache-latents")
        if not isinstance(data, LatentData):
            raise refusal("cache-latents", "the config's data", "LatentData", type(data).__name__)
        data.tell_network()
        if rank == 0:
            data.images.prepare_data()
        ranks.wait()
        data.images.setup("fit")
    bar = Bar()
    given = {}
    if options.batch_size:  # else write_cache chooses
        given["batch_size"] = options.batch_size
    manifest = data.write_cache(
        **given,
        num_workers=options.num_workers,
        device=options.device,
        shard_rows=options.shard_rows,
        overwrite=options.overwrite,
        progress=None if rank else bar,
        ranks=ranks,
    )
    if rank == 0:
        for line in summary(data.cache_folder(), manifest, bar):
            print(line)
    return 0


class Bar:
    """Progress that counts encoded images and seconds."""

    def __init__(self) -> None:
        self.encoded = 0
        self.seconds = 0.0
        self._bar: Any = None
        self._last = 0.0

    def __call__(self, total: int, done: int) -> Bar:
        """Start the bar for ``total`` images, of which an earlier run encoded ``done``."""
        from lit_efficient.mechanisms.progress import Progress

        self._bar = Progress("encoding", "images", total, done)
        self._last = time.monotonic()
        return self

    def update(self, count: int) -> None:
        """Add ``count`` encoded images."""
        self.encoded += count
        now = time.monotonic()
        self.seconds += now - self._last
        self._last = now
        self._bar.update(count)


def summary(folder: Path, manifest: Mapping[str, Any], bar: Bar) -> Iterator[str]:
    """Yield lines that describe a cache."""
    rows = manifest["rows"]
    size = rows * manifest["bytes_per_row"]
    yield f"cache        {folder}"
    if not bar.encoded:
        yield "             nothing to encode: the cache exists, and every file is undamaged"
    shapes = ", ".join(f"{count} of {shape}" for shape, count in manifest["latents"].items())
    yield f"latents      {rows} of {manifest['count']} images and their variants: {shapes}"
    if manifest["texts"]:
        yield f"captions     {manifest['texts']} different"
    yield f"size         {size / 1e6:.1f} MB, {manifest['bytes_per_row']:.0f} bytes per image"
    for name in ("mean", "std"):
        yield f"channel {name:<4} " + " ".join(f"{value:.4f}" for value in manifest["statistics"][name])
    yield f"PSNR         {manifest['reconstruction_psnr_db']:.1f} dB, for a few images decoded again"
    if bar.seconds > 0:
        yield f"speed        {bar.encoded / bar.seconds:.1f} images/s"
