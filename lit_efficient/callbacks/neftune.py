"""NEFTune: add noise to the token embeddings while a language model is fine-tuned.

    x <- x + u * alpha / sqrt(L * d),    u uniform in [-1, 1),    L real tokens of the text, d the embeddings' width

Saves: labelled examples: a tuned model overfits less to the wording of a small set of instructions
Costs: one random number for each element of the embeddings; the training loss is higher than without noise
Source: Jain et al. (2023), https://arxiv.org/abs/2310.05914
"""

from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.internals.lightning_strategies import data_rank
from lit_efficient.models.networks.document_attention import document_starts
from lit_efficient.models.networks.token_rows import pass_rows, row_of, rows_in
from lit_efficient.models.probes.token_embeddings import token_embeddings
from lit_efficient.surgery import match_modules, mix_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


def noisy_embeddings(
    embeddings: Tensor, alpha: float, lengths: Tensor | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Return embeddings with uniform noise of at most ``alpha / sqrt(L * d)``.

    Args:
        embeddings: Token embeddings, [B, T, d].
        alpha: Strength of the noise, at least 0; 5 to 15 in the paper.
        lengths: Number L of real tokens in the text to which each token belongs, [B, 1] or [B, T]. 0 means padding,
            which gets no noise. ``None`` means T for all tokens.
        generator: Generator on the embeddings' device; ``None`` for the device's global generator.

    Source: Jain et al. (2023), https://arxiv.org/abs/2310.05914, algorithm 1.
    """
    noise = torch.empty_like(embeddings).uniform_(-1, 1, generator=generator)
    if lengths is None:
        return embeddings + noise * (alpha / (embeddings.shape[-2] * embeddings.shape[-1]) ** 0.5)
    size = alpha * (lengths * embeddings.shape[-1]).float().rsqrt()
    return embeddings + noise * torch.where(lengths > 0, size, 0.0)[..., None].to(noise.dtype)


def text_lengths(attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
    """Return the number of real tokens in the text to which each position belongs, [B, T]; 0 for padding.

    At least one of the arguments must be given.

    Args:
        attention_mask: Mask with 0 for padding, [B, T]; ``None`` if there is no padding.
        position_ids: Positions that start at 0 in each text of a packed row, [B, T]; ``None`` if each row is one text.

    Example:
        >>> text_lengths(torch.tensor([[1, 1, 1, 0]]), None)
        tensor([[3, 3, 3, 0]])
        >>> text_lengths(None, torch.tensor([[0, 1, 2, 0]]))
        tensor([[3, 3, 3, 1]])
    """
    given = attention_mask if attention_mask is not None else position_ids
    assert given is not None
    real = torch.ones_like(given)
    if attention_mask is not None:
        real = (attention_mask != 0).long()
    starts = torch.zeros_like(real)
    if position_ids is not None:
        if attention_mask is not None:
            position_ids = position_ids.masked_fill(real == 0, 0)
        starts = document_starts(position_ids)
    # Add up the real tokens at the start of each text, then read the sum at all of its positions.
    return torch.zeros_like(real).scatter_add_(1, starts, real).gather(1, starts) * real


class _Noisy:
    """Mix-in of an embedding that adds noise to its output in training."""

    training: bool
    _noise_alpha: float
    _noise_name: str  # name of the embedding, for messages
    _noise_seed: int | None  # None outside of a trainer's loop, where the device's global generator is used
    token_rows: dict[str, Any]  # masks and positions of the network's call, or of the batch

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        embeddings: Tensor = super().forward(*args, **kwargs)  # type: ignore[misc]
        if self.training and self._noise_alpha:
            return _with_noise(self, embeddings)
        return embeddings


@torch.compiler.disable
def _with_noise(layer: _Noisy, embeddings: Tensor) -> Tensor:
    if embeddings.ndim != 3:
        raise ConfigurationError(
            f"NEFTune: {layer._noise_name!r} gives embeddings of the shape {list(embeddings.shape)}, not [B, T, d]. "
            "Set embeddings=[...] to the name of the token embedding"
        )
    generator = None
    if layer._noise_seed is not None:
        generator = torch.Generator(embeddings.device).manual_seed(layer._noise_seed)
    shape = embeddings.shape[:2]
    mask, positions = (row_of(layer, key, shape) for key in ("attention_mask", "position_ids"))
    lengths = None
    if mask is not None or positions is not None:
        lengths = text_lengths(mask, positions)
    return noisy_embeddings(embeddings, layer._noise_alpha, lengths, generator)


class NEFTune(Technique):
    """Add noise to the token embeddings of a language model, in training only.

    The noise of a batch depends only on ``seed``, the number of the batch and the rank, so that a resumed run continues
    with the same noise. Text lengths are computed from the ``attention_mask`` [B, T] and the ``position_ids`` [B, T]
    (from 0 in each text of a packed row) of the network's call or of the batch. Without these, each row is one text.
    Evaluation, generation and checkpoints are the same as without NEFTune.

    Args:
        alpha: Strength of the noise, at least 0; the paper uses 5, 10 or 15.
        embeddings: ``auto`` for the input embeddings of a transformers model, or for the only ``nn.Embedding`` of
            another network. Otherwise regular expressions for the ends of dotted names.
        seed: Seed of the noise.

    Raises:
        ConfigurationError: For an argument out of range, and if ``auto`` finds no embedding or several. In the first
            step, if an embedding does not give [B, T, d].
    """

    phase = Phase.RECOMPUTE  # after adapters, so that the noise is added to the adapted embeddings
    traits = frozenset({Trait.AFTER_SHARDING, Trait.TRAINING_ONLY})
    reasons: ClassVar[dict[Trait, str]] = {
        Trait.NEEDS_WHOLE_ROWS: "its noise depends on the length of each text",
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
            found = match_modules(module, self.embeddings, who="NEFTune: embeddings")
        for name, layer in found:
            mix_in(layer, _Noisy, _noise_alpha=self.alpha, _noise_name=name, _noise_seed=None)
        pass_rows(module, found)
        names = tuple(name for name, _ in found)
        return Report(f"noise of alpha {self.alpha:g} on {', '.join(names)}", modules=names)

    def on_train_batch_start(self, trainer: Trainer, pl_module: nn.Module, batch: object, batch_idx: int) -> None:
        rows = rows_in(batch)
        for i, layer in enumerate(_noisy(pl_module)):
            layer._noise_seed = mix_seed(self.seed, trainer.fit_loop.total_batch_idx, i, data_rank(trainer))
            layer.token_rows = rows

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: nn.Module, outputs: object, batch: object, batch_idx: int
    ) -> None:
        for layer in _noisy(pl_module):
            layer._noise_seed = None
            layer.token_rows = {}

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_batch_end(trainer, pl_module, None, None, 0)
        super().on_exception(trainer, pl_module, exception)


def _noisy(root: nn.Module) -> list[_Noisy]:
    return [part for part in root.modules() if isinstance(part, _Noisy)]
