"""Checkpoints on file systems of fsspec: whole or not at all, read back to the bit, resumed from."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_efficient import AsyncCheckpoint, ExactResume, SafeCheckpointIO, ShardedStrategy
from lit_efficient.distributed import shards
from lit_efficient.distributed.shards import read_checkpoint
from lit_efficient.errors import CheckpointError
from lit_efficient.files import remote
from lit_efficient.files.checkpoints import load_verified, save_atomically
from tests import processes
from tests.callbacks.resume_kit import Tiny, equal, fit

HOME = "memory://runs/one"


@pytest.fixture(autouse=True)
def memory() -> Iterator[MemoryFileSystem]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:Checkpoint directory")


def fitted(callbacks: list[Any], folder: str | Path, **arguments: Any) -> Any:
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max")
    plugins = [SafeCheckpointIO()]
    return fit(Tiny(), [ExactResume(), saver, *callbacks], plugins=plugins, enable_checkpointing=True, **arguments)


@pytest.mark.parametrize("later", [False, True])
def test_a_fit_saves_there_and_resumes_from_there_bit_exactly(
    later: bool, tmp_path: Path, memory: MemoryFileSystem
) -> None:
    more = [AsyncCheckpoint()] if later else []
    whole = fitted(more, HOME)
    local = fitted([], tmp_path)
    last = local.global_step
    assert [path.rpartition("/")[2] for path in memory.ls("/runs/one", detail=False)] == [
        f"step={last - 1}.ckpt",
        f"step={last}.ckpt",
    ]
    found, expected = load_verified(f"{HOME}/step={last}.ckpt"), load_verified(tmp_path / f"step={last}.ckpt")
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
        assert equal(found[key], expected[key]), key
    resumed = fitted(more, "memory://runs/two", ckpt_path=f"{HOME}/step={last - 1}.ckpt")
    assert equal(resumed.lightning_module.state_dict(), whole.lightning_module.state_dict())


def save_shards() -> None:
    """In a process of its own, which has a process group."""

    def sharded() -> dict[str, Any]:
        return {"strategy": ShardedStrategy(blocks=[r"net\.0"]), "max_epochs": 1}

    memory = fsspec.filesystem("memory")
    whole = fitted([], HOME, **sharded())
    last = whole.global_step
    names = [path.rpartition("/")[2] for path in memory.ls("/runs/one", detail=False)]
    assert len(names) == 4  # two pointers and their folders: the older ones are removed
    fitted([], "local", **sharded())
    for step in (last - 1, last):
        found, expected = (read_checkpoint(f"{place}/step={step}.ckpt", optimizers=True) for place in (HOME, "local"))
        assert equal(found["state_dict"], expected["state_dict"])
        assert equal(found["optimizer_states"], expected["optimizer_states"])
    path = f"{HOME}/step={last - 1}.ckpt"
    resumed = fitted([], "memory://runs/two", ckpt_path=path, **sharded())
    assert equal(read_checkpoint(f"memory://runs/two/step={last}.ckpt")["state_dict"], found["state_dict"])
    assert resumed.global_step == last
    SafeCheckpointIO().remove_checkpoint(path)
    assert len(memory.ls("/runs/one")) == 2
    memory.pipe("/runs/one/a.ckpt", b'{"folder": "../../secrets"}')
    with pytest.raises(CheckpointError, match="names a folder that is not its own"):
        load_verified(f"{HOME}/a.ckpt")


def save_from_two_machines() -> None:
    """In two processes whose temporary folders differ, as on two machines."""
    rank = os.environ["RANK"]
    os.makedirs(rank, exist_ok=True)
    tempfile.tempdir = os.path.abspath(rank)
    files: list[set[str]] = []

    def watched(local: Path, url: str) -> None:
        files.append({path.name for path in local.iterdir()})
        upload(local, url)

    upload, shards.upload_files = shards.upload_files, watched
    url = f"local://{os.getcwd()}/there"
    fitted([], url, strategy=ShardedStrategy(blocks=[r"net\.0"]), devices=2, max_epochs=1)
    shards.upload_files = upload
    own = {f"__{rank}_0.distcp"}
    assert all(found == (own if rank == "1" else own | {".metadata", "meta.pt", "SHA256SUMS"}) for found in files), (
        files
    )
    assert files
    for path in filter(Path.is_file, Path("there").glob("*.ckpt")):
        assert "state_dict" in read_checkpoint(f"{url}/{path.name}", optimizers=True)


@pytest.mark.turns(6, family="ranks")
def test_each_process_uploads_its_own_shards(tmp_path: Path) -> None:
    processes.run_ranks(save_from_two_machines, tmp_path)


def test_a_name_that_leads_out_of_the_folder_is_refused(memory: MemoryFileSystem) -> None:
    memory.pipe("/runs/one/a.ckpt", b'{"folder": "a.ckpt.01234567"}')
    memory.pipe("/runs/one/a.ckpt.01234567/0.distcp", b"data")
    memory.store["/runs/one/a.ckpt.01234567/../../evil"] = memory.store["/runs/one/a.ckpt.01234567/0.distcp"]
    with pytest.raises(CheckpointError, match=r"a file outside of its folder: '\.\./\.\./evil'"):
        load_verified(f"{HOME}/a.ckpt")


@pytest.mark.turns(6, family="ranks")
def test_shards_are_a_folder_behind_a_pointer(tmp_path: Path) -> None:
    processes.run_ranks(save_shards, tmp_path, processes=1)


def test_a_failed_upload_leaves_the_previous_checkpoint(
    memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, path = SafeCheckpointIO(), f"{HOME}/a.ckpt"
    plugin.save_checkpoint({"state_dict": {}, "global_step": 1}, path)

    def torn(self: Any, local: str, target: str) -> None:
        self.pipe(target, Path(local).read_bytes()[:100])

    monkeypatch.setattr(MemoryFileSystem, "put_file", torn)
    with pytest.raises(CheckpointError, match=r"a\.ckpt: 100 bytes of \d+ have arrived; the previous one is unchanged"):
        plugin.save_checkpoint({"state_dict": {}, "global_step": 2}, path)
    assert load_verified(path)["global_step"] == 1
    assert memory.ls("/runs/one", detail=False) == ["/runs/one/a.ckpt"]
    memory.pipe("/runs/one/a.ckpt", memory.cat("/runs/one/a.ckpt")[:-50])
    with pytest.raises(CheckpointError, match=rf"{path} is damaged or truncated"):
        plugin.load_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"there is no file memory://runs/one/b\.ckpt"):
        plugin.load_checkpoint(f"{HOME}/b.ckpt")


def save_for_ever(url: str) -> None:
    step = 0
    while True:
        save_atomically({"state_dict": {"w": torch.arange(300_000) + step}, "global_step": step}, url)
        step += 1


@pytest.mark.turns(4, family="killed")
def test_a_process_killed_while_uploading_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    url, pause, torn = f"local://{tmp_path}/last.ckpt", random.Random(0), 0
    save_atomically({"state_dict": {"w": torch.arange(300_000)}, "global_step": 0}, url)
    for _ in range(8):
        known = set(tmp_path.iterdir())
        process = processes.start(save_for_ever, url)
        while not set(tmp_path.iterdir()) - known:
            time.sleep(0.0005)
        time.sleep(pause.uniform(0, 0.003))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        torn += bool(set(tmp_path.iterdir()) - known)
        loaded = load_verified(url)
        assert torch.equal(loaded["state_dict"]["w"], torch.arange(300_000) + loaded["global_step"])
    assert torn, "no kill fell into the middle of an upload: the test proves nothing"
    save_atomically({}, url)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


class WithoutEmptyFolders(MemoryFileSystem):
    """A file system whose empty folders do not exist, as those of an object store."""

    protocol = "objects"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("objects://", "memory://")))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass


def test_a_folder_need_not_exist_before_its_first_file() -> None:
    fsspec.register_implementation("objects", WithoutEmptyFolders, clobber=True)
    with pytest.raises(FileNotFoundError):
        fsspec.filesystem("objects").ls("/runs/first", detail=False)
    save_atomically({"global_step": 3}, "objects://runs/first/a.ckpt")
    assert load_verified("objects://runs/first/a.ckpt")["global_step"] == 3
    remote.remove("objects://runs/first/a.ckpt")
    remote.remove("objects://runs/none/a.ckpt")


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("s3fs") is None or find_spec("moto") is None, reason="needs s3fs and moto")
def test_an_object_store_holds_files_and_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        fsspec.filesystem("s3").mkdir("bucket")
        whole = fitted([], "s3://bucket/run")
        path = f"s3://bucket/run/step={whole.global_step - 1}.ckpt"
        resumed = fitted([], "s3://bucket/again", ckpt_path=path)
        assert equal(resumed.lightning_module.state_dict(), whole.lightning_module.state_dict())
        remote.remove(path)
        assert not fsspec.filesystem("s3").exists(path)

        (tmp_path / "inner").mkdir()
        for turn in (1, 2):
            (tmp_path / "inner" / "a.bin").write_bytes(bytes([turn]) * 1000)
            folder = remote.new_folder("s3://bucket/run/last.ckpt")
            remote.upload_files(tmp_path, folder)
            remote.point("s3://bucket/run/last.ckpt", folder)
        with remote.downloaded("s3://bucket/run/last.ckpt") as local:
            assert (local / "inner" / "a.bin").read_bytes() == bytes([2]) * 1000
        files = fsspec.filesystem("s3").find("bucket/run")
        assert sorted(name.rpartition("/")[2] for name in files if "last.ckpt" in name) == ["a.bin", "last.ckpt"]
    finally:
        server.stop()
