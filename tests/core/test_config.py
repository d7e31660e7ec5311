import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightkv
from tightkv.config import (
    BITS,
    ENV_SETTINGS,
    ENV_SOURCES,
    METHODS,
    PRESETS,
    SCALE_MODES,
    KVQuantConfig,
    env_requests,
)


def test_presets_set_the_bits_of_their_name():
    for name in PRESETS:
        cfg = KVQuantConfig.preset(name)
        assert cfg.name == name
        assert (cfg.key_bits, cfg.value_bits) == (int(name[1]), int(name[3]))
        assert cfg == KVQuantConfig.parse(name)


@given(
    key_bits=st.sampled_from(BITS),
    value_bits=st.sampled_from(BITS),
    method=st.sampled_from([m for m in METHODS if m != "prod"]),
    scale=st.sampled_from(SCALE_MODES),
    sinks=st.integers(0, 32),
    seed=st.integers(0, 2**40),
)
def test_round_trips_through_json(key_bits, value_bits, method, scale, sinks, seed):
    cfg = KVQuantConfig(
        key_bits=key_bits,
        value_bits=value_bits,
        value_method=method,
        key_scale=scale,
        sinks=sinks,
        seed=seed,
    )
    assert KVQuantConfig.parse(cfg.to_json()) == cfg
    assert KVQuantConfig.parse(json.loads(cfg.to_json())) == cfg
    assert KVQuantConfig.from_dict(cfg.to_dict()) == cfg


def test_outlier_channels_round_trip():
    cfg = KVQuantConfig(key_bits=3, value_bits=2, outlier_share=0.25, outlier_channels=(3, 1))
    assert KVQuantConfig.parse(cfg.to_json()) == cfg


def test_parses_a_file_with_a_kv_quant_block(tmp_path):
    path = tmp_path / "serve.json"
    path.write_text('{"model": "x", "kv_quant": {"preset": "k3v2", "sinks": 2}}')
    assert KVQuantConfig.parse(path) == KVQuantConfig.preset("k3v2", sinks=2)
    assert KVQuantConfig.parse(str(path)) == KVQuantConfig.preset("k3v2", sinks=2)


def test_environment_preset_file_then_fields(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"kv_quant": {"sinks": 2, "seed": 9}}')
    env = {
        "TIGHTKV_PRESET": "k3v2",
        "TIGHTKV_CONFIG": str(path),
        "TIGHTKV_SEED": "11",
        "TIGHTKV_CHECK_FINITE": "true",
        "TIGHTKV_OUTLIER_SHARE": "0.25",
        "TIGHTKV_OUTLIER_CHANNELS": "1, 2,5",
        "TIGHTKV_KERNELS": "reference",
        "HOME": "/",
    }
    cfg = KVQuantConfig.from_env(env)
    assert (cfg.key_bits, cfg.value_bits, cfg.sinks, cfg.seed) == (3, 2, 2, 11)
    assert cfg.check_finite and cfg.outlier_share == 0.25 and cfg.outlier_channels == (1, 2, 5)
    assert KVQuantConfig.from_env({}) == KVQuantConfig()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"key_bits": 5}, ["key_bits=5", "2, 3, 4, 8, 16"]),
        ({"value_bits": "4"}, ["value_bits='4'", "int"]),
        ({"key_bits": True}, ["key_bits=True", "int"]),
        ({"key_method": "mes"}, ["'mes'", "did you mean 'mse'"]),
        ({"pagesize": 64}, ["'pagesize'", "did you mean 'page_size'"]),
        ({"page_size": 48}, ["page_size=48", "32, 64, 128, 256"]),
        ({"sinks": -1}, ["sinks=-1", "at least 0"]),
        ({"sinks": 65}, ["sinks=65", "0 to 64"]),
        ({"exact_pages": 0}, ["exact_pages=0", "at least 1"]),
        ({"preset": "k4v5"}, ["'k4v5'", "k4v4"]),
        ({"outlier_share": 1.0, "key_bits": 2}, ["outlier_share=1.0"]),
        ({"outlier_share": 0.5}, ["key_bits=4 + outlier_extra_bits=1 = 5"]),
        ({"outlier_channels": [1]}, ["outlier_share is 0"]),
        ({"outlier_share": 0.5, "outlier_channels": [1, 1]}, ["twice"]),
        ({"outlier_share": 0.5, "outlier_channels": [-1]}, ["(-1,)"]),
        ({"key_bits": 8, "key_method": "prod"}, ["7-bit codebook", "gaussian"]),
        ({"preset": 4}, ["preset=4", "k4v4"]),
        ({"kv_quant": 3}, ["kv_quant=3"]),
        ({"kv_quant": {}, "preset": "k2v2"}, ["'preset' is next to 'kv_quant'", "into"]),
        ({"kv_quant": {}, "sinks": 1}, ["'sinks' is next to 'kv_quant'", "into"]),
        ({"kv_quant": {}, "key_bitz": 2}, ["'key_bitz'", "kv_quant, model, runtime"]),
        ({"kv_quant": {}, "modl": "x"}, ["'modl'", "did you mean 'model'"]),
        ({"model": "x"}, ["unknown config field 'model'"]),
    ],
)
def test_bad_values_name_value_allowed_and_nearest(options, words):
    with pytest.raises(ValueError) as error:
        KVQuantConfig.from_dict(options)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("env", "word"),
    [
        ({"TIGHTKV_KEYBITS": "3"}, "TIGHTKV_KEY_BITS"),
        ({"TIGHTKV_KEY_BITS": "three"}, "TIGHTKV_KEY_BITS='three'"),
        ({"TIGHTKV_CHECK_FINITE": "maybe"}, "true or false"),
        ({"TIGHTKV_CONFIG": '{"kv_quant": {}, "sink": 1}'}, "unknown block 'sink'"),
        ({"TIGHTKV_CPU_ISAS": "neon"}, "did you mean 'TIGHTKV_CPU_ISA'"),
    ],
)
def test_bad_environment(env, word):
    with pytest.raises(ValueError, match=word):
        KVQuantConfig.from_env(env)


def test_fields_presets_and_files_ask_for_compression_and_nothing_else_does():
    env = dict.fromkeys((*ENV_SOURCES, "TIGHTKV_SINKS", *ENV_SETTINGS, "PATH"), "1")
    assert env_requests(env) == [*ENV_SOURCES, "TIGHTKV_SINKS"]


def test_every_variable_the_package_reads_is_in_one_of_the_two_lists():
    """So that a new one is a request or a setting by decision."""
    sources = Path(tightkv.__file__).parent.rglob("*.py")
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    read = set(re.findall(r"[\"']TIGHTKV_[A-Z_]+[\"']", text))
    assert {name.strip("\"'") for name in read} == {*ENV_SOURCES, *ENV_SETTINGS}


def test_bad_sources(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        KVQuantConfig.parse(str(tmp_path / "missing.json"))
    with pytest.raises(ValueError, match="not valid JSON"):
        KVQuantConfig.parse("{nope")
    with pytest.raises(ValueError, match="did you mean 'k4v4'"):
        KVQuantConfig.parse("k4v")
    broken = tmp_path / "list.json"
    broken.write_text("[1]")
    with pytest.raises(ValueError, match="must be an object"):
        KVQuantConfig.parse(broken)


def test_fingerprint_follows_stored_bytes_only():
    base = KVQuantConfig()
    assert base.fingerprint() == KVQuantConfig().fingerprint()
    assert (
        base.fingerprint() == base.replace(sinks=1, exact_pages=3, check_finite=True).fingerprint()
    )
    for change in (
        {"key_bits": 3},
        {"seed": 1},
        {"rotation": "haar"},
        {"page_size": 128},
        {"key_centering": "none"},
        {"mean_bits": 8},
        {"value_scale": "norm"},
        {"protected_first": 1},
    ):
        assert base.replace(**change).fingerprint() != base.fingerprint(), change


def test_fingerprint_is_stable():
    # Saved caches are checked against it: a change here must come with FORMAT_VERSION.
    assert KVQuantConfig().fingerprint() == "d43b8c30e8677dd2"
    assert KVQuantConfig(window_bits=16).fingerprint() == "76dadf6cf3a3ccb8"  # the first default


def test_protected_layers():
    cfg = KVQuantConfig(key_bits=3, value_bits=2, protected_first=1, protected_last=2)
    bits = [(c.key_bits, c.value_bits) for c in (cfg.for_layer(i, 6) for i in range(6))]
    assert bits == [(8, 8), (3, 2), (3, 2), (3, 2), (8, 8), (8, 8)]
    assert (
        KVQuantConfig(key_bits=8, protected_first=1, protected_bits=4).for_layer(0, 2).key_bits == 8
    )
    with pytest.raises(ValueError, match="layer=6"):
        cfg.for_layer(6, 6)


def test_frozen():
    with pytest.raises(AttributeError):
        KVQuantConfig().key_bits = 3


def test_files_that_are_no_configs(tmp_path):
    deep, binary = tmp_path / "deep.json", tmp_path / "binary.json"
    deep.write_text('{"a":' * 100000)
    binary.write_bytes(b"\xff\xfe\x00")
    for source, word in (
        (deep, "not valid JSON"),
        (binary, "cannot be read"),
        (tmp_path / ("x" * 300 + ".json"), "cannot be read"),
        ({"outlier_share": 10**400}, "it must be a float"),
        ('{"key_bits": 4, "key_bits": 2}', "the name 'key_bits' twice in one object"),
        (
            '{"kv_quant": {"enabled": false, "enabled": true}}',
            "the name 'enabled' twice",
        ),
        ({"kv_quant": {}, "runtime": [64]}, r"runtime=\[64\]; it must be an object"),
        ({4: 4}, "unknown config field 4"),
    ):
        with pytest.raises(ValueError, match=word):
            KVQuantConfig.parse(source)


def test_bits_of_single_layers():
    cfg = KVQuantConfig.preset("k3v3", layer_bits="12=k4v4 0=k8v3,7=k3v3", protected_last=1)
    assert cfg.layer_bits == "0=k8v3,7=k3v3,12=k4v4" and cfg.name == "k3v3+"
    assert cfg.bits_of_layers() == {0: (8, 3), 7: (3, 3), 12: (4, 4)}
    bits = [(c.key_bits, c.value_bits) for c in (cfg.for_layer(i, 9) for i in range(9))]
    assert bits == [(8, 3)] + [(3, 3)] * 7 + [(8, 8)]
    # Every sixth layer is compressed: numbers are the model's.
    assert cfg.for_layer(1, 3, 12).key_bits == 4 and cfg.for_layer(0, 3, 5).key_bits == 3
    assert cfg.for_layer(2, 3, 12).key_bits == 4  # named ones before protected ones
    assert cfg.for_layer(1, 9) == KVQuantConfig.preset("k3v3")
    assert KVQuantConfig.parse(cfg.to_json()) == cfg
    assert KVQuantConfig.from_env({"TIGHTKV_LAYER_BITS": "3=k8v4"}).bits_of_layers() == {3: (8, 4)}
    sketched = KVQuantConfig(key_method="prod", key_bits=4, layer_bits="0=k8v4")
    assert sketched.for_layer(0, 2).key_method == "mse"
    assert sketched.for_layer(1, 2).key_method == "prod"


@pytest.mark.parametrize(
    "text,word",
    [
        ("0", "is not LAYER=kBITSvBITS"),
        ("0=8", "is not LAYER"),
        ("-1=k8v4", "is not LAYER"),
        ("0=k5v4", "layer_bits of layer 0=5; supported: 2, 3, 4, 8, 16"),
        ("0=k8v4,0=k4v4", "names layer 0 twice"),
        ("999999=k4v4", "is not LAYER"),
        ("٣=k4v4", "is not LAYER"),
    ],
)
def test_bits_of_layers_that_make_no_sense(text, word):
    with pytest.raises(ValueError, match=word):
        KVQuantConfig(layer_bits=text)


def test_the_fingerprint_is_that_of_yesterday_without_bits_of_layers():
    assert KVQuantConfig().fingerprint() == KVQuantConfig(protect_keys=False).fingerprint()
    assert KVQuantConfig().fingerprint() == KVQuantConfig(feedback="off").fingerprint()
    assert KVQuantConfig().fingerprint() != KVQuantConfig(layer_bits="0=k8v4").fingerprint()


def test_feedback_is_no_part_of_a_layers_pages():
    """Codes chosen with it are read like any others."""
    assert KVQuantConfig(feedback="off").for_layer(0, 2) == KVQuantConfig().for_layer(0, 2)
    with pytest.raises(ValueError, match=r"unknown feedback 'of'; did you mean 'off'\?"):
        KVQuantConfig(feedback="of")
