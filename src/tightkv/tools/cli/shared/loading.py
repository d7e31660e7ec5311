"""Models for commands: what must be installed, and loading with progress."""

import logging
import os
from typing import Any

from tightkv.tools.cli.shared.output import MissingPackageError
from tightkv.tools.cli.shared.progress import Working
from tightkv.tools.model_loading.source import BUNDLED_NAME


def need_transformers(command: str) -> None:
    """Raise if it is not there, before anything else that is slow."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise MissingPackageError(f"tightkv {command}", "transformers", "hf") from None


def load_for(command: str, source: str | None, **options: Any) -> tuple[Any, Any]:
    """The model and its tokenizer; options are those of `load_model`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with Working(f"loading {source or BUNDLED_NAME}") as work:
        before = logging.root.manager.disable
        # transformers imports torchao, which logs every library that it cannot load
        logging.disable(max(before, logging.WARNING))
        try:
            need_transformers(command)
            from tightkv.tools.model_loading.load import load_model
        finally:
            logging.disable(before)
        return load_model(source, progress=work.step, **options)
