"""What a layer does in each step of an engine."""
