"""The part of a cached prefix that a sequence takes over, so that its newest tokens are exact."""

import logging
import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from tightkv.integrations.vllm.prefix.cache_format import CacheFormat

logger = logging.getLogger("vllm.tightkv")

LOCAL = "_tightkv_local_tokens"  # of a Request: tokens that vLLM's own cache has
_SEARCH = "_tightkv_load_search"  # of a Request: one that waits for its connector
_SEEN = "_tightkv_seen_tokens"  # of a ShorterRequest


class HitEnds:
    """Where cached and loaded prefixes end in an engine."""

    def __init__(self, found: CacheFormat, coordinator: Any) -> None:
        self.found, self.warned = found, False
        sizes = [manager.block_size for manager in coordinator.single_type_managers]
        self.several = len(sizes) > 1
        # Blocks of all kinds end there, so that every state is one that was kept at a block's end.
        self.step = math.lcm(*sizes)
        if getattr(coordinator, "enable_partial_hash_hits", False):  # --prefix-match-unit
            self.step = coordinator.hash_block_size

    def most(self, newest: int) -> int:
        """Tokens before the window of token `newest`, or without rings before that token."""
        return self.found.reusable_tokens(newest) if self.found.rows else newest

    def kept_state(self, length: int, drops: bool) -> tuple[int, int]:
        """Tokens of a prompt whose state is kept, before its window, and by vLLM itself.

        `drops`: vLLM computes the last block of each hit again, for drafts.
        """
        last = length - self.step if drops else length - 1
        ours, own = (max(0, end) // self.step for end in (min(self.most(length - 1), last), last))
        return ours * self.step, own * self.step

    def takes_longer(self, hit: int, longer: int, newest: int) -> bool:
        """Whether a prefix is taken that ends inside of the window."""
        if longer - hit <= newest - self.most(newest) + self.step:
            return False
        if not self.warned:
            self.warned = True
            logger.warning(
                "tightkv: the states of other layers are cached at %d tokens of a prefix of %d and "
                "not before its newest ones, which are read from their codes after such hits",
                longer,
                newest,
            )
        return True

    def search_load(self, newest: int, local: int) -> Generator[int, int, int]:
        """Search the end of a load: yields the most tokens to look up, is sent the end of each hit.

        The last look-up is that of the load, because connectors remember what they found. vLLM's
        own cache has `local` tokens.
        """
        most = max(self.most(newest), local)
        hit = yield from self._search_up_to(most)
        if not self.several or hit + self.step > most or most == newest:
            return hit
        longer = yield from self._search_up_to(newest)
        if longer == hit or self.takes_longer(hit, longer, newest):
            return longer
        return (yield from self._search_up_to(most))

    def _search_up_to(self, end: int) -> Generator[int, int, int]:
        while True:
            end -= end % self.step
            hit = yield end
            if hit > end:  # a connector that has not asked for the length
                hit = 0 if self.several else end
            if hit % self.step == 0:
                return hit
            end = hit


def keep_windows_exact(coordinator: Any, ends: HitEnds) -> None:
    """Let cached prefixes end where the window of a sequence begins.

    `coordinator` is vLLM's KVCacheCoordinator. Cached blocks hold codes alone. The tokens of the
    window are computed again, into blocks and a ring of the sequence's own.

    Layers with a state (Mamba, convolutions) can begin only where vLLM has kept one. If none is
    near the beginning of the window but one inside of it, the whole prefix is taken: to compute it
    again would cost more than the window is worth.
    """
    find = coordinator.find_longest_cache_hit

    def find_longest_cache_hit(block_hashes: Any, max_cache_hit_length: int) -> Any:
        most = ends.most(max_cache_hit_length)
        hit = find(block_hashes, most)
        if most == max_cache_hit_length or not ends.several:
            return hit
        longer = find(block_hashes, max_cache_hit_length)
        return longer if ends.takes_longer(hit[1], longer[1], max_cache_hit_length) else hit

    for manager in coordinator.single_type_managers:
        _keep_beginnings_of_windows(manager, ends.found)
    coordinator.find_longest_cache_hit = find_longest_cache_hit
    if (find_each := getattr(coordinator, "find_longest_cache_hit_per_group", None)) is not None:
        # for KV connectors
        coordinator.find_longest_cache_hit_per_group = lambda block_hashes, most: find_each(
            block_hashes, ends.most(most)
        )


def _keep_beginnings_of_windows(manager: Any, found: CacheFormat) -> None:
    """Cache sliding windows at our ends too: from vLLM 0.29 on, it does so at ends of prompts."""
    if type(manager) is FullAttentionManager:  # is called for each sequence and step
        return
    keep = manager.cache_blocks
    known = signature(keep).parameters
    if "replay_boundaries" not in known:
        if "retention_interval" in known:  # None: at all ends of blocks
            manager.cache_blocks = lambda request, num_tokens, **_: keep(request, num_tokens)
        return

    def cache_blocks(*args: Any, replay_boundaries: Sequence[int], **kwargs: Any) -> Any:
        ours = map(found.reusable_tokens, replay_boundaries)
        return keep(*args, replay_boundaries=(*replay_boundaries, *ours), **kwargs)

    manager.cache_blocks = cache_blocks


def keep_states_before_windows(scheduler: Any, ends: HitEnds) -> None:
    """End a chunk of each prompt at the last block before its window, where hits can end.

    vLLM keeps the state at the end of a chunk, and ends one at a prompt's last block. That one may
    be inside of the window; then it is not kept, so that a prompt takes as many steps as before.
    """
    split = getattr(scheduler, "_mamba_block_aligned_split", None)
    if split is None or not getattr(scheduler, "need_mamba_block_aligned_split", False):
        return
    drops = getattr(scheduler, "use_eagle_block_drop", getattr(scheduler, "use_eagle", False))

    def _mamba_block_aligned_split(
        request: Request, num_new_tokens: int, num_local: int = 0, num_external: int = 0
    ) -> int:
        count = int(split(request, num_new_tokens, num_local, num_external))
        start, length = request.num_computed_tokens + num_local + num_external, request.num_tokens
        kept, own = ends.kept_state(request.num_prompt_tokens, drops)
        is_new = length == request.num_prompt_tokens
        if is_new and kept == own:  # vLLM ends a chunk there, or keeps the state inside of one
            return count
        if start < kept < start + count:
            return kept - start
        return num_new_tokens if is_new and 0 < kept == start == length - num_new_tokens else count

    scheduler._mamba_block_aligned_split = _mamba_block_aligned_split


class ShorterRequest(Request):  # type: ignore[misc]
    """A Request that seems to end earlier, so that connectors look up no more than that."""

    @property
    def num_tokens(self) -> int:
        return int(vars(self)[_SEEN])

    @property
    def num_prompt_tokens(self) -> int:
        return min(self.num_tokens, vars(self)["num_prompt_tokens"])


@contextmanager
def shortened(request: Request, num_tokens: int) -> Iterator[None]:
    """Shorten the request itself, not a copy, because connectors keep those that they have seen."""
    kind = type(request)
    setattr(request, _SEEN, num_tokens)
    request.__class__ = ShorterRequest
    try:
        yield
    finally:
        request.__class__ = kind


def bound_loads(scheduler: Any, ends: HitEnds) -> None:
    """Let the KV connector of a vLLM Scheduler look up no more than what is then loaded."""
    connector = scheduler.connector
    match = connector.get_num_new_matched_tokens

    def get_num_new_matched_tokens(
        request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        setattr(request, LOCAL, num_computed_tokens)
        search, end = vars(request).pop(_SEARCH, (None, 0))
        if search is None:
            search = ends.search_load(request.num_tokens - 1, num_computed_tokens)
            end = next(search)
        while True:
            with shortened(request, end + 1):
                count, is_async = match(request, num_computed_tokens)
            if count is None:  # asks again later, for the same: some connectors do so meanwhile
                setattr(request, _SEARCH, (search, end))
                return None, is_async
            try:
                end = search.send(num_computed_tokens + count)
            except StopIteration as found:
                count = max(0, found.value - num_computed_tokens)
                return count, is_async and count > 0

    connector.get_num_new_matched_tokens = get_num_new_matched_tokens
    for one in (connector, *getattr(connector, "_connectors", ())):  # of a MultiConnector
        offloading = getattr(one, "connector_scheduler", None)
        if ends.found.rows and hasattr(offloading, "_reachable_store_block_mask"):
            _store_beginnings_of_windows(offloading, ends.found)


def _store_beginnings_of_windows(offloading: Any, found: CacheFormat) -> None:
    """Do the same as `_keep_beginnings_of_windows` in the store of an OffloadingConnector."""
    reachable = offloading._reachable_store_block_mask

    def _reachable_store_block_mask(
        group_config: Any,
        start_chunk_idx: int,
        end_chunk_idx: int,
        final_segment_end_chunk_idx: int | None,
        reachable_boundaries: Sequence[int],
    ) -> Any:
        ours = map(found.reusable_tokens, reachable_boundaries)
        ends = final_segment_end_chunk_idx, (*reachable_boundaries, *ours)
        return reachable(group_config, start_chunk_idx, end_chunk_idx, *ends)

    offloading._reachable_store_block_mask = _reachable_store_block_mask
