"""Pure functions on tensors: they know nothing of Lightning."""
