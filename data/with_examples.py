"""with_examples.py: prompts in, the same prompts after a worked example of their task out.

For a model that does not know the form of answer that a task wants: the example is a turn and its
answer before the prompt. Rows may hold more than a prompt, so pairs and items are read as well.
Conventions  An example is {"task": "assess", "prompt": [turns], "completion": [turns]}; several of
             one task follow each other. A row has the examples of its "task"; a row of a task
             without one stays as it is, and is counted. A system message of the row stays first.
             All rows of a task now begin with the same words, by which trainers would split them:
             hence each row has "group", its own prompt, by which they split instead.
Run          python data/with_examples.py data/examples.jsonl data/prompts.jsonl > prompts.jsonl
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from parts.files import UserError, command, read_jsonl  # noqa: E402


def check(row, *more):
    """ValueError unless "prompt" (and `more`) are lists of messages and "task", if any, a text."""
    for key in ("prompt", *more):
        turns = row.get(key)
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise ValueError(f'"{key}": expected a list of messages, found {turns!r:.60}')
    if not isinstance(row.get("task") or "", str):
        raise ValueError(f'"task" is {row["task"]!r:.60}; expected a text')


def after_examples(examples, row):
    """The row with the turns of its task in `examples`, {task: turns}, before its prompt.

    >>> one = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    >>> row = {"task": "sum", "prompt": [{"role": "user", "content": "2+2?"}]}
    >>> [turn["content"] for turn in after_examples({"sum": one}, row)["prompt"]]
    ['1+1?', '2', '2+2?']
    """
    prompt = row["prompt"]
    system = [turn for turn in prompt[:1] if turn.get("role") in ("system", "developer")]
    turns = [*system, *examples.get(row.get("task"), ()), *prompt[len(system) :]]
    return row | {"prompt": turns, "group": row.get("group") or prompt}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("examples", help="JSONL of task, prompt, completion")
    parser.add_argument("prompts", help="JSONL of task and prompt, whatever else a row has")
    args, examples = parser.parse_args(argv), {}
    for row in read_jsonl(args.examples, lambda row: check(row, "completion")):
        examples.setdefault(row.get("task"), []).extend(row["prompt"] + row["completion"])
    rows = list(read_jsonl(args.prompts, check))
    n_with = sum(row.get("task") in examples for row in rows)
    if not n_with:
        raise UserError(f"{args.prompts}: no row has one of the tasks {[*examples]}")
    print(f"{n_with} of {len(rows)} rows have an example of their task", file=sys.stderr)
    print(*(json.dumps(after_examples(examples, row)) for row in rows), sep="\n")


if __name__ == "__main__":
    command(main)
