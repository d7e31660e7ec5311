"""Generated tasks: retrieval, tracing and counting as in RULER, tool calls, and JSON records.

The kinds and lengths are those of RULER (arXiv 2404.06654); texts and code are our own. A context
is asked about several times, so that an engine computes it once.
"""

from __future__ import annotations

import json
import random
import string
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from sources import DEPTHS, Contexts, Count
from tasks import Prompt, TaskFile

LENGTHS = (4096, 8192, 16384, 31000)


def _words(text: str) -> list[str]:
    return text.split()


_ADJECTIVES = _words("""
    amber bold calm dusty eager faint gentle hollow icy jolly keen lively mellow narrow odd plain
    quiet rapid silent tidy urgent vivid warm young zesty bright crisp damp early frosty""")
_NOUNS = _words("""
    anchor basket candle drawer engine feather garden hammer island jacket kettle ladder mirror
    needle orchard pencil quarry ribbon saddle teapot umbrella violin wagon yard bridge copper
    desert falcon glacier harbor""")
_FIRST = _words("""
    Ada Bruno Carla Dmitri Elena Felix Greta Hugo Ines Jonas Karin Luca Mara Nils Olga Pavel Rosa
    Stefan Tilda Uwe Vera Walter Xenia Yusuf Zora""")
_LAST = _words("""
    Adler Berger Costa Duarte Engel Fischer Garcia Hansen Ivanov Jensen Keller Lindgren Moreau
    Novak Olsen Petrov Quist Rossi Santos Tanaka Ullmann Vogel Weber Yilmaz Zeman""")
_CITIES = _words("""
    Lisbon Oslo Prague Riga Seville Turin Utrecht Vienna Warsaw Zagreb Athens Bergen Cork Dresden
    Evora Florence Ghent Hamburg""")
_ITEMS = _words("lamp chair desk kettle clock mirror carpet shelf sofa printer monitor keyboard")

Question = tuple[str, list[str]]
"""What is asked, and every string that the answer must have."""
Built = tuple[list[str], list[Question]]


class Maker:
    """What the kinds of contexts are made from."""

    def __init__(self, count: Count, prose: Sequence[str], rng: random.Random) -> None:
        self.count, self.prose, self.rng = count, prose, rng

    def number(self) -> str:
        return str(self.rng.randint(1_000_000, 9_999_999))

    def keys(self, count: int) -> list[str]:
        pairs = [f"{a} {n}" for a in _ADJECTIVES for n in _NOUNS]
        return self.rng.sample(pairs, count)

    def code(self, length: int = 8) -> str:
        return "".join(self.rng.choices(string.ascii_lowercase + string.digits, k=length))

    def haystack(self, needles: Sequence[str], tokens: int) -> list[str]:
        """Paragraphs of prose with the needles at even depths, in any order."""
        room = tokens - sum(self.count(needle + "\n\n") for needle in needles)
        found: list[str] = []
        start = self.rng.randrange(len(self.prose))
        for i in range(len(self.prose)):
            text = self.prose[(start + i) % len(self.prose)] + "\n\n"
            size = self.count(text)
            if size > room:
                break
            found.append(text)
            room -= size
        order = self.rng.sample(list(needles), len(needles))
        for i, needle in reversed(list(enumerate(order))):
            found.insert((2 * i + 1) * len(found) // (2 * len(order)), needle + "\n\n")
        return found

    def fill(self, line: Callable[[], str], tokens: int) -> list[str]:
        found: list[str] = []
        used = 0
        while True:
            text = line()
            used += self.count(text)
            if used > tokens:
                return found
            found.append(text)

    # --- retrieval ---
    def _needle(self, key: str, value: str, noun: str = "number") -> str:
        return f"One of the special magic {noun}s for {key} is: {value}."

    def _ask(self, key: str, noun: str = "number") -> str:
        return f"What is the special magic {noun} for {key}? Answer with the {noun} alone."

    def single(self, tokens: int) -> Built:
        keys = self.keys(6)
        values = [self.number() for _ in keys]
        needles = [self._needle(*pair) for pair in zip(keys, values, strict=True)]
        asked = [(self._ask(k), [v]) for k, v in zip(keys, values, strict=True)]
        return self.haystack(needles, tokens), asked

    def codes(self, tokens: int) -> Built:
        """Keys and values without a meaning."""
        keys = [self.code() for _ in range(6)]
        values = [f"{self.code()}-{self.code()}" for _ in keys]
        needles = [self._needle(k, v, "code") for k, v in zip(keys, values, strict=True)]
        asked = [(self._ask(k, "code"), [v]) for k, v in zip(keys, values, strict=True)]
        return self.haystack(needles, tokens), asked

    def multikey(self, tokens: int) -> Built:
        """A haystack of needles alone."""
        known = iter(self.rng.sample(range(10**5, 10**6), 2000))
        pairs: dict[str, str] = {}

        def line() -> str:
            key = f"{self.rng.choice(_ADJECTIVES)} {self.rng.choice(_NOUNS)} {next(known)}"
            pairs[key] = self.number()
            return self._needle(key, pairs[key]) + "\n"

        texts = self.fill(line, tokens)
        keys = self.rng.sample(list(pairs)[: len(texts)], 6)
        return texts, [(self._ask(key), [pairs[key]]) for key in keys]

    def multivalue(self, tokens: int) -> Built:
        keys = self.keys(4)
        values = {key: [self.number() for _ in range(4)] for key in keys}
        needles = [self._needle(key, value) for key in keys for value in values[key]]
        ask = "What are all four special magic numbers for {}? Answer with the numbers alone."
        return self.haystack(needles, tokens), [(ask.format(key), values[key]) for key in keys]

    def multiquery(self, tokens: int) -> Built:
        keys = self.keys(16)
        values = {key: self.number() for key in keys}
        needles = [self._needle(key, value) for key, value in values.items()]
        groups = [keys[i : i + 4] for i in range(0, 16, 4)]
        ask = "What are the special magic numbers for {}, {}, {} and {}? Answer with them alone."
        asked = [(ask.format(*group), [values[key] for key in group]) for group in groups]
        return self.haystack(needles, tokens), asked

    # --- tracing and counting ---
    def variables(self, tokens: int) -> Built:
        """Chains of assignments: which variables have a value."""
        needles, asked = [], []
        for _ in range(4):
            names = ["".join(self.rng.choices(string.ascii_uppercase, k=5)) for _ in range(4)]
            value = str(self.rng.randint(10000, 99999))
            lines = [f"VAR {names[0]} = {value}"]
            lines += [f"VAR {b} = VAR {a}" for a, b in pairwise(names)]
            needles.append(lines)
            ask = f"Which four variables have the value {value}, directly or through others?"
            asked.append((f"{ask} Answer with their names alone.", names))
        return self._in_order(needles, tokens), asked

    def _in_order(self, chains: Sequence[Sequence[str]], tokens: int) -> list[str]:
        """Link by link, so that an assignment stands after the one it reads."""
        links = [link for step in zip(*chains, strict=True) for link in step]
        known, waiting = {link + "\n\n" for link in links}, iter(links)
        texts = self.haystack(links, tokens)
        return [next(waiting) + "\n\n" if text in known else text for text in texts]

    def common(self, tokens: int) -> Built:
        """Words of which ten are common."""
        words = self.rng.sample([f"{a}{n}" for a in _ADJECTIVES for n in _NOUNS], 600)
        common, rare = words[:10], words[10:]
        size = (self.count(", ".join(words)) + 1) / len(words)
        total = int(0.98 * tokens / size)
        each = max(6, total // 30)
        listed = common * each
        listed += [rare[i % len(rare)] for i in range(max(0, total - len(listed)))]
        self.rng.shuffle(listed)
        texts = [", ".join(listed[i : i + 50]) + ",\n" for i in range(0, len(listed), 50)]
        ask = "What are the ten most common words in this list? Answer with the words alone."
        return texts, [(ask, common)]

    def frequent(self, tokens: int) -> Built:
        """Coded words, the i-th of which is as frequent as 1 / i."""
        words = [self.code(6) for _ in range(50)]
        weights = [1 / (i + 1) ** 1.5 for i in range(len(words))]

        def line() -> str:
            return " ".join(self.rng.choices(words, weights, k=20)) + "\n"

        texts = self.fill(line, tokens)
        most = [word for word, _ in Counter("".join(texts).split()).most_common(3)]
        ask = "What are the three most frequent coded words above? Answer with them alone."
        return texts, [(ask, most)]


def add_ruler(
    contexts: Contexts,
    prose: Sequence[str],
    quiz: Sequence[tuple[str, str, list[str]]],
    rng: random.Random,
    rounds: int,
) -> None:
    """Every kind at every length, `rounds` contexts of each."""
    maker = Maker(contexts.count, prose, rng)
    kinds: dict[str, Callable[[int], Built]] = {
        name: getattr(maker, name)
        for name in (
            "single", "codes", "multikey", "multivalue", "multiquery", "variables", "common",
            "frequent",
        )
    }  # fmt: skip
    for length in LENGTHS:
        for round_ in range(rounds):
            for kind, build in kinds.items():
                texts, asked = build(length - 200)
                checks = [{"kind": "strings", "answers": strings} for _, strings in asked]
                questions = [question for question, _ in asked]
                _add(contexts.file, kind, length, round_, texts, questions, checks)
            texts, questions, checks = _reading(maker, quiz, length - 200)
            _add(contexts.file, "reading", length, round_, texts, questions, checks)


def _reading(
    maker: Maker, quiz: Sequence[tuple[str, str, list[str]]], tokens: int
) -> tuple[list[str], list[str], list[dict[str, Any]]]:
    """Questions about passages among others."""
    asked = maker.rng.sample(list(quiz), 6)
    texts = maker.haystack([passage for passage, _, _ in asked], tokens)
    questions = [f"{question} Answer with a few words of the text." for _, question, _ in asked]
    return texts, questions, [{"kind": "any", "answers": right} for _, _, right in asked]


def _add(
    file: TaskFile,
    kind: str,
    length: int,
    round_: int,
    texts: list[str],
    questions: Sequence[str],
    checks: Sequence[dict[str, Any]],
) -> None:
    stream = f"ruler {kind} {length} {round_}"
    file.add_stream(stream, texts)
    for i, (question, check) in enumerate(zip(questions, checks, strict=True)):
        problem = f"{kind}-{length}-{round_}-{i}"
        name = f"ruler/{problem}"
        ask = f"Read the text above. {question}"
        file.prompts.append(
            Prompt(name, "ruler", problem, length, stream, len(texts), ask, check, 96)
        )


# --- tool calls and records ----------------------------------------------------------------------
_TOOLS = {
    "refund_order": "Refund {name}'s order of {date}, all of it: the {item} is broken.",
    "cancel_order": "{name} does not want the {item} any more. Cancel the order of {date}.",
    "change_address": "{name} has moved to {other}. Send the {item} ordered on {date} there.",
    "send_message": "Tell {name} by mail that the {item} ordered on {date} leaves tomorrow.",
}
_TOOL_TEXT = """Tools. Answer a request with one call, as JSON and nothing else:
{"name": "refund_order", "arguments": {"order": ORDER ID, "amount": AMOUNT}}
{"name": "cancel_order", "arguments": {"order": ORDER ID}}
{"name": "change_address", "arguments": {"order": ORDER ID, "city": NEW CITY}}
{"name": "send_message", "arguments": {"mail": MAIL, "order": ORDER ID}}

Orders, as the tool list_orders returned them:
"""


class Records:
    """Orders of people, no two alike in name and date."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        names = [f"{first} {last}" for first in _FIRST for last in _LAST]
        self.names = iter(rng.sample(names, len(names)))

    def new(self) -> dict[str, Any]:
        rng, name = self.rng, next(self.names)
        date = f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
        return {
            "order": f"{rng.choice('ABCDEFGH')}{rng.randint(10000, 99999)}",
            "name": name,
            "mail": f"{name.lower().replace(' ', '.')}{rng.randint(10, 99)}@example.org",
            "city": rng.choice(_CITIES),
            "item": rng.choice(_ITEMS),
            "date": date,
            "amount": rng.randint(1000, 99999) / 100,
        }


def _call(tool: str, record: dict[str, Any], other: str) -> dict[str, Any]:
    arguments = {
        "refund_order": {"order": record["order"], "amount": record["amount"]},
        "cancel_order": {"order": record["order"]},
        "change_address": {"order": record["order"], "city": other},
        "send_message": {"mail": record["mail"], "order": record["order"]},
    }
    return {"name": tool, "arguments": arguments[tool]}


def add_tools(contexts: Contexts, rng: random.Random, asked: int) -> None:
    def question(record: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        tool = rng.choice(list(_TOOLS))
        other = rng.choice([city for city in _CITIES if city != record["city"]])
        text = _TOOLS[tool].format(**record, other=other)
        return f"\nRequest: {text}\nCall:", _call(tool, record, other)

    def line(record: dict[str, Any]) -> str:
        return json.dumps(record) + "\n"

    _from_records(contexts, "tools", _TOOL_TEXT, line, question, rng, asked)


def add_json(contexts: Contexts, rng: random.Random, asked: int) -> None:
    keys = ("order", "name", "city", "item", "amount")

    def question(record: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        wanted = {key: record[key] for key in keys}
        text = (
            f"\nWrite the order that {record['name']} made on {record['date']} as one JSON object "
            f"with the keys {', '.join(keys)}, and nothing else. Amounts are numbers."
        )
        return text, wanted

    def line(record: dict[str, Any]) -> str:
        form = (
            "On {date} {name} from {city} ({mail}) ordered a {item}. The order has the number "
            "{order} and costs {amount:.2f} euros.\n"
        )
        return form.format(**record)

    _from_records(contexts, "json", "Orders of this year:\n", line, question, rng, asked)


def _from_records(
    contexts: Contexts,
    family: str,
    head: str,
    line: Callable[[dict[str, Any]], str],
    question: Callable[[dict[str, Any]], tuple[str, dict[str, Any]]],
    rng: random.Random,
    asked: int,
    streams: int = 12,
) -> None:
    """Prompts that ask for a record somewhere in their context."""
    held: dict[str, list[dict[str, Any]]] = {}
    for i in range(streams):
        made = Records(rng)
        records = [made.new() for _ in range(len(_FIRST) * len(_LAST))]
        name = f"{family} {i}"
        if not contexts.add(name, [head, *map(line, records)]):
            raise ValueError(f"{family}: {len(records)} records are too few for a stream")
        held[name] = records
    for i in range(asked):
        name, depth = f"{family} {i % streams}", DEPTHS[i % len(DEPTHS)]
        pieces = contexts.pieces(name, depth)
        record = rng.choice(held[name][: pieces - 1])
        text, wanted = question(record)
        problem = str(i)
        one = f"{family}/{problem}@{depth}"
        check = {"kind": "json", "answer": wanted}
        contexts.file.prompts.append(
            Prompt(one, family, problem, depth, name, pieces, text, check, 128)
        )
