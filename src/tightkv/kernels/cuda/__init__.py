"""Append and decode attention in CUDA C++, compiled at run time."""
