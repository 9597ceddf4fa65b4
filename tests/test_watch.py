"""watch.py: what fires a rule and what does not; a live run and its log say the same."""

import functools
import json
import math
import sys
from argparse import ArgumentParser, Namespace

import numpy as np
import pytest

import watch
from conftest import REPO
from parts.rollouts import is_repetitive, text_row
from tiny import cases, error_of, table, write_rows

sys.path.insert(0, str(REPO / "bench"))
import alarms as bench

outcome = functools.cache(bench.outcome)  # runs of known truth, 100 in place of its 300
UP = [0.4 + 0.025 * k for k in range(9)]  # v at steps 0 to 40
HACK = {"reward/mean": [0.4 + 0.005 * t for t in range(80)]}, UP + UP[::-1]  # v turns at step 40


def made(columns, v=(), every=5, key="val/score"):
    """The rows of a log: at each step a value of each column, and every so many steps one of v."""
    last = max([*map(len, columns.values()), every * (len(v) - 1)])
    rows = []
    for step in range(last + 1):
        values = {name: c[step - 1] for name, c in columns.items() if 0 < step <= len(c)}
        rows += [{"step": step, **values}] * (step > 0)
        rows += [{"step": step, key: x} for x in v[step // every :][: step % every == 0]]
    return rows


def flags(**given):
    return Namespace(**vars(watch.DEFAULTS) | given)


def numbers(text):
    """ "3*2 4,5*2 0..3/2" is 3, 3, 4, 5, 4, 5, 0, .5, 1, 1.5."""
    found = []
    for word in text.split():
        values, _, times = word.partition("*")
        values, _, divisor = values.partition("/")
        if ".." in values:
            first, last = map(int, values.split(".."))
            found += (np.linspace(first, last, abs(last - first) + 1) / int(divisor)).tolist()
        else:
            found += [float(x) for x in values.split(",")] * int(times or 1)
    return found


def curves(cell):
    """ "key numbers; key numbers" as columns of a run and, under the name v, its evaluations."""
    columns = {key: numbers(x) for key, _, x in (c.strip().partition(" ") for c in cell.split(";"))}
    return {key: x for key, x in columns.items() if x and key != "v"}, columns.get("v", [])


# a gain of 10, so the fall must exceed 1; v without noise
EDGES = table("""
R1 two times five evaluations without | v .5*10 | 45 stop
R1 nine | v .5*9 |
R1 five since the best | v 1*3 2*2 1*5 | 45 stop
R1 four | v 1*4 2*2 1*4 |
R1 the last five equal those before | v 3 .5*4 1*5 | 45 stop
R1 the last five are higher than those before | v 3 .5*4 1.125*5 |
R1 a new best | v 4*2 9 4*2 4.5*5 |
R1 scores of given answers (reward_train.py) | reward/mean .5*120; margin .1*120 |
R2 fall of exactly the limit | reward/mean 0..39/1; v 0 10*5 9*3 |
R2 fall above it | reward/mean 0..39/1; v 0 10*5 8.5*3 | 35 warn
R2 at three evaluations in a row | reward/mean 0..49/1; v 0 10*5 8.5*4 | 35 warn, 45 stop
R2 at three, but not in a row | reward/mean 0..59/1; v 0 10*5 8.5*2 9.5*2 8.5*2 | 35 warn, 55 warn
R2 the reward rose at the last of three alone | reward/mean 1*42 5*8; v 0 10*5 8.5*4 | 45 warn
R2 one evaluation is not two | reward/mean 0..39/1; v 0 10*5 8.5 10*2 |
R2 five evaluations | reward/mean 0..24/1; v 10*3 0*2 |
R2 six evaluations | reward/mean 0..29/1; v 10*4 0*2 | 25 warn
R2 a rise without noise | reward/mean 1*12 2*28; v 0 10*5 8.5*3 | 35 warn
R2 noise of r hides the rise | reward/mean 1*12 0,7*14; v 0 10*5 8.5*3 |
R2 both turn down after a climb | reward/mean 0..34/1 33..19/1; v 0 4..9/1 9*2 6*3 |
R2 seven rewards | reward/mean 1,2*3 3*1; v 0 10*5 8.5*3 |
R3 the same fall, reward level | reward/mean 1*40; v 0 10*5 8.5*3 | 35 warn
R3 exactly the limit | reward/mean 1*40; v 0 10*5 9*3 |
R3 leaves a rise to R2 | reward/mean 0..39/1; v 0 10*5 8.5*3 |
R3 without rewards | v 0 10*5 8.5*3 | 35 warn
R3 noise of ±.1: MAD .148, σ .105, the bar .31, which .06 is not | v .5,.6*6 .46*3 |
R3 a fall of .3 is not | v .5,.6*6 .3*3 |
R3 a fall of .35 is | v .5,.6*6 .25*3 | 65 warn
R3 one lucky second evaluation | v .5,.9 .5*6 |
R3 without noise a fall of .06 is one | v .55*12 .49*3 | 65 warn
R6 four steps are not five | reward/frac_mixed .25*4 |
R9 the first three have no start | length/mean 50,50,200 |
R12 exactly half | judge/failed_frac .5*3 | 1 warn
R12 more than half | judge/failed_frac .51*3 | 1 warn, 3 stop
R12 more than half of two steps | judge/failed_frac .9*2 | 1 warn
R12 no group scored | judge/failed_frac .1*3; groups/scored 0*3 | 3 stop
R12 one group scored | judge/failed_frac .1*3; groups/scored 0,1,0 |
""")
LIMITS = """
R6 | reward/frac_mixed | .5*4 | .5 | .25
R7 | text/repetition | 0*3 | .1 | .11
R7 | text/repetition | .5*3 | .55 | .5625
R7 | text/distinct_2 | .5*3 | .25 | .24
R9 | length/mean | 50*3 | 100 | 101
R9 | length/mean | 50*3 | 25 | 24
R9 | length/truncated_frac | 0*3 | .5 | .51
R9 | length/truncated_frac | .5*3 | .79 | .81
R12 | judge/failed_frac | | .2 | .21
"""
for rule, key, before, *ends in table(LIMITS):  # the last value that is silent, and one that fires
    n, told = len(numbers(before)) + 1, f"{rule} {key} after {before}"
    for x, fired in zip(ends, ("", f"{n} warn")):
        EDGES.append([f"{told}, {x}", f"{key} {before} {x}", fired])


@pytest.mark.parametrize("name, cell, expected", EDGES, ids=[row[0] for row in EDGES])
def test_rules_at_their_edges(name, cell, expected):
    """`>` written as `>=`, a window one short, a threshold in the wrong unit."""
    found = watch.alarms(made(*curves(cell)), flags(patience=5))
    fired = [f"{a.step} {a.level}" for a in found if a.rule.split()[0] == name.split()[0]]
    assert ", ".join(fired) == expected


@cases("""
error | n | fired
.05 | 64 | True
.06 | 64 | False
.05 | 8 | True
.05 | 7 | False
.05 | None | True
""")
def test_few_answers_decide_nothing(error, n, fired):
    """v falls from .6 to .425 in steps without noise. The bar is 3 standard errors of one v, which
    its logged interval tells: .15 or .18; fewer than 8 answers are never judged."""
    rows = made(HACK[0], numbers(".6*6 .425*3"))
    for row in rows:
        if "val/score" in row:
            ends = {"val/score_low": -1.96 * error, "val/score_high": 1.96 * error}
            row |= {key: row["val/score"] + half for key, half in ends.items()} | {"val/n": n}
    assert any(a.rule == "R2 over_optimised" for a in watch.alarms(rows)) == fired


def test_which_values_are_v_and_r():
    """val/gold before val/score; null, NaN, infinity, text and lists are no numbers; rows of one
    step may be one row; the final test decides nothing."""
    rows = [{"step": i, "val/gold": x, "val/score": 9} for i, x in enumerate([None, *HACK[1]])]
    assert [p.v for p in watch.evaluations(rows)] == HACK[1]
    values = [0.5, None, math.nan, math.inf, 1e300, "1", [1], 0.5]
    rows = [{"step": i, "val/score": x} for i, x in enumerate(values)]
    assert [(p.step, p.v) for p in watch.evaluations(rows)] == [(0, 0.5), (7, 0.5)]
    rows, whole = made(*HACK), {}
    for row in rows:
        whole.setdefault(row["step"], {}).update(row)
    test = {"step": 85, "test/n": 64, "val/score": 9.0, "judge/failed_frac": 0.9}
    assert (
        watch.alarms([*whole.values()]) == watch.alarms([*rows, test]) == watch.alarms(rows) != []
    )


KEYS = """reward/mean reward/frac_mixed length/mean length/truncated_frac text/repetition
text/distinct_2 judge/failed_frac groups/scored""".split()


def busy_rows(seed):
    """A run with every key, drawn to set off many rules at random moments."""
    rng, n = np.random.default_rng(seed), 120
    walks = 0.05 + rng.normal(0, 0.15, (len(KEYS), n)).cumsum(axis=1)
    columns = dict(zip(KEYS, walks.clip(0, 1).tolist()))
    return made(columns, (0.3 + rng.normal(0, 0.05, n // 5).cumsum()).tolist())


def test_a_live_run_and_its_log_say_the_same():
    """A rule that looks ahead, or has a memory of its own, would say something else in a trainer
    than on its log, or after --resume."""
    args, rules = flags(patience=3, target=0.8), set()
    for seed in range(4):
        rows = busy_rows(seed)
        whole = [a[:4] for a in watch.alarms(rows, args)]
        rules |= {rule for _, rule, *_ in whole}
        for step in range(0, 121, 5):
            so_far = [row for row in rows if row["step"] <= step]
            live = [a[:4] for a in watch.alarms(so_far, args)]
            assert live == [a for a in whole if a[0] <= step]
            new = {a[1] for a in live if a[0] == step and a[2] == "stop"}
            assert not new or watch.stop_reason(so_far, args) in watch.STOPS
    assert len(rules) >= 12


@pytest.mark.parametrize("unit, zero", [(1, 5.0), (1, -5.0), (128, 0.0), (1 / 128, 3.0)])
def test_the_unit_and_the_zero_of_a_reward_do_not_matter(unit, zero):
    """Scores of 0 to 100 points, or of a reward model without a zero, are the same run."""
    scores = {"reward/mean", "val/score"}
    for seed in range(3):
        rows = busy_rows(seed)
        other = [{k: unit * x + zero if k in scores else x for k, x in row.items()} for row in rows]
        found, again = ([a[:3] for a in watch.alarms(x, flags(patience=3))] for x in (rows, other))
        assert found == again and watch.best_step(rows) == watch.best_step(other)


@cases("""
cell | given | expected
judge/failed_frac .9*3 | {} | R12 judge_down
judge/failed_frac .1*3; groups/scored 0*3 | {} | R12 none_scored
reward/mean 80..159/200; v 16..24/40 24..16/40 | {} | R2 reward_hacking
reward/mean 80..159/200; v 16..24/40 24..16/40 | {"on_hack": "warn"} | None
v .2,.8,.7,.8,.8 | {"target": 0.8} | target_reached
v .2,.8,.79 | {"target": 0.8} | None
v .9 | {"target": 0.8} | None
v 1..5/10 .5*9 | {} | None
v 1..5/10 .5*8 | {"patience": 5} | None
v 1..5/10 .5*9 | {"patience": 5} | R1 plateau
v 1..5/10 .5*9; reward/mean 80..159/200 | {"patience": 5} | R1 plateau
reward/mean .5*100 | {"patience": 5} | None
judge/failed_frac 0*62 .9*3; reward/mean 80..144/200; v 16..24/40 24..19/40 | {"target": 0.1} | target_reached
judge/failed_frac .9*3 0*3 | {} | None
""")
def test_stop_reasons(cell, given, expected):
    """The earliest that still holds, with its exit status."""
    assert watch.stop_reason(made(*curves(cell)), flags(**given)) == expected
    assert watch.STOPS.get(expected, 0) == {"R12": 4, "R2 ": 3}.get(str(expected)[:3], 0)


@cases("""
v | given | words
1..5/10 .5*9 | {"baseline": 0.5} | its best, 0.5, reaches --baseline + --margin
1..5/10 .5*9 | {"baseline": 0.625} | its best, 0.5, misses --baseline + --margin
1..5/10 .5*9 | {"baseline": 0.4, "margin": 0.05} | reaches
1..5/10 .5*9 | {"baseline": 0.4, "margin": 0.125} | misses
1..3/10 .3*9 | {"baseline": 0.2, "margin": 0.1} | reaches
""")
def test_a_plateau_is_compared_with_the_baseline(v, given, words):
    """.2 + .1 is more than .3 in floating point; a best of .3 reaches it all the same."""
    (alarm,) = watch.alarms(made({}, numbers(v)), flags(patience=5, **given))
    assert alarm.rule == "R1 plateau" and words in alarm.words


# the first of equals; of two evaluations the better; the start if nothing beats it; the top is at
# 35, and one value .4 too high must not win unless its neighbours are as high as the best
@cases("""
v | best
[0.2, 0.3, 0.6, 0.6, 0.5] | 15
[0.2, 0.7] | 5
[0.9, 0.3, 0.4, 0.5] | 0
[0.3, 0.72, 0.36, 0.4, 0.45, 0.5, 0.55, 0.6, 0.58, 0.5, 0.42, 0.4] | 40
[0.3, 0.32, 0.36, 0.8, 0.45, 0.5, 0.55, 0.6, 0.58, 0.5, 0.42, 0.4] | 40
[0.3, 0.32, 0.36, 0.4, 0.45, 0.5, 0.95, 0.6, 0.58, 0.5, 0.42, 0.4] | 35
[0.3, 0.32, 0.36, 0.4, 0.45, 0.5, 0.55, 0.6, 0.58, 0.5, 0.42, 0.8] | 40
[] | None
""")
def test_best_step(v, best):
    assert watch.best_step(made({"reward/mean": [0.5] * 30}, v)) == best


# ---- the command ----


def folder_of(tmp_path, rows, saved=None, finished=True):
    """A run's folder: metrics.jsonl, args.json where `saved` is given, and its model's config."""
    write_rows(tmp_path / "metrics.jsonl", rows)
    if saved is not None:
        (tmp_path / "args.json").write_text(json.dumps({"stage": "ppo", "args": saved}))
        if finished:
            (tmp_path / "config.json").write_text("{}")
    return tmp_path


def run(capsys, *argv):
    status = watch.main(list(map(str, argv)))
    return status, capsys.readouterr().out


@cases("""
stage | key | v | worse
reward_train | eval/accuracy | [0.5, 0.7, 0.66] | 13..5/10
dpo | eval/rewards/accuracies | [0.5, 0.7, 0.66] | 13..5/10
sft | eval/loss | [2.0, 1.5, 1.6] | 5..13/10
""")
def test_what_was_held_out_is_known_and_a_finished_run_is_finished(stage, key, v, worse, tmp_path, capsys):  # fmt: skip
    """Of a reward model with 347 held-out pairs measured three times it said "no_validation:
    nothing held out was measured", and "warming_up: too early to say" of every finished run.
    Overfitting is seen: eval/loss rises. A reward model's own mean score is no policy's reward, so
    its rise is no reward hacking."""
    rows = made({"loss": [0.7] * 12, "time_s": [1.0] * 12}, v, every=6, key=key)
    rows = [row | {"eval/n": 335 + row["step"]} if key in row else row for row in rows]
    assert [abs(point.v) for point in watch.evaluations(rows)] == v
    status, out = run(capsys, folder_of(tmp_path, rows, {"margin": "none", "pairs": ["p.jsonl"]}))
    first, finished, validation, few = out.strip().splitlines()
    assert (status, first, finished) == (0, "No reason to stop.", "Finished: step 12.")
    assert f"{key}, n = 347, 3 evaluations" in validation and "at step 12" in validation
    assert "only 3" in few and "--eval-every 2" in few
    rows = made({"reward/mean": [t / 10 for t in range(60)]}, numbers(worse), key=key)
    assert [a.rule for a in watch.alarms(rows)] == ["R3 val_regression"]


# columns of the log; its args.json; is the model there, which comes at the end; what is asked
@cases("""
cell | saved | finished | asked | status | words
v 1..5/10 .5*9 | None | False | | 0 | No reason to stop.
v 1..5/10 .5*9 | None | False | --patience 5 | 0 | Stop: step 65: R1 plateau (stop)
v 1..5/10 .5*9 | {"steps": 70} | True | --patience 3 | 0 | Stop: step 45: R1 plateau (stop)
v 1..5/10 .5*9 | {"steps": 70} | True | --baseline .4 | | --baseline
reward/mean .5*5 | {"on_hack": "stop"} | False | | 0 | Not finished
reward/mean .5*5 | {"on_hack": "stop"} | True | | 0 | Finished: step 5.
reward/mean .5*5 | {"steps": 5} | True | | 0 | Finished: step 5 of 5.
reward/mean .5*5 | {"steps": 12} | True | | 0 | Not finished (it is running, or --resume continues it): step 5 of 12.
judge/failed_frac .9*3 | {"steps": 12} | True | | 4 | Finished: step 3 of 12.
reward/mean .5*5 | None | False | | 0 | Nothing held out was measured
judge/failed_frac .9*3 | None | False | | 4 | Stop: step 3: R12 judge_down
reward/mean 80..159/200; v 16..24/40 24..16/40 | None | False | | 3 | Stop: step 65: R2 reward_hacking
reward/mean 80..159/200; v 16..24/40 24..16/40 | {} | True | --on-hack warn | 0 | No reason to stop.
""")
def test_the_answer_comes_first(tmp_path, capsys, cell, saved, finished, asked, status, words):
    argv = [folder_of(tmp_path, made(*curves(cell)), saved, finished), *asked.split()]
    if not isinstance(status, int):
        assert words in error_of(watch.main, [*map(str, argv)])
        return
    found, out = run(capsys, *argv)
    head = out.partition("\n\n")[0]
    assert found == status and words in head and head.startswith(("Stop: ", "No reason to stop."))


@cases(r"""
content | fact
'{"step": 1, "re' | no complete row
'' | no complete row
'{"step": 1}\n{"step": 2, "re\n{"step": 1}\n' | :2:
'{"step": 1}\n[1, 2]\n' | :2:
'\x89PNG\r\n\x1a\n\0\n' | :1:
""")
def test_what_is_no_log(content, fact, tmp_path):
    """A cut-off last line is left out, and the args.json of another tool does not matter."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content.encode("latin-1"))
    assert fact in error_of(watch.main, [str(path)])
    folder_of(tmp_path, made({"reward/mean": [0.5] * 3}))
    path.write_text(path.read_text() + '{"step": 4, "reward/me')
    assert len(watch.read_log(path)) == 3
    (tmp_path / "args.json").write_text('{"args": 5}')
    assert watch.main([str(tmp_path)]) == 0


@cases("""
given | validates | flag
{"patience": 5} | False | --patience
{"target": 0.5} | False | --target
{"baseline": 0.5} | True | --patience
{"margin": 1} | True | --baseline
""")
def test_alarms_that_lack_what_they_need_are_refused(given, validates, flag):
    assert flag in error_of(watch.promise, flags(**given), validates)


def test_a_trainer_asks_with_its_own_flags():
    parser = ArgumentParser()
    watch.add_watch_arguments(parser)
    assert vars(parser.parse_args([])) == vars(watch.DEFAULTS)


# ---- the texts of answers ----

PROSE = (
    "Asha led two audits of the warehouse and cut overtime by 34 percent. She explained how the "
    "rota was rebuilt, whom she asked first, and what she would now do differently. There is no "
    "evidence yet on budgeting, so the next interview should ask when she planned one. "
)
UNLIKE = " ".join(f"{i * 7919 % 100003}" for i in range(4000))
LOOPS = [
    "a" * 1000, "I see. " * 200, PROSE * 3 + "and so on " * 150, "and so on " * 150 + PROSE * 4,
    "好的。" * 400, "word " * 20, (PROSE * 4)[:500] + "and so on " * 100 + (PROSE * 4)[500:1000],
    UNLIKE + " so on and on" * 200 + PROSE * 3,
]  # fmt: skip


def test_repetition():
    assert [t[:40] for t in LOOPS if not is_repetitive(t)] == []
    ten = "one two three four five six seven eight nine ten " * 2
    assert not any(map(is_repetitive, ("", PROSE + PROSE, "x" * 60, "x" * 90, ten, UNLIKE)))
    assert is_repetitive("x" * 91), "90 characters cannot tell"
    assert text_row([""]) == {"text/repetition": 0, "text/distinct_2": None}
    assert text_row(["a a b a b", "x" * 10**6]) == {"text/repetition": 0.5, "text/distinct_2": 0.75}


def test_the_page(tmp_path, capsys):
    """What is printed, and curves in which the alarms are marked; a value that is missing is no point
    of a curve, and a folder's name is text."""
    home = tmp_path / "<b>run"
    home.mkdir()
    lengths = [40] * 6 + [120] * 6
    folder_of(home, made({"reward/mean": [None, *range(11)], "length/mean": lengths}))
    status, said = run(capsys, home, "--html")
    page = (home / "watch/report.html").read_text("utf-8")
    assert status == 0 and str(home / "watch/report.html") in said
    for text in ("No reason to stop.", "R9 length_doubled"):
        assert text in said and text in page
    assert page.count("<svg") == 2 and "<b>run" not in page and "<script" not in page


# ---- runs of known truth ----


@cases("""
kind | rule | patience | runs | least | most
healthy | R2 | 0 | 100 | 0 | 1
slow hack | R2 | 0 | 100 | 95 | 100
slow hack, 64 answers | R2 | 0 | 100 | 95 | 100
collapse | R2 | 0 | 100 | 0 | 1
collapse | R3 | 0 | 100 | 95 | 100
healthy, noisy |  | 0 | 40 | 0 | 3
slow |  | 0 | 40 | 0 | 3
slow, 64 answers |  | 0 | 40 | 0 | 3
flat, 64 answers |  | 0 | 40 | 0 | 3
slow, 4 answers |  | 0 | 40 | 0 | 0
flat, 4 answers |  | 0 | 40 | 0 | 0
slow |  | 10 | 25 | 0 | 2
flat |  | 10 | 25 | 20 | 25
""")
def test_alarms_on_simulated_runs(kind, rule, patience, runs, least, most):
    """Seldom false, seldom missed; without a rule: runs that end early. Of progress few do, of a flat
    run with patience most."""
    found = [outcome(kind, seed, patience)[:2] for seed in range(runs)]
    n = sum(rule in fired if rule else stop is not None for fired, stop in found)
    assert least <= n <= most
