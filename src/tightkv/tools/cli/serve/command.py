"""tightkv serve: the command that starts vLLM's server with a compressed cache."""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tightkv import __version__
from tightkv.config import KVQuantConfig, Windows, is_off
from tightkv.fit import Checkpoint, fit_bits
from tightkv.tools.cli.serve.vllm_options import (
    name_of,
    read_vllm_file,
    take_model,
    with_dashes,
    with_ours,
)
from tightkv.tools.cli.shared import config_flags, output, terminal
from tightkv.tools.cli.shared.options import Commands, add_options
from tightkv.tools.cli.shared.progress import QUICK_SECONDS, Working
from tightkv.tools.cli.shared.server_file import read_server_file

SERVER = "vllm.entrypoints.openai.api_server"


def add_parser(commands: Commands) -> None:
    # No prefix: every word is a plain one, in its place, until `_parse` tells whose it is.
    parser = commands.add_parser("serve", prefix_chars="\0", add_help=False)
    parser.add_argument("words", nargs=argparse.REMAINDER)


def own_parser() -> argparse.ArgumentParser:
    """The options that are not vLLM's."""
    parser = argparse.ArgumentParser(
        "tightkv serve",
        usage="tightkv serve [MODEL] [options below] [vLLM options]",
        description="Start vLLM's OpenAI-compatible server with a compressed KV cache. MODEL is a "
        "folder or a hub id; --config may name it instead. Options that are not listed here go to "
        "vLLM as they are; those after -- all do.",
        allow_abbrev=False,
    )
    add_options(
        parser,
        """
        --dry-run  print the command instead of running it
        --exact-rows N  number of sequences that can have an exact ring at a time (default:
            --max-num-seqs, or as many as fit in a twentieth of the memory)
        --sliding-windows  compress layers with a sliding window too, where that takes less memory
        """,
    )
    output.add_output_options(parser)
    config_flags.add_config_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    given, vllm_options = _parse(args)
    options, file = config_flags.options_from_args(args), read_server_file(args.config)
    config = None if is_off(options) else KVQuantConfig.from_dict(options)
    vllm_file = read_vllm_file(vllm_options)
    model = given or file.model or vllm_file.get("--model")
    if model is None:
        raise ValueError(
            "no model; give its folder or hub id before vLLM's options, or --config with a model"
        )
    of_file = list(file.options)
    if file.served_name is not None and model == file.model:
        of_file += ["--served-model-name", file.served_name]
    rows = file.exact_rows if args.exact_rows is None else args.exact_rows
    windows = args.sliding_windows or file.windows
    _refuse_two_files(of_file, vllm_file, vllm_options)
    # vLLM takes the last of two: the command line wins over the file.
    command = server_command(model, config, [*of_file, *vllm_options], rows, windows)
    for line in (*file.notes, *([config_flags.OFF_LINE] if config is None else [])):
        output.print_status(line)
    if config is not None:
        _tell_of_folder(model, config, [*vllm_file, *vllm_options])
    if args.dry_run or args.json:
        fields = None if config is None else config.to_dict()
        data = {"schema": 1, "tightkv": __version__, "command": command, "kv_quant": fields}
        output.emit(args, data, shlex.join(command))
        return 0
    if find_spec("vllm") is None:
        raise output.MissingPackageError("tightkv serve", "vLLM", "vllm")
    sys.stdout.flush()
    os.execv(command[0], command)


def _refuse_two_files(
    ours: Sequence[str], vllm_file: Mapping[str, Any], options: Sequence[str]
) -> None:
    """Our file's settings are options, which would override those of vLLM's file unnoticed."""
    given = set(map(name_of, options))
    for name, value in zip(ours[::2], ours[1::2], strict=True):
        if name not in given and str(vllm_file.get(name, value)) != value:
            raise ValueError(
                f"{name} is {value} in the file of tightkv serve and {vllm_file[name]} in that of "
                "vLLM; keep one of them, or give the option on the command line"
            )


def _tell_of_folder(model: str, config: KVQuantConfig, options: list[str]) -> None:
    """Say before the engine starts which layers of a folder get more bits, and why.

    A calibration of another model is refused. What is not on this machine yet, or not as it will
    be loaded, the engine checks itself.
    """
    if not Path(model).is_dir() or "--load-format" in map(name_of, options):
        return
    with Working(f"reading weights of {model}", delay=QUICK_SECONDS):
        found = fit_bits(Checkpoint(Path(model), model), config)
    for line in (found.calibration_line, found.keys_line):
        if line is not None:
            terminal.print_line(line)


def server_command(
    model: str,
    config: KVQuantConfig | None,
    vllm_options: list[str],
    exact_rows: int | None = None,
    windows: Windows = False,
) -> list[str]:
    """The server's command line; `--additional-config` among the options is extended.

    Without a config compression is off, whatever the environment says.
    """
    if exact_rows is not None and exact_rows < 0:
        raise ValueError(f"--exact-rows {exact_rows}; it must be 0 (no exact rings) or more")
    ours: dict[str, Any] | bool = False
    if config is not None:
        ours = config_flags.shortest(config)
        ours |= {} if exact_rows is None else {"exact_rows": exact_rows}
        ours |= {"sliding_windows": windows} if windows else {}
    options = with_ours(vllm_options, read_vllm_file(vllm_options), ours)
    return [sys.executable, "-m", SERVER, "--model", model, *options]


def _parse(args: argparse.Namespace) -> tuple[str | None, list[str]]:
    """Take our options from the words; the model, if the next is no option; the rest is vLLM's."""
    words = list(map(with_dashes, args.words))
    cut = words.index("--") if "--" in words else len(words)
    _, rest = own_parser().parse_known_args(words[:cut], namespace=args)
    model = rest.pop(0) if rest and not rest[0].startswith("-") else None
    return take_model(model, rest + words[cut + 1 :])
