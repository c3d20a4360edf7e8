import pathlib
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from lit_efficient.internals import torch_shards
from tests.internals.leaning import leans_on


@leans_on("torch", "_StorageInfo, _get_layout and _MEM_FORMAT_ENCODING in .metadata", "torch_shards")
def test_what_torch_pickles_is_known(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": {"w": torch.ones(2, 3)}, "rate": 0.1}, checkpoint_id=tmp_path, no_dist=True)
    found = torch_shards.shards_metadata(tmp_path)
    assert found.state_dict_metadata == dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert {place.relative_path for place in found.storage_data.values()} == {"__0_0.distcp"}


class Member:
    """Pickled as Python before 3.11.4 pickles a member of an enumeration."""

    def __init__(self, kind, name):
        self.kind, self.name = kind, name

    def __reduce__(self):
        return getattr, (self.kind, self.name)


def test_getattr_gives_members_of_enumerations_and_nothing_else(tmp_path):
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    member = next(iter(_MEM_FORMAT_ENCODING))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Member(_MEM_FORMAT_ENCODING, member.name)))
    assert torch_shards.shards_metadata(tmp_path) is member
    for kind, name in ((pathlib.PosixPath, "unlink"), (_MEM_FORMAT_ENCODING, "__class__")):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Member(kind, name)))
        with pytest.raises((pickle.UnpicklingError, KeyError)):
            torch_shards.shards_metadata(tmp_path)


@leans_on("torch", "distributed.tensor._utils.compute_local_shape_and_global_offset, _StridedShard", "torch_shards")
def test_the_slice_of_a_process_is_known():
    """Of one process; tests.ranks.slices has two."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        for placed, wanted in ((Shard(0), (slice(0, 5), slice(0, 3))), (Partial(), None)):
            assert torch_shards.own_slices(DTensor.from_local(torch.ones(5, 3), mesh, [placed])) == wanted
    finally:
        dist.destroy_process_group()


@leans_on("torch", "torch.utils._python_dispatch.is_traceable_wrapper_subclass", "torch_shards")
def test_quantised_weights_are_wrappers_and_plain_ones_are_not():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = torch.nn.Linear(32, 32)
    assert not torch_shards.is_wrapper(layer.weight)
    quantize_(layer, Int8WeightOnlyConfig())
    assert torch_shards.is_wrapper(layer.weight)
