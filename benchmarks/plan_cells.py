"""The cells of plan_accuracy.py: small trainings, plain and with each technique that applies to them.

There are nine networks: our GPT and DiT, Llama, Qwen3-MoE, GPT-2 and a ViT of transformers, a UNet and SD3's
transformer of diffusers, and a ResNet. Two techniques need a task and an autoencoder in addition. All networks except
ours are in plain LightningModules.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lit_efficient as le
from benchmarks.technique_runs import ResNet
from lit_efficient.catalog import read_cards
from lit_efficient.evidence.fits import AS_IT_IS, Change, Fit, FitSource

ROWS = 64
CLASSES = 10
Rows = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Size:
    """Size of a network: width, number of blocks, length (tokens, or pixels of an image's side), vocabulary."""

    width: int
    depth: int
    length: int
    words: int = 0


class Plain(L.LightningModule):
    """LightningModule without this package. With ``late``, ``configure_model`` builds the network."""

    def __init__(self, make: Callable[[], nn.Module], late: bool = False) -> None:
        super().__init__()
        self.make = make
        self.net = None if late else make()

    def configure_model(self) -> None:
        if self.net is None:
            self.net = self.make()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-3)


class Text(Plain):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(input_ids=batch["input_ids"], labels=batch["labels"]).loss


class Images(Plain):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch["images"])
        return F.cross_entropy(getattr(logits, "logits", logits), batch["labels"])


class Denoised(Plain):
    """Module that predicts the noise. It passes the arguments that the network accepts."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        clean = batch["images"]
        others = {k: v for k, v in batch.items() if k not in ("images", "labels")}
        noise = torch.randn_like(clean)
        time = torch.randint(1000, clean.shape[:1], device=clean.device)
        share = (time / 1000)[:, None, None, None].to(clean.dtype)
        return F.mse_loss(self.net((1 - share) * clean + share * noise, timestep=time, **others).sample, noise)


class Autoencoded(Plain):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.net.decoder(self.net.encoder(batch["images"])), batch["images"])


class Autoencoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        down = [nn.Conv2d(3, width, 3, 2, 1), nn.SiLU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.SiLU()]
        self.encoder = nn.Sequential(*down, nn.Conv2d(2 * width, 8, 3, 1, 1))
        up = [nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1)]
        self.decoder = nn.Sequential(nn.Conv2d(8, 2 * width, 3, 1, 1), nn.SiLU(), *up)


def _shape(size: Size) -> le.GPTConfig:
    return le.GPTConfig(
        vocab_size=size.words,
        dim=size.width,
        depth=size.depth,
        num_heads=size.width // 32,
        max_length=max(128, size.length),
    )


def _gpt(size: Size) -> L.LightningModule:
    return le.LanguageModeling(_shape(size), warmup_steps=1)


def _dit(size: Size, **arguments: Any) -> L.LightningModule:
    heads = size.width // 32
    backbone = le.DiTConfig(channels=4, size=size.length, patch_size=2, width=size.width, depth=size.depth, heads=heads)
    return le.LatentDiffusion(backbone=backbone, samples=le.Samples(0), **arguments)


def _of_transformers(kind: str, config: str, **fields: Any) -> nn.Module:
    import transformers

    return getattr(transformers, kind)(getattr(transformers, config)(**fields))


def _decoder(size: Size) -> dict[str, Any]:
    heads = size.width // 32
    shape = {"hidden_size": size.width, "num_hidden_layers": size.depth, "vocab_size": size.words}
    return {
        **shape,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if heads % 2 else heads // 2,
        "use_cache": False,
    }


def _llama(size: Size) -> L.LightningModule:
    fields = {**_decoder(size), "intermediate_size": 3 * size.width, "tie_word_embeddings": False}
    return Text(partial(_of_transformers, "LlamaForCausalLM", "LlamaConfig", **fields), late=True)


def _qwen3_moe(size: Size) -> L.LightningModule:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": size.width, "head_dim": 32}
    fields = {**_decoder(size), **experts, "intermediate_size": 3 * size.width}
    return Text(partial(_of_transformers, "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **fields))


def _gpt2(size: Size) -> L.LightningModule:
    fields = {"n_embd": size.width, "n_layer": size.depth, "n_head": size.width // 32, "vocab_size": size.words}
    fields |= {"n_positions": max(128, size.length), "use_cache": False}
    return Text(partial(_of_transformers, "GPT2LMHeadModel", "GPT2Config", **fields))


def _vit(size: Size) -> L.LightningModule:
    fields = {"hidden_size": size.width, "num_hidden_layers": size.depth, "num_attention_heads": size.width // 32}
    fields |= {"intermediate_size": 4 * size.width, "image_size": size.length, "patch_size": 4}
    make = partial(_of_transformers, "ViTForImageClassification", "ViTConfig", **fields, num_labels=CLASSES)
    return Images(make)


def _unet(size: Size) -> L.LightningModule:
    from diffusers import UNet2DModel

    widths = (size.width, 2 * size.width)
    down = ("DownBlock2D", "AttnDownBlock2D")
    up = ("AttnUpBlock2D", "UpBlock2D")
    fields = {"in_channels": 3, "out_channels": 3, "layers_per_block": size.depth, "norm_num_groups": 8}
    make = partial(
        UNet2DModel, size.length, block_out_channels=widths, down_block_types=down, up_block_types=up, **fields
    )
    return Denoised(make)


def _sd3(size: Size) -> L.LightningModule:
    from diffusers import SD3Transformer2DModel

    fields = {"num_layers": size.depth, "attention_head_dim": 32, "num_attention_heads": size.width // 32}
    fields |= {"joint_attention_dim": 64, "caption_projection_dim": size.width, "pooled_projection_dim": 48}
    make = partial(SD3Transformer2DModel, size.length, in_channels=4, out_channels=4, pos_embed_max_size=32, **fields)
    return Denoised(make, late=True)


def _resnet(size: Size) -> L.LightningModule:
    widths = (size.width, 2 * size.width, 4 * size.width)
    return Images(partial(ResNet, widths, size.depth, CLASSES))


def _biased_resnet(size: Size) -> L.LightningModule:
    module: Any = _resnet(size)
    module.net.stem[0] = nn.Conv2d(1, size.width, 3, 1, 1)
    return module


def _tokens(size: Size) -> Rows:
    ids = torch.randint(size.words, (ROWS, size.length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def _pairs(size: Size) -> Rows:
    kinds = ("chosen", "rejected")
    return [{f"{kind}_{key}": row[key] for kind in kinds for key in row} for row in _tokens(size)]


def _pixels(size: Size, name: str = "images", channels: int = 3, **others: tuple[int, ...]) -> Rows:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: (channels, size.length, size.length), **others}
    drawn = {key: torch.randn(ROWS, *shape, generator=generator) for key, shape in shapes.items()}
    labels = torch.arange(ROWS) % CLASSES
    return [{**{key: one[i] for key, one in drawn.items()}, "labels": labels[i]} for i in range(ROWS)]


@dataclass(frozen=True)
class Model:
    """Module with its data and sizes. The size in 16 bits is smaller, because 16-bit products are slow.

    Args:
        make: Function that returns the module.
        rows: Function that returns the samples.
        size: Size in float32.
        small: Size in 16 bits.
        batches: The two batch sizes in float32. They are halved in 16 bits.
        drawn: Widths, depths and lengths of the random cells.
    """

    make: Callable[[Size], L.LightningModule]
    rows: Callable[[Size], Rows]
    size: Size
    small: Size
    batches: tuple[int, int] = (4, 8)
    drawn: tuple[tuple[int, ...], ...] = ((128, 160, 224), (2, 3, 5), (48, 80, 112))


_WORDS = Size(192, 3, 64, 4096)
_SMALL = Size(64, 2, 32, 512)
_SIDES = ((96, 128, 160), (2, 3, 4), (16, 24, 32))
MODELS: dict[str, Model] = {
    "GPT": Model(_gpt, _tokens, _WORDS, _SMALL),
    "Llama": Model(_llama, _tokens, _WORDS, _SMALL),
    "Qwen3-MoE": Model(_qwen3_moe, _tokens, Size(192, 2, 64, 4096), _SMALL),
    "GPT-2": Model(_gpt2, _tokens, _WORDS, _SMALL),
    "DiT": Model(_dit, partial(_pixels, name="latents", channels=4), Size(192, 3, 16), Size(64, 2, 8), (8, 16), _SIDES),
    "ViT": Model(_vit, _pixels, Size(192, 3, 32), Size(64, 2, 16), (8, 16), _SIDES),
    "UNet": Model(_unet, _pixels, Size(64, 1, 16), Size(16, 1, 8), (4, 8), ((32, 48, 64), (1, 2), (16, 24))),
    "SD3": Model(
        _sd3,
        partial(_pixels, channels=4, encoder_hidden_states=(12, 64), pooled_projections=(48,)),
        Size(192, 3, 16),
        Size(64, 2, 8),
        (8, 16),
        _SIDES,
    ),
    "ResNet": Model(
        _resnet,
        partial(_pixels, channels=1),
        Size(48, 2, 16),
        Size(8, 1, 8),
        (16, 32),
        ((24, 32, 64), (1, 2, 3), (16, 24)),
    ),
    "ResNet with biases": Model(_biased_resnet, partial(_pixels, channels=1), Size(48, 2, 16), Size(8, 1, 8), (16, 32)),
    "Preference": Model(lambda size: le.Preference(_shape(size), warmup_steps=1), _pairs, _WORDS, _SMALL),
    "Autoencoder": Model(
        lambda size: Autoencoded(partial(Autoencoder, size.width)), _pixels, Size(32, 0, 32), Size(8, 0, 16)
    ),
    "DiT of flows": Model(
        partial(_dit, prediction="flow", schedule="flow"),
        partial(_pixels, name="latents", channels=4),
        Size(192, 3, 16),
        Size(64, 2, 8),
        (8, 16),
    ),
    "DiT with features": Model(
        _dit,
        partial(_pixels, name="latents", channels=4, features=(64, 48)),
        Size(192, 3, 16),
        Size(64, 2, 16),
        (8, 16),
    ),
}
PLAIN = ("GPT", "DiT", "Llama", "Qwen3-MoE", "GPT-2", "UNet", "SD3", "ResNet", "ViT")
TEXTS = ("GPT", "Llama", "GPT-2")
IMAGES = ("DiT", "ViT", "SD3")
BLOCKS = ("Llama", "DiT", "GPT-2", "ViT", "GPT", "SD3")
ALL = (*BLOCKS, "UNet", "Qwen3-MoE", "ResNet")


@dataclass(frozen=True)
class How:
    """Settings of a technique in a cell.

    Args:
        callbacks: Function that returns the technique and the callbacks that it needs.
        on: Models that the technique applies to. Each cell takes the next one.
        optimizer: Function from parameters to an optimizer that replaces the module's.
        plugins: Function that returns the trainer's plugins.
        trainer: Arguments of the trainer.
        turns: Number of cells with the technique.
        cuda_only: Reason why the technique does not run on a CPU. Empty if it does.
        counted: Whether each operator of a step can be intercepted. Otherwise the allocator's records are read.
    """

    callbacks: Callable[[], list[Any]] = list
    on: tuple[str, ...] = ALL
    optimizer: Callable[[Any], Any] | None = None
    plugins: Callable[[], list[Any]] = list
    trainer: dict[str, Any] = field(default_factory=dict)
    turns: int = 1
    cuda_only: str = ""
    counted: bool = True


LOKR = {"peft_type": "LOKR", "r": 8, "alpha": 16, "target_modules": "all-linear"}
SAME_MEMORY = "its memory is the CPU's"


def _teacher() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Conv2d(3, 32, 4, 4), nn.GELU(), nn.Conv2d(32, 48, 1))


def _digits() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return ResNet((32, 48, 64), 1)


def _named(name: str, *given: Any, **arguments: Any) -> Callable[[], list[Any]]:
    return lambda: [getattr(le, name)(*given, **arguments)]


def _stepped(name: str, **arguments: Any) -> Callable[[Any], Any]:
    return lambda parameters: getattr(le, name)(parameters, **arguments)


# How each technique is set where its defaults on every network are not it.
SETTINGS: dict[str, How] = {
    "APOLLO": How(_named("APOLLO", rank=16), on=BLOCKS),
    "ActivationCheckpointing": How(_named("ActivationCheckpointing"), on=BLOCKS, turns=3),
    "ActivationOffload": How(_named("ActivationOffload", min_bytes=1024), on=TEXTS, cuda_only=SAME_MEMORY),
    "AdaptiveGradientClipping": How(_named("AdaptiveGradientClipping", clip_factor=0.05)),
    "AsyncCheckpoint": How(_named("AsyncCheckpoint"), plugins=_named("SafeCheckpointIO")),
    "AttentionBackend": How(_named("AttentionBackend"), on=("GPT", "Llama")),
    "BatchRamp": How(_named("BatchRamp", [1]), trainer={"accumulate_grad_batches": 2}),
    "BlockSwap": How(lambda: [le.BlockSwap(), le.LoRA(rank=4)], on=TEXTS, cuda_only=SAME_MEMORY),
    "ChannelsLast": How(_named("ChannelsLast"), on=("ResNet", "UNet")),
    "CheckpointAverage": How(_named("CheckpointAverage", last_k=2, every_n_steps=1)),
    "ChunkedCrossEntropy": How(_named("ChunkedCrossEntropy", chunk_size=64), on=(*TEXTS, "Qwen3-MoE"), turns=3),
    "Compile": How(_named("Compile"), on=("GPT",), counted=False),
    "ContrastiveFlowMatching": How(_named("ContrastiveFlowMatching"), on=("DiT of flows",)),
    "EMA": How(_named("EMA"), turns=2),
    "EmptyCache": How(_named("EmptyCache", every_n_steps=1), cuda_only="its allocator keeps no cache"),
    "ExpertsBackend": How(_named("ExpertsBackend"), on=("Qwen3-MoE",)),
    "FeatureMatching": How(
        lambda: [le.FeatureMatching("net", _digits(), {r"blocks\.2": r"blocks\.2"})], on=("ResNet",)
    ),
    "Float8Precision": How(
        on=("Llama", "GPT"),
        plugins=_named("Float8Precision", precision="32-true"),
        trainer={"precision": None},
        cuda_only="only emulated there",
    ),
    "FusedAdamW": How(optimizer=_stepped("FusedAdamW")),
    "GaLore": How(_named("GaLore", rank=16), on=BLOCKS, turns=2),
    "GradientClipping": How(_named("GradientClipping", max_norm=1.0)),
    "GradientNoiseScale": How(_named("GradientNoiseScale", every_n_steps=1), trainer={"accumulate_grad_batches": 2}),
    "GradualUnfreezing": How(_named("GradualUnfreezing", [".*weight", ".*"], every_n_steps=1), on=BLOCKS),
    "GroupedAdafactor": How(optimizer=_stepped("GroupedAdafactor")),
    "HiddenAlignment": How(
        lambda: [le.HiddenAlignment(2, None, hidden=96, head=le.AlignmentHead(widths=[192, 48]))],
        on=("DiT with features",),
    ),
    "IA3": How(_named("IA3"), on=("Llama", "GPT-2")),
    "KahanSummation": How(_named("KahanSummation"), trainer={"precision": "bf16-true"}),
    "KeepFloat32": How(_named("KeepFloat32"), on=BLOCKS, trainer={"precision": "bf16-true"}),
    "LRFinder": How(_named("LRFinder", num_steps=10, apply=False)),
    "LabelSmoothing": How(_named("LabelSmoothing"), on=("GPT", "Llama")),
    "LatentAlignment": How(lambda: [le.LatentAlignment(_teacher(), images="images")], on=("Autoencoder",)),
    "Lion": How(optimizer=_stepped("Lion")),
    "LoRA": How(_named("LoRA", rank=8), on=BLOCKS, turns=3),
    "LossFreeBalancing": How(_named("LossFreeBalancing"), on=("Qwen3-MoE",)),
    "LossCurriculum": How(_named("LossCurriculum"), on=("DiT", "GPT")),
    "LowBitOptimizer": How(_named("LowBitOptimizer"), turns=2),
    "MaxBatchSize": How(_named("MaxBatchSize", max_size=4), on=TEXTS),
    "MemoryEfficientLayers": How(_named("MemoryEfficientLayers", backend="torch"), on=("Llama", "GPT")),
    "MixtureOfDepths": How(_named("MixtureOfDepths", capacity=0.5), on=("Llama", "GPT"), turns=2),
    "MixtureOfExperts": How(_named("MixtureOfExperts", experts=4), on=("Llama", "GPT"), turns=2),
    "MuonAdamW": How(optimizer=_stepped("MuonAdamW")),
    "MultiTokenPrediction": How(_named("MultiTokenPrediction"), on=TEXTS),
    "NEFTune": How(_named("NEFTune"), on=TEXTS),
    "NoBiasBeforeNorm": How(_named("NoBiasBeforeNorm"), on=("ResNet with biases",)),
    "OffloadOptimizer": How(_named("OffloadOptimizer", piece_mb=1), cuda_only=SAME_MEMORY),
    "OptimizerInBackward": How(_named("OptimizerInBackward"), turns=2),
    "OptimizerSchedule": How(_named("OptimizerSchedule", weight_decay=[0.04, 0.4])),
    "PeftAdapter": How(lambda: [le.PeftAdapter(LOKR)], on=BLOCKS),
    "PowerEMA": How(_named("PowerEMA", sigma_rels=[0.05, 0.1])),
    "Preference": How(on=("Preference",)),
    "PrefixTuning": How(_named("PrefixTuning", num_virtual_tokens=8, init="random"), on=TEXTS),
    "PromptTuning": How(_named("PromptTuning", num_virtual_tokens=8, init="random"), on=TEXTS),
    "QuantizationAwareTraining": How(_named("QuantizationAwareTraining"), on=BLOCKS),
    "QuantizeBase": How(lambda: [le.QuantizeBase(), le.LoRA(rank=8)], on=BLOCKS, turns=3),
    "ReplaceHead": How(_named("ReplaceHead", num_outputs=CLASSES), on=("ResNet", "ViT")),
    "ResolutionRamp": How(_named("ResolutionRamp", start=0.5, steps=1), on=("ResNet",)),
    "SNRWeighting": How(_named("SNRWeighting", gamma=5.0), on=("DiT",)),
    "SafeCheckpointIO": How(plugins=_named("SafeCheckpointIO")),
    "ScheduleFreeAdamW": How(_named("ScheduleFree"), optimizer=_stepped("ScheduleFreeAdamW")),
    "SelectiveBackprop": How(_named("SelectiveBackprop", keep=0.5), on=("GPT", "DiT")),
    "SequenceLengthRamp": How(_named("SequenceLengthRamp", start=8, end=64, steps=1), on=TEXTS),
    "SpikeGuard": How(_named("SpikeGuard")),
    "StochasticDepth": How(_named("StochasticDepth", rate=0.0), on=BLOCKS),
    "StochasticRounding": How(_named("StochasticRounding"), trainer={"precision": "bf16-true"}),
    "TiledMLP": How(_named("TiledMLP", tokens=16), on=("Llama", "GPT", "DiT")),
    "Tiling": How(_named("Tiling"), on=TEXTS),
    "TokenRouting": How(_named("TokenRouting"), on=("DiT", "ViT"), turns=2),
    "TokenWeightedAccumulation": How(
        _named("TokenWeightedAccumulation"), on=TEXTS, trainer={"accumulate_grad_batches": 2}
    ),
    "WeightClipping": How(_named("WeightClipping", 1.0)),
    "WidthTransfer": How(_named("WidthTransfer", base_width=64, base_depth=2), on=("GPT", "Llama")),
}
OPTIONS: dict[str, How] = {  # settings of techniques above that change other memory
    "QuantizeBase of experts": How(
        lambda: [le.QuantizeBase(experts=True), le.LoRA(rank=8, targets="all-linear+experts")], on=("Qwen3-MoE",)
    ),
}
SETTINGS |= OPTIONS


def techniques() -> list[str]:
    """Return every technique of the catalogue that can change the memory of a step, and options of some."""
    slots = ("trainer.callbacks", "trainer.plugins", "optimizer", "model")
    return [*sorted(card.name for card in read_cards() if card.is_technique and card.slot in slots), *OPTIONS]


@dataclass(frozen=True)
class Cell:
    """A training whose memory is planned and measured.

    Args:
        model: A key of `MODELS`.
        techniques: Names from :func:`techniques`. Empty for plain training.
        batch: Samples per batch.
        precision: Precision argument of the trainer.
        size: Size of the model.
    """

    model: str
    techniques: tuple[str, ...]
    batch: int
    precision: str
    size: Size

    @property
    def name(self) -> str:
        size = f"{self.size.width}x{self.size.depth}x{self.size.length}"
        return f"{self.model} {size}, {'+'.join(self.techniques) or 'plain'}, {self.batch}, {self.precision}"

    @property
    def settings(self) -> list[How]:
        return [SETTINGS.get(name) or How(_named(name)) for name in self.techniques]


def _cell(model: str, names: tuple[str, ...], turn: int, precision: str) -> Cell:
    kind = MODELS[model]
    whole = precision.startswith("32")
    batch = kind.batches[turn % 2]
    if whole:
        return Cell(model, names, batch, precision, kind.size)
    return Cell(model, names, batch // 2, precision, kind.small)


def cells() -> list[Cell]:
    """Return the fixed cells: each network plain, in two batch sizes and two precisions, and each technique."""
    found = []
    for number, model in enumerate(PLAIN):
        low = ("bf16-mixed", "bf16-true")[number % 2]
        found += [_cell(model, (), turn, precision) for precision in ("32-true", low) for turn in (0, 1)]
    for number, name in enumerate(techniques()):
        how = SETTINGS.get(name) or How()
        for turn in range(how.turns):
            model = how.on[(number + turn) % len(how.on)]
            found.append(_cell(model, (name,), number + turn, how.trainer.get("precision") or "32-true"))
    return found


def drawn(seed: int) -> Iterator[Cell]:
    """Yield random cells without end: other sizes, zero to two techniques. Some pairs conflict."""
    draw = random.Random(seed)
    free = [name for name in techniques() if name != "Compile" and not (SETTINGS.get(name) or How()).cuda_only]
    while True:
        model = draw.choice(PLAIN)
        kind = MODELS[model]
        names = draw.sample([n for n in free if model in (SETTINGS.get(n) or How()).on], draw.choice((0, 1, 1, 2, 2)))
        width, depth, length = (draw.choice(values) for values in kind.drawn)
        size = Size(width, depth, length, draw.choice((1024, 3000)) if kind.size.words else 0)
        asked = {(SETTINGS.get(name) or How()).trainer.get("precision") or "32-true" for name in names}
        precision = "32-true" if asked <= {"32-true"} else "bf16-true"
        yield Cell(model, tuple(sorted(names)), draw.randint(3, 12), precision, size)


class CellFit(FitSource):
    """Makes the fit of a cell.

    Args:
        cell: The cell.
        rows: Samples of the cell, the same for all of its fits.
        device: Device of the training. A missing GPU can be planned for.
        steps: Number of steps of the fit.
    """

    def __init__(self, cell: Cell, rows: Rows, device: str = "cpu", steps: int = 5) -> None:
        self.cell = cell
        self.rows = rows
        self.device = device
        self.steps = steps

    def make(self, change: Change = AS_IT_IS) -> Fit:
        L.seed_everything(0, verbose=False)
        settings = self.cell.settings
        module = MODELS[self.cell.model].make(self.cell.size)
        for make in (how.optimizer for how in settings if how.optimizer):
            module.configure_optimizers = MethodType(_optimizer(make), module)  # type: ignore[method-assign]
        arguments = {key: value for how in settings for key, value in how.trainer.items()}
        accelerator = "gpu" if self.device == "cuda" and torch.cuda.is_available() else "cpu"
        trainer = L.Trainer(
            callbacks=[*(one for how in settings for one in how.callbacks()), *change.callbacks()],
            plugins=[one for how in settings for one in how.plugins()] or None,
            **{"precision": self.cell.precision, **arguments},
            accelerator=accelerator,
            devices=1,
            max_steps=self.steps,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
        )
        return Fit(trainer, module, DataLoader(self.rows, self.cell.batch))


def _optimizer(make: Callable[[Any], Any]) -> Callable[[L.LightningModule], Any]:
    return lambda module: make([p for p in module.parameters() if p.requires_grad])
