"""Advice for a fit that needs too much memory: the cheapest techniques or a smaller batch with which it fits.

The catalogue ranks techniques by their cost (`helps["memory"]`). Two sets of techniques are compared by their most
expensive techniques; if they share these, by the next ones. Each piece of advice is planned. Sets that leave the
training unchanged come first, then sets that round, then other trainings. The latter two are tried only if they are
cheaper, or if nothing else fits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml
from lightning.pytorch import Trainer

import lit_efficient
from lit_efficient.catalog import helping, overlay_of, read_cards
from lit_efficient.declaration import Declaration
from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.fits import AS_IT_IS, Change, Fit, nested
from lit_efficient.evidence.planning.plan_search import Predictions, Refusal, changed
from lit_efficient.files import configs
from lit_efficient.mechanisms.trials.batch_size import divisors, largest_fitting
from lit_efficient.traits import Trait, has_trait

if TYPE_CHECKING:
    from lit_efficient.evidence.planning.plan import Plan
    from lit_efficient.evidence.planning.plan_settings import Lever

# Effects of a technique on the training (`Declaration.computes`), and titles of advice with such techniques.
TITLES = {
    "same": "the same result",
    "rounded": "the same result, up to rounding",
    "other": "CHANGES THE RESULT",
}


_FAR = 2.0  # times the limit: techniques are not added one by one then, because each plan takes seconds
_HOPELESS = 1.25  # times the limit that all techniques need together: a part of them does not need less either


@dataclass(frozen=True)
class Candidate:
    """A technique that may save memory."""

    name: str  # of its class
    overlay: str  # config that adds it
    cost: int  # rank in the catalogue; smaller is cheaper
    reason: str  # description of what it saves
    computes: str = "same"  # a key of :data:`TITLES`
    sets: Mapping[str, Any] = field(default_factory=dict)  # settings of the trainer that its overlay changes


@dataclass(frozen=True)
class Advice:
    """A change with which a fit fits."""

    title: str
    change: Change
    plan: "Plan"  # of the change
    techniques: tuple[Candidate, ...] = ()  # added techniques, the cheapest first

    @property
    def words(self) -> list[str]:
        """Words to append to the command line of the fit."""
        words = []
        for name in self.change.overlays:
            words += ["-c", name]
        for name, value in self.change.settings.items():
            words += [f"--{name}", str(value)]
        return words

    @property
    def yaml(self) -> str:
        """The change as a config to lay over that of the fit."""
        tree: dict[str, object] = {}
        for overlay in self.change.overlays:
            _lay_over(tree, overlay_tree(overlay))
        _lay_over(tree, nested(self.change.settings))
        return yaml.safe_dump(tree, sort_keys=False)


def overlay_tree(name: str) -> dict[str, Any]:
    """Return a config of this package as nested data."""
    return yaml.safe_load(configs.known()[name].read_text("utf-8")) or {}


def _lay_over(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping):
            _lay_over(tree.setdefault(key, {}), value)
        elif key.endswith("+"):
            tree[key] = [*tree.get(key, []), *value]
        else:
            tree[key] = value


def candidates(config: Mapping[str, Any], trainer: Trainer) -> list[Candidate]:
    """Return the techniques that save memory, have an overlay and are not in the trainer yet, the cheapest first.

    Techniques that set the accumulation themselves are left out, because smaller batches are tried separately.
    """
    cards = {card.name: card for card in read_cards()}
    present = {type(callback).__name__ for callback in trainer.callbacks}  # type: ignore[attr-defined]
    now = config.get("trainer", {})
    found = []
    for name, reason in helping(list(cards.values()), "memory"):
        kind = getattr(lit_efficient, name)
        overlay = overlay_of(cards[name])
        is_technique = issubclass(kind, Declaration) and not has_trait(kind, Trait.CHANGES_ACCUMULATION)
        if not overlay or name in present or not is_technique:
            continue
        sets = {}
        for key, value in overlay_tree(overlay).get("trainer", {}).items():
            if not key.endswith("+") and now.get(key) != value:
                sets[key] = value
        rank = int(cards[name].facts["memory"].partition(".")[0])
        computes = kind.computes
        if sets:
            computes = "other"  # another setting of the trainer may change the results
        found.append(Candidate(name, overlay, rank, reason, computes, sets))
    return found


def cheapest(
    predictions: Predictions, among: Sequence[Candidate], base: Change = AS_IT_IS, skipped: dict[str, str] | None = None
) -> list[Candidate] | None:
    """Return the cheapest set of techniques with which a fit fits; ``None`` if there is none.

    Techniques are added one after the other, the cheapest first, until the fit fits; a fit that is far from fitting
    gets all at once. Those that are not needed are removed again, the most expensive first. If that does not suffice,
    techniques that were refused together with others are tried before the others.

    Args:
        predictions: Plans of changes.
        among: Techniques to choose from.
        base: Change that is always included.
        skipped: Receives the reasons why techniques were left out.
    """
    among = sorted(among, key=lambda one: one.cost)
    if skipped is None:
        skipped = {}
    predictions.begin("search for techniques", 2 * len(among))
    if predictions.fits(base):
        return []
    chosen = _enough(predictions, among, base, skipped)
    # A technique that was refused may exclude cheaper ones that do not suffice.
    for first in among:
        if chosen is None and first.name in skipped and not isinstance(predictions(_with(base, [first])), Refusal):
            order = [first, *(one for one in among if one is not first)]
            chosen = _enough(predictions, order, base, {})
    if chosen is None:
        return None
    # Adding in order of cost may have added techniques that later ones make unnecessary.
    for one in sorted(chosen, key=lambda one: -one.cost):
        rest = [other for other in chosen if other is not one]
        if predictions.fits(_with(base, rest)):
            chosen = rest
    return chosen


def _enough(
    predictions: Predictions, order: Sequence[Candidate], base: Change, skipped: dict[str, str]
) -> list[Candidate] | None:
    """Return the first techniques of ``order`` that suffice, without those that are refused or save nothing."""
    chosen: list[Candidate] = []
    before = predictions(base)
    if not isinstance(before, Refusal) and before.peak > _FAR * predictions.limit:
        together = _together(predictions, order, base, skipped)
        if together is not None:
            found = predictions(_with(base, together))
            assert not isinstance(found, Refusal)
            if found.peak <= predictions.limit:
                return together
            if found.peak > _HOPELESS * predictions.limit:
                return None
    for one in order:
        found = predictions(_with(base, [*chosen, one]))
        if isinstance(found, Refusal):
            skipped[one.name] = found.reason.removeprefix(f"{one.name}: ")
        elif not isinstance(before, Refusal) and found.peak > before.peak:
            skipped[one.name] = "it needs more memory here than it saves"
        else:
            chosen.append(one)
            before = found
            if found.peak <= predictions.limit:
                return chosen
    return None


def _together(
    predictions: Predictions, order: Sequence[Candidate], base: Change, skipped: dict[str, str]
) -> list[Candidate] | None:
    """Return all techniques of ``order`` without those that are refused; ``None`` if a refusal does not name them.

    The first technique stays. If it is refused, the other one that is named goes.
    """
    together = list(order)
    while True:
        found = predictions(_with(base, together))
        if not isinstance(found, Refusal):
            return together
        named = [one for one in together[1:] if found.reason.startswith(one.name)]
        named = named or [one for one in together[1:] if one.name in found.reason]
        if not named:
            return None
        skipped[named[0].name] = found.reason.removeprefix(f"{named[0].name}: ")
        together.remove(named[0])


def _with(base: Change, chosen: Sequence[Candidate]) -> Change:
    return changed(base, {}, tuple(one.overlay for one in sorted(chosen, key=lambda one: one.cost)))


class Adviser:
    """Search for changes with which a fit fits.

    Args:
        predictions: Plans of changes.
        among: Techniques to choose from.
        fit: The fit.
        batch: Setting of the batch size; ``None`` if there is none.
        length: Function that returns the setting of the context length, or raises a ConfigurationError.
        normalises: True if layers normalise over a batch, so that smaller batches change the training.
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
        self.predictions = predictions
        self.among = among
        self.batch = batch
        self.length = length
        self.accumulated = int(fit.trainer.accumulate_grad_batches)
        self.automatic = bool(fit.module.automatic_optimization)
        self.normalises = normalises
        self.skipped: dict[str, str] = {}  # techniques that were left out, with reasons

    def all(self) -> Iterator[Advice]:
        """Yield each piece of advice as soon as it is planned, the cheapest first."""
        smaller = self._smaller()
        if smaller:
            yield smaller
        base = AS_IT_IS
        where = "at the same batch"
        same = self._set("same", base, where)
        if not smaller and not same and self.batch is not None and self.batch.now > 1:
            base = self._batch_of(1)
            where = "in batches of 1"
            if self.automatic:
                where += ", accumulated"
            same = self._set("same", base, where)
        if same:
            yield same
        # Changes of the training come last, whatever they cost.
        for kind in ("rounded", "other"):
            # A change of the results is worth it only if it is cheaper, or if nothing else fits.
            cheaper = [one for one in self.among if one.computes == kind]
            if same:
                dearest = max((one.cost for one in same.techniques), default=0)
                cheaper = [one for one in cheaper if one.cost < dearest]
            if cheaper or not same:
                other = self._set(kind, base, where)
                if other and any(one.computes == kind for one in other.techniques):
                    yield other
                    return
        if not smaller and not same:
            shorter = self._shorter()
            if shorter:
                yield shorter

    def _batch_of(self, size: int) -> Change:
        assert self.batch is not None
        change = self.batch.set(size)
        if not self.automatic:
            return change
        return changed(change, {"trainer.accumulate_grad_batches": self.batch.now * self.accumulated // size})

    def _smaller(self) -> Advice | None:
        """Return the largest smaller batch that fits. It is accumulated to the same effective batch if possible."""
        if self.batch is None or self.batch.now == 1:
            return None
        now = self.batch.now
        sizes: Sequence[int] = range(1, now)
        # Batches of a manual optimization cannot be accumulated by the trainer.
        title = "smaller batches (changes the result)"
        if self.automatic:
            sizes = [size for size in divisors(now * self.accumulated) if size < now]
            title = "the same result, in smaller batches that are accumulated"
            if self.normalises:
                title = "smaller batches that are accumulated (changes the result: layers normalise over a batch)"
        self.predictions.begin("search for a smaller batch", 2 * len(sizes).bit_length())
        size = largest_fitting(sizes, lambda size: self.predictions.fits(self._batch_of(size)))
        if size is None:
            return None
        return self._advice(title, self._batch_of(size))

    def _set(self, kind: str, base: Change, where: str) -> Advice | None:
        order = list(TITLES)
        kinds = order[: order.index(kind) + 1]
        among = [one for one in self.among if one.computes in kinds]
        chosen = cheapest(self.predictions, among, base, self.skipped)
        if chosen is None:
            return None
        return self._advice(f"{TITLES[kind]}, {where}", _with(base, chosen), tuple(chosen))

    def _shorter(self) -> Advice | None:
        base = AS_IT_IS
        if self.batch is not None and self.batch.now > 1:
            base = self._batch_of(1)
        try:
            found = self.length().largest(self.predictions, base)
        except ConfigurationError:  # no setting of a length
            return None
        if found.plan is None:
            return None
        return self._advice("a shorter context (changes the result)", found.change)

    def _advice(self, title: str, change: Change, techniques: tuple[Candidate, ...] = ()) -> Advice | None:
        found = self.predictions(change)
        if isinstance(found, Refusal):
            return None
        return Advice(title, change, found, techniques)
