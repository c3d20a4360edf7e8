"""Train an encoder or decoder of transformers to embed texts, by InfoNCE with in-batch and given negatives.

    e(x) = pool(h_1 ... h_T),    loss: :mod:`lit_efficient.losses.contrastive`

``export`` writes a folder that ``AutoModel`` and ``sentence-transformers`` load.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError, check_list, check_number, refusal
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.losses.contrastive import info_nce, similarities
from lit_efficient.models.libraries.causal_lm import CausalLMConfig, Head
from lit_efficient.models.networks.reward import last_positions
from lit_efficient.surgery import UnusedPart, mix_in
from lit_efficient.tasks.text_task import TextTask

Pooling = Literal["mean", "cls", "last"]
_KEY = "text_embedding"


class TextEmbedding(TextTask):
    """Contrastive training on batches of texts that belong together.

    Batches have ``input_ids``, ``attention_mask`` and perhaps ``token_type_ids`` ``[B, 2 + n, T]``: the anchor, the
    positive and n negatives of each row, padded on the right. Each anchor is compared with all positives and negatives
    of the batch of its process: a larger ``batch_size`` makes the task harder, ``accumulate_grad_batches`` does not.
    The figures of validation depend on ``val_batch_size``.

    Logs ``loss`` and ``accuracy`` (share of anchors whose positive is the most similar text of the batch) under
    ``train/``, ``val/`` and ``test/``, and with ``sizes`` also ``accuracy/SIZE``. Prediction returns the embeddings
    ``[B, D]`` of a batch with ``input_ids`` ``[B, T]``, and the differences between the similarity of the positive and
    the best other one ``[B]`` of a batch with rows.

    Args:
        model: Encoder or decoder of transformers, by ``name_or_path`` or ``config_fields``.
        pooling: Embedding of a text: the ``mean`` over its tokens, its first token (``cls``), or its ``last`` token.
        normalize: Let embeddings have the length 1. It does not change the loss.
        temperature: Temperature of the similarities, above 0.
        sizes: Sizes of Matryoshka embeddings. The loss is the sum over the first numbers of the embeddings. null: the
            whole embedding alone.
        learning_rate: Peak learning rate of AdamW.
        weight_decay: Weight decay of the matrices.
        warmup_steps: As in `LanguageModeling`.
    """

    logs: ClassVar[tuple[str, ...]] = ("train/loss", "train/accuracy", "val/loss", "val/accuracy")
    loads_as = "TextEmbedding"
    trains_on = ("embedded texts",)
    cannot_generate = "the model embeds texts and cannot generate them"

    def __init__(
        self,
        model: CausalLMConfig,
        pooling: Pooling = "mean",
        normalize: bool = True,
        temperature: float = 0.05,
        sizes: Sequence[int] | None = None,
        learning_rate: float = 2e-5,
        weight_decay: float = 0.01,
        warmup_steps: int = 100,
    ) -> None:
        super().__init__(model, learning_rate, weight_decay, warmup_steps)
        check_number("TextEmbedding", "temperature", temperature, above=0)
        check_list("TextEmbedding", "sizes", sizes, "a list of sizes", null=True)
        for size in sizes or ():
            check_number("TextEmbedding", "sizes", size, least=1, whole=True)
        self.pooling: Pooling = pooling
        self.normalize = normalize
        self.temperature = temperature
        self.sizes = None if sizes is None else list(sizes)
        own = {"pooling": pooling, "normalize": normalize, "temperature": temperature, "sizes": self.sizes}
        self.save_hyperparameters(own)
        self._longest: int | None = None  # tokens of the longest text of the data

    @property
    def head(self) -> Head:
        """Model of transformers without a head."""
        return Head("AutoModel")

    def configure_model(self) -> None:
        """Build the network, and freeze the layer that some encoders have for classification."""
        super().configure_model()
        if self.network is None:
            return
        _set_pooler_aside(self.network)
        config: Any = self.network.config
        width = int(config.get_text_config().hidden_size)
        if self.sizes is not None and max(self.sizes) > width:
            raise refusal("TextEmbedding", "sizes", f"at most {width}, the size of the model's states", self.sizes)

    def _rebuilt(self, described: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> nn.Module:
        network = super()._rebuilt(described, checkpoint)
        _set_pooler_aside(network)
        return network

    def _needs(self, name: str) -> bool:
        return not name.startswith("pooler.")

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **further: Tensor) -> Tensor:
        """Return the embeddings ``[B, D]`` of texts ``[B, T]`` that are padded on the right; none without a mask."""
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        output = self._call(input_ids, attention_mask, further)
        states = output.last_hidden_state
        if self.pooling == "cls":
            pooled = states[:, 0]
        elif self.pooling == "last":
            pooled = states[torch.arange(len(states), device=states.device), last_positions(attention_mask)]
        else:
            weights = attention_mask[..., None].to(states.dtype)
            pooled = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        if self.normalize:
            return F.normalize(pooled, dim=-1)
        return pooled

    def _embedded(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings of the texts of each row, ``[B, 2 + n, D]``."""
        inputs = self._inputs(batch)
        ids = inputs["input_ids"]
        if ids.ndim != 3 or ids.shape[1] < 2:
            allowed = "of the shape [B, 2 + n, T], as EmbeddingData makes it"
            raise refusal("TextEmbedding", "input_ids", allowed, list(ids.shape))
        found = self(**{name: value.flatten(0, 1) for name, value in inputs.items()})
        return found.view(*ids.shape[:2], -1)

    def _figures(self, embeddings: Tensor) -> dict[str, Tensor]:
        embeddings = embeddings.detach()
        figures = {"accuracy": _accuracy(embeddings)}
        for size in self.sizes or ():
            figures[f"accuracy/{size}"] = _accuracy(embeddings[..., :size])
        return figures

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self._longest = getattr(getattr(trainer_of(self), "datamodule", None), "max_length", self._longest)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[_KEY] = {"longest": self._longest}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check the checkpoint as `LanguageModeling` does. Raise ConfigurationError for one of another task."""
        if _KEY not in checkpoint:
            raise ConfigurationError("TextEmbedding: this is not a checkpoint of TextEmbedding: name a folder as model")
        self._longest = self._longest or checkpoint[_KEY]["longest"]
        super().on_load_checkpoint(checkpoint)

    def exported_files(self) -> dict[str, str]:
        """Return the files by which sentence-transformers finds pooling and normalisation."""
        config: Any = self._built().config
        modes = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}
        pooling = {f"pooling_mode_{mode}": name == self.pooling for name, mode in modes.items()}
        kinds = ["Transformer", "Pooling", *["Normalize"] * self.normalize]
        places = ["", "1_Pooling", "2_Normalize"]
        modules = []
        for number, (kind, path) in enumerate(zip(kinds, places)):
            entry = {"name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            modules.append({"idx": number, **entry})
        files = {
            "modules.json": modules,
            "sentence_bert_config.json": {"max_seq_length": self._longest, "do_lower_case": False},
            "config_sentence_transformers.json": {"prompts": {}, "similarity_fn_name": "cosine"},
            "1_Pooling/config.json": {"word_embedding_dimension": config.get_text_config().hidden_size, **pooling},
        }
        if self.normalize:
            files["2_Normalize/config.json"] = {}
        return {name: json.dumps(content, indent=2) + "\n" for name, content in files.items()}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the mean loss, and the loss of each row ``[B]`` for techniques that reweight samples."""
        embeddings = self._embedded(batch)
        losses = info_nce(embeddings, self.temperature, self.sizes)
        loss = losses.mean()
        self._log_step(loss, **self._figures(embeddings))
        return {"loss": loss, "sample_loss": losses}

    def num_tokens(self, batch: dict[str, Tensor]) -> int:
        """Return the number of rows in a batch, by which `TokenWeightedAccumulation` weights batches."""
        return len(batch["input_ids"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._log_batch(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._log_batch(batch, "test")

    def _log_batch(self, batch: Mapping[str, Tensor], prefix: str) -> None:
        embeddings = self._embedded(batch)
        figures = {"loss": info_nce(embeddings, self.temperature, self.sizes).mean(), **self._figures(embeddings)}
        for name, value in figures.items():
            self.log(f"{prefix}/{name}", value, prog_bar=True, batch_size=len(embeddings), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """Do nothing, because the steps have logged all figures."""

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return embeddings ``[B, D]``, or for rows of texts the lead of the positive ``[B]``."""
        if batch["input_ids"].ndim == 2:
            return self(**self._inputs(batch))
        scores = similarities(self._embedded(batch))
        own = scores.diagonal().clone()
        scores.fill_diagonal_(-torch.inf)
        return own - scores.amax(1)


def _set_pooler_aside(network: nn.Module) -> None:
    """Freeze the layer that some encoders have for classification, in place."""
    pooler = getattr(network, "pooler", None)
    if isinstance(pooler, nn.Module):
        mix_in(pooler.requires_grad_(False), UnusedPart)


def _accuracy(embeddings: Tensor) -> Tensor:
    """Return the share of anchors whose positive is the most similar text."""
    best = similarities(embeddings).argmax(1)
    return (best == torch.arange(len(best), device=best.device)).float().mean()
