"""A chat that keeps its cache in a file: only the newest question is read when it goes on.

python examples/chat.py --file chat "What is a compiler?"
python examples/chat.py --file chat "Give an example of one."

The second call loads `chat.safetensors`, so nothing of the first turn is computed again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tightkv import TightCache
from tightkv.tools.model_loading.load import load_model

Message = dict[str, str]


class Chat:
    """The messages of a conversation, and the cache of the tokens that the model has read."""

    def __init__(self, source: str | None, preset: str, file: Path) -> None:
        self.model, self.tokenizer = load_model(source)
        self.pages, self.text = file.with_suffix(".safetensors"), file.with_suffix(".json")
        self.messages: list[Message] = []
        self.cached: list[int] = []
        if self.pages.exists():
            # A damaged file, or one of another model, is refused.
            self.cache = TightCache.load(self.pages, model=self.model)
            saved = json.loads(self.text.read_text(encoding="utf-8"))
            self.messages, self.cached = saved["messages"], saved["cached"]
        else:
            self.cache = TightCache(preset, model=self.model)

    def ask(self, question: str, max_new_tokens: int) -> tuple[str, int]:
        """The answer, and how many tokens of the prompt had to be read for it."""
        self.messages.append({"role": "user", "content": question})
        ids = self._prompt()
        known = self._keep_common(ids[0].tolist())
        out = self.model.generate(
            ids, past_key_values=self.cache, max_new_tokens=max_new_tokens, do_sample=False
        )
        # The last token of an answer has not been read yet.
        self.cached = out[0, : self.cache.get_seq_length()].tolist()
        answer = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()
        self.messages.append({"role": "assistant", "content": answer})
        return answer, ids.shape[1] - known

    def save(self) -> None:
        self.cache.save(self.pages)
        saved = {"messages": self.messages, "cached": self.cached}
        self.text.write_text(json.dumps(saved), encoding="utf-8")

    def _prompt(self) -> torch.Tensor:
        encoded: Any = self.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return encoded["input_ids"].to(self.model.device)

    def _keep_common(self, ids: Sequence[int]) -> int:
        """Remove from the cache what differs from this prompt; at least one token is read."""
        common = 0
        for old, new in zip(self.cached, ids[:-1], strict=False):
            if old != new:
                break
            common += 1
        if common < self.cache.get_seq_length():
            self.cache.crop(common - self.cache.get_seq_length())
        return common


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--model", help="a folder or a hub id; the bundled model by default")
    parser.add_argument("--preset", default="k4v4")
    parser.add_argument("--file", type=Path, default=Path("chat"), help="without its suffix")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args(arguments)
    chat = Chat(args.model, args.preset, args.file)
    for question in args.questions:
        answer, count = chat.ask(question, args.max_new_tokens)
        print(f"> {question}\n{answer}\n")
        held = chat.cache.get_seq_length()
        print(f"[{count} tokens of the prompt were read, {held} are in the cache]\n")
    chat.save()


if __name__ == "__main__":
    main()
