"""Safetensors that know their own hash."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from lit_efficient.errors import CheckpointError
from lit_efficient.files.atomic_file import write_folder
from lit_efficient.files.tensors import load_tensors, metadata_of, save_tensors


def test_tied_weights_are_written_under_each_name(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    tensors = {"a": tensor, "tied": tensor, "turned": tensor.T, "half": tensor[:1], "other": tensor + 1}
    save_tensors(tmp_path / "x.safetensors", tensors, about="tied")
    found = load_tensors(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert metadata_of(tmp_path / "x.safetensors")["about"] == "tied"


def test_any_changed_byte_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.arange(4.0)})
    whole = path.read_bytes()
    for place in (-1, -16, whole.index(b'"sha256":"') + 12):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match="does not match the hash"):
            load_tensors(path)


def test_a_file_of_another_program_is_compared_with_the_sums_beside_it(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = write_folder(tmp_path / "out", lambda inside: save_file({"a": torch.ones(4)}, inside / "x.safetensors"))
    assert torch.equal(load_tensors(folder / "x.safetensors")["a"], torch.ones(4))
    changed = bytearray((folder / "x.safetensors").read_bytes())
    changed[-1] ^= 1
    (folder / "x.safetensors").write_bytes(changed)
    with pytest.raises(CheckpointError, match=r"x\.safetensors is missing, or not what was written"):
        load_tensors(folder / "x.safetensors")


def test_a_killed_writer_leaves_nothing_for_long_and_others_may_read(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    child = os.fork()
    if not child:  # the library writes a file of its own first
        safetensors.torch.save_file = lambda _, path, **__: (Path(path).with_name(".tmp").touch(), os._exit(9))
        save_tensors(file, {"a": torch.ones(2)})
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert [*tmp_path.iterdir()]
    save_tensors(file, {"a": torch.ones(2)})
    assert [*tmp_path.iterdir()] == [file]
    plain = tmp_path / "plain"
    plain.touch()
    assert file.stat().st_mode == plain.stat().st_mode
