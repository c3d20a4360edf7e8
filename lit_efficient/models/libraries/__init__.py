"""Adapters for networks of transformers, diffusers and timm."""
