import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.internals.leaning import leans_on


@leans_on(
    "torch", "checkpoint.CheckpointFunction and checkpoint._checkpoint_without_reentrant_generator", "torch_checkpoint"
)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_is_under_a_checkpoint_runs_once_and_is_named(use_reentrant):
    from lit_efficient.internals.torch_checkpoint import without_recomputation

    calls = []

    def squared(x):
        calls.append(1)
        return x * x

    x = torch.ones(2, requires_grad=True)
    with without_recomputation() as seen:
        checkpoint(squared, x, use_reentrant=use_reentrant).sum().backward()
    assert len(calls) == 1
    assert "squared" in seen[0]
    assert x.grad.tolist() == [2.0, 2.0]
    checkpoint(squared, x, use_reentrant=use_reentrant).sum().backward()
    assert len(calls) == 3  # as before


@leans_on(
    "torch",
    "_CachedTorchDispatchMode and _CachingTorchDispatchMode of checkpoint, "
    "_python_dispatch._get_current_dispatch_mode_stack",
    "torch_checkpoint",
)
def test_selective_checkpointing_is_seen_in_both_passes():
    from lit_efficient.internals.torch_checkpoint import caches_results

    seen = []

    def product(x):
        seen.append(caches_results())
        return (x @ x).sin()

    x = torch.ones(2, 2, requires_grad=True)
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    checkpoint(product, x, use_reentrant=False, context_fn=contexts).sum().backward()
    checkpoint(product, x, use_reentrant=False).sum().backward()
    assert seen == [True, True, False, False]
