"""Times on a GPU, of work captured in a CUDA graph so that launches cost what they must."""

import statistics
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]
_CALLS_A_GRAPH = 12


def graph_ms(calls: Sequence[Call], repeats: int = 20) -> float:
    """Milliseconds of one call: the median of `graph_times`."""
    return statistics.median(graph_times(calls, repeats))


def graph_times(
    calls: Sequence[Call], repeats: int = 20, between: Call = lambda: None
) -> list[float]:
    """Milliseconds of one call in each replay: that of all of them, over their number.

    Give several calls on different data, together larger than the L2 cache. They are repeated in
    the graph, in turn, so that starting it is no part of the time of a call. `between` comes before
    each replay that counts and is not timed.
    """
    rounds = -(-_CALLS_A_GRAPH // len(calls))
    for call in calls:  # compiles, allocates
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        between()
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return [ms / (rounds * len(calls)) for ms in times]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles, between the two nearest ranks linearly."""
    cuts = statistics.quantiles(
        values if len(values) > 1 else 2 * list(values), n=100, method="inclusive"
    )
    return {"mean": statistics.fmean(values), **{f"p{p}": cuts[p - 1] for p in (50, 90, 99)}}


def milliseconds(seconds: Sequence[float]) -> dict[str, float] | None:
    """The same in milliseconds; None of nothing."""
    return spread([1e3 * value for value in seconds]) if seconds else None
