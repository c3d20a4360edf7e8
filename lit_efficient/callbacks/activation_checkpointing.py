"""Activation checkpointing: keep a block's input instead of its activations, and compute them again for the backward.

    kept = sum of inputs + what is chosen within;    a gradient costs one more forward of what was thrown away

Saves: the activations of the recomputed blocks, all but their inputs
Costs: one more forward of each recomputed block; selective saving and budgets lie between
Source: Chen et al. (2016), https://arxiv.org/abs/1604.06174; by operator: Korthikanti et al. (2022), https://arxiv.org/abs/2205.05198

Gradients are those of the plain network bit by bit: random numbers are drawn again from the same state, and running
statistics of normalisation layers move once. Compiled blocks are recomputed by the compiler.
"""

from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, ConflictError, check_number, refusal
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_compiler import swap_setting
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.mechanisms.blocks.recomputation import OPERATORS, choose_kept, recompute, refuse_twice
from lit_efficient.mechanisms.blocks.residual import without_cache
from lit_efficient.mechanisms.trials.memory import SavedTensors, format_bytes
from lit_efficient.surgery import mix_in, unmixed
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class _Recomputed(nn.Module):
    """Mix-in of a block. All blocks leave the cache of keys and values out in training, recomputed or not."""

    _recomputes: bool
    _recompute_save: tuple[str, ...]
    _recompute_budget: float | None  # given to the compiler where there is one, which then chooses within the block
    _recompute_bytes: int | None  # None: nothing is to be counted

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward
        if not torch.is_grad_enabled() or (not self.training and _caches(args, kwargs)):
            return forward(*args, **kwargs)
        args, kwargs = without_cache(args), without_cache(kwargs)
        if self._recompute_budget is not None and torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        if not self._recomputes:
            return forward(*args, **kwargs)
        if self._recompute_bytes is None:
            return recompute(self, forward, *args, save=self._recompute_save, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        counter = SavedTensors([*self.parameters(), *self.buffers(), *given])
        output = recompute(self, forward, *args, counter=counter, **kwargs)
        self._recompute_bytes += counter.bytes
        return output


def _caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(callable(getattr(value, "get_seq_length", None)) for value in (*args, *kwargs.values()))


class ActivationCheckpointing(Technique):
    """Recompute the activations of a network's repeated blocks in the backward pass instead of keeping them.

    Where no gradient is recorded, in evaluation and sampling, nothing changes; checkpoints are as without it.

    Args:
        every: Recompute the first of every ``every`` blocks, at least 1: 1 is all of them, 2 every second one.
        save: Kinds of operators whose results are kept within a block, any of ``matmul``, ``attention`` and
            ``convolution``: most of the time is in these, and most of the bytes are not.
        memory_budget: Share of the blocks' activations that may be kept, from 0 (recompute all) to 1 (none). Without a
            compiler the first batch is measured, and whole blocks are chosen; under ``Compile`` torch's compiler
            chooses operators within each block (``torch._functorch.config.activation_memory_budget``).
        blocks: ``auto`` finds repeated blocks, in a UNet the residual and attention blocks of each level; otherwise
            regular expressions for dotted names.

    Raises:
        ConfigurationError: For an argument out of range, without such blocks, or where the model recomputes already.
        ConflictError: For a strategy that recomputes already, and beside what must see the activations more often.
    """

    phase = Phase.RECOMPUTE
    traits = frozenset({Trait.AFTER_SHARDING, Trait.RECOMPUTES, Trait.REFUSES_EARLY, Trait.TRAINING_ONLY})
    computes: ClassVar[str] = "same"
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (2, "activations of the blocks, for about a third more time")
    }

    def __init__(
        self,
        every: int = 1,
        save: list[str] | None = None,
        memory_budget: float | None = None,
        blocks: str | list[str] = "auto",
    ) -> None:
        super().__init__()
        check_number("ActivationCheckpointing", "every", every, least=1, whole=True)
        if save is not None and (not save or any(kind not in OPERATORS for kind in save)):
            raise refusal("ActivationCheckpointing", "save", f"some of {', '.join(OPERATORS)} or null", save)
        check_number("ActivationCheckpointing", "memory_budget", memory_budget, least=0, most=1, null=True)
        if memory_budget is not None and (every > 1 or save):
            raise ConfigurationError(
                "ActivationCheckpointing: memory_budget chooses by itself what is kept, and goes with neither every "
                f"nor save, got every={every}, save={save}"
            )
        self.every = every
        self.save = save
        self.memory_budget = memory_budget
        self.blocks = blocks
        self._budget_before: float | None = None

    def check(self, trainer: Any, module: Any) -> None:
        if traits_of(trainer.strategy).recomputes:
            raise ConflictError(
                "ActivationCheckpointing: this strategy recomputes activations by itself: build it without "
                "activation_checkpointing_policy"
            )

    def transform(self, module: nn.Module) -> Report:
        # Of a UNet only the transformer blocks are declared: most of the bytes would stay.
        found = find_blocks(module, self.blocks, who=type(self).__name__, declared=False)
        if self.every > len(found):
            allowed = f"at most the number of blocks, {len(found)}"
            raise refusal("ActivationCheckpointing", "every", allowed, self.every)
        refuse_twice(module, [name for name, _ in found], type(self).__name__)
        for i, (_, block) in enumerate(found):
            state = {"_recomputes": i % self.every == 0, "_recompute_save": tuple(self.save or ())}
            mix_in(block, _Recomputed, **state, _recompute_budget=self.memory_budget, _recompute_bytes=None)
        chosen = [(name, block) for i, (name, block) in enumerate(found) if i % self.every == 0]
        kinds = ", ".join(sorted({unmixed(block).__name__ for _, block in chosen}))
        saved = f", which keep their {' and '.join(self.save)} results" if self.save else ""
        if self.memory_budget is not None:
            saved = f", as few as keep {self.memory_budget:.0%} of their activations: chosen in the first batch"
        return Report(
            f"{len(chosen)} of {len(found)} blocks ({kinds}) are recomputed{saved}",
            modules=tuple(name for name, _ in chosen),
            details={"blocks": len(found)},
        )

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Tell torch's compiler the budget for this fit, which it reads when it compiles the first step."""
        super().on_fit_start(trainer, pl_module)
        recomputed = [name for name, part in pl_module.named_modules() if isinstance(part, _Recomputed)]
        refuse_twice(pl_module, recomputed, type(self).__name__)
        if self.memory_budget is not None:
            self._budget_before = swap_setting("activation_memory_budget", self.memory_budget)
            for block in _recomputed(pl_module):
                block._recomputes, block._recompute_bytes = True, 0

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        blocks = {name: part for name, part in pl_module.named_modules() if isinstance(part, _Recomputed)}
        if self.memory_budget is None or all(block._recompute_bytes is None for block in blocks.values()):
            return
        sizes = trainer.strategy.broadcast([block._recompute_bytes or 0 for block in blocks.values()])  # ranks agree
        for block, keeps in zip(blocks.values(), choose_kept(sizes, self.memory_budget), strict=True):
            block._recomputes, block._recompute_bytes = not keeps, None
        kept = [name for name, block in blocks.items() if not block._recomputes]
        if sum(sizes):  # else all of them are compiled
            bytes_kept = sum(size for size, block in zip(sizes, blocks.values(), strict=True) if not block._recomputes)
            share, names = f"{bytes_kept / sum(sizes):.0%} of {format_bytes(sum(sizes))}", ", ".join(kept) or "none"
            rank_zero_info(
                f"ActivationCheckpointing: {len(kept)} of {len(blocks)} blocks keep their activations, {share} in the "
                f"first batch: {names}"
            )

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        if self._budget_before is not None:
            swap_setting("activation_memory_budget", self._budget_before)
            self._budget_before = None

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)
        super().on_exception(trainer, pl_module, exception)


def _recomputed(root: nn.Module) -> list[_Recomputed]:
    return [part for part in root.modules() if isinstance(part, _Recomputed)]
