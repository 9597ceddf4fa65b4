"""watch.py: the rows of metrics.jsonl in; alarms, a reason to stop and the best step out.

Objective    stop a run whose reward rises while its held-out score falls; with --patience N also a
             run whose held-out score no longer rises
Algorithm    (1) read the log
             (2) measure: each evaluation against the best before it
             (3) the rules R1, R2, R3, R6, R7, R9, R12: where did each begin to hold?
             (4) the answer first: stop or not, finished or not; then the alarms
Conventions  v is the first of these that the run logs: val/gold (the recruiter's score, utility),
             val/score (the reward model's or the rubric's), eval/accuracy,
             eval/rewards/accuracies, −eval/loss. s is the median of the last 3 v (before the third,
             padded with the first v). r is reward/mean. Missing values are left out. All limits of
             v and r are multiples of their own noise, so a reward's unit and zero do not matter
Best step    the evaluation with the highest s, the first of equals: one lucky value does not win
Left out     1. a limit on the KL, because no universal one exists   2. thresholds learned from data
             3. proof: a rule that does not fire shows nothing, so read rollouts.jsonl
             4. a stop by patience, unless asked for: it ends honest slow progress (tests/alarms.py)
Run          python watch.py runs/ppo --html
Writes       with --html RUN/watch/report.html: what is printed, and curves. Exit status 0, 2 (bad
             input), 3 (the reward rises, validation falls), 4 (the judge is down)
Copy         `alarms`, `stop_reason` and `best_step` with part 3: functions of a list of rows
Reference    Gao et al. 2022, arXiv 2210.10760: how a proxy reward is over-optimised
"""

import math
from argparse import Namespace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from parts.files import UserError, command, number, parser, read_jsonl, read_record

DEVIATIONS = 3  # a change counts beyond this many standard deviations of one value
OF_THE_GAIN = 0.1  # and a fall, beyond this share of what had been gained
FEWEST = 6  # evaluations that R1, R2 and R3 need
LEAST = 8  # held-out answers or pairs that R2 and R3 need
# the held-out score is the first of these that the log has; 1: higher is better
VALIDATION = {"val/gold": 1, "val/score": 1, "eval/accuracy": 1, "eval/rewards/accuracies": 1,
              "eval/loss": -1}  # fmt: skip
CHARTS = "reward/mean", *VALIDATION, "kl/ref", "length/mean"  # of the page
DEFAULTS = Namespace(patience=0, target=None, baseline=None, margin=0, on_hack="stop")

# ---- 3. the math ----


def values_of(rows, key):
    """[(step, value)] of the rows with a number under this key that has a finite square; never of
    the final test, which decides nothing."""
    return [
        (row["step"], row[key])
        for row in rows
        if isinstance(row.get(key), (int, float)) and abs(row[key]) < 1e100 and "test/n" not in row
    ]


def noise(values):
    """σ of one value: 1.4826/√2 × the median absolute deviation of the changes.

    The median is blind to a trend and to a few jumps; without noise it is 0.
    >>> round(noise([0, 1, 0, 1, 0, 1, 0]), 4), noise([1, 2, 3, 9, 10])
    (1.0484, 0.0)
    """
    changes = [0, *(b - a for a, b in pairwise(values))]
    middle = median(changes)
    return 1.4826 / math.sqrt(2) * median(abs(change - middle) for change in changes)


def evaluations(rows):
    """The measurements of v and how each compares with the best before it; none depends on later
    rows.

    step, key, v   key is the first of VALIDATION that the rows hold
    n              val/n or eval/n: answers, pairs or rows behind v; infinite if it is not logged
    best, best_s   place of the evaluation with the highest s so far, and that s
    fell           s of the best − s exceeds 3 σ, where σ is the largest of the noise of v and of the
                   standard errors (by the logged 95 % intervals) now and at the best; and it exceeds
                   a tenth of the gain, s of the best − first v
    rose           mean of the last 4 r − mean of the 4 before the best exceeds 3 σ of one r, not of
                   a mean of 4, because neighbouring rewards are correlated. Needs 8 r
    words          the numbers that were compared
    >>> v = [0.5, 0.5, 0.9, 0.5, 0.6, 0.6]  # one lucky value does not become the best
    >>> points = evaluations([{"step": k, "val/score": x} for k, x in enumerate(v)])
    >>> [(p.best, p.best_s) for p in points][-3:]
    [(0, 0.5), (4, 0.6), (4, 0.6)]
    """
    key = next((key for key in VALIDATION if any(key in row for row in rows)), None)
    points, v, r, best_s = [], [], [], -math.inf
    for row in rows:
        r += [value for _, value in values_of([row], "reward/mean")]
        if not values_of([row], key):
            continue
        v.append(VALIDATION[key] * row[key])
        s = median((v[:1] * 2 + v[-3:])[-3:])
        error = ((row.get(f"{key}_high") or 0) - (row.get(f"{key}_low") or 0)) / 3.92  # v ± 1.96 σ
        # the second has only the start to compare with, so it counts by its own v
        if s > best_s or (len(v) == 2 and v[1] > v[0]):
            best, best_s, best_error, then = len(points), s, error, max(len(r), 4)
        sigma, fall = max(noise(v[-100:]), error, best_error), best_s - s
        limit = max(DEVIATIONS * sigma, OF_THE_GAIN * (best_s - v[0]))
        n = row.get(f"{key.split('/')[0]}/n") or math.inf
        fell = fall > limit and n >= LEAST
        words, rose = f"{key} is {fall:.3g} worse than its best (limit {limit:.3g})", False
        # reward_train.py's reward/mean is of given answers, no policy's
        if len(r) >= 8 and key.startswith("val/"):
            rise, limit = fmean(r[-4:]) - fmean(r[then - 4 : then]), DEVIATIONS * noise(r[-100:])
            words += f", reward/mean has changed by {rise:+.3g} since (limit {limit:.3g})"
            rose = rise > limit
        points.append(Namespace(
            step=row["step"], key=key, v=v[-1], n=n, best=best, best_s=best_s,
            fell=fell, rose=rose, words=words,
        ))  # fmt: skip
    return points


def best_step(rows):
    """The step whose weights to keep, or None without validation.

    After an evaluation it is that one or the best before, so a trainer holds one copy.
    >>> best_step([{"step": k, "val/score": x} for k, x in enumerate([2, 2, 9, 3, 6, 6, 5])])
    4
    """
    points = evaluations(rows)
    return points[points[-1].best].step if points else None


# The rules. Each takes the rows and the flags and yields (step, words) for each value that it can
# judge; words say what was compared where the rule holds, and are "" where it does not.


def plateau(rows, args):
    """R1, with --patience N: s has had no new best for N evaluations, and the mean v of the last N
    is not above that of the N before, which keeps slow progress going that the noise hides.
    It climbs, then stays level for 10 evaluations: fires. Slow gains that add up: silent.
    >>> flat = [{"step": k, "val/score": min(k, 4) / 10} for k in range(15)]
    >>> slow = [{"step": k, "val/score": k / 250} for k in range(40)]
    >>> args = Namespace(**vars(DEFAULTS) | {"patience": 5})
    >>> [[(a.step, a.rule) for a in alarms(rows, args)] for rows in (flat, slow)]
    [[(13, 'R1 plateau')], []]
    """
    n, points = args.patience, evaluations(rows)
    for i in range(max(FEWEST, 2 * n), len(points) + 1) if n else ():
        p, v = points[i - 1], [p.v for p in points[i - 2 * n : i]]
        words = f"validation has not risen for {i - 1 - p.best} evaluations"
        if args.baseline is not None:  # .3 − .2 is .1, whatever floating point makes of it
            met = "reaches" if round(p.best_s - args.baseline, 9) >= args.margin else "misses"
            words += f"; its best, {p.best_s:.3g}, {met} --baseline + --margin"
        yield p.step, words * (i - 1 - p.best >= n and fmean(v[n:]) <= fmean(v[:n]))


def fallen(rows, args, reward_rose, times=1):
    """R2: s has fallen from its best while r has risen; at one evaluation it warns, at three in a
    row it stops the run. R3: s has fallen, and r has not risen (or is not logged).
    v turns down while r climbs on: R2. Both turn down: R3.
    >>> v = [min(k, 32 - k) / 40 for k in range(24)]
    >>> hack = [{"step": k, "val/score": v[k], "reward/mean": k / 50} for k in range(24)]
    >>> together = [row | {"reward/mean": row["val/score"]} for row in hack]
    >>> for rows in (hack, together):
    ...     [(a.step, a.rule, a.level) for a in alarms(rows)]
    [(20, 'R2 over_optimised', 'warn'), (22, 'R2 reward_hacking', 'stop')]
    [(20, 'R3 val_regression', 'warn')]
    """
    points = evaluations(rows)
    for i in range(FEWEST, len(points) + 1):
        holds = all(p.fell and p.rose == reward_rose for p in points[i - times : i])
        yield points[i - 1].step, points[i - 1].words * holds


def target(rows, args):
    """--target: two evaluations in a row reach it."""
    for a, b in pairwise(evaluations(rows)) if args.target is not None else ():
        yield b.step, f"twice at least {args.target}" * (min(a.v, b.v) >= args.target)


def beyond(rows, args, key, limit=0, times=0, plus=0, window=1, below=False):
    """The mean of the last `window` values is above (or below) its limit: the larger of `limit` and
    times · (mean of the first 3 values) + plus, which is judged from the fourth value on.
    >>> rows = [{"step": k, "length/mean": x} for k, x in enumerate([50, 50, 50, 100, 101])]
    >>> list(beyond(rows, None, "length/mean", times=2))
    [(3, ''), (4, 'length/mean 101, limit 100')]
    """
    points = values_of(rows, key)
    for i in range(4 if times else window, len(points) + 1):
        values = [value for _, value in points[:i]]
        bound = max(limit, times * fmean(values[:3]) + plus)
        now = fmean(values[-window:])
        holds = now < bound if below else now > bound
        yield points[i - 1][0], f"{key} {now:.3g}, limit {bound:.3g}" * holds


RULES = {  # at one step, the first counts
    "R12 judge_down": partial(beyond, key="judge/failed_frac", limit=0.5, window=3),
    "R12 none_scored": partial(beyond, key="groups/scored", limit=0.3, window=3, below=True),
    "R2 reward_hacking": partial(fallen, reward_rose=True, times=3),
    "target_reached": target,
    "R1 plateau": plateau,
    "R2 over_optimised": partial(fallen, reward_rose=True),
    "R3 val_regression": partial(fallen, reward_rose=False),
    "R6 dead_groups": partial(beyond, key="reward/frac_mixed", limit=0.5, window=5, below=True),
    "R7 repetition": partial(beyond, key="text/repetition", limit=0.1, times=1, plus=0.05),
    "R7 few_bigrams": partial(beyond, key="text/distinct_2", times=0.5, below=True),
    "R9 length_doubled": partial(beyond, key="length/mean", times=2),
    "R9 length_halved": partial(beyond, key="length/mean", times=0.5, below=True),
    "R9 answers_cut": partial(beyond, key="length/truncated_frac", limit=0.5, times=1, plus=0.3),
    "R12 judge_fails": partial(beyond, key="judge/failed_frac", limit=0.2),
}
STOPS = {"R12 judge_down": 4, "R12 none_scored": 4, "R2 reward_hacking": 3, "target_reached": 0,
         "R1 plateau": 0}  # these end a run, with this exit status; all others warn  # fmt: skip


class Alarm(NamedTuple):
    """A rule that began to hold at `step`."""

    step: int
    rule: str
    level: str  # "warn" or "stop"
    words: str  # what was compared
    holds: bool  # to the end of the rows

    def __str__(self):
        return f"step {self.step}: {self.rule} ({self.level}): {self.words}"


def alarms(rows, args=DEFAULTS):
    """[Alarm] in the order in which they began; those of a shorter log are the first of these.
    rows: of one run's metrics.jsonl, in order; args: with the flags of `add_watch_arguments`
    """
    found = []
    for name, rule in RULES.items():
        level = args.on_hack if "hacking" in name else "stop" if name in STOPS else "warn"
        judged = [(0, ""), *rule(rows, args)]
        found += [
            Alarm(step, name, level, words, holds=bool(judged[-1][1]))
            for (_, before), (step, words) in pairwise(judged)
            if words and not before
        ]
    return sorted(found, key=lambda alarm: alarm.step)  # stable: at one step as in RULES


def stop_reason(rows, args=DEFAULTS):
    """The rule by which a run with these rows should stop now, a key of STOPS, or None.

    Ask when all rows of a step are logged, and before the first step of a resumed run: with other
    flags, such as a higher --target, the answer may be another.
    """
    return next((a.rule for a in alarms(rows, args) if a.level == "stop" and a.holds), None)


# ---- 4. the arguments ----


def add_watch_arguments(parser):
    """The flags of the watch, for a trainer and for the command here."""
    add = parser.add_argument
    # fmt: off
    add("--patience", type=number(int, at_least=0), default=0, help="watch.py: stop after N evaluations without progress; 0: never")
    add("--target", type=number(), help="stop when two evaluations in a row reach this score")
    add("--baseline", type=number(), help="score of what you use now; with --patience, the plateau is compared with it")
    add("--margin", type=number(at_least=0), default=0, help="smallest improvement over --baseline that counts")
    add("--on-hack", choices=("stop", "warn"), default="stop", help="what to do when the reward rises while validation falls")
    # fmt: on


def promise(args, validates=True):
    """The line that a trainer prints at its start: what will end this run early.
    validates: does the run evaluate on held-out prompts? UserError for a flag without effect.
    >>> promise(DEFAULTS)
    'stops early by --patience 0, --target None, --on-hack stop'
    """
    if args.margin and args.baseline is None or args.baseline is not None and not args.patience:
        raise UserError("--margin needs --baseline, which needs a plateau: add --patience 5")
    if not validates:
        if args.patience or args.target is not None:
            raise UserError("--patience, --target: no effect without validation; set --eval-every")
        return "no validation, so over-optimisation would go unnoticed"
    return f"stops early by --patience {args.patience}, --target {args.target}, --on-hack {args.on_hack}"


# ---- 5. the data ----
# {"step": 10, "reward/mean": 0.41, …}, and if it evaluates {"step": 10, "val/score": 0.44, …}


def check_step(row):
    if not isinstance(row.get("step"), int):
        raise ValueError('expected a whole number "step"; delete this line')


def main(argv=None):
    cli = parser("watch.py RUN [flags]", "What the alarms say of a run, from its log.")
    cli.add_argument("log", type=Path, help="run folder, or its metrics.jsonl")
    cli.add_argument("--html", action="store_true", help="write RUN/watch/report.html, with curves")
    add_watch_arguments(cli)
    args = cli.parse_args(argv)
    promise(args)  # refuses a flag without effect

    # (1) read the log
    path = args.log / "metrics.jsonl" if args.log.is_dir() else args.log
    rows = [*read_jsonl(path, check_step, log=True)]
    if not rows:
        raise UserError(f"{path}: no complete row; wait for the run's first step")
    # (2), (3) measure, and where each rule began to hold
    found = alarms(rows, args)
    stop = next((alarm for alarm in found if alarm.level == "stop"), None)
    # (4) the answer first
    folder, answer = path.parent, f"Stop: {stop}." if stop else "No reason to stop."
    sentences = [answer, *facts(folder, rows, stop)]
    if not args.html:
        print(*sentences, "", *found, sep="\n")
    else:  # printed as well, and curves in which the alarms are marked
        from parts.report import SOFT, Report  # matplotlib, which the trainers do without

        args.out, args.overwrite = folder / "watch", True
        page = Report(f"Should {folder.resolve().name} go on?", args)
        page.answer(*sentences, *map(str, found))
        for key in CHARTS:
            if points := values_of(rows, key):
                axes = page.chart(f"{key}, by step")
                axes.plot(*zip(*points), color=page.colour(key))
                for alarm in found:
                    axes.axvline(alarm.step, color=SOFT, linestyle=":")
        page.write()
    return STOPS[stop.rule] if stop else 0


def facts(folder, rows, stop):
    """Is the run finished? What was held out, how often was it measured, and what is that too little
    for? A folder gets the model, and so config.json, at the end, and when its run is stopped
    (Ctrl-C), which the planned steps tell."""
    points, last = evaluations(rows), rows[-1]["step"]
    if record := read_record(folder):
        planned = record["args"].get("steps") or 0
        done = (folder / "config.json").is_file() and (stop or last >= planned)
        state = "Finished" if done else "Not finished (it is running, or --resume continues it)"
        yield f"{state}: step {last}{f' of {planned}' if planned else ''}."
    if not points:
        yield "Nothing held out was measured, so R1, R2 and R3 cannot judge this run."
        return
    n, count = points[-1].n, len(points)
    yield f"Validation: {points[-1].key}, n = {n}, {count} evaluations; best (median of 3) at step {best_step(rows)}."
    if count < FEWEST:
        fix = f"use --eval-every {last // FEWEST or 1}"
        yield f"This run has only {count} evaluations; R1, R2 and R3 need {FEWEST}: {fix}."
    if n < LEAST:
        yield f"R2 and R3 need n of {LEAST} or more."


# ---- 10. the guard ----

if __name__ == "__main__":
    command(main)
