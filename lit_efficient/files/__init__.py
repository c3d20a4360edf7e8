"""Reading and writing files, whole or not at all, checked before use."""
