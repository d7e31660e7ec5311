"""What needs transformers: configs by hub id, and counting parameters of an empty model."""

from typing import Any

import torch

from tightkv.tools.cli.shared.output import MissingPackageError


def load_hub_config(name: str) -> Any:
    """The transformers config of a model on the hub or in its local cache."""
    try:
        from transformers import AutoConfig
    except ImportError:
        raise MissingPackageError(
            f"there is no local folder {name!r}, and reading it from the hub", "transformers", "hf"
        ) from None
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ValueError(
            f"{name!r} is no local folder, and its config cannot be had from the hub "
            f"({reason}); give a local folder with a config.json"
        ) from None


def count_parameters(source: Any) -> int | None:
    """Parameters of the model that transformers would build; None where it cannot.

    `source` is a folder or a transformers config. No memory is used: the model is built empty.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        return None
    try:
        config = source if hasattr(source, "to_dict") else AutoConfig.from_pretrained(source)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, AttributeError, ImportError):
        return None
    parameters: int = model.num_parameters()
    return parameters
