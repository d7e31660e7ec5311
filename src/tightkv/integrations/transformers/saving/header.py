"""Header: what a saved cache says of itself in JSON, as checked and typed values.

A checksum is no protection from the author of a file, so nothing here is taken on trust:
every value has its type and range, and together they are what TightCache.save could write.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tightkv.config import BEFORE, FORMAT_VERSION, KVQuantConfig
from tightkv.files.strict_json import Field, parse_json
from tightkv.integrations.transformers.saving.states import DTYPES, PLAIN_KINDS
from tightkv.paged.sequences import SequenceState
from tightkv.pages.layout import MAX_TOKENS, PageLayout, exact_dtype

TIGHT_KINDS = ("TightLayer", "TightHybridLayer")
_FULL_ATTENTION = (*TIGHT_KINDS, "DynamicLayer", "LinearAttentionAndFullAttentionLayer")
_MAX_HEADS = _MAX_HEAD_DIM = 1024
_MAX_EXACT_PAGES = 1 << 16
_MAX_TEXT, _MAX_LAYER_BITS = 64, 1 << 16
_QUANT_FIELDS = {field.name for field in dataclasses.fields(KVQuantConfig)}


@dataclass(frozen=True)
class SavedLayer:
    """One layer: `cfg` and `layout` of a compressed one, `state` of transformers' own part.

    `dtype` is the model's; exact tokens have the layout's.
    """

    kind: str
    cfg: KVQuantConfig | None
    layout: PageLayout | None
    dtype: torch.dtype | None
    state: Field | None


@dataclass(frozen=True)
class Header:
    """A cache without its tensors. All rows have `length` tokens, and so has every layer."""

    quant: KVQuantConfig
    grows: bool
    rows: list[SequenceState]
    length: int
    layers: list[SavedLayer]


def parse_header(text: str) -> Header:
    """Check everything that can be checked without the tensors."""
    header = Field(parse_json(text), "").record_of_any()
    version = header.get("format_version", Field(None, "format_version")).integer(0, 1 << 31)
    if version != FORMAT_VERSION:
        raise ValueError(
            f"it has format version {version}; this tightkv reads version {FORMAT_VERSION}. "
            "Load it with the tightkv that wrote it, or compute the cache again"
        )
    names = ("format_version", "quant", "fingerprint", "grows", "rows", "layers")
    fields = Field({name: field.value for name, field in header.items()}, "").record(*names)
    quant = _config(fields["quant"])
    if quant.fingerprint() != fields["fingerprint"].text():
        raise ValueError("the config's fingerprint does not match its fields")
    rows = [_row(row) for row in fields["rows"].items()]
    length = rows[0].length if rows else 0
    for i, row in enumerate(rows):
        if row.length != length:
            raise ValueError(f"rows[{i}].length={row.length}; allowed: {length}, as in rows[0]")
    layers = list(_layers(fields["layers"].items(), quant, len(rows), length))
    return Header(quant, fields["grows"].boolean(), rows, length, layers)


def _config(field: Field) -> KVQuantConfig:
    options = field.record_of_any()
    unknown = set(options) - _QUANT_FIELDS
    if unknown:
        raise ValueError(f"{field.where} has {len(unknown)} names that are no config fields")
    for name, option in options.items():
        longest = _MAX_LAYER_BITS if name == "layer_bits" else _MAX_TEXT
        if type(option.value) is str and len(option.value) > longest:
            raise option.wrong(f"at most {longest} characters")
        if type(option.value) is list and len(option.value) > _MAX_HEAD_DIM:
            raise option.wrong(f"at most {_MAX_HEAD_DIM} channels")
    try:
        given = {name: option.value for name, option in options.items()}
        cfg = KVQuantConfig.from_dict({**BEFORE, **given})
    except ValueError as error:
        raise ValueError(f"{field.where}: {str(error)[:300]}") from None
    Field(cfg.exact_pages, f"{field.where}.exact_pages").integer(1, _MAX_EXACT_PAGES)
    Field(cfg.calibration, f"{field.where}.calibration").one_of("")  # no file may name another
    return cfg


# How a file names what a SequenceState holds.
ROW_FIELDS = {
    "start": "left_pad",
    "length": "length",
    "exact_start": "ring_valid_from",
    "ring_start": "ring_read_from",
    "sink_count": "sink_count",
    "pages": "pages",
}


def _row(field: Field) -> SequenceState:
    """Types alone; `SequenceTable.restore` checks how the numbers of all rows go together."""
    fields = field.record(*ROW_FIELDS)
    pages = fields.pop("pages").items()
    numbers = {ROW_FIELDS[name]: n.integer(0, MAX_TOKENS) for name, n in fields.items()}
    return SequenceState(**numbers, pages=[page.integer(0, MAX_TOKENS) for page in pages])


def _layers(
    fields: list[Field], quant: KVQuantConfig, rows: int, length: int
) -> Iterator[SavedLayer]:
    kinds = [_kind(field) for field in fields]
    full = itertools.count()  # the number of a layer among those of full attention
    num_full = sum(kind in _FULL_ATTENTION for kind in kinds)
    for i, (kind, entry) in enumerate(zip(kinds, fields, strict=True)):
        number = next(full) if kind in _FULL_ATTENTION else 0
        names = ["kind", *(["tight"] if kind in TIGHT_KINDS else [])]
        names += ["state"] if kind != "TightLayer" else []
        field = entry.record(*names)
        if kind not in TIGHT_KINDS:
            yield SavedLayer(kind, None, None, None, field["state"])
            continue
        tight = field["tight"].record("length", "quant", "layout")
        cfg = _config(tight["quant"])
        if cfg != quant.for_layer(number, num_full, i):
            raise ValueError(f"{tight['quant'].where} is not what the cache's config gives it")
        layout = dtype = None
        if rows:  # each compressed layer has the tokens of the rows
            layout, dtype = _layout(tight["layout"], cfg)
        elif tight["layout"].value is not None:
            raise tight["layout"].wrong("null, for there are no rows")
        tight["length"].integer(length, length)
        yield SavedLayer(kind, cfg, layout, dtype, field.get("state"))


def _kind(field: Field) -> str:
    kind = field.record_of_any().get("kind", Field(None, f"{field.where}.kind"))
    return kind.one_of(*TIGHT_KINDS, *PLAIN_KINDS)


def _layout(field: Field, cfg: KVQuantConfig) -> tuple[PageLayout, torch.dtype]:
    """The layout of a layer, and the model's dtype."""
    items = field.items()
    if len(items) != 3:
        raise field.wrong("[KV heads, head_dim, dtype]")
    heads, dim = items[0].integer(1, _MAX_HEADS), items[1].integer(16, _MAX_HEAD_DIM)
    dtype = DTYPES[items[2].one_of(*DTYPES)]
    try:
        return PageLayout(cfg, heads, dim, exact_dtype(dtype)), dtype
    except ValueError as error:
        raise ValueError(f"{field.where}: {error}") from None
