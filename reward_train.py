"""reward_train.py: preference pairs in, a model out that gives an answer a number; PPO, GRPO and ranking use it.

Objective    minimise −E log σ(r(chosen) − r(rejected))
Algorithm    (1) read pairs; render the prompt; mark the answer tokens
             (2) rewards of both answers, read at the last token
             (3) loss: Bradley-Terry
             (4) update: backward, clip the gradient, step
             (5) now and then: held-out accuracy, calibration, beside the longer-answer baseline
             (6) mean and deviation of the rewards, kept in config.json for PPO
Conventions  one forward for both answers; loss is the pair mean; a fresh head is zero and learns at its own rate;
             the weights of the head are not rescaled afterwards: σ(reward difference) stays a probability;
             --counterfactual-augment NAMES: each pair is joined by a copy of it under other names
Left out     1. process rewards   2. ensembles   3. LogExp and other losses   4. pronouns: copies change names alone
Run          python reward_train.py --pairs data/prefs_train.jsonl data/rank_train.jsonl
             python reward_train.py --model Qwen/Qwen2.5-0.5B-Instruct --pairs mine.jsonl --out runs/reward
             torchrun --nproc-per-node 8 reward_train.py --fsdp --model Qwen/Qwen2.5-7B-Instruct --pairs mine.jsonl
Writes       a model folder (AutoModelForSequenceClassification), args.json, metrics.jsonl, checkpoint/
Reference    Bradley & Terry 1952; Ouyang et al. 2022, arXiv 2203.02155, eq. 1; centring: Eisenstein et al. 2023,
             arXiv 2312.09244; margin: Touvron et al. 2023, arXiv 2307.09288, eq. 2
Axes         B pairs, T tokens
"""

import argparse
import csv
import math
import random
import re
from collections import Counter
from statistics import NormalDist

import numpy as np
import torch
import torch.nn.functional as F

import common
from common import UserError, at_least_fp32, pad_rows, reward_scores

# learning rates: below 100 M parameters (worked on the bundled base, not swept), full weights, LoRA
LR_SMALL, LR_FULL, LR_LORA = 5e-4, 1e-5, 1e-4


# ---- 3. the math ----


def bradley_terry_loss(
    chosen_rewards, rejected_rewards, margin=None, tie=None, label_smoothing=0.0, center_coef=0.0
):  # fmt: skip
    """L = −(1−ε) log σ(z) − ε log σ(−z) + c·(r_c + r_r)²,   z = r_c − r_r − m      [Ouyang eq. 1; margin: Touvron eq. 2]

    r_c, r_r   chosen_rewards, rejected_rewards  (B,)
    m          margin            (B,) or None: how much better chosen must score
    ε          label_smoothing   chance that the label is wrong; ½ (and m = 0) where `tie` (B,) bool is True
    c          center_coef       pulls the mean of the two towards 0: scores are only known up to a constant
    returns    losses            (B,), the loop takes the mean

    By hand: r = 1 against 0: log(1 + e⁻¹) = 0.3133. A tie there costs half of 0.3133 + 1.3133.
    >>> one, zero = torch.tensor([1.0]), torch.tensor([0.0])
    >>> round(bradley_terry_loss(one, zero).item(), 4), round(bradley_terry_loss(zero, zero).item(), 4)
    (0.3133, 0.6931)
    >>> round(bradley_terry_loss(one, zero, tie=torch.tensor([True])).item(), 4)
    0.8133
    """
    common.same_shape(
        chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards, margin=margin, tie=tie
    )
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing {label_smoothing}: expected a number in [0, 0.5)")
    chosen_rewards, rejected_rewards = map(at_least_fp32, (chosen_rewards, rejected_rewards))
    epsilon = torch.full_like(chosen_rewards, label_smoothing)  # (B,)
    margin = torch.zeros_like(chosen_rewards) if margin is None else margin.to(chosen_rewards.dtype)
    if tie is not None:
        epsilon = torch.where(tie, 0.5, epsilon)
        margin = torch.where(tie, 0.0, margin)
    z = chosen_rewards - rejected_rewards - margin  # (B,)
    losses = -(1 - epsilon) * F.logsigmoid(z) - epsilon * F.logsigmoid(-z)
    return losses + center_coef * (chosen_rewards + rejected_rewards) ** 2


def pair_metrics(chosen_rewards, rejected_rewards, tie=None, bins=10):
    """How often, and how surely, the chosen answer scores higher: P(chosen) = σ(Δ), Δ = r_chosen − r_rejected.

    chosen_rewards, rejected_rewards  (B,);  tie  (B,) bool or None: ties are counted, and in none of the means
    accuracy  share with Δ > 0, equal scores ½          margin  mean Δ
    nll       mean −log σ(Δ)                            brier   mean (1 − σ(Δ))²
    ece       Σ_b n_b/n · |accuracy_b − confidence_b|, equal bins b of confidence max(σ(Δ), σ(−Δ)) over [½, 1]
    No pair left: NaN.

    By hand: Δ = 2, −.5, −.2, 0 is one right, two wrong, one equal: accuracy 1.5/4.
    >>> metrics = pair_metrics(torch.tensor([2, 1, 0, 0.5]), torch.tensor([0, 1.5, 0.2, 0.5]))
    >>> [round(metrics[key], 4) for key in ("accuracy", "nll", "brier", "ece")]
    [0.375, 0.6481, 0.2385, 0.3229]
    """
    common.same_shape(chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards, tie=tie)
    delta = chosen_rewards.detach().double() - rejected_rewards.detach().double()  # (B,)
    decided = delta[~tie.bool()] if tie is not None else delta
    p = torch.sigmoid(decided)
    right = (decided > 0).double() + 0.5 * (decided == 0).double()
    confidence = torch.maximum(p, 1 - p)
    bin_index = ((confidence - 0.5) * 2 * bins).long().clamp(0, bins - 1)
    table, ece = [], torch.zeros((), dtype=torch.float64)
    for b in range(bins):
        inside = bin_index == b
        row = {"low": 0.5 + b / (2 * bins), "high": 0.5 + (b + 1) / (2 * bins)}
        row |= {"n": int(inside.sum()), "accuracy": right[inside].mean().item()}
        row["confidence"] = confidence[inside].mean().item()
        table.append(row)
        if row["n"]:
            ece += row["n"] / len(decided) * abs(row["accuracy"] - row["confidence"])
    return {
        "accuracy": right.mean().item(),
        "margin": decided.mean().item(),
        "nll": -F.logsigmoid(decided).mean().item(),
        "brier": ((1 - p) ** 2).mean().item(),
        "ece": ece.item() if len(decided) else math.nan,
        "bins": table,
        "n": len(decided),
        "n_ties": len(delta) - len(decided),
    }


def wilson(k, n, level=0.95):  # same as evaluate.py
    """Score interval of a share k/n: all rates p with |k/n − p| ≤ z·√(p(1−p)/n)      [Wilson 1927]

    k may be a half (ties). n = 0 has no interval: None.
    >>> [round(x, 4) for x in wilson(60, 100)], [round(x, 4) for x in wilson(0, 10)], wilson(0, 0)
    ([0.502, 0.6906], [0.0, 0.2775], None)
    """
    if n == 0:
        return None
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (k + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(k * (n - k) / n + z * z / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


# ---- 4. the arguments ----


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description="Train a Bradley-Terry reward model on preference pairs."
    )
    # fmt: off
    parser.add_argument("--pairs", nargs="+", default=["data/prefs_train.jsonl", "data/rank_train.jsonl"], help="JSONL of prompt, chosen, rejected (default: the bundled training pairs)")
    parser.add_argument("--eval-pairs", nargs="+", default=[], help="held-out JSONL (default: a share of the prompts)")
    parser.add_argument("--eval-fraction", type=float, default=0.1, help="share of the prompts held out where --eval-pairs is not given (default %(default)s)")
    parser.add_argument("--model", default=common.BASE, help="model folder or hub id (default %(default)s)")
    parser.add_argument("--ties", choices=("soft", "drop"), default="soft", help="soft: a tie is half a win for each (default %(default)s)")
    parser.add_argument("--margin", choices=("none", "margin", "strength"), default="none", help="column that says by how much chosen is better (default %(default)s)")
    parser.add_argument("--margin-scale", type=float, default=1.0, help="reward units per unit of that column, 0.1 to 1 (default 1)")
    parser.add_argument("--label-smoothing", type=float, default=0.0, help="chance that a label is wrong, 0 to 0.2 (default 0)")
    parser.add_argument("--center-coef", type=float, default=0.0, help="pulls rewards towards mean 0, 0.001 to 0.1 (default 0)")
    parser.add_argument("--head-lr", type=float, default=1e-3, help="learning rate of a fresh head: at the trunk's it would hardly move (default %(default)s)")
    parser.add_argument("--counterfactual-augment", metavar="NAMES", help="CSV of name, first, last, sex, race_ethnicity: each pair of --pairs with recorded candidates is joined by a copy under other names")
    parser.add_argument("--augment-copies", type=int, default=1, help="copies of a pair with one candidate, 1 to 4; two candidates change names, once (default %(default)s)")
    common.add_run_arguments(parser, "runs/reward", f"{LR_SMALL:g} below 100 M parameters, {LR_FULL:g}, LoRA {LR_LORA:g}")
    # fmt: on
    args = common.parse_with_config(parser, argv)
    common.check_arguments(args)
    if not 0 <= args.label_smoothing < 0.5:
        raise UserError(f"--label-smoothing {args.label_smoothing}: expected a number in [0, 0.5)")
    if args.augment_copies < 1:
        raise UserError(f"--augment-copies {args.augment_copies}: expected at least 1")
    if args.augment_copies > 1 and not args.counterfactual_augment:
        raise UserError("--augment-copies: copies of what? add --counterfactual-augment NAMES.csv")
    return args


# ---- 5. the data ----
# {"prompt": [{"role": "user", "content": "Which candidate fits this role? …"}], "chosen": [{"role": "assistant", …}],
#  "rejected": [{"role": "assistant", …}], "strength": 2, "tie": false}


NAME_PARTS, CELL = ("name", "first", "last"), ("sex", "race_ethnicity")


def counterfactual_copy(row, names, rng):
    """(copy, ""), the pair under other names with its label as it is; or (None, reason) for a pair to be left alone.

    row    a preference row (not changed) whose "candidates" say in which text each name stands:
           [{"in": "prompt", "name": "Aisha Booker", "first": "Aisha", "last": "Booker", "sex": …, "race_ethnicity": …}]
    names  rows with name, first, last, sex, race_ethnicity;   rng  random.Random
    One candidate takes a name drawn from another cell (sex × race_ethnicity): cells are drawn evenly, then names. Two
    change names, so that each name has won once where it had won, and lost once: a preference for a name cancels.
    The recorded strings are replaced as whole words, all at once. Left alone: a name that is not in its text, or that
    stands somewhere in another writing (aisha.booker@…; "will" beside a Will, for one of the two is a word).
    Raises UserError where "candidates" is malformed.

    >>> emily, aisha = [{"in": key, "name": f"{a} {b}", "first": a, "last": b}
    ...                 for key, a, b in (("chosen", "Emily", "Yoder"), ("rejected", "Aisha", "Booker"))]
    >>> row = {"prompt": "Who fits?", "chosen": "Emily Yoder, 6 years.", "rejected": "Aisha Booker, 2 years."}
    >>> copy, _ = counterfactual_copy({**row, "candidates": [emily, aisha]}, [], random.Random(0))
    >>> copy["chosen"], copy["rejected"]
    ('Aisha Booker, 6 years.', 'Emily Yoder, 2 years.')
    """
    texts, people = {key: _text(row[key]) for key in ("prompt", "chosen", "rejected")}, {}
    for entry in _candidates(row):
        if not re.search(rf"(?<!\w){re.escape(entry['name'])}(?!\w)", texts[entry["in"]]):
            return None, "name not in the text as recorded"
        people.setdefault(entry["name"], entry)
    old = list(people.values())
    if len(old) not in (1, 2):
        return None, "more than two candidates" if old else "no candidates recorded"
    new = old[::-1]  # two change places
    if len(old) == 1:
        own = cell(old[0])
        other = rng.choice(sorted({cell(name) for name in names} - {own}))
        new = [rng.choice([name for name in names if cell(name) == other])]
    turn = {}  # {string: what takes its place}
    for a, b in zip(old, new, strict=True):
        for part in NAME_PARTS:
            if turn.setdefault(a[part], b[part]) != b[part]:
                return None, "a name that is two people's"  # James Lee beside Lee Chen
    longest_first = sorted(turn, key=len, reverse=True)
    words = rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)"
    for text in texts.values():
        if re.findall(words, text) != re.findall(words, text, re.IGNORECASE):
            return None, "name not in the text as recorded"

    def renamed(value):
        if isinstance(value, str):
            return re.sub(words, lambda match: turn[match[0]], value)
        return [{**message, "content": renamed(message["content"])} for message in value]

    takes = dict(zip(people, new, strict=True))
    entries = [
        {**entry, **{key: takes[entry["name"]].get(key) for key in (*NAME_PARTS, *CELL)}}
        for entry in row["candidates"]
    ]
    return {**row, **{key: renamed(row[key]) for key in texts}, "candidates": entries}, ""


def cell(person):
    return tuple(str(person.get(key)) for key in CELL)


def _text(value):
    return value if isinstance(value, str) else "\n".join(m["content"] for m in value)


def _candidates(row):
    entries = row.get("candidates") or []
    if not isinstance(entries, list) or not all(
        isinstance(e, dict)
        and e.get("in") in ("prompt", "chosen", "rejected")
        and all(isinstance(e.get(part), str) and e[part].strip() for part in NAME_PARTS)
        for e in entries
    ):
        raise UserError(
            '"candidates": expected a list of {"in": "prompt", "chosen" or "rejected", "name", "first", "last", '
            '"sex", "race_ethnicity"}'
        )
    return entries


def load_names(path):
    """Rows of a CSV with name, first, last, sex, race_ethnicity; without those whose `split` is heldout, the audits' own."""
    flag = f"--counterfactual-augment {path}"
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [key for key in (*NAME_PARTS, *CELL) if key not in (reader.fieldnames or [])]
            if missing:
                raise UserError(f"{flag}: no column {missing[0]!r}; expected name, first, last, sex, race_ethnicity")  # fmt: skip
            names = []
            for row in reader:
                empty = [k for k in (*NAME_PARTS, *CELL) if not (row[k] or "").strip()]
                if empty:
                    raise UserError(f"{flag}:{reader.line_num}: {empty[0]!r} is empty; fill it in or delete the line")  # fmt: skip
                if row.get("split") != "heldout":
                    names.append(row)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{flag}: cannot be read as CSV ({common.first_line(error)})") from None
    if len({cell(name) for name in names}) < 2:
        raise UserError(f"{flag}: its names are of fewer than two cells (sex × race_ethnicity); there is none to change to")  # fmt: skip
    return names


def load_data(args, tokenizer):
    """(pairs, margins): margins is None, or (n,) float32 in reward units."""
    made, rng = Counter(), random.Random(args.seed)
    names = load_names(args.counterfactual_augment) if args.counterfactual_augment else []

    def copies(row):
        found = []
        for _ in range(args.augment_copies):
            copy, why = counterfactual_copy(row, names, rng)
            if copy is None:
                made[f"left alone: {why}"] += 1
                break
            if copy not in found:  # two candidates can change names only once
                found.append(copy)
        made["copies under other names"] += len(found)
        return found

    pairs = common.load_pairs(
        args.pairs, tokenizer, args.max_length, args.ties == "soft", args.eval_fraction, args.eval_pairs, copies if names else None
    )  # fmt: skip
    pairs.counts.update(made)
    if names and not made["copies under other names"]:
        raise UserError(
            f"--counterfactual-augment: no pair could be copied ({common.reasons(made)}); leave the flag out"
        )
    if args.margin == "none":
        return pairs, None
    column = getattr(pairs, args.margin)
    missing = np.flatnonzero(np.isnan(column))
    if len(missing):
        raise UserError(
            f'--margin {args.margin}: {pairs.where(missing[0])} has no "{args.margin}" column; use --margin none'
        )
    return pairs, column * args.margin_scale


def batch_rows(pairs, indices, pad_id):
    """(input_ids, attention_mask, response_mask), each (2b, T): the b chosen answers first, then the b rejected."""
    prompts = [pairs.prompts[i] for i in indices]
    answers = [pairs.chosen[i] for i in indices] + [pairs.rejected[i] for i in indices]
    return pad_rows(prompts + prompts, answers, pad_id)


# ---- 6. the models ----


def load_models(args):
    """(model, tokenizer, scaler): the policy's trunk with a scalar head, all trained; nothing is frozen."""
    device, dtype, scaler = common.pick_hardware(args)
    tokenizer, lora = common.load_tokenizer(args.model), common.lora_arguments(args)
    model = common.load_reward_model(args.model, tokenizer, dtype, device, **lora)
    return model, tokenizer, scaler


# ---- 7. preflight ----


def preflight(args, model, tokenizer, pairs):
    """Loss = log 2 under a fresh head; scores of four rows alone = in the batch; one pair as a token strip."""
    pad_id, first = common.pad_id(tokenizer), pairs.train[:8]
    ids, attention_mask, mask = (x.to(model.device) for x in batch_rows(pairs, first, pad_id))
    with torch.no_grad():
        rewards = reward_scores(model, ids, attention_mask)
        loss = bradley_terry_loss(*rewards.chunk(2)).mean().item()
        alone = [
            reward_scores(model, ids[i : i + 1, :n], attention_mask[i : i + 1, :n])
            for i, n in enumerate(attention_mask.sum(1)[:4])
        ]
    common.check_start(model, args.model, loss, pairs.name(first))
    gap = (torch.cat(alone) - rewards[:4]).abs().max().item()
    largest = rewards.abs().max().item()
    bound = 1e-4 if model.compute_dtype == torch.float32 else 5e-2 * (1 + largest)
    if model.fresh_head:
        print(f"preflight  fresh head: loss {loss:.4f} = log 2 = {math.log(2):.4f}")
        assert abs(loss - math.log(2)) < 1e-4, "a zero head must score both answers alike"
    else:
        print(
            f"preflight  {args.model} is a reward model already: loss {loss:.4f}; log 2 holds for a fresh head only"
        )
    print(f"preflight  four rows alone = in the batch (gap {gap:.1e}, bound {bound:.0e})")
    if not gap <= bound:
        raise UserError(
            f"--model {args.model}: padding or batch mates change its scores (by {gap:.2g}); "
            "this family cannot be a reward model yet"
        )
    print(f"{pairs.where(first[0])}, chosen   · not read   ◆ carries the reward")
    n = int(attention_mask[0].sum())
    last = [t == n - 1 for t in range(n)]
    print(common.token_strip(tokenizer, ids[0, :n].tolist(), last, "◆").rpartition("\n")[0])


# ---- 8. the loop ----


@torch.no_grad()
def score_pairs(model, pairs, indices, pad_id, micro_tokens):
    """(chosen_rewards, rejected_rewards), each (len(indices),) on the CPU, in the order of `indices`."""
    scores = torch.zeros(2, len(pairs.tie))
    for part in common.rank_batches(model, indices, pairs.columns(), micro_tokens):
        rows = (x.to(model.device) for x in batch_rows(pairs, part, pad_id))
        scores[:, part] = reward_scores(model, *rows, shared=pairs.shared).view(2, -1).cpu()
    common.add_up([scores])
    return scores[:, indices]


def evaluate(args, model, tokenizer, pairs):
    """Held-out accuracy with interval, calibration, and what "the longer answer wins" would get on the same pairs."""
    if not len(pairs.eval):
        return {}, []
    tie, pad_id = torch.from_numpy(pairs.tie[pairs.eval]), common.pad_id(tokenizer)
    chosen, rejected = score_pairs(model, pairs, pairs.eval, pad_id, args.micro_tokens)
    metrics = pair_metrics(chosen, rejected, tie)
    tokens = [torch.from_numpy(side.lengths()[pairs.eval]) for side in (pairs.chosen, pairs.rejected)]  # fmt: skip
    longer = pair_metrics(*tokens, tie)
    # a pair and its copies under other names share one line, so one vote: the interval counts it once
    votes = len({(pairs.file[i], pairs.line[i]) for i in pairs.eval if not pairs.tie[i]})
    low, high = wilson(metrics["accuracy"] * votes, votes) or (None, None)
    keys = ("accuracy", "margin", "nll", "brier", "ece", "n", "n_ties")
    return {
        "eval/loss": bradley_terry_loss(chosen, rejected, tie=tie).mean().item(), **{f"eval/{k}": metrics[k] for k in keys},
        "eval/accuracy_low": low, "eval/accuracy_high": high, "eval/accuracy_longer": longer["accuracy"],
    }, []  # fmt: skip


def main(argv=None):
    args = parse_args(argv)
    common.start_processes(args)
    common.check_out(args, [args.model])
    common.seed_everything(args.seed)
    model, tokenizer, scaler = load_models(args)
    args.lr = common.pick_lr(args, model, LR_SMALL, LR_FULL, LR_LORA)
    args.micro_tokens = args.micro_tokens or common.micro_tokens(model)
    # (1) read pairs; render the prompt; mark the answer tokens
    pairs, margins = load_data(args, tokenizer)
    common.check_positions(model, int(pairs.lengths().max()), 0, 0)
    n, pad_id = len(pairs.train), common.pad_id(tokenizer)
    pairs.shared = common.can_share(model, pairs, pad_id)
    columns = pairs.columns()
    steps = args.steps or args.epochs * math.ceil(n / args.batch_size)
    common.describe(args, model, pairs.counts, n, steps, "pairs")
    files = [*args.pairs, *args.eval_pairs, args.counterfactual_augment]
    record = common.check_run(args, "reward_train", files, args.model)
    model = common.prepare_training(model, args)
    optimizer = common.make_optimizer(
        model, args.lr, args.head_lr if model.fresh_head else None, args.weight_decay
    )
    start = common.load_checkpoint(args, {"model": model}, {"model": optimizer}, scaler)
    if start == 0:  # what is in --out stays untouched until all this has passed
        preflight(args, model, tokenizer, pairs)
        before = evaluate(args, model, tokenizer, pairs)
    common.open_run(args, record)
    log, stop = common.MetricsLog(args, start), common.StopSignal()
    if start == 0:
        # a full disk or an unsaveable config shows now, not after hours
        common.save_run(model, tokenizer, args)
        log.evaluation(0, *before)

    bar = common.progress("reward", start, steps)
    for step in bar:
        batch, epoch = common.batch_indices(n, args.batch_size, args.seed, step)
        batch = pairs.train[batch]
        skips, skipped = 0, True
        while skipped:  # an fp16 overflow: the same batch again, at half the scale
            total, tokens, seen = 0.0, 0, []
            for part in common.rank_batches(model, batch, columns, args.micro_tokens):
                rows = [x.to(model.device) for x in batch_rows(pairs, part, pad_id)]
                # (2) rewards of both answers, read at the last token
                rewards = reward_scores(model, *rows, shared=pairs.shared)
                chosen_rewards, rejected_rewards = rewards.chunk(2)  # (b,), (b,)
                # (3) loss: Bradley-Terry; sum over this part, divided by the pairs of the whole step
                tie = torch.from_numpy(pairs.tie[part]).to(model.device)
                margin = None if margins is None else torch.from_numpy(margins[part]).to(tie.device)
                losses = bradley_terry_loss(
                    chosen_rewards, rejected_rewards, margin, tie, args.label_smoothing, args.center_coef
                )  # fmt: skip
                loss = losses.sum() / len(batch)
                # (4) update: backward, clip the gradient, step
                (loss if scaler is None else scaler.scale(loss)).backward()
                total, tokens = total + loss.item(), tokens + int(rows[1].sum())
                seen.append([x.detach().cpu() for x in (chosen_rewards, rejected_rewards, tie)])
            total, tokens = common.all_sum(total, tokens)
            common.set_lr(optimizer, args, step, steps)
            grad_norm, skipped = common.clip_and_step(
                model, optimizer, scaler, args, total, lambda b=batch: pairs.name(b)
            )
            skips += skipped
        chosen, rejected, tie = map(torch.cat, zip(*common.gather(seen), strict=True))
        metrics, both = pair_metrics(chosen, rejected, tie), torch.cat([chosen, rejected])
        row = {
            "step": step, "epoch": epoch, "loss": total, **{k: metrics[k] for k in ("accuracy", "margin", "nll", "brier", "ece")},
            "reward/mean": both.mean().item(), "reward/std": both.std().item(), "tokens": int(tokens),
            **common.step_row(optimizer, grad_norm, skips),
        }  # fmt: skip
        log.write(row)
        bar.set_postfix_str(
            f"loss {total:.3f} acc {row['accuracy']:.2f} margin {row['margin']:.2f} lr {row['lr']:.1e} norm {grad_norm:.2f}"
        )
        # (5) now and then: held-out accuracy, calibration, beside the longer-answer baseline
        if step == steps or (args.eval_every and step % args.eval_every == 0):
            log.evaluation(step, *evaluate(args, model, tokenizer, pairs))
        if common.checkpoint_due(args, step, steps, stop):
            common.save_checkpoint(args, step, {"model": model}, {"model": optimizer}, scaler)
        if stop or step == args.stop_after:
            return log.stopped(step, stop)

    # ---- 9. save ----
    # (6) mean and deviation of the rewards, kept in config.json for PPO; 10 000 pairs are enough for two numbers
    some = pairs.train[:: 1 + (n - 1) // 10_000]  # from all files, whose answers may differ in kind
    both = torch.cat(list(score_pairs(model, pairs, some, pad_id, args.micro_tokens)))
    model.config.reward_mean, model.config.reward_std = both.mean().item(), both.std().item()
    common.save_run(model, tokenizer, args)
    print(
        f"reward on the training answers: mean {both.mean():.3f}, deviation {both.std():.3f} (in config.json, for PPO)"
    )
    log.finish(["eval/loss", "eval/accuracy", "eval/accuracy_longer"])
    print(
        f"next: python evaluate.py reward --reward-model {args.out} --pairs data/prefs_test.jsonl"
    )


if __name__ == "__main__":
    common.run(main)
