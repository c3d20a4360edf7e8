"""Building blocks of the text DataModules."""
