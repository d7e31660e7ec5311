"""Many questions over one long document, which is read once.

python examples/one_document.py
python examples/one_document.py --document report.txt "Who wrote it?" "What does it conclude?"

The cache of the document is the shared prefix. Each question goes on from a copy of it, and the
document's own cache can be saved (`cache.save`) for the next day.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tightkv import TightCache
from tightkv.tools.eval.text import default_texts
from tightkv.tools.model_loading.load import load_model

QUESTIONS = ("Which language is described?", "What is a name?", "What is an exception?")


class Document:
    """A text in a compressed cache, and answers to questions about it."""

    def __init__(self, source: str | None, preset: str, text: str, most: int) -> None:
        self.model, self.tokenizer = load_model(source)
        # The chat template's words before a message, and after it.
        mark = "0123456789"
        template: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False
        )
        before, _, self.after = template.partition(mark)
        self.ids = self._encode(before + text)[:, :most]
        self.cache = TightCache(preset, model=self.model)
        with torch.inference_mode():
            self.model(self.ids, past_key_values=self.cache, logits_to_keep=1)

    def ask(self, question: str, max_new_tokens: int) -> str:
        rest = f"\n\nQuestion: {question} Answer in one sentence.{self.after}"
        ids = torch.cat([self.ids, self._encode(rest)], dim=1)
        out = self.model.generate(
            ids,
            past_key_values=copy.deepcopy(self.cache),  # the document's cache stays as it is
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        return str(self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).strip()

    def _encode(self, text: str) -> Tensor:
        encoded = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")
        return encoded["input_ids"].to(self.model.device)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="*", default=list(QUESTIONS))
    parser.add_argument("--document", type=Path, help="UTF-8; by default Python's own reference")
    parser.add_argument("--tokens", type=int, default=3000, help="of the document, at most (3000)")
    parser.add_argument("--model", help="a folder or a hub id; the bundled model by default")
    parser.add_argument("--preset", default="k4v4")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args(arguments)
    if args.document is None:
        text = default_texts()[0].content[: 8 * args.tokens]
    else:
        text = args.document.read_text(encoding="utf-8")
    begin = time.perf_counter()
    document = Document(args.model, args.preset, text, args.tokens)
    seconds, sizes = time.perf_counter() - begin, document.cache.bytes_used()
    print(
        f"{document.ids.shape[1]} tokens in {sizes['compressed'] / 2**20:.1f} MiB (16 bits: "
        f"{sizes['bf16'] / 2**20:.1f}), loaded and read in {seconds:.1f} s\n"
    )
    for question in args.questions:
        begin = time.perf_counter()
        answer = document.ask(question, args.max_new_tokens)
        print(f"> {question}\n{answer}\n[{time.perf_counter() - begin:.1f} s]\n")


if __name__ == "__main__":
    main()
