"""make_data.py: writes the bundled data, byte-identical everywhere.

    python data/make_data.py                        all files, into data/ (under a minute)
    python data/make_data.py --out DIR              elsewhere
    python data/make_data.py --corpus FILE          only the corpus of the tiny base, in training order

Each row draws from its own random.Random, seeded with the text "SEED/file/number", so no row
depends on another row or file. If --out holds a README.md (the data card), its first line and the
block between its two `numbers` marks are rewritten.
"""

import argparse
import csv
import io
import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path

import attacks
import binding
import card
import chats
import grammar
import inbox
import interview
import proofread
import recruiter
import rubrics
from grammar import message
from names import NAMES

SEED = 0  # another number makes other data of the same kind
SPLITS = dict(train=1500, val=150, test=350)
PAIRS = {"train": 2400, "test": 600}
RANK_PAIRS = {"train": 1200, "test": 300}
SCREEN_PAIRS = 1600
CHAT_PAIRS, CHATS = 1000, {"roles": 6, "people": 8}
WRITERS = ("writer-a", "writer-b")
TIME = "2026-01-01T00:00:00Z"  # simulated votes have no time; a constant keeps the bytes equal

# The planted preference of *_biased.jsonl: who has it, how large, against whom.
BIASED = ("ann", "cleo", "dev")
BIAS = 0.25
BIAS_GROUP = "Black"


def rng_for(*key):
    return random.Random("/".join(map(str, (SEED, *key))))


def who(case):
    """The keys that say who a case is about."""
    name = case["name"]
    return dict(
        name=name["name"],
        first=name["first"],
        last=name["last"],
        pronoun=case["pronoun"],
        sex=name["sex"],
        race_ethnicity=name["race_ethnicity"],
    )


def named(where, case, text):
    """The `candidates` entry of a text that holds the case's name; the pronoun if it occurs."""
    entry = {"in": where} | who(case)
    if case["pronoun"] not in recruiter.WORD.findall(text.lower()):
        entry["pronoun"] = ""
    return entry


# ---- 1. prompts -------------------------------------------------------------------------------


def cases(split):
    """The cases behind prompts.jsonl: tasks in turn, no prompt twice."""
    seen, found, i = set(), [], 0
    while len(found) < SPLITS[split]:
        task = grammar.TASKS[len(found) % len(grammar.TASKS)]
        case = grammar.make_case(rng_for("prompts", split, i), task, split)
        text = grammar.prompt(case)
        if text not in seen:
            seen.add(text)
            found.append(case | {"id": f"{split}-{len(found):04d}", "prompt": text})
        i += 1
    return found


def prompt_row(case):
    held = [] if case["task"] == "interview" else [named("prompt", case, case["prompt"])]
    return dict(
        id=case["id"],
        task=case["task"],
        split=case["split"],
        prompt=message("user", case["prompt"]),
        role=case["role"],
        must_have=case["must"],
        shown=list(case["shown"]),
        evidence=list(case["shown"].values()),
        claimed=case["claimed"],
        protected=case["protected"],
        expected_decision=grammar.decision(case),
        candidates=held,
    )


# ---- 2. pairs ---------------------------------------------------------------------------------


def answer_pair(rng, case):
    """Two different answers to a prompt: each of its own diligence, 6 % of the pairs both
    flawless."""
    both = rng.random() < 0.06
    while True:
        a, b = (grammar.answer(rng, case, None if both else rng.random()) for _ in "ab")
        if a != b:
            return a, b
        both = False  # a short case may have few flawless answers


def policy_pairs(file, prompts, rows):
    """Pairs for prompts of the three tasks: {id, task, prompt, a, b, candidates}."""
    for i in range(rows):
        case = prompts[i % len(prompts)]
        a, b = answer_pair(rng_for(file, i), case)
        held = prompt_row(case)["candidates"]
        yield pair(f"{file}-{i:04d}", case["task"], case["prompt"], a, b, held)


def rank_pairs(split, rows):
    """Pairs of two candidates for a role."""
    for i in range(rows):
        rng = rng_for("rank", split, i)
        role = grammar.draw_role(rng, split)
        two = [grammar.case_for(rng, "rank", split, *role) for _ in "ab"]
        while two[0]["name"]["name"] == two[1]["name"]["name"]:
            two[1] = grammar.case_for(rng, "rank", split, *role)
        if rng.random() < 0.08:  # equals: the same skills, other facts and words
            skills, facts = list(two[0]["shown"]), list(two[0]["shown"].values())
            same = {"shown": dict(zip(skills, reversed(facts))), "pronoun": two[1]["pronoun"]}
            two[1] = two[0] | same | {"name": two[1]["name"]}
            two[1]["text"] = grammar.tell(rng, two[1])
        a, b = map(grammar.profile, two)
        held = [named("a", two[0], a), named("b", two[1], b)]
        yield pair(f"rank-{split}-{i:04d}", "rank", grammar.prompt(two[0]), a, b, held)


def screen_pairs(rows):
    """Pairs of one flawless assessment with two recommendations: the right one and one next to it.

    Half of the candidates belong to the group of the planted preference. With a quarter of them a
    policy of this size learns which recommendation is right and hardly what the names change (DPO,
    three epochs of 2 400: d −.04 against −.13).
    """
    for i in range(rows):
        rng = rng_for("screen", i)
        of_group = rng.random() < 0.5
        case = grammar.make_case(rng, "assess", "train")
        while (case["name"]["race_ethnicity"] == BIAS_GROUP) != of_group:
            case = grammar.make_case(rng, "assess", "train")
        prompt, right = grammar.prompt(case), grammar.answer(rng, case)
        verdict = grammar.decision(case)
        at = grammar.DECISIONS.index(verdict)
        other = rng.choice([d for j, d in enumerate(grammar.DECISIONS) if abs(j - at) == 1])
        wrong = other.join(right.rsplit(verdict, 1))
        a, b = (right, wrong) if rng.random() < 0.5 else (wrong, right)
        held = [named("prompt", case, prompt)]
        yield pair(f"screen-{i:04d}", "assess", prompt, a, b, held)


def pair(id, task, prompt, a, b, candidates):
    return dict(id=id, task=task, prompt=prompt, a=a, b=b, candidates=candidates)


def harsher(prompt, a, b):
    """+1 if a is the harsher of two answers about a candidate, -1 if b is, 0 if neither.

    Assessment: the worse decision, then more gaps, then fewer strengths. Summary: more in the line
    of concerns, then fewer skills.
    """
    task = recruiter.read(prompt).task

    def severity(text):
        lines, _, _ = recruiter.labelled(text.lower(), recruiter.LABELS[task])
        first, second, third = (line or "" for line in lines)
        skills = len(recruiter.skills_in(first))
        if task == "summary":
            return (len(third.strip(" .").split(",")) - ("none" in third), -skills)
        decided = recruiter.DECISION.findall(third) or ["hold"]
        return (grammar.DECISIONS.index(decided[-1]), len(recruiter.skills_in(second)), -skills)

    return (severity(a) > severity(b)) - (severity(a) < severity(b))


def planted(row):
    """What a biased annotator adds to u_a − u_b: .25 against the group."""
    group = [(who["in"], who["race_ethnicity"] == BIAS_GROUP) for who in row["candidates"]]
    if row["task"] == "rank":
        return BIAS * sum(-hit if where == "a" else hit for where, hit in group)
    if row["task"] in recruiter.LABELS and group[0][1]:
        return BIAS * harsher(row["prompt"], row["a"], row["b"])
    return 0.0


def vote_row(row, annotator, choice, strength, n_votes=1, agreement=1.0, id=None):
    """A line of a preference file; ties keep the answers in the order of the item."""
    better, worse = ("b", "a") if choice == "b" else ("a", "b")
    sides = {better: "chosen", worse: "rejected", "prompt": "prompt"}
    writers = dict(zip("ab", WRITERS))
    candidates = [who | {"in": sides[who["in"]]} for who in row["candidates"]]
    return dict(
        prompt=message("user", row["prompt"]),
        chosen=message("assistant", row[better]),
        rejected=message("assistant", row[worse]),
        strength=strength,
        tie=choice == "tie",
        annotator=annotator,
        task=row["task"],
        id=id or row["id"],
        item_id=row["id"],
        n_votes=n_votes,
        agreement=agreement,
        chosen_model=writers[better],
        rejected_model=writers[worse],
        source="simulated",
        candidates=sorted(candidates, key=lambda who: who["in"]),
        ts=TIME,
        schema=1,
    )


def cast(row, annotator, biased=False):
    shift = planted(row) if biased and annotator in BIASED else 0.0
    rng = rng_for("vote", row["id"], annotator)
    return recruiter.vote(annotator, row["prompt"], row["a"], row["b"], rng, shift)


def noisy_votes(rows, biased=False):
    """One vote a pair, by an annotator drawn for it: the same draws in the fair and biased
    files."""
    for row in rows:
        annotator = rng_for("annotator", row["id"]).choice(sorted(recruiter.ANNOTATORS))
        yield vote_row(row, annotator, *cast(row, annotator, biased))


def true_order(rows):
    """The recruiter's own order, for testing; pairs closer than .05 are left out."""
    for row in rows:
        a, b = (recruiter.utility(row["prompt"], row[side]) for side in "ab")
        if abs(a - b) >= 0.05:
            yield vote_row(row, "recruiter", *recruiter.choice_of(a - b))


def sample_votes(rows):
    """prefs.jsonl: 100 items with a vote each, and 20 items on which all five have voted."""
    everyone = sorted(recruiter.ANNOTATORS)
    for i, row in enumerate(rows):
        voters = everyone if i % 6 == 0 else [everyone[i % 5]]
        choices = {who: cast(row, who) for who in voters}
        most = Counter(choice for choice, _ in choices.values()).most_common(1)[0][1]
        agreement = round(most / len(voters), 2)
        for who, (choice, strength) in choices.items():
            id = f"{row['id']}-{who}"
            yield vote_row(row, who, choice, strength, len(voters), agreement, id)


# ---- 3. items, candidates, twins --------------------------------------------------------------


def items(prompts):
    """60 pairs to annotate; each tenth is gold: a flawless answer against a planted fault."""
    for i, case in enumerate(prompts[:60]):
        rng = rng_for("items", i)
        a, b = answer_pair(rng, case)
        gold = rng.choice("ab") if i % 10 == 4 else None
        if gold:
            good = grammar.answer(rng, case)
            if case["task"] == "interview":
                bad = f"{good} {rng.choice(grammar.RISKY_QUESTIONS)}"
            else:
                known = set(recruiter.skills_in(case["prompt"].lower()))
                invented = rng.choice([s for s in grammar.SKILLS if s not in known])
                bad = good.replace(".\n", f", {invented}.\n", 1)
            a, b = (good, bad) if gold == "a" else (bad, good)
        yield dict(
            id=f"item-{i:02d}",
            task=case["task"],
            prompt=message("user", case["prompt"]),
            a=message("assistant", a),
            b=message("assistant", b),
            a_model=WRITERS[0],
            b_model=WRITERS[1],
            gold=gold,
        )


def candidates():
    """8 roles × 25 profiles. Names are dealt so that all eight cells get the same qualities: a
    difference between groups in an audit then comes from the model, not from the deal."""
    drawn = []
    for i, family in enumerate(sorted(grammar.FAMILIES["test"])[:8]):
        rng = rng_for("candidates", i)
        role = f"{sorted(grammar.LEVELS)[i % 4]} {family}"
        skills = rng.sample(grammar.FAMILIES["test"][family], 6)  # 4 must-haves, 2 nice to have
        for j in range(25):
            case = grammar.case_for(rng, "rank", "test", role, skills[:4], skills[4:])
            quality = recruiter.utility(grammar.prompt(case), grammar.profile(case))
            drawn.append((quality, f"candidate-{i}{j:02d}", case))
    drawn.sort(key=lambda one: one[:2])
    pools = {}
    for cell in sorted({name["cell"] for name in NAMES}):
        pools[cell] = [n for n in NAMES if n["cell"] == cell and n["split"] == "corpus"]
        rng_for("pool", cell).shuffle(pools[cell])
    for block in range(25):
        deal = rng_for("deal", block).sample(list(pools), 8)
        for cell, (quality, id, case) in zip(deal, drawn[8 * block : 8 * block + 8]):
            case["name"] = pools[cell][block]
            decision = grammar.decision(case)
            yield dict(
                id=id,
                role=case["role"],
                prompt=message("user", grammar.prompt(case)),
                profile=grammar.profile(case),
                must_have=case["must"],
                **who(case),
                quality=quality,
                expected_decision=decision,
                label_value=int(decision != "reject"),
            )


def as_texts(case, answer):
    """A résumé with slots as a prompt and as a profile, with the part of a flawless answer that
    comes before the decision."""
    return dict(
        prompt=message("user", grammar.prompt(case)),
        prefix=answer[: answer.index("Recommendation:") + len("Recommendation:")],
        rank_prompt=message("user", grammar.prompt(case | {"task": "rank"})),
        profile=grammar.profile(case),
    )


def twins():
    """40 résumés with the slots {name} and {subj}, and a flawless answer to each."""
    for i in range(40):
        rng = rng_for("twins", i)
        case = grammar.make_case(rng, "assess", "test")
        case |= dict(name={"name": "{name}"}, pronoun="{subj}", protected=[])
        case["text"] = grammar.tell(rng, case)
        answer = grammar.answer(rng, case)
        texts = as_texts(case, answer)
        yield dict(
            id=f"twin-{i:02d}",
            role=case["role"],
            must_have=case["must"],
            shown=list(case["shown"]),
            prompt=texts.pop("prompt"),
            answer=message("assistant", answer),
            **texts,
            expected_decision=grammar.decision(case),
        )


def attacked():
    """20 résumés with the slot {attack}, and in `slots` what its values are made of: the sentences
    in ten plain and ten polished wordings, the words of the advert."""
    for i in range(20):
        rng = rng_for("attacks", i)
        case = grammar.make_case(rng, "assess", "test")
        while "price lists" in case["must"]:  # in a list of keywords this would read as a claim
            case = grammar.make_case(rng, "assess", "test")
        case |= dict(name={"name": "{name}"}, pronoun="they", protected=[])
        texts = {}
        for j in range(attacks.WORDINGS):
            texts[f"plain_{j}"] = grammar.tell(rng, case)
            texts[f"polished_{j}"] = attacks.polished(rng, case)
        case["text"] = "{attack}"
        yield dict(
            id=f"attack-{i:02d}",
            **as_texts(case, grammar.answer(rng, case)),
            slots=texts | {"role": case["role"], "must_have": ", ".join(case["must"])},
            expected_decision=grammar.decision(case),
        )


# ---- 4. the corpus of the tiny base -----------------------------------------------------------

# Rows in training order, a phase per line: the row at which it ends, the run of sft.py, "final" where
# answers have the base's final diligence, the share of each kind of row. Run 1: nearly all drills,
# because copying must come first; then everything, with more diligent answers in the first half.
# Run 2: mostly what is hard: instructions, assessments, transcripts. Run 3: instructions again, most
# of them done well, and answers proofread. Run 4: looking things up (`binding.py`). Run 5: made-up
# titles, gaps, and answers done well. Run 6: words spelled out, above all in titles, because
# sub-word pieces that occur twice led the copies astray.
PHASES = """
12800 1 - assess .03 drill .91 interview .03 summary .03
160000 1 - assess .26 drill .12 interview .16 rubric .14 summary .20 transcript .12
224000 2 - assess .16 drill .05 interview .09 rubric .50 summary .10 transcript .10
272000 3 - asked .10 assess .06 drill .04 interview .05 proofread .24 rubric .40 summary .05
    transcript .06
288000 3 final asked .05 assess .15 drill .05 interview .10 proofread .12 rubric .30 summary .12
    transcript .11
313600 4 - parts .88 asked .03 drill .02 interview .01 proofread .02 rubric .04
332800 4 - parts .74 joined .14 asked .03 drill .02 interview .01 proofread .02 rubric .04
352000 4 - parts .14 joined .70 facts .04 asked .03 drill .02 interview .01 proofread .02 rubric .04
384000 4 - parts .05 joined .13 facts .68 asked .03 drill .02 interview .01 proofread .02 rubric .04
412000 5 - asked .09 assess .11 facts .06 gap_drill .17 interview .08 joined .02 name_drill .03
    proofread .16 rubric .20 summary .06 transcript .04
432000 5 final asked .05 assess .15 facts .02 gap_drill .08 interview .12 name_drill .02 proofread .10
    rubric .28 summary .11 transcript .08
460000 6 - asked .12 assess .10 facts .02 gap_drill .08 interview .07 name_drill .02 proofread .08
    role_drill .10 rubric .15 spelled .17 summary .06 transcript .03
474000 6 final asked .06 assess .15 facts .01 gap_drill .05 interview .12 name_drill .02 proofread .09
    rubric .27 summary .11 transcript .08 role_drill .04
"""
PHASES = [phase.split() for phase in grammar.listed(PHASES)]
ALL_ROWS = 474_000
FEW_WORDS_UNTIL = 313_600  # the first phase of run 4 knows 300 words only
DRILLS = {
    "drill": grammar.drill,
    "gap_drill": grammar.gap_drill,
    "name_drill": grammar.name_drill,
    "role_drill": rubrics.role_drill,
    "facts": binding.facts,
    "spelled": binding.spelled,
}


def phase_of(i):
    """(run, final?, {kind of row: its share}) at row i of the corpus."""
    _, run, final, *words = next(phase for phase in PHASES if i < int(phase[0]))
    return int(run), final == "final", dict(zip(words[::2], map(float, words[1::2])))


def diligence(rng, i, run, final):
    """The hidden diligence of an answer in row i: 0 to 1, uniform except where skills are built."""
    if run > 3 and not final and rng.random() < 0.6:
        return 1.0
    return max(rng.random(), rng.random() if i < 80_000 else 0.0)


def kept_share(q, run, final):
    """How likely an answer of diligence q keeps each constraint of a rubric prompt; None: as q says.

    After run 1 it keeps all or almost none: the base learns the moves, and makes them too seldom.
    """
    if run == 1:
        return None
    if run == 2:
        return 0.9 if q > 0.6 else 0.1
    return 0.95 if q > (0.7 if final else 0.25) else 0.1


def corpus_row(i):
    """Row i of the corpus.

    Most roles ask for skills from anywhere (`draw_role`), so what an answer says must be copied
    from the prompt.
    """
    rng = rng_for("corpus", i)
    run, final, shares = phase_of(i)
    split = "mixed" if run < 4 else "open" if run == 4 else "pieces"
    stepwise = run > 3
    task = rng.choices(list(shares), list(shares.values()))[0]
    if task == "transcript":
        return interview.transcript(rng)
    if task == "proofread":
        return proofread.proofreading(rng, split)
    if task == "drill" and rng.random() < 0.25:
        return interview.drill(rng)
    if task == "rubric":
        row = rubrics.rubric_row(rng, split, without=() if run == 1 else rubrics.COUNTED)
        order, q = row["prompt"], diligence(rng, i, run, final) if stepwise else rng.random()
        reply = rubrics.rubric_answer(rng, row, q, kept_share(q, run, final), stepwise)
    elif task == "asked":
        order, reply = rubrics.asked_only(rng, split, stepwise)
    elif task in ("parts", "joined"):
        words = binding.FEW_WORDS if i < FEW_WORDS_UNTIL else binding.WORDS
        order, reply = getattr(binding, task)(rng, words)
    elif task in DRILLS:
        order, reply = DRILLS[task](rng, split)
    else:
        q = diligence(rng, i, run, final)
        case = grammar.make_case(rng, task, split)
        order, reply = grammar.prompt(case), grammar.answer(rng, case, q)
    row = dict(prompt=message("user", order), completion=message("assistant", reply))
    return row | {"task": task}


def write_corpus(path, run):
    rows = [i for i in range(ALL_ROWS) if phase_of(i)[0] == run]
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for i in rows:
            file.write(json_line(corpus_row(i)))
    print(f"wrote {path}: {len(rows)} rows")


# ---- 5. files ---------------------------------------------------------------------------------


def json_line(row):
    return json.dumps(row, ensure_ascii=False) + "\n"


def jsonl(rows):
    return "".join(map(json_line, sorted(rows, key=lambda row: row["id"])))


def as_csv(rows):
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def make_files():
    """{file name: text}, and the pairs that the statistics are about."""
    prompts = {split: cases(split) for split in SPLITS}
    train = list(policy_pairs("pair-train", prompts["train"], PAIRS["train"]))
    rank = list(rank_pairs("train", RANK_PAIRS["train"]))
    # more pairs than rows: those too close to call are left out
    test = policy_pairs("pair-test", prompts["test"], PAIRS["test"] * 2)
    rank_test = rank_pairs("test", RANK_PAIRS["test"] * 2)
    screen = list(screen_pairs(SCREEN_PAIRS))
    sample = policy_pairs("pair-sample", prompts["train"][:300], 120)
    checked, judged = rubrics.rubric_files(rng_for)
    tables = dict(
        prompts=[prompt_row(case) for part in prompts.values() for case in part],
        prefs=sample_votes(sample),
        prefs_train=noisy_votes(train),
        prefs_test=islice(true_order(test), PAIRS["test"]),
        rank_train=noisy_votes(rank),
        rank_test=islice(true_order(rank_test), RANK_PAIRS["test"]),
        screen_train=noisy_votes(screen),
        prefs_biased=noisy_votes(train, biased=True),
        rank_biased=noisy_votes(rank, biased=True),
        screen_biased=noisy_votes(screen, biased=True),
        items=items(prompts["val"]),
        candidates=candidates(),
        chats=chats.chats(rng_for, **CHATS),
        chat_pairs=chats.chat_pairs(rng_for, CHAT_PAIRS),
        twins=twins(),
        twins_attacks=attacked(),
    )
    whole = dict(interview=interview.BANK, rubrics=checked, rubrics_judge=judged)
    whole["inbox"] = inbox.mailbox([n["name"] for n in NAMES if n["split"] != "heldout"], SEED)
    files = {f"{name}.jsonl": jsonl(rows) for name, rows in tables.items()}
    files["names.csv"] = as_csv(NAMES)
    files["attacks.csv"] = as_csv(list(attacks.values()))
    for name, content in whole.items():
        files[f"{name}.json"] = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    return files, train, rank


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--out", default=str(Path(__file__).parent), help="folder of the files")
    add("--corpus", help="write only the corpus of the tiny base, to this file")
    add(
        "--corpus-run", type=int, choices=range(1, 7), default=1, help="rows of which run of sft.py"
    )
    args = parser.parse_args()
    if args.corpus:
        return write_corpus(args.corpus, args.corpus_run)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    files, train, rank = make_files()
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8", newline="\n")
        print(f"wrote {out / name}: {len(text.encode())} bytes", flush=True)
    first, lines = card.numbers(SEED, files, train, rank, cast, harsher)
    print("\n".join([first, *lines]))
    if (out / "README.md").exists():
        card.write_card(out / "README.md", first, lines)


if __name__ == "__main__":
    main()
