"""What a config.json leaves out because its family's code knows it: families.json, by column."""

import json
from pathlib import Path
from typing import Any

_ROWS = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))


def column(name: str) -> dict[str, Any]:
    """The values of the families that have one."""
    return {family: row[name] for family, row in _ROWS.items() if name in row}


# Applied where the config has no such key; an explicit null stays null.
DEFAULTS: dict[str, dict[str, Any]] = column("defaults")
# A composite config.json leaves out the sizes of its language part that equal these.
NESTED_DEFAULTS: dict[str, dict[str, Any]] = column("nested_defaults")
# Families whose sliding_window, where set, holds for every layer.
ALL_SLIDE = tuple(column("all_slide"))
# Families whose scores have a bias by distance, and those with a learned logit beside the keys.
ALIBI_FAMILIES = tuple(column("alibi"))
SINK_FAMILIES = tuple(column("sinks"))
# Matrices of one MLP: gate, up and down, or up and down alone.
MLP_MATRICES: dict[str, int] = column("mlp_matrices")

# Families that have nothing this project can act on, and why.
_REASONS = {
    "encoder": "it is an encoder: it reads a whole text at once and keeps no KV cache",
    "recurrent": "it is recurrent: it has no attention layers and so no KV cache",
}
REFUSED = {family: _REASONS[kind] for family, kind in column("refused").items()}
