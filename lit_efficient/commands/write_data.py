"""``python -m lit_efficient write-data``: write training data by a teacher model.

The teacher's answer to each prompt is one line of JSON, in the order of the prompts. Prompt number i is answered with
seed ``seed + i`` and always in the same batch. So an interrupted run that continues, on any number of processes, writes
the same file as an uninterrupted one. Under torchrun each process answers a part of the prompts, and rank 0 writes
(``torchrun --nproc-per-node 8 -m lit_efficient write-data ...``).
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lit_efficient.commands.prompts import Turns, default_device, read_prompts
from lit_efficient.files.cache import digest_of

Row = dict[str, Any]


def run(argv: Sequence[str]) -> int:
    """Run ``write-data``."""
    arguments = _parser().parse_args(argv)
    from lit_efficient.distributed.rank_line import joined_processes
    from lit_efficient.distributed.ranks import gather_objects
    from lit_efficient.models.generation.sampling import Sampling
    from lit_efficient.models.libraries.causal_lm import CausalLMConfig
    from lit_efficient.tasks.loading import load_hugging_face, load_language_model
    from lit_efficient.tasks.teacher import TeacherSource

    Sampling(arguments.temperature, arguments.top_p).check("write-data")
    texts_alone = ""
    if arguments.format == "completion":
        texts_alone = "add --format messages"
    prompts = read_prompts(Path(arguments.prompts), "write-data", texts_alone)
    spec = arguments.ckpt or CausalLMConfig(arguments.model, dtype=arguments.dtype, quantize=arguments.quantize)
    named = ("format", "temperature", "top_p", "max_new_tokens", "seed", "keep_cut")
    settings = {"teacher": TeacherSource(spec).digest()} | {name: getattr(arguments, name) for name in named}
    output = Path(arguments.output)
    with joined_processes() as (rank, _), contextlib.nullcontext() if rank else _alone(output):
        done = gather_objects(0 if rank else resume(output, prompts, settings))[0]
        if done < len(prompts):
            if isinstance(spec, str):
                model, _ = load_language_model(spec)
            else:
                model = load_hugging_face(spec)
            model.to(arguments.device or default_device())
            answer = _answer(model, arguments)
            written, cut = write_rows(output, prompts, done, answer, arguments.keep_cut)
            outcome = "kept" if arguments.keep_cut else "left out"
            said = (
                f"{output}: {written} rows added from prompt {done} on; {cut} answers reached max_new_tokens and were "
                f"{outcome}"
            )
        else:
            said = f"{output}: complete"
        if rank == 0:
            print(said, file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lit_efficient write-data",
        description="Write training data: a teacher model's answer to each prompt, one line of JSON each. The same "
        "command continues after an interruption; the same seed gives the same file.",
    )
    teacher = parser.add_mutually_exclusive_group(required=True)
    teacher.add_argument("--ckpt", help="a checkpoint of LanguageModeling, or of a task derived from it")
    teacher.add_argument("--model", help="name or folder of a Hugging Face model, with its tokenizer")
    parser.add_argument(
        "--prompts",
        required=True,
        help='a .jsonl of {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}, or a text file with '
        "one prompt per line; empty lines are ignored",
    )
    parser.add_argument("--output", required=True, help=".jsonl file to write; its settings are written beside it")
    parser.add_argument(
        "--format",
        choices=("completion", "messages"),
        default="completion",
        help='completion continues the text and writes {"prompt", "completion"}; messages answers in the chat template '
        'and writes {"messages"}',
    )
    parser.add_argument("--max_new_tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the most likely token")
    parser.add_argument(
        "--top_p", type=float, default=0.95, help="sample from the most likely tokens with this total probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="prompt number i uses seed + i")
    parser.add_argument(
        "--keep_cut",
        action="store_true",
        help="keep answers that reached max_new_tokens; they teach a model to stop anywhere",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        help="number format of --model: float32, bfloat16, float16 or auto (that of its files)",
    )
    parser.add_argument("--quantize", choices=("nf4", "int8"), help="quantise --model")
    parser.add_argument("--device", help="cpu, cuda, mps, ... (default: the accelerator)")
    return parser


def resume(output: Path, prompts: Sequence[str | Turns], settings: dict[str, object]) -> int:
    """Write or compare the settings of a file and remove an incomplete last line.

    Returns:
        The number of the next prompt.

    Raises:
        ConfigurationError: If the file was written with other settings or prompts.
    """
    from lit_efficient.errors import ConfigurationError
    from lit_efficient.files.atomic_file import replacing

    beside = output.with_name(output.name + ".settings.json")
    other = "Delete both files to start again, or name another --output."
    if not output.exists():
        with replacing(beside) as file:
            file.write((json.dumps(settings, indent=2) + "\n").encode())
        output.touch()
        return 0
    if not beside.exists():
        raise ConfigurationError(
            f"write-data: {output} exists and was not written by this command; name another --output"
        )
    then = json.loads(beside.read_text(encoding="utf-8"))
    for name, value in settings.items():
        if then.get(name) != value:
            raise ConfigurationError(
                f"write-data: {output} was started with {name} {then.get(name)!r}, and now it is {value!r}. {other}"
            )
    content = output.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(output, len(whole))
    following = 0
    for line in whole.splitlines():
        row = json.loads(line)
        following = int(row["index"]) + 1
        if following > len(prompts) or row["asked"] != digest_of(prompts[following - 1])[:16]:
            raise ConfigurationError(f"write-data: {output} has the answer to another prompt {following - 1}. {other}")
    return following


def write_rows(
    output: Path,
    prompts: Sequence[str | Turns],
    start: int,
    answer: Callable[[int, Sequence[str | Turns]], list[tuple[Row, bool]]],
    keep_cut: bool,
) -> tuple[int, int]:
    """Answer the prompts from ``start`` on and append the answers batch by batch; rank 0 writes them in order.

    Args:
        output: The file.
        prompts: All prompts.
        start: Number of the first prompt without an answer. Batches begin at the same prompts as in an uninterrupted
            run, because the other rows of a batch affect rounding.
        answer: Function of the first number and some prompts that returns each prompt's row, and whether the model
            ended the answer by itself.
        keep_cut: Write answers that the model did not end.

    Returns:
        The numbers of written answers and of answers that the model did not end.
    """
    from lit_efficient.distributed.ranks import gather_objects, place_among_ranks
    from lit_efficient.tasks.text_generation import BATCH_SIZE

    written = cut = 0
    rank, count = place_among_ranks()
    with open(os.devnull if rank else output, "ab", buffering=0) as file:
        for first in range(start - start % BATCH_SIZE, len(prompts), count * BATCH_SIZE):
            own = first + rank * BATCH_SIZE
            few = prompts[own : own + BATCH_SIZE]
            answers = itertools.chain(*gather_objects(answer(own, few) if few else []))
            for index, (row, ended) in enumerate(answers, first):
                if index < start:
                    continue
                cut += not ended
                if not ended and not keep_cut:
                    continue
                about = {"index": index, "asked": digest_of(prompts[index])[:16]}
                line = json.dumps(row | about, ensure_ascii=False) + "\n"
                file.write(line.encode())  # one call per line: after a kill at most the last line is incomplete
                written += 1
            if rank == 0:
                os.fsync(file.fileno())
    return written, cut


def _answer(
    model: Any, arguments: argparse.Namespace
) -> Callable[[int, Sequence[str | Turns]], list[tuple[Row, bool]]]:
    from lit_efficient.models.generation.sampling import Sampling
    from lit_efficient.tasks.text_generation import as_chat

    tokenizer = model.tokenizer
    completes = arguments.format == "completion"
    if not completes:
        as_chat(tokenizer, "", "write-data: --format messages")

    def answer(first: int, prompts: Sequence[str | Turns]) -> list[tuple[Row, bool]]:
        found = model.continuations(
            tokenizer,
            [str(prompt) if completes else as_chat(tokenizer, prompt) for prompt in prompts],
            max_new_tokens=arguments.max_new_tokens,
            sampling=Sampling(arguments.temperature, arguments.top_p),
            seeds=range(arguments.seed + first, arguments.seed + first + len(prompts)),
            special=completes,
        )
        return [(_row(prompt, new, completes), ended) for prompt, (new, ended) in zip(prompts, found)]

    return answer


def _row(prompt: str | Turns, new: str, completes: bool) -> Row:
    if completes:
        return {"prompt": prompt, "completion": new}
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return {"messages": [*prompt, {"role": "assistant", "content": new}]}


def _alone(output: Path) -> Any:
    """Return a lock on a file, because two processes would mix their lines."""
    from filelock import FileLock, Timeout

    from lit_efficient.errors import ConfigurationError

    output.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output.with_name(f".{output.name}.lock"))
    try:
        return lock.acquire(timeout=0)
    except Timeout as error:
        raise ConfigurationError(f"write-data: another process is writing {output}") from error
