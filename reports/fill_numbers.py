"""reports/fill_numbers.py: the committed reports in, the numbers of README.md and docs/*.md out; nobody types one.

A block between `<!-- numbers:NAME -->` and `<!-- /numbers -->` is replaced by what the function of that name below makes
of reports/demo/*-seed-*.json, reports/bench/*.jsonl, the scripts and their formulas.
Any number of seeds: a line for each with its 95 % interval, and above them the mean and the range over seeds.

Run          python reports/fill_numbers.py
             python reports/fill_numbers.py --check     (writes nothing, status 1 where a page is stale; a test does this)
             python reports/fill_numbers.py --memory    (first measures reports/memory.json anew: half an hour)
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path
from statistics import median

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "bench")]

import numpy as np  # noqa: E402
import run as bench  # noqa: E402

from parts.means import wilson  # noqa: E402
from parts.pages import number as show  # noqa: E402
from parts.reports import MODELS  # noqa: E402
from parts.stats import Z80, Z95  # noqa: E402

PAGES = (
    "README.md",
    "reports/README.md",
    "reports/reward-model.md",
    "docs/adapt.md",
    "docs/scale.md",
)
STAGES = [  # script, what goes in and comes out
    ("sft.py", "answers → a model that imitates"),
    ("annotate.py", "two answers → preference pairs"),
    ("reward_train.py", "preference pairs → a score for answers"),
    ("dpo.py", "preference pairs → policy"),
    ("ppo.py", "prompts, a reward → policy"),
    ("grpo_rubric.py", "prompts, rubrics → policy"),
    ("grpo_agent.py", "an environment → policy"),
    ("judge.py", "answers, rubrics → scores"),
    ("ruler.py", "attempts → scores"),
    ("watch.py", "a training log → alarms"),
    ("evaluate.py", "models → who is better"),
    ("rank.py", "a role, profiles → an order"),
    ("fairness.py", "models → treatment of people"),
    ("audit.py", "decisions → group differences"),
    ("common.py", "shared: tokens, log-probs"),
]  # fmt: skip
LESSON_REWARDS = {"fair": "fair", "biased": "biased", "cured": "biased, `--counterfactual-augment`"}  # fmt: skip
LESSON_POLICIES = {
    "answers-fair": "fair, answers alone", "answers-biased": "biased, answers alone",
    "policy-fair": "fair, answers, then recommendations", "policy-biased": "biased, answers, then recommendations",
    "policy-cured": "the same, recommendations with `--counterfactual-augment`",
}  # fmt: skip
LESSON_WORTH = {"tiny-base": "before", "answers-biased": "biased votes, answers alone", "policy-cured": "then recommendations, `--counterfactual-augment`"}  # fmt: skip
REAL_COMMAND = "python dpo.py --pairs data/prefs.jsonl --model runs/smollm2"
HEADLINES = {  # of reports/bench, on the front page
    "dpo": "DPO", "reward": "reward model", "sft": "SFT", "ppo": "PPO", "grpo": "rubric GRPO", "rollout": "drawing answers",
}  # fmt: skip


# ---- reading ----


def reports(kind):
    """[(seed, report)] of reports/demo/KIND-seed-*.json, by seed."""
    files = (REPO / "reports" / "demo").glob(f"{kind}-seed-*.json")
    found = [(int(re.search(r"seed-(\d+)\.json$", f.name)[1]), f) for f in files]
    return [(seed, json.loads(f.read_text(encoding="utf-8"))) for seed, f in sorted(found)]


def of(rows, key, name):
    """The row whose `key` ends in name: a report calls a model by its folder."""
    return next((r for r in rows if r[key].rsplit("/", 1)[-1] == name), None)


def against_base(report, name):
    """The comparison of a model with the first one, by gold; None of the first itself."""
    base = report["models"][0]["name"]
    pairs = [r for r in report["comparisons"] if r["scorer"] == "gold" and r["b"] == base]
    return of(pairs, "a", name)


# ---- text ----


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def over_seeds(records, digits, percent=False):
    """Mean of the seeds' values and their range; of one seed the value with its interval.

    >>> over_seeds([{"value": 0.5}, {"value": 0.7}], 1), over_seeds([{"value": 0.5, "low": 0.4, "high": 0.6}], 1)
    ('0.6 (0.5 to 0.7)', '0.5 [0.4, 0.6]')
    """
    if len(records) == 1:
        return show(records[0], digits, percent)
    values = [r["value"] for r in records if r["value"] is not None]
    if not values:
        return "–"
    mean, low, high = sum(values) / len(values), min(values), max(values)
    if low == high:
        return show(mean, digits, percent)
    text = show({"value": mean, "low": low, "high": high}, digits, percent)
    return text.replace(", ", " to ").replace("[", "(").replace("]", ")")


def by_seed(name, rows, columns):
    """Lines of a table: over all seeds, then each seed. rows: [(seed, [record])]; columns: [(digits, percent)]."""
    records = list(zip(*(r for _, r in rows)))
    many = len(rows) > 1
    mean = [over_seeds(list(r), *c) for r, c in zip(records, columns)]
    word = f"mean of {len(rows)} (range)" if many else f"seed {rows[0][0]}"
    lines = [[f"**{name}**", word, *mean]]
    for seed, record in rows if many else ():
        lines.append(["", f"seed {seed}", *(show(r, *c) for r, c in zip(record, columns))])
    return lines


# ---- the blocks ----


def demo():
    """Utility, reward model's score, KL, wins and seconds of each model; what one seed's run printed stands in the report."""
    found, lines = reports("compare"), []
    nothing = {"value": None}
    for name in (row["name"].rsplit("/", 1)[-1] for row in found[0][1]["models"]):
        rows = []
        for seed, report in found:
            model, run = of(report["models"], "name", name), of(report["runs"], "name", name)
            pair = against_base(report, name) or {"win_rate": nothing}
            seconds = {"value": run["seconds"] if run else None}
            kl = nothing if "best of" in name else model["kl"]  # best of n has a bound alone
            rows.append((seed, [model["gold"], model["proxy"], kl, pair["win_rate"], seconds]))
        lines += by_seed(MODELS.get(name, name), rows, [(3,), (2,), (2,), (1, True), (0,)])
    first = found[0][1]["setup"]
    note = f"Utility: score of the simulated recruiter, 0 to 1. Reward model: its standardised score. {first['n_prompts']} prompts about roles that are in no training row, {first['samples']} answers each; [95 % interval over prompts]. KL from the base in nats per answer."  # fmt: skip
    seeds = len(found)
    ends = [[of(r["models"], "name", name) for name in ("dpo", "ppo")] for _, r in found]
    more = sum(ppo["proxy"]["value"] > dpo["proxy"]["value"] for dpo, ppo in ends)
    less = sum(ppo["gold"]["value"] < dpo["gold"]["value"] for dpo, ppo in ends)
    story = f"PPO ends with a higher reward-model score than DPO in {more} of {seeds} runs, and with lower utility in {less}."  # fmt: skip
    note += f" Seconds: training time, logged on a CPU that also did other work; PPO's includes its reward model. {seeds} seed{'s' * (seeds > 1)}."
    head = ["model", "", "utility", "reward model", "KL", "wins against the base", "seconds"]
    means = [line for line in lines if line[0]]
    each = f"<details><summary>each seed</summary>\n\n{table(head, lines)}\n\n</details>\n\n" * (means != lines)  # fmt: skip
    return f"{table(head, means)}\n\n{each}{note}\n\n{story}"


def frontier():
    """Utility at the same distance from the base: a row per seed, a column per model."""
    rows = []
    for seed, report in reports("compare"):
        if at := report["equal_kl"]:
            golds = {r["model"].rsplit("/", 1)[-1]: f"{r['gold']:.3f}" for r in at["table"]}
            columns = sorted(golds)
            rows.append([seed, f"{at['sqrt_kl']:.2f}", *map(golds.get, columns)])
    return table(["seed", "√KL", *(MODELS.get(name, name) for name in columns)], rows)


def answer():
    """A real model's answers before and after DPO: of the prompts in its report the one with the median gain."""
    ((_, report),) = reports("real")
    gain = lambda sample: sample["answers"][1]["score"] - sample["answers"][0]["score"]  # noqa: E731
    sample = sorted(report["samples"], key=gain)[len(report["samples"]) // 2]
    prompts = (REPO / "data/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    row = next(row for row in map(json.loads, prompts) if row["id"] == sample["id"])
    lines = [("asked", row["prompt"][0]["content"]), *zip(("before", "after"), (one["text"] for one in sample["answers"]))]  # fmt: skip
    quoted = "\n>\n".join(f"> *{name}:* {cut(' '.join(text.split()), 170)}" for name, text in lines)
    return (
        f"SmolLM2-135M-Instruct, before and after `{REAL_COMMAND}` on a CPU, on a role of no training pair "
        f"(of {len(report['samples'])} prompts the one with the median gain):\n\n{quoted}"
    )


def cut(text, most):
    return text if len(text) <= most else text[:most].rsplit(" ", 1)[0] + " …"


def result():
    """The front page: what each method learns from and what it reaches on unseen roles, by the bundled base and a real model."""
    found, (_, real), rows = reports("compare"), reports("real")[0], []
    base = found[0][1]["models"][0]["name"].rsplit("/", 1)[-1]
    real_utility = {"dpo": real["models"][1]["gold"], base: real["models"][0]["gold"]}
    for name, source in ((base, "–"), ("dpo", "votes"), ("ppo", "a reward model of these votes")):
        gold = over_seeds([of(report["models"], "name", name)["gold"] for _, report in found], 2)
        pairs = [against_base(report, name) for _, report in found]
        wins = over_seeds([p["win_rate"] for p in pairs], 0, True) if all(pairs) else "–"
        measured = show(real_utility[name], 2) if name in real_utility else "–"
        rows.append([f"**{MODELS[name]}**", source, gold, wins, measured])
    grpo = [report for _, report in reports("grpo")]
    before, after = (
        over_seeds([{"value": report[key]["score"]} for report in grpo], 0, True)
        for key in ("test_before", "test_after")
    )
    ends = [[of(r["models"], "name", name) for name in ("dpo", "ppo")] for _, r in found]
    higher = sum(dpo["gold"]["value"] > ppo["gold"]["value"] for dpo, ppo in ends)
    proxy = sum(ppo["proxy"]["value"] > dpo["proxy"]["value"] for dpo, ppo in ends)
    head = ["model", "learns from", "bundled base: utility", "its wins", "SmolLM2-135M: utility"]
    story = (
        f"*Utility* is the score (0 to 1) by the simulated recruiter whose noisy votes trained them, on unseen roles: mean of {len(found)} seeds (range); SmolLM2: one seed [95 %]. "
        f"DPO has more than PPO in {higher} of {len(found)} runs, though PPO gets the higher reward-model score in {proxy}. Rubric GRPO learns without votes: criteria met rise from {before} to {after}."
    )
    return f"{table(head, rows)}\n\n{story}"


RM_KNOWS = {
    "accuracy": "right on held-out pairs", "accuracy_base": "on the base's answers", "accuracy_tuned": "on a DPO policy's answers",
    "ece": "calibration error",
}  # fmt: skip
RM_WORTH = {
    "best_of_4": "best of 4", "best_of_16": "best of 16", "best_of_64": "best of 64", "gold": "policy", "kl": "its KL",
    "gold_at_kl": "policy at 2.5 nats",
}  # fmt: skip


def reward_model():
    """What each reward model of reports/demo/reward-model.jsonl knows, what it is worth, and which of these go together."""
    file = REPO / "reports" / "demo" / "reward-model.jsonl"
    runs = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    names = list(dict.fromkeys(run["variant"] for run in runs))

    def of_variant(name, key):
        return [{"value": run.get(key)} for run in runs if run["variant"] == name]

    def rows(columns, names):
        return [[name, *(over_seeds(of_variant(name, key), 2 + (key != "kl")) for key in columns)] for name in names]  # fmt: skip

    trained = [name for name in names if of_variant(name, "accuracy")[0]["value"] is not None]
    means = {
        key: [np.mean([x["value"] for x in of_variant(name, key)]) for name in trained]
        for key in (*RM_KNOWS, *RM_WORTH)
    }
    together = [[(RM_KNOWS | RM_WORTH)[key], f"{np.corrcoef(means[key], means['gold'])[0, 1]:.2f}"] for key in list(means)[:7]]  # fmt: skip
    return "\n\n".join(
        [
            table(["reward model", *RM_KNOWS.values()], rows(RM_KNOWS, trained)),
            table(["utility of", *RM_WORTH.values()], rows(RM_WORTH, names)),
            table(
                [f"over {len(trained)} reward models", "correlation with PPO's utility"], together
            ),
        ]
    )


def learnt():
    """What the reward model and rubric GRPO learnt, in a sentence each."""
    reward, grpo = reports("reward"), reports("grpo")
    right = [r["accuracy"] for _, r in reward]
    longer = [r["length_baseline"] for _, r in reward]
    ends = [[{"value": r[k]["score"], **{e: r[k][e] for e in ("low", "high")}} for _, r in grpo] for k in ("test_before", "test_after")]  # fmt: skip
    before, after = (over_seeds(end, 1, True) for end in ends)
    pairs, prompts = reward[0][1]["accuracy"]["n"], grpo[0][1]["test_after"]["n"]
    driven = ""
    for _, report in reports("overdriven"):  # one seed: it shows what happens, not how often
        run = of(report["frontier"], "model", "overdriven")
        mark, end = run["overoptimised"], run["points"][-1]
        if mark:
            driven = f"""
- **PPO driven too far** on purpose (`make overdriven`): on validation prompts utility rises from {run["points"][0]["gold"]:.2f} to {mark["gold"]:.2f} at step {mark["step"]} ({mark["kl"]:.1f} nats), then falls to {end["gold"]:.2f} at step {end["step"]} ({end["kl"]:.0f} nats) while the reward model's score rises from {next(p["proxy"] for p in run["points"] if p["step"] == mark["step"]):.2f} to {end["proxy"]:.2f}; the report marks step {mark["step"]}."""
    return f"""- **Reward model**: agrees with the recruiter in {over_seeds(right, 1, True)} of {pairs} held-out pairs; "the longer answer wins" in {over_seeds(longer, 1, True)}.
- **Rubric GRPO**, {grpo[0][1]["last_step"]} steps: share of criteria met on {prompts} held-out prompts, sampled at temperature 1: from {before} to {after}.{driven}"""


def with_verdict(record, verdict):
    """An effect with its interval and the first words of its verdict; a difference that was found is bold.

    >>> with_verdict({"value": 0.2, "low": 0.1, "high": 0.3}, "difference found: larger after, smaller than 0.5 SD")
    '0.20 [0.10, 0.30] **difference found: larger after** (< 0.5 SD)'
    """
    word = re.split(r" within| \(|, smaller than|: unchanged", verdict)[0]
    word = f"**{word}**" if word.startswith("difference found") else word
    small = re.search("smaller than (.+)", verdict)
    return f"{show(record, 2)} {word}" + (f" (< {small[1]})" if small else "")


def lesson():
    """The planted preference, Black against White names: in reward models (surface b), and in policies as a change (c);
    what the cured policy is worth."""
    seeds, cured, worth = (
        reports("lesson"),
        reports("lesson-twins-cured"),
        reports("lesson-policy-cured"),
    )
    if not seeds:
        return "Not measured yet: `make lesson` has not been run."
    black = lambda rows: next(r for r in rows if (r["group"], r["reference"]) == ("Black", "White"))  # noqa: E731
    rewards, policies = [], []
    for folder, name in LESSON_REWARDS.items():
        right = {
            seed: f"{100 * r['accuracy']['value']:.1f}" for seed, r in reports(f"lesson-{folder}")
        }
        parts = [[s for s in report["surfaces"] if s["surface"] == "b"] for _, report in seeds]
        rows = [black(of(surfaces, "model", folder)["rows"]) for surfaces in parts]
        cells = [with_verdict(row["d"], row["verdict"]) for row in rows]
        rewards.append([name, *cells, ", ".join(right.get(seed, "–") for seed, _ in seeds) + " %"])
    for folder, name in LESSON_POLICIES.items():
        audits = cured if folder == "policy-cured" else seeds
        parts = [[c for c in report["changes"] if c["surface"] == "c"] for _, report in audits]
        rows = [black(of(changes, "model", folder)["rows"]) for changes in parts]
        levels = [over_seeds([{"value": r["levels"][i]} for r in rows], 2) for i in (0, 1)]
        policies.append([name, *levels, *(with_verdict(r["D"], r["verdict"]) for r in rows)])
    words = [f"seed {seed}" for seed, _ in seeds]
    first = ["votes behind the reward model", *(f"d, {w}" for w in words), "accuracy on fair pairs, by seed"]  # fmt: skip
    second = ["votes behind the policy", "before", "after", *(f"change, {w}" for w in words)]
    third = [[name, *(show(of(r["models"], "name", folder)["gold"], 2) for _, r in worth)] for folder, name in LESSON_WORTH.items()]  # fmt: skip
    tables = (
        table(first, rewards),
        table(second, policies),
        table(["policy", *(f"utility, {w}" for w in words)], third),
    )
    return "\n\n".join(tables)


def fairness():
    """Surface c, the log-odds of the decision: the gap between two groups of names before and after, and its change."""
    cells, seeds = {}, reports("fairness")
    for seed, report in seeds:
        for change in (c for c in report["changes"] if c["surface"] == "c"):
            folder = change["model"].rsplit("/", 1)[-1]
            name = MODELS.get(folder, folder)
            for row in change["rows"]:
                found = cells.setdefault((f"{row['group']} − {row['reference']}", name), {})
                found[seed] = row
    lines = []
    order = sorted(cells, key=lambda cell: (cell[0] != "Female − Male", cell))
    for (group, name), rows in ((cell, cells[cell]) for cell in order):
        levels = [over_seeds([{"value": r["levels"][i]} for r in rows.values()], 2) for i in (0, 1)]
        changes = []
        for seed, _ in seeds:
            if seed not in rows:
                changes.append("–")
                continue
            changes.append(with_verdict(rows[seed]["D"], rows[seed]["verdict"]))
        lines.append([group, name, *levels, *changes])
    head = ["names", "model", "before", "after", *(f"change, seed {seed}" for seed, _ in seeds)]
    return table(head, lines)


def speed():
    """The headlines of reports/bench, by the functions that bench/run.py prints its own tables with."""
    folder, lines = REPO / "reports" / "bench", []
    files = {work: folder / f"{work}.jsonl" for work in HEADLINES}
    files = {work: file for work, file in files.items() if file.is_file()}
    if not files:
        return "Not measured yet: `bench/` has not been run."
    for work, file in files.items():
        _, *runs = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        timed = [run for run in runs if run["side"] != "tuning"]
        rows = bench.per_token(timed)
        asked = (
            ("loop_seconds", "plain"),
            ("loop_seconds", "tuned"),
            ("seconds", "tuned"),
            ("peak_mb", "tuned"),
        )
        found = [bench.ratios(rows, key, opponent) for key, opponent in asked]
        shown = [f"{median(ratios):.2f}" if ratios else "–" for ratios in found]
        link = f"[{HEADLINES[work]}](bench/{work}.md)"
        lines.append([link, *shown])
    head = ["work", "loop, plain", "loop, tuned", "whole, tuned", "memory, tuned"]
    note = (
        "Time: TRL's CPU seconds divided by ours, so above 1 this project is faster. Memory: our peak divided by TRL's, so below 1 this project uses less. *Loop*: the training steps; *whole*: from start to saved model, "
        "mostly start-up where steps are few. *Plain*: TRL with the optimiser batch as its device batch; *tuned*: the fastest of its exact settings that the bench tried. "
        "[bench](bench/README.md) has every comparison with its spread, machine and versions, and the targets that were missed."
    )
    return f"{table(head, lines)}\n\n{note}"


def sizes():
    """The stages with the lines of each script, to the nearest 50: not every edit of a script makes the page stale."""
    rows = []
    for script, words in STAGES:
        lines = len((REPO / script).read_text(encoding="utf-8").splitlines())
        rows.append([f"[`{script}`]({script})", f"{50 * round(lines / 50):,}", words])
    return table(["script", "lines", "in → out"], rows)


def needed_n(rate):
    """Comparisons that tell a true win rate p from ½ in 4 of 5 studies: ((z·½ + z₈₀·√(p(1−p))) / (p − ½))²

    >>> [needed_n(p) for p in (0.55, 0.60, 0.65, 0.70)]
    [783, 194, 85, 47]
    """
    return math.ceil(((Z95 / 2 + Z80 * math.sqrt(rate * (1 - rate))) / (rate - 0.5)) ** 2)


def comparisons():
    """How many comparisons tell a true win rate from ½, by the share of votes that are right."""
    rows = []
    for rate in (0.52, 0.55, 0.60, 0.65, 0.70, 0.80):
        needed = [needed_n(0.5 + (rate - 0.5) * (2 * q - 1)) for q in (1, 0.9, 0.8, 0.7)]
        rows.append([f"{100 * rate:.0f} %", *(f"{n:,}" for n in needed)])
    agree = [q * q + (1 - q) ** 2 for q in (1, 0.9, 0.8, 0.7)]
    head = [f"votes right {100 * q:.0f} % (two people agree {100 * a:.0f} %)" for q, a in zip((1, 0.9, 0.8, 0.7), agree)]  # fmt: skip
    return table(["A is truly better in", *head], rows)


def intervals():
    """How wide the interval of a share near .75 is, by the number of pairs."""
    rows = []
    for n in (50, 100, 200, 400, 800, 1600):
        low, high = wilson(0.75 * n, n)
        rows.append([f"{n:,}", f"{100 * low:.0f} to {100 * high:.0f} %"])
    return table(["held-out pairs", "75 % right means"], rows)


# ---- memory: bench/memory.py measures, these are its runs ----

MEMORY = REPO / "reports" / "memory.json"
KINDS = {
    "weights": "weights", "copies": "compute copies", "gradients": "gradients", "moments": "moments",
    "activations": "activations", "logits": "logits", "temporaries": "temporaries",
}  # fmt: skip
ROLLOUT = "--max-new-tokens 256 --rollouts 8 --batch-size 8 --reward-model REWARD"
GROUPS = "--max-new-tokens 256 --group-size 8 --groups-per-batch 8 --train-ratio 0.99"
# what the table calls a stage: script, flags. Two forwards per step need what twenty do; 8 answers of
# ppo.py stand for 64, as the sampler's 64 answers in grpo_rubric.py are never the peak
MEMORY_STAGES = {
    "`sft.py`": ("sft", "--batch-size 8"),
    "`dpo.py`": ("dpo", "--batch-size 4"),
    "`reward_train.py`": ("reward_train", "--batch-size 4"),
    "`ppo.py --critic shared`": ("ppo", f"{ROLLOUT} --critic shared"),
    "`ppo.py --critic rm`": ("ppo", f"{ROLLOUT} --critic rm"),
    "`grpo_rubric.py`, `grpo_agent.py`": ("grpo_rubric", GROUPS),
    "the same with `--beta`": ("grpo_rubric", f"{GROUPS} --beta 0.01"),
}
# the promises that tests/test_memory.py holds: model, script, flags, type, GB, tokens per forward, answers at once
PROMISES = {
    "`dpo.py`, Qwen2.5-0.5B, prompts and answers of 512 tokens": (
        "Qwen2.5-0.5B",
        "dpo",
        "--batch-size 2",
        "fp16",
        15,
        1536,
        256,
    ),
    "`reward_train.py`, the same": (
        "Qwen2.5-0.5B",
        "reward_train",
        "--batch-size 2",
        "fp16",
        15,
        1536,
        256,
    ),
    "`ppo.py`, the same model as policy, reference, reward and shared critic": (
        "Qwen2.5-0.5B",
        "ppo",
        "--rollouts 4 --batch-size 4 --reward-model REWARD --critic shared",
        "fp16",
        15,
        608,
        256,
    ),
    "the recipe: `grpo_rubric.py`, Llama-3.1-8B, LoRA 32, answers of 2,048 tokens": (
        "Llama-3.1-8B",
        "grpo_rubric",
        "--lora-rank 32 --max-new-tokens 2048 --group-size 8 --groups-per-batch 12 --train-ratio 0.99",
        "bf16",
        80,
        8192,
        90,
    ),
}


def measure_memory():
    """Write reports/memory.json: [{"of", "model", "lora", "phases", "kinds"}], a record per run."""
    import contextlib
    import importlib.util
    import os

    spec = importlib.util.spec_from_file_location("bench_memory", REPO / "bench" / "memory.py")
    meter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(meter)
    records = []

    def measure(of, model, lora, stage, flags, *more, **keywords):
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            peaks = meter.deep_peaks(
                stage, model, [*flags.split(), "--lora-rank", lora], *more, **keywords
            )
        phases = {}
        for (phase, _), kinds in peaks.items():
            phases[phase] = max(phases.get(phase, 0), meter.total(kinds))
        largest = {
            key: max(0, round(size)) for key, size in max(peaks.values(), key=meter.total).items()
        }
        records.append({"of": of, "model": model, "lora": lora, "phases": phases, "kinds": largest})
        MEMORY.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
        print(
            of, model, lora, {key: f"{size / 1e9:.2f}" for key, size in phases.items()}, flush=True
        )

    for of, (model, stage, flags, dtype, limit, *sizes) in PROMISES.items():
        lora, tokens, rows = (32, 300, 26) if "lora" in flags else (0, 512, 8)
        longest = {"prompt": tokens, "answer": tokens, "rows": rows}
        measure(of, model, lora, stage, flags, dtype, limit=limit, sizes=sizes, **longest)
    rows = {"prompt": 256, "answer": 256, "rows": 20}  # enough for two whole steps
    short = {"prompt": 150, "answer": 100, "rows": 20, "sizes": (512, 256)}
    for of, (stage, flags) in MEMORY_STAGES.items():
        for lora in (0, 16):
            cpu = flags.replace("--max-new-tokens 256", "--max-new-tokens 96")
            measure(f"{of} on a CPU", "SmolLM2-135M", lora, stage, cpu, "fp32", False, **short)
            saving = f"{flags} --grad-checkpoint"
            for model in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B"):
                measure(of, model, lora, stage, saving, sizes=(2048, 64), **rows)


def memory_records(of, lora):
    found = json.loads(MEMORY.read_text(encoding="utf-8"))
    return {r["model"]: r for r in found if (r["of"], r["lora"]) == (of, lora)}


def fits_table(lora):
    """GB of each stage and size, and the smallest of the two machines that it fits."""
    lines, models = [], ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B")
    for of in MEMORY_STAGES:
        records, cells = memory_records(of, lora), []
        for model in models:
            size = max(records[model]["phases"].values()) / 1e9
            place = "T4" if size <= 15 else "one 80 GB" if size <= 76 else "more than 80 GB"
            cells.append(f"{size:.1f}: {place}")
        lines.append([of, *cells])
    return table(["", *models], lines)


def promised():
    lines = []
    for of, (*_, limit, tokens, answers) in PROMISES.items():
        (record,) = (r for lora in (0, 32) for r in memory_records(of, lora).values())
        size = max(record["phases"].values()) / 1e9
        lines.append([of, f"{tokens:,}", answers, f"**{size:.1f}** of {limit}", *kinds_of(record)])
    return table(
        ["", "tokens per forward", "answers at once", "GB", *KINDS.values(), "cache"], lines
    )


def kinds_of(record):
    return [f"{record['kinds'].get(kind, 0) / 1e9:.2f}" for kind in (*KINDS, "cache")]


def on_a_cpu():
    lines = []
    for of in MEMORY_STAGES:
        for lora in (0, 16):
            record = memory_records(f"{of} on a CPU", lora)["SmolLM2-135M"]
            size = max(record["phases"].values()) / 1e9
            lines.append([f"{of}, LoRA" if lora else of, f"**{size:.2f}**", *kinds_of(record)[:-1]])
    return table(["", "GB", *KINDS.values()], lines)


BLOCKS = {
    "answer": answer, "result": result, "reward-model": reward_model, "demo": demo, "frontier": frontier, "learnt": learnt, "fairness": fairness, "lesson": lesson, "speed": speed, "sizes": sizes,
    "comparisons": comparisons, "intervals": intervals, "memory-full": lambda: fits_table(0), "memory-lora": lambda: fits_table(16), "memory-promised": promised, "memory-cpu": on_a_cpu,
}  # fmt: skip


def filled(text):
    """The page with every block made anew."""
    return re.sub(
        r"(?<=<!-- numbers:)([\w-]+)( -->\n).*?(?=<!-- /numbers -->)",
        lambda m: f"{m[1]}{m[2]}{BLOCKS[m[1]]()}\n",
        text,
        flags=re.S,
    )


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="Numbers of the pages from the committed reports.")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if stale")
    parser.add_argument("--memory", action="store_true", help="measure reports/memory.json anew")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    if args.memory:
        measure_memory()
    made = {REPO / page: filled((REPO / page).read_text(encoding="utf-8")) for page in PAGES}
    stale = [f for f, text in made.items() if not f.is_file() or f.read_text("utf-8") != text]
    for file in stale:
        if not args.check:
            file.write_text(made[file], encoding="utf-8")
        print(f"{'stale' if args.check else 'wrote'} {file.relative_to(REPO)}")
    return 1 if stale and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
