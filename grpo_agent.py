"""grpo_agent.py: an environment of several turns in, a policy out that does better in it.

Objective    maximise E[R] − β·KL(π‖π_ref), R the reward of a whole episode
Algorithm    (1) rollout: G episodes from each of P seeds; all live ones take a turn together
             (2) reward: the environment's own, or RULER's, which compares the group's episodes
             (3) advantages: reward − mean of the group; every turn of an episode has the same one
             (4) update: clipped policy gradient over the policy's own tokens, see parts/grpo.py
             (5) every --eval-every steps: episodes from held-out seeds; the alarms of watch.py
Conventions  an action is a token that the policy drew, its end of turn included; the environment's
             words are context and are never trained; episode g of seed p stands at p·G + g;
             training, validation and test seeds are disjoint
Left out     1. a value for each turn: the group's mean is the only baseline
             2. tool calls of a chat template: an environment reads the text of a turn
             3. the key-value cache between turns: each turn reads the episode anew
             4. a test at the end: `play` with seeds from 2·10⁹ on plays what nothing was chosen by
Run          python grpo_agent.py
             python grpo_agent.py play --policy runs/grpo_agent --seed 7
             python grpo_agent.py --env envs/twenty48.py:TwentyFortyEight --env-args '{"size": 4}'
             torchrun --nproc-per-node 8 grpo_agent.py --fsdp --model Qwen/Qwen2.5-7B-Instruct
Writes       a model folder, args.json, metrics.jsonl, samples.jsonl, rollouts.jsonl, checkpoint/
To copy      `Episode` and what follows it: a conversation as the tokens that the policy saw, and
             those that it drew; the math is in parts/grpo.py
Reference    Shao et al. 2024, arXiv 2402.03300, eq. 3 (GRPO); clip range: DAPO, 2503.14476;
             no division by the deviation: Dr. GRPO, 2503.20783; RULER and 2048: OpenPipe ART
Axes         P seeds, G episodes per seed, N rows, one or more per episode, T tokens
"""

import argparse
import functools
import json
import math
import random
import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from common import Policy, encode, encode_prompt, end_ids, load_model, load_tokenizer, render
from parts import engine, grpo, rollouts
from parts.answers import load_policy, prompt_room, scored
from parts.files import (
    OUT_OF_MEMORY,
    UserError,
    brief,
    command,
    load_function,
    number,
    shown_value,
    trainer_parser,
    write_jsonl,
)
from parts.grading import add_ruler_arguments, order_difference
from parts.judging import Judge, add_judge_arguments
from parts.messages import check_text, visible
from parts.parallel import all_sum, gather, pick, rank, world
from parts.sampling import sample, tensors, training_rows

RATES = 3e-4, 1e-5, 2e-4  # below 100 M parameters (worked on data/tiny-base), above, with LoRA
STEPS = 40  # of an epoch, and so of a run without --steps; seeds have no end
VAL_SEEDS, TEST_SEEDS = 10**9, 2 * 10**9  # training seeds are drawn below 10⁹
SHOWN = 3  # episodes that `play` prints
WRITTEN = "seed messages reward advantage reason metrics truncated".split()  # to rollouts.jsonl
HEADLINE = "val/score", "val/reward"


# ---- the arguments ----


def parse_args(argv=None):
    parser = trainer_parser(
        "grpo_agent.py [play] --env my_env.py:MyEnv --out runs/agent",
        "GRPO on episodes of several turns; `grpo_agent.py play --policy MODEL` prints some.",
        "runs/grpo_agent", RATES,
    )  # fmt: skip
    add, whole = parser.add_argument, number(int, at_least=1)
    # fmt: off
    add("command", nargs="?", choices=("train", "play"), default="train", help=argparse.SUPPRESS)
    add("--env", default="envs/interview.py:Interview", help="FILE:CLASS, see docs/train.md")
    add("--env-args", default="{}", help="keyword arguments of the class as JSON, such as '{\"k\": 4}'")
    add("--reward", choices=("env", "ruler"), default="env", help="the environment's own, or RULER's, which compares a group's episodes")
    add("--val-episodes", type=whole, default=64, help="held-out seeds of a validation, one episode each")
    add("--eval-temperature", type=number(at_least=0), default=1.0, help="temperature of validation and play; 0 is greedy")
    add("--policy", default="random", help="play: a baseline of the environment or a model folder")
    add("--episodes", type=whole, default=1, help="play: how many, from the seed --seed on")
    add("--write", help="play: also write the policy's turns to this file, as rows for sft.py")
    # fmt: on
    grpo.add_group_arguments(parser)
    add_ruler_arguments(parser)
    add_judge_arguments(parser)
    parser.set_defaults(save_every=10)
    args = parser.parse_args(argv)
    grpo.check_groups(args)
    return args


# ---- the environment ----
# The environment is the data. It has name, max_turns, history ("all", or a number of exchanges),
# val_key (the entry of info that is success itself), baselines (name → policy: (env, rng) → text),
# and
#     reset(seed) → messages;   step(text) → (message or None, reward, done, info)
# All randomness comes from its own random.Random(seed). info is flat numbers; that of the last turn
# is logged. Optional: run_out() → (reward, info), asked when turns or context are used up;
# prose = False, if the turns are not sentences. What the class raises later is its user's
# own, and comes with its traceback.


def environment(args):
    """A function without arguments that makes the environment of --env."""
    made = load_function(args.env, "--env")
    try:
        make = functools.partial(made, **json.loads(args.env_args))
        make()  # what is wrong is said now, before a model is loaded
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"--env {args.env} --env-args '{args.env_args}': {brief(error)}") from error
    return make


# ---- an episode, as the tokens that the policy saw and drew ----
# Each turn keeps the ids it was drawn after, the ids drawn and their log-probs; the rows that are
# trained are put together from these, so nothing that was drawn is encoded again:
#
# turn 1   prompt ▮drawn                            ▮ an action: trained, with its log-prob
# turn 2   prompt  drawn context ▮drawn             context: the template's and the environment's
# row      prompt ▮drawn context ▮drawn             one row, as turn 2 begins with turn 1


@dataclass(eq=False)
class Episode:
    """One conversation of a policy with an environment."""

    seed: int
    number: int  # among the episodes of all processes: what its draws come from
    env: object
    rng: random.Random  # a baseline's draws
    messages: list = field(default_factory=list)
    draws: list = field(default_factory=list)  # (prompt ids, drawn ids, log-probs) of each turn
    reward: float = 0.0  # the sum over its turns, or RULER's; None: the judge failed
    advantage: float = None
    metrics: dict = field(default_factory=dict)  # the environment's last info
    truncated: bool = False  # a turn was cut, or the context was full
    reason: str = None  # RULER's

    def texts(self):
        """What the policy wrote, turn by turn."""
        return [m["content"] for m in self.messages if m["role"] == "assistant"]

    def tokens(self):
        """How many the policy drew."""
        return sum(len(drawn) for _, drawn, _ in self.draws)

    def hear(self, *messages):
        """What the environment says; ValueError unless these are messages."""
        check_text({"messages": list(messages)}, "messages")
        self.messages += messages

    def note(self, reward, info):
        """Add the reward of a turn and remember its info; ValueError for what is not finite."""
        self.reward += reward
        self.metrics |= info
        if not all(map(math.isfinite, (self.reward, *self.metrics.values()))):
            raise ValueError(f"reward {reward}, info {info}: expected finite numbers")

    def take_turn(self, text):
        """One turn: the environment sees what stands behind </think>. Returns whether the episode
        goes on. text None: the context is full; the episode ends as if its turns had run out."""
        env, done, self.truncated = self.env, False, self.truncated or text is None
        if text is not None:
            self.messages.append({"role": "assistant", "content": text})
            message, reward, done, info = env.step(visible(text))
            self.note(reward, info)
            if not done:
                self.hear(message)
        ran_out = text is None or len(self.texts()) >= env.max_turns
        if ran_out and not done and hasattr(env, "run_out"):
            self.note(*env.run_out())
        return not (done or ran_out)

    def transcript(self):
        """The episode as lines to read, > before the policy's, its reward at the end."""
        lines = [f"seed {self.seed}"]
        for m in self.messages:
            mark = ">" if m["role"] == "assistant" else " "
            lines.append(f"  {mark} " + m["content"].replace("\n", "\n    "))
        numbers = (f"  {key} {x:.3g}" for key, x in self.metrics.items() if x)
        return "\n".join([*lines, f"  reward {self.reward:.2f}{''.join(numbers)}"])

    def rows_to_imitate(self, history):
        """Rows for sft.py: each turn, after what the policy saw of the episode then."""
        return [
            {"prompt": shown_messages(self.messages[:i], history), "completion": [message]}
            for i, message in enumerate(self.messages)
            if message["role"] == "assistant"
        ]


def shown_messages(messages, history):
    """What a turn sees: all, or system messages, the last k exchanges and the newest message.

    >>> roles = "system user assistant user".split()
    >>> [m["role"] for m in shown_messages([{"role": role} for role in roles], 0)]
    ['system', 'user']
    """
    if history == "all":
        return messages
    exchanges = [m for m in messages if m["role"] != "system"]
    return [m for m in messages if m["role"] == "system"] + exchanges[-2 * history - 1 :]


# ---- its tokens ----


def continued_ids(tokenizer, messages, ids):
    """`ids` of a conversation up to a drawn answer, and those of what the template writes behind
    it, now that another message follows. Nothing that was drawn is encoded again.

    messages   the conversation; the last but one is the answer

    None if the template shows the past otherwise now (Qwen3 drops the thoughts of earlier turns).
    """
    opened = render(tokenizer, messages[:-2], add_generation_prompt=True) + messages[-2]["content"]
    whole = render(tokenizer, messages, add_generation_prompt=True)
    if not whole.startswith(opened):
        return None
    new, ends = encode(tokenizer, whole[len(opened) :], rendered=True), end_ids(tokenizer)
    is_drawn = ids[-1] in ends and new[0] in ends  # the end of turn, which the template repeats
    return ids + new[is_drawn:]


def next_prompt(tokenizer, episode):
    """Ids that the next turn answers: those so far and the new message's. If the history is cut or
    the template rewrites earlier turns, the prompt is encoded anew."""
    ids, history = None, episode.env.history
    if history == "all" and episode.draws:
        prompt, drawn, _ = episode.draws[-1]
        ids = continued_ids(tokenizer, episode.messages, prompt + drawn)
    return ids or encode_prompt(tokenizer, shown_messages(episode.messages, history))


# ---- the rollout ----


def play(args, make, seeds, player, temperature=1.0, seed=0):
    """An `Episode` from each seed; all live ones take a turn together.

    player   (sample, policy, tokenizer), or a baseline of the environment: (env, rng) → text

    An episode depends on its seed, its number and `seed` alone, not on who is played beside it.
    With several processes each plays its share and receives all episodes.
    """
    local = list(enumerate(seeds))[rank() :: world()]
    episodes = [Episode(s, number, make(), random.Random(f"policy {s}")) for number, s in local]
    for episode in episodes:
        episode.hear(*episode.env.reset(episode.seed))
    live, turn = episodes, 0
    with ThreadPoolExecutor(32) as pool:  # slow tools do not wait for one another
        while all_sum(len(live)):  # as many turns on all ranks: a forward may be a collective
            turn += 1
            if isinstance(player, tuple):
                texts = draw_turns(args, *player, live, temperature, 1000 * seed + turn)
            else:
                texts = [player(episode.env, episode.rng) for episode in live]
            live = list(compress(live, pool.map(Episode.take_turn, live, texts)))
    for episode in episodes:
        episode.env = None  # a user's class may refuse to be sent to another process
    return sorted(gather(episodes), key=lambda episode: episode.number)


def training_seeds(args, step):
    """The seeds of a step's N episodes, a function of --seed and step: no cursor to resume."""
    seeds = np.random.default_rng([args.seed, step]).choice(
        VAL_SEEDS, args.groups_per_batch, replace=False
    )
    return seeds.repeat(args.group_size).tolist()


def draw_turns(args, sample, policy, tokenizer, live, temperature, seed):
    """A text for each live episode; None where the context is full."""
    room = prompt_room(args, policy.model.config)
    prompts = {
        episode: ids for episode in live if len(ids := next_prompt(tokenizer, episode)) <= room
    }
    drawn = sample(
        policy, tokenizer, [*prompts.values()], 1, args.max_new_tokens, temperature, seed,
        numbers=[episode.number for episode in prompts],
    )  # fmt: skip
    for i, (episode, ids) in enumerate(prompts.items()):
        episode.draws.append((ids, drawn.answer_ids[i], drawn.logps[i]))
        episode.truncated |= not drawn.finished[i]
    texts = dict(zip(prompts, drawn.texts))
    return [texts.get(episode) for episode in live]


# ---- the loop ----


def rule(args, judge, episodes):
    """Put RULER's score in the place of each episode's reward: None where the judge failed, for a
    whole group. Returns the judge's metrics. Rank 0 asks for all."""
    talks = [episode.messages for episode in episodes]
    grades = gather([] if rank() else grpo.ruler_grades(args, judge, talks))
    for episode, grade in zip(episodes, grades, strict=True):
        episode.reward, episode.reason = grade.score, grade.reason or grade.error
    row = judge.metrics() | {"judge/order_disagreement": order_difference(grades)}
    return gather([row])[0]


def episode_row(episodes):
    """Means of the environment's info, over the episodes that have an entry, and of the turns."""
    rows = [{"turns": len(e.texts())} | e.metrics for e in episodes]
    keys = sorted(set().union(*rows))
    return {f"env/{key}": fmean(row[key] for row in rows if key in row) for key in keys}


def lengths(episodes):
    """(tokens that the policy drew, was something cut?) of each episode."""
    return [e.tokens() for e in episodes], [e.truncated for e in episodes]


def scores(episodes, env):
    """{"val/score", "val/reward"} with their intervals, see `scored`; the score is the
    environment's val_key, 0 where no turn was taken."""
    values = [episode.metrics.get(env.val_key, 0.0) for episode in episodes]
    return scored("val/score", values) | scored("val/reward", [e.reward for e in episodes])


def write_episodes(run, split, episodes):
    """Add the episodes to rollouts.jsonl, every word, to be read by people."""
    for e in episodes:
        row = {key: getattr(e, key) for key in WRITTEN}
        run.write("rollouts.jsonl", [{"split": split, **row, "tokens": e.tokens()}])


def evaluate(args, run, player, make):
    """Play and log an episode from each validation seed; the first one is shown."""
    env, seeds = make(), range(VAL_SEEDS, VAL_SEEDS + args.val_episodes)
    episodes = play(args, make, seeds, player, args.eval_temperature, args.seed)
    metrics = scores(episodes, env) | rollouts.val_row(*lengths(episodes))
    run.evaluation(
        metrics | episode_row(episodes),
        [{"prompt": env.name, "answer": episodes[0].transcript()}],
    )
    write_episodes(run, "validation", episodes)


# ---- play ----


def play_command(args, make):
    """Print episodes of a baseline or a model, and their mean; --write: rows for sft.py."""
    env, seeds = make(), range(args.seed, args.seed + args.episodes)
    if args.write and Path(args.write).exists() and not args.overwrite:
        raise UserError(f"--write {args.write}: exists; pass --overwrite to replace it")
    player = env.baselines.get(args.policy)
    if not player:
        flag = f"--policy, a model folder or one of {', '.join(env.baselines)};"
        device, dtype = pick(args.device, args.dtype)
        model = load_model(args.policy, device, dtype, flag=flag)
        player = sample, Policy(model, dtype), load_tokenizer(args.policy, flag)
    episodes = play(args, make, seeds, player, args.eval_temperature, args.seed)
    for episode in episodes[:SHOWN]:
        print(f"{env.name}, {args.policy}, {episode.transcript()}")
    row = scores(episodes, env)
    means = "  ".join(f"{key} {shown_value(row, key)}" for key in HEADLINE)
    print(f"mean of {len(episodes)}: {means}")
    if args.write:
        write_jsonl(args.write, [r for e in episodes for r in e.rows_to_imitate(env.history)])
        print(f"next: python sft.py {shlex.join(['--data', args.write])} --out runs/agent_start")


# ---- the run ----


def main(argv=None):
    args = parse_args(argv)
    make = environment(args)
    if args.command == "play":
        return play_command(args, make)
    env, g = make(), args.group_size
    run = rollouts.WatchedRun("grpo_agent", args, HEADLINE)
    judge = Judge(args, args.out) if args.reward == "ruler" else None
    tokenizer = load_tokenizer(args.model)
    policy, reference = load_policy(run, reference=args.beta)
    opening = encode_prompt(tokenizer, env.reset(VAL_SEEDS))
    run.start({"policy": policy}, tokenizer, RATES, STEPS, [opening])
    print(f"step       {args.groups_per_batch} seeds × {g} episodes of {env.name}, each of at most "
          f"{env.max_turns} turns")  # fmt: skip
    run.watch(args.val_episodes)
    player = engine.sampler(args, run), policy, tokenizer
    if run.step == 0:
        seeds = training_seeds(args, 0)[: 2 * g]
        episodes = play(args, make, seeds, player, args.temperature, args.seed)
        rows = sum((training_rows(episode.draws) for episode in episodes), [])
        if not rows:
            raise UserError(f"--max-length {args.max_length}: no opening fits in it with a turn")
        run.forecast(1 / args.groups_per_batch)  # two groups; an update takes as long again
        rollouts.preflight(run, policy, reference, tokenizer, tensors(rows, run.device))
        evaluate(args, run, player, make)

    for step in run.steps():
        # (1) rollout: G episodes from each of P seeds; all live ones take a turn together
        seeds, draws = training_seeds(args, step), args.seed * 10**6 + step
        episodes = play(args, make, seeds, player, args.temperature, draws)
        # (2) reward: the environment's own, or RULER's, which compares the group's episodes
        spent = rule(args, judge, episodes) if judge else {}
        rewards = np.array([e.reward for e in episodes], np.float32)  # None is NaN
        rewards_PG = torch.from_numpy(rewards).view(-1, g)
        # (3) advantages: reward − mean of the group; every turn of an episode has the same one
        advantages_PG = grpo.group_advantages(rewards_PG, args.scale)
        for episode, advantage in zip(episodes, advantages_PG.view(-1).tolist()):
            episode.advantage = advantage
        # (4) update: clipped policy gradient over the policy's own tokens, see parts/grpo.py
        rows = [training_rows(episode.draws) for episode in episodes]
        places = np.repeat(range(len(rows)), [*map(len, rows)])  # of each row, its episode
        b, names = tensors(sum(rows, []), run.device), [f"seed {seed}" for seed in seeds]
        metrics = grpo.update(run, policy, reference, b, places, advantages_PG, names)
        metrics |= grpo.group_row(rewards_PG, advantages_PG) | episode_row(episodes) | spent
        metrics |= rollouts.length_row(*lengths(episodes), int(b["attention_mask"].sum()))
        if getattr(env, "prose", True):
            metrics |= rollouts.text_row(["\n".join(e.texts()) for e in episodes])
        run.log(metrics)
        write_episodes(run, "train", episodes)
        # (5) every --eval-every steps: episodes from held-out seeds; the alarms of watch.py
        if run.evaluates(step):
            evaluate(args, run, player, make)
        run.end_step()

    return run.finish(
        "grpo_agent.py", "play", "--env", args.env, "--env-args", args.env_args,
        "--policy", args.out, "--seed", str(TEST_SEEDS), "--episodes", "128",
    )  # fmt: skip


if __name__ == "__main__":
    command(main, OUT_OF_MEMORY)
