"""rank.py: a role and candidates' profiles in, an order of the candidates out, for people to read.

Objective    r(role, profile) of a reward model; a higher score is a higher place
Algorithm    (1) read the candidates, each with its role; with --blind take the names out
             (2) score every profile as the answer to its role
             (3) rank and percentile within the role; must-haves that the profile names
             (4) write ranked.csv, report.json and report.html
Conventions  equal scores share a rank; the percentile is within the role, for scores of different
             roles cannot be compared; the order of the file decides nothing
Left out     1. a decision: a score is a reason to read a profile, not to drop it
             2. whether the order is right: python evaluate.py reward, on pairs of profiles
             3. fairness: python audit.py
Run          python rank.py --reward-model runs/reward --role role.txt
             python rank.py --reward-model runs/reward --candidates candidates.csv --blind name
Writes       ranked.csv, report.json, report.html, below --out
"""

import itertools
import json
import re
import shlex
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from parts import files, pages
from parts.files import Parser, UserError
from parts.reports import (
    appendix,
    begin,
    check_out,
    made,
    mentioned,
    plain_text,
    raw_scorer,
    read_csv,
    read_run,
    write_report,
)
from parts.stats import standings

RANK_ORDER = "Which candidate fits this role?"  # first line of the task rank; data/README.md
RANKED = ("rank", "id", "score", "percentile", "truncated")
RANKED += ("must_haves_found", "must_haves_missing")
TITLE = "Candidates, ordered by a reward model"
TOP = 10  # candidates that are printed

# ---- 3. the math ----


def must_haves(role, profile):
    """Which must-haves of the role the profile names, word for word: a reason to check.

    >>> must_haves("Role: chef\\nMust have: soups, fish", "Cooked soups.")
    {'must_haves_found': 'soups', 'must_haves_missing': 'fish'}
    """
    line = re.search(r"^must have: *(.+)$", role, re.I | re.M)
    terms = [term.strip(" .") for term in line[1].split(",")] if line else []
    found = mentioned(profile, terms)
    sides = {True: "must_haves_found", False: "must_haves_missing"}
    return {k: ", ".join(x for x in terms if (x in found) is side) for side, k in sides.items()}


def blinded(text, name):
    """(text with "the candidate" for the whole name, in either order and any case; how often)

    >>> blinded("Lee, Amy. AMY LEE led a team.", "Amy Lee")
    ('the candidate. the candidate led a team.', 2)
    """
    first, _, last = name.strip().rpartition(" ")
    forms = [name.strip()] + ([f"{last}, {first}", f"{last} {first}"] if first else [])
    either = "|".join(map(re.escape, forms))
    return re.subn(rf"(?<!\w)(?:{either})(?!\w)", "the candidate", text, flags=re.I)


# ---- 4. the arguments ----


def parse_args(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(prog="rank.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    # fmt: off
    add("--reward-model", default=made("reward"), help="folder, trained on pairs of profiles (default: %(default)s)")
    add("--candidates", default="data/candidates.jsonl", help="JSONL or CSV (default: %(default)s)")
    add("--role", help="file or text: title, must-haves (default: each row's own prompt or role)")
    add("--text-column", default="profile", help="column of the profile (default: %(default)s)")
    add("--blind", help="column of names, replaced in the text; pronouns and e-mail addresses stay")
    add("--out", default="runs/rank", help="folder of the report (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace the report")
    add("--device", default="auto", help="auto, cpu, cuda, mps (default: %(default)s)")
    # fmt: on
    args = parser.parse_args(argv)
    args.command, args.run = "rank", f"python rank.py {shlex.join(argv)}"
    return args


# ---- 5. the data ----
# a candidate: {"id": "c1", "profile": "Aisha Booker, 6 years. …", "role": "data engineer", …}


def load_candidates(args):
    """([{"id", "role", "prompt", "text", "row": as it came}], by role and text; other columns).

    The order of the file decides nothing: batches differ with it, and so do last bits of a score.
    """
    path, fixed = args.candidates, args.role and role_prompt(args.role)
    if Path(path).suffix.lower() == ".csv":
        rows = read_csv(path, "--candidates")
    else:
        rows = files.read_jsonl(path, numbered=True, flag="--candidates")
    found, columns = {}, {}
    for where, row in rows:
        try:
            candidate = read_candidate(row, args, fixed)
            if candidate["id"] in found:
                raise ValueError(f"the id {candidate['id']!r} is there twice")
        except ValueError as error:
            raise UserError(f"--candidates {path}:{where}: {error}") from None
        found[candidate["id"]] = candidate
        columns |= dict.fromkeys(row)
    if not found:
        raise UserError(f"--candidates {path}: the file is empty; expected a row per candidate")
    ordered = sorted(found.values(), key=lambda c: (c["role"], c["text"], c["id"]))
    return ordered, [name for name in columns if name != "id"]


def read_candidate(row, args, fixed):
    """One candidate; ValueError says what is wrong with its row."""
    import common

    for name in filter(None, ("id", args.text_column, args.blind)):
        if not isinstance(row.get(name), (str, int)) or not str(row[name]).strip():
            raise ValueError(f"no text in the column {name!r}; there is {', '.join(row)}")
    if taken := set(RANKED) & set(row) - {"id"}:
        raise ValueError(f"rename {min(taken)!r}, a column of ranked.csv")
    json.dumps(row, ensure_ascii=False).encode()  # half a character is a ValueError
    prompt = fixed or row.get("prompt") or role_prompt(str(row.get("role") or ""))
    common.check_prompt({"prompt": prompt})
    text, replaced = str(row[args.text_column]), 1
    if args.blind:
        text, replaced = blinded(text, str(row[args.blind]))
    if not replaced:
        raise ValueError(f"--blind {args.blind}: {row[args.blind]!r:.60} is not in the text")
    answer = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
    return {
        "id": str(row["id"]),
        "role": plain_text(prompt),
        "prompt": prompt,
        "text": text,
        "answer": answer,
        "row": row,
    }


def role_prompt(role):
    """The prompt of the task rank from a title, from its lines, or from a file that holds them."""
    file = Path(role) if len(role) < 256 and "\n" not in role else None
    if file and file.is_file():
        role = file.read_text(encoding="utf-8-sig")
    elif file and file.suffix and " " not in role:
        raise UserError(f"--role {role}: no such file; expected a file or the role itself")
    role = role.strip()
    if not role:
        raise UserError("no role: say with --role the title, the must-haves, the nice-to-haves")
    role = role if "role:" in role.lower() else f"Role: {role}"
    text = role if role.startswith(RANK_ORDER) else f"{RANK_ORDER}\n{role}"
    return [{"role": "user", "content": text}]


# ---- 8. the loop ----


def main(argv=None):
    args = parse_args(argv)

    from parts import prompting

    check_out(args)
    # (1) candidates
    candidates, columns = load_candidates(args)
    print("This is no decision: a score compares profiles for people who read them.")
    if args.blind:
        print(f"--blind {args.blind}: replaced in {len(candidates)} profiles")
    else:
        print("Profiles are scored as they are; --blind COLUMN takes the names out.")
    # (2) scores
    score, cuts = raw_scorer(args.reward_model, args), [Counter() for _ in candidates]
    prompt_of = prompting.prompt_in_training(args.reward_model, read_run(args.reward_model))
    rows = [{"task": "rank", **c["row"], "prompt": c["prompt"]} for c in candidates]
    scores, _ = score([(prompt_of(row), c["answer"]) for row, c in zip(rows, candidates)], cuts)
    for c, value, cut in zip(candidates, np.round(scores[:, 0], 6).tolist(), cuts):
        c |= {"score": value, "truncated": bool(+cut)} | must_haves(c["role"], c["text"])
    # (3) ranks
    for _, members in itertools.groupby(candidates, key=lambda c: c["role"]):
        members = list(members)
        places = standings([c["score"] for c in members])
        for c, place, percentile in zip(members, *places):
            c |= {"rank": place, "percentile": percentile}
    candidates.sort(key=lambda c: (c["role"], c["rank"], c["id"]))
    # (4) files
    path = Path(args.out) / "ranked.csv"
    files.write_csv(path, ranked_rows(candidates, columns))
    report = begin(args, [args.reward_model, args.candidates]) | {
        "n": len(candidates),
        "roles": len({c["role"] for c in candidates}),
        "cut": [c["id"] for c in candidates if c["truncated"]],
        "first": [{key: c[key] for key in RANKED} for c in candidates[:TOP]],
    }
    write_report(args, report, TITLE, rank_sections, "ranked.csv", files.PRIVATE)
    if {"sex", "race_ethnicity"} & set(columns):
        # a score has an arbitrary offset per role; the percentile is within the role
        print(f"next: python audit.py {path} --score percentile --select 0.3")


# ---- 9. save ----


def ranked_rows(candidates, columns):
    """The rows of ranked.csv, its header first: the ranks, then each candidate's own columns."""
    yield [*RANKED, *columns]
    for c in candidates:
        cells = [c["row"].get(name) for name in columns]
        cells = [x if x is None or isinstance(x, str) else json.dumps(x) for x in cells]
        yield [c[key] for key in RANKED] + cells


def rank_sections(report):
    """The order of candidates, for the terminal and the page."""
    n, roles, cut = report["n"], report["roles"], report["cut"]
    texts = [f"{n} candidates for {roles} role{'s' * (roles > 1)}, best first."]
    if cut:
        names = ", ".join(cut[:5])  # ranked.csv marks them all
        texts.append(f"{len(cut)} were cut to the reward model's --max-length, such as {names}")
    keys = ("id", "rank", "score", "percentile", "must_haves_found", "must_haves_missing")
    cells = [[c[key] for key in keys] for c in report["first"]]
    header = [key.replace("_", " ") for key in keys]
    table = pages.table(header, cells, f"The first {len(cells)}; ranked.csv has all")
    limits = [
        "A score compares profiles for people who read them; it is not a decision.",
        "Must-haves are found word for word; a word in a profile is no proof of a skill.",
        "Whether the order is right: python evaluate.py reward, on pairs of profiles.",
        "Fairness is not measured here: python audit.py.",
    ]
    answer = pages.section("Candidates in order", texts, table, level="answer")
    return [answer, *appendix(report, limits)]


# ---- 10. the guard ----

if __name__ == "__main__":
    files.command(main)
