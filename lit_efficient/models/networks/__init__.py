"""Networks defined in this package, and the layers that they are made of."""
