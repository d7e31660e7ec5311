"""KV connectors: which can move our pages, and what they may load."""
