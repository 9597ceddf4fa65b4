"""checks/decisions.py: one reader of decisions for every stage."""

import pytest
from checks.decisions import decision_of

WORDS = ("advance", "hold", "reject")
PHRASES = """
advance | advance
Recommendation: Advance. | advance
**Recommendation:** **hold** | hold
Decision = _reject_ | reject
Strengths: sql.\\nGaps: none.\\nRecommendation: advance | advance
Led a hold.\\nRecommendation: reject. | reject
She can hold an audience. Recommendation: advance. | advance
I would advance her to the next round. | advance
My recommendation is to hold. | hold
We should reject this candidate. | reject
~~advance~~ reject | reject
No gaps, advance. | advance
No must-have is missing: advance. | advance
Not a fit, reject. | reject
She does not know kafka; hold. | hold
He does not know kafka, so reject. | reject
Does not meet the bar - reject | reject
No doubt: advance. | advance
Without hesitation, advance. | advance
Not only a match but a find: advance. | advance
I'd hold, not advance. | hold
Not advance but hold. | hold
Do not reject her: hold. | hold
I would rather hold than advance. | hold
Hold rather than reject. | hold
Rather than advance or hold, reject. | reject
Advance instead of hold. | advance
Neither advance nor reject: hold. | hold
I see no reason to reject; advance. | advance
Reject is off the table. Advance. | advance
Hold is not an option; reject. | reject
Advance? No. Hold. | hold
Advance?\\nNo: hold. | hold
Advance? Yes. | advance
Should we advance? Hold. | hold
Recommendation: advance.\\nI would not reject her. | advance
Hold until she has shown SQL. | hold
Put on hold. | hold
I would not advance. | -
I would not, at this time, advance. | -
I don't think we should advance. | -
I don’t advance people like this. | -
We can't advance him. | -
She is not ready to advance. | -
I cannot recommend that we advance. | -
He does not meet the bar to advance. | -
I am unable to advance this candidate. | -
I refuse to advance him. | -
I recommend against advance. | -
It is too early to advance. | -
It would be wrong to reject. | -
Never reject on a gap alone. | -
There is no reason to reject. | -
Advance would not be wise. | -
Advance isn't an option. | -
Do not advance or hold. | -
Neither advance nor reject. | -
Should we advance? | -
advance or reject | -
advance / hold / reject | -
Advance. Hold. | -
Advance if the references are good. | -
Hold unless she knows SQL. | -
Recommendation: advance.\\nOn reflection I would not advance. | -
Recommendation: hold or reject. | -
Nothing. Holding on. | -
She advanced three projects. | -
The advancement of sql. | -
Advance or hold is not an option. | -
Do NOT advance | -
Under no circumstances advance. | -
I doubt that we should advance. | -
She lacks the evidence to advance. | -
Too weak to advance. | -
Too weak to advance, hold. | hold
Advance: no, hold: yes | hold
Strengths: SQL.\\nRecommendation: reject.\\nWe will be in touch; thank you in advance. | reject
Decision: Reject.\\nNext steps: hold a debrief. | reject
Recommendation: reject. Please hold any questions. | reject
Recommendation: hold\\nTo advance, she needs a licence. | hold
Recommendation: reject\\nThe team may hold this against us, and advance without her. | reject
Recommendation (advance, hold or reject): advance | advance
Final decision [advance/hold/reject] - **hold** | hold
## Recommendation\\n\\nI would hold her.\\nWhat could advance her is SQL. | hold
**Recommendation:**\\n\\n**Reject**\\nThe others advance. | reject
Decision: hold.\\nOn reflection, final decision: reject. | reject
Strengths: decision-making, could advance the field.\\nReject. | reject
Reject.\\n\\nPlease hold any questions, and advance your career elsewhere. | reject
- advance\\n- hold\\n- reject | -
- advance\\n- hold\\n- reject\\n\\nI choose advance. | advance
Recommendation: one of advance, hold, reject.\\nI recommend hold. | hold
Outcome: cut the reject rate by 30 percent.\\nI would advance her. | -
Interviewer 1's verdict: reject.\\nInterviewer 2's verdict: hold.\\nI advance her. | -
Her recommendation: advance (from her manager).\\nI would reject her. | -
Advance\\n\\nOn a second reading she lacks SQL, so I would reject. | -
To keep the pipeline moving, I would advance her. | advance
I would reject her.\\nThe team may hold this against us. | -
{"decision": "reject", "reason": "would advance with a licence"} | reject
{"reason": "could hold a post, or advance", "recommendation": "hold"} | hold
Decision: "advance", "hold" or "reject"? | -
It would be a mistake to reject her. | -
Recommendation: Non-advance | -
Despite one mistake in the cover letter I would advance him. | advance
The decision to reject is too clear. | reject
{"decision": "reject", "final_decision": "advance"} | -
[{"decision": "reject", "reason": "x"}, {"decision": "advance", "reason": "or hold"}] | advance
A non-binary candidate, on-hold. | hold
Reject would be too harsh. | -
Rejecting would be a mistake: advance. | advance
Thank you in advance. | -
To advance, she needs a licence. | -
 | -
"""


@pytest.mark.parametrize("line", PHRASES.strip("\n").split("\n"))
def test_eighty_phrasings(line):
    text, _, decision = line.rpartition("|")
    expected = None if decision.strip() == "-" else decision.strip()
    assert decision_of(text.strip().replace("\\n", "\n"), WORDS) == expected


@pytest.mark.parametrize("text, words, expected", [
    ("No hire.", ("hire", "no hire"), "no hire"),
    ("Strong hire", ("hire", "no hire", "strong hire"), "strong hire"),
    ("I would not hire.", ("hire", "no hire"), None),
    ("No.", ("yes", "no"), "no"),
    ("HIRE", ("Hire", "Pass"), "Hire"),
    ("hold", (), None),
    ("Decision: do not invite.", ("invite", "do not invite"), "do not invite"),
    ("Decision: do not invite.", ("invite", "decline"), None),
    ("Empfehlung: nicht einstellen.", ("einstellen", "ablehnen"), None),
    ("Nicht ablehnen, sondern einstellen.", ("einstellen", "ablehnen"), "einstellen"),
    ("Je ne vais pas retenir ce profil.", ("retenir", "refuser"), None),
    ("No contratar.", ("contratar", "rechazar"), None),
])  # fmt: skip
def test_decisions_in_words_of_ones_own(text, words, expected):
    assert decision_of(text, words) == expected
