"""A few captioned photographs that need no download, so that a config runs before it gets your own.

    train: tiny:photos  ->  a folder in the cache with 15 JPEG files, and a .txt file with the caption beside each

They are parts of the two photographs inside scikit-learn.
"""

from pathlib import Path

from lit_efficient.errors import check_installed
from lit_efficient.files.cache import cache_folder, prepared_folder

TINY_PHOTOS = "tiny:photos"
_SIDE = 140
_COUNT = 15
_CAPTIONS = {"china": "a temple above trees and a lake", "flower": "an orange dahlia"}


def local_images(name: str, cache_dir: str | None) -> str:
    """Return the folder of the photographs for ``tiny:photos``, and any other name unchanged."""
    if name != TINY_PHOTOS:
        return name
    check_installed(f"ImageData: {name}", "sklearn", "PIL")
    folder = cache_folder(cache_dir, "tiny/photos", [_SIDE, _COUNT, _CAPTIONS])
    return str(prepared_folder(folder, _write, lambda place: None))


def _write(folder: Path) -> None:
    from PIL import Image
    from sklearn.datasets import load_sample_image

    for number in range(_COUNT):
        name = list(_CAPTIONS)[number % 2]
        row, column = divmod(number // 2, 4)
        left, top = column * _SIDE, row * _SIDE
        part = Image.fromarray(load_sample_image(f"{name}.jpg")).crop((left, top, left + _SIDE, top + _SIDE))
        part.save(folder / f"{name}_{number}.jpg", quality=95)
        (folder / f"{name}_{number}.txt").write_text(_CAPTIONS[name] + "\n", "utf-8")
