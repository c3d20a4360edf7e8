"""ResolutionRamp: sides by step, uint8 stays, targets stay, validation is whole, latents are refused."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lit_efficient
from lit_efficient import ConfigurationError
from lit_efficient.callbacks.resolution_ramp import resize
from lit_efficient.testing import Run
from tests.contract.effects import in_order_of_steps
from tests.contract.row import Row
from tests.support import trainer


class ResolutionRamp(lit_efficient.ResolutionRamp):
    """Takes the toy's rows for images, four pixels wide, and enlarges what it has made smaller."""

    def scaled(self, batch: Any, scale: float) -> Any:
        images = batch[0].unflatten(-1, (1, -1, 4))
        small = super().scaled([images], scale)[0]
        return [F.interpolate(small, images.shape[-2:]).flatten(1), *batch[1:]]


def images_are_coarse_at_first(run: Run) -> None:
    """In the first step's images two neighbours are alike, in the last one's not."""
    flat = [step.seen["rows"].unflatten(-1, (-1, 2)).std(-1).max() for step in in_order_of_steps(run)]
    assert flat[0] == 0
    assert flat[-1] > 0


ROW = Row(lambda: ResolutionRamp(0.5, steps=1, multiple_of=1), images_are_coarse_at_first)


class Classes(L.LightningModule):
    """A convolution over images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
        self.trained: list[tuple[int, ...]] = []
        self.validated: list[tuple[int, ...]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.trained.append(tuple(batch["image"].shape))
        return F.cross_entropy(self.net(batch["image"].float()), batch["label"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validated.append(tuple(batch["image"].shape))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(count: int = 5) -> DataLoader[Any]:
    torch.manual_seed(0)
    made = [{"image": torch.rand(2, 3, 16, 24), "label": torch.tensor([0, 1])} for _ in range(count)]
    return DataLoader(made, batch_size=None)  # type: ignore[arg-type]


def test_sides_grow_after_the_delay_and_validation_is_whole() -> None:
    module = Classes()
    run = trainer([lit_efficient.ResolutionRamp(0.5, steps=2, delay=1, multiple_of=4)])
    run.fit(module, batches(), batches(2))
    assert [shape[2:] for shape in module.trained] == [(8, 12), (8, 12), (12, 16), (16, 24), (16, 24)]
    assert {shape[2:] for shape in module.validated} == {(16, 24)}


def test_shares_are_of_max_steps() -> None:
    module = Classes()
    run = trainer([lit_efficient.ResolutionRamp(0.5, steps=0.5, multiple_of=8)], max_steps=4)
    run.fit(module, batches(), batches(2))
    assert [shape[2] for shape in module.trained] == [8, 16, 16, 16]
    with pytest.raises(ConfigurationError, match=r"steps=0.5 is a fraction of Trainer\(max_steps=...\)"):
        trainer([lit_efficient.ResolutionRamp()]).fit(Classes(), batches(), batches(2))


def test_resizing_is_torchs_with_filtering_and_keeps_numbers_whole() -> None:
    torch.manual_seed(0)
    images = torch.rand(1, 3, 16, 16)
    expected = F.interpolate(images, (8, 8), mode="bilinear", antialias=True)
    assert torch.equal(resize(images, 0.5), expected)
    assert resize(images, 1.0) is images
    assert resize(images, 0.01, 8).shape[-2:] == (8, 8)
    whole = (images * 255).to(torch.uint8)
    small = resize(whole, 0.5)
    assert small.dtype == torch.uint8
    assert (small.float() - 255 * expected).abs().max() <= 1.5
    assert resize(images.bfloat16(), 0.5).dtype == torch.bfloat16


def test_labels_of_pixels_go_with_their_images_and_are_none_between() -> None:
    ramp = lit_efficient.ResolutionRamp(0.5, steps=10)
    labels = torch.tensor([3, 255, 7]).repeat_interleave(8)[torch.randint(0, 24, (2, 16, 24))]
    for mask in (labels, labels.to(torch.uint8)[:, None]):
        small = ramp.scaled({"image": torch.rand(2, 3, 16, 24), "mask": mask}, 0.5)
        assert small["image"].shape[-2:] == small["mask"].shape[-2:] == (8, 16)
        wanted = F.interpolate(mask.reshape(2, 1, 16, 24).double(), (8, 16), mode="nearest-exact")
        assert torch.equal(small["mask"].reshape(2, 1, 8, 16).double(), wanted)
        assert small["mask"].dtype == mask.dtype


def test_targets_of_super_resolution_stay_so_many_times_as_large_at_every_step() -> None:
    """As a pair made at that size: crops of `low` and of `ratio` times as much."""
    ramp = lit_efficient.ResolutionRamp(0.5, steps=10)
    ramp._steps = 10
    for low, ratio in ((48, 2), (24, 3), (20, 4), (17, 4)):
        batch = {"lr": torch.rand(1, 3, low, 2 * low), "hr": torch.rand(1, 3, ratio * low, 2 * ratio * low)}
        seen = set()
        for step in range(11):
            changed = ramp.change(batch, step)
            small, large = changed["lr"].shape[-2:], changed["hr"].shape[-2:]
            assert large == (ratio * small[0], ratio * small[1])
            assert step == 10 or small[0] % 8 == 0 or small[0] == low
            seen.add(small)
        assert len(seen) > 1
    crops = ramp.change([torch.rand(1, 3, 224, 224), torch.rand(1, 3, 96, 96)], 0)  # of no common ratio
    assert [crop.shape[-1] for crop in crops] == [112, 48]
    with pytest.raises(
        ConfigurationError, match=r"so small that images of 8 x 8, 32 x 32 are smaller at start=0\.5, got 8"
    ):
        ramp.change([torch.rand(1, 3, 8, 8), torch.rand(1, 3, 32, 32)], 0)


def test_a_mean_colour_stays_what_it_is() -> None:
    torch.manual_seed(0)
    images = torch.rand(2, 1, 32, 32)
    assert torch.allclose(resize(images, 0.25).mean((2, 3)), images.mean((2, 3)), atol=0.02)


def test_batches_without_images_are_refused() -> None:
    ramp = lit_efficient.ResolutionRamp(0.5, steps=10)
    ramp._steps = 10
    for batch in (
        {"latents": torch.zeros(2, 4, 8, 8)},
        {"latents": torch.zeros(2, 3, 8, 8)},  # of a codec of three channels
        {"mean": torch.zeros(2, 3, 8, 8), "logvar": torch.zeros(2, 3, 8, 8)},  # as caches hold a posterior
        [torch.zeros(2, 3, 8)],
        {"ids": torch.zeros(2, 3, 8, 8).long()},
    ):
        with pytest.raises(ConfigurationError, match=r"has no images \[B, C, H, W\] of one or three channels"):
            ramp.change(batch, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"start": 1}, "start must be above 0 and below 1, got 1"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"delay": -1}, "delay must be a whole number of at least 0, got -1"),
        ({"multiple_of": 0}, "multiple_of must be a whole number of at least 1, got 0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        lit_efficient.ResolutionRamp(**arguments)
