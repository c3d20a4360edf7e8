"""``average --greedy``: the mean of the files that improve its validation."""

from pathlib import Path

import pytest
import torch

from lit_efficient.__main__ import main
from tests.cli.toy_runs import ALLOW


def test_the_soup_has_the_files_that_improve_the_validation(capsys):
    """The output of each network is its bias, and the loss is its square."""
    assert main(["fit", *ALLOW, "-c", "base.yaml", "--trainer.enable_checkpointing", "true"]) == 0
    checkpoint = torch.load("runs/base/latest/last.ckpt", weights_only=True)
    for name, bias in (("far", 3.0), ("above", 1.0), ("below", -0.8)):
        state = {key: torch.zeros_like(tensor) for key, tensor in checkpoint["state_dict"].items()}
        state["net.1.bias"][:] = bias
        torch.save({**checkpoint, "state_dict": state}, f"{name}.ckpt")
    capsys.readouterr()
    words = ["average", "far.ckpt", "above.ckpt", "below.ckpt", "--output", "soup.ckpt", "--greedy"]
    assert main([*words, *ALLOW, "-c", "base.yaml"]) == 0
    said = capsys.readouterr().out
    assert "val/loss 0.64: below.ckpt\n" in said
    assert "val/loss 0.01: below.ckpt, above.ckpt\n" in said
    assert "Wrote the uniform mean of 2 files to soup.ckpt" in said
    mean = torch.load("soup.ckpt", weights_only=True)["state_dict"]["net.1.bias"]
    assert float(mean) == pytest.approx(0.1)
    assert sorted(path.name for path in Path().glob("*.ckpt")) == ["above.ckpt", "below.ckpt", "far.ckpt", "soup.ckpt"]
    assert main([*words, "--metric", "val/none", *ALLOW, "-c", "base.yaml"]) == 2
    assert "--metric must be one of val/loss, got 'val/none'" in capsys.readouterr().err
