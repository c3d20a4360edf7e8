"""Muon for hidden matrices and AdamW for the rest, as one optimizer with one learning rate.

    matrix:  b <- momentum * b + (1 - momentum) * g;    p <- p - lr * 0.2 sqrt(max(m, n)) * orthogonal(nesterov(g, b))
    rest:    AdamW

The factor 0.2 sqrt(max(m, n)) gives an update the size of AdamW's, so that AdamW's rate and decay fit both.
NorMuon divides each row of the orthogonal matrix by the root of its running mean square, and gives the whole its size
again: no neuron moves much more than others. Cautious decay leaves out what would work against the update.

    cautious:  p <- p - lr * weight_decay * p  only where  update * p >= 0

Saves: 4 of AdamW's 8 bytes a parameter of the hidden matrices; in published runs up to half of the steps
Costs: five matrix products of a matrix with itself in each step, about 1 % of a large model's step
Source: Jordan et al. (2024), https://kellerjordan.github.io/posts/muon/; Liu et al. (2025), https://arxiv.org/abs/2502.16982;
    NorMuon: Li et al. (2025), https://arxiv.org/abs/2510.05491; decay: Chen et al. (2025), https://arxiv.org/abs/2510.12402
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.internals.torch_muon import adjusted_rate, orthogonalised
from lit_efficient.mechanisms.averages.weights import placed_like
from lit_efficient.optimizers.groups import Groups, parameter_groups
from lit_efficient.optimizers.spectra import upper_outlier_ratio
from lit_efficient.optimizers.stepping import adamw, loss_of, with_gradient
from lit_efficient.surgery import expert_stacks, is_sharded, local
from lit_efficient.traits import Trait

_TRAINED = 1.2  # ratio of singular values; fresh matrices have 0.5 to 1.1
_FILTER = 15  # the widest usual filter of a one-dimensional convolution
_NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
_ADJUST = {True: "match_rms_adamw", False: "original"}


def muon_groups(module: nn.Module, adamw: tuple[str, ...] = ()) -> Groups:
    """Groups for :class:`MuonAdamW`: matrices, experts' too, to Muon; embeddings, ties and the rest to AdamW.

    Args:
        module: Its parameters that train are taken, tied ones once.
        adamw: Further parameters for AdamW, by the ends of their dotted names, as in ``("head.weight",)``. An output
            layer belongs here.

    Raises:
        ConfigurationError: If a name matches nothing.
    """
    named = dict(module.named_parameters())
    for suffix in adamw:
        if not any(name.endswith(suffix) for name in named):
            raise ConfigurationError(f"muon_groups: no parameter ends in {suffix!r}; there are {', '.join(named)}")
    embedded = {p for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) for p in m.parameters()}
    experts = {part.get_parameter(key) for _, part, keys in expert_stacks(module) for key in keys}
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, p in named.items():
        if p.requires_grad:
            groups[(p.ndim == 2 or p in experts) and p not in embedded and not name.endswith(adamw)].append(p)
    return [{"params": tensors, "muon": use} for use, tensors in groups.items() if tensors]


class MuonAdamW(Optimizer):
    """Muon and AdamW in one optimizer, as automatic optimization wants it.

    Groups may say ``"muon": True`` or ``False`` (see :func:`muon_groups`). In the others Muon takes matrices that are
    not much longer than wide: vocabularies' tables and output layers, which AdamW should step, are. Of experts' stacked
    weights [E, m, n] each matrix is orthogonalised by itself; without a group's word they need 16 rows and columns.

    Args:
        params: Parameters or groups.
        lr: Learning rate of both, as for AdamW.
        weight_decay: Decoupled weight decay of both.
        momentum: Muon's momentum, in [0, 1).
        betas: Decay rates of AdamW's two moments, each in [0, 1).
        eps: Term in AdamW's denominator.
        ns_steps: Newton-Schulz iterations that orthogonalise an update, at least 1.
        match_rms_adamw: Scale Muon's updates to the size of AdamW's; else use Jordan's sqrt(max(1, m / n)), whose rate
            is about 20 times AdamW's.
        max_aspect_ratio: Longest side over shortest above which a matrix is left to AdamW, at least 1.
        decay_norm_and_bias: Whether tensors with fewer than two dimensions decay as well.
        normuon: Decay rate of the rows' mean squares (NorMuon; 0.95 in the paper), in [0, 1); ``None``: plain Muon.
        cautious_decay: Decay a weight only where its sign is that of the update, which lowers it anyway.

    The first step warns where the weights of Muon's matrices have been trained by another optimizer, as their singular
    values say: fine-tuning by Muon what Adam pretrained was found to bring nothing (https://arxiv.org/abs/2511.06086)
    or harm (https://arxiv.org/abs/2605.10468).

    Raises:
        ConfigurationError: For a value out of range, and for a group of Muon's that holds anything but matrices.
    """

    traits = frozenset({Trait.NO_LOW_RANK_FORM, Trait.NO_SCHEDULE_FREE_FORM})
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (0, "up to half of the steps, with less state than AdamW")}

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        ns_steps: int = 5,
        match_rms_adamw: bool = True,
        max_aspect_ratio: float = 10.0,
        decay_norm_and_bias: bool = True,
        normuon: float | None = None,
        cautious_decay: bool = False,
    ) -> None:
        check_number("MuonAdamW", "lr", lr, least=0)
        check_number("MuonAdamW", "weight_decay", weight_decay, least=0)
        check_number("MuonAdamW", "momentum", momentum, least=0, below=1)
        for beta in betas:
            check_number("MuonAdamW", "betas", beta, least=0, below=1)
        check_number("MuonAdamW", "ns_steps", ns_steps, least=1, whole=True)
        check_number("MuonAdamW", "normuon", normuon, least=0, below=1, null=True)
        if not max_aspect_ratio >= 1:  # infinity, too: all matrices are Muon's
            raise refusal("MuonAdamW", "max_aspect_ratio", "at least 1", max_aspect_ratio)
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": tuple(betas), "eps": eps}
        defaults |= {"ns_steps": ns_steps, "match_rms_adamw": match_rms_adamw, "muon": False}
        later = {"normuon": normuon, "cautious_decay": cautious_decay}  # which groups of older checkpoints do not have
        defaults |= {key: value for key, value in later.items() if value is not None and value is not False}
        groups = parameter_groups(params, weight_decay, decay_norm_and_bias)
        super().__init__([part for group in groups for part in _split(group, max_aspect_ratio)], defaults)
        self._unseen = [p for group in self.param_groups if group["muon"] for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        self._look_at_the_start()
        for group in self.param_groups:
            parameters = with_gradient(group)
            if parameters:
                (self._muon if group["muon"] else self._adamw)(group, parameters)
        return loss

    def _look_at_the_start(self) -> None:
        """Warn, once, where Muon begins on weights that another optimizer trained, as their singular values say."""
        unseen, self._unseen = vars(self).get("_unseen", []), []  # not even there in a copy
        if not unseen or any("momentum_buffer" in state for state in self.state.values()):  # a resumed run
            return
        ratio = upper_outlier_ratio([_matrices(p)[0] for p in unseen if p.requires_grad and not is_sharded(p)])
        if ratio > _TRAINED:
            rank_zero_warn(
                "MuonAdamW starts from weights that were trained before, and not by Muon: a quarter of their largest "
                f"singular values are over {ratio:.1f} times those of random matrices. On what Adam pretrained, "
                "Muon was found no better than AdamW (arXiv 2511.06086), or worse the larger its updates, less so for "
                "adapters (arXiv 2605.10468): compare with AdamW, use a smaller rate, or train a LoRA"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key in {"normuon", "cautious_decay"} & self.defaults.keys():
                group.setdefault(key, self.defaults[key])

    def _muon(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            if group.get("normuon") is not None and "mean_square" not in self.state[p]:
                self.state[p]["mean_square"] = torch.zeros_like(p[..., :1])
            self._step_matrices(group, p)

    def _step_matrices(self, group: dict[str, Any], p: Any) -> None:
        """Torch's step, with what it has no argument for, also for shards."""
        lr, momentum, state = float(group["lr"]), group["momentum"], self.state[p]
        squares = _matrices(state.get("mean_square", p))
        for matrix, gradient, buffer, square in zip(
            _matrices(p), _matrices(p.grad), _matrices(state["momentum_buffer"]), squares, strict=True
        ):
            buffer.lerp_(gradient, 1 - momentum)
            update = _orthogonal(gradient.lerp(buffer, momentum), group["ns_steps"])
            rate = adjusted_rate(lr, _ADJUST[group["match_rms_adamw"]], matrix.shape)
            if group.get("normuon") is not None:
                size = min(matrix.shape) ** 0.5 if group["match_rms_adamw"] else None
                update = normalise_neurons(update.float(), square, group["normuon"], size)
            decay(matrix, update, lr * group["weight_decay"], bool(group.get("cautious_decay")))
            matrix.add_(update, alpha=-rate)

    def _adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        if not group.get("cautious_decay"):
            return adamw(self, group, parameters)
        for p in parameters:  # the new first moment has the update's sign
            moment = self.state[p].get("exp_avg", torch.zeros_like(p)).lerp(p.grad, 1 - group["betas"][0])
            decay(p, moment, float(group["lr"]) * group["weight_decay"], True)
        adamw(self, group, parameters, decays=False)


def _orthogonal(update: Any, steps: int) -> Tensor:
    """The orthogonal matrix next to ``update``; of shards, each process computes it of the whole, gathered once.

    Products of shards would travel for each of the iterations, and be added up in bfloat16.
    """
    whole = update.full_tensor() if is_sharded(update) else update
    found: Tensor = orthogonalised(whole, _NEWTON_SCHULZ, steps, 1e-7)
    return placed_like(found, update, found.dtype) if whole is not update else found


def normalise_neurons(update: Tensor, mean_square: Tensor, beta: float, size: float | None = None) -> Tensor:
    """Divide each row of an orthogonal update by the root of its running mean square, in float32 (NorMuon).

    Args:
        update: [m, n].
        mean_square: Of the rows [m, 1]; changed in place.
        beta: Its decay rate.
        size: The Frobenius norm of what is returned; ``None``: that of ``update``.
    """
    mean_square.lerp_(update.square().mean(-1, keepdim=True).to(mean_square.dtype), 1 - beta)
    scaled = update / (mean_square.sqrt() + 1e-10)
    return scaled * ((update.norm() if size is None else size) / scaled.norm().clamp_min(1e-10))


def decay(p: Tensor, update: Tensor, amount: float, cautious: bool) -> None:
    """Lower ``p`` in place by ``amount`` times itself; if cautious, only where the update has its sign, or is zero."""
    if cautious:
        p.sub_(torch.where(update * p >= 0, p, 0.0), alpha=amount)
    else:
        p.mul_(1 - amount)


def _matrices(p: Tensor) -> tuple[Tensor, ...]:
    """A matrix itself, or the views of each expert's in a stack [E, m, n]: of shards, of those in this process."""
    return (p,) if p.ndim == 2 else local(p).unbind()


def _is_hidden(p: Tensor, max_aspect_ratio: float) -> bool:
    """Whether a tensor of unknown origin is a hidden matrix, or a stack of them and no filter [out, in, width]."""
    if p.ndim not in (2, 3) or max(p.shape[-2:]) > max_aspect_ratio * min(p.shape[-2:]):
        return False
    return p.ndim == 2 or (len(p) > 1 and min(p.shape[-2:]) > _FILTER)


def _split(group: dict[str, Any], max_aspect_ratio: float) -> Groups:
    parameters = group["params"]
    if "muon" in group:
        wrong = next((p for p in parameters if group["muon"] and p.ndim not in (2, 3)), None)
        if wrong is not None:
            raise ConfigurationError(
                f"MuonAdamW: Muon steps matrices and stacks of them, got a tensor of the shape {list(wrong.shape)}"
            )
        return [group]
    hidden = [p for p in parameters if _is_hidden(p, max_aspect_ratio)]
    chosen = set(hidden)
    rest = [p for p in parameters if p not in chosen]
    parts = [{**group, "params": hidden, "muon": True}, {**group, "params": rest, "muon": False}]
    return [part for part in parts if part["params"]]
