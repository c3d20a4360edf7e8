"""Build steps that pyproject.toml cannot express.

- The wheel carries ``configs/`` and ``AGENTS.md``, which lie outside of the package in the repository.
- The published README and the project's URLs start at the repository's address, which relative links do not have.
"""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithConfigs(build_py):
    """Copy ``configs/`` and ``AGENTS.md`` into the package; an editable install reads them from the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        inside = Path(self.build_lib, "lit_efficient", "configs")
        shutil.rmtree(inside, ignore_errors=True)  # an earlier build may have left configs that no longer exist
        shutil.copytree(ROOT / "configs", inside)
        shutil.copy(ROOT / "AGENTS.md", inside.parent)


def with_addresses(readme: str, repository: str) -> str:
    """Return the README with absolute links; without a repository, links become plain words and pictures go."""

    def addressed(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if "://" in target or target.startswith("#"):
            return link[0]
        if repository and picture:
            return f"![{words}]({repository}/raw/HEAD/{target})"
        if repository:
            return f"[{words}]({repository}/blob/HEAD/{target})"
        if picture:
            return ""
        return words

    return re.sub(r"(!?)\[([^\]]+)\]\(([^)\s]+)\)", addressed, readme)


def project_urls(repository: str) -> dict[str, str]:
    """Return the links that a package index shows beside the README."""
    if not repository:
        return {}
    changes = f"{repository}/blob/HEAD/CHANGELOG.md"
    return {"Repository": repository, "Changelog": changes, "Issues": f"{repository}/issues"}


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    address = project["tool"]["lit_efficient"]["repository"].rstrip("/")
    setup(
        cmdclass={"build_py": BuildWithConfigs},
        long_description=with_addresses((ROOT / "README.md").read_text("utf-8"), address),
        long_description_content_type="text/markdown",
        project_urls=project_urls(address),
    )
