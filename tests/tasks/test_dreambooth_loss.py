"""DreamBooth on photographs and class images: the loss of diffusers' train_dreambooth_lora_sdxl.py, by its classes."""

import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from lit_efficient import DiffusersModelConfig, ImageData, ImageSet, ImageView, LatentData, LatentDiffusion, Samples
from tests import support

diffusers = pytest.importorskip("diffusers")


class Stop(Exception):
    """Raised after the first batch."""


def test_the_loss_of_a_batch_from_files_is_that_of_the_script(tmp_path):
    torch.manual_seed(0)
    for name, side in (("own", 90), ("class", 70)):
        (tmp_path / name).mkdir()
        for number in range(2):
            pixels = torch.randint(0, 256, (side, side + 40, 3), dtype=torch.uint8).numpy()
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    sets = [
        ImageSet(str(tmp_path / "own"), prompt="a photo of sks dog"),
        ImageSet(str(tmp_path / "class"), role="prior", prompt="a photo of a dog", weight=0.6),
    ]
    view = ImageView(64, crop="random", variants=4)
    data = LatentData(ImageData(sets, view=view, batch_size=4, val_fraction=0), cached=False)
    module = LatentDiffusion(
        DiffusersModelConfig("tiny:sdxl"), label_dropout=0.0, guidance_scale=1.0, samples=Samples(0)
    )
    seen = {}
    step = module.training_step

    def recorded(batch, batch_idx):
        torch.manual_seed(3)
        module.network.register_forward_pre_hook(
            lambda _module, args, given: seen.update(args=args, given=given), with_kwargs=True
        )
        seen.update(batch=batch, output=step(batch, batch_idx))
        raise Stop

    module.training_step = recorded
    with pytest.raises(Stop):
        support.trainer(default_root_dir=tmp_path, max_steps=1, num_sanity_val_steps=0).fit(module, data)
    batch, output = seen["batch"], seen["output"]

    pipeline = diffusers.DiffusionPipeline.from_pretrained(module.backbone.name_or_path)
    own = [row for row in range(4) if batch["captions"][row] == "a photo of sks dog"]
    order = own + [row for row in range(4) if row not in own]
    assert len(own) == 2
    torch.manual_seed(3)
    torch.rand(4)  # of hidden conditions
    with torch.no_grad():
        latents = pipeline.vae.encode(batch["images"]).latent_dist.sample() * pipeline.vae.config.scaling_factor
        noise = output["target"]
        timesteps = (seen["args"][1] if len(seen["args"]) > 1 else seen["given"]["timestep"]).long()
        scheduler = diffusers.DDPMScheduler.from_config(pipeline.scheduler.config)
        noisy = scheduler.add_noise(latents, noise, timesteps)
        encoded = pipeline.encode_prompt(batch["captions"], device="cpu", do_classifier_free_guidance=False)
        added = {"text_embeds": encoded[2], "time_ids": batch["sizes"].float()}
        predicted = module.network(noisy, timesteps, encoded[0], added_cond_kwargs=added).sample
    # As in the script: instances come first, and the batch is cut in two.
    own_predicted, prior_predicted = predicted[order].chunk(2)
    own_target, prior_target = noise[order].chunk(2)
    loss = F.mse_loss(own_predicted, own_target) + 0.6 * F.mse_loss(prior_predicted, prior_target)
    assert float(output["loss"].detach()) == pytest.approx(float(loss), rel=1e-5)
