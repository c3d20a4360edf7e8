"""Techniques that a checkpoint records: their classes, their arguments, and their transforms applied again."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

import lit_efficient
from lit_efficient.application import transform_by
from lit_efficient.application.checkpoints import CheckpointHooks, check_checkpoint
from lit_efficient.application.ledger import ledger
from lit_efficient.declaration import Declaration, defines, in_order, overrides, techniques_of
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.records import rebuild
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.traits import Trait

if TYPE_CHECKING:
    from lit_efficient.files.checkpoints import Fields
    from lit_efficient.internals.hugging_face_loading import Replacing

_RECORDED = "_lit_efficient_recorded"  # attribute of a module whose weights are read by a checkpoint's techniques


def on_read(module: nn.Module, prefix: str, checkpoint: Mapping[str, object] | None = None) -> "Replacing | None":
    """Return what the technique that acts first on ``module`` replaces while a network is read from files.

    Args:
        module: The module that will hold the network.
        prefix: Prefix of the network's names in the module, with the dot.
        checkpoint: A checkpoint whose techniques :func:`replay` will apply, where there is no trainer.
    """
    trainer = trainer_of(module)
    if (trainer is None and checkpoint is None) or ledger(module):
        return None
    if trainer is None:
        techniques = module.__dict__[_RECORDED] = _recorded(checkpoint or {})
    else:
        techniques = techniques_of(trainer)
    acting = in_order(technique for technique in techniques if overrides(technique, "transform"))
    if acting and isinstance(acting[0], CheckpointHooks):
        return acting[0].on_read(prefix)
    return None


def replay(module: nn.Module, checkpoint: Mapping[str, object]) -> None:
    """Apply the transforms that ``checkpoint`` records, so that its weights fit ``module`` without a trainer.

    Raises:
        ConfigurationError: If the checkpoint names an unknown technique.
    """
    techniques = module.__dict__.pop(_RECORDED, None)  # those that :func:`on_read` asked
    transform_by(module, _recorded(checkpoint) if techniques is None else techniques)
    check_checkpoint(module, checkpoint)


def _recorded(checkpoint: "Fields") -> list[Declaration]:
    techniques = []
    for record in _records(checkpoint):
        cls = technique_of(record)
        if cls is None:
            raise ConfigurationError(f"the checkpoint uses the technique {record['name']!r}: import its class first")
        if Trait.TRAINING_ONLY not in cls.traits:
            techniques.append(rebuild(cls, record["arguments"]))
    return techniques


def converters(checkpoint: Mapping[str, object], format: str = "") -> list[type[CheckpointHooks]]:
    """Return the techniques of a checkpoint that convert its weights for an export.

    Raises:
        ConfigurationError: If the export's ``format`` cannot hold the converted weights of one of them.
    """
    found = []
    for record in _records(checkpoint):
        kind = technique_of(record)
        if kind is not None and issubclass(kind, CheckpointHooks) and defines(kind, "convert_export"):
            found.append(kind)
    apart = [kind for kind in found if not kind.fits(checkpoint, format)]
    if apart and format:
        raise ConfigurationError(
            f"export: {apart[0].__name__} trained weights in a format of its own, which format {format} cannot hold, "
            "so that it would compute something else than was validated: use format safetensors"
        )
    return found


def technique_of(record: "Fields") -> type[Declaration] | None:
    """Return the class that a record names: a public technique of this package, or one that is already imported.

    A checkpoint cannot name code to import, not even of a package that registers techniques.
    """
    name = record["name"]
    public: object = None
    if name in lit_efficient.PUBLIC:
        public = getattr(lit_efficient, name)
    if isinstance(public, type) and issubclass(public, Declaration):
        return public
    return {cls.__name__: cls for cls in _subclasses(Declaration)}.get(name)


def arguments_behind(checkpoint: "Fields", key: str) -> dict[str, Any] | None:
    """Return the arguments of the technique whose ``CheckpointHooks.keeps`` is ``key``, or ``None``."""
    for record in _records(checkpoint):
        kind = technique_of(record)
        if kind is not None and issubclass(kind, CheckpointHooks) and kind.keeps == key:
            arguments: dict[str, Any] = record["arguments"]
            return arguments
    return None


def _records(checkpoint: "Fields") -> "list[Fields]":
    return [*checkpoint.get("lit_efficient", {}).get("transforms", ())]


def _subclasses(cls: type[Declaration]) -> Iterator[type[Declaration]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
