from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.plugins import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

from lit_efficient import (
    EMA,
    ConfigurationError,
    ConflictError,
    Float8Precision,
    FusedAdamW,
    GroupedAdafactor,
    LatentAlignment,
    Lion,
    LoRA,
    MuonAdamW,
    PromptTuning,
    ScheduleFreeAdamW,
    SelectiveBackprop,
    StochasticDepth,
    ZeroStrategy,
)
from lit_efficient.catalog import PACKAGE
from lit_efficient.errors import CheckpointError
from lit_efficient.mechanisms.adapters.base import check, digests, freeze_base
from lit_efficient.optimizers.float32_step import step_in_float32
from lit_efficient.optimizers.host_states import stream_states
from lit_efficient.strategies.zero_strategy import zero_config
from tests.processes import run_ranks
from tests.ranks import zero
from tests.strategies.test_sharded_strategy import as_one_process
from tests.support import Toy, data, trainer

ZERO = sorted((Path(__file__).parents[2] / "configs" / "scale").glob("zero_*.yaml"))


def test_the_overlays_are_the_presets() -> None:
    made = {}
    for path in ZERO:
        arguments = yaml.safe_load(path.read_text("utf-8"))["trainer"]["strategy"]["init_args"]
        config = zero_config(**arguments)
        assert config["zero_allow_untested_optimizer"]  # or it takes Adam alone, and validates nothing under stage 3
        assert config["zero_force_ds_cpu_optimizer"] is False  # or not the module's own, where states are on the CPU
        made[path.stem] = config["zero_optimization"]
    assert {name: zero["stage"] for name, zero in made.items()} == {
        "zero_1": 1, "zero_2": 2, "zero_2_cpu": 2, "zero_3": 3, "zero_3_cpu": 3, "zero_3_nvme": 3, "zero_plus_plus": 3
    }  # fmt: skip
    nvme = {"device": "nvme", "pin_memory": True, "nvme_path": "/local_nvme"}
    assert made["zero_3_nvme"]["offload_optimizer"] == made["zero_3_nvme"]["offload_param"] == nvme
    assert "offload_param" not in made["zero_2_cpu"]
    assert made["zero_plus_plus"]["zero_hpz_partition_size"] == 8
    assert made["zero_plus_plus"]["zero_quantized_weights"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"stage": 4}, "stage must be one of 1, 2, 3"),
        ({"stage": 2, "weights_on": "cpu"}, "stage must be 3 with weights_on"),
        ({"stage": 2, "states_on": "nvme", "nvme_path": "/x"}, "stage must be 3 with states_on='nvme'"),
        ({"stage": 3, "states_on": "nvme"}, "nvme_path must be a folder on NVMe"),
        ({"stage": 3, "nvme_path": "/x"}, "nvme_path must be null"),
        ({"stage": 1, "quantized": True}, "stage must be 3 with quantized"),
        ({"extra": {"gradient_clipping": 1.0}}, "without gradient_clipping, which is set by trainer.gradient_clip_val"),
        (
            {"extra": {"zero_optimization": {}}},
            "without zero_optimization, which is set by another argument of this strategy",
        ),
    ],
)
def test_what_contradicts_is_refused_before_the_package_is_asked_for(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ZeroStrategy(**arguments)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "clips by norm"),
        ({"world_size": 6}, "node_size must be a divisor of the 6 processes"),
        ({"precision_plugin": Float8Precision()}, "Float8Precision sends no gradients to DeepSpeed"),
        ({"lightning_module": types.SimpleNamespace(automatic_optimization=False)}, "DeepSpeed steps by itself"),
    ],
)
def test_what_deepspeed_would_do_otherwise_is_refused(given: dict[str, Any], said: str) -> None:
    module = types.SimpleNamespace(automatic_optimization=True)
    usual: dict[str, Any] = {
        "gradient_clip_val": None,
        "gradient_clip_algorithm": None,
        "world_size": 8,
    }
    usual["callbacks"] = []
    usual["precision_plugin"] = DeepSpeedPrecision("bf16-mixed")
    fine = types.SimpleNamespace(**usual, lightning_module=module)
    agree(fine, 4)
    with pytest.raises(ConfigurationError, match=said):
        agree(types.SimpleNamespace(**{**vars(fine), **given}), 4)


def agree(run: Any, node_size: int = 1, stage: int = 2) -> None:
    strategy = ZeroStrategy.__new__(ZeroStrategy)
    strategy.node_size, strategy.stage = node_size, stage
    run.lightning_module.trainer = run
    strategy.check_network(run.lightning_module, run.world_size)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (MuonAdamW, "MuonAdamW needs whole matrices"),  # died in the first step
        (GroupedAdafactor, "GroupedAdafactor needs whole matrices"),  # trained otherwise, silently
        (torch.optim.Adafactor, "Adafactor needs whole matrices"),
        (ScheduleFreeAdamW, "ScheduleFreeAdamW switches weights"),
        (lambda p: rounded(torch.optim.AdamW(p)), "AdamW.* rounds bfloat16 weights"),  # DeepSpeed's are float32
        (lambda p: streamed(torch.optim.AdamW(p)), "keeps states in CPU memory by itself"),
    ],
)
def test_optimizers_that_cannot_step_pieces_of_a_vector_are_refused(make: Any, said: str) -> None:
    strategy = ZeroStrategy.__new__(ZeroStrategy)
    layer = torch.nn.Linear(2, 2, dtype=torch.bfloat16 if "rounds" in said else None)
    for fine in (torch.optim.AdamW, Lion, FusedAdamW):
        strategy.check_optimizer(fine(layer.parameters()))
    with pytest.raises(ConflictError, match=f"ZeroStrategy: .*{said}"):
        strategy.check_optimizer(make(layer.parameters()))


def rounded(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    step_in_float32(optimizer, compensated=True, seed=0, later=set(), who="KahanSummation")
    return optimizer


def streamed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    stream_states(optimizer, 2**20, False, who="OffloadOptimizer")
    return optimizer


class MyEMA(EMA):
    """A user's own."""


@pytest.mark.parametrize("technique", [EMA(), MyEMA(), StochasticDepth(), LatentAlignment(torch.nn.Identity())])
def test_what_stage_3_leaves_without_weights_is_refused(technique: Any) -> None:
    module, plugin = types.SimpleNamespace(automatic_optimization=True), DeepSpeedPrecision("32-true")
    run = types.SimpleNamespace(gradient_clip_val=None, world_size=2, precision_plugin=plugin)
    run.lightning_module, run.callbacks = module, [LoRA(), technique]
    agree(run, stage=2)
    with pytest.raises(ConflictError, match=r"(EMA|Depth|LatentAlignment) reads weights that stage 3 has freed"):
        agree(run, stage=3)


def test_a_base_that_stage_3_has_emptied_keeps_its_digests() -> None:
    """A run that went on was refused, as if all of its base were another one."""
    module = Toy()
    freeze_base(module, [])
    noted = digests(module)
    for parameter in module.parameters():
        parameter.data = torch.empty(0)
    assert len(noted) == 28
    check(module, {"lit_efficient": {"base": noted}})
    noted["net.stem.weight"] = "another"
    with pytest.raises(CheckpointError, match="1 of 28 frozen tensors differ"):
        check(module, {"lit_efficient": {"base": noted}})


def test_lora_s_ratio_is_refused() -> None:
    """The B matrices learned at the rate of the others: other tensors than the module's parameters are stepped."""
    run = types.SimpleNamespace(strategy=ZeroStrategy.__new__(ZeroStrategy))
    LoRA().check(run, Toy())
    with pytest.raises(
        ConflictError, match=r"lr_ratio=4\.0 .* DeepSpeedStrategy steps other tensors. Leave out lr_ratio"
    ):
        LoRA(lr_ratio=4.0).check(run, Toy())


@pytest.mark.parametrize(
    "technique", [PromptTuning(2, "random"), SelectiveBackprop(), LatentAlignment(torch.nn.Identity())]
)
def test_what_deepspeed_leaves_modules_for_is_taken(technique: Any) -> None:
    """Two processes gave the losses of DDP's to the bit; FSDP1 takes modules apart."""
    technique.check(types.SimpleNamespace(strategy=ZeroStrategy.__new__(ZeroStrategy)), Toy())
    with pytest.raises(ConflictError, match=type(technique).__name__):
        technique.check(types.SimpleNamespace(strategy=FSDPStrategy.__new__(FSDPStrategy)), Toy())


def test_outside_of_a_fit_weights_are_read_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """DeepSpeed's stage 3 has no optimizer to hand them to, and frozen ones were looked for among the frozen."""
    module, read = Toy().requires_grad_(False), list[bool]()
    module.trainer = types.SimpleNamespace(state=types.SimpleNamespace(fn="validate"))  # type: ignore[assignment]
    strategy = Alone(module)
    offload: Any = types.SimpleNamespace()

    def load(*_: Any) -> None:
        read.extend(p.requires_grad for p in module.parameters())
        offload._restore_from_bit16_weights()

    monkeypatch.setattr(DeepSpeedStrategy, "deepspeed_engine", types.SimpleNamespace(optimizer=offload))
    monkeypatch.setattr(DeepSpeedStrategy, "load_checkpoint", load)
    strategy.load_checkpoint(tmp_path)
    assert all(read)
    assert not any(p.requires_grad for p in module.parameters())


class Alone(ZeroStrategy):
    """A process without others."""

    is_global_zero, global_rank, world_size = True, 0, 1
    lightning_module = None

    def __init__(self, module: Any) -> None:
        self.lightning_module = module

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_what_was_not_stepped_is_saved_as_frozen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """DeepSpeed looks at requires_grad: a fit with ReplaceHead thaws when it ends, and could not be gone on from."""
    module, saved = Toy(), list[list[bool]]()
    parameters, strategy = [*module.parameters()], Alone(module)
    monkeypatch.setattr(DeepSpeedStrategy, "_setup_model_and_optimizer", lambda *_: (module, None))
    monkeypatch.setattr(
        DeepSpeedStrategy, "save_checkpoint", lambda *_: saved.append([p.requires_grad for p in parameters])
    )
    module.requires_grad_(False)
    parameters[3].requires_grad_(True)
    strategy._setup_model_and_optimizer(module, None)
    module.requires_grad_(True)
    parameters[3].requires_grad_(False)
    strategy.save_checkpoint({}, tmp_path / "one.ckpt")
    everyone = range(len(parameters))
    assert saved == [[i == 3 for i in everyone]]
    assert [p.requires_grad for p in parameters] == [i != 3 for i in everyone]


def test_a_save_that_is_cut_short_leaves_the_checkpoint_of_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """DeepSpeed writes over it file by file: a process killed in between left a mixture, which a resume took."""
    strategy, folder = Alone(Toy()), tmp_path / "last.ckpt"

    def save(_: Any, step: int, target: Path, *__: Any) -> None:
        for name in ("model_states.pt", "optim_states.pt"):
            (target / name).write_text(str(step))
            if step == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(DeepSpeedStrategy, "save_checkpoint", save)
    strategy.save_checkpoint(1, folder)
    with pytest.raises(KeyboardInterrupt):
        strategy.save_checkpoint(2, folder)
    assert {path.read_text() for path in folder.glob("*.pt")} == {"1"}
    (folder / "optim_states.pt").write_text("2")
    with pytest.raises(CheckpointError, match=r"optim_states\.pt is missing, or not what was written"):
        strategy.load_checkpoint(folder)


def test_a_network_is_built_whole_before_it_is_sharded() -> None:
    """In shards, DeepSpeed's parameters are empty: a GPT's own initial weights were left out, for a loss of 14.8."""
    with ZeroStrategy.__new__(ZeroStrategy).model_sharded_context():
        layer = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(layer.weight, 3.0)
    assert layer.weight.sum() == 12.0


def test_an_epoch_that_ends_within_a_window_is_refused() -> None:
    """DeepSpeed 0.19 makes 4 steps of two epochs of 8 batches in windows of 3, Lightning 6."""
    strategy = ZeroStrategy.__new__(ZeroStrategy)
    strategy.check_window(8, 4)
    strategy.check_window(float("inf"), 4)
    with pytest.raises(ConfigurationError, match=r"the last 2 of 8 batches are not a whole window of 3 .* to 6$"):
        strategy.check_window(8, 3)


class Taken(Exception):
    """What DeepSpeed is given."""


@pytest.mark.parametrize(
    ("precision", "said"),
    [
        ("32-true", {}),
        ("bf16-mixed", {"bf16": {"enabled": True}}),
        ("16-mixed", {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000,
                               "hysteresis": 2, "min_loss_scale": 1}}),
    ],
)  # fmt: skip
def test_deepspeed_is_given_what_the_trainer_says(
    precision: Any, said: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in takes the place of the package up to the call that would build its engine."""

    def initialize(**given: Any) -> None:
        raise Taken(given)

    zero.stand_in(monkeypatch, initialize=initialize, init_distributed=lambda *_, **__: None)
    strategy = zero.ZeroOnCPU(2, states_on="cpu", extra={"wall_clock_breakdown": False})
    run = trainer([], strategy=strategy, precision=precision, accumulate_grad_batches=2, gradient_clip_val=0.5)
    module = Toy()
    with pytest.raises(Taken) as taken:
        run.fit(module, data(32, batch_size=8), data())
    given = taken.value.args[0]
    trainers = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "train_micro_batch_size_per_gpu": 8}
    assert given["config"] == {**zero_config(2, "cpu"), "wall_clock_breakdown": False, **trainers, **said}
    assert given["model"] is module
    assert isinstance(given["optimizer"], torch.optim.Optimizer)
    assert [id(p) for p in given["model_parameters"]] == [id(p) for p in module.parameters()]


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_processes_train_as_one_does_and_resume(stage: int, tmp_path: Path) -> None:
    """Where DeepSpeed is installed; it needs no GPU for this."""
    pytest.importorskip("deepspeed")
    names = ("clipping", "accumulation", "PeftAdapter", "NonFiniteGuard", "rsLoRA", "DoRA")
    run_ranks(zero.techniques, tmp_path, names, stage)
    assert set(as_one_process(names, tmp_path).values()) == {"works"}


@pytest.mark.nightly
def test_packed_documents_are_isolated_or_refused_in_shards(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    run_ranks(zero.isolation, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_table_of_strategies_says_what_was_tried(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    said = json.loads((PACKAGE / "tested.json").read_text("utf-8"))[f"ZeRO-{stage}"]
    run_ranks(zero.techniques, tmp_path, tuple(said), stage, timeout=1800)
    assert as_one_process(tuple(said), tmp_path) == said


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [{"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "states_on": "cpu"}])
def test_it_trains_on_a_gpu(arguments: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    run = trainer([], accelerator="gpu", strategy=ZeroStrategy(**arguments), precision="bf16-mixed", max_epochs=1)
    module = Toy()
    before = [p.detach().clone() for p in module.parameters()]
    run.fit(module, data(32), data())
    assert run.global_step == 8
    assert any(not torch.equal(p.cpu(), old) for p, old in zip(module.parameters(), before))
