"""Models that see images, from files in buckets of several shapes: cached and live runs, and runs that resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from PIL import Image

from lit_efficient import (
    AspectBuckets,
    DiffusersModelConfig,
    ExactResume,
    ImageCondition,
    ImageData,
    ImageSet,
    ImageView,
    LatentData,
    LatentDiffusion,
    Samples,
)
from tests import tiny_pipelines
from tests.support import QUIET, assert_equal
from tests.tasks.test_exact_resume_of_tasks import SaveEverywhere

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:A caption has")


class Recorded(LatentDiffusion):
    """Latent diffusion that keeps the loss and the shape of each batch."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.seen: list[tuple[float, tuple[int, ...]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.seen.append((float(output["loss"].detach()), tuple(output["target"].shape)))
        return output


def fit(folder: Path, kind: Any, cached: bool, *callbacks: L.Callback, ckpt: Path | None = None) -> Recorded:
    spec = DiffusersModelConfig(str(folder / "base"))
    beside: Any = {"mask": "masks"} if kind == "inpaint" else {"condition": "conditions"}
    beside = {name: str(folder / where) for name, where in beside.items()}
    named = ImageSet(str(folder / "images"), prompt="make it blue", **beside)
    view = ImageView(64, buckets=AspectBuckets(16, 2.0), horizontal_flip=True, variants=2)
    images = ImageData([named], view=view, batch_size=2, val_fraction=0, cache_dir=str(folder / "sizes"))
    stored = "masked" if kind == "inpaint" else "latents"
    cache: dict[str, Any] = {"folder": str(folder / "cache"), "build": True, "condition": stored} if cached else {}
    data = LatentData(images, cached=cached, **cache)
    L.seed_everything(0, verbose=False)
    module = Recorded(
        backbone=spec,
        samples=Samples(0),
        label_dropout=0.0,
        guidance_scale=1.0,
        learning_rate=1e-3,
        image_condition=ImageCondition(kind, masked_loss=kind == "inpaint"),
    )
    settings = {"max_steps": 6, "max_epochs": -1, "limit_val_batches": 0}
    L.Trainer(**QUIET | settings, callbacks=[ExactResume(), *callbacks]).fit(module, data, ckpt_path=ckpt)
    return module


@pytest.mark.turns(3)
@pytest.mark.parametrize(("family", "kind"), [("flux", "sequence"), ("sd15", "inpaint"), ("qwen_image", "sequence")])
def test_batches_of_several_shapes_train_alike_from_a_cache_and_live_and_resume(
    family: str, kind: str, tmp_path: Path
) -> None:
    tiny_pipelines.written(family, tmp_path / "base")
    random = np.random.default_rng(0)
    for name in ("images", "conditions", "masks"):
        (tmp_path / name).mkdir()
        for number in range(7):
            size = [(64, 64), (96, 48), (48, 96)][number % 3]
            pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    runs = {}
    for cached in (True, False):
        whole = fit(tmp_path, kind, cached, SaveEverywhere(tmp_path))
        again = fit(tmp_path, kind, cached, ckpt=tmp_path / "2.ckpt")
        assert again.seen == whole.seen[2:]
        assert_equal(whole.state_dict(), again.state_dict())
        runs[cached] = whole.seen
    assert len({shape[2:] for _, shape in runs[True]}) == 3
    assert [shape for _, shape in runs[True]] == [shape for _, shape in runs[False]]
    torch.testing.assert_close([loss for loss, _ in runs[True]], [loss for loss, _ in runs[False]], rtol=1e-4, atol=0)
