"""What a compressed cache does to a model's answers, measured through the cache itself."""
