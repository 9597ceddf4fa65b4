"""parts/draw.py: two answers to each prompt, from one model or from two, for people to compare."""

from pathlib import Path

import numpy as np

from parts import files
from parts.files import UserError, number
from parts.reports import placement
from parts.rows import plain_text, split_name
from parts.stats import prompt_keys
from parts.votes import as_answer, load_items

BASE = "data/tiny-base"
BATCH = 32  # prompts answered at once
TOP_P = 0.95


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
    add("--temperature", type=number(above=0), help="sampling temperature, 0.7 to 1 (default 0.7; bundled base 1)")
    add("--top-p", type=number(above=0, below=1.0001), help="the likeliest tokens of this share, 0.8 to 1 (default 0.95; bundled base 1)")
    add("--examples", help="JSONL of prompt and completion: worked examples before each prompt (default: for bundled prompts)")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    add("--seed", type=number(int, at_least=0), default=0, help="random seed of sampling (default %(default)s)")
    # fmt: on


def draw(args):
    """write items.jsonl: two answers to each prompt, from one model or from two"""
    from parts import prompting

    gold = list(load_items(args.gold_items, "--gold-items").values()) if args.gold_items else []
    for item in gold:
        if not item.get("gold"):  # it would be an ordinary item, and a pair to train on
            reason = f'the item {item["id"]!r} has no "gold"; expected "a" or "b", the better one'
            raise UserError(f"--gold-items {args.gold_items}: {reason}")
    rows = read_prompts(args, prompting)
    if len({type(row["prompt"]) for row in rows}) > 1:  # the page would refuse them
        raise UserError(f"--prompts {args.prompts}: text and messages in one file; take one")
    if gold and type(gold[0]["prompt"]) is not type(rows[0]["prompt"]):
        raise UserError(
            f"--gold-items {args.gold_items}: text and messages; take what --prompts has"
        )
    if args.top_p is None:
        args.top_p = 1.0 if prompting.knows_the_form(args.model) else TOP_P
    path = new_items_file(args.out)
    second = ("--model-b", args.model_b) if args.model_b else ("--model", args.model)
    load(*second, args)  # it can be sampled: known before an hour of drawing
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
    print(f"wrote {path}\nnext: {files.shell_line('annotate.py', '--out', args.out)}")


def new_items_file(out):
    """The path of items.jsonl in a new session, whose folder is made before an hour of drawing."""
    path = Path(out) / "items.jsonl"
    files.private_folder(out)
    for held in ("items.jsonl", "args.json"):  # the second is of a run, or of a session
        if path.with_name(held).exists():
            raise UserError(f"--out {out}: holds an {held}; choose another --out")
    return path


def read_prompts(args, prompting):
    """Rows of --prompts, each prompt after the examples of its task."""
    rows = prompting.load_prompts(args.prompts, "--prompts")
    rows = [r for r in rows if args.split is None or r.get("split") == split_name(args.split)]
    if not rows:
        raise UserError(f'--prompts {args.prompts}: no prompt with "split": "{args.split}"')
    prompting.default_examples(args, [args.prompts], temperature_flag="temperature")
    examples = prompting.load_examples(args.examples)
    asked = [row for row in rows if plain_text(row["prompt"]).strip()]
    firsts = np.unique(prompt_keys(row["prompt"] for row in asked), return_index=True)[1]
    distinct = [asked[i] for i in firsts]
    n_blank, n_equal = len(rows) - len(asked), len(asked) - len(distinct)
    if n_blank or n_equal:
        counts = {"dropped: the prompt is blank": n_blank, "dropped: prompt there twice": n_equal}
        counts = {what: n for what, n in counts.items() if n}
        print(f"{args.prompts}: {files.counts_in_words({'rows': len(rows)} | counts)}")
    rows = prompting.some_prompts(distinct, args.limit or len(distinct))
    return [{**row, "prompt": prompting.after_examples(examples, row)} for row in rows]


def load(flag, name, args):
    """(model, tokenizer); UserError if draws of this family are not what a forward says."""
    import common
    from parts import sampling

    tokenizer = common.load_tokenizer(name, flag)
    model = common.load_policy(name, **placement(args), trainable=False, flag=flag)
    sampling.check_sampling(model, f"{flag} {name}")
    return model, tokenizer


def sample(flag, name, rows, args, seed):
    """One answer to each prompt, as text."""
    from parts import sampling

    model, tokenizer = load(flag, name, args)
    print(f"drawing {len(rows)} answers from {name}, temperature {args.temperature:g}, "
          f"top-p {args.top_p:g}", flush=True)  # fmt: skip
    rollout = sampling.sample(
        model, tokenizer, [row["prompt"] for row in rows], max_new_tokens=args.max_new_tokens,
        temperature=args.temperature, top_p=args.top_p, seed=seed, rows=BATCH,
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
