"""What each technique saves on a fit, measured beside it."""
