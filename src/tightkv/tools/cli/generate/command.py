"""tightkv generate: text from a model with a compressed cache, or with both for comparison."""

import argparse
from typing import Any

from tightkv.config import KVQuantConfig, is_off
from tightkv.tools.cli.generate.prompt import check_length, encode, long_context, read_prompts
from tightkv.tools.cli.shared import terminal
from tightkv.tools.cli.shared.config_flags import OFF_LINE, options_from_args
from tightkv.tools.cli.shared.loading import load_for, need_transformers
from tightkv.tools.cli.shared.options import Commands, add_command, check_least
from tightkv.tools.cli.shared.output import emit, print_status
from tightkv.tools.cli.shared.server_file import model_of
from tightkv.tools.model_loading.source import DTYPE_NAMES, check_source


def add_parser(commands: Commands) -> None:
    add_command(
        commands,
        "generate",
        "Generate text with a compressed KV cache and say what the cache takes. "
        "Without --temperature the answer is greedy: the same at every run.",
        f"""
        --prompt TEXT ...  repeat it for a batch
        --prompt-file FILE  without this and --prompt: standard input
        --long-prompt TOKENS:int?1500  put this many tokens of Python's language reference before
            the prompt, by default a question about it (1500 if no number is given)
        --needle  with --compare and --long-prompt: hide a fact in the text and ask both caches for
            it, in place of a prompt
        --raw  do not use the chat template
        --compare  run the uncompressed cache too and show where the texts diverge
        --max-new-tokens=128 N  default: 128
        --temperature=0 X  default: 0, greedy
        --top-p X  sample from the most likely tokens that add up to this probability
        --top-k N  sample from the N most likely tokens
        --seed=0 N  of sampling (default: 0)
        --device DEVICE  cpu, cuda, cuda:N or auto (default: cuda if there is one)
        --dtype {{{",".join(DTYPE_NAMES)}}}  default: bfloat16 where it is fast
        --attn=tightkv NAME  attention implementation (default: tightkv)
        """,
        model=True,
        config=True,
    )


def run(args: argparse.Namespace) -> int:
    # Everything that can be refused is refused before torch and transformers are imported.
    _check(args)
    options = options_from_args(args)
    config = KVQuantConfig.from_dict(options)
    if is_off(options):
        if args.compare:
            raise ValueError(f"--compare has nothing to compare: {OFF_LINE}")
        print_status(OFF_LINE)
    args.model = model_of(args.model, [args.config] if args.config else [])
    check_source(args.model)
    prompts = read_prompts(args.prompt, args.prompt_file, args.long_prompt is not None)
    if args.compare and len(prompts) > 1:
        raise ValueError(f"--compare with {len(prompts)} prompts; give one")
    need_transformers("generate")
    try:
        data, text = _generate(args, config, prompts)
    except KeyboardInterrupt:
        terminal.print_line("")  # the shell's prompt shall not follow half a word
        raise
    emit(args, data, text)
    return 0


def _check(args: argparse.Namespace) -> None:
    check_least(args, max_new_tokens=1, long_prompt=1, temperature=0, top_k=1, seed=0)
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p {args.top_p}; it must be above 0 and at most 1")
    if args.temperature == 0 and (args.top_p is not None or args.top_k is not None):
        raise ValueError("--top-p and --top-k are for sampling; give --temperature above 0 too")
    if args.attn == "flex_attention":
        raise ValueError(
            "--attn flex_attention compiles kernels of its own, which cannot read a compressed "
            "cache; use tightkv (the default), sdpa or eager"
        )
    if args.needle and (args.long_prompt is None or not args.compare):
        raise ValueError("--needle hides a fact in a long text; give --compare and --long-prompt")
    if args.needle and (args.prompt or args.prompt_file is not None):
        raise ValueError("--needle asks for the fact it hides; leave the prompt out")
    if args.temperature > 0 and args.compare:
        raise ValueError("--compare is greedy; leave --temperature out")


def _generate(
    args: argparse.Namespace, config: KVQuantConfig, prompts: list[str]
) -> tuple[dict[str, Any], str]:
    """The report, as JSON data and as text; the answers stream meanwhile."""
    place = {"dtype": args.dtype, "device": args.device}
    model, tokenizer = load_for("generate", args.model, attn_implementation=args.attn, **place)
    from tightkv.tools.cli.generate.compare import choose_needle, hide
    from tightkv.tools.cli.generate.runner import Runner
    from tightkv.tools.eval.forward import max_positions
    from tightkv.tools.model_loading.load import quiet

    needle = None
    if args.long_prompt is not None:
        context = long_context(tokenizer, args.long_prompt)
        if args.needle:
            needle = choose_needle(context)
            context, prompts = hide(context, needle.fact), [needle.question]
        prompts = [f"{context}\n\n{prompt}" for prompt in prompts]
    inputs, limit = encode(tokenizer, prompts, args.raw), max_positions(model)
    check_length(inputs["input_ids"].shape[1], args.max_new_tokens, limit)
    with quiet():
        inputs = inputs.to(model.device)
        runner = Runner(args, config, model, tokenizer, inputs, needle)
        return runner.compare() if args.compare else runner.single()
