"""vLLM engines with different KV caches, one after another, each in a process of its own."""

import multiprocessing
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tightkv.tools.bench import engine_worker
from tightkv.tools.bench.engine_plan import (
    OWN,
    EnginePlan,
    options_of,
    what_is_measured,
    write_shape,
)  # fmt: skip
from tightkv.tools.bench.random_weights import write_random_weights

Row = dict[str, Any]
_POLL_SECONDS = 1.0
_PROCESSES = multiprocessing.get_context("spawn")


def engine_rows(
    plan: EnginePlan,
    caches: Sequence[str],
    log: Path | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Iterator[Row]:
    """Rows of every cache as they are measured, with ratios to vLLM's own where that is there.

    `progress` is told of each engine as it begins. An engine that fails gives a row with an
    "error" and ends neither the others nor the run.
    """
    for name in caches:
        options_of(name)
    own: dict[str, Row] = {}
    names = sorted(dict.fromkeys(caches), key=lambda name: name != OWN)
    workers: list[_Worker] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tightkv-bench-")))
        model = Path(plan.model or folder / "model")
        if plan.shape:
            write_random_weights(write_shape(plan.shape, model))
        for number, name in enumerate(names):
            progress(f"engine {number + 1} of {len(names)}: {name}")
            # On a GPU the next one imports vLLM meanwhile, and waits.
            for kv in names[len(workers) : number + 1 + plan.on_gpu]:
                workers.append(_Worker(plan, kv, str(model), folder / f"{len(workers)}.txt"))
                stack.callback(workers[-1].end)
            for row in workers[number].rows():
                yield _with_ratio(row, own)
            if log is not None:
                with log.open("a", encoding="utf-8") as file:
                    file.write(workers[number].output)


def _with_ratio(row: Row, own: dict[str, Row]) -> Row:
    """The row with its ratios to vLLM's own: of the figure, and of single steps where it has them.

    `own`: vLLM's rows so far, by what is measured; this one joins them.
    """
    if row.get("value") is None:
        return row
    key = what_is_measured(row)
    if row["kv"] == OWN:
        own[key] = row
    theirs, found = _figures(own.get(key, {})), _figures(row)
    ratios = {name: found[name] / theirs[name] for name in found if theirs.get(name)}
    return {**row, "ratios": {**ratios, **row.get("ratios", {})}} if ratios else row


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    found = {"to auto": row.get("value")}
    for name in ("step", "host"):
        found[f"{name} to auto"] = (row.get(f"{name}_ms") or {}).get("p50")
    return {name: value for name, value in found.items() if value is not None}


class _Worker:
    """The process of one engine; what it says goes to a file."""

    def __init__(self, plan: EnginePlan, kv: str, model: str, said: Path) -> None:
        self._plan, self._kv, self._said = plan, kv, said
        said.touch()  # it may end before it opens the file
        self._pipe, theirs = _PROCESSES.Pipe()
        given = (plan, kv, model, theirs, said)
        self._process = _PROCESSES.Process(target=engine_worker.run, args=given)
        self._process.start()
        theirs.close()

    @property
    def output(self) -> str:
        return self._said.read_text(encoding="utf-8", errors="replace")

    def end(self) -> None:
        self._process.kill()  # does nothing to one that has ended
        self._process.join()

    def rows(self) -> Iterator[Row]:
        """It is its turn: the rows as they come, the last with an "error" if it failed."""
        timeout = self._plan.timeout
        deadline = time.monotonic() + timeout
        try:
            self._pipe.send("your turn")
            while time.monotonic() < deadline:
                alive = self._process.is_alive()  # now: one that ends meanwhile may have sent rows
                if self._pipe.poll(_POLL_SECONDS):
                    yield self._pipe.recv()
                elif not alive:
                    break
        except (EOFError, OSError):  # its end of the pipe is closed
            self._process.join(max(0.0, deadline - time.monotonic()))
        late = self._process.is_alive()
        self.end()
        row = {"bench": "engine", "kv": self._kv, "model": self._plan.name}
        if late:
            yield {**row, "error": f"not done after {timeout:g} seconds"}
        elif code := self._process.exitcode:
            yield {**row, "error": why(code, self.output)}


def why(code: int, output: str) -> str:
    """What a process that failed said last: its exception, else its last line."""
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; the processor lacks an instruction: try --dtype float32"
        return f"the engine was ended by {name}{hint if name == 'SIGILL' else ''}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b.*:", line)]
    return (raised or lines or [f"exit code {code}"])[-1]
