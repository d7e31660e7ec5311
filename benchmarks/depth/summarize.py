"""What the scores say: each cache against another one, paired by prompt and seed.

    python benchmarks/depth/summarize.py answers --model NAME --out rows.jsonl

Only prompts that both caches answered with the same seed count. The standard errors and the 95%
interval of the difference take problems as what varies: answers to one problem at several depths
and seeds are one draw. p is McNemar's exact test over the pairs in which one cache alone is right.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from generate import answers
from tasks import FAMILIES

RESAMPLES = 4000
ALL = "all"
Row = dict[str, Any]


def mcnemar(lost: int, won: int) -> float:
    """Two-sided p of so many pairs in which one alone is right, if both were equally good."""
    total = lost + won
    tail = sum(math.comb(total, k) for k in range(min(lost, won) + 1))
    return min(1.0, 2 * tail / 2**total)


class Clustered:
    """A mean over answers, of which those of one problem belong together."""

    def __init__(self, values: Sequence[tuple[str, float]]) -> None:
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for problem, value in values:
            sums[problem][0] += value
            sums[problem][1] += 1
        self.sums, self.counts = np.array([*sums.values()]).T

    @property
    def mean(self) -> float:
        return float(self.sums.sum() / self.counts.sum())

    @property
    def stderr(self) -> float | None:
        """Of a ratio of sums; None for a single problem."""
        n = len(self.sums)
        if n < 2:
            return None
        rest = self.sums - self.mean * self.counts
        return float(math.sqrt(n / (n - 1) * (rest**2).sum()) / self.counts.sum())

    def interval(self, seed: int = 0) -> list[float]:
        """95% of the means of problems that are drawn again."""
        rng, n = np.random.default_rng(seed), len(self.sums)
        picks = rng.integers(n, size=(RESAMPLES, n))
        means = self.sums[picks].sum(1) / self.counts[picks].sum(1)
        return [float(x) for x in np.quantile(means, (0.025, 0.975))]


def compare(rows: Sequence[Row], against: Sequence[Row]) -> Row | None:
    """One cache beside another; None if they answered nothing in common."""
    other = {(row["id"], row["seed"]): row for row in against}
    pairs = [(row, other[key]) for row in rows if (key := (row["id"], row["seed"])) in other]
    if not pairs:
        return None

    def over(values: Sequence[float]) -> Clustered:
        names = (f"{own['family']}/{own['problem']}" for own, _ in pairs)
        return Clustered(list(zip(names, values, strict=True)))

    right = [(own["score"] == 1, exact["score"] == 1) for own, exact in pairs]
    won, lost = right.count((True, False)), right.count((False, True))
    score = over([own["score"] for own, _ in pairs])
    reference = over([exact["score"] for _, exact in pairs])
    difference = over([own["score"] - exact["score"] for own, exact in pairs])
    return {
        "answers": len(pairs),
        "problems": len(score.sums),
        "score": score.mean,
        "stderr": score.stderr,
        "reference": reference.mean,
        "reference_stderr": reference.stderr,
        "difference": difference.mean,
        "difference_stderr": difference.stderr,
        "interval": difference.interval(),
        "won": won,
        "lost": lost,
        "p": mcnemar(lost, won),
        "same": sum(own["text"] == exact["text"] for own, exact in pairs) / len(pairs),
    }


def summarize(rows: Sequence[Row], against: str, by_depth: bool) -> list[Row]:
    """A row per family and cache, also of all families together."""
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    if against not in caches:
        raise ValueError(f"no answers of {against!r}; there are those of {', '.join(caches)}")
    groups: dict[tuple[str, int | None], list[Row]] = defaultdict(list)
    for row in rows:
        for family in (row["family"], ALL):
            groups[family, row["depth"] if by_depth else None].append(row)
    order = [*FAMILIES, ALL]
    found = []
    for family, depth in sorted(groups, key=lambda key: (order.index(key[0]), key[1] or 0)):
        own = groups[family, depth]
        exact = [row for row in own if row["cache"] == against]
        for cache in caches:
            if cache == against:
                continue
            result = compare([row for row in own if row["cache"] == cache], exact)
            if result is not None:
                place = {"family": family, "depth": depth, "cache": cache, "against": against}
                found.append({**place, **result})
    return found


def table(rows: Sequence[Row]) -> str:
    """In Markdown; figures in percent."""
    heads = (
        "task", "cache", "answers", "score", "reference", "difference", "95%", "won / lost", "p",
        "same text",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        low, high = row["interval"]
        depth = "" if row["depth"] is None else f" at {row['depth']:,}"
        cells = (
            f"{row['family']}{depth}",
            row["cache"],
            f"{row['answers']:,}",
            _percent(row["score"], row["stderr"]),
            _percent(row["reference"], row["reference_stderr"]),
            _percent(row["difference"], row["difference_stderr"], "+"),
            f"{100 * low:+.1f} to {100 * high:+.1f}",
            f"{row['won']} / {row['lost']}",
            f"{row['p']:.3f}",
            f"{row['same']:.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(value: float, error: float | None, sign: str = "") -> str:
    shown = f"{100 * value:{sign}.1f}"
    return shown if error is None else f"{shown} ± {100 * error:.1f}"


def read_folder(folder: Path) -> tuple[list[Row], Mapping[str, Any]]:
    path = folder / "scores.jsonl"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; run score.py {folder} first")
    settings = folder / "settings.json"
    facts = json.loads(settings.read_text("utf-8")) if settings.exists() else {}
    return answers(path), facts


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="made by generate.py, judged by score.py")
    parser.add_argument("--model", help="its name in the rows (default: as generate.py was given)")
    parser.add_argument("--against", default="auto", help="what the others are compared with")
    parser.add_argument("--by-depth", action="store_true")
    parser.add_argument("--json", action="store_true", help="rows in place of a table")
    parser.add_argument("--out", help="append rows to this .jsonl file")
    args = parser.parse_args(words)
    scores, facts = read_folder(args.folder)
    rows = summarize(scores, args.against, args.by_depth)
    sys.stdout.write((json.dumps(rows) if args.json else table(rows)) + "\n")
    if args.out:
        from tightkv.tools.eval.results import with_transformers
        from tightkv.tools.rows import append_rows

        shared = {"kind": "depth", "model": args.model or facts.get("model"), "settings": facts}
        append_rows(args.out, [{**shared, **row, **with_transformers()} for row in rows])


if __name__ == "__main__":
    main()
