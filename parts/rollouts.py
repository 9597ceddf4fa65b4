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

import sys

import torch
from tqdm import tqdm

from common import pad_rows, token_logps
from parts import parallel, runs


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
    said = "largest gap between the rollout's log-probs and teacher forcing"
    wrong = f"{flag}: what is scored is not what was sampled"
    runs.identity(said, gap, 0.0, runs.rounding(model), wrong)
    runs.show_row(tokenizer, rows, "first answer", "· given   ▮ action   ◆ the last action")
    return logps


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
        run, ended = self.run, self.run.state["ended"]
        if run.stopped:
            return run.finish(next)
        step = self.restore(restore)
        if restore == "best":
            print(f"weights of step {step}, the best validation")
        if ended:
            print(f"stopped by watch.py after step {run.step}: {ended}")
        status = run.finish(next)
        if step == 0:
            bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
            print(f"{bold}no improvement on validation: this is the starting model{plain}")
        return status
