import torch
from torch import nn

from tests.internals.leaning import leans_on


@leans_on("torch", "torch.optim._muon._zeropower_via_newtonschulz", "torch_muon")
@leans_on("torch", "torch.optim._muon._adjust_lr", "torch_muon")
def test_the_step_is_made_of_these_two():
    from lit_efficient.internals.torch_muon import adjusted_rate, orthogonalised

    torch.manual_seed(0)
    theirs = nn.Linear(4, 6, bias=False)
    ours = theirs.weight.detach().clone()
    theirs.weight.grad = gradient = torch.randn_like(ours)
    rule = "match_rms_adamw"
    torch.optim.Muon(theirs.parameters(), lr=0.1, weight_decay=0.0, momentum=0.9, adjust_lr_fn=rule).step()
    buffer = gradient * (1 - 0.9)
    update = orthogonalised(gradient.lerp(buffer, 0.9), (3.4445, -4.775, 2.0315), 5, 1e-7)
    torch.testing.assert_close(ours.add(update, alpha=-adjusted_rate(0.1, rule, ours.shape)), theirs.weight.detach())
