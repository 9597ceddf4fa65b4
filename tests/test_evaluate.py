"""evaluate.py: is a difference real, and is every number the number it says it is?"""

import json
import math
import os
import random
import shutil
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import common
import evaluate
import tiny
from evaluate import (
    bon_curve,
    calibration,
    compare_outcomes,
    distinct_n,
    length_controlled,
    outcomes,
    score_answers,
    verdict,
)
from parts import files, pages
from parts.files import UserError
from parts.stats import bootstrap_ci, mean_number, number, wilson

NAN = math.nan
REPO = Path(evaluate.__file__).parent

# ---- statistics ----


def test_bootstrap_covers():
    """60 prompts of 4 answers, prompt effect three times the answer's noise: the 95 % interval
    covers in 92 to 98 %. If answers are resampled instead of prompts it covers in about 70 %: the
    same data without clusters shows it."""
    rng, covered, naive = np.random.default_rng(0), 0, 0
    prompts = np.repeat(np.arange(60), 4)
    for trial in range(500):
        values = rng.normal(0, 3, 60)[prompts] + rng.normal(0, 1, 240)
        low, high = bootstrap_ci(values, prompts, draws=300, seed=trial)
        covered += low <= 0 <= high
        if trial < 100:
            low, high = bootstrap_ci(values, draws=200, seed=trial)
            naive += low <= 0 <= high
    assert 0.92 <= covered / 500 <= 0.98 and naive / 100 < 0.85


def test_bootstrap_by_hand():
    """Three annotators who differ give a wide interval however many items they share; equal seeds,
    equal intervals; constants give a point; one cluster gives None and no false point."""
    items, people = np.repeat(np.arange(100), 3), np.tile(np.arange(3), 100)
    votes = np.array([0.2, 0.5, 0.8])[people]
    assert bootstrap_ci(votes, items, seed=1) == pytest.approx((0.5, 0.5))
    low, high = bootstrap_ci(votes, items, people, seed=1)
    assert low < 0.35 and high > 0.65
    values = np.random.default_rng(3).normal(size=50)
    one, again, other = (bootstrap_ci(values, seed=seed) for seed in (5, 5, 6))
    assert one == again != other
    assert bootstrap_ci([0.1] * 7, [1, 1, 2, 2, 3, 3, 3]) == (0.1, 0.1)
    assert bootstrap_ci([]) is None and bootstrap_ci([1.0, 2.0], ["p", "p"]) is None
    wide, narrow = bootstrap_ci(values, level=0.99), bootstrap_ci(values, level=0.8)
    assert wide[0] < narrow[0] < values.mean() < narrow[1] < wide[1]


def test_numbers_carry_their_n():
    """No NaN reaches the report: null with a reason. One prompt has a mean and no interval, and no
    "±0" is claimed."""
    assert number(NAN, 0) == {"value": None, "n": 0, "reason": "nothing to measure"}
    one = mean_number([[0.2, 0.4]], seed=0)
    assert one["value"] == pytest.approx(0.3) and one["low"] is None
    assert "fewer than two" in one["reason"]
    assert mean_number([NAN], seed=0)["value"] is None
    full = mean_number([[0.0, 1.0], [NAN, 1.0]], seed=3)
    assert (full["value"], full["n"], full["seed"]) == (pytest.approx(2 / 3, abs=1e-6), 3, 3)


LENGTHS = [20, -20, 50, -10, 100, -40, 10, 30, -5, 70, -30, 40]
SECOND = [1, 0, 1, 0.5, 1, 0, 1, 1, 0, 1, 0, 0]


def test_length_controlled_goldens():
    """Twelve comparisons: raw .625 is .61287 at equal length; raw .54167 hides a loss, .38058.
    Equal lengths: the raw rate. All won: large and finite. A weight of 2 equals the row written
    twice."""
    first = [1, 1, 1, 0.5, 0, 0, 1, 1, 0, 1, 1, 0]
    assert length_controlled(first, LENGTHS) == pytest.approx(0.61287, abs=5e-6)
    assert length_controlled(SECOND, LENGTHS) == pytest.approx(0.38058, abs=5e-6)
    assert length_controlled([1, 0, 1, 1], [0] * 4) == 0.75
    assert 0.9 < length_controlled([1] * 40, range(-20, 20)) < 1
    twice = length_controlled([1, 0, 0.5, 1], [1, 5, -2, 1])
    assert length_controlled([1, 0, 0.5], [1, 5, -2], weights=[2, 1, 1]) == pytest.approx(twice)


def test_bon_curve_is_brute_force():
    """For N = 6 each point is the mean over all subsets, a tie in the proxy drawn by lot; n = 1 is
    the plain mean; a constant proxy chooses nothing."""
    rng = np.random.default_rng(1)
    for _ in range(5):
        proxy, gold = rng.integers(0, 4, 6).astype(float), rng.normal(size=6)
        curve = bon_curve(proxy, gold)
        for n in range(1, 7):
            best = []
            for subset in map(list, combinations(range(6), n)):
                top = proxy[subset] == proxy[subset].max()
                best.append(gold[subset][top].mean())
            assert curve[n - 1] == pytest.approx(np.mean(best), abs=1e-12)
    assert bon_curve([5, 1, 7, 2], [0.1, 0.9, 0.4, 0.2])[[0, 3]] == pytest.approx([0.4, 0.4])
    assert bon_curve([1] * 4, [0.1, 0.9, 0.4, 0.2]) == pytest.approx([0.4] * 4)


def test_distinct_n():
    """A model that says more must not look more repetitive: only the first `budget` tokens count,
    and no pair crosses two answers."""
    assert distinct_n([list("ab"), list("ab")], 2, 4) == 0.5  # no "ba"
    assert distinct_n([list("abc"), list("aaaa")], 1, 3) == 1.0
    assert distinct_n([list("abab")], 2, 4) == pytest.approx(2 / 3)
    assert distinct_n([], 1, 10) is None


def test_calibration():
    """Worked by hand: of Δ = 2, −.5, −.2, 0 one is right and one half. A constant model has NLL log
    2 and no error; a sure one that is wrong in half of its pairs an error of ½, with no
    overflow."""
    found = calibration([2, -0.5, -0.2, 0])
    assert (found["nll"], found["ece"]) == pytest.approx((0.6480727613, 0.3228740626), abs=1e-10)
    constant = calibration(np.zeros(5))
    assert (constant["nll"], constant["ece"]) == (pytest.approx(math.log(2)), 0)
    assert calibration([800.0, -800.0])["ece"] == 0.5


# ---- what a comparison says ----


def compared(a, b, lengths=7):
    """A against B, both (P, G), as `comparisons` hands them on; B's answers have 7 tokens."""
    y = outcomes(a, b)
    delta = np.broadcast_to(np.reshape(np.asarray(lengths) - 7, (-1, 1, 1)), y.shape)
    return compare_outcomes(y.ravel(), np.arange(len(y)).repeat(y[0].size), delta.ravel(), 0)


def test_win_rates_by_hand():
    """Prompts count alike: one win of one and one of four give (1 + ¼)/2. Against itself a model
    has ½ exactly. An unscored answer is no loss, and a prompt without a score no ½."""
    assert compared([[1, NAN], [3, 0]], [[0, NAN], [2, 4]])["win_rate"]["value"] == 0.625
    scores = np.random.default_rng(0).random((30, 4)).round(1)
    scores[3, 1] = scores[5] = NAN
    row = compared(scores, scores)
    assert (row["win_rate"]["value"], row["win_rate"]["n"]) == (0.5, 29)
    assert row["length_controlled"]["value"] == row["length_controlled"]["low"] == 0.5
    assert (row["p"], row["needed_n"]) == (1.0, None)
    assert compared([NAN], [1.0])["win_rate"]["value"] is None


@pytest.mark.parametrize("wins, word", [(60, "inconclusive"), (65, "better"), (35, "worse")])
def test_verdicts(wins, word):
    """60 of 100 excludes ½ by its interval (.502) and fails the exact test (.0569)."""
    row = compared([[1.0]] * wins + [[0.0]] * (100 - wins), [[0.5]] * 100)
    assert verdict(row["win_rate"], row["p"]) == word and row["win_rate"]["method"] == "wilson"
    assert (row["win_rate"]["low"], row["win_rate"]["high"]) == pytest.approx(wilson(wins, 100), abs=1e-6)  # fmt: skip


def test_verdicts_ask_for_both():
    """3 prompts of 3 have a bootstrap interval of [1, 1] and no significance; a significant p with
    an interval around ½ decides nothing either; of nothing there is no verdict."""
    few = compared([[1.0, 1.0]] * 3, [[0.0, 0.0]] * 3)
    assert (few["win_rate"]["low"], few["p"]) == (1.0, 0.25)
    for rate, p in ((few["win_rate"], 0.25), (number(0.6, 9, (0.4, 0.7)), 0.01), (number(None, 0), 0)):  # fmt: skip
        assert verdict(rate, p) == "inconclusive"


def test_answers_to_one_prompt_are_one_vote():
    """Ten prompts of 40 answers, 7 won entirely: as 400 independent answers this would be 70 %
    [.65, .74]; ten prompts cannot tell it from ½."""
    row = compared([[1.0] * 40] * 7 + [[0.0] * 40] * 3, [[0.5]] * 10)
    assert row["win_rate"]["value"] == 0.7 and row["win_rate"]["low"] < 0.5
    assert row["p"] == pytest.approx(0.34375)


def test_several_comparisons_are_adjusted():
    """Two differences of 20 to 7 prompts, p = .0192, in a table of three: Holm makes the smallest
    .0576, inconclusive."""
    wins = np.array([[1.0]] * 20 + [[-1.0]] * 7)
    scores = {"base": 0 * wins, "a": wins, "b": wins}
    models = {name: answers_of(gold=x, length=np.full((27, 1), 5)) for name, x in scores.items()}
    table = evaluate.comparisons(models, "gold", seed=0)
    assert [(row["a"], row["b"]) for row in table] == [("a", "base"), ("b", "base"), ("b", "a")]
    assert table[0]["p"] == pytest.approx(0.0192, abs=5e-5)
    assert verdict(table[0]["win_rate"], table[0]["p"]) == "better"
    assert table[0]["p_holm"] == pytest.approx(3 * table[0]["p"]) and table[2]["p_holm"] == 1.0
    assert [row["verdict"] for row in table] == ["inconclusive"] * 3


def answers_of(**columns):
    """The answers of a model, (P, G) rows of samples.jsonl, from a (P, G) table per key."""
    cells = zip(*(np.asarray(table).ravel().tolist() for table in columns.values()))
    rows = np.array([dict(zip(columns, cell)) for cell in cells], object)
    return rows.reshape(np.shape(next(iter(columns.values()))))


def test_equal_answers_tie_exactly():
    """A text is scored once per prompt, whoever gave it, so that rounding in another batch decides
    no win; .1 + .2 and .3 tie. None is no 0: it is left out of mean and n."""
    texts = [["x", "x"], ["y", "z"]], [["y", "x"], ["x", "y"]]
    seen, models = [], [answers_of(response=table) for table in texts]

    def scorer(prompts, texts, rows):
        seen.extend(zip(prompts, texts))
        known = {"x": 0.1 + 0.2, "y": 0.3}
        pairs = zip(prompts, texts)
        return [known[text] + (prompt == "q") if text in known else None for prompt, text in pairs]

    score_answers(models, "gold", "--gold f", scorer, [{"prompt": "p"}, {"prompt": "q"}])
    assert seen == [("p", "x"), ("q", "y"), ("q", "z"), ("p", "y"), ("q", "x")]
    a, b = (evaluate.column(answers, "gold") for answers in models)
    assert (outcomes(a, b)[0] == 0.5).all() and b[1] == pytest.approx([1.3, 1.3])  # of its prompt
    assert mean_number(a, 0)["n"] == 3 and np.isnan(a[1, 1])


BAD_GOLD = {
    "expected 3 finite numbers": [lambda p, t, r: [1.0], lambda p, t, r: [0.0, math.inf, 0.0]],
    "TypeError": [lambda p, t, r: None, lambda p, t: [0.0] * 3],
    "ValueError": [lambda p, t, r: ["good"] * 3],
}


@pytest.mark.parametrize("message, function", [(m, f) for m, fs in BAD_GOLD.items() for f in fs])
def test_a_bad_gold_function_is_one_line(function, message):
    """Somebody else's function returns too few scores, nothing, inf or words: flag and reason, no
    traceback."""
    with pytest.raises(UserError, match=message) as error:
        models = [answers_of(response=[["a", "b", "c"]])]
        score_answers(models, "gold", "--gold f", function, [{"prompt": "p"}])
    assert str(error.value).startswith("--gold f: ") and "\n" not in str(error.value)


# ---- the command, on tiny random models ----

PAYLOADS = [
    "<img src=x onerror=window.__xss=1>",
    "</script><script>window.__xss=1</script>",
    '"><a href="javascript:window.__xss=1">x</a>',
    "<iframe srcdoc='<script>parent.__xss=1</script>'></iframe>",
    "<style>@import url(http://127.0.0.1:9/x.css)</style>",
    "\u202etxt.exe {{7*7}} {% raw %} &amp;",
]


def run_folder(folder, base, seed, gold, **args):
    """The baseline's weights with a little noise, the record of a trainer and the log of a run."""
    shutil.copytree(base, folder)
    torch.manual_seed(seed + 1)
    file = str(folder / "model.safetensors")
    weights = {k: v + 0.01 * torch.randn_like(v) for k, v in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    record = {"args": {"model": base, "seed": seed, "prompts": "val.jsonl"} | args}
    record |= {"sha256": {"val.jsonl": "0" * 64}}
    (folder / "args.json").write_text(json.dumps(record))
    rows = []
    for i, g in enumerate(gold):
        rows.append({"step": i, "loss": 0.1, "episodes": 8, "answer_tokens": 80, "time_s": 1.0})
        value = {"val/gold": g, "val/score": float(i), "val/kl": 0.25 * i * i}
        rows.append({"step": i} | value | {"time_s": 9.0})
    tiny.write_rows(folder / "metrics.jsonl", rows)
    return str(folder)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A baseline, PPO twice (once driven too far), a DPO run, a reward model, prompts with hostile
    text, a gold function."""
    folder = tmp_path_factory.mktemp("world")
    base, rm = tiny.tiny_model("llama", folder), tiny.tiny_reward_model("llama", folder / "rm")
    good, bad = [0.4, 0.5, 0.6, 0.62, 0.65, 0.66], [0.4, 0.55, 0.7, 0.6, 0.5, 0.3]
    rows = []
    for i, row in enumerate(tiny.pair_rows(18)):
        text = row["prompt"][0]["content"] + PAYLOADS[i % 6]
        row = {"id": f"p{i} {PAYLOADS[i % 6]}", "prompt": [{"role": "user", "content": text}]}
        row |= {"task": ["assess", "summary"][i % 2], "split": ["test", "val", "test"][i % 3]}
        rows.append(row | {"shown": ["sql"], "must_have": ["sql"], "expected_decision": "hold"})
    gold = "def score(prompts, answers, rows=None):\n    return [len(set(a)) / (1 + len(a)) for a in answers]\n"  # fmt: skip
    (folder / "gold.py").write_text(gold)
    return {
        "base": base,
        "ppo": run_folder(folder / "ppo", base, 0, good, reward_model=rm),
        "over": run_folder(folder / "over", base, 1, bad, reward_model=rm),
        "dpo": run_folder(folder / "dpo", base, 2, good[:3], pairs=["x"], batch_size=4),
        "rm": rm,
        "prompts": tiny.write_rows(folder / "prompts.jsonl", rows),
        "gold": f"{folder / 'gold.py'}:score",
    }


def command(world, out, *more, models=("base", "dpo")):
    argv = ["--model", *(world[name] for name in models), "--reward-model", world["rm"]]
    argv += ["--gold", world["gold"], "--prompts", world["prompts"], "--device", "cpu"]
    argv += ["--bon", "4", "--samples", "2", "--max-new-tokens", "10", "--out", str(out)]
    return [*argv, *more]


SMALL = ("--n", "4", "--bon", "0")


@pytest.fixture(scope="module")
def written(world, tmp_path_factory):
    """One report of everything; at temperature .5, so that a KL at temperature 1 is another
    number."""
    out = tmp_path_factory.mktemp("report") / "out"
    models = ("base", "ppo", "over", "dpo")
    evaluate.main(command(world, out, "--temperature", "0.5", models=models))
    return out


def report_of(out):
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


def samples_of(out):
    return list(files.read_jsonl(out / "samples.jsonl"))


def leaves(value):
    """Every number record of a report."""
    if isinstance(value, dict) and "value" in value:
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)


RECALL = "skill recall", "skill precision"


def test_every_number_says_how_it_was_made(written):
    """Each has n; one with a value has an interval and its method, or a reason why not. Best of 4
    stands at its bound, log 4 − ¾ = .6363."""
    report = report_of(written)
    found = list(leaves(report))
    for each in found:
        assert each["n"] >= 0 and (each["value"] is None or each["method"])
        assert each.get("low") is not None or each["reason"]
    base, *_, dpo, best = report["models"]
    assert len(found) > 50 and base["kl"]["value"] == 0 and dpo["kl"]["n"] == 24
    assert best["kl"]["value"] == pytest.approx(math.log(4) - 3 / 4, abs=1e-6)
    assert [point["n"] for point in report["best_of_n"]] == [1, 2, 4]
    assert best["proxy"]["value"] == report["best_of_n"][-1]["proxy"]["value"]
    assert report["setup"]["n_prompts"] == 12 and len(report["setup"]["sha256"]) == 7
    assert len(report["comparisons"]) == 2 * 10
    assert {row["metric"] for row in report["tasks"]} == {"gold", "decision", *RECALL}


def test_numbers_are_those_of_the_samples(written, world):
    """A second way: scores by hand and by the reward model, averaged here; one win rate from every
    pair of answers. The answers of best of 4 are draws of their own: one that met itself would
    tie."""
    rows, report, parts = samples_of(written), report_of(written), {}
    for row in rows:
        many = row["model"] == world["base"] and len(parts.get(row["model"], ())) == 24
        parts.setdefault("pool" if many else row["model"], []).append(row)
        by_hand = len(set(row["response"])) / (1 + len(row["response"]))
        assert row["gold"] == pytest.approx(by_hand, abs=1e-6)
    base, ppo, _, _, pool = parts.values()
    assert [len(part) for part in parts.values()] == [24, 24, 24, 24, 48]
    rates = []
    for prompt in {r["id"] for r in base}:
        a, b = ([r["gold"] for r in part if r["id"] == prompt] for part in (ppo, base))
        rates.append(np.mean([0.5 if x == y else float(x > y) for x, y in product(a, b)]))
    row, model = report["comparisons"][0], report["models"][1]
    assert (row["a"], row["b"], row["scorer"]) == (world["ppo"], world["base"], "gold")
    assert row["win_rate"]["value"] == pytest.approx(np.mean(rates), abs=1e-6)
    assert model["gold"]["value"] == pytest.approx(np.mean([r["gold"] for r in ppo]), abs=1e-5)
    assert model["length"]["value"] == np.mean([len(r["response_ids"]) for r in ppo])
    assert base[0]["response_ids"] != pool[0]["response_ids"]
    scores = common.reward_function(world["rm"])(*zip(*((r["prompt"], r["response"]) for r in ppo)))
    assert [r["proxy"] for r in ppo] == pytest.approx(scores, abs=1e-4)
    policy, tokenizer = common.load_policy(world["ppo"]), common.load_tokenizer(world["ppo"])
    prompts = [row["prompt"] for row in ppo[::2]]  # of the model's own weights, at --temperature
    drawn = common.sample(policy, tokenizer, prompts, 2, 10, 0.5, seed=0)
    assert [row["response_ids"] for row in ppo] == drawn.response_ids


def test_kl_is_that_of_the_sampled_answers(written, world):
    """KL in nats per answer, end token included: log π − log π_base of the model's own answers,
    from the plain logits of transformers over the temperature. It catches the ratio upside down,
    the baseline's answers, a mean over tokens and temperature 1; the entropy is that of the
    sampling distribution."""
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(world[name]).eval() for name in ("over", "base")]
    tokenizer, sums, k3, entropies = common.load_tokenizer(world["base"]), [], [], []
    for row in (row for row in samples_of(written) if row["model"] == world["over"]):
        text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)  # fmt: skip
        prompt, n = tokenizer.encode(text, add_special_tokens=False), len(row["response_ids"])
        ids = torch.tensor([prompt + row["response_ids"]])
        with torch.no_grad():
            logps = [(m(ids).logits[0, -n - 1 : -1] / 0.5).log_softmax(-1) for m in models]
        policy, reference = (x.gather(-1, ids[0, -n:, None]) for x in logps)
        sums.append((policy - reference).sum().item())
        k3.append(((reference - policy).exp() - 1 + policy - reference).sum().item())
        entropies.append(-(logps[0].exp() * logps[0]).sum(-1).mean().item())
    row = report_of(written)["models"][2]
    assert row["kl"]["value"] == pytest.approx(np.mean(sums), rel=1e-4) and len(sums) == 24
    assert row["kl_k3"]["value"] == pytest.approx(np.mean(k3), rel=1e-3)
    assert row["entropy"]["value"] == pytest.approx(np.mean(entropies), rel=1e-4)


def test_frontier_costs_and_samples(written, world):
    """The run driven too far is marked at its step 2; costs are those of the logs; equal KL is
    where DPO ends, √(.25 · 2²) = 1 at most; samples are drawn by seed."""
    report = report_of(written)
    marks = {run["model"]: run["overoptimised"] for run in report["frontier"]}
    assert marks[world["over"]]["step"] == 2 and not marks[world["ppo"]]
    assert any("over is over-optimised from step 2" in line for line in report["answer"])
    runs = {row["name"]: row for row in report["runs"]}
    assert runs[world["dpo"]]["pairs"] == 12 and runs[world["ppo"]]["tokens"] == 480
    assert runs[world["ppo"]]["pairs"] is None  # its reward model's folder holds no record
    part = report["efficiency"]  # .9 · .7 = .63: PPO passes it at step 4 (.65), the other at 2
    assert part["goal"] == pytest.approx(0.63)
    assert [row["calls"] for row in part["table"]] == [40, 24, None]
    assert [row["name"] for row in part["table"]] == list(marks)
    best = math.sqrt(math.log(4) - 3 / 4)
    assert report["equal_kl"]["sqrt_kl"] == pytest.approx(min(1.0, best), abs=1e-5)
    rows = [row for row in files.read_jsonl(world["prompts"]) if row["split"] == "test"]
    assert [row["id"] for row in report["samples"]] == [row["id"] for row in rows]  # all twelve
    models = dict.fromkeys("ab", answers_of(response=[["x"]] * 40, gold=[[1.0]] * 40))
    prompts = [{"prompt": f"p{i}"} for i in range(40)]
    drawn = [int(row["id"]) for row in evaluate.side_by_side(models, prompts, "gold", seed=3)]
    assert drawn == sorted(random.Random(3).sample(range(40), 12))


def test_the_page_is_a_function_of_the_json(written, tmp_path, capsys):
    """Made again from report.json alone the page is the same, byte for byte; the terminal gets at
    most 40 lines. No script, no address, and the prompts' payloads are text (tests/test_pages.py
    has the rest)."""
    title, sections = evaluate.PAGES["compare"]
    pages.write_page(tmp_path / "again.html", title, sections(report_of(written)))
    page = (written / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page
    pages.print_report(title, sections(report_of(written)))
    assert len(capsys.readouterr().out.splitlines()) <= 40
    for tag in ("<img", "<script", "<iframe", "<a ", "@import url"):
        assert tag not in page.replace("&lt;style&gt;@import url", ""), tag
    assert "&lt;img src=x onerror" in page and "[U+202E]" in page
    assert "NaN" not in (written / "report.json").read_text(encoding="utf-8")


def test_twice_the_same_bytes(world, tmp_path, monkeypatch):
    """A second process, another folder, another order of its sets: the same files, byte for
    byte."""
    argv = ["compare", *command(world, "out", *SMALL, models=("base", "dpo"))]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    evaluate.main(argv)
    again = {"cwd": tmp_path / "b", "env": os.environ | {"PYTHONHASHSEED": "7"}, "text": True}
    script = [sys.executable, str(REPO / "evaluate.py"), *argv]
    run = subprocess.run(script, capture_output=True, **again)
    assert run.returncode == 0, run.stderr
    for name in ("report.json", "samples.jsonl", "report.html"):
        files_of = [(tmp_path / folder / "out" / name).read_bytes() for folder in "ab"]
        assert files_of[0] == files_of[1], name
    drawn = f"--model {world['dpo']} --model-b {world['base']} --prompts {world['prompts']}"
    assert f"annotate.py draw {drawn}" in run.stdout


def test_gold_is_a_second_reward_model(world, tmp_path):
    """It scores by itself, beside the proxy."""
    other = tiny.tiny_reward_model("llama", tmp_path / "gold", seed=5)
    evaluate.main(command(world, tmp_path / "a", *SMALL, "--gold", other))
    assert report_of(tmp_path / "a")["scorers"] == ["gold", "proxy"]
    row = samples_of(tmp_path / "a")[0]
    expected = common.reward_function(other)([row["prompt"]], [row["response"]])[0]
    assert row["gold"] == pytest.approx(expected, abs=1e-4)


# ---- bad input, and defaults ----


def refused(argv):
    with pytest.raises(UserError) as error:
        evaluate.main([*map(str, argv)])
    assert "\n" not in str(error.value)
    return str(error.value)


GOLD = "def score(prompts, answers, rows=None):\n    return [1 / 0 for _ in answers]\n"


@pytest.mark.parametrize("flags, words", [
    (("--split", "train"), ("--split train", "found test, val")),
    (("--prompts", "empty.jsonl"), ("empty.jsonl", "no row")),
    (("--prompts", "none.jsonl"), ("--prompts", "no such file")),
    (("--prompts", "letters.jsonl", "--split", "all"), ("letters.jsonl:2", "must_have")),
    (("--gold", "none.py:f"), ("--gold",)),
    (("--gold", "gold.py:typo"), ("--gold",)),
    (("--gold", "gold.py:score"), ("--gold gold.py:score: ZeroDivisionError",)),
    (("--reward-model", "none_there"), ("--reward-model",)),
    (("--reward-model", "BASE"), ("--reward-model", "not a reward model")),
    (("--model", "BASE", "RM"), ("--model", "this is a reward model")),
    (("--model", "BASE", "BASE"), ("nothing to compare",)),
    (("--model", "BASE", "nowhere"), ("--model nowhere",)),
    (("--model", "BASE", "OTHER"), ("tokenizer or template",)),
    (("--model", "BASE", "CUT"), ("metrics.jsonl:12: not valid JSON",)),
    (("--model", "BASE", "ODD"), ("args.json",)),
    (("--gold", "none", "--reward-model", "none"), ("neither",)),
    (("--samples", "0"), ("--samples", "at least 1")),
    (("--bon", "-1"), ("--bon", "at least 0")),
    (("--temperature", "0"), ("--temperature", "above 0")),
    (("--out", "BASE", "--overwrite"), ("folder of its own",)),
])  # fmt: skip
def test_bad_input_is_one_line(world, tmp_path, monkeypatch, flags, words):
    """Each names its flag and what was expected, before anything is sampled or written."""
    monkeypatch.chdir(tmp_path)
    Path("gold.py").write_text(GOLD)
    Path("empty.jsonl").write_text("")
    tiny.write_rows(Path("letters.jsonl"), [{"prompt": "p"}, {"prompt": "q", "must_have": "sql"}])
    names = {"BASE": world["base"], "RM": world["rm"]}
    if "OTHER" in flags:
        chatml = tiny.tiny_tokenizer(template=tiny.CHATML)
        names["OTHER"] = tiny.tiny_model("llama", tmp_path, tokenizer=chatml)
    for name in {"CUT", "ODD"} & set(flags):
        names[name] = shutil.copytree(world["ppo"], tmp_path / name)
        log, record = (tmp_path / name / file for file in ("metrics.jsonl", "args.json"))
        log.write_bytes(log.read_bytes()[:-30]) if name == "CUT" else record.write_text("[]")
    line = refused(command(world, "out", *(names.get(flag, flag) for flag in flags)))
    assert all(word in line for word in words), line
    assert not Path("out").exists()


def test_a_report_is_not_replaced_unasked(written, world):
    before = (written / "report.json").read_bytes()
    assert "--overwrite" in refused(command(world, written))
    assert (written / "report.json").read_bytes() == before


def test_a_curve_over_other_prompts_is_left_out(world, tmp_path, capsys):
    """A run validated on another file, or trained from another model, keeps its end point and loses
    its curve."""
    names = [world["base"], world["dpo"]]
    for key, change in (("a", {"sha256": {"val.jsonl": "1" * 64}}), ("b", {"args": {"model": "x"}})):  # fmt: skip
        names.append(str(shutil.copytree(world["ppo"], tmp_path / key)))
        record = json.loads((tmp_path / key / "args.json").read_text())
        record |= change | {"args": record["args"] | change.get("args", {})}
        (tmp_path / key / "args.json").write_text(json.dumps(record))
    runs = evaluate.load_runs(names)
    assert [bool(points) for _, points in runs.values()] == [True, False, False]
    assert capsys.readouterr().out.count("its curve is left out") == 2


def test_missing_defaults_are_named_and_skipped(world, tmp_path, monkeypatch, capsys):
    """Defaults that do not exist are said and skipped; the same names on the line are errors.
    Prompts without a split are all taken by the default, and refused when the split was asked for.
    The default gold knows the bundled prompts alone, and is left out of a comparison on others."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": row["prompt"]} for row in tiny.pair_rows(6)]
    prompts = tiny.write_rows(tmp_path / "mine.jsonl", rows)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "recruiter.py").write_text("def reward(*given):\n    return [0.0]\n")
    flags = ["--prompts", prompts, "--reward-model", world["rm"], "--max-new-tokens", "4"]
    flags += ["--samples", "2", "--bon", "2", "--overwrite", "--device", "cpu"]
    assert "nothing to compare" in refused(flags)
    assert "skipped: the default data/tiny-base does not exist" in capsys.readouterr().out
    flags += ["--model", world["base"], world["dpo"]]
    evaluate.main(flags)
    printed = capsys.readouterr().out
    assert "the default gold is left out" in printed and "all of them are taken" in printed
    report = report_of(tmp_path / "runs" / "evaluate")
    assert (report["setup"]["n_prompts"], len(report["models"]), report["tasks"]) == (6, 3, [])
    assert report["scorers"] == ["proxy"] and report["setup"]["gold"] == "none"
    assert any("No gold" in note for note in report["notes"])
    assert "neither is there" in refused([*flags, "--reward-model", "none"])
    assert "runs/dpo" in refused([*flags, "runs/dpo"])
    assert "--split test" in refused([*flags, "--split", "test"])


def test_defaults_look_where_runs_were_made(tmp_path, monkeypatch):
    """`make demo` writes runs/demo/dpo, a plain dpo.py runs/dpo: the plain run is used if there is
    one. With neither, the base alone is nothing to compare."""
    monkeypatch.chdir(tmp_path)
    assert evaluate.parse_args([]).model[1] == "runs/demo/dpo"
    (tmp_path / "data" / "tiny-base").mkdir(parents=True)
    with pytest.raises(UserError, match="nothing to compare"):
        evaluate.compare(evaluate.parse_args([]))
    (tmp_path / "runs" / "dpo").mkdir(parents=True)
    assert evaluate.parse_args([]).model[1] == "runs/dpo"


# ---- the reward model ----


def quality_of(*groups, **columns):
    """reward_quality of groups (n, score chosen, score rejected, tokens chosen, tokens
    rejected)."""
    table = np.array([pair for n, *pair in groups for _ in range(n)], float)
    rows = [{"tie": False, "task": "assess", "strength": 1} for _ in table]
    for i, row in enumerate(rows):
        row |= {"prompt": f"case {i}"} | {key: values[i] for key, values in columns.items()}
    return evaluate.reward_quality(rows, table[:, :2], table[:, 2:], seed=0)


@pytest.mark.parametrize("groups, right, rule, word", [
    ([(30, 3, 3, 9, 1), (10, 3, 3, 1, 9)], 0.5, 0.75, "worse"),  # constant: right in half, exactly
    ([(30, 9, 1, 9, 1), (10, 1, 9, 1, 9)], 0.75, 0.75, "inconclusive"),  # returns the length
    ([(39, 1, 0, 1, 9), (1, 0, 1, 9, 1)], 0.975, 0.025, "better"),
    ([(39, 0, 1, 9, 1), (1, 1, 0, 1, 9)], 0.025, 0.975, "worse"),
])  # fmt: skip
def test_reward_model_against_length(groups, right, rule, word):
    """Beside the rule "the longer answer wins", on the same 40 pairs, of which every second one is
    strong; a tie leaves them."""
    report = quality_of(*groups, strength=[1, 3] * 20)
    assert (report["accuracy"]["value"], report["length_baseline"]["value"]) == (right, rule)
    ends = (report["accuracy"]["low"], report["accuracy"]["high"])
    assert ends == pytest.approx(wilson(40 * right, 40), abs=1e-6) and report["verdict"] == word
    assert [part["n"] for part in report["by_strength"].values()] == [20, 20]
    assert report["by_task"]["assess"] == report["accuracy"]
    assert quality_of(*groups, tie=[True] + [False] * 39)["accuracy"]["n"] == 39


def test_pairs_of_one_prompt_are_one_vote():
    """Four prompts of ten pairs, right in three of them: Wilson over 40 "independent" pairs says
    [.60, .86]; over prompts nothing is excluded from ¼ to 1. And the verdict counts four prompts,
    not forty pairs."""
    prompts = [f"case {i // 10}" for i in range(40)]
    report = quality_of((30, 1, 0, 1, 9), (10, 0, 1, 1, 9), prompt=prompts)
    assert report["accuracy"]["value"] == report["accuracy_over_prompts"]["value"] == 0.75
    assert report["accuracy"]["low"] > 0.59 and report["accuracy_over_prompts"]["low"] <= 0.25
    assert report["against_length"]["n"] == 4 and report["verdict"] == "inconclusive"


def test_reward_command(world, tmp_path, capsys):
    """The real path, prompts in the HH layout too: pairs.jsonl holds the scores that give the
    printed accuracy; equal pairs and ties are counted."""
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", n=24)
    rows = [*files.read_jsonl(pairs)]
    hh = {"chosen": "\n\nHuman: Case?\n\nAssistant: yes, hold", "rejected": "\n\nHuman: Case?\n\nAssistant: no"}  # fmt: skip
    rows += [hh, rows[0] | {"tie": True}, rows[1] | {"rejected": rows[1]["chosen"]}]
    tiny.write_rows(pairs, rows)
    evaluate.main(["reward", "--reward-model", world["rm"], "--pairs", str(pairs), "--out", str(tmp_path / "a")])  # fmt: skip
    report = report_of(tmp_path / "a")
    rows = [row for row in files.read_jsonl(tmp_path / "a" / "pairs.jsonl") if not row.get("tie")]
    right = np.mean([row["scores"][0] > row["scores"][1] for row in rows])
    assert report["accuracy"]["value"] == pytest.approx(right, abs=1e-6)
    assert report["counts"] == {"rows": 27, "equal": 1, "ties": 1} and len(rows) == 25
    pair = (rows[0][key] for key in ("prompt", "chosen", "rejected"))
    _, *answers = common.encode_pair(common.load_tokenizer(world["rm"]), *pair)
    assert rows[0]["tokens"] == [*map(len, answers)]
    printed = capsys.readouterr().out
    assert "the rule “the longer answer wins”" in printed and f"{100 * right:.1f} %" in printed
