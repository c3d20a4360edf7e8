"""Checkpoint hooks: techniques that change what is saved, loaded and exported; records of techniques in checkpoints."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lit_efficient.application.ledger import ledger
from lit_efficient.declaration import Hooks, Wrap, in_order, overrides, techniques_of
from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.internals.wraps import inner_method, wrap_method

if TYPE_CHECKING:
    from lit_efficient.files.checkpoints import Checkpoint, Fields
    from lit_efficient.internals.hugging_face_loading import Replacing


class CheckpointHooks(Hooks):
    """Mix-in for techniques that act on checkpoints: ``class Average(CheckpointHooks, Technique)``."""

    # Key of checkpoint["lit_efficient"] under which trim_checkpoint describes the technique's parameters.
    keeps: ClassVar[str] = ""

    def on_read(self, prefix: str) -> "Replacing | None":
        """Return what replaces layers of a network while its weights are read from files.

        Only the technique that acts first on the network is asked.

        Args:
            prefix: Prefix of the network's names in the module, with the dot.
        """
        return None

    def write_checkpoint(self, checkpoint: "Checkpoint", module: nn.Module) -> None:
        """Change what is about to be saved, in full checkpoints and in those that hold only weights."""

    def read_checkpoint(self, checkpoint: "Fields", module: LightningModule) -> None:
        """Read from ``checkpoint`` before its weights are loaded, in any stage."""

    @classmethod
    def trim_checkpoint(cls, module: nn.Module, checkpoint: dict[str, object]) -> None:
        """Remove from a checkpoint what the transform makes redundant; called as long as the module exists."""

    @classmethod
    def is_in(cls, module: nn.Module) -> bool:
        """Return whether the network still has what the transform added; merged adapters are gone."""
        return True

    @classmethod
    def check_checkpoint(cls, module: nn.Module, checkpoint: Mapping[str, object]) -> None:
        """Raise :class:`CheckpointError` if the weights of a checkpoint do not belong to the transformed module."""

    @classmethod
    def convert_export(cls, state: dict[str, Any], checkpoint: "Fields", module: object = None) -> None:
        """Replace weights that training only imitated by the real ones, in ``state`` and in ``module`` if given.

        Args:
            state: Weights by name, as an export will hold them; changed in place.
            checkpoint: The checkpoint that they come from, with what :meth:`trim_checkpoint` wrote into it.
            module: The trained module, to compare its outputs afterwards.
        """
        raise NotImplementedError

    @classmethod
    def fits(cls, checkpoint: "Fields", format: str) -> bool:
        """Return whether an export in ``format`` can hold the weights that :meth:`convert_export` gives."""
        return False

    @classmethod
    def wraps(cls, trainer: Trainer, module: LightningModule, techniques: Sequence[Any]) -> list[Wrap]:
        """Keep ``on_save_checkpoint`` wrapped, also after the run, if a technique changes what is saved."""
        if any(overrides(technique, "write_checkpoint") for technique in techniques):
            keep_saving(module)
        return []


def keep_saving(module: nn.Module) -> None:
    """Wrap ``on_save_checkpoint`` for good: a trainer can also save after its teardown."""
    wrap_method(module, "on_save_checkpoint", _on_save_checkpoint)


def _on_save_checkpoint(self: nn.Module, checkpoint: "Checkpoint") -> None:
    inner_method(self, "on_save_checkpoint", _on_save_checkpoint)(checkpoint)
    checkpoint.setdefault("lit_efficient", {})["transforms"] = [entry.record for entry in ledger(self)]
    trainer = trainer_of(self)
    if trainer is not None:
        for technique in _hooks_in(trainer):
            technique.write_checkpoint(checkpoint, self)
    for entry in ledger(self):
        if issubclass(entry.kind, CheckpointHooks):
            entry.kind.trim_checkpoint(self, checkpoint)


def on_load_checkpoint(self: LightningModule, checkpoint: "Checkpoint") -> None:
    """Wrap of the module's hook: compare the techniques and the weights with those of the run."""
    kept = checkpoint.get("lit_efficient")
    fitting = getattr(self.trainer.state.fn, "value", None) == "fit"
    records = [technique.record() for technique in techniques_of(self.trainer)]
    if kept is not None:
        saved = [*kept.get("transforms", ()), *kept.get("techniques", ())]
        compare_techniques(saved, records, fitting=fitting)
        check_checkpoint(self, checkpoint)
    elif fitting and checkpoint.get("optimizer_states"):  # of a run without techniques
        compare_techniques([], [record for record in records if [*record["alters"]] == ["optimizer"]], fitting=True)
    for technique in _hooks_in(self.trainer):
        technique.read_checkpoint(checkpoint, self)
    inner_method(self, "on_load_checkpoint", on_load_checkpoint)(checkpoint)


def check_checkpoint(module: nn.Module, checkpoint: Mapping[str, object]) -> None:
    """Raise :class:`CheckpointError` if the weights of a checkpoint do not belong to the transformed module."""
    for entry in ledger(module):
        if issubclass(entry.kind, CheckpointHooks):
            entry.kind.check_checkpoint(module, checkpoint)


def forget_what_is_gone(module: nn.Module) -> None:
    """Remove from the ledger the transforms that were undone on ``module``, as merging undoes adapters."""
    done = ledger(module)
    done[:] = [entry for entry in done if not issubclass(entry.kind, CheckpointHooks) or entry.kind.is_in(module)]


def compare_techniques(saved: "Iterable[Fields]", current: "Iterable[Fields]", *, fitting: bool) -> None:
    """Refuse a checkpoint whose weights or optimizer states were shaped by other techniques; print other differences.

    Args:
        saved: Records of the techniques in the checkpoint (:meth:`Declaration.record`).
        current: Records of the techniques of this run.
        fitting: Whether optimizer states are restored, too.

    Raises:
        ConfigurationError: Naming the technique and the difference.
    """
    old = {record["name"]: record for record in saved}
    new = {record["name"]: record for record in current}
    restored = {"weights", "optimizer"} if fitting else {"weights"}
    for name in sorted({*old, *new}):
        difference = _difference(name, old.get(name), new.get(name))
        if not difference:
            continue
        shaped = restored & set(old.get(name, new.get(name, {}))["alters"])
        if shaped:
            raise ConfigurationError(
                f"{difference}. It shapes the {' and '.join(sorted(shaped))} in a checkpoint, which cannot be restored "
                "across that: use the checkpoint's techniques, or load its weights without resuming"
            )
        rank_zero_info(f"Resuming with a difference: {difference}.")


def _difference(name: str, before: "Fields | None", after: "Fields | None") -> str:
    """Return how two records of a technique differ, or an empty string."""
    if before is None:
        return f"{name} is new: the checkpoint was written without it"
    if after is None:
        return f"{name} is missing: the checkpoint was written with it"
    if before["arguments"] == after["arguments"]:
        return ""
    return f"{name} has changed: {differences(before['arguments'], after['arguments'])}"


def differences(before: "Fields", after: "Fields") -> str:
    """Return how two sets of arguments differ, for messages."""
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return ", ".join(f"{key} was {before.get(key)!r} and is {after.get(key)!r}" for key in keys)


def _hooks_in(trainer: object) -> list[CheckpointHooks]:
    return [technique for technique in in_order(techniques_of(trainer)) if isinstance(technique, CheckpointHooks)]
