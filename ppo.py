"""ppo.py: prompts and a reward in, an aligned model out, by clipped policy gradients on the policy's own answers.

Objective    maximise E[score] − β·KL(π‖π_ref)
Algorithm    (1) rollout: one answer to each prompt, log-probs kept
             (2) score: the reward model, or a function, reads the whole answer
             (3) reference log-probs of the same tokens, and the critic's values
             (4) rewards: −β·k1 at every token; the score at the last one
             (5) advantages by GAE, whitened over the rollout
             (6) update: several passes of clipped policy and value loss over minibatches
             (7) KL coefficient: fixed, or steered to a target
             (8) now and then: score, gold and KL on validation prompts; the alarms of watch.py
Conventions  an action is an answer token, end token included; KL is k1 inside the reward; a kl/ref is a sum over the
             answer's tokens, in nats; rollout and update see softmax(logits / temperature), full vocabulary
Left out     1. a reward before the end of the answer   2. PPO-ptx   3. EMA   4. asynchronous rollouts
Run          python ppo.py --reward-model runs/reward
             python ppo.py --reward-model runs/reward runs/dpo --reward-weights 1 3   (two rewards; DPO's is its implicit one)
             python ppo.py --model Qwen/Qwen2.5-0.5B-Instruct --prompts mine.jsonl --reward-fn my.py:score --critic shared --lora-rank 16
             torchrun --nproc-per-node 8 ppo.py --fsdp --model Qwen/Qwen2.5-7B-Instruct --prompts mine.jsonl --reward-model runs/reward
Writes       a model folder, args.json, metrics.jsonl, samples.jsonl, rollouts.jsonl, checkpoint/
Reference    Schulman et al. 2017, arXiv 1707.06347 (clip, eq. 7); GAE: 1506.02438, eq. 16; KL in the reward: Ziegler et al.
             2019, 1909.08593, eq. 2; the value clip and whitening: Huang et al. 2024, 2403.17031
Axes         B answers, T tokens (prompt and answer, right padded), V vocabulary, H hidden size

    position      0      1      2      3      4      5
    token         p0     p1     p2     a0     a1     end
    action                             ✓      ✓      ✓          mask (B, T)
    log-prob                           of a0  of a1  of end     read from the logits one column to the left
    value                              V(p)   V(p,a0) V(p,a0,a1) the state in which the token is chosen: also one to the left
    reward                             −β·k1  −β·k1  −β·k1 + score
"""

import argparse
import math
from collections import Counter

import numpy as np
import torch
from torch import nn

import common
import watch
from common import (
    at_least_fp32,
    kl_estimates,
    pad_rows,
    sample,
    token_logps,
)
from parts import files, lora, old_runs, parallel, runs, stats
from parts.files import UserError

# learning rates: below 100 M parameters (on the bundled base 3e-4 spends twice the KL for less), full weights, LoRA
LR_SMALL, LR_FULL, LR_LORA = 1e-4, 1e-6, 1e-5


# ---- 3. the math ----


def masked_mean(x, mask):
    """Mean of x where mask is True; 0 for an empty mask."""
    common.same_shape(x=x, mask=mask)
    return torch.where(mask, at_least_fp32(x), 0.0).sum() / mask.sum().clamp(min=1)


def shape_rewards(scores, logps, ref_logps, mask, kl_coef, finished=None, no_end_penalty=1.0):
    """r_t = −β·(log π − log π_ref)_t,  and at the last action  + score − penalty·[not finished]      [Ziegler eq. 2]

    scores            (B,) what the reward said of the whole answer
    logps, ref_logps  (B, T) log π and log π_ref of the sampled tokens        mask  (B, T) True at actions
    finished          (B,) bool, ended by an end token; None: all did
    returns           (rewards, kl), both (B, T), 0 outside the mask; kl is k1: any other estimate in the reward has
                      the wrong gradient (the KL card in the tests)

    >>> logps, ref = torch.tensor([[9., -1, -2, -.5]]), torch.tensor([[9., -1.5, -1, -.5]])
    >>> mask = torch.tensor([[False, True, True, True]])
    >>> shape_rewards(torch.tensor([2.]), logps, ref, mask, 0.1)[0]
    tensor([[ 0.0000, -0.0500,  0.1000,  2.0000]])
    """
    common.same_shape(logps=logps, ref_logps=ref_logps, mask=mask)
    common.same_shape(scores=scores, rows=mask[:, 0], finished=finished)
    kl = kl_estimates(logps, ref_logps, mask)[0]  # (B, T)
    ends = torch.zeros_like(kl)
    last = mask.long().cumsum(1).argmax(1, keepdim=True)  # (B, 1) the first column that counts all
    at_end = at_least_fp32(scores)
    if finished is not None:
        at_end = at_end - no_end_penalty * (~finished).to(at_end.dtype)
    ends.scatter_(1, last, at_end[:, None].to(kl.dtype))
    return torch.where(mask, ends - kl_coef * kl, 0.0), kl


def gae(rewards, values, mask, gamma=1.0, lam=0.95, bootstrap=None):
    """A_t = δ_t + γλ·A_{t+1},  δ_t = r_t + γ·V_{t+1} − V_t;  returns = A + V      [GAE eq. 16]

    rewards, values, mask  (B, T); V_t is the value of the state in which token t is chosen
    bootstrap              (B,) value of the state after the last action; None: 0, the answer is over
    returns                (advantages, returns), both (B, T), 0 outside the mask

    γ = 1: λ = 1 is "what came − what was expected", λ = 0 the surprise of one step.
    >>> r, v, mask = torch.tensor([[0., 0, 1]]), torch.tensor([[.5, .5, .5]]), torch.ones(1, 3, dtype=torch.bool)
    >>> gae(r, v, mask, lam=0.5)[0]
    tensor([[0.1250, 0.2500, 0.5000]])
    """
    common.same_shape(rewards=rewards, values=values, mask=mask)
    rewards = torch.where(mask, at_least_fp32(rewards), 0.0)
    values = torch.where(mask, at_least_fp32(values), 0.0)
    after = torch.zeros_like(rewards[:, 0])  # (B,) A_{t+1}
    next_value = after if bootstrap is None else bootstrap.to(rewards.dtype)
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]  # (B,)
        advantages[:, t] = torch.where(mask[:, t], delta + gamma * lam * after, 0.0)
        # padding hands on what is behind it
        after = torch.where(mask[:, t], advantages[:, t], after)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
    return advantages, advantages + values


def masked_whiten(x, mask, shift_mean=True, totals=None):
    """(x − mean)/√(var + 1e-8) over the True positions, unbiased variance; 0 outside; a single position gives 0.

    x, mask (B, T). shift_mean=False adds the mean back. totals: (n, Σx, Σx²) in float64 in place of x's own sums, for
    those of a whole rollout on several ranks.
    >>> masked_whiten(torch.tensor([[1., 2, 3, 4]]), torch.ones(1, 4, dtype=torch.bool))
    tensor([[-1.1619, -0.3873,  0.3873,  1.1619]])
    """
    common.same_shape(x=x, mask=mask)
    x = torch.where(mask, at_least_fp32(x), 0.0)
    n, total, squares = totals or (int(mask.sum()), x.double().sum(), x.double().square().sum())
    if n < 2:
        return torch.zeros_like(x)
    mean = total / n
    var = (squares - n * mean**2).clamp(min=0) / (n - 1)
    white = (x - mean) / (var + 1e-8).sqrt()
    return torch.where(mask, white if shift_mean else white + mean, 0.0).to(x.dtype)


def ppo_policy_loss(logps, old_logps, advantages, mask, clip_low=0.2, clip_high=0.2):
    """L = max(−A·ρ, −A·clip(ρ, 1−ε_low, 1+ε_high)),  ρ = π/π_old      [PPO eq. 7, with its sign turned]

    logps, old_logps, advantages, mask  (B, T); old_logps and advantages carry no gradient
    returns                             (losses, clipped), (B, T): clipped is True where the clipped branch is larger,
                                        so that the token has no gradient; both 0 outside the mask

    ε_high above ε_low ("clip-higher") lets unlikely good tokens grow. The four cases, ε = .2:
    >>> ratio, A = torch.tensor([[1.5, 1.5, .5, .5]]), torch.tensor([[1., -1, 1, -1]])
    >>> ppo_policy_loss(ratio.log(), torch.zeros(1, 4), A, torch.ones(1, 4, dtype=torch.bool))[0]
    tensor([[-1.2000,  1.5000, -0.5000,  0.8000]])
    """
    common.same_shape(logps=logps, old_logps=old_logps, advantages=advantages, mask=mask)
    log_ratio = torch.where(mask, at_least_fp32(logps) - at_least_fp32(old_logps), 0.0)
    ratio = log_ratio.clamp(-20, 20).exp()
    advantages = torch.where(mask, at_least_fp32(advantages), 0.0)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(plain, bounded), bounded > plain


def ppo_value_loss(values, old_values, returns, mask, clip=0.2):
    """L = ½·max((V − R)², (V_old + clip(V − V_old, ±ε) − R)²), V_old from the rollout; all (B, T).

    Returns (losses, clipped), 0 outside the mask.
    >>> one = torch.ones(1, 1, dtype=torch.bool)
    >>> ppo_value_loss(torch.tensor([[1.]]), torch.tensor([[.5]]), torch.tensor([[1.]]), one)[0]
    tensor([[0.0450]])
    """
    common.same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    values, old_values, returns = (
        torch.where(mask, at_least_fp32(x), 0.0) for x in (values, old_values, returns)
    )
    plain = (values - returns) ** 2
    bounded = (old_values + (values - old_values).clamp(-clip, clip) - returns) ** 2
    return 0.5 * torch.maximum(plain, bounded), bounded > plain


def explained_variance(returns, values, mask):
    """1 − Var(R − V)/Var(R) over the actions: 1 a perfect critic, 0 one that knows nothing; NaN if all R agree.

    >>> R, V = torch.tensor([[1., 2, 3, 4]]), torch.tensor([[1., 2, 2, 5]])
    >>> round(explained_variance(R, V, torch.ones(1, 4, dtype=torch.bool)), 4)
    0.6
    """
    returns, values = returns[mask].double(), values[mask].double()
    if len(returns) < 2 or returns.var() == 0:
        return math.nan
    return (1 - (returns - values).var() / returns.var()).item()


class AdaptiveKL:
    """β ← β·(1 + clip(kl/target − 1, ±0.2)·n/horizon); without a target β stays.      [Ziegler eq. 4, error unlogged]

    kl: mean over n answers of the sum over tokens. Twice the target raises β by 20 % over `horizon` answers.
    >>> kl = AdaptiveKL(0.2, target=6); kl.update(9, 64); round(kl.value, 6)
    0.200256
    """

    def __init__(self, value, target=None, horizon=10000):
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, kl, n):
        if self.target is not None:
            self.value *= 1 + min(max(kl / self.target - 1, -0.2), 0.2) * n / self.horizon


# ---- 4. the arguments ----


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="Proximal policy optimisation against a reward.")
    # fmt: off
    parser.add_argument("--prompts", default="data/prompts.jsonl", help="JSONL of prompts; a row may have a split (default %(default)s)")
    parser.add_argument("--split", default="train", help="split to train on, where rows have one (default %(default)s)")
    parser.add_argument("--val-split", default="val", help="split to validate on, where rows have one (default %(default)s)")
    parser.add_argument("--eval-fraction", type=float, default=0.05, help="share of the prompts held out to validate on, where rows have no split (default %(default)s)")
    parser.add_argument("--model", default=common.BASE, help="model folder or hub id (default %(default)s)")
    parser.add_argument("--reward-model", nargs="+", help="folder written by reward_train.py, or by dpo.py (its implicit reward); of several the mean of their standardised scores")
    parser.add_argument("--reward-weights", type=float, nargs="+", help="weight of each --reward-model in that mean (default: all the same)")
    parser.add_argument("--reward-fn", help="FILE:FUNCTION in its place: (prompts, answers, rows) to a list of numbers, None for an answer that cannot be scored; under torchrun each process passes it its own share of the answers")
    parser.add_argument("--raw-reward", action="store_true", help="the reward model's score as it is, not standardised by its training mean and deviation")
    parser.add_argument("--gold", help="FILE:FUNCTION that scores validation answers and is never trained on, such as data/recruiter.py:reward")
    parser.add_argument("--critic", choices=("rm", "policy", "shared"), help="values from a copy of the (first) reward model, a copy of the policy, or a head on the policy itself (default rm where the tokenizers agree, else policy)")
    parser.add_argument("--rollouts", type=int, default=64, help="answers per step, 32 to 512 (default %(default)s)")
    parser.add_argument("--ppo-epochs", type=int, default=4, help="passes over a rollout, 1 to 4 (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of rollout and update alike (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="longest answer, in tokens (default %(default)s)")
    parser.add_argument("--beta", type=float, default=0.05, help="KL coefficient, 0.01 to 0.2 (default %(default)s)")
    parser.add_argument("--kl-target", type=float, help="steer --beta to this KL per answer, in nats, 3 to 10 (default: --beta is fixed)")
    parser.add_argument("--kl-horizon", type=int, default=10000, help="answers over which --beta moves by a fifth (default %(default)s)")
    parser.add_argument("--target-kl", type=float, help="leave out the passes that remain once approx_kl of a pass is above this, 0.01 to 0.1 (default: none)")
    parser.add_argument("--gamma", type=float, default=1.0, help="discount a token (default %(default)s)")
    parser.add_argument("--lam", type=float, default=0.95, help="λ of GAE, 0.9 to 1 (default %(default)s)")
    parser.add_argument("--clip-low", type=float, default=0.2, help="ratio kept above 1 − this (default %(default)s)")
    parser.add_argument("--clip-high", type=float, default=0.2, help="ratio kept below 1 + this; 0.28 is clip-higher (default %(default)s)")
    parser.add_argument("--vf-clip", type=float, default=0.2, help="how far a value may move in one step (default %(default)s)")
    parser.add_argument("--vf-coef", type=float, default=0.1, help="weight of the value loss (default %(default)s)")
    parser.add_argument("--entropy-coef", type=float, default=0.0, help="weight of an entropy bonus, 0 to 0.01 (default 0)")
    parser.add_argument("--no-end-penalty", type=float, default=1.0, help="taken from the score of an answer cut at --max-new-tokens (default %(default)s)")
    parser.add_argument("--critic-lr", type=float, help="learning rate of a critic of its own (default: --lr)")
    parser.add_argument("--head-lr", type=float, default=1e-3, help="learning rate of a fresh value head (default %(default)s)")
    parser.add_argument("--rollouts-every", type=int, default=5, help="steps between rollouts kept in rollouts.jsonl (default %(default)s)")
    parser.add_argument("--restore", choices=("best", "last"), default="best", help="weights written at the end: those of the best validation, or the last (default %(default)s)")
    watch.add_watch_arguments(parser)
    old_runs.add_run_arguments(parser, "runs/ppo", f"{LR_SMALL:g} below 100 M parameters, {LR_FULL:g}, LoRA {LR_LORA:g}", batch_size=16, eval_every=5, save_every=20)
    # fmt: on
    args = old_runs.parse_with_config(parser, argv)
    old_runs.check_arguments(args)
    ranges = {"rollouts": 2, "ppo_epochs": 1, "kl_horizon": 1, "rollouts_every": 1}
    ranges |= {"beta": 0, "no_end_penalty": 0, "vf_coef": 0, "entropy_coef": 0}
    for name, low in ranges.items():
        if not low <= getattr(args, name) < math.inf:
            raise UserError(
                f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least {low}"
            )
    for name in ("kl_target", "target_kl", "critic_lr", "clip_high", "vf_clip"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected a number above 0")
    if args.max_length <= args.max_new_tokens:
        raise UserError(
            f"--max-length {args.max_length}: expected more than --max-new-tokens {args.max_new_tokens}, to hold a prompt"
        )
    for name in ("gamma", "lam"):
        if not 0 <= getattr(args, name) <= 1:
            raise UserError(f"--{name} {getattr(args, name)}: expected a number in [0, 1]")
    if not 0 < args.clip_low < 1:
        raise UserError(f"--clip-low {args.clip_low}: expected a number between 0 and 1")
    if (args.reward_model is None) == (args.reward_fn is None):
        raise UserError(
            "a reward is needed, and only one: --reward-model FOLDER (train it by reward_train.py), or --reward-fn FILE:FUNCTION"
        )
    several = args.reward_model or []
    if len(set(several)) < len(several) or (args.raw_reward and len(several) > 1):
        raise UserError("--reward-model: of several, each once and without --raw-reward: their standardised scores are averaged")  # fmt: skip
    weights = args.reward_weights
    if weights and (len(weights) != len(several) or not all(0 < w < 1e6 for w in weights)):
        raise UserError(f"--reward-weights {' '.join(map(str, weights))}: expected a number above 0 (and below a million) for each --reward-model, of which there are {len(several)}")  # fmt: skip
    watch.options_of(args)
    if args.critic == "rm" and args.reward_fn:
        raise UserError("--critic rm: there is no --reward-model to copy; use policy or shared")
    if args.raw_reward and args.reward_fn:
        raise UserError("--raw-reward: a --reward-fn is never standardised")
    return args


# ---- 5. the data ----
# {"prompt": [{"role": "user", "content": "Assess this candidate. …"}], "split": "train"}


def load_data(args):
    """(training rows, validation rows): by the rows' split; in a file without splits by the prompt's hash.

    Validation keeps 64 prompts, always the same ones.
    """
    rows = runs.load_prompts(args.prompts, "--prompts")
    if any("split" in row for row in rows):
        train = [row for row in rows if row.get("split") == args.split]
        val = [row for row in rows if row.get("split") == args.val_split]
        if not train:
            splits = ", ".join(sorted({str(row.get("split")) for row in rows}))
            raise UserError(
                f'--split {args.split}: no prompt of {args.prompts} has it; its rows have "split": {splits}'
            )
    else:
        train = [row for row in rows if not common.held_out(row["prompt"], args.eval_fraction)]
        val = [row for row in rows if common.held_out(row["prompt"], args.eval_fraction)]
        if not train:
            raise UserError(
                f"--prompts {args.prompts}: all {len(rows)} prompts are held out; lower --eval-fraction"
            )
    print(f"prompts {len(rows)}  training {len(train)}  validation {min(64, len(val))}")
    return train, runs.some_prompts(val, 64)


def prompt_ids(args, tokenizer, row):
    """Ids of a row's prompt, cut from its left where it and an answer would exceed --max-length."""
    return common.encode_prompt(tokenizer, row["prompt"], args.max_length - args.max_new_tokens)


def prompts_of_step(n, size, seed, step):
    """Indices of step `step` (from 1): `size` of an endless row of seeded permutations of n, and the pass they begin in."""
    places = range((step - 1) * size, step * size)
    orders = {
        e: np.random.default_rng([seed, e]).permutation(n)
        for e in range(places[0] // n, places[-1] // n + 1)
    }
    return [int(orders[p // n][p % n]) for p in places], places[0] // n


# ---- 6. the models ----


def load_models(args):
    """(model, reference, critic, reward, tokenizer, scalers)

    The policy is trained. The reference is a frozen copy of its start, or with LoRA the policy with its adapters off
    (None). The critic is a trunk of its own with a value head, or the head alone on the policy's trunk.
    """
    device = parallel.pick_device(args.device)
    dtype, use_scaler = parallel.pick_precision(device, args.dtype)
    scalers = [torch.amp.GradScaler(device.type) if use_scaler else None for _ in "pc"]
    tokenizer, adapter = common.load_tokenizer(args.model), old_runs.lora_arguments(args)
    model = common.load_policy(args.model, dtype, device, **adapter)
    reference = None if adapter else common.load_policy(args.model, dtype, device, trainable=False)
    if args.reward_fn:
        reward = files.load_function(args.reward_fn, "--reward-fn")
    else:
        several = len(args.reward_model) > 1
        scores = [old_runs.reward_function(f, dtype, device, raw=args.raw_reward, scaled=several) for f in args.reward_model]  # fmt: skip
        weights = args.reward_weights
        reward = lambda *asked: np.average([score(*asked) for score in scores], 0, weights).tolist()  # noqa: E731
        name = args.reward_model[0]  # what --critic rm copies
        scored = common.has_reward_head(name, "--reward-model")
        own = common.load_tokenizer(name, "--reward-model").get_vocab()
        same = own == tokenizer.get_vocab()
        if args.critic == "rm" and not (same and scored):
            raise UserError(
                f"--critic rm: {name} is a language model and has no head to start from; use policy or shared"
                if not scored
                else f"--critic rm: the tokenizer of {name} ({len(own)} entries) is not the policy's "
                f"({len(tokenizer.get_vocab())}), so its trunk cannot read the policy's tokens; use policy or shared"
            )
        args.critic = args.critic or ("rm" if same and scored else "policy")
    args.critic = args.critic or "policy"
    critic = load_critic(args, model, tokenizer, dtype, device, adapter)
    return model, reference, critic, reward, tokenizer, scalers


def load_critic(args, model, tokenizer, dtype, device, adapter):
    """`rm`: its head at the last token starts as the standardised score, of several that of the first, which is a start
    like another: the value loss moves it. `policy`, `shared`: a head of zeros."""
    if args.critic == "shared":
        if args.fsdp:
            raise UserError("--fsdp: the head of --critic shared is no part of the sharded model; use --critic policy")  # fmt: skip
        head = nn.Linear(model.config.get_text_config().hidden_size, 1).to(device)
        critic = nn.ModuleDict({"score": head})
        critic.fresh_head = True
    else:
        source = args.reward_model[0] if args.critic == "rm" else args.model
        flag = "--reward-model" if args.critic == "rm" else "--model"
        critic = common.load_reward_model(source, tokenizer, dtype, device, flag=flag, **adapter)
        head = nn.Linear(critic.score.weight.shape[1], 1).to(device)
    nn.init.zeros_(head.weight), nn.init.zeros_(head.bias)
    if args.critic == "rm":
        mean, std = common.reward_scale(critic.config, args.raw_reward)
        with torch.no_grad():
            head.weight.copy_(critic.score.weight / std)
            head.bias.fill_(-mean / std)
    if args.critic != "shared":
        critic.score = head
    return critic


def read_values(critic, hidden, mask):
    """(B, T) values of the actions from the hidden states (N, H) one column before each; 0 outside the mask."""
    values = critic.score(hidden.float()).squeeze(-1)  # (N,) fp32
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values)


@parallel.as_forward
def values_of(trunk, critic, ids, attention_mask, mask):
    """(B, T) values of the actions, from a forward of the critic's own trunk or of the policy's."""
    return read_values(critic, common.token_hidden(trunk, ids, attention_mask, mask), mask)


def logps_and_values(args, model, critic, ids, attention_mask, mask):
    """(logps, entropies, values), each (B, T), 0 outside the mask; with --critic shared from one forward."""
    logps, entropies, hidden = token_logps(
        model, ids, attention_mask, mask, args.temperature, with_entropy=True, with_hidden=True
    )
    if args.critic == "shared":
        return logps, entropies, read_values(critic, hidden, mask)
    return logps, entropies, values_of(critic, critic, ids, attention_mask, mask)


# ---- 7. preflight ----


def preflight(args, model, reference, critic, reward, tokenizer, rows):
    """Rollout log-probs = a teacher-forced pass; ratio 1 and KL 0; the critic's start; one rollout as a token strip."""
    rows = rows[:8]
    b = rollout(args, model, reference, critic, reward, tokenizer, rows, seed=args.seed)
    ids, attention_mask, mask = b["ids"], b["attention_mask"], b["mask"]
    with torch.no_grad():
        head_gap = old_runs.check_head(model, ids, attention_mask, mask)
        logps = token_logps(model, ids, attention_mask, mask, args.temperature)
    gap = (logps - b["logps"]).abs().max().item()
    kl = (logps - b["ref_logps"]).abs().max().item()
    old_runs.check_start(
        model, args.model, gap + kl + head_gap, f"the first prompts of {args.prompts}"
    )
    bound = 1e-4 if model.compute_dtype == torch.float32 else 5e-2
    print(
        f"preflight  log-probs of the rollout = teacher forcing (gap {gap:.1e}), ratio 1, KL to the reference 0 "
        f"(gap {kl:.1e}), bound {bound:.0e}"
    )
    if not head_gap < bound:
        raise UserError(f"--model {args.model}: {old_runs.OTHER_HEAD}")
    if not max(gap, kl) < bound:
        raise UserError(
            f"--model {args.model}: what is scored is not what was sampled (gap {gap:.2g}) or not what the reference says "
            f"(gap {kl:.2g}); try --dtype fp32"
        )
    print(
        f"preflight  critic {args.critic}: values {b['values'][mask].mean():.3f} ± {b['values'][mask].std():.3f}, "
        f"scores {b['scores'].mean():.3f} ± {b['scores'].std():.3f}"
    )
    n = int(attention_mask[0].sum())
    print("first rollout   · prompt   ▮ action   ◆ action that carries the score")
    print(runs.token_strip(tokenizer, ids[0, :n].tolist(), mask[0, :n].tolist(), "◆"))


# ---- 8. the loop ----


@torch.no_grad()
def rollout(args, model, reference, critic, reward, tokenizer, rows, seed):
    """Steps (1) to (3) for the prompts in `rows`: a dict of (B, T) tensors and of lists, one entry an answer."""
    # (1) rollout: one answer to each prompt, log-probs kept
    prompts = [row["prompt"] for row in rows]
    asked = [prompt_ids(args, tokenizer, row) for row in rows]
    drawn = sample(
        model, tokenizer, asked, max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=seed
    )  # fmt: skip
    # (2) score: the reward model, or a function, reads the whole answer
    flag = "--reward-fn" if args.reward_fn else "--reward-model"
    scores = parallel.score_answers(reward, flag, rows, prompts, drawn.texts)
    keep = [i for i, score in enumerate(scores) if score is not None]
    if 2 * len(keep) < len(rows):
        raise UserError(
            f"{flag}: {len(rows) - len(keep)} of {len(rows)} answers got no score (None); more than half stops the run"
        )
    pick = lambda values: [values[i] for i in keep]  # noqa: E731
    answers = pick(drawn.response_ids)
    ids, attention_mask, mask = (
        x.to(model.device) for x in pad_rows(pick(drawn.prompt_ids), answers, common.pad_id(tokenizer))
    )  # fmt: skip
    flat = torch.tensor([x for row in pick(drawn.logps) for x in row], device=model.device)
    logps = torch.zeros(ids.shape, device=model.device).masked_scatter(mask, flat)
    # (3) reference log-probs of the same tokens, and the critic's values
    ref_logps, values = torch.zeros_like(logps), torch.zeros_like(logps)
    lengths = attention_mask.sum(1).cpu()
    for part in old_runs.rank_batches(critic, range(len(keep)), lengths, 2 * args.micro_tokens):
        t = int(lengths[part].max())
        row = ids[part, :t], attention_mask[part, :t], mask[part, :t]
        with lora.adapter_off(reference or model):
            ref_logps[part, :t] = token_logps(reference or model, *row, args.temperature)
        if critic is not None:
            trunk = model if args.critic == "shared" else critic
            values[part, :t] = values_of(trunk, critic, *row)
    parallel.add_up([ref_logps, values])
    return {
        "ids": ids, "attention_mask": attention_mask, "mask": mask, "logps": logps, "ref_logps": ref_logps, "values": values,
        "scores": torch.tensor(pick(scores), dtype=torch.float32, device=model.device), "unscored": 1 - len(keep) / len(rows),
        "finished": torch.tensor(pick(drawn.finished), device=model.device), "lengths": lengths,
        "rows": pick(rows), "prompts": pick(prompts), "texts": pick(drawn.texts),
    }  # fmt: skip


UPDATE_KEYS = (
    "policy_loss", "value_loss", "entropy", "approx_kl", "ratio/mean", "clip_frac", "value_clip_frac"
)  # fmt: skip
ROLLOUT_TENSORS = ("ids", "attention_mask", "mask", "logps", "values", "advantages", "returns")


def accumulate(args, model, critic, scalers, b, batch):
    """The gradients of the answers `batch` of the rollout, forward by forward: (sums for the log, largest ratio, gap)."""
    actions = int(b["mask"][batch].sum())  # of the whole optimiser step
    sums, largest, gap = Counter(), 0.0, 0.0
    for part in old_runs.rank_batches([model, critic], batch, b["lengths"], args.micro_tokens):
        t = int(b["lengths"][part].max())
        mb = {key: b[key][part, :t] for key in ROLLOUT_TENSORS}
        mask = mb["mask"]
        logps, entropies, values = logps_and_values(
            args, model, critic, mb["ids"], mb["attention_mask"], mask
        )
        policy_losses, clipped = ppo_policy_loss(
            logps, mb["logps"], mb["advantages"], mask, args.clip_low, args.clip_high
        )
        value_losses, value_clipped = ppo_value_loss(
            values, mb["values"], mb["returns"], mask, args.vf_clip
        )
        # sums over this part's actions, divided by the actions of the whole optimiser step
        policy_loss = policy_losses.sum() / actions
        value_loss = value_losses.sum() / actions
        entropy = entropies.sum() / actions
        losses = policy_loss - args.entropy_coef * entropy, args.vf_coef * value_loss
        if scalers[0] is None:
            sum(losses).backward()
        else:  # a critic with an optimiser of its own has a scaler of its own
            of_critic = scalers[0 if args.critic == "shared" else 1]
            (scalers[0].scale(losses[0]) + of_critic.scale(losses[1])).backward()
        log_ratio = (logps - mb["logps"]).detach()
        ratio = torch.where(mask, log_ratio.clamp(-20, 20).exp(), 0.0)
        largest, gap = max(largest, ratio.max().item()), max(gap, log_ratio.abs().max().item())
        k3 = kl_estimates(mb["logps"], logps.detach(), mask)[2]
        found = policy_losses, value_losses, entropies, k3, ratio, clipped, value_clipped
        for key, x in zip(UPDATE_KEYS, found, strict=True):
            sums[key] += x.detach().sum().item()
        sums.update(loss=sum(losses).item(), actions=int(mask.sum()))
    return sums, largest, gap


def update(args, model, critic, optimizers, scalers, b, step, steps):
    """Step (6): --ppo-epochs passes over the rollout `b`, and the means of its metrics over the whole update."""
    n, sums, largest, sample_gap, updates = len(b["texts"]), Counter(), 0.0, None, []
    # optimiser steps of an update, if no pass is left out
    plan = args.ppo_epochs * math.ceil(args.rollouts / args.batch_size)
    trained = [model, critic] if args.critic != "shared" else [nn.ModuleList([model, critic])]
    for epoch in range(args.ppo_epochs):
        order = np.random.default_rng([args.seed, step, epoch]).permutation(n)
        before = Counter(sums)
        for start in range(0, n, args.batch_size):
            batch = order[start : start + args.batch_size]
            done = (step - 1) * plan + epoch * (plan // args.ppo_epochs) + start // args.batch_size + 1  # fmt: skip
            todo, skips, first = list(range(len(optimizers))), [0] * len(optimizers), None
            while todo:  # an fp16 overflow: the same minibatch again, at half the scale
                found = accumulate(args, model, critic, scalers, b, batch)
                total = parallel.all_sum(found[0]["loss"])
                first = first or (total, *found)
                for k, (part, optimizer) in enumerate(zip(trained, optimizers, strict=True)):
                    if k not in todo:  # stepped before; only the other one's gradient overflowed
                        optimizer.zero_grad(set_to_none=True)
                        continue
                    old_runs.set_lr(optimizer, args, done, steps * plan)
                    norm, skipped = old_runs.clip_and_step(
                        part, optimizer, scalers[k], args, total, lambda rows=batch: f"answers {rows.tolist()} of step {step}"
                    )  # fmt: skip
                    skips[k] += skipped
                    if not skipped:
                        updates.append((k, first[0], norm, skips[k]))
                        todo.remove(k)
            _, of_batch, ratio, gap = first  # logged once, as it was before its step
            sums.update(of_batch)
            largest, sample_gap = max(largest, ratio), gap if sample_gap is None else sample_gap
        k3, passed = parallel.all_sum(
            *(sums[key] - before[key] for key in ("approx_kl", "actions"))
        )
        if args.target_kl and k3 / passed > args.target_kl:
            break
    of_policy = [u for u in updates if u[0] == 0]
    count, *totals = parallel.all_sum(sums["actions"], *(sums[key] for key in UPDATE_KEYS))
    largest, sample_gap = parallel.all_max(largest, sample_gap)
    means = {key: value / max(count, 1) for key, value in zip(UPDATE_KEYS, totals, strict=True)}
    return {
        "loss": sum(u[1] for u in of_policy) / len(of_policy), **means, "ratio/max": largest,
        "sample_gap": sample_gap, "updates": len(of_policy), "lr": optimizers[0].param_groups[0]["lr"],
        "grad_norm": sum(u[2] for u in of_policy) / len(of_policy), "skipped_steps": sum(u[3] for u in updates),
    }  # fmt: skip


def rollout_row(b, kl, kl_coef):
    """The metrics of a rollout: masked means over its actions, or means over its answers."""
    mask, scores = b["mask"], b["scores"]
    k3 = kl_estimates(b["logps"], b["ref_logps"], mask)[2]
    lengths = mask.sum(1).float()
    kl_ref = kl.sum(1).mean().item()
    return {
        "reward/mean": scores.mean().item(), "reward/std": scores.std().item(), "reward/unscored_frac": b["unscored"],
        "kl/ref": kl_ref, "kl/token": masked_mean(kl, mask).item(), "kl/k3": masked_mean(k3, mask).item(),
        "kl/coef": kl_coef, "objective": scores.mean().item() - kl_coef * kl_ref,
        "explained_variance": explained_variance(b["returns"], b["values"], mask),
        "advantage/abs_mean": masked_mean(b["advantages"].abs(), mask).item(),
        "length/mean": lengths.mean().item(), "length/min": lengths.min().item(), "length/max": lengths.max().item(),
        "length/truncated_frac": (~b["finished"]).float().mean().item(),
        "eos_rate": b["finished"].float().mean().item(), **watch.text_metrics(b["prompts"], b["texts"]),
        "tokens": int(b["attention_mask"].sum()), "answer_tokens": int(mask.sum()), "episodes": len(scores),
    }  # fmt: skip


def rollout_rows(b, kl):
    """What rollouts.jsonl holds of each answer, to be read by people."""
    columns = b["scores"].tolist(), kl.sum(1).tolist(), b["finished"].tolist()
    for row in zip(b["prompts"], b["texts"], *columns, strict=True):
        yield dict(zip(("prompt", "answer", "reward", "kl", "finished"), row, strict=True))


def evaluate(args, model, reference, reward, gold, tokenizer, rows):
    """Mean score, mean gold and mean KL of one answer to each validation prompt, drawn with the same seed each time."""
    if not rows:
        return {}, []
    b = rollout(args, model, reference, None, reward, tokenizer, rows, seed=args.seed)
    out = {"val/score": b["scores"].mean().item()}
    if gold:
        scores = parallel.score_answers(gold, "--gold", b["rows"], b["prompts"], b["texts"])
        out["val/gold"] = stats.mean(scores)
    out["val/kl"] = kl_estimates(b["logps"], b["ref_logps"], b["mask"])[0].sum(1).mean().item()
    out["val/length"] = b["mask"].sum(1).float().mean().item()
    shown = zip(b["prompts"][:2], b["texts"][:2], strict=True)
    return out, [{"prompt": p, "answer": text} for p, text in shown]


def main(argv=None):
    args = parse_args(argv)
    parallel.start_processes(args)
    old_runs.check_out(args, [args.model, *(args.reward_model or [])])
    old_runs.seed_everything(args.seed)
    train, val = load_data(args)
    gold = files.load_function(args.gold, "--gold") if args.gold else None
    model, reference, critic, reward, tokenizer, scalers = load_models(args)
    args.lr = old_runs.pick_lr(args, model, LR_SMALL, LR_FULL, LR_LORA)
    args.micro_tokens = args.micro_tokens or common.micro_tokens(model)
    asked = [len(common.encode_prompt(tokenizer, row["prompt"])) for row in [*train, *val]]
    room = args.max_length - args.max_new_tokens
    if max(asked) > room:
        cut = sum(n > room for n in asked)
        print(f"prompts cut {cut}: --max-length leaves {room} tokens, the longest has {max(asked)}")
    steps = args.steps or args.epochs * math.ceil(len(train) / args.rollouts)
    a_step = args.ppo_epochs * math.ceil(args.rollouts / args.batch_size)
    print(
        f"{steps} steps of {args.rollouts} rollouts = {steps * args.rollouts} answers, {steps * args.rollouts / len(train):.1f} to a prompt; "
        f"a step = {args.ppo_epochs} passes in batches of {args.batch_size} = {a_step} updates"
    )
    print(watch.promise(args, bool(val)))
    weights = {
        name: sum(p.numel() for p in m.parameters() if p.requires_grad) / 1e6
        for name, m in (("policy", model), (f"critic {args.critic}", critic))
    }
    print("  ".join(f"{k} {v:.2f} M weights" for k, v in weights.items()) + f", lr {args.lr:g}, on {model.device}")  # fmt: skip
    inputs = [args.prompts, *(args.reward_model or [])]
    inputs += [spec.rpartition(":")[0] for spec in (args.reward_fn, args.gold) if spec]
    record = old_runs.check_run(args, "ppo", inputs, args.model)
    model = old_runs.prepare_training(model, args)
    shared, head_lr = args.critic == "shared", args.head_lr
    if shared:
        optimizers = [old_runs.make_optimizer(nn.ModuleDict({"policy": model, "score": critic.score}), args.lr, head_lr, args.weight_decay, 1e-5)]  # fmt: skip
    else:
        critic = old_runs.prepare_training(critic, args)
        rate = args.critic_lr or args.lr
        optimizers = [old_runs.make_optimizer(model, args.lr, None, args.weight_decay, 1e-5)]
        optimizers += [old_runs.make_optimizer(critic, rate, head_lr if critic.fresh_head else None, args.weight_decay, 1e-5)]  # fmt: skip
    kl_control, extra = AdaptiveKL(args.beta, args.kl_target, args.kl_horizon), {}
    held = {"model": model, "critic": critic}, dict(zip(("model", "critic"), optimizers))
    start = old_runs.load_checkpoint(args, *held, scalers[0], extra)
    best = extra.get("best", {"step": None, "weights": {}})
    kl_control.value = extra.get("kl_coef", kl_control.value)
    if scalers[1] is not None and "critic_scaler" in extra:
        scalers[1].load_state_dict(extra["critic_scaler"])
    everything = model, reference, reward, gold, tokenizer
    if start == 0:  # what is in --out stays untouched until all this has passed
        preflight(args, model, reference, critic, reward, tokenizer, train)
        before = evaluate(args, *everything, val)
    old_runs.open_run(args, record)
    log, stop = old_runs.MetricsLog(args, start), old_runs.StopSignal()
    watcher = watch.Watcher(args, log.rows())
    if start == 0:
        # a full disk or an unsaveable config shows now, not after hours
        old_runs.save_run(model, tokenizer, args)
        log.evaluation(0, *before)
        watcher.add({"step": 0, **before[0]})
        best = old_runs.keep_best(best, watcher.best_step(), model, 0)

    bar, reason = old_runs.progress("ppo", start, steps), None
    for step in bar:
        # (1) rollout: one answer to each prompt, log-probs kept
        # (2) score: the reward model, or a function, reads the whole answer
        # (3) reference log-probs of the same tokens, and the critic's values
        indices, epoch = prompts_of_step(len(train), args.rollouts, args.seed, step)
        rows = [train[i] for i in indices]
        b = rollout(
            args, model, reference, critic, reward, tokenizer, rows, args.seed * 10**6 + step
        )
        # (4) rewards: −β·k1 at every token; the score at the last one
        rewards, kl = shape_rewards(
            b["scores"], b["logps"], b["ref_logps"], b["mask"], kl_control.value, b["finished"], args.no_end_penalty
        )  # fmt: skip
        # (5) advantages by GAE, whitened over the rollout
        advantages, b["returns"] = gae(rewards, b["values"], b["mask"], args.gamma, args.lam)
        b["advantages"] = masked_whiten(advantages, b["mask"])
        # (6) update: several passes of clipped policy and value loss over minibatches
        trained = update(args, model, critic, optimizers, scalers, b, step, steps)
        row = {"step": step, "epoch": epoch, **trained, **rollout_row(b, kl, kl_control.value)}
        # (7) KL coefficient: fixed, or steered to a target
        kl_control.update(row["kl/ref"], len(b["texts"]))
        log.write(row)
        if (step - 1) % args.rollouts_every == 0:
            log.append("rollouts.jsonl", step, rollout_rows(b, kl))
        bar.set_postfix_str(
            f"reward {row['reward/mean']:.3f} kl {row['kl/ref']:.2f} entropy {row['entropy']:.2f} "
            f"clip {row['clip_frac']:.2f} length {row['length/mean']:.0f}"
        )
        events = watcher.add(row)
        # (8) now and then: score, gold and KL on validation prompts; the alarms of watch.py
        if step == steps or (args.eval_every and step % args.eval_every == 0):
            metrics, samples = evaluate(args, *everything, val)
            log.evaluation(step, metrics, samples)
            events += watcher.add({"step": step, **metrics})
            best = old_runs.keep_best(best, watcher.best_step(), model, step)
        for event in events:
            old_runs.print_over_bar(str(event))
        reason = parallel.from_rank_0(watcher.stop_reason())
        if old_runs.checkpoint_due(args, step, steps, stop) or reason:
            extra = {"kl_coef": kl_control.value, "best": best}
            extra |= {} if scalers[1] is None else {"critic_scaler": scalers[1].state_dict()}
            old_runs.save_checkpoint(args, step, *held, scalers[0], **extra)
        if reason:
            bar.close()
            break
        if stop or step == args.stop_after:
            return log.stopped(step, stop)

    # ---- 9. save ----
    if args.restore == "best":
        old_runs.restore_best(best, model)
    old_runs.save_run(model, tokenizer, args)
    if reason and reason != "max_steps":
        print(f"stopped by watch.py: {reason}")
    log.finish(["val/score", "val/gold", "val/kl", "reward/mean"])
    print(f"next: python evaluate.py --model {args.model} {args.out}")
    return watch.exit_code(reason)


if __name__ == "__main__":
    files.command(main)
