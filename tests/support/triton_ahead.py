"""Compile what the Triton kernels would launch, without a GPU: for sm_90, or the sm_ of $SM.

python triton_ahead.py HEAD_DIM PRESET: JSON with the shared memory of each kernel, in bytes.
python triton_ahead.py HEAD_DIM PRESET append [feedback]: that of an append, and how many products
its PTX fuses with sums.
python triton_ahead.py RANK PRESET mla HEADS: of the kernels of latent attention.
Not under TRITON_INTERPRET.
"""

import json
import os
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from helpers import make_cache
from tightkv.config import KVQuantConfig
from tightkv.kernels.options import AttendOptions
from tightkv.kernels.ragged_plan import plan_groups
from tightkv.kernels.triton import attend as triton_attend
from tightkv.kernels.triton import backend as kernels
from tightkv.kernels.triton import dequantize, ragged

shared: dict[str, int] = {}
appends: dict[str, int | bool] = {}
SM = int(os.environ.get("SM", "90"))
POINTERS = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.uint8: "*u8",
    torch.float16: "*fp16", torch.int64: "*i64",
}  # fmt: skip


def compile_only(kernel, *args, grid, warmup, num_warps, enable_fp_fusion=True, **constants):
    names = kernel.arg_names
    signature = dict.fromkeys(names, "constexpr")
    aligned = {}
    for param, x in zip(kernel.params, args, strict=False):
        if x is None:
            constants[param.name] = x
            continue
        if isinstance(x, torch.Tensor):
            signature[param.name] = POINTERS[x.dtype]
        else:
            signature[param.name] = "fp32" if isinstance(x, float) else "i32"
        if not param.do_not_specialize and (isinstance(x, torch.Tensor) or x % 16 == 0):
            aligned[(param.num,)] = [["tt.divisibility", 16]]
    values = {(names.index(name),): x for name, x in constants.items()}
    source = ASTSource(kernel, signature, values, aligned)
    target = GPUTarget("cuda", SM, 32)
    options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
    built = triton.compile(source, target=target, options=options)
    name = kernel.fn.__name__
    shared[name] = max(shared.get(name, 0), built.metadata.shared)
    if name == "_append_kernel":
        appends["shared"] = shared[name]
        appends["fused"] = built.asm["ptx"].count("fma.rn.f32")
        appends["enable_fp_fusion"] = built.metadata.enable_fp_fusion


def main(dim: int, preset: str, *only: str) -> None:
    JITFunction.run = compile_only
    for place in (triton_attend, dequantize, ragged):
        place.has_ptx = lambda device: SM >= 89
    cache = make_cache(KVQuantConfig.preset(preset), rows=1, dim=dim, dtype=torch.bfloat16)
    cache._kernels = kernels.NAME
    if "feedback" in only:
        cache.feedback = torch.zeros(2, dim, dim)
    x = torch.zeros(1, 20, 2, dim, dtype=torch.bfloat16)
    cache.append(cache.table.append([0], [20]), x, x)
    if only:
        json.dump(appends, sys.stdout)
        return
    for count in (1, 20):  # a decode step, and a prefill that `kernels.prefill` does not take
        q = torch.zeros(count, 8, dim, dtype=torch.bfloat16)
        cu_seqlens = torch.tensor([0, count], dtype=torch.int32)
        new = {} if count == 1 else {"new_key": x[0], "new_value": x[0], "window": 4096}
        kernels.attend(
            cache.codec, q, cache.view(), cu_seqlens, AttendOptions(max_queries=count, **new)
        )
    if dim <= 256:
        compile_ragged(cache, q, x[0])
    json.dump(shared, sys.stdout)


def compile_ragged(cache, query, new):
    """What is launched for prompts that share a workspace."""
    view, starts = cache.view(), torch.tensor([0, len(query)], dtype=torch.int32)
    (group,) = plan_groups([len(query)], [20], 1000, starts, view.lengths)
    key = torch.empty(group.tokens, *new.shape[1:], dtype=new.dtype)
    ragged.load_workspace(cache.codec, view, group, new, new, key, key)
    ragged.unrotate(cache.codec, ragged.rotate_queries(cache.codec, query), query)


def main_mla(rank: int, preset: str, heads: int) -> None:
    from tightkv.kernels.triton import mla, mla_decode, mla_gather
    from tightkv.pages.latent import LatentCodec, LatentLayout

    JITFunction.run = compile_only
    mla_decode.has_ptx = mla_gather.has_ptx = lambda device: SM >= 89
    mla_decode.has_large_shared_memory = lambda device: SM // 10 in (9, 10)
    layout = LatentLayout(KVQuantConfig.preset(preset), rank, 64)
    codec, pages = LatentCodec(layout), torch.zeros(1, layout.page_bytes, dtype=torch.uint8)
    x = torch.zeros(2000, heads, rank + 64, dtype=torch.bfloat16)
    rows, row = torch.zeros(2000, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    for count in (1, 2000):
        mla.append(codec, pages, x[:count, 0, :rank], x[:count, 0, rank:], rows[:count])
    mla.gather(codec, pages, row[None], row, row, row, x[:1, 0])
    mla.decode(codec, x[:1, :, :rank], x[:1, :, rank:], pages, row[None], row, 1.0)
    json.dump(shared, sys.stdout)


if __name__ == "__main__":
    if sys.argv[3:4] == ["mla"]:
        main_mla(int(sys.argv[1]), sys.argv[2], int(sys.argv[4]))
    else:
        main(int(sys.argv[1]), *sys.argv[2:])
