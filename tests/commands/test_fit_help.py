"""The short help fits a screen and names options that there are; ``--NAME.help`` knows every class that has a slot."""

import re

import pytest

from lit_efficient.__main__ import main
from lit_efficient.catalog import arguments_of, read_cards
from lit_efficient.commands.fit_help import arguments_text

OWN = {
    "--without",
    "--allow-import",
    "--debug",
    "--help-all",
    "--NAME.help",
    "--EMA.help",
    "--for",
}  # handled before the parser


@pytest.fixture(scope="module")
def every_option() -> str:
    """What the parser itself says."""
    from lit_efficient.cli import LitEfficientCLI

    class ParserOnly(LitEfficientCLI):
        def parse_arguments(self, parser, args):
            raise RuntimeError(parser._subcommands_action.choices["fit"].format_help())

    with pytest.raises(RuntimeError) as raised:
        ParserOnly(args=["fit"])
    return str(raised.value)


def test_it_fits_a_screen_and_names_what_there_is(capsys, monkeypatch, every_option):
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("fit", "validate", "test", "predict"):
        assert main([command, "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 30
        assert max(map(len, lines)) <= 80
        text = "\n".join(lines)
        assert all(word in text for word in ("configs", "OVERLAY", "techniques", "--without", "--help-all"))
        named = {word.rstrip(".,+") for word in re.findall(r"--[\w.-]+", text)} - OWN
        options = {
            word for word in named if not word.endswith(("KEY", "model.learning_rate", "data.batch_size", ".lr"))
        }
        assert len(options) >= 5
        assert all(f"{word} " in every_option for word in options), options
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["help", "fit"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_all_options_are_still_to_be_had(capsys, every_option):
    for word in ("--help-all", "--help_all"):
        assert main(["fit", word]) == 0
        assert capsys.readouterr().out.splitlines()[-20:] == every_option.splitlines()[-20:]


def test_a_class_tells_its_arguments(capsys):
    for card in read_cards():
        text = arguments_text(card, 80)
        assert text.startswith(f"{card.name} ({'a block of arguments' if card.is_block else card.slot})\n")
        assert all(f"  {one['name']}: " in text for one in arguments_of(card))
        assert max(map(len, text.splitlines())) <= 80
    assert main(["fit", "--lora.help"]) == 2  # classes begin with a capital letter
    capsys.readouterr()
    assert main(["fit", "-c", "ema", "--EMA.help", "--DigitImages.help"]) == 0
    text = capsys.readouterr().out
    assert "decay: float = 0.9999" in text
    assert "image_size: int = 32" in text


def test_so_do_classes_of_torch_and_lightning(capsys):
    assert main(["fit", "--CosineAnnealingLR.help"]) == 0
    assert "--lr_scheduler.eta_min" in capsys.readouterr().out
    assert main(["fit", "--ModelCheckpoint.help"]) == 0
    assert "--trainer.callbacks.save_top_k" in capsys.readouterr().out
    assert main(["fit", "--EMB.help"]) == 2
    assert "there is no class 'EMB', did you mean 'EMA'?" in capsys.readouterr().err
