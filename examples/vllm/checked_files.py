"""CheckedFileTier: vLLM's tier of files for an OffloadingConnector, with a digest in each file.

    PYTHONPATH=examples/vllm tightkv serve MODEL --kv-transfer-config '{"kv_connector":
        "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 17179869184, "secondary_tiers":
        [{"type": "CheckedFileTier", "module_path": "checked_files", "root_dir": "/ssd/kv"}]}}'

vLLM's own tier ("fs") reads every file that is long enough, whatever is in it. Here a file ends
with the SHA-256 of its name and its block. A file that does not fit is deleted, and its tokens are
computed. Files go through the page cache. vLLM 0.32 and 0.33.
"""

import hashlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from tightkv.files.atomic import whole_file

_NAMED = 4  # the last parts of a path: model and rank, two of the hash, the file
_DIGEST = 32  # bytes

Blocks = Sequence[tuple[Path, memoryview]]


class CheckedFileTier(FileSystemTierManager):
    """Set type to its name and module_path to this module's, in secondary_tiers."""

    def submit_store(self, job_metadata: Any) -> None:
        job, keys = job_metadata.job_id, list(job_metadata.keys)
        self._job_block_counts[job] = len(keys)
        if self.events is not None:
            self._store_job_keys[job] = keys
        self._pool.enqueue_store(job, 1, [partial(store_blocks, self._blocks(job_metadata))])

    def submit_load(self, job_metadata: Any) -> None:
        job, keys = job_metadata.job_id, list(job_metadata.keys)
        self._job_block_counts[job], self._load_job_keys[job] = len(keys), keys
        blocks = self._blocks(job_metadata)

        def load() -> None:
            for done, (path, block) in enumerate(blocks):
                self._load_progress[job] = done  # of a load that fails
                load_block(path, block)

        self._pool.enqueue_load(job, 1, [load])

    def _blocks(self, job_metadata: Any) -> Blocks:
        view, size = self._primary_kv_view.cast("B"), self._block_size
        starts = (int(chunk) * size for chunk in job_metadata.chunk_ids)
        paths = (Path(self.file_mapper.get_file_name(key)) for key in job_metadata.keys)
        return [(path, view[at : at + size]) for path, at in zip(paths, starts, strict=True)]


def store_blocks(blocks: Blocks) -> None:
    """Write files that are not there; each appears whole or not at all."""
    for path, block in blocks:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as temporary:
                temporary.write_bytes(bytes(block) + _digest(path, block))


def load_block(path: Path, block: memoryview) -> None:
    data = memoryview(path.read_bytes())
    if len(data) != len(block) + _DIGEST or _digest(path, data[:-_DIGEST]) != data[-_DIGEST:]:
        os.remove(path)
        raise OSError(f"{path} is damaged or of another block. It is deleted")
    block[:] = data[:-_DIGEST]


def _digest(path: Path, block: memoryview) -> bytes:
    digest = hashlib.sha256("/".join(path.parts[-_NAMED:]).encode())
    digest.update(block)
    return digest.digest()
