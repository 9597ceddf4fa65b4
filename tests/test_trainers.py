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

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import common
import dpo
import ppo
import reward_train
import sft
from conftest import REPO
from parts import kto, pairs, prompting, rollouts, sampling
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


def test_sft_loss_before_step_one_is_cross_entropy(tmp_path, llama_folder, capsys):
    """E1, as a textbook loop computes it, of a row built by hand from the template's text."""
    turns = [{"role": "user", "content": "Which fits?"}, {"role": "assistant", "content": "First."}]
    data = write_rows(tmp_path / "one.jsonl", [{"prompt": turns[:1], "completion": turns[1:]}])
    log = train(sft, data, llama_folder, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    texts = "<|user|>Which fits?<|end|><|assistant|>", "First.<|end|>"
    context, answer = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    ids, n = torch.tensor([context + answer]), len(answer)
    logits = AutoModelForCausalLM.from_pretrained(llama_folder)(ids).logits
    expected = F.cross_entropy(logits[0, -n - 1 : -1], ids[0, -n:]).item()
    printed = capsys.readouterr().out
    assert steps(log, "loss")[0] == pytest.approx(expected, abs=1e-5)
    assert "our log-probs and the model's: 0.0000, expected 0.0000 (± 1e-04)" in printed
    assert f"{n} of {ids.numel()} tokens trained" in printed and printed.count("◆<|end|>") == 1


def test_reward_preflight_is_log_2(tmp_path, llama_folder, reward_folder, pairs_file, capsys):
    """A fresh head is zero: log 2 = 0.6931. What is a reward model already must not claim it."""
    rows = train(reward_train, pairs_file, llama_folder, tmp_path / "fresh")
    printed = capsys.readouterr().out
    assert "with a zero head: 0.6931, expected 0.6931" in printed
    assert printed.count("◆<|end|>") == 1 and "▮" not in printed, "one token carries the reward"
    assert steps(rows, "loss")[0] == pytest.approx(LOG2, abs=1e-6)
    rows = train(reward_train, pairs_file, reward_folder, tmp_path / "again")
    printed = capsys.readouterr().out
    assert "is a reward model already: loss" in printed and "zero head" not in printed
    assert abs(steps(rows, "loss")[0] - LOG2) > 1e-3


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
def test_dpo_preflight(
    tmp_path, llama_folder, pairs_file, capsys, loss_type, beta, more, expected, nll_coef
):
    """Policy = reference, so z = 0: log 2, 1 (hinge), 1/(4β²) (IPO); β = 100 scales rounding. The
    likelihood of the chosen answer joins behind it, by default for sigmoid alone."""
    flags = f"--loss-type {loss_type} --beta {beta} {more}"
    rows = train(dpo, pairs_file, llama_folder, tmp_path / "out", flags)
    printed = capsys.readouterr().out
    assert f"loss before step one: {expected:.4f}, expected {expected:.4f}" in printed
    assert "implicit rewards: 0.0000, expected 0.0000" in printed
    whole = expected + nll_coef * steps(rows, "nll")[0]
    assert steps(rows, "loss")[0] == pytest.approx(whole, rel=1e-5 * max(1, beta))
    assert steps(rows, "rewards/accuracies") == [0.5]  # equal scores count one half


def test_sft_learns_its_answers(tmp_path, llama_folder):
    """E5. Every answer is "… hold."; an off-by-one target learns the prompt's bigrams instead."""
    data = write_pairs(tmp_path / "pairs.jsonl", 48)
    flags = CURE, "--steps 40 --lr 5e-3 --eval-fraction 0.2"
    rows = train(sft, data, llama_folder, tmp_path / "out", *flags)
    before, after = (row for row in rows if "eval/loss" in row)
    assert before["eval/loss"] > 4 and after["eval/loss"] < 1.5
    assert after["eval/token_accuracy"] > 0.7
    assert after["eval/perplexity"] == pytest.approx(math.exp(after["eval/loss"]))
    assert before["eval/n"] == after["eval/n"] > 0  # three rows decided, and no n was printed


def test_reward_model_learns_a_separable_set(tmp_path, llama_folder):
    data, held = (write_pairs(tmp_path / f"{n}.jsonl", n, seed=n) for n in (48, 24))
    flags = CURE, "--steps 40 --lr 2e-3 --eval-pairs", held
    rows = train(reward_train, data, llama_folder, tmp_path / "out", *flags)
    before, after = (row for row in rows if "eval/accuracy" in row)
    assert before["eval/accuracy"] == 0.5  # a zero head: every pair is equal
    assert (after["eval/accuracy"], after["eval/n"]) == (1.0, 24) and after["eval/nll"] < 0.1
    assert after["eval/accuracy_low"] == pytest.approx(24 / (24 + 1.959964**2))  # Wilson at k = n
    config = read_json(tmp_path / "out" / "config.json")
    assert config["reward_std"] > 0.5 and math.isfinite(config["reward_mean"])


@pytest.mark.parametrize("loss_type", dpo.LOSS_TYPES)
def test_every_loss_type_learns(loss_type, tmp_path, llama_folder, pairs_file):
    flags = CURE, f"--steps 8 --lr 3e-4 --loss-type {loss_type} --eval-pairs", pairs_file
    rows = train(dpo, pairs_file, llama_folder, tmp_path / "out", *flags)
    for part in ("", "eval/"):
        log = [row for row in rows if f"{part}loss" in row]
        margins, losses = ([row[part + key] for row in log] for key in ("rewards/margins", "loss"))
        assert margins[-1] > margins[0] + 1e-3 and losses[-1] < losses[0]
    assert loss_type == "simpo" or log[0]["eval/rewards/accuracies"] == 0.5


def test_kto_learns_from_thumbs(tmp_path, llama_folder, monkeypatch, capsys):
    """The baseline is the mean log-ratio of answers to other prompts, by hand, never below 0."""
    sides, rows = 8 * ["chosen", "rejected"], pair_rows(16)
    for row, side in zip(rows, sides):
        row |= {"completion": row[side], "label": side == "chosen"}
        del row["chosen"], row["rejected"]
    file, start = tmp_path / "thumbs.jsonl", common.load_policy(llama_folder, trainable=False)
    real, seen = dpo.kl_baseline, []

    @torch.no_grad()
    def spy(args, run, policy, pairs, refs, indices, pad):
        found = real(args, run, policy, pairs, refs, indices, pad)
        if len(indices):  # nothing is held out
            said = [getattr(pairs, sides[(i + 8) % 16])[(i + 8) % 16] for i in indices]
            both = common.pad_rows([pairs.prompts[i] for i in indices], said, pad)
            now, then = (common.token_logps(m, *both).sum(1) for m in (policy, start))
            seen.append(found)
            assert found == pytest.approx(max(0.0, (now - then).mean().item()), abs=2e-3)
        return found

    monkeypatch.setattr(dpo, "kl_baseline", spy)
    flags = CURE, "--steps 8 --lr 1e-3 --loss-type kto"
    log = train(dpo, write_rows(file, rows), llama_folder, tmp_path / "out", *flags)
    losses = steps(log, "loss")
    assert losses[0] == pytest.approx(0.5, abs=1e-4) and losses[-1] < losses[0]
    assert steps(log, "rewards/margins")[-1] > 1e-3 and seen[0] < 1e-4 < max(seen)
    last = [row for row in log if "rewards/chosen" in row][-1]  # 8 of 16 rows have a chosen side
    margin = last["rewards/chosen"] - last["rewards/rejected"]
    assert last["rewards/margins"] == pytest.approx(margin)
    text = [{"prompt": "Role: x.\n", "completion": f"{i}.", "label": i % 2 == 1} for i in range(16)]
    texts = write_rows(tmp_path / "text.jsonl", text)
    capsys.readouterr()
    train(dpo, texts, llama_folder, tmp_path / "text", "--steps 1 --loss-type kto")
    assert "▮0▮.◆<|end|>" in capsys.readouterr().out, "the strip of an answer with a thumb down"
    write_rows(file, [*rows, rows[0] | {"label": 1}])
    refused = error_of(train, dpo, str(file), llama_folder, tmp_path / "no", *flags)
    assert ':17: "label" is 1; expected true or false' in refused


def test_kto_baseline_keeps_to_micro_tokens(tmp_path, llama_folder, monkeypatch):
    """It reads each answer after the prompt of another row. Measured by that other row, a long answer
    made a forward of 7 × 256 tokens, where 250 were asked for."""
    answers = ["hold " * 60, *15 * ["hold"]]
    rows = [{"prompt": "Ask.", "completion": answer, "label": True} for answer in answers]
    real, sizes = kto.pad_rows, []
    monkeypatch.setattr(kto, "pad_rows", lambda *rows: sizes.append(real(*rows)) or sizes[-1])
    flags = "--loss-type kto --batch-size 16 --micro-tokens 250"
    train(dpo, write_rows(tmp_path / "thumbs.jsonl", rows), llama_folder, tmp_path / "out", flags)
    lengths = [attention_mask.sum(1) for _, attention_mask, _ in sizes]
    assert sum(map(len, lengths)) == 2 * 16, "the reference, and the policy at step one"
    assert max(n.max() for n in lengths) > 250
    assert all(len(n) == 1 or n.max() * len(n) <= 250 for n in lengths)


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


@pytest.mark.parametrize("kind, options, as_messages", TOKENIZERS)
@every_stage
def test_tokenizers(stage, kind, options, as_messages, tmp_path, monkeypatch):
    """Without pad, pad = EOS (many trainers then mask the end token away), without a template, a
    BOS in template and post-processor, two end tokens: each row that enters a forward holds one BOS
    or none, and one end id, last and trained. (PPO's answers are drawn.)"""
    model = tiny_model("gpt2", tmp_path, tokenizer=tiny_tokenizer(**options))
    tokenizer = common.load_tokenizer(model)
    names = ["<|end|>", "<|im_end|>"][: 2 if kind == "two end ids" else 1]
    ends = tokenizer.convert_tokens_to_ids(names)
    path = Path(model) / "generation_config.json"  # as Qwen: it knows more ends than the template
    path.write_text(json.dumps({**read_json(path), "eos_token_id": ends}))
    data = write_pairs(tmp_path / "pairs.jsonl", 8, as_messages=as_messages)
    # where the stage finds `pad_rows`: pairs come by parts/pairs.py, PPO's by rollouts
    home, batches = {sft: sft, ppo: rollouts}.get(stage, pairs), []
    real, out = home.pad_rows, tmp_path / "out"
    monkeypatch.setattr(home, "pad_rows", lambda *args: batches.append(args[:2]) or real(*args))
    assert steps(train(stage, data, model, out, "--steps 3 --lr 1e-2"), "grad_norm")[0] > 0
    kind = AutoModelForSequenceClassification if stage is reward_train else AutoModelForCausalLM
    loaded, info = kind.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], "newly initialized"
    saved, size = AutoTokenizer.from_pretrained(out), AutoConfig.from_pretrained(model).vocab_size
    assert loaded.get_input_embeddings().num_embeddings == size
    assert set(common.end_ids(saved, loaded)) == set(ends)
    rows = [row for batch in batches for row in zip(*batch)]
    rows = [r for r in rows if not (len(r[0]) and isinstance(r[0][0], (bool, np.bool_)))]
    assert len(rows) >= 8
    for row in rows:  # sft marks context as ~id, and its second call held masks
        prompt, response = ([~i if i < 0 else i for i in part] for part in row)
        ids = prompt if stage is ppo else [*prompt, *response]  # PPO may draw a BOS
        if saved.bos_token_id is not None:
            assert ids.count(saved.bos_token_id) == 1 and ids[0] == saved.bos_token_id
        if stage is ppo:
            raw = not as_messages and options.get("template", True) is None
            assert not set(ends) & {*response[:-1], *(prompt if raw else [])}
        else:
            assert ids[-1] == ends[-1], "the answer's end is trained, whatever pads"
            turns = as_messages or options.get("template", True)  # each turn has its end
            assert turns or sum(i in ends for i in ids) == 1
    if as_messages:
        prompt = pair_rows(1)[0]["prompt"]
        assert common.encode_prompt(saved, prompt) == common.encode_prompt(tokenizer, prompt)
        assert saved.chat_template
    if stage is reward_train:
        assert loaded.config.pad_token_id not in ends, "transformers would read the wrong position"
    else:
        assert set(np.atleast_1d(loaded.generation_config.eos_token_id)) == set(ends)


def test_ties(tmp_path, llama_folder, capsys):
    ties = [{**row, "tie": True} for row in pair_rows(8)]
    only = write_rows(tmp_path / "ties.jsonl", ties)
    long = dict(ties[0], tie=None)
    for key, end in (("chosen", " yes"), ("rejected", " no")):
        long[key] = [{"role": "assistant", "content": "hold " * 60 + end}]
    rows = [*ties[:3], *pair_rows(8, seed=1), {**long, "rejected": long["chosen"]}, long]
    mixed = write_rows(tmp_path / "mixed.jsonl", rows)
    counted = "rows 13, dropped: tie 3, dropped: chosen = rejected 1, responses cut 2, "
    counted += "dropped: equal after cutting 1; training 8, held out 0"
    log = train(reward_train, only, llama_folder, tmp_path / "out")
    assert steps(log, "loss")[0] == pytest.approx(LOG2, abs=1e-6)
    assert steps(log, "grad_norm")[0] < 1e-5
    for stage, drop in ((reward_train, "--ties drop"), (dpo, "")):
        capsys.readouterr()
        flags = "--overwrite --max-length 120", drop
        train(stage, mixed, llama_folder, tmp_path / "out", *flags)
        assert counted in capsys.readouterr().out


def test_sft_reads_its_four_forms(tmp_path, llama_folder, capsys):
    """prompt + completion, messages and a preference train the same tokens, text all but its first.
    "abcd" is 4 tokens and the end, also if it brings it or the template alone names it."""
    texts = [{"text": "abcd"}, {"text": "abcd<|end|>"}]
    endless = tiny_model("llama", tmp_path, tokenizer=tiny_tokenizer(eos=None))
    data = write_rows(tmp_path / "text.jsonl", texts)
    for i, model in enumerate((llama_folder, endless)):
        assert steps(train(sft, data, model, tmp_path / f"text{i}"), "trained_tokens") == [8]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 20}]
    rows = [*texts, {"text": "x y " * 20}, {"messages": turns}, {"messages": turns * 2}]
    data = write_rows(tmp_path / "long.jsonl", rows)
    train(sft, data, llama_folder, tmp_path / "cut", "--max-length 12")
    assert "rows 5, rows cut 3; training 5" in capsys.readouterr().out
    row, seen = pair_rows(1)[0], []
    text, turns = row["chosen"][0]["content"], [*row["prompt"], *row["chosen"]]
    completion = {"prompt": row["prompt"], "completion": row["chosen"]}
    for form in (completion, {"messages": turns}, row, {"text": text}):
        data = write_rows(tmp_path / "rows.jsonl", [form])
        rows = train(sft, data, llama_folder, tmp_path / "out", "--overwrite")
        seen.append([steps(rows, key) for key in ("trained_tokens", "tokens", "loss")])
    assert seen[0] == seen[1] == seen[2]
    n = len(AutoTokenizer.from_pretrained(llama_folder).encode(text))
    assert seen[3][:2] == [[n], [n + 1]]  # n tokens and the end; nothing predicts the first


@cases("""
flags | dtype
--lora-rank 2 | float32
 | float32
--lora-rank 2 --save-dtype fp16 | float16
--save-dtype bf16 | bfloat16
""")
def test_precision_of_the_written_weights(flags, dtype, tmp_path, pairs_file):
    base, out = tiny_model("llama", tmp_path, dtype=torch.bfloat16), tmp_path / "out"
    train(sft, pairs_file, base, out, flags)
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


def test_prompts_and_gold(tmp_path, llama_folder, pairs_file):
    rows = [{"prompt": r["prompt"], "note": f"n{i}"} for i, r in enumerate(pair_rows(6))]
    prompts, gold = write_rows(tmp_path / "prompts.jsonl", rows), tmp_path / "gold.py"
    gold.write_text(GOLD)
    flags = ["--prompts", prompts, "--gold", f"{gold}:score", "--overwrite --eval-temperature 1"]
    flags += ["--max-new-tokens 12 --lr 1e-2 --warmup 0 --steps 2"]
    model, tokenizer = common.load_policy(llama_folder), common.load_tokenizer(llama_folder)
    asked = [r["prompt"] for r in prompting.some_prompts(rows, 64)]
    drawn = prompting.generate(model, tokenizer, asked, 12, 1.0, seed=0)
    again = prompting.generate(model, tokenizer, asked, 12, 1.0, seed=1)
    answers, greedy = drawn.texts, sampling.sample(model, tokenizer, asked, 1, 12, 0).texts
    assert drawn.texts != again.texts and drawn.prompt_ids == again.prompt_ids
    assert prompting.generate(model, tokenizer, asked, 12, 0, rows=4).texts == greedy
    shares = [sum(c in "aeiou" for c in a) / len(a) for a in answers if a]
    expected = {"val/gold": np.mean(shares), "val/kl": 0}
    # with LoRA the reference is the policy with its adapter off
    for stage, more in ((dpo, ""), (dpo, "--lora-rank 4"), (sft, "")):
        log = train(stage, pairs_file, llama_folder, tmp_path / "out", *flags, more)
        first, last = (row for row in log if "val/gold" in row)
        keys = expected if stage is dpo else ["val/gold"]
        assert near(first, {key: expected[key] for key in keys}, rel=1e-5, abs=1e-4)
        assert last.get("val/kl", 1) > 1e-3
        error = np.std(shares, ddof=1) / len(shares) ** 0.5
        half = student_t_quantile(0.05, len(shares) - 1) * error
        ends = [np.mean(shares) - half, np.mean(shares) + half]
        assert [first["val/gold_low"], first["val/gold_high"]] == pytest.approx(ends, abs=1e-4)
        assert first["val/n"] == 6
        shown = read(tmp_path / "out" / "samples.jsonl")[0]
        assert shown["answer"] == greedy[0], "the first choice"


def test_a_prompt_that_is_only_shown_is_no_evaluation(tmp_path, llama_folder, pairs_file):
    """val/n said 1 where no --prompts were answered."""
    for stage in (dpo, sft):
        flags = "--steps 1 --max-new-tokens 4 --eval-fraction 0.5", "--overwrite"
        log = train(stage, pairs_file, llama_folder, tmp_path / "out", *flags)
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
    rows = pair_rows(32)
    for row in rows:
        row["prompt"][0]["content"] *= 5
        row["chosen"][0]["content"] *= 2
    data = write_rows(tmp_path / "pairs.jsonl", rows)
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": r["prompt"]} for r in rows[:3]])
    model, out = tiny_model("llama", tmp_path, max_position_embeddings=1024), tmp_path / "out"
    flags = ["--max-new-tokens 60 --prompts", prompts, "--gold", REWARD_FN]
    flags = ["--eval-pairs", data] if stage is reward_train else flags
    argv = command(stage, data, model, out, *flags, "--lr 3e-4")
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
