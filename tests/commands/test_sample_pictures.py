"""``sample`` gives networks the images that they see, and its images are those of diffusers' pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from lit_efficient import DiffusersModelConfig, LatentDiffusion
from lit_efficient.__main__ import main
from lit_efficient.files.checkpoints import write
from lit_efficient.losses.diffusers_sampling import scheduler_for
from lit_efficient.losses.diffusion_sampling import Sampler
from lit_efficient.models.libraries.latent_codec import LatentCodec, find_autoencoder
from lit_efficient.tasks.image_inputs import image_input
from tests import tiny_pipelines
from tests.tasks.test_image_conditions import controlled, ours_from, shaken

SEED = 7
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:A caption has")


def pictures(folder: Path, mode: str = "RGB") -> list[Path]:
    """Write two images of the network's size."""
    folder.mkdir()
    paths = []
    for number in range(2):
        draws = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        paths.append(folder / f"picture_{number}.png")
        Image.fromarray(draws).convert(mode).resize((64, 64), Image.Resampling.NEAREST).save(paths[-1])
    return paths


def trained(folder: Path, kind: str) -> LatentDiffusion:
    """A run whose network sees images, with its autoencoder."""
    module = ours_from(folder, kind)
    shaken(module.network)  # type: ignore[arg-type]
    assert module.latent_scaling is not None
    statistics = (torch.tensor(values) for values in module.latent_scaling)
    module.codec = LatentCodec(find_autoencoder(DiffusersModelConfig(str(folder), subfolder="vae")), *statistics)
    module.latent_size = (8, 8)
    checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    module.on_save_checkpoint(checkpoint)
    write(folder / "run.ckpt", checkpoint)
    return module.eval()


def sampled(folder: Path, *options: str) -> list[Any]:
    """The images that the command writes, in the order of their names."""
    common = ["--ckpt", str(folder / "run.ckpt"), "--output", str(folder / "out"), "--device", "cpu"]
    common += ["--prompts", "a cat", "--seeds", str(SEED), "--steps", "4"]
    assert main(["sample", *common, *options]) == 0
    paths = sorted(path for path in (folder / "out").glob("*.png") if path.name != "grid.png")
    return [np.asarray(Image.open(path)).astype(int) for path in paths]


def test_a_controlnet_draws_what_its_pipeline_draws(tmp_path: Path) -> None:
    tiny_pipelines.written("sd15", tmp_path)
    module: Any = trained(tmp_path, "controlnet")
    paths = pictures(tmp_path / "edges")
    found = sampled(tmp_path, "--images", str(tmp_path / "edges"), "--guidance", "5", "--sampler", "ddim")
    assert [one.shape for one in found] == [(64, 64, 3)] * 2
    assert np.abs(found[0] - found[1]).max() > 2
    pipeline = controlled(tmp_path / "again", "sd15", module.network.controlnet)
    pipeline.register_modules(unet=module.network.unet)
    pipeline.scheduler = scheduler_for(module.process, Sampler("ddim"), module.prediction)
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(SEED))
    for path, ours in zip(paths, found):
        given = {"image": Image.open(path), "latents": noise, "guidance_scale": 5.0, "num_inference_steps": 4}
        [theirs] = pipeline("a cat", **given).images
        assert np.abs(np.asarray(theirs).astype(int) - ours).max() <= 1


def test_inpainting_draws_what_its_pipeline_draws(tmp_path: Path) -> None:
    base = tiny_pipelines.written("sd15", tmp_path)
    module: Any = trained(tmp_path, "inpaint")
    paths = pictures(tmp_path / "photos")
    masks = pictures(tmp_path / "masks", "L")
    options = ["--images", str(tmp_path / "photos"), "--masks", str(tmp_path / "masks")]
    found = sampled(tmp_path, *options, "--guidance", "5", "--sampler", "ddim")
    kind: Any = diffusers.StableDiffusionInpaintPipeline
    components = {name: part for name, part in base.components.items() if name != "image_encoder"}
    pipeline = kind(**(components | {"unet": module.network}), requires_safety_checker=False)
    pipeline.scheduler = scheduler_for(module.process, Sampler("ddim"), module.prediction)
    pipeline.set_progress_bar_config(disable=True)
    for path, mask, ours in zip(paths, masks, found):
        draws = torch.Generator().manual_seed(SEED)
        torch.randn(1, 4, 8, 8, generator=draws)  # of the posterior of the masked image
        noise = torch.randn(1, 4, 8, 8, generator=draws)
        given = {"image": Image.open(path), "mask_image": Image.open(mask), "strength": 1.0, "guidance_scale": 5.0}
        again = {"generator": torch.Generator().manual_seed(SEED), "latents": noise, "num_inference_steps": 4}
        [theirs] = pipeline("a cat", height=64, width=64, **given, **again).images
        assert np.abs(np.asarray(theirs).astype(int) - ours).max() <= 1


def test_an_edit_sees_the_image_and_each_image_gets_each_prompt(tmp_path: Path) -> None:
    tiny_pipelines.written("flux", tmp_path)
    module: Any = trained(tmp_path, "sequence")
    paths = pictures(tmp_path / "photos")
    found = sampled(tmp_path, "--images", *map(str, paths), "--guidance", "1")
    for path, ours in zip(paths, found, strict=True):
        pixels = torch.tensor(np.asarray(Image.open(path))).permute(2, 0, 1)[None] / 127.5 - 1
        image, _ = image_input({"condition": pixels}, module.image_condition, module.codec, module.device)
        module.guidance_scale, module.sampling_steps = 1.0, 4
        latents = module.sample(
            captions=["a cat"], generator=[torch.Generator().manual_seed(SEED)], image=image, count=1
        )
        theirs = (module.codec.decode(latents)[0].permute(1, 2, 0) * 127.5 + 127.5).round().int().numpy()
        assert np.abs(theirs - ours).max() <= 1


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("controlnet", [], "--images must be files or folders of images, which the network sees"),
        ("controlnet", ["--images", "photos", "--masks", "masks"], "--masks must be left out for"),
        ("controlnet", ["--images", "nothing.png"], "--images must be files or folders that exist, got 'nothing.png'"),
        ("controlnet", ["--images", "photos", "--before"], "leave --before out"),
        ("inpaint", ["--images", "photos"], "--masks must be a mask for each image"),
        ("inpaint", ["--images", "photos", "--masks", "masks/picture_0.png"], "picture_1.png has none"),
    ],
    ids=["no image", "a mask", "no file", "before", "no mask", "one mask"],
)
def test_missing_images_are_named(
    kind: str,
    options: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny_pipelines.written("sd15", tmp_path)
    trained(tmp_path, kind)
    pictures(tmp_path / "photos")
    pictures(tmp_path / "masks", "L")
    monkeypatch.chdir(tmp_path)
    assert main(["sample", "--ckpt", "run.ckpt", "--output", "out.png", "--device", "cpu", *options]) == 2
    assert reason in capsys.readouterr().err
    assert not Path("out.png").exists()
