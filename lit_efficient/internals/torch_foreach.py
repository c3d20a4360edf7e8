"""Operations on lists of tensors with one kernel: ``torch._foreach_*``, which torch does not document.

Checked with torch 2.13.
"""

from torch import _foreach_add_ as foreach_add_
from torch import _foreach_addcmul_ as foreach_addcmul_
from torch import _foreach_copy_ as foreach_copy_
from torch import _foreach_div as foreach_div
from torch import _foreach_div_ as foreach_div_
from torch import _foreach_lerp as foreach_lerp
from torch import _foreach_lerp_ as foreach_lerp_
from torch import _foreach_mul_ as foreach_mul_
from torch import _foreach_norm as foreach_norm
from torch import _foreach_sign_ as foreach_sign_
from torch import _foreach_sqrt as foreach_sqrt

__all__ = [
    "foreach_add_",
    "foreach_addcmul_",
    "foreach_copy_",
    "foreach_div",
    "foreach_div_",
    "foreach_lerp",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm",
    "foreach_sign_",
    "foreach_sqrt",
]
