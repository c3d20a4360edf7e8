"""What ought to be true of a training, checked on it."""
