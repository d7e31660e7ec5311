"""tightkv bench."""
