"""tightkv generate."""
