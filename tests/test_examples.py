"""What a learner reads first and what a reader copies: the minimal scripts, and the losses that
stand alone with torch and transformers."""

import ast
import os
import re
import subprocess
import sys

import pytest
import torch

import dpo
from conftest import REPO
from parts import files
from tiny import pair_rows, write_rows

EXAMPLES = REPO / "examples"
sys.path.insert(0, str(EXAMPLES))

import dpo_minimal  # noqa: E402

pytestmark = pytest.mark.usefixtures("quiet_process")


def test_minimal_dpo_is_dpo(tmp_path, llama_folder, monkeypatch, capsys):
    """Three steps over the whole file, NLL term included: the losses of both within 1e-6, and they
    move, so that a forgotten update or reference would show."""
    data = write_rows(tmp_path / "pairs.jsonl", [*pair_rows(6), pair_rows(7)[6] | {"tie": True}])
    for name, value in {"STEPS": 3, "BATCH": 6, "LR": 1e-3}.items():
        monkeypatch.setattr(dpo_minimal, name, value)
    dpo_minimal.main(data, llama_folder, tmp_path / "minimal")
    losses = [float(x) for x in re.findall(r"loss (\S+)", capsys.readouterr().out)]
    flags = f"--pairs {data} --model {llama_folder} --eval-fraction 0 --steps 3 --batch-size 6"
    flags += f" --lr 1e-3 --warmup 0 --max-new-tokens 2 --max-length 250 --out {tmp_path / 'dpo'}"
    assert dpo.main(flags.split()) == 0
    log = [row for row in files.read_jsonl(tmp_path / "dpo/metrics.jsonl") if "lr" in row]
    assert losses == pytest.approx([row["loss"] for row in log], abs=1e-6)
    assert len(losses) == 3 and abs(losses[2] - losses[0]) > 0.1
    ours, theirs = (
        torch.cat([x.flatten() for x in dpo_minimal.AutoModelForCausalLM.from_pretrained(
            tmp_path / name).state_dict().values()])
        for name in ("minimal", "dpo")
    )  # fmt: skip
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_minimal_scripts_stand_alone(path):
    """They import torch, transformers and the standard library; a reader sees all of one at once."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {getattr(node, "module", None) or node.names[0].name for node in nodes}
    roots = {name.partition(".")[0] for name in names}
    assert roots <= {"torch", "transformers"} | sys.stdlib_module_names
    assert len(path.read_text(encoding="utf-8").splitlines()) <= (80 if "dpo" in path.stem else 120)


COPIES = {  # what the headers say can be taken
    "parts/parallel.py": "autocast",
    "common.py": "hidden_states head_logits score_chunk Policy same_shape CHUNK",
    "dpo.py": "dpo_loss LOSS_TYPES",
    "reward_train.py": "bradley_terry_loss",
}
PROGRAM = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute
from transformers import AutoModelForCausalLM

{}

policy = Policy(AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval(), torch.float32)
ids = torch.randint(3, 200, (4, 9), generator=torch.Generator().manual_seed(0))
answer_mask = torch.arange(9).expand(4, 9) >= 4
rows = ids, torch.ones_like(answer_mask), answer_mask
with torch.no_grad():
    ref_logps = policy(*rows)[0].sum(1).view(2, -1)
optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
for step in range(2):
    logps = policy(*rows)[0].sum(1).view(2, -1)
    losses, *rewards = dpo_loss(*logps, *ref_logps)
    print(losses.mean().item(), bradley_terry_loss(*logps).mean().item())
    optimizer.zero_grad()
    losses.mean().backward()
    optimizer.step()
"""


def test_what_is_copied_trains(tmp_path, llama_folder):
    """The losses and `Policy` in an empty folder, where nothing of this project can be imported:
    the loss starts at log 2 and a step lowers it."""
    parts = []
    for name, wanted in COPIES.items():
        source = (REPO / name).read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            names = [getattr(node, "name", None)]
            names += [getattr(target, "id", None) for target in getattr(node, "targets", [])]
            if set(names) & set(wanted.split()):
                parts.append(ast.get_source_segment(source, node))
    assert len(parts) == sum(len(wanted.split()) for wanted in COPIES.values())
    (tmp_path / "copied.py").write_text(PROGRAM.format("\n\n\n".join(parts)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "copied.py", llama_folder], cwd=tmp_path, capture_output=True, text=True,
        env={key: x for key, x in os.environ.items() if key != "PYTHONPATH"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (before, _), (after, _) = (
        [float(x) for x in line.split()] for line in done.stdout.splitlines()
    )
    assert before == pytest.approx(0.693147, abs=1e-5) and after < before - 1e-3
