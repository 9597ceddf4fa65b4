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
Run          python rank.py --reward-model runs/reward --role @role.txt
             python rank.py --reward-model runs/reward --candidates candidates.csv --blind name
Writes       ranked.csv, report.json, report.html, below --out
"""

import itertools
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np

from parts import files, pages
from parts.blinding import blind_words, blinded
from parts.files import UserError
from parts.messages import plain_text
from parts.must_haves import mentioned, terms_of
from parts.old_stats import standings
from parts.old_tables import read_csv, write_csv
from parts.people import fold, is_missing
from parts.reports import (
    add_model_arguments,
    appendix,
    begin,
    check_out,
    default_run,
    raw_scorer,
    read_run,
    training_files,
    write_report,
)

RANK_ORDER = "Which candidate fits this role?"  # first line of the task rank; data/README.md
RANKED = ("rank", "id", "score", "percentile", "truncated")
RANKED += ("must_haves_found", "must_haves_missing")
SCORED = "text_scored"  # the column of ranked.csv with --blind
DOCUMENTS = (".txt", ".md", ".json", ".jsonl", ".csv", ".pdf", ".doc", ".docx", ".odt", ".rtf")
TITLE = "Candidates, ordered by a reward model"
TOP = 10  # candidates that are printed

# ---- 3. the math ----


def must_haves(role, profile):
    """Which must-haves of the role the profile names, word for word: a reason to check.

    >>> must_haves("Role: chef\\nMust have: soups, fish", "Cooked soups.")
    {'must_haves_found': 'soups', 'must_haves_missing': 'fish'}
    """
    terms = terms_of(role)
    matches = mentioned(profile, terms)
    sides = {True: "must_haves_found", False: "must_haves_missing"}
    return {k: ", ".join(x for x in terms if (x in matches) is side) for side, k in sides.items()}


# ---- 4. the arguments ----


def parse_args(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = files.parser("rank.py [flags]", __doc__.splitlines()[0])
    add = parser.add_argument
    # fmt: off
    add("--reward-model", default=default_run("reward"), help="folder, trained on pairs of profiles (default: %(default)s)")
    add("--candidates", default="data/candidates.jsonl", help="JSONL or CSV (default: %(default)s)")
    add("--role", help="title and must-haves as text, or @FILE to read them (default: each row's own prompt or role)")
    add("--text-column", default="profile", help="column of the profile (default: %(default)s)")
    add("--blind", help="column of names: they, e-mail addresses, links and pronouns are replaced in the text")
    add("--out", default="runs/rank", help="folder of the report (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace the report")
    # fmt: on
    add_model_arguments(parser)
    args = parser.parse_args(argv)
    args.command, args.run = "rank", f"python rank.py {shlex.join(argv)}"
    return args


# ---- 5. the data ----
# a candidate: {"id": "c1", "profile": "Aisha Booker, 6 years. …", "role": "data engineer", …}


def load_candidates(args):
    """([{"id", "role", "prompt", "text", "row", "name", "named"}], by role and text; other
    columns). text: what is scored; name: of --blind, if there is one; named: is it in the profile?

    The order of the file decides nothing: batches differ with it, and so do last bits of a score.
    """
    path, fixed = args.candidates, None
    if args.role is not None:
        fixed = role_prompt(role_of_flag(args.role))
    if Path(path).suffix.lower() == ".csv":
        rows = read_csv(path, "--candidates")
    else:
        rows = files.read_jsonl(path, numbered=True, flag="--candidates")
    candidates, columns, spellings = {}, {}, {}
    for where, row in rows:
        try:
            candidate = read_candidate(row, args, fixed)
            if candidate["id"] in candidates:
                raise ValueError(f"the id {candidate['id']!r} is there twice; give each its own")
            title, first = spellings.setdefault(fold(candidate["role"]), (candidate["role"], where))
            if title != candidate["role"]:
                wrong = "the role differs from that of line {} in case, blanks or hyphens alone"
                raise ValueError(f"{wrong.format(first)}; write it alike")
        except ValueError as error:
            raise UserError(f"--candidates {path}:{where}: {error}") from None
        candidates[candidate["id"]] = candidate
        columns |= dict.fromkeys(row)
    if not candidates:
        raise UserError(f"--candidates {path}: the file is empty; expected a row per candidate")
    if not any(c["named"] for c in candidates.values()):
        example = next((c["name"] for c in candidates.values() if c["name"]), "")
        wrong = f"no profile has its name in it, such as {example!r:.60}; is this the column?"
        raise UserError(f"--blind {args.blind}: {wrong}")
    ordered = sorted(candidates.values(), key=lambda c: (c["role"], c["text"], c["id"]))
    return ordered, [name for name in columns if name != "id"]


def read_candidate(row, args, fixed):
    """One candidate; ValueError says what is wrong with its row."""
    from parts.messages import check_prompt

    own = "rename the column that tells them apart, or add one"
    fixes = {"id": own, args.blind: "see --blind"}
    for name in filter(None, ("id", args.text_column, args.blind)):
        if name not in row:
            fix = fixes.get(name, "name the column of the profile with --text-column")
            raise ValueError(f"no text in the column {name!r}; there is {', '.join(row)}; {fix}")
        is_text = isinstance(row[name], str) or type(row[name]) is int
        cell = str(row[name]).strip() if is_text else ""
        absent = not cell or (name == args.text_column and is_missing(cell))
        if name != args.blind and absent:
            raise ValueError(f"no text in the column {name!r}, but {json.dumps(row[name])[:40]}")
    if taken := {*RANKED, SCORED} & set(row) - {"id"}:
        raise ValueError(f"rename {min(taken)!r}, a column of ranked.csv")
    json.dumps(row, ensure_ascii=False).encode()  # half a character is a ValueError
    role = str(row.get("role") or "")
    prompt = fixed or row.get("prompt") or role_prompt("" if is_missing(role) else role)
    check_prompt({"prompt": prompt})
    text, named, name = str(row[args.text_column]), 1, ""
    if args.blind:
        name = str(row[args.blind] or "")
        name = "" if is_missing(name) else name
        text, named = blinded(text, name, plain_text(prompt))
    return {
        "id": str(row["id"]).strip(),
        "name": name,
        "role": plain_text(prompt),
        "prompt": prompt,
        "text": text,
        "named": bool(named),
        "answer": text if isinstance(prompt, str) else [{"role": "assistant", "content": text}],
        "row": row,
    }


def role_of_flag(value):
    """The text of --role: "@FILE" reads a file; what looks like one without the @ is refused."""
    if value.startswith("@"):
        file = Path(value[1:])
        if not file.is_file():
            raise UserError(f"--role {value}: no such file; without the @ it is the role itself")
        return file.read_text(encoding="utf-8-sig")
    one_word = len(value) < 256 and not re.search(r"\s", value)
    if one_word and (Path(value).is_file() or is_document(value)):
        fix = (
            "nothing is fetched"
            if re.search("://|www", value)
            else f"to read the file, --role @{value}"
        )
        raise UserError(f"--role {value}: {fix}; a role is a text")
    return value


def is_document(role):
    """Is this the name of a document, or a link, in place of the text of a role?

    >>> [is_document(x) for x in ("a.pdf", "https://x.org/a", "@a.txt", "Node.js", "a b.md")]
    [True, True, True, False, False]
    """
    one_word = not re.search(r"\s", role.strip())
    link = re.match(r"\w+://|www\.|@", role.strip())
    return one_word and bool(link or Path(role.strip()).suffix.lower() in DOCUMENTS)


def role_prompt(role):
    """The prompt of the task rank from the text of a role: a title, or its lines."""
    role = role.strip()
    if not role:
        raise UserError("no role: say with --role the title, the must-haves, the nice-to-haves")
    if is_document(role):
        raise UserError(f"the role is {role!r:.60}; give its text: nothing is opened or fetched")
    role = role if "role:" in role.lower() else f"Role: {role}"
    text = role if role.startswith(RANK_ORDER) else f"{RANK_ORDER}\n{role}"
    return [{"role": "user", "content": text}]


def title_of(role):
    """The title of a role, from its prompt.

    >>> title_of("Which candidate fits this role?\\nRole: chef\\nMust have: soups")
    'chef'
    """
    line = re.search(r"^role: *(.+)$", role, re.I | re.M)
    return line[1] if line else role.split("\n")[0]


def training_of(folder):
    """(sentence, {file: (rows, rows that compare profiles)}): what a reward model was trained on.

    From its args.json and the files that it names, if they are there; its held-out accuracy from
    its log.
    """
    run, pairs = read_run(folder), {}
    names = run["args"].get("pairs") if run else None
    if not names:
        return (
            f"What {folder} was trained on is not recorded: whether it knows profiles is unknown.",
            {},
        )
    names = [names] if isinstance(names, str) else names
    if training_files(run, "pairs") != names:
        words = f"{', '.join(names)}, which are no longer there"
        return f"{folder} was trained on {words}: whether it knows profiles is unknown.", {}
    for name in names:
        rows = list(files.read_jsonl(name))
        pairs[name] = len(rows), sum(map(is_about_profiles, rows))
    n, k = (sum(counts) for counts in zip(*pairs.values()))
    of_them = f"{k:,} of them compare profiles for a role."
    if not k:
        wrong = "none of them compares profiles for a role, so this order says nothing of who fits"
        of_them = f"{wrong}."
    words = f"{folder} was trained on comparisons of {', '.join(pairs)} ({n:,} rows); {of_them}"
    if tested := [row for row in run["rows"] if row.get("eval/accuracy") is not None]:
        ends = {"value": "", "low": "_low", "high": "_high"}
        right = {key: tested[-1][f"eval/accuracy{end}"] for key, end in ends.items()}
        right = pages.number(right, 1, percent=True)
        words += f" On {tested[-1]['eval/n']} held-out pairs it is right on {right}."
    return words, pairs


def is_about_profiles(row):
    """Does a row of pairs compare profiles? By its task, or by the first line of its prompt."""
    try:
        return row.get("task") == "rank" or RANK_ORDER in plain_text(row["prompt"])
    except (KeyError, TypeError):
        return RANK_ORDER in str(row)


# ---- 8. the loop ----


def main(argv=None):
    args = parse_args(argv)
    check_out(args, "ranked.csv")
    # (1) candidates
    candidates, columns = load_candidates(args)
    training, trained_on = training_of(args.reward_model)
    print("This is no decision: a score compares profiles for people who read them.")
    blind = blind_words(args.blind, candidates)
    print(blind[0])
    # (2) scores
    score, cuts = raw_scorer(args.reward_model, args), []
    scores, _ = score([(c["prompt"], c["answer"]) for c in candidates], cuts)
    for c, value, cut in zip(candidates, np.round(scores[:, 0], 6).tolist(), cuts):
        c |= {"score": value, "truncated": cut} | must_haves(c["role"], c["text"])
    # (3) ranks
    all_equal = 0  # roles whose candidates have one score
    for _, members in itertools.groupby(candidates, key=lambda c: c["role"]):
        members = list(members)
        scores = [c["score"] for c in members]
        all_equal, places = all_equal + (len({*scores}) == 1 < len(scores)), standings(scores)
        for c, place, percentile in zip(members, *places):
            c |= {"rank": place, "percentile": percentile}
    candidates.sort(key=lambda c: (c["role"], c["rank"], c["id"]))
    first = [c for c in candidates if c["role"] == candidates[0]["role"]]
    # (4) files
    path, roles = Path(args.out) / "ranked.csv", {c["role"] for c in candidates}
    write_csv(path, ranked_rows(candidates, columns, args.blind))
    report = begin(args, [args.reward_model, args.candidates]) | {
        "n": len(candidates),
        "roles": len(roles),
        "roles_of_one_score": all_equal,
        "roles_without_must_haves": sum(not terms_of(role) for role in roles),
        "roles_replaced": bool(args.role) and bool({"role", "prompt"} & set(columns)),
        "of_the_last_rank": [c["rank"] for c in first].count(first[:TOP][-1]["rank"]),
        "cut": [c["id"] for c in candidates if c["truncated"]],
        "training": training,
        "trained_on": trained_on,
        "blind": blind[0],
        "look_at": blind[1:],
        "first": [{key: c[key] for key in RANKED} for c in first[:TOP]],
        "role_of_first": title_of(first[0]["role"]),
    }
    write_report(args, report, TITLE, rank_sections, ["ranked.csv"], mode=files.PRIVATE)
    if {"sex", "race_ethnicity"} & set(columns):
        # a score has an arbitrary offset per role; the percentile is within the role
        words = "python", "audit.py", str(path), "--score", "percentile", "--select", "0.3"
        print(f"next: {shlex.join(words)}")


# ---- 9. save ----


def ranked_rows(candidates, columns, blind):
    """The rows of ranked.csv, its header first: the ranks, then each candidate's own columns, then
    with --blind the text that was scored."""
    yield [*RANKED, *columns] + [SCORED] * bool(blind)
    for c in candidates:
        cells = [c["row"].get(name) for name in columns]
        cells = [x if x is None or isinstance(x, str) else json.dumps(x) for x in cells]
        yield [c[key] for key in RANKED] + cells + [c["text"]] * bool(blind)


def rank_sections(report):
    """The order of candidates, for the terminal and the page."""
    n, roles, cut = report["n"], report["roles"], report["cut"]
    people = f"{n} candidate{'s' * (n > 1)}"
    texts = [f"{people} for {roles} role{'s' * (roles > 1)}, by score, highest first."]
    if same := report["roles_of_one_score"]:
        where = f" in {same} of {roles} roles" * (roles > 1)
        texts.append(f"All candidates have the same score{where}: the order says nothing there.")
    last, of_rank = report["first"][-1]["rank"], report["of_the_last_rank"]
    if of_rank > sum(c["rank"] == last for c in report["first"]):
        texts.append(f"{of_rank} candidates share rank {last}; the table shows some of them.")
    if report["roles_replaced"]:
        texts.append("--role stands in place of the roles of the file.")
    if lacking := report["roles_without_must_haves"]:
        where = f" ({lacking} of {roles} roles)" * (roles > 1)
        line = "line such as “Must have: SQL, Excel”"
        texts.append(f"Must-haves are not looked for where the role has no {line}{where}.")
    texts += [
        *report["look_at"],
        report["training"],
        "A score is a reason to read a profile, not a decision about a person.",
    ]
    if cut:
        names = ", ".join(cut[:5])  # ranked.csv marks them all
        texts.append(f"{len(cut)} were cut to the reward model's --max-length, such as {names}")
    header = ["id", "rank", "score", "percentile", "must-haves named", "not named"]
    cells = []
    for c in report["first"]:
        matches = c["must_haves_found"], c["must_haves_missing"]
        matches = [text or "none" for text in matches] if any(matches) else ["–", "–"]
        cells.append([c["id"], c["rank"], c["score"], f"{c['percentile']:.1f}", *matches])
    caption = f"The first {len(cells)} for {report['role_of_first']!r}; ranked.csv has all"
    caption += f" {people}" + f" of all {roles} roles" * (roles > 1)
    table = pages.table(header, cells, caption)
    limits = [
        "A score compares profiles for people who read them; it is not a decision.",
        "Must-haves are found word for word; a word in a profile is no proof of a skill.",
        "Whether the order is right: python evaluate.py reward, on pairs of profiles.",
        report["blind"],
        "Fairness is not measured here: python audit.py.",
    ]
    answer = pages.section("Candidates in order", texts, table, level="answer")
    return [answer, *appendix(report, limits)]


# ---- 10. the guard ----

if __name__ == "__main__":
    files.command(main)
