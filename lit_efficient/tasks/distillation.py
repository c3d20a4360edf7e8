"""Distillation: a student learns the next-token distribution of a teacher who reads the same tokens.

    loss = mean_t [(1 - w) * -log q(token_t) + w * D(p_t, q_t)] + rationale_weight * mean_s [-log q(rationale_s)]

D is the forward or reverse KL or the Jensen-Shannon divergence of `lit_efficient.losses.distillation`. The teacher is
asked live, or once for all, its likeliest tokens then lying on disk. Logits exist for a chunk of tokens at a time.
Sources: https://arxiv.org/abs/1503.02531, https://arxiv.org/abs/2306.13649; rationales https://arxiv.org/abs/2305.02301.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lit_efficient.data.text.teacher_cache import ROW, TopKCache, cache_key, write_top_k
from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.files.cache import cache_root
from lit_efficient.internals.hugging_face import masks_unread
from lit_efficient.internals.lightning_loops import arrives_unchanged
from lit_efficient.internals.lightning_metrics import logs_in_bar
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.losses.chunked_cross_entropy import computes_ignored
from lit_efficient.losses.chunked_distillation import (
    CHUNK_SIZE,
    LiveTeacher,
    Teacher,
    TokenLosses,
    TopKTeacher,
    chunked_losses,
)
from lit_efficient.losses.distillation import Divergence, top_k_of
from lit_efficient.losses.next_token import IGNORE, sample_means, targets_of
from lit_efficient.mechanisms.documents import DocumentRows
from lit_efficient.models.libraries.causal_lm import CausalLMConfig
from lit_efficient.models.networks.gpt import GPTConfig
from lit_efficient.models.probes.output_head import check_head, hidden_states, output_head
from lit_efficient.surgery import moved
from lit_efficient.tasks.language_modeling import LanguageModeling
from lit_efficient.tasks.teacher import FrozenNetwork, TeacherSource, tokens_in_common
from lit_efficient.tasks.token_metrics import TokenMetrics

_DEFAULT_STUDENT = GPTConfig()
_RATIONALE = "rationale_"
_ANSWERS = ("teacher_ids", "teacher_log_probs")  # of a batch whose teacher is a cache


@dataclass(frozen=True)
class DistillationLoss:
    """What the student minimises.

    Args:
        divergence: from the teacher's distribution, and the temperature.
        weight: w, of the divergence; the cross-entropy with the data has 1 - w. In (0, 1].
        rationale_weight: of the loss on rationales, for batches that have them; at least 0. Where several batches make
            an optimizer step, each batch's rationales count as much as its answers have tokens.
        chunk_size: tokens whose logits exist at one time, at least 1.
    """

    divergence: Divergence = field(default_factory=Divergence)
    weight: float = 0.5
    rationale_weight: float = 0.5
    chunk_size: int = CHUNK_SIZE

    def __post_init__(self) -> None:
        check_number("DistillationLoss", "weight", self.weight, above=0, most=1)  # 0 is LanguageModeling
        check_number("DistillationLoss", "rationale_weight", self.rationale_weight, least=0)
        check_number("DistillationLoss", "chunk_size", self.chunk_size, least=1, whole=True)


_DEFAULT_LOSS = DistillationLoss()


class Distillation(LanguageModeling):
    """`LanguageModeling` with a teacher; batches, figures, checkpoints and prediction are the same.

    Training batches may carry a second set of tensors under ``rationale_input_ids``, ``rationale_labels`` and so on, of
    as many rows: the explanations that lead to the answers, learned as a task of their own, from the data alone.

    Logs ``train/loss``, ``train/cross_entropy``, ``train/divergence`` (and ``train/rationale``); ``val/loss`` is the
    cross-entropy, and a live teacher adds ``val/divergence``. The teacher stands outside the module: no technique,
    optimizer or checkpoint sees it. Its tokenizer must give all tokens of the student's the same ids; rows of either
    head beyond them are padding and compared with nothing.

    Args:
        teacher: a checkpoint of `LanguageModeling`, a name or folder of Hugging Face, or a `CausalLMConfig` (with
            ``quantize`` and ``dtype``).
        model: the student, as in `LanguageModeling`.
        objective: what is minimised.
        cache_top_k: ask the teacher once about the training data and keep so many tokens' probabilities on disk, all
            others as one sum; null asks it live, at every step. For data that are the same every time they are read.
        cache_dir: where; null is ``$LIT_EFFICIENT_CACHE``, else ``~/.cache/lit_efficient``.
        learning_rate: as in `LanguageModeling`.
        weight_decay: as in `LanguageModeling`.
        warmup_steps: as in `LanguageModeling`.
    """

    takes_slices = False  # a teacher reads whole rows

    def __init__(
        self,
        teacher: str | CausalLMConfig,
        model: GPTConfig | CausalLMConfig = _DEFAULT_STUDENT,
        objective: DistillationLoss = _DEFAULT_LOSS,
        cache_top_k: int | None = None,
        cache_dir: str | None = None,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
    ) -> None:
        if isinstance(teacher, Mapping):  # as hyper-parameters are stored
            teacher = CausalLMConfig(**teacher)
        if isinstance(objective, Mapping):
            objective = DistillationLoss(**{**objective, "divergence": Divergence(**objective["divergence"])})
        check_number("Distillation", "cache_top_k", cache_top_k, least=1, whole=True, null=True)
        super().__init__(model, learning_rate, weight_decay, warmup_steps)
        self.teacher = teacher
        self.objective = objective
        self.cache_top_k = cache_top_k
        self.cache_dir = cache_dir
        self.save_hyperparameters(
            {
                "teacher": teacher if isinstance(teacher, str) else asdict(teacher),
                "objective": asdict(objective),
                "cache_top_k": cache_top_k,
                "cache_dir": cache_dir,
            }
        )
        self.epoch_divergence = TokenMetrics()
        self._source = TeacherSource(teacher)
        self._live: FrozenNetwork | None = None
        self._cache: TopKCache | None = None
        self._shared: int | None = None  # tokens that both know
        self._checked: set[int] = set()  # networks whose head is known to be understood
        self._read = DocumentRows("Distillation: teacher")

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "predict":
            return
        if self.tokenizer_state is not None:
            theirs = self._source.tokenizer_state()
            self._shared = tokens_in_common(self.tokenizer_state, theirs, str(self._source.name))
        if self.cache_top_k is None and self._live is None:
            self._live = self._source.load(empty=hasattr(self.trainer.strategy, "shard_frozen"))

    def on_sharded(self) -> None:
        if self._live is not None:
            self._asks()  # which gives it its weights, before the first step

    def on_train_start(self) -> None:
        if self.cache_top_k is not None:
            self._cache = self._cached(self.cache_top_k)
            if arrives_unchanged(self.trainer):
                wrap_method(self.trainer.strategy, "batch_to_device", _batch_to_device)

    def on_train_end(self) -> None:
        unwrap_method(self.trainer.strategy, "batch_to_device", _batch_to_device)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The mixed loss over all tokens of the batch, and over those of each sequence for who reweights them."""
        parts, targets, extra_loss = self._token_losses(batch, self.objective.weight)
        loss, sample_loss = sample_means(parts.loss, targets)
        self.log("train/cross_entropy", sample_means(parts.cross_entropy, targets)[0])
        self.log("train/divergence", sample_means(parts.divergence, targets)[0])
        rationale = {key.removeprefix(_RATIONALE): value for key, value in batch.items() if key.startswith(_RATIONALE)}
        if rationale:
            parts, targets, further_loss = self._token_losses(rationale, 0.0)
            rationale_loss, of_samples = sample_means(parts.loss, targets)
            if of_samples.shape != sample_loss.shape:
                raise ConfigurationError(
                    f"Distillation: rationale_input_ids must have a row for each of the {len(sample_loss)} answers, "
                    f"got {len(of_samples)}."
                )
            self.log("train/rationale", rationale_loss)
            weight = self.objective.rationale_weight
            loss, sample_loss = loss + weight * rationale_loss, sample_loss + weight * of_samples
            if extra_loss is not None and further_loss is not None:
                extra_loss = extra_loss + weight * further_loss
        output = {"sample_loss": sample_loss}
        if extra_loss is not None:  # of a mixture of experts
            self.log("train/router_loss", extra_loss)
            loss = loss + extra_loss
            output["extra_loss"] = extra_loss
        self.log("train/loss", loss, prog_bar=logs_in_bar(loss))
        return {"loss": loss, **output}

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self.epoch_divergence.reset()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        parts, targets, _ = self._token_losses(batch, 0.0 if self._live is None else self.objective.weight)
        self.epoch_metrics.update(parts.cross_entropy, targets, batch.get("num_bytes"))
        if self._live is not None:
            self.epoch_divergence.update(parts.divergence, targets)

    def _losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        parts, targets, router_loss = self._token_losses(batch, 0.0)
        return parts.cross_entropy, targets, router_loss

    def _token_losses(self, batch: Mapping[str, Tensor], weight: float) -> tuple[TokenLosses, Tensor, Tensor | None]:
        """Losses ``[B, T]`` (0 where nothing is learned), targets, and the balancing loss of a mixture of experts."""
        network, targets = self._built(), targets_of(batch)
        learned, head = targets != IGNORE, output_head(network)
        whole = computes_ignored(targets.device)
        chosen = slice(None) if whole else learned.flatten()
        teacher = self._teacher_of(batch, chosen, self._vocabulary(head.rows)) if weight else None
        hidden, output = self._hidden_states(network, batch)
        flat = chunked_losses(
            head,
            hidden.flatten(0, 1)[chosen],
            list(head.module.parameters()),
            teacher,
            targets.flatten()[chosen],
            divergence=self.objective.divergence,
            weight=weight,
            chunk_size=self.objective.chunk_size,
            counted=learned.flatten() if whole else None,
        )
        if whole:
            losses = TokenLosses(*(part.view_as(targets) for part in flat))
        else:
            empty = torch.zeros_like(targets, dtype=flat.loss.dtype)
            losses = TokenLosses(*(empty.masked_scatter(learned, part) for part in flat))
        router_loss = getattr(output, "aux_loss", None)
        if router_loss is not None:
            router_loss = router_loss * network.config.get_text_config().router_aux_loss_coef  # type: ignore[operator, union-attr]
        return losses, targets, router_loss

    def _hidden_states(self, network: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
        # The teacher of a cache is asked by one process alone.
        ours = network is self.network
        inputs = self._rows.arguments(network, batch, self._agree) if ours else self._read.arguments(network, batch)
        if id(network) not in self._checked:
            check_head(network, {"input_ids": batch["input_ids"]})
            self._checked.add(id(network))
        with masks_unread(self.device):
            hidden, output = hidden_states(network, inputs)
        return hidden.view(*batch["input_ids"].shape, -1), output

    def _looked_up(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of a batch on the CPU: what the cache holds, ``[B, T, ...]``, zeros for tokens that are not learned."""
        assert self._cache is not None
        learned, answers = targets_of(batch) != IGNORE, {}
        for name, found in zip(_ANSWERS, self._cache.find({name: batch[name] for name in ROW if name in batch})):
            answers[name] = found.new_zeros(*learned.shape, found.shape[1])
            answers[name][learned] = found
        return answers

    def _teacher_of(self, batch: Mapping[str, Tensor], chosen: Any, vocab_size: int) -> Teacher:
        """What is known of the tokens ``chosen``, of all."""
        if self._cache is None:
            return self._asked(batch, chosen, vocab_size)
        answers: Mapping[str, Tensor] = batch
        if _ANSWERS[0] not in batch:  # where a hook has a hand in the transfer, or not by the trainer's loop
            answers = self._looked_up({name: batch[name].cpu() for name in ROW if name in batch})
        ids, log_probs = (moved(answers[name].flatten(0, 1), self.device)[chosen] for name in _ANSWERS)
        return TopKTeacher(ids, log_probs, vocab_size)

    @torch.no_grad()
    def _asked(self, batch: Mapping[str, Tensor], chosen: Any, vocab_size: int) -> LiveTeacher:
        """What the live teacher has to say of the tokens ``chosen`` of a batch."""
        network = self._asks()
        hidden, _ = self._hidden_states(network, batch)
        return LiveTeacher(hidden.flatten(0, 1)[chosen], output_head(network), vocab_size)

    def _asks(self) -> nn.Module:
        """The live teacher; sharded where all processes ask it, and not the first one for a cache."""
        assert self._live is not None
        strategy = getattr(trainer_of(self), "strategy", None)
        device = getattr(strategy, "root_device", self.device)
        return self._live.on(device, strategy if self.cache_top_k is None else None)

    def _vocabulary(self, rows: int) -> int:
        """Tokens to compare, for a student's head with so many rows."""
        if self._shared is not None:
            return self._shared
        theirs = rows if self._live is None else output_head(self._asks()).rows
        if rows != theirs:
            raise ConfigurationError(
                f"Distillation: without a tokenizer in the data, student and teacher must have the same number of "
                f"token ids, got {rows} and {theirs}: which of them are padding cannot be known."
            )
        return rows

    def _cached(self, k: int) -> TopKCache:
        """The cache for the training data, made by this process if no other has."""
        batches = _in_order(self.trainer.train_dataloader)
        temperature = self.objective.divergence.temperature
        size = self._vocabulary(output_head(self._built()).rows)
        if k > size:
            raise refusal("Distillation", "cache_top_k", f"at most {size}, the tokens there are", k)
        settings = {"k": k, "temperature": temperature, "vocab_size": size, "precision": str(self.trainer.precision)}
        folder = cache_root(self.cache_dir) / "teacher" / cache_key(self._source.digest(), settings, batches())

        def answer(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
            learned = targets_of(batch) != IGNORE
            if self._live is None:
                rank_zero_info(f"Distillation: the teacher is asked once about all training data, for {folder}")
                self._live = self._source.load()
                self._vocabulary(size)
            with torch.no_grad(), self.trainer.precision_plugin.forward_context():
                asked = self._asked(batch, learned.flatten(), size)
                chunks = asked.hidden.split(self.objective.chunk_size)
                kept = [top_k_of(asked.head(chunk)[:, :size], k, temperature) for chunk in chunks]
            return torch.cat([ids for ids, _ in kept]), torch.cat([log_probs for _, log_probs in kept])

        write_top_k(folder, batches(), answer)
        self._live = None  # its memory is the student's now
        self._checked.clear()
        return TopKCache(folder, thorough=self.trainer.is_global_zero)

    def _log_epoch(self, prefix: str) -> None:
        super()._log_epoch(prefix)
        if self._live is not None:
            self.log(f"{prefix}/divergence", self.epoch_divergence.compute()["loss"], sync_dist=True)


def _batch_to_device(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """The strategy's; what the teacher has said of a batch of training is looked up while that is still on the host."""
    if self.lightning_module.trainer.training and batch is not None:
        batch = {**batch, **self.lightning_module._looked_up(batch)}
    return inner_method(self, "batch_to_device", _batch_to_device)(batch, *args, **kwargs)


def _in_order(loader: Any) -> Any:
    """A function that reads the data set of a loader once, in its order, and leaves torch's generator as it was."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or not loader.batch_sampler:
        raise ConfigurationError(
            "Distillation: cache_top_k needs one DataLoader over a data set with an index, batched by the loader; for "
            "streams let the teacher answer live (cache_top_k null)."
        )

    def batches() -> Iterator[Any]:
        plain = DataLoader(
            loader.dataset, loader.batch_size or 1, num_workers=loader.num_workers, collate_fn=loader.collate_fn
        )
        with torch.random.fork_rng(devices=[]):
            yield from plain

    return batches
