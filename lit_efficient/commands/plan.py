"""``python -m lit_efficient plan -c X``: what a fit needs, before it runs and before any weight is made; and what to do
about it.

A step is traced without values (:mod:`lit_efficient.evidence.planning.plan`). Where the fit fits, the largest batch is
searched, and where it does not, the cheapest set of techniques with which it does. Each answer is that of a plan which
was made for it.
"""

import argparse
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_efficient.commands.card import wrapped
from lit_efficient.errors import ConfigurationError, check_choice, check_installed, check_number, refusal

if TYPE_CHECKING:
    from lit_efficient.evidence.planning.advice import Advice
    from lit_efficient.evidence.planning.plan import Plan
    from lit_efficient.evidence.planning.plan_search import Found
    from lit_efficient.internals.lightning_strategies import Traits

_DOES_NOT_FIT, _UNKNOWN, _INTERRUPTED = 3, 5, 130
SOLVES = ("train_batch_size", "max_length", "lora_rank", "devices")


def run(argv: Sequence[str]) -> int:
    """Answer ``plan``."""
    parser = argparse.ArgumentParser(
        "lit_efficient plan",
        description="Say what a fit with these options will need: trace one step without values, and add up what lies "
        "in memory, by kind. Then the largest batch that fits, or what makes this one fit. Takes the options of fit: "
        "-c CONFIG, --trainer.precision bf16-mixed, ...",
        epilog="exit codes: 0 fits, 3 does not, 5 cannot be said, 2 what the user can mend",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device_memory", metavar="24GiB", help="what the device has; what is free on the one here if left out"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="how many; what the config says if left out")
    parser.add_argument("--solve", metavar="WHAT", help=f"the answer to one question alone: {', '.join(SOLVES)}")
    parser.add_argument("--no_advice", action="store_true", help="the plan alone: no search")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    parser.add_argument("--output", metavar="FILE.png", help="a picture of the memory over the step")
    parser.add_argument("--quiet", action="store_true", help="no lines of progress")
    options, rest = parser.parse_known_args(argv)
    if options.solve is not None:
        check_choice("plan", "--solve", options.solve, SOLVES)
    if options.devices is not None:
        check_number("plan", "--devices", options.devices, least=1, most=4096, whole=True)
    if options.output:
        check_installed("plan --output", "matplotlib")
        if not Path(options.output).absolute().parent.is_dir():
            raise refusal("plan", "--output", "a file in a folder that exists", options.output)
    if options.device_memory is not None:
        _bytes(options.device_memory)
    from lit_efficient.cli.errors import explained

    with explained(rest), tempfile.TemporaryDirectory() as root:
        return _Answer(options, rest, root).code()


def _bytes(text: str) -> int:
    from lit_efficient.mechanisms.trials.memory import parse_bytes

    size = parse_bytes(text, "plan", "--device-memory")
    if text.strip().isdigit() and size < 2**20:
        raise refusal("plan", "--device-memory", "a size with its unit, such as 24GiB", text)
    return size


class _Answer:
    """The plan of a command line, printed piece by piece, or as JSON at the end."""

    def __init__(self, options: argparse.Namespace, argv: Sequence[str], root: str) -> None:
        from lit_efficient.cli.fits import ConfigFit
        from lit_efficient.evidence.planning.plan_search import Predictions
        from lit_efficient.internals.lightning_strategies import traits_named

        self.options, self.width = options, max(40, shutil.get_terminal_size().columns)
        self.data: dict[str, Any] = {}
        with _hushed():
            self.config = ConfigFit(argv, root).config()
            trainer = self.config["trainer"]
            self.traits: Traits = traits_named(trainer["strategy"])
            self.source = _Kept(ConfigFit([*argv, *_one_device(trainer)], root, "meta"))
            self.fit = self.source.make()
        away = trainer["accelerator"] in ("gpu", "cuda") and self.fit.trainer.strategy.root_device.type == "cpu"
        self.kernels = "cuda" if away else None  # whose are assumed
        self.devices = self._devices(trainer)
        self.limit, self.limit_from = self._memory(trainer)
        say = None if options.quiet else lambda line: print(line, file=sys.stderr, flush=True)
        self.predictions: Predictions = Predictions(self._predict, self.limit, say)

    def _devices(self, trainer: dict[str, Any]) -> int:
        """How many processes train, as the options or the config have it."""
        if self.options.devices is not None:
            return int(self.options.devices)
        given = trainer["devices"]
        if isinstance(given, str) and given.lstrip("-").isdigit():
            given = int(given)
        count = len(given) if isinstance(given, list) else given if isinstance(given, int) and given > 0 else 1
        if given in ("auto", -1) and self.fit.trainer.strategy.root_device.type != "cpu":
            import torch

            count = torch.accelerator.device_count()
        return count * int(trainer["num_nodes"] or 1)

    def _memory(self, trainer: dict[str, Any]) -> tuple[int, str]:
        """Bytes of the device, and where that is known from."""
        import torch

        from lit_efficient.mechanisms.trials.memory import available_cpu_memory

        if self.options.device_memory is not None:
            return _bytes(self.options.device_memory), "--device-memory"
        device = self.fit.trainer.strategy.root_device
        if device.type != "cpu":
            return int(torch.accelerator.get_memory_info(device)[0]), f"free on {device} now"
        free = available_cpu_memory()
        if trainer["accelerator"] not in ("auto", "cpu") or free is None:
            wanted = f"given, as there is no {trainer['accelerator']} here that could be asked: 24GiB, for example"
            raise refusal("plan", "--device-memory", wanted, None)
        return free, "free in this system for its CPU now"

    def _predict(self, change: Any) -> "Plan":
        return self._shared(self._alone(change), self.devices)

    def _alone(self, change: Any) -> "Plan":
        from lit_efficient.evidence.planning.plan import plan

        with _hushed():
            return plan(self.source, change, device=self.kernels)  # type: ignore[arg-type]

    def _shared(self, alone: "Plan", devices: int) -> "Plan":
        from lit_efficient.evidence.planning.plan_devices import per_device

        return per_device(alone, devices, self.traits, self._gathered() if devices > 1 else 0)

    def _gathered(self) -> int:
        from lit_efficient.evidence.planning.plan_devices import gathered_bytes

        precision = str(self.config["trainer"]["precision"])
        return gathered_bytes(self.source.made.module, self.traits, precision) if self.traits.shards else 0

    def code(self) -> int:
        """Print everything; the exit code."""
        code = 0
        try:
            code = self._solved() if self.options.solve else self._planned()
        except (KeyboardInterrupt, SystemExit) as end:
            if isinstance(end, SystemExit) and not isinstance(end.__context__, KeyboardInterrupt):
                raise
            self.data["interrupted"], code = True, _INTERRUPTED  # a trainer makes an exit of it
            print("\ninterrupted", file=sys.stderr)
        if self.options.json and self.data:
            print(json.dumps(self.data, indent=2, ensure_ascii=False))
        return code

    def _planned(self) -> int:
        from lit_efficient.evidence.planning.plan_settings import batch_lever

        plan = self._predict_first()
        fits = plan.peak <= self.limit
        self._tell(_lines(plan, self), plan=asdict(plan), fits=fits, device=self._device())
        if self.options.output:
            from lit_efficient.evidence.planning.plan_picture import draw_memory

            name = type(self.fit.module).__name__
            draw_memory(
                Path(self.options.output), plan, self.limit, f"{name}: memory over one step, batch {plan.batch}"
            )
            self._tell([f"picture   {self.options.output}"], picture=self.options.output)
        if not self.options.no_advice:
            batch, why = None, ""
            try:
                batch = batch_lever(self.fit, self.predictions, plan)
            except ConfigurationError as error:
                why = str(error)
            if fits and batch:
                found = batch.largest(self.predictions)
                self._tell(
                    ["", *_found_lines("largest", found, batch.names, self.limit)], largest=_found(found, batch.names)
                )
            elif fits:
                self._tell(wrapped(f"largest   {why}", self.width, " " * 10), largest=None)
            else:
                self._advise(plan, batch)
        unknown = plan.at_least if fits else plan.at_most
        return _UNKNOWN if unknown else 0 if fits else _DOES_NOT_FIT

    def _advise(self, plan: "Plan", batch: Any) -> None:
        from lit_efficient.evidence.planning.advice import Adviser, candidates
        from lit_efficient.evidence.planning.plan_settings import length_lever
        from lit_efficient.internals.torch_layers import BatchNorm

        self._tell(["", "what makes it fit, each with its own plan's peak; append to `fit -c CONFIG`:"], advice=[])
        adviser = Adviser(
            self.predictions,
            candidates(self.config, self.fit.trainer),
            self.fit,
            batch,
            lambda: length_lever(self.fit, self.predictions, plan),
            any(isinstance(module, BatchNorm) for module in self.source.made.module.modules()),
        )
        for advice in adviser.all():
            self.data["advice"].append(_advice(advice))
            self._tell(_advice_lines(advice, self.limit, self.width))
        if not self.data["advice"]:
            self._tell(["  nothing that was tried: a smaller model, or a larger device"])
        skipped = [f"  {name}: {reason}" for name, reason in adviser.skipped.items()]
        lines = [line for text in skipped for line in wrapped(text, self.width, "    ")]
        self._tell(["not used:", *lines] if lines else [], skipped=adviser.skipped)

    def _solved(self) -> int:
        from lit_efficient.evidence.fits import AS_IT_IS
        from lit_efficient.evidence.planning.plan_devices import MOST, least_devices
        from lit_efficient.evidence.planning.plan_settings import batch_lever, length_lever, rank_lever

        wanted = self.options.solve
        if wanted == "devices":
            alone = self._alone(AS_IT_IS)
            count = least_devices(alone, self.limit, self.traits, self._gathered())
            plan = self._shared(alone, count or 1)
            stated = {"value": count, "strategy": self.traits.name, "peak": plan.peak}
            text = f"devices: {count} with {self.traits.name}" if count else f"devices: not even {MOST} are enough"
            more = "" if count or self.traits.shards else f": with {self.traits.name} each has all of it"
            self._tell(
                [f"{text}{more}; peak {_size(plan.peak)} of {_size(self.limit)}"], solve={"what": wanted, **stated}
            )
            self._tell([line for note in plan.notes for line in wrapped(f"  {note}", self.width, "    ")])
            return 0 if count else _DOES_NOT_FIT
        plan = self._predict_first()
        if wanted == "lora_rank":
            lever = rank_lever(self.fit)
        else:
            lever = (batch_lever if wanted == "train_batch_size" else length_lever)(self.fit, self.predictions, plan)
        found = lever.largest(self.predictions)
        self._tell(
            _found_lines(wanted, found, lever.names, self.limit),
            solve={"what": wanted, **_found(found, lever.names)},
            device=self._device(),
        )
        return 0 if found.value is not None else _DOES_NOT_FIT

    def _predict_first(self) -> "Plan":
        from lit_efficient.evidence.fits import AS_IT_IS
        from lit_efficient.evidence.planning.plan_search import Refusal

        plan = self.predictions(AS_IT_IS)
        if isinstance(plan, Refusal):
            raise ConfigurationError(plan.reason)
        return plan

    def _device(self) -> dict[str, Any]:
        stated = {"bytes": self.limit, "from": self.limit_from, "devices": self.devices}
        return {**stated, "strategy": self.traits.name if self.devices > 1 else None}

    def _tell(self, lines: Sequence[str], **data: Any) -> None:
        self.data |= data
        if not self.options.json and lines:
            print("\n".join(lines), flush=True)


class _Kept:
    """A source of fits that keeps the one made last, whose network has been built by then."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.made: Any = None

    def make(self, *change: Any) -> Any:
        self.made = self.source.make(*change)
        return self.made


def _one_device(trainer: dict[str, Any]) -> list[str]:
    """Options with which a fit for any devices can be built here, for one."""
    import torch

    there = trainer["accelerator"] in ("auto", "cpu") or torch.accelerator.is_available()
    options = ["--trainer.devices=1", "--trainer.num_nodes=1", "--trainer.strategy=auto"]
    return options if there else [*options, "--trainer.accelerator=cpu"]


def _hushed() -> AbstractContextManager[None]:
    """No log lines, prints and warnings of what is built again and again, and of a run that is none."""
    from lit_efficient.mechanisms.trials.steps import quiet

    return quiet(warns=False, prints=io.StringIO())


def _lines(plan: "Plan", answer: _Answer) -> list[str]:
    """The plan for people."""
    from lit_efficient.mechanisms.metering import short_number

    fit, width = answer.fit, answer.width
    amount = f"{plan.amount:,} {plan.unit}" if plan.unit != "samples" else f"{plan.amount:,} samples"
    lines = [
        f"model     {type(fit.module).__name__}, {plan.parameters:,} parameters, {plan.trainable:,} train",
        f"step      batch of {plan.batch:,}, {amount}, {short_number(plan.flops)}FLOP",
        "techniques, in the order in which they act:",
        *(line for name, text in plan.techniques for line in wrapped(f"  {name}: {text}", width, "    ")),
    ]
    if not plan.techniques:
        lines[-1] = "techniques: none"
    bounds = {"AT LEAST": plan.at_least, "AT MOST": plan.at_most}
    for bound, why in bounds.items():
        if why:
            lines = [*wrapped(f"{bound}  what follows: {why}, and a real step may take another amount", width), *lines]
    where = max(plan.timeline, key=lambda moment: sum(moment.kinds.values())).name if plan.timeline else ""
    each = f" of each of {answer.devices} devices ({answer.traits.name})" if answer.devices > 1 else ""
    lines += ["", *wrapped(f"memory{each}; its peak is in: {where or 'the step'}", width)]
    lines.append(f"  {'':<14}{'at its peak':>12}{'between steps':>16}")
    for kind in dict.fromkeys((*plan.kinds, *plan.resident)):
        size, stays = plan.kinds.get(kind, 0), plan.resident.get(kind, 0)
        if size or stays:
            lines.append(f"  {kind:<14}{_size(size):>12}{_size(stays) if stays else '-':>16}")
    lines.append(f"  {'together':<14}{_size(plan.peak):>12}{_size(sum(plan.resident.values())):>16}")
    if plan.host:
        lines.append(f"  beside it {_size(plan.host)} in the host's memory")
    left = answer.limit - plan.peak
    word = f"fits, {_size(left)} are left" if left >= 0 else f"DOES NOT FIT, {_size(-left)} are missing"
    if why := plan.at_least if left >= 0 else plan.at_most:
        word = f"CANNOT BE SAID: this {word}, but {why}"
    lines += wrapped(f"device    {_size(answer.limit)} ({answer.limit_from}): {word}", width, " " * 10)
    return [*lines, *(line for note in plan.notes for line in wrapped(f"note      {note}", width, " " * 10))]


def _found_lines(what: str, found: "Found", names: Sequence[str], limit: int) -> list[str]:
    settings = " ".join(f"--{name} {found.value}" for name in names if not name[0].isupper())  # else of a technique
    if found.value is None or found.plan is None:
        why = found.reason or f"{found.above} needs {_size(found.above_peak or 0)} of {_size(limit)}"
        return [f"{what}: none fits; {names[0]} {why}"]
    lines = [f"{what}: {names[0]} {found.value:,}, peak {_size(found.plan.peak)} of {_size(limit)}"]
    lines += [f"    {settings}"] if settings else []
    if found.above is not None:
        why = found.reason or f"needs {_size(found.above_peak or 0)}"
        return [*lines, f"  {found.above:,}: {why}"]
    return [*lines, "  larger ones may fit as well: the search ended here"]


def _advice_lines(advice: "Advice", limit: int, width: int) -> list[str]:
    lines = wrapped(f"* {advice.title}: peak {_size(advice.plan.peak)} of {_size(limit)}", width, "  ")
    lines += [f"    {' '.join(advice.words)}"]
    for one in advice.techniques:
        sets = "".join(f"; it sets trainer.{key} to {json.dumps(value)}" for key, value in one.sets.items())
        lines += wrapped(f"    {one.name}: {one.reason}{sets}", width, "      ")
    return lines


def _found(found: "Found", names: Sequence[str]) -> dict[str, Any]:
    return {
        "settings": list(names),
        "value": found.value,
        "peak": found.plan.peak if found.plan else None,
        "next": found.above,
        "next_peak": found.above_peak,
        "next_refused": found.reason or None,
    }


def _advice(advice: "Advice") -> dict[str, Any]:
    stated = {"title": advice.title, "options": advice.words, "yaml": advice.yaml, "peak": advice.plan.peak}
    techniques = [{"name": one.name, "changes": one.computes, "sets": dict(one.sets)} for one in advice.techniques]
    return {**stated, "kinds": dict(advice.plan.kinds), "techniques": techniques}


def _size(size: float) -> str:
    """Four digits or fewer, as limits are often near."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1000 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.2f} {unit}" if size < 100 else f"{size:,.1f} {unit}"
