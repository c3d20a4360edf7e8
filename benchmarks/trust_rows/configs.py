"""Row 7: mistakes in configs. Each is reported by a sentence that names the key, before data is read.

Some changed values are legal. The schema of configs, which is generated from types, decides whether null or another
type is legal. `RIGHT` lists other legal numbers and strings, each with its reason.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import re
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.trust_rows import Piece
from benchmarks.warm_checks import warm_up
from lit_efficient.files import configs
from tests import processes
from tests.json_schema import is_valid

LINES = 10
SECONDS = 60  # of a check, on a busy machine
BYTES = 12 * 2**30
# Whose children have checked configs already; a few cases are not worth it.
SERVER = "ready" if "pytest" in sys.modules else "checks"
processes.MODULES["checks"] = ("benchmarks.warm_checks:warm_up", "bitsandbytes")
TWICE = "@@twice"
NOTHING = "no-such-thing"
# The task that an overlay is laid over; all others go over the language model.
BASES = {
    "diffusion": ("channels_last", "feature_matching", "hidden_alignment", "latent_alignment", "snr_weighting"),
    "bare": ("exact_resume", "fast_matmul"),
}
# Keys that people name themselves: of them none is the nearest.
FREE = re.compile(r"FeatureMatching\.layers\.|layers\.blocks|\.rates\.|\.tokens\.<")

# Values that are as unusual as right: what the name of a case ends with, and why it is right.
RIGHT: dict[str, str] = {
    r"seed_everything:zero": "a seed",
    r"\.(max_steps:(zero|huge)|max_epochs:zero)": "no step, or all that another end allows",
    r"\.(log_every_n_steps|gradient_clip_val|warmup_steps|weight_decay):(zero|huge)": "never, none, or later",
    r"\.(rate|lr|weight|held_out|num_workers|dropout|seed|guidance_scale|samples\.count|count):zero": "none of it",
    r":huge": "no number is too large by itself: memory, machines, the data and a run that diverges say so",
    r"\.temperature:zero": "the likeliest token",
    r"\.numbers\.zero:\w+": "where the numbers of a file have their zero",
    r"\.(monitor|filename|plot|project|name|save_dir|dirpath|teacher|prefix):word": "of what is made or found later",
    r"\.(layers_per_block|num_hidden_layers):zero": "a network without layers is one",
    r"\.max_position_embeddings:zero": "of rotary positions a table alone",
    r"\.(folder|train|val|tokenizer|name_or_path|autoencoder):word": "a hub's name, or looked for with the data",
    r"\.(subfolder|template|nvme_path):word": "looked for where it is used",
    r"data\.init_args\.num_classes:zero": "of labels that the data has",
    r"data\.init_args\.fields\.\w+:word": "a column, of which the data knows",
    r"images\.init_args\.train\.0\.(images|condition):word": "a folder, which is looked for with the data",
    r"images\.init_args\.train\.0\.prompt:word": "any text",
    r"\.(teacher_guidance|loss\.average|loss\.huber|share):zero": "none of it",
    r"\.(processor|experiment_name|tracking_uri):word": "a hub's name, or of what is made later",
    r"\.val_fraction:zero": "no rows are held out",
    r"\.rates\.\w+:typo": "a part of the network that is built with the data, which `check` does not read",
    r"self_flow:.*\.(decay|second_share):zero": "no average, no second time",
    r"\.tokens\.<\w+>:(typo|word)": "a new token, and words that the tokenizer knows",
    r"\.trigger:word": "any text",
    r"\.answers\.(prompts|model):word": "looked for with the data",
    r"\.least_reward:(negative|zero)": "a bound of any sign",
    r"\.limit_val_batches:zero": "no validation",
    r"\.beta:zero": "SelectiveBackprop chooses by chance alone then",
    r"latent_alignment:.*\.weight:zero": "the distance is measured, and adds nothing",
    r"\.default_root_dir:word": "a folder, which is made",
    r"(full_finetune.*\.decay|margin|\.epsilon|neftune.*\.alpha):zero": "an average of one step, no margin, no noise",
    r"warmup_stable_decay:.*\.(warmup|decay):zero": "no rise, no fall",
    r"token_weighted_accumulation:.*\.count:word": "a part of the batch, of which the data knows",
    r"\.patience:zero": "the first validation that is no better ends the run",
    r"scale/.*\.num_nodes:(negative|zero)": "`check --devices` gives it",
    r"\.config_fields\.sample_size:\w+": "diffusers has it for pipelines alone; nothing is computed with it",
}


# What follows of a value that is right by itself, and is said in the place of it.
FOLLOWS: dict[str, str] = {
    r"\.(num_classes|cross_attention_dim):(zero|null)": "a backbone that takes no conditions",
    r"\.(in|out|latent)_channels:(zero|huge|nan)|_block_types:empty": "the decoder must undo the encoder",
    r"autoencoder\.latent_channels:huge": "their channels must agree",
    r"\.image_size:huge": "backbone.size must be",
    r"\.text_training:null": "LoRA: targets: the pattern",  # of layers of the text encoders, which do not train then
}


# What is done to a value.


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield (*path, key), value
            yield from _paths(value, (*path, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _paths(value, (*path, index)) if isinstance(value, dict | list) else ()


def _misspelt(name: str) -> str:
    """Return a name without one of its letters, or a short name with another letter."""
    bare = name.rstrip("+-")
    middle = len(bare) // 2
    return (bare[:middle] + bare[middle + 1 :] if len(bare) > 3 else f"{bare}x") + name[len(bare) :]


def _wrong(value: Any) -> Any:
    kinds: list[tuple[Any, Any]] = [(bool, NOTHING), ((int, float), NOTHING), (str, {"no": "thing"}), (list, 3.5)]
    return next((other for kind, other in kinds if isinstance(value, kind)), 3 if isinstance(value, dict) else {"a": 1})


def _values(key: str, value: Any) -> dict[str, Any]:
    """Return the replacements of a value, by the kind of the mistake."""
    found: dict[str, Any] = {"type": _wrong(value)} | ({} if value is None else {"null": None})
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = type(value)
        found |= {"negative": number(-7), "zero": number(0), "nan": float("nan")}
        found |= {"huge": 10**15 if isinstance(value, int) else 1e30}
    if isinstance(value, list):
        found |= {"empty": []}
        if value and isinstance(value[0], int | float):
            found |= {"negative": [-7 for _ in value]}
    if isinstance(value, str):
        found |= {"class": _misspelt(value)} if key == "class_path" else {"word": NOTHING, "empty": ""}
    return found


@functools.cache
def _tree(name: str) -> Any:
    tree = yaml.safe_load(configs.known()[name].read_text("utf-8"))
    if (tree.get("data") or {}).get("class_path") == "LatentDigits":  # stage one, where a technique asks for data
        tree["data"].setdefault("init_args", {}).update(autoencoder_steps=2, judge_steps=2)
    return tree


@functools.cache
def _all() -> dict[str, tuple[str, tuple[Any, ...], str]]:
    """Return all mistakes, each once. A key of a class in several configs is tried in one of them."""
    found = {}
    known = set()
    for name, file in configs.known().items():
        tree = yaml.safe_load(file.read_text("utf-8"))
        for path, value in _paths(tree):
            key = str(path[-1])
            for kind in ("init_arg" if key == "init_args" else "typo", "twice", *_values(key, value)):
                one = (*_spot(tree, path), type(value), kind)
                if one not in known:
                    found[f"{name}:{'.'.join(map(str, path))}:{kind}"] = name, path, kind
                known.add(one)
    return found


def _spot(tree: Any, path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a key relative to its class: the class, and the path below it."""
    spot: tuple[Any, ...] = ()
    for part in path:
        if isinstance(tree, dict) and "class_path" in tree:
            spot = (tree["class_path"],)
        spot = (*spot, 0 if isinstance(part, int) else part)
        tree = tree[part]
    return spot


def _changed(tree: Any, path: tuple[Any, ...], kind: str) -> Any:
    """Return the tree with one mistake. A duplicated key carries a mark."""
    tree = copy.deepcopy(tree)
    parent = tree
    for part in path[:-1]:
        parent = parent[part]
    key = path[-1]
    entries = []
    for name, value in parent.items():
        if name != key:
            entries.append((name, value))
        elif kind in ("typo", "init_arg"):
            entries.append(("init_arg" if kind == "init_arg" else _misspelt(name), value))
        elif kind == "twice":
            entries += [(name, value), (f"{name}{TWICE}", copy.deepcopy(value))]
        else:
            entries.append((name, _values(str(key), value)[kind]))
    parent.clear()
    parent.update(entries)
    return tree


def _text(tree: Any) -> str:
    return str(yaml.safe_dump(tree, sort_keys=False, width=10_000)).replace(TWICE, "")


# What is said of it.


def command(*words: str) -> None:
    """Run a command in a separate process with limited memory."""
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    from lit_efficient.__main__ import main

    sys.exit(main(words))


def said(*words: str, seconds: float = SECONDS, job: Any = command) -> tuple[int | None, str]:
    """Return the exit code of a command (``None`` if it was killed) and its output."""
    log = Path("log.txt")
    log.unlink(missing_ok=True)
    process = processes.start(job, *words, log=log.resolve(), server=SERVER)
    process.join(seconds)
    ended = not process.is_alive()
    process.kill()
    process.join()
    text = log.read_text(errors="replace") if log.exists() else ""
    return process.exitcode if ended else None, text


def said_here(*words: str, seconds: float = SECONDS) -> tuple[int | None, str]:
    """Like `said`, in this process. It takes a tenth of the time, because imports are done."""
    warm_up()
    from lit_efficient.__main__ import main

    def late(*_: Any) -> None:
        raise TimeoutError

    printed = io.StringIO()
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(int(seconds))
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code: int | None = main(words)
    except (Exception, SystemExit):  # which a process of its own tells apart
        code = None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return code, printed.getvalue()


def error(text: str) -> str:
    """Return the error without the paths of this trial."""
    found = text[text.index("error: ") :] if "error: " in text else ""
    return re.sub(r"/\S*/tmp\w+/", "", found)


def refusal(code: int | None, text: str, *words: str) -> str:
    """Return what is wrong with a refusal; '' if it has few lines and contains all of ``words``."""
    if code is None:
        return "it did not end"
    if "Traceback" in text or code != 2:
        return f"exit code {code}: {(text.strip().splitlines() or ['nothing'])[-1][:200]}"
    message = error(text)
    if not message or len(message.splitlines()) > LINES:
        return f"{len(message.splitlines())} lines"
    missing = [word for word in words if word not in message and repr(word)[1:-1] not in message]
    return (
        f"no {' and no '.join(map(repr, missing))} in: {' / '.join(message.splitlines()[:3])[:250]}" if missing else ""
    )


def _words(name: str) -> list[str]:
    """Return the command that checks the config of a trial."""
    stem = name.rpartition("/")[2]
    if configs.known()[name].parent.name not in ("techniques", "loggers"):
        model = _tree(name).get("model", {})
        if "class_path" in model:
            return ["check", "-c", "case.yaml", *(["--devices=2"] if name.startswith("scale/") else [])]
        return [
            "check",
            "-c",
            "llm/llama_3_1_8b_qlora" if model else "language_model",
            "-c",
            "case.yaml",
            "--devices=2",
        ]
    base = "latent_diffusion" if stem in BASES["diffusion"] else "language_model"
    without = ["--without", "".join(part.capitalize() for part in stem.split("_"))] if stem in BASES["bare"] else []
    few = ["--data.autoencoder_steps=2", "--data.judge_steps=2"] if base == "latent_diffusion" else []
    return ["check", "-c", "base.yaml" if without else base, "-c", "case.yaml", *few]


@functools.cache
def _home() -> tempfile.TemporaryDirectory[str]:
    """A tiny model and its tokenizer at the paths that configs name: their headers make it by a run."""
    folder = tempfile.TemporaryDirectory()
    assert processes.run(_make_models, folder.name) == 0
    return folder


def _make_models(folder: str) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({token: index for index, token in enumerate([*alphabet, "<end>"])}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<end>{% endfor %}"
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=8192, **sizes, **heads))
    layers = {"num_hidden_layers": 8, "num_attention_heads": 2}
    teacher = BertModel(BertConfig(vocab_size=16, hidden_size=16, intermediate_size=16, **layers))
    teacher.save_pretrained(Path(folder, "path/to/a/transformers/model"))
    for name in ("runs/llm/base", "meta-llama/Llama-3.1-8B"):
        model.save_pretrained(Path(folder, name))
        tokenizer.save_pretrained(Path(folder, name))


def _prepare(name: str, tree: Any) -> None:
    Path("case.yaml").write_text(_text(tree))
    stem = name.rpartition("/")[2]
    if name.startswith(("llm/", "scale/")) or stem == "feature_matching":
        for made in Path(_home().name).iterdir():
            if not Path(made.name).is_symlink():
                Path(made.name).symlink_to(made)
    if stem in BASES["bare"]:
        base = yaml.safe_load(configs.known()["language_model"].read_text("utf-8"))
        own = {entry["class_path"] for entry in _tree(name)["trainer"]["callbacks+"]}
        base["trainer"]["callbacks"] = [one for one in base["trainer"]["callbacks"] if one["class_path"] not in own]
        Path("base.yaml").write_text(_text(base))


@functools.cache
def _as_it_is(name: str, ask: Any) -> tuple[int | None, str]:
    """What a check says of the config as it is shipped: some need a GPU, or files."""
    _prepare(name, _tree(name))
    code, text = ask(*_words(name))
    return code, error(text)


@functools.cache
def _schema() -> dict[str, Any]:
    file = Path(_home().name, "schema.json")
    if not file.exists():
        assert processes.run(command, "schema", log=file) == 0
    whole: dict[str, Any] = json.loads(file.read_text()[file.read_text().index("{") :])
    return whole


def _try_key(case: str, folder: Path) -> str:
    """What does not hold in a process that has checked before, or may take memory, is tried in one of its own."""
    if not case.endswith(":huge") and not _tried_key(case, folder, said_here):
        return ""
    return _tried_key(case, folder, said)


def _tried_key(case: str, folder: Path, ask: Any) -> str:
    name, path, kind = _all()[case]
    tree = _changed(_tree(name), path, kind)
    key = str(path[-1]).rstrip("+-")
    _home()
    _prepare(name, tree)
    code, text = ask(*_words(name))
    for link in folder.iterdir():
        link.unlink()
    if code == 0 or (code == 2 and (code, error(text)) == _as_it_is(name, ask)):
        if kind in ("null", "type", "empty") and is_valid(tree, _schema(), _schema()):
            return ""
        if any(re.search(f"{pattern}$", case) for pattern in RIGHT):
            return ""
        return f"accepted: {key}: {_at(tree, path)!r}" if kind not in ("typo", "twice", "init_arg") else "accepted"
    if kind == "huge" and code == 3 and re.search("out of memory|does not fit into memory", error(text)):  # which it is
        return refusal(2, text)
    wanted = [str(path[-2]) if FREE.search(case) and kind in ("type", "null", "word") else key]
    if kind in ("typo", "init_arg"):
        misspelt = "init_arg" if kind == "init_arg" else _misspelt(key)
        near = re.search(rf"(did you mean '([\w.]+\.)?|similar fields: ([\w]+, )*){re.escape(key)}\b", text)
        if not near and not FREE.search(case):
            return refusal(code, text, misspelt, f"did you mean {key!r}")
        wanted = [misspelt]
    if kind == "null" and key == "init_args":  # what lacks then is named, or what is no mapping
        owner = _at(_tree(name), path[:-1]).get("class_path", key)
        return refusal(code, text, *([] if "required and missing" in text else [owner]))
    if any(re.search(f"{pattern}$", case) and word in text for pattern, word in FOLLOWS.items()):
        return refusal(code, text)
    if kind == "class":
        value = _at(_tree(name), path)
        short = value.rpartition(".")[2]
        parts = zip(value.split("."), _misspelt(value).split("."), strict=False)
        part, near = next(((one, two) for one, two in parts if one != two), (short, _misspelt(short)))
        return refusal(code, text, near, f"did you mean {part!r}")
    return refusal(code, text, *wanted)


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


PIECES = (
    Piece(
        7,
        "config-keys",
        "A key of a shipped config or overlay is misspelt, of a wrong type, out of range, null or twice: `check` names "
        "it, and the nearest, in ten lines at most; what is legal after all is.",
        lambda: list(_all()),
        _try_key,
        in_ci=0,  # until what it finds is mended: values of other packages' fields, for the most part
    ),
)


# Damaged files.

GOOD = "trainer:\n  max_steps: 3\n  log_every_n_steps: 1\n"
CPU_SECONDS = 5
GROWTH = 2**30


def _bomb(levels: int = 9) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


def _below(key: str, text: str) -> str:
    return f"{key}:\n" + "".join(f"  {line}\n" for line in text.splitlines())


def _damaged() -> dict[str, tuple[bytes | str, bool]]:
    """Return the content of each damaged file, and whether it is still legal."""
    noise = bytes((7 * n * n + 13 * n) % 256 for n in range(5000))
    wrong: dict[str, bytes | str] = {
        "binary": noise,
        "pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07builtins\x94.",
        "png": b"\x89PNG\r\n\x1a\n" + noise,
        "zeros": bytes(4096),
        "zero-inside": GOOD.encode().replace(b"max", b"m\x00x"),
        "utf-16": GOOD.encode("utf-16"),
        "utf-16-le": GOOD.encode("utf-16-le"),
        "utf-16-be": GOOD.encode("utf-16-be"),
        "utf-32": GOOD.encode("utf-32"),
        "latin-1": b"# gr\xfc\xdfe\n" + GOOD.encode(),
        "half-a-letter": GOOD.encode() + "# ü".encode()[:-1],
        "bell": GOOD + "  \x07: 1\n",
        "empty": "",
        "spaces": "   \n \n",
        "comments": "# nothing\n# at all\n",
        "dashes": "---\n",
        "two-documents": f"{GOOD}---\n{GOOD}",
        "null": "null\n",
        "tilde": "~\n",
        "a-word": "hello\n",
        "a-number": "3\n",
        "a-truth": "true\n",
        "a-list": "- trainer\n- 3\n",
        "trainer-3": "trainer: 3\n",
        "trainer-null": "trainer:\n",
        "trainer-list": "trainer: [1, 2]\n",
        "trainer-word": "trainer: fast\n",
        "model-list": "model: [1]\n",
        "callbacks-3": "trainer:\n  callbacks: 3\n",
        "callbacks-mapping": "trainer:\n  callbacks: {a: 1}\n",
        "tabs": "trainer:\n\tmax_steps: 3\n",
        "bomb": _bomb(),
        "bomb-in-callbacks": _bomb() + "trainer:\n  callbacks: *a8\n",
        "bomb-in-model": _below("model", _bomb()),
        "bomb-in-layers": "trainer:\n  callbacks+:\n  - class_path: FeatureMatching\n    init_args:\n      layers:\n"
        + "".join(f"        {line}\n" for line in _bomb().splitlines()),
        "long-alias": f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 2000)}]\n",
        "loop": "trainer: &t\n  logger: *t\n",
        "loop-in-list": "trainer:\n  callbacks: &c\n  - *c\n",
        "loop-as-key": "? &k [*k]\n: 1\n",
        "loop-of-two": "trainer: &t {model: &m {a: *t}}\nmodel: *m\n",
        "merge-loop": "trainer: &t\n  <<: *t\n  max_steps: 3\n",
        "merge-a-number": "trainer:\n  <<: 3\n  max_steps: 3\n",
        "merge-a-list": "trainer:\n  <<: [1, 2]\n",
        "no-anchor": "trainer:\n  max_steps: *nothing\n",
        "10-mb-text": f"trainer:\n  precision: {'x' * 10_000_000}\n",
        "10-mb-comments": GOOD + f"# {'x' * 98}\n" * 100_000,
        "1-mb-list": f"trainer:\n  callbacks: [{', '.join(['1'] * 300_000)}]\n",
        "10-mb-binary": noise * 2000,
        "many-keys": "trainer:\n" + "".join(f"  key_{n}: {n}\n" for n in range(20_000)),
        "deep-lists": f"trainer:\n  callbacks: {'[' * 5000}{']' * 5000}\n",
        "deep-flow": f"trainer: {'{a: ' * 3000}1{'}' * 3000}\n",
        "deep-blocks": "".join(f"{' ' * n}a:\n" for n in range(900)),
        "deep-open": "[" * 100_000,
        "number-key": "1: 2\n",
        "number-key-inside": "trainer:\n  1: 2\n",
        "truth-key": "trainer:\n  true: 3\n",
        "on-key": "trainer:\n  on: 3\n",
        "null-key": "trainer:\n  null: 3\n",
        "float-key": "trainer:\n  1.5: 3\n",
        "date-key": "trainer:\n  2024-01-01: 3\n",
        "list-key": "trainer:\n  [1, 2]: 3\n",
        "mapping-key": "trainer:\n  {a: 1}: 3\n",
        "empty-key": "trainer:\n  '': 3\n",
        "nan": "trainer:\n  max_steps: .nan\n",
        "inf": "trainer:\n  max_steps: .inf\n",
        "minus-inf": "trainer:\n  max_epochs: -.inf\n",
        "nan-seed": "seed_everything: .nan\n",
        "nan-rate": "model:\n  init_args:\n    learning_rate: .nan\n",
        "inf-clip": "trainer:\n  gradient_clip_val: .nan\n",
        "python-object": "trainer: !!python/object/apply:os.system ['touch canary']\n",
        "python-object-new": "trainer:\n  max_steps: !!python/object/new:os.system ['touch canary']\n",
        "python-name": "trainer:\n  logger: !!python/name:os.system\n",
        "python-module": "trainer:\n  logger: !!python/module:antigravity\n",
        "python-tuple": "trainer:\n  devices: !!python/tuple [0, 1]\n",
        "own-tag": "trainer:\n  max_steps: !mine 3\n",
        "include": "trainer: !include /etc/passwd\n",
        "binary-tag": "trainer:\n  precision: !!binary aGVsbG8=\n",
        "bad-binary-tag": "trainer:\n  precision: !!binary a\n",
        "set-tag": "trainer:\n  devices: !!set {a, b}\n",
        "omap-tag": "trainer: !!omap [max_steps: 3]\n",
        "int-of-a-word": "trainer:\n  max_steps: !!int abc\n",
        "float-of-a-word": "trainer:\n  max_steps: !!float abc\n",
        "no-such-date": "trainer:\n  max_time: 2024-13-45\n",
        "date": "trainer:\n  max_steps: 2024-01-01\n",
        "yaml-version": f"%YAML 9.9\n---\n{GOOD}",
        "directive": f"%NOTHING x\n%TAG\n---\n{GOOD}",
        "many-digits": f"trainer:\n  max_steps: {'9' * 5000}\n",
        "many-digits-float": f"trainer:\n  gradient_clip_val: 1e{'9' * 50}\n",
        "open-quote": 'trainer:\n  precision: "32\n',
        "open-bracket": "trainer:\n  devices: [0, 1\n",
        "bad-escape": 'trainer:\n  precision: "\\q"\n',
        "bad-surrogate": 'trainer:\n  precision: "\\ud800"\n',
        "bad-indent": "trainer:\n    max_steps: 3\n  max_epochs: 1\n",
        "two-colons": "trainer:\n  max_steps: 3: 4\n",
        "at": "trainer:\n  max_steps: @3\n",
        "duplicate": "trainer:\n  max_steps: 3\n  max_steps: 4\n",
        "duplicate-section": "trainer:\n  max_steps: 3\ntrainer:\n  max_epochs: 4\n",
        "interpolation": "trainer:\n  max_steps: ${oc.env:HOME}\n",
        "json-lines": '{"trainer": {"max_steps": 3}}\n{"trainer": {"max_steps": 4}}\n',
        "python-source": "import os\nos.system('touch canary')\n",
        "git-conflict": "<<<<<<< HEAD\ntrainer:\n  max_steps: 3\n=======\ntrainer:\n  max_steps: 4\n>>>>>>> x\n",
        "html": "<!DOCTYPE html>\n<html><body>404: not found</body></html>\n",
        "toml": "[trainer]\nmax_steps = 3\n",
    }
    right: dict[str, bytes | str] = {
        "bom": b"\xef\xbb\xbf" + GOOD.encode(),
        "crlf": GOOD.replace("\n", "\r\n"),
        "cr": GOOD.replace("\n", "\r"),
        "no-last-line": GOOD.rstrip("\n"),
        "merge": "trainer:\n  <<: {max_steps: 3}\n  log_every_n_steps: 1\n",
        "json": '{"trainer": {"max_steps": 3}}',
        "100-kb-comments": GOOD + f"# {'x' * 98}\n" * 1000,
        "document-marks": f"---\n{GOOD}...\n",
        "letters": GOOD + "# größer, 大きい, 🙂\n",
    }
    return {**dict.fromkeys(wrong, False), **dict.fromkeys(right, True)} and {
        **{name: (content, False) for name, content in wrong.items()},
        **{name: (content, True) for name, content in right.items()},
    }


PLACES = ("config", "overlay", "section")
STRANGE = ("folder", "pipe", "dev-zero", "dev-null", "missing", "link-to-itself", "no-permission-to-enter")


def _measured(*words: str) -> None:
    """Like `command`, and return the memory and time it took."""
    import os
    import time

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    code = 1
    try:
        from lit_efficient.__main__ import main

        code = main(words)
    except BaseException:
        import traceback

        traceback.print_exc()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    Path("usage.txt").write_text(f"{time.process_time() - start} {grown * 1024}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _try_damaged(case: str, folder: Path) -> str:
    import os

    kind, place = case.rsplit(":", 1)
    bad = Path("bad.yaml")
    right = False
    if kind in STRANGE:
        if kind == "folder":
            bad.mkdir()
        elif kind == "pipe":
            os.mkfifo(bad)
        elif kind.startswith("dev-"):
            bad.symlink_to(kind.replace("dev-", "/dev/"))
        elif kind == "link-to-itself":
            bad.symlink_to(bad)
        elif kind == "no-permission-to-enter":
            Path("file").touch()
            bad = Path("file/bad.yaml")
    else:
        content, right = _damaged()[kind]
        if place == "section":
            text = content.decode("utf-8") if right and isinstance(content, bytes) else content
            content, right = (text, right) if isinstance(text, bytes) else _section(text, right)
        bad.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    words = {"config": [str(bad)], "overlay": ["language_model", "-c", str(bad)], "section": ["outer.yaml"]}[place]
    if place == "section":
        outer = yaml.safe_load(configs.known()["language_model"].read_text("utf-8"))
        Path("outer.yaml").write_text(_text({**outer, "trainer": str(bad)}))
    if right and place == "config":
        whole = yaml.safe_load(configs.known()["language_model"].read_text("utf-8"))
        Path("rest.yaml").write_text(_text({key: whole[key] for key in ("model", "data")}))
        words += ["-c", "rest.yaml"]
    code, text = said("check", "-c", *words, job=_measured)
    if Path("canary").exists():
        return "it ran code"
    if code is None:
        return "it did not end"
    seconds, grown = map(float, Path("usage.txt").read_text().split())
    if seconds > CPU_SECONDS or grown > GROWTH:
        return f"{seconds:.1f} s, {grown / 2**20:.0f} MiB more: {error(text)[:100]}"
    if right:
        return "" if code == 0 else f"refused: {error(text)[:200]}"
    if code == 0:
        return "accepted"
    fault = refusal(code, text)
    message = error(text)
    if not fault and not any(word in message for word in ("bad.yaml", "trainer", "model", "learning_rate")):
        fault = f"neither file nor key in: {message[:200]}"
    return fault or (f"{len(message)} letters" if len(message) > 1500 else "")


def _section(content: str, right: bool) -> tuple[str, bool]:
    """Return a file with only the section of the trainer."""
    mark = content[: content.startswith("\ufeff")]
    if not content.startswith(f"{mark}trainer:\n") or not right:
        return content, False
    return mark + "".join(f"{line.removeprefix('  ')}\n" for line in content.splitlines()[1:]), True


PIECES += (
    Piece(
        7,
        "config-damaged",
        "A config, an overlay or a section's file is damaged (binary, UTF-16, aliases that explode or hold themselves, "
        "empty, deep, huge, tags that run code, a pipe, ...): one sentence that names it, in 5 s of one core and 1 GiB "
        "of memory; and what is right after all is read.",
        lambda: [f"{kind}:{place}" for kind in (*_damaged(), *STRANGE) for place in PLACES],
        _try_damaged,
        in_ci=0,
    ),
)


# What can be known before data is read.

# Options of a run of the language model or, with "d:", of latent diffusion; the words that its refusal has.
KNOWN: dict[str, tuple[list[str], list[str]]] = {
    "windows longer than the model reads": (["--data.sequence_length=1024"], ["sequence_length", "max_length", "1024"]),
    "heads that do not divide": (["--model.model.num_heads=3"], ["num_heads", "128"]),
    "a monitor that nobody logs": (["MODELCHECKPOINT", "--trainer.callbacks.monitor=val/los"], ["val/los"]),
    "a stop that nobody logs": (["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/los"],
                                ["val/los"]),
    "a mode that is none": (["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.mode=least"],
                            ["mode", "least"]),
    "targets that match nothing": (["--trainer.callbacks+=LoRA", "--trainer.callbacks.targets=[no_such]"],
                                   ["LoRA", "no_such"]),
    "modules to save that are none": (["--trainer.callbacks+=LoRA", "--trainer.callbacks.modules_to_save=[no_such]"],
                                      ["LoRA", "no_such"]),
    "a head that is not there": (["--trainer.callbacks+=ReplaceHead", "--trainer.callbacks.num_outputs=3",
                                  "--trainer.callbacks.at=no_such"], ["ReplaceHead", "no_such"]),
    "groups that match nothing": (["--trainer.callbacks+=GradualUnfreezing", "--trainer.callbacks.groups=[[no_such]]",
                                   "--trainer.callbacks.every_n_epochs=1"],
                                  ["GradualUnfreezing", "no_such"]),
    "no convolutions": (["--trainer.callbacks+=ChannelsLast"], ["ChannelsLast", "Conv2d"]),
    "no noise levels": (["--trainer.callbacks+=SNRWeighting"], ["SNRWeighting", "predict"]),
    "two that exclude each other": (["--trainer.callbacks+=EMA", "--trainer.callbacks+=CheckpointAverage"],
                                    ["EMA", "CheckpointAverage"]),
    "one twice": (["--trainer.callbacks+=EMA", "--trainer.callbacks+=EMA"], ["EMA", "twice"]),
    "a step in backward with accumulation": (["--trainer.callbacks+=OptimizerInBackward",
                                              "--trainer.accumulate_grad_batches=2"],
                                             ["OptimizerInBackward"]),
    "a step in backward with clipping": (["--trainer.callbacks+=OptimizerInBackward"],
                                         ["OptimizerInBackward", "gradient_clip_val"]),
    "an optimizer that it cannot rewrite": (["--trainer.callbacks+=ScheduleFree", "--optimizer=Lion"],
                                            ["ScheduleFree", "Lion"]),
    "a schedule without an optimizer": (["--lr_scheduler=CosineAnnealingLR"], ["lr_scheduler", "optimizer"]),
    "a schedule of an endless run": (["--optimizer=AdamW", "--lr_scheduler=CosineAnnealingLR", "--trainer.max_steps=-1",
                                      "--trainer.max_epochs=-1"], ["T_max"]),
    "a cycle that is over too soon": (["--optimizer=AdamW", "--lr_scheduler=OneCycleLR", "--lr_scheduler.max_lr=0.1",
                                       "--lr_scheduler.total_steps=10"], ["OneCycleLR", "total_steps"]),
    "a plateau of what nobody logs": (["--optimizer=AdamW", "--lr_scheduler=ReduceLROnPlateau",
                                       "--lr_scheduler.monitor=val/los"], ["val/los"]),
    "a rate below 0": (["--optimizer=AdamW", "--optimizer.lr=-1"], ["lr", "-1"]),
    "data of pictures": (["--data=DigitImages", "--without=SampleText"], ["LanguageModeling", "DigitImages"]),
    "pictures of text": (["--trainer.callbacks+=SampleImages"], ["SampleImages"]),
    "a checkpoint that is not there": (["--ckpt_path=none.ckpt"], ["none.ckpt"]),
    "a folder that cannot be": (["--trainer.default_root_dir=/proc/nowhere"], ["default_root_dir", "/proc/nowhere"]),
    "devices that are not there": (["--trainer.devices=4096"], ["devices", "4096"]),
    "a GPU that is not there": (["--trainer.accelerator=gpu"], ["accelerator", "gpu"]),
    "a precision that is none": (["--trainer.precision=fp12"], ["precision", "fp12"]),
    "a prefix longer than the model reads": (["--trainer.callbacks+=PrefixTuning",
                                              "--trainer.callbacks.init=random",
                                              "--trainer.callbacks.num_virtual_tokens=4096"], ["PrefixTuning", "4096"]),
    "d: latents of another size": (["--model.backbone.size=16"], ["size", "16"]),
    "d: latents of other channels": (["--model.backbone.channels=3"], ["channels", "3"]),
    "d: patches that do not divide": (["--model.backbone.patch_size=3"], ["patch_size", "3"]),
    "d: no such schedule": (["--model.schedule=linnear"], ["schedule", "linnear"]),
    "d: an image that does not divide": (["--data.image_size=30"], ["image_size", "30"]),
    "d: text of pictures": (["--trainer.callbacks+=SampleText"], ["SampleText"]),
    "d: data of text": (["--data=PythonCorpus", "--without=SampleImages"], ["LatentDiffusion", "PythonCorpus"]),
    "d: blocks that are not there": (["--trainer.callbacks+=HiddenAlignment", "--trainer.callbacks.block=40",
                                      "--trainer.callbacks.head.widths=[64,8]"],
                                     ["HiddenAlignment", "40"]),
    "d: gamma of another rule": (["--trainer.callbacks+=SNRWeighting", "--trainer.callbacks.gamma=-3"],
                                 ["gamma", "-3"]),
    "d: a monitor that nobody logs": (["MODELCHECKPOINT", "--trainer.callbacks.monitor=val/los"], ["val/los"]),
}  # fmt: skip


def _without_data(*words: str) -> None:
    """Like `command`, in an environment where no data can be read."""
    import lit_efficient as le

    def touched(*_: Any, **__: Any) -> None:
        raise AssertionError("the data was touched")

    for kind in (le.PythonCorpus, le.LatentDigits, le.DigitImages):
        for hook in ("setup", "train_dataloader", "val_dataloader"):
            setattr(kind, hook, touched)
        refuses = getattr(kind, "check_model", None)
        kind.prepare_data = (  # what it says before it reads anything is right
            lambda self, refuses=refuses: (refuses(self) if refuses else None, touched())
        )
    command(*words)


def _try_known(case: str, folder: Path) -> str:
    subcommand, _, name = case.partition(":")
    options, wanted = KNOWN[name]
    added = {"MODELCHECKPOINT": "ModelCheckpoint"}
    words = [word for one in options for word in ([f"--trainer.callbacks+={added[one]}"] if one in added else [one])]
    config = "latent_diffusion" if name.startswith("d: ") else "language_model"
    code, text = said(subcommand, "-c", config, *words, job=_without_data)
    return "accepted" if code == 0 else refusal(code, text, *wanted)


PIECES += (
    Piece(
        7,
        "config-before-data",
        "What can be known before data is read is wrong (lengths, targets, monitors, conflicts, schedules, ...): "
        "`check` and `fit` refuse it before they touch the data.",
        lambda: [f"{subcommand}:{name}" for subcommand in ("check", "fit") for name in KNOWN],
        _try_known,
        in_ci=0,  # tests/cli/test_rehearsal.py asks the same in one process
    ),
)
