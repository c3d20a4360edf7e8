"""Language models that are ready to use: from a checkpoint of ours, or by a name or folder of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_efficient.models.causal_lm import CausalLMConfig


def load_language_model(path: str, weights: Any = "auto") -> tuple[Any, str]:
    """The model of a checkpoint, ready to write.

    Args:
        path: a checkpoint of `LanguageModeling`, or of a task derived from it.
        weights: ``auto``, ``average`` or ``raw``, see `lit_efficient.mechanisms.restore.restore`.

    Returns:
        The module, and which weights it has.

    Raises:
        CheckpointError: if the file cannot be read, or was not written by a language model.
    """
    from lit_efficient.errors import CheckpointError
    from lit_efficient.files.checkpoints import read
    from lit_efficient.mechanisms.restore import restore
    from lit_efficient.tasks.language_modeling import LanguageModeling
    from lit_efficient.tasks.preference import Preference

    checkpoint = read(path)
    if "language_modeling" not in checkpoint:
        raise CheckpointError(f"{path} is not a checkpoint of LanguageModeling")
    arguments = checkpoint["hyper_parameters"]
    # Adapters of a preference run stand beside the weights that it started from.
    model = Preference(**arguments) if "preference" in checkpoint else LanguageModeling(arguments["model"])
    model.on_load_checkpoint(checkpoint)
    return model, restore(model, checkpoint, weights)


def load_hugging_face(spec: CausalLMConfig) -> Any:
    """A model of Hugging Face with its own tokenizer, as a `LanguageModeling` in eval mode.

    Raises:
        ConfigurationError: if the model or its tokenizer cannot be read.
    """
    from lit_efficient.errors import ConfigurationError
    from lit_efficient.tasks.language_modeling import LanguageModeling

    model = LanguageModeling(spec)
    model.tokenizer_state = hugging_face_tokenizer(spec)
    if model.tokenizer_state is None:
        raise ConfigurationError(f"{spec.name_or_path} has no tokenizer: save it there (tokenizer.save_pretrained).")
    model.configure_model()
    return model.eval()


def hugging_face_tokenizer(spec: CausalLMConfig) -> dict[str, Any] | None:
    """The tokenizer beside a model's weights, packed as a checkpoint has it; None for a folder that has none.

    Raises:
        ConfigurationError: if there is one that cannot be read.
    """
    from transformers import AutoTokenizer

    from lit_efficient.data.text.tokenizer_state import pack_tokenizer
    from lit_efficient.errors import ConfigurationError

    folder = Path(spec.name_or_path or "")
    if folder.is_dir() and not any(folder.glob("tokenizer*")):
        return None
    try:
        return pack_tokenizer(
            AutoTokenizer.from_pretrained(spec.name_or_path, revision=spec.revision, trust_remote_code=False)
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigurationError(
            f"The tokenizer of {spec.name_or_path} cannot be read: {str(error).splitlines()[0]}"
        ) from error
