import warnings

import torch
from torch.distributed import checkpoint as dcp

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
