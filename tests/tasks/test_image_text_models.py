"""Fine-tuning of models of images and text: from files of rows to the folders that transformers and peft load."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from benchmarks.plan_truth import measure
from lit_efficient import (
    LanguageData,
    LanguageModeling,
    LoRA,
    PrefixTuning,
    PromptTuning,
    SampleText,
    SequenceLengthRamp,
    plan,
)
from lit_efficient.__main__ import main
from lit_efficient.data.text.arguments import LanguageChat, LanguageRows, LanguageStream
from lit_efficient.data.text.chat_tokenizer import pack_tokenizer
from lit_efficient.data.text.image_texts import ImageTexts, pack_processor, read_processor
from lit_efficient.data.text.message_images import UnplacedImage
from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.fits import AS_IT_IS, Change, Fit, FitSource
from lit_efficient.export.adapters import export_checkpoint
from lit_efficient.internals.hugging_face_processors import load_processor
from lit_efficient.mechanisms.moving import take_rows
from lit_efficient.models.libraries.causal_lm import CausalLMConfig
from tests.image_text_kit import (
    CONVERSATIONS,
    FAMILIES,
    IMAGES,
    answer,
    picture,
    png,
    save_model,
    tokenizer,
    user,
    write_rows,
)

ANSWERS = [["A red square.", "blue"], ["green"], ["The colour is blue, and green."], ["red."]]
ENDS = {"qwen2_5_vl": "<|im_end|>", "gemma3": "<end_of_turn>", "llava_next": "<eos>", "mllama": "<|eot|>"}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    if request.param == "smolvlm":
        pytest.importorskip("num2words")  # transformers needs it for the processor
    return str(request.param)


@pytest.fixture(scope="module")
def base(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(family, tmp_path_factory.mktemp("model") / family)


@pytest.fixture(scope="module")
def one_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llava_next", tmp_path_factory.mktemp("model") / "llava_next")


def data_of(train: Path | str, base: Path, folder: Path, **given: Any) -> LanguageData:
    given = {"max_length": 256, "val_fraction": 0.0, "batch_size": 4, "chat": LanguageChat(truncation="drop")} | given
    data = LanguageData(train=str(train), processor=str(base), pack=False, cache_dir=str(folder / "cache"), **given)
    data.prepare_data()
    data.setup()
    return data


def batch_in_order(data: LanguageData) -> dict[str, Tensor]:
    """Return all training rows as one batch, in the order of the file."""
    rows: Any = data.train_rows
    return data.train_dataloader().collate_fn([rows[index] for index in range(len(rows))])  # type: ignore[union-attr]


def quiet(**given: Any) -> Trainer:
    given = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False} | given
    return Trainer(accelerator="cpu", enable_progress_bar=False, num_sanity_val_steps=0, **given)


def processed(base: Path) -> dict[str, Tensor]:
    """Return the inputs of the conversations by the processor itself."""
    processor = load_processor(str(base))
    texts = processor.tokenizer.apply_chat_template(CONVERSATIONS, tokenize=False)
    images = [[picture(*size) for size in sizes] for sizes in IMAGES]
    how = {"padding": True, "padding_side": "right", "pad_to_multiple_of": 8, "add_special_tokens": False}
    return dict(processor(text=texts, images=images, return_tensors="pt", **how))


def test_the_loss_is_that_of_transformers_on_the_same_rows(family: str, base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    data = data_of(write_rows(tmp_path / "data"), base, tmp_path)
    batch = batch_in_order(data)
    expected = processed(base)
    for name, value in expected.items():
        assert torch.equal(batch[name], value), name
    end = ENDS.get(family, "<end_of_utterance>")
    for labels, ids, answers in zip(batch["labels"], batch["input_ids"], ANSWERS):
        learned = data.chat_tokenizer.decode(labels[labels >= 0])
        assert learned.replace(" ", "") == "".join(f"{text}{end}" for text in answers).replace(" ", "")
        assert torch.equal(labels[labels >= 0], ids[labels >= 0])
    model = AutoModelForImageTextToText.from_pretrained(base).train()
    theirs = model(**expected, labels=batch["labels"]).loss
    task = LanguageModeling(CausalLMConfig(str(base)))
    task.configure_model()
    losses, targets, _ = task._losses(batch)
    ours = losses.sum() / (targets >= 0).sum()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    ours.backward()
    theirs.backward()
    theirs_by_name = dict(model.named_parameters())
    for name, parameter in task.network.named_parameters():  # type: ignore[union-attr]
        if theirs_by_name[name].grad is not None:
            torch.testing.assert_close(parameter.grad, theirs_by_name[name].grad, rtol=1e-4, atol=1e-6)
    seen = [p.grad for name, p in theirs_by_name.items() if "vision" in name or "visual" in name]
    assert max(float(gradient.abs().max()) for gradient in seen if gradient is not None) > 0


def logits_of(model: Any, base: Path) -> Tensor:
    with torch.no_grad():
        return model.eval()(**processed(base)).logits  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks transformers for it
def test_exports_compute_the_same_with_images_in_transformers_and_peft(family: str, base: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    data = data_of(write_rows(tmp_path / "data"), base, tmp_path)
    task = LanguageModeling(CausalLMConfig(str(base)), learning_rate=0.05, warmup_steps=0)
    lora = LoRA(rank=2, targets=[r"(q_proj|qkv|fc1|down_proj)"])
    trainer = quiet(max_steps=2, callbacks=[lora])
    trainer.fit(task, data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    trained = [name for name, p in task.network.named_parameters() if p.requires_grad]  # type: ignore[union-attr]
    assert any("vision" in name or "visual" in name for name in trained)
    assert any("language_model" in name or "text_model" in name for name in trained)
    ours = logits_of(task.network, base)
    assert not torch.allclose(ours, logits_of(AutoModelForImageTextToText.from_pretrained(base), base), atol=1e-3)
    checks = family == "idefics3"  # in a new process, which takes seconds
    merged = export_checkpoint(tmp_path / "last.ckpt", tmp_path / "merged", "merged", check=checks)
    theirs = AutoModelForImageTextToText.from_pretrained(merged)
    torch.testing.assert_close(logits_of(theirs, merged), ours, rtol=1e-4, atol=1e-4)
    for name in ("processor_config.json", "preprocessor_config.json", "chat_template.jinja"):
        assert (merged / name).read_text() == (base / name).read_text()
    adapter = export_checkpoint(tmp_path / "last.ckpt", tmp_path / "peft", "peft", check=checks)
    adapted = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), adapter)
    torch.testing.assert_close(logits_of(adapted, adapter), ours, rtol=1e-4, atol=1e-4)
    for folder in (merged, adapter):
        assert ("differ by" in (folder / "README.md").read_text()) == checks


def marked_template(base: Path) -> str:
    """Return the template of LLaVA with marks around the assistant's text, which TRL needs."""
    template = (base / "chat_template.jinja").read_text()
    texts = "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}"
    end = "{% if message['role'] == 'assistant' %}<eos>{% endif %}"
    unmarked = texts + "{% endfor %}" + end
    assert unmarked in template
    own = "{% generation %}" + texts + "{% endfor %}<eos>{% endgeneration %}"
    return template.replace(
        unmarked, "{% if message['role'] == 'assistant' %}" + own + "{% else %}" + texts + "{% endfor %}{% endif %}"
    )


@pytest.mark.filterwarnings("ignore")  # of TRL and datasets
def test_trl_trains_on_the_same_batches_with_the_same_losses(one_base: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    import datasets
    from transformers import AutoModelForImageTextToText

    template = marked_template(one_base)
    processor = load_processor(str(one_base))
    processor.chat_template = processor.tokenizer.chat_template = template
    rows = []
    for messages, sizes in zip(CONVERSATIONS, IMAGES):
        rows.append({"messages": messages, "images": [picture(*size) for size in sizes]})
    arguments = trl.SFTConfig(
        str(tmp_path / "trl"),
        per_device_train_batch_size=4,
        max_steps=3,
        learning_rate=1e-2,
        adam_beta2=0.95,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        assistant_only_loss=True,
        max_length=None,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
    )
    theirs = trl.SFTTrainer(
        AutoModelForImageTextToText.from_pretrained(one_base),
        arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=processor,
    )
    data = data_of(
        write_rows(tmp_path / "data"), one_base, tmp_path, chat=LanguageChat(truncation="drop", template=template)
    )
    ours = batch_in_order(data)
    batch = theirs.data_collator(rows)
    assert set(batch) == {name for name in ours if not name.startswith("count_of_")}
    length = batch["input_ids"].shape[1]
    for name, value in batch.items():
        found = ours[name][:, :length] if ours[name].ndim == 2 and value.ndim == 2 else ours[name]  # theirs is shorter
        assert torch.equal(found[:, : value.shape[1]] if value.ndim == 2 else found, value), name
    theirs.train()

    class Plain(LanguageModeling):
        losses: ClassVar[list[float]] = []

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2, (0.9, 0.95), weight_decay=0.0)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
            output = super().training_step(batch, batch_idx)
            self.losses.append(float(output["loss"]))
            return output

    task = Plain(CausalLMConfig(str(one_base)))
    quiet(max_steps=3).fit(task, data)
    expected = [entry["loss"] for entry in theirs.state.log_history if "loss" in entry]
    assert task.losses == pytest.approx(expected, abs=1e-5)
    assert expected[2] < expected[0]


@pytest.mark.turns(6, family="slow")
def test_frozen_parts_stay_and_adapters_leave_them_out(one_base: Path, tmp_path: Path) -> None:
    data = data_of(write_rows(tmp_path / "data"), one_base, tmp_path)
    task = LanguageModeling(CausalLMConfig(str(one_base), frozen=["vision_tower", "multi_modal_projector"]), 0.01)
    task.configure_model()
    before = {name: value.clone() for name, value in task.state_dict().items()}
    trainer = quiet(max_steps=2)
    trainer.fit(task, data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    for name, value in task.state_dict().items():
        is_frozen = "vision_tower" in name or "multi_modal_projector" in name
        assert torch.equal(value, before[name]) == is_frozen, name
    again = LanguageModeling.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert not any(p.requires_grad for n, p in again.named_parameters() if "vision_tower" in n)
    lora = LanguageModeling(CausalLMConfig(str(one_base), frozen=["vision_tower"]))
    quiet(max_steps=1, callbacks=[LoRA(rank=1, modules_to_save=["multi_modal_projector"])]).fit(lora, data)
    trained = {name for name, p in lora.named_parameters() if p.requires_grad}
    assert not any("vision_tower" in name for name in trained)
    assert any("multi_modal_projector" in name for name in trained)
    assert any("language_model" in name and "lora_A" in name for name in trained)
    wrong = LanguageModeling(CausalLMConfig(str(one_base), frozen=["visual"]))
    with pytest.raises(ConfigurationError, match=r"CausalLMConfig: frozen: .*'visual' matches no"):
        wrong.configure_model()


def rows_file(folder: Path, *rows: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder / "rows.jsonl"


@pytest.mark.parametrize("form", ["parquet", "llava", "openai", "base64", "first question", "folder of images"])
def test_images_are_read_in_the_forms_that_people_have(form: str, one_base: Path, tmp_path: Path) -> None:
    """Each form gives the batch of a row with the image as a part."""
    import base64

    place = tmp_path / "data"
    shown = picture(0, 40, 70)
    question = "What is in the picture?"
    given: dict[str, Any] = {}
    expected = rows_file(tmp_path / "plain", {"messages": [user(None, question), answer("blue")], "images": ["a.png"]})
    shown.save(tmp_path / "plain" / "a.png")
    asked = {"role": "user", "content": question}
    if form == "parquet":
        import datasets

        place.mkdir()
        rows = place / "rows.parquet"
        row = {"messages": [[user(None, question), answer("blue")]], "images": [[{"bytes": png(shown), "path": None}]]}
        datasets.Dataset.from_dict(row).to_parquet(rows)
    elif form == "llava":
        turns = [{"from": "human", "value": f"<image>{question}"}, {"from": "gpt", "value": "blue"}]
        rows = rows_file(place, {"id": "1", "image": "a.png", "conversations": turns})
        shown.save(place / "a.png")
    elif form == "base64":
        content = [
            {"type": "image", "base64": base64.b64encode(png(shown)).decode()},
            {"type": "text", "text": question},
        ]
        rows = rows_file(place, {"messages": [{"role": "user", "content": content}, answer("blue")]})
    elif form == "openai":
        url = "data:image/png;base64," + base64.b64encode(png(shown)).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
        rows = rows_file(place, {"messages": [{"role": "user", "content": content}, answer("blue")]})
    else:
        rows = rows_file(place, {"messages": [asked, answer("blue")], "images": ["a.png"]})
        away = tmp_path / "away" if form == "folder of images" else place
        away.mkdir(exist_ok=True)
        shown.save(away / "a.png")
        given["rows"] = LanguageRows(image_folder=str(away))
    ours = batch_in_order(data_of(rows, one_base, tmp_path, batch_size=1, **given))
    theirs = batch_in_order(data_of(expected, one_base, tmp_path, batch_size=1))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [user(None, "a"), answer("b")]}, "it holds 0 images, and its messages have places for 1"),
        ({"messages": [user(None, "a"), answer("b")], "images": ["../a.png"]}, "is not in .*set rows.image_folder"),
        ({"messages": [user(None, "a"), answer("b")], "images": ["b.png"]}, "b.png cannot be read: .*No such file"),
        (
            {"messages": [user(None, "a"), answer("b")], "images": ["rows.jsonl"]},
            "cannot be read: cannot identify",
        ),
        ({"messages": [user(None, "a"), answer("b")], "images": ["http://a.b/c.png"]}, "would have to be downloaded"),
        (
            {"messages": [user("a"), {**user(None, "b"), "role": "assistant"}], "images": ["a.png"]},
            "models learn to write",
        ),
        ({"messages": [user("say <image>"), answer("b")]}, "spells the control token '<image>'"),
        ({"messages": [user("a"), answer("b")], "videos": ["a.mp4"]}, "holds videos .* only text and images are read"),
        ({"text": "no conversation"}, "it is no conversation"),
    ],
)
def test_rows_with_unusable_images_are_malformed(row: Any, reason: str, one_base: Path, tmp_path: Path) -> None:
    rows = rows_file(tmp_path / "data", row)
    picture(0, 8, 8).save(tmp_path / "data" / "a.png")
    with pytest.raises(ConfigurationError, match=reason):
        data_of(rows, one_base, tmp_path, batch_size=1)


def test_a_place_that_a_user_spells_is_refused_although_its_token_is_not_special(
    one_base: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "base"
    shutil.copytree(one_base, copy)
    made = json.loads((copy / "tokenizer.json").read_text())
    for token in made["added_tokens"]:
        token["special"] = token["special"] and token["content"] != "<image>"
    (copy / "tokenizer.json").write_text(json.dumps(made))
    rows = rows_file(tmp_path / "data", {"messages": [user("say <image>", None), answer("b")], "images": ["a.png"]})
    picture(0, 8, 8).save(tmp_path / "data" / "a.png")
    with pytest.raises(ConfigurationError, match="spells the control token '<image>'"):
        data_of(rows, copy, tmp_path, batch_size=1)


def test_a_processor_that_changes_the_text_is_refused(tmp_path: Path) -> None:
    """PaliGemma's writes a token after the images, and its model reads all that follows in both directions."""
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    images = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    images.image_seq_length = 4
    base = tmp_path / "base"
    images.save_pretrained(base)
    tokens = tokenizer("<bos>", "<image>", bos_token="<bos>")
    parts = (
        "{% for part in message['content'] %}{{ part['text'] if part['type'] == 'text' else '<image>' }}{% endfor %}"
    )
    tokens.chat_template = "{% for message in messages %}" + parts + "<eos>{% endfor %}"
    tokens.save_pretrained(base)
    (base / "processor_config.json").write_text(json.dumps({"processor_class": "PaliGemmaProcessor"}))
    rows = rows_file(tmp_path / "data", {"messages": [user(None, "a"), answer("b")], "images": ["a.png"]})
    picture(0, 8, 8).save(tmp_path / "data" / "a.png")
    with pytest.raises(
        ConfigurationError, match="a short conversation without images cannot be read: the processor re"
    ):
        data_of(rows, base, tmp_path, batch_size=1)
    reader = ImageTexts(pack_processor(read_processor(str(base), None), str(base)))
    with pytest.raises(UnplacedImage, match="PaliGemmaProcessor changes the text that the chat template writes"):
        reader.tokens("<image>a<eos>b<eos>", [png(picture(0, 8, 8))])


def test_a_beginning_that_only_the_tokenizer_writes_is_warned_about(one_base: Path, tmp_path: Path) -> None:
    copy = tmp_path / "base"
    shutil.copytree(one_base, copy)
    made = json.loads((copy / "tokenizer.json").read_text())
    token = {"SpecialToken": {"id": "<eos>", "type_id": 0}}
    made["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [token, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<eos>": {"id": "<eos>", "ids": [1], "tokens": ["<eos>"]}},
    }
    (copy / "tokenizer.json").write_text(json.dumps(made))
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": "<eos>"}))
    rows = write_rows(tmp_path / "data")
    with pytest.warns(match=r"the chat template does not write <eos>, and rows begin without it, as in TRL"):
        data = data_of(rows, copy, tmp_path)
    assert torch.equal(batch_in_order(data)["input_ids"], processed(one_base)["input_ids"])


def test_the_tokens_of_images_count_towards_the_length(one_base: Path, tmp_path: Path) -> None:
    data = data_of(write_rows(tmp_path / "data"), one_base, tmp_path, max_length=60, batch_size=1)
    lengths = [int(mask.sum()) for mask in processed(one_base)["attention_mask"]]
    assert len(data.train_rows) == sum(length <= 60 for length in lengths) == 2  # type: ignore[arg-type]
    assert data.report["counts"]["train"]["truncated"] == 2


def test_an_image_of_another_size_is_found_before_it_is_used(one_base: Path, tmp_path: Path) -> None:
    data = data_of(write_rows(tmp_path / "data"), one_base, tmp_path)
    picture(0, 90, 20).save(tmp_path / "data" / "0_0.png")
    with pytest.raises(ConfigurationError, match=r"the tokens of a row have changed .*0_0.png"):
        batch_in_order(data)


def test_no_token_of_an_image_has_a_label(one_base: Path, tmp_path: Path) -> None:
    chat = LanguageChat(truncation="drop", train_on="all")
    data = data_of(write_rows(tmp_path / "data"), one_base, tmp_path, chat=chat)
    batch = batch_in_order(data)
    is_image = batch["input_ids"] == data.chat_tokenizer.convert_tokens_to_ids("<image>")
    learned = (batch["attention_mask"] == 1) & ~is_image
    learned[:, 0] = False
    assert is_image.any()
    assert torch.equal(batch["labels"] >= 0, learned)


def test_rows_of_a_batch_take_their_images_along(one_base: Path, tmp_path: Path) -> None:
    data = data_of(write_rows(tmp_path / "data"), one_base, tmp_path)
    batch = batch_in_order(data)
    assert batch["count_of_image_sizes"].tolist() == [1, 0, 2, 1]
    chosen = take_rows(batch, torch.tensor([2, 1]), 4)
    assert torch.equal(chosen["pixel_values"], batch["pixel_values"][1:3])
    assert torch.equal(chosen["input_ids"], batch["input_ids"][[2, 1]])
    assert chosen["count_of_pixel_values"].tolist() == [2, 0]
    alone = take_rows(batch, slice(1, 2), 4)
    assert not any("pixel_values" in name for name in alone)
    foreign = {"input_ids": batch["input_ids"], "pixel_values": torch.zeros(5, 3, 2, 2)}
    with pytest.raises(ConfigurationError, match=r"4 rows and 5 images .*it is unknown which belong to which row"):
        take_rows(foreign, slice(0, 1), 4)


def test_text_alone_trains_a_model_of_images(family: str, base: Path, tmp_path: Path) -> None:
    rows = rows_file(tmp_path / "data", *[{"messages": [user("What is"), answer(text)]} for text in ("blue", "red.")])
    task = LanguageModeling(CausalLMConfig(str(base)))
    trainer = quiet(max_steps=1)
    trainer.fit(task, data_of(rows, base, tmp_path, batch_size=2))
    assert torch.isfinite(trainer.callback_metrics["train/loss"])


def test_a_trained_model_continues_text_as_one_that_has_seen_no_image(family: str, base: Path, tmp_path: Path) -> None:
    """The shifts of positions that a batch of images leaves behind do not reach a text."""
    task = LanguageModeling(CausalLMConfig(str(base)), learning_rate=1e-12)
    quiet(max_steps=1).fit(task, data_of(write_rows(tmp_path / "data"), base, tmp_path))
    fresh = LanguageModeling(CausalLMConfig(str(base)))
    fresh.tokenizer_state = task.tokenizer_state
    fresh.configure_model()
    how: dict[str, Any] = {"chat": True, "max_new_tokens": 4, "temperature": 0.0}
    (said,) = task.generate_text("What is", **how)
    assert (said,) == tuple(fresh.generate_text("What is", **how))
    assert "What is" in said


def with_processor(base: Path) -> LanguageModeling:
    """Return a task with the base's weights, as one that was trained with its processor."""
    task = LanguageModeling(CausalLMConfig(str(base)))
    processor = read_processor(str(base), None)
    task.tokenizer_state = pack_tokenizer(processor.tokenizer, (), pack_processor(processor, str(base)))
    task.configure_model()
    return task.eval()


ABOUT = [[(0, 40, 70), (1, 90, 33)], [], [(2, 28, 28)]]


def test_answers_about_images_are_those_of_transformers(family: str, base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    processor = load_processor(str(base))
    model = AutoModelForImageTextToText.from_pretrained(base)
    # transformers fails for a penalty on the token of an image that is above those of the logits.
    penalty = {} if family == "mllama" else {"repetition_penalty": 1.3}
    files: list[list[str | bytes]] = []
    expected = []
    for number, sizes in enumerate(ABOUT):
        pictures = [picture(*size) for size in sizes]
        files.append([png(shown) for shown in pictures])
        turn = user(*[None] * len(sizes), f"What is {number}?")
        text = processor.tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
        inputs = processor(
            text=[text], images=[pictures] if pictures else None, add_special_tokens=False, return_tensors="pt"
        )
        length = inputs["input_ids"].shape[1]
        found = model.generate(**inputs, max_new_tokens=12, min_new_tokens=12, do_sample=False, **penalty)
        expected.append(text + processor.tokenizer.decode(found[0, length:]))
    task = with_processor(base)
    task.network.generation_config.repetition_penalty = 7.0  # type: ignore[union-attr]  # which is not asked for
    task.network.generation_config.eos_token_id = None  # type: ignore[union-attr]
    state = torch.get_rng_state()
    how: dict[str, Any] = {"max_new_tokens": 12, "chat": True}
    prompts = [f"What is {number}?" for number in range(3)]
    assert task.generate_text(prompts, images=files, temperature=0.0, **how, **penalty) == expected
    how["repetition_penalty"] = 1.3
    drawn = task.generate_text(prompts, images=files, seed=3, **how)
    assert drawn[2:] == task.generate_text(prompts[2:], images=files[2:], seed=5, **how)
    assert drawn[0] != expected[0]
    assert torch.equal(state, torch.get_rng_state())


def test_samples_of_a_validation_see_their_images(one_base: Path, tmp_path: Path) -> None:
    shown = tmp_path / "a.png"
    picture(0, 40, 70).save(shown)
    rows = str(write_rows(tmp_path / "data"))
    data = data_of(rows, one_base, tmp_path, val=rows)
    how: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.0, "chat": True}
    prompts = ["What is", "What is"]
    sampler = SampleText(prompts, images=[[str(shown)], []], folder=str(tmp_path), **how)
    task = LanguageModeling(CausalLMConfig(str(one_base)), learning_rate=1e-12)
    quiet(max_steps=1, callbacks=[sampler]).fit(task, data)
    written = (tmp_path / "samples" / "step_0000001.txt").read_text()
    for text in with_processor(one_base).generate_text(prompts, images=[[str(shown)], []], **how):
        assert text in written


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"chat": False}, "chat must be true with images"),
        ({"images": [["a.png"]]}, "images must be a list of images for each of the 2 prompts"),
        ({"images": [["a.png"], []]}, "images: the image a.png cannot be read"),
        ({"images": [[], [b"no image"]]}, "images: an image cannot be read"),
        ({"max_new_tokens": 480}, "prompt 1 has .* tokens with those of its images, and the model reads 32 before"),
    ],
)
def test_prompts_with_unusable_images_are_refused(given: Any, reason: str, one_base: Path) -> None:
    usual = {"chat": True, "images": [[png(picture(0, 40, 70))], []], "max_new_tokens": 1}
    task = with_processor(one_base)
    with pytest.raises(ConfigurationError, match=f"generate_text.*{reason}"):
        task.generate_text(["What is", "in the picture?"], **(usual | given))
    if "images" not in given:
        return
    task.tokenizer_state = pack_tokenizer(task.tokenizer)
    with pytest.raises(ConfigurationError, match="images need a model that was trained with a processor"):
        task.generate_text(["a", "b"], **usual)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"chat": False}, "chat must be true with images"),
        ({"images": ["a.png"]}, "images must be a list of files for each of the 1 prompts"),
        ({}, "images must be files that exist"),
    ],
)
def test_samples_with_unusable_images_are_refused(given: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"SampleText: {reason}"):
        SampleText(["a"], **({"chat": True, "images": [["a.png"]]} | given))


def test_what_cannot_work_with_images_is_refused(one_base: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "data")
    usual = {"train": str(rows), "processor": str(one_base), "val_fraction": 0.0, "cache_dir": str(tmp_path / "cache")}
    drop = LanguageChat(truncation="drop")
    for given, reason in (
        ({"chat": drop}, "pack must be false with a processor"),
        ({"pack": False}, "chat.truncation must be drop with a processor"),
        ({"pack": False, "chat": drop, "tokenizer": str(one_base)}, "tokenizer must be null with a processor"),
        ({"pack": False, "chat": drop, "stream": LanguageStream(True)}, "rows with images are not streamed"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            LanguageData(**{**usual, **given})  # type: ignore[arg-type]
    text = tmp_path / "text"
    shutil.copytree(one_base, text)
    for name in ("processor_config.json", "preprocessor_config.json"):
        (text / name).unlink()
    config = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 400}
    (text / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match="no processor of images and text"):
        data_of(rows, text, tmp_path)
    texts = {"val_fraction": 0.0, "cache_dir": str(tmp_path / "cache"), "tokenizer": str(one_base)}
    pictured = rows_file(tmp_path / "one", {"messages": [user(None, "a"), answer("b")], "images": ["a.png"]})
    plain = rows_file(tmp_path / "two", {"messages": [user("a"), answer("b")]})
    for train, reason in (
        (pictured, "only text is read (LanguageData reads images with a"),
        (plain, "name the model as proc"),
    ):
        data = LanguageData(train=str(train), **texts)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=re.escape(reason)):
            data.prepare_data()
    fields = {**config, "intermediate_size": 16, "num_hidden_layers": 1}
    task = LanguageModeling(CausalLMConfig(config_fields=fields))
    with pytest.raises(ConfigurationError, match=r"processor is .* and the model of LanguageModeling reads text only"):
        quiet(max_steps=1).fit(task, LanguageData(**usual, pack=False, chat=drop))  # type: ignore[arg-type]
    task.configure_model()
    batch = batch_in_order(data_of(rows, one_base, tmp_path))
    with pytest.raises(ConfigurationError, match=r"\(pixel_values\), and LlamaForCausalLM reads text only"):
        task._losses(batch)


@pytest.mark.parametrize("technique", [PrefixTuning, PromptTuning])
def test_virtual_tokens_are_refused_with_images(technique: Any, one_base: Path, tmp_path: Path) -> None:
    data = data_of(write_rows(tmp_path / "data"), one_base, tmp_path)
    task = LanguageModeling(CausalLMConfig(str(one_base)))
    virtual = technique(init="random", num_virtual_tokens=3)
    with pytest.raises(ConfigurationError, match="prefix and prompt tuning cannot be used with images"):
        quiet(max_steps=1, callbacks=[virtual]).fit(task, data)


def test_rows_with_images_are_not_cut_or_packed(one_base: Path, tmp_path: Path) -> None:
    data = data_of(write_rows(tmp_path / "data"), one_base, tmp_path)
    task = LanguageModeling(CausalLMConfig(str(one_base)))
    ramp = SequenceLengthRamp(start=16, steps=10)
    with pytest.raises(ConfigurationError, match="SequenceLengthRamp: the batch holds images"):
        quiet(max_steps=1, callbacks=[ramp]).fit(task, data)
    batch = batch_in_order(data)
    packed = {name: value for name, value in batch.items() if name != "attention_mask"}
    packed["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]) % 20
    task.configure_model()
    with pytest.raises(ConfigurationError, match="rows with images cannot be packed"):
        task._losses(packed)


def config_of(folder: Path) -> list[str]:
    """Return arguments that let the config train a tiny Idefics 3 on the conversations, all in a folder."""
    save_model("idefics3", folder / "base")
    write_rows(folder / "data").rename(folder / "data" / "train.jsonl")
    changed = {
        "model.init_args.model.name_or_path": "base",
        "model.init_args.warmup_steps": 0,
        "data.init_args.processor": "base",
        "data.init_args.max_length": 512,
        "data.init_args.num_workers": 0,
        "data.init_args.cache_dir": folder / "cache",
        "trainer.accelerator": "cpu",
        "trainer.precision": "32-true",
        "trainer.accumulate_grad_batches": 1,
        "trainer.logger": "false",
    }
    return ["-c", "llm/image_text", *(f"--{name}={value}" for name, value in changed.items())]


@pytest.mark.turns(6, family="slow")
def test_the_config_trains_what_it_says_and_exports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForImageTextToText

    monkeypatch.chdir(tmp_path)
    assert main(["fit", *config_of(tmp_path)]) == 0
    last = next((tmp_path / "runs").rglob("last.ckpt"))
    assert main(["export", str(last), "--format", "merged", "--output", "tuned", "--no_check"]) == 0
    before = AutoModelForImageTextToText.from_pretrained("base").state_dict()
    after = AutoModelForImageTextToText.from_pretrained("tuned").state_dict()
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert {name.split(".")[1] for name in moved} == {"text_model", "connector"}
    asked = "--chat --prompt 'What is in the picture?' --image data/0_0.png"
    assert asked in capsys.readouterr().out
    how = [*shlex.split(asked), "--temperature", "0", "--max_new_tokens", "8"]
    assert main(["generate", "--ckpt", str(last), *how]) == 0
    processor = load_processor("tuned")
    turn = [user(None, "What is in the picture?")]
    text = processor.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[text], images=[[picture(*IMAGES[0][0])]], add_special_tokens=False, return_tensors="pt")
    tuned = AutoModelForImageTextToText.from_pretrained("tuned")
    found = tuned.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert capsys.readouterr().out == processor.tokenizer.decode(found) + "\n"


class Planned(FitSource):
    """Two equal rows with two images each, trained with LoRA."""

    def __init__(self, base: Path, folder: Path) -> None:
        rows = write_rows(folder / "data")
        line = rows.read_text().splitlines()[2]
        rows.write_text(f"{line}\n{line}")
        self.data: dict[str, Any] = {"train": str(rows), "processor": str(base), "cache_dir": str(folder / "cache")}

    def make(self, change: Change = AS_IT_IS) -> Fit:
        trainer = quiet(max_steps=5, max_epochs=-1, callbacks=[LoRA(rank=2), *change.callbacks()])
        how: dict[str, Any] = {"max_length": 256, "val_fraction": 0.0, "batch_size": 2, "pack": False}
        data = LanguageData(**self.data, **how, chat=LanguageChat(truncation="drop"))
        return Fit(trainer, LanguageModeling(CausalLMConfig(self.data["processor"])), data)


@pytest.mark.turns(8)
def test_a_plan_counts_what_a_step_with_images_takes(family: str, base: Path, tmp_path: Path) -> None:
    """Networks split tensors by the sizes and the values of images."""
    planned = plan(Planned(base, tmp_path))
    assert planned.peak == pytest.approx(measure(Planned(base, tmp_path))["peak"], rel=0.01)
    assert planned.at_most == planned.at_least == ""


@pytest.mark.turns(6, family="slow")
def test_a_plan_without_data_says_that_it_counts_no_images(one_base: Path, tmp_path: Path) -> None:
    source = Planned(one_base, tmp_path)
    shutil.rmtree(tmp_path / "data")
    assert "The batch holds no images, which take more memory." in plan(source).notes
