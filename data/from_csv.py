"""from_csv.py: a spreadsheet of comparisons in, preference pairs to train and to test on out.

Input        a CSV (UTF-8) with one vote per row: a prompt, two answers, which one is better and, if
             there is such a column, who said so. Several rows about the same two answers are
             several votes, whichever answer stands first
Output       OUT/train.jsonl and OUT/test.jsonl, rows as dpo.py, reward_train.py and sft.py read
             them. A prompt becomes a user's message, an answer the assistant's. A tie has
             "tie": true and keeps the order of the row. Both files together hold every vote
Split        by the prompt: all its rows are in one file, chosen by a hash of its words
Agreement    of two or more annotators on the same two answers: the share of equal pairs of votes
             with its 95 % interval, and Fleiss' κ
Left out     a row with an empty cell, two equal answers, a winner that no flag names, or a second
             vote of one annotator on the same two answers. All are counted; of the first twenty
             the line and the reason are printed
Run          python data/from_csv.py votes.csv --annotator annotator --out runs/mine
             python data/from_csv.py votes.csv --prompt Question --a "Model A" --b "Model B"
                 --preferred winner --a-wins model_a --b-wins model_b --tie tie "tie (bothbad)"
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from parts import files  # noqa: E402
from parts.agreement import fleiss_kappa, raw_agreement, with_interval  # noqa: E402
from parts.files import UserError  # noqa: E402
from parts.messages import hash_fraction, prompt_key, words  # noqa: E402

COLUMNS = ("prompt", "a", "b", "preferred", "annotator")  # flags that name a column
NAMED = 20  # rows that are left out: so many are printed with line and reason


def build_parser():
    parser = files.parser(
        "data/from_csv.py CSV --out FOLDER [flags]",
        "Comparisons in a CSV become pairs to train and to test on.",
    )
    add = parser.add_argument
    # fmt: off
    add("csv", type=files.existing_file, help="comma-separated UTF-8 file with a header line")
    add("--out", required=True, help="folder for train.jsonl and test.jsonl")
    add("--prompt", default="prompt", metavar="COLUMN", help="column of the prompt")
    add("--a", default="response_a", metavar="COLUMN", help="column of the first answer")
    add("--b", default="response_b", metavar="COLUMN", help="column of the second answer")
    add("--preferred", default="preferred", metavar="COLUMN", help="column that says which answer is better")
    add("--a-wins", nargs="+", default=["A"], metavar="VALUE", help="what that column says where the first answer is better")
    add("--b-wins", nargs="+", default=["B"], metavar="VALUE", help="what it says where the second answer is better")
    add("--tie", nargs="+", default=["tie"], metavar="VALUE", help="what it says where neither is better")
    add("--annotator", metavar="COLUMN", help="column of who voted, for the agreement (default: nobody is named)")
    add("--delimiter", default=",", metavar="SIGN", help="what separates the cells, such as ';'")
    add("--test-fraction", type=files.number(at_least=0, below=1), default=0.2, metavar="N", help="share of the prompts in test.jsonl")
    add("--overwrite", action="store_true", help="replace the files in --out")
    # fmt: on
    return parser


def rows_of(path, delimiter, columns):
    """(line, row) of the CSV, a row as {column: cell}; the line is the row's first one, because a
    cell may hold newlines."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        try:
            for key, column in columns.items():
                if column not in (header := reader.fieldnames or []):
                    found = f"with --delimiter {delimiter!r} they are {header}"
                    raise UserError(f"--{key} {column!r}: no such column; {found}")
            line = reader.line_num + 1
            for row in reader:
                yield line, row
                line = reader.line_num + 1
        except (UnicodeDecodeError, csv.Error) as error:
            where = f"{path}, behind line {reader.line_num}"
            raise UserError(f'{where}: {error}; save it as "CSV UTF-8"') from None


def read_vote(row, columns, choices):
    """{prompt, a, b, preferred, annotator, better} of a CSV row: `better` is the text of the better
    answer, or "" for a tie. ValueError says why the row is left out."""
    if None in row:
        raise ValueError("more cells than the header; quote a cell that holds the separator")
    vote = {key: (row[column] or "").strip() for key, column in columns.items()}
    if empty := [column for key, column in columns.items() if not vote[key]]:
        raise ValueError(f"empty: {', '.join(empty)}")
    if vote["preferred"] not in choices:
        known = f"--a-wins, --b-wins and --tie name {', '.join(choices)}"
        raise ValueError(f"{columns['preferred']} is {vote['preferred']!r}; {known}")
    if words(vote["a"]) == words(vote["b"]):
        raise ValueError("the two answers are equal")
    return vote | {"better": vote.get(choices[vote["preferred"]], "")}


def to_pair(vote, line):
    """A row of train.jsonl or test.jsonl; a tie keeps the order of the answers."""
    sides = ("b", "a") if vote["better"] == vote["b"] else ("a", "b")
    chosen, rejected = ([{"role": "assistant", "content": vote[side]}] for side in sides)
    return {
        "prompt": [{"role": "user", "content": vote["prompt"]}],
        "chosen": chosen,
        "rejected": rejected,
        "tie": not vote["better"],
        "annotator": vote.get("annotator", ""),
        "id": f"line-{line}",
    }


def main(argv=None):
    args = build_parser().parse_args(argv)
    pairs, path = {"train": [], "test": []}, Path(args.out)
    if not args.overwrite and any((path / f"{name}.jsonl").exists() for name in pairs):
        raise UserError(f"--out {path}: holds pairs already; --overwrite replaces them")
    choices = dict.fromkeys(args.a_wins, "a") | dict.fromkeys(args.b_wins, "b")
    choices |= dict.fromkeys(args.tie, "tie")
    columns = {key: getattr(args, key) for key in COLUMNS if getattr(args, key)}
    items, first_won, n_left_out = defaultdict(dict), [], 0
    for line, row in rows_of(args.csv, args.delimiter, columns):
        try:
            vote = read_vote(row, columns, choices)
            pair = to_pair(vote, line)
            item = items[vote["prompt"], frozenset((vote["a"], vote["b"]))]
            voter = pair["annotator"] or pair["id"]
            if voter in item:
                raise ValueError(f"{voter} has voted on these two answers before")
        except ValueError as error:
            n_left_out += 1
            if n_left_out <= NAMED:
                print(f"{args.csv}:{line}: left out: {error}", file=sys.stderr)
            continue
        item[voter] = vote["better"]
        first_won += [vote["better"] == vote["a"]] * (not pair["tie"])
        place = hash_fraction("from_csv " + prompt_key(pair))
        pairs["test" if place < args.test_fraction else "train"].append(pair)
    if n_left_out > NAMED:
        print(f"left out too: {n_left_out - NAMED} more rows", file=sys.stderr)
    n_votes = sum(map(len, pairs.values()))
    if not n_votes:
        raise UserError(f"{args.csv}: no row could be read; {n_left_out} were left out")
    print(f"votes      {n_votes}, of them {n_votes - len(first_won)} ties; left out {n_left_out}")
    print(f"position   the first answer won {sum(first_won)} of {len(first_won)}")
    shared = [votes for votes in items.values() if args.annotator and len(votes) > 1]
    share = with_interval(*raw_agreement(shared), form=".0%")
    kappa = with_interval(fleiss_kappa(shared), form=".2f")
    print(f"agreement  {share} of two votes are equal, on {len(shared)} items with")
    print(f"           two or more annotators; Fleiss' κ {kappa} (0: as by chance)")
    for name, rows in pairs.items():
        files.write_jsonl(path / f"{name}.jsonl", rows, mode=files.PRIVATE)  # it says who voted
        n_prompts = len(set(map(prompt_key, rows)))
        print(f"wrote      {path / name}.jsonl: {len(rows)} votes on {n_prompts} prompts")
    if n_prompts < 20:  # of test.jsonl
        print("few        evaluate.py needs 20 test prompts: raise --test-fraction, or let it")
        print("           compare on a file of further prompts, which need no votes")


if __name__ == "__main__":
    files.command(main)
