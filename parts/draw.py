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

    out, model_b = Path(args.out), args.model_b or args.model
    if (out / "items.jsonl").exists():
        raise UserError(f"--out {out}: already holds items.jsonl; choose another --out")
    rows = read_prompts(args.prompts, "--prompts", args.chat)
    rows = [row for row in rows if args.split in (None, row.get("split"))]
    if len({type(row["prompt"]) for row in rows}) != 1:
        reason = f'with "split": "{args.split}"' if args.split else "all texts or all messages"
        raise UserError(f"--prompts {args.prompts}: expected prompts {reason}")
    rows = some_prompts(rows, args.limit) if args.limit else rows
    load_tokenizer(model_b, "--model-b")  # a wrong name is told before --model has answered
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    answers_a = sample("--model", args.model, rows, args, seed=2 * args.seed)
    answers_b = sample("--model-b", model_b, rows, args, seed=2 * args.seed + 1)
    models, items = {"a_model": args.model, "b_model": model_b}, []
    for row, a, b in zip(rows, answers_a, answers_b, strict=True):
        if a != b:
            asked = {key: row.get(key) for key in ("task", "prompt", "candidates")}
            items.append({"id": f"item-{len(items)}", **asked, "a": a, "b": b, **models})
    print(f"{len(rows)} prompts; left out: {len(rows) - len(items)} with equal answers")
    if not items:
        raise UserError(f"--temperature {args.temperature:g}: all answers are equal; raise it")
    files.write_jsonl(out / "items.jsonl", items, mode=files.PRIVATE)
    print(f"{out / 'items.jsonl'}: {len(items)} items\nnext: python annotate.py --out {out}")


def sample(flag, name, rows, args, seed):
    """One answer to each prompt, of the prompt's kind: texts, or lists of one message."""
    import common
    from parts import parallel, sampling

    tokenizer, (device, dtype) = (
        common.load_tokenizer(name, flag),
        parallel.pick(args.device, "auto"),
    )
    model, most = common.load_model(name, device, dtype, flag=flag), args.max_new_tokens
    ids = [common.encode_prompt(tokenizer, row["prompt"]) for row in rows]
    longest = max(map(len, ids))
    if longest + most > common.max_positions(model.config):
        reason = f"the longest prompt has {longest} tokens, and {name} no positions for both"
        raise UserError(f"--max-new-tokens {most}: {reason}; lower it, or shorten the prompt")
    print(f"drawing {len(rows)} answers from {name}", flush=True)
    policy = common.Policy(model, dtype)
    rollout = sampling.sample(
        policy, tokenizer, ids, max_new_tokens=most, temperature=args.temperature, seed=seed
    )
    if cut := len(rows) - sum(rollout.finished):
        print(f"{cut} of {len(rows)} answers were cut at --max-new-tokens {most}; raise it")
    texts = [text if text.strip() else "(no answer)" for text in rollout.texts]  # it can lose
    if isinstance(rows[0]["prompt"], str):
        return texts
    return [[{"role": "assistant", "content": text}] for text in texts]
