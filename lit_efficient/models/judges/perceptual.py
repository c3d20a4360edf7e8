"""Perceptual distance: how different two images are in the features of a frozen network.

    d(x, y) = mean over layers of  mean over positions |n(f_l(x)) - n(f_l(y))|^2,    n(v) = v / sqrt(|v|^2 + 1e-6)

It is a term of an autoencoder's loss beside the error of pixels. With a network trained on images it is LPIPS without
its learned weights. With random filters it compares edges and textures at three scales, needs no download, and is less
informative.

Costs: two forwards and one backward of the network per step.
Source: Johnson et al. (2016), https://arxiv.org/abs/1603.08155; Zhang et al. (2018), https://arxiv.org/abs/1801.03924.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.errors import check_number, checks_types, refusal
from lit_efficient.losses.feature_matching import to_tokens
from lit_efficient.models.libraries.teachers import Teacher, find_teacher

RANDOM = "random"
_EPS = 1e-6  # keeps the gradient finite where all features of a position are zero
_SEED = 0


@checks_types
@dataclass(frozen=True)
class Perceptual:
    """Options of a perceptual term.

    Args:
        network: ``random``: three layers of fixed random filters, built here; a module, in code or by ``class_path``;
            ``data.NAME``, a network of the data module; the folder, hub name or ``config.json`` (random weights) of a
            transformers vision model.
        layers: Patterns for the ends of the names of the layers to compare, one layer per pattern; ``""`` is the
            network's output. For ``random`` the default is all three layers.
        weight: Factor of the term, at least 0; with 0 it is only measured.
        image_size: Side to which images are resized for the network; null: the size in its config, else no resizing.
    """

    network: str | nn.Module = RANDOM
    layers: list[str] = field(default_factory=list)
    weight: float = 1.0
    image_size: int | None = None

    def __post_init__(self) -> None:
        check_number("Perceptual", "weight", self.weight, least=0)
        check_number("Perceptual", "image_size", self.image_size, least=1, whole=True, null=True)
        if not self.layers and self.network != RANDOM:
            raise refusal("Perceptual", "layers", "names of the network's layers ('' is its output)", self.layers)


class RandomFeatures(nn.Module):
    """Fixed random 3x3 filters at full, half and quarter resolution, each followed by a ReLU.

    The scale of the weights preserves the scale of features (He). They are drawn from a generator of their own.
    """

    def __init__(self, channels: int, seed: int = _SEED) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        widths = (channels, 16, 32, 64)
        self.stages = nn.ModuleList()
        for index, (inputs, outputs) in enumerate(pairwise(widths)):
            with torch.device("meta"):
                convolution = nn.Conv2d(inputs, outputs, 3, stride=1 if index == 0 else 2, padding=1, bias=False)
            filters = torch.randn(convolution.weight.shape, generator=generator, device="cpu", dtype=torch.float32)
            convolution.weight = nn.Parameter(filters * (2 / (9 * inputs)) ** 0.5)
            self.stages.append(nn.Sequential(convolution, nn.ReLU()))

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, C, H, W] to features [B, 64, H / 4, W / 4]."""
        for stage in self.stages:
            images = stage(images)
        return images


def feature_distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Tensor:
    """Return the distance of features by layer, each [B, D, H, W], [B, N, D] or [B, D], as a float32 scalar in [0,
    4].
    """
    return torch.stack(
        [(_direction(ours[layer]) - _direction(theirs[layer])).square().sum(-1).mean() for layer in theirs]
    ).mean()


def perceptual_distance(network: Teacher, images: Tensor, target: Tensor) -> Tensor:
    """Return the distance of images [B, C, H, W] in [-1, 1] to ``target``, as a scalar. Gradients flow to ``images``
    only.
    """
    return feature_distance(network.of_images(images, gradients=True), network.of_images(target))


def find_network(spec: Perceptual, channels: int, data: object, who: str) -> Teacher:
    """Return the frozen network of a perceptual term. Random filters need the channels of the images."""
    network = spec.network
    if network == RANDOM:
        network = RandomFeatures(channels)
    layers = spec.layers or ["stages.0", "stages.1", "stages.2"]
    return find_teacher(
        network,
        layers,
        who=f"{who}: perceptual",
        data=data,
        name="network",
        image_size=spec.image_size,
        argument="layers",
    )


def _direction(features: Tensor) -> Tensor:
    tokens = to_tokens(features)
    tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    return tokens / (tokens.square().sum(-1, keepdim=True) + _EPS).sqrt()


def pixel_distance(images: Tensor, target: Tensor, kind: str) -> Tensor:
    """Return the mean over elements of a distance of pixels, in float32.

    Args:
        images: Any shape.
        target: The same shape.
        kind: ``l2``: e^2; ``l1``: |e|; ``smooth``: Huber's distance, quadratic up to an error of 0.1 (in a range of 2)
            and linear beyond, with slope 1.
    """
    images, target = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (images, target))
    if kind == "l1":
        return (images - target).abs().mean()
    if kind == "smooth":
        return F.smooth_l1_loss(images, target, beta=0.1)
    return (images - target).square().mean()
