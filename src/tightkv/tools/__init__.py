"""Everything that measures or talks; nothing of the cache imports it."""
