"""Liger's kernel in the chunked cross-entropy. Nightly lets Triton interpret it, under `TRITON_INTERPRET=1`.

The interpreter has no tanh: the softcap's variant is tried on a GPU alone, in `tests/callbacks`.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch

from lit_efficient import ChunkedCrossEntropy, ConfigurationError, GPTConfig, LanguageModeling, LoRA
from lit_efficient.application import apply
from lit_efficient.losses import chunked_cross_entropy as chunked
from lit_efficient.losses import liger_cross_entropy as liger
from lit_efficient.losses.chunked_cross_entropy import TokenLoss, chunked_cross_entropy, takes_liger
from tests.losses.test_chunked_cross_entropy import SETTINGS, dense, gradients, tensors

CPU = torch.device("cpu")
lacking = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or not liger.installed(), reason="nightly installs and interprets it"
)


def interpreted(test: Any) -> Any:
    return pytest.mark.nightly(lacking(test))


def test_what_cannot_be_liger_s_says_why_and_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    liger.why_not.cache_clear()
    assert not takes_liger("auto", CPU, torch.float32, TokenLoss())
    with pytest.raises(ConfigurationError, match="kernel runs on GPUs, not on cpu; use auto or torch"):
        takes_liger("liger", CPU, torch.float32, TokenLoss())
    assert "does not support torch.float64" in liger.why_not(torch.device("cuda"), torch.float64, TokenLoss())
    monkeypatch.setattr(liger, "installed", lambda: False)
    assert liger.why_not(torch.device("cuda"), torch.float32, TokenLoss()) == "liger-kernel is not installed"
    liger.why_not.cache_clear()


@pytest.mark.parametrize("wrong", ["losses", "gradients", None])
def test_a_kernel_with_other_numbers_is_not_taken(wrong: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def consume(terms: TokenLoss, logits: Any, labels: Any, scale: Any, *, gradients: bool) -> Any:
        assert gradients
        losses = torch.zeros(len(logits))
        kept = labels != terms.ignore_index
        made = logits[kept]
        losses[kept] = terms.consume(made, labels[kept], torch.ones(len(made)))
        logits.zero_()
        logits[kept] = made if wrong != "gradients" else made * 1.1
        return losses if wrong != "losses" else losses + 0.1

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(liger, "installed", lambda: True)
    monkeypatch.setattr(liger, "consume", consume)
    liger.why_not.cache_clear()
    reason = liger.why_not(CPU, torch.float32, TokenLoss(label_smoothing=0.1, z_loss=0.01))
    liger.why_not.cache_clear()
    assert ("fails here: AssertionError: Tensor-likes are not close" in reason) is (wrong is not None)
    assert reason or wrong is None


@interpreted
@pytest.mark.parametrize("whole", [False, True], ids=["cpu", "as on a gpu"])
@pytest.mark.parametrize("name", ["plain", "smoothing", "z_loss", "scale", "ignore_index"])
def test_equals_the_dense_loss_and_its_gradients(name: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, per-token weights and gradients that are not alike: none may be mixed before it is weighed."""
    monkeypatch.setattr(chunked, "computes_ignored", lambda device: whole)
    hidden, weight, labels, bias = tensors()
    labels = (labels.where(labels != -100, 5) if name == "ignore_index" else labels)[:11]
    hidden = hidden[:11].detach().requires_grad_()
    token_weights = torch.linspace(0.2, 1, 11, dtype=torch.float64)
    upstream = torch.linspace(0.5, 2, 11, dtype=torch.float64)
    narrow = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight, bias)]
    for weights in (None, token_weights):
        for reduction, slope in (("none", upstream), ("sum", torch.tensor(0.7))):
            expected = dense(hidden, weight, labels, bias, token_weights=weights, reduction=reduction, **SETTINGS[name])
            found = chunked_cross_entropy(
                narrow[0], narrow[1], labels, narrow[2], chunk_size=4, token_weights=weights, reduction=reduction,
                backend="liger", **SETTINGS[name],
            )  # fmt: skip
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
            theirs = gradients((expected * slope).sum(), hidden, weight, bias)
            for ours, other in zip(gradients((found * slope.float()).sum(), *narrow), theirs, strict=True):
                torch.testing.assert_close(ours.double(), other, rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize("adapt", [[], [LoRA(rank=2, targets=["head"])]], ids=["plain", "lora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_takes_it_under_language_modeling(adapt: Any, dtype: torch.dtype, monkeypatch: Any) -> None:
    calls: list[int] = []
    own = liger.consume
    monkeypatch.setattr(liger, "consume", lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs))
    torch.manual_seed(0)
    task = LanguageModeling(GPTConfig(vocab_size=40, dim=16, depth=1, num_heads=2, max_length=8))
    task.configure_model()
    task.to(dtype)
    apply(task, adapt)
    task.log = lambda *_, **__: None  # type: ignore[method-assign]
    fused = copy.deepcopy(task)
    report = apply(fused, [ChunkedCrossEntropy(chunk_size=5)])["ChunkedCrossEntropy"]
    assert report.summary.endswith("liger")
    ids = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.where(ids > 4, -100)}
    outputs = [one.training_step(batch, 0) for one in (task, fused)]
    for output in outputs:
        (output["loss"] + output["sample_loss"].square().sum()).backward()
    assert calls
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    for key in ("loss", "sample_loss"):
        torch.testing.assert_close(outputs[1][key], outputs[0][key], **close)
    for ours, theirs in zip(fused.parameters(), task.parameters(), strict=True):
        assert (ours.grad is None) is (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, **close)
