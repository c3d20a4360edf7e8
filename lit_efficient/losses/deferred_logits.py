"""Let a network compute its loss without computing all its logits, even if its forward changes them before the loss.

While the network is called with labels, its head returns its own input, wrapped in :class:`DeferredLogits`. This
placeholder records the scale and the soft bound (tanh) that the network applies to its logits. The network's
``loss_function`` then calls the head a second time, with the labels, and the head computes the loss chunk by chunk. It
does so inside its own call, because strategies gather the parameters in hooks of that call. The rest of the forward
(auxiliary losses of experts, caches) runs unchanged.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

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
from lit_efficient.losses.token_weighting import TokenWeighting
from lit_efficient.surgery import mix_in, moved


@dataclass(frozen=True)
class ChunkedLoss:
    """Settings of the chunked loss."""

    chunk_size: int | None  # tokens in a chunk; ``None`` chooses it for the device
    backend: str = "auto"  # ``torch``, ``liger`` or ``auto``, as in :func:`chunked_cross_entropy`
    label_smoothing: float = 0.0  # in training only
    z_loss: float = 0.0  # in training only


class DeferredLogits:
    """Placeholder for logits: the hidden states, and the operations that are to be applied to the logits.

    It records a scale, ``a * x``, and a softcap, ``c * tanh(a * x)``. Every other operation raises an error that names
    it.

    Args:
        hidden: Hidden states [..., H].
        before: The factor a.
        bounded: Whether tanh has been applied.
        after: The factor c.
    """

    def __init__(self, hidden: Tensor, before: float = 1.0, bounded: bool = False, after: float = 1.0) -> None:
        self.hidden = hidden
        self.before = before
        self.bounded = bounded
        self.after = after
        self.device = hidden.device
        self.dtype = hidden.dtype

    def terms(self, terms: TokenLoss) -> TokenLoss:
        """Return ``terms`` with the recorded scale and softcap."""
        if not self.bounded:
            return replace(terms, logit_scale=self.before)
        scale = self.before * self.after
        if math.isclose(scale, 1, rel_tol=1e-9):  # the usual softcap, x / c before tanh, up to rounding
            scale = 1.0
        return replace(terms, softcap=self.after, logit_scale=scale)

    def _times(self, factor: Any) -> DeferredLogits:
        if isinstance(factor, Tensor) and (factor.numel() > 1 or factor.requires_grad):
            self._refuse("a factor that is not a constant number")
        factor = float(factor)
        if self.bounded:
            return DeferredLogits(self.hidden, self.before, True, self.after * factor)
        return DeferredLogits(self.hidden, self.before * factor)

    def __mul__(self, factor: object) -> DeferredLogits:
        return self._times(factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> DeferredLogits:
        return self._times(1 / divisor)

    def tanh(self) -> DeferredLogits:
        """Record the soft bound. A second one raises an error."""
        if self.bounded:
            self._refuse("a second tanh")
        return DeferredLogits(self.hidden, self.before, bounded=True)

    def float(self) -> DeferredLogits:
        """Return itself: the loss is always computed in float32."""
        return self

    def to(self, *_: object, **__: object) -> DeferredLogits:
        """Return itself, as :meth:`float` does."""
        return self

    contiguous = float

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> DeferredLogits:
        methods: dict[object, Callable[..., DeferredLogits]] = {
            torch.tanh: cls.tanh,
            torch.mul: cls.__mul__,
            torch.div: cls.__truediv__,
        }
        if function not in methods or kwargs or not isinstance(args[0], cls):
            cls._refuse(getattr(function, "__name__", str(function)))
        return methods[function](*args)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(name)

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse("an index")

    @staticmethod
    def _refuse(operation: str) -> NoReturn:
        raise ConfigurationError(
            f"ChunkedCrossEntropy: the network applies {operation} to its logits before it passes them to its "
            "loss_function. Only a constant factor and tanh are supported there. Remove the technique, or call the "
            "network with labels=None and apply chunked_cross_entropy to the hidden states"
        )


@dataclass(frozen=True)
class _LossRequest:
    """Arguments of the second call of a head, in which it computes the loss."""

    labels: Tensor  # [N]
    terms: TokenLoss
    settings: ChunkedLoss
    reduction: str
    learned: int | None = None  # upper bound on the number of labels that count, if the host knows it

    def compute(self, head: nn.Module, call: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Return the loss.

        Args:
            head: The output head.
            call: Forward of the head.
            hidden: [..., H].
        """
        hidden = hidden.reshape(-1, hidden.shape[-1])
        tokens = len(hidden) if self.learned is None else self.learned
        trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
        chunk_size = self.settings.chunk_size
        if chunk_size is None:
            vocabulary = vocabulary_of(head)
            chunk_size = chunk_size_of(hidden.device, vocabulary, tokens, trains=bool(trained), width=width_of(head))
        options: dict[str, Any] = {
            "chunk_size": chunk_size,
            "reduction": self.reduction,
            "backend": self.settings.backend,
            "learned": self.learned,
        }
        plain = plain_linear(head, call)
        if plain is not None:
            return chunked_cross_entropy(hidden, plain.weight, self.labels, plain.bias, **options, **vars(self.terms))
        return chunked_head_cross_entropy(call, hidden, self.labels, trained, self.terms, **options)


def plain_linear(head: Any, call: Callable[..., object]) -> nn.Linear | None:
    """Return the linear layer that does all the work of a head, or ``None`` if the head does more.

    A head that peft wraps to train it in full (``modules_to_save``) counts as its inner linear layer.
    """
    if getattr(call, "__func__", None) is nn.Linear.forward:
        return head
    if any(base.__name__ == "ModulesToSaveWrapper" for base in type(head).__mro__):
        inner = head.original_module
        if head.active_adapters and not head.disable_adapters:
            inner = head.modules_to_save[head.active_adapters[0]]
        if type(inner) is nn.Linear:
            return inner
    return None


class _DeferringHead:
    """Mix-in of an output head that returns :class:`DeferredLogits` while its network is called with labels."""

    _deferring: bool

    def forward(self, x: Tensor, *args: object, request: _LossRequest | None = None, **kwargs: object) -> Any:
        own = super().forward  # type: ignore[misc]
        if request is not None:
            return request.compute(self, own, x)  # type: ignore[arg-type]
        if self._deferring:
            return DeferredLogits(x)
        return own(x, *args, **kwargs)


class _DeferringNetwork:
    """Mix-in of a network that computes its loss from deferred logits."""

    training: bool
    chunked_loss: ChunkedLoss
    chunked_loss_used: bool
    _wanted: dict[str, Any] | None  # arguments of the call of `token_losses` that is running, and its result

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the network's own forward. With labels, the output has no logits."""
        own = super().forward  # type: ignore[misc]
        cls: Any = type(self)
        position = _position_of_labels(cls)
        labels = kwargs.get("labels")
        if position < len(args):
            labels = args[position]
        if labels is None:
            return own(*args, **kwargs)
        head: Any = output_head(self)  # type: ignore[arg-type]
        head._deferring = True
        try:
            output = own(*args, **kwargs)
        finally:
            head._deferring = False
        if isinstance(output, Mapping):  # a ModelOutput of transformers, whose entries cannot be removed
            kept = {key: value for key, value in output.items() if not isinstance(value, DeferredLogits)}
            return type(output)(**kept)
        if isinstance(output, tuple):
            return tuple(value for value in output if not isinstance(value, DeferredLogits))
        return output

    def token_losses(
        self,
        targets: Tensor,
        learned: int | None = None,
        weighting: TokenWeighting | None = None,
        temperature: float = 1.0,
        **inputs: object,
    ) -> tuple[Tensor, object]:
        """Compute the loss of each token, for callers that weight tokens or samples.

        Args:
            targets: [B, T], already shifted.
            learned: Upper bound on the number of targets that count, if the host knows it. A GPU then skips the
                ignored ones.
            weighting: Weights of tokens that depend on their logits. They are part of the returned losses.
            temperature: Divides the logits.
            inputs: Inputs of the network's forward, without labels.

        Returns:
            Losses [B, T], 0 where a target is ignored, and the output of the network, whose own loss must not be used.
        """
        self._wanted = {
            "targets": targets,
            "learned": learned,
            "weighting": weighting,
            "temperature": temperature,
        }
        try:
            output = self(labels=targets, **inputs)  # type: ignore[operator]
            return self._wanted["losses"], output
        finally:
            self._wanted = None

    @property
    def loss_function(self) -> Callable[..., Tensor]:
        """The network's own loss function, extended to accept deferred logits."""
        own = super().loss_function  # type: ignore[misc]
        return functools.update_wrapper(functools.partial(self._loss, own), own)

    def _loss(
        self,
        own: Callable[..., Tensor],
        logits: Tensor | DeferredLogits,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        if not isinstance(logits, DeferredLogits):
            if own is token_losses:
                return own(logits, labels)
            counted = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            return own(logits, labels, vocab_size=vocab_size, shift_labels=shift_labels, **counted, **kwargs)
        self.chunked_loss_used = True
        settings = self.chunked_loss
        terms = TokenLoss(ignore_index)
        if self.training:
            terms = TokenLoss(ignore_index, settings.label_smoothing, settings.z_loss)
        if self._wanted is not None and self._wanted["temperature"] != 1:
            logits = logits._times(1 / self._wanted["temperature"])
        terms = logits.terms(terms)
        head: Any = output_head(self)  # type: ignore[arg-type]
        if own is token_losses or self._wanted is not None:
            wanted = self._wanted or {"targets": labels, "learned": None, "weighting": None}
            targets = wanted["targets"]
            terms = replace(terms, weighting=wanted["weighting"])
            request = _LossRequest(targets.reshape(-1), terms, settings, "none", wanted["learned"])
            losses = head(logits.hidden, request=request).view(targets.shape)
            wanted["losses"] = losses
            if own is token_losses:
                return losses
            return losses.detach().mean()  # a placeholder: `token_losses` returns the real losses
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        flat = shift_labels.reshape(-1).to(logits.device)
        total = head(logits.hidden, request=_LossRequest(flat, terms, settings, "sum"))
        if num_items_in_batch is None:
            return total / (flat != ignore_index).sum().clamp(min=1)
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = moved(num_items_in_batch, total.device)
        return total / num_items_in_batch


def chunked_mean(network: Any, hidden: Tensor, targets: Tensor, terms: TokenLoss) -> Tensor:
    """Return the mean loss of further hidden states of a network that :func:`defer` has changed, chunk by chunk.

    Args:
        network: The network, whose head and settings of chunks are used.
        hidden: [..., H].
        targets: [...], already shifted.
        terms: Loss of one token.
    """
    head: Any = output_head(network)
    loss: Tensor = head(hidden, request=_LossRequest(targets.flatten(), terms, network.chunked_loss, "mean"))
    return loss


@functools.cache
def _position_of_labels(cls: Any) -> int:
    names = list(inspect.signature(cls.forward).parameters)[1:]
    return names.index("labels")


def output_head(network: nn.Module) -> nn.Module | None:
    """Return the module that turns the hidden states of ``network`` into logits, or ``None`` if it is unknown."""
    if hasattr(type(network), "get_output_embeddings"):
        return network.get_output_embeddings()  # type: ignore[operator]
    head = getattr(network, "head", None)
    return head if isinstance(head, nn.Module) else None


def vocabulary_of(head: nn.Module) -> int:
    """Return the number of logits that a head computes for each token."""
    if hasattr(head, "out_features"):
        return int(head.out_features)  # type: ignore[arg-type]
    return max(parameter.shape[0] for parameter in head.parameters())


def width_of(head: nn.Module) -> int | None:
    """Return the width of the hidden states that a head reads, or ``None`` if it has no matrix."""
    if hasattr(head, "in_features"):
        return int(head.in_features)  # type: ignore[arg-type]
    return max((parameter.shape[-1] for parameter in head.parameters() if parameter.ndim > 1), default=None)


def _loss_of(network: nn.Module) -> Callable[..., Tensor] | None:
    """Return the loss function of a network that has one and an output head."""
    if not hasattr(type(network), "loss_function") or output_head(network) is None:
        return None
    return network.loss_function  # type: ignore[return-value]


def takes_labels(network: nn.Module) -> bool:
    """Return whether :func:`defer` supports ``network``: an output head, ``forward(labels=...)`` and a known loss."""
    own = _loss_of(network)
    if own is None or "labels" not in inspect.signature(type(network).forward).parameters:
        return False
    return own is token_losses or shifts_labels(network)


def shifts_labels(network: nn.Module) -> bool:
    """Return whether ``network`` is a causal language model of transformers, whose loss shifts the labels itself."""
    return getattr(_loss_of(network), "__name__", None) == "ForCausalLMLoss"


def defer(network: nn.Module, settings: ChunkedLoss) -> None:
    """Make ``network`` compute its loss chunk by chunk if it is called with labels. Its output then has no logits."""
    head = output_head(network)
    assert head is not None  # `takes_labels` has looked
    mix_in(head, _DeferringHead, _deferring=False)
    mix_in(network, _DeferringNetwork, chunked_loss=settings, chunked_loss_used=False, _wanted=None)
