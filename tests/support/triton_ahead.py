"""Compiles what the Triton kernels would launch, without a GPU: `compiled`, in another process.

That is a fork of one that has imported torch and Triton, and where nothing is interpreted. Tests
that compile share a worker (workers.py), and so that process.
"""

import functools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from helpers import make_cache
from tightkv.config import KVQuantConfig
from tightkv.kernels.ragged_plan import plan_groups
from tightkv.kernels.triton import backend as kernels
from tightkv.kernels.triton import constants, ragged
from tightkv.kernels.view import AttendOptions

shared: dict[str, int] = {}
appends: dict[str, int | bool] = {}
SM = 90
_FOLDER = tempfile.TemporaryDirectory(prefix="tightkv-triton-ahead-")
POINTERS = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.uint8: "*u8",
    torch.float16: "*fp16", torch.int64: "*i64", torch.int8: "*i8",
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


@functools.cache
def _server() -> subprocess.Popen[str]:
    env = {**os.environ, "TRITON_CACHE_DIR": _FOLDER.name, "TRITON_INTERPRET": "0"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, env=env, text=True)


def compiled(dim: int, preset: str, *kind: str | int, sm: int = 90) -> dict[str, Any]:
    """Of all kernels the shared memory, in bytes. `preset` may end with "/8", a window's bits.

    Kind "append", or "append" and "feedback": of an append, and how many products its PTX fuses
    with sums. Kind "mla" and a number of heads: of latent attention, where `dim` is the rank.
    """
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    print(json.dumps([sm, dim, preset, *kind]), file=server.stdin, flush=True)
    found: dict[str, Any] | None = json.loads(server.stdout.readline())
    assert found is not None, "it does not compile; standard error says why"
    return found


def serve() -> None:
    JITFunction.run = compile_only
    for line in sys.stdin:
        process = multiprocessing.get_context("fork").Process(target=answer, args=json.loads(line))
        process.start()
        process.join()
        if process.exitcode:
            say(None)


def say(found: dict[str, Any] | None) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def answer(sm: int, dim: int, preset: str, *kind: Any) -> None:
    global SM
    SM = sm
    if kind[:1] == ("mla",):
        compile_mla(dim, preset, kind[1])
    else:
        compile_paged(dim, preset, *kind)
    say(appends if "append" in kind else shared)


def compile_paged(dim: int, preset: str, *only: str) -> None:
    constants.has_ptx = lambda device: SM >= 89
    name, _, window_bits = preset.partition("/")
    cfg = KVQuantConfig.preset(name, window_bits=int(window_bits or 16))
    cache = make_cache(cfg, rows=1, dim=dim, dtype=torch.bfloat16)
    cache._kernels = kernels.NAME
    if "feedback" in only:
        cache.feedback = torch.zeros(2, dim, dim)
    x = torch.zeros(1, 20, 2, dim, dtype=torch.bfloat16)
    cache.append(cache.table.append([0], [20]), x, x)
    if only:
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


def compile_ragged(cache, query, new):
    """What is launched for prompts that share a workspace."""
    view, starts = cache.view(), torch.tensor([0, len(query)], dtype=torch.int32)
    (group,) = plan_groups([len(query)], [20], 1000, starts, view.lengths)
    key = torch.empty(group.tokens, *new.shape[1:], dtype=new.dtype)
    ragged.load_workspace(cache.codec, view, group, new, new, key, key)
    ragged.unrotate(cache.codec, ragged.rotate_queries(cache.codec, query), query)


def compile_mla(rank: int, preset: str, heads: int) -> None:
    from tightkv.kernels.triton import mla, mla_decode
    from tightkv.pages.latent import LatentCodec, LatentLayout

    constants.has_ptx = lambda device: SM >= 89
    mla_decode.has_large_shared_memory = lambda device: SM // 10 in (9, 10)
    layout = LatentLayout(KVQuantConfig.preset(preset), rank, 64)
    codec, pages = LatentCodec(layout), torch.zeros(1, layout.page_bytes, dtype=torch.uint8)
    x = torch.zeros(2000, heads, rank + 64, dtype=torch.bfloat16)
    rows, row = torch.zeros(2000, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    for count in (1, 2000):
        mla.append(codec, pages, x[:count, 0, :rank], x[:count, 0, rank:], rows[:count])
    mla.gather(codec, pages, row[None], row, row, row, x[:1, 0])
    mla.decode(codec, x[:1, :, :rank], x[:1, :, rank:], pages, row[None], row, 1.0)


if __name__ == "__main__":
    serve()
