"""The promises that sft, reward_train and dpo make alike, kept by their own `main`."""

import math
import re
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import common
import dpo
import reward_train
import sft
from case_rows import each
from parts import answers, contest, files, pairs, reward_models, runs
from tiny import (
    cases,
    error_of,
    log_of,
    pair_rows,
    policy_of,
    read_json,
    said,
    tiny_model,
    tiny_reward_model,
    tiny_tokenizer,
    user,
    words,
    write_pairs,
    write_rows,
)

STAGES = [sft, reward_train, dpo]
each_stage = pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
LOG2 = math.log(2)
CURE = "--schedule constant --warmup 0 --eval-every 1000"
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("quiet_process")


def command(stage, data, model, out, *flags):
    argv = ["--data" if stage is sft else "--pairs", data, "--model", model]
    argv += ["--batch-size 8 --steps 1 --out", out]
    argv += [] if "--eval-pairs" in words(*flags) else ["--eval-fraction 0"]
    argv += [] if stage is reward_train else ["--max-new-tokens 4"]
    return words(*argv, *flags)


def train(stage, data, model, out, *flags):
    assert stage.main(command(stage, data, model, out, *flags)) == 0
    return log_of(out)


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
        limit = f"--eval-fraction 0 --max-length {max_length} --data"
        boundless = SimpleNamespace(get_text_config=dict)  # a config that names no limit
        return sft.Rows(sft.parse_args(words(limit, data, *flags)), tokenizer, boundless)

    return encoded


# ---- before step one ----


def test_sft_loss_before_step_one_is_cross_entropy(trained, llama_folder, capsys):
    """As transformers computes it, of a row built by hand from the template's text."""
    log = trained(sft, [{"prompt": [user("Which fits?")], "completion": [said("First.")]}])
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    ids = tokenizer("<|user|>Which fits?<|end|><|assistant|>First.<|end|>", return_tensors="pt")
    labels = ids["input_ids"].clone()
    n = len(tokenizer.encode("First.<|end|>"))
    labels[:, :-n] = -100
    expected = AutoModelForCausalLM.from_pretrained(llama_folder)(**ids, labels=labels).loss.item()
    found = [steps(log, key)[0] for key in ("loss", "trained_tokens", "tokens")]
    assert found == pytest.approx([expected, n, labels.numel()], abs=1e-5)
    assert capsys.readouterr().out.count("▮<|end|>") == 1, "the strip of tokens"


def test_reward_preflight_is_log_2(trained, reward_folder, capsys):
    """A fresh head is zero: log 2 = 0.6931. What is a reward model already keeps its head."""
    (loss,) = steps(trained(reward_train, pair_rows()), "loss")
    assert "loss before step one 0.6931: ok" in capsys.readouterr().out
    assert loss == pytest.approx(LOG2, abs=1e-6)
    (loss,) = steps(trained(reward_train, pair_rows(), model=reward_folder), "loss")
    assert abs(loss - LOG2) > 1e-3


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
simpo | 2.0 |  |  | 0
""")
def test_dpo_starts_at_its_reference_and_learns(trained, tmp_path, capsys, loss_type, beta, more, expected, nll_coef):  # fmt: skip
    """Policy = reference, so z = 0: log 2, 1 (hinge), 1/(4β²) (IPO); β = 100 scales rounding. The
    likelihood of the chosen answer joins it, by default for sigmoid alone."""
    flags = f"--steps 5 --lr 3e-4 --loss-type {loss_type} --beta {beta} {more} --eval-pairs"
    log = trained(dpo, pair_rows(seed=1), CURE, flags, write_pairs(tmp_path / "pairs.jsonl"))
    for margins, loss in (("rewards/margins", "pair_loss"), ("eval/rewards/margins", "eval/loss")):
        first, *_, last = (row for row in log if margins in row)
        assert last[margins] > first[margins] + 1e-3 * beta and last[loss] < first[loss]
    if loss_type == "simpo":  # has no reference
        return
    rounding = dict(rel=1e-5 * max(1, beta), abs=5e-5)
    printed = re.search(r"loss before step one (\S+): ok", capsys.readouterr().out)[1]
    assert float(printed) == pytest.approx(expected, **rounding)
    whole = expected + nll_coef * steps(log, "nll")[0]
    assert steps(log, "loss")[0] == pytest.approx(whole, rel=rounding["rel"])
    assert last["eval/rewards/accuracies"] > 0.5
    if beta < 100:  # equal scores count one half
        assert steps(log, "rewards/accuracies")[0] == first["eval/rewards/accuracies"] == 0.5


def test_another_reference_stops_a_run(trained, monkeypatch):
    """By .01 of a log-prob; a bound of .1 would miss it."""
    real, shift = dpo.reference_logps, torch.tensor([[0.01], [0.0]])
    monkeypatch.setattr(dpo, "reference_logps", lambda *given: real(*given) + shift)
    assert "h before step one" in error_of(trained, dpo, pair_rows())


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
    raw = reward_models.RewardFunction(out, CPU, torch.float32, raw=True)
    first = [rows[i] for i in (0, 12, 24, 36)]
    prompts, *sides = ([row[side] for row in first] for side in ("prompt", "chosen", "rejected"))
    scores = np.array(raw(prompts * 2, sum(sides, [])))
    scale = [scores.mean(), scores.std(ddof=1)]
    assert read_json(out / "args.json")["scale"] == pytest.approx(scale, abs=1e-4)


@each_stage
def test_a_bare_tokenizer(stage, trained, tmp_path):
    """GPT-2's as it comes, without pad and template. (What is trained of a row: test_dialogue.py.)"""
    folder = tiny_model("gpt2", tmp_path, tiny_tokenizer(pad=None, template=None))
    assert steps(trained(stage, pair_rows(8), "--steps 2", model=folder), "grad_norm")[0] > 0
    saved = AutoTokenizer.from_pretrained(tmp_path / "out")
    config = read_json(tmp_path / "out/config.json")
    assert common.end_ids(saved) == [saved.eos_token_id] and saved.chat_template
    if stage is reward_train:
        assert config["pad_token_id"] != saved.eos_token_id, "transformers would read another place"


# ---- rows ----


def test_ties(trained):
    """(DPO drops them: test_common_text.py.)"""
    log = trained(reward_train, [{**row, "tie": True} for row in pair_rows(8)])
    assert steps(log, "loss")[0] == pytest.approx(LOG2, abs=1e-6)
    assert steps(log, "grad_norm")[0] < 1e-5 and steps(log, "n_ties") == [8]


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


def test_a_group_of_text_rows_is_checked():
    """A list of numbers ended in a traceback."""
    with pytest.raises(ValueError, match="group"):
        sft.check_row({"text": "a b c", "group": [1, 2]})


@each("sft_rows")
def test_what_sft_trains_of_a_row(rows, flags, max_length, settings, texts, trained, encoded):
    """The text that is read, and of it what is trained."""
    tokenizer = tiny_tokenizer(**settings)
    found = encoded(rows, flags, tokenizer=tokenizer, max_length=max_length)
    assert [tokenizer.decode(ids) for ids in found.ids] == texts
    masked = zip(found.ids, found.masks)
    assert [tokenizer.decode(np.array(ids)[np.array(mask)]) for ids, mask in masked] == trained


@each("conversations")
def test_a_conversation_is_on_one_side(rows, same, encoded):
    """A chat log, where each turn was logged with its history, which is one conversation by its first
    question. Else the held-out loss measures memory. `same` is the first row of each one."""
    found = encoded(rows, "--eval-fraction 0.5")
    keys = sft.conversations(found.keys)
    assert [keys.index(key) for key in keys] == same
    held, trained = ({keys[i] for i in part} for part in (found.held, found.train))
    assert held and trained and not held & trained


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


def test_reward_function(tmp_path, tokenizer, capsys):
    """Scores are those that transformers gives, at the last token. One of another tool has no
    scale, which is said; of a run it is read from args.json, with --max-length and --chat."""
    folder, row = tiny_reward_model("llama", tmp_path), pair_rows(1)[0]
    score = reward_models.RewardFunction(folder, CPU, torch.float32)
    assert "no scale" in capsys.readouterr().out and score.max_length == 256
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    found, expected = [row["chosen"], row["rejected"]], []
    for answer in found:
        text = tokenizer.apply_chat_template([*row["prompt"], *answer], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        expected.append(model(**ids).logits.item())
    as_text = [answer[0]["content"] for answer in found]
    for given in (found, as_text):
        assert score([row["prompt"]] * 2, given) == pytest.approx(expected, abs=1e-5)
    record = {"stage": "reward_train", "args": {"max_length": 90, "chat": True}, "scale": [2, 0.5]}
    files.write_json(Path(folder) / "args.json", record)
    scaled = reward_models.RewardFunction(folder, CPU, torch.float32)
    assert scaled.max_length == 90 and "no scale" not in capsys.readouterr().out
    prompt = row["prompt"][0]["content"]  # a text, which this one was trained to read as a turn
    expected = [(x - 2) / 0.5 for x in expected]
    assert scaled([prompt] * 2, as_text) == pytest.approx(expected, abs=1e-4)


def test_what_a_reward_model_does_not_read_gets_no_score(reward_folder, capsys):
    """Two answers that differ after the cut alone would score alike, so a policy could write
    anything there. A long prompt loses its beginning, and the answer is read as a whole."""
    score = reward_models.RewardFunction(reward_folder, CPU, torch.float32)
    prompts = ["a b c.", "Ask. " * 60, "a b c.", "Ask. " * 60]
    given = ["Yes.", "Yes.", "No. " * 40, "No. " * 40]
    assert None not in score(prompts[:3], given[:3])
    score.max_length = 60
    assert [x is None for x in score(prompts, given)] == [False, False, True, True]
    assert score(prompts[2:], given[2:]) == [None] * 2
    assert capsys.readouterr().out.count("reads 60 tokens; 3 of 4 rows are cut") == 1
    score.check_room(longest=60, max_new_tokens=59)  # such rows are read as a whole
    score.check_room(longest=100, max_new_tokens=29)
    with pytest.raises(files.UserError, match="--reward-model.*--max-new-tokens 30"):
        score.check_room(longest=100, max_new_tokens=30)


def test_tools_reach_the_policy_and_the_judge(reward_folder, llama_folder, tmp_path):
    """A prompt is answered, scored and compared as it was trained: with the tools of its row."""
    tools = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
    rows, folder = [{"prompt": [user("Ask.")], "tools": tools}], str(tmp_path / "model")
    shutil.copytree(llama_folder, folder)
    tokenizer = common.load_tokenizer(folder)
    tokenizer.chat_template = "{% if tools %}search {% endif %}" + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    expected = common.encode_prompt(tokenizer, rows[0]["prompt"], tools=tools)
    assert tokenizer.decode(expected).startswith("search")
    score = reward_models.RewardFunction(reward_folder, CPU, torch.float32)
    score.tokenizer = tokenizer
    assert score.encode([rows[0]["prompt"]], ["Yes."], rows)[0][0] == expected
    assert contest.encode_alike([folder], rows, 9)[0] == [expected]
    run = SimpleNamespace(args=dpo.parse_args([]))
    config = common.load_config(folder)
    assert answers.Answers(run, tokenizer, config, rows, ()).ids == [expected]


# ---- what a run writes and says ----


def test_prompts_and_gold(trained, tmp_path, llama_folder, tokenizer):
    """val/gold is the mean of what the function says, of answers that are drawn with the run's seed."""
    rows = [{"prompt": r["prompt"], "note": f"n{i}"} for i, r in enumerate(pair_rows(6, seed=9))]
    prompts, gold = write_rows(tmp_path / "prompts.jsonl", rows), tmp_path / "gold.py"
    gold.write_text("""def score(prompts, answers, rows):
    assert [row["prompt"] for row in rows] == prompts and len({row["note"] for row in rows}) == 6
    return [sum(c in "aeiou" for c in a) / len(a) if a else None for a in answers]""")
    ids = [common.encode_prompt(tokenizer, r["prompt"]) for r in answers.some_prompts(rows, 64)]
    drawn = answers.generate(policy_of(llama_folder), tokenizer, ids, 12, 1.0, seed=0)
    sampled = tokenizer.batch_decode(drawn, skip_special_tokens=True)
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
        assert log_of(tmp_path / "out", "samples")[0]["answer"] == sampled[0]


@pytest.mark.parametrize("stage", [sft, dpo], ids=lambda stage: stage.__name__)
def test_val_is_of_prompts_that_are_not_trained_on(stage, trained, tmp_path, capsys):
    """Four of six prompts are those of the pairs, one of them as text. A prompt that is only shown
    is no evaluation."""
    rows = pair_rows(8)
    texts = [*(row["prompt"] for row in rows[:3]), rows[5]["prompt"][0]["content"]]
    given = [{"prompt": x} for x in (*texts, [user("Another, 0?")], [user("Another, 1?")])]
    prompts = write_rows(tmp_path / "prompts.jsonl", given)
    log = trained(stage, rows, "--chat --prompts", prompts)
    assert {row["val/n"] for row in log if "val/n" in row} == {2}
    assert "4 of 6 prompts are also trained on" in capsys.readouterr().out
    log = trained(stage, rows, "--eval-fraction 0.5")
    assert log_of(tmp_path / "out", "samples")
    assert not any(key.startswith("val/") for row in log for key in row)


def test_each_prompt_is_computed_once(tmp_path, monkeypatch, tokenizer, llama_folder):
    """Speed is work that is not done, held to a count, which no machine changes. Pair by pair, so
    without padding, Σ (prompt + chosen + rejected) columns have a gradient, and under the reference
    as many, once for all epochs."""
    data = write_pairs(tmp_path / "pairs.jsonl", 8)
    args = reward_train.parse_args(words("--pairs", data, "--eval-fraction 0 --out", tmp_path))
    rows = pairs.Pairs(args, tokenizer, common.load_config(llama_folder))
    lengths = [[*map(len, side)] for side in zip(*rows.encoded)]
    assert rows.tokens.tolist() == [2 * (p + max(a, b)) for p, a, b in zip(*lengths)]
    once, columns, start = sum(map(sum, lengths)), Counter(), runs.Run.start
    rows.shared = True
    assert rows.tokens.sum() == once

    def noted(module, args, kwargs):
        columns[torch.is_grad_enabled()] += kwargs["input_ids"].numel()

    def hooked(run, modules, *given, **more):
        model = next(iter(modules.values())).model
        model.base_model.register_forward_pre_hook(noted, with_kwargs=True)
        return start(run, modules, *given, **more)

    monkeypatch.setattr(runs.Run, "start", hooked)

    def seen(stage, flags=""):
        columns.clear()
        flags = f"--micro-tokens 1 --eval-every 1000 --overwrite {flags}"
        train(stage, data, llama_folder, tmp_path / "out", flags)
        return [columns[True], columns[False]]

    one = seen(dpo, "--nll-coef 0 --max-new-tokens 1")
    assert seen(reward_train)[0] == one[0] == once and one[1] >= once
    assert seen(dpo, "--nll-coef 0 --max-new-tokens 1 --steps 3") == [3 * once, one[1]]
