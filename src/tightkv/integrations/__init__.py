"""tightkv inside other software. Each integration imports what it needs, when it is used."""
