"""PeftAdapter: peft's own numbers for every method that it puts into a network, resume, folders, mixing, refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lit_efficient import ConfigurationError, PeftAdapter, QuantizeBase, merge_adapters, restore
from lit_efficient.application import apply
from lit_efficient.commands.export import run as export
from lit_efficient.mechanisms.adapters.disabled import disabled
from lit_efficient.mechanisms.adapters.peft_methods import (
    methods,
    network_of,
    peft_config,
    peft_files,
    peft_placement,
    switch_adapters,
    write_peft_folder,
)
from lit_efficient.mechanisms.blocks.finding import find_blocks
from lit_efficient.testing import Run
from tests.contract import effects
from tests.contract.row import Row
from tests.mechanisms.adapters.decoders import IDS, Language, decoder, logits
from tests.support import QUIET, Toy, assert_equal, data, trainer, weights

LOKR = {"peft_type": "LOKR", "r": 2, "alpha": 4, "target_modules": ["up", "down"]}
LORA = {"peft_type": "LORA", "r": 2, "target_modules": ["up", "down"]}
NOISE = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks transformers for it


def _trains_the_adapter_alone(run: Run) -> None:
    effects.assert_base_is_frozen(run, r"\.(?:lokr_w\w+\.default|lora_B\.default\.weight)$")


ROW = Row(
    lambda: PeftAdapter(LOKR),
    _trains_the_adapter_alone,
    # Peft's LoKr cannot read quantised weights, and breaks a compiled graph in each layer.
    beside={"QuantizeBase": lambda: PeftAdapter(LORA), "Compile": lambda: PeftAdapter(LORA)},
)

# The fields that each method needs on layers this small; that these are all is asked of peft in the first test.
FIELDS: dict[str, dict[str, Any]] = {
    "LORA": {}, "ADAMSS": {"r": 4, "num_subspaces": 2, "subspace_rank": 1}, "BEFT": {}, "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 8}, "DEFT": {"r": 2}, "DELORA": {"r": 2}, "FOURIERFT": {"n_frequency": 20}, "GLORA": {"r": 2},
    "GRALORA": {"r": 2, "gralora_k": 2}, "HIRA": {"r": 2}, "HRA": {"r": 2},
    "IA3": {"feedforward_modules": ["down_proj"]}, "LILY": {"r": 2}, "LN_TUNING": {"target_modules": ["norm"]},
    "LOHA": {"r": 2}, "LOKR": {"r": 2}, "MISS": {"r": 2}, "OFT": {"oft_block_size": 4}, "SHIRA": {"r": 2}, "OSF": {},
    "PEANUT": {"r": 2}, "PSOFT": {"r": 2}, "RANDLORA": {"r": 2}, "ROAD": {"group_size": 4}, "SUPERTUNING": {},
    "TRAINABLE_TOKENS": {"token_indices": [3, 5, 8], "target_modules": ["embed_tokens"]},
    "WAVEFT": {"n_frequency": 16}, "VERA": {"r": 2}, "PVERA": {"r": 2}, "TINYLORA": {"r": 2},
    "UNILORA": {"r": 2}, "VBLORA": {"r": 2, "num_vectors": 8, "vector_length": 8, "topk": 2},
}  # fmt: skip


UNMERGED = {"BEFT": "Base layer has no bias", "LILY": "not supported for Lily"}  # as peft says


class Seeded(Language):
    """Draws in each step what the step's number says: some methods draw while they train."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        torch.manual_seed(self.global_step)
        return super().training_step(batch, batch_idx)


def _options(kind: str) -> dict[str, Any]:
    return {"peft_type": kind, "target_modules": ["q_proj", "down_proj"], **FIELDS[kind]}


def _fit(options: Any, epochs: int, **arguments: Any) -> tuple[Language, L.Trainer]:
    """Epochs of two steps."""
    module = Seeded(decoder("Llama"))
    run = L.Trainer(callbacks=[PeftAdapter(options)], **QUIET, max_epochs=epochs)
    run.fit(module, **arguments)
    return module, run


def _by_peft(options: dict[str, Any], steps: int) -> Any:
    """The model of peft itself after a plain loop."""
    from peft import get_peft_model

    network = decoder("Llama").train()
    torch.manual_seed(0)
    model = get_peft_model(network, peft_config(options))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(steps):
        batch = IDS[step % 2 * 2 :][:2]
        optimizer.zero_grad()
        torch.manual_seed(step)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return model


def test_the_methods_are_those_that_peft_puts_into_a_network() -> None:
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    assert methods().keys() == {*FIELDS, "FROD"}
    for kind in {one.value for one in PEFT_TYPE_TO_TUNER_MAPPING} - methods().keys():
        with pytest.raises(ConfigurationError, match=f"peft_type {kind} needs peft's own model"):
            PeftAdapter({"peft_type": kind})
    with pytest.raises(ConfigurationError, match=r"FrodModel of peft keeps 'frod_V.up.default' outside"):
        apply(Toy(), [PeftAdapter({"peft_type": "FROD", "target_modules": ["up"]})])


@NOISE
@pytest.mark.turns(4, always=["LOKR", "TRAINABLE_TOKENS"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # what peft says of tiny layers
@pytest.mark.parametrize("kind", FIELDS)
def test_trains_resumes_exports_and_merges_as_peft_does(kind: str, tmp_path: Path) -> None:
    from peft import PeftModel

    options = _options(kind)
    module, run = _fit(options, 5)
    theirs = _by_peft(options, 10)
    assert_equal(dict(module.network.named_parameters()), dict(theirs.base_model.model.named_parameters()), kind)
    start, _ = _fit(options, 0)
    changed = [n for n, p in module.named_parameters() if not torch.equal(p, start.get_parameter(n))]
    assert changed, "nothing was trained"
    run.save_checkpoint(tmp_path / "a.ckpt")
    assert not torch.load(tmp_path / "a.ckpt")["state_dict"].keys() & Language(decoder("Llama")).state_dict().keys()
    _, half = _fit(options, 2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = _fit(options, 5, ckpt_path=tmp_path / "half.ckpt")
    assert_equal(weights(module), weights(resumed), kind)

    theirs.save_pretrained(tmp_path / "theirs")
    ours = ["--format", "peft", "--output", str(tmp_path / "ours"), "--no-check"]
    assert export([str(tmp_path / "a.ckpt"), *ours]) == 0
    assert_equal(
        load_file(tmp_path / "theirs" / "adapter_model.safetensors"),
        load_file(tmp_path / "ours" / "adapter_model.safetensors"),
        kind,
    )
    y = logits(module.network)
    assert torch.equal(logits(PeftModel.from_pretrained(decoder("Llama"), tmp_path / "ours")), y)
    again, _ = _fit({"start_from": str(tmp_path / "theirs")}, 0)
    assert torch.equal(logits(again.network), y)

    assert torch.equal(logits(restore(Language(decoder("Llama")), tmp_path / "a.ckpt").network), y)
    if kind in UNMERGED:
        with pytest.raises(ConfigurationError, match=f"peft cannot merge the adapter: .*{UNMERGED[kind]}"):
            merge_adapters(module)
        return
    merge_adapters(module)
    torch.testing.assert_close(logits(module.network), y, rtol=1e-4, atol=1e-4)
    assert module.state_dict().keys() == Language(decoder("Llama")).state_dict().keys()
