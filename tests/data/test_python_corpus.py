import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from lit_efficient.data.python_corpus import PythonCorpus, TokenWindows
from lit_efficient.data.text import token_cache
from lit_efficient.data.text.arguments import CorpusFiles
from lit_efficient.data.text.text_files import TextFile, find_files, read_texts, split_texts, standard_library
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import cache_root, prepared_folder


def write_corpus(folder: Path, count: int = 40) -> Path:
    for index in range(count):
        path = folder / f"part{index % 3}" / f"file{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"def function_{index}(self, value):\n    total = value * {index}\n    return total + {index * 7}  # é\n"
            * 3
        )
    return folder


def corpus(tmp_path: Path, **changes) -> PythonCorpus:
    source = tmp_path / "source"
    if not source.exists():
        write_corpus(source)
    settings = {"vocab_size": 300, "sequence_length": 16, "batch_size": 4, "val_fraction": 0.2}
    files = CorpusFiles(paths=changes.pop("paths", [str(source)]))
    return PythonCorpus(**(settings | {"files": files, "cache_dir": str(tmp_path / "cache")} | changes))


def ready(data: PythonCorpus) -> PythonCorpus:
    data.prepare_data()
    data.setup("fit")
    return data


def cache_folders(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "cache" / "text").iterdir() if path.is_dir())


def test_batches_follow_the_convention(tmp_path: Path) -> None:
    data = ready(corpus(tmp_path))
    batch = next(iter(data.train_dataloader()))
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (4, 16),
        "shift_labels": (4, 16),
    }
    assert torch.equal(batch["input_ids"][:, 1:], batch["shift_labels"][:, :-1])
    assert batch["shift_labels"].dtype == torch.int64
    assert isinstance(data.train_dataloader().sampler, torch.utils.data.RandomSampler)


def test_windows_do_not_overlap_and_cover_the_text() -> None:
    windows = TokenWindows(np.arange(34, dtype=np.uint16), 8)
    assert len(windows) == 4
    assert torch.cat([windows[i]["input_ids"] for i in range(4)]).tolist() == list(range(32))
    assert windows[3]["shift_labels"].tolist() == list(range(25, 33))
    assert len(TokenWindows(np.arange(8, dtype=np.uint16), 8)) == 0
    with pytest.raises(IndexError):
        windows[4]


def test_bytes_of_validation_windows_are_exact(tmp_path: Path) -> None:
    data = ready(corpus(tmp_path))
    assert data.val_windows is not None
    for index in range(len(data.val_windows)):
        item = data.val_windows[index]
        spelled = [data.tokenizer.id_to_token(token) for token in item["shift_labels"].tolist()]
        expected = sum(len(token) for token in spelled if token != token_cache.END_OF_TEXT)
        assert item["num_bytes"] == expected
    # decoding whole files gives back their bytes: é takes two
    tokens = token_cache.open_tokens(cache_folders(tmp_path)[0], "val")
    text = data.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
    sizes = token_cache.bytes_of_tokens(data.tokenizer)
    assert sizes[tokens].sum() == len(text.encode())
    assert "é" in text


def test_training_and_validation_files_are_apart_and_complete(tmp_path: Path) -> None:
    data = ready(corpus(tmp_path))
    folder = cache_folders(tmp_path)[0]
    texts = {}
    for split in ("train", "val"):
        ids = token_cache.open_tokens(folder, split).tolist()
        joined = data.tokenizer.decode(ids, skip_special_tokens=False)
        texts[split] = set(joined.split(token_cache.END_OF_TEXT)) - {""}
    written = {path.read_text() for path in (tmp_path / "source").rglob("*.py")}
    assert texts["train"] | texts["val"] == written
    assert not texts["train"] & texts["val"]
    assert 0 < len(texts["val"]) < len(texts["train"])


def test_the_split_does_not_move_when_files_come_or_go() -> None:
    files = [TextFile(f"folder/{index}.py", f"text {index}", str(index)) for index in range(200)]
    _, all_held = split_texts(files, 0.1, seed=0)
    _, fewer_held = split_texts(files[:150], 0.1, seed=0)
    assert set(fewer_held) == set(all_held) & {file.text for file in files[:150]}
    assert 8 <= len(all_held) <= 35
    assert set(split_texts(files, 0.1, seed=1)[1]) != set(all_held)


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
@pytest.mark.parametrize("names", [["a", "b"], ["same", "same", "same"]])
def test_both_sides_of_a_split_get_a_file(names: list[str], fraction: float) -> None:
    files = [TextFile(name, f"text {index}", str(index)) for index, name in enumerate(names)]
    train, val = split_texts(files, fraction, seed=0)
    assert train
    assert val
    assert sorted(train + val) == [file.text for file in files]


def test_a_single_file_is_cut_once() -> None:
    text = "".join(chr(97 + i % 26) for i in range(1000))
    train, val = split_texts([TextFile("input.txt", text, "")], 0.1, seed=0)
    assert train[0] + val[0] == text
    assert len(val[0]) == 100


def test_duplicates_and_binary_files_are_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_corpus(tmp_path / "source")
    (source / "zz_copy.py").write_text((source / "part0" / "file0.py").read_text())
    (source / "zz_latin.py").write_bytes("x = 'é'".encode("latin-1"))
    (source / "zz_empty.py").write_text("  \n")
    texts = read_texts(find_files([source], [".py"], []))
    assert texts.duplicates == ["zz_copy.py"]
    assert texts.unreadable == ["zz_latin.py"]
    assert len(texts.files) == 40
    with caplog.at_level("INFO"):
        corpus(tmp_path).prepare_data()
    assert "1 duplicates (such as zz_copy.py), 1 not UTF-8 (such as zz_latin.py)" in caplog.text


def test_files_below_excluded_and_hidden_folders_are_passed_over(tmp_path: Path) -> None:
    for name in ("a.py", "tests/b.py", "deep/tests/c.py", ".venv/d.py", "deep/e.py", "f.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    found = [relative for relative, _ in find_files([tmp_path], [".py"], ["tests"])]
    assert found == ["a.py", "deep/e.py"]
    assert [relative for relative, _ in find_files([tmp_path / "f.txt"], [".py"], [])] == ["f.txt"]


def test_the_cache_is_used_again_and_follows_content_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready(corpus(tmp_path))
    monkeypatch.setattr(token_cache, "train_tokenizer", lambda *_: pytest.fail("trained again"))
    ready(corpus(tmp_path, sequence_length=8, batch_size=2))
    monkeypatch.undo()
    assert len(cache_folders(tmp_path)) == 1
    ready(corpus(tmp_path, vocab_size=280))
    ready(corpus(tmp_path, seed=1))
    (tmp_path / "source" / "part0" / "file0.py").write_text("changed = True\n" * 9)
    ready(corpus(tmp_path))
    assert len(cache_folders(tmp_path)) == 4


def test_a_setup_without_prepare_opens_the_same_cache(tmp_path: Path) -> None:
    first, second = ready(corpus(tmp_path)), corpus(tmp_path)
    second.setup("fit")  # as in all processes but the first
    assert first.tokenizer.to_str() == second.tokenizer.to_str()
    assert torch.equal(first.train_windows[3]["input_ids"], second.train_windows[3]["input_ids"])


def test_the_tokenizer_learns_from_training_files_only(tmp_path: Path) -> None:
    data = ready(corpus(tmp_path, vocab_size=400))
    files = read_texts(find_files([tmp_path / "source"], [".py"], [])).files
    train, _ = split_texts(files, 0.2, 0)
    assert token_cache.train_tokenizer(train, 400).to_str() == data.tokenizer.to_str()
    assert (cache_folders(tmp_path)[0] / "tokenizer.json").is_file()
    assert data.vocab_size == data.tokenizer.get_vocab_size() <= 400


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_a_damaged_cache_is_refused_with_the_way_out(tmp_path: Path, damage: str) -> None:
    whole = ready(corpus(tmp_path)).train_windows[2]["input_ids"].clone()
    path = cache_folders(tmp_path)[0] / ("manifest.json" if damage == "manifest" else "train.bin")
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        content[50] ^= 1
        path.write_bytes(content[:40] if damage in {"truncate", "manifest"} else content)
    data = corpus(tmp_path)
    with pytest.raises(ConfigurationError, match=rf"is damaged: {path.name} .* Delete the folder and run again"):
        data.prepare_data()
    shutil.rmtree(path.parent)
    data.prepare_data()
    data.setup("fit")
    assert torch.equal(data.train_windows[2]["input_ids"], whole)
    assert not [path for path in (tmp_path / "cache" / "text").iterdir() if path.name.startswith(".")]


def test_a_killed_preparation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(token_cache, "write_token_cache", killed)
    with pytest.raises(KeyboardInterrupt):
        corpus(tmp_path).prepare_data()
    assert [path.suffix for path in (tmp_path / "cache" / "text").iterdir()] == [".lock"]


def test_a_tokenizer_of_another_run_can_be_used(tmp_path: Path) -> None:
    first = ready(corpus(tmp_path))
    other = write_corpus(tmp_path / "other", count=20)
    saved = tmp_path / "tokenizer.json"
    first.tokenizer.save(str(saved))
    second = ready(corpus(tmp_path, paths=[str(other)], tokenizer_file=str(saved), seed=3))
    assert second.tokenizer.to_str() == first.tokenizer.to_str()
    assert second.vocab_size == first.vocab_size
    saved.write_text("{}")
    with pytest.raises(ConfigurationError, match=r"tokenizer_file: .*tokenizer\.json holds no tokenizer"):
        corpus(tmp_path, tokenizer_file=str(saved)).prepare_data()
    with pytest.raises(ConfigurationError, match=r"tokenizer_file: .*cannot be read"):
        corpus(tmp_path, tokenizer_file=str(tmp_path / "missing.json")).prepare_data()


def test_a_text_that_spells_the_separator_is_not_ended_by_it(tmp_path: Path) -> None:
    for index in range(20):
        (tmp_path / f"{index}.py").write_text(f"mark_{index} = '{token_cache.END_OF_TEXT}'\n" * 20)
    data = ready(corpus(tmp_path, paths=[str(tmp_path)]))
    tokens = token_cache.open_tokens(cache_folders(tmp_path)[0], "train")
    ends = int((tokens == data.tokenizer.token_to_id(token_cache.END_OF_TEXT)).sum())
    assert ends == json.loads((cache_folders(tmp_path)[0] / "manifest.json").read_text())["train_files"]


def test_a_large_vocabulary_takes_wider_ids(tmp_path: Path) -> None:
    words = [token_cache.END_OF_TEXT, "some", "text", *(f"extra{index}" for index in range(70_000))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="some"))
    token_cache.write_token_cache(tmp_path, tokenizer, ["some text"], ["extra69999"], {})
    assert token_cache.open_tokens(tmp_path, "val").dtype == np.uint32
    assert token_cache.open_tokens(tmp_path, "val")[0] > 2**16


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vocab_size": 256}, "vocab_size must be a whole number of at least 257, got 256"),
        ({"sequence_length": 0}, "sequence_length must be a whole number of at least 1, got 0"),
        ({"val_batch_size": 0}, "val_batch_size must be a whole number of at least 1 or null, got 0"),
        ({"val_fraction": 1.0}, "val_fraction must be at least 0 and below 1, got 1.0"),
        ({"paths": []}, r"files.paths must be null, or at least one file or folder, got \[\]"),
        ({"prompts": [""]}, "prompts must be texts"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(tmp_path: Path, changes: dict, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        corpus(tmp_path, **changes)
    assert not (tmp_path / "cache").exists()


def test_bad_input_is_a_sentence_and_leaves_no_cache(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigurationError, match=r"no such file or folder: .*nowhere"):
        corpus(tmp_path, paths=[str(tmp_path / "nowhere")]).prepare_data()
    with pytest.raises(ConfigurationError, match=r"empty holds no file that ends with one of suffixes = \['.py'\]"):
        corpus(tmp_path, paths=[str(empty)]).prepare_data()
    (empty / "a.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match=r"hold no text: 1 files were found, all empty or not UTF-8"):
        corpus(tmp_path, paths=[str(empty)]).prepare_data()
    assert not (tmp_path / "cache").exists()


def test_too_little_text_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"too little text: the .* split has .* tokens"):
        ready(corpus(tmp_path, sequence_length=100_000))
    with pytest.raises(ConfigurationError, match="batch_size must be at most the number of training windows"):
        ready(corpus(tmp_path, batch_size=100_000))


def test_an_unwritable_cache_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"cannot be written: .* Set cache_dir or LIT_EFFICIENT_CACHE"):
        corpus(tmp_path, cache_dir=str(tmp_path / "file")).prepare_data()


def test_cache_root_creates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_EFFICIENT_CACHE", str(tmp_path / "here"))
    assert cache_root() == tmp_path / "here"
    assert not (tmp_path / "here").exists()
    monkeypatch.delenv("LIT_EFFICIENT_CACHE")
    assert cache_root() == Path.home() / ".cache" / "lit_efficient"


def test_a_prepared_folder_is_built_once(tmp_path: Path) -> None:
    calls = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "content").write_text("x")

    for _ in range(2):
        assert prepared_folder(tmp_path / "made", build, lambda _: None) == tmp_path / "made"
    assert len(calls) == 1
    assert (tmp_path / "made" / "content").read_text() == "x"


def test_a_few_files_of_the_standard_library(tmp_path: Path) -> None:
    source = tmp_path / "json_and_email"
    for package in ("json", "email"):
        shutil.copytree(standard_library() / package, source / package, ignore=lambda _, names: {"__pycache__"})
    data = ready(corpus(tmp_path, paths=[str(source)], vocab_size=600, sequence_length=64, val_batch_size=2))
    assert data.vocab_size == 600
    assert data.val_dataloader().batch_size == 2
    assert len(data.train_dataloader()) == len(data.train_windows) // 4
    text = data.tokenizer.decode(data.train_windows[0]["input_ids"].tolist())
    assert text.isprintable() or "\n" in text
    prompts = list(data.predict_dataloader())
    assert prompts[0] == {"prompts": ["def main("]}


@pytest.mark.parametrize(("field", "value"), [("suffixes", 5), ("suffixes", ".py"), ("exclude", [1])])
def test_files_are_chosen_by_texts(field, value) -> None:
    with pytest.raises(ConfigurationError, match=rf"PythonCorpus: files.{field} must be a list of texts, got "):
        CorpusFiles(**{field: value})


def test_all_files_train_without_a_validation_part(tmp_path: Path) -> None:
    write_corpus(tmp_path / "source")
    (tmp_path / "source" / "empty.py").touch()
    data = ready(corpus(tmp_path, val_fraction=0))
    files = read_texts(find_files([tmp_path / "source"], [".py"], []))
    assert files.empty == ["empty.py"]
    ids = np.asarray(token_cache.open_tokens(data._folder, "train"))
    assert data.tokenizer.decode(ids.tolist()) == "".join(file.text for file in files.files)
    assert data.val_dataloader() == []
