"""Teacher for distillation: its source, the comparison of its tokenizer with the student's, and the frozen network.

The network is not a submodule of the task, so techniques, optimizers, averages, checkpoints and strategies do not see
it. Each process holds the whole network, or shards of it if all processes call it together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.data.text.chat_tokenizer import token_ids, unpack_tokenizer
from lit_efficient.distributed.weight_slices import fill_waiting
from lit_efficient.errors import ConfigurationError, check_number, checks_types
from lit_efficient.files.cache import digest_of
from lit_efficient.files.checkpoints import missing_folder
from lit_efficient.files.sums import sha256_of
from lit_efficient.losses.next_token import IGNORE, targets_of
from lit_efficient.models.libraries import causal_lm
from lit_efficient.models.libraries.causal_lm import CausalLMConfig, stored_folder
from lit_efficient.models.libraries.gguf_file import is_gguf
from lit_efficient.models.libraries.vllm_server import ServedTeacher
from lit_efficient.models.networks.document_attention import document_starts
from lit_efficient.surgery import own_draws, weights_wait
from lit_efficient.tasks.loading import hugging_face_tokenizer, load_language_model, read_language_model

# Files of a model's folder that determine what it writes: weights, also of a sharded checkpoint, settings, tokenizer.
_READ = ("*.safetensors", "*.distcp", "*.pt", "*.json", "*.txt", "*.model", "*.jinja", "*/*.jinja")


@checks_types
@dataclass(frozen=True)
class TeacherServer:
    """Teacher behind a vLLM server, by its most likely tokens: ``vllm serve MODEL --max-logprobs K``.

    All other tokens are merged into one. The divergence needs temperature 1.

    Args:
        url: Address, such as ``http://localhost:8000``. A key is read from ``VLLM_API_KEY``.
        tokenizer: Folder or name of the tokenizer of its model, which is compared with the student's.
        k: Number of tokens at each position, at least 1.
        model: Name of the model. null: the first one of the server.
        seconds: Longest time to wait for the answer to a row.
    """

    url: str
    tokenizer: str
    k: int = 20
    model: str | None = None
    seconds: float = 600.0

    def __post_init__(self) -> None:
        self.load()  # checks the arguments

    @property
    def name(self) -> str:
        """Address, for messages."""
        return self.url

    def tokenizer_state(self) -> dict[str, Any] | None:
        """Return the teacher's tokenizer in the format of checkpoints."""
        return hugging_face_tokenizer(CausalLMConfig(self.tokenizer))

    def load(self, empty: bool = False) -> ServedTeacher:
        """Return the client."""
        return ServedTeacher(self.url, self.k, self.model, self.seconds)


@checks_types
@dataclass(frozen=True)
class WeightedTeacher:
    """One of several teachers.

    Args:
        teacher: Teacher, as in `Distillation`.
        weight: Weight of its divergence, above 0. The weights are divided by their sum.
    """

    teacher: str | CausalLMConfig | TeacherServer
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_number("WeightedTeacher", "weight", self.weight, above=0)

    def source(self) -> TeacherSource | TeacherServer:
        """Return where the teacher comes from."""
        if isinstance(self.teacher, TeacherServer):
            return self.teacher
        return TeacherSource(self.teacher)


@dataclass(frozen=True)
class TeacherSource:
    """Source of a teacher, or of another network that only runs.

    Args:
        spec: Path of a checkpoint, name, folder or GGUF file of a Hugging Face model, or a `CausalLMConfig` with one
            of the latter.
        owner: Class and argument that name it, for errors.

    Raises:
        ConfigurationError: For a model with random weights.
    """

    spec: str | CausalLMConfig
    owner: str = "Distillation: teacher"

    def __post_init__(self) -> None:
        if isinstance(self.spec, CausalLMConfig) and self.spec.draws_weights:
            raise ConfigurationError(f"{self.owner} must have trained weights, got random ones")

    @property
    def name(self) -> str:
        """Path or name of the teacher, for messages."""
        if isinstance(self.spec, str):
            return self.spec
        return str(self.spec.name_or_path)

    @property
    def checkpoint(self) -> str | None:
        """Path of the checkpoint, or ``None`` for a Hugging Face model."""
        if isinstance(self.spec, str) and Path(self.spec).is_file() and not is_gguf(self.spec):
            return self.spec
        return None

    def check(self) -> None:
        """Check that a path exists, because a missing path would be looked up on the hub.

        Raises:
            ConfigurationError: Naming the missing file or folder.
        """
        if not isinstance(self.spec, str) or self.checkpoint is not None:
            return
        if Path(self.spec).suffix in (".ckpt", ".pt", ".pth"):
            raise ConfigurationError(f"{self.owner}: there is no file {self.spec}")
        missing = None if is_gguf(self.spec) else missing_folder(self.spec)
        if missing:
            raise ConfigurationError(f"{self.owner}: {missing}")

    @property
    def config(self) -> CausalLMConfig:
        """Config of the Hugging Face model."""
        if isinstance(self.spec, str):
            return CausalLMConfig(self.spec)
        return self.spec

    def tokenizer_state(self) -> dict[str, Any] | None:
        """Return the teacher's tokenizer in the format of checkpoints, or ``None`` if it has none."""
        self.check()
        if self.checkpoint is None:
            return hugging_face_tokenizer(self.config)
        return read_language_model(self.checkpoint)["language_modeling"]["tokenizer"]

    def load(self, empty: bool = False) -> FrozenNetwork:
        """Load the network on the CPU, without changing the global random state.

        Args:
            empty: Leave the weights on the meta device if they can be read later.
        """
        self.check()
        with own_draws():
            if self.checkpoint is not None:
                return FrozenNetwork(load_language_model(self.checkpoint)[0].network)
            try:
                network = causal_lm.build_empty(self.config) if empty else None
                return FrozenNetwork(network or causal_lm.build(self.config))
            except ConfigurationError as error:
                raise ConfigurationError(f"{self.owner}: {error}") from error

    def digest(self) -> str:
        """Return a hash of everything that determines the teacher's outputs: its files and its config."""
        self.check()
        if self.checkpoint is None:
            return _digest_of_files(self.config, self.owner)
        digest = sha256_of(Path(self.checkpoint))
        model = read_language_model(self.checkpoint)["hyper_parameters"]["model"]
        if not model.get("name_or_path") or model.get("random_weights"):
            return digest
        base = _digest_of_files(
            CausalLMConfig(**model), self.owner
        )  # the checkpoint of adapters does not contain their base
        return digest_of([digest, base])


class FrozenNetwork:
    """Frozen network in eval mode that is not a submodule of its owner. Copies of the owner share it."""

    def __init__(self, network: nn.Module) -> None:
        # In a list, because `to` of a quantised transformers model raises an error, but that of a parent does not.
        self._held = nn.ModuleList([network.eval().requires_grad_(False)])
        self._device: torch.device | None = None

    def on(self, device: torch.device, strategy: Any = None) -> nn.Module:
        """Return the network on a device. It is sharded if the strategy can do so (``shard_frozen``)."""
        if self._device != device:
            self._device = device
            if not weights_wait(self._held):
                self._held.to(device)
            if hasattr(strategy, "shard_frozen"):
                strategy.shard_frozen(self._held[0])
            elif fill_waiting(self._held, device):
                self._held.to(device)
        return self._held[0]

    def __deepcopy__(self, memo: object) -> FrozenNetwork:
        return self


def documents_of(batch: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield the documents of a batch: the number of the row, and the places of the tokens in it.

    Args:
        batch: ``input_ids`` ``[B, T]``, with ``attention_mask`` for padded rows and ``position_ids`` for packed rows.
    """
    ids = batch["input_ids"]
    seen = batch.get("attention_mask", torch.ones_like(ids)).bool()
    starts = torch.zeros_like(ids)
    if "position_ids" in batch:
        starts = document_starts(batch["position_ids"])
    for row in range(len(ids)):
        for start in starts[row].unique():
            yield row, ((starts[row] == start) & seen[row]).nonzero()[:, 0]


def served_top_k(teacher: ServedTeacher, batch: Mapping[str, Tensor], vocab_size: int) -> tuple[Tensor, Tensor]:
    """Ask a served teacher about the tokens of a batch that contribute to the loss.

    Returns:
        Ids ``[B, T, k]`` and log-probabilities ``[B, T, k + 1]``, or ``[B, T, k]`` if k is ``vocab_size``, as of
        `top_k_of`, with zeros for other tokens.

    Raises:
        ConfigurationError: If one of the most likely tokens is unknown to the student.
    """
    targets = targets_of(batch)
    asked = []
    for row, places in documents_of(batch):
        learned = (targets[row, places] != IGNORE).nonzero()
        if len(learned):
            asked.append((row, places[: int(learned[-1]) + 2]))  # up to the last token that contributes
    found = teacher.top_k([batch["input_ids"][row, places].tolist() for row, places in asked])
    ids = torch.zeros(*targets.shape, teacher.k, dtype=torch.int64, device=targets.device)
    log_probs = torch.zeros(*targets.shape, teacher.k + 1, device=targets.device, dtype=torch.float32)
    for (row, places), (their_ids, their_log_probs) in zip(asked, found):
        ids[row, places[:-1]] = their_ids.to(targets.device)
        log_probs[row, places[:-1]] = their_log_probs.to(targets.device)
    if int(ids.max()) >= vocab_size:
        raise ConfigurationError(
            f"Distillation: the teacher {teacher.server.url} gives the token id {int(ids.max())}, and student and "
            f"teacher have {vocab_size} tokens in common"
        )
    if teacher.k == vocab_size:  # then there are no other tokens, and the student gives them no probability
        log_probs = log_probs[..., :-1]
    return ids, log_probs


def tokens_in_common(ours: Mapping[str, Any], theirs: Mapping[str, Any] | None, name: str) -> int:
    """Check that the teacher's tokenizer gives the student's tokens the same ids, and return their number.

    Args:
        ours: Tokenizer of the student, in the format of checkpoints.
        theirs: Tokenizer of the teacher, in the same format. It may have more tokens.
        name: Name of the teacher, for the error.

    Raises:
        ConfigurationError: If a token of the student has another id or none, or the teacher has no tokenizer.
    """
    way_out = (
        "Use the teacher's tokenizer for the data, and a student with random weights or of the same model family; or "
        "generate the training data with the teacher: python -m lit_efficient write-data"
    )
    if theirs is None:
        raise ConfigurationError(
            f"Distillation: the teacher {name} has no tokenizer to compare with the student's; save it in the folder "
            f"of its weights (tokenizer.save_pretrained)"
        )
    student = unpack_tokenizer(ours)
    vocabulary = student.get_vocab()
    other = unpack_tokenizer(theirs).get_vocab()
    unlike = [(token, number) for token, number in vocabulary.items() if other.get(token) != number]
    if unlike:
        token, number = min(unlike, key=lambda pair: pair[1])
        raise ConfigurationError(
            f"Distillation: the teacher {name} has another tokenizer: {len(unlike)} of {len(vocabulary)} tokens have "
            f"another id there or none ({token!r} is {number} here, {other.get(token, 'unknown')} there). {way_out}"
        )
    return token_ids(student)["vocab_size"]


def _digest_of_files(spec: CausalLMConfig, owner: str) -> str:
    try:
        folder = stored_folder(spec)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{owner}: the files of {spec.name_or_path} cannot be read: {str(error).splitlines()[0]}"
        ) from error
    files = sorted(path for kind in _READ for path in folder.glob(kind)) if folder.is_dir() else [folder]
    hashes = [(path.name, sha256_of(path)) for path in files]
    settings = asdict(spec)
    del settings["name_or_path"]  # the same files have the same hash in another folder
    return digest_of([settings, hashes])
