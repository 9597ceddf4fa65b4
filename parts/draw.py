"""parts/draw.py: two answers to each prompt, from one model or from two, for people to compare."""

from pathlib import Path

from parts import files
from parts.files import UserError, number

# torch and transformers are imported where they are used: the server of the page needs neither


def add_arguments(parser):
    """The flags of `annotate.py draw`."""
    add = parser.add_argument
    # fmt: off
    add("--prompts", default="data/prompts.jsonl", help="JSONL of prompts")
    add("--split", help='use only prompts with this "split"')
    add("--limit", type=number(int, at_least=1), help="use at most this many prompts, 20 to 1000, chosen by a hash of their text")
    add("--model", default="data/tiny-base", help="model folder or hub id")
    add("--model-b", help="second model, for a blind comparison: one answer from each (default: two answers of --model)")
    add("--max-new-tokens", type=number(int, at_least=1), default=96, help="longest answer in tokens, 64 to 512")
    add("--temperature", type=number(above=0), default=1.0, help="sampling temperature, 0.7 to 1")
    add("--seed", type=number(int, at_least=0), default=0, help="seed of the sampling")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--chat", action="store_true", help="make each prompt of text a user's message, for models with a chat template")
    # fmt: on


def draw(args):
    """write items.jsonl: two answers to each prompt, from one model or from two"""
    from common import load_tokenizer
    from parts.answers import read_prompts, some_prompts

    out = Path(args.out)
    for name in ("items.jsonl", "args.json"):  # of a session, or of a training run
        if (out / name).exists():
            raise UserError(f"--out {out}: already holds {name}; choose another --out")
    rows = read_prompts(args.prompts, "--prompts", args.chat)
    rows = [row for row in rows if args.split in (None, row.get("split"))]
    if len({type(row["prompt"]) for row in rows}) != 1:
        reason = f'with "split": "{args.split}"' if args.split else "all texts or all messages"
        raise UserError(f"--prompts {args.prompts}: expected prompts {reason}")
    rows = some_prompts(rows, args.limit) if args.limit else rows
    flag, model_b = ("--model-b", args.model_b) if args.model_b else ("--model", args.model)
    load_tokenizer(model_b, flag)  # a wrong name is told before the other model has answered
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    texts = zip(
        sample("--model", args.model, rows, args, seed=2 * args.seed),
        sample(flag, model_b, rows, args, seed=2 * args.seed + 1),
    )
    items = []
    for row, (a, b) in zip(rows, texts, strict=True):
        a, b = (text if text.strip() else "(no answer)" for text in (a, b))  # it can lose
        if a == b:
            continue
        if not isinstance(row["prompt"], str):
            a, b = ([{"role": "assistant", "content": text}] for text in (a, b))
        people = [c for c in row.get("candidates") or [] if c.get("in") == "prompt"]
        item = {"id": f"item-{len(items):05d}", "task": row.get("task"), "prompt": row["prompt"]}
        item |= {"a": a, "b": b, "a_model": args.model, "b_model": model_b, "candidates": people}
        items.append(item)
    print(f"{len(items)} items from {len(rows)} prompts; left out: {len(rows) - len(items)} with equal answers")
    if not items:
        raise UserError(f"--temperature {args.temperature:g}: all answers are equal; raise it")
    files.write_jsonl(out / "items.jsonl", items, mode=files.PRIVATE)
    print(f"wrote {out / 'items.jsonl'}\nnext: python annotate.py --out {out}")


def sample(flag, name, rows, args, seed):
    """One answer to each prompt, as text."""
    import common
    from parts import parallel, sampling

    tokenizer, (device, dtype) = common.load_tokenizer(name, flag), parallel.pick(args.device, "auto")
    policy = common.Policy(common.load_model(name, device, dtype, flag=flag), dtype)
    room = common.max_positions(policy.model.config) - args.max_new_tokens
    if room < 1:
        raise UserError(f"--max-new-tokens {args.max_new_tokens}: no room for a prompt; lower it")
    ids = [common.encode_prompt(tokenizer, row["prompt"], room) for row in rows]
    common.check_ids(policy.model.config, *ids)
    print(f"drawing {len(rows)} answers from {name}", flush=True)
    settings = dict(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=seed)
    rollout = sampling.sample(policy, tokenizer, ids, **settings)
    if cut := len(rows) - sum(rollout.finished):
        limit = f"--max-new-tokens {args.max_new_tokens}"
        print(f"{cut} of {len(rows)} answers were cut at {limit}; raise it")
    return rollout.texts
