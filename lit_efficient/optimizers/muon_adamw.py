"""Muon for hidden matrices and AdamW for the rest, as one optimizer with one learning rate.

    matrix:  b <- momentum * b + (1 - momentum) * g;    p <- p - lr * 0.2 sqrt(max(m, n)) * orthogonal(nesterov(g, b))
    rest:    AdamW

The factor 0.2 sqrt(max(m, n)) gives updates the size of AdamW's, so that AdamW's learning rate and weight decay suit
both. NorMuon divides each row of the orthogonal matrix by the root of its running mean square and restores the norm of
the matrix, so that no neuron moves much more than others. Cautious decay is only applied where it does not oppose the
update.

    cautious:  p <- p - lr * weight_decay * p  only where  update * p >= 0

Newton-Schulz iterations repeat one polynomial, whose singular values end between 0.7 and 1.2. Polar Express has another
polynomial for each iteration, each the best one for the singular values that are possible there.

    polar_express:  X <- a_k X + (b_k X X^T + c_k (X X^T)^2) X,    k = 1, 2, ...

Saves: 4 of AdamW's 8 bytes for each parameter of the hidden matrices; in published runs up to half of the steps
Costs: five Newton-Schulz iterations for each matrix and step, about 1 % of the step of a large model
Source: Jordan et al. (2024), https://kellerjordan.github.io/posts/muon/; Liu et al. (2025),
    https://arxiv.org/abs/2502.16982; NorMuon: Li et al. (2025), https://arxiv.org/abs/2510.05491; decay: Chen et al.
    (2025), https://arxiv.org/abs/2510.12402; Polar Express: Amsel et al. (2025), https://arxiv.org/abs/2505.16932
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.errors import ChecksTypes, ConfigurationError, check_number, diagnostic, refusal
from lit_efficient.internals.torch_optimizers import muon_rate, orthogonalised
from lit_efficient.mechanisms.averages.weights import placed_like
from lit_efficient.optimizers.groups import Groups, parameter_groups, tensor_of
from lit_efficient.optimizers.spectra import upper_outlier_ratio
from lit_efficient.optimizers.stepping import adamw, loss_of, with_gradient
from lit_efficient.surgery import expert_stacks, is_sharded, local
from lit_efficient.traits import Trait

_TRAINED = 1.2  # a ratio of singular values above this is a sign of training; new matrices have 0.5 to 1.1
_FILTER = 15  # widest usual filter of a one-dimensional convolution
_NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
# Polar Express for singular values of at least 1e-3: the numbers of the paper. The last polynomial repeats.
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_MARGIN = 1.01  # divides singular values, so that rounding to bfloat16 does not lead out of the range of a polynomial
_ADJUST = {True: "match_rms_adamw", False: "original"}


def muon_groups(module: nn.Module, adamw: tuple[str, ...] = ()) -> Groups:
    """Return groups for :class:`MuonAdamW`: matrices and experts for Muon, embeddings and all others for AdamW.

    Args:
        module: Module whose parameters that train are grouped, tied ones once.
        adamw: Further parameters for AdamW, by the ends of their dotted names, as in ``("head.weight",)``. Name the
            output layer here.

    Raises:
        ConfigurationError: If a name matches nothing.
    """
    named = dict(module.named_parameters())
    for suffix in adamw:
        if not any(name.endswith(suffix) for name in named):
            raise ConfigurationError(f"muon_groups: no parameter ends in {suffix!r}; there are {', '.join(named)}")
    embedded: set[Tensor] = set()
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            embedded.update(part.parameters())
    experts = {part.get_parameter(key) for _, part, keys in expert_stacks(module) for key in keys}
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, p in named.items():
        if p.requires_grad:
            hidden = (p.ndim == 2 or p in experts) and p not in embedded
            groups[hidden and not name.endswith(adamw)].append(p)
    return [{"params": tensors, "muon": use} for use, tensors in groups.items() if tensors]


class MuonAdamW(ChecksTypes, Optimizer):
    """Muon and AdamW in one optimizer, so that automatic optimization works.

    Groups may contain ``"muon": True`` or ``False`` (see :func:`muon_groups`). Other groups are split: Muon steps
    matrices whose sides do not differ much, and AdamW steps the rest, such as embeddings and output layers of large
    vocabularies. In stacked weights of experts [E, m, n] each matrix is orthogonalised separately. In groups without
    ``"muon"``, such a stack needs at least 16 rows and columns.

    Args:
        params: Parameters or groups.
        lr: Learning rate of both, as for AdamW.
        weight_decay: Decoupled weight decay of both.
        momentum: Momentum of Muon, in [0, 1).
        betas: Decay rates of the two moments of AdamW, each in [0, 1).
        eps: Term that is added to the denominator of AdamW.
        ns_steps: Newton-Schulz iterations that orthogonalise an update, at least 1.
        match_rms_adamw: Scale the updates of Muon to the size of AdamW's. Otherwise use Jordan's factor
            sqrt(max(1, m / n)), which needs a learning rate of about 20 times AdamW's.
        max_aspect_ratio: Matrices with a larger ratio of the longer to the shorter side are left to AdamW. At least 1.
        decay_norm_and_bias: Apply weight decay to tensors with fewer than two dimensions too.
        normuon: Decay rate of the mean squares of rows (NorMuon), in [0, 1). The paper uses 0.95. ``None`` is plain
            Muon.
        cautious_decay: Apply weight decay only where the update has the sign of the weight.
        polar_express: Orthogonalise with the polynomials of Polar Express instead of those of Newton-Schulz. Five
            iterations bring the singular values to 1 +- 0.13 instead of 1 +- 0.32, eight to the precision of bfloat16.

    The first step warns if the singular values show that another optimizer has trained the matrices of Muon.
    Fine-tuning weights with Muon that Adam pretrained brings no gain (https://arxiv.org/abs/2511.06086) or is worse
    (https://arxiv.org/abs/2605.10468).

    Raises:
        ConfigurationError: For a value out of range, and if a group for Muon contains anything but matrices.
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
        polar_express: bool = False,
    ) -> None:
        check_number("MuonAdamW", "lr", lr, least=0)
        check_number("MuonAdamW", "weight_decay", weight_decay, least=0)
        check_number("MuonAdamW", "momentum", momentum, least=0, below=1)
        for beta in betas:
            check_number("MuonAdamW", "betas", beta, least=0, below=1)
        check_number("MuonAdamW", "ns_steps", ns_steps, least=1, whole=True)
        check_number("MuonAdamW", "normuon", normuon, least=0, below=1, null=True)
        if not max_aspect_ratio >= 1:  # infinity is allowed: Muon steps all matrices
            raise refusal("MuonAdamW", "max_aspect_ratio", "at least 1", max_aspect_ratio)
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": tuple(betas), "eps": eps}
        defaults |= {"ns_steps": ns_steps, "match_rms_adamw": match_rms_adamw, "muon": False}
        # These are missing in groups unless they are set, so that a checkpoint without them can be resumed with them.
        if normuon is not None:
            defaults["normuon"] = normuon
        if cautious_decay:
            defaults["cautious_decay"] = True
        if polar_express:
            defaults["polar_express"] = True
        groups = parameter_groups(params, weight_decay, decay_norm_and_bias)
        super().__init__([part for group in groups for part in _split(group, max_aspect_ratio)], defaults)
        self._unchecked = [p for group in self.param_groups if group["muon"] for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        self._check_start()
        for group in self.param_groups:
            parameters = with_gradient(group)
            if group["muon"]:
                self._muon(group, parameters)
            else:
                self._adamw(group, parameters)
        return loss

    def _check_start(self) -> None:
        """Warn in the first step if another optimizer has trained the matrices of Muon before."""
        unchecked = vars(self).get("_unchecked", [])  # missing in a copy of the optimizer
        self._unchecked = []
        resumed = any("momentum_buffer" in state for state in self.state.values())
        if not unchecked or resumed:
            return
        ratio = 0.0
        with diagnostic("MuonAdamW", "the weights at the start"):
            ratio = upper_outlier_ratio([_matrices(p)[0] for p in unchecked if p.requires_grad and not is_sharded(p)])
        if ratio > _TRAINED:
            rank_zero_warn(
                "MuonAdamW starts from weights that were trained before, and not by Muon: in a quarter of the matrices "
                f"the largest singular value is over {ratio:.1f} times that of a random matrix. On weights that Adam "
                "pretrained, Muon is no better than AdamW (arXiv 2511.06086), or worse with large updates, except for "
                "adapters (arXiv 2605.10468): compare with AdamW, use a smaller learning rate, or train a LoRA"
            )

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key in {"normuon", "cautious_decay", "polar_express"} & self.defaults.keys():
                group.setdefault(key, self.defaults[key])

    def _muon(self, group: dict[str, object], parameters: list[Tensor]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            if group.get("normuon") is not None and "mean_square" not in self.state[p]:
                self.state[p]["mean_square"] = torch.zeros_like(p[..., :1])
            self._step_matrices(group, p)

    def _step_matrices(self, group: dict[str, Any], p: Any) -> None:
        """Step a matrix or a stack of matrices. Unlike torch's Muon it supports shards, NorMuon and cautious decay."""
        lr = float(group["lr"])
        state = self.state[p]
        squares = state.get("mean_square", p)  # the parameter stands in without NorMuon
        stacks = [_matrices(stack) for stack in (p, p.grad, state["momentum_buffer"], squares)]
        for matrix, gradient, buffer, square in zip(*stacks, strict=True):
            buffer.lerp_(gradient, 1 - group["momentum"])
            update = gradient.lerp(buffer, group["momentum"])
            update = _orthogonal(update, group["ns_steps"], bool(group.get("polar_express")))
            rate = muon_rate(lr, _ADJUST[group["match_rms_adamw"]], matrix.shape)
            if group.get("normuon") is not None:
                norm = min(matrix.shape) ** 0.5 if group["match_rms_adamw"] else None
                update = normalise_neurons(update.float(), square, group["normuon"], norm)
            decay(matrix, update, lr * group["weight_decay"], bool(group.get("cautious_decay")))
            matrix.add_(update, alpha=-rate)

    def _adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        if not group.get("cautious_decay"):
            adamw(self, group, parameters)
            return
        for p in parameters:  # the update has the sign of the new first moment
            moment = self.state[p].get("exp_avg", torch.zeros_like(p)).lerp(p.grad, 1 - group["betas"][0])
            decay(p, moment, float(group["lr"]) * group["weight_decay"], True)
        adamw(self, group, parameters, decays=False)


def polar_express(matrix: Tensor, steps: int) -> Tensor:
    """Return the orthogonal matrix that is nearest to ``matrix``, approximated with the polynomials of Polar Express.

    Args:
        matrix: [m, n]. float64 is kept; other dtypes are computed and returned in bfloat16.
        steps: Number of polynomials, at least 1.
    """
    x = matrix if matrix.dtype == torch.float64 else matrix.bfloat16()
    tall = len(x) > x.shape[1]
    if tall:
        x = x.T
    x = x / (x.norm() * _MARGIN).clamp_min(1e-7)
    for step in range(steps):
        a, b, c = POLAR_EXPRESS[min(step, len(POLAR_EXPRESS) - 1)]
        if step < len(POLAR_EXPRESS) - 1:
            a, b, c = a / _MARGIN, b / _MARGIN**3, c / _MARGIN**5
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _orthogonal(update: Any, steps: int, express: bool) -> Tensor:
    """Return the orthogonal matrix that is nearest to ``update``.

    Shards are gathered once, and each process orthogonalises the whole matrix. Products of shards would need
    communication in each iteration, and would be summed in bfloat16.
    """
    whole = update.full_tensor() if is_sharded(update) else update
    if express:
        whole = polar_express(whole, steps)
    else:
        whole = orthogonalised(whole, _NEWTON_SCHULZ, steps, 1e-7)
    if is_sharded(update):
        return placed_like(whole, update, whole.dtype)
    return whole


def normalise_neurons(update: Tensor, mean_square: Tensor, beta: float, norm: float | Tensor | None = None) -> Tensor:
    """Divide each row of an orthogonal update by the root of its running mean square, in float32 (NorMuon).

    Args:
        update: [m, n].
        mean_square: Running mean squares of the rows, [m, 1]. They are updated in place.
        beta: Decay rate of the mean squares.
        norm: Frobenius norm of the result. ``None`` keeps that of ``update``.
    """
    mean_square.lerp_(update.square().mean(-1, keepdim=True).to(mean_square.dtype), 1 - beta)
    scaled = update / (mean_square.sqrt() + 1e-10)
    if norm is None:
        norm = update.norm()
    return scaled * (norm / scaled.norm().clamp_min(1e-10))


def decay(p: Tensor, update: Tensor, amount: float, cautious: bool) -> None:
    """Apply weight decay of ``amount`` to ``p``, in place.

    Args:
        p: The parameter.
        update: Update of the parameter, before its sign is reversed.
        amount: Learning rate times weight decay.
        cautious: Only apply it where the update is zero or has the sign of the parameter.
    """
    if cautious:
        p.sub_(torch.where(update * p >= 0, p, 0.0), alpha=amount)
    else:
        p.mul_(1 - amount)


def _matrices(p: Tensor) -> tuple[Tensor, ...]:
    """Return the matrix, or views of all matrices in a stack [E, m, n]. A sharded stack gives those in this process."""
    return (p,) if p.ndim == 2 else local(p).unbind()


def _is_hidden(p: Tensor, max_aspect_ratio: float) -> bool:
    """Return whether a tensor looks like a hidden matrix or a stack of them, and not like a filter [out, in, width]."""
    if p.ndim not in (2, 3) or max(p.shape[-2:]) > max_aspect_ratio * min(p.shape[-2:]):
        return False
    return p.ndim == 2 or (len(p) > 1 and min(p.shape[-2:]) > _FILTER)


def _split(group: dict[str, Any], max_aspect_ratio: float) -> Groups:
    """Split a group into one for Muon and one for AdamW, unless it contains ``"muon"``."""
    if "muon" in group:
        for p in map(tensor_of, group["params"]):
            if group["muon"] and p.ndim not in (2, 3):
                raise ConfigurationError(
                    f"MuonAdamW: Muon steps matrices and stacks of them, got a tensor of the shape {list(p.shape)}"
                )
        return [group]
    parts: Groups = [{**group, "params": [], "muon": True}, {**group, "params": [], "muon": False}]
    for p in group["params"]:
        parts[0 if _is_hidden(tensor_of(p), max_aspect_ratio) else 1]["params"].append(p)
    return [part for part in parts if part["params"]]
