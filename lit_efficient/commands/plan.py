"""``python -m lit_efficient plan -c X``: the memory and compute that a fit needs, before it runs, and advice.

A step is traced without values (:mod:`lit_efficient.evidence.planning.plan`). For a fit that fits, the largest batch is
searched. For one that does not, the cheapest set of techniques with which it fits is searched. Every answer comes from
a separate plan.
"""

import argparse
import contextlib
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lit_efficient.commands.card import wrapped
from lit_efficient.errors import (
    ConfigurationError,
    check_choice,
    check_installed,
    check_number,
    parse_bytes,
    refusal,
)

if TYPE_CHECKING:
    from lit_efficient.evidence.fits import Change, Fit, FitSource
    from lit_efficient.evidence.planning.advice import Advice
    from lit_efficient.evidence.planning.plan import Plan
    from lit_efficient.evidence.planning.plan_search import Found
    from lit_efficient.evidence.planning.plan_settings import Lever
    from lit_efficient.internals.lightning_strategies import Traits

# Exit codes.
_DOES_NOT_FIT = 3
_UNKNOWN = 5
_INTERRUPTED = 130
SOLVES = ("train_batch_size", "max_length", "lora_rank", "devices")


def run(argv: Sequence[str]) -> int:
    """Run ``plan`` and return its exit code."""
    parser = argparse.ArgumentParser(
        "lit_efficient plan",
        description="Predict the needs of a fit with these options: trace one step without values, and add up its "
        "memory by kind. Then search for the largest batch that fits, or for changes with which the fit fits. Takes "
        "the options of fit: -c CONFIG, --trainer.precision bf16-mixed, ...",
        epilog="exit codes: 0 it fits, 3 it does not, 5 it cannot be predicted, 2 user error",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device_memory", metavar="24GiB", help="memory of the device (default: the free memory of this device)"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="number of devices (default: that of the config)")
    parser.add_argument("--solve", metavar="WHAT", help=f"search for a single value: {', '.join(SOLVES)}")
    parser.add_argument("--no_advice", action="store_true", help="print the plan only, without a search")
    parser.add_argument(
        "--advice_minutes",
        type=float,
        default=2.0,
        metavar="N",
        help="time for the search after the plan (default: %(default)g); a plan that is under way may end later",
    )
    parser.add_argument("--json", action="store_true", help="print all results as JSON")
    parser.add_argument("--output", metavar="FILE.png", help="picture of the memory over the step")
    parser.add_argument("--quiet", action="store_true", help="print no progress")
    options, rest = parser.parse_known_args(argv)
    if options.solve is not None:
        check_choice("plan", "--solve", options.solve, SOLVES)
    if options.devices is not None:
        check_number("plan", "--devices", options.devices, least=1, most=4096, whole=True)
    check_number("plan", "--advice_minutes", options.advice_minutes, least=0)
    if options.output:
        check_installed("plan --output", "matplotlib")
        if not Path(options.output).absolute().parent.is_dir():
            raise refusal("plan", "--output", "a file in a folder that exists", options.output)
    if options.device_memory is not None:
        _bytes(options.device_memory)
    from lit_efficient.cli import explained

    with explained(rest), tempfile.TemporaryDirectory() as root:
        return _Answer(options, rest, root).code()


def _bytes(text: str) -> int:
    return parse_bytes(text, "plan", "--device-memory")


class _Answer:
    """The results for a command line. They are printed one by one, or as JSON at the end."""

    def __init__(self, options: argparse.Namespace, argv: Sequence[str], root: str) -> None:
        from lit_efficient.cli.fits import ConfigFit
        from lit_efficient.evidence.planning.plan_search import Predictions
        from lit_efficient.internals.lightning_strategies import traits_named
        from lit_efficient.mechanisms.tensor_cores import BFLOAT16, capability_of

        self.options = options
        self.width = max(40, shutil.get_terminal_size().columns)
        self.data: dict[str, Any] = {}
        with _hushed():
            self.config = ConfigFit(argv, root).config()
            trainer = self.config["trainer"]
            self.traits: Traits = traits_named(trainer["strategy"])
            self.source = _KeepsLast(ConfigFit([*argv, *_one_device(trainer)], root, "meta"))
            self.fit: Fit = self.source.make()
        self.kernels = None  # type of the device to simulate
        if trainer["accelerator"] in ("gpu", "cuda") and self.fit.trainer.strategy.root_device.type == "cpu":
            self.kernels = "cuda"
        self.capability = capability_of(self.fit.trainer.strategy.root_device)
        if self.kernels == "cuda":
            self.capability = BFLOAT16  # no GPU is here to ask
        self.devices = self._devices(trainer)
        self.limit, self.limit_from = self._memory(trainer)
        self.as_it_is: Plan | None = None  # of a single device
        self.predictions = Predictions(self._predict, self.limit, None if options.quiet else _to_stderr)

    def _devices(self, trainer: dict[str, Any]) -> int:
        """Return the number of processes, from the options or the config."""
        import torch

        if self.options.devices is not None:
            return int(self.options.devices)
        given = trainer["devices"]
        if isinstance(given, str) and given.lstrip("-").isdigit():
            given = int(given)
        count = 1
        if isinstance(given, list):
            count = len(given)
        elif isinstance(given, int) and given > 0:
            count = given
        elif given in ("auto", -1) and self.fit.trainer.strategy.root_device.type != "cpu":
            count = torch.accelerator.device_count()
        return count * int(trainer["num_nodes"] or 1)

    def _memory(self, trainer: dict[str, Any]) -> tuple[int, str]:
        """Return the memory of the device in bytes, and the source of this number."""
        import torch

        from lit_efficient.mechanisms.trials.memory import available_cpu_memory

        if self.options.device_memory is not None:
            return _bytes(self.options.device_memory), "--device-memory"
        device = self.fit.trainer.strategy.root_device
        if device.type != "cpu":
            return int(torch.accelerator.get_memory_info(device)[0]), f"free on {device} now"
        free = available_cpu_memory()
        if trainer["accelerator"] not in ("auto", "cpu") or free is None:
            wanted = f"given, as there is no {trainer['accelerator']} here: 24GiB, for example"
            raise refusal("plan", "--device-memory", wanted, None)
        return free, "free memory of this system now"

    def _predict(self, change: "Change") -> "Plan":
        return self._shared(self._alone(change), self.devices)

    def _alone(self, change: "Change") -> "Plan":
        """Return the plan of a single device."""
        from lit_efficient.evidence.fits import AS_IT_IS
        from lit_efficient.evidence.planning.plan import plan

        with _hushed():
            made = plan(cast("FitSource", self.source), change, device=self.kernels)
        if change == AS_IT_IS:
            self.as_it_is = made
        return made

    def _shared(self, alone: "Plan", devices: int) -> "Plan":
        from lit_efficient.evidence.planning.plan_devices import per_device

        gathered = 0
        if devices > 1:
            gathered = self._gathered()
        return per_device(alone, devices, self.traits, gathered)

    def _gathered(self) -> int:
        from lit_efficient.evidence.planning.plan_devices import gathered_bytes

        if not self.traits.shards:
            return 0
        return gathered_bytes(self.source.last.module, self.traits, str(self.config["trainer"]["precision"]))

    def code(self) -> int:
        """Print all results and return the exit code."""
        code = _INTERRUPTED
        try:
            if self.options.solve:
                code = self._solved()
            else:
                code = self._planned()
        except (KeyboardInterrupt, SystemExit) as end:
            # A trainer turns an interruption into an exit.
            if isinstance(end, SystemExit) and not isinstance(end.__context__, KeyboardInterrupt):
                raise
            self.data["interrupted"] = True
            print("\ninterrupted", file=sys.stderr)
        if self.options.json and self.data:
            print(json.dumps(self.data, indent=2, ensure_ascii=False))
        return code

    def _planned(self) -> int:
        plan = self._predict_first()
        fits = plan.peak <= self.limit
        self._tell(_lines(plan, self), plan=asdict(plan), fits=fits, device=self._device())
        if self.options.output:
            from lit_efficient.evidence.planning.plan_picture import draw_memory

            title = f"{type(self.fit.module).__name__}: memory over one step, batch {plan.batch}"
            draw_memory(Path(self.options.output), plan, self.limit, title)
            self._tell([f"picture   {self.options.output}"], picture=self.options.output)
        if self.devices > 1 or not fits:
            self._choose_strategy()
        if not self.options.no_advice:
            self._advise(plan, fits)
        # A bound decides nothing if the step may be on its other side.
        if (fits and plan.at_least) or (not fits and plan.at_most):
            return _UNKNOWN
        if fits:
            return 0
        return _DOES_NOT_FIT

    def _choose_strategy(self) -> None:
        """Print what each device needs under each strategy, and the config of the first one that fits.

        For a single device that is too small, as many are taken as the shards need.
        """
        from lit_efficient.evidence.planning.plan_devices import STRATEGIES, choices, gathered_bytes, least_devices
        from lit_efficient.internals.lightning_strategies import traits_named

        assert self.as_it_is is not None
        module = self.source.last.module
        precision = str(self.config["trainer"]["precision"])
        devices: int | None = self.devices
        if devices == 1:
            sharded = traits_named(STRATEGIES[3])
            devices = least_devices(self.as_it_is, self.limit, sharded, gathered_bytes(module, sharded, precision))
        if devices is None:
            self._tell(["strategies: no number of devices of this size is enough at this batch"], strategies=[])
            return
        found = choices(self.as_it_is, devices, module, precision)
        lines = ["", f"strategies on {devices} devices, planned bytes of each device, the fastest first:"]
        for choice in found:
            word = "fits" if choice.plan.peak <= self.limit else "does not fit"
            if choice.plan.host:
                word += f", {_size(choice.plan.host)} in CPU memory"
            if not choice.installed:
                word += ", needs the package deepspeed"
            lines += wrapped(f"  {choice.name}: {_size(choice.plan.peak)}, {word}", self.width, "    ")
        chosen = next((one for one in found if one.installed and one.plan.peak <= self.limit), None)
        if chosen is not None:
            lines += ["a config for the first one that fits, to append with -c FILE:", chosen.yaml.rstrip()]
        self._tell(
            lines,
            strategies=[{"strategy": one.strategy, "peak": one.plan.peak, "yaml": one.yaml} for one in found],
            strategy_yaml=chosen and chosen.yaml,
        )

    def _advise(self, plan: "Plan", fits: bool) -> None:
        """Print the largest batch that fits, or changes with which the fit fits. The search ends after its time."""
        from lit_efficient.evidence.planning.plan_search import SearchEnded

        minutes = self.options.advice_minutes
        self.predictions.end_after(60 * minutes)
        with contextlib.suppress(SearchEnded):
            self._search(plan, fits)
        if self.predictions.stopped:
            if not fits:
                self._tell_smallest()
            text = (
                f"stopped   the search ended after --advice_minutes {minutes:g}, and other changes were not tried. "
                f"Search longer: --advice_minutes {max(10, 5 * minutes):g}"
            )
            self._tell(wrapped(text, self.width, " " * 10), stopped=True)

    def _search(self, plan: "Plan", fits: bool) -> None:
        from lit_efficient.evidence.planning.plan_settings import batch_lever

        batch = None
        reason = ""
        try:
            # Batches of 1 cannot be smaller, so nothing depends on their setting.
            if fits or plan.batch > 1:
                batch = batch_lever(self.fit, self.predictions, plan)
        except ConfigurationError as error:
            reason = str(error)
        if not fits:
            self._advise_changes(plan, batch)
        elif batch is None:
            self._tell(wrapped(f"largest   {reason}", self.width, " " * 10), largest=None)
        else:
            found = batch.largest(self.predictions)
            lines = _found_lines("largest", found, batch.names, self.limit)
            self._tell(["", *lines], largest=_found(found, batch.names))

    def _advise_changes(self, plan: "Plan", batch: "Lever | None") -> None:
        from lit_efficient.evidence.planning.advice import Adviser, candidates
        from lit_efficient.evidence.planning.plan_settings import length_lever
        from lit_efficient.internals.torch_modules import BatchNorm

        self._tell(["", "changes with which it fits, with planned peaks; append to `fit -c CONFIG`:"], advice=[])
        adviser = Adviser(
            self.predictions,
            candidates(self.config, self.fit.trainer),
            self.fit,
            batch,
            lambda: length_lever(self.fit, self.predictions, plan),
            normalises=any(isinstance(module, BatchNorm) for module in self.source.last.module.modules()),
        )
        try:
            for advice in adviser.all():
                self.data["advice"].append(_advice(advice))
                self._tell(_advice_lines(advice, self.limit, self.width))
            if not self.data["advice"]:
                self._tell_smallest()
        finally:  # also if the search ends after its time
            lines = []
            for name, reason in adviser.skipped.items():
                lines += wrapped(f"  {name}: {reason}", self.width, "    ")
            self._tell(["not used:", *lines] if lines else [], skipped=adviser.skipped)

    def _tell_smallest(self) -> None:
        """Print the smallest plan of the search."""
        from lit_efficient.evidence.planning.advice import Advice, candidates

        change, smallest = self.predictions.smallest()
        seen = Advice("", change, smallest)
        text = f"no change that was tried fits; the smallest needs {_size(smallest.peak)}"
        if smallest.peak <= self.limit:
            text = f"the smallest plan so far fits, with {_size(smallest.peak)}"
        among = candidates(self.config, self.fit.trainer)
        if any(one.computes == "other" and one.overlay in change.overlays for one in among):
            text += " (CHANGES THE RESULT)"
        lines = [f"{text}: {' '.join(seen.words) or 'the config as it is'}"]
        if not self.predictions.stopped:
            lines.append("use a smaller model, a larger device, or more devices")
        lines = [line for text in lines for line in wrapped(f"  {text}", self.width, "    ")]
        self._tell(lines, smallest={"options": seen.words, "peak": smallest.peak})

    def _solved(self) -> int:
        from lit_efficient.evidence.planning.plan_settings import batch_lever, length_lever, rank_lever

        wanted = self.options.solve
        if wanted == "devices":
            return self._solved_devices()
        plan = self._predict_first()
        if wanted == "lora_rank":
            lever = rank_lever(self.fit)
        elif wanted == "train_batch_size":
            lever = batch_lever(self.fit, self.predictions, plan)
        else:
            lever = length_lever(self.fit, self.predictions, plan)
        found = lever.largest(self.predictions)
        self._tell(
            _found_lines(wanted, found, lever.names, self.limit),
            solve={"what": wanted, **_found(found, lever.names)},
            device=self._device(),
        )
        if found.value is not None:
            return 0
        return _DOES_NOT_FIT

    def _solved_devices(self) -> int:
        from lit_efficient.evidence.fits import AS_IT_IS
        from lit_efficient.evidence.planning.plan_devices import MOST, least_devices

        alone = self._alone(AS_IT_IS)
        count = least_devices(alone, self.limit, self.traits, self._gathered())
        plan = self._shared(alone, count or 1)
        name = self.traits.name
        text = f"devices: {count} with {name}"
        if not count:
            text = f"devices: not even {MOST} are enough"
            if not self.traits.shards:
                text += f": with {name} each device needs the whole memory"
        lines = [f"{text}; peak {_size(plan.peak)} of {_size(self.limit)}"]
        for note in plan.notes:
            lines += wrapped(f"  {note}", self.width, "    ")
        self._tell(lines, solve={"what": "devices", "value": count, "strategy": name, "peak": plan.peak})
        if count:
            return 0
        return _DOES_NOT_FIT

    def _predict_first(self) -> "Plan":
        from lit_efficient.evidence.fits import AS_IT_IS
        from lit_efficient.evidence.planning.plan_search import Refusal

        if not self.options.quiet:
            _to_stderr("tracing a step of the fit as it is")
        plan = self.predictions(AS_IT_IS)
        if isinstance(plan, Refusal):
            raise ConfigurationError(plan.reason)
        return plan

    def _device(self) -> dict[str, Any]:
        strategy = None
        if self.devices > 1:
            strategy = self.traits.name
        return {"bytes": self.limit, "from": self.limit_from, "devices": self.devices, "strategy": strategy}

    def _tell(self, lines: Sequence[str], **data: object) -> None:
        self.data |= data
        if not self.options.json and lines:
            print("\n".join(lines), flush=True)


class _KeepsLast:
    """Source of fits that keeps the last one. A plan has built its network."""

    def __init__(self, source: "FitSource") -> None:
        self.source = source
        self.last: Any = None

    def make(self, *change: "Change") -> "Fit":
        self.last = self.source.make(*change)
        return self.last


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _one_device(trainer: dict[str, Any]) -> list[str]:
    """Return the options with which a fit for any devices can be built here, for a single device."""
    import torch

    options = ["--trainer.devices=1", "--trainer.num_nodes=1", "--trainer.strategy=auto"]
    if trainer["accelerator"] not in ("auto", "cpu") and not torch.accelerator.is_available():
        options.append("--trainer.accelerator=cpu")
        # `auto` was replaced by the precision of the device that is planned for.
        if trainer["precision"] is not None:
            options.append(f"--trainer.precision={trainer['precision']}")
    return options


def _hushed() -> AbstractContextManager[None]:
    """Suppress the logs, prints and warnings of fits that are built many times and never run."""
    from lit_efficient.mechanisms.trials.steps import quiet

    return quiet(warns=False, prints=io.StringIO())


def _lines(plan: "Plan", answer: _Answer) -> list[str]:
    """Return the lines of a plan."""
    from lit_efficient.mechanisms.metering import short_number
    from lit_efficient.mechanisms.tensor_cores import slow_sizes

    width = answer.width
    left = answer.limit - plan.peak
    lines: list[str] = []
    for bound, reason in {"AT LEAST": plan.at_least, "AT MOST": plan.at_most}.items():
        if reason:
            lines = [*wrapped(f"{bound}  the following numbers: {reason}, and a real step may differ", width), *lines]
    lines.append(
        f"model     {type(answer.fit.module).__name__}, {plan.parameters:,} parameters, {plan.trainable:,} trainable"
    )
    batches = f"{plan.accumulated:,} batches of {plan.batch:,}"
    if plan.accumulated == 1:
        batches = f"batch of {plan.batch:,}"
    lines.append(f"step      {batches}, {plan.amount:,} {plan.unit}, {short_number(plan.flops)}FLOP")
    if plan.techniques:
        heading = "techniques, in the order in which they act"
        if plan.reported:
            heading += f", with reports of {plan.reported}"
        lines += wrapped(f"{heading}:", width)
        for name, text in plan.techniques:
            lines += wrapped(f"  {name}: {text}", width, "    ")
    else:
        lines.append("techniques: none")
    where = "the step"
    if plan.timeline:
        where = max(plan.timeline, key=lambda moment: moment.bytes).name
    each = ""
    if answer.devices > 1:
        each = f" of each of {answer.devices} devices ({answer.traits.name})"
    lines += ["", *wrapped(f"memory{each}; its peak is in: {where}", width)]
    lines.append(f"  {'':<14}{'at its peak':>12}{'between steps':>16}")
    for kind in dict.fromkeys((*plan.kinds, *plan.resident)):
        size = plan.kinds.get(kind, 0)
        stays = plan.resident.get(kind, 0)
        if size or stays:
            lines.append(f"  {kind:<14}{_size(size):>12}{_size(stays) if stays else '-':>16}")
    lines.append(f"  {'total':<14}{_size(plan.peak):>12}{_size(sum(plan.resident.values())):>16}")
    if plan.host:
        lines.append(f"  and {_size(plan.host)} in CPU memory")
    word = f"fits, {_size(left)} are left"
    bound = plan.at_least
    if left < 0:
        word = f"DOES NOT FIT, {_size(-left)} are missing"
        bound = plan.at_most
    if bound:
        word = f"CANNOT BE SAID: this {word}, but {bound}"
    lines += wrapped(f"device    {_size(answer.limit)} ({answer.limit_from}): {word}", width, " " * 10)
    notes = list(plan.notes)
    on_cpu = answer.fit.trainer.strategy.root_device.type == "cpu"
    if on_cpu and answer.options.device_memory is not None and answer.config["trainer"]["accelerator"] == "auto":
        notes.append("There is no GPU here, so this is the plan for a CPU. For a GPU, add --trainer.accelerator gpu")
    on_gpu = answer.kernels == "cuda" or answer.fit.trainer.strategy.root_device.type == "cuda"
    if on_gpu and 0 <= left < answer.limit / 10:
        notes.append(
            "Less than a tenth of the memory is left, and the plan counts neither the CUDA context nor fragmentation. "
            "To search for changes with a peak within nine tenths of the memory, add --device_memory "
            + _size(0.9 * answer.limit).replace(" ", "").replace(",", "")
        )
    if answer.capability is not None:
        rows = plan.amount // int(answer.fit.trainer.accumulate_grad_batches) if plan.unit == "tokens" else 0
        precision = str(answer.config["trainer"]["precision"])
        notes += slow_sizes(answer.source.last.module, rows, precision, answer.capability)
    for note in notes:
        lines += wrapped(f"note      {note}", width, " " * 10)
    return lines


def _found_lines(what: str, found: "Found", names: Sequence[str], limit: int) -> list[str]:
    needs = f"needs {_size(found.above_peak or 0)}"
    if found.value is None or found.plan is None:
        return [f"{what}: none fits; {names[0]} {found.reason or f'{found.above} {needs} of {_size(limit)}'}"]
    lines = [f"{what}: {names[0]} {found.value:,}, peak {_size(found.plan.peak)} of {_size(limit)}"]
    # An argument of a technique, such as LoRA.rank, is no option of the command line.
    settings = [f"--{name} {found.value}" for name in names if not name[0].isupper()]
    if settings:
        lines.append(f"    {' '.join(settings)}")
    if found.above is not None:
        return [*lines, f"  {found.above:,}: {found.reason or needs}"]
    return [*lines, "  larger ones may fit as well: the search ended here"]


def _advice_lines(advice: "Advice", limit: int, width: int) -> list[str]:
    lines = wrapped(f"* {advice.title}: peak {_size(advice.plan.peak)} of {_size(limit)}", width, "  ")
    lines.append(f"    {' '.join(advice.words)}")
    for one in advice.techniques:
        sets = "".join(f"; it sets trainer.{key} to {json.dumps(value)}" for key, value in one.sets.items())
        lines += wrapped(f"    {one.name}: {one.reason}{sets}", width, "      ")
    return lines


def _found(found: "Found", names: Sequence[str]) -> dict[str, object]:
    return {
        "settings": list(names),
        "value": found.value,
        "peak": found.plan.peak if found.plan else None,
        "next": found.above,
        "next_peak": found.above_peak,
        "next_refused": found.reason or None,
    }


def _advice(advice: "Advice") -> dict[str, Any]:
    techniques = [{"name": one.name, "changes": one.computes, "sets": dict(one.sets)} for one in advice.techniques]
    return {
        "title": advice.title,
        "options": advice.words,
        "yaml": advice.yaml,
        "peak": advice.plan.peak,
        "kinds": dict(advice.plan.kinds),
        "techniques": techniques,
    }


def _size(size: float) -> str:
    """Return a size with up to four digits, because limits are often close to it."""
    if size < 1000:
        return f"{size:,.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1000 or unit == "GiB":
            break
    if size < 100:
        return f"{size:,.2f} {unit}"
    return f"{size:,.1f} {unit}"
