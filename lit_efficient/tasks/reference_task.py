"""Base of tasks that compare the network with itself before training."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lit_efficient.errors import ConfigurationError, ConflictError
from lit_efficient.losses.preference import sequence_log_probs
from lit_efficient.models.libraries.causal_lm import CausalLMConfig
from lit_efficient.models.networks.gpt import GPTConfig
from lit_efficient.surgery import is_sharded
from lit_efficient.tasks.keeps_reference import KeepsReference
from lit_efficient.tasks.language_modeling import described_network
from lit_efficient.tasks.ordered import has_order, in_order
from lit_efficient.tasks.pair_task import PairTask
from lit_efficient.tasks.reference_cache import ReferenceCache, answer_keys, prepare, weights_digest

_CACHE = "cache_reference"


class ReferenceTask(KeepsReference, PairTask):
    """Base of tasks with a reference, which is the network before training.

    ``cache_reference`` computes the reference's log-probabilities of all rows before the first step, and keeps them on
    disk (``$LIT_EFFICIENT_CACHE``, or ``~/.cache/lit_efficient``) for all runs with the same start, data, loss and
    precision. Steps and validation then run no reference, and copies of weights wait in host memory.

    Args:
        model: As in `LanguageModeling`.
        start_from: As in `PairTask`.
        learning_rate: As in `LanguageModeling`.
        weight_decay: As in `LanguageModeling`.
        warmup_steps: As in `LanguageModeling`.
        cache_reference: Compute the reference's log-probabilities once. The training data must be the same in each
            epoch.
    """

    compares_log_probs = True

    def __init__(
        self,
        model: GPTConfig | CausalLMConfig,
        start_from: str | None,
        learning_rate: float,
        weight_decay: float,
        warmup_steps: int,
        cache_reference: bool,
    ) -> None:
        super().__init__(model, start_from, learning_rate, weight_decay, warmup_steps)
        self.save_hyperparameters({_CACHE: cache_reference})
        self.cache_reference = cache_reference
        self._caches: list[ReferenceCache] = []  # of the data for training, and for validation

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Prefixes of the tensors of each answer in a batch."""
        raise NotImplementedError

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.cache_reference:
            self._fill_caches()

    def on_validation_end(self) -> None:
        if self._caches and self._reference is not None:  # a reference that has run all the same
            self._reference.to(torch.device("cpu"))

    def _fill_caches(self) -> None:
        """Compute the reference's log-probabilities of all rows, unless they are on disk."""
        who = f"{type(self).__name__}: {_CACHE}"
        reference = self.reference()
        assert reference is not None
        if reference.sharded or any(map(is_sharded, self.parameters())):
            raise ConflictError(
                f"{who} needs whole weights in each process, and the strategy shards them: leave it out"
            )
        network = described_network(self._built())
        settings = {"network": network, "precision": str(self.trainer.precision), **self._cached_settings()}
        weights = weights_digest(self._built(), reference.tensors)

        def answer(batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
            batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
            with self.trainer.precision_plugin.forward_context():
                return self._live_references(batch)

        self._caches = []
        if self.trainer.world_size > 1:
            # All processes test the network together at its first batch, and only one of them fills the cache.
            for batch in in_order(self.trainer.train_dataloader, who, f"leave out {_CACHE}", 1)():
                answer(batch)
        loaders = [(self.trainer.train_dataloader, None), *self._validation_loaders()]
        for loader, limit in loaders:
            batches = in_order(loader, who, f"leave out {_CACHE}", limit)
            self._caches.append(prepare(weights, settings, batches, self.prefixes, answer))
        reference.to(torch.device("cpu"))
        count = sum(map(len, self._caches))
        rank_zero_info(f"{who}: the reference of {count:,} rows is in {self._caches[0].folder.parent}")

    def _validation_loaders(self) -> Iterator[tuple[Any, int]]:
        """Yield the loaders of validation with an order, and the number of batches that all processes read of each."""
        loaders = self.trainer.val_dataloaders or []
        loaders = loaders if isinstance(loaders, list) else [loaders]
        for loader, count in zip(loaders, self.trainer.num_val_batches):
            if count and has_order(loader):
                yield loader, int(count) * self.trainer.world_size

    def _cached_settings(self) -> dict[str, Any]:
        """Return the settings of the task that decide the log-probabilities of an answer."""
        return {}

    def references(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the reference's log-probabilities of each answer ``[B]``."""
        if not self._caches:
            return self._live_references(batch)
        keys = answer_keys(batch, self.prefixes)
        for cache in self._caches:
            found = cache.find(keys)
            if found is not None:
                return tuple(log_probs.to(self.device) for log_probs in found)
        if self.training:
            raise ConfigurationError(
                f"{type(self).__name__}: {_CACHE}: the cache {self._caches[0].folder} does not hold a row of this "
                f"batch: the training data differs from one reading to the next. Make it deterministic, or leave out "
                f"{_CACHE}"
            )
        return self._live_references(batch)

    def _live_references(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Run the reference on each answer of a batch."""
        raise NotImplementedError

    def _log_probs(self, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the log-probability and number of tokens of each answer, and the balancing loss of experts."""
        losses, targets, router_loss = self._losses(rows)
        return (*sequence_log_probs(losses, targets), router_loss)
