"""A TightCache as one safetensors file: tensors, and a JSON header in the file's metadata.

The header has the format version, the config and its fingerprint, every layer's kind and
shape, the table, and a checksum over header and tensors. Nothing is pickled, and nothing in a
file is trusted (docs/security.md).
"""
