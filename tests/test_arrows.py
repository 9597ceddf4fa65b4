"""Who may import whom, and the examples in docstrings."""

import ast
import doctest
import importlib
import subprocess
import sys

import pytest

from conftest import REPO

FILES = sorted(
    str(file.relative_to(REPO).with_suffix("")).replace("/", ".")
    for pattern in ("*.py", "parts/*.py", "envs/*.py")
    for file in REPO.glob(pattern)
)
STAGES = [name for name in FILES if "." not in name and name not in ("common", "watch", "checks")]
MEASURING = ("statsmodels", "scipy", "pandas", "matplotlib")
TRAINERS = ("sft", "reward_train", "dpo", "ppo", "grpo_rubric", "grpo_agent")


def imports(name):
    """The modules of this house, and all names, that a file imports."""
    tree = ast.parse((REPO / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_arrows_point_down_and_no_stage_imports_a_stage():
    done, path = set(), []

    def walk(name):
        assert name not in path, f"a circle: {path} → {name}"
        if name in done:
            return
        path.append(name)
        for other in sorted(imports(name) & set(FILES)):
            assert other not in STAGES, f"{name} imports the stage {other}"
            walk(other)
        done.add(path.pop())

    for name in FILES:
        walk(name)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_loads_nothing_of_measuring(name):
    """dpo.py: at most 12 files of the house, none of judging or measuring."""
    code = f"import sys, {name}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    ).stdout.split()
    assert not set(MEASURING) & set(loaded)
    ours = set(FILES) & set(loaded)
    if name == "dpo":
        assert len(ours) <= 12, sorted(ours)
        assert not ours & {"judge", "ruler", "evaluate", "fairness", "rank", "audit", "annotate"}


@pytest.mark.parametrize("name", FILES)
def test_examples_in_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
