"""Scores are the numbers of torchmetrics for a network in a file and a CLIP in a folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance
from torchmetrics.multimodal.clip_score import CLIPScore
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor

from lit_efficient import ConfigurationError
from lit_efficient.data.images.image_judge import CaptionJudge, ImageJudge, ImageScores
from lit_efficient.models.libraries.tiny_pipelines import tiny_tokenizer
from lit_efficient.surgery import own_draws

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
CAPTIONS = ["a cat", "two dogs on a mat", ""] * 4


class Features(nn.Module):
    """Network of uint8 images, as TorchScript of Inception takes them."""

    num_features = 6

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 6, 5, stride=4)

    def forward(self, images: Tensor) -> Tensor:
        return self.convolution(images.float() / 128 - 1).relu().mean(dim=(2, 3))


def images_of(count: int, seed: int, scale: float) -> Tensor:
    return (torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed)) * scale).clamp(-1, 1)


def in_bytes(images: Tensor) -> Tensor:
    return ((images + 1) / 2 * 255).round().to(torch.uint8)


@pytest.mark.parametrize(("reals", "generateds"), [(30, 30), (40, 30)])
def test_fid_and_kid_of_torchscript_are_those_of_torchmetrics(reals: int, generateds: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Features().eval()
    torch.jit.script(network).save(str(tmp_path / "inception.pt"))
    real = images_of(reals, 0, 0.3)
    generated = images_of(generateds, 1, 0.6)
    judge = ImageJudge(str(tmp_path / "inception.pt"), "ImageData")
    judge.set_real_images(real)
    found = judge.distances(generated)
    fid = FrechetInceptionDistance(network)
    kid = KernelInceptionDistance(network, subsets=1, subset_size=30)
    for metric in (fid, kid):
        metric.update(in_bytes(real), real=True)
        metric.update(in_bytes(generated), real=False)
    with own_draws(0):  # the subset of the larger set
        expected = {"fid": float(fid.compute()), "kid": float(kid.compute()[0])}
    assert found == pytest.approx(expected, rel=1e-4)
    assert min(found.values()) > 0


def test_the_range_of_pixels_is_that_of_the_argument(tmp_path: Path) -> None:
    torch.jit.script(nn.Flatten()).save(str(tmp_path / "pixels.pt"))
    images = images_of(2, 0, 0.5)
    for pixels, expected in (("uint8", in_bytes(images)), ("unit", (images + 1) / 2), ("signed", images)):
        judge = ImageJudge(str(tmp_path / "pixels.pt"), "ImageData", pixels)  # type: ignore[arg-type]
        torch.testing.assert_close(judge.features(images), expected.flatten(1).float())


class Classifier(Features):
    """Network that returns probabilities, as NVIDIA's TorchScript of Inception does unless it is asked for features."""

    def forward(self, images: Tensor, return_features: bool = False) -> Tensor:  # type: ignore[override]
        features = self.convolution(images.float() / 128 - 1).relu().mean(dim=(2, 3))
        if return_features:
            return features
        return features.softmax(dim=1)


class OnlyProbabilities(Features):
    def forward(self, images: Tensor) -> Tensor:
        return self.convolution(images.float() / 128 - 1).mean(dim=(2, 3)).softmax(dim=1)


def test_a_network_is_asked_for_features_and_probabilities_are_refused(tmp_path: Path) -> None:
    for network in (Features(), Classifier(), OnlyProbabilities()):
        torch.manual_seed(0)
        network.convolution.reset_parameters()
        torch.jit.script(network.eval()).save(str(tmp_path / f"{type(network).__name__}.pt"))
    images = images_of(4, 0, 0.3)
    features, asked = (ImageJudge(str(tmp_path / f"{name}.pt"), "ImageData") for name in ("Features", "Classifier"))
    torch.testing.assert_close(asked.features(images), features.features(images), rtol=0, atol=0)
    judge = ImageJudge(str(tmp_path / "OnlyProbabilities.pt"), "ImageData")
    with pytest.raises(ConfigurationError, match=r"scores.judge must be a network of features, .* got .*Only"):
        judge.features(images)


@pytest.mark.parametrize("pixels", ["uint8", "unit", "signed"])
def test_images_are_judged_as_they_are_saved(pixels: Any, tmp_path: Path) -> None:
    """Values beyond the range are clamped, and images that are not finite have no score."""
    torch.jit.script(nn.Flatten()).save(str(tmp_path / "pixels.pt"))
    judge = ImageJudge(str(tmp_path / "pixels.pt"), "ImageData", pixels)
    judge.set_real_images(images_of(30, 0, 0.3))
    generated = images_of(30, 1, 1.0) * 2
    assert generated.abs().max() > 1.5
    assert judge.distances(generated) == judge.distances(generated.clamp(-1, 1))
    generated[3, 0, 5, 5] = float("nan")
    assert all(map(math.isnan, judge.distances(generated).values()))


def test_the_state_dict_of_torch_fidelity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch_fidelity")
    from torchmetrics.image.fid import NoTrainInceptionV3

    torch.save({}, tmp_path / "empty.pth")
    torch.manual_seed(0)
    with monkeypatch.context() as patch:
        patch.setattr(NoTrainInceptionV3, "load_state_dict", lambda *given: None)
        network = NoTrainInceptionV3("inception-v3-compat", ["2048"], str(tmp_path / "empty.pth"))
    torch.save(network.state_dict(), tmp_path / "inception.pth")
    real, generated = images_of(4, 0, 0.3), images_of(4, 1, 0.6)
    judge = ImageJudge(str(tmp_path / "inception.pth"), "ImageData")
    judge.set_real_images(real)
    fid = FrechetInceptionDistance(2048, feature_extractor_weights_path=str(tmp_path / "inception.pth"))
    fid.update(in_bytes(real), real=True)
    fid.update(in_bytes(generated), real=False)
    assert judge.distances(generated)["fid"] == pytest.approx(float(fid.compute()), rel=1e-3, abs=1e-6)


def tiny_clip(folder: Path) -> None:
    text = {"vocab_size": 1000, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "max_position_embeddings": 77, "bos_token_id": 0, "eos_token_id": 1}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(folder)
    sizes: dict[str, Any] = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    CLIPProcessor(CLIPImageProcessorPil(**sizes), tiny_tokenizer()).save_pretrained(folder)


def test_the_clip_score_is_that_of_torchmetrics_without_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_clip(tmp_path)
    images = images_of(len(CAPTIONS), 0, 0.5)
    found = CaptionJudge(str(tmp_path), "ImageData").score(images, CAPTIONS)
    model = CLIPModel.from_pretrained(tmp_path).eval()
    for name in ("get_image_features", "get_text_features"):
        method = getattr(model, name)

        def features(*given: Any, method: Any = method) -> Tensor:
            made = method(*given)
            return made if isinstance(made, Tensor) else made.pooler_output

        monkeypatch.setattr(model, name, features)
    metric = CLIPScore(lambda: (model, CLIPProcessor.from_pretrained(tmp_path)))
    metric.update(list(in_bytes(images)), CAPTIONS)
    assert found == pytest.approx(float(metric.compute().detach()), rel=1e-5)
    other = CaptionJudge(str(tmp_path), "ImageData").score(images, CAPTIONS[1:] + CAPTIONS[:1])
    assert other != pytest.approx(found, rel=1e-3)


def test_what_is_no_such_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"scores.clip must be the folder .* got 'openai/clip'"):
        CaptionJudge("openai/clip", "ImageData")
    with pytest.raises(ConfigurationError, match=r"scores.clip: .* holds no CLIP model"):
        CaptionJudge(str(tmp_path), "ImageData")
    with pytest.raises(ConfigurationError, match=r"scores.pixels must be one of uint8, unit, signed"):
        ImageScores(pixels="bytes")  # type: ignore[arg-type]
    torch.save({"Conv2d_1a_3x3.conv.weight": torch.zeros(1)}, tmp_path / "inception.pth")
    with pytest.raises(ConfigurationError, match=r"scores.judge"):
        ImageJudge(str(tmp_path / "inception.pth"), "ImageData")
