"""Generate text: sampling of the next token, and generation for several sequences in one batch."""
