"""Triton kernels: NVIDIA GPUs from sm_80 on, AMD, and the interpreter."""
