"""Writer of MDS files in the format of MosaicML's `MDSWriter`."""

import json

import numpy as np


def write_mds(folder, columns, rows, parts) -> None:
    """Write one shard for each slice of rows in ``parts``. ``columns``: name -> (encoding, fixed size or None)."""
    shards = []
    for number, part in enumerate(parts):
        samples = []
        for row in range(part.start, part.stop):
            values = [rows[name][row] for name in columns]
            sizes = [np.uint32(len(v)).tobytes() for v, (_, size) in zip(values, columns.values()) if not size]
            samples.append(b"".join([*sizes, *values]))
        header = json.dumps({"format": "mds"}).encode()
        begin = 4 + 4 * (len(samples) + 1) + len(header)
        offsets = np.cumsum([begin, *map(len, samples)], dtype=np.uint32)
        data = b"".join([np.uint32(len(samples)).tobytes(), offsets.tobytes(), header, *samples])
        name = f"shard.{number:05d}.mds"
        (folder / name).write_bytes(data)
        shards.append(
            {
                "column_names": list(columns),
                "column_encodings": [encoding for encoding, _ in columns.values()],
                "column_sizes": [size for _, size in columns.values()],
                "compression": None,
                "format": "mds",
                "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
                "samples": len(samples),
                "version": 2,
                "zip_data": None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
