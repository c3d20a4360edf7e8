"""How long the package is, and what in it is longest."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "lit_efficient"
# 37,681 lines before the folders became slots. What raised it since: probes of packed documents, exports that check
# themselves, folders of runs and settings that win on resume, blocks found by what their code does (4,370 lines);
# on a GPU: no waits, states streamed, float32 beside bf16-true, pages (1,000), what templates drop (80),
# configs by name, `callbacks-` (310) and Python on the cards (180); what people use every day (3,300): check, schema,
# completion and help (1,050), run folders with their metrics (730), sample, chat and batches of generate (650), report
# (660), missing packages (70); bases quantised as they are read, Liger's kernel (340). plan, compare, tune and verify
# (9,100: 2,700 for the memory of a step and what makes it fit, 2,600 for what techniques save, 1,100 for the fastest
# settings, 2,700 for claims on a training); ramps of batch, length and resolution (650), blocks that train while they
# are swapped, rotary positions by Liger, prefetching by default (330), what the scoreboard of trust found: hashes that
# every reader compares, signals, disks, mistakes in configs, hostile files, secrets that are masked (1,050); noise on
# embeddings, smoothed labels, samples by loss, initial weights, widths that transfer, virtual tokens (1,700), clipping,
# spikes, noise scale and schedules (1,300), experts, depths and routes of tokens, flows (2,200), shards, replicas,
# DeepSpeed's stages, processes that watch each other (1,300), networks larger than a host, less of it in memory (900);
# layers divided by their plans, slices read by each process, resumes by the row (450), several adapters of one base and
# class tokens (400), claims and bounds of plan and verify (400), hostile files, secrets and epochs cut short (250),
# weights that each process draws for itself (100), what is refused before data is read and mistakes in configs (260),
# denoisers in slices, tensors that are written one by one, commands whose processes end together, DeepSpeed as it was
# tried, states that are not finite, values that other packages refuse (300); references and teachers in slices, checks
# and plans of folders that no memory holds, DeepSpeed's folders whole, who waits for whom at the start (100).
LIMIT = 76_820


def sources() -> dict[str, str]:
    """The text of each file of the package."""
    return {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def longest_files(texts: dict[str, str], count: int = 10) -> list[tuple[int, str]]:
    return sorted(((len(text.splitlines()), name) for name, text in texts.items()), reverse=True)[:count]


def longest_functions(texts: dict[str, str], count: int = 10) -> list[tuple[int, str]]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    found = [
        (node.end_lineno - node.lineno + 1, f"{name}:{node.lineno} {node.name}")
        for name, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, kinds) and node.end_lineno is not None
    ]
    return sorted(found, reverse=True)[:count]


def report() -> list[str]:
    texts = sources()
    total = sum(len(text.splitlines()) for text in texts.values())
    lines = [f"{total:,} lines in {len(texts)} files of the package, of {LIMIT:,} at most; the longest:"]
    rows = zip(longest_files(texts), longest_functions(texts), strict=True)
    lines += [f"{length:5} {name:45}{size:5} {function}" for (length, name), (size, function) in rows]
    return lines
