"""What image DataModules are made of."""
