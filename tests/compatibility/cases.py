"""The runs whose checkpoints lie in ``files``, by public names.

Each goes on from its checkpoint in the folder ``files``: what names another file there does so without a path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.optim import AdamW

from lit_efficient import (
    APOLLO,
    EMA,
    IA3,
    AutoencoderConfig,
    CausalLMConfig,
    CheckpointAverage,
    Distillation,
    DistillationLoss,
    DiTConfig,
    Divergence,
    ExactResume,
    GaLore,
    GradualUnfreezing,
    GroupedAdafactor,
    LanguageModeling,
    Lion,
    LoRA,
    LowBitOptimizer,
    MuonAdamW,
    Perceptual,
    PowerEMA,
    Preference,
    PrefixTuning,
    QuantizeBase,
    ReplaceHead,
    RewardModeling,
    Samples,
    ScheduleFree,
    ScheduleFreeAdamW,
    SNRWeighting,
    StochasticDepth,
    TokenWeightedAccumulation,
)
from tests.compatibility.toys import (
    LLAMA,
    SMALL_GPT,
    WIDTH,
    Attention,
    Blocks,
    Doubled,
    Patterns,
    SmallAutoencoding,
    SmallDiffusion,
    Stranger,
    Words,
    exact,
    latents,
    pairs,
    rows,
)

FILES = Path(__file__).parent / "files"
ALONE = "adapter"  # the run of which a checkpoint of weights alone is kept, too
SAVED_AT, END = 3, 6  # optimizer steps: the checkpoint's, and where a run that goes on from it ends


@dataclass(frozen=True)
class Case:
    """A run.

    Args:
        module: Makes its module.
        callbacks: Make its techniques.
        data: Makes its data module or loader.
        probe: Numbers [N] that a module computes from fixed input, in eval mode.
        trainer: Further arguments of its trainer.
        more_batches: Batches after the step at which it saves, whose gradients wait for others.
    """

    module: Callable[[], Any]
    callbacks: Callable[[], list[L.Callback]]
    data: Callable[[], Any] = rows
    probe: Callable[[Any], Tensor] = lambda module: module.net(exact(3, WIDTH, salt=9)).flatten()
    trainer: dict[str, Any] = field(default_factory=dict)
    more_batches: int = 0


def logits(module: Any) -> Tensor:
    return module(torch.arange(1, 9)[None])[0, -1]


def reward(module: Any) -> Tensor:
    ids = torch.arange(1, 17).reshape(2, 8)
    return module(ids, torch.ones_like(ids))


def images(module: Any) -> Tensor:
    return module(exact(1, 1, 8, 8, salt=9)).flatten()


def denoised(module: Any) -> Tensor:
    labels = torch.tensor([0, 1, 3])  # the last of which is none
    return module(exact(3, 2, 2, 2, salt=9), torch.tensor([0.1, 0.5, 0.9]), labels).flatten()


def _optimizer(optimizer: Callable[..., Any], *more: Callable[[], L.Callback]) -> Case:
    return Case(partial(Stranger, optimizer=optimizer), lambda: [ExactResume(0), *(make() for make in more)])


_exact_ema = lambda: [ExactResume(0), EMA(decay=0.7)]  # noqa: E731

# In this order: some of them read the checkpoints of others.
CASES: dict[str, Case] = {
    # tasks
    "gpt": Case(
        lambda: LanguageModeling(SMALL_GPT, learning_rate=0.02, warmup_steps=1),
        lambda: [*_exact_ema(), LoRA(rank=2, targets=["query", "value"], save_base=True), LowBitOptimizer(min_size=0)],
        Words,
        logits,
        {"accumulate_grad_batches": 2},  # with which the task adds TokenWeightedAccumulation
    ),
    "llama": Case(
        lambda: LanguageModeling(CausalLMConfig(config_fields=LLAMA), learning_rate=0.02, warmup_steps=1),
        lambda: [ExactResume(0), CheckpointAverage(last_k=None, every_n_steps=1)],
        Words,
        logits,
    ),
    "adapter": Case(
        lambda: LanguageModeling(CausalLMConfig("base"), learning_rate=0.02, warmup_steps=1),
        lambda: [*_exact_ema(), LoRA(rank=2, targets=["q_proj", "v_proj"], variant="rslora")],
        Words,
        logits,
    ),
    "prefix": Case(
        lambda: LanguageModeling(CausalLMConfig("base"), learning_rate=0.02, warmup_steps=1),
        lambda: [ExactResume(0), PrefixTuning(init_tokens=[1, 5])],
        Words,
        logits,
    ),
    "preference": Case(
        lambda: Preference(CausalLMConfig("base"), start_from="adapter.ckpt", learning_rate=0.02, warmup_steps=1),
        lambda: [ExactResume(0), LoRA(rank=2, targets=["q_proj", "v_proj"])],
        pairs,
        logits,
    ),
    "reward": Case(
        lambda: RewardModeling(CausalLMConfig("base"), centering=0.01, learning_rate=0.02, warmup_steps=1),
        lambda: [ExactResume(0), LoRA(rank=2, targets=["q_proj", "v_proj"], modules_to_save=["score"])],
        pairs,
        reward,
    ),
    "distillation": Case(
        lambda: Distillation(
            "llama.ckpt",
            SMALL_GPT,
            DistillationLoss(Divergence("jsd", beta=0.1, temperature=2.0), weight=0.7, chunk_size=5),
            learning_rate=0.02,
            warmup_steps=1,
        ),
        lambda: [ExactResume(0)],
        Words,
        logits,
    ),
    "autoencoding": Case(
        lambda: SmallAutoencoding(AutoencoderConfig(1, 2, 8), perceptual=Perceptual(weight=0.1)),
        lambda: [ExactResume(0)],
        Patterns,
        images,
    ),
    "latent_diffusion": Case(
        lambda: SmallDiffusion(
            DiTConfig(channels=2, size=2, patch_size=1, width=4, depth=1, heads=1, mlp_ratio=1, num_classes=3),
            learning_rate=0.05,
            sampling_steps=2,
            samples=Samples(0),
        ),
        lambda: [*_exact_ema(), SNRWeighting()],
        latents,
        denoised,
    ),
    # techniques in a module of somebody else's
    "power_ema": Case(
        partial(Stranger, optimizer=Lion), lambda: [ExactResume(0), PowerEMA([0.05, 0.1], snapshot_every_n_steps=2)]
    ),
    "unfreezing": Case(
        partial(Stranger, partial(Blocks, depth=2), Lion),
        lambda: [
            *[ExactResume(0), StochasticDepth(0.5, skip="sample"), GradualUnfreezing(every_n_steps=2)],
            CheckpointAverage(last_k=2, every_n_steps=1),
        ],
    ),
    "new_head": Case(
        partial(Stranger, optimizer=Lion), lambda: [ExactResume(0), ReplaceHead(4), TokenWeightedAccumulation()]
    ),
    "somebody_elses": Case(partial(Stranger, optimizer=Lion), lambda: [ExactResume(0), Doubled()]),
    "nf4": Case(
        partial(Stranger, optimizer=Lion),
        lambda: [
            *[ExactResume(0), QuantizeBase("nf4")],
            LoRA(rank=2, targets=["up", "down"], variant="dora", lr_ratio=4.0, save_base=True),
        ],
    ),
    "int4": Case(
        partial(Stranger, optimizer=Lion),
        lambda: [ExactResume(0), QuantizeBase("int4", group_size=4), LoRA(rank=2, variant="qalora", save_base=True)],
    ),
    "ia3": Case(partial(Stranger, Attention, Lion), lambda: [ExactResume(0), QuantizeBase("int8"), IA3()]),
    # optimizers
    "muon": _optimizer(MuonAdamW),
    "adafactor": _optimizer(GroupedAdafactor),
    "lion": replace(_optimizer(Lion), trainer={"accumulate_grad_batches": 3}, more_batches=2),
    "schedule_free": _optimizer(ScheduleFreeAdamW, ScheduleFree),
    "low_bit": _optimizer(AdamW, lambda: LowBitOptimizer(bits=4, min_size=0)),
}


def _language_model(*callbacks: Callable[[], L.Callback]) -> Case:
    model = lambda: LanguageModeling(SMALL_GPT, learning_rate=0.02, warmup_steps=1)  # noqa: E731
    return Case(model, lambda: [ExactResume(0), *(make() for make in callbacks)], Words, logits)


_adapters = lambda: LoRA(rank=2, targets=["query", "value"], save_base=True)  # noqa: E731
# Of releases after the first one, which has files of CASES alone.
NEWER: dict[str, Case] = {
    "qlora_int8": _language_model(lambda: QuantizeBase("int8"), _adapters, lambda: EMA(decay=0.7)),
    "qlora_nf4": _language_model(lambda: QuantizeBase("nf4"), _adapters, lambda: LowBitOptimizer(min_size=0)),
    "rounded": Case(
        partial(Stranger, optimizer=Lion),
        lambda: [ExactResume(0), QuantizeBase("int4", group_size=4), LoRA(rank=2, variant="rounded", save_base=True)],
    ),
    "galore": _optimizer(AdamW, lambda: GaLore(rank=2, update_every=2)),
    "apollo": _optimizer(AdamW, lambda: APOLLO(rank=2, update_every=2)),
}
ALL = CASES | NEWER
# Where the files of each release lie: of the commit before the house was rebuilt, and of the first with a scoreboard.
RELEASES = {"1b73bea": FILES, "2026-11": FILES.with_name("files_2026_11")}


class Notes(L.Callback):
    """Writes down what a run does: it keeps no state."""

    def __init__(self, save: Path | None = None, at: int = SAVED_AT) -> None:
        self.save, self.at = save, at  # the number of batches after which it saves
        self.began: dict[str, Any] = {}
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if not self.began:
            states = [_copied(optimizer.state_dict()) for optimizer in trainer.optimizers]
            self.began = {"global_step": trainer.global_step, "optimizer_states": states}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        if self.save and len(self.losses) == self.at:
            trainer.save_checkpoint(self.save)
            if self.save.stem == ALONE:
                trainer.save_checkpoint(self.save.with_stem("alone"), weights_only=True)
            self.losses, self.save = [], None


def _copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return [_copied(value) for value in state] if isinstance(state, list) else state


def run(case: Case, folder: Path, *, ckpt_path: Path | None = None, save: Path | None = None) -> tuple[Any, Notes]:
    """The fitted module of a run, whole or from a checkpoint on, and notes of it."""
    L.seed_everything(0, verbose=False)
    accumulated = case.trainer.get("accumulate_grad_batches", 1)
    notes, data = Notes(save, accumulated * SAVED_AT + case.more_batches), case.data()
    trainer = L.Trainer(
        **{"accelerator": "cpu", "devices": 1, "logger": False, "max_steps": END, "default_root_dir": folder},
        **{"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False},
        **{"num_sanity_val_steps": 0, "limit_val_batches": 0, **case.trainer},
        callbacks=[*case.callbacks(), notes],
    )
    given = {"datamodule": data} if isinstance(data, L.LightningDataModule) else {"train_dataloaders": data}
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its optimizers' steps, for 30 seconds
        trainer.fit(case.module(), **given, ckpt_path=ckpt_path, weights_only=True)
    assert trainer.global_step == END
    return trainer.lightning_module, notes
