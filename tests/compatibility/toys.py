"""Small modules and data for the runs: of this package by public names, and of people who know nothing of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from lit_efficient import (
    GPT,
    Autoencoding,
    GPTConfig,
    LatentData,
    LatentDiffusion,
    Phase,
    Report,
    Technique,
)

WIDTH, ROWS = 8, 12
WORDS = ["<|endoftext|>", "def", "return", "self", "value", "class", "import", "for", "in", "if"]
WORDS += ["else", "not", "and", "or", "pass", "True", "False", "None", "x", "y"]
LLAMA = {
    "model_type": "llama",
    **{"vocab_size": len(WORDS), "hidden_size": WIDTH, "intermediate_size": 12, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 24},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": False},
}
SMALL_GPT = GPTConfig(dim=WIDTH, depth=1, num_heads=2, hidden_dim=12, max_length=24)


def exact(*shape: int, salt: int = 1) -> Tensor:
    """Numbers in [-0.5, 0.5] that are the same on every processor, which those of a random generator are not."""
    scattered = torch.arange(1, math.prod(shape) + 1) * (2654435761 + 2 * salt) % 4294967291 % 1009
    return ((scattered - 504).float() / 1008).reshape(shape)


@torch.no_grad()
def settle(module: nn.Module) -> nn.Module:
    """The module with weights by `exact`: a frozen base that a checkpoint leaves out must be there again."""
    for salt, parameter in enumerate(module.parameters(), start=1):
        if parameter.ndim > 1:
            parameter.copy_(exact(*parameter.shape, salt=salt) * 2 / math.sqrt(parameter.shape[-1]))
    return module


# A module of somebody who knows nothing of this package ---------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, width: int = WIDTH, depth: int = 1) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    """Each of the numbers of a row is one of eight tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(8, dim=WIDTH, depth=1, num_heads=2, hidden_dim=16, max_length=32))

    def forward(self, x: Tensor) -> Tensor:
        return self.gpt((8 * x + 4).long().clamp(0, 7))[..., 0]


class Stranger(L.LightningModule):
    """Predicts a row turned round."""

    def __init__(self, network: Callable[[], nn.Module] = Blocks, optimizer: Callable[..., Any] = AdamW) -> None:
        super().__init__()
        self.net = settle(network())
        self.optimizer = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        output = self.net(batch)
        losses = (output - batch.flip(-1)[:, : output.shape[-1]]).square().mean(-1)
        return {"loss": losses.mean(), "sample_loss": losses}

    def num_tokens(self, batch: Tensor) -> int:
        return len(batch)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = self.optimizer(trained, lr=0.02)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class SmallAutoencoding(Autoencoding):
    """With an optimizer that keeps nothing, for the size of its file."""

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


class SmallDiffusion(LatentDiffusion):
    """The same."""

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.5)


class Plain(L.LightningModule):
    """Keeps its hyper-parameters as Lightning does by itself."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = settle(nn.Linear(WIDTH, outputs))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


class Mixed(L.LightningDataModule):
    """Holds data modules of this package that its config names."""

    def __init__(self, parts: list[L.LightningDataModule]) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.parts = parts

    def train_dataloader(self) -> DataLoader[Any]:
        return rows()


class Doubled(Technique):
    """A technique of somebody else's: a factor on what a layer gives, learned from 2 on."""

    phase = Phase.ARCHITECTURE
    alters = ("weights", "optimizer")

    def __init__(self, layer: str = "stem") -> None:
        super().__init__()
        self.layer = layer

    def transform(self, module: nn.Module) -> Report:
        layer = module.net.get_submodule(self.layer)
        layer.register_parameter("factor", nn.Parameter(torch.full((WIDTH,), 2.0)))
        layer.register_forward_hook(_multiplied)
        return Report("doubled", modules=(self.layer,))


def _multiplied(layer: Any, _: Any, output: Tensor) -> Tensor:
    return output * layer.factor


def rows() -> DataLoader[Any]:
    return DataLoader(list(exact(ROWS, WIDTH)), 2, shuffle=True)


# Data -----------------------------------------------------------------------------------------------------------------


class Words(L.LightningDataModule):
    """Rows of words, with their tokenizer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="x"))
        self.tokenizer.pre_tokenizer = Whitespace()
        self.vocab_size = len(WORDS)

    def train_dataloader(self) -> DataLoader[Any]:
        tokens = ((exact(ROWS, 9, salt=5) + 0.5) * (len(WORDS) - 1)).long() + 1
        return DataLoader([{"input_ids": row, "labels": row} for row in tokens.clamp(max=len(WORDS) - 1)], 2, True)


def pairs() -> DataLoader[Any]:
    """Answers of low numbers are preferred to those of high ones."""
    chosen = ((exact(ROWS, 8, salt=3) + 0.5) * 8).long() + 1
    rejected = chosen + 9
    sides = {"chosen": chosen, "rejected": rejected}
    tensors = {f"{side}_{name}": ids for side, ids in sides.items() for name in ("input_ids", "labels")}
    tensors |= {f"{side}_attention_mask": torch.ones_like(ids) for side, ids in sides.items()}
    return DataLoader([{name: tensor[i] for name, tensor in tensors.items()} for i in range(ROWS)], 2, True)


class Patterns(L.LightningDataModule):
    """A source of grey images, eight pixels wide, of three classes."""

    variants, batch_size, num_workers, seed, num_classes = 1, 4, 0, 0, 3
    class_names = ("zero", "one", "two")
    train_index, val_index, test_index = list(range(ROWS)), [12, 13], [14, 15]

    def __init__(self) -> None:
        super().__init__()
        self.dataset = self

    def __len__(self) -> int:
        return 16

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        index = key[0]
        images = exact(1, 8, 8, salt=index % 3 + 1) * 2
        return {"images": images, "index": index, "variant": 0, "labels": index % 3}

    def bucket_of(self, index: int) -> tuple[int, int]:
        return 8, 8

    def identity(self) -> dict[str, str]:
        return {"data": "patterns", "transform": "none", "resolution": "8x8", "variants": "1"}

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader([self[index, 0] for index in self.train_index], self.batch_size, shuffle=True)


def latents(folder: str = "latents") -> LatentData:
    """Latents of the autoencoder that the run ``autoencoding`` has trained."""
    return LatentData(Patterns(), "autoencoding.ckpt", folder=folder)
