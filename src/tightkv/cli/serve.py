"""tightkv serve: the command that starts vLLM's server with a compressed cache."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from importlib.util import find_spec
from typing import Any

from tightkv.cli.config_flags import add_config_flags, config_from_args
from tightkv.cli.output import MissingPackageError, add_output_options, emit
from tightkv.config import PRESETS, KVQuantConfig

SERVER = "vllm.entrypoints.openai.api_server"
_OPTION = "--additional-config"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        usage="tightkv serve MODEL [options below] [vLLM options]",
        description="Start vLLM's OpenAI-compatible server with a compressed KV cache. Options "
        "that are not listed here go to vLLM as they are; those after -- all do.",
    )
    parser.add_argument("model", help="model folder or hub id")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    _add_options(parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command instead of running it"
    )
    parser.add_argument(
        "--exact-rows",
        type=int,
        metavar="N",
        help="sequences that may have an exact ring at a time (default: --max-num-seqs, or as "
        "many as fit a twentieth of the memory)",
    )
    add_output_options(parser)
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    vllm_options = _parse_rest(args)
    config = config_from_args(args)
    command = server_command(args.model, config, vllm_options, args.exact_rows)
    if args.dry_run or args.json:
        data = {"command": command, "kv_quant": config.to_dict()}
        emit(args, data, shlex.join(command))
        return 0
    if find_spec("vllm") is None:
        raise MissingPackageError("tightkv serve", "vLLM", "vllm")
    sys.stdout.flush()
    os.execv(command[0], command)


def server_command(
    model: str, config: KVQuantConfig, vllm_options: list[str], exact_rows: int | None = None
) -> list[str]:
    """The server's command line; `--additional-config` among the options is extended."""
    if exact_rows is not None and exact_rows < 0:
        raise ValueError(f"--exact-rows {exact_rows}; it must be 0 (no exact rings) or more")
    options, additional = _take_additional(vllm_options)
    if "tightkv" in additional:
        raise ValueError(
            f'{_OPTION} already has a "tightkv" entry; give its fields as options of '
            "tightkv serve or with --config"
        )
    ours = shortest(config) | ({} if exact_rows is None else {"exact_rows": exact_rows})
    value = json.dumps({**additional, "tightkv": ours})
    return [sys.executable, "-m", SERVER, "--model", model, *options, _OPTION, value]


def shortest(config: KVQuantConfig) -> dict[str, Any]:
    """The fewest fields that `KVQuantConfig.from_dict` makes this config of."""
    best = None
    for preset in PRESETS:
        base = KVQuantConfig.preset(preset).to_dict()
        changes = {name: v for name, v in config.to_dict().items() if v != base[name]}
        if best is None or len(changes) < len(best) - 1:
            best = {"preset": preset, **changes}
    assert best is not None
    return best


def _parse_rest(args: argparse.Namespace) -> list[str]:
    """Take our options from what follows the model; vLLM's are what remains."""
    cut = args.rest.index("--") if "--" in args.rest else len(args.rest)
    parser = argparse.ArgumentParser("tightkv serve", add_help=False, allow_abbrev=False)
    _add_options(parser)
    _, vllm_options = parser.parse_known_args(args.rest[:cut], namespace=args)
    return vllm_options + args.rest[cut + 1 :]


def _take_additional(options: list[str]) -> tuple[list[str], dict[str, Any]]:
    """vLLM's options without --additional-config, and what that says."""
    left, text = [], "{}"
    words = iter(options)
    for word in words:
        if word == _OPTION:
            text = next(words, "")
        elif word.startswith(_OPTION + "="):
            text = word.removeprefix(_OPTION + "=")
        else:
            left.append(word)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{_OPTION} {text!r} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{_OPTION} {text!r}; it must be a JSON object")
    return left, data
