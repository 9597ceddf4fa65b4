"""sft.py: prompts with answers in, a model that imitates them out; the start of every other stage.

Objective    minimise −(1/n) Σ log π(token | tokens before it) over the n answer tokens
Algorithm    (1) read rows; render the prompt; mark the answer tokens
             (2) policy: log-probs of the answer tokens
             (3) loss: the negative of their mean over the whole optimiser step
             (4) update: backward, clip the gradient, step
             (5) now and then: held-out loss, sample answers and their score
Conventions  the end token is an answer token; the prompt is masked; of {"text"} all is trained but
             its first token; the loss is in nats per trained token, over all micro-batches and
             processes of a step; an answer that stands in several rows is trained once
Left out     1. packing, for micro-batches hold rows of similar length
             2. NEFTune and loss weights per row: no run of ours needed them
Run          python sft.py --data data/prefs_train.jsonl
             python sft.py --model Qwen/Qwen2.5-0.5B --data mine.jsonl --out runs/sft
             python sft.py --init-config data/tiny-base --data corpus.jsonl      (from scratch)
             torchrun --nproc-per-node 8 sft.py --fsdp --model Qwen/Qwen2.5-7B --data mine.jsonl
Writes       a model folder, args.json, metrics.jsonl, samples.jsonl, checkpoint/
To copy      the loss is one line of `main`: minus the sum of what `Policy` in common.py returns,
             divided by the number of trained tokens; rows come from `encode_dialogue`
Reference    Ouyang et al. 2022, arXiv 2203.02155, section 3.5 (SFT)
Axes         B rows of a batch, b rows of a forward, T tokens
"""

import math
import shlex
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import common
from common import Policy, Refused, batch_indices, encode_pair, end_ids, pad_id, pad_rows
from parts import flags, runs
from parts.answers import Answers, add_answer_arguments, check_policy
from parts.files import UserError, command, counts_in_words, existing_file, read_jsonl
from parts.pairs import (
    add_split_arguments,
    as_chat,
    check_answer,
    check_pair,
    check_prompt,
    check_text,
    prompt_key,
    say_how_text_is_read,
    split,
    words,
)
from parts.parallel import all_sum

# below 100 M parameters (made the bundled base), above (reports/real-model.md), with LoRA
RATES = 1e-3, 2e-5, 2e-4
LEAST_BEGINNING = 8  # letters of a text that are more than chance where another begins with them
SHOW = ("loss", "lr", "grad_norm", "tokens_per_s")
HEADLINE = ("eval/loss", "val/gold")

# ---- the arguments ----


def parse_args(argv=None):
    example = "sft.py --data FILE [FILE …] [--model MODEL] [flags]"
    parser = flags.parser(example, "Supervised fine-tuning: imitate answers.", "runs/sft", RATES)
    add = parser.add_argument
    # fmt: off
    add("--data", nargs="+", type=existing_file, default=["data/prefs_train.jsonl"], help="JSONL files; their rows: see the header")
    add("--init-config", help="folder with config.json and tokenizer: random weights of that shape, in place of --model")
    add("--keep-order", action="store_true", help="do not shuffle: rows in the order of the files, for a curriculum")
    add_split_arguments(parser)
    parser.set_defaults(eval_fraction=0.02)
    # fmt: on
    add_answer_arguments(parser)
    args = parser.parse_args(argv)
    if args.init_config and args.lora_rank:
        raise UserError("--init-config: random weights are trained whole; leave --lora-rank out")
    args.model = args.init_config or args.model
    return args


# ---- the rows ----


FORMS = ("messages", "completion", "chosen", "text")


def form_of(row):
    """The column that is trained on: the first of FORMS that is filled."""
    return next((key for key in FORMS if row.get(key)), "text")


def check_row(row):
    """ValueError unless this is a row of one of the four forms."""
    form = form_of(row)
    if form == "messages":
        check_text(row, form)
        if isinstance(row[form], str) or row[form][0]["role"] == "assistant":
            raise ValueError('"messages" must be a list that starts with what is answered')
    elif form == "completion":
        check_prompt(row)
        check_answer(row, form)
        if row.get("label") is False:
            raise ValueError('"label" is false: delete the rows whose answer is not to be imitated')
    elif form == "chosen":
        check_pair(row)
    elif not isinstance(row.get("text"), str):
        forms = '"prompt" and "completion", "messages", "text", or "chosen" and "rejected"'
        raise ValueError(f"expected {forms}, not empty; found {', '.join(row) or 'nothing'}")


def turns_to_train(messages):
    """Places of the assistant's turns, but for blank ones and those of "weight" 0 (OpenAI's)."""
    return [
        i
        for i, turn in enumerate(messages)
        if turn["role"] == "assistant" and turn.get("weight") != 0
        if words([turn]) or turn.get("tool_calls")
    ]


def encode_answers(tokenizer, row, max_length):
    """[(prompt ids, answer ids)] of a checked row; of a dialogue from its last answer to its first;
    of a text all but the first token is the answer."""
    form, tools = form_of(row), row.get("tools")
    value = row[form]
    if form == "messages":
        turns = reversed(turns_to_train(value))
        return [encode_pair(tokenizer, value[:i], value[i : i + 1], tools=tools) for i in turns]
    if form != "text":
        prompt = row["prompt"]
        return [encode_pair(tokenizer, prompt, value, max_length=max_length, tools=tools)]
    if not words(value):
        return []
    ids, ends = common.encode(tokenizer, value, rendered=False), end_ids(tokenizer)
    ids += ends[-1:] * (ids[-1] not in ends)  # a corpus may bring its own
    return [(ids[:1], ids[1:])]


def join_answers(answers, trained):
    """[(ids, mask)], mask True at tokens that are trained: each answer once. A turn that the
    template writes otherwise once the dialogue goes on has a row of its own (Qwen3 drops its
    thought); one that stands after the same tokens in an earlier row is context.

    answers   of `encode_answers`
    trained   hashes of the tokens up to the end of each answer so far; these are added
    """
    rows = []
    for prompt, answer in answers:
        ids = prompt + answer
        if hash(tuple(ids)) in trained:
            continue
        trained.add(hash(tuple(ids)))
        mask = next((mask for whole, mask in rows if whole[: len(ids)] == ids), None)
        if mask is None:
            mask = [False] * len(ids)
            rows.append((ids, mask))
        mask[len(prompt) : len(ids)] = [True] * len(answer)
    return rows


def prompt_of(row):
    """What the last answer of a row answers; a text as a whole."""
    if form_of(row) == "messages":
        return row["messages"][: max(turns_to_train(row["messages"]), default=1)]
    return row["text"] if form_of(row) == "text" else row["prompt"]


def join_beginnings(keys):
    """{key: the shortest other one that it begins with, or itself}: texts of which one begins with
    the other are one text. In sorted order a beginning comes directly before what goes on.

    >>> join_beginnings(["hi,hello.how?", "bye", "hi,hello."])
    {'bye': 'bye', 'hi,hello.': 'hi,hello.', 'hi,hello.how?': 'hi,hello.'}
    """
    joined, first = {}, ""
    for key in sorted(set(keys)):
        goes_on = len(first) >= LEAST_BEGINNING and key.startswith(first)
        joined[key] = first = first if goes_on else key
    return joined


@dataclass
class Row:
    """An encoded row: its tokens, which of them are trained, file and line, the key that decides
    its side of the split, and a prompt to show."""

    ids: np.ndarray
    mask: torch.Tensor
    place: str
    key: str
    prompt: object


def load_rows(args, tokenizer, max_length):
    """(rows, train, held): a list of `Row`, and the numbers of those on each side of the split."""
    rows, counts, trained, text_keys, texts = [], Counter(), set(), [], 0
    for name in args.data:
        before = len(rows)
        for line, row in read_jsonl(name, check_row, numbered=True, flag="--data"):
            counts["rows"] += 1
            prompt, form = prompt_of(row), form_of(row)
            key = prompt_key(row | {"prompt": prompt})
            if isinstance(prompt, str):
                text_keys.append(key)
                texts += form != "text"
            if args.chat and form in ("completion", "chosen"):
                as_chat(row, "prompt", form)
                prompt = row["prompt"]
            try:
                answers, so_far = encode_answers(tokenizer, row, max_length), len(trained)
            except Refused as error:
                counts[f"dropped: {error}"] += 1
                continue
            encoded = join_answers(answers, trained)
            counts["answers of earlier rows"] += len(answers) - len(trained) + so_far
            for ids, mask in encoded or [([], [])]:
                counts[f"cut to --max-length {max_length}"] += len(ids) >= max_length
                if any(mask[:max_length]):
                    ids, mask = np.array(ids[:max_length], np.int32), torch.tensor(mask)
                    rows.append(Row(ids, mask[:max_length], f"{name}:{line}", key, prompt))
                else:
                    counts["dropped: nothing to train"] += 1
        if len(rows) == before:
            raise UserError(f"--data {name}: no usable row ({counts_in_words(counts)})")
    joined = join_beginnings(text_keys)
    counts["texts that begin with another"] = sum(key != x for key, x in joined.items())
    for row in rows:
        row.key = joined.get(row.key, row.key)
    keys = [row.key for row in rows]
    train, held = split(keys, [False] * len(keys), args.eval_fraction)
    print(f"data       {counts_in_words(counts)}; training {len(train)}, held out {len(held)}")
    say_how_text_is_read(tokenizer, texts, args.chat)
    return rows, train, held


def make_batch(rows, pad, device):
    """(ids, attention_mask, answer_mask), (b, T) each."""
    ids, attention_mask, _ = pad_rows([row.ids for row in rows], [[]] * len(rows), pad)
    mask = pad_sequence([row.mask for row in rows], batch_first=True)
    return [x.to(device) for x in (ids, attention_mask, mask)]


# ---- evaluation ----


@torch.no_grad()
def mean_loss(run, policy, rows, pad):
    """−log π per trained token of these rows, of all ranks."""
    loss = 0.0
    for part in run.micro_batches(range(len(rows)), [len(row.ids) for row in rows]):
        logps, _ = policy(*make_batch([rows[i] for i in part], pad, run.device))
        loss -= logps.sum().item()
    return all_sum(loss) / count_trained(rows)


def count_trained(rows):
    return sum(row.mask.sum().item() for row in rows)


def evaluate(run, policy, held_rows, pad, answers):
    """Log the loss of held-out rows; sample answers and their score."""
    metrics, samples, _ = answers(policy)
    if held_rows:
        loss = mean_loss(run, policy, held_rows, pad)
        metrics = {"eval/loss": loss, "eval/n": len(held_rows)} | metrics
    run.evaluation(metrics, samples)


# ---- the run ----


def load_policy(args, run, config):
    """The policy: all its weights are trained, or adapters. With --init-config they are random."""
    if not args.init_config:
        settings = args.model, run.device, run.dtype, True, args.lora_rank, args.seed
        return Policy(common.load_model(*settings), run.dtype)
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_config
    model = common.opened("--init-config", config, load, dtype=torch.float32)
    return Policy(model.to(run.device).eval(), run.dtype)


def main(argv=None):
    args = parse_args(argv)
    run = runs.Run("sft", args, SHOW, HEADLINE)
    flag = "--init-config" if args.init_config else "--model"
    tokenizer, config = (
        common.load_tokenizer(args.model, flag),
        common.load_config(args.model, flag),
    )
    pad, seconds = pad_id(tokenizer), None
    # (1) read rows; render the prompt; mark the answer tokens
    rows, train, held = load_rows(
        args, tokenizer, min(args.max_length, common.max_positions(config))
    )
    common.check_ids(config, [pad], *(row.ids for row in rows))
    held_rows, lengths = [rows[i] for i in held], [len(row.ids) for row in rows]
    shown = [{"prompt": rows[i].prompt} for i in (*held, *train)[:2]]
    answers = Answers(args, tokenizer, config, shown, {rows[i].key for i in train})

    policy = load_policy(args, run, config)
    per_epoch, encoded = math.ceil(len(train) / args.batch_size), [row.ids for row in rows]
    optimizer = run.start({"policy": policy}, tokenizer, RATES, per_epoch, encoded)
    if run.step == 0:
        first, start = [rows[i] for i in train[: args.batch_size]], time.perf_counter()
        loss = mean_loss(run, policy, first, pad)
        # forward and backward take three times as long as a forward
        seconds = 3 * (time.perf_counter() - start)
        check_policy(policy, tokenizer, *make_batch(first[:1], pad, run.device), flag)
        print(f"preflight  log-probs are the model's, loss before step one {loss:.4f}: ok")
        evaluate(run, policy, held_rows, pad, answers)

    for step in run.steps(seconds):
        order = args.seed, step, args.keep_order
        places, epoch = batch_indices(len(train), args.batch_size, *order)
        batch, total = train[places], 0.0
        tokens = count_trained([rows[i] for i in batch])  # of the whole step
        optimizer.zero_grad()
        for part in run.micro_batches(batch, lengths):
            # (2) policy: log-probs of the answer tokens
            logps, _ = policy(*make_batch([rows[i] for i in part], pad, run.device))  # (b, T)
            # (3) loss: the negative of their mean over the whole optimiser step
            loss = -logps.sum() / tokens
            # (4) update: backward, clip the gradient, step
            run.scaler.scale(loss).backward()
            total += loss.item()
        update = run.update(total, [rows[i].place for i in batch[:4]])
        counts = {"trained_tokens": tokens, "tokens": sum(lengths[i] for i in batch)}
        run.log({"epoch": epoch, **update, **counts})
        # (5) now and then: held-out loss, sample answers and their score
        if run.evaluates(step):
            evaluate(run, policy, held_rows, pad, answers)

    return run.finish(f"python dpo.py --model {shlex.quote(args.out)} --pairs YOUR_PAIRS.jsonl")


if __name__ == "__main__":
    command(main, flags.OUT_OF_MEMORY)
