"""New words by their embeddings alone, or together with adapters: against a slow loop, and in the pipeline."""

from pathlib import Path
from typing import Any

import diffusers
import lightning.pytorch as L
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lit_efficient import EMA, ExactResume, LatentDiffusion, LoRA
from lit_efficient.errors import ConfigurationError
from lit_efficient.tasks.latent_conditions import TextTraining
from lit_efficient.tasks.latent_source import draw_latents
from lit_efficient.tasks.loading import load_latent_diffusion
from tests.support import QUIET
from tests.support_cli import export
from tests.tasks.test_text_training import TARGETS, data, embedded, fitted, model
from tests.tiny_pipelines import written

WORDS = TextTraining(tokens={"<dog>": "cat", "<art>": None}, vectors={"<dog>": 3, "<art>": 1})
CAPTIONS = ["a <dog> <dog>", "<art> of <dog>", "nothing", "<dog>in<art>"]
pytestmark = pytest.mark.filterwarnings("ignore")


class Words(torch.utils.data.Dataset[Any]):
    """The rows of `CaptionedLatents` with captions of new words."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = [{**row, "captions": CAPTIONS[number % 4]} for number, row in enumerate(rows)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        return self.rows[number]


def worded(folder: Path) -> Any:
    source = data(folder)
    source.items = Words(source.items)  # type: ignore[assignment]
    source.__class__ = type("Worded", (type(source),), {"latent_shape": property(lambda self: (4, 8, 8))})
    return source


def expanded(caption: str) -> str:
    """What diffusers puts in the place of a word of several tokens."""
    return caption.replace("<dog>", "<dog> <dog>_1 <dog>_2")


def by_script(pipeline: Any) -> tuple[Any, Any]:
    """Tokenizer and encoder, grown as by diffusers' script: rows start as those of one token, or at random."""
    tokenizer, encoder = pipeline.tokenizer, pipeline.text_encoder
    tokenizer.add_tokens(["<dog>", "<dog>_1", "<dog>_2", "<art>"])
    table = encoder.get_input_embeddings().weight.detach().clone()
    encoder.resize_token_embeddings(len(tokenizer))
    with torch.no_grad():
        weight = encoder.get_input_embeddings().weight
        weight[: len(table)] = table
        for number, token in enumerate(["<dog>", "<dog>_1", "<dog>_2"]):
            letter = tokenizer("cat", add_special_tokens=False).input_ids[number]
            weight[tokenizer.convert_tokens_to_ids(token)] = table[letter]
    return tokenizer, encoder


def test_loss_gradient_and_steps_are_those_of_diffusers_script(tmp_path: Path) -> None:
    pipeline = written("sd15", tmp_path)
    module = model(tmp_path, WORDS, label_dropout=0.0, guidance_scale=1.0)
    source = worded(tmp_path)
    module.text_encoder, module.codec = source.text_encoder, source.codec
    module.configure_model()
    module.log = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    rows = module.text_networks.text_encoder.get_input_embeddings().added_rows
    assert [name for name, p in module.named_parameters() if p.requires_grad] == [
        name for name, p in module.named_parameters() if p is rows
    ]
    tokenizer, encoder = by_script(pipeline)
    weight = encoder.get_input_embeddings().weight
    ids = tokenizer.convert_tokens_to_ids(["<dog>", "<dog>_1", "<dog>_2", "<art>"])
    with torch.no_grad():
        weight[ids[3]] = rows[3]
    torch.testing.assert_close(weight[ids], rows)
    original = weight.detach().clone()
    encoder.requires_grad_(False)
    weight.requires_grad_(True)
    theirs = torch.optim.AdamW([weight], 0.01, weight_decay=0.1)
    ours = torch.optim.AdamW([rows], 0.01, weight_decay=0.1)
    scheduler = diffusers.DDPMScheduler.from_config(pipeline.scheduler.config)
    batch = next(iter(source.val_dataloader()))
    for step in range(3):
        torch.manual_seed(step)
        output = module.training_step(batch, 0)
        found = tokenizer(
            [expanded(caption) for caption in batch["captions"]],
            padding="max_length",
            max_length=77,
            truncation=True,
            return_tensors="pt",
        ).input_ids
        noise = output["target"]
        k = module.process.timestep(output["timesteps"]).round().long()
        torch.manual_seed(step)
        torch.rand(len(found))  # that of hidden captions
        latents = draw_latents(batch, None)
        noisy = scheduler.add_noise(latents, noise, k)
        predicted = pipeline.unet(noisy, k, encoder(found)[0]).sample
        loss = nn.functional.mse_loss(predicted, noise)
        torch.testing.assert_close(output["loss"], loss, rtol=1e-5, atol=1e-6)
        for optimizer, value in ((theirs, loss), (ours, output["loss"])):
            optimizer.zero_grad()
            value.backward()
        torch.testing.assert_close(rows.grad, weight.grad[ids], rtol=1e-4, atol=1e-6)
        theirs.step()
        ours.step()
        others = [number for number in range(len(weight)) if number not in ids]
        with torch.no_grad():
            weight[others] = original[others]
        torch.testing.assert_close(rows, weight[ids], rtol=1e-4, atol=1e-5)


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
@pytest.mark.parametrize("pivotal", [False, True], ids=["words", "pivotal"])
def test_words_reach_the_pipeline_and_everything_else_stays_to_the_bit(
    family: str, pivotal: bool, tmp_path: Path
) -> None:
    written(family, tmp_path / "base")
    source = worded(tmp_path / "base")
    module = model(tmp_path / "base", WORDS)
    first = built(tmp_path / "base", WORDS)
    started = {name: part.get_input_embeddings().added_rows for name, part in first.text_networks.items()}
    adapters = [LoRA(rank=2, targets=TARGETS, rates={"token_embedding": 4.0})] if pivotal else []
    fitted(module, source, *adapters).save_checkpoint(tmp_path / "a.ckpt")
    base = written(family, tmp_path / "other")
    for name, network in module.text_networks.items():
        original = dict(getattr(base, name).named_parameters())
        for key, parameter in network.named_parameters():
            if key in original:
                assert torch.equal(parameter, original[key]), key
        assert (network.get_input_embeddings().added_rows - started[name]).abs().min(dim=1).values.max() > 1e-4
    kept = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    count = 2 if family == "sdxl" else 1
    assert sum(name.endswith("added_rows") for name in kept) == count
    assert all(name.endswith("added_rows") or ".lora_" in name or "position_ids" in name for name in kept)
    again, _ = load_latent_diffusion(str(tmp_path / "a.ckpt"))
    assert export([str(tmp_path / "a.ckpt"), "--format", "peft", "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "pytorch_lora_weights.safetensors").exists() == pivotal
    if pivotal:
        base.load_lora_weights(tmp_path / "out")
    for word, file in (("<dog>", "dog.safetensors"), ("<art>", "art.safetensors")):
        if count == 1:
            base.load_textual_inversion(str(tmp_path / "out"), weight_name=file)
            continue
        rows = load_file(tmp_path / "out" / file)
        base.load_textual_inversion(rows["clip_l"], word, text_encoder=base.text_encoder, tokenizer=base.tokenizer)
        base.load_textual_inversion(rows["clip_g"], word, text_encoder=base.text_encoder_2, tokenizer=base.tokenizer_2)
    given = {"num_images_per_prompt": 1, "do_classifier_free_guidance": False, "device": "cpu"}
    for caption in CAPTIONS:
        ours = embedded(module, caption)
        with torch.no_grad():
            found = base.encode_prompt(caption, **given)
        torch.testing.assert_close(found[0], ours.text, rtol=1e-5, atol=1e-5)
        if count == 2:
            torch.testing.assert_close(found[2], ours.pooled, rtol=1e-5, atol=1e-5)
        assert torch.equal(embedded(again, caption).text, ours.text)


def test_one_word_is_a_file_that_the_folder_alone_names_and_merged_pipelines_have_it(tmp_path: Path) -> None:
    written("sd15", tmp_path / "base")
    training = TextTraining(tokens={"<dog>": "cat"}, vectors=2)
    module = model(tmp_path / "base", training)
    source = worded(tmp_path / "base")
    fitted(module, source).save_checkpoint(tmp_path / "a.ckpt")
    assert export([str(tmp_path / "a.ckpt"), "--format", "peft", "--output", str(tmp_path / "out")]) == 0
    base = written("sd15", tmp_path / "other")
    base.load_textual_inversion(str(tmp_path / "out"))
    given = {"num_images_per_prompt": 1, "do_classifier_free_guidance": False, "device": "cpu"}
    with torch.no_grad():
        torch.testing.assert_close(base.encode_prompt("a <dog>", **given)[0], embedded(module, "a <dog>").text)


def test_words_of_t5_reach_the_pipeline(tmp_path: Path) -> None:
    written("flux", tmp_path / "base")
    training = TextTraining(["text_encoder", "text_encoder_2"], tokens={"<dog>": "cat"}, vectors=2)
    module = model(tmp_path / "base", training, guidance_scale=1.0, label_dropout=0.0)
    started = built(tmp_path / "base", training).text_networks.text_encoder_2.shared.added_rows
    fitted(module, worded(tmp_path / "base")).save_checkpoint(tmp_path / "a.ckpt")
    assert (module.text_networks.text_encoder_2.shared.added_rows - started).abs().min(dim=1).values.max() > 1e-4
    assert export([str(tmp_path / "a.ckpt"), "--format", "peft", "--output", str(tmp_path / "out")]) == 0
    again, _ = load_latent_diffusion(str(tmp_path / "a.ckpt"))
    base = written("flux", tmp_path / "other")
    rows = load_file(tmp_path / "out" / "learned_embeds.safetensors")
    for key, number in (("clip_l", ""), ("t5", "_2")):
        place = {part: getattr(base, f"{part}{number}") for part in ("text_encoder", "tokenizer")}
        base.load_textual_inversion(rows[key], "<dog>", **place)
    ours = embedded(module, "<dog>in a <dog>")
    hidden, pooled, _ = base.encode_prompt("<dog>in a <dog>", None, device="cpu")
    torch.testing.assert_close(hidden, ours.text, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pooled, ours.pooled, rtol=1e-5, atol=1e-5)
    assert torch.equal(embedded(again, "<dog>in a <dog>").text, ours.text)


def test_words_behind_an_instruction_get_gradients(tmp_path: Path) -> None:
    written("sana", tmp_path)
    module = built(tmp_path, TextTraining(["text_encoder"], tokens={"<dog>": "cat"}, vectors=2))
    module.conditioning.of_batch({"captions": ["a <dog>"]}, torch.device("cpu")).text.square().sum().backward()
    (rows,) = (p for p in module.parameters() if p.requires_grad)
    assert rows.grad.abs().amax(dim=1).min() > 0
    with pytest.raises(ConfigurationError, match="the words must be in small letters for Gemma2Model"):
        built(tmp_path, TextTraining(["text_encoder"], tokens={"<Dog>": None}))


@pytest.mark.parametrize(
    ("training", "said"),
    [
        ({"tokens": {"cat": "c"}, "vectors": 1, "known": True}, "the tokenizer has 'c' already"),
        ({"tokens": {}}, "text_training.tokens must be null or a mapping with at least one new word"),
        ({"tokens": {"<a>": None}, "vectors": {"<b>": 2}}, "text_training.vectors must be a number, or one for each"),
        ({"tokens": {"<a>": ""}}, "'<a>' must start from words or null, and '' has no token"),
    ],
)
def test_words_that_cannot_be_new_are_refused(training: dict[str, Any], said: str, tmp_path: Path) -> None:
    if training.pop("known", False):
        training["tokens"] = {"c": None}
    written("sd15", tmp_path)
    with pytest.raises(ConfigurationError, match=said):
        built(tmp_path, TextTraining(**training))


def built(folder: Path, training: TextTraining) -> LatentDiffusion:
    module = model(folder, training)
    module.text_encoder = data(folder).text_encoder
    module.configure_model()
    return module


class SaveAtTwo(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2 and not self.path.exists():
            trainer.save_checkpoint(self.path)


def test_a_resumed_pivotal_run_has_the_bits_of_the_whole_one(tmp_path: Path) -> None:
    written("sd15", tmp_path)
    training = TextTraining(tokens={"<dog>": "cat", "<art>": None}, until=0.75)
    ends = []
    for path in (None, tmp_path / "two.ckpt"):
        module = model(tmp_path, training)
        callbacks = [LoRA(rank=2, targets=TARGETS), ExactResume(), SaveAtTwo(tmp_path / "two.ckpt")]
        torch.manual_seed(0 if path is None else 7)
        trainer = L.Trainer(callbacks=callbacks, max_steps=5, **QUIET)
        trainer.fit(module, worded(tmp_path), ckpt_path=path, weights_only=True)
        assert trainer.global_step == 5
        ends.append({name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad})
    assert any("added_rows" in name for name in ends[0])
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_the_export_of_averaged_words_is_their_average(tmp_path: Path) -> None:
    written("sd15", tmp_path / "base")
    module = model(tmp_path / "base", TextTraining(tokens={"<dog>": "cat"}, vectors=2))
    seen: list[torch.Tensor] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append(pl_module.text_networks.text_encoder.get_input_embeddings().added_rows.detach().clone())

    ema = EMA(decay=0.75, warmup=None)
    fitted(module, worded(tmp_path / "base"), ema, Watch()).save_checkpoint(tmp_path / "a.ckpt")
    average = seen[0]
    for rows in seen[1:]:
        average = 0.75 * average + 0.25 * rows
    for weights, expected in (("auto", average), ("raw", seen[-1])):
        output = tmp_path / weights
        wanted = ["--format", "peft", "--weights", weights, "--output", str(output)]
        assert export([str(tmp_path / "a.ckpt"), *wanted]) == 0
        torch.testing.assert_close(load_file(output / "learned_embeds.safetensors")["<dog>"], expected)
    assert not torch.allclose(average, seen[-1], rtol=1e-3)
