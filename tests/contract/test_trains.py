"""What a technique trains is stepped, or the run is refused: for modules whose optimizers were chosen without it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch.callbacks import Callback
from torch import nn

from lit_efficient import (
    ActivationCheckpointing,
    Compile,
    ConfigurationError,
    LoRA,
    Phase,
    QuantizeBase,
    ReplaceHead,
    Report,
    Technique,
)
from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import overrides
from lit_efficient.mechanisms.adapters.disabled import disabled
from lit_efficient.mechanisms.adapters.quantized import is_quantized
from lit_efficient.models.probes.silent_layers import Watched
from tests.contract.table import CASES, network_of
from tests.mechanisms.adapters.decoders import Language
from tests.support import WIDTH, Net, Toy, assert_equal, data, trainer, weights

NAMES = sorted(name for name, case in CASES.items() if overrides(case.make(), "trains"))


class ListedEarly(Toy):
    """Steps what it had when it was built."""

    def __init__(self, network: type[nn.Module]) -> None:
        super().__init__("init", network=network)
        self.listed = list(self.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.listed, lr=1e-2)


class ByName(Toy):
    """Steps what is called a norm, which no technique adds or thaws alone."""

    def __init__(self, network: type[nn.Module]) -> None:
        super().__init__("init", network=network)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for name, p in self.named_parameters() if "norm" in name], lr=1e-2)


class ByGradient(Toy):
    """Steps what trains when optimizers are configured, as it should."""

    def __init__(self, network: type[nn.Module]) -> None:
        super().__init__("init", network=network)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Start(Callback):
    """The weights with which training starts, by name."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.weights = {name: p.detach().clone() for name, p in pl_module.named_parameters()}


def fit(kind: Any, technique: Technique, network: type[nn.Module]) -> tuple[set[str], set[str], str]:
    """Names of what the technique trains, of what moved in twelve steps, and the refusal, if there is one."""
    module, start, refusal = kind(network), Start(), ""
    run = trainer([technique, start], max_epochs=3, limit_val_batches=0)
    try:
        run.fit(module, data(), data())
    except ConfigurationError as error:
        refusal = str(error)
    names = {id(p): name for name, p in module.named_parameters()}
    parameters = dict(module.named_parameters())
    moved = {name for name, before in start.weights.items() if not torch.equal(before, parameters[name])}
    return {names[id(p)] for p in technique.trains(module)}, moved, refusal


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", NAMES)
def test_all_of_it_moves_where_the_optimizer_holds_what_requires_a_gradient(name: str) -> None:
    wanted, moved, refusal = fit(ByGradient, CASES[name].make(), network_of(name))
    assert not refusal
    assert wanted
    assert wanted <= moved


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", [ListedEarly, ByName])
@pytest.mark.parametrize("name", NAMES)
def test_it_moves_or_is_refused_where_the_optimizer_was_chosen_without_it(name: str, kind: Any) -> None:
    wanted, moved, refusal = fit(kind, CASES[name].make(), network_of(name))
    if refusal.startswith(f"{name} would change nothing: "):
        assert not moved
    elif refusal:
        assert refusal.startswith(f"{name}: no optimizer holds ")
        assert any(part in refusal for part in wanted)
        assert "configure_optimizers" in refusal
        assert not moved
    else:
        assert wanted <= moved


def test_a_technique_of_somebody_elses_is_checked_too() -> None:
    class Extra(OptimizerHooks, Technique):
        def transform(self, module: Any) -> Report:
            module.net.extra = nn.Parameter(torch.zeros(3))
            return Report("three more")

        def trains(self, module: Any) -> list[nn.Parameter]:
            return [module.net.extra]

    class Two(Toy):
        def configure_optimizers(self) -> Any:
            first, second = super().configure_optimizers()
            second.add_param_group({"params": [p for name, p in self.named_parameters() if "extra" in name]})
            return first, second

    with pytest.raises(ConfigurationError, match=r"Extra: no optimizer holds 1 of the 1 parameters .*: net\.extra\."):
        trainer([Extra()]).fit(Toy(optimizers=2), data(), data())
    trainer([Extra()]).fit(Two(optimizers=2), data(), data())  # one of them is enough


class Fused(nn.Module):
    """Reads a layer's weight and never calls the layer, as the fused kernels of state-space models do."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x @ self.proj.weight.T


class Bypassing(Net):
    """The toy with such layers, and with two experts of which one is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.ModuleList([Fused(), Fused()])
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.experts[1](self.fused[1](self.fused[0](x))))


def test_adapters_that_are_bypassed_are_refused_but_not_experts_that_nothing_reaches() -> None:
    module = ByGradient(Bypassing)
    message = r"LoRA: 2 adapters cannot learn, first that of 'net\.fused\.0\.proj'.*Leave it out of targets"
    with pytest.raises(ConfigurationError, match=message):
        trainer([LoRA()], accumulate_grad_batches=2).fit(module, data(), data())
    assert not module.net.fused[0].proj.weight.requires_grad
    trainer([LoRA(targets=[r"experts\.\d", "up"])], max_steps=2).fit(ByGradient(Bypassing), data(), data())


class Tasks(Net):
    """The toy with a layer for every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return super().forward(self.other(x) if self.calls % 2 else self.first(x))


class Unwatched(LoRA):
    """Whose adapters nobody looks at."""

    def adapters(self, module: nn.Module) -> list[nn.Parameter]:
        return []


class Frugal(ListedEarly):
    """Steps all that it has, frozen or not, and gives what it looks like while it is saved."""

    def __init__(self, network: type[nn.Module] = Tasks) -> None:
        super().__init__(network)
        self.disturbed: list[list[str]] = []
        self.penalties: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """With a penalty on what trains beside adapters, and copies of the network that are as without the wait."""
        output = super().training_step(batch, batch_idx)
        penalty = sum(p.square().sum() for n, p in self.named_parameters() if p.requires_grad and "lora" not in n)
        for net in (copy.deepcopy(self.net), pickle.loads(pickle.dumps(self.net))):
            layers = [(n, part.weight) for n, part in net.named_modules() if hasattr(part, "lora_A")]
            self.disturbed.append([n for n, weight in layers if weight.requires_grad])
            self.disturbed.append([n for n, p in net.named_parameters() if p.requires_grad and "lora" not in n])
        self.penalties.append(float(penalty))
        return {**output, "loss": output["loss"] + penalty} if isinstance(output, dict) else output + penalty

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_batch_end(self, *_: Any) -> None:
        self.disturbed.append([n for n, p in self.named_parameters() if p.requires_grad and "lora" not in n])
        self.disturbed.append([n for n, p in self.named_parameters() if p.grad is not None and "lora" not in n])


@pytest.mark.turns(3)
@pytest.mark.parametrize("extra", [None, ActivationCheckpointing, lambda: Compile(backend="aot_eager")])
def test_tasks_may_alternate_and_waiting_for_them_changes_nothing(extra: Any, recwarn: pytest.WarningsRecorder) -> None:
    found = []
    for technique in (LoRA(dropout=0.5), Unwatched(dropout=0.5)):
        torch.manual_seed(0)
        module = Frugal()
        parts = [technique] if extra is None else [technique, extra()]
        trainer(parts, max_steps=6, gradient_clip_val=1e-3).fit(module, data(), data())
        assert all(layer.lora_B.any() for layer in (module.net.first, module.net.other))
        assert not any(module.disturbed)
        found.append((weights(module), module.penalties, torch.rand(4)))
    assert_equal(found[0], found[1])
    assert not [w for w in recwarn if "adapters" in str(w.message)]


class Asides(Tasks):
    """Whose first batches take the layer for them without its adapter, as a reference."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with disabled(self.other if self.calls < 3 else nn.Module()):
            return super().forward(x)


def test_a_layer_whose_adapter_is_switched_off_within_a_step_is_not_bypassed() -> None:
    module = ByGradient(Asides)
    with pytest.warns(UserWarning, match="1 adapters had no gradient"):
        trainer([LoRA()], max_steps=5).fit(module, data(24), data())
    assert module.net.other.lora_B.any()


class Spared(LoRA):
    """Whose layers have a parameter that no forward reads."""

    def transform(self, module: nn.Module) -> Any:
        report = super().transform(module)
        for part in list(module.modules()):
            if hasattr(part, "lora_A"):
                part.lora_spare = nn.Parameter(torch.zeros(1))
        return report

    def adapters(self, module: nn.Module) -> Any:
        yield from super().adapters(module)
        yield from (p for name, p in module.named_parameters() if name.endswith("lora_spare"))


def test_a_layer_a_part_of_whose_adapter_learns_is_not_silent(recwarn: pytest.WarningsRecorder) -> None:
    trainer([Spared()], max_steps=1).fit(ByGradient(Net), data(), data())
    assert not [w for w in recwarn if "had no gradient" in str(w.message)]


class Spare(Tasks):
    """With a layer that no batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize("steps", [1, 5])
def test_a_layer_that_no_batch_uses_is_named_once(steps: int) -> None:
    module = Frugal(Spare)
    with pytest.warns(UserWarning, match=r"LoRA: \d adapters had no gradient up to step .*net\.spare") as caught:
        trainer([LoRA()], max_steps=steps).fit(module, data(), data())
    said = [str(w.message) for w in caught if "had no gradient" in str(w.message)]
    assert len(said) == 1
    assert not any(isinstance(part, Watched) for part in module.modules())  # it is as it was before the wait
    assert ("net.first" in said[0] or "net.other" in said[0]) == (steps == 1)


class Turns(Bypassing):
    """Whose bypassed layers come in the fourth step only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + self.training
        return super().forward(x) if self.calls > 3 else Net.forward(self, x)


def test_a_layer_that_is_bypassed_later_is_refused_then() -> None:
    module = ByGradient(Turns)
    run = trainer([LoRA(targets=[r"fused\.\d\.proj", "up"])], max_steps=6)
    with pytest.warns(UserWarning, match="2 adapters had"), pytest.raises(ConfigurationError, match="cannot learn"):
        run.fit(module, data(), data())
    assert module.net.calls == 4


class TurnsOfOptimizers(Toy):
    """One network as part of another one's loss: gradients pass through it when it is not its turn."""

    def __init__(self) -> None:
        super().__init__("init", network=Tasks)
        self.judge = Net()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net, self.judge)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        own, judge = self.optimizers()
        self.net.calls = batch_idx
        made = self.net(batch)
        for optimizer in (own, judge):
            self.toggle_optimizer(optimizer)
            loss = made.square().mean() if optimizer is own else self.judge(self.net(batch)).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    on_validation_start = on_train_epoch_end = lambda self: None
    validation_step = None


def test_optimizers_may_take_turns_through_each_others_layers() -> None:
    module = TurnsOfOptimizers()
    trainer([LoRA()], max_steps=8).fit(module, torch.utils.data.DataLoader(torch.randn(16, WIDTH), 4))
    assert all(layer.lora_B.any() for layer in (module.net.first, module.net.other))


def test_fused_kernels_of_state_space_models_are_such_a_case() -> None:
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=32, state_size=4)
    with pytest.raises(ConfigurationError, match=r"first that of 'network\.backbone\.layers\.0\.mixer\.dt_proj'"):
        trainer([LoRA(targets=["in_proj", "dt_proj"])], max_steps=2).fit(
            Language(transformers.MambaForCausalLM(config))
        )
    wanted = LoRA(targets=["in_proj", "x_proj", "out_proj"])
    trainer([wanted], max_steps=1).fit(Language(transformers.MambaForCausalLM(config)))
    module = Language(transformers.MambaForCausalLM(config))
    trainer([LoRA()], max_steps=1).fit(module)
    adapted = {name.rpartition(".")[2] for name, part in module.named_modules() if hasattr(part, "lora_A")}
    assert adapted == {"in_proj"}  # fused kernels read the weights of the other layers


def test_layers_of_other_classes_that_compute_a_product_are_like_linear_layers() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    network = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes)).eval()
    before = copy.deepcopy(network)
    ids = torch.arange(12)[None]
    report = QuantizeBase("int4", group_size=16).transform(network)
    assert len(report.modules) == 4
    assert all(is_quantized(network.get_submodule(name)) for name in report.modules)
    with torch.no_grad():
        expected, got = (model(ids, use_cache=False).logits for model in (before, network))
    assert (got - expected).norm() < 0.25 * expected.norm()
    report = LoRA().transform(network)
    assert len(report.modules) == 4


def test_routers_that_derive_from_linear_layers_have_no_adapter() -> None:
    """Llama 4's return scores and logits."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "intermediate_size_mlp": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 32}
    config = transformers.Llama4TextConfig(**sizes, num_local_experts=2, pad_token_id=0)
    module = Language(transformers.Llama4ForCausalLM(config))
    trainer([LoRA()], max_steps=1).fit(module)
    adapted = {name.rpartition(".")[2] for name, part in module.named_modules() if hasattr(part, "lora_A")}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start"])
@pytest.mark.parametrize("make", [LoRA, lambda: ReplaceHead(WIDTH)])
def test_a_module_that_freezes_by_itself_later_is_refused(make: Any, hook: str) -> None:
    class Freezing(ByGradient):
        def __init__(self) -> None:
            super().__init__(Net)

    def freeze(self: Any) -> None:  # all but one bias, so that there is something to step
        for name, p in self.named_parameters():
            p.requires_grad_(name.endswith("stem.bias"))

    setattr(Freezing, hook, freeze)
    if hook == "on_fit_start":  # before optimizers are configured
        Freezing.on_train_start = freeze
    with pytest.raises(ConfigurationError, match="were frozen after configure_optimizers, first 'net"):
        trainer([make()], max_steps=1).fit(Freezing(), data(), data())


class Adversaries(Toy):
    """Two networks with an optimizer each."""

    def __init__(self) -> None:
        super().__init__("init", network=Net)
        self.judge = Net()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net, self.judge)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, network in zip(self.optimizers(), (self.net, self.judge), strict=True):
            self.toggle_optimizer(optimizer)  # which freezes what the other one steps
            optimizer.zero_grad()
            self.manual_backward(network(batch).square().mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    on_validation_start = on_train_epoch_end = lambda self: None
    validation_step = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "technique", [LoRA(targets=[r"net\.head"]), ReplaceHead(3, at=r"net\.head")], ids=lambda t: type(t).__name__
)
def test_an_optimizer_of_which_all_is_frozen_is_refused(technique: Technique) -> None:
    name = type(technique).__name__
    with pytest.raises(ConfigurationError, match=rf"{name} has frozen all that optimizer 1 of Adversaries \(SGD\)"):
        trainer([technique], max_steps=1).fit(Adversaries(), torch.utils.data.DataLoader(torch.randn(8, WIDTH), 4))
    both = LoRA(targets=[r"net\.head"], modules_to_save=["judge"])
    trainer([both], max_steps=2).fit(Adversaries(), torch.utils.data.DataLoader(torch.randn(8, WIDTH), 4))


class HalfUsed(OptimizerHooks, Technique):
    """Puts two numbers on a layer, of which a batch may use one alone."""

    phase = Phase.ADAPT

    def transform(self, module: nn.Module) -> Report:
        module.net.head.scale = nn.Parameter(torch.ones(()))
        module.net.head.shift = nn.Parameter(torch.zeros(()))
        module.net.head.register_forward_hook(lambda layer, args, output: output * layer.scale)
        return Report("two numbers")

    def adapters(self, module: nn.Module) -> list[nn.Parameter]:
        return [module.net.head.scale, module.net.head.shift]


def test_an_adapter_learns_if_any_of_it_does(recwarn: pytest.WarningsRecorder) -> None:
    trainer([HalfUsed()], max_steps=3).fit(ByGradient(Net), data(), data())
    assert not [w for w in recwarn if "had no gradient" in str(w.message)]
