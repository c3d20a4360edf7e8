"""Secrets train and are not written."""

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lit_efficient.cli import secrets
from lit_efficient.cli.preflight import check_config
from lit_efficient.cli.secrets import hide_words, masked, masking, names_a_secret, redacted, remember
from lit_efficient.errors import ConfigurationError
from tests.cli.toy_runs import fit
from tests.support_cli import Recorder

SECRET = "heron-4417-plover"


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(secrets, "_known", set())


@pytest.mark.parametrize(
    "key",
    [
        *(
            "api_key",
            "wandb_api_key",
            "password",
            "hf_token",
            "aws_secret",
            "token",
            "secret_key",
            "private_key",
            "pwd",
        ),
        *(
            "github_token",
            "refresh_token",
            "aws_secret_access_key",
            "apiKey",
            "accessToken",
            "authorization",
            "X-Api-Key",
        ),
    ],
)
def test_a_key_of_a_secret_is_known(key):
    assert names_a_secret(f"trainer.logger.init_args.{key}")
    assert masked({"a": [{key: "x"}]}) == {"a": [{key: "***"}]}


def test_words_that_merely_resemble_secrets_are_none():
    plain = {"pad_token": "<pad>", "tokenizer": "bpe", "token_dropout": "x", "password": None, "eos_token": "</s>"}
    plain |= {"max_token": "9", "key": "val", "url": "https://a.b:80/c@d", "token": 50256, "text": "the basics"}
    assert masked({"model": plain}) == {"model": plain}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:hush@host/x", "http://***@host/x"),
        ("of 's3://a:b@c'", "of 's3://***@c'"),
        ("https://h/x?n=1&access_token=abc&m=2", "https://h/x?n=1&access_token=***&m=2"),
        ("Authorization: Bearer abcdefghij", "Authorization: Bearer ***"),
        ("it is ghp_" + 36 * "a", "it is ***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", "***"),
    ],
)
def test_secrets_are_known_by_their_form(text, shown):
    assert masked([text]) == [shown]


def test_what_a_config_or_the_environment_calls_a_secret_is_hidden_anywhere(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "another-secret")
    remember({"model": {"init_args": {"options": [{"token": SECRET, "password": 1234567890, "pwd": "short"}]}}})
    assert masked(f"{SECRET}, another-secret, 1234567890, short") == "***, ***, ***, short"


def test_the_folder_that_a_shell_is_in_is_no_secret(monkeypatch, tmp_path):
    monkeypatch.setenv("PWD", str(tmp_path))
    remember()
    assert masked(f"{tmp_path}/last.ckpt") == f"{tmp_path}/last.ckpt"


def test_a_checkpoint_keeps_all_but_the_secret():
    written = []
    weights = {"api_key": torch.zeros(1)}
    masking(lambda one, path: written.append((one, path)), {"state_dict": weights, "hyper_parameters": {"pwd": "x"}}, 1)
    assert written == [({"state_dict": weights, "hyper_parameters": {"pwd": "***"}}, 1)]


def test_secrets_are_not_in_the_command_line():
    words = ["fit", "--api_key=abc", "--model.hfToken", "abc", "--x=hf_" + "a" * 20, "--tokens=5", "--a=b", "--token="]
    shown = redacted(words)
    assert shown == ["fit", "--api_key=***", "--model.hfToken", "***", "--x=***", "--tokens=5", "--a=b", "--token="]
    assert redacted(["https://me:secret@host/x"]) == ["***"]
    mappings = ["--trainer.logger", '{"api_key": "hidden=x"}', "--trainer.logger={init_args: {api_key: hidden}}"]
    assert redacted(mappings) == ["--trainer.logger", "***", "--trainer.logger=***"]
    assert redacted(["--data.url=https://host/x?n=1&X-Amz-Signature=hidden"]) == ["--data.url=***"]
    plain = ["--data.url=https://host/x?page=2", "--trainer.max_time={hours: 2}", "--model.token_count=3"]
    assert redacted(plain) == plain


def test_wandb_notes_the_command_line_without_them_and_others_read_it_whole(monkeypatch):
    import wandb

    monkeypatch.setattr("sys.argv", words := ["lit_efficient", "fit", f"--model.api_key={SECRET}"])
    monkeypatch.setattr(wandb, "init", lambda: wandb.Settings()._args)
    hide_words()
    hide_words()
    assert wandb.init() == ["fit", "--model.api_key=***"]
    assert sys.argv is words


def test_a_run_has_the_secret_and_nothing_that_it_writes(capsys):
    more = {"trainer": {"callbacks+": [{"class_path": "tests.support_cli.Recorder", "init_args": {"api_key": SECRET}}]}}
    Path("more.yaml").write_text(yaml.safe_dump(more))
    assert fit("-c", "more.yaml", "--trainer.enable_checkpointing=true") == 0
    assert Recorder.last.api_key == SECRET
    run = Path("runs/base/latest").resolve()
    files = [file for file in run.rglob("*") if file.is_file()]
    assert {"config.yaml", "events.jsonl", "environment.json", "last.ckpt", "log.txt"} <= {file.name for file in files}
    assert [file.name for file in files if SECRET.encode() in file.read_bytes()] == []
    assert SECRET not in "".join(capsys.readouterr())
    assert (
        yaml.safe_load((run / "config.yaml").read_text())["trainer"]["callbacks"][-1]["init_args"]["api_key"] == "***"
    )
    assert json.loads((run / "environment.json").read_text())["command"]


@pytest.mark.parametrize("config", [{"model": {"api_key": "***"}}, {"data": {"url": "https://***@host/x"}}])
def test_a_saved_config_asks_for_what_it_left_out(config):
    with pytest.raises(ConfigurationError, match="left a secret out; give it once more"):
        check_config(config)


def test_a_secret_behind_two_names_is_masked() -> None:
    assert masked("data: Data.password: 12345678 is no str") == "data: Data.password: *** is no str"
