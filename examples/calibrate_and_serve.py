"""Measure a model once, check on other text what that gains, then serve with it.

python examples/calibrate_and_serve.py path/to/model --dry-run
python examples/calibrate_and_serve.py path/to/model --text mine.txt --check other.txt --port 8000

The three steps are the commands `tightkv calibrate`, `tightkv eval` and `tightkv serve`. The last
one needs vLLM; with `--dry-run` it prints vLLM's command instead. Options that this program does
not know go to the server.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tightkv.tools.cli import main as tightkv
from tightkv.tools.eval.text import default_texts
from tightkv.tools.model_loading.bundled import bundled_folder


def run(*words: str) -> None:
    print(f"$ tightkv {' '.join(words)}", flush=True)
    if code := tightkv(list(words)):
        sys.exit(code)


def write_texts(folder: Path) -> list[str]:
    """Two texts that come with Python: one to calibrate on, one to check."""
    files = [folder / f"text{n}.txt" for n in range(2)]
    for file, text in zip(files, default_texts(), strict=True):
        file.write_text(text.content, encoding="utf-8")
    return [str(file) for file in files]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a folder; the bundled model by default")
    parser.add_argument("--preset", default="k3v3")
    parser.add_argument("--text", help="what to calibrate on; best of your domain")
    parser.add_argument("--check", help="another text, on which both are compared")
    parser.add_argument("--tokens", type=int, default=4096, help="of the calibration (4096)")
    parser.add_argument("--window", type=int, default=1024, help="tokens of each check (1024)")
    parser.add_argument("--file", type=Path, default=Path("calibration.safetensors"))
    parser.add_argument("--dry-run", action="store_true", help="do not start the server")
    args, options = parser.parse_known_args(arguments)
    model, file = args.model or str(bundled_folder(print)), str(args.file)
    with tempfile.TemporaryDirectory() as folder:
        texts = write_texts(Path(folder))
        if not args.file.exists():
            text, tokens = args.text or texts[0], str(args.tokens)
            run("calibrate", model, "--text", text, "--tokens", tokens, "--out", file)
        windows = ("--windows", "2", "--window", str(args.window))
        check = (*windows, "--prefill", str(args.window // 4), "--text", args.check or texts[1])
        both = ("--presets", args.preset, "--calibration", file)
        run("eval", model, *both, "--tasks", "quality", *check)
    last = [*(["--dry-run"] if args.dry_run else []), *options]
    run("serve", model, "--preset", args.preset, "--calibration", file, *last)


if __name__ == "__main__":
    main()
