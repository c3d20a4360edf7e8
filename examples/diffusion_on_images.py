"""Latent diffusion on a folder of your images: first an autoencoder, then a transformer on its latents.

    python examples/diffusion_on_images.py            # the digits of scikit-learn, written as PNGs
    python examples/diffusion_on_images.py my_images  # my_images/CLASS/*.png

The same from YAML: configs/diffusion/, with the commands `cache-latents` and `sample`.
"""

import sys
import tempfile
from pathlib import Path

import lightning.pytorch as L
from PIL import Image

from lit_efficient import (
    EMA,
    Autoencoding,
    ExactResume,
    ImageData,
    ImageView,
    LatentData,
    LatentDiffusion,
    ThroughputBar,
)
from lit_efficient.models.networks.autoencoder import AutoencoderConfig
from lit_efficient.models.networks.dit import DiTConfig


def write_images(folder: Path, count: int = 400) -> None:
    """Digits as PNGs, a folder for each class."""
    from sklearn.datasets import load_digits

    found = load_digits()
    for number, (image, label) in enumerate(zip(found.images[:count], found.target[:count], strict=True)):
        place = folder / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15.9).astype("uint8")).resize((16, 16)).save(place / f"{number}.png")


def trainer(max_steps: int, folder: Path) -> L.Trainer:
    callbacks = [ThroughputBar(), ExactResume(), EMA(decay=0.99)]
    return L.Trainer(max_steps=max_steps, default_root_dir=folder, logger=False, callbacks=callbacks)


def main(folder: str, resolution: int = 16, max_steps: int = 300) -> L.Trainer:
    """Train both; what they saved lies beside the images.

    Args:
        folder: One folder for each class, with images.
        resolution: Side of the images, in pixels: the shorter one is scaled to it, and the middle cut out.
        max_steps: Optimizer steps of each.
    """
    L.seed_everything(0, verbose=False)
    images = ImageData(
        train=folder, view=ImageView(resolution=resolution, channels="grey"), batch_size=32, val_fraction=0.1
    )
    encoder = AutoencoderConfig(image_channels=1, latent_channels=4, width=16)
    runs = Path(folder).with_name(f"{Path(folder).name}-runs")
    first = trainer(max_steps, runs / "autoencoder")
    first.fit(Autoencoding(encoder), images)
    saved = runs / "autoencoder.ckpt"
    first.save_checkpoint(saved)

    latents = LatentData(images=images, autoencoder=str(saved), build=True)
    second = trainer(max_steps, runs / "diffusion")
    second.fit(LatentDiffusion(DiTConfig(channels=4, size=resolution // 4, num_classes=10), sampling_steps=10), latents)
    return second


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as made:
            write_images(Path(made, "digits"))
            main(str(Path(made, "digits")))
