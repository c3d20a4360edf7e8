"""Preview of a batch of images: the words and the picture are those of the batch that a fit gets."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from lit_efficient import CaptionRules, DiffusersModelConfig, ImageData, ImageSet, ImageView, TextEncoderConfig
from lit_efficient.__main__ import main
from lit_efficient.models.libraries.text_encoder import TextEncoder
from tests.data.images.test_image_stream import tars
from tests.data.test_image_sets import painted


def test_a_batch_of_images_is_shown_in_words_and_as_a_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    painted(tmp_path)
    own = {"images": "images", "prompt": "one, two, three", "trigger": "sks", "mask": "masks", "weight": 3.0}
    own |= {"condition": "conditions"}
    rules = {"variants": 4, "shuffle": True}
    view = {"resolution": 64, "crop": "random", "horizontal_flip": True, "variants": 4}
    images = {"train": [own], "view": view, "caption_rules": rules, "val_fraction": 0, "batch_size": 4}
    config = {
        "model": {
            "class_path": "LatentDiffusion",
            "init_args": {
                "backbone": {
                    "class_path": "lit_efficient.DiffusersModelConfig",
                    "init_args": {"name_or_path": "tiny:sdxl"},
                }
            },
        },
        "data": {
            "class_path": "LatentData",
            "init_args": {"images": {"class_path": "ImageData", "init_args": images}},
        },
    }
    Path("config.yaml").write_text(yaml.safe_dump(config))
    assert main(["preview", "-c", "config.yaml", "--rows", "3"]) == 0
    said = capsys.readouterr().out

    data = ImageData(
        [ImageSet(**own)], view=ImageView(**view), caption_rules=CaptionRules(**rules), val_fraction=0, batch_size=4
    )
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    tokenizers = [
        part.tokens
        for part in TextEncoder.find(TextEncoderConfig(DiffusersModelConfig("tiny:sdxl").name_or_path)).parts
    ]
    blocks = said.split("=== row ")[1:]
    assert len(blocks) == 3
    for row, block in enumerate(blocks):
        index, variant = int(batch["index"][row]), int(batch["variant"][row])
        assert f"image {index}, variant {variant}\n" in block
        assert f"file       images/{index}.png\n" in block
        assert (", mirrored\n" in block) == bool(variant % 2)
        height, width, top, left, *_ = batch["sizes"][row].tolist()
        assert f"from {top} down and {left} right, of an image of {height} x {width} before" in block
        assert f"mask       mean {batch['mask'][row].mean():.3f}" in block
        assert "weight     3\n" in block
        assert f"caption    {batch['captions'][row]!r}\n" in block
        for tokens in tokenizers:
            ids, seen = tokens.encode(batch["captions"][row])
            pieces = [tokens.piece(token) for token in ids[seen].tolist()]
            assert f"tokens     {' '.join(pieces)}   ({len(pieces)} of 77)" in block
    drawn = np.asarray(Image.open("preview.png").convert("RGB")).astype(int)
    wanted = ((batch["images"][0] + 1) * 127.5).round().permute(1, 2, 0).int().numpy()
    mask = (batch["mask"][0, 0] * 255).round().int().numpy()
    corners = np.argwhere((drawn == wanted[0, 0]).all(-1))
    fitting = [(top, left) for top, left in corners if np.array_equal(drawn[top : top + 64, left : left + 64], wanted)]
    ((top, left),) = fitting
    strip = drawn[top : top + 64, left + 64 :, 0]
    assert any(np.abs(strip[:, at : at + 64] - mask).max() <= 1 for at in range(strip.shape[1] - 63))


@pytest.mark.parametrize("validation", [{}, {"val": "val"}], ids=["alone", "with val"])
def test_a_batch_of_a_stream(tmp_path, monkeypatch, capsys, validation):
    monkeypatch.chdir(tmp_path)
    for name in ("train", "val"):
        (tmp_path / name).mkdir()
        tars(tmp_path / name)
    images = {"train": "train", "val_fraction": 0.0, "batch_size": 2, "view": {"resolution": 16}} | validation
    images["stream"] = {"enabled": True, "buffer": 4}
    config = {"model": {"class_path": "Autoencoding"}, "data": {"class_path": "ImageData", "init_args": images}}
    Path("config.yaml").write_text(yaml.safe_dump(config))
    assert main(["preview", "-c", "config.yaml", "--rows", "2"]) == 0
    said = capsys.readouterr().out
    assert "caption    'picture " in said
    assert "16 x 16 pixels from 0 down and 0 right, of an image of 16 x 16" in said
