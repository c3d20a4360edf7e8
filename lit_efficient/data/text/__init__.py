"""What text DataModules are made of."""
