"""Who may import whom, and the examples in docstrings."""

import ast
import doctest
import importlib
import subprocess
import sys

import pytest

from conftest import REPO
from tiny import cases

FILES = {
    str(file.relative_to(REPO).with_suffix("")).replace("/", "."): file
    for pattern in ("*.py", "parts/*.py", "envs/*.py")
    for file in sorted(REPO.glob(pattern))
}
STAGES = {name for name in FILES if "." not in name} - {"common", "watch", "checks"}


def imports(name):
    """The files of this house that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & {*FILES}


def test_arrows_point_down_and_no_stage_imports_a_stage():
    below = {name: imports(name) for name in FILES}
    assert [(a, b) for a in below for b in below[a] & STAGES] == []
    while leaves := [name for name in below if not below[name]]:
        below = {name: below[name] - {*leaves} for name in below if name not in leaves}
    assert not below, "in a circle"


@cases("""
name | never
sft | statsmodels scipy pandas matplotlib
reward_train | statsmodels scipy pandas matplotlib
dpo | statsmodels scipy pandas matplotlib
ppo | statsmodels scipy pandas matplotlib
grpo_rubric | statsmodels scipy pandas matplotlib
grpo_agent | statsmodels scipy pandas matplotlib
checks | torch sympy math_verify
""")
def test_what_a_file_never_loads(name, never):
    """dpo.py: at most 12 files of the house, none of judging or measuring."""
    command = [sys.executable, "-c", f"import sys, {name}; print(*sys.modules)"]
    loaded = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    loaded = {*loaded.stdout.split()}
    assert not loaded & {*never.split()}
    if name == "dpo":
        assert len(loaded & {*FILES}) <= 12 and loaded & STAGES == {"dpo"}


@pytest.mark.parametrize("name", FILES)
def test_examples_in_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
