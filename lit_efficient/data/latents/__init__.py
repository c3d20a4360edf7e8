"""Building blocks of the DataModules of latents."""
