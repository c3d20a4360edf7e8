"""Padding token of an exported reward model.

transformers reads the score at the last token that is not padding, and finds padding by its id alone. Where the id also
ends texts, as in a tokenizer that pads with its end-of-text token, it would read the score before the last token. Such
an export gets another padding token: one that begins texts or turns, else a new one, with a row of the embeddings.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_efficient.files.checkpoints import Checkpoint
from lit_efficient.models.networks.reward import is_classifier

_NEW = "<|padding|>"


def gives_rewards(network: Any, checkpoint: Checkpoint) -> bool:
    """Return whether a network is a classifier of transformers that ``RewardModeling`` has trained."""
    return checkpoint.get("language_modeling", {}).get("task") == "RewardModeling" and is_classifier(network)


def set_padding(network: Any, checkpoint: Checkpoint) -> None:
    """Set ``pad_token_id`` of the configuration of a model of ``RewardModeling``; others do not change."""
    if gives_rewards(network, checkpoint):
        network.config.get_text_config().pad_token_id = padding_for(network.config, checkpoint)


def padding_for(config: Any, checkpoint: Checkpoint) -> int:
    """Return the id of the padding token of a reward model, which may be the first id that its tokenizer lacks."""
    packed = checkpoint.get("language_modeling", {}).get("tokenizer")
    config = config.get_text_config()
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    candidates = [config.pad_token_id, config.bos_token_id]
    size: int = config.vocab_size
    if packed is not None:
        tokenizer = _tokenizer(packed)
        ends = [*ends, tokenizer.eos_token_id, *packed["stop"]]
        candidates = [tokenizer.pad_token_id, tokenizer.bos_token_id, *_special(tokenizer)]
        size = len(tokenizer)
    usable = [index for index in candidates if index is not None and index not in ends]
    if usable:
        return usable[0]
    return size


def grow_for_padding(model: Any) -> None:
    """Add a row to the embeddings of a reward model if its padding token has none, in place."""
    pad = model.config.get_text_config().pad_token_id
    if pad >= model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(pad + 1, mean_resizing=False)


def pad_tokenizer(folder: Path, pad: int) -> None:
    """Set the padding token of the tokenizer in a folder, and the right side, on which every network reads padding."""
    from transformers import AutoTokenizer

    from lit_efficient.data.text.chat_tokenizer import write_tokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if pad == len(tokenizer):
        tokenizer.add_special_tokens({"pad_token": _NEW})
    else:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    tokenizer.padding_side = "right"
    write_tokenizer(tokenizer, folder)


def _tokenizer(packed: Mapping[str, Any]) -> Any:
    from transformers import PreTrainedTokenizerFast

    from lit_efficient.data.text.chat_tokenizer import unpack_tokenizer

    tokenizer = unpack_tokenizer(packed)
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _special(tokenizer: Any) -> list[int]:
    # Any text may end with a token that the tokenizer does not know.
    return [i for i, token in tokenizer.added_tokens_decoder.items() if token.special and i != tokenizer.unk_token_id]
