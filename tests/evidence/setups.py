"""Small trainings of every kind that people have, for what is checked of any training: ours, and strangers'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lit_efficient as le
from lit_efficient.data.text.collate import packed_batch, padded_batch
from lit_efficient.losses.next_token import IGNORE
from tests.support import trainer

VOCABULARY, LENGTH, END = 32, 24, 1


class Documents(Dataset):
    """Rows of documents of random tokens, each of which ends with END and begins with tokens that are not learned."""

    def __init__(self, rows: int = 16, packed: bool = True, prompt: int = 1) -> None:
        draw = torch.Generator().manual_seed(3)
        sizes = [(9, 8, 7), (5, 12, 7), (10, 10), (16, 6)] if packed else [(17,), (24,), (9,), (12,)]
        self.rows = []
        for row in range(rows):
            documents = []
            for size in sizes[row % len(sizes)]:
                ids = torch.randint(2, VOCABULARY, (size,), generator=draw)
                ids[-1] = END
                labels = ids.clone()
                labels[:prompt] = IGNORE
                documents.append((ids.numpy(), labels.numpy()))
            self.rows.append(documents)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def packed(rows: list[Any]) -> dict[str, Tensor]:
    return packed_batch(rows, LENGTH)


def padded(rows: list[Any]) -> dict[str, Tensor]:
    return padded_batch([row[0] for row in rows])


def token_data(collate: Callable[[list[Any]], Any] = packed, shuffle: bool = True, **how: Any) -> Any:
    dataset = Documents(packed=collate is not padded, **how)
    return DataLoader(dataset, 4, shuffle=shuffle, collate_fn=collate, generator=torch.Generator().manual_seed(0))


def gpt(**fields: Any) -> le.GPTConfig:
    known = {"vocab_size": VOCABULARY, "dim": 16, "depth": 2, "num_heads": 2, "hidden_dim": 32, "max_length": 64}
    return le.GPTConfig(**{**known, **fields})


def language_model(**fields: Any) -> le.LanguageModeling:
    return le.LanguageModeling(gpt(**fields), learning_rate=1e-2, warmup_steps=2)


def hugging_face(model_type: str, **fields: Any) -> le.LanguageModeling:
    shapes: dict[str, dict[str, Any]] = {
        "llama": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"num_key_value_heads": 1},
        "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    }
    shape = {"model_type": model_type, "vocab_size": VOCABULARY, **shapes[model_type], **fields}
    return le.LanguageModeling(le.CausalLMConfig(config_fields=shape), learning_rate=1e-2, warmup_steps=2)


class Latents(Dataset):
    def __init__(self, rows: int = 16) -> None:
        draw = torch.Generator().manual_seed(5)
        self.latents = torch.randn(rows, 2, 8, 8, generator=draw)

    def __len__(self) -> int:
        return len(self.latents)

    def __getitem__(self, index: int) -> Any:
        return {"latents": self.latents[index], "labels": torch.tensor(index % 3)}


class Stranger(L.LightningModule):
    """Somebody's module: a network, a loss of what it gives and the targets, and an optimizer."""

    def __init__(
        self,
        network: nn.Module,
        loss: Callable[[Any, Tensor], Tensor] = F.cross_entropy,
        optimizer: Callable[[Any], Any] = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    ) -> None:
        super().__init__()
        self.network, self.loss, self.optimizer = network, loss, optimizer

    def forward(self, x: Tensor) -> Any:
        return self.network(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.Sequential(Residual(4), Residual(4))
        self.drop, self.fc = nn.Dropout(dropout), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.blocks(self.stem(x)).mean((2, 3))))


def images(rows: int = 16) -> TensorDataset:
    draw = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(rows, 1, 8, 8, generator=draw), torch.arange(rows) % 3)


def image_data(batch_size: int = 4) -> DataLoader:
    return DataLoader(images(), batch_size, shuffle=True, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Setup:
    """A training: its module, its data, and how it is trained.

    Args:
        module: Makes the module.
        data: Makes the data.
        callbacks: Makes the callbacks.
        trainer: Arguments of the trainer.
    """

    module: Callable[[], Any]
    data: Callable[[], Any]
    callbacks: Callable[[], list[Any]] = list
    trainer: tuple[tuple[str, Any], ...] = ()

    def made(self) -> tuple[Any, Any, Any]:
        """Trainer, module and data."""
        torch.manual_seed(0)
        how = {"max_steps": 4, "limit_val_batches": 0, **dict(self.trainer)}
        how = {name: value() if callable(value) else value for name, value in how.items()}
        return trainer(self.callbacks(), **how), self.module(), self.data()

    def but(self, **changes: Any) -> Setup:
        """The same with some of it changed."""
        return replace(self, **changes)


GPT = Setup(language_model, token_data)
LLAMA = Setup(lambda: hugging_face("llama"), token_data)
RESNET = Setup(lambda: Stranger(ResNet()), image_data)
