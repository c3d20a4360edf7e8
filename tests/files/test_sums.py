"""Hashes beside files: all of them, themselves left out, and what differs is named."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from lit_efficient.errors import CheckpointError
from lit_efficient.files.atomic_file import write_folder
from lit_efficient.files.sums import NAME, check_sums, write_sums


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inner").mkdir()
    for name in ("a.txt", "inner/b.txt"):
        (tmp_path / name).write_text(name)
    write_sums(tmp_path)
    return tmp_path


def test_each_file_has_a_line_that_sha256sum_reads(folder: Path) -> None:
    write_sums(folder)  # again: its own file is none of them
    lines = (folder / NAME).read_text().splitlines()
    assert lines == [f"{hashlib.sha256(name.encode()).hexdigest()}  {name}" for name in ("a.txt", "inner/b.txt")]
    subprocess.run(["sha256sum", "--check", "--quiet", NAME], cwd=folder, check=True)
    check_sums(folder)


def test_what_is_missing_or_changed_is_named(folder: Path) -> None:
    (folder / "inner" / "b.txt").write_text("other")
    with pytest.raises(CheckpointError, match=r"b\.txt is missing, or not what was written"):
        check_sums(folder)
    with pytest.raises(CheckpointError):
        check_sums(folder, below="inner")
    (folder / "inner" / "b.txt").write_text("inner/b.txt")
    check_sums(folder)
    (folder / "a.txt").unlink()
    with pytest.raises(CheckpointError, match=r"a\.txt is missing"):
        check_sums(folder)
    check_sums(folder, below="inner")


def test_who_reads_no_weights_waits_for_none(folder: Path) -> None:
    (folder / "w.safetensors").write_text("weights")
    write_sums(folder)
    (folder / "w.safetensors").write_text("others")
    check_sums(folder, weights=False)
    with pytest.raises(CheckpointError, match=r"w\.safetensors is missing, or not what was written"):
        check_sums(folder)
    (folder / "a.txt").write_text("other")
    with pytest.raises(CheckpointError, match=r"a\.txt is missing, or not what was written"):
        check_sums(folder, weights=False)


def test_a_folder_without_hashes_and_a_name_on_a_hub_are_left_alone(tmp_path: Path) -> None:
    check_sums(None)
    check_sums(tmp_path)
    check_sums("somebody/model")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/secret.safetensors"])
@pytest.mark.parametrize("below", ["", "unet"])
def test_a_list_of_weights_names_files_of_its_folder_alone(name: str, below: str, tmp_path: Path) -> None:
    (tmp_path / below).mkdir(exist_ok=True)
    index = tmp_path / below / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    check_sums(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors", "v": name}}))
    with pytest.raises(CheckpointError, match="which leads out of its folder"):
        check_sums(tmp_path)


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "weights").write_text("1")

    child = os.fork()
    if not child:  # ends where the hashes take their place
        os.replace = lambda *_: os._exit(9)  # type: ignore[assignment]
        write_folder(tmp_path / "out", fill)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len([*tmp_path.iterdir()]) == 2  # the folder, and its hashes beside it
    write_folder(tmp_path / "out", fill)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
