"""The bundled environments without a model: the rules of 2048, the reading of an interview."""

import json
import re
import statistics
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest

import grpo_agent as g
import sft
from conftest import REPO
from envs.inbox import Inbox, read_call, read_mailbox
from envs.interview import Interview, read_bank, read_turn
from envs.twenty48 import TwentyFortyEight, after, legal_moves
from parts.files import UserError
from tiny import cases, read_json, table

BANK, BOX = REPO / "data" / "interview.json", REPO / "data" / "inbox.json"


def write_json(path, data):
    path.write_text(json.dumps(data), encoding="utf-8")
    return str(path)


def played(make, name, seeds):
    return g.survivors(g.play(make, seeds, g.baseline_act(make().baselines[name])), 0)


def means(make, name, seeds=range(300)):
    found = played(make, name, seeds)
    return statistics.mean(t.score for t in found), statistics.mean(t.reward for t in found)


def at(rows, **how):
    env = TwentyFortyEight(size=len(rows), **how)
    env.reset(0)
    env.board = [list(row) for row in rows]
    return env


def test_moves_slide_and_one_that_changes_nothing_is_illegal():
    """In ART's rules it passed the turn, and a blind cycle won 92 %: here it ends the game."""
    board = [[0, 2], [2, 2]]  # the merges of one row: doctest of `slide`
    for move, moved in table("""
        left | [[2, 0], [4, 0]]
        right | [[0, 2], [0, 4]]
        up | [[2, 4], [0, 0]]
        down | [[0, 0], [2, 4]]
    """):
        assert after(board, move) == moved
    assert board == [[0, 2], [2, 2]], "looking changes nothing"
    env = at([[2, 4], [0, 0]], show_legal=True)
    assert legal_moves(env.board) == ["down"]
    assert env.shown()["content"] == "2 4\n_ _\nlegal: down"
    assert at(env.board).step("<move>left</move>")[2]
    env.step("<move>down</move>")
    assert sum(map(sum, env.board)) in (8, 10)  # 6 and a 2 or a 4
    assert not legal_moves([[2, 4], [4, 2]]) and legal_moves([[2, 4], [2, 8]])


def test_spawns_are_2_in_nine_of_ten_and_come_from_the_seed():
    """2 000 spawns: .9 ± .02 is three standard errors."""
    env, twin = TwentyFortyEight(), TwentyFortyEight()
    tiles = []
    for seed in range(1000):
        env.reset(seed)
        tiles += filter(None, sum(env.board, []))
    assert len(tiles) == 2000 and abs(tiles.count(2) / 2000 - 0.9) < 0.02
    twin.reset(seed)
    for _ in range(8):
        move = f"<move>{legal_moves(env.board)[0]}</move>"
        assert env.step(move) == twin.step(move)


@cases("""
text | moves
up? <move> UP </move> | ["up"]
<move>left</move> no, <move>down</move> | ["down"]
left | []
<move>sideways</move> | []
<move>left | []
""")
def test_moves_are_read_and_never_guessed(text, moves):
    env = TwentyFortyEight()
    env.reset(1)
    _, reward, done, info = env.step(text)
    assert env.moves == moves and info["moves"] == len(moves)
    assert moves or (reward, done, info["invalid"], info["win"]) == (-1.0, True, 1, 0.0)


@cases("""
board | reward
[[8, 4], [2, 0]] | 0.35
[[16, 16], [2, 0]] | 1.0
""")
def test_rewards_of_2048(board, reward):
    """p = (log₂ max − 1)/(log₂ target − 1): of 32 an 8 is 2/4, .9·p = .45, less .1 for the move that
    changed nothing and ended the game."""
    env = at(board)
    _, of_the_turn, done, info = env.step("<move>left</move>")
    assert done and of_the_turn == pytest.approx(reward) and info["invalid"] == (reward < 1)
    assert at(board).run_out()[0] == pytest.approx(0.675 if board[0][0] == 16 else 0.45)


def test_baselines_of_2048():
    wins = {name: means(TwentyFortyEight, name)[0] for name in TwentyFortyEight.baselines}
    assert wins == pytest.approx({"random": 0.62, "corner": 0.90, "blind": 0.27}, abs=0.09)


@cases("""
text | expected
Thank you. Now, could you please tell me about a time you calmed a dispute? | 1 behavioural conflict
Great work on the budget. What exactly did you do? | 1 specific budgeting
Tell me about a time you coached a junior, and how did it end? | 2 behavioural coaching
**Describe how you** keep to a schedule. | 1 behavioural planning
I see. | 0 other
Ｗhat was the result of the neg\u200botiation？ | 1 specific negotiation
""")
def test_free_questions_are_read(text, expected):
    n, kind, topics = read_turn(read_bank(str(BANK)), text)
    assert f"{n} {kind} {' '.join(topics)}".strip() == expected


def test_free_questions_are_read_rightly_nine_times_in_ten():
    text = (REPO / "tests" / "interview_questions.tsv").read_text(encoding="utf-8")
    rows, right = [line.split("\t") for line in text.splitlines()], [0, 0, 0]
    for requests, kind, topic, question in rows:
        n, found, topics = read_turn(read_bank(str(BANK)), g.visible(question))
        same = n == int(requests), found == kind, (topics or ["-"])[0] == topic
        right = [a + b for a, b in zip(right, same)]
    assert len(rows) >= 150 and min(right) >= 0.9 * len(rows), right


@pytest.mark.parametrize("history", ["all", 0])
def test_turns_without_words_are_no_rows_to_imitate(history):
    """sft.py refused the whole file for one: a model may end at once."""
    say = {"role": "user", "content": "Move."}
    messages = [m for text in ("up", " ") for m in (say, {"role": "assistant", "content": text})]
    (row,) = g.rows_to_imitate(g.Trajectory(0, 0, messages), history)
    sft.check_row(row)
    assert "drop" not in row and sum(map(len, row.values())) == 2


def test_a_bank_of_your_own_may_have_capitals(tmp_path):
    """German nouns have: a question was read in small letters, its cues and phrases were not, so every
    answer was small talk. ß is ss to both."""
    bank = read_json(BANK)
    bank["competencies"]["conflict"]["phrases"] = ["Konflikt", "Großschadenslage"]
    bank["cues"]["behavioural"] = ["Erzählen Sie", "beschreiben"]
    own = read_bank(write_json(tmp_path / "bank.json", bank))
    for noun in ("Konflikt", "eine Großschadenslage"):
        _, kind, topics = read_turn(own, f"Erzählen Sie von {noun}?")
        assert (kind, topics) == ("behavioural", ["conflict"])


@cases("key | message\novertime row | the same first key\nred car | lacks its keys")
def test_a_broken_bank_is_refused(key, message, tmp_path):
    bank = read_json(BANK)
    bank["competencies"]["sales"]["evidence"][0]["keys"][0] = [key]
    arguments = json.dumps({"bank": write_json(tmp_path / "bank.json", bank)})
    with pytest.raises(UserError, match=f"bank.json.*{message}"):
        g.environment(g.parse_args(["--env-args", arguments]))


def test_names_that_look_like_list_marks(tmp_path):
    """The oracle's own summary of "5S audits" and "c_sharp" was no line about them."""
    bank = read_json(BANK)
    names = dict(zip(bank["competencies"], ("5S audits", "c_sharp")))
    for old, new in names.items():
        bank["competencies"][new] = competency = bank["competencies"].pop(old)
        competency["phrases"].append(new.lower())
        for item in competency["evidence"]:
            item["short"] = item["short"].replace(old, new, 1)
    bank["roles"] = {r: [names.get(c, c) for c in x] for r, x in bank["roles"].items()}
    file = write_json(tmp_path / "bank.json", bank)
    assert means(partial(Interview, bank=file), "oracle", range(100)) == (1, 1)


def with_states(*states, seed=0):
    env = Interview()
    env.reset(seed)
    env.states = dict(zip(env.competencies, states or ("open",) * 4, strict=True))
    return env


def say(env, *texts):
    for text in texts:
        last = env.step(text)
    return last


def ask_about(env, competencies):
    say(env, *(f"Tell me about a time you dealt with {c}." for c in competencies))


def short(env, c):
    return env.items[c]["short"]


def test_a_good_interview_earns_one():
    env = with_states("open", "reserved", "reserved", "none")
    a, b, c, d = env.competencies
    ask_about(env, (a, b))
    say(env, "What exactly did you do?", f"When did you last deal with {c}?")
    say(env, f"What was the result of your work on {c}?")
    last = say(env, f"Give me an example of your work on {d}.")
    assert last[0]["content"].endswith("Please write the summary now.") and not last[2]
    told = [short(env, x).split(": ")[1] for x in (a, b, c)]
    lines = f"**Summary**\n- {b}: {told[1]}\n* **{a}**: {told[0]}\n{c}: {told[2]}\n{d}: no evidence"
    message, reward, done, info = say(env, lines)
    assert (message, reward, done, info["correct"]) == (None, 1.0, True, 1)
    assert info["kind/behavioural"] == 4 / 6 and info["kind/specific"] == 2 / 6


@cases("""
reward | text | why
0.25 | Solved the {thing}; complaints fell by {number}. | free words around the keys
0 | no evidence. | it was told: nothing
0 | {thing}. | the right item in part: nothing
-0.15 | {own}, 99 percent. | a number that nobody said
-0.15 | {other} | a fact of another competency
-0.15 | {own} {other} | the same, beside its own
-0.15 | a great talent. | praise without evidence
-0.15 | {word}{own} | after the 40th word nothing is read
""")
@pytest.mark.parametrize("asked", [1, 2])
def test_a_summary_line_is_worth(reward, text, why, asked):
    """1/4 of four for a correct line, 0 for less than was said, −.15 for more."""
    env = with_states()
    a, b, *_ = env.competencies
    ask_about(env, (a, b)[:asked])
    other = short(env, b).split(": ")[1]
    thing, number = (group[0].strip() for group in env.items[a]["keys"])
    own = f"{thing}, {number}"
    text = text.format(own=own, thing=thing, number=number, other=other, word="word " * 40)
    *_, found, _, info = say(env, f"SUMMARY\n{a}: {text}")
    assert found == pytest.approx(reward) and info["revealed"] == asked / 4
    assert info["reported"] == (reward > 0) / asked


@cases("""
text | fine | faults
Are you married? | 0.25 | risky
Do you have a disability? Are you married? | 0.6 | risky many_questions
Tell me about a time you dealt with {}, {} and {}. | 0.1 | many_topics
Describe how you handled {}{long}. | 0.1 | over_long
How would you handle {}? | 0 |
I see. | 0 |
""")
def test_faults_and_what_they_cost(text, fine, faults):
    """As docs/agents.md says. (The replies: test_data.py's hash of the corpus.)"""
    env = with_states()
    *_, info = env.step(text.format(*env.competencies, long=" on some day or other " * 9))
    assert env.fines == pytest.approx(fine) and info["revealed"] == 0
    assert [key[6:] for key, n in info.items() if key[:6] == "fault/" and n] == faults.split()
    assert info["invalid"] == (text == "I see.")


def test_no_summary_costs_and_ends():
    env = with_states()
    questions = [f"Are you good at {c}?" for c in env.competencies] + ["Are you ok?", "Is it you?"]
    _, reward, done, info = say(env, *questions, "Goodbye.")
    assert done and info["fault/no_summary"] == 1 and reward == pytest.approx(-0.25)
    assert say(with_states(), "SUMMARY")[1] == with_states().run_out()[0] == pytest.approx(-0.25)


def test_baselines_of_the_interview():
    exact = {"oracle": (1, 1), "fixed": (0.5, 0.5)}  # in each episode: fewer say as much
    assert {name: means(Interview, name, range(100)) for name in exact} == exact
    found = {name: means(Interview, name) for name in ("fixed+", "random", "uniform")}
    assert found["fixed+"] == (pytest.approx(0.75, abs=0.02), pytest.approx(0.65, abs=0.03))
    assert 0.15 < found["random"][1] < 0.4 and -0.55 < found["uniform"][1] < -0.3


@cases("""
line | unasked | asked
{c}: no evidence | 0 | 0
{c}: led the red car project, 77 percent. | -0.6 | -0.6
{c}: {bank} | -0.6 | -0.6
{own} | -0.6 | 1
{c}: {replies} | -0.6 | -0.6
{own}\\n{c}: no evidence | -1 | -1
""")
def test_exploits_do_not_win(line, unasked, asked):
    for told, reward in ((False, unasked), (True, asked)):
        env = with_states()
        items = [item for c in env.bank["competencies"].values() for item in c["evidence"]]
        given = {
            "bank": " ".join(key for item in items for group in item["keys"] for key in group),
            "replies": " ".join(item["short"] for item in env.items.values()),
        }
        lines = [line.format(c=c, own=short(env, c), **given) for c in env.competencies]
        if told:
            ask_about(env, env.competencies)
        found = say(env, "Tell me about sales.\nSUMMARY\n" + "\n".join(lines).replace("\\n", "\n"))
        assert found[1:3] == (pytest.approx(reward), True)


def test_profiles_are_as_dealt():
    env, states = Interview(), []
    before = json.dumps(env.bank["competencies"])
    for seed in range(400):
        env.reset(seed)
        states.append(sorted(env.states.values()))
    assert all(s.count("reserved") == 2 and "open" in s for s in states)
    assert sum("none" in s for s in states) / 400 == pytest.approx(0.5, abs=0.1)
    assert (env.turns, env.max_turns) == (6, 7)
    played(Interview, "uniform", range(20))
    assert json.dumps(env.bank["competencies"]) == before


# ---- the mailbox ----


@pytest.mark.parametrize("text, call", [
    ('{"search": "Ada notice"}', {"search": "Ada notice"}),
    ('I look first.\n```json\n{"read": "17"}\n```', {"read": 17}),
    ('<tool_call>{"name": "search", "arguments": {"query": "Ada"}}</tool_call>', {"search": "Ada"}),
    ('{"name": "answer", "arguments": {"text": "4 weeks", "source": "3"}}',
     {"answer": "4 weeks", "source": 3}),
    ('{"answer": "{4} weeks", "source": 3}', {"answer": "{4} weeks", "source": 3}),
    ('{"answer": "x", "source": null}', {"answer": "x"}),
    ('{"answer": 28500, "source": "17"}', {"answer": 28500, "source": 17}),
])  # fmt: skip
def test_calls_are_read(text, call):
    assert read_call(text) == call


@pytest.mark.parametrize("text, error", [
    ("I would search for Ada.", "expected one call, got none"),
    ('{"search": "Ada"} {"read": 3}', "expected one call, got 2"),
    ('{"find": "Ada"}', "unknown call"), ('{"search": "Ada", "read": 3}', "unknown call"),
    ('{"\\ud800": 1}', "unknown call"), ('{"read": "three"}', '"read" is the number of a message'),
    ('{"read": true}', '"read" is the number'), ('{"read": 17.5}', '"read" is the number'),
    ('{"read": 1e999}', '"read" is the number'), ('{"read": ' + "9" * 5000 + "}", ""),
    ('{"answer": "x", "source": [3]}', '"source" is the number of a message'),
    ('{"answer": ["a", "b"]}', '"answer" is a text'), ('{"search": {"a": 1}}', '"search" is a text'),
    ("{" * 5000, "expected one call, got none"), ('{"a":' * 3000, "expected one call, got none"),
])  # fmt: skip
def test_a_wrong_call_is_answered_with_what_is_wrong(text, error):
    """It earns 0 and the episode goes on. Half a character in a key came back in the error, which no
    tokenizer reads: the run ended."""
    (t,) = g.play(Inbox, [0], lambda live: [text if not live[0][0].texts() else '{"answer": ""}'])
    shown = t.messages[3]["content"]
    assert shown.startswith(f"error: {error}") and len(shown) < 200 and shown.encode()
    assert (t.error, t.reward, t.metrics["invalid"]) == (None, 0.0, 1)


def inbox_asking(is_wanted):
    """The mailbox, asked its first question for training that is_wanted."""
    env = Inbox()
    next(n for n in range(104) if env.reset(n) and is_wanted(env.question))
    return env


def earned(env, answer, source):
    """Reward and info of an answer, which ends the episode."""
    call = {"answer": answer} if source is None else {"answer": answer, "source": source}
    _, reward, done, info = env.step(json.dumps(call))
    assert done
    return reward, info


@cases("""
answer | source | reward
ANSWER | SOURCE | .9875
They said: ANSWER. | SOURCE | .9875
ANSWER | 1 | .4
ANSWER | None | .4
I do not know | SOURCE | 0
I don’t know. | None | 0
 | SOURCE | 0
ANSWER or OUTDATED | SOURCE | -.5
OUTDATED | SOURCE | -.5
1 2 3 4 5 6 7 8 9 10 11 weeks or ANSWER | SOURCE | -.5
1ANSWER | SOURCE | -.5
""")
def test_what_an_answer_about_the_mailbox_earns(answer, source, reward):
    """A corrected fact: the earlier answer no longer holds, and a list of all is no answer."""
    env = inbox_asking(lambda question: question["outdated"])
    question = env.question
    for old, new in (("ANSWER", question["answers"][0]), ("OUTDATED", question["outdated"][0])):
        answer = answer.replace(old, new)
    got, info = earned(env, answer, question["source"] if source == "SOURCE" else source)
    assert got == pytest.approx(float(reward))
    assert info["correct"] == (got > 0.4) and info["wrong"] == (got < 0)


@cases("""
answer | reward
six weeks | .9875
a 6-week notice period | .9875
6 weeks, and asks for 28,500 a year | .9875
2 weeks 4 weeks 6 weeks 8 weeks | -.5
2, 4, 6 weeks | -.5
6 weeks or eight weeks | -.5
not 6 weeks | -.5
It isn't 6 weeks. | -.5
6 weeks, planning, safety | -.5
6 weeks Imke Rauch | -.5
6 weeks (17, 18, 19) | -.5
""")
def test_a_list_of_all_that_is_possible_earns_nothing(answer, reward):
    """The four notice periods or six skills in a row earned .4 without a look, "not 6 weeks" .99."""
    env = inbox_asking(lambda question: "6 weeks" in question["answers"][0])
    source = env.question["source"]
    pay = re.search(r"[\d,]{6}", env.mailbox["messages"][source]["text"])
    got, _ = earned(env, answer.replace("28,500", pay[0] if pay else "6"), source)
    assert got == pytest.approx(float(reward))


@pytest.mark.parametrize("topic, answers", [
    ("pay", ["EUR {0}", "{1}", "{1}.00 EUR", "{2} a year", "{3}", "€{0},-"]),
    ("day", ["on {4} {5}", "{5} {4}th", "the {4}th of {5}", "{5} {4}, at {hour}:00"]),
])  # fmt: skip
def test_spellings_of_an_answer(topic, answers):
    for answer in answers:
        env = inbox_asking(lambda question: question["topic"] == topic)
        value, source = env.question["answers"][0], env.question["source"]
        hour = re.search(r"at (\d+)", env.mailbox["messages"][source]["text"])
        plain = value.replace(",", "")
        parts = [value, plain, value.replace(",", " "), value.replace(",", "."), *value.split()]
        text = answer.format(*parts, *"xx", hour=hour and hour[1])
        assert earned(env, text, source)[0] == pytest.approx(0.9875), text


def test_accepted_answers_that_hold_other_words(tmp_path):
    """An accepted "no" was a denial, "2 months" another question's answer "2"."""
    box = read_json(BOX)
    texts = "No earlier than 3 May.", "Two months or 2 months.", "2 of them."
    forms = ["no earlier than 3 May"], ["two months", "2 months"], ["2"]
    for i, text, answers in zip(range(9000, 9003), texts, forms):
        own = {"source": i, "answers": answers, "outdated": []}
        box["messages"].append(box["messages"][0] | {"id": i, "text": text})
        box["questions"].append(box["questions"][0] | own)
    env = Inbox(write_json(tmp_path / "box.json", box))
    env.reset(0)
    for question in env.mailbox["questions"]["train"][-3:]:
        env.question = question
        assert env.grade({"answer": question["answers"][-1], "source": question["source"]}) > 0.4
        assert env.grade({"answer": "not 7 June", "source": question["source"]}) < 0


def test_the_mailbox_and_its_baselines():
    """295 messages; what is asked of one side is about other people, and each is asked once: the
    64 validation questions that chose the weights were among the 80 of the test."""
    mailbox = read_mailbox(str(BOX))
    sides = mailbox["questions"]
    assert {side: len(rows) for side, rows in sides.items()} == dict(
        train=104, validation=48, test=48
    )
    assert len(mailbox["messages"]) == 295
    assert sum(len({q["about"] for q in rows}) for rows in sides.values()) == 50
    for start, side in enumerate(sides):
        seeds = range(start * 10**9, start * 10**9 + len(sides[side]))
        asked = [t.metadata["question"] for t in played(Inbox, "oracle", seeds)]
        assert sorted(asked) == sorted(q["question"] for q in sides[side])
    scores = {name: means(Inbox, name, seeds)[0] for name in Inbox.baselines}
    assert scores == pytest.approx(dict(oracle=1, exhaustive=43 / 48, blind=0))
    assert means(Inbox, "exhaustive", seeds)[1] < means(Inbox, "oracle", seeds)[1]


def test_one_message_proves_each_answer():
    """Three corrections said what the first message had said, and only the later one counted."""
    mailbox = read_mailbox(str(BOX))
    for q in (q for rows in mailbox["questions"].values() for q in rows):
        about = [m for m in mailbox["messages"].values() if q["about"] in str(m)]
        found = {m["id"]: re.search(q["pattern"], m["text"]) for m in about}
        values = {i: match[1] for i, match in found.items() if match}
        assert [i for i, value in values.items() if value in q["answers"]] == [q["source"]]
        assert max(values) == q["source"] and not {*q["answers"]} & {*q["outdated"]}


@pytest.mark.parametrize("change, said", [
    (lambda box: box["messages"][0].update(id="m1"), "'m1' of a message is no whole number"),
    (lambda box: box["questions"][0].update(answers=["–"]), "does not say so"),
    (lambda box: box["questions"][0]["answers"].append(""), "does not say so"),
    (lambda box: [q.update(split="train") for q in box["questions"]], "of each split"),
])  # fmt: skip
def test_mailboxes_that_are_refused(change, said, tmp_path):
    """An accepted answer without a word made every answer right."""
    box = read_json(BOX)
    change(box)
    with pytest.raises(ValueError, match=said):
        Inbox(write_json(tmp_path / "box.json", box))


@pytest.mark.parametrize("turns", [0, "8", True, 1.5])
def test_numbers_of_turns_that_are_refused(turns):
    with pytest.raises(ValueError, match="max_turns"):
        Inbox(max_turns=turns)


@pytest.mark.parametrize("metadata, logged", [
    ({"n": np.float64(2), "x": float("nan")}, {"n": 2.0, "x": None}), (None, {}), ({1: (2,)}, {"1": [2]}),
    ({"ids": {1, 2}}, None), ({"f": print}, None), ({"s": "\ud800"}, None), ({(1, 2): 3}, None),
])  # fmt: skip
def test_metadata_fits_in_a_line(metadata, logged):
    """A set or half a character in it ended the run at the write, behind a traceback."""

    class Noted(Inbox):
        def reset(self, seed):
            opening = super().reset(seed)
            self.metadata = metadata
            return opening

    (t,) = g.play(Noted, [0], lambda live: ['{"answer": ""}'])
    (row,) = g.rollout_rows(1, "train", [t], 1, {"env": [0.0]}, [0.0], [0.0])
    assert row["metadata"] == (logged or {})
    assert ("metadata is no JSON" in (t.error or "")) == (logged is None)


def test_what_a_tool_raises_ends_its_episode_alone():
    """An EOFError of a tool ended the run as if a person had typed Ctrl-D: silently, status 0."""

    class Closed(Inbox):
        def step(self, text):
            if self.question["source"] % 2:
                raise EOFError("the server closed the connection")
            return super().step(text)

    t = g.play(Closed, range(8), g.baseline_act(Inbox.baselines["blind"]))
    assert {(e.error or "").partition(":")[0] for e in t} == {"EOFError", ""}


def test_slow_steps_of_a_group_do_not_wait_for_one_another():
    class Slow(Inbox):
        def step(self, text):
            time.sleep(0.2)
            return super().step(text)

    began = time.monotonic()
    played(Slow, "oracle", range(16))
    together = time.monotonic() - began
    assert together < 16 * 3 * 0.2 / 2, "three turns of 16 episodes, one after the other: 9.6 s"


def test_another_mailbox(tmp_path):
    """To imitate more episodes than one mailbox has questions: all but two are for training."""
    out = tmp_path / "new" / "mailbox.json"
    words = f"{REPO}/data/inbox.py --seed 1 --train-alone --out {out}".split()
    subprocess.run([sys.executable, *words], check=True)
    questions = read_mailbox(str(out))["questions"]
    assert {side: len(rows) for side, rows in questions.items()} == {
        "train": 198, "validation": 1, "test": 1
    }  # fmt: skip
    bundled = Inbox().mailbox
    assert Inbox(out).mailbox["messages"] != bundled["messages"]
    held_out = {q["about"] for side in ("validation", "test") for q in bundled["questions"][side]}
    asked = {q["about"] for rows in questions.values() for q in rows}
    assert len(held_out) == 24 and len(asked) == 50 and not asked & held_out
