"""rank.py: a role and candidates' profiles in, an order of the candidates out, for people to read.

Objective    r(role, profile) of a reward model; a higher score is a higher place
Algorithm    (1) read the candidates, each with its role
             (2) score every profile as the answer to its role; what is no profile gets no score
             (3) rank within the role; write ranked.csv
Conventions  equal scores share a rank. A score has an arbitrary offset per role, so scores of
             different roles cannot be compared. The order of the file decides nothing
Left out     1. a decision: a score is a reason to read a profile, not to drop it
             2. whether the order is right: python evaluate.py reward, on pairs of profiles
             3. fairness: `python audit.py ranked.csv`, with the flags that are printed at the end
             4. blinding: take names out before; python fairness.py measures what they change
Run          python rank.py --reward-model runs/reward --role "Role: chef"
             python rank.py --reward-model runs/reward --candidates candidates.csv
Writes       ranked.csv (mode 0600), below --out
"""

import json
import shlex
from pathlib import Path

import pandas as pd

from parts import files
from parts.files import UserError
from parts.messages import check_prompt
from parts.tables import read_csv, write_csv
from parts.texts import plain_text

RANK_ORDER = "Which candidate fits this role?"  # first line of the task rank; data/README.md
FIRST = ["rank", "of", "id", "role", "score"]  # columns of ranked.csv

# ---- the arguments ----


def parse_args(argv=None):
    parser = files.parser(
        "rank.py [flags]",
        "A role and candidates' profiles in, an order of the candidates out, for people to read.",
    )
    add = parser.add_argument
    # fmt: off
    add("--reward-model", default="runs/reward", help="folder, trained on pairs of profiles")
    add("--candidates", default="data/candidates.jsonl", help="CSV, or JSONL, with a column id")
    add("--text-column", default="profile", help="column of the profile")
    add("--role", help="title and must-haves (default: each row's own prompt or role)")
    add("--min-words", type=files.number(int, at_least=2), default=20, help="a profile of fewer words, such as a link, gets no rank")
    add("--out", default="runs/rank", help="folder of ranked.csv")
    add("--overwrite", action="store_true", help="replace ranked.csv")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    # fmt: on
    return parser.parse_args(argv)


# ---- the data ----
# a candidate: {"id": "c1", "profile": "Aisha Booker, 6 years. …", "role": "data engineer", …}


def load_candidates(args):
    """A frame of texts with the columns of the file, "prompt" and "role", of one prompt each, ordered
    by their texts: last bits of a score depend on its batch, which the order of the file must not
    decide."""
    path = args.candidates
    if Path(path).suffix.lower() == ".csv":
        frame = read_csv(path, flag="--candidates")
    else:
        rows = dict(files.read_jsonl(path, numbered=True, flag="--candidates"))
        frame = pd.DataFrame(rows.values(), [*rows], dtype=object).fillna("")
    if missing := {"id", args.text_column} - {*frame}:
        raise UserError(
            f"--candidates {path}: expected a column {min(missing)!r}; there is {', '.join(sorted(frame)) or 'nothing'}"
        )
    if taken := {"rank", "of", "score"} & {*frame}:
        raise UserError(
            f"--candidates {path}: rename the column {min(taken)!r}, which rank.py uses for its own"
        )
    prompts = []
    for line, row in frame.to_dict("index").items():
        try:
            if args.role or not row.get("prompt"):
                row["prompt"] = role_prompt(args.role or as_text(row.get("role", "")))
            check_prompt(row)
        except ValueError as error:
            raise UserError(f"--candidates {path}:{line}: {error}") from None
        prompts.append(row["prompt"])
    frame = frame.map(as_text).assign(prompt=prompts)
    wrong = frame.id.duplicated() | (frame.id == "")
    if wrong.any():
        raise UserError(
            f"--candidates {path}:{wrong.idxmax()}: the id is empty or there twice; give each its own"
        )
    asked = frame.prompt.map(plain_text)
    role = frame.get("role", asked)
    is_one_prompt = asked.groupby(role).transform("nunique") == 1
    frame["role"] = args.role or role.where((role != "") & is_one_prompt, asked)
    return frame.sort_values(["role", args.text_column, "id"])


def as_text(value):
    """A cell as text.

    >>> as_text(" a "), as_text(7), as_text(["u", 1])
    ('a', '7', '["u", 1]')
    """
    return value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def role_prompt(role):
    """The prompt of the task rank for a role: a title, or lines with "Role:" and "Must have:".

    >>> role_prompt("chef")
    [{'role': 'user', 'content': 'Which candidate fits this role?\\nRole: chef'}]
    """
    if not role:
        raise UserError("the role is empty; give its text in --role or a column role")
    role = role if "role:" in role.lower() else f"Role: {role}"
    text = role if role.startswith(RANK_ORDER) else f"{RANK_ORDER}\n{role}"
    return [{"role": "user", "content": text}]


# ---- the run ----


def main(argv=None):
    args = parse_args(argv)
    from parts.parallel import pick
    from parts.reward_models import RewardFunction

    out = Path(args.out) / "ranked.csv"
    if out.exists() and not args.overwrite:
        raise UserError(f"--out {args.out}: holds ranked.csv; add --overwrite or choose another")
    # (1) candidates
    frame = load_candidates(args)
    profiles = frame[frame[args.text_column].str.count(r"\S+") >= args.min_words]
    if profiles.empty:
        raise UserError(
            f"--candidates {args.candidates}: no {args.text_column!r} has {args.min_words} words "
            "(--min-words); name its --text-column"
        )
    # (2) scores; None of a profile that the model does not read to its end
    function = RewardFunction(args.reward_model, *pick(args.device, "auto"), raw=True)
    scores = function(profiles.prompt, profiles[args.text_column])
    frame["score"] = pd.Series(scores, profiles.index, float).round(6)
    if frame.score.isna().all():
        raise UserError(
            f"--candidates {args.candidates}: longer than the model reads; shorten them"
        )
    # (3) ranks
    scores = frame.groupby("role").score
    frame["rank"] = scores.rank(ascending=False, method="min").astype("Int64")
    frame["of"] = scores.transform("count")
    frame = frame.sort_values(["role", "rank", "id"])
    columns = [*FIRST, *frame.columns.drop([*FIRST, "prompt"])]
    write_csv(out, frame[columns])
    some = frame.dropna(subset="score")
    others = frame.id.drop(some.index)
    print(
        "This is no decision: a score is a reason to read a profile, and not to drop one.\n"
        f"{len(some)} candidates ranked for {some.role.nunique()} roles. The first of them:\n"
        f"{some[:10].to_string(columns=FIRST, index=False, max_colwidth=30)}\n"
        f"{len(others)} without a rank (a link, fewer than --min-words {args.min_words} words, or "
        f"longer than the model reads): {', '.join(others) or 'nobody'}\nwrote {out}\n"
        f"next: python audit.py {shlex.quote(str(out))} --score score --better higher --select 0.3 "
        "--within role --group COLUMN"
    )


if __name__ == "__main__":
    files.command(main)
