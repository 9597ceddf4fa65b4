"""bench/: nobody wins by doing less. What must agree before a ratio is printed, how ratios are taken, what both sides are
given; and one comparison from end to end at toy size."""

import doctest
import json
import math
import statistics
import sys

import pytest

import common

sys.path.insert(0, str(common.Path(common.__file__).parent / "bench"))
import run as bench
import work

RUN = {"others_cores": 0.0, "import_mb": 300, "peak_mb": 500, "net_mb": 200, "wall_s": 4.0, "cpu_s": 4.0}  # fmt: skip


def pair_run(side, loop=1.0, losses=(0.7, 0.6), norm=100.0, round=0, **more):
    return {**RUN, "task": "dpo", "side": side, "flags": {}, "round": round, "losses": list(losses), "weight_norm": norm,
            "grad_norms": [1.0], "loop_s": loop, "loop_cpu_s": loop, "tokens": 1000, **more}  # fmt: skip


# ---- what must agree ----


@pytest.mark.parametrize(
    "change, word",
    [
        ({"losses": (0.7, 0.60009)}, None),  # 9e-5 off: rounding
        ({"losses": (0.7, 0.60011)}, "step 2"),  # 1.1e-4 off: another computation
        ({"losses": (0.7,)}, "2 steps against 1"),  # a peer that stops early would be fast
        ({"losses": (0.7, math.nan)}, "step 2"),
        ({"losses": ()}, "2 steps against 0"),
        ({"norm": 100.0 * (1 + 0.9e-5)}, None),
        ({"norm": 100.0 * (1 + 1.1e-5)}, "weights"),
        ({"norm": math.nan}, "weights"),
    ],
)
def test_pairs_that_may_not_be_compared(change, word):
    """Losses of every step within 1e-4, final weights' norm within 1e-5: a step skipped, rows dropped or another schedule
    would all be faster, and all show here. NaN compares as False, so a bound written the wrong way round would let it in."""
    ours, theirs = pair_run("ours"), pair_run("plain", **change)
    for a, b in ((ours, theirs), (theirs, ours)):
        why = bench.differs("dpo", a, b)
        assert (why is None) if word is None else why is not None
    assert word is None or word in bench.differs("dpo", ours, theirs)


def test_other_tasks_that_may_not_be_compared():
    """GRPO: 3 % of the tokens; its replay: loss and gradient norm; PPO: updates too; data: to the token."""
    assert bench.differs("grpo", {"tokens": 1029}, {"tokens": 1000}) is None
    assert "0.03 allowed" in bench.differs("grpo", {"tokens": 1031}, {"tokens": 1000})
    one = pair_run("ours")
    assert bench.differs("replay", one, one) is None
    assert "gradient" in bench.differs("replay", one, {**one, "grad_norms": [1.0002]})
    assert "losses" in bench.differs("replay", one, {**one, "losses": [0.7, 0.61]})
    ppo = {"tokens": 1000, "updates": 16}
    assert bench.differs("ppo", ppo, ppo) is None
    assert "updates" in bench.differs("ppo", ppo, {**ppo, "updates": 4})
    assert "tokens" in bench.differs("data", {"tokens": 1000}, {"tokens": 1001})


def compared(monkeypatch, out, plain_losses):
    """bench.main for the task dpo with runs that are told and not made; the files that it writes."""

    def told(args, place, side, task, **settings):
        return pair_run(side, losses=plain_losses if side == "plain" else (0.7, 0.6))

    monkeypatch.setattr(bench, "one_run", told)
    monkeypatch.setattr(bench, "make_work", lambda *args, **more: None)
    bench.main(["dpo", "--rounds", "1", "--out", str(out)])
    return list(out.iterdir())


def test_no_table_when_the_losses_differ(monkeypatch, tmp_path):
    """The refusal ends the command before anything is written; with equal losses the same command writes table and rows."""
    (tmp_path / "a").mkdir()
    written = compared(monkeypatch, tmp_path / "a", (0.7, 0.6))
    assert {f.name for f in written} == {"dpo.md", "dpo.jsonl"}
    (tmp_path / "b").mkdir()
    with pytest.raises(bench.Refused, match="losses of step 2.*no ratio"):
        compared(monkeypatch, tmp_path / "b", (0.7, 0.5))
    assert not list((tmp_path / "b").iterdir())


def test_two_samples_of_one_distribution():
    """χ² by hand: counts 10 20 against 20 10 expect 15 everywhere, χ² = 4·25/15 = 6.67, one degree of freedom: p = .0098."""
    assert bench.chi_square([10, 20], [20, 10]) == pytest.approx(0.00982, abs=1e-5)
    assert bench.chi_square([10, 20], [20, 40]) == pytest.approx(1.0)
    flat = [[i % 4096 for i in range(7 * k, 7 * k + 60)] for k in range(200)]
    assert min(bench.same_distribution(flat, flat)) == pytest.approx(1.0)
    with pytest.raises(
        bench.Refused, match="lengths"
    ):  # the same tokens in answers that are a little shorter
        bench.same_distribution(flat, [ids[:40] for ids in flat])
    with pytest.raises(
        bench.Refused, match="tokens"
    ):  # as long, but a quarter of the vocabulary is never drawn
        bench.same_distribution(flat, [[i // 4 for i in ids] for ids in flat])


# ---- how ratios are taken ----


def test_ratios_of_neighbours():
    """plain ours tuned | tuned ours plain: each run of ours is compared with the runs beside it in its own round. Time is
    theirs / ours (4, 6: median 5), memory ours / theirs (500 / 1000)."""
    order = [("plain", 8, 0), ("ours", 2, 0), ("tuned", 3, 0), ("tuned", 5, 1), ("ours", 1, 1), ("plain", 6, 1)]  # fmt: skip
    runs = [pair_run("tuning", loop=99)] + [
        pair_run(side, loop, round=n, peak_mb=500 if side == "ours" else 1000)
        for side, loop, n in order
    ]
    assert bench.ratios(runs, "loop_s", "plain") == [4, 6]
    assert bench.ratios(runs, "loop_s", "tuned") == [1.5, 5]
    assert bench.ratios(runs, "peak_mb", "plain") == [0.5, 0.5]
    assert bench.shown([4, 6]) == "5.00 [4.00, 6.00]"
    pair = [pair_run("ours", cpu_s=3.0), pair_run("edition", cpu_s=4.0)]
    assert bench.ratios(pair, "cpu_s", "edition") == [0.75]  # of another edition: ours / theirs


def test_command_lines_of_two_editions(monkeypatch, tmp_path):
    """Each from its own folder with the same flags, and only --ref-cache is one that today's dpo.py does not know."""
    args = bench.parse_args(["dpo", "--edition", str(tmp_path)])
    stages = {**work.STAGES, **work.SAMPLERS}
    known = {name: bench.known_flags(bench.REPO, f"{name}.py") for name in stages.values()}
    monkeypatch.setattr(bench, "known_flags", lambda root, script: known[script[:-3]] | ({"--ref-cache"} if root == tmp_path else set()))  # fmt: skip
    for task, name in stages.items():
        s = {"task": task, "folder": "work", "out": "run", "batch": 4, "micro_tokens": 64}
        s |= {"steps": 2, "new_tokens": 8} if task in work.SAMPLERS else {}
        flags = work.sampler_flags if task in work.SAMPLERS else work.pair_flags
        (ours, here), (theirs, there) = (
            bench.command_line(args, side, s) for side in ("ours", "edition")
        )
        assert (here, there) == (bench.REPO, tmp_path) and ours[0] == theirs[0] == f"{name}.py"
        assert ours[1:] == [str(word) for pair in flags(**s).items() for word in pair]
        assert theirs == [*ours, "--ref-cache", "run-cache"]
    with pytest.raises(SystemExit):
        bench.parse_args(["scaling", "--edition", str(tmp_path)])


@pytest.mark.parametrize("others, word", [(0.4, "wall seconds"), (0.6, "CPU seconds")])
def test_the_table_says_which_time_it_prints(others, word):
    """A busy machine stretches wall time and not (much) CPU time: above half a core of others the table changes over."""
    runs = [pair_run(side, others_cores=others, loop_s=s, loop_cpu_s=1.0) for side, s in (("plain", 9.0), ("ours", 3.0), ("tuned", 6.0))]  # fmt: skip
    text = "\n".join(bench.table(runs))
    assert f"Time is in {word}" in text
    assert ("| 3.00 [3.00, 3.00] |" in text) == (word == "wall seconds")


def test_examples_of_the_driver():
    """The hand-worked examples in its docstrings: a line's fit, and a command without the folders of the machine."""
    failed, tried = doctest.testmod(bench)
    assert failed == 0 and tried >= 2


def test_line_fit():
    """By hand: 0, 1, 2 → 1, 2, 4 with weights 1, 1/4, 1/16: means 2/7 and 4/3, slope (1/2)/(11/28) = 14/11, the fit is 32/33,
    74/33, 116/33, the largest miss 132/116 − 1. Least squares of the values themselves would say 5/6 + 3/2·x."""
    a, b, residual = bench.line_fit([0, 1, 2], [1, 2, 4])
    assert (a, b) == (pytest.approx(32 / 33), pytest.approx(14 / 11))
    assert residual == pytest.approx(4 / 29)


def test_table_of_growth():
    """The line goes through the medians (runs of 9, 2, 3 s: 3 s); over the pairs of a file there is none, for every run has
    four steps."""
    points = [("rows", 1, s) for s in (9.0, 2.0, 3.0)] + [("rows", 2, 6.0), ("pairs", 10, 5.0)]  # fmt: skip
    runs = [{**pair_run("ours", loop), "over": over, "x": x} for over, x, loop in points]
    text = "\n".join(bench.scaling_table(runs))
    assert "| rows | 1 | 3.00 [2.00, 9.00] | 3.0 | 4.00 [4.00, 4.00] | 500 |" in text
    assert "| rows | 2 | 6.00 | 6.0 | 4.00 | 500 |" in text and "largest residual 0.0 %" in text
    assert "| pairs | 10 | 5.00 |  |" in text and "no line expected" in text


# ---- what both are given ----


@pytest.fixture(scope="module")
def tokenizer():
    return work.make_tokenizer(0)


def test_lengths_of_the_work():
    """prompt + chosen: median 140, 90th percentile 365, nothing above 384 with either answer, 30 % of it the answer. Of 4000
    rows the sample median is within 3 standard errors, 3 · 1.25 · .748 / √4000 = 4.4 %, and the percentile within 6 %."""
    lengths = [work.row_lengths(i, 0) for i in range(4000)]
    total = sorted(a + b for a, b, _ in lengths)
    assert statistics.median(total) == pytest.approx(140, rel=0.044)
    assert total[3600] == pytest.approx(365, rel=0.06)
    assert total[-1] == 384 and max(a + c for a, _, c in lengths) <= 384
    assert sum(b for _, b, _ in lengths) / sum(total) == pytest.approx(0.3, abs=0.01)


def test_rows_have_these_lengths_and_depend_on_the_seed_alone(tokenizer):
    """Tokens as promised, prompt and answer the same ids apart (ours) and joined (TRL's), and row i the same whatever n."""
    rows = list(work.make_rows(40, 0, tokenizer))
    assert rows[:10] == list(work.make_rows(10, 0, tokenizer))
    assert rows[:10] != list(work.make_rows(10, 1, tokenizer))
    for i, row in enumerate(rows):
        ids = common.encode_pair(tokenizer, row["prompt"], row["chosen"], row["rejected"])
        assert tuple(map(len, ids)) == work.row_lengths(i, 0)
        joined = tokenizer(row["prompt"] + row["chosen"] + tokenizer.eos_token)["input_ids"]
        assert joined == ids[0] + ids[1]
    row = next(iter(work.make_rows(1, 0, tokenizer, prompt=64, response=32)))
    ids = common.encode_pair(tokenizer, row["prompt"], row["chosen"], row["rejected"])
    assert list(map(len, ids)) == [64, 32, 32]


def test_rubric_and_letter_reward_agree(tokenizer):
    """GRPO: ours is paid by a rubric of checks, TRL by a function; both must pay the same, or the updates would differ."""
    import judge

    texts = [row["chosen"] * k for row in work.make_rows(6, 0, tokenizer) for k in (1, 2, 5)]
    texts += [texts[-1].upper(), ""]
    raw = work.rubric_rows(["x"])[0]
    row = judge.read_row(raw)
    grades = judge.grade_answers([row] * len(texts), texts, None)
    expected = [work.letter_reward(text) for text in texts]
    assert [grade.score for grade in grades] == pytest.approx(expected)
    assert len(set(expected)) > 3  # a constant reward would train nothing


def test_seed_for_tokens():
    """The seed is chosen by the number of tokens alone; by the sampler's own uniform numbers, end ids first."""
    import numpy as np

    seed = bench.seed_for(2700, 1, 64, 1 / 64)
    uniform = [np.random.default_rng([seed * 10**6 + 1, i]).random(64) for i in range(64)]
    lengths = [next((t + 1 for t, u in enumerate(row) if u < 1 / 64), 64) for row in uniform]
    assert abs(sum(lengths) / 2700 - 1) < 0.01


@pytest.mark.slow
def test_end_to_end(monkeypatch, tmp_path, tokenizer):
    """SFT at toy size against the TRL that is installed: whole processes, equal losses, one ratio per opponent; and the
    tokenizer made in another process is the one made here, byte for byte."""
    pytest.importorskip("trl", reason="needs the development dependency trl")
    pytest.importorskip("datasets", reason="needs the development dependency datasets")
    monkeypatch.setattr(bench, "candidates", lambda task, base: [{"device_batch": 2, "gradient_checkpointing": False}])  # fmt: skip
    seen, make_work = {}, bench.make_work

    def keep(args, place, **more):
        make_work(args, place, **more)
        seen["tokenizer"] = (place / "model" / "tokenizer.json").read_bytes()

    monkeypatch.setattr(bench, "make_work", keep)
    small = [
        "--pairs",
        "8",
        "--batch",
        "4",
        "--layers",
        "1",
        "--hidden",
        "32",
        "--rounds",
        "1",
        "--tune-steps",
        "1",
    ]
    bench.main(["sft", *small, "--threads", "1", "--repeats", "0", "--out", str(tmp_path)])
    header, *runs = [json.loads(line) for line in open(tmp_path / "sft.jsonl")]
    assert [run["side"] for run in runs] == ["tuning", "plain", "ours", "tuned"]
    ours, plain = runs[2], runs[1]
    assert len(ours["losses"]) == 2 and ours["losses"] == pytest.approx(plain["losses"], abs=1e-4)
    assert 0 < ours["loop_cpu_s"] < ours["cpu_s"] and 50 < ours["import_mb"] < ours["peak_mb"]
    assert "Losses of all steps agree" in (tmp_path / "sft.md").read_text()
    tokenizer.save_pretrained(tmp_path / "here")
    assert (tmp_path / "here" / "tokenizer.json").read_bytes() == seen["tokenizer"]
