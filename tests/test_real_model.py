"""The trainers on a real model: SmolLM2-135M-Instruct, with 134.5 M weights held in bf16, 49,152
tokens, a template with a system prompt of its own, and an end token that is also the pad token.

`make real-model` writes it to runs/smollm2. Without it these tests are skipped; with CI_REAL=1 a
missing folder fails. Each run makes two steps of four short rows.
"""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

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
from parts import reward_models, runs, sampling
from parts.files import UserError
from test_half import SLIPS, TRAINERS, command, logged, make_files, run_by_itself, train
from test_resume import outcome

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.usefixtures("quiet_process", "fast_half_products"),
]
MODEL = REPO / "runs/smollm2"
LORA_LAYERS = 30 * 7  # each of 30 blocks has four projections of attention and three of the MLP
STAGES = ["sft", "reward_train", "dpo", "ppo-shared", "grpo_rubric", "grpo_agent"]
RUNS = [(name, "bf16") for name in [*STAGES, "ppo-policy"]]  # all weights
RUNS += [(f"{name}-lora", "fp32" if name == "dpo" else "bf16") for name in STAGES]
RUNS += [(f"{name}-lora", "fp16") for name in STAGES]  # adapters alone: fp16 is slow on a CPU
READ_AGAIN = [("dpo", "bf16"), ("dpo-lora", "fp32"), ("reward_train", "bf16")]  # by other libraries
# the interview with a short opening, and a score that differs between untrained interviewers
ENVIRONMENT = """
from envs.interview import Interview

class Talkative(Interview):
    reward_range = (-1, 3)

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
    """Prompts of 20 tokens and answers of 3 to 8."""
    home, pairs = tmp_path_factory.mktemp("rows"), []
    for question in ("Is she fit?", "Any gaps?", "Hire him?", "Who leads?"):
        turns = (
            ("system", "Be brief"),
            ("user", question),
            ("assistant", "Two audits led."),
            ("assistant", "No."),
        )
        *prompt, chosen, rejected = ({"role": role, "content": text} for role, text in turns)
        pairs.append({"prompt": prompt, "chosen": [chosen], "rejected": [rejected]})
    (home / "talkative.py").write_text(ENVIRONMENT)
    environment = {"env": f"{home}/talkative.py:Talkative"}
    return make_files(home, pairs, split="train") | environment


def small(name, dtype="fp32"):
    """Flags that make a run of this trainer short: two rows per step, of one turn; in fp16, which a
    CPU multiplies five to thirteen times slower than fp32, of four new tokens."""
    tokens, room = (4, 45) if dtype == "fp16" else (8, 60)
    # in fp16 two steps overflow and are skipped; one trainer goes on to the third
    steps = 3 if (name, dtype) == ("sft-lora", "fp16") else 2
    flags = f"--dtype {dtype} --lr {'1e-3' if 'lora' in name else '1e-4'} --steps {steps} --batch-size 2"
    flags += f" --max-new-tokens {tokens}" * (name.partition("-")[0] != "reward_train")
    flags += " --groups-per-batch 1" * name.startswith("grpo")
    flags += " --rollouts 2 --ppo-epochs 1" * name.startswith("ppo")
    return flags + f" --max-length {room} --val-episodes 1" * name.startswith("grpo_agent")


class Finished(dict):
    """(trainer, dtype) → the folder of a run of two steps, made when it is asked for. Its checkpoint,
    three numbers per trained weight, is not written: a resumed run reads one below."""

    def __init__(self, real, data):
        self.real, self.data = real, data

    def __missing__(self, run):
        out = Path(self.data["pairs"]).with_name("-".join(("run", *run)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runs.Run, "_save_checkpoint", lambda run: None)
            assert train(run[0], self.data, self.real, out, small(*run)) == 0
        self[run] = out
        return out


@pytest.fixture(scope="module")
def folders(real, data):
    folders = Finished(real, data)
    yield folders
    for folder in folders.values():
        shutil.rmtree(folder)


@pytest.fixture
def finished(folders):
    """The runs that this test asks for, and those that later tests read: a folder of all weights
    holds half a gigabyte, with a critic one, and 22 of them filled a disk."""
    yield folders
    for run in [run for run in folders if run not in READ_AGAIN]:
        shutil.rmtree(folders.pop(run))


@pytest.mark.parametrize("name, dtype", RUNS)
def test_two_steps_change_the_model(name, dtype, start, finished):
    """All weights: all 272 tensors have moved. LoRA: the 210 adapted ones, no other. In bf16 right
    tokens are off by .02 in the mean and .3 at most, and the preflight refused them. In fp16 the
    first steps may be skipped; tests/test_half.py trains in every trainer, here only sft.py. Two
    answers that earn the same make no update."""
    trained = load_file(finished[name, dtype] / "model.safetensors")
    steps = [row for row in logged(finished[name, dtype]) if "lr" in row]
    assert len(steps) > 1
    steps = [row for row in steps if row["loss"] is not None or "reward/mean" not in row]
    assert steps and all(abs(row["loss"]) < 20 for row in steps)
    if dtype == "fp16" and name != "sft-lora":
        return
    assert steps[-1]["skipped_steps"] == 0
    assert all(weight.dtype == torch.float32 for weight in trained.values())
    changed = [key for key in start if not torch.equal(start[key], trained[key])]
    if "lora" in name:
        assert len(changed) == LORA_LAYERS and all("_proj." in key for key in changed)
    else:
        assert changed == [*start]


def test_with_kernels_of_torch(real, data, tmp_path):
    """The runs above multiply half precision by the fp32 kernels; a user's process does not."""
    run_by_itself("dpo", data, real, tmp_path / "run", small("dpo", "bf16"))
    shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize("slip", ["template", "logits x 0.8", "sampled at 0.8", "reference + 10 %"])
def test_a_planted_slip_stops_the_run(slip, real, data, tmp_path, monkeypatch):
    """In bf16, where rounding is largest: on this model the slips move a log-prob by .27 and more."""
    plant, message, _ = SLIPS[slip]
    plant(monkeypatch, real)
    with pytest.raises(UserError, match=message):
        train("ppo-shared", data, real, tmp_path / "run", small("ppo", "bf16"))


# ---- a run that was killed ----


def kill(name, data, real, out, *flags):
    """Start a trainer as a process of its own and kill it when step 1 has its checkpoint."""
    stage, log = name.partition("-")[0], out.with_suffix(".log")
    line = [sys.executable, f"{stage}.py", *command(name, data, real, out, *flags)]
    with open(log, "w") as file:
        process = subprocess.Popen(line, cwd=REPO, stdout=file, stderr=subprocess.STDOUT)
        until = time.monotonic() + 300
        while not [*out.glob("checkpoint/step-*")] and process.poll() is None:
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.02)
        process.kill()
    assert process.wait() == -signal.SIGKILL, log.read_text()


def refuse(folder, real, data):
    """Every stage that reads a model says that this folder holds none."""
    other = folder.with_name("other")
    lines = [(stage, command(stage, data, folder, other)) for stage in TRAINERS]
    flags = {
        "ppo": ["--reward-model", folder],
        "evaluate compare": ["--model", real, folder],
        "evaluate reward": ["--reward-model", folder],
        "fairness twins": ["--before", "none", "--after", folder],
    }
    lines += [(name, [*name.split()[1:], *argv, "--out", other]) for name, argv in flags.items()]
    for name, argv in lines:
        with pytest.raises(UserError, match="has not finished, so it holds no model yet"):
            importlib.import_module(name.split()[0]).main([*map(str, argv)])


@pytest.mark.parametrize("name", ["dpo", "ppo-shared-lora"])
def test_killed_and_resumed(name, real, data, tmp_path):
    """A killed run's folder was evaluated as "50.0 %" with status 0: it held the untrained weights.
    Resumed, it ends with the bits of a run that was never stopped."""
    whole, out, flags = (
        tmp_path / "whole",
        tmp_path / "killed",
        f"{small(name)} --steps 3 --save-every 1",
    )
    try:
        kill(name, data, real, out, flags)
        assert [*out.glob("checkpoint/step-*")] and not (out / "model.safetensors").exists()
        refuse(out, real, data)
        assert train(name, data, real, out, flags, "--save-every 3 --resume") == 0
        assert train(name, data, real, whole, flags, "--save-every 3") == 0
        assert outcome(out) == outcome(whole)
    finally:
        shutil.rmtree(whole, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)


# ---- what the folders are to other libraries ----


def test_transformers_reads_the_same_model(real, finished):
    """The same ids and the same greedy answers, from a folder that has forgotten us."""
    out = finished["dpo", "bf16"]
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    own = common.load_tokenizer(out)
    answers = sampling.sample(
        common.load_policy(out), own, prompts, max_new_tokens=16, temperature=0
    )
    for prompt, prompt_ids, answer_ids in zip(prompts, answers.prompt_ids, answers.response_ids):
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        assert ids["input_ids"][0].tolist() == prompt_ids
        assert "You are a helpful AI assistant" in tokenizer.decode(prompt_ids)
        generated = model.generate(**ids, do_sample=False, max_new_tokens=16)[0]
        assert generated[len(prompt_ids) :].tolist() == answer_ids
    assert own.get_vocab() == AutoTokenizer.from_pretrained(real).get_vocab()


def test_adapter_and_merged_folder_are_one_model(real, finished):
    """A folder merged in bf16 kept 13 % of what a LoRA had learned. In fp32 the logits of the two,
    of size 35, differ by rounding, 5e-5; merged in bf16 they would by .27."""
    peft = pytest.importorskip("peft")
    out = finished["dpo-lora", "fp32"]
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
    out = finished["reward_train", "bf16"]
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32).eval()
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    prompts = [[{"role": "user", "content": QUESTIONS[i % 3] * (1 + i)}] for i in range(8)]
    answers = [" ".join(["Yes, of course."] * (8 - i) * (1 + i % 2)) for i in range(8)]
    texts = [
        tokenizer.apply_chat_template(
            [*prompt, {"role": "assistant", "content": answer}], tokenize=False
        ).rstrip("\n")  # the score is read at the end token
        for prompt, answer in zip(prompts, answers)
    ]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert len(set(batch["attention_mask"].sum(1).tolist())) == 8
    with torch.no_grad():
        together = model(**batch).logits[:, 0]
        alone = [model(**tokenizer(text, return_tensors="pt")).logits[0, 0] for text in texts]
    ours = reward_models.reward_function(out, raw=True)(prompts, answers)
    assert together.std() > 1e-3, "eight equal scores would prove nothing"
    assert torch.allclose(together, torch.stack(alone), atol=1e-4)
    assert torch.allclose(together, torch.tensor(ours), atol=1e-4)
