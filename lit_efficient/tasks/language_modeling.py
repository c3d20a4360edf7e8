"""Train a language model on next-token prediction, and generate text: the GPT of this package or a Hugging Face model.

    loss = -mean_t log p(token_{t+1} | token_1 ... token_t)

A checkpoint contains the config and the tokenizer. ``LanguageModeling.load_from_checkpoint(path)`` returns a model that
can generate text, and loading a checkpoint with another tokenizer raises an error.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lit_efficient.application.recorded import on_read
from lit_efficient.callbacks.token_weighted_accumulation import TokenWeightedAccumulation
from lit_efficient.data.text.chat_tokenizer import pack_tokenizer, token_ids, unknown_ids, unpack_tokenizer
from lit_efficient.data.text.image_texts import ImageTexts
from lit_efficient.data.text.message_images import Image
from lit_efficient.distributed.row_slices import ROW_POSITIONS, mean_over_rows
from lit_efficient.distributed.weight_slices import built_empty
from lit_efficient.errors import CheckpointError, ChecksTypes, ConfigurationError, check_choice, check_number, refusal
from lit_efficient.files.records import rebuild
from lit_efficient.internals.hugging_face import generation_json, masks_unread, take_generation
from lit_efficient.internals.hugging_face_loading import Replacing
from lit_efficient.internals.lightning_loops import accumulates, arrives_unchanged
from lit_efficient.internals.lightning_metrics import logs_in_bar
from lit_efficient.internals.lightning_trainer import logger_connector, trainer_of
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.losses.next_token import IGNORE, sample_means, targets_of, token_losses
from lit_efficient.losses.token_weighting import Kind, TokenWeighting
from lit_efficient.mechanisms.documents import DocumentRows
from lit_efficient.mechanisms.router_balance import RouterBalance
from lit_efficient.models.generation.sampling import Sampling
from lit_efficient.models.libraries import causal_lm
from lit_efficient.models.libraries.causal_lm import (
    CausalLMConfig,
    Head,
    learned_positions,
    positions_of,
    resolve,
    rotary_length,
)
from lit_efficient.models.networks.gpt import GPT, GPTConfig
from lit_efficient.optimizers.fused_adamw import FusedAdamW
from lit_efficient.optimizers.schedules import warmup_cosine
from lit_efficient.protocol import builds_no_layers
from lit_efficient.surgery import NEW_ROWS
from lit_efficient.tasks.deferred_weights import weights_may_wait
from lit_efficient.tasks.source_losses import SourceLosses
from lit_efficient.tasks.text_generation import BATCH_SIZE, as_chat, continuations, pictured_chat
from lit_efficient.tasks.token_metrics import TokenMetrics
from lit_efficient.traits import Trait, has_trait

_CHECKPOINT_KEY = "language_modeling"
_MAY_DIFFER = {"dropout", "max_length"}  # fields of GPTConfig that may differ from those of a checkpoint
# Fields of a config of transformers that must agree with those of a checkpoint.
_HF_SHAPE = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "n_embd", "n_layer", "n_head", "rope_theta", "rope_parameters", "rope_scaling", "rms_norm_eps"),
    *("layer_norm_epsilon", "hidden_act", "activation_function", "sliding_window", "layer_types"),
    *("num_experts_per_tok", "final_logit_softcapping", "attn_logit_softcapping"),
)
_DEFAULT_MODEL = GPTConfig()


class LanguageModeling(ChecksTypes, LightningModule):
    """Next-token prediction on batches ``{"input_ids": [B, T], "labels": [B, T]}``.

    Labels are aligned with ``input_ids`` as in transformers, and -100 is ignored. A batch may contain ``shift_labels``
    instead, which are already shifted. ``attention_mask`` ``[B, T]`` and ``position_ids`` (which restart at 0 in every
    document of a packed row) are passed to the network, and all other entries that its ``forward`` takes, such as
    ``pixel_values`` of images. Before the first batch, a probe checks that the network is causal, and finds out how it
    separates the documents of a row. If it cannot, packed rows raise an error.

    For a mixture of experts of transformers, the balancing loss of its routers is added to the loss and logged as
    ``train/router_loss``, with the coefficient of its configuration. Padding does not count.
    ``config_fields: {output_router_logits: false}`` leaves it out. A log line names architectures for which
    transformers computes none.

    Random weights are drawn on the device of the run, so a GPU and a CPU give different weights for one seed.

    ``weighting`` changes the training loss only: validation computes the cross-entropy. Formulas:
    :mod:`lit_efficient.losses.token_weighting`.

    Logs ``train/loss``, and ``loss``, ``perplexity`` and (for batches with ``num_bytes`` ``[B]``) ``bits_per_byte``
    under ``val/`` and ``test/``. For a mixture of data sets the loss of each source is logged, too: ``val/loss/NAME``,
    and ``train/loss/NAME`` over the batches since the last log. Prediction continues the texts of a batch
    ``{"prompts": [...]}``, and returns the loss of each sequence ``[B]`` for a batch of tokens.

    Args:
        model: A `GPTConfig`, the shape of this package's GPT, or a `CausalLMConfig` (``name_or_path`` or ``config``) of
            a Hugging Face model. ``vocab_size`` null takes that of the data.
        learning_rate: Peak learning rate of AdamW: 1e-5 to 2e-5 for all weights of a pretrained model, ten times more
            for adapters, and the default for random weights. It is not used if the config sets an ``optimizer``.
        weight_decay: Weight decay of the matrices. Vectors (norms) have none.
        warmup_steps: Optimizer steps of the warm-up, which is followed by half a cosine to 0 at the end of training.
        weighting: Weight of each training token, without a gradient: ``dft``, its probability; ``eaft``, the entropy of
            the prediction. null: 1.
        eaft_alpha: Exponent of the entropy for eaft, above 0. null takes 1.
    """

    logs: ClassVar[tuple[str, ...]] = (
        "train/loss",
        "train/router_loss",
        "val/loss",
        "val/perplexity",
        "val/bits_per_byte",
    )
    loads_as: ClassVar[str] = "LanguageModeling"  # public class as which checkpoints of this task are loaded
    trains_on: ClassVar[tuple[str, ...]] = ("tokens",)
    takes_slices: ClassVar[bool] = True  # supports rows whose length is split over processes
    compares_log_probs: ClassVar[bool] = False  # the loss is no cross-entropy, but made of log-probabilities
    lacks_balance: ClassVar[str | None] = None  # reason why the balancing loss of routers cannot be added
    commands_after_fit: ClassVar[tuple[str, ...]] = ("generate --ckpt {ckpt} {prompt}",)
    export_format: ClassVar[str | None] = None  # the default of `export`, which finds the base of adapters
    cannot_generate: ClassVar[str | None] = None  # reason why the model continues no texts

    def __init__(
        self,
        model: GPTConfig | CausalLMConfig = _DEFAULT_MODEL,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
        weighting: Kind | None = None,
        eaft_alpha: float | None = None,
    ) -> None:
        super().__init__()
        if isinstance(model, Mapping):  # from the hyper-parameters of a checkpoint, which are primitives
            named = "config_fields" in model
            model = rebuild(CausalLMConfig, model) if named else rebuild(GPTConfig, model)
        if not isinstance(model, GPTConfig | CausalLMConfig):
            raise refusal("LanguageModeling", "model", "a GPTConfig or a CausalLMConfig", model)
        check_number("LanguageModeling", "learning_rate", learning_rate, above=0)
        check_number("LanguageModeling", "weight_decay", weight_decay, least=0)
        check_number("LanguageModeling", "warmup_steps", warmup_steps, least=0, whole=True)
        check_choice("LanguageModeling", "weighting", weighting, ("dft", "eaft"), null=True)
        check_number("LanguageModeling", "eaft_alpha", eaft_alpha, above=0, null=True)
        if eaft_alpha is not None and weighting != "eaft":
            allowed = f"null with the weighting {weighting or 'null'}, because only eaft uses it"
            raise refusal("LanguageModeling", "eaft_alpha", allowed, eaft_alpha)
        self.model = model
        self.weighting = weighting
        self.eaft_alpha = eaft_alpha
        self._weighting: TokenWeighting | None = None
        if weighting is not None:
            self._weighting = TokenWeighting(weighting, 1.0 if eaft_alpha is None else eaft_alpha)
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.save_hyperparameters(
            {
                "model": asdict(model),
                "learning_rate": learning_rate,
                "weight_decay": weight_decay,
                "warmup_steps": warmup_steps,
                "weighting": weighting,
                "eaft_alpha": eaft_alpha,
            }
        )
        self.network: nn.Module | None = None
        self.tokenizer_state: dict[str, Any] | None = None
        self._unpacked: tuple[dict[str, Any], Any] | None = None  # the state with its tokenizer, which loads slowly
        self.epoch_metrics = TokenMetrics()  # of the current validation or test epoch
        # Losses by source of a mixture: since the last log, and of the current validation or test epoch.
        self.step_sources: SourceLosses | None = None
        self.epoch_sources: SourceLosses | None = None
        self._rows = DocumentRows(type(self).__name__)
        self._routers: tuple[nn.Module, RouterBalance] | None = None
        self._new_ids: list[int] = []  # ids of the tokens that the data calls new
        # Of the batch that was transferred last: the number of labels, and of those that are not ignored.
        self._learned: tuple[int, int] | None = None

    @builds_no_layers
    def setup(self, stage: str) -> None:
        """Take the tokenizer of the data module, if it has one. One with a chat template takes precedence."""
        data = getattr(trainer_of(self), "datamodule", None)
        # A new one, because techniques may have changed the network since the last run.
        self._rows = DocumentRows(type(self).__name__, getattr(data, "max_length", None))
        # `plan` also builds the network for data that cannot be read, which then has no tokenizer.
        name = "chat_tokenizer" if hasattr(data, "chat_tokenizer") else "tokenizer"
        tokenizer = getattr(data, name, None)
        self._new_ids = [] if tokenizer is None else list(getattr(data, "new_ids", ()))
        names_of = getattr(data, "source_names", None)
        if names_of is not None:
            self.step_sources = SourceLosses(names_of("train")) if names_of("train") else None
            self.epoch_sources = SourceLosses(names_of("val")) if names_of("val") else None
        if tokenizer is not None:
            processor = getattr(data, "processor", None)
            beside = {} if processor is None else processor.packed
            self._adopt_tokenizer(pack_tokenizer(tokenizer, getattr(data, "stop_ids", ()), beside), "the data")

    def configure_callbacks(self) -> list[Callback]:
        trainer: Any = self.trainer
        several = trainer.accumulate_grad_batches > 1 or trainer.world_size > 1
        several = several or any(_changes_accumulation(callback) for callback in trainer.callbacks)
        if not several or any(isinstance(callback, TokenWeightedAccumulation) for callback in trainer.callbacks):
            return []
        if trainer.strategy.handles_gradient_accumulation:
            name = type(trainer.strategy).__name__
            rank_zero_warn(
                f"{name} gives all batches of a step the same weight, whatever their number of tokens: pack them"
            )
            return []
        return [TokenWeightedAccumulation()]

    @property
    def head(self) -> Head:
        """Model of transformers around the body; the causal one."""
        return causal_lm.CAUSAL

    @property
    def max_length(self) -> int | None:
        """Largest length of a sequence, or ``None`` for a Hugging Face model without learned positions."""
        if isinstance(self.network, GPT):
            return self.network.config.max_length
        if isinstance(self.model, GPTConfig):
            return self.model.max_length
        return positions_of(self.model, self.head) if self.network is None else learned_positions(self.network)

    @property
    def rotary_length(self) -> int | None:
        """Number of positions for which a Hugging Face model's rotary embedding is made, or ``None`` without an end."""
        if not isinstance(self.model, CausalLMConfig):
            return None
        network: Any = self.network
        return rotary_length(resolve(self.model) if network is None else network.config)

    @property
    def reads_images(self) -> bool:
        """Return whether the model reads images, too."""
        return isinstance(self.model, CausalLMConfig) and causal_lm.reads_images(self.model)

    def num_tokens(self, batch: dict[str, Tensor]) -> int:
        """Return the number of tokens in a batch that contribute to the loss."""
        return int((targets_of(batch) != IGNORE).sum())

    def configure_model(self) -> None:
        waits = self._builds_alone() and weights_may_wait(self)
        if isinstance(self.model, CausalLMConfig):
            by_data = self.model.takes_vocabulary or self.model.resize_vocabulary
            lacks = by_data and self.tokenizer_state is None and trainer_of(self) is None
            if self.network is None and not lacks:
                from_data = {} if self.tokenizer_state is None else token_ids(self.tokenizer)
                make = partial(causal_lm.build, self.model, from_data, self._replacing(), self.head)
                empty = causal_lm.build_empty(self.model, from_data) if waits else None
                self.network = empty or (built_empty(make) if waits and self.model.draws_weights else make())
                causal_lm.freeze_parts(self.model, self.network)
                if not self.model.draws_weights:
                    self._note_new_tokens(self.model)
                message = causal_lm.format_advice(self.model)
                if message:
                    rank_zero_info(f"{type(self).__name__}: {message}")
            if self.network is not None:
                self._check_routers()
            return
        offered = getattr(getattr(trainer_of(self), "datamodule", None), "vocab_size", None)
        wanted = self.model.vocab_size
        if offered is not None and wanted is not None and wanted != offered:
            allowed = f"that of the data, {offered} (or null to take it)"
            raise refusal("LanguageModeling", "model.vocab_size", allowed, wanted)
        vocab_size = wanted or offered
        if self.network is None and vocab_size is not None:
            draw = partial(GPT, replace(self.model, vocab_size=vocab_size))
            self.network = built_empty(draw) if waits else draw()
        if self.network is None and trainer_of(self) is not None:
            raise refusal("LanguageModeling", "model.vocab_size", "a number for data without vocab_size", wanted)
        if isinstance(self.network, GPT) and offered not in {None, self.network.config.vocab_size}:
            raise ConfigurationError(
                f"LanguageModeling: the network was built for {self.network.config.vocab_size} token ids, but the data "
                f"has {offered}"
            )

    def _note_new_tokens(self, model: CausalLMConfig) -> None:
        """Record the tokens that are new to a base: those that the data names, and those that its tokenizer lacks."""
        data = getattr(trainer_of(self), "datamodule", None)
        ids = set(self._new_ids)
        if self.tokenizer_state is not None and getattr(data, "tokenizer_name", None) != model.name_or_path:
            unknown = unknown_ids(self.tokenizer, str(model.name_or_path))
            if unknown:
                rank_zero_info(
                    f"{type(self).__name__}: {len(unknown)} tokens of the data's tokenizer, ids {unknown[0]} to "
                    f"{unknown[-1]}, are new: the tokenizer of {model.name_or_path} has other tokens there, or none"
                )
            ids |= {*unknown}
        network: Any = self._built()
        _note_new_rows(network, sorted(ids))
        tokenizer: Any = self.tokenizer if NEW_ROWS in network.__dict__ else None
        pad = getattr(tokenizer, "pad_token_id", None)
        if pad is not None and pad != tokenizer.eos_token_id:  # it contributes to no loss
            network.__dict__[NEW_ROWS] = [index for index in network.__dict__[NEW_ROWS] if index != pad]

    def _check_routers(self) -> None:
        """Say why routers of experts train without a balancing loss, before a fit."""
        message = self._balance().message
        trainer = trainer_of(self)
        if message and trainer is not None and trainer.training:
            rank_zero_info(message)

    def configure_optimizers(self) -> Any:
        """Return AdamW over the parameters that train, with `warmup_cosine` over the steps of the run."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = FusedAdamW(
            trained, self.learning_rate, (0.9, 0.95), weight_decay=self.weight_decay, decay_norm_and_bias=False
        )
        steps = self.trainer.estimated_stepping_batches
        if self.warmup_steps > steps / 2:
            rank_zero_info(
                f"{type(self).__name__}: warmup_steps is {self.warmup_steps}, which is more than half of the run's "
                f"{steps:g} steps: the learning rate is too low for most of the run. Set model.warmup_steps to about "
                f"{max(1, steps // 10):g}, or train for more epochs"
            )
        schedule = partial(warmup_cosine, warmup=self.warmup_steps, total=steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        if hasattr(self.network, "token_losses") and self.device.type != "cpu" and arrives_unchanged(self.trainer):
            wrap_method(self.trainer.strategy, "batch_to_device", _batch_to_device)

    def on_train_end(self) -> None:
        unwrap_method(self.trainer.strategy, "batch_to_device", _batch_to_device)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits ``[B, T, V]`` for token ids ``[B, T]``."""
        output = self._built()(input_ids)
        return output if isinstance(output, Tensor) else output.logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the mean loss over all tokens, and over each sequence ``[B]`` for techniques that reweight samples."""
        losses, targets, router_loss = self._losses(batch, self._weighting)
        loss, sample_loss = sample_means(losses, targets)
        logged = loss
        if ROW_POSITIONS in batch:  # this process has a part of each row
            logged = mean_over_rows(losses, targets)
        self.log("train/loss", logged, prog_bar=logs_in_bar(loss))
        self._log_sources(losses, targets, batch)
        output = {"loss": loss, "sample_loss": sample_loss}
        if router_loss is not None:
            self.log("train/router_loss", router_loss)
            output |= {"loss": loss + router_loss, "extra_loss": router_loss}
        return output

    def on_validation_epoch_start(self) -> None:
        self.epoch_metrics.reset()
        if self.epoch_sources is not None:
            self.epoch_sources.reset()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        losses, targets, _ = self._losses(batch)
        self._add_to_epoch(losses, targets, batch)

    def on_validation_epoch_end(self) -> None:
        self._log_epoch("val")

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        self._log_epoch("test")

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> list[str] | Tensor:
        """Return continued texts for ``prompts``, else the loss of each sequence ``[B]``."""
        if "prompts" in batch:
            return self.generate_text(batch["prompts"])
        losses, targets, _ = self._losses(batch)
        return sample_means(losses, targets)[1]

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model, of the same class as that of the data."""
        if self.tokenizer_state is None:
            raise ConfigurationError(
                "LanguageModeling: no tokenizer: train on a data module with a tokenizer, or load such a checkpoint"
            )
        if self._unpacked is None or self._unpacked[0] is not self.tokenizer_state:
            self._unpacked = (self.tokenizer_state, unpack_tokenizer(self.tokenizer_state))
        return self._unpacked[1]

    def generate_text(
        self,
        prompts: str | list[str],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.8,
        top_p: float = 0.95,
        seed: int = 0,
        chat: bool = False,
        batch_size: int = BATCH_SIZE,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: Sequence[str] = (),
        images: Sequence[Sequence[Image]] = (),
        adapters: str | Sequence[str | None] = (),
        with_prompts: bool = True,
    ) -> list[str]:
        """Return prompts with their continuations, without reading or changing the global random state.

        Args:
            prompts: Texts to continue. They should not end with a space, because tokens begin with their own.
            max_new_tokens: Largest number of new tokens, below ``max_length`` of the model. A long prompt is cut at its
                beginning.
            temperature: At least 0. 0 always takes the most likely token.
            top_p: Draw from the most likely tokens that together have this probability, in (0, 1].
            seed: Prompt number i is continued with the seed ``seed + i``.
            chat: Answer each prompt as a user's turn, in the tokenizer's chat template.
            batch_size: Largest number of prompts in a batch. The result does not depend on it.
            top_k: Draw from this many most likely tokens. 0 is all.
            min_p: Draw from tokens whose probability is at least this share of the largest one, in [0, 1].
            repetition_penalty: Above 0. Values above 1 make tokens less likely that already occur in the text.
            stop: Texts that end a continuation. It is cut before them.
            images: For each prompt its images, as paths or encoded bytes, or an empty list. They come before its text,
                or at the places of ``<image>`` in it. Needs ``chat``. Each prompt with images is a batch.
            adapters: Adapter that continues the prompts, if ``LoRA`` has several (``beside``): a name, or for each
                prompt a name, or None for the base alone.
            with_prompts: False returns the continuations alone, which are the answers with ``chat``.
        """
        self._check_generates()
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        tokenizer = self.tokenizer
        if images:
            self._check_images(texts, images, chat)
        pictured = {}
        for i, text in enumerate(texts):
            if images and images[i]:
                texts[i], pictured[i] = pictured_chat(ImageTexts(self.tokenizer_state or {}), text, images[i])
            elif chat:
                texts[i] = as_chat(tokenizer, text)
        found = self.continuations(
            tokenizer,
            texts,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature, top_p, top_k, min_p, repetition_penalty),
            seeds=range(seed, seed + len(texts)),
            special=not chat,
            batch_size=batch_size,
            endings=stop,
            pictured=pictured,
            adapters=[adapters] * len(texts) if isinstance(adapters, str) else adapters,
        )
        return [text + new if with_prompts else new for text, (new, _) in zip(texts, found)]

    def continuations(self, tokenizer: Any, prompts: list[str], **how: Any) -> list[tuple[str, bool]]:
        """Return the continuation of each prompt, and whether it has ended. ``how``: see `text_generation`."""
        self._check_generates()
        stop = set((self.tokenizer_state or {}).get("stop", ()))
        return continuations(self._built(), tokenizer, prompts, stop=stop, device=self.device, **how)

    def _check_images(self, texts: Sequence[str], images: Sequence[Sequence[Image]], chat: bool) -> None:
        if not chat:
            raise refusal("generate_text", "chat", "true with images, whose places the chat template writes", chat)
        if len(images) != len(texts) or any(isinstance(own, str | bytes) for own in images):
            raise refusal("generate_text", "images", f"a list of images for each of the {len(texts)} prompts", images)
        if "processor" not in (self.tokenizer_state or {}):
            raise ConfigurationError(
                "generate_text: images need a model that was trained with a processor (data.processor), and this one "
                "has a tokenizer only"
            )

    def exported_files(self) -> dict[str, str]:
        """Return further files of a merged export by their names, for another library than transformers."""
        return {}

    def _check_generates(self) -> None:
        if self.cannot_generate is not None:
            raise ConfigurationError(f"{type(self).__name__}: {self.cannot_generate}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[_CHECKPOINT_KEY] = {
            "task": self.loads_as,
            "model": described_network(self._built()),
            "generation": generation_json(self._built()),
            "tokenizer": self.tokenizer_state,
            "source_sums": None if self.step_sources is None else self.step_sources.sums.detach().cpu(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the network if necessary. Raise ConfigurationError for another network or another tokenizer."""
        saved = checkpoint.get(_CHECKPOINT_KEY)
        if saved is None:
            if self.network is None:
                raise ConfigurationError("LanguageModeling: this is not a checkpoint of LanguageModeling")
            return
        if saved["tokenizer"] is not None:  # checked first: its error explains why sizes of vocabularies differ
            ours = self.tokenizer_state
            self._adopt_tokenizer(saved["tokenizer"], "the checkpoint")
            if ours is not None:  # training continues with the chat template of the data
                self.tokenizer_state = ours
        if self.network is None:
            self.network = self._rebuilt(saved["model"], checkpoint)
            if isinstance(self.model, CausalLMConfig):
                causal_lm.freeze_parts(self.model, self.network)
            _note_new_rows(self.network, saved["model"].get("new_rows", ()))
            take_generation(self.network, saved["generation"])
        _check_same_network(described_network(self.network), saved["model"])
        sums = saved.get("source_sums")
        if self.step_sources is not None and sums is not None and sums.shape == self.step_sources.sums.shape:
            self.step_sources.sums = sums.to(self.step_sources.sums)

    def _rebuilt(self, described: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> nn.Module:
        """Build the network of a checkpoint. Its weights are loaded later, except those of a base under adapters.

        Raises:
            CheckpointError: If the weights of the base are neither in the checkpoint nor named by the config.
        """
        state = checkpoint["state_dict"]
        named = isinstance(self.model, CausalLMConfig) and not self.model.draws_weights
        lost = [name for name in checkpoint.get("lit_efficient", {}).get("base", {}) if name not in state]
        if lost and not named and getattr(self, "start_from", None) is None:
            raise CheckpointError(
                f"the checkpoint contains adapters without their base: it lacks {len(lost)} frozen tensors, first "
                f"{lost[0]!r}. Name the base, or train with save_base=True"
            )
        if "hugging_face" not in described:
            model = self.model if isinstance(self.model, GPTConfig) else rebuild(GPTConfig, described)
            return GPT(replace(model, vocab_size=described["vocab_size"]))
        config = causal_lm.read_config(described["hugging_face"])
        with torch.device("meta"):
            empty = causal_lm.from_json(config, head=self.head)
        needed = {f"network.{name}" for name, _ in empty.named_parameters()}
        whole = needed <= state.keys()  # checkpoints of adapters do not contain the base
        if isinstance(self.model, CausalLMConfig) and named and (self.model.quantize or not whole):
            from_data = {"vocab_size": int(empty.config.get_text_config().vocab_size)}
            return causal_lm.build(self.model, from_data, self._replacing(checkpoint), self.head)
        name = self.model.dtype if isinstance(self.model, CausalLMConfig) else "float32"
        dtype = getattr(torch, name, torch.float32)
        dtypes = {value.dtype for key, value in state.items() if key in needed and value.is_floating_point()}
        if name == "auto" and len(dtypes) == 1:
            (dtype,) = dtypes
        return causal_lm.from_json(config, dtype, whole, self.head)

    def _replacing(self, checkpoint: Mapping[str, Any] | None = None) -> Replacing | None:
        """Return the layers that techniques replace while weights are read.

        ``None`` if a subclass changes the network before the techniques do.
        """
        restored = checkpoint is not None and getattr(self, "start_from", None) is None
        return on_read(self, "network.", checkpoint) if restored or self._builds_alone() else None

    def _builds_alone(self) -> bool:
        """Return whether no subclass changes the network before the techniques do."""
        return type(self).configure_model is LanguageModeling.configure_model

    def _built(self) -> nn.Module:
        if self.network is None:
            raise ConfigurationError("LanguageModeling: no Trainer or checkpoint has built the network yet")
        return self.network

    def _adopt_tokenizer(self, state: dict[str, Any], origin: str) -> None:
        if self.tokenizer_state is not None and self.tokenizer_state["json"] != state["json"]:
            raise ConfigurationError(
                f"LanguageModeling: the tokenizer of {origin} differs from that of the model, so token ids would mean "
                "other text. Save the model's tokenizer (`model.tokenizer.save('tokenizer.json')`) and pass it to the "
                "data as tokenizer_file"
            )
        self.tokenizer_state = state

    def _losses(
        self, batch: dict[str, Tensor], weighting: TokenWeighting | None = None, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return losses and targets ``[B, T]``, and the balancing loss of a mixture of experts, if it has one.

        Args:
            batch: The batch.
            weighting: Weights of tokens.
            temperature: Divides the logits.
        """
        network: Any = self._built()
        targets = targets_of(batch)
        inputs = self._rows.arguments(network, batch, self._agree)
        arranged = targets.reshape(inputs["input_ids"].shape)
        counted = self._learned
        self._learned = None
        balance = self._balance()
        masks = nullcontext() if isinstance(network, GPT) else masks_unread(targets.device)
        with masks, balance.computing(network, batch, targets) as asked:
            inputs |= asked
            if hasattr(network, "token_losses"):  # from ChunkedCrossEntropy, which defers the logits
                known = None
                if counted is not None and counted[0] == targets.numel():  # this is the batch that was counted
                    known = counted[1]
                losses, output = network.token_losses(arranged, known, weighting, temperature, **inputs)
            elif isinstance(network, GPT) and weighting is None and temperature == 1:
                losses = output = network(**inputs, labels=arranged)
            else:
                output = network(**inputs)
                logits = output if isinstance(output, Tensor) else output.logits
                if temperature != 1:
                    logits = logits.float() / temperature
                losses = token_losses(logits, arranged)
                if weighting is not None:
                    losses = losses * weighting(logits, arranged)
        return losses.view_as(targets), targets, balance.loss(output)

    def _balance(self) -> RouterBalance:
        """Return the balancing loss of the routers of the network, if it has any."""
        if self._routers is None or self._routers[0] is not self.network:
            network = self._built()
            made = RouterBalance(type(self).__name__, network, self._wants_balance(), self.lacks_balance)
            self._routers = network, made
        return self._routers[1]

    def _wants_balance(self) -> bool | None:
        if isinstance(self.model, GPTConfig):
            return None
        wanted = (self.model.config_fields or {}).get("output_router_logits")
        return None if wanted is None else bool(wanted)

    def _agree(self, decision: bool) -> bool:
        """Return whether a decision is true on all processes, which must call the network in the same way."""
        trainer = trainer_of(self)
        if trainer is None:
            return decision
        return bool(trainer.strategy.reduce_boolean_decision(decision))

    def _add_to_epoch(self, losses: Tensor, targets: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Add the losses of a batch to the metrics of the epoch."""
        self.epoch_metrics.update(losses, targets, batch.get("num_bytes"))
        if self.epoch_sources is not None and "source" in batch:
            self.epoch_sources.update(losses, targets, batch["source"])

    def _log_sources(self, losses: Tensor, targets: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Log the loss of each source since the last log. Only then the numbers are read, which synchronises a GPU."""
        found = self.step_sources
        if found is None or "source" not in batch:
            return
        found.update(losses, targets, batch["source"])
        if logger_connector(self.trainer).should_update_logs and not accumulates(self.trainer):
            for name, value in found.means(found.sums).items():
                self.log(f"train/loss/{name}", value)
            found.reset()

    def _log_epoch(self, prefix: str) -> None:
        # `compute` has already summed over processes. sync_dist averages equal numbers, and avoids a warning.
        figures = {f"{prefix}/{name}": value for name, value in self.epoch_metrics.compute().items()}
        self.log_dict(figures, prog_bar=True, sync_dist=True)
        if self.epoch_sources is not None:
            for name, value in self.epoch_sources.compute().items():
                self.log(f"{prefix}/loss/{name}", value, sync_dist=True)


def _note_new_rows(network: nn.Module, ids: Sequence[int]) -> None:
    """Add ids to those of the tokens that are new to the network, as :mod:`trained_rows` reads them."""
    known = {*network.__dict__.get(NEW_ROWS, ()), *ids}
    if known:
        network.__dict__[NEW_ROWS] = sorted(known)


def described_network(network: nn.Module) -> dict[str, Any]:
    """Return the config of a network as primitives, for a checkpoint."""
    if isinstance(network, GPT):
        return asdict(network.config)
    config = network.config.to_json_string(use_diff=False)  # type: ignore[operator, union-attr]
    return {"hugging_face": config, "new_rows": network.__dict__.get(NEW_ROWS, [])}


def _check_same_network(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    now = _shape_of(ours)
    then = _shape_of(theirs)
    if now["model"] == then["model"]:
        names = [name for name in now if name in then and name not in _MAY_DIFFER]  # versions of transformers differ
    else:
        names = ["model"]
    different = []
    for name in names:
        if then[name] != now[name]:
            different.append(f"{name} is {then[name]!r} in the checkpoint and {now[name]!r} here")
    if different:
        raise ConfigurationError(f"LanguageModeling: the checkpoint is of another network: {'; '.join(different)}")


def _shape_of(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config that must agree with those of a checkpoint, without defaults to be resolved."""
    if "hugging_face" in described:
        fields = causal_lm.read_config(described["hugging_face"])
        shape = {"model": "of Hugging Face"} | {name: fields[name] for name in _HF_SHAPE if name in fields}
        for part in ("text_config", "vision_config"):
            own = fields.get(part) or {}
            shape |= {f"{part}.{name}": own[name] for name in _HF_SHAPE if name in own}
        return shape
    config = rebuild(GPTConfig, described)
    return {"model": "GPT"} | asdict(config) | {"num_kv_heads": config.kv_heads, "hidden_dim": config.mlp_dim}


def _batch_to_device(self: Any, batch: object, *args: Any, **kwargs: Any) -> Any:
    """Wrap of the strategy's method that counts the labels on the host, because counting on a GPU would synchronise."""
    self.lightning_module._learned = None
    if isinstance(batch, Mapping) and not {"labels", "shift_labels"}.isdisjoint(batch):
        targets = targets_of(batch)
        if targets.device.type == "cpu":
            self.lightning_module._learned = (targets.numel(), int((targets != IGNORE).sum()))
    return inner_method(self, "batch_to_device", _batch_to_device)(batch, *args, **kwargs)


def _changes_accumulation(callback: object) -> bool:
    named = type(callback).__name__ == "GradientAccumulationScheduler"  # exists in both packages of Lightning
    return named or has_trait(callback, Trait.CHANGES_ACCUMULATION)
