"""Candidates of tune: the ways to split an effective batch, and the techniques and settings to add.

    candidates = batch * accumulation, with a constant product    x    every set of options

An option is tried if it leaves the results of a step unchanged, or if its name is allowed. The attribute ``computes``
of a technique's class names its effect on the results. The batch size has such an effect if layers normalise over the
batch.
"""

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningModule

import lit_efficient
from lit_efficient.catalog import SLOTS, Card, helping, read_cards
from lit_efficient.declaration import Declaration, check_conflicts, parts_of
from lit_efficient.errors import ConfigurationError, ConflictError, did_you_mean
from lit_efficient.evidence.fits import Change, Fit, batch_setting, nested
from lit_efficient.internals.torch_modules import BatchNorm
from lit_efficient.mechanisms.trials.batch_size import halvings, places_of, value_at
from lit_efficient.traits import Trait, has_trait

BATCH = "batch_size"
# Settings to try: their expected value, the new value, and the effect on the results. "batches" means that the same
# samples are combined to other batches.
_SETTINGS = {
    "trainer.precision": ("32-true", "bf16-mixed", "rounded"),
    "data.pack": (False, True, "batches"),
}
# Settings of the trainer that count batches. They are scaled so that they count the same number of samples.
_COUNT_BATCHES = ("limit_train_batches", "val_check_interval")
_MOST_SETS = 5_000
_PURPOSES = ("memory", "speed")


@dataclass(frozen=True)
class Option:
    """A technique or a setting that a candidate may have."""

    name: str  # the technique's class, or ``setting=value``
    computes: str  # as in :class:`~lit_efficient.declaration.Declaration`, or ``batches``
    technique: type[Declaration] | None = None  # ``None`` for a setting
    settings: Mapping[str, Any] = field(default_factory=dict)
    only_saves: bool = False  # True if the option serves memory only


@dataclass(frozen=True, order=True)
class Candidate:
    """One way to run the fit."""

    batch: int  # samples in a batch; 0 if no setting holds the batch size
    accumulation: int  # batches in an optimizer step
    options: tuple[str, ...] = ()  # sorted names of the added options

    def __str__(self) -> str:
        return " + ".join([f"{self.batch or 'batch'} x {self.accumulation}", *self.options])


class Space:
    """The candidates of a fit. The fit needs no weights.

    Args:
        fit: The fit.
        allow: Names of options that may be tried although they change the results; ``True`` allows all but those that
            change what is trained.
        only: Names of the only options to try; ``None`` tries all.
        batch: Setting of the batch size, or ``auto``.

    Attributes:
        left_out: Options that are not tried, with reasons.

    Raises:
        ConfigurationError: If a name is unknown, or a technique of the fit sets the batch size itself.
    """

    def __init__(
        self, fit: Fit, allow: bool | Collection[str] = False, only: Collection[str] | None = None, batch: str = "auto"
    ) -> None:
        self.fit = fit
        self.only = only
        self._all = allow is True
        self._allowed: tuple[str, ...] = ()
        if not isinstance(allow, bool):
            self._allowed = tuple(allow)
        self._parts = parts_of(fit.trainer)
        for part in self._parts:
            if has_trait(part, Trait.CHANGES_ACCUMULATION):
                name = type(part).__name__
                raise ConflictError(f"tune: {name} sets the batch size of this fit: leave it out (--without {name})")
        self.place = batch_setting(fit, batch)
        size = 0
        if self.place is not None:
            size = self.place[1]
        self.asked = Candidate(size, int(fit.trainer.accumulate_grad_batches))
        self.effective = self.asked.batch * self.asked.accumulation
        self.left_out: dict[str, str] = {}
        self.options = self._options()
        # Conflicts may depend on arguments, so that instances are compared.
        made = {name: option.technique() for name, option in self.options.items() if option.technique}
        self._excluded = {
            frozenset(pair) for pair in itertools.combinations(made, 2) if _conflict([made[name] for name in pair])
        }
        self.sizes = self._sizes()

    def sets(self) -> list[tuple[str, ...]]:
        """Return the sets of options that can be combined, small sets first. Large sets are left out if too many."""
        found: list[tuple[str, ...]] = []
        for size in range(len(self.options) + 1):
            more = [one for one in itertools.combinations(sorted(self.options), size) if self.go_together(one)]
            # The number of sets doubles with each option.
            if len(found) + len(more) > _MOST_SETS:
                break
            found += more
        return found

    def candidates(self) -> list[Candidate]:
        """Return all candidates."""
        return [self.candidate(size, options) for options in self.sets() for size in self.sizes]

    def candidate(self, size: int, options: Iterable[str] = ()) -> Candidate:
        """Return the candidate with a batch size and options."""
        accumulation = self.asked.accumulation
        if size:
            accumulation = self.effective // size
        return Candidate(size, accumulation, tuple(sorted(options)))

    def go_together(self, options: Iterable[str]) -> bool:
        """True if no two of the options conflict."""
        return not any(frozenset(pair) in self._excluded for pair in itertools.combinations(options, 2))

    def leave_out(self, name: str, reason: str) -> None:
        """Remove an option."""
        self.left_out[name] = reason
        del self.options[name]

    def settings(self, candidate: Candidate) -> dict[str, Any]:
        """Return the settings of a candidate."""
        found: dict[str, object] = {}
        if self.place:
            found[self.place[0]] = candidate.batch
            found["trainer.accumulate_grad_batches"] = candidate.accumulation
            for name in _COUNT_BATCHES:
                value = getattr(self.fit.trainer, name)
                if type(value) is int and value > 0:
                    found[f"trainer.{name}"] = max(1, round(value * self.asked.batch / candidate.batch))
        for name in candidate.options:
            found |= self.options[name].settings
        return found

    def change(self, candidate: Candidate) -> Change:
        """Return a candidate as a change of the fit."""
        kinds = [self.options[name].technique for name in candidate.options]
        return Change(str(candidate), self.settings(candidate), callbacks=partial(_instances, kinds))

    def overlay(self, candidate: Candidate) -> str:
        """Return a candidate as YAML, to lay over the config of the fit."""
        tree = nested(self.settings(candidate))
        names = [name for name in candidate.options if self.options[name].technique]
        if names:
            tree.setdefault("trainer", {})["callbacks+"] = [{"class_path": name} for name in names]
        return yaml.safe_dump(tree, sort_keys=False)

    def _allows(self, name: str, computes: str) -> bool:
        return computes == "same" or name in self._allowed or (self._all and computes != "other")

    def _options(self) -> dict[str, Option]:
        known = {option.name: option for option in [*_techniques(), *self._settings()]}
        names = [BATCH, *known]
        wanted = [*(self.only or ()), *self._allowed]
        for name in wanted:
            if name not in names:
                raise ConfigurationError(f"tune: there is no option {name!r} to try{did_you_mean(name, names)}")
        present = {type(part) for part in self._parts}
        found: dict[str, Option] = {}
        for name, one in known.items():
            if one.technique in present or (self.only is not None and name not in wanted):
                continue
            if self._allows(name, one.computes):
                reason = _conflict([*self._parts, *_instances([one.technique])])
                if reason:
                    self.left_out[name] = reason
                else:
                    found[name] = one
            elif one.computes != "other":  # a search never changes what is trained
                self.left_out[name] = f"it changes the results (--allow-changes {name})"
        if self.only is None:
            for slot in ("trainer.plugins", "optimizer"):
                cards = [card for card in read_cards() if card.slot == slot and card.is_technique]
                for name in _helpful(cards):
                    self.left_out[name] = f"it belongs to `{slot}`, which is not changed: set it there and tune again"
        return found

    def _settings(self) -> Iterator[Option]:
        parts = {"trainer": self.fit.trainer, "data": self.fit.datamodule, "model": self.fit.module}
        for name, (expected, new, computes) in _SETTINGS.items():
            part, _, key = name.partition(".")
            places = places_of(parts[part], key)
            if places and value_at(places[0]) == expected:
                yield Option(f"{name}={str(new).lower()}", computes, settings={name: new})

    def _sizes(self) -> list[int]:
        """Return the batch sizes, the smallest first."""
        # Without a setting there is nothing to vary.
        if not self.effective or not (self.only is None or BATCH in self.only):
            return [self.asked.batch]
        layers = _normalising_layers(self.fit.module)
        if layers and not self._allows(BATCH, "batches"):
            self.left_out[BATCH] = f"{layers} layers normalise over the batch (--allow-changes {BATCH})"
            return [self.asked.batch]
        return halvings(self.effective)


def _helpful(cards: Sequence[Card]) -> list[str]:
    """Return the techniques of cards that help with memory, then those that help with speed, the cheapest first."""
    return list(dict.fromkeys(name for purpose in _PURPOSES for name, _ in helping(cards, purpose)))


def _techniques() -> Iterator[Option]:
    """Yield the callbacks of the catalogue that help with memory or speed."""
    cards = [card for card in read_cards() if card.slot == SLOTS["callbacks"]]
    faster = {name for name, _ in helping(cards, "speed")}
    # A technique that sets the accumulation would change the effective batch.
    for name in _helpful(cards):
        kind = getattr(lit_efficient, name)
        if issubclass(kind, Declaration) and not has_trait(kind, Trait.CHANGES_ACCUMULATION):
            yield Option(name, kind.computes, kind, only_saves=name not in faster)


def _instances(kinds: Iterable[type | None]) -> list[Any]:
    return [kind() for kind in kinds if kind is not None]


def _conflict(parts: list[object]) -> str:
    """Return the reason why parts conflict; empty if they do not."""
    try:
        check_conflicts(parts)
    except ConflictError as error:
        return str(error)
    return ""


def _normalising_layers(module: LightningModule) -> int:
    """Return the number of layers with batch statistics. A network that does not exist yet is built without weights."""
    if not any(True for _ in module.parameters()):
        with contextlib.suppress(Exception), torch.device("meta"):
            module.configure_model()
    return sum(isinstance(layer, BatchNorm) for layer in module.modules())
