"""Cached prefixes: how much of one is taken over, and blocks that hold our pages."""
