"""What techniques share that keep a second set of weights: evaluation uses it, training never notices.

The second set is put into the module before each validation, test and prediction, and the raw weights are put back
after it or after an exception anywhere. Only parameters are exchanged: buffers are always those of the module.
Where both have one format their numbers change places, tensor by tensor, and there is no third copy: what is written
into the weights meanwhile, or rounds them, is done to the average.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_efficient.declaration import Phase
from lit_efficient.mechanisms.averages.weights import placed_like, whole
from lit_efficient.surgery import is_sharded, local, reshard
from lit_efficient.technique import Technique


def outside_autograd(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run without gradients, and not in inference mode, whose tensors could never be updated in place again."""

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return run


class ShadowWeights(Technique):
    """Base of techniques that evaluate with other weights than they train. A subclass says which: :meth:`average`."""

    phase = Phase.AVERAGE
    label: ClassVar[str] = "average"  # what a checkpoint of these weights says it holds

    def __init__(self) -> None:
        super().__init__()
        self._raw: dict[str, Tensor] | None = None  # the module's own weights, while the average stands in the module
        self._held: dict[str, Tensor] = {}  # the average, whose memory is the raw weights' meanwhile
        self._module: int | None = None  # whose average it is: another module must not get it

    def average(self, module: Any) -> Mapping[str, Tensor] | None:
        """The weights to evaluate with, by name, or ``None`` while there are none."""
        raise NotImplementedError

    def shares(self, steps: int) -> list[float] | None:
        """The formula of the average after so many optimizer steps of a run: the share of the weights after each step.

        ``None`` while there is no average, or where it is no such sum.
        """
        return None

    def buffers_for(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Buffers that belong to the average, and replace those of ``state``, by name.

        Raises:
            CheckpointError: If they are not known.
        """
        return {}

    def forget(self) -> None:
        """Drop the average: other weights are about to be loaded, or another module is met."""
        raise NotImplementedError

    @outside_autograd
    def swap_in(self, module: Any) -> None:
        """Put the average into ``module``; nothing happens while there is none, or if it stands there already."""
        average = None if self._raw is not None else self.average(module)
        if average is None:
            return
        reshard(module)
        parameters = dict(module.named_parameters())
        places = {name: local(parameters[name]).untyped_storage().data_ptr() for name in average}
        users = Counter(places.values())
        tied = (name for name in average if users[places[name]] > 1)  # as a whole or in part
        self._raw = {n: placed_like(parameters[n], average[n], parameters[n].dtype) for n in tied}
        # What an average() makes anew at each call is not kept for the way back.
        self._held = average if isinstance(average, dict) and self.average(module) is average else {}
        for name in average:
            self._put_in(self._raw, name, parameters[name], average[name])

    def _put_in(self, raws: dict[str, Tensor], name: str, own: Any, average: Tensor) -> None:
        exchanged = name in self._held and name not in raws and average.dtype == own.dtype
        raws[name] = raw = raws[name] if name in raws else placed_like(own, average, own.dtype)
        local(own).copy_(local(average))
        if exchanged:
            self._held[name] = own
            local(average).copy_(local(raw))
            raws[name] = average

    @outside_autograd
    def swap_out(self, module: Any) -> None:
        """Put the raw weights back, bit for bit; whatever interrupts it, or :meth:`swap_in`, it can be done again."""
        if self._raw is None:
            return
        reshard(module)
        parameters = dict(module.named_parameters())
        for name in reversed([*self._raw]):
            self._put_back(self._raw, name, parameters[name])
        self._raw, self._held = None, {}

    def _put_back(self, raws: dict[str, Tensor], name: str, own: Any) -> None:
        raw, held = raws[name], self._held.get(name)
        # By memory: another parameter may have been made of it meanwhile.
        exchanged = held is not None and local(held).data_ptr() == local(own).data_ptr()
        average = placed_like(own, raw, own.dtype) if exchanged else own
        if exchanged:
            self._held[name] = average
        local(own).copy_(local(raw))
        del raws[name]
        if exchanged:
            local(raw).copy_(local(average))
            self._held[name] = raw

    @contextmanager
    def averaged(self, module: Any) -> Iterator[None]:
        """Use the average in your own code: ``with ema.averaged(module): ...``."""
        self.swap_in(module)
        try:
            yield
        finally:
            self.swap_out(module)

    @contextmanager
    def raw(self, module: Any) -> Iterator[bool]:
        """Use the raw weights where the average stands in, as in validation, to see both side by side.

        Yields:
            Whether the average was in the module; if not, the weights were the raw ones already.
        """
        swapped = self._raw is not None
        self.swap_out(module)
        try:
            yield swapped
        finally:
            if swapped:
                self.swap_in(module)

    def write_checkpoint(self, checkpoint: dict[str, Any], module: Any) -> None:
        """Full checkpoints hold raw weights, those of weights alone the average; each says which."""
        alone = "callbacks" not in checkpoint
        average = self.average(module) if alone else None
        source = average if average is not None else self._raw
        if source is not None and (source is self._raw or self._raw is None):  # else the average stands there already
            put_into_state_dict(checkpoint["state_dict"], source, module)
        checkpoint.setdefault("lit_efficient", {})["weights"] = "raw" if average is None else self.label

    def read_checkpoint(self, checkpoint: Mapping[str, Any], module: Any) -> None:
        self.forget()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Meet a module: the average of another one is dropped."""
        super().setup(trainer, pl_module, stage)
        if self._module != id(pl_module):
            self.forget()
        self._module = id(pl_module)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.swap_in(pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.swap_out(pl_module)

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.swap_out(pl_module)
        super().teardown(trainer, pl_module, stage)


def put_into_state_dict(state_dict: dict[str, Any], source: Mapping[str, Tensor], module: nn.Module) -> None:
    """Replace the entries of a module's ``state_dict`` by the tensors of ``source``, under every tied name.

    Sharded tensors are gathered unless the state dict holds shards itself; all processes must call this.
    """
    canonical: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(canonical.setdefault(id(parameter), name), []).append(name)
    sharded = any(map(is_sharded, state_dict.values()))
    for name, average in source.items():
        tensor = average if sharded else whole(average)
        for key in names[name]:
            if key in state_dict:  # adapters-only checkpoints leave some out, other ranks leave all out
                tensor = tensor.to(state_dict[key].device, state_dict[key].dtype)  # once for all that are tied
                state_dict[key] = tensor
