"""Optimizer steps inside the backward pass: each parameter is stepped as soon as its gradient is complete.

The optimizer stays one object with its groups, states and schedulers. Its step is called for each parameter, with a
group that contains only this parameter. If a step writes to its group (a counter, for example), the value is written to
the real group once, after all parameters have been stepped.
"""

import functools
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from lit_efficient.errors import ConfigurationError
from lit_efficient.optimizers.independence import check_independent, not_independent
from lit_efficient.optimizers.later_reads import LaterReads
from lit_efficient.optimizers.stepping import change_class, loss_of, step_some, unhooked, with_step
from lit_efficient.surgery import is_sharded

_Step = Callable[[Any], object]  # the step of an optimizer, without hooks and closure


class InBackward(Optimizer):
    """Base that marks an optimizer whose ``step(closure)`` steps parameters during the closure's backward pass."""

    in_backward: "BackwardSteps"

    @property
    def gradients_taken(self) -> Collection[Tensor]:
        """Parameters of the last step whose gradients were used and freed."""
        return self.in_backward.stepped


class BackwardSteps:
    """Steps of one optimizer inside the backward pass.

    Args:
        optimizer: The optimizer.
        step: Step of the optimizer, without hooks and closure.
        who: Name at the beginning of error messages.

    Attributes:
        watchers: Functions that are called with each parameter before its step, when ``parameter.grad`` is complete.
        on: True if a step with a closure steps in its backward pass, False if it steps afterwards as usual.
        clip_value: Largest absolute value of gradients, applied after the watchers, or ``None``.
        stepped: Parameters that have been stepped in the current or the last backward pass.
        earlier: Parameters that were stepped in the backward pass before that.
        late: Number of parameters of the last step that were stepped after the closure.
    """

    def __init__(self, optimizer: Optimizer, step: _Step, who: str) -> None:
        self.optimizer = optimizer
        self._step = step
        self.who = who
        self.watchers: list[Callable[[Tensor], object]] = []
        self.on = True
        self.clip_value: float | None = None
        self.stepped: set[Tensor] = set()
        self.earlier: set[Tensor] = set()
        self.late = 0
        self._groups: dict[Tensor, int] = {}  # number of each parameter's group
        self._written: dict[int, dict[str, object]] = {}
        self._lock = threading.Lock()  # the backward pass runs in one thread for each device
        self._reads = LaterReads(who, "it has stepped it and freed the gradient")
        self._running = False

    def run(self, closure: Callable[[], object]) -> Any:
        """Run the closure and step its parameters in the backward pass. Step parameters with other gradients later."""
        groups = self.optimizer.param_groups
        self._groups = {p: number for number, group in enumerate(groups) for p in group["params"]}
        self.earlier = self.stepped
        self.stepped = set()
        self._written = {}
        self._running = True
        handles = [p.register_post_accumulate_grad_hook(self._take) for p in self._groups if p.requires_grad]
        try:
            loss = loss_of(closure)
            self._reads.stop()
            late = [p for p in self._groups if p.grad is not None]
            for p in late:
                self._take(p)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise ConfigurationError(
                f"{self.who}: the backward pass needs a weight again that it has stepped: a layer uses it twice, once "
                f"without a gradient for it (detached). Leave {self.who} out. ({error})"
            ) from error
        finally:
            self._running = False
            self._reads.stop()
            for handle in handles:
                handle.remove()
        self.late = len(late)
        for number, written in self._written.items():
            groups[number].update(written)
        return loss

    def refuse_reads(self, names: Mapping[Tensor, str]) -> None:
        """Raise an error if a freed gradient is read before the step ends. ``names`` are used in the message."""
        if self._running:
            self._reads.start(self.stepped, names)

    @torch.no_grad()
    def _take(self, p: Tensor) -> None:
        """Step a parameter whose gradient is complete, and free the gradient."""
        with self._lock:
            if p in self.stepped:
                raise ConfigurationError(
                    f"{self.who}: a parameter of the shape {list(p.shape)} got its gradient in two parts, and the "
                    "first one was stepped already: several backward passes in a step, or a layer that is used twice "
                    f"under checkpointing with use_reentrant=True. Run one backward pass, or leave {self.who} out"
                )
            self.stepped.add(p)
            for watch in self.watchers:
                watch(p)
            if self.clip_value is not None and p.grad is not None:
                p.grad.clamp_(-self.clip_value, self.clip_value)
            number = self._groups[p]
            written = step_some(self.optimizer, self._step, self.optimizer.param_groups[number], [p])
            if self._written.setdefault(number, written) != written:
                raise not_independent(self.optimizer, self.who)
            p.grad = None
            if not is_sharded(p):
                # Fused kernels do not count their change, so autograd would not notice that it needs the old weight.
                increment_version(p)


def step_in_backward(optimizer: Optimizer, who: str = "step_in_backward") -> None:
    """Change the class of ``optimizer``, in place, to one whose ``step(closure)`` steps in the closure's backward pass.

    The closure must call ``zero_grad`` before ``backward``. A step without a closure works as usual.

    Args:
        optimizer: Optimizer whose step treats each parameter independently. This is tried on small tensors.
        who: Name at the beginning of error messages.

    Raises:
        ConfigurationError: If the step of one parameter depends on others, needs a closure, or finds its settings by
            the position of the parameter, as bitsandbytes can.
    """
    if isinstance(optimizer, InBackward):  # of an earlier run
        optimizer.in_backward.watchers.clear()
        optimizer.in_backward.on = True
        return
    kind: Any = type(optimizer)
    bitsandbytes = getattr(getattr(kind, "get_config", None), "__module__", "").startswith("bitsandbytes")
    if bitsandbytes and (optimizer.mng.index2config or optimizer.mng.module_weight_config_triple):  # type: ignore[attr-defined]
        raise ConfigurationError(
            f"{who}: bitsandbytes' GlobalOptimManager has settings of single parameters, which {kind.__name__} finds "
            "by their position in its groups, but the backward pass steps each parameter alone: call override_config "
            f"without register_parameters, or leave {who} out"
        )
    step = unhooked(kind)
    check_independent(optimizer, who)
    change_class(optimizer, _in_backward(kind))
    optimizer.in_backward = BackwardSteps(optimizer, step, who)  # type: ignore[attr-defined]


@functools.cache
def _in_backward(base: type[Optimizer]) -> type[Optimizer]:
    """Return a subclass of ``base`` with a step in the backward pass. It has the name of ``base``."""
    inner = unhooked(base)

    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> Any:
        if closure is None or not self.in_backward.on:
            return inner(self, closure)
        return self.in_backward.run(closure)

    return with_step(base, InBackward, step, gradients_taken=InBackward.gradients_taken)
