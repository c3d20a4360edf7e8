"""Each test runs in a folder of its own that holds ``base.yaml``."""

import pytest
import yaml

from tests.cli.toy_runs import BASE
from tests.support_cli import Recorder, ToyData, ToyModel


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    ToyData.touched = 0
    Recorder.last = ToyModel.last = None
