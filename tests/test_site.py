"""The built documentation in a browser: nothing is wider than its place, on a desk or a telephone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
SITE = ROOT / "build" / "docs" / "html"
PAGES = ("index", "overview", "goals", "techniques", "techniques/LoRA", "techniques/EMA", "matrix", "symptoms", "gpus")
PAGES += ("measured", "reference/tasks", "migrating", "notebooks/lora_on_15_pictures")
SIZES = ((1280, 900), (390, 844))  # a desk and a telephone
# Run inside of a page: what is wider than its place, and what the page itself scrolls.
MEASURE = """
<script>
addEventListener("load", () => setTimeout(() => {
  const found = [];
  const view = document.documentElement;
  if (view.scrollWidth > view.clientWidth + 1) found.push("the page: " + view.scrollWidth);
  for (const one of document.querySelectorAll("article pre, article .table-wrapper, article table, article img")) {
    const wide = one.scrollWidth > one.clientWidth + 1 || one.getBoundingClientRect().right > view.clientWidth + 1;
    if (wide) found.push(one.tagName + " " + one.scrollWidth + ": " + one.textContent.trim().slice(0, 60));
  }
  parent.postMessage({found, width: view.clientWidth, words: document.body.innerText.length}, "*");
}, 300));
</script>
"""
FRAME = """<!doctype html><style>body {{ margin: 0 }}</style>
<iframe src="{page}" width="{width}" height="{height}" style="border: 0"></iframe><pre id="said"></pre>
<script>
addEventListener("message", (event) => {{ document.getElementById("said").textContent = JSON.stringify(event.data) }});
</script>
"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the site whose pages measure themselves."""
    pytest.importorskip("sphinx")
    subprocess.run([sys.executable, "docs/build.py"], cwd=ROOT, check=True, capture_output=True)
    copy = tmp_path_factory.mktemp("site") / "html"
    shutil.copytree(SITE, copy)
    for page in copy.rglob("*.html"):
        text = page.read_text("utf-8")
        page.write_text(text.replace("</body>", MEASURE + "</body>"), "utf-8")
    return copy


def browse(folder: Path, page: str, size: tuple[int, int], picture: Path | None = None) -> dict[str, object]:
    """What a page measures in a window of a size; with ``picture`` also a screenshot of it."""
    frame = folder / "frame.html"
    frame.write_text(FRAME.format(page=f"{page}.html", width=size[0], height=size[1]), "utf-8")
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder.parent / 'profile'}",
    ]
    command += ["--hide-scrollbars", "--virtual-time-budget=8000", f"--window-size={size[0]},{size[1]}"]
    if picture is not None:
        command += [f"--screenshot={picture}"]
        subprocess.run([*command, str(frame)], check=True, capture_output=True, timeout=120)
        return {}
    done = subprocess.run([*command, "--dump-dom", str(frame)], check=True, capture_output=True, text=True, timeout=120)
    said = re.search(r'<pre id="said">(.+?)</pre>', done.stdout)
    assert said is not None, "the page did not answer"
    return json.loads(unescape(said[1]))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: str(size[0]))
@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_wider_than_the_page(site: Path, page: str, size: tuple[int, int]) -> None:
    measured = browse(site, page, size)
    assert measured["width"] == size[0]
    assert int(str(measured["words"])) > 300
    assert measured["found"] == []
    pictures = ROOT / "build" / "screenshots"
    pictures.mkdir(parents=True, exist_ok=True)
    picture = pictures / f"{page.replace('/', '_')}_{size[0]}.png"
    browse(site, page, size, picture)
    colours = Image.open(picture).convert("RGB").getcolors(2**24)
    assert colours is not None
    assert len(colours) > 20  # text and links, not an empty page


def test_a_table_that_is_too_wide_is_found(site: Path) -> None:
    page = (site / "index.html").read_text("utf-8")
    wide = page.replace("</article>", "<pre style='white-space: pre'>" + "wide " * 200 + "</pre></article>", 1)
    (site / "wide.html").write_text(wide, "utf-8")
    assert "PRE" in str(browse(site, "wide", SIZES[1])["found"])


def test_the_footer_names_who_has_the_copyright(site: Path) -> None:
    footer = (site / "index.html").read_text("utf-8").partition("Copyright")[2]
    assert "The lit_efficient developers" in footer[:120]
