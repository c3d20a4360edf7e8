"""DDP that stores gradients once, averages them in bfloat16, and traverses the graph for unused parameters only once.

    gradient of a bucket on rank r: g_r;    gradient that all n ranks step with: sum_r bf16(g_r / n), summed in bf16

Saves: half of the bytes that ranks exchange in a step; memory of one copy of the gradients, which are views of the
buckets that are sent; the search for parameters without a gradient in each step.
Costs: gradients are rounded to 8 bits of mantissa, and so is each sum of two ranks' gradients (not with `compression:
none`).
Source: Li et al. (2020), PyTorch Distributed, https://arxiv.org/abs/2006.15704.

A static graph means that the same parameters get gradients in each step, by the same operations. Parameters that are
thawed or frozen between two steps, by whatever code, are noticed: the reducer, which does not know the new ones, is
replaced. Techniques that draw in each step which layers run are refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lit_efficient.declaration import techniques_of
from lit_efficient.distributed.reducing import renew_reducer
from lit_efficient.errors import ChecksTypes, ConflictError, check_number, refusal
from lit_efficient.internals.lightning_strategies import forget_first_backward
from lit_efficient.traits import Trait

_COMPRESSIONS = ("bf16", "none")


def reduce_in_bfloat16(state: object, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """Communication hook of DistributedDataParallel that averages the gradients of all ranks in bfloat16.

    Torch's own hook refuses backends other than NCCL and XCCL by name.

    Args:
        state: Not used.
        bucket: Gradients, flat; they are replaced by the mean.
    """
    own = bucket.buffer()
    sent = (own / distributed.get_world_size()).bfloat16()
    reduced = distributed.all_reduce(sent, async_op=True).get_future()
    return reduced.then(lambda done: own.copy_(done.value()[0]))


class ReplicatedStrategy(ChecksTypes, DDPStrategy):
    """Lightning's DDP with gradients as views of the buckets, bfloat16 between ranks and a static graph.

    Args:
        compression: Number format in which gradients are sent: ``bf16``, or ``none`` for their own.
        static_graph: Whether the same parameters get gradients in each step, by the same operations. ``False`` for a
            module that decides in each step which layers run.
        bucket_mb: MiB of gradients that are sent together, above 0.
        process_group_backend: ``null``: chosen by the device.
        timeout: Maximum time that processes wait for each other.

    Raises:
        ConfigurationError: For an argument out of range.
        ConflictError: With a technique that draws in each step which layers run, while the graph is static.
    """

    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "speed": (13, "several devices: half the bytes between them, gradients rounded to bfloat16"),
        "memory": (14, "several devices that hold all of the model: one copy of the gradients less than plain DDP"),
    }

    gradients_are_views = True  # gradients are views of DDP's buckets

    def __init__(
        self,
        compression: str = "bf16",
        static_graph: bool = True,
        bucket_mb: float = 25.0,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        if compression not in _COMPRESSIONS:
            raise refusal("ReplicatedStrategy", "compression", " or ".join(_COMPRESSIONS), compression)
        check_number("ReplicatedStrategy", "bucket_mb", bucket_mb, above=0)
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timeout,
            static_graph=static_graph,
            gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_mb,
        )
        self.compression = compression
        self.static_graph = static_graph
        self.bucket_mb = bucket_mb
        self._reduced: list[nn.Parameter] = []  # parameters that required a gradient when the reducer was created
        self._traced = False  # whether the reducer has recorded the graph
        self._accumulates = False  # whether this batch is not the last of its window

    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        self.check_network(self.lightning_module, trainer.world_size)
        super().setup(trainer)

    def check_network(self, module: LightningModule, world: int) -> None:
        """Refuse a static graph with a technique that draws in each step which layers run."""
        drawing = [type(one).__name__ for one in techniques_of(module.trainer) if Trait.DRAWS_WORK in one.traits]
        if self.static_graph and drawing:
            raise ConflictError(
                f"ReplicatedStrategy: {drawing[0]} draws in each step which layers run, and static_graph=True promises "
                "the same in each step: set static_graph to false"
            )

    def configure_ddp(self) -> None:
        super().configure_ddp()
        forget_first_backward(self)
        self._reduced = self._trained()
        self._traced = False
        self.model.register_comm_hook(None, self._reduce)  # type: ignore[union-attr, operator]

    def _reduce(self, state: object, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
        """Return the mean over all ranks, or within an accumulation window the rank's own gradients."""
        if self._accumulates:
            own: torch.futures.Future[Tensor] = torch.futures.Future()
            own.set_result(bucket.buffer())
            return own
        if self.compression == "bf16":
            return reduce_in_bfloat16(state, bucket)
        group = distributed.group.WORLD
        assert group is not None
        return allreduce_hook(group, bucket)

    def training_step(self, *args: object, **kwargs: object) -> Any:
        """Replace the reducer first if the trained parameters have changed since it was created."""
        now = self._trained()
        if len(now) != len(self._reduced) or any(one is not other for one, other in zip(now, self._reduced)):
            renew_reducer(self)
        self._traced = True
        return super().training_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep gradients on their rank until the window's last batch.

        The reducer must run once with a static graph before it can be skipped, and then sends nothing. If it averaged,
        the first window after a start would be rounded differently from all others, and a resumed run would end
        elsewhere.
        """
        self._accumulates = True
        try:
            with super().block_backward_sync() if self._traced or not self.static_graph else nullcontext():
                yield
        finally:
            self._accumulates = False

    def _trained(self) -> list[nn.Parameter]:
        assert self.lightning_module is not None
        return [parameter for parameter in self.lightning_module.parameters() if parameter.requires_grad]
