"""tightkv plan."""
