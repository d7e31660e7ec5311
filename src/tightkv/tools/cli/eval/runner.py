"""What tightkv eval does once its arguments are checked: load, measure, collect."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tightkv.config import KVQuantConfig
from tightkv.integrations.transformers import TightCache
from tightkv.tools.cli.eval.command import SIZES
from tightkv.tools.cli.eval.tasks import TaskBuilder, check_lengths
from tightkv.tools.cli.info import collect
from tightkv.tools.cli.shared.loading import load_for
from tightkv.tools.cli.shared.output import print_status
from tightkv.tools.cli.shared.progress import QUICK_SECONDS, Progress, Working
from tightkv.tools.eval import results
from tightkv.tools.eval.forward import MakeCache
from tightkv.tools.eval.result_store import Store, result_key
from tightkv.tools.eval.tasks.base import Task
from tightkv.tools.eval.text import Text, read_texts
from tightkv.tools.model_loading.load import quiet
from tightkv.tools.model_loading.source import BUNDLED_NAME

SCHEMA = 2
_SETTINGS = ("temperature", "seed", *(name for name in SIZES if name != "max_context"))
_ABOUT = ("config", "kernels", "calibration")


def evaluate(
    args: argparse.Namespace, configs: Mapping[str, KVQuantConfig], all_tasks: Sequence[str]
) -> list[dict[str, Any]]:
    """An object for each model, as --json prints them (docs/eval.md)."""
    check_lengths(args, configs.values())
    texts = read_texts(args.text)
    store = Store(args.results, args.fresh)
    done = []
    for source in args.models:
        done.append(_evaluate_model(args, source, configs, texts, store, all_tasks))
        gc.collect()  # the next model needs the room
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return done


def _evaluate_model(
    args: argparse.Namespace,
    source: str | None,
    configs: Mapping[str, KVQuantConfig],
    texts: Sequence[Text],
    store: Store,
    all_tasks: Sequence[str],
) -> dict[str, Any]:
    start = time.monotonic()
    name = source or BUNDLED_NAME
    if len(args.models) > 1:
        print_status(f"model {name}")
    model, tokenizer = load_for("eval", source, dtype=args.dtype, device=args.device)
    with quiet():
        with Working("preparing tasks and caches", delay=QUICK_SECONDS):
            builder = TaskBuilder(args, texts, model, tokenizer)
            tasks = builder.build(configs.values())
            facts = results.model_facts(model, name)
            run = ModelRun(model, facts, configs, store)
        rows, reference = run.measure(tasks, all_tasks)
    notes = list(builder.notes)
    if model.dtype == torch.float32:
        notes.insert(
            0, "the model runs in float32, so its exact newest tokens take twice the bytes of bf16"
        )
    return {
        "schema": SCHEMA,
        **results.with_transformers(),
        "machine": _machine(model),
        "model": facts,
        "texts": results.text_facts(texts),
        "settings": {
            "tasks": args.tasks,
            **{name: getattr(args, name) for name in _SETTINGS},
            "contexts": builder.contexts,
        },
        "seconds": time.monotonic() - start,
        "reference": reference,
        "rows": rows,
        "notes": notes,
    }


class ModelRun:
    """Every task with every config on one model; what is already known is not measured again."""

    def __init__(
        self,
        model: Any,
        facts: Mapping[str, Any],
        configs: Mapping[str, KVQuantConfig],
        store: Store,
    ) -> None:
        self.model, self.facts, self.store = model, facts, store
        self.architecture = results.architecture(model)
        self.caches: dict[str, MakeCache] = {}
        self.about: dict[str, dict[str, Any]] = {}
        for name, cfg in configs.items():
            make = self.caches[name] = partial(TightCache, cfg, model=model, eager=True)
            cache = make()
            found = cache.calibration  # a file may change under its name
            self.about[name] = {
                "config": cache.quant.to_dict(),  # some models get more bits in some layers
                **results.cache_facts(model, make),
                "calibration": None if found is None else found.checksum,
            }

    def measure(
        self, tasks: Sequence[Task], all_tasks: Sequence[str]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """One row per config, and what the uncompressed cache gave."""
        rows: dict[str, dict[str, Any]] = {
            name: {
                "name": name,
                **{key: about[key] for key in ("config", "kernels", "bits")},
                **dict.fromkeys(all_tasks),
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
        exact_key = self._key(task, None)
        missing = [name for name, (key, _) in keys.items() if key not in self.store]
        if len(missing) < len(keys):
            known = len(keys) - len(missing)
            print_status(
                f"{task.name}: {known} of {len(keys)} results are from {self.store.path}; "
                "--fresh measures them again"
            )
        steps = len(missing) * task.steps
        if exact_key[0] not in self.store:
            steps += task.reference_steps
        with Progress(task.name, steps) as bar:
            if exact_key[0] not in self.store:
                self.store.keep(*exact_key, task.reference(self.model, bar.advance))
            exact = self.store[exact_key[0]]
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
        return result_key(about), {**about, "model": dict(self.facts)}


def _machine(model: Any) -> dict[str, Any]:
    device = torch.device(model.device)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"cpu": collect()["cpu"]["model"], "gpu": gpu, "threads": torch.get_num_threads()}
