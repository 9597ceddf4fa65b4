"""sft.py: prompts with answers in, a model that imitates the answers out; the start of every other stage.

Objective    minimise −(1/n) Σ log π(token | tokens before it) over the n answer tokens
Algorithm    (1) read rows; render the prompt; mark the answer tokens
             (2) policy: log-probs of the answer tokens
             (3) loss: the negative of their mean over the whole optimiser step
             (4) update: backward, clip the gradient, step
             (5) now and then: held-out loss, one sample answer, the measure of --gold
Conventions  the end token is an answer token; the prompt is masked (of plain text everything is trained);
             the loss is in nats per trained token, normalised over all micro-batches and processes of a step
Left out     1. packing   2. NEFTune   3. loss weights per row
Run          python sft.py --data data/prefs_train.jsonl
             python sft.py --model Qwen/Qwen2.5-0.5B --data mine.jsonl --out runs/sft
             python sft.py --init-config data/tiny-base/config.json --data corpus.jsonl   (from scratch)
             torchrun --nproc-per-node 8 sft.py --fsdp --model Qwen/Qwen2.5-7B --data mine.jsonl   (8 GPUs; --fsdp: in shards, not a copy on each)
Writes       a model folder, args.json, metrics.jsonl, samples.jsonl, checkpoint/
Reference    Ouyang et al. 2022, arXiv 2203.02155, section 3.5 (SFT)
Axes         B rows, T tokens, V vocabulary
"""

import argparse
import json
import math
from array import array
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import nn

import common
from common import UserError, pad_rows, sample, token_logps

# learning rates: below 100 M parameters (made the bundled base; not swept for fine-tuning), full weights, LoRA
LR_SMALL, LR_FULL, LR_LORA = 1e-3, 1e-5, 1e-4

# the bundled base's template: one end token, no BOS, pad ≠ end; a generation mark for tools that want one
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


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


def encode_conversation(tokenizer, messages, max_length=None):
    """(ids, mask) of a dialogue: every assistant's turn and its end id are trained, all else is context.

    Each turn is the difference between two growing prefixes of the rendered dialogue. Where a template rewrites
    earlier turns, its {% generation %} marks decide; a template with neither is refused (UserError).
    """
    ids, mask, done = [], [], 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened = common.render(tokenizer, messages[:i], add_generation_prompt=True)
        whole = common.render(tokenizer, messages[: i + 1])
        before = common.render(tokenizer, messages[:i])[:done]
        if not whole.startswith(opened) or not opened.startswith(before):
            return _conversation_by_marks(tokenizer, messages, max_length)
        context = tokenizer.encode(opened[done:], add_special_tokens=False)
        common.known_ids(tokenizer, context)
        answer = common.encode_pair(tokenizer, messages[:i], [message])[1]
        end = tokenizer.convert_ids_to_tokens(answer[-1])
        stop = whole.find(end, len(opened))
        # what follows the end belongs to the next context
        done = len(whole) if stop < 0 else stop + len(end)
        ids += context + answer
        mask += [False] * len(context) + [True] * len(answer)
    return ids[:max_length], mask[:max_length]


def _conversation_by_marks(tokenizer, messages, max_length):
    if "{% generation" not in str(tokenizer.chat_template).replace("{%-", "{%"):
        raise UserError(
            "the chat template rewrites earlier turns and has no {% generation %} marks; pass single turns"
        )
    out = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )  # fmt: skip
    ids, mask = list(out["input_ids"]), [bool(m) for m in out["assistant_masks"]]
    ends = common.end_ids(tokenizer)
    for t in range(1, len(ids)):  # a mark that closes before the end token
        mask[t] = mask[t] or (mask[t - 1] and ids[t] in ends and ids[t - 1] not in ends)
    return ids[:max_length], mask[:max_length]


# ---- 4. the arguments ----


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description="Supervised fine-tuning, or training from scratch with --init-config."
    )
    # fmt: off
    parser.add_argument("--data", nargs="+", default=["data/prefs_train.jsonl"], help="JSONL: prompt+completion, messages, text, or preferences (their chosen)")
    parser.add_argument("--model", default=common.BASE, help="model folder or hub id (default %(default)s)")
    parser.add_argument("--init-config", help="a config.json: random weights of that shape, and a tokenizer trained on --data")
    parser.add_argument("--keep-order", action="store_true", help="rows in the order of the files (a curriculum), not shuffled")
    parser.add_argument("--eval-fraction", type=float, default=0.02, help="share of the prompts held out (default %(default)s)")
    parser.add_argument("--prompts", help="JSONL of prompts, of which 64 are answered at each evaluation (with --gold)")
    parser.add_argument("--split", help='of --prompts only the rows with this "split"')
    parser.add_argument("--gold", help="FILE:FUNCTION that scores these answers, such as data/recruiter.py:reward")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="length of sample answers (default %(default)s)")
    common.add_run_arguments(parser, "runs/sft", f"{LR_SMALL:g} below 100 M parameters, {LR_FULL:g}, LoRA {LR_LORA:g}")
    # fmt: on
    args = common.parse_with_config(parser, argv)
    common.check_arguments(args)
    if args.init_config and (args.lora_rank or args.no_merge):
        raise UserError("--init-config: random weights are trained whole; leave --lora-rank out")
    if args.split and not args.prompts:
        raise UserError("--split chooses rows of --prompts: add --prompts FILE and --gold")
    if bool(args.prompts) != bool(args.gold):
        raise UserError(
            "--prompts and --gold go together: prompts to answer, and a function that scores the answers"
        )
    return args


# ---- 5. the data ----


def check_row(row):
    """One of four forms: {"prompt", "completion"}, {"messages"}, {"text"}, or a preference pair."""
    if "messages" in row:
        common.check_messages(row["messages"], "messages")
        if not isinstance(row["messages"], list) or not row["messages"]:
            raise ValueError('"messages" must be a non-empty list')
        if not any(m["role"] == "assistant" for m in row["messages"]):
            raise ValueError('"messages" holds no assistant turn, so there is nothing to train on')
    elif "completion" in row:
        common.check_prompt(row)
        common.check_response(row, "completion")
    elif "chosen" in row:
        common.check_pair(row)
    elif not isinstance(row.get("text"), str) or not row["text"].strip():
        raise ValueError(
            'expected "prompt" and "completion", or "messages", or "text", or a preference pair; '
            f"found {sorted(row)[:6]}"
        )


class Rows:
    """Encoded rows. An id that is context and not trained is stored as ~id (negative): one array, no second mask."""

    def __init__(self, names):
        self.store, self.names, self.counts = common.TokenRows(), names, Counter()
        self.file, self.line = array("i"), array("i")  # "file:line" is names[file[i]] and line[i]

    def add(self, ids, mask, file, line):
        self.store.append([i if on else ~i for i, on in zip(ids, mask, strict=True)])
        self.file.append(file)
        self.line.append(line)

    def name(self, indices):
        places = [f"{self.names[self.file[i]]}:{self.line[i]}" for i in indices[:4]]
        return "rows: " + "; ".join(places) + (" …" if len(indices) > 4 else "")

    def trained(self, i):
        """Trained tokens of a row; the first of plain text has nothing to be predicted from."""
        return int((self.store[i][1:] >= 0).sum())

    def batch(self, indices, pad_id):
        """(input_ids, attention_mask, response_mask), each (B, T)"""
        rows = [self.store[i] for i in indices]
        ids, attention_mask, _ = pad_rows(
            [np.where(r < 0, ~r, r) for r in rows], [[]] * len(rows), pad_id
        )
        trained, _, _ = pad_rows([r >= 0 for r in rows], [[]] * len(rows), 0)
        trained = trained.bool() & attention_mask
        trained[:, 0] = False  # as in `trained`
        return ids, attention_mask, trained


def load_data(args, tokenizer):
    """Rows, indices to train on and to evaluate on, and a few prompts for sample answers."""
    rows, held, prompts = Rows(args.data), [], []
    for file, name in enumerate(args.data):
        before, counts = len(rows.store), Counter(rows.counts)
        for line, row in common.read_jsonl(name, check_row, numbered=True, flag="--data"):
            rows.counts["rows"] += 1
            try:
                ids, mask, prompt = encode_row(tokenizer, row, args.max_length, rows.counts)
            except UserError as error:
                raise UserError(f"--data {name}:{line}: {error}") from None
            if not any(mask[1:]):
                rows.counts["dropped: nothing to train after cutting"] += 1
                continue
            rows.add(ids, mask, file, line)
            held.append(prompt is not None and common.held_out(prompt, args.eval_fraction))
            if held[-1] and len(prompts) < 2:
                prompts.append({"prompt": prompt})
        if len(rows.store) == before:
            why = common.reasons(rows.counts - counts)
            raise UserError(f"--data {name}: no usable row ({why})")
    held = np.array(held, bool)
    if held.all():
        held[:] = False
    rows.counts["training"], rows.counts["held out"] = int((~held).sum()), int(held.sum())
    if args.prompts:
        prompts = common.load_prompts(args.prompts, "--prompts", args.split, limit=64)
    return rows, np.flatnonzero(~held), np.flatnonzero(held), prompts


def encode_row(tokenizer, row, max_length, counts):
    """(ids, mask, prompt): what is trained, and the prompt that leads to the last answer (None for plain text)."""
    if "messages" in row:
        ids, mask = encode_conversation(tokenizer, row["messages"])
        last = max(i for i, m in enumerate(row["messages"]) if m["role"] == "assistant")
        prompt = row["messages"][:last] or [{"role": "user", "content": ""}]
    elif "completion" in row or "chosen" in row:
        answer = row["completion"] if "completion" in row else row["chosen"]
        prompt, response = common.encode_pair(
            tokenizer, row["prompt"], answer, max_length=max_length, counts=counts
        )
        return prompt + response, [False] * len(prompt) + [True] * len(response), row["prompt"]
    else:
        ids, end = common.encode_prompt(tokenizer, row["text"]), common.text_end(tokenizer)
        ids += [end] * (ids[-1] != end)  # a corpus may bring its own
        mask, prompt = [True] * len(ids), None
    if max_length is not None and len(ids) > max_length:
        counts["rows cut"] += 1
    return ids[:max_length], mask[:max_length], prompt


def train_tokenizer(args, config):
    """A byte-level BPE of the config's vocabulary size, trained on --data; specials and template as above."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    def texts():
        for name in args.data:
            for row in common.read_jsonl(name, check_row, flag="--data"):
                for key in ("text", "prompt", "completion", "chosen", "messages"):
                    part = row.get(key) or []
                    yield from [part] if isinstance(part, str) else [m["content"] for m in part]

    bpe = Tokenizer(models.BPE())
    # digits apart: a number is copied digit by digit, as rare numbers must be
    digits = pre_tokenizers.Digits(individual_digits=True)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, as_bytes])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # every byte has a token: there is no unknown
    trainer = trainers.BpeTrainer(vocab_size=config.vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet)  # fmt: skip
    bpe.train_from_iterator(texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|end|>", additional_special_tokens=SPECIAL[2:],
        chat_template=CHAT_TEMPLATE, model_max_length=getattr(config, "max_position_embeddings", None), clean_up_tokenization_spaces=False,
    )  # fmt: skip


# ---- 6. the models ----


def load_models(args):
    """(model, tokenizer, scaler): one model, trained; nothing is frozen. A folder's, or of random weights (--init-config)."""
    device, dtype, scaler = common.pick_hardware(args)
    if args.init_config is None:
        tokenizer = common.load_tokenizer(args.model)
        model = common.load_policy(args.model, dtype, device, **common.lora_arguments(args))
        return model, tokenizer, scaler
    from transformers import AutoConfig, AutoModelForCausalLM

    if not Path(args.init_config).is_file():
        raise UserError(f"--init-config {args.init_config}: no such file; expected a config.json")
    try:
        shape = json.loads(Path(args.init_config).read_text(encoding="utf-8"))
        config = AutoConfig.for_model(**shape)
    except Exception as error:  # each config class checks its fields in its own way
        why = common.first_line(error)
        raise UserError(f"--init-config {args.init_config}: not a model config ({why})") from None
    if not hasattr(config, "vocab_size"):
        why = f"{config.model_type} has no vocab_size"
        raise UserError(f"--init-config {args.init_config}: no language model ({why})")
    if args.resume and (Path(args.out) / "tokenizer.json").is_file():
        tokenizer = common.load_tokenizer(args.out)
    else:
        tokenizer = train_tokenizer(args, config)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config.update({**ends, "bos_token_id": None})
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"--init-config {args.init_config}: vocab_size {config.vocab_size} is too small, the bytes and "
            f"special tokens alone take {len(tokenizer)}"
        )
    original = common.dropout_off(config)
    torch.manual_seed(args.seed)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # as above
        why = common.first_line(error)
        raise UserError(f"--init-config {args.init_config}: no language model ({why})") from None
    model.compute_dtype, model.original_config = dtype, original
    return model.to(device), tokenizer, scaler


# ---- 7. preflight ----


def preflight(args, model, tokenizer, rows, train):
    """The stage's loss = F.cross_entropy on the same tokens; an untrained base ≈ log V; one row as a token strip."""
    pad_id = common.pad_id(tokenizer)
    # the longest of the first rows shows what short ones cannot: windows, scaled logits
    first = train[:64]
    longest = first[np.argmax(rows.store.lengths()[first])]
    ids, attention_mask, mask = (
        x.to(model.device) for x in rows.batch([longest, train[0]], pad_id)
    )
    with torch.no_grad():
        ours = sft_loss(token_logps(model, ids, attention_mask, mask), mask).sum() / mask.sum()
        with common.autocast(model):
            logits = model(input_ids=ids, attention_mask=attention_mask.long()).logits.float()
        target = torch.where(mask, ids, -100)[:, 1:]
        theirs = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target.flatten())
    common.check_start(model, args.model, ours.item(), rows.name([longest, train[0]]))
    gap, bound = abs(ours - theirs).item(), 1e-4 if model.compute_dtype == torch.float32 else 5e-2
    print(
        f"preflight  loss {ours:.4f} = cross_entropy {theirs:.4f} (gap {gap:.1e}, bound {bound:g})"
    )
    if args.init_config:
        print(
            f"preflight  random weights: loss {ours:.2f}, log V = {math.log(model.config.vocab_size):.2f}"
        )
    if not gap < bound:
        flag, source = ("--init-config", args.init_config) if args.init_config else ("--model", args.model)  # fmt: skip
        raise UserError(f"{flag} {source}: {common.OTHER_HEAD}")
    strip_ids, _, strip_mask = rows.batch([train[0]], pad_id)
    print(f"row 1 of {rows.names[0]}   · context   ▮ trained   ◆ the last trained token")
    print(common.token_strip(tokenizer, strip_ids[0].tolist(), strip_mask[0].tolist(), "◆"))


# ---- 8. the loop ----


@torch.no_grad()
def evaluate(args, model, tokenizer, rows, held, prompts, gold):
    """Held-out loss over all held-out tokens, the mean of --gold, one sample answer: (metrics, samples)."""
    out, pad_id = {}, common.pad_id(tokenizer)
    loss = tokens = hits = 0
    for part in common.rank_batches(model, held, rows.store.lengths(), args.micro_tokens):
        ids, attention_mask, mask = (x.to(model.device) for x in rows.batch(part, pad_id))
        logps, top = token_logps(model, ids, attention_mask, mask, with_top=True)
        loss += sft_loss(logps, mask).sum().item()
        tokens, hits = tokens + mask.sum().item(), hits + top.sum().item()
    loss, tokens, hits = common.all_sum(loss, tokens, hits)
    if tokens:
        loss /= tokens
        out = {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 50)), "eval/token_accuracy": hits / tokens}  # fmt: skip
    if not prompts:
        return out, []
    asked = [row["prompt"] for row in prompts]
    answers = sample(model, tokenizer, asked, max_new_tokens=args.max_new_tokens, seed=args.seed)
    if gold:
        scores = common.score_answers(gold, "--gold", prompts, asked, answers.texts)
        out["val/gold"] = common.mean(scores)
    shown = zip(asked[:2], answers.texts[:2], strict=True)
    return out, [{"prompt": p, "answer": text} for p, text in shown]


def main(argv=None):
    args = parse_args(argv)
    common.start_processes(args)
    common.check_out(args, [None if args.init_config else args.model])
    common.seed_everything(args.seed)
    model, tokenizer, scaler = load_models(args)
    args.lr = common.pick_lr(args, model, LR_SMALL, LR_FULL, LR_LORA)
    args.micro_tokens = args.micro_tokens or common.micro_tokens(model)
    # (1) read rows; render the prompt; mark the answer tokens
    rows, train, held, prompts = load_data(args, tokenizer)
    gold = common.load_function(args.gold, "--gold") if args.gold else None
    asked = max((len(common.encode_prompt(tokenizer, r["prompt"])) for r in prompts), default=0)
    common.check_positions(model, int(rows.store.lengths().max()), asked, args.max_new_tokens)
    steps = args.steps or args.epochs * math.ceil(len(train) / args.batch_size)
    common.describe(args, model, rows.counts, len(train), steps, "rows")
    files = [*args.data, args.init_config, args.prompts]
    record = common.check_run(args, "sft", files, None if args.init_config else args.model)
    model, pad_id = common.prepare_training(model, args), common.pad_id(tokenizer)
    optimizer = common.make_optimizer(model, args.lr, weight_decay=args.weight_decay)
    start = common.load_checkpoint(args, {"model": model}, {"model": optimizer}, scaler)
    if start == 0:  # what is in --out stays untouched until all this has passed
        preflight(args, model, tokenizer, rows, train)
        before = evaluate(args, model, tokenizer, rows, held, prompts, gold)
    common.open_run(args, record)
    log, stop, lengths = common.MetricsLog(args, start), common.StopSignal(), rows.store.lengths()
    if start == 0:
        # a full disk or an unsaveable config shows now, not after hours
        common.save_run(model, tokenizer, args)
        log.evaluation(0, *before)

    bar = common.progress("sft", start, steps)
    for step in bar:
        batch, epoch = common.batch_indices(
            len(train), args.batch_size, args.seed, step, args.keep_order
        )
        batch = train[batch]
        trained_tokens = sum(map(rows.trained, batch))  # of the whole optimiser step
        skips, skipped = 0, True
        while skipped:  # an fp16 overflow: the same batch again, at half the scale
            total = hits = 0.0
            for part in common.rank_batches(model, batch, lengths, args.micro_tokens):
                # (2) policy: log-probs of the answer tokens
                ids, attention_mask, mask = (x.to(model.device) for x in rows.batch(part, pad_id))
                logps, top = token_logps(model, ids, attention_mask, mask, with_top=True)  # (B, T)
                # (3) loss: the negative of their mean over the whole optimiser step
                loss = sft_loss(logps, mask).sum() / trained_tokens
                # (4) update: backward, clip the gradient, step
                (loss if scaler is None else scaler.scale(loss)).backward()
                total, hits = total + loss.item(), hits + top.sum().item()
            total, hits = common.all_sum(total, hits)
            common.set_lr(optimizer, args, step, steps)
            grad_norm, skipped = common.clip_and_step(
                model, optimizer, scaler, args, total, lambda b=batch: rows.name(b)
            )
            skips += skipped
        row = {
            "step": step, "epoch": epoch, "loss": total, "perplexity": math.exp(min(total, 50)),
            "token_accuracy": hits / trained_tokens, "trained_tokens": trained_tokens,
            "tokens": int(lengths[batch].sum()), **common.step_row(optimizer, grad_norm, skips),
        }  # fmt: skip
        log.write(row)
        bar.set_postfix_str(
            f"loss {total:.3f} acc {row['token_accuracy']:.3f} lr {row['lr']:.1e} norm {grad_norm:.2f}"
        )
        # (5) now and then: held-out loss, one sample answer, the measure of --gold
        if step == steps or (args.eval_every and step % args.eval_every == 0):
            log.evaluation(step, *evaluate(args, model, tokenizer, rows, held, prompts, gold))
        if common.checkpoint_due(args, step, steps, stop):
            common.save_checkpoint(args, step, {"model": model}, {"model": optimizer}, scaler)
        if stop or step == args.stop_after:
            return log.stopped(step, stop)

    # ---- 9. save ----
    common.save_run(model, tokenizer, args)
    log.finish(["eval/loss", "eval/token_accuracy", "val/gold"])
    print(f"next: python dpo.py --model {args.out} --pairs data/prefs_train.jsonl --out runs/dpo")


if __name__ == "__main__":
    common.run(main)
