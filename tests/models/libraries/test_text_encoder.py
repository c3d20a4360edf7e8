import copy
import warnings

import pytest
import torch

from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.models.libraries import text_encoder
from lit_efficient.models.libraries.text_encoder import CaptionReading, TextEncoder, TextEncoderConfig
from tests.cuda.meta_device import Waits, standing_in

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
CLIP = {"model_type": "clip_text_model", "max_position_embeddings": 16, "projection_dim": 8, **SMALL}
PROJECTED = {**CLIP, "architectures": ["CLIPTextModelWithProjection"]}
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
BERT = {"model_type": "bert", **SMALL}
QWEN = {"model_type": "qwen3", "head_dim": 8, "num_key_value_heads": 1, **SMALL}
ROBERTA = {"model_type": "roberta", "pad_token_id": 1, **SMALL}
BART = {"model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1} | {
    f"{half}_{what}": value
    for half in ("encoder", "decoder")
    for what, value in (("ffn_dim", 16), ("attention_heads", 2))
}
EVERY = {"clip": CLIP, "clip projected": PROJECTED, "t5": T5, "bert": BERT, "qwen": QWEN, "bart": BART}


def encoder(fields, **arguments) -> TextEncoder:
    return TextEncoder.load(TextEncoderConfig(config_fields=fields, **{"max_length": 12, **arguments}))


def ids_of(caption, length=12):
    """By hand: padding 0, the end 1, byte b is b + 2."""
    ids = [byte + 2 for byte in caption.encode()] + [1]
    return torch.tensor([ids + [0] * (length - len(ids))]), len(ids)


@pytest.mark.turns(3)
@pytest.mark.parametrize("fields", EVERY.values(), ids=EVERY)
def test_embeddings_are_those_of_the_model_called_by_hand(fields):
    ours = encoder(fields)
    found = ours.encode(["a cat", "äé", "a cat"])
    assert found.hidden.shape == (3, 12, 16)
    for row, caption in enumerate(["a cat", "äé"]):
        ids, count = ids_of(caption)
        real = (torch.arange(12) < count)[None]
        with torch.no_grad():
            clip = fields["model_type"] == "clip_text_model"
            wanted = ours.network(input_ids=ids) if clip else ours.network(input_ids=ids, attention_mask=real)
        assert torch.equal(found.hidden[row], wanted.last_hidden_state[0])
        assert found.mask[row].sum() == (12 if clip else count)
        pooled = wanted.get("text_embeds", wanted.get("pooler_output"))
        assert (found.pooled is None) == (pooled is None)
        assert pooled is None or torch.equal(found.pooled[row], pooled[0])


def test_the_pooled_embedding_is_taken_at_the_end_token():
    found = encoder(CLIP).encode(["a cat", "dog"])
    assert torch.equal(found.pooled, torch.stack([found.hidden[0, 5], found.hidden[1, 3]]))


def test_earlier_layers_with_and_without_the_final_norm():
    last = encoder(CLIP)
    with torch.no_grad():
        states = last.network(input_ids=ids_of("a cat")[0], output_hidden_states=True).hidden_states
        normed = getattr(last.network, "text_model", last.network).final_layer_norm(states[-2])
    assert torch.equal(encoder(CLIP, layer=-2).encode(["a cat"]).hidden, states[-2])
    assert torch.equal(encoder(CLIP, layer=-2, final_norm=True).encode(["a cat"]).hidden, normed)


def test_padding_that_is_hidden_does_not_change_the_real_tokens():
    short, long = (encoder(T5, max_length=length).encode(["a cat"]) for length in (8, 12))
    torch.testing.assert_close(short.hidden[0, :6], long.hidden[0, :6])
    seen = encoder(T5, captions=CaptionReading(padding="seen")).encode(["a cat"])
    assert seen.mask.all()
    assert not torch.allclose(seen.hidden[0, :6], long.hidden[0, :6])
    left = encoder(T5, captions=CaptionReading(padding_side="left")).encode(["a cat"])
    assert left.mask[0].tolist() == [False] * 6 + [True] * 6


def test_a_caption_is_encoded_once_whatever_else_the_batch_has():
    ours, calls = encoder(CLIP), []
    ours.network.register_forward_hook(lambda *_: calls.append(1))
    first = ours.encode(["a", "b", "a"]).hidden
    again = ours.encode(["c", "a"]).hidden
    assert len(calls) == 3
    assert torch.equal(first[0], again[1])
    assert torch.equal(encoder(CLIP).encode(["a"]).hidden[0], first[0])


def test_what_a_validation_embeds_can_be_trained_with_and_a_copy_of_its_holder_shares_it():
    ours = encoder(CLIP)
    with torch.inference_mode():
        ours.encode(["a"])
    text = copy.deepcopy(ours).encode(["a"]).hidden
    weight = torch.ones(16, requires_grad=True)
    (text * weight).sum().backward()
    assert torch.equal(weight.grad, text.sum((0, 1)))
    assert copy.deepcopy({"text": ours})["text"] is ours


def test_the_memory_forgets_what_was_used_longest_ago():
    ours, calls = encoder(CLIP), []
    ours.encode(["d"])
    memory = ours._memories[torch.device("cpu")]
    memory.limit = 2 * (12 * 16 * 4 + 12 + 16 * 4)
    ours.network.register_forward_hook(lambda *_: calls.append(1))
    for caption in ("a", "b", "a", "c", "a", "b"):
        ours.encode([caption])
    assert len(calls) == 4
    assert memory.bytes <= memory.limit


def test_a_gpu_takes_all_new_captions_at_once_and_keeps_them_there():
    """The device that counts waits stands in; a batch gives the numbers of one caption alone, up to rounding."""
    ours, sizes = encoder(CLIP), []
    alone = [ours.encode([caption]) for caption in ("a", "two words")]
    together = ours.parts[0].embed(["a", "two words"], torch.device("cpu"))
    for row, single in enumerate(alone):
        for whole, part in zip(together, single, strict=True):
            torch.testing.assert_close(whole[row], part[0], rtol=1e-5, atol=1e-6)
    ours.network.register_forward_hook(lambda *call: sizes.append(len(call[2].last_hidden_state)))
    with standing_in(waits := Waits()):
        for captions in (["", "a", "b", "a"], [""], ["", "c"]):
            found = ours.encode(captions, "meta")
            assert found.hidden.device.type == "meta"
            assert len(found.hidden) == len(captions)
        assert sizes == [3, 1]  # the empty caption once
        waits.places.clear()
        ours.encode(["c", "", "a"], "meta")
        ours.encode(["new", ""], "meta")
    assert not waits.places


def test_a_caption_that_is_cut_is_said_once():
    ours = encoder(CLIP)
    with pytest.warns(UserWarning, match="more than max_length=12 tokens and is truncated"):
        found = ours.encode(["a" * 50])
    assert torch.equal(found.hidden, encoder(CLIP).encode(["a" * 11]).hidden)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.encode(["b" * 50])


@pytest.mark.parametrize("fields", [PROJECTED, T5, BART], ids=["clip", "t5", "bart"])
def test_its_state_rebuilds_it_and_leaves_the_global_generator_alone(fields, tmp_path):
    ours = encoder(fields)
    torch.save(ours.state_dict(), tmp_path / "state.pt")
    before = torch.get_rng_state()
    other = TextEncoder.from_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(other.encode(["a cat"]).hidden, ours.encode(["a cat"]).hidden)
    assert other.fingerprint() == ours.fingerprint()
    assert (other.width, other.pooled_width) == (16, 8 if fields is PROJECTED else 0)


def test_the_fingerprint_changes_with_all_that_an_embedding_depends_on():
    prints = {
        encoder(CLIP, **a).fingerprint()
        for a in ({}, {"layer": -2}, {"max_length": 10}, {"captions": CaptionReading(padding="hidden")})
    }
    assert len(prints) == 4


def saved(tmp_path, seed):
    folder = tmp_path / "pipeline"
    torch.manual_seed(seed)
    ours = encoder(PROJECTED)
    torch.nn.init.normal_(ours.network.text_projection.weight)
    ours.network.save_pretrained(folder / "text_encoder")
    (folder / "tokenizer.json").write_text(ours.tokens.json)
    return TextEncoderConfig(
        str(folder), captions=CaptionReading(str(folder / "tokenizer.json")), subfolder="text_encoder", max_length=12
    ), ours


def test_from_a_pipelines_folder_as_saved(tmp_path):
    spec, ours = saved(tmp_path, 0)
    loaded = TextEncoder.load(spec)
    assert type(loaded.network).__name__ == "CLIPTextModelWithProjection"
    assert torch.equal(loaded.encode(["a cat"]).pooled, ours.encode(["a cat"]).pooled)


@pytest.mark.parametrize(
    ("kind", "fields", "inner"), [("Qwen3ForCausalLM", QWEN, "model"), ("CLIPModel", {}, "text_model")]
)
@torch.no_grad()
def test_the_part_that_reads_is_taken_out_of_a_larger_model(tmp_path, kind, fields, inner):
    import transformers

    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    special = {"vocab_size": 258, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    if kind == "CLIPModel":
        text = {key: value for key, value in CLIP.items() if key != "model_type"}
        fields = {"text_config": {**text, **special}, "vision_config": {**vision, "image_size": 8, "patch_size": 4}}
    else:
        fields = {key: value for key, value in {**fields, **special}.items() if key != "model_type"}
    model = getattr(transformers, kind)(getattr(transformers, kind).config_class(**fields)).eval()
    model.save_pretrained(tmp_path)
    ours = TextEncoder.load(
        TextEncoderConfig(str(tmp_path), captions=CaptionReading("bytes", padding="seen"), max_length=12)
    )
    wanted = getattr(model, inner)(input_ids=ids_of("a cat")[0])
    torch.testing.assert_close(ours.encode(["a cat"]).hidden, wanted.last_hidden_state)


def test_large_weights_are_named_and_verified(tmp_path, monkeypatch):
    monkeypatch.setattr(text_encoder, "EMBEDDED_BYTES", 100)
    spec, _ = saved(tmp_path, 0)
    state = TextEncoder.load(spec).state_dict()
    assert state["parts"] is None
    assert TextEncoder.from_state_dict(state).fingerprint() == state["fingerprint"]
    saved(tmp_path, 1)  # other weights under the same name
    with pytest.raises(CheckpointError, match="is not the one that the checkpoint was trained with"):
        TextEncoder.from_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config_fields": {}}, "name_or_path must be .* has no model_type"),
        ({"config_fields": {"model_type": "clap2"}}, "config_fields.model_type must be .* did you mean 'clap', got"),
        (
            {"config_fields": {**CLIP, "hiden_size": 3}},
            "'hiden_size', which is not a field .* similar fields: hidden_size",
        ),
        ({"config_fields": {**CLIP, "hidden_size": 0}}, "config_fields.hidden_size must be a number of at least 1"),
        ({"name_or_path": "./nothing"}, "no configuration that can be read|cannot be read"),
        ({"config_fields": CLIP, "max_length": 17}, "max_length must be at most 16, the positions of CLIPTextModel"),
        (
            {"config_fields": CLIP, "max_length": 9, "layer": -4},
            "layer must be -1 to -3, as CLIPTextModel has 2",
        ),
        (
            {"config_fields": {**ROBERTA, "max_position_embeddings": 16}, "max_length": 16},
            "max_length must be less than 16: RobertaModel keeps some",
        ),
        ({"config_fields": CLIP, "layer": 0}, "layer must be .* at most -1, got 0"),
        (
            {"config_fields": CLIP, "pipeline": "sdxl"},
            "pipeline must be null with config_fields, which a pipeline fixes",
        ),
        ({"pipeline": "flux"}, "name_or_path must be the pipeline's folder or name"),
        ({"config_fields": CLIP, "final_norm": True}, "final_norm must be false for layer -1"),
        ({"config_fields": CLIP | {"vocab_size": 99}, "max_length": 9}, "258 token ids and the encoder has 99"),
        (
            {"config_fields": CLIP, "captions": CaptionReading("./nothing")},
            "captions.tokenizer must be bytes, a tokenizer.json, a folder",
        ),
    ],
)
def test_what_cannot_work_is_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        TextEncoder.load(TextEncoderConfig(**arguments))
