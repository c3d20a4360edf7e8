"""A network that computes its loss without its logits, whatever its forward does to them on the way.

While the network is called with labels, its head gives back what it was given, as :class:`DeferredLogits`: a promise of
logits that notes the scale and the soft bound (tanh) which the network puts on them. Its ``loss_function`` then calls
the head a second time, with the labels, and the head computes the loss chunk by chunk inside its own call, where hooks
have gathered its parameters. The rest of the forward (auxiliary losses of experts, caches) runs as it is.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.chunked_cross_entropy import (
    TokenLoss,
    chunk_size_of,
    chunked_cross_entropy,
    chunked_head_cross_entropy,
)
from lit_efficient.losses.next_token import token_losses
from lit_efficient.surgery import mix_in, moved


@dataclass(frozen=True)
class ChunkedLoss:
    """How the loss is computed."""

    chunk_size: int | None  # tokens at a time; ``None``: by the device
    backend: str = "auto"  # ``torch``, ``liger`` or ``auto``, as :func:`chunked_cross_entropy` has it
    label_smoothing: float = 0.0  # in training only
    z_loss: float = 0.0  # in training only


class DeferredLogits:
    """Logits that nobody has computed: hidden states [..., H], and what is to be done with the logits.

    ``c * tanh(a * x)`` is the softcap c of the logits x scaled by a c; ``a * x`` is a scale alone. Anything else that
    is asked of it is refused by name.
    """

    def __init__(self, hidden: Tensor, before: float = 1.0, bounded: bool = False, after: float = 1.0) -> None:
        self.hidden, self.before, self.bounded, self.after = hidden, before, bounded, after
        self.device, self.dtype = hidden.device, hidden.dtype  # those of the logits before the loss

    def terms(self, terms: TokenLoss) -> TokenLoss:
        """``terms`` with the scale and the softcap that were noted."""
        if not self.bounded:
            return replace(terms, logit_scale=self.before)
        scale = self.before * self.after
        return replace(terms, softcap=self.after, logit_scale=1.0 if math.isclose(scale, 1, rel_tol=1e-9) else scale)

    def _times(self, factor: Any) -> DeferredLogits:
        if isinstance(factor, Tensor) and (factor.numel() > 1 or factor.requires_grad):
            self._refuse("a factor that is not a constant number")
        factor = float(factor)
        if self.bounded:
            return DeferredLogits(self.hidden, self.before, True, self.after * factor)
        return DeferredLogits(self.hidden, self.before * factor)

    def __mul__(self, factor: Any) -> DeferredLogits:
        return self._times(factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> DeferredLogits:
        return self._times(1 / divisor)

    def tanh(self) -> DeferredLogits:
        """The soft bound, once."""
        if self.bounded:
            self._refuse("a second tanh")
        return DeferredLogits(self.hidden, self.before, bounded=True)

    def float(self) -> DeferredLogits:
        """Itself: the loss is computed in float32 anyway."""
        return self

    def to(self, *_: Any, **__: Any) -> DeferredLogits:
        """As :meth:`float`."""
        return self

    contiguous = float

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> DeferredLogits:
        """The functions of torch that the methods above stand for."""
        methods: dict[Any, Any] = {torch.tanh: cls.tanh, torch.mul: cls.__mul__, torch.div: cls.__truediv__}
        if function not in methods or kwargs or not isinstance(args[0], cls):
            cls._refuse(getattr(function, "__name__", str(function)))
        return methods[function](*args)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(name)

    def __getitem__(self, key: Any) -> Any:
        self._refuse("an index")

    @staticmethod
    def _refuse(what: str) -> Any:
        raise ConfigurationError(
            f"ChunkedCrossEntropy: the network asks for {what} of its logits before it gives them to its loss_function;"
            " only a constant factor and tanh can be put off. Remove the technique, or pass labels=None and call "
            "chunked_cross_entropy on the hidden states"
        )


@dataclass(frozen=True)
class _Request:
    """What a head is asked for on its second call."""

    labels: Tensor  # [N]
    terms: TokenLoss
    how: ChunkedLoss
    reduction: str
    learned: int | None = None  # at most so many of the labels, where the host knows

    def answer(self, head: Any, call: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        plain = plain_linear(head, call)
        tokens = len(hidden) if self.learned is None else self.learned
        size = self.how.chunk_size or chunk_size_of(hidden.device, vocabulary_of(head), tokens)
        how: dict[str, Any] = {"chunk_size": size, "reduction": self.reduction, "backend": self.how.backend}
        how["learned"] = self.learned
        if plain is not None:
            return chunked_cross_entropy(hidden, plain.weight, self.labels, plain.bias, **how, **vars(self.terms))
        trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
        return chunked_head_cross_entropy(call, hidden, self.labels, trained, self.terms, **how)


def plain_linear(head: Any, call: Callable[..., Any]) -> nn.Linear | None:
    """The linear layer that does all of a head's work, if there is one; peft's copy that trains in full is."""
    if getattr(call, "__func__", None) is nn.Linear.forward:
        return head
    if any(base.__name__ == "ModulesToSaveWrapper" for base in type(head).__mro__):
        active = head.active_adapters if not head.disable_adapters else ()
        inner = head.modules_to_save[active[0]] if active else head.original_module
        return inner if type(inner) is nn.Linear else None
    return None


class _DeferringHead:
    _deferring: bool

    def forward(self, x: Tensor, *args: Any, request: _Request | None = None, **kwargs: Any) -> Any:
        """Logits; while the network is called with labels a promise of them, and the loss on request."""
        own = super().forward  # type: ignore[misc]
        if request is not None:
            return request.answer(self, own, x)
        return DeferredLogits(x) if self._deferring else own(x, *args, **kwargs)


class _DeferringNetwork:
    training: bool
    chunked_loss: ChunkedLoss
    chunked_loss_used: bool
    _wanted: dict[str, Any] | None  # of a call of `token_losses`

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network's own; with labels the output holds no logits."""
        own = super().forward  # type: ignore[misc]
        cls: Any = type(self)
        position = _position_of_labels(cls)
        labels = args[position] if position < len(args) else kwargs.get("labels")
        if labels is None:
            return own(*args, **kwargs)
        head: Any = output_head(self)
        head._deferring = True
        try:
            output = own(*args, **kwargs)
        finally:
            head._deferring = False
        if isinstance(output, Mapping):  # transformers' ModelOutput, whose entries cannot be removed
            return type(output)(**{key: value for key, value in output.items() if not _deferred(value)})
        return tuple(value for value in output if not _deferred(value)) if isinstance(output, tuple) else output

    def token_losses(self, targets: Tensor, learned: int | None = None, **inputs: Any) -> tuple[Tensor, Any]:
        """The loss of each token, for who weighs tokens or samples by themselves.

        Args:
            targets: [B, T], already shifted.
            learned: How many of them count at most, where the host knows: a GPU leaves out the others then.
            inputs: Of the network's forward, without labels.

        Returns:
            [B, T], 0 where a target is ignored, and the network's output, whose own loss is not to be used.
        """
        self._wanted = {"targets": targets, "learned": learned}
        try:
            output = self(labels=targets, **inputs)  # type: ignore[operator]
            return self._wanted["losses"], output
        finally:
            self._wanted = None

    @property
    def loss_function(self) -> Callable[..., Tensor]:
        """The network's own, which takes deferred logits, too."""
        own = super().loss_function  # type: ignore[misc]
        return functools.update_wrapper(functools.partial(self._loss, own), own)

    def _loss(
        self,
        own: Callable[..., Tensor],
        logits: Any,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if not _deferred(logits):
            if own is token_losses:
                return own(logits, labels)
            counted = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            return own(logits, labels, vocab_size=vocab_size, shift_labels=shift_labels, **counted, **kwargs)
        self.chunked_loss_used = True
        how = self.chunked_loss
        smoothing, z_loss = (how.label_smoothing, how.z_loss) if self.training else (0.0, 0.0)
        terms = logits.terms(TokenLoss(ignore_index, smoothing, z_loss))
        head: Any = output_head(self)
        if own is token_losses or self._wanted is not None:
            wanted = self._wanted or {"targets": labels, "learned": None}
            targets = wanted["targets"]
            request = _Request(targets.reshape(-1), terms, how, "none", wanted["learned"])
            losses = wanted["losses"] = head(logits.hidden, request=request).view(targets.shape)
            return losses if own is token_losses else losses.detach().mean()
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        flat = shift_labels.reshape(-1).to(logits.device)
        total = head(logits.hidden, request=_Request(flat, terms, how, "sum"))
        if num_items_in_batch is None:
            return total / (flat != ignore_index).sum().clamp(min=1)
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = moved(num_items_in_batch, total.device)
        return total / num_items_in_batch


def _deferred(value: object) -> bool:
    return isinstance(value, DeferredLogits)


@functools.cache
def _position_of_labels(cls: Any) -> int:
    names = list(inspect.signature(cls.forward).parameters)[1:]
    return names.index("labels")


def output_head(network: Any) -> nn.Module | None:
    """The module that turns the hidden states of ``network`` into logits."""
    if hasattr(type(network), "get_output_embeddings"):
        return network.get_output_embeddings()
    head = getattr(network, "head", None)
    return head if isinstance(head, nn.Module) else None


def vocabulary_of(head: Any) -> int:
    """How many logits a head gives."""
    if hasattr(head, "out_features"):
        return int(head.out_features)
    return max(parameter.shape[0] for parameter in head.parameters())


def takes_labels(network: nn.Module) -> bool:
    """Whether :func:`defer` can act: an output head, ``forward(labels=...)``, and a loss that it knows."""
    if not hasattr(type(network), "loss_function") or output_head(network) is None:
        return False
    if "labels" not in inspect.signature(type(network).forward).parameters:
        return False
    own: Any = network.loss_function
    return own is token_losses or shifts_labels(network)


def shifts_labels(network: nn.Module) -> bool:
    """Whether ``network`` is a causal language model of transformers: its loss skips the first label by itself."""
    if not hasattr(type(network), "loss_function") or output_head(network) is None:
        return False
    own: Any = network.loss_function
    return getattr(own, "__name__", None) == "ForCausalLMLoss"


def defer(network: nn.Module, how: ChunkedLoss) -> None:
    """Let ``network``, called with labels, compute its loss chunk by chunk; its output then has no logits."""
    head = output_head(network)
    assert head is not None
    mix_in(head, _DeferringHead, _deferring=False)
    mix_in(network, _DeferringNetwork, chunked_loss=how, chunked_loss_used=False, _wanted=None)
