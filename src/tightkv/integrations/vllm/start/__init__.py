"""What happens while an engine starts: which layers are compressed, and how."""
