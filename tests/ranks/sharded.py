"""Techniques under ShardedStrategy on two ranks, beside one process that sees both batches."""

from __future__ import annotations

import copy
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler

from lit_efficient import (
    ActivationCheckpointing,
    AsyncCheckpoint,
    BlockSwap,
    ChunkedCrossEntropy,
    Compile,
    ConfigurationError,
    ConflictError,
    FusedAdamW,
    GroupedAdafactor,
    InverseSquareRoot,
    KahanSummation,
    KeepFloat32,
    Lion,
    LoRA,
    MuonAdamW,
    NEFTune,
    NonFiniteGuard,
    Parallel,
    RankWatch,
    SafeCheckpointIO,
    ScheduleFree,
    ScheduleFreeAdamW,
    ShardedStrategy,
    SignalCheckpoint,
    StochasticRounding,
    ThroughputMeter,
    WarmupConstant,
    WarmupCosine,
    WarmupLinear,
    WarmupStableDecay,
)
from lit_efficient.distributed.shards import read_checkpoint
from lit_efficient.errors import CheckpointError, LitEfficientError
from lit_efficient.internals.lightning_strategies import readers
from lit_efficient.models.networks.dit import DiT, DiTConfig
from lit_efficient.models.networks.gpt import GPT, GPTConfig
from lit_efficient.surgery import memory_of
from tests.callbacks.test_experts_backend import decoder
from tests.contract.effects import GRAPHS
from tests.contract.row import Row
from tests.contract.table import CASES, network_of
from tests.ranks.toys import Sharded, Small, everyones, whole
from tests.support import WIDTH, AttentionNet, Net, TokenAttentionNet, Toy, assert_equal, data, trainer

STEPS = 4  # an epoch


class Tied(AttentionNet):
    """One table for tokens and their logits."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(8, dim=WIDTH, depth=2, num_heads=2, hidden_dim=32, max_length=64))


class Borrowed(Net):
    """Calls a layer of its first block by itself, after the blocks, which two parents hold; a row that one rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.also = nn.Module()
        self.also.blocks = self.blocks
        self.row = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x) * self.row
        block: Any = self.blocks[0]
        return y + block.down(block.up(x))


class Odd(Net):
    """With a block that no batch runs, and a matrix whose columns lie in rows."""

    def __init__(self) -> None:
        super().__init__()
        up: Any = self.blocks[0].up
        up.weight = nn.Parameter(up.weight.detach().t().contiguous().t())
        self.blocks.append(copy.deepcopy(self.blocks[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks[:-1]:
            x = block(x)
        return self.head(x)


class Mixtral(nn.Module):
    """A language model with four experts in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.network = decoder("Mixtral", num_local_experts=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.network((2 * x + 4).long().clamp(0, 7)).logits
        return logits[..., 0]


class Steps(L.Callback):
    """What the module steps by."""

    def __init__(self, optimizer: Any = torch.optim.AdamW, scheduler: Any = None) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler


class Trained(Toy):
    """Steps what trains."""

    def configure_optimizers(self) -> Any:
        by = next((one for one in self.trainer.callbacks if isinstance(one, Steps)), Steps())  # type: ignore[attr-defined]
        optimizer = by.optimizer([p for p in self.parameters() if p.requires_grad], lr=1e-2)
        if by.scheduler is None:
            return optimizer
        return [optimizer], [{"scheduler": by.scheduler(optimizer), "interval": "step"}]


class Losses(L.Callback):
    """The losses of all steps, and of validation."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs["loss"].detach().clone())

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(trainer.callback_metrics["val/loss"].clone())


def strategy(**arguments: Any) -> ShardedStrategy:
    return ShardedStrategy(timeout=timedelta(seconds=60), **arguments)


def fit(
    make: Callable[[], list[Any]],
    network: Any,
    epochs: int = 2,
    ckpt_path: str | None = None,
    sharding: dict[str, Any] | str | Callable[[], Any] | None = None,
    **arguments: Any,
) -> tuple[Any, torch.Tensor, dict[str, torch.Tensor]]:
    """A fit on this rank, or of one process: the trainer, the losses [S] of all ranks, and the whole weights."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    shared = sharding.get("parallel", Parallel()).tensor if isinstance(sharding, dict) else 1  # that see one batch
    dataset = data(8 * STEPS).dataset
    # Rows r, r + 2, ... of a batch.
    sampler: Any = DistributedSampler(dataset, world // shared, rank // shared, shuffle=False)
    chosen = strategy(**sharding) if isinstance(sharding, dict) else sharding or "auto"
    chosen = chosen() if callable(chosen) else chosen
    arguments |= {"devices": world, "strategy": chosen}
    losses = Losses()
    torch.manual_seed(rank)  # ranks differ in what nobody seeds
    run = trainer([*make(), losses], use_distributed_sampler=False, max_epochs=epochs, **arguments)
    module = Trained("init", network=network)
    run.fit(module, DataLoader(dataset, 8 * shared // world, sampler=sampler), data(), ckpt_path=ckpt_path)
    seen = torch.stack(losses.seen)
    with getattr(run.strategy, "gathered", nullcontext)(module):
        weights = {name: tensor.detach().clone() for name, tensor in whole(module.state_dict()).items()}
    return run, torch.stack(everyones(seen)).mean(0) if world > 1 else seen, weights


def case_of(name: str) -> tuple[Callable[[], list[Any]], Any, dict[str, Any]]:
    row = MORE.get(name) or CASES[name]
    switch = [ScheduleFree] if name == "ScheduleFreeAdamW" else []  # its weights are averages outside of training
    return (
        lambda: [row.make(), *(part() for part in switch)],
        row.network if name in MORE else network_of(name),
        dict(row.trainer),
    )


OPTIMIZERS = (FusedAdamW, GroupedAdafactor, Lion, MuonAdamW, ScheduleFreeAdamW)
SCHEDULERS: list[tuple[Any, dict[str, int]]] = [
    *((kind, {"warmup": 2}) for kind in (InverseSquareRoot, WarmupConstant)),
    *((kind, {"total_steps": 2 * STEPS, "warmup": 2}) for kind in (WarmupCosine, WarmupLinear, WarmupStableDecay)),
]


def _others() -> list[tuple[str, Any, Any, dict[str, Any]]]:
    return [
        ("clipping", L.Callback, Net, {"gradient_clip_val": 0.05}),
        ("accumulation", L.Callback, Odd, {"accumulate_grad_batches": 2}),
        ("NonFiniteGuard", NonFiniteGuard, Net, {}),
        ("SignalCheckpoint", SignalCheckpoint, Net, {}),
        ("tied", L.Callback, Tied, {}),
        ("borrowed", NonFiniteGuard, Borrowed, {"gradient_clip_val": 0.05}),
        ("LoRA", partial(LoRA, rank=2), Net, {}),  # the row's is LoRA+
        ("rsLoRA", partial(LoRA, rank=2, variant="rslora"), Net, {}),
        ("LoRA+", CASES["LoRA"].make, network_of("LoRA"), {}),
        ("DoRA", partial(LoRA, rank=2, variant="dora"), network_of("LoRA"), {}),
        ("BlockSwap", BlockSwap, Net, {}),  # the row's refuses nothing
        ("KahanSummation", KahanSummation, Net, {"precision": "bf16-true"}),  # the row's network mixes formats
        ("StochasticRounding", StochasticRounding, Net, {"precision": "bf16-true"}),
        ("inductor", Compile, Small, {}),  # the row's only counts its graphs
        ("RankWatch", RankWatch, Net, {}),
        ("experts", L.Callback, Mixtral, {"gradient_clip_val": 0.05}),
        ("experts accumulated", ActivationCheckpointing, Mixtral, {"accumulate_grad_batches": 2}),
        ("experts adapted", partial(LoRA, rank=2, targets="all-linear+experts"), Mixtral, {}),
        ("SafeCheckpointIO", L.Callback, Net, {"plugins": [SafeCheckpointIO()]}),
        *((kind.__name__, partial(Steps, kind), Net, {"gradient_clip_val": 0.05}) for kind in OPTIMIZERS),
        *((kind.__name__, partial(Steps, scheduler=partial(kind, **more)), Net, {}) for kind, more in SCHEDULERS),
    ]


# Of callbacks without a row, and of settings that differ from the row's.
MORE: dict[str, Row] = {
    name: Row(made, lambda _: None, network=network, trainer=arguments) for name, made, network, arguments in _others()
}


def techniques(names: Sequence[str], sharding: Any = None) -> None:
    """Fit with each, straight, and interrupted after an epoch; write what came of it."""
    sharding = {} if sharding is None else sharding
    dist.init_process_group("gloo")  # what is refused early is refused before Lightning does this
    for name in names:
        # torchao's step would be compiled: the same numbers, minutes later
        torch.compiler.set_stance("default" if name in ("Compile", "inductor") else "force_eager")
        make, network, more = case_of(name)
        try:
            _, losses, weights = fit(make, network, sharding=sharding, **more)
            half, _, _ = fit(make, network, 1, sharding=sharding, **more)
            half.save_checkpoint(f"{name}.ckpt", weights_only=False)
            _, _, resumed = fit(make, network, 2, f"{name}.ckpt", sharding=sharding, **more)
            same = weights.keys() == resumed.keys() and all(torch.equal(weights[key], resumed[key]) for key in weights)
            found: Any = {"losses": losses, "resumed": same, "graphs": len(GRAPHS)}
        except LitEfficientError as error:
            found = {"refused": str(error)}
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {error}"}
        if dist.get_rank() == 0:
            torch.save(found, f"{name}.pt")
        dist.barrier()


def experts(names: Sequence[str]) -> None:
    """Experts divided among the ranks, each whole on one of them; and written in one file."""
    divided = {"parallel": Parallel(experts=True)}
    techniques(names, divided)
    half, _, _ = fit(list, Mixtral, 1, sharding=divided | {"save_distributed_checkpoint": False})
    half.save_checkpoint("file.ckpt", weights_only=False)
    stack = half.lightning_module.net.network.model.layers[0].mlp.experts
    assert stack.down_proj.shape[0] == 4  # of all ranks
    assert stack.down_proj.to_local().shape[0] == stack.num_experts == 2


def worlds() -> None:
    """A run of one process goes on on two, and one of two is written both ways."""
    half, _, _ = fit(list, Net, 1, sharding={})
    half.save_checkpoint("two.ckpt", weights_only=False)
    half.save_checkpoint("two.ckpt", weights_only=False)  # over one that is there
    half, _, _ = fit(list, Net, 1, sharding={"save_distributed_checkpoint": False})
    half.save_checkpoint("two_file.ckpt", weights_only=False)
    for path in ("two.ckpt", "two_file.ckpt"):  # no tensor of a checkpoint goes unseen
        with pytest.raises(CheckpointError, match=f"{path} holds 6 tensors that the module lacks: net.blocks.3"):
            fit(list, Shorter, 2, path, sharding={})
    _, losses, _ = fit(list, Net, 2, "one.ckpt", sharding={})
    if dist.get_rank() == 0:
        torch.save(losses, "from_one.pt")
    dist.barrier()


def saved_later() -> None:
    """Threads write the bytes that the processes write themselves, although the weights change before they begin."""
    save = checkpoint.save

    def slowly(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.2)
        return save(*arguments, **named)

    checkpoint.save = slowly
    url = f"local://{Path.cwd()}/later"
    for folder, more in (("now", []), (url, [AsyncCheckpoint()])):
        saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
        callbacks: Callable[[], list[Any]] = partial(list, [saver, *more])
        arguments: dict[str, Any] = {"plugins": [SafeCheckpointIO()], "enable_checkpointing": True}
        fit(callbacks, Net, 1, sharding={}, limit_train_batches=3, **arguments)
    checkpoint.save = save
    if dist.get_rank() == 0:
        for now in sorted(Path("now").rglob("*.ckpt/*")):
            if now.suffix == ".distcp":
                (later,) = Path("later").glob(f"{now.parent.name}.*/{now.name}")
                assert later.read_bytes() == now.read_bytes(), now
        for step in (1, 2, 3):
            first, second = (read_checkpoint(f"{name}/step={step}.ckpt", optimizers=True) for name in ("now", url))
            for key in ("state_dict", "optimizer_states"):
                assert_equal(first[key], second[key])
    dist.barrier()
    _, losses, _ = fit(list, Net, 2, f"{url}/step=2.ckpt", sharding={})
    _, expected, _ = fit(list, Net, 2, "now/step=2.ckpt", sharding={})
    assert torch.equal(losses, expected)


class Image(nn.Module):
    """A diffusion transformer that has been trained: none of its layers is zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.dit = DiT(DiTConfig(channels=1, size=4, width=16, depth=2, heads=2, num_classes=0, context_width=4))
        for parameter in self.dit.parameters():
            nn.init.normal_(parameter, std=0.2) if not parameter.any() else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dit(x.view(-1, 1, 4, 4), x[:, 0].sigmoid(), context=x.view(-1, 4, 4)).flatten(1)


class Qwen(nn.Module):
    """Hugging Face's, which normalises queries and keys head by head."""

    def __init__(self) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        super().__init__()
        sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2}
        sizes |= {"head_dim": 8, "vocab_size": 8}
        self.model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model((2 * x + 4).long().clamp(0, 7)).logits[..., 0]


SHARING = (Tied, Image, Qwen)


def sharing() -> None:
    """Two processes share the layers of a plan: the losses, what each holds, and two halves of one run."""
    shared = {"parallel": Parallel(tensor=2)}
    for network in SHARING:
        meter = ThroughputMeter()
        watching: Callable[[], list[Any]] = partial(list, [NonFiniteGuard(), meter])
        run, losses, weights = fit(watching, network, sharding=shared, gradient_clip_val=0.05)
        assert meter.flops is not None
        operations = everyones(meter.flops.position)
        held = sum(p.to_local().numel() for p in run.lightning_module.parameters())
        if dist.get_rank() == 0:
            found = {"losses": losses, "held": held, "operations": operations, "readers": readers(run)}
            torch.save(found, f"{network.__name__}.pt")
    half, _, _ = fit(list, Tied, 1, sharding=shared, gradient_clip_val=0.05)
    half.save_checkpoint("shared.ckpt", weights_only=False)
    _, _, weights = fit(list, Tied, sharding=shared, gradient_clip_val=0.05)
    _, _, again = fit(list, Tied, 2, "shared.ckpt", sharding=shared, gradient_clip_val=0.05)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    drawn = everyones(float(torch.rand(())))
    run, _, _ = fit(lambda: [NEFTune()], Tied, 1, sharding=shared)
    one, other = everyones([loss for part in run.callbacks if isinstance(part, Losses) for loss in part.seen])
    assert one == other  # noise goes by the process's batches
    assert drawn[0] == drawn[1]  # by processes that share a batch, whatever each was seeded with
    for make, refused, said in (
        (list, Net, r"Trained has no network with a plan \(tp_plan\)"),
        (lambda: [LoRA()], Tied, "and tensor parallelism divides plain linear layers"),
    ):
        with pytest.raises(LitEfficientError, match=said):
            fit(make, refused, sharding=shared)


class Stepped(Toy):
    """By an optimizer of its own."""

    make: ClassVar[Callable[..., Any]]

    def configure_optimizers(self) -> Any:
        return self.make([*self.parameters()])


def other_optimizers() -> None:
    """What goes on with another optimizer's states, or steps what shards cannot, says so in a sentence."""
    adam, sgd = partial(torch.optim.AdamW, lr=1e-2), partial(torch.optim.SGD, lr=1e-2, momentum=0.9)

    def halves(parameters: list[Any]) -> Any:
        return torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])

    def stepped(make: Any, in_shards: bool, path: str | None = None) -> Any:
        Stepped.make = staticmethod(make)
        chosen = strategy(save_distributed_checkpoint=in_shards)
        run = trainer([], devices=2, strategy=chosen, max_epochs=1 if path is None else 2, limit_val_batches=0)
        run.fit(Stepped("init", network=Net), data(), ckpt_path=path)
        return run

    with pytest.raises(ConflictError, match="a step of Adafactor uses an operation without support for shards"):
        stepped(torch.optim.Adafactor, True)
    for in_shards, path in ((True, "folder.ckpt"), (False, "file.ckpt")):
        stepped(adam, in_shards).save_checkpoint(path)
        for make, said in (
            (sgd, "does not fit module or optimizer: .*momentum_buffer" if in_shards else "has no 'dampening', which"),
            (
                halves,
                r"param_groups\.1\.lr" if in_shards else r"groups of \[28\] parameters, .* has groups of \[2, 26\]",
            ),
        ):
            with pytest.raises(CheckpointError, match=f"{path}.*{said}.*Continue with the optimizer that wrote it"):
                stepped(make, in_shards, path)
    if dist.get_rank() == 0:
        torch.save({"state_dict": {}}, "foreign.ckpt")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"foreign\.ckpt is not a checkpoint of Lightning: load its weights"):
        stepped(adam, True, "foreign.ckpt")


def sharing_and_sharding() -> None:
    """Two by two; and four that shard, for others to go on with."""
    half, _, _ = fit(list, Tied, 1, sharding={})
    half.save_checkpoint("four.ckpt", weights_only=False)
    _, losses, _ = fit(list, Tied, sharding={"parallel": Parallel(tensor=2)}, gradient_clip_val=0.05)
    if dist.get_rank() == 0:
        torch.save(losses, "losses.pt")


def from_four() -> None:
    """Two processes go on with what four have written."""
    _, losses, _ = fit(list, Tied, 2, "four.ckpt", sharding={})
    if dist.get_rank() == 0:
        torch.save(losses, "from_four.pt")


class Normed(nn.Module):
    """Blocks whose norms are LayerNorms, which refuse weights of another format than their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def kept_in_float32() -> None:
    """In whole bfloat16 and under autocast: the shards themselves, for a DTensor's own dtype says what it was."""
    for make, network, names in (
        (lambda: [KeepFloat32()], Normed, {"net.blocks.0.0.weight", "net.head.0.bias"}),
        (lambda: [LoRA(rank=2)], Net, {"net.blocks.0.up.lora_A", "net.blocks.0.up.lora_B"}),
    ):
        for precision in ("bf16-true", "bf16-mixed"):
            run, losses, _ = fit(make, network, sharding={}, precision=precision)
            module = run.lightning_module
            shards = {name: p.to_local() for name, p in module.named_parameters() if name in names}
            assert {p.dtype for p in shards.values()} == {torch.float32}, precision
            assert shards.keys() == names
            assert any(not torch.equal(p, p.bfloat16().float()) for p in shards.values()), precision
            if dist.get_rank() == 0:
                torch.save(losses, f"{network.__name__} {precision}.pt")
            dist.barrier()
    make, network, more = case_of("FeatureMatching")  # whose widths are read outside of their module's forward pass
    for precision in ("bf16-true", "bf16-mixed"):
        _, losses, _ = fit(make, network, sharding={}, **more, precision=precision)
        if dist.get_rank() == 0:
            torch.save(losses, f"FeatureMatching {precision}.pt")
        dist.barrier()


def _headed(parameters: list[Any], **arguments: Any) -> MuonAdamW:
    """Muon with two heads in the first matrix."""
    groups = [{"params": parameters[:1], "muon": True, "head_rows": 8}, {"params": parameters[1:]}]
    return MuonAdamW(groups, **arguments)


def steps_of_shards() -> None:
    """Optimizers that look at whole matrices step shards of any length, experts' and filters as one process does."""
    mesh = init_device_mesh("cpu", (2,))
    draw = torch.Generator().manual_seed(0)
    shapes = [(16, 5), (5, 16), (3, 16, 16), (3, 4, 2, 3), (7,), (1,)]
    weights, *gradients = ([torch.randn(shape, generator=draw) for shape in shapes] for _ in range(3))
    kinds: list[tuple[Callable[..., Any], float]] = [(MuonAdamW, 0.0), (GroupedAdafactor, 1e-6)]
    kinds.append((partial(MuonAdamW, normuon=0.9, cautious_decay=True, polar_express=True), 1e-6))
    kinds.append((partial(_headed, muon_eq="row", muon_plus="column_row"), 1e-6))
    for make, error in kinds:
        ours = [nn.Parameter(distribute_tensor(w.clone(), mesh, [Shard(0)])) for w in weights]
        theirs = [nn.Parameter(w.clone()) for w in weights]
        for parameters in (ours, theirs):
            optimizer = make(parameters, lr=1e-2, weight_decay=0.1)
            for drawn in gradients:
                for p, g in zip(parameters, drawn):
                    p.grad = distribute_tensor(g, mesh, [Shard(0)]) if parameters is ours else g
                optimizer.step()
        for mine, one in zip(ours, theirs):
            torch.testing.assert_close(mine.full_tensor(), one, rtol=error, atol=error)  # type: ignore[attr-defined]
    p = nn.Parameter(distribute_tensor(weights[0], mesh, [Shard(0)]))
    p.grad = torch.zeros_like(p)
    with pytest.raises(ConflictError, match="dion needs whole matrices, but these parameters are sharded"):
        MuonAdamW([p], dion=0.5).step()


class Shorter(Net):
    """Without the last block."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks[-1]


class Scalar(Net):
    """With a parameter that cannot be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class NoBlocks(nn.Linear):
    """One layer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class Collectives(TorchDispatchMode):
    """Counts what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        self.counts.update(kind for kind in ("allgather", "reduce_scatter", "allreduce") if kind in name)
        return function(*args, **(kwargs or {}))


def counted(sharding: dict[str, Any], network: Any = Net, make: Any = list, **arguments: Any) -> Counter[str]:
    with Collectives() as mode:
        fit(make, network, 1, sharding=sharding, limit_val_batches=0, **arguments)
    return mode.counts


class Untied(Tied):
    """A table of tokens and a head that are as large as blocks."""

    def __init__(self) -> None:
        super().__init__()
        config = GPTConfig(200, dim=WIDTH, depth=2, num_heads=2, hidden_dim=32, max_length=64, tie_embeddings=False)
        self.gpt = GPT(config)


class Labelled(TokenAttentionNet):
    """With a head as large as a block."""

    def __init__(self) -> None:
        super().__init__()
        config = GPTConfig(200, dim=WIDTH, depth=2, num_heads=2, hidden_dim=32, max_length=64, tie_embeddings=False)
        self.gpt = GPT(config)


def units() -> None:
    run, losses, weights = fit(list, Untied, sharding={})
    sizes = {name: p.to_local().numel() for name, p in run.lightning_module.named_parameters()}
    whole_sizes = {name: tensor.numel() for name, tensor in weights.items()}
    assert all(size * 2 == whole_sizes[name] for name, size in sizes.items())  # half of each
    parts = {name for name, part in run.lightning_module.named_modules() if isinstance(part, FSDPModule)}
    assert parts == {"", "net.gpt.embedding", "net.gpt.head", "net.gpt.blocks.0", "net.gpt.blocks.1"}, parts
    run, tied, _ = fit(list, Tied, 1, sharding={})
    assert tied.isfinite().all()
    run.save_checkpoint("tied.ckpt", weights_only=False)
    held = read_checkpoint("tied.ckpt")["state_dict"]  # which knows which weights are one
    assert len({memory_of(held[name]) for name in ("net.gpt.embedding.weight", "net.gpt.head.weight")}) == 1
    # Replicas: each process holds all, and averages by all-reduce.
    run, replicated, _ = fit(list, Untied, sharding={"replicas": 2})
    torch.testing.assert_close(replicated, losses)
    assert {n: p.to_local().numel() for n, p in run.lightning_module.named_parameters()} == whole_sizes
    # An accumulation window sends its gradients once; blocks that stay gathered are gathered once.
    once, each = (counted({"reduce_each_batch": flag}, accumulate_grad_batches=2) for flag in (False, True))
    assert each["reduce_scatter"] == 2 * once["reduce_scatter"] > 0
    again, kept = (counted({"reshard_after_forward": flag}) for flag in (True, False))
    assert again["allgather"] > kept["allgather"] > 0
    # The head's weight is gathered once, whatever number of chunks it serves.
    plain, chunked = (counted({}, Labelled, make) for make in (list, lambda: [ChunkedCrossEntropy(chunk_size=2)]))
    assert plain["allgather"] == chunked["allgather"], (plain, chunked)
    # bf16: what is gathered has half the bytes; the weights themselves keep theirs.
    run, low, _ = fit(list, Net, sharding={}, precision="bf16-mixed")
    assert {p.dtype for p in run.lightning_module.parameters()} == {torch.float32}
    _, high, _ = fit(list, Net, sharding={"gather_dtype": "float32"}, precision="bf16-mixed")
    torch.testing.assert_close(low, high, rtol=0.03, atol=0.03)
    assert not torch.equal(low, high)
    for network, error, said in (
        (Scalar, ConfigurationError, "'net.scale' is a scalar"),
        (NoBlocks, ConfigurationError, "found no repeated blocks"),
    ):
        with pytest.raises(error, match=said):
            fit(list, network, sharding={})
    with pytest.raises(ConfigurationError, match="replicas must be a divisor"):
        fit(list, Net, sharding={"replicas": 3})
    with pytest.raises(ConfigurationError, match=r"reshard_after_forward must be a divisor of the shards \(1\), got 2"):
        fit(list, Net, sharding={"replicas": 2, "reshard_after_forward": 2})
    # A module that shards itself is left as it is.
    module = Sharded("configure_model", network=Small)
    trainer(devices=2, strategy=strategy(), limit_val_batches=0).fit(module, data())
    assert not isinstance(module, FSDPModule)
    # What lies outside of a step finds its weights.
    run, _, _ = fit(list, Net, 1, sharding={})
    with torch.no_grad():
        assert run.lightning_module.net(torch.zeros(1, WIDTH)).isfinite().all()
