"""Row 12: what earlier releases wrote still loads, computes what it computed and trains on; what people wrote holds."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.trust_rows import Piece

FOLDER = Path(__file__).parent.parent.parent / "tests" / "compatibility"
FOLDERS = {"1b73bea": "files", "2026-11": "files_2026_11"}  # as `RELEASES` has it
KINDS = ("resumed", "restored", "loaded", "generated", "exported")  # of many files each
WHOLE = ("sampled", "swept", "latents", "fitted", "fitted_mixed")


@cache
def _expected(release: str) -> Any:
    return json.loads((FOLDER / FOLDERS[release] / "expected.json").read_text())


def _files() -> list[str]:
    many = [f"{of}/{kind}/{name}" for of in FOLDERS for kind in KINDS for name in _expected(of)[kind]]
    return many + [f"{of}/{kind}" for of in FOLDERS for kind in WHOLE]


def _trial(case: str, folder: Path) -> str:
    import torch

    from tests.compatibility import observed
    from tests.compatibility.test_checkpoints import COMPUTED, IN_BFLOAT16, TRAINED, close
    from tests.support import assert_equal

    release, kind, name = [*case.split("/"), ""][:3]
    expected = _expected(release)[kind]
    own: dict[str, Callable[[], Any]] = {
        "restored": lambda: observed.restored(name),
        "loaded": lambda: observed.loaded(name),
        "generated": lambda: observed.generated(f"{name}.ckpt"),
        "exported": lambda: observed.exported(name, folder),
        "sampled": observed.sampled,
        "swept": lambda: observed.swept(folder),
        "latents": lambda: observed.latent_means(folder),
        "fitted": lambda: observed.fitted(folder),
        "fitted_mixed": lambda: observed.fitted_mixed(folder),
    }
    files = FOLDER / FOLDERS[release]
    before = {path: path.stat().st_mtime_ns for path in files.rglob("*")}
    os.chdir(files)  # they name each other without a path
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kind == "resumed":
                found, notes = observed.resumed(name, folder)
                stored = torch.load(f"{name}.ckpt", map_location="cpu", weights_only=True)
                assert notes.began["global_step"] == stored["global_step"], "it goes on from another step"
                assert_equal(notes.began["optimizer_states"], stored["optimizer_states"])
            else:
                found = own[kind]()
        tolerance = TRAINED if kind in ("resumed", "fitted", "fitted_mixed") else COMPUTED
        tolerance = {"rtol": 0, "atol": 0.5} if kind == "sampled" else IN_BFLOAT16 if name == "muon" else tolerance
        close(found, expected[name] if name else expected, tolerance)
        assert {path: path.stat().st_mtime_ns for path in files.rglob("*")} == before, (
            "a file of the release is changed"
        )
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def _owners() -> list[str]:
    kept = json.loads((FOLDER / "public.json").read_text())
    return [f"{kind}/{owner}" for kind, owners in kept.items() for owner in owners]


def _said(case: str, folder: Path) -> str:
    from tests.compatibility.public import FILE, ROOT, differences, newest, snapshot

    kind, _, owner = case.partition("/")
    before = {kind: {owner: json.loads(FILE.read_text())[kind][owner]}}
    changelog = newest((ROOT / "CHANGELOG.md").read_text("utf-8"))
    found = [one.sentence for one in differences(before, snapshot()) if not one.is_said_in(changelog)]
    return "; ".join(found)


PIECES = (
    Piece(
        12,
        "earlier-files",
        "Checkpoints, adapters, snapshots and caches that a release wrote load with equal outputs, export and train on",
        _files,
        _trial,
        in_ci=3,
    ),
    Piece(
        12,
        "public-options",
        "Names, arguments, defaults, keys of configs and options of commands are as in the last snapshot, or the "
        "changelog says what changed",
        _owners,
        _said,
        in_ci=0,  # tests/compatibility/test_public.py looks at all of them
    ),
)
