"""NEFTune: noise on the embeddings of tokens while a language model is fine-tuned.

    x <- x + u * alpha / sqrt(L * d),    u uniform in [-1, 1),    L real tokens of the text, d the embeddings' width

Saves: labelled examples: answers of a tuned model overfit less to the wording of a small set of instructions
Costs: one draw for each number of the embeddings; the training loss is higher than that of the same weights without it
Source: Jain et al. (2023), https://arxiv.org/abs/2310.05914
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.distributed.ranks import data_rank
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.models.networks.document_attention import document_starts
from lit_efficient.models.networks.token_rows import pass_rows, row_of, rows_in
from lit_efficient.models.probes.token_embeddings import token_embeddings
from lit_efficient.surgery import match_modules, mix_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


def noisy_embeddings(
    embeddings: Tensor, alpha: float, lengths: Tensor | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Embeddings with uniform noise of at most ``alpha / sqrt(L * d)``.

    Args:
        embeddings: [B, T, d].
        alpha: Strength, at least 0; 5 to 15 in the paper.
        lengths: Real tokens L of the text that each token belongs to, [B, 1] or [B, T], 0 for padding, which gets no
            noise; ``None``: T.
        generator: Of the embeddings' device; ``None``: its global one.

    Source: Jain et al. (2023), https://arxiv.org/abs/2310.05914, algorithm 1.
    """
    noise = torch.empty_like(embeddings).uniform_(-1, 1, generator=generator)
    if lengths is None:
        return embeddings + noise * (alpha / (embeddings.shape[-2] * embeddings.shape[-1]) ** 0.5)
    size = alpha * (lengths * embeddings.shape[-1]).float().rsqrt()
    return embeddings + noise * torch.where(lengths > 0, size, 0.0)[..., None].to(noise.dtype)


def text_lengths(attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
    """Real tokens of the text that each position of a row belongs to, [B, T]; 0 where there is padding.

    Args:
        attention_mask: [B, T], 0 for padding; ``None``: there is none.
        position_ids: [B, T], from 0 in every text of a packed row; ``None``: a row is one text.

    Example:
        >>> text_lengths(torch.tensor([[1, 1, 1, 0]]), None)
        tensor([[3, 3, 3, 0]])
        >>> text_lengths(None, torch.tensor([[0, 1, 2, 0]]))
        tensor([[3, 3, 3, 1]])
    """
    given = attention_mask if attention_mask is not None else position_ids
    assert given is not None
    real = torch.ones_like(given) if attention_mask is None else (attention_mask != 0).long()
    starts = torch.zeros_like(real)
    if position_ids is not None:
        starts = document_starts(position_ids if attention_mask is None else position_ids.masked_fill(real == 0, 0))
    return torch.zeros_like(real).scatter_add_(1, starts, real).gather(1, starts) * real


class _Noisy:
    """Mix-in of an embedding."""

    training: bool
    _noise_alpha: float
    _noise_name: str
    _noise_seed: int | None  # None outside a trainer's loop: draw from the device's global generator
    token_rows: dict[str, Any]  # of the network's call, or of the batch

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        embeddings = super().forward(*args, **kwargs)  # type: ignore[misc]
        return _with_noise(self, embeddings) if self.training and self._noise_alpha else embeddings


@torch.compiler.disable
def _with_noise(layer: _Noisy, embeddings: Tensor) -> Tensor:
    if embeddings.ndim != 3:
        raise ConfigurationError(
            f"NEFTune: {layer._noise_name!r} gives embeddings of the shape {list(embeddings.shape)}, not [B, T, d] for "
            "rows of tokens; name that of the tokens with embeddings="
        )
    generator = None
    if layer._noise_seed is not None:
        generator = torch.Generator(embeddings.device).manual_seed(layer._noise_seed)
    shape = embeddings.shape[:2]
    mask, positions = (row_of(layer, key, shape) for key in ("attention_mask", "position_ids"))
    lengths = None if mask is None and positions is None else text_lengths(mask, positions)
    return noisy_embeddings(embeddings, layer._noise_alpha, lengths, generator)


class NEFTune(Technique):
    """Add noise to the token embeddings of a language model, in training only.

    The noise of a batch is a function of ``seed``, the number of the batch and the rank: a resumed run goes on with the
    same noise. How long a text is, is read from the ``attention_mask`` [B, T] and the ``position_ids`` [B, T] (from 0
    in every text of a packed row) that the network is called with or the batch holds; without them a row is one text.
    Evaluation, generation and checkpoints are as without it.

    Args:
        alpha: Strength, at least 0; the paper takes 5, 10 or 15.
        embeddings: ``auto``: those that transformers' models call their input embeddings, or the only ``nn.Embedding``;
            otherwise regular expressions for the ends of dotted names.
        seed: Seed of the noise.

    Raises:
        ConfigurationError: For an argument out of range, where ``auto`` finds no embedding or several, and in the first
            step for one that does not give [B, T, d].
    """

    phase = Phase.RECOMPUTE  # the noise is on the embeddings as adapters leave them
    traits = frozenset({Trait.AFTER_SHARDING, Trait.TRAINING_ONLY})
    reasons: ClassVar[dict[Trait, str]] = {
        Trait.NEEDS_WHOLE_ROWS: "its noise goes by how long a text is",
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "less overfitting to a small set of instructions")}

    def __init__(self, alpha: float = 5.0, embeddings: str | list[str] = "auto", seed: int = 0) -> None:
        super().__init__()
        check_number("NEFTune", "alpha", alpha, least=0)
        self.alpha = alpha
        self.embeddings = embeddings
        self.seed = seed

    def transform(self, module: nn.Module) -> Report:
        if self.embeddings == "auto":
            found = token_embeddings(module, who="NEFTune", argument="embeddings")
        else:
            patterns = [self.embeddings] if isinstance(self.embeddings, str) else self.embeddings
            found = match_modules(module, patterns, who="NEFTune: embeddings")
        for name, layer in found:
            mix_in(layer, _Noisy, _noise_alpha=self.alpha, _noise_name=name, _noise_seed=None)
        pass_rows(module, found)
        names = tuple(name for name, _ in found)
        return Report(f"noise of alpha {self.alpha:g} on {', '.join(names)}", modules=names)

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        rows = rows_in(batch)
        for i, layer in enumerate(_noisy(pl_module)):
            layer._noise_seed = mix_seed(self.seed, trainer.fit_loop.total_batch_idx, i, data_rank(trainer))
            layer.token_rows = rows

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        for layer in _noisy(pl_module):
            layer._noise_seed, layer.token_rows = None, {}

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        self.on_train_batch_end(trainer, pl_module, None, None, 0)
        super().on_exception(trainer, pl_module, exception)


def _noisy(root: nn.Module) -> list[_Noisy]:
    return [part for part in root.modules() if isinstance(part, _Noisy)]
