"""Prepared folders, and the numbers in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lit_efficient.files.cache import cache_root, map_numbers


def test_an_empty_file_holds_no_numbers(tmp_path: Path) -> None:
    (tmp_path / "none.bin").touch()
    found = map_numbers(tmp_path / "none.bin", np.uint16)
    assert found.shape == (0,)
    assert found.dtype == np.uint16


def test_where_caches_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIT_EFFICIENT_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    assert cache_root("elsewhere") == Path("elsewhere")
    monkeypatch.delenv("LIT_EFFICIENT_CACHE")
    assert cache_root() == Path.home() / ".cache" / "lit_efficient"
