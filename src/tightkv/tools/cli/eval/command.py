"""tightkv eval: what each config does to a model's answers, through the cache itself."""

import argparse
from pathlib import Path

from tightkv.config import PRESETS, KVQuantConfig
from tightkv.files.atomic import check_appendable
from tightkv.tools.cli.eval import page
from tightkv.tools.cli.eval.sizes import SIZES, TASKS
from tightkv.tools.cli.shared.config_flags import parse_configs
from tightkv.tools.cli.shared.loading import need_transformers, quiet_imports
from tightkv.tools.cli.shared.options import Commands, add_options, check_least
from tightkv.tools.cli.shared.output import add_output_options, emit
from tightkv.tools.cli.shared.server_file import model_of
from tightkv.tools.eval.text import read_texts
from tightkv.tools.model_loading.source import BUNDLED_NAME, DTYPE_NAMES, check_source

_CONTEXTS, _QUICK_CONTEXTS = (512, 1024, 2048, 4096, 8192), (512,)


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "eval",
        description="What each config does to a model's answers, against its uncompressed cache: "
        "KL, free-running text, facts in long contexts. Everything goes through the real "
        "cache. Results are kept: the same command again goes on where it was interrupted.",
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help=f"model folders or hub ids (default: the bundled {BUNDLED_NAME})",
    )
    add_options(
        parser,
        f"""
        --presets NAME+  all, or any of {", ".join(PRESETS)}
        --config FILE ...  JSON; may be repeated
        --calibration FILE  of the model (tightkv calibrate): each of these configs is also measured
            with it
        --text FILE ...  UTF-8, may be repeated (default: prose that comes with Python)
        --tasks {{{",".join(TASKS)}}}+  default: all; tightkv.tools.eval.lm_eval has LAMBADA, GSM8K
            and others
        --quick  small sizes: a first look
        --seed=0 SEED:int  of facts and draws (default: 0)
        --temperature=1 TEMPERATURE:float  of free-running text; 0 is greedy (default: 1)
        --device DEVICE  cpu, cuda, cuda:N or auto (default: cuda if there is one)
        --dtype {{{",".join(DTYPE_NAMES)}}}  default: bfloat16 where it is fast
        --results FILE  where results are stored and reused (default: eval.jsonl in tightkv's cache)
        --fresh  measure everything again, even if results are stored
        --out FILE  append one JSON row per config (.jsonl)
        --report FOLDER  write a page on all models and caches (report.md, .json and .svg), with the
            noise floor; then the default is --presets all --tasks quality
        --rows FILE+  rows of other measurements on that page: --out of this command,
            compare_caches.py, vllm_quality.py and depth/summarize.py in benchmarks/
        """,
    )
    group = parser.add_argument_group("sizes")
    for name, (default, quick, _, about) in SIZES.items():
        flag = "--" + name.replace("_", "-")
        add_options(group, f"{flag} N  {about} (default: {default}; with --quick: {quick})")
    add_options(
        group,
        """
        --contexts N+  tokens of the contexts of needles (default: 512, 1024, 2048, 4096 and 8192;
            with --quick: 512)
        """,
    )
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    # Everything that can be refused is refused before torch and transformers are imported.
    _fill_sizes(args)
    names = [name for words in args.presets for name in _split(words)]
    default = list(PRESETS) if args.report else ["k4v4"]
    configs = parse_configs([*names, *args.config] or default, args.calibration)
    for path, what in ((args.out, "output"), (args.results, "results")):
        if path and not Path(path).parent.is_dir():
            raise FileNotFoundError(f"the folder of the {what} file {path!r} does not exist")
        if path:
            check_appendable(path)
    others = _check_report(args, configs)
    args.models = args.models or [model_of(None, args.config)]
    for source in args.models:
        check_source(source)
    if twice := {source for source in args.models if args.models.count(source) > 1}:
        raise ValueError(f"the model {min(map(str, twice))!r} is given twice; leave one out")
    texts = read_texts(args.text)
    need_transformers("eval")
    with quiet_imports():
        from tightkv.tools.cli.eval.runner import evaluate
    from tightkv.tools.cli.eval import report
    from tightkv.tools.rows import append_rows

    models = evaluate(args, configs, texts)
    try:
        if args.out:
            append_rows(args.out, [row for data in models for row in report.file_rows(data)])
    finally:
        several = {"schema": models[0]["schema"], "models": models}
        data = models[0] if len(models) == 1 else several
        emit(args, data, "\n\n".join(map(report.as_text, models)))
    if args.report:
        own = [row for data in models for row in report.file_rows(data)]
        page.write(args.report, [*others, *own])
    return 0


def _check_report(args: argparse.Namespace, configs: dict[str, KVQuantConfig]) -> list[page.Row]:
    """The rows of other measurements; the noise floor is one more config."""
    if not args.report:
        if args.rows:
            raise ValueError("--rows is for the page of --report; give --report FOLDER too")
        return []
    if "quality" not in args.tasks:
        raise ValueError("--report shows the task quality; add it to --tasks")
    configs.setdefault(page.FLOOR, KVQuantConfig(key_bits=16, value_bits=16))
    page.check(args.report)
    return [row for path in args.rows for row in page.read(path)]


def _split(words: str) -> list[str]:
    """'k4v4,k3v3' -> two presets, 'all' every one; JSON has commas of its own."""
    if words == "all":
        return list(PRESETS)
    return [words] if words.lstrip().startswith("{") else [w for w in words.split(",") if w]


def _fill_sizes(args: argparse.Namespace) -> None:
    for name, (default, quick, least, _) in SIZES.items():
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else default)
        check_least(args, **{name: least})
    contexts = args.contexts or (_QUICK_CONTEXTS if args.quick else _CONTEXTS)
    if min(contexts) < 1:
        raise ValueError(f"--contexts {min(contexts)}; a context must be at least 1 token")
    args.contexts = sorted(set(contexts))
    if not 0 <= args.temperature < float("inf"):
        raise ValueError(f"--temperature {args.temperature}; it must be 0 (greedy) or more")
    asked = args.tasks or (["quality"] if args.report else TASKS)
    args.tasks = [task for task in TASKS if task in asked]
    if args.prefill > args.window - 2:
        raise ValueError(
            f"--prefill {args.prefill} leaves nothing to score of a window of {args.window} tokens"
        )
