"""sft.py: prompts with answers in, a model that imitates them out; the start of every other stage.

Objective    minimise −(1/n) Σ log π(token | tokens before it) over the n answer tokens
Algorithm    (1) read rows; render the prompt; mark the answer tokens
             (2) policy: log-probs of the answer tokens
             (3) loss: the negative of their mean over the whole optimiser step
             (4) update: backward, clip the gradient, step
             (5) now and then: held-out loss, sample answers and their score
Rows         {"prompt", "completion"} · {"messages"}, of which each answer is trained · {"text"} ·
             {"prompt", "chosen", "rejected"}, of which the chosen answer is
Conventions  the end token is an answer token; the prompt is masked; of {"text"} all is trained but
             its first token; the loss is in nats per trained token, over all micro-batches and
             processes of a step; an answer that stands in several rows is trained once
Left out     1. packing, for micro-batches hold rows of similar length
             2. NEFTune, and weights per row or message: no run of ours needed them
Run          python sft.py --data data/prefs_train.jsonl
             python sft.py --model Qwen/Qwen2.5-0.5B --data mine.jsonl --out runs/sft
             python sft.py --init-config data/tiny-base --data corpus.jsonl      (from scratch)
             torchrun --nproc-per-node 8 sft.py --fsdp --model Qwen/Qwen2.5-7B --data mine.jsonl
Writes       a model folder, args.json, metrics.jsonl, samples.jsonl, checkpoint/
To copy      the loss is one line of `main`: minus the sum of what `Policy` in common.py returns,
             divided by the number of trained tokens; rows come from `encode_pair`
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
from parts.messages import as_chat, check_answer, check_prompt, check_text, prompt_key, words
from parts.pairs import add_split_arguments, check_pair, say_how_text_is_read, split
from parts.parallel import all_sum

# below 100 M parameters (made the bundled base), above (reports/real-model.md), with LoRA
RATES = 1e-3, 2e-5, 2e-4
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


def check_row(row):
    """ValueError unless this is a row of the header. Fills in "prompt": of messages all before the
    last answer, of a text the text; and "turns", the places of the answers in "messages".
    A preferred answer becomes the completion."""
    if row.get("messages"):
        check_text(row, "messages")
        turns = row["messages"]
        if isinstance(turns, str) or turns[0]["role"] == "assistant":
            raise ValueError('"messages" must be a list that starts with what is answered')
        if any("weight" in turn for turn in turns):
            raise ValueError('"weight" of a message is not read: delete turns not to be imitated')
        spoken = [i for i, turn in enumerate(turns) if words([turn]) or turn.get("tool_calls")]
        row["turns"] = [i for i in spoken if turns[i]["role"] == "assistant"]
        row["prompt"] = turns[: max(row["turns"], default=1)]
    elif row.get("completion"):
        check_prompt(row)
        check_answer(row, "completion")
        if row.get("label") is False:
            raise ValueError('"label" is false: delete the rows whose answer is not to be imitated')
    elif row.get("chosen"):
        check_pair(row)
        row["completion"] = row["chosen"]
    elif isinstance(row.get("text"), str):
        row["prompt"] = row["text"]
    else:
        forms = '"prompt" and "completion", "messages", "text", or "chosen" and "rejected"'
        raise ValueError(f"expected {forms}, not empty; found {', '.join(row) or 'nothing'}")


def encode_answers(tokenizer, row, max_length):
    """[(prompt ids, answer ids)] of a checked row; of a dialogue from its last answer to its first;
    of a text all but the first token is the answer."""
    more = {"max_length": max_length, "tools": row.get("tools")}
    if row.get("messages"):
        turns, places = row["messages"], reversed(row["turns"])
        return [encode_pair(tokenizer, turns[:i], turns[i : i + 1], **more) for i in places]
    if row.get("completion"):
        return [encode_pair(tokenizer, row["prompt"], row["completion"], **more)]
    ids, ends = common.encode(tokenizer, row["text"], rendered=False), end_ids(tokenizer)
    if not ids or ids[-1] not in ends:  # a corpus may bring its own
        ids.append(ends[-1])
    return [(ids[:1], ids[1:max_length])] if words(row["text"]) and len(ids) > 1 else []


def join_answers(answers, trained, counts):
    """[(ids, mask)], mask True at tokens that are trained: the answers of a dialogue share a row. A
    row of its own has an answer that the template writes otherwise once the dialogue goes on (Qwen3
    drops its thought), or that is cut.

    answers   of `encode_answers`: each begins the one before it, if it shares its row
    trained   hashes of the tokens up to the end of each answer so far, to which these are added;
              one that is there already is counted and left out: an earlier row trains it
    """
    rows = []
    for prompt, answer in answers:
        ids = prompt + answer
        written = hash(tuple(ids))
        if written in trained:
            counts["answers of earlier rows"] += 1
            continue
        trained.add(written)
        if not rows or rows[-1][0][: len(ids)] != ids:
            rows.append((ids, [False] * len(ids)))
        rows[-1][1][len(prompt) : len(ids)] = [True] * len(answer)
    return rows


@dataclass
class Row:
    """An encoded row: its tokens, which of them are trained, (T,) each; file and line; the key that
    decides its side of the split; a prompt to show."""

    ids: np.ndarray
    mask: torch.Tensor
    place: str
    key: str
    prompt: object


def load_rows(args, tokenizer, max_length):
    """(rows, train, held): a list of `Row`, and the numbers of those on each side of the split."""
    rows, counts, trained = [], Counter(), set()
    for name in args.data:
        for line, row in read_jsonl(name, check_row, numbered=True, flag="--data"):
            counts["rows"] += 1
            key = prompt_key(row)
            if row.get("completion") and isinstance(row["prompt"], str):
                counts["prompts given as text"] += 1
                if args.chat:
                    as_chat(row, "prompt", "completion")
            try:
                answers = encode_answers(tokenizer, row, max_length)
            except Refused as error:
                counts[f"dropped: {error}"] += 1
                continue
            counts["dropped: nothing to train"] += not answers
            for ids, mask in join_answers(answers, trained, counts):
                is_long = len(ids) >= max_length
                counts[f"cut to --max-length {max_length}, or just as long"] += is_long
                arrays = np.array(ids, np.int32), torch.tensor(mask)
                rows.append(Row(*arrays, f"{name}:{line}", key, row["prompt"]))
    if not rows:
        raise UserError(f"--data: no usable row ({counts_in_words(counts)})")
    train, held = split([row.key for row in rows], [False] * len(rows), args.eval_fraction)
    print(f"data       {counts_in_words(counts)}; training {len(train)}, held out {len(held)}")
    say_how_text_is_read(tokenizer, counts["prompts given as text"], args.chat)
    return rows, train, held


def make_batch(rows, part, pad, device):
    """(ids, attention_mask, answer_mask), (b, T) each, of the rows whose numbers are in `part`."""
    ids, attention_mask, _ = pad_rows([rows[i].ids for i in part], [()] * len(part), pad)
    answer_mask = pad_sequence([rows[i].mask for i in part], batch_first=True)
    return [x.to(device) for x in (ids, attention_mask, answer_mask)]


# ---- evaluation ----


@torch.no_grad()
def mean_loss(run, policy, rows, indices, pad):
    """−log π per trained token of the rows with these numbers, of all ranks."""
    loss = tokens = 0
    for part in run.micro_batches(indices, [len(row.ids) for row in rows]):
        batch = make_batch(rows, part, pad, run.device)
        logps, _ = policy(*batch)
        loss -= logps.sum().item()
        tokens += batch[-1].sum().item()
    return all_sum(loss) / all_sum(tokens)


def evaluate(run, policy, rows, held, pad, answers):
    """Log the loss of held-out rows; sample answers and their score."""
    metrics, samples = answers(policy)
    if len(held):
        metrics["eval/loss"] = mean_loss(run, policy, rows, held, pad)
        metrics["eval/n"] = len(held)
    run.evaluation(metrics, samples)


# ---- the run ----


def main(argv=None):
    args = parse_args(argv)
    run = runs.Run("sft", args, SHOW, HEADLINE)
    flag = "--init-config" if args.init_config else "--model"
    config = common.load_config(args.model, flag)
    tokenizer = common.load_tokenizer(args.model, flag)
    # (1) read rows; render the prompt; mark the answer tokens
    longest = min(args.max_length, common.max_positions(config))
    rows, train, held = load_rows(args, tokenizer, longest)
    pad, lengths, seconds = pad_id(tokenizer), [len(row.ids) for row in rows], None
    shown = [{"prompt": rows[i].prompt} for i in (*held, *train)[:2]]
    answers = Answers(run, tokenizer, config, shown, {rows[i].key for i in train})

    # the policy: all its weights are trained, or adapters; with --init-config they are random
    if args.init_config:
        from transformers import AutoModelForCausalLM

        load = AutoModelForCausalLM.from_config
        model = common.opened(flag, config, load, dtype=torch.float32).to(run.device).eval()
    else:
        settings = run.device, run.dtype, True, args.lora_rank, args.seed
        model = common.load_model(args.model, *settings)
    policy, per_epoch = Policy(model, run.dtype), math.ceil(len(train) / args.batch_size)
    encoded = [row.ids for row in rows]
    optimizer = run.start({"policy": policy}, tokenizer, RATES, per_epoch, encoded)
    if run.step == 0:
        check_policy(policy, tokenizer, *make_batch(rows, train[:1], pad, run.device), flag)
        start = time.perf_counter()
        loss = mean_loss(run, policy, rows, train[: args.batch_size], pad)
        seconds = 3 * (time.perf_counter() - start)  # a step has a backward, too
        print(f"preflight  log-probs are the model's, loss before step one {loss:.4f}: ok")
        evaluate(run, policy, rows, held, pad, answers)

    for step in run.steps(seconds):
        order = args.seed, step, args.keep_order
        places, epoch = batch_indices(len(train), args.batch_size, *order)
        batch, total = train[places], 0.0
        trained = sum(rows[i].mask.sum().item() for i in batch)  # tokens of the whole step
        optimizer.zero_grad()
        for part in run.micro_batches(batch, lengths):
            # (2) policy: log-probs of the answer tokens
            logps, _ = policy(*make_batch(rows, part, pad, run.device))  # (b, T)
            # (3) loss: the negative of their mean over the whole optimiser step
            loss = -logps.sum() / trained
            # (4) update: backward, clip the gradient, step
            run.scaler.scale(loss).backward()
            total += loss.item()
        loss, grad_norm = run.clip(total, [rows[i].place for i in batch[:4]])
        lr = run.set_lr(step)
        run.scaler.step(optimizer)
        run.scaler.update()
        update = {"loss": loss, "lr": lr, "grad_norm": grad_norm}
        counts = {"tokens": sum(lengths[i] for i in batch), "trained_tokens": trained}
        run.log({"epoch": epoch, **update, **counts})
        # (5) now and then: held-out loss, sample answers and their score
        if run.evaluates(step):
            evaluate(run, policy, rows, held, pad, answers)

    return run.finish(f"python dpo.py --model {shlex.quote(args.out)} --pairs YOUR_PAIRS.jsonl")


if __name__ == "__main__":
    command(main, flags.OUT_OF_MEMORY)
