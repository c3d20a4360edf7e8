"""Building blocks of the image DataModules."""
