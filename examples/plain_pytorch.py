"""Techniques in a plain PyTorch loop: each technique's formula is a function of tensors.

    python examples/plain_pytorch.py

It uses a chunked loss without full logits, Muon for matrices and AdamW for other weights, and a float32 average.
"""

import torch
from torch import nn

from lit_efficient import MuonAdamW, chunked_cross_entropy, muon_groups
from lit_efficient.mechanisms.averages.weights import decay_at, update_

VOCABULARY, WIDTH, CONTEXT = 512, 64, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(CONTEXT * WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # [N, CONTEXT] -> [N, WIDTH]
        return self.body(self.embedding(ids).flatten(1))


def main(steps: int = 300) -> dict[str, float]:
    torch.manual_seed(0)
    model = Model()
    optimizer = MuonAdamW(muon_groups(model, adamw=("embedding.weight", "head.weight")), lr=5e-3, weight_decay=0.0)
    weights = list(model.parameters())
    averages = [weight.detach().clone() for weight in weights]
    order = torch.randperm(VOCABULARY)  # what follows a token
    losses = []
    for step in range(steps):
        ids = torch.randint(VOCABULARY, (256, CONTEXT))
        loss = chunked_cross_entropy(model(ids), model.head.weight, order[ids[:, -1]], chunk_size=64)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_(averages, [weight.detach() for weight in weights], decay_at(step + 1, decay=0.99))
        losses.append(loss.item())
    return {"first": losses[0], "last": losses[-1]}


if __name__ == "__main__":
    print(main())
