"""grpo_agent.py: an environment of several turns in, a policy out that does better in it; episodes of one seed are compared.

Objective    maximise E[R] − β·KL(π‖π_ref), R the reward of a whole episode
Algorithm    (1) rollout: G episodes from each of P seeds, all live ones take a turn together, log-probs kept
             (2) reward: the environment's own, RULER's, or both; an episode that raised has none
             (3) advantages: reward − mean of the group; every turn of an episode carries the same one
             (4) update: clipped policy gradient over the policy's own tokens, the environment's are context
             (5) now and then: held-out seeds, beside the baselines; the alarms of watch.py
Conventions  an action is a token that the policy sampled, end of turn included; the episodes of a group meet the same
             seed and are neighbours: episode g of seed p stands at p·G + g; training, validation and test seeds are disjoint
Left out     1. a value for each turn: all turns share the episode's advantage   2. tools and parallel calls
             3. the key-value cache between turns: each turn reads the episode anew
Run          python grpo_agent.py
             python grpo_agent.py play --policy runs/grpo_agent --seed 7
             python grpo_agent.py --model Qwen/Qwen3-0.6B --interview-text full --max-length 2048 --max-new-tokens 256
             torchrun --nproc-per-node 8 grpo_agent.py --fsdp --model Qwen/Qwen2.5-7B-Instruct
Writes       a model folder, args.json, metrics.jsonl, rollouts.jsonl, summary.json, checkpoint/
Reference    Shao et al. 2024, arXiv 2402.03300, eq. 3 (GRPO); clip range: DAPO, 2503.14476; Dr. GRPO: 2503.20783;
             trajectories, RULER and 2048 as tasks: OpenPipe ART; 2048: Gabriele Cirulli, 2014
Axes         P seeds, G episodes a seed, N = P·G, S turns, T tokens
"""

import argparse
import functools
import json
import math
import random
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import common
import judge as judges
import watch
from checks.instructions import visible
from checks.risky import asked_sentences, normal_form, number_of_requests, risky_questions
from common import at_least_fp32, kl_estimates, sample, token_logps
from parts import files, lora, old_runs, parallel, runs, stats
from parts.files import UserError

# learning rates: below 100 M parameters (worked on the bundled base, not swept), full weights, LoRA
LR_SMALL, LR_FULL, LR_LORA = 3e-4, 1e-6, 4e-5

SCALES, TURN_NORMS = ("center", "std", "batch", "loo"), ("token", "turn", "trajectory")
REWARDS = ("env", "ruler")
VAL_SEEDS, TEST_SEEDS = 10**9, 2 * 10**9  # training seeds are drawn below 10⁹
EPOCH = 40  # steps: seeds have no end, so --epochs needs a unit


# ---- 3. the math ----


# same as grpo_rubric.py
def group_advantages(rewards, scale="center", valid=None):
    """A = r − mean of the group; "std" also ÷ (deviation + 1e-4), "batch" ÷ that of all rewards, "loo" × G/(G−1)

    rewards (P, G), a row a group of episodes of one seed; valid (P, G) bool: what is False or NaN has advantage 0 and is
    in no mean. Returns (P, G), each row sums to 0; equal rewards, or fewer than two: all 0.      [2402.03300, eq. 3-4]
    >>> group_advantages(torch.tensor([[3., 1, 2, math.nan]]))
    tensor([[ 1., -1.,  0.,  0.]])
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}: expected (P, G), G at least 2")
    if scale not in SCALES:
        raise ValueError(f"scale {scale!r}: expected one of {', '.join(SCALES)}")
    common.same_shape(rewards=rewards, valid=valid)
    rewards = at_least_fp32(rewards)
    valid = ~rewards.isnan() if valid is None else valid & ~rewards.isnan()
    rewards = torch.where(valid, rewards, 0.0)
    n = valid.sum(dim=1, keepdim=True)  # (P, 1)
    centred = torch.where(valid, rewards - rewards.sum(dim=1, keepdim=True) / n.clamp(min=1), 0.0)
    highest = torch.where(valid, rewards, -math.inf).amax(dim=1, keepdim=True)
    lowest = torch.where(valid, rewards, math.inf).amin(dim=1, keepdim=True)
    signal = (n > 1) & (highest - lowest > 1e-6)  # (P, 1)
    if scale == "std":
        variance = (centred**2).sum(dim=1, keepdim=True) / (n - 1).clamp(min=1)  # (P, 1)
        centred = centred / (variance.sqrt() + 1e-4)
    elif scale == "batch":
        every = rewards[valid]
        centred = centred / (every.std() + 1e-4) if len(every) > 1 else centred
    elif scale == "loo":
        centred = centred * n / (n - 1).clamp(min=1)
    return torch.where(signal, centred, 0.0)


def turn_loss(
    logps, old_logps, advantages, weights, ref_logps=None, clip_low=0.2, clip_high=0.28, beta=0.0
):
    """L = Σ w·ℓ,   ℓ = max(−A·ρ, −A·clip(ρ, 1−ε_low, 1+ε_high)) + β·ρ·k3,   ρ = π/π_old,   k3 = e^(ref−logp) − 1 − (ref−logp)

    logps, old_logps, ref_logps, weights   (N, T); weights are 0 on all that the policy did not sample; old and ref carry
                                           no gradient, ref only with beta > 0
    advantages                             (N,), that of the episode
    returns   (loss, sums): a scalar, and sums over the policy's tokens: clipped, ratio, approx_kl, k3; ratio_max

    With weights 1 / (tokens of the step) it is the `grpo_loss` of grpo_rubric.py; `token_weights` has the others.
    >>> one = torch.ones(2, 1)
    >>> turn_loss(torch.zeros(2, 1), torch.zeros(2, 1), torch.tensor([1., -0.5]), one / 2)[0].item()
    -0.25
    """  # fmt: skip
    if beta and ref_logps is None:
        raise ValueError(f"beta {beta} needs ref_logps")
    common.same_shape(logps=logps, old_logps=old_logps, weights=weights, ref_logps=ref_logps)
    mask = weights > 0  # (N, T)
    log_ratio = torch.where(mask, at_least_fp32(logps) - at_least_fp32(old_logps), 0.0)  # (N, T)
    ratio = log_ratio.clamp(-20, 20).exp()
    a = at_least_fp32(advantages)[:, None]  # (N, 1)
    plain, bounded = -a * ratio, -a * ratio.clamp(1 - clip_low, 1 + clip_high)  # (N, T)
    losses, k3 = torch.maximum(plain, bounded), torch.zeros_like(plain)
    if beta:
        k3 = kl_estimates(logps, ref_logps, mask)[2]
        losses = losses + beta * ratio * k3
    loss = (losses * weights).sum()  # weights are 0 outside the mask, losses finite
    with torch.no_grad():
        kl = torch.expm1(log_ratio.clamp(-20, 20)) - log_ratio
        sums = {
            "clipped": ((bounded > plain) & mask).sum().item(), "ratio": ratio[mask].sum().item(),
            "approx_kl": kl[mask].sum().item(), "k3": k3[mask].sum().item(), "ratio_max": ratio[mask].max().item(),
        }  # fmt: skip
    return loss, sums


def token_weights(episodes, how="token"):
    """Weight of a token in each turn of each episode; episodes: a list of [tokens of turn 1, tokens of turn 2, …]

    "token"        1 / tokens of all episodes: every token of the step weighs the same
    "turn"         1 / (tokens of the turn · turns of the episode · episodes)
    "trajectory"   1 / (tokens of the episode · episodes)
    In all three the weights of all tokens sum to 1.
    >>> token_weights([[2, 6], [8]], "token"), token_weights([[2, 6], [8]], "turn")
    ([[0.0625, 0.0625], [0.0625]], [[0.125, 0.041666666666666664], [0.0625]])
    """
    total, n = sum(map(sum, episodes)), sum(1 for turns in episodes if turns)
    one = {
        "token": lambda turns, tokens: 1 / total,
        "turn": lambda turns, tokens: 1 / (tokens * len(turns) * n),
        "trajectory": lambda turns, tokens: 1 / (sum(turns) * n),
    }[how]
    return [[one(turns, tokens) for tokens in turns] for turns in episodes]


def blind_share(episodes):
    """Share of the moves that the number of the turn alone tells: max over k ≤ 8 of the commonest move at each index mod k.

    episodes: a list of lists of moves. A cycle played without a look is 1; who reacts to what is seen falls below.
    >>> blind_share([["left", "up", "left", "up"], ["left", "up", "left"]]), blind_share([["left"], ["up"]])
    (1.0, 0.5)
    """
    n, best = sum(map(len, episodes)), 0
    for k in range(1, 9):
        seen = defaultdict(Counter)
        for moves in episodes:
            for i, move in enumerate(moves):
                seen[i % k][move] += 1
        best = max(best, sum(c.most_common(1)[0][1] for c in seen.values()))
    return best / n if n else 0.0


# ---- 4. the arguments ----


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="Group-relative policy optimisation in environments of several turns.")  # fmt: skip
    # fmt: off
    parser.add_argument("command", nargs="?", choices=("train", "play"), default="train", help="play shows an episode, lets you play, or chat with an interviewer (default %(default)s)")
    parser.add_argument("--env", default="interview", help="interview, 2048, or FILE.py:CLASS of your own, see docs/agents.md (default %(default)s)")
    parser.add_argument("--interview-bank", default="data/interview.json", help="roles, competencies, evidence and wordings of the interview (default %(default)s)")
    parser.add_argument("--interview-competencies", type=int, default=4, help="competencies to find out about, 2 to 6 (default %(default)s)")
    parser.add_argument("--interview-text", choices=("short", "full"), default="short", help="how candidates speak; full suits chat models (default %(default)s)")
    parser.add_argument("--env-size", type=int, default=3, help="2048: rows and columns of the board, 2 to 5 (default %(default)s)")
    parser.add_argument("--env-target", type=int, default=32, help="2048: tile that wins, a power of 2 (default %(default)s)")
    parser.add_argument("--illegal", choices=("end", "ignore", "penalty"), default="end", help="2048: what a move that changes nothing does; penalty: 0.1 each (default %(default)s)")
    parser.add_argument("--show-legal", action="store_true", help="2048: list the legal moves, for tiny models")
    parser.add_argument("--max-turns", type=int, default=40, help="2048: turns at most (default %(default)s)")
    parser.add_argument("--history", help="what a turn sees: all, or the number of earlier exchanges (default: the environment's; interview all, 2048 0)")
    parser.add_argument("--model", default=common.BASE, help="model folder or hub id (default %(default)s)")
    parser.add_argument("--reward", action="append", metavar="NAME[:WEIGHT]", help=f"{', '.join(REWARDS)}; repeat it to mix both (default env)")
    parser.add_argument("--ruler-rubric", metavar="FILE", help="text file with a standard of your own for RULER")
    parser.add_argument("--group-size", type=int, default=8, help="episodes a seed, 4 to 16 (default %(default)s)")
    parser.add_argument("--groups-per-batch", type=int, default=8, help="seeds a step, 4 to 64 (default %(default)s)")
    parser.add_argument("--num-substeps", type=int, default=1, help="optimiser steps a rollout, of whole groups (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of rollout and update alike (default %(default)s)")
    parser.add_argument("--eval-temperature", type=float, default=1.0, help="of validation and test, 0 = greedy; 1 measures what is trained: the bundled base, greedy, is a good interviewer before any training (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="longest turn, in tokens (default %(default)s)")
    parser.add_argument("--scale", choices=SCALES, default="center", help="advantage: reward − mean of the group; std divides by its deviation, batch by that of the step, loo takes the mean of the others (default %(default)s)")
    parser.add_argument("--turn-norm", choices=TURN_NORMS, default="token", help="what weighs the same in the loss: tokens, turns of an episode, or episodes (default %(default)s)")
    parser.add_argument("--clip-low", type=float, default=0.2, help="ratio kept above 1 − this (default %(default)s)")
    parser.add_argument("--clip-high", type=float, default=0.28, help="ratio kept below 1 + this (default %(default)s)")
    parser.add_argument("--beta", type=float, default=0.0, help="KL coefficient in the loss, 0 to 0.1; 0 loads no reference (default 0)")
    parser.add_argument("--max-exceptions", type=float, default=0, help="episodes of a step that may raise: a number, or a share below 1 (default %(default)s)")
    parser.add_argument("--val-episodes", type=int, default=64, help="held-out seeds of a validation (default %(default)s)")
    parser.add_argument("--test-episodes", type=int, default=128, help="seeds played once, at the end; 0: none (default %(default)s)")
    parser.add_argument("--rollouts-every", type=int, default=1, help="steps between rollouts kept in rollouts.jsonl (default %(default)s)")
    parser.add_argument("--restore", choices=("best", "last"), default="best", help="weights written at the end: those of the best validation, or the last (default %(default)s)")
    parser.add_argument("--wandb-name", help="name of the run in Weights & Biases (default: the folder's)")
    play = parser.add_argument_group("play")
    play.add_argument("--policy", default="random", help="a baseline of the environment, a model folder, or human: you (default %(default)s)")
    play.add_argument("--episodes", type=int, default=1, help="from --seed on (default %(default)s)")
    play.add_argument("--as-candidate", action="store_true", help="interview: you answer in place of the scripted candidate")
    play.add_argument("--write", metavar="FILE", help="also write the policy's turns as rows for sft.py")
    judges.add_judge_arguments(parser)
    watch.add_watch_arguments(parser)
    old_runs.add_run_arguments(parser, "runs/grpo_agent", f"{LR_SMALL:g} below 100 M parameters, {LR_FULL:g}, LoRA {LR_LORA:g}", batch_size=None, eval_every=5, save_every=10)
    # fmt: on
    args = old_runs.parse_with_config(parser, argv)
    old_runs.check_arguments(args)
    judges.check_judge_arguments(args)
    watch.options_of(args)
    least = {
        "group_size": 2, "groups_per_batch": 1, "num_substeps": 1, "rollouts_every": 1, "val_episodes": 1, "test_episodes": 0,
        "max_turns": 1, "episodes": 1, "max_exceptions": 0, "beta": 0, "eval_temperature": 0, "env_size": 2, "interview_competencies": 2,
    }  # fmt: skip
    for name, low in least.items():
        if not low <= getattr(args, name) < math.inf:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} {getattr(args, name)}: expected at least {low}")
    if not 0 < args.clip_low < 1 or not 0 < args.clip_high < math.inf:
        raise UserError(
            f"--clip-low {args.clip_low}, --clip-high {args.clip_high}: expected a number in (0, 1), and one above 0"
        )
    if args.env_target < 8 or args.env_target & (args.env_target - 1):
        raise UserError(f"--env-target {args.env_target}: expected a power of 2 from 8 on")
    if args.history not in (None, "all") and not args.history.isdecimal():
        raise UserError(f"--history {args.history}: expected all, or a number of exchanges")
    if args.batch_size:
        if args.batch_size * args.num_substeps % args.group_size:
            raise UserError(
                f"--batch-size {args.batch_size}: {args.num_substeps} substeps of it are no whole groups of {args.group_size} episodes"
            )
        args.groups_per_batch = args.batch_size * args.num_substeps // args.group_size
    if args.num_substeps > args.groups_per_batch:
        raise UserError(
            f"--num-substeps {args.num_substeps}: more than the {args.groups_per_batch} groups of a step"
        )
    args.reward = args.reward or ["env"]
    if "ruler" in reward_weights(args.reward) and args.scale == "std":
        print(
            "--scale std with RULER: divided by its deviation, a near tie of .80 and .81 pulls as hard as .1 against .9; center keeps small gaps small"
        )
    return args


# same as grpo_rubric.py
def reward_weights(specs):
    """{name: weight}, divided by their sum, so that rewards keep their range.

    >>> reward_weights(["env:3", "ruler"])
    {'env': 0.75, 'ruler': 0.25}
    """
    weights = {}
    for spec in specs:
        name, _, weight = spec.partition(":")
        try:
            value = float(weight or 1)
        except ValueError:
            value = math.nan
        if name not in REWARDS or name in weights or not 0 < value < math.inf:
            raise UserError(
                f"--reward {spec}: expected NAME or NAME:WEIGHT, each name once, of {', '.join(REWARDS)}, weight above 0"
            )
        weights[name] = value
    return {name: value / sum(weights.values()) for name, value in weights.items()}


# ---- 5. the data ----
# Nothing is read from disk but the interview's bank: an environment is the data. It has name, max_turns, reward_range,
# history ("all" or a number of exchanges), val_key (the entry of info that is success itself), baselines (name → list of
# policies (env, rng) → text, of which the best counts), and
#     reset(seed) → messages;   step(text) → (message or None, reward, done, info)
# All randomness comes from its own random.Random(seed); info is flat numbers, that of the last turn is logged. Optional:
# run_out() → (reward, info) when turns or context are used up; moves, what `blind_share` reads (else the texts).


@dataclass
class Trajectory:
    """An episode: messages, reward (the sum over its turns), flat numbers, and the samples that enter the loss."""

    messages_and_choices: list
    reward: float = 0.0
    metrics: dict = field(default_factory=dict)
    metadata: dict = field(default_factory=dict)
    logs: list = field(default_factory=list)
    samples: list = field(default_factory=list)  # {"ids", "logps", "turns": [(start, end)]} each
    number: int = 0  # among the episodes of all processes: what its draws come from

    def messages(self):
        return list(self.messages_and_choices)


class TrajectoryGroup:
    """Episodes of one seed: iterates and counts those that were played; what raised stands in .exceptions."""

    def __init__(self, members):
        self.trajectories = [m for m in members if not isinstance(m, BaseException)]
        self.exceptions = [m for m in members if isinstance(m, BaseException)]

    def __iter__(self):
        return iter(self.trajectories)

    def __len__(self):
        return len(self.trajectories)


def gather_trajectory_groups(groups, max_exceptions=0, after_each=None):
    """The groups, each as after_each (RULER, say) returned it, without those it made None; UserError if too much raised.

    max_exceptions: a number of episodes, or if between 0 and 1 a share of them.
    >>> len(gather_trajectory_groups([TrajectoryGroup([Trajectory([]), ValueError("x")])], max_exceptions=0.5))
    1
    """
    groups = list(groups)
    raised = [e for group in groups for e in group.exceptions]
    n = len(raised) + sum(map(len, groups))
    if len(raised) > (max_exceptions * n if 0 < max_exceptions < 1 else max_exceptions):
        raise UserError(
            f"--max-exceptions {max_exceptions:g}: {len(raised)} of {n} episodes raised; the first: "
            + said_of(raised[0])
        )
    groups = [after_each(group) for group in groups] if after_each else groups
    return [group for group in groups if group is not None]


class Raised(Exception):
    """What an episode of another process raised, in one line: an exception itself may not travel."""


def said_of(error):
    """An exception in one line, with file and line where it was raised."""
    if isinstance(error, Raised):
        return str(error)
    return files.where_raised(error) if error.__traceback__ else f"{type(error).__name__}: {error}"  # fmt: skip


def play(envs, seeds, act, numbers=None):
    """Episodes of the environments from the seeds, all live ones a turn at a time: a list of Trajectory or exception.

    act   ([(trajectory, environment) of each live one]) → a text each; None where the context has no room: the episode
          ends as if its turns had run out
    numbers   those of the episodes (default: 0, 1, …)
    """
    played, live, numbers = [], [], numbers or range(len(seeds))
    for i, (env, seed) in enumerate(zip(envs, seeds, strict=True)):
        try:
            opening = [dict(m) for m in env.reset(seed)]
            common.check_prompt({"prompt": opening})
            played.append(Trajectory(opening, metadata={"seed": seed, "truncated": False}, number=numbers[i]))  # fmt: skip
            live.append(i)
        except Exception as error:  # of the user's own environment: anything may be raised
            played.append(error)
    turns = 0
    while live:
        turns, still = turns + 1, []
        for i, text in zip(live, act([(played[i], envs[i]) for i in live]), strict=True):
            t, env, done = played[i], envs[i], False
            try:
                if text is None:
                    t.metadata["truncated"] = True
                else:
                    t.messages_and_choices.append({"role": "assistant", "content": text})
                    t.metrics["turns"] = turns
                    message, reward, done, info = env.step(text)
                    note(t, reward, info)
                    if not done:
                        if message is None:
                            raise ValueError("step gave no message, and the episode is not done")
                        t.messages_and_choices.append(dict(message))
                        common.check_prompt({"prompt": t.messages_and_choices})
                if not done and (text is None or turns >= env.max_turns):
                    done = True
                    if hasattr(env, "run_out"):
                        note(t, *env.run_out())
                if done and "turns" in t.metrics and env.val_key not in t.metrics:
                    raise ValueError(f"info {t.metrics} lacks {env.val_key!r}, its val_key")
            except Exception as error:
                played[i] = error
            else:
                still += [] if done else [i]
        live = still
    return played


def play_shared(make, seeds, act, model, group=1):
    """`play` with the groups of neighbours dealt out over the processes; each gets all: (episodes, moves of each)."""
    mine = parallel.share(range(len(seeds)), group)
    envs = [make() for _ in mine]
    with parallel.decoding(model):
        played = play(envs, [seeds[i] for i in mine], act, mine)
    moves = [getattr(env, "moves", None) or said_by(t) for env, t in zip(envs, played, strict=True)]
    if parallel.world() > 1:
        played = [Raised(said_of(t)) if isinstance(t, BaseException) else t for t in played]
    return parallel.gather(played, mine), parallel.gather(moves, mine)


def said_by(t):
    """The policy's texts in an episode; none where it raised."""
    messages = [] if isinstance(t, BaseException) else t.messages()
    return [m["content"] for m in messages if m["role"] == "assistant"]


def note(trajectory, reward, info):
    """Add a turn's reward and remember its info; ValueError for what is no number."""
    if not all(math.isfinite(x) for x in (reward, *info.values())):
        raise ValueError(f"reward {reward}, info {info}: expected finite numbers")
    trajectory.reward += reward
    trajectory.metrics |= info


def baseline_act(policy):
    """`act` of a policy (env, rng) → text, which may look into its environment."""
    drawn = {}

    def act(live):
        rngs = [drawn.setdefault(id(t), random.Random(f"policy {t.metadata['seed']}")) for t, _ in live]  # fmt: skip
        try:
            return [policy(env, rng) for (_, env), rng in zip(live, rngs, strict=True)]
        except Exception as error:  # of the user's own file
            raise UserError(f"a baseline raised: {said_of(error)}") from error

    return act


# The game 2048

MOVES = ("left", "right", "up", "down")


class TwentyFortyEightGame:
    """The true rules on a board of any size: `board` is a list of rows, 0 an empty cell; all draws come from the seed."""

    def __init__(self, size=4, seed=0):
        self.size = size
        self.reset(seed)

    def reset(self, seed):
        self.rng, self.board = random.Random(seed), [[0] * self.size for _ in range(self.size)]
        for _ in range(2):
            populate_random_cell(self)

    def legal_moves(self):
        return [move for move in MOVES if condense_board(self, move)[0] != self.board]

    def step(self, move):
        """(moved, gained): a move that changes nothing is illegal, and spawns nothing; gained: sum of the merged tiles."""
        board, gained = condense_board(self, move)
        if board == self.board:
            return False, 0
        self.board = board
        populate_random_cell(self)
        return True, gained


# the next, apply_agent_move and others have the names of ART's 2048 example: code written for it finds its functions


def generate_game(board_length=4, seed=0):
    return TwentyFortyEightGame(board_length, seed)


def populate_random_cell(game):
    """A free cell becomes 2 (90 %) or 4."""
    free = [(r, c) for r, row in enumerate(game.board) for c, tile in enumerate(row) if not tile]
    r, c = game.rng.choice(free)
    game.board[r][c] = 2 if game.rng.random() < 0.9 else 4


def slide(sequence):
    """(tiles of a row after a move to its start, sum of those that merged); 0 or None is an empty cell.

    Each tile merges once, those at the start first.
    >>> slide([2, 2, 2, 0]), slide([4, 4, 2, 2]), slide([8, 4, 4, 8])
    (([4, 2], 4), ([8, 4], 12), ([8, 8, 8], 8))
    """
    tiles, out, gained = [tile for tile in sequence if tile], [], 0
    while tiles:
        pair = tiles[1:2] == tiles[:1]
        out.append(tiles[0] * (1 + pair))
        gained += out[-1] * pair
        tiles = tiles[1 + pair :]
    return out, gained


def condense_sequence(sequence):
    return slide(sequence)[0]


def condense_board(game, direction):
    """(board after the move, sum of the tiles that merged), before anything is spawned."""
    if direction not in MOVES:
        raise ValueError(f"move {direction!r}: expected one of {', '.join(MOVES)}")
    turned, back = direction in ("up", "down"), -1 if direction in ("right", "down") else 1
    slid = [slide(row[::back]) for row in (zip(*game.board) if turned else game.board)]
    rows = [(tiles + [0] * (game.size - len(tiles)))[::back] for tiles, _ in slid]
    return [list(row) for row in (zip(*rows) if turned else rows)], sum(gain for _, gain in slid)


def read_move(text):
    """The last <move>…</move> of a text; ValueError where there is none."""
    found = re.findall(r"<move>\s*(left|right|up|down)\s*</move>", visible(text), re.I)
    if not found:
        raise ValueError("no <move>left</move>, right, up or down")
    return found[-1].lower()


def apply_agent_move(game, text):
    return game.step(read_move(text))


def render_board(game):
    """Rows from the top, _ for an empty cell."""
    return "\n".join(" ".join(str(tile or "_") for tile in row) for row in game.board)


def max_cell_value(game):
    return max(max(row) for row in game.board)


def total_board_value(game):
    return sum(map(sum, game.board))


def check_game_finished(game):
    """No move is legal: a full board with a merge left goes on."""
    return not game.legal_moves()


class TwentyFortyEight:
    """2048 as an environment: reward at the end only, 1 for the target, else up to 0.9 for how near the largest tile came."""

    name, val_key, reward_range, history, prose = "2048", "win", (-1, 1), 0, False

    def __init__(self, size=3, target=32, illegal="end", show_legal=False, max_turns=40):
        self.size, self.target, self.illegal, self.show_legal = size, target, illegal, show_legal
        self.max_turns = max_turns

    def reset(self, seed):
        self.game, self.moves, self.invalid = TwentyFortyEightGame(self.size, seed), [], 0
        rules = f"2048 on {self.size} x {self.size}, reach {self.target}. Reply <move>left</move>, right, up or down."
        return [{"role": "system", "content": rules}, self.shown()]

    def shown(self):
        legal = f"\nlegal: {' '.join(self.game.legal_moves())}" if self.show_legal else ""
        return {"role": "user", "content": render_board(self.game) + legal}

    def step(self, text):
        try:
            self.moves.append(read_move(text))
        except ValueError:
            self.invalid += 1
            return None, -1.0, True, self.info()
        moved, _ = self.game.step(self.moves[-1])
        self.invalid += not moved
        if not moved and self.illegal == "end":
            return None, 0.9 * self.progress() - 0.1, True, self.info()
        if max_cell_value(self.game) >= self.target or check_game_finished(self.game):
            return None, self.run_out()[0], True, self.info()
        return self.shown(), 0.0, False, self.info()

    def progress(self):
        """p = (log₂ largest − 1) / (log₂ target − 1), 0 with nothing but 2s, 1 at the target"""
        return min(1.0, (math.log2(max_cell_value(self.game)) - 1) / (math.log2(self.target) - 1))

    def run_out(self):
        p = self.progress()
        fined = 0.1 * self.invalid if self.illegal == "penalty" else 0.0
        return max(-1.0, (1.0 if p == 1 else 0.9 * p) - fined), self.info()

    def info(self):
        top = max_cell_value(self.game)
        return {"win": float(top >= self.target), "max_tile": top, "invalid": self.invalid, "moves": len(self.moves)}  # fmt: skip


def moving(choose):
    return lambda env, rng: f"<move>{choose(env, rng)}</move>"


def greediest(env, rng):
    gains = {move: condense_board(env.game, move)[1] for move in env.game.legal_moves()}
    return rng.choice([move for move, gain in gains.items() if gain == max(gains.values())])


def cornered(env, rng):
    """Into one corner as long as that is possible."""
    legal = env.game.legal_moves()
    return next(move for move in ("down", "left", "right", "up") if move in legal)


# rotations, sweeps: played without a look at the board
CYCLES = [("left", "down", "right", "up"), ("left", "up", "right", "down"), ("left", "right", "down"), ("down", "left", "down", "right"),
          ("left", "down"), ("right", "down"), ("left", "up"), ("right", "up")]  # fmt: skip
TwentyFortyEight.baselines = {
    "random": [moving(lambda env, rng: rng.choice(env.game.legal_moves()))],
    "greedy": [moving(greediest)],
    "corner": [moving(cornered)],
    "blind": [moving(lambda env, rng, c=c: c[len(env.moves) % len(c)]) for c in CYCLES],
}


# The interview

KINDS = ("behavioural", "hypothetical", "specific", "closed")  # the first match, else "other"
FINES = {"many_questions": 0.1, "many_topics": 0.1, "over_long": 0.1, "repeated": 0.1, "unsupported": 0.15, "no_summary": 0.25}  # fmt: skip
SUMMARY = re.compile(r"^[\s*#>•_-]*summary\b.*", re.I | re.M)


def words(text):
    """Words of the normal form between blanks, so that `" 4 percent "` is not in `" 34 percent "`."""
    return " " + " ".join(re.findall(r"\w+", normal_form(text))) + " "


def read_bank(path):
    """A bank with its cues compiled under "read"; UserError with what is wrong in it."""
    try:
        bank = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        cues = bank["cues"]
        bank["read"] = {
            "lead_in": re.compile(rf"^(?:(?:{'|'.join(cues['lead_in'])})\b[ ,:.!]*)*"),
            "kinds": [(kind, [re.compile(cue) for cue in cues[kind]]) for kind in KINDS],
            "no_evidence": [re.compile(cue) for cue in cues["no_evidence"]],
            "phrases": {
                # the longest first, so that nested phrases count once
                name: re.compile(rf"\b(?:{'|'.join(re.escape(p) for p in sorted(c['phrases'], key=len, reverse=True))})\b")
                for name, c in bank["competencies"].items()
            },
            "first": [words(key) for c in bank["competencies"].values() for item in c["evidence"] for key in item["keys"][0]],
        }  # fmt: skip
        wrong = faults_of_bank(bank)
    except OSError as error:
        raise UserError(f"--interview-bank {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, re.error) as error:
        raise UserError(
            f"--interview-bank {path}: {type(error).__name__}: {files.brief(error)}; expected the form of data/interview.json"
        ) from None
    if wrong:
        raise UserError(f"--interview-bank {path}: {'; '.join(wrong[:5])}")
    return bank


def faults_of_bank(bank):
    """What would make a line correct by accident, or a template be misread: sentences, none for a good bank."""
    names, wrong = list(bank["competencies"]), []
    items = [item for name in names for item in bank["competencies"][name]["evidence"]]
    keys = [(item, words(key)) for item in items for group in item["keys"] for key in group]
    firsts = Counter(bank["read"]["first"])
    wrong += [f"first key {key.strip()!r} twice" for key, n in firsts.items() if n > 1]
    wrong += [f"role {role!r}: 6 competencies of the bank expected" for role, required in bank["roles"].items()
              if len(set(required) & set(names)) < 6 or not set(required) <= set(names)]  # fmt: skip
    for item in items:
        for text in (item["full"], item["short"]):
            said = words(text)
            if len(item["keys"]) < 2 or not all(any(words(k) in said for k in g) for g in item["keys"]):  # fmt: skip
                wrong.append(f"{text!r} lacks one of its keys, a thing and a number")
            wrong += [f"{text!r} has {key.strip()!r} of another item" for other, key in keys if other is not item and key in said]  # fmt: skip
    others = [text for texts in bank["replies"].values() for text in texts]
    others += [text for c in bank["competencies"].values() for text in c["outline"] + c["none"]]
    wrong += [f"reply {text!r} has the key {key.strip()!r}" for text in others for _, key in keys if key in words(text)]  # fmt: skip
    for kind, templates in bank["templates"].items():
        for template in templates if kind != "risky" else ():
            for i in range(len(names)) if "{c}" in template else (0,):
                slots = dict(zip("cde", (names + names)[i : i + 3]))
                turn = read_turn(bank, template.format(**slots))
                named = [slots[x] for x in "cde" if f"{{{x}}}" in template]
                requests = {"greeting": 0, "double": 2}.get(kind, 1)
                read_as = bank["kinds"][kind] if bank["kinds"][kind] in (*KINDS, "other") else turn["kind"]  # fmt: skip
                if (turn["requests"], turn["kind"], turn["topics"]) != (requests, read_as, named):
                    wrong.append(f"{kind} template {template!r} with {slots['c']!r} is read as {turn}")  # fmt: skip
    return wrong


def read_turn(bank, text):
    """{"requests": count, "kind", "topics": competencies named, the one that the turn is about first}"""
    cues = bank["read"]
    asked = [cues["lead_in"].sub("", sentence) for _, _, sentence in asked_sentences(text)]
    kind = next((k for k, patterns in cues["kinds"] if any(p.search(s) for p in patterns for s in asked)), "other")  # fmt: skip
    for place in (" ".join(asked), normal_form(text)):
        hits = {name: list(phrase.finditer(place)) for name, phrase in cues["phrases"].items()}
        found = [(-len({h.group() for h in hs}), hs[0].start(), name) for name, hs in hits.items() if hs]  # fmt: skip
        if found:
            break
    return {"requests": number_of_requests(text), "kind": kind, "topics": [name for *_, name in sorted(found)]}  # fmt: skip


class Interview:
    """A scripted candidate with a hidden profile: R = clip(correct summary lines / K − Σ penalties, −1, 1), at the end.

    open competencies tell their evidence when asked about past work, reserved ones after a specific follow-up, none have
    none. heard {competency: item told}, denied, outlined: what the candidate has said so far.
    """

    name, val_key, reward_range, history, prose = "interview", "correct", (-1, 1), "all", True

    def __init__(self, bank, k=4, text="short"):
        self.bank, self.k, self.text = bank, k, text
        self.turns = k + k // 2  # what an interviewer who listens needs
        self.max_turns = self.turns + 1  # and the summary

    def reset(self, seed):
        rng, bank, k = random.Random(seed), self.bank, self.k
        self.rng, self.role = rng, rng.choice(sorted(bank["roles"]))
        self.competencies = rng.sample(bank["roles"][self.role], k)
        self.items = {c: rng.choice(bank["competencies"][c]["evidence"]) for c in self.competencies}
        states = ["reserved"] * (k // 2) + [rng.choice(("open", "none"))]
        states += ["open"] * (k - len(states))
        rng.shuffle(states)
        self.states = dict(zip(self.competencies, states, strict=True))
        self.heard, self.denied, self.outlined, self.last = {}, set(), set(), None
        self.asked, self.moves, self.numbers = [], [], set()  # numbers: all that the candidate said
        self.faults, self.kinds = Counter(), Counter()
        self.fines, self.correct, self.unread = 0.0, 0, 0
        opening = bank["opening"].format(
            role=self.role, competencies=", ".join(self.competencies), turns=self.turns
        )
        return [{"role": "user", "content": opening}]

    def fine(self, name, amount=None):
        self.faults[name] += 1
        self.fines += FINES[name] if amount is None else amount

    def step(self, text):
        text = visible(text)
        summary = SUMMARY.search(text)
        risky = risky_questions(text[: summary.start()] if summary else text)
        if risky:  # the worst of the turn
            self.fine("risky", 0.5 if any(r["severity"] == "prohibited" for r in risky) else 0.25)
        if summary:
            self.read_summary(text[summary.end() :])
        elif len(self.asked) < self.turns:
            reply = self.reply(text, bool(risky))
            reply += f" {self.say('final')}" if len(self.asked) == self.turns else ""
            return {"role": "user", "content": reply}, 0.0, False, self.info()
        else:
            self.fine("no_summary")
        return None, self.score(), True, self.info()

    def run_out(self):
        self.fine("no_summary")
        return self.score(), self.info()

    def score(self):
        return max(-1.0, min(1.0, self.correct / self.k - self.fines))

    def say(self, key):
        return self.rng.choice(self.bank["replies"][key])

    def reply(self, text, risky):
        turn = read_turn(self.bank, text)
        topics, kind = turn["topics"], turn["kind"]
        about = topics[0] if topics else self.last if kind == "specific" else None
        matter, said = set(topics) or {about}, set(words(text).split())
        again = any(matter == m and len(said & w) >= 0.8 * len(said | w) for m, w in self.asked)
        answered = about in self.heard or about in self.denied
        faults = {
            "many_questions": turn["requests"] >= 2,
            "many_topics": len(topics) >= 3,
            "over_long": len(text.split()) > 40,
            "repeated": again or answered or (about in self.outlined and kind != "specific"),
        }
        for name in (name for name, found in faults.items() if found):
            self.fine(name)
        self.asked.append((matter, said))
        self.moves.append((kind, self.competencies.index(about) if about in self.competencies else -1))  # fmt: skip
        self.kinds[kind] += 1
        self.unread += not turn["requests"]
        self.last = about
        if risky:
            return self.say("risky")
        if faults["many_questions"] or faults["many_topics"] or faults["over_long"]:
            return self.say("one_question")
        if again:
            return self.say("repeated")
        if not turn["requests"]:
            return self.say("no_request")
        if about is None:
            return self.say("small_talk")
        if kind not in ("behavioural", "specific"):
            return self.say("intentions" if kind == "hypothetical" else "yes")
        if about not in self.competencies:
            return self.say("exposure")
        if answered:
            return self.say("as_said")
        if self.states[about] == "none":
            self.denied.add(about)
            return self.rng.choice(self.bank["competencies"][about]["none"])
        if self.states[about] == "reserved" and not (about in self.outlined and kind == "specific"):
            self.outlined.add(about)
            return self.rng.choice(self.bank["competencies"][about]["outline"])
        self.heard[about] = self.items[about]
        self.numbers |= set(re.findall(r"\d+", self.items[about][self.text]))
        return self.items[about][self.text]

    def read_summary(self, text):
        """Correct lines and fines of `competency: text` lines, any order; list marks and bold count for nothing."""
        lines, of = {}, {normal_form(c): c for c in self.competencies}
        for line in text.splitlines():
            name, colon, said = re.sub(r"^[\s#>•\d.)-]+|[*_]", "", line.strip()).partition(":")
            if colon and normal_form(name) in of:
                # words behind the 40th are not read
                lines.setdefault(of[normal_form(name)], []).append(" ".join(said.split()[:40]))  # fmt: skip
        if not lines:
            self.fine("no_summary")
        for competency, said in lines.items():
            for line in said:
                verdict = self.read_line(competency, line) if len(said) == 1 else None
                self.correct += verdict is True
                if verdict is None:
                    self.fine("unsupported")

    def read_line(self, competency, line):
        """True: correct; False: nothing; None: unsupported, something that nobody said about it."""
        said, item = words(line), self.heard.get(competency)
        if any(cue.search(normal_form(line).strip(" .")) for cue in self.bank["read"]["no_evidence"]):  # fmt: skip
            return competency in self.denied
        own = [words(key) for key in item["keys"][0]] if item else []
        foreign = any(key in said for key in self.bank["read"]["first"] if key not in own)
        if item is None or foreign or not set(re.findall(r"\d+", said)) <= self.numbers:
            return None
        groups = [any(words(key) in said for key in group) for group in item["keys"]]
        return True if all(groups) else False if any(groups) else None

    def info(self):
        found, n = len(self.heard) + len(self.denied), max(1, len(self.asked))
        return {
            "correct": self.correct / self.k, "revealed": found / self.k, "reported": self.correct / max(1, found), "questions": len(self.asked),
            "invalid": self.unread, **{f"fault/{name}": self.faults[name] for name in ("risky", *FINES)},
            **{f"kind/{kind}": self.kinds[kind] / n for kind in (*KINDS, "other")},
        }  # fmt: skip


def ask(env, rng, kind, competency):
    """A question of this kind about a competency, in one of the bank's wordings."""
    others = rng.sample([c for c in env.bank["competencies"] if c != competency], 2)
    return rng.choice(env.bank["templates"][kind]).format(c=competency, d=others[0], e=others[1])


def report(env):
    """The summary of a perfect reporter."""
    lines = [env.heard[c]["short"] if c in env.heard else f"{c}: {env.bank['no_evidence']}." for c in env.competencies]  # fmt: skip
    return "\n".join(["SUMMARY", *lines])


def listening(env, rng):
    """Follows up where only an outline came: as good as one who sees the profile, so it is called the oracle."""
    todo = [c for c in env.competencies if c not in env.heard and c not in env.denied]
    if not todo or len(env.asked) == env.turns:
        return report(env)
    return ask(env, rng, "specific" if todo[0] in env.outlined else "behavioural", todo[0])


def fixed_list(env, rng, follow_ups):
    """A behavioural question a competency, in order; then blind specific ones."""
    n = len(env.asked)
    if n < env.k:
        env.plan = [*env.competencies, *rng.sample(env.competencies, env.turns - env.k)]
        return ask(env, rng, "behavioural", env.competencies[n])
    return ask(env, rng, "specific", env.plan[n]) if follow_ups and n < env.turns else report(env)


def at_random(env, rng, kinds):
    if len(env.asked) == env.turns:
        return report(env)
    return ask(env, rng, rng.choice(kinds(env)), rng.choice(env.competencies))


def every_kind(env):
    return [kind for kind, texts in env.bank["templates"].items() for _ in texts]


Interview.baselines = {
    "oracle": [listening],
    "fixed": [lambda env, rng: fixed_list(env, rng, False)],
    "fixed+": [lambda env, rng: fixed_list(env, rng, True)],
    "random": [lambda env, rng: at_random(env, rng, lambda _: ["behavioural", "specific"])],
    "uniform": [lambda env, rng: at_random(env, rng, every_kind)],
}


def environment(args):
    """A function without arguments that makes the environment of --env."""
    if args.env == "2048":
        return lambda: TwentyFortyEight(args.env_size, args.env_target, args.illegal, args.show_legal, args.max_turns)  # fmt: skip
    if args.env == "interview":
        bank = read_bank(args.interview_bank)
        fewest = min(map(len, bank["roles"].values()))
        if args.interview_competencies > fewest:
            raise UserError(f"--interview-competencies {args.interview_competencies}: a role of the bank has only {fewest}")  # fmt: skip
        return lambda: Interview(bank, args.interview_competencies, args.interview_text)
    if ".py:" not in args.env:
        raise UserError(f"--env {args.env}: expected interview, 2048, or FILE.py:CLASS")
    make = files.load_function(args.env, "--env")
    try:
        env = make()
    except Exception as error:  # of the user's own file
        raise UserError(f"--env {args.env}: {said_of(error)}") from error
    lacking = [n for n in ("reset", "step", "name", "max_turns", "reward_range", "history", "val_key", "baselines") if not hasattr(env, n)]  # fmt: skip
    if lacking:
        raise UserError(f"--env {args.env}: has no {', '.join(lacking)}; docs/agents.md lists what an environment needs")  # fmt: skip
    if not all(isinstance(policies, (list, tuple)) for policies in env.baselines.values()):
        raise UserError(f"--env {args.env}: baselines: expected name → list of policies")
    if env.history != "all" and not str(env.history).isdecimal():
        raise UserError(f"--env {args.env}: history {env.history!r}: expected \"all\", or a number of exchanges")  # fmt: skip
    return make


def flags_of(args):
    """The environment's flags that are not at their default: a later command must play the same game."""
    usual, found = vars(parse_args([])), ""
    for name in ("env", "interview_bank", "interview_competencies", "interview_text", "env_size", "env_target", "illegal", "show_legal",
                 "max_turns", "history", "max_length", "max_new_tokens"):  # fmt: skip
        value = getattr(args, name)
        if value != usual[name]:
            found += f" --{name.replace('_', '-')}" + ("" if value is True else f" {value}")
    return found


# ---- 6. the models ----


# same as grpo_rubric.py
def load_models(args):
    """(model, reference, tokenizer, scaler): the reference is a frozen copy of the start, with LoRA the policy with its
    adapters off (None); without --beta there is none."""
    device, dtype, scaler = old_runs.pick_hardware(args)
    tokenizer, adapter = common.load_tokenizer(args.model), old_runs.lora_arguments(args)
    model = common.load_policy(args.model, dtype, device, **adapter)
    frozen = args.beta and not adapter
    reference = common.load_policy(args.model, dtype, device, trainable=False) if frozen else None
    return model, reference, tokenizer, scaler


def seen(messages, history):
    """What the next turn sees: all, or leading system messages, the last k exchanges and the newest message."""
    head = [m for m in messages if m["role"] == "system"]
    rest = [m for m in messages if m["role"] != "system"]
    return messages if history == "all" else head + rest[-(2 * int(history) + 1) :]


def next_prompt(tokenizer, trajectory, history="all"):
    """Ids that the next turn answers: those so far and the new message's; nothing that was sampled is tokenised again.

    Encoded anew, so a sample of its own: with a history cut short, and where the template rewrites earlier turns (drops
    their thoughts, say).
    """
    messages = trajectory.messages()
    if history == "all" and trajectory.samples:
        answered = common.render(tokenizer, messages[:-2], add_generation_prompt=True)
        answered += messages[-2]["content"]
        whole = common.render(tokenizer, messages, add_generation_prompt=True)
        if whole.startswith(answered):
            ids = trajectory.samples[-1]["ids"]
            new = tokenizer.encode(whole[len(answered) :], add_special_tokens=False)
            return ids + new[ids[-1] == new[0] :]  # the end of turn stands there once
    return common.encode_prompt(tokenizer, seen(messages, history))


def model_act(args, model, tokenizer, history, temperature, seed):
    """`act` of a model: every live episode's next turn in one `sample`; keeps ids and log-probs in trajectory.samples.

    An episode's draws come from its number: when its mates end, or which process plays it, changes nothing for it.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    room, turn = min(args.max_length, limit or args.max_length) - args.max_new_tokens, 0

    def act(live):
        nonlocal turn
        turn += 1
        prompts = [next_prompt(tokenizer, t, history) for t, _ in live]
        fit, texts = [i for i, ids in enumerate(prompts) if len(ids) <= room], [None] * len(live)
        drawn = sample(
            model, tokenizer, [prompts[i] for i in fit], 1, args.max_new_tokens, temperature, seed=1000 * seed + turn, numbers=[live[i][0].number for i in fit], alone=True
        )  # fmt: skip
        for n, i in enumerate(fit):
            t, ids, new = live[i][0], prompts[i], drawn.response_ids[n]
            held = t.samples[-1] if t.samples else None
            if not held or held["ids"] != ids[: len(held["ids"])]:
                held = {"ids": [], "logps": [], "turns": []}
                t.samples.append(held)
            held["turns"].append((len(ids), len(ids) + len(new)))
            held["ids"] = ids + new
            held["logps"] += drawn.logps[n]
            t.metadata["truncated"] |= not drawn.finished[n]
            texts[i] = drawn.texts[n]
        return texts

    return act


# ---- 7. preflight ----


def preflight(args, model, tokenizer, make):
    """Rollout log-probs = a teacher-forced pass over the same tokens; groups sum to 0; trained tokens = sampled tokens."""
    history = args.history or make().history
    act = model_act(args, model, tokenizer, history, args.temperature, args.seed)
    seeds = [s for s in training_seeds(args, 0)[:2] for _ in range(args.group_size)]
    played = play([make() for _ in seeds], seeds, act)
    (group,) = gather_trajectory_groups([TrajectoryGroup(played)], args.max_exceptions)
    rewards = [math.nan if isinstance(t, BaseException) else t.reward for t in played]
    advantages = group_advantages(torch.tensor(rewards).view(-1, args.group_size), args.scale)
    samples = [s for t in group for s in t.samples]
    if not samples:
        raise UserError(f"--max-new-tokens {args.max_new_tokens}: no opening of {args.env} and a turn fit in --max-length {args.max_length} and the model's positions")  # fmt: skip
    gap = head = 0.0
    for some in common.micro_batches(range(len(samples)), [len(s["ids"]) for s in samples], args.micro_tokens):  # fmt: skip
        ids, attention_mask, mask, old, _ = pack([samples[i] for i in some], tokenizer, model.device)  # fmt: skip
        with torch.no_grad():
            head = max(head, old_runs.check_head(model, ids, attention_mask, mask))
            logps = token_logps(model, ids, attention_mask, mask, args.temperature)
        old_runs.check_start(model, args.model, logps.sum().item() + head, "the first episodes")
        gap = max(gap, (logps - old)[mask].abs().max().item())
    bound = 1e-4 if model.compute_dtype == torch.float32 else 5e-2
    sums, tokens = advantages.sum(dim=1).abs().max().item(), sum(len(s["logps"]) for s in samples)
    turns = sum(len(s["turns"]) for s in samples)
    print(
        f"preflight  log-probs of the episodes = teacher forcing (gap {gap:.1e}, bound {bound:.0e}), so ratio 1; groups sum to 0 "
        f"(largest {sums:.1e}); trained tokens = sampled tokens = {tokens} of {sum(len(s['ids']) for s in samples)}, in {turns} turns"
    )
    if not head < bound:
        raise UserError(f"--model {args.model}: {old_runs.OTHER_HEAD}")
    if not gap < bound:
        raise UserError(
            f"--model {args.model}: what is scored is not what was sampled (gap {gap:.2g}); try --dtype fp32"
        )
    largest = advantages.abs().max().item()  # rewards in thousands round in thousands
    assert sums < 1e-4 * max(1, largest), "advantages of a group must sum to 0"
    if history == "all" and len(samples) > len(group):
        print("the chat template rewrites earlier turns, so a turn is a sample of its own")
    unread = sum(t.metrics.get("invalid", 0) for t in group)
    if unread >= 0.9 * turns:
        print(f"warning: {unread} of {turns} turns could not be read: from here there is nothing to learn from; docs/agents.md says how to teach the form first")  # fmt: skip
    print("first episode   · context   ▮ trained   ◆ the last of it, trained")
    ids, attention_mask, mask, *_ = pack(samples[:1], tokenizer, "cpu")
    print(runs.token_strip(tokenizer, ids[0].tolist(), mask[0].tolist(), "◆"))


def baseline_scores(make, seeds, max_exceptions=0):
    """{name: (rewards, successes)} of each baseline on the seeds; of several policies under a name the best one's."""
    found = {}
    for name, policies in make().baselines.items():
        tries = []
        for policy in policies:
            envs = [make() for _ in seeds]
            played = play(envs, seeds, baseline_act(policy))
            (group,) = gather_trajectory_groups([TrajectoryGroup(played)], max_exceptions)
            tries.append(([t.reward for t in group], [t.metrics[envs[0].val_key] for t in group]))
        found[name] = max(tries, key=lambda t: (sum(t[1]), sum(t[0])))
    return found


# ---- 8. the loop ----


def training_seeds(args, step):
    """The P seeds of a step, a function of --seed and step alone: a resumed run needs no cursor."""
    drawn = np.random.default_rng([args.seed, step]).choice(10**9, args.groups_per_batch, replace=False)  # fmt: skip
    return [int(seed) for seed in drawn]


def pack(samples, tokenizer, device):
    """(ids, attention_mask, mask, logps, weights), each (N, T): mask is True on what the policy sampled, 0 elsewhere.

    weights: samples[i]["weights"], one a turn (`token_weights`); 1 for all without.
    """
    longest = max(len(s["ids"]) for s in samples)
    ids = torch.full((len(samples), longest), common.pad_id(tokenizer))
    attention_mask = torch.zeros(len(samples), longest, dtype=torch.bool)
    logps, weights = torch.zeros(2, len(samples), longest)
    for i, s in enumerate(samples):
        ids[i, : len(s["ids"])] = torch.tensor(s["ids"])
        attention_mask[i, : len(s["ids"])] = True
        for (start, end), weight in zip(s["turns"], s.get("weights", [1.0] * len(s["turns"])), strict=True):  # fmt: skip
            weights[i, start:end] = weight
        logps[i, weights[i] > 0] = torch.tensor(s["logps"])
    return [x.to(device) for x in (ids, attention_mask, weights > 0, logps, weights)]


def grade(args, judge, standard, played):
    """(rewards, parts): N numbers or None; {part: N of them}. None where the episode raised, or the judge failed."""
    weights = reward_weights(args.reward)
    alive = [not isinstance(t, BaseException) for t in played]
    parts = {name: [None] * len(played) for name in weights}
    if "env" in weights:
        parts["env"] = [t.reward if ok else None for t, ok in zip(played, alive, strict=True)]
    if "ruler" in weights:
        places = [[i for i in range(start, start + args.group_size) if alive[i]] for start in range(0, len(played), args.group_size)]  # fmt: skip
        places = [group for group in places if len(group) > 1]
        mine = parallel.share(range(len(places)))
        talks = [[played[i].messages() for i in places[n]] for n in mine]
        rulings = parallel.gather(judges.ruler_groups(talks, judge, standard, args.judge_passes), mine)  # fmt: skip
        for group, ruling in zip(places, rulings, strict=True):
            # equal episodes everywhere: nothing to compare, so nothing to learn
            scores = ruling.scores or [0.0 if ruling.identical else None] * len(group)
            for i, score in zip(group, scores, strict=True):
                parts["ruler"][i] = score
    total = [
        None if None in found else sum(w * x for w, x in zip(weights.values(), found, strict=True))
        for found in zip(*(parts[name] for name in weights), strict=True)
    ]
    return total, parts


SUMS = ("clipped", "ratio", "approx_kl", "k3", "entropy", "kl")


def accumulate(args, model, reference, tokenizer, scaler, rows, active, advantages):
    """The gradient of rows[active], (episode, sample) each, forward by forward: (sums for the log, largest ratio, gap)."""
    sums, largest, gap = Counter(), 0.0, 0.0
    for micro in old_runs.rank_batches(model, active, [len(s["ids"]) for _, s in rows], args.micro_tokens):  # fmt: skip
        owners = [rows[r][0] for r in micro]
        ids, attention_mask, mask, old, weights = pack([rows[r][1] for r in micro], tokenizer, model.device)  # fmt: skip
        logps, entropies = token_logps(
            model, ids, attention_mask, mask, args.temperature, with_entropy=True
        )
        gap = max(gap, (logps.detach() - old).abs().max().item())
        if args.num_substeps == 1:
            old = logps.detach()
        ref_logps, k1 = None, torch.zeros(())
        if args.beta:
            with torch.no_grad(), lora.adapter_off(reference or model):
                ref_logps = token_logps(
                    reference or model, ids, attention_mask, mask, args.temperature
                )
            k1 = kl_estimates(logps.detach(), ref_logps, mask)[0]
        loss, found = turn_loss(
            logps, old, advantages[owners].to(logps.device), weights, ref_logps, args.clip_low, args.clip_high, args.beta
        )  # fmt: skip
        (loss if scaler is None else scaler.scale(loss)).backward()
        largest = max(largest, found.pop("ratio_max"))
        found |= {"entropy": entropies.detach().sum().item(), "kl": k1.sum().item()}
        sums.update(found, loss=loss.item(), tokens=int(mask.sum()))
    return sums, largest, gap


def update(args, model, reference, tokenizer, optimizer, scaler, played, advantages, in_loss, step, steps):  # fmt: skip
    """Step (4): --num-substeps optimiser steps of whole groups; the means of their metrics over the whole update.

    advantages (N,); in_loss (N,) bool: episodes with a reward. Those with advantage 0 need no forward when there is no KL
    term; they stay in the weights, so the update is the same.
    """
    groups = len(advantages) // args.group_size
    groups = np.random.default_rng([args.seed, step]).permutation(groups)
    sums, forwarded, largest, sample_gap, done = Counter(), 0, 0.0, None, []
    for k, part in enumerate(np.array_split(groups, args.num_substeps)):
        members = (part[:, None] * args.group_size + np.arange(args.group_size)).ravel()
        members = [i for i in members.tolist() if in_loss[i]]
        if not any(advantages[i] != 0 for i in members):
            continue  # no group with a signal: no update
        lengths = [[end - start for s in played[i].samples for start, end in s["turns"]] for i in members]  # fmt: skip
        rows = []  # (episode, sample)
        for i, each in zip(members, token_weights(lengths, args.turn_norm), strict=True):
            for s in played[i].samples:
                n = len(s["turns"])
                rows.append((i, s | {"weights": each[:n]}))
                each = each[n:]
        active = [r for r, (i, _) in enumerate(rows) if args.beta or advantages[i] != 0]
        skips, skipped = 0, True
        while skipped:  # an fp16 overflow: the same substep again, at half the scale
            found, ratio, gap = accumulate(args, model, reference, tokenizer, scaler, rows, active, advantages)  # fmt: skip
            total = parallel.all_sum(found["loss"])
            old_runs.set_lr(
                optimizer, args, (step - 1) * args.num_substeps + k + 1, steps * args.num_substeps
            )
            norm, skipped = old_runs.clip_and_step(
                model, optimizer, scaler, args, total, lambda rows=rows: f"episodes of the seeds {sorted({played[i].metadata['seed'] for i, _ in rows})[:4]}"
            )  # fmt: skip
            skips += skipped
        done.append((total, norm, skips))
        sums.update(found)
        forwarded, largest = forwarded + len({rows[r][0] for r in active}), max(largest, ratio)
        sample_gap = gap if sample_gap is None else sample_gap
    tokens, *totals = parallel.all_sum(sums["tokens"], *(sums[name] for name in SUMS))
    largest, sample_gap = parallel.all_max(largest, sample_gap) if done else (None, None)
    totals = dict(zip(SUMS, totals, strict=True))
    mean = {name: value / tokens if tokens else None for name, value in totals.items()}
    return {
        "loss": stats.mean([d[0] for d in done]), "clip_frac": mean["clipped"], "ratio/mean": mean["ratio"], "ratio/max": largest,
        "approx_kl": mean["approx_kl"], "entropy": mean["entropy"], "sample_gap": sample_gap, "updates": len(done), "forwarded": forwarded,
        "kl/coef": args.beta, "kl/ref": totals["kl"] / forwarded if args.beta and forwarded else None, "kl/token": mean["kl"] if args.beta else None,
        "kl/k3": mean["k3"] if args.beta else None, "lr": optimizer.param_groups[0]["lr"],
        "grad_norm": stats.mean([d[1] for d in done]), "skipped_steps": sum(d[2] for d in done),
    }  # fmt: skip


def episode_metrics(played):
    """Means of the environment's info over the episodes that were played, and the share of turns that it could not read."""
    played = [t for t in played if not isinstance(t, BaseException)]
    keys = list(dict.fromkeys(key for t in played for key in t.metrics if key != "invalid"))
    found = {f"env/{key}": stats.mean([t.metrics.get(key) for t in played]) for key in keys}
    turns = sum(t.metrics.get("turns", 0) for t in played)
    found["env/invalid_frac"] = sum(t.metrics.get("invalid", 0) for t in played) / turns if turns else None  # fmt: skip
    return found | {"env/episodes": len(played)}


def rollout_row(args, env, played, parts, rewards_PG, advantages_PG):
    """The metrics of a rollout; a share is over the groups or episodes that have a reward."""
    scored = ~rewards_PG.isnan()
    found = rewards_PG[scored]
    alive = [t for t in played if not isinstance(t, BaseException)]
    lengths = torch.tensor([0.0 if isinstance(t, BaseException) else sum(len(s["logps"]) for s in t.samples) for t in played], dtype=torch.float)  # fmt: skip
    columns = zip(rewards_PG, scored, lengths.view_as(rewards_PG), advantages_PG, strict=True)
    groups = [(r[s], l[s], a.any().item()) for r, s, l, a in columns if s.sum() > 1]
    correlations = [np.corrcoef(r, l)[0, 1] for r, l, _ in groups if r.max() - r.min() > 1e-6 and l.std() > 0]  # fmt: skip
    low, high = args.reward_range
    middle, top = (low + high) / 2, high - 0.001 * (high - low)
    share = lambda hits: sum(hits) / len(groups) if groups else None  # noqa: E731
    said = ["\n".join(m["content"] for m in t.messages() if m["role"] == "assistant") for t in alive]  # fmt: skip
    prose = watch.text_metrics([t.messages()[0]["content"] for t in alive], said) if getattr(env, "prose", True) else {}  # fmt: skip
    return {
        "reward/mean": found.mean().item() if len(found) else None, "reward/std": found.std().item() if len(found) > 1 else None,
        **{f"reward/{name}": stats.mean(values) for name, values in parts.items()}, "reward/unscored_frac": 1 - len(found) / scored.numel(),
        "reward/frac_perfect": (found >= top).float().mean().item() if len(found) else None,
        "reward/frac_mixed": share([signal for *_, signal in groups]),
        "reward/frac_all_good": share([not s and r.mean().item() >= middle for r, _, s in groups]),
        "reward/frac_all_bad": share([not s and r.mean().item() < middle for r, _, s in groups]),
        "reward/length_corr": float(np.mean(correlations)) if correlations else None,
        "groups/scored": len(groups), "groups/skipped": len(rewards_PG) - sum(signal for *_, signal in groups),
        "advantage/abs_mean": advantages_PG.abs().mean().item(), **episode_metrics(played), **prose,
        "length/mean": lengths.mean().item(), "length/min": lengths.min().item(), "length/max": lengths.max().item(),
        "length/truncated_frac": stats.mean([float(t.metadata["truncated"]) for t in alive]),
        "tokens": sum(len(s["ids"]) for t in alive for s in t.samples), "answer_tokens": int(lengths.sum()), "episodes": len(played),
        "exceptions": len(played) - len(alive),
    }  # fmt: skip


def rollout_rows(split, played, group_size, parts, rewards, advantages):
    """What rollouts.jsonl holds of an episode: every word of it, to be read by people."""
    for i, t in enumerate(played):
        row = {"split": split, "group": i // group_size, "sample": i % group_size}
        if isinstance(t, BaseException):
            yield row | {"error": said_of(t)}
            continue
        yield row | {
            **t.metadata, "messages": t.messages(), "reward": rewards[i], "components": {name: values[i] for name, values in parts.items()},
            "advantage": advantages[i], "tokens": sum(len(s["logps"]) for s in t.samples), "metrics": t.metrics, "logs": t.logs,
        }  # fmt: skip


@torch.no_grad()
def evaluate(args, model, tokenizer, make, seeds):
    """(metrics, episodes) on held-out seeds, one episode each, at --eval-temperature."""
    env = make()
    act = model_act(args, model, tokenizer, args.history or env.history, args.eval_temperature, args.seed)  # fmt: skip
    played, moves = play_shared(make, seeds, act, model)
    (group,) = gather_trajectory_groups([TrajectoryGroup(played)], args.max_exceptions)
    moves = [m for m, t in zip(moves, played, strict=True) if not isinstance(t, BaseException)]
    return {
        "val/score": stats.mean([t.metrics.get(env.val_key, 0.0) for t in group]), "val/reward": stats.mean([t.reward for t in group]),
        "val/length": stats.mean([sum(len(s["logps"]) for s in t.samples) for t in group]),
        **episode_metrics(played), "env/blind_share": blind_share(moves),
    }, played  # fmt: skip


def transcript(t):
    """An episode as lines to read, > before the policy's, its reward at the end."""
    who, shown = {"assistant": ">", "system": "#"}, t.messages()
    lines = [f"  {who.get(m['role'], ' ')} " + m["content"].replace("\n", "\n    ") for m in shown]  # fmt: skip
    return "\n".join([*lines, f"  reward {t.reward:.2f}  " + "  ".join(f"{k} {v:g}" for k, v in t.metrics.items() if v)])  # fmt: skip


def log_evaluation(log, watcher, best, model, step, metrics, played):
    """Write an evaluation with its rollouts, tell the watch, keep the weights if they are the best so far."""
    alive = sorted((t for t in played if not isinstance(t, BaseException)), key=lambda t: t.reward)
    if not alive:
        return best
    log.evaluation(step, metrics, [])
    rewards = [None if isinstance(t, BaseException) else t.reward for t in played]
    rows = rollout_rows("validation", played, 1, {"env": rewards}, rewards, [None] * len(played))  # fmt: skip
    log.append("rollouts.jsonl", step, rows)
    for word, t in (("worst", alive[0]), ("best", alive[-1])):
        old_runs.print_over_bar(f"{word}, seed {t.metadata['seed']}\n{transcript(t)}")
    for event in watcher.add({"step": step, **metrics}):
        old_runs.print_over_bar(str(event))
    return old_runs.keep_best(best, watcher.best_step(), model, step)


def play_command(args, make):
    """Show episodes of a baseline, a model, or of you; or talk to an interviewer as its candidate."""
    env, seeds = make(), range(args.seed, args.seed + args.episodes)
    history = args.history or env.history

    def typed(live):
        print(*(m["content"] for m in live[0][0].messages()[-1 - live[0][1].first :]), sep="\n")
        live[0][1].first = False
        return [input("you> ")]

    def answered(text, risky, env):
        env.asked.append((set(), set()))  # nothing is scored: the turn is only counted
        print(f"interviewer> {text}")
        return input("you> ")

    if args.policy == "human":
        act = typed
    elif args.policy in env.baselines:
        act = baseline_act(env.baselines[args.policy][0])
    elif Path(args.policy).is_dir():
        device = parallel.pick_device(args.device)
        model = common.load_policy(args.policy, parallel.pick_precision(device, args.dtype)[0], device, trainable=False)  # fmt: skip
        act = model_act(args, model, common.load_tokenizer(args.policy), history, args.eval_temperature, args.seed)  # fmt: skip
    else:
        raise UserError(f"--policy {args.policy}: expected human, a model folder, or a baseline of {args.env}: {', '.join(env.baselines)}")  # fmt: skip
    if args.write and Path(args.write).exists() and not args.overwrite:
        raise UserError(f"--write {args.write}: exists; pass --overwrite to replace it")
    if args.as_candidate and not isinstance(env, Interview):
        raise UserError(f"--as-candidate: {args.env} has no candidate")
    envs = [make() for _ in seeds]
    for each in envs:
        each.first = True
        if args.as_candidate:
            each.reply = functools.partial(answered, env=each)
    try:
        if args.policy == "human" or args.as_candidate:  # one after the other
            played = [t for e, seed in zip(envs, seeds) for t in play([e], [seed], act)]
        else:
            played = play(envs, seeds, act)
        if any(isinstance(t, EOFError) for t in played):
            raise EOFError
    except EOFError:  # Ctrl-D
        return print("ended")
    (group,) = gather_trajectory_groups([TrajectoryGroup(played)], args.max_exceptions)
    for t in list(group)[: 1 if args.write else None]:
        print(f"{env.name}, {args.policy}, seed {t.metadata['seed']}\n{transcript(t)}")
    hits = [t.metrics.get(env.val_key, 0.0) for t in group]
    print(f"{len(group)} episodes: reward {stats.mean([t.reward for t in group]):.3f}, {env.val_key} {stats.mean(hits):.3f}")  # fmt: skip
    if args.write:  # each turn behind what the policy saw
        rows = [
            {"prompt": seen(t.messages()[:i], history), "completion": [m]}
            for t in group for i, m in enumerate(t.messages()) if m["role"] == "assistant"
        ]  # fmt: skip
        files.write_jsonl(args.write, rows)
        print(f"wrote {args.write}; next: python sft.py --data {args.write} --model {args.model} --out runs/agent_start")  # fmt: skip


def main(argv=None):
    args = parse_args(argv)
    make = environment(args)
    if args.command == "play":
        return play_command(args, make)
    parallel.start_processes(args)
    old_runs.check_out(args, [args.model])
    old_runs.seed_everything(args.seed)
    env = make()
    weights = reward_weights(args.reward)
    ranges = {"env": env.reward_range, "ruler": (0, 1)}
    args.reward_range = [sum(w * ranges[n][end] for n, w in weights.items()) for end in (0, 1)]  # fmt: skip
    steps, p, g = args.steps or args.epochs * EPOCH, args.groups_per_batch, args.group_size
    print(
        f"{env.name}: {steps} steps of {p} seeds × {g} episodes = {p * g} episodes of at most {env.max_turns} turns = {args.num_substeps} × {p * g / args.num_substeps:g} a substep"
    )
    print(watch.promise(args))
    val_seeds = range(VAL_SEEDS, VAL_SEEDS + args.val_episodes)
    baselines = {}
    for name, (rewards, hits) in baseline_scores(make, val_seeds, args.max_exceptions).items():
        baselines |= {f"env/baseline/{name}": stats.mean(hits), f"env/baseline_reward/{name}": stats.mean(rewards)}  # fmt: skip
        print(f"baseline {name:>8}: {env.val_key} {stats.mean(hits):.3f}  reward {stats.mean(rewards):.3f}  on {len(hits)} validation seeds")  # fmt: skip
    if baselines.get("env/baseline/blind", 0) > 0.5 * baselines.get("env/baseline/greedy", math.inf):  # fmt: skip
        print("warning: a cycle of moves played without a look at the board does more than half as well as greedy: a high score here proves little; --illegal end, a larger --env-target")  # fmt: skip
    several = parallel.rank(), parallel.world()
    judge = judges.Judge.from_args(args, args.out, *several) if "ruler" in weights else None
    if judge:
        judge.warn_same(args.model)
        if not args.skip_judge_check and not parallel.rank():
            judge.probe()
    standard = judges.read_standard(args.ruler_rubric)
    model, reference, tokenizer, scaler = load_models(args)
    args.lr = old_runs.pick_lr(args, model, LR_SMALL, LR_FULL, LR_LORA)
    args.micro_tokens = args.micro_tokens or common.micro_tokens(model)
    trained = sum(q.numel() for q in model.parameters() if q.requires_grad) / 1e6
    print(
        f"policy {trained:.2f} M weights, reference {'none' if not args.beta else 'adapters off' if reference is None else 'a frozen copy'}, lr {args.lr:g}, on {model.device}"
    )
    inputs = [args.interview_bank, args.ruler_rubric, args.env.rpartition(":")[0]]
    record = old_runs.check_run(args, "grpo_agent", inputs, args.model)
    model = old_runs.prepare_training(model, args)
    optimizer = old_runs.make_optimizer(model, args.lr, weight_decay=args.weight_decay)
    extra = {}
    start = old_runs.load_checkpoint(args, {"model": model}, {"model": optimizer}, scaler, extra)
    best = extra.get("best", {"step": None, "weights": {}})
    if start == 0:  # what is in --out stays untouched until all this has passed
        preflight(args, model, tokenizer, make)
        before = evaluate(args, model, tokenizer, make, val_seeds)
    old_runs.open_run(args, record)
    log, stop = old_runs.MetricsLog(args, start), old_runs.StopSignal()
    watcher = watch.Watcher(args, log.rows())
    if start == 0:
        # a full disk or an unsaveable config shows now, not after hours
        old_runs.save_run(model, tokenizer, args)
        best = log_evaluation(log, watcher, best, model, 0, before[0] | baselines, before[1])

    bar, reason = old_runs.progress("grpo", start, steps), None
    for step in bar:
        spent = Counter(judge.counts) if judge else None
        # (1) rollout: G episodes from each of P seeds, all live ones take a turn together, log-probs kept
        seeds = [s for s in training_seeds(args, step) for _ in range(g)]
        act = model_act(args, model, tokenizer, args.history or env.history, args.temperature, args.seed * 10**6 + step)  # fmt: skip
        played, _ = play_shared(make, seeds, act, model, g)
        groups = [TrajectoryGroup(played[i : i + g]) for i in range(0, p * g, g)]
        gather_trajectory_groups(groups, args.max_exceptions)  # stops the run where too many raised
        # (2) reward: the environment's own, RULER's, or both; an episode that raised has none
        rewards, parts = grade(args, judge, standard, played)
        rewards_PG = torch.tensor([math.nan if r is None else r for r in rewards]).view(p, g)
        # (3) advantages: reward − mean of the group; every turn of an episode carries the same one
        advantages_PG = group_advantages(rewards_PG, args.scale)
        scored = ~rewards_PG.isnan()
        in_loss = (scored & (scored.sum(dim=1, keepdim=True) > 1)).view(-1).tolist()
        # (4) update: clipped policy gradient over the policy's own tokens, the environment's are context
        row = update(args, model, reference, tokenizer, optimizer, scaler, played, advantages_PG.view(-1), in_loss, step, steps)  # fmt: skip
        row = {"step": step, "epoch": (step - 1) // EPOCH, **row, **rollout_row(args, env, played, parts, rewards_PG, advantages_PG)}  # fmt: skip
        row |= judge.metrics(spent) if judge else {}
        events = watcher.add(row)
        log.write({**row, "alarms": len(events), "health": watcher.health()})
        if (step - 1) % args.rollouts_every == 0:
            log.append("rollouts.jsonl", step, rollout_rows("train", played, g, parts, rewards, advantages_PG.view(-1).tolist()))  # fmt: skip
        bar.set_postfix_str(
            f"reward {row['reward/mean'] or 0:.3f} val {watcher.points[-1].v if watcher.points else 0:.3f} turns {row['env/turns'] or 0:.1f} "
            f"length {row['length/mean']:.0f} mixed {row['reward/frac_mixed'] or 0:.2f}"
        )
        for event in events:
            old_runs.print_over_bar(str(event))
        # (5) now and then: held-out seeds, beside the baselines; the alarms of watch.py
        if step == steps or (args.eval_every and step % args.eval_every == 0):
            metrics, val = evaluate(args, model, tokenizer, make, val_seeds)
            best = log_evaluation(log, watcher, best, model, step, metrics, val)
        reason = parallel.from_rank_0(watcher.stop_reason())
        if old_runs.checkpoint_due(args, step, steps, stop) or reason:
            old_runs.save_checkpoint(
                args, step, {"model": model}, {"model": optimizer}, scaler, best=best
            )
        if reason:
            bar.close()
            break
        if stop or step == args.stop_after:
            return log.stopped(step, stop)

    # ---- 9. save ----
    last = log.rows()[-1]["step"]
    if args.restore == "best":
        old_runs.restore_best(best, model)
    old_runs.save_run(model, tokenizer, args)
    kept = best["step"] if args.restore == "best" else last
    summary = {"step": kept, "last_step": last, "stop_reason": reason or "all steps done"}
    if args.test_episodes:  # played once, here, by all
        seeds = range(TEST_SEEDS, TEST_SEEDS + args.test_episodes)
        start_model = common.load_policy(args.model, model.compute_dtype, model.device, trainable=False)  # fmt: skip
        found = {f"baseline {name}": (hits, rewards, {}) for name, (rewards, hits) in baseline_scores(make, seeds, args.max_exceptions).items()}  # fmt: skip
        for when, policy in (("before", start_model), ("after", model)):
            metrics, played = evaluate(args, policy, tokenizer, make, seeds)
            alive = list(TrajectoryGroup(played))
            found[when] = [t.metrics.get(env.val_key, 0.0) for t in alive], [t.reward for t in alive], metrics  # fmt: skip
        for name, (hits, rewards, metrics) in found.items():
            line, summary[f"test {name}"] = f"test {name:>16}:", {"n": len(hits), **metrics}
            for key, values in (("score", hits), ("reward", rewards)):
                low, high = judges.cluster_interval(values, range(len(values))) or (None, None)
                summary[f"test {name}"] |= {key: stats.mean(values), f"{key}_low": low, f"{key}_high": high}  # fmt: skip
                line += f" {key} {stats.mean(values):.3f}" + ("" if low is None else f" [{low:.3f}, {high:.3f}]")  # fmt: skip
            print(f"{line}  n = {len(hits)}")
    if not parallel.rank():
        files.write_json(Path(args.out) / "summary.json", summary)
    if reason and reason != "max_steps":
        print(f"stopped by watch.py: {reason}")
    log.finish(["val/score", "val/reward", "reward/mean"])
    print(f"next: python grpo_agent.py play{flags_of(args)} --policy {args.out} --seed 7")
    return watch.exit_code(reason)


if __name__ == "__main__":
    files.command(main)
