"""What tune chooses among: how an effective batch is split, and what of the catalogue and of the settings is added.

    candidates = batch * accumulation, with their product kept    x    every set of options

An option is tried if what a step computes stays the same, or if its name is allowed: the class of a technique says in
``computes`` what it does to that, and a network that normalises over the batch says it of the batch size.
"""

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import yaml

import lit_efficient
from lit_efficient.catalog import SLOTS, helping, read_cards
from lit_efficient.declaration import Declaration, check_conflicts, parts_of
from lit_efficient.errors import ConfigurationError, ConflictError, did_you_mean
from lit_efficient.evidence.fits import Change, Fit, batch_setting, nested
from lit_efficient.internals.torch_layers import BatchNorm
from lit_efficient.mechanisms.trials.batch_size import halvings, places_of, value_at
from lit_efficient.traits import Trait, has_trait

BATCH = "batch_size"
# Settings that are worth a try: what they must be, what they become, and what a step then computes. "batches": the same
# samples, put together in other batches.
_SETTINGS = {
    "trainer.precision": ("32-true", "bf16-mixed", "rounded"),
    "data.pack": (False, True, "batches"),
}
_COUNT_BATCHES = ("limit_train_batches", "val_check_interval")  # of the trainer: go on counting the same samples
_MOST_SETS = 5_000


@dataclass(frozen=True)
class Option:
    """One thing that a candidate may have."""

    name: str  # the technique's, or ``setting=value``
    computes: str  # as in :class:`~lit_efficient.declaration.Declaration`, or ``batches``
    technique: type[Declaration] | None = None  # its class, ``None`` for a setting
    settings: Mapping[str, Any] = field(default_factory=dict)  # what it sets
    only_saves: bool = False  # whether it is there for memory alone


@dataclass(frozen=True, order=True)
class Candidate:
    """One way to run the fit."""

    batch: int  # samples of a batch; 0 where nothing holds them
    accumulation: int  # batches of an optimizer step
    options: tuple[str, ...] = ()  # names of what is added, sorted

    def __str__(self) -> str:
        return " + ".join([f"{self.batch or 'batch'} x {self.accumulation}", *self.options])


class Space:
    """The candidates of a fit, whose weights are not needed.

    ``allow`` has options that change what is computed and may be tried: names, or ``True`` for all but other trainings;
    ``only`` names those that are to be tried, and ``batch`` the setting that holds the batch size, or is ``auto``.

    Raises:
        ConfigurationError: If a name is unknown, or a technique of the fit sets the batch size itself.
    """

    def __init__(
        self, fit: Fit, allow: bool | Collection[str] = False, only: Collection[str] | None = None, batch: str = "auto"
    ) -> None:
        self.fit, self.only = fit, only
        self._all, self._named = allow is True, () if isinstance(allow, bool) else tuple(allow)
        self._parts = parts_of(fit.trainer)
        setters = [type(one).__name__ for one in self._parts if has_trait(one, Trait.CHANGES_ACCUMULATION)]
        setter = next(iter(setters), "")
        if setter:
            raise ConflictError(f"tune: {setter} of this fit sets the batch itself: leave it out (--without {setter})")
        self.place = batch_setting(fit, batch)
        self.asked = Candidate(self.place[1] if self.place else 0, int(fit.trainer.accumulate_grad_batches))
        self.effective = self.asked.batch * self.asked.accumulation
        self.left_out: dict[str, str] = {}  # options that are not tried -> why
        self.options = self._options()
        made = {name: option.technique() for name, option in self.options.items() if option.technique}
        pairs = itertools.combinations(made, 2)
        self._excluded = {frozenset(pair) for pair in pairs if _conflict([made[name] for name in pair])}
        self.sizes = self._sizes()

    def sets(self) -> list[tuple[str, ...]]:
        """Sets of options that go together, small ones first; of very many options no large ones."""
        found: list[tuple[str, ...]] = []
        for count in range(len(self.options) + 1):
            more = [one for one in itertools.combinations(sorted(self.options), count) if self.go_together(one)]
            if len(found) + len(more) > _MOST_SETS:
                break
            found += more
        return found

    def candidates(self) -> list[Candidate]:
        """All of them."""
        return [self.candidate(size, options) for options in self.sets() for size in self.sizes]

    def candidate(self, size: int, options: Iterable[str] = ()) -> Candidate:
        """The candidate of a batch size."""
        accumulation = self.effective // size if size else self.asked.accumulation
        return Candidate(size, accumulation, tuple(sorted(options)))

    def go_together(self, options: Iterable[str]) -> bool:
        """Whether no technique declares that it excludes another."""
        return not any(frozenset(pair) in self._excluded for pair in itertools.combinations(options, 2))

    def leave_out(self, name: str, why: str) -> None:
        """Try an option no more."""
        self.left_out[name] = why
        del self.options[name]

    def settings(self, candidate: Candidate) -> dict[str, Any]:
        """What a candidate sets."""
        found: dict[str, Any] = {}
        if self.place:
            found = {self.place[0]: candidate.batch, "trainer.accumulate_grad_batches": candidate.accumulation}
            for name in _COUNT_BATCHES:
                value = getattr(self.fit.trainer, name)
                if type(value) is int and value > 0:
                    found[f"trainer.{name}"] = max(1, round(value * self.asked.batch / candidate.batch))
        for name in candidate.options:
            found |= self.options[name].settings
        return found

    def change(self, candidate: Candidate) -> Change:
        """The candidate as a change of the fit."""
        kinds = [kind for name in candidate.options if (kind := self.options[name].technique)]
        return Change(str(candidate), self.settings(candidate), callbacks=partial(_instances, kinds))

    def overlay(self, candidate: Candidate) -> str:
        """The same as YAML, to be laid over the fit's config."""
        tree = nested(self.settings(candidate))
        if names := [name for name in candidate.options if self.options[name].technique]:
            tree.setdefault("trainer", {})["callbacks+"] = [{"class_path": name} for name in names]
        return yaml.safe_dump(tree, sort_keys=False)

    def _allows(self, name: str, computes: str) -> bool:
        return computes == "same" or name in self._named or (self._all and computes != "other")

    def _options(self) -> dict[str, Option]:
        known = {option.name: option for option in [*_techniques(), *self._settings()]}
        for name in [*(self.only or ()), *self._named]:
            if name not in (names := [BATCH, *known]):
                raise ConfigurationError(f"tune: there is no option {name!r} to try{did_you_mean(name, names)}")
        owned = {type(part) for part in self._parts}
        found: dict[str, Option] = {}
        for name, one in known.items():
            if one.technique in owned or not (self.only is None or name in self.only or name in self._named):
                continue
            if self._allows(name, one.computes):
                reason = _conflict([*self._parts, *_instances([one.technique] if one.technique else [])])
                found |= {} if reason else {name: one}
            else:  # another training is what nobody asks for here
                reason = f"it changes what is computed (--allow-changes {name})" if one.computes != "other" else ""
            self.left_out |= {name: reason} if reason else {}
        if self.only is None:
            self.left_out |= dict(_set_elsewhere())
        return found

    def _settings(self) -> Iterator[Option]:
        parts = {"trainer": self.fit.trainer, "data": self.fit.datamodule, "model": self.fit.module}
        for name, (now, then, computes) in _SETTINGS.items():
            part, _, key = name.partition(".")
            places = places_of(parts[part], key)
            if places and value_at(places[0]) == now:
                yield Option(f"{name}={str(then).lower()}", computes, settings={name: then})

    def _sizes(self) -> list[int]:
        """The batch sizes, smallest first."""
        if not self.effective or not (self.only is None or BATCH in self.only):
            return [self.asked.batch]
        layers = _over_batches(self.fit.module)
        if layers and not self._allows(BATCH, "batches"):
            self.left_out[BATCH] = f"{layers} layers normalise over the batch (--allow-changes {BATCH})"
            return [self.asked.batch]
        return halvings(self.effective)


def _techniques() -> Iterator[Option]:
    """The callbacks of the catalogue that help with memory or speed, what costs least first."""
    cards = [card for card in read_cards() if card.slot == SLOTS["callbacks"]]
    saving, hastening = ([name for name, _ in helping(cards, purpose)] for purpose in ("memory", "speed"))
    for name in dict.fromkeys([*saving, *hastening]):
        kind = getattr(lit_efficient, name)
        if issubclass(kind, Declaration) and not has_trait(kind, Trait.CHANGES_ACCUMULATION):
            yield Option(name, kind.computes, kind, only_saves=name not in hastening)


def _set_elsewhere() -> Iterator[tuple[str, str]]:
    """What helps and is no callback, and where it is set."""
    for slot in ("trainer.plugins", "optimizer"):
        cards = [card for card in read_cards() if card.slot == slot and card.is_technique]
        for name in dict.fromkeys(name for purpose in ("memory", "speed") for name, _ in helping(cards, purpose)):
            yield name, f"it is set in `{slot}`, which stays as it is: set it in the config, and tune again"


def _instances(kinds: Iterable[type]) -> list[Any]:
    return [kind() for kind in kinds]


def _conflict(parts: list[object]) -> str:
    """Why parts exclude each other; empty where they do not."""
    try:
        check_conflicts(parts)
    except ConflictError as error:
        return str(error)
    return ""


def _over_batches(module: Any) -> int:
    """How many layers of the network compute statistics of a batch; it is built for that where it is not yet."""
    if not any(True for _ in module.parameters()):
        with contextlib.suppress(Exception), torch.device("meta"):
            module.configure_model()
    return sum(isinstance(layer, BatchNorm) for layer in module.modules())
