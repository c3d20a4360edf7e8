"""Compilation in place: torch.compile for each repeated block, or the whole network, under unchanged names.

    block(x) -> compiled graph of block(x);    blocks of one class and one set of attributes share it

Saves: time: fewer kernels and Python steps; with the inductor backend also activations, which it may recompute
Costs: seconds to minutes in the first step; once more for each new shape, and for evaluation
Source: Ansel et al. (2024), https://doi.org/10.1145/3620665.3640366; regional: https://docs.pytorch.org/tutorials/recipes/regional_compilation.html

``torch.compile(block)`` puts ``_orig_mod.`` into every name, and gives up after eight versions of one function: of
twelve blocks that differ in a number it runs four uncompiled, with one line in a log.
"""

import difflib
from lightning.pytorch import LightningModule, Trainer
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lit_efficient.application.ledger import reports_of
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, ConflictError, check_choice, refusal
from lit_efficient.internals.torch_compiler import at_most_versions, breaks, counts, is_compiled, refused, swap_setting
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.surgery import match_modules, mix_in, parents, unmixed
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait, has_trait

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite")
_SHOWN = 8  # places where graphs break that are named
_VERSIONS = 16  # of one block: training and evaluation, a fixed and a free batch size, dropped and run, ...


def compile_in_place(modules: Iterable[nn.Module], **arguments: Any) -> None:
    """Compile each module's call, with its hooks, when it is first made; names, classes and parameters stay.

    Copies and pickles of a module are not compiled. Torch skips what it has written itself: to compile an
    ``nn.Sequential`` or an ``nn.TransformerEncoderLayer`` as it stands does nothing, and says nothing.

    Args:
        modules: Any modules; the limit on versions grows with their number, since alike ones share them.
        **arguments: Of :func:`torch.compile`: ``backend``, ``mode``, ``fullgraph``, ``dynamic``.
    """
    chosen = list(modules)
    for module in chosen:
        if type(module).forward.__module__.startswith("torch.nn."):
            mix_in(module, _Traced)
        module.compile(**at_most_versions(_VERSIONS * len(chosen)), **arguments)


class _Traced(nn.Module):
    """Mix-in that gives a module a forward of its own, for the compiler to start from."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Compile(Technique):
    """Compile the network, so that it runs faster from the second step on.

    Training steps, hooks and ``log`` stay plain Python. What cannot be traced is a graph break: it runs as it would
    without, unless ``fullgraph`` forbids it. At the end of a fit lines say how many graphs there were, and in which
    file and line they break, and why.

    Args:
        modules: ``blocks`` compiles each repeated block, quickly, since alike blocks are compiled once; ``network``
            compiles the module's own children as wholes; otherwise regular expressions for dotted names. Blocks
            that are recomputed in the backward pass are compiled with their recomputation.
        backend: ``inductor``, or another of ``torch.compiler.list_backends(exclude_tags=())``.
        mode: ``default``, ``reduce-overhead`` (CUDA graphs), ``max-autotune``, ``max-autotune-no-cudagraphs`` or
            ``lite``; only for ``inductor``.
        fullgraph: Raise at what cannot be compiled instead of running it as it is.
        dynamic: Whether sizes are free: ``None`` compiles once more when a size has changed; ``True`` frees them at
            once; ``False`` never does.

    Raises:
        ConfigurationError: For an unknown backend or mode, or where there is nothing to compile.
    """

    phase = Phase.COMPILE
    traits = frozenset({Trait.AFTER_SHARDING, Trait.TRAINING_ONLY})
    computes = "same"
    helps = {"speed": (1, "fewer kernels, the same training")}

    def __init__(
        self,
        modules: str | list[str] = "blocks",
        backend: str = "inductor",
        mode: str = "default",
        fullgraph: bool = False,
        dynamic: bool | None = None,
    ) -> None:
        super().__init__()
        backends = torch.compiler.list_backends(exclude_tags=())
        if backend not in backends:
            near = difflib.get_close_matches(backend, backends, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise refusal("Compile", "backend", f"one of {', '.join(backends)}{hint}", backend)
        check_choice("Compile", "mode", mode, _MODES)
        if mode != "default" and backend != "inductor":
            raise ConfigurationError(f"Compile: mode {mode!r} is for the backend inductor, got backend={backend!r}")
        if not modules:
            raise refusal("Compile", "modules", "blocks, network or patterns", modules)
        self.modules = modules
        self.backend = backend
        self.mode = mode
        self.fullgraph = fullgraph
        self.dynamic = dynamic
        self._counted: tuple[int, int, int] | None = None
        self._broken: Counter[tuple[str, str]] = Counter()
        self._retains = False
        self._donated_before: bool | None = None

    def check(self, trainer: Trainer, module: Any) -> None:
        self._retains = any(has_trait(callback, Trait.RETAINS_GRAPH) for callback in trainer.callbacks)

    def transform(self, module: nn.Module) -> Report:
        found = self._found(module)
        for name, part in found:
            if any(True for child in part.modules() if is_compiled(child)):
                raise ConfigurationError(f"Compile: {name!r}, or a part of it, is compiled already: do one of the two")
        for _, part in found if self._retains else ():
            mix_in(part, _Traced)  # so that no graph of an earlier fit fits, which can be run backwards once
        compile_in_place([part for _, part in found], **self._options())
        kinds = ", ".join(sorted({unmixed(part).__name__ for _, part in found}))
        how = self.backend + (f" in mode {self.mode}" if self.mode != "default" else "")
        return Report(
            f"{len(found)} modules ({kinds}) are compiled in place by {how}", modules=tuple(name for name, _ in found)
        )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if self._retains:  # a backward graph that may overwrite what it was given can be run once
            self._donated_before = swap_setting("donated_buffer", False)
        names = reports_of(pl_module)["Compile"].modules
        lost = [part for part in map(pl_module.get_submodule, names) if not is_compiled(part)]
        compile_in_place(lost, **self._options())
        self._counted, self._broken = counts(), breaks()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()
        graphs, tried, done = (now - before for now, before in zip(counts(), self._counted or counts(), strict=True))
        rank_zero_info(f"Compile: {graphs} new graphs of {done} functions in this fit")
        if broken := breaks() - self._broken:
            lines = [f"  {place}: {reason}" for place, reason in list(broken)[:_SHOWN]]
            lines += [f"  and {len(broken) - _SHOWN} more"] if len(broken) > _SHOWN else []
            rank_zero_info(
                "\n".join([f"Compile: graphs break in {len(broken)} places, each a return to Python:", *lines])
            )
        if done < tried:
            rank_zero_warn(
                f"Compile: {tried - done} functions or versions of them were given up and ran uncompiled; "
                'TORCH_LOGS="recompiles,graph_breaks" says more'
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()
        if found := refused(exception):
            exception.add_note(
                f"Compile: fullgraph={self.fullgraph} allows no graph break, and {found[0]} has one: {found[1]}. "
                "fullgraph=False runs it as it is; or change that line"
            )
        super().on_exception(trainer, pl_module, exception)

    def _restore(self) -> None:
        if self._donated_before is not None:
            swap_setting("donated_buffer", self._donated_before)
            self._donated_before = None

    def _options(self) -> dict[str, Any]:
        mode = {"mode": self.mode} if self.backend == "inductor" else {}
        return {"backend": self.backend, "fullgraph": self.fullgraph, "dynamic": self.dynamic, **mode}

    def _found(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        if self.modules == "network":
            found = list(_wholes(module))
        elif self.modules == "blocks":
            found = find_blocks(module, who="Compile", every=True, example=r"modules=['layers\.\d+']")
        else:
            patterns = [self.modules] if isinstance(self.modules, str) else self.modules
            found = match_modules(module, patterns, who="Compile: modules")
        recomputed = {name for name, part in module.named_modules() if getattr(part, "_recomputes", False)}
        if recomputed and not _partitions(self.backend):
            raise ConflictError(
                f"Compile: the backend {self.backend!r} runs a recomputed block again with other random numbers, so "
                "that dropout would give wrong gradients: use inductor or aot_eager, or leave ActivationCheckpointing "
                "out"
            )
        names = dict.fromkeys(_outermost_of(name, recomputed) for name, _ in found)
        return [(name, module.get_submodule(name)) for name in names]


def _wholes(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A plain network itself; of a LightningModule, whose steps stay Python, the children that train."""
    if not hasattr(module, "training_step"):
        yield "", module
        return
    found = list(_called(module))
    if not found:
        raise ConfigurationError(f"Compile: {type(module).__name__} has no child with parameters to compile")
    yield from [item for item in found if any(p.requires_grad for p in item[1].parameters())] or found


def _called(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children that have parameters, those inside plain containers, which nobody calls, included."""
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(child, f"{name}.")
        elif any(True for _ in child.parameters()):
            yield name, child


def _outermost_of(name: str, chosen: set[str]) -> str:
    """The first of ``chosen`` on the way down to ``name``, or ``name``."""
    return next((parent for parent in [*parents(name)][::-1] if parent in chosen), name)


def _partitions(backend: str) -> bool:
    """Whether a backend sees forward and backward as one graph, in which a recomputation is right."""
    return backend.startswith("aot_") or backend in ("inductor", "cudagraphs", "openxla")
