"""Predictions, measurements and checks of a training: plan, compare, tune, verify, and the report of a run."""
