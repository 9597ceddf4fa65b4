"""bench/run.py: the same work by this project and by TRL, in alternating processes; prints a table.

    python bench/run.py dpo --model runs/smollm2 --pairs 24 --lr 1e-5 --threads 1 --rounds 3
    python bench/run.py sft | reward                   the other trainers of pairs and answers
    python bench/run.py sample --model runs/smollm2    the sampler beside transformers' generate

Given        the first rows with a prompt of 100 tokens or more, as plain text, to both in one
             order; 8 rows per optimiser step, one epoch, fp32, a constant rate, no evaluation, no
             checkpoint. sample: 64 answers to 8 prompts, once with many end tokens, so that lengths
             vary, once with none
Opponent     TRL without gradient checkpointing, at the fastest of its settings that compute the
             same: --device-batch rows per forward; for sft its sorted batches, too. Each is
             tried on one step first
Ratio        of neighbouring runs, TRL / ours for time, ours / TRL for memory: median [least, most]
Time         of the loop (with the reference's log-probs), and of the process from start to saved
             model; in CPU seconds, which other programs disturb least, and in wall seconds
Refused      no table if the loss of a step differs by more than 1e-4
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from tokenizers import Tokenizer

BENCH = Path(__file__).resolve().parent
BATCH, LEAST_PROMPT = 8, 100
TIMES = {  # heading: key of a run
    "loop, CPU s": "loop_cpu", "process, CPU s": "cpu",
    "loop, s": "loop_wall", "process, s": "wall",
}  # fmt: skip


def as_text(side):
    """Text, or the content of a row's one message."""
    return side if isinstance(side, str) else side[0]["content"]


def long_rows(path, tokenizer, n):
    """The first n comparisons whose prompt has LEAST_PROMPT tokens, as text that is continued."""
    with open(path, encoding="utf-8") as lines:
        rows = [row for row in map(json.loads, lines) if not row.get("tie")]
    for row in rows:
        if isinstance(row["prompt"], list):
            row["prompt"] = f"Human: {as_text(row['prompt'])}\n\nAssistant:"
            row |= {side: f" {as_text(row[side])}" for side in ("chosen", "rejected")}
    rows = [row for row in rows if len(tokenizer.encode(row["prompt"]).ids) >= LEAST_PROMPT][:n]
    if len(rows) < n:
        raise SystemExit(
            f"--data {path}: {len(rows)} rows have a prompt of {LEAST_PROMPT} tokens; --pairs {n}"
        )
    return [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in rows]


def run_child(args, script, **settings):
    """One fresh process of bench/SCRIPT: seconds, peak memory in MiB, and what it reports."""
    out = Path(tempfile.mkdtemp(dir=settings["folder"]))
    command = [sys.executable, BENCH / script, json.dumps(settings | {"out": str(out / "run")})]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(out), "TRL_EXPERIMENTAL_SILENCE": "1",
    }  # fmt: skip
    with open(out / "log", "w+") as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            told = {key: value for key, value in settings.items() if key != "ends"}
            raise SystemExit(f"{script} {told} failed:\n{log.read()[-3000:]}")
    # a child inherits its parent's peak, so this driver imports no torch
    peak = usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    run = dict(script=script, cpu=usage.ru_utime + usage.ru_stime, wall=wall, peak=peak)
    run |= json.loads((out / "result.json").read_text())
    shown = "  ".join(f"{key} {run[key]:.1f}" for key in (*TIMES.values(), "peak"))
    print(f"{script:9} {shown}", file=sys.stderr, flush=True)
    return run


def candidates(task, sizes):
    """TRL's settings that compute what we compute; sorting inside a batch is exact for sft only."""
    found = [{"per_device_train_batch_size": size} for size in sizes]
    if task == "sft":
        found += [flags | {"train_sampling_strategy": "batch_rebalance"} for flags in found[1:]]
    return found


def fastest(args, settings):
    """The candidate whose loop takes the fewest CPU seconds for one step."""
    tried = candidates(args.task, args.device_batch)
    if args.task == "sample" or len(tried) == 1:
        return tried[0]
    runs = [run_child(args, "theirs.py", **settings, steps=1, flags=flags) for flags in tried]
    return min(zip(runs, tried), key=lambda pair: pair[0]["loop_cpu"])[1]


def gap(ours, theirs):
    """The largest difference of a step's losses; infinite if the numbers of steps differ."""
    if len(ours["losses"]) != len(theirs["losses"]):
        return float("inf")
    gaps = np.abs(np.subtract(ours["losses"], theirs["losses"]))
    return gaps.max(initial=0).item()


def compare(args, settings):
    """[(ours, theirs)], neighbouring runs: ours first in every other round."""
    settings["flags"], pairs = fastest(args, settings), []
    for number in range(args.rounds):
        scripts = ["ours.py", "theirs.py"][:: -1 if number % 2 else 1]
        runs = {script: run_child(args, script, **settings, seed=number) for script in scripts}
        pairs.append((runs["ours.py"], runs["theirs.py"]))
        if not gap(*pairs[-1]) <= 1e-4:  # NaN, too
            losses = [run["losses"] for run in pairs[-1]]
            raise SystemExit(f"not the same work, so no ratio: losses {losses}")
    return pairs


def table(name, pairs):
    """Lines of Markdown: a row per measure, medians and the ratios of neighbours."""
    lines = [f"| {name} | ours | theirs | ratio |", "|---|---|---|---|"]
    for heading, key in {**TIMES, "peak memory, MiB": "peak"}.items():
        # drawn answers differ in length, so times are for a thousand tokens
        units = [
            [run.get("tokens", 1000) / 1000 if key != "peak" else 1 for run in p] for p in pairs
        ]
        ours, theirs = np.array([[a[key], b[key]] for a, b in pairs]).T / np.array(units).T
        ratios = (ours / theirs if key == "peak" else theirs / ours).tolist()
        spread = f"**{median(ratios):.2f}** [{min(ratios):.2f}, {max(ratios):.2f}]"
        lines.append(f"| {heading} | {median(ours):.1f} | {median(theirs):.1f} | {spread} |")
    return lines


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    # fmt: off
    add("task", choices=("dpo", "sft", "reward", "sample"))
    add("--model", default="data/tiny-base", help="model folder (default %(default)s)")
    add("--data", default="data/prefs_train.jsonl", help="JSONL of comparisons (default %(default)s)")
    add("--pairs", type=int, default=24, help="rows, a multiple of 8 (default %(default)s)")
    add("--rounds", type=int, default=3, help="runs of each side (default %(default)s)")
    add("--lr", type=float, default=1e-5, help="learning rate of both (default %(default)s)")
    add("--new-tokens", type=int, default=64, help="longest answer of sample (default %(default)s)")
    add("--micro-tokens", type=int, help="of our trainers (default: theirs)")
    add("--threads", type=int, default=1, help="of every process (default %(default)s)")
    add("--device-batch", type=int, nargs="+", default=[1, 2, 4], help="rows per forward that are tried for TRL (default 1 2 4)")
    # fmt: on
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    model = Path(args.model).resolve()
    if not (model / "tokenizer.json").is_file():
        raise SystemExit(f"--model {args.model}: no tokenizer.json in it; expected a model folder")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
        rows = long_rows(args.data, tokenizer, args.pairs)
        for name, order in {
            "pairs": range(args.pairs),  # which ours shuffles: epoch 0 of seed 0
            "shuffled": np.random.default_rng([0, 0]).permutation(args.pairs),
        }.items():
            text = "".join(f"{json.dumps(rows[i])}\n" for i in order)
            Path(folder, f"{name}.jsonl").write_text(text, encoding="utf-8")
        settings = dict(task=args.task, folder=folder, lr=args.lr, batch=BATCH)
        run_child(args, "ours.py", **settings | {"task": "prepare", "model": str(model)})
        settings |= {"new_tokens": args.new_tokens, "micro_tokens": args.micro_tokens}
        ends = [*range(0, tokenizer.get_vocab_size(), 64)]
        cases = {args.task: ends}
        if args.task == "sample":
            cases = {"sample, lengths vary": ends, "sample, equal lengths": ends[-1:]}
        for name, ends in cases.items():
            pairs = compare(args, settings | {"ends": ends})
            name = f"{name}: {model.name}"
            print("\n".join(["", *table(name, pairs), ""]))
            agreed = f"losses agree within {max(itertools.starmap(gap, pairs)):.1e}"
            if args.task == "sample":
                lengths = np.array([[run["tokens"] / 64 for run in pair] for pair in pairs]).mean(0)
                agreed = "tokens per answer: {:.1f} and {:.1f}; times are per 1000".format(*lengths)
            print(f"{args.rounds} rounds, {args.threads} thread(s); {agreed}")
            print(f"TRL: {pairs[0][1]['version']}")


if __name__ == "__main__":
    main()
