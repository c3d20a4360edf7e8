"""Several text encoders as one, joined as the pipelines of diffusers join them.

    sdxl   hidden = [CLIP | CLIP-G] by features;  pooled = CLIP-G's
    sd3    hidden = [CLIP | CLIP-G] by features, zeros up to T5's width, then T5's tokens;  pooled = [CLIP | CLIP-G]
    flux   hidden = T5's;  pooled = CLIP's

In sdxl and sd3 the hidden states of CLIP are those of the layer before the last. None of them leaves padding out.

Source: Podell et al. (2023), https://arxiv.org/abs/2307.01952; Esser et al. (2024), https://arxiv.org/abs/2403.03206.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_efficient.models.libraries.text_network import CaptionReading, TextEmbedding, TextEncoderConfig

_CLIP_LENGTH = 77
_KINDS = {"sdxl": ("clip", "clip"), "sd3": ("clip", "clip", "t5"), "flux": ("clip", "t5")}


def members(spec: TextEncoderConfig) -> list[TextEncoderConfig]:
    """The encoders of a pipeline, or the one that ``spec`` is."""
    if spec.pipeline is None:
        return [spec]
    found = []
    for number, kind in enumerate(_KINDS[spec.pipeline], start=1):
        suffix = "" if number == 1 else f"_{number}"
        found.append(
            replace(
                spec,
                pipeline=None,
                subfolder=f"text_encoder{suffix}",
                max_length=_CLIP_LENGTH if kind == "clip" and spec.pipeline != "sdxl" else spec.max_length,
                layer=-2 if kind == "clip" and spec.pipeline != "flux" else -1,
                captions=CaptionReading(subfolder=f"tokenizer{suffix}", padding="seen"),
            )
        )
    return found


def join(pipeline: str | None, parts: list[TextEmbedding]) -> TextEmbedding:
    """The embeddings of captions from those of the members: hidden [..., L, D], mask [..., L], pooled [..., P]."""
    if pipeline is None:
        return parts[0]
    if pipeline == "flux":
        clip, t5 = parts
        return TextEmbedding(t5.hidden, t5.mask, clip.pooled)
    clips = torch.cat([parts[0].hidden, parts[1].hidden], dim=-1)
    if pipeline == "sdxl":
        return TextEmbedding(clips, parts[0].mask, parts[1].pooled)
    t5 = parts[2]
    padded: Tensor = F.pad(clips, (0, t5.hidden.shape[-1] - clips.shape[-1]))
    pooled = [part.pooled for part in parts[:2] if part.pooled is not None]
    return TextEmbedding(
        torch.cat([padded, t5.hidden], -2), torch.cat([parts[0].mask, t5.mask], -1), torch.cat(pooled, -1)
    )
