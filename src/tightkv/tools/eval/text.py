"""Texts to measure on: the user's files, or English prose that comes with every Python.

And texts as tokens, and questions about them in the words that the model was made for.
"""

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RULE = re.compile(r"[*=\-~^#\"+|]{3,}")  # underlined titles, table borders
_CODE = re.compile(r"^(>>>|\.\.\.|\$ |[+|])|::=|^\w[\w.]*\(.*\)$")
_MIN_LETTERS = 0.9  # share of letters, spaces and .,;:' in a paragraph of prose
_MIN_CHARACTERS = 80


@dataclass(frozen=True)
class Text:
    """A text and where it comes from."""

    name: str
    content: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()


def read_text(path: str | Path) -> Text:
    """A UTF-8 file."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"text file {str(path)!r} does not exist")
    try:
        return Text(str(path), path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"text file {str(path)!r} is not UTF-8: {error}") from None


def read_texts(paths: Iterable[str]) -> list[Text]:
    """These files; the default texts if there are none."""
    return [read_text(path) for path in paths] or default_texts()


def default_texts() -> list[Text]:
    """Two different texts of this Python: its language reference, and its library's docstrings."""
    return [language_reference(), library_docstrings()]


def language_reference() -> Text:
    """The prose of `pydoc_data.topics`, the language reference behind `help("topics")`."""
    from pydoc_data.topics import topics

    return Text("pydoc_data.topics", _prose(topics[name] for name in sorted(topics)))


def library_docstrings() -> Text:
    """The prose in the docstrings of the standard library's modules, read from their source."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in folder.glob("*.py") if not file.name.startswith("_"))
    text = Text("stdlib docstrings", _prose(_docstrings(files)))
    if not text.content:
        raise ValueError(f"this Python has no library source in {folder}; give --text FILE")
    return text


def _docstrings(files: Iterable[Path]) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, kinds) and (doc := ast.get_docstring(node)):
                yield doc


def _prose(documents: Iterable[str]) -> str:
    """The paragraphs that read as English, each once, lines joined, markup gone."""
    kept: dict[str, None] = {}
    for document in documents:
        for paragraph in re.split(r"\n\s*\n", document):
            lines = [line.strip() for line in paragraph.splitlines()]
            lines = [line for line in lines if line and not _RULE.fullmatch(line)]
            if any(_CODE.search(line) for line in lines):
                continue
            words = " ".join(" ".join(lines).split())
            joined = re.sub(r"\*+(\w[^*]*)\*+|`+([^`]*)`+", r"\1\2", words)
            if _is_prose(joined):
                kept[joined] = None
    return "\n\n".join(kept)


def _is_prose(paragraph: str) -> bool:
    if len(paragraph) < _MIN_CHARACTERS or paragraph[-1] not in ".:!?)":
        return False
    plain = sum(c.isalpha() or c in " .,;:'’" for c in paragraph)
    return plain >= _MIN_LETTERS * len(paragraph)


# --- as tokens ---
def encode(tokenizer: Any, content: str) -> list[int]:
    """Token ids without special tokens, however long the text is."""
    ids: list[int] = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def beginning(tokenizer: Any) -> list[int]:
    """The begin-of-text token where the tokenizer puts one before a text, else nothing."""
    ids = tokenizer("a")["input_ids"]
    return ids[:1] if len(ids) > 1 and ids[0] == tokenizer.bos_token_id else []


def ask(tokenizer: Any, document: str, questions: Sequence[str]) -> list[list[int]]:
    """A prompt per question, up to where the answer begins."""
    texts = [f"Document:\n\n{document}\n\nQuestion: {question}" for question in questions]
    if tokenizer.chat_template is None:
        first = beginning(tokenizer)
        return [first + encode(tokenizer, f"{text}\nAnswer:") for text in texts]
    return [encode(tokenizer, as_chat(tokenizer, text)) for text in texts]


def as_chat(tokenizer: Any, text: str) -> str:
    """A user's message in the model's chat template, up to where the answer begins."""
    message = {"role": "user", "content": text}
    return str(tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))
