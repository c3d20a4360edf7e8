"""With a GPU in the machine the tests still run on the CPU."""

from __future__ import annotations

import os

from lit_efficient.testing import Toy, data, trainer
from tests.cuda.fake_cuda import fake_cuda, on_cuda


def test_a_gpu_that_is_not_used_is_no_error() -> None:
    """Lightning warns of it, and warnings are errors here."""
    module = Toy()
    with fake_cuda():
        trainer().fit(module, data(), data())
        assert not any(on_cuda(p) for p in module.parameters())


def test_trainers_that_name_no_accelerator_see_none() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
