"""A compressed cache of fixed size, for graphs that are exported and run without Python."""

from tightkv.export.operator import OperatorError, operator_library
from tightkv.export.static_kv import StaticKV

__all__ = ["OperatorError", "StaticKV", "operator_library"]
