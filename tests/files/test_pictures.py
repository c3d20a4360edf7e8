"""Grids: every pixel of an image in its place, every name whole, readable and inside the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont

from lit_efficient.errors import ConfigurationError
from lit_efficient.files.pictures import draw_grid, shortened, write_picture

FONT = ImageFont.load_default(12)


def _images(count: int, channels: int = 1, size: int = 2) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=torch.uint8).view(-1, 1, 1, 1).expand(count, channels, size, size)


def test_images_lie_row_by_row() -> None:
    grid = np.asarray(draw_grid(_images(5), columns=3))
    assert grid.shape == (5, 8)  # 2 x 3 images of 2 pixels, a pixel between
    assert grid[::3, ::3].tolist() == [[1, 2, 3], [4, 5, 0]]
    assert not grid[2].any()  # the border
    large = np.asarray(draw_grid(_images(5), columns=3, zoom=2))
    assert large.shape == (10, 16)
    assert np.array_equal(large[::2, ::2], grid)


def test_floats_go_from_minus_one_to_one() -> None:
    grid = draw_grid(torch.tensor([-1.0, 0.0, 1.0, 7.0]).view(4, 1, 1, 1).expand(4, 3, 1, 1), columns=4)
    assert np.asarray(grid)[0, ::2, 1].tolist() == [0, 128, 255, 255]
    with pytest.raises(ConfigurationError, match=r"images must be \[N, 1 or 3, H, W\], got \(2, 4, 4\)"):
        draw_grid(torch.zeros(2, 4, 4), 1)


def _grid(names: dict[str, Any], channels: int = 1) -> Any:
    return np.asarray(draw_grid(torch.full((4, channels, 20, 20), 200, dtype=torch.uint8), 2, **names))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "names",
    [
        {"rows": ["gypsum", "a quartz"]},
        {"heads": ["gypsum", "j" * 30]},
        {"rows": ["g", "j"], "heads": ["", "seed 12345678901234567890"]},
        {"captions": ["gj", "b", "Quite a long name of an image that ends in a dog", "d"]},
    ],
)
def test_names_are_whole_and_leave_the_images_as_they_are(names: dict[str, Any], channels: int) -> None:
    grid = _grid(names, channels)
    assert (grid == 200).all(-1).sum() >= 1600 if channels == 3 else (grid == 200).sum() >= 1600
    edges = [grid[:3], grid[-3:], grid[:, :3], grid[:, -3:]]
    assert all((edge == 255).all() for edge in edges)  # no letter is cut
    assert (grid < 60).sum() > 20


def test_what_a_column_or_a_row_has_in_common_is_said_once() -> None:
    same = [({"captions": ["a", "b", "a", "b"]}, {"heads": ["a", "b"]})]
    same += [({"captions": ["a", "a", "b", "b"]}, {"rows": ["a", "b"]})]
    for captions, names in same:
        assert np.array_equal(_grid(captions), _grid(names))
    each = _grid({"captions": ["a", "b", "c", "d"]})
    assert each.shape[0] == _grid({"heads": ["a", "b"]}).shape[0] + 18


@pytest.mark.parametrize("text", ["a cat " * 99, "猫" * 500, "x" * 100_000, "no\nlines\tor  gaps"])
def test_long_names_end_in_an_ellipsis(text: str) -> None:
    short = shortened(text, FONT)
    assert FONT.getlength(short) <= 200
    assert "\n" not in short
    assert short.endswith("…") == (len(text) > 30)


def test_letters_that_the_font_lacks_are_told_by_a_mark() -> None:
    assert shortened("Café naïve, дом 猫😀", FONT) == "Cafe naive, ??? ??"
    assert shortened("".join(map(chr, range(33, 127))), FONT, 9999) == "".join(map(chr, range(33, 127)))
    assert shortened("a\x00b\u202e\ud800", FONT).startswith("a")


def test_a_picture_carries_what_is_known_of_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.png"
    write_picture(draw_grid(_images(1), 1), path, {"prompt": "猫 é\n", "seed": 3})
    assert Image.open(path).text == {"prompt": "猫 é\n", "seed": "3"}  # type: ignore[attr-defined]
    assert [file.name for file in path.parent.iterdir()] == ["x.png"]
