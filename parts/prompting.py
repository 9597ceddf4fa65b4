"""parts/prompting.py: prompt files, worked examples before a prompt, and sample answers."""

import contextlib
import functools
import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

import common
from common import as_turns, check_prompt, check_response, say_once, unread_keys
from parts import parallel
from parts.counterfactual import Copies
from parts.dialogue import answer_texts, visible
from parts.families import forward_of
from parts.files import (
    UserError,
    counts_in_words,
    fingerprint,
    load_function,
    number,
    read_jsonl,
    read_record,
)
from parts.means import mean, scored
from parts.pairs import read_pairs
from parts.rows import PROMPT_COLUMNS, read_prompts

# a model with this template was made from the bundled base, so it knows the demo's form of answer
DEMO_TEMPLATE = "data/tiny-base/chat_template.jinja"
EXAMPLES = "data/examples.jsonl"  # one worked example of each task, for all other models
BUNDLED = re.compile(r"(prefs|rank|screen)(_(train|test|biased))?\.jsonl|prompts\.jsonl")


def add_pair_arguments(parser):
    """Flags of what is held out of --pairs, and of pairs under other names."""
    add = parser.add_argument
    # fmt: off
    add("--eval-pairs", nargs="+", default=[], help="held-out JSONL (default: a share of the prompts)")
    add("--eval-fraction", type=number(at_least=0, below=1), default=0.1, help="share of prompts to hold out (default %(default)s)")
    add("--counterfactual-augment", metavar="NAMES", help="CSV of names, such as data/names.csv: pairs under other names as well")
    # fmt: on


def add_answer_arguments(parser):
    """Flags of the sample answers of an evaluation."""
    add = parser.add_argument
    # fmt: off
    add("--prompts", help='JSONL; 64 (of "split": "val", if any) are answered at each evaluation (default: bundled for bundled data)')
    add("--gold", help="FILE:FUNCTION that scores these answers, such as data/recruiter.py:reward")
    add("--max-new-tokens", type=number(int, at_least=1), default=96, help="length of sample answers (default %(default)s)")
    add("--eval-temperature", type=number(at_least=0), help="of sample answers, 0: greedy (default 0.7; bundled base 1)")
    # fmt: on
    add_examples_argument(parser)


HELD_OUT = "--eval-pairs are held out, no share of --pairs"
FORM_UNKNOWN = f"{EXAMPLES} for bundled data, unless the model knows its form"


def add_examples_argument(parser, default=FORM_UNKNOWN):
    """default: in words, what a stage does without the flag."""
    words = "JSONL of prompt and completion: worked examples before each prompt"
    parser.add_argument("--examples", help=f"{words} (default: {default})")


def describe(counts, train, held):
    print(f"data       {counts_in_words(counts)}; training {len(train)}, held out {len(held)}")


def knows_the_form(model):
    """Was this model made from the bundled base, which was trained on the demo's form of answer?"""
    files = Path(model) / "chat_template.jinja", Path(DEMO_TEMPLATE)
    return all(file.is_file() for file in files) and len({f.read_bytes() for f in files}) == 1


def default_temperature(model):
    """Of evaluation answers: 1 for a model that knows the form, as it was trained, else 0.7; at 1 a
    small general model is mostly noise (SmolLM2, recruiter's score: .11 at 1, .25 at .7, .33 at 0).
    """
    return 1.0 if knows_the_form(model) else 0.7


def is_bundled(file):
    """Is it one of this project's own files of pairs or prompts, whatever path leads to it?"""
    path = Path(file).resolve()
    return path.parent == Path(EXAMPLES).resolve().parent and bool(BUNDLED.fullmatch(path.name))


def default_prompts(args, files):
    """With bundled training files, the bundled prompts and recruiter are the default."""
    prompts = "data/prompts.jsonl"
    if not args.prompts and all(map(is_bundled, files)) and Path(prompts).is_file():
        args.prompts, args.gold = prompts, args.gold or "data/recruiter.py:reward"
    default_examples(args, [*files, *([args.prompts] if args.prompts else [])])


def default_examples(args, files, model=None, temperature_flag="eval_temperature"):
    """Bundled prompts follow a worked example, unless the model was trained on their form; the flag
    of the temperature gets `default_temperature`."""
    model = model or args.model
    if args.examples is None and all(map(is_bundled, files)) and not knows_the_form(model):
        args.examples = EXAMPLES
        print(f"examples   {EXAMPLES}: one before each bundled prompt, whose form this model "
              "has not learned")  # fmt: skip
    if getattr(args, temperature_flag, 0) is None:
        setattr(args, temperature_flag, default_temperature(model))


def load_scorer(spec, flag):
    """The function FILE:FUNCTION: (prompts, answers, rows) → scores. It reads what is graded: of an
    answer the text behind its thought, nothing of a thought without end."""
    function = load_function(spec, flag)

    @functools.wraps(function)
    def graded(prompts, answers, rows):
        return function(prompts, [visible(answer) for answer in answers], rows)

    return graded


def load_prompts(path, flag):
    """Rows of a prompt file; columns that belong to a prompt, but are not shown, are named."""
    rows = read_prompts(path, flag)
    if not rows:
        raise UserError(f"{flag} {path}: no prompt")
    columns = Counter(key for row in rows for key in PROMPT_COLUMNS if row.get(key))
    if columns:
        print(f"{flag} {path}: not shown to the model: column {counts_in_words(columns)}")
    return rows


def load_examples(path, flag="--examples"):
    """{task: turns} of a file of examples, rows of "prompt" and "completion" as sft.py reads them;
    with a "task" they stand before the prompts of that task, without one before every prompt."""
    examples = {}
    for row in read_jsonl(path, check_example, flag=flag) if path else ():
        examples.setdefault(row.get("task"), []).extend([*row["prompt"], *row["completion"]])
    return examples


def check_example(row):
    check_prompt(row)
    check_response(row, "completion")
    if isinstance(row["prompt"], str):
        raise ValueError('"prompt" and "completion" must be lists of messages')


def after_examples(examples, row):
    """The prompt of a row after the examples of its task; examples: of `load_examples`.

    >>> example = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    >>> [m["content"] for m in after_examples({None: example}, {"prompt": "2+2?"})]
    ['1+1?', '2', '2+2?']
    """
    turns = [*examples.get(None, ()), *(examples.get(row["task"], ()) if row.get("task") else ())]
    prompt = row["prompt"]
    if not turns:
        return prompt
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    system = [message for message in prompt[:1] if message["role"] == "system"]
    return [*system, *turns, *prompt[len(system) :]]


def load_pairs(args, model, tokenizer, keep_ties, check=common.check_pair):
    """`Pairs` of --pairs and --eval-pairs, after --examples, under --counterfactual-augment names;
    what was read is printed."""
    longest = min(args.max_length, common.max_positions(model.config))
    copies = Copies(args.counterfactual_augment, args.seed)
    pairs = read_pairs(
        args.pairs, tokenizer, longest, keep_ties, args.eval_fraction, args.eval_pairs, copies,
        check, functools.partial(after_examples, load_examples(args.examples)),
    )  # fmt: skip
    copies.check()
    describe(pairs.counts + copies.counts, pairs.train, pairs.eval)
    return pairs


def prompt_in_training(folder, run):
    """row → its prompt as a reward model's training saw it, after the same worked examples.

    run: the args.json of the reward model, or None
    """
    file = run and run["args"].get("examples")
    if file:
        print(f"examples   {file}: before each prompt, as in the training of {folder}")
    examples = load_examples(file, f"--reward-model {folder} learnt from --examples")
    return lambda row: after_examples(examples, row)


def compare_examples(folder, examples):
    """Say where a reward model scores after other worked examples (files) than it learnt after."""
    record = read_record(folder)
    trained = record and record["args"].get("examples")
    digest = trained and record["sha256"].get(trained)
    if record and digest != (fingerprint(examples) if examples else None):
        then, now = (f"after {x}" if x else "without examples" for x in (trained, examples))
        words = f"was trained {then} and scores {now}: its scores may mean something else"
        print(f"examples   {folder} {words}")


def say_hidden(tokenizer, prompts):
    """Count what the chat template shows nothing of: messages of prompts, and keys of messages."""
    counts = Counter()
    for (messages,) in (as_turns(tokenizer, prompt) for prompt in prompts):
        if not isinstance(messages, str):
            counts.update(unread_keys(tokenizer, messages, range(len(messages))))
    if counts:
        place = f"{tokenizer.flag} {tokenizer.name_or_path}: the chat template shows nothing of"
        print(f"{place}: {counts_in_words(counts)} (of {len(prompts)} prompts)")


def some_prompts(rows, limit):
    """At most `limit` rows, chosen by the prompt's hash: always the same ones."""

    def digest(row):
        return hashlib.sha256(json.dumps(row["prompt"], ensure_ascii=False).encode()).digest()

    return rows if len(rows) <= limit else sorted(rows, key=digest)[:limit]


def prompts_to_answer(args, model, tokenizer, otherwise):
    """(prompts, scorers): 64 rows of --prompts, of its "split" val if it has one; else `otherwise`.

    scorers: [(key, flag, function)] for --gold; a stage may add others. No prompts, which is said,
    if the model cannot be sampled: training needs no samples.
    """
    scorers = []
    try:
        generate(model, tokenizer, [[0]], max_new_tokens=2, temperature=0)  # any token will do
    except UserError as error:
        print(f"samples    none, training needs none: {error}")
        return [], scorers
    if args.gold:
        scorers.append(("val/gold", "--gold", load_scorer(args.gold, "--gold")))
    if args.prompts:
        rows, examples = load_prompts(args.prompts, "--prompts"), load_examples(args.examples)
        rows = [row for row in rows if row.get("split") == "val"] or rows
        rows = some_prompts(rows, 64)
        return [{**row, "prompt": after_examples(examples, row)} for row in rows], scorers
    if args.gold:
        raise UserError("--gold scores answers to prompts: add --prompts FILE")
    return otherwise, scorers


@dataclass
class Answers:
    """One answer to each prompt."""

    prompt_ids: list  # of lists of int
    response_ids: list  # of lists of int, end id included
    finished: list  # of bool: ended by an end id
    texts: list  # decoded without special tokens


@torch.no_grad()
def generate(model, tokenizer, prompts, max_new_tokens, temperature, seed=0, rows=32):
    """`Answers` by transformers' own generate, `rows` at a time; temperature 0 is greedy.

    For evaluations: what is trained on is drawn by parts/sampling.py, with exact log-probs. Under
    torchrun every process draws all answers, so that their number changes none.
    """
    from transformers import GenerationConfig

    ids = common.prompts_that_fit(model, tokenizer, prompts, max_new_tokens)
    ends, pad, responses = common.end_ids(tokenizer, model), common.pad_id(tokenizer), []
    own, model.generation_config = model.generation_config, GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=temperature > 0, temperature=temperature or None,
        top_k=0, eos_token_id=ends, pad_token_id=pad,
    )  # fmt: skip
    settings = parallel.decoding(model), parallel.autocast(model), forward_of(model, "sampled")
    gpus = [model.device] if model.device.type == "cuda" else []  # by default those of all ranks
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, model, "generation_config", own)
        for context in (torch.random.fork_rng(gpus), *settings):
            stack.enter_context(context)
        torch.manual_seed(seed)
        for start in range(0, len(ids), rows):
            part = ids[start : start + rows]
            width = max(map(len, part))
            batch = torch.tensor([[pad] * (width - len(row)) + [*row] for row in part])
            mask = torch.tensor([[t >= width - len(row) for t in range(width)] for row in part])
            batch, mask = batch.to(model.device), mask.long().to(model.device)
            sequences = model.generate(input_ids=batch, attention_mask=mask, use_cache=True)
            responses += sequences[:, width:].tolist()
    stops = [next((t for t, i in enumerate(row, 1) if i in ends), None) for row in responses]
    responses = [row[:stop] for row, stop in zip(responses, stops)]
    finished = [stop is not None for stop in stops]
    return Answers(ids, responses, finished, answer_texts(tokenizer, ids, responses))


def answer(args, model, tokenizer, rows, scorers):
    """(metrics, two samples for samples.jsonl, `Answers`) of one answer to the prompt of each row.

    Scored are answers at --eval-temperature; shown are greedy ones, the model's first choice.
    """
    if not rows:
        return {}, [], None
    prompts = [row["prompt"] for row in rows]
    sampler = functools.partial(generate, model, tokenizer, max_new_tokens=args.max_new_tokens)
    answers = sampler(prompts=prompts, temperature=args.eval_temperature, seed=args.seed)
    metrics = {"val/n": len(rows), "val/cut": 1 - mean(answers.finished)}
    for key, flag, function in scorers:
        scores = parallel.score_answers(function, flag, rows, prompts, answers.texts)
        metrics |= scored(key, scores)
        if metrics[key] is not None and len({*scores}) == 1 < len(scores):
            say_once(f"{flag}: every answer scores {scores[0]:g}, which tells no answer apart")
    shown = sampler(prompts=prompts[:2], temperature=0)
    texts = [tokenizer.decode(ids) for ids in shown.prompt_ids]
    return metrics, [{"prompt": p, "answer": a} for p, a in zip(texts, shown.texts)], answers
