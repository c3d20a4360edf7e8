"""Claims about the training of a diffusion model: noise levels and hidden conditions are drawn for each sample.

They are checked on the results of the training step (``timesteps`` and ``sample_loss``) for several seeds. A condition
is hidden from a sample if another condition does not change its loss.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lit_efficient.evidence.verifying.claims import Verdict
from lit_efficient.evidence.verifying.layer_calls import Bench, BenchClaim, few_rows
from lit_efficient.internals.torch_trees import tree_leaves, tree_map_only

_FEW_DRAWS = 4
_MANY_DRAWS = 24  # enough to observe conditions that are hidden with a probability of 0.1


class NoiseApart(BenchClaim):
    """Each sample of each batch has its own noise level."""

    name = "noise"
    sentence = "noise levels are drawn for each sample of each batch"
    unit = "draws"

    def tried(self, bench: Bench) -> Verdict:
        batch, rows = few_rows(bench.batch)
        drawn = []
        for seed in range(_FEW_DRAWS):
            levels = _of_samples(bench.returned(batch, seed), "timesteps", rows)
            if rows < 2 or levels is None:
                return self.idle("the training step returns no `timesteps` for each sample")
            drawn.append(levels)
        found = torch.stack(drawn)
        why = f"noise levels of {rows} samples in {_FEW_DRAWS} draws"
        wrong = 0
        if (found == found[:1]).all():
            wrong = _FEW_DRAWS - 1
            why += ": all draws are equal"
        if (found == found[:, :1]).all():
            wrong = _FEW_DRAWS
            why = f"noise levels of {rows} samples in {_FEW_DRAWS} draws: all samples of a batch share one"
        return self.measured(wrong, 0, why, "timesteps of training_step")


class ConditionsApart(BenchClaim):
    """Each sample has its own draw that decides whether its condition is hidden."""

    name = "conditions"
    sentence = "labels are hidden from single samples, not from whole batches"
    unit = "draws"

    def tried(self, bench: Bench) -> Verdict:
        batch, rows = few_rows(bench.batch, 8)
        labels = next((leaf for leaf in tree_leaves(batch) if _is_label(leaf, rows)), None)
        if rows < 2 or labels is None:
            return self.idle("the batch has no label for each sample")
        others = labels.roll(1)
        mine = others != labels
        changed = tree_map_only(Tensor, lambda leaf: others if leaf is labels else leaf, batch)
        seen = []
        for seed in range(_MANY_DRAWS):
            one = _of_samples(bench.returned(batch, seed), "sample_loss", rows)
            other = _of_samples(bench.returned(changed, seed), "sample_loss", rows)
            if one is None or other is None or int(mine.sum()) < 2:
                return self.idle("the training step returns no `sample_loss`, or all labels are equal")
            seen.append((one != other)[mine])
        follows = torch.stack(seen)  # [draw, sample]: the label changes the loss
        if not follows.any():
            return self.idle("no loss depends on a label")
        if follows.all():
            return self.idle("no label is hidden")
        hidden = int((~follows).all(1).sum())
        mixed = int((follows.any(1) & ~follows.all(1)).sum())
        why = (
            f"labels of {int(mine.sum())} samples in {_MANY_DRAWS} draws: hidden from some in {mixed}, from all in "
            f"{hidden}"
        )
        # Whole batches without labels occur by chance if labels are hidden from single samples.
        if mixed:
            hidden = 0
        return self.measured(hidden, 0, why, "the training step")


def _is_label(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.shape == (rows,) and not leaf.is_floating_point()


def _of_samples(returned: Any, name: str, rows: int) -> Tensor | None:
    """Return a result of a training step, if it is one number for each sample; ``None`` otherwise."""
    if isinstance(returned, Mapping):
        value = returned.get(name)
        if isinstance(value, Tensor) and value.shape == (rows,):
            return value.detach().cpu()
    return None


OF_NOISE: tuple[BenchClaim, ...] = (NoiseApart(), ConditionsApart())
