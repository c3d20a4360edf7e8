"""Tests of decoding and cropping: every format gives a viewer's pixels, and crops depend on the key alone."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from lit_efficient.data.images.aspect_buckets import AspectBuckets, nearest_shapes
from lit_efficient.data.images.image_pixels import UnreadableImage, cover, crop_place, decode, upright_size
from lit_efficient.data.images.image_view import ImageView
from lit_efficient.errors import ConfigurationError


def encoded(image, kind="PNG", **arguments):
    buffer = io.BytesIO()
    image.save(buffer, kind, **arguments)
    return buffer.getvalue()


def pixels(height=6, width=10, channels=3):
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8).squeeze()


def test_plain_pixels_come_back_as_they_are():
    assert np.array_equal(decode(encoded(Image.fromarray(pixels()))), pixels())
    grey = pixels(channels=1)
    assert np.array_equal(decode(encoded(Image.fromarray(grey)), "grey"), grey)
    assert np.array_equal(decode(encoded(Image.fromarray(grey))), np.stack([grey] * 3, axis=-1))
    assert np.array_equal(decode(encoded(Image.fromarray(pixels())), "grey"), Image.fromarray(pixels()).convert("L"))


def test_transparency_is_shown_on_white():
    colours = np.dstack([np.full((2, 3, 3), (200, 0, 100), np.uint8), np.array([[0, 51, 255]] * 2, np.uint8)])
    expected = [[(255, 255, 255), (244, 204, 224), (200, 0, 100)]] * 2
    assert np.abs(np.asarray(decode(encoded(Image.fromarray(colours)))).astype(int) - expected).max() <= 1
    grey = np.dstack([np.full((1, 2), 40, np.uint8), np.array([[0, 255]], np.uint8)])
    assert np.asarray(decode(encoded(Image.fromarray(grey, "LA")), "grey")).tolist() == [[255, 40]]


@pytest.mark.parametrize("transparency", [None, 0, b"\x00\xff\x80"])
def test_palettes_are_resolved(transparency):
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    image.putpalette([250, 10, 20, 5, 99, 7, 0, 0, 200])
    content = encoded(image, **({} if transparency is None else {"transparency": transparency}))
    first = (250, 10, 20) if transparency is None else (255, 255, 255)
    last = (127, 127, 227) if transparency == b"\x00\xff\x80" else (0, 0, 200)
    assert np.abs(np.asarray(decode(content)).astype(int) - [[first, (5, 99, 7), last]]).max() <= 1


def test_a_colour_that_is_declared_transparent_is_white():
    image = Image.fromarray(np.array([[[9, 8, 7], [1, 2, 3]]], np.uint8))
    assert np.asarray(decode(encoded(image, transparency=(9, 8, 7)))).tolist() == [[[255, 255, 255], [1, 2, 3]]]


def test_sixteen_bits_of_grey_are_scaled_not_clipped():
    values = np.array([[0, 255, 256, 32896, 65535]], np.uint16)
    content = encoded(Image.fromarray(values))
    assert np.asarray(decode(content, "grey")).tolist() == [[0, 1, 1, 128, 255]]
    assert np.asarray(decode(content))[0, 3].tolist() == [128, 128, 128]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied_and_known_without_decoding(orientation, kind):
    flat = np.zeros((16, 48, 3), np.uint8)
    flat[:8, :24] = 255  # a bright corner: top left as stored
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"lossless": True} if kind == "WEBP" else {}
    content = encoded(Image.fromarray(flat), kind, exif=exif, **lossless)
    # Where the stored corner belongs, by EXIF's definition.
    corner = {1: "tl", 2: "tr", 3: "br", 4: "bl", 5: "tl", 6: "tr", 7: "br", 8: "bl"}[orientation]
    shown = np.asarray(decode(content, "grey")).astype(int)
    size = (48, 16) if orientation >= 5 else (16, 48)
    assert shown.shape == size == upright_size(content) == upright_size(content, thorough=True)
    halves = {"t": shown[: size[0] // 2], "b": shown[size[0] // 2 :]}[corner[0]]
    bright = {"l": halves[:, : size[1] // 2], "r": halves[:, size[1] // 2 :]}[corner[1]]
    assert bright.mean() > 200
    assert shown.sum() - bright.sum() < 0.1 * bright.sum()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"no image at all", "cannot identify image file"),
        (b"", "cannot identify image file"),
        (encoded(Image.fromarray(pixels(60, 60)))[:-200], None),
        (encoded(Image.fromarray(pixels(60, 60)), "JPEG")[:-200], "truncated"),
        (encoded(Image.fromarray(pixels(60, 60)), "WEBP")[:-200], None),
        (encoded(Image.fromarray(pixels(60, 60)), "BMP")[:-200], "truncated"),
    ],
)
@pytest.mark.parametrize("check", [decode, upright_size])
def test_damage_is_seen(content, reason, check):
    with pytest.raises(UnreadableImage, match=reason):
        check(content)


def test_a_flipped_bit_in_a_png_is_seen_by_its_checksum():
    content = bytearray(encoded(Image.fromarray(pixels(60, 60))))
    content[len(content) // 2] ^= 4
    with pytest.raises(UnreadableImage):
        upright_size(bytes(content))


def test_what_has_no_white_is_refused():
    with pytest.raises(UnreadableImage, match="32 bits a pixel"):
        decode(encoded(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF"))


def test_covering_keeps_the_largest_crop_of_the_aspect_and_uses_all_of_it():
    ramp = np.tile(np.arange(0, 240, 2, dtype=np.uint8), (40, 1))  # 40 x 120, brighter to the right
    image = Image.fromarray(ramp)
    middle = np.asarray(cover(image, 20, 20, (0.5, 0.5), "bicubic")).mean()
    left, right = (np.asarray(cover(image, 20, 20, (0.5, x), "bicubic")).mean() for x in (0.0, 1.0))
    assert left == pytest.approx(ramp[:, :40].mean(), abs=0.5)
    assert middle == pytest.approx(ramp[:, 40:80].mean(), abs=0.5)
    assert right == pytest.approx(ramp[:, 80:].mean(), abs=0.5)
    assert np.array_equal(cover(image, 40, 120, (0.3, 0.7), "lanczos"), ramp)
    assert cover(image, 64, 8, (0.9, 0.9), "lanczos").size == (8, 64)


def test_resampling_is_antialiased():
    board = (np.indices((64, 64)).sum(axis=0) % 2 * 255).astype(np.uint8)  # a pixel's worth of black and white
    for kernel in ("lanczos", "bicubic"):
        small = np.asarray(cover(Image.fromarray(board), 8, 8, (0.5, 0.5), kernel)).astype(int)
        assert np.abs(small[1:-1, 1:-1] - 127.5).max() < 4


def test_variants_are_functions_of_their_key():
    content = encoded(Image.fromarray(pixels(20, 60)))

    def look(variant, seed=3, index=5, **view):
        return ImageView(**{"crop": "random", "variants": 6} | view).look(content, (16, 16), (index, variant), seed)

    state = torch.get_rng_state()
    looks = [look(variant, horizontal_flip=True) for variant in range(6)]
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(seen, look(v, horizontal_flip=True)) for v, seen in enumerate(looks))
    assert len({seen.numpy().tobytes() for seen in looks}) == 6
    assert torch.equal(looks[0], look(0, 4, 9, crop="center", variants=1))  # variant 0 is plain, whatever the seed
    assert torch.equal(looks[3], look(3).flip(-1))
    assert torch.equal(looks[2], look(2))
    assert not torch.equal(looks[2], look(2, seed=4))
    assert (looks[0].shape, looks[0].dtype) == ((3, 16, 16), torch.float32)
    places = np.array([crop_place(0, index, 1) for index in range(2000)])
    assert np.abs(places.mean(axis=0) - 0.5).max() < 0.03
    assert (places.min() >= 0, places.max() < 1) == (True, True)


@pytest.mark.parametrize(
    ("resolution", "step", "aspect"), [(64, 8, 2.0), (256, 64, 2.0), (512, 64, 3.0), (96, 16, 1.5)]
)
def test_shapes_equal_a_search_over_all(resolution, step, aspect):
    area, sides = resolution**2, range(step, 8 * resolution, step)
    every = {
        (h, w)
        for h in sides
        for w in sides
        if h * w <= area < min((h + step) * w, h * (w + step)) and max(h / w, w / h) <= aspect
    }
    shapes = AspectBuckets(step, aspect).shapes(resolution)
    assert set(shapes) == every
    assert len(shapes) == len(every)
    assert (resolution, resolution) in shapes
    assert {(w, h) for h, w in shapes} == every


def test_images_go_to_the_nearest_shape_in_log_aspect():
    shapes = AspectBuckets(8, 3.0).shapes(64)
    sizes = np.random.default_rng(1).integers(10, 2000, (500, 2))
    for (height, width), number in zip(sizes, nearest_shapes(sizes, shapes)):
        distances = [abs(np.log(width / height) - np.log(w / h)) for h, w in shapes]
        assert distances[number] == min(distances)
    assert nearest_shapes(np.array([[5, 50000], [50000, 5]]), shapes).tolist() == [len(shapes) - 1, 0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"step": 12}, "step must be a multiple of 8, got 12"),
        ({"max_aspect": 1.0}, "max_aspect must be above 1, got 1.0"),
    ],
)
def test_bad_buckets(wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        AspectBuckets(**wrong)


def test_a_single_bucket_is_none():
    with pytest.raises(ConfigurationError, match="give 1 shape for a resolution of 64"):
        AspectBuckets(64, 2.0).shapes(64)


def test_what_starts_programs_is_no_image(tmp_path, monkeypatch):
    ghost = tmp_path / "gs"
    ghost.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    ghost.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(UnreadableImage):
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n%%EOF\n")
    assert not (tmp_path / "ran").exists()
