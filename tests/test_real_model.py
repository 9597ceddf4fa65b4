"""The trainers on a real model: SmolLM2-135M-Instruct, with 134.5 M weights held in bf16, 49,152
tokens, a template with a system prompt of its own, and an end token that is also the pad token.

`make real-model` writes it to runs/smollm2. Without it these tests are skipped; with CI_REAL=1 a
missing folder fails. Each run makes two steps of a few short rows.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import common
from conftest import REPO
from parts import answers, reward_models, rollouts, runs, sampling
from parts.files import UserError
from test_half import SLIPS
from tiny import words, write_rows

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.usefixtures("quiet_process", "fast_half_products"),
]
MODEL = REPO / "runs/smollm2"
CPU, FP32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
LORA_LAYERS = 30 * 7  # each of 30 blocks has four projections of attention and three of the MLP
STAGES = ["sft", "reward_train", "dpo", "ppo-shared", "grpo_rubric", "grpo_agent"]
RUNS = [(name, "bf16") for name in [*STAGES, "ppo-separate"]]  # all weights
RUNS += [(f"{name}-lora", "fp32" if name == "dpo" else "bf16") for name in STAGES]
RUNS += [("sft-lora", "fp16")]  # one alone: fp16 is slow on a CPU
READ_AGAIN = [("dpo", "bf16"), ("dpo-lora", "fp32"), ("reward_train", "bf16")]  # by other libraries
GAUGES = [{"check": "text:max_chars", "max_chars": n} for n in range(8, 68, 3)]  # a graded score
# the interview with a short opening, and a score that differs between untrained interviewers
ENVIRONMENT = """
from envs.interview import Interview

class Talkative(Interview):
    def reset(self, seed):
        super().reset(seed)
        return [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Ask!"}]

    def step(self, text):
        message, reward, done, info = super().step(text)
        return message, reward + len(text) / 1000, done, info
"""
QUESTIONS = [
    "Name three skills of a good nurse.",
    "What is 2 + 2?",
    "Say hello to the new colleague.",
]


@pytest.fixture(scope="module")
def real():
    """The folder of the model, as text."""
    if not (MODEL / "config.json").is_file():
        reason = f"{MODEL} is missing: make real-model writes it"
        pytest.fail(reason) if os.environ.get("CI_REAL") == "1" else pytest.skip(reason)
    return str(MODEL)


@pytest.fixture(scope="module")
def start(real):
    """{name: weight} of the model, in fp32."""
    return {key: weight.float() for key, weight in load_file(MODEL / "model.safetensors").items()}


@pytest.fixture(scope="module")
def data(real, tmp_path_factory):
    """{what: file}; prompts of 20 tokens and answers of 3 to 8."""
    home, pairs = tmp_path_factory.mktemp("rows"), []
    for question in ("Is she fit?", "Any gaps?", "Hire him?", "Who leads?"):
        prompt = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": question}]
        chosen, rejected = (
            [{"role": "assistant", "content": text}] for text in ("Two audits led.", "No.")
        )
        pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    prompts = [{"prompt": row["prompt"], "split": "train"} for row in pairs]
    rows = {"pairs": pairs, "prompts": prompts}
    rows["rubrics"] = [{**row, "rubrics": GAUGES} for row in prompts]
    files = {name: write_rows(home / f"{name}.jsonl", rows[name]) for name in rows}
    (home / "talkative.py").write_text(ENVIRONMENT)
    return files | {"env": f"{home}/talkative.py:Talkative"}


def command(name, data, out, dtype):
    """argv of a short run: a trainer, with its critic and -lora behind it."""
    stage, *kinds = name.split("-")
    drawn = "--max-new-tokens 8 --patience 0 --on-hack warn --restore last"
    groups = f"{drawn} --groups-per-batch 1 --group-size 4"
    own = {
        "sft": ["--data", data["pairs"], "--batch-size 2 --eval-fraction 0 --max-new-tokens 8"],
        "reward_train": ["--pairs", data["pairs"], "--batch-size 2 --eval-fraction 0"],
        "dpo": ["--pairs", data["pairs"], "--batch-size 2 --eval-fraction 0 --max-new-tokens 8"],
        "ppo": ["--prompts", data["prompts"], drawn, "--rollouts 2 --batch-size 2 --ppo-epochs 1"]
        + ["--reward-fn", f"{REPO}/tests/tiny.py:share_of_vowels"],
        "grpo_rubric": ["--data", data["rubrics"], groups, "--reward checks"],
        "grpo_agent": ["--env", data["env"], "--env-args", '{"k": 2}', groups]
        + ["--max-length 60 --val-episodes 1"],
    }
    shared = f"--device cpu --steps 2 --lr {'1e-3' if 'lora' in kinds else '1e-4'} --dtype {dtype}"
    flags = ["--lora-rank 4" if kind == "lora" else f"--critic {kind}" for kind in kinds]
    return words("--model", MODEL, "--out", out, shared, *own[stage], *flags)


def train(name, data, out, dtype):
    stage = importlib.import_module(name.partition("-")[0])
    assert not stage.main(command(name, data, out, dtype))


def updates(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "lr" in row]


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """finished(trainer, dtype): the folder of a run of two steps. Its checkpoint, three numbers per
    trained weight, is not written."""
    folders, home = {}, tmp_path_factory.mktemp("runs")

    def finished(*run):
        if run not in folders:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(runs.Run, "_save_checkpoint", lambda run: None)
                train(run[0], data, home / "-".join(run), run[1])
            folders[run] = home / "-".join(run)
        return folders[run]

    yield finished
    shutil.rmtree(home)


@pytest.mark.parametrize("name, dtype", RUNS)
def test_two_steps_change_the_model(name, dtype, start, finished):
    """All weights: all 272 tensors have moved. LoRA: the 210 adapted ones, no other. In bf16 right
    tokens are off by .02 in the mean and .3 at most, and the preflight refused them."""
    out = finished(name, dtype)
    trained, steps = load_file(out / "model.safetensors"), updates(out)
    assert steps and all(abs(row["loss"]) < 20 for row in steps)
    assert all(weight.dtype == torch.float32 for weight in trained.values())
    changed = [key for key in start if not torch.equal(start[key], trained[key])]
    if "lora" in name:
        assert len(changed) == LORA_LAYERS and all("_proj." in key for key in changed)
    else:
        assert changed == [*start]
    if (name, dtype) not in READ_AGAIN:
        shutil.rmtree(out)  # a folder of all weights holds half a gigabyte


def test_with_kernels_of_torch(data, tmp_path):
    """The runs above multiply half precision by the fp32 kernels; a user's process does not."""
    argv = command("dpo", data, tmp_path / "run", "bf16")
    subprocess.run([sys.executable, f"{REPO}/dpo.py", *argv], cwd=REPO, check=True)
    steps = updates(tmp_path / "run")
    assert len(steps) == 2 and all(abs(row["loss"]) < 20 for row in steps)
    shutil.rmtree(tmp_path / "run")


# ---- what is sampled is what is scored ----


def policy_of(folder, dtype):
    return common.Policy(common.load_model(str(folder), CPU, dtype), dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@torch.no_grad()
def test_draws_are_scored_alike(dtype, real):
    """By the sampler, token by token with a cache, and by one padded forward, at temperature .7."""
    policy, tokenizer = policy_of(real, dtype), common.load_tokenizer(real)
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    ids = [common.encode_prompt(tokenizer, prompt) for prompt in prompts]
    rollout = sampling.sample(policy, tokenizer, ids, 2, 12, temperature=0.7)
    b = rollouts.rollout_tensors(rollout, CPU)
    logps, _ = policy(*(b[key] for key in rollouts.ROWS), 0.7)
    gaps = (logps - b["logps"])[b["mask"]].abs()
    assert b["logps"][b["mask"]].mean() < -0.1, "certain tokens would prove nothing"
    assert gaps.max() < 1e-4 if dtype == FP32 else gaps.mean() < 0.05


def sampled_at(factor):
    def plant(patch):
        real = sampling.sample

        def hotter(policy, tokenizer, ids, n, most, temperature, seed):
            return real(policy, tokenizer, ids, n, most, temperature * factor, seed)

        patch.setattr(sampling, "sample", hotter)

    return plant


PLANTED = {name: (*SLIPS[name][:2], "dpo") for name in ("logits x 0.8", "reference + 10 %")}
SAMPLED = "gap between sampler and forward"
PLANTED["sampled at 0.8"] = (sampled_at(0.8), SAMPLED, "ppo-shared")


@pytest.mark.parametrize("slip", PLANTED)
def test_a_planted_slip_stops_the_run(slip, data, tmp_path, monkeypatch):
    """In bf16, where rounding is largest."""
    plant, message, name = PLANTED[slip]
    plant(monkeypatch)
    with pytest.raises(UserError, match=f"--model .*: {message}"):
        train(name, data, tmp_path / "run", "bf16")


# ---- what the folders are to other libraries ----


def test_transformers_reads_the_same_model(real, finished):
    """The same ids and the same greedy answers, from a folder that has forgotten us."""
    out = finished("dpo", "bf16")
    tokenizer, own = AutoTokenizer.from_pretrained(out), common.load_tokenizer(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    ids = [common.encode_prompt(own, prompt) for prompt in prompts]
    policy = policy_of(out, FP32)
    rollout = sampling.sample(policy, own, ids, max_new_tokens=16, temperature=0)
    generated = answers.generate(policy, own, ids, 16, temperature=0)
    for prompt, prompt_ids, answer_ids, again in zip(prompts, ids, rollout.answer_ids, generated):
        theirs = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        assert theirs["input_ids"][0].tolist() == prompt_ids
        assert "You are a helpful AI assistant" in tokenizer.decode(prompt_ids)
        answer = model.generate(**theirs, do_sample=False, max_new_tokens=16)[0, len(prompt_ids) :]
        assert answer.tolist() == answer_ids == again
    assert own.get_vocab() == AutoTokenizer.from_pretrained(real).get_vocab()


def test_adapter_and_merged_folder_are_one_model(real, finished):
    """A folder merged in bf16 kept 13 % of what a LoRA had learned. In fp32 the logits of the two,
    of size 35, differ by rounding, 5e-5; merged in bf16 they would by .27."""
    peft = pytest.importorskip("peft")
    out = finished("dpo-lora", "fp32")
    ids = AutoTokenizer.from_pretrained(out)(" ".join(QUESTIONS), return_tensors="pt")["input_ids"]

    def load(folder):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    with torch.no_grad():
        before, merged = load(real)(ids).logits, load(out)(ids).logits
        adapted = peft.PeftModel.from_pretrained(load(real), out / "adapter").eval()(ids).logits
    assert (merged - adapted).abs().max() < 3e-4
    assert (merged - before).abs().max() > 0.1


def test_a_reward_folder_scores_a_padded_batch(finished):
    """The end token is the model's pad token: transformers looks for the last token that is not
    pad, so with that one in the config 7 of 8 scores of a padded batch were wrong."""
    out = finished("reward_train", "bf16")
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32).eval()
    prompts = [[{"role": "user", "content": QUESTIONS[i % 3] * (1 + i)}] for i in range(8)]
    texts = [" ".join(["Yes, of course."] * (8 - i) * (1 + i % 2)) for i in range(8)]
    ids = [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                [*prompt, {"role": "assistant", "content": text}], tokenize=False
            ).rstrip("\n"),  # the score is read at the end token
            return_tensors="pt",
        )
        for prompt, text in zip(prompts, texts)
    ]
    assert len({row.shape[1] for row in ids}) == 8
    batch = torch.nn.utils.rnn.pad_sequence(
        [row[0] for row in ids], True, model.config.pad_token_id
    )
    mask = [[1] * row.shape[1] + [0] * (batch.shape[1] - row.shape[1]) for row in ids]
    with torch.no_grad():
        together = model(batch, attention_mask=torch.tensor(mask)).logits[:, 0]
        alone = torch.cat([model(row).logits[:, 0] for row in ids])
    ours = reward_models.reward_function(str(out), CPU, FP32, raw=True)(prompts, texts)
    assert together.std() > 1e-3, "eight equal scores would prove nothing"
    assert torch.allclose(together, alone, atol=1e-4)
    assert torch.allclose(together, torch.tensor(ours), atol=1e-4)
