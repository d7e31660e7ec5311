"""A layer's cache: sequences, their pages and exact tokens, and attention over them."""
