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

Further variants, whose formulas are in ``orthogonal_updates.py``: MuonEq balances rows or columns before the
orthogonalisation, Muon+ after it. With ``heads`` the rows of each attention head are orthogonalised separately. Dion
replaces the iteration by one step of a power iteration of low rank, whose error stays in the momentum. LoRA-Muon steps
the two factors of an adapter, so that their product moves as the matrix would with Muon.

Saves: 4 of AdamW's 8 bytes for each parameter of the hidden matrices; in published runs up to half of the steps
Costs: five Newton-Schulz iterations for each matrix and step, about 1 % of the step of a large model
Source: Jordan et al. (2024), https://kellerjordan.github.io/posts/muon/; Liu et al. (2025),
    https://arxiv.org/abs/2502.16982; NorMuon: Li et al. (2025), https://arxiv.org/abs/2510.05491; decay: Chen et al.
    (2025), https://arxiv.org/abs/2510.12402; Polar Express: Amsel et al. (2025), https://arxiv.org/abs/2505.16932;
    heads: GLM-5 (2026), https://arxiv.org/abs/2602.15763
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, get_args

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import (
    ChecksTypes,
    ConfigurationError,
    ConflictError,
    check_choice,
    check_number,
    diagnostic,
    refusal,
)
from lit_efficient.internals.torch_optimizers import muon_rate, orthogonalised
from lit_efficient.mechanisms.averages.weights import placed_like
from lit_efficient.optimizers.groups import Groups, parameter_groups, tensor_of
from lit_efficient.optimizers.orthogonal_updates import Balance, Normalisation, balance, dion, normalise, pair_updates
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
# Settings that are missing in groups unless they are set, so that a checkpoint without them can be resumed with them.
_VARIANTS = ("normuon", "cautious_decay", "polar_express", "muon_eq", "muon_plus", "dion")
# Steps that are no orthogonalisation of one matrix, and the settings that would have no effect on them.
_OWN_STEPS = {
    "dion": ("normuon", "polar_express", "muon_eq", "muon_plus", "heads", "lora"),
    "lora": ("normuon", "cautious_decay", "muon_eq", "muon_plus", "heads"),
}


def muon_groups(module: nn.Module, adamw: tuple[str, ...] = (), heads: Mapping[str, int] | None = None) -> Groups:
    """Return groups for :class:`MuonAdamW`: matrices and experts for Muon, embeddings and all others for AdamW.

    Args:
        module: Module whose parameters that train are grouped, tied ones once.
        adamw: Further parameters for AdamW, by the ends of their dotted names, as in ``("head.weight",)``. Name the
            output layer here.
        heads: Rows of an attention head, by the ends of dotted names; see :class:`MuonAdamW`.

    Raises:
        ConfigurationError: If a name matches nothing.
    """
    named = dict(module.named_parameters())
    heads = heads or {}
    for suffix in (*adamw, *heads):
        if not any(name.endswith(suffix) for name in named):
            raise ConfigurationError(f"muon_groups: no parameter ends in {suffix!r}; there are {', '.join(named)}")
    embedded: set[Tensor] = set()
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            embedded.update(part.parameters())
    experts = {getattr(part, key) for _, part, keys in expert_stacks(module) for key in keys}
    groups: dict[tuple[bool, int], list[Tensor]] = {(True, 0): [], (False, 0): []}
    for name, p in named.items():
        if p.requires_grad:
            hidden = (p.ndim == 2 or p in experts) and p not in embedded and not name.endswith(adamw)
            rows = _rows_of_head(name, heads)
            if rows and not hidden:
                raise ConfigurationError(f"muon_groups: heads names {name}, which Muon does not step")
            groups.setdefault((hidden, rows), []).append(p)
    return [_with_heads({"params": tensors, "muon": use}, rows) for (use, rows), tensors in groups.items() if tensors]


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
        muon_eq: Divide rows, columns or both by their norms before the orthogonalisation (MuonEq). The paper uses
            ``row`` for hidden matrices.
        muon_plus: Divide rows, columns or one after the other by their norms after the orthogonalisation (Muon+). The
            norm of the whole matrix is kept. The paper uses ``column_row``.
        heads: Rows of an attention head by the ends of parameters' names, as in ``{"q_proj.weight": 64}``. The rows of
            each head are orthogonalised separately, in fused layers too. Needs named parameters, which a config has.
        dion: Rank of the updates as a share of the shorter side, above 0 and at most 1 (Dion). The paper uses 1/4 and
            less for large matrices. Not for sharded parameters.
        lora: Step the factors of LoRA in pairs, so that their product moves as a matrix does with Muon (LoRA-Muon).
            Weight decay acts on the product, too. Factors are known by the names ``lora_A`` and ``lora_B`` if the
            parameters have names, else by their shapes. Not for sharded parameters.

    The first step warns if the singular values show that another optimizer has trained the matrices of Muon.
    Fine-tuning weights with Muon that Adam pretrained brings no gain (https://arxiv.org/abs/2511.06086) or is worse
    (https://arxiv.org/abs/2605.10468).

    Raises:
        ConfigurationError: For a value out of range, for settings without effect on each other, if a group for Muon
            contains anything but matrices, and in the first step if ``heads`` or ``lora`` match nothing.
        ConflictError: In the first step, for sharded parameters with ``dion`` or ``lora``.
    """

    traits = frozenset({Trait.NO_LOW_RANK_FORM, Trait.NO_SCHEDULE_FREE_FORM})
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (0, "up to half of the steps, with less state than AdamW")}
    needs_names: ClassVar[tuple[str, ...]] = ("heads", "lora")  # arguments that match names of parameters

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
        muon_eq: Balance | None = None,
        muon_plus: Normalisation | None = None,
        heads: dict[str, int] | None = None,
        dion: float | None = None,
        lora: bool = False,
    ) -> None:
        check_number("MuonAdamW", "lr", lr, least=0)
        check_number("MuonAdamW", "weight_decay", weight_decay, least=0)
        check_number("MuonAdamW", "momentum", momentum, least=0, below=1)
        for beta in betas:
            check_number("MuonAdamW", "betas", beta, least=0, below=1)
        check_number("MuonAdamW", "ns_steps", ns_steps, least=1, whole=True)
        check_number("MuonAdamW", "normuon", normuon, least=0, below=1, null=True)
        check_number("MuonAdamW", "dion", dion, above=0, most=1, null=True)
        for rows in (heads or {}).values():
            check_number("MuonAdamW", "heads", rows, least=1, whole=True)
        if muon_eq is not None:
            check_choice("MuonAdamW", "muon_eq", muon_eq, get_args(Balance))
        if muon_plus is not None:
            check_choice("MuonAdamW", "muon_plus", muon_plus, get_args(Normalisation))
        if not max_aspect_ratio >= 1:  # infinity is allowed: Muon steps all matrices
            raise refusal("MuonAdamW", "max_aspect_ratio", "at least 1", max_aspect_ratio)
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": tuple(betas), "eps": eps}
        defaults |= {"ns_steps": ns_steps, "match_rms_adamw": match_rms_adamw, "muon": False}
        chosen = (normuon, cautious_decay, polar_express, muon_eq, muon_plus, dion)
        variants = {key: value for key, value in zip(_VARIANTS, chosen) if value is not None and value is not False}
        _check_effects({*variants, *(["heads"] if heads else []), *(["lora"] if lora else [])})
        defaults |= variants
        groups = parameter_groups(params, weight_decay, decay_norm_and_bias)
        parts = [part for group in groups for part in _split(group, max_aspect_ratio, heads or {}, lora)]
        super().__init__(parts, defaults)
        self._missing = _missing(self.param_groups, heads or {}, lora)
        self._unchecked = [
            p for group in self.param_groups if group["muon"] and not group.get("pairs") for p in group["params"]
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        self._check_start()
        for group in self.param_groups:
            parameters = with_gradient(group)
            if group.get("pairs"):
                self._step_pairs(group)
            elif group["muon"]:
                self._muon(group, parameters)
            else:
                self._adamw(group, parameters)
        return loss

    def _check_start(self) -> None:
        """Warn in the first step if another optimizer has trained the matrices of Muon before.

        What matches nothing is an error here, because the constructor also runs on parameters that stand in for others.
        """
        if vars(self).get("_missing"):
            raise ConfigurationError(self._missing)
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
            for key in self.defaults.keys() & set(_VARIANTS):
                group.setdefault(key, self.defaults[key])

    def _muon(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            if group.get("normuon") is not None and "mean_square" not in self.state[p]:
                self.state[p]["mean_square"] = torch.zeros_like(p[..., :1])
            if group.get("dion") is not None and "basis" not in self.state[p]:
                self.state[p]["basis"] = _basis(p, group["dion"])
            self._step_matrices(group, p)

    def _step_matrices(self, group: dict[str, Any], p: Any) -> None:
        """Step a matrix or a stack of matrices. Unlike torch's Muon it supports shards, NorMuon and cautious decay."""
        lr = float(group["lr"])
        state = self.state[p]
        # The parameter stands in for states that the variant does not have.
        states = (state["momentum_buffer"], state.get("mean_square", p), state.get("basis", p))
        stacks = [_matrices(stack) for stack in (p, p.grad, *states)]
        for matrix, gradient, buffer, square, basis in zip(*stacks, strict=True):
            if "basis" in state:
                update = dion(buffer, gradient, basis, group["momentum"])
                rate = lr * _dion_factor(matrix, basis, group["match_rms_adamw"])
            else:
                buffer.lerp_(gradient, 1 - group["momentum"])
                update = _orthogonal(gradient.lerp(buffer, group["momentum"]), group)
                shape = (group.get("head_rows", len(matrix)), matrix.shape[1])
                rate = muon_rate(lr, _ADJUST[group["match_rms_adamw"]], torch.Size(shape))
            if group.get("normuon") is not None:
                norm = (min(shape) * len(matrix) / shape[0]) ** 0.5 if group["match_rms_adamw"] else None
                update = normalise_neurons(update.float(), square, group["normuon"], norm)
            decay(matrix, update, lr * group["weight_decay"], bool(group.get("cautious_decay")))
            matrix.add_(update, alpha=-rate)

    def _step_pairs(self, group: dict[str, Any]) -> None:
        """Step pairs of low-rank factors (LoRA-Muon). The momentum is the plain one, without Nesterov's."""
        lr = float(group["lr"])
        if lr * group["weight_decay"] >= 1:
            raise refusal("MuonAdamW", "weight_decay", f"below {1 / lr:g} at this learning rate", group["weight_decay"])
        shrink = math.sqrt(1 - lr * group["weight_decay"])  # of each factor: the product decays as a matrix would
        tensors = group["params"]
        if len(tensors) % 2:
            raise ConfigurationError("MuonAdamW: lora steps the two factors of an adapter together, got one alone")
        for a, b in zip(tensors[::2], tensors[1::2], strict=True):
            _refuse_shards(a, "lora")
            if a.grad is None or b.grad is None:
                continue
            for p in (a, b):
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
            momenta = [self.state[p]["momentum_buffer"] for p in (a, b)]
            rate = muon_rate(lr, _ADJUST[group["match_rms_adamw"]], torch.Size((b.shape[-2], a.shape[-1])))
            stacks = [_matrices(stack) for stack in (a, b, *momenta)]
            for one, other, momentum, other_momentum in zip(*stacks, strict=True):
                orthogonal = partial(_orthogonal_part, group=group)
                updates = pair_updates(one, other, momentum, other_momentum, orthogonal)
                for factor, update in zip((one, other), updates):
                    factor.mul_(shrink).sub_(update, alpha=rate / shrink)

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


def _orthogonal(update: Any, group: Mapping[str, Any]) -> Tensor:
    """Return the orthogonal matrix that is nearest to ``update``, or one for the rows of each head.

    Shards are gathered once, and each process orthogonalises the whole matrix. Products of shards would need
    communication in each iteration, and would be summed in bfloat16.
    """
    whole = update.full_tensor() if is_sharded(update) else update
    parts = [_orthogonal_part(part, group) for part in whole.split(group.get("head_rows", len(whole)))]
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]
    if is_sharded(update):
        return placed_like(whole, update, whole.dtype)
    return whole


def _orthogonal_part(part: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return the orthogonal matrix that is nearest to a matrix or head, balanced before and after as the group says."""
    if group.get("muon_eq"):
        part = balance(part, group["muon_eq"])
    if group.get("polar_express"):
        part = polar_express(part, group["ns_steps"])
    else:
        part = orthogonalised(part, _NEWTON_SCHULZ, group["ns_steps"], 1e-7)
    if group.get("muon_plus"):
        part = normalise(part.to(torch.promote_types(part.dtype, torch.float32)), group["muon_plus"])
    return part


def _basis(p: Tensor, share: float) -> Tensor:
    """Return the first right basis of Dion, [n, r] or [E, n, r]: random, and equal in all processes."""
    _refuse_shards(p, "dion")
    rank = math.ceil(share * min(p.shape[-2:]))
    size = (*p.shape[:-2], p.shape[-1], rank)
    draws = torch.Generator("cpu").manual_seed(mix_seed(*size))
    return torch.randn(size, generator=draws, device="cpu", dtype=torch.float32).to(p)


def _dion_factor(matrix: Tensor, basis: Tensor, match_rms_adamw: bool) -> float:
    """Return the factor on Dion's update, whose norm is the square root of its rank."""
    rows, columns = matrix.shape
    if match_rms_adamw:
        return 0.2 * math.sqrt(rows * columns / basis.shape[1])
    return math.sqrt(rows / columns)


def _refuse_shards(p: Tensor, key: str) -> None:
    if is_sharded(p):
        raise ConflictError(
            f"MuonAdamW: {key} needs whole matrices, but these parameters are sharded (DTensors): use strategy='ddp', "
            f"or leave {key} out"
        )


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


def _check_effects(given: set[str]) -> None:
    for key in given & _OWN_STEPS.keys():
        for other in sorted(given.intersection(_OWN_STEPS[key])):
            raise ConfigurationError(f"MuonAdamW: {other} has no effect with {key}: leave out one of them")


def _rows_of_head(name: str, heads: Mapping[str, int]) -> int:
    return next((rows for suffix, rows in heads.items() if name.endswith(suffix)), 0)


def _with_heads(group: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return a group whose matrices consist of heads with this number of rows; 0 for whole matrices."""
    for p in map(tensor_of, group["params"] if rows else ()):
        if p.ndim != 2 or len(p) % rows:
            raise refusal("MuonAdamW", "heads", f"a divisor of the rows of a matrix {list(p.shape)}", rows)
    return {**group, "head_rows": rows} if rows else group


def _are_factors(one: Any, other: Any) -> bool:
    """Return whether two entries of a group are the factors ``A`` [r, n] and ``B`` [m, r] of an adapter, or stacks.

    Names decide, if there are any. Otherwise r must be below m and n, as two square matrices are no factors.
    """
    a, b = tensor_of(one), tensor_of(other)
    alike = a.ndim == b.ndim and a.ndim in (2, 3) and a.shape[:-2] == b.shape[:-2] and a.shape[-2] == b.shape[-1]
    if isinstance(one, tuple) and isinstance(other, tuple):
        return alike and one[0] != other[0] == one[0].replace("lora_A", "lora_B")
    return alike and a.shape[-2] < min(a.shape[-1], b.shape[-2])


def _missing(groups: Groups, heads: Mapping[str, int], lora: bool) -> str:
    """Return a message if an argument matches no parameter."""
    if lora and not any(group.get("pairs") for group in groups):
        return "MuonAdamW: lora matches nothing: no two consecutive parameters are factors [r, n] and [m, r]"
    names = [name for group in groups if "head_rows" in group for name in group.get("param_names", ())]
    for suffix in heads:
        if not any(name.endswith(suffix) for name in names):
            return (
                f"MuonAdamW: heads: no matrix of Muon ends in {suffix!r}; parameters must have names, as in "
                "MuonAdamW(module.named_parameters(), ...), or use muon_groups(module, heads=...)"
            )
    return ""


def _split(group: dict[str, Any], max_aspect_ratio: float, heads: Mapping[str, int], lora: bool) -> Groups:
    """Split a group by what steps its parameters, unless it contains ``"muon"``.

    Args:
        group: The group.
        max_aspect_ratio: The largest ratio of sides for Muon.
        heads: Rows of a head by ends of names. They apply to parameters with names.
        lora: Step pairs of factors together.
    """
    if "muon" in group:
        for p in map(tensor_of, group["params"]):
            if group["muon"] and p.ndim not in (2, 3):
                raise ConfigurationError(
                    f"MuonAdamW: Muon steps matrices and stacks of them, got a tensor of the shape {list(p.shape)}"
                )
        return [group]
    parts: dict[tuple[str, int], list[Any]] = {("muon", 0): [], ("adamw", 0): []}
    entries = list(group["params"])
    while entries:
        entry = entries.pop(0)
        if lora and entries and _are_factors(entry, entries[0]):
            parts.setdefault(("pairs", 0), []).extend((entry, entries.pop(0)))
        elif _is_hidden(tensor_of(entry), max_aspect_ratio):
            rows = _rows_of_head(entry[0], heads) if isinstance(entry, tuple) else 0
            parts.setdefault(("muon", rows), []).append(entry)
        else:
            parts["adamw", 0].append(entry)
    split: Groups = []
    for (step, rows), chosen in parts.items():
        more = {"pairs": True} if step == "pairs" else {}
        split.append(_with_heads({**group, "params": chosen, "muon": step != "adamw", **more}, rows))
    return [part for part in split if part["params"]]
