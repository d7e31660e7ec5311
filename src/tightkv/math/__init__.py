"""Seeded rotations, scalar codebooks and the quantizers built on them."""
