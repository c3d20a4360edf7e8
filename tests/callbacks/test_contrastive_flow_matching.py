"""ContrastiveFlowMatching: the paper's formula in a loop over samples, on the task itself; refused for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lit_efficient
from lit_efficient import ConfigurationError, ConflictError, DiTConfig, LatentDiffusion, contrastive_flow_loss
from lit_efficient.callbacks.contrastive_flow_matching import draw_others
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.testing import Run
from tests.contract.row import Row
from tests.support import Toy, data, trainer


class ContrastiveFlowMatching(lit_efficient.ContrastiveFlowMatching):
    """Takes a number that trains for the toy's flows, and its noise levels for their targets."""

    def check(self, trainer: Any, module: Any) -> None:
        """The toy says that it predicts noise."""

    def flows(self, output: Any, module: nn.Module) -> tuple[Tensor, Tensor]:
        number = next(p for p in module.parameters() if p.requires_grad).float().mean()
        self.last = number.expand(len(output["log_snr"])), output["log_snr"]
        return self.last


def samples_are_pushed_away(run: Run) -> None:
    """The term is that of the last batch's flows, against the samples that its number draws."""
    predicted, target = run.technique("ContrastiveFlowMatching").last
    generator = torch.Generator().manual_seed(mix_seed(0, len(run.steps) - 1, 0))
    wanted = contrastive_flow_loss(predicted, target, draw_others(len(target), generator))
    torch.testing.assert_close(run.trainer.callback_metrics["train/contrastive_flow"], wanted.detach().float())


ROW = Row(lambda: ContrastiveFlowMatching(0.5), samples_are_pushed_away, lambda: ContrastiveFlowMatching(0.0))


class Watched(LatentDiffusion):
    """Notes what the loss was made of, and what was differentiated."""

    def on_train_start(self) -> None:
        nn.init.normal_(self.network.patch_out.weight)  # type: ignore[union-attr]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.output = super().training_step(batch, batch_idx)
        return self.output

    def on_before_backward(self, loss: Tensor) -> None:
        self.loss = loss.detach()


def test_the_loss_of_the_task_is_the_papers() -> None:
    torch.manual_seed(0)
    task = Watched(DiTConfig(size=2, width=8, depth=1, heads=1, num_classes=0), label_dropout=0.0, guidance_scale=1.0)
    batches = [{"latents": torch.randn(5, 4, 2, 2)}]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    trainer([lit_efficient.ContrastiveFlowMatching(0.05, seed=3)], max_steps=1, limit_val_batches=0).fit(
        task, loader, loader
    )
    predicted, target = task.output["predicted"].detach(), task.output["target"]
    others = draw_others(5, torch.Generator().manual_seed(mix_seed(3, 0, 0)))
    assert all(int(other) != row for row, other in enumerate(others))
    total = 0.0
    for row in range(5):
        own = (predicted[row] - target[row]).square().mean()
        total += float(own - 0.05 * (predicted[row] - target[others[row]]).square().mean())
    assert float(task.loss) == pytest.approx(total / 5, rel=1e-5)


def test_every_other_sample_is_drawn_alike() -> None:
    drawn = torch.stack([draw_others(4, torch.Generator().manual_seed(seed)) for seed in range(3000)])
    shares = torch.stack([(drawn == other).double().mean(0) for other in range(4)])
    assert shares.diagonal().sum() == 0
    torch.testing.assert_close(shares, (1 - torch.eye(4).double()) / 3, atol=0.04, rtol=0)


def test_what_has_no_flow_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"weight must be .*below 1, got 1"):
        lit_efficient.ContrastiveFlowMatching(1)
    with pytest.raises(ConflictError, match=r"predicts 'eps'.*prediction='flow'"):
        trainer([lit_efficient.ContrastiveFlowMatching()]).fit(Toy(), data(), data())

    class Flow(Toy):
        prediction = "flow"

    with pytest.raises(ConfigurationError, match=r'must return "predicted" and "target".*it returned .*log_snr'):
        trainer([lit_efficient.ContrastiveFlowMatching()]).fit(Flow(), data(), data())
    with pytest.raises(ConfigurationError, match="had 1 sample per process"):
        trainer([ContrastiveFlowMatching()]).fit(Toy(), data(batch_size=1), data())
