"""What a fit will need, before it runs."""
