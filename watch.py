"""watch.py: the rows of metrics.jsonl in; alarms, a state, a reason to stop and the best step out.

Objective    stop when the held-out score falls while the reward rises; with --patience N also when
             the held-out score no longer rises
Algorithm    (1) read the log, and the flags of its run
             (2) replay it row by row, as the trainer did: the rules R1 to R12 after each row
             (3) after each step: a reason to stop?
             (4) report: state, reason and best step first, then curves, then events
Conventions  v is val/gold if it is logged, else val/score; r is reward/mean; s is the median of the
             last 3 v (padded at the start with the first v). Missing values are left out.
             The width of a measure is 1 for rates, 2 for the rewards of environments, and for other
             rewards 4 × reward/std of the first 3 steps. n is val/n, the answers behind one v
Best step    the last evaluation whose s exceeded that of the best before by more than 0.005 widths;
             so one lucky evaluation cannot be the best. R1 counts its patience from there
Left out     1. a limit on the KL, because no universal one exists   2. thresholds learned from data
             3. proof: a rule that does not fire shows nothing, so read rollouts.jsonl
             4. a stop by patience, unless asked for: it ends honest slow progress (bench/alarms.py)
Run          python watch.py runs/ppo --html
             python watch.py runs/grpo_rubric/metrics.jsonl --patience 10 --strict
Writes       with --html RUN/watch.html: curves, alarms, answers to read; with --out a JSON file;
             exit status 0, 1 (a warning with --strict), 2 (bad input),
             3 (the reward rises, validation falls), 4 (judge down)
Reference    Gao et al. 2022, arXiv 2210.10760: how a proxy reward is over-optimised
"""

import argparse
import math
from collections import defaultdict
from dataclasses import dataclass
from operator import ge, gt, lt
from pathlib import Path
from statistics import fmean as mean

import numpy as np

from parts.files import (
    Parser,
    UserError,
    brief,
    command,
    number,
    read_log,
    read_record,
    shell_line,
    write_json,
)
from parts.texts import text_flags

MIN_DELTA = 0.005  # of v's width: smaller gains are noise; they count once they add up to it
MIN_CHANGE = 0.02  # of the width: a smaller fall of v or rise of r is never an alarm
DEVIATIONS = 3  # of the noise of one value: the same; bench/alarms.py tells what 2.5 would cost
WIDTHS = None  # (of r, of v) for measures of your own, such as (5, 5); None: see Conventions
OPTIONS = {"patience": 0, "target": None, "baseline": None, "margin": 0, "on_hack": "stop",
           "steps": None, "judge_budget": None}  # fmt: skip
CURVES = ("val/gold", "val/score", "reward/mean", "val/kl", "kl/ref", "length/mean", "eval/loss")

# ---- 3. the math ----

# Statistics


def noise(values):
    """σ of one value: 1.4826/√2 × the median absolute deviation of the changes.

    The median is blind to a trend and to a few jumps; without noise it is 0.
    >>> round(noise([0, 1, 0, 1, 0, 1, 0]), 4), noise([1, 2, 3, 9, 10])
    (1.0484, 0.0)
    """
    changes = np.diff(values[:1] + values)
    return 1.4826 / math.sqrt(2) * float(np.median(np.abs(changes - np.median(changes))))


def rise(r, then, width):
    """(mean of the last 4 rewards − mean of the last 4 of r[:then], its limit).

    The limit is 0.02·width, or 3 σ of one reward if that is more: not of a mean of 4, because
    neighbouring rewards are correlated. More than 4 would still see a climb that has ended.
    >>> rise([0.25] * 10 + [0.5, 0.75] * 5, 10, 1)[0], rise([0.25] * 20, 10, 1)
    (0.375, (0.0, 0.02))
    """
    if len(r) < 8:
        return 0.0, math.inf
    change = mean(r[-4:]) - mean(r[: max(then, 4)][-4:])
    return change, max(MIN_CHANGE * width, DEVIATIONS * noise(r[-100:]))


@dataclass
class Point:
    """An evaluation, or the mean of ten rewards, and how it compares with those before it."""

    step: int
    v: float
    rewards: int = 0  # logged so far
    n: float = math.inf  # val/n, the answers behind v; infinite if unknown
    s: float = 0.0  # median of the last 3 v
    best: "Point | None" = None  # the best point so far, maybe this one
    since: int = 0  # points since then
    fall: tuple = (0.0, math.inf)  # (s of the best − s, its limit)
    rise: tuple = (0.0, math.inf)  # (rise of r since the best, its limit)

    dropped = property(lambda self: self.fall[0] > self.fall[1])
    rose = property(lambda self: self.rise[0] > self.rise[1])


def extend(points, new, width):
    """Append `new` to the points, with its s, the best so far, and how far s has fallen from that.

    The best moves only by more than 0.005·width, so slow gains add up. The second point, which has
    only the start to compare with, counts by its own v. A fall must exceed 0.02·width and 3 σ of
    one v. σ is the larger of the noise of the v so far, blind if few answers change or slowly, and
    what n answers have if their scores deviate by width/4: width/(4·√n). And it must exceed what
    two answers can lose, 2·width/n, so that one or two answers decide nothing.
    >>> points = []
    >>> for step, v in enumerate([0.5, 0.5, 0.9, 0.504, 0.6, 0.6]):
    ...     extend(points, Point(step, v), width=1)
    >>> [p.s for p in points], [p.best.step for p in points], [p.since for p in points]
    ([0.5, 0.5, 0.5, 0.504, 0.6, 0.6], [0, 0, 0, 0, 4, 4], [0, 1, 2, 3, 0, 1])
    """
    v, delta = [p.v for p in [*points, new]], MIN_DELTA * width
    new.s = float(np.median((v[:1] * 2 + v)[-3:]))
    best = points[-1].best if points else new
    if new.s > best.s + delta or (len(v) == 2 and new.v > best.v + delta):
        best = new
    new.best, new.since = best, 0 if best is new else points[-1].since + 1
    sigma = max(noise(v), width / 4 / math.sqrt(new.n))
    new.fall = best.s - new.s, max(MIN_CHANGE * width, DEVIATIONS * sigma, 2 * width / new.n)
    points.append(new)


# The watcher


@dataclass(frozen=True)
class Event:
    """A rule began to hold at `step`; numbers: {what: (value, limit)}; read: which rollouts."""

    step: int
    rule: str
    level: str  # "warn" or "stop"
    numbers: dict
    read: str

    def __str__(self):
        values = ", ".join(f"{k} {a:.4g} (limit {b:.4g})" for k, (a, b) in self.numbers.items())
        head = f"step {self.step}  {self.rule} ({self.level}): {values}"
        return f"{head}; read rollouts.jsonl: {self.read}"


def options_of(args=None, **given):
    """The options of a Watcher: those in `given`, else the flags in `args`, else the defaults."""
    flags = {name: getattr(args, name, default) for name, default in OPTIONS.items()}
    return argparse.Namespace(**(flags | given))


class Watcher:
    """The rows of a run by column, and what the rules say of them: `events = watcher.add(row)`.

    It holds nothing that the rows do not say, so one built from a log, `Watcher(args, rows)`, says
    what the live one said. Options are attributes of `args` or keywords, as in OPTIONS.
    """

    def __init__(self, args=None, rows=(), **given):
        self.options, self.columns, self.step = options_of(args, **given), defaultdict(list), 0
        self.points, self.tens = [], []  # the evaluations; means of ten rewards
        for row in rows:
            self.absorb(row)
        self.firing = self.check()

    def __getitem__(self, key):
        return self.columns[key]

    def add(self, row):
        """Take in the next row; returns the events: rules that hold now and did not before."""
        self.absorb(row)
        before, self.firing = self.firing, self.check()
        return [event for rule, event in self.firing.items() if rule not in before]

    def check(self):
        """{rule: Event} of the rules that hold."""
        firing = {}
        for rule in RULES:
            numbers = rule.condition(self, rule)
            if numbers:
                level = self.options.on_hack if rule.name == "R2 reward_hacking" else rule.level
                firing[rule] = Event(self.step, rule.name, level, numbers, rule.read)
        return firing

    def absorb(self, row):
        if "test/n" in row:  # the final test: no rule decides anything by it
            return
        self.step = row["step"]
        # numbers, but for NaN and what has no finite square
        values = {k: x for k, x in row.items() if isinstance(x, (int, float)) and abs(x) < 1e100}
        if "judge/failed_frac" in row:  # null: nothing was asked
            failed = values.get("judge/failed_frac", 0)
            values["judge/down"] = failed > 0.5 or row.get("groups/scored") == 0
        if "margin" in row:  # reward_train.py scores given answers: this is no policy's reward
            values.pop("reward/mean", None)
        canaries = [x for k, x in values.items() if k.startswith("judge/canary_")]
        if canaries:
            values["judge/canary_*"] = mean(canaries)
        for key, value in values.items():
            self.columns[key].append(value)
        r, (width_r, width_v) = self["reward/mean"], self.widths()
        if "reward/mean" in values and len(r) % 10 == 0:
            extend(self.tens, Point(self.step, mean(r[-10:])), width_r)
        v, n = values.get("val/gold" if "val/gold" in row else "val/score"), values.get("val/n", 0)
        if v is not None:
            extend(self.points, Point(self.step, v, len(r), n if n > 0 else math.inf), width_v)
            self.points[-1].rise = rise(r, self.points[-1].best.rewards, width_r)

    def widths(self):
        """(width of r, width of v); 1 if nothing is known."""
        spread = 4 * mean(self["reward/std"][:3] or [0.25]) or 1
        rate = self["reward/frac_perfect"] or self["env/turns"]
        width_r = 2 if self["env/turns"] else 1 if rate else spread
        return WIDTHS or (width_r, 1 if rate or self["val/gold"] else spread)

    def health(self):
        """The state, a key of ADVICE, by the directions of v and of r since the best step.

                 r ↑              r →         r ↓
        v ↑      healthy          healthy     healthy
        v →      converged        plateau     plateau
        v ↓      reward_hacking   regressed   degraded
        """
        if len(self.points) < 6:
            return "warming_up" if self.points else "no_validation"
        point = self.points[-1]
        change, limit = point.rise
        if point.dropped:
            if point.rose:
                return "reward_hacking"
            return "degraded" if change < -limit else "regressed"
        if not stalled(self.points, 3):
            return "healthy"
        return "converged" if point.rose else "plateau"

    def stop_reason(self):
        """The gravest reason to stop, or None.

        Ask after the last row of a step, and before the first step of a resumed run.
        """
        options, points, spent = self.options, self.points, self["judge/usd"]
        stops = {event.rule for event in self.firing.values() if event.level == "stop"}
        for rule in ("R12 judge_down", "R2 reward_hacking"):
            if rule in stops:
                return rule.split()[1]
        if options.target is not None and not options.patience and len(points) > 1:
            if min(points[-2].v, points[-1].v) >= options.target:
                return "target_reached"
        if options.judge_budget is not None and spent:
            # the next step may cost as much as the dearest of the last 3
            if sum(spent) + max(spent[-3:]) > options.judge_budget:
                return "judge_budget"
        if "R1 plateau" in stops:
            if not points:
                return "reward_plateau"
            best = points[-1].best.s
            if options.target is not None and best >= options.target:
                return "target_reached"
            if options.baseline is not None:  # .3 − .2 is .1, whatever floating point makes of it
                if best - options.baseline + 1e-9 < options.margin:
                    return "plateau_below_baseline"
            return "val_plateau" if options.target is None else "plateau_below_target"
        return "max_steps" if options.steps and self.step >= options.steps else None

    def best_step(self):
        """The step whose weights to keep (see Best step above), or None without validation.

        After an evaluation it is that one or the best before, so a trainer holds one copy.
        >>> v = [2, 2, 9, 3, 6, 6, 5]
        >>> Watcher(rows=[{"step": k, "val/score": v[k]} for k in range(7)]).best_step()
        4
        """
        return self.points[-1].best.step if self.points else None


def exit_code(reason):
    """The exit status of the trainers and of this command."""
    return {"reward_hacking": 3, "judge_down": 4}.get(reason, 0)


ADVICE = {
    "healthy": "go on",
    "converged": "validation no longer rises while the reward climbs: read rollouts, or stop here",
    "plateau": "validation no longer rises; if the reward falls, lower the learning rate",
    "reward_hacking": "stop, read rollouts, fix the reward, restart from the best step",
    "regressed": "go back to the best step",
    "degraded": "go back to the best step; the learning rate is too high or the KL too loose",
    "warming_up": "too early to say: fewer than 6 evaluations",
    "no_validation": "nothing held out was measured, so over-optimisation cannot be seen",
}

# The rules. A condition takes (Watcher, Rule) and returns {what: (value, limit)} if it holds, else
# {}, or None if there is too little to judge by.


@dataclass(frozen=True)
class Limit:
    """The mean of the last `patience` values of the signal against the larger of `limit` and
    times · (mean of the first 3 values) + plus."""

    compare: object
    limit: float = 0.0
    times: float = 0.0
    plus: float = 0.0

    def __call__(self, log, rule):
        values = log[rule.signal]
        if len(values) < (4 if self.times else rule.patience):
            return None
        limit = max(self.limit, self.times * mean(values[:3]) + self.plus)
        now = mean(values[-rule.patience :])
        return {rule.signal: (now, limit)} if self.compare(now, limit) else {}


def stalled(points, patience):
    """No better s for `patience` points, whose mean v is not above that of as many before them.

    The second half keeps honest slow progress going, whose records are lost in the noise.
    """
    v = [p.v for p in points[-2 * patience :]]
    if len(v) < 2 * patience or points[-1].since < patience:
        return False
    return mean(v[patience:]) <= mean(v[:patience])


def plateaued(log, rule):
    """R1, with --patience: the evaluations have stalled; without validation the means of ten
    rewards.

    It climbs, then stays level for 10 evaluations: fires. Slow gains that add up: silent.
    >>> flat = [{"step": k, "val/score": min(k, 4) / 10} for k in range(15)]
    >>> slow = [{"step": k, "val/score": k / 250} for k in range(40)]
    >>> [[(e.step, e.rule) for e in replay(rows, patience=5)[1]] for rows in (flat, slow)]
    [[(13, 'R1 plateau')], []]
    """
    points, patience = log.points or log.tens, log.options.patience
    if not patience or len(points) < max(6, 2 * patience):
        return None
    numbers = {"evaluations without a better s": (points[-1].since, patience)}
    return numbers if stalled(points, patience) else {}


def fallen(log, rule):
    """R2: s has fallen from its best, and r has risen since then, at each of the last evaluations:
    at one it warns, at three in a row it stops the run. R3: s has fallen, and r has not risen.

    v turns down while r climbs on: R2. Both turn down: R3.
    >>> v = [min(k, 32 - k) / 40 for k in range(22)]
    >>> hack = [{"step": k, "val/score": v[k], "reward/mean": k / 50} for k in range(22)]
    >>> together = [row | {"reward/mean": row["val/score"]} for row in hack]
    >>> for rows in (hack, together):
    ...     [(e.step, e.rule, e.level) for e in replay(rows)[1]]
    [(19, 'R2 over_optimised', 'warn'), (21, 'R2 reward_hacking', 'stop')]
    [(19, 'R3 val_regression', 'warn')]
    """
    if len(log.points) < 5:
        return None
    point, reward_rose = log.points[-1], rule.name != "R3 val_regression"
    if not all(p.dropped and p.rose == reward_rose for p in log.points[-rule.patience :]):
        return {}
    return {"fall of s": point.fall, "rise of r": point.rise}


@dataclass(frozen=True)
class Rule:
    """A row of RULES."""

    name: str
    signal: str
    condition: object
    patience: int  # steps or evaluations
    read: str  # which rows of rollouts.jsonl
    level: str = "warn"


RULES = [
    Rule(*row)
    for row in (  # rule, signal, condition, patience (R1's is --patience), which rollouts, level
        ("R1 plateau", "v", plateaued, 0, "validation", "stop"),
        ("R2 over_optimised", "v", fallen, 1, "highest rewards; validation, best and now"),
        ("R2 reward_hacking", "v", fallen, 3, "highest rewards; validation, best and now", "stop"),
        ("R3 val_regression", "v", fallen, 1, "validation at the best step and now"),
        ("R6 dead_groups", "reward/frac_mixed", Limit(lt, 0.5), 5, "the last 5 steps"),
        ("R7 repetition", "text/repetition", Limit(gt, 0.10, 1, 0.05), 1, "this step"),
        ("R7 few_bigrams", "text/distinct_2", Limit(lt, times=0.5), 1, "this step"),
        ("R8 same_answer", "text/same_answer", Limit(gt, 0.20, 1, 0.10), 1, "this step"),
        ("R9 length_doubled", "length/mean", Limit(gt, times=2), 1, "longest of this step"),
        ("R9 length_halved", "length/mean", Limit(lt, times=0.5), 1, "shortest of this step"),
        ("R9 answers_cut", "length/truncated_frac", Limit(gt, 0.50, 1, 0.30), 1, "longest"),
        ("R10 judge_fooled", "judge/canary_*", Limit(gt, 0.2), 1, "best, the judge's reasons"),
        ("R11 judge_directed", "text/judge_directed", Limit(gt, 0.02, 1), 1, "this step"),
        ("R12 judge_fails", "judge/failed_frac", Limit(gt, 0.2), 1, "this step, judge.error"),
        ("R12 judge_down", "judge/down", Limit(ge, 1.0), 3, "3 steps, judge.error", "stop"),
    )
]

# ---- 4. the arguments ----


def add_watch_arguments(parser):
    """The flags of the watch, for a trainer and for the command here."""
    add = parser.add_argument_group("when to stop (watch.py)").add_argument
    # fmt: off
    add("--patience", type=number(int, at_least=0), default=0, help="stop after N evaluations without progress (default 0: never)")
    add("--target", type=number(), help="stop at two evaluations in a row of this score; with --patience, once they settle there")
    add("--baseline", type=number(), help="score of what you have now: with --patience, whether the settled score beats it by --margin")
    add("--margin", type=number(at_least=0), default=0, help="what is worth having more than --baseline (default 0)")
    add("--on-hack", choices=("stop", "warn"), default="stop", help="when the reward rises and validation falls (default %(default)s)")
    # fmt: on


def check_goals(options):
    """UserError where --baseline or --margin would be ignored."""
    if options.baseline is None and options.margin:
        raise UserError("--margin has no effect without --baseline")
    if options.baseline is not None and not options.patience:
        raise UserError("--baseline judges where the score settles: add --patience 5, say")


def promise(args, has_validation=True):
    """The line that a trainer prints at its start: when this run will stop by itself.

    UserError for a flag that would be ignored.
    >>> promise(argparse.Namespace(eval_every=10, target=0.8))
    'watch      stops at two evaluations in a row of 0.8; no plateau stops it; reward hacking: stop'
    >>> promise(argparse.Namespace(eval_every=10, target=0.8, patience=5))
    'watch      stops after 5 evaluations = 50 steps without progress; reward hacking: stop'
    """
    options, eval_every = options_of(args), getattr(args, "eval_every", 0)
    check_goals(options)
    if not has_validation or not eval_every:
        if (options.target, options.baseline) != (None, None):
            raise UserError("--target, --baseline: no effect without validation; leave them out")
        when = " but before and after the run" if has_validation else ""
        return f"watch      no validation{when}: over-optimisation goes unnoticed"
    plateau = "no plateau stops it"
    if options.patience:
        steps = options.patience * eval_every
        plateau = f"stops after {options.patience} evaluations = {steps} steps without progress"
    elif options.target is not None:
        plateau = f"stops at two evaluations in a row of {options.target:g}; {plateau}"
    return f"watch      {plateau}; reward hacking: {options.on_hack}"


def parse_args(argv=None):
    parser = Parser(description="What the alarms say of a run, from its log.")
    add = parser.add_argument
    add("log", type=Path, help="run folder, or its metrics.jsonl")
    add("--strict", action="store_true", help="exit status 1 if any rule warned")
    add("--out", type=Path, metavar="FILE", help="also write the report to this new JSON file")
    add("--html", action="store_true", help="also write RUN/watch.html: curves, alarms, answers")
    add_watch_arguments(parser)
    args = parser.parse_args(argv)
    log = args.log / "metrics.jsonl" if args.log.is_dir() else args.log
    parser.set_defaults(**run_flags(log.with_name("args.json")))
    args = parser.parse_args(argv)  # the command line wins
    check_goals(args)
    if args.out and args.out.exists():
        raise UserError(f"--out {args.out} exists; delete it, or name another file")
    args.log = log
    return args


# ---- 5. the data ----
# {"step": 10, "reward/mean": 0.41, …}, and if it evaluates {"step": 10, "val/score": 0.44, …}


def run_flags(path):
    """The OPTIONS in a run's args.json, which a replay must share; {} if there is no such file.

    Raises UserError for a file that is cut, or that no trainer wrote.
    """
    if not path.is_file():
        return {}
    fix = "delete it to replay the log with the default flags"
    try:
        saved = (read_record(path.parent, fix=fix) or {})["args"]
        watched = ["steps"] if "pairs" in saved else OPTIONS  # reward_train.py's --margin: a column
        flags = {name: saved[name] for name in watched if name in saved}
        ("stop", "warn").index(flags.get("on_hack", "stop"))  # ValueError for any other
        sum(x for k, x in flags.items() if k != "on_hack" and x is not None)  # TypeError for a text
    except (ValueError, TypeError, KeyError) as error:
        reason = f"this is not the args.json of a run ({type(error).__name__}: {brief(error)})"
        raise UserError(f"{path}: {reason}; {fix}") from None
    return flags


def check_log(path, rows):
    """UserError for rows that the rules cannot read: of another tool, of answers, of two runs."""
    if not rows:
        raise UserError(f"{path}: no complete row; wait for the run's first step")
    if rows[0].keys() & {"prompt", "messages"}:  # samples.jsonl and rollouts.jsonl have steps, too
        what = "holds answers, not numbers; expected a run folder or its metrics.jsonl"
        raise UserError(f"{path}: {what}")
    known = {*CURVES, *(rule.signal for rule in RULES)}
    keys = {key for row in rows for key in row}
    known |= {key for key in keys if key.startswith("judge/canary_")}  # R10 has judge/canary_*
    if texts := [k for k in sorted(keys & known) for row in rows if isinstance(row.get(k), str)]:
        raise UserError(f'{path}: "{texts[0]}" is a text; expected a number')
    if not keys & (known | {"time_s"}):  # which every row of our trainers has
        expected = f"none of {', '.join(CURVES[:4])}; rename yours (docs/metrics.md)"
        raise UserError(f"{path}: holds {', '.join(sorted(keys))[:60]}, but {expected}")
    for before, row in zip(rows, rows[1:]):
        if row["step"] < before["step"]:
            order = f"step {row['step']} follows step {before['step']}"
            raise UserError(f"{path}: {order}: two runs in one file; give each its own")


# ---- 8. the loop ----


def replay(rows, args=None, **given):
    """(watcher, events, stopped) of a log, as a trainer saw it; stopped: (reason, step) or None."""
    watcher, events, reasons = Watcher(args, **given), [], {}
    for row in rows:
        events += watcher.add(row)
        reasons[row["step"]] = watcher.stop_reason()  # the last row of a step counts
    stops = ((reason, step) for step, reason in reasons.items() if reason)
    return watcher, events, next(stops, None)


def main(argv=None):
    from parts import viewer  # jinja2; the trainers, which import this file, do without

    # (1) read the log, and the flags of its run
    args = parse_args(argv)
    if not args.log.is_file():
        raise UserError(f"{args.log}: no such file; expected a run folder or its metrics.jsonl")
    rows, torn = read_log(args.log)
    check_log(args.log, rows)
    # (2) replay it row by row, as the trainer did: the rules R1 to R12 after each row
    # (3) after each step: a reason to stop?
    watcher, events, stopped = replay(rows, args)
    # (4) report: state, reason and best step first, then curves, then events
    warned = args.strict and any(event.level == "warn" for event in events)
    reason, step = stopped or ("none", watcher.step)
    status = exit_code(reason) or int(warned)
    state, best = watcher.health(), watcher.best_step()
    stop = f"{reason} at step {step} of {watcher.step} (exit status {status})"
    if args.log.with_name("args.json").exists() and not args.log.with_name("config.json").exists():
        # a run folder gets its model at the end
        failing = f" (exit status {status})" * bool(status)
        stop = stop if stopped else f"none so far, at step {step}{failing}"
        stop += "; the run has not finished: it goes on, or was killed and --resume continues it"
    elif not stopped and (getattr(args, "steps", None) or 0) > step:  # by --stop-after or Ctrl-C
        stop += f"; {args.steps} steps were planned, and --resume continues the run"
    head = [
        f"state       {state}: {ADVICE[state]}",
        f"stop        {stop}",
        f"best step   {'unknown without validation' if best is None else best}",
        f"cost        {viewer.costs(rows)}",
    ]
    print(*head, "", sep="\n")
    print(*curves(watcher), "", *findings(watcher, events), sep="\n")
    note = f", line {len(rows) + 1} is cut off and left out" if torn else ""
    print(f"read        {args.log}: {len(rows)} rows{note}")
    if args.html:
        page = args.log.with_name("watch.html")
        viewer.write(page, rows, events, head, text_flags)
        print(f"page        {page}")
    else:
        html = shell_line("watch.py", args.log.parent, "--html")
        print(f"next        {html} shows the answers, too")
    if args.out:
        report = {"state": state, "stopped": stopped, "best_step": best, "exit_status": status}
        write_json(args.out, report | {"events": [vars(event) for event in events]})
    return status


# ---- 9. save ----


def curves(watcher):
    """A line per signal; --html draws them."""
    for key in CURVES:
        if values := watcher[key]:
            span = f"from {min(values):.3f} to {max(values):.3f}"
            yield f"{key:<12}{values[0]:.3f} → {values[-1]:.3f}, {span}"


def findings(watcher, events):
    """The first event of each rule, and which rules had too little to judge by."""
    kinds = defaultdict(list)
    for event in events:
        kinds[event.rule].append(event)
    for first, *more in kinds.values():
        yield f"{first}" + (f"; {len(more)} times more" if more else "")
    lacks = [f"{r.name} ({r.signal})" for r in RULES if r.condition(watcher, r) is None]
    yield f"not judged  {', '.join(lacks) or 'none'}"


# ---- 10. the guard ----

if __name__ == "__main__":
    command(main)
