"""Search for the fastest way to run a fit within a memory limit."""
