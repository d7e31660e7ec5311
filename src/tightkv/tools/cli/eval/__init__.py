"""tightkv eval."""
