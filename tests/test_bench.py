"""bench/: nobody wins by doing less: what must agree, how ratios are taken, what both are given."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import common
import judge
from conftest import REPO
from tiny import cases

sys.path.insert(0, str(REPO / "bench"))
import run as bench
import work

TOY = "--pairs 32 --layers 1 --hidden 32 --rounds 1 --tune-steps 1 --threads 1".split()


def pair_run(side, loop=1.0, losses=(0.7, 0.6), **more):
    row = dict(task="dpo", side=side, flags={}, round=0, losses=list(losses), weight_norm=100.0)
    row |= dict(loop_seconds=loop, seconds=4.0, tokens=1000, peak_mb=500)
    return row | more


# 9e-5 off is rounding, 1.1e-4 another computation; a peer that stops early would be fast; NaN
# compares as False; GRPO's draw their own: time is per token
@cases("""
task | change | word
dpo | losses=.7,.60009 | None
dpo | losses=.7,.60011 | step 2
dpo | losses=.7 | 2 steps against 1
dpo | losses=.7,nan | step 2
dpo | weight_norm=100.0009 | None
dpo | weight_norm=100.0011 | weights
dpo | weight_norm=nan | weights
ppo | tokens=1029 | None
ppo | tokens=1040 | tokens
ppo | updates=4 | updates
grpo | tokens=500 losses= | None
""")
def test_runs_that_may_not_be_compared(task, change, word):
    changes = {"updates": 16}
    for part in change.split():
        key, _, values = part.partition("=")
        values = [float(value) for value in values.split(",") if value]
        changes[key] = values if key == "losses" else values[0]
    ours, theirs = pair_run("ours", updates=16), pair_run("plain", **changes)
    one, two = bench.differs(task, ours, theirs), bench.differs(task, theirs, ours)
    assert (one is None) == (two is None) == (word is None) and (word or "") in (one or "")


def test_no_table_when_the_losses_differ(monkeypatch, tmp_path):
    last = {"plain": 0.5}

    def one_run(args, place, side, **settings):
        return pair_run(side, losses=(0.7, last.get(side, 0.6)))

    monkeypatch.setattr(bench, "one_run", one_run)
    monkeypatch.setattr(bench, "run_child", lambda *args: None)
    command = ["dpo", "--rounds", "1", "--out", str(tmp_path)]
    with pytest.raises(bench.Refused, match="(?s)losses of step 2.*no ratio"):
        bench.main(command)
    assert list(tmp_path.iterdir()) == []
    last.clear()
    bench.main(command)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["dpo.jsonl", "dpo.md"]


def test_two_samples_of_one_distribution():
    flat = [[i % 4096 for i in range(7 * k, 7 * k + 60)] for k in range(200)]
    assert min(bench.same_distribution(flat, flat)) == pytest.approx(1.0)
    others = {"lengths": [ids[:40] for ids in flat], "tokens": [[i // 4 for i in ids] for ids in flat]}  # fmt: skip
    for words, other in others.items():
        with pytest.raises(bench.Refused, match=words):
            bench.same_distribution(flat, other)


def test_ratios_of_neighbours():
    order = "plain 8 0, ours 2 0, tuned 3 0, tuned 5 1, ours 1 1, plain 6 1"
    runs = [pair_run("tuning", loop=99)]
    for side, loop, n in map(str.split, order.split(", ")):
        peak = 500 if side == "ours" else 1000
        runs.append(pair_run(side, int(loop), round=int(n), peak_mb=peak))
    assert bench.ratios(runs, "loop_seconds", "plain") == [4, 6]
    assert bench.ratios(runs, "loop_seconds", "tuned") == [1.5, 5]
    assert bench.ratios(runs, "peak_mb", "plain") == [0.5, 0.5]
    assert bench.shown([4, 6]) == "5.00 [4.00, 6.00]"
    tried = [pair_run("tuning", loop=loop, flags={"device_batch": loop}) for loop in (2, 1, 3)]
    assert bench.fastest(tried) == {"device_batch": 1}
    pair = [pair_run("ours", seconds=3.0), pair_run("edition", seconds=4.0, tokens=500)]
    assert bench.ratios(pair, "seconds", "edition") == [0.75]
    assert bench.per_token(pair) == pair  # both read the same tokens
    pair[0]["task"] = "grpo"
    assert bench.ratios(bench.per_token(pair), "seconds", "edition") == [0.375]


def test_the_cells_of_the_table():
    runs = [pair_run("plain", 9.0, seconds=10.0), pair_run("ours", 3.0, peak_mb=250)]
    assert bench.table(runs)[-1].split(" | ")[1:] == [
        "2.50 [2.50, 2.50]", "3.00 [3.00, 3.00]", "0.50 [0.50, 0.50]", "3.0 / 9.0", "250.0 / 500.0 |"
    ]  # fmt: skip
    for run in runs:
        del run["loop_seconds"]
    assert "| 4.0 / 10.0 |" in bench.table(runs)[-1]


@pytest.mark.parametrize("task", [*work.STAGES, *work.SAMPLERS])
def test_command_lines_of_two_editions(task, monkeypatch, tmp_path):
    with pytest.raises(SystemExit):  # TRL has no PPO any more: without a folder there is no peer
        bench.parse_args(["ppo"])
    args = bench.parse_args(["dpo", "--edition", str(tmp_path)])
    s = dict(task=task, folder="work", out="run", micro_tokens=64, steps=2, new_tokens=8)
    stage, flags = work.stage_flags(**s)
    known = {tmp_path: {*flags, "--ref-cache"}, REPO: {*flags}}
    monkeypatch.setattr(bench, "known_flags", lambda root, script: known[root])
    words = [f"{stage}.py", *(x for pair in flags.items() for x in pair)]
    assert bench.command_line(args, "ours", s) == (words, REPO)
    cached = [*words, "--ref-cache", "run-cache"]
    assert bench.command_line(args, "edition", s) == (cached, tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("work").mkdir()
    for word in words[1:]:
        if word.endswith((".json", ".jsonl")):
            Path(word).touch()  # a stage refuses a file that is not there
    read = importlib.import_module(stage).parse_args(words[1:])
    assert (read.micro_tokens, str(read.out), read.steps) == (64, "run", 2)


@pytest.fixture(scope="module")
def tokenizer():
    return work.make_tokenizer()


def test_the_rows_of_the_work(tokenizer):
    prompt, chosen, rejected = np.array([work.row_lengths(i) for i in range(4000)]).T
    total = prompt + chosen
    assert np.quantile(total, (0.5, 0.9)) == pytest.approx((140, 365), rel=0.044)
    assert total.max() == 384 and (prompt + rejected).max() <= 384
    assert chosen.sum() / total.sum() == pytest.approx(0.3, abs=0.01)
    rows = list(work.make_rows(40, tokenizer))
    assert rows[:10] == list(work.make_rows(10, tokenizer))
    for i, row in enumerate(rows):
        ids = common.encode_pair(tokenizer, row["prompt"], row["chosen"], row["rejected"])
        assert tuple(map(len, ids)) == work.row_lengths(i)
        joined = tokenizer(row["prompt"] + row["chosen"] + tokenizer.eos_token)["input_ids"]
        assert joined == ids[0] + ids[1]


def test_rubric_and_letter_reward_agree(tokenizer):
    texts = [row["chosen"] * k for row in work.make_rows(6, tokenizer) for k in (1, 2, 5)]
    texts += [texts[-1].upper(), ""]
    rows = [judge.read_row(work.rubric_rows(["x"])[0])] * len(texts)
    scores = [grade.score for grade in judge.grade_answers(rows, texts, None)]
    assert scores == pytest.approx([work.letter_reward(text) for text in texts])
    assert len(set(scores)) > 3  # a constant reward would train nothing


@pytest.mark.slow
def test_end_to_end(monkeypatch, tmp_path):
    for name in ("trl", "datasets"):
        pytest.importorskip(name, reason=f"needs the development dependency {name}")
    only = [{"device_batch": 2, "gradient_checkpointing": False}]
    monkeypatch.setattr(bench, "candidates", lambda task, base: only)
    bench.main(["sft", *TOY, "--out", str(tmp_path)])
    _, *runs = [json.loads(line) for line in open(tmp_path / "sft.jsonl")]
    assert [run["side"] for run in runs] == ["tuning", "plain", "ours", "tuned"]
    _, plain, ours, _ = runs
    assert len(ours["losses"]) == 2 and ours["losses"] == pytest.approx(plain["losses"], abs=1e-4)
    assert 0 < ours["loop_seconds"] < ours["seconds"] and ours["peak_mb"] > 100
    assert "Losses of all steps agree" in (tmp_path / "sft.md").read_text()
