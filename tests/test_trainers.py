"""The promises that sft, reward_train, dpo and ppo make alike, kept by their own `main`."""

import json
import math
import os
import re
import runpy
import shutil
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import common
import dpo
import ppo
import reward_train
import sft
from conftest import REPO
from parts import kto, pairs, prompting, reward_models, rollouts, sampling
from parts.means import student_t_quantile
from test_ppo import near, read
from tiny import (
    BOS_TEMPLATE,
    CHATML,
    cases,
    error_of,
    pair_rows,
    read_json,
    table,
    tiny_model,
    tiny_tokenizer,
    words,
    write_pairs,
    write_rows,
)

PAIR_STAGES = [sft, reward_train, dpo]  # each row of the file is trained as it stands
STAGES = [*PAIR_STAGES, ppo]
each_stage = pytest.mark.parametrize("stage", PAIR_STAGES, ids=lambda s: s.__name__)
every_stage = pytest.mark.parametrize("stage", STAGES, ids=lambda s: s.__name__)
REWARD_FN = f"{Path(__file__).with_name('tiny.py')}:share_of_vowels"
LOG2 = math.log(2)
CURE = "--schedule constant --warmup 0 --eval-every 0"
pytestmark = pytest.mark.usefixtures("quiet_process")


def command(stage, data, model, out, *flags):
    flag = {sft: "--data", ppo: "--prompts"}.get(stage, "--pairs")
    argv = [flag, data, "--model", model, "--batch-size 8 --steps 1 --out", out]
    argv += [] if "--eval-pairs" in words(*flags) else ["--eval-fraction 0"]
    argv += [] if stage is reward_train else ["--max-new-tokens 4"]
    argv += ["--reward-fn", REWARD_FN, "--rollouts 8"] if stage is ppo else []
    return words(*argv, *flags)


def train(stage, data, model, out, *flags):
    assert stage.main(command(stage, data, model, out, *flags)) in (None, 0)
    return read(Path(out) / "metrics.jsonl")


def steps(rows, key):
    return [row[key] for row in rows if "lr" in row]


@pytest.fixture
def trained(tmp_path, llama_folder):
    """trained(stage, rows, *flags): the log of a run on these rows, in tmp_path / "out"."""

    def trained(stage, rows, *flags, model=llama_folder):
        data = write_rows(tmp_path / "rows.jsonl", rows)
        return train(stage, data, model, tmp_path / "out", "--overwrite", *flags)

    return trained


def test_sft_loss_before_step_one_is_cross_entropy(trained, llama_folder, capsys):
    """E1, as a textbook loop computes it, of a row built by hand from the template's text."""
    turns = [{"role": "user", "content": "Which fits?"}, {"role": "assistant", "content": "First."}]
    log = trained(sft, [{"prompt": turns[:1], "completion": turns[1:]}])
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    texts = "<|user|>Which fits?<|end|><|assistant|>", "First.<|end|>"
    context, answer = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    ids, n = torch.tensor([context + answer]), len(answer)
    logits = AutoModelForCausalLM.from_pretrained(llama_folder)(ids).logits
    expected = F.cross_entropy(logits[0, -n - 1 : -1], ids[0, -n:]).item()
    text = capsys.readouterr().out
    assert steps(log, "loss") == [pytest.approx(expected, abs=1e-5)]
    assert "our log-probs and the model's: 0.0000, expected 0.0000 (± 1e-04)" in text
    assert f"{n} of {ids.numel()} tokens trained" in text and text.count("◆<|end|>") == 1


def test_reward_preflight_is_log_2(trained, reward_folder, capsys):
    """A fresh head is zero: log 2 = 0.6931. What is a reward model already must not claim it."""
    (loss,) = steps(trained(reward_train, pair_rows()), "loss")
    text = capsys.readouterr().out
    assert "with a zero head: 0.6931, expected 0.6931" in text
    assert text.count("◆<|end|>") == 1 and "▮" not in text, "one token carries the reward"
    assert loss == pytest.approx(LOG2, abs=1e-6)
    (loss,) = steps(trained(reward_train, pair_rows(), model=reward_folder), "loss")
    text = capsys.readouterr().out
    assert "is a reward model already: loss" in text and "zero head" not in text
    assert abs(loss - LOG2) > 1e-3


@cases("""
loss_type | beta | more | expected | nll_coef
sigmoid | 0.1 | --nll-coef 0 | 0.693147 | 0
sigmoid | 100.0 | --nll-coef 0 | 0.693147 | 0
robust | 0.1 | --nll-coef 0 | 0.693147 | 0
sigmoid_norm | 0.1 | --nll-coef 0 | 0.693147 | 0
hinge | 0.1 | --nll-coef 0 | 1.0 | 0
ipo | 0.25 | --nll-coef 0 | 4.0 | 0
ipo | 0.01 | --nll-coef 0 | 2500.0 | 0
sigmoid | 0.1 | --nll-coef 0.3 | 0.693147 | 0.3
sigmoid | 0.1 |  | 0.693147 | 1
robust | 0.1 |  | 0.693147 | 0
""")
def test_dpo_preflight(trained, capsys, loss_type, beta, more, expected, nll_coef):
    """Policy = reference, so z = 0: log 2, 1 (hinge), 1/(4β²) (IPO); β = 100 scales rounding. The
    likelihood of the chosen answer joins behind it, by default for sigmoid alone."""
    log = trained(dpo, pair_rows(), f"--loss-type {loss_type} --beta {beta} {more}")
    text = capsys.readouterr().out
    assert f"loss before step one: {expected:.4f}, expected {expected:.4f}" in text
    assert "implicit rewards: 0.0000, expected 0.0000" in text
    whole = expected + nll_coef * steps(log, "nll")[0]
    assert steps(log, "loss")[0] == pytest.approx(whole, rel=1e-5 * max(1, beta))
    assert steps(log, "rewards/accuracies") == [0.5]  # equal scores count one half


def test_sft_learns_its_answers(trained):
    """E5. Every answer is "… hold."; an off-by-one target learns the prompt's bigrams instead."""
    log = trained(sft, pair_rows(48), CURE, "--steps 40 --lr 5e-3 --eval-fraction 0.2")
    before, after = (row for row in log if "eval/loss" in row)
    assert before["eval/loss"] > 4 and after["eval/loss"] < 1.5
    assert after["eval/token_accuracy"] > 0.7
    assert after["eval/perplexity"] == pytest.approx(math.exp(after["eval/loss"]))
    assert before["eval/n"] == after["eval/n"] > 0  # three rows decided, and no n was printed


def test_reward_model_learns_a_separable_set(trained, tmp_path, monkeypatch):
    """Its unit is the mean and deviation over SCALE_PAIRS pairs from the first to the last: scoring
    all of 2,400 pairs took longer than training on them."""
    monkeypatch.setattr(reward_train, "SCALE_PAIRS", 4)
    held = write_pairs(tmp_path / "held.jsonl", 24, seed=24)
    flags = CURE, "--steps 40 --lr 2e-3 --eval-pairs", held
    rows = pair_rows(48, seed=48)
    log = trained(reward_train, rows, *flags)
    before, after = (row for row in log if "eval/accuracy" in row)
    assert before["eval/accuracy"] == 0.5  # a zero head: every pair is equal
    assert (after["eval/accuracy"], after["eval/n"]) == (1.0, 24) and after["eval/nll"] < 0.1
    assert after["eval/accuracy_low"] == pytest.approx(24 / (24 + 1.959964**2))  # Wilson at k = n
    config = read_json(tmp_path / "out" / "config.json")
    score = reward_models.reward_function(tmp_path / "out", raw=True)
    answers = [
        (rows[i]["prompt"], rows[i][key]) for key in ("chosen", "rejected") for i in (0, 15, 31, 47)
    ]
    rewards = torch.tensor(score(*zip(*answers)))
    assert config["reward_mean"] == pytest.approx(rewards.mean().item(), abs=1e-4)
    assert config["reward_std"] == pytest.approx(rewards.std().item(), abs=1e-4)


@pytest.mark.parametrize("loss_type", dpo.LOSS_TYPES)
def test_every_loss_type_learns(loss_type, trained, pairs_file):
    flags = CURE, f"--steps 5 --lr 3e-4 --loss-type {loss_type} --eval-pairs", pairs_file
    rows = trained(dpo, pair_rows(), *flags)
    for part in ("", "eval/"):
        log = [row for row in rows if f"{part}loss" in row]
        margins, losses = ([row[part + key] for row in log] for key in ("rewards/margins", "loss"))
        assert margins[-1] > margins[0] + 1e-3 and losses[-1] < losses[0]
    assert loss_type == "simpo" or log[0]["eval/rewards/accuracies"] == 0.5


def test_kto_learns_from_thumbs(trained, llama_folder, monkeypatch):
    """The baseline is the mean log-ratio of answers to other prompts, by hand, never below 0."""
    sides, start = 8 * ["chosen", "rejected"], common.load_policy(llama_folder, trainable=False)
    rows = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row, side in zip(pair_rows(16), sides)
    ]
    real, baselines = dpo.kl_baseline, []

    @torch.no_grad()
    def spy(args, run, policy, pairs, refs, indices, pad):
        baseline = real(args, run, policy, pairs, refs, indices, pad)
        if len(indices):  # nothing is held out
            answers = [getattr(pairs, sides[(i + 8) % 16])[(i + 8) % 16] for i in indices]
            batch = common.pad_rows([pairs.prompts[i] for i in indices], answers, pad)
            now, then = (common.token_logps(m, *batch).sum(1) for m in (policy, start))
            baselines.append(baseline)
            assert baseline == pytest.approx(max(0.0, (now - then).mean().item()), abs=2e-3)
        return baseline

    monkeypatch.setattr(dpo, "kl_baseline", spy)
    log = trained(dpo, rows, CURE, "--steps 8 --lr 1e-3 --loss-type kto")
    losses = steps(log, "loss")
    assert losses[0] == pytest.approx(0.5, abs=1e-4) and losses[-1] < losses[0]
    assert steps(log, "rewards/margins")[-1] > 1e-3 and baselines[0] < 1e-4 < max(baselines)
    last = [row for row in log if "rewards/chosen" in row][-1]  # 8 of 16 rows have a chosen side
    margin = last["rewards/chosen"] - last["rewards/rejected"]
    assert last["rewards/margins"] == pytest.approx(margin)


def test_thumbs_on_the_screen_and_a_label_that_is_none(trained, capsys):
    """The strip of an answer with a thumb down shows it as trained, too."""
    rows = [{"prompt": "Role: x.\n", "completion": f"{i}.", "label": i % 2 == 1} for i in range(16)]
    trained(dpo, rows, "--loss-type kto")
    assert "▮0▮.◆<|end|>" in capsys.readouterr().out
    refused = error_of(trained, dpo, [*rows, rows[0] | {"label": 1}], "--loss-type kto")
    assert ':17: "label" is 1; expected true or false' in refused


def test_kto_baseline_keeps_to_micro_tokens(trained, monkeypatch):
    """It reads each answer after the prompt of another row. Measured by that other row, a long answer
    made a forward of 7 × 256 tokens, where 250 were asked for."""
    answers = ["hold " * 60, *15 * ["hold"]]
    rows = [{"prompt": "Ask.", "completion": answer, "label": True} for answer in answers]
    real, batches = kto.pad_rows, []
    monkeypatch.setattr(kto, "pad_rows", lambda *rows: batches.append(real(*rows)) or batches[-1])
    trained(dpo, rows, "--loss-type kto --batch-size 16 --micro-tokens 250")
    shapes = [ids.shape for ids, _, _ in batches]
    assert sum(n for n, _ in shapes) == 2 * 16, "the reference, and the policy at step one"
    assert max(columns for _, columns in shapes) > 250
    assert all(n == 1 or n * columns <= 250 for n, columns in shapes)


TOKENIZERS = table("""
no pad | {"pad": None} | True
no pad, nothing reserved | {"pad": None, "reserved": False} | False
no template | {"template": None} | False
no template, no pad | {"template": None, "pad": None} | True
EOS added | {"add_eos": True, "template": None} | False
""")
TOKENIZERS += [  # their texts hold a |
    ["pad = eos", {"pad": "<|end|>"}, True],
    ["two BOS", {"bos": "<|bos|>", "add_bos": True, "template": BOS_TEMPLATE}, True],
    ["two end ids", {"template": CHATML}, True],
]


@pytest.fixture(scope="module", params=TOKENIZERS, ids=lambda row: row[0])
def odd(request, tmp_path_factory):
    """A model with one of TOKENIZERS. As Qwen's, its generation config knows all its ends."""
    kind, options, as_messages = request.param
    home, tokenizer = tmp_path_factory.mktemp("odd"), tiny_tokenizer(**options)
    folder = tiny_model("gpt2", home, tokenizer=tokenizer)
    names = ["<|end|>", "<|im_end|>"][: 2 if kind == "two end ids" else 1]
    ends = tokenizer.convert_tokens_to_ids(names)
    path = Path(folder) / "generation_config.json"
    path.write_text(json.dumps({**read_json(path), "eos_token_id": ends}))
    turns = as_messages or options.get("template", True) is not None
    return SimpleNamespace(folder=folder, ends=ends, as_messages=as_messages, turns=turns)


@every_stage
def test_tokenizers(stage, odd, tmp_path, monkeypatch):
    """Without pad, pad = EOS (many trainers then mask the end token away), without a template, a
    BOS in template and post-processor, two end tokens: each row that enters a forward holds one BOS
    or none, and one end id, last and trained. (PPO's answers are drawn.)"""
    data = write_pairs(tmp_path / "pairs.jsonl", 8, as_messages=odd.as_messages)
    # where the stage finds `pad_rows`: pairs come by parts/pairs.py, PPO's by rollouts
    home, rows, out = {sft: sft, ppo: rollouts}.get(stage, pairs), [], tmp_path / "out"
    real, ends = home.pad_rows, {*odd.ends}
    monkeypatch.setattr(home, "pad_rows", lambda *x: rows.extend(zip(*x[:2])) or real(*x))
    assert steps(train(stage, data, odd.folder, out, "--steps 2"), "grad_norm")[0] > 0
    auto = AutoModelForSequenceClassification if stage is reward_train else AutoModelForCausalLM
    loaded, info = auto.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], "newly initialized"
    saved, size = AutoTokenizer.from_pretrained(out), read_json(f"{odd.folder}/config.json")
    assert loaded.get_input_embeddings().num_embeddings == size["vocab_size"]
    assert {*common.end_ids(saved, loaded)} == ends
    rows = [row for row in rows if not (len(row[0]) and isinstance(row[0][0], (bool, np.bool_)))]
    assert len(rows) >= 8
    for row in rows:  # sft marks context as ~id, and its second call held masks
        prompt, response = ([~i if i < 0 else i for i in part] for part in row)
        ids = prompt if stage is ppo else [*prompt, *response]  # PPO may draw a BOS
        if saved.bos_token_id is not None:
            assert ids.count(saved.bos_token_id) == 1 and ids[0] == saved.bos_token_id
        if stage is ppo:
            assert not ends & {*response[:-1], *(() if odd.turns else prompt)}
        else:
            assert ids[-1] == odd.ends[-1], "the answer's end is trained, whatever pads"
            assert odd.turns or sum(i in ends for i in ids) == 1  # each turn has its end
    if odd.as_messages:
        prompt, tokenizer = pair_rows(1)[0]["prompt"], common.load_tokenizer(odd.folder)
        assert common.encode_prompt(saved, prompt) == common.encode_prompt(tokenizer, prompt)
        assert saved.chat_template
    if stage is reward_train:
        assert loaded.config.pad_token_id not in ends, "transformers would read the wrong position"
    else:
        assert {*np.atleast_1d(loaded.generation_config.eos_token_id)} == ends


def test_ties(trained, capsys):
    ties = [{**row, "tie": True} for row in pair_rows(8)]
    log = trained(reward_train, ties)
    assert steps(log, "loss")[0] == pytest.approx(LOG2, abs=1e-6)
    assert steps(log, "grad_norm")[0] < 1e-5
    long = dict(ties[0], tie=None)
    for key, end in (("chosen", " yes"), ("rejected", " no")):
        long[key] = [{"role": "assistant", "content": "hold " * 60 + end}]
    rows = [*ties[:3], *pair_rows(8, seed=1), {**long, "rejected": long["chosen"]}, long]
    counted = "rows 13, dropped: tie 3, dropped: chosen = rejected 1, responses cut 2, "
    counted += "dropped: equal after cutting 1; training 8, held out 0"
    for stage, drop in ((reward_train, "--ties drop"), (dpo, "")):
        capsys.readouterr()
        trained(stage, rows, "--max-length 120", drop)
        assert counted in capsys.readouterr().out


def test_sft_trains_a_text_to_its_end(trained, tmp_path, llama_folder, capsys):
    """Nothing predicts the first of n tokens, and the end joins them: n are trained. "abcd" is 4
    tokens and the end, also if it brings it or the template alone names it."""
    texts = [{"text": "abcd"}, {"text": "abcd<|end|>"}]
    endless = tiny_model("llama", tmp_path, tokenizer=tiny_tokenizer(eos=None))
    for model in (llama_folder, endless):
        assert steps(trained(sft, texts, model=model), "trained_tokens") == [8]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 20}]
    long = [{"text": "x y " * 20}, {"messages": turns}, {"messages": turns * 2}]
    trained(sft, [*texts, *long], "--max-length 12")
    assert "rows 5, rows cut 3; training 5" in capsys.readouterr().out


def test_sft_reads_its_four_forms(trained, tokenizer):
    """prompt + completion, messages and a preference train the same tokens, text all but its first."""
    pair, numbers = pair_rows(1)[0], []
    text, turns = pair["chosen"][0]["content"], [*pair["prompt"], *pair["chosen"]]
    completion = {"prompt": pair["prompt"], "completion": pair["chosen"]}
    for form in (completion, {"messages": turns}, pair, {"text": text}):
        log = trained(sft, [form])
        numbers.append([steps(log, key) for key in ("trained_tokens", "tokens", "loss")])
    assert numbers[0] == numbers[1] == numbers[2]
    n = len(tokenizer.encode(text))
    assert numbers[3][:2] == [[n], [n + 1]]


@cases("""
flags | dtype
--lora-rank 2 | float32
 | float32
--lora-rank 2 --save-dtype fp16 | float16
--save-dtype bf16 | bfloat16
""")
def test_precision_of_the_written_weights(flags, dtype, trained, tmp_path):
    base, out = tiny_model("llama", tmp_path, dtype=torch.bfloat16), tmp_path / "out"
    trained(sft, pair_rows(), flags, model=base)
    written = {w.dtype for w in load_file(out / "model.safetensors").values()}
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert written == {loaded.dtype} == {getattr(torch, dtype)}
    for file in out.glob("adapter/*.safetensors"):  # what was trained is not rounded
        assert {w.dtype for w in load_file(file).values()} == {torch.float32}


GOLD = '''
def score(prompts, answers, rows):
    """The share of vowels: any number that depends on the text, and None for an empty answer."""
    assert [row["prompt"] for row in rows] == prompts and len({row["note"] for row in rows}) == 6
    return [sum(c in "aeiou" for c in a) / len(a) if a else None for a in answers]
'''


def test_prompts_and_gold(trained, tmp_path, llama_folder):
    rows = [{"prompt": r["prompt"], "note": f"n{i}"} for i, r in enumerate(pair_rows(6))]
    prompts, gold = write_rows(tmp_path / "prompts.jsonl", rows), tmp_path / "gold.py"
    gold.write_text(GOLD)
    model, tokenizer = common.load_policy(llama_folder), common.load_tokenizer(llama_folder)
    given = model, tokenizer, [row["prompt"] for row in prompting.some_prompts(rows, 64)], 12
    drawn, again = (prompting.generate(*given, 1.0, seed=seed) for seed in (0, 1))
    greedy = sampling.sample(*given[:3], 1, 12, 0).texts
    assert drawn.texts != again.texts and drawn.prompt_ids == again.prompt_ids
    assert prompting.generate(*given, 0, rows=4).texts == greedy
    shares = [sum(c in "aeiou" for c in answer) / len(answer) for answer in drawn.texts if answer]
    half = student_t_quantile(0.05, len(shares) - 1) * np.std(shares, ddof=1) / len(shares) ** 0.5
    mean = np.mean(shares)
    expected = {"val/gold": mean, "val/gold_low": mean - half, "val/gold_high": mean + half}
    flags = ["--prompts", prompts, "--gold", f"{gold}:score", "--eval-temperature 1 --steps 2"]
    flags += ["--max-new-tokens 12 --lr 1e-2 --warmup 0"]
    # with LoRA the reference is the policy with its adapter off
    for stage, more in ((dpo, ""), (dpo, "--lora-rank 4"), (sft, "")):
        log = trained(stage, pair_rows(), *flags, more)
        first, last = (row for row in log if "val/gold" in row)
        assert near(first, expected, rel=1e-5, abs=1e-4) and first["val/n"] == 6
        if stage is dpo:
            assert first["val/kl"] == pytest.approx(0, abs=1e-4) and last["val/kl"] > 1e-3
        shown = read(tmp_path / "out" / "samples.jsonl")[0]
        assert shown["answer"] == greedy[0], "the first choice"


def test_a_prompt_that_is_only_shown_is_no_evaluation(trained, tmp_path):
    """val/n said 1 where no --prompts were answered."""
    for stage in (dpo, sft):
        log = trained(stage, pair_rows(), "--eval-fraction 0.5")
        assert read(tmp_path / "out" / "samples.jsonl")
        assert not any(key.startswith("val/") for row in log for key in row)


def test_evaluations_answer_validation_prompts(tmp_path, llama_folder, capsys):
    """The prompts of the test split would choose weights and then be tested on. Of messages nothing
    is said: the draw that tries the model was of a text, and the line about text was printed."""
    rows = [{"prompt": [{"role": "user", "content": f"{split} {i}"}], "split": split}
            for split in ("train", "test", "val") for i in range(3)]  # fmt: skip
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    args = dpo.parse_args(["--pairs", "mine.jsonl", "--prompts", str(prompts)])
    model = common.load_policy(llama_folder), common.load_tokenizer(llama_folder)
    common.say_once.cache_clear()
    answered, _ = prompting.prompts_to_answer(args, *model, [])
    assert "given as text" not in capsys.readouterr().out
    assert {row["split"] for row in answered} == {"val"} and len(answered) == 3


@each_stage
def test_the_screen(stage, tmp_path, capfd):
    rows = pair_rows(16)
    for row in rows:
        row["prompt"][0]["content"] *= 5
        row["chosen"][0]["content"] *= 2
    data = write_rows(tmp_path / "pairs.jsonl", rows)
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": r["prompt"]} for r in rows[:3]])
    model, out = tiny_model("llama", tmp_path, max_position_embeddings=1024), tmp_path / "out"
    flags = ["--max-new-tokens 60 --prompts", prompts, "--gold", REWARD_FN]
    flags = ["--eval-pairs", data] if stage is reward_train else flags
    argv = command(stage, data, model, out, *flags, "--lr 3e-4 --batch-size 4")
    del argv[argv.index("--steps") : argv.index("--steps") + 2]
    assert stage.main(argv) == 0
    said = capfd.readouterr()
    lines = said.out.splitlines()
    assert said.err == "" and max(map(len, lines)) <= 400, said
    places = [1 + i for i, line in enumerate(lines) if re.match(r"step \d+: ", line)]
    end = lines[places[-1] :]
    assert places[0] <= 24 and len(end) <= 10, said.out
    # 4 steps a pass: repeated to make 24, of a reward model 6
    assert len(steps(read(out / "metrics.jsonl"), "lr")) == (8 if stage is reward_train else 24)
    own = {dpo: f"--prompts {prompts} --gold {REWARD_FN} --re", reward_train: f"--pairs {data}"}
    assert end[-1].startswith("next: python") and own.get(stage, "") in end[-1]
    if stage is not reward_train:
        shown = dict(line.split(maxsplit=1) for line in end)
        assert shown["before"] != shown["after"] and "val/gold" in shown


GRPO = "watch.py judge.py ruler.py checks"
EPISODES = """--env mine.py:Guess --val-episodes 2 --test-episodes 2 --group-size 2
    --groups-per-batch 2"""
COPIES = {  # what is copied beside common.py and parts/, the flags beside --model and --out
    "sft": ("", "--data mine.jsonl"),
    "reward_train": ("", "--pairs mine.jsonl"),
    "dpo": ("", "--pairs mine.jsonl"),
    "ppo": ("watch.py", "--prompts mine.jsonl --reward-fn mine.py:score --rollouts 8"),
    # the recipe's own line: its rank is 32
    "grpo_rubric": (GRPO, "data_path=rubrics.json group_size=2 groups_per_batch=2 max_tokens=4"),
    "grpo_agent": (f"{GRPO} grpo_rubric.py", EPISODES),
}
MINE = """
def score(prompts, answers, rows):
    return [float("a" in answer) for answer in answers]

class Guess:
    name, val_key, reward_range, history, max_turns = "guess", "win", (0, 1), "all", 1
    baselines = {"a": lambda env, rng: "a"}

    def reset(self, seed):
        return [{"role": "user", "content": f"Say a, {seed % 7}."}]

    def step(self, text):
        win = float("a" in text)
        return None, win, True, {"win": win}
"""


def run_in_fork(home, argv):
    """`python argv` with `home` as its folder, in a fork that forgets this project; the status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        os.chdir(home)
        ours = {path.stem for path in REPO.glob("*.py")} | {"parts", "checks", "envs"}
        for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
            del sys.modules[name]
        sys.path[:] = [str(home), *(path for path in sys.path if REPO != Path(path))]
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as stop:
        os._exit(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


@pytest.mark.parametrize("stage", COPIES)
def test_a_copy_trains_on_a_users_file(stage, tmp_path, llama_folder):
    copied, flags = COPIES[stage]
    home = tmp_path / "copy"
    shutil.copytree(llama_folder, home / "model")
    for name in [f"{stage}.py", "common.py", "parts", *copied.split()]:
        tree = (REPO / name).is_dir()
        (shutil.copytree if tree else shutil.copy)(REPO / name, home / name)
    write_pairs(home / "mine.jsonl")
    (home / "mine.py").write_text(MINE, encoding="utf-8")
    rubrics = [{"check": "regex:match", "pattern": "a"}]
    rows = [{"task_id": str(i), "prompt": f"Say a, {i}.", "rubrics": rubrics} for i in range(10)]
    (home / "rubrics.json").write_text(json.dumps(rows), encoding="utf-8")
    flags = f"{stage}.py {flags} --steps 2 --model model --out run --device cpu"
    flags += " --max-new-tokens 4" if stage not in ("reward_train", "grpo_rubric") else ""
    assert run_in_fork(home, flags.split()) == 0
    assert len([row for row in read(home / "run" / "metrics.jsonl") if "grad_norm" in row]) == 2
    assert (home / "run" / "model.safetensors").is_file()
    assert (home / "run" / "adapter").is_dir() == (stage == "grpo_rubric")


@cases("""
flags | prompts | gold
 | data/prompts.jsonl | data/recruiter.py:reward
{} data/prefs.jsonl | data/prompts.jsonl | data/recruiter.py:reward
{} ./data/../data/rank_train.jsonl | data/prompts.jsonl | data/recruiter.py:reward
{} REPO/data/prefs.jsonl | data/prompts.jsonl | data/recruiter.py:reward
{} data/mine.jsonl | None | None
{} tests/prefs.jsonl | None | None
{} REPO/tests/prefs.jsonl | None | None
{} mine.jsonl | None | None
{} data/prefs.jsonl mine.jsonl | None | None
{} data/prefs.jsonl --prompts mine.jsonl | mine.jsonl | None
{} data/prefs.jsonl --gold my.py:f | data/prompts.jsonl | my.py:f
""")
@pytest.mark.parametrize("stage, flag", [(sft, "--data"), (dpo, "--pairs")])
def test_bundled_data_brings_its_prompts_and_score(
    stage, flag, flags, prompts, gold, monkeypatch, llama_folder
):
    """Known by place and name: ./data/prefs.jsonl was none, and one's own data/mine.jsonl was. A
    model that does not know their form gets the worked examples."""
    monkeypatch.chdir(REPO)
    argv = flags.format(flag).replace("REPO", str(REPO)).split()
    examples = prompting.EXAMPLES if prompts == "data/prompts.jsonl" else None
    for model, expected in ([], (None, 1.0)), (["--model", llama_folder], (examples, 0.7)):
        args = stage.parse_args([*argv, *model])
        assert (args.prompts, args.gold) == (prompts, gold)
        assert (args.examples, args.eval_temperature) == expected


@every_stage
def test_help(stage, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit, match="0"):
        stage.parse_args(["--help"])
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].startswith(f"usage: python {stage.__name__}.py --")
    stage.parse_args(lines[0].split()[3:])
    assert max(map(len, lines)) <= 100
    shared = text.partition("flags of all trainers:")[2]
    assert len(re.findall(r"^  --[a-z-]+", shared, re.M)) == 23
