"""tightkv export: a model and its compressed cache as a file that runs without Python."""

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tightkv.files.atomic import check_folder
from tightkv.tools.cli.shared.config_flags import config_from_args
from tightkv.tools.cli.shared.loading import load_for, need_transformers
from tightkv.tools.cli.shared.options import Commands, add_command
from tightkv.tools.cli.shared.output import emit, human_bytes
from tightkv.tools.cli.shared.progress import Working
from tightkv.tools.model_loading.source import DTYPE_NAMES, check_source

MAX_TOKENS = 2048


def add_parser(commands: Commands) -> None:
    add_command(
        commands,
        "export",
        "Compile a model with its compressed cache into one file. "
        "`tightkv run` runs it, and so does any process that has libtorch (docs/export.md).",
        f"""
        --output FOLDER!  a new folder, or an exported model's
        --format=pt2 {{pt2,pte}}  pt2: an AOTInductor package, for libtorch (default); pte: for
            ExecuTorch
        --backend {{xnnpack,portable,cpu,cuda}}  of a pte: xnnpack (default) or portable; of a pt2:
            cpu (default) or cuda, for GPUs like the one here
        --max-tokens={MAX_TOKENS} N  prompt and answer together; the cache has this size
            (default: {MAX_TOKENS})
        --dtype {{{",".join(DTYPE_NAMES)}}}  default: of a pte float32, which XNNPACK computes;
            else bfloat16 where it is fast
        """,
        model=True,
        config=True,
    )


def run(args: argparse.Namespace) -> int:
    config, folder = config_from_args(args), Path(args.output).expanduser()
    if args.max_tokens < 2:
        raise ValueError(
            f"--max-tokens {args.max_tokens}; it must be at least 2: a prompt, a token"
        )
    allowed = ("xnnpack", "portable") if args.format == "pte" else ("cpu", "cuda")
    if args.backend is not None and args.backend not in allowed:
        raise ValueError(
            f"--backend {args.backend} with --format {args.format}; supported: {', '.join(allowed)}"
        )
    on_gpu = args.backend == "cuda"
    if on_gpu:
        from tightkv.kernels.cuda import backend as cuda_kernels

        if reason := cuda_kernels.unavailable("cuda", asked=True):
            raise ValueError(f"--backend cuda compiles kernels for the GPU at hand: {reason}")
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"--output {args.output!r} is a file; give a folder")
    check_folder(folder)
    check_source(args.model)
    need_transformers("export")
    start = time.monotonic()
    # a pte is for another processor than the one here
    dtype = args.dtype or ("float32" if args.format == "pte" else None)
    model, tokenizer = load_for(
        "export", args.model, dtype=dtype, device="cuda" if on_gpu else "cpu"
    )
    from tightkv.integrations.transformers.package import write_package
    from tightkv.tools.eval.forward import max_positions
    from tightkv.tools.model_loading.load import quiet

    limit = max_positions(model)
    if limit is not None and args.max_tokens > limit:
        raise ValueError(f"--max-tokens {args.max_tokens}; the model takes {limit}")
    how: dict[str, Any] = {"max_tokens": args.max_tokens, "kind": args.format}
    how["backend"] = args.backend if args.format == "pte" else None
    with quiet(), Working("exporting") as work:
        about = write_package(model, tokenizer, config, folder, **how, progress=work.step)
    size, seconds = (folder / about.model_file).stat().st_size, time.monotonic() - start
    data = {**asdict(about), "folder": str(folder), "file_bytes": size, "seconds": seconds}
    text = (
        f"{folder / about.model_file}: {human_bytes(size)}, {about.dtype}, cache {config.name} of "
        f"{human_bytes(about.cache_bytes)} for {about.max_tokens} tokens\n"
        f"tightkv run {folder} --prompt ..."
    )
    emit(args, data, text)
    return 0
