"""Tool calls: a long prompt of requests and calls in JSON, which the model must continue."""

import json
import random
from dataclasses import dataclass
from typing import Any

from tightkv.tools.eval.forward import Advance, MakeCache, write_lines
from tightkv.tools.eval.tasks.base import Data, Task
from tightkv.tools.eval.tasks.needles import FACTS
from tightkv.tools.eval.text import beginning, encode

CALL_TOKENS = 96
_COUNTED = ("json", "valid", "correct")

# The tools: a request for each, and what its arguments are drawn from.
_TOOLS: dict[str, Any] = FACTS["tools"]


@dataclass(frozen=True)
class Call:
    """A request and the call that answers it."""

    request: str
    name: str
    arguments: dict[str, Any]

    @property
    def text(self) -> str:
        return json.dumps({"name": self.name, "arguments": self.arguments})


@dataclass(frozen=True)
class Conversation:
    """Prompts that begin alike and end in a request each."""

    context: int
    prompts: tuple[tuple[int, ...], ...]
    calls: tuple[Call, ...]


def build_conversation(tokenizer: Any, context: int, calls: int, seed: int) -> Conversation:
    """As many calls with answers as `context` tokens hold, then `calls` different last requests."""
    rng = random.Random(seed)
    last = [_call(rng) for _ in range(calls)]
    ends = [encode(tokenizer, f"Request: {call.request}\nCall:") for call in last]
    room = context - CALL_TOKENS - max(map(len, ends))
    shots, used = beginning(tokenizer), 0
    while True:
        shown = _call(rng)
        tokens = encode(tokenizer, f"Request: {shown.request}\nCall: {shown.text}\n\n")
        if len(shots) + len(tokens) > room:
            break
        shots, used = shots + tokens, used + 1
    if used < len(_TOOLS):
        raise ValueError(
            f"a context of {context} tokens holds {used} calls; at least {len(_TOOLS)} are needed: "
            "take longer --contexts"
        )
    return Conversation(context, tuple((*shots, *end) for end in ends), tuple(last))


def judge(reply: str, wanted: Call) -> dict[str, bool]:
    """What a reply is: JSON, a call with the right arguments' names, the very call wanted."""
    try:
        got = json.loads(reply)
    except (ValueError, RecursionError):
        return dict.fromkeys(_COUNTED, False)
    known = isinstance(got, dict) and isinstance(got.get("name"), str) and got["name"] in _TOOLS
    valid = (
        known
        and set(got) == {"name", "arguments"}
        and isinstance(got["arguments"], dict)
        and set(got["arguments"]) == set(_TOOLS[got["name"]]["arguments"])
    )
    correct = got == {"name": wanted.name, "arguments": wanted.arguments}
    return {"json": True, "valid": valid, "correct": correct}


@dataclass(frozen=True)
class ToolTask(Task):
    """Greedy replies to the last requests, parsed."""

    tokenizer: Any
    conversations: tuple[Conversation, ...]
    name = "tools"

    @property
    def inputs(self) -> Any:
        return [talk.prompts for talk in self.conversations]

    @property
    def steps(self) -> int:
        return sum(len(talk.prompts) for talk in self.conversations)

    def compare(self, own: Data, exact: Data) -> Data:
        return {**own, **{f"reference_{name}": exact[name] for name in _COUNTED}}

    def read(self, model: Any, make: MakeCache | None, advance: Advance) -> Data:
        replies: list[Data] = []
        for talk in self.conversations:
            lines = write_lines(model, make, self.tokenizer, talk.prompts, CALL_TOKENS, advance)
            for reply, call in zip(lines, talk.calls, strict=True):
                told = {"context": talk.context, "expected": call.text, "reply": reply}
                replies.append({**told, **judge(reply, call)})
        sums = {name: sum(reply[name] for reply in replies) for name in _COUNTED}
        return {"asked": len(replies), **sums, "replies": replies}


def _call(rng: random.Random) -> Call:
    name = rng.choice(list(_TOOLS))
    fields = _TOOLS[name]["arguments"]
    arguments = {field: rng.choice(values) for field, values in fields.items()}
    return Call(_TOOLS[name]["request"].format(**arguments), name, arguments)
