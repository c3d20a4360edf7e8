"""PeftAdapter: peft's numbers for each method, resume, folders, mixing and refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lit_efficient import (
    ConfigurationError,
    DiT,
    DiTConfig,
    DiTVariant,
    PeftAdapter,
    QuantizeBase,
    merge_adapters,
    restore,
)
from lit_efficient.application import apply
from lit_efficient.mechanisms.adapters.disabled import disabled
from lit_efficient.mechanisms.adapters.peft_configs import methods, peft_config
from lit_efficient.mechanisms.adapters.peft_methods import network_of, switch_adapters
from lit_efficient.mechanisms.adapters.peft_saved import peft_files, peft_placement, write_peft_folder
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.testing import Run
from tests.contract import effects
from tests.contract.row import Row
from tests.mechanisms.adapters.decoders import IDS, Language, decoder, logits
from tests.support import QUIET, Toy, assert_equal, data, trainer, weights
from tests.support_cli import export

LOKR = {"peft_type": "LOKR", "r": 2, "alpha": 4, "target_modules": ["up", "down"]}
LORA = {"peft_type": "LORA", "r": 2, "target_modules": ["up", "down"]}
NOISE = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks transformers for it


def _trains_the_adapter_alone(run: Run) -> None:
    effects.assert_base_is_frozen(run, r"\.(?:lokr_w\w+\.default|lora_B\.default\.weight)$")


ROW = Row(
    lambda: PeftAdapter(LOKR),
    _trains_the_adapter_alone,
    # Peft's LoKr cannot read quantised weights, and breaks a compiled graph in each layer.
    beside={
        "QuantizeBase": lambda: PeftAdapter(LORA),
        "Compile": lambda: PeftAdapter(LORA),
        "MixtureOfExperts": lambda: PeftAdapter(LOKR | {"target_modules": ["query", "value"]}),  # linear layers
    },
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
    """Seed the generator in each step from the step number, because some methods draw while they train."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        torch.manual_seed(self.global_step)
        return super().training_step(batch, batch_idx)


def _options(kind: str) -> dict[str, Any]:
    return {"peft_type": kind, "target_modules": ["q_proj", "down_proj"], **FIELDS[kind]}


def _fit(options: Any, epochs: int, **arguments: Any) -> tuple[Language, L.Trainer]:
    """Fit for epochs of two steps."""
    module = Seeded(decoder("Llama"))
    run = L.Trainer(callbacks=[PeftAdapter(options)], **QUIET, max_epochs=epochs)
    run.fit(module, **arguments)
    return module, run


def _by_peft(options: dict[str, Any], steps: int) -> Any:
    """Return peft's own model after a plain training loop."""
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
        with pytest.raises(ConfigurationError, match=f"peft_type {kind} requires peft's own model"):
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


def test_a_strangers_convolutions_and_a_checkpoint_of_the_base() -> None:
    def make() -> Any:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 4))
        module = L.LightningModule()
        module.net = net
        return module

    module, x = make(), torch.randn(2, 3, 8, 8)
    y = module.net(x)
    apply(module, [PeftAdapter({"peft_type": "LOKR", "r": 2, "target_modules": ["0", "2", "4"]})])
    assert torch.equal(module.net(x), y)
    other = {name: tensor + 0.1 for name, tensor in make().state_dict().items()}
    module.load_state_dict(other)  # under its own names
    base = make()
    base.load_state_dict(other)
    assert torch.equal(module.net(x), base.net(x))
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * p.requires_grad)
    assert torch.equal(twin.net(x), base.net(x))
    y = module.net(x)
    assert not torch.allclose(y, base.net(x), atol=1e-2)
    with disabled(module):
        assert torch.equal(module.net(x), base.net(x))
    assert torch.equal(module.net(x), y)
    merge_adapters(module)
    torch.testing.assert_close(module.net(x), y, rtol=1e-4, atol=1e-4)
    assert module.state_dict().keys() == other.keys()


@pytest.mark.parametrize("kind", ["LOKR", "VERA"])  # of its own state, and of state that layers share
@pytest.mark.filterwarnings("ignore::UserWarning")  # what peft says of tiny layers
def test_a_diffusion_transformer_trains_and_merges_as_under_peft(kind: str) -> None:
    from peft import get_peft_model

    def make() -> DiT:
        torch.manual_seed(0)
        network = DiT(DiTConfig(width=16, depth=2, heads=2, variant=DiTVariant("rope", qk_norm=True)))
        for parameter in network.parameters():
            nn.init.normal_(parameter, std=0.2)  # its last layers begin as zeros
        return network

    def output(network: nn.Module) -> torch.Tensor:
        latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
        result: torch.Tensor = network(latents, torch.tensor([0.2, 0.7]), torch.tensor([1, 3]))
        return result

    options = {"peft_type": kind, **FIELDS[kind], "target_modules": ["qkv", "attention.out", "mlp.0"]}
    module = L.LightningModule()
    module.net = make()
    apply(module, [PeftAdapter(options)])
    base = make()
    torch.manual_seed(0)
    theirs = get_peft_model(base, peft_config(options)).base_model.model
    for network in (module.net, theirs):
        optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=0.05)
        for _ in range(2):
            optimizer.zero_grad()
            output(network).square().mean().backward()
            optimizer.step()
    y = output(module.net)
    assert torch.equal(y, output(theirs))
    assert (y - output(make())).abs().max() > 1e-3
    merge_adapters(module)
    torch.testing.assert_close(output(module.net), y, rtol=1e-4, atol=1e-4)
    assert module.net.state_dict().keys() == make().state_dict().keys()


def test_what_starts_from_the_weights_starts_again_from_a_base_that_is_loaded() -> None:
    options = {"peft_type": "OSF", "target_modules": ["up"]}  # factors of the weight itself
    loaded, built = Toy(), Toy()
    other = {name: 2 * tensor for name, tensor in Toy().state_dict().items()}
    apply(loaded, [PeftAdapter(options)])
    loaded.load_state_dict(other)
    built.load_state_dict(other)
    apply(built, [PeftAdapter(options)])
    assert_equal(dict(built.named_parameters()), dict(loaded.named_parameters()), "started again")


def test_adapters_stay_in_float32_beside_a_narrower_base() -> None:
    module = Toy()
    apply(module, [PeftAdapter(LOKR)])
    module.to(torch.bfloat16)
    assert {p.dtype for p in module.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in module.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_blocks_are_found_as_without_adapters() -> None:
    for make in (Toy, lambda: Language(decoder("Qwen3"))):
        plain, adapted = make(), make()
        apply(adapted, [PeftAdapter({"peft_type": "LOKR", "r": 2, "target_modules": "all-linear"})])
        names = [[name for name, _ in find_blocks(module, who="a test")] for module in (plain, adapted)]
        assert names[0] == names[1]


def _two(**arguments: Any) -> Toy:
    module = Toy()
    torch.manual_seed(5)
    apply(module, [PeftAdapter({"a": LORA | {"init_lora_weights": False}, "b": LORA | {"r": 4}}, **arguments)])
    with torch.no_grad():
        for name, p in module.named_parameters():
            if ".lora_B." in name:
                p.copy_(torch.randn(p.shape) / 4)
    return module


def test_several_are_mixed_switched_and_merged_as_weighted() -> None:
    x = torch.randn(3, 16)
    module, linear = _two(), _two().net.blocks[0].up
    own = linear.base_layer(x)
    part = {n: linear.scaling[n] * linear.lora_B[n](linear.lora_A[n](x)) for n in ("a", "b")}
    torch.testing.assert_close(module.net.blocks[0].up(x), own + part["a"] + part["b"])
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    switch_adapters(module, {"a": 0.25, "b": 2})
    torch.testing.assert_close(module.net.blocks[0].up(x), own + 0.25 * part["a"] + 2 * part["b"])
    switch_adapters(module, ["b"])
    torch.testing.assert_close(module.net.blocks[0].up(x), own + part["b"])
    assert trained == [name for name, p in module.named_parameters() if p.requires_grad]
    mixed = _two(active={"a": 0.5, "b": 1.0}, train=["b"])
    assert all(".b." in name for name, p in mixed.named_parameters() if p.requires_grad)
    y = mixed.net(x)
    torch.testing.assert_close(merge_adapters(mixed).net(x), y, rtol=1e-5, atol=1e-5)


@NOISE
def test_several_resume_and_each_is_exported_where_peft_looks(tmp_path: Path) -> None:
    from peft import PeftModel

    def adapter() -> PeftAdapter:
        one = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}
        return PeftAdapter(
            {"default": one, "other": one | {"r": 4}}, active={"default": 1.0, "other": 0.5}, train=["other"]
        )

    def fit(epochs: int, **arguments: Any) -> tuple[Language, L.Trainer]:
        module = Language(decoder("Llama"))
        run = L.Trainer(callbacks=[adapter()], **QUIET, max_epochs=epochs)
        run.fit(module, **arguments)
        return module, run

    module, run = fit(2)
    run.save_checkpoint(tmp_path / "two.ckpt")
    _, half = fit(1)
    half.save_checkpoint(tmp_path / "one.ckpt")
    assert_equal(weights(module), weights(fit(2, ckpt_path=tmp_path / "one.ckpt")[0]), "resumed")
    restored = restore(Language(decoder("Llama")), tmp_path / "two.ckpt")
    assert torch.equal(logits(restored.network), logits(module.network))
    command = [str(tmp_path / "two.ckpt"), "--format", "peft", "--output", str(tmp_path / "out")]
    assert export([*command, "--no-check"]) == 0
    theirs = PeftModel.from_pretrained(decoder("Llama"), tmp_path / "out")
    theirs.load_adapter(str(tmp_path / "out" / "other"), "other")
    switch_adapters(module, ["other"])
    theirs.set_adapter("other")
    assert torch.equal(logits(theirs), logits(module.network))


def test_what_was_switched_is_saved_and_an_adapter_that_nobody_calls_is_refused(tmp_path: Path) -> None:
    adapters = {name: LORA | {"init_lora_weights": False} for name in ("a", "b")}
    run = trainer([PeftAdapter(adapters)], max_epochs=1)
    run.fit(module := Toy(), data(), data())
    switch_adapters(module, {"a": 0.5})
    run.save_checkpoint(tmp_path / "a.ckpt")
    x = torch.randn(3, 16)
    y = module.eval().net(x)
    assert torch.equal(restore(Toy(), tmp_path / "a.ckpt").eval().net(x), y)
    encoder = nn.ModuleDict({"net": nn.TransformerEncoderLayer(16, 2, 32)})
    with pytest.raises(ConfigurationError, match=r"torch's attention reads the weight of 'net\.self_attn\.out_proj'"):
        apply(encoder, [PeftAdapter(LORA | {"target_modules": ["out_proj", "linear1"]}, network="")])


@NOISE
def test_export_merged_loads_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    module, run = _fit(_options("LOKR"), 2)
    run.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    y = logits(module.network)
    decoder("Llama").save_pretrained(tmp_path / "base")
    out = ["--format", "merged", "--output", str(tmp_path / "merged"), "--base", str(tmp_path / "base"), "--no-check"]
    assert export([str(tmp_path / "a.ckpt"), *out]) == 0
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), y, rtol=1e-4, atol=1e-4
    )
    out = ["--format", "safetensors", "--output", str(tmp_path / "plain")]
    assert export([str(tmp_path / "a.ckpt"), *out]) == 2  # the class of the module is not known


def test_peft_types_that_misread_quantised_weights_are_refused_and_others_merge_into_floats() -> None:
    with pytest.raises(ConfigurationError, match=r"peft's LOKR misreads the quantised weight of 'blocks\.0\.up'"):
        apply(Toy(), [QuantizeBase(), PeftAdapter(LOKR)])
    module, x = Toy(), torch.randn(3, 16)
    apply(module, [QuantizeBase(), PeftAdapter({"peft_type": "OFT", "oft_block_size": 4, "target_modules": ["up"]})])
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3) if p.requires_grad else None
    y = module.net(x)
    merge_adapters(module)
    torch.testing.assert_close(module.net(x), y, rtol=1e-4, atol=1e-4)
    assert module.state_dict().keys() == Toy().state_dict().keys()


def test_what_does_not_read_the_weight_is_no_misreading() -> None:
    cases: list[dict[str, Any]] = [
        {"peft_type": "IA3", "target_modules": ["up", "down"], "feedforward_modules": ["down"]},
        {
            "peft_type": "VERA",
            "r": 2,
            "target_modules": ["up", "down"],
        },  # whose matrices have the largest layer's sizes
        LORA | {"rank_pattern": {"up": 4}},
        {"a": LORA | {"target_modules": ["up"]}, "b": LORA | {"target_modules": ["down"]}},
    ]
    for config in cases:
        module, x = Toy(), torch.randn(3, 16)
        apply(module, [QuantizeBase(), PeftAdapter(config)])
        with torch.no_grad():
            for p in module.parameters():
                p.add_(0.1) if p.requires_grad else None
        y = module.eval().net(x)
        merge_adapters(module)
        torch.testing.assert_close(module.net(x), y, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:AdamW steps 272 parameters in 16 bits")
def test_bfloat16_copies_of_modules_follow_the_base_and_what_cannot_compute_is_refused_at_the_start() -> None:
    def fit(config: Any) -> Toy:
        module = Toy()
        L.Trainer(callbacks=[PeftAdapter(config)], **QUIET | {"precision": "bf16-true", "max_epochs": 1}).fit(
            module, data(), data()
        )
        return module

    module = fit(LORA | {"modules_to_save": ["head"]})
    types = {"lora_" in name: p.dtype for name, p in module.named_parameters() if p.requires_grad}
    assert types == {True: torch.float32, False: torch.bfloat16}
    with pytest.raises(ConfigurationError, match=r"FourierFTLinear of peft at '.*' cannot compute in bf16-true"):
        fit({"peft_type": "FOURIERFT", "n_frequency": 4, "target_modules": ["up"]})


@pytest.mark.filterwarnings("ignore::UserWarning")  # what peft says of these options
def test_options_of_which_the_layers_do_nothing_are_refused() -> None:
    for options in (
        {"alora_invocation_tokens": [3]}, {"init_lora_weights": "eva"}, {"init_lora_weights": "lora_ga"},
        {"monteclora_config": {}},
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=rf"PeftAdapter: {next(iter(options))}\b.* of LORA"):
            PeftAdapter(LORA | options)


def test_bad_configs_are_refused_before_anything_starts(tmp_path: Path) -> None:
    cases = {
        r"peft has no peft_type 'lokrr', did you mean 'LOKR'\?": {"peft_type": "lokrr"},
        r"LOKR has no option 'rank'": {"peft_type": "lokr", "rank": 3},
        r"peft rejects the options of ADAMSS": {
            "peft_type": "ADAMSS",
            "r": 0,
            "use_asa": True,
            "asa_target_subspaces": 0,
        },
        r"config must be fields of a peft configuration": {"a": LOKR, "b": "folder"},
        r"with peft_type, or its object, got 'folder'": "folder",
        r"the name of an adapter must be without dots": {"a.b": LOKR},
    }
    for message, config in cases.items():
        with pytest.raises(ConfigurationError, match=message):
            PeftAdapter(config)
    with pytest.raises(ConfigurationError, match=r"train must be a list of .*, got 'default'"):
        PeftAdapter(LOKR, train="default")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"train must be among a, got 'b'"):
        PeftAdapter({"a": LOKR, "b": LOKR}, active=["a"], train=["b"])
    with pytest.raises(ConfigurationError, match=r"target_modules.*nowhere.*not found"):
        apply(Toy(), [PeftAdapter({"peft_type": "LOKR", "target_modules": ["nowhere"]})])
    with pytest.raises(ConfigurationError, match=r"change the frozen weight .*, so that"):
        apply(Toy(), [PeftAdapter(LORA | {"init_lora_weights": "pissa"})])
    two = {"a": LORA, "b": {"peft_type": "OFT", "oft_block_size": 4, "target_modules": ["stem"]}}
    with pytest.raises(ConfigurationError, match=r"the weight of b must be 1 for OFT"):
        apply(Toy(), [PeftAdapter(two, active={"a": 1.0, "b": 0.5})])
    with pytest.raises(ConfigurationError, match=r"network must be a dotted name in the module, such as \['net'\]"):
        apply(Toy(), [PeftAdapter(LOKR, network="nett")])
    once = Toy()
    apply(once, [PeftAdapter(LOKR)])
    write_peft_folder(tmp_path, *peft_files(peft_placement(once), once.state_dict())["default"])
    with pytest.raises(ConfigurationError, match=r"does not fit Net: \d+ tensors are missing, unknown or of another"):
        apply(Toy(), [PeftAdapter({"start_from": str(tmp_path), "target_modules": ["up"]})])


def test_objects_of_peft_are_taken_and_recorded_as_fields() -> None:
    from peft import LoKrConfig

    given = PeftAdapter(LoKrConfig(r=2, alpha=4, target_modules={"up", "down"}))
    assert given.arguments()["config"] == {"peft_type": "LOKR", "r": 2, "alpha": 4, "target_modules": ["down", "up"]}
    assert network_of(Toy()) == "net"
    assert network_of(Language(decoder("Llama"))) == "network"


def test_dpo_asks_the_base_under_disabled_adapters() -> None:
    from lit_efficient.tasks.reference import Reference

    module = Toy()
    apply(module, [PeftAdapter(LOKR | {"modules_to_save": ["head"]})])
    reference, x = Reference(module.net), torch.randn(2, 16)
    y = module.net(x)
    assert not reference.tensors
    trainer([], max_epochs=2).fit(module, data(), data())
    assert not torch.allclose(module.net(x), y, atol=1e-3)
    assert torch.equal(reference(module.net, lambda: module.net(x)), y)
