"""LossFreeBalancing: choices by scores and bias, weights by scores alone, and loads that become even."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor

from lit_efficient import (
    ActivationCheckpointing,
    CausalLMConfig,
    ConfigurationError,
    ConflictError,
    ExactResume,
    LanguageModeling,
    LossFreeBalancing,
    MixtureOfExperts,
)
from lit_efficient.application import apply
from lit_efficient.models.networks.biased_router import BiasedRouter
from lit_efficient.testing import Run, Toy, assert_equal, data
from tests.callbacks.resume_kit import SaveEveryBatch, final_state
from tests.callbacks.test_experts_backend import decoder
from tests.contract.row import Row
from tests.mechanisms.adapters.test_experts import IDS
from tests.processes import run_ranks
from tests.ranks import mixtures
from tests.support import AttentionNet, Net, routed, trainer
from tests.support_cli import export


def follows_the_loads(run: Run) -> None:
    """The bias of each expert is a whole number of steps of the rate, and the checkpoint holds it."""
    name = "net.mixture.mlp.gate.router_bias"
    bias = run.checkpoint["state_dict"][name]
    assert bias.dtype == torch.float32
    assert any(step.weights[name].any() for step in run.steps)  # steps up and down may end at zero
    torch.testing.assert_close(bias / 0.125, (bias / 0.125).round())
    assert torch.equal(bias, run.steps[-1].weights[name])


ROW = Row(lambda: LossFreeBalancing(0.125), follows_the_loads, experts=True)


def reference(family: str, router: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights and experts of one token by the formulas of the families' papers."""
    logits = router.weight.double() @ x.double()
    if family == "GptOss":
        logits = logits + router.bias.double()
        scores = logits
    else:
        scores = logits.softmax(-1)
    chosen = (scores + router.router_bias).topk(2).indices
    picked = scores[chosen]
    return (picked.softmax(-1) if family == "GptOss" else picked / picked.sum()), chosen


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_the_bias_chooses_and_does_not_weigh(family: str) -> None:
    network = decoder(family)
    plain = network(IDS).logits
    report = apply(network, [LossFreeBalancing()])["LossFreeBalancing"]
    assert report.details["biases_added"] == 2
    assert torch.equal(network(IDS).logits, plain)  # a bias of zeros
    router: Any = next(part for part in network.modules() if isinstance(part, BiasedRouter))
    router.router_bias.copy_(torch.tensor([0.0, 3.0, -3.0]))
    rows = torch.randn(20, 16, generator=torch.Generator().manual_seed(1))
    _, weights, chosen = router(rows)
    for i, row in enumerate(rows):
        wanted, experts = reference(family, router, row)
        assert torch.equal(chosen[i], experts)
        torch.testing.assert_close(weights[i].double(), wanted, rtol=1e-5, atol=1e-6)
    assert (chosen == 1).any(-1).all()
    assert not (chosen == 2).any()
    weights.square().sum().backward()
    assert router.weight.grad.any()


class Skewed(L.LightningModule):
    """A language model whose routers prefer the first expert."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.network = decoder(family)
        self.loads: list[Tensor] = []
        for name, part in self.network.named_modules():
            if name.endswith(("mlp.gate", "mlp.router")):
                part.weight.data *= 0.3
                part.register_forward_hook(self.watch)
        self.seen = torch.zeros(0)

    def watch(self, router: Any, inputs: Any, outputs: Any) -> None:
        if self.training and torch.is_grad_enabled():
            self.loads[-1] += outputs[2].flatten().bincount(minlength=len(router.weight))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.loads.append(torch.zeros(len(next(iter(self.routers())).weight)))
        tokens = batch[0]
        return self.network(tokens, labels=tokens).loss

    def routers(self) -> list[Any]:
        return [p for n, p in self.network.named_modules() if n.endswith(("mlp.gate", "mlp.router"))]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def tokens(steps: int) -> torch.utils.data.DataLoader:
    """Rows in which one token is much more frequent than the others."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 8, (4 * steps, 16), generator=generator)
    rows[torch.rand(rows.shape, generator=generator) < 0.5] = 1
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), 4)


def violation(loads: list[Tensor]) -> float:
    """Return the largest load above the mean load, in mean loads."""
    load = torch.stack(loads).sum(0)
    return float(load.max() / load.mean() - 1)


@pytest.mark.parametrize("family", ["Mixtral", "DeepseekV3"])
def test_loads_of_a_skewed_network_become_even(family: str) -> None:
    found = {}
    for rate in (None, 0.02):
        module = Skewed(family)
        techniques = [] if rate is None else [LossFreeBalancing(rate)]
        trainer(techniques, max_steps=40).fit(module, tokens(40))
        found[rate] = violation(module.loads[-10:])
    assert found[0.02] < 0.6 * found[None]
    if family == "DeepseekV3":  # whose own bias changes
        assert all(router.e_score_correction_bias.any() for router in module.routers())
        assert "router_bias" not in str(module.state_dict().keys())


def test_recomputed_blocks_count_once_and_16_bits_keep_the_bias() -> None:
    biases = []
    for more in ([], [ActivationCheckpointing()]):
        module = Skewed("Mixtral")
        trainer([LossFreeBalancing(0.01), *more], max_steps=3).fit(module, tokens(3))
        biases.append(module.routers()[0].router_bias)
    assert torch.equal(*biases)
    network = decoder("DeepseekV3")
    apply(network, [LossFreeBalancing()])
    network.to(torch.bfloat16)
    assert {b.dtype for n, b in network.named_buffers() if n.endswith("correction_bias")} == {torch.float32}
    assert network(IDS).logits.isfinite().all()


@pytest.mark.parametrize("family", ["DeepseekV3", "Qwen3Moe"])
def test_a_bias_of_the_class_is_exported_to_transformers(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    decoder(family).save_pretrained(tmp_path / "base")
    module = LanguageModeling(CausalLMConfig(str(tmp_path / "base")), learning_rate=0.05, warmup_steps=0)
    rows: Any = [{"input_ids": row[0], "labels": row[0]} for row in tokens(1).dataset]
    run = trainer([LossFreeBalancing(0.5)], max_steps=2, limit_val_batches=0)
    run.fit(module, *(torch.utils.data.DataLoader(rows, 2) for _ in range(2)))
    run.save_checkpoint(tmp_path / "run.ckpt")
    command = [str(tmp_path / "run.ckpt"), "--no-check", "--output", str(tmp_path / "out"), "--format"]
    refused = "merged" if family == "Qwen3Moe" else "peft"  # a class without a place for it; a folder without buffers
    assert export([*command, refused]) == 2
    assert f"own, which format {refused} cannot hold" in capsys.readouterr().err
    if family == "Qwen3Moe":
        return
    assert export([*command, "merged"]) == 0
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(b.any() for name, b in loaded.named_buffers() if name.endswith("correction_bias"))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(IDS).logits, module.network.eval()(IDS).logits)


@pytest.mark.parametrize(
    ("make", "network", "batch"),
    [(LossFreeBalancing, routed(Net), 6), (partial(MixtureOfExperts, 3, 1), AttentionNet, 2)],
)
def test_an_open_accumulation_window_goes_on_with_its_choices(
    make: Any, network: Any, batch: int, tmp_path: Path
) -> None:
    """Steps of four batches: the checkpoint after another batch holds the choices of its window."""
    ends = []
    for path in (None, tmp_path / f"{batch:03d}.ckpt"):
        saves = SaveEveryBatch(tmp_path if path is None else tmp_path.parent)
        run = trainer([make(bias_rate=0.125), ExactResume(0), saves], max_epochs=1, accumulate_grad_batches=4)
        run.fit(Toy("configure_model", network), data(48), data(), ckpt_path=path, weights_only=True)
        ends.append(final_state(run))
    assert ends[0][-1] == 3
    assert_equal(*ends)


def test_what_has_no_router_or_another_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Net has no routers next to stacked experts"):
        apply(Net(), [LossFreeBalancing()])
    with pytest.raises(ConfigurationError, match=r"LossFreeBalancing: bias_rate must be.*above 0.*got 0"):
        LossFreeBalancing(0)
    network = decoder("Mixtral")
    for layer in network.model.layers:
        layer.mlp.gate.forward = lambda x: (x, x, x.long())  # it chooses without topk
    with pytest.raises(ConfigurationError, match=r"mlp\.gate, model.*have no bias, and do not choose experts by one"):
        apply(network, [LossFreeBalancing()])
    with pytest.raises(ConflictError, match="set its bias_rate, and leave LossFreeBalancing out"):
        trainer([LossFreeBalancing(), MixtureOfExperts()], max_steps=1).fit(Skewed("Mixtral"), tokens(1))


@pytest.mark.turns(6, family="ranks")
def test_two_ranks_take_the_steps_of_the_bias_that_one_process_takes(tmp_path: Path) -> None:
    run_ranks(mixtures.biases_on_two_ranks, tmp_path)
    ranks = torch.load(tmp_path / "biases.pt", weights_only=True)
    one = mixtures.biases("auto", 1)
    assert one.any()
    torch.testing.assert_close(ranks, one, rtol=0, atol=1e-6)
