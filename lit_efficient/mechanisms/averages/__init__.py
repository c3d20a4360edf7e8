"""Averages of weights: arithmetic, exchange with the module's weights, snapshots in files, BatchNorm statistics."""
