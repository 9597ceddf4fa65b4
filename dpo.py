"""dpo.py: preference pairs in, an aligned model out; no reward model and no sampling.

Objective    minimise −E log σ(β·h),   h = log(π/π_ref)(chosen) − log(π/π_ref)(rejected)
Algorithm    (1) read pairs; render the prompt; mark the answer tokens
             (2) reference: log-probs of both answers under the frozen start, once, kept on disk
             (3) policy: log-probs of both answers
             (4) loss and implicit rewards
             (5) update: backward, clip the gradient, step
             (6) now and then: held-out loss and accuracy, sample answers and their score
Conventions  answer log-probs are sums over tokens, end token included; loss is the pair mean;
             reward = β·log(π/π_ref), so −log σ(logged margin) is the loss; the prompt is masked
Left out     1. a moving reference   2. online DPO   3. packing   4. KTO, ORPO and the other relatives not in the table
Run          python dpo.py --pairs data/prefs.jsonl
             python dpo.py --model Qwen/Qwen2.5-0.5B-Instruct --pairs mine.jsonl --out runs/dpo
             torchrun --nproc-per-node 8 dpo.py --fsdp --model Qwen/Qwen2.5-7B-Instruct --pairs mine.jsonl
Writes       a model folder, args.json, metrics.jsonl, samples.jsonl, checkpoint/
Reference    Rafailov et al. 2023, arXiv 2305.18290, eq. 7; cDPO: Mitchell 2023; robust: 2403.00409; IPO: 2310.12036;
             hinge: SLiC 2305.10425; SimPO: 2405.14734; the NLL term: RPO 2404.19733
Axes         B pairs, T tokens, V vocabulary
"""

import argparse
import hashlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import common
from common import UserError, at_least_fp32, pad_rows, sample, token_logps

# learning rates: below 100 M parameters (worked on the bundled base, not swept), full weights, LoRA
LR_SMALL, LR_FULL, LR_LORA = 3e-4, 1e-6, 1e-5

LOSS_TYPES = ("sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "simpo")


# ---- 3. the math ----


def dpo_loss(
    policy_chosen_logps, policy_rejected_logps, ref_chosen_logps, ref_rejected_logps, beta=0.1, loss_type="sigmoid",
    label_smoothing=0.0, chosen_lengths=None, rejected_lengths=None, simpo_gamma=1.0,
):  # fmt: skip
    """L = −log σ(β·h),  h = log(π/π_ref)(chosen) − log(π/π_ref)(rejected)      [DPO eq. 7]

    log π        policy_chosen_logps, policy_rejected_logps  (B,) sum over response tokens
    log π_ref    ref_chosen_logps, ref_rejected_logps        (B,) the same, no gradient; None for simpo
    n            chosen_lengths, rejected_lengths            (B,) response tokens; for ipo, sigmoid_norm, simpo
    ε            label_smoothing   in [0, ½), or (B,) in [0, ½] (½: a tie); sigmoid and robust alone have it
    returns      losses, chosen_rewards, rejected_rewards    (B,) reward = β·log(π/π_ref), detached

    With h_c and h_r the log-ratios of the two sides and z = β·(h_c − h_r):
      sigmoid       −(1−ε) log σ(z) − ε log σ(−z)                 robust   (−(1−ε) log σ(z) + ε log σ(−z)) / (1−2ε)
      hinge         max(0, 1 − z)                                 ipo      (h_c/n_c − h_r/n_r − 1/(2β))²
      sigmoid_norm  −log σ(β·(h_c/n_c − h_r/n_r))                 simpo    −log σ(β·(log π_c/n_c − log π_r/n_r) − γ)

    By hand: β = 0.5, h = (−5 + 6) − (−7 + 6) = 2, the margin is 1, L = log(1 + e⁻¹) = 0.3133.
    >>> pair = [torch.tensor([x]) for x in (-5.0, -7.0, -6.0, -6.0)]
    >>> losses, chosen_rewards, rejected_rewards = dpo_loss(*pair, beta=0.5)
    >>> round(losses.item(), 4), (chosen_rewards - rejected_rewards).item()
    (0.3133, 1.0)
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type {loss_type!r}: expected one of {', '.join(LOSS_TYPES)}")
    if not beta > 0:
        raise ValueError(f"beta {beta}: expected a number above 0")
    like = at_least_fp32(policy_chosen_logps)
    epsilon = torch.as_tensor(label_smoothing, dtype=like.dtype, device=like.device)  # () or (B,)
    limit = (epsilon <= 0.5).all() if epsilon.ndim else epsilon < 0.5
    if not (limit and (epsilon >= 0).all()) or (loss_type == "robust" and (epsilon == 0.5).any()):
        raise ValueError(f"label_smoothing {label_smoothing}: expected a number in [0, 0.5)")
    if loss_type not in ("sigmoid", "robust") and (epsilon > 0).any():
        raise ValueError(f"label_smoothing {label_smoothing}: {loss_type} has none")
    common.same_shape(
        policy_chosen_logps=policy_chosen_logps, policy_rejected_logps=policy_rejected_logps,
        ref_chosen_logps=ref_chosen_logps, ref_rejected_logps=ref_rejected_logps, chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths, label_smoothing=epsilon if epsilon.ndim else None,
    )  # fmt: skip
    chosen_logratios = at_least_fp32(policy_chosen_logps)  # (B,)
    rejected_logratios = at_least_fp32(policy_rejected_logps)  # (B,)
    if loss_type != "simpo":  # which has no reference: its reward is the mean log-prob itself
        if ref_chosen_logps is None or ref_rejected_logps is None:
            raise ValueError(
                f"ref_chosen_logps and ref_rejected_logps: {loss_type} needs a reference, only simpo has none"
            )
        chosen_logratios = chosen_logratios - at_least_fp32(ref_chosen_logps)
        rejected_logratios = rejected_logratios - at_least_fp32(ref_rejected_logps)
    z = beta * (chosen_logratios - rejected_logratios)  # (B,)
    chosen_rewards, rejected_rewards = beta * chosen_logratios, beta * rejected_logratios
    if loss_type in ("ipo", "sigmoid_norm", "simpo"):
        if any(n is None or n.min() < 1 for n in (chosen_lengths, rejected_lengths)):
            raise ValueError(
                f"chosen_lengths and rejected_lengths: {loss_type} needs them, each at least 1"
            )
        per_token = chosen_logratios / chosen_lengths - rejected_logratios / rejected_lengths  # (B,)  # fmt: skip

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
    else:  # simpo
        losses = -F.logsigmoid(beta * per_token - simpo_gamma)
        chosen_rewards = chosen_rewards / chosen_lengths
        rejected_rewards = rejected_rewards / rejected_lengths
    # (B,) each, the loop takes the mean
    return losses, chosen_rewards.detach(), rejected_rewards.detach()


# ---- 4. the arguments ----


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description="Direct preference optimisation on preference pairs."
    )
    # fmt: off
    parser.add_argument("--pairs", nargs="+", default=["data/prefs_train.jsonl"], help="JSONL of prompt, chosen, rejected (default: the bundled training pairs)")
    parser.add_argument("--eval-pairs", nargs="+", default=[], help="held-out JSONL (default: a share of the prompts)")
    parser.add_argument("--eval-fraction", type=float, default=0.1, help="share of the prompts held out where --eval-pairs is not given (default %(default)s)")
    parser.add_argument("--model", default=common.BASE, help="model folder or hub id (default %(default)s)")
    parser.add_argument("--loss-type", choices=LOSS_TYPES, default="sigmoid", help="(default %(default)s)")
    parser.add_argument("--beta", type=float, help="how hard the reference holds, 0.01 to 0.5 (default 0.1, simpo 2.0)")
    parser.add_argument("--label-smoothing", type=float, default=0.0, help="chance that a label is wrong, 0 to 0.2 (default 0)")
    parser.add_argument("--simpo-gamma", type=float, default=1.0, help="target margin of simpo, 0.3 to 2 (default %(default)s)")
    parser.add_argument("--nll-coef", type=float, default=0.0, help="weight of −log π(chosen) per token, against a falling chosen log-prob, 0 to 1 (default 0)")
    parser.add_argument("--ties", choices=("drop", "soft"), default="drop", help="soft: a tie is half a win for each, sigmoid only (default %(default)s)")
    parser.add_argument("--ref-model", help="reference other than --model")
    parser.add_argument("--ref-cache", default="runs/ref_cache", help="folder of reference log-probs, or none (default %(default)s)")
    parser.add_argument("--prompts", help="JSONL of prompts, of which 64 are answered at each evaluation")
    parser.add_argument("--split", help='of --prompts only the rows with this "split"')
    parser.add_argument("--gold", help="FILE:FUNCTION that scores these answers, such as data/recruiter.py:reward")
    parser.add_argument("--reward-model", help="reward model folder that scores these answers")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="length of sample answers (default %(default)s)")
    common.add_run_arguments(parser, "runs/dpo", f"{LR_SMALL:g} below 100 M parameters, {LR_FULL:g}, LoRA {LR_LORA:g}")
    # fmt: on
    args = common.parse_with_config(parser, argv)
    common.check_arguments(args)
    args.beta = (2.0 if args.loss_type == "simpo" else 0.1) if args.beta is None else args.beta
    if not 0 < args.beta < math.inf:
        raise UserError(f"--beta {args.beta}: expected a number above 0")
    if not 0 <= args.label_smoothing < 0.5:
        raise UserError(f"--label-smoothing {args.label_smoothing}: expected a number in [0, 0.5)")
    if args.label_smoothing and args.loss_type not in ("sigmoid", "robust"):
        raise UserError(
            f"--label-smoothing: --loss-type {args.loss_type} has none; sigmoid and robust do"
        )
    if args.ties == "soft" and args.loss_type != "sigmoid":
        raise UserError(
            f"--ties soft: only --loss-type sigmoid can learn from a tie, not {args.loss_type}"
        )
    if Path(args.ref_cache).is_file():
        raise UserError(f"--ref-cache {args.ref_cache}: a file; expected a folder, or none")
    if args.ref_model and args.loss_type == "simpo":
        raise UserError("--ref-model: simpo has no reference")
    if (args.gold or args.reward_model or args.split) and not args.prompts:
        raise UserError(
            "--gold, --reward-model and --split score sample answers: add --prompts FILE"
        )
    return args


# ---- 5. the data ----
# {"prompt": [{"role": "user", "content": "Assess this candidate. …"}], "chosen": [{"role": "assistant", …}],
#  "rejected": [{"role": "assistant", …}], "strength": 2, "tie": false}


def load_data(args, tokenizer):
    """(pairs, prompts): prompts are the rows of --prompts to answer at evaluations, without it one held-out prompt."""
    pairs = common.load_pairs(
        args.pairs, tokenizer, args.max_length, args.ties == "soft", args.eval_fraction, args.eval_pairs
    )  # fmt: skip
    if args.prompts:
        return pairs, common.load_prompts(args.prompts, "--prompts", args.split, limit=64)
    shown = pairs.eval if len(pairs.eval) else pairs.train
    return pairs, [{"prompt": pairs.prompts[shown[0]].tolist()}]


def batch_rows(pairs, indices, pad_id):  # same as reward_train.py
    """(input_ids, attention_mask, response_mask), each (2b, T): the b chosen answers first, then the b rejected."""
    prompts = [pairs.prompts[i] for i in indices]
    answers = [pairs.chosen[i] for i in indices] + [pairs.rejected[i] for i in indices]
    return pad_rows(prompts + prompts, answers, pad_id)


# ---- 6. the models ----


def load_models(args):
    """(model, tokenizer, scaler): the policy is trained; the reference is the same weights before step one."""
    device, dtype, scaler = common.pick_hardware(args)
    tokenizer, lora = common.load_tokenizer(args.model), common.lora_arguments(args)
    model = common.load_policy(args.model, dtype, device, **lora)
    common.forget_scale(model.config)  # of an earlier DPO run that this one starts from
    return model, tokenizer, scaler


def load_reference(args, model):
    """A frozen copy of what the policy started from (or --ref-model), of the policy's vocabulary."""
    name, flag = (args.ref_model, "--ref-model") if args.ref_model else (args.model, "--model")
    reference = common.load_policy(name, model.compute_dtype, model.device, trainable=False, flag=flag)  # fmt: skip
    sizes = reference.config.vocab_size, model.config.vocab_size
    if sizes[0] != sizes[1]:
        raise UserError(
            f"{flag} {name}: its vocabulary has {sizes[0]} entries, the policy's {sizes[1]}"
        )
    return reference


@torch.no_grad()
def reference_logps(args, model, pairs, tokenizer):
    """(2, n) fp32: log π_ref of chosen and rejected of every pair, by the policy before its first step.

    Kept in --ref-cache: the file's name says which model, precision and template; inside, a row is found by the hash of
    its ids, so shuffling, filtering or another max_length can never mix rows up. What is missing is computed.
    """
    source = args.ref_model or args.model
    weights = common.fingerprint(source) if Path(source).exists() else source
    key = f"{weights}|{model.compute_dtype}|{tokenizer.chat_template}|1"
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.npz"
    file = None if args.ref_cache == "none" else Path(args.ref_cache) / name
    n = len(pairs.tie)
    rows = np.empty((2, n), np.uint64)
    for side, answers in enumerate((pairs.chosen, pairs.rejected)):
        for i in range(n):
            ids = pairs.prompts[i].tobytes() + b"|" + answers[i].tobytes()
            rows[side, i] = int.from_bytes(hashlib.blake2b(ids, digest_size=8).digest(), "big")
    known, values = np.empty(0, np.uint64), np.empty(0, np.float32)
    if file is not None and file.is_file():
        try:
            with np.load(file, allow_pickle=False) as saved:
                known, values = saved["rows"], saved["logps"]
            if known.shape != values.shape or not np.isfinite(values).all():
                raise ValueError("its columns do not belong together")
        except Exception as error:  # OSError, BadZipFile, EOFError, zlib.error … for a damaged file
            print(f"--ref-cache: {file} cannot be read ({error}); computing again")
            known, values = np.empty(0, np.uint64), np.empty(0, np.float32)
    place = np.searchsorted(known, rows).clip(max=max(len(known) - 1, 0))
    hit = known[place] == rows if len(known) else np.zeros_like(rows, bool)
    logps = np.where(hit, values[place] if len(known) else 0, np.nan).astype(np.float32)
    todo = np.flatnonzero(~hit.all(0))
    if len(todo):
        pad_id, found = common.pad_id(tokenizer), torch.zeros(2, n)
        reference = load_reference(args, model) if args.ref_model else model
        if args.ref_model:  # of another family, maybe
            pairs = replace(pairs, shared=common.can_share(reference, pairs, pad_id))
        parts = common.rank_batches(reference, todo, pairs.columns(), args.micro_tokens)
        with common.adapter_off(reference):
            for part in tqdm(parts, desc="reference", mininterval=1, disable=common.no_bar()):
                part_rows = (x.to(model.device) for x in batch_rows(pairs, part, pad_id))
                sums = token_logps(reference, *part_rows, shared=pairs.shared).sum(1)
                found[:, part] = sums.view(2, -1).cpu()  # (2, b)
        common.add_up([found])
        logps[:, todo] = found[:, todo].numpy()
        broken = np.flatnonzero(~np.isfinite(logps).all(0))
        if len(broken):
            flag = "--ref-model" if args.ref_model else "--model"
            common.check_start(reference, source, math.nan, pairs.name(broken), flag)
        # one value a row, the oldest: a resumed run reads what this one used, to the last bit
        known, first = np.unique(np.concatenate([known, rows.ravel()]), return_index=True)
        values = np.concatenate([values, logps.ravel()])[first]
        logps = values[np.searchsorted(known, rows)]
        if file is not None and not common.rank():
            file.parent.mkdir(parents=True, exist_ok=True)
            with common.replacing(file) as handle:
                np.savez(handle, rows=known, logps=values)
    print(
        f"reference: {2 * (n - len(todo))} log-probs from {file or 'no cache'}, {2 * len(todo)} computed"
    )
    return torch.from_numpy(logps)


# ---- 7. preflight ----


def preflight(args, model, tokenizer, pairs, ref_logps):
    """Rewards 0 and the loss at its value for z = 0; the chunked head = the model's own; one pair as a token strip."""
    pad_id, first = common.pad_id(tokenizer), pairs.train[:64]
    longest = first[[np.argmax(pairs.lengths()[first])]]  # short rows prove nothing about windows
    with torch.no_grad():
        ids, attention_mask, mask = (x.to(model.device) for x in batch_rows(pairs, longest, pad_id))
        gap = common.check_head(model, ids, attention_mask, mask)
        losses, rewards = [], []
        for part in common.micro_batches(first, pairs.columns(), args.micro_tokens):
            loss, chosen, rejected, _, _ = forward(args, model, pairs, part, pad_id, ref_logps)
            losses.append(loss)
            rewards += [chosen, rejected]
    loss, reward = torch.cat(losses).mean().item(), torch.cat(rewards).abs().max().item()
    common.check_start(model, args.model, loss, pairs.name(first))
    bound = 1e-4 if model.compute_dtype == torch.float32 else 5e-2
    print(f"preflight  log-probs = the model's own (gap {gap:.1e}, bound {bound:.0e})")
    if not gap < bound:
        raise UserError(f"--model {args.model}: {common.OTHER_HEAD}")
    expected = {"hinge": 1.0, "ipo": 1 / (4 * args.beta**2)}.get(args.loss_type, math.log(2))
    name = {"hinge": "1", "ipo": "1/(4β²)"}.get(args.loss_type, "log 2")
    if args.loss_type == "simpo":
        print(f"preflight  simpo has no reference, so no known loss at the start; it is {loss:.4f}")
    elif args.ref_model:
        print(
            f"preflight  loss {loss:.4f}; {name} holds only when the reference is the policy's own start"
        )
    else:
        print(
            f"preflight  loss {loss:.4f} = {name} = {expected:.4f}   implicit rewards 0 (largest {reward:.1e})"
        )
        bound *= max(1, expected, args.beta)  # β multiplies the rounding of the log-probs as well
        if not (abs(loss - expected) < bound and reward < 10 * bound):
            raise UserError(
                f"--ref-cache {args.ref_cache}: its log-probs are not those of {args.model} (loss {loss:.4f}, expected "
                f"{expected:.4f}; implicit reward {reward:.2g}, expected 0); pass --ref-cache none, or remove the folder"
            )
    print(
        f"{pairs.where(first[0])}, chosen   · prompt, not trained   ▮ trained   ◆ the end, trained"
    )
    ids, attention_mask, mask = batch_rows(pairs, first[:1], pad_id)
    n = int(attention_mask[0].sum())
    print(common.token_strip(tokenizer, ids[0, :n].tolist(), mask[0, :n].tolist(), "◆"))


# ---- 8. the loop ----


def forward(args, model, pairs, part, pad_id, ref_logps):
    """Steps (3) and (4) for the pairs in `part`: losses, rewards (b,) each, log-probs (2, b), lengths (2, b)."""
    ids, attention_mask, mask = (x.to(model.device) for x in batch_rows(pairs, part, pad_id))
    # (3) policy: log-probs of both answers, in one forward
    logps = token_logps(model, ids, attention_mask, mask, shared=pairs.shared)
    logps = logps.sum(1).view(2, -1)  # (2, b)
    lengths = mask.sum(1).view(2, -1)
    # (4) loss and implicit rewards
    ref_chosen, ref_rejected = (
        (None, None) if ref_logps is None else ref_logps[:, part].to(model.device)
    )
    smoothing = args.label_smoothing
    if args.ties == "soft":
        tie = torch.from_numpy(pairs.tie[part]).to(model.device)
        smoothing = torch.where(tie, 0.5, torch.full_like(logps[0], smoothing))
    losses, chosen_rewards, rejected_rewards = dpo_loss(
        logps[0], logps[1], ref_chosen, ref_rejected, args.beta, args.loss_type, smoothing, *lengths, args.simpo_gamma
    )  # fmt: skip
    return losses, chosen_rewards, rejected_rewards, logps, lengths


class Sums:
    """Sums and counts over a whole update or evaluation, divided once; names as TRL's users know them."""

    def __init__(self, beta):
        self.beta, self.rows = beta, []

    def add(self, losses, chosen_rewards, rejected_rewards, logps, lengths):
        margins = chosen_rewards - rejected_rewards
        # at the start only the rounding of the sums tells the two apart
        equal = margins.abs() <= 1e-6 * self.beta * logps.abs().sum(0)
        right = ((margins > 0) & ~equal).float() + 0.5 * equal  # equal counts half
        columns = [losses, chosen_rewards, rejected_rewards, margins, right, *logps, *lengths]
        self.rows.append(torch.stack([c.detach().cpu().double() for c in columns]))

    def means(self):
        total = torch.cat(common.gather(self.rows), 1)  # (9, pairs), those of all ranks
        sides = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
        names = ("loss", *sides, "logps/chosen", "logps/rejected")
        means = dict(zip(names, total.mean(1).tolist(), strict=False))
        # nll per chosen token; the deviation of all rewards, for a stage that takes this policy as its reward model
        return means | {
            "nll": -(total[5].sum() / total[7].sum()).item(),
            "rewards/std": total[1:3].std().item(),
        }


@torch.no_grad()
def evaluate(args, model, tokenizer, pairs, ref_logps, prompts, scorers):
    """Held-out loss, accuracy and margins; answers to --prompts, their score and their KL to the reference."""
    out, pad_id = {}, common.pad_id(tokenizer)
    if len(pairs.eval):
        sums = Sums(args.beta)
        for part in common.rank_batches(model, pairs.eval, pairs.columns(), args.micro_tokens):
            sums.add(*forward(args, model, pairs, part, pad_id, ref_logps))
        out = {f"eval/{key}": value for key, value in sums.means().items()}
    asked = [row["prompt"] for row in prompts]
    answers = sample(model, tokenizer, asked, max_new_tokens=args.max_new_tokens, seed=args.seed)
    if args.prompts:
        for key, flag, function in scorers:
            scores = common.score_answers(function, flag, prompts, asked, answers.texts)
            out[key] = common.mean(scores)
        out["val/kl"] = None if ref_logps is None else kl_to_reference(args, model, tokenizer, answers)  # fmt: skip
    texts = [tokenizer.decode(ids) for ids in answers.prompt_ids[:2]]
    return out, [{"prompt": p, "answer": a} for p, a in zip(texts, answers.texts, strict=False)]


def kl_to_reference(args, model, tokenizer, answers):
    """Mean over answers of Σ_t k1, in nats; the reference is in memory only here."""
    own = common.has_lora(model) and not args.ref_model  # the policy with its adapter off
    reference, total = model if own else load_reference(args, model), 0.0
    asked, said = answers.prompt_ids, answers.response_ids
    lengths = [len(p) + len(r) for p, r in zip(asked, said, strict=True)]
    for part in common.rank_batches(model, range(len(asked)), lengths, args.micro_tokens):
        rows = pad_rows([asked[i] for i in part], [said[i] for i in part], common.pad_id(tokenizer))
        rows = [x.to(model.device) for x in rows]
        logps = token_logps(model, *rows)
        with common.adapter_off(reference):
            ref_logps = token_logps(reference, *rows)
        total += common.kl_estimates(logps, ref_logps, rows[2])[0].sum().item()
    return common.all_sum(total) / len(asked)


def main(argv=None):
    args = parse_args(argv)
    common.start_processes(args)
    common.check_out(args, [args.model, args.ref_model, args.reward_model])
    common.seed_everything(args.seed)
    model, tokenizer, scaler = load_models(args)
    args.lr = common.pick_lr(args, model, LR_SMALL, LR_FULL, LR_LORA)
    args.micro_tokens = args.micro_tokens or common.micro_tokens(model)
    # (1) read pairs; render the prompt; mark the answer tokens
    pairs, prompts = load_data(args, tokenizer)
    scorers = []  # (key, flag, function)
    if args.gold:
        scorers.append(("val/gold", "--gold", common.load_function(args.gold, "--gold")))
    if args.reward_model:
        score = common.reward_function(args.reward_model, model.compute_dtype, model.device)
        scorers.append(("val/score", "--reward-model", score))
    asked = [row["prompt"] for row in prompts]  # without --prompts the one shown is ids already
    asked = max(len(common.encode_prompt(tokenizer, p) if args.prompts else p) for p in asked)
    common.check_positions(model, int(pairs.lengths().max()), asked, args.max_new_tokens)
    n, pad_id = len(pairs.train), common.pad_id(tokenizer)
    pairs.shared = common.can_share(model, pairs, pad_id)
    columns = pairs.columns()
    steps = args.steps or args.epochs * math.ceil(n / args.batch_size)
    common.describe(args, model, pairs.counts, n, steps, "pairs")
    # (2) reference: log-probs of both answers under the frozen start, once, kept on disk
    ref_logps = None if args.loss_type == "simpo" else reference_logps(args, model, pairs, tokenizer)  # fmt: skip
    files = [*args.pairs, *args.eval_pairs, args.prompts, args.ref_model, args.reward_model]
    record = common.check_run(args, "dpo", files, args.model)
    model = common.prepare_training(model, args)
    optimizer = common.make_optimizer(model, args.lr, weight_decay=args.weight_decay)
    start = common.load_checkpoint(args, {"model": model}, {"model": optimizer}, scaler)
    if start == 0:  # what is in --out stays untouched until all this has passed
        preflight(args, model, tokenizer, pairs, ref_logps)
        before = evaluate(args, model, tokenizer, pairs, ref_logps, prompts, scorers)
    common.open_run(args, record)
    log, stop = common.MetricsLog(args, start), common.StopSignal()
    if start == 0:
        # a full disk or an unsaveable config shows now, not after hours
        common.save_run(model, tokenizer, args)
        log.evaluation(0, *before)

    after = None
    bar = common.progress("dpo", start, steps)
    for step in bar:
        batch, epoch = common.batch_indices(n, args.batch_size, args.seed, step)
        batch = pairs.train[batch]
        chosen_tokens = int(pairs.chosen.lengths()[batch].sum())  # of the whole optimiser step
        skips, skipped = 0, True
        while skipped:  # an fp16 overflow: the same batch again, at half the scale
            total, tokens, sums = 0.0, 0, Sums(args.beta)
            for part in common.rank_batches(model, batch, columns, args.micro_tokens):
                # (3) policy: log-probs of both answers
                # (4) loss and implicit rewards; sum over this part, divided by the pairs of the whole step
                losses, *rewards, logps, lengths = forward(args, model, pairs, part, pad_id, ref_logps)  # fmt: skip
                loss = losses.sum() / len(batch)
                if args.nll_coef:
                    loss = loss - args.nll_coef * logps[0].sum() / chosen_tokens
                # (5) update: backward, clip the gradient, step
                (loss if scaler is None else scaler.scale(loss)).backward()
                total += loss.item()
                tokens += int(2 * pairs.prompts.lengths()[part].sum() + lengths.sum())
                sums.add(losses, *rewards, logps, lengths)
            total, tokens = common.all_sum(total, tokens)
            common.set_lr(optimizer, args, step, steps)
            grad_norm, skipped = common.clip_and_step(
                model, optimizer, scaler, args, total, lambda b=batch: pairs.name(b)
            )
            skips += skipped
        row = {
            "step": step, "epoch": epoch, **sums.means(), "loss": total, "tokens": int(tokens),
            **common.step_row(optimizer, grad_norm, skips),
        }  # fmt: skip
        log.write(row)
        bar.set_postfix_str(
            f"loss {total:.3f} acc {row['rewards/accuracies']:.2f} margin {row['rewards/margins']:.2f} "
            f"lr {row['lr']:.1e} norm {grad_norm:.2f}"
        )
        # (6) now and then: held-out loss and accuracy, sample answers and their score
        if step == steps or (args.eval_every and step % args.eval_every == 0):
            after = evaluate(args, model, tokenizer, pairs, ref_logps, prompts, scorers)
            log.evaluation(step, *after)
        if common.checkpoint_due(args, step, steps, stop):
            common.save_checkpoint(args, step, {"model": model}, {"model": optimizer}, scaler)
        if stop or step == args.stop_after:
            return log.stopped(step, stop)

    # ---- 9. save ----
    # this policy is a reward model, too (`common.implicit_reward`): its scale, kept in config.json for PPO
    after = after or evaluate(args, model, tokenizer, pairs, ref_logps, prompts, scorers)
    seen = after[0]
    if "eval/rewards/std" in seen:
        both = seen["eval/rewards/chosen"] + seen["eval/rewards/rejected"]
        model.config.reward_mean, model.config.reward_std = both / 2, seen["eval/rewards/std"]
    common.save_run(model, tokenizer, args)
    log.finish(["eval/loss", "eval/rewards/accuracies", "val/gold", "val/score"])
    print(f"next: python evaluate.py --model {args.model} {args.out}")


if __name__ == "__main__":
    common.run(main)
