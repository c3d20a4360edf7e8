import json
from importlib.metadata import version
from types import SimpleNamespace

import pytest
from packaging.version import Version
from torch import nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals import hugging_face
from lit_efficient.internals.hugging_face import bars_on_terminals
from tests.internals.leaning import leans_on


@leans_on("diffusers", "_repeated_blocks", "hugging_face")
def test_diffusers_models_name_their_repeated_blocks():
    from diffusers import FluxTransformer2DModel, UNet2DConditionModel

    assert set(FluxTransformer2DModel._repeated_blocks) == {"FluxTransformerBlock", "FluxSingleTransformerBlock"}
    model = UNet2DConditionModel.__new__(UNet2DConditionModel)
    nn.Module.__init__(model)
    assert hugging_face.repeated_blocks(model) == ("BasicTransformerBlock",)
    assert hugging_face.repeated_blocks(nn.Linear(1, 1)) == ()


@leans_on("diffusers", "_keep_in_fp32_modules", "hugging_face")
def test_diffusers_models_name_what_stays_float32():
    from diffusers import UNet2DConditionModel, WanTransformer3DModel

    made = [kind.__new__(kind) for kind in (UNet2DConditionModel, WanTransformer3DModel)]
    for model in made:
        nn.Module.__init__(model)
    assert [hugging_face.keeps_float32(model) for model in (*made, nn.Linear(1, 1))] == [False, True, False]


@leans_on("transformers", "_name_or_path", "hugging_face")
def test_a_model_says_what_it_was_read_from(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1))
    assert hugging_face.source_of(model) == hugging_face.source_of(nn.Linear(1, 1)) == ""
    model.save_pretrained(tmp_path)
    assert hugging_face.source_of(GPT2LMHeadModel.from_pretrained(tmp_path)) == str(tmp_path)


@leans_on("datasets", "_data_files", "hugging_face")
def test_a_saved_data_set_lists_its_files(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"a": [1]}).save_to_disk(tmp_path / "saved")
    (listed,) = json.loads((tmp_path / "saved" / "state.json").read_text())["_data_files"]
    assert (tmp_path / "saved" / listed["filename"]).is_file()
    assert hugging_face.load_saved(tmp_path / "saved")[0] == {"a": 1}
    state = tmp_path / "saved" / "state.json"
    state.write_text(state.read_text().replace(listed["filename"], "../other.arrow"))
    with pytest.raises(ConfigurationError, match="which leads out of its folder"):
        hugging_face.load_saved(tmp_path / "saved")


@leans_on(
    "transformers",
    "_is_expert_parallel, _experts_implementation, _can_set_experts_implementation",
    "hugging_face",
)
def test_a_model_s_experts_are_known_and_set():
    from transformers import GPT2Config, GPT2Model, MixtralConfig, MixtralModel

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1, "num_local_experts": 2, "pad_token_id": 0}
    model = MixtralModel(MixtralConfig(**sizes))
    ((name, experts),) = hugging_face.expert_modules(model)
    assert name == "layers.0.mlp.experts"
    assert hugging_face.experts_way(experts) == "grouped_mm"
    hugging_face.set_experts_way(model, "eager")
    assert hugging_face.experts_way(experts) == "eager"
    dense = GPT2Model(GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1))
    before = dense.config._experts_implementation
    hugging_face.set_experts_way(dense, "batched_mm")  # without an effect
    assert dense.config._experts_implementation == before
    assert hugging_face.expert_modules(dense) == []


@leans_on("transformers", "config._attn_implementation", "hugging_face")
def test_a_model_s_attention_is_known():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = LlamaForCausalLM._from_config(LlamaConfig(vocab_size=4, **sizes), attn_implementation="eager")
    assert hugging_face.attention_of(model.config) == "eager"
    model.set_attn_implementation("sdpa")
    assert hugging_face.attention_of(model.config) == "sdpa"


@leans_on("transformers", "PreTrainedModel._from_config", "hugging_face")
def test_models_are_drawn_from_their_configs_by_both_kinds_of_classes():
    import torch
    from transformers import AutoModel, CLIPTextConfig, CLIPTextModel

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = CLIPTextConfig(vocab_size=4, bos_token_id=0, eos_token_id=1, pad_token_id=1, **sizes)
    for kind in (AutoModel, CLIPTextModel):
        model = hugging_face.from_config(kind, config, dtype=torch.bfloat16)
        assert type(model) is CLIPTextModel
        assert model.dtype is torch.bfloat16


@leans_on("datasets", "Dataset._fingerprint", "hugging_face")
def test_a_data_set_s_hash_follows_what_was_done_to_it():
    from datasets import Dataset

    rows = Dataset.from_dict({"x": [1, 2]})
    first, again = (rows.select([0]) for _ in range(2))
    assert hugging_face.fingerprint(first) == hugging_face.fingerprint(again)
    assert len({hugging_face.fingerprint(rows), hugging_face.fingerprint(first), ""}) == 3


@leans_on("transformers", "chat_template_utils._compile_jinja_template", "hugging_face")
def test_chat_templates_are_compiled_with_filters_of_their_own():
    environment = hugging_face.chat_environment("{{ messages }}")
    text = "{% generation %}{{ 'é<' | tojson }}{% endgeneration %}{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}"
    assert environment.from_string(environment.parse(text)).render() == '"é<"1'


@leans_on("transformers", "chat_template_utils._plain_template_data, _alias_reasoning_fields", "hugging_face")
def test_messages_are_copied_for_a_template_with_thoughts_under_each_name():
    given = [{"role": "assistant", "content": "x", "reasoning_content": "y"}]
    (seen,) = hugging_face.template_messages(given)
    assert seen is not given[0]
    copied = Version(version("transformers")) < Version("5.23")
    assert seen == given[0] | ({} if copied else {"thinking": "y"})


@leans_on("transformers", "AutoModelForCausalLM._model_mapping", "hugging_face")
def test_a_configuration_says_its_class_of_causal_models():
    from transformers import CLIPVisionConfig, LlamaConfig, LlamaForCausalLM

    assert hugging_face.causal_model_of(LlamaConfig()) is LlamaForCausalLM
    assert hugging_face.causal_model_of(CLIPVisionConfig()) is None


@leans_on("transformers", "PreTrainedTokenizerFast._encode_plus", "hugging_face")
def test_a_tokenizer_that_changes_texts_is_known():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    class Changes(PreTrainedTokenizerFast):
        def _encode_plus(self, text, **kwargs):
            return super()._encode_plus(text.upper(), **kwargs)

    for kind, alone in ((PreTrainedTokenizerFast, True), (Changes, False)):
        tokenizer = kind(tokenizer_object=Tokenizer(models.WordLevel({"A": 0, "a": 1})))
        assert hugging_face.encodes_alone(tokenizer) is alone
        assert tokenizer("a")["input_ids"] == [1 if alone else 0]


@leans_on("transformers", "masking_utils.find_packed_sequence_indices and fast_all", "hugging_face")
def test_masks_are_made_without_reading_what_lies_on_a_gpu():
    """As its own where they are needed, and whole where it would leave them out; a forward reads nothing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

    from tests.cuda.meta_device import META, Waits, standing_in

    packed = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    theirs = masking_utils.find_packed_sequence_indices(packed)
    with hugging_face.masks_unread(META):
        assert torch.equal(masking_utils.find_packed_sequence_indices(packed), theirs)
    assert masking_utils.find_packed_sequence_indices(packed[1:]) is None
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4, **sizes))
    ids = torch.ones_like(packed)
    given = ({"position_ids": packed}, {"attention_mask": torch.ones_like(packed)})
    for inputs in given:
        expected = model(ids, **inputs).logits
        with hugging_face.masks_unread(META):
            torch.testing.assert_close(model(ids, **inputs).logits, expected)
    model.to(META)
    for unread, reads in ((hugging_face.masks_unread, 0), (lambda _: torch.no_grad(), 1)):
        for inputs in given:
            on_meta = {name: tensor.to(META) for name, tensor in inputs.items()}
            there = ids.to(META)
            with standing_in(waits := Waits()), unread(META):
                model(there, use_cache=False, **on_meta)
            assert waits.places.total() == reads


@leans_on("transformers", "_can_record_outputs", "hugging_face")
def test_models_with_routers_are_known_by_the_classes_whose_outputs_they_record():
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    for kind, routers in (("mixtral", True), ("llama", False)):
        config = AutoConfig.for_model(kind, vocab_size=4, num_hidden_layers=1, **sizes)
        assert hugging_face.records_routers(AutoModelForCausalLM.from_config(config)) is routers


@leans_on("transformers", "utils.logging._tqdm_active", "hugging_face")
def test_bars_are_shown_on_terminals_alone(monkeypatch):
    from transformers.utils import logging

    assert logging.is_progress_bar_enabled()
    with bars_on_terminals():
        assert not logging.is_progress_bar_enabled()
    assert logging.is_progress_bar_enabled()
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: True))
    with bars_on_terminals():
        assert logging.is_progress_bar_enabled()
