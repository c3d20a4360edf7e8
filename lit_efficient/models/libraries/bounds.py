"""What a model's configuration may ask for: not far more than the files beside it hold, which somebody else wrote."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import torch

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.hugging_face import from_config

_LAYERS, _PARAMETERS = 1_000, 2**26  # a model with fewer is built in a moment, whatever it is
_LAYER_BYTES, _PER_BYTE = 64, 8  # of files: less than the name of a layer takes, and a parameter of a bit


def check_bounds(who: str, folder: str | None, config: Any, kind: Any, subfolder: str = "") -> None:
    """Refuse a configuration of transformers whose model would take far more than its files before it is built.

    The kind is the model's class, or an auto class; a name on a hub is left alone.

    Raises:
        ConfigurationError: With the number of layers or parameters, and of bytes.
    """
    place = Path(folder or "", subfolder or "").expanduser()
    if not folder or not place.is_dir():
        return
    stored = sum(file.stat().st_size for file in place.glob("*.safetensors"))
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    layers = max(number if isinstance(number := getattr(part, "num_hidden_layers", 0), int) else 0 for part in parts)
    asked, what = layers, "layers"
    excess = layers > max(_LAYERS, stored // _LAYER_BYTES)
    if not excess:
        # What cannot be built says so when it is.
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), torch.device("meta"):
            network = from_config(kind, copy.deepcopy(config))
            asked, what = sum(parameter.numel() for parameter in network.parameters()), "parameters"
            excess = asked > max(_PARAMETERS, stored * _PER_BYTE)
    if excess:
        raise ConfigurationError(
            f"{who}: the configuration in {place} asks for {asked:,} {what}, and its .safetensors files have "
            f"{stored:,} bytes: they do not belong together"
        )
