"""Starts of adapters: equal to peft's on the same data, collected in a run that is otherwise undone, and resumed."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, ClassVar

import peft
import pytest
import torch
from peft.optimizers import create_lorafa_optimizer
from peft.tuners.lora.config import CordaConfig, LoraGAConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.loraga import preprocess_loraga
from peft.utils import loftq_utils
from peft.utils.incremental_pca import IncrementalPCA
from safetensors.torch import load_file
from torch import nn

from lit_efficient import Compile, ConfigurationError, LoRA, QuantizeBase, merge_adapters, restore
from lit_efficient.application import apply
from lit_efficient.mechanisms.adapters.low_rank import adapted_matrix, add_low_rank, start_from_data
from lit_efficient.mechanisms.adapters.merge import dequantize_layers
from lit_efficient.mechanisms.adapters.quantized import SOURCE, dequantize, quantize_linear
from lit_efficient.mechanisms.adapters.starts import FROM_DATA, Statistics
from tests.processes import run_ranks
from tests.ranks import adapters as ranks
from tests.support import Toy, assert_equal, data, trainer, weights
from tests.support_cli import export

RANK = 3
SCALE = 2.0


def batches(count: int = 4) -> list[torch.Tensor]:
    """Inputs of correlated features with a mean, and with the same largest value in each sample."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(12, 12, generator=generator)
    found = [0.1 * torch.randn(1, 40, 12, generator=generator) @ mixing + 0.3 for _ in range(count)]
    for x in found:
        x[0, 0, 0] = 9.0
    return found


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 8))


def started(variant: str) -> nn.Sequential:
    """The network with adapters that start from the batches."""
    ours = network()
    layers: dict[str, Any] = {"0": ours[0], "2": ours[2]}
    for name, layer in layers.items():
        add_low_rank(layer, name, rank=RANK, alpha=SCALE * RANK, variant=variant)
    with Statistics(layers, variant) as statistics:
        for x in batches():
            ours(x).square().mean().backward()
    for name, layer in layers.items():
        start_from_data(layer, statistics.sums[name], statistics.samples[name])
    return ours


def theirs(kind: str, **settings: Any) -> Any:
    return peft.LoraConfig(
        r=RANK, lora_alpha=SCALE * RANK, target_modules=["0", "2"], init_lora_weights=kind, **settings
    )


def test_olora_is_pefts() -> None:
    ours = network()
    add_low_rank(ours[0], "0", rank=RANK, alpha=SCALE * RANK, variant="olora")
    other: Any = peft.inject_adapter_in_model(theirs("olora"), network())[0]
    torch.testing.assert_close(ours[0].lora_A.data, other.lora_A["default"].weight.data)
    torch.testing.assert_close(ours[0].lora_B.data, other.lora_B["default"].weight.data)


def test_corda_is_pefts() -> None:
    ours = started("corda")
    base = network()
    config = theirs("corda", corda_config=CordaConfig(corda_method="ipm"))
    preprocess_corda(base, config, run_model=lambda: [base(x) for x in batches()] and None)
    other: Any = peft.inject_adapter_in_model(config, base)
    for at in (0, 2):
        mine = SCALE * ours[at].lora_B @ ours[at].lora_A
        peers = SCALE * other[at].lora_B["default"].weight @ other[at].lora_A["default"].weight
        torch.testing.assert_close(mine, peers, rtol=1e-3, atol=1e-4)
        if at == 0:  # peft divides samples by the largest value, and not by the largest absolute value
            torch.testing.assert_close(
                ours[at].lora_A.norm(dim=1), other[at].lora_A["default"].weight.norm(dim=1), rtol=1e-3, atol=1e-4
            )


def test_eva_has_the_directions_of_pefts_incremental_pca() -> None:
    ours = started("eva")
    inputs = torch.cat(batches())[:, :].flatten(0, 1)
    pca = IncrementalPCA(n_components=RANK)
    pca.partial_fit(inputs)
    a = ours[0].lora_A.detach()
    torch.testing.assert_close(a @ a.T, torch.eye(RANK), atol=1e-5, rtol=0)
    for mine, peers in zip(a, pca.components_):  # in the same order, with an arbitrary sign
        assert (mine @ peers).abs() == pytest.approx(1, abs=1e-4)
    assert not ours[0].lora_B.any()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of peft
def test_lora_ga_has_the_singular_vectors_of_pefts_gradient() -> None:
    ours = started("lora_ga")
    base = network()
    config = theirs("lora_ga", lora_ga_config=LoraGAConfig())

    def step() -> None:
        for x in batches():
            base(x).square().mean().backward()

    preprocess_loraga(base, config, train_step=step)
    other: Any = peft.inject_adapter_in_model(config, base)
    for at, outputs in ((0, 10), (2, 8)):
        factor = outputs**0.25 / 4
        for rows, peers in (
            (ours[at].lora_A, other[at].lora_A["default"].weight),
            (ours[at].lora_B.T, other[at].lora_B["default"].weight.T),
        ):
            torch.testing.assert_close(rows.norm(dim=1), torch.full((RANK,), factor))  # the authors' scale of both
            cosines = torch.cosine_similarity(rows, peers).abs()
            torch.testing.assert_close(cosines, torch.ones(RANK), atol=1e-3, rtol=0)


def test_the_first_step_of_lora_ga_follows_the_gradient_of_the_weight_more_closely_than_that_of_lora() -> None:
    """The change of the weight by a small step of gradient descent on A and B has the direction of -dL/dW."""
    aligned = {}
    for variant in ("lora", "lora_ga"):
        ours = started("lora_ga") if variant == "lora_ga" else network()
        if variant == "lora":
            add_low_rank(ours[0], "0", rank=RANK, alpha=SCALE * RANK)
        for p in ours.parameters():
            p.grad = None
        for x in batches():
            ours(x).square().mean().backward()
        layer: Any = ours[0]
        full = layer.weight.grad.detach()
        change = layer.lora_B @ layer.lora_A.grad + layer.lora_B.grad @ layer.lora_A
        aligned[variant] = float(torch.cosine_similarity(change.detach().flatten(), full.flatten(), dim=0))
    assert aligned["lora_ga"] > aligned["lora"] + 0.1


class Watched(Toy):
    """Records, outside of what a trial undoes, the batches, and the state at the first batch of the run."""

    batches: ClassVar[list[torch.Tensor]] = []
    first: ClassVar[dict[str, Any]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        self.batches.append(x)
        layer: Any = self.net.stem
        values = {name: getattr(layer, name).detach().clone() for name in ("lora_A", "lora_B")}
        self.first.update(values, states=len(self.trainer.optimizers[0].state), step=self.trainer.global_step)
        return super().training_step(batch, batch_idx)


def fit(module: Any, callbacks: list[Any], ckpt_path: Any = None, **arguments: Any) -> Any:
    torch.manual_seed(0)
    run = trainer(callbacks, **arguments)
    run.fit(module, data(), data(), ckpt_path=ckpt_path)
    return run


def test_a_run_starts_from_its_own_first_batches_and_trains_on_them_afterwards() -> None:
    Watched.batches.clear()
    base = Toy()
    fit(Watched(), [LoRA(rank=2, variant="eva", start_rounds=3, targets=["stem"])], max_steps=1)
    inputs = [batch[0] for batch in data()]
    assert [x.tolist() for x in Watched.batches] == [x.tolist() for x in [*inputs[:3], inputs[0]]]
    assert (Watched.first["states"], Watched.first["step"]) == (0, 0)
    seen = torch.cat(inputs[:3])
    _, _, directions = torch.linalg.svd(seen - seen.mean(0), full_matrices=False)
    cosines = (Watched.first["lora_A"] * directions[:2]).sum(1).abs()
    torch.testing.assert_close(cosines, torch.ones(2))
    assert not Watched.first["lora_B"].any()
    assert base.net.stem.weight.shape[1] == directions.shape[1]


@pytest.mark.parametrize("variant", ["olora", "lora_fa", *FROM_DATA])
def test_resuming_is_exact_and_exports_and_merges_are_the_sum(variant: str, tmp_path: Path) -> None:
    def technique() -> LoRA:
        return LoRA(rank=2, variant=variant, start_rounds=2 if variant in FROM_DATA else None)

    fit(whole := Toy(), [technique()], max_epochs=2)
    half = fit(Toy(), [technique()])
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(again := Toy(), [technique()], ckpt_path=tmp_path / "half.ckpt", max_epochs=2)
    assert resumed.global_step == 8
    assert_equal(weights(whole), weights(again))
    resumed.save_checkpoint(tmp_path / "end.ckpt")
    restored = Toy()
    restore(restored, tmp_path / "end.ckpt")
    x = next(iter(data()))[0]
    y = whole.net(x)
    torch.testing.assert_close(restored.net(x), y)
    merge_adapters(restored)
    torch.testing.assert_close(restored.net(x), y, rtol=1e-5, atol=1e-5)
    assert export([str(tmp_path / "end.ckpt"), "--format", "peft", "--output", str(tmp_path / "made")]) == 0
    loaded = peft.PeftModel.from_pretrained(Toy().net, tmp_path / "made")
    torch.testing.assert_close(loaded(x), y, rtol=1e-5, atol=1e-5)


@pytest.mark.turns(4, family="ranks")
@pytest.mark.parametrize("variant", FROM_DATA)
def test_two_processes_start_from_the_batches_of_both(variant: str, tmp_path: Path) -> None:
    class Still(Toy):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.0)

    run_ranks(ranks.started, tmp_path, variant)
    found = torch.load(tmp_path / "started.pt", weights_only=True)
    fit(module := Still(), [LoRA(rank=2, variant=variant, start_rounds=4)], max_steps=1)
    for name, tensor in weights(module).items():
        if name.endswith("lora_A"):  # signs of singular vectors are arbitrary: compare what A and B span
            b = name.removesuffix("A") + "B"
            torch.testing.assert_close(found[name].T @ found[name], tensor.T @ tensor, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(
                found[b] @ found[b].T, weights(module)[b] @ weights(module)[b].T, rtol=1e-3, atol=1e-4
            )


def test_padding_does_not_count() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    layers: dict[str, Any] = {"0": net[0]}
    add_low_rank(net[0], "0", rank=1, alpha=1.0, variant="eva")
    x = torch.randn(2, 3, 4)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    with Statistics(layers, "eva") as statistics:
        assert statistics.with_mask_of({"attention_mask": mask})["attention_mask"] is mask
        net(x)
    rows = torch.cat((x[0, :2], x[1, :1]))
    torch.testing.assert_close(statistics.sums["0"][:4, :4], rows.T @ rows)
    assert statistics.sums["0"][4, 4] == 3


def test_compiled_blocks_keep_no_hook() -> None:
    fit(module := Watched(), [LoRA(rank=2, variant="lora_ga", start_rounds=2), Compile(backend="eager")], max_steps=2)
    plain: Any = Watched()
    fit(plain, [LoRA(rank=2, variant="lora_ga", start_rounds=2)], max_steps=2)
    torch.testing.assert_close(weights(module), weights(plain))
    assert not any(part._forward_hooks for part in module.modules())


def test_a_trial_step_that_raises_leaves_no_hook() -> None:
    class Broken(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            assert any(part._forward_hooks for part in self.modules())
            raise RuntimeError("broken")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    with pytest.raises(RuntimeError, match="broken"):
        fit(module := Broken(), [LoRA(rank=2, variant="eva", start_rounds=2)])
    assert not any(part._forward_hooks for part in module.modules())


def test_a_layer_without_data_is_named() -> None:
    class Unused(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(4, 4)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    with pytest.raises(ConfigurationError, match="'unused' had none in 2 batches"):
        fit(Unused(), [LoRA(rank=2, variant="eva", start_rounds=2)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variant": "eva", "start_rounds": 0}, "start_rounds must be a whole number of at least 1 or null, got 0"),
        ({"variant": "pissa", "start_rounds": 2}, "start_rounds must be null for variant pissa, got 2"),
        ({"variant": "lora_ga", "rank": 9}, "rank must be at most 8 for lora_ga on 'net.stem', got 9"),
        ({"variant": "olora", "rank": 17}, "rank must be at most 16 for olora on 'net.stem', got 17"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        apply(Toy(), [LoRA(**arguments)])


@pytest.mark.parametrize("variant", FROM_DATA)
def test_a_second_fit_continues_with_trained_adapters(variant: str, tmp_path: Path) -> None:
    """Also of a module whose weights were restored, and a technique that is given to another module starts again."""

    class Still(Toy):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.0)

    def technique() -> LoRA:
        return LoRA(rank=2, variant=variant, start_rounds=2)

    fit(module := Toy(), [used := technique()]).save_checkpoint(tmp_path / "end.ckpt")
    trained = {name: tensor.clone() for name, tensor in weights(module).items()}
    restore(restored := Still(), tmp_path / "end.ckpt")
    fit(restored.train(), [technique()])
    assert_equal(weights(restored), trained)
    module.configure_optimizers = lambda: Still.configure_optimizers(module)  # type: ignore[arg-type,method-assign]
    fit(module, [technique()])
    assert_equal(weights(module), trained)
    fit(again := Toy(), [used])
    assert_equal(weights(again), trained)


def nf4(keep_source: bool = True) -> QuantizeBase:
    return QuantizeBase("nf4", double_quant=False, keep_source=keep_source)


@pytest.mark.parametrize("rounds", [1, 3])
def test_loftq_is_pefts_alternation(rounds: int) -> None:
    """peft leaves the scale out of the product, and is compared at a scale of 1; the sum does not depend on it."""
    theirs: dict[str, Any] = {}
    exec(inspect.getsource(loftq_utils).replace('else "cuda"', 'else "cpu"'), theirs)  # it wants an accelerator
    weight, a, b = theirs["loftq_init"](network()[0].weight, num_bits=4, reduced_rank=RANK, num_iter=rounds)
    for scale in (1.0, SCALE):
        module = nn.ModuleDict({"net": network()})
        technique = LoRA(rank=RANK, alpha=scale * RANK, variant="loftq", start_rounds=rounds)
        apply(module, [nf4(), technique])
        layer: Any = module["net"][0]
        torch.testing.assert_close(dequantize(layer), weight)
        torch.testing.assert_close(scale * layer.lora_B @ layer.lora_A, b @ a, rtol=1e-4, atol=1e-6)
        if scale == 1:
            torch.testing.assert_close(layer.lora_A.data, a, rtol=1e-4, atol=1e-6)
        assert SOURCE not in layer.__dict__
    plain = network()[0].weight - dequantize(quantize_linear(network()[0], "nf4", double_quant=False))
    assert (adapted_matrix(layer) - network()[0].weight).norm() < 0.8 * plain.norm()


@pytest.mark.parametrize("rounds", [None, 2])
def test_loftq_resumes_exactly_and_exports_its_own_base(rounds: int | None, tmp_path: Path) -> None:
    def techniques() -> list[Any]:
        return [nf4(), LoRA(rank=2, variant="loftq", start_rounds=rounds)]

    fit(whole := Toy(), techniques(), max_epochs=2)
    fit(Toy(), techniques()).save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(again := Toy(), techniques(), ckpt_path=tmp_path / "half.ckpt", max_epochs=2)
    assert_equal(weights(whole), weights(again))
    resumed.save_checkpoint(tmp_path / "end.ckpt")
    torch.save(Toy().state_dict(), tmp_path / "base.pt")
    x = next(iter(data()))[0]
    y = whole.net(x)
    made = ["--output", str(tmp_path / "made")]
    base = ["--base", str(tmp_path / "base.pt")]
    assert export([str(tmp_path / "end.ckpt"), "--format", "safetensors", *made, *base]) == 0
    merged = Toy()
    merged.load_state_dict(load_file(tmp_path / "made" / "model.safetensors"))
    torch.testing.assert_close(merged.net(x), y, rtol=1e-4, atol=1e-5)
    assert export([str(tmp_path / "end.ckpt"), "--format", "peft", "--output", str(tmp_path / "peft")]) == (
        0 if rounds is None else 2
    )
    if rounds is None:
        rounded = torch.nn.ModuleDict({"net": Toy().net})
        apply(rounded, [nf4(keep_source=False)])
        loaded = peft.PeftModel.from_pretrained(dequantize_layers(rounded)["net"], tmp_path / "peft")
        torch.testing.assert_close(loaded(x), y, rtol=1e-4, atol=1e-5)


def test_loftq_needs_the_weights_before_rounding() -> None:
    with pytest.raises(ConfigurationError, match=r"Add QuantizeBase\(keep_source=True\)"):
        apply(Toy(), [nf4(keep_source=False), LoRA(rank=2, variant="loftq")])
    with pytest.raises(ConfigurationError, match=r"keeps weights for variant='loftq', got 'lora'"):
        apply(Toy(), [nf4(), LoRA(rank=2)])
    apply(module := Toy(), [nf4(), LoRA(rank=2, variant="loftq")])
    other = {name: torch.ones_like(tensor) for name, tensor in Toy().state_dict().items()}
    with pytest.raises(ConfigurationError, match="was loaded later"):
        module.load_state_dict(other)


class AdamOfHF(torch.optim.Optimizer):
    """AdamW as peft's optimizer has it: eps is added before the correction of the bias, and decay follows the step."""

    def __init__(self, params: list[torch.Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        lr = self.param_groups[0]["lr"]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            count = state["step"] = state.get("step", 0) + 1
            mean = state["mean"] = 0.9 * state.get("mean", 0) + 0.1 * p.grad
            square = state["square"] = 0.999 * state.get("square", 0) + 0.001 * p.grad**2
            rate = lr * (1 - 0.999**count) ** 0.5 / (1 - 0.9**count)
            p.sub_(rate * mean / (square.sqrt() + 1e-6))
            p.sub_(lr * 0.1 * p)


def stored(module: nn.Module, x: torch.Tensor) -> int:
    """Bytes that the backward pass of a module stores, without its weights."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    own |= {b.untyped_storage().data_ptr() for b in module.buffers()}
    found = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x).sum().backward()
    return sum(found.values())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_lora_fa_stores_the_product_with_a_and_not_the_input(dropout: float) -> None:
    """Also with dropout, which stores its mask."""
    positions = 50
    found = {}
    for variant in ("lora", "lora_fa"):
        module = nn.Sequential(nn.Linear(64, 32).requires_grad_(False))
        add_low_rank(module[0], "0", rank=RANK, alpha=1.0, variant=variant, dropout=dropout)
        found[variant] = stored(module, torch.randn(positions, 64, requires_grad=True))
    mask = 4 * positions * 64 if dropout else 0  # on the CPU as floats
    assert found["lora_fa"] == 4 * positions * RANK + mask
    assert found["lora"] == found["lora_fa"] + 4 * positions * 64


@pytest.mark.parametrize("clipped", [False, True])
def test_lora_fa_takes_the_steps_of_pefts_optimizer(clipped: bool) -> None:
    config = peft.LoraConfig(r=RANK, lora_alpha=SCALE * RANK, target_modules=["0", "2"])
    other = peft.get_peft_model(network(), config)
    theirs = create_lorafa_optimizer(other, RANK, SCALE * RANK, lr=0.05, weight_decay=0.1)
    module = nn.ModuleDict({"net": network()})
    technique = LoRA(rank=RANK, alpha=SCALE * RANK, variant="lora_fa")
    apply(module, [technique])
    for at in (0, 2):
        layer: Any = module["net"][at]
        layer.lora_A.copy_(other.base_model.model[at].lora_A["default"].weight)
    trained = [p for p in module.parameters() if p.requires_grad]
    assert len(trained) == 2
    ours = AdamOfHF(trained, lr=0.05)
    technique.rewrite_optimizer(ours, module)
    technique.rewrite_optimizer(ours, module)  # a second fit with the same optimizer
    for x in batches():
        for net, optimizer in ((other, theirs), (module["net"], ours)):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            if clipped:
                nn.utils.clip_grad_norm_([p for p in net.parameters() if p.grad is not None], 0.1)
            optimizer.step()
    for at in (0, 2):
        peers = other.base_model.model[at].lora_B["default"].weight
        torch.testing.assert_close(module["net"][at].lora_B.data, peers.data, rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(module["net"][at].lora_A, other.base_model.model[at].lora_A["default"].weight.data)
