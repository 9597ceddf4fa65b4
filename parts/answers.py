"""parts/answers.py: what an evaluation samples, scores and shows; what must hold before step one."""

import math

import numpy as np
import torch

from common import encode_prompt, end_ids, max_positions, pad_id, pad_rows
from parts import parallel
from parts.files import UserError, existing_file, load_function, number, read_jsonl
from parts.lora import adapter_off
from parts.messages import as_chat, check_prompt, hash_fraction, prompt_key, visible

MOST_PROMPTS = 64  # that an evaluation answers


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
    model, ends, pad, answers = policy.model, end_ids(tokenizer), pad_id(tokenizer), []
    settings = dict(max_new_tokens=max_new_tokens, eos_token_id=ends, pad_token_id=pad, top_k=0)
    if temperature:  # else the most likely token, which is the default
        settings |= dict(do_sample=True, temperature=temperature)
    torch.manual_seed(seed)
    with parallel.decoding(policy), parallel.autocast(model.device, policy.dtype):
        for start in range(0, len(prompt_ids), rows):
            prompts = prompt_ids[start : start + rows]
            ids, mask, _ = pad_rows(prompts, [()] * len(prompts), pad, model.device, "left")
            drawn = model.generate(ids, attention_mask=mask, **settings)
            for row in drawn[:, ids.shape[1] :].tolist():
                length = next((t for t, i in enumerate(row, 1) if i in ends), None)
                answers.append(row[:length])
    return answers


def score_answers(function, flag, rows, prompts, texts):
    """Scores of answers by a function of the user's, a finite number each, or None for what it
    cannot score. Asked on rank 0 alone; it reads what is graded, see `visible`."""
    if parallel.rank():
        return parallel.gather([])
    given = function(prompts, [visible(text) for text in texts], rows)
    try:
        # [:] refuses a dict and a set, which would be read by key; + 0.0 a text such as "1"
        scores = [x if x is None else float(x + 0.0) for x in given[:]]
        is_right = len(scores) == len(texts) and all(math.isfinite(x or 0) for x in scores)
    except (TypeError, ValueError, LookupError):
        is_right = False
    if not is_right:
        expected = f"expected a finite number or None for each of {len(texts)} answers"
        raise UserError(f"{flag}: returned {given!r:.200}; {expected}")
    return parallel.gather(scores)


def scored(key, scores):
    """{key: mean score, key_low and key_high: ± 1.96 standard errors}; None is in no mean.

    >>> scored("val/gold", [1.0, 0.0, None])["val/gold"]
    0.5
    """
    values = np.array([x for x in scores if x is not None], float)
    if not len(values):
        return {key: None}
    half = 1.96 * values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else math.nan
    mean = values.mean().item()
    return {key: mean, f"{key}_low": mean - half, f"{key}_high": mean + half}


class Answers:
    """The sample answers of an evaluation: to --prompts that are not trained on, else to the rows
    `shown`, which are not scored.

    trained   the keys of the prompts that are trained on, see `messages.prompt_key`
    """

    def __init__(self, run, tokenizer, config, shown, trained):
        args, self.run, self.tokenizer, self.rows = run.args, run, tokenizer, shown
        self.gold = load_function(args.gold, "--gold") if args.gold else None
        room = min(args.max_length, max_positions(config)) - args.max_new_tokens
        if room < 1:
            wrong = "leaves no room for a prompt in --max-length, or in the model's positions"
            raise UserError(f"--max-new-tokens: {wrong}")
        if args.gold and not args.prompts:
            raise UserError("--gold scores answers to prompts: add --prompts FILE")
        if args.prompts:
            rows = read_prompts(args.prompts, "--prompts", args.chat)
            rows = [row for row in rows if row.get("split") == "val"] or rows
            unseen = [row for row in rows if prompt_key(row) not in trained]
            if len(unseen) < len(rows):
                seen = f"{len(rows) - len(unseen)} of {len(rows)} prompts are also trained on"
                fate = "are left out" if unseen else "are answered: val/ is of no held-out prompts"
                print(f"prompts    {seen} and {fate}")
            self.rows = some_prompts(unseen or rows, MOST_PROMPTS)
        self.ids = [encode_prompt(tokenizer, row["prompt"], room) for row in self.rows]

    def __call__(self, policy, reference=None):
        """(metrics, two samples): scored are answers at --eval-temperature; shown are greedy ones,
        the model's first choice. reference: of val/kl, the policy's start."""
        args, decode, ids = self.run.args, self.tokenizer.batch_decode, self.ids
        shown = generate(policy, self.tokenizer, ids[:2], args.max_new_tokens, temperature=0)
        texts = zip(decode(ids[:2]), decode(shown, skip_special_tokens=True))
        samples = [{"prompt": prompt, "answer": answer} for prompt, answer in texts]
        if not args.prompts:
            return {}, samples
        settings = args.max_new_tokens, args.eval_temperature, args.seed
        answers, ends = generate(policy, self.tokenizer, ids, *settings), end_ids(self.tokenizer)
        metrics = {"val/n": len(ids), "val/cut": np.mean([a[-1] not in ends for a in answers])}
        if self.gold:
            texts = decode(answers, skip_special_tokens=True)
            prompts = [row["prompt"] for row in self.rows]
            scores = score_answers(self.gold, "--gold", self.rows, prompts, texts)
            metrics |= scored("val/gold", scores)
        if reference and args.eval_temperature:
            settings = self.run, pad_id(self.tokenizer), args.eval_temperature
            metrics["val/kl"] = kl_to_start(policy, reference, ids, answers, *settings)
        return metrics, samples


def kl_to_start(policy, reference, prompts, answers, run, pad, temperature):
    """KL(π‖π_ref) per answer, in nats: the mean of log π − log π_ref over the policy's own answers,
    at the temperature they were drawn at. It is what evaluate.py compares policies at."""
    both, total = [*zip(prompts, answers)], 0.0
    for part in run.micro_batches(range(len(both)), [len(p) + len(a) for p, a in both]):
        rows = pad_rows(*zip(*(both[i] for i in part)), pad, run.device)  # (b, T) each
        logps, _ = policy(*rows, temperature)
        with adapter_off(reference):
            ref_logps, _ = reference(*rows, temperature)
        total += (logps - ref_logps).sum().item()
    return parallel.all_sum(total) / len(both)


# ---- preflight ----


@torch.no_grad()
def check_policy(policy, tokenizer, ids, attention_mask, answer_mask, flag):
    """UserError unless our log-probs of the first row are those of the model's own logits; prints
    the row, token by token."""
    seen = attention_mask[0]
    ids, mask = ids[:1, seen], answer_mask[:1, seen]  # (1, n)
    logps = policy(ids, torch.ones_like(mask), mask)[0]
    with parallel.autocast(ids.device, policy.dtype):
        logits = policy.model(ids).logits[:, :-1].float()  # (1, n−1, V)
    own = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)  # (1, n−1)
    gap = (logps[:, 1:] - own)[mask[:, 1:]].abs().mean().item()
    identity("gap between our log-probs and the model's", gap, 0, 1e-4, policy.dtype, flag)
    row = ["▮" * trained + tokenizer.decode(token) for token, trained in zip(ids[0], mask[0])]
    print("row        ▮ before each trained token:", "".join(row)[-1200:].replace("\n", "⏎"))


def identity(name, value, expected, bound, dtype, flag):
    """UserError unless |value − expected| ≤ bound, a thousand times that in half precision."""
    if not abs(value - expected) <= bound * (1 if dtype == torch.float32 else 1000):
        hint = "" if math.isfinite(value) else "; broken weights, or an overflow: try --dtype fp32"
        raise UserError(f"{flag}: {name} is {value:.4g}, expected {expected:.4g}{hint}")
