"""ShardedStrategy on two gloo processes: with techniques as one process on both batches, and resumed to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from lit_efficient import (
    ConfigurationError,
    KeepFloat32,
    Parallel,
    SafeCheckpointIO,
    ShardedStrategy,
    ThroughputMeter,
    restore,
)
from lit_efficient.__main__ import main
from lit_efficient.catalog import PACKAGE
from lit_efficient.commands.average import average_files
from lit_efficient.distributed.expert_parallel import check_experts
from lit_efficient.distributed.shards import read_checkpoint
from lit_efficient.distributed.units import owns_its_parameters
from lit_efficient.errors import CheckpointError
from lit_efficient.strategies import sharded_strategy
from tests.contract.table import CASES
from tests.processes import run_ranks
from tests.ranks import isolation, row_slices, sharded
from tests.support import Net, Toy, assert_equal

# The quickest, of what is used most; the others each night.
FIRST = ("clipping", "accumulation", "tied", "borrowed", "ChunkedCrossEntropy", "GradualUnfreezing")
TRIED = (*sorted(CASES), "NonFiniteGuard", "SignalCheckpoint", "RankWatch", "SafeCheckpointIO")
TRIED += tuple(kind.__name__ for kind in (*sharded.OPTIMIZERS, *dict(sharded.SCHEDULERS)))
# What each process rounds or draws by the rows that it sees, and what takes another batch: not what one computes.
OWN_ROUNDING = {"Float8Precision", "KahanSummation", "LowBitOptimizer", "QuantizationAwareTraining"}
OWN_ROUNDING |= {"LatentAlignment", "MaxBatchSize", "MuonAdamW", "StochasticRounding"}
OWN_ROUNDING |= {"ContrastiveFlowMatching", "MixtureOfExperts", "NEFTune", "SelectiveBackprop", "TokenRouting"}
SHORTER = {"OptimizerSchedule"}  # its horizon is the run's, and the interrupted one is shorter
FAILS = {"ReplaceHead": "parameters that were not used in producing the loss"}  # under plain DDP


def as_one_process(names: tuple[str, ...], folder: Path) -> dict[str, str]:
    """Compare the losses of each, and return what works and why the rest does not."""
    said = {}
    for name in names:
        found = torch.load(folder / f"{name}.pt", weights_only=True)
        failed = found.get("failed", "")
        assert not failed or (name in FAILS and FAILS[name] in failed), f"{name}: {failed}"
        said[name] = found.get("refused", "use strategy ddp_find_unused_parameters_true" if failed else "works")
        if said[name] != "works":
            continue
        make, network, more = sharded.case_of(name)
        _, losses, _ = sharded.fit(make, network, **more)
        if name not in OWN_ROUNDING:
            torch.testing.assert_close(found["losses"], losses, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert found["resumed"] or name in SHORTER, f"{name}: a resumed run ends elsewhere"
    return said


@pytest.mark.turns(6, family="slow")
def test_two_processes_train_as_one_does_and_resume_to_the_bit(tmp_path: Path) -> None:
    run_ranks(sharded.techniques, tmp_path, FIRST)
    assert set(as_one_process(FIRST, tmp_path).values()) == {"works"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("Compile", marks=pytest.mark.turns(6, family="ranks")),
        pytest.param("inductor", marks=pytest.mark.nightly),
    ],
)
def test_compiled_blocks_in_shards_train_as_one_process_does(name: str, tmp_path: Path) -> None:
    run_ranks(sharded.techniques, tmp_path, (name,), timeout=900)
    assert as_one_process((name,), tmp_path) == {name: "works"}
    assert bool(torch.load(tmp_path / f"{name}.pt")["graphs"]) is (name == "Compile")  # of the backend that counts


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "strategy"), [("DDP", "ddp"), ("FSDP2", None)])
def test_the_table_of_strategies_says_what_was_tried(kind: str, strategy: str | None, tmp_path: Path) -> None:
    run_ranks(sharded.techniques, tmp_path, TRIED, strategy, timeout=900)
    assert as_one_process(TRIED, tmp_path) == json.loads((PACKAGE / "tested.json").read_text("utf-8"))[kind]


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", None])
def test_each_adapter_of_low_rank_trains_as_in_one_process(strategy: str | None, tmp_path: Path) -> None:
    names = ("rsLoRA", "DoRA", "LoRA+")
    run_ranks(sharded.techniques, tmp_path, names, strategy)
    assert set(as_one_process(names, tmp_path).values()) == {"works"}


@pytest.mark.turns(6, family="ranks")
def test_checkpoints_go_from_two_processes_to_one_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In shards and in one file; the next epoch's losses are those of the world size that went on."""
    monkeypatch.chdir(tmp_path)
    _, straight, _ = sharded.fit(list, Net)
    half, _, _ = sharded.fit(list, Net, 1)
    half.save_checkpoint("one.ckpt", weights_only=False)
    run_ranks(sharded.worlds, tmp_path)
    second = straight[len(straight) // 2 :]
    torch.testing.assert_close(torch.load("from_one.pt", weights_only=True), second, rtol=1e-5, atol=1e-5)
    for path in ("two.ckpt", "two_file.ckpt"):
        assert Path(path).is_dir() is (path == "two.ckpt")
        _, losses, _ = sharded.fit(list, Net, 2, path, plugins=[SafeCheckpointIO()])
        torch.testing.assert_close(losses, second, rtol=1e-5, atol=1e-5)
    folder, file = read_checkpoint("two.ckpt", optimizers=True), read_checkpoint("two_file.ckpt")
    assert_equal(folder["state_dict"], file["state_dict"])
    assert_equal(average_files(["two.ckpt", "two_file.ckpt"])["state_dict"], file["state_dict"])
    assert_equal(dict(restore(Toy(), "two.ckpt").state_dict()), file["state_dict"])
    assert main(["convert", "two.ckpt", "--output", "whole.ckpt"]) == 0
    _, losses, _ = sharded.fit(list, Net, 2, "whole.ckpt")
    torch.testing.assert_close(losses, second, rtol=1e-5, atol=1e-5)
    piece = Path("two.ckpt/__1_0.distcp")
    damaged = bytearray(piece.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    piece.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is missing, or not what was written"):
        read_checkpoint("two.ckpt")
    assert [path.name for path in tmp_path.glob(".*")] == []  # no half of a folder is left


@pytest.mark.turns(6, family="ranks")
def test_threads_write_the_shards_that_the_processes_write(tmp_path: Path) -> None:
    run_ranks(sharded.saved_later, tmp_path)


@pytest.mark.turns(6, family="ranks")
def test_divided_experts_train_as_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, clipping, accumulation, recomputation, adapters and resumes; checkpoints are read by one process."""
    monkeypatch.chdir(tmp_path)
    names = ("experts", "experts accumulated", "experts adapted")
    run_ranks(sharded.experts, tmp_path, names)
    assert set(as_one_process(names, tmp_path).values()) == {"works"}
    _, straight, _ = sharded.fit(list, sharded.Mixtral)
    for path in ("experts.ckpt", "file.ckpt"):
        assert Path(path).is_dir() is (path == "experts.ckpt")
    more = {"plugins": [SafeCheckpointIO()]}
    _, losses, _ = sharded.fit(list, sharded.Mixtral, 2, "file.ckpt", **more)
    torch.testing.assert_close(losses, straight[len(straight) // 2 :], rtol=1e-5, atol=1e-5)
    _, clipped, _ = sharded.fit(list, sharded.Mixtral, gradient_clip_val=0.05)
    _, losses, _ = sharded.fit(list, sharded.Mixtral, 2, "experts.ckpt", gradient_clip_val=0.05, **more)
    torch.testing.assert_close(losses, clipped[len(clipped) // 2 :], rtol=1e-5, atol=1e-5)


def test_experts_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"parallel\.experts divides stacked experts.*Net has none"):
        check_experts(Net(), 2)
    with pytest.raises(ConfigurationError, match="has 4 experts, which 3 processes cannot divide"):
        check_experts(sharded.Mixtral(), 3)
    with pytest.raises(ConfigurationError, match=r"parallel\.experts must be false with parallel\.tensor or context"):
        Parallel(tensor=2, experts=True)
    for how in ({"replicas": 2}, {"offload": True}):
        with pytest.raises(ConfigurationError, match=r"parallel\.experts must be false with replicas above 1"):
            ShardedStrategy(parallel=Parallel(experts=True), **how)


def test_all_processes_place_a_file_s_tensors_in_one_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set's differs between processes, which would get each other's tensors."""
    module, placed = Toy("init"), []
    torch.save({"state_dict": module.state_dict(), "pytorch-lightning_version": "2"}, tmp_path / "file.ckpt")
    monkeypatch.setattr(sharded_strategy, "_placed", lambda tensor, like, what: placed.append(what) or tensor)
    sharded_strategy.load_file(tmp_path / "file.ckpt", module, [])
    assert [what.rpartition(" ")[2] for what in placed] == [repr(name) for name in module.state_dict()]


@pytest.mark.turns(6, family="ranks")
def test_units_replicas_formats_and_communication(tmp_path: Path) -> None:
    run_ranks(sharded.units, tmp_path)


class Shares(nn.Module):
    """A layer that keeps what all of its kind share, as peft's VB-LoRA does."""

    def __init__(self, bank: nn.ParameterDict) -> None:
        super().__init__()
        self.layer, self.bank = nn.Linear(2, 2), bank


def test_what_lies_in_several_blocks_is_no_block_s_own() -> None:
    bank = nn.ParameterDict({"vectors": torch.ones(3)})
    blocks = nn.ModuleList([Shares(bank), Shares(bank)])
    assert not owns_its_parameters(blocks[0], blocks)
    assert owns_its_parameters(blocks[0].layer, blocks)
    assert owns_its_parameters(blocks, blocks)
    assert not owns_its_parameters(nn.Identity(), blocks)


def test_hooks_that_a_shard_would_not_have_are_refused() -> None:
    module = Toy()
    module.net.blocks[0].up.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(
        ConfigurationError, match=r"a hook on the gradient of 'net\.blocks\.0\.up\.weight' would be lost"
    ):
        ShardedStrategy()._shard(module)


@pytest.mark.turns(4, family="ranks")
def test_two_processes_share_the_layers_of_a_plan_as_one_trains(tmp_path: Path) -> None:
    """Ours, and one of Hugging Face; tied weights, clipping, and a folder of shards that one process goes on from."""
    run_ranks(sharded.sharing, tmp_path)
    for network in sharded.SHARING:
        found = torch.load(tmp_path / f"{network.__name__}.pt", weights_only=True)
        meter = ThroughputMeter()
        _, losses, weights = sharded.fit(lambda one=meter: [one], network, gradient_clip_val=0.05)
        torch.testing.assert_close(found["losses"], losses, rtol=1e-4, atol=1e-5)
        assert meter.flops is not None
        part, other = (operations / meter.flops.position for operations in found["operations"])
        assert 0.5 <= part == other <= 0.5 + 0.1 * (network is sharded.Image), network  # which has layers of no plan
        assert found["readers"] == 1  # of each batch: its samples count once
        assert found["held"] < 0.7 * sum(tensor.numel() for tensor in weights.values())
    _, straight, _ = sharded.fit(list, sharded.Tied, gradient_clip_val=0.05)
    _, losses, _ = sharded.fit(list, sharded.Tied, 2, str(tmp_path / "shared.ckpt"), gradient_clip_val=0.05,
                               plugins=[SafeCheckpointIO()])  # fmt: skip
    torch.testing.assert_close(losses, straight[len(straight) // 2 :], rtol=1e-5, atol=1e-5)


@pytest.mark.turns(4, family="ranks")
def test_four_processes_share_layers_and_shard_and_two_go_on_with_their_checkpoint(tmp_path: Path) -> None:
    run_ranks(sharded.sharing_and_sharding, tmp_path, processes=4)
    _, losses, _ = sharded.fit(list, sharded.Tied, gradient_clip_val=0.05)
    torch.testing.assert_close(torch.load(tmp_path / "losses.pt", weights_only=True), losses, rtol=1e-4, atol=1e-5)
    run_ranks(sharded.from_four, tmp_path)
    _, losses, _ = sharded.fit(list, sharded.Tied)
    found = torch.load(tmp_path / "from_four.pt", weights_only=True)
    torch.testing.assert_close(found, losses[len(losses) // 2 :], rtol=1e-5, atol=1e-5)


@pytest.mark.turns(4, family="ranks")
@pytest.mark.parametrize("name", row_slices.CASES)
def test_two_processes_share_rows_as_one_trains_and_resume_to_the_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, packed and padded rows, of a length that is no multiple of the pieces; what is logged, and the weights."""
    run_ranks(row_slices.as_one, tmp_path, (name,))
    tokens, operations = as_whole_rows(name, tmp_path, monkeypatch)
    counted = torch.tensor(torch.load(f"{name}_counted.pt", weights_only=True))
    assert counted[:, 0].tolist() == [tokens] * 2  # without padding, whoever has it
    longer = -(-row_slices.LENGTH // 4) * 4 / row_slices.LENGTH  # what pieces of one length are filled up with
    assert float(counted[:, 1].sum()) == pytest.approx(operations * longer, rel=0.01)  # whole chunks


@pytest.mark.turns(4, family="ranks")
def test_of_four_processes_two_share_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(row_slices.two_by_two, tmp_path, processes=4)
    as_whole_rows("packed", tmp_path, monkeypatch, False)  # the first process logs its own rows' loss, as under DDP


def as_whole_rows(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, logs: bool = True) -> list[float]:
    """Compare, and return the tokens and operations that one process counts."""
    monkeypatch.chdir(folder)
    found = torch.load(f"{name}.pt", weights_only=True)
    run, logged, weights = row_slices.fit(name)
    if logs:
        torch.testing.assert_close(found["logged"], logged, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["weights"], dict(weights), rtol=1e-5, atol=1e-5)
    return row_slices.counted_in(run)


@pytest.mark.turns(4, family="ranks")
def test_slices_hold_half_and_what_needs_whole_rows_is_refused(tmp_path: Path) -> None:
    run_ranks(row_slices.numbers_memory_and_refusals, tmp_path)


@pytest.mark.turns(4, family="ranks")
def test_other_optimizers_and_what_they_left_are_refused_in_a_sentence(tmp_path: Path) -> None:
    run_ranks(sharded.other_optimizers, tmp_path)


@pytest.mark.turns(4, family="ranks")
@pytest.mark.filterwarnings("ignore:AdamW steps")
def test_what_stays_in_float32_does_in_shards(tmp_path: Path) -> None:
    run_ranks(sharded.kept_in_float32, tmp_path)
    for precision in ("bf16-true", "bf16-mixed"):
        _, losses, _ = sharded.fit(lambda: [KeepFloat32()], sharded.Normed, precision=precision)
        found = torch.load(tmp_path / f"Normed {precision}.pt", weights_only=True)
        torch.testing.assert_close(found, losses, rtol=0.03, atol=0.03)
    make, network, more = sharded.case_of("FeatureMatching")
    _, losses, _ = sharded.fit(make, network, **more, precision="bf16-mixed")
    found = torch.load(tmp_path / "FeatureMatching bf16-mixed.pt", weights_only=True)
    torch.testing.assert_close(found, losses, rtol=0.01, atol=0.01)


@pytest.mark.turns(4, family="ranks")
def test_optimizers_of_whole_matrices_step_shards_alike(tmp_path: Path) -> None:
    run_ranks(sharded.steps_of_shards, tmp_path)


@pytest.mark.turns(4, family="ranks")
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_packed_documents_are_isolated_or_refused_in_shards(precision: str, tmp_path: Path) -> None:
    run_ranks(isolation.asked, tmp_path, sharded.strategy, precision)


@pytest.mark.turns(4, family="ranks")
@pytest.mark.parametrize(("keeps_names", "longest_vector"), [(True, 1 << 20), (True, 0), (False, 1 << 20)])
def test_packed_documents_are_isolated_or_refused_in_flat_vectors(
    keeps_names: bool, longest_vector: int, tmp_path: Path
) -> None:
    """Of torch's first FSDP, which users may choose."""
    run_ranks(isolation.in_flat_vectors, tmp_path, keeps_names, longest_vector)


def test_arguments_out_of_range_are_refused() -> None:
    for arguments, said in (
        ({"replicas": 0}, "replicas must be a whole number of at least 1"),
        ({"gather_dtype": "float16"}, "gather_dtype"),
        ({"parallel": Parallel(tensor=2), "replicas": 2}, "replicas must be 1 with parallel.tensor above 1"),
        ({"reshard_after_forward": 1.5}, "reshard_after_forward"),
        ({"offload": 1}, "offload must be true or false"),
        ({"blocks": []}, "blocks must be auto or patterns"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            ShardedStrategy(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"parallel\.tensor must be a whole number of at least 1"):
        Parallel(tensor=0)
    with pytest.raises(ConfigurationError, match=r"parallel\.context must be 1 with parallel\.tensor above 1"):
        Parallel(tensor=2, context=2)
