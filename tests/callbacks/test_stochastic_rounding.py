"""StochasticRounding: unbiased, small steps of every optimizer survive, draws follow the step, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchao.optim.quant_utils import _fp32_to_bf16_sr

from lit_efficient import (
    EMA,
    ConfigurationError,
    ConflictError,
    FusedAdamW,
    GroupedAdafactor,
    KahanSummation,
    Lion,
    MuonAdamW,
    StochasticRounding,
    round_stochastically,
    step_in_float32,
)
from lit_efficient.mechanisms.trials.memory import AllocationMeter
from lit_efficient.optimizers.host_states import stream_states
from lit_efficient.optimizers.low_bit import to_low_bit
from tests.callbacks.float32_steps import RATE, exact, small_steps_survive, walked
from tests.contract.row import Row
from tests.support import Toy, assert_equal, data, trainer, weights

ROW = Row(StochasticRounding, small_steps_survive, bfloat16=True)

MAKERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, RATE, weight_decay=0.0),
    "FusedAdamW": lambda p: FusedAdamW(p, RATE, weight_decay=0.0),
    "Lion": lambda p: Lion(p, RATE),
    "SGD": lambda p: torch.optim.SGD(p, RATE),
    "GroupedAdafactor": lambda p: GroupedAdafactor(p, RATE),
    "NAdam": lambda p: torch.optim.NAdam(p, RATE),
}


@pytest.fixture(autouse=True)
def _torchao_uncompiled() -> Any:
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


# The pure function


def test_the_mean_over_draws_is_the_value() -> None:
    """Both neighbours, each as often as it is near; as torchao's, which draws from the global generator."""
    values = torch.tensor([1.0, 1.001, -0.3334, 3.1e-5, -7.77e20, 0.0])
    many = values.repeat(40_000, 1)
    ours = round_stochastically(many, torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    for rounded in (ours, _fp32_to_bf16_sr(many)):
        assert rounded.dtype is torch.bfloat16
        assert all(len(set(column.tolist())) <= 2 for column in rounded.T)
        ulp = values.abs() * 2**-7
        assert ((rounded.double().mean(0) - values).abs() <= ulp / 40_000**0.5 * 4).all()
    assert torch.equal(ours[:, 0], torch.ones(40_000, dtype=torch.bfloat16))  # what bfloat16 has stays


def test_what_is_not_finite_stays_as_it_is() -> None:
    """A GPU's NaN is 0x7fffffff: noise added to its bits would make a small number of it."""
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001, 0x7F800000, -0x800000], dtype=torch.int32)
    for _ in range(20):
        rounded = round_stochastically(bits.view(torch.float32))
        assert rounded.isnan().tolist() == [True] * 4 + [False] * 2
        assert rounded[4:].tolist() == [float("inf"), -float("inf")]


# The step


def test_a_step_takes_the_memory_of_float32_copies_and_little_more() -> None:
    """Of a table of embeddings, the largest parameter: weight, gradient and two moments; draws are made in pieces."""
    size = 2**24
    p = nn.Parameter(torch.zeros(size, dtype=torch.bfloat16))
    optimizer = FusedAdamW([p], RATE)
    step_in_float32(optimizer, compensated=False)
    for _ in range(2):
        p.grad = torch.ones_like(p)
        with AllocationMeter() as meter:
            optimizer.step()
    assert meter.peak / size < 16 + 5


@pytest.mark.parametrize("name", MAKERS)
def test_small_steps_of_any_optimizer_survive(name: str) -> None:
    plain, _ = walked(MAKERS[name])
    ours, optimizer = walked(MAKERS[name], lambda o: step_in_float32(o, compensated=False))
    assert torch.equal(plain, torch.ones_like(plain))
    assert ours.double().mean().item() == pytest.approx(0.95, abs=0.004)  # 128 elements; half a digit is 0.002 of each
    types = {key: value.dtype for key, value in optimizer.state[optimizer.param_groups[0]["params"][0]].items()}
    assert all(kind is torch.bfloat16 for key, kind in types.items() if key != "step")  # no byte more than without


@pytest.mark.parametrize(("bits", "backend"), [(8, "bitsandbytes"), (8, "torchao"), (4, "torchao")])
@pytest.mark.parametrize("compensated", [False, True])
def test_low_bit_states_stay_what_they_are(bits: Any, backend: str, compensated: bool) -> None:
    def arrange(optimizer: Any) -> None:
        to_low_bit(optimizer, bits, backend, min_size=0)
        step_in_float32(optimizer, compensated=compensated)

    _, optimizer = walked(MAKERS["AdamW"], arrange, steps=50, shape=(32, 256))
    (owner,) = optimizer.param_groups[0]["params"]
    assert exact(optimizer, owner).mean().item() == pytest.approx(0.995, abs=1e-4)
    assert list(optimizer.state) == [owner]  # no stand-in of it is held
    state = optimizer.state[owner]
    assert {state[k].dtype for k in state if "avg" in k or k in ("state1", "state2")} <= {torch.uint8, torch.bfloat16}
    codes = [getattr(v, "codes", v) for k, v in state.items() if k in ("state1", "state2", "exp_avg", "exp_avg_sq")]
    assert all(code.dtype is torch.uint8 for code in codes)


def test_what_an_optimizer_says_of_some_parameters_holds_for_what_stands_for_them() -> None:
    p, q = (nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for size in (512, 4096))
    optimizer = torch.optim.AdamW([p, q], 0.1, weight_decay=0.5)
    to_low_bit(optimizer, 8, "bitsandbytes", min_size=0, keep_32bit={p})
    optimizer.no_decay = {q}
    step_in_float32(optimizer, compensated=True)
    p.grad, q.grad = torch.zeros_like(p), torch.zeros_like(q)
    optimizer.step()
    assert optimizer.state[p]["state1"].dtype is torch.float32
    assert optimizer.state[q]["state1"].dtype is torch.uint8
    assert exact(optimizer, p).mean().item() == pytest.approx(0.95, abs=1e-5)
    assert exact(optimizer, q).mean().item() == 1.0


def test_the_second_moment_of_many_gradients_is_their_mean_square() -> None:
    """To nearest it only ever rises: at 0.999 no bfloat16 decays. Beside it an exact loop in float64."""
    torch.manual_seed(0)
    p, q = (nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16)) for _ in range(2))
    plain, ours = (torch.optim.AdamW([x], 0.0, betas=(0.9, 0.98)) for x in (p, q))
    step_in_float32(ours, compensated=False)
    reference = torch.zeros(64, 64, dtype=torch.float64)
    for i in range(150):
        gradient = (torch.randn(64, 64) * (1.0 if i < 40 else 0.02)).bfloat16()
        p.grad, q.grad = gradient, gradient.clone()
        plain.step()
        ours.step()
        reference = 0.98 * reference + 0.02 * gradient.double() ** 2
    mean = reference.mean().item()
    assert ours.state[q]["exp_avg_sq"].double().mean().item() == pytest.approx(mean, rel=0.01)
    assert abs(plain.state[p]["exp_avg_sq"].double().mean().item() / mean - 1) > 0.015


def test_streamed_states_and_pieces_do_not_change_a_draw() -> None:
    results = []
    for streams in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)).bfloat16()
        optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
        if streams:
            stream_states(optimizer, 64)
        step_in_float32(optimizer, compensated=True)
        for _ in range(3):
            for p in module.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        results.append({"weights": weights(module), "optimizer": optimizer.state_dict()["state"]})
    assert_equal(*results)


# In a run


def test_draws_follow_seed_and_step_and_nothing_else() -> None:
    def trained(seed: int, disturbed: bool = False) -> Any:
        torch.manual_seed(7 if disturbed else 0)
        module = Toy()
        run = trainer([StochasticRounding(seed)], precision="bf16-true")
        run.fit(module, data(), data())
        return weights(module)

    first = trained(0)
    assert_equal(first, trained(0, disturbed=True))
    assert not torch.equal(first["net.head.weight"], trained(1)["net.head.weight"])


def test_what_would_do_nothing_or_cannot_be_done_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no parameter that AdamW trains is bfloat16 \(there is float32\)"):
        trainer([StochasticRounding()]).fit(Toy(), data(), data())
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    with pytest.raises(ConfigurationError, match="StochasticRounding: LBFGS keeps one state for all parameters"):
        StochasticRounding().rewrite_optimizer(torch.optim.LBFGS([p]), nn.Module())
    with pytest.raises(ConfigurationError, match="seed must be a whole number of at least 0, got -1"):
        StochasticRounding(-1)
    with pytest.raises(ConflictError, match="both keep the updates that rounding would lose"):
        trainer([StochasticRounding(), KahanSummation()], precision="bf16-true").fit(Toy(), data(), data())

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1

    optimizer = Counting([p], 0.1)
    StochasticRounding().rewrite_optimizer(optimizer, nn.Module())
    p.grad = torch.ones_like(p)
    with pytest.raises(ConfigurationError, match="StochasticRounding: the step of Counting writes 'count'"):
        optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is p
    assert p not in optimizer.state or list(optimizer.state) == [p]
    assert torch.equal(p, torch.ones_like(p))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_run_that_would_lose_its_updates_says_so(precision: Any, recwarn: pytest.WarningsRecorder) -> None:
    class Kept(Toy):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            optimizer.bf16_stochastic_round = True  # as torchao's own has it
            return optimizer

    for module, said in ((Toy(), precision == "bf16-true"), (Kept(), False)):
        recwarn.clear()
        trainer([EMA()], precision=precision, max_steps=1).fit(module, data(), data())
        texts = [str(w.message) for w in recwarn if "in 16 bits" in str(w.message)]
        assert len(texts) == said
        assert all("AdamW steps" in text and "StochasticRounding" in text for text in texts)


def test_muon_s_matrices_are_stepped_whole() -> None:
    p = nn.Parameter(torch.eye(16, dtype=torch.bfloat16))
    optimizer = MuonAdamW([p], 1e-3, weight_decay=0.0)
    step_in_float32(optimizer, compensated=True)
    reference = nn.Parameter(torch.eye(16))
    other = MuonAdamW([reference], 1e-3, weight_decay=0.0)
    for i in range(5):
        torch.manual_seed(i)
        p.grad = torch.randn(16, 16).bfloat16()
        reference.grad = p.grad.float()
        optimizer.step()
        other.step()
    torch.testing.assert_close(exact(optimizer, p), reference.detach().double(), rtol=0, atol=1e-4)
