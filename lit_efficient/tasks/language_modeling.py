"""Train a GPT to predict the next token of text, and let it write.

    loss = -mean_t log p(token_{t+1} | token_1 ... token_t)

A checkpoint holds the configuration and the tokenizer: ``LanguageModeling.load_from_checkpoint(path)`` alone gives a
model that generates text, and a checkpoint never meets tokens of another tokenizer unnoticed.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.next_token import sample_means, token_losses
from lit_efficient.models.gpt import GPT, GPTConfig
from lit_efficient.models.sampling import check_sampling
from lit_efficient.optimizers.schedules import warmup_cosine
from lit_efficient.tasks.token_metrics import TokenMetrics

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CHECKPOINT_KEY = "language_modeling"
_MAY_DIFFER = {"dropout", "max_length"}  # of a configuration: weights mean the same under any value of these
_DEFAULT_MODEL = GPTConfig()


class LanguageModeling(LightningModule):
    """Next-token prediction on batches ``{"input_ids": [B, T], "labels": [B, T]}``; labels are already shifted.

    Logs ``train/loss``, and ``loss``, ``perplexity`` and (for batches with ``num_bytes`` ``[B]``) ``bits_per_byte``
    under ``val/`` and ``test/``. Prediction continues the texts of a batch ``{"prompts": [...]}``, and gives the loss
    of each sequence ``[B]`` for a batch of tokens.

    Args:
        model: shape of the network; ``vocab_size`` null is taken from the data.
        learning_rate: peak rate of AdamW, used unless the configuration has an ``optimizer`` of its own.
        weight_decay: of the matrices; vectors (norms) have none.
        warmup_steps: optimizer steps until the peak; half a cosine to 0 at the end of training follows.
    """

    def __init__(
        self,
        model: GPTConfig = _DEFAULT_MODEL,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
    ) -> None:
        super().__init__()
        if isinstance(model, Mapping):  # as hyper-parameters are stored: a safe load gives primitives only
            model = GPTConfig(**model)
        if learning_rate <= 0:
            raise ConfigurationError(f"LanguageModeling: learning_rate must be above 0, got {learning_rate}.")
        if weight_decay < 0:
            raise ConfigurationError(f"LanguageModeling: weight_decay must be at least 0, got {weight_decay}.")
        if warmup_steps < 0:
            raise ConfigurationError(f"LanguageModeling: warmup_steps must be at least 0, got {warmup_steps}.")
        self.model = model
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.save_hyperparameters(
            {
                "model": asdict(model),
                "learning_rate": learning_rate,
                "weight_decay": weight_decay,
                "warmup_steps": warmup_steps,
            }
        )
        self.network: GPT | None = None
        self.tokenizer_json: str | None = None
        self.epoch_metrics = TokenMetrics()  # of the validation or test epoch under way

    # building

    def setup(self, stage: str) -> None:
        """Take the tokenizer from the datamodule, if it has one."""
        tokenizer = getattr(self._datamodule(), "tokenizer", None)
        if tokenizer is not None:
            self._adopt_tokenizer(tokenizer.to_str(), "the data")

    def configure_model(self) -> None:
        """Build the network, once. Without data and a vocabulary size it waits for the checkpoint's."""
        offered = getattr(self._datamodule(), "vocab_size", None)
        wanted = self.model.vocab_size
        if offered is not None and wanted is not None and wanted != offered:
            raise ConfigurationError(
                f"LanguageModeling: model.vocab_size must be that of the data, {offered} (or null to take it), got "
                f"{wanted}."
            )
        vocab_size = wanted or offered
        if self.network is None and vocab_size is not None:
            self.network = GPT(replace(self.model, vocab_size=vocab_size))
        if self.network is None and self._trainer is not None:
            raise ConfigurationError(
                "LanguageModeling: model.vocab_size must be a number when the data is not a datamodule with vocab_size."
            )
        if self.network is not None and offered not in {None, self.network.config.vocab_size}:
            raise ConfigurationError(
                f"LanguageModeling: the network was built for {self.network.config.vocab_size} token ids, the data has "
                f"{offered}."
            )

    def configure_optimizers(self) -> Any:
        """AdamW over what trains, with `warmup_cosine` over the steps of the run."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW([g for g in groups if g["params"]], self.learning_rate, betas=(0.9, 0.95))
        schedule = partial(warmup_cosine, warmup=self.warmup_steps, total=self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # steps

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits ``[B, T, V]`` for ``[B, T]``."""
        return self._built()(input_ids)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Loss over all tokens of the batch, and over those of each sequence for who reweights them."""
        loss, sample_loss = sample_means(self._losses(batch), batch["labels"])
        self.log("train/loss", loss, prog_bar=True)
        return {"loss": loss, "sample_loss": sample_loss}

    def on_validation_epoch_start(self) -> None:
        """Forget an epoch that was interrupted."""
        self.epoch_metrics.reset()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add the batch to the figures of the epoch."""
        self.epoch_metrics.update(self._losses(batch), batch["labels"], batch.get("num_bytes"))

    def on_validation_epoch_end(self) -> None:
        """Log the figures of the epoch."""
        self._log_epoch("val")

    def on_test_epoch_start(self) -> None:
        """As for validation."""
        self.on_validation_epoch_start()

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """As for validation."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """As for validation, under ``test/``."""
        self._log_epoch("test")

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> list[str] | Tensor:
        """Continued texts for ``prompts``, else the loss of each sequence ``[B]``."""
        if "prompts" in batch:
            return self.generate_text(batch["prompts"])
        return sample_means(self._losses(batch), batch["labels"])[1]

    # text

    @property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer that the network was trained with."""
        from tokenizers import Tokenizer

        if self.tokenizer_json is None:
            raise ConfigurationError(
                "LanguageModeling: no tokenizer: train on a datamodule that has one, or load a checkpoint that was."
            )
        return Tokenizer.from_str(self.tokenizer_json)

    def generate_text(
        self,
        prompts: str | list[str],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.8,
        top_p: float = 0.95,
        seed: int = 0,
    ) -> list[str]:
        """Continue each text; the global random state is neither read nor changed.

        Args:
            prompts: texts to continue. A text does best without a space at its end: tokens begin with theirs.
            max_new_tokens: tokens to add, below ``max_length`` of the model; the prompt's last ones that fit are used.
            temperature: at least 0; 0 takes the likeliest token.
            top_p: draw among the likeliest tokens that together have this probability, in (0, 1].
            seed: prompt number i is continued with the seed ``seed + i``.

        Returns:
            The prompts with their continuations, up to where the model ends the text.
        """
        from lit_efficient.data.token_cache import END_OF_TEXT

        check_sampling("generate_text", temperature, top_p)
        network, tokenizer = self._built(), self.tokenizer
        room = network.config.max_length - max_new_tokens
        if max_new_tokens < 1 or room < 1:
            raise ConfigurationError(
                f"generate_text: max_new_tokens must be in [1, {network.config.max_length - 1}] (below the model's "
                f"max_length), got {max_new_tokens}."
            )
        end = tokenizer.token_to_id(END_OF_TEXT)
        texts = []
        for index, prompt in enumerate([prompts] if isinstance(prompts, str) else prompts):
            ids = tokenizer.encode(prompt).ids[-room:]
            if not ids:  # an empty prompt starts a new text
                if end is None:
                    raise ConfigurationError(f"generate_text: prompts must not be empty without a token {END_OF_TEXT}.")
                ids = [end]
            output = network.generate(
                torch.tensor([ids], device=self.device),
                max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                generator=torch.Generator(self.device).manual_seed(seed + index),
            )
            new = output[0, len(ids) :].tolist()
            texts.append(prompt + tokenizer.decode(new[: new.index(end)] if end in new else new))
        return texts

    # checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what is needed to build the network and to read its tokens."""
        checkpoint[_CHECKPOINT_KEY] = {"model": asdict(self._built().config), "tokenizer": self.tokenizer_json}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the network if that is still to be done; refuse weights or tokens that mean something else."""
        saved = checkpoint.get(_CHECKPOINT_KEY)
        if saved is None:
            if self.network is None:
                raise ConfigurationError("LanguageModeling: this checkpoint is not one of LanguageModeling.")
            return
        if saved["tokenizer"] is not None:  # first: another tokenizer is why vocabularies differ in size
            self._adopt_tokenizer(saved["tokenizer"], "the checkpoint")
        theirs = GPTConfig(**saved["model"])
        if self.network is None:
            self.network = GPT(replace(self.model, vocab_size=theirs.vocab_size))
        _check_same_network(self.network.config, theirs)

    # helpers

    def _built(self) -> GPT:
        if self.network is None:
            raise ConfigurationError(
                "LanguageModeling: the network is not built yet; a Trainer or a checkpoint does it."
            )
        return self.network

    def _datamodule(self) -> object | None:
        return None if self._trainer is None else getattr(self._trainer, "datamodule", None)

    def _adopt_tokenizer(self, tokenizer_json: str, origin: str) -> None:
        if self.tokenizer_json not in {None, tokenizer_json}:
            raise ConfigurationError(
                f"LanguageModeling: the tokenizer of {origin} is not the one this model has: its token ids would mean "
                "other text. Save the model's (`model.tokenizer.save('tokenizer.json')`) and give it to the data as "
                "tokenizer_file."
            )
        self.tokenizer_json = tokenizer_json

    def _losses(self, batch: dict[str, Tensor]) -> Tensor:
        return token_losses(self(batch["input_ids"]), batch["labels"])

    def _log_epoch(self, prefix: str) -> None:
        # compute() has already summed over processes; sync_dist averages equal numbers and keeps Lightning quiet.
        figures = {f"{prefix}/{name}": value for name, value in self.epoch_metrics.compute().items()}
        self.log_dict(figures, prog_bar=True, sync_dist=True)


def _check_same_network(ours: GPTConfig, theirs: GPTConfig) -> None:
    resolved = [
        asdict(config) | {"num_kv_heads": config.kv_heads, "hidden_dim": config.mlp_dim} for config in (ours, theirs)
    ]
    different = [
        f"{name} is {resolved[1][name]} in the checkpoint and {value} here"
        for name, value in resolved[0].items()
        if value != resolved[1][name] and name not in _MAY_DIFFER
    ]
    if different:
        raise ConfigurationError(f"LanguageModeling: a checkpoint of another network: {'; '.join(different)}.")
