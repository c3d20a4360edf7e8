"""Two narrow blocks in the place of a large network, so that claims on a training can be checked in a minute.

    settings of the config that are the number of blocks, or a width of theirs  ->  2, and a fraction
    else the lists of blocks of the network as it was built                    ->  their first two

Which settings these are is seen on the network, which is built for it without weights.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lit_efficient.evidence.few_blocks import FewBlocks, blocks_by_list
from lit_efficient.evidence.fits import AS_IT_IS, Change, Fit, FitSource
from lit_efficient.evidence.verifying.claims import silence
from lit_efficient.internals.lightning_trainer import begin_fit
from lit_efficient.surgery import count

LARGE = 50_000_000  # parameters
_NARROWEST = 64
# What transformers calls the sizes of a network; those that a family has are set.
_NARROW = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
_NARROW |= {"num_key_value_heads": 2, "head_dim": 64}


def small(source: FitSource, tried: Callable[[FitSource], object]) -> tuple[FitSource, str]:
    """A source of fits whose network is small, and what was done to it as a clause; the same where it is small.

    ``tried`` raises for a source whose fits cannot do a step.
    """
    pretrained = list(_pretrained(source))
    drawn = {name: value for block, _ in pretrained for name, value in block.items()}
    module = _sketch(_Changed(source, Change(settings=drawn)) if drawn else source)
    if module is None or count(module.parameters()) <= LARGE:
        return source, ""
    number = f"{count(module.parameters()) / 1e6:,.0f} million parameters"
    for said, change in _changes(source, module):
        changed = _Changed(source, change)
        smaller = _sketch(changed) if change.settings else module
        if smaller is None or (change.settings and count(smaller.parameters()) >= count(module.parameters())):
            continue
        with contextlib.suppress(Exception):  # as a width that the data gives, too
            tried(changed)
            return changed, f"{said}, of one of {number} (--full takes it as it is)"
    return source, f"as it is, with {number}: it could not be built smaller"


def _sketch(source: FitSource) -> Any:
    """The module with its network, if possible without its weights; ``None`` where it cannot be built so."""
    try:
        with silence():
            fit: Fit = source.without_weights().make()
            if not any(True for _ in fit.module.parameters()):
                begin_fit(fit.trainer, fit.module, fit.datamodule)
                if fit.datamodule is not None:
                    fit.datamodule.prepare_data()
                    fit.datamodule.setup("fit")
                with torch.device("meta"):
                    fit.module.setup("fit")
                    type(fit.module).configure_model(fit.module)
        return fit.module
    except Exception:
        return None


def _changes(source: FitSource, module: nn.Module) -> Iterator[tuple[str, Change]]:
    """What may make the network small, the best first."""
    settings = dict(_flat({"model": source.config().get("model")}))
    lists = blocks_by_list(module)
    depth = max(map(len, lists.values()), default=0)
    blocks = [block for held in lists.values() for block in held]
    sizes = {size for block in blocks for p in block.parameters() for size in p.shape if size > _NARROWEST}
    own = {name: value for name, value in settings.items() if type(value) is int}
    fewer = {name: 2 for name, value in own.items() if value == depth > 2}
    for drawn, narrow in _pretrained(source):
        yield "two narrow blocks with random weights", Change(settings={**drawn, **narrow})
    for factor in (8, 4, 2):
        narrower = {name: value // factor for name, value in own.items() if value in sizes and value % factor == 0}
        if narrower:
            yield "two narrow blocks", Change(settings={**fewer, **narrower})
    if fewer:
        yield "two blocks, as wide as they are", Change(settings=fewer)
    if any(len(held) > 2 for held in lists.values()):
        yield "the first two blocks of each list, as wide as they are", Change(callbacks=lambda: [FewBlocks()])


def _pretrained(source: FitSource) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Of each model of transformers that is named the settings that draw its weights, and those that make it small."""
    settings = dict(_flat({"model": source.config().get("model")}))
    for name, path in settings.items():
        block = name.removesuffix(".name_or_path")
        if block == name or not path or f"{block}.random_weights" not in settings:
            continue
        from lit_efficient.models.libraries.causal_lm import CausalLMConfig, resolve

        config = resolve(CausalLMConfig(path, revision=settings.get(f"{block}.revision")))
        fields = {**(settings.get(f"{block}.config_fields") or {}), **_NARROW}
        drawn: dict[str, Any] = {f"{block}.random_weights": True}
        drawn |= {f"{block}.quantize": None} if settings.get(f"{block}.quantize") else {}
        narrow = {key: value for key, value in fields.items() if key not in _NARROW or hasattr(config, key)}
        yield drawn, {f"{block}.config_fields": narrow}


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        name = f"{path}.{key}" if path else str(key)
        yield name, value
        yield from _flat(value, name)


class _Changed(FitSource):
    """Makes the fits of another source with a change more."""

    def __init__(self, source: FitSource, change: Change) -> None:
        self.source, self.change = source, change

    def make(self, change: Change = AS_IT_IS) -> Fit:
        own = self.change
        settings = {**own.settings, **change.settings}
        callbacks = [*own.callbacks(), *change.callbacks()]
        return self.source.make(replace(change, settings=settings, callbacks=lambda: callbacks))

    def without_weights(self) -> FitSource:
        return _Changed(self.source.without_weights(), self.change)

    def config(self) -> dict[str, Any]:
        return self.source.config()
