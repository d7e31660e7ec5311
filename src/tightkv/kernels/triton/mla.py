"""append, gather and decode of latent attention in Triton: as `kernels.mla_reference`."""

from __future__ import annotations

from tightkv.kernels.triton.mla_append import append
from tightkv.kernels.triton.mla_decode import decode
from tightkv.kernels.triton.mla_gather import gather

__all__ = ["NAME", "append", "decode", "gather"]

NAME = "triton"
