"""Code that several techniques share. Configs name nothing in this package."""
