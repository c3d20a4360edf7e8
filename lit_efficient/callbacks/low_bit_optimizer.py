"""Low-bit optimizer states: store each moment of a parameter in one byte, or in half a byte, instead of four.

    state bytes per parameter of AdamW: 8 (two float32 moments)  ->  2 (b / 8 + 4 / B)
        = 2.03 with b = 8 bits in blocks of B = 256;  1.06 with b = 4, B = 128;  fp8 as 8 bits

Saves: 6 bytes for each parameter with AdamW and Adam, 3 with SGD, Lion, RMSprop and Adagrad; 6.9 with 4 bits
Costs: quantising and dequantising the states in each optimizer step; nothing in the forward and backward pass
Source: Dettmers et al. (2021), https://arxiv.org/abs/2110.02861; kernels: bitsandbytes and torchao
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

from torch import nn
from torch.optim import Optimizer

from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, Report, format_bytes
from lit_efficient.errors import ConfigurationError, ConflictError, check_installed, check_number, refusal
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.optimizers.low_bit import to_low_bit
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class LowBitOptimizer(OptimizerHooks, Technique):
    """Replace the module's optimizer by its low-bit twin. Parameter groups and schedulers are kept.

    8-bit twins exist for torch's AdamW, Adam, SGD with momentum, RMSprop and Adagrad, and for this package's Lion.
    4-bit and fp8 twins exist for AdamW and Adam.

    Args:
        bits: Number of bits of one state value, 8 or 4, or ``fp8``.
        backend: ``bitsandbytes``, ``torchao`` or ``auto``. ``auto`` uses bitsandbytes for 8 bits if parameters are not
            sharded, else torchao. torchao compiles its step, which takes some seconds once.
        paged: Let the GPU driver move states to CPU memory when GPU memory is full. Needs CUDA and bitsandbytes.
        min_size: Tensors with fewer elements keep 32-bit states, at least 0. torchao also needs a whole number of
            blocks (256 elements, or 128 for 4 bits) and otherwise keeps 32 bits.
        keep_32bit: Names of module classes whose parameters keep 32-bit states, subclasses included.
        decay_norm_and_bias: If false, biases, norms and other tensors with fewer than two dimensions have no weight
            decay. The parameter groups, to which schedulers refer, stay as they are.

    Raises:
        ConfigurationError: For an argument out of range, for an optimizer or a setting that has no low-bit twin, and if
            every tensor is too small, so that nothing would be saved.
        ConflictError: For sharded parameters (DTensors) with bitsandbytes or 4 bits.
    """

    phase = Phase.OPTIMIZER
    alters = ("optimizer",)
    conflicts: ClassVar[dict[str | Trait, str]] = {
        "GroupedAdafactor": "it has no low-bit twin, and its states are already small; leave out LowBitOptimizer",
        "MuonAdamW": "it has no low-bit twin; use FusedAdamW or Lion, or leave out LowBitOptimizer",
        Trait.SCHEDULE_FREE: "there is no schedule-free low-bit kernel; keep one of them",
    }
    computes: ClassVar[str] = "rounded"
    helps: ClassVar[dict[str, tuple[int, str]]] = {"memory": (5, "three quarters of the optimizer's states")}

    def __init__(
        self,
        bits: Literal[8, 4, "fp8"] = 8,
        backend: Literal["auto", "bitsandbytes", "torchao"] = "auto",
        paged: bool = False,
        min_size: int = 4096,
        keep_32bit: Sequence[str] = ("Embedding", "EmbeddingBag"),
        decay_norm_and_bias: bool = True,
    ) -> None:
        super().__init__()
        if backend == "bitsandbytes" and bits != 8:
            raise refusal("LowBitOptimizer", "bits", "8 with backend='bitsandbytes'", bits)
        if paged and (backend == "torchao" or bits != 8):
            raise ConfigurationError(
                f"LowBitOptimizer: paged=True needs bits=8 and bitsandbytes, got bits={bits!r}, backend={backend!r}"
            )
        check_number("LowBitOptimizer", "min_size", min_size, least=0, whole=True)
        if backend == "torchao" or bits != 8:
            check_installed("LowBitOptimizer", "torchao")
        elif backend == "bitsandbytes" or find_spec("torchao") is None:  # auto may use torchao, for sharded parameters
            check_installed("LowBitOptimizer", "bitsandbytes")
        self.bits = bits
        self.backend = backend
        self.paged = paged
        self.min_size = min_size
        self.keep_32bit = tuple(keep_32bit)
        self.decay_norm_and_bias = decay_norm_and_bias

    def check(self, trainer: Any, module: nn.Module) -> None:
        device = trainer.strategy.root_device.type
        if self.paged and device != "cuda":
            raise ConfigurationError(
                "LowBitOptimizer: paged=True needs a CUDA GPU, whose driver does the paging, but the trainer's device "
                f"is {device!r}. Use paged=False"
            )
        if traits_of(trainer.strategy).saves_one_file:
            raise ConflictError(
                "LowBitOptimizer: quantised states of sharded parameters cannot be loaded from a single file. Use "
                "ModelParallelStrategy(save_distributed_checkpoint=True)"
            )

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        kind = type(optimizer).__name__
        done = to_low_bit(
            optimizer,
            self.bits,
            self.backend,
            paged=self.paged,
            min_size=self.min_size,
            keep_32bit=self._kept(module),
            decay_norm_and_bias=self.decay_norm_and_bias,
            who="LowBitOptimizer",
        )
        label = "fp8" if self.bits == "fp8" else f"{self.bits}-bit"
        each = done.state_bytes / done.total
        saved = done.full_bytes - done.state_bytes
        return Report(
            f"{kind}: {done.low / done.total:.1%} of {done.total:,} parameters have {label} states "
            f"({done.backend}), {each:.2f} instead of {done.full_bytes / done.total:.2f} bytes a parameter, "
            f"{format_bytes(saved)} saved",
            parameters=done.low,
            bytes_saved=saved,
            details={
                "state_bytes": done.state_bytes,
                "state_bytes_per_parameter": round(each, 4),
                "backend": done.backend,
                "bits": self.bits,
            },
        )

    def _kept(self, module: nn.Module) -> set[nn.Parameter]:
        """Return the parameters of the classes in ``keep_32bit``."""
        names = set(self.keep_32bit)
        keepers = [m for m in module.modules() if names & {base.__name__ for base in type(m).__mro__}]
        return {p for m in keepers for p in m.parameters(recurse=False)}
