"""From a checkpoint to what other programs load."""
