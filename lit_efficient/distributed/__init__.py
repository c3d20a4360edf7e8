"""Code for several processes: ranks, slices of weights and rows, sharded checkpoints, tensor parallelism."""
