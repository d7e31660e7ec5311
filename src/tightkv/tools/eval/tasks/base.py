"""Task: one measurement, the same for every config, with inputs that are fixed beforehand."""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any, ClassVar

from tightkv.tools.eval.forward import Advance, MakeCache

Data = dict[str, Any]


class Task(ABC):
    """What it returns is plain data, so that results can be kept and read again."""

    name: str
    options: ClassVar[tuple[str, ...]] = ()
    """Attributes that the numbers depend on besides model, config and inputs."""

    @property
    @abstractmethod
    def inputs(self) -> Any:
        """The tokens that are read, as plain data."""

    @property
    def settings(self) -> Data:
        """Everything besides model and config that the numbers depend on."""
        return {**{x: getattr(self, x) for x in self.options}, "inputs": digest(self.inputs)}

    @property
    @abstractmethod
    def steps(self) -> int:
        """How often `measure` calls `advance(1)`."""

    @property
    def reference_steps(self) -> int:
        """How often `reference` calls `advance(1)`."""
        return self.steps

    @abstractmethod
    def read(self, model: Any, make: MakeCache | None, advance: Advance) -> Any:
        """What one cache gives; None makes the uncompressed one."""

    def compare(self, own: Any, exact: Any) -> Any:
        """The result of a compressed cache, beside what the uncompressed one gave."""
        return own

    def reference(self, model: Any, advance: Advance) -> Any:
        """What the uncompressed cache gives; every `measure` gets it."""
        return self.read(model, None, advance)

    def measure(self, model: Any, make: MakeCache, reference: Any, advance: Advance) -> Any:
        """What one compressed cache gives."""
        return self.compare(self.read(model, make, advance), reference)


def digest(value: object) -> str:
    """16 hex digits of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def paired(values: Sequence[float], reference: Sequence[float]) -> Data:
    """Both means, the mean difference and its standard error over the pairs."""
    differences = [a - b for a, b in zip(values, reference, strict=True)]
    count = len(differences)
    return {
        "mean": fmean(values),
        "reference": fmean(reference),
        "difference": fmean(differences),
        "stderr": stdev(differences) / math.sqrt(count) if count > 1 else None,
    }
