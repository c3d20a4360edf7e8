import argparse
import os
import pickle
import resource
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from sklearn.preprocessing import LabelEncoder

from lit_efficient.errors import CheckpointError, ConfigurationError, DivergedError
from lit_efficient.files.checkpoints import load_verified, save_atomically, state_of
from lit_efficient.plugins.safe_checkpoint_io import SafeCheckpointIO
from tests import processes
from tests.callbacks.resume_kit import Tiny, trainer


def content(step=0, size=50):
    return {"state_dict": {"w": torch.arange(size) + step}, "optimizer_states": [], "epoch": 1, "global_step": step}


def leftovers(folder):
    return [path.name for path in Path(folder).iterdir() if path.suffix != ".ckpt"]


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


def test_pages_of_the_web_are_refused_and_addresses_of_local_files_are_not(tmp_path):
    url = "https://example.org/a.ckpt"
    for use in (load_verified, lambda path: save_atomically({}, path), SafeCheckpointIO().remove_checkpoint):
        with pytest.raises(CheckpointError, match=f"{url} is a page of the web"):
            use(url)
    save_atomically(content(3), f"file://{tmp_path}/a.ckpt")
    assert load_verified(tmp_path / "a.ckpt")["global_step"] == 3


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


def test_all_refused_classes_are_named_with_the_line_that_allows_them(tmp_path):
    """Scalars and arrays of NumPy and an encoder of scikit-learn, as published projects keep them; the line is run."""
    path, encoder = tmp_path / "a.ckpt", LabelEncoder().fit(["cat", "dog"])
    saved = {**content(), "hyper_parameters": {"rate": np.float64(0.5), "count": np.int32(3), "encoder": encoder}}
    with pytest.warns(UserWarning, match="will be refused when loaded"):
        save_atomically(saved, path)
    with pytest.raises(CheckpointError, match="refused to load") as caught:
        SafeCheckpointIO().load_checkpoint(path)
    message = str(caught.value)
    assert "damaged" not in message
    assert "LabelEncoder, " in message
    *_, imports, allow = message.splitlines()
    before = torch.serialization.get_safe_globals()
    try:
        exec(f"{imports.strip()}\n{allow.strip()}", {})
        assert load_verified(path)["hyper_parameters"]["encoder"].classes_.tolist() == ["cat", "dog"]
        assert load_verified(path)["hyper_parameters"]["count"] == 3
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=r"a\.ckpt is damaged"):
        load_verified(path)


class Listed(list):
    """A list that is not plain."""


def _circle() -> tuple[Any, ...]:
    inside: list[Any] = []
    inside.append((inside,))
    return inside[0]


def test_saving_warns_of_what_a_safe_load_refuses_and_of_nothing_else(tmp_path):
    path, refused = tmp_path / "a.ckpt", []
    values = [content(), OrderedDict(a=1), torch.nn.Parameter(torch.ones(1)), torch.nn.Linear(1, 1).state_dict()]
    values += [b"bytes", bytearray(b"bytes"), {1}, frozenset({1}), deque([1]), defaultdict(int), Counter("aa")]
    values += [Listed([1]), 1j, 2**9999, -(2**40), torch.float32, torch.device("cpu"), torch.Size([1])]
    values += [torch.ones(2).to_sparse(), np.ones(2), np.float32(1), Path("a"), _circle(), range(2), len]
    for value in values:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            save_atomically({"value": value}, path)
        try:
            torch.load(path, weights_only=True)
        except pickle.UnpicklingError:
            refused.append(value)
            assert [str(one.message)[:34] for one in told] == ["a.ckpt will be refused when loaded"], value
        else:
            assert not told, value
    assert 8 < len(refused) < len(values) - 8


def test_an_unsafe_load_or_another_device_is_refused(tmp_path):
    save_atomically(content(), tmp_path / "a.ckpt")
    with pytest.raises(ConfigurationError, match=r"weights_only must be true or null .*, got False"):
        SafeCheckpointIO().load_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    with pytest.raises(ConfigurationError, match="map_location must be cpu or null, got 'cuda:0'"):
        SafeCheckpointIO().load_checkpoint(tmp_path / "a.ckpt", map_location="cuda:0")
    with pytest.raises(ConfigurationError, match="storage_options"):
        SafeCheckpointIO().save_checkpoint({}, tmp_path / "b.ckpt", storage_options={})
    with pytest.raises(ConfigurationError, match="verify must be true or false, got 'yes'"):
        SafeCheckpointIO(verify="yes")
    with pytest.raises(CheckpointError, match="sharded checkpoint"):
        load_verified(tmp_path)


def test_of_a_damaged_checkpoint_the_last_good_one_is_named_or_taken_on_request(tmp_path):
    for age, name in enumerate(["damaged", "weights", "torn", "newest_good", "older_good"]):
        path = tmp_path / f"{name}.ckpt"
        save_atomically(content(age) if name != "weights" else {"state_dict": {}}, path)
        if name in ("damaged", "torn"):
            path.write_bytes(path.read_bytes()[:-100])
        os.utime(path, (1000 - age, 1000 - age))
    (tmp_path / "last.ckpt").symlink_to("damaged.ckpt")
    with pytest.warns(UserWarning, match=r"damaged\.ckpt is damaged.* Continuing from .*newest_good\.ckpt"):
        assert SafeCheckpointIO(fallback=True).load_checkpoint(tmp_path / "damaged.ckpt")["global_step"] == 3
    with pytest.raises(CheckpointError, match=r"damaged\.ckpt is damaged.* last good .* in its folder: .*newest_good"):
        SafeCheckpointIO().load_checkpoint(tmp_path / "damaged.ckpt")
    with pytest.raises(CheckpointError, match=r"there is no file .*absent\.ckpt"):
        SafeCheckpointIO().load_checkpoint(tmp_path / "absent.ckpt")
    (tmp_path / "newest_good.ckpt").unlink()
    (tmp_path / "older_good.ckpt").unlink()
    with pytest.raises(CheckpointError, match=r"No other .* is intact and resumable"):
        SafeCheckpointIO(fallback=True).load_checkpoint(tmp_path / "damaged.ckpt")


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


def test_weights_that_are_not_finite_replace_none_that_are(tmp_path):
    path, io = tmp_path / "a.ckpt", SafeCheckpointIO()
    mask = torch.full((3, 3), -torch.inf).triu(1)
    sound = {"w": torch.ones(3), "mask": mask, "best": torch.tensor(torch.inf), "none": torch.zeros(0)}
    sound |= {"f8": torch.ones(2).to(torch.float8_e4m3fn), "half": torch.ones(2, dtype=torch.float16)}
    sound |= {"count": torch.tensor(3), "flag": torch.tensor(True), "text": "x", "c": torch.ones(2, dtype=torch.cfloat)}
    io.save_checkpoint({"state_dict": sound}, path)
    bad = [torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0, torch.inf]), torch.tensor(torch.nan)]
    bad += [torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn), torch.tensor([0, -torch.inf, 1]).bfloat16()]
    bad += [torch.tensor([1.0, 1.0, torch.inf]), torch.tensor([-torch.inf, 0.0, torch.inf])]  # a norm's weights, say
    for tensor in bad:
        with pytest.raises(DivergedError, match=r"a\.ckpt is not written, because it has NaN or infinity in w$"):
            io.save_checkpoint({"state_dict": {**sound, "w": tensor}}, path)
        assert torch.equal(load_verified(path)["state_dict"]["w"], torch.ones(3))
    states = [{"state": {0: {"step": torch.tensor(3.0), "moment": torch.full((3,), torch.inf)}}}]
    with pytest.raises(DivergedError, match=r"it has NaN or infinity in optimizer 0 state 0 moment$"):
        io.save_checkpoint({"state_dict": sound, "optimizer_states": states}, path)
    nan = torch.tensor([torch.nan])
    for state, name in (
        ({0: {"old": [nan]}}, "0 old 0"),
        ({0: {"in": {"m": nan}}}, "0 in m"),
        ({"all": nan}, "all"),
    ):
        with pytest.raises(DivergedError, match=f"it has NaN or infinity in optimizer 0 state {name}$"):
            io.save_checkpoint({"state_dict": sound, "optimizer_states": [{"state": state}]}, path)
    kept = {"calls": 3, "all": torch.ones(2), 0: {"old": [torch.ones(2)], "last": None}}
    io.save_checkpoint({"state_dict": sound, "optimizer_states": [{"state": kept}]}, path)
    assert load_verified(path)["optimizer_states"][0]["state"]["calls"] == 3
    assert [file.name for file in tmp_path.iterdir()] == ["a.ckpt"]
    SafeCheckpointIO(finite=False).save_checkpoint({"state_dict": {"w": bad[0]}}, path)
    assert load_verified(path)["state_dict"]["w"].isnan().any()


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
    again = package.Trainer(max_steps=2, plugins=[SafeCheckpointIO(fallback=True)], callbacks=[saver], **arguments)
    with pytest.warns(UserWarning, match=r"Continuing from .*step=2\.ckpt"):
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


def test_a_file_that_was_found_whole_is_not_checked_again_but_another_one_is(tmp_path):
    path, plugin = tmp_path / "a.ckpt", SafeCheckpointIO()
    save_atomically(content(), path)
    before, whole = path.stat(), path.read_bytes()
    damaged = bytearray(whole)
    damaged[whole.index(torch.arange(50).numpy().tobytes())] ^= 1
    path.write_bytes(damaged)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for checked in (None, (0, 0, 0, 0)):
        plugin.checked = checked
        with pytest.raises(CheckpointError, match="is damaged"):
            plugin.load_checkpoint(path)
    plugin.checked = state_of(path)
    assert plugin.load_checkpoint(path)["state_dict"]["w"][0] == 1


def test_checkpoints_of_the_same_content_are_one_file_with_two_names(tmp_path):
    plugin, held = SafeCheckpointIO(), content()
    first, second, third = (tmp_path / f"{name}.ckpt" for name in "abc")
    plugin.save_checkpoint(held, first)
    plugin.save_checkpoint(held, second)
    assert second.samefile(first)
    held["state_dict"]["w"].data[0] = 1  # by a way that torch does not count
    plugin.save_checkpoint(held, second)
    assert not second.samefile(first)
    assert [int(load_verified(path)["state_dict"]["w"][0]) for path in (first, second)] == [0, 1]
    second.write_bytes(b"")  # by somebody else
    plugin.save_checkpoint(held, third)
    assert load_verified(third)["state_dict"]["w"][0] == 1
    assert leftovers(tmp_path) == []


def test_a_best_and_a_last_checkpoint_of_one_step_are_written_once(tmp_path):
    saving = pl.callbacks.ModelCheckpoint(tmp_path, "best", monitor="val/loss", mode="max", save_last=True)
    saving.last_model_path = str(tmp_path / "last.ckpt")  # as the command line has it: it is part of a checkpoint
    trainer([saving], max_epochs=1, plugins=[SafeCheckpointIO()], enable_checkpointing=True).fit(Tiny())
    assert (tmp_path / "best.ckpt").samefile(tmp_path / "last.ckpt")


def test_what_is_resumed_stays_on_disk_until_it_is_used(tmp_path):
    path = tmp_path / "a.ckpt"
    save_atomically(content(), path)
    tensor = SafeCheckpointIO().load_checkpoint(path)["state_dict"]["w"]
    if sys.platform == "linux":
        mapped = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
                  if line.endswith(str(path))]  # fmt: skip
        assert any(int(begin, 16) <= tensor.data_ptr() < int(end, 16) for begin, end in mapped)
    tensor += 1  # in this process alone
    assert load_verified(path)["state_dict"]["w"][0] == 0
