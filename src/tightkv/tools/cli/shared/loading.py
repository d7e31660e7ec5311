"""Models for commands: what must be installed, and loading with progress."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def quiet_imports() -> Iterator[None]:
    """transformers imports torchao, which logs every library that it cannot load."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


def load_for(command: str, source: str | None, **options: Any) -> tuple[Any, Any]:
    """The model and its tokenizer; options are those of `load_model`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with Working(f"loading {source or BUNDLED_NAME}") as work:
        with quiet_imports():
            need_transformers(command)
            from tightkv.tools.model_loading.load import load_model
        return load_model(source, progress=work.step, **options)
