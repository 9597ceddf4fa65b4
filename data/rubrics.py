"""rubrics.py: prompts with constraints that a program can check, and answers of mixed quality.

    rubric_row(rng, split)         a row of rubrics.json, with the key "case" (`public` takes it away)
    rubric_answer(rng, row, q)     an answer of hidden diligence q; q=None: every constraint kept
    rubric_files(rng_for)          → rubrics.json (split by role family) and rubrics_judge.json
                                   (the same prompts with text criteria, for an LLM judge)

A prompt is one of grammar.py plus a last line of plain constraints. Most criteria take their
arguments from the prompt (its skill, fact, name, role, number, closing words), so no single answer
fits many prompts. An answer keeps each constraint with a probability that grows with q: a base
trained on them can do everything but does it too rarely, so that GRPO has something to choose.
"""

import json
import re

import grammar

BEGIN = grammar.listed("""
In short:; For the team:; My view:; Dear team:; As asked:; First of all:; My notes:; To start:
""")
END = grammar.listed("""
That is all.; Please call me.; Best wishes.; Thank you all.; Over to you.; More next week.
This is my view.
""")
GROUPS = dict(
    content="mention mention several quote leave_out name role".split(),
    opening="begin begin title".split(),
    closing="end end postscript".split(),
    form="bullets sentences parts most_words most_words least_words".split(),
    style="no_comma small_letters stars".split(),
)
# Kinds that need counting, which 2 M weights do not learn. Only run 1 of the base has them; no
# bundled prompt does.
COUNTED = "several sentences parts least_words".split()
# kind | line of the prompt | the same as a criterion for a judge, then the check; {v} is the value
CONSTRAINTS = r"""
mention | Mention {v}. | The answer mentions {v}.
    {"check": "keywords:existence", "keywords": ["{v}"]}
several | Write {v} at least {n} times. | The words {v} stand in the answer at least {n} times.
    {"check": "keywords:frequency", "keyword": "{v}", "frequency": "{n}", "relation": "at least"}
quote | Say what was done with {v}. | The answer says "{fact}".
    {"check": "keywords:existence", "keywords": ["{fact}"]}
leave_out | Leave out {v}. | The answer never names {v}.
    {"check": "keywords:forbidden_words", "forbidden_words": ["{v}"]}
name | Name the candidate. | The answer names {v}.
    {"check": "keywords:existence", "keywords": ["{v}"]}
role | Name the role. | The answer names the role, {v}.
    {"check": "keywords:existence", "keywords": ["{v}"]}
begin | Begin with: {v} | The answer begins with "{v}".
    {"check": "regex:match", "pattern": "(?i)^\\W*{v}"}
title | Put a title in << >> first. | The answer has a title in << >>.
    {"check": "detectable_format:title"}
end | End with: {v} | The answer ends with "{v}" after other words.
    {"check": "startend:end_checker", "end_phrase": "{v}"}
postscript | Add a P.S. line. | A line of the answer begins with P.S.
    {"check": "detectable_content:postscript", "postscript_marker": "P.S."}
bullets | Write exactly {n} bullets. | The answer has exactly {n} bullets.
    {"check": "detectable_format:number_bullet_lists", "num_bullets": "{n}"}
sentences | Write exactly {n} sentences. | The answer has exactly {n} sentences.
    {"check": "length_constraints:number_sentences", "num_sentences": "{n}", "relation": "exactly"}
parts | Write {n} parts with *** between them. | The answer has exactly {n} parts with *** between them.
    {"check": "length_constraints:number_paragraphs", "num_paragraphs": "{n}"}
most_words | Use at most {n} words. | The answer has at most {n} words.
    {"check": "length_constraints:number_words", "num_words": "{n}", "relation": "at most"}
least_words | Use at least {n} words. | The answer has at least {n} words.
    {"check": "length_constraints:number_words", "num_words": "{n}", "relation": "at least"}
no_comma | No commas. | The answer has no comma.
    {"check": "punctuation:no_comma"}
small_letters | Small letters only. | The answer has no capital letter.
    {"check": "change_case:english_lowercase"}
stars | Put a skill in * *. | Some words of the answer stand between stars, like *this*.
    {"check": "detectable_format:number_highlighted_sections", "num_highlights": 1}
"""
CONSTRAINTS = {
    kind: (said, criterion, json.loads(check))
    for kind, said, criterion, check in re.findall(r"(\w+) \| (.+) \| (.+)\n +(.+)", CONSTRAINTS)
}
VALUED = "mention several quote begin end bullets sentences parts".split()
# A P.S. has capitals and full stops of its own; a short answer has no room for long demands.
CLASHES = [{"postscript", "sentences"}, {"postscript", "small_letters"}, {"interview", "bullets"}]
CLASHES += [
    {"most_words", kind} for kind in ("several", "quote", "name", "role", "postscript", "title")
]
POSTSCRIPTS = grammar.listed(
    "It was a good talk.; More next week.; Thanks for the notes.; The team can decide."
)
KEEP = (0.05, 0.45)  # a constraint is kept with probability .05 + .45 q


# ---- 1. rows ----------------------------------------------------------------------------------


def draw(rng, case, kind, taken):
    """The constraint's {"kind", "v", "n", "fact"}, or None where the case offers nothing for it."""
    v, n = None, rng.choice((2, 3, 4))
    # a made-up title has no skills of its own
    family = grammar.FAMILIES[case["split"]].get(case["role"].partition(" ")[2], grammar.SKILLS)
    skills = [s for s in family if s not in taken and s not in case["shown"]]
    shown = [s for s in case["shown"] if s not in taken]
    if kind == "mention" or kind == "several":
        v, n = rng.choice(skills), rng.choice((2, 3))
    elif kind == "quote":
        v = rng.choice(shown) if shown else None
    elif kind == "leave_out":  # another must-have that was shown has to remain
        rest = [s for s in shown if any(m in case["shown"] for m in case["must"] if m != s)]
        v = rng.choice(rest) if rest and len(case["must"]) > 2 else None
    elif kind == "name":
        v = case["name"]["name"] if case["task"] != "interview" else None
    elif kind == "role" or kind == "title":
        v = case["role"]
    elif kind == "begin" or kind == "end":
        v = rng.choice(BEGIN if kind == "begin" else END)
    else:
        v = ""
        if kind == "most_words":
            n = rng.randrange(22, 30)
        elif kind == "least_words":
            n = rng.randrange(35, 50)
    return None if v is None else dict(kind=kind, v=v, n=n, fact=case["shown"].get(v, ""))


def filled(template, values):
    """The template with its values; `"{n}"` alone becomes the number itself."""
    if isinstance(template, dict):
        return {key: filled(value, values) for key, value in template.items()}
    if isinstance(template, list):
        return [filled(item, values) for item in template]
    if template == "{n}":
        return values["n"]
    return template.format(**values) if isinstance(template, str) else template


def task_criteria(case):
    """(check, text) of what the task itself asks for, without a line in the prompt."""
    if case["task"] == "assess":
        word = grammar.decision(case)
        pattern = rf"(?i)recommendation:[^.\n]*\b{word}\b"
        return [({"check": "regex:match", "pattern": pattern}, f"The recommendation is {word}.")]
    if case["task"] == "summary":
        skill = next(iter(case["shown"]))
        pattern = rf"(?i)skills:[^.\n]*\b{skill}\b"
        return [({"check": "regex:match", "pattern": pattern}, f"The skills line has {skill}.")]
    gaps = grammar.gaps(case)
    count = dict(check="interview:question_count", num_questions=1, relation="exactly")
    gap = {"check": "regex:match", "pattern": rf"(?i)\b(?:{'|'.join(gaps)})\b"}
    return [
        (count, "The answer asks exactly one question."),
        (gap, f"The answer names {' or '.join(gaps)}."),
        ({"check": "interview:no_risky_question"}, "The answer asks for nothing private."),
    ]


def rubric_row(rng, split, number=0, without=COUNTED):
    """A row: prompt and 4 to 8 checks, none of the kinds `without`. The key `case` is for
    `rubric_answer` and is not written to a file."""
    case = grammar.make_case(rng, rng.choices(grammar.TASKS, (4, 2, 4))[0], split)
    core = grammar.gaps(case) if case["task"] == "interview" else [next(iter(case["shown"]))]
    taken, constraints = set(core), []
    groups = rng.sample(["opening", "closing", "form", "style"], rng.choice((2, 3, 3)))
    for group in ["content", "content"] + groups:
        kinds = {c["kind"] for c in constraints} | {case["task"]}
        free = [k for k in GROUPS[group] if k == "mention" or k not in kinds and k not in without]
        free = [k for k in free if not any({k, other} in CLASHES for other in kinds)]
        drawn = draw(rng, case, rng.choice(free or ["mention"]), taken)
        drawn = drawn or draw(rng, case, "mention", taken)
        constraints.append(drawn)
        taken.add(drawn["v"])
    rng.shuffle(constraints)
    parts = [[filled(part, c) for part in CONSTRAINTS[c["kind"]]] for c in constraints]
    criteria = [(check, text) for _, text, check in parts] + task_criteria(case)
    return dict(
        task_id=f"rubric-{split}-{number:04d}",
        task=case["task"],
        split=split,
        prompt=f"{grammar.prompt(case)}\n{' '.join(said for said, _, _ in parts)}",
        rubrics=[check for check, _ in criteria],
        case=dict(case=case, asked=constraints, texts=[text for _, text in criteria]),
    )


def public(row):
    """The row as it stands in the file: its prompt is a user's message, without the case."""
    messages = [{"role": "user", "content": row["prompt"]}]
    return {key: x for key, x in row.items() if key != "case"} | {"prompt": messages}


def rubric_files(rng_for):
    """→ (rubrics.json, rubrics_judge.json). rng_for(*key) gives each row a generator of its own."""
    files = {}
    for name, size in dict(train=300, validation=50, test=60).items():
        split = "val" if name == "validation" else name
        files[name] = [rubric_row(rng_for("rubric", split, i), split, i) for i in range(size)]
    judge = [public(row) | {"rubrics": row["case"]["texts"]} for row in files["train"][:40]]
    return {name: [public(row) for row in rows] for name, rows in files.items()}, judge


ONLY = "Write only what is asked."


def asked_only(rng, split, stepwise=False):
    """(order, reply): a drill of what rubric prompts ask for and nothing else, copied from the
    prompt."""
    case = grammar.make_case(rng, rng.choice(("assess", "summary")), split)
    kinds = rng.sample(("mention", "mention", "quote", "name", "name", "role"), rng.choice((2, 3)))
    kinds += rng.choice((["begin"], ["title"], [])) + rng.choice((["end"], ["end"], []))
    taken, asked = set(), []
    for kind in kinds:
        c = draw(rng, case, kind, taken)
        if c and (kind == "mention" or kind not in {other["kind"] for other in asked}):
            asked.append(c)
            taken.add(c["v"])
    kept = {}
    for c in asked:
        kept.setdefault(c["kind"], []).append(c)
    first, last = first_and_last(kept)
    units = first + demanded(rng, case, kept, "", stepwise) + last
    rng.shuffle(asked)
    said = " ".join(filled(CONSTRAINTS[c["kind"]][0], c) for c in asked)
    return f"{ONLY}\n{grammar.about(case)}\n{said}", "\n".join(units)


def role_drill(rng, split):
    """(order, reply): the role, word for word, from a prompt of the tasks; most titles are made up
    and occur once."""
    case = grammar.make_case(rng, rng.choice(grammar.TASKS), split)
    return name_the_role(case), f"The role is {case['role']}."


def name_the_role(case):
    return f"{ONLY}\n{grammar.about(case)}\nName the role."


# ---- 2. answers -------------------------------------------------------------------------------


def rubric_answer(rng, row, q, keep=None, stepwise=False):
    """An answer that keeps each constraint with probability `keep`, or .05 + .45 q; q=None: all of
    them.

    stepwise: in the order in which a small model can copy: a skill before its fact, the gaps
    before the recommendation.
    """
    if q is not None and keep is None:
        keep = KEEP[0] + KEEP[1] * q
    case = row["case"]["case"]
    kept = {}  # kind: the constraints of that kind that the answer minds, some with a wrong value
    for c in row["case"]["asked"]:
        if q is not None and rng.random() >= keep:
            wrong = c["kind"] in VALUED and rng.random() < 0.25  # other words, number or skill
            c = draw(rng, case, c["kind"], set()) if wrong else None
        if c:
            kept.setdefault(c["kind"], []).append(c)
    hidden = [c["v"] for c in kept.get("leave_out", [])]
    shown = {s: told for s, told in case["shown"].items() if s not in hidden}
    case = case | {"must": [s for s in case["must"] if s not in hidden], "shown": shown}
    text = arranged(rng, case, kept, grammar.answer(rng, case, q), stepwise)
    if "stars" in kept:
        text = re.sub(rf"(?i)\b({skills_in(text)[0]})\b", r"*\1*", text, count=1)
    if "no_comma" in kept:
        text = text.replace(", and", " and").replace(",", " and")
    if "small_letters" in kept:
        text = text.lower()
    if "postscript" in kept:
        text += "\nP.S. " + rng.choice(POSTSCRIPTS)
    # a summary of few words about a candidate who showed nothing can leave nothing
    return text if text.strip() else grammar.answer(rng, row["case"]["case"], q)


def arranged(rng, case, kept, text, stepwise):
    """The text with what was demanded added, in the form, and between the words, that were asked
    for."""
    sentences = re.split(r"(?<=[.?])\s", text)
    cue = dict(assess="Recommendation:", summary="Skills:", interview="")[case["task"]]
    core = [s for s in sentences if s.startswith(cue)][-1:]  # what the task cannot do without
    if stepwise and case["task"] == "assess":
        core = [s for s in sentences if s.startswith("Gaps:")][:1] + core
    form = next((kind for kind in GROUPS["form"] if kind in kept), None)
    n = kept[form][0]["n"] if form else None
    if form == "most_words" and case["task"] == "summary":
        core = [f"Skills: {s}." for s in case["shown"] if s in " ".join(core)][:1]
    formed = form in ("bullets", "sentences", "parts")
    base = core if formed or form == "most_words" else text.split("\n")
    demands = demanded(rng, case, kept, " ".join(base), stepwise)
    first, last = first_and_last(kept)
    spare = [s for s in sentences if formed and s not in core] + padding(rng, case)

    units = base + demands + last
    if formed or case["task"] == "interview":  # the question stands behind what is said
        units = demands + base + last
    while (formed and len(units) < n) or (form == "least_words" and words(first + units) < n):
        units.insert(len(demands) if form == "least_words" else 0, spare.pop(0))
    while formed and len(units) > n:
        head = units.pop(0)
        if form == "sentences":
            units[0] = f"{head[:-1]}; {grammar.lower(units[0])}"
        else:
            units[0] = f"{head} {units[0]}"
    if form == "bullets":
        units = [f"- {unit}" for unit in units]
    one_line = form == "sentences" or case["task"] == "interview"
    gap = "\n***\n" if form == "parts" else " " if one_line else "\n"
    return "\n".join(first + [gap.join(units)])


def first_and_last(kept):
    """([what the answer begins with, or its title], [its last words]), where they are demanded."""
    first = [c["v"] for c in kept.get("begin", [])]
    first += [f"<<{c['v']}>>" for c in kept.get("title", [])]
    return first, [c["v"] for c in kept.get("end", [])]


def words(units):
    return len(re.findall(r"\w+", " ".join(units)))


def demanded(rng, case, kept, text, stepwise):
    """Sentences for what the answer has to contain and does not contain yet."""
    needs, said = [], text.lower()
    for c in kept.get("mention", []):
        needs += [c["v"]] * (c["v"] not in skills_in(said))
    for c in kept.get("several", []):
        needs += [c["v"]] * (c["n"] - len(re.findall(rf"\b{c['v']}\b", said)))
    if "stars" in kept and not needs and not skills_in(said):
        needs.append(case["must"][0])
    ways = rng.sample(("We need {s}.", "{S} would help.", "The work needs {s}."), 3)
    units = [ways[i % 3].format(s=s, S=grammar.capital(s)) for i, s in enumerate(needs)]
    for c in kept.get("quote", []):
        if c["fact"] not in said:
            told = "You {e} with {s}." if case["task"] == "interview" else "{E} with {s}."
            if stepwise:
                told = "So you used {s} and {e}." if case["task"] == "interview" else "Seen: {s} ({e})."  # fmt: skip
            units.append(told.format(e=c["fact"], E=grammar.capital(c["fact"]), s=c["v"]))
    units += [f"This is about {c['v']}." for c in kept.get("name", [])]
    units += [f"The role is {c['v']}." for c in kept.get("role", [])]
    return units


def skills_in(text):
    return [s for s in grammar.SKILLS if re.search(rf"(?i)\b{s}\b", text)]


def padding(rng, case):
    """More sentences about the case, in random order, and empty talk for when they run out."""
    who = "You {e} with {s}." if case["task"] == "interview" else "{E} with {s}."
    told = [who.format(s=s, e=e, E=grammar.capital(e)) for s, e in case["shown"].items()]
    told += [f"No proof of {s} yet." for s in grammar.gaps(case)]
    return rng.sample(told, len(told)) + rng.sample(grammar.FILLER, len(grammar.FILLER))
