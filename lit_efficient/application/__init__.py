"""Application of techniques: the order in which they transform a network, and the wraps on a module during a run.

:func:`apply` transforms a network. :func:`install` wraps the methods of a module's instance for one run, and
:func:`uninstall` removes the wraps; whatever was on the instance before is called inside of them
(:mod:`lit_efficient.internals.wraps`). The other files of this folder hold the mix-ins, each with the code that applies
it: loss, gradients, optimizers, checkpoints.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lit_efficient.application.checkpoints import differences, keep_saving, on_load_checkpoint
from lit_efficient.application.foreign import check_held, modules_of, watch_parameters, wraps_of_start
from lit_efficient.application.ledger import (
    Entry,
    Session,
    end_session,
    ledger,
    session_of,
    start_ledger,
    start_session,
)
from lit_efficient.application.settings import ReadBack, clips_itself, exceeds_clip_val, warn_of_no_validation
from lit_efficient.declaration import (
    Declaration,
    Hooks,
    Report,
    Wrap,
    check_conflicts,
    defines,
    hooks_of,
    in_order,
    overrides,
    parts_of,
    techniques_of,
)
from lit_efficient.errors import ConfigurationError, ConflictError, diagnostic, refusal
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_shards import is_sharded
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.traits import Trait

# Methods of the mix-ins that a technique might define without the mix-in, which would then never be called.
_METHODS = {
    "LossHooks": ("sample_weights", "weigh_inside", "watch_step", "extra_loss"),
    "GradientHooks": ("change_gradients",),
    "OptimizerHooks": ("prepare_parameters", "trains", "adapters", "rewrite_optimizer"),
    "CheckpointHooks": (
        "on_read",
        "write_checkpoint",
        "read_checkpoint",
        "trim_checkpoint",
        "is_in",
        "check_checkpoint",
        "convert_export",
    ),
}


# The network ---------------------------------------------------------------------------------------------------------


def apply(module: nn.Module, techniques: Declaration | Iterable[Declaration]) -> dict[str, Report]:
    """Transform ``module`` by ``techniques`` in the order of their phases, each once in the module's life.

    A trainer does this by itself; call it to use techniques in a loop of your own, or before ``Fabric.setup``.

    Returns:
        The reports of all transforms that the module has undergone, by the technique's name.

    Raises:
        ConfigurationError: If a technique transforms no network, matches nothing, was applied before with other
            arguments, or comes too late.
    """
    if isinstance(techniques, Declaration):
        given = [techniques]
    else:
        given = [*techniques]
    wrong = [one for one in (module, *given) if not isinstance(one, nn.Module | Declaration)]
    if wrong:
        raise refusal("apply", "module and techniques", "instances, as MyModule() and LoRA()", wrong)
    idle = [type(technique).__name__ for technique in given if not overrides(technique, "transform")]
    if idle:
        raise ConfigurationError(
            f"apply(module, techniques): {', '.join(idle)} would change nothing, because it acts during training and "
            "not on the network: pass it to a Trainer (callbacks, plugins or strategy)"
        )
    return transform_by(module, given)


def transform_by(module: nn.Module, techniques: Iterable[Declaration]) -> dict[str, Report]:
    """Transform ``module`` by those of a run's techniques that change the network (:func:`apply`)."""
    done = start_ledger(module)
    acting = in_order(technique for technique in techniques if overrides(technique, "transform"))
    _check_initialised(module, acting)
    for technique in acting:
        record = technique.record()
        earlier = next((entry for entry in done if entry.record["name"] == record["name"]), None)
        if earlier is None:
            _check_order(record, done)
            _check_sharding(technique, module)
            report = technique.transform(module).checked(record["name"])
            # A file that a technique has read may have given it further arguments.
            done.append(Entry(technique.record(), report, type(technique), record["arguments"]))
        elif record["arguments"] not in (earlier.record["arguments"], earlier.asked):
            changes = differences(earlier.record["arguments"], record["arguments"])
            raise ConfigurationError(
                f"{record['name']} was applied to this module by an earlier run with other arguments ({changes}); "
                "use the same ones, or build the module again"
            )
    if done:
        keep_saving(module)
    return {entry.record["name"]: entry.report for entry in done}


def _check_initialised(module: nn.Module, techniques: Sequence[Declaration]) -> None:
    """Refuse lazy layers: techniques read sizes and replace layers before the first batch decides the shapes.

    Raises:
        ConfigurationError: If there are ``techniques``, and a parameter or buffer has no shape yet.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if techniques and lazy:
        who = type(techniques[0]).__name__
        owner = type(module.get_submodule(lazy[0].rpartition(".")[0])).__name__
        raise ConfigurationError(
            f"{who}: {len(lazy)} tensors of {type(module).__name__} have no shape before the first batch, first "
            f"{lazy[0]!r} of {owner}. Give the layers their sizes, or run one batch through the network at the end of "
            "configure_model (with torch.no_grad())"
        )


def _check_order(record: Mapping[str, object], done: Sequence[Entry]) -> None:
    late = next((entry.record["name"] for entry in done if entry.record["phase"] > record["phase"]), None)
    if late is not None:
        raise ConfigurationError(
            f"{record['name']} must act before {late}, which an earlier run applied to this module; "
            "give both to the first Trainer, or build the module again"
        )


def _check_sharding(technique: Declaration, module: nn.Module) -> None:
    if Trait.AFTER_SHARDING in technique.traits:
        return
    sharded = next((name for name, p in module.named_parameters() if is_sharded(p)), None)
    if sharded is not None:
        raise ConflictError(
            f"{type(technique).__name__} must change the network before it is sharded, but {sharded!r} is sharded "
            "already when configure_model returns: shard after all techniques have acted"
        )


# The run -------------------------------------------------------------------------------------------------------------


def install(trainer: Any, module: LightningModule) -> None:
    """Check the trainer's techniques and wrap the module's methods; a second call in the same run does nothing."""
    session = session_of(module)
    if session is not None and session.trainer == id(trainer):
        return
    uninstall(module)  # a run that died before its teardown, or a copy that was made in the middle of one
    check_run(trainer, module)
    techniques = techniques_of(trainer)
    wraps: list[Wrap] = [("configure_model", _configure_model), ("on_load_checkpoint", on_load_checkpoint)]
    wraps += wraps_of_start(module)
    found = _by_hooks(techniques)
    inside: list[Wrap] = []
    for hooks, own in found.items():
        inside += hooks.wraps(trainer, module, own)
    constrains = any(overrides(technique, "after_step") for technique in techniques)
    # Lightning asks whether the hook is overridden: one that is not is left alone, unless a technique needs it.
    has_own = getattr(module.configure_optimizers, "__qualname__", "") != "LightningModule.configure_optimizers"
    if has_own or constrains or any(name == "configure_optimizers" for name, _ in inside):
        wraps.append(("configure_optimizers", _check_optimizers))
    wraps += inside
    wraps.append(("on_train_start", _begin_training))
    if any(Trait.FOLLOWS_PARAMETERS in technique.traits for technique in techniques):
        wraps.append(("on_train_start", _watch_parameters))
    if constrains:  # after what rewrites have registered
        wraps.append(("configure_optimizers", _watch_steps))
    if clips_itself(trainer, module):
        wraps.append(("on_train_start", _watch_clipping))
    start_session(module, Session(id(trainer), wraps))
    for name, function in wraps:
        wrap_method(module, name, function)


def uninstall(module: nn.Module) -> None:
    """Remove the wraps and restore what was there before."""
    session = end_session(module)
    if session is None:
        return
    for name, function in session.wraps:
        unwrap_method(module, name, function)
    for end in session.at_end:
        end(module)


def check_run(trainer: Trainer, module: LightningModule) -> None:
    """Run every technique's checks against the trainer, the module and the other techniques.

    Raises:
        ConflictError, ConfigurationError: From the first check that fails.
    """
    techniques = techniques_of(trainer)
    data = getattr(trainer, "datamodule", None)
    check_conflicts([*parts_of(trainer), data])
    _check_batches(module, data)
    traits = traits_of(trainer.strategy)
    for technique in techniques:
        name = type(technique).__name__
        _check_mixed_in(type(technique))
        if traits.spawns and overrides(technique, "transform"):
            raise ConflictError(
                f"{name} changes the network, and a strategy that spawns or forks its processes would lose that "
                "change without a word: use strategy='ddp' instead of 'ddp_spawn' or 'ddp_fork'"
            )
        if traits.spawns and Trait.SWAPS_WEIGHTS in technique.traits:
            raise ConflictError(
                f"{name} keeps averaged weights, which a strategy that spawns or forks its processes loses when they "
                "end, so that a later validate, test or predict would use the raw weights without a word: use "
                "strategy='ddp', or one device"
            )
        if traits.flattens and overrides(technique, "after_step"):
            raise ConflictError(
                f"{name} changes the weights after each step, but {traits.name} steps other tensors than the module's "
                "parameters: use strategy='ddp' or ModelParallelStrategy"
            )
    for hooks, own in _by_hooks(techniques).items():
        hooks.check_all(trainer, module, own)
    for technique in techniques:
        technique.check(trainer, module)


def _by_hooks(techniques: Sequence[Declaration]) -> dict[type[Hooks], list[Declaration]]:
    """Return the techniques that have each mix-in."""
    found: dict[type[Hooks], list[Declaration]] = {}
    for technique in in_order(techniques):
        for hooks in hooks_of(type(technique)):
            found.setdefault(hooks, []).append(technique)
    return found


def _check_mixed_in(kind: type[Declaration]) -> None:
    """Refuse a technique with a method of a mix-in that it does not have."""
    mixed_in = {hooks.__name__ for hooks in hooks_of(kind)}
    for hooks, methods in _METHODS.items():
        stray = next((name for name in methods if callable(getattr(kind, name, None))), None)
        if stray and hooks not in mixed_in:
            name = kind.__name__
            raise ConfigurationError(f"{name}.{stray} would never be called: write class {name}({hooks}, Technique)")


def _check_batches(module: nn.Module, data: object) -> None:
    """Refuse data whose ``batches`` are of another kind than the module ``trains_on``, if both declare the kind."""
    given = getattr(data, "batches", None)
    wanted = getattr(module, "trains_on", None)
    if isinstance(given, str) and isinstance(wanted, tuple) and given not in wanted:
        raise ConfigurationError(
            f"{type(module).__name__} trains on batches of {' or '.join(wanted)}, and {type(data).__name__} gives "
            f"{given}: choose data of that kind"
        )


def _configure_model(self: LightningModule) -> None:
    inner_method(self, "configure_model", _configure_model)()
    techniques = techniques_of(self.trainer)
    acting = [one for one in techniques if one.phase is not None or Trait.TRIES_STEPS in one.traits]
    _check_initialised(self, in_order(acting))
    before = modules_of(self)
    kind = type(self)
    transform_by(self, techniques)
    changed = [type(one).__name__ for one in in_order(techniques) if overrides(one, "transform")]
    if changed:
        check_held(self.trainer, self, kind, before, "/".join(changed))
    if not traits_of(self.trainer.strategy).shards_itself:
        check_sharded(self.trainer, self)


def check_sharded(trainer: Trainer, module: nn.Module) -> None:
    """Refuse a fit whose processes would each train a copy of their own: the strategy leaves sharding to the module.

    Raises:
        ConflictError: If the module has been configured, and no parameter is sharded.
    """
    traits = traits_of(trainer.strategy)
    if not traits.dtensors or trainer.world_size == 1 or getattr(trainer.state.fn, "value", "") != "fit":
        return
    if not any(map(is_sharded, module.parameters())):
        raise ConflictError(
            f"{traits.name} shards nothing by itself, and neither does {type(module).__name__}: each of the "
            f"{trainer.world_size} processes would train a copy of its own, apart from the others. Shard in "
            "configure_model (torch.distributed.fsdp.fully_shard over self.device_mesh), or use strategy: ddp"
        )


def _check_optimizers(self: LightningModule) -> object:
    """Check the optimizers of the module for conflicts, before techniques rewrite them."""
    configured = inner_method(self, "configure_optimizers", _check_optimizers)()
    optimizers = find_optimizers(configured)
    check_conflicts([*parts_of(self.trainer), *optimizers])
    _check_networks(self, optimizers)
    return configured


def _check_networks(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse transforms of a second network that requires gradients, but that no optimizer steps, as a momentum copy.

    The transforms act before there are optimizers, and leave out networks that are frozen.
    """
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    names = {name for name, _ in module.named_modules()}
    for entry in ledger(module):
        if defines(entry.kind, "trains"):  # whose parameters are compared with those of the optimizers one by one
            continue
        idle: dict[str, str] = {}
        trained = False
        for name in names.intersection(entry.report.modules or ()):
            network = name.partition(".")[0]
            parameters = [p for p in module.get_submodule(network).parameters() if p.requires_grad]
            if any(id(p) in stepped for p in parameters):
                trained = True
            elif parameters:
                idle.setdefault(network, name)
        if trained and idle:
            network, name = min(idle.items())
            raise ConfigurationError(
                f"{entry.record['name']} has changed {name!r}, but no optimizer steps a parameter of {network!r}. "
                f"Freeze a copy or a teacher where it is built (self.{network}.requires_grad_(False)), or give the "
                "parameters to the optimizer"
            )


def _begin_training(self: LightningModule) -> None:
    """Note the step at which training starts, which is not 0 in a resumed run, and warn if it never validates."""
    inner_method(self, "on_train_start", _begin_training)()
    session = session_of(self)
    assert session is not None
    session.first_step = self.trainer.global_step
    session.first_batch = self.trainer.fit_loop.total_batch_idx
    with diagnostic("lit_efficient", "the next validation"):
        warn_of_no_validation(self.trainer)


def _watch_parameters(self: LightningModule) -> None:
    """Refuse other parameters from the start of training on; callbacks have had their own ``on_train_start``."""
    inner_method(self, "on_train_start", _watch_parameters)()
    techniques = in_order(techniques_of(self.trainer))
    followers = [type(one).__name__ for one in techniques if Trait.FOLLOWS_PARAMETERS in one.traits]
    session = session_of(self)
    assert session is not None
    for handle in watch_parameters(self, followers):
        session.at_end.append(partial(_remove, handle))


def _watch_clipping(self: LightningModule) -> None:
    """Compare the gradients of the first steps with ``gradient_clip_val``."""
    inner_method(self, "on_train_start", _watch_clipping)()
    session = session_of(self)
    assert session is not None
    reads = ReadBack(self.trainer.optimizers, partial(exceeds_clip_val, self))
    session.at_end.append(lambda _: reads.stop())


def _remove(handle: Any, module: nn.Module) -> None:
    handle.remove()


def _watch_steps(self: LightningModule) -> object:
    """Let techniques change the weights after each step of the finished optimizers."""
    configured = inner_method(self, "configure_optimizers", _watch_steps)()
    session = session_of(self)
    assert session is not None
    for optimizer in find_optimizers(configured):
        optimizer.register_step_post_hook(partial(_after_step, self, session))
    return configured


def _after_step(module: LightningModule, session: Session, optimizer: Optimizer, *_: object) -> None:
    """Hook of an optimizer that has stepped; outside of the run that registered it, it does nothing."""
    skipped = getattr(optimizer, "found_inf", None)  # set while a gradient scaler runs a fused step
    if session_of(module) is not session or (skipped is not None and skipped.item()):
        return
    session.has_stepped = True
    moved = optimizer.moved_weights() if hasattr(optimizer, "moved_weights") else nullcontext()
    with torch.no_grad(), moved:
        for technique in in_order(techniques_of(module.trainer)):
            if overrides(technique, "after_step"):
                technique.after_step(optimizer, module)


def find_optimizers(configured: object) -> list[Optimizer]:
    """Return every optimizer, once, of what ``configure_optimizers`` returned in any form that Lightning accepts."""
    return [item for item in configured_at(configured, "optimizer") if isinstance(item, Optimizer)]


def configured_at(configured: object, *keys: str) -> list[object]:
    """Return every object, once, in lists and under ``keys`` of mappings."""
    found: dict[int, object] = {}
    stack = [configured]
    while stack:
        item = stack.pop()
        if isinstance(item, Mapping):
            stack.extend(item.get(key) for key in keys)
        elif isinstance(item, list | tuple):
            # A slice, because a list of an iterable asks for its length, which it may not know.
            stack += [*islice(item, None)][::-1]
        elif item is not None:
            found.setdefault(id(item), item)
    return list(found.values())
