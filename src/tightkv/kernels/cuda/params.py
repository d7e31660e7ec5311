"""The arguments of the CUDA kernels, as ctypes structures."""

import ctypes


def _fields(ctype: type, names: str) -> list[tuple[str, type]]:
    return [(name, ctype) for name in names.split()]


class DecodeParams(ctypes.Structure):
    """`struct DecodeParams` of decode_params.cuh."""

    _fields_ = (
        _fields(ctypes.c_void_p, "query pages block_table lengths left_pad ring_read_from")
        + _fields(ctypes.c_void_p, "sink_counts ring_rows cu_seqlens")
        + _fields(ctypes.c_void_p, "ring_key ring_value sink_key sink_value")
        + _fields(ctypes.c_void_p, "rotation value_center blocks partial partial_lse out lse")
        + _fields(ctypes.c_longlong, "query_n query_h out_n out_h table_b page_bytes total_rows")
        + _fields(ctypes.c_float, "scale softcap")
        + _fields(ctypes.c_int, "ring sinks num_splits")
        + _fields(ctypes.c_int, "window causal overlaps_append table_pages batch max_queries")
        + _fields(ctypes.c_void_p, "ring_scales")
    )


class PlanParams(ctypes.Structure):
    """`struct PlanParams` of split_plan.cu."""

    _fields_ = _fields(ctypes.c_void_p, "lengths left_pad ring_read_from blocks rows") + _fields(
        ctypes.c_int, "batch num_blocks heads slots window least"
    )


class AppendParams(ctypes.Structure):
    """`struct AppendParams` of encode.cuh."""

    _fields_ = (
        _fields(ctypes.c_void_p, "key value pages block_table lengths left_pad ring_rows")
        + _fields(ctypes.c_void_p, "ring_valid_from cu_seqlens")
        + _fields(ctypes.c_void_p, "ring_key ring_value sink_key sink_value rotation")
        + _fields(ctypes.c_void_p, "key_center value_center")
        + _fields(ctypes.c_longlong, "key_n key_h value_n value_h table_b page_bytes")
        + _fields(ctypes.c_int, "ring sinks encode_partial_page copy encode")
        + _fields(ctypes.c_void_p, "ring_scales")
        + _fields(ctypes.c_int, "lag")
    )


class SealParams(ctypes.Structure):
    """`struct SealParams` of sealed_layers.cuh."""

    _fields_ = _fields(ctypes.c_void_p, "layers count pages rotation") + _fields(
        ctypes.c_int, "num_layers slots"
    )


class StepParams(ctypes.Structure):
    """`struct StepParams` of static_step.cu."""

    _fields_ = (
        _fields(ctypes.c_void_p, "position new_left_pad state lengths left_pad ring_read_from")
        + _fields(ctypes.c_void_p, "sink_counts ring_valid_from cu_seqlens refused")
        + _fields(ctypes.c_int, "count batch max_tokens page_size exact_pages ring sinks")
        + _fields(ctypes.c_int, "ring_slack ring_window window_step")
    )
