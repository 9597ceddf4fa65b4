"""watch.py: what fires a rule and what does not; a live run and its log say the same."""

import functools
import json
from argparse import ArgumentParser, Namespace

import numpy as np

import alarms
import watch
from case_rows import each
from parts.rollouts import is_repetitive, text_row
from tiny import cases, error_of, write_rows

outcome = functools.cache(alarms.outcome)  # runs of known truth
UP = [0.4 + 0.025 * k for k in range(9)]  # v at steps 0 to 40
HACK = {"reward/mean": [0.4 + 0.005 * t for t in range(80)]}, UP + UP[::-1]  # v turns at step 40


def made(columns, v=(), every=5, key="val/score"):
    """The rows of a log: at each step a value of each column, and every so many steps one of v."""
    rows = [
        {"step": step, **dict(zip(columns, values))}
        for step, values in enumerate(zip(*columns.values()), 1)
    ]
    rows += [{"step": every * i, key: x} for i, x in enumerate(v)]
    return sorted(rows, key=lambda row: row["step"])


def flags(**given):
    return Namespace(**vars(watch.DEFAULTS) | given)


@each("watch", of="edges")
def test_rules_at_their_edges(rule, columns, v, expected):
    """`>` written as `>=`, a window one short, a threshold in the wrong unit. In R1 to R3 v gains 10,
    so the fall must exceed 1."""
    found = watch.alarms(made(columns, v), flags(patience=5))
    assert [f"{a.step} {a.level}" for a in found if a.rule.split()[0] == rule] == expected


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
    rows = made(HACK[0], [0.6] * 6 + [0.425] * 3)
    for row in rows:
        if "val/score" in row:
            ends = {"val/score_low": -1.96 * error, "val/score_high": 1.96 * error}
            row |= {key: row["val/score"] + half for key, half in ends.items()} | {"val/n": n}
    assert any(a.rule == "R2 over_optimised" for a in watch.alarms(rows)) == fired


@each("watch", of="values")
def test_which_values_are_v(rows, found):
    assert [[p.step, p.v] for p in watch.evaluations(rows)] == found


def test_the_rows_of_a_log():
    """Rows of one step may be one row; the final test decides nothing."""
    rows, whole = made(*HACK), {}
    for row in rows:
        whole.setdefault(row["step"], {}).update(row)
    test = {"step": 85, "test/n": 64, "val/score": 9.0, "judge/failed_frac": 0.9}
    found = watch.alarms(rows)
    assert watch.alarms([*whole.values()]) == watch.alarms([*rows, test]) == found != []


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


@cases("""
unit | zero
1 | 5
1 | -5
128 | 0
0.0078125 | 3
""")
def test_the_unit_and_the_zero_of_a_reward_do_not_matter(unit, zero):
    """Scores of 0 to 100 points, or of a reward model without a zero, are the same run."""
    scores = {"reward/mean", "val/score"}
    for seed in range(3):
        rows = busy_rows(seed)
        other = [{k: unit * x + zero if k in scores else x for k, x in row.items()} for row in rows]
        found, again = ([a[:3] for a in watch.alarms(x, flags(patience=3))] for x in (rows, other))
        assert found == again and watch.best_step(rows) == watch.best_step(other)


@each("watch", of="stops")
def test_stop_reasons(columns, v, given, expected):
    """The earliest that still holds, with its exit status."""
    assert watch.stop_reason(made(columns, v), flags(**given)) == expected
    assert watch.STOPS.get(expected, 0) == {"R12": 4, "R2 ": 3}.get(str(expected)[:3], 0)


@each("watch", of="plateau")
def test_a_plateau_is_compared_with_the_baseline(v, given, words):
    """.2 + .1 is more than .3 in floating point; a best of .3 reaches it all the same."""
    (alarm,) = watch.alarms(made({}, v), flags(patience=5, **given))
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
reward_train | eval/accuracy | [0.5, 0.7, 0.66] | -0.1
dpo | eval/rewards/accuracies | [0.5, 0.7, 0.66] | -0.1
sft | eval/loss | [2.0, 1.5, 1.6] | 0.1
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
    assert status == 0 and out.startswith("No reason to stop.\nFinished: step 12.")
    for fact in (f"{key}, n = 347, 3 evaluations", "at step 12", "only 3", "--eval-every 2"):
        assert fact in out
    falls = [1 + worse * i for i in range(9)]
    rows = made({"reward/mean": [t / 10 for t in range(60)]}, falls, key=key)
    assert [a.rule for a in watch.alarms(rows)] == ["R3 val_regression"]


# saved: its args.json; finished: the model is there, which comes at the end; asked: flags
@each("watch", of="answers")
def test_the_answer_comes_first(
    tmp_path, capsys, columns, v, saved, finished, asked, status, words
):
    argv = [folder_of(tmp_path, made(columns, v), saved, finished), *asked.split()]
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
    assert "--baseline" in error_of(watch.main, "runs/x --baseline .4".split())


def test_a_trainer_asks_with_its_own_flags():
    parser = ArgumentParser()
    watch.add_watch_arguments(parser)
    assert vars(parser.parse_args([])) == vars(watch.DEFAULTS)


# ---- the texts of answers ----


@each("repetition")
def test_repetition(text, repeats):
    """90 characters cannot tell."""
    assert is_repetitive(text) == repeats


def test_the_texts_of_a_step():
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
