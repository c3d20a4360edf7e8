"""Base classes of the standalone package ``pytorch_lightning``, so that techniques work with its ``Trainer``.

That package is a copy of ``lightning.pytorch`` with separate classes. Its trainer calls hooks by name, but requires
instances of its own classes in two places: a callback that is passed without a list must be a ``Callback``, and a
precision plugin must be a ``Precision``. So its classes are bases of ours if it is installed, whichever of the two
packages is imported first. Importing it takes 0.1 s, compared with 4 s for Lightning. Checked with pytorch_lightning
2.6.6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:

    class StandaloneCallback:
        """``pytorch_lightning.Callback``, or an empty class."""

    class StandalonePrecision:
        """``pytorch_lightning.plugins.precision.Precision``, or an empty class."""

else:
    try:
        from pytorch_lightning import Callback as StandaloneCallback
        from pytorch_lightning.plugins.precision import Precision as StandalonePrecision
    except Exception:  # not installed, or too old for this torch: then it has no trainer either

        class StandaloneCallback:
            """Empty class that replaces the missing one."""

        StandalonePrecision = StandaloneCallback
