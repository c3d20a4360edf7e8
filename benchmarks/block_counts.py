"""Count what a GPU runs in one block of a 3B model: kernels that it launches, and bytes that they read and write.

    python -m benchmarks.block_counts            one line for each way to train
    python -m benchmarks.block_counts --kernels  and each operator

Shapes are those of Llama 3.2 3B, with 2 rows of 4,096 tokens. Nothing is computed: the tensors have no values. The
counts of a block are those of a network of two blocks less those of one block. An operator that only changes shape or
strides launches nothing. A launch reads each argument and writes each result once; numbers that a tensor repeats count
once. Attention counts as one launch, as does torch's RMSNorm. Kernels of Liger count where Triton would launch
them. A compiled function counts as one kernel forward for each result and one backward for each input, except that all
inputs of a gated product have one. A test counts those that inductor makes of a gate. Those of norms are assumed,
because inductor's code for a CPU has other kernels for sums.

torchtune and Liger are counted where the packages are installed. The last lines count the loss in chunks with the
head's gradient, and a step of AdamW for a weight of 4,096 x 1,024 in bfloat16.
"""

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lit_efficient as le
import lit_efficient.models.networks.gpt
from benchmarks.ladder_gpu import SHAPES
from lit_efficient.application import apply
from lit_efficient.callbacks import memory_efficient_layers as layers
from lit_efficient.internals import torch_as_cuda
from lit_efficient.internals.torch_as_cuda import as_cuda
from lit_efficient.losses.chunked_cross_entropy import chunked_cross_entropy
from lit_efficient.mechanisms.adapters import base
from lit_efficient.mechanisms.blocks import rotary
from lit_efficient.optimizers.low_bit import to_low_bit
from lit_efficient.surgery import mix_in, mix_under

ROWS, LENGTH, VOCABULARY = 2, 4096, 1024
HEAD = 128_256  # words of the head that is counted alone
SHAPE = SHAPES["3B"]
STEPPED = (4096, 1024)  # shape of a weight that an optimizer steps
RANK = 16
ONLY_READ = ("g", "grads", "qmap1", "qmap2")  # arguments that optimizers declare as written
FREE = {
    *("view", "_unsafe_view", "reshape", "expand", "transpose", "t", "permute", "unsqueeze", "squeeze", "slice"),
    *("select", "split", "split_with_sizes", "chunk", "detach", "alias", "as_strided", "unbind", "_reshape_alias"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "promote_types", "device"),
    *("_record_function_enter_new", "_record_function_exit"),
}


class Kernels(TorchDispatchMode):
    """Counts launches and bytes by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name not in FREE:
            # A tensor to write to is the result, and often the first argument, too: it is read and written once.
            read = {key: value for key, value in (kwargs or {}).items() if key != "out"}
            written = out
            if out is None:  # it returns nothing
                arguments = zip(args, func._schema.arguments, strict=False)
                changed = [(value, one) for value, one in arguments if one.alias_info is not None]
                written = [value for value, one in changed if one.alias_info.is_write and one.name not in ONLY_READ]
            self.add(name, args, read, written)
        return out

    def add(self, name: str, *read_and_written: object) -> None:
        """Count a launch that reads and writes these tensors."""
        self.launches[name] += 1
        self.bytes[name] += sum(_bytes(one) for one in tree_leaves(read_and_written) if isinstance(one, Tensor))

    @contextlib.contextmanager
    def as_one(self, name: str, *read: object, launches: int = 1) -> Iterator[list[Tensor]]:
        """Count all that runs inside as launches that read ``read`` and write the tensors that the list receives."""
        before = (self.launches.copy(), self.bytes.copy())
        written: list[Tensor] = []
        yield written
        self.launches, self.bytes = before
        self.add(name, *read, *written)
        self.launches[name] += launches - 1

    def less(self, other: "Kernels") -> "Kernels":
        """Return the counts without those of another."""
        found = Kernels()
        for name in self.launches:
            found.launches[name] = self.launches[name] - other.launches[name]
            found.bytes[name] = self.bytes[name] - other.bytes[name]
        return found


def _bytes(tensor: Tensor) -> int:
    numbers = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numbers *= size if stride else 1
    return numbers * tensor.element_size()


@contextlib.contextmanager
def counted_norms(kernels: list[Kernels]) -> Iterator[None]:
    """Count torch's fused RMSNorm, whose stand-in launches nothing, into the last of ``kernels``."""
    norm: Any = torch_as_cuda._RMSNorm
    forward, backward = norm.forward, norm.backward

    def run_forward(ctx: Any, x: Tensor, weight: Tensor, shape: list[int], eps: float | None) -> Any:
        out = forward(ctx, x, weight, shape, eps)
        kernels[-1].add("_fused_rms_norm", x, weight, out)
        return out

    def run_backward(ctx: Any, gradient: Tensor, unused: Any) -> Any:
        out = backward(ctx, gradient, unused)
        kernels[-1].add("_fused_rms_norm_backward", gradient, ctx.saved_tensors, out)
        return out

    norm.forward, norm.backward = staticmethod(run_forward), staticmethod(run_backward)
    try:
        yield
    finally:
        norm.forward, norm.backward = staticmethod(forward), staticmethod(backward)


@contextlib.contextmanager
def counted_compilation(kernels: list[Kernels]) -> Iterator[None]:
    """Count functions that torch.compile would make kernels of into the last of ``kernels``."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, function: Any, arguments: Any, *tensors: Tensor) -> Any:
            ctx.gated = function is layers._activated_product
            ctx.save_for_backward(*tensors)
            with kernels[-1].as_one("compiled", tensors) as written:
                out = function(*arguments)
                written.extend([out] if isinstance(out, Tensor) else out)
            kernels[-1].launches["compiled"] += len(written) - 1
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            tensors = ctx.saved_tensors
            needed = ctx.needs_input_grad[2:]
            launches = 1 if ctx.gated else sum(needed)
            with kernels[-1].as_one("compiled backward", gradients, tensors, launches=launches) as written:
                found = [torch.empty_like(one) if need else None for one, need in zip(tensors, needed)]
                written.extend(one for one in found if one is not None)
            return None, None, *found

    def compiled(function: Any) -> Any:
        def run(*arguments: Any) -> Any:
            inside = [p for one in arguments if isinstance(one, nn.Module) for p in one.parameters()]
            return Fused.apply(function, arguments, *(one for one in arguments if isinstance(one, Tensor)), *inside)

        return run

    with mock.patch.object(layers, "compiled_once", compiled), mock.patch.dict(rotary._KINDS, compiled=compiled):
        yield


@contextlib.contextmanager
def counted_triton(kernels: list[Kernels]) -> Iterator[None]:
    """Count kernels of Triton, which are not run, into the last of ``kernels``."""
    if find_spec("triton") is None:
        yield
        return
    from triton.runtime.jit import JITFunction

    def run(self: Any, *arguments: Any, grid: Any, warmup: Any, **named: Any) -> None:
        kernels[-1].add(f"triton {self.__name__}", arguments)

    with mock.patch.object(JITFunction, "run", run):
        yield


def passes(make: Callable[[int], nn.Module], depth: int, autocast: bool) -> tuple[Kernels, Kernels]:
    """Return the counts of the second forward and backward pass of a network of ``depth`` blocks."""
    kernels = [Kernels()]
    counted = (counted_norms(kernels), counted_compilation(kernels), counted_triton(kernels))
    with as_cuda(), counted[0], counted[1], counted[2], FakeTensorMode(allow_non_fake_inputs=True):
        network = make(depth)
        ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
        for _ in range(2):
            network.zero_grad()
            kernels.append(Kernels())
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), kernels[-1]:
                out = network(ids)
            out = getattr(out, "logits", out)
            gradient = torch.ones_like(out)
            kernels.append(Kernels())
            with kernels[-1]:
                out.backward(gradient)
    return kernels[-2], kernels[-1]


def in_bfloat16(make: Callable[[], nn.Module]) -> nn.Module:
    """Build a network with weights in bfloat16."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return make()
    finally:
        torch.set_default_dtype(torch.float32)


def ours(*techniques: Callable[[], Any]) -> Callable[[int], nn.Module]:
    """Return a function that builds our GPT with techniques."""

    def make(depth: int) -> nn.Module:
        config = le.GPTConfig(vocab_size=VOCABULARY, max_length=LENGTH, **{**SHAPE, "depth": depth})
        network = in_bfloat16(lambda: le.GPT(config))
        apply(network, [technique() for technique in techniques])
        return network

    return make


def lora() -> Any:
    """Return LoRA on all linear layers of the blocks. The head of this shape is tied and left out by itself."""
    return le.LoRA(rank=RANK, targets="all-linear")


def fused(by: str, *techniques: Callable[[], Any]) -> Callable[[int], nn.Module]:
    """Return a function that builds our GPT with techniques, and with the layers of ``MemoryEfficientLayers``.

    That technique tries its layers with numbers, which these networks do not have. The layers are those of recomputed
    blocks, which compute nothing again by themselves.

    Args:
        by: ``liger`` or ``compile``.
        *techniques: As in :func:`ours`.
    """

    def make(depth: int) -> nn.Module:
        network = ours(*techniques)(depth)
        compiles = by == "compile"
        for part in network.modules():
            if isinstance(part, nn.RMSNorm):
                norm = None if compiles else (1e-5, 0.0, "llama")
                mix_in(part, layers._Norm, _fused_norm=norm, _in_recomputed=True, _compiles=compiles)
            if isinstance(part, le.models.networks.gpt.SwiGLU):
                gate = None if compiles else "swiglu.LigerSiLUMul"
                gated = {"_gated": ("gate", "up", "down"), "_activation": torch.nn.functional.silu, "_fused_gate": gate}
                mix_in(part, layers._Gated, **gated, _in_recomputed=True, _compiles=compiles)
            if isinstance(part, le.models.networks.gpt.GPTAttention):
                mix_under(part, rotary.Turns, _fused_turns={"rotate": "compiled" if compiles else "one"})
        return network

    return make


def torchtune(adapters: bool) -> Callable[[int], nn.Module]:
    """Return a function that builds torchtune's Llama 3.2."""

    def make(depth: int) -> nn.Module:
        from torchtune.models.llama3_1._position_embeddings import Llama3ScaledRoPE
        from torchtune.models.llama3_2._component_builders import llama3_2, lora_llama3_2
        from torchtune.modules.peft import get_adapter_params, set_trainable_params

        Llama3ScaledRoPE.apply_scaling = lambda self, frequencies, *args: frequencies  # it compares values
        shape = {"vocab_size": VOCABULARY, "num_layers": depth, "embed_dim": SHAPE["dim"], "max_seq_len": LENGTH}
        shape |= {"num_heads": SHAPE["num_heads"], "num_kv_heads": SHAPE["num_kv_heads"]}
        shape |= {"intermediate_dim": SHAPE["hidden_dim"]}
        if not adapters:
            return in_bfloat16(lambda: llama3_2(**shape))
        attention = ["q_proj", "k_proj", "v_proj", "output_proj"]
        how = {"lora_attn_modules": attention, "apply_lora_to_mlp": True, "lora_rank": RANK, "lora_alpha": RANK}
        network = in_bfloat16(lambda: lora_llama3_2(**how, **shape))
        set_trainable_params(network, get_adapter_params(network))
        return network

    return make


def transformers(adapters: bool) -> Callable[[int], nn.Module]:
    """Return a function that builds Llama of transformers, with adapters of peft."""

    def make(depth: int) -> nn.Module:
        import peft
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = {"vocab_size": VOCABULARY, "num_hidden_layers": depth, "hidden_size": SHAPE["dim"], "use_cache": False}
        shape |= {"num_attention_heads": SHAPE["num_heads"], "num_key_value_heads": SHAPE["num_kv_heads"]}
        shape |= {"intermediate_size": SHAPE["hidden_dim"], "max_position_embeddings": LENGTH}
        with torch.device("meta"):  # peft moves its layers, which tensors without values elsewhere do not allow
            network: Any = in_bfloat16(lambda: LlamaForCausalLM(LlamaConfig(**shape)))
            if adapters:
                network = peft.get_peft_model(network, peft.LoraConfig(r=RANK, target_modules="all-linear"))
        for module in network.modules():
            for name, value in module.named_parameters(recurse=False):
                made = nn.Parameter(torch.empty_like(value, device="cpu"), value.requires_grad)
                setattr(module, name, made)
            for name, value in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(value, device="cpu"))
        return network

    return make


WAYS: dict[str, tuple[Callable[[int], nn.Module], bool]] = {
    "all weights, bf16-true": (ours(), False),
    "all weights, transformers": (transformers(False), False),
    "all weights, torchtune": (torchtune(False), False),
    "LoRA, bf16-true": (ours(lora), False),
    "LoRA, weights in bfloat16, bf16-mixed": (ours(lora), True),
    "LoRA, peft": (transformers(True), False),
    "LoRA, torchtune": (torchtune(True), False),
    "all weights, Liger": (fused("liger"), False),
    "LoRA, Liger": (fused("liger", lora), False),
    "all weights, compiled layers": (fused("compile"), False),
    "LoRA, compiled layers": (fused("compile", lora), False),
    "LoRA, bf16-mixed, compiled layers": (fused("compile", lora), True),
}
NEEDS = {"torchtune": "torchtune", "Liger": "liger_kernel"}


def head_counts() -> Kernels:
    """Return the counts of the loss in chunks over a head of 128,256 words, forward and backward, without Liger."""
    kernels = Kernels()
    with as_cuda(), FakeTensorMode(allow_non_fake_inputs=True):
        weight = nn.Parameter(torch.empty(HEAD, SHAPE["dim"], dtype=torch.bfloat16))
        hidden = torch.empty(ROWS * LENGTH, SHAPE["dim"], dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(ROWS * LENGTH, dtype=torch.long)
        with kernels:
            chunked_cross_entropy(hidden, weight, labels, reduction="sum", backend="torch").backward()
    return kernels


def step_counts(low: bool) -> Kernels:
    """Return the counts of a step of torch's fused AdamW, or of its twin with 8-bit states.

    In bfloat16 it calls the same operators on a CPU as on a GPU.
    """
    weight = nn.Parameter(torch.zeros(STEPPED, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([weight], fused=True)
    if low:
        to_low_bit(optimizer)
    for _ in range(2):
        weight.grad = torch.zeros_like(weight)
        kernels = Kernels()
        with kernels:
            optimizer.step()
    return kernels


def counts(name: str) -> tuple[Kernels, Kernels]:
    """Return the counts of a block, forward and backward."""
    make, autocast = WAYS[name]
    one, two = (passes(make, depth, autocast) for depth in (1, 2))
    return two[0].less(one[0]), two[1].less(one[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", action="store_true", help="print each operator")
    arguments = parser.parse_args()
    base.digests = lambda module: {}  # of frozen weights, which have no values here
    results = {}
    for name in WAYS:
        missing = [package for word, package in NEEDS.items() if word in name and find_spec(package) is None]
        if missing:
            print(f"{name:40} not counted: {missing[0]} is not installed")
            continue
        found = counts(name)
        result: dict[str, float] = {}
        for where, kernels in zip(("forward", "backward"), found, strict=True):
            result[f"{where}_launches"] = kernels.launches.total()
            result[f"{where}_gb"] = round(kernels.bytes.total() / 1e9, 2)
        results[name] = result
        print(f"{name:40} {result}")
        if arguments.kernels:
            for operator in sorted({*found[0].launches, *found[1].launches}):
                if not any(kernels.launches[operator] for kernels in found):
                    continue
                shown = (f"{k.launches[operator]:3} launches {k.bytes[operator] / 1e9:6.2f} GB" for k in found)
                print(f"    {operator:52} {'   '.join(shown)}")
    head = head_counts()
    results["head"] = {"launches": head.launches.total(), "gb": round(head.bytes.total() / 1e9, 1)}
    print(f"{'head of 128,256 words, all weights':40} {results['head']}")
    steps = {}
    for name, low in (("fused", False), ("low_bit", True)):
        kernels = step_counts(low)
        steps[name] = round(kernels.bytes.total() / (STEPPED[0] * STEPPED[1]), 1)
        print(f"{'step of AdamW, ' + name:40} {steps[name]} bytes a parameter, {dict(kernels.launches)}")
    results["optimizers"] = steps
    print("RESULT " + json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
