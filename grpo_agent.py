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
To copy      `continued_ids` and `next_prompt`: the tokens of a conversation as the policy saw them;
             the math is in parts/grpo.py
Reference    Shao et al. 2024, arXiv 2402.03300, eq. 3 (GRPO); clip range: DAPO, 2503.14476;
             no division by the deviation: Dr. GRPO, 2503.20783; RULER and 2048: OpenPipe ART
Axes         P seeds, G episodes per seed, N = P·G episodes, S samples, T tokens
"""

import functools
import json
import math
import random
import shlex
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import common
import ruler
import watch
from common import Policy, encode, encode_prompt, end_ids, load_model, load_tokenizer, render
from parts import grpo, rollouts, runs, server
from parts.answers import visible
from parts.files import UserError, command, load_function, number, where_raised, write_jsonl
from parts.pairs import check_text
from parts.parallel import all_sum, gather, pick, rank, world
from parts.sampling import sample
from parts.texts import text_metrics

RATES = 3e-4, 1e-5, 2e-4  # below 100 M parameters (worked on data/tiny-base), above, with LoRA
STEPS = 40  # without --steps; seeds have no end, so there are no epochs
VAL_SEEDS, TEST_SEEDS = 10**9, 2 * 10**9  # training seeds are drawn below 10⁹
SHOWN = 3  # episodes that `play` prints
SHOW = ("reward/mean", "reward/frac_mixed", "env/turns", "length/mean", "entropy")  # on the bar
HEADLINE = ("val/score", "val/reward")


# ---- the arguments ----


def parse_args(argv=None):
    example = "grpo_agent.py [play] --env my_env.py:MyEnv --out runs/agent"
    text = "Group-relative policy optimisation on episodes of several turns; `play` shows some."
    parser = runs.parser(example, text, "runs/grpo_agent", RATES)
    add, whole = parser.add_argument, number(int, at_least=1)
    # fmt: off
    add("command", nargs="?", choices=("train", "play"), default="train", help="train, or play episodes of --policy and print them")
    add("--env", default="envs/interview.py:Interview", help="FILE:CLASS, see docs/agents.md")
    add("--env-args", default="{}", help="keyword arguments of the class as JSON, such as '{\"k\": 4}'")
    add("--reward", choices=("env", "ruler"), default="env", help="the environment's own reward, or a judge's who compares the episodes of a group")
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
    make = load_function(args.env, "--env")
    try:
        make = functools.partial(make, **json.loads(args.env_args))
        env = make()  # what every environment must have is asked for here, before a model is loaded
        _ = env.name, env.max_turns, env.val_key, env.baselines, env.reset, env.step
        shown_messages([], env.history)
        low, high = env.reward_range
    except Exception as error:  # the user's own code may raise anything
        given = f"--env {args.env} --env-args '{args.env_args}'"
        raise UserError(f"{given}: {where_raised(error)}; see docs/agents.md") from error
    return make


@dataclass
class Episode:
    """One conversation of a policy with an environment.

    samples: what is trained, {"ids", "mask", "logps"}, lists of T. One sample holds the whole
    conversation where each turn's prompt begins with the ids of the turn before; else there is one
    per turn. mask: did the policy draw this token? logps: of its draws, 0 elsewhere.
    """

    seed: int
    number: int  # among the episodes of all processes: what its draws come from
    messages: list = field(default_factory=list)
    turns: int = 0
    reward: float = 0.0  # the sum over its turns
    metrics: dict = field(default_factory=dict)  # the environment's last info
    samples: list = field(default_factory=list)
    is_cut: bool = False  # a turn was cut, or the context was full
    reason: str = None  # RULER's

    def tokens(self):
        """How many the policy drew."""
        return sum(sum(sample["mask"]) for sample in self.samples)

    def hear(self, *messages):
        """What the environment says; ValueError unless these are messages."""
        check_text({"messages": list(messages)}, "messages")
        self.messages += messages

    def note(self, reward, info):
        """Add the reward of a turn and remember its info; ValueError for what is not finite."""
        info = {key: float(value) for key, value in info.items()}
        if not all(map(math.isfinite, (reward, *info.values()))):
            raise ValueError(f"reward {reward}, info {info}: expected finite numbers")
        self.reward += float(reward)
        self.metrics |= info


def begin(episode, env):
    episode.hear(*env.reset(episode.seed))


def take_turn(episode, env, text):
    """One turn: the environment sees what stands behind </think>. Returns: does the episode go on?

    text: None if the context is full; then the episode ends as if its turns had run out.
    """
    done = False
    if text is None:
        episode.is_cut = True
    else:
        episode.messages.append({"role": "assistant", "content": text})
        episode.turns += 1
        message, reward, done, info = env.step(visible(text))
        episode.note(reward, info)
        if not done:
            episode.hear(message)
    if not done and (text is None or episode.turns >= env.max_turns):
        done = True
        if hasattr(env, "run_out"):
            episode.note(*env.run_out())
    if done and episode.turns and env.val_key not in episode.metrics:
        raise ValueError(f"info {episode.metrics} lacks {env.val_key!r}, its val_key")
    return not done


def in_users_class(args, function, *given):
    """function(*given), which runs the class of --env; what that raises is one line."""
    try:
        return function(*given)
    except Exception as error:  # the user's own code may raise anything
        raise UserError(f"--env {args.env}: {where_raised(error)}") from error


def play(args, make, seeds, player, temperature=1.0, seed=0):
    """An `Episode` from each seed; all live ones take a turn together.

    player   (policy, tokenizer), or a baseline of the environment: (env, rng) → text

    An episode depends on its seed, its number and `seed` alone, not on who is played beside it.
    With several processes each plays its share and receives all episodes.
    """
    numbers = range(len(seeds))[rank() :: world()]
    live = [(Episode(seeds[number], number), make()) for number in numbers]
    episodes, turn = [episode for episode, _ in live], 0
    rngs = {episode.number: random.Random(f"policy {episode.seed}") for episode in episodes}
    for episode, env in live:
        in_users_class(args, begin, episode, env)
    with ThreadPoolExecutor(32) as pool:  # slow tools do not wait for one another
        while all_sum(len(live)):  # all processes take as many turns: a forward may be a collective
            turn += 1
            if isinstance(player, tuple):
                texts = draw_turns(args, *player, live, temperature, 1000 * seed + turn)
            else:
                texts = [in_users_class(args, player, env, rngs[e.number]) for e, env in live]
            steps = [
                pool.submit(in_users_class, args, take_turn, *pair, text)
                for pair, text in zip(live, texts)
            ]
            live = [pair for pair, step in zip(live, steps) if step.result()]
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


def next_prompt(tokenizer, episode, history="all"):
    """Ids that the next turn answers: those so far and the new message's. If the history is cut or
    the template rewrites earlier turns, the prompt is encoded anew, see `Episode`."""
    ids = None
    if history == "all" and episode.samples:
        ids = continued_ids(tokenizer, episode.messages, episode.samples[-1]["ids"])
    return ids or encode_prompt(tokenizer, shown_messages(episode.messages, history))


def draw_turns(args, policy, tokenizer, live, temperature, seed):
    """A text for each live episode, None where the context is full; what was drawn goes to the
    episode's samples. live: [(episode, env)]."""
    room = min(args.max_length, common.max_positions(policy.model.config)) - args.max_new_tokens
    prompts = [next_prompt(tokenizer, episode, env.history) for episode, env in live]
    fit, texts = [i for i, ids in enumerate(prompts) if len(ids) <= room], [None] * len(live)
    rollout = sample(
        policy, tokenizer, [prompts[i] for i in fit], 1, args.max_new_tokens, temperature, seed,
        numbers=[live[i][0].number for i in fit], alone=True,
    )  # fmt: skip
    for row, i in enumerate(fit):
        episode, prompt, drawn = live[i][0], prompts[i], rollout.answer_ids[row]
        samples = episode.samples
        if not samples or samples[-1]["ids"] != prompt[: len(samples[-1]["ids"])]:
            samples.append({"ids": [], "mask": [], "logps": []})
        new = len(prompt) - len(samples[-1]["ids"])  # tokens of the environment and the template
        samples[-1]["ids"] = prompt + drawn
        samples[-1]["mask"] += [False] * new + [True] * len(drawn)
        samples[-1]["logps"] += [0.0] * new + rollout.logps[row]
        episode.is_cut |= not rollout.finished[row]
        texts[i] = rollout.texts[row]
    return texts


def pack(samples, pad, device):
    """{"ids", "attention_mask", "mask", "logps"}, each (S, T), right-padded."""
    rows = [sample["ids"] for sample in samples]
    ids, attention_mask, _ = common.pad_rows(rows, [[]] * len(rows), pad)
    mask, logps = (
        pad_sequence([torch.tensor(sample[key]) for sample in samples], batch_first=True)
        for key in ("mask", "logps")
    )
    b = {"ids": ids, "attention_mask": attention_mask, "mask": mask, "logps": logps}
    return {name: x.to(device) for name, x in b.items()}


def token_strip(tokenizer, sample):
    """A sample as text, with ▮ before each trained token."""
    marks = zip(sample["ids"], sample["mask"])
    return "".join("▮" * drawn + tokenizer.decode([i]) for i, drawn in marks)


# ---- preflight ----


def preflight(args, run, player, reference, make):
    """Log-probs of a rollout = a teacher-forced pass; some turns can be read; one episode, marked.

    Returns the seconds that a step will take.
    """
    seeds, pad = training_seeds(args, 0)[: 2 * args.group_size], common.pad_id(player[1])
    start = time.perf_counter()
    episodes = play(args, make, seeds, player, args.temperature, args.seed)
    played = time.perf_counter()
    samples = [sample for episode in episodes for sample in episode.samples]
    if not samples:
        raise UserError(f"--max-length {args.max_length}: no opening fits in it with a turn")
    rollouts.preflight(run, *player[:1], reference, player[1], pack(samples, pad, run.device))
    print(f"episode    ▮ before each trained token: {token_strip(player[1], samples[0])[:2000]}")
    unread = episode_row(episodes).get("env/invalid_frac", 0)
    if unread >= 0.9:
        print(f"warning: the environment could not read {unread:.0%} of the turns, so there is "
              "little to learn from; docs/agents.md says how to teach the form first")  # fmt: skip
    # forward and backward of an update take three times as long as the forward of the preflight
    seconds = played - start + 3 * (time.perf_counter() - played)
    return seconds * args.groups_per_batch * args.group_size / len(seeds)


# ---- the loop ----


def ruler_rewards(args, judge, standard, episodes):
    """RULER's score of each episode, N numbers; None where the judge failed, for a whole group."""
    g, rewards = args.group_size, []
    groups = [episodes[start : start + g] for start in range(0, len(episodes), g)]
    local = range(len(groups))[rank() :: world()]
    talks = [[episode.messages for episode in groups[n]] for n in local]
    grades = ruler.ruler_groups(talks, judge, standard, args.judge_passes)
    for group, (_, rulings) in zip(groups, sorted(gather(zip(local, grades)), key=lambda x: x[0])):
        for episode, ruling in zip(group, rulings, strict=True):
            episode.reason = ruling.reason or ruling.error
            # equal episodes everywhere: nothing to compare, so nothing to learn
            rewards.append(0.0 if ruling.error == ruler.ALONE else ruling.score)
    return rewards


def episode_row(episodes):
    """Means of the environment's info, and the share of turns that it could not read, if it counts
    those as info["invalid"]."""
    keys = dict.fromkeys(key for episode in episodes for key in episode.metrics)
    row = {f"env/{k}": fmean(e.metrics[k] for e in episodes if k in e.metrics) for k in keys}
    turns = sum(episode.turns for episode in episodes)
    if "env/invalid" in row and turns:
        unread = sum(episode.metrics.get("invalid", 0) for episode in episodes)
        row["env/invalid_frac"] = unread / turns
    return row | {"env/turns": turns / len(episodes), "env/episodes": len(episodes)}


def rollout_row(env, episodes):
    """The metrics of a rollout that are not of its groups."""
    prose = {}
    if getattr(env, "prose", True):
        said = ([m["content"] for m in e.messages if m["role"] == "assistant"] for e in episodes)
        prompts = [episode.messages[0]["content"] for episode in episodes]
        prose = text_metrics(prompts, ["\n".join(turns) for turns in said])
    tokens = sum(len(sample["ids"]) for episode in episodes for sample in episode.samples)
    lengths, is_cut = ([e.tokens() for e in episodes], [e.is_cut for e in episodes])
    return episode_row(episodes) | prose | rollouts.length_row(lengths, is_cut, tokens)


def rollout_lines(step, split, episodes, g, rewards, advantages):
    """What rollouts.jsonl holds of each episode: every word, to be read by people."""
    return [
        dict(
            step=step, split=split, group=i // g, sample=i % g, seed=episode.seed,
            messages=episode.messages, reward=rewards[i], advantage=advantages[i],
            tokens=episode.tokens(), truncated=episode.is_cut, metrics=episode.metrics,
            reason=episode.reason,
        )
        for i, episode in enumerate(episodes)
    ]  # fmt: skip


def scores(episodes, env):
    """{"score", "reward", …_low, …_high}: means over episodes, with intervals of 95 % (± 1.96 σ/√n)
    unless all are alike. score: the environment's val_key, 0 where no turn was taken."""
    row = {}
    columns = {"score": [e.metrics.get(env.val_key, 0.0) for e in episodes]}
    for key, values in (columns | {"reward": [e.reward for e in episodes]}).items():
        row[key] = fmean(values)
        if len(set(values)) > 1:
            half = 1.96 * stdev(values) / math.sqrt(len(values))
            row |= {f"{key}_low": row[key] - half, f"{key}_high": row[key] + half}
    return row


def in_words(row):
    return "  ".join(f"{key} {runs.shown_value(row, key)}" for key in ("score", "reward"))


def transcript(episode):
    """An episode as lines to read, > before the policy's, its reward at the end."""
    marks, lines = {"assistant": ">", "system": "#"}, [f"seed {episode.seed}"]
    for m in episode.messages:
        lines.append(f"  {marks.get(m['role'], ' ')} " + m["content"].replace("\n", "\n    "))
    numbers = "  ".join(f"{key} {value:.3g}" for key, value in episode.metrics.items() if value)
    return "\n".join([*lines, f"  reward {episode.reward:.2f}  turns {episode.turns}  {numbers}"])


def evaluate(args, run, guard, player, make):
    """Play and log an episode from each validation seed; before step one the baselines' as well."""
    env, seeds, baselines = make(), range(VAL_SEEDS, VAL_SEEDS + args.val_episodes), {}
    for name, baseline in env.baselines.items() if run.step == 0 else ():
        row = scores(play(args, make, seeds, baseline), env)
        print(f"baseline   {name:10} {in_words(row)}")
        baselines |= {f"env/baseline/{name}": row["score"]}
        baselines |= {f"env/baseline_reward/{name}": row["reward"]}
    episodes = play(args, make, seeds, player, args.eval_temperature, args.seed)
    (greedy,) = play(args, make, seeds[:1], player, temperature=0)
    lengths, is_cut = ([e.tokens() for e in episodes], [e.is_cut for e in episodes])
    metrics = {f"val/{key}": value for key, value in scores(episodes, env).items()}
    metrics |= rollouts.val_row(lengths, is_cut) | episode_row(episodes) | baselines
    sample = {"prompt": f"{env.name}, greedy", "answer": transcript(greedy)}
    rewards, none = [episode.reward for episode in episodes], [None] * len(episodes)
    run.write("rollouts.jsonl", rollout_lines(run.step, "validation", episodes, 1, rewards, none))
    guard.evaluation(metrics, [sample])


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
        lines = [line for episode in episodes for line in rows_to_imitate(episode, env.history)]
        write_jsonl(args.write, lines)
        data = shlex.join(["--data", args.write])
        print(f"wrote {args.write}\nnext: python sft.py {data} --out runs/agent_start")
        print(f"then: python grpo_agent.py --model runs/agent_start {env_flags(args)}")


def env_flags(args):
    return shlex.join(["--env", args.env, "--env-args", args.env_args])


def rows_to_imitate(episode, history):
    """An episode as rows for sft.py: one dialogue of which all answers are trained; where a turn
    sees only part of the episode, each turn after what the policy saw. A blank turn is none."""
    messages = episode.messages
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m["content"].strip()]
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
    env, p, g = make(), args.groups_per_batch, args.group_size
    run = runs.Run("grpo_agent", args, SHOW, HEADLINE)
    print(f"episodes   {p} seeds × {g} of {env.name} per step, at most {env.max_turns} turns each")
    print(watch.promise(args, True))
    judge, standard = None, ruler.read_standard(args.ruler_rubric)
    if args.reward == "ruler":
        judge = server.Judge.from_args(args, args.out, world())
