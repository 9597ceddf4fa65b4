"""parts/draw.py: two answers to each prompt, from one model or from two, for people to compare."""

import hashlib
import json
import shlex
from pathlib import Path

import numpy as np

from parts import files
from parts.files import UserError, number
from parts.old_stats import prompt_keys
from parts.reports import add_model_arguments, encode_prompts, load_policy
from parts.votes import as_answer, load_items

BASE = "data/tiny-base"
BATCH = 32  # prompts answered at once


def add_arguments(parser):
    """The flags of `annotate.py draw`."""
    add = parser.add_argument
    # fmt: off
    add("--prompts", default="data/prompts.jsonl", help="JSONL of prompts (default %(default)s)")
    add("--split", help='only the prompts with this "split"')
    add("--limit", type=number(int, at_least=1), help="at most this many prompts, 20 to 1000, chosen by hash")
    add("--model", default=BASE, help="folder or hub id (default %(default)s)")
    add("--model-b", help="second model: one answer from each, a blind comparison (default: two answers of --model)")
    add("--gold-items", help="JSONL of prompt, a, b, gold (a or b): pairs with a known better answer to mix in")
    add("--max-new-tokens", type=number(int, at_least=1), default=96, help="longest answer in tokens, 64 to 512 (default %(default)s)")
    add("--temperature", type=number(above=0), default=1.0, help="sampling temperature, 0.7 to 1 (default %(default)s)")
    add("--seed", type=number(int, at_least=0), default=0, help="random seed of sampling (default %(default)s)")
    # fmt: on
    add_model_arguments(parser)


def draw(args):
    """write items.jsonl: two answers to each prompt, from one model or from two"""
    gold = list(load_items(args.gold_items, "--gold-items").values()) if args.gold_items else []
    for item in gold:
        if not item.get("gold"):  # it would be an ordinary item, and a pair to train on
            reason = f'the item {item["id"]!r} has no "gold"; expected "a" or "b", the better one'
            raise UserError(f"--gold-items {args.gold_items}: {reason}")
    rows = prompts_to_ask(args)
    if len({type(row["prompt"]) for row in rows}) > 1:  # the page would refuse them
        raise UserError(f"--prompts {args.prompts}: text and messages in one file; take one")
    if gold and type(gold[0]["prompt"]) is not type(rows[0]["prompt"]):
        raise UserError(
            f"--gold-items {args.gold_items}: text and messages; take what --prompts has"
        )
    path = new_items_file(args.out)
    second = ("--model-b", args.model_b) if args.model_b else ("--model", args.model)
    load_policy(second[1], args, second[0])  # a wrong folder is known before an hour of drawing
    texts = sample("--model", args.model, rows, args, seed=2 * args.seed)
    texts_b = sample(*second, rows, args, seed=2 * args.seed + 1)
    items = to_items(rows, texts, texts_b, args)
    dropped = len(rows) - len(items)
    print(f"{len(rows)} prompts → {len(items)} items; {dropped} dropped: answers equal or blank")
    if not items:
        fix = "raise --temperature, or add --model-b"
        raise UserError(f"--model {args.model}: no two answers that differ; {fix}")
    # ids that do not tell gold items from others
    items = [item | {"id": f"item-{n:05d}"} for n, item in enumerate([*items, *gold])]
    files.write_jsonl(path, items, mode=files.PRIVATE)
    print(f"wrote {path}\nnext: {shlex.join(['python', 'annotate.py', '--out', args.out])}")


def new_items_file(out):
    """The path of items.jsonl in a new session, whose folder is made before an hour of drawing."""
    path = Path(out) / "items.jsonl"
    private_folder(out)
    for held in ("items.jsonl", "args.json"):  # the second is of a run, or of a session
        if path.with_name(held).exists():
            raise UserError(f"--out {out}: holds an {held}; choose another --out")
    return path


def private_folder(out):
    """Make the folder of --out, readable by its owner alone; UserError if it cannot be made."""
    try:
        Path(out).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {files.brief(error)}; choose another --out") from None


def prompts_to_ask(args):
    """Rows of --prompts, of each prompt one, at most --limit of them."""
    from parts.answers import read_prompts

    rows = read_prompts(args.prompts, "--prompts", args.chat)
    rows = [row for row in rows if args.split is None or row.get("split") == args.split]
    if not rows:
        raise UserError(f'--prompts {args.prompts}: no prompt with "split": "{args.split}"')
    firsts = np.unique(prompt_keys(row["prompt"] for row in rows), return_index=True)[1]
    distinct = [rows[i] for i in firsts]
    if n_equal := len(rows) - len(distinct):
        counts = {"rows": len(rows), "dropped: prompt there twice": n_equal}
        print(f"{args.prompts}: {files.counts_in_words(counts)}")

    def digest(row):
        return hashlib.sha256(json.dumps(row["prompt"], ensure_ascii=False).encode()).digest()

    return sorted(distinct, key=digest)[: args.limit] if args.limit else distinct


def sample(flag, name, rows, args, seed):
    """One answer to each prompt, as text."""
    from parts import sampling

    policy, tokenizer = load_policy(name, args, flag)
    prompts, config = [row["prompt"] for row in rows], policy.model.config
    ids = encode_prompts(prompts, tokenizer, config, args.max_new_tokens)
    print(f"drawing {len(rows)} answers from {name}, temperature {args.temperature:g}", flush=True)
    rollout = sampling.sample(
        policy, tokenizer, ids, max_new_tokens=args.max_new_tokens,
        temperature=args.temperature, seed=seed, rows=BATCH,
    )  # fmt: skip
    cut = len(rows) - sum(rollout.finished)
    if cut:
        limit = f"--max-new-tokens {args.max_new_tokens}"
        print(f"{cut} of {len(rows)} answers were cut at {limit}; raise it")
    return rollout.texts


def to_items(rows, texts, texts_b, args):
    """Items without an id, of the prompts whose two answers differ.

    >>> from types import SimpleNamespace as Args
    >>> rows = [{"prompt": "Fit?"}, {"prompt": "Hire?"}]
    >>> items = to_items(rows, ["yes", "no"], ["yes", " "], Args(model="m", model_b="n"))
    >>> [(item["prompt"], item["a"], item["b"]) for item in items]
    [('Hire?', 'no', '(no answer)')]
    """
    items = []
    for row, a, b in zip(rows, texts, texts_b, strict=True):
        if args.model_b:  # between two models a blank answer must be able to lose
            a, b = (text if text.strip() else "(no answer)" for text in (a, b))
        if a == b or not a.strip() or not b.strip():
            continue
        items.append(
            {
                "task": row.get("task"),
                "prompt": row["prompt"],
                "a": as_answer(a, row["prompt"]),
                "b": as_answer(b, row["prompt"]),
                "a_model": args.model,
                "b_model": args.model_b or args.model,
                "candidates": [c for c in row.get("candidates") or [] if c.get("in") == "prompt"],
            }
        )
    return items
