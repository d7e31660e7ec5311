"""Measures every claim of the method on the CPU, and audits where it is weak.

`run` gives a Report: claims that pass or fail (docs/validate.md), audit rows that inform.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tightkv.tools.validate import (
    audit_attention,
    audit_codec,
    beta,
    distortion,
    inner_products,
    retrieval,
    sizes,
)
from tightkv.tools.validate.report import AuditRow, Claim, Options, Progress, Report

__all__ = ["AuditRow", "Claim", "Options", "Report", "run"]


def run(options: Options, progress: Progress = lambda step: None) -> Report:
    """Measure everything. `progress` is told how far it is."""
    start = time.perf_counter()
    claims: list[Claim] = []
    with _one_thread(), torch.inference_mode():
        for section in (distortion, inner_products, beta, retrieval, sizes):
            progress(f"claims: {section.__name__.rpartition('.')[2].replace('_', ' ')}")
            claims += section.check(options)
        progress("audit: attention")
        audit = list(audit_attention.rows(options))
        progress("audit: codec and bytes")
        audit += audit_codec.rows(options)
    claims.sort(key=lambda claim: claim.section)
    return Report(options, claims, audit, time.perf_counter() - start)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The work is many small operations: a second thread only waits for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
