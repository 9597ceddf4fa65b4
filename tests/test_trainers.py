"""The promises that sft, reward_train and dpo make alike, kept by their own `main`."""

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
import reward_train
import sft
from conftest import REPO
from parts import answers, files, pairs, reward_models
from tiny import (
    BOS_TEMPLATE,
    CHATML,
    cases,
    error_of,
    pair_rows,
    read_json,
    table,
    tiny_model,
    tiny_reward_model,
    tiny_tokenizer,
    words,
    write_pairs,
    write_rows,
)

STAGES = [sft, reward_train, dpo]
each_stage = pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
GOLD_FN = f"{Path(__file__).with_name('tiny.py')}:share_of_vowels"
LOG2 = math.log(2)
CURE = "--schedule constant --warmup 0 --eval-every 1000"
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("quiet_process")


def read(path):
    return list(files.read_jsonl(path))


def command(stage, data, model, out, *flags):
    argv = ["--data" if stage is sft else "--pairs", data, "--model", model]
    argv += ["--batch-size 8 --steps 1 --out", out]
    argv += [] if "--eval-pairs" in words(*flags) else ["--eval-fraction 0"]
    argv += [] if stage is reward_train else ["--max-new-tokens 4"]
    return words(*argv, *flags)


def train(stage, data, model, out, *flags):
    assert stage.main(command(stage, data, model, out, *flags)) == 0
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


@pytest.fixture
def encoded(tmp_path, tokenizer):
    """encoded(rows, *flags): what sft.py makes of these rows."""

    def encoded(rows, *flags, tokenizer=tokenizer, max_length=1000):
        data = write_rows(tmp_path / "rows.jsonl", rows)
        return sft.Rows(sft.parse_args(words("--data", data, *flags)), tokenizer, max_length)

    return encoded


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def trained_texts(rows, tokenizer):
    return [tokenizer.decode(np.array(ids)[mask]) for ids, mask in zip(rows.ids, rows.masks)]


# ---- before step one ----


def test_sft_loss_before_step_one_is_cross_entropy(trained, llama_folder, capsys):
    """As a textbook loop computes it, of a row built by hand from the template's text."""
    log = trained(sft, [{"prompt": [user("Which fits?")], "completion": [assistant("First.")]}])
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    texts = "<|user|>Which fits?<|end|><|assistant|>", "First.<|end|>"
    context, answer = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    ids, n = torch.tensor([context + answer]), len(answer)
    logits = AutoModelForCausalLM.from_pretrained(llama_folder)(ids).logits
    expected = F.cross_entropy(logits[0, -n - 1 : -1], ids[0, -n:]).item()
    assert steps(log, "loss") == [pytest.approx(expected, abs=1e-5)]
    assert steps(log, "trained_tokens") == [n] and steps(log, "tokens") == [ids.numel()]
    text = capsys.readouterr().out
    assert "preflight  log-probs are the model's: ok" in text and text.count("▮<|end|>") == 1


def test_reward_preflight_is_log_2(trained, reward_folder, capsys):
    """A fresh head is zero: log 2 = 0.6931. What is a reward model already keeps its head."""
    (loss,) = steps(trained(reward_train, pair_rows()), "loss")
    text = capsys.readouterr().out
    assert "loss before step one 0.6931: ok" in text and "▮<|end|>" in text
    assert loss == pytest.approx(LOG2, abs=1e-6)
    (loss,) = steps(trained(reward_train, pair_rows(), model=reward_folder), "loss")
    assert abs(loss - LOG2) > 1e-3 and f"step one {loss:.4f}" not in "0.6931"


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
    likelihood of the chosen answer joins it, by default for sigmoid alone."""
    log = trained(dpo, pair_rows(), f"--loss-type {loss_type} --beta {beta} {more}")
    assert f"loss before step one {expected:.4f}: ok" in capsys.readouterr().out
    whole = expected + nll_coef * steps(log, "nll")[0]
    assert steps(log, "loss")[0] == pytest.approx(whole, rel=1e-5 * max(1, beta))
    assert steps(log, "rewards/accuracies") == [0.5]  # equal scores count one half


# ---- they learn ----


def test_sft_learns_its_answers(trained):
    """Every answer is "… hold."; an off-by-one target learns the prompt's bigrams instead."""
    log = trained(sft, pair_rows(48), CURE, "--steps 40 --lr 5e-3 --eval-fraction 0.2")
    before, after = (row for row in log if "eval/loss" in row)
    assert before["eval/loss"] > 4 and after["eval/loss"] < 1.5
    assert before["eval/n"] == after["eval/n"] > 0


def test_reward_model_learns_a_separable_set(trained, tmp_path, monkeypatch):
    """Its scale is the mean and deviation over at most SCALE_PAIRS pairs from the first on."""
    monkeypatch.setattr(reward_train, "SCALE_PAIRS", 4)
    rows, held = pair_rows(72, seed=48)[:48], pair_rows(72, seed=48)[48:]
    held = write_rows(tmp_path / "held.jsonl", held)
    log = trained(reward_train, rows, CURE, "--steps 40 --lr 2e-3 --eval-pairs", held)
    before, after = (row for row in log if "eval/accuracy" in row)
    assert before["eval/accuracy"] == 0.5  # a zero head: every pair is equal
    assert (after["eval/accuracy"], after["eval/n"]) == (1.0, 24) and after["eval/nll"] < 0.1
    assert after["eval/accuracy_low"] == pytest.approx(24 / (24 + 1.959964**2))  # Wilson at k = n
    raw = reward_models.reward_function(tmp_path / "out", CPU, torch.float32, raw=True)
    sides = [[rows[i][side] for i in (0, 12, 24, 36)] for side in ("prompt", "chosen", "rejected")]
    scores = torch.tensor(raw(sides[0] * 2, sides[1] + sides[2]), dtype=torch.float64)
    scale = read_json(tmp_path / "out/args.json")["scale"]
    assert scale == pytest.approx([scores.mean().item(), scores.std().item()], abs=1e-4)
    assert not any("reward" in key for key in read_json(tmp_path / "out/config.json"))
    scaled = reward_models.reward_function(tmp_path / "out", CPU, torch.float32)(*sides[:2])
    assert scaled == pytest.approx(
        [(x - scale[0]) / scale[1] for x in scores[:4].tolist()], abs=1e-4
    )


@pytest.mark.parametrize("loss_type", dpo.LOSS_TYPES)
def test_every_loss_type_learns(loss_type, trained, pairs_file):
    flags = CURE, f"--steps 5 --lr 3e-4 --loss-type {loss_type} --eval-pairs", pairs_file
    rows = trained(dpo, pair_rows(seed=1), *flags)
    for part, key in (("", "pair_loss"), ("eval/", "eval/loss")):
        log = [row for row in rows if f"{part}rewards/margins" in row]
        margins, losses = ([row[key] for row in log] for key in (f"{part}rewards/margins", key))
        assert margins[-1] > margins[0] + 1e-3 and losses[-1] < losses[0]
    assert loss_type == "simpo" or log[0]["eval/rewards/accuracies"] == 0.5


# ---- tokenizers ----

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
    """A model with one of TOKENIZERS."""
    kind, options, as_messages = request.param
    home, tokenizer = tmp_path_factory.mktemp("odd"), tiny_tokenizer(**options)
    folder = tiny_model("gpt2", home, tokenizer=tokenizer)
    names = ["<|im_end|>", "<|end|>"] if kind == "two end ids" else ["<|end|>"]
    ends = tokenizer.convert_tokens_to_ids(names)
    return SimpleNamespace(folder=folder, ends=ends, as_messages=as_messages)


@each_stage
def test_tokenizers(stage, odd, tmp_path, monkeypatch):
    """Without pad, pad = EOS (many trainers then mask the end token away), without a template, a
    BOS in template and post-processor, two end tokens: each row that enters a forward holds one BOS
    or none, and ends in a trained end id."""
    data = write_pairs(tmp_path / "pairs.jsonl", 8, as_messages=odd.as_messages)
    home, batches, out = sft if stage is sft else pairs, [], tmp_path / "out"
    real = home.pad_rows
    monkeypatch.setattr(home, "pad_rows", lambda *x: batches.append(x[:2]) or real(*x))
    assert steps(train(stage, data, odd.folder, out, "--steps 2"), "grad_norm")[0] > 0
    auto = AutoModelForSequenceClassification if stage is reward_train else AutoModelForCausalLM
    loaded, info = auto.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], "newly initialized"
    saved = AutoTokenizer.from_pretrained(out)
    assert common.end_ids(saved) == odd.ends
    rows = [[*p, *a] for prompts, answers_ in batches for p, a in zip(prompts, answers_)]
    assert len(rows) >= 8
    for ids in rows:
        if saved.bos_token_id is not None:
            assert ids.count(saved.bos_token_id) == 1 and ids[0] == saved.bos_token_id
        assert ids[-1] == odd.ends[0 if odd.as_messages else -1], "its end is trained, pad or not"
    if odd.as_messages:
        prompt, tokenizer = pair_rows(1)[0]["prompt"], common.load_tokenizer(odd.folder)
        assert common.encode_prompt(saved, prompt) == common.encode_prompt(tokenizer, prompt)
        assert saved.chat_template
    if stage is reward_train:
        assert loaded.config.pad_token_id not in odd.ends, "transformers would read another place"
    else:
        assert {*np.atleast_1d(loaded.generation_config.eos_token_id)} == {*odd.ends}


# ---- rows ----


def test_ties(trained, capsys):
    ties = [{**row, "tie": True} for row in pair_rows(8)]
    log = trained(reward_train, ties)
    assert steps(log, "loss")[0] == pytest.approx(LOG2, abs=1e-6)
    assert steps(log, "grad_norm")[0] < 1e-5 and steps(log, "n_ties") == [8]
    long = dict(ties[0], tie=None)
    for key, end in (("chosen", " yes"), ("rejected", " no")):
        long[key] = [assistant("hold " * 60 + end)]
    rows = [*ties[:3], *pair_rows(8, seed=1), {**long, "rejected": long["chosen"]}, long]
    capsys.readouterr()
    trained(dpo, rows, "--max-length 120")
    counted = capsys.readouterr().out
    assert "rows 13, dropped: tie 3, dropped: equal answers 2" in counted
    assert "training 8, held out 0" in counted


@cases("""
value | message
-0.5 | :3: "margin" is -0.5
"much" | :3: "margin" is 'much'
None | :3: "margin" is None
""")
def test_margins_that_are_refused(value, message, trained):
    """A margin below 0 would let the rejected answer score higher. That of a tie is not read."""
    rows = [{**row, "margin": i} for i, row in enumerate(pair_rows(4))]
    rows[1] |= {"tie": True, "margin": -7}
    trained(reward_train, rows, "--margin margin")
    rows[2]["margin"] = value
    error = error_of(trained, reward_train, rows, "--margin margin")
    assert "--margin margin" in error and message in error


def test_sft_trains_a_text_to_its_end(encoded, tokenizer, tmp_path):
    """Nothing predicts the first of n tokens, and the end joins them: n are trained. "abcd" is 4
    tokens and the end, also if it brings it or the template alone names it."""
    endless = tiny_tokenizer(eos=None)
    for used in (tokenizer, endless):
        for text in ("abcd", "abcd<|end|>"):
            rows = encoded([{"text": text}], "--eval-fraction 0", tokenizer=used)
            assert used.decode(rows.ids[0]) == "abcd<|end|>"
            assert rows.masks[0] == [False, *[True] * 4]
    texts = [{"text": x} for x in ("ab", "", " ", "<|end|>")]
    assert len(encoded(texts, "--eval-fraction 0").ids) == 1
    rows = encoded([{"text": "x y " * 20}], "--eval-fraction 0", max_length=12)
    assert len(rows.ids[0]) == 12


def test_sft_reads_its_four_forms(trained, tokenizer):
    """prompt + completion, messages and a preference train the same tokens, text all but its first."""
    pair, numbers = pair_rows(1)[0], []
    text, turns = pair["chosen"][0]["content"], [*pair["prompt"], *pair["chosen"]]
    completion = {"prompt": pair["prompt"], "completion": pair["chosen"]}
    for form in (
        completion,
        {"messages": turns, "text": None},
        pair,
        {"text": text, "messages": []},
    ):
        log = trained(sft, [form])
        numbers.append([steps(log, key) for key in ("trained_tokens", "tokens", "loss")])
    assert numbers[0] == numbers[1] == numbers[2]
    n = len(tokenizer.encode(text))
    assert numbers[3][:2] == [[n], [n + 1]]


def test_every_turn_is_trained_once(encoded, tokenizer, capsys):
    """Each of the assistant's turns but blank ones; a call is not blank."""
    turns = [
        user("a?"), assistant("A."), user("b?"), assistant(" \n"), user("d?"),
        assistant("D.", tool_calls=[]),
    ]  # fmt: skip
    rows = encoded([{"messages": turns}, {"messages": turns[2:4]}], "--eval-fraction 0")
    assert trained_texts(rows, tokenizer) == ["A.<|end|>D.<|end|>"]
    said = capsys.readouterr().out
    assert "rows 2, dropped: nothing to train 1" in said and "training 1" in said
    thinking = tiny_tokenizer(
        template="{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last or m.role == "
        "'user' else m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    rows = encoded([{"messages": turns}], "--eval-fraction 0", max_length=12)
    assert trained_texts(rows, tokenizer) == ["D.<|end|>", "A.<|end|>"], "none is cut away"
    turns = [user("a?"), assistant("hm</think>A."), user("b?"), assistant("ha</think>B.")]
    rows = encoded([{"messages": turns}], "--eval-fraction 0", tokenizer=thinking)
    assert sorted(trained_texts(rows, thinking)) == ["ha</think>B.<|end|>", "hm</think>A.<|end|>"]


def snapshots(i, n=3):
    turns = [
        x for k in range(n) for x in (user(f"Candidate {i:02}, {k}?"), assistant(f"{i:02} to {k}."))
    ]
    return [{"messages": turns[: 2 * k]} for k in (2, 1, 3)[:n]]


SNAPSHOTS = {  # a chat log, where each turn was logged with its history, in two forms
    "messages": lambda i: snapshots(i),
    "completions": lambda i: [
        {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in snapshots(i)
    ],
}


@pytest.mark.parametrize("form", SNAPSHOTS)
def test_a_conversation_is_on_one_side(form, encoded, tokenizer):
    """Rows with the same first question are one conversation. Else the held-out loss measures
    memory."""
    given = [row for i in range(24) for row in SNAPSHOTS[form](i)]
    rows = encoded(given, "--eval-fraction 0.3")
    assert len(rows.train) and len(rows.held)
    name = [re.search(r"Candidate (\d+)", tokenizer.decode(ids))[1] for ids in rows.ids]
    assert not {name[i] for i in rows.train} & {name[i] for i in rows.held}


TURNS = [("Which", "First."), ("Why", "Since."), ("Sure", "Yes.")]
TEXT_LOGS = {  # a conversation {i} up to turn k as plain text: by the template, and by no rule of ours
    "template": ("<|user|>{q} {i:02}?<|end|><|assistant|>", "{a}<|end|>"),
    "labels": ("User: {q} {i:02}?\nBot: ", "{a}\n"),
}


def text_log(form, i, k):
    """(prompt, answer)"""
    asked, answered = TEXT_LOGS[form]
    texts = [x for q, a in TURNS[:k] for x in (asked.format(q=q, i=i), answered.format(a=a))]
    return "".join(texts[:-1]), texts[-1]


@pytest.mark.parametrize("key", ["text", "prompt"])
@pytest.mark.parametrize("form", TEXT_LOGS)
def test_a_conversation_logged_as_text_is_on_one_side(form, key, encoded, tokenizer):
    """Each turn is a row with its history."""
    given = []
    for i in range(24):
        for k in (2, 1, 3):
            prompt, answer = text_log(form, i, k)
            row = {"prompt": prompt, "completion": answer}
            given.append(row if key == "prompt" else {"text": prompt + answer})
    rows = encoded(given, "--eval-fraction 0.3")
    name = [re.search(r"Which (\d+)", tokenizer.decode(ids))[1] for ids in rows.ids]
    assert len(rows.held) and len(rows.train) + len(rows.held) == len(given)
    assert not {name[i] for i in rows.train} & {name[i] for i in rows.held}


@pytest.mark.parametrize("group", ["a", 5, [{"role": "user", "content": "a"}]])
def test_a_group_of_any_type_is_one(group, encoded):
    rows = encoded([{"text": f"{i} is it", "group": group} for i in range(4)], "--eval-fraction 0")
    assert len(set(rows.keys)) == 1


def test_texts_are_held_out(trained):
    """By their own words; they were trained on all the same, without a word."""
    log = trained(
        sft, [{"text": f"Row {i} has {i * i}."} for i in range(40)], "--eval-fraction 0.3"
    )
    assert [row["eval/n"] for row in log if "eval/loss" in row] == [13, 13]


@cases("""
row | fact
{"conversations": [{"from": "human", "value": "x"}]} | conversations
{"prompt": "x", "completion": ""} | completion
{"prompt": "x", "completion": "y", "label": False} | "label"
{"messages": [{"from": "human", "value": "x"}]} | "role"
{"messages": [{"role": "assistant", "content": "x"}]} | "messages"
{"messages": "x"} | "messages"
{"text": ["x"]} | "text"
{"prompt": "x", "chosen": "y"} | "rejected"
{} | found nothing
""")
def test_rows_of_another_layout_are_refused(row, fact, encoded):
    error = error_of(encoded, [{"text": "good"}, row])
    assert "--data" in error and "rows.jsonl:2: " in error and fact in error


def test_chat_makes_a_text_prompt_a_users_turn(encoded, tokenizer, capsys):
    row = {"prompt": "Which fits?", "completion": " First."}
    plain, chat = (encoded([row], "--eval-fraction 0", flag).ids[0] for flag in ("", "--chat"))
    said = capsys.readouterr().out
    assert tokenizer.decode(plain) == "Which fits? First.<|end|>"
    assert tokenizer.decode(chat) == "<|user|>Which fits?<|end|><|assistant|> First.<|end|>"
    assert said.count("1 prompts given as text") == 2 and "--chat" in said


# ---- reward models as functions ----


def test_reward_function(tmp_path, capsys):
    """Scores are those that transformers gives, at the last token. One of another tool has no
    scale, which is said; of a run it is read from args.json, with --max-length and --chat."""
    folder, row = tiny_reward_model("llama", tmp_path), pair_rows(1)[0]
    score = reward_models.reward_function(folder, CPU, torch.float32)
    assert "no scale" in capsys.readouterr().out and score.max_length == 256
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [
        tokenizer.apply_chat_template([*row["prompt"], *row[side]], tokenize=False)
        for side in ("chosen", "rejected")
    ]
    batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    batch.pop("token_type_ids", None)
    expected = model(**batch).logits[:, 0].tolist()
    prompts, found = [row["prompt"]] * 2, [row[side] for side in ("chosen", "rejected")]
    assert score(prompts, found) == pytest.approx(expected, abs=1e-5)
    as_text = [answer[0]["content"] for answer in found]
    assert score(prompts, as_text) == pytest.approx(expected, abs=1e-5)
    record = {"stage": "reward_train", "args": {"max_length": 90, "chat": True}, "scale": [2, 0.5]}
    (Path(folder) / "args.json").write_text(json.dumps(record))
    scaled = reward_models.reward_function(folder, CPU, torch.float32)
    assert scaled.max_length == 90 and "no scale" not in capsys.readouterr().out
    prompt = row["prompt"][0]["content"]  # a text, which this one was trained to read as a turn
    assert scaled([prompt] * 2, as_text) == pytest.approx(
        [(x - 2) / 0.5 for x in expected], abs=1e-4
    )


def test_what_a_reward_model_does_not_read_gets_no_score(reward_folder, capsys):
    """Two answers that differ after the cut alone would score alike, so a policy could write
    anything there. A long prompt loses its beginning, and the answer is read as a whole."""
    score = reward_models.reward_function(reward_folder, CPU, torch.float32)
    prompts = ["a b c.", "Ask. " * 60, "a b c.", "Ask. " * 60]
    given = ["Yes.", "Yes.", "No. " * 40, "No. " * 40]
    assert None not in score(prompts[:3], given[:3]) and not score.told
    score.max_length = 60
    found = [score(prompts, given), score(prompts[2:], given[2:])]
    assert [x is None for x in found[0]] == [False, False, True, True] and found[1] == [None] * 2
    assert capsys.readouterr().out.count("reads 60 tokens, so 3 of 4 rows in part") == 1
    score.check_room(longest=60, max_new_tokens=59)  # such rows are read as a whole
    score.check_room(longest=100, max_new_tokens=29)
    with pytest.raises(files.UserError, match="--reward-model.*--max-new-tokens 30"):
        score.check_room(longest=100, max_new_tokens=30)


@cases("""
family | labels | trainable
causal | 1 | False
reward | 3 | False
reward | 3 | True
""")
def test_what_is_no_reward_model_is_refused(family, labels, trainable, tmp_path, tokenizer):
    make = tiny_reward_model if family == "reward" else tiny_model
    more = {"num_labels": labels} if family == "reward" else {}
    folder = make("llama", tmp_path, **more)
    given = folder, tokenizer, CPU, torch.float32, trainable
    assert "--reward-model" in error_of(reward_models.load_scorer, *given)


# ---- what a run writes and says ----


@pytest.mark.parametrize("flags", ["--lora-rank 2", ""])
def test_precision_of_the_written_weights(flags, trained, tmp_path):
    base, out = tiny_model("llama", tmp_path, dtype=torch.bfloat16), tmp_path / "out"
    trained(sft, pair_rows(), flags, model=base)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert loaded.dtype == torch.float32
    for file in out.rglob("*.safetensors"):
        assert {w.dtype for w in load_file(file).values()} == {torch.float32}
    assert (out / "adapter").exists() == bool(flags)


GOLD = '''
def score(prompts, answers, rows):
    """The share of vowels: any number that depends on the text, and None for an empty answer."""
    assert [row["prompt"] for row in rows] == prompts and len({row["note"] for row in rows}) == 6
    return [sum(c in "aeiou" for c in a) / len(a) if a else None for a in answers]
'''


def test_prompts_and_gold(trained, tmp_path, llama_folder):
    rows = [{"prompt": r["prompt"], "note": f"n{i}"} for i, r in enumerate(pair_rows(6, seed=9))]
    prompts, gold = write_rows(tmp_path / "prompts.jsonl", rows), tmp_path / "gold.py"
    gold.write_text(GOLD)
    model = common.load_model(llama_folder, CPU, torch.float32)
    policy, tokenizer = common.Policy(model, torch.float32), common.load_tokenizer(llama_folder)
    ids = [common.encode_prompt(tokenizer, r["prompt"]) for r in answers.some_prompts(rows, 64)]

    def drawn(temperature, **more):
        drawn = answers.generate(policy, tokenizer, ids, 12, temperature, **more)
        return tokenizer.batch_decode(drawn, skip_special_tokens=True)

    sampled, greedy = drawn(1.0, seed=0), drawn(0)
    assert sampled != drawn(1.0, seed=1) and greedy == drawn(0, rows=4)
    first_answer, sampled = sampled[0], [answers.visible(text) for text in sampled]
    shares = [sum(c in "aeiou" for c in answer) / len(answer) for answer in sampled if answer]
    half = 1.96 * np.std(shares, ddof=1) / len(shares) ** 0.5
    expected = [np.mean(shares), np.mean(shares) - half, np.mean(shares) + half]
    flags = ["--prompts", prompts, "--gold", f"{gold}:score", "--steps 2 --max-new-tokens 12"]
    flags += ["--lr 1e-2 --warmup 0"]
    # with LoRA the reference is the policy with its adapter off
    for stage, more in ((dpo, ""), (dpo, "--lora-rank 4"), (sft, "")):
        log = trained(stage, pair_rows(), *flags, more)
        first, last = (row for row in log if "val/gold" in row)
        found = [first[f"val/gold{end}"] for end in ("", "_low", "_high")]
        assert found == pytest.approx(expected, abs=1e-4) and first["val/n"] == 6
        if stage is dpo:
            assert abs(first["val/kl"]) < 1e-4 and abs(last["val/kl"]) > 1e-3
        assert read(tmp_path / "out/samples.jsonl")[0]["answer"] == first_answer


@pytest.mark.parametrize("stage", [sft, dpo], ids=lambda stage: stage.__name__)
def test_val_is_of_prompts_that_are_not_trained_on(stage, trained, tmp_path, capsys):
    """Four of six prompts are those of the pairs, one of them as text. A prompt that is only shown
    is no evaluation."""
    rows = pair_rows(8)
    given = [{"prompt": row["prompt"]} for row in [*rows[:3], *pair_rows(2, seed=7)]]
    given[3:] = [{"prompt": [user(f"Another prompt, {i}?")]} for i in range(2)]
    given.append({"prompt": rows[5]["prompt"][0]["content"]})
    prompts = write_rows(tmp_path / "prompts.jsonl", given)
    log = trained(stage, rows, "--prompts", prompts)
    assert {row["val/n"] for row in log if "val/n" in row} == {2}
    assert "4 of 6 prompts are also trained on" in capsys.readouterr().out
    log = trained(stage, rows, "--eval-fraction 0.5")
    assert read(tmp_path / "out/samples.jsonl")
    assert not any(key.startswith("val/") for row in log for key in row)


@each_stage
def test_the_screen(stage, tmp_path, capfd):
    """A user's own data: the answer stands in the last lines, the next command names the folder of
    this run, quoted, and nothing that the user has not got."""
    rows = pair_rows(16)
    for row in rows:
        row["prompt"][0]["content"] *= 5
        row["chosen"][0]["content"] *= 2
    data = write_rows(tmp_path / "pairs.jsonl", rows)
    prompts = write_rows(
        tmp_path / "prompts.jsonl", [{"prompt": [user(f"Ask {i}.")]} for i in range(3)]
    )
    model, out = tiny_model("llama", tmp_path, max_position_embeddings=1024), tmp_path / "my run"
    flags = ["--max-new-tokens 60 --prompts", prompts, "--gold", GOLD_FN]
    flags = (
        ["--eval-pairs", write_pairs(tmp_path / "h.jsonl", seed=3)]
        if stage is reward_train
        else flags
    )
    argv = command(stage, data, model, "OUT", *flags, "--lr 3e-4 --batch-size 4")
    argv[argv.index("OUT")] = str(out)
    del argv[argv.index("--steps") : argv.index("--steps") + 2]
    assert stage.main(argv) == 0
    lines = capfd.readouterr().out.splitlines()
    places = [1 + i for i, line in enumerate(lines) if re.match(r"step \d+: ", line)]
    end = lines[places[-1] :]
    assert places[0] <= 24 and len(end) <= 10
    # 4 steps a pass: repeated to make 24, of a reward model 6
    assert len(steps(read(out / "metrics.jsonl"), "lr")) == (8 if stage is reward_train else 24)
    assert end[-1].startswith("next: python") and str(out) in end[-1] and "data/" not in end[-1]
    if stage is not reward_train:
        assert any(line.startswith("val/gold") and "before" in line for line in end)
        assert len({row["answer"] for row in read(out / "samples.jsonl")}) > 2, "they change"


@pytest.mark.parametrize("stage", [sft, dpo], ids=lambda stage: stage.__name__)
@pytest.mark.parametrize("flag", ["", "--chat"])
def test_the_next_command_reads_prompts_as_this_run_did(stage, flag, trained, capsys):
    """Text prompts that were trained as messages were compared as text to continue. A run without
    held-out rows and --prompts measures nothing before step one, and says no empty "step 0:"."""
    rows = [{"prompt": f"Ask {i}.", "chosen": "Yes.", "rejected": "No."} for i in range(4)]
    trained(stage, rows, flag)
    lines = capsys.readouterr().out.splitlines()
    assert ("--chat" in lines[-1].split()) == bool(flag)
    assert not any(re.fullmatch(r"step \d+:\s*", line) for line in lines) and "" not in lines


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


@each_stage
def test_a_copy_trains_on_a_users_file(stage, tmp_path, llama_folder):
    """A stage with common.py and parts/, and nothing else of this project."""
    home, name = tmp_path / "copy", stage.__name__
    shutil.copytree(llama_folder, home / "model")
    shutil.copytree(REPO / "parts", home / "parts")
    for file in (f"{name}.py", "common.py"):
        shutil.copy(REPO / file, home / file)
    write_pairs(home / "mine.jsonl")
    flags = f"{name}.py {'--data' if stage is sft else '--pairs'} mine.jsonl --steps 2"
    flags += " --model model --out run --device cpu"
    flags += "" if stage is reward_train else " --max-new-tokens 4"
    assert run_in_fork(home, flags.split()) == 0
    assert len(steps(read(home / "run/metrics.jsonl"), "grad_norm")) == 2
    assert (home / "run/model.safetensors").is_file()


@each_stage
def test_help(stage, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit, match="0"):
        stage.parse_args(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: python {stage.__name__}.py --")
    assert max(map(len, lines)) <= 120 and len(lines) <= 70
    assert sum(line.startswith("  --") for line in lines) >= 25


@each_stage
@pytest.mark.parametrize("flag", ["--pairs none.jsonl", "--prompts none.jsonl", "--gold none.py:f"])
def test_a_typo_ends_a_run_before_a_model_is_loaded(stage, flag, monkeypatch, tmp_path, capsys):
    if stage is reward_train and "pairs" not in flag:
        pytest.skip("a reward model answers no prompts")
    flag = flag.replace("--pairs", "--data") if stage is sft else flag
    monkeypatch.setattr(common, "load_model", lambda *a, **k: pytest.fail("a model was loaded"))
    data = write_pairs(tmp_path / "pairs.jsonl")
    argv = ["--data" if stage is sft else "--pairs", data, *flag.split(), "--out", tmp_path / "out"]
    with pytest.raises((SystemExit, files.UserError)) as stop:
        stage.main([*map(str, argv)])
    said = capsys.readouterr().err + str(stop.value)
    assert flag.split()[0] in said and "none." in said and not (tmp_path / "out").exists()
