#!/usr/bin/env bash
# The first minutes on a GPU: a smoke test, the tests marked gpu, the benchmarks, the ladder; then a table.
#
#   benchmarks/gpu.sh [--out runs/gpu] [--minutes 25] [--wheels FOLDER ...]
#
# Call it again with the same --out to go on where it stopped. benchmarks/gpu/drive.py says the rest.
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu/drive.py" "$@"
