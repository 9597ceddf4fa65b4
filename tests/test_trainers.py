"""The promises that sft, reward_train, dpo and ppo make alike, kept by running their own `main` on tiny models.

Ordered as in the house's list: E1 the numbers before step one, E2 micro-batches, E3 padding and mates, E5 learning, E6
families and tokenizers, E7 a folder for a fresh process, E8 NaN in padding (E4, resume, is test_resume.py). Then what a
single stage owes: the reference, the loss types, LoRA, the scores of sample answers, what the screen and --help say, a copy
of the script in an empty folder. PPO draws its own rows, so its E1, E2, E3 and E5 are in test_ppo.py.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import common
import dpo
import ppo
import reward_train
import sft
from parts import files, lora, rollouts, runs
from tiny import (
    BOS_TEMPLATE,
    CHATML,
    EXTRA_FAMILIES,
    FAMILIES,
    TEMPLATE,
    pair_rows,
    tiny_model,
    tiny_tokenizer,
    write_pairs,
    write_rows,
)

REPO = Path(__file__).resolve().parent.parent
PAIR_STAGES = [sft, reward_train, dpo]  # each row of the file is trained as it stands
STAGES = [*PAIR_STAGES, ppo]
REWARD_FN = f"{Path(__file__).with_name('tiny.py')}:share_of_vowels"
LOG2 = math.log(2)


pytestmark = pytest.mark.usefixtures("quiet_process")


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory):
    """A second Llama of other weights: as a reference it makes every margin and gradient a generic number."""
    return tiny_model("llama", tmp_path_factory.mktemp("models"), seed=7)


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


class Caught(Exception):
    """Ends a run once the test has seen what it came for."""


@contextmanager
def watched(monkeypatch, stage, mask_nan=False, reference=None):
    """Inside, a run is stopped before its first update; `seen` then holds its loss, gradient and forwards.

    mask_nan puts NaN into the hidden states of the padding, in forwards that record a gradient. reference: a folder whose
    model takes the place of DPO's reference, so that margins and gradients are generic numbers.
    """
    seen = {"forwards": 0}
    name = "reward_scores" if stage is reward_train else "token_logps"
    real = getattr(stage, name)

    def forward(*args, **kwargs):
        seen["forwards"] += torch.is_grad_enabled()
        return real(*args, **kwargs)

    def poison(module, args, kwargs, output):
        mask = kwargs["attention_mask"]
        if (
            mask.ndim == 4
        ):  # prompt | chosen | rejected: what a column sees shrinks where the next part begins
            starts = F.pad(mask[:, 0].sum(-1).diff(dim=1) < 1, (1, 0))  # (b, S)
            mask = starts.cumsum(1) < 2
        if torch.is_grad_enabled() and mask.shape == output.last_hidden_state.shape[:2]:
            seen["poisoned"] = seen.get("poisoned", 0) + int((mask == 0).sum())
            hidden = output.last_hidden_state
            output.last_hidden_state = torch.where(mask[..., None].bool(), hidden, torch.nan)
        return output

    def stopped(loss, weights):
        seen["loss"] = loss
        seen["gradient"] = torch.cat([w.grad.flatten() for w in weights if w.grad is not None])
        raise Caught

    def update(run, where):
        if mask_nan:
            assert seen["poisoned"] > 0, "no padding, no test"
        stopped(run.loss, [w for group in run.optimizer.param_groups for w in group["params"]])

    def prepare(model, args, real=runs.prepare):
        real(model, args)
        model.base_model.register_forward_hook(poison, with_kwargs=True)

    def other_reference(run, policy, pairs, pad, real=dpo.reference_logps):
        return real(run, common.load_policy(reference, trainable=False), pairs, pad)

    with monkeypatch.context() as patch, pytest.raises(Caught):
        patch.setattr(stage, name, forward)
        patch.setattr(runs.Run, "update", update)
        if mask_nan:
            patch.setattr(runs, "prepare", prepare)
        if reference:
            patch.setattr(dpo, "reference_logps", other_reference)
            patch.setattr(dpo, "preflight", lambda *args: None)
        yield seen


def gap(a, b):
    """Distance of two gradients, relative to their size (fp32 itself has 1e-7)."""
    assert a.norm() > 1e-3, "a gradient of zero passes anything"
    return ((a - b).norm() / b.norm()).item()


# ---- E1: the numbers before step one ----


def test_sft_preflight_loss_is_cross_entropy(tmp_path, llama_folder, capsys):
    """The printed loss must be what any textbook loop gets: cross_entropy of the answer and its end token, and of
    nothing else. The row is built here by hand from the template's text; a slip in shift, mask or end token shows."""
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
    """A fresh head is zero, so both answers score 0 and the loss is exactly log 2 = 0.6931. A folder that is a reward
    model already has no such number, and must not claim it."""
    rows = train(reward_train, pairs_file, llama_folder, tmp_path / "fresh")
    assert "with a zero head: 0.6931, expected 0.6931" in capsys.readouterr().out
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
    """Policy = reference at the start, so z = 0 and the loss is known: log 2, 1 (hinge) or 1/(4β²) (IPO). A reference
    from other weights, tokens or masks gives another number. The first step must log the same one."""
    flags = ("--loss-type", loss_type, "--beta", beta, "--nll-coef", 0)
    rows = train(dpo, pairs_file, llama_folder, tmp_path / "out", *flags)
    printed = capsys.readouterr().out
    assert f"loss before step one: {expected:.4f}, expected {expected:.4f}" in printed
    assert "implicit rewards: 0.0000, expected 0.0000" in printed
    assert steps(rows, "loss")[0] == pytest.approx(expected, rel=1e-5 * max(1, beta))
    assert steps(rows, "rewards/accuracies") == [0.5]  # equal scores count one half


def test_simpo_claims_no_number(tmp_path, llama_folder, pairs_file, capsys):
    """SimPO has no reference, hence no known loss: it says so, loads none and computes no reference log-probs."""
    rows = train(dpo, pairs_file, llama_folder, tmp_path / "out", "--loss-type", "simpo")
    printed = capsys.readouterr().out
    assert "simpo has no reference" in printed
    assert not (tmp_path / "out" / "checkpoint" / "reference.pt").exists()
    row = next(
        r for r in rows if "lr" in r
    )  # reward = β · mean log-prob, β = 2: below zero for sure
    assert row["rewards/chosen"] < -2 and abs(row["loss"] - LOG2) > 1e-2


# ---- E2: any cut into micro-batches ----

GENERIC = {  # a start at which nothing is zero or symmetric by accident
    "sft": (sft, ()),
    "reward": (reward_train, ("--center-coef", 0.01, "--label-smoothing", 0.1)),
    "dpo": (dpo, ("--beta", 0.05, "--nll-coef", 0)),
    "dpo with nll": (dpo, ("--beta", 0.05, "--nll-coef", 0.5)),
    "ipo": (dpo, ("--loss-type", "ipo")),
}


def start_of(case, llama_folder, reward_folder, other_folder):
    """(stage, model folder, flags, reference); the reward head is random, the reference another model than the policy."""
    stage, flags = GENERIC[case]
    model = reward_folder if stage is reward_train else llama_folder
    return stage, model, flags, other_folder if stage is dpo else None


@pytest.mark.parametrize("case", GENERIC)
def test_gradient_for_every_cut(
    case, tmp_path, monkeypatch, llama_folder, reward_folder, other_folder
):
    """Eight rows of unequal length as 1×8, 2×4 and 8×1 are the same update. The classic slip averages the means of the
    micro-batches, so that a short row weighs more than a long one (Hugging Face's accumulation bug of 2024)."""
    stage, model, flags, reference = start_of(case, llama_folder, reward_folder, other_folder)
    data = write_pairs(tmp_path / "pairs.jsonl", 8)
    tokenizer = AutoTokenizer.from_pretrained(model)
    lengths = sorted(row_lengths(stage, tokenizer, pair_rows(8)), reverse=True)
    assert len(set(lengths)) >= 3, "rows of one length could not show the slip"
    seen = {}
    for forwards, micro_tokens in ((1, 10**6), (2, 4 * lengths[0]), (8, 1)):
        with watched(monkeypatch, stage, reference=reference) as run:
            micro = ("--micro-tokens", micro_tokens)
            train(stage, data, model, tmp_path / f"out{forwards}", *flags, *micro)
        assert run["forwards"] == forwards
        seen[forwards] = run
    for forwards in (2, 8):
        assert seen[forwards]["loss"] == pytest.approx(seen[1]["loss"], rel=1e-6)
        assert gap(seen[forwards]["gradient"], seen[1]["gradient"]) < 1e-6


def row_lengths(stage, tokenizer, rows):
    """Columns of a row as the stage counts them: a pair is its prompt, once, and both answers."""
    lengths = []
    for row in rows:
        prompt, *answers = common.encode_pair(
            tokenizer, row["prompt"], row["chosen"], row["rejected"]
        )
        lengths.append(len(prompt) + sum(map(len, answers[:1] if stage is sft else answers)))
    return lengths


# ---- E3: padding, order, mates, padding_side ----


def padder(stage):
    """Where the stage finds `pad_rows`: pairs come by common.batch_rows, answers by rollout_tensors."""
    return {reward_train: common, dpo: common, ppo: rollouts}.get(stage, stage)


@pytest.mark.parametrize("case", GENERIC)
def test_padding_order_and_mates_change_nothing(
    case, tmp_path, monkeypatch, llama_folder, reward_folder, other_folder
):
    """Seven more columns of random ids behind every row, the file upside down, a tokenizer that pads on the left: the
    same loss and gradient. And the whole is the mean of the rows alone (for SFT weighted by its tokens), so that no row
    reads its mates."""
    stage, model, flags, reference = start_of(case, llama_folder, reward_folder, other_folder)
    rows = pair_rows(8)
    data = write_rows(tmp_path / "pairs.jsonl", rows)

    def once(name, data=data, model=model):
        with watched(monkeypatch, stage, reference=reference) as run:
            train(stage, data, model, tmp_path / name, *flags)
        return run

    plain = once("plain")
    # (1) more padding, of random ids
    home = padder(stage)
    real = home.pad_rows

    def wider(prompts, responses, pad_id):
        ids, attention_mask, response_mask = real(prompts, responses, pad_id)
        generator = torch.Generator().manual_seed(1)
        junk = torch.randint(0, 100, (len(ids), 7), generator=generator)
        none = torch.zeros(len(ids), 7, dtype=torch.bool)
        columns = ((ids, junk), (attention_mask, none), (response_mask, none))
        return tuple(torch.cat(pair, 1) for pair in columns)

    with monkeypatch.context() as patch:
        patch.setattr(home, "pad_rows", wider)
        padded = once("padded")
    # (2) the other order
    turned = once("turned", write_rows(tmp_path / "turned.jsonl", rows[::-1]))
    # (3) a tokenizer that pads on the left
    folder = tmp_path / "left"
    folder.symlink_to(model)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    real_load = common.load_tokenizer
    with monkeypatch.context() as patch:
        patch.setattr(common, "load_tokenizer", lambda name, *a: tokenizer)
        left = once("left-run")
    assert tokenizer.padding_side == "left" and real_load(model).padding_side == "right"
    # (4) each row alone
    alone, weights = [], []
    for i, row in enumerate(rows):
        alone.append(once(f"alone{i}", write_rows(tmp_path / f"row{i}.jsonl", [row])))
        ids = common.encode_pair(real_load(model), row["prompt"], row["chosen"])
        weights.append(len(ids[1]))
    for name, other in (("padding", padded), ("order", turned), ("padding_side", left)):
        assert other["loss"] == pytest.approx(plain["loss"], rel=1e-6), name
        assert gap(other["gradient"], plain["gradient"]) < 1e-6, name
    if case == "dpo with nll":
        return  # two normalisers, pairs and tokens: no single weight a row
    weights = torch.tensor(weights if stage is sft else [1] * 8).float()
    weights /= weights.sum()
    mean = sum(w * run["gradient"] for w, run in zip(weights, alone))
    assert gap(mean, plain["gradient"]) < 2e-6
    assert sum(w.item() * r["loss"] for w, r in zip(weights, alone)) == pytest.approx(
        plain["loss"], rel=1e-6
    )


# ---- E5: it learns ----

CURE = ("--schedule", "constant", "--warmup", 0, "--eval-every", 0)


def test_sft_learns_its_answers(tmp_path, llama_folder):
    """Every answer of the file is "… Recommendation: hold.": held-out loss must fall by nats, and the likeliest next
    token be right nearly always; an off-by-one target would learn the prompt's bigrams instead."""
    data = write_pairs(tmp_path / "pairs.jsonl", 48)
    flags = ("--steps", 60, "--lr", 5e-3, "--eval-fraction", 0.2, *CURE)
    rows = [r for r in train(sft, data, llama_folder, tmp_path / "out", *flags) if "eval/loss" in r]
    assert rows[0]["eval/loss"] > 4 and rows[-1]["eval/loss"] < 1.5
    assert rows[-1]["eval/token_accuracy"] > 0.7
    assert rows[-1]["eval/perplexity"] == pytest.approx(math.exp(rows[-1]["eval/loss"]))


def test_reward_model_learns_a_separable_set(tmp_path, llama_folder):
    """Chosen answers say "hold", rejected ones "reject": 100 % on held-out prompts, and scores whose difference means a
    probability (NLL well below log 2)."""
    data, held = (
        write_pairs(tmp_path / "train.jsonl", 48),
        write_pairs(tmp_path / "held.jsonl", 24, seed=5),
    )
    flags = ("--steps", 40, "--lr", 2e-3, "--eval-pairs", held, *CURE)
    rows = train(reward_train, data, llama_folder, tmp_path / "out", *flags)
    before, after = (r for r in rows if "eval/accuracy" in r)
    assert before["eval/accuracy"] == 0.5  # a zero head: every pair is equal
    assert (after["eval/accuracy"], after["eval/n"]) == (1.0, 24)
    assert after["eval/nll"] < 0.1
    assert after["eval/accuracy_low"] == pytest.approx(24 / (24 + 1.959964**2))  # Wilson at k = n
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["reward_std"] > 0.5 and math.isfinite(config["reward_mean"])


def test_dpo_learns_and_a_huge_beta_holds(tmp_path, llama_folder):
    """DPO must rank held-out pairs right and widen their margin. With β = 100 the same steps must leave the policy near
    the reference: a KL term with the wrong sign, or a reference that moves along, lets it run away."""
    data, held = (
        write_pairs(tmp_path / "train.jsonl", 48),
        write_pairs(tmp_path / "held.jsonl", 24, seed=5),
    )
    flags = ("--steps", 40, "--lr", 3e-4, "--eval-pairs", held, *CURE)
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    ids = torch.tensor([tokenizer.encode(pair_rows(1, seed=5)[0]["chosen"][0]["content"])])

    def log_probs(folder):
        with torch.no_grad():
            return AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits.log_softmax(
                -1
            )

    last, kl, reference = {}, {}, log_probs(llama_folder)
    for beta in (0.1, 100.0):
        out = tmp_path / f"beta{beta}"
        rows = train(dpo, data, llama_folder, out, *flags, "--beta", beta, "--nll-coef", 0)
        before, last[beta] = (r for r in rows if "eval/loss" in r)
        assert before["eval/loss"] == pytest.approx(LOG2, abs=1e-3)
        assert before["eval/rewards/accuracies"] == 0.5, "rounding is no preference"
        policy = log_probs(out)
        kl[beta] = (policy.exp() * (policy - reference)).sum(-1).mean().item()  # exact, a token
    assert last[0.1]["eval/rewards/accuracies"] == 1.0
    assert last[0.1]["eval/rewards/margins"] > 1
    assert last[0.1]["eval/loss"] < 0.3
    assert 0 < kl[100.0] < 0.1 * kl[0.1], kl


# ---- E6: families and tokenizers ----


def saved_model(monkeypatch, stage, data, model, out, *flags):
    """Run the stage to its end: (rows of metrics.jsonl, the model in memory as it was saved)."""
    held, real = {}, common.save_model

    def keep(model, *args):
        held["model"] = model
        real(model, *args)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "save_model", keep)
        rows = train(stage, data, model, out, *flags)
    return rows, held["model"]


def trained_and_reloaded(stage, monkeypatch, data, model, out, *flags):
    """One step, then the folder through plain transformers: (model in memory, reloaded model, its tokenizer)."""
    rows, trained = saved_model(monkeypatch, stage, data, model, out, *flags)
    assert all(math.isfinite(x) for x in steps(rows, "grad_norm"))
    assert steps(rows, "grad_norm")[0] > 0
    kind = AutoModelForSequenceClassification if stage is reward_train else AutoModelForCausalLM
    loaded, info = kind.from_pretrained(out, output_loading_info=True)
    lost = [k for k in info["missing_keys"]] + [k for k in info["unexpected_keys"]]
    assert lost == [], "a newly initialized weight is not what was trained"
    return trained, loaded.eval(), AutoTokenizer.from_pretrained(out)


def check_equal_logits(trained, loaded, tokenizer):
    ids = torch.tensor([tokenizer.encode("Assess this candidate. sql, kafka.")])
    with torch.no_grad():
        expected = trained.eval()(input_ids=ids).logits
        assert torch.allclose(loaded(input_ids=ids).logits, expected, atol=1e-5)
        assert expected.abs().max() > 1e-3, "a zero head would pass"


@pytest.mark.parametrize("family", [*FAMILIES, *EXTRA_FAMILIES])
@pytest.mark.parametrize("stage", STAGES, ids=lambda s: s.__name__)
def test_families(stage, family, tmp_path, monkeypatch, pairs_file):
    """Each family hides its own trap: GPT-2 and OPT count positions, Gemma scales the embedding, GPT-NeoX has no tied
    head, Gemma 2 caps the logits. One step moves the weights and the folder opens in transformers, nothing missing."""
    model = tiny_model(family, tmp_path)
    before = AutoModelForCausalLM.from_pretrained(model)
    trained, loaded, tokenizer = trained_and_reloaded(
        # a zero head passes no gradient to the trunk: the reward model's moves in the second step
        stage, monkeypatch, pairs_file, model, tmp_path / "out", "--steps", 2, "--lr", 1e-2
    )  # fmt: skip
    check_equal_logits(trained, loaded, tokenizer)
    embedding = [m.get_input_embeddings().weight for m in (before, loaded)]
    assert embedding[0].shape == embedding[1].shape
    assert not torch.equal(*embedding), "one step must have moved the weights"
    assert loaded.config.tie_word_embeddings == before.config.tie_word_embeddings


@pytest.mark.parametrize("family", [*FAMILIES, *EXTRA_FAMILIES])
def test_every_family_shares_its_prompts(family, tmp_path, pairs_file, capsys):
    """A pair's prompt passes once for both answers, in every family that we name: where it is not exact, the run says so and
    takes twice the time (GPT-2 calls its second argument otherwise than Llama, so it fell back)."""
    train(reward_train, pairs_file, tiny_model(family, tmp_path), tmp_path / "out")
    assert "computed twice" not in capsys.readouterr().out


TOKENIZERS = {
    "no pad": dict(pad=None),
    "no pad, nothing reserved": dict(pad=None, reserved=False),
    "pad = eos": dict(pad="<|end|>"),
    "no template": dict(template=None),
    "no template, no pad": dict(template=None, pad=None),
    "two BOS": dict(bos="<|bos|>", add_bos=True, template=BOS_TEMPLATE),
    "EOS added": dict(add_eos=True, template=None),
    "two end ids": dict(template=CHATML),
}


@pytest.mark.parametrize("as_messages", [True, False], ids=["messages", "text"])
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("stage", STAGES, ids=lambda s: s.__name__)
def test_tokenizers(stage, kind, as_messages, tmp_path, monkeypatch):
    """Real tokenizers come without pad, with pad = EOS (the end token is then masked away in many trainers), without a
    template, with a BOS in template and post-processor, with two end tokens. Every row that enters a forward must hold
    one BOS or none, end in exactly one end id, and have it trained; the vocabulary must not grow. (PPO's answers are
    drawn: an end id is their last token or none of them.)"""
    tokenizer = tiny_tokenizer(**TOKENIZERS[kind])
    model = tiny_model("gpt2", tmp_path, tokenizer=tokenizer)
    if kind == "two end ids":  # as Qwen: the config knows another end than the template writes
        path = Path(model) / "generation_config.json"
        ends = [tokenizer.convert_tokens_to_ids(t) for t in ("<|end|>", "<|im_end|>")]
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
    data = write_pairs(tmp_path / "pairs.jsonl", 8, as_messages=as_messages)
    flags = ("--steps", 3, "--lr", 1e-2)
    home, batches = padder(stage), []
    real = home.pad_rows
    monkeypatch.setattr(home, "pad_rows", lambda *args: batches.append(args[:2]) or real(*args))
    trained, loaded, saved = trained_and_reloaded(
        stage, monkeypatch, data, model, tmp_path / "out", *flags
    )
    check_equal_logits(trained, loaded, saved)
    size = AutoModelForCausalLM.from_pretrained(model).get_input_embeddings().weight.shape
    assert loaded.get_input_embeddings().weight.shape == size
    ends = set(common.end_ids(saved, loaded))
    assert len(ends) == (2 if kind == "two end ids" else 1)
    whole = [
        [~i if i < 0 else i for i in [*prompt, *response]]  # sft marks context as ~id
        for prompts, responses in batches
        for prompt, response in zip(prompts, responses)
        if not (len(prompt) and isinstance(prompt[0], (bool, np.bool_)))  # sft's second call: masks
    ]
    assert len(whole) >= 8
    end = saved.convert_tokens_to_ids(
        "<|im_end|>" if kind == "two end ids" and as_messages else "<|end|>"
    )
    for prompts, responses in batches if stage is ppo else ():
        for prompt, response in zip(prompts, responses):
            assert not ends & set(response[:-1]) and (as_messages or not ends & set(prompt))
            bos = saved.bos_token_id
            assert bos is None or (prompt.count(bos) == 1 and prompt[0] == bos)
    for ids in () if stage is ppo else whole:
        assert ids[-1] == end, "the answer's end is trained, whatever pads"
        if saved.bos_token_id is not None:
            assert ids.count(saved.bos_token_id) == 1 and ids[0] == saved.bos_token_id
        if not as_messages:
            assert sum(i in ends for i in ids) == 1
    if as_messages:
        assert saved.chat_template, "a template that was used is saved with the tokenizer"
        message = pair_rows(1)[0]["prompt"]
        assert common.encode_prompt(saved, message) == common.encode_prompt(
            common.load_tokenizer(model), message
        )
    if stage is reward_train:
        assert loaded.config.pad_token_id not in ends, "transformers would read the wrong position"
    else:
        kept = loaded.generation_config.eos_token_id
        assert set(kept if isinstance(kept, list) else [kept]) == ends


def test_transformers_pools_the_same_reward(tmp_path, pairs_file):
    """The model card's user calls the folder on a padded batch. transformers reads at the right-most token that is not
    pad: with pad = EOS that is the token before the end. Both rows must score as each alone, and as we score them."""
    model = tiny_model("llama", tmp_path, tokenizer=tiny_tokenizer(pad="<|end|>"))
    train(reward_train, pairs_file, model, tmp_path / "out", "--steps", 3, "--lr", 1e-2)
    tokenizer = common.load_tokenizer(str(tmp_path / "out"))
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    rows = pair_rows(4)
    pairs = [common.encode_pair(tokenizer, r["prompt"], r["chosen"]) for r in rows]
    ids, mask, _ = common.pad_rows(*zip(*pairs), loaded.config.pad_token_id)
    assert (
        mask.sum(1).min() < mask.shape[1]
    ) and loaded.config.pad_token_id != tokenizer.eos_token_id
    with torch.no_grad():
        together = loaded(input_ids=ids, attention_mask=mask.long()).logits[:, 0]
        alone = [loaded(input_ids=torch.tensor([p + r])).logits[0, 0] for p, r in pairs]
    ours = common.reward_function(str(tmp_path / "out"), raw=True)(
        [r["prompt"] for r in rows], [r["chosen"][0]["content"] for r in rows]
    )
    assert together.std() > 1e-3
    assert torch.allclose(together, torch.stack(alone), atol=1e-5)
    assert torch.allclose(together, torch.tensor(ours).float(), atol=1e-5)


def test_dropout_is_off_and_kept(tmp_path, pairs_file, capsys):
    """GPT-2 comes with dropout 0.1. Left on, policy and reference differ at step 0 and the preflight is wrong; written
    back as 0, the next user trains another model than he thinks. The same for random weights of --init-config."""
    model = tiny_model("gpt2", tmp_path, attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1)
    for stage in STAGES:
        train(stage, pairs_file, model, tmp_path / stage.__name__)
        config = json.loads((tmp_path / stage.__name__ / "config.json").read_text())
        assert [config[k] for k in ("attn_pdrop", "resid_pdrop", "embd_pdrop")] == [0.1] * 3
        assert config.get("use_cache", True) is True
    assert "implicit rewards: 0.0000, expected 0.0000" in capsys.readouterr().out
    config = str(Path(model) / "config.json")
    train(sft, pairs_file, model, tmp_path / "scratch", "--init-config", config)
    assert json.loads((tmp_path / "scratch" / "config.json").read_text())["attn_pdrop"] == 0.1


# ---- E7: a fresh process ----

FRESH = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
torch.set_num_threads(1)  # as the tests here: two threads add up in another order
answer = {}
for name, folder in json.loads(sys.argv[1]).items():
    kind = AutoModelForSequenceClassification if name == "reward_train" else AutoModelForCausalLM
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "sql, kafka"}], tokenize=False,
                                         add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        answer[name] = model.eval()(input_ids=ids).logits.flatten().double().tolist()
print(json.dumps(answer))
"""


def test_a_fresh_process_computes_the_same(tmp_path, monkeypatch, llama_folder, pairs_file):
    """What was trained is what is saved: transformers alone, in a new process that knows nothing of this project, gets
    the logits and scores of the model in memory. A prefix, a broken tie or a missing head would show here."""
    text = [{"role": "user", "content": "sql, kafka"}]
    expected = {}
    for stage in STAGES:
        out = tmp_path / stage.__name__
        model, _, tokenizer = trained_and_reloaded(
            stage, monkeypatch, pairs_file, llama_folder, out, "--steps", 3
        )
        ids = torch.tensor([common.encode_prompt(tokenizer, text)])
        with torch.no_grad():
            expected[stage.__name__] = model.eval()(input_ids=ids).logits.flatten().double()
    folders = json.dumps({name: str(tmp_path / name) for name in expected})
    run = subprocess.run(
        [sys.executable, "-c", FRESH, folders], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    for name, logits in json.loads(run.stdout).items():
        assert torch.allclose(torch.tensor(logits).double(), expected[name], atol=1e-6), name
        assert expected[name].abs().max() > 1e-3
    index = sorted(p.name for p in (tmp_path / "dpo").iterdir())
    assert [n for n in index if n.startswith(".")] == [], "nothing half-written stays behind"


# ---- E8: NaN in padding ----


@pytest.mark.parametrize("case", GENERIC)
def test_nan_in_padding_is_harmless(
    case, tmp_path, monkeypatch, llama_folder, reward_folder, other_folder
):
    """0 · NaN is NaN: a mask that multiplies lets whatever stands in the padding into loss and gradient. Here every
    hidden state of the padding is NaN; loss and gradient must be the same bits as without."""
    stage, model, flags, reference = start_of(case, llama_folder, reward_folder, other_folder)
    data = write_pairs(tmp_path / "pairs.jsonl", 8)
    with watched(monkeypatch, stage, reference=reference) as plain:
        train(stage, data, model, tmp_path / "plain", *flags)
    with watched(monkeypatch, stage, mask_nan=True, reference=reference) as poisoned:
        train(stage, data, model, tmp_path / "nan", *flags)
    assert poisoned["loss"] == plain["loss"]
    assert torch.equal(poisoned["gradient"], plain["gradient"])


# ---- the reference of dpo.py ----


def test_a_wrong_reference_is_refused(tmp_path, monkeypatch, llama_folder, pairs_file):
    """Log-probs of other rows (trl#885, #2423) look like log-probs. The preflight sees that the loss is not log 2, and
    refuses before --out is touched."""
    real = dpo.reference_logps
    monkeypatch.setattr(dpo, "reference_logps", lambda *args: real(*args).roll(1, dims=1))
    with pytest.raises(files.UserError, match="loss before step one is .*, expected 0.6931"):
        train(dpo, pairs_file, llama_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_reference_is_computed_once(tmp_path, monkeypatch, llama_folder, pairs_file):
    """Each of the 16 pairs passes once through the reference; a resumed run reads the very numbers of the first start from
    checkpoint/ (computed again by the trained policy they would all be wrong)."""
    real, calls = dpo.reference_logps, []
    monkeypatch.setattr(
        dpo, "reference_logps", lambda *args: calls.append(real(*args)) or calls[-1]
    )
    out, flags = tmp_path / "out", ("--steps", 4, "--lr", 1e-3)
    train(dpo, pairs_file, llama_folder, out, *flags, "--stop-after", 2)
    kept = torch.load(out / "checkpoint" / "reference.pt")
    assert len(calls) == 1 and kept.shape == (2, 16) and torch.equal(kept, calls[0])
    train(dpo, pairs_file, llama_folder, out, *flags, "--resume")
    assert len(calls) == 1


def weights_of(folder):
    return (Path(folder) / "model.safetensors").read_bytes()


# ---- the flags of a single stage ----


@pytest.mark.parametrize("loss_type", dpo.LOSS_TYPES)
def test_every_loss_type_learns(loss_type, tmp_path, llama_folder):
    """Each type through the whole stage, lengths and reference included: the margin it optimises must grow."""
    data = write_pairs(tmp_path / "pairs.jsonl", 16)
    flags = ("--steps", 8, "--lr", 3e-4, "--loss-type", loss_type, *CURE)
    rows = train(dpo, data, llama_folder, tmp_path / "out", *flags)
    margins, losses = steps(rows, "rewards/margins"), steps(rows, "loss")
    assert margins[-1] > margins[0] + 1e-3
    assert losses[-1] < losses[0]


def test_nll_term_is_per_token(tmp_path, llama_folder):
    """At step one the margin is 0, so the loss is log 2 + coef · (mean −log π of the chosen tokens), and that mean is the
    logged `nll`. A sum, or a mean per answer, gives another number. The default is 1 for sigmoid, 0 for the others."""
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
    """A tie says: equally good. As half a win for each it costs log 2 and has no gradient at equal scores; dropped (DPO's
    default), it is counted. A file of ties alone then holds no usable row."""
    ties = [{**row, "tie": True} for row in pair_rows(8)]
    only = write_rows(tmp_path / "ties.jsonl", ties)
    for stage, flags in ((reward_train, ()), (dpo, ("--ties", "soft", "--nll-coef", 0))):
        rows = train(stage, only, llama_folder, tmp_path / stage.__name__, *flags)
        assert steps(rows, "loss")[0] == pytest.approx(LOG2, abs=1e-6)
        assert steps(rows, "grad_norm")[0] < 1e-5
    assert steps(rows, "rewards/accuracies") == [0.5]
    for stage, flags in ((reward_train, ("--ties", "drop")), (dpo, ())):
        with pytest.raises(files.UserError, match=r"no usable row \(rows 8, dropped: tie 8\)"):
            train(stage, only, llama_folder, tmp_path / "none", *flags)
    mixed = write_rows(tmp_path / "mixed.jsonl", ties[:3] + pair_rows(8, seed=1))
    capsys.readouterr()
    train(dpo, mixed, llama_folder, tmp_path / "mixed")
    assert "rows 11, dropped: tie 3; training 8, held out 0" in capsys.readouterr().out


def test_reward_margin_column(tmp_path, llama_folder, capsys):
    """--margin strength asks chosen to win by that much: at equal scores the loss is −log σ(−m), for m = 0.5 · 2 that is
    1.3133. A column changes nothing unasked."""
    data = write_rows(tmp_path / "pairs.jsonl", [{**r, "strength": 2} for r in pair_rows(8)])
    flags = ("--margin", "strength", "--margin-scale", 0.5)
    rows = train(reward_train, data, llama_folder, tmp_path / "out", *flags)
    assert steps(rows, "loss")[0] == pytest.approx(1.3133, abs=1e-4)
    rows = train(reward_train, data, llama_folder, tmp_path / "plain")
    assert steps(rows, "loss")[0] == pytest.approx(LOG2, abs=1e-6)


def test_a_tokenizer_with_templates_by_name(tmp_path):
    """Some chat models bring a template for tools beside the default: `chat_template` is then a dict, and was an error."""
    named = {"default": CHATML, "tool_use": TEMPLATE}
    model = tiny_model("llama", tmp_path, tokenizer=tiny_tokenizer(template=named))
    plain = tiny_model("llama", tmp_path, tokenizer=tiny_tokenizer(template=CHATML))
    data = write_pairs(tmp_path / "pairs.jsonl", 8)
    for stage in PAIR_STAGES:
        found = [
            train(stage, data, m, tmp_path / f"{stage.__name__}{i}")
            for i, m in enumerate((model, plain))
        ]
        assert steps(found[0], "loss") == steps(found[1], "loss")
        assert steps(found[0], "tokens") == steps(found[1], "tokens")


def test_text_rows_end_once_and_are_cut_aloud(tmp_path, llama_folder, capsys):
    """A text that brings its end token had two; a tokenizer whose end only the template names had None, a TypeError; and
    what `--max-length` took from text and messages was in no count. "abcd" is 4 tokens and the end: 4 of them trained.
    """
    texts = [{"text": "abcd"}, {"text": "abcd<|end|>"}]
    endless = tiny_model("llama", tmp_path, tokenizer=tiny_tokenizer(eos=None))
    for i, model in enumerate((llama_folder, endless)):
        data = write_rows(tmp_path / "text.jsonl", texts)
        assert steps(train(sft, data, model, tmp_path / f"text{i}"), "trained_tokens") == [8]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 20}]
    rows = [*texts, {"text": "x y " * 20}, {"messages": turns}, {"messages": turns * 2}]
    train(
        sft,
        write_rows(tmp_path / "long.jsonl", rows),
        llama_folder,
        tmp_path / "cut",
        "--max-length",
        12,
    )
    assert "rows 5, rows cut 3; training 5" in capsys.readouterr().out


def test_sft_reads_its_four_forms(tmp_path, llama_folder, capsys):
    """prompt + completion, messages, text, and a preference file (its chosen): the same dialogue gives the same trained
    tokens in each form that holds it; of plain text all but the first token is trained."""
    row = pair_rows(1)[0]
    forms = {
        "completion": {"prompt": row["prompt"], "completion": row["chosen"]},
        "messages": {"messages": [*row["prompt"], *row["chosen"]]},
        "pair": row,
        "text": {"text": row["chosen"][0]["content"]},
    }
    seen = {}
    for name, form in forms.items():
        rows = train(
            sft, write_rows(tmp_path / f"{name}.jsonl", [form]), llama_folder, tmp_path / name
        )
        seen[name] = next(r for r in rows if "lr" in r)
    tokens = {name: (r["trained_tokens"], r["tokens"]) for name, r in seen.items()}
    assert tokens["completion"] == tokens["messages"] == tokens["pair"]
    assert len({seen[n]["loss"] for n in ("completion", "messages", "pair")}) == 1
    n = len(AutoTokenizer.from_pretrained(llama_folder).encode(forms["text"]["text"]))
    assert tokens["text"] == (n, n + 1)  # n tokens and the end; nothing predicts the first


# ---- LoRA ----


def in_peft(base, folder):
    from peft import PeftModel

    return PeftModel.from_pretrained(base, folder).eval()


@pytest.mark.parametrize("stage", STAGES, ids=lambda s: s.__name__)
def test_lora_trains_resumes_and_is_a_model(stage, tmp_path, monkeypatch, llama_folder, pairs_file):
    """--lora-rank 4: only A, B (and the score head) move. The merged folder in transformers, adapter/ in peft and adapter/
    in our own loader are the model in memory; the base's file is not touched; a run stopped and resumed ends in the same
    bits, and until its end holds no merged weights, which are as large as the base."""
    flags, out = ("--lora-rank", 4, "--steps", 4, "--lr", 1e-2, "--warmup", 0), tmp_path / "merged"
    before = weights_of(llama_folder)
    model, merged, tokenizer = trained_and_reloaded(
        stage, monkeypatch, pairs_file, llama_folder, out, *flags
    )
    assert weights_of(llama_folder) == before
    check_equal_logits(model, merged, tokenizer)
    moving = [n for n, w in model.named_parameters() if w.requires_grad]
    assert {n.rpartition(".lora_")[2] for n in moving if ".lora_" in n} == {"A.weight", "B.weight"}
    assert [n for n in moving if ".lora_" not in n] == (
        ["score.weight"] if stage is reward_train else []
    )
    assert not any("embed" in n or "lm_head" in n for n in moving)
    # adapter/ by peft and by ourselves
    head, kind = {}, AutoModelForCausalLM
    ours = common.load_policy
    if stage is reward_train:
        head = {"num_labels": 1, "pad_token_id": merged.config.pad_token_id}
        kind = AutoModelForSequenceClassification
        ours = partial(common.load_reward_model, tokenizer=tokenizer)
    peft = in_peft(kind.from_pretrained(llama_folder, **head), out / "adapter")
    check_equal_logits(model, peft, tokenizer)
    check_equal_logits(model, ours(str(out / "adapter"), trainable=False), tokenizer)
    # stopped after 2 of 4 steps and resumed
    again = tmp_path / "cut"
    train(stage, pairs_file, llama_folder, again, *flags, "--stop-after", 2)
    held = {"model.safetensors", "config.json", "adapter"} & {p.name for p in again.iterdir()}
    assert held == {"adapter"}
    train(stage, pairs_file, llama_folder, again, *flags, "--resume")
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (again / name).read_bytes() == (out / name).read_bytes()


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "opt"])
def test_lora_of_other_families_in_peft(family, tmp_path, monkeypatch, pairs_file):
    """GPT-2's linear layers are stored (in, out), GPT-NeoX has q, k and v in one: peft reads the same logits from adapter/."""
    base, out = tiny_model(family, tmp_path), tmp_path / "out"
    flags = ("--lora-rank", 2, "--steps", 2, "--lr", 1e-2)
    model, merged, tokenizer = trained_and_reloaded(sft, monkeypatch, pairs_file, base, out, *flags)
    check_equal_logits(model, merged, tokenizer)
    peft = in_peft(AutoModelForCausalLM.from_pretrained(base), out / "adapter")
    check_equal_logits(model, peft, tokenizer)


def test_precision_of_the_written_weights(tmp_path, pairs_file):
    """A merged LoRA is a new version of its checkpoint, so it has the checkpoint's precision: bf16 here. Full training
    writes fp32, for the updates are finer than bf16; --save-dtype decides for both."""
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


def test_an_overflowing_step_is_skipped_and_counted(
    tmp_path, monkeypatch, llama_folder, pairs_file
):
    """fp16: at a scale of 2^22 the gradients overflow. The step is skipped, which leaves the weights alone, and counted;
    the scale halves until one passes. At 2^60 seventeen halvings are not enough: the run stops and names its rows."""
    real, logs = torch.amp.GradScaler, {}
    flags = ("--dtype", "fp16", "--batch-size", 16, "--steps", 18, "--lr", 1e-2, *CURE)
    for scale, out in ((2.0**22, tmp_path / "some"), (2.0**60, tmp_path / "all")):
        with monkeypatch.context() as patch:
            patch.setattr(torch.amp, "GradScaler", lambda d, s=scale: real(d, init_scale=s))
            argv = command(sft, pairs_file, llama_folder, out, *flags)
            if scale == 2.0**22:
                sft.main(argv)
            else:
                with pytest.raises(files.UserError, match="not finite; rows .*pairs.jsonl:"):
                    sft.main(argv)
        rows = read(out / "metrics.jsonl")
        logs[scale] = steps(rows, "skipped_steps"), steps(rows, "loss"), steps(rows, "lr")
    skipped, losses, lr = logs[2.0**22]
    n = sum(skipped)
    assert 2 < n < 17 and skipped == [1] * n + [0] * (18 - n)
    assert losses[: n + 1] == pytest.approx(losses[:1] * (n + 1), rel=1e-3), "the same weights"
    assert losses[-1] < losses[0] - 0.05
    assert len(lr) == 18, "a skipped step is a step of the schedule"
    assert logs[2.0**60][0] == [1] * 16


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("stage", PAIR_STAGES)
def test_a_last_step_that_breaks_the_weights_is_seen(
    stage, family, tmp_path, monkeypatch, pairs_file, capsys
):
    """A broken step shows in the loss of the next; behind the last one there is none, and NaN weights would be saved as the
    result. GPT-2: the last position alone is NaN, which no row here reads, so loss, evaluation and any short probe are
    finite. One line, status 2, and the folder still holds the start."""
    real = runs.Run.update

    def breaks(run, where):
        found = real(run, where)
        trunk = run.model.base_model
        weight = trunk.wpe.weight.data[-1] if family == "gpt2" else trunk.embed_tokens.weight.data
        weight.fill_(math.nan)
        return found

    monkeypatch.setattr(runs.Run, "update", breaks)
    monkeypatch.setattr(stage, "evaluate", lambda *args: ({}, []))
    model, out = tiny_model(family, tmp_path / "models"), tmp_path / "run"
    argv = command(stage, pairs_file, model, out, "--lr", 1e-3)
    with pytest.raises(SystemExit) as stop:
        files.command(lambda: stage.main(argv))
    said = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and said.startswith("error: --lr: the weights are"), said
    assert "no longer finite; lower it" in said
    assert all(w.isfinite().all() for w in load_file(out / "model.safetensors").values())


def test_lora_reference_is_the_start(tmp_path, monkeypatch, llama_folder, pairs_file):
    """With LoRA the reference is the same model with the adapter off: after training it must still be the base to the
    last bit, and the KL measured against it equal the KL against the base loaded from its folder."""
    prompts = write_rows(
        tmp_path / "prompts.jsonl", [{"prompt": r["prompt"]} for r in pair_rows(6)]
    )
    flags = ("--lora-rank", 4, "--steps", 6, "--lr", 3e-3, "--prompts", prompts, *CURE)
    real, kl = dpo.kl_to_reference, []

    def both(args, *rest):  # without the rank it loads args.model
        kl.append([real(a, *rest) for a in (args, Namespace(**{**vars(args), "lora_rank": 0}))])
        return kl[-1][0]

    monkeypatch.setattr(dpo, "kl_to_reference", both)
    rows, model = saved_model(monkeypatch, dpo, pairs_file, llama_folder, tmp_path / "out", *flags)
    model, base = model.eval(), AutoModelForCausalLM.from_pretrained(llama_folder).eval()
    ids = torch.tensor([[5, 70, 71, 80]])
    with torch.no_grad():
        with lora.adapter_off(model):
            assert torch.equal(model(input_ids=ids).logits, base(input_ids=ids).logits)
        assert not torch.allclose(
            model(input_ids=ids).logits, base(input_ids=ids).logits, atol=1e-2
        )
    (first, also_first), (last, also_last) = kl
    assert [r["val/kl"] for r in rows if "val/kl" in r] == [first, last]
    assert (first, last) == pytest.approx((also_first, also_last), abs=1e-4)
    assert first == pytest.approx(0, abs=1e-4) and last > 0.01


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("stage", STAGES, ids=lambda s: s.__name__)
def test_gradient_checkpointing_is_exact(
    stage, lora, tmp_path, monkeypatch, llama_folder, pairs_file
):
    """--grad-checkpoint must trade time for memory and nothing else: the same gradient, none missing. It sleeps in eval
    mode, and with frozen weights under it the blocks get no gradient at all unless the inputs ask for one."""
    model = common.load_policy(llama_folder)
    calls = []
    part = type(model.base_model.layers[0].mlp)  # inside the block, which itself is wrapped
    real, seen = part.forward, []
    for flag in ((), ("--grad-checkpoint",)):
        calls.clear()
        flags = ("--lora-rank", lora, *flag)
        with monkeypatch.context() as patch, watched(monkeypatch, stage) as run:
            patch.setattr(
                part,
                "forward",
                lambda *a, **k: calls.append(torch.is_grad_enabled()) or real(*a, **k),
            )
            train(stage, pairs_file, llama_folder, tmp_path / f"out{len(flag)}", *flags)
        seen.append((run["gradient"], sum(calls)))
    assert seen[1][1] == 2 * seen[0][1], "each block runs again in the backward"
    assert len(seen[0][0]) == len(seen[1][0])
    assert gap(seen[1][0], seen[0][0]) < 1e-6


# ---- scores of sample answers, the log, --config ----

GOLD = '''
def score(prompts, answers, rows):
    """The share of vowels: any number that depends on the text, and None for an empty answer."""
    assert [row["prompt"] for row in rows] == prompts and len({row["note"] for row in rows}) == 6
    return [sum(c in "aeiou" for c in a) / len(a) if a else None for a in answers]
'''


def test_prompts_gold_and_reward_model(
    tmp_path, monkeypatch, llama_folder, reward_folder, pairs_file
):
    """val/gold and val/score must be the functions' means over the answers to --prompts, with the row beside each answer,
    and val/kl the KL to the reference: 0 before the first step, positive after."""
    rows = [{"prompt": r["prompt"], "note": f"n{i}"} for i, r in enumerate(pair_rows(6))]
    prompts, gold = write_rows(tmp_path / "prompts.jsonl", rows), tmp_path / "gold.py"
    gold.write_text(GOLD)
    flags = ("--prompts", prompts, "--gold", f"{gold}:score", "--max-new-tokens", 12, "--lr", 1e-2)
    flags += ("--warmup", 0, "--steps", 2)
    model = common.load_policy(llama_folder, trainable=False)
    tokenizer = common.load_tokenizer(llama_folder)
    asked = [r["prompt"] for r in runs.some_prompts(rows, 64)]
    answers = common.sample(model, tokenizer, asked, max_new_tokens=12, seed=0).texts
    shares = [sum(c in "aeiou" for c in a) / len(a) for a in answers if a]
    expected = sum(shares) / len(shares)
    logged = train(
        dpo, pairs_file, llama_folder, tmp_path / "dpo", *flags, "--reward-model", reward_folder
    )
    first, last = (r for r in logged if "val/gold" in r)
    assert first["val/gold"] == pytest.approx(expected)
    scores = common.reward_function(reward_folder)(asked, answers)
    assert first["val/score"] == pytest.approx(sum(scores) / len(scores), rel=1e-5)
    assert first["val/kl"] == pytest.approx(0, abs=1e-4) and last["val/kl"] > 1e-3
    samples = read(tmp_path / "dpo" / "samples.jsonl")
    assert samples[0]["step"] == 0 and samples[0]["answer"] == answers[0]
    logged = train(sft, pairs_file, llama_folder, tmp_path / "sft", *flags)
    assert next(r for r in logged if "val/gold" in r)["val/gold"] == pytest.approx(expected)


@pytest.mark.parametrize("stage", PAIR_STAGES, ids=lambda s: s.__name__)
def test_log_and_folder_are_complete(stage, tmp_path, llama_folder, pairs_file, capsys):
    """Ten rows in batches of four are three steps an epoch, the last over two: no row is lost. One row a step, the
    learning rate of the optimiser itself, evaluations before, between and after, and the headline before and after."""
    data = write_pairs(tmp_path / "ten.jsonl", 10)
    held = write_pairs(tmp_path / "held.jsonl", 6, seed=9)
    flags = ["--batch-size", 4, "--epochs", 2, "--schedule", "linear", "--warmup", 0, "--lr", 1e-3]
    flags += ["--eval-every", 3]
    argv = command(stage, data, llama_folder, tmp_path / "out", *flags)
    argv += ["--eval-fraction", "0.3"] if stage is sft else ["--eval-pairs", held]
    del argv[argv.index("--steps") : argv.index("--steps") + 2]
    assert not stage.main(argv)
    rows = read(tmp_path / "out" / "metrics.jsonl")
    n = int(capsys.readouterr().out.partition("training ")[2].split(",")[0])
    assert n == 10 or stage is sft
    plan = 2 * math.ceil(n / 4)
    assert [r["step"] for r in rows if "lr" in r] == list(range(1, plan + 1))
    assert steps(rows, "lr") == pytest.approx([1e-3 * (1 - i / plan) for i in range(plan)])
    assert [r["step"] for r in rows if "eval/loss" in r] == sorted(
        {0, 3, 6, plan} & set(range(plan + 1))
    )
    assert sum(steps(rows, "tokens")[: plan // 2]) == sum(steps(rows, "tokens")[plan // 2 :])
    answers = (
        tmp_path / "out" / "samples.jsonl"
    ).exists()  # a reward model gives none: no file, not an empty one
    assert answers == (stage is not reward_train)
    for row in rows:
        assert {"step", "time_s", "peak_mem_mb"} <= row.keys()


# ---- what a user types first, and sees ----


@pytest.mark.parametrize("stage", PAIR_STAGES, ids=lambda s: s.__name__)
def test_the_screen(stage, tmp_path, capfd):
    """At most 24 lines before the bar and ten after it, none beyond 400 characters, however long the rows are; the last show
    one prompt, its answer before and after, and the score before and after. DPO without --epochs makes 24 steps of a small
    file: 32 pairs in batches of 8 are 4 a pass, so 6 passes; two passes would end as it began."""
    rows = pair_rows(32)
    for row in rows:
        row["prompt"][0]["content"] *= 5
        row["chosen"][0]["content"] *= 2
    data = write_rows(tmp_path / "pairs.jsonl", rows)
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": r["prompt"]} for r in rows[:3]])
    model, out = tiny_model("llama", tmp_path, max_position_embeddings=1024), tmp_path / "out"
    argv = command(stage, data, model, out, "--max-new-tokens", 200, "--lr", 3e-4)
    del argv[argv.index("--steps") : argv.index("--steps") + 2]
    if stage is reward_train:
        del argv[argv.index("--max-new-tokens") : argv.index("--max-new-tokens") + 2]
    else:
        argv += ["--prompts", prompts, "--gold", REWARD_FN]
    argv += ["--eval-pairs", data] if stage is reward_train else []
    assert stage.main(argv) == 0
    said = capfd.readouterr()
    lines = said.out.splitlines()
    assert said.err == "" and all(len(line) <= 400 for line in lines), said
    before = 1 + next(i for i, line in enumerate(lines) if line.startswith("step 0: "))
    after = 1 + max(i for i, line in enumerate(lines) if re.match(r"step \d+: ", line))
    assert before <= 24 and len(lines) - after <= 10, said.out
    end, log = lines[after:], read(out / "metrics.jsonl")
    assert len(steps(log, "lr")) == {dpo: 24}.get(stage, math.ceil(32 / 8))
    for key in stage.HEADLINE:
        values = [row[key] for row in log if row.get(key) is not None]
        shown = [line.split() for line in end if line.startswith(f"{key} ")]
        assert shown == ([[key, "before", f"{values[0]:.4f}", "after", f"{values[-1]:.4f}"]] if values else [])  # fmt: skip
    assert any(line.startswith(f"wrote {out}") for line in end) and end[-1].startswith(
        "next: python"
    )
    if stage is not reward_train:
        assert any(line.startswith("val/gold ") for line in end)
        kept = read(out / "samples.jsonl")
        kept = [row for row in kept if row["prompt"] == kept[0]["prompt"]]
        shown = {k: next(line.split(maxsplit=1)[1] for line in end if line.startswith(k)) for k in ("prompt", "before", "after")}  # fmt: skip
        beginnings = [" ".join(kept[i]["answer"].split())[:100] for i in (0, -1)]
        assert shown["before"].startswith(beginnings[0]) and shown["after"].startswith(
            beginnings[1]
        )
        assert shown["prompt"].removeprefix("… ") in " ".join(kept[0]["prompt"].split())
        assert beginnings[0] != beginnings[1], (
            "an answer that training left as it was shows nothing"
        )


SHARED = ["common.py", "parts"]
GRADED = [*SHARED, "watch.py", "judge.py", "checks"]
COPIES = {  # what is copied, and the flags beside --model, --out and --steps
    "sft": (SHARED, "--data mine.jsonl --max-new-tokens 4"),
    "reward_train": (SHARED, "--pairs mine.jsonl"),
    "dpo": (SHARED, "--pairs mine.jsonl --max-new-tokens 4"),
    "ppo": ([*SHARED, "watch.py"], "--prompts mine.jsonl --reward-fn mine.py:score --rollouts 8 --max-new-tokens 4"),
    # the recipe's own line: its rank is 32
    "grpo_rubric": (GRADED, "data_path=rubrics.json group_size=2 groups_per_batch=2 max_tokens=4"),
    "grpo_agent": ([*GRADED, "grpo_rubric.py"], "--env mine.py:Guess --group-size 2 --groups-per-batch 2 --val-episodes 2 --test-episodes 2 --max-new-tokens 4"),
}  # fmt: skip
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


@pytest.mark.parametrize("stage", COPIES)
def test_a_copy_trains_on_a_users_file(stage, tmp_path):
    """Who copies one script with what it imports has a trainer: no file of data/, no other stage, nothing installed."""
    copied, flags = COPIES[stage]
    home = tmp_path / "copy"
    home.mkdir()
    for name in (f"{stage}.py", *copied):
        tree = (REPO / name).is_dir()
        (shutil.copytree if tree else shutil.copy)(REPO / name, home / name)
    write_pairs(home / "mine.jsonl")
    (home / "mine.py").write_text(MINE, encoding="utf-8")
    rows = [{"task_id": str(i), "prompt": f"Say a, {i}.", "rubrics": [{"check": "regex:match", "pattern": "a"}]} for i in range(10)]  # fmt: skip
    (home / "rubrics.json").write_text(json.dumps(rows), encoding="utf-8")
    model = Path(tiny_model("llama", home)).name
    argv = [
        f"{stage}.py",
        *flags.split(),
        "--model",
        model,
        "--out",
        "run",
        "--steps",
        "2",
        "--device",
        "cpu",
    ]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run([sys.executable, *argv], cwd=home, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert len([row for row in read(home / "run" / "metrics.jsonl") if "grad_norm" in row]) == 2
    assert (home / "run" / "model.safetensors").is_file()
    assert (home / "run" / "adapter").is_dir() == (stage == "grpo_rubric")
    assert str(REPO) not in run.stdout + run.stderr


@pytest.mark.parametrize("stage, flag", [(sft, "--data"), (dpo, "--pairs")])
def test_bundled_data_brings_its_prompts_and_score(stage, flag, monkeypatch):
    """The command on the card must show what was learnt: bundled files alone get the bundled prompts and the recruiter. With
    a file of the user's own the recruiter's score would say nothing."""
    monkeypatch.chdir(REPO)
    theirs = ("data/prompts.jsonl", "data/recruiter.py:reward")

    def found(*argv):
        args = stage.parse_args(list(argv))
        return args.prompts, args.gold

    assert found() == found(flag, "data/prefs.jsonl") == theirs
    assert found(flag, "mine.jsonl") == found(flag, "data/prefs.jsonl", "mine.jsonl") == (None,) * 2
    assert found(flag, "data/prefs.jsonl", "--prompts", "mine.jsonl") == ("mine.jsonl", None)
    assert found(flag, "data/prefs.jsonl", "--gold", "my.py:f") == (theirs[0], "my.py:f")


@pytest.mark.parametrize("stage, most", [(sft, 30), (reward_train, 32), (dpo, 36), (ppo, 44)])
def test_help(stage, most, monkeypatch, capsys):
    """--help: an example that parses, the stage's own flags explained, the 22 shared ones by name, under 60 lines of 100
    columns. --help-all explains every flag."""
    monkeypatch.setenv("COLUMNS", "100")
    made, real = [], runs.Parser.parse_args
    monkeypatch.setattr(
        runs.Parser, "parse_args", lambda p, argv=None: made.append(p) or real(p, argv)
    )

    def shown(flag):
        with pytest.raises(SystemExit) as stop:
            stage.parse_args([flag])
        assert stop.value.code == 0
        return capsys.readouterr().out

    brief, full = shown("--help"), shown("--help-all")
    assert brief.startswith(f"usage: python {stage.__name__}.py --")
    stage.parse_args(brief.splitlines()[0].split()[3:])
    assert len(brief.splitlines()) < 60 and max(map(len, brief.splitlines())) <= 100
    group = next(g for g in made[0]._action_groups if g.title == "flags of all trainers")
    shared = [action.option_strings[0] for action in group._group_actions]
    own = [a.option_strings[-1] for a in made[0]._actions if a.option_strings[-1] not in shared]
    own = [name for name in own if not name.startswith("--help")]
    assert len(shared) == 22 and len(own) + 22 <= most
    watched = [name for name in own if re.search(rf"\(watch.py\): .*{name}\b", brief)]
    explained = lambda text: re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)  # noqa: E731
    assert explained(brief) == ["--help-all", *(name for name in own if name not in watched)]
    assert " ".join(shared) in " ".join(brief.rpartition("flags of all")[2].split())
    assert sorted(explained(full)) == sorted(["--help-all", *own, *shared])


def read_args(folder):
    return json.loads((folder / "args.json").read_text(encoding="utf-8"))["args"]
