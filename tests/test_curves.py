"""parts/curves.py: what the logs of runs say: score at equal KL, and what a gain cost.

curves_runs.jsonl   runs with their evaluations
"""

import json
import math

import pandas as pd
import pytest

import tiny
from case_rows import rows_of
from parts.curves import efficiency, equal_kl, gain_at, read_run

COSTS = "pairs", "reward calls", "tokens", "seconds"
ARGS = {"model": "base", "prompts": "val.jsonl", "gold": "g.py:f", "temperature": 1.0}


def run_of(tmp_path, name, golds, root_kls, rows=(), **args):
    """A run folder with an evaluation after each eight answers of 10 tokens and 1 second."""
    folder, log = tmp_path / name, []
    folder.mkdir()
    (folder / "args.json").write_text(json.dumps({"stage": "ppo", "args": ARGS | args}))
    update = {"n": 4, "n_ties": 1, "episodes": 8, "answer_tokens": 80, "time_s": 1.0}
    for i, (gold, root_kl) in enumerate(zip(golds, root_kls)):
        kl = None if root_kl is None else root_kl**2
        step = [update] * (i > 0) + [{"val/gold": gold, "val/kl": kl, "time_s": 9.0, "n": 64}]
        log += [{"step": i} | row for row in [*step, {"eval/loss": 0.5, "time_s": 9.0}]]
    tiny.write_rows(folder / "metrics.jsonl", [*log, *rows])
    return read_run(folder)


def test_policies_meet_at_the_smaller_kl_of_the_two(tmp_path):
    """It was where best of 16's bound lies, for every pair. A ends at √KL 1; B is then half of the
    way from .2 to .4, C goes there in one jump from 0 to 3, and D has another reference."""
    runs = {row["name"]: run_of(tmp_path, **row) for row in rows_of("curves_runs")}
    rows = {(row["model"], row["against"]): row for row in equal_kl(runs)}
    assert rows.keys() == {(x, y) for x in "ABC" for y in "ABC" if x != y}
    assert rows["A", "B"]["root_kl"] == rows["B", "A"]["root_kl"] == 1.0
    assert rows["A", "B"]["gain"] == pytest.approx(0.3)  # its own end
    assert rows["B", "A"]["gain"] == pytest.approx(0.3)
    assert rows["C", "A"]["gain"] is None  # a line from 0 to 3 is no measurement at 1
    assert rows["B", "C"]["gain"] == pytest.approx(-0.1)


def test_the_first_time_that_a_run_came_so_far_counts():
    came = (0, 0.0), (0.2, 1.0), (0.3, 0.7), (0.9, 1.1)
    points = pd.DataFrame(came, columns=["gain", "root_kl"])
    assert gain_at(points, 0.9) is None  # between evaluations at 0 and 1
    assert gain_at(points, 1.0) == 0.2


def test_costs_until_a_share_of_the_largest_gain(tmp_path):
    """PPO has the pairs and seconds of its reward model; DPO has pairs and asks nobody. Its gain of 5
    by another score was PPO's goal."""
    reward = run_of(tmp_path, "rm", [0.1, 0.1], [None, None], pairs=["x"])
    assert reward["total"] == dict(zip(COSTS, (5, 8, 80, 1.0)))
    ppo = run_of(tmp_path, "p", [0.3, 0.5, 0.7], [0, 1, 2], reward_model=str(tmp_path / "rm"))
    dpo = run_of(tmp_path, "d", [0.3, 5.3], [0, 1], pairs=["x"], reward_model="gone", gold="h.py:f")
    lost = run_of(tmp_path, "l", [0.3, 0.3], [0, 1], reward_model="gone")
    rows = efficiency({"PPO": ppo, "DPO": dpo, "lost": lost})
    assert [f"{row['model']}: {row['until']}" for row in rows] == [
        "PPO: a gain of 0.36, step 2", "PPO: its end",
        "DPO: a gain of 4.50, step 1", "DPO: its end", "lost: its end",
    ]  # fmt: skip
    first, _, _, second, unknown = ([row[cost] for cost in COSTS] for row in rows)
    assert (first, second) == ([5, 16, 160, 3.0], [5, 8, 80, 1.0])
    assert unknown == pytest.approx([math.nan, 8, 80, math.nan], nan_ok=True)
    assert [row["until"] for row in efficiency({"lost": lost})] == ["its end"]


def test_noise_is_no_gain(tmp_path):
    """.1 ± .2 was a goal that the others "never" reached."""
    noisy = {"step": 9, "val/gold": 0.4, "val/gold_low": 0.2, "val/gold_high": 0.6}
    assert len(efficiency({"x": run_of(tmp_path, "x", [0.3], [0], [noisy])})) == 1


def test_logs_that_are_cut_or_broken(tmp_path):
    """A last line that a kill cut is left out; without a log a cost is unknown, and not 0."""
    cut = run_of(tmp_path, "cut", [0.3, 0.5], [0, 1])
    (tmp_path / "cut/metrics.jsonl").open("a").write('{"step": 3, "time')
    assert read_run(tmp_path / "cut")["total"] == cut["total"]
    (tmp_path / "cut/metrics.jsonl").unlink()
    assert all(map(math.isnan, read_run(tmp_path / "cut")["total"].values()))
    assert read_run(tmp_path) is None
