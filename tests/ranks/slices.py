"""A network that no process ever has whole: read from files, or drawn, in the slices that each holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lit_efficient import (
    IA3,
    CausalLMConfig,
    DiffusersModelConfig,
    DiTConfig,
    GPTConfig,
    LanguageModeling,
    LatentDiffusion,
    LoRA,
    MixtureOfDepths,
    MixtureOfExperts,
    QuantizeBase,
    ShardedStrategy,
    StochasticDepth,
)
from lit_efficient.application import apply
from lit_efficient.distributed import weight_slices
from lit_efficient.mechanisms.adapters.base import is_added, noting_digests
from lit_efficient.mechanisms.adapters.quantized import is_bitsandbytes, stored_bytes
from lit_efficient.mechanisms.trials.memory import AllocationMeter
from lit_efficient.models.libraries import causal_lm, diffusers_model
from lit_efficient.surgery import local
from lit_efficient.tasks import language_modeling
from lit_efficient.tasks.latent_generator import Samples
from tests.support import assert_equal, trainer

WIDTH, DEPTH = 64, 8
UNET: dict[str, Any] = {
    "_class_name": "UNet2DModel", "in_channels": 4, "out_channels": 4, "sample_size": 8, "num_class_embeds": 11,
    "block_out_channels": [32, 64], "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"], "layers_per_block": 1, "norm_num_groups": 8,
}  # fmt: skip


def made() -> nn.Module:
    """Eight blocks, a number alone, a buffer, and rows that two processes share unevenly."""
    network = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)), nn.Linear(WIDTH, 3))
    first, second = (layer.get_parameter("weight") for layer in (network[0], network[1]))
    nn.init.orthogonal_(first)
    nn.init.trunc_normal_(second, std=0.02)
    network.register_parameter("scale", nn.Parameter(torch.tensor([2.0])))
    network.register_buffer("shift", torch.randn(WIDTH))
    return network


class Counted:
    """A file that notes how many bytes are taken of its tensors, whose pages are its own."""

    def __init__(self, path: Path) -> None:
        self.file = _map_tensors(path)
        self.keys = self.file.keys

    def get_tensor(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self.file.get_tensor(name)
        return found.as_subclass(CountedTensor)


class CountedTensor(torch.Tensor):
    def __getitem__(self, part: Any) -> torch.Tensor:
        found = self.as_subclass(torch.Tensor)[part]
        given.append(found.nbytes)
        return found


_map_tensors, given = weight_slices.map_tensors, list[int]()


def sharded(network: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in network:  # type: ignore[attr-defined]
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return network


def whole(network: nn.Module) -> dict[str, torch.Tensor]:
    state = network.state_dict()
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}


def read(network: nn.Module, folder: str) -> None:
    """Give a network on the meta device the weights of a folder."""
    network.__dict__[weight_slices.WAITS] = weight_slices.Waiting(folder)
    weight_slices.fill_waiting(network, torch.device("cpu"))


def each_its_own(folder: str) -> None:
    dist.init_process_group("gloo")
    weight_slices.map_tensors = Counted  # type: ignore[assignment]
    with torch.device("meta"):
        network = sharded(made())
    with AllocationMeter() as meter:
        read(network, folder)
    total = sum(t.numel() * 4 for t in network.state_dict().values())
    shard = sum(t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes for t in network.state_dict().values())
    assert shard < 0.55 * total
    assert sum(given) == shard - network.get_buffer("shift").nbytes  # whose pages stay the file's
    assert meter.peak + max(given) <= 1.5 * shard
    torch.manual_seed(0)
    assert_equal(whole(network), dict(made().state_dict()))
    torch.manual_seed(1)
    network = sharded(weight_slices.built_empty(made))
    weight_slices.fill_waiting(network, torch.device("cpu"))
    torch.manual_seed(1)
    assert_equal(whole(network), dict(made().state_dict()))
    for make in (*ADAPTED.values(), stepped_over):
        codes_of_one_layer(folder, make)
    dist.destroy_process_group()


def stepped_over() -> list[Any]:
    return [QuantizeBase("int4", skip=("0",)), LoRA(rank=2, modules_to_save=["1"])]


def codes_of_one_layer(folder: str, make: Callable[[], list[Any]]) -> None:
    """Adapters and codes for an empty network are those of a whole one, and are made a layer at a time."""
    with torch.device("meta"):
        plain, network = made(), made()
    read(plain, folder)
    apply(plain, make())
    network.__dict__[weight_slices.WAITS] = weight_slices.Waiting(folder)
    apply(network, make())
    assert all(p.is_meta is not is_added(name) for name, p in network.named_parameters())
    sharded(network)
    with AllocationMeter() as meter:
        weight_slices.fill_waiting(network, torch.device("cpu"), noting_digests(network))
    found, wanted = whole(network), dict(plain.state_dict())  # FSDP2 writes no constants of bitsandbytes
    assert_equal(found, {name: t for name, t in wanted.items() if name in found or ".weight." not in name})
    assert digests_of(network) == digests_of(plain)
    held = sum(local(p).nbytes for name, p in network.named_parameters() if not is_added(name))
    coded: list[Any] = [part for part in plain.modules() if is_bitsandbytes(part)]
    constants = sum(stored_bytes(part) - part.weight.nbytes for part in coded)
    assert meter.peak <= held + constants + 5 * WIDTH * WIDTH * 4


def digests_of(network: nn.Module) -> Any:
    return network.__dict__["_lit_efficient_base"]["digests"]


class Rows(LanguageModeling):
    """Without a schedule, whose steps would be those of the data."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


ADAPTED: dict[str, Callable[..., list[Any]]] = {
    "pissa on codes": lambda *_: [QuantizeBase(), LoRA(rank=2, variant="pissa")],
    "dora": lambda *_: [LoRA(rank=2, variant="dora")],
    "ia3": lambda *_: [IA3(targets=[], feedforward=["0"])],
}
FITTED: dict[str, Callable[..., list[Any]]] = {
    **ADAPTED,
    "experts": lambda *_: [MixtureOfExperts(experts=4), StochasticDepth(0.5)],
    "experts of codes": lambda *_: [MixtureOfExperts(experts=3), QuantizeBase(), LoRA(2, targets="all-linear+experts")],
    "ia3": lambda *_: [QuantizeBase(), IA3()],
    "depths": lambda *_: [MixtureOfDepths(0.5)],
    "adapters of folders": lambda folder: [LoRA(start_from=adapter_beside(folder), beside={"a": f"{folder}_adapter"})],
}


SIZES_OF_EXPERTS = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": 97, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip


def codes_of_experts() -> list[Any]:
    return [QuantizeBase(experts=True), LoRA(2, targets="all-linear+experts")]


def adapter_beside(folder: str) -> str:
    """A folder of peft's with an adapter of q_proj, drawn."""
    place, drawn = Path(f"{folder}_adapter"), torch.Generator().manual_seed(5)
    if not place.exists():
        place.mkdir()
        fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "init_lora_weights": True}
        (place / "adapter_config.json").write_text(json.dumps(fields))
        layers = [f"base_model.model.model.layers.{i}.self_attn.q_proj" for i in range(2)]
        shapes = {"A": (2, 64), "B": (64, 2)}
        save_file(
            {f"{n}.lora_{k}.weight": torch.randn(s, generator=drawn) / 8 for n in layers for k, s in shapes.items()},
            place / "adapter_model.safetensors",
        )
    return str(place)


def losses(model: Any, techniques: Sequence[Any] = (), **arguments: Any) -> list[float]:
    """Of four steps of a fit on a model, of a folder perhaps."""
    torch.manual_seed(0)
    seen: list[float] = []

    class Seen(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            seen.append(float(outputs["loss"].detach()))

    tokens = torch.randint(97, (8, 12), generator=torch.Generator().manual_seed(0))
    rows: Any = [{"input_ids": row, "labels": row} for row in tokens]
    run = trainer([Seen(), *techniques], max_epochs=4, limit_val_batches=0, use_distributed_sampler=False, **arguments)
    loader = DataLoader(rows, batch_size=8)
    run.fit(Rows(CausalLMConfig(model) if isinstance(model, str) else model), loader, loader)
    return seen


DRAWN: dict[str, Callable[[], Any]] = {
    "gpt": lambda: GPTConfig(97, dim=64, depth=2, num_heads=2, max_length=64),
    "llama": lambda: CausalLMConfig(
        config_fields={
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 2, "vocab_size": 97,
        }
    ),
}  # fmt: skip


def experts_in_a_fit(folder: str) -> None:
    """The stacks of experts become codes where each process reads them."""
    made, empty = list[Any](), causal_lm.build_empty
    causal_lm.build_empty = lambda *given, into=made: into.append(empty(*given)) or into[0]
    found = losses(folder, codes_of_experts(), devices=2, strategy=ShardedStrategy())
    assert None not in made
    torch.save(found, f"{folder}_{dist.get_rank()}.pt")


def drawn_in_a_fit(folder: str) -> None:
    """Each process draws what it holds of random weights, and is given nothing whole."""
    for name, model in DRAWN.items():
        built = list[nn.Module]()

        def noted(make: Any, built: list[nn.Module] = built) -> nn.Module:
            built.append(weight_slices.built_empty(make))
            return built[0]

        language_modeling.built_empty = noted
        found = losses(model(), [MixtureOfExperts(experts=2)], devices=2, strategy=ShardedStrategy())
        assert len(built) == 1
        torch.save(found, f"{folder}/{name}_{dist.get_rank()}.pt")


def diffusers_unet() -> Any:
    torch.manual_seed(3)
    return diffusers_model.from_fields(UNET)


def backbones_of(folder: str) -> dict[str, Any]:
    """Ours, drawn, with positions in a buffer; one of diffusers, drawn in bfloat16; and one that is read."""
    drawn = DiffusersModelConfig(config_fields=UNET, dtype="bfloat16")
    return {"ours": DiTConfig(size=8, width=64, depth=2), "drawn": drawn, "read": DiffusersModelConfig(folder)}


def begun(backbone: Any, **arguments: Any) -> Any:
    """A network of latent diffusion where its training would begin."""
    torch.manual_seed(0)
    task = LatentDiffusion(backbone, samples=Samples(count=0))
    rows: Any = [{"latents": torch.zeros(4, 8, 8), "labels": torch.tensor(0)}]
    run = trainer([], max_steps=0, limit_val_batches=0, use_distributed_sampler=False, **arguments)
    run.fit(task, DataLoader(rows, batch_size=1), DataLoader(rows, batch_size=1))
    return task.network


def networks_of_diffusion(folder: str) -> None:
    """A denoiser is whole in no process, and is the one of a single process, bit for bit."""
    weight_slices.map_tensors = Counted  # type: ignore[assignment]
    for name, backbone in backbones_of(folder).items():
        given.clear()
        with AllocationMeter() as meter:
            network = begun(backbone, devices=2, strategy=ShardedStrategy())
        held = sum(local(p).nbytes for p in network.parameters())
        largest = max(p.numel() * p.itemsize for p in network.parameters())
        assert sum(given) == (held if name == "read" else 0)
        assert meter.peak < held + 4 * largest, name  # drawn in float32, and converted
        state = {**whole(network), **dict(network.named_buffers())}
        torch.save(state, f"{folder}_{name}_{dist.get_rank()}.pt")


def in_a_fit(folders: list[str]) -> None:
    """Each process reads what it holds of a named model, and nothing else."""
    weight_slices.map_tensors = Counted  # type: ignore[assignment]
    for folder in folders:
        given.clear()
        found = losses(folder, devices=2, strategy=ShardedStrategy())
        total = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        assert 0.4 * total < sum(given) < 0.6 * total, (folder, sum(given), total)
        torch.save(found, f"{folder}_{dist.get_rank()}.pt")
    folder, empty = folders[1], causal_lm.build_empty
    for name, make in FITTED.items():
        made = list[Any]()
        causal_lm.build_empty = lambda *given, into=made: into.append(empty(*given)) or into[0]
        found = losses(folder, make(folder), devices=2, strategy=ShardedStrategy())
        assert None not in made, name
        torch.save(found, f"{folder}_{name}_{dist.get_rank()}.pt")
