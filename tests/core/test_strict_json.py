"""Files of an attacker are read in a time that grows with their size, and no faster."""

from __future__ import annotations

import pytest

from tightkv import KVQuantConfig
from tightkv.config.fields import parse_layer_bits
from tightkv.files.strict_json import Field, parse_json


def test_a_name_given_twice_is_found_among_many() -> None:
    """Half an hour where each name is compared with all others."""
    names = ",".join(f'"{i:x}":0' for i in range(200_000))
    with pytest.raises(ValueError, match="the name 'zz' twice"):
        parse_json("{" + names + ',"zz":0,"zz":0}')


def test_places_of_values_are_short_whatever_the_names() -> None:
    """Else a long name before a long list takes memory for both multiplied."""
    name = "n" * 10_000
    inner = Field({name: [{name: 1}]}, "").record_of_any()[name]
    (item,) = inner.items()
    (last,) = item.record_of_any().values()
    assert max(len(field.where) for field in (inner, item, last)) < 100
    assert Field({"a": [{"b": 1}]}, "").record_of_any()["a"].items()[0].where == "a[0]"


def test_layer_bits_are_parsed_once_for_all_layers() -> None:
    count = 300
    cfg = KVQuantConfig(layer_bits=",".join(f"{i}=k8v4" for i in range(count)))
    before = parse_layer_bits.cache_info().misses
    layers = [cfg.for_layer(i, count + 1) for i in range(count + 1)]
    assert parse_layer_bits.cache_info().misses - before <= 2
    assert [layer.name for layer in layers] == ["k8v4"] * count + ["k4v4"]
