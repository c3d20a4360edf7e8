"""Folders of shards: read as data, whatever their pickles name, and checked piece by piece."""

import pickle
import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from lit_efficient.cli.checkpoint import read, read_last
from lit_efficient.distributed.shards import check_shards, checkpoint_keys, read_checkpoint, sum_shards
from lit_efficient.errors import CheckpointError
from lit_efficient.files.checkpoints import save_atomically
from lit_efficient.plugins.safe_checkpoint_io import SafeCheckpointIO
from tests.plugins.test_safe_checkpoint_io import Bomb

GROUPS = [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["w"]}]


def content() -> dict:
    weights = {"w": torch.arange(6.0).view(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)}
    return {"state_dict": weights, "optimizer_0": {"state": {"w": {"step": torch.tensor(3.0)}}, "param_groups": GROUPS}}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "sound"
    save(content(), folder)
    save_atomically({"epoch": 1}, folder / "meta.pt")
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "folder"))


def save(state: dict, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch, of its own processes
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def load(folder: Path) -> dict:
    state = content()
    for tensor in state["state_dict"].values():
        tensor.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def test_what_torch_wrote_is_accepted(folder: Path) -> None:
    check_shards(folder)
    assert read(str(folder), "fit") == {}
    assert checkpoint_keys(folder) == {"w", "half"}


def test_no_flipped_bit_changes_what_is_loaded(folder: Path) -> None:
    generator, seen = random.Random(0), 0
    for path in (folder / "__0_0.distcp", folder / ".metadata"):
        raw = path.read_bytes()
        for _ in range(60):
            bit = generator.randrange(8 * len(raw))
            flipped = bytearray(raw)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            try:
                check_shards(folder)
            except CheckpointError:
                seen += 1
                continue
            if path.suffix == ".distcp":
                found = load(folder)["state_dict"]
                assert all(torch.equal(found[name], tensor) for name, tensor in content()["state_dict"].items())
        path.write_bytes(raw)
    assert seen > 60


def test_no_flipped_bit_goes_unseen_where_the_hashes_were_written(folder: Path) -> None:
    class Writes:
        is_global_zero = True

        def save_checkpoint(self, checkpoint: dict, filepath: Path) -> None:
            checkpoint["saved"] = filepath

        def broadcast(self, value: Path) -> Path:
            return value

        def barrier(self) -> None:
            assert not (folder / "SHA256SUMS").exists()  # all have written

    strategy, saved = Writes(), {}
    for _ in range(2):
        sum_shards(strategy)
    strategy.save_checkpoint(saved, folder)
    assert saved == {"saved": folder}
    check_shards(folder)
    generator, path = random.Random(0), folder / ".metadata"
    raw = path.read_bytes()
    for _ in range(60):
        bit = generator.randrange(8 * len(raw))
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"\.metadata is missing, or not what was written"):
            check_shards(folder)


def test_no_pickle_in_it_is_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Bomb()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    for use in (check_shards, checkpoint_keys, lambda path: read(str(path), "validate")):
        with pytest.raises(CheckpointError, match=r"\.metadata: posix.system is not allowed in"):
            use(folder)
    shutil.rmtree(folder)
    save({**content(), "extra": Bomb()}, folder)  # as bytes, which torch's planner unpickles
    with pytest.raises(CheckpointError, match=r"refused to load .*distcp \(extra\)"):
        check_shards(folder)
    assert not (tmp_path / "exploded").exists()


def test_the_word_last_takes_no_folder_unchecked(folder: Path, tmp_path: Path) -> None:
    older = Path(shutil.copytree(folder, tmp_path / "older"))
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.warns(UserWarning, match=r"\.metadata: .* is not allowed in.*from the one before"):
        assert read_last([folder, older]) == (str(older), {})


def test_a_place_outside_a_missing_file_and_deepspeed_are_refused(folder: Path, tmp_path: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (folder / "__0_0.distcp").rename(folder / "moved")
    with pytest.raises(CheckpointError, match=r"cannot read .*distcp: No such file"):
        check_shards(folder)
    for place in metadata.storage_data.values():
        place.relative_path = "../outside.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"names the file '\.\./outside\.distcp', which is outside of the folder"):
        check_shards(folder)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "latest").write_text("global_step1")
    with pytest.raises(CheckpointError, match=r"DeepSpeed, whose loading unpickles it, .* zero_to_fp32\.py"):
        read(str(tmp_path / "theirs"), "fit")
    with pytest.warns(UserWarning, match="DeepSpeed.*None is left"), pytest.raises(CheckpointError, match="DeepSpeed"):
        read_last([tmp_path / "theirs"])  # a job that is queued again would begin anew
    with pytest.raises(CheckpointError, match=r"theirs is a checkpoint of DeepSpeed.* zero_to_fp32\.py"):
        read_checkpoint(tmp_path / "theirs")  # of export, average and convert


def test_what_an_optimizer_goes_on_with_is_in_memory_and_all_else_in_a_file(folder: Path) -> None:
    def mapped(tensor: torch.Tensor) -> bool:
        spans = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
        ranges = [tuple(int(end, 16) for end in span[0].split("-")) for span in spans if "(deleted)" in span]
        return any(begin <= tensor.data_ptr() < end for begin, end in ranges)

    for found, in_file in ((read_checkpoint(folder, True), True), (SafeCheckpointIO().load_checkpoint(folder), False)):
        held = [*found["state_dict"].values(), found["optimizer_states"][0]["state"][0]["step"]]
        assert [mapped(tensor) for tensor in held] == [in_file] * 3
        assert all(torch.equal(found["state_dict"][name], one) for name, one in content()["state_dict"].items())
