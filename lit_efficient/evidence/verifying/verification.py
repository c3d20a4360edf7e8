"""Check the claims of a training on the user's own module, data and settings, and say what came out.

    report = lit_efficient.verify(trainer, module, data);    print(report.text());    assert report.held

Each claim is checked on fits of its own, of a few steps; what cannot be tried is said, and never counted as true.
"""

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_efficient.errors import ConfigurationError, did_you_mean, refusal
from lit_efficient.evidence.fits import FitSource, LiveFit
from lit_efficient.evidence.verifying.claims import Claim, Subject, Verdict, silence
from lit_efficient.evidence.verifying.claims_of_checkpoints import OF_CHECKPOINTS
from lit_efficient.evidence.verifying.claims_of_data import OF_DATA
from lit_efficient.evidence.verifying.claims_of_execution import OF_EXECUTION
from lit_efficient.evidence.verifying.claims_of_labels import OF_LABELS
from lit_efficient.evidence.verifying.claims_of_noise import OF_NOISE
from lit_efficient.evidence.verifying.claims_of_shards import OF_SHARDS
from lit_efficient.evidence.verifying.claims_of_training import OF_TRAINING, RUNS
from lit_efficient.evidence.verifying.claims_of_weights import OF_WEIGHTS
from lit_efficient.evidence.verifying.small_builds import small
from lit_efficient.internals.lightning_strategies import NEEDS_MESH, lacks_mesh
from lit_efficient.mechanisms.rewind import other_randomness, random_states

CLAIMS: tuple[Claim, ...] = (
    RUNS,
    *OF_TRAINING,
    *OF_WEIGHTS,
    *OF_CHECKPOINTS,
    *OF_DATA,
    *OF_LABELS,
    *OF_NOISE,
    *OF_EXECUTION,
    *OF_SHARDS,
)
_WORDS = {True: "PASS", False: "FAIL", None: "-"}


@dataclass(frozen=True)
class Report:
    """What came out of `verify`.

    Args:
        verdicts: One a claim, in order.
        shortened: What was done to a large model to make it small, as a clause; empty where it is as it is.
        left: Claims that were not reached, because somebody interrupted.
        seconds: How long it took.
    """

    verdicts: tuple[Verdict, ...]
    shortened: str = ""
    left: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def held(self) -> bool:
        """Whether no claim failed."""
        return all(verdict.held is not False for verdict in self.verdicts)

    @property
    def exit_code(self) -> int:
        """0, or 2 if a claim failed; 130 after Ctrl-C."""
        return 2 if not self.held else 130 if self.left else 0

    def text(self) -> str:
        """A line a claim, and one more of a failure; then the summary."""
        lines = [line for verdict in self.verdicts for line in lines_of(verdict)]
        return "\n".join([*lines, *self.summary()])

    def summary(self) -> list[str]:
        """How many claims hold, what was done to the model, and what was not covered."""
        counts = [sum(verdict.held is held for verdict in self.verdicts) for held in (True, False, None)]
        lines = ["{} hold, {} fail, {} do not apply or were not tried; {:.0f} s".format(*counts, self.seconds)]
        lines += [f"the model: {self.shortened}"] if self.shortened else []
        covered: dict[str, list[str]] = {}
        for verdict in self.verdicts:
            for what in verdict.uncovered:
                covered.setdefault(what, []).append(verdict.claim)
        lines += ["not covered:"] if covered else []
        lines += [f"  {what} ({', '.join(names)})" for what, names in covered.items()]
        return [*lines, f"interrupted; not reached: {', '.join(self.left)}"] if self.left else lines

    def json(self) -> str:
        """The same for programs; numbers that are not finite are texts."""
        verdicts = [{key: _plain(value) for key, value in asdict(verdict).items()} for verdict in self.verdicts]
        sentences = {claim.name: claim.sentence for claim in CLAIMS}
        verdicts = [{**one, "sentence": sentences.get(one["claim"], "")} for one in verdicts]
        more = {
            "held": self.held,
            "shortened": self.shortened,
            "left": list(self.left),
            "seconds": round(self.seconds, 1),
        }
        return json.dumps({"verdicts": verdicts, **more}, indent=2)


def lines_of(verdict: Verdict) -> list[str]:
    """A verdict for people."""
    head = f"{_WORDS[verdict.held]:4}  {verdict.claim:{max(len(claim.name) for claim in CLAIMS)}}  "
    figure = ""
    if verdict.number is not None and verdict.tolerance is not None:
        figure = f"{verdict.number:.2g} of {verdict.tolerance:.2g} allowed ({verdict.unit}): "
    lines = [f"{head}{figure}{verdict.why}"]
    return [*lines, f"{'':{len(head)}}first where it differs: {verdict.where}"] if verdict.where else lines


def verify(
    fit: Any,
    module: Any = None,
    data: Any = None,
    *,
    only: Sequence[str] = (),
    full: bool = False,
    seed: int = 0,
    tell: Callable[[str], object] | None = None,
    seen: Callable[[Verdict], object] | None = None,
) -> Report:
    """Check what ought to be true of a training, on copies of it that train a few steps and leave no trace.

    Args:
        fit: A trainer, which is left as it is, or a :class:`~lit_efficient.evidence.fits.FitSource`.
        module: With a trainer: the LightningModule.
        data: With a trainer: a DataModule, a loader, a pair of one to train and one to validate on, or ``None``.
        only: Names of the claims to check, all by default; `runs` comes first all the same, as all stand on it.
        full: Take a model of more than 50 million parameters as it is, not two narrow blocks of it.
        seed: With a trainer: what random numbers begin with.
        tell: Gets a line on the progress now and then.
        seen: Gets each verdict as soon as it is there.

    Returns:
        The verdicts. Ctrl-C ends it with those that are there.

    Raises:
        ConfigurationError: If ``only`` names no claim.
    """
    source = fit if isinstance(fit, FitSource) else LiveFit(fit, module, data, seed)
    claims = chosen(only)
    began, verdicts, environment = time.monotonic(), [], dict(os.environ)
    left: tuple[str, ...] = ()
    with tempfile.TemporaryDirectory(prefix="verify-") as folder, other_randomness(random_states()):
        said = ""
        if not full:
            with silence():
                source, said = small(source, lambda changed: Subject(changed, Path(folder)).train(1))
        subject = Subject(source, Path(folder), full, said)
        try:
            subject.within(lambda trainer, module: None)  # what is wrong before the first step is no verdict
        except Exception as error:
            if lacks_mesh(error):
                raise ConfigurationError(
                    f"verify: one process checks the claims, and cannot run {NEEDS_MESH}: let it shard where "
                    "self.device_mesh is one, or take ShardedStrategy, which shards any module"
                ) from error
            raise
        try:
            if not (runs := RUNS.check(subject)).held:
                claims, verdicts = [], [runs]  # nothing can be checked
            for i, claim in enumerate(claims):
                if tell is not None:
                    tell(_progress(claim, i, len(claims), time.monotonic() - began))
                verdicts.append(_checked(claim, subject))
                if seen is not None:
                    seen(verdicts[-1])
        except KeyboardInterrupt:
            left = tuple(claim.name for claim in claims[len(verdicts) :])
        finally:
            os.environ.clear()
            os.environ.update(environment)
    return Report(tuple(verdicts), subject.shortened, left, time.monotonic() - began)


def chosen(only: Sequence[str]) -> list[Claim]:
    """The claims of these names, in their order; all where none is named.

    Raises:
        ConfigurationError: For a name that no claim has.
    """
    names = [claim.name for claim in CLAIMS]
    for name in only:
        if name not in names:
            raise refusal("verify", "--only", f"one of {', '.join(names)}{did_you_mean(name, names)}", name)
    return [claim for claim in CLAIMS if not only or claim.name in only]


def _checked(claim: Claim, subject: Subject) -> Verdict:
    """The verdict; what stops a check is one, too, but not on the claim."""
    try:
        with silence():
            return claim.check(subject)
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        return Verdict(claim.name, None, why=f"could not be tried: {type(error).__name__}: {said}")


def _progress(claim: Claim, done: int, number: int, seconds: float) -> str:
    left = f", about {seconds / done * (number - done):.0f} s left" if done else ""
    return f"{done + 1} of {number}: {claim.sentence}{left}"


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
