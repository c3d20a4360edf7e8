"""Files that are whole or not there, also where the system lacks what a POSIX one has."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lit_efficient import SignalCheckpoint
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.atomic_file import (
    begin_folder,
    check_new_folder,
    end_folder,
    remove_whole,
    replace_link,
    replacing,
    write_folder,
)
from lit_efficient.files.sums import NAME, check_sums
from lit_efficient.files.tensors import save_tensors
from lit_efficient.mechanisms.trials.memory import available_cpu_memory


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it lacks, or does otherwise: signal 0 ends a process there, folders cannot be opened."""

    def never(*_: object) -> None:
        raise AssertionError("this would end the process")

    def closed(path: object, flags: int, *rest: object, **more: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "kill", never)
    monkeypatch.setattr(os, "open", closed)
    monkeypatch.delattr(os, "sysconf")


@pytest.mark.usefixtures("windows")
def test_a_file_is_replaced_and_what_killed_processes_left_goes_by_its_age(tmp_path: Path) -> None:
    young, old = (tmp_path / f".x.{socket.gethostname()}-{os.getppid()}-{number:08x}.partial" for number in (1, 2))
    for path in (young, old):
        path.write_text("half")
    os.utime(old, (1e9, 1e9))
    target = tmp_path / "x"
    for content in (b"one", b"two"):
        with replacing(target) as file:
            file.write(content)
    assert target.read_bytes() == b"two"
    assert {path.name for path in tmp_path.iterdir()} == {"x", young.name}


@pytest.mark.usefixtures("windows")
def test_free_memory_is_unknown_there() -> None:
    assert available_cpu_memory() is None


def test_free_memory_is_unknown_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    def sysconf(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    assert (available_cpu_memory() or 0) > 0
    monkeypatch.setattr(os, "sysconf", sysconf)
    assert available_cpu_memory() is None


@pytest.mark.usefixtures("windows")
def test_signals_that_are_missing_there_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {name: signal.Signals[name] for name in ("SIGTERM", "SIGINT")}
    monkeypatch.setattr(signal.Signals, "_member_map_", there)
    assert SignalCheckpoint()._numbers == list(there.values())


def test_a_write_that_fails_names_its_file(tmp_path: Path) -> None:
    """A write says errno alone; here by the largest size that a file may have, as on a disk that is full."""
    target, limits = tmp_path / "x", resource.getrlimit(resource.RLIMIT_FSIZE)
    target.write_text("old")

    def write() -> None:
        with replacing(target) as file:
            file.write(b"x" * 10_000)

    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(target)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x", "old")]


def test_a_library_in_rust_that_cannot_write_is_an_error_of_the_system(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        save_file({"x": torch.zeros(4)}, folder / "no such folder" / "x")

    with pytest.raises(FileNotFoundError) as raised:
        write_folder(tmp_path / "whole", write)
    assert raised.value.filename == str(tmp_path / "whole")
    assert list(tmp_path.iterdir()) == []


def test_a_name_may_be_as_long_as_the_system_allows_in_bytes(tmp_path: Path) -> None:
    name = "\u91cd" * 84  # 252 bytes
    with replacing(tmp_path / name) as file:
        file.write(b"whole")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_a_killed_process_left_goes_with_the_next_link_or_folder(tmp_path: Path) -> None:
    stale = tmp_path / f".x.{socket.gethostname()}-{os.getpid()}-01234567.partial"  # of this number, and not in use

    def leave(link: bool) -> None:
        if link:
            stale.symlink_to("run", target_is_directory=True)
        else:
            (stale / "half").mkdir(parents=True)

    (tmp_path / "run").mkdir()
    for link in (True, False):
        leave(link)
        replace_link(tmp_path / "latest", "run")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "run"]
        leave(link)
        remove_whole(tmp_path / "absent")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "run"]
    assert (tmp_path / "latest").resolve() == tmp_path / "run"


def test_the_same_tensors_are_the_same_bytes(tmp_path: Path) -> None:
    said = dict.fromkeys("abc", 'one\n"é"')
    for number in range(12):
        save_tensors(tmp_path / f"{number}", {"w": torch.arange(3.0)}, **said)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_a_file_is_on_the_disk_before_it_takes_its_place_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = [], os.fsync

    def noted(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path.suffix, (tmp_path / "x").exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with replacing(tmp_path / "x") as file:
        file.write(b"one")
    assert synced == [(".partial", False), ("", True)]


def test_what_processes_that_are_gone_have_left_is_removed(tmp_path: Path) -> None:
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    makers = {"gone": gone, "lives": os.getppid(), "own": os.getpid()}
    for name, pid in makers.items():
        (tmp_path / f".{name}.{socket.gethostname()}-{pid}-00000000.partial").mkdir()
    (tmp_path / ".somebody.else's.partial").touch()
    (tmp_path / f".new.another-host-{gone}-00000000.partial").touch()
    old = tmp_path / f".old.another-host-{gone}-00000000.partial"
    old.touch()
    os.utime(old, (1e9, 1e9))
    with replacing(tmp_path / "x"):
        pass
    assert {path.name.split(".")[1] for path in tmp_path.glob(".*")} == {"lives", "somebody", "new"}


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def write(folder: Path) -> None:
        assert folder.parent == tmp_path
        assert not target.exists()
        (folder / "a").write_text("one")

    assert write_folder(target, write) == target
    assert {path.name for path in target.iterdir()} == {"a", NAME}
    check_sums(target)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    def fail(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        write_folder(tmp_path / "other", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "empty", write_nothing, sums=False)
    assert not any((tmp_path / "empty").iterdir())


def test_a_folder_takes_the_place_of_another_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    target = tmp_path / "out"
    for text in ("one", "two"):
        filled = begin_folder(target)
        (filled / text).touch()
        end_folder(filled, target)
        assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["out", f"out/{text}"]


def write_nothing(folder: Path) -> None:
    assert folder.is_dir()


def test_only_what_is_new_or_empty_is_written_into(tmp_path: Path) -> None:
    check_new_folder(tmp_path / "new", "who")
    check_new_folder(tmp_path, "who")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").symlink_to("empty")
    for taken in (tmp_path, *(tmp_path / name for name in ("file", "link", "other"))):
        with pytest.raises(ConfigurationError, match="who: output must be a new or empty folder"):
            check_new_folder(taken, "who")


def test_files_links_and_folders_are_removed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    remove_whole(tmp_path / "link")
    assert (tmp_path / "folder" / "file").exists()
    for name in ("folder/file", "folder", "gone"):
        remove_whole(tmp_path / name)
        assert not (tmp_path / name).exists()


def test_a_file_takes_the_place_of_a_checkpoint_in_shards_alone(tmp_path: Path) -> None:
    """As where one process goes on with what several wrote; any other folder stays."""
    shards, other = tmp_path / "last.ckpt", tmp_path / "other"
    for folder, name in ((shards, ".metadata"), (other, "notes")):
        folder.mkdir()
        (folder / name).touch()
    with replacing(shards) as file:
        file.write(b"whole")
    assert shards.read_bytes() == b"whole"
    with pytest.raises(IsADirectoryError), replacing(other) as file:
        file.write(b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "other"]
