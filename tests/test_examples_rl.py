"""examples/ppo_minimal.py: its losses are those of ppo.py, on one rollout."""

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
import ppo
from conftest import REPO
from parts.reward_models import PolicyWithValues
from tiny import tiny_model

sys.path.insert(0, str(REPO / "examples"))

import ppo_minimal  # noqa: E402

pytestmark = pytest.mark.usefixtures("quiet_process")
PROMPTS = ["sql", "Assess this candidate. Must have: kafka.", "python?"]
ANSWERS = [" Strengths: sql.", " no", " Gaps: kafka, audits."]


def rows(tokenizer, side):
    """(ids, attention_mask, mask) of three answers, prompts padded on the left or on the right."""
    prompts, answers = (tokenizer(texts).input_ids for texts in (PROMPTS, ANSWERS))
    if side == "right":
        return common.pad_rows(prompts, answers, tokenizer.pad_token_id)
    width, most = max(map(len, prompts)), max(map(len, answers))
    ids, attention, mask = (torch.zeros(3, width + most, dtype=torch.long) for _ in range(3))
    for i, (prompt, answer) in enumerate(zip(prompts, answers)):
        start, end = width - len(prompt), width + len(answer)
        ids[i, start:end] = torch.tensor(prompt + answer)
        attention[i, start:end] = mask[i, width:end] = 1
    return ids, attention, mask.bool()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_minimal_ppo_is_ppo(family, tmp_path):
    """Log-probs, values, rewards, advantages, returns and both losses of one rollout, within 1e-6,
    by a policy that has moved since, so that ratios and values are clipped."""
    folders = [tiny_model(family, tmp_path, seed=seed) for seed in (0, 1)]
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    old, ref = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders)
    new = AutoModelForCausalLM.from_pretrained(folders[0]).eval()
    generator = torch.Generator().manual_seed(0)
    heads = [torch.nn.Linear(32, 1) for _ in range(2)]
    for head in heads:
        torch.nn.init.normal_(head.weight, std=0.1, generator=generator)
    for weight in new.parameters():
        weight.data += 0.01 * torch.randn(weight.shape, generator=generator)
    models, scores = (
        ((old, heads[0]), (new, heads[1]), (ref, heads[0])),
        torch.tensor([1.5, -1, 0.2]),
    )

    def minimal():
        left = rows(tokenizer, "left")
        passes = [ppo_minimal.forward(*model, *left) for model in models]
        (old_logps, old_values), (logps, values), (ref_logps, _) = passes
        rewards = ppo_minimal.rewards_of(scores, old_logps, ref_logps, left[2])
        advantages, returns = ppo_minimal.advantages_of(rewards, old_values, left[2])
        given = logps, old_logps, advantages, values, old_values, returns, left[2]
        return given, rewards, ppo_minimal.losses(*given)

    def stage():
        right = rows(tokenizer, "right")
        passes = []
        for model, head in models:
            policy = PolicyWithValues(model, torch.float32)
            policy.head.load_state_dict(head.state_dict())
            passes.append(policy(*right))
        (old_logps, _, old_values), (logps, _, values), (ref_logps, *_) = passes
        sides = old_logps, ref_logps, right[2]
        rewards, _ = ppo.shape_rewards(scores, *sides, ppo_minimal.BETA)
        advantages, returns = ppo.gae(rewards, old_values, right[2], ppo.GAMMA, ppo.LAM)
        advantages = ppo.masked_whiten(advantages, right[2])
        policy_losses, clipped = ppo.ppo_policy_loss(logps, old_logps, advantages, right[2])
        value_losses, value_clipped = ppo.ppo_value_loss(values, old_values, returns, right[2])
        for fraction in (clipped[right[2]], value_clipped[right[2]]):
            assert 0 < fraction.float().mean() < 1
        given = logps, old_logps, advantages, values, old_values, returns, right[2]
        losses = [x[right[2]].mean() for x in (policy_losses, value_losses)]
        return given, rewards, losses

    with torch.no_grad():
        (given, rewards, losses), (expected, their_rewards, their_losses) = minimal(), stage()
    masks = given[-1], expected[-1]
    for ours, theirs in zip((*given[:-1], rewards), (*expected[:-1], their_rewards), strict=True):
        torch.testing.assert_close(ours[masks[0]], theirs[masks[1]], rtol=1e-5, atol=1e-5)
        assert not ours[~masks[0]].any() and ours[masks[0]].std() > 0.01
    for ours, theirs in zip(losses, their_losses, strict=True):
        assert ours.item() == pytest.approx(theirs.item(), abs=1e-6) and abs(ours.item()) > 1e-3
    names = "BETA VALUE_CLIP VALUE_COEF LAM HEAD_LR".split()
    defaults = ppo.parse_args(["--reward-fn", "x.py:f"])
    for name in names[1:]:
        assert getattr(ppo_minimal, name) == getattr(ppo, name)
    assert ppo_minimal.BETA == defaults.beta and ppo_minimal.EPOCHS == defaults.ppo_epochs
    assert ppo_minimal.CLIP == ppo.CLIP_LOW == defaults.clip_high


def test_minimal_ppo_learns(tmp_path, monkeypatch, capsys):
    """The whole script: the reward rises, and the folder holds the model."""
    folder, out = tiny_model("llama", tmp_path), tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["ppo_minimal.py", folder, str(out), "--steps", "12"])
    for name, value in {"LR": 1e-2, "ANSWERS": 32}.items():
        monkeypatch.setattr(ppo_minimal, name, value)
    monkeypatch.setitem(ppo_minimal.SAMPLING, "max_new_tokens", 6)
    ppo_minimal.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rewards = [float(x[3]) for x in lines if x[0] == "step"]
    assert len(rewards) == 12 and sum(rewards[-3:]) > sum(rewards[:3]) + 0.2, rewards
    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() > 0
