"""What each family of language models can do here, tried on a small network with random weights: the rows of a page.

A cell is "yes" only if the result is right: packed documents have the loss that they have alone, and the exported
folder gives the logits of the trained network in transformers or PEFT.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from lit_efficient import CausalLMConfig, ConfigurationError, LanguageModeling, LitEfficientError, LoRA, QuantizeBase
from lit_efficient.commands import export
from lit_efficient.mechanisms.documents import DocumentRows
from lit_efficient.mechanisms.trials.steps import quiet
from tests.data.text.model_tokenizers import make
from tests.models.libraries.small_families import small_network
from tests.support import QUIET

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
BEGIN, END = "<!-- families -->\n", "<!-- /families -->"
FAMILIES = {
    "bloom": "BLOOM",
    "cohere2": "Command R7B",
    "deepseek_v3": "DeepSeek V3, R1",
    "exaone4": "EXAONE 4",
    "falcon": "Falcon",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3, text",
    "glm4": "GLM 4",
    "gpt2": "GPT-2",
    "gpt_neox": "GPT-NeoX, Pythia",
    "gpt_oss": "GPT-OSS",
    "gptj": "GPT-J",
    "granite": "Granite 3",
    "granitemoe": "Granite 3 MoE",
    "jamba": "Jamba",
    "lfm2": "LFM2",
    "llama": "Llama 2 to 3.3, SmolLM2",
    "mamba2": "Mamba 2",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "nemotron": "Nemotron 4, Minitron",
    "olmo2": "OLMo 2",
    "olmoe": "OLMoE",
    "opt": "OPT",
    "phi": "Phi 1 and 2",
    "phi3": "Phi 3 and 4",
    "qwen2": "Qwen 2 and 2.5",
    "qwen2_moe": "Qwen 1.5 MoE, 2 MoE",
    "qwen3": "Qwen 3",
    "qwen3_moe": "Qwen 3 MoE",
    "qwen3_next": "Qwen 3 Next",
    "smollm3": "SmolLM3",
    "stablelm": "StableLM",
    "starcoder2": "StarCoder 2",
}
COLUMNS = ("packing", "LoRA", "QLoRA", "merged", "peft", "gguf")
# Fields in which released models differ from the defaults of transformers, for heads of 8.
RELEASED: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention"] * 2},
    "qwen3_moe": {"norm_topk_prob": True},
}
LENGTH = 24
SPLIT = 10


class _Try:
    """Tries each column for a family, in a folder."""

    def __init__(self, family: str, folder: Path) -> None:
        self.folder = folder
        self.base = folder / "base"
        tokenizer = make("smollm2")  # llama.cpp knows the tokenizers of released models only
        network: Any = small_network(family, vocab_size=len(tokenizer))
        for name, value in RELEASED.get(family, {}).items():
            setattr(network.config, name, value)
        network = type(network)(network.config)
        for parameter in network.parameters():
            if parameter.ndim > 1:  # initial weights of this width mix next to nothing
                nn.init.normal_(parameter, std=0.1)
        network.save_pretrained(self.base)
        tokenizer.save_pretrained(self.base)
        self.ids = torch.randint(3, len(tokenizer), (2, LENGTH), generator=torch.Generator().manual_seed(0))

    def packing(self) -> None:
        task = LanguageModeling(CausalLMConfig(str(self.base)))
        task.configure_model()
        task.eval()
        ids = self.ids
        labels = torch.where(torch.arange(LENGTH) == SPLIT, -100, ids)
        positions = torch.cat((torch.arange(SPLIT), torch.arange(LENGTH - SPLIT))).expand_as(ids)
        packed = {"input_ids": ids, "labels": labels, "position_ids": positions}
        DocumentRows("LanguageModeling").arguments(task.network, packed)
        with torch.no_grad():
            found = task.predict_step(packed, 0) * (LENGTH - 2)
            first, second = ids[:, :SPLIT], ids[:, SPLIT:]
            alone = task.predict_step({"input_ids": first, "labels": first}, 0) * (SPLIT - 1)
            alone += task.predict_step({"input_ids": second, "labels": second}, 0) * (LENGTH - SPLIT - 1)
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)

    def lora(self) -> None:
        self._fit("lora", LoRA(rank=2))

    def qlora(self) -> None:
        self._fit("qlora", QuantizeBase(format="nf4"), LoRA(rank=2))

    def merged(self) -> None:
        from transformers import AutoModelForCausalLM

        self._same(AutoModelForCausalLM.from_pretrained(self._export("merged")))

    def peft(self) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(self.base)
        folder = self._export("peft")
        try:
            model = PeftModel.from_pretrained(base, folder)
        except ValueError as error:
            said = str(error).removeprefix("[PEFT:PeftType.LORA] ").split(". ")[0]
            raise ConfigurationError(f"PEFT refuses the exported folder: {said}") from error
        self._same(model)

    def gguf(self) -> None:
        """Only write the file: tests/export/test_gguf.py reads such files, for sizes that transformers reads."""
        assert list(self._export("gguf").glob("*.gguf"))

    def _fit(self, name: str, *techniques: Any) -> None:
        task = LanguageModeling(CausalLMConfig(str(self.base)), learning_rate=0.05, warmup_steps=0)
        rows = [{"input_ids": row, "labels": row} for row in self.ids]
        trainer = L.Trainer(callbacks=[*techniques], **QUIET, max_steps=3)
        trainer.fit(task, DataLoader(rows, 2), DataLoader(rows, 2))  # type: ignore[arg-type]
        adapters = [p for key, p in task.named_parameters() if key.endswith("lora_B")]
        assert adapters
        assert all(bool(p.any()) for p in adapters)
        trainer.save_checkpoint(self.folder / f"{name}.ckpt")
        torch.save(self._logits(task.network), self.folder / f"{name}.pt")

    def _export(self, form: str) -> Path:
        output = self.folder / form
        words = [str(self.folder / "lora.ckpt"), "--format", form, "--output", str(output), "--no-check"]
        assert export.run(words) == 0
        return output

    def _same(self, model: Any) -> None:
        expected = torch.load(self.folder / "lora.pt", weights_only=True)
        torch.testing.assert_close(self._logits(model), expected, rtol=1e-3, atol=1e-3)

    @torch.no_grad()
    def _logits(self, model: Any) -> torch.Tensor:
        return model.eval()(input_ids=self.ids, use_cache=False).logits


def results(family: str) -> dict[str, str]:
    """Return for each column an empty string, or the reason why the family is refused."""
    with tempfile.TemporaryDirectory() as folder, quiet(warns=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tries = _Try(family, Path(folder))
        found = {column: _refusal(getattr(tries, column.lower())) for column in COLUMNS}
    for column in ("merged", "peft", "gguf"):
        if found["LoRA"]:
            found[column] = "LoRA is refused"
    return found


def _refusal(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except LitEfficientError as error:
        return _sentence(str(error))
    except SystemExit:
        return "the format is not offered"
    return ""


def _sentence(text: str) -> str:
    """Return the first line of a message, without the name of the class that raises it and without measurements."""
    line = re.sub(r"^\w+: ", "", text.strip().splitlines()[0])
    return re.sub(r": with position_ids, .*", "", line).rstrip(".")


def row(family: str, found: dict[str, str]) -> str:
    """Return the line of the table for a family."""
    cells = ["refused" if found[column] else "yes" for column in COLUMNS]
    return f"| {FAMILIES[family]} (`{family}`) | {' | '.join(cells)} |"


def reasons(family: str, found: dict[str, str]) -> list[str]:
    """Return the reason for each column in which a family is refused, in words that fit all families with it."""
    same = {column: reason.replace(f"this one is {family}", "this one is another") for column, reason in found.items()}
    same = {column: re.sub(r"\b\w+For(CausalLM)\b", r"...For\1", reason) for column, reason in same.items()}
    return [f"{column}: {reason}." for column, reason in same.items() if reason]


def with_families(refused: dict[str, list[str]]) -> list[str]:
    """Return a line for each reason, with the families that have it. ``refused`` holds the reasons of each family."""
    having: dict[str, list[str]] = {}
    for family, own in refused.items():
        for reason in own:
            having.setdefault(reason, []).append(f"`{family}`")
    return [f"- {reason} Refused: {', '.join(families)}." for reason, families in having.items()]


def document() -> str:
    """Return the page, with new results of all families."""
    found = {family: results(family) for family in FAMILIES}
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    lines: Sequence[str] = [
        f"| Family | {' | '.join(COLUMNS)} |",
        f"| --- |{' --- |' * len(COLUMNS)}",
        *(row(family, one) for family, one in found.items()),
        "",
        *with_families({family: reasons(family, one) for family, one in found.items()}),
    ]
    return before + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END)[1]
