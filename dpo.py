"""dpo.py: preference pairs in, an aligned model out; no reward model and no sampling.

Objective    minimise −E log σ(β·h) − c·(mean log π of a chosen token),
             h = log(π/π_ref)(chosen) − log(π/π_ref)(rejected)
             c = --nll-coef: 1 by default for sigmoid, 0 in the paper
Algorithm    (1) read pairs; render the prompt; mark the answer tokens
             (2) reference: log-probs of both answers under the frozen start, once
             (3) policy: log-probs of both answers
             (4) loss and implicit rewards
             (5) update: backward, clip the gradient, step
             (6) now and then: held-out loss and accuracy, sample answers and their score
Conventions  answer log-probs are sums over tokens, end token included; loss is the pair mean;
             reward = β·log(π/π_ref), margin = the difference of a pair's two; pair_loss is the
             mean of −log σ(margin) (sigmoid), loss adds the NLL term; the prompt is masked; ipo
             divides the log-probs by the answer's length, as TRL does (the paper does not)
Left out     1. a moving or another reference   2. online DPO   3. packing   4. ORPO, others
Run          python dpo.py --pairs data/prefs.jsonl
             python dpo.py --model Qwen/Qwen2.5-0.5B-Instruct --pairs mine.jsonl --out runs/dpo
             torchrun --nproc-per-node 8 dpo.py --fsdp --model Qwen/Qwen2.5-7B-Instruct
Writes       a model folder, args.json, metrics.jsonl, samples.jsonl, checkpoint/
Reference    Rafailov et al. 2023, arXiv 2305.18290, eq. 7; cDPO: Mitchell 2023; robust: 2403.00409;
             IPO: 2310.12036; hinge: 2305.10425; SimPO: 2405.14734; NLL: 2404.19733; KTO: 2402.01306
Axes         B pairs, T tokens, V vocabulary
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

import common
from common import at_least_fp32, batch_indices, pad_id, pad_rows, token_logps
from parts import identities, prompting, runs
from parts.files import UserError, command, number, read_jsonl
from parts.lora import adapter_off
from parts.means import wilson
from parts.pairs import batch_rows
from parts.parallel import add_up, all_sum, gather, progress
from parts.rows import check_thumb
from parts.shared_prompt import can_share

# learning rates for models below 100 M parameters (worked on the bundled base, not swept), larger
# ones, and LoRA: reports/real-model.md; at 5e-5 the held-out loss of SmolLM2 rises
RATES = 3e-4, 1e-5, 2e-4
SHOW = ("loss", "rewards/accuracies", "rewards/margins", "lr", "grad_norm")  # on the bar
HEADLINE = ("eval/loss", "eval/rewards/accuracies", "val/gold")  # before and after
LOSS_TYPES = ("sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "simpo", "kto")


# ---- 3. the math ----


def dpo_loss(
    policy_chosen_logps, policy_rejected_logps, ref_chosen_logps, ref_rejected_logps,
    beta=0.1, loss_type="sigmoid", label_smoothing=0.0,
    chosen_lengths=None, rejected_lengths=None, simpo_gamma=1.0, baseline=0.0,
):  # fmt: skip
    """L = −log σ(β·h),  h = log(π/π_ref)(chosen) − log(π/π_ref)(rejected)      [DPO eq. 7]

    log π        policy_chosen_logps, policy_rejected_logps  (B,) sum over response tokens
    log π_ref    ref_chosen_logps, ref_rejected_logps        (B,) the same, no gradient; pass 0 for
                 simpo, which has no reference
    n            chosen_lengths, rejected_lengths            (B,) for ipo, sigmoid_norm, simpo;
                 for kto 0: a side that nobody gave, its log-probs are 0
    k            baseline    `kl_baseline` of the optimiser step, kto only
    ε            label_smoothing   in [0, ½); sigmoid and robust only
    returns      losses, chosen_rewards, rejected_rewards    (B,) reward = β·log(π/π_ref), detached

    With h_c and h_r the log-ratios of the two sides and z = β·(h_c − h_r):
      sigmoid       −(1−ε) log σ(z) − ε log σ(−z)                      ε > 0 is cDPO
      robust        (−(1−ε) log σ(z) + ε log σ(−z)) / (1−2ε)
      hinge         max(0, 1 − z)
      ipo           (h_c/n_c − h_r/n_r − 1/(2β))²
      sigmoid_norm  −log σ(β·(h_c/n_c − h_r/n_r))
      simpo         −log σ(β·(log π_c/n_c − log π_r/n_r) − γ)
      kto           mean over the sides given of 1 − σ(β·(h_c − k)) and 1 − σ(β·(k − h_r))

    By hand: β = 0.5, h = (−5 + 6) − (−7 + 6) = 2, the margin is 1, L = log(1 + e⁻¹) = 0.3133.
    >>> pair = [torch.tensor([x]) for x in (-5.0, -7.0, -6.0, -6.0)]
    >>> losses, chosen_rewards, rejected_rewards = dpo_loss(*pair, beta=0.5)
    >>> round(losses.item(), 4), (chosen_rewards - rejected_rewards).item()
    (0.3133, 1.0)
    """
    common.same_shape(
        policy_chosen=policy_chosen_logps, policy_rejected=policy_rejected_logps,
        ref_chosen=ref_chosen_logps, ref_rejected=ref_rejected_logps,
        chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths,
    )  # fmt: skip
    epsilon = label_smoothing
    chosen_logratios = at_least_fp32(policy_chosen_logps) - at_least_fp32(ref_chosen_logps)  # (B,)
    rejected_logratios = at_least_fp32(policy_rejected_logps) - at_least_fp32(ref_rejected_logps)
    chosen_rewards, rejected_rewards = beta * chosen_logratios, beta * rejected_logratios
    z = chosen_rewards - rejected_rewards  # (B,)
    if loss_type in ("ipo", "sigmoid_norm", "simpo"):
        per_token = chosen_logratios / chosen_lengths - rejected_logratios / rejected_lengths

    if loss_type == "sigmoid":
        losses = -(1 - epsilon) * F.logsigmoid(z) - epsilon * F.logsigmoid(-z)
    elif loss_type == "robust":
        losses = (-(1 - epsilon) * F.logsigmoid(z) + epsilon * F.logsigmoid(-z)) / (1 - 2 * epsilon)
    elif loss_type == "hinge":
        losses = (1 - z).clamp(min=0)
    elif loss_type == "ipo":
        losses = (per_token - 1 / (2 * beta)) ** 2
    elif loss_type == "sigmoid_norm":
        losses = -F.logsigmoid(beta * per_token)
    elif loss_type == "kto":
        given = torch.stack([chosen_lengths, rejected_lengths]) > 0  # (2, B)
        better = torch.stack([chosen_rewards, -rejected_rewards])
        better = better - beta * baseline * better.new_tensor([[1], [-1]])
        losses = torch.where(given, 1 - better.sigmoid(), 0.0).sum(0) / given.sum(0)
    elif loss_type == "simpo":  # its reward is β times the mean log-prob
        losses = -F.logsigmoid(beta * per_token - simpo_gamma)
        chosen_rewards = chosen_rewards / chosen_lengths
        rejected_rewards = rejected_rewards / rejected_lengths
    else:
        raise ValueError(f"loss_type is {loss_type!r}; expected one of {LOSS_TYPES}")
    # (B,) each, the loop takes the mean
    return losses, chosen_rewards.detach(), rejected_rewards.detach()


# ---- 4. the arguments ----


def parse_args(argv=None):
    parser = runs.Parser(
        "dpo.py --pairs mine.jsonl --out runs/dpo",
        "Direct preference optimisation on preference pairs.",
    )
    add = parser.add_argument
    # fmt: off
    add("--pairs", nargs="+", default=["data/prefs_train.jsonl"], help="JSONL of prompt, chosen, rejected; kto: or completion, label")
    add("--model", default=common.BASE, help="model folder or hub id (default %(default)s)")
    add("--loss-type", choices=LOSS_TYPES, default="sigmoid", help="ipo, sigmoid_norm, simpo: means per token (default %(default)s)")
    add("--beta", type=number(above=0), help="how strongly the reference holds, 0.01 to 0.5 (default 0.1); simpo 2 to 10 (default 2)")
    add("--label-smoothing", type=number(at_least=0, below=0.5), default=0.0, help="chance of a wrong label; sigmoid, robust (default 0)")
    add("--simpo-gamma", type=number(at_least=0), default=1.0, help="target margin of simpo, 0.3 to 2 (default %(default)s)")
    add("--nll-coef", type=number(at_least=0), help="weight of −log π per chosen token, 0 to 1 (default 1 for sigmoid, else 0)")
    # fmt: on
    prompting.add_pair_arguments(parser)
    prompting.add_answer_arguments(parser)
    parser.add_run_arguments("runs/dpo", RATES)
    args = parser.parse_args(argv)
    simpo = args.loss_type == "simpo"
    parser.without_effect("--simpo-gamma", not simpo, "only --loss-type simpo has a target margin")
    parser.without_effect("--eval-fraction", args.eval_pairs, prompting.HELD_OUT)
    args.beta = args.beta or (2.0 if simpo else 0.1)
    if args.nll_coef is None:
        args.nll_coef = 1.0 if args.loss_type == "sigmoid" else 0.0
    if args.label_smoothing and args.loss_type not in ("sigmoid", "robust"):
        none = f"--loss-type {args.loss_type} has none"
        raise UserError(f"--label-smoothing: {none}; sigmoid and robust do")
    prompting.default_prompts(args, args.pairs)  # and --gold, --examples, --eval-temperature
    return args


# ---- 5. the data ----
# {"prompt": [{"role": "user", "content": "Assess this candidate. …"}],
#  "chosen": [{"role": "assistant", …}], "rejected": [{"role": "assistant", …}], "tie": false}
# kto also reads single answers: {"prompt": …, "completion": …, "label": true}
#
# In memory a batch of b pairs has 2b rows, all chosen answers first, then all rejected ones in the
# same order: .view(2, -1) takes them apart again.


def load_data(args, policy, tokenizer):
    """(pairs, prompts, scorers): prompts to answer at evaluations, and what scores the answers."""
    first = next(read_jsonl(args.pairs[0], flag="--pairs"), {})
    thumbs = args.loss_type == "kto" and "label" in first  # the first row decides for all
    check = check_thumb if thumbs else common.check_pair
    pairs = prompting.load_pairs(args, policy, tokenizer, False, check)
    # one row per pair, the prompt once, if that is exact for this model
    pairs.shared = not thumbs and can_share(policy, pairs, pad_rows)
    shown = (pairs.eval if len(pairs.eval) else pairs.train)[0]
    shown = [{"prompt": pairs.prompts[shown].tolist()}]
    return pairs, *prompting.prompts_to_answer(args, policy, tokenizer, shown)


# ---- 6. the models ----


def load_models(args, run):
    """(policy, tokenizer, load_reference): the policy is trained; its reference is itself before
    step one. load_reference() is for the KL of sampled answers: with LoRA the policy, whose adapter
    can be off; else a frozen copy in main memory, read at the first evaluation after step 0."""
    tokenizer = common.load_tokenizer(args.model, today=args.date)
    policy = common.load_policy(args.model, run.dtype, run.device, lora_rank=args.lora_rank)

    @functools.cache
    def load_reference():
        if args.lora_rank:
            return policy
        return common.load_policy(args.model, run.dtype, "cpu", trainable=False)

    return policy, tokenizer, load_reference


def reference_logps(args, run, policy, pairs, indices, pad):
    """(2, n) fp32: log π of both answers of the pairs in `indices`; 0 elsewhere, for simpo."""
    if args.loss_type == "simpo":
        return torch.zeros(2, len(pairs))
    rows_of = functools.partial(batch_rows, pairs, pad_id=pad)
    return summed_logps(run, policy, pairs, indices, rows_of, 2, pairs.shared)


def unrelated_logps(run, policy, pairs, indices, pad):
    """(n,) fp32, 0 elsewhere: log π(answer of row i + n/2 | prompt of row i)."""
    n, room = len(pairs), int(pairs.lengths().max())

    def rows_of(part):
        sides = [(pairs.chosen[i], pairs.rejected[i]) for i in (part + n // 2) % n]
        answers = [chosen if len(chosen) else rejected for chosen, rejected in sides]
        prompts = [pairs.prompts[i][len(ids) - room :] for i, ids in zip(part, answers)]
        return pad_rows(prompts, answers, pad)

    return summed_logps(run, policy, pairs, indices, rows_of)[0]


@torch.no_grad()
def summed_logps(run, policy, pairs, indices, rows_of, sides=1, shared=False):
    """(sides, n) sums over the answers of rows_of(pairs of a forward), split over the ranks."""
    logps = torch.zeros(sides, len(pairs))
    for part in progress(run.micro_batches(indices, pairs.columns()), "reference", delay=3):
        rows = (x.to(policy.device) for x in rows_of(part))
        logps[:, part] = token_logps(policy, *rows, shared=shared).sum(1).view(sides, -1).cpu()
    add_up([logps])
    return logps


def kl_baseline(args, run, policy, pairs, ref_unrelated_logps, indices, pad):
    """KTO's k = max(0, mean of log π/π_ref of unrelated answers), in nats; 0 for other losses."""
    if args.loss_type != "kto" or not len(indices):
        return 0.0
    logps = unrelated_logps(run, policy, pairs, indices, pad)
    return (logps - ref_unrelated_logps)[indices].mean().clamp(min=0).item()


# ---- 7. preflight ----


def preflight(args, run, policy, tokenizer, pairs):
    """Log-probs = the model's; the reference = the policy; the loss at its value for z = 0; one
    row, marked. On one micro-batch, before the reference pass over all pairs."""
    first_pairs, pad, flag = pairs.train[:64], pad_id(tokenizer), f"--model {args.model}"
    longest_pairs = first_pairs[(-pairs.lengths()[first_pairs]).argsort()[:4]]
    ids, attention_mask, _ = batch_rows(pairs, longest_pairs, pad)
    identities.check_head(policy, ids.to(policy.device), attention_mask.to(policy.device), flag)
    # on every rank the same one
    part = common.micro_batches(first_pairs, pairs.columns(), args.micro_tokens)[0]
    ref_logps = reference_logps(args, run, policy, pairs, part, pad)
    with torch.no_grad():
        stats = forward(args, policy, pairs, part, pad, ref_logps)[1]
    loss = stats.losses.mean().item()
    if args.loss_type == "simpo":
        print(f"preflight  loss before step one: {loss:.4f} (simpo has no reference)")
    else:
        starts = {"hinge": 1.0, "ipo": 1 / (4 * args.beta**2), "kto": 0.5}
        expected = starts.get(args.loss_type, math.log(2))
        # rounding adds up with the root of an answer's tokens, another model with their number
        gaps = (stats.logps - ref_logps[:, part]).abs() / stats.tokens.clamp(min=1).sqrt()
        wrong = f"{flag}: the reference is not the policy"
        identities.check_gaps(policy, "policy and reference, per √token", gaps, wrong)
        bound = 1e-4 if run.dtype == torch.float32 else 1e-2
        bound *= max(1, expected, args.beta)  # β multiplies the rounding, too
        identities.identity("loss before step one", loss, expected, bound, flag)
        margin = (stats.rewards[0] - stats.rewards[1]).mean().item()
        identities.identity("implicit rewards", margin, 0.0, 10 * bound, flag)
    rows = batch_rows(pairs, first_pairs[:1], pad)
    identities.show_row(tokenizer, rows, pairs.name(first_pairs[:1]))


# ---- 8. the loop ----


@dataclass
class PairStats:
    """What the log needs of b pairs, float64; sides are chosen and rejected, one that nobody gave
    has 0 tokens."""

    losses: torch.Tensor  # (b,)
    rewards: torch.Tensor  # (2, b)
    logps: torch.Tensor  # (2, b)
    tokens: torch.Tensor  # (2, b)


def forward(args, policy, pairs, part, pad, ref_logps, baseline=0.0):
    """Steps (3) and (4) for the pairs in `part`: (losses (b,), `PairStats`, log π(chosen) (b,))."""
    ref = ref_logps[:, part].to(policy.device)  # (2, b); 0 for simpo
    # (3) policy: log-probs of both answers, in one forward
    rows = (x.to(policy.device) for x in batch_rows(pairs, part, pad))
    logps = token_logps(policy, *rows, shared=pairs.shared).sum(1).view(2, -1)
    # (4) loss and implicit rewards
    sides = pairs.chosen, pairs.rejected
    lengths = torch.tensor([[len(side[i]) for i in part] for side in sides]).to(logps)  # (2, b)
    losses, *rewards = dpo_loss(
        *logps, *ref, args.beta, args.loss_type, args.label_smoothing,
        chosen_lengths=lengths[0], rejected_lengths=lengths[1],
        simpo_gamma=args.simpo_gamma, baseline=baseline,
    )  # fmt: skip
    columns = losses, torch.stack(rewards), logps, lengths
    return losses, PairStats(*(x.detach().cpu().double() for x in columns)), logps[0]


def means(batch_stats, beta, votes):
    """Means over all pairs of an update or evaluation, those of all ranks; TRL's names.

    A mean over one side counts the pairs that have this side (all, but for KTO's single answers).
    votes: `Pairs.votes`, what the interval of the accuracy rests on.
    """
    columns = zip(*(vars(stats).values() for stats in gather(batch_stats)))
    stats = PairStats(*(torch.cat(column, dim=-1) for column in columns))
    given, row = stats.tokens > 0, {"pair_loss": stats.losses.mean().item()}  # (2, n)
    for i, side in enumerate(("chosen", "rejected")):
        row[f"rewards/{side}"] = stats.rewards[i][given[i]].mean().item()
        row[f"logps/{side}"] = stats.logps[i][given[i]].mean().item()
    margins = stats.rewards[0] - stats.rewards[1]
    # at the start the two differ by rounding only, which counts as equal: half right
    equal = margins.abs() <= 1e-6 * beta * stats.logps.sum(0).abs()
    right = ((margins > 0) & ~equal).double() + 0.5 * equal
    low, high = wilson(right.mean().item() * votes, votes)
    return row | {
        "rewards/margins": row["rewards/chosen"] - row["rewards/rejected"],
        "rewards/accuracies": right.mean().item(),
        "rewards/accuracies_low": low,
        "rewards/accuracies_high": high,
        "rewards/std": stats.rewards[given].std().item(),
        "nll": -(stats.logps[0].sum() / stats.tokens[0].sum().clamp(min=1)).item(),  # per token
    }


@torch.no_grad()
def evaluate(args, run, models, pairs, refs, prompts, scorers):
    """(metrics, samples): held-out loss and accuracy; sample answers, their score and their KL."""
    policy, tokenizer, load_reference = models
    metrics, pad = {}, pad_id(tokenizer)
    baseline = kl_baseline(args, run, policy, pairs, refs.get("unrelated"), pairs.eval, pad)
    batch_stats = [
        forward(args, policy, pairs, part, pad, refs["reference"], baseline)[1]
        for part in run.micro_batches(pairs.eval, pairs.columns())
    ]
    if len(pairs.eval):
        values = means(batch_stats, args.beta, pairs.votes(pairs.eval))
        loss = {"loss": values.pop("pair_loss"), "n": len(pairs.eval)}  # without an NLL term
        metrics = {f"eval/{key}": value for key, value in (loss | values).items()}
    scores, samples, answers = prompting.answer(args, policy, tokenizer, prompts, scorers)
    if not args.prompts or answers is None:  # a pair's own prompt, to be shown
        return metrics, samples
    if args.loss_type != "simpo" and args.eval_temperature:
        scores["val/kl"] = kl_to_reference(args, run, policy, load_reference, answers, pad)
    return metrics | scores, samples


def kl_to_reference(args, run, policy, load_reference, answers, pad):
    """Mean over answers of Σ_t k1 at --eval-temperature, in nats."""
    if run.step == 0:
        return 0.0
    prompts, responses, total = answers.prompt_ids, answers.response_ids, 0.0
    reference = load_reference().to(policy.device)
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    for part in run.micro_batches(range(len(prompts)), lengths):
        rows = pad_rows([prompts[i] for i in part], [responses[i] for i in part], pad)
        rows = [*(x.to(policy.device) for x in rows), args.eval_temperature]
        with adapter_off(reference):
            ref_logps = token_logps(reference, *rows)
        total += (token_logps(policy, *rows) - ref_logps).sum().item()
    if reference is not policy:
        reference.to("cpu")  # training takes no more of a GPU than without it
    return all_sum(total) / len(prompts)


def main(argv=None):
    args = parse_args(argv)
    inputs = [args.model, *args.pairs, *args.eval_pairs, args.prompts, args.examples]
    inputs += [args.counterfactual_augment]
    run = runs.Run("dpo", args, inputs, SHOW, HEADLINE)
    models = policy, tokenizer, _ = load_models(args, run)
    # (1) read pairs; render the prompt; mark the answer tokens
    pairs, prompts, scorers = load_data(args, policy, tokenizer)
    n, columns, pad = len(pairs.train), pairs.columns(), pad_id(tokenizer)
    run.plan(n, "pairs")
    run.state, lr = {"policy": policy}, args.lr or runs.default_lr(policy, RATES)
    run.start(policy, tokenizer, lr, longest=columns.max(), encoded=pairs.ids())
    if run.step == 0:  # a resumed run has its reference from the checkpoint
        preflight(args, run, policy, tokenizer, pairs)
        # (2) reference: log-probs of both answers under the frozen start, once
        every = np.arange(len(pairs))
        run.state["reference"] = reference_logps(args, run, policy, pairs, every, pad)
        if args.loss_type == "kto":
            run.state["unrelated"] = unrelated_logps(run, policy, pairs, every, pad)
    evaluated = models, pairs, run.state, prompts, scorers
    ref_logps, ref_unrelated_logps = map(run.state.get, ("reference", "unrelated"))
    if run.step == 0:
        run.evaluation(*evaluate(args, run, *evaluated))

    for step in run.steps():
        batch, epoch = batch_indices(n, args.batch_size, args.seed, step)
        batch, batch_stats = pairs.train[batch], []
        chosen_tokens = max(1, int(pairs.chosen.lengths()[batch].sum()))  # of the whole step
        baseline = kl_baseline(args, run, policy, pairs, ref_unrelated_logps, batch, pad)
        for part in run.micro_batches(batch, columns):
            # (3) policy: log-probs of both answers: `forward`
            # (4) loss and implicit rewards: a sum over this part, divided by the whole step's count
            losses, stats, chosen = forward(args, policy, pairs, part, pad, ref_logps, baseline)
            loss = losses.sum() / len(batch) - args.nll_coef * chosen.sum() / chosen_tokens
            # (5) update: backward, clip the gradient, step
            run.backward(loss)
            batch_stats.append(stats)
        update = run.update(lambda batch=batch: pairs.name(batch))
        tokens = int(pairs.tokens()[batch].sum())
        metrics = means(batch_stats, args.beta, pairs.votes(batch))
        run.log({"epoch": epoch, **metrics, **update, "tokens": tokens})
        # (6) now and then: held-out loss and accuracy, sample answers and their score
        if run.evaluates(step):
            run.evaluation(*evaluate(args, run, *evaluated))

    # ---- 9. save ----
    following = f"python evaluate.py compare --model {args.model} {args.out}"
    if args.prompts != "data/prompts.jsonl":  # pairs of your own
        own = f"--prompts {args.prompts or 'YOUR_PROMPTS.jsonl'} --gold {args.gold or 'none'}"
        following += f" {own} --reward-model YOUR_REWARD_MODEL"
    return run.finish(following)


if __name__ == "__main__":
    command(main)
