"""Engines that seal pages after the step say what engines say that seal them in it, to the bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tiny_folder import write_tiny_folder
from vllm_outputs import Engines, outputs, random_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

PAGE, SAID = 32, 40


def tokens(seed: int, count: int) -> list[int]:
    return random_tokens(random.Random(seed), count)


# Some are as long as others, so they complete pages together; the others in any phase.
ALIKE = [tokens(seed, 70 + SAID) for seed in range(4)]
RAGGED = [tokens(100 + seed, 61 + 13 * seed + SAID) for seed in range(4)]
# What was said comes back as part of a prompt: its pages are cached, and were sealed later.
RETURNING = [text + tokens(200 + i, 100) for i, text in enumerate(ALIKE[:2] + RAGGED[:2])]
# Prompts of which n-grams repeat, so drafts are taken and taken back over ends of pages.
REPEATING = [tokens(300 + seed, 12) * (6 + seed) for seed in range(4)]
NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


def job(exact_pages: int, memory: int, window_bits: int = 16) -> dict[str, Any]:
    """Prompts and forced texts. Little memory: sequences are preempted and begin again."""
    given = (ALIKE + RAGGED, RETURNING)
    return {
        "kernels": "reference",
        "engine": engine(exact_pages, memory, window_bits),
        "batches": [[text[:-SAID] for text in texts] for texts in given],
        "forced": [[text[-SAID:] for text in texts] for texts in given],
        "sampling": {"logprobs": 4, "ignore_eos": True},
    }


def engine(
    exact_pages: int, memory: int = 4 << 20, window_bits: int = 16, **options: Any
) -> dict[str, Any]:
    given = {"page_size": PAGE, "exact_pages": exact_pages, "window_bits": window_bits}
    return {
        "model": "tiny",
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": memory,
        "additional_config": {"tightkv": {"preset": "k4v4", **given}},
        **options,
    }


JOBS: dict[str, dict[str, Any]] = {
    "waiting": job(3, 4 << 20),
    "next step": job(1, 160 << 10),
    "window of 16 bits": job(3, 4 << 20, window_bits=16),
    "drafts": {
        "kernels": "reference",
        "engine": engine(3, speculative_config=NGRAMS),
        "batches": [REPEATING],
        "sampling": {"max_tokens": SAID, "logprobs": 4, "ignore_eos": True},
    },
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    folder = tmp_path_factory.mktemp("sealing")
    models: dict[str, Path] = {"tiny": write_tiny_folder(folder / "tiny")}
    jobs = dict(JOBS)
    jobs.update({f"{name} at once": {**job, "seals_at_once": 1} for name, job in JOBS.items()})
    return Engines(jobs, models, folder)


THOROUGH = "waiting", "window of 16 bits", "next step"  # drafts have a next step, too
MORE = [pytest.param(x, marks=pytest.mark.thorough) for x in THOROUGH]


@pytest.mark.parametrize("name", [*MORE, "drafts"])
def test_pages_that_wait_change_nothing(name: str, engines: dict[str, Any]) -> None:
    later, at_once = engines[name], engines[f"{name} at once"]
    assert outputs(later) == outputs(at_once)
    assert later["sealed_later"] and not at_once["sealed_later"]
    if name == "drafts":
        accepted = later["metrics"]["vllm:spec_decode_num_accepted_tokens"]
        assert 0 < accepted < 4 * later["metrics"]["vllm:spec_decode_num_drafts"]
        return
    assert any(output["cached"] > 40 for output in outputs(later))  # what others have said
    assert (later["metrics"]["vllm:num_preemptions"] > 0) == (name == "next step")
