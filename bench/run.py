"""bench/run.py: the same work by this project and by TRL, as whole processes in alternation, and the ratios of the two.

    python bench/run.py dpo                       TRL computes its reference on the fly; --precompute: before training
    python bench/run.py reward | sft | grpo       one trainer each
    python bench/run.py rollout                   common.sample against model.generate; --full: hardly an answer ends early
    python bench/run.py data                      100 000 pairs read, encoded, stored
    python bench/run.py ppo --peer-path FOLDER    against TRL 1.12, the last release that had it: pip install --no-deps
                                                  --target FOLDER trl==1.12.0
    python bench/run.py dpo --edition FOLDER      reward, sft, ppo, grpo, rollout too: not TRL but another commit of this project, in
                                                  a worktree: git worktree add FOLDER COMMIT
    python bench/run.py scaling                   ours alone: cost and memory over rows, answer length, model size
    python bench/run.py memory                    ours alone: peak memory with 10 000 to 200 000 pairs
    python bench/run.py dpo --threads 1 --core 1 --pairs 128 --rounds 3    on a busy machine: CPU seconds of one thread

Opponents    plain: the optimiser batch is the device batch, all else TRL's default (gradient checkpointing is on there)
             tuned: the fastest of TRL's exact settings, found here first by short runs (`candidates`)
Order        plain ours tuned, tuned ours plain, …: every run of ours stands between the two it is compared with
Ratio        of neighbours; printed is the median [smallest, largest]. Time is TRL / ours, memory ours / TRL
Edition      both run from their own folder by command line (`python dpo.py …`; rollout: bench/ours.py), with the same flags;
             a flag that an edition's --help does not know is not passed to it. Time and memory are ours / theirs
Time         wall seconds, or CPU seconds when others used more than half a core meanwhile: then wall time means nothing
Refused      no ratio at all when the two did not do the same work (`differs`)
Writes       reports/bench/TASK.jsonl, one run a line, and TASK.md
"""

import argparse
import datetime
import functools
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from work import REPO, SAMPLERS, STAGES, pair_flags, row_lengths, sampler_flags, weight_norm

BUSY = 0.5  # cores that others may use before wall time is no longer believed

TASKS = ("dpo", "reward", "sft", "grpo", "ppo", "rollout", "data", "scaling", "memory")
PAIRS_TASKS = tuple(STAGES)
ALONE = ("scaling", "memory")  # no peer


class Refused(SystemExit):
    """The two did not do the same work: there is nothing to compare."""


# ---- did both do the same? ----


def differs(task, ours, theirs):
    """Why these two runs must not be compared, or None.

    dpo, reward, sft  the loss of every step within 1e-4, the norm of the final weights within 1e-5 relative
    grpo, ppo         tokens generated within 3 %; for ppo the same number of updates
    replay            (grpo's one recorded rollout) loss within 1e-4, gradient norm within 1e-4 relative
    data              the same number of tokens
    """

    def off(a, b, bound, what):
        gap = abs(a / b - 1)
        return None if gap <= bound else f"{what}: {a:g} against {b:g} ({gap:.2g} off, {bound:g} allowed)"  # fmt: skip

    if task in (*PAIRS_TASKS, "replay"):
        a, b = ours["losses"], theirs["losses"]
        if len(a) != len(b) or not a:
            return f"{len(a)} steps against {len(b)}"
        gaps = [abs(x - y) if math.isfinite(x - y) else math.inf for x, y in zip(a, b)]
        gap = max(gaps)
        if gap > 1e-4:
            return f"the losses of step {gaps.index(gap) + 1} differ by {gap:.2g} (1e-4 allowed)"
        if task == "replay":
            return off(ours["grad_norms"][0], theirs["grad_norms"][0], 1e-4, "the gradient norms")
        return off(ours["weight_norm"], theirs["weight_norm"], 1e-5, "the norms of the final weights")  # fmt: skip
    if task == "ppo" and ours["updates"] != theirs["updates"]:
        return f"{ours['updates']} updates against {theirs['updates']}"
    if task in ("grpo", "ppo", "data"):
        return off(ours["tokens"], theirs["tokens"], 0 if task == "data" else 0.03, "tokens")
    return None


def chi_square(a, b):
    """p of the hypothesis that two lists of counts come from one distribution; bins below 5 expected are joined."""
    import torch

    share, bins, spare = sum(a) / (sum(a) + sum(b)), [], (0, 0)
    for x, y in zip(a, b, strict=True):
        spare = spare[0] + x, spare[1] + y
        if sum(spare) * min(share, 1 - share) >= 5:
            bins.append(spare)
            spare = 0, 0
    if sum(spare) and bins:
        bins[-1] = bins[-1][0] + spare[0], bins[-1][1] + spare[1]
    if len(bins) < 2:
        return 1.0  # all in one bin: answers of equal length, say
    statistic = 0.0
    for x, y in bins:
        for seen, expected in ((x, (x + y) * share), (y, (x + y) * (1 - share))):
            statistic += (seen - expected) ** 2 / expected
    half = torch.tensor([(len(bins) - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(*half).item()


def same_distribution(
    ours, theirs, vocabulary=4096, groups=64, edges=(4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 255)
):
    """(p of token frequencies in groups of ids, p of lengths) for two lists of answers; Refused below .001."""
    tokens, lengths = [], []
    for answers in (ours, theirs):
        places = np.concatenate(answers) * groups // vocabulary, np.searchsorted(edges, [*map(len, answers)])  # fmt: skip
        tokens.append(np.bincount(places[0], minlength=groups).tolist())
        lengths.append(np.bincount(places[1], minlength=len(edges) + 1).tolist())
    p = chi_square(*tokens), chi_square(*lengths)
    if min(p) < 0.001:
        raise Refused(
            f"the two do not draw from one distribution: p = {p[0]:.2g} (tokens), {p[1]:.2g} (lengths); no ratio"
        )
    return p


# ---- one process ----


def busy_seconds():
    """CPU seconds that all processes of the machine have used, or None where there is no /proc."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, soft, *_ = map(int, file.readline().split()[1:])
    except OSError:
        return None
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def run_child(args, words, root=REPO, result=None):
    """One fresh process, `python WORDS` in the folder root: wall and CPU seconds, peak memory, the load of others, and what
    it left in the file `result`."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }  # fmt: skip
    if result:  # of TRL's datasets: a cold cache for every run
        environment["HF_DATASETS_CACHE"] = str(result.parent / "datasets")
    if "peer_trl.py" in words[0] and args.peer_path:
        environment["PYTHONPATH"] = str(Path(args.peer_path).resolve())
    pin = (lambda: os.sched_setaffinity(0, {args.core})) if args.core is not None else None
    with tempfile.TemporaryFile("w+") as log:
        before, start = busy_seconds(), time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *words], stdout=log, stderr=log, env=environment, cwd=root, preexec_fn=pin
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        wall, after = time.perf_counter() - start, busy_seconds()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            log.seek(0)
            raise SystemExit(f"{' '.join(words)[:300]} failed:\n{log.read()[-3000:]}")
    cpu = usage.ru_utime + usage.ru_stime
    others = None if before is None else max(0.0, (after - before - cpu) / wall)
    # exact while this process weighs less than the child: it hands its own peak on
    peak = usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    row = {"wall_s": wall, "cpu_s": cpu, "others_cores": others, "peak_mb": peak}
    return row | (json.loads(result.read_text()) if result and result.exists() else {})


@functools.cache
def known_flags(root, script):
    """The flags that the --help of a stage names."""
    command = [sys.executable, script, "--help"]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return set(re.findall(r"--[a-z-]+", found.stdout))


def command_line(args, side, s):
    """(words after `python`, folder to run in) for one run of a side with the settings s."""
    root = Path(args.edition).resolve() if side == "edition" else REPO
    stage = {**STAGES, **SAMPLERS}.get(s["task"])
    if not args.edition or not stage:
        script = "ours.py" if side in ("ours", "edition") else "peer_trl.py"
        return [f"bench/{script}", json.dumps(s)], root
    script = f"{stage}.py"
    flags = sampler_flags(**s) if s["task"] in SAMPLERS else pair_flags(**s)
    # the first edition keeps the reference's log-probs in a folder for all runs: here an empty one
    flags["--ref-cache"] = f"{s['out']}-cache"
    known = known_flags(root, script)
    return [script, *(str(w) for pair in flags.items() if pair[0] in known for w in pair)], root


def one_run(args, place, side, task, **settings):
    """`run_child` of one side in a folder of its own, repeated while the machine is busy, up to --repeats times."""
    if side in ("ours", "edition") and args.micro_tokens:
        settings["micro_tokens"] = args.micro_tokens
    for attempt in range(args.repeats + 1):
        # its parent holds the caches of this run
        out = Path(tempfile.mkdtemp(dir=place)) / "run"
        result = out.parent / "result.json"
        paths = {"folder": str(place), "out": str(out), "result": str(result)}
        words, root = command_line(args, side, {**settings, "task": task, "threads": args.threads, **paths})  # fmt: skip
        row = run_child(args, words, root, result)
        if (row["others_cores"] or 0) <= BUSY or attempt == args.repeats:
            break
    if task in PAIRS_TASKS:
        row["weight_norm"] = weight_norm(out)
    if args.edition and task in (*STAGES, *SAMPLERS):
        lines = map(json.loads, open(out / "metrics.jsonl", encoding="utf-8"))
        steps = [r for r in lines if "grad_norm" in r]
        row["losses"] = [r["loss"] for r in steps] if task in STAGES else None
        for key, name in (("tokens", "answer_tokens"), ("updates", "updates")):
            row[key] = sum(r.get(name, 0) for r in steps)
    if "import_mb" in row:
        row["net_mb"] = row["peak_mb"] - row["import_mb"]
    row = {"task": task, "side": side, "flags": settings.get("flags", {}), **row}
    loop = f"loop {row['loop_cpu_s']:.1f} CPU s, " if "loop_s" in row else ""
    print(f"  {side:<6} {row['flags'] or ''} wall {row['wall_s']:.1f} s, CPU {row['cpu_s']:.1f} s, {loop}"
          f"peak {row['peak_mb']:.0f} MiB, others {row['others_cores'] or 0:.1f} cores", flush=True)  # fmt: skip
    return row


def make_work(args, place, **more):
    settings = {"folder": str(place), "seed": 0, **more}
    run_child(args, ["bench/work.py", json.dumps(settings)])


# ---- a comparison ----


def candidates(task, base):
    """TRL's exact settings among which `tuned` is sought; batch_rebalance sorts inside the batch, exact for SFT alone."""
    off = {**base, "gradient_checkpointing": False}
    if task == "data":
        return []  # more processes would only hide what one costs
    if task == "rollout":
        return [{}, {"cache_implementation": "static"}]
    if task == "grpo":
        return [{**off, "device_batch": b} for b in (16, 8, 4)] + [
            {**off, "device_batch": 8, "cache_implementation": "static"}
        ]
    if task == "ppo":
        return [
            {**off, "device_batch": 16},
            {**off, "device_batch": 4},
            {**off, "device_batch": 4, "rollout_batch": 16},
        ]
    found = [{**off, "device_batch": b} for b in (16, 8, 4, 2, 1)]
    if task == "sft":
        found += [
            {**off, "device_batch": b, "train_sampling_strategy": "batch_rebalance"} for b in (4, 2)
        ]
    return found


def tune(args, place, task, base, **settings):
    """(flags of the fastest candidate, the runs): each runs a few steps; its training loop alone is looked at."""
    runs = []
    for flags in candidates(task, base):
        try:
            runs.append(
                one_run(
                    args,
                    place,
                    "tuning",
                    task,
                    **{**settings, "steps": args.tune_steps, "rounds": 1},
                    flags=flags,
                )
            )
        except SystemExit as error:  # a setting that does not run here is no candidate
            print(f"  {flags} does not run: {str(error).strip().splitlines()[-1][:150]}")
    if not runs:
        return None, []
    # rollouts differ in length by chance: their time counts per token
    best = min(runs, key=lambda r: r["loop_cpu_s"] / (r["tokens"] if task == "rollout" else 1))
    return best["flags"], runs


def seed_for(tokens, steps, new_tokens, end_share, answers=64):
    """The first seed with which our sampler will draw about as many tokens as the peer did; nobody looks at the time.

    Two runs of 192 answers differ by 8 % in tokens by chance alone. Our sampler spends one uniform number a token, and the
    end ids stand first in the vocabulary, so an answer of random weights ends at the first number below their share.
    """
    for seed in range(2000):
        total = 0
        for step in range(1, steps + 1):
            for i in range(answers):
                below = (
                    np.random.default_rng([seed * 10**6 + step, i]).random(new_tokens) < end_share
                )
                total += int(below.argmax()) + 1 if below.any() else new_tokens
        if abs(total / tokens - 1) < 0.01:
            return seed
    raise Refused(f"no seed gives {tokens} tokens in {steps} steps")


def compare(args, place, task, base=(), **settings):
    """Rounds of plain, ours, tuned in the order of the header, or of ours and another edition; all runs, refused as soon as
    two differ."""
    base, began, runs = dict(base), time.monotonic(), []
    sides = [("ours", None), ("edition", None)]
    if not args.edition:
        tuned, runs = (args.tuned, []) if args.tuned else tune(args, place, task, base, **settings)
        print(f"tuned: {tuned}", flush=True)
        sides = [("plain", base), ("ours", None), ("tuned", tuned)]
        sides = sides[:2] if tuned is None else sides
    for number in range(args.rounds):
        if number and args.minutes and time.monotonic() - began > 60 * args.minutes:
            break
        done = []
        for side, flags in sides if number % 2 == 0 else sides[::-1]:
            extra = {} if flags is None else {"flags": flags}
            if task == "rollout":
                extra["seed"] = 1000 * number
            if task == "grpo" and side == "ours" and not args.edition:
                extra["seed"] = seed_for(
                    done[-1]["tokens"], settings["steps"], settings["new_tokens"], 64 / 4096
                )
            row = {**one_run(args, place, side, task, **settings, **extra), "round": number}
            for other in done[-1:]:
                ours, theirs = (row, other) if side == "ours" else (other, row)
                # two editions draw the same answers, but for rounding
                same = "grpo" if args.edition and task == "rollout" else task
                if why := differs(same, ours, theirs):
                    raise Refused(f"{task}, {theirs['side']} {theirs['flags']}: {why}; no ratio")
            done.append(row)
        runs += done
    return runs


def ratios(runs, key, opponent):
    """The ratio of `key` for each run of ours and its neighbour of that opponent: TRL / ours; memory, and another edition,
    ours / theirs."""
    found = []
    timed = [run for run in runs if run["side"] != "tuning"]
    for a, b in zip(timed, timed[1:]):
        if a["round"] == b["round"] and {a["side"], b["side"]} == {"ours", opponent}:
            ours, theirs = (a, b) if a["side"] == "ours" else (b, a)
            turned = key.endswith("_mb") or opponent == "edition"
            found.append(ours[key] / theirs[key] if turned else theirs[key] / ours[key])
    return found


def per_token(runs):
    """Rollouts differ in tokens by chance: their times become seconds a token."""
    times = ("wall_s", "cpu_s", "loop_s", "loop_cpu_s")
    return [
        {**run, **{key: run[key] / run["tokens"] for key in times if key in run}} for run in runs
    ]


def shown(values):
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def table(runs):
    """The lines of one comparison's table: which time it prints, and why."""
    timed = [run for run in runs if run["side"] != "tuning"]
    busiest = max(run["others_cores"] or 0 for run in timed)
    whole, loop = ("cpu_s", "loop_cpu_s") if busiest > BUSY else ("wall_s", "loop_s")
    why = (
        f"CPU seconds: other processes used up to {busiest:.1f} cores meanwhile, so wall time means nothing"
        if busiest > BUSY
        else f"wall seconds: other processes used at most {busiest:.1f} cores"
    )
    clock = loop if loop in timed[0] else whole  # a command line has one clock
    timed = [{**run, "rate": run["tokens"] / run[clock]} for run in timed]
    rows = per_token(timed) if runs[0]["task"] == "rollout" else timed
    columns = {"time, whole process": whole, "time, loop alone": loop, "peak memory": "peak_mb", "less what imports take": "net_mb"}  # fmt: skip
    columns = {head: key for head, key in columns.items() if key in timed[0]}
    both = {"time": (clock, "{:.1f} s"), "peak": ("peak_mb", "{:.0f} MiB"), "tokens a second": ("rate", "{:.0f}")}  # fmt: skip
    heads = ["opponent", *columns, *(f"{head}, ours and theirs" for head in both)]
    opponents = list(dict.fromkeys(run["side"] for run in timed if run["side"] != "ours"))
    n = len(ratios(rows, whole, opponents[0]))
    what = "ours / theirs" if "edition" in opponents else "TRL / ours, memory ours / TRL"
    lines = [
        f"Time is in {why}. Median [smallest, largest] of {n} ratio(s) of neighbours; time {what}.", "",
        f"| {' | '.join(heads)} |", "|---" * len(heads) + "|",
    ]  # fmt: skip
    for opponent in opponents:
        flags = next(run["flags"] for run in timed if run["side"] == opponent)
        cells = [shown(ratios(rows, key, opponent)) for key in columns.values()]
        for key, form in both.values():
            pair = [statistics.median(r[key] for r in timed if r["side"] == side) for side in ("ours", opponent)]  # fmt: skip
            cells.append(" / ".join(map(form.format, pair)))
        lines.append(f"| {opponent} {json.dumps(flags) if flags else ''} | {' | '.join(cells)} |")
    tried = [f"{json.dumps(r['flags'])} {r['loop_cpu_s']:.1f} s, {r['peak_mb']:.0f} MiB" for r in runs if r["side"] == "tuning"]  # fmt: skip
    if not tried:
        return lines
    return [*lines, "", f"Tried for `tuned` (CPU seconds of the loop, peak): {'; '.join(tried)}."]


def describe(args, runs, work):
    """What a reader needs to repeat the runs, and to know what they were made on."""
    # for ppo not the installed one, for scaling none
    trl = [f"trl {v}" for v in sorted({run["trl"] for run in runs if "trl" in run})]
    try:
        names = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":")[1].strip() for line in names if line.startswith("model name"))  # fmt: skip
    except (OSError, StopIteration):
        processor = platform.processor() or platform.machine()
    versions = [f"{name} {version(name)}" for name in ("torch", "transformers", "datasets") if found(name)]  # fmt: skip
    return {
        "command": shown_command(sys.argv[1:]), "date": datetime.date.today().isoformat(), "processor": processor,
        "cores": os.cpu_count(), "threads": args.threads, "core": args.core, "work": work,
        "versions": ", ".join([f"Python {platform.python_version()}", *versions, *trl]),
    }  # fmt: skip


def shown_command(words):
    """The command without folders of this machine.

    >>> shown_command(["ppo", "--peer-path", "/home/me/trl", "--out", "/tmp/x", "--steps", "1"])
    'python bench/run.py ppo --peer-path FOLDER --steps 1'
    """
    shown = [
        ("FOLDER" if before in ("--peer-path", "--edition") else word)
        for before, word in zip(["", *words], words)
    ]
    at = shown.index("--out") if "--out" in shown else len(shown)
    return " ".join(["python bench/run.py", *map(shlex.quote, shown[:at] + shown[at + 2 :])])


def found(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write(args, name, runs, header, lines):
    """NAME.jsonl, the header and then one run a line, and NAME.md."""
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    kept = [{k: v for k, v in run.items() if k != "answers"} for run in runs]
    rows = [json.dumps(row) + "\n" for row in ({"header": header}, *kept)]
    (out / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    pinned = "" if header["core"] is None else f" on core {header['core']}"
    made = f"{header['date']}, {header['processor']}, {header['cores']} cores, {header['threads']} thread(s){pinned}; "
    top = [f"# {name}", "", f"`{header['command']}`", "", f"{made}{header['versions']}; {header['work']}.", ""]  # fmt: skip
    text = "\n".join([*top, *lines]) + "\n"
    (out / f"{name}.md").write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {out / name}.jsonl and {name}.md")


# ---- scaling ----


def line_fit(x, y):
    """The line y ≈ a + b·x whose relative errors are least squares: (a, b, largest residual as a share of the fit).

    Relative, for so is the noise of a clock, and so is the residual that is printed: a fit of seconds would let the longest
    run alone say where the line lies.

    >>> [round(float(v), 3) for v in line_fit([1, 2, 3], [3.0, 5.0, 7.0])]
    [1.0, 2.0, 0.0]
    """
    slope, start = np.polyfit(x, y, 1, w=1 / np.array(y))
    fitted = start + slope * np.array(x)
    return start, slope, max(abs(y / fitted - 1))


def growth(args, place):
    """DPO of ours alone, --rounds runs a point: over rows, answer length and hidden size, the other two held; or, for peak
    memory, four steps on 10 000 pairs and on a file that holds them 20 times.

    A small model, in which attention (quadratic in a row's length) weighs more than in any that is used: the hard case.
    SimPO for memory: it has no reference that would pass over all pairs, so what grows is what is kept of a row.
    """
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 160}
    plan = [("rows", n, dict(n=n, prompt=64, response=32, **small)) for n in (512, 1024, 2048, 4096)]  # fmt: skip
    plan += [("answer tokens", r, dict(n=256, prompt=64, response=r, **small)) for r in (32, 64, 128, 256)]  # fmt: skip
    plan += [("hidden size", h, dict(n=64, hidden_size=h, intermediate_size=h * 5 // 2)) for h in (64, 128, 256)]  # fmt: skip
    more = {}
    if args.task == "memory":
        plan = [("pairs", 10_000 * c, dict(n=10_000, copies=c, **small)) for c in (1, 20)]
        more = {"steps": 4, "loss_type": "simpo"}
    folders, runs, tokenizer = [], [], None
    for _, _, work in plan:
        folders.append(Path(tempfile.mkdtemp(dir=place)))
        # one batch of all rows: the order in which a peer would read them is not asked for
        make_work(args, folders[-1], batch=work["n"], tokenizer=tokenizer, **work)
        tokenizer = str(folders[0] / "model")  # the first one serves all
    for number in range(args.rounds):
        for folder, (name, x, _) in zip(folders, plan):
            run = one_run(args, folder, "ours", "dpo", batch=args.batch, **more)
            runs.append({**run, "over": name, "x": x, "round": number})
    return runs, f"DPO {more or ''}, batch {args.batch}; 2 layers of 64, prompts of 64 tokens; over hidden size: 6 layers", ""  # fmt: skip


def scaling_table(runs):
    lines = [
        "Median [smallest, largest] of the runs of a point, a number alone is one run; the line is fitted to the medians.", "",
        "| over | value | loop, CPU s | a line would say | whole process, CPU s | peak, MiB |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name in dict.fromkeys(run["over"] for run in runs):
        at = {run["x"]: [r for r in runs if (r["over"], r["x"]) == (name, run["x"])] for run in runs if run["over"] == name}  # fmt: skip
        linear = name in ("rows", "answer tokens")
        if linear:
            loops = [statistics.median(r["loop_cpu_s"] for r in point) for point in at.values()]
            a, b, residual = line_fit(list(at), loops)
        for x, point in at.items():
            loop, whole = (
                shown([r[key] for r in point]) if len(point) > 1 else f"{point[0][key]:.2f}"
                for key in ("loop_cpu_s", "cpu_s")
            )
            peak = max(r["peak_mb"] for r in point)
            lines.append(f"| {name} | {x} | {loop} | {f'{a + b * x:.1f}' if linear else ''} | {whole} | {peak:.0f} |")  # fmt: skip
        peaks = [run["peak_mb"] for run in runs if run["over"] == name]
        verdict = f"largest residual {100 * residual:.1f} %" if linear else "no line expected"
        lines.append(f"| **{name}** | | | {verdict} | | {min(peaks):.0f} to {max(peaks):.0f} |")
    return lines


# ---- the tasks: (runs, what was worked on, a note for the table) ----


def pairs_task(args, place):
    base = {"precompute_ref_log_probs": True} if args.precompute else {}
    runs = compare(args, place, args.task, base, batch=args.batch)
    timed = [run for run in runs if run["side"] != "tuning"]
    gaps = [abs(a - b) for run in timed for a, b in zip(run["losses"], timed[0]["losses"])]

    lengths = [row_lengths(i, 0) for i in range(args.pairs)]
    for run in timed:  # real tokens, no padding; a pair's prompt counts with each of its answers
        run["tokens"] = sum(a + b + (a + c) * (args.task != "sft") for a, b, c in lengths)
    norms = [abs(run["weight_norm"] / timed[0]["weight_norm"] - 1) for run in timed]
    note = f"Losses of all steps agree within {max(gaps):.1e}, weight norms within {max(norms):.1e} relative."
    return runs, f"batch {args.batch}, {math.ceil(args.pairs / args.batch)} steps", note


def grpo_task(args, place):
    settings = dict(steps=args.steps, new_tokens=args.new_tokens)
    work = f"{args.steps} step(s) of 8 prompts × 8 answers of at most {args.new_tokens} tokens, 64 end ids"
    if args.edition:
        return compare(args, place, "grpo", **settings), work, ""
    ours = one_run(args, place, "ours", "grpo_record", **settings, seed=0)
    theirs = one_run(args, place, "plain", "grpo_replay", **{**settings, "steps": 1})
    why = differs("replay", ours, theirs)
    if why:
        raise Refused(f"grpo, one recorded rollout: {why}; no ratio")
    note = (f"One recorded rollout of {ours['tokens']} tokens: loss {ours['losses'][0]:.6f} and {theirs['losses'][0]:.6f}, "
            f"gradient norm {ours['grad_norms'][0]:.5f} and {theirs['grad_norms'][0]:.5f}.")  # fmt: skip
    return compare(args, place, "grpo", **settings), work, note


def ppo_task(args, place):
    if not (args.peer_path or args.edition):
        raise SystemExit("--peer-path: expected a folder with trl 1.12.0, the last release with PPO (see --help)")  # fmt: skip
    runs = compare(args, place, "ppo", steps=args.steps, new_tokens=args.new_tokens)
    work = f"{args.steps} step(s) of 64 answers of at most {args.new_tokens} tokens, 4 passes in batches of 16"
    note = "The two draw their own answers: only the amount of work is compared."
    return runs, work, "" if args.edition else note


def rollout_task(args, place):
    runs = compare(args, place, "rollout", new_tokens=args.new_tokens, rounds=args.steps)
    sides = "ours", "edition" if args.edition else "plain"
    ours, theirs = ([a for r in runs if r["side"] == side for a in r["answers"]] for side in sides)
    p = same_distribution(ours, theirs)
    gap = max(r["forcing_gap"] for r in runs if r["side"] == "ours")
    if not gap < 1e-4:
        raise Refused(f"rollout: log-probs of the sampler differ from teacher forcing by {gap:.2g}; no ratio")  # fmt: skip
    note = (f"Times are per token. χ²: p = {p[0]:.3f} for the tokens, {p[1]:.3f} for the lengths; our log-probs equal teacher "
            f"forcing within {gap:.1e}; mean length {statistics.mean(map(len, ours)):.1f} and {statistics.mean(map(len, theirs)):.1f}.")  # fmt: skip
    work = f"{args.steps} rollout(s) of 8 prompts × 8 answers of at most {args.new_tokens} tokens, {1 if args.full else 64} end id(s)"
    return runs, work, note


def data_task(args, place):
    return compare(args, place, "data"), "read, encoded, stored", ""


JOBS = {**dict.fromkeys(PAIRS_TASKS, pairs_task), "grpo": grpo_task, "ppo": ppo_task, "rollout": rollout_task,
        "data": data_task, "scaling": growth, "memory": growth}  # fmt: skip


# ---- the command ----


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # fmt: off
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--pairs", type=int, help="rows (default 512; data 100 000)")
    parser.add_argument("--batch", type=int, default=16, help="rows an optimiser step (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="ratios per opponent; runs a point of scaling (default %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="steps of grpo and ppo, rollouts of rollout (default %(default)s)")
    parser.add_argument("--tune-steps", type=int, default=2, help="steps of each setting tried for `tuned` (default %(default)s)")
    parser.add_argument("--tuned", type=json.loads, help='flags of an earlier search in place of a new one, such as \'{"device_batch": 2}\'')
    parser.add_argument("--minutes", type=float, help="no further round begins after so many minutes (default: all rounds)")
    parser.add_argument("--precompute", action="store_true", help="dpo: TRL computes its reference log-probs before training")
    parser.add_argument("--full", action="store_true", help="rollout: one end id in 4096 in place of 64, so that answers are long")
    parser.add_argument("--new-tokens", type=int, help="longest answer (default grpo 128, ppo 64, rollout 256)")
    parser.add_argument("--threads", type=int, default=2, help="of every process (default %(default)s)")
    parser.add_argument("--core", type=int, help="pin every process to this core (with --threads 1)")
    parser.add_argument("--repeats", type=int, default=1, help="how often a run is repeated when others use more than half a core (default %(default)s)")
    parser.add_argument("--peer-path", help="ppo: folder with trl 1.12.0")
    parser.add_argument("--edition", help="folder of another commit of this project to compare with, in place of TRL")
    parser.add_argument("--micro-tokens", type=int, help="passed to our trainers (default: theirs)")
    parser.add_argument("--layers", type=int, default=6, help="of the model (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size (default %(default)s)")
    parser.add_argument("--out", default=str(REPO / "reports" / "bench"), help="folder of the results (default reports/bench)")
    # fmt: on
    args = parser.parse_args(argv)
    if args.edition and args.task in ALONE:
        parser.error(f"--edition: {args.task} compares no editions")
    return args


def main(argv=None):
    args = parse_args(argv)
    task = args.task
    args.pairs = args.pairs or {"data": 100_000, "grpo": 32, "rollout": 32}.get(task, 512)
    args.new_tokens = args.new_tokens or {"grpo": 128, "ppo": 64, "rollout": 256}.get(task)
    name = task + "-precomputed" * args.precompute + "-full" * args.full
    name += "-edition" if args.edition else ""
    name += f"-{args.micro_tokens}" if args.micro_tokens else ""
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        place = Path(place)
        if task not in ALONE:  # which make their own
            make_work(
                args, place, n=args.pairs, batch=args.pairs if task == "data" else args.batch,
                ends=64 if task == "grpo" or (task == "rollout" and not args.full) else 1,
                num_hidden_layers=args.layers, hidden_size=args.hidden, intermediate_size=args.hidden * 5 // 2,
            )  # fmt: skip
        runs, work, note = JOBS[task](args, place)
    if task not in ALONE:
        work = f"{args.pairs} pairs, {args.layers} layers, hidden {args.hidden}, fp32, {work}"
    header = describe(args, runs, work)
    lines = scaling_table(runs) if task in ALONE else table(runs)
    write(args, name, runs, header, [*lines, *(["", note] if note else [])])


if __name__ == "__main__":
    main()
