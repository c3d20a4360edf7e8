"""Base of tasks on whole texts, for encoders and decoders of transformers: the model, its inputs, and what it lacks."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

from lightning.pytorch import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lit_efficient.errors import ConfigurationError, listed, refusal
from lit_efficient.internals.lightning_metrics import logs_in_bar
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.internals.torch_dispatch import has_values
from lit_efficient.mechanisms.padding import reads_padding
from lit_efficient.models.generation.batched import arguments_of
from lit_efficient.models.libraries.causal_lm import DRAWN, CausalLMConfig
from lit_efficient.tasks.language_modeling import LanguageModeling

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class TextTask(LanguageModeling):
    """Base of tasks whose network is a model of transformers other than a causal one.

    Args:
        model: Model of transformers.
        learning_rate: As in `LanguageModeling`.
        weight_decay: As in `LanguageModeling`.
        warmup_steps: As in `LanguageModeling`.
    """

    takes_slices = False  # the network sees whole texts
    commands_after_fit: ClassVar[tuple[str, ...]] = ()
    lacks_balance = "the loss of this task is computed outside of the network"

    def __init__(self, model: CausalLMConfig, learning_rate: float, weight_decay: float, warmup_steps: int) -> None:
        owner = type(self).__name__
        if isinstance(model, Mapping) and "config_fields" in model:  # from the hyper-parameters of a checkpoint
            model = CausalLMConfig(**model)
        if not isinstance(model, CausalLMConfig):
            raise refusal(owner, "model", "a CausalLMConfig (name_or_path, or config_fields with a model_type)", model)
        super().__init__(model, learning_rate, weight_decay, warmup_steps)
        self.save_hyperparameters({"model": asdict(model)})

    def configure_callbacks(self) -> list[Callback]:
        """Return no callbacks, because each row has the same weight."""
        return []

    def on_fit_start(self) -> None:
        """Refuse weights that are drawn at random and frozen: checkpoints of adapters would not contain them."""
        named = dict(self._built().named_parameters())
        drawn = [name for name in self._built().__dict__.get(DRAWN, ()) if self._needs(name)]
        frozen = [name for name in drawn if name in named and not named[name].requires_grad]
        if frozen:
            layer = frozen[0].rpartition(".")[0]
            raise ConfigurationError(
                f"{type(self).__name__}: {listed(frozen)} are not in the files of the model, so they are random, and "
                f"they are frozen: set modules_to_save=[{layer!r}] of the adapters"
            )
        self._check_padding()
        if drawn:
            rank_zero_info(f"{type(self).__name__}: {listed(drawn, 5)} are not in the files of the model and are drawn")

    def _check_padding(self) -> None:
        """Refuse a network that needs padding on the left, which the data has on the right, and warn of one that never
        masks padding.
        """
        pad = getattr(getattr(trainer_of(self), "datamodule", None), "pad_id", None)
        network = self._built()
        if pad is None or not has_values(next(network.parameters())) or not reads_padding(network, self, pad):
            return
        about = f"{type(self).__name__}: outputs of {type(network).__name__} depend on padding to the right of texts"
        if not reads_padding(network, self, pad, left=True):
            raise ConfigurationError(f"{about}: it needs padding to the left. Use another model")
        rank_zero_warn(f"{about}: it masks none, so the outputs of a text change with its batch")

    def _needs(self, name: str) -> bool:
        """Return whether the task uses a parameter."""
        return True

    def _call(self, input_ids: Tensor, attention_mask: Tensor | None, further: Mapping[str, Tensor]) -> Any:
        """Return the output of the network, which is not asked for a cache of keys and values."""
        network = self._built()
        cache = {"use_cache": False} if "use_cache" in arguments_of(network) else {}
        return network(input_ids=input_ids, attention_mask=attention_mask, **cache, **further)

    def _inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of the network in a batch."""
        if "input_ids" not in batch:
            raise ConfigurationError(
                f"{type(self).__name__}: a batch must have input_ids and attention_mask; got {', '.join(sorted(batch))}"
            )
        return {name: batch[name] for name in INPUTS if name in batch}

    def _log_step(self, loss: Tensor, **further: Tensor) -> None:
        self.log("train/loss", loss, prog_bar=logs_in_bar(loss))
        for name, value in further.items():
            self.log(f"train/{name}", value)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)
