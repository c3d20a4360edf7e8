"""Distillation: a student learns the next-token distribution of a teacher that reads the same tokens.

    loss = mean_t [(1 - w) * -log q(token_t) + w * D(p_t, q_t)] + rationale_weight * mean_s [-log q(rationale_s)]

D is the forward or reverse KL or the Jensen-Shannon divergence of `lit_efficient.losses.distillation`. The teacher runs
in each step, or once for all training data, with its most likely tokens cached on disk. Logits exist for one chunk of
tokens at a time.
Sources: https://arxiv.org/abs/1503.02531, https://arxiv.org/abs/2306.13649; rationales:
https://arxiv.org/abs/2305.02301.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lit_efficient.data.text.teacher_cache import ROW, TopKCache, cache_key, write_top_k
from lit_efficient.errors import ConfigurationError, check_list, check_number, checks_types, refusal
from lit_efficient.files.cache import cache_root
from lit_efficient.files.records import rebuild
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
    WeightedTeachers,
    chunked_losses,
)
from lit_efficient.losses.distillation import Divergence, top_k_of
from lit_efficient.losses.next_token import IGNORE, sample_means, targets_of
from lit_efficient.losses.token_weighting import TokenWeighting
from lit_efficient.mechanisms.documents import DocumentRows
from lit_efficient.models.libraries.causal_lm import CausalLMConfig
from lit_efficient.models.libraries.vllm_server import ServedTeacher
from lit_efficient.models.networks.gpt import GPTConfig
from lit_efficient.models.probes.output_head import check_head, hidden_states, scaled_head
from lit_efficient.surgery import moved
from lit_efficient.tasks.language_modeling import LanguageModeling
from lit_efficient.tasks.ordered import in_order
from lit_efficient.tasks.teacher import (
    FrozenNetwork,
    TeacherServer,
    TeacherSource,
    WeightedTeacher,
    served_top_k,
    tokens_in_common,
)
from lit_efficient.tasks.token_metrics import TokenMetrics

_DEFAULT_STUDENT = GPTConfig()
_RATIONALE = "rationale_"
_ANSWERS = ("teacher_ids", "teacher_log_probs")  # entries of a batch that come from the cache of a teacher


@checks_types
@dataclass(frozen=True)
class DistillationLoss:
    """Objective of the student.

    Args:
        divergence: Divergence from the teacher's distribution, with its temperature.
        weight: Weight w of the divergence, in (0, 1]. The cross-entropy with the data has the weight 1 - w.
        rationale_weight: Weight of the loss on rationales, for batches that have them, at least 0. With gradient
            accumulation, the rationales of a batch are weighted by the number of tokens in its answers.
        chunk_size: Tokens whose logits exist at a time, at least 1.
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
    """`LanguageModeling` with a teacher. Batches, metrics, checkpoints and prediction are the same.

    Training batches may contain a second set of tensors with the prefix ``rationale_`` (``rationale_input_ids``,
    ``rationale_labels``) and the same number of rows: explanations of the answers. They are learned from the data,
    without the teacher.

    Logs ``train/loss``, ``train/cross_entropy``, ``train/divergence`` (and ``train/rationale``). ``val/loss`` is the
    cross-entropy. A teacher without cache adds ``val/divergence``. The teacher is not a submodule, so techniques,
    optimizers and checkpoints do not see it. Its tokenizer must give all tokens of the student the same ids. Further
    rows of both heads are padding and are not compared.

    Args:
        teacher: Checkpoint of `LanguageModeling`, name or folder of a Hugging Face model, a `CausalLMConfig` (with
            ``quantize`` and ``dtype``), or a `TeacherServer` (``url``). Several are a list of ``{teacher, weight}``:
            the divergence is the mean of those from each of them.
        model: The student, as in `LanguageModeling`.
        objective: Objective of the student.
        cache_top_k: Run the teacher once over the training data, and store the probabilities of this many tokens on
            disk, with all others merged. null runs the teacher in each step. The data must be the same in each epoch.
        cache_dir: Folder of the cache. null takes ``$LIT_EFFICIENT_CACHE``, or ``~/.cache/lit_efficient``.
        learning_rate: As in `LanguageModeling`.
        weight_decay: As in `LanguageModeling`.
        warmup_steps: As in `LanguageModeling`.
    """

    takes_slices = False  # a teacher reads whole rows

    def __init__(
        self,
        teacher: str | CausalLMConfig | TeacherServer | list[WeightedTeacher],
        model: GPTConfig | CausalLMConfig = _DEFAULT_STUDENT,
        objective: DistillationLoss = _DEFAULT_LOSS,
        cache_top_k: int | None = None,
        cache_dir: str | None = None,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
    ) -> None:
        teachers = _teachers(teacher)
        if isinstance(objective, Mapping):
            objective = DistillationLoss(**{**objective, "divergence": Divergence(**objective["divergence"])})
        check_number("Distillation", "cache_top_k", cache_top_k, least=1, whole=True, null=True)
        served = [one.teacher for one in teachers if isinstance(one.teacher, TeacherServer)]
        if cache_top_k is not None and (served or len(teachers) > 1):
            allowed = "null with several teachers or a server, whose weights are unknown"
            raise refusal("Distillation", "cache_top_k", allowed, cache_top_k)
        if served and objective.divergence.temperature != 1:
            allowed = "1 with a server, which gives log-probabilities at temperature 1"
            raise refusal("Distillation", "objective.divergence.temperature", allowed, objective.divergence.temperature)
        super().__init__(model, learning_rate, weight_decay, warmup_steps)
        self.teacher = teachers if len(teachers) > 1 else teachers[0].teacher
        self.objective = objective
        self.cache_top_k = cache_top_k
        self.cache_dir = cache_dir
        self.save_hyperparameters(
            {
                "teacher": [asdict(one) for one in teachers],
                "objective": asdict(objective),
                "cache_top_k": cache_top_k,
                "cache_dir": cache_dir,
            }
        )
        self.epoch_divergence = TokenMetrics()
        self._sources = [one.source() for one in teachers]
        self._weights = [one.weight for one in teachers]
        self._live: list[FrozenNetwork | ServedTeacher] = []
        self._cache: TopKCache | None = None
        self._shared: int | None = None  # number of tokens that both networks know
        self._checked: set[int] = set()  # ids of networks whose head has been checked
        self._read: dict[int, DocumentRows] = {}  # by the ids of teachers

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self._read = {}
        if stage == "predict":
            return
        if self.tokenizer_state is not None:
            for source in self._sources:
                self._shared = tokens_in_common(self.tokenizer_state, source.tokenizer_state(), str(source.name))
        if self.cache_top_k is None and not self._live:
            empty = hasattr(self.trainer.strategy, "shard_frozen")
            self._live = [source.load(empty) for source in self._sources]
            for one in self._live:
                if isinstance(one, ServedTeacher):
                    one.server.models()  # raises an error if the server cannot be asked

    def on_sharded(self) -> None:
        self._teacher_networks()  # loads their weights before the first step

    def on_train_start(self) -> None:
        if self.cache_top_k is not None:
            self._cache = self._cached(self.cache_top_k)
            if arrives_unchanged(self.trainer):
                wrap_method(self.trainer.strategy, "batch_to_device", _batch_to_device)

    def on_train_end(self) -> None:
        unwrap_method(self.trainer.strategy, "batch_to_device", _batch_to_device)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the distillation loss: the mean over all tokens, and one value for each sequence ``[B]``."""
        parts, targets, extra_loss = self._token_losses(batch, self._weight(batch))
        loss, sample_loss = sample_means(parts.loss, targets)
        self.log("train/cross_entropy", sample_means(parts.cross_entropy, targets)[0])
        self.log("train/divergence", sample_means(parts.divergence, targets)[0])
        self._log_sources(parts.cross_entropy, targets, batch)
        rationale = {key.removeprefix(_RATIONALE): value for key, value in batch.items() if key.startswith(_RATIONALE)}
        if rationale:
            parts, targets, further_loss = self._token_losses(rationale, 0.0)
            rationale_loss, of_samples = sample_means(parts.loss, targets)
            if of_samples.shape != sample_loss.shape:
                raise ConfigurationError(
                    f"Distillation: rationale_input_ids must have a row for each of the {len(sample_loss)} answers, "
                    f"got {len(of_samples)}"
                )
            self.log("train/rationale", rationale_loss)
            weight = self.objective.rationale_weight
            loss = loss + weight * rationale_loss
            sample_loss = sample_loss + weight * of_samples
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
        parts, targets, _ = self._token_losses(batch, self.objective.weight if self._live else 0.0)
        self._add_to_epoch(parts.cross_entropy, targets, batch)
        if self._live:
            self.epoch_divergence.update(parts.divergence, targets)

    def _weight(self, batch: Mapping[str, Tensor]) -> float:
        """Return the weight of the divergence for a training batch."""
        return self.objective.weight

    def _losses(
        self, batch: dict[str, Tensor], weighting: TokenWeighting | None = None, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        parts, targets, router_loss = self._token_losses(batch, 0.0)
        return parts.cross_entropy, targets, router_loss

    def _token_losses(self, batch: Mapping[str, Tensor], weight: float) -> tuple[TokenLosses, Tensor, Tensor | None]:
        """Return losses ``[B, T]`` (0 for ignored targets), targets, and the balancing loss of a mixture of experts."""
        network = self._built()
        targets = targets_of(batch)
        learned = targets != IGNORE
        head = scaled_head(network)
        whole = computes_ignored(targets.device)
        chosen: Any = slice(None)
        counted = None
        if whole:
            counted = learned.flatten()  # ignored tokens are computed too, and masked
        else:
            chosen = learned.flatten()
        teacher = None
        if weight:
            teacher = self._teacher_of(batch, chosen, self._vocabulary(head.rows))
        balance = self._balance()
        with balance.computing(network, batch, targets) as asked:
            hidden, output = self._hidden_states(network, batch, asked)
        flat = chunked_losses(
            head,
            hidden.flatten(0, 1)[chosen],
            list(head.module.parameters()),
            teacher,
            targets.flatten()[chosen],
            divergence=self.objective.divergence,
            weight=weight,
            chunk_size=self.objective.chunk_size,
            counted=counted,
        )
        if whole:
            losses = TokenLosses(*(part.view_as(targets) for part in flat))
        else:
            empty = torch.zeros_like(targets, dtype=flat.loss.dtype)
            losses = TokenLosses(*(empty.masked_scatter(learned, part) for part in flat))
        return losses, targets, balance.loss(output)

    def _hidden_states(
        self, network: nn.Module, batch: Mapping[str, Tensor], further: Mapping[str, bool] | None = None
    ) -> tuple[Tensor, Any]:
        if network is self.network:
            inputs = self._rows.arguments(network, batch, self._agree)
        else:  # without agreement of the processes: only one of them runs the teacher that fills a cache
            if id(network) not in self._read:
                self._read[id(network)] = DocumentRows("Distillation: teacher", self._rows.longest)
            inputs = self._read[id(network)].arguments(network, batch)
        if id(network) not in self._checked:
            options = {name: value for name, value in inputs.items() if isinstance(value, bool)}  # such as use_cache
            check_head(network, {"input_ids": batch["input_ids"], **options})
            self._checked.add(id(network))
        with masks_unread(self.device):
            hidden, output = hidden_states(network, {**inputs, **(further or {})})
        return hidden.view(*batch["input_ids"].shape, -1), output

    def _looked_up(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Look a batch on the CPU up in the cache. Return tensors ``[B, T, ...]`` with zeros for ignored targets."""
        assert self._cache is not None
        learned = targets_of(batch) != IGNORE
        answers: dict[str, Tensor] = {}
        for name, found in zip(_ANSWERS, self._cache.find({name: batch[name] for name in ROW if name in batch})):
            answers[name] = found.new_zeros(*learned.shape, found.shape[1])
            answers[name][learned] = found
        return answers

    def _teacher_of(self, batch: Mapping[str, Tensor], chosen: Any, vocab_size: int) -> Teacher:
        """Return the teacher's distribution for the tokens ``chosen`` among all ``B T``."""
        if self._cache is None:
            live = self._live_teachers(batch, chosen, vocab_size)
            if len(live) > 1:
                return WeightedTeachers(live, self._weights)
            return live[0]
        answers: Mapping[str, Tensor] = batch
        if _ANSWERS[0] not in batch:  # a hook changes batches during the transfer, or no trainer has transferred it
            answers = self._looked_up({name: batch[name].cpu() for name in ROW if name in batch})
        ids, log_probs = (moved(answers[name].flatten(0, 1), self.device)[chosen] for name in _ANSWERS)
        return TopKTeacher(ids, log_probs, vocab_size)

    @torch.no_grad()
    def _live_teachers(self, batch: Mapping[str, Tensor], chosen: Any, vocab_size: int) -> list[Teacher]:
        """Run the teachers on a batch, and return their distributions for the tokens ``chosen``."""
        teachers: list[Teacher] = []
        networks = iter(self._teacher_networks())
        for one in self._live:
            if isinstance(one, ServedTeacher):
                parts = served_top_k(one, batch, vocab_size)
                ids, log_probs = (part.flatten(0, 1)[chosen] for part in parts)
                teachers.append(TopKTeacher(ids, log_probs, vocab_size))
                continue
            network = next(networks)
            hidden, _ = self._hidden_states(network, batch)
            teachers.append(LiveTeacher(hidden.flatten(0, 1)[chosen], scaled_head(network), vocab_size))
        return teachers

    def _teacher_networks(self) -> list[nn.Module]:
        """Return the networks of the teachers in this process.

        They are sharded if every process calls them, and whole if only rank 0 calls one to fill a cache.
        """
        strategy = getattr(trainer_of(self), "strategy", None)
        device = getattr(strategy, "root_device", self.device)
        if self.cache_top_k is not None:
            strategy = None
        return [one.on(device, strategy) for one in self._live if isinstance(one, FrozenNetwork)]

    def _vocabulary(self, rows: int) -> int:
        """Return the number of tokens to compare, for a student whose head has ``rows`` rows."""
        if self._shared is not None:
            return self._shared
        for network in self._teacher_networks():
            theirs = scaled_head(network).rows
            if rows != theirs:
                raise ConfigurationError(
                    f"Distillation: without a tokenizer in the data, student and teacher must have the same number of "
                    f"token ids, got {rows} and {theirs}: it is unknown which of them are padding"
                )
        return rows

    def _cached(self, k: int) -> TopKCache:
        """Return the cache for the training data. One process creates it if it does not exist."""
        way_out = "run the teacher in each step (cache_top_k null)"
        loader: Any = self.trainer.train_dataloader
        batches = in_order(loader, "Distillation: cache_top_k", way_out)
        temperature = self.objective.divergence.temperature
        size = self._vocabulary(scaled_head(self._built()).rows)
        if k > size:
            raise refusal("Distillation", "cache_top_k", f"at most {size}, the size of the vocabulary", k)
        settings = {"k": k, "temperature": temperature, "vocab_size": size, "precision": str(self.trainer.precision)}
        (source,) = self._sources
        assert isinstance(source, TeacherSource)
        rows = batches("reading data" if self.trainer.is_global_zero else "")
        folder = cache_root(self.cache_dir) / "teacher" / cache_key(source.digest(), settings, rows)

        def answer(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
            learned = targets_of(batch) != IGNORE
            if not self._live:
                rank_zero_info(f"Distillation: the teacher runs once over all training data, for {folder}")
                self._live = [source.load()]
                self._vocabulary(size)
            with torch.no_grad(), self.trainer.precision_plugin.forward_context():
                (teacher,) = self._live_teachers(batch, learned.flatten(), size)
                assert isinstance(teacher, LiveTeacher)
                chunks = teacher.hidden.split(self.objective.chunk_size)
                kept = [top_k_of(teacher.head(chunk)[:, :size], k, temperature) for chunk in chunks]
            return torch.cat([ids for ids, _ in kept]), torch.cat([log_probs for _, log_probs in kept])

        write_top_k(folder, batches(), answer, len(loader.dataset))
        self._live = []  # free its memory for the student
        self._checked.clear()
        self._read.clear()
        return TopKCache(folder, thorough=self.trainer.is_global_zero)

    def _log_epoch(self, prefix: str) -> None:
        super()._log_epoch(prefix)
        self._log_divergence(prefix)

    def _log_divergence(self, prefix: str) -> None:
        if self._live:
            self.log(f"{prefix}/divergence", self.epoch_divergence.compute()["loss"], sync_dist=True)


def _teachers(given: Any) -> list[WeightedTeacher]:
    """Return the teachers of an argument, or of the hyper-parameters of a checkpoint, which are primitives."""
    every: list[Any] = given if isinstance(given, list) else [WeightedTeacher(given)]
    check_list("Distillation", "teacher", every, "a model, or a list of at least one WeightedTeacher")
    found = []
    for one in every:
        if isinstance(one, Mapping):
            model = one["teacher"]
            if isinstance(model, Mapping):
                model = rebuild(TeacherServer if "url" in model else CausalLMConfig, model)
            found.append(WeightedTeacher(model, one["weight"]))
        else:
            found.append(one)
    return found


def _batch_to_device(self: Any, batch: Any, *args: object, **kwargs: object) -> Any:
    """Wrap of the strategy's method that looks a training batch up in the cache while it is still on the host."""
    if self.lightning_module.trainer.training and batch is not None:
        batch = {**batch, **self.lightning_module._looked_up(batch)}
    return inner_method(self, "batch_to_device", _batch_to_device)(batch, *args, **kwargs)
