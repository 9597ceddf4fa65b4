"""evaluate.py's report: the frontier, what a gain cost, the tasks' own metrics, and a page that shows text as text."""

import copy
import html.parser
import json
import math
import random
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import common
import evaluate
import tiny
from evaluate import (
    at_equal_kl,
    efficiency,
    equal_kl,
    fit_overoptimisation,
    fit_record,
    frontier,
    overoptimised,
    repeated,
    spending,
    task_metrics,
)
from parts import files, pages
from parts.files import UserError
from parts.runs import fingerprint

REPO = Path(evaluate.__file__).parent

# ---- the frontier ---------------------------------------------------------------------------------------------------


def test_fit_of_overoptimisation_goldens():
    """E1. α 1, β ½, from points made by the formulas: RL peaks at d = e with e/2 = 1.3591, best of n at d = 1 with ½. With
    a bent point the answer is that of the normal equations of r; a fit of r/d would give 1.25 and .32."""
    d = np.array([0.3, 0.7, 1.0, 1.8, 2.5])
    alpha, beta, (top, height) = fit_overoptimisation(d, d * (1 - 0.5 * np.log(d)), "rl")
    assert (alpha, beta, top, height) == pytest.approx((1, 0.5, math.e, 1.3591), abs=5e-5)
    alpha, beta, (top, height) = fit_overoptimisation(d, d * (1 - 0.5 * d), "bon")
    assert (alpha, beta, top, height) == pytest.approx((1, 0.5, 1.0, 0.5), abs=1e-9)
    alpha, beta, _ = fit_overoptimisation([1, 2, 4], [1.0, 1.0, 0.0], "bon")
    assert (alpha, beta) == pytest.approx((454 / 404, 114 / 404))  # 21α − 73β = 3, 73α − 273β = 5


def test_fit_without_a_peak():
    """A gain that only rises has no peak, one point decides nothing, and fewer than five points draw no curve."""
    assert fit_overoptimisation([1, 2, 3], [1, 2.2, 3.6], "bon")[2] is None
    assert fit_overoptimisation([1, 1], [1, 2], "rl") is None
    assert fit_record([1, 2, 3, 4], [1, 1.5, 1.6, 1.5], "bon", 0.0) is None
    record = fit_record([1, 2, 3, 4, 5], [0.9, 1.6, 2.1, 2.4, 2.5], "bon", 0.25)  # d − d²/10
    assert (record["alpha"], record["beta"]) == pytest.approx((1, 0.1))
    assert record["peak"] == {"sqrt_kl": 5.0, "score": 2.75} and record["peak_measured"]
    far = fit_record([1, 2, 3, 4, 5], [d - d * d / 200 for d in range(1, 6)], "bon", 0.0)
    assert far["peak"] is None  # at √KL 100: twenty times what was measured is no finding


@pytest.mark.parametrize("seed", range(5))
def test_overoptimisation_is_marked_at_its_step(seed):
    """E2. Gold rises to the tenth of 21 points and falls, with a noise of .004: marked within one point of the top. The
    training score rises throughout."""
    rng, x = np.random.default_rng(seed), np.linspace(0, 2, 21)
    gold = 0.4 + 0.3 * x * (2 - x) + rng.normal(0, 0.004, 21)
    assert abs(overoptimised(gold, x) - 10) <= 1


def test_a_noisy_plateau_is_not_overoptimised():
    """E2. 300 runs that rise and then stay level, with noise: two falls in a row happen in nearly all of them (1 in 6 at any
    point); a mark in at most 3 %."""
    rng, marked, falls = np.random.default_rng(0), 0, 0
    for _ in range(300):
        gold = 0.6 - 0.2 * np.exp(-np.arange(25) / 2) + rng.normal(0, 0.01, 25)
        proxy = np.arange(25.0)
        marked += overoptimised(gold, proxy) is not None
        falls += bool(((gold[:-2] > gold[1:-1]) & (gold[1:-1] > gold[2:]))[8:].any())
    assert falls > 240 and marked <= 9


def test_falling_with_the_proxy_is_no_overoptimisation():
    """Where the training score falls as well, the run broke or was stopped well: nothing was exploited. And a fall that is
    made good again is none."""
    gold = [0.4, 0.5, 0.6, 0.5, 0.3, 0.2]
    assert overoptimised(gold, [0, 1, 2, 3, 4, 5]) == 2
    assert overoptimised(gold, [0, 1, 2, 1, 0, -1]) is None
    assert overoptimised([0.4, 0.6, 0.5, 0.45, 0.7, 0.8], range(6)) is None
    assert overoptimised([0.6, 0.5], [0, 1]) is None


def test_a_noisy_proxy_rises_on_the_whole():
    """Evaluations 0 to 15 of a run driven too far: gold falls from .59 by more than .1 for good, the proxy goes on from 1.68 to
    1.83 with one step back of .03 on the way. Asked to rise at each evaluation, it hid the mark."""
    gold = [0.43, 0.56, 0.56, 0.59, 0.54, 0.48, 0.49, 0.47, 0.42, 0.47, 0.48, 0.41, 0.47, 0.47, 0.47, 0.48]  # fmt: skip
    proxy = [0.24, 1.17, 1.5, 1.68, 1.71, 1.68, 1.73, 1.76, 1.74, 1.78, 1.78, 1.79, 1.77, 1.83, 1.83, 1.83]  # fmt: skip
    assert overoptimised(gold, proxy) == 3


def test_equal_kl_prefers_the_better_frontier():
    """E10. b ends higher (.80 at √KL 4) than a (.60 at √KL 2), but at √KL 2 it has .40: at equal KL a is ahead."""
    a, b = [(0, 0.0), (1, 0.4), (2, 0.6)], [(0, 0.0), (2, 0.4), (4, 0.8)]
    reach, values = at_equal_kl({"a": a, "b": b})
    assert reach == 2 and values == pytest.approx({"a": 0.6, "b": 0.4})
    assert at_equal_kl({"a": a, "still": [(0, 0.0), (0, 0.1)]}) is None
    assert at_equal_kl({"a": a[::-1], "b": b})[1] == pytest.approx(
        values
    )  # the order decides nothing


def number_of(value):
    return {"value": value, "low": None, "high": None, "n": 9}


def test_equal_kl_in_the_report():
    """E10. Two runs with logs, best of n beside them; gains are over each one's own start, since validation and test prompts
    have different levels: a starts at .30, and its gain .2 at √KL 1 stands as .50 + .2 above the baseline's .50."""

    def run(points):
        return {"points": [{"step": i, "kl": k, "gold": g} for i, (k, g) in enumerate(points)]}

    runs = {"a": run([(0, 0.3), (1, 0.5)]), "b": run([(0, 0.3), (4, 0.7)])}
    models = [{"name": "base", "gold": number_of(0.5), "kl": number_of(0), "kl_k3": number_of(0)}]
    for name, gold, kl in (("a", 0.71, 1.1), ("b", 0.9, 4.1), ("best of 4", 0.6, 0.6363)):
        k3 = None if "best" in name else number_of(kl)
        models.append({"name": name, "gold": number_of(gold), "kl": number_of(kl), "kl_k3": k3})
    kl = {n: math.log(n) - (n - 1) / n for n in (1, 2, 16)}
    best = [{"kl": number_of(x), "gold": number_of(0.48 + 0.1 * x)} for x in kl.values()]
    found = equal_kl({"models": models, "best_of_n": best}, runs, "gold")
    assert found["sqrt_kl"] == 1.0
    assert [row["model"] for row in found["table"]] == ["a", "b", "best of 4"]
    gains = [row["gain"] for row in found["table"]]
    d = [math.sqrt(kl[2]), math.sqrt(kl[16])]  # best of n at √KL 1, between n = 2 and n = 16
    between = kl[2] + (kl[16] - kl[2]) * (1 - d[0]) / (d[1] - d[0])
    assert gains == pytest.approx([0.2, 0.2, 0.1 * between], abs=1e-6)
    assert found["table"][0]["gold"] == pytest.approx(0.7)


def test_a_run_on_another_reward_has_no_proxy_curve():
    """A run on another reward model logs its score as val/score; the end point is the report's one reward model: a line from one to
    the other would join two scores. Its gold curve stays; a run on that very reward model keeps both."""
    number = {"value": 1.0, "low": 0.9, "high": 1.1}
    points = [{"step": i, "kl": i, "gold": 0.5, "proxy": 0.1} for i in (0, 1)]
    names = ("base", "runs/one", "runs/two")
    report = {
        "models": [{"name": n, "kl": number, "gold": number, "proxy": number} for n in names],
        "frontier": [{"model": n, "points": points, "overoptimised": None, "fit": None} for n in names[1:]],
        "runs": [{"name": "runs/one", "reward_model": "rm"}, {"name": "runs/two", "reward_model": "other"}],
        "setup": {"reward_model": "rm"},
        "scorers": ["gold", "proxy"],
    }  # fmt: skip
    for scorer, curves in (("gold", 2), ("proxy", 1)):
        called = {name: name for name in names}
        lines = [line["name"] for line in evaluate.frontier_plot(report, called, scorer)["lines"]]
        assert sum("during training" in name for name in lines) == curves
        assert sum(name in names for name in lines) == 3


def test_frontier_of_a_log():
    """A run's marks come with step and KL; a log without gold has points and no mark, one without KL no fitted curve."""
    gold = [0.4, 0.5, 0.6, 0.5, 0.4, 0.2]
    rows = [{"step": 10 * i, "kl": i * i / 4, "gold": g, "proxy": i} for i, g in enumerate(gold)]
    run = frontier("runs/ppo", {"points": rows})
    assert run["overoptimised"] == {"step": 20, "kl": 1.0, "gold": 0.6}
    assert run["fit"]["points"] == 5 and run["fit"]["start"] == 0.4 and len(run["points"]) == 6
    for key in ("gold", "kl"):
        bare = frontier("runs/ppo", {"points": [row | {key: None} for row in rows]})
        assert bare["fit"] is None and (key == "kl") == bool(bare["overoptimised"])


# ---- what a gain cost -----------------------------------------------------------------------------------------------

PPO = [
    {"step": 0, "val/gold": 0.4, "val/score": 0.0, "val/kl": 0.0, "time_s": 5.0},
    {"step": 1, "loss": 0.1, "episodes": 64, "answer_tokens": 640, "time_s": 2.0, "peak_mem_mb": 7},
    {"step": 2, "loss": 0.1, "episodes": 64, "length/mean": 11.0, "time_s": 3.0, "peak_mem_mb": 9},
    {"step": 2, "val/gold": 0.6, "val/score": 1.0, "val/kl": 2.0, "time_s": 5.0},
]


def test_costs_of_ppo_and_dpo():
    """64 answers a step are 64 prompts, 64 reward calls and 640 tokens; time of the evaluations is no training. DPO counts
    pairs, 32 a step, and answers nothing; PPO's pairs are those behind its reward model, spent before step one."""
    run = {"stage": "ppo", "args": {"batch_size": 16}, "rows": PPO}
    points, total = spending(run, {"pairs": 4800, "seconds": 150.0})
    assert [p["prompts"] for p in points] == [0, 128] and total["calls"] == 128
    assert total["tokens"] == 640 + 64 * 11 and total["seconds"] == 155.0
    assert [p["pairs"] for p in points] == [4800, 4800]
    assert (points[1]["step"], points[1]["kl"], points[1]["proxy"]) == (2, 2.0, 1.0)
    rows = [{"step": 1, "loss": 0.5, "time_s": 1.0}, {"step": 1, "eval/loss": 0.6, "time_s": 9.0}]
    points, total = spending({"args": {"batch_size": 32, "pairs": ["x"]}, "rows": rows})
    assert points == [] and total == {
        "prompts": 0,
        "pairs": 32,
        "tokens": 0,
        "calls": 0,
        "seconds": 1,
    }


def test_pairs_behind_a_reward_model(tmp_path):
    """The reward model's folder says how many pairs it saw; a folder that is gone is "not known", never 0 pairs. DPO's reward
    model only watches and costs nothing."""
    run = {"stage": "ppo", "args": {"reward_model": str(tmp_path)}}
    record = {"args": {"pairs": ["x"], "batch_size": 32}, "sha256": {}}
    (tmp_path / "args.json").write_text(json.dumps(record))
    rows = [{"step": i, "loss": 0.5, "time_s": 2.0} for i in range(1, 11)]
    tiny.write_rows(tmp_path / "metrics.jsonl", rows)
    assert evaluate.behind(run) == {"pairs": 320, "seconds": 20.0}
    assert evaluate.behind(run | {"stage": "dpo"}) == {}
    gone = evaluate.behind({"stage": "ppo", "args": {"reward_model": str(tmp_path / "gone")}})
    assert all(math.isnan(value) for value in gone.values())


def test_efficiency_by_hand():
    """a reaches .9 · .70 = .63 at step 2: 20 prompts and the 100 pairs behind its reward model. b never does. A cost that a
    method does not have is empty: it is not 0 and not "reached at 0"."""

    def log(golds, **costs):
        zero = dict.fromkeys(evaluate.COSTS, 0)
        rows = [zero | {"step": i, "gold": g, **{k: f(i) for k, f in costs.items()}} for i, g in enumerate(golds)]  # fmt: skip
        return {"points": rows}

    a = log([0.4, 0.5, 0.64, 0.7], prompts=lambda i: 10 * i, pairs=lambda i: 100)
    found = efficiency({"a": a, "b": log([0.4, 0.6], pairs=lambda i: 50 * i)})
    assert found["best"] == pytest.approx(0.7) and found["goal"] == pytest.approx(0.63)
    a, b = found["table"]
    assert a["prompts"] == 20 and a["pairs"] == 100 and a["calls"] is None and not a["never"]
    assert b["never"] and b["pairs"] is None and b["prompts"] is None
    assert [p["gold"] for p in found["curves"][0]["points"]] == [0.4, 0.5, 0.64, 0.7]
    assert efficiency({"c": {"points": []}}) is None


# ---- diversity, tasks ------------------------------------------------------------------------------------


def test_repeated():
    """ "a b a b a" has four pairs, two of them again: ½."""
    assert repeated(list("ababa"), 2) == 0.5 and repeated(list("abcd"), 2) == 0
    assert math.isnan(repeated([1, 2], 4))


ASSESS = {"task": "assess", "expected_decision": "hold", "prompt": "p"}


@pytest.mark.parametrize(
    "row, answer, expected",
    [
        (ASSESS, "Strengths: sql.\nRecommendation: Hold.", {"parsed": 1.0, "decision": 1.0}),
        (ASSESS, "Led a hold.\nRecommendation: reject.", {"parsed": 1.0, "decision": 0.0}),
        (ASSESS, "Recommendation: hold or reject.", {"parsed": 0.0, "decision": math.nan}),
        (ASSESS, "Nothing. Holding on.", {"parsed": 0.0, "decision": math.nan}),
        ({"task": "assess", "prompt": "p"}, "hold", {}),
        ({"task": "poem", "prompt": "p"}, "hold", {}),
        (
            {"task": "interview", "must_have": ["sql"], "shown": ["sql"], "prompt": "p"},
            "Do you know SQL? And what else?",
            {"one question": 0.0, "must-have": 1.0, "aims at a gap": math.nan, "open": 0.0},
        ),
        ({"task": "interview", "prompt": "p"}, "Tell me more.", {"one question": 1.0, "open": 1.0}),
        (
            {"task": "summary", "shown": ["sql", "kafka"], "claimed": ["go"], "prompt": "a b c d"},
            "Skills: sql, go, rust",
            {"skill recall": 2 / 3, "skill precision": 2 / 3, "invented skills": 1.0, "compression": 1.0},
        ),
    ],
)  # fmt: skip
def test_task_metrics_by_hand(row, answer, expected):
    """Each metric needs only its own fields; one that is absent is left out, never 0. "Holding" is no decision, a strength
    "hold" above the last line neither, and two decisions are none. rust is a skill of the file, and invented here."""
    found = task_metrics(row, answer, ["sql", "rust"])
    assert found == pytest.approx(expected, nan_ok=True)


def test_task_metrics_agree_with_the_recruiter():
    """The recruiter of the demo reads prompts by its word list, evaluate.py by the row's fields. On the interview answers of
    prefs_test both must say the same about "open" and "one must-have"; the prompts' rows are found by their text."""
    sys.path.insert(0, str(REPO / "data"))
    import recruiter

    rows = {json.dumps(r["prompt"]): r for r in files.read_jsonl(REPO / "data/prompts.jsonl")}
    agree = {"open": [], "aims at a gap": []}
    for pair in files.read_jsonl(REPO / "data/prefs_test.jsonl"):
        row = rows.get(json.dumps(pair["prompt"]))
        if row and row["task"] == "interview":
            text = pair["chosen"][-1]["content"]
            ours, theirs = task_metrics(row, text), recruiter.components(row["prompt"], text)
            for key, values in agree.items():
                if not math.isnan(ours[key]):
                    values.append(ours[key] == theirs[key][1])
    assert all(len(values) > 30 and np.mean(values) > 0.95 for values in agree.values()), agree


# ---- one report of everything ---------------------------------------------------------------------------------------


def run_folder(folder, base, seed, gold, stage="ppo", **args):
    """The baseline's weights with a little noise, the record of a trainer and the log of a run."""
    shutil.copytree(base, folder)
    torch.manual_seed(seed + 1)
    file = str(folder / "model.safetensors")
    weights = {k: v + 0.01 * torch.randn_like(v) for k, v in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    record = {"stage": stage, "args": {"model": base, "seed": seed, "prompts": "val.jsonl"} | args}
    record |= {"sha256": {"val.jsonl": "0" * 64}, "model_sha256": fingerprint(base)}
    (folder / "args.json").write_text(json.dumps(record | {"versions": {"torch": "2"}}))
    rows = []
    for i, g in enumerate(gold):
        rows.append({"step": i, "loss": 0.1, "episodes": 8, "answer_tokens": 80, "time_s": 1.0, "peak_mem_mb": 50})  # fmt: skip
        value = {"val/gold": g, "val/score": float(i), "val/kl": 0.25 * i * i}
        rows.append({"step": i} | value | {"time_s": 9.0})
    tiny.write_rows(folder / "metrics.jsonl", rows)
    return str(folder)


PAYLOADS = [
    "<img src=x onerror=window.__xss=1>",
    "<svg onload=window.__xss=1>",
    "</script><script>window.__xss=1</script>",
    "</title></desc></style><script>window.__xss=1</script>",
    '"><a href="javascript:window.__xss=1">x</a>',
    "![a](http://127.0.0.1:9/x.png)",
    "<iframe srcdoc='<script>parent.__xss=1</script>'></iframe>",
    "<style>@import url(http://127.0.0.1:9/x.css)</style>",
    "<form id=app><input name=textContent>",
    "\u202etxt.exe\u0000\ud800",
    "👩🏽\u200d🚒 {{7*7}} {% raw %} ${7*7} &amp; `x`",
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A baseline, PPO with three seeds (the last one driven too far), a DPO run, a reward model, prompts with hostile text."""
    folder = tmp_path_factory.mktemp("world")
    base = tiny.tiny_model("llama", folder)
    rm = tiny.tiny_reward_model("llama", folder / "rm")
    good, bad = [0.4, 0.5, 0.6, 0.62, 0.65, 0.66], [0.4, 0.55, 0.7, 0.6, 0.5, 0.3]
    for seed in range(3):
        run_folder(folder / f"ppo-{seed}", base, seed, bad if seed == 2 else good, reward_model=rm)
    run_folder(folder / "dpo", base, 0, good[:3], "dpo", pairs=["x"], batch_size=4)
    rows = []
    for i, row in enumerate(tiny.pair_rows(12)):
        text = row["prompt"][0]["content"] + PAYLOADS[i % 9]
        row = {"id": f"p{i} {PAYLOADS[i % 9]}", "prompt": [{"role": "user", "content": text}]}
        row |= {"task": ["assess", "summary <b>"][i % 2], "split": "test"}
        rows.append(row | {"shown": ["sql"], "must_have": ["sql"], "expected_decision": "hold"})
    (folder / "gold.py").write_text(
        "def score(prompts, answers, rows=None):\n    return [len(set(a)) / (1 + len(a)) for a in answers]\n"
    )
    people = [
        {"id": i, "role": f"role {i % 3}", "profile": f"Used {'sql ' * (i % 5)}{i}", "quality": i % 4}
        for i in range(30)
    ]  # fmt: skip
    return {
        "base": base,
        "ppo": [str(folder / f"ppo-{seed}") for seed in range(3)],
        "dpo": str(folder / "dpo"),
        "rm": rm,
        "prompts": tiny.write_rows(folder / "prompts.jsonl", rows),
        "pairs": tiny.write_pairs(folder / "pairs.jsonl", n=24),
        "people": tiny.write_rows(folder / "people.jsonl", people),
        "gold": f"{folder / 'gold.py'}:score",
    }


def command(world, out, *more, models=None):
    models = models or [world["base"], *world["ppo"], world["dpo"]]
    argv = ["--model", *models, "--reward-model", world["rm"], "--gold", world["gold"]]
    argv += [
        "--prompts",
        world["prompts"],
        "--pairs",
        world["pairs"],
        "--candidates",
        world["people"],
    ]
    argv += ["--bon", "8", "--samples", "2", "--max-new-tokens", "10", "--device", "cpu"]
    return [*argv, "--out", str(out), *more]


@pytest.fixture(scope="module")
def written(world, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "out"
    evaluate.main(command(world, out))
    return out


def report_of(out):
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


def test_the_report_has_every_part(written, world):
    """Frontier with the run that was driven too far marked at its step 2, costs, the reward model, ranking with an interval over three roles, diversity, tasks and 20 samples at most, all from
    one command."""
    report = report_of(written)
    marks = {run["model"]: run["overoptimised"] for run in report["frontier"]}
    assert marks[world["ppo"][2]]["step"] == 2 and not marks[world["ppo"][0]]
    assert any("over-optimised from step 2" in line for line in report["answer"])
    runs = {row["name"]: row for row in report["runs"]}
    assert runs[world["dpo"]]["pairs"] == 12 and runs[world["ppo"][0]]["tokens"] == 480
    assert runs[world["ppo"][0]]["pairs"] is None  # its reward model's folder holds no record
    assert [row["name"] for row in report["efficiency"]["table"]] == [*world["ppo"], world["dpo"]]
    assert report["equal_kl"]["sqrt_kl"] == pytest.approx(1.0)  # where DPO ends: √(.25 · 2²)
    assert report["reward"]["accuracy"]["n"] == 24 and report["ranking"]["tau"]["n"] == 3
    assert report["ranking"]["tau"]["low"] < report["ranking"]["tau"]["high"]
    assert {row["metric"] for row in report["task_metrics"]} == {"parsed", "decision"}
    assert [len(group["rows"]) <= 20 for group in report["samples"]] == [True] * 4
    assert all(0 < row["entropy"]["value"] < math.log(400) for row in report["diversity"])


def test_samples_are_drawn_by_seed(written, world):
    """Eight prompts by seed and the extremes: no model, no score and no hand decides the first eight."""
    group = report_of(written)["samples"][0]
    drawn = [row["id"] for row in group["rows"] if row["why"] == "drawn by seed"]
    rows = list(files.read_jsonl(world["prompts"]))
    assert drawn == [rows[p]["id"] for p in sorted(random.Random(0).sample(range(12), 8))]
    gains = [r["model"]["score"] - r["base"]["score"] for r in group["rows"] if r["why"] == "largest gain"]  # fmt: skip
    assert gains == sorted(gains, reverse=True) and gains[-1] > 0


def test_the_page_is_a_function_of_the_json(written, tmp_path, capsys):
    """The page holds nothing that report.json does not: made again from the file alone, it is the same, byte for byte. The
    terminal shows the first screen, at most 40 lines. One run twice in two processes: test_evaluate.py."""
    page(report_of(written), tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == (written / "report.html").read_bytes()
    pages.print_report("t", evaluate.compare_sections(report_of(written)))
    assert len(capsys.readouterr().out.splitlines()) <= 40


def page(report, path):
    sections = evaluate.compare_sections(report)
    pages.write_page(path, evaluate.TITLES["compare"], sections, lead=report["date"] or "")
    return sections


def test_every_sentence_is_in_the_table(written):
    """A reader's check: the verdict and the win rate of each sentence are those of the comparison it is about, for every pair of
    models, and the winner is named first."""
    report = report_of(written)
    called, answer = evaluate.labels(report), report["answer"]
    assert called[report["models"][0]["name"]] == "Base" and "DPO" in called.values()
    rows = [r for r in report["comparisons"] if r["scorer"] == "gold" and "best of" not in r["a"]]
    assert len(rows) == 10
    for row, line in zip(rows, answer):
        a, b, rate = called[row["a"]], called[row["b"]], row["win_rate"]["value"]
        first, second, won = (b, a, 1 - rate) if row["verdict"] == "worse" else (a, b, rate)
        tied = f"Between {a} and {b} no difference was found"
        assert line.startswith(
            tied if row["verdict"] == "inconclusive" else f"{first} beats {second}"
        )
        assert f"{first} wins {100 * won:.1f} %" in line


def reads_from(page):
    """(tag, attribute, value) of everything in a page that could fetch or run something."""
    found = []

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag, attributes):
            far = ("src", "href", "srcdoc", "srcset", "action", "xlink:href", "data")
            found.extend((tag, k, v) for k, v in attributes if k in far or k.startswith("on"))

    Reader().feed(page)
    return found


def test_the_page_as_text(written):
    """Without a browser: no script, no handler, no address, the policy in the head; payloads are text. tests/test_pages.py has
    the page itself."""
    page = (written / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page and "Content-Security-Policy" in page
    assert reads_from(page) == [("link", "href", "data:,")]
    assert "&lt;img src=x onerror=window.__xss=1&gt;" in page
    assert "NaN" not in (written / "report.json").read_text() and "nan" not in re.sub(r"<[^>]*>", " ", page).split()  # fmt: skip


def hostile(report):
    """The report with a payload in every text that comes from a model, from data or from a name."""
    report, turn = copy.deepcopy(report), iter(range(10**6))
    names = {row["name"]: f"{row['name'][-12:]}{PAYLOADS[i % 11]}" for i, row in enumerate(report["models"])}  # fmt: skip

    def walk(value, key=None):
        if isinstance(value, dict):
            return {names.get(k, k): walk(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [walk(v, key) for v in value]
        if isinstance(value, str) and value in names:
            return names[value]
        free = ("text", "prompt", "id", "why", "task", "metric", "answer", "notes", "role", "stage", "command", "date", "verdict", "model", "method", "reason")  # fmt: skip
        return (
            value + PAYLOADS[next(turn) % 11] if isinstance(value, str) and key in free else value
        )

    return walk(report)


def test_hostile_text_stays_text(written, tmp_path):
    """E4. A payload in every text field that comes from a model, from data or from a name: no tag of it is in the page."""
    page(hostile(report_of(written)), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    for tag in ("<img", "<script", "<iframe", "<form", "<svg onload"):
        assert tag not in text, tag
    assert "[U+202E]" in text and reads_from(text) == [("link", "href", "data:,")]


# ---- bad input, and what is refused ---------------------------------------------------------------------------------


def refused(argv):
    with pytest.raises(UserError) as error:
        evaluate.main(argv)
    assert "\n" not in str(error.value)
    return str(error.value)


def copy_run(world, tmp_path, name="ppo-9"):
    return Path(shutil.copytree(world["ppo"][0], tmp_path / name))


def test_a_cut_log_is_one_line_and_nothing_is_lost(world, tmp_path):
    """metrics.jsonl cut in the middle of a row: file and line, before anything is sampled; an older report stays as it was."""
    run, out = copy_run(world, tmp_path), tmp_path / "out"
    log = run / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[:-30])
    out.mkdir()
    (out / "report.json").write_text("{}")
    line = refused(command(world, out, "--overwrite", models=[world["base"], str(run)]))
    assert "metrics.jsonl:12: not valid JSON" in line
    assert (out / "report.json").read_text() == "{}" and not (out / "samples.jsonl").exists()
    tiny.write_rows(log, [{"step": 1, "val/gold": "high"}])
    line = refused(command(world, out, "--overwrite", models=[world["base"], str(run)]))
    assert "\"val/gold\" is 'high'" in line
    (run / "args.json").write_text("[]")
    assert "args.json" in refused(
        command(world, out, "--overwrite", models=[world["base"], str(run)])
    )


def test_another_reference_is_refused(world, tmp_path):
    """KL from a model that the run was not trained against is no cost of that run. The line names both, and what to do."""
    run = copy_run(world, tmp_path)
    record = json.loads((run / "args.json").read_text())
    (run / "args.json").write_text(json.dumps(record | {"model_sha256": "f" * 64}))
    line = refused(command(world, tmp_path / "o", models=[world["base"], str(run)]))
    assert "its reference was" in line and "as it was then" in line
    record["args"] |= {"model": "somebody/else"}
    (run / "args.json").write_text(json.dumps(record | {"model_sha256": None}))
    line = refused(command(world, tmp_path / "o", models=[world["base"], str(run)]))
    assert "somebody/else" in line and world["base"] in line
    record["stage"] = "sft"  # it had no reference
    evaluate.check_reference("x", record, world["base"])


def test_curves_over_other_prompts_are_left_out(world, tmp_path):
    """One run validated on another file than the rest: its curve is no comparison. Its end point stays, and a note says so."""
    run = copy_run(world, tmp_path)
    record = json.loads((run / "args.json").read_text())
    record["sha256"] = {"val.jsonl": "1" * 64}
    (run / "args.json").write_text(json.dumps(record))
    runs = evaluate.load_runs([world["base"], world["dpo"], str(run)])
    assert runs[world["dpo"]]["points"] and not runs[str(run)]["points"]
    assert runs[str(run)]["left_out"] and not runs[world["dpo"]]["left_out"]


def test_fields_of_a_prompt_are_checked(world, tmp_path):
    """ "must_have": "sql" would be read letter by letter: refused by file and line."""
    rows = [{"prompt": "p", "must_have": ["sql"]}, {"prompt": "q", "must_have": "sql"}]
    prompts = tiny.write_rows(tmp_path / "p.jsonl", rows)
    line = refused(command(world, tmp_path / "o", "--prompts", prompts, "--split", "all"))
    assert "p.jsonl:2" in line and "must_have" in line


def test_bundled_files_stay_with_the_bundled_prompts(world, capsys):
    """A user's own prompts: the demo's pairs and candidates would judge a reward model they have nothing to do with."""
    args = evaluate.parse_args(["--prompts", world["prompts"]])
    assert (
        evaluate.bundled(args, args.pairs) is None
        and evaluate.bundled(args, args.candidates) is None
    )
    args = evaluate.parse_args(["--prompts", world["prompts"], "--pairs", world["pairs"]])
    assert evaluate.bundled(args, args.pairs) == world["pairs"]
    assert "skipped" not in capsys.readouterr().out


def test_gold_model(world, tmp_path):
    """A second reward model as gold: its own scores, whatever --gold's default is; the proxy stays the proxy."""
    other = tiny.tiny_reward_model("llama", tmp_path / "gold", seed=5)
    argv = command(
        world, tmp_path / "o", "--gold-model", other, "--bon", "0", models=[world["base"]]
    )
    evaluate.main(argv)
    report = report_of(tmp_path / "o")
    assert report["scorers"] == ["gold", "proxy"] and report["setup"]["gold"] == other
    row = json.loads((tmp_path / "o" / "samples.jsonl").read_text().splitlines()[0])
    expected = common.reward_function(other)([row["prompt"]], [row["response"]])[0]
    assert row["gold"] == pytest.approx(expected, abs=1e-4)


# ---- the judge ------------------------------------------------------------------------------------------------------


class Asked:
    """In the place of judge.Judge: replies as a server would send them, made by `score(text, place)`."""

    def __init__(self, score, fails=()):
        self.score, self.fails, self.seed, self.n = score, fails, 0, 0
        from collections import Counter

        self.counts = Counter()

    def warn(self, text):
        raise AssertionError(text)

    def usd(self):
        return None

    def ask(self, calls):
        import judge

        replies = []
        for call in calls:
            self.n += 1
            self.counts["calls"] += 1
            shown = re.findall(r'<attempt[^>]* id="(\w+)"[^>]*>(.*?)</attempt', call.messages[1]["content"], re.S)  # fmt: skip
            assert len(shown) == 2
            rows = [{"id": i, "reason": "r", "score": self.score(t, n)} for n, (i, t) in enumerate(shown)]  # fmt: skip
            value, complaint = call.parse(json.dumps({"scores": rows}))
            assert not complaint
            failed = self.n in self.fails
            replies.append(judge.Reply(None if failed else value, "down" if failed else None))
        return replies


def judged_pair(asker, n=20):
    rows = [{"prompt": f"case {i}"} for i in range(n)]
    texts = {"base": [[f"plain {i}"] for i in range(n)], "good": [[f"good {i}"] for i in range(n)]}
    models = [{"name": m, "texts": t, "lengths": np.full((n, 1), 5)} for m, t in texts.items()]
    return evaluate.judged(models, rows, asker, seed=0)[0]


def test_an_always_first_judge_decides_nothing():
    """E5. It takes whatever stands first, in both orders: ½ exactly, consistency 0, first-place wins 100 %."""
    row = judged_pair(Asked(lambda text, place: 0.9 - 0.5 * place))
    assert row["win_rate"]["value"] == 0.5 and row["verdict"] == "inconclusive"
    assert (
        row["judge"]["consistency"]["value"] == 0.0 and row["judge"]["first_place"]["value"] == 1.0
    )
    assert row["judge"]["failed"] == 0 and row["scorer"] == "judge"


def test_a_fair_judge_decides():
    """It prefers "good" wherever that stands: 100 %, consistency 1, half of the first places."""
    row = judged_pair(Asked(lambda text, place: 0.9 if "good" in text else 0.1))
    assert (row["a"], row["b"], row["win_rate"]["value"], row["verdict"]) == (
        "good",
        "base",
        1.0,
        "better",
    )
    assert (
        row["judge"]["consistency"]["value"] == 1.0 and row["judge"]["first_place"]["value"] == 0.5
    )


def test_failed_judgements_are_counted():
    """E5. A failed call takes its pair out of the rate; four pairs of twenty are bearable, five (25 %) leave no verdict."""
    good = lambda text, place: 0.9 if "good" in text else 0.1  # noqa: E731
    row = judged_pair(Asked(good, fails=(1, 3, 5, 7)))
    assert (row["win_rate"]["n"], row["judge"]["failed"], row["verdict"]) == (16, 4, "better")
    row = judged_pair(Asked(good, fails=(1, 3, 5, 7, 9)))
    assert (row["win_rate"]["n"], row["judge"]["failed"]) == (15, 5) and row[
        "verdict"
    ] == "inconclusive"
    row = judged_pair(Asked(good, fails=range(1, 99)))
    assert row["win_rate"]["value"] is None and row["judge"]["consistency"]["value"] is None
