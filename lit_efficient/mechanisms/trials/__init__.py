"""Steps that are taken back: batch sizes and learning rates are tried, memory is measured."""
