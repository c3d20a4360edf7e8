"""Claims about a training that are checked on short runs of the user's own fit."""
