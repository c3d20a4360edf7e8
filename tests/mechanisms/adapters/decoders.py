"""Decoders of transformers made small: one of each family, with weights that are the same at each call."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch

SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 32, "head_dim": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = ("GPT2", "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3")
WINDOWED = ("Mistral", "Gemma2", "Gemma3")  # those whose tokens see so many before them, in some layers or all:
WINDOW = 6


def decoder(family: str, **arguments: Any) -> Any:
    """A causal language model in eval mode."""
    import transformers

    torch.manual_seed(0)
    if family == "GPT2":
        config: Any = transformers.GPT2Config(
            n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=64, bos_token_id=1, eos_token_id=2, **arguments
        )
        return transformers.GPT2LMHeadModel(config).eval()
    if family in WINDOWED:
        arguments = {"sliding_window": WINDOW, **arguments}
    kind = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, kind)(**SIZES, **arguments)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


class Language(L.LightningModule):
    """Next-token prediction on rows of tokens."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network.train()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.network(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(IDS, 2)


IDS = torch.randint(3, 32, (4, 8), generator=torch.Generator().manual_seed(0))


def logits(model: Any) -> torch.Tensor:
    """Of :data:`IDS`, [4, 8, 32]."""
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=IDS).logits
    return result
