"""The promises that sft, reward_train, dpo and ppo make alike, kept by their own `main`.

In the order of the house's list: E1 the numbers before step one, E5 learning, E6 families and
tokenizers (E2 micro-batches and E3 padding are in test_mutations.py and test_common_model.py, E4
resume in test_resume.py, E7 PEFT in test_common_model.py; PPO draws its own rows, so its E1 and E5
are in test_ppo.py). Then what a single stage owes: the reference, the loss types, LoRA, scores of
sample answers, what the screen and --help say, a copy of the script in an empty folder.
"""

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
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import common
import dpo
import ppo
import reward_train
import sft
from parts import files, rollouts, runs
from tiny import (
    BOS_TEMPLATE,
    CHATML,
    EXTRA_FAMILIES,
    FAMILIES,
    pair_rows,
    tiny_model,
    tiny_tokenizer,
    write_pairs,
    write_rows,
)

REPO = Path(__file__).resolve().parent.parent
PAIR_STAGES = [sft, reward_train, dpo]  # each row of the file is trained as it stands
STAGES = [*PAIR_STAGES, ppo]
each_stage = pytest.mark.parametrize("stage", PAIR_STAGES, ids=lambda s: s.__name__)
every_stage = pytest.mark.parametrize("stage", STAGES, ids=lambda s: s.__name__)
REWARD_FN = f"{Path(__file__).with_name('tiny.py')}:share_of_vowels"
LOG2 = math.log(2)
pytestmark = pytest.mark.usefixtures("quiet_process")


def command(stage, data, model, out, *flags):
    """The flags that every run here shares; later flags win."""
    flag = {sft: "--data", ppo: "--prompts"}.get(stage, "--pairs")
    argv = [flag, data, "--model", model, "--out", str(out)]
    argv += ["--batch-size", "8", "--steps", "1", "--eval-fraction", "0"]
    argv += [] if stage is reward_train else ["--max-new-tokens", "4"]
    argv += ["--reward-fn", REWARD_FN, "--rollouts", "8"] if stage is ppo else []
    return [*argv, *map(str, flags)]


def train(stage, data, model, out, *flags):
    """Run the stage to its end; returns the rows of metrics.jsonl."""
    assert stage.main(command(stage, data, model, out, *flags)) in (None, 0)
    return read(Path(out) / "metrics.jsonl")


def read(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def steps(rows, key):
    """The values of a key that belongs to the training rows."""
    return [row[key] for row in rows if "lr" in row]


# ---- E1: the numbers before step one ----


def test_sft_preflight_loss_is_cross_entropy(tmp_path, llama_folder, capsys):
    """The printed loss must be what any textbook loop gets: cross_entropy of the answer and its end
    token, and of nothing else. The row is built here by hand from the template's text."""
    prompt, answer = "Which candidate fits?", "The first one."
    row = {"prompt": [{"role": "user", "content": prompt}]}
    row["completion"] = [{"role": "assistant", "content": answer}]
    train(sft, write_rows(tmp_path / "one.jsonl", [row]), llama_folder, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    context = f"<|user|>{prompt}<|end|><|assistant|>"
    ids = [tokenizer.encode(t, add_special_tokens=False) for t in (context, f"{answer}<|end|>")]
    logits = AutoModelForCausalLM.from_pretrained(llama_folder)(torch.tensor([sum(ids, [])])).logits
    first = len(ids[0])
    expected = F.cross_entropy(logits[0, first - 1 : -1], torch.tensor(ids[1])).item()
    printed = capsys.readouterr().out
    assert f"F.cross_entropy's: {expected:.4f}, expected {expected:.4f}" in printed
    assert f"{len(ids[1])} of {first + len(ids[1])} tokens trained" in printed
    assert printed.count("◆<|end|>") == 1


def test_reward_preflight_is_log_2(tmp_path, llama_folder, reward_folder, pairs_file, capsys):
    """A fresh head is zero, so both answers score 0 and the loss is exactly log 2 = 0.6931. A
    folder that is a reward model already has no such number, and must not claim it."""
    rows = train(reward_train, pairs_file, llama_folder, tmp_path / "fresh")
    printed = capsys.readouterr().out
    assert "with a zero head: 0.6931, expected 0.6931" in printed
    assert printed.count("◆<|end|>") == 1 and "▮" not in printed, "one token carries the reward"
    assert steps(rows, "loss")[0] == pytest.approx(LOG2, abs=1e-6)
    rows = train(reward_train, pairs_file, reward_folder, tmp_path / "again")
    printed = capsys.readouterr().out
    assert "is a reward model already: loss" in printed and "zero head" not in printed
    assert abs(steps(rows, "loss")[0] - LOG2) > 1e-3


@pytest.mark.parametrize(
    "loss_type, beta, expected",
    [
        ("sigmoid", 0.1, LOG2),
        ("sigmoid", 100.0, LOG2),  # β multiplies the rounding of the log-probs too
        ("robust", 0.1, LOG2),
        ("sigmoid_norm", 0.1, LOG2),
        ("hinge", 0.1, 1.0),
        ("ipo", 0.25, 4.0),  # 1/(4·0.0625)
        ("ipo", 0.01, 2500.0),
    ],
)
def test_dpo_preflight(tmp_path, llama_folder, pairs_file, capsys, loss_type, beta, expected):
    """Policy = reference at the start, so z = 0 and the loss is known: log 2, 1 (hinge) or 1/(4β²)
    (IPO). A reference from other weights, tokens or masks gives another number."""
    flags = ("--loss-type", loss_type, "--beta", beta, "--nll-coef", 0)
    rows = train(dpo, pairs_file, llama_folder, tmp_path / "out", *flags)
    printed = capsys.readouterr().out
    assert f"loss before step one: {expected:.4f}, expected {expected:.4f}" in printed
    assert "implicit rewards: 0.0000, expected 0.0000" in printed
    assert steps(rows, "loss")[0] == pytest.approx(expected, rel=1e-5 * max(1, beta))
    assert steps(rows, "rewards/accuracies") == [0.5]  # equal scores count one half


def test_simpo_claims_no_number(tmp_path, llama_folder, pairs_file, capsys):
    """SimPO has no reference, hence no known loss: it says so, and computes no log-probs of one.
    Its reward is β · mean log-prob, β = 2: below zero for sure."""
    rows = train(dpo, pairs_file, llama_folder, tmp_path / "out", "--loss-type", "simpo")
    assert "simpo has no reference" in capsys.readouterr().out
    (last,) = (tmp_path / "out" / "checkpoint").iterdir()
    assert "reference" not in torch.load(last, weights_only=True)["state"]
    assert steps(rows, "rewards/chosen")[0] < -2 and abs(steps(rows, "loss")[0] - LOG2) > 1e-2


def test_a_wrong_reference_is_refused(tmp_path, monkeypatch, llama_folder, pairs_file):
    """Log-probs of other rows (trl#885, #2423) look like log-probs. The preflight sees that the
    loss is not log 2, and refuses before --out is touched."""
    real = dpo.reference_logps
    monkeypatch.setattr(dpo, "reference_logps", lambda *args: real(*args).roll(1, dims=1))
    with pytest.raises(files.UserError, match="loss before step one is .*, expected 0.6931"):
        train(dpo, pairs_file, llama_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- E5: it learns ----

CURE = ("--schedule", "constant", "--warmup", 0, "--eval-every", 0)


@pytest.fixture
def two_files(tmp_path):
    """48 pairs to train on and 24 of other prompts."""
    return write_pairs(tmp_path / "a.jsonl", 48), write_pairs(tmp_path / "b.jsonl", 24, seed=5)


def test_sft_learns_its_answers(tmp_path, llama_folder, two_files):
    """Every answer of the file is "… Recommendation: hold.": held-out loss must fall by nats; an
    off-by-one target would learn the prompt's bigrams instead."""
    flags = ("--steps", 40, "--lr", 5e-3, "--eval-fraction", 0.2, *CURE)
    rows = train(sft, two_files[0], llama_folder, tmp_path / "out", *flags)
    before, after = (row for row in rows if "eval/loss" in row)
    assert before["eval/loss"] > 4 and after["eval/loss"] < 1.5
    assert after["eval/token_accuracy"] > 0.7
    assert after["eval/perplexity"] == pytest.approx(math.exp(after["eval/loss"]))


def test_reward_model_learns_a_separable_set(tmp_path, llama_folder, two_files):
    """Chosen answers say "hold", rejected ones "reject": 100 % on held-out prompts, and scores
    whose difference means a probability (NLL well below log 2)."""
    flags = ("--steps", 40, "--lr", 2e-3, "--eval-pairs", two_files[1], *CURE)
    rows = train(reward_train, two_files[0], llama_folder, tmp_path / "out", *flags)
    before, after = (row for row in rows if "eval/accuracy" in row)
    assert before["eval/accuracy"] == 0.5  # a zero head: every pair is equal
    assert (after["eval/accuracy"], after["eval/n"]) == (1.0, 24)
    assert after["eval/nll"] < 0.1
    assert after["eval/accuracy_low"] == pytest.approx(24 / (24 + 1.959964**2))  # Wilson at k = n
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["reward_std"] > 0.5 and math.isfinite(config["reward_mean"])


def test_dpo_learns_and_a_huge_beta_holds(tmp_path, llama_folder, two_files):
    """DPO must rank held-out pairs right and widen their margin. With β = 100 the same steps leave
    the policy near the reference: a KL term with the wrong sign, or a reference that moves along,
    lets it run away."""
    flags = ("--steps", 40, "--lr", 3e-4, "--eval-pairs", two_files[1], *CURE, "--nll-coef", 0)
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    ids = torch.tensor([tokenizer.encode(pair_rows(1, seed=5)[0]["chosen"][0]["content"])])

    def log_probs(folder):
        with torch.no_grad():
            return AutoModelForCausalLM.from_pretrained(folder)(ids).logits.log_softmax(-1)

    last, kl, reference = {}, {}, log_probs(llama_folder)
    for beta in (0.1, 100.0):
        out = tmp_path / f"beta{beta}"
        rows = train(dpo, two_files[0], llama_folder, out, *flags, "--beta", beta)
        before, last[beta] = (row for row in rows if "eval/loss" in row)
        assert before["eval/loss"] == pytest.approx(LOG2, abs=1e-3)
        assert before["eval/rewards/accuracies"] == 0.5, "rounding is no preference"
        policy = log_probs(out)
        kl[beta] = (policy.exp() * (policy - reference)).sum(-1).mean().item()  # exact, a token
    assert last[0.1]["eval/rewards/accuracies"] == 1.0
    assert last[0.1]["eval/rewards/margins"] > 1 and last[0.1]["eval/loss"] < 0.3
    assert 0 < kl[100.0] < 0.1 * kl[0.1], kl


@pytest.mark.parametrize("loss_type", dpo.LOSS_TYPES)
def test_every_loss_type_learns(loss_type, tmp_path, llama_folder, pairs_file):
    """Each type through the whole stage, lengths and reference included."""
    flags = ("--steps", 8, "--lr", 3e-4, "--loss-type", loss_type, *CURE)
    rows = train(dpo, pairs_file, llama_folder, tmp_path / "out", *flags)
    margins, losses = steps(rows, "rewards/margins"), steps(rows, "loss")
    assert margins[-1] > margins[0] + 1e-3
    assert losses[-1] < losses[0]


def test_kto_learns_from_thumbs(tmp_path, llama_folder, monkeypatch):
    """Single answers, thumb up or down, every second of each: what was liked gains on the
    reference and what was not loses. A label that is no bool is named with its line. The baseline
    is the mean log-ratio of answers to other prompts, by hand, and never below 0."""
    rows = [
        {"prompt": r["prompt"], "completion": r[side], "label": side == "chosen"}
        for r, side in zip(pair_rows(16), 8 * ["chosen", "rejected"])
    ]
    file, out = str(tmp_path / "thumbs.jsonl"), tmp_path / "out"
    write_rows(file, rows)
    real, seen = dpo.kl_baseline, []

    def spy(args, run, policy, pairs, indices, pad):
        seen.append(real(args, run, policy, pairs, indices, pad))
        if not len(indices):
            return 0.0  # nothing is held out
        ids = [(i, (i + 8) % 16) for i in indices]
        said = [pairs.chosen[j] if j % 2 == 0 else pairs.rejected[j] for _, j in ids]
        both = common.pad_rows([pairs.prompts[i] for i, _ in ids], said, pad)
        start = common.load_policy(llama_folder, trainable=False)
        with torch.no_grad():
            now, then = (common.token_logps(m, *both).sum(1) for m in (policy, start))
        expected = max(0.0, (now - then).mean().item())
        assert seen[-1] == pytest.approx(expected, abs=2e-3)
        return seen[-1]

    monkeypatch.setattr(dpo, "kl_baseline", spy)
    flags = ("--steps", 8, "--lr", 1e-3, "--loss-type", "kto", "--eval-fraction", 0, *CURE)
    log = train(dpo, file, llama_folder, out, *flags)
    first, last = (next(r for r in log[::way] if "lr" in r) for way in (1, -1))
    assert last["loss"] < first["loss"] and last["rewards/margins"] > 1e-3
    assert first["loss"] == pytest.approx(0.5, abs=1e-4) and seen[1] < 1e-4 < max(seen)
    with open(file, "a") as f:
        f.write(json.dumps(rows[0] | {"label": 1}))
    with pytest.raises(files.UserError, match=':17: "label" is 1; expected true or false'):
        train(dpo, file, llama_folder, tmp_path / "no", *flags)


# ---- E6: families and tokenizers ----


def trained_and_reloaded(stage, monkeypatch, data, model, out, *flags):
    """Train, then open the folder by plain transformers: (trained, reloaded, its tokenizer)."""
    held, real = {}, common.save_model

    def keep(model, *args):
        held["model"] = model
        real(model, *args)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "save_model", keep)
        norms = steps(train(stage, data, model, out, *flags), "grad_norm")
    assert all(map(math.isfinite, norms)) and norms[0] > 0
    kind = AutoModelForSequenceClassification if stage is reward_train else AutoModelForCausalLM
    loaded, info = kind.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], "newly initialized"
    tokenizer, trained = AutoTokenizer.from_pretrained(out), held["model"].eval()
    ids = torch.tensor([tokenizer.encode("Assess this candidate. sql, kafka.")])
    with torch.no_grad():
        expected = trained(input_ids=ids).logits
        assert torch.allclose(loaded.eval()(input_ids=ids).logits, expected, atol=1e-5)
    assert expected.abs().max() > 1e-3, "a zero head would pass"
    return trained, loaded, tokenizer


@pytest.mark.parametrize("family", [*FAMILIES, *EXTRA_FAMILIES])
@pytest.mark.parametrize("stage", [reward_train, ppo], ids=lambda s: s.__name__)
def test_families(stage, family, tmp_path, monkeypatch, pairs_file):
    """Each family hides its own trap: GPT-2 and OPT count positions, Gemma scales the embedding,
    GPT-NeoX has no tied head, Gemma 2 caps the logits. Two steps move the weights (a zero head
    passes no gradient to the trunk in the first) and the folder opens in transformers."""
    model, flags = tiny_model(family, tmp_path), ("--steps", 2, "--lr", 1e-2)
    before = AutoModelForCausalLM.from_pretrained(model)
    out = tmp_path / "out"
    _, loaded, _ = trained_and_reloaded(stage, monkeypatch, pairs_file, model, out, *flags)
    embedding = [m.get_input_embeddings().weight for m in (before, loaded)]
    assert embedding[0].shape == embedding[1].shape and not torch.equal(*embedding)
    assert loaded.config.tie_word_embeddings == before.config.tie_word_embeddings


def padder(stage):
    """Where the stage finds `pad_rows`: pairs come by common.batch_rows, PPO's by rollouts."""
    return {reward_train: common, dpo: common, ppo: rollouts}.get(stage, stage)


TOKENIZERS = {  # kind: (options, as messages or as text)
    "no pad": (dict(pad=None), True),
    "no pad, nothing reserved": (dict(pad=None, reserved=False), False),
    "pad = eos": (dict(pad="<|end|>"), True),
    "no template": (dict(template=None), False),
    "no template, no pad": (dict(template=None, pad=None), True),
    "two BOS": (dict(bos="<|bos|>", add_bos=True, template=BOS_TEMPLATE), True),
    "EOS added": (dict(add_eos=True, template=None), False),
    "two end ids": (dict(template=CHATML), True),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@every_stage
def test_tokenizers(stage, kind, tmp_path, monkeypatch):
    """Real tokenizers come without pad, with pad = EOS (the end token is then masked away in many
    trainers), without a template, with a BOS in template and post-processor, with two end tokens.
    Every row that enters a forward must hold one BOS or none, end in exactly one end id, and have
    it trained; the vocabulary must not grow. (PPO's answers are drawn: an end id is their last
    token or none of them.)"""
    options, as_messages = TOKENIZERS[kind]
    model = tiny_model("gpt2", tmp_path, tokenizer=tiny_tokenizer(**options))
    names = ["<|end|>", "<|im_end|>"][: 2 if kind == "two end ids" else 1]
    ends = [tiny_tokenizer(**options).convert_tokens_to_ids(name) for name in names]
    path = Path(model) / "generation_config.json"  # as Qwen: it knows more ends than the template
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
    data = write_pairs(tmp_path / "pairs.jsonl", 8, as_messages=as_messages)
    home, batches = padder(stage), []
    real, size = home.pad_rows, load_file(Path(model) / "model.safetensors")
    monkeypatch.setattr(home, "pad_rows", lambda *args: batches.append(args[:2]) or real(*args))
    flags = (tmp_path / "out", "--steps", 3, "--lr", 1e-2)
    _, loaded, saved = trained_and_reloaded(stage, monkeypatch, data, model, *flags)
    assert loaded.get_input_embeddings().weight.shape == size["transformer.wte.weight"].shape
    assert set(common.end_ids(saved, loaded)) == set(ends)
    rows = [
        # sft marks context as ~id, and its second call holds masks
        ([~i if i < 0 else i for i in prompt], [~i if i < 0 else i for i in response])
        for batch in batches
        for prompt, response in zip(*batch)
        if not (len(prompt) and isinstance(prompt[0], (bool, np.bool_)))
    ]
    assert len(rows) >= 8
    for prompt, response in rows:
        ids = prompt if stage is ppo else [*prompt, *response]  # PPO may draw a BOS
        if saved.bos_token_id is not None:
            assert ids.count(saved.bos_token_id) == 1 and ids[0] == saved.bos_token_id
        if stage is ppo:
            assert not set(ends) & set(response[:-1])
            assert as_messages or not set(ends) & set(prompt)
        else:
            assert ids[-1] == ends[-1], "the answer's end is trained, whatever pads"
            assert as_messages or sum(i in ends for i in ids) == 1
    if as_messages:
        prompt = pair_rows(1)[0]["prompt"]
        expected = common.encode_prompt(common.load_tokenizer(model), prompt)
        assert saved.chat_template and common.encode_prompt(saved, prompt) == expected
    if stage is reward_train:
        assert loaded.config.pad_token_id not in ends, "transformers would read the wrong position"
    else:
        kept = loaded.generation_config.eos_token_id
        assert set(kept if isinstance(kept, list) else [kept]) == set(ends)


# ---- the flags of a single stage ----


def test_nll_term_is_per_token(tmp_path, llama_folder):
    """At step one the margin is 0, so the loss is log 2 + coef · (mean −log π of the chosen
    tokens), the logged `nll`. A sum, or a mean per answer, gives another number. The default is 1
    for sigmoid, 0 for the others."""
    data = write_pairs(tmp_path / "pairs.jsonl", 8)
    for coef, flags in ((0.3, ("--nll-coef", 0.3)), (1, ()), (0, ("--loss-type", "robust"))):
        flags = ("--micro-tokens", 300, "--overwrite", *flags)
        rows = train(dpo, data, llama_folder, tmp_path / "out", *flags)
        row = next(r for r in rows if "lr" in r)
        assert row["loss"] == pytest.approx(LOG2 + coef * row["nll"], rel=1e-5)
    tokenizer = common.load_tokenizer(llama_folder)
    tokens = [len(common.encode_pair(tokenizer, r["prompt"], r["chosen"])[1]) for r in pair_rows(8)]
    assert row["nll"] == pytest.approx(-row["logps/chosen"] * 8 / sum(tokens), rel=1e-5)


def test_ties(tmp_path, llama_folder, capsys):
    """A tie says: equally good. As half a win for each it costs log 2 and has no gradient at equal
    scores; dropped (DPO's default), it is counted, as are pairs whose answers are equal, or are
    after cutting. A file of ties alone then holds no usable row."""
    ties = [{**row, "tie": True} for row in pair_rows(8)]
    only = write_rows(tmp_path / "ties.jsonl", ties)
    for stage, flags in ((reward_train, ()), (dpo, ("--ties", "soft", "--nll-coef", 0))):
        rows = train(stage, only, llama_folder, tmp_path / stage.__name__, *flags)
        assert steps(rows, "loss")[0] == pytest.approx(LOG2, abs=1e-6)
        assert steps(rows, "grad_norm")[0] < 1e-5
    assert steps(rows, "rewards/accuracies") == [0.5]
    long = {**ties[0], "tie": None}
    for key, end in (("chosen", " yes"), ("rejected", " no")):
        long[key] = [{"role": "assistant", "content": "hold " * 60 + end}]
    rows = [*ties[:3], *pair_rows(8, seed=1), {**long, "rejected": long["chosen"]}, long]
    mixed = write_rows(tmp_path / "mixed.jsonl", rows)
    dropped = "dropped: tie 3, dropped: chosen = rejected 1, responses cut 2, "
    counted = f"rows 13, {dropped}dropped: equal after cutting 1; training 8, held out 0"
    for stage, flags in ((reward_train, ("--ties", "drop")), (dpo, ())):
        with pytest.raises(files.UserError, match=r"no usable row \(rows 8, dropped: tie 8\)"):
            train(stage, only, llama_folder, tmp_path / "none", *flags)
        capsys.readouterr()
        out = tmp_path / f"mixed-{stage.__name__}"
        train(stage, mixed, llama_folder, out, *flags, "--max-length", 120)
        assert counted in capsys.readouterr().out


def test_reward_margin_column(tmp_path, llama_folder):
    """--margin strength asks chosen to win by that much: at equal scores the loss is −log σ(−m),
    for m = 0.5 · 2 that is 1.3133. A column changes nothing unasked."""
    data = write_rows(tmp_path / "pairs.jsonl", [{**r, "strength": 2} for r in pair_rows(8)])
    margin = ("--margin", "strength", "--margin-scale", 0.5)
    for name, flags, expected in (("out", margin, 1.3133), ("plain", (), LOG2)):
        rows = train(reward_train, data, llama_folder, tmp_path / name, *flags)
        assert steps(rows, "loss")[0] == pytest.approx(expected, abs=1e-4)


def test_text_rows_end_once_and_are_cut_aloud(tmp_path, llama_folder, capsys):
    """A text that brings its end token had two; a tokenizer whose end only the template names had
    None, a TypeError; and what `--max-length` took from text and messages was in no count. "abcd"
    is 4 tokens and the end: 4 of them trained."""
    texts = [{"text": "abcd"}, {"text": "abcd<|end|>"}]
    endless = tiny_model("llama", tmp_path, tokenizer=tiny_tokenizer(eos=None))
    data = write_rows(tmp_path / "text.jsonl", texts)
    for i, model in enumerate((llama_folder, endless)):
        assert steps(train(sft, data, model, tmp_path / f"text{i}"), "trained_tokens") == [8]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 20}]
    rows = [*texts, {"text": "x y " * 20}, {"messages": turns}, {"messages": turns * 2}]
    data = write_rows(tmp_path / "long.jsonl", rows)
    train(sft, data, llama_folder, tmp_path / "cut", "--max-length", 12)
    assert "rows 5, rows cut 3; training 5" in capsys.readouterr().out


def test_sft_reads_its_four_forms(tmp_path, llama_folder):
    """prompt + completion, messages, text, and a preference file (its chosen): the same dialogue
    gives the same trained tokens in each form that holds it; of plain text all but the first."""
    row = pair_rows(1)[0]
    text = row["chosen"][0]["content"]
    seen = []
    for form in (
        {"prompt": row["prompt"], "completion": row["chosen"]},
        {"messages": [*row["prompt"], *row["chosen"]]},
        row,
        {"text": text},
    ):
        data = write_rows(tmp_path / f"{len(seen)}.jsonl", [form])
        rows = train(sft, data, llama_folder, tmp_path / f"out{len(seen)}")
        seen.append([steps(rows, key) for key in ("trained_tokens", "tokens", "loss")])
    assert seen[0] == seen[1] == seen[2]
    n = len(AutoTokenizer.from_pretrained(llama_folder).encode(text))
    assert seen[3][:2] == [[n], [n + 1]]  # n tokens and the end; nothing predicts the first


# ---- LoRA and precision ----


@every_stage
def test_lora_trains_its_adapters_alone(stage, tmp_path, monkeypatch, llama_folder, pairs_file):
    """--lora-rank 4: only A, B (and the score head) move, and the merged folder in transformers is
    the model in memory; the base's file is not touched. PEFT's side is in test_common_model.py."""
    file, flags = Path(llama_folder) / "model.safetensors", ("--lora-rank", 4, "--lr", 1e-2)
    before, out = file.read_bytes(), tmp_path / "out"
    flags += ("--steps", 2, "--warmup", 0)
    model, _, _ = trained_and_reloaded(stage, monkeypatch, pairs_file, llama_folder, out, *flags)
    moving = {n for n, w in model.named_parameters() if w.requires_grad}
    assert {n.rpartition(".lora_")[2] for n in moving if ".lora_" in n} == {"A.weight", "B.weight"}
    head = {"score.weight"} if stage is reward_train else set()
    assert {n for n in moving if ".lora_" not in n} == head
    assert file.read_bytes() == before and (out / "adapter").is_dir()


def test_precision_of_the_written_weights(tmp_path, pairs_file):
    """A merged LoRA is a new version of its checkpoint, so it has the checkpoint's precision: bf16
    here. Full training writes fp32, for the updates are finer than bf16; --save-dtype decides for
    both. config.json names it: transformers and vLLM load in the dtype that it names."""
    base = tiny_model("llama", tmp_path, dtype=torch.bfloat16)
    cases = {
        ("--lora-rank", 2): torch.bfloat16,
        (): torch.float32,
        ("--lora-rank", 2, "--save-dtype", "fp16"): torch.float16,
        ("--save-dtype", "bf16"): torch.bfloat16,
    }
    for flags, dtype in cases.items():
        out = tmp_path / "out"
        train(sft, pairs_file, base, out, *flags, "--overwrite")
        assert {w.dtype for w in load_file(out / "model.safetensors").values()} == {dtype}
        assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == dtype
        if "--lora-rank" in flags:  # what was trained is not rounded
            adapter = load_file(out / "adapter" / "adapter_model.safetensors")
            assert {w.dtype for w in adapter.values()} == {torch.float32}


# ---- scores of sample answers, the log ----

GOLD = '''
def score(prompts, answers, rows):
    """The share of vowels: any number that depends on the text, and None for an empty answer."""
    assert [row["prompt"] for row in rows] == prompts and len({row["note"] for row in rows}) == 6
    return [sum(c in "aeiou" for c in a) / len(a) if a else None for a in answers]
'''


def test_prompts_gold_and_reward_model(tmp_path, llama_folder, reward_folder, pairs_file):
    """val/gold and val/score must be the functions' means over the answers to --prompts, with the
    row beside each answer, and val/kl the KL to the reference: 0 before the first step."""
    rows = [{"prompt": r["prompt"], "note": f"n{i}"} for i, r in enumerate(pair_rows(6))]
    prompts, gold = write_rows(tmp_path / "prompts.jsonl", rows), tmp_path / "gold.py"
    gold.write_text(GOLD)
    flags = ("--prompts", prompts, "--gold", f"{gold}:score", "--max-new-tokens", 12, "--lr", 1e-2)
    flags += ("--warmup", 0, "--steps", 2)
    model = common.load_policy(llama_folder, trainable=False)
    asked = [r["prompt"] for r in runs.some_prompts(rows, 64)]
    tokenizer = common.load_tokenizer(llama_folder)
    answers = common.sample(model, tokenizer, asked, max_new_tokens=12, seed=0).texts
    shares = [sum(c in "aeiou" for c in a) / len(a) for a in answers if a]
    expected = pytest.approx(sum(shares) / len(shares))
    scores = common.reward_function(reward_folder)(asked, answers)
    for rank in (0, 4):  # with LoRA the reference is the policy with its adapter off
        scored = ("--reward-model", reward_folder, "--lora-rank", rank, "--overwrite")
        logged = train(dpo, pairs_file, llama_folder, tmp_path / "dpo", *flags, *scored)
        first, last = (row for row in logged if "val/gold" in row)
        assert first["val/gold"] == expected
        assert first["val/score"] == pytest.approx(sum(scores) / len(scores), rel=1e-5)
        assert first["val/kl"] == pytest.approx(0, abs=1e-4) and last["val/kl"] > 1e-3
    samples = read(tmp_path / "dpo" / "samples.jsonl")
    assert samples[0]["step"] == 0 and samples[0]["answer"] == answers[0]
    logged = train(sft, pairs_file, llama_folder, tmp_path / "sft", *flags)
    assert next(row for row in logged if "val/gold" in row)["val/gold"] == expected


# ---- what a user types first, and sees ----


@each_stage
def test_the_screen(stage, tmp_path, capfd):
    """At most 24 lines before the bar and ten after it, none beyond 400 characters, however long
    the rows are; the last show one prompt, its answer and the score before and after. DPO without
    --epochs makes 24 steps of a small file: 32 pairs in batches of 8 are 4 a pass, so 6 passes."""
    rows = pair_rows(32)
    for row in rows:
        row["prompt"][0]["content"] *= 5
        row["chosen"][0]["content"] *= 2
    data = write_rows(tmp_path / "pairs.jsonl", rows)
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": r["prompt"]} for r in rows[:3]])
    model, out = tiny_model("llama", tmp_path, max_position_embeddings=1024), tmp_path / "out"
    flags = ["--max-new-tokens", 60, "--prompts", prompts, "--gold", REWARD_FN]
    flags = ["--eval-pairs", data] if stage is reward_train else flags
    argv = command(stage, data, model, out, *flags, "--lr", 3e-4)
    del argv[argv.index("--steps") : argv.index("--steps") + 2]
    assert stage.main(argv) == 0
    said = capfd.readouterr()
    lines = said.out.splitlines()
    assert said.err == "" and all(len(line) <= 400 for line in lines), said
    places = [1 + i for i, line in enumerate(lines) if re.match(r"step \d+: ", line)]
    assert places[0] <= 24 and len(lines) - places[-1] <= 10, said.out
    steps_made = len(steps(read(out / "metrics.jsonl"), "lr"))
    assert steps_made == (24 if stage is dpo else 4)
    end = lines[places[-1] :]
    own = {"dpo": f"--prompts {prompts} --gold {REWARD_FN} --re", "reward_train": f"--pairs {data}"}
    assert end[-1].startswith("next: python") and own.get(stage.__name__, "") in end[-1]
    if stage is not reward_train:
        shown = {line.split()[0]: line.split(maxsplit=1)[1] for line in end}
        assert shown["before"] != shown["after"] and "val/gold" in shown


SHARED = ["common.py", "parts"]
GRADED = [*SHARED, "watch.py", "judge.py", "checks"]
ANSWERED = "--max-new-tokens 4 --steps 2"
GROUPS = "--group-size 2 --groups-per-batch 2"
COPIES = {  # what is copied, and the flags beside --model and --out
    "sft": (SHARED, f"--data mine.jsonl {ANSWERED}"),
    "reward_train": (SHARED, "--pairs mine.jsonl --steps 2"),
    "dpo": (SHARED, f"--pairs mine.jsonl {ANSWERED}"),
    "ppo": (
        [*SHARED, "watch.py"],
        f"--prompts mine.jsonl --reward-fn mine.py:score --rollouts 8 {ANSWERED}",
    ),
    # the recipe's own line: its rank is 32
    "grpo_rubric": (
        GRADED,
        "data_path=rubrics.json group_size=2 groups_per_batch=2 max_tokens=4 --steps 2",
    ),
    "grpo_agent": (
        [*GRADED, "grpo_rubric.py"],
        f"--env mine.py:Guess {GROUPS} --val-episodes 2 --test-episodes 2 {ANSWERED}",
    ),
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
        sys.path[:] = [str(home), *(path for path in sys.path if not REPO == Path(path))]
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as stop:
        os._exit(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


@pytest.mark.parametrize("stage", COPIES)
def test_a_copy_trains_on_a_users_file(stage, tmp_path, llama_folder):
    """Who copies one script with what it imports has a trainer: no file of data/, no other stage,
    nothing installed."""
    copied, flags = COPIES[stage]
    home = tmp_path / "copy"
    home.mkdir()
    for name in (f"{stage}.py", *copied):
        tree = (REPO / name).is_dir()
        (shutil.copytree if tree else shutil.copy)(REPO / name, home / name)
    write_pairs(home / "mine.jsonl")
    (home / "mine.py").write_text(MINE, encoding="utf-8")
    rubrics = [{"check": "regex:match", "pattern": "a"}]
    rows = [{"task_id": str(i), "prompt": f"Say a, {i}.", "rubrics": rubrics} for i in range(10)]
    (home / "rubrics.json").write_text(json.dumps(rows), encoding="utf-8")
    shutil.copytree(llama_folder, home / "model")
    flags = [*flags.split(), "--model", "model", "--out", "run", "--device", "cpu"]
    assert run_in_fork(home, [f"{stage}.py", *flags]) == 0
    assert len([row for row in read(home / "run" / "metrics.jsonl") if "grad_norm" in row]) == 2
    assert (home / "run" / "model.safetensors").is_file()
    assert (home / "run" / "adapter").is_dir() == (stage == "grpo_rubric")


@pytest.mark.parametrize("stage, flag", [(sft, "--data"), (dpo, "--pairs")])
def test_bundled_data_brings_its_prompts_and_score(stage, flag, monkeypatch):
    """The command on the card must show what was learnt: bundled files alone get the bundled
    prompts and the recruiter, whose score would say nothing of a user's own file."""
    monkeypatch.chdir(REPO)
    theirs = ("data/prompts.jsonl", "data/recruiter.py:reward")

    def found(*argv):
        args = stage.parse_args(list(argv))
        return args.prompts, args.gold

    assert found() == found(flag, "data/prefs.jsonl") == theirs
    assert found(flag, "mine.jsonl") == found(flag, "data/prefs.jsonl", "mine.jsonl") == (None,) * 2
    own = found(flag, "data/prefs.jsonl", "--prompts", "mine.jsonl")
    assert own == ("mine.jsonl", None)
    assert found(flag, "data/prefs.jsonl", "--gold", "my.py:f") == (theirs[0], "my.py:f")


@every_stage
def test_help(stage, monkeypatch, capsys):
    """--help: an example that parses, the stage's own flags explained, the 22 shared ones and
    watch.py's by name, under 60 lines of 100 columns. --help-all explains every flag."""
    monkeypatch.setenv("COLUMNS", "100")

    def shown(flag):
        with pytest.raises(SystemExit) as stop:
            stage.parse_args([flag])
        assert stop.value.code == 0
        text = capsys.readouterr().out
        return text, re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)

    (brief, explained), (text, full) = shown("--help"), shown("--help-all")
    assert brief.startswith(f"usage: python {stage.__name__}.py --")
    stage.parse_args(brief.splitlines()[0].split()[3:])
    assert len(brief.splitlines()) < 60 and max(map(len, brief.splitlines())) <= 100
    named = re.findall(r"(?<=[ \n])--[a-z-]+", brief.partition("Explained by --help-all:")[2])
    shared = re.findall(r"^  (--[a-z-]+)", text.partition("flags of all trainers:")[2], re.M)
    assert len(shared) == 22 and set(shared) <= set(named)
    assert sorted(full) == sorted([*explained, *named])
