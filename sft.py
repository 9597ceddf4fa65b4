"""sft.py: prompts with answers in, a model that imitates them out; the start of every other stage.

Objective    minimise −(1/n) Σ log π(token | tokens before it) over the n answer tokens
Algorithm    (1) read rows; render the prompt; mark the answer tokens
             (2) policy: log-probs of the answer tokens
             (3) loss: the negative of their mean over the whole optimiser step
             (4) update: backward, clip the gradient, step
             (5) every --eval-every steps: held-out loss, sample answers and their score
Rows         {"prompt", "completion"} · {"messages"}, of which each answer is trained · {"text"} ·
             {"prompt", "chosen", "rejected"}, of which the chosen answer is
Conventions  the end token is an answer token; the prompt is masked; of {"text"} all is trained but
             its first token; the loss is in nats per trained token, over all micro-batches and
             processes of a step
Left out     1. packing, for micro-batches hold rows of similar length
             2. NEFTune, and weights per row or message: no run of ours needed them
Run          python sft.py --data data/prefs_train.jsonl
             python sft.py --model Qwen/Qwen2.5-0.5B --data mine.jsonl --out runs/sft
             torchrun --nproc-per-node 8 sft.py --fsdp --model Qwen/Qwen2.5-7B --data mine.jsonl
Writes       a model folder, args.json, metrics.jsonl, samples.jsonl, checkpoint/
To copy      the loss is one line of `main`: minus the sum of what `Policy` in common.py returns,
             divided by the number of trained tokens; rows come from `encode_pair`
Reference    Ouyang et al. 2022, arXiv 2203.02155, section 3.5 (SFT)
Axes         B rows of a batch, b rows of a forward, T tokens
"""

import numpy as np
import torch

from common import (
    Refused,
    batch_indices,
    encode,
    encode_pair,
    end_ids,
    load_config,
    load_tokenizer,
    pack,
)  # fmt: skip
from parts.answers import Answers, add_answer_arguments, check_policy, load_policy
from parts.files import OUT_OF_MEMORY, command, existing_file, trainer_parser
from parts.messages import check_answer, check_prompt, check_text, roles, words
from parts.pairs import EncodedRows, add_split_arguments, check_pair
from parts.parallel import all_sum
from parts.runs import Run

# below 100 M parameters (made the bundled base), above (reports/real-model.md), with LoRA
RATES = 1e-3, 2e-5, 2e-4
HEADLINE = "eval/loss", "val/gold"

# ---- the arguments ----


def parse_args(argv=None):
    parser = trainer_parser(
        "sft.py --data FILE [FILE …] [--model MODEL] [flags]",
        "Supervised fine-tuning: imitate answers.", "runs/sft", RATES,
    )  # fmt: skip
    # fmt: off
    parser.add_argument("--data", nargs="+", type=existing_file, default=["data/prefs_train.jsonl"], help="JSONL files, see the header")
    add_split_arguments(parser)
    parser.set_defaults(eval_fraction=0.02)
    # fmt: on
    add_answer_arguments(parser)
    return parser.parse_args(argv)


# ---- the rows ----


def check_row(row):
    """ValueError unless this is a row of the header. Fills in "prompt": of messages all before the
    first answer, of a text the text. A preferred answer becomes the completion."""
    if row.get("messages"):
        check_text(row, "messages")
        first_answer = [*roles(row["messages"]), "assistant"].index("assistant")
        if not first_answer:
            raise ValueError('"messages" must be a list that starts with what is answered')
        row["prompt"] = row["messages"][:first_answer]
        check_prompt(row)
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
        if words(row["text"]):  # else nothing to train, and dropped
            check_prompt(row)
    else:
        raise ValueError(
            'expected "prompt" and "completion", "messages", "text", or "chosen" and "rejected", '
            f"not empty; found {', '.join(row) or 'nothing'}"
        )


def encode_row(row, tokenizer, max_length):
    """[(ids, mask)] of a checked row, mask True at the tokens that are trained.

    The answers of a dialogue share one row. A row of its own has an answer that the template writes
    otherwise once the dialogue goes on (Qwen3 drops its thought), or that is cut.
    """
    pairs, rows = [], []  # (what was said before, an answer); what is returned
    if turns := row.get("messages"):
        pairs = [
            (turns[:i], [turn])
            for i, turn in enumerate(turns)
            if turn["role"] == "assistant" and words([turn])
        ]
    elif row.get("completion"):
        pairs = [(row["prompt"], row["completion"])]
    elif words(row["text"]):
        ids, ends = encode(tokenizer, row["text"], rendered=False), end_ids(tokenizer)
        if {*ends}.isdisjoint(ids[-1:]):  # a corpus may bring its own
            ids.append(ends[-1])
        if ids[1:]:
            ids = ids[:max_length]
            rows = [(ids, [False] + [True] * (len(ids) - 1))]
    for pair in reversed(pairs):  # the last answer first, whose row the others begin
        prompt, answer = encode_pair(
            tokenizer, *pair, max_length=max_length, tools=row.get("tools")
        )
        ids = prompt + answer
        if not rows or rows[-1][0][: len(ids)] != ids:
            rows.append((ids, [False] * len(ids)))
        rows[-1][1][len(prompt) : len(ids)] = [True] * len(answer)
    if not rows:
        raise Refused("nothing to train")
    return rows


def conversations(keys):
    """Of each row the key of its conversation, which stays on one side of the split: a row that
    begins with another one goes on with it, as a log does in which each turn is a row."""
    first, found = None, {}
    for key in sorted(keys):
        first = first if first and key.startswith(first) else key
        found[key] = first
    return [found[key] for key in keys]


class Rows(EncodedRows):
    """Encoded rows. ids, masks: of row i its tokens and which of them are trained, lists of T;
    tokens, trained: how many these are."""

    def __init__(self, args, tokenizer, config):
        super().__init__(
            args, tokenizer, config, {"--data": args.data}, check_row, encode_row, conversations
        )
        self.ids, self.masks = zip(*self.encoded)
        self.tokens = np.array([*map(len, self.ids)])
        self.trained = np.array([*map(sum, self.masks)])
        self.say_what_is_cut(self.tokens)

    def batch(self, indices, device):
        """(ids, attention_mask, answer_mask), (b, T) each."""
        return pack(*zip(*(self.encoded[i] for i in indices)), device=device)


# ---- evaluation ----


@torch.no_grad()
def loss_of(run, policy, rows, indices):
    """The loss of rows, per trained token."""
    loss = 0.0
    for part in run.micro_batches(indices, rows.tokens):
        loss -= policy(*rows.batch(part, run.device))[0].sum().item()
    return all_sum(loss) / rows.trained[indices].sum()


def evaluate(run, policy, rows, answers):
    """Log the loss of held-out rows; sample answers and their score."""
    metrics, samples = answers(policy)
    if n := len(rows.held):
        metrics |= {"eval/loss": loss_of(run, policy, rows, rows.held), "eval/n": n}
    run.evaluation(metrics, samples)


# ---- the run ----


def main(argv=None):
    args = parse_args(argv)
    run = Run("sft", args, HEADLINE)
    tokenizer, config = load_tokenizer(args.model), load_config(args.model)
    # (1) read rows; render the prompt; mark the answer tokens
    rows = Rows(args, tokenizer, config)
    answers = Answers(run, tokenizer, config, rows.rows[:2], {*rows.keys[rows.train]})

    # the policy: all its weights are trained, or adapters
    policy, _ = load_policy(run, reference=False)
    optimizer = run.start(
        {"policy": policy}, tokenizer, RATES, len(rows.train) / args.batch_size, rows.ids
    )
    if run.step == 0:
        check_policy(policy, tokenizer, *rows.batch(rows.train[:1], run.device), "--model")
        print("preflight  log-probs are the model's: ok")
        loss_of(run, policy, rows, rows.train[: args.batch_size])
        run.forecast(1 / 3)  # a backward takes two forwards
        evaluate(run, policy, rows, answers)

    for step in run.steps():
        indices, epoch = batch_indices(len(rows.train), args.batch_size, args.seed, step)
        batch, total = rows.train[indices], 0.0
        trained = rows.trained[batch].sum()  # tokens of the whole step
        optimizer.zero_grad()
        for part in run.micro_batches(batch, rows.tokens):
            # (2) policy: log-probs of the answer tokens
            logps, _ = policy(*rows.batch(part, run.device))  # (b, T)
            # (3) loss: the negative of their mean over the whole optimiser step
            loss = -logps.sum() / trained
            # (4) update: backward, clip the gradient, step
            (run.loss_scale * loss).backward()  # the scale is 1 but in fp16
            total += loss.item()
        # summed over the processes, clipped to norm 1
        loss, grad_norm = run.clip(total, [rows.lines[i] for i in batch[:4]])
        lr = run.set_lr(step)  # warm-up, then --schedule
        optimizer.step()
        run.log({
            "epoch": epoch, "loss": loss, "lr": lr, "grad_norm": grad_norm,
            "tokens": rows.tokens[batch].sum(), "trained_tokens": trained,
        })  # fmt: skip
        # (5) every --eval-every steps: held-out loss, sample answers and their score
        if run.evaluates(step):
            evaluate(run, policy, rows, answers)

    return run.finish(
        "dpo.py", "--model", args.out, *["--chat"] * args.chat, "--pairs", "YOUR_PAIRS.jsonl"
    )


if __name__ == "__main__":
    command(main, OUT_OF_MEMORY)
