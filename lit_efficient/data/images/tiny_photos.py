"""A few captioned photographs that need no download, so that a config runs before it gets your own.

    images: tiny:photos    ->  a folder in the cache with 15 JPEG files, and a .txt file with the caption beside each
    condition: tiny:edges  ->  the edges of these photographs, for a ControlNet

They are parts of the two photographs inside scikit-learn.
"""

from functools import partial
from pathlib import Path

from lit_efficient.errors import check_installed
from lit_efficient.files.cache import cache_folder, prepared_folder

TINY_PHOTOS = "tiny:photos"
TINY_EDGES = "tiny:edges"
_SIDE = 140
_COUNT = 15
_CAPTIONS = {"china": "a temple above trees and a lake", "flower": "an orange dahlia"}


def local_images(name: str, cache_dir: str | None) -> str:
    """Return the folder of the images for ``tiny:photos`` and ``tiny:edges``, and any other name unchanged."""
    if name not in (TINY_PHOTOS, TINY_EDGES):
        return name
    check_installed(f"ImageData: {name}", "sklearn", "PIL")
    folder = cache_folder(cache_dir, name.replace(":", "/"), [_SIDE, _COUNT, _CAPTIONS])
    return str(prepared_folder(folder, partial(_write, name == TINY_EDGES), lambda place: None))


def _write(edges: bool, folder: Path) -> None:
    from PIL import Image, ImageFilter
    from sklearn.datasets import load_sample_image

    for number in range(_COUNT):
        name = list(_CAPTIONS)[number % 2]
        row, column = divmod(number // 2, 4)
        left, top = column * _SIDE, row * _SIDE
        part = Image.fromarray(load_sample_image(f"{name}.jpg")).crop((left, top, left + _SIDE, top + _SIDE))
        if edges:
            part = part.convert("L").filter(ImageFilter.FIND_EDGES).convert("RGB")
        part.save(folder / f"{name}_{number}.jpg", quality=95)
        if not edges:
            (folder / f"{name}_{number}.txt").write_text(_CAPTIONS[name] + "\n", "utf-8")
