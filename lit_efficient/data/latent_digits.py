"""Digits of scikit-learn as latents. The first run trains the autoencoder and caches the result, which is checked.

    batch: {"mean": [B, c, h, w], "logvar": [B, c, h, w], "labels": [B], "index": [B]}

``mean`` and ``logvar`` are the moments of the posterior in normalised units: sampled latents have mean 0 and variance 1
in each channel of the training part. The task draws the sample at each step. It trains on the whole posterior, uses one
random generator for any number of workers, and resumes exactly.

Costs: about 25 s of one CPU core once; 4 MB of disk.
"""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lit_efficient.data import digit_images as digits
from lit_efficient.data.digit_images import DigitsDataModule, TensorDictDataset
from lit_efficient.data.latents import stage_one
from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.files.cache import cache_root, digest_of
from lit_efficient.files.sealed_folder import Contents, make_once, open_checked
from lit_efficient.models.judges import conv_features
from lit_efficient.models.judges.conv_features import DigitFeatures, judge_digits
from lit_efficient.models.libraries.latent_codec import LatentCodec
from lit_efficient.models.networks import autoencoder as autoencoder_module
from lit_efficient.models.networks.autoencoder import FACTOR, AutoencoderConfig, sample_posterior

# Modules whose code decides the result of stage one.
_CODE = (autoencoder_module, conv_features, digits, stage_one)


class LatentDigits(DigitsDataModule):
    """DataModule of scikit-learn's digits as latents of an autoencoder, which is trained on them once.

    Args:
        image_size: Height and width of the images in pixels, a multiple of 4. Latents are 4 times smaller.
        batch_size: Images in a batch, for each process.
        autoencoder: Configuration of the autoencoder.
        autoencoder_steps: Optimizer steps of the autoencoder, with 64 images each.
        judge_steps: Optimizer steps of the classifier that judges samples.
        num_workers: Worker processes of a loader. The data is in memory, so 0 is fastest.
        seed: Seed of the split, of the autoencoder and of the judge.
        cache_dir: Folder of the cache. null: LIT_EFFICIENT_CACHE, or ~/.cache/lit_efficient.
        pin_memory: Place batches for a CUDA device in pinned memory, which allows asynchronous copies.
    """

    batches: ClassVar[str] = "latents"

    def __init__(
        self,
        image_size: int = 32,
        batch_size: int = 64,
        autoencoder: AutoencoderConfig = AutoencoderConfig(),  # noqa: B008 (frozen)
        autoencoder_steps: int = 400,
        judge_steps: int = 400,
        num_workers: int = 0,
        seed: int = 0,
        cache_dir: str | None = None,
        pin_memory: bool = True,
    ) -> None:
        super().__init__(batch_size, num_workers, seed, pin_memory)
        self.image_size = digits.checked_image_size(type(self).__name__, image_size)
        check_number("LatentDigits", "autoencoder_steps", autoencoder_steps, least=1, whole=True)
        check_number("LatentDigits", "judge_steps", judge_steps, least=1, whole=True)
        if autoencoder.image_channels != 1:
            raise refusal("LatentDigits", "autoencoder.image_channels", "1 (grey)", autoencoder.image_channels)
        self.autoencoder = autoencoder
        self.autoencoder_steps = autoencoder_steps
        self.judge_steps = judge_steps
        self.cache_dir = cache_dir
        self.codec: LatentCodec
        self.judge: DigitFeatures
        self._reference: Tensor

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a latent."""
        return self.autoencoder.latent_channels, self.image_size // FACTOR, self.image_size // FACTOR

    def check_model(self) -> None:
        """Raise an error if the model of the run does not accept latents of this shape."""
        module: Any = None
        if self.trainer is not None:
            module = self.trainer.lightning_module
        if hasattr(module, "check_latents"):
            module.check_latents(*self.latent_shape)

    def prepare_data(self) -> None:
        self.check_model()
        images, labels = digits.load_digit_images(self.image_size)
        key = self._key(images, labels)
        make_once(self._folder(key), key, lambda: self._stage_one(images, labels))

    def setup(self, stage: str) -> None:
        images, labels = digits.load_digit_images(self.image_size)
        key = self._key(images, labels)
        files, manifest = open_checked(self._folder(key), key)
        self.codec = LatentCodec.from_state_dict(
            {
                "config": asdict(self.autoencoder),
                "weights": files["autoencoder.safetensors"],
                "mean": torch.tensor(manifest["latent_mean"]),
                "std": torch.tensor(manifest["latent_std"]),
            }
        )
        self.judge = stage_one.load_classifier(DigitFeatures, files["judge.safetensors"])
        latents = files["latents.safetensors"]
        # A row is a dataset index, so labels must be on the same rows.
        if not torch.equal(latents["labels"], labels):
            raise ConfigurationError(
                f"The latents in {self._folder(key)} have other labels. Delete the folder and run again."
            )
        mean, logvar = self.codec.normalize(latents["mean"], latents["logvar"])
        assert logvar is not None  # our autoencoder has a posterior
        self.dataset = TensorDictDataset(
            {"mean": mean, "logvar": logvar, "labels": labels, "index": torch.arange(len(labels))}
        )
        self.train_index, self.val_index, self.test_index = digits.stratified_split(labels, digits.HELD_OUT, self.seed)
        self._reference = images[self.train_index]

    def score_samples(
        self, images: Tensor, labels: Tensor | None, captions: list[str] | None = None
    ) -> dict[str, float]:
        """Return scores of images [M, 1, H, W] in [-1, 1].

        Returns:
            ``frechet_distance`` to the training images in the features of the judge (lower is better), and, with the
            intended labels [M], ``sample_accuracy``.
        """
        if labels is not None:
            labels = labels.cpu()
        return judge_digits(self.judge, self._reference, images.cpu().float(), labels)

    def _folder(self, key: str) -> Path:
        return cache_root(self.cache_dir) / "latent_digits" / key[:16]

    def _key(self, images: Tensor, labels: Tensor) -> str:
        """Return a hash of the data, the settings and the code that the result of stage one depends on."""
        code = stage_one.hashes_of_code(__file__, *(module.__file__ for module in _CODE))
        # The code is part of the key: a change of it must not reuse the result of the code before.
        settings = [asdict(self.autoencoder), self.autoencoder_steps, self.judge_steps, self.image_size, self.seed]
        return digest_of([digits.digest(images, labels), settings, code])

    def _stage_one(self, images: Tensor, labels: Tensor) -> Contents:
        """Train autoencoder and judge, encode all images, and measure. Return the files and facts to store."""
        rank_zero_info(
            f"LatentDigits: training the autoencoder ({self.autoencoder_steps} steps) and the judge once; about 25 s."
        )
        train, val, _ = digits.stratified_split(labels, digits.HELD_OUT, self.seed)
        autoencoder = stage_one.fit_autoencoder(images[train], self.autoencoder, self.autoencoder_steps, self.seed)
        judge = stage_one.fit_classifier(DigitFeatures, images[train], labels[train], self.judge_steps, self.seed)
        with torch.no_grad():
            moments = [autoencoder.encode(part) for part in images.split(256)]
            mean = torch.cat([part[0] for part in moments])
            logvar = torch.cat([part[1] for part in moments])
            decoded = autoencoder.decode(mean[val])
        # The statistics are of sampled latents and not of posterior means, because the network sees samples.
        sampled = sample_posterior(mean[train], logvar[train], torch.Generator().manual_seed(self.seed))
        held_out = judge_digits(judge, images[train], images[val], labels[val])
        psnr = 10.0 * math.log10(4.0 / (decoded - images[val]).square().mean().item())
        facts: dict[str, object] = {
            "data": digits.digest(images, labels),
            "transform": digits.TRANSFORM,
            "image_size": self.image_size,
            "autoencoder": asdict(self.autoencoder),
            "latent_mean": sampled.mean(dim=(0, 2, 3)).tolist(),
            "latent_std": sampled.std(dim=(0, 2, 3)).tolist(),
            "validation_psnr_db": psnr,
            "judge_accuracy": held_out["sample_accuracy"],
            "frechet_distance_of_held_out_digits": held_out["frechet_distance"],
        }
        rank_zero_info(
            f"LatentDigits: autoencoder {psnr:.1f} dB. The judge is right on {100 * held_out['sample_accuracy']:.1f} % "
            f"of the held-out digits. Their Fréchet distance, {held_out['frechet_distance']:.2f}, is the best that "
            "samples can reach."
        )
        files = {
            "autoencoder.safetensors": autoencoder.state_dict(),
            "judge.safetensors": judge.state_dict(),
            "latents.safetensors": {"mean": mean, "logvar": logvar, "labels": labels},
        }
        return files, facts
