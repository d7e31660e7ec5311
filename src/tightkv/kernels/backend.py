"""Backend: append and attend for one kind of device; `registry` says which modules are backends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from torch import Tensor

from tightkv.kernels.view import AppendOptions, AttendOptions, CacheView, SealedLayer
from tightkv.pages.codec import Codec
from tightkv.pages.latent import LatentCodec
from tightkv.pages.layout import PageLayout


@dataclass(frozen=True)
class Takes:
    """What callers may give a backend beyond what every backend takes."""

    batches: bool = False  # equally long rows as they are, [B, T, heads, D], not packed
    centers: bool = False  # `CacheView.centers`
    ragged: bool = False  # `CacheView.ragged`; several long prompts in a call need no more memory
    graphs: bool = False  # CUDA graphs can hold calls: nothing waits for the device
    short_prompts: bool = False  # decoding is hardly slower with a few tokens per sequence
    late_sealing: bool = False  # the backend is a `LateSealing`


class Backend(Protocol):
    """The interface of all kernels. `reference` says what append and attend do."""

    NAME: str
    TAKES: Takes

    def unavailable(self, device_type: str | None, asked: bool = False) -> str | None:
        """Why the kernels cannot run on this kind of device (None: any here), or None.

        `asked`: the backend was selected by name.
        """

    def unsupported(self, layout: PageLayout) -> str | None:
        """Why the kernels cannot run a config, or None."""

    def append(
        self, codec: Codec, view: CacheView, key: Tensor, value: Tensor, options: AppendOptions
    ) -> None:
        """See `reference.append`."""

    def attend(
        self,
        codec: Codec,
        query: Tensor,
        view: CacheView,
        cu_seqlens: Tensor,
        options: AttendOptions,
    ) -> tuple[Tensor, Tensor]:
        """See `reference.attend`."""


class LateSealing(Backend, Protocol):
    """A backend whose appends can leave the sealing of pages to a launch for many layers."""

    def seals_later(self, layout: PageLayout, feedback: bool) -> bool:
        """Whether `append` can leave the sealing of such pages to `seal_layers`."""

    def sealed_layers(self, layers: Sequence[SealedLayer]) -> Any:
        """What `seal_layers` takes of layers of one layout, all with feedback or all without.

        Their tensors keep their addresses.
        """

    def seal_layers(self, codec: Codec, layers: Any, chosen: Tensor) -> None:
        """See `reference.seal_layers`."""


def is_late_sealing(backend: Backend) -> TypeGuard[LateSealing]:
    return backend.TAKES.late_sealing


class LatentBackend(Protocol):
    """The interface of the kernels of latent attention. `mla_reference` says what they do."""

    NAME: str

    def append(
        self, codec: LatentCodec, pages: Tensor, latent: Tensor, rope: Tensor, slots: Tensor
    ) -> None:
        """See `mla_reference.append`."""

    def gather(
        self,
        codec: LatentCodec,
        pages: Tensor,
        block_table: Tensor,
        cu_seqlens: Tensor,
        starts: Tensor,
        rows: Tensor,
        out: Tensor,
    ) -> None:
        """See `mla_reference.gather`."""

    def decode(
        self,
        codec: LatentCodec,
        query: Tensor,
        query_rope: Tensor,
        pages: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """See `mla_reference.decode`."""
