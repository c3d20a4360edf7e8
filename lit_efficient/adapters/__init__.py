"""What the adapter techniques share: layers, checkpoints without the base, merging, PEFT's format. No Lightning."""
