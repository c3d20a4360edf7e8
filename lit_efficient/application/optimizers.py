"""Optimizer hooks: techniques that rewrite optimizers, and that declare which parameters must be trained."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lit_efficient.application import configured_at, find_optimizers
from lit_efficient.application.ledger import Session, session_of, start_session, step_like
from lit_efficient.declaration import (
    Declaration,
    Hooks,
    Report,
    Wrap,
    check_conflicts,
    held,
    in_order,
    overrides,
    parts_of,
    techniques_of,
)
from lit_efficient.errors import ConfigurationError, NoEffectError
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_shards import reshard
from lit_efficient.internals.wraps import inner_method, wrap_method
from lit_efficient.models.probes.silent_layers import SilentLayers, unwatch


class OptimizerHooks(Hooks):
    """Mix-in for techniques that act on optimizers or train parameters: ``class LowBit(OptimizerHooks, Technique)``."""

    def prepare_parameters(self, module: nn.Module) -> None:
        """Set ``requires_grad``, in each fit, right before ``configure_optimizers`` selects the parameters by it."""

    def trains(self, module: nn.Module) -> Iterable[nn.Parameter]:
        """Return the parameters that must be stepped, now or later in the run.

        A parameter among them that no optimizer holds is an error.
        """
        return ()

    def adapters(self, module: nn.Module) -> Iterable[nn.Parameter]:
        """Return those of :meth:`trains` that must get a gradient.

        A layer none of whose adapters gets a gradient is an error if its frozen weights are read all the same, and a
        warning otherwise. It is neither if a layer of the same name up to numbers, such as another expert, has one.
        """
        return ()

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        """Change one optimizer in place (see :func:`lit_efficient.surgery.become`)."""
        raise NotImplementedError

    @classmethod
    def wraps(cls, trainer: Trainer, module: LightningModule, techniques: Sequence[object]) -> list[Wrap]:
        """Wrap ``configure_optimizers``, around the module's own."""
        return [("configure_optimizers", _configure_optimizers)]


def find_schedulers(configured: object) -> list[object]:
    """Return every learning-rate scheduler, once, of what ``configure_optimizers`` returned."""
    found = configured_at(configured, "lr_scheduler", "scheduler")
    return [item for item in found if not isinstance(item, Optimizer)]


def schedulers_of(module: nn.Module) -> list[Any]:
    """Return the schedulers that ``configure_optimizers`` returned; only valid in ``rewrite_optimizer``."""
    session = session_of(module)
    if session is not None:
        return list(session.schedulers)
    return []


def optimized_by(module: nn.Module) -> set[int]:
    """Return the ids of the parameters that optimizers hold; only valid in ``rewrite_optimizer``."""
    session = session_of(module)
    optimizers = [] if session is None else session.optimizers
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _configure_optimizers(self: LightningModule) -> Any:
    techniques = in_order(techniques_of(self.trainer))
    configured = configured_by(self, techniques, inner_method(self, "configure_optimizers", _configure_optimizers))
    session = session_of(self)
    assert session is not None
    if any(overrides(technique, "trains") for technique in techniques):
        learning = _Learning(session)
        for optimizer in find_optimizers(configured):
            optimizer.register_step_post_hook(partial(learning.check, self))
    return configured


def configured_by(
    module: LightningModule, techniques: Sequence[Declaration], configure: Callable[[], object]
) -> object:
    """Return what ``configure`` returns, with its optimizers rewritten by ``techniques`` in their order.

    Raises:
        ConfigurationError, ConflictError: If a technique refuses an optimizer, or if the optimizers lack parameters
            that a technique trains.
    """
    session = start_session(module, Session(id(module.trainer)))
    hooks = [technique for technique in techniques if isinstance(technique, OptimizerHooks)]
    for technique in hooks:
        technique.prepare_parameters(module)
    configured = configure()
    optimizers = find_optimizers(configured)
    check_conflicts([*parts_of(module.trainer), *optimizers])
    session.optimizers = optimizers
    session.schedulers = find_schedulers(configured)
    try:
        _rewrite(module, session, hooks, optimizers)
    finally:
        session.optimizers = []
        session.schedulers = []
    _check_trained(module, hooks, optimizers)
    return configured


def _rewrite(
    module: nn.Module, session: Session, techniques: Sequence[OptimizerHooks], optimizers: Sequence[Optimizer]
) -> None:
    for technique in techniques:
        if not overrides(technique, "rewrite_optimizer"):
            continue
        name = type(technique).__name__
        if not optimizers:
            raise ConfigurationError(f"{name}: {type(module).__name__}.configure_optimizers returned no optimizer")
        reports: dict[str, Report] = {}
        refused: list[NoEffectError] = []
        for i, optimizer in enumerate(optimizers):
            key = name if len(optimizers) == 1 else f"{name}[{i}]"
            try:
                reports[key] = technique.rewrite_optimizer(optimizer, module)
            except NoEffectError as error:
                refused.append(error)
                kind = type(optimizer).__name__
                reports[key] = Report(f"{kind}: does not change, as it has nothing to gain", idle=True)
        # One of several optimizers may be too small to save anything.
        if len(refused) == len(optimizers):
            raise refused[0]
        session.reports |= reports
        if all(report.idle or report.states_nothing() for report in reports.values()):
            for report in reports.values():
                report.checked(name)


def _check_trained(module: nn.Module, techniques: Sequence[OptimizerHooks], optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that lack what a technique trains: the run would start, take its time and learn nothing."""
    if not optimizers:
        return
    held_by = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers]
    stepped = {id(p) for parameters in held_by for p in parameters}
    names = {id(p): name for name, p in module.named_parameters()}
    trainer = ""
    for technique in techniques:
        wanted = list(technique.trains(module))
        lost = [names.get(id(p), "one of another module") for p in wanted if id(p) not in stepped]
        if lost:
            raise ConfigurationError(
                f"{type(technique).__name__}: no optimizer holds {len(lost)} of the {len(wanted)} parameters that it "
                f"trains: {', '.join(lost[:3])}{', ...' if len(lost) > 3 else ''}. Build the optimizer in "
                "configure_optimizers, over all parameters with requires_grad: a list made in __init__ and a choice by "
                "name miss what techniques add"
            )
        if wanted and not trainer:
            trainer = type(technique).__name__
    for i, (optimizer, given) in enumerate(zip(optimizers, held_by, strict=True)):
        if trainer and given and not any(p.requires_grad for p in given):
            raise ConfigurationError(
                f"{trainer} has frozen all that optimizer {i} of {type(module).__name__} "
                f"({type(optimizer).__name__}) steps, first {names.get(id(given[0]), 'one of another module')!r}: its "
                "loss would have no gradient. Let those train, too (LoRA: modules_to_save), or return no such optimizer"
            )


class _Learning:
    """Check after the first steps of each optimizer that what techniques train gets gradients."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.checked: set[int] = set()  # ids of optimizers all of whose adapters have had a gradient
        self.silent: dict[int, SilentLayers] = {}  # adapters without a gradient so far, by the optimizer's id

    def check(self, module: nn.Module, optimizer: Optimizer, *_: object) -> None:
        """After a step: refuse a run in which what techniques train is frozen or bypassed. Adapters may wait.

        Raises:
            ConfigurationError: If a trained parameter was frozen, or the weight of an adapter's layer is read without
                the adapter.
        """
        if session_of(module) is not self.session or id(optimizer) in self.checked:
            return
        reshard(module)
        taken = getattr(optimizer, "gradients_taken", ())  # parameters whose gradients are used up or elsewhere
        layers = self.silent.get(id(optimizer))
        if layers is not None:
            layers.check(taken)
            if not layers.waiting:
                self.checked.add(id(optimizer))
            elif layers.steps == 2:
                rank_zero_warn(layers.message())
            return
        has_gradient = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                has_gradient[id(p)] = p.grad is not None or p in taken
        silent = _without_gradient(module, has_gradient)
        if silent is None:
            return
        if silent:
            self._watch(module, optimizer, silent)
        else:
            self.checked.add(id(optimizer))

    def _watch(self, module: Any, optimizer: Optimizer, silent: dict[str, list[nn.Parameter]]) -> None:
        """Observe in the next steps whether the layers of these adapters are read without them."""
        techniques = in_order(techniques_of(module.trainer))
        who = "/".join(type(technique).__name__ for technique in techniques if overrides(technique, "adapters"))
        parts = {}
        if not traits_of(module.trainer.strategy).flattens:  # under which layers have no weights
            parts = {owner: module.get_submodule(owner) for owner in silent}
        layers = SilentLayers(who, silent, parts)
        self.silent[id(optimizer)] = layers
        self.session.around_step.append(layers.observing)
        self.session.at_end.append(partial(_end_watch, layers))
        wrap = step_like(module.training_step, _training_step, _training_step_on_batch, _training_step_on_iterator)
        if ("training_step", wrap) not in self.session.wraps:
            wrap_method(module, "training_step", wrap)
            self.session.wraps.append(("training_step", wrap))


def _training_step(self: LightningModule, batch: object, batch_idx: int) -> Any:
    with _around_step(self):
        return inner_method(self, "training_step", _training_step)(batch, batch_idx)


def _training_step_on_batch(self: LightningModule, batch: object) -> Any:
    with _around_step(self):
        return inner_method(self, "training_step", _training_step_on_batch)(batch)


def _training_step_on_iterator(self: LightningModule, dataloader_iter: object) -> Any:
    with _around_step(self):
        return inner_method(self, "training_step", _training_step_on_iterator)(dataloader_iter)


@contextmanager
def _around_step(module: nn.Module) -> Iterator[None]:
    """Enter the contexts of the session for one ``training_step``."""
    session = session_of(module)
    assert session is not None
    with ExitStack() as contexts:
        for around in session.around_step:
            contexts.enter_context(around())
        yield


def _end_watch(layers: SilentLayers, module: nn.Module) -> None:
    """Restore all layers at the end of a run, and warn if one step alone was made."""
    unwatch(module)
    if layers.steps == 1:
        rank_zero_warn(layers.message())


def _without_gradient(module: nn.Module, has_gradient: dict[int, bool]) -> dict[str, list[nn.Parameter]] | None:
    """Return the adapters without a gradient, by the name of their layer; ``None`` if no parameter has a gradient."""
    names = {id(p): name for name, p in module.named_parameters()}
    later = {id(module.get_parameter(name)) for name in held(module)}
    silent: dict[str, list[nn.Parameter]] = {}
    for technique in in_order(techniques_of(module.trainer)):
        if not isinstance(technique, OptimizerHooks):
            continue
        here = [p for p in technique.trains(module) if id(p) in has_gradient and id(p) not in later]
        frozen = [names.get(id(p), "") for p in here if not p.requires_grad]  # other parameters may be toggled
        if frozen:
            raise ConfigurationError(
                f"{type(technique).__name__}: {len(frozen)} of the parameters that it trains were frozen after "
                f"configure_optimizers, first {frozen[0]!r}: let {type(module).__name__} freeze nothing in "
                "on_fit_start or on_train_start"
            )
        if not any(has_gradient.values()):
            return None  # a hook has dropped the gradients: look again after the next step
        adapters: dict[str, list[nn.Parameter]] = {}
        for p in technique.adapters(module):
            if id(p) in has_gradient and id(p) in names and id(p) not in later:
                adapters.setdefault(names[id(p)].rpartition(".")[0], []).append(p)
        learns = {owner: any(has_gradient[id(p)] for p in added) for owner, added in adapters.items()}
        alive = {_without_numbers(owner) for owner, has in learns.items() if has}
        for owner, has in learns.items():
            if not has and _without_numbers(owner) not in alive:
                silent[owner] = adapters[owner]
    return silent


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "*", name)
