"""DeepSpeed's ZeRO: optimizer states, gradients and weights in shards, on the GPU, in host memory or on NVMe.

    stage 1: states / N;   stage 2: also gradients / N;   stage 3: also weights / N

Saves: (N - 1) / N of the memory of the sharded tensors in each of N processes; with offloading all of it on the GPU.
Costs: stage 3 needs 1.5 times the communication of data parallelism; offloading waits for the host's memory, or a disk;
each process builds the whole network in host memory before it keeps its shard.
Source: Rajbhandari et al. (2020), https://arxiv.org/abs/1910.02054; ZeRO-Infinity: https://arxiv.org/abs/2104.07857;
ZeRO++: https://arxiv.org/abs/2306.10209.

Settings of the trainer and of techniques take effect: accumulation, clipping and precision are the trainer's, the
optimizer is the config's. A DeepSpeed setting that contradicts them is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import DeepSpeedPrecision

from lit_efficient.distributed.shards import check_everywhere, write_shards
from lit_efficient.errors import (
    ChecksTypes,
    ConfigurationError,
    ConflictError,
    check_choice,
    check_installed,
    check_number,
    refusal,
)
from lit_efficient.files.checkpoints import local_file
from lit_efficient.internals.lightning_sharding import ZeroBase

_PLACES = ("gpu", "cpu", "nvme")
# DeepSpeed's keys for settings that the trainer, the module or the data decide.
_TRAINERS = {
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "gradient_clipping": "trainer.gradient_clip_val",
    "train_micro_batch_size_per_gpu": "the data's batch_size",
    "train_batch_size": "the data's batch_size, trainer.accumulate_grad_batches and the number of processes",
    "bf16": "trainer.precision: bf16-mixed",
    "fp16": "trainer.precision: 16-mixed",
    "optimizer": "the config's optimizer",
    "scheduler": "the config's lr_scheduler",
}

_MATRICES = "needs whole matrices, and DeepSpeed steps parts of one flat vector: use AdamW, or ShardedStrategy"
# Classes of optimizers, and mix-ins that techniques add to one.
_REFUSED = {
    **dict.fromkeys(("Adafactor", "CAME", "GroupedAdafactor", "Muon", "MuonAdamW", "SOAP"), _MATRICES),
    "ScheduleFreeAdamW": "switches weights, of which DeepSpeed has copies: use AdamW, or ShardedStrategy",
    "Float32Step": "rounds bfloat16 weights, and DeepSpeed steps float32 copies: leave out what rounds or compensates",
    "Streamed": "keeps states in CPU memory by itself: leave OffloadOptimizer out, and set states_on to cpu",
}

# These read weights, or skip layers, while stage 3 gathers and frees weights around each layer.
_NOT_IN_THIRD = {"CheckpointAverage", "Compile", "ContrastiveFlowMatching", "EMA", "FeatureMatching", "HiddenAlignment"}
_NOT_IN_THIRD |= {"LatentAlignment", "PowerEMA", "StochasticDepth", "TokenRouting"}


def zero_config(
    stage: int,
    states_on: str = "gpu",
    weights_on: str = "gpu",
    nvme_path: str | None = None,
    node_size: int = 1,
    quantized: bool = False,
) -> dict[str, object]:
    """Return the part of DeepSpeed's configuration that decides what is sharded and where it is stored.

    Arguments are those of :class:`ZeroStrategy`.

    Raises:
        ConfigurationError: For an argument out of range, or one that the stage does not support.
    """
    check_choice("ZeroStrategy", "stage", stage, (1, 2, 3))
    check_choice("ZeroStrategy", "states_on", states_on, _PLACES)
    check_choice("ZeroStrategy", "weights_on", weights_on, _PLACES)
    check_number("ZeroStrategy", "node_size", node_size, least=1, whole=True)
    third = {"weights_on": weights_on != "gpu", "node_size": node_size > 1, "quantized": quantized}
    third["states_on='nvme'"] = states_on == "nvme"
    given = [name for name, is_given in third.items() if is_given]
    if stage < 3 and given:
        raise refusal("ZeroStrategy", "stage", f"3 with {given[0]}, which DeepSpeed supports in stage 3 only", stage)
    if "nvme" in (states_on, weights_on):
        if not nvme_path:
            raise refusal("ZeroStrategy", "nvme_path", "a folder on NVMe for states_on or weights_on nvme", nvme_path)
    elif nvme_path:
        raise refusal("ZeroStrategy", "nvme_path", "null without states_on or weights_on nvme", nvme_path)
    zero: dict[str, Any] = {"stage": stage, "contiguous_gradients": True, "overlap_comm": True}
    for key, place in {"offload_optimizer": states_on, "offload_param": weights_on}.items():
        if place != "gpu":
            zero[key] = {"device": place, "pin_memory": True}
        if place == "nvme":
            zero[key]["nvme_path"] = nvme_path
    zero |= {"stage3_gather_16bit_weights_on_model_save": stage == 3, "zero_hpz_partition_size": node_size}
    if quantized:
        zero |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    # Without the two keys below DeepSpeed refuses optimizers other than its own and Adam, and with offloaded states all
    # but its own. Lightning cannot evaluate under stage 3 without stage3_gather_16bit_weights_on_model_save.
    return {"zero_optimization": zero, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


class ZeroStrategy(ChecksTypes, ZeroBase):
    """Lightning's DeepSpeedStrategy with a few arguments; needs the package deepspeed and GPUs.

    Args:
        stage: 1, 2 or 3: what is sharded.
        states_on: Place of the optimizer states, and of the optimizer's step: ``gpu``, ``cpu`` or ``nvme`` (stage 3).
        weights_on: Place of weights that are not in use: ``gpu``, ``cpu`` or ``nvme``; stage 3.
        nvme_path: Folder on NVMe, if states or weights are stored there.
        node_size: Number of processes of a node, which gather weights from each other (ZeRO++, stage 3); 1: from all.
        quantized: Send weights in 8 bits and gradients in 4 (ZeRO++, stage 3).
        extra: Further keys of DeepSpeed's configuration; none that the trainer sets.

    Raises:
        ConfigurationError: For an argument out of range or one that the stage does not support; for a key that
            contradicts the trainer; without the package.
        ConflictError: With an optimizer that cannot step parts of a flat vector.
    """

    writes_sums = True
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (0, "states, gradients and weights in shards by DeepSpeed, in host memory or on NVMe")
    }

    def __init__(
        self,
        stage: int = 2,
        states_on: str = "gpu",
        weights_on: str = "gpu",
        nvme_path: str | None = None,
        node_size: int = 1,
        quantized: bool = False,
        extra: dict[str, Any] | None = None,
    ) -> None:
        config = zero_config(stage, states_on, weights_on, nvme_path, node_size, quantized)
        for key in extra or {}:
            if key in _TRAINERS or key in config:
                source = _TRAINERS.get(key, "another argument of this strategy")
                raise refusal("ZeroStrategy", "extra", f"without {key}, which is set by {source}", extra)
        check_installed("ZeroStrategy", "deepspeed")
        if nvme_path and not Path(nvme_path).is_dir():
            raise refusal("ZeroStrategy", "nvme_path", "a folder that exists", nvme_path)
        super().__init__(config={**config, **(extra or {})})
        self.stage = stage
        self.states_on = states_on
        self.weights_on = weights_on
        self.nvme_path = nvme_path
        self.node_size = node_size
        self.quantized = quantized
        self.extra = extra

    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        self.check_network(self.lightning_module, trainer.world_size)
        super().setup(trainer)

    def check_network(self, module: LightningModule, world: int) -> None:
        """Refuse settings of a module and its trainer that DeepSpeed ignores or handles differently, on ``world``
        processes.
        """
        trainer: Any = module.trainer
        names = [kind.__name__ for one in trainer.callbacks for kind in type(one).__mro__]
        freed = [name for name in names if name in _NOT_IN_THIRD]
        if self.stage == 3 and freed:
            raise ConflictError(
                f"ZeroStrategy: {freed[0]} reads weights that stage 3 has freed: use stage 2, or ShardedStrategy"
            )
        if world % self.node_size:
            raise refusal("ZeroStrategy", "node_size", f"a divisor of the {world} processes", self.node_size)
        by_value = trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value"
        plugin = trainer.precision_plugin
        fault = ""
        if by_value:
            fault = "DeepSpeed clips by norm: set trainer.gradient_clip_algorithm to norm"
        elif not isinstance(plugin, DeepSpeedPrecision):
            fault = f"{type(plugin).__name__} sends no gradients to DeepSpeed: set trainer.precision"
        elif module.automatic_optimization is False:
            fault = "DeepSpeed steps by itself: set automatic_optimization to true"
        if fault:
            raise ConfigurationError(f"ZeroStrategy: {fault}")

    def check_window(self, batches: float, window: int) -> None:
        """Refuse an epoch that ends within an accumulation window: Lightning would step there, and DeepSpeed does
        not.
        """
        rest = batches % window
        if rest > 0:
            raise ConfigurationError(
                f"ZeroStrategy: the last {rest} of {batches} batches are not a whole window of {window} "
                "(trainer.accumulate_grad_batches), and DeepSpeed does not step after them: set limit_train_batches to "
                f"{batches - rest}"
            )

    def check_optimizer(self, optimizer: object) -> None:
        for kind in type(optimizer).__mro__:
            if kind.__name__ in _REFUSED:
                raise ConflictError(f"ZeroStrategy: {type(optimizer).__name__} {_REFUSED[kind.__name__]}")

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        save = super().save_checkpoint
        write_shards(self, local_file(filepath), lambda folder: save(checkpoint, folder, storage_options))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        check_everywhere(self, Path(checkpoint_path), sums_alone=True)
        return super().load_checkpoint(checkpoint_path, weights_only)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Do nothing: parameters that are built as shards have no values for code that draws, reads or changes
        weights.
        """
        yield

    def on_train_start(self) -> None:
        super().on_train_start()
        module: Any = self.lightning_module
        self.check_window(module.trainer.num_training_batches, module.trainer.accumulate_grad_batches)
