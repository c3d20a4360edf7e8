"""Techniques in a loop of Lightning Fabric: network techniques need no trainer, optimizers and losses are functions.

python examples/fabric_loop.py
"""

import torch
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_efficient import LoRA, StochasticDepth, apply, merge_adapters, to_low_bit


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


def main(epochs: int = 10) -> dict[str, float]:
    seed_everything(0, verbose=False)
    fabric = Fabric(accelerator="cpu", devices=1)
    network = nn.Sequential(*[Block(64) for _ in range(4)], nn.Linear(64, 1))
    for name, report in apply(network, [StochasticDepth(rate=0.2), LoRA(rank=8)]).items():
        fabric.print(f"{name}: {report.summary}")
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    states = to_low_bit(optimizer, bits=8, min_size=256)  # in place: 8-bit states
    model, optimizer = fabric.setup(network, optimizer)

    x = torch.randn(1024, 64)
    rows = TensorDataset(x, torch.sin(2 * x[:, :1]) + x[:, 1:2])
    loader = fabric.setup_dataloaders(DataLoader(rows, batch_size=64, shuffle=True))
    losses = []
    for _ in range(epochs):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    merged = merge_adapters(network)
    assert not any("lora" in name for name in merged.state_dict())
    return {"first": losses[0], "last": losses[-1], "state bytes": float(states.state_bytes)}


if __name__ == "__main__":
    print(main())
