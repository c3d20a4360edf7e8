"""What techniques refuse of the network is said before data is prepared, and only where it is certain."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lit_efficient import ConfigurationError, LoRA, ReplaceHead
from lit_efficient.cli.rehearsal import rehearse
from lit_efficient.protocol import builds_no_layers
from lit_efficient.testing import trainer
from tests.cli.toy_runs import refused
from tests.contract.table import NAMES, case, make_all

WRONG = {
    "LoRA": "targets=[no_such]",
    "IA3": "targets=[no_such] --trainer.callbacks.feedforward=[no_such]",
    "ReplaceHead": "at=no_such",
    "KeepFloat32": "modules=[no_such]",
}


@pytest.mark.parametrize("name", WRONG)
def test_before_data(name, capsys):
    more = ["--trainer.callbacks.num_outputs=3"] if name == "ReplaceHead" else []
    words = [f"--trainer.callbacks+={name}", *f"--trainer.callbacks.{WRONG[name]}".split(), *more]
    assert "no_such" in refused(capsys, *words)  # which asserts that no data was touched


def test_network_of_configure_model(capsys):
    words = ["--trainer.callbacks+=LoRA", "--trainer.callbacks.targets=[no_such]"]
    assert "net.0" in refused(capsys, "--model.late=true", *words)


@pytest.mark.parametrize("name", NAMES)
def test_techniques_on_their_toys(name):
    """None is refused that a fit takes, and a fit finds everything as it was."""
    chosen = case(name)
    module, techniques = chosen.toy(), make_all(name)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    kinds, random, records = [type(part) for part in module.modules()], torch.get_rng_state(), techniques[0].record()
    rehearse(trainer(techniques, **chosen.trainer), module, None)
    assert [type(part) for part in module.modules()] == kinds
    assert module.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert techniques[0].record() == records


class SetUp(LightningModule):
    """Has its layers from ``setup``."""

    def setup(self, stage):
        self.net = nn.Linear(2, 2)


class Marked(LightningModule):
    """Has layers, and a ``setup`` that adds none."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)

    @builds_no_layers
    def setup(self, stage):
        raise AssertionError("it is not called")


class Inherits(Marked):
    """Has another ``setup``."""

    def setup(self, stage):
        self.more = nn.Linear(2, 2)


class WantsValues(LightningModule):
    """Cannot be built without weights."""

    def configure_model(self):
        if float(torch.zeros(1)):
            self.net = nn.Linear(2, 2)


@pytest.mark.parametrize("kind", [SetUp, Inherits, WantsValues])
def test_nothing_that_is_not_certain(kind):
    rehearse(trainer([LoRA(targets=["more"])]), kind(), None)


def test_marked_setup():
    with pytest.raises(ConfigurationError, match="no_such"):
        rehearse(trainer([LoRA(targets=["no_such"])]), Marked(), None)


@pytest.mark.parametrize("make", [lambda: LoRA(targets=["net"]), lambda: ReplaceHead(num_outputs=3)])
def test_that_there_are_no_weights_yet_is_no_fault(make):
    rehearse(trainer([make()]), Marked(), None)
