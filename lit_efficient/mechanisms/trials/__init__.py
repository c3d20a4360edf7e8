"""Trial steps that are undone afterwards, to find a batch size or a learning rate and to measure memory."""
