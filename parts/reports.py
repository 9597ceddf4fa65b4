"""parts/reports.py: default paths, flags of models, reward scores; a report and its folder."""

import hashlib
import itertools
import json
import os
import re
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path

import numpy as np

from parts import files, pages
from parts.files import UserError
from parts.texts import read_log

SCHEMA = 4  # of report.json; a key that changes its meaning, or leaves, raises it


MODELS = {  # by the run's folder
    "tiny-base": "Base",
    "reward": "reward model",
    "dpo": "DPO",
    "ppo": "PPO",
    "grpo": "GRPO",
}


def labels(names):
    """{model: what reports call it}: its folder's name, the whole path where two are alike.

    >>> labels(["data/tiny-base", "runs/a", "old/a"])
    {'data/tiny-base': 'Base', 'runs/a': 'runs/a', 'old/a': 'old/a'}
    >>> labels(["data/tiny-base", "models/Base"])
    {'data/tiny-base': 'data/tiny-base', 'models/Base': 'models/Base'}
    """
    short = [MODELS.get(Path(name).name, Path(name).name) for name in names]
    return {n: n if short.count(s) > 1 else s for n, s in zip(names, short)}


class Default(str):
    """A default path: skipped, with a message, if it is missing; a given one is an error."""


def default_run(name):
    """The default folder of a run: where a plain command wrote it, else where `make demo` did."""
    return Default(f"runs/{name}" if Path(f"runs/{name}").exists() else f"runs/demo/{name}")


def present(name):
    """The name; None for 'none', and for a default that does not exist, which is said aloud."""
    if isinstance(name, Default) and not Path(name.rpartition(":")[0] or name).exists():
        print(f"skipped: the default {name} does not exist")
        return None
    return None if name == "none" else name


def check_out(args, *beside):
    """Refuse a folder in use before anything is loaded; --overwrite replaces reports only.

    beside  names, or patterns, of the files that the command writes beside its report
    """
    out, own, reason = Path(args.out), "give the report a folder of its own", None
    there = [file for name in ("report.html", *beside) for file in sorted(out.glob(name))]
    values = [x if isinstance(x, list | tuple) else [x] for x in vars(args).values()]
    given = [end for x in map(str, sum(map(list, values), [])) for end in (x, x.partition("=")[2])]
    inputs = list(filter(os.path.isfile, given))  # age=slots.csv, too
    read = [file for file in there if any(map(file.samefile, inputs))]
    if out.is_file():
        reason = "a file with this name is in the way"
    elif (out / "config.json").exists() or (out / "args.json").exists():
        reason = f"holds a model or a run; {own}"
    elif read:
        reason = f"{read[0].name} in it is an input, and would be replaced; {own}"
    elif (out / "report.json").exists() and not args.overwrite:
        reason = "holds a report; pass --overwrite, or another --out"
    elif there and not (out / "report.json").exists():
        reason = f"holds {there[0].name}, which is of no report; {own}"
    if reason:
        raise UserError(f"--out {out}: {reason}")


def read_run(name):
    """A run's args.json with its metrics.jsonl as "rows"; None for a folder that is no run."""
    run, log = files.read_record(name), Path(name) / "metrics.jsonl"
    if run is None:
        return None
    rows, torn = read_log(log) if log.is_file() else ([], False)
    if torn:
        print(f"{log}: line {len(rows) + 1} is cut off and left out")
    for line_number, row in enumerate(rows, 1):
        check_log(row, f"{log}:{line_number}")
    return run | {"rows": rows}


def training_files(run, *flags):
    """The files that these flags gave to a run, by its args.json, if they are there."""
    given = [run["args"].get(flag) for flag in flags] if run else []
    names = [n for x in given for n in ([x] if isinstance(x, str) else x or [])]
    return [n for n in names if Path(n).is_file()]


def seen_pairs(run, rows):
    """How many of these preference rows stand in the files that a run was trained on; None where
    none of the files is there. Some of them the run itself has held out."""
    from parts.pairs import check_pair

    names = training_files(run, "pairs")
    if not names:
        return None
    pair = itemgetter("prompt", "chosen", "rejected")
    trained_rows = (row for name in names for row in files.read_jsonl(name, check_pair))
    trained_pairs = {json.dumps(pair(row), sort_keys=True) for row in trained_rows}
    return sum(json.dumps(pair(row), sort_keys=True) in trained_pairs for row in rows)


def question(row):
    """The words of a prompt's last message, whatever stands before it; None without a prompt."""
    from parts.messages import words

    prompt = row.get("prompt")
    return words(prompt[-1:] if isinstance(prompt, list) else prompt) if prompt else None


def trained_prompts(run, rows):
    """How many prompts of these rows stand in the JSONL files that a run was trained on, rows of
    another "split" than train left out. Some of them the run itself has held out."""
    flags = ["pairs", "data"] + ["prompts"] * bool(run and run.get("stage") == "ppo")
    names = [name for name in training_files(run, *flags) if name.endswith(".jsonl")]
    trained_rows = (row for name in names for row in files.read_jsonl(name))
    known = {question(row) for row in trained_rows if row.get("split", "train") == "train"}
    return sum(question(row) in known for row in rows)


LOGGED = re.compile("step|episodes|answer_tokens|length/mean|time_s|val/(gold|score|kl)")


def check_log(row, place):
    for key in filter(LOGGED.fullmatch, row):
        if not isinstance(row[key], int | float | None):
            raise UserError(f"{place}: {key!r}: expected a number, as a trainer logs it")


def add_model_arguments(parser, chat=True):
    """Flags of a command that loads models; chat: does it also read prompts?"""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    if chat:
        words = "make a prompt given as text a user's message of the chat template; otherwise text is continued as it stands"
        parser.add_argument("--chat", action="store_true", help=words)


def placement(args):
    """(device, compute dtype) of --device: half precision on a GPU, fp32 on a CPU."""
    from parts import parallel

    return parallel.pick(args.device, "auto")


def most_tokens(device):
    """Padded tokens per forward, as trainers take them without --micro-tokens."""
    return 1024 if device.type == "cpu" else 8192


def load_policy(name, args, flag="--model"):
    """(Policy, tokenizer) of a model folder or hub id, which is not trained."""
    import common

    tokenizer, (device, dtype) = common.load_tokenizer(name, flag), placement(args)
    return common.Policy(common.load_model(name, device, dtype, flag=flag), dtype), tokenizer


def encode_prompts(prompts, tokenizer, config, max_new_tokens, flag="--prompts"):
    """Ids of each prompt. One that leaves no room for an answer in the model's positions loses its
    beginning, which is said; UserError for one that the chat template cannot write."""
    import common

    room = common.max_positions(config) - max_new_tokens
    if room < 1:
        raise UserError(f"--max-new-tokens {max_new_tokens}: leaves no room for a prompt; lower it")
    try:
        ids = [common.encode_prompt(tokenizer, prompt) for prompt in prompts]
    except common.Refused as error:
        raise UserError(f"{flag}: {error}") from None
    if n := sum(len(row) > room for row in ids):
        print(f"{n} of {len(ids)} prompts cut to {room} tokens, to fit the model's positions")
    return [row[-room:] if len(row) > room else row for row in ids]


def raw_scorer(folder, args):
    """A reward model's function: (prompt, answer, …) tuples → scores, tokens; (B, answers).

    The answers of a tuple are cut together, as in training: all follow the same prompt. Equal ones
    are scored once, so that they tie exactly. A prompt given as text is a user's message with
    --chat, and if the model was trained so. cuts: a list that gets True for each tuple of which
    only a part was read; tools: those that its prompt shows, or None.
    """
    import torch

    import common
    from parts.messages import as_chat
    from parts.parallel import progress
    from parts.reward_models import reward_function

    flag, (device, dtype) = "--reward-model", placement(args)
    model = reward_function(folder, device, dtype, raw=True, flag=flag)
    tokenizer, chat = model.tokenizer, model.chat or getattr(args, "chat", False)

    def encode(item, max_length, tools):
        row = dict(enumerate(item[1:])) | {"prompt": item[0]}
        if chat:
            as_chat(row, *row)
        try:
            sides = (row[key] for key in ("prompt", *range(len(item) - 1)))
            return common.encode_pair(tokenizer, *sides, max_length=max_length, tools=tools)
        except common.Refused as error:
            raise UserError(f"{flag} {folder}: {error}") from None

    @torch.no_grad()
    def score(items, cuts=None, tools=()):
        flat, scores = [], {}
        for item, shown in itertools.zip_longest(items, tools):
            whole = encode(item, None, shown)
            prompt, *answers = encode(item, model.max_length, shown)
            if cuts is not None:
                cuts.append(whole != (prompt, *answers))
            flat += [(tuple(prompt), tuple(answer)) for answer in answers]
        once = list(dict.fromkeys(flat))
        lengths = [len(prompt) + len(answer) for prompt, answer in once]
        parts = common.micro_batches(range(len(once)), lengths, most_tokens(device))
        for part in progress(parts, "scoring", delay=3):
            rows = [once[i] for i in part]
            batch = common.pad_rows(*zip(*rows), common.pad_id(tokenizer))
            scores |= zip(rows, model.scorer(*(x.to(device) for x in batch)).tolist())
        table = [(scores[pair], len(pair[1])) for pair in flat]
        return np.reshape(table, (len(items), -1, 2)).transpose(2, 0, 1)

    return score


def fingerprint(path):
    """SHA-256 of a file, or of a model folder's weights and configs, as trainers write it into
    args.json. Of a file larger than 256 MiB, its size and 256 samples of 1 MiB."""
    path, digest = Path(path), hashlib.sha256()
    paths = [path]
    if path.is_dir():
        wanted = {".safetensors", ".bin", ".json", ".jinja", ".model"}
        paths = [file for file in sorted(path.iterdir()) if file.suffix in wanted]
    for file in paths:
        if file.name in ("args.json", "report.json"):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}:{size}:".encode())
        with open(file, "rb") as handle:
            for place in range(0, size, max(2**20, size // 256)):
                handle.seek(place)
                digest.update(handle.read(2**20))
    return digest.hexdigest()


def hashes(inputs):
    return {str(f): fingerprint(f) for f in inputs if f and Path(f).exists()}


def begin(args, inputs):
    """What a report starts with: the command, its flags and the hashes of what it read."""
    setup = vars(args) | {"torch": version("torch"), "sha256": hashes(inputs)}
    return {"schema": SCHEMA, "command": args.command, "setup": setup}


def appendix(report, limits, words=()):
    """What a reader may not conclude; the command and the hashes of what it read, below `words`."""
    setup = report.get("setup", report)
    table = pages.table(["file", "SHA-256"], sorted(setup["sha256"].items()))
    return [
        pages.section("What this does not show", limits, level="appendix"),
        pages.section("Command and hashes", [*words, setup["run"]], table, level="appendix"),
    ]


def write_report(args, report, title, sections, beside=(), lead="", mode=0o644):
    """report.json, report.html and the first screen, made from nothing but that report.

    sections  report → the sections of its page;  beside, report["files"]: other files written
    lead      a line below the title;  mode: of both files; files.PRIVATE where they name people
    """
    out, parts = Path(args.out), sections(files.finite(report))
    pages.print_report(title, parts)
    out.mkdir(parents=True, exist_ok=True)
    files.write_json(out / "report.json", report, mode)
    pages.write_page(out / "report.html", title, parts, lead, mode=mode)
    names = "report.json", "report.html", *beside, *report.get("files", ())
    written = [str(out / name) for name in names]
    print("", *[lead] * bool(lead), f"wrote {', '.join(written)}", sep="\n")
