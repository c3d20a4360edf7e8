"""The step of an optimizer inside the backward pass: of each parameter as soon as its gradient is there.

The optimizer stays one object with its groups, states and schedulers: for each parameter its own step is called with
a group that holds this one alone. What a step writes to its group (a counter, say) is written once, when all are done.
"""

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from lit_efficient.errors import ConfigurationError
from lit_efficient.optimizers.later_reads import LaterReads
from lit_efficient.optimizers.stepping import change_class, loss_of, unhooked, with_step
from lit_efficient.surgery import is_sharded

_SAMPLE = 4  # the longest side of the tensors that an optimizer is tried on


class InBackward(Optimizer):
    """What marks an optimizer whose ``step(closure)`` steps while the closure's backward pass runs."""

    in_backward: "BackwardSteps"

    @property
    def gradients_taken(self) -> Collection[Tensor]:
        """Parameters of the last step whose gradients were used and freed."""
        return self.in_backward.stepped


class BackwardSteps:
    """The steps of one optimizer.

    Args:
        optimizer: The one that steps.
        step: Its step, without hooks and closure.
        who: Name for errors.

    Attributes:
        watchers: Called with each parameter when its gradient is complete, before it is stepped; what must see
            gradients looks at ``parameter.grad`` then.
        on: Whether a step with a closure steps in its backward pass; else it is as ever.
        clip_value: Each gradient is cut off at plus and minus this, after the watchers.
        stepped: Parameters that were stepped in the backward pass under way, or the last one.
        earlier: Those of the one before.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[[], Any], who: str) -> None:
        self.optimizer, self._step, self.who = optimizer, step, who
        self.watchers: list[Callable[[Tensor], None]] = []
        self.on = True
        self.clip_value: float | None = None
        self.stepped: set[Tensor] = set()
        self.earlier: set[Tensor] = set()
        self.late = 0  # how many of the last step's were stepped only after the closure
        self._groups: dict[Tensor, int] = {}
        self._written: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()  # each device has a thread of its own in a backward pass
        self._reads = LaterReads(who, "it has stepped it and freed the gradient")
        self._running = False

    def run(self, closure: Callable[[], Any]) -> Any:
        """Step in the closure's backward pass; what it gives a gradient by other means, afterwards."""
        groups = self.optimizer.param_groups
        self._groups = {p: number for number, group in enumerate(groups) for p in group["params"]}
        self.earlier, self.stepped, self._written, self._running = self.stepped, set(), {}, True
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
        """From now to the step's end reading a gradient that is gone is an error; ``names`` are for its text."""
        if self._running:
            self._reads.start(self.stepped, names)

    @torch.no_grad()
    def _take(self, p: Tensor) -> None:
        """Step a parameter whose gradient is complete, and free it."""
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
            written = step_alone(self.optimizer, self._step, number, p)
            if self._written.setdefault(number, written) != written:
                raise _not_alone(self.optimizer, self.who)
            p.grad = None
            if not is_sharded(p):
                increment_version(p)  # fused kernels write past it: what the backward pass still needs is found by it


def step_alone(optimizer: Optimizer, step: Callable[[], Any], number: int, p: Tensor) -> dict[str, Any]:
    """Step one parameter of an optimizer, of the group of that number; what that wrote to its group is returned, not
    kept.

    ``step`` is the optimizer's, without hooks and closure, and treats each parameter on its own.
    """
    groups = optimizer.param_groups
    group = groups[number]
    alone = {**group, "params": [p]}
    optimizer.param_groups = [alone]
    try:
        step()
    finally:
        optimizer.param_groups = groups
    return {key: value for key, value in alone.items() if key != "params" and value is not group.get(key, optimizer)}


def step_in_backward(optimizer: Optimizer, who: str = "step_in_backward") -> None:
    """Change ``optimizer``'s class, in place, to one whose ``step(closure)`` steps in the closure's backward pass.

    ``zero_grad`` belongs into the closure, before ``backward``. Without a closure a step is as ever.

    Args:
        optimizer: Any optimizer whose step treats each parameter on its own; it is tried on small tensors.
        who: Name for errors.

    Raises:
        ConfigurationError: If the step of one parameter depends on others, cannot be made without a closure, or finds
            its settings by its place, as bitsandbytes does.
    """
    if isinstance(optimizer, InBackward):  # of an earlier run
        optimizer.in_backward.watchers.clear()
        optimizer.in_backward.on = True
        return
    kind: Any = type(optimizer)
    theirs = getattr(getattr(kind, "get_config", None), "__module__", "").startswith("bitsandbytes")
    if theirs and (optimizer.mng.index2config or optimizer.mng.module_weight_config_triple):  # type: ignore[attr-defined]
        raise ConfigurationError(
            f"{who}: bitsandbytes' GlobalOptimManager has settings of single parameters, which {kind.__name__} finds "
            "by their place in its groups, and in the backward pass each comes alone: call override_config without "
            f"register_parameters, or leave {who} out"
        )
    _try(optimizer, unhooked(kind), who)
    change_class(optimizer, _in_backward(kind))
    optimizer.in_backward = BackwardSteps(optimizer, functools.partial(unhooked(kind), optimizer), who)  # type: ignore[attr-defined]


@functools.cache
def _in_backward(base: type[Optimizer]) -> type[Optimizer]:
    """``base`` with a step in the backward pass; the class keeps its name."""
    inner = unhooked(base)

    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> Any:
        if closure is None or not self.in_backward.on:
            return inner(self, closure)
        return self.in_backward.run(closure)

    return with_step(base, InBackward, step, gradients_taken=InBackward.gradients_taken)


def _not_alone(optimizer: Optimizer, who: str) -> ConfigurationError:
    return ConfigurationError(
        f"{who}: the step of {type(optimizer).__name__} treats its parameters together (a norm or a state of all), "
        f"and in the backward pass they come one by one: use another optimizer, or leave {who} out"
    )


def _try(optimizer: Optimizer, step: Callable[..., Any], who: str) -> None:
    """Let two copies of an optimizer step small tensors, all together and one by one: they must agree."""
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    outcomes = []
    for together in (True, False):
        with torch.random.fork_rng([device.index for device in devices if device.type == "cuda"]):
            torch.manual_seed(0)
            twin = _twin(optimizer)
            try:
                outcomes.append(_stepped(twin, functools.partial(step, twin), together))
            except Exception as error:
                raise ConfigurationError(
                    f"{who}: {type(optimizer).__name__} cannot step parameters one by one: {error}"
                ) from error
    for one, other in zip(*outcomes, strict=True):
        tolerance = 8 * torch.finfo(one.dtype).eps  # some round by chance
        if not torch.allclose(one, other, rtol=tolerance, atol=tolerance):
            raise _not_alone(optimizer, who)


def _twin(optimizer: Any) -> Any:
    """A copy of an optimizer with a fresh state and two small tensors in the place of each group's parameters."""
    twin: Any = object.__new__(type(optimizer))
    own = {key: value for key, value in vars(optimizer).items() if key != "step"}  # a scheduler's calls the original
    twin.__dict__.update(
        {key: value.copy() if isinstance(value, dict | list | set) else value for key, value in own.items()}
    )
    twin.state = defaultdict(dict)
    twin.param_groups = []
    for group in optimizer.param_groups:
        steppable = [p for p in group["params"] if p.is_floating_point()]  # a quantised base is in codes
        chosen = {p: _small(p) for p in steppable[:1] + steppable[1:][-1:]}
        rate = {"lr": 0.1} if "lr" in group else {}
        twin.param_groups.append({**group, "params": [*chosen.values()], **rate})
        for p, small in chosen.items():
            if optimizer.state.get(p):  # some make it before the first step
                twin.state[small] = {key: _cut(value, p) for key, value in optimizer.state[p].items()}
    if callable(getattr(twin, "train", None)):  # schedule-free ones step in that mode alone
        twin.train()
    return twin


def _small(p: Tensor) -> Tensor:
    device = torch.device("cpu") if p.is_meta else p.device  # what is only planned has no values to compare
    like = torch.empty([min(side, _SAMPLE) for side in p.shape], dtype=p.dtype, device=device)
    return torch.nn.Parameter(like.copy_(torch.arange(like.numel()).cos().view(like.shape)))


def _cut(value: Any, p: Tensor) -> Any:
    """A state of a parameter for the small tensor in its place."""
    if not isinstance(value, Tensor):
        return value
    return (value[tuple(slice(_SAMPLE) for _ in p.shape)] if value.shape == p.shape else value).clone()


def _stepped(twin: Any, step: Callable[[], Any], together: bool) -> list[Tensor]:
    """The tensors of a copy after two steps with gradients of very different sizes."""
    places = [(number, p) for number, group in enumerate(twin.param_groups) for p in group["params"]]
    sizes = [10 * (1 + i) ** 3 for i in range(len(places))]
    for _ in range(2):
        gradients = [
            torch.sin(torch.arange(p.numel()) + i).view(p.shape).to(p) * sizes[i] for i, (_, p) in enumerate(places)
        ]
        written: dict[int, dict[str, Any]] = {}
        if together:
            for (_, p), gradient in zip(places, gradients, strict=True):
                p.grad = gradient
            step()
        for (number, p), gradient in () if together else reversed([*zip(places, gradients, strict=True)]):
            p.grad = gradient
            written[number] = step_alone(twin, step, number, p)
            p.grad = None
        for number, values in written.items():
            twin.param_groups[number].update(values)
    return [p.detach() for _, p in places]
