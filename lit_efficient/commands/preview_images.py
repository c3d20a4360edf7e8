"""Part of ``preview`` for images: the rows of a batch in words, and as a picture.

Shows what training sees: the file, the crop and the flip of each image, its mask and condition, its weight in the loss,
and its caption as each text encoder tokenises it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_efficient.data.images.keyed_images import KeyedImageFiles
from lit_efficient.data.latent_data import LatentData
from lit_efficient.errors import refusal

PICTURE = "preview.png"


def images_of(data: Any) -> Any:
    """Return the data module of the images: that of latents shows what it encodes, and needs no cache."""
    if not isinstance(data, LatentData):
        return data
    data.tell_network()
    return data.images


def tokenizers_of(data: Any) -> list[tuple[Any, int]]:
    """Return the tokenizer of each text encoder, and its number of chunks; none for captions as text."""
    if not isinstance(data, LatentData):
        return []
    encoder = data.encoders().text
    return [] if encoder is None else [(part.tokens, part.spec.chunks) for part in encoder.parts]


def image_lines(batch: dict[str, Any], images: Any, tokenizers: list[tuple[Any, int]], rows: int) -> Iterator[str]:
    """Yield lines on the first ``rows`` rows of a batch."""
    for row in range(min(rows, len(batch["images"]))):
        key = (int(batch["index"][row]), int(batch["variant"][row]))
        yield f"=== row {row + 1} of the batch: image {key[0]}, variant {key[1]}"
        mirrored = ""
        # An image of a stream has no number among the files that are not streamed.
        if isinstance(images.dataset, KeyedImageFiles) and key[0] < len(images.dataset):
            place, is_mirrored = images.dataset.source_of(key)
            yield f"file       {place}"
            mirrored = ", mirrored" if is_mirrored else ""
        yield f"crop       {_crop(batch, row)}{mirrored}"
        if "mask" in batch:
            mask = batch["mask"][row]
            yield f"mask       mean {mask.mean():.3f}, {(mask == 0).float().mean():.1%} of the pixels without a weight"
        if "condition" in batch:
            yield f"condition  {' x '.join(map(str, batch['condition'].shape[2:]))} pixels"
        if "loss_weight" in batch:
            yield f"weight     {batch['loss_weight'][row]:.4g}"
        if "labels" in batch:
            label = int(batch["labels"][row])
            yield f"label      {label} {images.class_names[label] if images.class_names else ''}".rstrip()
        if "captions" in batch:
            yield f"caption    {batch['captions'][row]!r}"
            for tokens, chunks in tokenizers:
                for ids, seen in tokens.encode_chunks(batch["captions"][row], chunks):
                    yield f"tokens     {_pieces(tokens, ids[seen].tolist())}"


def _crop(batch: dict[str, Any], row: int) -> str:
    height, width = batch["images"].shape[2:]
    text = f"{height} x {width} pixels"
    if "sizes" not in batch:
        return text
    whole_height, whole_width, top, left, *_ = batch["sizes"][row].tolist()
    return f"{text} from {top} down and {left} right, of an image of {whole_height} x {whole_width} before its resizing"


def _pieces(tokens: Any, ids: list[int]) -> str:
    return f"{' '.join(map(tokens.piece, ids))}   ({len(ids)} of {tokens.length})"


def draw_batch(batch: dict[str, Any], path: Path, rows: int) -> None:
    """Write a PNG with a row for each image, and columns for the image, its mask and its condition."""
    from lit_efficient.files.pictures import draw_grid, write_picture

    if path.suffix.lower() != ".png":
        raise refusal("preview", "--output", "a file that ends in .png", str(path))
    columns = {"image": batch["images"][:rows]}
    if "mask" in batch:
        columns["mask"] = batch["mask"][:rows] * 2.0 - 1.0
    if "condition" in batch:
        columns["condition"] = batch["condition"][:rows]
    cells = [_coloured(column[row]) for row in range(len(columns["image"])) for column in columns.values()]
    names = [str(index) for index in batch["index"][:rows].tolist()]
    write_picture(draw_grid(torch.stack(cells), len(columns), rows=names, heads=list(columns)), path)


def _coloured(image: Tensor) -> Tensor:
    return image.expand(3, -1, -1)
