"""How techniques are applied: the wraps on a module's instance, the ledger of what was done, what checkpoints keep.

What was on the instance before (the Lightning CLI and ``torch.compile`` set such attributes, too) is called inside
and put back (:mod:`lit_efficient.internals.wraps`).
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

import lit_efficient
from lit_efficient.declaration import (
    Declaration,
    LossHooks,
    Phase,
    Report,
    check_conflicts,
    defines,
    held,
    in_order,
    overrides,
    parts_of,
    techniques_of,
)
from lit_efficient.errors import ConfigurationError, ConflictError, refusal
from lit_efficient.files.records import rebuild
from lit_efficient.internals.hugging_face_loading import Replacing
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.models.probes.mixed_copies import MixedCopies
from lit_efficient.models.probes.silent_layers import SilentLayers, unwatch
from lit_efficient.protocol import add_loss, check_batches, check_loss, product, weigh
from lit_efficient.surgery import is_sharded, reshard

_ON_LOSS = ("sample_weights", "extra_loss")
_OTHER_KEEPING = (Phase.RECOMPUTE, Phase.COMPILE)  # decide by themselves what is kept for the backward pass
_WORTH_A_WORD = 2**26  # bytes
_LOW = (torch.bfloat16, torch.float16)
_KEEPS = ("keeps_small_updates", "bf16_stochastic_round")  # on optimizers whose small steps survive; torchao's is last


@dataclass
class Session:
    """What one run has put on a module: primitives and plain functions only, so that the module can still be copied."""

    trainer: int
    wraps: dict[str, Callable[..., Any]] = field(default_factory=dict)  # of a method's name
    reports: dict[str, Report] = field(default_factory=dict)
    # Both only while optimizers are rewritten: copies of the module must not drag them along.
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    protocol_checked: bool = False
    counts_copies: bool = False  # in the first step, under mixed precision
    checked: set[int] = field(default_factory=set)  # optimizers all of whose adapters have had a gradient
    silent: dict[int, SilentLayers] = field(default_factory=dict)  # of optimizers some of whose ones have had none


@dataclass(frozen=True)
class Entry:
    """One line of the ledger: a transform that a module has undergone for good."""

    record: dict[str, Any]
    report: Report
    kind: type[Declaration]


def ledger(module: nn.Module) -> list[Entry]:
    """The transforms that ``module`` has undergone for good, oldest first; the list itself, where there is one."""
    return module.__dict__.get("_lit_efficient_ledger", [])


def forget_what_is_gone(module: nn.Module) -> None:
    """Strike from the ledger the transforms that were undone on ``module``, as merging undoes adapters."""
    done = ledger(module)
    done[:] = [entry for entry in done if entry.kind.is_in(module)]


def _session(module: nn.Module) -> Session | None:
    return module.__dict__.get("_lit_efficient_session")


# The network ---------------------------------------------------------------------------------------------------------


def apply(module: nn.Module, techniques: Iterable[Declaration]) -> dict[str, Report]:
    """Transform ``module`` by ``techniques``, in phase order, each once in its life; return all their reports by name.

    The trainer does this by itself; call it to use techniques outside Lightning.

    Raises:
        ConfigurationError: If a technique matches nothing, was applied before with other arguments, or comes too late.
    """
    given = [techniques] if isinstance(techniques, Declaration) else [*techniques]
    if wrong := [one for one in (module, *given) if not isinstance(one, nn.Module | Declaration)]:
        raise refusal("apply", "module and techniques", "instances, as MyModule() and LoRA()", wrong)
    done: list[Entry] = module.__dict__.setdefault("_lit_efficient_ledger", [])
    for technique in in_order(technique for technique in given if overrides(technique, "transform")):
        record = technique.record()
        earlier = next((entry.record for entry in done if entry.record["name"] == record["name"]), None)
        if earlier is None:
            _check_order(record, done)
            _check_sharding(technique, module)
            done.append(Entry(record, technique.transform(module), type(technique)))
        elif earlier["arguments"] != record["arguments"]:
            changes = _differences(earlier["arguments"], record["arguments"])
            raise ConfigurationError(
                f"{record['name']} was applied to this module by an earlier run with other arguments ({changes}); "
                "use the same ones, or build the module again"
            )
    if done:
        _keep_saving(module)
    return {entry.record["name"]: entry.report for entry in done}


def on_read(module: nn.Module, prefix: str, checkpoint: Mapping[str, Any] | None = None) -> Replacing | None:
    """What the technique that acts first on ``module`` wants replaced while a network of its is read from files.

    ``prefix`` is that of the network's names in the module, with the dot; of a ``checkpoint``, where there is no
    trainer, :func:`replay` will apply the techniques.
    """
    trainer = trainer_of(module)
    if (trainer is None and checkpoint is None) or ledger(module):
        return None
    if trainer is None:
        techniques = module.__dict__["_lit_efficient_recorded"] = _recorded(checkpoint or {})
    else:
        techniques = techniques_of(trainer)
    acting = in_order(technique for technique in techniques if overrides(technique, "transform"))
    return acting[0].on_read(prefix) if acting else None


def replay(module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Apply the transforms that ``checkpoint`` records, so that its weights fit ``module`` without a trainer.

    Raises:
        ConfigurationError: If the checkpoint names a technique that is not known here.
    """
    read = module.__dict__.pop("_lit_efficient_recorded", None)  # by which its weights were read
    apply(module, _recorded(checkpoint) if read is None else read)
    _check_checkpoint(module, checkpoint)


def _recorded(checkpoint: Mapping[str, Any]) -> list[Declaration]:
    techniques = []
    for record in checkpoint.get("lit_efficient", {}).get("transforms", ()):
        cls = technique_of(record)
        if cls is None:
            raise ConfigurationError(f"the checkpoint uses the technique {record['name']!r}: import its class first")
        if not cls.training_only:
            techniques.append(rebuild(cls, record["arguments"]))
    return techniques


def converters(checkpoint: Mapping[str, Any], format: str = "") -> list[type[Declaration]]:
    """The techniques behind a checkpoint that convert its weights for an export; refused with a ``format`` that cannot
    hold what they make.
    """
    kinds = (technique_of(record) for record in checkpoint.get("lit_efficient", {}).get("transforms", ()))
    found = [kind for kind in kinds if kind is not None and defines(kind, "convert_export")]
    if found and format:
        raise ConfigurationError(
            f"export: {found[0].__name__} trained weights in a format of its own, which {format} cannot hold, so that "
            "it would compute something else than was validated: use format safetensors"
        )
    return found


def technique_of(record: Mapping[str, Any]) -> type[Declaration] | None:
    """The class that a checkpoint's record names: a public technique of this package, or one that is imported already.

    A checkpoint cannot name code to import, not even of a package that registers techniques.
    """
    name = record["name"]
    public: object = getattr(lit_efficient, name) if name in lit_efficient.PUBLIC else None
    if isinstance(public, type) and issubclass(public, Declaration):
        return public
    return {cls.__name__: cls for cls in _subclasses(Declaration)}.get(name)


def arguments_behind(checkpoint: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    """The arguments of the technique that keeps ``key`` in the checkpoint (see :attr:`Declaration.keeps`), if any."""
    records = checkpoint.get("lit_efficient", {}).get("transforms", ())
    classes = ((record, technique_of(record)) for record in records)
    return next((record["arguments"] for record, cls in classes if cls is not None and cls.keeps == key), None)


def _subclasses(cls: type[Declaration]) -> Iterator[type[Declaration]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _check_order(record: Mapping[str, Any], done: list[Entry]) -> None:
    late = next((entry.record["name"] for entry in done if entry.record["phase"] > record["phase"]), None)
    if late is not None:
        raise ConfigurationError(
            f"{record['name']} must act before {late}, which an earlier run applied to this module; "
            "give both to the first Trainer, or build the module again"
        )


def _check_sharding(technique: Declaration, module: nn.Module) -> None:
    if technique.after_sharding:
        return
    sharded = next((name for name, p in module.named_parameters() if is_sharded(p)), None)
    if sharded is not None:
        raise ConflictError(
            f"{type(technique).__name__} must change the network before it is sharded, but {sharded!r} is sharded "
            "already when configure_model returns: shard after all techniques have acted"
        )


# The wraps -----------------------------------------------------------------------------------------------------------


def install(trainer: Any, module: Any) -> None:
    """Check the trainer's techniques and wrap the module's methods; a second call in the same run does nothing."""
    session = _session(module)
    if session is not None and session.trainer == id(trainer):
        return
    uninstall(module)  # a run that died before its teardown, or a copy that was made in the middle of one
    check_run(trainer, module)
    techniques = techniques_of(trainer)
    wraps: dict[str, Callable[..., Any]] = {"configure_model": _configure_model}
    wraps["on_load_checkpoint"] = _on_load_checkpoint
    rewriters = ("prepare_parameters", "rewrite_optimizer", "trains", "after_step")
    rewrites = any(overrides(technique, method) for technique in techniques for method in rewriters)
    # Lightning asks whether the hook is overridden: one that is not is left alone, unless a technique needs it.
    has_own = getattr(module.configure_optimizers, "__qualname__", "") != "LightningModule.configure_optimizers"
    if rewrites or has_own:
        wraps["configure_optimizers"] = _configure_optimizers
    counts = str(trainer.precision).endswith("mixed") and module.automatic_optimization
    counts = counts and not any(technique.phase in _OTHER_KEEPING for technique in techniques)
    if counts or any(overrides(technique, method) for technique in techniques for method in _ON_LOSS):
        wraps["training_step"] = _training_step_like(module.training_step)
    module.__dict__["_lit_efficient_session"] = Session(id(trainer), wraps, counts_copies=counts)
    for name, function in wraps.items():
        wrap_method(module, name, function)
    if any(overrides(technique, "write_checkpoint") for technique in techniques):
        _keep_saving(module)


def _keep_saving(module: Any) -> None:
    """Wrap ``on_save_checkpoint`` for good: a trainer saves after its teardown, too."""
    wrap_method(module, "on_save_checkpoint", _on_save_checkpoint)


def uninstall(module: Any) -> None:
    """Take the wraps off and put back what was there before."""
    session = module.__dict__.pop("_lit_efficient_session", None)
    for name, function in session.wraps.items() if session else ():
        unwrap_method(module, name, function)
    unwatch(module)
    for layers in session.silent.values() if session else ():
        if layers.steps == 1:
            rank_zero_warn(layers.described())


def check_run(trainer: Any, module: Any) -> None:
    """Ask each technique of a trainer what it refuses of the others, of the trainer and of the module.

    Raises:
        ConflictError, ConfigurationError: What one of them says.
    """
    techniques = techniques_of(trainer)
    check_conflicts([*parts_of(trainer), getattr(trainer, "datamodule", None)])
    check_batches(module, getattr(trainer, "datamodule", None))
    surgeons = [type(technique).__name__ for technique in techniques if overrides(technique, "transform")]
    traits = traits_of(trainer.strategy)
    if surgeons and traits.spawns:
        raise ConflictError(
            f"{surgeons[0]} changes the network, and a strategy that spawns or forks its processes would lose that "
            "change without a word: use strategy='ddp' instead of 'ddp_spawn' or 'ddp_fork'"
        )
    for technique in techniques:
        stray = next((name for name in _ON_LOSS if overrides(technique, name)), None)
        if stray and not isinstance(technique, LossHooks):
            name = type(technique).__name__
            raise ConfigurationError(f"{name}.{stray} is for the loss: write class {name}(LossHooks, Technique)")
    weighers = [type(technique).__name__ for technique in techniques if overrides(technique, "sample_weights")]
    if weighers and not module.automatic_optimization:
        raise ConflictError(
            f"{weighers[0]} weighs the loss that training_step returns, but {type(module).__name__} optimizes manually "
            "and has stepped by then: call the technique's pure function on your losses inside training_step instead"
        )
    adders = [type(technique).__name__ for technique in techniques if overrides(technique, "extra_loss")]
    if adders and not module.automatic_optimization:
        raise ConflictError(
            f"{adders[0]} adds a term to the loss that training_step returns, but {type(module).__name__} optimizes "
            "manually and has stepped by then: add the technique's pure function to your loss inside training_step"
        )
    constrainers = [type(technique).__name__ for technique in techniques if overrides(technique, "after_step")]
    if constrainers and traits.flattens:
        raise ConflictError(
            f"{constrainers[0]} changes the weights after each step, but {traits.name} steps other tensors than the "
            "module's parameters: use strategy='ddp' or ModelParallelStrategy"
        )
    for technique in techniques:
        technique.check(trainer, module)


def _configure_model(self: Any) -> None:
    inner_method(self, "configure_model", _configure_model)()
    apply(self, techniques_of(self.trainer))
    if not traits_of(self.trainer.strategy).shards_itself:
        check_sharded(self.trainer, self)


def check_sharded(trainer: Any, module: nn.Module) -> None:
    """Refuse a fit whose processes would each train a copy apart: the strategy leaves all sharding to the module.

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


def _configure_optimizers(self: Any) -> Any:
    session: Session = self.__dict__["_lit_efficient_session"]
    techniques = in_order(techniques_of(self.trainer))
    configured = configured_by(self, techniques, inner_method(self, "configure_optimizers", _configure_optimizers))
    optimizers = find_optimizers(configured)
    for optimizer in optimizers if any(overrides(t, "trains") for t in techniques) else ():
        optimizer.register_step_post_hook(partial(_check_learning, self, session))
    if any(overrides(technique, "after_step") for technique in techniques):
        for optimizer in optimizers:  # after what rewrites have registered
            optimizer.register_step_post_hook(partial(_after_step, self, session))
    return configured


def configured_by(module: Any, techniques: list[Declaration], configure: Callable[[], Any]) -> Any:
    """What ``configure`` returns of optimizers, rewritten by techniques, in their order, in a run on the module.

    Raises:
        ConfigurationError, ConflictError: What a technique refuses of them; if they lack what one trains.
    """
    session = module.__dict__.setdefault("_lit_efficient_session", Session(id(module.trainer)))
    for technique in techniques:
        technique.prepare_parameters(module)
    configured = configure()
    optimizers = find_optimizers(configured)
    check_conflicts([*parts_of(module.trainer), *optimizers])
    session.optimizers = optimizers
    session.schedulers = find_schedulers(configured)
    try:
        _rewrite_optimizers(module, session, techniques, optimizers)
    finally:
        session.optimizers = []
        session.schedulers = []
    _check_trained(module, techniques, optimizers)
    return configured


def _rewrite_optimizers(
    module: Any, session: Session, techniques: list[Declaration], optimizers: list[Optimizer]
) -> None:
    for technique in techniques:
        if not overrides(technique, "rewrite_optimizer"):
            continue
        name = type(technique).__name__
        if not optimizers:
            raise ConfigurationError(f"{name}: {type(module).__name__}.configure_optimizers returned no optimizer")
        for i, optimizer in enumerate(optimizers):
            key = name if len(optimizers) == 1 else f"{name}[{i}]"
            session.reports[key] = technique.rewrite_optimizer(optimizer, module)


def _check_trained(module: Any, techniques: list[Declaration], optimizers: list[Optimizer]) -> None:
    """Refuse optimizers that lack what a technique trains: it would start, cost its share and learn nothing."""
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    names = {id(p): name for name, p in module.named_parameters()}
    for technique in techniques if optimizers else ():
        wanted = list(technique.trains(module))
        lost = [names.get(id(p), "one of another module") for p in wanted if id(p) not in stepped]
        if lost:
            raise ConfigurationError(
                f"{type(technique).__name__}: no optimizer holds {len(lost)} of the {len(wanted)} parameters that it "
                f"trains: {', '.join(lost[:3])}{', ...' if len(lost) > 3 else ''}. Build the optimizer in "
                "configure_optimizers, over all parameters with requires_grad: a list made in __init__ and a choice by "
                "name miss what techniques add"
            )
    trainers = [type(technique).__name__ for technique in techniques if any(True for _ in technique.trains(module))]
    for i, optimizer in enumerate(optimizers) if trainers else ():
        given = [p for group in optimizer.param_groups for p in group["params"]]
        if given and not any(p.requires_grad for p in given):
            raise ConfigurationError(
                f"{trainers[0]} has frozen all that optimizer {i} of {type(module).__name__} "
                f"({type(optimizer).__name__}) steps, first {names.get(id(given[0]), 'one of another module')!r}: its "
                "loss would have no gradient. Let those train, too (LoRA: modules_to_save), or return no such optimizer"
            )


def _check_learning(module: Any, session: Session, optimizer: Optimizer, *_: Any) -> None:
    """After a step: refuse a run in which what techniques train is frozen or bypassed; adapters may wait."""
    if _session(module) is not session or id(optimizer) in session.checked:
        return
    reshard(module)
    taken = getattr(optimizer, "gradients_taken", ())  # whose gradients are used up or lie elsewhere
    if (layers := session.silent.get(id(optimizer))) is not None:
        layers.check(taken)
        if not layers.waiting:
            session.checked.add(id(optimizer))
        elif layers.steps == 2:
            rank_zero_warn(layers.described())
        return
    own = {id(p): p.grad is not None or p in taken for group in optimizer.param_groups for p in group["params"]}
    names = {id(p): name for name, p in module.named_parameters()}
    later = {id(module.get_parameter(name)) for name in held(module)}
    silent: dict[str, list[nn.Parameter]] = {}
    for technique in in_order(techniques_of(module.trainer)):
        who = type(technique).__name__
        trained = [p for p in technique.trains(module) if id(p) in own and id(p) not in later]  # others may be toggled
        frozen = [names.get(id(p), "") for p in trained if not p.requires_grad]
        if frozen:
            raise ConfigurationError(
                f"{who}: {len(frozen)} of the parameters that it trains were frozen after configure_optimizers, first "
                f"{frozen[0]!r}: let {type(module).__name__} freeze nothing in on_fit_start or on_train_start"
            )
        if not any(own.values()):
            return  # a hook has taken the gradients away: look at the next step
        adapters: dict[str, list[nn.Parameter]] = {}
        for p in technique.adapters(module):
            if id(p) in own and id(p) in names and id(p) not in later:
                adapters.setdefault(names[id(p)].rpartition(".")[0], []).append(p)
        learns = {owner: any(own[id(p)] for p in added) for owner, added in adapters.items()}
        alive = {_without_numbers(owner) for owner, has in learns.items() if has}
        dead = [owner for owner, has in learns.items() if not has and _without_numbers(owner) not in alive]
        silent |= {owner: adapters[owner] for owner in dead}
    if not silent:
        session.checked.add(id(optimizer))
        return
    who = "/".join(type(t).__name__ for t in in_order(techniques_of(module.trainer)) if overrides(t, "adapters"))
    watched = [] if traits_of(module.trainer.strategy).flattens else silent  # where there are no layers' weights
    parts = {owner: module.get_submodule(owner) for owner in watched}
    session.silent[id(optimizer)] = SilentLayers(who, silent, parts)
    wrap = session.wraps.setdefault("training_step", _training_step_like(module.training_step))
    wrap_method(module, "training_step", wrap)


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _after_step(module: Any, session: Session, optimizer: Any, *_: Any) -> None:
    """What an optimizer calls that has stepped; of another run than the module's present one it does nothing."""
    skipped = getattr(optimizer, "found_inf", None)  # set while a fused step is given to a gradient scaler
    if _session(module) is not session or (skipped is not None and skipped.item()):
        return
    moved = optimizer.moved_weights() if hasattr(optimizer, "moved_weights") else nullcontext()
    with torch.no_grad(), moved:
        for technique in in_order(techniques_of(module.trainer)):
            if overrides(technique, "after_step"):
                technique.after_step(optimizer, module)


def find_optimizers(configured: object) -> list[Optimizer]:
    """Every optimizer, once, in what ``configure_optimizers`` returned, in any of the forms that Lightning accepts."""
    return [item for item in _configured_at(configured, "optimizer") if isinstance(item, Optimizer)]


def find_schedulers(configured: object) -> list[Any]:
    """Every learning-rate scheduler, once, in what ``configure_optimizers`` returned."""
    found = _configured_at(configured, "lr_scheduler", "scheduler")
    return [item for item in found if not isinstance(item, Optimizer)]


def _configured_at(configured: object, *keys: str) -> list[Any]:
    """What stands in lists, and in mappings under ``keys``."""
    found: dict[int, Any] = {}
    stack = [configured]
    while stack:
        item = stack.pop()
        if isinstance(item, Mapping):
            stack.extend(item.get(key) for key in keys)
        elif isinstance(item, list | tuple):
            stack.extend(reversed(item))
        elif item is not None:
            found.setdefault(id(item), item)
    return list(found.values())


def schedulers_of(module: nn.Module) -> list[Any]:
    """The schedulers that ``configure_optimizers`` returned; for use in ``Technique.rewrite_optimizer`` only."""
    session = _session(module)
    return list(session.schedulers) if session is not None else []


def optimized_by(module: nn.Module) -> set[int]:
    """Return identities of the parameters that optimizers hold; for use in ``Technique.rewrite_optimizer`` only."""
    session = _session(module)
    optimizers = [] if session is None else session.optimizers
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _training_step_like(inner: Callable[..., Any]) -> Callable[..., Any]:
    """The wrap whose signature asks for what ``inner`` asks for: Lightning reads it to decide what to pass."""
    parameters = inspect.signature(inner).parameters
    if "dataloader_iter" in parameters:
        return _training_step_on_iterator
    several = len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    return _training_step if several else _training_step_on_batch


def _training_step(self: Any, batch: Any, batch_idx: int) -> Any:
    return _weighed(self, batch, batch_idx)


def _training_step_on_batch(self: Any, batch: Any) -> Any:
    return _weighed(self, batch)


def _training_step_on_iterator(self: Any, dataloader_iter: Any) -> Any:
    return _weighed(self, dataloader_iter)


def own_training_step(module: Any) -> Callable[..., Any]:
    """The module's ``training_step`` without what techniques do to its loss."""
    session = _session(module)
    wrap = session.wraps.get("training_step") if session is not None else None
    return module.training_step if wrap is None else inner_method(module, "training_step", wrap)


def _on_loss(module: Any, method: str) -> list[LossHooks]:
    techniques = in_order(techniques_of(module.trainer))
    return [t for t in techniques if isinstance(t, LossHooks) and overrides(t, method)]


def _weighed(module: Any, *args: Any) -> Any:
    session: Session = module.__dict__["_lit_efficient_session"]
    with ExitStack() as listening:
        for layers in session.silent.values():
            listening.enter_context(layers.listening())
        if session.counts_copies:
            session.counts_copies = False
            copies = MixedCopies()
            listening.callback(_warn_of_copies, copies, str(module.trainer.precision))
            listening.enter_context(copies.counting(module))
        return _weighed_loss(module, session, *args)


def _weighed_loss(module: Any, session: Session, *args: Any) -> Any:
    techniques = _on_loss(module, "sample_weights")
    weighers = [(type(t).__name__, lambda out, t=t: t.sample_weights(out, module)) for t in techniques]
    contexts = (t.weigh_inside(module, lambda out: product(out, weighers)) for t in techniques)
    inside = next((context for context in contexts if context is not None), None)
    if inside is not None:
        with inside:
            return _with_extra_losses(module, *args)
    output = _with_extra_losses(module, *args)
    if not weighers:
        return output
    weighed = weigh(output, weighers, type(module).__name__)
    if output is not None and not session.protocol_checked:  # once: it costs a synchronisation
        check_loss(output, module)
        session.protocol_checked = True
    return weighed


def _with_extra_losses(module: Any, *args: Any) -> Any:
    """The module's own ``training_step``, and the terms that techniques add to its loss."""
    session: Session = module.__dict__["_lit_efficient_session"]
    techniques = _on_loss(module, "extra_loss")
    with ExitStack() as watching:
        for technique in techniques:
            context = technique.watch_step(module, args[0])
            if context is not None:
                watching.enter_context(context)
        output = inner_method(module, "training_step", session.wraps["training_step"])(*args)
        for technique in techniques if output is not None else ():
            term = technique.extra_loss(output, module, args[0])
            if term is not None:
                output = add_loss(output, term, type(technique).__name__, type(module).__name__)
    return output


# Checkpoints ---------------------------------------------------------------------------------------------------------


def _on_save_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
    inner_method(self, "on_save_checkpoint", _on_save_checkpoint)(checkpoint)
    checkpoint.setdefault("lit_efficient", {})["transforms"] = [entry.record for entry in ledger(self)]
    trainer = trainer_of(self)
    for technique in in_order(techniques_of(trainer)) if trainer is not None else ():
        technique.write_checkpoint(checkpoint, self)
    for entry in ledger(self):
        entry.kind.trim_checkpoint(self, checkpoint)


def _on_load_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
    kept = checkpoint.get("lit_efficient")
    fitting = getattr(self.trainer.state.fn, "value", None) == "fit"
    records = [technique.record() for technique in techniques_of(self.trainer)]
    if kept is not None:
        saved = [*kept.get("transforms", ()), *kept.get("techniques", ())]
        compare_techniques(saved, records, fitting=fitting)
        _check_checkpoint(self, checkpoint)
    elif fitting and checkpoint.get("optimizer_states"):  # of a run without techniques
        compare_techniques([], [record for record in records if [*record["alters"]] == ["optimizer"]], fitting=True)
    for technique in in_order(techniques_of(self.trainer)):
        technique.read_checkpoint(checkpoint, self)
    inner_method(self, "on_load_checkpoint", _on_load_checkpoint)(checkpoint)


def _check_checkpoint(module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    for entry in ledger(module):
        entry.kind.check_checkpoint(module, checkpoint)


def compare_techniques(
    saved: Iterable[Mapping[str, Any]], current: Iterable[Mapping[str, Any]], *, fitting: bool
) -> None:
    """Refuse a checkpoint whose weights or optimizer states other techniques have shaped; print any other difference.

    Raises:
        ConfigurationError: Naming the technique, and how it differs.
    """
    old = {r["name"]: r for r in saved}
    new = {r["name"]: r for r in current}
    fatal = {"weights", "optimizer"} if fitting else {"weights"}
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if before is None:
            difference = f"{name} is new: the checkpoint was written without it"
        elif after is None:
            difference = f"{name} is missing: the checkpoint was written with it"
        elif before["arguments"] != (now := _known(after["arguments"], before["arguments"])):
            difference = f"{name} has changed: {_differences(before['arguments'], now)}"
        else:
            continue
        shaped = fatal & set((before or after or {})["alters"])
        if shaped:
            raise ConfigurationError(
                f"{difference}. It shapes the {' and '.join(sorted(shaped))} in a checkpoint, which cannot be restored "
                "across that: use the checkpoint's techniques, or load its weights without resuming"
            )
        rank_zero_info(f"Resuming with a difference: {difference}.")


def _known(now: Any, then: Any) -> Any:
    """Arguments without those that are unset, and that an older checkpoint does not know."""
    if not isinstance(now, Mapping) or not isinstance(then, Mapping):
        return now
    return {key: _known(value, then.get(key)) for key, value in now.items() if key in then or value is not None}


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return ", ".join(f"{key} was {before.get(key)!r} and is {after.get(key)!r}" for key in keys)


# Precision -----------------------------------------------------------------------------------------------------------


def _warn_of_copies(copies: MixedCopies, precision: str) -> None:
    if copies.weights > max(copies.activations, _WORTH_A_WORD):
        rank_zero_warn(
            f"precision: {precision} costs memory at this batch size: it keeps {copies.weights / 2**20:.0f} MiB of "
            f"16-bit copies of weights and spares {copies.activations / 2**20:.0f} MiB of activations. If memory is "
            "short, take larger batches or 32-true, or bf16-true with KahanSummation"
        )


def warn_of_rounding(trainer: Any, module: nn.Module) -> None:
    """Say what a precision of 16 bits rounds that it should not: steps of the optimizers, and tables of positions."""
    for optimizer in trainer.optimizers:
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        low = sum(p.numel() for p in trained if p.dtype in _LOW)
        own = any(group.get("kahan_sum", False) is not False for group in optimizer.param_groups)  # None: where needed
        if low and not own and not any(getattr(optimizer, name, False) for name in _KEEPS):
            rank_zero_warn(
                f"{type(optimizer).__name__} steps {low:,} parameters in 16 bits, where a step below 1/512 of a weight "
                "is rounded away: they hardly learn. Under precision: bf16-true add the callback StochasticRounding, "
                "or KahanSummation for 2 bytes a parameter; or use precision: bf16-mixed"
            )
    tables = [
        f"{name}.{key}"
        for name, part in module.named_modules()
        for key, held in part.named_buffers(recurse=False)
        if held.dtype in _LOW and held.numel() > 1 and not list(part.parameters()) and not list(part.children())
    ]
    if tables:
        rank_zero_warn(
            f"{len(tables)} tables beside the parameters are rounded to 16 bits, first {tables[0]!r}: frequencies of "
            "rotary positions then turn far ones by wrong angles. Add the callback KeepFloat32"
        )


# Reports -------------------------------------------------------------------------------------------------------------


def reports_of(module: nn.Module, techniques: Iterable[Declaration] = ()) -> dict[str, Report]:
    """What each technique touched on ``module``, by the technique's name, in the order in which they act."""
    session = _session(module)
    reports = {entry.record["name"]: entry.report for entry in ledger(module)} | (session.reports if session else {})
    described = ((type(technique).__name__, technique.describe(module)) for technique in in_order(techniques))
    return reports | {name: report for name, report in described if report is not None}


def log_reports(trainer: Any, reports: Mapping[str, Report]) -> None:
    """Print the reports once and put their figures into every logger's hyper-parameters and, for W&B, its summary."""
    if not reports:
        return
    width = max(map(len, reports))
    rank_zero_info("\n".join(["Techniques:", *(f"  {name:{width}}  {r.summary}" for name, r in reports.items())]))
    figures = {
        f"techniques/{name}/{key}": value for name, report in reports.items() for key, value in report.figures().items()
    }
    for logger in trainer.loggers:
        logger.log_hyperparams(figures)
        if type(logger).__name__ == "WandbLogger" and trainer.is_global_zero:
            logger.experiment.summary.update(figures)
