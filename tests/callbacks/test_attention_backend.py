"""AttentionBackend: the named kernel runs, everywhere in the run, or the run stops with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lit_efficient
from lit_efficient import ActivationCheckpointing, AttentionBackend, CausalLMConfig, ConfigurationError, ConflictError
from lit_efficient.application import apply
from lit_efficient.callbacks.attention_backend import Kernels, switch_kernels, try_kernel
from lit_efficient.models.libraries.causal_lm import build
from lit_efficient.testing import Run
from tests.contract.row import Row
from tests.models.libraries.test_causal_lm import SMALL
from tests.support import AttentionNet, Net, Toy, data, trainer


class Attending(lit_efficient.AttentionBackend):
    """Beside whatever toy, some attention in each step: most have none."""

    @contextmanager
    def step(self, module: nn.Module, training: bool) -> Iterator[None]:
        with super().step(module, training):
            x = torch.zeros(1, 1, 2, 4)
            F.scaled_dot_product_attention(x, x, x)
            yield


Attending.__name__ = "AttentionBackend"


def goes_through_one_kernel(run: Run) -> None:
    technique: Any = run.technique("AttentionBackend")
    assert set(technique.ran) <= {"flash"}  # empty where the network is compiled
    assert technique.ran or run.technique("Compile") is not None
    assert torch.backends.cuda.math_sdp_enabled()  # as before the run


ROW = Row(lambda: Attending("flash"), goes_through_one_kernel, lambda: Attending("flash"), changes=False)


class Watch(L.Callback):
    """Counts kernels over whole batches, backward passes included."""

    def __init__(self) -> None:
        self.modes: dict[str, Kernels] = {}

    def _enter(self, name: str) -> None:
        self.modes[name] = Kernels()
        self.modes[name].__enter__()

    def _leave(self, name: str) -> None:
        self.modes[name].__exit__(None, None, None)

    def on_train_batch_start(self, *_: Any) -> None:
        self._enter("training")

    def on_train_batch_end(self, *_: Any) -> None:
        self._leave("training")

    def on_validation_batch_start(self, *_: Any) -> None:
        self._enter("validation")

    def on_validation_batch_end(self, *_: Any) -> None:
        self._leave("validation")


@pytest.mark.parametrize("backend", ["flash", "math"])
def test_training_recomputation_and_validation_take_the_same_kernel(backend: str) -> None:
    watch, technique = Watch(), AttentionBackend(backend)  # type: ignore[arg-type]
    runner = trainer([watch, technique, ActivationCheckpointing()], limit_train_batches=1, limit_val_batches=1)
    runner.fit(Toy(network=AttentionNet), data(), data(4))
    assert technique.ran == {backend: 4}
    assert watch.modes["training"].counts == {backend: 8}  # four blocks, and each once more in the backward pass
    assert watch.modes["validation"].counts == {backend: 4}
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.math_sdp_enabled()


@pytest.mark.parametrize("backend", ["efficient", "cudnn", "flex"])
def test_what_a_cpu_has_not_is_refused_before_the_run(backend: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"'{backend}' cannot run on 'cpu' .*: (No viable|FlexAttention has)"):
        trainer([AttentionBackend(backend)]).fit(Toy(network=AttentionNet), data(), data(4))
    assert torch.backends.cuda.math_sdp_enabled()


class Dropped(Net):
    """Attention with dropout, which the CPU's flash kernel does not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x[:, None, :, None]
        return super().forward(x) + F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)[:, 0, :, 0]


@pytest.mark.filterwarnings("ignore:.*Flash attention kernel", "ignore:Both fused kernels")
def test_a_step_that_the_kernel_does_not_take_is_refused_and_the_others_are_there_again() -> None:
    with pytest.raises(
        ConfigurationError, match=r"'flash' does not support the arguments with which Toy calls attention.*dropout"
    ):
        trainer([AttentionBackend("flash")]).fit(Toy(network=Dropped), data(), data(4))
    assert torch.backends.cuda.math_sdp_enabled()
    with pytest.raises(ConfigurationError, match="no attention ran in Toy"):
        trainer([AttentionBackend("flash")]).fit(Toy(), data(), data(4))


def test_the_trial_of_a_kernel_gives_torchs_reason_and_leaves_the_switches() -> None:
    cpu = torch.device("cpu")
    before = switch_kernels({"flash": False})
    try:
        assert try_kernel("flash", cpu, torch.float32) == ""
        assert "No viable backend" in try_kernel("cudnn", cpu, torch.bfloat16)
        assert not torch.backends.cuda.flash_sdp_enabled()
    finally:
        switch_kernels(before)


class Holder(nn.Module):
    """What a module is that builds its network from a configuration."""

    def __init__(self, attention: str | None, family: str = "llama") -> None:
        super().__init__()
        self.model = CausalLMConfig(config_fields={**SMALL, "model_type": family}, attention=attention)
        self.network = build(self.model)


def test_models_of_transformers_are_set_to_it_and_a_second_name_for_the_kernel_is_refused() -> None:
    holder = Holder("eager")
    apply(holder, [AttentionBackend("math")])
    assert holder.network.config._attn_implementation == "sdpa"
    with Kernels() as kernels:
        holder.network(input_ids=torch.zeros(1, 3, dtype=torch.long))
    assert set(kernels.counts) <= {"flash", "math"}
    assert kernels.counts
    runner = trainer([])
    with pytest.raises(ConflictError, match=r"'math', but model\.attention='eager' names another"):
        AttentionBackend("math").check(runner, holder)
    holder.model = CausalLMConfig(config_fields={**SMALL, "model_type": "llama"}, attention="sdpa")
    AttentionBackend("math").check(runner, holder)
    with pytest.raises(ConfigurationError, match="has no sdpa for backend='flash': "):
        apply(Holder(None, "gpt_oss"), [AttentionBackend("flash")])
    with pytest.raises(ConfigurationError, match="'flex' is for models of transformers, and Net has none"):
        apply(Net(), [AttentionBackend("flex")])
    with pytest.raises(ConfigurationError, match="backend must be one of flash, efficient"):
        AttentionBackend("fast")  # type: ignore[arg-type]
