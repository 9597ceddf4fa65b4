"""The tables, answers and picture of showcase.md, from what `make showcase` wrote:

python reports/showcase.py runs/showcase-0 [runs/showcase-1 …] > tables.md

Each folder holds NAME.jsonl of `examples/reference_calls.py answers` for the models below. An
interval is the mean ± 1.96 standard errors over test calls; that of a share of wins is Wilson's.
"""

import json
import random
import sys
from pathlib import Path
from statistics import fmean, stdev

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from statsmodels.stats.proportion import proportion_confint

ROOT = Path(__file__).resolve().parent.parent
NAMES = {
    "base": "untrained", "sft": "SFT on written summaries", "best": "SFT on its own best answers",
    "dpo1": "DPO, round 1", "dpo2": "DPO, round 2", "lora": "DPO, round 1, by LoRA",
    "grpo": "GRPO", "ppo": "PPO",
}  # fmt: skip
COLUMNS = {
    "score": "score", "kept": "facts kept", "hire": "hiring again right", "new": "words not in the call",
    "invented": "numbers and names invented", "first_person": "in the first person",
    "small_talk": "small talk", "words": "words",
}  # fmt: skip
AS_SHARE = ("kept", "hire", "new", "first_person")


def read(path):
    """Objects of a JSONL file, by call."""
    rows = [json.loads(line) for line in Path(path).open(encoding="utf-8")]
    return {row["id"]: row for row in rows}


def interval(values):
    """(mean, 1.96 standard errors)."""
    return fmean(values), 1.96 * stdev(values) / len(values) ** 0.5


def shown(key, values):
    """Mean [interval] of a column."""
    mean, half = interval(values)
    if key in AS_SHARE:
        return f"{mean:.0%} [{mean - half:.0%}, {mean + half:.0%}]".replace("%", " %", 1)
    digits = 0 if key == "words" else 2
    return f"{mean:.{digits}f} [{mean - half:.{digits}f}, {mean + half:.{digits}f}]"


def won(rows, others):
    """In what share of calls is a model's score above another's? A draw is half of one."""
    ahead = [row["score"] - others[i]["score"] for i, row in rows.items()]
    wins = sum((gain > 0) + 0.5 * (gain == 0) for gain in ahead)
    low, high = proportion_confint(wins, len(ahead), method="wilson")
    return f"{wins / len(ahead):.0%} [{low:.0%}, {high:.0%}]".replace("%", " %", 1)


def table(answers):
    """A row a model, a column a mark; and how often its score beats two others'."""
    head = [*COLUMNS.values(), "wins against untrained", "wins against SFT"]
    print("| model |", " | ".join(head), "|")
    print("|---" * (len(head) + 1) + "|")
    for name, rows in answers.items():
        cells = [shown(key, [row[key] for row in rows.values()]) for key in COLUMNS]
        cells += [won(rows, answers[other]) if other != name else "–" for other in ("base", "sft")]
        print(f"| {NAMES[name]} |", " | ".join(cells), "|")


def seeds(folders):
    """The score of each model, a column a seed."""
    print("\n| score |", " | ".join(f"seed {folder.name[-1]}" for folder in folders), "|")
    print("|---" * (len(folders) + 1) + "|")
    for name in NAMES:
        files = [folder / f"{name}.jsonl" for folder in folders]
        values = [[row["score"] for row in read(f).values()] if f.is_file() else [] for f in files]
        if all(values):
            print(f"| {NAMES[name]} |", " | ".join(shown("score", some) for some in values), "|")


def example(before, after):
    """The call of median gain among those whose score rose."""
    gains = sorted((after[i]["score"] - before[i]["score"], i) for i in after)
    risen = [i for gain, i in gains if gain > 0]
    return risen[len(risen) // 2]


def show(calls, answers, i):
    """A call and each model's answer to it."""
    print(f"\n**{i}** {calls[i]['prompt'][0]['content']}\n")
    for name, rows in answers.items():
        text = " ".join(rows[i]["answer"].split())
        print(f"- *{NAMES[name]}* ({rows[i]['score']:.2f}): {text}")


def picture(folders, path):
    """Score on the test calls before training and after each round, a line a seed."""
    figure, axes = plt.subplots(figsize=(6, 3))
    rounds = ("base", "sft", "dpo1", "dpo2")
    for folder in folders:
        if not all((folder / f"{name}.jsonl").is_file() for name in rounds):
            continue
        rows = [list(read(folder / f"{name}.jsonl").values()) for name in rounds]
        means, halves = zip(*(interval([row["score"] for row in some]) for some in rows))
        axes.errorbar(range(4), means, halves, marker="o", capsize=3, label=folder.name[-1])
    axes.set_xticks(range(4), ["untrained", "SFT", "DPO, round 1", "round 2"])
    axes.set_ylabel("score, unseen roles")
    axes.spines[["top", "right"]].set_visible(False)
    if len(folders) > 1:
        axes.legend(title="seed", frameon=False)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def main(folders):
    """Print everything of the first folder; the picture is of all."""
    folders = [Path(folder) for folder in folders]
    calls = read(ROOT / "data" / "reference_calls.jsonl")
    names = [name for name in NAMES if (folders[0] / f"{name}.jsonl").is_file()]
    answers = {name: read(folders[0] / f"{name}.jsonl") for name in names}
    table(answers)
    seeds(folders)
    show(calls, answers, example(answers["base"], answers["dpo2"]))
    print("\nTen calls, drawn by chance:")
    for i in random.Random(0).sample(sorted(answers["base"]), 10):
        show(calls, answers, i)
    picture(folders, ROOT / "docs" / "img" / "showcase.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
