"""reward_train.py: preference pairs in, a model out that scores answers, for PPO, GRPO and ranking.

Objective    minimise −E log σ(r(chosen) − r(rejected))
Algorithm    (1) read pairs; render the prompt; mark the answer tokens
             (2) rewards of both answers, read at the last token
             (3) loss: Bradley-Terry
             (4) update: backward, clip the gradient, step
             (5) now and then: held-out accuracy, calibration, beside the longer-answer baseline
             (6) mean and deviation of the rewards, kept in config.json for PPO
Conventions  one forward for both answers; loss is the pair mean; a fresh head is zero and learns at
             its own rate, and is not rescaled at the end: σ(reward difference) is a probability;
             --counterfactual-augment NAMES: each pair under other names (parts/counterfactual.py)
Left out     1. process rewards   2. ensembles   3. other losses
Run          python reward_train.py --pairs data/prefs_train.jsonl data/rank_train.jsonl
             python reward_train.py --model Qwen/Qwen2.5-0.5B-Instruct --pairs mine.jsonl
             torchrun --nproc-per-node 8 reward_train.py --fsdp --model Qwen/Qwen2.5-7B-Instruct
Writes       an AutoModelForSequenceClassification folder, args.json, metrics.jsonl, checkpoint/
Reference    Bradley & Terry 1952; Ouyang et al. 2022, arXiv 2203.02155, eq. 1; centring: Eisenstein
             et al. 2023, arXiv 2312.09244; margin: Touvron et al. 2023, arXiv 2307.09288, eq. 2
Axes         B pairs, T tokens
"""

import math

import numpy as np
import torch
import torch.nn.functional as F

import common
from common import at_least_fp32, batch_indices, pad_id, pad_rows
from parts import identities, prompting, runs
from parts.files import UserError, command, number, shell_line
from parts.means import wilson
from parts.pairs import batch_rows
from parts.parallel import add_up, gather
from parts.reward_models import load_reward_model, reward_scores
from parts.shared_prompt import can_share

# learning rates for models below 100 M parameters (worked on the bundled base, not swept), larger
# ones, and LoRA: reports/real-model.md
RATES = 5e-4, 3e-5, 3e-4
PAIRS = ["data/prefs_train.jsonl", "data/rank_train.jsonl"]
LEAST_STEPS = 6  # a small file is repeated to make so many: five passes learn 162 pairs by heart
SCALE_PAIRS = 256  # give the mean of the rewards to .06 of a deviation, the deviation to 4 %
HEAD_LR = 1e-3  # of a fresh head: after 32 steps the loss is still log 2 at 1e-5, but .677 at 1e-3
SHOW = ("loss", "accuracy", "margin", "lr", "grad_norm")  # on the bar
HEADLINE = ("eval/loss", "eval/accuracy", "eval/accuracy_longer")  # before and after


# ---- 3. the math ----


def bradley_terry_loss(
    chosen_rewards, rejected_rewards, margin=None, tie=None, label_smoothing=0.0, center_coef=0.0
):  # fmt: skip
    """L = −(1−ε) log σ(z) − ε log σ(−z) + c·(r_c + r_r)²,   z = r_c − r_r − m
    [Ouyang eq. 1; margin: Touvron eq. 2]

    r_c, r_r   chosen_rewards, rejected_rewards  (B,)
    m          margin            (B,) or None: how much better chosen must score
    ε          label_smoothing   chance that the label is wrong; ½ (and m = 0) where tie, (B,) bool
    c          center_coef       pulls their sum towards 0: scores are known up to a constant
    returns    losses            (B,), the loop takes the mean

    By hand: r = 1 against 0: log(1 + e⁻¹) = 0.3133. A tie there costs half of 0.3133 + 1.3133.
    >>> one, zero = torch.tensor([1.0]), torch.tensor([0.0])
    >>> [round(bradley_terry_loss(x, zero).item(), 4) for x in (one, zero)]
    [0.3133, 0.6931]
    >>> round(bradley_terry_loss(one, zero, tie=torch.tensor([True])).item(), 4)
    0.8133
    """
    common.same_shape(chosen=chosen_rewards, rejected=rejected_rewards, margin=margin, tie=tie)
    chosen_rewards, rejected_rewards = map(at_least_fp32, (chosen_rewards, rejected_rewards))
    tie = torch.zeros_like(chosen_rewards, dtype=torch.bool) if tie is None else tie
    epsilon = torch.where(tie, 0.5, label_smoothing)  # (B,)
    z = chosen_rewards - rejected_rewards  # (B,)
    if margin is not None:
        z = z - torch.where(tie, 0.0, margin)
    losses = -(1 - epsilon) * F.logsigmoid(z) - epsilon * F.logsigmoid(-z)
    return losses + center_coef * (chosen_rewards + rejected_rewards) ** 2


def pair_metrics(chosen_rewards, rejected_rewards, tie=None, bins=10):
    """How often and how surely chosen scores higher: P(chosen) = σ(Δ), Δ = r_chosen − r_rejected.

    chosen_rewards, rejected_rewards  (B,);  tie  (B,) bool or None: a tie is in no mean
    accuracy  share with Δ > 0, equal scores ½          margin  mean Δ
    nll       mean −log σ(Δ)                            brier   mean (1 − σ(Δ))²
    ece       Σ_b n_b/n · |accuracy_b − confidence_b|, bins b of confidence max(σ(Δ), σ(−Δ)) ≥ ½
    No pair left: NaN.

    By hand: Δ = 2, −.5, −.2, 0 is one right, two wrong, one equal: accuracy 1.5/4.
    >>> metrics = pair_metrics(torch.tensor([2, 1, 0, 0.5]), torch.tensor([0, 1.5, 0.2, 0.5]))
    >>> [round(metrics[key], 4) for key in ("accuracy", "nll", "brier", "ece")]
    [0.375, 0.6481, 0.2385, 0.3229]
    """
    common.same_shape(chosen=chosen_rewards, rejected=rejected_rewards, tie=tie)
    chosen_rewards, rejected_rewards = (
        rewards.detach().cpu().double() for rewards in (chosen_rewards, rejected_rewards)
    )
    delta = chosen_rewards - rejected_rewards  # (B,)
    decided = delta if tie is None else delta[~tie.bool()]
    p = torch.sigmoid(decided)
    right = (decided > 0).double() + 0.5 * (decided == 0).double()
    confidence = torch.maximum(p, 1 - p)
    bin_index = ((confidence - 0.5) * 2 * bins).long().clamp(0, bins - 1)
    gaps = torch.zeros(bins, dtype=torch.double).index_add_(0, bin_index, right - confidence)
    return {
        "accuracy": right.mean().item(),
        "margin": decided.mean().item(),
        "nll": -F.logsigmoid(decided).mean().item(),
        "brier": ((1 - p) ** 2).mean().item(),
        "ece": (gaps.abs().sum() / len(decided)).item(),
        "n": len(decided),
        "n_ties": len(delta) - len(decided),
    }


# ---- 4. the arguments ----


def parse_args(argv=None):
    parser = runs.Parser(
        "reward_train.py --pairs mine.jsonl --out runs/reward",
        "Train a Bradley-Terry reward model on preference pairs.",
    )
    add = parser.add_argument
    # fmt: off
    add("--pairs", nargs="+", default=PAIRS, help="JSONL of prompt, chosen, rejected")
    add("--model", default=common.BASE, help="model folder or hub id (default %(default)s)")
    add("--ties", choices=("soft", "drop"), default="soft", help="soft: a tie is half a win for each (default %(default)s)")
    add("--margin", choices=("none", "margin", "strength"), default="none", help="column for the margin (default %(default)s)")
    add("--margin-scale", type=number(at_least=0), default=1.0, help="reward units per unit of that column, 0.1 to 1 (default 1)")
    add("--label-smoothing", type=number(at_least=0, below=0.5), default=0.0, help="chance that a label is wrong, 0 to 0.2 (default 0)")
    add("--center-coef", type=number(at_least=0), default=0.0, help="weight of the pull of rewards towards 0, 0.001 to 0.1 (default 0)")
    # fmt: on
    prompting.add_pair_arguments(parser)
    prompting.add_examples_argument(parser)
    parser.add_run_arguments("runs/reward", RATES, f"1, or what makes {LEAST_STEPS} steps")
    args = parser.parse_args(argv)
    parser.without_effect("--eval-fraction", args.eval_pairs, prompting.HELD_OUT)
    parser.without_effect("--margin-scale", args.margin == "none", "--margin names no column")
    prompting.default_examples(args, args.pairs)
    return args


# ---- 5. the data ----
# {"prompt": [{"role": "user", "content": "Which candidate fits this role? …"}],
#  "chosen": [{"role": "assistant", …}], "rejected": [{"role": "assistant", …}], "strength": 2}


def load_data(args, model, tokenizer):
    """(pairs, margins): margins (n,) float32 in reward units."""
    pairs = prompting.load_pairs(args, model, tokenizer, args.ties == "soft")
    pairs.shared = can_share(model, pairs, pad_rows)
    if args.margin == "none":
        return pairs, torch.zeros(len(pairs))
    column = getattr(pairs, args.margin) * args.margin_scale
    used = pairs.train[~pairs.tie[pairs.train]]
    below = used[column[used] < 0]  # it would let the rejected answer score higher
    if len(below):
        place, given = pairs.name(below[:1]), getattr(pairs, args.margin)[below[0]]
        raise UserError(f"--margin {args.margin}: {place} has {given:g}, below 0; swap the answers")
    missing = used[np.isnan(column[used])]
    if len(missing):
        raise UserError(f'--margin {args.margin}: {pairs.name(missing[:1])} has no "{args.margin}"')
    return pairs, torch.from_numpy(np.nan_to_num(column)).float()


# ---- 6. the models ----


def load_models(args, run):
    """(model, tokenizer): the policy's trunk with a scalar head, or adapters and the head."""
    tokenizer = common.load_tokenizer(args.model, today=args.date)
    place = run.dtype, run.device
    model = load_reward_model(args.model, tokenizer, *place, lora_rank=args.lora_rank)
    return model, tokenizer


# ---- 7. preflight ----


def preflight(args, model, tokenizer, pairs):
    """Loss = log 2 under a fresh head; one row, marked."""
    rows = batch_rows(pairs, pairs.train[:8], pad_id(tokenizer))
    ids, attention_mask, _ = (x.to(model.device) for x in rows)
    with torch.no_grad():
        rewards = reward_scores(model, ids, attention_mask)
    loss = bradley_terry_loss(*rewards.chunk(2)).mean().item()
    if model.fresh_head:
        name = "loss before step one, with a zero head"
        identities.identity(name, loss, math.log(2), 1e-4, f"--model {args.model}")
    else:
        print(f"preflight  {args.model} is a reward model already: loss {loss:.4f}")
    last = attention_mask & ~F.pad(attention_mask[:, 1:], (0, 1))  # where the score is read
    legend, name = "· not read   ◆ carries the reward", pairs.name(pairs.train[:1])
    identities.show_row(tokenizer, (ids, attention_mask, last), name, legend)


# ---- 8. the loop ----


@torch.no_grad()
def score_pairs(run, model, pairs, indices, pad):
    """(2, len(indices)) rewards of chosen and rejected on the CPU, in the order of `indices`."""
    scores = torch.zeros(2, len(pairs))
    for part in run.micro_batches(indices, pairs.columns()):
        rows = (x.to(model.device) for x in batch_rows(pairs, part, pad))
        scores[:, part] = reward_scores(model, *rows, shared=pairs.shared).view(2, -1).cpu()
    add_up([scores])
    return scores[:, indices]


def evaluate(run, model, pairs, pad):
    """Held-out accuracy with interval, calibration, and what "the longer answer wins" gets."""
    if not len(pairs.eval):
        return {}, []
    tie = torch.from_numpy(pairs.tie[pairs.eval])
    chosen, rejected = score_pairs(run, model, pairs, pairs.eval, pad)
    metrics = pair_metrics(chosen, rejected, tie)
    tokens = [
        torch.from_numpy(side.lengths()[pairs.eval]) for side in (pairs.chosen, pairs.rejected)
    ]
    votes = pairs.votes(pairs.eval[~pairs.tie[pairs.eval]])
    low, high = wilson(metrics["accuracy"] * votes, votes) or (None, None)
    return {
        "eval/loss": bradley_terry_loss(chosen, rejected, tie=tie).mean().item(),
        **{f"eval/{key}": value for key, value in metrics.items()},
        "eval/accuracy_low": low, "eval/accuracy_high": high,
        "eval/accuracy_longer": pair_metrics(*tokens, tie)["accuracy"],
    }, []  # fmt: skip


def main(argv=None):
    args = parse_args(argv)
    inputs = [args.model, *args.pairs, *args.eval_pairs, args.counterfactual_augment, args.examples]
    run = runs.Run("reward_train", args, inputs, SHOW, HEADLINE)
    model, tokenizer = load_models(args, run)
    # (1) read pairs; render the prompt; mark the answer tokens
    pairs, margins = load_data(args, model, tokenizer)
    n, columns, pad = len(pairs.train), pairs.columns(), pad_id(tokenizer)
    ties = torch.from_numpy(pairs.tie)
    run.plan(n, "pairs", LEAST_STEPS)
    run.state = {"model": model}
    lr = args.lr or runs.default_lr(model, RATES)
    own_lr = {model.score: HEAD_LR} if model.fresh_head else {}
    run.start(model, tokenizer, lr, own_lr, columns.max(), encoded=pairs.ids())
    if run.step == 0:
        preflight(args, model, tokenizer, pairs)
        run.evaluation(*evaluate(run, model, pairs, pad))

    for step in run.steps():
        batch, epoch = batch_indices(n, args.batch_size, args.seed, step)
        batch, batch_stats = pairs.train[batch], []
        for part in run.micro_batches(batch, columns):
            rows = (x.to(model.device) for x in batch_rows(pairs, part, pad))
            # (2) rewards of both answers, read at the last token
            rewards = reward_scores(model, *rows, shared=pairs.shared).chunk(2)
            # (3) loss: Bradley-Terry; sum over this part, divided by the pairs of the whole step
            labels = [x[part].to(model.device) for x in (margins, ties)]
            losses = bradley_terry_loss(*rewards, *labels, args.label_smoothing, args.center_coef)
            # (4) update: backward, clip the gradient, step
            run.backward(losses.sum() / len(batch))
            batch_stats.append([*(x.detach().cpu() for x in rewards), ties[part]])
        update = run.update(lambda batch=batch: pairs.name(batch))
        chosen, rejected, tie = map(torch.cat, zip(*gather(batch_stats), strict=True))
        all_rewards = torch.cat([chosen, rejected])
        run.log({
            "epoch": epoch, **pair_metrics(chosen, rejected, tie), **update,
            "reward/mean": all_rewards.mean().item(), "reward/std": all_rewards.std().item(),
            "tokens": int(pairs.tokens()[batch].sum()),
        })  # fmt: skip
        # (5) now and then: held-out accuracy, calibration, beside the longer-answer baseline
        if run.evaluates(step):
            run.evaluation(*evaluate(run, model, pairs, pad))

    # ---- 9. save ----
    # (6) mean and deviation of the rewards, kept in config.json for PPO
    some = pairs.train[np.linspace(0, n - 1, min(n, SCALE_PAIRS)).astype(int)]  # from all files
    if not run.stopped:
        all_rewards = score_pairs(run, model, pairs, some, pad)
        model.config.reward_mean = all_rewards.mean().item()
        model.config.reward_std = max(all_rewards.std().item(), 1e-6)
    own = [] if args.pairs == PAIRS else ["--pairs", (args.eval_pairs or ["HELD_OUT.jsonl"])[0]]
    return run.finish(shell_line("evaluate.py", "reward", "--reward-model", args.out, *own))


if __name__ == "__main__":
    command(main)
