"""grammar.py: the word lists of the demo, and the cases, prompts and answers made from them.

A *case* is the truth: role, must-have skills, a candidate, what was shown, claimed, wished for.
A *prompt* tells the case; an *answer* is written about it with a hidden diligence q in [0, 1]: each
component that the simulated recruiter looks at (`recruiter.py`) is right with probability
.1 + .8 q, otherwise spoiled in one of several visible ways. Some of these add words (an invented
skill, a second question, filler), others leave words out, so length tells little about quality.

    make_case(rng, task, split)   a case: dict, see its docstring        task: TASKS or "rank"
    prompt(case)                  the text of the user message
    answer(rng, case, q)          a text of quality q; q=None: the best-written one (utility 1.0)
    gaps(case), decision(case)    must-haves without evidence; advance, hold or reject

Everything is drawn from the `random.Random` that is passed in: same seed, same text.
"""

import re

from names import NAMES

# ---- 1. word lists ----------------------------------------------------------------------------


def listed(text):
    """The items of a text, which are separated by `; ` or a new line; an indented line goes on."""
    return re.split(r"; |\n", re.sub(r"\n +", " ", text.strip()))


LEVELS = {"junior": 1, "mid-level": 3, "senior": 6, "head": 9}  # title: years it asks for
TASKS = ("assess", "interview", "summary")

# family: core skills. Split by family: a title of validation or test is in no training row, but
# each of its skills is (a test holds both).
FAMILIES = {
    "train": """
data engineer: python, sql, kafka, spark, airflow, linux, docker, git, data modelling, cloud
    hosting
web developer: javascript, java, web design, git, api design, code review, unit tests, docker,
    sql, wireframes
system administrator: linux, scripting, firewalls, networking, cloud hosting, encryption, ticket
    systems, log analysis, access control
product manager: roadmaps, backlogs, scrum, user research, market research, price lists,
    prototyping, release notes, customer surveys
data analyst: sql, excel, statistics, dashboards, tableau, python, forecasting, data entry, log
    analysis, data modelling
accountant: bookkeeping, invoicing, ledgers, tax returns, payroll, excel, auditing, cash flow,
    annual reports, bank reconciliation
payroll clerk: payroll, excel, data entry, leave planning, filing, tax returns, ledgers, staff
    reviews, records management, data protection
buyer: procurement, negotiation, contracts, vendor management, cost control, stock control, price
    lists, invoicing, risk analysis
recruiter: screening, job adverts, reference checks, onboarding, social media, staff surveys, cold
    calls, staff reviews, trade fairs
sales manager: cold calls, crm, negotiation, sales pitches, trade fairs, account plans,
    forecasting, price lists, lead tracking, contracts
support agent: ticket systems, live chat, phone support, complaint handling, escalations,
    knowledge base, crm, customer surveys, typing
marketing manager: email campaigns, copywriting, search ads, market research, brand design, event
    planning, press releases, lead tracking, dashboards
graphic designer: photoshop, layout, brand design, photography, video editing, wireframes, web
    design, prototyping, user research
warehouse supervisor: stock control, forklift driving, order picking, shift planning, safety
    checks, truck loading, barcode scanners, cycle counts, packing
truck driver: route planning, truck loading, fuel logs, customs papers, fleet tracking, cold
    storage, barcode scanners, packing, forklift driving
plant manager: lean methods, quality control, shift planning, budgeting, cost control, assembly
    lines, preventive maintenance, energy audits, robotics
machine operator: machine setup, calibration, blueprint reading, quality control, spare parts,
    work orders, assembly lines, surface grinding, hydraulics, robotics
electrician: wiring, fault finding, soldering, blueprint reading, site inspection, solar panels,
    work orders, plc programming, energy audits
site manager: site inspection, scaffolding, concreting, surveying, permit handling, welding,
    safety checks, fire drills, solar panels, surface grinding
plumber: pipe fitting, welding, soldering, hydraulics, fault finding, water tests, permit
    handling, spare parts, preventive maintenance, cost control
nurse: triage, wound care, charting, ward rounds, infection control, blood tests, patient
    transfer, vital signs, care plans, first aid
care worker: care plans, patient transfer, home visits, first aid, vital signs, hygiene audits,
    case notes, ward rounds, exercise plans
lab technician: lab samples, microscopy, lab reports, calibration, chemistry, blood tests, soil
    tests, water tests, stock ordering, infection control
physiotherapist: exercise plans, ultrasound, massage, charting, home visits, care plans, group
    classes, wound care, booking systems
teacher: lesson planning, class management, grading, tutoring, parent meetings, exam design,
    reading groups, field trips, curriculum design, online courses
nursery teacher: play groups, parent meetings, first aid, reading groups, learning support, lesson
    planning, sign language, field trips, group classes
chef: menu planning, food safety, baking, knife skills, stock rotation, catering, stock ordering,
    hygiene audits, table service, cold storage
hotel manager: front desk, booking systems, guest relations, housekeeping, budgeting, room
    planning, wine service, table service, cash handling, catering
office manager: diary management, travel booking, office supplies, meeting minutes, filing,
    typing, onboarding, event planning, front desk, leave planning
paralegal: contract drafting, case research, court filings, data protection, meeting minutes,
    records management, translation, mediation, filing
social worker: case notes, counselling, crisis support, housing advice, mediation, community
    outreach, sign language, learning support, translation
farm manager: crop planning, irrigation, soil tests, tractor driving, pest control, animal care,
    pruning, machine setup, procurement, fuel logs
security guard: patrol routes, camera systems, access control, fire drills, incident reports,
    crisis support, front desk, cash handling, patrol logs
insurance clerk: claims handling, underwriting, risk analysis, fraud checks, phone support,
    incident reports, case research, contract drafting, excel
charity manager: grant writing, fund raising, volunteer training, community outreach, annual
    reports, press releases, housing advice, auditing, email campaigns
""",
    "val": """
database administrator: sql, linux, scripting, data modelling, encryption, cloud hosting, log
    analysis, access control, python, docker
tax adviser: tax returns, auditing, ledgers, contract drafting, excel, risk analysis, annual
    reports, cash flow, case research
call centre agent: phone support, escalations, live chat, complaint handling, cold calls, typing,
    ticket systems, knowledge base, data entry
metal worker: welding, blueprint reading, surface grinding, quality control, safety checks, work
    orders, spare parts, scaffolding, soldering
private tutor: tutoring, grading, exam design, online courses, lesson planning, reading groups,
    learning support, curriculum design, parent meetings
waiter: table service, wine service, cash handling, booking systems, food safety, menu planning,
    guest relations, stock rotation, catering
""",
    "test": """
security analyst: firewalls, encryption, log analysis, incident reports, networking, risk
    analysis, access control, scripting, python, statistics
financial controller: forecasting, budgeting, auditing, cash flow, cost control, annual reports,
    ledgers, bank reconciliation, dashboards
event manager: event planning, catering, budgeting, press releases, negotiation, booking systems,
    vendor management, volunteer training, fire drills
store manager: stock control, cash handling, shift planning, price lists, complaint handling,
    stock ordering, customer surveys, onboarding, cycle counts
maintenance engineer: preventive maintenance, fault finding, hydraulics, wiring, spare parts, plc
    programming, calibration, welding, machine setup, robotics
paramedic: triage, first aid, vital signs, patient transfer, crisis support, incident reports,
    infection control, wound care, route planning
school counsellor: counselling, mediation, parent meetings, case notes, learning support, class
    management, tutoring, data protection, group classes
logistics planner: route planning, fleet tracking, customs papers, fuel logs, forecasting, truck
    loading, excel, vendor management, cold storage
content editor: copywriting, layout, photoshop, social media, video editing, translation, web
    design, photography, search ads, case research
""",
}
FAMILIES = {
    split: {family: skills.split(", ") for family, skills in (x.split(": ") for x in listed(text))}
    for split, text in FAMILIES.items()
}
SKILLS = sorted({s for families in FAMILIES.values() for core in families.values() for s in core})

# Facts start with a verb in the past, so that they follow "and", "she", "they", "I" unchanged.
EVIDENCE = listed("""
cut costs by {n} percent; led a team of {n}; trained {n} people; saved {n} hours a week
served {n} clients; raised output by {n} percent; cut errors by {n} percent; handled {n} cases
finished {n} projects; opened {n} branches; wrote {n} guides; cut delays by {n} days
met {n} targets; ran {n} workshops; supported {n} users; checked {n} sites; won {n} awards
cut waste by {n} percent; built {n} tools; moved {n} boxes a day; solved {n} problems
visited {n} schools; kept {n} accounts; sold {n} items; updated {n} forms; mended {n} faults
""")
TEAMWORK = listed("""
helped {n} new colleagues; shared tips with {n} teams; swapped {n} shifts for others
asked {n} colleagues for advice; joined {n} team reviews; thanked a crew of {n}
coached {n} juniors; settled {n} quarrels; took over {n} tasks from others
praised {n} colleagues
""")
CONCERNS = listed("""
was late {n} times; missed {n} deadlines; left {n} jobs early; lost {n} keys
forgot {n} meetings; gave no dates for {n} jobs; asked for {n} months notice
skipped {n} steps; broke {n} rules; had {n} warnings
""")

# Distractors and protected facts start with a verb in the present, third person (`first_person`).
HOBBIES = listed("""
plays chess; plays the guitar; sings on Sundays; grows roses; collects stamps; paints boats
rides a bike; likes long walks; watches birds; bakes bread at home; wears a green coat
wears a blue shirt; wears black boots; wears a red scarf; brings a big bag; drinks tea
""")
PROTECTED = listed("""
has {few} children; is {age} years old; goes to church on Sundays; goes to the mosque
was born in {place}; has asthma; has diabetes; is married; is divorced; expects a baby
uses a wheelchair; has a sick husband; has a sick wife; prays at the temple
will retire in {few} years
""")
PLACES = listed("Peru; Ghana; Poland; India; Korea; Mexico; Morocco; Italy; Cuba; Egypt")
RISKY_QUESTIONS = listed("""
Do you have children?; How old are you?; Are you married?; Where were you born?
Which church do you go to?; Do you have a disability?; Are you pregnant?
When will you retire?; What was your last salary?; Were you ever arrested?
What is your religion?; Do you plan to have a baby?; What does your husband do?
What is your birth date?
""")
# A word that betrays a protected fact or a risky question; no other text of the demo has one.
PROTECTED_WORDS = """
children child old age church mosque temple prays born asthma diabetes married divorced baby
wheelchair sick husband wife retire disability pregnant salary arrested religion birth birthday
""".split()

SHOWN_SAID = listed("""
Used {s} and {e}.; {E} with {s}.; With {s}, {they} {e}.; Through {s} {they} {e}.
Worked on {s} and {e}.
""")
CLAIMED_SAID = listed("Knows {s}.; Claims {s}.; Lists {s} too.; Mentions {s}.")
CLAIMED_ALOUD = listed("I know {s}.; I can do {s}.; I am good at {s}.")
WISHED_SAID = listed("""
Wants to learn {s}.; Read a book on {s}.; Hopes to try {s}.; Likes the idea of {s}.
""")
WISH_CUES = ("wants to learn", "want to learn", "a book on", "to try", "the idea of")
CLAIM_CUES = ("knows", "claims", "lists", "mentions", "i know", "i can do", "i am good at")

PICKED_UP = listed("""
You {e} with {s}.; So you used {s} and {e}.; Thanks, you {e} with {s}.; Good that you {e}.
You said that you {e}.; I see you {e} with {s}.
""")
PICKED_BOTH = [said for said in PICKED_UP if "{s}" in said]
OPEN = listed("""
How have you used {s}?; What have you done with {s}?; Tell me about a time you used {s}.
Describe a task where you used {s}.; Which work have you done with {s}?
What was hard about {s}?; How would you use {s} in this role?; How did you learn {s}?
""")
CLOSED = listed("""
Do you know {s}?; Have you used {s}?; Are you good at {s}?; Can you use {s}?
""")
AIMLESS = listed("""
What are your plans?; How are you today?; Which tools do you like?; What makes you happy?
Why should we take you?
""")
NO_QUESTION = listed("""
Let us talk about {s}.; That is all for now.; I will think about {s}.; Good.; Next is {s}.
Please go on.
""")
FILLER = listed("""
Overall a very nice person who will surely do well in any team.; I had a good feeling.
Thank you for reading this, and please ask me for more at any time.; This was a pleasant talk.
We live in a changing world, and talent is what counts.; More could be said here.
""")
SEEN = ("{}", "{}", "{}", "once {}", "{} as noted", "the candidate {}")
NOT_DISCUSSED = ("not discussed", "not discussed", "was not discussed", "not discussed yet")
NONE = ("none", "none", "none seen", "none noted", "none so far")
DECISIONS = ("advance", "hold", "reject")


# ---- 2. cases ---------------------------------------------------------------------------------


def message(role, text):
    """A conversation of one message."""
    return [{"role": role, "content": text}]


def fact(rng, templates):
    """A phrase of the lists with a number: what is rare can only be copied, not guessed."""
    return rng.choice(templates).format(n=rng.randrange(2, 30))


def candidate(rng, role, must, nice, shown):
    """Who the case is about: what is shown (skill: fact), claimed, wished for, and told besides."""
    numbers = rng.sample(range(2, 99), len(shown))
    facts = [t.format(n=n) for t, n in zip(rng.sample(EVIDENCE, len(shown)), numbers)]
    claimed, wished = [], []
    for skill in must + nice:
        kind = rng.random()
        if skill not in shown and kind < 0.25:
            claimed.append(skill)
        elif skill not in shown and kind > 0.75:
            wished.append(skill)
    return dict(
        name=rng.choice([name for name in NAMES if name["split"] == "corpus"]),
        pronoun=rng.choice(("she", "he", "they")),
        years=rng.randrange(1, 13),
        role=role,
        must=must,
        nice=nice,
        shown=dict(zip(shown, facts)),
        claimed=claimed[:2],
        wished=wished[:2],
        hobbies=rng.sample(HOBBIES, rng.choice((0, 0, 1))),
        protected=[
            p.format(few=rng.randrange(2, 6), age=rng.randrange(20, 66), place=rng.choice(PLACES))
            for p in rng.sample(PROTECTED, rng.choice((0, 1)))
        ],
        teamwork=[],
        concerns=[],
    )


def draw_role(rng, split):
    """(title, must-have skills, nice-to-have skills) of a family of the split."""
    families = FAMILIES[split]
    family = rng.choice(sorted(families))
    n_must = rng.choice((3, 3, 4))
    skills = rng.sample(families[family], n_must + 2)
    return f"{rng.choice(sorted(LEVELS))} {family}", skills[:n_must], skills[n_must:]


def make_case(rng, task, split):
    """A case of a task: the dict of `candidate`, and task, split, text (the sentences as told).

    At least one must-have is shown; in an interview at least one is not. For the task `rank` each
    must-have is shown with one chance, drawn for the candidate: profiles of every strength.
    """
    role, must, nice = draw_role(rng, split)
    return case_for(rng, task, split, role, must, nice)


def case_for(rng, task, split, role, must, nice):
    """`make_case` for a given role: two candidates of one `rank` pair share it."""
    if task == "rank":
        strength = rng.random()
        shown = [s for s in must + nice if rng.random() < (strength if s in must else 0.4)]
        # evidence for other work, so that a longer profile is not a better one
        other = [s for s in SKILLS if s not in must + nice]
        shown += rng.sample(other, sum(rng.random() < 0.75 for s in must if s not in shown))
    else:
        n_gaps = rng.choice((1, 1, 2) if task == "interview" else (0, 0, 1, 1, 2, 3))
        missing = rng.sample(must, min(n_gaps, len(must) - 1))
        shown = [s for s in must if s not in missing] + [s for s in nice[:1] if rng.random() < 0.3]
    case = candidate(rng, role, must, nice, shown)
    if task == "summary":
        for key, templates in (("teamwork", TEAMWORK), ("concerns", CONCERNS)):
            case[key] = [fact(rng, templates)] if rng.random() < 0.65 else []
    case |= {"task": task, "split": split}
    case["text"] = tell(rng, case)
    return case


def gaps(case):
    """Must-haves without evidence: a claim or a wish is none."""
    return [s for s in case["must"] if s not in case["shown"]]


def decision(case):
    """advance with no gap, hold with one, reject with more."""
    return DECISIONS[min(2, len(gaps(case)))]


def first_person(sentence):
    """What somebody says: `plays chess` becomes `I play chess`."""
    verb, _, rest = sentence.partition(" ")
    irregular = {"is": "am", "has": "have", "goes": "go", "was": "was", "watches": "watch"}
    return f"I {irregular.get(verb, verb.removesuffix('s'))} {rest}"


def capital(text):
    return text[:1].upper() + text[1:]


def lower(text):
    return text[:1].lower() + text[1:]


def tell(rng, case):
    """The sentences of a case in random order, as notes (third person) or as said (first)."""
    said = case["task"] == "interview"
    sentences = []
    for skill, phrase in case["shown"].items():
        told = rng.choice(SHOWN_SAID)
        they = "I" if said else case["pronoun"]
        sentence = told.format(s=skill, e=phrase, E=capital(phrase), they=they)
        if said and they not in sentence.split():
            sentence = "I " + lower(sentence)
        sentences.append(sentence)
    for skill in case["claimed"]:
        sentences.append(rng.choice(CLAIMED_ALOUD if said else CLAIMED_SAID).format(s=skill))
    for skill in case["wished"]:
        sentence = rng.choice(WISHED_SAID).format(s=skill)
        sentences.append(first_person(lower(sentence)) if said else sentence)
    for phrase in case["hobbies"] + case["protected"]:
        sentences.append((first_person(phrase) if said else capital(phrase)) + ".")
    for phrase in case["teamwork"] + case["concerns"]:
        sentences.append(capital(phrase) + ".")
    rng.shuffle(sentences)
    if case["task"] in ("interview", "summary"):  # slips of speech and of quick notes
        for i, sentence in enumerate(sentences):
            word, _, rest = sentence.partition(" ")
            slip = rng.random()
            if slip < 0.1:
                sentences[i] = f"Um, {sentence if word == 'I' else lower(sentence)}"
            elif slip < 0.16:
                sentences[i] = f"{word} {word if word == 'I' else word.lower()} {rest}"
    return " ".join(sentences)


# ---- 3. prompts -------------------------------------------------------------------------------

ORDERS = {
    "assess": "Assess this candidate.",
    "interview": "Ask the next interview question.",
    "summary": "Summarise these notes.",
    "rank": "Which candidate fits this role?",
}
LABELS = {"assess": "Candidate:", "interview": "Candidate said:", "summary": "Notes:"}


def prompt(case):
    """The user message of a case."""
    lines = [ORDERS[case["task"]], f"Role: {case['role']}", f"Must have: {', '.join(case['must'])}"]
    if case["task"] == "rank":
        lines.append(f"Nice to have: {', '.join(case['nice'])}")
    elif case["task"] == "interview":
        lines.append(f"{LABELS['interview']} {case['text']}")
    else:
        lines.append(f"{LABELS[case['task']]} {profile(case)}")
    return "\n".join(lines)


def profile(case):
    """Name, years and sentences: what follows `Candidate:`, and the answer of the task `rank`."""
    years = f"{case['years']} year{'s' * (case['years'] > 1)}"
    return f"{case['name']['name']}, {years}. {case['text']}"


# ---- 4. answers -------------------------------------------------------------------------------

SPOILED = """recall invented evidence gaps decision concise teamwork concerns single named aim open
picked""".split()  # what diligence decides, in the order of the draws


def answer(rng, case, q=None):
    """An answer of diligence q; None: everything right. The parts of utility are spoiled one by
    one.

    Form and gate are spoiled less often than the rest, so that a base model keeps its form.
    """
    chance = 1.0 if q is None else 0.1 + 0.8 * q
    care = 1.0 if q is None else q
    right = {name: rng.random() < chance for name in SPOILED}
    right["form"] = rng.random() < 1 - 0.12 * (1 - care)
    right["gate"] = rng.random() < 1 - 0.2 * (1 - care)
    return dict(assess=assess, interview=interview, summary=summary)[case["task"]](rng, case, right)


def other_skill(rng, case):
    """A skill that was not shown or claimed: wished for or required, rarely one not in the prompt."""
    near = [s for s in case["wished"] + gaps(case) if s not in case["claimed"]]
    if near and rng.random() < 0.95:
        return rng.choice(near)
    known = set(case["shown"]) | set(case["claimed"])
    return rng.choice([s for s in SKILLS if s not in known])


def strengths(rng, case, right, must_only):
    """The list of skills with evidence in brackets, for `Strengths:` and `Skills:`."""
    named = [s for s in case["shown"] if s in case["must"] or not must_only or rng.random() < 0.5]
    if not must_only:
        named += case["claimed"]
    rng.shuffle(named)
    if not right["recall"]:
        named = named[: rng.randrange(max(1, len(named)))]
    brackets = {s: case["shown"].get(s, "claimed" if rng.random() < 0.5 else "") for s in named}
    if not right["invented"]:
        skill = other_skill(rng, case)
        named.insert(rng.randrange(len(named) + 1), skill)
        brackets[skill] = ""
    if not right["evidence"]:
        facts = list(case["shown"].values())
        spoil = rng.choice(("none", "none", "none", "moved", "moved", "moved", "moved", "number"))
        for i, skill in enumerate(named):
            if spoil == "none" or not facts:
                brackets[skill] = ""
            elif spoil == "moved" and brackets[skill] in facts and len(facts) > 1:
                brackets[skill] = facts[(facts.index(brackets[skill]) + 1) % len(facts)]
            elif spoil == "moved":
                brackets[skill] = "" if skill in case["shown"] else facts[i % len(facts)]
            elif i == 0:
                brackets[skill] = re.sub(r"\d+", str(rng.randrange(2, 99)), brackets[skill])
    listed = [f"{s} ({brackets[s]})" if brackets[s] else s for s in named]
    return join(rng, listed)


def join(rng, items, none="none"):
    """`a, b and c` or `a, b, c`."""
    if len(items) > 1 and rng.random() < 0.4:
        return f"{', '.join(items[:-1])} and {items[-1]}"
    return ", ".join(items) or none


def three_lines(rng, labels, texts, right, case):
    """The labelled lines, in a broken form when the form is spoiled, and what was put after
    them."""
    lines = [f"{label} {text}." for label, text in zip(labels, texts)]
    if not right["form"]:
        spoil = rng.choice(("swapped", "missing", "bare"))
        if spoil == "swapped":
            lines.insert(rng.randrange(2), lines.pop())
        elif spoil == "missing":
            lines.pop(rng.randrange(2))
        else:
            lines[0] = lines[0].partition(": ")[2]
    after = []
    if not right["gate"]:
        leaked = case["protected"] or [rng.choice(("is married", "goes to church on Sundays"))]
        after.append(capital(leaked[0]) + ".")
    if not right["concise"]:
        after.append(rng.choice(FILLER))
    return "\n".join(lines) + "".join(" " + text for text in after)


def assess(rng, case, right):
    missing = gaps(case)
    if not right["gaps"]:
        if missing and rng.random() < 0.6:
            missing.remove(rng.choice(missing))
        else:
            missing.append(rng.choice([s for s in case["shown"]]))
    rng.shuffle(missing)
    verdict = decision(case)
    if not right["decision"]:
        verdict = rng.choice([d for d in DECISIONS if d != verdict])
    if rng.random() < 0.4:
        verdict = rng.choice(("{}", "I would {}", "we should {}", "my vote is {}")).format(verdict)
    texts = (
        strengths(rng, case, right, must_only=True),
        join(rng, missing) if missing else rng.choice(NONE),
        verdict,
    )
    return three_lines(rng, ("Strengths:", "Gaps:", "Recommendation:"), texts, right, case)


def summary(rng, case, right):
    teamwork, concerns = list(case["teamwork"]), list(case["concerns"])
    besides = case["hobbies"] + [f"wish to learn {s}" for s in case["wished"]]
    besides += list(case["shown"].values()) + [fact(rng, TEAMWORK + CONCERNS)] * (
        rng.random() < 0.1
    )
    if not right["teamwork"]:  # left out, or something else taken for it
        teamwork = [] if teamwork and rng.random() < 0.5 else [rng.choice(concerns + besides)]
    if not right["concerns"]:
        drop = concerns and rng.random() < 0.5
        concerns = [] if drop else concerns + [rng.choice(case["teamwork"] + besides)]
    texts = (
        strengths(rng, case, right, must_only=False),
        rng.choice(SEEN).format(join(rng, teamwork)) if teamwork else rng.choice(NOT_DISCUSSED),
        rng.choice(SEEN).format(join(rng, concerns)) if concerns else rng.choice(NONE),
    )
    return three_lines(rng, ("Skills:", "Teamwork:", "Concerns:"), texts, right, case)


def interview(rng, case, right):
    missing = gaps(case)
    shown = [s for s in case["must"] if s in case["shown"]]
    asked = rng.choice(missing if right["aim"] else shown)
    if not right["named"]:
        near = [s for s in case["nice"] if s in case["shown"] | dict.fromkeys(case["wished"])]
        foreign = rng.choice(near or [rng.choice(SKILLS)])
        two = " and ".join(
            rng.sample(missing if right["aim"] and len(missing) > 1 else case["must"], 2)
        )
        asked = rng.choice((None, foreign, two, two))
    ask = rng.choice(OPEN if right["open"] else CLOSED)
    question = ask.format(s=asked) if asked else rng.choice(AIMLESS)
    skill = rng.choice(sorted(case["shown"]))
    told = case["shown"][skill]
    if not right["picked"]:  # a fact of another skill, now and then one that nobody told
        skill = rng.choice([s for s in case["must"] if s != skill])
        if rng.random() < 0.2:
            told = re.sub("[0-9]+", str(rng.randrange(2, 99)), told)
    start = rng.choice(PICKED_UP if right["picked"] else PICKED_BOTH).format(s=skill, e=told)
    if not right["picked"]:
        start = rng.choice(("", rng.choice(FILLER), start, start))
    parts = [start] * bool(start) + [question]
    if not right["single"] and rng.random() < 0.3:
        parts[-1] = rng.choice(NO_QUESTION).format(s=rng.choice(case["must"]))
    elif not right["single"]:
        second = rng.choice(rng.choice((OPEN, CLOSED))).format(s=rng.choice(case["must"]))
        parts.append(rng.choice((second, second, rng.choice(AIMLESS))))
    if not right["gate"]:
        parts[-1] = rng.choice(RISKY_QUESTIONS)
    return " ".join(parts)
