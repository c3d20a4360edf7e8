"""What a fit that needs too much memory could do, each tried by a plan: the cheapest techniques, or a smaller batch.

Techniques are those that the catalogue ranks by what they cost (`helps["memory"]`). Of two sets that is the cheaper one
whose dearest technique costs less; where it is the same one, the next counts. Sets that train the same come first, then
those that round, then other trainings, and only where these cost less, or nothing else fits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

import lit_efficient
from lit_efficient.catalog import helping, overlay_of, read_cards
from lit_efficient.declaration import Declaration
from lit_efficient.evidence.fits import AS_IT_IS, Change, Fit, nested
from lit_efficient.evidence.planning.plan_search import Predictions, Refusal, changed
from lit_efficient.files import configs
from lit_efficient.mechanisms.trials.batch_size import divisors, largest_fitting

if TYPE_CHECKING:
    from lit_efficient.evidence.planning.plan import Plan
    from lit_efficient.evidence.planning.plan_settings import Lever

# What a technique computes beside a step without it (`Declaration.computes`), and what people call a set of those.
TITLES = {
    "same": "the same training",
    "rounded": "the same training, with what is kept rounded",
    "other": "ANOTHER TRAINING, which learns something else",
}


@dataclass(frozen=True)
class Candidate:
    """A technique that may save memory."""

    name: str  # its class
    overlay: str  # the config that adds it
    cost: int  # its rank in the catalogue; the smaller, the less it costs
    reason: str  # what it saves
    computes: str = "same"  # one of :data:`TITLES`
    # settings of the trainer that its overlay changes, with their values
    sets: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Advice:
    """Something that makes a fit fit, with its plan."""

    title: str  # what it is
    change: Change  # how to have it
    plan: "Plan"  # the plan of it
    techniques: tuple[Candidate, ...] = ()  # those that it adds, what costs least first

    @property
    def words(self) -> list[str]:
        """What to append to the command line of the fit."""
        pairs = [("-c", name) for name in self.change.overlays]
        pairs += [(f"--{name}", str(value)) for name, value in self.change.settings.items()]
        return [word for pair in pairs for word in pair]

    @property
    def yaml(self) -> str:
        """The same as a config to lay over."""
        tree: dict[str, Any] = {}
        for overlay in self.change.overlays:
            _lay_over(tree, overlay_tree(overlay))
        _lay_over(tree, nested(self.change.settings))
        return yaml.safe_dump(tree, sort_keys=False)


def overlay_tree(name: str) -> dict[str, Any]:
    """A config that comes along, as it is written."""
    return yaml.safe_load(configs.known()[name].read_text("utf-8")) or {}


def _lay_over(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping):
            _lay_over(tree.setdefault(key, {}), value)
        else:
            tree[key] = [*tree.get(key, []), *value] if key.endswith("+") else value


def candidates(config: Mapping[str, Any], trainer: Any) -> list[Candidate]:
    """The techniques that save memory, come as an overlay and are not there, what costs least first.

    What sets the accumulation by itself is left out: a batch that is accumulated is tried as such.
    """
    cards = read_cards()
    known = {card.name: card for card in cards}
    there = {type(callback).__name__ for callback in trainer.callbacks}
    found = []
    for name, reason in helping(cards, "memory"):
        kind, overlay = getattr(lit_efficient, name), overlay_of(known[name])
        if not overlay or name in there or not issubclass(kind, Declaration) or kind.changes_accumulation:
            continue
        written = overlay_tree(overlay).get("trainer", {})
        now = config.get("trainer", {})
        sets = {key: value for key, value in written.items() if key[-1] != "+" and now.get(key) != value}
        rank = int(known[name].facts["memory"].partition(".")[0])
        found.append(Candidate(name, overlay, rank, reason, "other" if sets else kind.computes, sets))
    return found


def cheapest(
    predictions: Predictions, among: Sequence[Candidate], base: Change = AS_IT_IS, skipped: dict[str, str] | None = None
) -> list[Candidate] | None:
    """The cheapest set of techniques with which a fit fits, ``None`` if there is none.

    All are added in turn, what costs least first, until it fits; then each that is not needed is taken out, what costs
    most first. What is refused in company gets its turn before the others, where these do not suffice. ``base`` is
    changed in any case; ``skipped`` gets the reason why one was left out.
    """
    among = sorted(among, key=lambda one: one.cost)
    skipped = {} if skipped is None else skipped
    predictions.begin("advice", 2 * len(among))
    if predictions.fits(base):
        return []
    for first in (None, *among):
        if first is not None and first.name not in skipped:
            continue
        order = among if first is None else [first, *(one for one in among if one is not first)]
        chosen = _enough(predictions, order, base, skipped if first is None else {})
        if chosen is None:
            continue
        for one in sorted(chosen, key=lambda one: -one.cost):
            rest = [other for other in chosen if other is not one]
            if predictions.fits(_with(base, rest)):
                chosen = rest
        return chosen
    return None


def _enough(
    predictions: Predictions, order: Sequence[Candidate], base: Change, skipped: dict[str, str]
) -> list[Candidate] | None:
    """The first of ``order`` that together are enough, without what is refused or needs more than it saves."""
    chosen: list[Candidate] = []
    before = predictions(base)
    for one in order:
        found = predictions(_with(base, [*chosen, one]))
        if isinstance(found, Refusal):
            skipped[one.name] = found.reason.removeprefix(f"{one.name}: ")
            continue
        if not isinstance(before, Refusal) and found.peak > before.peak:
            skipped[one.name] = "it needs more here than it saves"
            continue
        chosen, before = [*chosen, one], found
        if found.peak <= predictions.limit:
            return chosen
    return None


def _with(base: Change, chosen: Sequence[Candidate]) -> Change:
    return changed(base, {}, tuple(one.overlay for one in sorted(chosen, key=lambda one: one.cost)))


class Adviser:
    """Finds what makes a fit fit, among candidates.

    ``batch`` is the setting that is its batch, if there is one, ``length`` finds that which is its context, or raises;
    ``normalises``: the network does so over a batch, so that half a batch is not half of it.
    """

    def __init__(
        self,
        predictions: Predictions,
        among: Sequence[Candidate],
        fit: Fit,
        batch: "Lever | None",
        length: "Callable[[], Lever]",
        normalises: bool = False,
    ) -> None:
        self.predictions, self.among, self.batch, self.length = predictions, among, batch, length
        self.accumulated = int(fit.trainer.accumulate_grad_batches)
        self.automatic = bool(fit.module.automatic_optimization)
        self.normalises = normalises
        self.skipped: dict[str, str] = {}

    def all(self) -> Iterator[Advice]:
        """Each piece of advice as soon as its plan is made, the cheapest first."""
        smaller = self._smaller()
        if smaller:
            yield smaller
        same = self._set("same", AS_IT_IS, "at the same batch")
        if same:
            yield same
        base, batch = AS_IT_IS, "at the same batch"
        if not smaller and not same and self.batch and self.batch.now > 1:
            base, batch = self._batch_of(1), "in batches of 1, accumulated" if self.automatic else "in batches of 1"
            if same := self._set("same", base, batch):
                yield same
        dearest = max((one.cost for one in same.techniques), default=0) if same else None
        for kind in ("rounded", "other"):
            if dearest is None or any(one.computes == kind and one.cost < dearest for one in self.among):
                other = self._set(kind, base, batch)
                if other and any(one.computes == kind for one in other.techniques):
                    yield other
                    break
        else:
            if not smaller and not same and (shorter := self._shorter()):
                yield shorter

    def _batch_of(self, size: int) -> Change:
        assert self.batch is not None
        if not self.automatic:
            return self.batch.set(size)
        effective = self.batch.now * self.accumulated
        return changed(self.batch.set(size), {"trainer.accumulate_grad_batches": effective // size})

    def _smaller(self) -> Advice | None:
        """The largest smaller batch that fits, of which several make the same effective one."""
        if self.batch is None or self.batch.now == 1:
            return None
        now = self.batch.now
        sizes = [size for size in divisors(now * self.accumulated) if size < now] if self.automatic else range(1, now)
        self.predictions.begin("smaller batches", 2 * len(sizes).bit_length())
        size = largest_fitting(sizes, lambda size: self.predictions.fits(self._batch_of(size)))
        if size is None:
            return None
        title = "the same training, in smaller batches that are accumulated"
        if not self.automatic:
            title = "smaller batches: another training"
        elif self.normalises:
            title = "smaller batches that are accumulated: another training, as layers normalise over a batch"
        return self._advice(title, self._batch_of(size))

    def _set(self, kind: str, base: Change, where: str) -> Advice | None:
        kinds = list(TITLES)[: list(TITLES).index(kind) + 1]
        among = [one for one in self.among if one.computes in kinds]
        chosen = cheapest(self.predictions, among, base, self.skipped)
        if chosen is None:
            return None
        return self._advice(f"{TITLES[kind]}, {where}", _with(base, chosen), tuple(chosen))

    def _shorter(self) -> Advice | None:
        from lit_efficient.errors import ConfigurationError

        base = AS_IT_IS if self.batch is None or self.batch.now == 1 else self._batch_of(1)
        try:
            found = self.length().largest(self.predictions, base)
        except ConfigurationError:
            return None
        return self._advice("a shorter context: another training", found.change) if found.plan else None

    def _advice(self, title: str, change: Change, techniques: tuple[Candidate, ...] = ()) -> Advice | None:
        found = self.predictions(change)
        return None if isinstance(found, Refusal) else Advice(title, change, found, techniques)
