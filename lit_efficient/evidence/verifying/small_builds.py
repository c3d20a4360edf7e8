"""Smaller versions of a large network, so that claims can be checked in a minute.

    settings of the config that hold the number of blocks or a width  ->  2 blocks, and a fraction of the width
    without such settings, the lists of blocks of the built network   ->  their first two blocks

The settings are found by comparing their values with the network, which is built without weights for that.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lit_efficient.evidence.few_blocks import FewBlocks, blocks_by_list
from lit_efficient.evidence.fits import AS_IT_IS, Change, Fit, FitSource
from lit_efficient.evidence.verifying.claims import silence
from lit_efficient.internals.lightning_trainer import begin_fit
from lit_efficient.surgery import count

LARGE = 50_000_000  # parameters
_NARROWEST = 64  # smallest number that is taken for a width
# Small values for the sizes of a network of transformers. A config gets those that it has.
_NARROW = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def small(source: FitSource, tried: Callable[[FitSource], object]) -> tuple[FitSource, str]:
    """Return a source of fits with a small network, and a description of the change.

    The source itself is returned with an empty description if its network is small.

    Args:
        source: Makes the fit.
        tried: Function that raises an error for a source whose fits cannot make a step.
    """
    drawn = {name: value for random, _ in _pretrained(source) for name, value in random.items()}
    # Random weights need no download of pretrained ones.
    module = _sketch(_Changed(source, Change(settings=drawn)))
    if module is None:
        return source, ""
    size = count(module.parameters())
    if size <= LARGE:
        return source, ""
    for description, change in _changes(source, module):
        changed = _Changed(source, change)
        if change.settings:
            smaller = _sketch(changed)
            if smaller is None or count(smaller.parameters()) >= size:
                continue
        with contextlib.suppress(Exception):  # for example, the data may determine a width
            tried(changed)
            return changed, f"{description}, of one of {size / 1e6:,.0f} million parameters (--full uses all of it)"
    return source, f"as it is, with {size / 1e6:,.0f} million parameters: it could not be built smaller"


def _sketch(source: FitSource) -> LightningModule | None:
    """Return the module with its network, without weights if possible; ``None`` if it cannot be built."""
    try:
        with silence():
            fit = source.without_weights().make()
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
    """Yield changes that may make the network small, with descriptions, the smallest first."""
    for random, narrow in _pretrained(source):
        yield "two narrow blocks with random weights", Change(settings={**random, **narrow})
    lists = list(blocks_by_list(module).values())
    depth = max((len(blocks) for blocks in lists), default=0)
    widths = {size for blocks in lists for block in blocks for p in block.parameters() for size in p.shape}
    numbers = {name: value for name, value in _model_settings(source).items() if type(value) is int}
    fewer = {}
    if depth > 2:
        fewer = {name: 2 for name, value in numbers.items() if value == depth}
    # A smaller width may not divide the number of heads.
    for factor in (8, 4, 2):
        narrower = {}
        for name, value in numbers.items():
            if value > _NARROWEST and value in widths and value % factor == 0:
                narrower[name] = value // factor
        if narrower:
            yield "two narrow blocks", Change(settings={**fewer, **narrower})
    if fewer:
        yield "two blocks of full width", Change(settings=fewer)
    if depth > 2:
        yield "the first two blocks of each list, in full width", Change(callbacks=lambda: [FewBlocks()])


def _pretrained(source: FitSource) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield for each pretrained model of transformers the settings for random weights, and for a small network."""
    settings = _model_settings(source)
    for name, path in settings.items():
        block = name.removesuffix(".name_or_path")
        if block == name or not path or f"{block}.random_weights" not in settings:
            continue
        if f"{block}.subfolder" in settings:  # a model of diffusers, which may be part of a pipeline
            continue
        from lit_efficient.models.libraries.causal_lm import CausalLMConfig, resolve

        random: dict[str, Any] = {f"{block}.random_weights": True}
        if settings.get(f"{block}.quantize"):
            random[f"{block}.quantize"] = None
        config = resolve(CausalLMConfig(path, revision=settings.get(f"{block}.revision")))
        fields = dict(settings.get(f"{block}.config_fields") or {})
        fields.update({key: value for key, value in _NARROW.items() if hasattr(config, key)})
        yield random, {f"{block}.config_fields": fields}


def _model_settings(source: FitSource) -> dict[str, Any]:
    """Return all settings of the model at all depths, by their names in the config."""
    found: dict[str, object] = {}

    def collect(tree: object, path: str) -> None:
        if isinstance(tree, Mapping):
            for key, value in tree.items():
                found[f"{path}.{key}"] = value
                collect(value, f"{path}.{key}")

    collect(source.config().get("model"), "model")
    return found


class _Changed(FitSource):
    """Source of the fits of another source with an additional change."""

    def __init__(self, source: FitSource, change: Change) -> None:
        self.source = source
        self.change = change

    def make(self, change: Change = AS_IT_IS) -> Fit:
        settings = {**self.change.settings, **change.settings}
        callbacks = [*self.change.callbacks(), *change.callbacks()]
        return self.source.make(replace(change, settings=settings, callbacks=lambda: callbacks))

    def without_weights(self) -> FitSource:
        return _Changed(self.source.without_weights(), self.change)

    def config(self) -> dict[str, Any]:
        return self.source.config()
