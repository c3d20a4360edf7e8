"""``python -m lit_efficient check -c X``: do everything that ``fit`` does with a config before it reads data.

The network is built on the meta device, where weights need neither memory nor time. The techniques are applied to it,
and the optimizer is built over the trainable parameters. Steps that fail on the meta device run on the CPU if the
network is small. Data is prepared only if the network's sizes depend on it, or with ``--with_data``. No other file is
written.
"""

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_efficient.errors import LitEfficientError

if TYPE_CHECKING:
    from torch import nn

_MOST_BYTES = 2 * 2**30  # limit of weights that are created on the CPU for a check


def run(argv: Sequence[str]) -> int:
    """Run ``check``."""
    parser = argparse.ArgumentParser(
        "lit_efficient check",
        description="Check whether `fit` with these options would reach its first step: parse the config, build the "
        "network without weights, apply the techniques, build the optimizer. The options of fit are accepted: "
        "-c CONFIG, --trainer.max_steps 100, ...",
        allow_abbrev=False,
    )
    parser.add_argument("--with_data", action="store_true", help="prepare the data as fit does, and load a batch")
    parser.add_argument("--devices", type=int, metavar="N", help="check a run on N devices without having them")
    parser.add_argument("--nodes", type=int, metavar="N", default=1, help="number of machines (default: 1)")
    options, rest = parser.parse_known_args(argv)
    from lit_efficient.cli import explained
    from lit_efficient.errors import check_number

    if options.devices is not None or options.nodes != 1:
        check_number("check", "--devices", options.devices, least=1, whole=True)
        check_number("check", "--nodes", options.nodes, least=1, whole=True)
        many = {"devices": options.devices, "num_nodes": options.nodes, "accelerator": "cpu"}
        rest += [f"--trainer.{name}={value}" for name, value in many.items()]
    with explained(rest):
        data = "prepares the data, and loads a batch" if options.with_data else "reads no data"
        print(
            "check: builds the network without weights, applies the techniques, plans the optimizer, and "
            f"{data}. Importing torch and Lightning takes most of the time.",
            file=sys.stderr,
            flush=True,
        )
        print("\n".join(_checked(rest, options.with_data, options.devices is None)))
    return 0


class _Again(Exception):
    """Raised to repeat the check with real weights or with data; the argument is "weights" or "data"."""


class _TooLarge(_Again):
    """Raised if the next step needs real weights that are too large for a check."""


def _checked(argv: Sequence[str], with_data: bool, here: bool) -> list[str]:
    device = "meta"
    prepared = with_data
    while True:
        try:
            return list(_cli(argv, device, prepared, here).lines)
        except _Again as again:
            if again.args[0] == "weights":
                device = "cpu"
            else:
                prepared = True


def _cli(argv: Sequence[str], device: str, prepared: bool, here: bool) -> Any:
    """Return the command line of a fit that builds its parts on ``device`` and stops before the first step."""
    from lit_efficient.cli.defaults import callbacks_of
    from lit_efficient.cli.fits import FitParts
    from lit_efficient.internals.lightning_strategies import NEEDS_MESH, is_parallel, lacks_mesh, traits_of

    class Check(FitParts):
        lines: list[str]
        steps: Sequence[str] = ()  # description of the rows that each process reads
        whole = True  # all techniques were applied
        devices_are_here = here

        def building(self) -> contextlib.AbstractContextManager[None]:
            return _retried(device, lambda: 0)

        def run_subcommand(self, subcommand: str) -> None:
            try:
                try:
                    left = _Rehearsal(self, device, prepared).run()
                except Exception as error:
                    cause = error.__cause__ if isinstance(error, _Again) else error
                    strategy = self.trainer.strategy
                    lacks = isinstance(error, RuntimeError) and "process" in str(error)  # of torch.distributed
                    if traits_of(strategy).dtensors and lacks_mesh(cause):
                        self.whole = False
                        left = [f"{NEEDS_MESH}, and everything after it"]
                    elif isinstance(error, _TooLarge):
                        self.whole = False
                        left = [f"the remaining techniques and the optimizer, which need the weights ({error})"]
                    elif lacks and is_parallel(strategy) and not isinstance(error, LitEfficientError):
                        left = [f"steps that need all processes: {error}"]
                    else:
                        raise
                self.lines = _lines(self, device, prepared, left)
            finally:
                for callback in callbacks_of(self.trainer):
                    callback.teardown(self.trainer, self.model, "fit")

    return Check(argv, None, device)


class _Rehearsal:
    """A fit up to its first step, in the order in which Lightning does it.

    Args:
        cli: The command line with trainer, module and data.
        device: Device on which the network is built.
        prepared: Prepare the data, too.
    """

    def __init__(self, cli: Any, device: str, prepared: bool) -> None:
        self.cli = cli
        self.trainer = cli.trainer
        self.module = cli.model
        self.data = cli.datamodule
        self.device = device
        self.prepared = prepared
        self.may_lack_data = self.data is not None and not prepared
        self.left: list[str] = []  # descriptions of omitted checks

    def run(self) -> list[str]:
        """Run all parts; return descriptions of the omitted checks."""
        from lit_efficient.internals.lightning_trainer import begin_fit

        begin_fit(self.trainer, self.module, self.data)
        self._prepare_data()
        self._set_up()
        if self._build_network():
            self._build_optimizers()
        return [*self.left, "the first step: its values, memory and time"]

    def _retried(self, size: Callable[[], int] = lambda: 0) -> contextlib.AbstractContextManager[None]:
        return _retried(self.device, size)

    def _size(self) -> int:
        return _bytes(self.module)

    def _prepare_data(self) -> None:
        from lit_efficient.cli.rehearsal import check_parts
        from lit_efficient.distributed.many_processes import check_loggers, check_split
        from lit_efficient.mechanisms.moving import tensors_in

        if self.data is None:
            self.left.append("the data, which the module provides")
        elif not self.prepared:
            self.left.append(f"the data: {type(self.data).__name__} was not prepared (use --with_data)")
        else:
            with self._retried():
                self.data.prepare_data()
                self.data.setup("fit")
                if self.trainer.world_size > 1:
                    self.cli.steps = check_split(self.trainer, self.data, tensors_in)
                else:
                    next(iter(self.data.train_dataloader()))
        check_loggers(self.trainer)
        check_parts(self.trainer, self.module, self.data)

    def _set_up(self) -> None:
        with _retried_with_data(self.may_lack_data), self._retried(self._size), _signals_as_they_are():
            for callback in self.trainer.callbacks:
                callback.setup(self.trainer, self.module, "fit")
        try:
            if self.may_lack_data:
                self.module.setup("fit")
            else:
                with self._retried(self._size):
                    self.module.setup("fit")
        except Exception as error:
            if isinstance(error, LitEfficientError) or not self.may_lack_data:
                raise
            self.left.append(f"{type(self.module).__name__}.setup, which needs the data")
        if self.trainer.world_size > 1:
            self.left.append(f"the {self.trainer.world_size} processes: the check is one process")

    def _build_network(self) -> bool:
        """Build the network and apply the techniques. Return False if the data decides on a part of the network."""
        import torch

        from lit_efficient.declaration import Phase, techniques_of
        from lit_efficient.distributed.weight_slices import Waiting
        from lit_efficient.surgery import WAITS

        module = self.module
        strategy = self.trainer.strategy
        named = _named_bytes(module)
        if named > _MOST_BYTES and not hasattr(strategy, "reads_slices"):
            strategy.reads_slices = True  # so that the module builds its network without reading the weights
            how = getattr(getattr(module, "model", None), "quantize", None)
            if how:
                self.left.append(f"the quantised base: it was built in the number format of its files, not in {how}")
                module.model = replace(module.model, quantize=None)
        # The class's own method: the instance's method also applies the techniques, which need memory for the weights.
        retried = self._retried(lambda: named + self._size())
        with _retried_with_data(self.may_lack_data), retried, torch.device(self.device):
            type(module).configure_model(module)
        if getattr(module, "awaits_data", False):
            kind = type(module).__name__
            self.left.append(f"the techniques: {kind} builds a part of its network from the data (use --with_data)")
            return False
        size = self._size()
        quantises = any(technique.phase is Phase.QUANTIZE for technique in techniques_of(self.trainer))
        # Quantising a large network would need all of its memory. It is treated as a network whose weights are read
        # later, as under a sharding strategy, so that codes and adapters stay empty, too.
        waits = quantises and size > _MOST_BYTES
        if not waits:
            _give_memory(module)
        with self._retried(lambda: size):
            if waits:
                module.__dict__[WAITS] = Waiting("")
            module.configure_model()
            if waits:
                del module.__dict__[WAITS]
                _give_memory(module)
            self.trainer.precision_plugin.convert_module(module)
        if hasattr(strategy, "check_network"):
            strategy.check_network(module, self.trainer.world_size)
        return True

    def _build_optimizers(self) -> None:
        from lit_efficient.application import find_optimizers
        from lit_efficient.cli.rehearsal import steps_guessed

        strategy = self.trainer.strategy
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(self._retried(self._size))
            if self.may_lack_data:  # the number of steps, which schedules need, follows from the data
                contexts.enter_context(steps_guessed(self.trainer))
            configured = self.module.configure_optimizers()
        if hasattr(strategy, "check_optimizer"):
            for optimizer in find_optimizers(configured):
                strategy.check_optimizer(optimizer)
        if configured is None and not self.module.automatic_optimization:
            self.left.append("manual optimization")


@contextlib.contextmanager
def _retried(device: str, size: Callable[[], int]) -> Iterator[None]:
    """Raise :class:`_Again` if the block fails on the meta device and the weights are small enough for the CPU."""
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
    """Raise :class:`_Again` if the block fails before the data is prepared, unless the message is not about data."""
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
    """Restore signal handlers after the block, so that Ctrl-C ends the check; there is no run to save."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _bytes(module: "nn.Module") -> int:
    return sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())


def _named_bytes(module: "nn.Module") -> int:
    """Return the bytes of the safetensors files in folders that the module's arguments name."""
    names: set[str] = set()
    for value in vars(module).values():
        spec = getattr(value, "spec", value)
        name = getattr(spec, "name_or_path", spec)
        if isinstance(name, str) and name:
            names.add(name)
    return sum(file.stat().st_size for name in names for file in Path(name).glob("*.safetensors"))


def _give_memory(module: "nn.Module") -> None:
    """Replace parameters on the meta device by expanded zeros on the CPU, which techniques and optimizers accept."""
    import torch

    from lit_efficient.internals.torch_modules import exchange

    exchange(module, lambda p: torch.zeros((), dtype=p.dtype).expand(p.shape) if p.is_meta else p)


def _lines(cli: Any, device: str, prepared: bool, left: list[str]) -> list[str]:
    from lit_efficient.application.ledger import reports_of
    from lit_efficient.declaration import techniques_of
    from lit_efficient.mechanisms.tensor_cores import capability_of, slow_sizes
    from lit_efficient.surgery import weights_wait
    from lit_efficient.tasks.latent_diffusion import LatentDiffusion

    module = cli.model
    count = sum(p.numel() for p in module.parameters() if p.requires_grad)
    trains = f"{count:,} trainable, " if cli.whole else ""
    number = sum(p.numel() for p in module.parameters())
    lines = [f"model: {type(module).__name__}, {number:,} parameters, {trains}{_bytes(module) / 2**20:,.1f} MiB"]
    if isinstance(module, LatentDiffusion):
        lines += module.settings.lines()
    reports = reports_of(module, techniques_of(cli.trainer))
    if reports:
        lines += ["techniques:", *(f"  {name}: {report.summary}" for name, report in reports.items())]
    capability = capability_of(cli.trainer.strategy.root_device)
    if capability is not None:
        lines += slow_sizes(module, 0, str(cli.trainer.precision), capability)
    place = "CPU"
    if device == "meta" or weights_wait(module):
        place = "meta device"
    lines.append(f"built on the {place}{', with its data' if prepared else ''}")
    lines += [f"processes: {step}" for step in cli.steps]
    return [*lines, "not checked:", *(f"  {one}" for one in left), "Everything that was checked is valid."]
