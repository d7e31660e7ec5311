"""Bits of each layer: what they cost in KL, and searches for the best ones."""
