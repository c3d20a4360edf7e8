"""A teacher for distillation: where it comes from, whether it reads the student's tokens, and how it is held.

It is held beside the module, not in it: no technique changes it, no optimizer, average or checkpoint sees it, and no
strategy replicates it. Each process has a whole one, or, of one that all ask together, a part of its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lit_efficient.data.text.chat_tokenizer import token_ids, unpack_tokenizer
from lit_efficient.distributed.weight_slices import fill_waiting
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import digest_of
from lit_efficient.files.checkpoints import missing_folder
from lit_efficient.files.sums import sha256_of
from lit_efficient.models.libraries import causal_lm
from lit_efficient.models.libraries.causal_lm import CausalLMConfig, stored_folder
from lit_efficient.surgery import own_draws, weights_wait
from lit_efficient.tasks.loading import hugging_face_tokenizer, load_language_model, read_language_model


@dataclass(frozen=True)
class TeacherSource:
    """What a user names as a teacher.

    Args:
        spec: a checkpoint's path, a name or folder of Hugging Face, or a `CausalLMConfig` with one.

    Raises:
        ConfigurationError: for a model with random weights.
    """

    spec: str | CausalLMConfig

    def __post_init__(self) -> None:
        if isinstance(self.spec, CausalLMConfig) and self.spec.draws_weights:
            raise ConfigurationError("Distillation: teacher must have trained weights, got one that draws them.")

    @property
    def name(self) -> str:
        """What to call it."""
        return self.spec if isinstance(self.spec, str) else str(self.spec.name_or_path)

    @property
    def checkpoint(self) -> str | None:
        """The path, if it is a checkpoint."""
        return self.spec if isinstance(self.spec, str) and Path(self.spec).is_file() else None

    def check(self) -> None:
        """Refuse a path at which nothing is, before it is taken for a name on a hub.

        Raises:
            ConfigurationError: that says what is missing.
        """
        if not isinstance(self.spec, str) or self.checkpoint is not None:
            return
        if Path(self.spec).suffix in (".ckpt", ".pt", ".pth"):
            raise ConfigurationError(f"Distillation: teacher: there is no file {self.spec}.")
        if missing := missing_folder(self.spec):
            raise ConfigurationError(f"Distillation: teacher: {missing}")

    @property
    def config(self) -> CausalLMConfig:
        """The model of Hugging Face, if it is one."""
        return CausalLMConfig(self.spec) if isinstance(self.spec, str) else self.spec

    def tokenizer_state(self) -> dict[str, Any] | None:
        """Its tokenizer as checkpoints have it; None if none lies beside the weights."""
        self.check()
        if self.checkpoint is None:
            return hugging_face_tokenizer(self.config)
        return read_language_model(self.checkpoint)["language_modeling"]["tokenizer"]

    def load(self, empty: bool = False) -> FrozenNetwork:
        """The network on the CPU, ``empty`` if its weights can wait; the global random state stays as it is."""
        self.check()
        with own_draws():
            if self.checkpoint is not None:
                return FrozenNetwork(load_language_model(self.checkpoint)[0].network)
            network = causal_lm.build_empty(self.config) if empty else None
            return FrozenNetwork(network or causal_lm.build(self.config))

    def digest(self) -> str:
        """Hash of all that decides its answers: the bytes of its files, and how they are read."""
        if self.checkpoint is None:
            return _digest_of_files(self.config)
        digest = sha256_of(Path(self.checkpoint))
        model = read_language_model(self.checkpoint)["hyper_parameters"]["model"]
        if not model.get("name_or_path") or model.get("random_weights"):
            return digest
        base = _digest_of_files(CausalLMConfig(**model))  # an adapter's base is not in its checkpoint
        return digest_of([digest, base])


class FrozenNetwork:
    """A network, frozen in place, in eval mode, which the module that holds it does not see.

    A copy of the module shares it.
    """

    def __init__(self, network: nn.Module) -> None:
        # In a list, because a model of transformers refuses .to() itself when it is quantised; its parts do not.
        self._held = nn.ModuleList([network.eval().requires_grad_(False)])
        self._device: torch.device | None = None

    def on(self, device: torch.device, strategy: Any = None) -> nn.Module:
        """The network, moved there if it is elsewhere, and sharded by a strategy that can (``shard_frozen``)."""
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


def tokens_in_common(ours: Mapping[str, Any], theirs: Mapping[str, Any] | None, name: str) -> int:
    """Number of ids that mean the same text for both packed tokenizers: all of ours. The teacher may know more.

    Raises:
        ConfigurationError: if a token of ours has another id there, or none.
    """
    way_out = (
        "Give the data the teacher's tokenizer and start the student from random weights or from a model of the "
        "teacher's family; or let the teacher write the training data: python -m lit_efficient write-data"
    )
    if theirs is None:
        raise ConfigurationError(
            f"Distillation: the teacher {name} has no tokenizer that could be compared with the student's; save it "
            f"beside its weights (tokenizer.save_pretrained)."
        )
    mine, its = unpack_tokenizer(ours), unpack_tokenizer(theirs)
    vocabulary, other = mine.get_vocab(), its.get_vocab()
    unlike = [(token, number) for token, number in vocabulary.items() if other.get(token) != number]
    if unlike:
        token, number = min(unlike, key=lambda pair: pair[1])
        raise ConfigurationError(
            f"Distillation: the teacher {name} has another tokenizer: {len(unlike)} of {len(vocabulary)} tokens have "
            f"another id there or none ({token!r} is {number} here, {other.get(token, 'unknown')} there). {way_out}."
        )
    return token_ids(mine)["vocab_size"]


def _digest_of_files(spec: CausalLMConfig) -> str:
    try:
        folder = stored_folder(spec)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"Distillation: the files of the teacher {spec.name_or_path} cannot be read: {str(error).splitlines()[0]}"
        ) from error
    files = sorted((*folder.glob("*.safetensors"), *folder.glob("*.json")))
    found = [(path.name, sha256_of(path)) for path in files]
    return digest_of([{key: value for key, value in asdict(spec).items() if key != "name_or_path"}, found])
