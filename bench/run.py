"""bench/run.py: the same work by this project and by TRL, in alternating processes.

    python bench/run.py dpo                     TRL computes its reference on the fly; --precompute:
                                                before training
    python bench/run.py reward | sft | grpo     one trainer each
    python bench/run.py rollout                 sampling.sample against model.generate; with --full,
                                                answers rarely end early
    python bench/run.py dpo --model runs/smollm2 --pairs 48 --lr 1e-5     any task, on a real model
    python bench/run.py ppo --peer-path FOLDER  against TRL 1.12, the last release with PPO:
                                                pip install --no-deps --target FOLDER trl==1.12.0
    python bench/run.py dpo --edition FOLDER    any task, against another commit of this project
                                                instead of TRL: git worktree add FOLDER COMMIT
    taskset -c 1 python bench/run.py dpo --threads 1 --pairs 128 --rounds 3    on a busy machine
    python bench/run.py dpo --model runs/smollm2 --lr 1e-5 --device cuda --dtype bf16   on a GPU

Opponents    plain: the optimiser batch is the device batch, all else TRL's default (which has
             gradient checkpointing); tuned: the fastest of TRL's exact settings, found first by
             short runs (`candidates`)
Order        plain ours tuned, tuned ours plain, …: each of our runs is next to both that it is
             compared with
Ratio        of neighbouring runs, as median [smallest, largest]. Time is TRL / ours, memory
             ours / TRL. Where the two draw their own answers, time is per token
Edition      both run from their own folder by command line (`python dpo.py …`; rollout:
             bench/ours.py) with the same flags, except those that are missing in one's --help.
             Time and memory are ours / theirs
Time         CPU seconds of the process and its children: other programs disturb them least; on a
             GPU wall seconds, so let nothing else run
Memory       the process's, on a GPU what its tensors take there
Refused      no ratio if the two did not do the same work (`differs`, `same_distribution`);
             tests/test_trl_parity.py checks that the losses of GRPO and PPO equal TRL's
Writes       reports/bench/TASK.jsonl, one run per line, and TASK.md
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
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
from work import BATCH, REPO, SAMPLERS, STAGES, files, peak_mb, stage_flags, weight_norm

EDGES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 255)  # bins of answer lengths
DRAWN = (*SAMPLERS, "rollout")  # tasks whose sides draw their own answers
NEW_TOKENS = {"grpo": 128, "ppo": 64, "rollout": 256}
COLUMNS = {
    "time, whole process": "seconds",
    "time, loop alone": "loop_seconds",
    "peak memory": "peak_mb",
}


class Refused(SystemExit):
    """The two did not do the same work: there is nothing to compare."""


# ---- did both do the same? ----


def differs(task, ours, theirs, dtype="fp32"):
    """Why these two runs must not be compared, or None.

    dpo, reward, sft   the loss of each step within 1e-4, the norm of the final weights within 1e-5;
                       in half precision within .03 and 1e-4: the two round in different places
    ppo                the same number of updates, tokens within 3 %
    """
    if task == "ppo" and ours["updates"] != theirs["updates"]:
        return f"{ours['updates']} updates against {theirs['updates']}"
    if task == "ppo" and abs(ours["tokens"] / theirs["tokens"] - 1) > 0.03:
        return f"{ours['tokens']} tokens against {theirs['tokens']} (3 % allowed)"
    if task in DRAWN:
        return None
    a, b = ours["losses"], theirs["losses"]
    if len(a) != len(b) or not a:
        return f"{len(a)} steps against {len(b)}"
    most, most_norm = (1e-4, 1e-5) if dtype == "fp32" else (0.03, 1e-4)
    for step, (x, y) in enumerate(zip(a, b), 1):
        if not abs(x - y) <= most:  # NaN, too
            return f"the losses of step {step} differ by {abs(x - y):.2g} ({most:g} allowed)"
    gap = abs(ours["weight_norm"] / theirs["weight_norm"] - 1)
    if not gap <= most_norm:
        return f"the norms of the final weights differ by {gap:.2g} (relative)"


def same_distribution(ours, theirs, vocabulary=4096, groups=64):
    """(p of the tokens in groups of ids, p of the lengths) of a χ² test; Refused below .001."""
    from scipy.stats import chi2_contingency

    p = []
    for bins in (
        lambda answers: np.concatenate(answers) * groups // vocabulary,
        lambda answers: np.searchsorted(EDGES, [*map(len, answers)]),
    ):
        counts = np.array(
            [np.bincount(bins(answers), minlength=groups) for answers in (ours, theirs)]
        )
        counts = counts[:, counts.sum(0) >= 10]  # expected 5 or more in each half
        p.append(chi2_contingency(counts, correction=False).pvalue if counts.shape[1] > 1 else 1.0)
    if min(p) < 0.001:
        raise Refused(
            f"not one distribution: p = {p[0]:.2g} (tokens), {p[1]:.2g} (lengths); no ratio"
        )
    return p


# ---- one process ----


def run_child(args, words, root=REPO, result=None):
    """One fresh process, `python WORDS` in the folder root: CPU seconds (with a GPU wall seconds),
    peak memory, and what it left in the file `result`."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(args.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    if result:  # TRL's datasets: a cold cache for every run
        environment["HF_DATASETS_CACHE"] = str(result.parent / "datasets")
    if "peer_trl.py" in words[0] and args.peer_path:
        environment["PYTHONPATH"] = str(Path(args.peer_path).resolve())
    with tempfile.TemporaryFile("w+") as log:
        where = dict(stdout=log, stderr=log, env=environment, cwd=root)
        start = time.perf_counter()
        process = subprocess.Popen([sys.executable, *words], **where)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            log.seek(0)
            raise SystemExit(f"{' '.join(words)[:300]} failed:\n{log.read()[-3000:]}")
    seconds = usage.ru_utime + usage.ru_stime
    if args.device == "cuda":
        seconds = time.perf_counter() - start
    row = dict(seconds=seconds, peak_mb=peak_mb(usage))
    written = json.loads(result.read_text()) if result and result.exists() else {}
    # an older edition's name of the key
    return row | {"loop_seconds" if key == "loop_cpu_s" else key: x for key, x in written.items()}


@functools.cache
def known_flags(root, script):
    """The flags that the --help of a stage names."""
    command = [sys.executable, script, "--help"]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return set(re.findall(r"--[a-z-]+", found.stdout))


def command_line(args, side, s):
    """(words after `python`, folder to run in) for one run of a side with the settings s."""
    root = Path(args.edition).resolve() if side == "edition" else REPO
    if not args.edition or s["task"] == "rollout":
        script = "peer_trl.py" if side in ("plain", "tuned", "tuning") else "ours.py"
        return [f"bench/{script}", json.dumps(s)], root
    stage, flags = stage_flags(**s)
    # the first edition keeps the reference's log-probs in a folder shared by all runs: use an empty one
    flags["--ref-cache"] = f"{s['out']}-cache"
    known = known_flags(root, f"{stage}.py")
    words = [word for pair in flags.items() if pair[0] in known for word in pair]
    return [f"{stage}.py", *words], root


def one_run(args, place, side, **settings):
    """`run_child` of one side in a folder of its own, as a row of the results."""
    task, out = args.task, Path(tempfile.mkdtemp(dir=place)) / "run"  # beside it: its caches
    result = out.parent / "result.json"
    settings |= dict(
        task=task,
        folder=str(place),
        out=str(out),
        result=str(result),
        threads=args.threads,
        micro_tokens=args.micro_tokens,
        device=args.device,
        dtype=args.dtype,
    )
    row = run_child(args, *command_line(args, side, settings), result)
    if task in STAGES:
        row["weight_norm"] = weight_norm(out)
    if side in ("ours", "edition") and task != "rollout":
        steps = [line for line in files.read_jsonl(out / "metrics.jsonl") if "grad_norm" in line]
        row["losses"] = [line["loss"] for line in steps]
        row["tokens"] = sum(line.get("answer_tokens", 0) for line in steps)
        row["updates"] = sum(line.get("updates", 0) for line in steps)
    row = {"task": task, "side": side, "flags": settings.get("flags", {}), **row}
    measured = ", ".join(f"{k} {row[k]:.1f}" for k in COLUMNS.values() if k in row)
    print(f"  {side} {row['flags']} {measured}", flush=True)
    return row


# ---- a comparison ----


def candidates(task, base):
    """TRL's exact settings to search for `tuned`; batch_rebalance sorts inside the batch, which is
    exact for SFT only."""
    off = {**base, "gradient_checkpointing": False}
    if task == "rollout":
        return [{}, {"cache_implementation": "static"}]
    sizes = {"grpo": (16, 8, 4), "ppo": (16, 4)}.get(task, (16, 8, 4, 2, 1))
    found = [{**off, "device_batch": size} for size in sizes]
    more = {
        "grpo": ({"device_batch": 8, "cache_implementation": "static"},),
        "ppo": ({"device_batch": 4, "rollout_batch": 16},),
        "sft": [{"device_batch": b, "train_sampling_strategy": "batch_rebalance"} for b in (4, 2)],
    }
    return found + [{**off, **flags} for flags in more.get(task, ())]


def tune(args, place, base, settings):
    """A short run of each candidate."""
    runs = []
    for flags in candidates(args.task, base):
        few = {**settings, "steps": args.tune_steps, "rounds": 1, "flags": flags}
        try:
            runs.append(one_run(args, place, "tuning", **few))
        except SystemExit as error:  # a setting that does not run here is no candidate
            print(f"  {flags} does not run: {str(error).strip().splitlines()[-1][:150]}")
    return runs


def fastest(runs):
    """The flags of the candidate with the fastest loop."""
    return min(per_token(runs), key=lambda run: run["loop_seconds"])["flags"]


def compare(args, place, settings):
    """Rounds of plain, ours, tuned in the order of the header, or of ours and another edition: all
    runs. Refused as soon as two neighbours differ."""
    base, runs = {"precompute_ref_log_probs": True} if args.precompute else {}, []
    sides = [("ours", {}), ("edition", {})]
    if not args.edition:
        runs = tune(args, place, base, settings) if args.tuned is None else []
        tuned = fastest(runs) if runs else args.tuned
        sides = [("plain", base), ("ours", {}), ("tuned", tuned)]
    for number in range(args.rounds):
        done = []
        for side, flags in sides if number % 2 == 0 else sides[::-1]:
            row = one_run(args, place, side, **settings, flags=flags, seed=1000 * number)
            done.append({**row, "round": number})
            for other in done[-2:-1]:
                ours, theirs = (row, other) if side == "ours" else (other, row)
                if why := differs(args.task, ours, theirs, args.dtype):
                    raise Refused(
                        f"{args.task}, {theirs['side']} {theirs['flags']}: {why}; no ratio"
                    )
        runs += done
    return runs


def timed(runs):
    """The runs without the search for `tuned`."""
    return [run for run in runs if run["side"] != "tuning"]


def ratios(runs, key, opponent):
    """The ratio of `key` for each run of ours and its neighbour of that opponent: TRL / ours; for
    memory, and beside another edition, ours / theirs."""
    found = []
    for a, b in pairwise(timed(runs)):
        if a["round"] == b["round"] and {a["side"], b["side"]} == {"ours", opponent}:
            ours, theirs = (a, b) if a["side"] == "ours" else (b, a)
            turned = key.endswith("_mb") or opponent == "edition"
            found.append(ours[key] / theirs[key] if turned else theirs[key] / ours[key])
    return found


def per_token(runs):
    """The runs; drawn answers differ in tokens by chance, so their times become seconds per token."""
    if runs[0]["task"] not in DRAWN:
        return runs
    times = ("seconds", "loop_seconds")
    return [{**run, **{k: run[k] / run["tokens"] for k in times if k in run}} for run in runs]


def shown(values):
    return f"{median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def table(runs, unit="CPU seconds"):
    """The lines of one comparison's table: a row per opponent; unit: of its times."""
    measured = timed(runs)
    rows = per_token(measured)
    columns = {head: key for head, key in COLUMNS.items() if key in rows[0]}
    # a command line has no clock around its loop
    clock = "loop_seconds" if "loop_seconds" in rows[0] else "seconds"
    units = {clock: unit, "peak_mb": "MiB"}
    heads = ["opponent", *columns, *(f"{name}, ours / theirs" for name in units.values())]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for opponent, flags in {run["side"]: run["flags"] for run in measured}.items():
        if opponent == "ours":
            continue
        cells = [shown(ratios(rows, key, opponent)) for key in columns.values()]
        for key in units:
            sides = ([r[key] for r in measured if r["side"] == side] for side in ("ours", opponent))
            cells.append(" / ".join(f"{median(values):.1f}" for values in sides))
        lines.append(f"| {opponent} {json.dumps(flags) if flags else ''} | {' | '.join(cells)} |")
    for run in runs:
        if run["side"] == "tuning":
            tried = f"{json.dumps(run['flags'])}, {run['loop_seconds']:.1f} {unit}"
            lines.append(f"\nTried for `tuned`: {tried}")
    return lines


def agreement(args, runs):
    """What the sides had in common, in a sentence."""
    if args.task in STAGES:
        first, *others = timed(runs)
        gaps = [abs(a - b) for run in others for a, b in zip(run["losses"], first["losses"])]
        norms = [abs(run["weight_norm"] / first["weight_norm"] - 1) for run in others]
        agree = f"within {max(gaps):.1e}, weight norms within {max(norms):.1e} (relative)"
        return f"Losses of all steps agree {agree}."
    if args.task != "rollout":
        return "The two draw their own answers; times are per token."
    answers = {run["side"]: [] for run in runs}
    for run in runs:
        answers[run["side"]] += run["answers"]
    ours, theirs = answers["ours"], answers["edition" if args.edition else "plain"]
    p = same_distribution(ours, theirs, max(map(max, ours + theirs)) + 1)
    return f"Times are per token. χ²: p = {p[0]:.3f} for the tokens, {p[1]:.3f} for the lengths."


# ---- the command ----


def shown_command(words):
    """The command without folders of this machine.

    >>> shown_command(["ppo", "--peer-path", "/home/me/trl", "--out", "/tmp/x", "--steps", "1"])
    'python bench/run.py ppo --peer-path FOLDER --out FOLDER --steps 1'
    """
    paths = ("--peer-path", "--edition", "--out")
    shown = ["FOLDER" if b in paths else word for b, word in zip(["", *words], words)]
    return shlex.join(["python", "bench/run.py", *shown])


def gpu_name(args):
    """With --device cuda its name behind a comma; a process of its own asks, as this one must be small."""
    if args.device == "cpu":
        return ""
    words = "import torch; print(torch.cuda.get_device_name())"
    return ", " + subprocess.check_output([sys.executable, "-c", words], text=True).strip()


def write(args, name, runs, work, lines):
    """NAME.jsonl, a header and then one run per line, and NAME.md."""
    trl = [f"trl {v}" for v in sorted({run["trl"] for run in runs if "trl" in run})]
    versions = [f"{package} {version(package)}" for package in ("torch", "transformers")] + trl
    processor = platform.processor() or platform.machine()
    header = {
        "command": shown_command(sys.argv[1:]),
        "made": f"{datetime.date.today()}, {processor}, {os.cpu_count()} cores{gpu_name(args)}",
        "work": work,
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
    }
    file = Path(args.out) / name
    rows = [{k: v for k, v in run.items() if k != "answers"} for run in runs]
    files.write_jsonl(f"{file}.jsonl", [{"header": header}, *rows])
    top = f"`{header['command']}`\n\n{header['made']}; {header['versions']}; {work}."
    text = "\n".join([f"# {name}\n\n{top}\n", *lines, ""])
    Path(f"{file}.md").write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {file}.jsonl and {name}.md")


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    # fmt: off
    add("task", choices=(*STAGES, *DRAWN))
    add("--pairs", type=int, help="rows (default 512; grpo and rollout 32)")
    add("--rounds", type=int, default=5, help="ratios per opponent (default %(default)s)")
    add("--steps", type=int, default=3, help="steps of grpo and ppo, rollouts of rollout (default %(default)s)")
    add("--tune-steps", type=int, default=2, help="steps of each setting tried for `tuned` (default %(default)s)")
    add("--tuned", type=json.loads, help='flags of an earlier search, such as \'{"device_batch": 2}\', in place of a new one')
    add("--precompute", action="store_true", help="dpo: TRL computes its reference log-probs before training")
    add("--full", action="store_true", help="rollout: one end id in 4096 in place of 64, so that answers are long")
    add("--new-tokens", type=int, help="longest answer (default grpo 128, ppo 64, rollout 256)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of both (default %(default)s)")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="compute precision of both (default %(default)s)")
    add("--threads", type=int, default=2, help="of every process (default %(default)s)")
    add("--peer-path", help="ppo: folder with trl 1.12.0")
    add("--edition", help="folder of another commit of this project to compare with, in place of TRL")
    add("--micro-tokens", type=int, help="passed to our trainers (default: theirs)")
    add("--model", help="a real Llama folder, such as runs/smollm2, on bundled rows (default: random weights)")
    add("--lr", type=float, default=1e-4, help="learning rate of both (default %(default)s)")
    add("--layers", type=int, default=6, help="of the model (default %(default)s)")
    add("--hidden", type=int, default=256, help="hidden size (default %(default)s)")
    add("--out", default=str(REPO / "reports" / "bench"), help="folder of the results (default reports/bench)")
    # fmt: on
    args = parser.parse_args(argv)
    if args.task == "ppo" and not (args.peer_path or args.edition):
        parser.error("ppo: --peer-path FOLDER with trl 1.12.0, or --edition FOLDER, is needed")
    if args.edition and args.device == "cuda":
        parser.error(
            "--edition: a command line has no clock that waits for a GPU; use --device cpu"
        )
    args.pairs = args.pairs or (32 if args.task in ("grpo", "rollout") else 512)
    args.new_tokens = args.new_tokens or NEW_TOKENS.get(args.task)
    return args


def main(argv=None):
    args = parse_args(argv)
    task, steps = args.task, math.ceil(args.pairs / BATCH)
    model = Path(args.model).name if args.model else ""
    variants = [
        args.precompute and "precomputed",
        args.full and "full",
        args.edition and "edition",
        args.micro_tokens,
        model,
        args.device != "cpu" and args.device,
        args.dtype != "fp32" and args.dtype,
    ]
    name = "-".join([task, *(str(variant) for variant in variants if variant)])
    settings, work = {"lr": args.lr}, f"{steps} steps of {BATCH}"
    if task in DRAWN:  # of rollout, rounds are whole rollouts inside one process
        count = "rounds" if task == "rollout" else "steps"
        settings |= {count: args.steps, "new_tokens": args.new_tokens}
        work = f"{args.steps} × 64 answers of at most {args.new_tokens} tokens"
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        given = dict(
            folder=place, n=args.pairs, model=args.model and str(Path(args.model).resolve()),
            ends=64 if task == "grpo" or (task == "rollout" and not args.full) else 1,
            num_hidden_layers=args.layers, hidden_size=args.hidden,
            intermediate_size=args.hidden * 5 // 2,
        )  # fmt: skip
        run_child(args, ["bench/work.py", json.dumps(given)])
        runs = compare(args, Path(place), settings)
    model = model or f"{args.layers} layers, hidden {args.hidden}"
    work = f"{args.pairs} rows, {model}, {args.dtype}, {work}"
    unit = "seconds" if args.device == "cuda" else "CPU seconds"
    write(args, name, runs, work, [*table(runs, unit), "", agreement(args, runs)])


if __name__ == "__main__":
    main()
