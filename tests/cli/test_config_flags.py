"""A flag for every config field, and which source wins."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightkv.config import CENTERINGS, CODEBOOKS, PRESETS, ROTATIONS, SCALE_MODES, KVQuantConfig
from tightkv.tools.cli.shared.config_flags import (
    add_config_flags,
    config_from_args,
    field_docs,
    flag_name,
    given_fields,
)

FIELDS = [field.name for field in dataclasses.fields(KVQuantConfig)]
# For each field another value than its default; outlier channels need the method mse.
OTHER: dict[str, Any] = {
    "key_bits": 3,
    "value_bits": 2,
    "key_method": "mse",
    "value_method": "mse",
    "key_scale": "norm",
    "value_scale": "least_squares",
    "rotation": "haar",
    "seed": 7,
    "codebook": "gaussian",
    "group_size": 64,
    "page_size": 128,
    "exact_pages": 5,
    "sinks": 9,
    "window_bits": 16,
    "key_centering": "none",
    "mean_bits": 8,
    "protected_first": 1,
    "protected_last": 2,
    "protected_bits": 16,
    "layer_bits": "0=k8v4,3=k8v8",
    "protect_keys": False,
    "feedback": "off",
    "calibration": "mine.safetensors",
    "outlier_share": 0.25,
    "outlier_extra_bits": 2,
    "outlier_side": "keys",
    "outlier_channels": (3, 5),
    "check_finite": True,
}


def parse(*argv: str | Path) -> KVQuantConfig:
    return config_from_args(namespace(*argv))


def namespace(*argv: str | Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    add_config_flags(parser)
    return parser.parse_args([str(word) for word in argv])


def as_flags(values: dict[str, Any]) -> list[str]:
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(flag_name(name) if value else flag_name(name).replace("--", "--no-", 1))
        elif isinstance(value, (tuple, list)):
            words += [flag_name(name), ",".join(map(str, value))]
        else:
            words += [flag_name(name), str(value)]
    return words


# --- every field -------------------------------------------------------------------------------
def test_every_field_has_a_flag_that_sets_it() -> None:
    assert list(OTHER) == FIELDS
    got = parse(*as_flags(OTHER))
    assert got == KVQuantConfig(**OTHER)
    assert {n for n in FIELDS if getattr(got, n) == getattr(KVQuantConfig(), n)} <= {
        "key_method",
        "value_method",
    }


@pytest.mark.parametrize("name", FIELDS)
def test_one_flag_sets_one_field(name: str) -> None:
    args = namespace(*as_flags({name: OTHER[name]}))
    assert given_fields(args) == {name: OTHER[name]}


@pytest.mark.parametrize("method", ["prod", "group", "absmax"])
def test_methods_are_flags_too(method: str) -> None:
    got = parse("--key-method", method, "--value-method", method)
    assert (got.key_method, got.value_method) == (method, method)


@given(
    preset=st.sampled_from(PRESETS),
    changes=st.fixed_dictionaries(
        {},
        optional={
            "key_scale": st.sampled_from(SCALE_MODES),
            "rotation": st.sampled_from(ROTATIONS),
            "codebook": st.sampled_from(CODEBOOKS),
            "key_centering": st.sampled_from(CENTERINGS),
            "seed": st.integers(0, 2**31),
            "sinks": st.integers(0, 32),
            "exact_pages": st.integers(1, 5),
            "protected_first": st.integers(0, 3),
            "check_finite": st.booleans(),
        },
    ),
)
def test_a_config_written_as_flags_is_read_back(preset: str, changes: dict[str, Any]) -> None:
    config = KVQuantConfig.preset(preset, **changes)
    assert parse(*as_flags(config.to_dict())) == config


def test_no_flag_gives_the_defaults() -> None:
    assert parse() == KVQuantConfig()
    assert given_fields(namespace()) == {}


def test_the_seed_of_sampling_is_another() -> None:
    args = namespace("--seed", "5")
    assert args.seed == 5 and config_from_args(args).seed == 0
    args = namespace("--rotation-seed", "5")
    assert args.seed == 0 and config_from_args(args).seed == 5


def test_help_is_the_documentation_of_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    docs = field_docs()
    assert list(docs) == FIELDS and all(docs.values())
    with pytest.raises(SystemExit):
        namespace("--help")
    shown = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(KVQuantConfig):
        default = field.default if field.default != () else "none"
        assert f"{docs[field.name]} (default: {default})" in shown
    assert docs["sinks"] == "First tokens of a sequence kept exact."


# --- which source wins -------------------------------------------------------------------------
def test_flag_over_file_over_preset_over_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"kv_quant": {"value_bits": 3, "sinks": 2}}))
    monkeypatch.setenv("TIGHTKV_KEY_BITS", "8")
    monkeypatch.setenv("TIGHTKV_VALUE_BITS", "8")
    monkeypatch.setenv("TIGHTKV_PROTECTED_FIRST", "3")
    monkeypatch.setenv("TIGHTKV_SINKS", "1")

    def got(*argv: str | Path) -> tuple[int, int, int, int]:
        config = parse(*argv)
        return config.key_bits, config.value_bits, config.protected_first, config.sinks

    assert got() == (8, 8, 3, 1)
    assert got("--preset", "k2v2") == (2, 2, 3, 1)
    assert got("--config", file) == (8, 3, 3, 2)
    assert got("--preset", "k2v2", "--config", file) == (2, 3, 3, 2)
    everything = ("--preset", "k2v2", "--config", file, "--sinks", "0", "--value-bits", "4")
    assert got(*everything) == (2, 4, 3, 0)


def test_a_preset_wins_also_where_it_names_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTKV_PRESET", "k2v2")
    assert parse().name == "k2v2"
    assert KVQuantConfig() == KVQuantConfig.preset("k4v4")
    assert parse("--preset", "k4v4") == KVQuantConfig()  # nothing of k2v2 is left


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_flag_is_the_preset(name: str) -> None:
    assert parse("--preset", name) == KVQuantConfig.preset(name)


def test_a_preset_inside_the_file_wins_over_the_flag_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"preset": "k3v3", "value_bits": 8}')
    assert parse("--preset", "k2v2", "--config", file).name == "k3v8"


def test_a_switch_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTKV_CHECK_FINITE", "1")
    assert parse().check_finite
    assert not parse("--no-check-finite").check_finite


def test_config_may_be_json_text() -> None:
    assert parse("--config", '{"sinks": 0, "outlier_channels": []}').sinks == 0


# --- what is refused ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--key-bits", "5"], "key_bits=5; supported: 2, 3, 4, 8, 16"),
        (["--preset", "k4v5"], "unknown preset 'k4v5'; did you mean"),
        (["--config", "absent.json"], "config file 'absent.json' does not exist"),
        (["--config", '{"sink": 1}'], "unknown config field 'sink'; did you mean 'sinks'?"),
        (["--config", '{"kv_quant": 3}'], "kv_quant=3"),
        (["--sinks", "65"], "sinks=65 does not fit a page"),
    ],
)
def test_bad_values_are_refused_by_name(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse(*argv)
    assert message in str(caught.value)


def test_channels_must_be_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--outlier-channels", "1,x")
    assert "'1,x'; give whole numbers with commas" in capsys.readouterr().err


def reference_rows() -> list[str]:
    """The table of fields in docs/config.md."""
    docs, rows = field_docs(), []
    for field in dataclasses.fields(KVQuantConfig):
        default = "none" if field.default in ((), "") else json.dumps(field.default).strip('"')
        rows.append(f"| `{field.name}` | {default} | {docs[field.name]} |")
    return rows


def test_the_reference_has_every_field_as_it_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
    table = page.split("## Fields")[1].split("## ")[0]
    assert [line for line in table.splitlines() if line.startswith("| `")] == reference_rows()
    assert f"The presets are {', '.join(PRESETS[:-1])} and {PRESETS[-1]}" in " ".join(page.split())
