"""Measures every claim of the method on the CPU, and audits where it is weak.

`run` gives a Report: claims that pass or fail (docs/validate.md), audit rows that inform.
"""

import time
from collections.abc import Callable

import torch

from tightkv.tools.validate.audit import AUDIT
from tightkv.tools.validate.claims import CLAIMS
from tightkv.tools.validate.report import AuditRow, Claim, Options, Report

__all__ = ["AuditRow", "Claim", "Options", "Report", "run"]


def run(options: Options, progress: Callable[[str], None] = lambda step: None) -> Report:
    """Measure everything. `progress` is told how far it is."""
    start, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)  # many small operations: a second thread only waits for the first
    claims, audit = list[Claim](), list[AuditRow]()
    try:
        with torch.inference_mode():
            for name, section in CLAIMS.items():
                progress(f"claims: {name}")
                claims += section(options)
            progress("audit")
            for part in AUDIT:
                audit += part(options)
    finally:
        torch.set_num_threads(threads)
    claims.sort(key=lambda claim: claim.section)
    return Report(options, claims, audit, time.perf_counter() - start)
