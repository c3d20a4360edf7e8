"""What runs show: the report of one or several, from their folders alone."""
