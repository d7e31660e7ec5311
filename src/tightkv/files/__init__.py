"""Files from outside and files of ours: read with bounds, written whole or not at all."""
