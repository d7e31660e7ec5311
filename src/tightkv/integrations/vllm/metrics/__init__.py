"""What an engine's cache holds and does, as Prometheus metrics."""
