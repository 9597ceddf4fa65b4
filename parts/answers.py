"""parts/answers.py: what an evaluation samples, scores and shows; what must hold before step one."""

import hashlib
import math

import torch

from common import encode_prompt, end_ids, pad_id
from parts import parallel
from parts.files import UserError, existing_file, load_function, number, read_jsonl, where_raised
from parts.pairs import as_chat, check_prompt, prompt_key

MOST_PROMPTS = 64  # that an evaluation answers


def add_answer_arguments(parser):
    """Flags of the sample answers of an evaluation."""
    add = parser.add_argument
    # fmt: off
    add("--prompts", type=existing_file, help=f'JSONL of prompts, {MOST_PROMPTS} of which are answered at each evaluation; rows of "split": "val", if there are any')
    add("--gold", help="FILE:FUNCTION that scores these answers, such as data/recruiter.py:reward")
    add("--max-new-tokens", type=number(int, at_least=1), default=96, help="most tokens of an answer")
    add("--eval-temperature", type=number(at_least=0), default=1.0, help="temperature of these answers; 0 is greedy")
    # fmt: on


def visible(text):
    """What is graded: the text behind the last </think>; nothing where a <think> never closes.

    >>> visible("<think>hm</think> Hello"), visible("<think>hm, hello"), visible("Hello")
    ('Hello', '', 'Hello')
    """
    text = text.rpartition("</think>")[2].strip()
    return "" if "<think>" in text else text


def read_prompts(path, flag, chat=False):
    """Rows of a prompt file, {"prompt": …, …}; with `chat` texts are made messages."""
    rows = list(read_jsonl(path, check_prompt, flag=flag))
    if not rows:
        raise UserError(f"{flag} {path}: no prompt")
    for row in rows if chat else ():
        as_chat(row, "prompt")
    return rows


@torch.no_grad()
def generate(policy, tokenizer, prompt_ids, max_new_tokens, temperature, seed=0, rows=32):
    """[(ids, did it end)] of one answer to each prompt, by transformers' own generate: for
    evaluations. What is trained on is drawn by parts/sampling.py, with exact log-probs.

    Under torchrun every process draws all answers, so that their number changes none.
    """
    from transformers import GenerationConfig

    ends, pad, answers, model = end_ids(tokenizer), pad_id(tokenizer), [], policy.model
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=temperature > 0, temperature=temperature or None,
        top_k=0, eos_token_id=ends, pad_token_id=pad,
    )  # fmt: skip
    own, model.generation_config = model.generation_config, config
    autocast = torch.autocast(
        model.device.type, policy.dtype, enabled=policy.dtype != torch.float32
    )
    gpus = [model.device] if model.device.type == "cuda" else []
    try:
        with parallel.decoding(policy), autocast, torch.random.fork_rng(gpus):
            torch.manual_seed(seed)
            for start in range(0, len(prompt_ids), rows):
                part = prompt_ids[start : start + rows]
                width = max(map(len, part))
                ids = torch.tensor([[pad] * (width - len(row)) + [*row] for row in part])
                mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in part])
                ids, mask = ids.to(model.device), mask.to(model.device)
                drawn = model.generate(input_ids=ids, attention_mask=mask, use_cache=True)
                for row in drawn[:, width:].tolist():
                    stop = next((t for t, i in enumerate(row, 1) if i in ends), None)
                    answers.append((row[:stop], stop is not None))
    finally:
        model.generation_config = own
    return answers


def score_answers(function, flag, rows, prompts, texts):
    """Scores of answers by a function of the user's, a finite number each, or None for what it
    cannot score. Asked on rank 0 alone; it reads what is graded, see `visible`."""
    scores = None
    if not parallel.rank():
        try:
            scores = list(function(prompts, [visible(text) for text in texts], rows))
        except Exception as error:  # the user's own code may raise anything
            raise UserError(f"{flag}: {where_raised(error)}") from error
        if len(scores) != len(texts):
            raise UserError(f"{flag}: returned {len(scores)} scores for {len(texts)} answers")
        for score in scores:
            if score is not None and not math.isfinite(score):
                raise UserError(f"{flag}: returned {score}; expected finite numbers, or None")
    return parallel.gather([scores])[0]


class Answers:
    """The sample answers of an evaluation: to --prompts that are not trained on, else to
    `otherwise`, which are shown and not scored.

    trained   the keys of the prompts that are trained on, see `pairs.prompt_key`
    """

    def __init__(self, args, tokenizer, otherwise, trained):
        self.args, self.tokenizer, self.rows, self.gold = args, tokenizer, otherwise, None
        if args.gold:
            self.gold = load_function(args.gold, "--gold")
        if args.gold and not args.prompts:
            raise UserError("--gold scores answers to prompts: add --prompts FILE")
        if args.prompts:
            rows = read_prompts(args.prompts, "--prompts", args.chat)
            rows = [row for row in rows if row.get("split") == "val"] or rows
            unseen = [row for row in rows if prompt_key(row) not in trained]
            if len(unseen) < len(rows):
                seen = len(rows) - len(unseen)
                done = (
                    "left out" if unseen else "answered all the same: val/ is not of held-out ones"
                )
                print(f"prompts    {seen} of {len(rows)} prompts are also trained on: {done}")
            self.rows = some_prompts(unseen or rows, MOST_PROMPTS)
        room = args.max_length - args.max_new_tokens
        if room < 1:
            raise UserError("--max-new-tokens: leaves no room for a prompt in --max-length")
        prompts = [row["prompt"] for row in self.rows]
        self.ids = [encode_prompt(tokenizer, prompt, room) for prompt in prompts]

    def __call__(self, policy):
        """(metrics, two samples, answers as lists of ids): scored are answers at
        --eval-temperature; shown are greedy ones, the model's first choice."""
        args, n = self.args, self.args.max_new_tokens
        shown = generate(policy, self.tokenizer, self.ids[:2], n, 0)
        texts = self.tokenizer.batch_decode([ids for ids, _ in shown], skip_special_tokens=True)
        prompts = self.tokenizer.batch_decode(self.ids[:2])
        samples = [{"prompt": p, "answer": a} for p, a in zip(prompts, texts)]
        if not args.prompts:
            return {}, samples, []
        drawn = generate(policy, self.tokenizer, self.ids, n, args.eval_temperature, args.seed)
        answers = [ids for ids, _ in drawn]
        metrics = {
            "val/n": len(drawn),
            "val/cut": sum(not ended for _, ended in drawn) / len(drawn),
        }
        if self.gold:
            texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
            metrics |= scored("val/gold", self.gold, "--gold", self.rows, texts)
        return metrics, samples, answers


def scored(key, function, flag, rows, texts):
    """{key: mean score of the answers, key_low and key_high: its 95 % interval, …}"""
    prompts = [row["prompt"] for row in rows]
    scores = [x for x in score_answers(function, flag, rows, prompts, texts) if x is not None]
    metrics = {key: None, f"{key}_missing": len(texts) - len(scores)}
    if scores:
        values = torch.tensor(scores, dtype=torch.float64)
        half = 1.96 * values.std().item() / math.sqrt(len(scores)) if len(scores) > 1 else math.nan
        mean = values.mean().item()
        metrics |= {key: mean, f"{key}_low": mean - half, f"{key}_high": mean + half}
    return metrics


def some_prompts(rows, most):
    """At most `most` rows, chosen by the prompt's hash: always the same ones."""

    def digest(row):
        return hashlib.sha256(prompt_key(row).encode()).digest()

    return rows if len(rows) <= most else sorted(rows, key=digest)[:most]


# ---- preflight ----


@torch.no_grad()
def check_policy(policy, tokenizer, ids, attention_mask, answer_mask, flag):
    """Our log-probs are those of the model's own logits, within the rounding of the precision;
    prints one row, token by token."""
    logps = policy(ids[:1], attention_mask[:1], answer_mask[:1])[0][0]  # (T,)
    with torch.autocast(ids.device.type, policy.dtype, enabled=policy.dtype != torch.float32):
        own = policy.model(input_ids=ids[:1], attention_mask=attention_mask[:1].long()).logits
    own = own[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
    gap = (logps[1:] - own)[answer_mask[0, 1:]].abs().mean().item()
    identity("our log-probs are the model's: gap", gap, 0, 1e-4, policy.dtype, flag)
    given = tokenizer.decode(ids[0][attention_mask[0] & ~answer_mask[0]])
    trained = "▮".join(tokenizer.decode([i]) for i in ids[0][answer_mask[0]])
    print(f"row        given, then ▮ before each trained token: {given[-400:]}▮{trained[:600]}")


def identity(name, value, expected, bound, dtype, flag):
    """UserError unless |value − expected| ≤ bound, a thousand times that in half precision."""
    bound *= 1 if dtype == torch.float32 else 1000
    if not abs(value - expected) <= bound:
        hint = "" if math.isfinite(value) else "; broken weights, or an overflow: try --dtype fp32"
        raise UserError(f"{flag}: {name} is {value:.4g}, expected {expected:.4g}{hint}")
