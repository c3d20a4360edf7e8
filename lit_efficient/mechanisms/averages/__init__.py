"""Averages of weights: the arithmetic, the copies beside a model, snapshots in files, statistics of BatchNorm."""
