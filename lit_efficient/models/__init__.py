"""Plain ``nn.Module`` s that know nothing of Lightning."""
