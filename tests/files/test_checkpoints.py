"""Files are written whole or not at all, and whoever reads one finds what was written or an error."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from lit_efficient import CausalLMConfig
from lit_efficient.cli.run_log import RunLog
from lit_efficient.data.text.chat_tokenizer import load_chat_tokenizer
from lit_efficient.data.text.token_cache import load_tokenizer
from lit_efficient.distributed.shards import check_everywhere, checkpoint_keys
from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.export.adapters import export_checkpoint
from lit_efficient.files.atomic_file import write_folder
from lit_efficient.files.cache import read_json, write_json
from lit_efficient.files.checkpoints import check_piece, load_verified, read, save_atomically
from lit_efficient.files.events import EVENTS, open_events, write_event
from lit_efficient.files.file_hashes import altered_file
from lit_efficient.files.sums import check_sums
from lit_efficient.files.tensors import load_tensors, save_tensors
from lit_efficient.mechanisms.averages.snapshots import Snapshot, synthesize, write_snapshot
from lit_efficient.models.libraries.autoencoders import build_autoencoder
from lit_efficient.models.libraries.causal_lm import build as build_causal_lm
from lit_efficient.models.libraries.teachers import find_teacher
from lit_efficient.tasks.loading import hugging_face_tokenizer, load_language_model
from tests import processes

TINY = GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16, n_positions=8)


def content(step=0, size=50):
    return {"state_dict": {"w": torch.arange(size) + step}, "optimizer_states": [], "epoch": 1, "global_step": step}


def leftovers(folder):
    return [path.name for path in Path(folder).iterdir() if path.suffix != ".ckpt"]


def save_for_ever(path):
    step = 0
    while True:
        save_atomically(content(step, 300_000), path)
        step += 1


@pytest.mark.turns(4, family="killed")
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


def test_a_writer_that_replaces_a_file_while_it_is_mapped_mixes_nothing(tmp_path, monkeypatch):
    """torch opens it once for the pickle, that says where tensors lie, and once for their numbers."""
    path, other = tmp_path / "last.ckpt", tmp_path / "other.ckpt"
    save_atomically({"state_dict": {"w": torch.full((5000,), 2.0)}}, path)
    save_atomically({"more": "x" * 999, "state_dict": {"w": torch.full((5000,), 3.0)}}, other)
    inner = torch.UntypedStorage.from_file

    def replaced(*arguments):
        if other.exists():
            os.replace(other, path)
        return inner(*arguments)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", replaced)
    assert load_verified(path, mapped=True)["state_dict"]["w"].unique().tolist() == [2.0]
    assert not other.exists()
    assert load_verified(path, mapped=True)["state_dict"]["w"].unique().tolist() == [3.0]
    monkeypatch.setattr(torch.UntypedStorage, "from_file", None)  # nothing is mapped that nobody asked to map
    assert load_verified(path)["state_dict"]["w"].unique().tolist() == [3.0]


_LITTLE_MEMORY = """
import resource, sys
from lit_efficient.files.checkpoints import load_verified
from lit_efficient.errors import is_out_of_memory
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, 2 * [4096 * pages + 2**27])
try:
    print(load_verified(sys.argv[1], mapped=True)["weight"].shape)
except Exception as error:
    print(is_out_of_memory(error), error)
"""


@pytest.mark.turns(6, family="slow")
def test_what_cannot_be_mapped_is_read_and_want_of_memory_is_no_damage(tmp_path):
    small, large = tmp_path / "small.ckpt", tmp_path / "large.ckpt"
    save_atomically({"weight": torch.zeros(3)}, small)
    with zipfile.ZipFile(small, "a") as archive:
        archive.writestr("archive/unused", bytes(2**28))
    save_atomically({"weight": torch.zeros(2**26)}, large)
    for path, said in ((small, "torch.Size([3])"), (large, "True")):
        command = [sys.executable, "-c", _LITTLE_MEMORY, str(path)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith(said)


def test_a_pipe_is_refused_before_anybody_waits_for_it(tmp_path):
    os.mkfifo(tmp_path / "a.ckpt")
    for reader in (read, load_verified):
        with pytest.raises(CheckpointError, match=r"a\.ckpt is a pipe or a device"):
            reader(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="pipe or a device"):
        save_atomically({}, "/dev/null")


@pytest.mark.parametrize("name", ["a.ckpt", "a.safetensors"])
def test_a_pointer_of_git_lfs_is_called_so(name, tmp_path):
    oid = f"oid sha256:{'0' * 64}"
    (tmp_path / name).write_text(f"version https://git-lfs.github.com/spec/v1\n{oid}\nsize 9\n")
    with pytest.raises(CheckpointError, match="is a pointer file of git lfs"):
        read(tmp_path / name)


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


def test_what_cannot_be_written_says_so_and_leaves_nothing(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*: File exists after"):
        save_atomically(content(), tmp_path / "file" / "a.ckpt")
    (tmp_path / "folder.ckpt").mkdir()
    with pytest.raises(CheckpointError, match="Is a directory"):
        save_atomically(content(), tmp_path / "folder.ckpt")
    with pytest.raises(Exception, match=r"pickle|local object"):  # the second: Python 3.13
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


READERS = {
    "read": read,
    "export": lambda path: export_checkpoint(path, path.with_name("out"), "safetensors"),
    "export's base": lambda path: export_checkpoint(
        path.with_name("b.ckpt"), path.with_name("out"), "safetensors", path
    ),
    "a sharded resume": lambda path: check_everywhere(SingleDeviceStrategy(), path),
    "a tokenizer": lambda path: load_chat_tokenizer(str(path)),
    "an autoencoder": lambda path: build_autoencoder(str(path)),
    "a language model": lambda path: load_language_model(str(path)),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_compares_checksums(reader, tmp_path):
    path = tmp_path / "a.ckpt"
    for name in ("a.ckpt", "b.ckpt"):
        save_atomically({**content(), "language_modeling": {}, "hyper_parameters": {"model": {}}}, tmp_path / name)
    raw = bytearray(path.read_bytes())
    raw[raw.index(torch.arange(8, 16).numpy().tobytes())] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"a\.ckpt is damaged: its record .* does not match its checksum"):
        READERS[reader](path)
    assert not (tmp_path / "out").exists()
    assert checkpoint_keys(path) == set(content()["state_dict"])  # reads no tensor


def test_what_is_read_stays_on_disk_until_it_is_used_and_may_be_a_bare_state_dict(tmp_path):
    save_atomically({"w": torch.arange(50)}, tmp_path / "bare.ckpt")
    state = read(tmp_path / "bare.ckpt")["state_dict"]
    assert torch.equal(state["w"], torch.arange(50))
    assert any(line.endswith("bare.ckpt\n") for line in Path("/proc/self/maps").read_text().splitlines(keepends=True))
    state["w"].zero_()  # of the copy in memory
    assert torch.equal(read(tmp_path / "bare.ckpt")["state_dict"]["w"], torch.arange(50))


def test_a_snapshot_that_is_cut_short_is_refused(tmp_path):
    for step in (1, 2):
        write_snapshot(tmp_path, Snapshot(step, 0.05), {"w": torch.ones(50)})
    cut = tmp_path / Snapshot(1, 0.05).filename
    cut.write_bytes(cut.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=f"{cut.name} is damaged"):
        synthesize(tmp_path, [0.05])


def test_safetensors_know_tied_and_transposed_weights(tmp_path):
    weight = torch.arange(6.0).view(2, 3)
    save_tensors(tmp_path / "a.safetensors", {"w": weight, "tied": weight, "turned": weight.T, "row": weight[1]})
    loaded = load_tensors(tmp_path / "a.safetensors")
    for name, tensor in {"w": weight, "tied": weight, "turned": weight.T, "row": weight[1]}.items():
        assert torch.equal(loaded[name], tensor)


def write_for_ever(target):
    def write(folder):
        while True:
            (folder / "part").write_bytes(b"x")

    write_folder(target, write)


def test_a_folder_that_a_killed_process_left_is_removed_by_the_next_one(tmp_path):
    process = processes.start(write_for_ever, tmp_path / "export")
    while not list(tmp_path.glob(".*/part")):
        time.sleep(0.0005)
    process.kill()
    process.join()
    assert not (tmp_path / "export").exists()
    write_folder(tmp_path / "export", lambda folder: (folder / "whole").touch())
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        "export",
        "export/SHA256SUMS",
        "export/whole",
    ]


def flips(path, count, seed=0):
    """Write ``count`` versions of a file that differ in one bit each, and at last the file as it was."""
    raw, generator = path.read_bytes(), random.Random(seed)
    for _ in range(count):
        bit = generator.randrange(8 * len(raw))
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        yield
    path.write_bytes(raw)


def unnoticed(path, reader, count=150):
    """How many of ``count`` flipped bits a reader takes for what was written; none may change what it returns."""
    sound, taken = reader(), 0
    for _ in flips(path, count):
        try:
            found = reader()
        except (CheckpointError, ConfigurationError):
            continue
        taken += 1
        assert found.keys() == sound.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in sound.items())
    assert torch.equal(*(next(iter(state.values())) for state in (reader(), sound)))
    return taken


def test_no_flipped_bit_of_safetensors_changes_what_is_read(tmp_path):
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"w": torch.arange(50.0), "b": torch.ones(3)}, format="pt")
    assert unnoticed(path, lambda: read(path)["state_dict"]) < 10  # of the name of the hash, perhaps
    save_file({"w": torch.ones(3)}, path)  # of other programs
    assert torch.equal(load_tensors(path)["w"], torch.ones(3))


def test_a_bit_flipped_in_any_snapshot_or_one_that_is_missing_is_seen(tmp_path):
    run = [Snapshot(step, width) for step in (1, 2, 3) for width in (0.05, 0.1)]
    for number, snapshot in enumerate(run):
        until = [other for other in run if other.step <= snapshot.step]
        write_snapshot(tmp_path, snapshot, {"w": torch.full((20,), float(number))}, until)
    for snapshot in (run[0], run[3], run[5]):
        path = tmp_path / snapshot.filename
        assert unnoticed(path, lambda: synthesize(tmp_path, [0.07])[0], 40) < 8
        path.rename(tmp_path / "aside")
        if snapshot.step == 3:  # nothing of the last step but the other width says so
            with pytest.raises(CheckpointError, match=f"1 of 6 snapshots are missing in .*{snapshot.filename}"):
                synthesize(tmp_path, [0.07])
        else:
            with pytest.raises(CheckpointError, match=f"1 of 6 snapshots are missing in .*{snapshot.filename}"):
                synthesize(tmp_path, [0.07], 3)
        (tmp_path / "aside").rename(path)


def test_no_flipped_bit_of_a_manifest_changes_what_it_says(tmp_path):
    path, content = tmp_path / "manifest.json", {"mean": [0.1, 2.5], "files": {"a": [1, "x"]}, "note": "ä"}
    write_json(path, content)
    for _ in flips(path, 300):
        try:
            found = read_json(path)
        except (ValueError, AttributeError, TypeError):
            continue
        assert {name: found[name] for name in content} == content
    path.write_text('{"mean": 1}')
    with pytest.raises(ValueError, match="its hash differs"):
        read_json(path)


def test_a_folder_that_was_exported_is_compared_with_its_sums_by_whoever_loads_it(tmp_path):
    folder = write_folder(tmp_path / "out", lambda new: GPT2LMHeadModel(TINY).save_pretrained(new))
    names = {line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    spec, part = CausalLMConfig(name_or_path=str(folder)), folder / "model.safetensors"
    loaders = {part: lambda: build_causal_lm(spec)}
    loaders[folder / "config.json"] = lambda: find_teacher(str(folder), ["h.0"], who="X")
    for path, load in loaders.items():
        load()
        raw = path.read_bytes()
        for damaged in (raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:], raw.replace(b'"float32"', b'"fl/at32"')):
            if damaged == raw:
                continue
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=f"{path.name} is missing, or not what was written"):
                load()
        path.write_bytes(raw)
    part.unlink()
    with pytest.raises(CheckpointError, match=f"{part.name} is missing"):
        check_sums(folder)
    check_sums(folder, weights=False)
    check_sums(folder, "tokenizer")
    check_sums("org/name")


def test_a_file_of_a_folder_that_was_exported_is_compared_with_its_sums_alone_too(tmp_path):
    def fill(new):
        GPT2LMHeadModel(TINY).save_pretrained(new / "network")
        (new / "network" / "tokenizer.json").write_text("{}")

    folder = write_folder(tmp_path / "out", lambda new: ((new / "network").mkdir(), fill(new)))
    weights, tokenizer = folder / "network" / "model.safetensors", folder / "network" / "tokenizer.json"
    read(weights)  # which its writer gave no hash
    raw = weights.read_bytes()
    weights.write_bytes(raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:])
    readers = (
        lambda: read(weights),
        lambda: build_causal_lm(CausalLMConfig(name_or_path=str(weights.parent))),  # whose hashes lie above it
    )
    for reader in readers:
        with pytest.raises(CheckpointError, match=r"model\.safetensors is missing, or not what was written"):
            reader()
    check_sums(tokenizer)
    check_sums(folder, weights=False)  # for who reads no weights
    tokenizer.write_text("[]")
    for reader in (load_chat_tokenizer, load_tokenizer, hugging_face_tokenizer):
        given = CausalLMConfig(str(weights.parent)) if reader is hugging_face_tokenizer else str(tokenizer)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing, or not what was written"):
            reader(given)


def test_a_checkpoint_that_would_grow_in_memory_is_refused(tmp_path):
    inner = [0]
    for _ in range(60):
        inner = [inner, inner]
    loop = []
    loop.append(loop)
    wide = torch.zeros(1).expand(1 << 40)
    most = torch.zeros(1).expand(1 << 28)  # a GiB
    torch.save({"state_dict": {"w": most}}, tmp_path / "a.ckpt")
    assert load_verified(tmp_path / "a.ckpt")["state_dict"]["w"].shape == most.shape
    more = torch.zeros(1).expand((1 << 28) + 1)
    for evil in ({"hyper_parameters": inner}, {"hyper_parameters": loop}, {"state_dict": {"w": wide}}, {"w": more}):
        torch.save({"state_dict": {}, **evil}, tmp_path / "a.ckpt")
        with pytest.raises(CheckpointError, match="would grow without limit in memory"):
            load_verified(tmp_path / "a.ckpt")
    save_atomically({"state_dict": {"w": torch.zeros(1, 3).expand(4, 3)}}, tmp_path / "a.ckpt")
    assert load_verified(tmp_path / "a.ckpt")["state_dict"]["w"].shape == (4, 3)


def test_a_checkpoint_that_was_compressed_is_refused(tmp_path):
    save_atomically(content(), tmp_path / "a.ckpt")
    with zipfile.ZipFile(tmp_path / "a.ckpt", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/9", bytes(1 << 20))
    with pytest.raises(CheckpointError, match="torch does not compress"):
        load_verified(tmp_path / "a.ckpt")


@pytest.mark.parametrize("bit", range(8))
def test_a_bit_of_the_list_of_records_is_seen_or_changes_no_number(tmp_path, bit):
    """torch reads nothing of a record that is marked as a folder, and leaves the tensor as its memory was."""
    numbers = torch.arange(1.0, 9.0)
    torch.save(numbers, tmp_path / "x.pt")
    whole = (tmp_path / "x.pt").read_bytes()
    seen = 0
    for place in range(whole.index(b"PK\x01\x02"), len(whole)):
        try:
            found = check_piece(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :], "x.pt")
        except CheckpointError:
            seen += 1
        else:
            assert torch.equal(found, numbers), place
    assert seen > 50


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname"])
def test_lists_of_files_name_none_outside(name, tmp_path):
    (tmp_path / "secret").write_text("x")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  {name}\n")
    with pytest.raises(CheckpointError, match="which leads out of its folder"):
        check_sums(folder)
    assert "not in the folder" in str(altered_file(folder, {name: (1, "")}, thorough=True))


def test_a_log_is_not_written_through_a_link(tmp_path):
    (tmp_path / "victim").write_text("mine")
    for name in ("log.txt", EVENTS):
        (tmp_path / name).symlink_to(tmp_path / "victim")
    log = RunLog("")
    log.stop()
    log._stopped = False
    log.open(tmp_path / "log.txt", 0)
    log.write("theirs")
    open_events(tmp_path)
    write_event(tmp_path, "start", 0)
    assert (tmp_path / "victim").read_text() == "mine"
