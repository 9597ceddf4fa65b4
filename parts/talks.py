"""parts/talks.py: whole conversations of an environment, side by side, and the rows of their votes.

An item's prompt is what the environment opened with; a and b are the turns that followed, of two
episodes from one seed, so that the same candidate sits in both.
"""

from argparse import Namespace

from parts import files
from parts.draw import new_items_file
from parts.files import UserError
from parts.reports import load_policy
from parts.votes import is_talk, ordinary_votes, other, parting, plain

EPISODES = 40  # seeds without --limit


def add_arguments(parser):
    """The flags of `annotate.py draw` for whole conversations."""
    add = parser.add_argument
    # fmt: off
    add("--env", help="FILE.py:CLASS as of grpo_agent.py: two episodes from each seed, whole conversations; --model may name a baseline")
    add("--env-args", default="{}", metavar="JSON", help="keyword arguments of that class (default none)")
    # fmt: on


def to_items(episodes, episodes_b, names, task):
    """Items of the seeds on which both episodes went through and differ; names: of a and b."""
    items = []
    for first, second in zip(episodes, episodes_b, strict=True):
        if first.error or second.error or first.messages == second.messages:
            continue
        if not (first.texts() and second.texts()):
            continue
        roles = [message["role"] for message in first.messages]
        opening = roles.index("assistant")
        item = {"id": f"item-{len(items):05d}", "task": task, "prompt": first.messages[:opening]}
        for side, episode, name in zip("ab", (first, second), names):
            turns = episode.messages[opening:]
            while turns[-1]["role"] != "assistant":  # its context was full
                turns = turns[:-1]
            item |= {side: turns, f"{side}_model": name}
        items.append(item)
    return items


def to_turns(items, votes):
    """Rows of turns.jsonl, {"prompt", "completion", "label"}: each turn of the interviewer from
    where the conversations part, good in the better one and bad in the other; none of a blank turn.

    >>> say = lambda role, text: {"role": role, "content": text}
    >>> a, b = ([say("assistant", text), say("user", "Two."), say("assistant", "SUMMARY")]
    ...         for text in ("Tell me about audits.", "Are you married?"))
    >>> items = {"x": {"prompt": [say("user", "Interview.")], "a": a, "b": b}}
    >>> rows = to_turns(items, [{"item_id": "x", "choice": "a"}])
    >>> [(len(row["prompt"]), row["label"]) for row in rows]
    [(1, True), (3, True), (1, False), (3, False)]
    """
    rows = []
    for vote in ordinary_votes(votes):
        item, better = items[vote["item_id"]], vote["choice"]
        if better not in ("a", "b") or not is_talk(item):
            continue
        for side in (better, other(better)):
            messages, opening = [*item["prompt"], *item[side]], len(item["prompt"])
            for n in range(opening + parting(item), len(messages)):
                if messages[n]["role"] == "assistant" and messages[n]["content"].strip():
                    row = {"prompt": plain(messages[:n]), "completion": plain(messages[n : n + 1])}
                    rows.append(row | {"label": side == better})
    return rows


def draw(args, agent):
    """Write items.jsonl: two episodes of --env from each of --limit seeds; agent: grpo_agent.py."""
    make = agent.environment(args)
    env, seeds = make(), range(args.seed, args.seed + (args.limit or EPISODES))
    if env.history != "all":
        reason = f"its policy sees {env.history} exchanges, and people would see all"
        fix = "votes need an environment with history all"
        raise UserError(f"--env {args.env} {args.env_args}: {reason}; {fix}")

    def episodes(flag, name, seed):
        print(f"playing {len(seeds)} episodes of {name}", flush=True)
        if name in env.baselines:
            return agent.play(make, seeds, agent.baseline_act(env.baselines[name]))
        policy, tokenizer = load_policy(name, args, flag)
        settings = Namespace(max_length=10**9, max_new_tokens=args.max_new_tokens)
        most = len(seeds)  # an episode that raises is one without an item
        return agent.play_model(
            settings, policy, tokenizer, make, seeds, args.temperature, seed, most=most
        )

    path, names = new_items_file(args.out), (args.model, args.model_b or args.model)
    flag = "--model-b" if args.model_b else "--model"
    if names[1] not in env.baselines:
        load_policy(names[1], args, flag)  # known before an hour of episodes
    first = episodes("--model", names[0], 2 * args.seed)
    second = episodes(flag, names[1], 2 * args.seed + 1)
    items, errors = to_items(first, second, names, env.name), [t.error for t in (*first, *second)]
    print(f"{len(seeds)} seeds → {len(items)} items; the others: episodes alike, or with an error")
    if any(errors):
        errors = [*filter(None, errors)]
        print(f"{len(errors)} episodes raised an error, the first: {errors[0]}")
    if not items:
        raise UserError(f"--model {args.model}: no two episodes that differ; add --model-b")
    files.write_jsonl(path, items, mode=files.PRIVATE)
    print(f"wrote {path}\nnext: python annotate.py --out {args.out}")
