"""WidthTransfer: the rates that a small network was tuned with hold for a wide and deep one (muP, CompleteP).

    m = width / base_width, D = depth / base_depth;    hidden W: std / sqrt(m), rate / m;    output W: both / m;
    W at the end of a residual branch: both / D, too;    queries: both * sqrt(base head / head);    decay / factor
    Adam's eps / m, in residual branches / (m D), where the gradients fall so;    times m of outputs, D of ends

Saves: the search of the learning rate at full size: it is found on a network of the base width and depth
Costs: nothing in a step
Source: Yang et al. (2022), https://arxiv.org/abs/2203.03466 (table 3); Dey et al. (2025), https://arxiv.org/abs/2505.01618

The papers multiply outputs of layers: logits by 1 / m, residual branches by 1 / D, attention by 1 / d instead of
1 / sqrt(d). Under an optimizer whose step does not depend on the gradient's scale (Adam), a layer y = c W x learns as
y = W x does with c times the deviation, c times the rate and 1 / c times Adam's eps. So all of it is in weights and in
groups of the optimizer here: the network's code, its checkpoints and exports stay what they are.
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
from lit_efficient.errors import ConfigurationError, check_choice, check_number, refusal
from lit_efficient.internals.torch_fake import has_values
from lit_efficient.internals.torch_fx import all_residual_ends
from lit_efficient.models.networks.dit import DiT
from lit_efficient.models.networks.gpt import GPT
from lit_efficient.models.probes.signs_of_training import sign_of_training
from lit_efficient.optimizers.rates import split_groups
from lit_efficient.surgery import inputs_first, own_draws
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

_QUERIES = re.compile(r"(?:.*\.)?(?:q_norm|query|q_proj|q)")  # of our networks and of transformers' Llama and kin
_FACTOR = "_lit_efficient_rate_factors"  # of a network: name of a parameter -> factors of its rate and of Adam's eps
_PATIENCE = 1e-3
_MORE_SIZES = {  # of configs of transformers, beside the width: whole numbers of what
    **dict.fromkeys(("intermediate_size", "n_inner"), "hidden features"),
    "num_key_value_heads": "key heads",
}


def width_factors(shape: tuple[int, ...], base: tuple[int, ...], looked_up: bool = False) -> tuple[float, float]:
    """What muP multiplies a weight's standard deviation and rate by, under Adam and without output multipliers.

    Args:
        shape: [outputs, inputs, ...], or of an embedding [words, features], or [features].
        base: Its shape in the network of the base width; sizes that differ grow with the width.
        looked_up: Whether it is an embedding, which sums over nothing.

    Example:
        >>> width_factors((256, 128), (128, 64)), width_factors((32, 128), (32, 64)), width_factors((128, 3), (64, 3))
        ((0.7071067811865476, 0.5), (0.5, 0.5), (1.0, 1.0))
    """
    if looked_up or len(shape) < 2 or shape[1] == base[1]:
        return 1.0, 1.0
    m = shape[1] / base[1]
    return (m**-0.5 if shape[0] != base[0] else 1 / m), 1 / m


class WidthTransfer(OptimizerHooks, Technique):
    """Scale initial weights and rates so that what was tuned at a base width and depth is right at this one.

    For networks that are trained from their beginning, with Adam, AdamW or Lion: our GPT and DiT, models of
    transformers made of linear layers (Llama and kin, GPT-2), and any network with attributes ``width`` and ``depth``
    and a method ``at_width(width, depth)`` that returns one like it in that size. At the base width and depth it
    changes nothing. The deviations to start from are those that the network has at its base size, whatever rule it
    draws by. Let the rate, the steps, the batch and the data be those of the tuned run.

    Args:
        base_width: Width of the residual stream that was tuned at, at least 1; it must leave whole heads.
        base_depth: Number of blocks there, at least 1; ``None``: as many as now.
        heads: ``grow``: wider networks have more heads of one size; ``fixed``: as many, and larger ones, whose products
            are divided by their size.

    Raises:
        ConfigurationError: For an argument out of range, another network, one that is trained already, tied embeddings,
            or an optimizer whose step depends on the gradient's scale (SGD).
    """

    phase = Phase.ARCHITECTURE
    traits = frozenset({Trait.TRAINING_ONLY})
    needs = ("base_width",)
    conflicts: ClassVar[dict[str | Trait, str]] = {
        "Initialise": "both say how weights begin; keep one of them",
        "ReplaceHead": "it is for networks that are trained already, whose weights must stay as they are",
        "PeftAdapter": "it freezes a network that is trained already; WidthTransfer is for the training before that",
        "MuonAdamW": "Muon's steps do not grow with the width as Adam's do: its rates transfer by themselves",
        "MixtureOfExperts": "a network of the base width has no experts and routers to compare with",
        "MixtureOfDepths": "a network of the base width has no routers to compare with",
        Trait.SCHEDULE_FREE: "it keeps one learning rate for all parameters: use AdamW",
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (0, "the rate is searched on a small network")}

    def __init__(self, base_width: int = 256, base_depth: int | None = None, heads: str = "grow") -> None:
        super().__init__()
        check_number("WidthTransfer", "base_width", base_width, least=1, whole=True)
        check_number("WidthTransfer", "base_depth", base_depth, least=1, whole=True, null=True)
        check_choice("WidthTransfer", "heads", heads, ("grow", "fixed"))
        self.base_width = base_width
        self.base_depth = base_depth
        self.heads = heads

    @torch.no_grad()
    def transform(self, module: nn.Module) -> Report:
        networks = list(_networks(module))
        if not networks:
            raise ConfigurationError(
                f"WidthTransfer: {type(module).__name__} holds no GPT, no DiT and no model of transformers: give your "
                "network a method at_width(width, depth) that returns one like it in that size"
            )
        said, names, changed = [], [], 0
        for name, network in networks:
            if sign := sign_of_training(network):
                raise ConfigurationError(
                    f"WidthTransfer: {sign}, and its weights would be scaled away: it is for networks that are trained "
                    "from their beginning"
                )
            width, depth = _size(network)
            factors, beginnings = self._factors(network, width, depth)
            network.__dict__[_FACTOR] = factors
            for key, factor in beginnings.items():
                parameter, layer = network.get_parameter(key), network.get_submodule(key.rpartition(".")[0])
                parameter.add_(factor - 1) if _adds_one(layer, parameter) else parameter.mul_(factor)
            names.append(name)
            changed += sum(network.get_parameter(key).numel() for key, (rate, _) in factors.items() if rate != 1)
            said.append(
                f"{type(network).__name__} of width {width} from {self.base_width}, "
                f"{depth} blocks from {self.base_depth or depth}: {sum(rate != 1 for rate, _ in factors.values())} of "
                f"{sum(1 for _ in network.parameters())} parameters have other rates"
            )
        return Report("; ".join(said), modules=tuple(names), parameters=changed)

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        by_id: dict[int, tuple[float, float]] = {}
        for _, network in _networks(module):
            factors: dict[str, tuple[float, float]] = network.__dict__.get(_FACTOR, {})
            named = dict(network.named_parameters())  # quantised ones are none any more
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
                group["weight_decay"] /= rate  # so that the product with the rate stays
            if eps != 1:
                group["eps"] *= eps
        listed = ", ".join(f"{rate:.3g}" for rate in dict.fromkeys(rates))
        said = ", ".join(f"{eps:.3g}" for eps in sorted({eps for _, eps in parts}, reverse=True))
        kept = f", eps times {said}" if scales else f"; {type(optimizer).__name__} has no eps that is set to gradients"
        return Report(f"{len(optimizer.param_groups)} groups, rates times {listed}{kept if by_id else ''}")

    def _factors(self, network: Any, width: int, depth: int) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        """Of the parameters that need them: factors of their rates and eps, and of their present values."""
        base_depth = self.base_depth or depth
        if (width, depth) == (self.base_width, base_depth):
            return {}, {}
        _check_untied(network)
        with own_draws(0):
            base = _at_size(network, self.base_width, base_depth, self.heads)
        theirs = dict(base.named_parameters())
        tables = {name: part for name, part in network.named_modules() if isinstance(part, nn.Embedding)}
        parts = dict(base.named_modules())
        looked_up = {id(part.weight): _times(parts.get(n, part)) / _times(part) for n, part in tables.items()}
        turned = {id(part.weight) for part in network.modules() if inputs_first(part)}
        repeated = _more_or_fewer(network, base)
        ends, inside = (found & repeated for found in _branch_parameters(network))
        if depth != base_depth and not ends:
            raise ConfigurationError(
                f"WidthTransfer: {type(network).__name__} shows no residual branches for base_depth"
            )
        queries = self._query_factors(network, width)
        rates, beginnings = {}, {}
        shallow, narrow = base_depth / depth, self.base_width / width
        for name, parameter in network.named_parameters():
            key = name if name in theirs else re.sub(r"\.\d+\.", ".0.", name, count=1)
            if key not in theirs:  # what was added to the network does not grow with it
                continue
            order = -1 if id(parameter) in turned else 1
            shapes = tuple(parameter.shape[::order]), tuple(theirs[key].shape[::order])
            start, rate = width_factors(*shapes, id(parameter) in looked_up)
            more = shallow if id(parameter) in ends else 1.0
            more *= queries.get(id(parameter), 1.0) * looked_up.get(id(parameter), 1.0)
            eps = narrow * (shallow if id(parameter) in inside else 1.0) / more
            if start == rate:  # an output, or nothing: what the papers multiply it by is in the weight
                eps /= rate
            if (rate * more, eps) != (1, 1):
                rates[name] = rate * more, eps
            if not has_values(parameter):
                continue
            if parameter.ndim > 1:
                now, then = float(parameter.float().std()), float(theirs[key].float().std())
                wanted = then * start * more
                if now > 0 and abs(wanted / now - 1) > _PATIENCE:
                    beginnings[name] = wanted / now
            elif more != 1:
                beginnings[name] = more
        return rates, beginnings

    def _query_factors(self, network: nn.Module, width: int) -> dict[int, float]:
        """Where heads grow with the width, factors of what makes the queries, by the parameter's identity."""
        if self.heads == "grow" or width == self.base_width:
            return {}
        found = [(name, part) for name, part in network.named_modules() if _QUERIES.fullmatch(name)]
        normed = [part for name, part in found if name.endswith("q_norm") and getattr(part, "weight", None) is not None]
        layers = normed or [part for name, part in found if isinstance(part, nn.Linear)]
        if not layers:
            raise ConfigurationError(
                f"WidthTransfer: heads='fixed' needs queries from a layer of their own, which {type(network).__name__} "
                "does not have (qk_norm: true gives our DiT one): let heads grow"
            )
        return {id(p): (self.base_width / width) ** 0.5 for layer in layers for p in layer.parameters()}


def _networks(root: nn.Module) -> Iterator[tuple[str, Any]]:
    found: list[str] = []
    for name, part in root.named_modules():
        hugging_face = hasattr(part, "config") and hasattr(type(part), "get_input_embeddings")
        known = isinstance(part, GPT | DiT) or hasattr(part, "at_width") or hugging_face
        inside = any(name.startswith(f"{outer}.") or not outer for outer in found)
        if known and not inside:
            found.append(name)
            yield name, part


def _size(network: Any) -> tuple[int, int]:
    """Width of the residual stream, and number of blocks."""
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
    """One like ``network``, freshly drawn, of another width and depth, on the CPU."""
    if hasattr(network, "at_width"):
        return network.at_width(width, depth)
    config, now = network.config, _size(network)[0]

    def less(number: int, what: str) -> int:
        if number * width % now:
            allowed = f"{now} times a fraction that leaves whole {what} of {number}"
            raise refusal("WidthTransfer", "base_width", allowed, width)
        return number * width // now

    count = less if heads == "grow" else lambda number, what: number
    if isinstance(network, GPT):
        sizes: dict[str, Any] = {"dim": width, "depth": depth, "hidden_dim": less(config.mlp_dim, "hidden features")}
        sizes |= {"num_heads": count(config.num_heads, "heads"), "num_kv_heads": count(config.kv_heads, "key heads")}
        return GPT(replace(config, **sizes))
    if isinstance(network, DiT):
        return DiT(replace(config, width=width, depth=depth, heads=count(config.heads, "heads")))
    fields = config.to_dict()
    text = config.get_text_config()
    new = type(config)(**{key: value for key, value in fields.items() if key != "layer_types"})
    inner = new.get_text_config()
    inner.hidden_size, inner.num_hidden_layers = width, depth
    inner.num_attention_heads = count(text.num_attention_heads, "heads")
    for field, what in _MORE_SIZES.items():
        number = getattr(text, field, None)
        if number is not None:
            setattr(inner, field, (count if "heads" in field else less)(number, what))
    if not {"intermediate_size", "n_inner"} & fields.keys() and text is config:
        raise ConfigurationError(f"WidthTransfer: a {type(config).__name__} does not say how wide its feed-forward is")
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    inner.head_dim = size if heads == "grow" else less(size, "features of a head")
    return type(network)(new)


def _check_untied(network: nn.Module) -> None:
    owners: dict[int, str] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if id(parameter) in owners:
            raise ConfigurationError(
                f"WidthTransfer: {owners[id(parameter)]} and {name} are one, but an embedding and an output need rates "
                "of their own: untie them (tie_embeddings: false; of transformers tie_word_embeddings: false)"
            )
        owners[id(parameter)] = name


def _more_or_fewer(network: nn.Module, base: nn.Module) -> set[int]:
    """Identities of the parameters that another depth has another number of, by names without their numbers."""
    named = [(re.sub(r"\d+", "", name), parameter) for name, parameter in network.named_parameters()]
    change = Counter(name for name, _ in named)
    change.subtract(re.sub(r"\d+", "", name) for name, _ in base.named_parameters())
    return {id(parameter) for name, parameter in named if change[name]}


def _branch_parameters(network: nn.Module) -> tuple[set[int], set[int]]:
    """Identities of the parameters of layers, or norms behind them, that end residual branches; and of all in them."""
    ends: set[int] = set()
    inside: set[int] = set()
    for part, layer, norm, _ in all_residual_ends(network):
        ends |= {id(p) for p in part.get_submodule(norm or layer).parameters(recurse=False)}
        inside |= {id(p) for p in part.parameters()}
    return ends, inside


def _times(table: Any) -> float:
    """What an embedding multiplies its rows by, as Gemma's by the root of the width."""
    if not has_values(table.weight):
        return 1.0
    some = torch.arange(min(8, len(table.weight)), device=table.weight.device)
    try:
        rows, given = table.weight[some].float(), table(some).float()
        times = float(given.norm() / rows.norm())
        return times if torch.allclose(given, times * rows, rtol=0.05, atol=1e-6) else 1.0
    except Exception:  # somebody's, that is asked otherwise
        return 1.0


def _adds_one(layer: nn.Module, weight: Tensor) -> bool:
    """Whether a norm multiplies by one plus its weight, as Gemma's, whose weight begins at zero."""
    if weight.ndim != 1 or weight is not getattr(layer, "weight", None) or weight.any():
        return False
    return bool(layer(torch.arange(len(weight), dtype=weight.dtype, device=weight.device)[None]).any())


def _scales_eps(optimizer: Any) -> bool:
    """Whether its eps is one that is added to the gradient's scale, as Adam's; tried on two numbers.

    Raises:
        ConfigurationError: For an optimizer whose step depends on the gradient's scale.
    """
    free, scales = _alike(optimizer), all(isinstance(group.get("eps"), float) for group in optimizer.param_groups)
    if not free:
        raise ConfigurationError(
            f"WidthTransfer: a step of {type(optimizer).__name__} depends on the gradient's scale, and its rates "
            "follow other rules: use Adam, AdamW or Lion"
        )
    return scales and _alike(optimizer, eps=0.5)


def _alike(optimizer: Any, **eps: float) -> bool:
    """Whether a gradient that is 64 times as large, and an eps so, gives the same step."""
    steps = []
    for scale in (1.0, 64.0):
        p = nn.Parameter(torch.tensor([[1.0, 2.0]], device="cpu"))
        try:
            tried = type(optimizer)([p], lr=0.5, **{name: value * scale for name, value in eps.items()})
            p.grad = torch.tensor([[0.3, -0.2]], device="cpu") * scale
            tried.step()
        except Exception:  # somebody's class, which wants more than a rate: it is believed, but for an eps
            return not eps
        steps.append(p.detach())
    return torch.allclose(steps[0], steps[1], rtol=1e-3)
