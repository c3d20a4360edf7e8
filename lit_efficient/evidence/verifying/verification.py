"""Check claims about a training on the user's own module, data and settings, and report the results.

    report = lit_efficient.verify(trainer, module, data);    print(report.text());    assert report.held

Each claim is checked on separate fits of a few steps. A claim that could not be tried is reported as such, and never
counts as true.
"""

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

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
_WIDTH = max(len(claim.name) for claim in CLAIMS)


@dataclass(frozen=True)
class Report:
    """Results of `verify`.

    Args:
        verdicts: One for each claim, in order.
        shortened: Description of how a large model was made smaller; empty if it was not.
        left: Claims that were not checked because of an interruption.
        seconds: Duration of all checks.
    """

    verdicts: tuple[Verdict, ...]
    shortened: str = ""
    left: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def held(self) -> bool:
        """True if no claim failed."""
        return all(verdict.held is not False for verdict in self.verdicts)

    @property
    def exit_code(self) -> int:
        """0, or 2 if a claim failed, or 130 after Ctrl-C."""
        if not self.held:
            return 2
        if self.left:
            return 130
        return 0

    def text(self) -> str:
        """Return a line for each claim, a second one for each failure, and the summary."""
        lines = [line for verdict in self.verdicts for line in lines_of(verdict)]
        return "\n".join([*lines, *self.summary()])

    def summary(self) -> list[str]:
        """Return lines on the number of claims that hold, on changes of the model, and on what was not covered."""
        held, failed, idle = (sum(verdict.held is value for verdict in self.verdicts) for value in (True, False, None))
        lines = [f"{held} hold, {failed} fail, {idle} do not apply or were not tried; {self.seconds:.0f} s"]
        if self.shortened:
            lines.append(f"the model: {self.shortened}")
        claims: dict[str, list[str]] = {}
        for verdict in self.verdicts:
            for part in verdict.uncovered:
                claims.setdefault(part, []).append(verdict.claim)
        if claims:
            lines.append("not covered:")
            lines += [f"  {part} ({', '.join(names)})" for part, names in claims.items()]
        if self.left:
            lines.append(f"interrupted; not reached: {', '.join(self.left)}")
        return lines

    def json(self) -> str:
        """Return the results as JSON. Numbers that are not finite are texts."""
        sentences = {claim.name: claim.sentence for claim in CLAIMS}
        verdicts = []
        for verdict in self.verdicts:
            record = {**asdict(verdict), "sentence": sentences.get(verdict.claim, "")}
            if verdict.number is not None and not math.isfinite(verdict.number):
                record["number"] = str(verdict.number)
            verdicts.append(record)
        found = {
            "verdicts": verdicts,
            "held": self.held,
            "shortened": self.shortened,
            "left": list(self.left),
            "seconds": round(self.seconds, 1),
        }
        return json.dumps(found, indent=2)


def lines_of(verdict: Verdict) -> list[str]:
    """Return the lines of a verdict."""
    head = f"{_WORDS[verdict.held]:4}  {verdict.claim:{_WIDTH}}  "
    text = verdict.why
    if verdict.number is not None and verdict.tolerance is not None:
        text = f"{verdict.number:.2g} of {verdict.tolerance:.2g} allowed ({verdict.unit}): {text}"
    lines = [head + text]
    if verdict.where:
        lines.append(f"{'':{len(head)}}first difference: {verdict.where}")
    return lines


def verify(
    fit: Trainer | FitSource,
    module: LightningModule | None = None,
    data: object = None,
    *,
    only: Sequence[str] = (),
    full: bool = False,
    seed: int = 0,
    tell: Callable[[str], object] | None = None,
    seen: Callable[[Verdict], object] | None = None,
) -> Report:
    """Check properties that a training should have, on copies that train for a few steps and leave no traces.

    Args:
        fit: A trainer, which is not changed, or a :class:`~lit_efficient.evidence.fits.FitSource`.
        module: The LightningModule, with a trainer.
        data: A DataModule, a loader, a pair of a training and a validation loader, or ``None``, with a trainer.
        only: Names of the claims to check, by default all. The claim `runs` is checked in any case.
        full: Use a model of more than 50 million parameters as it is, instead of two narrow blocks of it.
        seed: Seed of random numbers, with a trainer.
        tell: Function that receives lines of progress.
        seen: Function that receives each verdict as soon as it is known.

    Returns:
        The verdicts. After Ctrl-C, those that are known.

    Raises:
        ConfigurationError: If ``only`` names an unknown claim, or the module needs the mesh of several processes.
    """
    if isinstance(fit, FitSource):
        source = fit
    else:
        source = LiveFit(fit, module, data, seed)
    claims = chosen(only)
    began = time.monotonic()
    environment = dict(os.environ)
    verdicts: list[Verdict] = []
    left: tuple[str, ...] = ()
    with tempfile.TemporaryDirectory(prefix="verify-") as folder, other_randomness(random_states()):
        shortened = ""
        if not full:
            with silence():
                source, shortened = small(source, lambda changed: Subject(changed, Path(folder)).train(1))
        subject = Subject(source, Path(folder), full, shortened)
        # An error of the user in the config must not become a failed claim.
        _check_start(subject)
        try:
            runs = RUNS.check(subject)
            if not runs.held:
                # Without a run nothing else can be checked.
                claims = []
                verdicts.append(runs)
            for i, claim in enumerate(claims):
                if tell is not None:
                    tell(_progress(claim, i, len(claims), time.monotonic() - began))
                verdicts.append(_checked(claim, subject))
                if seen is not None:
                    seen(verdicts[-1])
        except KeyboardInterrupt:
            left = tuple(claim.name for claim in claims[len(verdicts) :])
        finally:
            # A fit may set variables, for example for its processes.
            os.environ.clear()
            os.environ.update(environment)
    return Report(tuple(verdicts), subject.shortened, left, time.monotonic() - began)


def chosen(only: Sequence[str]) -> list[Claim]:
    """Return the claims with these names in their order, or all claims without names.

    Raises:
        ConfigurationError: If no claim has a name.
    """
    names = [claim.name for claim in CLAIMS]
    for name in only:
        if name not in names:
            raise refusal("verify", "--only", f"one of {', '.join(names)}{did_you_mean(name, names)}", name)
    return [claim for claim in CLAIMS if not only or claim.name in only]


def _check_start(subject: Subject) -> None:
    """Raise the errors of a fit before its first step, which are no verdict."""
    try:
        subject.within(lambda trainer, module: None)
    except Exception as error:
        if lacks_mesh(error):
            raise ConfigurationError(
                f"verify: one process checks the claims, and cannot run {NEEDS_MESH}: shard only if self.device_mesh "
                "is set, or use ShardedStrategy, which shards any module"
            ) from error
        raise


def _checked(claim: Claim, subject: Subject) -> Verdict:
    """Return the verdict of a claim. An error of the check says nothing about the claim."""
    try:
        with silence():
            return claim.check(subject)
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        return claim.idle(f"could not be tried: {type(error).__name__}: {text}")


def _progress(claim: Claim, done: int, number: int, seconds: float) -> str:
    text = f"{done + 1} of {number}: {claim.sentence}"
    if done:
        text += f", about {seconds / done * (number - done):.0f} s left"
    return text
