"""Base classes of the standalone ``pytorch_lightning``, whose ``Trainer(callbacks=..., plugins=...)`` asks for them.

That package is a copy of ``lightning.pytorch`` with classes of its own. It calls all hooks by name, and looks at the
class in one place: a callback that is given alone, without a list, must be an instance of its ``Callback``. So ours is
a base of techniques wherever it is installed (a tenth of a second beside Lightning's four), whichever of the two is
imported first. A precision must always be an instance of its ``Precision``. Checked with pytorch_lightning 2.6.6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:

    class StandaloneCallback:
        """``pytorch_lightning.Callback``, or nothing."""

    class StandalonePrecision:
        """``pytorch_lightning.plugins.precision.Precision``, or nothing."""

else:
    try:
        from pytorch_lightning import Callback as StandaloneCallback
        from pytorch_lightning.plugins.precision import Precision as StandalonePrecision
    except Exception:  # it is not installed, or too old for this torch: then no trainer of it exists

        class StandaloneCallback:
            """Stands in for what is not there."""

        StandalonePrecision = StandaloneCallback
