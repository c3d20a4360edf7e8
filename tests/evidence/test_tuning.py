"""The search finds the fastest way that fits, by a simulated cost whose best is known, and runs few of all ways."""

import math
import random
from dataclasses import dataclass, field

import pytest

from lit_efficient.evidence.candidates import Candidate, Option, Space
from lit_efficient.evidence.fits import Change, Fit
from lit_efficient.evidence.tuning import Search
from tests.support import Toy, data, trainer


@dataclass
class Plan:
    peak: int
    flops: float


@dataclass
class Ran:
    timed: list[float]
    failed: str = ""
    peak: int = 0
    unit: str = "samples"
    amounts: list[int] = field(default_factory=lambda: [64])


def space_of(options: int, effective: int = 64) -> Space:
    """A space whose options are made up."""
    space = Space(Fit(trainer(max_steps=1), Toy(), data()), only=())
    space.options = {name: Option(name, "same", settings={name: 1}) for name in "ABCDEFGH"[:options]}
    space.effective, space.asked = effective, Candidate(effective // 2, 2)
    space.sizes = [2**i for i in range(effective.bit_length())]
    return space


class Surface:
    """Costs of all candidates of a space: options add, two of them interact, time bends along the batch size."""

    def __init__(self, space: Space, seed: int, limit: float = 0.5) -> None:
        draw = random.Random(seed)
        self.ran: list[str] = []
        self.candidates = {str(one): one for one in space.candidates()}
        names = list(space.options)
        effects = {name: draw.gauss(0.0, 0.25) for name in names}
        pairs = {(a, b): draw.gauss(0.0, 0.05) for a in names for b in names if a < b}
        spared = {name: draw.choice([0.0, 0.0, 0.3, 0.6]) for name in names}
        best, bend = draw.uniform(0, 6), draw.uniform(0.005, 0.03)
        self.seconds, self.peaks = {}, {}
        for name, one in self.candidates.items():
            cost = sum(effects[o] for o in one.options) + bend * (math.log2(one.batch) - best) ** 2
            cost += sum(v for (a, b), v in pairs.items() if a in one.options and b in one.options)
            self.seconds[name] = math.exp(cost)
            saved = math.prod(1 - spared[o] for o in one.options)
            self.peaks[name] = int(1_000_000 + 1_000_000 * one.batch * saved)
        self.limit = sorted(self.peaks.values())[int(limit * (len(self.peaks) - 1))]
        self.noise = random.Random(seed)

    def predict(self, change: Change) -> Plan:
        return Plan(self.peaks[change.name], 1e9)

    def measure(self, change: Change, steps: int) -> Ran:
        assert self.peaks[change.name] <= self.limit
        self.ran.append(change.name)
        return Ran([self.seconds[change.name] * math.exp(self.noise.gauss(0, 0.005)) for _ in range(steps)])

    @property
    def best(self) -> float:
        return min(self.seconds[name] for name, peak in self.peaks.items() if peak <= self.limit)


@pytest.mark.parametrize("limit", [0.02, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_the_best_is_found_by_running_a_few(seed: int, limit: float):
    space = space_of(5)
    surface = Surface(space, seed, limit)
    search = Search(space, surface.predict, surface.measure, surface.limit).run()
    assert search.complete
    assert surface.seconds[str(search.best.candidate)] <= 1.05 * surface.best
    assert len(set(surface.ran)) <= 0.3 * len(surface.candidates)
