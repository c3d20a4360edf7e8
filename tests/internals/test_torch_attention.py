"""Attention to a row of keys in parts: the numbers and gradients of torch's attention to all of them."""

import torch
import torch.nn.functional as F

from lit_efficient.internals.torch_attention import attention_part, gradients_of_part, joined
from tests.internals.leaning import leans_on


@leans_on("torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu", "torch_attention")
@leans_on("torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", "torch_attention")
def test_parts_of_the_keys_give_what_all_of_them_do() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v, weigh = (torch.randn(1, 2, n, 8, generator=draw, dtype=torch.float64) for n in (4, 9, 9, 4))
    inputs = [heads.clone().requires_grad_() for heads in (q, k, v)]
    mask = torch.ones(4, 9, dtype=torch.bool).tril(5)  # the queries are the last four
    out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, scale=0.3)
    expected = torch.autograd.grad((out * weigh).sum(), inputs)
    parts = [(slice(0, 5), False), (slice(5, 9), True)]
    whole = joined([attention_part(q, k[:, :, at], v[:, :, at], causal, 0.3) for at, causal in parts])
    torch.testing.assert_close(whole[0], out)
    found = [gradients_of_part(weigh, q, k[:, :, at], v[:, :, at], whole, causal, 0.3) for at, causal in parts]
    torch.testing.assert_close(found[0][0] + found[1][0], expected[0])
    for one, name in ((1, "keys"), (2, "values")):
        torch.testing.assert_close(torch.cat([of[one] for of in found], 2), expected[one], msg=name)
