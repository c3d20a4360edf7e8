#!/usr/bin/env bash
# Run everything on one GPU: a smoke test, the tests marked gpu, the benchmarks and the ladder. Write a report.
#
#   benchmarks/gpu.sh [--out runs/gpu] [--minutes 12] [--wheels FOLDER ...]
#
# Call it again with the same --out to continue where it stopped: finished pieces run again only if their code, the
# device or torch has changed. benchmarks/gpu/drive.py describes the options.
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m benchmarks.gpu.drive "$@"
