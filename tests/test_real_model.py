"""The trainers on a real model: SmolLM2-135M-Instruct, with 134.5 M weights held in bf16, 49,152
tokens, a template with a system prompt of its own, and an end token that is also the pad token.

`make real-model` writes it to runs/smollm2. Without it these tests are skipped; with CI_REAL=1 a
missing folder fails. Each run makes two steps of a few short rows.
"""

import importlib
import os
import shutil

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
from tiny import log_of, policy_of, words, write_rows

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.usefixtures("quiet_process", "fast_half_products"),
]
MODEL = REPO / "runs/smollm2"
CPU, FP32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
LORA_LAYERS = 30 * 7  # each of 30 blocks has four projections of attention and three of the MLP
STAGES = "sft reward_train dpo ppo-shared grpo_rubric grpo_agent".split()
RUNS = [(name, "bf16") for name in (*STAGES, "ppo-separate")]  # all weights


LORA_RUNS = [(f"{name}-lora", "fp32" if name == "dpo" else "bf16") for name in STAGES]
LORA_RUNS += [("sft-lora", "fp16")]  # one alone: fp16 is slow on a CPU
READ_AGAIN = [("dpo-lora", "fp32"), ("reward_train", "bf16")]  # by other libraries
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
        texts = {"chosen": "Two audits led.", "rejected": "No."}
        row = {side: [{"role": "assistant", "content": text}] for side, text in texts.items()}
        pairs.append({"prompt": prompt, **row, "rubrics": GAUGES, "split": "train"})
    (home / "talkative.py").write_text(ENVIRONMENT)
    rows = write_rows(home / "rows.jsonl", pairs)
    return {"rows": rows, "env": f"{home}/talkative.py:Talkative"}


def command(name, data, out, dtype):
    """argv of a short run: a trainer, with its critic and -lora behind it."""
    stage, *kinds = name.split("-")
    drawn = "--max-new-tokens 8 --patience 0 --on-hack warn --restore last"
    groups = f"{drawn} --groups-per-batch 1 --group-size 4"
    rows, held = data["rows"], "--batch-size 2 --eval-fraction 0"
    own = {
        "sft": ["--data", rows, held, "--max-new-tokens 8"],
        "reward_train": ["--pairs", rows, held],
        "dpo": ["--pairs", rows, held, "--max-new-tokens 8"],
        "ppo": ["--prompts", rows, drawn, "--rollouts 2 --batch-size 2 --ppo-epochs 1"]
        + ["--reward-fn", f"{REPO}/tests/tiny.py:share_of_vowels"],
        "grpo_rubric": ["--data", rows, groups, "--reward checks"],
        "grpo_agent": ["--env", data["env"], "--env-args", '{"k": 2}', groups]
        + ["--max-length 60 --val-episodes 1"],
    }
    shared = f"--device cpu --steps 2 --lr {'1e-3' if 'lora' in kinds else '1e-4'} --dtype {dtype}"
    flags = ["--lora-rank 4" if kind == "lora" else f"--critic {kind}" for kind in kinds]
    return words("--model", MODEL, "--out", out, shared, *own[stage], *flags)


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """finished(trainer, dtype): the folder of a run of two steps. Its checkpoint, three numbers per
    trained weight, is not written."""
    home = tmp_path_factory.mktemp("runs")

    def finished(name, dtype):
        out = home / f"{name}-{dtype}"
        if not out.exists():
            stage = importlib.import_module(name.partition("-")[0])
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(runs.Run, "_save_checkpoint", lambda run: None)
                assert not stage.main(command(name, data, out, dtype))
        return out

    yield finished
    shutil.rmtree(home)


@pytest.mark.parametrize("name, dtype", RUNS + LORA_RUNS)
def test_two_steps_change_the_model(name, dtype, start, finished):
    """All weights: all 272 tensors have moved. LoRA: the 210 adapted ones, no other. In bf16 right
    tokens are off by .02 in the mean and .3 at most, and the preflight refused them."""
    out = finished(name, dtype)
    trained, steps = load_file(out / "model.safetensors"), log_of(out)
    steps = [row for row in steps if "lr" in row]
    assert steps and all(abs(row["loss"]) < 20 for row in steps)
    assert all(weight.dtype == torch.float32 for weight in trained.values())
    changed = [key for key in start if not torch.equal(start[key], trained[key])]
    if "lora" in name:
        assert len(changed) == LORA_LAYERS and all("_proj." in key for key in changed)
    else:
        assert changed == [*start]
    if (name, dtype) not in READ_AGAIN:
        shutil.rmtree(out)  # a folder of all weights holds half a gigabyte


# ---- what is sampled is what is scored ----


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@torch.no_grad()
def test_draws_are_scored_alike(dtype, real):
    """By the sampler, token by token with a cache, and by one padded forward, at temperature .7; greedy
    answers are those of transformers, which knows nothing of us."""
    policy, tokenizer = policy_of(real, dtype=dtype), common.load_tokenizer(real)
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    ids = [common.encode_prompt(tokenizer, prompt) for prompt in prompts]
    rollout = sampling.sample(policy, tokenizer, ids, 2, 12, temperature=0.7)
    b = sampling.rollout_tensors(rollout, CPU)
    logps, _ = policy(*(b[key] for key in rollouts.ROWS), 0.7)
    gaps = (logps - b["logps"])[b["mask"]].abs()
    assert b["logps"][b["mask"]].mean() < -0.1, "certain tokens would prove nothing"
    assert gaps.max() < 1e-4 if dtype == FP32 else gaps.mean() < 0.05
    if dtype == BF16:
        return
    greedy = sampling.sample(policy, tokenizer, ids, max_new_tokens=16, temperature=0).answer_ids
    assert greedy == answers.generate(policy, tokenizer, ids, 16, temperature=0)
    model = AutoModelForCausalLM.from_pretrained(real, dtype=FP32).eval()
    for prompt, row, answer in zip(prompts, ids, greedy):
        theirs = AutoTokenizer.from_pretrained(real).apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        assert theirs["input_ids"][0].tolist() == row
        drawn = model.generate(**theirs, do_sample=False, max_new_tokens=16)
        assert drawn[0, len(row) :].tolist() == answer


# ---- what the folders are to other libraries ----


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
    rows = []
    for prompt, text in zip(prompts, texts):
        whole = [*prompt, {"role": "assistant", "content": text}]
        shown = tokenizer.apply_chat_template(whole, tokenize=False).rstrip("\n")
        rows.append(tokenizer.encode(shown))  # the score is read at the end token
    ids, mask, _ = common.pad_rows(rows, [()] * 8)
    with torch.no_grad():
        together = model(ids, attention_mask=mask.long()).logits[:, 0]
        alone = torch.cat([model(torch.tensor([row])).logits[:, 0] for row in rows])
    ours = reward_models.RewardFunction(str(out), CPU, FP32, raw=True)(prompts, texts)
    assert together.std() > 1e-3, "eight equal scores would prove nothing"
    assert torch.allclose(together, alone, atol=1e-4)
    assert torch.allclose(together, torch.tensor(ours), atol=1e-4)
