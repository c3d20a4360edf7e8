"""What pyproject.toml cannot say: the wheel carries configs/ and AGENTS.md, and the README's links hold there."""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class WithConfigs(build_py):
    """Put ``configs/`` and ``AGENTS.md`` into the package; an editable install finds them where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            inside = Path(self.build_lib, "lit_efficient", "configs")
            shutil.rmtree(inside, ignore_errors=True)  # of an earlier build
            shutil.copytree(ROOT / "configs", inside)
            shutil.copy(ROOT / "AGENTS.md", inside.parent)


def with_addresses(readme: str, repository: str) -> str:
    """A README whose relative links are addresses; without a repository the words of a link are left, no picture."""

    def addressed(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if "://" in target or target.startswith("#"):
            return link[0]
        if not repository:
            return "" if picture else words
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/HEAD/{target})"

    return re.sub(r"(!?)\[([^\]]+)\]\(([^)\s]+)\)", addressed, readme)


def project_urls(repository: str) -> dict[str, str]:
    """What a package index shows beside the README."""
    changes = f"{repository}/blob/HEAD/CHANGELOG.md"
    return {"Repository": repository, "Changelog": changes, "Issues": f"{repository}/issues"} if repository else {}


if __name__ == "__main__":
    address = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["lit_efficient"]["repository"]
    setup(
        cmdclass={"build_py": WithConfigs},
        long_description=with_addresses((ROOT / "README.md").read_text("utf-8"), address.rstrip("/")),
        long_description_content_type="text/markdown",
        project_urls=project_urls(address.rstrip("/")),
    )
