"""Safetensors that know their own hash."""

from __future__ import annotations

from pathlib import Path

import pytest
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
