"""tightkv serve."""
