"""Claims about the results of a training: checkpoints, averages, merged and exported weights."""

import contextlib
import io
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, defines, techniques_of
from lit_efficient.errors import LitEfficientError
from lit_efficient.evidence.fits import Fit
from lit_efficient.evidence.verifying.claims import (
    Batch,
    Claim,
    Subject,
    Tensors,
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

_COMPARED = ("global_step", "state_dict", "optimizer_states", "lr_schedulers", "callbacks")  # parts of a checkpoint


class Resumed(Claim):
    """A run that is resumed from a checkpoint is equal to the run that wrote it and continued."""

    name = "resume"
    sentence = "a run that is resumed inside an epoch ends bit-equal to one that was not interrupted"

    def check(self, subject: Subject) -> Verdict:
        """Save after two steps and train two more, then train these two again from the checkpoint."""
        before = _Snapshots(2, subject.folder / "resume.ckpt")
        after = _Snapshots(0)
        trace = subject.train(4, prepare=lambda fit: fit.trainer.callbacks.append(before), slim=True)

        def resume(fit: Fit) -> None:
            fit.resumed = before.path
            fit.trainer.callbacks.append(after)

        try:
            again = subject.train(2, prepare=resume, slim=True)
        except Exception as error:
            text = f"it cannot be resumed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return self.measured(math.inf, 0.0, "a checkpoint after 2 steps, and a run that is resumed from it", text)
        off = {f"restored {name}": by for name, by in _each(before.taken[0], after.taken[0]).items()}
        uncovered = ["a checkpoint inside an accumulation window"]
        if any(has_trait(one, Trait.SEEDS_BATCHES) for one in trace.fit.trainer.callbacks):
            why = "a checkpoint after 2 steps, the restored state, and 2 more steps with and without the interruption"
            # The resumed run has only the last batches.
            batches = len(again.batches)
            for i, (one, other) in enumerate(zip(trace.batches[-batches:], again.batches), start=1):
                for name, by in _each(_flat(one), _flat(other)).items():
                    off[f"batch {i} after it, {name}"] = by
            for i, (a, b) in enumerate(zip(trace.losses[-batches:], again.losses), start=1):
                off[f"loss {i} after it"] = abs(a - b) / max(abs(a), 1e-30)
            off |= {f"{name} at the end": by for name, by in _each(before.taken[-1], after.taken[-1]).items()}
        else:
            why = "a checkpoint after 2 steps, and the restored state"
            uncovered.append("the steps after a resume, whose batches and random numbers only ExactResume keeps equal")
        return self.compared(off, 0.0, why, tuple(uncovered))


def _each(one: Tensors, other: Tensors) -> dict[str, float]:
    """Return differences by name, each relative to its own tensor: weights, counts and seeds differ in size."""
    found: dict[str, float] = {}
    for name in {**one, **other}:
        ours = {key: one[key] for key in [name] if key in one}
        theirs = {key: other[key] for key in [name] if key in other}
        found |= difference(ours, theirs)
    return found


class _Snapshots(Callback):
    """Takes the contents of checkpoints: when one is written or has been read, and at the end.

    Args:
        step: Step after which to write a checkpoint.
        path: Path of the checkpoint; ``None`` writes none.
    """

    def __init__(self, step: int, path: Path | None = None) -> None:
        self.step = step
        self.path = path
        self.taken: list[dict[str, Tensor]] = []

    def _take(self, trainer: Trainer) -> None:
        checkpoint = checkpoint_of(trainer)
        self.taken.append(_flat({key: checkpoint[key] for key in _COMPARED if key in checkpoint}))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.path is None:
            self._take(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        if self.path is not None and trainer.global_step == self.step and not accumulates(trainer):
            self._take(trainer)
            trainer.save_checkpoint(self.path, weights_only=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take(trainer)


def _flat(tree: object, path: str = "") -> dict[str, Tensor]:
    """Return copies of the tensors and numbers in a nested structure, by path.

    Numbers of callbacks are left out, because they may be times.
    """
    if isinstance(tree, Tensor):
        # A wrapper consists of other tensors.
        if is_traceable_wrapper_subclass(tree):
            return _flat({name: getattr(tree, name) for name in tree.__tensor_flatten__()[0]}, path)
        return {path: tree.detach().to("cpu", copy=True)}
    if isinstance(tree, bool | int | float) and not path.startswith("callbacks"):
        return {path: torch.tensor(float(tree), dtype=torch.float64)}
    if isinstance(tree, list | tuple):
        tree = dict(enumerate(tree))
    found: dict[str, Tensor] = {}
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            found |= _flat(value, f"{path} {key}".strip())
    return found


class Averaged(Claim):
    """The average of a technique is equal to its formula, applied to the recorded weights."""

    name = "average"
    sentence = "the average of the weights follows from the weights of each step by its formula"
    unit = "largest relative difference of weights"

    def check(self, subject: Subject) -> Verdict:
        """Record the weights of some steps, and sum them with the shares of the technique's formula."""
        steps = 4
        notes = []

        def average_from_the_start(fit: Fit) -> None:
            for technique in _averages(fit):
                for name in ("start_step", "every_n_steps"):
                    if technique.shares(steps) is None and getattr(technique, name, 0) > 1:
                        kind = type(technique).__name__
                        notes.append(f"{kind} with {name}={getattr(technique, name)}: it was checked with 1")
                        setattr(technique, name, 1)

        trace = subject.train(steps, prepare=average_from_the_start)
        off: dict[str, float] = {}
        kinds = []
        for technique in _averages(trace.fit):
            # The formula gives the share of the weights of each step.
            shares = technique.shares(steps)
            found = technique.average(trace.fit.module)
            if shares is None or found is None:
                notes.append(f"{type(technique).__name__}, which is no weighted sum of weights here")
                continue
            kinds.append(type(technique).__name__)
            right: dict[str, Any] = {}
            for name in found:
                right[name] = sum(share * weights[name].double() for share, weights in zip(shares, trace.weights))
            off |= difference(right, found)
        if not kinds:
            why = "no technique of this package averages weights"
            if notes:
                why += f": {'; '.join(notes)}"
            return self.idle(why)
        why = f"the average of {' and '.join(kinds)} after {steps} steps, and the sum in float64"
        return self.compared(off, 1e-5, why, (*notes, "statistics of BatchNorm"))


def _averages(fit: Fit) -> list[ShadowWeights]:
    return [one for one in techniques_of(fit.trainer) if isinstance(one, ShadowWeights)]


class Merged(Claim):
    """A network with merged adapters computes the same as the network that was trained."""

    name = "merge"
    sentence = "merged adapters compute the same as adapters next to the base"
    unit = "largest relative difference of outputs"

    def check(self, subject: Subject) -> Verdict:
        return subject.within(self._compared)

    def _compared(self, trainer: Trainer, module: LightningModule) -> Verdict:
        if not has_adapters(module) and not networks(module):
            return self.idle("there are no adapters")
        batch = first_batch(trainer)
        module.eval()
        # New adapters may compute nothing, so they are changed first.
        hooks = [technique for technique in techniques_of(trainer) if isinstance(technique, OptimizerHooks)]
        _disturb([p for technique in hooks for p in technique.adapters(module)])
        merged = twin(module)
        merge_adapters(merged)
        if has_adapters(merged):
            return self.idle("prefixes are never merged into the network")
        off = output_differences(outputs_of(module, batch), outputs_of(merged, batch))
        why = "outputs for a batch with random adapters next to the base, and merged into it"
        return self.compared(off, tolerance_of(trainer, module), why)


class Exported(Claim):
    """A new module with the exported weights computes the same as the validation."""

    name = "export"
    sentence = "a new module with the exported weights computes the validated outputs"
    unit = "largest relative difference of outputs"

    def check(self, subject: Subject) -> Verdict:
        """Validate, save and export, load the file into a module without adapters and averages, and compare."""
        found = subject.within(partial(self._validated, subject.folder), steps=1)
        if isinstance(found, Verdict):
            return found
        batch, right, tolerance, state = found
        off = subject.within(partial(self._loaded, batch, right, state), traces=_is_gone_after_export)
        why = "outputs for a batch in validation, and of a new module with the weights of model.safetensors"
        return self.compared(off, tolerance, why, ("the formats peft and merged, which export checks itself",))

    def _validated(self, folder: Path, trainer: Any, module: LightningModule) -> Any:
        """Return a batch, its outputs in validation, the tolerance, and the exported weights."""
        if any(technique.phase is Phase.QUANTIZE for technique in techniques_of(trainer)):
            return self.idle("the base is quantised: export checks that itself")
        loaders = loaders_in(validation_loaders(trainer) or [])
        if not loaders:
            return self.idle("nothing is validated")
        # An average then differs from the weights.
        _disturb([p for p in module.parameters() if p.requires_grad])
        batch = first_batch(trainer)
        outputs: dict[str, object] = {}

        def look(trainer: Trainer, module: LightningModule, *_: object) -> None:
            outputs.update(outputs_of(module, batch))

        path = folder / "export.ckpt"
        output = folder / "exported"
        trainer.save_checkpoint(path, weights_only=False)
        trials = Trials(trainer)
        with trials.trial(alone=False):
            trainer.callbacks = [*trainer.callbacks, LambdaCallback(on_validation_batch_start=look)]
            trials.validate([partial(next, iter(loader)) for loader in loaders])
        base = folder / "base.safetensors"
        save_tensors(base, without_adapters(module))
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                export_checkpoint(path, output, "safetensors", check=False)
            except LitEfficientError:  # a checkpoint of adapters only needs its base
                export_checkpoint(path, output, "safetensors", base, check=False)
        return batch, outputs, tolerance_of(trainer, module), load_tensors(output / "model.safetensors")

    def _loaded(
        self,
        batch: Batch,
        right: Mapping[str, object],
        state: dict[str, Tensor],
        trainer: Trainer,
        module: LightningModule,
    ) -> dict[str, float]:
        # Buffers need not be saved, but every parameter must be.
        missing = module.load_state_dict(state, strict=False).missing_keys
        parameters = {name for name, _ in module.named_parameters()}
        module.eval()
        off = {name: math.inf for name in missing if name in parameters}
        return off | output_differences(right, outputs_of(module, batch))


def _is_gone_after_export(callback: Callback) -> bool:
    """True if an exported network does not contain the changes of a callback."""
    phase = getattr(callback, "phase", None)
    return (
        leaves_traces(callback)
        or phase is Phase.ADAPT
        or has_trait(callback, Trait.TRAINING_ONLY)
        or (phase is not None and defines(type(callback), "convert_export"))  # type: ignore[arg-type]
    )


@torch.no_grad()
def _disturb(parameters: list[Tensor]) -> None:
    """Add noise to weights, of about a tenth of their size."""
    generator = torch.Generator().manual_seed(0)
    for p in parameters:
        if p.is_floating_point():
            noise = torch.randn(p.shape, generator=generator, device="cpu").to(p.device, p.dtype)
            p.add_(noise * (p.detach().float().square().mean().sqrt() * 0.1 + 0.01).to(p.dtype))


OF_CHECKPOINTS: tuple[Claim, ...] = (Resumed(), Averaged(), Merged(), Exported())
