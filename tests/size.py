"""Print the size of the package in nodes of the syntax tree, with the change since the last release.

A node is a statement or an expression. Neither formatting nor denser code changes their number much, so the figure
shows what the package does, and not how it is laid out. The report is information: nothing fails because of it.

    python -m tests.size
"""

import ast
import io
import subprocess
import tarfile
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "lit_efficient"


def nodes_of(source: str) -> int:
    """Return the number of statements and expressions in the source of one file."""
    return sum(isinstance(node, ast.stmt | ast.expr) for node in ast.walk(ast.parse(source)))


def folder_of(path: Path) -> str:
    """Return the first folder of a path inside the package, or "." for a file of its root."""
    return path.parts[0] if len(path.parts) > 1 else "."


def nodes_here() -> Counter[str]:
    """Return the nodes of each folder of the package in the working tree."""
    sizes: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        sizes[folder_of(path.relative_to(PACKAGE))] += nodes_of(path.read_text("utf-8"))
    return sizes


def last_release() -> str | None:
    """Return the newest tag that is a version, or None where there is none, as in a shallow clone."""
    command = ["git", "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"]
    found = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def nodes_at(commit: str) -> Counter[str]:
    """Return the nodes of each folder of the package at a commit."""
    command = ["git", "archive", commit, "."]
    archive = subprocess.run(command, cwd=PACKAGE, capture_output=True, check=True).stdout
    sizes: Counter[str] = Counter()
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            if member.name.endswith(".py"):
                content = files.extractfile(member)
                assert content is not None, "a file of an archive has a content"
                sizes[folder_of(Path(member.name))] += nodes_of(content.read().decode("utf-8"))
    return sizes


def table(now: Counter[str], before: Counter[str] | None = None) -> list[str]:
    """Return the lines of the report: nodes of each folder, the largest first, and the change of each."""
    lines = []
    rows = [*now.most_common(), ("total", now.total())]
    earlier = None if before is None else before | Counter(total=before.total())
    for folder, size in rows:
        change = "" if earlier is None else f"{size - earlier[folder]:+10,}"
        lines.append(f"{folder:15}{size:10,}{change}")
    return lines


def report() -> list[str]:
    """Return the whole report, with a heading that names the release of the comparison."""
    release = last_release()
    before = None if release is None else nodes_at(release)
    since = "no release to compare with" if release is None else f"change since {release}"
    return [
        f"Nodes of the syntax tree (statements and expressions) in lit_efficient; {since}",
        *table(nodes_here(), before),
    ]


if __name__ == "__main__":
    print("\n".join(report()))
