"""What tightkv eval does once its arguments are checked: load, build tasks, measure, collect."""

import argparse
import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tightkv.config import KVQuantConfig
from tightkv.integrations.transformers import TightCache
from tightkv.tools.cli.eval.sizes import SIZES, TASKS
from tightkv.tools.cli.shared.loading import load_for
from tightkv.tools.cli.shared.output import print_status
from tightkv.tools.cli.shared.progress import QUICK_SECONDS, Working
from tightkv.tools.eval import results
from tightkv.tools.eval.forward import MakeCache, max_positions
from tightkv.tools.eval.tasks.base import Task
from tightkv.tools.eval.tasks.free_running import FreeTask
from tightkv.tools.eval.tasks.needles import NeedleTask, build_haystack, make_needles
from tightkv.tools.eval.tasks.quality import QualityTask, Schedule, check_compresses
from tightkv.tools.eval.text import Text
from tightkv.tools.eval.windows import Windows, cut_windows
from tightkv.tools.model_loading.load import quiet
from tightkv.tools.model_loading.source import BUNDLED_NAME
from tightkv.tools.rows import cpu_name

SCHEMA = 2
_SETTINGS = ("temperature", "seed", *SIZES)
_ABOUT = ("config", "kernels", "calibration")


def evaluate(
    args: argparse.Namespace, configs: Mapping[str, KVQuantConfig], texts: Sequence[Text]
) -> list[Any]:
    """An object for each model, as --json prints them (docs/eval.md)."""
    _check_lengths(args, configs.values())
    store, done = results.Store(args.results, args.fresh), []
    for source in args.models:
        done.append(_evaluate_model(args, source, configs, texts, store))
        gc.collect()  # the next model needs the room
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return done


def _check_lengths(args: argparse.Namespace, configs: Iterable[KVQuantConfig]) -> None:
    """Raise if some task would only read what a config keeps exact."""
    prompt = args.prompt_tokens + args.new_tokens
    shortest = {"quality": args.window, "free": prompt, "needles": args.contexts[0]}
    for cfg in configs:
        for task in args.tasks:
            check_compresses(cfg, shortest[task])


def _evaluate_model(
    args: argparse.Namespace,
    source: str | None,
    configs: Mapping[str, KVQuantConfig],
    texts: Sequence[Text],
    store: results.Store,
) -> dict[str, Any]:
    start = time.monotonic()
    name = source or BUNDLED_NAME
    if len(args.models) > 1:
        print_status(f"model {name}")
    model, tokenizer = load_for("eval", source, dtype=args.dtype, device=args.device)
    with quiet():
        with Working("preparing tasks and caches", delay=QUICK_SECONDS):
            limit = max_positions(model)
            contexts, notes = _choose_contexts(args, limit)
            tasks = _build_tasks(args, texts, tokenizer, contexts, limit)
            run = ModelRun(model, name, configs, store)
        rows, reference = run.measure(tasks)
    device = torch.device(model.device)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "schema": SCHEMA,
        **results.with_transformers(),
        "machine": {"cpu": cpu_name(), "gpu": gpu, "threads": torch.get_num_threads()},
        "model": run.facts,
        "texts": results.text_facts(texts),
        "settings": {
            "tasks": args.tasks,
            **{name: getattr(args, name) for name in _SETTINGS},
            "contexts": contexts,
        },
        "seconds": time.monotonic() - start,
        "reference": reference,
        "rows": rows,
        "notes": notes,
    }


def _choose_contexts(args: argparse.Namespace, limit: int | None) -> tuple[list[int], list[str]]:
    """Those of --contexts that the model was made for, and what is said of the others."""
    if "needles" not in args.tasks:
        return [], []
    contexts = [n for n in args.contexts if limit is None or n <= limit]
    left_out = ", ".join(str(n) for n in args.contexts if n not in contexts)
    if not contexts:
        raise ValueError(
            f"--contexts {args.contexts[0]} is the shortest; the model was made for {limit} tokens"
        )
    note = f"contexts of {left_out} tokens are skipped: the model's limit is {limit}"
    return contexts, [note] if left_out else []


def _build_tasks(
    args: argparse.Namespace,
    texts: Sequence[Text],
    tokenizer: Any,
    contexts: Sequence[int],
    limit: int | None,
) -> list[Task]:
    """Those that were asked for. Inputs are cut first: a text too short is refused at once."""

    def cut(what: str, windows: int, tokens: int, more: int = 0) -> Windows:
        if limit is not None and tokens + more > limit:
            raise ValueError(f"{what} is {tokens + more}; the model was made for {limit} tokens")
        return cut_windows(tokenizer, texts, tokens, windows)

    def quality() -> Task:
        windows = cut("--window", args.windows, args.window)
        return QualityTask(windows, Schedule(args.prefill, args.chunk, args.batch))

    def free() -> Task:
        lengths = args.prompt_tokens, args.new_tokens
        prompts = cut("--prompt-tokens + --new-tokens", args.prompts, *lengths)
        return FreeTask(prompts, args.new_tokens, args.temperature, args.seed, args.batch)

    def needles() -> Task:
        text = "\n\n".join(text.content for text in texts)
        facts = make_needles(args.needles, args.seed, text)
        built = (build_haystack(tokenizer, text, tokens, facts) for tokens in contexts)
        return NeedleTask(tokenizer, tuple(built))

    tasks: dict[str, Callable[[], Task]] = {"quality": quality, "free": free, "needles": needles}
    return [tasks[name]() for name in args.tasks]


class ModelRun:
    """Every task with every config on one model; what is already known is not measured again."""

    def __init__(
        self, model: Any, name: str, configs: Mapping[str, KVQuantConfig], store: results.Store
    ) -> None:
        self.model, self.store = model, store
        self.facts = results.model_facts(model, name)
        self.architecture = results.architecture(model)
        self.caches: dict[str, MakeCache] = {}
        self.about: dict[str, dict[str, Any]] = {}
        for label, cfg in configs.items():
            make = self.caches[label] = partial(TightCache, cfg, model=model)
            cache = make()
            found = cache.calibration  # a file may change under its name
            self.about[label] = {
                "config": cache.quant.to_dict(),  # some models get more bits in some layers
                **results.cache_facts(model, make),
                "calibration": None if found is None else found.checksum,
            }

    def measure(self, tasks: Sequence[Task]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """One row per config, and what the uncompressed cache gave."""
        rows: dict[str, dict[str, Any]] = {
            name: {
                "name": name,
                **{key: about[key] for key in ("config", "kernels", "bits", "bytes_per_token")},
                **dict.fromkeys(TASKS),
            }
            for name, about in self.about.items()
        }
        reference: dict[str, Any] = {"perplexity": None, "needles": None}
        for task in tasks:
            exact, found = self._run(task)
            for name, result in found.items():
                rows[name][task.name] = result
            if task.name == "needles":
                reference["needles"] = exact
            if task.name == "quality":
                first = next(iter(found.values()))
                reference["perplexity"] = first["reference_perplexity"]
        return list(rows.values()), reference

    def _run(self, task: Task) -> tuple[Any, dict[str, Any]]:
        """What the exact cache gives, and each config."""
        keys = {name: self._key(task, name) for name in self.caches}
        exact_key, about_exact = self._key(task, None)
        missing = [name for name, (key, _) in keys.items() if key not in self.store]
        if known := len(keys) - len(missing):
            print_status(
                f"{task.name}: {known} of {len(keys)} results are from {self.store.path}; "
                "--fresh measures them again"
            )
        new = exact_key not in self.store
        with Working(task.name, len(missing) * task.steps + new * task.reference_steps) as bar:
            if new:
                exact = task.reference(self.model, bar.advance)
                self.store.keep(exact_key, about_exact, exact)
            exact = self.store[exact_key]
            for name in missing:
                result = task.measure(self.model, self.caches[name], exact, bar.advance)
                self.store.keep(*keys[name], result)
        return exact, {name: self.store[key] for name, (key, _) in keys.items()}

    def _key(self, task: Task, name: str | None) -> tuple[str, dict[str, Any]]:
        """The key of a result and what it is made of; no name is the uncompressed cache."""
        about = {
            "model": {key: self.facts[key] for key in ("fingerprint", "dtype", "device")},
            "architecture": self.architecture,
            **{key: name and self.about[name][key] for key in _ABOUT},
            "task": task.name,
            "settings": task.settings,
        }
        return results.result_key(about), {**about, "model": dict(self.facts)}
