"""The order of batches as a pure function of seed, epoch and position, with a state to resume from."""
