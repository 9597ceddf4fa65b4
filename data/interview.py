"""interview.py: everything the interview environment can say; `bank` becomes interview.json.

The candidate of envs/interview.py has a hidden profile: a role and four competencies, each with an
evidence item and a state (`open`, `reserved`, `none`). This file has the wordings.
"""

from grammar import RISKY_QUESTIONS, listed

# ---- 1. word lists ----------------------------------------------------------------------------

ROLES = """
nurse: safety, planning, coaching, reporting, conflict, service, delegation
teacher: planning, coaching, conflict, reporting, quality, safety
chef: hiring, quality, budgeting, safety, coaching, planning, negotiation
site manager: safety, budgeting, planning, quality, negotiation, delegation, conflict
warehouse supervisor: planning, safety, coaching, quality, hiring, delegation, reporting
sales manager: sales, negotiation, coaching, budgeting, hiring, reporting, service
hotel manager: service, hiring, budgeting, conflict, sales, delegation, quality
plant manager: quality, safety, budgeting, reporting, delegation, planning, conflict
office manager: planning, budgeting, negotiation, conflict, delegation, reporting, hiring
support agent: service, conflict, reporting, quality, sales, coaching
charity manager: budgeting, reporting, coaching, hiring, planning, sales, negotiation
buyer: negotiation, quality, budgeting, reporting, planning, conflict
"""
# families of the training split, and the competencies of each
ROLES = dict(line.split(": ") for line in listed(ROLES))
# competency; phrases; the outline; then twice four things and the sentence they stand in. The first
# sentence takes any number up to 51 ("by {n} percent"), the second any from 52 on (a share).
COMPETENCIES = """
conflict
conflict, conflicts, quarrel, quarrels, dispute, disputes, disagreement, disagreements
There was some conflict at work, and we got over it.
overtime row, parking row, holiday clash, desk clash
I sat down with both sides of the {t} and set a fair rule. Complaints fell by {n} percent.
noise row, bonus clash, tool row, kitchen row
I let both sides of the {t} speak and wrote down what they shared. In the end {n} percent of the team backed the rule.

planning
planning, plan, plans, planned, schedule, schedules, scheduling
I do the planning for my team, and it goes well.
night roster, office move, weekend roster, stock count
I set up the {t} and left time for surprises. Delays fell by {n} percent.
store opening, cloud upgrade, school trip, spring fair
I set up the {t} week by week. In the end {n} percent of the steps were done on time.

coaching
coaching, coach, coached, mentoring, mentor, mentored
I do some coaching, and people like it.
new drivers, night nurses, junior cooks, first clerks
I sat down with the {t} for an hour a week. Their errors fell by {n} percent.
weekend staff, trade students, summer crew, late starters
I met the {t} every week and let them try things. In the end {n} percent of them passed the test.

negotiation
negotiation, negotiations, negotiate, negotiated, negotiating, bargaining
I have led a negotiation or two, with good results.
paper contract, fuel contract, rent deal, steel deal
I looked at three offers before I signed the {t}. We paid {n} percent less.
phone deal, van lease, cloud contract, cleaning deal
I asked for more time on the {t} and kept calm. We got {n} percent of what we asked for.

budgeting
budgeting, budget, budgets, budgeted
Budgeting is part of my work, and it adds up.
print costs, energy bill, food bill, travel costs
I went through the {t} line by line. We paid {n} percent less.
tool fund, repair fund, training fund, team fund
I checked the {t} each month. By summer {n} percent of it was used as agreed.

safety
safety, accident, accidents, hazard, hazards
I take safety at work to heart, and others do too.
wet floor, saw guard, gas leak, loading ramp
I dealt with the {t} after a near miss. Injuries fell by {n} percent.
ladder rule, helmet rule, exit route, lifting drill
I explained the {t} to all shifts. In the end {n} percent of the staff kept to it.

quality
quality, defect, defects
We had some quality problems, and I helped with them.
paint fault, label fault, loose screw, cracked pipe
I found the cause of the {t} and changed the setup. Errors fell by {n} percent.
weight check, colour check, sample test, second look
I put the {t} at the end of the line. It caught {n} percent of the errors.

service
service, customer service, customer, customers, complaint, complaints
I like to give good service, and clients tell me so.
late parcel, broken fridge, wrong bill, cold meal
I called back after the {t} and put it right the same day. Lost orders fell by {n} percent.
help line, evening desk, repair van, return form
I set up the {t} for our clients. In the end {n} percent of them were happy with it.

hiring
hiring, hire, hired, hires, recruiting, recruitment, recruit, recruited
I was part of the hiring in my team, and we found good people.
driver search, welder search, cook search, nurse search
I wrote a new advert for the {t} and asked all the same questions. We needed {n} percent less time.
student day, skills test, trial shift, phone round
I set up the {t} for new people. In the end {n} percent of those we took stayed.

reporting
reporting, report, reports, reported
I do the reporting for my team, and nobody complains.
board paper, price table, shift log, cost sheet
I cut the {t} to one page. It took {n} percent less time.
risk letter, ward chart, project brief, stock list
I sent out the {t} every week. In the end {n} percent of the managers read it.

sales
sales, sale, sell, selling, sold
My sales were fine, and my clients were too.
solar kit, garden set, winter boots, gift card
I called all who had asked about the {t}. Orders rose by {n} percent.
repair plan, lunch card, wine box, first aid kit
I showed the {t} to all our clients. In the end {n} percent of them took it.

delegation
delegation, delegate, delegated, delegates, delegating
I have learnt some delegation, and my team grew with it.
mail round, key list, holiday list, order book
I gave the {t} to a junior and looked at it twice a week. My overtime fell by {n} percent.
invoice run, web page, tool store, night watch
I handed over the {t} step by step. In the end {n} percent of it ran without me.
"""
COMPETENCIES = [block.split("\n") for block in COMPETENCIES.strip().split("\n\n")]
COMPETENCIES = {name: parts for name, *parts in COMPETENCIES}

TEMPLATES = dict(
    behavioural=listed("""
Tell me about a time you dealt with {c}.; Give me an example of your work on {c}.
Describe how you handled {c}.; Walk me through your last work on {c}.
When did you last deal with {c}?; Describe a time when {c} mattered.
Give me one example of {c} at work.; Tell me about the last time you handled {c}.
"""),
    specific=listed("""
What exactly did you do about {c}?; What was the result of your work on {c}?
How did you go about {c}?; Can you be more specific about {c}?
"""),
    # specific, but names no competency: about the turn before
    follow_up=listed("""
What exactly did you do?; What was the result?; Can you be more specific?
"""),
    hypothetical=listed("""
How would you handle {c}?; Imagine a problem with {c}: what would you do?
"""),
    closed=listed("""
Do you know about {c}?; Are you good at {c}?; Have you dealt with {c}?
"""),
    other=listed("What about {c}?; Why does {c} matter?"),
    no_topic=listed("What are your hobbies?; Why should we take you?"),
    greeting=listed("Good to meet you.; Thanks, that is good."),
    double=listed("""
Tell me about a time you dealt with {c}, and what was the result?
Describe how you handled {c}. How did you go about {d}?
"""),
    topics=listed("Tell me about a time you dealt with {c}, {d} and {e}."),
    risky=RISKY_QUESTIONS,
)
KINDS = dict(follow_up="specific", topics="behavioural", no_topic="other")

CUES = dict(
    lead_in=[
        r"thanks|thank you|now|next|kindly|ok|okay|so|please|great|good|well|then|and|first|finally|hello|hi",
    ],
    polite=[  # before an imperative; a question that opens so is closed
        r"(?:could|can|would|will) you(?: please)?",
        r"i(?: would|'d) like (?:you )?to|i want you to|let's|let us|take a moment to",
    ],
    imperative=[
        r"tell|describe|walk|give|share|explain|outline|name|list|show|talk|discuss|say|elaborate",
        r"send|provide|state|attach|submit|confirm|disclose|include|upload",
        r"be more specific|think of|recall|imagine|suppose|help me understand",
    ],
    joint=[
        r"(?:and|or|but|also),? (?:what|how|why|when|where|who|which|did|do|does|have|are|is|was|were|can"
        r"|could|would|tell|describe|explain|give|share|walk|outline)",
    ],
    behavioural=[
        r"\ba (?:specific |recent |particular )?(?:time|situation|occasion|moment|case)\b",
        r"\bexamples? (?:of|where|when|in which|from)\b|\bfor example\b|\b(?:an|one) example\b",
        r"\bdescribe (?:to me )?how you\b|\bwalk (?:me|us) through\b",
        r"\bwhen did you last\b|\bthe last time\b|\bhave you ever had to\b",
    ],
    hypothetical=[
        r"\bwould you\b(?! (?:please |like to |mind |be able to )*(?:tell|telling|describe|give|share|sharing"
        r"|explain|walk|outline|elaborate|talk|be more|say))",
        r"\b(?:imagine|suppose|what if|if you were|if you had to)\b",
    ],
    specific=[
        r"\b(?:what|how|which)\b[^?]*\bdid (?:you|it|that|they|the)\b",
        r"\bwhat (?:was|were) (?:the|your) (?:\w+ )?(?:results?|outcomes?|role|part|steps?|effects?)\b",
        r"\bhow (?:many|much|long)\b|\bmore (?:specific|precise|detail|details)\b|\bexplain how you\b",
        r"\bwhat (?:exactly|happened|changed)\b",
    ],
    closed=[
        r"^(?:are|do|does|did|have|has|had|is|was|were|can|could|will|should) (?:you|your|there|it)\b"
    ],
    no_evidence=[
        r"^(?:there (?:is|was) )?(?:no|none|not any|without|zero) ?(?:evidence|experience|proof|example)?"
        r"(?: (?:given|shown|heard|found|yet|so far))?$",
        r"^(?:nothing|not) (?:shown|heard|said|discussed|asked|given|mentioned|covered)(?: yet)?$|^n/a$",
    ],
)
REPLIES = dict(
    risky=["I would rather not answer that."],
    one_question=["One short question, please."],
    repeated=["You asked me that before."],
    as_said=["As I said before."],
    no_request=["What would you like to ask?"],
    small_talk=["I am glad to be here."],
    intentions=["I would talk to my team first."],
    yes=["Yes, I am good at that."],
    exposure=["I have seen some of that, but it was not my job."],
    final=["Please write the summary now."],
)
OPENING = (
    "Interview a candidate.\nRole: {role}\nCompetencies: {competencies}\n"
    "Ask one short question a turn about past work, {turns} turns at most. Then write SUMMARY and a "
    "line for each competency: what was said, or no evidence."
)


def bank():
    """→ the dict of interview.json. Numbers are dealt so that no two items share one."""
    competencies = {}
    for i, (name, parts) in enumerate(COMPETENCIES.items()):
        phrases, outline, *halves = parts
        evidence = []
        for half, (things, sentence) in enumerate((halves[:2], halves[2:])):
            for j, thing in enumerate(things.split(", ")):
                number = 4 + 48 * half + (4 * i + j) * 29 % 48  # 29 and 48 share no factor
                evidence.append(
                    dict(
                        keys=[[thing], [f"{number} percent"]],
                        full=sentence.format(t=thing, n=number),
                        short=f"{name}: {thing}, {number} percent.",
                    )
                )
        competencies[name] = dict(
            phrases=phrases.split(", "),
            evidence=evidence,
            outline=[outline],
            none=[f"I have not had to deal with {name} yet."],
        )
    return dict(
        version=1,
        opening=OPENING,
        roles={role: names.split(", ") for role, names in ROLES.items()},
        competencies=competencies,
        cues=CUES,
        replies=REPLIES,
        templates=TEMPLATES,
        kinds={kind: KINDS.get(kind, kind) for kind in TEMPLATES},
        no_evidence="no evidence",
    )


BANK = bank()
