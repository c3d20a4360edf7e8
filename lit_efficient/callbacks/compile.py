"""Compilation in place: torch.compile for each repeated block or for the whole network, without a change of names.

    block(x) -> compiled graph of block(x);    blocks of one class and one set of attributes share the graph

Saves: time: fewer kernels and Python steps; the inductor backend may also recompute activations, which saves memory
Costs: seconds to minutes in the first step; the same again for each new shape, and for evaluation
Source: Ansel et al. (2024), https://doi.org/10.1145/3620665.3640366; regional: https://docs.pytorch.org/tutorials/recipes/regional_compilation.html

``torch.compile(block)`` inserts ``_orig_mod.`` into every name. It also stops after eight versions of one function: of
twelve blocks that differ in a number it runs four uncompiled, with only a line in a log.
"""

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lit_efficient.application.ledger import reports_of
from lit_efficient.declaration import Phase, Report, parts_of
from lit_efficient.errors import ConfigurationError, ConflictError, check_choice, refusal
from lit_efficient.internals.torch_compiler import at_most_versions, breaks, counts, is_compiled, refused, swap_setting
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.surgery import class_names, match_modules, mix_in, parents
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait, has_trait

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite")
_SHOWN = 8  # largest number of graph breaks that are listed
_VERSIONS = 16  # of one block: training and evaluation, fixed and dynamic batch size, with and without dropping, ...


def compile_in_place(modules: Iterable[nn.Module], **arguments: object) -> None:
    """Compile the calls of modules, with their hooks, in place. Each is compiled at its first call.

    Names, classes and parameters stay the same. Copies and pickles of a module are not compiled. Torch does not compile
    forwards that are its own code, such as that of ``nn.Sequential`` or ``nn.TransformerEncoderLayer``, so these
    modules get a forward outside torch first.

    Args:
        modules: Any modules. The limit on versions grows with their number, because similar modules share it.
        **arguments: Arguments of :func:`torch.compile`: ``backend``, ``mode``, ``fullgraph``, ``dynamic``.
    """
    chosen = list(modules)  # an iterable may be read only once
    for module in chosen:
        if type(module).forward.__module__.startswith("torch.nn."):
            mix_in(module, _Traced)
        module.compile(**at_most_versions(_VERSIONS * len(chosen)), **arguments)


class _Traced(nn.Module):
    """Mix-in with a forward outside torch's own code, which the compiler would skip."""

    def forward(self, *args: object, **kwargs: object) -> object:
        return super().forward(*args, **kwargs)


class Compile(Technique):
    """Compile the network, so that it runs faster from the second step on.

    Training steps, hooks and ``log`` are not compiled. Code that cannot be traced causes a graph break: it runs in
    Python, unless ``fullgraph`` forbids it. At the end of a fit the number of graphs is logged, and the file, line and
    reason of each graph break.

    Args:
        modules: ``blocks`` compiles each repeated block, which is fast, because similar blocks are compiled once.
            ``network`` compiles the module's children as wholes. Otherwise regular expressions for dotted names. Blocks
            that are recomputed in the backward pass are compiled with their recomputation.
        backend: ``inductor``, or another of ``torch.compiler.list_backends(exclude_tags=())``.
        mode: ``default``, ``reduce-overhead`` (CUDA graphs), ``max-autotune``, ``max-autotune-no-cudagraphs`` or
            ``lite``. Modes other than ``default`` are for ``inductor``.
        fullgraph: Raise an error for code that cannot be compiled instead of running it in Python.
        dynamic: Sizes of tensors: ``True`` compiles for all sizes, ``False`` for each size again, ``None`` for all
            sizes after a size has changed once.

    Raises:
        ConfigurationError: For an unknown backend or mode, or if there is nothing to compile.
        ConflictError: With ``ActivationCheckpointing`` and a backend that would draw other random numbers.
    """

    phase = Phase.COMPILE
    traits = frozenset({Trait.AFTER_SHARDING, Trait.TRAINING_ONLY})
    computes = "same"
    helps = {"speed": (1, "fewer kernels, the same result")}

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
            raise ConfigurationError(f"Compile: mode {mode!r} needs the backend inductor, got backend={backend!r}")
        if not modules:
            raise refusal("Compile", "modules", "blocks, network or patterns", modules)
        self.modules = modules
        self.backend = backend
        self.mode = mode
        self.fullgraph = fullgraph
        self.dynamic = dynamic
        self._counts_before = (0, 0, 0)  # torch's counters at the start of the fit
        self._breaks_before: Counter[tuple[str, str]] = Counter()
        self._retains = False
        self._donated_before: bool | None = None

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        self._retains = any(has_trait(part, Trait.RETAINS_GRAPH) for part in parts_of(trainer))

    def transform(self, module: nn.Module) -> Report:
        found = self._found(module)
        for name, part in found:
            if any(map(is_compiled, part.modules())):
                raise ConfigurationError(
                    f"Compile: {name!r}, or a part of it, is compiled already: leave out Compile or that compilation"
                )
            if self._retains:
                # A new class, so that no graph of an earlier fit is reused, whose backward pass may run only once.
                mix_in(part, _Traced)
        parts = [part for _, part in found]
        compile_in_place(parts, **self._options())
        summary = f"{len(found)} modules ({class_names(parts)}) are compiled in place by {self.backend}"
        if self.mode != "default":
            summary += f" in mode {self.mode}"
        return Report(summary, modules=tuple(name for name, _ in found))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if self._retains:  # a backward pass that reuses the memory of its inputs could not run twice
            self._donated_before = swap_setting("donated_buffer", False)
        names = reports_of(pl_module)["Compile"].modules or ()
        # A copied or unpickled module has the report, but is not compiled.
        lost = [part for part in map(pl_module.get_submodule, names) if not is_compiled(part)]
        compile_in_place(lost, **self._options())
        self._counts_before = counts()
        self._breaks_before = breaks()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()
        graphs, tried, done = (now - before for now, before in zip(counts(), self._counts_before, strict=True))
        rank_zero_info(f"Compile: {graphs} new graphs of {done} functions in this fit")
        broken = list(breaks() - self._breaks_before)
        if broken:
            lines = [f"Compile: {len(broken)} graph breaks, each of which returns to Python:"]
            lines += [f"  {place}: {reason}" for place, reason in broken[:_SHOWN]]
            if len(broken) > _SHOWN:
                lines.append(f"  and {len(broken) - _SHOWN} more")
            rank_zero_info("\n".join(lines))
        if done < tried:
            rank_zero_warn(
                f"Compile: torch gave up {tried - done} functions or versions of them, which ran uncompiled; set "
                'TORCH_LOGS="recompiles,graph_breaks" to see the reasons'
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()
        found = refused(exception)
        if found:
            place, reason = found
            exception.add_note(
                f"Compile: fullgraph={self.fullgraph} allows no graph break, and {place} has one: {reason}. Set "
                "fullgraph=False, which runs it in Python, or change that line"
            )
        super().on_exception(trainer, pl_module, exception)

    def _restore(self) -> None:
        if self._donated_before is not None:
            swap_setting("donated_buffer", self._donated_before)
            self._donated_before = None

    def _options(self) -> dict[str, object]:
        options = {"backend": self.backend, "fullgraph": self.fullgraph, "dynamic": self.dynamic}
        return options | ({"mode": self.mode} if self.backend == "inductor" else {})

    def _found(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the modules to compile. A module inside a recomputed block is replaced by that block."""
        if self.modules == "network":
            found = _wholes(module)
        elif self.modules == "blocks":
            found = find_blocks(module, who="Compile", every=True, example=r"modules=['layers\.\d+']")
        else:
            found = match_modules(module, self.modules, who="Compile: modules")
        recomputed = {name for name, part in module.named_modules() if getattr(part, "_recomputes", False)}
        # Other backends do not trace forward and backward pass as one graph, with one state of random numbers.
        one_graph = self.backend.startswith("aot_") or self.backend in ("inductor", "cudagraphs", "openxla")
        if recomputed and not one_graph:
            raise ConflictError(
                f"Compile: the backend {self.backend!r} recomputes a block with other random numbers, so that dropout "
                "would give wrong gradients: use inductor or aot_eager, or leave ActivationCheckpointing out"
            )
        outermost: dict[str, nn.Module] = {}
        for name, _ in found:
            around = [parent for parent in parents(name) if parent in recomputed]  # the nearest first
            name = around[-1] if around else name  # noqa: PLW2901
            outermost[name] = module.get_submodule(name)
        return list(outermost.items())


def _wholes(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a plain network itself, or the children of a LightningModule that train, because its steps stay Python."""
    if not hasattr(module, "training_step"):
        return [("", module)]
    found = list(_called(module))
    if not found:
        raise ConfigurationError(f"Compile: {type(module).__name__} has no child with parameters to compile")
    trained = [(name, child) for name, child in found if any(p.requires_grad for p in child.parameters())]
    return trained or found


def _called(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the children that have parameters. Plain containers, which are never called, yield theirs."""
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(child, f"{name}.")
        elif next(child.parameters(), None) is not None:
            yield name, child
