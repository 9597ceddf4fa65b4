"""parts/guard.py: validation during an RL run: which weights it chooses, and when it ends the run.

`Guard` connects a run to the alarms of watch.py: it prints them, keeps the weights that validate
best, and ends the run when a rule says so. Best weights and the reason lie in `run.state`, so a
resumed run restores the same weights, and a run that an alarm ended does not train on.
"""

from parts import parallel
from parts.files import write_json
from parts.runs import MANY_CUT

LEAST_VALIDATION = 8  # answers; fewer are no ground to choose weights by


def add_restore_argument(parser):
    text = f"best by validation (default, of {LEAST_VALIDATION} or more) or last"
    parser.add_argument("--restore", choices=("best", "last"), help=f"weights written: {text}")


def weights_to_write(restore, n, unit):
    """The value of --restore, printed; restore: the user's, or None; n: validation answers.

    >>> weights_to_write(None, 3, "prompts")
    validation 3 prompts, too few (under 8) to choose weights by: the last are written (--restore)
    'last'
    >>> weights_to_write("best", 0, "prompts")
    validation no prompts are held out, so no weights validate best: the last are written
    'last'
    """
    if not n:
        none = f"no {unit} are held out, so no weights validate best"
        print(f"validation {none}: the last are written")
        return "last"
    few = f", too few (under {LEAST_VALIDATION}) to choose weights by" * (n < LEAST_VALIDATION)
    restore = restore or ("last" if few else "best")
    print(f"validation {n} {unit}{few}: the {restore} are written (--restore)")
    return restore


def write_summary(run, step, results, paid=None):
    """summary.json: how the run ended, and `results`, {name: row}; step: of the weights.

    paid: what a judge cost in the final test, a last row of metrics.jsonl
    """
    if not parallel.rank():
        reason = run.state["ended"] or "max_steps"
        head = {"step": step, "last_step": run.step, "stop_reason": reason}
        write_json(run.out / "summary.json", head | results)
        if run.wandb:
            run.wandb.summary.update(head | results)
        # it is there where a finished run resumes
        if paid and not any("test/n" in row for row in run.rows()[-1:]):
            run.write("metrics.jsonl", [{"step": run.step} | paid])


class Guard:
    """The alarms over a run. watcher: a `watch.Watcher` that has read `run.rows()`."""

    def __init__(self, run, watcher, unit="answers"):
        self.run, self.watcher, self.unit, self.step = run, watcher, unit, None
        run.state.setdefault("best", None)  # {"step", "weights"} of the best validation
        run.state.setdefault("ended", None)  # the reason, once a rule has ended the run

    def log(self, row):
        """One row of metrics.jsonl; what it sets off is printed above the bar."""
        self.run.log(row)
        cut = row["length/truncated_frac"]
        if self.run.step == 1 and cut:
            limit = f"--max-new-tokens {self.run.args.max_new_tokens}"
            text = f"step 1: {cut:.0%} of {row['episodes']} {self.unit} were cut at {limit}"
            parallel.say(text + "; raise it" * (cut > MANY_CUT))
        self._see(row)

    def evaluation(self, metrics, samples):
        """Log an evaluation; keep a copy of the weights if it is the best so far."""
        run, best = self.run, self.run.state["best"]
        run.evaluation(metrics, samples)
        self._see(metrics)
        if run.args.restore == "best" and self.watcher.best_step() == run.step:
            weights = parallel.trained_weights(run.model).items()
            whole = ((name, parallel.whole(weight.detach())) for name, weight in weights)
            if best:  # into the copy there is: a second one would not fit everywhere
                best["step"] = run.step
                for name, weight in whole:
                    best["weights"][name].copy_(weight)
            else:
                copy = {name: weight.to("cpu", copy=True) for name, weight in whole}
                run.state["best"] = {"step": run.step, "weights": copy}

    def _see(self, row):
        for event in self.watcher.add({"step": self.run.step, **row}):
            if not parallel.rank():
                parallel.say(str(event))

    def end_step(self):
        """End the run if a rule says so; to be asked when all rows of the step are in."""
        reason = parallel.from_rank_0(self.watcher.stop_reason())
        self.run.state["ended"] = None if reason == "max_steps" else reason

    def save(self):
        """At the end, before the test set: write the weights of the best validation, or the last.

        Returns their step.
        """
        run, best = self.run, self.run.state["best"]
        self.step = run.step
        if best:
            parallel.load_weights(run.model, best["weights"])
            self.step = best["step"]
        run.save()
        return self.step

    def finish(self, next):
        """`Run.finish`, after `save` unless the run was stopped; says which weights are written."""
        run = self.run
        if run.stopped:
            return run.finish(next)
        if 0 < self.step < run.step:
            print(f"weights of step {self.step}, the best validation")
        if run.state["ended"]:
            print(f"stopped by watch.py after step {run.step}: {run.state['ended']}")
        status = run.finish(next, self.step)
        if self.step == 0:
            print("no improvement on validation: this is the starting model")
        return status
