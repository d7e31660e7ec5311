"""GroupRings: what the builders of a group of layers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tightkv.integrations.vllm.step.ring_table import RingTable
from tightkv.integrations.vllm.step.sink_copies import SinkCopies

if TYPE_CHECKING:
    from tightkv.integrations.vllm.step.step_sealing import StepSealing


class GroupRings:
    """The ring table of layers that run with the same metadata."""

    table: RingTable | None = None
    """Made with the first step, when vLLM has said how many blocks there are."""
    sealing: StepSealing | None = None
    """With the table, of layers that leave the sealing of pages to later steps."""
    copies: SinkCopies | None = None
    """With the table; without, each layer copies its own sinks."""
