"""Small trainings of many kinds, for checks of any training: with and without this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import lit_efficient as le
from lit_efficient.data.text.collate import packed_batch, padded_batch
from lit_efficient.losses.next_token import IGNORE
from tests.support import trainer

VOCABULARY, LENGTH, END = 32, 24, 1


class Documents(Dataset):
    """Rows of documents of random tokens. Each ends with END and begins with tokens without labels."""

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
    """Module without this package: a network, a loss of its outputs and targets, and an optimizer."""

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
    """A training: module, data and trainer.

    Args:
        module: Function that creates the module.
        data: Function that creates the data.
        callbacks: Function that creates the callbacks.
        trainer: Arguments of the trainer.
    """

    module: Callable[[], Any]
    data: Callable[[], Any]
    callbacks: Callable[[], list[Any]] = list
    trainer: tuple[tuple[str, Any], ...] = ()

    def made(self) -> tuple[Any, Any, Any]:
        """Return the trainer, the module and the data."""
        torch.manual_seed(0)
        how = {"max_steps": 4, "limit_val_batches": 0, **dict(self.trainer)}
        how = {name: value() if callable(value) else value for name, value in how.items()}
        return trainer(self.callbacks(), **how), self.module(), self.data()

    def but(self, **changes: Any) -> Setup:
        """Return a copy with some changes."""
        return replace(self, **changes)


GPT = Setup(language_model, token_data)
LLAMA = Setup(lambda: hugging_face("llama"), token_data)
RESNET = Setup(lambda: Stranger(ResNet()), image_data)


class Autoregressive(nn.Module):
    """Recurrent network with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(VOCABULARY, 16), nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(ids))[0])


def windows(rows: int = 16) -> TensorDataset:
    """Return tokens and the next tokens."""
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(11))
    return TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


class Streamed(IterableDataset):
    def __iter__(self) -> Any:
        for i in range(16):
            row = torch.linspace(-1, 1, 12).add(i / 16).sin()
            yield row[:8], row[8:]


class Adversaries(L.LightningModule):
    """Generator and critic with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, noise = batch[0], torch.randn(len(batch[0]), 4)
        generator, critic = self.optimizers()  # type: ignore[attr-defined]
        fake = self.generator(noise)
        loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()
        critic.zero_grad()
        self.manual_backward(loss)
        critic.step()
        generator.zero_grad()
        self.manual_backward(F.softplus(-self.critic(fake)).mean())
        generator.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.generator, self.critic)]


class Contrastive(L.LightningModule):
    """Loss over pairs of rows, for two views that the step creates."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.GELU(), nn.Linear(16, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        views = torch.cat([batch[0], batch[0] + 0.1 * torch.randn_like(batch[0])])
        features = F.normalize(self.network(views), dim=-1)
        half = len(features) // 2
        return F.cross_entropy(features[:half] @ features[half:].T / 0.2, torch.arange(half))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Unfreezing(BaseFinetuning):
    """Callback that freezes the blocks in the first epoch of four batches."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.network.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.network.blocks, optimizer)


class Mixup(Stranger):
    """Module that mixes rows of images before the network receives them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        order = torch.randperm(len(batch[0]))
        return F.cross_entropy(self(0.7 * batch[0] + 0.3 * batch[0][order]), batch[1])


class Denoiser(L.LightningModule):
    """UNet of diffusers that predicts the noise."""

    def __init__(self) -> None:
        from diffusers import DDPMScheduler, UNet2DModel

        super().__init__()
        self.network = UNet2DModel(
            8, 1, 1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4, attention_head_dim=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip
        self.noise = DDPMScheduler()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise = torch.randn_like(batch[0])
        times = torch.randint(0, 1000, (len(batch[0]),))
        return F.mse_loss(self.network(self.noise.add_noise(batch[0], noise, times), times).sample, noise)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Vision(nn.Module):
    """ViT of transformers."""

    def __init__(self) -> None:
        from transformers import ViTConfig, ViTForImageClassification

        super().__init__()
        self.vit = ViTForImageClassification(
            ViTConfig(
                hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8,
                patch_size=4, num_channels=1, num_labels=3,
            )
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.vit(x).logits


def diffusion() -> le.LatentDiffusion:
    shape = le.DiTConfig(channels=2, size=8, patch_size=2, width=16, depth=2, heads=2, num_classes=3)
    return le.LatentDiffusion(shape, learning_rate=1e-3)


def _of(*callbacks: Callable[[], Any]) -> Callable[[], list[Any]]:
    return lambda: [make() for make in callbacks]


def _sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _numbers() -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(16, 8, generator=torch.Generator().manual_seed(1))), 4)


TWICE = (("accumulate_grad_batches", 2),)
_SAVERS = (lambda: le.LoRA(rank=2), lambda: le.ChunkedCrossEntropy(chunk_size=7), le.ActivationCheckpointing)
HEALTHY: dict[str, Setup] = {
    "a language model on packed rows": GPT,
    "padded, with masked turns": GPT.but(data=lambda: token_data(padded, prompt=4)),
    "adapters, chunks and recomputation with dropout": GPT.but(
        module=lambda: language_model(dropout=0.2),
        callbacks=_of(*_SAVERS),
    ),
    "dropout, recomputed and accumulated": GPT.but(
        module=lambda: language_model(dropout=0.2),
        callbacks=_of(le.ActivationCheckpointing, le.TokenWeightedAccumulation),
        trainer=(("accumulate_grad_batches", 2),),
    ),
    "blocks that thaw one after the other": GPT.but(callbacks=_of(lambda: le.GradualUnfreezing(every_n_epochs=1))),
    "a quantised base with adapters": GPT.but(
        module=lambda: language_model(dim=64, hidden_dim=128, num_heads=4),
        callbacks=_of(le.QuantizeBase, lambda: le.LoRA(rank=2)),
    ),
    "an average, exact resuming and accumulation": GPT.but(
        callbacks=_of(lambda: le.EMA(decay=0.9), le.ExactResume), trainer=(("accumulate_grad_batches", 2),)
    ),
    "optimizers of 8 bits": GPT.but(callbacks=_of(lambda: le.LowBitOptimizer(min_size=512))),
    "optimizer in backward": GPT.but(callbacks=_of(le.OptimizerInBackward)),
    "bfloat16": GPT.but(trainer=(("precision", "bf16-mixed"),)),
    "blocks that run on a part of the tokens": GPT.but(
        callbacks=_of(lambda: le.MixtureOfDepths(capacity=0.5)), trainer=TWICE,
    ),
    "the easy half of each batch": GPT.but(
        callbacks=_of(lambda: le.LossCurriculum(start=0.5, steps=500)), trainer=TWICE,
    ),
    "experts that are balanced over a batch": GPT.but(
        callbacks=_of(lambda: le.MixtureOfExperts(experts=4)), trainer=TWICE,
    ),
    "gradients clipped": GPT.but(trainer=(("gradient_clip_val", 0.5),)),
    "Llama, packed": LLAMA,
    "Llama, chunked, recomputed, adapters": LLAMA.but(
        callbacks=_of(*_SAVERS)
    ),
    "GPT-2, padded": GPT.but(module=lambda: hugging_face("gpt2"), data=lambda: token_data(padded)),
    "two processes": GPT.but(trainer=(("devices", 2), ("strategy", "ddp"))),
    "latent diffusion": Setup(diffusion, lambda: DataLoader(Latents(), 4, shuffle=True)),
    "latent diffusion with an average and weights": Setup(
        diffusion,
        lambda: DataLoader(Latents(), 4, shuffle=True),
        _of(lambda: le.EMA(decay=0.9), le.SNRWeighting, le.ActivationCheckpointing),
    ),
    "a stranger's ResNet": RESNET,
    "a ResNet that is averaged, and validated": RESNET.but(
        module=lambda: Stranger(ResNet(0.2), optimizer=_sgd),
        data=lambda: (image_data(), image_data()),
        callbacks=_of(lambda: le.CheckpointAverage(last_k=2)),
        trainer=(("limit_val_batches", 1),),
    ),
    "a ResNet in two processes": RESNET.but(trainer=(("devices", 2), ("strategy", "ddp"))),
    "layers that are unfrozen after an epoch": RESNET.but(callbacks=_of(Unfreezing)),
    "channels last": RESNET.but(callbacks=_of(le.ChannelsLast)),
    "mixup": RESNET.but(module=lambda: Mixup(ResNet())),
    "a ViT": RESNET.but(module=lambda: Stranger(Vision())),
    "a UNet of diffusers": RESNET.but(module=Denoiser),
    "a contrastive loss": RESNET.but(module=Contrastive),
    "a recurrent network with tied weights": Setup(
        lambda: Stranger(Autoregressive(), lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten())),
        lambda: DataLoader(windows(), 4, shuffle=True),
    ),
    "an iterable dataset": Setup(
        lambda: Stranger(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), F.mse_loss),
        lambda: DataLoader(Streamed(), 4),
    ),
    "adversaries, by manual optimization": Setup(Adversaries, _numbers),
    "schedule-free": Setup(
        lambda: Stranger(ResNet(), optimizer=lambda parameters: le.ScheduleFreeAdamW(parameters, lr=1e-2)),
        image_data, _of(le.ScheduleFree),
    ),
    "Muon": Setup(
        lambda: Stranger(Vision(), optimizer=lambda parameters: le.MuonAdamW(parameters, lr=1e-2)), image_data
    ),
}  # fmt: skip
