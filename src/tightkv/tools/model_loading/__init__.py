"""A model and its tokenizer by folder, by hub id, or the bundled one: for commands and scripts."""
