"""Judge the answers: run the code, compare numbers, lines, strings and JSON.

    python benchmarks/depth/score.py --tasks tasks.json.xz answers

Writes scores.jsonl beside the answers of each cache. Code that a model wrote is run in a process
of its own with limits on time, memory and files, in an empty folder. That is no prison for hostile
code: run it where nothing can be harmed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

from generate import answers
from tasks import Prompt, TaskFile

SECONDS = 10.0
_MEMORY = 2 << 30
_FILE = 1 << 20
_END = "tests have passed"
# Hard limits, so that the program cannot raise them; then the program.
_RUN = """
import resource, sys
names = ("CPU", "AS", "FSIZE", "NOFILE")
for name, most in zip(names, eval(sys.argv.pop())):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
exec(compile(sys.stdin.read(), "answer", "exec"), {"__name__": "__main__"})
"""


# --- code --------------------------------------------------------------------------------------
def code_of(text: str, entry: str | None = None) -> str:
    """The block of code that an answer gives; the block with the function, if it is named."""
    blocks = re.findall(r"```[\w+]*\n(.*?)(?:\n```|\Z)", text, re.DOTALL)
    if not blocks:
        return text.partition("```")[0]
    named = [block for block in blocks if entry and f"def {entry}(" in block]
    return str((named or blocks)[0])


def program(check: dict[str, Any], text: str) -> str:
    """What is run: the problem's own lines, the answer, the tests."""
    entry = check.get("entry")
    code = code_of(text, entry)
    if entry and f"def {entry}(" not in code and not re.match(r"\s", code):
        code = "\n".join("    " + line for line in code.splitlines())  # the function's body
    return f"{check['before']}\n{code}\n\n{check['test']}\nprint({_END!r})\n"


def passes(source: str, seconds: float = SECONDS) -> bool:
    """Whether a program runs to its end, in a process with limits."""
    limits = f"({int(seconds) + 1}, {_MEMORY}, {_FILE}, 64)"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _RUN, limits],
            stdin=subprocess.PIPE,
            stdout=said,  # a file has a limit, a pipe has none
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": "/nowhere", "HOME": folder, "PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
        try:  # longer than the processor's time: a busy machine is no fault of the program
            process.communicate(source.encode(errors="replace"), timeout=3 * seconds + 1)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)
        said.seek(0)
        text = said.read().decode(errors="replace")
    return process.returncode == 0 and text.endswith(f"{_END}\n")


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# --- text --------------------------------------------------------------------------------------
def number_of(text: str) -> Fraction | None:
    """The number after "answer is", else the last one."""
    pattern = r"-?\$?\d[\d,]*(?:\.\d+)?"
    told = re.findall(rf"answer is:?\s*\**\\?\(?\$?\s*({pattern})", text)
    found = told or re.findall(pattern, text)
    return Fraction(re.sub(r"[$,]", "", found[-1])) if found else None


def boxed(text: str) -> str | None:
    """What the last \\boxed{...} holds, else what follows "final answer is"."""
    start = text.rfind("\\boxed{")
    if start < 0:
        found = re.findall(r"answer is:?\s*(.+?)\.?\s*(?:\n|$)", text)
        return str(found[-1]) if found else None
    depth, begin = 0, start + len("\\boxed{")
    for i in range(begin - 1, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[begin:i]
    return None


def plain_math(text: str) -> str:
    """One spelling for answers that mean the same."""
    text = text.strip().strip("$").rstrip(".")
    for old, new in (("dfrac", "frac"), ("tfrac", "frac"), ("\\left", ""), ("\\right", "")):
        text = text.replace(old, new)
    text = re.sub(r"\\(?:text|mbox|mathrm)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\^\{?\\circ\}?|\\[!,;% ]|\\\$|\$|%|\s", "", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\d)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return re.sub(r"^[a-z]=", "", text)


def same_math(text: str, right: str) -> bool:
    own, wanted = plain_math(text), plain_math(right)
    if own == wanted:
        return True
    values = [_value(own), _value(wanted)]
    return values[0] is not None and values[0] == values[1]


def _value(text: str) -> Fraction | None:
    if found := re.fullmatch(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}", text):
        sign, above, below = found.groups()
        text = f"{sign}{above}/{below}" if not (sign and above.startswith("-")) else ""
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


def _flat(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def json_of(text: str) -> Any:
    """The first JSON object of an answer; None if there is none."""
    start = text.find("{")
    if start < 0:
        return None
    try:
        return json.JSONDecoder().raw_decode(text[start:])[0]
    except (ValueError, RecursionError):
        return None


def score(check: dict[str, Any], text: str) -> float:
    """From 0 to 1. Of several strings: the share that the answer has."""
    kind = check["kind"]
    if kind == "code":
        return float(passes(program(check, text)))
    if kind == "number":
        return float(number_of(text) == number_of(check["answer"]))
    if kind == "math":
        own = boxed(text)
        return float(own is not None and same_math(own, check["answer"]))
    if kind == "line":
        return float(text.partition("\n")[0].strip() == check["answer"])
    if kind == "json":
        return float(json_of(text) == check["answer"])
    if kind == "any":
        words = f" {_flat(text)} "
        return float(any(f" {_flat(right)} " in words for right in check["answers"]))
    if kind == "strings":
        found = sum(right.lower() in text.lower() for right in check["answers"])
        return found / len(check["answers"])
    raise ValueError(f"a check of kind {kind!r} is not known")


# --- files -------------------------------------------------------------------------------------
def score_folder(file: TaskFile, folder: Path, workers: int) -> Path:
    """Scores of all answers of a folder that belong to the task file."""
    prompts = {prompt.id: prompt for prompt in file.prompts}
    rows = [
        (path.stem, row)
        for path in sorted(folder.glob("*.jsonl"))
        if path.name != "scores.jsonl"
        for row in answers(path)
    ]
    if unknown := next((row["id"] for _, row in rows if row["id"] not in prompts), None):
        raise ValueError(f"{folder} has an answer to {unknown!r}, which the task file does not ask")
    pairs = list(dict.fromkeys((row["id"], row["text"]) for _, row in rows))
    with ThreadPoolExecutor(workers) as pool:  # caches often give the same answer: judged once
        scores = dict(
            zip(pairs, pool.map(lambda p: score(prompts[p[0]].check, p[1]), pairs), strict=True)
        )
    path = folder / "scores.jsonl"
    lines = [
        json.dumps(_row(prompts[row["id"]], cache, row, scores[row["id"], row["text"]]))
        for cache, row in rows
    ]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


def _row(prompt: Prompt, cache: str, row: dict[str, Any], points: float) -> dict[str, Any]:
    return {
        "cache": cache,
        "family": prompt.family,
        "id": prompt.id,
        "problem": prompt.problem,
        "depth": prompt.depth,
        "seed": row["seed"],
        "score": points,
        "text": row["text"],
        "finish": row["finish"],
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="made by generate.py")
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(words)
    file = TaskFile.load(args.tasks)
    for folder in args.folders:
        sys.stdout.write(f"{score_folder(file, folder, args.workers)}\n")


if __name__ == "__main__":
    main()
