"""The command tune: an overlay that fit takes, exit codes, and what is wrong named by its option."""

import pytest

from lit_efficient.__main__ import main
from lit_efficient.commands.tune import _name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--minutes", "0"], "--minutes must be"),
        (["--device_memory", "lots"], "device_memory must be"),
        (["--output", "best.txt"], "--output must be"),
        (["--only", "Compil"], "did you mean 'Compile'"),
        (["--batch", "data.rows"], "data.rows"),
        (["-c", "no_such"], "no_such"),
    ],
)
def test_what_is_wrong_is_named_before_anything_runs(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "-c", "latent_diffusion", *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_name_of_the_configs():
    assert _name(["-c", "language_model", "--config=a/b.yaml", "--trainer.max_steps", "3"]) == "language_model+b"
    assert _name(["--model", "X"]) == "fit"
