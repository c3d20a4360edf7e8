import argparse
import os
import random
import resource
import signal
import socket
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.files.checkpoints import load_verified, save_atomically
from lit_efficient.plugins.safe_checkpoint_io import SafeCheckpointIO
from tests import processes
from tests.callbacks.resume_kit import Tiny, trainer


def content(step=0, size=50):
    return {"state_dict": {"w": torch.arange(size) + step}, "optimizer_states": [], "epoch": 1, "global_step": step}


def leftovers(folder):
    return [path.name for path in Path(folder).iterdir() if path.suffix != ".ckpt"]


def save_for_ever(path):
    step = 0
    while True:
        save_atomically(content(step, 300_000), path)
        step += 1


def test_a_process_killed_while_saving_leaves_a_whole_checkpoint(tmp_path):
    path, torn, pause = tmp_path / "last.ckpt", 0, random.Random(0)
    save_atomically(content(0, 300_000), path)
    for _ in range(16):
        known = set(leftovers(tmp_path))
        process = processes.start(save_for_ever, path)
        while not set(leftovers(tmp_path)) - known:  # until it is writing
            time.sleep(0.0005)
        time.sleep(pause.uniform(0, 0.004))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        torn += bool(set(leftovers(tmp_path)) - known)
        loaded = load_verified(path)
        assert torch.equal(loaded["state_dict"]["w"], torch.arange(300_000) + loaded["global_step"])
    assert torn > 3, "no kill fell into the middle of a save: the test proves nothing"
    save_atomically(content(), path)
    assert leftovers(tmp_path) == []


def test_temporaries_of_the_living_and_of_other_machines_stay(tmp_path):
    host = socket.gethostname()
    alive, elsewhere = (
        tmp_path / f".a.ckpt.{host}-{os.getppid()}-01234567.partial",
        tmp_path / ".a.x-1-01234567.partial",
    )
    own_past, old = tmp_path / f".a.ckpt.{host}-{os.getpid()}-01234567.partial", tmp_path / ".b.x-1-01234567.partial"
    not_ours = tmp_path / ".film.partial"
    for path in (alive, elsewhere, own_past, old, not_ours):
        path.touch()
    os.utime(old, (0, 0))
    save_atomically(content(), tmp_path / "a.ckpt")
    assert {path for path in tmp_path.iterdir() if path.suffix == ".partial"} == {alive, elsewhere, not_ours}


def test_no_flipped_bit_changes_what_is_loaded(tmp_path):
    path, original = tmp_path / "a.ckpt", content(7, 300)
    save_atomically(original, path)
    raw, generator, detected = path.read_bytes(), random.Random(1), 0
    for _ in range(300):
        damaged = bytearray(raw)
        bit = generator.randrange(8 * len(raw))
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            loaded = load_verified(path)
        except CheckpointError:
            detected += 1
        else:  # padding, dates and the like
            assert torch.equal(loaded.pop("state_dict")["w"], original["state_dict"]["w"])
            assert loaded == {key: value for key, value in original.items() if key != "state_dict"}
    assert detected > 150


def test_without_verification_a_flipped_bit_goes_unnoticed(tmp_path):
    path = tmp_path / "a.ckpt"
    save_atomically(content(0, 300), path)
    raw = bytearray(path.read_bytes())
    raw[raw.index(torch.arange(8, 16).numpy().tobytes())] ^= 1
    path.write_bytes(raw)
    assert load_verified(path, verify=False)["state_dict"]["w"][8] == 9
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        load_verified(path)


@pytest.mark.parametrize("keep", [0, 1, 500, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "a.ckpt"
    save_atomically(content(), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"a\.ckpt is damaged or truncated"):
        load_verified(path)


def save_on_a_full_disk(path):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        SafeCheckpointIO().save_checkpoint(content(2, 300_000), path)
    except CheckpointError as error:
        print(error)
        raise SystemExit(2) from None


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path):
    path, log = tmp_path / "a.ckpt", tmp_path / "log.ckpt"
    save_atomically(content(1), path)
    assert processes.run(save_on_a_full_disk, path, log=log) == 2
    assert f"cannot write the checkpoint {path}: File too large after" in log.read_text()
    assert "the previous file is unchanged" in log.read_text()
    assert load_verified(path)["global_step"] == 1
    assert processes.run(save_on_a_full_disk, tmp_path / "new.ckpt", log=log) == 2
    assert "nothing was left behind" in log.read_text()
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.ckpt", "log.ckpt"}


def test_what_cannot_be_written_says_so_and_leaves_nothing(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*: File exists after"):
        save_atomically(content(), tmp_path / "file" / "a.ckpt")
    (tmp_path / "folder.ckpt").mkdir()
    with pytest.raises(CheckpointError, match="Is a directory"):
        save_atomically(content(), tmp_path / "folder.ckpt")
    with pytest.raises(Exception, match="pickle"):
        save_atomically({"f": lambda: 0}, tmp_path / "a.ckpt")
    assert leftovers(tmp_path) == ["file"]


def test_checksums_are_written_even_where_they_were_switched_off(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        save_atomically(content(), tmp_path / "a.ckpt")
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    assert load_verified(tmp_path / "a.ckpt")["global_step"] == 0


@pytest.mark.parametrize("url", ["https://example.org/a.ckpt", "s3://bucket/a.ckpt", "file:///a.ckpt"])
def test_urls_are_refused(url):
    for use in (load_verified, lambda path: save_atomically({}, path), SafeCheckpointIO().remove_checkpoint):
        with pytest.raises(CheckpointError, match=f"{url} is a URL"):
            use(url)


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (argparse.Namespace(), "argparse.Namespace"),
        (Bomb(), "posix.system"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
    ],
)
def test_classes_are_refused_by_name_and_announced_when_saving(tmp_path, monkeypatch, value, name):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.ckpt"
    save_atomically(content(), tmp_path / "good.ckpt")
    with pytest.warns(UserWarning, match=r"a\.ckpt will be refused when loaded"):
        save_atomically({"value": value}, path)
    for load in (load_verified, SafeCheckpointIO().load_checkpoint):  # it is whole: no other file is a substitute
        with pytest.raises(CheckpointError, match=f"objects of {name}"):
            load(path)
    assert not (tmp_path / "exploded").exists()


def test_an_unsafe_load_or_another_device_is_refused(tmp_path):
    save_atomically(content(), tmp_path / "a.ckpt")
    with pytest.raises(ConfigurationError, match="weights_only must be true or null, got False"):
        SafeCheckpointIO().load_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    with pytest.raises(ConfigurationError, match="map_location must be 'cpu'"):
        SafeCheckpointIO().load_checkpoint(tmp_path / "a.ckpt", map_location="cuda:0")
    with pytest.raises(ConfigurationError, match="storage_options"):
        SafeCheckpointIO().save_checkpoint({}, tmp_path / "b.ckpt", storage_options={})
    with pytest.raises(ConfigurationError, match="verify must be true or false, got 'yes'"):
        SafeCheckpointIO(verify="yes")
    with pytest.raises(CheckpointError, match="sharded checkpoint"):
        load_verified(tmp_path)


def test_a_damaged_checkpoint_falls_back_to_the_last_good_one(tmp_path):
    for age, name in enumerate(["damaged", "weights", "torn", "newest_good", "older_good"]):
        path = tmp_path / f"{name}.ckpt"
        save_atomically(content(age) if name != "weights" else {"state_dict": {}}, path)
        if name in ("damaged", "torn"):
            path.write_bytes(path.read_bytes()[:-100])
        os.utime(path, (1000 - age, 1000 - age))
    (tmp_path / "last.ckpt").symlink_to("damaged.ckpt")
    with pytest.warns(
        UserWarning, match=r"damaged\.ckpt is damaged.* Going on from .*newest_good\.ckpt \(epoch 1, step 3\)"
    ):
        assert SafeCheckpointIO().load_checkpoint(tmp_path / "damaged.ckpt")["global_step"] == 3
    with pytest.raises(CheckpointError, match=r"damaged\.ckpt is damaged"):
        SafeCheckpointIO(fallback=False).load_checkpoint(tmp_path / "damaged.ckpt")
    with pytest.raises(CheckpointError, match=r"there is no file .*absent\.ckpt"):
        SafeCheckpointIO().load_checkpoint(tmp_path / "absent.ckpt")
    (tmp_path / "newest_good.ckpt").unlink()
    (tmp_path / "older_good.ckpt").unlink()
    with pytest.raises(CheckpointError, match=r"No other .* is whole and resumable"):
        SafeCheckpointIO().load_checkpoint(tmp_path / "damaged.ckpt")


def test_files_and_folders_are_removed_whole(tmp_path, monkeypatch):
    io, folder = SafeCheckpointIO(), tmp_path / "sharded.ckpt"
    save_atomically(content(), tmp_path / "a.ckpt")
    (folder / "shard").mkdir(parents=True)
    io.remove_checkpoint(tmp_path / "a.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")  # gone already: nothing to do
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            io.remove_checkpoint(folder)
    assert not folder.exists()
    assert all(name.startswith(".sharded.ckpt.") for name in leftovers(tmp_path))
    save_atomically(content(), tmp_path / "a.ckpt")
    assert leftovers(tmp_path) == []


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_both_trainers_take_it(tmp_path, namespace):
    package = pytest.importorskip(namespace)
    arguments = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}

    class Module(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    loader = torch.utils.data.DataLoader(torch.ones(4, 1))
    saver = package.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    run = package.Trainer(max_steps=3, plugins=[SafeCheckpointIO()], callbacks=[saver], **arguments)
    assert isinstance(run.strategy.checkpoint_io, SafeCheckpointIO)
    run.fit(Module(), loader)
    torn = tmp_path / "step=3.ckpt"
    torn.write_bytes(torn.read_bytes()[:-50])
    again = package.Trainer(max_steps=2, plugins=[SafeCheckpointIO()], callbacks=[saver], **arguments)
    with pytest.warns(UserWarning, match=r"Going on from .*step=2\.ckpt"):
        again.fit(Module(), loader, ckpt_path=torn)
    assert again.global_step == 2


def test_a_run_of_lightning_resumes_through_it(tmp_path):
    first = trainer([], max_epochs=1, plugins=[SafeCheckpointIO()])
    first.fit(Tiny())
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = trainer([], max_epochs=2, plugins=[SafeCheckpointIO()])
    second.fit(Tiny(), ckpt_path=tmp_path / "a.ckpt")
    assert second.global_step == 2 * first.global_step == 8
    with pytest.raises(ConfigurationError, match="weights_only"):
        trainer([], plugins=[SafeCheckpointIO()]).fit(Tiny(), ckpt_path=tmp_path / "a.ckpt", weights_only=False)
    assert isinstance(first, pl.Trainer)
