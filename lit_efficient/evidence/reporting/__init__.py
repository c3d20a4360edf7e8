"""Pages of HTML with pictures, and tables for terminals."""
