"""The one-way layering of the package, checked by import-linter (contracts in pyproject.toml)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils._device import _device_constructors

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def test_no_contract_is_broken() -> None:
    # In a process of its own: the linter switches off every logger that exists when it runs.
    linter = Path(sys.executable).with_name("lint-imports")
    command = [str(linter), "--config", str(PYPROJECT), "--no-cache"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 kept, 0 broken" in done.stdout


def test_every_tensor_is_made_on_a_named_device() -> None:
    """torch.set_default_device must not move what the code makes for itself."""
    makers = {f.__name__ for f in _device_constructors()} | {"Generator"}
    assert {"zeros", "arange", "tensor", "as_tensor", "tril_indices", "randint"} < makers
    unnamed = []
    for path in (PYPROJECT.parent / "src").rglob("*.py"):
        text = path.read_text()
        for call in ast.walk(ast.parse(text)) if "import torch" in text else ():
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            name, owner = call.func.attr, call.func.value
            if not (isinstance(owner, ast.Name) and owner.id == torch.__name__ and name in makers):
                continue
            named = any(keyword.arg == "device" for keyword in call.keywords)
            if not (named or (name == "Generator" and call.args)):
                unnamed.append(f"{path}:{call.lineno}: {ast.unparse(call)}")
    assert not unnamed, unnamed


def test_floats_are_made_in_a_named_dtype() -> None:
    """Nor must torch.set_default_dtype change what is computed."""
    makers = {"zeros", "ones", "empty", "full", "tensor", "eye", "linspace", "rand", "randn"}
    unnamed = []
    for path in (PYPROJECT.parent / "src").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            name, owner = call.func.attr, call.func.value
            if not (isinstance(owner, ast.Name) and owner.id == torch.__name__ and name in makers):
                continue
            text = ast.unparse(call)
            if "dtype=" in text or (name in ("full", "tensor") and not _has_floats(call)):
                continue
            unnamed.append(f"{path}:{call.lineno}: {text}")
    assert not unnamed, unnamed


def _has_floats(call: ast.Call) -> bool:
    parts = [part for part in ast.walk(call) if isinstance(part, ast.Constant | ast.Attribute)]
    return any(
        part.attr in ("inf", "nan")
        if isinstance(part, ast.Attribute)
        else type(part.value) is float
        for part in parts
    )
