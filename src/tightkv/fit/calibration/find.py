"""Which calibration a config names: a file, or one of those that come with the package."""

from collections.abc import Callable
from pathlib import Path

from tightkv.config import KVQuantConfig, unknown_name
from tightkv.fit.calibration.file import SUFFIX, read_calibration
from tightkv.fit.calibration.measured import Calibration
from tightkv.model_shape import ModelShape

AUTO = "auto"
"""As `calibration`: the bundled file of this very model, if there is one."""
BUNDLED_FOLDER = Path(__file__).with_name("bundled")


def load_calibration(source: str) -> Calibration:
    """A file, or a bundled one by its name."""
    if source.endswith(SUFFIX):
        return read_calibration(source)
    if source not in bundled_names():
        raise ValueError(
            unknown_name("calibration", source, (*bundled_names(), AUTO))
            + f"; or give a {SUFFIX} file that tightkv calibrate wrote"
        )
    return read_calibration(BUNDLED_FOLDER / f"{source}{SUFFIX}")


def bundled_names() -> list[str]:
    """The models whose calibrations come with the package."""
    return sorted(path.stem for path in BUNDLED_FOLDER.glob(f"*{SUFFIX}"))


def find_calibration(
    cfg: KVQuantConfig, name: str, identify: Callable[[], tuple[str, ModelShape]]
) -> Calibration | None:
    """The calibration of `cfg` for a model; another model's is refused.

    `identify` reads the model's fingerprint and shape. None where the config names no calibration,
    or "auto" finds none.
    """
    if not cfg.calibration:
        return None
    fingerprint, shape = identify()
    if cfg.calibration == AUTO:
        bundled = map(load_calibration, bundled_names())
        found = next((one for one in bundled if one.fingerprint == fingerprint), None)
    else:
        found = load_calibration(cfg.calibration)
    if found is not None:
        found.check_model(fingerprint, name, shape.full_layers())
    return found


def not_used(cfg: KVQuantConfig, found: Calibration | None, name: str) -> str | None:
    """What is said of a calibration that does less than was asked."""
    if not cfg.calibration:
        return None
    if found is None:
        return (
            f"tightkv: calibration={AUTO!r}: {name} is none of {', '.join(bundled_names())}; "
            f"nothing is changed. Measure it: tightkv calibrate {name} -o FILE"
        )
    if cfg.names_layers or cfg.name in found.layer_bits:
        return None
    return (
        f"tightkv: {found.source} has no bits of layers for {cfg.name}, only for "
        f"{', '.join(found.layer_bits) or 'none'}: keys are coded in the metric of their queries, "
        "and all layers have the same bits"
    )


def without_bits(cfg: KVQuantConfig) -> str:
    """What is said where layers cannot have bits of their own."""
    return (
        f"tightkv {cfg.name}: the calibration's bits of layers are ignored, because all of vLLM's "
        "blocks have one size in models with layers of other kinds; its metrics are used"
    )
