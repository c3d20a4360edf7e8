"""Width transfer: use a learning rate that was tuned on a small network for a wider and deeper one (muP, CompleteP).

    m = width / base_width, D = depth / base_depth;    hidden W: std / sqrt(m), rate / m;    output W: both / m;
    W at the end of a residual branch: also both / D;    queries: both * sqrt(base head / head);    decay / rate factor;
    Adam's eps / m, in residual branches / (m D), like the gradients;    eps * m for outputs, * D for ends of branches

Saves: the search for the learning rate at full size; a network of the base width and depth is tuned instead
Costs: nothing in a step
Source: Yang et al. (2022), https://arxiv.org/abs/2203.03466 (table 3); Dey et al. (2025), https://arxiv.org/abs/2505.01618

The papers multiply outputs of layers: logits by 1 / m, residual branches by 1 / D, attention by 1 / d instead of
1 / sqrt(d). With an optimizer whose step does not depend on the scale of the gradient (Adam), a layer y = c W x trains
like y = W x with c times the standard deviation, c times the rate and 1 / c times Adam's eps. This technique therefore
only changes initial weights and optimizer groups. The network's code, checkpoints and exports do not change.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.application.optimizers import OptimizerHooks, schedulers_of
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_choice, check_number, must_fit, refusal
from lit_efficient.internals.torch_dispatch import has_values
from lit_efficient.internals.torch_fx import all_residual_ends
from lit_efficient.models.networks.dit import DiT
from lit_efficient.models.networks.gpt import GPT
from lit_efficient.models.probes.signs_of_training import sign_of_training
from lit_efficient.optimizers.rates import split_groups
from lit_efficient.surgery import inputs_first, own_draws
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

_QUERIES = re.compile(r"(?:.*\.)?(?:q_norm|query|q_proj|q)")  # names of this package and of transformers
_FACTORS = "_lit_efficient_rate_factors"  # attribute of a network: parameter name -> factors of its rate and Adam's eps
_TOLERANCE = 1e-3  # relative; initial weights that are closer to the right deviation are not scaled
_MORE_SIZES = {  # sizes in configs of transformers that grow with the width, and what they count
    **dict.fromkeys(("intermediate_size", "n_inner"), "hidden features"),
    "num_key_value_heads": "key heads",
}


def width_factors(shape: tuple[int, ...], base: tuple[int, ...], looked_up: bool = False) -> tuple[float, float]:
    """Return muP's factors of a weight's standard deviation and rate, for Adam and without output multipliers.

    With m times as many inputs the rate is divided by m, and the deviation by the root of m, or by m if the number of
    outputs stays the same. Both factors are 1 if the number of inputs stays the same, and for an embedding.

    Args:
        shape: Shape of the weight: [outputs, inputs, ...], [words, features] of an embedding, or [features].
        base: Shape of the same weight in the network of the base width.
        looked_up: True for an embedding, which looks rows up and sums over no input.

    Example:
        >>> width_factors((256, 128), (128, 64)), width_factors((32, 128), (32, 64)), width_factors((128, 3), (64, 3))
        ((0.7071067811865476, 0.5), (0.5, 0.5), (1.0, 1.0))
    """
    if looked_up or len(shape) < 2 or shape[1] == base[1]:
        return 1.0, 1.0
    m = shape[1] / base[1]
    hidden = shape[0] != base[0]  # the outputs grow as well
    return (m**-0.5 if hidden else 1 / m), 1 / m


class WidthTransfer(OptimizerHooks, Technique):
    """Scale initial weights and learning rates so that the rate tuned at a base width and depth fits this network.

    It is for training from scratch with Adam, AdamW or Lion. Supported are the GPT and DiT of this package, models of
    transformers with linear layers (such as Llama and GPT-2), and each network with attributes ``width`` and ``depth``
    and a method ``at_width(width, depth)`` that returns a new network of the same kind and that size. At the base width
    and depth nothing changes. The initial standard deviations at the base size are those of the network itself. Use the
    rate, the steps, the batch size and the data of the tuned run.

    Args:
        base_width: Width of the residual stream in the tuned run, at least 1. It must give a whole number of heads.
        base_depth: Number of blocks in the tuned run, from 1 to 10,000. ``None``: the number of this network.
        heads: ``grow``: wider networks have more heads of the same size. ``fixed``: wider networks have the same number
            of larger heads, and attention scores are divided by the head size instead of its root.

    Raises:
        ConfigurationError: For an argument out of range, an unsupported network, a trained network, tied embeddings, or
            an optimizer whose step depends on the scale of the gradient (such as SGD).
    """

    phase = Phase.ARCHITECTURE
    traits = frozenset({Trait.TRAINING_ONLY})
    needs = ("base_width",)
    conflicts: ClassVar[dict[str | Trait, str]] = {
        "Initialise": "both set the initial weights; keep one of them",
        "ReplaceHead": "it is for trained networks, whose weights must not be scaled",
        "PeftAdapter": "it freezes a trained network; WidthTransfer is for training from scratch",
        "MuonAdamW": "Muon's steps do not grow with the width as Adam's do, so its rates transfer without scaling",
        "MixtureOfExperts": "a network of the base width has no experts and routers to compare with",
        "MixtureOfDepths": "a network of the base width has no routers to compare with",
        Trait.SCHEDULE_FREE: "it has one learning rate for all parameters; use AdamW",
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (0, "the learning rate is tuned on a small network")}

    def __init__(self, base_width: int = 256, base_depth: int | None = None, heads: str = "grow") -> None:
        super().__init__()
        check_number("WidthTransfer", "base_width", base_width, least=1, whole=True)
        check_number("WidthTransfer", "base_depth", base_depth, least=1, most=10**4, whole=True, null=True)
        check_choice("WidthTransfer", "heads", heads, ("grow", "fixed"))
        self.base_width = base_width
        self.base_depth = base_depth
        self.heads = heads

    @torch.no_grad()
    def transform(self, module: nn.Module) -> Report:
        networks = list(_networks(module))
        if not networks:
            raise ConfigurationError(
                f"WidthTransfer: {type(module).__name__} has no GPT, no DiT and no model of transformers. Add a method "
                "at_width(width, depth) to your network, which returns a new network of that size"
            )
        summaries = []
        names = []
        changed = 0
        for name, network in networks:
            sign = sign_of_training(network)
            if sign:
                raise ConfigurationError(
                    f"WidthTransfer: {sign}, and scaling would destroy its weights. WidthTransfer is for training from "
                    "scratch: leave it out"
                )
            width, depth = _size(network)
            factors, weight_factors = self._factors(network, width, depth)
            network.__dict__[_FACTORS] = factors
            for key, factor in weight_factors.items():
                parameter = network.get_parameter(key)
                if _adds_one(network.get_submodule(key.rpartition(".")[0]), parameter):
                    parameter.add_(factor - 1)
                else:
                    parameter.mul_(factor)
            names.append(name)
            changed += sum(network.get_parameter(key).numel() for key, (rate, _) in factors.items() if rate != 1)
            summaries.append(
                f"{type(network).__name__} of width {width} from {self.base_width}, "
                f"{depth} blocks from {self.base_depth or depth}: {sum(rate != 1 for rate, _ in factors.values())} of "
                f"{sum(1 for _ in network.parameters())} parameters have other rates"
            )
        # At the base width itself all factors are 1.
        return Report("; ".join(summaries), modules=tuple(names), parameters=changed, idle=not changed)

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        by_id: dict[int, tuple[float, float]] = {}
        for _, network in _networks(module):
            factors: dict[str, tuple[float, float]] = network.__dict__.get(_FACTORS, {})
            named = dict(network.named_parameters())  # without quantised weights, which are no parameters any more
            by_id |= {id(named[name]): both for name, both in factors.items() if name in named}
        scales = bool(by_id) and _scales_eps(optimizer)

        def factors_of(parameter: Tensor) -> tuple[float, float]:
            rate, eps = by_id.get(id(parameter), (1.0, 1.0))
            return rate, eps if scales else 1.0

        ours = {factors_of(p) for group in optimizer.param_groups for p in group["params"]}
        parts = [(1.0, 1.0), *sorted(ours - {(1.0, 1.0)}, reverse=True)]
        rates = [rate for rate, _ in parts]
        split_groups(optimizer, schedulers_of(module), lambda p: parts.index(factors_of(p)), rates, who="WidthTransfer")
        for group in optimizer.param_groups:
            rate, eps = factors_of(group["params"][0]) if group["params"] else (1.0, 1.0)
            if group.get("weight_decay"):
                group["weight_decay"] /= rate  # the product with the rate must not change
            if eps != 1:
                group["eps"] *= eps
        listed = ", ".join(f"{rate:.3g}" for rate in dict.fromkeys(rates))
        summary = f"{len(optimizer.param_groups)} groups, rates times {listed}"
        if scales:
            eps_factors = ", ".join(f"{eps:.3g}" for eps in sorted({eps for _, eps in parts}, reverse=True))
            summary += f", eps times {eps_factors}"
        elif by_id:
            summary += f"; {type(optimizer).__name__} has no eps that is compared with gradients"
        return Report(summary)

    def _factors(
        self, network: nn.Module, width: int, depth: int
    ) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        """Return the factors of rates and eps, and the factors of initial values, by name of a parameter."""
        base_depth = self.base_depth or depth
        if (width, depth) == (self.base_width, base_depth):
            return {}, {}
        _check_untied(network)
        described = f"a network of base_width={self.base_width} and {base_depth} blocks"
        # The run's random state must not change.
        with must_fit("WidthTransfer", described, "base_width or base_depth"), own_draws(0):
            base = _at_size(network, self.base_width, base_depth, self.heads)
        theirs = dict(base.named_parameters())
        tables = {name: part for name, part in network.named_modules() if isinstance(part, nn.Embedding)}
        parts = dict(base.named_modules())
        looked_up = {id(part.weight): _row_factor(parts.get(n, part)) / _row_factor(part) for n, part in tables.items()}
        transposed = {id(part.weight) for part in network.modules() if inputs_first(part)}
        repeated = _more_or_fewer(network, base)
        ends, inside = (found & repeated for found in _branch_parameters(network))
        if depth != base_depth and not ends:
            raise ConfigurationError(
                f"WidthTransfer: no residual branches are found in {type(network).__name__}, which base_depth needs. "
                "Leave base_depth out"
            )
        queries = self._query_factors(network, width)
        factors: dict[str, tuple[float, float]] = {}
        weight_factors: dict[str, float] = {}
        shallow = base_depth / depth
        narrow = self.base_width / width
        for name, parameter in network.named_parameters():
            key = name if name in theirs else re.sub(r"\.\d+\.", ".0.", name, count=1)
            if key not in theirs:  # a parameter that a technique has added does not grow with the network
                continue
            order = -1 if id(parameter) in transposed else 1
            shape = tuple(parameter.shape[::order])
            base_shape = tuple(theirs[key].shape[::order])
            start, rate = width_factors(shape, base_shape, id(parameter) in looked_up)
            more = shallow if id(parameter) in ends else 1.0
            more *= queries.get(id(parameter), 1.0) * looked_up.get(id(parameter), 1.0)
            eps = narrow * (shallow if id(parameter) in inside else 1.0) / more
            if start == rate:  # an output layer (its weight contains the factor of the papers), or both are 1
                eps /= rate
            if (rate * more, eps) != (1, 1):
                factors[name] = (rate * more, eps)
            if not has_values(parameter):
                continue
            if parameter.ndim > 1:
                now = float(parameter.float().std())
                wanted = float(theirs[key].float().std()) * start * more
                if now > 0 and abs(wanted / now - 1) > _TOLERANCE:
                    weight_factors[name] = wanted / now
            elif more != 1:
                weight_factors[name] = more
        return factors, weight_factors

    def _query_factors(self, network: nn.Module, width: int) -> dict[int, float]:
        """Return the factors of parameters that produce queries, by identity, if the size of heads changes."""
        if self.heads == "grow" or width == self.base_width:
            return {}
        found = [(name, part) for name, part in network.named_modules() if _QUERIES.fullmatch(name)]
        normed = [part for name, part in found if name.endswith("q_norm") and getattr(part, "weight", None) is not None]
        layers = normed or [part for name, part in found if isinstance(part, nn.Linear)]
        if not layers:
            raise ConfigurationError(
                f"WidthTransfer: heads='fixed' needs a separate layer for queries, which {type(network).__name__} does "
                "not have. Set heads='grow' (for the DiT of this package qk_norm: true also adds such a layer)"
            )
        return {id(p): (self.base_width / width) ** 0.5 for layer in layers for p in layer.parameters()}


def _networks(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name of each supported network and the network, without networks inside others."""
    found: list[str] = []
    for name, part in root.named_modules():
        hugging_face = hasattr(part, "config") and hasattr(type(part), "get_input_embeddings")
        known = isinstance(part, GPT | DiT) or hasattr(part, "at_width") or hugging_face
        inside = any(name.startswith(f"{outer}.") or not outer for outer in found)
        if known and not inside:
            found.append(name)
            yield name, part


def _size(network: Any) -> tuple[int, int]:
    """Return the width of the residual stream and the number of blocks."""
    if hasattr(network, "at_width"):
        return int(network.width), int(network.depth)
    config = network.config
    if isinstance(network, GPT):
        return config.dim, config.depth
    if isinstance(network, DiT):
        return config.width, config.depth
    text = config.get_text_config()
    return text.hidden_size, text.num_hidden_layers


def _at_size(network: Any, width: int, depth: int, heads: str) -> nn.Module:
    """Return a new network of the same kind with another width and depth, with initial weights on the CPU."""
    if hasattr(network, "at_width"):
        return network.at_width(width, depth)
    config = network.config
    now = _size(network)[0]

    def scaled(number: int, what: str) -> int:
        if number * width % now:
            allowed = f"a width with which the {number} {what} at width {now} become a whole number"
            raise refusal("WidthTransfer", "base_width", allowed, width)
        return number * width // now

    def count(number: int, what: str) -> int:
        if heads == "grow":
            return scaled(number, what)
        return number

    if isinstance(network, GPT):
        sizes: dict[str, Any] = {"dim": width, "depth": depth, "hidden_dim": scaled(config.mlp_dim, "hidden features")}
        sizes |= {"num_heads": count(config.num_heads, "heads"), "num_kv_heads": count(config.kv_heads, "key heads")}
        return GPT(replace(config, **sizes))
    if isinstance(network, DiT):
        return DiT(replace(config, width=width, depth=depth, heads=count(config.heads, "heads")))
    fields = config.to_dict()
    text = config.get_text_config()
    new = type(config)(**{key: value for key, value in fields.items() if key != "layer_types"})
    inner = new.get_text_config()
    inner.hidden_size = width
    inner.num_hidden_layers = depth
    inner.num_attention_heads = count(text.num_attention_heads, "heads")
    for field, what in _MORE_SIZES.items():
        number = getattr(text, field, None)
        if number is not None:
            setattr(inner, field, count(number, what) if "heads" in field else scaled(number, what))
    if not {"intermediate_size", "n_inner"} & fields.keys() and text is config:
        raise ConfigurationError(
            f"WidthTransfer: {type(config).__name__} has no attribute intermediate_size or n_inner with the width of "
            "its feed-forward layers. Add a method at_width(width, depth) to the network"
        )
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if heads == "grow":
        inner.head_dim = size
    else:
        inner.head_dim = scaled(size, "features of a head")
    return type(network)(new)


def _check_untied(network: nn.Module) -> None:
    owners: dict[int, str] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if id(parameter) in owners:
            raise ConfigurationError(
                f"WidthTransfer: {owners[id(parameter)]} and {name} are tied, but an embedding and an output layer "
                "need different rates. Untie them (tie_embeddings: false; in transformers tie_word_embeddings: false)"
            )
        owners[id(parameter)] = name


def _more_or_fewer(network: nn.Module, base: nn.Module) -> set[int]:
    """Return the identities of parameters in repeated layers: the base network has another number of them."""
    # Layers are the same if their names only differ in numbers.
    named = [(re.sub(r"\d+", "", name), parameter) for name, parameter in network.named_parameters()]
    change = Counter(name for name, _ in named)
    change.subtract(re.sub(r"\d+", "", name) for name, _ in base.named_parameters())
    return {id(parameter) for name, parameter in named if change[name]}


def _branch_parameters(network: nn.Module) -> tuple[set[int], set[int]]:
    """Return the identities of parameters at the ends of residual branches, and of all parameters in these branches.

    The end of a branch is its last layer, or the norm behind it.
    """
    ends: set[int] = set()
    inside: set[int] = set()
    for part, layer, norm, _ in all_residual_ends(network):
        ends |= {id(p) for p in part.get_submodule(norm or layer).parameters(recurse=False)}
        inside |= {id(p) for p in part.parameters()}
    return ends, inside


def _row_factor(table: Any) -> float:
    """Return the factor of an embedding's output and its weight's rows, such as the root of the width in Gemma."""
    if not has_values(table.weight):
        return 1.0
    some = torch.arange(min(8, len(table.weight)), device=table.weight.device)
    try:
        rows = table.weight[some].float()
        output = table(some).float()
        factor = float(output.norm() / rows.norm())
        if torch.allclose(output, factor * rows, rtol=0.05, atol=1e-6):
            return factor
        return 1.0
    except Exception:  # a subclass by a user may need other arguments
        return 1.0


def _adds_one(layer: nn.Module, weight: Tensor) -> bool:
    """Return whether a norm multiplies by one plus its weight, as in Gemma, where the weight is zero at first."""
    if weight.ndim != 1 or weight is not getattr(layer, "weight", None) or weight.any():
        return False
    return bool(layer(torch.arange(len(weight), dtype=weight.dtype, device=weight.device)[None]).any())


def _scales_eps(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's eps is added to the scale of the gradient, as in Adam. A trial step decides.

    Raises:
        ConfigurationError: For an optimizer whose step depends on the gradient's scale.
    """
    if not _scale_invariant(optimizer):
        raise ConfigurationError(
            f"WidthTransfer: a step of {type(optimizer).__name__} depends on the scale of the gradient, so its rates "
            "follow other rules. Use Adam, AdamW or Lion"
        )
    has_eps = all(isinstance(group.get("eps"), float) for group in optimizer.param_groups)
    return has_eps and _scale_invariant(optimizer, eps=0.5)


def _scale_invariant(optimizer: Any, **eps: float) -> bool:
    """Return whether a gradient (and an ``eps``, if given) that is 64 times as large gives the same step."""
    steps = []
    for scale in (1.0, 64.0):
        p = nn.Parameter(torch.tensor([[1.0, 2.0]], device="cpu"))
        try:
            tried = type(optimizer)([p], lr=0.5, **{name: value * scale for name, value in eps.items()})
            p.grad = torch.tensor([[0.3, -0.2]], device="cpu") * scale
            tried.step()
        except Exception:  # a class by a user may need more arguments: assume invariance without an eps
            return not eps
        steps.append(p.detach())
    return torch.allclose(steps[0], steps[1], rtol=1e-3)
