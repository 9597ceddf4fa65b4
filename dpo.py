"""dpo.py: preference pairs in, an aligned model out; no reward model and no sampling.

Objective    minimise −E log σ(β·h) − c·(mean log π of a chosen token),
             h = log(π/π_ref)(chosen) − log(π/π_ref)(rejected); π is the policy, which is trained,
             π_ref the policy before step one; c = --nll-coef (default: 1 for sigmoid; paper: 0)
Algorithm    (1) read pairs; render the prompt; mark the answer tokens
             (2) reference: log-probs of both answers under the frozen start, once
             (3) policy: log-probs of both answers
             (4) loss and implicit rewards
             (5) update: backward, clip the gradient, step
             (6) now and then: held-out loss and accuracy, sample answers and their score
Conventions  answer log-probs are sums over tokens, end token included; the prompt is masked;
             an answer's implicit reward = β·log(π/π_ref); margin = chosen − rejected reward;
             logged: pair_loss, the mean over pairs, and loss = pair_loss + c·nll;
             ipo divides log-probs by the answer's length, as TRL does (the paper does not)
Left out     1. any other reference   2. online DPO   3. packing   4. ORPO and other losses
Run          python dpo.py --pairs data/prefs.jsonl
             python dpo.py --model Qwen/Qwen2.5-0.5B-Instruct --pairs mine.jsonl --out runs/dpo
             torchrun --nproc-per-node 8 dpo.py --fsdp --model Qwen/Qwen2.5-7B-Instruct
Writes       a model folder, args.json, metrics.jsonl, samples.jsonl, checkpoint/
Reference    Rafailov et al. 2023, arXiv 2305.18290, eq. 7; cDPO: Mitchell 2023; robust: 2403.00409;
             IPO: 2310.12036; hinge: 2305.10425; SimPO: 2405.14734; NLL: 2404.19733; KTO: 2402.01306
Axes         n all pairs, b pairs of one forward, B pairs given to the loss, T tokens
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

import common  # text → tokens → log-probs
from common import at_least_fp32, batch_indices, pad_id, pad_rows, token_logps
from parts import identities, prompting, runs  # preflight; sample answers; the run of a trainer
from parts.files import command, no_effect, number, read_jsonl, shell_line  # errors and flags
from parts.kto import kl_baseline, unrelated_logps  # k in the legend below; 0 unless kto
from parts.lora import adapter_off  # a policy without its adapter is what it started from
from parts.means import wilson  # 95 % interval of a share
from parts.pairs import batch_rows  # pairs → ids, mask of all tokens, mask of the answers'
from parts.parallel import add_up, all_sum, gather  # over all ranks
from parts.rows import check_thumb  # a row of prompt, completion, label
from parts.shared_prompt import can_share  # may a pair's prompt pass once for both answers?

# default --lr: below 100 M parameters (tried on the bundled base, not swept), above (at 5e-5 the
# held-out loss of SmolLM2 rises: reports/real-model.md), with LoRA
RATES = 3e-4, 1e-5, 2e-4
SHOW = ("pair_loss", "rewards/accuracies", "rewards/margins", "lr", "grad_norm")  # on the bar
HEADLINE = ("eval/loss", "eval/rewards/accuracies", "val/gold")  # printed at each evaluation
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
    n            chosen_lengths, rejected_lengths            (B,) for ipo, sigmoid_norm, simpo, kto;
                 in kto 0 marks a missing side, whose log-probs are 0
    k            baseline         kto only: KL(π‖π_ref) in nats, ≥ 0, estimated at each step
    β, γ, ε      beta, simpo_gamma, label_smoothing   ε in [0, ½); sigmoid and robust only
    returns      losses, chosen_rewards, rejected_rewards    (B,) reward = β·log(π/π_ref), detached

    With h_c and h_r the log-ratios of the two sides and z = β·(h_c − h_r):
      sigmoid       −(1−ε) log σ(z) − ε log σ(−z)                      ε > 0 is cDPO
      robust        (−(1−ε) log σ(z) + ε log σ(−z)) / (1−2ε)
      hinge         max(0, 1 − z)
      ipo           (h_c/n_c − h_r/n_r − 1/(2β))²
      sigmoid_norm  −log σ(β·(h_c/n_c − h_r/n_r))
      simpo         −log σ(β·(log π_c/n_c − log π_r/n_r) − γ)
      kto           mean over the sides present of 1 − σ(β·(h_c − k)) and 1 − σ(β·(k − h_r))

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
    chosen_rewards, rejected_rewards = beta * chosen_logratios, beta * rejected_logratios  # (B,)
    z = chosen_rewards - rejected_rewards  # (B,)
    if loss_type in ("ipo", "sigmoid_norm", "simpo"):  # h_c/n_c − h_r/n_r; simpo's reference is 0
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
    elif loss_type == "simpo":
        losses = -F.logsigmoid(beta * per_token - simpo_gamma)
        chosen_rewards = chosen_rewards / chosen_lengths  # β times the mean log-prob
        rejected_rewards = rejected_rewards / rejected_lengths
    elif loss_type == "kto":
        chosen_losses = 1 - torch.sigmoid(beta * (chosen_logratios - baseline))
        rejected_losses = 1 - torch.sigmoid(beta * (baseline - rejected_logratios))
        is_present = torch.stack([chosen_lengths, rejected_lengths]) > 0  # (2, B)
        side_losses = torch.stack([chosen_losses, rejected_losses])  # (2, B)
        losses = (side_losses * is_present).sum(0) / is_present.sum(0)
    else:
        raise ValueError(f"loss_type is {loss_type!r}; expected one of {LOSS_TYPES}")
    # (B,) each; the loop takes the mean
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
    prompting.add_pair_arguments(parser)  # --eval-pairs, --eval-fraction, --counterfactual-augment
    prompting.add_answer_arguments(parser)  # --prompts, --gold, --examples, --eval-temperature …
    parser.add_run_arguments("runs/dpo", RATES)  # of all trainers: --out, --lr, --seed, --date …
    args = parser.parse_args(argv)
    simpo = args.loss_type == "simpo"
    # a flag on the command line that nothing would read is an error
    parser.without_effect("--simpo-gamma", not simpo, "only --loss-type simpo has a target margin")
    parser.without_effect("--eval-fraction", args.eval_pairs, prompting.HELD_OUT)  # a sentence
    args.beta = args.beta or (2.0 if simpo else 0.1)
    if args.nll_coef is None:
        args.nll_coef = 1.0 if args.loss_type == "sigmoid" else 0.0
    if args.label_smoothing and args.loss_type not in ("sigmoid", "robust"):
        reason = f"--loss-type {args.loss_type} smooths no labels, sigmoid and robust do"
        raise no_effect("--label-smoothing", reason)
    # defaults that depend on the data: also of --gold, --examples and --eval-temperature
    prompting.default_prompts(args, args.pairs)
    return args


# ---- 5. the data ----
# {"prompt": [{"role": "user", "content": "Assess this candidate. …"}],
#  "chosen": [{"role": "assistant", …}], "rejected": [{"role": "assistant", …}], "tie": false}
# kto also reads single answers: {"prompt": …, "completion": …, "label": true}, a pair with one side


def load_data(args, policy, tokenizer):
    """(pairs, prompts, scorers): pairs.train and pairs.eval are row numbers; evaluations answer the
    prompts, [{"prompt": …}], and score the answers by the scorers, [(metric, flag, function)]."""
    first_row = next(read_jsonl(args.pairs[0], flag="--pairs"), {})
    single = args.loss_type == "kto" and "label" in first_row  # the first row decides for all
    check = check_thumb if single else common.check_pair  # a single answer: the other side None
    pairs = prompting.load_pairs(args, policy, tokenizer, keep_ties=False, check=check)
    # compute the prompt of a pair once for both answers, if that is exact for this model
    pairs.shared = not single and can_share(policy, pairs, pad_rows)  # tries the longest pair
    shown_pair = (pairs.eval if len(pairs.eval) else pairs.train)[0]
    one_prompt = [{"prompt": pairs.prompts[shown_pair].tolist()}]  # ids; if no --prompts are given
    return pairs, *prompting.prompts_to_answer(args, policy, tokenizer, one_prompt)


# ---- 6. the models ----


def load_models(args, run):
    """(policy, tokenizer, load_reference): before step one the policy is its own reference, and
    gives the log-probs of the pairs. load_reference() is for answers sampled later: with LoRA the
    policy, whose adapter can be off, else a frozen copy in main memory, read by the first call."""
    tokenizer = common.load_tokenizer(args.model, today=args.date)
    policy = common.load_policy(args.model, run.dtype, run.device, lora_rank=args.lora_rank)

    @functools.cache
    def load_reference():
        if args.lora_rank:
            return policy
        return common.load_policy(args.model, run.dtype, "cpu", trainable=False)

    return policy, tokenizer, load_reference


def pair_logps(policy, pairs, part, pad):
    """(2, b) log π of the chosen and the rejected answers of `part`, summed over their tokens."""
    rows = (x.to(policy.device) for x in batch_rows(pairs, part, pad))  # (2b, T) each
    logps = token_logps(policy, *rows, shared=pairs.shared)  # (2b, T), 0 outside the answers
    return logps.sum(1).view(2, -1)  # all chosen rows come first


@torch.no_grad()
def reference_logps(args, run, policy, pairs, indices, pad):
    """(2, n) fp32: `pair_logps` of the pairs in `indices`, 0 for others; for simpo all are 0."""
    logps = torch.zeros(2, len(pairs))
    if args.loss_type != "simpo":
        # this rank's share
        for part in run.micro_batches(indices, pairs.columns(), name="reference"):
            logps[:, part] = pair_logps(policy, pairs, part, pad).cpu()
        add_up([logps])  # over the ranks
    return logps


# ---- 7. preflight ----


def preflight(args, run, policy, tokenizer, pairs):
    """Log-probs = the model's; the reference = the policy; the loss at its value for z = 0; one
    row, marked. On one micro-batch, before the reference pass over all pairs."""
    pad, flag = pad_id(tokenizer), f"--model {args.model}"
    first_pairs = pairs.train[:64]
    longest_pairs = first_pairs[(-pairs.lengths()[first_pairs]).argsort()[:4]]  # by longer row
    ids, attention_mask, _ = batch_rows(pairs, longest_pairs, pad)
    # `token_logps` against the model's own logits
    identities.check_head(policy, ids.to(policy.device), attention_mask.to(policy.device), flag)
    # the same part on every rank
    part = common.micro_batches(first_pairs, pairs.columns(), args.micro_tokens)[0]
    ref_logps = reference_logps(args, run, policy, pairs, part, pad)
    with torch.no_grad():
        stats = forward(args, policy, pairs, part, pad, ref_logps).on_cpu()
    loss = stats.losses.mean().item()
    if args.loss_type == "simpo":
        print(f"preflight  loss before step one: {loss:.4f} (simpo has no reference)")
    else:
        starts = {"hinge": 1.0, "ipo": 1 / (4 * args.beta**2), "kto": 0.5}
        expected = starts.get(args.loss_type, math.log(2))
        # over an answer of n tokens rounding grows as √n, a real gap as n
        gaps = (stats.logps - ref_logps[:, part]).abs() / stats.tokens.clamp(min=1).sqrt()  # (2, b)
        wrong = f"{flag}: the reference is not the policy"
        identities.check_gaps(policy, "policy and reference, per √token", gaps, wrong)
        bound = 1e-4 if run.dtype == torch.float32 else 1e-2
        bound *= max(1, expected, args.beta)  # β multiplies the rounding, too
        identities.identity("loss before step one", loss, expected, bound, flag)
        margin = (stats.rewards[0] - stats.rewards[1]).mean().item()
        identities.identity("implicit rewards", margin, 0.0, 10 * bound, flag)
    rows = batch_rows(pairs, first_pairs[:1], pad)
    rows = [x[rows[2].any(1)] for x in rows]  # of a single answer the side that is present
    identities.show_row(tokenizer, rows, pairs.name(first_pairs[:1]))


# ---- 8. the loop ----


@dataclass
class PairStats:
    """A forward of b pairs; [0] is chosen, [1] rejected; a missing side (kto) has 0 tokens."""

    losses: torch.Tensor  # (b,)
    rewards: torch.Tensor  # (2, b) without gradient
    logps: torch.Tensor  # (2, b) log π, summed over the answer's tokens
    tokens: torch.Tensor  # (2, b) of the answers

    def on_cpu(self):
        """The same for the log: float64 on the CPU, without gradient."""
        return PairStats(**{name: x.detach().cpu().double() for name, x in vars(self).items()})


def forward(args, policy, pairs, part, pad, ref_logps, baseline=0.0):
    """Steps (3) and (4) for the pairs in `part`: their `PairStats`, with gradient."""
    logps = pair_logps(policy, pairs, part, pad)  # (2, b)
    ref = ref_logps[:, part].to(policy.device)  # (2, b); 0 for simpo
    sides = pairs.chosen, pairs.rejected
    lengths = torch.tensor([[len(side[i]) for i in part] for side in sides]).to(logps)  # (2, b)
    losses, *rewards = dpo_loss(
        *logps, *ref, args.beta, args.loss_type, args.label_smoothing,
        chosen_lengths=lengths[0], rejected_lengths=lengths[1],
        simpo_gamma=args.simpo_gamma, baseline=baseline,
    )  # fmt: skip
    return PairStats(losses=losses, rewards=torch.stack(rewards), logps=logps, tokens=lengths)


def means(batch_stats, beta, votes):
    """Means over all pairs of an update or evaluation, of all ranks, under TRL's names.

    A mean over one side counts the pairs that have it. To the accuracy, a single answer (kto) has
    its reward as margin, negated if rejected; rewards/margins is a difference of two means.
    votes: n of the accuracy's interval; a pair and its copies under other names are one vote.
    """
    parts = [vars(stats) for stats in gather(batch_stats)]
    stats = PairStats(**{name: torch.cat([x[name] for x in parts], dim=-1) for name in parts[0]})
    is_present = stats.tokens > 0  # (2, n)
    rewards, logps = (
        torch.where(is_present, x, 0.0).sum(1) / is_present.sum(1)  # (2,) of chosen, of rejected
        for x in (stats.rewards, stats.logps)
    )
    margins = stats.rewards[0] - stats.rewards[1]  # (n,)
    # at the start the two rewards differ by rounding only, which counts as equal: half right
    equal = margins.abs() <= 1e-6 * beta * stats.logps.sum(0).abs()
    right = ((margins > 0) & ~equal).double() + 0.5 * equal
    low, high = wilson(right.mean().item() * votes, votes)
    return {
        "pair_loss": stats.losses.mean().item(),
        "rewards/chosen": rewards[0].item(), "rewards/rejected": rewards[1].item(),
        "logps/chosen": logps[0].item(), "logps/rejected": logps[1].item(),
        "rewards/margins": (rewards[0] - rewards[1]).item(),
        "rewards/accuracies": right.mean().item(),
        "rewards/accuracies_low": low, "rewards/accuracies_high": high,
        "rewards/std": stats.rewards[is_present].std().item(),
        "nll": -(stats.logps[0].sum() / stats.tokens[0].sum().clamp(min=1)).item(),  # per token
    }  # fmt: skip


@torch.no_grad()
def evaluate(args, run, models, pairs, refs, prompts, scorers):
    """(metrics, samples): held-out loss and accuracy; sample answers, their score and their KL.
    refs: {"logps": `reference_logps`, "unrelated_logps": for kto `unrelated_logps`}"""
    policy, tokenizer, load_reference = models
    metrics, pad = {}, pad_id(tokenizer)
    baseline = kl_baseline(args, run, policy, pairs, refs, pairs.eval, pad)
    batch_stats = [
        forward(args, policy, pairs, part, pad, refs["logps"], baseline).on_cpu()
        for part in run.micro_batches(pairs.eval, pairs.columns())
    ]
    if len(pairs.eval):
        values = means(batch_stats, args.beta, pairs.votes(pairs.eval))
        loss = {"loss": values.pop("pair_loss"), "n": len(pairs.eval)}  # without the NLL term
        metrics = {f"eval/{key}": value for key, value in (loss | values).items()}
    answer_metrics, samples, answers = prompting.answer(args, policy, tokenizer, prompts, scorers)
    if not args.prompts or answers is None:  # only shown; None: this model cannot be sampled
        return metrics, samples
    if args.loss_type != "simpo" and args.eval_temperature:  # greedy answers estimate no KL
        kl = kl_to_reference(args, run, policy, load_reference, answers, pad)
        answer_metrics["val/kl"] = kl
    return metrics | answer_metrics, samples


def kl_to_reference(args, run, policy, load_reference, answers, pad):
    """Mean over answers of Σ_t log(π/π_ref) of their tokens, at --eval-temperature, in nats."""
    if run.step == 0:
        return 0.0
    prompts, responses = answers.prompt_ids, answers.response_ids
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    reference, total = load_reference().to(policy.device), 0.0
    for part in run.micro_batches(range(len(prompts)), lengths):
        rows = pad_rows([prompts[i] for i in part], [responses[i] for i in part], pad)
        rows = [x.to(policy.device) for x in rows]
        with adapter_off(reference):
            ref_logps = token_logps(reference, *rows, args.eval_temperature)
        logps = token_logps(policy, *rows, args.eval_temperature)
        total += (logps - ref_logps).sum().item()
    if reference is not policy:
        reference.to("cpu")  # training takes no more of a GPU than without it
    return all_sum(total) / len(prompts)  # each rank has all answers, and read its share


def main(argv=None):
    args = parse_args(argv)
    inputs = [args.model, *args.pairs, *args.eval_pairs, args.prompts, args.examples]
    inputs += [args.counterfactual_augment]
    run = runs.Run("dpo", args, inputs, SHOW, HEADLINE)
    models = load_models(args, run)
    policy, tokenizer, _ = models
    # (1) read pairs; render the prompt; mark the answer tokens
    pairs, prompts, scorers = load_data(args, policy, tokenizer)
    pad, columns = pad_id(tokenizer), pairs.columns()  # (n,) tokens that a pair adds to a forward
    run.plan(len(pairs.train), "pairs")
    run.state = {"policy": policy}  # what checkpoints hold; run.start hashes the ids for --resume
    lr = args.lr or runs.default_lr(policy, RATES)
    run.start(policy, tokenizer, lr, longest=columns.max(), encoded=pairs.ids())
    if run.step == 0:  # a resumed run has its reference from the checkpoint
        preflight(args, run, policy, tokenizer, pairs)
        # (2) reference: log-probs of both answers under the frozen start, once
        all_pairs = np.arange(len(pairs))
        run.state["reference"] = reference_logps(args, run, policy, pairs, all_pairs, pad)
        if args.loss_type == "kto":
            run.state["unrelated"] = unrelated_logps(run, policy, pairs, all_pairs, pad)
    refs = {"logps": run.state["reference"], "unrelated_logps": run.state.get("unrelated")}
    if run.step == 0:
        run.evaluation(*evaluate(args, run, models, pairs, refs, prompts, scorers))

    for step in run.steps():
        places, epoch = batch_indices(len(pairs.train), args.batch_size, args.seed, step)
        batch, batch_stats = pairs.train[places], []
        chosen_tokens = max(1, int(pairs.chosen.lengths()[batch].sum()))  # of the whole step
        baseline = kl_baseline(args, run, policy, pairs, refs, batch, pad)  # 0 unless kto
        for part in run.micro_batches(batch, columns):
            # (3) policy: log-probs of both answers: `forward`
            # (4) loss and implicit rewards: a sum over this part, divided by the whole step's count
            stats = forward(args, policy, pairs, part, pad, refs["logps"], baseline)
            pair_loss = stats.losses.sum() / len(batch)
            nll = -stats.logps[0].sum() / chosen_tokens
            # (5) update: backward, clip the gradient, step
            run.backward(pair_loss + args.nll_coef * nll)  # run.update adds up over the ranks
            batch_stats.append(stats.on_cpu())
        update = run.update(lambda batch=batch: pairs.name(batch))  # names rows in an error
        metrics = means(batch_stats, args.beta, pairs.votes(batch))
        tokens = int(pairs.tokens()[batch].sum())  # of both rows, so each prompt twice
        run.log({"epoch": epoch, "n": len(batch), **metrics, **update, "tokens": tokens})
        # (6) now and then: held-out loss and accuracy, sample answers and their score
        if run.evaluates(step):
            run.evaluation(*evaluate(args, run, models, pairs, refs, prompts, scorers))

    # ---- 9. save ----
    words = ["evaluate.py", "compare", "--model", args.model, args.out]
    if args.prompts != "data/prompts.jsonl":  # pairs of your own
        words += ["--prompts", args.prompts or "YOUR_PROMPTS.jsonl", "--gold", args.gold or "none"]
        words += ["--reward-model", "YOUR_REWARD_MODEL"]
    return run.finish(shell_line(*words))


if __name__ == "__main__":
    command(main)
