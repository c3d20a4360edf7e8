"""Small modules, data and runs whose files :mod:`benchmarks.trust_rows.damage_kinds` damages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader

from lit_efficient import EMA, CausalLMConfig, ExactResume, LanguageModeling, Lion, LoRA, PowerEMA

WIDTH = 8
ROWS = 12
WORDS = ["<|endoftext|>", "def", "return", "self", "value", "class", "import", "for", "in", "if"]
WORDS += ["else", "not", "and", "or", "pass", "True", "False", "None", "x", "y"]
LLAMA = {
    "model_type": "llama",
    **{"vocab_size": len(WORDS), "hidden_size": WIDTH, "intermediate_size": 12, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 24},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": False},
}


def exact(*shape: int, salt: int = 1) -> Tensor:
    """Return numbers in [-0.5, 0.5] that are equal on every processor; those of a random generator are not."""
    scattered = torch.arange(1, math.prod(shape) + 1) * (2654435761 + 2 * salt) % 4294967291 % 1009
    return ((scattered - 504).float() / 1008).reshape(shape)


@torch.no_grad()
def settle(module: nn.Module) -> nn.Module:
    """Fill a module's matrices with :func:`exact`, so that a frozen base left out of a checkpoint can be rebuilt."""
    for salt, parameter in enumerate(module.parameters(), start=1):
        if parameter.ndim > 1:
            parameter.copy_(exact(*parameter.shape, salt=salt) * 2 / math.sqrt(parameter.shape[-1]))
    return module


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList([Block(WIDTH)])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Stranger(L.LightningModule):
    """Module that knows nothing of this package; it learns to reverse a row."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = AdamW) -> None:
        super().__init__()
        self.net = settle(Blocks())
        self.optimizer = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) - batch.flip(-1)).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def rows() -> DataLoader[Any]:
    return DataLoader(list(exact(ROWS, WIDTH)), 2, shuffle=True)


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


class Patterns(L.LightningDataModule):
    """Grey images of 8 x 8 pixels in three classes."""

    variants = 1
    batch_size = 4
    num_workers = 0
    seed = 0
    num_classes = 3
    class_names = ("zero", "one", "two")

    def __init__(self) -> None:
        super().__init__()
        self.dataset = self
        self.train_index = list(range(ROWS))
        self.val_index = [12, 13]
        self.test_index = [14, 15]

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


class SaveAt(L.Callback):
    """Save a checkpoint after three optimizer steps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def _fit(module: L.LightningModule, data: Any, techniques: list[L.Callback], path: Path) -> None:
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        **{"accelerator": "cpu", "devices": 1, "logger": False, "max_steps": 6, "default_root_dir": path.parent},
        **{"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False},
        callbacks=[ExactResume(0), *techniques, SaveAt(path)],
    )
    trainer.fit(module, data)


def fit_power_ema(path: Path) -> None:
    """Fit with :class:`PowerEMA`; write the checkpoint ``path`` and the folder ``snapshots`` beside it."""
    _fit(Stranger(Lion), rows(), [PowerEMA([0.05, 0.1], snapshot_every_n_steps=2)], path)


def fit_adapter(path: Path) -> None:
    """Fit adapters over the model in the folder ``base`` and write the checkpoint ``path``."""
    module = LanguageModeling(CausalLMConfig("base"), learning_rate=0.02, warmup_steps=1)
    adapters = LoRA(rank=2, targets=["q_proj", "v_proj"], variant="rslora")
    _fit(module, Words(), [EMA(decay=0.7), adapters], path)
