"""Each in a fresh process: what is imported first decides nothing."""

import pytest

from tests.internals.leaning import leans_on
from tests.support import run_script

OURS = "from lit_efficient import EMA, Technique"
THEIRS = "import pytorch_lightning as pl"
RUN = """
import torch
from torch.utils.data import DataLoader
torch.set_num_threads(1)

class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.line(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
bases = Technique.__mro__
for several in (False, True):
    ema = EMA(decay=0.5)
    run = pl.Trainer(callbacks=[ema] if several else ema, accelerator="cpu", max_steps=3, **quiet)
    run.fit(module := Line(), DataLoader(torch.ones(6, 2)))
    average = ema.average(module)["line.weight"]
    assert not torch.equal(average, module.line.weight) and average.isfinite().all()
assert Technique.__mro__ is bases
print("averaged")
"""


@pytest.mark.turns(2)
@pytest.mark.parametrize("lines", [[OURS, THEIRS], [THEIRS, OURS]], ids=["ours_first", "theirs_first"])
@leans_on("pytorch_lightning", "Callback", "lightning_trainer")
def test_a_technique_alone_and_in_a_list_is_a_callback_of_the_standalone_package(lines, tmp_path):
    assert "averaged" in run_script("\n".join([*lines, RUN]), tmp_path)


@pytest.mark.turns(2)
@pytest.mark.parametrize("package", ["sys.modules[name] = None", "Path('pytorch_lightning.py').write_text('1 / 0')"])
def test_without_it_or_with_a_broken_one_techniques_are_callbacks_of_lightning(package, tmp_path):
    absent = f"""
import sys
from pathlib import Path
name = "pytorch_lightning"
{package}
sys.path.insert(0, ".")
import lightning.pytorch as pl
{OURS}
"""
    assert "averaged" in run_script(absent + RUN, tmp_path)
