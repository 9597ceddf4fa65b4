"""ppo.py: prompts and a reward in, an aligned model out, by policy gradients on its own answers.

Objective    maximise E[(score − mean)/deviation] − β·KL(π‖π_ref)
Algorithm    (1) rollout: one answer to each prompt, log-probs kept
             (2) score: the reward model, or a function, reads the whole answer
             (3) reference log-probs of the same tokens, and the critic's values
             (4) rewards: −β·k1 at every token; the standardised score at the last one
             (5) advantages by GAE, whitened over the rollout
             (6) update: several passes of clipped policy and value loss over minibatches
             (7) KL coefficient: fixed, or steered to a target
             (8) now and then: score, gold and KL on validation prompts; the alarms of watch.py
Conventions  an action is an answer token, end token included; KL is k1 = log π − log π_ref of the
             sampled token, inside the reward; kl/ref is a sum over the answer's tokens, in nats;
             rollout and update see the full softmax(logits / temperature). Scores are standardised
             by the answers of the start (a reward model's by its own scale), so β, the clip of
             values and --end-penalty are in deviations, and a constant added to the reward or a
             factor changes nothing. Logged are the scores as they were given
Left out     1. rewards before the end of an answer, for preferences judge whole answers
             2. PPO-ptx (Ouyang et al. 2022): the KL holds the policy near its start already
             3. asynchronous rollouts, which would train on answers of an older policy
             4. an entropy bonus, which would push up every unlikely token
             5. early stopping by KL within an update: the clip and few passes do that
             Not the paper's: VALUE_COEF is 0.1 (the paper: 1), for scores are noisy and a shared
             trunk gets both gradients; the critic starts at the mean score, not at 0
Run          python ppo.py --reward-model runs/reward
             python ppo.py --prompts my.jsonl --reward-fn my.py:score --critic shared --lora-rank 16
             torchrun --nproc-per-node 8 ppo.py --fsdp --reward-model runs/reward
Writes       a model folder, args.json, metrics.jsonl, samples.jsonl, rollouts.jsonl, checkpoint/
To copy      the math needs torch, and from common.py `kl_estimates` and `same_shape`.
             examples/ppo_minimal.py is the same objective in 120 lines; this is the same, hardened
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
import shlex
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

import common
import watch
from common import Policy, hidden_states, kl_estimates, load_model, load_tokenizer, same_shape
from parts import parallel, rollouts, runs
from parts.answers import score_answers, scored, visible
from parts.files import UserError, command, existing_file, load_function, number, read_record
from parts.lora import adapter_off
from parts.pairs import add_split_arguments
from parts.reward_models import load_scorer, reward_function
from parts.rollouts import ROWS
from parts.sampling import Rollout, sample
from parts.texts import text_metrics

# --lr below 100 M parameters (3e-4: twice the KL, less reward); above (run once); LoRA: a guess
RATES = 1e-4, 5e-6, 1e-4
HEAD_LR = 1e-3  # of a fresh value head, which would hardly move at the trunk's rate
GAMMA, LAM = 1.0, 0.95  # no discount within an answer; λ 1 trusts the critic less
CLIP_LOW, VALUE_CLIP = 0.2, 0.2  # lower end of the ratio's clip; how far a value may move per step
VALUE_COEF = 0.1  # weight of the value loss, which shares the gradient with --critic shared
KL_GAIN = 0.1  # of --kl-target: a rollout moves β by at most 0.1 · 0.2 = 2 %, as in the paper
ROLLOUTS_EVERY = 5  # steps between the rollouts kept in rollouts.jsonl
MOST_MEASURED = 64  # answers of the start that scores are standardised by
SHOW = ("reward/mean", "kl/ref", "entropy", "clip_frac", "length/mean")  # on the progress bar
HEADLINE = ("val/score", "val/gold", "val/kl", "reward/mean")  # printed at each evaluation

# ---- the math ----


def masked_mean(x, mask):
    """Mean of x where mask is True; 0 for an empty mask."""
    same_shape(x=x, mask=mask)
    return torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)


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
    same_shape(logps=logps, ref_logps=ref_logps, mask=mask)
    same_shape(scores=scores, rows=mask[:, 0], finished=finished)
    kl = kl_estimates(logps, ref_logps, mask)[0]  # (B, T): k1 of (k1, k2, k3)
    end_rewards = torch.zeros_like(kl)  # (B, T)
    last = mask.long().cumsum(1).argmax(1, keepdim=True)  # (B, 1) where the count is first complete
    at_end = scores  # (B,)
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
    same_shape(rewards=rewards, values=values, mask=mask)
    rewards = torch.where(mask, rewards, 0.0)
    values = torch.where(mask, values, 0.0)
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
    same_shape(x=x, mask=mask)
    x = torch.where(mask, x, 0.0)
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
    same_shape(logps=logps, old_logps=old_logps, advantages=advantages, mask=mask)
    log_ratio = torch.where(mask, logps - old_logps, 0.0)
    ratio = log_ratio.clamp(-20, 20).exp()  # exp(89) is inf in fp32
    advantages = torch.where(mask, advantages, 0.0)
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
    same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
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


# ---- the arguments ----


def parse_args(argv=None):
    example = "ppo.py (--reward-model FOLDER | --reward-fn FILE:FUNCTION) [--prompts FILE] [flags]"
    parser = runs.parser(example, "PPO: policy gradients against a reward.", "runs/ppo", RATES)
    add = parser.add_argument
    # fmt: off
    add("--prompts", type=existing_file, default="data/prompts.jsonl", help='JSONL of prompts; if rows have a "split", train and val')
    add_split_arguments(parser)  # --eval-fraction, --chat
    add("--reward-model", help="folder of a reward model, as reward_train.py writes it")
    add("--reward-fn", help="FILE:FUNCTION instead: (prompts, answers, rows) → a list of numbers, None where there is no score")
    add("--gold", help="FILE:FUNCTION that scores validation answers alone, such as data/recruiter.py:reward; weights are chosen by it")
    add("--critic", choices=("separate", "shared"), default="separate", help="a model of its own (a copy of the reward model, else of the policy), or a head on the policy: half the memory")
    add("--rollouts", type=number(int, at_least=2), default=64, help="answers per step, 32 to 512")
    add("--ppo-epochs", type=number(int, at_least=1), default=2, help="passes over a rollout, 1 to 4")
    add("--beta", type=number(at_least=0), default=0.05, help="KL coefficient, in deviations of the score per nat, 0.01 to 0.2; 0 loads no reference")
    add("--kl-target", type=number(above=0), help="steer --beta to this KL per answer, in nats, 3 to 10 (default: --beta is fixed)")
    add("--clip-high", type=number(above=0), default=0.2, help="the ratio is kept below 1 + this; 0.28 is DAPO's clip-higher")
    add("--end-penalty", type=number(at_least=0), default=1.0, help="subtracted from the reward of an answer that is cut before its end, in deviations of the score")
    # fmt: on
    rollouts.add_rollout_arguments(parser)  # --temperature, --max-new-tokens, --restore
    watch.add_watch_arguments(parser)  # when to stop: --patience, --target, --on-hack …
    parser.set_defaults(eval_every=5, save_every=20)  # a step is a whole rollout
    args = parser.parse_args(argv)
    if (args.reward_model is None) == (args.reward_fn is None):
        raise UserError("give one reward: --reward-model (of reward_train.py) or --reward-fn")
    if args.kl_target and not args.beta:
        raise UserError("--kl-target: it multiplies --beta, which is 0; start from 0.05")
    return args


# ---- the models ----


def read_values(head, hidden, mask):
    """(B, T) fp32 values, 0 outside mask; hidden (B, T, H): column t − 1 is the state before t."""
    hidden = hidden[:, :-1][mask[:, 1:]].float()  # (N, H)
    with torch.autocast(hidden.device.type, enabled=False):
        values = F.linear(hidden, head.weight.float(), head.bias.float()).squeeze(-1)  # (N,)
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values)


def zero_head(model):
    head = nn.Linear(model.config.get_text_config().hidden_size, 1, device=model.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class Critic(nn.Module):
    """A trunk of its own with a value head. trunk: of transformers, without a head."""

    def __init__(self, trunk, dtype):
        super().__init__()
        self.model, self.head, self.dtype = trunk, zero_head(trunk), dtype

    def forward(self, ids, attention_mask, mask):
        """(B, T) values, 0 outside mask."""
        hidden = hidden_states(self.model, ids, attention_mask, self.dtype)
        return read_values(self.head, hidden, mask)


class PolicyWithValues(Policy):
    """A policy with a value head on its trunk: --critic shared."""

    def __init__(self, model, dtype):
        super().__init__(model, dtype)
        self.head = zero_head(model)

    def forward(self, ids, attention_mask, mask, temperature=1.0, with_values=False):
        """(log-probs, entropies), as of `Policy`; with_values: (…, …, values), in one pass."""
        if not with_values:
            return super().forward(ids, attention_mask, mask, temperature)
        hidden = hidden_states(self.model, ids, attention_mask, self.dtype)  # (B, T, H)
        values = read_values(self.head, hidden, mask)
        hidden, tokens = hidden[:, :-1][mask[:, 1:]], ids[mask]  # (N, H), (N,)
        size = common.CHUNK.get(ids.device.type, common.CHUNK["cuda"])
        size = max(64, size // self.model.config.get_text_config().vocab_size)
        parts = [
            recompute(common.score_chunk, self.model, h, t, temperature, use_reentrant=False)
            for h, t in zip(hidden.split(size), tokens.split(size))
        ]
        zeros = torch.zeros(ids.shape, device=ids.device)
        columns = (zeros.masked_scatter(mask, torch.cat(x)) for x in zip(*parts))
        return *columns, values


@dataclass
class Models:
    """What takes part in a rollout."""

    policy: Policy  # trained
    critic: nn.Module  # trained: a `Critic`, or the policy itself
    reference: Policy | None  # the policy's start, frozen; with LoRA the policy; without β None
    reward: object  # (prompts, answers, rows) → scores
    fresh_head: bool  # does the value head start at zero?
    tokenizer: object
    room: int  # the most tokens of a prompt

    def encode(self, row):
        return common.encode_prompt(self.tokenizer, row["prompt"], self.room, row.get("tools"))


def load_models(args, run, tokenizer, room, function):
    """The `Models`. function: of --reward-fn, or None."""
    place, start = (run.device, run.dtype), {"lora_rank": args.lora_rank, "seed": args.seed}
    model = load_model(args.model, *place, trainable=True, **start)
    policy = (PolicyWithValues if args.critic == "shared" else Policy)(model, run.dtype)
    reference = policy if args.beta else None
    if args.beta and not args.lora_rank:
        reference = Policy(load_model(args.model, *place), run.dtype)
        if args.fsdp:
            parallel.shard(reference)
    if args.reward_model:
        scale = (read_record(args.reward_model) or {}).get("scale")
        function = reward_function(args.reward_model, *place, args.micro_tokens, raw=not scale)
        run.state["scale"] = [0.0, 1.0] if scale else None
        check_reading(args, function, room)
    critic, fresh = policy, True
    if args.critic == "separate":
        source, flag = args.model, "--model"
        if args.reward_model and function.tokenizer.get_vocab() == tokenizer.get_vocab():
            source, flag = args.reward_model, "--reward-model"
        scorer, fresh = load_scorer(source, tokenizer, *place, trainable=True, **start, flag=flag)
        critic = Critic(scorer.model.base_model, run.dtype)
        if not fresh:  # in the unit of the scores
            critic.head.weight.data.copy_(scorer.model.score.weight / function.std)
        print(f"critic     starts as a copy of {source}")
    return Models(policy, critic, reference, function, fresh, tokenizer, room)


def check_reading(args, reward, room):
    """UserError if the reward model could be asked about an answer whose end it does not read. Of a
    longer row it reads the end of the prompt, at most half, and then the answer."""
    most = reward.max_length
    if most and room + args.max_new_tokens > most and args.max_new_tokens >= most - most // 2:
        reads = f"--reward-model {args.reward_model} reads {most} tokens of prompt and answer"
        fix = f"lower it below {most - most // 2}, or --max-length to {most}"
        raise UserError(f"--max-new-tokens {args.max_new_tokens}: {reads}; {fix}")


# ---- the rollout ----


@torch.no_grad()
def rollout(args, run, models, rows, seed):
    """Steps (1) to (3) for the prompts in `rows`, less the answers that cannot be scored: a dict of

    ids, attention_mask, mask   (B, T) prompt and answer; mask: the actions
    logps, ref_logps, values    (B, T) 0 outside mask; logps: log π_old; no reference: the same
    sampler_logps               (B, T) only in half precision, see `rollouts.rescore`
    scores, finished            (B,) numpy, as given; bool: ended by an end token, not cut
    prompts, texts              lists of B; texts: the answers. Every rank has all B
    unscored                    share of the answers that are left out
    """
    # (1) rollout: one answer to each prompt, log-probs kept
    policy, tokenizer, prompts = models.policy, models.tokenizer, [row["prompt"] for row in rows]
    ids, n = [models.encode(row) for row in rows], args.max_new_tokens
    answers = sample(policy, tokenizer, ids, 1, n, args.temperature, seed)
    # (2) score: the reward model, or a function, reads the whole answer
    scores = score_answers(models.reward, reward_flag(args), rows, prompts, answers.texts)
    kept = [i for i, score in enumerate(scores) if score is not None]
    if 2 * len(kept) < len(rows):
        missing = f"{len(rows) - len(kept)} of {len(rows)} answers got no score (None)"
        raise UserError(f"{reward_flag(args)}: {missing}; more than half stops the run")
    if args.reward_model:
        shown = [visible(text) for text in answers.texts]
        if cut := models.reward.count_cut(prompts, shown, answers_only=True):
            reads = f"reads {models.reward.max_length} tokens, so the end of {cut} answers is not"
            raise UserError(f"--reward-model: {reads} read; lower --max-new-tokens")
    answers = Rollout(**{name: [x[i] for i in kept] for name, x in vars(answers).items()})
    b = rollouts.rollout_tensors(answers, common.pad_id(tokenizer), run.device)
    rollouts.rescore(run, policy, b, args.temperature)
    # (3) reference log-probs of the same tokens, and the critic's values
    lengths, b["values"] = row_lengths(b), torch.zeros_like(b["logps"])
    for part in run.micro_batches(range(len(kept)), lengths):
        values = values_of(models, rollouts.cut(b, part), args.temperature)
        b["values"][part, : values.shape[1]] = values
    parallel.add_up([b["values"]])
    return b | {
        "ref_logps": reference_logps(args, run, models.reference, b),
        "scores": np.array([scores[i] for i in kept], float),
        "finished": torch.tensor(answers.finished, device=run.device),
        "prompts": [prompts[i] for i in kept], "texts": answers.texts,
        "unscored": 1 - len(kept) / len(rows),
    }  # fmt: skip


def reward_flag(args):
    return "--reward-fn" if args.reward_fn else "--reward-model"


def row_lengths(b):
    """Tokens of prompt and answer of each row."""
    return b["attention_mask"].sum(1).tolist()


def reference_logps(args, run, reference, b):
    if reference is None:
        return b["logps"]
    with adapter_off(reference):
        return rollouts.teacher_forced(run, reference, b, args.temperature)


def values_of(models, mb, temperature):
    """(n, T) values of the actions of rows `mb`."""
    inputs = [mb[key] for key in ROWS]
    if models.critic is models.policy:
        return models.policy(*inputs, temperature, with_values=True)[2]
    return models.critic(*inputs)


def forward(models, mb, temperature):
    """(log-probs, entropies, values), each (n, T), of rows `mb`; a shared trunk passes once."""
    inputs = [mb[key] for key in ROWS]
    if models.critic is models.policy:
        return models.policy(*inputs, temperature, with_values=True)
    return *models.policy(*inputs, temperature), models.critic(*inputs)


# ---- before step one ----


def preflight(args, run, models, rows):
    """Check the log-probs of a rollout, standardise scores by it, start the critic at their mean;
    returns the seconds that a step will take.

    So training depends neither on a constant that is added to the reward, nor on its unit: a critic
    that starts at 0 would take a reward of 5 for good news, the better the fewer tokens remain.
    """
    start = time.perf_counter()
    b = rollout(args, run, models, rows, args.seed)
    drawn = time.perf_counter()
    rollouts.preflight(run, models.policy, models.reference, models.tokenizer, b)
    forwards = (time.perf_counter() - drawn) / (2 if models.reference else 1)
    scores, n = b["scores"], len(b["scores"])
    if not run.state.get("scale"):
        deviation = scores.std(ddof=1).item() if n > 1 else 0.0
        if deviation <= 1e-6 * abs(scores).max():
            print(f"reward     all {n} answers of the start score {scores[0]:g}: nothing to learn")
            deviation = 1.0
        run.state["scale"] = [scores.mean().item(), deviation]
    mean, deviation = run.state["scale"]
    returns = standardised(run, b) - args.end_penalty * ~b["finished"]  # (B,), KL is 0 yet
    values, target = b["values"][b["mask"]].mean().item() / deviation, returns.mean().item()
    with torch.no_grad():
        models.critic.head.weight.div_(deviation)
        models.critic.head.bias.add_(target - values)
    print(f"reward     {scores.mean():.4g} ± {scores.std():.4g} over {n} answers of the start; "
          f"trained on is (score − {mean:.4g}) / {deviation:.4g}; the critic starts at {target:.2f}")  # fmt: skip
    if args.reward_model:
        cut = models.reward.count_cut(b["prompts"], [visible(text) for text in b["texts"]])
        print(f"reward     the reward model reads {cut} of {n} prompts only in part")
    trained = 1 if models.critic is models.policy else 2  # a backward takes two forwards' time
    seconds = drawn - start + 3 * args.ppo_epochs * trained * forwards
    return seconds * args.rollouts / len(rows)


def standardised(run, b):
    """(B,) fp32 (score − mean) / deviation, by run.state["scale"]."""
    mean, deviation = run.state["scale"]
    return torch.tensor((b["scores"] - mean) / deviation, dtype=torch.float32, device=run.device)


# ---- what is logged ----


def rollout_row(args, b, kl, kl_coef):
    """The metrics of a rollout: means over its actions, or over its answers. kl: k1, (B, T)."""
    mask, tokens = b["mask"], int(b["attention_mask"].sum())
    k3 = kl_estimates(b["logps"], b["ref_logps"], mask)[1]
    kls = {
        "kl/ref": kl.sum(1).mean().item(), "kl/token": masked_mean(kl, mask).item(),
        "kl/k3": masked_mean(k3, mask).item(), "kl/coef": kl_coef,
    }  # fmt: skip
    return {
        "reward/mean": b["scores"].mean(), "reward/std": b["scores"].std(),
        "reward/unscored_frac": b["unscored"], **(kls if args.beta else {}),
        "explained_variance": explained_variance(b["returns"], b["values"], mask),
        **rollouts.length_row(mask.sum(1).tolist(), (~b["finished"]).tolist(), tokens),
        **text_metrics(b["prompts"], b["texts"]),
    }  # fmt: skip


def rollout_rows(step, b, kl):
    """Rows of rollouts.jsonl, one per answer."""
    columns = {"prompt": b["prompts"], "answer": b["texts"], "reward": b["scores"]}
    columns |= {"kl": kl.sum(1), "finished": b["finished"]}
    return [{"step": step, **dict(zip(columns, row))} for row in zip(*columns.values())]


@torch.no_grad()
def evaluate(args, run, models, gold, rows):
    """(metrics, greedy samples) of the validation prompts. The metrics are of one answer to each at
    the training temperature, which the KL needs, with the same random numbers each time."""
    if not rows:
        return {}, []
    policy, tokenizer, n = models.policy, models.tokenizer, args.max_new_tokens
    ids = [models.encode(row) for row in rows]
    answers = sample(policy, tokenizer, ids, 1, n, args.temperature, args.seed)
    cut, lengths = [not x for x in answers.finished], [len(x) for x in answers.answer_ids]
    metrics = scored("val/score", models.reward, reward_flag(args), rows, answers.texts)
    if gold:
        metrics |= scored("val/gold", gold, "--gold", rows, answers.texts)
    if models.reference:
        b = rollouts.rollout_tensors(answers, common.pad_id(tokenizer), run.device)
        rollouts.rescore(run, policy, b, args.temperature)
        ref_logps = reference_logps(args, run, models.reference, b)
        metrics["val/kl"] = (b["logps"] - ref_logps).sum(1).mean().item()
    samples = rollouts.greedy_samples(policy, tokenizer, ids, n)
    return metrics | rollouts.val_row(lengths, cut), samples


# ---- the run ----


def main(argv=None):
    args = parse_args(argv)
    run = runs.Run("ppo", args, SHOW, HEADLINE)
    # what the user gave is read before a model is loaded
    tokenizer, config = load_tokenizer(args.model), common.load_config(args.model)
    function = load_function(args.reward_fn, "--reward-fn") if args.reward_fn else None
    gold = load_function(args.gold, "--gold") if args.gold else None
    if args.reward_model:
        common.load_config(args.reward_model, "--reward-model", scores=True)
    longest = min(args.max_length, common.max_positions(config))
    if args.max_new_tokens >= longest:
        raise UserError(f"--max-new-tokens: leaves no room for a prompt in {longest} tokens")
    train, val = rollouts.split_prompts(args, tokenizer)
    print(watch.promise(args, bool(val)))

    models = load_models(args, run, tokenizer, longest - args.max_new_tokens, function)
    policy, critic = models.policy, models.critic
    modules = {"policy": policy} if critic is policy else {"policy": policy, "critic": critic}
    own_lr = {critic.head: HEAD_LR} if models.fresh_head else {}
    per_epoch, encoded = (
        math.ceil(len(train) / args.rollouts),
        [models.encode(row) for row in train],
    )
    cut = sum(len(ids) == models.room for ids in encoded)
    print(f"data       {cut} training prompts fill or exceed {models.room} tokens" * (cut > 0))
    optimizer = run.start(modules, tokenizer, RATES, per_epoch, encoded, own_lr)
    guard, seconds = rollouts.Guard(run, watch.Watcher(args, run.rows()), len(val)), None
    if run.step == 0:  # not resumed
        places, _ = rollouts.prompts_of_step(
            len(train), min(args.rollouts, MOST_MEASURED), args.seed, 1
        )
        seconds = preflight(args, run, models, [train[i] for i in places])
        run.state["kl_coef"] = args.beta
        guard.evaluation(*evaluate(args, run, models, gold, val))
    kl_control = AdaptiveKL(run.state["kl_coef"], args.kl_target)

    for step in run.steps(seconds):
        # (1) rollout: one answer to each prompt, log-probs kept
        # (2) score: the reward model, or a function, reads the whole answer
        # (3) reference log-probs of the same tokens, and the critic's values
        places, epoch = rollouts.prompts_of_step(len(train), args.rollouts, args.seed, step)
        b = rollout(args, run, models, [train[i] for i in places], args.seed * 10**6 + step)
        # (4) rewards: −β·k1 at every token; the standardised score at the last one
        rewards, kl = shape_rewards(
            standardised(run, b), b["logps"], b["ref_logps"], b["mask"], kl_control.value,
            b["finished"], args.end_penalty,
        )  # fmt: skip
        # (5) advantages by GAE, whitened over the rollout
        advantages, b["returns"] = gae(rewards, b["values"], b["mask"], GAMMA, LAM)
        b["advantages"] = masked_whiten(advantages, b["mask"])
        # (6) update: several passes of clipped policy and value loss over minibatches
        means, losses, norms, skipped = rollouts.TokenMeans(), [], [], 0
        n, lengths = len(b["texts"]), row_lengths(b)
        for ppo_epoch in range(args.ppo_epochs):
            order = np.random.default_rng([args.seed, step, ppo_epoch]).permutation(n)
            for start in range(0, n, args.batch_size):
                batch, total = order[start : start + args.batch_size], 0.0
                actions = int(b["mask"][batch].sum())  # of the whole optimiser step
                optimizer.zero_grad()
                for part in run.micro_batches(batch, lengths):  # rows that fit into memory
                    mb = rollouts.cut(b, part)
                    mask, old_logps = mb["mask"], mb["logps"]
                    logps, entropies, values = forward(models, mb, args.temperature)
                    policy_losses, clipped = ppo_policy_loss(
                        logps, old_logps, mb["advantages"], mask, CLIP_LOW, args.clip_high
                    )
                    value_losses, value_clipped = ppo_value_loss(
                        values, mb["values"], mb["returns"], mask, VALUE_CLIP
                    )
                    # sums over this part, divided by the actions of the whole optimiser step
                    policy_loss, value_loss = (
                        policy_losses.sum() / actions,
                        value_losses.sum() / actions,
                    )
                    loss = policy_loss + VALUE_COEF * value_loss
                    run.scaler.scale(loss).backward()
                    total += loss.item()
                    d = (logps - old_logps).detach()
                    gaps = (logps.detach() - mb.get("sampler_logps", old_logps)).abs() * (
                        not losses
                    )
                    means.add(
                        mask, gaps, policy_loss=policy_losses, value_loss=value_losses,
                        entropy=entropies, ratio=torch.where(mask, d.clamp(-20, 20).exp(), 0.0),
                        approx_kl=kl_estimates(old_logps, logps.detach(), mask)[1],
                        clip_frac=clipped, value_clip_frac=value_clipped,
                    )  # fmt: skip
                norms.append(run.clip())  # gradients summed over the ranks, clipped to norm 1
                losses.append(run.check(total, norms[-1], f"{batch.tolist()} of step {step}"))
                skipped += run.skips > 0  # in fp16, a gradient that is not finite
                lr = run.set_lr(step)
                run.scaler.step(optimizer)
                run.scaler.update()
        guard.log({
            "epoch": epoch, "loss": np.mean(losses), "lr": lr, "grad_norm": np.mean(norms),
            "updates": len(losses), "skipped_steps": skipped, **means.row(),
            **rollout_row(args, b, kl, kl_control.value),
        })  # fmt: skip
        if (step - 1) % ROLLOUTS_EVERY == 0:
            run.write("rollouts.jsonl", rollout_rows(step, b, kl))
        # (7) KL coefficient: fixed, or steered to a target
        kl_control.update(kl.sum(1).mean().item())
        run.state["kl_coef"] = kl_control.value
        # (8) now and then: score, gold and KL on validation prompts; the alarms of watch.py
        if run.evaluates(step):
            guard.evaluation(*evaluate(args, run, models, gold, val))
        guard.end_step()  # ends the loop if an alarm says so

    words = ["python", "evaluate.py", "compare", "--model", args.model, args.out]
    words += ["--prompts", args.prompts, "--gold", args.gold or args.reward_fn]
    words = words[: None if words[-1] else -2]
    words += ["--reward-model", args.reward_model] if args.reward_model else []
    return guard.finish(shlex.join(words)) or watch.exit_code(run.state.get("ended"))


if __name__ == "__main__":
    command(main, runs.OUT_OF_MEMORY)
