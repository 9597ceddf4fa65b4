"""grpo_agent.py: an environment of several turns in, a policy out that does better in it.

Objective    maximise E[R] − β·KL(π‖π_ref), R the reward of a whole episode
Algorithm    (1) rollout: G episodes of each of P seeds; all live ones take a turn together
             (2) reward: the environment's own, RULER's, or both; none if the episode failed
             (3) advantages: reward − mean of the group; all turns of an episode share it
             (4) update: clipped policy gradient over the policy's own tokens
             (5) now and then: held-out seeds, beside the baselines; the alarms of watch.py
Conventions  an action is a token that the policy sampled, end of turn included; the environment's
             words are context and never trained; episode g of seed p stands at p·G + g; training,
             validation and test seeds are disjoint
Left out     1. a value for each turn   2. tools and parallel calls
             3. the key-value cache between turns: each turn reads the episode anew
Run          python grpo_agent.py
             python grpo_agent.py play --policy runs/grpo_agent --seed 7
             python grpo_agent.py --env envs/twenty48.py:TwentyFortyEight --env-args '{"size": 4}'
             torchrun --nproc-per-node 8 grpo_agent.py --fsdp --model Qwen/Qwen2.5-7B-Instruct
Writes       a model folder, args.json, metrics.jsonl, samples.jsonl, rollouts.jsonl, summary.json,
             checkpoint/
Reference    Shao et al. 2024, arXiv 2402.03300, eq. 3 (GRPO); clip range: DAPO, 2503.14476;
             Dr. GRPO: 2503.20783; RULER and 2048 as tasks: OpenPipe ART
Axes         P seeds, G episodes per seed, N = P·G, T tokens
"""

import contextlib
import functools
import json
import math
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import common
import ruler
import watch
from grpo_rubric import CLIP, SCALES, group_advantages, grpo_loss
from parts import parallel, prompting, rollouts, runs, sampling, server
from parts.dialogue import visible
from parts.files import (
    UserError,
    command,
    finite,
    load_function,
    number,
    shell_line,
    where_raised,
    write_jsonl,
)
from parts.guard import Guard, weights_to_write, write_summary
from parts.means import mean
from parts.rollouts import by_group, weighted_sums
from parts.rows import is_blank
from parts.texts import text_metrics
from parts.turns import continued_ids

# learning rates for models below 100 M parameters (worked on the bundled base, not swept), larger
# ones (run once: reports/real-model.md), and LoRA, which nobody ran to an end
RATES = 3e-4, 1e-5, 2e-4
STEPS = 40  # without --steps; seeds have no end, so there are no epochs
VAL_SEEDS, TEST_SEEDS = 10**9, 2 * 10**9  # training seeds are drawn below 10⁹
REWARDS = ("env", "ruler")
NEEDED = "reset step name max_turns reward_range val_key history baselines".split()
SHOW = ("reward/mean", "reward/frac_mixed", "env/turns", "length/mean", "entropy")  # on the bar
HEADLINE = ("val/score", "val/reward", "reward/mean")  # before and after


# ---- 3. the math ----
# of a group: `group_advantages` and `grpo_loss` of grpo_rubric.py


# ---- 4. the arguments ----


def parse_args(argv=None):
    parser = runs.Parser(
        "grpo_agent.py [play] --env my_env.py:MyEnv --out runs/agent",
        "Group-relative policy optimisation on episodes of several turns.",
    )
    add, whole_number = parser.add_argument, number(int, at_least=1)
    # fmt: off
    add("command", nargs="?", choices=("train", "play"), default="train", help="play shows episodes of --policy (default %(default)s)")
    add("--env", default="envs/interview.py:Interview", help="FILE.py:CLASS, see docs/agents.md (default %(default)s)")
    add("--env-args", default="{}", metavar="JSON", help="keyword arguments of the class, such as '{\"k\": 4}' (default none)")
    add("--model", default=common.BASE, help="model folder or hub id (default %(default)s)")
    add("--reward", action="append", metavar="NAME[:WEIGHT]", help=f"{', '.join(REWARDS)}; repeat it to mix (default env)")
    add("--scale", choices=SCALES, default="center", help="how rewards of a group are centred and scaled (default %(default)s)")
    add("--max-exceptions", type=number(int, at_least=0), default=0, help="episodes of a step that may raise an error (default 0)")
    add("--val-episodes", type=whole_number, default=64, help="held-out seeds of a validation (default %(default)s)")
    add("--test-episodes", type=number(int, at_least=0), default=128, help="seeds played once, at the end (default %(default)s)")
    # at 1 the bundled base is measured as it is trained: greedy, it is a good interviewer before any training
    add("--eval-temperature", type=number(at_least=0), help="of validation, test, play; 0: greedy (default 0.7; bundled base 1)")
    add("--policy", default="random", help="play: a baseline, a model folder, or human: you (default %(default)s)")
    add("--episodes", type=whole_number, default=1, help="play: how many, from --seed on (default %(default)s)")
    add("--write", metavar="FILE", help="play: also write the policy's turns as rows for sft.py")
    # fmt: on
    rollouts.add_group_arguments(parser)
    ruler.add_ruler_arguments(parser)
    server.add_judge_arguments(parser)
    watch.add_watch_arguments(parser)
    parser.add_run_arguments("runs/grpo_agent", RATES, "none: seeds have no end, use --steps")
    parser.set_defaults(batch_size=None, eval_every=5, save_every=10)
    args = parser.parse_args(argv)
    parser.without_effect("--model", args.command == "play", "play shows the model of --policy")
    if args.epochs:
        raise UserError(f"--epochs {args.epochs}: seeds have no end; use --steps (default {STEPS})")
    if args.eval_temperature is None:
        model = args.policy if args.command == "play" else args.model
        args.eval_temperature = prompting.default_temperature(model)
    rollouts.check_groups(args)
    args.reward = rollouts.reward_weights(args.reward or ["env"], REWARDS, args)
    return args


# ---- 5. the data ----
# An environment is the data. It has name, max_turns, reward_range, history ("all" or a number of
# exchanges), val_key (the entry of info that is success itself), baselines (name → policy:
# (env, rng) → text), and
#     reset(seed) → messages;   step(text) → (message or None, reward, done, info)
# All randomness comes from its own random.Random(seed). info is flat numbers; that of the last turn
# is logged. Optional: run_out() → (reward, info), asked when turns or context are used up;
# metadata, a dict for rollouts.jsonl; prose = False, if the turns are no sentences. Steps of
# different episodes run in threads.


def environment(args):
    """A function without arguments that makes the environment of --env."""
    make = load_function(args.env, "--env")
    try:
        make = functools.partial(make, **json.loads(args.env_args))
        env = make()
        check_class(env)
        shown_messages([], env.history)
    except Exception as error:  # of the user's own file
        cause = str(error) if isinstance(error, NotAllowed) else where_raised(error)
        cause = f"--env {args.env} --env-args '{args.env_args}': {cause}"
        raise UserError(f"{cause}; see docs/agents.md") from error
    return make


def check_class(env):
    """Raise NotAllowed for what an environment lacks, or has and means something else."""
    if lacking := [name for name in NEEDED if not hasattr(env, name)]:
        raise NotAllowed(f"the class lacks {', '.join(lacking)}")
    ends = list(env.reward_range) if np.iterable(env.reward_range) else []
    numbers = all(isinstance(end, int | float | np.number) for end in ends)
    if len(ends) != 2 or not numbers or not ends[0] < ends[1]:
        raise NotAllowed(f"reward_range is {env.reward_range!r:.60}; expected (least, most)")
    if not isinstance(env.baselines, dict):
        raise NotAllowed(f"baselines is {env.baselines!r:.60}; expected {{name: policy}}")


@dataclass
class Trajectory:
    """An episode."""

    seed: int
    number: int  # among the episodes of all processes: what its draws come from
    messages: list = field(default_factory=list)
    reward: float = 0.0  # the sum over its turns
    score: float = 0.0  # the environment's val_key
    metrics: dict = field(default_factory=dict)
    samples: list = field(default_factory=list)  # {"ids", "logps", "turns": [(start, end)]} each
    truncated: bool = False  # a turn was cut, or the context was full
    error: str = None  # what the environment raised, with file and line
    metadata: dict = field(default_factory=dict)  # the environment's own notes
    ruling: object = None  # RULER's `Grade`, with its reason

    def texts(self):
        """What the policy wrote, turn by turn."""
        return [m["content"] for m in self.messages if m["role"] == "assistant"]

    def tokens(self):
        """How many the policy sampled."""
        return sum(len(s["logps"]) for s in self.samples)


def play(make, seeds, act, numbers=None):
    """An episode of the environment from each seed, all live ones a turn at a time: Trajectories.

    act   ([(trajectory, environment) of each live one]) → one text each, or None if its context is
          full: then the episode ends as if its turns had run out
    """
    numbers, envs = numbers or range(len(seeds)), [make() for _ in seeds]
    trajectories = [Trajectory(seed, n) for seed, n in zip(seeds, numbers, strict=True)]
    live = [(t, env) for t, env in zip(trajectories, envs, strict=True) if guarded(t, begin, env)]
    with ThreadPoolExecutor(32) as pool:
        while live:  # slow tools do not wait for one another
            texts = act(live)
            on = pool.map(lambda pair, text: guarded(pair[0], turn, pair[1], text), live, texts)
            live = [pair for pair, goes_on in zip(live, list(on), strict=True) if goes_on]
    for t, env in zip(trajectories, envs, strict=True):
        guarded(t, add_metadata, env)
        t.score = t.metrics.get(env.val_key, 0.0)
    return trajectories


class NotAllowed(ValueError):
    """What an environment returned, and what it may return."""


def guarded(t, function, env, *arguments):
    """Does the episode go on? What its environment raises, or returns and may not, becomes t.error
    and ends it alone."""
    try:
        return function(t, env, *arguments)
    except NotAllowed as error:
        t.error = f"{type(env).__name__}: {error}"
    except Exception as error:  # of the user's own file
        t.error = where_raised(error)


def add_metadata(t, env):
    """The environment's own notes; NotAllowed if a line of rollouts.jsonl cannot hold them."""
    try:
        metadata = finite(getattr(env, "metadata", None) or {})
        json.dumps(metadata, ensure_ascii=False).encode()
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise NotAllowed(f"metadata is no JSON: {error}") from None
    t.metadata = metadata


def begin(t, env):
    messages = env.reset(t.seed)
    if not isinstance(messages, list | tuple):
        raise NotAllowed(f"reset returned {messages!r:.60}; expected a list of messages")
    add_message(t, *messages)
    return True


def add_message(t, *messages):
    """What the environment said."""
    try:
        common.check_prompt({"prompt": [*t.messages, *messages]})
    except (ValueError, TypeError, AttributeError) as error:
        raise NotAllowed(f"{messages!r:.60}: {error}") from None
    t.messages += messages


def returned(method, value, *names):
    """What a method of the environment returned, if it is as many things as these names."""
    if not isinstance(value, tuple | list) or len(value) != len(names):
        raise NotAllowed(f"{method} returned {value!r:.60}; expected {', '.join(names)}")
    return value


def finite_number(name, value):
    """A number, also one of NumPy's or torch's, as Python's own."""
    try:
        plain = value.item() if hasattr(value, "item") else value
        if isinstance(plain, int | float) and math.isfinite(plain):
            return plain
    except (ValueError, RuntimeError):  # several numbers
        pass
    raise NotAllowed(f"{name} is {value!r:.60}; expected a finite number")


def turn(t, env, text):
    """One turn: the environment sees what stands after </think>. True if the episode goes on."""
    done = False
    if text is None:
        t.truncated = True
    else:
        t.messages.append({"role": "assistant", "content": text})
        t.metrics["turns"] = t.metrics.get("turns", 0) + 1
        step = env.step(visible(text))
        message, reward, done, info = returned("step", step, "message", "reward", "done", "info")
        note(t, reward, info)
        if not done:
            add_message(t, message)
    if not done and (text is None or t.metrics["turns"] >= env.max_turns):
        done = True
        if hasattr(env, "run_out"):
            note(t, *returned("run_out", env.run_out(), "reward", "info"))
    if done and "turns" in t.metrics:
        if env.val_key not in t.metrics:
            raise NotAllowed(f"info {t.metrics} lacks {env.val_key!r}, its val_key")
        low, high = env.reward_range
        slack = 1e-6 * max(1, abs(low), abs(high))  # of a sum in single precision
        if not low - slack <= t.reward <= high + slack:
            raise NotAllowed(f"an episode's reward is {t.reward}, outside reward_range {low, high}")
    return not done


def note(t, reward, info):
    """Add a turn's reward and remember its info."""
    if not isinstance(info, dict):
        raise NotAllowed(f"info is {info!r:.60}; expected a dict of numbers")
    reward = finite_number("the reward", reward)
    info = {key: finite_number(f"info[{key!r}]", value) for key, value in info.items()}
    before, now = t.metrics.get("invalid", 0), info.get("invalid", 0)
    if now > t.metrics.get("turns", 0) or ("invalid" in info and now < before):
        raise NotAllowed(
            f'info["invalid"] is {now:g} after {before:g}; expected the number of invalid turns '
            "since the episode began, which never falls"
        )
    t.reward += reward
    t.metrics |= info


def survivors(trajectories, most=math.inf):
    """The episodes that did not raise; UserError if more than `most` did."""
    errors = [t.error for t in trajectories if t.error]
    if len(errors) > most:
        cause = f"{len(errors)} of {len(trajectories)} episodes raised; the first: {errors[0]}"
        raise UserError(f"--max-exceptions {most:g}: {cause}")
    return [t for t in trajectories if not t.error]


def baseline_act(policy):
    """`act` of a policy (env, rng) → text, which may look into its environment."""
    rng_of_episode = {}

    def act(live):
        for t, _ in live:
            rng_of_episode.setdefault(t.number, random.Random(f"policy {t.seed}"))
        try:
            return [policy(env, rng_of_episode[t.number]) for t, env in live]
        except Exception as error:  # of the user's own file
            raise UserError(f"a baseline raised: {where_raised(error)}") from error

    return act


def play_baselines(args, make, seeds):
    """{name: episodes} of each baseline of the environment on the seeds."""
    return {
        name: survivors(play(make, seeds, baseline_act(policy)), args.max_exceptions)
        for name, policy in make().baselines.items()
    }


def scores_of(alive, env):
    """{"n", "score", "reward"} of episodes, with 95 % intervals."""
    score = rollouts.scored("score", [t.score for t in alive])
    reward = rollouts.scored("reward", [t.reward for t in alive], env.reward_range)
    return {"n": len(alive)} | score | reward


def in_words(row):
    return "  ".join(f"{key} {value:.3g}" for key, value in row.items() if value is not None)


def training_seeds(args, step):
    """The seeds of a step's N episodes, a function of --seed and step: no cursor to resume."""
    rng = np.random.default_rng([args.seed, step])
    seeds = rng.choice(VAL_SEEDS, args.groups_per_batch, replace=False)
    return seeds.repeat(args.group_size).tolist()


# ---- 6. the models ----


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


def next_prompt(tokenizer, t, history="all"):
    """Ids that the next turn answers: those so far and the new message's; nothing that was sampled
    is tokenised again.

    If the history is cut, or the template rewrites earlier turns (it drops their thoughts, say),
    the prompt is encoded anew, and the turn becomes a sample of its own.
    """
    if history == "all" and t.samples:
        ids = t.samples[-1]["ids"]
        ids = continued_ids(tokenizer, t.messages[:-2], t.messages[-2:], ids)
        if ids is not None:
            return ids
    return common.encode_prompt(tokenizer, shown_messages(t.messages, history))


def model_act(args, model, tokenizer, temperature, seed):
    """`act` of a model: all live episodes in one `sample`; ids and log-probs go to t.samples.

    An episode's draws come from its number and the turn: when its mates end, or which process
    plays it, changes nothing for it.
    """
    room = min(args.max_length, common.max_positions(model.config)) - args.max_new_tokens
    turns = 0

    def act(live):
        nonlocal turns
        turns, history = turns + 1, live[0][1].history
        prompts = [next_prompt(tokenizer, t, history) for t, _ in live]
        fit, texts = [i for i, ids in enumerate(prompts) if len(ids) <= room], [None] * len(live)
        answers = sampling.sample(
            model, tokenizer, [prompts[i] for i in fit], 1, args.max_new_tokens, temperature,
            seed=1000 * seed + turns, numbers=[live[i][0].number for i in fit], alone=True,
        )  # fmt: skip
        for n, i in enumerate(fit):
            t, ids, new = live[i][0], prompts[i], answers.response_ids[n]
            if not t.samples or t.samples[-1]["ids"] != ids[: len(t.samples[-1]["ids"])]:
                t.samples.append({"ids": [], "logps": [], "turns": []})
            sample = t.samples[-1]
            sample["turns"].append((len(ids), len(ids) + len(new)))
            sample["ids"] = ids + new
            sample["logps"] += answers.logps[n]
            t.truncated |= not answers.finished[n]
            texts[i] = answers.texts[n]
        return texts

    return act


def play_model(args, model, tokenizer, make, seeds, temperature, seed, group=1, most=None):
    """Episodes of a model, groups of neighbours dealt out over the processes; of them `most` may
    raise, --max-exceptions by default."""
    local = parallel.share(range(len(seeds)), group)
    act = model_act(args, model, tokenizer, temperature, seed)
    with parallel.decoding(model):
        trajectories = play(make, [seeds[i] for i in local], act, local)
    trajectories = parallel.gather(trajectories, local)
    survivors(trajectories, args.max_exceptions if most is None else most)
    return trajectories


# ---- 7. preflight ----


def pack(samples, pad, device):
    """{"ids", "attention_mask", "mask", "logps"}, each (N, T); mask: what the policy sampled."""
    rows = [s["ids"] for s in samples]
    ids, attention_mask, mask = common.pad_rows(rows, [[]] * len(rows), pad)
    logps = torch.zeros(ids.shape)
    for i, s in enumerate(samples):
        for start, end in s["turns"]:
            mask[i, start:end] = True
        logps[i, mask[i]] = torch.tensor(s["logps"])
    b = {"ids": ids, "attention_mask": attention_mask, "mask": mask}
    return {name: x.to(device) for name, x in {**b, "logps": logps}.items()}


def preflight(args, run, policy, reference, tokenizer, make):
    """Rollout log-probs = a teacher-forced pass; some turns can be read; one episode, marked."""
    seeds = training_seeds(args, 0)[: 2 * args.group_size]
    trajectories = play_model(args, policy, tokenizer, make, seeds, args.temperature, args.seed)
    alive = survivors(trajectories)
    longest = sorted((s for t in alive for s in t.samples), key=lambda s: -len(s["ids"]))[:4]
    if not longest:
        raise UserError(f"--max-length {args.max_length}: no opening fits in it with a turn")
    b = pack(longest, common.pad_id(tokenizer), policy.device)
    rollouts.preflight(run, policy, reference, tokenizer, b)
    unread = episode_metrics(alive)["env/invalid_frac"]
    if unread and unread >= 0.9:
        wrong = f"{unread:.0%} of the turns could not be read, so there is nothing to learn from"
        print(f"warning: {wrong}; docs/agents.md says how to teach the form first")


# ---- 8. the loop ----


def ruler_scores(args, judge, standard, trajectories):
    """RULER's score of each episode, N numbers or None: it raised, or the judge failed."""
    g, scores = args.group_size, [None] * len(trajectories)
    starts = range(0, len(trajectories), g)
    groups = [[i for i in range(s, s + g) if not trajectories[i].error] for s in starts]
    groups = [group for group in groups if len(group) > 1]
    local = parallel.share(range(len(groups)))
    talks = [[trajectories[i].messages for i in groups[n]] for n in local]
    grades = ruler.ruler_groups(talks, judge, standard, args.judge_passes)
    for group, rulings in zip(groups, parallel.gather(grades, local), strict=True):
        for i, ruling in zip(group, rulings, strict=True):
            trajectories[i].ruling = ruling
            # equal episodes everywhere: nothing to compare, so nothing to learn
            scores[i] = 0.0 if ruling.error == ruler.ALONE else ruling.score
    return scores


def grade(args, judge, standard, trajectories):
    """(rewards, parts): N numbers or None; {part: N of them}."""
    parts = {}
    for name in args.reward:
        env = [None if t.error else t.reward for t in trajectories]
        parts[name] = env if name == "env" else ruler_scores(args, judge, standard, trajectories)
    return weighted_sums(parts, args.reward), parts


def step_loss(args, forward, normalizer):
    """(what some samples add to the loss of their optimiser step, its columns for the log)."""
    return grpo_loss(
        forward.logps, forward.old_logps, forward.advantages, forward.mask, forward.ref_logps,
        *CLIP["token"], args.beta, normalizer=normalizer,
    )  # fmt: skip


def update(args, run, reference, trajectories, advantages, in_loss):
    """Step (4): --num-substeps optimiser steps of whole groups; their metrics over all tokens.

    advantages (N,); in_loss (N,) bool: episodes that count, see `rollouts.split_groups`. Every
    token of a step weighs the same, those of episodes without a forward included.
    """
    samples, places, substeps = [], [], []
    for counted, active in rollouts.split_groups(args, run.step, advantages, in_loss):
        tokens, start = sum(trajectories[i].tokens() for i in counted), len(samples)
        for i in active:
            samples += trajectories[i].samples
            places += [i] * len(trajectories[i].samples)
        where = f"of the seeds {sorted({trajectories[i].seed for i in active})[:4]}"
        rows = range(start, len(samples))
        substeps.append(rollouts.Substep(rows, len(active), tokens, where))
    b = pack(samples, common.pad_id(run.tokenizer), run.device) if samples else {}
    return rollouts.update(args, run, reference, b, advantages[places], substeps, step_loss)


def episode_metrics(alive):
    """Means of the environment's info, and the share of turns that it could not read."""
    keys = dict.fromkeys(key for t in alive for key in t.metrics if key != "invalid")
    turns, unread = (sum(t.metrics.get(key, 0) for t in alive) for key in ("turns", "invalid"))
    return {
        **{f"env/{key}": mean([t.metrics.get(key) for t in alive]) for key in keys},
        "env/invalid_frac": unread / turns if turns else None,
        "env/episodes": len(alive),
    }


def rollout_row(args, env, trajectories, parts, rewards_PG, advantages_PG):
    """The metrics of a rollout; a share is over the groups or episodes that have a reward."""
    alive, lengths = survivors(trajectories), [t.tokens() for t in trajectories]
    ranges = {"env": env.reward_range, "ruler": (0, 1)}
    low, high = (sum(w * ranges[name][end] for name, w in args.reward.items()) for end in (0, 1))
    perfect, prose = rewards_PG[~rewards_PG.isnan()] >= high - 0.001 * (high - low), {}
    if getattr(env, "prose", True):
        texts = ["\n".join(t.texts()) for t in alive]
        prose = text_metrics([t.messages[0]["content"] for t in alive], texts)
    return {
        **rollouts.group_row(rewards_PG, advantages_PG, (low + high) / 2),
        **{f"reward/{name}": mean(values) for name, values in parts.items()},
        "reward/frac_perfect": mean(perfect.tolist()),
        **episode_metrics(alive),
        **prose,
        **rollouts.length_row(
            lengths,
            [t.truncated for t in alive],
            sum(len(s["ids"]) for t in alive for s in t.samples),
        ),
        "exceptions": len(trajectories) - len(alive),
    }


def rollout_rows(step, split, trajectories, g, parts, rewards, advantages):
    """What rollouts.jsonl holds of each episode: every word, to be read by people."""
    return [
        dict(
            step=step, split=split, group=i // g, sample=i % g, seed=t.seed, messages=t.messages,
            reward=rewards[i], components={name: values[i] for name, values in parts.items()},
            advantage=advantages[i], tokens=t.tokens(), truncated=t.truncated, metrics=t.metrics,
            error=t.error, metadata=t.metadata, ruler=t.ruling and t.ruling.ruler_record(),
        )
        for i, t in enumerate(trajectories)
    ]  # fmt: skip


@torch.no_grad()
def evaluate(args, model, tokenizer, make, seeds):
    """(metrics, episodes) on held-out seeds, one episode each, at --eval-temperature."""
    trajectories = play_model(args, model, tokenizer, make, seeds, args.eval_temperature, args.seed)
    alive = survivors(trajectories)
    return {
        **{f"val/{key}": value for key, value in scores_of(alive, make()).items()},
        **rollouts.val_row([t.tokens() for t in alive], [t.truncated for t in alive]),
        **episode_metrics(alive),
    }, trajectories


def transcript(t):
    """An episode as lines to read, > before the policy's, its reward at the end."""
    marks, lines = {"assistant": ">", "system": "#"}, [f"seed {t.seed}"]
    for m in t.messages:
        lines.append(f"  {marks.get(m['role'], ' ')} " + m["content"].replace("\n", "\n    "))
    numbers = in_words({key: value for key, value in t.metrics.items() if value})
    return "\n".join([*lines, f"  reward {t.reward:.2f}  {numbers}"])


def validate(args, run, guard, policy, tokenizer, make, more=()):
    """Evaluate and log, with a greedy episode of the first seed; print the worst and the best."""
    seeds = range(VAL_SEEDS, VAL_SEEDS + args.val_episodes)
    metrics, trajectories = evaluate(args, policy, tokenizer, make, seeds)
    (greedy,) = play_model(args, policy, tokenizer, make, seeds[:1], 0.0, args.seed, most=1)
    sample = {"prompt": f"{make().name}, greedy", "answer": greedy.error or transcript(greedy)}
    guard.evaluation({**metrics, **dict(more)}, [sample])
    rewards, none = [t.reward for t in trajectories], [None] * len(trajectories)
    rows = rollout_rows(run.step, "validation", trajectories, 1, {"env": rewards}, rewards, none)
    run.write("rollouts.jsonl", rows)
    alive = sorted(survivors(trajectories), key=lambda t: t.reward)
    for word, t in zip(("worst", "best"), alive[:1] + alive[-1:]):
        parallel.say(f"{word}, {transcript(t)}")


def baselines_row(args, make):
    """The baselines on the validation seeds, printed, and as metrics of step 0."""
    seeds, metrics = range(VAL_SEEDS, VAL_SEEDS + args.val_episodes), {}
    for name, alive in play_baselines(args, make, seeds).items():
        row = scores_of(alive, make())
        print(f"baseline   {name:8} {in_words(row)}")
        metrics[f"env/baseline/{name}"] = row["score"]
        metrics[f"env/baseline_reward/{name}"] = row["reward"]
    return metrics


def final_test(args, run, reference, tokenizer, make, step):
    """summary.json: baselines, start and trained policy on test seeds, played once, here."""
    seeds, results = range(TEST_SEEDS, TEST_SEEDS + args.test_episodes), {}

    def test(policy):
        metrics, trajectories = evaluate(args, policy, tokenizer, make, seeds)
        return metrics | scores_of(survivors(trajectories), make())

    if seeds:
        for name, alive in play_baselines(args, make, seeds).items():
            results[f"test baseline {name}"] = scores_of(alive, make())
        results["test before"] = rollouts.by_the_start(args, run, reference, test)
        results["test after"] = test(run.model)
    for name, row in results.items():
        print(f"{name:22} {in_words({key: row[key] for key in row if '/' not in key})}")
    write_summary(run, step, results)


def play_command(args, make):
    """Show episodes of a baseline, of a model, or of a person."""
    env, seeds = make(), range(args.seed, args.seed + args.episodes)
    if args.write and Path(args.write).exists() and not args.overwrite:
        raise UserError(f"--write {args.write}: exists; pass --overwrite to replace it")

    def typed(live):
        t = live[0][0]
        print(*(m["content"] for m in t.messages[-1 if t.texts() else 0 :]), sep="\n")
        return [input("you> ")]

    if args.policy == "human":
        trajectories = [t for seed in seeds for t in play(make, [seed], typed)]
    elif args.policy in env.baselines:
        trajectories = play(make, seeds, baseline_act(env.baselines[args.policy]))
    elif Path(args.policy).is_dir():
        device = parallel.pick_device(args.device)
        model = common.load_policy(args.policy, None, device, trainable=False, flag="--policy")
        tokenizer = common.load_tokenizer(args.policy)
        trajectories = play_model(
            args, model, tokenizer, make, seeds, args.eval_temperature, args.seed
        )
    else:
        policies = f"human, a model folder, or a baseline: {', '.join(env.baselines)}"
        raise UserError(f"--policy {args.policy}: expected {policies}")
    alive = survivors(trajectories, args.max_exceptions)
    for t in alive[: 1 if args.write else None]:
        print(f"{env.name}, {args.policy}, {transcript(t)}")
    print(in_words(scores_of(alive, env)))
    if args.write:
        write_jsonl(args.write, [row for t in alive for row in rows_to_imitate(t, env.history)])
        start, played = "runs/agent_start", ["--env", args.env, *env_arguments(args)]
        print(f"wrote {args.write}")
        print(f"next: {shell_line('sft.py', '--data', args.write, '--out', start)}")
        print(f"then: {shell_line('grpo_agent.py', '--model', start, *played)}")


def env_arguments(args):
    return ["--env-args", args.env_args] if args.env_args != "{}" else []


def rows_to_imitate(t, history):
    """An episode as rows for sft.py: one dialogue of which all answers are trained; where a turn
    sees only part of the episode, each turn after what the policy saw. A blank turn is none."""
    turns = ((i, m) for i, m in enumerate(t.messages) if m["role"] == "assistant")
    answers = [i for i, m in turns if not is_blank(m)]
    if history == "all":
        return [{"messages": t.messages[: answers[-1] + 1]}] if answers else []
    shown = [shown_messages(t.messages[:i], history) for i in answers]
    return [{"prompt": p, "completion": [t.messages[i]]} for p, i in zip(shown, answers)]


def main(argv=None):
    args = parse_args(argv)
    make = environment(args)
    if args.command == "play":
        with contextlib.suppress(EOFError):  # a person's Ctrl-D
            play_command(args, make)
        return 0
    env, p, g = make(), args.groups_per_batch, args.group_size
    inputs = [args.model, args.env.rpartition(":")[0], args.ruler_rubric]
    run = runs.Run("grpo_agent", args, inputs, SHOW, HEADLINE)
    run.planned = args.steps or STEPS
    print(f"plan       {run.planned} steps of {p} seeds × {g} episodes of {env.name}, "
          f"at most {env.max_turns} turns, {args.num_substeps} updates a step")  # fmt: skip
    print(watch.promise(args, True))
    args.restore = weights_to_write(args.restore, args.val_episodes, "episodes")
    judge, standard = None, ruler.read_standard(args.ruler_rubric)
    if "ruler" in args.reward:
        judge = server.Judge.from_args(args, args.out, parallel.world())
    policy, reference, tokenizer = rollouts.load_models(args, run)
    run.state = {"policy": policy}
    longest = min(args.max_length, common.max_positions(policy.config))  # an episode may be as long
    run.start(policy, tokenizer, args.lr or runs.default_lr(policy, RATES), longest=longest)
    guard = Guard(run, watch.Watcher(args, run.rows()), "episodes")
    validated = args, run, guard, policy, tokenizer, make
    if run.step == 0:
        preflight(args, run, policy, reference, tokenizer, make)
        validate(*validated, baselines_row(args, make))

    for step in run.steps():
        spent = Counter(judge.counts) if judge else None
        # (1) rollout: G episodes of each of P seeds; all live ones take a turn together
        seeds, draw = training_seeds(args, step), args.seed * 10**6 + step
        trajectories = play_model(args, policy, tokenizer, make, seeds, args.temperature, draw, g)
        # (2) reward: the environment's own, RULER's, or both; an episode that raised has none
        rewards, parts = grade(args, judge, standard, trajectories)
        rewards_PG = by_group(rewards, g)
        # (3) advantages: reward − mean of the group; all turns of an episode share it
        advantages_PG = group_advantages(rewards_PG, args.scale)
        # (4) update: clipped policy gradient over the policy's own tokens
        in_loss = rollouts.comparable(rewards_PG)
        row = update(args, run, reference, trajectories, advantages_PG.view(-1), in_loss)
        row |= rollout_row(args, env, trajectories, parts, rewards_PG, advantages_PG)
        guard.log(row | judge.metrics(spent) if judge else row)
        advantages = advantages_PG.view(-1).tolist()
        rows = rollout_rows(step, "train", trajectories, g, parts, rewards, advantages)
        run.write("rollouts.jsonl", rows)
        # (5) now and then: held-out seeds, beside the baselines; the alarms of watch.py
        if run.evaluates(step):
            validate(*validated)
        guard.end_step()

    # ---- 9. save ----
    if not run.stopped:
        final_test(args, run, reference, tokenizer, make, guard.save())
    words = "grpo_agent.py", "play", "--env", args.env, *env_arguments(args)
    words = *words, "--policy", args.out, "--seed", 7
    return guard.finish(shell_line(*words)) or watch.exit_code(run.state["ended"])


if __name__ == "__main__":
    command(main)
