"""Half precision, on the bundled base: every trainer runs in bf16 and fp16, and every slip that the
preflight exists for stops a run in every precision.

On a GPU: TEST_DEVICE=cuda python -m pytest tests/test_half.py

On the base rounding moves the log-prob of a token by .006 to .015 in bf16 and .001 to .002 in fp16, in
the mean; what is planted here moves it by .058 and more.
"""

import dataclasses
import functools
import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import common
import dpo
import grpo_agent
from conftest import REPO
from parts import identities, rollouts, sampling
from parts.files import UserError, read_jsonl
from tiny import words, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet_process", "fast_half_products")]
BASE = str(REPO / common.BASE)
DEVICE = os.environ.get("TEST_DEVICE", "cpu")
TRAINERS = ["sft", "reward_train", "dpo", "ppo", "grpo_rubric", "grpo_agent"]
GAUGES = [{"check": "text:max_chars", "max_chars": n} for n in range(8, 68, 3)]  # a graded score


def make_files(home, pairs, **columns):
    """{"pairs", "prompts", "rubrics"}: files for the trainers; columns: of prompts and rubrics."""
    prompts = [{"prompt": row["prompt"], **columns} for row in pairs]
    rubrics = [{**row, "rubrics": GAUGES} for row in prompts]
    files = {"pairs": pairs, "prompts": prompts, "rubrics": rubrics}
    return {name: write_rows(home / f"{name}.jsonl", rows) for name, rows in files.items()}


def command(stage, files, model, out, *flags):
    """argv of two steps of four rows; `stage` may end in -lora, and ppo in the critic's name."""
    stage, *kinds = stage.split("-")
    argv = ["--model", model, "--out", out, f"--device {DEVICE}"]
    argv += ["--steps 2 --eval-every 0 --batch-size 4"]
    argv += [] if stage == "reward_train" else ["--max-new-tokens 12"]
    groups = "--group-size 2 --groups-per-batch 2 --patience 0 --on-hack warn --restore last"
    argv += {
        "sft": ["--data", files["pairs"]],
        "reward_train": ["--pairs", files["pairs"]],
        "dpo": ["--pairs", files["pairs"]],
        "ppo": ["--prompts", files["prompts"], "--rollouts 4 --patience 0 --on-hack warn"]
        + ["--restore last --reward-fn", f"{REPO}/tests/tiny.py:share_of_vowels"],
        "grpo_rubric": ["--data", files["rubrics"], groups],
        "grpo_agent": ["--env", files.get("env", f"{REPO}/envs/interview.py:Interview"), groups]
        + ["--env-args", '{"k": 2}', "--val-episodes 2 --test-episodes 0"],
    }[stage]
    for kind in kinds:
        argv += ["--lora-rank 4"] if kind == "lora" else [f"--critic {kind}"]
    return words(*argv, *flags)


def train(stage, *arguments):
    """The exit status of this trainer's `main`; arguments as for `command`."""
    main = importlib.import_module(stage.partition("-")[0]).main
    return main(command(stage, *arguments)) or 0


def logged(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Bundled rows in files of their own: with the bundled files come 64 prompts to answer."""
    pairs = [row for _, row in zip(range(8), read_jsonl(REPO / "data/prefs_train.jsonl"))]
    return make_files(tmp_path_factory.mktemp("rows"), pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fast_products_are_those_of_torch(dtype):
    """A sum of 576 products in another order moves one rounding in 350 (fp16), by one step. With
    `out` torch's own kernel is called."""
    sizes = (56, 576), (576, 300), (4, 28, 64), (4, 64, 30), (300,), (4, 28, 30)
    generator = torch.Generator().manual_seed(0)
    a, b, c, d, e, f = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    products = (torch.mm, a, b), (torch.addmm, e, a, b), (torch.bmm, c, d), (torch.baddbmm, f, c, d)
    for product, *matrices in products:
        ours, theirs = product(*matrices), product(*matrices, out=torch.empty(0, dtype=dtype))
        assert ours.dtype == dtype and (ours != theirs).float().mean() < 0.01
        torch.testing.assert_close(ours, theirs, rtol=torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", TRAINERS)
def test_two_steps(stage, dtype, data, tmp_path, capsys):
    """ppo.py and grpo_rubric.py refused to start: the largest gap of 288 right tokens is .19 in
    bf16, and the bound was .05 for each token. In fp16 the first two steps of each run overflowed
    and were lost, at a loss multiplied by 65536."""
    assert train(stage, data, BASE, tmp_path / "run", f"--dtype {dtype}") == 0
    assert f"in {dict(bf16=torch.bfloat16, fp16=torch.float16)[dtype]}" in capsys.readouterr().out
    steps = [row for row in logged(tmp_path / "run") if "lr" in row]
    assert len(steps) == 2 and all(abs(row["loss"]) < 20 for row in steps)
    assert [row["skipped_steps"] for row in steps] == [0, 0]
    before, after = (load_file(f"{x}/model.safetensors") for x in (BASE, tmp_path / "run"))
    assert not any(torch.equal(before[key].float(), after[key]) for key in before)


@pytest.mark.parametrize("stage, dtype", [("dpo", "fp16"), ("ppo", "bf16")])
def test_with_kernels_of_torch(stage, dtype, data, tmp_path):
    """A process of its own multiplies as a user's does, without `fast_half_products`."""
    run_by_itself(stage, data, BASE, tmp_path / "run", f"--dtype {dtype}")


def run_by_itself(stage, data, model, out, *flags):
    """Two steps of a trainer in a process of its own."""
    script = [sys.executable, f"{REPO}/{stage.partition('-')[0]}.py"]
    subprocess.run([*script, *command(stage, data, model, out, *flags)], cwd=REPO, check=True)
    steps = [row for row in logged(out) if "lr" in row]
    assert len(steps) == 2 and all(abs(row["loss"]) < 20 for row in steps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_rounding_is_measured_on_short_rows(lora_rank, dtype):
    """The bound is made of it. It was that of two tokens here, and with LoRA, whose weights are in
    half precision, that of the logits alone, a third of the truth."""
    tokenizer = common.load_tokenizer(BASE)
    questions = "Is she fit?", "Any gaps?", "Hire him?", "Who leads?", "Why her?", "Fit?", "Ready?"
    prompts = [[{"role": "user", "content": question}] for question in questions]
    policy, exact = (common.load_policy(BASE, x, lora_rank=lora_rank) for x in (dtype, None))
    rows = [common.encode_prompt(tokenizer, prompt) + [9, 10] for prompt in prompts]
    ids, attention_mask, _ = common.pad_rows(rows, [[]] * len(rows), 0)
    identities.check_head(policy, ids, attention_mask, "--model")
    mask = F.pad(attention_mask[:, 1:], (1, 0))
    with torch.no_grad():
        logps = [common.token_logps(m, ids, attention_mask, mask)[mask] for m in (policy, exact)]
    true = (logps[0] - logps[1]).abs().mean().item()
    assert policy.rounding == pytest.approx(true, rel=0.4)


# ---- planted slips: each is red in every precision ----


def shift(patch, model):
    """Each token is scored by the logits of its own column, one too late."""
    real = common.token_hidden

    def late(model, ids, attention_mask, mask, shared=False):
        attention_mask, mask = F.pad(attention_mask, (0, 1)), F.pad(mask, (1, 0))
        return real(model, F.pad(ids, (0, 1)), attention_mask, mask, shared)

    patch.setattr(common, "token_hidden", late)


def template(patch, model):
    """The prompts are opened by another template for scoring than they were for sampling."""

    def opened_otherwise(ids):
        return [*ids[:-1], *common.load_tokenizer(model).encode("\nassistant:")]

    def rollout_tensors(rollout, *arguments):
        prompts = [opened_otherwise(ids) for ids in rollout.prompt_ids]
        return real(dataclasses.replace(rollout, prompt_ids=prompts), *arguments)

    def pack(samples, *arguments):
        for sample in samples:
            opening = sample["turns"][0][0]
            new = opened_otherwise(sample["ids"][:opening])
            sample["ids"] = new + sample["ids"][opening:]
            by = len(new) - opening
            sample["turns"] = [(start + by, end + by) for start, end in sample["turns"]]
        return real_pack(samples, *arguments)

    real, real_pack = rollouts.rollout_tensors, grpo_agent.pack
    patch.setattr(rollouts, "rollout_tensors", rollout_tensors)
    patch.setattr(grpo_agent, "pack", pack)


def scaled(patch, model, scale):
    """A family that multiplies its logits behind the head, as Granite does by 1/8."""
    real = common.load_policy

    def load_policy(*arguments, **options):
        policy = real(*arguments, **options)
        forward = policy.forward

        @functools.wraps(forward)  # `check_head` asks for its signature
        def call(*arguments, **options):
            out = forward(*arguments, **options)
            out.logits = out.logits * scale
            return out

        policy.forward = call
        return policy

    patch.setattr(common, "load_policy", load_policy)


def temperature(patch, model, factor):
    """The sampler draws at another temperature than the scorer's."""
    real = sampling._decode

    def decode(model, prompts, uniform, ends, temperature, *top_p):
        return real(model, prompts, uniform, ends, temperature * factor, *top_p)

    patch.setattr(sampling, "_decode", decode)


def reference(patch, model, noise):
    """The reference has other weights: each matrix with noise of this share of its deviation."""
    load, reference_logps = common.load_policy, dpo.reference_logps

    @torch.no_grad()
    def perturbed(other):
        generator = torch.Generator().manual_seed(0)
        for weight in other.parameters():
            if weight.ndim > 1:
                draw = torch.randn(weight.shape, generator=generator)
                weight += (draw.to(weight.device) * noise * weight.float().std()).to(weight.dtype)
        return other

    def load_policy(name, dtype=None, device=None, trainable=True, **options):
        loaded = load(name, dtype, device, trainable, **options)
        return loaded if trainable else perturbed(loaded)

    def other_logps(args, run, policy, *arguments):
        other = load(model, policy.compute_dtype, policy.device)
        return reference_logps(args, run, perturbed(other), *arguments)

    patch.setattr(common, "load_policy", load_policy)
    patch.setattr(dpo, "reference_logps", other_logps)


HEAD = "its own logits are not what this trainer reads from its head"
SAMPLED = "what is scored is not what was sampled"
REFERENCE = "reference is not the policy"
SLIPS = {  # what to plant, what the message says, in which stages
    "shift": (shift, HEAD, "sft dpo ppo grpo_rubric grpo_agent"),
    "template": (template, SAMPLED, "ppo grpo_rubric grpo_agent"),
    "logits x 1/8": (functools.partial(scaled, scale=1 / 8), HEAD, "sft dpo ppo grpo_agent"),
    "logits x 0.8": (functools.partial(scaled, scale=0.8), HEAD, "sft dpo ppo grpo_agent"),
    "sampled at 0.8": (functools.partial(temperature, factor=0.8), SAMPLED, "ppo grpo_rubric"),
    "sampled at 1.25": (functools.partial(temperature, factor=1.25), SAMPLED, "ppo grpo_agent"),
    "reference + 10 %": (functools.partial(reference, noise=0.1), REFERENCE, "dpo ppo grpo_rubric"),
}
PLANTED = [(slip, stage) for slip, (_, _, stages) in SLIPS.items() for stage in stages.split()]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("slip, stage", PLANTED)
def test_a_planted_slip_stops_the_run(slip, stage, dtype, data, tmp_path, monkeypatch):
    """In half precision a bound wide enough for rounding let some of these pass."""
    plant, message, _ = SLIPS[slip]
    plant(monkeypatch, BASE)
    flags = f"--dtype {dtype}" + " --beta 0.1" * (stage == "grpo_rubric")
    with pytest.raises(UserError, match=message):
        train(stage, data, BASE, tmp_path / "run", flags)
    assert not (tmp_path / "run" / "config.json").exists()
