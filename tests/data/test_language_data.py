import json
import json.decoder
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_efficient import CausalLMConfig, GPTConfig, LanguageModeling, PythonCorpus
from lit_efficient.callbacks.exact_resume import ExactResume
from lit_efficient.cli.next_steps import evaluations
from lit_efficient.data.language_data import LanguageData
from lit_efficient.data.text import chat_cache, in_processes
from lit_efficient.data.text.arguments import LanguageChat, LanguageRows, LanguageStream
from lit_efficient.data.text.rows import STDLIB_PACKAGES, open_sources
from lit_efficient.data.text.text_files import standard_library
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import MANIFEST, read_manifest, write_json
from lit_efficient.losses.next_token import IGNORE
from lit_efficient.mechanisms.order.resumable_loader import make_resumable
from lit_efficient.mechanisms.trials.probes import ProbeBatches
from tests.data.resumed import SaveAtSix, Watched
from tests.data.text.chat_kit import PLAIN, THINKING, tokenizer
from tests.support import trainer

COUNT = 60


def chat(index: int, words: int = 3) -> dict:
    answer = " ".join([f"w{index}"] * words)
    return {"messages": [{"role": "user", "content": f"Say {index}"}, {"role": "assistant", "content": answer}]}


def write_rows(path: Path, count: int = COUNT, start: int = 0) -> Path:
    path.write_text("\n".join(json.dumps(chat(i, 1 + i % 7)) for i in range(start, start + count)) + "\n", "utf-8")
    return path


def language_data(tmp_path: Path, **changes) -> LanguageData:
    source = tmp_path / "data.jsonl"
    if not source.exists():
        write_rows(source)
    if not (tmp_path / "tok").exists():
        tokenizer().save_pretrained(str(tmp_path / "tok"))
    settings = {"train": str(source), "tokenizer": str(tmp_path / "tok"), "max_length": 64, "val_fraction": 0.1}
    return LanguageData(**(settings | {"batch_size": 2, "cache_dir": str(tmp_path / "cache")} | changes))


def ready(data: LanguageData) -> LanguageData:
    data.prepare_data()
    data.setup("fit")
    return data


def caches(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache" / "language").iterdir() if path.is_dir()}


def answers(data: LanguageData, loader) -> list[str]:
    """Return the labels of all batches as text, document by document."""
    found = []
    for batch in loader:
        for labels in batch["labels"]:
            text = data.chat_tokenizer.decode(labels[labels != IGNORE])
            found += [part for part in text.split("<|im_end|>") if part]
    return found


def test_of_a_hubs_data_set_validation_has_a_split_of_its_own_and_both_the_subset(tmp_path: Path, monkeypatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked, splits = set(), {"train": range(3), "dev": [7]}

    def load_dataset(path: str, name: str, split: str, streaming: bool) -> object:
        asked.add((path, name, split))
        return datasets.Dataset.from_list([chat(i) for i in splits[split]])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)  # there is no network
    rows = LanguageRows(val_split="dev", subset="de")
    data = ready(language_data(tmp_path, train="somebody/chats", val="somebody/chats", rows=rows))
    assert asked == {("somebody/chats", "de", split) for split in splits}
    assert sorted(answers(data, data.train_dataloader())) == [f"w{i} w{i} w{i}" for i in splits["train"]]
    assert answers(data, data.val_dataloader()) == ["w7 w7 w7"]


def test_every_answer_is_learned_once_an_epoch_packed_or_not(tmp_path: Path) -> None:
    expected = sorted(" ".join([f"w{i}"] * (1 + i % 7)) for i in range(COUNT))
    for pack in (True, False):
        data = ready(language_data(tmp_path, pack=pack, batch_size=1))
        train, val = answers(data, data.train_dataloader()), answers(data, data.val_dataloader())
        assert sorted(train + val) == expected
        assert len(val) >= 1
        assert not set(train) & set(val)
        batch = next(iter(data.train_dataloader()))
        assert set(batch) == {"input_ids", "labels", "position_ids" if pack else "attention_mask"}
        rows = (data.report["counts"]["train"]["tokens"] / data.fill() / 64) if pack else len(train)
        assert len(data.train_dataloader()) == pytest.approx(rows)
        assert len(data.train_dataloader()) < 0.7 * len(train) or not pack
    assert data.stop_ids == sorted(data.chat_tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))
    assert data.report["counts"]["train"]["ended"] == data.report["counts"]["train"]["turns"] == len(train)


def test_no_label_stands_at_a_documents_start(tmp_path: Path) -> None:
    data = ready(language_data(tmp_path, chat=LanguageChat(train_on="all")))
    for batch in data.train_dataloader():
        assert (batch["labels"][batch["position_ids"] == 0] == IGNORE).all()
        assert (batch["labels"] != IGNORE).float().mean() > 0.5


def test_validation_counts_the_bytes_of_what_it_scores(tmp_path: Path) -> None:
    data = ready(language_data(tmp_path))
    for batch in data.val_dataloader():
        for labels, size in zip(batch["labels"], batch["num_bytes"]):
            text = data.chat_tokenizer.decode(labels[labels != IGNORE], skip_special_tokens=True)
            assert size == len(text.encode())


def test_the_batch_of_a_plan_has_the_longest_rows(tmp_path: Path) -> None:
    """Rows that are not packed differ in length, and memory is decided by the longest."""
    loader = ready(language_data(tmp_path, pack=False, batch_size=2)).train_dataloader()
    lengths = sorted(sum(len(ids) for ids, _, _ in row) for row in loader.dataset)
    assert lengths[0] < lengths[-1]
    batch = ProbeBatches(loader, ProbeBatches.find(loader, scan=512)).batch()
    assert batch["attention_mask"].sum(1).tolist() == lengths[-1:-3:-1]


def test_a_cache_of_another_format_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its manifest may have other entries, and its key is another one."""
    ready(language_data(tmp_path))
    (name,) = caches(tmp_path)
    cache = tmp_path / "cache" / "language" / name
    about = read_manifest(cache)
    about["made_from"] = {"sources": about["made_from"]["sources"], "format": 0}
    write_json(cache / MANIFEST, about)
    cache.rename(cache.with_name("old"))
    with caplog.at_level("INFO"):
        ready(language_data(tmp_path))
    assert "making the cache again, because the format of the cache changed since" in caplog.text


def test_the_cache_is_used_again_and_never_stale(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ready(language_data(tmp_path))
    first = caches(tmp_path)
    stamp = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.bin")}
    ready(language_data(tmp_path, batch_size=1, rows=LanguageRows(max_malformed=0.5), num_workers=1))
    assert caches(tmp_path) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.bin")} == stamp
    source = tmp_path / "data.jsonl"
    source.write_text(source.read_text().replace("w3", "W3", 1))
    caplog.clear()
    with caplog.at_level("INFO"):
        ready(language_data(tmp_path))
    assert "making the cache again, because data.jsonl changed since" in caplog.text
    assert len(caches(tmp_path)) == 2
    caplog.clear()
    with caplog.at_level("INFO"):
        ready(language_data(tmp_path, chat=LanguageChat(template=PLAIN)))
    assert "because the tokenizer or its chat template changed" in caplog.text
    for number, changes in enumerate(
        [{"chat": LanguageChat(train_on="all")}, {"seed": 1}, {"rows": LanguageRows(max_rows=50)}], 4
    ):
        ready(language_data(tmp_path, **changes))
        assert len(caches(tmp_path)) == number


def test_one_cache_serves_every_length(tmp_path: Path) -> None:
    """The rows equal those of a cache that was made for that length alone."""
    source = tmp_path / "long.jsonl"
    rows = [chat(i, 1 + i % 40) for i in range(40)] + [{"text": f"word{i} é " * 5 * i} for i in range(1, 9)]
    source.write_text("\n".join(map(json.dumps, rows[:40])))
    (tmp_path / "texts").mkdir()
    for i, row in enumerate(rows[40:]):
        (tmp_path / "texts" / f"{i}.txt").write_text(row["text"])
    train = [str(source), str(tmp_path / "texts")]

    def batches(cache: str, **changes) -> list[dict[str, torch.Tensor]]:
        data = ready(language_data(tmp_path, train=train, cache_dir=str(tmp_path / cache), batch_size=1, **changes))
        torch.manual_seed(0)
        return [*data.train_dataloader(), *data.val_dataloader()]

    for number, changes in enumerate(
        [{"max_length": 200}, {"max_length": 30}, {"max_length": 30, "chat": LanguageChat(truncation="left")}]
    ):
        shared, own = batches("cache", **changes), batches(f"own{number}", **changes)
        assert len(shared) == len(own) > 5
        assert all(torch.equal(one[name], other[name]) for one, other in zip(shared, own) for name in other)
    assert len(caches(tmp_path)) == 1


def test_rows_longer_than_the_model_reads_are_refused_before_they_are_tokenised(tmp_path: Path) -> None:
    data = language_data(tmp_path, max_length=64)
    model = LanguageModeling(GPTConfig(dim=16, depth=1, num_heads=2, max_length=32))
    wrong = "LanguageData: max_length must be at most what the model reads, max_length = 32 of LanguageModeling's model"
    with pytest.raises(ConfigurationError, match=f"{wrong}, got 64"):
        trainer().fit(model, datamodule=data)
    assert not (tmp_path / "cache").exists()
    corpus = PythonCorpus(sequence_length=64, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ConfigurationError, match=r"PythonCorpus: sequence_length must be at most .*= 32.*, got 64"):
        trainer().fit(model, datamodule=corpus)
    assert not (tmp_path / "cache").exists()
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}  # whose table of positions ends there
    learned = LanguageModeling(CausalLMConfig(config_fields={"model_type": "gpt2", **sizes}))
    with pytest.raises(ConfigurationError, match=f"{wrong}, got 64"):
        trainer().fit(learned, datamodule=data)
    assert not (tmp_path / "cache").exists()
    longest = LanguageModeling(GPTConfig(dim=16, depth=1, num_heads=2, max_length=64))
    trainer(max_steps=1, limit_val_batches=0).fit(longest, datamodule=data)


def test_rows_longer_than_a_rotary_embedding_is_made_for_are_mentioned(tmp_path: Path) -> None:
    """The rows are computed all the same. A scaling that is made for them says nothing."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 32}

    def said(length: int, **fields: Any) -> list[str]:
        model = CausalLMConfig(config_fields={"model_type": "llama", **sizes, **fields})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            data = language_data(tmp_path, max_length=length)
            trainer(max_steps=1, limit_val_batches=0).fit(LanguageModeling(model), datamodule=data)
        return [str(one.message) for one in caught if "rotary positions" in str(one.message)]

    longer = said(64)
    assert longer
    assert "max_length is 64" in longer[0]
    assert "made for 32 (max_position_embeddings)" in longer[0]
    assert not said(32)
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert not said(64, rope_parameters=scaled)
    assert not said(64, max_position_embeddings=64)


def test_another_template_is_another_mask_and_another_cache(tmp_path: Path) -> None:
    thinking = ready(language_data(tmp_path, chat=LanguageChat(template=THINKING)))
    assert all("</think>" in answer for answer in answers(thinking, thinking.val_dataloader()))


def test_a_damaged_cache_is_refused(tmp_path: Path) -> None:
    ready(language_data(tmp_path))
    (tokens,) = (tmp_path / "cache").rglob("train.tokens.bin")
    content = bytearray(tokens.read_bytes())
    content[5] ^= 1
    tokens.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"damaged: train.tokens.bin is not what was written"):
        language_data(tmp_path).prepare_data()
    tokens.write_bytes(content[:-4])
    with pytest.raises(ConfigurationError, match=r"train.tokens.bin has \d+ bytes"):
        language_data(tmp_path).setup("fit")


def test_setup_alone_opens_the_same_cache(tmp_path: Path) -> None:
    prepared = ready(language_data(tmp_path))
    alone = language_data(tmp_path)
    alone.setup("validate")
    assert alone.report == prepared.report
    assert alone.val_rows is not None
    assert isinstance(alone.val_rows.documents._tokens, np.memmap)


def test_what_the_template_drops_is_said_once_for_all_rows(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "named.jsonl")
    rows = [json.loads(line) for line in source.read_text("utf-8").splitlines()]
    for row in rows[:5]:
        row["messages"][-1]["thinking"] = "It is plain."
    source.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    with pytest.warns(UserWarning, match=r"does not write all that the rows hold: 'thinking' \(5 turns\)$"):
        ready(language_data(tmp_path, train=str(source)))


def test_malformed_rows_are_counted_shown_and_refused_above_the_threshold(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "bad.jsonl", 40)
    lines = source.read_text().splitlines()
    lines[3] = '{"messages": ['
    lines[10] = json.dumps({"messages": []})
    lines[20] = json.dumps({"messages": [{"role": "user", "content": "<|im_end|>"}, chat(0)["messages"][1]]})
    source.write_text("\n".join(lines))
    with pytest.raises(ConfigurationError) as error:
        language_data(tmp_path, train=str(source)).prepare_data()
    assert "3 of 40 rows for train are malformed (7.50%):" in str(error.value)
    assert "bad.jsonl:4: no JSON: " in str(error.value)
    assert "bad.jsonl:11: messages is empty" in str(error.value)
    assert "bad.jsonl:21: the text of a turn spells the control token" in str(error.value)
    assert "max_malformed allows 1.00%" in str(error.value)
    data = language_data(tmp_path, train=str(source), rows=LanguageRows(max_malformed=0.1))
    with pytest.warns(UserWarning, match="3 of 40 rows for train are malformed"):
        data.prepare_data()
    data.setup("fit")
    assert sum(data.report["counts"][split]["documents"] for split in ("train", "val")) == 37
    with pytest.raises(ConfigurationError, match="3 of 40 rows"):  # from the cache, with the old threshold
        language_data(tmp_path, train=str(source)).prepare_data()


def test_truncation_and_dropping_are_reported(tmp_path: Path) -> None:
    source = tmp_path / "long.jsonl"
    rows = [chat(i) for i in range(20)]
    rows[4]["messages"][0]["content"] = "why " * 100  # no room for the answer
    rows[5]["messages"][1]["content"] = "because " * 100
    source.write_text("\n".join(map(json.dumps, rows)))
    data = ready(language_data(tmp_path, train=str(source), val=str(write_rows(tmp_path / "val.jsonl", 5))))
    counts = data.report["counts"]["train"]
    assert (counts["rows"], counts["truncated"], counts["dropped"], counts["documents"]) == (20, 2, 1, 19)
    assert counts["tokens_lost"] > 100
    assert counts["turns"] == counts["ended"] == 20  # before anything was cut


def test_a_split_off_row_is_never_on_both_sides(tmp_path: Path) -> None:
    source = tmp_path / "twice.jsonl"
    rows = [json.dumps(chat(i % 15)) for i in range(60)]
    source.write_text("\n".join(rows))
    data = ready(language_data(tmp_path, train=str(source), val_fraction=0.3))
    assert not set(answers(data, data.train_dataloader())) & set(answers(data, data.val_dataloader()))


def test_sources_of_all_kinds_hold_the_same_rows(tmp_path: Path) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"instruction": f"Say {i}", "input": "", "output": f"w{i}"} for i in range(12)]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "dict"))
    for name, split in [
        ("a", "train"),
        ("rows.json", "train"),
        ("rows.parquet", "train"),
        ("saved", "train"),
        ("dict", "test"),
    ]:
        (source,) = open_sources(str(tmp_path / name), split=split)
        assert [row for _, row in source.rows()] == rows, name
        assert [row for _, row in source.rows()] == rows, f"{name}, read again"
    places = [place for place, _ in open_sources(str(tmp_path / "rows.parquet"))[0].rows()]
    assert places[:2] == ["rows.parquet, row 1", "rows.parquet, row 2"]
    before = open_sources(str(tmp_path / "saved"))[0].digest
    datasets.Dataset.from_list(rows[1:]).save_to_disk(str(tmp_path / "saved"))
    assert open_sources(str(tmp_path / "saved"))[0].digest != before
    with pytest.raises(ConfigurationError, match="split must be one of test, got 'train'"):
        open_sources(str(tmp_path / "dict"))


def test_texts_are_cut_into_pieces_and_packed(tmp_path: Path) -> None:
    for i in range(6):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{i}.txt").write_text(f"word{i} " * (10 + 60 * i))
    data = ready(language_data(tmp_path, train=str(tmp_path / "texts"), batch_size=1))
    counts = data.report["counts"]
    assert counts["train"]["documents"] + counts["val"]["documents"] > 12
    assert counts["train"]["truncated"] == counts["train"]["tokens_lost"] == 0
    assert data.report["formats"][0] == "0.txt: text, one document a file"
    text = "".join(answers(data, data.train_dataloader()) + answers(data, data.val_dataloader()))
    assert text.count("5") == 310  # none is lost at the edges of pieces, none is learned twice


def test_own_columns(tmp_path: Path) -> None:
    source = tmp_path / "qa.jsonl"
    source.write_text("\n".join(json.dumps({"q": f"Say {i}:", "a": f" w{i}"}) for i in range(20)))
    data = ready(
        language_data(tmp_path, train=str(source), rows=LanguageRows(columns={"prompt": "q", "completion": "a"}))
    )
    found = answers(data, data.val_dataloader())
    assert all(answer.startswith(" w") and "Say" not in answer for answer in found)
    assert found


def test_batches_of_similar_lengths_have_less_padding_and_all_rows(tmp_path: Path) -> None:
    data = {by: ready(language_data(tmp_path, pack=False, by_length=by, val_fraction=0)) for by in (False, True)}
    padding = {}
    for by, one in data.items():
        batches = list(one.train_dataloader())
        padding[by] = sum(batch["input_ids"].numel() for batch in batches) - int(one.train_rows.lengths.sum())
        assert len(set(answers(one, batches))) == COUNT
    assert padding[True] < padding[False] / 1.5


@pytest.mark.parametrize("changes", [{"max_length": 32}, {"pack": False, "by_length": True, "batch_size": 3}])
def test_interrupted_and_resumed_equals_uninterrupted_with_two_workers(tmp_path: Path, changes: Any) -> None:
    data = ready(language_data(tmp_path, num_workers=2, **changes))

    def loader():
        return make_resumable(data.train_dataloader(), seed=3, rank=0, epoch=lambda: 1)

    whole, states, current = [], [], loader()
    for batch in current:
        whole.append(batch)
        states.append(current.state_dict())
    assert len(whole) > 4
    resumed = loader()
    resumed.load_state_dict(states[1])
    rest = list(resumed)
    assert len(rest) == len(whole) - 2
    for found, expected in zip(rest, whole[2:]):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_ranks_share_the_rows(tmp_path: Path) -> None:
    data = ready(language_data(tmp_path, batch_size=1, max_length=32))
    assert data.train_rows is not None
    parts = []
    for rank in range(2):
        sampler = torch.utils.data.DistributedSampler(data.train_rows, 2, rank, drop_last=True)
        parts.append(set(sampler))
    assert not parts[0] & parts[1]
    assert len(parts[0] | parts[1]) == len(data.train_rows) // 2 * 2


def test_a_tokenizer_is_trained_on_the_training_rows_alone(tmp_path: Path) -> None:
    val = tmp_path / "val.jsonl"
    val.write_text(
        json.dumps({"messages": [chat(1)["messages"][0], {"role": "assistant", "content": "zyzzyva " * 20}]})
    )
    data = ready(
        language_data(tmp_path, tokenizer=None, chat=LanguageChat(vocab_size=300), val=str(val), max_length=256)
    )
    assert data.vocab_size <= 300
    assert "zy" not in data.tokenizer.get_vocab()
    assert data.tokenizer.to_str() == data.chat_tokenizer.backend_tokenizer.to_str()
    again = ready(
        language_data(tmp_path, tokenizer=None, chat=LanguageChat(vocab_size=300), val=str(val), max_length=256)
    )
    assert again._folder == data._folder
    assert read_manifest(again._folder)["end_of_turn"] == data.chat_tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_length": 1}, "max_length must be a whole number of at least 2, got 1"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"val_fraction": 1.0}, "val_fraction must be at least 0 and below 1, got 1.0"),
        ({"tokenizer": None, "chat": LanguageChat(template="chatml")}, "chat.template needs a tokenizer"),
        ({"train": []}, "must name at least one source"),
        ({"by_length": True}, "by_length must be false with packed rows, which have no padding"),
        ({"stream": LanguageStream(enabled=True)}, "stream.enabled needs a tokenizer and val"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(tmp_path: Path, changes: dict, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        language_data(tmp_path, **changes)


@pytest.mark.parametrize(
    ("group", "values", "sentence"),
    [
        (LanguageRows, {"max_malformed": 1.5}, "rows.max_malformed must be at least 0 and at most 1, got 1.5"),
        (LanguageRows, {"columns": {"question": "q"}}, "rows.columns may name .*got 'question'"),
        (LanguageRows, {"max_rows": 0}, "rows.max_rows must be a whole number of at least 1 or null, got 0"),
        (LanguageRows, {"format": "csv"}, "rows.format must be one of auto, tokens, .*got 'csv'"),
        (LanguageChat, {"vocab_size": 10}, "chat.vocab_size must be a whole number of at least 259, got 10"),
        (LanguageChat, {"train_on": "user"}, "chat.train_on must be one of assistant, completion, all, got 'user'"),
        (LanguageChat, {"truncation": "middle"}, "chat.truncation must be one of right, left, drop, got 'middle'"),
        (LanguageChat, {"untrained_end": "no"}, "chat.untrained_end must be one of refuse, warn, train, got 'no'"),
        (LanguageStream, {"buffer": 0}, "stream.buffer must be a whole number of at least 1, got 0"),
        (LanguageStream, {"epoch_batches": 0}, "stream.epoch_batches must be a whole number of at least 1, got 0"),
    ],
)
def test_a_group_is_checked_where_it_is_made(group: type, values: dict, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=f"LanguageData: {sentence}"):
        group(**values)


def test_bad_sources_are_sentences_and_leave_no_cache(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "no.json").write_text("{")
    (tmp_path / "odd.jsonl").write_text('{"question": "a"}\n')
    for train, sentence in [
        (str(tmp_path / "none.jsonl"), "no such file or folder"),
        (str(tmp_path / "empty"), "the folder holds no data"),
        (str(tmp_path / "no.json"), "is no JSON"),
        (str(tmp_path / "odd.jsonl"), r"no format has the keys \['question'\]"),
        ("nobody/no-such-data", "nor a data set that could be loaded from the hub"),
    ]:
        with pytest.raises(ConfigurationError, match=sentence):
            language_data(tmp_path, train=train).prepare_data()
    assert not (tmp_path / "cache" / "language").exists() or not caches(tmp_path)


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
@pytest.mark.parametrize("kind", ["auto", "text"])
def test_an_empty_shard_takes_no_row_from_the_others(tmp_path: Path, suffix: str, kind: Any) -> None:
    (tmp_path / "rows").mkdir()
    for i in range(6):
        rows = json.dumps({"text": f"w{i}"}) if suffix == "jsonl" else f"text\nw{i}"
        (tmp_path / "rows" / f"{i}.{suffix}").write_text("" if i in (0, 3) else rows + "\n")
    changes = {"train": str(tmp_path / "rows"), "rows": LanguageRows(format=kind), "batch_size": 1}
    data = ready(language_data(tmp_path, **changes))
    said = [text.split("<")[0] for loader in (data.train_dataloader(), data.val_dataloader())
            for batch in loader for text in [data.chat_tokenizer.decode(batch["input_ids"][0])]]  # fmt: skip
    assert f"0.{suffix}: no rows" in data.report["formats"]
    assert data.report["counts"]["train"]["rows"] + data.report["counts"]["val"]["rows"] == 4
    assert "w1" in " ".join(said)
    for shard in (tmp_path / "rows").iterdir():
        shard.write_text("")
    with pytest.raises(ConfigurationError, match="LanguageData: 0 different rows cannot be split"):
        ready(language_data(tmp_path, **changes))


def test_too_large_a_batch_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="batch_size must be at most the number of rows to train on"):
        ready(language_data(tmp_path, batch_size=1000))


def test_the_packages_of_the_standard_library_are_other_files_than_the_instructions_are_made_of() -> None:
    source = open_sources(STDLIB_PACKAGES)[0]
    rows = dict(source.rows())
    assert source.is_text
    assert source.digest == open_sources(STDLIB_PACKAGES)[0].digest
    assert all("/" in place for place in rows)
    assert rows[f"{STDLIB_PACKAGES}:json/decoder.py"] == {"text": Path(json.decoder.__file__).read_text("utf-8")}
    tops = {path.read_text("utf-8", "replace") for path in standard_library().glob("*.py")}
    assert not tops & {row["text"] for row in rows.values()}


@pytest.mark.turns(4)
def test_processes_write_the_cache_that_one_writes_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Malformed rows are listed in order, no matter whether reading or tokenising finds them."""
    lines = write_rows(tmp_path / "data.jsonl", 90).read_text().splitlines()
    bad = json.dumps({"messages": [{"role": "user", "content": "<|im_end|>"}, chat(0)["messages"][1]]})
    for place, line in ((3, "{"), (20, bad), (41, "{"), (42, bad), (88, "{")):
        lines[place] = line
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(chat_cache, "_CHUNK", 8)
    found = []
    for processes in (1, 2):
        monkeypatch.setattr(in_processes, "usable_processors", lambda count=processes: count)
        monkeypatch.setattr(in_processes, "_FIRST", 1)
        cache = str(tmp_path / f"cache{processes}")
        with pytest.warns(UserWarning, match="5 of 90 rows"):
            data = ready(language_data(tmp_path, cache_dir=cache, rows=LanguageRows(max_malformed=0.5)))
        found.append({file.name: file.read_bytes() for file in Path(cache).rglob("*") if file.is_file()})
        assert data.report["malformed"]["train"]["malformed"] == 5
        places = [int(place.rpartition(":")[2]) for place, _ in data.report["malformed"]["train"]["shown"]]
    assert found[0] == found[1]
    assert places == [4, 21, 42, 43, 89]


def test_all_rows_train_without_a_validation_part(tmp_path: Path) -> None:
    whole = ready(language_data(tmp_path, val_fraction=0, pack=False, batch_size=1))
    held = ready(language_data(tmp_path, pack=False, batch_size=1))
    parts = [*answers(held, held.train_dataloader()), *answers(held, held.val_dataloader())]
    assert sorted(answers(whole, whole.train_dataloader())) == sorted(parts)
    fitting = trainer(max_epochs=1, max_steps=-1)
    config = GPTConfig(whole.vocab_size, dim=8, depth=1, num_heads=1, max_length=64)
    fitting.fit(LanguageModeling(config), whole)
    assert fitting.global_step == COUNT
    assert evaluations(fitting) == []
    with pytest.raises(ConfigurationError, match="nothing is held out to validate on, because val_fraction is 0"):
        fitting.validate(LanguageModeling(config), whole)


def test_an_empty_text_is_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(36):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"The text number {number} is about {number * 7}. " * 4)
    settings: dict[str, Any] = {"train": str(tmp_path / "texts"), "val_fraction": 0, "tokenizer": str(tmp_path / "tok")}
    without = ready(language_data(tmp_path, **settings))
    (tmp_path / "texts" / "empty.txt").touch()
    caplog.set_level("INFO")
    data = ready(language_data(tmp_path, **settings))
    assert "1 empty texts for train are left out, the first is empty.txt" in caplog.text + capsys.readouterr().err
    assert data.report["counts"]["train"]["tokens"] == without.report["counts"]["train"]["tokens"]
    # Half of the lines of WikiText are empty.
    lines = ["", *(f"line {number} of the text" for number in range(20)), "  "]
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    rows = ready(language_data(tmp_path, **settings | {"train": str(tmp_path / "lines.jsonl")}))
    assert rows.report["empty"]["train"] == {"count": 2, "first": "lines.jsonl:1"}
    assert rows.report["counts"]["train"]["rows"] == 20
    for file in (tmp_path / "texts").iterdir():
        file.write_text("\n")
    with pytest.raises(ConfigurationError, match="the text is empty, and so are all 37 texts"):
        ready(language_data(tmp_path, **settings))


PHI = "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
PHI += "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
INST = "{% for m in messages %}{% if m.role == 'system' %}<<SYS>>{{ m.content }}<</SYS>>{% elif m.role == 'user' %}"
INST += "[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
ALPACA = "{% set of = {'system': '', 'user': '### Instruction:\\n', 'assistant': '### Response:\\n'} %}"
ALPACA += "{% for m in messages %}{{ of[m.role] + m.content + '<|im_end|>\\n\\n' }}{% endfor %}"
ALPACA += "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
VICUNA = "{% set of = {'system': '', 'user': 'USER: ', 'assistant': 'ASSISTANT: '} %}{% for m in messages %}"
VICUNA += "{{ of[m.role] + m.content + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
LLAMA3 = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content + '<|im_end|>' }}"
)
LLAMA3 += (
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)


@pytest.mark.parametrize("template", ["chatml", PHI, INST, ALPACA, VICUNA, LLAMA3])
def test_the_prompt_of_the_next_command_is_the_question_alone(template: str, tmp_path: Path) -> None:
    system = {"role": "system", "content": "You are a patient assistant who explains each step at great length."}
    rows = [json.dumps({"messages": [system, *chat(index)["messages"]]}) for index in range(COUNT)]
    (tmp_path / "system.jsonl").write_text("\n".join(rows))
    changes: dict[str, Any] = {"chat": LanguageChat(template=template, untrained_end="train"), "max_length": 256}
    made = ready(language_data(tmp_path, train=str(tmp_path / "system.jsonl"), **changes))
    assert made.example_prompt() == ("Say 0", True)


def test_the_prompt_of_the_next_command_is_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("def first(value):\n    return value\n" * 200)
    made = ready(language_data(tmp_path, train=str(tmp_path / "plain.txt")))
    assert made.example_prompt() == ("def first(value):", False)
    pairs = [json.dumps({"prompt": f"Count to {n}: ", "completion": "one"}) for n in range(COUNT)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(pairs))
    made = ready(language_data(tmp_path, train=str(tmp_path / "pairs.jsonl")))
    assert made.example_prompt() == ("Count to 0:", False)


def test_other_rows_are_named_when_a_run_resumes_inside_an_epoch(tmp_path: Path) -> None:
    saved = tmp_path / "six.ckpt"

    def run(steps: int, **arguments: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            made = trainer([ExactResume(seed=1), SaveAtSix(saved)], max_steps=steps, max_epochs=-1)
            made.fit(Watched(), language_data(tmp_path, pack=False, val_fraction=0.0), **arguments)
        return [str(one.message) for one in said if "training data" in str(one.message)]

    assert run(6) == []
    kept = saved.read_bytes()
    assert run(8, ckpt_path=saved) == []
    write_rows(tmp_path / "data.jsonl", start=100)  # as many rows with other contents
    (warning,) = run(8, ckpt_path=saved)
    assert "the training data, or settings with which they are read, have changed" in warning
    checkpoint = torch.load(saved, weights_only=True)
    (rows,) = checkpoint["callbacks"]["ExactResume"]["data"]
    rows[1] = ""  # as in checkpoints of earlier versions
    torch.save(checkpoint, saved)
    assert run(8, ckpt_path=saved) == []
    saved.write_bytes(kept)
    write_rows(tmp_path / "data.jsonl", 70)
    (warning,) = run(8, ckpt_path=saved)
    assert "rows when the checkpoint was written" in warning
