"""The promises that sft, reward_train and dpo make alike, kept by their own `main`."""

import itertools
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import common
import dpo
import grpo_rubric
import reward_train
import sft
from conftest import REPO
from parts import answers, files, pairs, reward_models, runs, sampling
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
        args = sft.parse_args(words("--eval-fraction 0 --data", data, *flags))
        return sft.Rows(args, tokenizer, max_length)

    return encoded


def logged(form, i, k):
    """A conversation {i} up to turn k, as messages, or as text: by the template, or no rule of ours."""
    asked, answered = {"template": ("<|user|>{}<|end|><|assistant|>", "{}<|end|>"),
                       "labels": ("User: {}\nBot: ", "{}\n")}.get(form, ("{}", "{}"))  # fmt: skip
    turns = [asked.format(f"Q{n} of {i:02}?") if n % 2 == 0 else answered.format(f"A{n}.") for n in range(2 * k)]  # fmt: skip
    if form == "messages":
        turns = [(assistant if n % 2 else user)(text) for n, text in enumerate(turns)]
        return turns[:-1], turns[-1:]
    return "".join(turns[:-1]), turns[-1]


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def trained_texts(rows, tokenizer):
    return [
        tokenizer.decode(np.array(ids)[np.array(mask)]) for ids, mask in zip(rows.ids, rows.masks)
    ]


# ---- before step one ----


def test_sft_loss_before_step_one_is_cross_entropy(trained, llama_folder, capsys):
    """As a textbook loop computes it, of a row built by hand from the template's text. Every answer is
    "… hold.", and it is learned; an off-by-one target learns the prompt's bigrams instead."""
    log = trained(sft, [{"prompt": [user("Which fits?")], "completion": [assistant("First.")]}])
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    texts = "<|user|>Which fits?<|end|><|assistant|>", "First.<|end|>"
    context, answer = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    ids, n = torch.tensor([context + answer]), len(answer)
    logits = AutoModelForCausalLM.from_pretrained(llama_folder)(ids).logits
    expected = F.cross_entropy(logits[0, -n - 1 : -1], ids[0, -n:]).item()
    found = [steps(log, key)[0] for key in ("loss", "trained_tokens", "tokens")]
    assert found == pytest.approx([expected, n, ids.numel()], abs=1e-5)
    text = capsys.readouterr().out
    assert "preflight  log-probs are the model's: ok" in text and text.count("▮<|end|>") == 1
    log = trained(sft, pair_rows(48), CURE, "--steps 40 --lr 5e-3 --eval-fraction 0.2")
    before, after = (row for row in log if "eval/loss" in row)
    assert before["eval/loss"] > 4 and after["eval/loss"] < 1.5
    assert before["eval/n"] == after["eval/n"] > 0


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
sigmoid | 100.0 | --nll-coef 0 | 0.693147 | 0
robust | 0.1 | --nll-coef 0 | 0.693147 | 0
sigmoid_norm | 0.1 | --nll-coef 0 | 0.693147 | 0
hinge | 0.1 | --nll-coef 0 | 1.0 | 0
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


def test_reward_model_learns_a_separable_set(trained, tmp_path, monkeypatch):
    """Its scale is the mean and deviation over at most SCALE_PAIRS pairs from the first on."""
    monkeypatch.setattr(reward_train, "SCALE_PAIRS", 4)
    rows, out = pair_rows(72, seed=48), tmp_path / "out"
    held = write_rows(tmp_path / "held.jsonl", rows[48:])
    log = trained(reward_train, rows[:48], CURE, "--steps 40 --lr 2e-3 --eval-pairs", held)
    before, after = (row for row in log if "eval/accuracy" in row)
    assert before["eval/accuracy"] == 0.5  # a zero head: every pair is equal
    assert (after["eval/accuracy"], after["eval/n"]) == (1.0, 24) and after["eval/nll"] < 0.1
    assert after["eval/accuracy_low"] == pytest.approx(24 / (24 + 1.959964**2))  # Wilson at k = n
    raw = reward_models.reward_function(out, CPU, torch.float32, raw=True)
    prompts, *sides = (
        [rows[i][side] for i in (0, 12, 24, 36)] for side in ("prompt", "chosen", "rejected")
    )
    scores = np.array(raw(prompts * 2, sum(sides, [])))
    mean, deviation = read_json(out / "args.json")["scale"]
    assert [mean, deviation] == pytest.approx([scores.mean(), scores.std(ddof=1)], abs=1e-4)
    scaled = reward_models.reward_function(out, CPU, torch.float32)(prompts, sides[0])
    assert scaled == pytest.approx((scores[:4] - mean) / deviation, abs=1e-4)
    assert not any("reward" in key for key in read_json(out / "config.json"))


@pytest.mark.parametrize("loss_type", dpo.LOSS_TYPES)
def test_every_loss_type_learns(loss_type, trained, pairs_file):
    flags = CURE, f"--steps 5 --lr 3e-4 --loss-type {loss_type} --eval-pairs", pairs_file
    rows = trained(dpo, pair_rows(seed=1), *flags)
    for margins, loss in (("rewards/margins", "pair_loss"), ("eval/rewards/margins", "eval/loss")):
        first, *_, last = (row for row in rows if margins in row)
        assert last[margins] > first[margins] + 1e-3 and last[loss] < first[loss]
    assert loss_type == "simpo" or first["eval/rewards/accuracies"] == 0.5


# ---- tokenizers ----


# kind, options of the tokenizer, are the rows messages?
@pytest.fixture(scope="module", params=table("""
    no pad | {"pad": None} | True
    no pad, nothing reserved | {"pad": None, "reserved": False} | False
    no template | {"template": None} | False
    no template, no pad | {"template": None, "pad": None} | True
    EOS added | {"add_eos": True, "template": None} | False
    pad is eos | {"pad": "END"} | True
    two BOS | {"bos": "<s>", "add_bos": True, "template": "BOS"} | True
    two end ids | {"template": "CHATML"} | True
"""), ids=lambda row: row[0])  # fmt: skip
def odd(request, tmp_path_factory):
    """A model with an odd tokenizer."""
    kind, options, as_messages = request.param
    texts = {"BOS": BOS_TEMPLATE, "CHATML": CHATML, "END": "<|end|>"}
    tokenizer = tiny_tokenizer(**{key: texts.get(x, x) for key, x in options.items()})
    folder = tiny_model("gpt2", tmp_path_factory.mktemp("odd"), tokenizer=tokenizer)
    names = ["<|im_end|>"] * (kind == "two end ids") + ["<|end|>"]
    return folder, tokenizer.convert_tokens_to_ids(names), as_messages


@each_stage
def test_tokenizers(stage, odd, tmp_path, monkeypatch):
    """Without pad, pad = EOS (many trainers then mask the end token away), without a template, a
    BOS in template and post-processor, two end tokens: each row that enters a forward holds one BOS
    or none, and ends in a trained end id."""
    folder, ends, as_messages = odd
    data = write_pairs(tmp_path / "pairs.jsonl", 8, as_messages=as_messages)
    home, rows, out = sft if stage is sft else pairs, [], tmp_path / "out"
    real = home.pad_rows

    def noted(prompts, answers_, *given):
        rows.extend([*p, *a] for p, a in zip(prompts, answers_))
        return real(prompts, answers_, *given)

    monkeypatch.setattr(home, "pad_rows", noted)
    assert steps(train(stage, data, folder, out, "--steps 2"), "grad_norm")[0] > 0
    auto = AutoModelForSequenceClassification if stage is reward_train else AutoModelForCausalLM
    loaded, info = auto.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], "newly initialized"
    saved = AutoTokenizer.from_pretrained(out)
    assert common.end_ids(saved) == ends and len(rows) >= 8
    for ids in rows:
        assert saved.bos_token_id is None or saved.bos_token_id not in ids[1:]
        assert ids[-1] == ends[0 if as_messages else -1], "its end is trained, pad or not"
    if as_messages:
        prompt, tokenizer = pair_rows(1)[0]["prompt"], common.load_tokenizer(folder)
        assert common.encode_prompt(saved, prompt) == common.encode_prompt(tokenizer, prompt)
    if stage is reward_train:
        assert loaded.config.pad_token_id not in ends, "transformers would read another place"
    else:
        assert {*np.atleast_1d(loaded.generation_config.eos_token_id)} == {*ends}


# ---- rows ----


def test_ties(trained, capsys):
    ties = [{**row, "tie": True} for row in pair_rows(8)]
    log = trained(reward_train, ties)
    assert steps(log, "loss")[0] == pytest.approx(LOG2, abs=1e-6)
    assert steps(log, "grad_norm")[0] < 1e-5 and steps(log, "n_ties") == [8]
    trained(dpo, [*ties[:3], *pair_rows(8, seed=1)])
    said = capsys.readouterr().out
    assert "rows 11, dropped: tie 3" in said and "training 8, held out 0" in said


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


def test_sft_reads_its_four_forms(trained, encoded, tokenizer):
    """prompt + completion, messages and a preference train the same tokens. Of a text nothing predicts
    the first of n tokens, and the end joins them: n are trained, also if it brings its end or the
    template alone names it."""
    pair, numbers = pair_rows(1)[0], []
    turns = [*pair["prompt"], *pair["chosen"]]
    completion = {"prompt": pair["prompt"], "completion": pair["chosen"]}
    for form in completion, {"messages": turns, "text": None}, pair:
        log = trained(sft, [form])
        numbers.append([steps(log, key) for key in ("trained_tokens", "tokens", "loss")])
    assert numbers[0] == numbers[1] == numbers[2]
    for used in (tokenizer, tiny_tokenizer(eos=None)):
        for text in ("abcd", "abcd<|end|>"):
            rows = encoded([{"text": text, "messages": []}], tokenizer=used)
            assert used.decode(rows.ids[0]) == "abcd<|end|>"
            assert [*map(bool, rows.masks[0])] == [False, *[True] * 4]
    assert len(encoded([{"text": x} for x in ("ab", "", " ", "<|end|>")]).ids) == 1
    assert len(encoded([{"text": "x y " * 20}], max_length=12).ids[0]) == 12
    row = {"prompt": "Which fits?", "completion": " First."}
    plain, chat = (tokenizer.decode(encoded([row], flag).ids[0]) for flag in ("", "--chat"))
    assert plain == "Which fits? First.<|end|>"
    assert chat == "<|user|>Which fits?<|end|><|assistant|> First.<|end|>"


def test_every_turn_is_trained_once(encoded, tokenizer, capsys):
    """Each of the assistant's turns but blank ones; a call is not blank."""
    turns = [
        user("a?"), assistant("A."), user("b?"), assistant(" \n"), user("d?"),
        assistant("D.", tool_calls=[]),
    ]  # fmt: skip
    rows = encoded([{"messages": turns}, {"messages": turns[2:4]}])
    assert trained_texts(rows, tokenizer) == ["A.<|end|>D.<|end|>"]
    assert "rows 2, dropped: nothing to train 1" in capsys.readouterr().out
    thinking = tiny_tokenizer(
        template="{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last or m.role == "
        "'user' else m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    rows = encoded([{"messages": turns}], max_length=12)
    assert trained_texts(rows, tokenizer) == ["D.<|end|>", "A.<|end|>"], "none is cut away"
    turns = [user("a?"), assistant("hm</think>A."), user("b?"), assistant("ha</think>B.")]
    rows = encoded([{"messages": turns}], tokenizer=thinking)
    assert sorted(trained_texts(rows, thinking)) == ["ha</think>B.<|end|>", "hm</think>A.<|end|>"]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("form", ["messages", "template", "labels"])
def test_a_conversation_is_on_one_side(form, whole, encoded, tokenizer):
    """A chat log, where each turn was logged with its history, which is one conversation by its first
    question. Else the held-out loss measures memory."""
    given = []
    for i, k in itertools.product(range(24), (2, 1, 3)):
        prompt, answer = logged(form, i, k)
        row = {"prompt": prompt, "completion": answer}
        given.append(
            {"messages" if form == "messages" else "text": prompt + answer} if whole else row
        )
    rows = encoded(given, "--eval-fraction 0.3")
    name = [re.search(r"Q0 of (\d+)", tokenizer.decode(ids))[1] for ids in rows.ids]
    assert len(rows.held) and len(rows.train) + len(rows.held) == len(name)
    assert not {name[i] for i in rows.train} & {name[i] for i in rows.held}
    rows = encoded([{"text": f"{i} is it", "group": [user("a")]} for i in range(4)])
    assert len(set(rows.keys)) == 1


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


# ---- reward models as functions ----


def test_reward_function(tmp_path, capsys):
    """Scores are those that transformers gives, at the last token. One of another tool has no
    scale, which is said; of a run it is read from args.json, with --max-length and --chat."""
    folder, row = tiny_reward_model("llama", tmp_path), pair_rows(1)[0]
    score = reward_models.reward_function(folder, CPU, torch.float32)
    assert "no scale" in capsys.readouterr().out and score.max_length == 256
    tokenizer, expected = AutoTokenizer.from_pretrained(folder), []
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    found = [row["chosen"], row["rejected"]]
    for answer in found:
        text = tokenizer.apply_chat_template([*row["prompt"], *answer], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        expected.append(model(ids).logits.item())
    as_text = [answer[0]["content"] for answer in found]
    for given in (found, as_text):
        assert score([row["prompt"]] * 2, given) == pytest.approx(expected, abs=1e-5)
    record = {"stage": "reward_train", "args": {"max_length": 90, "chat": True}, "scale": [2, 0.5]}
    files.write_json(Path(folder) / "args.json", record)
    scaled = reward_models.reward_function(folder, CPU, torch.float32)
    assert scaled.max_length == 90 and "no scale" not in capsys.readouterr().out
    prompt = row["prompt"][0]["content"]  # a text, which this one was trained to read as a turn
    expected = [(x - 2) / 0.5 for x in expected]
    assert scaled([prompt] * 2, as_text) == pytest.approx(expected, abs=1e-4)


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
    assert capsys.readouterr().out.count("reads 60 tokens; 3 of 4 rows are cut") == 1
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


def test_prompts_and_gold(trained, tmp_path, llama_folder):
    """val/gold is the mean of what the function says, of answers that are drawn with the run's seed."""
    rows = [{"prompt": r["prompt"], "note": f"n{i}"} for i, r in enumerate(pair_rows(6, seed=9))]
    prompts, gold = write_rows(tmp_path / "prompts.jsonl", rows), tmp_path / "gold.py"
    gold.write_text("""def score(prompts, answers, rows):
    assert [row["prompt"] for row in rows] == prompts and len({row["note"] for row in rows}) == 6
    return [sum(c in "aeiou" for c in a) / len(a) if a else None for a in answers]""")
    model = common.load_model(llama_folder, CPU, torch.float32)
    policy, tokenizer = common.Policy(model, torch.float32), common.load_tokenizer(llama_folder)
    ids = [common.encode_prompt(tokenizer, r["prompt"]) for r in answers.some_prompts(rows, 64)]

    def drawn(temperature, **more):
        found = answers.generate(policy, tokenizer, ids, 12, temperature, **more)
        return tokenizer.batch_decode(found, skip_special_tokens=True)

    sampled, greedy = drawn(1.0, seed=0), drawn(0)
    assert sampled != drawn(1.0, seed=1) and greedy == drawn(0, rows=4)
    texts = [answers.visible(text) for text in sampled]
    shares = [sum(c in "aeiou" for c in text) / len(text) for text in texts if text]
    half, mean = 1.96 * np.std(shares, ddof=1) / len(shares) ** 0.5, np.mean(shares)
    flags = ["--prompts", prompts, "--gold", f"{gold}:score"]
    flags += ["--steps 2 --max-new-tokens 12 --lr 1e-2 --warmup 0"]
    # with LoRA the reference is the policy with its adapter off
    for stage, more in ((dpo, ""), (dpo, "--lora-rank 4"), (sft, "")):
        log = trained(stage, pair_rows(), *flags, more)
        first, last = (row for row in log if "val/gold" in row)
        found = [first[f"val/gold{end}"] for end in ("", "_low", "_high")]
        assert found == pytest.approx([mean, mean - half, mean + half], abs=1e-4)
        assert first["val/n"] == 6 and 0 <= first["val/cut"] <= 1
        if stage is dpo:
            assert abs(first["val/kl"]) < 1e-4 and abs(last["val/kl"]) > 1e-3
        assert read(tmp_path / "out/samples.jsonl")[0]["answer"] == sampled[0]


@pytest.mark.parametrize("stage", [sft, dpo], ids=lambda stage: stage.__name__)
def test_val_is_of_prompts_that_are_not_trained_on(stage, trained, tmp_path, capsys):
    """Four of six prompts are those of the pairs, one of them as text. A prompt that is only shown
    is no evaluation. The next command reads prompts as this run did."""
    rows = pair_rows(8)
    given = [
        {"prompt": x}
        for x in (*(row["prompt"] for row in rows[:3]), rows[5]["prompt"][0]["content"])
    ]
    given += [{"prompt": [user(f"Another prompt, {i}?")]} for i in range(2)]
    prompts = write_rows(tmp_path / "prompts.jsonl", given)
    log = trained(stage, rows, "--chat --prompts", prompts)
    assert {row["val/n"] for row in log if "val/n" in row} == {2}
    said = capsys.readouterr().out
    assert "4 of 6 prompts are also trained on" in said and "--chat" in said.splitlines()[-1]
    log = trained(stage, rows, "--eval-fraction 0.5")
    assert read(tmp_path / "out/samples.jsonl")
    assert not any(key.startswith("val/") for row in log for key in row)
    assert "--chat" not in capsys.readouterr().out.splitlines()[-1]


@each_stage
def test_the_screen(stage, tmp_path, capfd):
    """A user's own data: the answer stands in the last lines, the next command names the folder of
    this run, quoted, and nothing that the user has not got."""
    data, out = write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "my run"
    asked = write_rows(tmp_path / "p.jsonl", [{"prompt": [user(f"Ask {i}.")]} for i in range(3)])
    flags = ["--max-new-tokens 40 --prompts", asked, "--gold", GOLD_FN]
    if stage is reward_train:
        flags = ["--eval-pairs", write_pairs(tmp_path / "h.jsonl", seed=3)]
    argv = command(stage, data, tiny_model("llama", tmp_path), "OUT", *flags, "--batch-size 4")
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


@pytest.mark.slow
@each_stage
def test_a_copy_trains_on_a_users_file(stage, tmp_path, llama_folder):
    """A stage with common.py and parts/, and nothing else of this project."""
    name = f"{stage.__name__}.py"
    shutil.copytree(REPO / "parts", tmp_path / "parts")
    for file in (name, "common.py"):
        shutil.copy(REPO / file, tmp_path / file)
    write_pairs(tmp_path / "mine.jsonl")
    argv = command(stage, "mine.jsonl", llama_folder, "run", "--steps 2 --device cpu")
    subprocess.run([sys.executable, "-I", "-c", COPY, name, *argv], cwd=tmp_path, check=True)
    assert len(steps(read(tmp_path / "run/metrics.jsonl"), "grad_norm")) == 2


# -I: the environment's PYTHONPATH may name this project
COPY = "import runpy, sys; sys.path.insert(0, ''); sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.fixture
def trunk(monkeypatch):
    """Calls `trunk.note(columns, with a gradient?)` for each forward of a trained model."""
    trunk, start = SimpleNamespace(note=None), runs.Run.start

    def noted(module, args, kwargs):
        trunk.note(kwargs["input_ids"].numel(), torch.is_grad_enabled())

    def hooked(run, modules, *arguments, **options):
        model = next(iter(modules.values())).model
        model.base_model.register_forward_pre_hook(noted, with_kwargs=True)
        return start(run, modules, *arguments, **options)

    monkeypatch.setattr(runs.Run, "start", hooked)
    return trunk


def test_each_prompt_is_computed_once(tmp_path, trunk, tokenizer, llama_folder):
    """Speed is work that is not done, held to a count, which no machine changes. Pair by pair, so
    without padding, Σ (prompt + chosen + rejected) columns have a gradient, and under the reference
    as many, once for all epochs."""
    data = write_pairs(tmp_path / "pairs.jsonl", 8)
    args = reward_train.parse_args(words("--pairs", data, "--eval-fraction 0 --out", tmp_path))
    rows = pairs.Pairs(args, tokenizer, common.load_config(llama_folder))
    lengths = [[*map(len, side)] for side in (rows.prompts, rows.chosen, rows.rejected)]
    assert rows.tokens().tolist() == [2 * (p + max(a, b)) for p, a, b in zip(*lengths)]
    once = sum(map(sum, lengths))

    def seen(stage, flags=""):
        found = {True: 0, False: 0}
        trunk.note = lambda columns, gradient: found.update({gradient: found[gradient] + columns})
        flags = f"--micro-tokens 1 --eval-every 1000 --overwrite {flags}"
        train(stage, data, llama_folder, tmp_path / "out", flags)
        return found

    one, without = (
        seen(dpo, "--nll-coef 0 --max-new-tokens 1"),
        seen(dpo, "--loss-type simpo --max-new-tokens 1"),
    )
    assert seen(reward_train)[True] == one[True] == without[True] == once
    assert one[False] - without[False] == once
    three = seen(dpo, "--nll-coef 0 --max-new-tokens 1 --steps 3")
    assert three == {True: 3 * once, False: one[False]}


def test_no_forward_between_the_rollout_and_the_first_gradient(tmp_path, trunk, llama_folder, monkeypatch):  # fmt: skip
    """In fp32 the sampler's log-probs are those of the policy: none is computed again."""
    events, real, real_steps = [], sampling.sample, runs.Run.steps

    def sample(*arguments, **options):
        before = [*events]
        rollout = real(*arguments, **options)
        events[:] = [*before, "rollout"]
        return rollout

    def stepped(run, *arguments):  # the preflight compares the two on purpose
        events.clear()
        return real_steps(run, *arguments)

    monkeypatch.setattr(sampling, "sample", sample)
    monkeypatch.setattr(runs.Run, "steps", stepped)
    trunk.note = lambda _, gradient: events.append("gradient" if gradient else "plain")
    rubric = {"check": "regex:match", "pattern": "[aeiouAEIOU]"}
    rows = [{"prompt": f"Ask {i}.", "rubrics": [rubric]} for i in range(8)]
    data = tmp_path / "rubrics.json"
    files.write_json(data, {"train": rows, "validation": [], "test": []})
    flags = "--steps 3 --max-new-tokens 7 --group-size 4 --groups-per-batch 4 --micro-tokens 100000"
    argv = words(flags, "--model", llama_folder, "--data", data, "--out", tmp_path / "out")
    assert grpo_rubric.main(argv) == 0
    assert events == ["rollout", "gradient"] * 3
