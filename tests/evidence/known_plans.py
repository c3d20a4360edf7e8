"""Plans that follow a formula, so that the right results of searches are known."""

from collections.abc import Callable, Mapping

from lit_efficient.evidence.fits import Change
from lit_efficient.evidence.planning.advice import Candidate
from lit_efficient.evidence.planning.plan import Moment, Plan


def plan_of(kinds: Mapping[str, int], batch: int = 1, **changes: object) -> Plan:
    peak = sum(kinds.values())
    known = {"peak": peak, "kinds": kinds, "resident": {}, "host": 0, "timeline": (Moment("forward", kinds),)}
    known |= {"parameters": 1, "trainable": 1, "flops": 1, "techniques": (), "batch": batch, "unit": "samples"}
    return Plan(**{**known, "amount": batch, "notes": (), **changes})  # type: ignore[arg-type]


def by_formula(peak: Callable[[int], int], made: list[int] | None = None) -> Callable[[Change], Plan]:
    """Return a function that plans a fit whose memory depends on its batch only."""

    def predict(change: Change) -> Plan:
        batch = change.settings["data.batch_size"]
        if made is not None:
            made.append(batch)
        return plan_of({"activations": peak(batch)}, batch)

    return predict


def candidates_of(costs: Mapping[str, int], computes: Mapping[str, str] | None = None) -> list[Candidate]:
    kinds = computes or {}
    return [Candidate(name.title(), name, cost, "", kinds.get(name, "same")) for name, cost in costs.items()]
