"""Faults in stored prefixes and in saved caches: what engines and loads make of damaged files.

    python benchmarks/faults.py --faults 400 --out benchmarks/results/faults.jsonl

A vLLM engine on a CPU with a tiny random model stores the prefixes of many prompts in files
(OffloadingConnector with a tier of files). Then files are cut, changed, exchanged, taken from
stores of other engines or deleted, reads fail, wait or see a file vanish, engines start again, and
writers are killed. An engine that loads from such a store answers the prompts, and each answer has
to be, to the bit of all logprobs, that of an engine which loaded as many tokens from the store as
it was written. A loaded prefix is read from codes, so there is such an answer for each number of
loaded tokens; that for none is the answer of an engine without a store.

An answer is "right" if as much was loaded as from the whole store, "missed" if less was, "refused"
if an error names the file, and else "wrong". The same is done with files of TightCache.save, which
have to be refused or to give the same state. Rows have the numbers per kind of fault. Exits with 1
where anything is wrong, but for what vLLM's own tier cannot see (UNSEEN).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("benchmarks", "tests/support", "examples/vllm")]

import saved_faults  # noqa: E402
from saved_faults import flipped  # noqa: E402
from soak import SETTINGS, import_engine, in_a_process, provenance  # noqa: E402

VOCABULARY, PAGE, TOKENS = 258, 32, 4
PIECE = 400  # faults of one engine, before it starts again
TIERS: dict[str, dict[str, Any]] = {
    "vllm": {"type": "fs"},
    "checked": {"type": "CheckedFileTier", "module_path": "checked_files"},
}
OPTIONS = {"preset": "k4v4", "page_size": PAGE, "exact_pages": 2}
# Stores that are not the engine's own: by options, or by what the engine is started with.
FOREIGN: dict[str, dict[str, Any]] = {
    "other_seed": {"options": {"seed": 1}},
    "other_preset": {"options": {"preset": "k8v4"}},
    "other_version": {"version": 1},
    "other_weights": {"model": "other"},
    "other_ranks": {"ranks": 2},
}
# Files that have the right name and length and other bytes. vLLM's tier has no checksums.
UNSEEN = {
    *("flip", "zero", "exchange_blocks", "exchange_prompts", "other_prompt", "other_layers"),
    *("foreign_seed", "foreign_preset", "foreign_version", "foreign_weights"),
    *("foreign_ranks", "late_flip"),
}


@dataclass(frozen=True)
class Case:
    """A model and what its engine needs."""

    memory: int = 2 << 20
    lengths: tuple[int, int] = (330, 480)  # of prompts; blocks are longer with other layers
    states: bool = False
    ranks: bool = False  # whether two ranks can share the model


CASES = {
    "dense": Case(1 << 20, (140, 300), ranks=True),
    "windows": Case(),
    "states": Case(4 << 20, states=True),
    "convolutions": Case(4 << 20, states=True),
}


# --- models and prompts ---
def write_models(name: str, folder: Path) -> None:
    """The model of a case, and one of the same shape with other weights: "own" and "other"."""
    import torch
    import transformers as hf
    from transformers import LlamaConfig

    from models import MAMBA, SHAPE
    from tiny_folder import lfm2_for_vllm, write_model

    shape = {**SHAPE, "head_dim": 32, "vocab_size": VOCABULARY}
    states = {**MAMBA, "mamba_d_state": 64, "mamba_chunk_size": PAGE}
    config: Any = {
        "dense": lambda: LlamaConfig(**{**shape, "num_hidden_layers": 2}),
        "windows": lambda: hf.Gemma2Config(**shape, sliding_window=48),
        "states": lambda: hf.FalconH1Config(**{**shape, "num_hidden_layers": 2}, **states),
        "convolutions": lambda: lfm2_for_vllm(**{**SHAPE, "vocab_size": VOCABULARY}),
    }[name]()

    def other(model: Any) -> None:
        torch.manual_seed(1)
        for weight in model.parameters():
            weight.data += 0.05 * torch.randn_like(weight)

    write_model(folder / "own", config)
    write_model(folder / "other", config, other)


def linked_model(folder: Path, which: str) -> Path:
    """One name for both models: weights that were changed in their place."""
    link = folder / "model"
    link.unlink(missing_ok=True)
    link.symlink_to(folder / which)
    return link


def make_prompts(count: int, lengths: tuple[int, int], seed: int) -> list[list[int]]:
    """No two begin alike: what one computes anew, and stores, is not what another loads."""
    choose = random.Random(f"prompts {seed}")
    sizes = [choose.randint(*lengths) for _ in range(count)]
    return [choose.choices(range(2, VOCABULARY), k=size) for size in sizes]


# --- the engine ---
@dataclass
class Answer:
    """What an engine says to a prompt."""

    loaded: int  # tokens of its prefix that were found
    tokens: list[int]
    logprobs: list[list[tuple[int, float]]]

    def equals(self, other: Answer) -> bool:
        return self.tokens == other.tokens and self.logprobs == other.logprobs

    @staticmethod
    def of(told: Any) -> Answer:
        """From JSON."""
        logprobs = [[(token, value) for token, value in step] for step in told["logprobs"]]
        return Answer(told["loaded"], told["tokens"], logprobs)


class Engine:
    """A vLLM engine that answers one prompt at a time, with a tier of files or without."""

    def __init__(self, job: dict[str, Any], root: str | None, foreign: str | None = None) -> None:
        from vllm import LLM, SamplingParams
        from vllm.v1.executor import multiproc_executor

        from tightkv.config import quant

        case, other = CASES[job["case"]], FOREIGN.get(foreign or "", {})
        quant.FORMAT_VERSION += other.get("version", 0)
        if case.states:
            prepare_states()
        if "ranks" in other:
            multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
        options = {**OPTIONS, **other.get("options", {})}
        more = {} if root is None else {"kv_transfer_config": transfer(job["tier"], root)}
        self.llm = LLM(
            model=str(linked_model(Path(job["folder"]), other.get("model", "own"))),
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=512,
            max_num_seqs=1 if case.states else 4,
            max_logprobs=20,
            kv_cache_memory_bytes=case.memory,
            tensor_parallel_size=other.get("ranks", 1),
            additional_config={"tightkv": options},
            **more,
        )
        self.params = SamplingParams(
            temperature=0, max_tokens=TOKENS, logprobs=20, ignore_eos=True, detokenize=False
        )
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.hashed = getattr(self.scheduler, "hash_block_size", PAGE)  # tokens
        self.hashes: list[str] = []
        add = self.scheduler.add_request

        def add_request(request: Any) -> None:
            self.hashes = [block.hex() for block in request.block_hashes]
            add(request)

        self.scheduler.add_request = add_request

    def ask(self, prompt: list[int]) -> Answer:
        (done,) = self.llm.generate([{"prompt_token_ids": prompt}], self.params, use_tqdm=False)
        (output,) = done.outputs
        steps = [sorted((t, e.logprob) for t, e in step.items()) for step in output.logprobs]
        return Answer(done.num_cached_tokens, list(output.token_ids), steps)

    def reset(self) -> None:
        """Forget all that is in memory; stores that are on their way are written first."""
        assert self.llm.reset_prefix_cache(reset_connector=True)


def transfer(tier: str, root: str) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 16 << 20,
            "spec_name": "HostTieringSpec",
            "spec_module_path": "host_offload",
            "secondary_tiers": [
                {**TIERS[tier], "root_dir": root, "n_read_threads": 1, "n_write_threads": 1}
            ],
        },
    }


def prepare_states() -> None:
    """vLLM's kernel for Mamba-2 on CPUs has no states inside of a step, which are asked for."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaBase, MambaMixer2

    MambaMixer2.get_kv_cache_spec = lambda *given: MambaBase.get_kv_cache_spec(*given)


# --- the store ---
class Store:
    """The files of a store as they were written; `restore` makes them so again."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)
        self.files = self.state()

    def state(self) -> dict[Path, bytes]:
        """What is there now; links and empty folders are nothing."""
        found = (path for path in self.root.rglob("*") if not path.is_symlink())
        return {path: path.read_bytes() for path in found if path.is_file()}

    def restore(self, state: dict[Path, bytes] | None = None) -> None:
        files = self.files if state is None else state
        for path in sorted(self.root.rglob("*"), reverse=True):
            if path.is_symlink() or (path.is_file() and path not in files):
                path.unlink()
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        for path, data in files.items():
            if not path.is_file() or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

    def of_prompt(self, hashes: Sequence[str]) -> list[tuple[int, Path]]:
        """Its files and the number of the page that each ends with."""
        at = {name: i for i, name in enumerate(hashes)}
        found = ((at[path.stem], path) for path in self.files if path.stem in at)
        return sorted(found)


def write_store(job: dict[str, Any]) -> dict[str, Any]:
    """Store all prompts; returns the hashes of each, and the tokens of a hash."""
    engine = Engine(job, job["root"], job.get("foreign"))
    found = []
    for prompt in job["prompts"]:
        engine.ask(prompt)
        found.append(engine.hashes)
    engine.ask(job["prompts"][0][:40])  # the last stores begin with a step
    engine.reset()
    return {"hashes": found, "hashed": engine.hashed}


def make_references(job: dict[str, Any]) -> dict[str, Any]:
    """Of each prompt, an answer for each number of tokens that can be loaded from a whole store.

    Its beginning is there, or all but one file: then the prefix may end later than that of the
    whole store, inside of the exact window (where sliding windows or states are missing before).
    """
    engine, store = Engine(job, job["root"]), Store(job["root"])
    found, problems = [], []
    for which, prompt in enumerate(job["prompts"]):
        files = store.of_prompt(job["hashes"][which])
        ends = range(len(job["hashes"][which]) + 1)
        gone = [[path for page, path in files if page >= end] for end in reversed(ends)]
        gone += [[path] for _, path in files]
        answers: dict[int, Answer] = {}
        for paths in [*gone, *gone[:2]]:
            engine.reset()
            store.restore()
            for path in paths:
                path.unlink()
            answer = engine.ask(prompt)
            if not answer.equals(answers.setdefault(answer.loaded, answer)):
                problems.append(
                    f"prompt {which}: not the same answer again, {answer.loaded} loaded"
                )
        found.append([vars(answer) for answer in answers.values()])  # of the whole store first
    engine.reset()
    store.restore()
    return {"answers": found, "problems": problems}


def answer_alone(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers of an engine without a connector, and without cached prefixes."""
    engine = Engine(job, None)
    answers = []
    for prompt in job["prompts"]:
        engine.reset()
        answers.append(vars(engine.ask(prompt)))
    return answers


# --- faults ---
@dataclass
class Round:
    """Where faults find their files."""

    choose: random.Random
    store: Store
    files: list[list[tuple[int, Path]]]  # of each prompt, those that its load reads
    foreign: dict[str, list[dict[int, list[bytes]]]]  # store -> prompt -> page -> contents
    reads: dict[str, str] = field(default_factory=dict)  # name of a file -> what its reading does

    hit: dict[int, str] = field(default_factory=dict)  # prompt -> kind of fault

    def one(self, prompt: int) -> Path:
        return self.choose.choice(self.files[prompt])[1]

    def another(self, prompt: int) -> int:
        """A prompt without a fault; the same if there is no other."""
        free = [i for i in range(len(self.files)) if i not in self.hit and i != prompt]
        return self.choose.choice(free or [prompt])

    def sharing(self, *paths: Path) -> set[int]:
        """Prompts that read one of these files."""
        names = set(paths)
        return {i for i, files in enumerate(self.files) if names & {path for _, path in files}}


def cut(r: Round, prompt: int) -> list[Path]:
    path = r.one(prompt)
    os.truncate(path, r.choose.choice((0, r.choose.randrange(path.stat().st_size))))
    return [path]


def extend(r: Round, prompt: int) -> list[Path]:
    path = r.one(prompt)
    with path.open("ab") as file:
        file.write(r.choose.randbytes(r.choose.choice((1, 32, 4096))))
    return [path]


def flip(r: Round, prompt: int) -> list[Path]:
    path = r.one(prompt)
    path.write_bytes(flipped(r.choose, path.read_bytes()))
    return [path]


def zero(r: Round, prompt: int) -> list[Path]:
    """A part that was never written, as after a power failure."""
    path = r.one(prompt)
    data = bytearray(path.read_bytes())
    begin = r.choose.randrange(0, len(data), 512)
    data[begin : begin + 4096] = bytes(len(data[begin : begin + 4096]))
    path.write_bytes(data)
    return [path]


def exchange_blocks(r: Round, prompt: int) -> list[Path]:
    (_, one), (_, two) = r.choose.sample(r.files[prompt], 2)
    return exchange(one, two)


def exchange_prompts(r: Round, prompt: int) -> list[Path]:
    return exchange(r.one(prompt), r.one(r.another(prompt)))


def exchange(one: Path, two: Path) -> list[Path]:
    a, b = one.read_bytes(), two.read_bytes()
    one.write_bytes(b)
    two.write_bytes(a)
    return [one, two]


def other_prompt(r: Round, prompt: int) -> list[Path]:
    path = r.one(prompt)
    shutil.copyfile(r.one(r.another(prompt)), path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)
    return [path]


def other_layers(r: Round, prompt: int) -> list[Path]:
    """The halves of a block, which are those of its layers, exchanged."""
    path = r.one(prompt)
    data = path.read_bytes()
    size = len(data) & -4096  # without a digest
    path.write_bytes(data[size // 2 : size] + data[: size // 2] + data[size:])
    return [path]


def foreign(name: str) -> Callable[[Round, int], list[Path]]:
    """The same page of the same prompt, or one of another length, from another engine's store."""

    def replace(r: Round, prompt: int) -> list[Path]:
        page, path = r.choose.choice(r.files[prompt])
        pages = r.foreign[name][prompt]
        found = pages.get(page) or [data for each in pages.values() for data in each]
        path.write_bytes(r.choose.choice(found))
        return [path]

    return replace


def delete(r: Round, prompt: int) -> list[Path]:
    path = r.one(prompt)
    path.unlink()
    return [path]


def delete_folder(r: Round, prompt: int) -> list[Path]:
    """All files of a folder; other prompts may have some there."""
    folder = r.one(prompt).parents[r.choose.randrange(2)]
    gone = [path for path in r.store.files if folder in path.parents]
    shutil.rmtree(folder, ignore_errors=True)
    return gone


def drop_index(r: Round, prompt: int) -> list[Path]:
    """The file that describes the store, deleted or half written."""
    (path,) = [path for path in r.store.files if path.name == "config.json"]
    data = r.store.files[path]
    if r.choose.random() < 0.5:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(data[: r.choose.randrange(len(data))])
    return []


def half_written(r: Round, prompt: int) -> list[Path]:
    """What a killed writer leaves: a temporary file, and no file of that block."""
    path = r.one(prompt)
    data = path.read_bytes()
    path.unlink()
    for name in (f"{path.name}_{r.choose.getrandbits(63)}.tmp", f".{path.name}.{'ab' * 8}"):
        path.with_name(name).write_bytes(data[: r.choose.randrange(len(data))])
    return [path]


def no_file(r: Round, prompt: int) -> list[Path]:
    """A folder, a link to nothing or a link to itself."""
    path = r.one(prompt)
    path.unlink()
    how = r.choose.randrange(3)
    if how == 0:
        path.mkdir()
    else:
        path.symlink_to(path.name if how == 1 else "nothing")
    return [path]


def at_reading(what: str) -> Callable[[Round, int], list[Path]]:
    """Something that happens when the file is read, after it was found."""

    def plan(r: Round, prompt: int) -> list[Path]:
        path = r.one(prompt)
        r.reads[path.name] = what
        return [path]

    return plan


FAULTS: dict[str, Callable[[Round, int], list[Path]]] = {
    "cut": cut,
    "extend": extend,
    "flip": flip,
    "zero": zero,
    "exchange_blocks": exchange_blocks,
    "exchange_prompts": exchange_prompts,
    "other_prompt": other_prompt,
    "other_layers": other_layers,
    **{name.replace("other", "foreign"): foreign(name) for name in FOREIGN},
    "delete": delete,
    "delete_folder": delete_folder,
    "drop_index": drop_index,
    "half_written": half_written,
    "no_file": no_file,
    **{f"late_{what}": at_reading(what) for what in ("delay", "error", "delete", "cut", "flip")},
}


def disturb_loads(reads: dict[str, str], choose: random.Random) -> None:
    """Before the engine of this process loads a file of `reads`, which it found, that happens."""
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

    def disturb(path: Path, what: str) -> None:
        if what == "delay":
            time.sleep(choose.uniform(0.01, 0.1))
        elif what == "cut":
            os.truncate(path, choose.randrange(path.stat().st_size))
        elif what == "flip":
            path.write_bytes(flipped(choose, path.read_bytes(), least=8))
        else:
            path.unlink()
            if what == "error":  # to read a folder is one
                path.mkdir()

    def disturbed(load: Any) -> Any:
        def submit_load(self: Any, job_metadata: Any) -> None:
            for path in map(Path, map(self.file_mapper.get_file_name, job_metadata.keys)):
                if path.name in reads:
                    disturb(path, reads.pop(path.name))
            load(self, job_metadata)

        return submit_load

    for kind in (FileSystemTierManager, *FileSystemTierManager.__subclasses__()):
        kind.submit_load = disturbed(kind.submit_load)


# --- rounds ---
class Tally(Counter[str]):
    """How many faults of one kind there were, and what the answers to the prompts they hit are."""

    def judge(self, answer: Answer, known: dict[int, Answer]) -> None:
        """`known`: by the number of loaded tokens, first that of a whole store."""
        self["answers"] += 1
        right = known.get(answer.loaded)
        if right is None or not answer.equals(right):
            self["wrong"] += 1
            self["wrong_tokens"] += right is None or answer.tokens != right.tokens
        else:
            self["right" if answer.loaded == next(iter(known)) else "missed"] += 1

    def judge_error(self, error: OSError, names: Sequence[str]) -> None:
        self["answers"] += 1
        self["refused" if any(name in str(error) for name in names) else "wrong"] += 1


class Rounds:
    """One engine. In each round there are faults in its store; then all prompts are asked."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.prompts, self.choose = job["prompts"], random.Random(job["seed"])
        self.known = [{a.loaded: a for a in map(Answer.of, told)} for told in job["answers"]]
        self.store = Store(job["root"])
        each = zip(job["hashes"], self.known, strict=True)
        files = [
            [
                (page, path)
                for page, path in self.store.of_prompt(names)
                if (page + 1) * job["hashed"] <= next(iter(known))
            ]
            for names, known in each
        ]
        others = {name: foreign_pages(*told) for name, told in job["foreign_stores"].items()}
        self.round = Round(self.choose, self.store, files, others)
        self.engine = Engine(job, job["root"])
        disturb_loads(self.round.reads, self.choose)
        self.tallies: dict[str, Tally] = {}

    def tally(self, kind: str) -> Tally:
        return self.tallies.setdefault(kind, Tally())

    def ask(self, hit: dict[int, str]) -> None:
        """All prompts; `hit`: what happened to the files of some."""
        for prompt in self.choose.sample(range(len(self.prompts)), len(self.prompts)):
            tally = self.tally(hit.get(prompt, "none"))
            try:
                tally.judge(self.engine.ask(self.prompts[prompt]), self.known[prompt])
            except OSError as error:
                tally.judge_error(error, [path.name for _, path in self.round.files[prompt]])
        self.round.reads.clear()
        self.engine.reset()
        self.store.restore()

    def ask_all(self, kind: str) -> None:
        self.tally(kind)["faults"] += 1
        self.ask(dict.fromkeys(range(len(self.prompts)), kind))

    def spread(self, kinds: Sequence[str]) -> int:
        """A fault for each of most prompts; returns how many."""
        hit, count = self.round.hit, 0
        for prompt in range(len(self.prompts)):
            if prompt in hit or self.choose.random() < 0.2:
                continue
            kind, state = self.choose.choice(kinds), self.store.state()
            paths = FAULTS[kind](self.round, prompt)
            found = self.round.sharing(*paths) | {prompt}
            if found & set(hit):  # one fault for each, so that it is known what did it
                self.store.restore(state)
                for path in paths:
                    self.round.reads.pop(path.name, None)
                continue
            hit.update(dict.fromkeys(found, kind))
            self.tally(kind)["faults"] += 1
            count += 1
        self.ask(hit)
        hit.clear()
        return count


def run_rounds(job: dict[str, Any]) -> dict[str, dict[str, int]]:
    """A start on a whole store, stores that others left, and faults in single files."""
    rounds = Rounds(job)
    rounds.ask_all("restart")
    for kind, folder in job["left"]:
        shutil.rmtree(job["root"])
        shutil.copytree(folder, job["root"])
        rounds.ask_all(kind)
    left = job["faults"]
    while left > 0:
        left -= rounds.spread(job["kinds"])
    return {kind: dict(tally) for kind, tally in rounds.tallies.items()}


def foreign_pages(root: str, hashes: list[list[str]]) -> list[dict[int, list[bytes]]]:
    store = Store(root)
    found: list[dict[int, list[bytes]]] = []
    for names in hashes:
        pages: dict[int, list[bytes]] = {}
        for page, path in store.of_prompt(names):
            pages.setdefault(page, []).append(store.files[path])
        found.append(pages)
    return found


# --- what killed writers and other engines leave ---
def kill_engine(job: dict[str, Any], choose: random.Random) -> str:
    """An engine that stores prompts in a folder and is killed when some files are there."""
    folder = tempfile.mkdtemp(dir=job["folder"])
    process = multiprocessing.get_context("fork").Process(
        target=write_store, args=({**job, "root": folder},)
    )
    process.start()
    wanted, end = choose.randrange(1, job["blocks"]), time.monotonic() + 120
    while sum(1 for _ in Path(folder).rglob("*.bin")) < wanted and time.monotonic() < end:
        time.sleep(0.001)
    process.kill()
    process.join()
    return folder


def kill_writer(job: dict[str, Any], choose: random.Random) -> str:
    """A process that writes blocks as the tier does, again and again, and is killed."""
    folder = tempfile.mkdtemp(dir=job["folder"])
    shutil.copytree(job["root"], folder, dirs_exist_ok=True)
    saved_faults.kill_at_work(choose, write_again, folder, block_writer(job["tier"]))
    return folder


def write_again(begun: Any, folder: str, write: Callable[[Path, bytes], None]) -> None:
    """Files vanish in turn and are stored again: there is always one that is being written."""
    files = [(path, path.read_bytes()) for path in Path(folder).rglob("*.bin")]
    begun.set()
    while True:
        for path, data in files:
            path.unlink()
            write(path, data)


def block_writer(tier: str) -> Callable[[Path, bytes], None]:
    """How a tier writes the file of a block. Imports what that takes."""
    if tier == "vllm":
        from vllm.v1.kv_offload.tiering.fs.io import batch_store_block

        return lambda path, data: batch_store_block(
            [str(path)], memoryview(data), [0], len(data), False
        )
    from checked_files import store_blocks

    return lambda path, data: store_blocks([(path, memoryview(data)[:-32])])


def renamed_store(job: dict[str, Any], root: str) -> str:
    """A foreign store in the place of the engine's own: its folders have that one's names."""
    folder = tempfile.mkdtemp(dir=job["folder"])
    names = [sorted(path.name for path in Path(x).iterdir()) for x in (root, job["root"])]
    for theirs, ours in zip(*names, strict=True):
        shutil.copytree(Path(root) / theirs, Path(folder) / ours)
    return folder


# --- a case ---
def run_case(
    name: str,
    tier: str,
    faults: int,
    kills: int,
    seed: int,
    prompts: int = 12,
    others: Sequence[str] = tuple(FOREIGN),
) -> list[dict[str, Any]]:
    """Rows of a model and a tier, one for each kind of fault. `others`: stores that exist, too."""
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        return list(_run_case(Path(folder), name, tier, faults, kills, seed, prompts, others))


def _run_case(
    folder: Path,
    name: str,
    tier: str,
    faults: int,
    kills: int,
    seed: int,
    prompts: int,
    others: Sequence[str],
) -> Iterator[dict[str, Any]]:
    choose = random.Random(f"{name} {tier} {seed}")
    write_models(name, folder)
    job: dict[str, Any] = {
        "case": name,
        "tier": tier,
        "folder": str(folder),
        "prompts": make_prompts(prompts, CASES[name].lengths, seed),
        "root": str(folder / "store"),
    }
    job.update(in_a_process(write_store, job))
    job["blocks"] = sum(1 for _ in Path(job["root"]).rglob("*.bin"))
    job["foreign_stores"] = {}
    for other in others:
        if "ranks" in FOREIGN[other] and not CASES[name].ranks:
            continue
        root = str(folder / other)
        told = in_a_process(write_store, {**job, "root": root, "foreign": other})
        job["foreign_stores"][other] = root, told["hashes"]
    told = in_a_process(make_references, job)
    job["answers"] = told["answers"]
    problems = list(told["problems"])
    for which, alone in enumerate(in_a_process(answer_alone, job)):
        none_loaded = next(x for x in job["answers"][which] if x["loaded"] == 0)
        if not Answer.of(none_loaded).equals(Answer.of(alone)):
            problems.append(f"prompt {which}: another answer without a connector")
    same = 0
    for answers in job["answers"]:
        fresh = next(x for x in answers if x["loaded"] == 0)
        same += answers[0]["tokens"] == fresh["tokens"]
    found: dict[str, Tally] = {}
    absent = {x.replace("other", "foreign") for x in FOREIGN.keys() - job["foreign_stores"].keys()}
    job["kinds"] = [kind for kind in FAULTS if kind not in absent]
    left = [
        (f"store_of_{other}", renamed_store(job, root))
        for other, (root, _) in job["foreign_stores"].items()
    ]
    left += [("killed_engine", kill_engine(job, choose)) for _ in range(kills)]
    left += [("killed_writer", kill_writer(job, choose)) for _ in range(4 * kills)]
    pieces = max(1, faults // PIECE)
    for piece in range(pieces):
        mine = {"left": left[piece::pieces], "faults": faults // pieces, "seed": f"{seed} {piece}"}
        for kind, counts in in_a_process(run_rounds, {**job, **mine}).items():
            found.setdefault(kind, Tally()).update(counts)
    shared = {"model": name, "store": f"files, {tier}", "preset": OPTIONS["preset"], "seed": seed}
    shared |= {"prompts": prompts, "loads_with_fresh_tokens": same}
    for kind in sorted(found):
        yield {**shared, "fault": kind, **counted(found[kind]), "problems": problems}


def counted(tally: Counter[str]) -> dict[str, int]:
    names = ("faults", "answers", "right", "missed", "refused", "wrong", "wrong_tokens")
    return {name: tally[name] for name in names}


def run_saved(name: str, faults: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of saved caches of a model."""
    with tempfile.TemporaryDirectory() as folder:
        job = {"case": name, "folder": folder, "faults": faults, "seed": seed}
        found = in_a_process(saved_faults.run_saved, job)
    shared = {"model": name, "store": "TightCache.save", "preset": "k4v4", "seed": seed}
    for kind in sorted(found):
        yield {**shared, "fault": kind, **counted(Counter(found[kind])), "problems": []}


def is_fine(row: dict[str, Any]) -> bool:
    expected = row["store"] == "files, vllm" and row["fault"] in UNSEEN
    return not row["problems"] and (expected or not row["wrong"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--faults", type=int, default=400, help="per model and tier; 400")
    parser.add_argument("--saved-faults", type=int, default=1000, help="per model; 1000")
    parser.add_argument("--kills", type=int, default=10, help="engines that are killed; 10")
    parser.add_argument("--models", nargs="*", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--tiers", nargs="*", choices=tuple(TIERS), default=tuple(TIERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="appends the rows to this file")
    args = parser.parse_args()
    os.environ.update({**SETTINGS, "TORCH_COMPILE_DISABLE": "1", "NUMBA_DISABLE_JIT": "1"})
    import_engine()
    from tightkv.tools.rows import append_rows

    about, fine = provenance(), True
    cases: list[Callable[[], Any]] = []
    if args.saved_faults:
        each = saved_faults.MODELS
        cases += [partial(run_saved, name, args.saved_faults, args.seed) for name in each]
    for name in args.models if args.faults else ():
        given = args.faults, args.kills, args.seed
        cases += [partial(run_case, name, tier, *given) for tier in args.tiers]
    for case in cases:
        rows = list(case())
        for row in rows:
            sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        if args.out is not None:
            append_rows(args.out, [{**row, **about} for row in rows])
        fine = fine and all(map(is_fine, rows))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
