"""Optimizers of other packages: resumed to the bit, with their step size in the logs."""

import copy

import pytest
import torch

from lit_efficient import SpikeGuard
from lit_efficient.cli.signatures import OPTIMIZERS
from lit_efficient.mechanisms.run_figures import rates_of
from tests.callbacks.resume_kit import Tiny, count_exact, equal, fit

RATES = {"CAME": 1e-2, "SOAP": 1e-2}


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


@pytest.mark.filterwarnings("ignore:CAME steps", "ignore:SpikeGuard")
def test_states_wider_than_the_weights_are_resumed_and_put_back_to_the_bit(tmp_path):
    """CAME keeps float32 states of bfloat16 weights, which torch rounds when it loads them."""

    class Module(Tiny):
        def configure_optimizers(self):
            return made("CAME", self.parameters())

        def training_step(self, batch, batch_idx):
            return super().training_step(batch.bfloat16(), batch_idx)

    count, wrong = count_exact(tmp_path, lambda: Module(batch_size=8), max_epochs=2, precision="bf16-true")
    assert (count, wrong) == (6, [])
    module = Module(batch_size=8)
    fit(module, [guard := SpikeGuard("rewind", window=2)], max_steps=3, precision="bf16-true")
    (optimizer,) = module.trainer.optimizers
    guard._keep(module.trainer, module, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    guard._go_back(module, optimizer)
    assert equal(optimizer.state_dict(), before)


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


def test_soap_is_adam_in_the_eigenbases_of_its_preconditioner():
    """The paper's algorithm in float64. The first gradient only sets the bases."""
    p = torch.nn.Parameter(torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    (soap,) = (pytest.importorskip("pytorch_optimizer").SOAP([p], 0.1, (0.9, 0.95), 0.8, 0.1, 1),)
    w, m, v = p.detach().clone(), torch.zeros(5, 5).double(), torch.zeros(5, 5).double()
    grams = bases = None
    for t in range(5):
        g = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(t + 1))
        p.grad = g.clone()
        soap.step()
        if t == 0:
            grams = [0.2 * g @ g.T, 0.2 * g.T @ g]
            bases = [torch.linalg.eigh(gram)[1].flip(1) for gram in grams]
            continue
        left, right = bases
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * (left.T @ g @ right) ** 2
        step = left @ ((left.T @ m @ right) / (v.sqrt() + 1e-8)) @ right.T
        w = (w - 0.1 * (1 - 0.95**t) ** 0.5 / (1 - 0.9**t) * step) * (1 - 0.1 * 0.1)
        grams = [0.8 * old + 0.2 * new for old, new in zip(grams, (g @ g.T, g.T @ g))]
        orders = [(basis * (gram @ basis)).sum(0).argsort(descending=True) for basis, gram in zip(bases, grams)]
        v = v[orders[0]][:, orders[1]]
        products = [(gram @ basis)[:, order] for gram, basis, order in zip(grams, bases, orders)]
        bases = [torch.linalg.qr(product.float())[0].double() for product in products]
    torch.testing.assert_close(p.detach(), w, rtol=1e-4, atol=1e-5)
