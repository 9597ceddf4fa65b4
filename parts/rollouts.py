"""parts/rollouts.py: what the three RL trainers share around a rollout.

A rollout is a dict `b` of (N, T) tensors, one row per answer, prompt and answer right-padded:

position     0      1      2      3      4      5
token        p0     p1     p2     a0     a1     end
mask                              ✓      ✓      ✓       the actions: what the policy chose
logps                             of a0  of a1  of end  at the sampling temperature, 0 elsewhere

`Guard` connects a run to the alarms of watch.py: it prints them, keeps the weights that validate
best, and ends the run when a rule says so. Best weights and the reason lie in `run.state`, so a
resumed run restores the same weights, and a run that an alarm ended does not train on.
"""

import torch
from tqdm import tqdm

import common
from common import pad_rows, token_logps
from parts import parallel, runs
from parts.files import UserError
from parts.lora import adapter_off
from parts.stats import mean

IMPORTANCE_MAX = 2.0  # a token's largest weight, policy / sampler, in `policy_logps`


def rollout_tensors(drawn, pad_id, device):
    """{"ids", "attention_mask", "mask", "logps"}, each (N, T), of a `common.Rollout`."""
    rows = pad_rows(drawn.prompt_ids, drawn.response_ids, pad_id)
    ids, attention_mask, mask = (x.to(device) for x in rows)
    flat = torch.tensor([x for row in drawn.logps for x in row], device=device)
    logps = torch.zeros(ids.shape, device=device).masked_scatter(mask, flat)
    return {"ids": ids, "attention_mask": attention_mask, "mask": mask, "logps": logps}


@torch.no_grad()
def preflight(model, tokenizer, b, temperature, flag):
    """Log-probs of the rollout = a teacher-forced pass; one answer, marked. Returns that pass."""
    rows = b["ids"], b["attention_mask"], b["mask"]
    runs.check_head(model, *rows, flag)
    logps = token_logps(model, *rows, temperature)
    gap = (logps - b["logps"]).abs().max().item()
    runs.identity(
        "largest gap between the rollout's log-probs and teacher forcing", gap, 0.0,
        runs.rounding(model), f"{flag}: what is scored is not what was sampled",
    )  # fmt: skip
    runs.show_row(tokenizer, rows, "first answer", "· given   ▮ action   ◆ the last action")
    return logps


def load_models(args, run):
    """(policy, reference, tokenizer): the reference is a frozen copy of the start, with LoRA the
    policy with its adapter off, without --beta None; with --teacher it is the teacher."""
    tokenizer = common.load_tokenizer(args.model)
    policy = common.load_policy(args.model, run.dtype, run.device, lora_rank=args.lora_rank)
    teacher, reference = getattr(args, "teacher", None), policy if args.beta else None
    if args.beta and (teacher or not args.lora_rank):
        frozen = teacher or args.model
        reference = common.load_policy(frozen, run.dtype, run.device, False, flag="--teacher")
    if teacher and common.load_tokenizer(teacher).get_vocab() != tokenizer.get_vocab():
        raise UserError(f"--teacher {teacher}: its tokens are not those of --model {args.model}")
    return policy, reference, tokenizer


def policy_logps(args, policy, reference, b):
    """(logps, old_logps, ref_logps, weights, sums for the log, gap) of some rows of a rollout.

    logps       (n, T) of the policy, with gradient
    old_logps   (n, T) of the draw; with one update per rollout they are the policy's own, which
                leaves out the rounding of the sampler
    ref_logps   (n, T) of the reference; None without --beta
    weights     (n, T) min(π_old/π_sampler, 2): 1 to rounding in fp32, further off in bf16; the
                advantage times it corrects for a sampler that is not quite the policy; 1 where
                the mask is 0, and with several updates per rollout, where π_old is the sampler
                [Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL]
    gap         the largest difference between the policy and the draw
    """
    rows = b["ids"], b["attention_mask"], b["mask"], args.temperature
    logps, entropies = token_logps(policy, *rows, with_entropy=True)
    gap = (logps.detach() - b["logps"]).abs().max().item()
    old_logps = logps.detach() if args.num_substeps == 1 else b["logps"]
    weights = (old_logps.detach() - b["logps"]).exp().clamp(max=IMPORTANCE_MAX)  # (n, T)
    ref_logps = None
    if args.beta:
        with torch.no_grad(), adapter_off(reference):
            ref_logps = token_logps(reference, *rows)
    sums = {"entropy": entropies.sum().item(), "tokens": int(b["mask"].sum())}
    sums["capped"] = (weights == IMPORTANCE_MAX).sum().item()
    return logps, old_logps, ref_logps, weights, sums, gap


def length_row(b, finished):
    """The metrics of length/* and the counts of a rollout; finished: one bool per answer."""
    lengths = b["mask"].sum(1).float()  # (N,)
    return {
        "length/mean": lengths.mean().item(),
        "length/min": lengths.min().item(),
        "length/max": lengths.max().item(),
        "length/truncated_frac": 1 - sum(finished) / len(finished),
        "tokens": int(b["attention_mask"].sum()),
        "answer_tokens": int(b["mask"].sum()),
        "episodes": len(finished),
    }


def group_row(rewards_PG, advantages_PG, lengths, middle=0.5):
    """The metrics of reward/*, groups/* and advantage/*; lengths: tokens of the N answers.

    NaN is no reward. A share is over the groups with two rewards at least; a group of equals is
    good from `middle` on.
    >>> rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    >>> row = group_row(rewards, torch.tensor([[0.5, -0.5], [0.0, 0.0]]), [9, 3, 5, 5])
    >>> row["reward/mean"], row["reward/frac_mixed"], row["reward/frac_all_bad"]
    (0.25, 0.5, 0.5)
    """
    scored_PG = ~rewards_PG.isnan()
    found, comparable = rewards_PG[scored_PG], scored_PG.sum(dim=1) > 1  # (P,)
    mixed, good = (advantages_PG != 0).any(dim=1), rewards_PG.nanmean(dim=1) >= middle  # (P,)
    lengths_PG, correlations = torch.tensor(lengths).float().view_as(rewards_PG), []
    for rewards, tokens, scored in zip(rewards_PG, lengths_PG, scored_PG, strict=True):
        pair = torch.stack([rewards[scored], tokens[scored]])  # (2, answers)
        if len(pair[0]) > 1 and pair.std(dim=1).min() > 1e-6:
            correlations.append(torch.corrcoef(pair)[0, 1].item())
    return {
        "reward/mean": mean(found.tolist()),
        "reward/std": found.std().item() if len(found) > 1 else None,
        "reward/unscored_frac": 1 - len(found) / scored_PG.numel(),
        "reward/frac_mixed": mean(mixed[comparable].tolist()),
        "reward/frac_all_good": mean((~mixed & good)[comparable].tolist()),
        "reward/frac_all_bad": mean((~mixed & ~good)[comparable].tolist()),
        "reward/length_corr": mean(correlations),
        "groups/scored": int(comparable.sum()),
        "groups/skipped": int((~mixed).sum()),
        "advantage/abs_mean": advantages_PG.abs().mean().item(),
    }


def update_row(run, beta, done, sums, largest, gap):
    """The metrics of an update; what was not updated has no number.

    done       what `Run.update` returned, for each optimiser step
    sums       a Counter over this rank's tokens and answers: see grpo_rubric.py's `token_losses`
    largest    the largest ratio;  gap: the largest between rollout and first optimiser step
    """
    means = {
        "clip_frac": "clipped", "ratio/mean": "ratio", "approx_kl": "approx_kl",
        "importance_capped_frac": "capped", "entropy": "entropy", "kl/token": "k1", "kl/k3": "k3",
    }  # fmt: skip
    answers, tokens, *totals = parallel.all_sum(
        sums["answers"], sums["tokens"], *(sums[name] for name in means.values())
    )
    row = {key: total / max(1, tokens) for key, total in zip(means, totals)}
    row["kl/ref"] = row["kl/token"] * tokens / max(1, answers)
    row["ratio/max"], row["sample_gap"] = parallel.all_max(largest, gap)
    row = {k: x if done and (beta or "kl/" not in k) else None for k, x in row.items()}
    return row | {
        "loss": mean(each["loss"] for each in done),
        "grad_norm": mean(each["grad_norm"] for each in done),
        "lr": run.optimizer.param_groups[0]["lr"],
        "skipped_steps": sum(each["skipped_steps"] for each in done),
        "updates": len(done),
        "forwarded": int(answers),
        "kl/coef": beta,
    }


class Guard:
    """The alarms over a run. watcher: a `watch.Watcher` that has read `run.rows()`."""

    def __init__(self, run, watcher):
        self.run, self.watcher = run, watcher
        run.state.setdefault("best", None)  # {"step", "weights"} of the best validation
        run.state.setdefault("ended", None)  # the reason, once a rule has ended the run

    def log(self, row):
        """One row of metrics.jsonl; what it sets off is printed above the bar."""
        self.run.log(row)
        self._see(row)

    def evaluation(self, metrics, samples):
        """Log an evaluation; keep a copy of the weights if it is the best so far."""
        self.run.evaluation(metrics, samples)
        self._see(metrics)
        if self.watcher.best_step() == self.run.step:
            weights = parallel.trained_weights(self.run.model).items()
            copy = {name: parallel.whole(w.detach()).cpu().clone() for name, w in weights}
            self.run.state["best"] = {"step": self.run.step, "weights": copy}

    def _see(self, row):
        for event in self.watcher.add({"step": self.run.step, **row}):
            if not parallel.rank():
                tqdm.write(str(event))

    def end_step(self):
        """End the run if a rule says so; to be asked when all rows of the step are in."""
        reason = parallel.from_rank_0(self.watcher.stop_reason())
        self.run.state["ended"] = None if reason == "max_steps" else reason

    def restore(self, which):
        """Load the weights of the best validation, unless `which` is "last"; returns their step."""
        best = self.run.state["best"]
        if not best or which == "last":
            return self.run.step
        parallel.load_weights(self.run.model, best["weights"])
        return best["step"]

    def finish(self, restore, next):
        """`Run.finish` with the weights of the best validation, unless restore is "last"."""
        run = self.run
        if run.stopped:
            return run.finish(next)
        step = self.restore(restore)
        if step < run.step:
            print(f"weights of step {step}, the best validation")
        if run.state["ended"]:
            print(f"stopped by watch.py after step {run.step}: {run.state['ended']}")
        status = run.finish(next, step)
        if step == 0:
            print("no improvement on validation: this is the starting model")
        return status
