"""Scores of generated images: distances to real images in the features of a network, and agreement with captions.

    features of an image = output of the network, averaged over tokens or positions, [D]
    clip_score           = mean of 100 cos(CLIP features of image and caption)

torchmetrics computes all numbers. The distances are the FID and the KID only with one particular Inception network, and
have these names only if the network is read from a file; values can be compared only if the network and the real images
are the same. Nothing is downloaded for a file or for CLIP.
"""

import math
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lit_efficient.errors import (
    ConfigurationError,
    check_choice,
    check_installed,
    check_number,
    checks_types,
    refusal,
)
from lit_efficient.models.judges.sample_quality import distances_of_features
from lit_efficient.models.libraries.teachers import find_teacher

Pixels = Literal["uint8", "unit", "signed"]


@checks_types
@dataclass(frozen=True)
class ImageScores:
    """Network and real images that generated images are compared with.

    Args:
        judge: Folder, name or ``config.json`` of a vision model of transformers, whose features are compared. null: no
            scores. A file with an Inception network gives the distances the names ``fid`` and ``kid``: TorchScript, or
            the state dict that torch-fidelity reads (``pt_inception-2015-12-05-6726825d.pth``).
        images: Number of training images to compare with.
        pixels: Pixels that a TorchScript network takes: ``uint8`` (0 to 255), ``unit`` (0 to 1), ``signed`` (-1 to 1).
        clip: Folder of a CLIP model of transformers with its processor, for ``clip_score``. null: none.
    """

    judge: str | None = None
    images: int = 1000
    pixels: Pixels = "uint8"
    clip: str | None = None

    def __post_init__(self) -> None:
        check_number("ImageData", "scores.images", self.images, least=2, whole=True)
        check_choice("ImageData", "scores.pixels", self.pixels, get_args(Pixels))


class ImageJudge:
    """Compares generated images with real images.

    Args:
        spec: Folder, name or ``config.json`` of the model. A ``config.json`` gives random weights (seed 0), which still
            tell distributions apart and are enough to try a config.
        owner: Class that uses the judge, for errors.
        pixels: Pixels that a TorchScript file takes.

    Raises:
        ConfigurationError: If there is no such model.
    """

    def __init__(self, spec: str, owner: str, pixels: Pixels = "uint8") -> None:
        self._owner = owner
        self._names = ("frechet_distance", "kernel_distance")
        self._network: Callable[[Tensor], Tensor]
        path = Path(spec).expanduser()
        if path.is_file() and path.suffix != ".json":
            self._names = ("fid", "kid")
            self._network = _network_of_file(path, owner, pixels)
        else:
            teacher = find_teacher(spec, [""], who=owner, name="scores.judge")
            self._network = lambda images: teacher.of_images(images)[""]
        self._real: Tensor | None = None

    def set_real_images(self, real: Iterable[Tensor]) -> None:
        """Set the real images to compare with, each [C, H, W] in [-1, 1]. Their sizes may differ."""
        self._real = torch.cat([self.features(image[None]) for image in real])

    def features(self, images: Tensor) -> Tensor:
        """Return the features [B, D] of images [B, C, H, W] in [-1, 1]."""
        found = self._network(images).float()
        if found.ndim == 3:  # [B, tokens, D]
            return found.mean(dim=1)
        if found.ndim == 4:  # [B, D, h, w]
            return found.mean(dim=(2, 3))
        if found.ndim != 2:
            raise ConfigurationError(
                f"{self._owner}: judge must give features [B, D] of images, not {list(found.shape)}. Name another "
                "model."
            )
        return found

    def distances(self, images: Tensor) -> dict[str, float]:
        """Return the distances of images [M, C, H, W], M >= 2, by name. NaN if a value is not finite.

        Values outside of [-1, 1] are clamped, as in a saved image.
        """
        assert self._real is not None, "set_real_images() comes first"
        images = images.cpu().float().clamp(-1, 1)
        if not images.isfinite().all():
            return dict.fromkeys(self._names, math.nan)
        generated = torch.cat([self.features(part) for part in images.split(32)])
        found = distances_of_features(self._real, generated)
        return dict(zip(self._names, found.values(), strict=True))


class CaptionJudge:
    """CLIP score of images and captions, by torchmetrics.

    Args:
        folder: Folder of a CLIP model of transformers, with its processor.
        owner: Class that uses the judge, for errors.

    Raises:
        ConfigurationError: If the folder holds no such model.
    """

    def __init__(self, folder: str, owner: str) -> None:
        path = Path(folder).expanduser()
        if not path.is_dir():
            raise refusal(owner, "scores.clip", "the folder of a CLIP model of transformers", folder)
        try:
            from transformers import CLIPModel, CLIPProcessor

            self._model: Any = CLIPModel.from_pretrained(path, local_files_only=True).eval()
            self._processor: Any = CLIPProcessor.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigurationError(f"{owner}: scores.clip: {folder} holds no CLIP model: {reason}") from error

    @torch.no_grad()
    def score(self, images: Tensor, captions: Sequence[str]) -> float:
        """Return the mean score of images [M, C, H, W] in [-1, 1] and their captions. NaN if a value is not finite."""
        if not images.isfinite().all():
            return math.nan
        from torchmetrics.multimodal.clip_score import CLIPScore

        model: Any = _Features(self._model)
        metric = CLIPScore(lambda: (model, self._processor), sync_on_compute=False)
        for start in range(0, len(images), 32):
            part = as_pixels(images[start : start + 32].cpu(), "uint8")
            if part.shape[1] == 1:
                part = part.expand(-1, 3, -1, -1)
            metric.update(list(part), list(captions[start : start + 32]))
        return float(metric.compute())


class _Features(torch.nn.Module):
    """CLIP whose features are tensors, as torchmetrics expects; transformers 5 returns objects that contain them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def get_image_features(self, *given: Any) -> Tensor:
        return _tensor(self.model.get_image_features(*given))

    def get_text_features(self, *given: Any) -> Tensor:
        return _tensor(self.model.get_text_features(*given))


def _tensor(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found.pooler_output


def as_pixels(images: Tensor, pixels: Pixels) -> Tensor:
    """Return images in [-1, 1] in another range: uint8, float32 from 0 to 1, or unchanged."""
    if pixels == "signed":
        return images
    unit = (images.float().clamp(-1, 1) + 1) / 2
    if pixels == "unit":
        return unit
    return (unit * 255).round().to(torch.uint8)


def _close_to_one(values: Tensor) -> bool:
    return bool((values.float() - 1).abs().max() < 1e-3)


def _network_of_file(path: Path, owner: str, pixels: Pixels) -> Callable[[Tensor], Tensor]:
    """Return a network from TorchScript, or the Inception network from the state dict that torch-fidelity reads."""
    scripted = zipfile.is_zipfile(path) and any("/code/" in name for name in zipfile.ZipFile(path).namelist())
    network: Any
    if scripted:
        network = torch.jit.load(str(path), map_location="cpu").eval()
    else:
        check_installed(f"{owner}: scores.judge with a state dict", "torch_fidelity")
        from torchmetrics.image.fid import NoTrainInceptionV3

        try:
            network = NoTrainInceptionV3("inception-v3-compat", ["2048"], str(path))
        except Exception as error:  # the reader of the file raises many
            reason = " ".join(str(error).split())[:300]
            allowed = "TorchScript or the state dict of torch-fidelity's Inception network"
            raise ConfigurationError(f"{owner}: scores.judge: {path} must hold {allowed}: {reason}") from error
        pixels = "uint8"

    options = {}
    if scripted and any(argument.name == "return_features" for argument in network.forward.schema.arguments):
        options["return_features"] = True  # NVIDIA's Inception network returns probabilities without it

    @torch.no_grad()
    def features(images: Tensor) -> Tensor:
        if images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        found: Tensor = network(as_pixels(images.cpu(), pixels), **options)
        if found.ndim == 2 and found.shape[1] > 1 and found.min() >= 0 and _close_to_one(found.sum(dim=1)):
            allowed = "a network of features, not of probabilities of classes"
            raise refusal(owner, "scores.judge", allowed, str(path))
        return found

    return features
