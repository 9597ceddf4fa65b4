"""ppo.py: prompts and a reward in, an aligned model out, by policy gradients on its own answers.

Objective    maximise E[(score − mean)/deviation] − β·KL(π‖π_ref) − penalty·P(cut)
Algorithm    (1) rollout: one answer to each prompt, its log-probs under policy and reference
             (2) score: the reward model, or a function, reads the answer behind </think>
             (3) values: what the critic expects before each token
             (4) rewards: −β·k1 at every token; the standardised score at the last one, less
                 --end-penalty if the answer was cut
             (5) advantages by GAE, whitened over the rollout
             (6) update: several passes of clipped policy and value loss over minibatches
             (7) KL coefficient: fixed, or steered to a target
             (8) every --eval-every steps: score, gold and KL on validation prompts; the alarms of
                 watch.py. The weights that validate best (val/gold, else val/score) are saved
Conventions  an action is an answer token, end token included; KL is k1 = log π − log π_ref of the
             sampled token, inside the reward; kl/ref is a sum over the answer's tokens, in nats;
             rollout and update see the full softmax(logits / temperature); losses are means over the
             actions of an optimiser step. Scores are standardised by the answers of the start (a
             reward model's arrive standardised by its training pairs), so β, the clip of values and
             --end-penalty are in deviations; a constant or a factor of the reward changes nothing
Left out     1. rewards before the end of an answer, because preferences judge whole answers
             2. PPO-ptx (Ouyang et al. 2022): the KL holds the policy near its start already
             3. asynchronous rollouts, which would train on answers of an older policy
             4. an entropy bonus, which would push up every unlikely token
             5. early stopping by KL within an update: the clip and few passes do that
Not as       VALUE_COEF is 0.1 of ½(V − R)², (the paper: 1 of (V − R)²): with --critic shared the
the paper    trunk gets both gradients, and scores are noisy; a separate critic is
             clipped alone, and Adam divides its gradient by its size, which undoes the factor.
             The critic starts at the mean return of the start, not at 0
Run          python ppo.py --reward-model runs/reward
             python ppo.py --prompts my.jsonl --reward-fn my.py:score --critic shared --lora-rank 16
             torchrun --nproc-per-node 8 ppo.py --fsdp --reward-model runs/reward
Writes       a model folder, args.json, metrics.jsonl, samples.jsonl, rollouts.jsonl, checkpoint/
Read with    parts/rollouts.py (a rollout is a dict `b` of (B, T) tensors: `rescore`, `teacher_forced`)
             and parts/reward_models.py (`Critic`, `RewardFunction`)
To copy      the math needs torch, KL_GAIN, `kl_estimates` of parts/sampling.py and `same_shape` of
             common.py. examples/ppo_minimal.py is PPO in 120 lines: a shared critic that
             starts at 0, no minibatches, no end penalty
Reference    Schulman et al. 2017, arXiv 1707.06347 (clip, eq. 7); GAE: 1506.02438, eq. 16; KL in
             the reward: Ziegler et al. 2019, 1909.08593, eq. 2; value clip, whitening: 2403.17031
Axes         B answers of a rollout, n of one forward, T tokens (right padded)
    position      0      1      2      3      4       5
    token         p0     p1     p2     a0     a1      end
    action                             ✓      ✓       ✓            mask (B, T)
    log-prob                           of a0  of a1   of end      computed from column t − 1
    value                              V(p)   V(p,a0) V(p,a0,a1)  before token t: from t − 1, too
    reward                             −β·k1  −β·k1   −β·k1 + score
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from common import Policy, batch_indices, load_config, load_tokenizer, same_shape
from parts import engine, rollouts
from parts.answers import load_policy, prompt_ids, prompt_room, score_answers, scored
from parts.files import (
    OUT_OF_MEMORY,
    UserError,
    command,
    existing_file,
    load_function,
    number,
    trainer_parser,
)
from parts.pairs import add_split_arguments
from parts.reward_models import PolicyWithValues, RewardFunction, load_critic, start_at
from parts.sampling import kl_estimates, rollout_tensors

# --lr below 100 M parameters (3e-4: twice the KL, less reward), above (tried once), LoRA (not tried)
RATES = 1e-4, 5e-6, 1e-4
HEAD_LR = 1e-3  # of a fresh value head, which would hardly move at the trunk's rate
GAMMA, LAM = 1.0, 0.95  # no discount within an answer; λ 1 trusts the critic less
CLIP_LOW = 0.2  # the ratio is kept above 1 − this
VALUE_CLIP = 0.2  # how far a value may move per rollout, in deviations of the score
VALUE_COEF = 0.1  # weight of the value loss; it matters with --critic shared
KL_GAIN = 0.1  # of --kl-target: a rollout moves β by at most 0.1 · 0.2 = 2 %, as in the paper
ROLLOUTS_EVERY = 5  # steps between the rollouts kept in rollouts.jsonl
HEADLINE = "val/score", "val/gold", "val/kl", "reward/mean"  # printed at each evaluation

# ---- the math ----


def shape_rewards(scores, logps, ref_logps, mask, kl_coef, finished=None, end_penalty=1.0):
    """r_t = −β·(log π − log π_ref)_t; at the last action + score − penalty·[not finished]

    [Ziegler eq. 2]

    scores            (B,) reward of the whole answer
    logps, ref_logps  (B, T) log π and log π_ref of the sampled tokens
    mask              (B, T) True at actions
    finished          (B,) bool: ended by an end token, not cut; None: all did
    returns           (rewards, kl), both (B, T), 0 outside the mask; kl is k1: of the estimates
                      only k1, as a part of the reward, has the gradient of the KL

    >>> logps, ref = torch.tensor([[9., -1, -2, -.5]]), torch.tensor([[9., -1.5, -1, -.5]])
    >>> mask = torch.tensor([[False, True, True, True]])
    >>> shape_rewards(torch.tensor([2.]), logps, ref, mask, 0.1)[0]
    tensor([[ 0.0000, -0.0500,  0.1000,  2.0000]])
    """
    same_shape(logps=logps, ref_logps=ref_logps, mask=mask)
    same_shape(scores=scores, rows=mask[:, 0], finished=finished)
    kl = kl_estimates(logps, ref_logps, mask)[0]  # (B, T): k1 of (k1, k3)
    if finished is not None:
        scores = scores - end_penalty * ~finished  # (B,)
    is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))  # (B, T)
    return torch.where(is_last, scores[:, None], 0.0) - kl_coef * kl, kl


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
    if not returns.var() > 0:
        return math.nan
    return 1 - ((returns - values).var() / returns.var()).item()


def adapted_kl_coef(kl_coef, kl, target):
    """β·(1 + gain·clip(kl/target − 1, ±0.2)), once a rollout; without a target β stays.

    [Ziegler section 2.2]

    kl: mean over the rollout's answers of the sum over tokens.
    >>> round(adapted_kl_coef(0.2, kl=9, target=6), 6)
    0.204
    """
    error = min(max(kl / target - 1, -0.2), 0.2) if target else 0.0
    return kl_coef * (1 + KL_GAIN * error)


# ---- the arguments ----


def parse_args(argv=None):
    parser = trainer_parser(
        "ppo.py (--reward-model FOLDER | --reward-fn FILE:FUNCTION) [--prompts FILE] [flags]",
        "PPO: policy gradients against a reward.", "runs/ppo", RATES,
    )  # fmt: skip
    add, reward = parser.add_argument, parser.add_mutually_exclusive_group(required=True)
    # fmt: off
    add("--prompts", type=existing_file, default="data/prompts.jsonl", help='JSONL of prompts; if rows have a "split", train and val')
    add_split_arguments(parser)  # --eval-fraction, --chat
    reward.add_argument("--reward-model", help="folder of a reward model, as reward_train.py writes it")
    reward.add_argument("--reward-fn", help="FILE:FUNCTION instead: (prompts, answers, rows) → numbers, None where there is no score")
    add("--gold", help="FILE:FUNCTION, such as data/recruiter.py:reward; scores validation answers only, to choose weights and stop")
    add("--critic", choices=("separate", "shared"), default="separate", help="copy of the reward model or policy, or a head on the policy")
    add("--rollouts", type=number(int, at_least=2), default=64, help="answers per step, 32 to 512")
    add("--ppo-epochs", type=number(int, at_least=1), default=2, help="passes over a rollout, 1 to 4")
    add("--beta", type=number(at_least=0), default=0.05, help="KL coefficient: deviations of score per nat, 0.01 to 0.2; 0: no reference")
    add("--kl-target", type=number(above=0), help="steer --beta to this KL per answer, in nats, 3 to 10 (default: --beta is fixed)")
    add("--clip-high", type=number(above=0), default=0.2, help="the ratio is kept below 1 + this; 0.28 is DAPO's clip-higher")
    add("--end-penalty", type=number(at_least=0), default=1.0, help="subtracted from the score of a cut answer, in its deviations")
    # fmt: on
    rollouts.add_rollout_arguments(parser)  # --temperature, --max-new-tokens, --patience …
    args = parser.parse_args(argv)
    if args.kl_target and not args.beta:
        raise UserError("--kl-target: it multiplies --beta, which is 0; start from 0.05")
    return args


# ---- the models ----


@dataclass
class Models:
    """What takes part in a rollout."""

    policy: Policy  # trained
    critic: nn.Module  # trained: a `Critic`, or the policy itself
    # the policy's start, frozen; with LoRA the policy, its adapter off; without β None
    reference: Policy | None
    reward: object  # (prompts, answers, rows) → scores
    tokenizer: object
    room: int  # the most tokens of a prompt
    sample: object  # draws answers: our sampler, or servers

    def encode(self, row):
        return prompt_ids(self.tokenizer, row, self.room)

    def draw(self, run, rows, seed):
        """The tensors of `rollout` but for values and scores, of one answer to each of the rows."""
        ids, limits = map(self.encode, rows), (run.args.max_new_tokens, run.args.temperature)
        drawn = self.sample(self.policy, self.tokenizer, [*ids], 1, *limits, seed)
        b = rollout_tensors(drawn, run.device)
        rollouts.rescore(run, self.policy, b)  # in half precision, and of servers, logps anew
        return b | {"ref_logps": rollouts.reference_logps(run, self.reference, b)}


# ---- the rollout ----


def rollout(args, run, models, rows, seed):
    """Steps (1) to (3) for the prompts in `rows`, without the answers that cannot be scored:

    ids, attention_mask, mask, logps, ref_logps   (B, T); without β ref_logps are logps
    finished           (B,) ended by an end token, not cut
    values             (B, T) of the critic, 0 outside mask
    scores             (B,) float64 as given, on the CPU
    prompts, texts     lists of B; texts: the answers. Every rank has all B
    """
    # (1) rollout: one answer to each prompt. log π_old is the sampler's; in half precision, and of
    # servers, a forward computes it again
    b = models.draw(run, rows, seed)
    # (2) score: the reward model, or a function, reads the answer behind </think>
    flag, texts = reward_flag(args), b.pop("texts")
    scores = score_answers(models.reward, flag, rows, texts)
    kept = [i for i, score in enumerate(scores) if score is not None]
    if 2 * len(kept) < len(rows):
        missing = len(rows) - len(kept)
        raise UserError(f"{flag}: {missing} of {len(rows)} answers got no score, more than half")
    b = {key: x[kept] for key, x in b.items()}
    # (3) values: what the critic expects before each token
    return b | {
        "values": rollouts.teacher_forced(run, models.critic, b, output=-1),  # its last output
        "scores": torch.tensor([scores[i] for i in kept], dtype=torch.float64),
        "prompts": [rows[i]["prompt"] for i in kept], "texts": [texts[i] for i in kept],
    }  # fmt: skip


def reward_flag(args):
    return "--reward-fn" if args.reward_fn else "--reward-model"


# ---- before step one ----


def preflight(args, run, models, rows):
    """Check the log-probs of a rollout, standardise scores by it, start the critic at their mean.

    So training depends neither on a constant that is added to the reward, nor on its unit: to a
    critic that says 0 a reward that is always 5 would look like an advantage of every action, and,
    by λ, more of the last ones.
    """
    b = rollout(args, run, models, rows, args.seed)
    rollouts.preflight(run, models.policy, models.reference, models.tokenizer, b)
    scores, mean, deviation = b["scores"], 0.0, 1.0
    # a function, and another tool's model, have no scale
    if args.reward_fn or (models.reward.mean, models.reward.std) == (0, 1):
        mean = scores.mean().item()
        if scores.min() < scores.max():  # where all are equal, their unit is kept
            deviation = scores.std().item()
    run.state["scale"] = [mean, deviation]
    # the mean return of the start, where the KL is 0
    cut = (~b["finished"]).float().mean().item()
    expected = (scores.mean().item() - mean) / deviation - args.end_penalty * cut
    # a copied head says scores: ÷ deviation, then its bias moved until the mean value is `expected`
    start_at(models.critic, expected, b["values"][b["mask"]], deviation)
    print(f"reward     {scores.mean():.4g} over {len(scores)} of {len(rows)} answers of the start; "
          f"trained on is (score − {mean:.4g}) / {deviation:.4g}, the critic starts at {expected:.3g}")  # fmt: skip


# ---- evaluation ----


def evaluate(args, run, models, gold, rows):
    """Log score, gold and KL of one answer to each validation prompt, at the training temperature,
    which the KL needs, and with the same random numbers each time."""
    if not rows:
        return
    b = models.draw(run, rows, args.seed)
    scores = score_answers(models.reward, reward_flag(args), rows, b["texts"])
    metrics = scored("val/score", scores)
    if gold:
        metrics |= scored("val/gold", score_answers(gold, "--gold", rows, b["texts"]))
    if args.beta:
        metrics["val/kl"] = (b["logps"] - b["ref_logps"]).sum(1).mean().item()
    shown = zip(rows[:2], b["texts"])
    samples = [{"prompt": row["prompt"], "answer": text} for row, text in shown]
    run.evaluation(metrics | rollouts.val_row(*rollouts.lengths_of(b)), samples)


# ---- the run ----


def main(argv=None):
    args = parse_args(argv)
    run = rollouts.WatchedRun("ppo", args, HEADLINE)
    # prompts and functions are read before a model is loaded
    tokenizer = load_tokenizer(args.model)
    room = prompt_room(args, load_config(args.model))
    gold = load_function(args.gold, "--gold")
    train, val = rollouts.split_prompts(args, tokenizer)
    # the models: the reward, which is frozen; policy and critic, which are trained; the policy's start
    if args.reward_fn:
        reward = load_function(args.reward_fn, "--reward-fn")
    else:
        reward = RewardFunction(args.reward_model, run.device, run.dtype, args.micro_tokens)
        reward.check_room(room + args.max_new_tokens, args.max_new_tokens)
    kind = PolicyWithValues if args.critic == "shared" else Policy
    policy, reference = load_policy(run, reference=args.beta, kind=kind)
    critic = load_critic(args, run, reward, tokenizer) if args.critic == "separate" else policy
    sample = engine.sampler(args, run)
    models = Models(policy, critic, reference, reward, tokenizer, room, sample)
    modules = {"policy": policy} if critic is policy else {"policy": policy, "critic": critic}
    own_lr = {} if critic.head.weight.any() else {critic.head: HEAD_LR}  # a fresh head is all 0
    per_epoch = len(train) / args.rollouts
    encoded = map(models.encode, train)
    optimizer = run.start(modules, tokenizer, RATES, per_epoch, encoded, own_lr)
    run.watch(len(val))
    if run.step == 0:  # not resumed
        rows, _ = rollouts.prompts_of_step(train, args.rollouts, args.seed, 1)
        preflight(args, run, models, rows)
        run.forecast(1 / 2)  # about half of what a step takes: it has no update
        run.state["kl_coef"] = args.beta
        evaluate(args, run, models, gold, val)

    for step in run.steps():
        # (1) rollout: one answer to each prompt, its log-probs under policy and reference
        # (2) score: the reward model, or a function, reads the answer behind </think>
        # (3) values: what the critic expects before each token
        rows, epoch = rollouts.prompts_of_step(train, args.rollouts, args.seed, step)
        seed = args.seed * 10**6 + step  # no two alike
        b = rollout(args, run, models, rows, seed)
        # (4) rewards: −β·k1 at every token; the standardised score at the last one
        (mean, deviation), kl_coef = run.state["scale"], run.state["kl_coef"]
        scores = ((b["scores"] - mean) / deviation).float().to(run.device)  # (B,)
        rewards, kl = shape_rewards(
            scores, b["logps"], b["ref_logps"], b["mask"], kl_coef, b["finished"], args.end_penalty
        )
        kl_ref = kl.sum(1).mean().item()  # of an answer, in nats
        # (5) advantages by GAE, whitened over the rollout
        advantages, b["returns"] = gae(rewards, b["values"], b["mask"], GAMMA, LAM)
        b["advantages"] = masked_whiten(advantages, b["mask"])
        # (6) update: several passes of clipped policy and value loss over minibatches
        means, n = rollouts.UpdateMeans(), len(b["texts"])
        lengths = b["attention_mask"].sum(1).tolist()
        # a fresh permutation in each pass, --batch-size answers per optimiser step
        for update in range(args.ppo_epochs * math.ceil(n / args.batch_size)):
            batch, _ = batch_indices(n, args.batch_size, seed, update + 1)
            actions, total = b["mask"][batch].sum().item(), 0.0  # of the whole optimiser step
            optimizer.zero_grad()
            for part in run.micro_batches(batch, lengths):  # rows that fit into memory
                mb = rollouts.cut(b, part)
                mask, old_logps = mb["mask"], mb["logps"]
                # log-probs, entropies, values, (n, T) each; a shared critic's values come with the
                # policy's log-probs, of one pass
                given = mb["ids"], mb["attention_mask"], mask, args.temperature
                logps, entropies, *values = policy(*given)
                (values,) = values or critic(*given)
                policy_losses, clipped = ppo_policy_loss(
                    logps, old_logps, mb["advantages"], mask, CLIP_LOW, args.clip_high
                )
                value_losses, value_clipped = ppo_value_loss(
                    values, mb["values"], mb["returns"], mask, VALUE_CLIP
                )
                # 1, but min(π_old/π_server, C) where servers drew
                policy_losses = rollouts.server_weights(args, mb, old_logps) * policy_losses
                # a sum over this part, divided by the actions of the whole optimiser step
                loss = (policy_losses + VALUE_COEF * value_losses).sum() / actions
                (run.loss_scale * loss).backward()  # the scale is 1 but in fp16
                total += loss.item()
                means.add(
                    mb, logps, policy_loss=policy_losses, value_loss=value_losses,
                    entropy=entropies, ratio=(logps - old_logps).exp() * mask,
                    approx_kl=kl_estimates(old_logps, logps, mask)[1],  # KL(π_old‖π): π_old drew
                    clip_frac=clipped, value_clip_frac=value_clipped,
                )  # fmt: skip
            # summed over the processes; policy and critic are clipped to norm 1 each
            loss, grad_norm = run.clip(total, f"{batch.tolist()} of step {step}")
            lr = run.set_lr(step)  # warm-up, then --schedule
            optimizer.step()
            means.steps.append({"loss": loss, "grad_norm": grad_norm, "lr": lr})
        kls = {"kl/ref": kl_ref, "kl/coef": kl_coef} if kl_coef else {}
        run.log({
            "epoch": epoch, **means.row(),
            "reward/mean": b["scores"].mean().item(), "reward/std": b["scores"].std().item(),
            "reward/unscored_frac": 1 - n / args.rollouts, **kls,
            "explained_variance": explained_variance(b["returns"], b["values"], b["mask"]),
            **rollouts.answers_row(b),
        })  # fmt: skip
        if (step - 1) % ROLLOUTS_EVERY == 0:
            columns = zip(b["prompts"], b["texts"], b["scores"], kl.sum(1), b["finished"])
            keys = "prompt", "answer", "reward", "kl", "finished"
            run.write("rollouts.jsonl", [dict(zip(keys, row)) for row in columns])
        # (7) KL coefficient: fixed, or steered to a target
        run.state["kl_coef"] = adapted_kl_coef(kl_coef, kl_ref, args.kl_target)
        # (8) every --eval-every steps: score, gold and KL on validation prompts; the alarms of watch.py
        if run.evaluates(step):
            evaluate(args, run, models, gold, val)
        run.end_step()  # ends the loop if an alarm says so
    gold = args.gold or args.reward_fn
    return run.finish(
        "evaluate.py", "compare", "--model", args.model, args.out, *["--chat"] * args.chat,
        "--prompts", args.prompts,
        *(("--gold", gold) if gold else ("--reward-model", args.reward_model)),
    )  # fmt: skip


if __name__ == "__main__":
    command(main, OUT_OF_MEMORY)
