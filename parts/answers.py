"""parts/answers.py: the policy of a run and its start; what an evaluation samples, scores and shows;
what must hold before step one."""

import math

import numpy as np
import torch

from common import Policy, encode_prompt, end_ids, load_model, max_positions, pad_rows
from parts import parallel
from parts.files import UserError, existing_file, load_function, number, read_jsonl
from parts.messages import as_chat, check_prompt, hash_fraction, prompt_key, visible
from parts.parallel import adapter_off

MOST_PROMPTS = 64  # that an evaluation answers


def load_policy(run, reference=True, kind=Policy):
    """(the policy of --model, its start for a KL): with LoRA the start is the policy itself, whose
    adapter is switched off, else a frozen copy; None without `reference`.

    kind   `Policy`, or a class derived from it
    """
    args = run.args
    source = args.model, run.device, run.dtype
    policy = kind(load_model(*source, True, args.lora_rank, args.seed), run.dtype)
    if args.lora_rank or not reference:
        return policy, policy if reference else None
    start = Policy(load_model(*source), run.dtype)
    if args.fsdp:
        parallel.shard(start)
    return policy, start


def add_answer_arguments(parser):
    """Flags of the sample answers of an evaluation."""
    add = parser.add_argument
    # fmt: off
    add("--prompts", type=existing_file, help='JSONL of prompts; 64 are answered at each evaluation ("split": "val" if rows have one)')
    add("--gold", help="FILE:FUNCTION that scores these answers, such as data/recruiter.py:reward")
    add("--max-new-tokens", type=number(int, at_least=1), default=96, help="most tokens of an answer")
    add("--eval-temperature", type=number(at_least=0), default=1.0, help="temperature of these answers; 0 is greedy")
    # fmt: on


def read_prompts(path, flag, chat=False):
    """Rows of a prompt file, {"prompt": …, …}; with `chat` texts are made messages."""
    rows = list(read_jsonl(path, check_prompt, flag=flag))
    if not rows:
        raise UserError(f"{flag} {path}: no prompt")
    for row in rows if chat else ():
        as_chat(row, "prompt")
    return rows


def some_prompts(rows, most):
    """At most `most` rows, chosen and ordered by the prompt's hash: always the same ones."""
    return sorted(rows, key=lambda row: hash_fraction(prompt_key(row)))[:most]


@torch.no_grad()
def generate(policy, tokenizer, prompt_ids, max_new_tokens, temperature, seed=0, rows=32):
    """One answer to each prompt, lists of ids up to and with an end id, by transformers' own
    generate: for evaluations. What is trained on is drawn by parts/sampling.py, with log-probs.

    Under torchrun every process draws all answers, so that their number changes none.
    """
    model, ends, answers = policy.model, end_ids(tokenizer), []
    torch.manual_seed(seed)
    with parallel.decoding(policy), parallel.autocast(model.device, policy.dtype):
        for start in range(0, len(prompt_ids), rows):
            prompts = prompt_ids[start : start + rows]
            ids, mask, _ = pad_rows(prompts, [()] * len(prompts), model.device, "left")
            drawn = model.generate(
                ids, attention_mask=mask, max_new_tokens=max_new_tokens, top_k=0,
                do_sample=temperature > 0, temperature=temperature or 1.0,
                eos_token_id=ends, pad_token_id=0,
            )  # fmt: skip
            for row in drawn[:, ids.shape[1] :].tolist():
                length = next((t for t, i in enumerate(row, 1) if i in ends), None)
                answers.append(row[:length])
    return answers


def score_answers(function, flag, rows, texts):
    """Scores of answers by a function of the user's: see `scores_by`. Asked on rank 0 alone."""
    return parallel.gather([] if parallel.rank() else scores_by(function, flag, rows, texts))


def scores_by(function, flag, rows, texts):
    """function(prompts, answers, rows) of the answers to rows {"prompt": …, …}: a finite number for
    each, or None for what the function cannot score; it reads what is graded, see `visible`.
    UserError for anything else, naming the flag."""
    given = function([row["prompt"] for row in rows], [visible(text) for text in texts], rows)
    try:
        # [:] refuses a dict and a set, which would be read by key; + 0.0 a text such as "1"
        scores = [x if x is None else float(x + 0.0) for x in given[:]]
        if len(scores) != len(texts) or not all(math.isfinite(x or 0) for x in scores):
            raise ValueError
    except (TypeError, ValueError, LookupError):
        raise UserError(
            f"{flag}: returned {given!r:.200}; "
            f"expected a finite number or None for each of {len(texts)} answers"
        ) from None
    return scores


def scored(key, scores):
    """{key: mean score, key_low and key_high: ± 1.96 standard errors}; None is in no mean.

    >>> scored("val/gold", [1.0, 0.0, None])["val/gold"]
    0.5
    """
    values = np.array([x for x in scores if x is not None], float)
    if not len(values):
        return {key: None}
    half = 1.96 * (values.var() / (len(values) - 1 or math.nan)) ** 0.5  # not of a single one
    mean = values.mean().item()
    return {key: mean, f"{key}_low": mean - half, f"{key}_high": mean + half}


def prompt_room(args, config):
    """The most tokens of a prompt that leave room for an answer; UserError if there are none."""
    room = min(args.max_length, max_positions(config)) - args.max_new_tokens
    if room < 1:
        raise UserError(
            "--max-new-tokens: leaves no room for a prompt in --max-length, "
            "or in the model's positions"
        )
    return room


def prompt_ids(tokenizer, row, room):
    """Token ids of a row's prompt, with the tools of the row; the last `room`, None: all."""
    return encode_prompt(tokenizer, row["prompt"], room, row.get("tools"))


class Answers:
    """The sample answers of an evaluation: to --prompts that are not trained on, else to the rows
    `shown`, which are not scored.

    trained   the keys of the prompts that are trained on, see `messages.prompt_key`
    """

    def __init__(self, run, tokenizer, config, shown, trained):
        args, self.run, self.tokenizer, self.rows = run.args, run, tokenizer, shown
        self.gold = load_function(args.gold, "--gold")
        if args.gold and not args.prompts:
            raise UserError("--gold scores answers to prompts: add --prompts FILE")
        if args.prompts:
            rows = read_prompts(args.prompts, "--prompts", args.chat)
            rows = [row for row in rows if row.get("split") == "val"] or rows
            unseen = [row for row in rows if prompt_key(row) not in trained]
            if not unseen:
                raise UserError(f"--prompts {args.prompts}: all of them are also trained on")
            if n := len(rows) - len(unseen):
                print(f"prompts    {n} of {len(rows)} prompts are also trained on, and left out")
            self.rows = some_prompts(unseen, MOST_PROMPTS)
        room = prompt_room(args, config)
        self.ids = [prompt_ids(tokenizer, row, room) for row in self.rows]

    def __call__(self, policy, reference=None):
        """(metrics, two samples), of answers at --eval-temperature. reference: of val/kl, the
        policy's start."""
        args, ids, tokenizer = self.run.args, self.ids, self.tokenizer
        ends = end_ids(tokenizer)
        answers = generate(
            policy, tokenizer, ids, args.max_new_tokens, args.eval_temperature, args.seed
        )
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        shown = zip(tokenizer.batch_decode(ids[:2]), texts)
        samples = [{"prompt": prompt, "answer": answer} for prompt, answer in shown]
        if not args.prompts:
            return {}, samples
        metrics = {"val/n": len(ids), "val/cut": np.mean([a[-1] not in ends for a in answers])}
        if self.gold:
            metrics |= scored("val/gold", score_answers(self.gold, "--gold", self.rows, texts))
        if reference and args.eval_temperature:
            metrics["val/kl"] = self.kl(policy, reference, answers)
        return metrics, samples

    def kl(self, policy, reference, answers):
        """KL(π‖π_ref) per answer, in nats: the mean of log π − log π_ref over the policy's own
        answers, at the temperature they were drawn at. It is what evaluate.py compares policies at.
        """
        run, temperature, total = self.run, self.run.args.eval_temperature, 0.0
        both = [*zip(self.ids, answers)]
        for part in run.micro_batches(range(len(both)), [len(p) + len(a) for p, a in both]):
            rows = pad_rows(*zip(*(both[i] for i in part)), run.device)  # (b, T) each
            logps, _ = policy(*rows, temperature)
            with adapter_off():
                ref_logps, _ = reference(*rows, temperature)
            total += (logps - ref_logps).sum().item()
        return parallel.all_sum(total) / len(both)


# ---- preflight ----


@torch.no_grad()
def check_policy(policy, tokenizer, ids, attention_mask, answer_mask, flag):
    """UserError unless our log-probs of the first row are those by which the model itself computes
    its loss; prints the row, token by token."""
    seen = attention_mask[0]
    ids, mask = ids[:1, seen], answer_mask[:1, seen]  # (1, n)
    logps = policy(ids, torch.ones_like(mask), mask)[0]
    with parallel.autocast(ids.device, policy.dtype):
        own_loss = policy.model(ids, labels=ids.masked_fill(~mask, -100)).loss.item()
    gap = logps[mask].mean().item() + own_loss
    identity("gap between our log-probs and the model's", gap, 1e-4, policy.dtype, flag)
    show_row("▮ before each trained token", tokenizer, ids[0], mask[0])


def show_row(meaning, tokenizer, ids, marked):
    """Print a row, token by token, with a ▮ before those that are marked."""
    row = "".join("▮" * is_marked + tokenizer.decode(i) for i, is_marked in zip(ids, marked))
    print(f"row        {meaning}:", row[-1200:].replace("\n", "⏎"))


def identity(name, value, bound, dtype, flag):
    """UserError unless |value| ≤ bound, a thousand times that in half precision."""
    if not abs(value) <= bound * (1 if dtype == torch.float32 else 1000):
        hint = "" if math.isfinite(value) else "; broken weights, or an overflow: try --dtype fp32"
        raise UserError(f"{flag}: {name} is {value:.4g}, expected 0{hint}")
