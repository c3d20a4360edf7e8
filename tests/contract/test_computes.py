"""A technique that says that a step computes the same with it is one whose training is the same."""

import pytest
import torch

import lit_efficient
from lit_efficient.declaration import Declaration
from tests.contract.table import CASES, NAMES
from tests.support import Toy, convolved, data, trainer, weights

SAME = [name for name in NAMES if getattr(lit_efficient, name).computes == "same"]
# Sums in another order, with no bits to compare; what needs accumulation has a neutral setting nowhere.
ROUNDED_ELSEWHERE = ("ChannelsLast", "ChunkedCrossEntropy", "GradientNoiseScale", "TiledMLP")


def test_what_computes_the_same_keeps_the_bits_or_is_compared_here():
    """Those with a neutral setting are compared with plain training by the contract, bit for bit."""
    assert Declaration.computes == "other"
    without = {name for name in SAME if CASES[name].neutral is None}
    assert without == set(ROUNDED_ELSEWHERE)


@pytest.mark.parametrize("name", ROUNDED_ELSEWHERE)
def test_the_weights_are_those_of_plain_training(name):
    row, trained = CASES[name], []
    for callbacks in ([], [getattr(lit_efficient, name)()]):
        torch.manual_seed(0)
        toy = Toy(network=convolved(row.network) if row.convolution else row.network)
        trainer(max_steps=3, limit_val_batches=0, callbacks=callbacks, **row.trainer).fit(toy, data(), data())
        trained.append(weights(toy))
    for key, value in trained[0].items():
        torch.testing.assert_close(trained[1][key], value, rtol=1e-4, atol=1e-6)
