"""What a technique trains is stepped, or the run is refused: for modules whose optimizers were chosen without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from lit_efficient import ConfigurationError, Report, Technique
from lit_efficient.declaration import overrides
from tests.contract.table import CASES, network_of
from tests.support import Toy, data, trainer

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
    run = trainer([technique, start], max_epochs=3)
    try:
        run.fit(module, data(), data())
    except ConfigurationError as error:
        refusal = str(error)
    names = {id(p): name for name, p in module.named_parameters()}
    parameters = dict(module.named_parameters())
    moved = {name for name, before in start.weights.items() if not torch.equal(before, parameters[name])}
    return {names[id(p)] for p in technique.trains(module)}, moved, refusal


@pytest.mark.parametrize("name", NAMES)
def test_all_of_it_moves_where_the_optimizer_holds_what_requires_a_gradient(name: str) -> None:
    wanted, moved, refusal = fit(ByGradient, CASES[name].make(), network_of(name))
    assert not refusal
    assert wanted
    assert wanted <= moved


@pytest.mark.parametrize("kind", [ListedEarly, ByName])
@pytest.mark.parametrize("name", NAMES)
def test_it_moves_or_is_refused_where_the_optimizer_was_chosen_without_it(name: str, kind: Any) -> None:
    wanted, moved, refusal = fit(kind, CASES[name].make(), network_of(name))
    if refusal:
        assert refusal.startswith(f"{name}: no optimizer holds ")
        assert any(part in refusal for part in wanted)
        assert "configure_optimizers" in refusal
        assert not moved
    else:
        assert wanted <= moved


def test_a_technique_of_somebody_elses_is_checked_too() -> None:
    class Extra(Technique):
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
