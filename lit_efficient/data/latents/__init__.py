"""What DataModules of latents are made of."""
