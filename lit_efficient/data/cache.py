"""Where expensive intermediate results are kept between runs."""

import os
from pathlib import Path


def cache_root() -> Path:
    """The folder of all caches: ``LIT_EFFICIENT_CACHE``, else ``~/.cache/lit_efficient``. Creates nothing."""
    return Path(os.environ.get("LIT_EFFICIENT_CACHE") or Path.home() / ".cache" / "lit_efficient")
