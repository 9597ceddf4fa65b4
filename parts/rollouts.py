"""parts/rollouts.py: what the three RL trainers share around a rollout.

A rollout is a dict `b` of (N, T) tensors, one row per answer, prompt and answer right-padded:

position     0      1      2      3      4      5
token        p0     p1     p2     a0     a1     end
mask                              ✓      ✓      ✓       the actions: what the policy chose
logps                             of a0  of a1  of end  at the sampling temperature, 0 elsewhere

`logps` are log π_old, at first the `sampler_logps` of the draws. In half precision the sampler
differs from a forward by tenths on single tokens, enough to clip by rounding alone; `rescore` then
puts those of a forward in their place.
"""

import copy
from itertools import pairwise
from statistics import fmean

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

import watch
from parts import engine, parallel
from parts.answers import MOST_PROMPTS, check_policy, identity, read_prompts, some_prompts
from parts.files import UserError, number
from parts.messages import hash_fraction, prompt_key
from parts.pairs import read_texts
from parts.parallel import adapter_off
from parts.runs import Run
from parts.sampling import ROWS, is_weights

MANY_CUT = 0.05  # share of cut answers beyond which the limit should be raised
LEAST_VALIDATION = 8  # answers; fewer are no ground to choose weights by


def add_rollout_arguments(parser):
    """The flags that ppo.py and grpo_*.py share; when to stop is watch.py's."""
    add = parser.add_argument
    # fmt: off
    add("--temperature", type=number(above=0), default=1.0, help="temperature of rollouts and updates")
    add("--max-new-tokens", type=number(int, at_least=1), default=96, help="most tokens of an answer, or of a turn")
    add("--restore", choices=("best", "last"), help=f"weights to save: best on validation (default with {LEAST_VALIDATION} rows) or last")
    # fmt: on
    engine.add_engine_arguments(parser)
    watch.add_watch_arguments(parser)
    parser.set_defaults(eval_every=5, save_every=20)  # a step is a whole rollout


# ---- prompts ----


def split_prompts(args, tokenizer):
    """(training rows, at most MOST_PROMPTS validation rows) of --prompts: by the rows' "split" if
    they have one; else --eval-fraction of the prompts is held out by hash, of a small file
    LEAST_VALIDATION, at most half. A validation prompt is not trained on."""
    rows = read_prompts(args.prompts, "--prompts")
    read_texts(tokenizer, rows, args.chat)
    if any("split" in row for row in rows):
        train, val = ([r for r in rows if r.get("split") == name] for name in ("train", "val"))
    else:
        train, each = rows, {prompt_key(row): row for row in rows}  # each prompt once
        least = min(LEAST_VALIDATION, len(each) // 2) if args.eval_fraction else 0
        n = max(least, sum(hash_fraction(key) < args.eval_fraction for key in each))
        val = some_prompts(each.values(), n)
    val = some_prompts(val, MOST_PROMPTS)
    train = without(train, val)
    if not train:
        raise UserError(f'--prompts {args.prompts}: none to train on; "split" must be train or val')
    print(f"data       {len(rows)} prompts; training {len(train)}, validation {len(val)}")
    return train, val


def without(rows, others):
    """The rows whose prompt is not one of the others', whatever its form."""
    keys = {*map(prompt_key, others)}
    return [row for row in rows if prompt_key(row) not in keys]


def prompts_of_step(rows, size, seed, step):
    """(`size` rows for this step, counted from 1; the pass over all rows in which they begin): from
    an endless row of seeded permutations, so that a small file repeats."""
    passes, places = np.divmod(np.arange((step - 1) * size, step * size), len(rows))
    order = {e: np.random.default_rng([seed, e]).permutation(len(rows)) for e in {*passes}}
    return [rows[order[e][place]] for e, place in zip(passes, places)], passes[0]


# ---- log-probs ----


def cut(b, part):
    """The rows `part` of a rollout's tensors, as wide as the longest of them."""
    longest = int(b["attention_mask"][part].sum(1).max())
    return {k: x[part, :longest] for k, x in b.items() if torch.is_tensor(x) and x.ndim == 2}


@torch.no_grad()
def teacher_forced(run, module, b, output=0):
    """(N, T): by forwards of a module, what it returns at place `output`: 0 are the log-probs of a
    policy, −1 the values of a critic. Each rank reads its share."""
    lengths, columns = b["attention_mask"].sum(1).tolist(), torch.zeros_like(b["logps"])
    for part in run.micro_batches(range(len(lengths)), lengths):
        mb = cut(b, part)
        column = module(*(mb[key] for key in ROWS), run.args.temperature)[output]
        columns[part, : column.shape[1]] = column
    parallel.add_up([columns])
    return columns


def reference_logps(run, reference, b):
    """(N, T) log π_ref of the actions, with the adapter of LoRA off; without a reference log π_old."""
    if not reference:
        return b["logps"]
    with adapter_off():
        return teacher_forced(run, reference, b)


def rescore(run, policy, b):
    """In half precision, or where servers drew, make `logps` those of `teacher_forced`. Our own
    sampler's are equal to 1e-6 in fp32, and no forward is spent."""
    if run.dtype != torch.float32 or run.args.rollouts_from:
        b["logps"] = teacher_forced(run, policy, b)


def server_weights(args, mb, logps):
    """(n, T) factors of the losses of a micro-batch: `is_weights` where servers drew it, else 1.

    logps   (n, T) log π_old of the policy that drew, by our own forward
    """
    if not args.rollouts_from:
        return torch.ones_like(logps)
    return is_weights(logps, mb["sampler_logps"], mb["mask"], args.is_clip)


def preflight(run, policy, reference, tokenizer, b):
    """UserError unless the log-probs of a rollout are those of a teacher-forced pass, and of the
    reference (None: there is none); shows one answer with its actions marked."""
    flag = f"--model {run.args.model}"
    check_policy(policy, tokenizer, *(b[key] for key in ROWS), flag)
    logps, sampled = teacher_forced(run, policy, b), b["sampler_logps"]
    start = reference_logps(run, reference, b)
    for name, other in (("sampler and forward", sampled), ("policy and reference", start)):
        gap = (logps - other)[b["mask"]].abs().mean().item()
        identity(f"gap between {name}", gap, 1e-4, run.dtype, flag)
    print("preflight  log-probs are the model's, the sampler's and the reference's: ok")


# ---- metrics ----


class UpdateMeans:
    """What an update logs: means over its tokens, summed over micro-batches and ranks and divided
    once, and means over its optimiser steps."""

    def __init__(self):
        self.tokens, self.steps = [], []  # of each micro-batch; of each step loss, grad_norm, lr
        self.mismatch = []  # |log π − log π of what drew| of each token, before the first step

    def add(self, mb, logps, **columns):
        """After a forward. mb: a micro-batch of the rollout; logps, columns: (n, T), 0 outside the
        mask, "ratio" among them."""
        sums = {key: column.detach().float().sum().item() for key, column in columns.items()}
        self.tokens.append((mb["mask"].sum().item(), columns["ratio"].max().item(), sums))
        if not self.steps:  # later the policy is another
            self.mismatch += (logps.detach() - mb["sampler_logps"])[mb["mask"]].abs().tolist()

    def row(self):
        """{key: mean}, "ratio/max" and "rollout/mismatch"; nothing if no token was updated."""
        if not self.steps:
            return {}
        row = {key: fmean(step[key] for step in self.steps) for key in self.steps[0]}
        tokens, ratios, sums = zip(*parallel.gather(self.tokens))
        row |= {key: sum(x[key] for x in sums) / sum(tokens) for key in sums[0]}
        return row | {
            "ratio/mean": row.pop("ratio"), "ratio/max": max(ratios),
            "rollout/mismatch": fmean(parallel.gather(self.mismatch)),
        }  # fmt: skip


def lengths_of(b):
    """Of each answer of a rollout: its tokens; was it cut?"""
    return b["mask"].sum(1).tolist(), (~b["finished"]).tolist()


def length_row(lengths, is_cut, tokens):
    """length/* and counts. lengths, is_cut: see `lengths_of`; tokens: of prompts and answers."""
    return {
        "length/mean": fmean(lengths), "length/truncated_frac": fmean(is_cut),
        "tokens": tokens, "answer_tokens": sum(lengths), "episodes": len(lengths),
    }  # fmt: skip


def val_row(lengths, is_cut):
    """The counts of an evaluation; lengths, is_cut: as for `length_row`."""
    return {"val/n": len(lengths), "val/length": fmean(lengths), "val/cut": fmean(is_cut)}


def is_repetitive(text):
    """True if in some window of 1000 characters less than 15 % of the 8-grams are distinct.

    "I see. I see. …" has 7 distinct ones; of the 8-grams of prose, even said twice, half are.
    >>> [is_repetitive(text) for text in ("I see. " * 40, "Led two audits, then two more.", "")]
    [True, False, False]
    """
    windows = (text[start : start + 1000] for start in range(0, len(text), 500))
    return any(
        len(window) > 90  # shorter texts cannot tell
        and len({window[i : i + 8] for i in range(len(window) - 7)}) < 0.15 * len(window)
        for window in windows
    )


def text_row(texts):
    """The metrics of text/*, which rule R7 of watch.py reads: the share of repetitive answers;
    distinct word pairs / word pairs, None where there is no pair.
    >>> text_row(["No no no", "no no no"])
    {'text/repetition': 0.0, 'text/distinct_2': 0.5}
    """
    pairs = [pair for text in texts for pair in pairwise(text.split())]
    return {
        "text/repetition": fmean(map(is_repetitive, texts)),
        "text/distinct_2": len({*pairs}) / len(pairs) if pairs else None,
    }


def answers_row(b):
    """`length_row` and `text_row` of a rollout."""
    tokens = int(b["attention_mask"].sum())
    return length_row(*lengths_of(b), tokens) | text_row(b["texts"])


# ---- validation: which weights are written, and when the run ends ----


class WatchedRun(Run):
    """A run with the alarms of watch.py: prints them, keeps the weights that validate best, and ends
    when a rule says so. Both lie in `state`, so a resumed run goes on alike."""

    def watch(self, n):
        """To be called before the first evaluation.

        n   validation rows; with fewer than LEAST_VALIDATION the last weights are written
        """
        self.state.setdefault("best", None)  # {"step", "weights"}; weights on rank 0 alone
        default = "best" if n >= LEAST_VALIDATION else "last"
        self.restore = self.args.restore or default if n else "last"
        print(f"validation {n} rows; the {self.restore} weights are saved (--restore)")
        print(f"watch      {watch.promise(self.args, n > 0)}")
        if self.step:  # resumed: with more --judge-budget or another --target it may go on
            self.end_step()

    def log(self, row):
        """One row of metrics.jsonl; in step 1 with a hint where many answers are cut."""
        super().log(row)
        share = row.get("length/truncated_frac", 0)
        if self.step == 1 and share > MANY_CUT:
            parallel.say(f"step 1: {share:.0%} of the answers were cut; raise --max-new-tokens")

    def evaluation(self, metrics, samples):
        """Log an evaluation; keep a copy of the weights if it is the best so far."""
        super().evaluation(metrics, samples)
        best_step = parallel.gather([watch.best_step(self.rows())])[0]
        if self.restore == "best" and best_step == self.step:
            weights = get_model_state_dict(self.policy, options=parallel.TRAINED)
            self.state["best"] = {"step": self.step, "weights": copy.deepcopy(weights)}

    def end_step(self):
        """Print this step's alarms; end the run if a rule says so, or if a step as dear as the
        dearest of the last three rows would exceed --judge-budget. To be asked when all rows of the
        step are in."""
        rows, budget = self.rows(), vars(self.args).get("judge_budget")
        for alarm in watch.alarms(rows, self.args):
            if alarm.step == self.step:
                parallel.say(str(alarm))
        usd = [row["judge/usd"] for row in rows if row.get("judge/usd")]
        reason = watch.stop_reason(rows, self.args)
        if budget and sum(usd) + max(usd[-3:], default=0) > budget:
            reason = reason or "judge_budget"
        self.state["ended"] = parallel.gather([reason])[0]  # of rank 0, which has the rows

    def restore_best(self):
        """Put back the best weights, if any were kept; returns the step that the weights are from."""
        best = self.state["best"]
        if not best or self.unfinished():
            return self.step
        several = parallel.world() > 1  # rank 0 sends them to the others
        options = StateDictOptions(full_state_dict=True, strict=False, broadcast_from_rank0=several)
        weights = dict(best["weights"])  # torch puts shards into it
        set_model_state_dict(self.policy, weights, options=options)
        return best["step"]

    def finish(self, *next):
        """`Run.finish` with the best weights. The exit status is watch's if a rule ended the run."""
        step, ended = self.restore_best(), self.state["ended"]
        if ended:
            print(f"stopped after step {self.step}: {ended}")
        start = ": no step improved on the start" * (step == 0)
        print(f"saved are the {self.restore} weights, of step {step}{start}")
        return super().finish(*next, step=step) or watch.STOPS.get(ended, 0)
