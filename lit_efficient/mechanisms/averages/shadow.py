"""Base class of techniques that keep a second set of weights for evaluation, such as a moving average.

The second set is copied into the module before each validation, test and prediction. The raw weights are put back
afterwards, and after an exception anywhere. Only parameters are exchanged, buffers stay. Where both sets have the same
dtype, their contents change places tensor by tensor, so that there is no third copy. Code that writes to the module's
weights in between would change the average: after an evaluation by Lightning it is an error.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lit_efficient.application.checkpoints import CheckpointHooks
from lit_efficient.declaration import Phase
from lit_efficient.internals.torch_shards import is_sharded, local, reshard
from lit_efficient.mechanisms.averages.weights import check_unchanged, fingerprint, placed_like, whole
from lit_efficient.technique import Technique


def outside_autograd(method: Callable[..., object]) -> Callable[..., Any]:
    """Decorator that disables gradients and inference mode for a method.

    Tensors that are created in inference mode could never be updated in place again.
    """

    @wraps(method)
    def run(*args: object, **kwargs: object) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return run


class ShadowWeights(CheckpointHooks, Technique):
    """Base of techniques that evaluate with other weights than they train, which :meth:`average` returns."""

    phase = Phase.AVERAGE
    label: ClassVar[str] = "average"  # recorded in weights-only checkpoints that hold the average

    def __init__(self) -> None:
        super().__init__()
        # The module's raw weights while the average is in the module, else None.
        self._raw: dict[str, Tensor] | None = None
        # The dictionary that holds the average. While the average is in the module, its tensors hold the raw weights.
        self._held: dict[str, Tensor] = {}
        # Fingerprint of the average, from its way into the module on.
        self._evaluated: list[float] = []
        # id() of the module whose average is kept: another module must not get it.
        self._module: int | None = None

    def average(self, module: Any) -> Mapping[str, Tensor] | None:
        """Return the weights for evaluation by parameter name, or ``None`` before the first update."""
        raise NotImplementedError

    def shares(self, steps: int) -> list[float] | None:
        """Return the average as a weighted sum: for each optimizer step the share of the weights after that step.

        Args:
            steps: Number of optimizer steps of the run.

        Returns:
            ``steps`` shares that add up to 1, or ``None`` if there is no average or the average is not such a sum.
        """
        return None

    def buffers_for(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the buffers by name that belong to the average and replace those of the state dict ``state``.

        Raises:
            CheckpointError: If these buffers are not known.
        """
        return {}

    def forget(self) -> None:
        """Drop the average, because other weights are about to be loaded or another module will be trained."""
        raise NotImplementedError

    @outside_autograd
    def swap_in(self, module: LightningModule) -> None:
        """Put the average into ``module``. Do nothing if there is no average or if it is in the module already."""
        if self._raw is not None:
            return
        average = self.average(module)
        if average is None:
            return
        reshard(module)
        parameters = dict(module.named_parameters())
        # Parameters that share memory, in whole or in part, are copied before any of them is written.
        storages = {name: local(parameters[name]).untyped_storage().data_ptr() for name in average}
        users = Counter(storages.values())
        self._raw = {}
        for name in average:
            if users[storages[name]] > 1:
                self._raw[name] = placed_like(parameters[name], average[name], parameters[name].dtype)
        # An average() that builds its tensors anew at each call cannot lend their memory to the raw weights.
        self._held = {}
        if isinstance(average, dict) and self.average(module) is average:
            self._held = average
        for name in average:
            self._put_in(self._raw, name, parameters[name], average[name])

    def _put_in(self, raws: dict[str, Tensor], name: str, own: Any, average: Tensor) -> None:
        """Copy the average of one parameter into the module. ``raws`` gets the raw weights."""
        # A checkpoint that is restored during an evaluation gives tensors that cannot be written.
        writable = average.dtype == own.dtype and not average.is_inference()
        exchanged = writable and name in self._held and name not in raws
        if name not in raws:
            raws[name] = placed_like(own, average, own.dtype)
        raw = raws[name]
        local(own).copy_(local(average))
        if exchanged:
            self._held[name] = own
            local(average).copy_(local(raw))
            raws[name] = average

    @outside_autograd
    def swap_out(self, module: nn.Module) -> None:
        """Put the raw weights back, bit for bit.

        If this method or :meth:`swap_in` was interrupted at any point, calling this method again completes the work.
        """
        if self._raw is None:
            return
        reshard(module)
        parameters = dict(module.named_parameters())
        for name in reversed([*self._raw]):
            self._put_back(self._raw, name, parameters[name])
        self._raw = None
        self._held = {}

    def _put_back(self, raws: dict[str, Tensor], name: str, own: Any) -> None:
        """Copy the raw weights of one parameter back into the module, and the average out of it."""
        raw = raws[name]
        held = self._held.get(name)
        # Compared by memory, because the parameter may have been replaced by another one over the same memory.
        exchanged = held is not None and local(held).data_ptr() == local(own).data_ptr()
        if not exchanged:
            local(own).copy_(local(raw))
            del raws[name]
            return
        # Each statement leaves both sets of weights reachable, so that an interruption loses neither.
        average = placed_like(own, raw, own.dtype)
        self._held[name] = average
        local(own).copy_(local(raw))
        del raws[name]
        local(raw).copy_(local(average))
        self._held[name] = raw

    @contextmanager
    def averaged(self, module: nn.Module) -> Iterator[None]:
        """Context in which the module holds the average, for your own code: ``with ema.averaged(module): ...``."""
        self.swap_in(module)
        try:
            yield
        finally:
            self.swap_out(module)

    @contextmanager
    def raw(self, module: nn.Module) -> Iterator[bool]:
        """Context in which the module holds its raw weights, for a comparison with the average during validation.

        Yields:
            Whether the module held the average before. Otherwise the module held its raw weights already.
        """
        swapped = self._raw is not None
        self.swap_out(module)
        try:
            yield swapped
        finally:
            if swapped:
                self.swap_in(module)

    def write_checkpoint(self, checkpoint: dict[str, Any], module: Any) -> None:
        """Put raw weights into full checkpoints and the average into weights-only ones, and record which it is."""
        weights_only = "callbacks" not in checkpoint
        average = self.average(module) if weights_only else None
        if average is None and self._raw is not None:
            put_into_state_dict(checkpoint["state_dict"], self._raw, module)
        elif average is not None and self._raw is None:  # otherwise the average is in the module already
            put_into_state_dict(checkpoint["state_dict"], average, module)
        record = checkpoint.setdefault("lit_efficient", {})
        record["weights"] = "raw" if average is None else self.label

    def read_checkpoint(self, checkpoint: Mapping[str, object], module: nn.Module) -> None:
        self.forget()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop the average if it belongs to another module than ``pl_module``."""
        super().setup(trainer, pl_module, stage)
        if self._module != id(pl_module):
            self.forget()
        self._module = id(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.swap_in(pl_module)
        self._evaluated = fingerprint(self._averaged(pl_module))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._raw is not None:
            check_unchanged(type(self).__name__, self._evaluated, self._averaged(pl_module))
        self.swap_out(pl_module)

    def _averaged(self, module: nn.Module) -> list[Tensor]:
        """Return the module's parameters that hold the average now."""
        if self._raw is None:
            return []
        reshard(module)  # a forward pass leaves some parameters whole
        parameters = dict(module.named_parameters())
        return [parameters[name] for name in self._raw]

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    @outside_autograd
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Say after the first epoch that there is no average yet, if optimizer steps were counted."""
        super().on_train_epoch_end(trainer, pl_module)
        if trainer.current_epoch == 0 and trainer.global_step and self.average(pl_module) is None:
            rank_zero_info(
                f"{type(self).__name__}: no update in the {trainer.global_step} steps of the first epoch; "
                "validation and exports use the raw weights until then"
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.swap_out(pl_module)
        super().teardown(trainer, pl_module, stage)


def put_into_state_dict(state_dict: dict[str, Any], source: Mapping[str, Tensor], module: nn.Module) -> None:
    """Replace the entries of a module's ``state_dict`` by the tensors of ``source``.

    A tied parameter is replaced under all its names. Sharded tensors are gathered, unless the state dict holds shards
    itself. All processes must call this function.
    """
    first_names: dict[int, str] = {}
    tied_names: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first_name = first_names.setdefault(id(parameter), name)
        tied_names.setdefault(first_name, []).append(name)
    holds_shards = any(map(is_sharded, state_dict.values()))
    for name, average in source.items():
        tensor = average if holds_shards else whole(average)
        for key in tied_names[name]:
            # Checkpoints of adapters leave some weights out, and ranks other than 0 leave all out.
            if key in state_dict:
                # Tied names share the converted tensor.
                tensor = tensor.to(state_dict[key].device, state_dict[key].dtype)
                state_dict[key] = tensor
