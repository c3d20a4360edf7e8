"""Cases of the smoke test. Large libraries are imported only when a case runs, so that the driver can list cases."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

import lit_efficient as le
from lit_efficient.catalog import Card, overlay_of, read_cards
from lit_efficient.files.configs import known


def teacher() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(64, 64), nn.ReLU())


@dataclass(frozen=True)
class Case:
    """One training of the smoke test.

    Args:
        callbacks: Function that returns the techniques.
        module: LightningModule, a key of ``smoke.MODULES``.
        rows: Data, a key of ``smoke.ROWS``. A batch has four rows.
        optimizer: Function from parameters to an optimizer that replaces the module's.
        needs: Packages without which the case is skipped.
        trainer: More arguments of the trainer.
        precision: Precisions to run.
        cuda_only: Reason why the case does not run on a CPU. Empty if it does.
        on_device: Whether all trainable tensors must be on the device at the end.
    """

    callbacks: Callable[[], list[Any]] = list
    module: str = "gpt"
    rows: str = "tokens"
    optimizer: Callable[[Any], Any] | None = None
    needs: tuple[str, ...] = ()
    trainer: dict[str, Any] = field(default_factory=dict)
    precision: tuple[str, ...] = ("32-true", "bf16-mixed")
    cuda_only: str = ""
    on_device: bool = True


BNB = ("bitsandbytes",)
AO = ("torchao",)
MIXED = ("bf16-mixed",)
VALIDATES = {"limit_val_batches": 2, "val_check_interval": 3}
CASES: dict[str, Case] = {
    "plain GPT": Case(precision=("32-true", "bf16-mixed", "16-mixed", "bf16-true")),
    "packed rows, grouped heads": Case(rows="packed", precision=("bf16-mixed",)),
    "plain DiT": Case(module="dit", rows="latents"),
    "Llama of transformers": Case(module="llama", needs=("transformers",)),
    "Preference": Case(module="preference", rows="pairs"),
    "LoRA": Case(lambda: [le.LoRA(rank=4)], precision=("32-true", "bf16-mixed", "bf16-true")),
    "LoRA dora": Case(lambda: [le.LoRA(rank=4, variant="dora")]),
    "LoRA pissa": Case(lambda: [le.LoRA(rank=4, variant="pissa")]),
    "LoRA olora": Case(lambda: [le.LoRA(rank=4, variant="olora")]),
    "LoRA eva": Case(lambda: [le.LoRA(rank=4, variant="eva")]),
    "LoRA corda": Case(lambda: [le.LoRA(rank=4, variant="corda")]),
    "LoRA lora_ga": Case(lambda: [le.LoRA(rank=4, variant="lora_ga")]),
    "LoRA lora_fa": Case(lambda: [le.LoRA(rank=4, variant="lora_fa")]),
    "QuantizeBase nf4 + LoRA loftq": Case(
        lambda: [le.QuantizeBase(skip=("head",), keep_source=True), le.LoRA(rank=4, variant="loftq")], needs=BNB
    ),
    "LoRA embedding": Case(lambda: [le.LoRA(rank=4, targets=["embedding"])]),
    "LoRA+": Case(lambda: [le.LoRA(rank=4, lr_ratio=16.0)]),
    "LoRA on a DiT": Case(lambda: [le.LoRA(rank=4)], "dit", "latents"),
    "IA3": Case(lambda: [le.IA3()]),
    "PrefixTuning": Case(lambda: [le.PrefixTuning(num_virtual_tokens=4, init="random")]),
    "QuantizeBase nf4 + LoRA": Case(lambda: [le.QuantizeBase(skip=("head",)), le.LoRA(rank=4)], needs=BNB),
    "QuantizeBase fp4 + LoRA": Case(lambda: [le.QuantizeBase("fp4", skip=("head",)), le.LoRA(rank=4)], needs=BNB),
    "QuantizeBase int8 + LoRA": Case(lambda: [le.QuantizeBase("int8", skip=("head",)), le.LoRA(rank=4)], needs=BNB),
    "QuantizeBase int4 + QA-LoRA": Case(
        lambda: [le.QuantizeBase("int4", skip=("head",)), le.LoRA(rank=4, variant="qalora", targets=["query"])]
    ),
    "QuantizeBase nf4 of a user's network": Case(
        lambda: [le.QuantizeBase(skip=("4",)), le.LoRA(rank=4, variant="pissa", targets=["net.4"])], "user", needs=BNB
    ),
    "QuantizeBase int8 of a user's network": Case(
        lambda: [le.QuantizeBase("int8", skip=("4",)), le.LoRA(rank=4, variant="pissa", targets=["net.4"])],
        "user",
        needs=BNB,
    ),
    "ReplaceHead": Case(lambda: [le.ReplaceHead(num_outputs=3)], "user"),
    "FeatureMatching": Case(lambda: [le.FeatureMatching("net", teacher(), {"0": "0"})], "user"),
    "GradualUnfreezing": Case(lambda: [le.GradualUnfreezing(every_n_steps=2)]),
    "ChannelsLast": Case(lambda: [le.ChannelsLast()], "convolutions"),
    "EMA": Case(lambda: [le.EMA()], trainer=VALIDATES),
    "EMA on the CPU": Case(lambda: [le.EMA(device="cpu")], trainer=VALIDATES),
    "PowerEMA": Case(lambda: [le.PowerEMA(dirpath=mkdtemp())], trainer=VALIDATES),
    "CheckpointAverage": Case(lambda: [le.CheckpointAverage(every_n_steps=1)], trainer=VALIDATES),
    "ExactResume": Case(lambda: [le.ExactResume()]),
    "ChunkedCrossEntropy": Case(lambda: [le.ChunkedCrossEntropy(chunk_size=64)]),
    "TokenWeightedAccumulation": Case(lambda: [le.TokenWeightedAccumulation()], trainer={"accumulate_grad_batches": 2}),
    "NonFiniteGuard": Case(lambda: [le.NonFiniteGuard()]),
    "SNRWeighting": Case(lambda: [le.SNRWeighting()], "dit", "latents"),
    "StochasticDepth batch": Case(lambda: [le.StochasticDepth()]),
    "StochasticDepth sample": Case(lambda: [le.StochasticDepth(skip="sample")]),
    "ActivationCheckpointing": Case(lambda: [le.ActivationCheckpointing()]),
    "ActivationCheckpointing save": Case(lambda: [le.ActivationCheckpointing(save=["attention"])]),
    "Compile": Case(lambda: [le.Compile()], precision=("bf16-mixed",)),
    "LowBitOptimizer 8": Case(lambda: [le.LowBitOptimizer(min_size=64)], needs=BNB),
    "LowBitOptimizer 4": Case(lambda: [le.LowBitOptimizer(bits=4, min_size=64)], needs=AO, precision=("32-true",)),
    "OffloadOptimizer": Case(lambda: [le.OffloadOptimizer(piece_mb=1)], cuda_only="the CPU refuses it"),
    "OffloadOptimizer, gradients": Case(
        lambda: [le.OffloadOptimizer(piece_mb=1, gradients=True)], cuda_only="the CPU refuses it"
    ),
    "OptimizerInBackward": Case(lambda: [le.OptimizerInBackward()]),
    "GaLore": Case(lambda: [le.GaLore(rank=8, update_every=2)], precision=("32-true",)),
    "APOLLO": Case(lambda: [le.APOLLO(rank=8, update_every=2)], precision=("32-true",)),
    "StochasticRounding": Case(lambda: [le.StochasticRounding()], precision=("bf16-true",)),
    "KahanSummation": Case(lambda: [le.KahanSummation()], precision=("bf16-true",)),
    "KeepFloat32": Case(lambda: [le.KeepFloat32()], precision=("bf16-true",)),
    "FastMatmul": Case(lambda: [le.FastMatmul()]),
    "AttentionBackend efficient": Case(lambda: [le.AttentionBackend("efficient")], "dit", "latents"),
    "AttentionBackend flash": Case(lambda: [le.AttentionBackend("flash")], precision=("bf16-mixed",)),
    "MemoryEfficientLayers": Case(lambda: [le.MemoryEfficientLayers("torch")]),
    "MemoryEfficientLayers liger": Case(
        lambda: [le.MemoryEfficientLayers("liger")], "llama", needs=("transformers", "liger_kernel"), cuda_only="Triton"
    ),
    "MemoryEfficientLayers compile": Case(
        lambda: [le.MemoryEfficientLayers("compile")], "llama", needs=("transformers",), precision=("bf16-mixed",)
    ),
    "MemoryEfficientLayers compile in recomputed blocks": Case(
        lambda: [le.ActivationCheckpointing(), le.MemoryEfficientLayers("compile")], precision=("bf16-mixed",)
    ),
    "TiledMLP": Case(lambda: [le.TiledMLP(tokens=16)]),
    "Tiling": Case(lambda: [le.Tiling(pad_vocabulary=64)]),
    "ActivationOffload": Case(lambda: [le.ActivationOffload(min_bytes=1)], cuda_only="the CPU refuses it"),
    "ActivationOffload of hidden blocks": Case(
        lambda: [le.ActivationCheckpointing(), le.ActivationOffload(min_bytes=1, flops_per_byte=50.0)],
        cuda_only="the CPU refuses it",
    ),
    "BlockSwap + LoRA": Case(lambda: [le.BlockSwap(), le.LoRA(rank=4)], cuda_only="the CPU refuses it"),
    "BlockSwap trained": Case(lambda: [le.BlockSwap(trained=True)], cuda_only="the CPU refuses it", on_device=False),
    "EmptyCache": Case(lambda: [le.EmptyCache(every_n_steps=2)], cuda_only="the CPU refuses it"),
    "DevicePrefetcher": Case(lambda: [le.DevicePrefetcher()], cuda_only="the CPU refuses it"),
    "ThroughputMeter": Case(lambda: [le.ThroughputMeter()]),
    "PeftAdapter": Case(
        lambda: [le.PeftAdapter({"peft_type": "LOKR", "r": 4, "target_modules": ["query"]})], needs=("peft",)
    ),
    "QuantizationAwareTraining": Case(lambda: [le.QuantizationAwareTraining()], needs=AO),
    "QuantizationAwareTraining nvfp4": Case(lambda: [le.QuantizationAwareTraining(format="nvfp4")], needs=AO),
    "QuantizationAwareTraining mxfp4": Case(lambda: [le.QuantizationAwareTraining(format="mxfp4")], needs=AO),
    "ScheduleFree": Case(lambda: [le.ScheduleFree()], trainer=VALIDATES),
    "FusedAdamW": Case(optimizer=lambda p: le.FusedAdamW(list(p))),
    "Lion": Case(optimizer=lambda p: le.Lion(list(p))),
    "MuonAdamW dion": Case(optimizer=lambda p: le.MuonAdamW(list(p), dion=0.25)),
    "MuonAdamW muon_eq, normuon": Case(optimizer=lambda p: le.MuonAdamW(list(p), muon_eq="row", normuon=0.95)),
    "MuonAdamW": Case(optimizer=lambda p: le.MuonAdamW(list(p))),
    "GroupedAdafactor": Case(optimizer=lambda p: le.GroupedAdafactor(list(p))),
    "AdaptiveGradientClipping": Case(lambda: [le.AdaptiveGradientClipping()], precision=MIXED),
    "GradientNoiseScale": Case(
        lambda: [le.GradientNoiseScale(every_n_steps=2)],
        "user",
        trainer={"accumulate_grad_batches": 2},
        precision=MIXED,
    ),
    "SpikeGuard": Case(lambda: [le.SpikeGuard()], precision=MIXED),
    "MixtureOfExperts": Case(lambda: [le.MixtureOfExperts(experts=4)], precision=MIXED),
    "MixtureOfDepths": Case(lambda: [le.MixtureOfDepths()], precision=MIXED),
    "TokenRouting": Case(lambda: [le.TokenRouting()], "dit", "latents", precision=MIXED),
    "ExpertsBackend": Case(lambda: [le.ExpertsBackend()], "experts", needs=("transformers",)),
    "LossFreeBalancing": Case(lambda: [le.LossFreeBalancing()], "experts", needs=("transformers",), precision=MIXED),
    "QuantizeBase of experts + LoRA": Case(
        lambda: [le.QuantizeBase(experts=True), le.LoRA(rank=4, targets="all-linear+experts")],
        "experts",
        needs=("transformers", *BNB),
    ),
    "AsyncCheckpoint": Case(
        lambda: [le.AsyncCheckpoint(), ModelCheckpoint(mkdtemp(), every_n_train_steps=2, save_last=True)],
        trainer={"plugins": [le.SafeCheckpointIO()], "enable_checkpointing": True},
        precision=MIXED,
    ),
    "MultiTokenPrediction": Case(lambda: [le.MultiTokenPrediction()], precision=MIXED),
    "NEFTune": Case(lambda: [le.NEFTune()], precision=MIXED),
    "LabelSmoothing": Case(lambda: [le.LabelSmoothing()], precision=MIXED),
    "PromptTuning": Case(lambda: [le.PromptTuning(num_virtual_tokens=4, init="random")], precision=MIXED),
    "MaxBatchSize": Case(lambda: [le.MaxBatchSize(max_size=16)], precision=("32-true",)),
    "LRFinder": Case(lambda: [le.LRFinder(num_steps=10, apply=False)], precision=("32-true",)),
}
QUICK = ("plain GPT", "LoRA", "EMA")
# These take a layer for teachers of images, a signal, workers, or batches on the host: plain Python around a step.
LEFT_OUT = {"HiddenAlignment", "LatentAlignment", "SignalCheckpoint", "DataLoaderTuner"}
LEFT_OUT |= {"BatchRamp", "SequenceLengthRamp", "ResolutionRamp", "RankWatch"}
# These compute what torch does on any device, of weights, gradients or losses.
LEFT_OUT |= {"WeightClipping", "OptimizerSchedule", "Initialise", "NoBiasBeforeNorm"}
LEFT_OUT |= {"WidthTransfer", "SelectiveBackprop", "LossCurriculum", "ContrastiveFlowMatching"}


NAMED = {*re.findall(r"\ble\.(\w+)\(", Path(__file__).read_text("utf-8"))}


def as_configured(card: Card) -> Any:
    """Return a technique with the arguments of its overlay config."""
    overlay = yaml.safe_load(known()[overlay_of(card)].read_text("utf-8"))
    (entry,) = (one for one in overlay["trainer"]["callbacks+"] if one["class_path"] == card.name)
    return getattr(le, card.name)(**entry.get("init_args", {}))


def of_overlays(left_out: set[str]) -> dict[str, Case]:
    """Return a case for each callback that has none and is not in ``left_out``, with the arguments of its overlay."""
    cards = [card for card in read_cards() if card.is_technique and card.slot == "trainer.callbacks"]
    rest = [card for card in cards if card.name not in left_out and overlay_of(card)]
    return {card.name: Case(partial(lambda card: [as_configured(card)], card), precision=MIXED) for card in rest}


CASES |= of_overlays(NAMED | LEFT_OUT)
