"""What a strategy was asked to do, and how it starts its processes. Checked with lightning 2.6.6."""

from typing import Any


def copies_the_process(strategy: Any) -> bool:
    """Whether it spawns or forks its processes, which then have copies of the module: ``_MultiProcessingLauncher``."""
    return type(getattr(strategy, "launcher", None)).__name__ == "_MultiProcessingLauncher"


def recomputes_activations(strategy: Any) -> bool:
    """Whether it was given an activation checkpointing policy: FSDP's ``_activation_checkpointing_kwargs``."""
    return bool(getattr(strategy, "_activation_checkpointing_kwargs", None))


def gathers_checkpoints(strategy: Any) -> bool:
    """Whether it writes sharded states into one file: ``ModelParallelStrategy._save_distributed_checkpoint``."""
    return getattr(strategy, "_save_distributed_checkpoint", True) is False
