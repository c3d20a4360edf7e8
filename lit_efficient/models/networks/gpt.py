"""Small modern GPT: a decoder-only transformer with RMSNorm, rotary positions, SwiGLU and grouped-query attention.

    x = x + Attention(RMSNorm(x));    x = x + W_down(silu(W_gate h) * W_up h),  h = RMSNorm(x)

It computes the same function as a Llama. The layout of heads is that of Llama's published weights: a rotary pair is one
feature of each half of a head.
Sources: RMSNorm https://arxiv.org/abs/1910.07467, rotary https://arxiv.org/abs/2104.09864, SwiGLU
https://arxiv.org/abs/2002.05202, grouped-query attention https://arxiv.org/abs/2305.13245, tied embeddings
https://arxiv.org/abs/1608.05859, scaled residual initialisation: GPT-2.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.distributed.row_slices import own_positions
from lit_efficient.errors import ConfigurationError, check_number, checks_types, refusal
from lit_efficient.losses.next_token import token_losses
from lit_efficient.models.generation.sampling import sample_token
from lit_efficient.models.networks.document_attention import attend_documents, document_starts, repeated_heads
from lit_efficient.models.probes.modes import evaluating
from lit_efficient.surgery import in_autocast_dtype


@checks_types
@dataclass(frozen=True)
class GPTConstants:
    """Constants of a `GPT` that rarely change.

    Args:
        rope_theta: base of the rotary wavelengths.
        norm_eps: added to the mean square in RMSNorm.
    """

    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_number("GPTConfig", "constants.rope_theta", self.rope_theta, above=0)
        check_number("GPTConfig", "constants.norm_eps", self.norm_eps, above=0)


@checks_types
@dataclass(frozen=True)
class GPTConfig:
    """Sizes and options of a `GPT`.

    Args:
        vocab_size: number of token ids; None takes it from the data.
        dim: width of the residual stream; divisible by ``num_heads``.
        depth: number of blocks, at most 10,000.
        num_heads: number of query heads; ``dim / num_heads`` must be even, because rotary positions rotate pairs of
            features.
        num_kv_heads: number of key and value heads, a divisor of ``num_heads``; None means ``num_heads``. Fewer heads
            make the key-value cache smaller by ``num_heads / num_kv_heads``.
        hidden_dim: width inside the SwiGLU; None means ``8/3 dim`` rounded up to a multiple of 32, which has as many
            parameters as the usual two-matrix MLP of width ``4 dim``.
        max_length: longest sequence in tokens.
        dropout: dropout rate of the outputs of attention and MLP, in [0, 1).
        tie_embeddings: share one matrix between the embedding and the head.
        constants: constants of the rotary positions and of RMSNorm.
    """

    draws_weights: ClassVar[bool] = True  # weights are random: there is no file to read

    vocab_size: int | None = None
    dim: int = 256
    depth: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    hidden_dim: int | None = None
    max_length: int = 1024
    dropout: float = 0.0
    tie_embeddings: bool = True
    constants: GPTConstants = GPTConstants()

    def __post_init__(self) -> None:
        # Building more blocks takes long, even without weights.
        check_number("GPTConfig", "depth", self.depth, least=1, most=10_000, whole=True)
        for name in ("vocab_size", "dim", "num_heads", "num_kv_heads", "hidden_dim", "max_length"):
            null = name in ("vocab_size", "num_kv_heads", "hidden_dim")
            check_number("GPTConfig", name, getattr(self, name), least=1, whole=True, null=null)
        if self.dim % (2 * self.num_heads):
            allowed = (
                f"a multiple of 2 * num_heads = {2 * self.num_heads} (rotary positions rotate pairs within a head)"
            )
            raise refusal("GPTConfig", "dim", allowed, self.dim)
        if self.num_heads % self.kv_heads:
            raise refusal("GPTConfig", "num_kv_heads", f"a divisor of num_heads = {self.num_heads}", self.num_kv_heads)
        check_number("GPTConfig", "dropout", self.dropout, least=0, below=1)

    @property
    def head_dim(self) -> int:
        """Return the width of one head."""
        return self.dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Return the number of key and value heads, with None resolved."""
        if self.num_kv_heads is None:
            return self.num_heads
        return self.num_kv_heads

    @property
    def mlp_dim(self) -> int:
        """Return the width inside the SwiGLU: ``hidden_dim``, or the default width if it is ``None``."""
        if self.hidden_dim is None:
            return -(-8 * self.dim // (3 * 32)) * 32
        return self.hidden_dim


def rotary_table(start: int, stop: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Return cosines and sines for the positions ``start`` to ``stop - 1``.

    They are computed in float32 in every call. A buffer would be rounded by ``.to(bfloat16)``, which merges
    neighbouring positions beyond 256, and would stay empty when a model built on the meta device is filled from a
    checkpoint.

    Returns:
        ``[1, 2, stop - start, head_dim]``, float32: cosines for both halves of a head, and sines, which are negative
        for the first half. The leading 1 prevents techniques from taking it for a batch of two.
    """
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angle = torch.outer(torch.arange(start, stop, dtype=torch.float32, device=device), frequency)
    cos = angle.cos()
    sin = angle.sin()
    return torch.cat((cos, cos, -sin, sin), dim=-1).unflatten(-1, (2, head_dim)).transpose(0, 1)[None]


def packed_layout(position_ids: Tensor, length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return the rotary table of packed rows, and where their documents start.

    Args:
        position_ids: ``[B, T]``, counted from 0 in every document.
        length: length of the rows, or of this process's slices of them (`own_slices`).
        head_dim: width of one head.
        theta: base of the rotary wavelengths.

    Returns:
        The table for `rotate` ``[B, 2, 1, length, head_dim]``, and `document_starts` ``[B, T]``.
    """
    whole, device = position_ids.shape[1], position_ids.device
    own = position_ids
    if length != whole:
        own = position_ids[:, own_positions(whole, device)]
    table = rotary_table(0, whole, head_dim, theta, device)[0][:, own]  # (2, B, length, head_dim)
    return table.transpose(0, 1).unsqueeze(2), document_starts(position_ids)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate each pair ``(x[i], x[i + head_dim / 2])`` by the angle of its position.

    Args:
        x: queries or keys ``[B, heads, T, head_dim]``.
        table: `rotary_table` ``[1, 2, T, head_dim]``, or one table per row ``[B, 2, T, head_dim]`` or ``[B, 2, 1, T,
            head_dim]``.

    Returns:
        Tensor of the shape and format of ``x``.
    """
    if table.ndim == 4:
        table = table.unsqueeze(2)
    cos, sin = table.to(x.dtype).unbind(1)
    a, b = x.chunk(2, dim=-1)
    # Operators on whole heads: four launches on a GPU, forward and backward, and not seven and eight on halves.
    return x * cos + torch.cat((b, a), dim=-1) * sin


def only_kept(mask: Tensor, kept: Tensor) -> Tensor:
    """Return ``mask`` without the keys that are not kept. Each query still sees its own key, so that no row is empty.

    Args:
        mask: True, or a number that is not very low, where a query sees a key: [T, S] or [B or 1, H or 1, T, S]. The
            queries are the last T of the S tokens.
        kept: [B, S] bool.

    Returns:
        [B, H or 1, T, S], in the format of ``mask``.
    """
    if mask.ndim != 4:
        mask = mask[None, None]
    queries, keys = mask.shape[-2:]
    own = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril(keys - queries)
    own = own.triu(keys - queries)
    allowed = kept[:, None, None, :] | own
    if mask.dtype == torch.bool:
        return (mask & allowed) | own
    low = torch.finfo(mask.dtype).min
    return torch.where(own, torch.zeros_like(mask), torch.where(allowed, mask, low))


class KVCache:
    """Keys and values of one block for the tokens seen so far.

    Args:
        max_length: maximum number of tokens. The first `append` allocates memory for all of them.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        # Keys that later queries may see, [B, length] bool, including the tokens of the next append. None: all.
        self.kept: Tensor | None = None
        # Positions of the tokens of the next append, [B, T]. None: they continue the cache's length. The network reads
        # those of its first block.
        self.positions: Tensor | None = None
        self.stores: tuple[Tensor, Tensor] | None = None  # keys and values, [B, heads, max_length, head_dim] each

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values ``[B, heads, T, head_dim]`` and return all so far, ``[B, heads, length,
        head_dim]``.
        """
        if self.stores is None:
            self.stores = (_empty(key, self.max_length), _empty(value, self.max_length))
        stop = self.length + key.shape[2]
        keys, values = self.stores
        keys[:, :, self.length : stop] = key
        values[:, :, self.length : stop] = value
        self.length = stop
        return keys[:, :, :stop], values[:, :, :stop]

    def zeros(self, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of ``length`` tokens, all zero. The cache must hold tokens already."""
        assert self.stores is not None
        keys, values = self.stores
        return torch.zeros_like(keys[:, :, :length]), torch.zeros_like(values[:, :, :length])


def _empty(like: Tensor, length: int) -> Tensor:
    batch, heads, _, head_dim = like.shape
    return like.new_empty(batch, heads, length, head_dim)


class GPTAttention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.kv_heads != config.num_heads
        self.dropout = config.dropout
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotary: Tensor, cache: KVCache | None = None, starts: Tensor | None = None) -> Tensor:
        """Attend from ``x`` ``[B, T, D]`` to earlier tokens, including those in ``cache``, which precede ``x``.

        With ``starts``, the `document_starts` ``[B, T]`` of whole rows, tokens see their own document only.
        """
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )  # (B, heads, T, head_dim)
        query = rotate(query, rotary)
        key = rotate(key, rotary)
        if starts is not None:
            mixed = attend_documents(query, key, value, starts)
        else:
            past = 0
            kept = None
            if cache is not None:
                past = cache.length
                kept = getattr(cache, "kept", None)  # a learned prefix in the place of a cache has none
                key, value = cache.append(key, value)
            mixed = self._attend(query, key, value, past, kept)
        return F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, past: int, kept: Tensor | None = None) -> Tensor:
        length = query.shape[2]
        mask = None
        # is_causal aligns the first query with the first key, which is right only without earlier tokens.
        if (past and length > 1) or kept is not None:
            mask = torch.ones(length, past + length, dtype=torch.bool, device=query.device).tril(past)
            if kept is not None:
                mask = only_kept(mask, kept)
            if self.grouped:
                # CUDA's kernel for masks needs one key head per query head. Otherwise torch stores all scores.
                key, value = repeated_heads(query, key, value)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=past == 0 and length > 1 and mask is None,
            enable_gqa=self.grouped and mask is None,
        )


class SwiGLU(nn.Module):
    """Gated MLP ``W_down(silu(W_gate x) * W_up x)``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.gate = nn.Linear(config.dim, config.mlp_dim, bias=False)
        self.up = nn.Linear(config.dim, config.mlp_dim, bias=False)
        self.down = nn.Linear(config.mlp_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, T, D]`` to ``[B, T, D]``."""
        return F.dropout(self.down(F.silu(self.gate(x)) * self.up(x)), self.dropout, self.training)


class GPTBlock(nn.Module):
    """Residual block: attention, then MLP, each after its own RMSNorm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.constants.norm_eps)
        self.attention = GPTAttention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, config.constants.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, rotary: Tensor, cache: KVCache | None = None, starts: Tensor | None = None) -> Tensor:
        """Add both residuals to ``x`` ``[B, T, D]`` and keep its shape. ``starts`` is as in `GPTAttention`."""
        # Autocast computes norms in float32 on some devices. Without the casts here, each linear layer that follows
        # would cast the norm's output for itself, and keep its own copy for the backward pass.
        x = x + self.attention(in_autocast_dtype(self.attention_norm(x)), rotary, cache, starts)
        return x + self.mlp(in_autocast_dtype(self.mlp_norm(x)))


class GPT(nn.Module):
    """Decoder-only language model.

    Args:
        config: sizes and options; ``vocab_size`` must be a number here.
    """

    loss_function = staticmethod(token_losses)
    # Division of the layers among processes, read by distributed/tensor_parallel.
    tp_plan: ClassVar[dict[str, str]] = {
        "embedding": "embedding_rowwise",
        **{f"blocks.*.attention.{name}": "colwise" for name in ("query", "key", "value")},
        "blocks.*.attention.out": "rowwise",
        **{f"blocks.*.mlp.{name}": "colwise" for name in ("gate", "up")},
        "blocks.*.mlp.down": "rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise refusal("GPT", "config.vocab_size", "a number to build the network", None)
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.depth))
        self.norm = nn.RMSNorm(config.dim, config.constants.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.init_weights()

    def get_output_embeddings(self) -> nn.Linear:
        """Return the head, as causal models of transformers do."""
        return self.head

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights again from N(0, 0.02^2).

        The standard deviation of the ``2 * depth`` projections into the residual stream is divided by the root of that
        number, so that the variance at the top of the stream does not depend on the depth.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()
        for block in self.blocks:
            assert isinstance(block, GPTBlock)
            for projection in (block.attention.out, block.mlp.down):
                nn.init.normal_(projection.weight, std=0.02 / (2 * self.config.depth) ** 0.5)

    def features(
        self, input_ids: Tensor, cache: list[KVCache] | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states before the head, for losses that never hold all logits.

        Args:
            input_ids: ``[B, T]``.
            cache: one `KVCache` per block; ``input_ids`` continue its tokens.
            position_ids: ``[B, T]``, counted from 0 in every document of a packed row. Documents do not see each other.
                Where ``input_ids`` are slices of rows (`own_slices`), the positions of the whole rows. Not together
                with ``cache``.

        Returns:
            ``[B, T, D]``; ``head`` maps them to logits.

        Raises:
            ConfigurationError: If the tokens exceed ``max_length``, or for ``position_ids`` together with ``cache``.
        """
        start = cache[0].length if cache else 0
        whole = input_ids if position_ids is None else position_ids  # input_ids may be slices of rows
        stop = start + whole.shape[1]
        if stop > self.config.max_length:
            raise ConfigurationError(
                f"GPT: input_ids can hold at most max_length = {self.config.max_length} tokens, got {stop}."
            )
        if position_ids is not None and cache is not None:
            raise ConfigurationError("GPT: position_ids of packed documents cannot be combined with a cache.")
        x = self.embedding(input_ids)
        theta = self.config.constants.rope_theta
        if position_ids is not None:
            rotary, starts = packed_layout(position_ids, input_ids.shape[1], self.config.head_dim, theta)
            rotary = rotary.to(in_autocast_dtype(x).dtype)
            for block in self.blocks:
                x = block(x, rotary, None, starts)
            return in_autocast_dtype(self.norm(x))
        positions = getattr(cache[0], "positions", None) if cache else None  # a learned prefix has none
        if positions is not None:
            start = 0
        rotary = rotary_table(start, stop, self.config.head_dim, theta, input_ids.device)
        if positions is not None:
            rotary = rotary[0][:, positions].transpose(0, 1)  # (B, 2, T, head_dim)
        rotary = rotary.to(in_autocast_dtype(x).dtype)  # once for all blocks
        for index, block in enumerate(self.blocks):
            x = block(x, rotary) if cache is None else block(x, rotary, cache[index])
        return in_autocast_dtype(self.norm(x))

    def forward(
        self,
        input_ids: Tensor,
        cache: list[KVCache] | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Return the logits ``[B, T, V]`` of the next token for ``input_ids`` ``[B, T]``.

        With ``labels`` ``[B, T]``, already shifted, return the `token_losses` ``[B, T]`` instead. The other arguments
        are as in `features`.
        """
        logits = self.head(self.features(input_ids, cache, position_ids))
        if labels is None:
            return logits
        return self.loss_function(logits, labels)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
        use_cache: bool = True,
    ) -> Tensor:
        """Continue ``input_ids`` token by token, without reading or changing the global random state.

        Args:
            input_ids: prompts of equal length ``[B, T]``, T at least 1.
            max_new_tokens: number of tokens to add; ``T + max_new_tokens`` is at most ``max_length``.
            temperature: divides the logits; 0 takes the most probable token.
            top_p: draw only among the most probable tokens that together have this probability, in (0, 1].
            generator: source of randomness, on the device of the model; None creates one with seed 0.
            use_cache: keep keys and values, for linear work per token, instead of recomputing them (for checks).

        Returns:
            ``[B, T + max_new_tokens]``, the prompts included.

        Raises:
            ConfigurationError: If prompt and new tokens exceed ``max_length``, or for an empty prompt.
        """
        limit = self.config.max_length
        length = input_ids.shape[1]
        if length < 1 or max_new_tokens < 0 or length + max_new_tokens > limit:
            raise ConfigurationError(
                f"GPT.generate: a prompt of at least 1 token and max_new_tokens together must not exceed max_length = "
                f"{limit}, got {length} and {max_new_tokens}."
            )
        generator = generator or torch.Generator(input_ids.device).manual_seed(0)
        cache = None
        if use_cache:
            cache = [KVCache(length + max_new_tokens) for _ in self.blocks]
        pending = input_ids  # tokens that the cache does not hold yet
        with evaluating(self):
            for _ in range(max_new_tokens):
                # __call__ instead of forward, because hooks must run: one of them gathers sharded parameters.
                logits = self(pending, cache)[:, -1]
                token = sample_token(logits, temperature, top_p, generator)
                input_ids = torch.cat((input_ids, token), dim=1)
                pending = token if use_cache else input_ids
        return input_ids
