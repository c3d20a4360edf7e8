"""Pairs of tiny token sequences, and quiet trainers for them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lit_efficient import CausalLMConfig
from lit_efficient.models.libraries.causal_lm import build
from tests import support
from tests.models.libraries.test_causal_lm import FAMILIES

IGNORE = -100


def pairs(count: int, length: int = 10, seed: int = 1) -> dict[str, Tensor]:
    """A prompt of four tokens; chosen answers are of low ids, rejected ones of high ids and up to three shorter."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(3, 97, (count, 4), generator=generator)
    batch: dict[str, Tensor] = {}
    for side, ids in (("chosen", (3, 20)), ("rejected", (60, 97))):
        answer = torch.randint(*ids, (count, length - 4), generator=generator)
        tokens = torch.cat((prompt, answer), dim=1)
        mask = torch.ones_like(tokens)
        if side == "rejected":
            for row in range(count):
                mask[row, length - row % 4 :] = 0
        labels = torch.where(mask == 1, tokens, IGNORE)
        labels[:, :4] = IGNORE
        batch |= {
            f"{side}_input_ids": torch.where(mask == 1, tokens, 2),
            f"{side}_labels": labels,
            f"{side}_attention_mask": mask,
        }
    return batch


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int, seed: int = 1) -> None:
        self.batch = pairs(count, seed=seed)

    def __len__(self) -> int:
        return len(self.batch["chosen_labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.batch.items()}


def loader(count: int = 8, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(Rows(count), batch_size)


trainer = partial(support.trainer, max_epochs=-1, max_steps=4, limit_val_batches=1.0)


def saved(folder: Path, family: str = "llama") -> CausalLMConfig:
    """A model of random weights in a folder, as a pretrained one would be."""
    path = folder / family
    if not path.exists():
        state = torch.get_rng_state()
        torch.manual_seed(0)
        build(CausalLMConfig(config_fields=FAMILIES[family])).save_pretrained(path)
        torch.set_rng_state(state)
    return CausalLMConfig(str(path))


class SaveAfter(Callback):
    """Save a checkpoint in the middle of a run."""

    def __init__(self, steps: int, path: Path) -> None:
        self.steps, self.path = steps, path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(self.path)
