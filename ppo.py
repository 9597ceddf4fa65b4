"""ppo.py: prompts and a reward in, an aligned model out, by policy gradients on its own answers.

Objective    maximise E[score] − β·KL(π‖π_ref)
Algorithm    (1) rollout: one answer to each prompt, log-probs kept
             (2) score: the reward model, or a function, reads the whole answer
             (3) reference log-probs of the same tokens, and the critic's values
             (4) rewards: −β·k1 at every token; the score at the last one
             (5) advantages by GAE, whitened over the rollout
             (6) update: several passes of clipped policy and value loss over minibatches
             (7) KL coefficient: fixed, or steered to a target
             (8) now and then: score, gold and KL on validation prompts; the alarms of watch.py
Conventions  an action is an answer token, end token included; KL is k1 = log π − log π_ref of the
             sampled token, inside the reward; kl/ref is a sum over the answer's tokens, in nats;
             rollout and update see the full softmax(logits / temperature)
Left out     1. rewards before the end of an answer   2. PPO-ptx   3. asynchronous rollouts
             4. an entropy bonus
Run          python ppo.py --reward-model runs/reward
             python ppo.py --prompts my.jsonl --reward-fn my.py:score --critic shared --lora-rank 16
             torchrun --nproc-per-node 8 ppo.py --fsdp --reward-model runs/reward
Writes       a model folder, args.json, metrics.jsonl, samples.jsonl, rollouts.jsonl, checkpoint/
Reference    Schulman et al. 2017, arXiv 1707.06347 (clip, eq. 7); GAE: 1506.02438, eq. 16; KL in
             the reward: Ziegler et al. 2019, 1909.08593, eq. 2; value clip, whitening: 2403.17031
Axes         B answers of a rollout, n of one forward, T tokens (right padded), N actions, H hidden
    position      0      1      2      3      4       5
    token         p0     p1     p2     a0     a1      end
    action                             ✓      ✓       ✓            mask (B, T)
    log-prob                           of a0  of a1   of end      computed from column t − 1
    value                              V(p)   V(p,a0) V(p,a0,a1)  before token t: from t − 1, too
    reward                             −β·k1  −β·k1   −β·k1 + score
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

import common  # text → tokens → log-probs
import watch  # the alarms
from common import at_least_fp32, kl_estimates, pad_id, token_logps
from parts import memory, prompting, rollouts, runs  # what fits; prompts; rollouts; the run
from parts.files import UserError, command, no_effect, number, shell_line  # errors and flags
from parts.guard import Guard, weights_to_write  # alarms and the best weights of this run
from parts.lora import adapter_off  # a policy without its adapter is what it started from
from parts.parallel import all_max, as_forward, score_answers, world  # over all ranks; FSDP
from parts.reward_models import load_reward_model, reward_function, reward_scale  # answer → score
from parts.rollouts import ROWS  # names of a rollout's tensors that a forward takes
from parts.sampling import Rollout, sample  # answers with their log-probs
from parts.texts import text_metrics  # repetition, sameness

# --lr below 100 M parameters (3e-4: twice the KL, less reward); above (run once); LoRA: a guess
RATES = 1e-4, 5e-6, 1e-4
HEAD_LR = 1e-3  # of a fresh value head, which would hardly move at the trunk's rate
GAMMA, LAM = 1.0, 0.95  # no discount within an answer; λ 1 trusts the critic less
CLIP_LOW, VALUE_CLIP = 0.2, 0.2  # lower end of the ratio's clip; how far a value may move per step
VALUE_COEF = 0.1  # weight of the value loss, which shares the gradient with --critic shared
KL_GAIN = 0.1  # of --kl-target: a rollout moves β by at most 0.1 · 0.2 = 2 %, as in the paper
ROLLOUTS_EVERY = 5  # steps between the rollouts kept in rollouts.jsonl
SHOW = ("reward/mean", "kl/ref", "entropy", "clip_frac", "length/mean")  # on the progress bar
HEADLINE = ("val/score", "val/gold", "val/kl", "reward/mean")  # printed at each evaluation
UPDATE_METRICS = """policy_loss value_loss entropy approx_kl ratio/mean clip_frac
    value_clip_frac""".split()  # means over the actions of an update


# ---- 3. the math ----


def masked_mean(x, mask):
    """Mean of x where mask is True; 0 for an empty mask."""
    common.same_shape(x=x, mask=mask)
    return torch.where(mask, at_least_fp32(x), 0.0).sum() / mask.sum().clamp(min=1)


def shape_rewards(scores, logps, ref_logps, mask, kl_coef, finished=None, no_end_penalty=1.0):
    """r_t = −β·(log π − log π_ref)_t; at the last action + score − penalty·[not finished]

    [Ziegler eq. 2]

    scores            (B,) reward of the whole answer
    logps, ref_logps  (B, T) log π and log π_ref of the sampled tokens
    mask              (B, T) True at actions
    finished          (B,) bool: ended by an end token, not cut; None: all did
    returns           (rewards, kl), both (B, T), 0 outside the mask; kl is k1: any other estimate
                      has the wrong gradient in the reward (tests/test_losses.py, the KL card)

    >>> logps, ref = torch.tensor([[9., -1, -2, -.5]]), torch.tensor([[9., -1.5, -1, -.5]])
    >>> mask = torch.tensor([[False, True, True, True]])
    >>> shape_rewards(torch.tensor([2.]), logps, ref, mask, 0.1)[0]
    tensor([[ 0.0000, -0.0500,  0.1000,  2.0000]])
    """
    common.same_shape(logps=logps, ref_logps=ref_logps, mask=mask)
    common.same_shape(scores=scores, rows=mask[:, 0], finished=finished)
    kl = kl_estimates(logps, ref_logps, mask)[0]  # (B, T): k1 of (k1, k2, k3)
    end_rewards = torch.zeros_like(kl)  # (B, T)
    last = mask.long().cumsum(1).argmax(1, keepdim=True)  # (B, 1) where the count is first complete
    at_end = at_least_fp32(scores)  # (B,)
    if finished is not None:
        at_end = at_end - no_end_penalty * (~finished).to(at_end.dtype)
    end_rewards.scatter_(1, last, at_end[:, None].to(kl.dtype))
    return torch.where(mask, end_rewards - kl_coef * kl, 0.0), kl


def gae(rewards, values, mask, gamma=1.0, lam=0.95):
    """A_t = δ_t + γλ·A_{t+1},  δ_t = r_t + γ·V_{t+1} − V_t;  returns = A + V      [GAE eq. 16]

    rewards, values, mask  (B, T); V_t is the value of the state in which token t is chosen
    returns                (advantages, returns), both (B, T), 0 outside the mask

    γ = 1: λ = 1 is "what came − what was expected", λ = 0 the surprise of one step.
    >>> r, v = torch.tensor([[0., 0, 1]]), torch.tensor([[.5, .5, .5]])
    >>> gae(r, v, torch.ones(1, 3, dtype=torch.bool), lam=0.5)[0]
    tensor([[0.1250, 0.2500, 0.5000]])
    """
    common.same_shape(rewards=rewards, values=values, mask=mask)
    rewards = torch.where(mask, at_least_fp32(rewards), 0.0)
    values = torch.where(mask, at_least_fp32(values), 0.0)
    next_advantage = next_value = torch.zeros_like(rewards[:, 0])  # (B,) A_{t+1}, V_{t+1}
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]  # (B,)
        advantages[:, t] = torch.where(mask[:, t], delta + gamma * lam * next_advantage, 0.0)
        # a column that is not an action passes on what comes after it
        next_advantage = torch.where(mask[:, t], advantages[:, t], next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
    return advantages, advantages + values


def masked_whiten(x, mask):
    """(x − mean)/√(var + 1e-8) over the True positions, unbiased variance; 0 outside.

    x, mask  (B, T); a single position gives 0
    >>> masked_whiten(torch.tensor([[1., 2, 3, 4]]), torch.ones(1, 4, dtype=torch.bool))
    tensor([[-1.1619, -0.3873,  0.3873,  1.1619]])
    """
    common.same_shape(x=x, mask=mask)
    x = torch.where(mask, at_least_fp32(x), 0.0)
    actions = x[mask].cpu().double()  # mps has no float64
    if len(actions) < 2:
        return torch.zeros_like(x)
    mean, var = actions.mean().item(), actions.var().item()
    return torch.where(mask, (x - mean) / math.sqrt(var + 1e-8), 0.0)


def ppo_policy_loss(logps, old_logps, advantages, mask, clip_low=0.2, clip_high=0.2):
    """L = max(−A·ρ, −A·clip(ρ, 1−ε_low, 1+ε_high)),  ρ = π/π_old      [PPO eq. 7, negated]

    logps, old_logps, advantages, mask  (B, T); old_logps and advantages have no gradient
    returns  (losses, clipped), (B, T), 0 outside the mask; clipped is True where the clipped branch
             is larger, so that the token has no gradient

    ε_high above ε_low ("clip-higher") lets unlikely good tokens grow. The four cases, ε = .2:
    >>> ratio, A = torch.tensor([[1.5, 1.5, .5, .5]]), torch.tensor([[1., -1, 1, -1]])
    >>> ppo_policy_loss(ratio.log(), torch.zeros(1, 4), A, torch.ones(1, 4, dtype=torch.bool))[0]
    tensor([[-1.2000,  1.5000, -0.5000,  0.8000]])
    """
    common.same_shape(logps=logps, old_logps=old_logps, advantages=advantages, mask=mask)
    log_ratio = torch.where(mask, at_least_fp32(logps) - at_least_fp32(old_logps), 0.0)
    ratio = log_ratio.clamp(-20, 20).exp()  # exp(89) is inf in fp32
    advantages = torch.where(mask, at_least_fp32(advantages), 0.0)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(plain, bounded), bounded > plain


def ppo_value_loss(values, old_values, returns, mask, clip=0.2):
    """L = ½·max((V − R)², (V_old + clip(V − V_old, ±ε) − R)²), V_old from the rollout; all (B, T).

    Returns (losses, clipped), 0 outside the mask. By hand: V = 1 counts as .7, ½·(.7 − 1)² = .045.
    >>> V, V_old, R = torch.tensor([[1.0]]), torch.tensor([[0.5]]), torch.tensor([[1.0]])
    >>> ppo_value_loss(V, V_old, R, torch.ones(1, 1, dtype=torch.bool))[0]
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
    """1 − Var(R − V)/Var(R) over the actions: 1 a perfect critic, 0 one that knows nothing, NaN if
    all returns agree.

    >>> R, V = torch.tensor([[1., 2, 3, 4]]), torch.tensor([[1., 2, 2, 5]])
    >>> round(explained_variance(R, V, torch.ones(1, 4, dtype=torch.bool)), 4)
    0.6
    """
    returns, values = (x[mask].cpu().double() for x in (returns, values))
    if len(returns) < 2 or returns.var() == 0:
        return math.nan
    return (1 - (returns - values).var() / returns.var()).item()


class AdaptiveKL:
    """β ← β·(1 + gain·clip(kl/target − 1, ±0.2)), once a rollout; without a target β stays.

    [Ziegler section 2.2]

    kl: mean over the rollout's answers of the sum over tokens.
    >>> kl = AdaptiveKL(0.2, target=6); kl.update(9); round(kl.value, 6)
    0.204
    """

    def __init__(self, value, target=None):
        self.value, self.target = value, target

    def update(self, kl):
        if self.target is not None:
            self.value *= 1 + KL_GAIN * min(max(kl / self.target - 1, -0.2), 0.2)


# ---- 4. the arguments ----


def parse_args(argv=None):
    parser = runs.Parser(
        "ppo.py --reward-model runs/reward --prompts mine.jsonl --out runs/ppo",
        "Proximal policy optimisation against a reward.",
    )
    add, share = parser.add_argument, number(at_least=0, below=1)
    # fmt: off
    add("--prompts", default="data/prompts.jsonl", help='JSONL of prompts; if rows have a "split", train and val (default %(default)s)')
    add("--eval-fraction", type=share, help="share of prompts to validate on, if rows have no split (default 0.05, more of a small file)")
    add("--model", default=common.BASE, help="model folder or hub id (default %(default)s)")
    add("--reward-model", help="folder of a reward model; scores are standardised by its training mean and deviation")
    add("--reward-fn", help="FILE:FUNCTION instead: (prompts, answers, rows) → a list of numbers, None where there is no score")
    add("--gold", help="FILE:FUNCTION, such as data/recruiter.py:reward; on validation answers alone, to choose weights and stop")
    add("--critic", choices=("rm", "policy", "shared"), help="trunk: reward model's, policy's or shared (default: the first that fits)")
    add("--rollouts", type=number(int, at_least=2), default=64, help="answers per step, 32 to 512 (default %(default)s)")
    add("--ppo-epochs", type=number(int, at_least=1), default=2, help="passes over a rollout, 1 to 4 (default %(default)s)")
    add("--beta", type=number(at_least=0), default=0.05, help="KL coefficient, 0.01 to 0.2 (default %(default)s)")
    add("--kl-target", type=number(above=0), help="steer --beta to this KL per answer, in nats, 3 to 10 (default: --beta is fixed)")
    add("--clip-high", type=number(above=0), default=0.2, help="ratio kept below 1 + this; 0.28 is clip-higher (default %(default)s)")
    add("--no-end-penalty", type=number(at_least=0), default=1.0, help="subtracted from the reward of a cut answer (default %(default)s)")
    # fmt: on
    rollouts.add_rollout_arguments(parser)  # --temperature, --max-new-tokens, --restore
    prompting.add_examples_argument(parser)
    watch.add_watch_arguments(parser)  # when to stop: --patience, --target, --on-hack …
    parser.add_run_arguments("runs/ppo", RATES)  # of all trainers: --lr, --batch-size, --seed …
    parser.set_defaults(eval_every=5, save_every=20)  # a step is a whole rollout
    args = parser.parse_args(argv)
    parser.without_effect("--kl-target", not args.beta, "it steers by a factor, and --beta is 0")
    rollouts.check_lengths(args)
    prompting.default_examples(args, [args.prompts])  # sets args.examples
    if (args.reward_model is None) == (args.reward_fn is None):
        raise UserError("give one reward: --reward-model (of reward_train.py) or --reward-fn")
    if args.critic == "rm" and args.reward_fn:
        raise UserError("--critic rm: there is no --reward-model to copy; use policy or shared")
    return args


# ---- 5. the data ----
# {"prompt": [{"role": "user", "content": "Assess this candidate. …"}], "split": "train"}


def load_data(args, tokenizer):
    """(training rows, at most 64 validation rows): by "split", without one by the prompt's hash."""
    rows = prompting.load_prompts(args.prompts, "--prompts")
    if has_split := any("split" in row for row in rows):
        train, val = ([r for r in rows if r.get("split") == name] for name in ("train", "val"))
        fix = 'no row has "split": "train"; without that column a part is held out by itself'
    else:
        is_val = rollouts.is_held_out(rows, args.eval_fraction)  # one bool per row
        train, val = ([r for r, v in zip(rows, is_val) if v == side] for side in (False, True))
        fix = f"all {len(rows)} prompts are held out; lower --eval-fraction"
    if not train:
        raise UserError(f"--prompts {args.prompts}: {fix}")
    if has_split and args.eval_fraction is not None:
        raise no_effect("--eval-fraction", f'rows of {args.prompts} have a "split"')
    counts = {"prompts": len(rows), "of another split": len(rows) - len(train + val)}
    val = prompting.some_prompts(rollouts.untrained(val, train, counts), 64)  # none of train
    examples = prompting.load_examples(args.examples)
    for row in [*train, *val]:
        row["prompt"] = prompting.after_examples(examples, row)
    room = args.max_length - args.max_new_tokens  # tokens that a prompt may have
    encoded = (common.encode_prompt(tokenizer, row["prompt"]) for row in [*train, *val])
    counts[f"cut to {room} tokens"] = sum(len(ids) > room for ids in encoded)
    prompting.describe(counts, train, val)
    return train, val


# ---- 6. the models ----


class Models(NamedTuple):
    """What takes part in a rollout."""

    policy: nn.Module  # trained
    reference: nn.Module  # frozen copy of the policy's start; with LoRA the policy, adapters off
    critic: nn.Module  # trained: a trunk of its own with a value head, or a head on the policy
    reward: object  # a function: (prompts, answers, rows) → scores
    tokenizer: object


def load_models(args, run):
    """The `Models`; sets args.critic where it was left open."""
    policy, reference, tokenizer = rollouts.load_models(args, run, with_reference=True)
    if args.reward_fn:
        reward, default_critic = prompting.load_scorer(args.reward_fn, "--reward-fn"), "policy"
    else:
        folder, place = args.reward_model, (run.dtype, run.device)
        prompting.compare_examples(folder, args.examples)  # prints if it learnt after others
        reward = reward_function(folder, *place, lambda: args.micro_tokens)  # set by run.start
        vocabulary = common.load_tokenizer(folder, "--reward-model").get_vocab()
        default_critic = "rm" if vocabulary == tokenizer.get_vocab() else "policy"
        if args.critic == "rm" and default_critic != "rm":
            sizes = f"{folder} ({len(vocabulary)} entries) is not the policy's"
            fix = f"({len(tokenizer)}); use policy or shared"
            raise UserError(f"--critic rm: the tokenizer of {sizes} {fix}")
    args.critic = args.critic or critic_that_fits(args, run, policy, default_critic)
    return Models(policy, reference, load_critic(args, run, policy, tokenizer), reward, tokenizer)


def critic_that_fits(args, run, policy, default_critic):
    """`default_critic`, or "shared" where no memory is left for a critic as large as the policy."""
    free, shards = memory.free_memory(run.device), world() if args.fsdp else 1
    weight_bytes = sum(w.numel() * w.element_size() for w in policy.parameters()) / shards
    training_bytes = memory.training_bytes([policy]) / shards  # gradients, moments, logits
    critic_bytes = training_bytes + weight_bytes
    if not all_max(free is not None and training_bytes + critic_bytes > memory.MARGIN * free):
        return default_critic  # it fits on every rank, and leaves a tenth of what is free
    needed, left = critic_bytes / 1e9, max(0, (free or 0) - training_bytes) / 1e9
    print(f"critic     shared: one of its own needs {needed:.1f} GB; the policy leaves {left:.1f}")
    return "shared"


def load_critic(args, run, policy, tokenizer):
    """A model whose `score` is the value head, (H,) → 1, in fp32.

    `rm`: a copy of the reward model, whose head starts as the standardised score.
    `policy`: a copy of the policy with a head of zeros; `shared`: such a head alone.
    """
    if args.critic == "shared":
        critic, size = nn.Module(), policy.config.get_text_config().hidden_size
        critic.fresh_head = True  # as of a causal model: there is no trained head to start from
    else:
        source, settings = args.model, {"lora_rank": args.lora_rank}
        if args.critic == "rm":
            source, settings["flag"] = args.reward_model, "--reward-model"
        critic = load_reward_model(source, tokenizer, run.dtype, run.device, **settings)
        size = critic.score.in_features
    head = nn.Linear(size, 1).to(run.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    if not critic.fresh_head:  # (w·h − mean) / deviation, the unit of the scores
        mean_score, deviation = reward_scale(critic.config, "--reward-model")
        head.weight.data.copy_(critic.score.weight / deviation)
        head.bias.data.fill_(-mean_score / deviation)
    critic.score = head
    return critic


def read_values(critic, hidden, mask):
    """(B, T) fp32 values of actions, else 0; hidden (N, H), a column before: `token_hidden`."""
    values = critic.score(hidden.float()).squeeze(-1)  # (N,)
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values)


@as_forward  # with --fsdp, gathers the weights of the first argument
def values_of(trunk, critic, ids, attention_mask, mask):
    """(B, T) values of the actions by a forward of `trunk`: the critic; if shared, the policy."""
    return read_values(critic, common.token_hidden(trunk, ids, attention_mask, mask), mask)


# ---- 7. preflight ----


def preflight(args, run, models, rows):
    """Rollout log-probs = a forward's; KL 0 to the reference; the critic's values beside scores."""
    b = rollout(args, run, models, rows[:8], args.seed)
    rollouts.preflight(run, models.policy, models.reference, models.tokenizer, b)
    starts = {"values": b["values"][b["mask"]], "scores": b["scores"]}
    means = "; ".join(f"{name} {x.mean():.3f} ± {x.std():.3f}" for name, x in starts.items())
    print(f"preflight  critic {args.critic}: {means}")


# ---- 8. the loop ----


@torch.no_grad()
def rollout(args, run, models, rows, seed):
    """Steps (1) to (3) for the prompts in `rows`, less the answers that cannot be scored: a dict of

    ids, attention_mask, mask           (B, T) prompt and answer; mask: the actions
    logps, ref_logps, values            (B, T) 0 outside mask; logps: log π_old
    sampler_logps                       (B, T) only in half precision, see `rollouts.rescore`
    scores, finished, lengths           (B,); lengths: tokens of prompt and answer, on the CPU
    rows, prompts, prompt_ids, texts    lists of B; texts: the answers. Every rank has all B
    unscored                            share of the answers that are left out
    """
    policy, reference, critic, reward, tokenizer = models
    # (1) rollout: one answer to each prompt, log-probs kept
    prompts, room = [row["prompt"] for row in rows], args.max_length - args.max_new_tokens
    prompt_ids = [common.encode_prompt(tokenizer, prompt, room) for prompt in prompts]
    answers = sample(policy, tokenizer, prompt_ids, 1, args.max_new_tokens, args.temperature, seed)
    # (2) score: the reward model, or a function, reads the whole answer
    flag = "--reward-fn" if args.reward_fn else "--reward-model"
    scores = score_answers(reward, flag, rows, prompts, answers.texts)
    scored = [i for i, score in enumerate(scores) if score is not None]
    if 2 * len(scored) < len(rows):
        counts = f"{len(rows) - len(scored)} of {len(rows)} answers got no score (None)"
        raise UserError(f"{flag}: {counts}; more than half stops the run")
    rows, prompts, scores = ([column[i] for i in scored] for column in (rows, prompts, scores))
    answers = Rollout(**{name: [x[i] for i in scored] for name, x in vars(answers).items()})
    b = rollouts.rollout_tensors(answers, pad_id(tokenizer), policy.device)  # ids, mask, logps
    # in half precision b["logps"] become a forward's, in the batches of pass 0; fp32: unchanged
    rollouts.rescore(run, policy, b, args.temperature, minibatches(args, run, len(scored), epoch=0))
    # (3) reference log-probs of the same tokens, and the critic's values
    whole = [range(len(scored))]  # one batch, which is cut to forwards that fit into memory
    trunk = policy if args.critic == "shared" else critic
    with adapter_off(reference):
        ref_logps = rollouts.teacher_forced(run, reference, b, args.temperature, whole)
    values = rollouts.in_micro_batches(
        run, trunk, b, whole, lambda trunk, *inputs: values_of(trunk, critic, *inputs)
    )
    return b | {
        "ref_logps": ref_logps, "values": values, "lengths": b["attention_mask"].sum(1).cpu(),
        "scores": torch.tensor(scores, dtype=torch.float32, device=policy.device),
        "finished": torch.tensor(answers.finished, device=policy.device),
        "rows": rows, "prompts": prompts, "prompt_ids": answers.prompt_ids, "texts": answers.texts,
        "unscored": 1 - len(scored) / len(prompt_ids),
    }  # fmt: skip


def backward(args, run, policy, critic, b, part, actions):
    """Add the gradient of the micro-batch `part` of a rollout; returns (token_metrics, mask, gaps).

    actions  number of actions of the whole optimiser step
    returns  {key of UPDATE_METRICS: (n, T)}; (n, T) bool; (n, T) |log π − log π of the sampler|

    The policy's graph is freed before a separate critic runs; with --fsdp this is also the order
    in which all ranks gather weights.
    """
    longest = int(b["lengths"][part].max())
    mb = {key: x[part, :longest] for key, x in b.items() if torch.is_tensor(x) and x.ndim == 2}
    mask, old_logps, inputs = mb["mask"], mb["logps"], [mb[key] for key in ROWS]
    logps, entropies, hidden = token_logps(
        policy, *inputs, args.temperature, with_entropy=True, with_hidden=True
    )
    policy_losses, clipped = ppo_policy_loss(
        logps, old_logps, mb["advantages"], mask, CLIP_LOW, args.clip_high
    )
    # sums over this part's actions, divided by the actions of the whole optimiser step
    loss = policy_losses.sum() / actions
    if args.critic == "shared":
        values = read_values(critic, hidden, mask)
    else:
        run.backward(loss)
        loss, values = 0.0, values_of(critic, critic, *inputs)  # the critic is its own trunk
    value_losses, value_clipped = ppo_value_loss(
        values, mb["values"], mb["returns"], mask, VALUE_CLIP
    )
    run.backward(loss + VALUE_COEF * value_losses.sum() / actions)  # update adds up over ranks
    logps = logps.detach()
    token_metrics = {
        "policy_loss": policy_losses, "value_loss": value_losses, "entropy": entropies,
        "approx_kl": kl_estimates(old_logps, logps, mask)[2],  # k3 of KL(π_old‖π)
        "ratio/mean": torch.where(mask, (logps - old_logps).clamp(-20, 20).exp(), 0.0),
        "clip_frac": clipped, "value_clip_frac": value_clipped,
    }  # fmt: skip
    return token_metrics, mask, (logps - mb.get("sampler_logps", old_logps)).abs()


def minibatches(args, run, n, epoch):
    """Indices of the answers of each optimiser step, in pass `epoch` over a rollout of n."""
    order = np.random.default_rng([args.seed, run.step, epoch]).permutation(n)
    return [order[start : start + args.batch_size] for start in range(0, n, args.batch_size)]


def update(args, run, policy, critic, b):
    """Step (6): --ppo-epochs passes over the rollout `b`; the metrics are means over all passes."""
    n, means, steps = len(b["texts"]), rollouts.TokenMeans(*UPDATE_METRICS), []
    for epoch in range(args.ppo_epochs):
        for batch in minibatches(args, run, n, epoch):
            actions = int(b["mask"][batch].sum())  # of the whole optimiser step
            for part in run.micro_batches(batch, b["lengths"]):  # rows that fit into memory
                tokens, mask, gaps = backward(args, run, policy, critic, b, part, actions)
                # logged is the largest gap, of the first optimiser step: later ones hold training
                means.add(tokens, mask, gaps if not steps else 0 * gaps)
            steps.append(run.update(lambda rows=batch: f"{rows.tolist()} of step {run.step}"))
    return rollouts.steps_row(run, steps) | means.row()  # over steps; over actions, two maxima


def rollout_row(b, kl, kl_coef):
    """The metrics of a rollout: means over its actions, or over its answers. kl: k1, (B, T)."""
    mask, scores, tokens = b["mask"], b["scores"], int(b["attention_mask"].sum())
    k3 = kl_estimates(b["logps"], b["ref_logps"], mask)[2]
    kl_ref = kl.sum(1).mean().item()
    return {
        "reward/mean": scores.mean().item(), "reward/std": scores.std().item(),
        "reward/unscored_frac": b["unscored"],
        "kl/ref": kl_ref, "kl/token": masked_mean(kl, mask).item(),
        "kl/k3": masked_mean(k3, mask).item(), "kl/coef": kl_coef,
        "objective": scores.mean().item() - kl_coef * kl_ref,
        "explained_variance": explained_variance(b["returns"], b["values"], mask),
        "advantage/abs_mean": masked_mean(b["advantages"].abs(), mask).item(),
        **rollouts.length_row(mask.sum(1).tolist(), (~b["finished"]).tolist(), tokens),
        **text_metrics(b["prompts"], b["texts"]),
    }  # fmt: skip


def rollout_rows(step, b, kl):
    """Rows of rollouts.jsonl, one per answer."""
    columns = {"prompt": b["prompts"], "answer": b["texts"], "reward": b["scores"]}
    columns |= {"kl": kl.sum(1), "finished": b["finished"]}  # tensors; run.write stores numbers
    return [{"step": step, **dict(zip(columns, row))} for row in zip(*columns.values())]


def evaluate(args, run, models, gold, rows):
    """(metrics, greedy samples) of the validation prompts. The metrics are of one answer to each at
    the training temperature, which the KL needs, with the same random numbers each time."""
    if not rows:
        return {}, []
    b = rollout(args, run, models, rows, args.seed)
    kl = kl_estimates(b["logps"], b["ref_logps"], b["mask"])[0]
    metrics = {
        **rollouts.scored("val/score", b["scores"].tolist()),
        "val/kl": kl.sum(1).mean().item(),
        **rollouts.val_row(b["mask"].sum(1).tolist(), (~b["finished"]).tolist()),
    }
    if gold:
        scores = score_answers(gold, "--gold", b["rows"], b["prompts"], b["texts"])
        metrics |= rollouts.scored("val/gold", scores)
    return metrics, rollouts.greedy_samples(args, models.policy, models.tokenizer, b["prompt_ids"])


def main(argv=None):
    args = parse_args(argv)
    scripts = [spec.rpartition(":")[0] for spec in (args.reward_fn, args.gold) if spec]
    inputs = [args.model, args.prompts, args.reward_model, args.examples, *scripts]
    run = runs.Run("ppo", args, inputs, SHOW, HEADLINE)
    gold = prompting.load_scorer(args.gold, "--gold") if args.gold else None
    models = load_models(args, run)
    policy, critic, tokenizer = models.policy, models.critic, models.tokenizer
    train, val = load_data(args, tokenizer)
    run.planned = rollouts.planned_steps(args, math.ceil(len(train) / args.rollouts))
    updates = args.ppo_epochs * math.ceil(args.rollouts / args.batch_size)
    passes = f"{args.ppo_epochs} passes in batches of {args.batch_size} = {updates} updates"
    print(f"plan       {run.planned} steps of {args.rollouts} answers; per step {passes}")
    print(watch.promise(args, bool(val)))  # when the run will stop by itself
    args.restore = weights_to_write(args.restore, len(val), "prompts")
    run.state = {"policy": policy, "critic": critic, "kl_coef": args.beta}  # what checkpoints hold
    prompts = [row["prompt"] for row in train]  # run.start hashes their ids for --resume
    encoded, longest = rollouts.encoded_prompts(args, policy, tokenizer, prompts)  # ids; tokens
    lr = args.lr or runs.default_lr(policy, RATES)
    own_lr = {critic.score: HEAD_LR} if critic.fresh_head else {}
    run.start(policy, tokenizer, lr, own_lr, longest, encoded)  # optimiser; --resume: loads
    guard = Guard(run, watch.Watcher(args, run.rows()))  # adds state["best"] and state["ended"]
    kl_control = AdaptiveKL(run.state["kl_coef"], args.kl_target)  # of a checkpoint, if resumed
    if run.step == 0:  # not resumed
        preflight(args, run, models, train)
        guard.evaluation(*evaluate(args, run, models, gold, val))

    for step in run.steps():
        # (1) rollout: one answer to each prompt, log-probs kept
        # (2) score: the reward model, or a function, reads the whole answer
        # (3) reference log-probs of the same tokens, and the critic's values
        prompt_indices, epoch = rollouts.prompts_of_step(len(train), args.rollouts, args.seed, step)
        b = rollout(args, run, models, [train[i] for i in prompt_indices], args.seed * 10**6 + step)
        # (4) rewards: −β·k1 at every token; the score at the last one
        rewards, kl = shape_rewards(
            b["scores"], b["logps"], b["ref_logps"], b["mask"], kl_control.value,
            b["finished"], args.no_end_penalty,
        )  # fmt: skip
        # (5) advantages by GAE, whitened over the rollout
        advantages, b["returns"] = gae(rewards, b["values"], b["mask"], GAMMA, LAM)
        b["advantages"] = masked_whiten(advantages, b["mask"])
        # (6) update: several passes of clipped policy and value loss over minibatches
        update_metrics = update(args, run, policy, critic, b)
        row = {"epoch": epoch, **update_metrics, **rollout_row(b, kl, kl_control.value)}
        guard.log(row)
        if (step - 1) % ROLLOUTS_EVERY == 0:
            run.write("rollouts.jsonl", rollout_rows(step, b, kl))
        # (7) KL coefficient: fixed, or steered to a target
        kl_control.update(row["kl/ref"])
        run.state["kl_coef"] = kl_control.value
        # (8) now and then: score, gold and KL on validation prompts; the alarms of watch.py
        if run.evaluates(step):
            guard.evaluation(*evaluate(args, run, models, gold, val))
        guard.end_step()  # ends the loop if an alarm says so

    # ---- 9. save ----
    if not run.stopped:  # by Ctrl-C or --stop-after; status: 128 + signal; 3: reward hacking
        guard.save()  # the weights of the best validation, or the last
    return guard.finish(next_command(args)) or watch.exit_code(run.state["ended"])


def next_command(args):
    """How to compare base and result: by the gold or reward function, and by the reward model."""
    scorer, reward_model = args.gold or args.reward_fn, args.reward_model or "none"
    flags = ["--gold", scorer] * bool(scorer) + ["--reward-model", reward_model]
    flags += ["--prompts", args.prompts] * (args.prompts != "data/prompts.jsonl")
    return shell_line("evaluate.py", "--model", args.model, args.out, *flags)


if __name__ == "__main__":
    command(main)
