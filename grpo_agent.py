"""grpo_agent.py: an environment of several turns in, a policy out that does better in it.

Objective    maximise E[R] − β·KL(π‖π_ref), R the reward of a whole episode
Algorithm    (1) rollout: G episodes from each of P seeds; all live ones take a turn together
             (2) reward: the environment's own, or RULER's, which compares the group's episodes
             (3) advantages: reward − mean of the group; every turn of an episode has the same one
             (4) update: clipped policy gradient over the policy's own tokens, as in parts/grpo.py
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
To copy      `continued_ids` and `training_rows`: a conversation as the tokens that the policy saw,
             and those that it drew; the math is in parts/grpo.py
Reference    Shao et al. 2024, arXiv 2402.03300, eq. 3 (GRPO); clip range: DAPO, 2503.14476;
             no division by the deviation: Dr. GRPO, 2503.20783; RULER and 2048: OpenPipe ART
Axes         P seeds, G episodes per seed, N rows, one or more per episode, T tokens
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import random
import shlex
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import common
import ruler
import watch
from common import Policy, encode, encode_prompt, end_ids, load_model, load_tokenizer, render
from parts import flags, grpo, rollouts, runs, server
from parts.answers import scored, visible
from parts.card import shown_value
from parts.files import UserError, brief, command, load_function, number, write_jsonl
from parts.pairs import check_text
from parts.parallel import all_sum, gather, pick, rank, world
from parts.sampling import sample
from parts.texts import text_flags, text_metrics

RATES = 3e-4, 1e-5, 2e-4  # below 100 M parameters (worked on data/tiny-base), above, with LoRA
STEPS = 40  # without --steps; seeds have no end, so there are no epochs
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
    ruler.add_ruler_arguments(parser)
    server.add_judge_arguments(parser)
    watch.add_watch_arguments(parser)
    parser.set_defaults(eval_every=5, save_every=10)
    args = parser.parse_args(argv)
    if args.epochs:
        raise UserError(f"--epochs: seeds have no end; use --steps (default {STEPS})")
    grpo.check_groups(args)
    return args


# ---- the environment ----
# The environment is the data. It has name, max_turns, reward_range, history ("all", or a number of
# exchanges), val_key (the entry of info that is success itself), baselines (name → policy:
# (env, rng) → text), and
#     reset(seed) → messages;   step(text) → (message or None, reward, done, info)
# All randomness comes from its own random.Random(seed). info is flat numbers; that of the last turn
# is logged. Optional: run_out() → (reward, info), asked when turns or context are used up;
# prose = False, if the turns are not sentences. Steps of different episodes run in threads.


def environment(args):
    """A function without arguments that makes the environment of --env."""
    made = load_function(args.env, "--env")
    with users_class(args):
        make = functools.partial(made, **json.loads(args.env_args))
        env = make()  # what is missing in it is said now, before a model is loaded
        _ = env.name, env.max_turns, env.val_key, env.baselines, env.reset, env.step
        shown_messages([], env.history)
        low, high = env.reward_range
    return make


@contextlib.contextmanager
def users_class(args):
    """What the class of --env raises is a UserError, with its file and line."""
    try:
        yield
    except Exception as error:  # the user's own code may raise anything
        given = f"--env {args.env} --env-args '{args.env_args}'"
        last, cause = traceback.extract_tb(error.__traceback__)[-1], type(error).__name__
        where = f"{last.filename}, line {last.lineno}"
        raise UserError(
            f"{given}: {cause}: {brief(error)} ({where}); see docs/agents.md"
        ) from error


@dataclass
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
        self.reward += float(reward)
        self.metrics |= {key: float(value) for key, value in info.items()}
        if not all(map(math.isfinite, (self.reward, *self.metrics.values()))):
            raise ValueError(f"reward {reward}, info {info}: expected finite numbers")

    def take_turn(self, text):
        """One turn: the environment sees what stands behind </think>. Returns whether the episode
        goes on. text None: the context is full; the episode ends as if its turns had run out."""
        done, self.truncated = False, self.truncated or text is None
        if text is not None:
            self.messages.append({"role": "assistant", "content": text})
            message, reward, done, info = self.env.step(visible(text))
            self.note(reward, info)
            if not done:
                self.hear(message)
        turns = len(self.texts())
        if not done and (text is None or turns >= self.env.max_turns):
            done = True
            if hasattr(self.env, "run_out"):
                self.note(*self.env.run_out())
        if done and turns and self.env.val_key not in self.metrics:
            raise ValueError(f"info {self.metrics} lacks {self.env.val_key!r}, its val_key")
        return not done


def play(args, make, seeds, player, temperature=1.0, seed=0):
    """An `Episode` from each seed; all live ones take a turn together.

    player   (policy, tokenizer), or a baseline of the environment: (env, rng) → text

    An episode depends on its seed, its number and `seed` alone, not on who is played beside it.
    With several processes each plays its share and receives all episodes.
    """
    local = list(enumerate(seeds))[rank() :: world()]
    episodes = [Episode(s, number, make(), random.Random(f"policy {s}")) for number, s in local]
    live, turn = episodes, 0
    with users_class(args):
        for episode in episodes:
            episode.hear(*episode.env.reset(episode.seed))
    with ThreadPoolExecutor(32) as pool:  # slow tools do not wait for one another
        while all_sum(len(live)):  # as many turns in all processes: a forward may be a collective
            turn += 1
            if isinstance(player, tuple):
                texts = draw_turns(args, *player, live, temperature, 1000 * seed + turn)
            with users_class(args):
                if not isinstance(player, tuple):
                    texts = [player(episode.env, episode.rng) for episode in live]
                goes_on = list(pool.map(Episode.take_turn, live, texts))
            live = list(itertools.compress(live, goes_on))
    for episode in episodes:
        episode.env = None  # a user's class may refuse to be sent to another process
    return sorted(gather(episodes), key=lambda episode: episode.number)


def training_seeds(args, step):
    """The seeds of a step's N episodes, a function of --seed and step: no cursor to resume."""
    rng = np.random.default_rng([args.seed, step])
    seeds = rng.choice(VAL_SEEDS, args.groups_per_batch, replace=False)
    return seeds.repeat(args.group_size).tolist()


# ---- the policy's turns, as tokens ----


def shown_messages(messages, history):
    """What a turn sees: all, or system messages, the last k exchanges and the newest message.

    >>> roles = "system user assistant user".split()
    >>> [m["role"] for m in shown_messages([{"role": role} for role in roles], 0)]
    ['system', 'user']
    """
    if history == "all":
        return messages
    exchanges = [m for m in messages if m["role"] != "system"]
    return [m for m in messages if m["role"] == "system"] + exchanges[-2 * int(history) - 1 :]


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
    end = next((t for t, i in enumerate(new) if i in ends), None)
    if ids[-1] in ends and end is not None and not tokenizer.decode(new[:end]).strip():
        new = new[end + 1 :]  # the end of turn was drawn; Llama 2 has a blank before it
    return [*ids, *new]


def next_prompt(tokenizer, episode):
    """Ids that the next turn answers: those so far and the new message's. If the history is cut or
    the template rewrites earlier turns, the prompt is encoded anew."""
    ids, history = None, episode.env.history
    if history == "all" and episode.draws:
        prompt, drawn, _ = episode.draws[-1]
        ids = continued_ids(tokenizer, episode.messages, prompt + drawn)
    return ids or encode_prompt(tokenizer, shown_messages(episode.messages, history))


def draw_turns(args, policy, tokenizer, live, temperature, seed):
    """A text for each live episode; None where the context is full."""
    room = min(args.max_length, common.max_positions(policy.model.config)) - args.max_new_tokens
    prompts = [next_prompt(tokenizer, episode) for episode in live]
    fit, texts = [i for i, ids in enumerate(prompts) if len(ids) <= room], [None] * len(live)
    rollout = sample(
        policy, tokenizer, [prompts[i] for i in fit], 1, args.max_new_tokens, temperature, seed,
        numbers=[live[i].number for i in fit], alone=True,
    )  # fmt: skip
    for row, i in enumerate(fit):
        texts[i] = rollout.texts[row]
        live[i].draws.append((prompts[i], rollout.answer_ids[row], rollout.logps[row]))
        live[i].truncated |= not rollout.finished[row]
    return texts


def training_rows(draws):
    """What is trained of an episode: one row where each turn's prompt begins with the row so far,
    else a row per turn.

    draws     (prompt ids, drawn ids, log-probs) of each turn
    returns   rows of (ids, mask, log-probs), lists of T: mask is True for what the policy drew;
              log-probs of other tokens are 0

    >>> training_rows([([1], [2], [-0.5]), ([1, 2, 3], [4], [-0.1])])
    [([1, 2, 3, 4], [False, True, False, True], [0.0, -0.5, 0.0, -0.1])]
    """
    rows = []
    for prompt, drawn, logps in draws:
        row = [], [], []
        if rows and rows[-1][0] == prompt[: len(rows[-1][0])]:
            row = rows.pop()
        new = len(prompt) - len(row[0])  # tokens of the environment and of the template
        mask = row[1] + [False] * new + [True] * len(drawn)
        rows.append((prompt + drawn, mask, row[2] + [0.0] * new + logps))
    return rows


def pack(rows, pad, device):
    """{"ids", "attention_mask", "mask", "logps"}, (N, T) each, right-padded, of `training_rows`."""
    ids, attention_mask, _ = common.pad_rows([row[0] for row in rows], [[]] * len(rows), pad)
    mask, logps = (pad_sequence([torch.tensor(row[k]) for row in rows], True) for k in (1, 2))
    b = {"ids": ids, "attention_mask": attention_mask, "mask": mask, "logps": logps}
    return {name: x.to(device) for name, x in b.items()}


# ---- preflight ----


def preflight(args, run, player, reference, make):
    """Log-probs of a rollout = a teacher-forced pass; some turns can be read; one episode, marked.

    Returns the seconds that a step will take.
    """
    (policy, tokenizer), start = player, time.time()
    seeds = training_seeds(args, 0)[: 2 * args.group_size]
    episodes = play(args, make, seeds, player, args.temperature, args.seed)
    played = time.time()
    rows = [row for episode in episodes for row in training_rows(episode.draws)]
    if not rows:
        raise UserError(f"--max-length {args.max_length}: no opening fits in it with a turn")
    b = pack(rows, common.pad_id(tokenizer), run.device)
    rollouts.preflight(run, policy, reference, tokenizer, b)
    strip = "".join("▮" * drawn + tokenizer.decode([i]) for i, drawn, _ in zip(*rows[0]))
    print(f"episode    ▮ before each trained token: {strip[:2000]}")
    unread = sum(episode.metrics.get("invalid", 0) for episode in episodes)
    if unread >= 0.9 * sum(len(episode.draws) for episode in episodes):
        print("warning: the environment could read next to none of the turns, so there is little "
              "to learn from; docs/agents.md says how to teach the form first")  # fmt: skip
    # forward and backward of an update take three times as long as the forward of the preflight
    seconds = played - start + 3 * (time.time() - played)
    return seconds * args.groups_per_batch * args.group_size / len(seeds)


# ---- the loop ----


def rule(args, judge, standard, episodes):
    """Put RULER's score in the place of each episode's reward: None where the judge failed, for a
    whole group."""
    talks = [episode.messages for episode in episodes]
    groups = [talks[i : i + args.group_size] for i in range(0, len(talks), args.group_size)]
    # rank 0 asks for all
    grades = [] if rank() else ruler.ruler_groups(groups, judge, standard, args.judge_passes)
    for episode, grade in zip(episodes, itertools.chain(*gather(grades)), strict=True):
        episode.reason = grade.reason or grade.error
        # equal episodes everywhere: nothing to compare, so nothing to learn
        episode.reward = 0.0 if grade.error == ruler.ALONE else grade.score


def episode_row(episodes):
    """Means of the environment's info, over the episodes that have an entry, and of the turns."""
    metrics = [{"turns": len(e.texts())} | e.metrics for e in episodes]
    keys = dict.fromkeys(key for row in metrics for key in row)
    return {f"env/{k}": fmean(row[k] for row in metrics if k in row) for k in keys}


def lengths(episodes):
    """(tokens that the policy drew, was something cut?) of each episode."""
    return [e.tokens() for e in episodes], [e.truncated for e in episodes]


def scores(episodes, env, prefix=""):
    """{"score", "reward"} with _low and _high, see `scored`; the score is the environment's
    val_key, 0 where no turn was taken."""
    values = [episode.metrics.get(env.val_key, 0.0) for episode in episodes]
    return scored(f"{prefix}score", values) | scored(
        f"{prefix}reward", [e.reward for e in episodes]
    )


def in_words(row):
    return "  ".join(f"{key} {shown_value(row, key)}" for key in ("score", "reward"))


def transcript(episode):
    """An episode as lines to read, > before the policy's, its reward at the end."""
    marks, lines = {"assistant": ">", "system": "#"}, [f"seed {episode.seed}"]
    for m in episode.messages:
        lines.append(f"  {marks.get(m['role'], ' ')} " + m["content"].replace("\n", "\n    "))
    numbers = (f"  {key} {value:.3g}" for key, value in episode.metrics.items() if value)
    return "\n".join([*lines, f"  reward {episode.reward:.2f}{''.join(numbers)}"])


def write_episodes(run, split, episodes, g):
    """Add the episodes to rollouts.jsonl, every word, to be read by people."""
    left_out, rows = ("number", "env", "rng", "draws"), []
    for e in episodes:
        place = {"step": run.step, "split": split, "group": e.number // g, "sample": e.number % g}
        kept = {key: value for key, value in vars(e).items() if key not in left_out}
        rows.append(place | kept | {"tokens": e.tokens()})
    run.write("rollouts.jsonl", rows)


def evaluate(args, run, guard, player, make):
    """Play and log an episode from each validation seed; before step one the baselines' as well."""
    env, seeds = make(), range(VAL_SEEDS, VAL_SEEDS + args.val_episodes)
    episodes = play(args, make, seeds, player, args.eval_temperature, args.seed)
    (greedy,) = play(args, make, seeds[:1], player, temperature=0)
    metrics = (
        scores(episodes, env, "val/") | rollouts.val_row(*lengths(episodes)) | episode_row(episodes)
    )
    for name, baseline in env.baselines.items() if run.step == 0 else ():
        row = scores(play(args, make, seeds, baseline), env)
        metrics[f"env/baseline/{name}"] = row["score"]
        print(f"baseline   {name:10} {in_words(row)}")
    guard.evaluation(metrics, [{"prompt": f"{env.name}, greedy", "answer": transcript(greedy)}])
    write_episodes(run, "validation", episodes, 1)


# ---- play ----


def play_command(args, make):
    """Print episodes of a baseline or a model, and their mean; --write: rows for sft.py."""
    env, seeds = make(), range(args.seed, args.seed + args.episodes)
    if args.write and Path(args.write).exists() and not args.overwrite:
        raise UserError(f"--write {args.write}: exists; pass --overwrite to replace it")
    player = env.baselines.get(args.policy)
    if not player and not Path(args.policy).is_dir():
        names = ", ".join(env.baselines)
        raise UserError(f"--policy {args.policy}: expected a model folder or a baseline: {names}")
    if not player:
        device, dtype = pick(args.device, args.dtype)
        model = load_model(args.policy, device, dtype, flag="--policy")
        player = Policy(model, dtype), load_tokenizer(args.policy, "--policy")
    episodes = play(args, make, seeds, player, args.eval_temperature, args.seed)
    for episode in episodes[:SHOWN]:
        print(f"{env.name}, {args.policy}, {transcript(episode)}")
    print(f"mean of {len(episodes)}: {in_words(scores(episodes, env))}")
    if args.write:
        turns = [rows_to_imitate(episode.messages, env.history) for episode in episodes]
        write_jsonl(args.write, itertools.chain(*turns))
        data = shlex.join(["--data", args.write])
        print(f"wrote {args.write}\nnext: python sft.py {data} --out runs/agent_start")
        print(f"then: python grpo_agent.py --model runs/agent_start {env_flags(args)}")


def env_flags(args):
    return shlex.join(["--env", args.env, "--env-args", args.env_args])


def rows_to_imitate(messages, history):
    """An episode as rows for sft.py: one dialogue of which all answers are trained; where a turn
    sees only part of the episode, each turn after what the policy saw."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if history == "all":
        return [{"messages": messages[: turns[-1] + 1]}] if turns else []
    shown = [shown_messages(messages[:i], history) for i in turns]
    return [{"prompt": p, "completion": [messages[i]]} for p, i in zip(shown, turns)]


# ---- the run ----


def main(argv=None):
    args = parse_args(argv)
    make = environment(args)
    if args.command == "play":
        play_command(args, make)
        return 0
    env, g = make(), args.group_size
    run = runs.Run("grpo_agent", args, SHOW, HEADLINE)
    print(
        f"episodes   {args.groups_per_batch} seeds × {g} of {env.name} per step, at most {env.max_turns} turns each"
    )
    print(watch.promise(args, True))
    judge, standard = None, ruler.read_standard(args.ruler_rubric)
    if args.reward == "ruler":
        judge = server.Judge.from_args(args, args.out)
    tokenizer, settings = load_tokenizer(args.model), (args.model, run.device, run.dtype)
    pad = common.pad_id(tokenizer)
    lora = {"lora_rank": args.lora_rank, "seed": args.seed}
    policy = Policy(load_model(*settings, trainable=True, **lora), run.dtype)
    reference = None  # the start: with LoRA the policy with its adapter off, else a frozen copy
    if args.beta:
        reference = policy if args.lora_rank else Policy(load_model(*settings), run.dtype)
    opening = encode_prompt(tokenizer, env.reset(VAL_SEEDS))
    optimizer = run.start({"policy": policy}, tokenizer, RATES, STEPS, [opening])
    guard = rollouts.Guard(run, args.val_episodes)
    player, seconds = (policy, tokenizer), None
    if run.step == 0:
        seconds = preflight(args, run, player, reference, make)
        evaluate(args, run, guard, player, make)

    for step in run.steps(seconds):
        spent = Counter(judge.counts) if judge else None
        # (1) rollout: G episodes from each of P seeds; all live ones take a turn together
        seeds, draws = training_seeds(args, step), args.seed * 10**6 + step
        episodes = play(args, make, seeds, player, args.temperature, draws)
        # (2) reward: the environment's own, or RULER's, which compares the group's episodes
        if judge:
            rule(args, judge, standard, episodes)
        rewards = [math.nan if e.reward is None else e.reward for e in episodes]
        rewards_PG = torch.tensor(rewards).view(-1, g)
        # (3) advantages: reward − mean of the group; every turn of an episode has the same one
        advantages_PG = grpo.group_advantages(rewards_PG, args.scale)
        for episode, advantage in zip(episodes, advantages_PG.view(-1).tolist()):
            episode.advantage = advantage
        # (4) update: clipped policy gradient over the policy's own tokens, see parts/grpo.py
        rows = [(row, i) for i, e in enumerate(episodes) for row in training_rows(e.draws)]
        places = np.array([i for _, i in rows])  # of each row, the number of its episode
        b = pack([row for row, _ in rows], pad, run.device)
        counts = grpo.comparable(rewards_PG).view(-1)[places]
        update = grpo.update(
            args, run, policy, reference, optimizer, b, places // g,
            advantages_PG.view(-1)[places], counts, [f"seed {seeds[i]}" for i in places],
        )  # fmt: skip
        metrics = grpo.group_row(
            rewards_PG, advantages_PG, 0.5 if judge else fmean(env.reward_range)
        )
        metrics |= update | episode_row(episodes)
        if getattr(env, "prose", True):
            openings = [episode.messages[0]["content"] for episode in episodes]
            texts = ["\n".join(episode.texts()) for episode in episodes]
            metrics |= text_metrics(text_flags(openings, texts), texts)
        metrics |= rollouts.length_row(*lengths(episodes), int(b["attention_mask"].sum()))
        guard.log(metrics | judge.metrics(spent) if judge else metrics)
        write_episodes(run, "train", episodes, g)
        # (5) now and then: episodes from held-out seeds; the alarms of watch.py
        if run.evaluates(step):
            evaluate(args, run, guard, player, make)
        guard.end_step()

    test = f"--seed {TEST_SEEDS} --episodes 128"
    words = shlex.join(["--policy", args.out])
    return guard.finish(f"python grpo_agent.py play {env_flags(args)} {words} {test}")


if __name__ == "__main__":
    command(main, flags.OUT_OF_MEMORY)
