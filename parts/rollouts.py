"""parts/rollouts.py: what the three RL trainers share around a rollout.

A rollout is a dict `b` of (N, T) tensors, one row per answer, prompt and answer right-padded:

position     0      1      2      3      4      5
token        p0     p1     p2     a0     a1     end
mask                              ✓      ✓      ✓       the actions: what the policy chose
logps                             of a0  of a1  of end  at the sampling temperature, 0 elsewhere

`logps` are log π_old, by the sampler. In half precision the sampler differs from a forward by
tenths on single tokens, enough to clip by rounding alone; `rescore` then puts those of a forward in
their place and keeps the others as `sampler_logps`.
"""

import copy
from statistics import fmean

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

import watch
from common import Policy, load_model, pad_id, pad_rows
from parts import parallel, runs
from parts.answers import MOST_PROMPTS, check_policy, identity, read_prompts, some_prompts
from parts.files import UserError, number
from parts.lora import adapter_off
from parts.messages import prompt_key
from parts.pairs import held_out, say_how_text_is_read
from parts.sampling import sample

MANY_CUT = 0.05  # share of cut answers beyond which the limit should be raised
LEAST_VALIDATION = 8  # answers; fewer are no ground to choose weights by
ROWS = ("ids", "attention_mask", "mask")  # of a rollout, what a forward takes


def add_rollout_arguments(parser):
    """The flags that ppo.py and grpo_*.py share."""
    add = parser.add_argument
    # fmt: off
    add("--temperature", type=number(above=0), default=1.0, help="temperature of rollouts and updates")
    add("--max-new-tokens", type=number(int, at_least=1), default=96, help="most tokens of an answer, or of a turn")
    add("--restore", choices=("best", "last"), help=f"weights to save: best on validation (default with {LEAST_VALIDATION} rows) or last")
    # fmt: on


# ---- prompts ----


def split_prompts(args, tokenizer):
    """(training rows, at most MOST_PROMPTS validation rows) of --prompts: by the rows' "split" if
    they have one; else --eval-fraction of the prompts is held out by hash, of a small file
    LEAST_VALIDATION, at most half. A validation prompt is not trained on.
    """
    rows = read_prompts(args.prompts, "--prompts", args.chat)
    texts = sum(isinstance(row["prompt"], str) for row in rows)
    say_how_text_is_read(tokenizer, texts, args.chat)
    if any("split" in row for row in rows):
        train, val = ([r for r in rows if r.get("split") == name] for name in ("train", "val"))
    else:
        each = list({prompt_key(row): row for row in rows}.values())  # each prompt once
        train, by_hash = rows, some_prompts(each, len(each))
        n = sum(held_out(prompt_key(row), args.eval_fraction) for row in by_hash)
        n = max(n, min(LEAST_VALIDATION, len(by_hash) // 2))
        val = by_hash[:n] if args.eval_fraction else []
    val = some_prompts(val, MOST_PROMPTS)
    held = {prompt_key(row) for row in val}
    train = [row for row in train if prompt_key(row) not in held]
    if not train:
        raise UserError(f'--prompts {args.prompts}: none to train on; "split" must be train or val')
    print(f"data       {len(rows)} prompts; training {len(train)}, validation {len(val)}")
    return train, val


def prompts_of_step(rows, size, seed, step):
    """(`size` rows for this step, counted from 1; the pass over all rows in which they begin).

    They come in an endless row of seeded permutations, so that a small file repeats.
    """
    n, places = len(rows), range((step - 1) * size, step * size)
    passes = {place // n for place in places}
    order = {e: np.random.default_rng([seed, e]).permutation(n) for e in passes}
    return [rows[order[place // n][place % n]] for place in places], places[0] // n


# ---- answers and log-probs ----


def load_reference(args, run, policy):
    """The policy's start for the KL, or None without --beta: with LoRA the policy itself, whose
    adapter is switched off; else a frozen copy."""
    if not args.beta or args.lora_rank:
        return policy if args.beta else None
    reference = Policy(load_model(args.model, run.device, run.dtype), run.dtype)
    if args.fsdp:
        parallel.shard(reference)
    return reference


@torch.no_grad()
def draw(run, policy, reference, tokenizer, prompt_ids, seed):
    """(a `sampling.Rollout` of one answer to each prompt; its tensors `b`, with `ref_logps`, and of
    each answer `finished` (N,): ended by an end token, not cut)"""
    limits = run.args.max_new_tokens, run.args.temperature
    rollout = sample(policy, tokenizer, prompt_ids, 1, *limits, seed)
    b = rollout_tensors(rollout, pad_id(tokenizer), run.device)
    rescore(run, policy, b, run.args.temperature)
    b["ref_logps"] = reference_logps(run, reference, b)
    b["finished"] = torch.tensor(rollout.finished, device=run.device)
    return rollout, b


def rollout_tensors(rollout, pad, device):
    """{"ids", "attention_mask", "mask", "logps"}, each (N, T), of a `sampling.Rollout`."""
    rows = pad_rows(rollout.prompt_ids, rollout.answer_ids, pad)
    b = {key: x.to(device) for key, x in zip(ROWS, rows)}
    logps = torch.tensor([x for row in rollout.logps for x in row], device=device)
    b["logps"] = torch.zeros(b["ids"].shape, device=device).masked_scatter(b["mask"], logps)
    return b


def cut(b, part):
    """The rows `part` of a rollout's tensors, as wide as the longest of them."""
    longest = int(b["attention_mask"][part].sum(1).max())
    return {k: x[part, :longest] for k, x in b.items() if torch.is_tensor(x) and x.ndim == 2}


@torch.no_grad()
def teacher_forced(run, module, b, temperature, output=0):
    """(N, T): by forwards of a module, what it returns at place `output`: 0 are the log-probs of a
    policy, −1 the values of a critic. Each rank reads its share."""
    lengths, columns = b["attention_mask"].sum(1).tolist(), torch.zeros_like(b["logps"])
    for part in run.micro_batches(range(len(lengths)), lengths):
        mb = cut(b, part)
        column = module(*(mb[key] for key in ROWS), temperature)[output]
        columns[part, : column.shape[1]] = column
    parallel.add_up([columns])
    return columns


def reference_logps(run, reference, b):
    """(N, T) log π_ref of the actions, with the adapter of LoRA off; without a reference log π_old."""
    if not reference:
        return b["logps"]
    with adapter_off(reference):
        return teacher_forced(run, reference, b, run.args.temperature)


def rescore(run, policy, b, temperature):
    """In half precision, make `logps` those of `teacher_forced` and keep the sampler's.

    In fp32 the two are equal to 1e-6, and no forward is spent.
    """
    if run.dtype != torch.float32:
        b["sampler_logps"] = b["logps"]
        b["logps"] = teacher_forced(run, policy, b, temperature)


def preflight(run, policy, reference, tokenizer, b):
    """Log-probs of a rollout = a teacher-forced pass = the reference's (None: there is none); shows
    one answer with its actions marked."""
    flag = f"--model {run.args.model}"
    check_policy(policy, tokenizer, *(b[key] for key in ROWS), flag)
    logps = teacher_forced(run, policy, b, run.args.temperature)
    others = {
        "what is sampled and what is scored": b.get("sampler_logps", b["logps"]),
        "policy and reference": reference_logps(run, reference, b),
    }
    for name, other in others.items():
        gap = (logps - other)[b["mask"]].abs().mean().item()
        identity(f"gap between {name}", gap, 0, 1e-4, run.dtype, flag)
    print("preflight  log-probs are the model's, the sampler's and the reference's: ok")


# ---- metrics ----


class TokenMeans:
    """Means over the tokens of an update: summed over micro-batches and ranks, divided once."""

    def __init__(self):
        self.parts = []  # of each micro-batch: tokens, largest ratio, largest gap, {key: sum}

    def add(self, mask, gaps, ratio, **columns):
        """ratio, columns   (n, T) each, 0 outside the mask
        gaps                (n, T) |log π − log π of the sampler|, 0 after the first optimiser step
        """
        columns = {"ratio/mean": ratio, **columns}
        sums = {key: column.detach().float().sum().item() for key, column in columns.items()}
        self.parts.append((mask.sum().item(), ratio.max().item(), gaps.max().item(), sums))

    def row(self):
        """{key: mean}, "ratio/max" and "sample_gap"; nothing if no token was updated."""
        parts = parallel.gather(self.parts)
        if not parts:
            return {}
        tokens, ratios, gaps, sums = zip(*parts)
        means = {key: sum(x[key] for x in sums) / sum(tokens) for key in sums[0]}
        return means | {"ratio/max": max(ratios), "sample_gap": max(gaps)}


def length_row(lengths, is_cut, tokens):
    """The metrics of length/* and the counts of a rollout.

    lengths, is_cut   tokens of each answer; did it lack its end?
    tokens            of prompts and answers together
    """
    return {
        "length/mean": fmean(lengths), "length/min": min(lengths),
        "length/max": max(lengths), "length/truncated_frac": fmean(is_cut),
        "tokens": tokens, "answer_tokens": sum(lengths), "episodes": len(lengths),
    }  # fmt: skip


def val_row(lengths, is_cut):
    """The counts of an evaluation; lengths, is_cut: as for `length_row`."""
    return {"val/n": len(lengths), "val/length": fmean(lengths), "val/cut": fmean(is_cut)}


def greedy_samples(policy, tokenizer, prompt_ids, max_new_tokens):
    """Rows of samples.jsonl: greedy answers, what a user would see, to the first two prompts."""
    rollout = sample(policy, tokenizer, prompt_ids[:2], 1, max_new_tokens, temperature=0)
    texts = tokenizer.batch_decode(rollout.prompt_ids)
    return [{"prompt": p, "answer": a} for p, a in zip(texts, rollout.texts)]


# ---- validation: which weights are written, and when the run ends ----


def trained_state(policy):
    """{name: whole tensor on the CPU} of the trained weights, a copy; on rank 0 alone."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    return copy.deepcopy(get_model_state_dict(policy, options=options))


def load_trained_state(policy, state):
    """Put back what `trained_state` returned; rank 0 sends it to the others."""
    several = parallel.world() > 1
    options = StateDictOptions(full_state_dict=True, strict=False, broadcast_from_rank0=several)
    set_model_state_dict(policy, state, options=options)


def go_on(run):
    """A resumed run that had ended goes on where it may do more: --steps, --target, --judge-budget."""
    now, was = vars(run.args), (run.old or {}).get("args", {})
    if any(now.get(key) != was.get(key) for key in runs.GOES_ON):
        run.state["ended"] = None


class Guard:
    """Connects a run to the alarms of watch.py: prints them, keeps the weights that validate best,
    and ends the run when a rule says so. Both lie in `run.state`, so a resumed run goes on alike.

    n   validation rows; with fewer than LEAST_VALIDATION the last weights are written
    """

    def __init__(self, run, n):
        self.run = run
        go_on(run)
        run.state.setdefault("best", None)  # {"step", "weights"}; weights on rank 0 alone
        default = "best" if n >= LEAST_VALIDATION else "last"
        self.restore = run.args.restore or default if n else "last"
        print(f"validation {n} rows; the {self.restore} weights are saved (--restore)")
        print(f"watch      {watch.promise(run.args, n > 0)}")

    def log(self, row):
        """One row of metrics.jsonl; in step 1 with a hint where many answers are cut."""
        self.run.log(row)
        if self.run.step == 1 and row["length/truncated_frac"] > MANY_CUT:
            share = f"{row['length/truncated_frac']:.0%} of the answers"
            parallel.say(f"step 1: {share} were cut; raise --max-new-tokens")

    def evaluation(self, metrics, samples):
        """Log an evaluation; keep a copy of the weights if it is the best so far."""
        run = self.run
        run.evaluation(metrics, samples)
        best_step = parallel.gather([watch.best_step(run.rows())])[0]  # rank 0 has written the rows
        if self.restore == "best" and best_step == run.step:
            run.state["best"] = {"step": run.step, "weights": trained_state(run.policy)}

    def end_step(self):
        """Print this step's alarms; end the run if a rule says so, or if a step as dear as the
        dearest of the last three rows would exceed --judge-budget. To be asked when all rows of the
        step are in."""
        run = self.run
        rows, budget = run.rows(), vars(run.args).get("judge_budget")
        for alarm in watch.alarms(rows, run.args):
            if alarm.step == run.step:
                parallel.say(str(alarm))
        usd = [row["judge/usd"] for row in rows if row.get("judge/usd")]
        reason = watch.stop_reason(rows, run.args)
        if budget and sum(usd) + max(usd[-3:], default=0) > budget:
            reason = reason or "judge_budget"
        run.state["ended"] = parallel.gather([reason])[0]  # rank 0 has written the rows

    def finish(self, next):
        """Put back the best weights, say which they are, and write the model: `Run.finish`. The
        exit status is watch's if a rule ended the run."""
        run, best, ended = self.run, self.run.state["best"], self.run.state.get("ended")
        step = run.step
        if best and not run.unfinished():
            load_trained_state(run.policy, best["weights"])
            step = best["step"]
            start = ": no step improved on the start" * (step == 0)
            print(f"saved are the weights of step {step}, the best on validation{start}")
        if ended:
            print(f"stopped after step {run.step}: {ended}")
        return run.finish(next, step) or watch.exit_code(ended)
