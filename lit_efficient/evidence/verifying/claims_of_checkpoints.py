"""Claims on what a training leaves behind: checkpoints, averages, merged and exported weights."""

import contextlib
import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, defines, techniques_of
from lit_efficient.errors import LitEfficientError
from lit_efficient.evidence.fits import Fit
from lit_efficient.evidence.verifying.claims import (
    Claim,
    Subject,
    Verdict,
    difference,
    first_batch,
    output_differences,
    outputs_of,
    tolerance_of,
    twin,
)
from lit_efficient.export.adapters import export_checkpoint
from lit_efficient.files.tensors import load_tensors, save_tensors
from lit_efficient.internals.lightning_data import validation_loaders
from lit_efficient.internals.lightning_loops import accumulates
from lit_efficient.internals.lightning_trainer import checkpoint_of
from lit_efficient.internals.torch_dispatch import is_traceable_wrapper_subclass
from lit_efficient.mechanisms.adapters.disabled import has_adapters
from lit_efficient.mechanisms.adapters.merge import merge_adapters, without_adapters
from lit_efficient.mechanisms.adapters.peft_layers import networks
from lit_efficient.mechanisms.averages.shadow import ShadowWeights
from lit_efficient.mechanisms.trials.probes import loaders_in
from lit_efficient.mechanisms.trials.steps import Trials, leaves_traces
from lit_efficient.traits import Trait, has_trait

_KEPT = ("global_step", "state_dict", "optimizer_states", "lr_schedulers", "callbacks")


class Resumed(Claim):
    """A run that goes on from a checkpoint, against the one that wrote it and went on."""

    name, sentence = "resume", "a run that is resumed in the midst of an epoch ends with the bits of one that is not"

    def check(self, subject: Subject) -> Verdict:
        """Save after two steps, go on for two more; do these two again from the checkpoint."""
        before, after = _Snapshots(2, subject.folder / "resume.ckpt"), _Snapshots(0)
        trace = subject.train(4, prepare=lambda fit: fit.trainer.callbacks.append(before), slim=True)
        why = "a checkpoint after 2 steps, what is restored from it, and 2 more steps with it and without it"
        try:
            again = subject.train(2, prepare=partial(_resume, before.path, after), slim=True)
        except Exception as error:
            said = f"it cannot be resumed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return self.measured(float("inf"), 0.0, "largest relative difference", why, said)
        off = {f"restored {name}": by for name, by in _each(before.taken[0], after.taken[0]).items()}
        uncovered: tuple[str, ...] = ("a checkpoint inside an accumulation window",)
        if any(has_trait(one, Trait.SEEDS_BATCHES) for one in trace.fit.trainer.callbacks):
            batches = len(again.batches)
            for i, (one, other) in enumerate(zip(trace.batches[-batches:], again.batches)):
                off |= {f"batch {i + 1} after it, {n}": by for n, by in _each(_flat(one), _flat(other)).items()}
            losses = zip(trace.losses[-batches:], again.losses)
            off |= {f"loss {i + 1} after it": abs(a - b) / max(abs(a), 1e-30) for i, (a, b) in enumerate(losses)}
            off |= {f"{name} at the end": by for name, by in _each(before.taken[-1], after.taken[-1]).items()}
        else:
            why = "a checkpoint after 2 steps, and what is restored from it"
            uncovered += ("the steps after a resume, whose batches and draws ExactResume makes the same",)
        return self.compared(off, 0.0, "largest relative difference", why, uncovered)


def _each(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float]:
    """By name how far numbers of all sizes, as weights, counts and seeds, are from others, each relative to itself."""
    pairs = ([{name: each[name]} if name in each else {} for each in (one, other)] for name in {**one, **other})
    return {name: by for a, b in pairs for name, by in difference(a, b).items()}


def _resume(path: Path | None, snapshots: Callback, fit: Fit) -> None:
    fit.resumed = path
    fit.trainer.callbacks.append(snapshots)


class _Snapshots(Callback):
    """Takes what a checkpoint would hold: when one is written or was read, and at the end."""

    def __init__(self, step: int, path: Path | None = None) -> None:
        self.step, self.path = step, path
        self.taken: list[dict[str, Tensor]] = []

    def _take(self, trainer: Any) -> None:
        checkpoint = checkpoint_of(trainer)
        self.taken.append(_flat({key: checkpoint[key] for key in _KEPT if key in checkpoint}))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.path is None:
            self._take(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.path is not None and trainer.global_step == self.step and not accumulates(trainer):
            self._take(trainer)
            trainer.save_checkpoint(self.path, weights_only=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._take(trainer)


def _flat(tree: Any, path: str = "") -> dict[str, Tensor]:
    """Copies of the tensors and numbers in a tree, by path; of callbacks, which measure time too, of the tensors."""
    if isinstance(tree, Tensor):
        if is_traceable_wrapper_subclass(tree):
            return _flat({name: getattr(tree, name) for name in tree.__tensor_flatten__()[0]}, path)
        return {path: tree.detach().to("cpu", copy=True)}
    if isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        return {name: t for key, value in items for name, t in _flat(value, f"{path} {key}".strip()).items()}
    if isinstance(tree, bool | int | float) and not path.startswith("callbacks"):
        return {path: torch.tensor(float(tree), dtype=torch.float64)}
    return {}


class Averaged(Claim):
    """The average that a technique keeps, against its formula over the recorded weights."""

    name, sentence = "average", "the average of the weights is what its formula makes of the weights of each step"

    def check(self, subject: Subject) -> Verdict:
        """Record the weights of some steps, and sum them by the shares that the technique says they have."""
        steps, notes = 4, []

        def soon(fit: Fit) -> None:
            for technique in _averages(fit):
                for name in ("start_step", "every_n_steps"):
                    if technique.shares(steps) is None and getattr(technique, name, 0) > 1:
                        notes.append(f"{type(technique).__name__} with {name}={getattr(technique, name)}: 1 was taken")
                        setattr(technique, name, 1)

        trace = subject.train(steps, prepare=soon)
        off: dict[str, float] = {}
        kinds = []
        for technique in _averages(trace.fit):
            shares, found = technique.shares(steps), technique.average(trace.fit.module)
            if shares is None or found is None:
                notes.append(f"{type(technique).__name__}, which is no plain sum of weights here")
                continue
            kinds.append(type(technique).__name__)
            right: dict[str, Any] = {
                name: sum(s * w[name].double() for s, w in zip(shares, trace.weights)) for name in found
            }
            off |= difference(right, found)
        if not kinds:
            return self.idle(f"no technique of this package averages weights{': ' if notes else ''}{'; '.join(notes)}")
        why = f"the average of {' and '.join(kinds)} after {steps} steps, and the sum in float64"
        uncovered = (*notes, "statistics of BatchNorm")
        return self.compared(off, 1e-5, "largest relative difference of weights", why, uncovered)


def _averages(fit: Fit) -> list[ShadowWeights]:
    return [one for one in techniques_of(fit.trainer) if isinstance(one, ShadowWeights)]


class Merged(Claim):
    """A network with its adapters merged, against the network that was trained."""

    name, sentence = "merge", "merged adapters compute what they do beside the base"

    def check(self, subject: Subject) -> Verdict:
        """Let the adapters say something, and compare the outputs of every layer."""
        return subject.within(self._compared)

    def _compared(self, trainer: Any, module: Any) -> Verdict:
        if not has_adapters(module) and not networks(module):
            return self.idle("there are no adapters")
        batch = first_batch(trainer)
        module.eval()
        hooks = [technique for technique in techniques_of(trainer) if isinstance(technique, OptimizerHooks)]
        _stir([p for technique in hooks for p in technique.adapters(module)])
        merged = twin(module)
        merge_adapters(merged)
        if has_adapters(merged):
            return self.idle("prefixes stand beside the network for good, and are not merged")
        off = output_differences(outputs_of(module, batch), outputs_of(merged, batch))
        why = "outputs of a batch with random adapters beside the base, and merged into it"
        return self.compared(off, tolerance_of(trainer, module), "largest relative difference of outputs", why)


class Exported(Claim):
    """The weights of an exported file in a new module, against what validation used."""

    name, sentence = "export", "a new module with the exported weights computes what was validated"

    def check(self, subject: Subject) -> Verdict:
        """Validate, save, export, read the file into a module without adapters and averages, and compare."""
        found = subject.within(partial(self._validated, subject.folder), steps=1)
        if isinstance(found, Verdict):
            return found
        batch, right, tolerance, state = found
        off = subject.within(partial(self._loaded, batch, right, state), traces=_is_gone)
        why = "outputs of a batch in validation, and of a new module with the weights of model.safetensors"
        uncovered = ("the formats peft and merged, which export checks by itself",)
        return self.compared(off, tolerance, "largest relative difference of outputs", why, uncovered)

    def _validated(self, folder: Path, trainer: Any, module: Any) -> Any:
        if any(technique.phase is Phase.QUANTIZE for technique in techniques_of(trainer)):
            return self.idle("the base is quantised: export compares that by itself")
        loaders = loaders_in(validation_loaders(trainer) or [])
        if not loaders:
            return self.idle("nothing is validated")
        _stir([p for p in module.parameters() if p.requires_grad])  # an average is far from the weights then
        batch, look = first_batch(trainer), _Look()
        look.batch = batch
        path, output = folder / "export.ckpt", folder / "exported"
        trainer.save_checkpoint(path, weights_only=False)
        trials = Trials(trainer)
        with trials.trial(alone=False):
            trainer.callbacks = [*trainer.callbacks, look]
            trials.validate([partial(next, iter(loader)) for loader in loaders])
        base = folder / "base.safetensors"
        save_tensors(base, without_adapters(module))
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                export_checkpoint(path, output, "safetensors", check=False)
            except LitEfficientError:  # of adapters alone, whose base must be named
                export_checkpoint(path, output, "safetensors", base, check=False)
        return batch, look.outputs, tolerance_of(trainer, module), load_tensors(output / "model.safetensors")

    def _loaded(self, batch: Any, right: Any, state: dict[str, Tensor], trainer: Any, module: Any) -> dict[str, float]:
        missing = module.load_state_dict(state, strict=False).missing_keys
        parameters = {name for name, _ in module.named_parameters()}
        module.eval()
        off = {name: float("inf") for name in missing if name in parameters}
        return off | output_differences(right, outputs_of(module, batch))


class _Look(Callback):
    """Computes what a batch gives with the weights that validation uses."""

    batch: Any
    outputs: Mapping[str, Any]

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.outputs = outputs_of(pl_module, self.batch)


def _is_gone(callback: Any) -> bool:
    """Whether an exported network is without what a callback does to one."""
    kind: Any = type(callback)
    return (
        leaves_traces(callback)
        or getattr(callback, "phase", None) is Phase.ADAPT
        or has_trait(callback, Trait.TRAINING_ONLY)
        or (getattr(callback, "phase", None) is not None and defines(kind, "convert_export"))
    )


@torch.no_grad()
def _stir(parameters: list[Tensor]) -> None:
    """Move weights away from where they are, by about a tenth of their size."""
    generator = torch.Generator().manual_seed(0)
    for p in parameters:
        if p.is_floating_point():
            noise = torch.randn(p.shape, generator=generator, device="cpu").to(p.device, p.dtype)
            p.add_(noise * (p.detach().float().square().mean().sqrt() * 0.1 + 0.01).to(p.dtype))


OF_CHECKPOINTS: tuple[Claim, ...] = (Resumed(), Averaged(), Merged(), Exported())
