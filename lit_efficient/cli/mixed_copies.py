"""Advice for mixed precision where it costs memory: 16-bit activations are half, but weights get 16-bit copies.

    float32 - mixed  =  bytes of 16-bit activations  -  bytes of 16-bit copies of weights

Autocast casts each weight that a product reads, and the gradient needs the copy: 2 bytes a weight, whatever the batch.
Counted by forward hooks, because hooks on saved tensors exclude ``torch.func``.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lit_efficient.declaration import Phase, techniques_of
from lit_efficient.internals.torch_trees import tree_leaves

_LEAST = 2**26  # bytes: fewer are not worth a warning
_OWN_CHOICE = (Phase.RECOMPUTE, Phase.COMPILE)  # these techniques decide by themselves what is kept
_LOW = (torch.bfloat16, torch.float16)


class MixedPrecisionAdvice(Callback):
    """Warn after the first forward pass if the 16-bit copies of weights take more memory than activations save."""

    def __init__(self) -> None:
        self._context = ExitStack()
        self._copies: MixedCopies | None = None
        self._done = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if self._done:
            return
        self._done = True
        decided = any(technique.phase in _OWN_CHOICE for technique in techniques_of(trainer))
        if str(trainer.precision).endswith("mixed") and pl_module.automatic_optimization and not decided:
            self._copies = MixedCopies()
            self._context.enter_context(self._copies.counting(pl_module))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        copies, self._copies = self._copies, None
        self._context.close()
        if copies is not None and copies.weights > max(copies.activations, _LEAST):
            rank_zero_warn(
                f"precision: {trainer.precision} costs memory at this batch size: it keeps "
                f"{copies.weights / 2**20:.0f} MiB of 16-bit copies of weights and saves "
                f"{copies.activations / 2**20:.0f} MiB of activations. If memory is short, use larger batches or "
                "32-true, or bf16-true with KahanSummation"
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._context.close()


class MixedCopies:
    """Count at most the inputs and outputs of layers with matrices in 16 bits, and at least the weights' copies."""

    def __init__(self) -> None:
        self.weights = 0  # bytes of copies of weights
        self.activations = 0  # bytes of what goes in and comes out

    @contextmanager
    def counting(self, module: nn.Module) -> Iterator[None]:
        """Count inside, where ``module`` computes; each weight counts once, and each memory that lives."""
        seen: set[Tensor] = set()

        def count(part: nn.Module, args: tuple[object, ...], output: object) -> None:
            given = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
            if not any(x.dtype in _LOW for x in given):
                return  # a table of embeddings, or a precision that casts nothing
            own = {p for p in part.parameters(recurse=False) if p.ndim > 1 and p.dtype is torch.float32} - seen
            seen.update(own)
            self.weights += sum(2 * p.numel() for p in own)
            taken = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.is_floating_point()]
            self.activations += sum(2 * x.numel() for x in [*taken, *given] if x.is_floating_point())

        with ExitStack() as hooks:
            for part in module.modules():
                if any(p.ndim > 1 and p.dtype is torch.float32 for p in part.parameters(recurse=False)):
                    hooks.callback(part.register_forward_hook(count).remove)
            yield
