"""Tests of class images: what the pipeline itself gives, made once, and completed after an interruption."""

import numpy as np
import pytest
import torch
from PIL import Image

from lit_efficient import ClassImages, DiffusersModelConfig, ImageData, ImageSet, ImageView
from lit_efficient.errors import ConfigurationError
from lit_efficient.mechanisms.order.resumable_sampler import mix_seed
from tests.data.images.image_kit import write

diffusers = pytest.importorskip("diffusers")


def data_of(tmp_path, number, prompt="a dog", images=None, network=None, **generate):
    generate = {"pipeline": "tiny:sd15", "steps": 2, "guidance_scale": 3.0, "batch_size": 2, "seed": 4} | generate
    prior = ImageSet(images, role="prior", prompt=prompt, generate=ClassImages(number, **generate))
    sets = [ImageSet(str(tmp_path / "own"), prompt="a photo of sks dog"), prior]
    data = ImageData(sets, view=ImageView(64), val_fraction=0, cache_dir=str(tmp_path / "cache"))
    data.network = network
    return data


def files_of(tmp_path):
    return {file: file.stat().st_mtime_ns for file in (tmp_path / "cache" / "class_images").rglob("*.png")}


@pytest.mark.turns(6, family="slow")
def test_they_are_what_the_pipeline_gives_and_are_made_once(tmp_path):
    write(tmp_path / "own", ["0.png", "1.png"])
    write(tmp_path / "class", ["2.png"])
    data = data_of(tmp_path, 4, images=str(tmp_path / "class"))
    data.prepare_data()
    data.setup("fit")
    first = files_of(tmp_path)
    assert sorted(file.name for file in first) == ["00000.png", "00001.png", "00002.png"]  # and one that was there
    assert len(data.dataset) == 2 + 4
    assert {data.dataset[index, 0]["captions"] for index in range(2, 6)} == {"a dog"}

    pipeline = diffusers.DiffusionPipeline.from_pretrained(DiffusersModelConfig("tiny:sd15").name_or_path)
    pipeline.set_progress_bar_config(disable=True)
    for number, file in enumerate(sorted(first)):
        noise = torch.Generator().manual_seed(mix_seed(4, number))
        (image,) = pipeline(
            "a dog", generator=noise, num_inference_steps=2, guidance_scale=3.0, height=64, width=64
        ).images
        difference = np.abs(np.asarray(image).astype(int) - np.asarray(Image.open(file)).astype(int))
        assert difference.max() <= 1  # other kernels for other batch sizes

    missing = sorted(first)[1]
    missing.unlink()
    again = data_of(tmp_path, 5, images=str(tmp_path / "class"))
    again.prepare_data()
    second = files_of(tmp_path)
    assert sorted(file.name for file in second) == ["00000.png", "00001.png", "00002.png", "00003.png"]
    assert all(second[file] == when for file, when in first.items() if file != missing)

    fewer = data_of(tmp_path, 2, images=str(tmp_path / "class"))
    fewer.setup("fit")
    assert len(fewer.dataset) == 2 + 2
    assert files_of(tmp_path) == second


@pytest.mark.turns(4, family="class images")
@pytest.mark.parametrize("change", [{"prompt": "a cat"}, {"seed": 5}, {"steps": 3}, {"pipeline": "tiny:sdxl"}])
def test_other_settings_make_other_images(tmp_path, change):
    write(tmp_path / "own", ["0.png"])
    data_of(tmp_path, 1).prepare_data()
    (first,) = files_of(tmp_path)
    data_of(tmp_path, 1, **change).prepare_data()
    (second,) = files_of(tmp_path).keys() - {first}
    assert first.read_bytes() != second.read_bytes()


def test_the_pipeline_is_that_of_the_trained_network(tmp_path):
    write(tmp_path / "own", ["0.png"])
    data_of(tmp_path, 1).prepare_data()
    before = files_of(tmp_path)
    trained = DiffusersModelConfig("tiny:sd15", subfolder="unet")
    data_of(tmp_path, 1, pipeline=None, network=trained).prepare_data()
    assert files_of(tmp_path) == before
    with pytest.raises(ConfigurationError, match=r"generate.pipeline must be the folder or name of a pipeline"):
        data_of(tmp_path, 1, pipeline=None).prepare_data()


@pytest.mark.turns(6, family="slow")
def test_a_folder_with_weights_of_one_variant_makes_them(tmp_path):
    write(tmp_path / "own", ["0.png"])
    whole = diffusers.DiffusionPipeline.from_pretrained(DiffusersModelConfig("tiny:sd15").name_or_path)
    whole.save_pretrained(tmp_path / "fp16", variant="fp16")
    data_of(tmp_path, 1).prepare_data()
    (first,) = files_of(tmp_path)
    data_of(tmp_path, 1, pipeline=str(tmp_path / "fp16")).prepare_data()
    (second,) = files_of(tmp_path).keys() - {first}
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    "wrong", [{"role": "train"}, {"prompt": None}, {"mask": "masks"}, {"condition": "conditions"}, {"generate": None}]
)
def test_a_set_without_images_needs_a_prompt_for_the_prior(wrong):
    given = {"role": "prior", "prompt": "a dog", "generate": ClassImages(2)}
    with pytest.raises(ConfigurationError, match=r"train.generate must be null, except|train.images must be a folder"):
        ImageSet(**given | wrong)
