"""Find the best rate of stochastic depth by a sweep of Weights & Biases over the technique's argument.

python examples/wandb_sweep.py           # three runs, recorded offline without a key
python examples/wandb_sweep.py --sweep   # a sweep in your account, with the search of W&B
"""

import sys
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.loggers import WandbLogger
from torch.utils.data import DataLoader
from vision_transformer import Classifier, digits

from lit_efficient import EMA, ExactResume, StochasticDepth

SWEEP: dict[str, Any] = {
    "method": "grid",
    "metric": {"name": "val/accuracy", "goal": "maximize"},
    "parameters": {"rate": {"values": [0.05, 0.1, 0.3]}},
}


def run(rate: float, max_epochs: int = 10, **options: Any) -> float:
    """Train at one rate, and return the accuracy."""
    L.seed_everything(0, verbose=False)
    train, held_out = digits()
    logger = WandbLogger(project="lit_efficient", name=f"stochastic depth {rate}", **options)
    logger.log_hyperparams({"rate": rate})
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        logger=logger,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[StochasticDepth(rate=rate), EMA(decay=0.99), ExactResume()],
    )
    trainer.fit(Classifier(), DataLoader(train, batch_size=64, shuffle=True), DataLoader(held_out, batch_size=297))
    logger.experiment.finish()
    return float(trainer.callback_metrics["val/accuracy"])


def main(max_epochs: int = 10, **options: Any) -> dict[float, float]:
    """Accuracy by rate."""
    return {rate: run(rate, max_epochs, **options) for rate in SWEEP["parameters"]["rate"]["values"]}


if __name__ == "__main__":
    if "--sweep" in sys.argv:
        import wandb

        def one() -> None:
            """A run with what the sweep chose."""
            with wandb.init() as started:
                run(started.config["rate"])

        wandb.agent(wandb.sweep(SWEEP, project="lit_efficient"), one)
    else:
        import os

        print(main(offline="WANDB_API_KEY" not in os.environ))
