"""Build the documentation without a network: ``python docs/build.py``, then open ``build/docs/html/index.html``.

The pages are the files of this folder, the repository's documents, and pages made from the code: one per technique, the
conflicts, the configs and the reference. Links between files of the repository become links between pages. Needs ``pip
install -e '.[docs]'``. Warnings are errors.
"""

import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import pages  # noqa: E402 (after the path is set)

# Documents of the repository and their pages.
DOCUMENTS = {
    "README.md": "overview.md",
    "AGENTS.md": "agents.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(?<!`)(!?\[[^\]]*\])\(([^)\s#]*)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".json": "json", ".toml": "toml"}


def texts() -> dict[str, tuple[str, str]]:
    """Return for each page the file that its links are relative to, and its text."""
    found = {path.name: (f"docs/{path.name}", path.read_text("utf-8")) for path in sorted((ROOT / "docs").glob("*.md"))}
    for path in pages.notebooks():
        found[f"notebooks/{path.stem}.md"] = (f"examples/{path.name}", "\n".join(pages.notebook_lines(path)))
    found |= {page: (name, (ROOT / name).read_text("utf-8")) for name, page in DOCUMENTS.items()}
    return found | {page: ("", text) for page, text in pages.made().items()}


def page_of(path: str, known: dict[str, str]) -> str:
    """Return the page, with its anchor, of a file or folder of the repository; other files get a page of their own."""
    if path in known or path == "examples":
        return known.get(path, "examples.md")
    if path.startswith("configs/"):
        folder, _, name = path.removeprefix("configs/").partition("/")
        if not name or name == "README.md":
            return f"configs/{folder}.md"
        return f"configs/{folder}.md#{pages.anchor(folder, Path(name).stem)}"
    if (ROOT / path).is_file() and path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_file():
        return f"files/{path}.md"
    raise SystemExit(f"docs: a page links to {path!r}, which is not a file of the repository")


def relinked(page: str, source: str, text: str, target: Callable[[str], str]) -> str:
    """Return the text of a page with links to files replaced by links to their pages."""

    def link(found: re.Match[str]) -> str:
        words, path, anchor = found.groups(default="")
        if "://" in path or not path:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place, _, made = target(path).partition("#")
        there = posixpath.relpath(place, posixpath.dirname(page) or ".")
        return f"{words}({there}{anchor or (made and f'#{made}')})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if i % 2 else LINK.sub(link, part) for i, part in enumerate(parts))


def assembled() -> Iterator[tuple[str, str]]:
    """Yield each page with its text; pages for linked files come last."""
    written = texts()
    known = {source: page for page, (source, _) in written.items() if source} | pages.technique_pages()
    known |= {f"examples/{name}": f"notebooks/{name}" for name in pages.notebook_pictures()}
    linked: dict[str, str] = {}

    def target(path: str) -> str:
        page = page_of(path, known)
        if page.startswith("files/"):
            linked[path] = page
        return page

    for page, (source, text) in written.items():
        yield page, relinked(page, source, text, target) + pages.menu(page)
    for path, page in linked.items():
        language = LANGUAGES.get(Path(path).suffix, "text")
        yield page, f"---\norphan: true\n---\n\n# {path}\n\n````{language}\n{(ROOT / path).read_text('utf-8')}````\n"


def main() -> int:
    """Write the pages to ``build/docs`` and build the site with Sphinx."""
    source, site = ROOT / "build" / "docs" / "source", ROOT / "build" / "docs" / "html"
    if not find_spec("sphinx"):
        raise SystemExit("docs: sphinx is missing: pip install -c constraints.txt -e '.[docs]'")
    shutil.rmtree(source.parent, ignore_errors=True)  # removes pages that no longer exist
    for page, text in assembled():
        (source / page).parent.mkdir(parents=True, exist_ok=True)
        (source / page).write_text(text, encoding="utf-8")
    for path in (*(ROOT / "docs").glob("*.png"), *(ROOT / "docs").glob("*.svg"), ROOT / "docs" / "conf.py"):
        shutil.copy(path, source)
    shutil.copytree(ROOT / "docs" / "static", source / "static")
    for name, picture in pages.notebook_pictures().items():
        (source / "notebooks" / name).write_bytes(picture)
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    done = subprocess.run([*command, str(source), str(site)], cwd=ROOT, check=False)  # noqa: S603 (no shell, fixed words)
    if done.returncode == 0:
        print(f"{site / 'index.html'}")
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
