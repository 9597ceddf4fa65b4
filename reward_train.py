"""reward_train.py: preference pairs in, a model out that scores answers, for PPO, GRPO and ranking.

Objective    minimise −E log σ(r(chosen) − r(rejected))
Algorithm    (1) read pairs; render the prompt; mark the answer tokens
             (2) scores of both answers, read at their last token
             (3) loss: Bradley-Terry
             (4) update: backward, clip the gradient, step
             (5) every --eval-every steps: held-out accuracy, beside that of "the longer answer wins"
             (6) mean and deviation of the scores, for PPO, into args.json
             (7) does it prefer answers that nobody wants: cut off, or loops?
Conventions  the loss is the mean over pairs; a tie is half a win for each answer; a fresh head is
             zero, so the loss starts at log 2, and learns at its own rate; scores are not rescaled
             at the end: σ of their difference is a probability
Left out     1. process rewards, for they need a label per step of an answer
             2. ensembles: train several seeds, and average their scores
             3. losses other than the likelihood of the labels
Run          python reward_train.py --pairs data/prefs_train.jsonl data/rank_train.jsonl
             python reward_train.py --model Qwen/Qwen2.5-0.5B-Instruct --pairs mine.jsonl
             torchrun --nproc-per-node 8 reward_train.py --fsdp --model Qwen/Qwen2.5-7B-Instruct
Writes       an AutoModelForSequenceClassification folder, args.json, metrics.jsonl, checkpoint/
Read with    parts/reward_models.py (`Scorer`) and parts/pairs.py (`Pairs`)
To copy      `bradley_terry_loss` needs torch alone; scores for it come from `Scorer`, rows from
             `encode_pair` in common.py
Reference    Bradley & Terry 1952; Ouyang et al. 2022, arXiv 2203.02155, eq. 1; centring: Eisenstein
             et al. 2023, arXiv 2312.09244; margin: Touvron et al. 2023, arXiv 2307.09288, eq. 2
Axes         B pairs of a batch, b pairs of a forward, n all pairs
"""

import math

import torch
import torch.nn.functional as F

from common import batch_indices, load_config, load_tokenizer, same_shape
from parts import contest, runs
from parts.answers import identity, show_row
from parts.files import OUT_OF_MEMORY, UserError, command, number, trainer_parser
from parts.pairs import Pairs, add_pair_arguments, share_interval
from parts.parallel import gather
from parts.reward_models import load_scorer

RATES = 5e-4, 3e-5, 3e-4  # below 100 M parameters (data/tiny-base), above (SmolLM2), with LoRA
LEAST_STEPS = 6  # a small file is repeated to make so many: five passes learn 162 pairs by heart
SCALE_PAIRS = 256  # at most: they give the scores' mean to .06 of a deviation, that itself to 4 %
HEAD_LR = 1e-3  # of a fresh head: after 32 steps the loss is still log 2 at 1e-5, but .677 at 1e-3
HEADLINE = "eval/loss", "eval/accuracy", "eval/accuracy_longer"

# ---- the math ----


def bradley_terry_loss(
    chosen_rewards, rejected_rewards, margin=None, tie=None, label_smoothing=0.0, center_coef=0.0
):
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
    same_shape(chosen=chosen_rewards, rejected=rejected_rewards, margin=margin, tie=tie)
    tie = torch.zeros_like(chosen_rewards, dtype=torch.bool) if tie is None else tie
    epsilon = torch.where(tie, 0.5, label_smoothing)  # (B,)
    z = chosen_rewards - rejected_rewards  # (B,)
    if margin is not None:
        z = z - torch.where(tie, 0.0, margin)
    losses = -(1 - epsilon) * F.logsigmoid(z) - epsilon * F.logsigmoid(-z)
    return losses + center_coef * (chosen_rewards + rejected_rewards) ** 2


def pair_metrics(chosen_rewards, rejected_rewards, tie, keys):
    """How often and how surely the chosen answer scores higher; Δ = r_chosen − r_rejected.

    chosen_rewards, rejected_rewards  (B,);  keys  of their prompts
    tie        (B,) bool: a tie is in no mean
    accuracy   share with Δ > 0, equal scores ½; low, high: its 95 % interval, which counts prompts
    margin     mean Δ                          nll        mean −log σ(Δ)

    By hand: Δ = 2, −.5, −.2, 0 is one right, two wrong, one equal: accuracy 1.5/4.
    >>> scores = torch.tensor([[2, 1, 0, 0.5], [0, 1.5, 0.2, 0.5]])
    >>> metrics = pair_metrics(*scores, torch.zeros(4, dtype=torch.bool), "abcd")
    >>> [round(metrics[key], 4) for key in ("accuracy", "margin", "nll")]
    [0.375, 0.325, 0.6481]
    """
    same_shape(chosen=chosen_rewards, rejected=rejected_rewards, tie=tie)
    delta = (chosen_rewards - rejected_rewards)[tie == 0].double()  # (n,)
    counts = {"n": len(delta), "n_ties": len(tie) - len(delta)}
    if not len(delta):
        return counts
    right = (delta.sign() + 1) / 2  # ½ where they are equal
    low, high = share_interval(right, [key for key, equal in zip(keys, tie) if not equal])
    return {
        "accuracy": right.mean().item(), "accuracy_low": low, "accuracy_high": high,
        "margin": delta.mean().item(), "nll": -F.logsigmoid(delta).mean().item(), **counts,
    }  # fmt: skip


# ---- the arguments ----


def parse_args(argv=None):
    parser = trainer_parser(
        "reward_train.py --pairs FILE [FILE …] [--model MODEL] [flags]",
        "A Bradley-Terry reward model from preference pairs.", "runs/reward", RATES,
    )  # fmt: skip
    add = parser.add_argument
    # fmt: off
    add_pair_arguments(parser)
    parser.set_defaults(pairs=["data/prefs_train.jsonl", "data/rank_train.jsonl"])
    add("--margin", help="column that says how much better the chosen answer is: a number, 0 or more (default: no margin)")
    add("--margin-scale", type=number(at_least=0), default=1.0, help="score difference per unit of that column, 0.1 to 1")
    add("--center-coef", type=number(at_least=0), default=0.0, help="weight of the pull of scores towards 0, 0.001 to 0.1")
    # fmt: on
    return parser.parse_args(argv)


def read_labels(args, pairs):
    """(margins, ties), (n,) each: margins in units of the score, 0 for ties and what is held out.
    UserError for one below 0, which would let the rejected answer score higher."""
    ties = torch.tensor([bool(row.get("tie")) for row in pairs.rows])
    margins = torch.zeros(len(ties))
    for i in pairs.train if args.margin else ():
        value = 0 if ties[i] else pairs.rows[i].get(args.margin)
        if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
            wrong = f'{pairs.lines[i]}: "{args.margin}" is {value!r}, expected a number, 0 or more'
            raise UserError(f"--margin {args.margin}: {wrong}")
        margins[i] = args.margin_scale * value
    return margins, ties


# ---- scores and evaluation ----


def pair_scores(scorer, pairs, part):
    """(2, b) scores of the chosen and the rejected answers of `part`, read at their last token."""
    rows = pairs.batch(part, scorer.model.device)  # (2b, T) each
    return scorer(*rows, shared=pairs.shared).view(2, -1)  # all chosen rows come first


def evaluate(run, scorer, pairs, ties):
    """Log held-out loss and accuracy, beside the accuracy of "the longer answer wins"."""
    if not len(pairs.held):
        return
    labels = ties[pairs.held], pairs.keys[pairs.held]
    scores = pairs.collect(run, pairs.held, pair_scores, scorer)
    metrics = pair_metrics(*scores, *labels)
    metrics["loss"] = bradley_terry_loss(*scores, tie=labels[0]).mean().item()
    tokens = torch.from_numpy(pairs.lengths[1:, pairs.held])  # of both answers
    metrics["accuracy_longer"] = pair_metrics(*tokens, *labels).get("accuracy")
    run.evaluation({f"eval/{key}": value for key, value in metrics.items()}, [])


# ---- the run ----


def main(argv=None):
    args = parse_args(argv)
    run = runs.Run("reward_train", args, HEADLINE)
    tokenizer, config = load_tokenizer(args.model), load_config(args.model, scores=None)
    # (1) read pairs; render the prompt; mark the answer tokens
    pairs = Pairs(args, tokenizer, config, keep_ties=True)
    margins, ties = read_labels(args, pairs)  # (n,) each

    # the trunk of --model with one output: all of it is trained, or adapters and that output
    scorer, fresh = load_scorer(
        args.model, tokenizer, run.device, run.dtype, "--model", True,
        lora_rank=args.lora_rank, seed=args.seed,
    )  # fmt: skip
    pairs.share_prompts(scorer)
    own_lr = {scorer.model.score: HEAD_LR} if fresh else {}
    optimizer = run.start(
        {"scorer": scorer}, tokenizer, RATES, len(pairs.train) / args.batch_size, pairs.ids,
        own_lr, LEAST_STEPS,
    )  # fmt: skip
    if run.step == 0:
        first = pairs.train[: args.batch_size]
        losses = bradley_terry_loss(*pairs.collect(run, first, pair_scores, scorer))
        loss = losses.mean().item()
        run.forecast(1 / 3)  # a backward takes two forwards
        if fresh:
            gap = loss - math.log(2)
            identity("loss before step one − log 2", gap, 1e-4, run.dtype, f"--model {args.model}")
        prompt, chosen, _ = pairs.encoded[first[0]]
        ids = [*prompt, *chosen]
        show_row("its score is read at ▮", tokenizer, ids, [False] * (len(ids) - 1) + [True])
        print(f"preflight  loss before step one {loss:.4f}: ok")
        evaluate(run, scorer, pairs, ties)

    for step in run.steps():
        indices, epoch = batch_indices(len(pairs.train), args.batch_size, args.seed, step)
        batch, scored, total = pairs.train[indices], [], 0.0
        optimizer.zero_grad()
        for part in run.micro_batches(batch, pairs.tokens):
            # (2) scores of both answers, read at their last token
            scores = pair_scores(scorer, pairs, part)  # (2, b)
            # (3) loss: Bradley-Terry
            labels = margins[part].to(scores), ties[part].to(run.device)
            losses = bradley_terry_loss(*scores, *labels, args.label_smoothing, args.center_coef)
            # (4) update: a sum over this part, divided by the pairs of the whole step
            loss = losses.sum() / len(batch)
            (run.loss_scale * loss).backward()  # the scale is 1 but in fp16
            total += loss.item()
            scored += zip(part, *scores.tolist())
        # summed over the processes, clipped to norm 1
        loss, grad_norm = run.clip(total, [pairs.lines[i] for i in batch[:4]])
        lr = run.set_lr(step)  # warm-up, then --schedule
        optimizer.step()
        rows, *scores = zip(*gather(scored))  # of all ranks
        metrics = pair_metrics(*torch.tensor(scores), ties[[*rows]], pairs.keys[[*rows]])
        run.log({
            "epoch": epoch, **metrics, "loss": loss, "lr": lr, "grad_norm": grad_norm,
            "tokens": pairs.tokens[batch].sum(),
        })  # fmt: skip
        # (5) every --eval-every steps: held-out accuracy, beside that of "the longer answer wins"
        if run.evaluates(step):
            evaluate(run, scorer, pairs, ties)

    # (6) mean and deviation of the scores, for PPO, into args.json; of pairs from all files
    some = pairs.train[:: math.ceil(len(pairs.train) / SCALE_PAIRS)]
    scores = pairs.collect(run, some, pair_scores, scorer)
    run.record["scale"] = [scores.mean().item(), max(scores.std().item(), 1e-6)]
    # (7) does it prefer answers that nobody wants: chosen ones that are cut off, or loop?
    some = (pairs.held if len(pairs.held) else pairs.train)[:200]
    prompts, chosen, _ = zip(*(pairs.encoded[i] for i in some))
    for sentence in contest.sentences(contest.check_scorer(scorer, prompts, chosen)):
        print(sentence)
    held = args.eval_pairs or ["YOUR_PAIRS.jsonl"]
    return run.finish("evaluate.py", "reward", "--reward-model", args.out, "--pairs", *held)


if __name__ == "__main__":
    command(main, OUT_OF_MEMORY)
