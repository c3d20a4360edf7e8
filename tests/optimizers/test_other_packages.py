"""Optimizers of other packages: resumed to the bit, with their step size in the logs."""

import pytest
import torch

from lit_efficient.cli.signatures import OPTIMIZERS
from lit_efficient.mechanisms.run_figures import rates_of
from tests.callbacks.resume_kit import Tiny, count_exact

RATES = {"CAME": 1e-2}


def made(name, parameters):
    package, _, kind = OPTIMIZERS[name].rpartition(".")
    return getattr(pytest.importorskip(package), kind)(parameters, lr=RATES.get(name, 1.0))


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_is_the_whole_one_to_the_bit(name, tmp_path):
    class Module(Tiny):
        def configure_optimizers(self):
            return made(name, self.parameters())

    count, wrong = count_exact(tmp_path, lambda: Module(batch_size=8), max_epochs=2)
    assert (count, wrong) == (6, [])


def test_the_estimate_is_logged_with_the_rate():
    parameter = torch.nn.Parameter(torch.ones(4))
    groups = [{"params": [parameter], "d": 1e-6}, {"params": [torch.nn.Parameter(torch.ones(1))], "d": 1e-6}]
    assert rates_of([torch.optim.SGD(groups, 1.0)]) == {"lr/0": 1.0, "lr/1": 1.0, "d": 1e-6}
    optimizer = made("Prodigy", [parameter])
    for _ in range(3):
        parameter.grad = torch.full((4,), 0.1)
        optimizer.step()
    assert rates_of([optimizer]) == {"lr": 1.0, "d": pytest.approx(optimizer.param_groups[0]["d"])}
    assert optimizer.param_groups[0]["d"] > 1e-6
