"""examples/grpo_minimal.py computes what parts/grpo.py does."""

import runpy
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
from parts import grpo
from tiny import tiny_model

PATH = Path(__file__).resolve().parent.parent / "examples" / "grpo_minimal.py"


def test_its_loss_is_that_of_the_stage(tmp_path):
    name = tiny_model("llama", tmp_path)
    minimal = runpy.run_path(str(PATH))
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    torch.manual_seed(0)
    prompts = [[{"role": "user", "content": text}] for text in ("Hi.", "Assess the candidate.")]
    ids, attention_mask, mask = minimal["sample"](model, tokenizer, prompts)
    ends = common.end_ids(tokenizer)
    for row, inside in zip(ids.tolist(), mask.tolist()):  # the answer with its first end token
        answer = [i for i, chosen in zip(row, inside) if chosen]
        assert not set(answer[:-1]) & set(ends)
        assert answer[-1] in ends or len(answer) == minimal["MAX_NEW_TOKENS"]
    rewards = torch.rand(2, minimal["G"])
    advantages = minimal["group_advantages"](rewards)
    assert torch.allclose(advantages, grpo.group_advantages(rewards), atol=1e-7)
    policy = common.Policy(model, torch.float32)
    logps = minimal["answer_logps"](model, ids, attention_mask)
    ours, _ = policy(ids, attention_mask.bool(), mask)
    assert torch.allclose(logps[mask[:, 1:]], ours[mask], atol=1e-5)
    for noise in (0.0, 0.5):  # at first, and where ratios are clipped
        old = logps.detach() + noise * torch.randn(logps.shape)
        padded = torch.nn.functional.pad(old, (1, 0))
        loss = minimal["grpo_loss"](logps, old, advantages.view(-1), mask[:, 1:])
        expected, _ = grpo.grpo_loss(ours, padded, advantages.view(-1), mask)
        assert abs(loss.item() - expected.item()) < 1e-6


def test_it_runs_and_is_short(tmp_path, monkeypatch, capsys):
    name, prompts = tiny_model("llama", tmp_path), tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hi."}\n' * 4)
    source = PATH.read_text(encoding="utf-8")
    assert source.count("\n") <= 120 and source.count("add_argument") <= 3
    code = compile(source.replace("ROLLOUTS, PROMPTS, G, STEPS, MAX_NEW_TOKENS, LR = 30, 4, 8, 2, 64",
                                  "ROLLOUTS, PROMPTS, G, STEPS, MAX_NEW_TOKENS, LR = 1, 2, 2, 2, 5"),
                   str(PATH), "exec")  # fmt: skip
    argv = ["grpo_minimal.py", "--model", name, "--prompts", prompts, "--out", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", list(map(str, argv)))
    exec(code, {"__name__": "__main__"})
    assert "rollout 1  reward" in capsys.readouterr().out
    assert (tmp_path / "out" / "config.json").is_file()
