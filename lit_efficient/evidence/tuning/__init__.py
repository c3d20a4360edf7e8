"""The fastest way to run a fit within a memory."""
