"""Safetensors that know their own hash."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from lit_efficient.errors import CheckpointError
from lit_efficient.files.atomic_file import write_folder
from lit_efficient.files.tensors import load_tensors, metadata_of, save_tensors, zeros_in_file
from lit_efficient.mechanisms.trials.memory import AllocationMeter
from tests.support import assert_equal


def test_tied_weights_are_written_under_each_name(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    tensors = {"a": tensor, "tied": tensor, "turned": tensor.T, "half": tensor[:1], "other": tensor + 1}
    save_tensors(tmp_path / "x.safetensors", tensors, about="tied")
    found = load_tensors(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert metadata_of(tmp_path / "x.safetensors")["about"] == "tied"


def test_the_file_is_laid_out_as_safetensors_own_and_no_tensor_is_copied(tmp_path: Path) -> None:
    kinds = [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.bool,
        torch.int16,
    ]
    tensors = {f"{i}é": torch.arange(6).view(2, 3).to(kind) for i, kind in enumerate(kinds)}
    tensors |= {"none": torch.empty(0, 4), "number": torch.tensor(2.5), "large": torch.ones(2**20)}
    tensors["tied"] = tensors["large"]
    with AllocationMeter() as meter:
        save_tensors(tmp_path / "x.safetensors", tensors)
    assert meter.peak < 5 * 2**20  # without a second one for the tied name
    safetensors.torch.save_file({**tensors, "tied": tensors["tied"].clone()}, tmp_path / "theirs.safetensors")
    ours, theirs = (safetensors.torch.load_file(tmp_path / f"{name}.safetensors") for name in ("x", "theirs"))
    assert_equal(ours, theirs)
    save_tensors(tmp_path / "half.safetensors", {"a": torch.tensor([1 / 3])}, torch.bfloat16)
    assert torch.equal(load_tensors(tmp_path / "half.safetensors")["a"], torch.tensor([1 / 3], dtype=torch.bfloat16))


def test_views_that_are_computed_when_read_are_written_as_they_read(tmp_path: Path) -> None:
    number = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, -4.0]))
    tensors = {"conjugate": number.conj(), "negative": number.conj().imag}
    save_tensors(tmp_path / "x.safetensors", tensors)
    assert_equal(load_tensors(tmp_path / "x.safetensors"), {name: t.clone() for name, t in tensors.items()})


@pytest.mark.parametrize("value", [torch.ones(2, dtype=torch.complex128), {"scale": 1}])
def test_what_the_format_cannot_hold_is_named_before_anything_is_written(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match=r"x\.safetensors: 'layer\.odd' is .*which safetensors cannot hold"):
        save_tensors(tmp_path / "x.safetensors", {"a": torch.ones(2), "layer.odd": value})  # type: ignore[dict-item]
    assert not [*tmp_path.iterdir()]


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
    if not child:  # which ends when the header has been written
        torch.Tensor.contiguous = lambda *_, **__: os._exit(9)  # type: ignore[assignment, method-assign]
        save_tensors(file, {"a": torch.ones(2)})
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert [*tmp_path.iterdir()]
    save_tensors(file, {"a": torch.ones(2)})
    assert [*tmp_path.iterdir()] == [file]
    plain = tmp_path / "plain"
    plain.touch()
    assert file.stat().st_mode == plain.stat().st_mode


def test_zeros_in_a_file_begin_where_kernels_want_them(tmp_path: Path) -> None:
    kinds = [((), torch.int8), ((3, 0), torch.float32), ((5, 3), torch.bfloat16), ((7,), torch.complex128)]
    zeros = zeros_in_file(kinds, tmp_path)
    assert [(tensor.shape, tensor.dtype) for tensor in zeros] == kinds
    assert not any(tensor.data_ptr() % 64 for tensor in zeros)
    for number, tensor in enumerate(zeros):
        assert not tensor.any()  # what the others were filled with is not in it
        tensor.fill_(number + 1)
    assert not [*tmp_path.iterdir()]
