"""Measures every claim of the method on the CPU, and audits where it is weak.

`run` gives a Report: claims that pass or fail (docs/validate.md), audit rows that inform.
"""

from tightkv.tools.validate.report import AuditRow, Claim, Options, Report
from tightkv.tools.validate.suite import run

__all__ = ["AuditRow", "Claim", "Options", "Report", "run"]
