"""Images on two processes under DDP: the gradients of one process that sees all of them, and streams that resume."""

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
from lit_efficient.losses import diffusion
from lit_efficient.tasks.latent_diffusion import Noised
from tests import tiny_pipelines
from tests.data.images.test_image_stream import COUNT, WRITERS, streamed
from tests.processes import run_ranks
from tests.support import QUIET

SIZES = [(64, 64), (96, 48), (48, 96), (64, 64), (64, 64)]


class Fixed(LatentDiffusion):
    """Latent diffusion whose times and noise follow from the latents, so that processes draw what one draws alone."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.gradients: list[torch.Tensor] = []
        self.losses: list[tuple[float, int]] = []
        self.seen: list[int] = []

    def _noised(self, x0: Any, process: Any, generator: Any, pairs: bool = False) -> Noised:
        noise = torch.sin(40.0 * x0)
        t = torch.sigmoid(x0.flatten(1).sum(dim=1))
        target = diffusion.target(x0, noise, t, process, self.prediction)
        return Noised(diffusion.add_noise(x0, noise, t, process), t, target)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.losses.append((float(output["loss"].detach()), len(batch["index"])))
        self.seen += batch["index"].tolist()
        return output

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        found = [p.grad.flatten() for p in self.parameters() if p.grad is not None]
        self.gradients.append(torch.cat(found).clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01)


def written(folder: Path) -> None:
    """Write photographs with masks and conditions, class images with conditions, and a pipeline."""
    random = np.random.default_rng(0)
    for name, count in (("own", 7), ("class", 7)):
        for kind in ("", "-masks", "-conditions"):
            (folder / f"{name}{kind}").mkdir()
            for number in range(count):
                size = SIZES[number % len(SIZES)]
                pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{name}{kind}" / f"{number}.png")
    tiny_pipelines.written("sd15", folder / "base")


def images(folder: Path, batch_size: int, buckets: bool) -> ImageData:
    view = ImageView(64, buckets=AspectBuckets(16, 2.0) if buckets else False)
    own = ImageSet(str(folder / "own"), prompt="a photo", mask=str(folder / "own-masks"), repeats=2, weight=0.7)
    prior = ImageSet(str(folder / "class"), role="prior", prompt="a thing", weight=0.4)
    sets = [
        ImageSet(**{**vars(one), "condition": str(folder / f"{name}-conditions")})
        for one, name in ((own, "own"), (prior, "class"))
    ]
    return ImageData(sets, view=view, batch_size=batch_size, val_fraction=0, cache_dir=str(folder / "cache"))


def fitted(folder: Path, batch_size: int, buckets: bool, cached: bool, **arguments: Any) -> Fixed:
    spec = DiffusersModelConfig(str(folder / "base"))
    cache = {"folder": str(folder / f"latents{buckets}"), "build": True, "format": "int8"} if cached else {}
    data = LatentData(images(folder, batch_size, buckets), cached=cached, **cache)
    torch.manual_seed(0)
    module = Fixed(
        backbone=spec,
        samples=Samples(0),
        label_dropout=0.0,
        guidance_scale=1.0,
        image_condition=ImageCondition("controlnet"),
    )
    data.setup = without_draws(data)  # type: ignore[method-assign]
    settings = {"max_epochs": 2, "max_steps": -1, "accumulate_grad_batches": 2, "limit_val_batches": 0}
    L.Trainer(**QUIET | settings | arguments).fit(module, data)
    return module


def without_draws(data: LatentData) -> Any:
    """Return the setup of a data module that takes the mean of a posterior, so that latents are not drawn."""
    setup = data.setup

    def changed(stage: str) -> None:
        setup(stage)
        encode = data.codec.encode
        data.codec.encode = lambda given: (encode(given)[0], None)  # type: ignore[method-assign]

    return changed


def in_ranks(folder: Path) -> None:
    rank = 0
    for buckets, cached in CASES:
        module = fitted(folder, 2, buckets, cached, devices=2, strategy="ddp", use_distributed_sampler=True)
        rank = module.global_rank
        state = {"gradients": module.gradients, "losses": module.losses, "seen": module.seen}
        torch.save(state, folder / f"{buckets}{cached}{rank}.pt")
    for kind in WRITERS:
        stream_in_ranks(folder, kind)


CASES = [(True, True), (False, False)]


@pytest.mark.turns(6, family="slow")
def test_two_processes_have_the_gradients_of_one_and_share_streams(tmp_path: Path) -> None:
    """Roles, weights, masks and conditions in buckets that do not fill their batches, with accumulated gradients."""
    written(tmp_path)
    for kind, write in WRITERS.items():
        (tmp_path / kind).mkdir()
        write(tmp_path / kind)
    run_ranks(in_ranks, tmp_path, tmp_path)
    for buckets, cached in CASES:
        alone = fitted(tmp_path, 4, buckets, cached)
        ranks = [torch.load(tmp_path / f"{buckets}{cached}{rank}.pt", weights_only=True) for rank in range(2)]
        assert set(ranks[0]["seen"]) | set(ranks[1]["seen"]) == set(alone.seen)
        assert len(ranks[0]["seen"] + ranks[1]["seen"]) > len(alone.seen)  # rows that fill up a part
        for (loss, _), (first, _), (second, _) in zip(
            alone.losses, ranks[0]["losses"], ranks[1]["losses"], strict=True
        ):
            assert (first + second) / 2 == pytest.approx(loss, rel=1e-5)
        for wanted, first, second in zip(alone.gradients, ranks[0]["gradients"], ranks[1]["gradients"], strict=True):
            assert wanted.abs().max() > 1e-4
            torch.testing.assert_close(first, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
            assert torch.equal(first, second)
    for kind in WRITERS:
        seen = [torch.load(tmp_path / f"{kind}{rank}.pt", weights_only=True) for rank in range(2)]
        for passes in range(2):
            shown = []
            for rank in range(2):
                part = len(range(rank, COUNT, 2))
                shown += seen[rank]["whole"][passes * part : (passes + 1) * part]
            assert sorted(shown) == sorted(f"picture {number}" for number in range(COUNT))
        for rank in range(2):
            assert seen[rank]["resumed"] == seen[rank]["whole"][7:]
        assert torch.equal(seen[0]["weight"], seen[1]["weight"])


class Watched(L.LightningModule):
    """Module whose weight depends on the images of all batches, and on draws."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch["captions"]
        return (self.weight - batch["images"].mean() - torch.rand(())).square()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAtSeven(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
        if trainer.global_step == 7:
            trainer.save_checkpoint(self.folder / "seven.ckpt")


def stream_in_ranks(folder: Path, kind: str) -> None:
    """Two passes over a stream in epochs of 5 batches, and the same run resumed in the middle of an epoch."""

    def run(*callbacks: L.Callback, ckpt: Path | None = None) -> Watched:
        torch.manual_seed(0)
        module = Watched()
        settings = {"max_steps": COUNT + 1, "max_epochs": -1, "limit_val_batches": 0, "devices": 2, "strategy": "ddp"}
        runner = L.Trainer(**QUIET | settings, callbacks=[ExactResume(), *callbacks])
        data = streamed(folder / kind, batch_size=1, stream={"epoch_batches": 5})
        runner.fit(module, data, ckpt_path=ckpt, weights_only=True)
        return module

    whole = run(SaveAtSeven(folder / kind))
    resumed = run(ckpt=folder / kind / "seven.ckpt")
    assert torch.equal(whole.weight, resumed.weight)
    state = {"whole": whole.seen, "resumed": resumed.seen, "weight": whole.weight.detach()}
    torch.save(state, folder / f"{kind}{whole.global_rank}.pt")
