"""Layers with latent attention (MLA)."""
