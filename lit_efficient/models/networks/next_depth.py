"""Multi-token prediction: one more depth predicts the token after the next one (DeepSeek-V3, MTP with D = 1).

    h'[t] = Block(W [RMSNorm(h[t]); RMSNorm(E(x[t + 1]))])
    loss = mean_t -log softmax(head(RMSNorm(h'[t])))[x[t + 2]]

h: hidden states before the output head; E and head: the network's own embedding and output head.
Source: DeepSeek-AI (2024), https://arxiv.org/abs/2412.19437, section 2.2; Gloeckle et al. (2024),
https://arxiv.org/abs/2404.19737, which predict with parallel heads, without the embedding
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.losses.next_token import IGNORE
from lit_efficient.models.networks.document_attention import attend_documents, document_starts
from lit_efficient.models.networks.gpt import packed_layout, rotary_table, rotate
from lit_efficient.surgery import NewLayer, StaysFloat32

_THETA = 10_000.0


def second_targets(targets: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Return the token after the one that each position predicts, ``[B, T]``, `IGNORE` at the end of a document.

    Args:
        targets: ``[B, T]``: ``targets[b, t]`` is the token after position ``t``.
        position_ids: ``[B, T]``, counted from 0 in every document of a packed row.
    """
    second = F.pad(targets[:, 1:], (0, 1), value=IGNORE)
    if position_ids is None:
        return second
    starts = document_starts(position_ids)
    last = starts[:, -1:]
    later = torch.cat((starts, last, last), 1)[:, 2:]
    return second.masked_fill(later != starts, IGNORE)


def positions_after_padding(attention_mask: Tensor) -> Tensor:
    """Return ``position_ids`` ``[B, T]`` in which padding on the left is a document of its own.

    Example:
        >>> positions_after_padding(torch.tensor([[0, 0, 1, 1]]))
        tensor([[0, 1, 0, 1]])
    """
    begun = attention_mask.cumsum(1) > 0
    index = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return torch.where(begun, index - (~begun).sum(1, keepdim=True), index)


class NextDepth(StaysFloat32, NewLayer):
    """The additional depth: a projection of both inputs, a block of this package's GPT, and a norm.

    It has no submodules, so that techniques that change blocks, norms or linear layers leave it as it is.

    Args:
        dim: Width of the hidden states.
        num_heads: Number of attention heads; ``dim`` is a multiple of twice the number.
    """

    float32 = ("",)
    projection: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        hidden = -(-8 * dim // (3 * 32)) * 32
        self.scales = nn.Parameter(torch.ones(5, dim))  # of the norms: hidden, token, attention, MLP, output
        shapes = {"projection": (dim, 2 * dim), "query": (dim, dim), "key": (dim, dim), "value": (dim, dim)}
        shapes |= {"out": (dim, dim), "gate": (hidden, dim), "up": (hidden, dim), "down": (dim, hidden)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.02))

    def forward(self, hidden: Tensor, embeddings: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return the input of the output head ``[B, T, D]``.

        Args:
            hidden: Hidden states of the network ``[B, T, D]``.
            embeddings: Embeddings of the tokens at the same positions ``[B, T, D]``. The last position has no next
                token, and its result is of no use.
            position_ids: ``[B, T]``, counted from 0 in every document of a packed row.
        """
        kind = self.projection.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            kind = hidden.dtype
        following = embeddings.roll(-1, 1)
        joined = torch.cat((self._norm(hidden.to(kind), 0), self._norm(following.to(kind), 1)), -1)
        x = F.linear(joined, self.projection)
        x = x + self._attend(self._norm(x, 2), position_ids)
        inner = self._norm(x, 3)
        x = x + F.linear(F.silu(F.linear(inner, self.gate)) * F.linear(inner, self.up), self.down)
        return self._norm(x, 4).to(hidden.dtype)

    def _norm(self, x: Tensor, number: int) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.scales[number].to(x.dtype), 1e-5)

    def _attend(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        query, key, value = (
            F.linear(x, matrix).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for matrix in (self.query, self.key, self.value)
        )  # (B, heads, T, head_dim)
        length, width = query.shape[2:]
        if position_ids is None:
            table = rotary_table(0, length, width, _THETA, x.device)
            mixed = F.scaled_dot_product_attention(rotate(query, table), rotate(key, table), value, is_causal=True)
        else:
            table, starts = packed_layout(position_ids, length, width, _THETA)
            mixed = attend_documents(rotate(query, table), rotate(key, table), value, starts)
        return F.linear(mixed.transpose(1, 2).flatten(2), self.out)
