"""sft.py: prompts with answers in, a model that imitates them out; the start of every other stage.

Objective    minimise −(1/n) Σ log π(token | tokens before it) over the n answer tokens
Algorithm    (1) read rows; render the prompt; mark the answer tokens
             (2) policy: log-probs of the answer tokens
             (3) loss: the negative of their mean over the whole optimiser step
             (4) update: backward, clip the gradient, step
             (5) now and then: held-out loss, sample answers and their score
Conventions  the end token is an answer token; the prompt is masked (plain text is not);
             the loss is in nats per trained token, over all micro-batches and processes of a step
Left out     1. packing   2. NEFTune   3. loss weights per row
Run          python sft.py --data data/prefs_train.jsonl
             python sft.py --model Qwen/Qwen2.5-0.5B --data mine.jsonl --out runs/sft
             python sft.py --init-config data/tiny-base --data corpus.jsonl      (from scratch)
             torchrun --nproc-per-node 8 sft.py --fsdp --model Qwen/Qwen2.5-7B --data mine.jsonl
Writes       a model folder, args.json, metrics.jsonl, samples.jsonl, checkpoint/
Reference    Ouyang et al. 2022, arXiv 2203.02155, section 3.5 (SFT)
Axes         B rows, T tokens, V vocabulary
"""

import math
from array import array
from collections import Counter

import numpy as np
import torch

import common
from common import batch_indices, encode_pair, pad_id, pad_rows, token_logps
from parts import identities, prompting, runs
from parts.dialogue import Refused, end_ids, text_end
from parts.files import Counts, UserError, command, counts_in_words, number, shell_line
from parts.pairs import Named, TokenRows, count_prompt, count_unread, held_out, read_rows
from parts.parallel import all_sum
from parts.rows import LOSS_KEYS, ROLES, answers_to_train, check_label, check_messages, is_blank
from parts.tokens import encode_text
from parts.turns import encode_conversation

# learning rates for models below 100 M parameters (made the bundled base; not swept otherwise),
# larger ones (reports/real-model.md), and LoRA, which nobody ran to an end
RATES = 1e-3, 2e-5, 2e-4
SHOW = ("loss", "token_accuracy", "lr", "grad_norm", "tokens_per_s")  # on the bar
HEADLINE = ("eval/loss", "eval/token_accuracy", "val/gold")  # before and after
SPEAKERS = (*ROLES, "prompter", "human", "gpt")  # beside a "text"; elsewhere a "role" is a job


# ---- 3. the math ----


def sft_loss(logps, mask):
    """ℓ_t = −log π(token t | tokens before t), 0 outside the mask.

    logps    (B, T) from token_logps        mask    (B, T) True = trained
    returns  (B, T); the loop sums over tokens and divides by the trained tokens of the whole step

    By hand: two trained tokens of probability ½ and ¼ cost log 2 and log 4.
    >>> logps = torch.tensor([[0.0, 0.5, 0.25]]).log()
    >>> [round(x, 4) for x in sft_loss(logps, torch.tensor([[False, True, True]]))[0].tolist()]
    [0.0, 0.6931, 1.3863]
    """
    common.same_shape(logps=logps, mask=mask)
    return torch.where(mask, -common.at_least_fp32(logps), 0.0)


# ---- 4. the arguments ----


def parse_args(argv=None):
    parser = runs.Parser(
        "sft.py --data mine.jsonl --out runs/sft",
        "Supervised fine-tuning, or training from scratch with --init-config.",
    )
    add = parser.add_argument
    # fmt: off
    add("--data", nargs="+", default=["data/prefs_train.jsonl"], help="JSONL: prompt+completion, messages, text, or pairs (chosen)")
    add("--model", default=common.BASE, help="model folder or hub id (default %(default)s)")
    add("--init-config", help="folder with config.json and tokenizer: start from random weights of that shape")
    add("--keep-order", action="store_true", help="do not shuffle: rows in the order of the files, for a curriculum")
    add("--eval-fraction", type=number(at_least=0, below=1), default=0.02, help="share of the prompts held out (default %(default)s)")
    # fmt: on
    prompting.add_answer_arguments(parser)
    parser.add_run_arguments("runs/sft", RATES)
    args = parser.parse_args(argv)
    parser.without_effect("--model", args.init_config, "--init-config starts from random weights")
    if args.init_config:
        if args.lora_rank:
            raise UserError(
                "--init-config: random weights are trained whole; leave --lora-rank out"
            )
        args.model = args.init_config.removesuffix("config.json") or "."
    prompting.default_prompts(args, args.data)
    return args


# ---- 5. the data ----
# {"prompt": [{"role": "user", "content": "Assess this candidate. …"}],
#  "completion": [{"role": "assistant", "content": "Strengths: python. …"}]}


# what is trained on, the first that a row has: the column with its prompt
FORMS = {"messages": None, "completion": "prompt", "chosen": "prompt", "text": None}


def check_row(row):
    """One of four forms: {"prompt", "completion"}, {"messages"}, {"text"}, or a preference pair."""
    for key in [key for key in row if row[key] is None]:
        del row[key]  # a column of other rows
    form = form_of(row)
    if form == "messages":
        check_messages(row["messages"], "messages")
        roles = [m["role"] for m in row["messages"]] if isinstance(row["messages"], list) else []
        if "assistant" not in roles:
            raise ValueError('"messages" holds no assistant turn, so there is nothing to train on')
        if roles[0] == "assistant":
            raise ValueError('"messages" must start with what the assistant answers')
    elif form == "completion":
        common.check_prompt(row)
        common.check_response(row, "completion")
    elif form == "chosen":
        common.check_pair(row)
    elif form == "text" and row.get("role") in SPEAKERS:  # OpenAssistant's layout
        wrong = '"text" beside a "role" is one message of a conversation'
        raise ValueError(f'{wrong}; join each conversation to a row of "messages"')
    elif not isinstance(row.get("text"), str):
        forms = '"prompt" and "completion", or "messages", or "text", or a preference pair'
        raise ValueError(f"expected {forms}; found {sorted(row)[:6]}")
    if isinstance(row[form], list) and not answers_to_train(row[form]):
        row["drop"] = "no answer to imitate: blank, or of weight 0"
    elif form == "text" and not row["text"].strip():
        row["drop"] = "the text is blank"
    verdicts = "0", "1", "true", "false"  # else it is a label of something else
    if form in ("completion", "messages") and str(row.get("label")).lower() in verdicts:
        check_label(row)
    if row.get("label") is False:
        row["drop"] = "label false, an answer not to imitate"


def form_of(row):
    return next((key for key in FORMS if key in row), None)


class Rows(Named):
    """Encoded rows. An id that is context is stored as ~id (negative): there is no second array."""

    def __init__(self, names):
        self.store, self.names, self.counts = TokenRows(), names, Counts()
        self.file, self.line = array("i"), array("i")

    def add(self, ids, mask, file, line):
        self.store.append([i if on else ~i for i, on in zip(ids, mask, strict=True)])
        self.file.append(file)
        self.line.append(line)

    def batch(self, indices, pad):
        """(input_ids, attention_mask, response_mask), each (B, T)"""
        rows = [self.store[i] for i in indices]
        nothing = [[]] * len(rows)
        signed, attention_mask, _ = pad_rows(rows, nothing, pad)
        trained = (signed >= 0) & attention_mask
        trained[:, 0] = False  # the first token has nothing to be predicted from
        return torch.where(signed < 0, ~signed, signed), attention_mask, trained


def load_data(args, model, tokenizer):
    """(rows, indices to train on, indices to evaluate on, prompts, scorers)"""
    rows, held, prompts = Rows(args.data), [], []
    longest = min(args.max_length, common.max_positions(model.config))
    examples = prompting.load_examples(args.examples)
    for file, name in enumerate(args.data):
        before, counts = len(held), Counter(rows.counts)
        for line, row in read_rows(name, check_row, "--data", rows.counts):
            shown = row
            if FORMS[form_of(row)]:
                shown = {**row, "prompt": prompting.after_examples(examples, row)}
            try:
                encoded, prompt = encode_row(tokenizer, shown, longest, rows.counts)
            except Refused as error:
                rows.counts[f"dropped: {error}"] += 1
                continue
            except UserError as error:
                raise UserError(f"--data {name}:{line}: {error}") from None
            side = row.get("prompt", prompt)  # without its examples
            of_eval = side is not None and held_out(side, args.eval_fraction)
            for ids, mask in encoded:
                if not any(mask[1:]):
                    rows.counts["dropped: nothing to train after cutting"] += 1
                    continue
                rows.add(ids, mask, file, line)
                held.append(of_eval)
            if of_eval and len(prompts) < 2:
                prompts.append({"prompt": prompt})
        if len(held) == before:
            reason = counts_in_words(rows.counts - counts)
            raise UserError(f"--data {name}: no usable row ({reason})")
    held = np.array(held, bool)
    held &= not held.all()
    train, held = np.flatnonzero(~held), np.flatnonzero(held)
    prompting.describe(rows.counts, train, held)
    return rows, train, held, *prompting.prompts_to_answer(args, model, tokenizer, prompts)


def encode_row(tokenizer, row, max_length, counts):
    """([(ids, mask)], prompt) of a row: prompt of the last answer, None for plain text.

    A dialogue is more than one row of ids where the template shows a turn otherwise later.
    """
    form = form_of(row)
    for key in sorted({*FORMS, "prompt"} - {form, FORMS[form]}):
        if row.get(key):
            counts[f"not used: column {key}"] += 1
    if form == "messages":
        answers = answers_to_train(row["messages"])
        blank = sum(m["role"] == "assistant" and is_blank(m) for m in row["messages"])
        counts["answers that are blank, not trained"] += blank
        messages = [{k: m[k] for k in m if k not in LOSS_KEYS} for m in row["messages"]]
        prompt, others = messages[: answers[-1]], {*range(answers[-1])} - {*answers}
        tools = count_unread(tokenizer, prompt, row, counts, others)
        encoded = encode_conversation(tokenizer, messages, tools, counts, answers)
        more = "turns that the template rewrites later, as rows of their own"
        counts[more] += len(encoded) - 1
    elif form != "text":
        prompt, answer = row["prompt"], row[form]
        count_prompt(row, counts)
        tools = count_unread(tokenizer, prompt, row, counts)
        ids, answer = encode_pair(
            tokenizer, prompt, answer, max_length=max_length, counts=counts, tools=tools
        )
        encoded = [(ids + answer, [False] * len(ids) + [True] * len(answer))]
    else:
        ids, ends = encode_text(tokenizer, row["text"], rendered=True), end_ids(tokenizer)
        if not row["text"].rstrip().endswith(tuple(map(tokenizer.convert_ids_to_tokens, ends))):
            ids += [text_end(tokenizer)]  # a corpus may bring its own
        encoded, prompt = [(ids, [True] * len(ids))], None
    counts["rows cut"] += sum(len(ids) > max_length for ids, _ in encoded)
    return [(ids[:max_length], mask[:max_length]) for ids, mask in encoded], prompt


# ---- 6. the models ----


def load_models(args, run):
    """(model, tokenizer): all weights are trained, or adapters. --init-config: random weights."""
    flag = "--init-config" if args.init_config else "--model"
    tokenizer = common.load_tokenizer(args.model, flag, args.date)
    if not args.init_config:
        model = common.load_policy(args.model, run.dtype, run.device, lora_rank=args.lora_rank)
        return model, tokenizer
    from transformers import AutoModelForCausalLM

    config = common.load_config(args.model, flag)
    original = common.dropout_off(config)
    with common.opening(args.model, flag):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.compute_dtype, model.original_config = run.dtype, original
    return model.to(run.device), tokenizer


# ---- 7. preflight ----


def preflight(args, model, tokenizer, rows, train):
    """Our log-probs = the model's; an untrained model's loss ≈ log V; one row, marked."""
    pad, first = pad_id(tokenizer), train[:64]
    longest = first[(-rows.store.lengths()[first]).argsort()[:8]]
    batch = [x.to(model.device) for x in rows.batch(longest, pad)]
    identities.check_head(model, *batch[:2], f"--model {args.model}")
    if args.init_config:
        ids, attention_mask, mask = (x[:1] for x in batch)
        with torch.no_grad():
            logps = token_logps(model, ids, attention_mask, mask)
        loss, log_v = -logps[mask].mean().item(), math.log(model.config.vocab_size)
        print(f"preflight  random weights: loss {loss:.4f}, log V {log_v:.4f}")
    identities.show_row(tokenizer, rows.batch(train[:1], pad), rows.name(train[:1]))


# ---- 8. the loop ----


@torch.no_grad()
def evaluate(args, run, model, tokenizer, rows, held, prompts, scorers):
    """(metrics, samples): loss over all held-out tokens; sample answers and their score."""
    metrics, loss, tokens, hits = {}, 0.0, 0, 0
    for part in run.micro_batches(held, rows.store.lengths()):
        ids, attention_mask, mask = (
            x.to(model.device) for x in rows.batch(part, pad_id(tokenizer))
        )
        logps, top = token_logps(model, ids, attention_mask, mask, with_top=True)
        loss += sft_loss(logps, mask).sum().item()
        tokens, hits = tokens + mask.sum().item(), hits + top.sum().item()
    loss, tokens, hits = all_sum(loss, tokens, hits)
    if tokens:
        loss /= tokens
        metrics = {
            "eval/loss": loss,
            "eval/perplexity": math.exp(min(loss, 50)),
            "eval/token_accuracy": hits / tokens,
            "eval/n": len(held),
        }
    scores, samples, _ = prompting.answer(args, model, tokenizer, prompts, scorers)
    return metrics | (scores if args.prompts else {}), samples  # else a row's own, to be shown


def main(argv=None):
    args = parse_args(argv)
    inputs = [args.model, *args.data, args.prompts, args.examples]
    run = runs.Run("sft", args, inputs, SHOW, HEADLINE)
    model, tokenizer = load_models(args, run)
    # (1) read rows; render the prompt; mark the answer tokens
    rows, train, held, prompts, scorers = load_data(args, model, tokenizer)
    n, lengths, pad = len(train), rows.store.lengths(), pad_id(tokenizer)
    run.plan(n, "rows")
    run.state = {"model": model}
    lr = args.lr or runs.default_lr(model, RATES)
    run.start(model, tokenizer, lr, longest=lengths.max(), encoded=[rows.store.ids])
    evaluated = model, tokenizer, rows, held, prompts, scorers
    if run.step == 0:
        preflight(args, model, tokenizer, rows, train)
        run.evaluation(*evaluate(args, run, *evaluated))

    for step in run.steps():
        batch, epoch = batch_indices(n, args.batch_size, args.seed, step, args.keep_order)
        batch, hits = train[batch], 0
        trained = sum(int((rows.store[i][1:] >= 0).sum()) for i in batch)  # of the whole step
        for part in run.micro_batches(batch, lengths):
            # (2) policy: log-probs of the answer tokens
            ids, attention_mask, mask = (x.to(model.device) for x in rows.batch(part, pad))
            logps, top = token_logps(model, ids, attention_mask, mask, with_top=True)  # (B, T)
            # (3) loss: the negative of their mean over the whole optimiser step
            loss = sft_loss(logps, mask).sum() / trained
            # (4) update: backward, clip the gradient, step
            run.backward(loss)
            hits += top.sum().item()
        update = run.update(lambda batch=batch: rows.name(batch))
        run.log({
            "epoch": epoch, **update, "perplexity": math.exp(min(update["loss"], 50)),
            "token_accuracy": all_sum(hits) / trained, "trained_tokens": trained,
            "tokens": int(lengths[batch].sum()),
        })  # fmt: skip
        # (5) now and then: held-out loss, sample answers and their score
        if run.evaluates(step):
            run.evaluation(*evaluate(args, run, *evaluated))

    # ---- 9. save ----
    return run.finish(shell_line("dpo.py", "--model", args.out))


if __name__ == "__main__":
    command(main)
