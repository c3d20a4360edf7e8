"""Train once with PowerEMA, build averages of several widths from its snapshots, and find the best one.

    python examples/average_afterwards.py

`python -m lit_efficient ema-sweep` does the same for runs from YAML, with a table and a plot.
"""

import tempfile

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader
from vision_transformer import Classifier, digits

from lit_efficient import PowerEMA
from lit_efficient.mechanisms.averages.snapshots import synthesize


def main(max_epochs: int = 10, widths: tuple[float, ...] = (0.03, 0.07, 0.15)) -> dict[float, float]:
    """Accuracy on held-out digits by the width of the average, a share of the run."""
    L.seed_everything(0, verbose=False)
    train, held_out = digits()
    images, labels = held_out.tensors
    module = Classifier()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=max_epochs,
            logger=False,
            enable_checkpointing=False,
            callbacks=[PowerEMA(sigma_rels=(0.05, 0.1), snapshot_every_n_steps=10, dirpath=folder)],
        )
        trainer.fit(module, DataLoader(train, batch_size=64, shuffle=True), DataLoader(held_out, batch_size=297))
        found = {}
        for width, state in zip(widths, synthesize(folder, widths), strict=True):
            module.load_state_dict(state, strict=False)
            with torch.no_grad():
                found[width] = float((module.eval()(images).argmax(-1) == labels).float().mean())
    return found


if __name__ == "__main__":
    for width, accuracy in main().items():
        print(f"width {width:.2f} of the run: accuracy {accuracy:.3f}")
