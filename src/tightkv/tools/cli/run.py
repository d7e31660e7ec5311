"""tightkv run: text from a model that tightkv export wrote."""

import argparse
import os
import time
from pathlib import Path
from typing import Any

from tightkv.tools.cli.generate.prompt import encode, read_prompts
from tightkv.tools.cli.shared.loading import need_transformers
from tightkv.tools.cli.shared.options import Commands, add_command, check_least
from tightkv.tools.cli.shared.output import emit
from tightkv.tools.cli.shared.progress import Working


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "run",
        "Answer a prompt, greedily, with an exported model. A .pt2 holds machine code: "
        "run only those you trust.",
        """
        --prompt TEXT  without it: standard input
        --prompt-file FILE
        --raw  do not use the chat template
        --max-new-tokens=128 N  default: 128
        """,
    )
    parser.add_argument("file", help="the folder that tightkv export wrote, or the model in it")


def run(args: argparse.Namespace) -> int:
    check_least(args, max_new_tokens=1)
    given = Path(args.file).expanduser()
    if not given.exists():
        raise FileNotFoundError(f"{args.file!r} does not exist; give a folder of tightkv export")
    folder = given if given.is_dir() else given.parent
    prompts = [] if args.prompt is None else [args.prompt]
    (prompt,) = read_prompts(prompts, args.prompt_file, False)
    need_transformers("run")
    import transformers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tightkv.integrations.transformers.package import load_package, read_about
    from tightkv.tools.cli.generate.live import TokenClock

    about = read_about(folder)
    if given not in (folder, folder / about.model_file):
        raise ValueError(f"{args.file!r} is not the model of its folder, {about.model_file}")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the tokenizer files in {str(folder)!r} cannot be read; export it again: {error}"
        ) from None
    ids = encode(tokenizer, [prompt], args.raw)["input_ids"]
    room = about.max_tokens - ids.shape[1]
    if room < 1:
        raise ValueError(
            f"the prompt has {ids.shape[1]} tokens; this model was exported for "
            f"{about.max_tokens} with its answer: shorten it, or export with more --max-tokens"
        )
    streamer = TokenClock()
    if not args.json:
        streamer = transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with Working(f"loading {folder / about.model_file}"):
        step, count = load_package(folder, about), min(args.max_new_tokens, room)
    tokens, seconds = _greedy(step, ids, count, about.stop_tokens, streamer)
    data = {
        "schema": 1,
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "prompt_tokens": ids.shape[1],
        "new_tokens": len(tokens),
        "tokens": tokens,
        "prefill_seconds": seconds[0],
        "decode_seconds": sum(seconds[1:]),
    }
    rate = (len(seconds) - 1) / data["decode_seconds"] if len(seconds) > 1 else 0.0
    sizes = f"{ids.shape[1]} + {len(tokens)} tokens"
    emit(args, data, f"\n{sizes}, {rate:.1f} tokens/s after the first")
    return 0


def _greedy(
    step: Any, ids: Any, count: int, stop: list[int], streamer: Any
) -> tuple[list[int], list[float]]:
    """The tokens, and the seconds of the prompt and of each token after the first."""
    import torch

    tokens, seconds = list[int](), list[float]()
    position = torch.arange(ids.shape[1], device=ids.device)
    streamer.put(ids)
    while len(tokens) < count:
        start = time.monotonic()
        token = step(ids, position)[:, -1].argmax(-1)  # [1]
        seconds.append(time.monotonic() - start)
        tokens.append(int(token))
        if tokens[-1] in stop:
            break
        streamer.put(token)
        ids, position = token[:, None], position[-1:] + 1
    streamer.end()
    return tokens, seconds
