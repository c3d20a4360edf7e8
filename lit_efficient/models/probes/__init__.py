"""Functions that run or read a network once to learn a property of its structure."""
