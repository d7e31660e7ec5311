"""Exported models in a process that never imports tightkv."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from tightkv.export import operator_library

ELSEWHERE = """
import sys, torch
library, model, inputs, kind = sys.argv[1:]
torch.ops.load_library(library)
if kind == "export":
    run = torch.export.load(model).module()
else:
    run = torch._inductor.aoti_load_package(model)
ids = torch.load(inputs)
at, tokens = ids.shape[1], []
logits = run(ids, torch.arange(at))
for position in range(at, at + 200):
    tokens.append(int(logits[0, -1].argmax()))
    logits = run(torch.tensor([[tokens[-1]]]), torch.tensor([position]))
assert "tightkv" not in sys.modules
print(*tokens)
try:
    run(ids, torch.arange(400, 400 + ids.shape[1]))
except RuntimeError as error:
    print(error)
"""


def run_elsewhere(
    folder: Path, model: Path, ids: torch.Tensor, kind: str
) -> tuple[torch.Tensor, str]:
    """200 greedy tokens after ids, and what is said to tokens beyond the cache's end."""
    torch.save(ids, folder / "ids.pt")
    run = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, operator_library(), model, folder / "ids.pt", kind],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert run.returncode == 0, run.stderr
    tokens, refusal = run.stdout.splitlines()
    return torch.tensor([[int(token) for token in tokens.split()]]), refusal
