"""Loss hooks: weights for the losses of samples, and terms that are added to the loss, in each training step."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lit_efficient.application.ledger import session_of, step_like
from lit_efficient.declaration import Hooks, Wrap, in_order, overrides, techniques_of
from lit_efficient.errors import ConflictError
from lit_efficient.internals.wraps import inner_method
from lit_efficient.protocol import add_loss, check_loss, product, weigh


def refuse_log_probs(who: str, module: nn.Module) -> None:
    """Raise ConflictError if the loss of a module is made of log-probabilities of answers.

    Args:
        who: Technique, and its argument, that would change the log-probabilities.
        module: The module.
    """
    if getattr(module, "compares_log_probs", False):
        raise ConflictError(
            f"{who}: the loss of {type(module).__name__} compares log-probabilities of answers, and these would become "
            "others: leave it out"
        )


class LossHooks(Hooks):
    """Mix-in for techniques that change the loss of each step: ``class Weighting(LossHooks, Technique)``."""

    batch_weight: float | None = None  # weight of the current batch in its step, for example its number of tokens
    batch_factor: float = 1.0  # factor by which the technique multiplies the loss of the current batch

    def sample_weights(self, output: Mapping[str, object], module: nn.Module) -> Tensor:
        """Return weights [B] for the losses of the samples, from what ``training_step`` returned."""
        raise NotImplementedError

    def weigh_inside(
        self, module: nn.Module, weights_of: Callable[[Mapping[str, Any]], Tensor]
    ) -> AbstractContextManager[None] | None:
        """Return a context for ``training_step`` in which losses are weighed, for modules that return no sample losses.

        Args:
            module: The module.
            weights_of: Function that returns the product [B] of all techniques' weights for a dict as
                ``training_step`` would return it.
        """
        return None

    def watch_step(self, module: nn.Module, batch: object) -> AbstractContextManager[None] | None:
        """Return a context for ``training_step`` in which the technique can observe what the network computes."""
        return None

    def extra_loss(self, output: object, module: nn.Module, batch: object) -> Tensor | None:
        """Return a scalar to add to the loss that ``training_step`` returned in ``output``, or ``None``."""
        raise NotImplementedError

    @classmethod
    def check_all(cls, trainer: Trainer, module: LightningModule, techniques: Sequence[Any]) -> None:
        """Refuse modules with manual optimization, which has stepped before the loss is returned."""
        if module.automatic_optimization:
            return
        stepped = f"{type(module).__name__} uses manual optimization and has already stepped by then"
        for technique in techniques:
            name = type(technique).__name__
            if overrides(technique, "sample_weights"):
                raise ConflictError(
                    f"{name} weighs the loss that training_step returns, but {stepped}: call the technique's pure "
                    "function on your losses inside training_step instead"
                )
            if overrides(technique, "extra_loss"):
                raise ConflictError(
                    f"{name} adds a term to the loss that training_step returns, but {stepped}: add the technique's "
                    "pure function to your loss inside training_step"
                )

    @classmethod
    def wraps(cls, trainer: Trainer, module: LightningModule, techniques: Sequence[Any]) -> list[Wrap]:
        """Wrap ``training_step`` if a technique changes the loss, or observes the step."""
        methods = ("sample_weights", "extra_loss", "watch_step")
        changes = any(overrides(t, method) for t in techniques for method in methods)
        if not changes:
            return []
        step = step_like(module.training_step, _training_step, _training_step_on_batch, _training_step_on_iterator)
        return [("training_step", step)]


def _training_step(self: LightningModule, batch: object, batch_idx: int) -> Any:
    return _changed_loss(self, inner_method(self, "training_step", _training_step), batch, batch_idx)


def _training_step_on_batch(self: LightningModule, batch: object) -> Any:
    return _changed_loss(self, inner_method(self, "training_step", _training_step_on_batch), batch)


def _training_step_on_iterator(self: LightningModule, dataloader_iter: object) -> Any:
    inner = inner_method(self, "training_step", _training_step_on_iterator)
    return _changed_loss(self, inner, dataloader_iter)


def own_training_step(module: LightningModule) -> Callable[..., object]:
    """Return the module's ``training_step`` without the wrap that changes its loss."""
    session = session_of(module)
    if session is not None:
        for name, function in session.wraps:
            if name == "training_step":
                return inner_method(module, name, function)
    return module.training_step


def _on_loss(module: LightningModule, method: str) -> list[LossHooks]:
    techniques = in_order(techniques_of(module.trainer))
    return [t for t in techniques if isinstance(t, LossHooks) and overrides(t, method)]


def _changed_loss(module: Any, step: Callable[..., Any], *args: object) -> object:
    """Run ``step``, the module's own, with the changes that techniques make to its loss."""
    session = session_of(module)
    assert session is not None
    techniques = _on_loss(module, "sample_weights")
    weighers = [(type(t).__name__, lambda out, t=t: t.sample_weights(out, module)) for t in techniques]
    for technique in techniques:
        inside = technique.weigh_inside(module, lambda out: product(out, weighers))
        if inside is not None:
            with inside:
                return _with_extra_losses(module, step, *args)
    output = _with_extra_losses(module, step, *args)
    if not weighers:
        return output
    weighed = weigh(output, weighers, type(module).__name__)
    if output is not None and not session.loss_is_checked:  # once: the comparison waits for the device
        check_loss(output, module)
        session.loss_is_checked = True
    return weighed


def _with_extra_losses(module: LightningModule, step: Callable[..., object], *args: object) -> Any:
    """Run ``step`` and add the terms of techniques to its loss."""
    with ExitStack() as watching:
        for technique in _on_loss(module, "watch_step"):
            context = technique.watch_step(module, args[0])
            if context is not None:
                watching.enter_context(context)
        output = step(*args)
        if output is None:  # the step is skipped
            return None
        for technique in _on_loss(module, "extra_loss"):
            term = technique.extra_loss(output, module, args[0])
            if term is not None:
                output = add_loss(output, term, type(technique).__name__, type(module).__name__)
    return output
