"""IA3: train only vectors that multiply keys, values and the inner activations of feed-forward layers.

    k <- l_k * k,    v <- l_v * v,    W_down(h) <- W_down(l_ff * h)

Saves: gradients and optimizer states of all but about 0.01 % of the parameters; merged factors cost nothing
Costs: three products with a vector in each block until the factors are merged; far less capacity than LoRA
Source: Liu et al. (2022), https://arxiv.org/abs/2205.05638
"""

from typing import Any, ClassVar

from torch import nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError
from lit_efficient.mechanisms.adapters.base import freeze_base
from lit_efficient.mechanisms.adapters.ia3 import IA3Scaled, add_ia3
from lit_efficient.mechanisms.adapters.low_rank import kind_of
from lit_efficient.mechanisms.adapters.peft_vectors import ia3_placement
from lit_efficient.mechanisms.adapters.technique import AdapterTechnique
from lit_efficient.surgery import call_layers, count, match_modules
from lit_efficient.traits import Trait

# Ends of the names of keys and values, and of projections down: in Llama, Mistral, Qwen and Gemma, in GPT-2, and in
# this package's GPT. Queries are never scaled: of GPT-2's c_attn only keys and values are.
_FAMILIES = (
    (["k_proj", "v_proj"], ["down_proj"]),
    ([r"attn\.c_attn"], [r"mlp\.c_proj"]),
    ([r"attention\.key", r"attention\.value"], [r"mlp\.down"]),
)


class IA3(AdapterTechnique):
    """Freeze the network and train factors on keys, values and feed-forward layers.

    Args:
        targets: Layers whose outputs are scaled (keys and values). ``auto`` supports Llama, Mistral, Qwen, Gemma, GPT-2
            and this package's GPT. Otherwise regular expressions for the ends of dotted names.
        feedforward: Layers whose inputs are scaled (projections down), in the same form as ``targets``.
        save_base: If true, checkpoints also hold the frozen weights.

    Raises:
        ConfigurationError: If ``auto`` does not support the network, or a pattern matches no linear layer.
        CheckpointError: When resuming with a base other than the one that the factors were trained with.
    """

    phase = Phase.ADAPT
    traits = frozenset({Trait.ADAPTER, Trait.FREEZES_MATRICES, Trait.READS_NO_WEIGHTS, Trait.REFUSES_EARLY})
    keeps = "ia3"
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (0, "frozen weights need no gradients or optimizer states; changes the result")
    }

    def __init__(
        self, targets: str | list[str] = "auto", feedforward: str | list[str] = "auto", save_base: bool = False
    ) -> None:
        super().__init__()
        if (targets == "auto") != (feedforward == "auto"):
            raise ConfigurationError(
                f"IA3: targets and feedforward must both be 'auto' or both be patterns, got targets={targets!r}, "
                f"feedforward={feedforward!r}"
            )
        self.targets = targets
        self.feedforward = feedforward
        self.save_base = save_base

    def transform(self, module: nn.Module) -> Report:
        outputs, inputs = self._patterns(module)
        scaled: list[tuple[str, nn.Module, str]] = []  # name, layer and scaled side
        if outputs:
            found = match_modules(module, outputs, who="IA3: targets", where=_is_linear)
            scaled += [(name, layer, "output") for name, layer in found]
        if inputs:
            found = match_modules(module, inputs, who="IA3: feedforward", where=_is_linear)
            scaled += [(name, layer, "input") for name, layer in found]
        names = [name for name, _, _ in scaled]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ConfigurationError(
                f"IA3: {twice[0]!r} is matched by targets and by feedforward. Only one side of a layer can be scaled: "
                "make one of the patterns narrower"
            )
        factors: list[nn.Parameter] = []
        for _, layer, side in scaled:
            add_ia3(layer, side)
            factors.append(layer.get_parameter("ia3"))
        call_layers(module)
        freeze_base(module, factors, save_base=self.save_base)
        share = count(factors) / count(module.parameters())
        return Report(
            f"{len(names)} layers: {count(factors):,} factors train ({share:.3%})",
            modules=tuple(names),
            parameters=count(factors),
            bytes_saved=sum(p.nbytes for p in module.parameters() if not p.requires_grad),
            details={"trainable_share": share},
        )

    def _patterns(self, module: nn.Module) -> tuple[list[str], list[str]]:
        """Return the patterns of layers whose outputs and whose inputs are scaled."""
        if self.targets != "auto":
            if isinstance(self.targets, str):
                outputs = [self.targets]
            else:
                outputs = list(self.targets)
            if isinstance(self.feedforward, str):
                inputs = [self.feedforward]
            else:
                inputs = list(self.feedforward)
            if not outputs and not inputs:
                raise ConfigurationError("IA3: targets and feedforward are both empty, so that nothing would train")
            return outputs, inputs
        for outputs, inputs in _FAMILIES:
            try:
                match_modules(module, [*outputs, *inputs], who="IA3", where=_is_linear)
            except ConfigurationError:
                continue
            return outputs, inputs
        names = [name for name, part in module.named_modules() if name and _is_linear(part)]
        raise ConfigurationError(
            f"IA3: 'auto' does not support {type(module).__name__}. Name its layers for keys and values in "
            f"targets=[...] and its projections down in feedforward=[...]. Linear layers: {', '.join(names[:8])}"
        )

    @classmethod
    def placement(cls, module: nn.Module) -> dict[str, Any]:
        return ia3_placement(module)

    @classmethod
    def is_in(cls, module: nn.Module) -> bool:
        return any(isinstance(part, IA3Scaled) for part in module.modules())


def _is_linear(module: nn.Module) -> bool:
    return kind_of(module) in ("linear", "conv1d")
