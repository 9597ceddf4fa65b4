"""What a learner reads first and what a reader copies: the minimal scripts compute what the stages do,
and the losses that stand alone with torch and transformers."""

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
import dpo
import ppo
from conftest import REPO
from parts import grpo
from parts.reward_models import PolicyWithValues
from tiny import log_of, pair_rows, user, write_rows

EXAMPLES = REPO / "examples"
sys.path.insert(0, str(EXAMPLES))

import dpo_minimal  # noqa: E402
import grpo_minimal  # noqa: E402
import ppo_minimal  # noqa: E402

pytestmark = pytest.mark.usefixtures("quiet_process")
TEXTS = ["sql", "Assess this candidate. Must have: kafka.", "python?"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*_minimal.py")), ids=lambda path: path.stem)
def test_minimal_scripts_stand_alone(path):
    """They import torch, transformers and the standard library."""
    text = path.read_text(encoding="utf-8")
    roots = re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE)
    assert {*roots} <= {"torch", "transformers"} | sys.stdlib_module_names


def weights(folder):
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return torch.cat([weight.flatten() for weight in state.values()])


def test_minimal_dpo_is_dpo(tmp_path, llama_folder, monkeypatch, capsys):
    """Three steps over the whole file, NLL term included: the losses of both within 1e-6, and the 5e-7
    that six printed decimals hide; and they move, so that a forgotten update or reference would
    show."""
    data = write_rows(tmp_path / "pairs.jsonl", [*pair_rows(6), pair_rows(7)[6] | {"tie": True}])
    for name, value in {"STEPS": 3, "BATCH": 6, "LR": 2.5e-4}.items():
        monkeypatch.setattr(dpo_minimal, name, value)
    dpo_minimal.main(data, llama_folder, tmp_path / "minimal")
    losses = [float(x) for x in re.findall(r"loss (\S+)", capsys.readouterr().out)]
    flags = f"--pairs {data} --model {llama_folder} --eval-fraction 0 --steps 3 --batch-size 6"
    flags += f" --lr 2.5e-4 --warmup 0 --max-new-tokens 2 --max-length 250 --out {tmp_path / 'dpo'}"
    assert dpo.main(flags.split()) == 0
    log = [row["loss"] for row in log_of(tmp_path / "dpo") if "lr" in row]
    assert losses == pytest.approx(log, abs=1.5e-6)
    assert len(losses) == 3 and abs(losses[2] - losses[0]) > 0.1
    assert (weights(tmp_path / "minimal") - weights(tmp_path / "dpo")).abs().max() < 1e-4


def test_minimal_ppo_is_ppo():
    """Rewards, advantages, returns and both losses of one rollout, where ratios and values are
    clipped."""
    generator, same = torch.Generator().manual_seed(0), torch.testing.assert_close
    mask = torch.tensor([[False, False, True, True, True], [False, True, True, False, False]])
    noise = torch.randn(5, 2, 5, generator=generator) * mask
    old_logps, logps, ref_logps, old_values, values = noise
    given = torch.tensor([1.5, -1]), old_logps, ref_logps, mask
    rewards = ppo_minimal.rewards_of(*given)
    same(rewards, ppo.shape_rewards(*given, ppo_minimal.BETA)[0])
    advantages, returns = ppo_minimal.advantages_of(rewards, old_values, mask)
    expected, their_returns = ppo.gae(rewards, old_values, mask, ppo.GAMMA, ppo.LAM)
    same((advantages, returns), (ppo.masked_whiten(expected, mask), their_returns))
    policy, clipped = ppo.ppo_policy_loss(logps, old_logps, advantages, mask)
    value, value_clipped = ppo.ppo_value_loss(values, old_values, returns, mask)
    given = logps, old_logps, advantages, values, old_values, returns, mask
    same(ppo_minimal.losses(*given), (policy[mask].mean(), value[mask].mean()))
    assert clipped.any() and value_clipped.any()
    for name in "VALUE_CLIP VALUE_COEF LAM HEAD_LR".split():
        assert getattr(ppo_minimal, name) == getattr(ppo, name)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_minimal_log_probs_and_values_are_those_of_a_policy(family, folders):
    """Prompts padded on the left, of the same rows unpadded."""
    tokenizer = AutoTokenizer.from_pretrained(folders[family], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folders[family]).eval()
    policy, head = PolicyWithValues(model, torch.float32), torch.nn.Linear(32, 1)
    policy.head.load_state_dict(head.state_dict())
    ids, attention, mask = grpo_minimal.sample(model, tokenizer, [[user(text)] for text in TEXTS])
    ends = {*common.end_ids(tokenizer)}
    with torch.no_grad():
        found = torch.stack(ppo_minimal.forward(model, head, ids, attention, mask))
        for i, real in enumerate(attention.bool()):
            logps, _, values = policy(ids[i : i + 1, real], real[real][None], mask[i : i + 1, real])
            theirs = torch.cat([logps, values])
            torch.testing.assert_close(found[:, i, real], theirs, atol=1e-4, rtol=1e-4)
            *answer, last = ids[i, mask[i]].tolist()  # the answer with its first end token
            assert not {*answer} & ends
            assert last in ends or len(answer) + 1 == grpo_minimal.MAX_NEW_TOKENS


def test_minimal_grpo_is_grpo():
    generator, same = torch.Generator().manual_seed(0), torch.testing.assert_close
    rewards, mask = torch.rand(2, 4, generator=generator), torch.arange(6) < 5
    advantages = grpo_minimal.group_advantages(rewards)
    same(advantages, grpo.group_advantages(rewards))
    logps, old = torch.randn(2, 8, 6, generator=generator)
    given = logps, old, advantages.view(-1), mask.expand(8, 6)
    same(grpo_minimal.grpo_loss(*given), grpo.grpo_loss(*given)[0])


def test_minimal_scripts_learn(tmp_path, llama_folder, monkeypatch, capsys):
    """The whole scripts: PPO's reward rises, and each folder holds a model."""
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": text} for text in TEXTS])
    for name, value in dict(ROLLOUTS=1, PROMPTS=2, G=2, MAX_NEW_TOKENS=5).items():
        monkeypatch.setattr(grpo_minimal, name, value)
    monkeypatch.setattr(ppo_minimal, "LR", 1e-2)
    monkeypatch.setattr(ppo_minimal, "ANSWERS", 32)
    monkeypatch.setitem(ppo_minimal.SAMPLING, "max_new_tokens", 6)

    def run(script, *argv):
        monkeypatch.setattr(sys, "argv", list(map(str, ["script", *argv])))
        script.main()
        return capsys.readouterr().out

    shown = run(ppo_minimal, llama_folder, tmp_path / "ppo", "--steps", 12)
    rewards = [float(x) for x in re.findall(r"reward (\S+)", shown)]
    assert len(rewards) == 12 and sum(rewards[-3:]) > sum(rewards[:3]) + 0.2, rewards
    run(grpo_minimal, "--model", llama_folder, "--prompts", prompts, "--out", tmp_path / "grpo")
    assert len(weights(tmp_path / "ppo")) == len(weights(tmp_path / "grpo"))


COPIES = {  # what the headers say can be taken
    "parts/parallel.py": "autocast",
    "common.py": "hidden_states head_logits score_chunk Trunk Policy same_shape CHUNK",
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
            names = [node, *getattr(node, "targets", [])]
            names = {getattr(x, "name", getattr(x, "id", None)) for x in names}
            if names & {*wanted.split()}:
                parts.append(ast.get_source_segment(source, node))
    assert len(parts) == len(" ".join(COPIES.values()).split())
    (tmp_path / "copied.py").write_text(PROGRAM.format("\n\n\n".join(parts)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "copied.py", llama_folder], cwd=tmp_path, capture_output=True, text=True,
        env={key: x for key, x in os.environ.items() if key != "PYTHONPATH"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, _, after, _ = map(float, done.stdout.split())
    assert before == pytest.approx(0.693147, abs=1e-5) and after < before - 1e-3


@pytest.mark.parametrize(
    "stage", ["dpo", "sft", "reward_train", "ppo watch", "grpo_rubric watch checks"]
)
def test_a_stage_with_common_and_parts_can_be_copied(stage, tmp_path):
    """A file of parts/ read data/ when it was imported, and what was copied without it ended there."""
    for name in [*stage.split(), "common"]:
        shutil.copy(REPO / f"{name}.py", tmp_path)
    shutil.copytree(REPO / "parts", tmp_path / "parts")
    command = [sys.executable, "-c", f"import {stage.split()[0]}"]
    subprocess.run(command, cwd=tmp_path, check=True)
