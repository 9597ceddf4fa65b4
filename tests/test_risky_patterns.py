"""data/risky_questions.json as parts/texts.py reads it: each category is found.

risky.jsonl   found: sentences of each category; silent: what may be asked; cloaks: a disguise, a refusal
              or an allowed phrase around a request; requests: how many a text holds
"""

import itertools

import grammar
import interview
from case_rows import each
from parts.texts import number_of_requests, risky_questions


def scan(text):
    return [found["code"] for found in risky_questions(text)]


@each("risky", of="found")
def test_risky_requests_are_found_under_their_code(code, sentences):
    assert [s for s in sentences if code not in scan(s)] == []


@each("risky", of="silent")
def test_what_may_be_asked_is_silent(sentences):
    """Fired on `children in a classroom`, it would teach the policy not to ask teachers anything."""
    assert [(s, scan(s)) for s in sentences if scan(s)] == []


@each("risky", of="cloaks")
def test_a_disguise_a_refusal_or_an_allowed_phrase_is_no_cloak(text, code):
    assert scan(text) == [code]


def test_the_bank_and_the_grammar_agree_with_the_patterns():
    """Which of their texts are risky, and how many requests those of the bank are."""
    bank, asked = interview.BANK, sum(interview.BANK["replies"].values(), []) + grammar.AIMLESS
    risky = bank["templates"]["risky"]
    assert risky == grammar.RISKY_QUESTIONS and len(risky) >= 10
    for kind, templates in bank["templates"].items():
        for template, c in itertools.product(templates, bank["competencies"]):
            asked.append(text := template.format(c=c, d="sales", e="safety"))
            wanted = {"greeting": 0, "double": 2}.get(kind, 1)
            assert number_of_requests(text) == number_of_requests(f"Thanks. {text}") == wanted, text
    templates = grammar.OPEN + grammar.CLOSED + grammar.NO_QUESTION
    asked += [template.format(s=skill) for template in templates for skill in grammar.SKILLS]
    assert [text for text in asked if len(scan(text)) != (text in risky)] == []


@each("risky", of="requests")
def test_one_definition_of_a_request(text, requests):
    assert number_of_requests(text) == requests


def test_a_quote_is_the_text_as_it_stands():
    text = "Gut ﬁt ½… “Well”\u200b. ＡＲＥ yo\u200bu  married？ 50% sure(s)."
    (hit,) = risky_questions(text)
    assert (hit["code"], hit["severity"]) == ("sex_family", "discouraged")
    assert hit["sentence"] == "ＡＲＥ yo\u200bu  married？"
