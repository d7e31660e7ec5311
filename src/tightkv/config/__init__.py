"""KVQuantConfig: every option of the compressed cache, and every way to set one."""

from tightkv.config.fields import (
    BITS,
    CENTERINGS,
    CODEBOOKS,
    FEEDBACK,
    MEAN_BITS,
    METHODS,
    PAGE_SIZES,
    ROTATIONS,
    SCALE_MODES,
    WINDOW_BITS,
    unknown_name,
)
from tightkv.config.quant import BEFORE, FORMAT_VERSION, KVQuantConfig
from tightkv.config.sources import (
    ENV_PREFIX,
    ENV_SETTINGS,
    ENV_SOURCES,
    PRESETS,
    Windows,
    cache_root,
    env_fields,
    env_requests,
    fields_of,
    is_off,
    is_windows,
    read_json,
    read_source,
)
