"""Each program of examples/ runs, on a tiny model, and does what it says."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tightkv import TightCache
from tiny_folder import write_tiny_folder

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# A message is its text, so that a chat's prompt begins with what was read before.
TEMPLATE = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("examples")
    return str(write_tiny_folder(folder / "model", template=TEMPLATE, max_position_embeddings=1024))


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_example_is_listed_and_tested() -> None:
    listed = (EXAMPLES.parent / "docs" / "python.md").read_text(encoding="utf-8")
    source = Path(__file__).read_text(encoding="utf-8")
    names = [path.stem for path in EXAMPLES.glob("*.py")]
    assert len(names) == 4
    for name in names:
        assert f"[{name}.py](../examples/{name}.py)" in listed
        assert f'example("{name}")' in source


def test_a_chat_goes_on_from_its_file(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, words = example("chat"), ["--model", tiny, "--max-new-tokens", "8", "--file"]
    first, second = "word " * 90, "and then?"
    program.main([*words, str(tmp_path / "whole"), first, second])
    whole = capsys.readouterr().out
    program.main([*words, str(tmp_path / "parts"), first])
    program.main([*words, str(tmp_path / "parts"), second])
    assert capsys.readouterr().out == whole, "a loaded cache is the cache that was saved"
    (_, held), (new, _) = re.findall(r"(\d+) tokens of the prompt were read, (\d+)", whole)
    assert int(held) > 450 and int(new) < 40


def test_a_chat_reads_again_from_where_its_text_differs(tiny: str, tmp_path: Path) -> None:
    chat = example("chat").Chat(tiny, "k4v4", tmp_path / "chat")
    chat.ask("one two three", 4)
    chat.messages[0]["content"] = "one two four"
    answer, read = chat.ask("five", 4)
    fresh = example("chat").Chat(tiny, "k4v4", tmp_path / "other")
    fresh.messages = chat.messages[:-2]
    assert fresh.ask("five", 4)[0] == answer
    assert read < fresh.cache.get_seq_length()


def test_a_server_without_places_is_refused(tiny: str) -> None:
    for word in ("--places", "--max-new-tokens"):
        with pytest.raises(SystemExit):
            example("batch_server").main(["--model", tiny, word, "0"])


def test_requests_of_a_batch_are_answered_as_each_alone(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program = example("batch_server")
    questions = ["a", "b" * 300, "c d e", "f" * 40, "g"]
    server = program.Server(tiny, "k8v8", places=3, max_new_tokens=12)
    server.model.float()  # rows of a batch round as one row does
    server.model.generation_config.eos_token_id = None
    alone = []
    for question in questions:
        ids = torch.tensor([server.encode(question)])
        cache = TightCache("k8v8", model=server.model)
        out = server.model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False)
        alone.append(out[0, ids.shape[1] :].tolist())
    server.ends = {alone[0][3]}  # the first request leaves before those that were read with it
    for tokens in alone:
        if server.ends & set(tokens):
            del tokens[tokens.index(*server.ends) + 1 :]
    assert len(alone[0]) < min(len(alone[1]), len(alone[2]))
    waiting = deque(program.Request(n, question) for n, question in enumerate(questions))
    found = list(server.run(waiting))
    assert sorted(request.number for request, _ in found) == list(range(5))
    assert max(running for _, running in found) == 3
    assert {request.number: request.tokens for request, _ in found} == dict(enumerate(alone))
    program.main(["--model", tiny, "--max-new-tokens", "3", *questions])
    assert capsys.readouterr().out.count("at a time]") == 5


def test_questions_go_on_from_a_document_that_stays(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = example("one_document")
    document = program.Document(tiny, "k4v4", "some text " * 60, 500)
    assert document.ids.shape[1] == document.cache.get_seq_length() == 500
    answers = [document.ask(question, 8) for question in ("one?", "two?", "one?")]
    assert answers[0] == answers[2]
    assert document.cache.get_seq_length() == 500
    (tmp_path / "text").write_text("words " * 100)
    words = ["--document", str(tmp_path / "text"), "--tokens", "400", "--max-new-tokens", "3"]
    program.main(["--model", tiny, *words, "one?", "two?"])
    out = capsys.readouterr().out
    assert out.startswith("400 tokens in ") and out.count("\n> ") == 2


def test_calibrate_and_serve(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.safetensors"
    words = [tiny, "--tokens", "512", "--window", "256", "--file", str(file), "--dry-run"]
    example("calibrate_and_serve").main([*words, "--port", "8000"])
    assert file.stat().st_size > 1000
    out = capsys.readouterr().out
    steps = re.findall(r"^\$ tightkv (\w+)", out, re.MULTILINE)
    assert steps == ["calibrate", "eval", "serve"]
    assert out.rstrip().splitlines()[-1].count(str(file)) == 1
    assert "--port 8000" in out.rstrip().splitlines()[-1]
