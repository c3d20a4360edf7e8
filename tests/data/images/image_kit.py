"""Small image files in every layout. Each image has one colour, so that its pixels identify it."""

import csv
import io
import json

import numpy as np
from PIL import Image

SIZES = [(40, 40), (30, 60), (60, 30), (40, 50), (64, 24)]


def picture(number, size=None):
    """Return an image with red ``number`` and a ramp in green."""
    height, width = size or SIZES[number % len(SIZES)]
    array = np.zeros((height, width, 3), np.uint8)
    array[..., 0] = 10 * number + 5
    array[..., 1] = np.linspace(0, 255, width)
    return Image.fromarray(array)


def encoded(image, kind="PNG"):
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def number_of(images):
    """Return the number of the picture that an item shows."""
    return round((float(images[0].mean()) + 1) * 127.5 - 5) // 10


def write(folder, names, captions=None):
    """Write picture k to the k-th name, with caption files beside the images."""
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path)
        if captions is not None and captions[number] is not None:
            path.with_suffix(".txt").write_text(captions[number])
    return folder


def write_metadata(folder, rows, kind="jsonl"):
    path = folder / f"metadata.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return folder
