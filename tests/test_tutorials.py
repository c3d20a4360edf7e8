"""The tutorials do what they say: each block is run in order, in one folder, and each output is the one that is shown.

- ``python``: a block whose first line is a comment with a file's name is written to this file. Others are executed.
- ``bash``: commands of this package, and scripts that the tutorial wrote. Other programs are left out.
- ``text``: each line is in the output of the blocks before it, up to white space.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lit_efficient.__main__ import main
from tests.data.text.model_tokenizers import make

DOCS = Path(__file__).parent.parent / "docs"
OTHER_PROGRAMS = ("pip", "vllm", "llama-server")


def blocks(page: str) -> Iterator[tuple[str, str]]:
    text = (DOCS / page).read_text("utf-8")
    yield from re.findall(r"^```(python|bash|text)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run_command(line: str, given: dict[str, str]) -> None:
    words = [given.get(word, word) for word in shlex.split(line)]
    if words[:3] == ["python", "-m", "lit_efficient"]:
        assert main(words[3:]) == 0, line
    elif words[0] == "python":
        runpy.run_path(words[1])
    else:
        assert words[0] in OTHER_PROGRAMS, line


class Reader:
    """Somebody who follows a tutorial in an empty folder."""

    def __init__(self, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
        self.capsys, self.caplog = capsys, caplog
        self.output = ""

    def follow(self, page: str, **given: str) -> None:
        shown = 0
        for kind, text in blocks(page):
            name = re.match(r"# (\w+\.py)\n", text)
            if kind == "text":
                for line in text.splitlines():
                    assert " ".join(line.split()) in " ".join(self.output.split()), line
                    shown += 1
                continue
            with self.caplog.at_level("INFO"):
                if kind == "bash":
                    for line in text.replace("\\\n", " ").splitlines():
                        run_command(line, given)
                elif name is not None:
                    Path(name[1]).write_text(text, encoding="utf-8")
                else:
                    exec(compile(text, page, "exec"), {"__name__": "tutorial"})
            said = self.capsys.readouterr()
            self.output += said.out + said.err + self.caplog.text
            self.caplog.clear()
        assert shown, "the page shows no output"


@pytest.fixture
def reader(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> Iterator[Reader]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LIT_EFFICIENT_CACHE", str(tmp_path / "cache"))
    yield Reader(capsys, caplog)
    sys.modules.pop("mine", None)


def tiny_base(folder: Path) -> str:
    """A Llama as small as LowBitOptimizer allows, with a tokenizer and a chat template like SmolLM2's."""
    tokenizer = make("smollm2")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.turns(3, family="tutorials")
def test_half_the_memory_for_a_module_of_ones_own(reader: Reader) -> None:
    reader.follow("tutorial_memory.md")
    peaks = [float(found) for found in re.findall(r"total +([\d.]+) MiB", reader.output)]
    assert len(peaks) == 3
    assert peaks[1] < 0.5 * peaks[0]
    assert peaks[2] < 0.9 * peaks[1]


@pytest.mark.turns(3, family="tutorials")
def test_a_language_model_on_a_file_of_ones_own(reader: Reader, tmp_path: Path) -> None:
    reader.follow("tutorial_language_model.md", BASE=tiny_base(tmp_path / "base"))
    model = AutoModelForCausalLM.from_pretrained("merged")
    assert model.config.hidden_size == 256
    assert AutoTokenizer.from_pretrained("merged").chat_template
    assert len(list(Path("served").glob("*.gguf"))) == 1


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.skipif("SMOLLM2" not in os.environ, reason="needs SMOLLM2, a folder with SmolLM2-135M-Instruct")
def test_smollm2_learns_the_form_of_the_answers(reader: Reader) -> None:
    reader.follow("tutorial_language_model.md", BASE=os.environ["SMOLLM2"])
    assert '"espresso": 2' in reader.output  # the form of the rows, which the base does not answer in


@pytest.mark.turns(3, family="tutorials")
def test_a_lora_on_15_photographs(reader: Reader) -> None:
    reader.follow("tutorial_photos.md")
    weights = load_file("lora/pytorch_lora_weights.safetensors")
    assert len(weights) == len({name.rpartition(".lora")[0] for name in weights}) * 2 == 64
    assert Path("lora/kohya.safetensors").is_file()
