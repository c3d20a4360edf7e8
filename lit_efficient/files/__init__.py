"""Files that are written whole or not at all and checked before use."""
