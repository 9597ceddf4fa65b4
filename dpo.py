"""dpo.py: preference pairs in, an aligned model out; no reward model, and no sampling in the loop.

Objective    minimise −E log σ(β·h) + c·NLL,
             h = log(π/π_ref)(chosen) − log(π/π_ref)(rejected),
             NLL = −Σ log π(chosen) / tokens of the chosen answers of the step
Algorithm    (1) read pairs; render the prompt; mark the answer tokens
             (2) reference: log-probs of both answers under the frozen start, once
             (3) policy: log-probs of both answers
             (4) loss and implicit rewards
             (5) update: backward, clip the gradient, step
             (6) every --eval-every steps: held-out loss (without c·NLL) and accuracy, sample
                 answers and their score
Conventions  answer log-probs are sums over tokens, end token included (three losses take means);
             the loss is the mean over pairs; reward = β·log(π/π_ref), of sums in every loss, so
             its accuracy may differ from a loss of means; the prompt is masked, and computed once
             for both answers where the model allows it exactly
Left out     1. a moving reference, because the implicit reward would change its meaning each step
             2. packing, because the answers of a pair already share their prompt
             3. KTO, which needs single answers with a thumb up or down: another loss, other data
Not as       DPO has no NLL term: --nll-coef 1 keeps the chosen answer likely while the margin grows
the paper    (Pang et al. 2024, who take a mean per answer); --nll-coef 0 is the paper's loss
Run          python dpo.py --pairs data/prefs.jsonl
             python dpo.py --model Qwen/Qwen2.5-0.5B-Instruct --pairs mine.jsonl --out runs/mine
Writes       a model folder, args.json, metrics.jsonl, samples.jsonl, checkpoint/
Read with    common.py (`Policy`: rows of ids in, log-probs out) and parts/pairs.py (`Pairs`)
To copy      `dpo_loss` with `LOSS_TYPES` and, from common.py, `same_shape`: torch is all they need.
             Log-probs for it come from `Policy` in common.py, ids from `encode_pair`, and rows
             with their masks from `pad_rows`.
             examples/dpo_minimal.py is the same objective in 80 lines
Reference    Rafailov et al. 2023, arXiv 2305.18290, eq. 7
Axes         B pairs of a batch, b pairs of a forward, n all pairs, T tokens
"""

import torch
import torch.nn.functional as F

from common import batch_indices, load_config, load_tokenizer, same_shape
from parts import runs
from parts.answers import Answers, add_answer_arguments, check_policy, identity, load_policy
from parts.files import OUT_OF_MEMORY, UserError, command, number, trainer_parser
from parts.pairs import Pairs, add_pair_arguments, share_interval
from parts.parallel import gather

RATES = 3e-4, 1e-5, 2e-4  # --lr below 100 M parameters (data/tiny-base), above (SmolLM2), with LoRA
# printed at each evaluation; val/cut is the share of answers without an end token
HEADLINE = "eval/loss", "eval/rewards/accuracies", "val/gold", "val/kl", "val/cut"
LOSS_TYPES = ("sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "simpo")

# ---- the math ----


def dpo_loss(
    policy_chosen_logps, policy_rejected_logps, ref_chosen_logps, ref_rejected_logps,
    beta=0.1, loss_type="sigmoid", label_smoothing=0.0,
    chosen_lengths=None, rejected_lengths=None, simpo_gamma=1.0,
):  # fmt: skip
    """L = −log σ(β·h),  h = log(π/π_ref)(chosen) − log(π/π_ref)(rejected)      [DPO eq. 7]

    log π        policy_chosen_logps, policy_rejected_logps  (B,) sums over answer tokens
    log π_ref    ref_chosen_logps, ref_rejected_logps        (B,) the same, without gradient
    |y|          chosen_lengths, rejected_lengths            (B,) tokens, for losses of means
    returns      losses, chosen_rewards, rejected_rewards    (B,) reward = β·log(π/π_ref)

    With z = β·h, h̄ the same with means per token in place of sums, ε = label_smoothing:
    sigmoid       −(1−ε) log σ(z) − ε log σ(−z)                     [cDPO, Mitchell 2023]
    robust        (−(1−ε) log σ(z) + ε log σ(−z)) / (1 − 2ε)        [Chowdhury et al. 2024, eq. 4]
    hinge         max(0, 1 − z)                                     [SLiC, Zhao et al. 2023]
    ipo           (h̄ − 1/(2β))²                       [Azar et al. 2023, eq. 17, there h; h̄ as TRL]
    sigmoid_norm  −log σ(β·h̄)                                       [Lambert et al. 2024, eq. 6]
    simpo         −log σ(β·h̄ − γ); give 0 as reference log-probs     [Meng et al. 2024, eq. 6]

    By hand: β = 0.5, h = (−5 + 6) − (−7 + 6) = 2, the margin is 1, L = log(1 + e⁻¹) = 0.3133.
    >>> pair = [torch.tensor([x]) for x in (-5.0, -7.0, -6.0, -6.0)]
    >>> losses, chosen_rewards, rejected_rewards = dpo_loss(*pair, beta=0.5)
    >>> round(losses.item(), 4), (chosen_rewards - rejected_rewards).item()
    (0.3133, 1.0)
    """
    same_shape(
        policy_chosen=policy_chosen_logps, policy_rejected=policy_rejected_logps,
        ref_chosen=ref_chosen_logps, ref_rejected=ref_rejected_logps,
        chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths,
    )  # fmt: skip
    chosen_logratios = policy_chosen_logps - ref_chosen_logps  # (B,)
    rejected_logratios = policy_rejected_logps - ref_rejected_logps  # (B,)
    chosen_rewards, rejected_rewards = beta * chosen_logratios, beta * rejected_logratios  # (B,)
    z, epsilon = chosen_rewards - rejected_rewards, label_smoothing
    if loss_type in ("ipo", "sigmoid_norm", "simpo"):
        h_mean = chosen_logratios / chosen_lengths - rejected_logratios / rejected_lengths  # (B,)
    if loss_type == "sigmoid":
        losses = -(1 - epsilon) * F.logsigmoid(z) - epsilon * F.logsigmoid(-z)
    elif loss_type == "robust":
        losses = (-(1 - epsilon) * F.logsigmoid(z) + epsilon * F.logsigmoid(-z)) / (1 - 2 * epsilon)
    elif loss_type == "hinge":
        losses = (1 - z).clamp(min=0)
    elif loss_type == "ipo":
        losses = (h_mean - 1 / (2 * beta)) ** 2
    elif loss_type == "sigmoid_norm":
        losses = -F.logsigmoid(beta * h_mean)
    elif loss_type == "simpo":
        losses = -F.logsigmoid(beta * h_mean - simpo_gamma)
    else:
        raise ValueError(f"loss_type is {loss_type!r}; expected one of {LOSS_TYPES}")
    return losses, chosen_rewards.detach(), rejected_rewards.detach()


# ---- the arguments ----


def parse_args(argv=None):
    parser = trainer_parser(
        "dpo.py --pairs FILE [FILE …] [--model MODEL] [flags]",
        "DPO: preference pairs in, an aligned model out.", "runs/dpo", RATES,
    )  # fmt: skip
    add = parser.add_argument
    # fmt: off
    add_pair_arguments(parser)
    add("--loss-type", choices=LOSS_TYPES, default="sigmoid", help="which loss; ipo, sigmoid_norm and simpo compare means per token")
    add("--beta", type=number(above=0), help="β of the paper: larger stays closer to the start, 0.01 to 0.5 (default: 0.1; simpo 2)")
    add("--simpo-gamma", type=number(at_least=0), default=1.0, help="target margin γ of simpo")
    add("--nll-coef", type=number(at_least=0), help="weight of −log π per chosen token beside the loss (default: 1 for sigmoid, else 0)")
    # fmt: on
    add_answer_arguments(parser)
    args = parser.parse_args(argv)
    if args.label_smoothing and args.loss_type not in ("sigmoid", "robust"):
        raise UserError(f"--label-smoothing: --loss-type {args.loss_type} smooths no labels")
    args.beta = args.beta or (2.0 if args.loss_type == "simpo" else 0.1)
    if args.nll_coef is None:
        args.nll_coef = float(args.loss_type == "sigmoid")
    return args


# ---- log-probs, loss and metrics of pairs ----


def pair_logps(policy, pairs, part):
    """(2, b): log π of the chosen and the rejected answers of the pairs numbered `part`, summed over
    their tokens."""
    # ids, attention mask, answer mask (2b, T) → log-probs, entropies: column t is of token t
    logps, _ = policy(*pairs.batch(part, policy.model.device), shared=pairs.shared)  # (2b, T)
    return logps.sum(1).view(2, -1)  # 0 outside answers; all chosen rows come first


def reference_logps(run, policy, pairs):
    """(2, n): `pair_logps` of all pairs under the start; 0 for simpo, which has no reference."""
    rows = range(len(pairs.rows))
    if run.args.loss_type == "simpo":
        return torch.zeros(2, len(rows))
    return pairs.collect(run, rows, pair_logps, policy)


def pair_loss(run, pairs, part, logps):
    """`dpo_loss` of the pairs numbered `part`, of their log-probs (2, b)."""
    # tokens of both answers; the first row, of the prompts, stays out
    args, lengths = run.args, torch.from_numpy(pairs.lengths[1:, part])  # (2, b)
    return dpo_loss(
        *logps, *run.state["reference"][:, part].to(logps), args.beta, args.loss_type,
        args.label_smoothing, *lengths.to(logps), args.simpo_gamma,
    )  # fmt: skip


def pair_metrics(run, pairs, part, logps):
    """Means over the pairs in `part`, of their log-probs (2, B), under TRL's names; the interval of
    the accuracy counts pairs of one prompt as one."""
    losses, chosen_rewards, rejected_rewards = pair_loss(run, pairs, part, logps)
    margins = chosen_rewards - rejected_rewards
    # at the start the two rewards differ by rounding only (1e-6 of a sum in fp32), which counts as
    # equal: half right
    equal = margins.abs() <= 1e-6 * logps.abs().sum(0)
    right = torch.where(equal, 0.5, (margins > 0).float())
    low, high = share_interval(right.double(), pairs.keys[[*part]])
    columns = {
        "pair_loss": losses, "rewards/chosen": chosen_rewards, "rewards/rejected": rejected_rewards,
        "rewards/margins": margins, "rewards/accuracies": right,
        "logps/chosen": logps[0], "logps/rejected": logps[1],
    }  # fmt: skip
    return {key: x.double().mean().item() for key, x in columns.items()} | {
        "nll": -logps[0].double().sum().item() / pairs.lengths[1, part].sum(), "n": len(part),
        "rewards/accuracies_low": low, "rewards/accuracies_high": high,
    }  # fmt: skip


@torch.no_grad()
def evaluate(run, policy, reference, pairs, answers):
    """Log held-out loss and accuracy; sample answers, their score and their KL."""
    metrics, samples = answers(policy, reference)
    if len(pairs.held):
        logps = pairs.collect(run, pairs.held, pair_logps, policy)
        held = pair_metrics(run, pairs, pairs.held, logps)
        metrics |= {"eval/loss": held.pop("pair_loss")} | {f"eval/{k}": x for k, x in held.items()}
    run.evaluation(metrics, samples)


# ---- the run ----


def main(argv=None):
    args = parse_args(argv)
    run = runs.Run("dpo", args, HEADLINE)
    tokenizer, config = load_tokenizer(args.model), load_config(args.model)
    # (1) read pairs; render the prompt; mark the answer tokens
    pairs = Pairs(args, tokenizer, config)
    trained = {*pairs.keys[pairs.train]}  # prompts that val/ leaves out
    answers = Answers(run, tokenizer, config, pairs.rows[:2], trained)  # two rows without --prompts

    # the policy; before step one it is its own reference, and gives the log-probs of all pairs
    # `reference` (with LoRA the policy, its adapter off) is not that of the loss: it serves val/kl, of
    # answers to --prompts. The loss reads run.state["reference"], computed once, kept in checkpoints
    policy, reference = load_policy(run, reference=args.prompts)
    # is each prompt computed once for both answers? The longest pair tells it
    longest = pairs.share_prompts(policy)
    # `encoded` is hashed: --resume needs the same ids
    optimizer = run.start(
        {"policy": policy}, tokenizer, RATES,
        per_epoch=len(pairs.train) / args.batch_size, encoded=pairs.ids,
    )  # fmt: skip
    if run.step == 0:
        check_policy(policy, tokenizer, *longest, f"--model {args.model}")
        # (2) reference: log-probs of both answers under the start, which the policy still is, once
        run.state["reference"] = reference_logps(run, policy, pairs)
        # before step one policy and reference are equal: h = 0, and the sigmoid loss is log 2
        some = pairs.train[:4]
        with torch.no_grad():
            before = pair_metrics(run, pairs, some, pair_logps(policy, pairs, some))
        # so many pairs had a forward; a step costs about three of each of its own, for its backward
        forwards = 4 + len(pairs.rows) * (args.loss_type != "simpo")
        run.forecast(forwards / args.batch_size / 3)
        if args.loss_type != "simpo":
            # an error if h, which is the margin / β, is not 0
            identity(
                "h before step one", before["rewards/margins"] / args.beta, 2e-4, run.dtype,
                f"--model {args.model}",
            )  # fmt: skip
        print("preflight  log-probs are the model's, "
              f"loss before step one {before['pair_loss']:.4f}: ok")  # fmt: skip
        evaluate(run, policy, reference, pairs, answers)

    for step in run.steps():
        indices, epoch = batch_indices(len(pairs.train), args.batch_size, args.seed, step)
        batch, scored, total = pairs.train[indices], [], 0.0
        optimizer.zero_grad()
        # of the whole step; the rows of `lengths` are prompt, chosen, rejected
        chosen_tokens = pairs.lengths[1, batch].sum()
        for part in run.micro_batches(batch, pairs.tokens):  # this rank's rows, as memory allows
            # (3) policy: log-probs of both answers
            logps = pair_logps(policy, pairs, part)  # (2, b)
            # (4) loss and implicit rewards
            losses, *_ = pair_loss(run, pairs, part, logps)  # (b,)
            # (5) update: L = mean loss + c·NLL, sums over this part ÷ counts of the whole step
            nll = -logps[0].sum() / chosen_tokens
            loss = losses.sum() / len(batch) + args.nll_coef * nll
            (run.loss_scale * loss).backward()  # the scale is 1 but in fp16
            total += loss.item()
            scored += zip(part, *logps.tolist())
        # loss and gradients are summed over the ranks, gradients clipped to norm 1; an error names
        # these rows if they are not finite
        loss, grad_norm = run.clip(total, [pairs.lines[i] for i in batch[:4]])
        lr = run.set_lr(step)  # warm-up, then --schedule
        optimizer.step()
        # for the log: all pairs of the step, of all ranks
        every, *both_logps = zip(*gather(scored))
        run.log(pair_metrics(run, pairs, every, torch.tensor(both_logps)) | {
            "loss": loss, "lr": lr, "grad_norm": grad_norm, "epoch": epoch,
            "tokens": pairs.tokens[batch].sum(),
        })  # fmt: skip
        # (6) every --eval-every steps: held-out loss and accuracy, sample answers and their score
        if run.evaluates(step):
            evaluate(run, policy, reference, pairs, answers)

    return run.finish(
        "evaluate.py", "compare", "--model", args.model, args.out, *["--chat"] * args.chat,
        "--prompts", args.prompts or "YOUR_PROMPTS.jsonl",
    )  # fmt: skip


if __name__ == "__main__":
    command(main, OUT_OF_MEMORY)
