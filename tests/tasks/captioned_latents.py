"""Tiny captioned images for latent diffusion: live, or with latents and texts encoded beforehand."""

from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_efficient import Autoencoder, AutoencoderConfig, DiffusersModelConfig
from lit_efficient.models.libraries.autoencoders import build_autoencoder
from lit_efficient.models.libraries.latent_codec import LatentCodec
from lit_efficient.models.libraries.text_encoder import TextEncoder, TextEncoderConfig

CLIP = {
    "model_type": "clip_text_model",
    "architectures": ["CLIPTextModelWithProjection"],
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 12,
    "projection_dim": 8,
}
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
TINY = {
    "_class_name": "AutoencoderTiny",
    "in_channels": 1,
    "out_channels": 1,
    "encoder_block_out_channels": [8, 8, 8],
    "decoder_block_out_channels": [8, 8, 8],
    "num_encoder_blocks": [1, 1, 1],
    "num_decoder_blocks": [1, 1, 1],
    "latent_channels": 4,
}
NAMES = ["one", "two", "three"]


def text_encoder(fields: dict[str, Any] | None = None, **arguments: Any) -> TextEncoder:
    return TextEncoder.load(TextEncoderConfig(config_fields=fields or CLIP, max_length=10, **arguments))


def codec(deterministic: bool = False) -> LatentCodec:
    torch.manual_seed(1)
    if deterministic:
        return LatentCodec.declared(build_autoencoder(DiffusersModelConfig(config_fields=TINY)))
    return LatentCodec(Autoencoder(AutoencoderConfig(latent_channels=4, width=8)), torch.full((4,), 0.1), torch.ones(4))


class CaptionedLatents(L.LightningDataModule):
    """Random grey images of 3 classes, in batches of 4.

    ``cached`` names what is encoded beforehand: "latents", "text" or both. ``text_encoder`` may be None.
    """

    def __init__(
        self,
        encoder: TextEncoder | None = None,
        cached: tuple[str, ...] = (),
        deterministic: bool = False,
        size: tuple[int, int] = (32, 32),
        labelled: bool = True,
        count: int = 12,
    ) -> None:
        super().__init__()
        self.text_encoder = encoder
        self.codec = codec(deterministic)
        self.num_classes = 3 if labelled else 0
        images = torch.rand(count, 1, *size, generator=torch.Generator().manual_seed(0)) * 2 - 1
        self.items: list[dict[str, Any]] = []
        for index, image in enumerate(images):
            item: dict[str, Any] = {"images": image, "index": torch.tensor(index)}
            if labelled:
                item["labels"] = torch.tensor(index % 3)
            if encoder is not None:
                item["captions"] = f"{NAMES[index % 3]} {index}"
            self.items.append(item)
        if "latents" in cached:
            self._cache_latents()
        if "text" in cached:
            self._cache_text()

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        height, width = next(
            item[key].shape[-2:] for item in self.items[:1] for key in ("images", "mean") if key in item
        )
        factor = self.codec.factor if "images" in self.items[0] else 1
        return 4, height // factor, width // factor

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.items, batch_size=4, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.items, batch_size=4, collate_fn=collate)  # type: ignore[arg-type]

    test_dataloader = predict_dataloader = val_dataloader

    def _cache_latents(self) -> None:
        mean, logvar = self.codec.encode(torch.stack([item.pop("images") for item in self.items]))
        for row, item in enumerate(self.items):
            item["mean"] = mean[row]
            if logvar is not None:
                item["logvar"] = logvar[row]

    def _cache_text(self) -> None:
        assert self.text_encoder is not None
        for item in self.items:
            found = self.text_encoder.encode([item["captions"]])
            item["text"], item["text_mask"] = found.hidden[0], found.mask[0]
            if found.pooled is not None:
                item["pooled"] = found.pooled[0]


class JudgedLatents(CaptionedLatents):
    """With a judge that notes what it was asked."""

    judged: list[tuple[int, Any]]

    def score_samples(self, images: Tensor, labels: Tensor | None, captions: Any = None) -> dict[str, float]:
        self.judged = [*getattr(self, "judged", []), (len(images), None if labels is None else labels.tolist())]
        return {"brightness": float(images.mean())}


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    columns = {name: [item[name] for item in items] for name in items[0]}
    return {name: torch.stack(column) if name != "captions" else column for name, column in columns.items()}
