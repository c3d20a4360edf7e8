"""``python -m lit_efficient cache-latents --config X``: encode the images of a config once, for all runs to come.

X is the very config that ``fit`` runs, with ``data: LatentData``. Under torchrun each process encodes its part of the
shards, on one machine or on several that share the folder (``torchrun --nproc-per-node 8 -m lit_efficient cache-latents
...``); how many there are may change when it is gone on with. A run that was killed is gone on with by the same
command; a cache that is there already is checked from end to end.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_efficient.errors import check_number, refusal


def run(argv: Sequence[str]) -> int:
    """Write a cache."""
    parser = argparse.ArgumentParser(
        "lit_efficient cache-latents",
        description="Encode the images, captions and teacher's features of a config's LatentData into its cache. Takes "
        "the options of fit as well: -c CONFIG.yaml [-c OVERLAY.yaml ...] [--data.folder DIR ...].",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--batch_size",
        type=int,
        help="images that are encoded at once (default: as training on images does, the data's up to 32)",
    )
    parser.add_argument("--num_workers", type=int, default=0, help="processes that read images (default: 0)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps, ...; auto: the accelerator, if there is one")
    parser.add_argument("--shard_rows", type=int, default=1024, help="images a file (default: 1024)")
    parser.add_argument("--overwrite", action="store_true", help="replace a cache that is there, and what was begun")
    options, rest = parser.parse_known_args(argv)
    check_number("cache-latents", "--batch_size", options.batch_size, least=1, whole=True, null=True)
    check_number("cache-latents", "--num_workers", options.num_workers, least=0, whole=True, null=True)
    check_number("cache-latents", "--shard_rows", options.shard_rows, least=1, whole=True)
    from lit_efficient.distributed.rank_line import together

    with together() as (rank, count):
        return _cache(options, rest, rank, count)


def _cache(options: argparse.Namespace, rest: list[str], rank: int, count: int) -> int:
    from torch import distributed

    from lit_efficient.cli.errors import explained
    from lit_efficient.commands.preview import build_data
    from lit_efficient.data.latent_data import LatentData
    from lit_efficient.data.latents.latent_writer import Ranks

    ranks = Ranks(rank, count, distributed.barrier) if count > 1 else Ranks()
    with explained(rest):
        data = build_data(rest, "cache-latents")
        if not isinstance(data, LatentData):
            raise refusal("cache-latents", "the config's data", "LatentData", type(data).__name__)
        if rank == 0:
            data.images.prepare_data()
        ranks.wait()
        data.images.setup("fit")
    bar = Bar()
    given = {"batch_size": options.batch_size} if options.batch_size else {}
    manifest = data.write_cache(
        **given,
        num_workers=options.num_workers,
        device=options.device,
        shard_rows=options.shard_rows,
        overwrite=options.overwrite,
        progress=None if rank else bar,
        ranks=ranks,
    )
    for line in () if rank else summary(data.cache_folder(), manifest, bar):
        print(line)
    return 0


class Bar:
    """A progress bar of images on a terminal, and what it measured."""

    def __init__(self) -> None:
        self.encoded = 0
        self.seconds = 0.0
        self._bar: Any = None
        self._last = 0.0

    def __call__(self, total: int, done: int) -> Bar:
        """Begin; an earlier run has encoded ``done`` of all images."""
        from tqdm import tqdm

        self._bar = tqdm(total=total, initial=done, desc="encoding", unit="img", disable=None)  # terminals only
        self._last = time.monotonic()
        return self

    def update(self, count: int) -> None:
        """So many images more are encoded."""
        self.encoded += count
        now = time.monotonic()
        self.seconds, self._last = self.seconds + now - self._last, now
        self._bar.update(count)
        if self._bar.n >= self._bar.total:
            self._bar.close()


def summary(folder: Path, manifest: Mapping[str, Any], bar: Bar) -> Iterator[str]:
    """Yield the lines that tell what is in a cache."""
    rows, size = manifest["rows"], manifest["rows"] * manifest["bytes_per_row"]
    yield f"cache        {folder}"
    if not bar.encoded:
        yield "             nothing to encode: it was there, and every file is what was written"
    shapes = ", ".join(f"{count} of {shape}" for shape, count in manifest["latents"].items())
    yield f"latents      {rows} of {manifest['count']} images and their variants: {shapes}"
    if manifest["texts"]:
        yield f"captions     {manifest['texts']} different ones"
    yield f"size         {size / 1e6:.1f} MB, {manifest['bytes_per_row']:.0f} bytes an image"
    for name in ("mean", "std"):
        yield f"channel {name:<4} " + " ".join(f"{value:.4f}" for value in manifest["statistics"][name])
    yield f"PSNR         {manifest['reconstruction_psnr_db']:.1f} dB, of a few images decoded again"
    if bar.seconds > 0:
        yield f"speed        {bar.encoded / bar.seconds:.1f} images/s"
