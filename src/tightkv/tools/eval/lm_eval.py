"""An lm_eval model that reads every score through the compressed cache.

lm_eval finds models that are imported before it looks. `python -m tightkv.tools.eval.lm_eval` is
its command line with this one added, and `import tightkv.tools.eval.lm_eval` adds it in a script.
"""

from typing import Any

import torch
from torch import Tensor

from tightkv.integrations.extras import install_hint

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ImportError(f"this needs lm_eval: {install_hint('eval')}") from error

from tightkv.config import KVQuantConfig
from tightkv.integrations.transformers import TightCache
from tightkv.tools.model_loading.load import load_model

# What lm_eval's `hf` model takes besides the arguments that load a model.
_HF_OPTIONS = (
    *("batch_size", "max_batch_size", "max_length", "truncation", "logits_cache"),
    *("softmax_dtype", "add_bos_token", "prefix_token_id"),
    *("think_end_token", "enable_thinking", "chat_template_args"),
)
_OWN_OPTIONS = ("pretrained", "quant", "prefill", "chunk", "dtype", "device", "tokenizer")


@register_model("tightkv")
class TightLM(HFLM):  # type: ignore[misc]
    """lm_eval's `hf` model with a TightCache.

    `--model_args pretrained=FOLDER_OR_HUB_ID,quant=k4v4`; without `pretrained` it is the bundled
    model. `quant` is a preset or a .json file. Log-likelihoods are read as in `tightkv eval`:
    `prefill` tokens attend exactly, the rest goes in chunks over the compressed pages.
    """

    def __init__(
        self,
        pretrained: Any = None,
        quant: str | KVQuantConfig = "k4v4",
        prefill: int = 64,
        chunk: int = 16,
        dtype: str | None = None,
        device: str | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        for name in options:
            if name not in _HF_OPTIONS:
                allowed = ", ".join((*_OWN_OPTIONS, *_HF_OPTIONS))
                raise ValueError(f"unknown model argument {name!r} (allowed: {allowed})")
        for name, value in (("prefill", prefill), ("chunk", chunk)):
            if int(value) < 1:
                raise ValueError(f"{name}={value}; it must be at least 1")
        self.quant, self.prefill, self.chunk = KVQuantConfig.parse(quant), int(prefill), int(chunk)
        if not torch.cuda.is_available() and str(device).startswith("cuda"):
            device = None  # lm_eval's command line says cuda:0 wherever it runs
        if pretrained is None or isinstance(pretrained, str):
            pretrained, tokenizer = load_model(pretrained, dtype=dtype, device=device)
        super().__init__(pretrained=pretrained, tokenizer=tokenizer, **options)
        self.model.set_attn_implementation("tightkv")

    def new_cache(self) -> TightCache:
        return TightCache(self.quant, model=self.model)

    @torch.inference_mode()
    def _model_call(self, inps: Tensor, attn_mask: Any = None, labels: Any = None) -> Tensor:
        """Logits [B, T, V] of tokens [B, T], padded on the right."""
        cache = self.new_cache()
        parts = [self.model(inps[:, : self.prefill], past_key_values=cache).logits]
        for start in range(self.prefill, inps.shape[1], self.chunk):
            part = inps[:, start : start + self.chunk]
            parts.append(self.model(part, past_key_values=cache).logits)
        return torch.cat(parts, 1)

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> Tensor:
        """The `hf` model's generation, with the cache handed to `generate`."""
        generation_kwargs["past_key_values"] = self.new_cache()
        out: Tensor = super()._model_generate(context, max_length, stop, **generation_kwargs)
        return out


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
