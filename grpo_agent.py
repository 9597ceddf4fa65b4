"""grpo_agent.py: an environment of several turns in, a policy out that does better in it.

Objective    maximise E[R] − β·KL(π‖π_ref), R the reward of a whole episode
Algorithm    (1) rollout: G episodes from each of P seeds; all live ones take a turn together
             (2) reward: the environment's own, or RULER's, which compares the group's episodes
             (3) advantages: reward − mean of the group; every turn of an episode has the same one
             (4) update: clipped policy gradient over the policy's own tokens, see parts/grpo.py
             (5) now and then: episodes from held-out seeds; the alarms of watch.py
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
To copy      parts/episodes.py: a conversation as the tokens that the policy saw, and those that it
             drew; the math is in parts/grpo.py
Reference    Shao et al. 2024, arXiv 2402.03300, eq. 3 (GRPO); clip range: DAPO, 2503.14476;
             no division by the deviation: Dr. GRPO, 2503.20783; RULER and 2048: OpenPipe ART
Axes         P seeds, G episodes per seed, N rows, one or more per episode, T tokens
"""

import argparse
import functools
import json
import random
import shlex
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import compress
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from common import Policy, encode_prompt, load_model, load_tokenizer
from parts import engine, flags, grpo, rollouts, runs, sampling
from parts.answers import scored
from parts.comparing import ALONE, add_ruler_arguments, order_difference, ruler_groups
from parts.episodes import Episode, next_prompt, training_rows
from parts.files import UserError, brief, command, load_function, number, shown_value, write_jsonl
from parts.judging import Judge, add_judge_arguments
from parts.parallel import all_sum, gather, pick, rank, world
from watch import add_watch_arguments

RATES = 3e-4, 1e-5, 2e-4  # below 100 M parameters (worked on data/tiny-base), above, with LoRA
STEPS = 40  # of an epoch, and so of a run without --steps; seeds have no end
VAL_SEEDS, TEST_SEEDS = 10**9, 2 * 10**9  # training seeds are drawn below 10⁹
SHOWN = 3  # episodes that `play` prints
SHOW = ("reward/mean", "reward/frac_mixed", "env/turns", "length/mean", "entropy")  # on the bar
HEADLINE = ("val/score", "val/reward")


# ---- the arguments ----


def parse_args(argv=None):
    example = "grpo_agent.py [play] --env my_env.py:MyEnv --out runs/agent"
    text = "GRPO on episodes of several turns; `grpo_agent.py play --policy MODEL` prints some."
    parser = flags.parser(example, text, "runs/grpo_agent", RATES)
    add, whole = parser.add_argument, number(int, at_least=1)
    # fmt: off
    add("command", nargs="?", choices=("train", "play"), default="train", help=argparse.SUPPRESS)
    add("--env", default="envs/interview.py:Interview", help="FILE:CLASS, see docs/agents.md")
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
    add_watch_arguments(parser)
    parser.set_defaults(eval_every=5, save_every=10)
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
    rng = np.random.default_rng([args.seed, step])
    seeds = rng.choice(VAL_SEEDS, args.groups_per_batch, replace=False)
    return seeds.repeat(args.group_size).tolist()


def draw_turns(args, sample, policy, tokenizer, live, temperature, seed):
    """A text for each live episode; None where the context is full."""
    room = rollouts.prompt_room(args, policy.model.config)
    prompts = {episode: next_prompt(tokenizer, episode) for episode in live}
    prompts = {episode: ids for episode, ids in prompts.items() if len(ids) <= room}
    drawn = sample(
        policy, tokenizer, [*prompts.values()], 1, args.max_new_tokens, temperature, seed,
        numbers=[episode.number for episode in prompts], alone=True,
    )  # fmt: skip
    for i, (episode, ids) in enumerate(prompts.items()):
        episode.draws.append((ids, drawn.answer_ids[i], drawn.logps[i]))
        episode.truncated |= not drawn.finished[i]
    texts = dict(zip(prompts, drawn.texts))
    return [texts.get(episode) for episode in live]


# ---- the loop ----


def rule(args, judge, episodes):
    """Put RULER's score in the place of each episode's reward: None where the judge failed, for a
    whole group. Returns the judge's metrics."""
    before, g = Counter(judge.counts), args.group_size
    talks = [episode.messages for episode in episodes]
    groups = [talks[i : i + g] for i in range(0, len(talks), g)]
    # rank 0 asks for all
    settings = judge, args.ruler_rubric, args.judge_passes
    grades = sum(gather([] if rank() else ruler_groups(groups, *settings)), [])
    for episode, grade in zip(episodes, grades, strict=True):
        episode.reason = grade.reason or grade.error
        # equal episodes everywhere: nothing to compare, so nothing to learn
        episode.reward = 0.0 if grade.error == ALONE else grade.score
    row = judge.metrics(before) | {"judge/order_disagreement": order_difference(grades)}
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
    rows = [
        {"split": split, "seed": e.seed, "messages": e.messages, "reward": e.reward,
         "advantage": e.advantage, "reason": e.reason, "metrics": e.metrics,
         "tokens": e.tokens(), "truncated": e.truncated}
        for e in episodes
    ]  # fmt: skip
    run.write("rollouts.jsonl", rows)


def evaluate(args, run, guard, player, make):
    """Play and log an episode from each validation seed; the first one is shown."""
    env, seeds = make(), range(VAL_SEEDS, VAL_SEEDS + args.val_episodes)
    episodes = play(args, make, seeds, player, args.eval_temperature, args.seed)
    metrics = scores(episodes, env) | rollouts.val_row(*lengths(episodes))
    shown = {"prompt": env.name, "answer": episodes[0].transcript()}
    guard.evaluation(metrics | episode_row(episodes), [shown])
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
        player = sampling.sample, Policy(model, dtype), load_tokenizer(args.policy, flag)
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
    run = runs.Run("grpo_agent", args, SHOW, HEADLINE)
    judge = Judge(args, args.out) if args.reward == "ruler" else None
    tokenizer = load_tokenizer(args.model)
    policy, reference = rollouts.load_policy(args, run)
    opening = encode_prompt(tokenizer, env.reset(VAL_SEEDS))
    optimizer = run.start({"policy": policy}, tokenizer, RATES, STEPS, [opening])
    print(f"step       {args.groups_per_batch} seeds × {g} episodes of {env.name}, each of at most "
          f"{env.max_turns} turns")  # fmt: skip
    guard = rollouts.Guard(run, args.val_episodes)
    player, seconds = (engine.sampler(args, run), policy, tokenizer), None
    if run.step == 0:
        seeds, start = training_seeds(args, 0)[: 2 * g], time.perf_counter()
        episodes = play(args, make, seeds, player, args.temperature, args.seed)
        rows = sum((training_rows(episode.draws) for episode in episodes), [])
        if not rows:
            raise UserError(f"--max-length {args.max_length}: no opening fits in it with a turn")
        rollouts.preflight(run, policy, reference, tokenizer, rollouts.pack(rows, run.device))
        # two groups, once; an update takes as long again as playing and reading them
        seconds = (time.perf_counter() - start) * args.groups_per_batch
        evaluate(args, run, guard, player, make)

    for step in run.steps(seconds):
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
        b, names = rollouts.pack(sum(rows, []), run.device), [f"seed {seeds[i]}" for i in places]
        groups, advantages = places // g, advantages_PG.view(-1)[places]
        metrics = grpo.update(args, run, policy, reference, optimizer, b, groups, advantages, names)
        metrics |= grpo.group_row(rewards_PG, advantages_PG) | episode_row(episodes) | spent
        metrics |= rollouts.length_row(*lengths(episodes), int(b["attention_mask"].sum()))
        if getattr(env, "prose", True):
            metrics |= rollouts.text_row(["\n".join(e.texts()) for e in episodes])
        guard.log(metrics)
        write_episodes(run, "train", episodes)
        # (5) now and then: episodes from held-out seeds; the alarms of watch.py
        if run.evaluates(step):
            evaluate(args, run, guard, player, make)
        guard.end_step()

    given = shlex.join(["--env", args.env, "--env-args", args.env_args, "--policy", args.out])
    return guard.finish(f"python grpo_agent.py play {given} --seed {TEST_SEEDS} --episodes 128")


if __name__ == "__main__":
    command(main, flags.OUT_OF_MEMORY)
