"""Multi-token prediction: a second loss, in training only, for the token after the next one (MTP of DeepSeek-V3).

    loss <- loss + weight * mean_t -log p(x[t + 2] | h[t], x[t + 1]),    see lit_efficient.models.networks.next_depth

Saves: training tokens to the same loss, according to the papers, for large models
Costs: one more block and one more pass of the output head in each step: 1 / depth of the network's time, and the
    logits a second time (by chunks with ChunkedCrossEntropy); the block trains and is not exported
Source: DeepSeek-AI (2024), https://arxiv.org/abs/2412.19437; Gloeckle et al. (2024), https://arxiv.org/abs/2404.19737
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lit_efficient.declaration import Phase
from lit_efficient.errors import ConfigurationError, ConflictError, check_number, refusal
from lit_efficient.losses.chunked_cross_entropy import TokenLoss
from lit_efficient.losses.deferred_logits import chunked_mean, output_head, takes_labels, width_of
from lit_efficient.losses.next_token import IGNORE, sample_means, targets_of, token_losses
from lit_efficient.mechanisms.alignment import Alignment, Call, mean
from lit_efficient.models.networks.next_depth import NextDepth, positions_after_padding, second_targets
from lit_efficient.models.probes.output_head import OutputHead, check_head, scaled_head
from lit_efficient.traits import Trait


class MultiTokenPrediction(Alignment):
    """Train a language model to predict the token after the next one, too, with one more transformer block.

    The block reads the hidden states before the output head and the embedding of the next token. It shares embedding
    and head with the network, which may be this package's GPT or a causal model of transformers. Targets are the labels
    of the batch. In a batch without labels they are the tokens that ``attention_mask`` does not leave out. Documents of
    packed rows are separated by ``position_ids``, and padding on the left by ``attention_mask``. Exports and validation
    are those of the network alone. `TokenWeightedAccumulation` weighs the second loss of a micro-batch by the number of
    its first targets, which is nearly that of the second ones.

    Args:
        weight: Weight of the second loss, above 0; DeepSeek-V3 uses 0.3, and 0.1 at the end.
        num_heads: Attention heads of the block; its width must be a multiple of twice their number. ``None``: the
            network's own number.
        stop_at: Optimizer step from which on the block is not computed; ``None`` for never.
        seed: Seed of the block's weights.

    Raises:
        ConfigurationError: For an argument out of range, and if the module has no causal language model.
        ConflictError: With manual optimization.
    """

    phase = Phase.FREEZE
    heads_name = "multi_token_prediction_heads"
    traits = frozenset({Trait.TRAINING_ONLY})
    reasons: ClassVar[dict[Trait, str]] = {
        Trait.NEEDS_WHOLE_ROWS: "its block attends to all tokens of a row, and predicts beyond the end of a slice"
    }
    conflicts: ClassVar[dict[str, str]] = {
        "PromptTuning": "virtual tokens change the places of the hidden states: use PrefixTuning"
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "a second loss for each token; for large models")}

    def __init__(
        self, weight: float = 0.3, num_heads: int | None = None, stop_at: int | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        check_number("MultiTokenPrediction", "weight", weight, above=0)
        check_number("MultiTokenPrediction", "num_heads", num_heads, least=1, whole=True, null=True)
        self.teacher = None
        self.weight = weight
        self.num_heads = num_heads
        self.stop_at = stop_at
        self.seed = seed
        self._hidden: list[Tensor] = []  # inputs of the output head in this step
        self._checked: int | None = None  # id of the network whose logits were checked
        self.check_common()

    def find(self, data: object) -> None:
        return None

    def listens_to(self, module: nn.Module) -> list[str]:
        table = _table(_network(module))
        return [next(name for name, part in module.named_modules() if part is table)]

    def build_heads(self, module: nn.Module) -> dict[str, nn.Module]:
        network = _network(module)
        head: Any = output_head(network)
        width, of_tokens = width_of(head), int(_table(network).weight.shape[1])
        if width != of_tokens:
            raise ConflictError(
                f"MultiTokenPrediction: embeddings of width {of_tokens} and hidden states of width {width} before the "
                "output head cannot be joined: it needs equal widths"
            )
        heads = self.num_heads or _heads_of(network)
        if width % (2 * heads):
            raise refusal("MultiTokenPrediction", "num_heads", f"a number whose double divides {width}", heads)
        return {"0": NextDepth(width, heads)}

    def watch_step(self, module: nn.Module, batch: object) -> AbstractContextManager[None] | None:
        """Check before the first step that the factor and the soft cap of the network's logits are known."""
        network = _network(module)
        if self._checked != id(network) and not self.worst_case and _is_transformers(network):
            table = _table(network).weight
            check_head(network, {"input_ids": torch.arange(4, device=table.device)[None] % len(table)})
            self._checked = id(network)
        return super().watch_step(module, batch)

    @contextmanager
    def _watched(self, module: nn.Module) -> Iterator[None]:
        head: Any = output_head(_network(module))
        self._hidden = []

        def note(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            states = arguments[0]
            # ChunkedCrossEntropy calls the head again, with the same states and with parts of them.
            if isinstance(states, Tensor) and not any(states is one for one in self._hidden):
                self._hidden.append(states)

        with super()._watched(module), head.register_forward_pre_hook(note):
            yield

    def term(self, calls: Mapping[str, list[Call]], output: object, module: nn.Module, batch: object) -> Tensor:
        """Return the loss of the second tokens."""
        (embedded,) = calls.values()
        shapes = {arguments[0].shape for arguments, _, _ in embedded}
        hidden = [states for states in self._hidden if states.shape[:-1] in shapes]
        self._hidden = []
        if not embedded or len(hidden) != len(embedded):
            raise ConfigurationError(
                f"MultiTokenPrediction: training_step ran the token embedding {len(embedded)} times and the output "
                f"head {len(hidden)} times, and needs pairs of both, with as many tokens"
            )
        network: Any = _network(module)
        head: Any = output_head(network)
        probed = scaled_head(network) if _is_transformers(network) else OutputHead(head)
        each = TokenLoss(softcap=probed.softcap, logit_scale=probed.scale)
        depth: Any = self.heads(module)["0"]
        terms = []
        for ((ids, *_), _, embeddings), states in zip(embedded, hidden, strict=True):
            positions, targets = _rows(batch, ids)
            inner = depth(states, embeddings, positions)
            second = second_targets(targets, positions)
            if hasattr(network, "chunked_loss"):  # set by ChunkedCrossEntropy
                terms.append(chunked_mean(network, inner, second, each))
            else:
                terms.append(sample_means(token_losses(probed(inner), second), second)[0])
        return mean(terms)

    def _described(self) -> str:
        return "the token after the next one"

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_end(trainer, pl_module)
        self._hidden = []


def _network(module: nn.Module) -> nn.Module:
    """Return the causal language model in a module."""
    found = [part for part in module.modules() if takes_labels(part) or hasattr(part, "chunked_loss")]
    if not found:
        raise ConfigurationError(
            f"MultiTokenPrediction: {type(module).__name__} has no causal language model that takes labels (a "
            "transformers ...ForCausalLM, GPT, or a network with a head, forward(..., labels) and loss_function = "
            "token_losses)"
        )
    return found[0]


def _is_transformers(network: nn.Module) -> bool:
    return hasattr(getattr(network, "config", None), "get_text_config")


def _table(network: Any) -> Any:
    """Return the embedding of the tokens."""
    if hasattr(type(network), "get_input_embeddings"):
        return network.get_input_embeddings()
    return next(part for part in network.modules() if isinstance(part, nn.Embedding))


def _heads_of(network: Any) -> int:
    if _is_transformers(network):
        return int(network.config.get_text_config().num_attention_heads)
    return int(getattr(getattr(network, "config", None), "num_heads", 1))


def _rows(batch: object, ids: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return the positions of packed documents, if there are any, and the token that each position predicts."""
    if not isinstance(batch, Mapping):
        return None, targets_of({"labels": ids})
    positions = batch.get("position_ids")
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        mask = None
    if positions is None and mask is not None and not bool(mask[:, 0].all()):
        positions = positions_after_padding(mask)
    if not batch.keys() & {"labels", "shift_labels"}:
        if mask is not None:
            ids = ids.masked_fill(mask == 0, IGNORE)
        return positions, targets_of({"labels": ids})
    return positions, targets_of(batch)
