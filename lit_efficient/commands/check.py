"""``python -m lit_efficient check -c X``: all that ``fit`` does with a config before it touches data, and nothing more.

The network is built on the meta device, where weights take neither memory nor time, techniques are applied to it, and
the optimizer is built over what trains. What cannot be done there is done on the CPU, if the network is small. Data is
prepared where the network's sizes come from it, or with ``--with_data``. Nothing else is written.
"""

import argparse
import contextlib
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_efficient.errors import LitEfficientError

_MOST_BYTES = 2 * 2**30  # of weights that are made on the CPU for a check


def run(argv: Sequence[str]) -> int:
    """Check a config."""
    parser = argparse.ArgumentParser(
        "lit_efficient check",
        description="Say whether `fit` with these options would come to its first step: parse the config, build the "
        "network without its weights, apply the techniques, build the optimizer. Takes the options of fit: "
        "-c CONFIG, --trainer.max_steps 100, ...",
        allow_abbrev=False,
    )
    parser.add_argument("--with_data", action="store_true", help="prepare the data as fit does, and take a batch")
    parser.add_argument("--devices", type=int, metavar="N", help="say what would not work on N devices, without them")
    parser.add_argument("--nodes", type=int, metavar="N", default=1, help="and on so many machines (1)")
    options, rest = parser.parse_known_args(argv)
    from lit_efficient.cli.errors import explained
    from lit_efficient.errors import check_number

    if options.devices is not None or options.nodes != 1:
        check_number("check", "--devices", options.devices, least=1, whole=True)
        check_number("check", "--nodes", options.nodes, least=1, whole=True)
        many = {"devices": options.devices, "num_nodes": options.nodes, "accelerator": "cpu"}
        rest += [f"--trainer.{name}={value}" for name, value in many.items()]
    with explained(rest):
        print("\n".join(_checked(rest, options.with_data, options.devices is None)))
    return 0


class _Again(Exception):
    """The check has to be made anew: with real weights, or with data."""


class _TooLarge(_Again):
    """What comes next reads weights that are too large to be made for a check."""


def _checked(argv: Sequence[str], with_data: bool, here: bool) -> list[str]:
    device, prepared = "meta", with_data
    while True:
        try:
            return list(_cli(argv, device, prepared, here).lines)
        except _Again as again:
            device, prepared = ("cpu", prepared) if again.args[0] == "weights" else (device, True)


def _cli(argv: Sequence[str], device: str, prepared: bool, here: bool) -> Any:
    """The command line of a fit, whose parts are built on a device, that stops where data would be needed."""
    from lit_efficient.cli.fits import FitParts
    from lit_efficient.cli.run import callbacks_of
    from lit_efficient.internals.lightning_strategies import NEEDS_MESH, is_parallel, lacks_mesh, traits_of

    class Check(FitParts):
        lines: list[str]
        steps: Sequence[str] = ()  # what each process reads
        whole = True  # all techniques are applied
        devices_are_here = here

        def building(self) -> contextlib.AbstractContextManager[None]:
            return _retried(device, lambda: 0)

        def run_subcommand(self, subcommand: str) -> None:
            try:
                try:
                    left = _fit_without_steps(self, device, prepared)
                except Exception as error:
                    cause, strategy = error.__cause__ if isinstance(error, _Again) else error, self.trainer.strategy
                    lacks = isinstance(error, RuntimeError) and "process" in str(error)  # those not there
                    if traits_of(strategy).dtensors and lacks_mesh(cause):
                        self.whole = False
                        left = [f"{NEEDS_MESH}, and what comes after it"]
                    elif isinstance(error, _TooLarge):
                        self.whole = False
                        left = [f"the rest of the techniques, and the optimizer, which need the weights ({error})"]
                    elif lacks and is_parallel(strategy) and not isinstance(error, LitEfficientError):
                        left = [f"what needs all processes: {error}"]
                    else:
                        raise
                self.lines = _lines(self, device, prepared, left)
            finally:
                for callback in callbacks_of(self.trainer):
                    callback.teardown(self.trainer, self.model, "fit")

    return Check(argv, None, device)


def _fit_without_steps(cli: Any, device: str, prepared: bool) -> list[str]:
    """Do what a fit does up to its first step; return what was left out."""
    import torch

    from lit_efficient.application import find_optimizers
    from lit_efficient.cli.rehearsal import check_parts, steps_guessed
    from lit_efficient.declaration import Phase, techniques_of
    from lit_efficient.distributed.many_processes import check_loggers, check_split
    from lit_efficient.distributed.weight_slices import Waiting
    from lit_efficient.internals.lightning_trainer import begin_fit
    from lit_efficient.mechanisms.moving import tensors_in
    from lit_efficient.surgery import WAITS

    trainer, module, data = cli.trainer, cli.model, cli.datamodule
    left = [] if prepared else [f"the data: {type(data).__name__} was not prepared (--with_data does)"]
    left = ["the data, which the module gives"] if data is None else left
    begin_fit(trainer, module, data)
    if prepared and data is not None:
        with _retried(device, lambda: 0):
            data.prepare_data()
            data.setup("fit")
            if trainer.world_size > 1:
                cli.steps = check_split(trainer, data, tensors_in)
            else:
                next(iter(data.train_dataloader()))
    check_loggers(trainer)
    check_parts(trainer, module, data)
    may_lack_data = data is not None and not prepared
    with _retried_with_data(may_lack_data), _retried(device, lambda: _bytes(module)), _signals_as_they_are():
        for callback in trainer.callbacks:
            callback.setup(trainer, module, "fit")
    try:
        with contextlib.nullcontext() if may_lack_data else _retried(device, lambda: _bytes(module)):
            module.setup("fit")
    except Exception as error:
        if isinstance(error, LitEfficientError) or not may_lack_data:
            raise
        left.append(f"{type(module).__name__}.setup, which needs the data")
    if trainer.world_size > 1:
        left.append(f"the {trainer.world_size} processes: this is one")
    if (named := _named_bytes(module)) > _MOST_BYTES and not hasattr(trainer.strategy, "reads_slices"):
        trainer.strategy.reads_slices = True  # so that weights wait to be read
        if how := getattr(getattr(module, "model", None), "quantize", None):
            left.append(f"the base in {how}: it was built as its files have it")
            module.model = replace(module.model, quantize=None)
    with _retried_with_data(may_lack_data), _retried(device, lambda: named + _bytes(module)), torch.device(device):
        type(module).configure_model(module)
    size = _bytes(module)
    reads_all = any(technique.phase is Phase.QUANTIZE for technique in techniques_of(trainer))
    waits = {WAITS: Waiting("")} if reads_all and size > _MOST_BYTES else {}
    if not waits:  # else codes and factors are empty, too, as beside slices of a base
        _give_memory(module)
    with _retried(device, lambda: size):
        module.__dict__.update(waits)
        module.configure_model()  # and the techniques
        if waits:
            del module.__dict__[WAITS]
            _give_memory(module)
        trainer.precision_plugin.convert_module(module)
    if hasattr(trainer.strategy, "check_network"):
        trainer.strategy.check_network(module, trainer.world_size)
    guessed = steps_guessed(trainer) if may_lack_data else contextlib.nullcontext()
    with _retried(device, lambda: _bytes(module)), guessed:
        configured = module.configure_optimizers()
    for optimizer in find_optimizers(configured) if hasattr(trainer.strategy, "check_optimizer") else ():
        trainer.strategy.check_optimizer(optimizer)
    if configured is None and not module.automatic_optimization:
        left.append("manual optimization")
    return [*left, "the first step: values, its memory and its time"]


@contextlib.contextmanager
def _retried(device: str, size: Any) -> Iterator[None]:
    """Ask for real weights where something fails for want of them, and they are few."""
    try:
        yield
    except (_Again, MemoryError):
        raise
    except Exception as error:
        from lit_efficient.cli.rehearsal import is_meant

        if device != "meta" or is_meant(error):
            raise
        if size() > _MOST_BYTES:
            raise _TooLarge(f"{size() / 2**30:.1f} GiB") from error
        raise _Again("weights") from error


@contextlib.contextmanager
def _retried_with_data(may_lack_data: bool) -> Iterator[None]:
    """Ask for the data where something fails before it is prepared, unless it says that something else is wrong."""
    try:
        yield
    except _Again:
        raise
    except Exception as error:
        if not may_lack_data or (isinstance(error, LitEfficientError) and "data" not in str(error).lower()):
            raise
        raise _Again("data") from error


@contextlib.contextmanager
def _signals_as_they_are() -> Iterator[None]:
    """Let Ctrl-C end a check: there is no run to be saved."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _bytes(module: Any) -> int:
    return sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())


def _named_bytes(module: Any) -> int:
    """Of the weights in folders that its arguments name."""
    specs = [getattr(value, "spec", value) for value in vars(module).values()]
    names = {name for spec in specs if isinstance(name := getattr(spec, "name_or_path", spec), str) and name}
    return sum(file.stat().st_size for name in names for file in Path(name).glob("*.safetensors"))


def _give_memory(module: Any) -> None:
    """Give parameters on the meta device the memory of one element: techniques and optimizers want them on a device."""
    import torch

    from lit_efficient.internals.torch_modules import exchange

    exchange(module, lambda p: torch.zeros((), dtype=p.dtype).expand(p.shape) if p.is_meta else p)


def _lines(cli: Any, device: str, prepared: bool, left: list[str]) -> list[str]:
    from lit_efficient.application.ledger import reports_of
    from lit_efficient.declaration import techniques_of
    from lit_efficient.surgery import weights_wait

    module, techniques = cli.model, techniques_of(cli.trainer)
    count = sum(p.numel() for p in module.parameters() if p.requires_grad)
    trains = f"{count:,} train, " if cli.whole else ""
    number = sum(p.numel() for p in module.parameters())
    lines = [f"model: {type(module).__name__}, {number:,} parameters, {trains}{_bytes(module) / 2**20:,.1f} MiB"]
    reports = reports_of(module, techniques)
    lines += ["techniques:", *(f"  {name}: {report.summary}" for name, report in reports.items())] if reports else []
    place = "meta device" if device == "meta" or weights_wait(module) else "CPU"
    lines.append(f"built on the {place}{', with its data' if prepared else ''}")
    lines += [f"processes: {step}" for step in cli.steps]
    return [*lines, "not checked:", *(f"  {one}" for one in left), "The config is fine as far as that goes."]
