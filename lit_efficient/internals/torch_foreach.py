"""One kernel for a list of tensors. torch documents ``torch._foreach_*`` for none but its optimizers.

Checked with torch 2.13.
"""

from torch import _foreach_add_ as foreach_add_
from torch import _foreach_copy_ as foreach_copy_
from torch import _foreach_lerp as foreach_lerp
from torch import _foreach_lerp_ as foreach_lerp_
from torch import _foreach_mul_ as foreach_mul_
from torch import _foreach_sign_ as foreach_sign_

__all__ = ["foreach_add_", "foreach_copy_", "foreach_lerp", "foreach_lerp_", "foreach_mul_", "foreach_sign_"]
