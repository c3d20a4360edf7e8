"""IA3: train factors on keys, values and the inside of feed-forward layers, and nothing else.

    k <- l_k * k,    v <- l_v * v,    W_down(h) <- W_down(l_ff * h)

Saves: gradients and optimizer states of all but about 0.01 % of the parameters; merged, it costs nothing
Costs: three products with a vector a block until merged; far less capacity than LoRA
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

# Ends of names: Llama, Mistral, Qwen and Gemma; GPT-2; this package's GPT. Queries are never scaled.
_FAMILIES = (
    (["k_proj", "v_proj"], ["down_proj"]),
    ([r"attn\.c_attn"], [r"mlp\.c_proj"]),
    ([r"attention\.key", r"attention\.value"], [r"mlp\.down"]),
)


class IA3(AdapterTechnique):
    """Freeze the network and train factors on keys, values and feed-forward layers.

    Args:
        targets: Layers whose outputs are scaled (keys, values): ``auto`` knows Llama, Mistral, Qwen, Gemma, GPT-2 and
            this package's GPT; otherwise regular expressions for the ends of dotted names.
        feedforward: Layers whose inputs are scaled (the projection down), as for ``targets``.
        save_base: Whether checkpoints hold the frozen weights, too.

    Raises:
        ConfigurationError: If ``auto`` does not know the network, or a pattern matches no linear layer.
        CheckpointError: When resuming beside another base than the factors were trained with.
    """

    phase = Phase.ADAPT
    traits = frozenset({Trait.ADAPTER, Trait.FREEZES_MATRICES, Trait.READS_NO_WEIGHTS, Trait.REFUSES_EARLY})
    keeps = "ia3"
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (0, "gradients and states of all but vectors: another training")
    }

    def __init__(
        self, targets: str | list[str] = "auto", feedforward: str | list[str] = "auto", save_base: bool = False
    ) -> None:
        super().__init__()
        if (targets == "auto") != (feedforward == "auto"):
            raise ConfigurationError("IA3: targets and feedforward must both be auto, or both be patterns")
        self.targets = targets
        self.feedforward = feedforward
        self.save_base = save_base

    def transform(self, module: nn.Module) -> Report:
        outputs, inputs = self._patterns(module)
        scaled = [(match_modules(module, outputs, who="IA3: targets", where=_is_linear), "output")] if outputs else []
        scaled += [(match_modules(module, inputs, who="IA3: feedforward", where=_is_linear), "input")] if inputs else []
        names = [name for found, _ in scaled for name, _ in found]
        if len(names) != len(set(names)):
            raise ConfigurationError(
                "IA3: a layer is matched by targets and by feedforward; one of its sides is scaled"
            )
        for found, side in scaled:
            for _, layer in found:
                add_ia3(layer, side)
        call_layers(module)
        factors = [layer.ia3 for found, _ in scaled for _, layer in found]
        freeze_base(module, factors, save_base=self.save_base)  # type: ignore[arg-type]
        share = count(factors) / count(module.parameters())  # type: ignore[arg-type]
        return Report(
            f"{len(names)} layers: {count(factors):,} factors train ({share:.3%})",  # type: ignore[arg-type]
            modules=tuple(names),
            parameters=count(factors),  # type: ignore[arg-type]
            bytes_saved=sum(p.nbytes for p in module.parameters() if not p.requires_grad),
            details={"trainable_share": share},
        )

    def _patterns(self, module: nn.Module) -> tuple[list[str], list[str]]:
        if self.targets != "auto":
            pair = [[p] if isinstance(p, str) else list(p) for p in (self.targets, self.feedforward)]
            if not any(pair):
                raise ConfigurationError("IA3: targets and feedforward are both empty: there would be nothing to train")
            return pair[0], pair[1]
        for outputs, inputs in _FAMILIES:
            try:
                match_modules(module, [*outputs, *inputs], who="IA3", where=_is_linear)
            except ConfigurationError:
                continue
            return outputs, inputs
        names = [name for name, part in module.named_modules() if name and _is_linear(part)]
        raise ConfigurationError(
            f"IA3: {type(module).__name__} is of no family that auto knows; name its layers for keys and values in "
            f"targets=[...] and its projections down in feedforward=[...], among: {', '.join(names[:8])}"
        )

    @classmethod
    def placement(cls, module: nn.Module) -> dict[str, Any]:
        return ia3_placement(module)

    @classmethod
    def is_in(cls, module: nn.Module) -> bool:
        return any(isinstance(part, IA3Scaled) for part in module.modules())


def _is_linear(module: nn.Module) -> bool:
    return kind_of(module) in ("linear", "conv1d")
