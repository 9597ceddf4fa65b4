"""data/risky_questions.json as parts/texts.py reads it: each category is found."""

import random

import pytest

import grammar
import interview
from parts.texts import number_of_requests, risky_questions


def scan(text):
    return [found["code"] for found in risky_questions(text)]


FOUND = {
    "disability_medical": """Do you have a disability? | Do you have any disabilities we should know of?
What medications do you take? | Are you currently taking any prescription medication?
Have you ever filed for workers' compensation? | How many days were you sick last year?
How often did you call in sick in your last job? | Have you ever been hospitalised?
Do you have any health problems? | Do you suffer from depression? | Please describe your health.
Have you ever seen a psychiatrist? | Were you ever injured at work? | How much do you drink a week?
Do you use a wheelchair? | Do you have a history of drug abuse? | List your medications.
What is your medical history?""",
    "genetic": """Can you tell me your family medical history? | Have you ever had a genetic test?
Does heart disease run in your family? | Did your mother have cancer?
Does anyone in your family have diabetes? | What were the results of your DNA test?""",
    "race_color": """What is your race? | Which race are you? | Are you Black? | Are you Hispanic?
What is your ethnic background? | Please send a photo of yourself. | Attach a recent photo to your application.
Do you consider yourself a person of color? | How would you describe your skin colour?""",
    "religion": """Which church do you go to? | What is your religion? | Are you a Christian?
Are there any religious holidays you observe? | Do you go to church on Sundays? | Do you pray?
Are you religious? | Why do you wear a headscarf? | Do you celebrate Christmas?""",
    "national_origin": """Where were you born? | Where are you from? | Where are you from originally?
What language do you speak at home? | Are you a US citizen? | Are you a U.S. citizen?
Where is your accent from? | I hear an accent, where is it from? | What is your nationality?
Is English your first language? | How long have you lived in this country? | Where do your parents come from?""",
    "age": """How old are you? | What is your age? | What is your birth date? | When will you retire?
Tell me your date of birth. | When were you born? | What year did you graduate from high school?
Are you over 40? | When do you plan to retire? | Isn't this job hard at your age?
How would you feel about working for a younger boss?""",
    "sex_family": """Do you have children? | Are you married? | Are you pregnant? | Do you have any kids?
Do you plan to have a baby? | What does your husband do? | Who looks after your children while you work?
What are your child care arrangements? | Are you planning to start a family? | What is your maiden name?
Are you gay? | What is your sexual orientation? | How many children do you have? | Are you single?
What is your marital status? | Does your wife mind that you travel? | Do you want kids one day?""",
    "arrest_record": """Were you ever arrested? | Have you ever been arrested? | Do you have an arrest record?
Have you ever been in trouble with the law? | Have you ever been convicted of a crime?
Do you have a criminal record?""",
    "salary_history": """What was your last salary? | How much do you earn now? | What do you currently earn?
How much did you make at your last job? | What is your current compensation? | What was your previous pay?
Share your salary history. | How much are you paid at the moment?""",
    "finance_military_union": """Have you ever filed for bankruptcy? | Do you own or rent your home?
What type of discharge did you get? | Are you a union member? | Do you belong to a union?
How do you feel about unions? | What is your credit score? | Were you honorably discharged?""",
}
MUST_NOT_FIRE = """Are you legally authorised to work in the US? | Are you legally authorized to work in the United States?
Are you at least 18? | Are you at least 18 years old? | Are you over 18?
Can you perform the essential functions of this job with or without reasonable accommodation?
How fluent are you in Spanish, which this role needs? | How fluent are you in Spanish?
Can you work the weekend shifts listed? | What salary range are you expecting?
Have you worked with children in a classroom? | Tell me how you worked with children in a classroom.
Where are you located, and are you open to relocating? | Where are you located?
How old was the codebase? | Do you have a portfolio? | Tell me about your family of products.
I can't ask about your age. | I am not allowed to ask whether you have children.
We do not ask about your religion. | You do not have to tell me your age.
Please do not tell me your date of birth. | I would rather not ask about your health.
I cannot ask if you are married, can I? | I will not ask you what is your age, will I?"""
HARMLESS = """How did you care for patients with diabetes? | How many children were in your class?
Tell me about the retirement plans you sold to clients. | How did you handle a patient discharge?
Tell me about your health and safety training. | Have you worked at a credit union?
What was the age of the system you replaced? | How do you plan lessons for children?
Which accent colour did you pick for the logo? | What did you make of that result?
How much did you make in sales last year? | Tell me how you ran the payroll system.
How do you run a pay review? | How would you support a colleague with a disability team?
What are your salary expectations? | Will you need visa sponsorship? | How many years have you used python?
How did you process workers' compensation claims? | Tell me about a time you missed a deadline.
When did you last make an arrest as a guard? | What church clients has the firm served?
Describe a conflict in your team. | How did you raise output? | What is your native app built with?
Did you lead the black box tests? | How did you store medications on the ward? | What makes you happy?
How do you handle a criminal records check for new staff? | What was your role in the union negotiation?
Where did the parts come from? | What was the birth of that project like? | How do you manage expecting clients?
Do you have experience with depression support groups? | Tell me about the photo layout you designed.
She asked how old I am. | The form wants my date of birth. | My husband is a nurse.
Can you perform the essential functions with or without reasonable accommodation?
How fluent are you in Spanish (the role needs it)? | Where are you located, open to relocating?
I am not allowed to ask if you are married."""


def sentences(text):
    return [s.strip() for s in text.replace("\n", " | ").split("|") if s.strip()]


@pytest.mark.parametrize("code", sorted(FOUND))
def test_risky_requests_are_found_under_their_code(code):
    assert [s for s in sentences(FOUND[code]) if code not in scan(s)] == []


@pytest.mark.parametrize("text", [MUST_NOT_FIRE, HARMLESS], ids=["the page's list", "near misses"])
def test_what_may_be_asked_is_silent(text):
    """Fired on `children in a classroom`, it would teach the policy not to ask teachers anything."""
    assert [(s, scan(s)) for s in sentences(text) if scan(s)] == []


@pytest.mark.parametrize("text, code", {
    "How o\u200bld are\u2060 you?": "age",
    "ＡＲＥ ＹＯＵ ＭＡＲＲＩＥＤ？": "sex_family",
    "Have you filed for workers’ compensation?": "disability_medical",
    "Great. Thanks, now please tell me: how old are you?": "age",
    "I can't ask your age, but how old are you?": "age",
    "I can't ask your age; how old are you?": "age",
    "Are you at least 18, and are you married?": "sex_family",
    "Are you authorised to work here and where were you born?": "national_origin",
}.items())  # fmt: skip
def test_a_disguise_a_refusal_or_an_allowed_phrase_is_no_cloak(text, code):
    assert scan(text) == [code]


def test_the_bank_and_the_grammar_agree_with_the_patterns():
    bank, competencies = interview.BANK, interview.BANK["competencies"]
    risky, templates = bank["templates"]["risky"], sum(bank["templates"].values(), [])
    assert risky == grammar.RISKY_QUESTIONS and len(risky) >= 10
    asked = [t.format(c=c, d="sales", e="safety") for t in templates for c in competencies]
    templates = grammar.OPEN + grammar.CLOSED + grammar.NO_QUESTION
    asked += [template.format(s=skill) for template in templates for skill in grammar.SKILLS]
    asked += grammar.AIMLESS + sum(bank["replies"].values(), [])
    assert [text for text in asked if len(scan(text)) != (text in risky)] == []


@pytest.mark.parametrize("text, requests", {
    "However, do you know SQL?": 1, "Thanks. Could you tell me about SQL?": 1, "Good.": 0,
    "How did you use SQL? Do you like it?": 2, "Tell me about SQL.": 1, "Wie alt sind Sie?": 1,
}.items())  # fmt: skip
def test_one_definition_of_a_request(text, requests):
    assert number_of_requests(text) == requests


def test_requests_agree_with_the_interview_bank():
    rng = random.Random(0)
    for kind, templates in interview.BANK["templates"].items():
        for template in templates:
            c, d, e = rng.sample(sorted(interview.BANK["competencies"]), 3)
            text = template.format(c=c, d=d, e=e)
            wanted = {"greeting": 0, "double": 2}.get(kind, 1)
            assert number_of_requests(text) == number_of_requests(f"Thanks. {text}") == wanted, text


def test_a_quote_is_the_text_as_it_stands():
    text = "Gut ﬁt ½… “Well”\u200b. ＡＲＥ yo\u200bu  married？ 50% sure(s)."
    (hit,) = risky_questions(text)
    assert (hit["code"], hit["severity"]) == ("sex_family", "discouraged")
    assert hit["sentence"] == "ＡＲＥ yo\u200bu  married？"
