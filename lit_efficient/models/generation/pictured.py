"""Text generation for a prompt with images, by ``generate`` of transformers.

Families differ in how they continue after an image (positions, masks, types of tokens), and ``generate`` knows each. It
takes the most probable token of logits in which only the token that was drawn here is possible.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lit_efficient.internals.wraps import temporarily


def continue_pictured(
    network: Any,
    inputs: Mapping[str, Tensor],
    max_new_tokens: int,
    device: torch.device,
    draw: Callable[[Tensor], tuple[int, bool]],
) -> None:
    """Continue one prompt.

    Args:
        network: Model of transformers.
        inputs: ``input_ids`` [1, T], and what else the processor makes of the prompt.
        max_new_tokens: Maximum number of tokens to add.
        device: Device of the network.
        draw: Function that takes logits [1, V], and returns the next token and whether it is the last one.
    """
    import transformers

    ended = False

    class Draw(transformers.LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            nonlocal ended
            token, ended = draw(scores)
            possible = torch.full_like(scores, -torch.inf)
            possible[:, token] = 0.0
            return possible

    class End(transformers.StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: object) -> Any:
            return torch.tensor([ended], device=input_ids.device)

    kind = next(p.dtype for p in network.parameters() if p.is_floating_point())
    given = {name: one.to(device, kind if one.is_floating_point() else None) for name, one in inputs.items()}
    settings = transformers.GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)
    # The model's own settings would fill those that are not set here, such as a repetition penalty.
    with temporarily(network, generation_config=transformers.GenerationConfig()):
        network.generate(
            **given,
            generation_config=settings,
            logits_processor=transformers.LogitsProcessorList([Draw()]),
            stopping_criteria=transformers.StoppingCriteriaList([End()]),
        )
