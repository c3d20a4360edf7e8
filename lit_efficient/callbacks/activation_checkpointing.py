"""Activation checkpointing: keep only a block's input, and compute its activations again in the backward pass.

    memory = inputs of the blocks + results that are kept within them;    time + one forward pass of what is recomputed

Saves: the activations of the recomputed blocks, except their inputs
Costs: one more forward of each recomputed block; less if some results are kept or a memory budget is set
Source: Chen et al. (2016), https://arxiv.org/abs/1604.06174; by operator: Korthikanti et al. (2022), https://arxiv.org/abs/2205.05198

Gradients equal those of the plain network bit by bit: the recomputation draws the same random numbers, and the running
statistics of normalisation layers are updated once. The compiler recomputes compiled blocks.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report, format_bytes
from lit_efficient.errors import ConfigurationError, ConflictError, check_list, check_number, refusal
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_compiler import swap_setting
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.mechanisms.blocks.recomputation import OPERATORS, choose_kept, recompute, refuse_twice
from lit_efficient.mechanisms.blocks.residual import without_cache
from lit_efficient.mechanisms.trials.memory import SavedTensors
from lit_efficient.surgery import class_names, mix_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class _Recomputed(nn.Module):
    """Mix-in of a block. In training no block keeps a cache of keys and values, recomputed or not."""

    _recomputes: bool
    _recompute_save: tuple[str, ...]
    _recompute_budget: float | None  # passed to the compiler, if the block is compiled: it then chooses operators
    _recompute_bytes: int | None  # bytes that the block saves, while they are measured; else None

    def forward(self, *args: object, **kwargs: Any) -> object:
        forward = super().forward
        if not torch.is_grad_enabled() or (not self.training and _caches(args, kwargs)):
            return forward(*args, **kwargs)
        # A recomputation would append its keys and values to a cache a second time.
        args = without_cache(args)
        kwargs = without_cache(kwargs)
        left_to_compiler = self._recompute_budget is not None and torch.compiler.is_compiling()
        if left_to_compiler or not self._recomputes:
            return forward(*args, **kwargs)
        if self._recompute_bytes is None:
            return recompute(self, forward, *args, save=self._recompute_save, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        counter = SavedTensors([*self.parameters(), *self.buffers(), *given])
        output = recompute(self, forward, *args, counter=counter, **kwargs)
        self._recompute_bytes += counter.bytes
        return output


def _caches(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Return whether an argument is a cache of keys and values."""
    return any(hasattr(value, "get_seq_length") for value in (*args, *kwargs.values()))


class ActivationCheckpointing(Technique):
    """Recompute the activations of a network's repeated blocks in the backward pass instead of keeping them.

    Evaluation and sampling do not change, because they record no gradient. Checkpoints do not change either.

    Args:
        every: Recompute the first of every ``every`` blocks, at least 1. With 1 all blocks are recomputed, with 2 every
            second one.
        save: Kinds of operators whose results are kept within a block: any of ``matmul``, ``attention`` and
            ``convolution``. They take most of the time and hold a small part of the bytes.
        memory_budget: Fraction of the blocks' activations that may be kept, from 0 (recompute all) to 1 (recompute
            none). Without a compiler the first batch is measured, and whole blocks are chosen. With ``Compile`` torch's
            compiler chooses operators within each block (``torch._functorch.config.activation_memory_budget``).
        blocks: ``auto`` finds the repeated blocks, in a UNet the residual and attention blocks of each level. Otherwise
            regular expressions for dotted names.

    Raises:
        ConfigurationError: For an argument out of range, if there are no such blocks, or if the model already
            recomputes activations.
        ConflictError: For a strategy that recomputes activations by itself.
    """

    phase = Phase.RECOMPUTE
    traits = frozenset({Trait.AFTER_SHARDING, Trait.RECOMPUTES, Trait.REFUSES_EARLY, Trait.TRAINING_ONLY})
    computes = "same"
    helps = {"memory": (2, "activations of the blocks, for about a third more time")}

    def __init__(
        self,
        every: int = 1,
        save: list[str] | None = None,
        memory_budget: float | None = None,
        blocks: str | list[str] = "auto",
    ) -> None:
        super().__init__()
        check_number("ActivationCheckpointing", "every", every, least=1, whole=True)
        kinds = f"some of {', '.join(OPERATORS)} or null"
        check_list("ActivationCheckpointing", "save", save, kinds, null=True)
        if any(kind not in OPERATORS for kind in save or ()):
            raise refusal("ActivationCheckpointing", "save", kinds, save)
        check_number("ActivationCheckpointing", "memory_budget", memory_budget, least=0, most=1, null=True)
        if memory_budget is not None and (every > 1 or save):
            raise ConfigurationError(
                "ActivationCheckpointing: memory_budget chooses what is kept, so that every and save have no effect; "
                f"got every={every}, save={save}: leave them out"
            )
        self.every = every
        self.save = save
        self.memory_budget = memory_budget
        self.blocks = blocks
        self._budget_before: float | None = None

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        if traits_of(trainer.strategy).recomputes:
            raise ConflictError(
                "ActivationCheckpointing: this strategy recomputes activations by itself: create it without "
                "activation_checkpointing_policy"
            )

    def transform(self, module: nn.Module) -> Report:
        # A UNet declares only its transformer blocks. Its residual blocks hold most of the bytes.
        found = find_blocks(module, self.blocks, who="ActivationCheckpointing", declared=False)
        if self.every > len(found):
            allowed = f"at most the number of blocks, {len(found)}"
            raise refusal("ActivationCheckpointing", "every", allowed, self.every)
        refuse_twice(module, [name for name, _ in found], "ActivationCheckpointing")
        for i, (_, block) in enumerate(found):
            mix_in(
                block,
                _Recomputed,
                _recomputes=i % self.every == 0,
                _recompute_save=tuple(self.save or ()),
                _recompute_budget=self.memory_budget,
                _recompute_bytes=None,
            )
        chosen = found[:: self.every]
        kinds = class_names(block for _, block in chosen)
        summary = f"{len(chosen)} of {len(found)} blocks ({kinds}) are recomputed"
        if self.save:
            summary += f", except their {' and '.join(self.save)} results"
        if self.memory_budget is not None:
            summary += f" or fewer: the first batch decides, {self.memory_budget:.0%} of the activations may be kept"
        return Report(summary, modules=tuple(name for name, _ in chosen), details={"blocks": len(found)})

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pass the budget to torch's compiler, which reads it when it compiles the first step."""
        super().on_fit_start(trainer, pl_module)
        blocks = _recomputed(pl_module)
        refuse_twice(pl_module, list(blocks), "ActivationCheckpointing")
        if self.memory_budget is not None:
            self._budget_before = swap_setting("activation_memory_budget", self.memory_budget)
            for block in blocks.values():
                block._recomputes = True
                block._recompute_bytes = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Choose the blocks that keep their activations, from the sizes measured in the first batch."""
        blocks = _recomputed(pl_module)
        if self.memory_budget is None or all(block._recompute_bytes is None for block in blocks.values()):
            return
        # Ranks may measure different sizes, but must choose the same blocks.
        sizes = trainer.strategy.broadcast([block._recompute_bytes or 0 for block in blocks.values()])
        kept: list[str] = []
        bytes_kept = 0
        keeps = choose_kept(sizes, self.memory_budget)
        for (name, block), size, keep in zip(blocks.items(), sizes, keeps, strict=True):
            block._recomputes = not keep
            block._recompute_bytes = None
            if keep:
                kept.append(name)
                bytes_kept += size
        total = sum(sizes)
        if total:  # 0 if all blocks are compiled
            rank_zero_info(
                f"ActivationCheckpointing: {len(kept)} of {len(blocks)} blocks keep their activations, "
                f"{bytes_kept / total:.0%} of {format_bytes(total)} in the first batch: {', '.join(kept) or 'none'}"
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._budget_before is not None:
            swap_setting("activation_memory_budget", self._budget_before)
            self._budget_before = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)
        super().on_exception(trainer, pl_module, exception)


def _recomputed(root: nn.Module) -> dict[str, _Recomputed]:
    return {name: part for name, part in root.named_modules() if isinstance(part, _Recomputed)}
