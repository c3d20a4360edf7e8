"""Claims on what a diffusion model learns from: noise levels and hidden conditions are drawn sample by sample.

Seen on what its training step returns (``timesteps`` and ``sample_loss``), for draws of several seeds; a condition is
hidden from a sample if another one does not change its loss.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lit_efficient.evidence.verifying.claims import Claim, Verdict
from lit_efficient.evidence.verifying.layer_calls import Bench, BenchClaim, few_rows
from lit_efficient.internals.torch_trees import tree_leaves, tree_map_only

_SEEDS, _MANY = 4, 24  # a condition of ten is hidden: seen in most of so many draws
_SEPARATE = "the training step returns no `timesteps` of each sample"


class NoiseApart(BenchClaim):
    """Each sample of each batch has a noise level of its own."""

    name, sentence = "noise", "noise levels are drawn for each sample of each batch"

    def tried(self, bench: Bench) -> Verdict:
        batch, rows = few_rows(bench.batch)
        found = [_of_samples(bench.returned(batch, seed), "timesteps", rows) for seed in range(_SEEDS)]
        if rows < 2 or any(levels is None for levels in found):
            return self.idle(_SEPARATE)
        drawn = torch.stack([levels for levels in found if levels is not None])
        shared = int((drawn == drawn[:, :1]).all(1).sum())
        again = int((drawn == drawn[:1]).all(1).sum()) - 1
        wrong = max(shared if shared == _SEEDS else 0, again if again == _SEEDS - 1 else 0)
        what = "all samples of a batch share one" if shared == _SEEDS else "each draw gives the same"
        why = f"noise levels of {rows} samples in {_SEEDS} draws" + (f": {what}" if wrong else "")
        return self.measured(float(wrong), 0.0, "draws", why, where="timesteps of training_step")


class ConditionsApart(BenchClaim):
    """Whether a condition is hidden is drawn for each sample."""

    name, sentence = "conditions", "labels are hidden from single samples, not from whole batches"

    def tried(self, bench: Bench) -> Verdict:
        batch, rows = few_rows(bench.batch, 8)
        labels = next((leaf for leaf in tree_leaves(batch) if _is_label(leaf, rows)), None)
        if rows < 2 or labels is None:
            return self.idle("the batch has no label of each sample")
        others = labels.roll(1)
        mine = others != labels
        changed = tree_map_only(Tensor, lambda leaf: others if leaf is labels else leaf, batch)
        seen = []
        for seed in range(_MANY):
            one, other = (_of_samples(bench.returned(each, seed), "sample_loss", rows) for each in (batch, changed))
            if one is None or other is None or int(mine.sum()) < 2:
                return self.idle("the training step returns no `sample_loss`, or the labels are all alike")
            seen.append((one != other)[mine])
        follows = torch.stack(seen)
        hidden = int((~follows).all(1).sum())
        mixed = int((follows.any(1) & ~follows.all(1)).sum())
        if not follows.any() or follows.all():
            return self.idle("no label is hidden" if follows.any() else "no loss follows from a label")
        wrong = 0 if mixed else hidden
        why = f"labels of {int(mine.sum())} samples in {_MANY} draws: hidden from some in {mixed}, from all in {hidden}"
        return self.measured(float(wrong), 0.0, "draws", why, where="the training step")


def _is_label(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.shape == (rows,) and not leaf.is_floating_point()


def _of_samples(returned: Any, name: str, rows: int) -> Tensor | None:
    """What a step returns under a name, where it is one number a sample."""
    value = returned.get(name) if isinstance(returned, Mapping) else None
    return value.detach().cpu() if isinstance(value, Tensor) and value.shape == (rows,) else None


OF_NOISE: tuple[Claim, ...] = (NoiseApart(), ConditionsApart())
