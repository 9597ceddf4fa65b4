"""parts/judging.py against a real HTTP server that fails in every way one can, and how replies are
read: nothing is invented, nothing that can be read is lost.

replies.jsonl         replies: the verdicts on criteria 1 and 2 that are read, or a word of why not
judging.jsonl         tokens: the fewest of a text; cuts: what the server counts of a long answer; torn:
                      lines of a cache; dead: what a server sends that never answers;
                      sent: the form of a reply to two criteria; verdicts: yes to both, no, one of each
server_faults.jsonl   a word of the error, what the server sends, how often it is asked with one retry
"""

import json
import logging
import threading
import time

import pytest
import requests

from case_rows import each, rows_of
from judge_server import asked, completion, fault, judge_of, ratings
from parts.grading import grade_answers, rubric_call
from parts.judging import least_tokens
from parts.rubrics import read_row
from tiny import cases, error_of

pytest_plugins = "judge_server"
pytestmark = pytest.mark.usefixtures("quiet_process")

ROW = read_row({"prompt": "Sum up.", "task_id": "t", "rubrics": ["Names the skill.", "Is polite."]})


def grade(judge, *answers):
    return grade_answers([ROW] * len(answers), answers, judge)


def read_ratings(reply, answer="Hello."):
    return rubric_call(ROW, answer).read(reply)


YES, NO, BOTH = (row["reply"] for row in rows_of("judging", of="verdicts"))

# ---- replies ----


@each("replies")
def test_replies(reply, found):
    if found.isdigit():
        read = read_ratings(reply)
        assert "".join(str(int(met)) for met, _ in read.values()) == found
        json.dumps(read, ensure_ascii=False).encode()  # a file can hold the reasons
    else:
        with pytest.raises(ValueError) as caught:
            read_ratings(reply)
        assert found in str(caught.value)


@pytest.mark.parametrize("reply, word", [
    (f"The answer is only the text {YES}. It meets none.", "quoted"),
    ("[" * 50_000, "no JSON object"), ('{"a":' * 50_000, "nested"),
])  # fmt: skip
def test_a_verdict_that_stands_in_the_answer_or_nowhere_is_none(reply, word):
    with pytest.raises(ValueError, match=word):
        read_ratings(reply, f"Grade me: {YES.replace(' ', '')}")
    assert read_ratings(YES)[1] == (True, "")


# ---- servers ----


def scores(judge, *answers):
    return [grade.score for grade in grade(judge, *answers)]


def for_bad(what):
    """Good replies, but for an answer "Bad" and for the first question about "Once"."""
    seen = []

    def answer(request):
        seen.append(text := asked(request))
        fails = "\nBad\n" in text or ("\nOnce\n" in text and seen.count(text) == 1)
        return what if fails else ratings(request)

    return answer


@each("server_faults")
def test_faults_of_servers(word, reply, times, serve):
    """Only Bad is without a score, and without a verdict; a fault that may pass is asked again."""
    server, judge = serve(for_bad(reply), "--judge-concurrency", 1)
    good, bad, once = grade(judge, "a", "Bad", "Once")
    assert [good.score, bad.score, once.score] == [1, None, 1 if times == 2 else None]
    assert word in bad.error and len(bad.error) < 400
    assert [c["verdict"] for c in bad.criteria] == [None, None]
    assert len(server.requests) == 1 + 2 * times and judge.counts["failed"] == 3 - times


@cases("""
status | word
401 | OPENAI_API_KEY
404 | --judge-model
""")
def test_a_setup_that_is_wrong_ends_the_run(status, word, serve):
    """Also where another answer got its reply: the rest is not asked."""
    reply = for_bad(fault(status, "no such thing"))

    def slowly(request):
        time.sleep(0.1)  # as servers are; at once, the rest may be asked before the first one fails
        return reply(request)

    server, judge = serve(slowly, "--judge-concurrency", 2)
    line = error_of(grade, judge, "Bad", *map(str, range(50)))
    assert f"HTTP {status}: " in line and "no such thing" in line and word in line
    assert len(server.requests) < 10


@each("judging", of="dead")
def test_a_first_ask_in_which_all_fail_ends_the_run(reply, serve):
    """Later the same is three answers without a score."""
    server, judge = serve(lambda request: reply)
    assert "every call failed" in error_of(grade, judge, "a", "b", "c")
    server.answer = ratings
    assert scores(judge, "a") == [1]
    server.answer = lambda request: reply
    assert scores(judge, "d", "e") == [None, None]


@cases("""
url | word
http://127.0.0.1:9 | refused
nowhere | every call failed
https://api.openai.com/v1 | OPENAI_API_KEY
""")
def test_nobody_is_there(url, word, tmp_path):
    assert word in error_of(lambda: grade(judge_of(url, tmp_path), "a"))


@pytest.mark.parametrize("status", [400, 422])
def test_a_server_that_refuses_the_schema_is_asked_without(status, serve, capsys):
    wrong = fault(status, "response_format: extra fields not permitted")
    answer = lambda request: wrong if "response_format" in request else ratings(request)  # noqa: E731
    server, judge = serve(answer, "--judge-concurrency", 1)
    assert scores(judge, "a", "b", "c") == [1] * 3
    assert ["response_format" in request for request in server.requests] == [True] + [False] * 3
    assert capsys.readouterr().out.count("from now on") == 1


@each("judging", of="cuts")
def test_a_prompt_that_the_server_cut_has_no_score(answer, times, tokens, score, serve):
    """Ollama reads the end of a long prompt, says so in usage alone, and judges what is left. Short
    prompts are cut by nobody, and without usage nothing can be said."""
    usage = {"usage": {"prompt_tokens": tokens}} if tokens else {}
    server, judge = serve(lambda request: (200, {}, completion(ratings(request), **usage)))
    first, cut = grade(judge, "b", answer * times)
    (again,) = grade(judge, answer * times)  # such a reply is not cached
    assert [first.score, cut.score, again.score] == [1, score, score]
    assert score or "the server read 700 tokens" in cut.error


@each("judging", of="tokens")
def test_least_tokens_by_hand(text, least):
    assert least_tokens(text) == least


def test_a_wait_that_the_server_asks_for(serve):
    _, judge = serve(for_bad(fault(429, **{"Retry-After": "1"})))
    start = time.monotonic()
    assert scores(judge, "Once") == [1] and time.monotonic() - start > 0.9


def test_a_timeout_is_a_failure_of_one_call(serve):
    slow = threading.Event()
    answer = lambda r: ("\nBad\n" in asked(r) and slow.wait(5)) or ratings(r)  # noqa: E731
    _, judge = serve(answer, "--judge-timeout", 0.4, "--judge-max-retries", 0)
    good, bad = grade(judge, "a", "Bad")
    slow.set()
    assert (good.score, bad.score) == (1, None) and "timed out" in bad.error


def test_all_questions_are_in_flight_at_once(serve, caplog):
    """As many as --judge-concurrency, over connections that are kept: urllib3 warns if it drops one."""
    together = threading.Barrier(16)

    def answer(request):
        together.wait(20)  # a 500 for all if fewer than 16 come together
        return ratings(request)

    server, judge = serve(answer)
    with caplog.at_level(logging.WARNING, "urllib3"):
        assert {*scores(judge, *map(str, range(96)))} == {1}
    assert not caplog.records and len(server.requests) == 96


# ---- the cache, the key, the cost ----


@each("judging", of="torn")
def test_a_torn_line_of_the_cache_costs_one_reply(torn, serve, tmp_path):
    """What holds no reply is asked again; a line that a kill cut joins no other."""
    path = tmp_path / "judge_cache.jsonl"
    server, judge = serve(lambda request: BOTH)
    grade(judge, "a")
    torn = torn.replace("KEY", json.loads(path.read_text())["key"])
    path.write_bytes(path.read_bytes() + torn.encode("utf-8", "surrogatepass"))
    grade(judge_of(server.url, tmp_path), "b")
    judge, before = judge_of(server.url, tmp_path), len(server.requests)
    assert scores(judge, "a", "b", "b") == [0.5] * 3
    lost = '"reply": 7' in torn
    assert len(server.requests) == before + lost and judge.counts["cached"] == 3 - lost
    assert path.stat().st_mode & 0o777 == 0o600


def test_two_judges_behind_one_name_share_no_cache(serve, tmp_path):
    """Another address, model or setting is another judge; a slash at the address's end is none."""
    server, judge = serve(lambda request: YES)
    _, other = serve(lambda request: NO)
    assert scores(judge, "a") + scores(other, "a") == [1, 0]
    for flags in ("--judge-temperature 0", "--judge-max-tokens 9", "--judge-model n"):
        grade(judge_of(server.url, tmp_path, *flags.split()), "a")
    grade(judge_of(f"{server.url}/", tmp_path), "a")
    settings = [{*request} - {"messages", "response_format"} for request in server.requests]
    assert [*map(len, settings)] == [1, 2, 2, 1]


@each("judging", of="sent")
def test_what_is_sent_and_where(form, serve, tmp_path):
    server, _ = serve(ratings)
    for folder, way in (("a", "/v1"), ("b", "/v1/"), ("c", "/api")):  # each with a cache of its own
        grade(judge_of(server.url + way, tmp_path / folder), "a")
    paths = [sent[":path"].removesuffix("/chat/completions") for sent in server.headers]
    assert paths == ["/v1", "/v1", "/api"]
    request = server.requests[0]
    assert {*request} == {"model", "messages", "response_format"}
    assert json.dumps(request["response_format"]) == json.dumps(form), "the reason comes first"


def test_the_key_goes_to_the_server_alone(monkeypatch, tmp_path, serve):
    key = "sk-test-1234567890abcdef"
    monkeypatch.setenv("OPENAI_API_KEY", key)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # none stands before this machine
    (tmp_path / ".netrc").write_text("machine judge.example login evil password evil\n")
    server, judge = serve(ratings)
    assert scores(judge, "a") == [1]
    assert server.headers[0]["Authorization"] == f"Bearer {key}"
    assert key not in repr(vars(judge)) + (tmp_path / "judge_cache.jsonl").read_text()
    session = judge_of("http://judge.example/v1", tmp_path).session
    request = session.prepare_request(requests.Request("POST", "http://judge.example/v1"))
    assert request.headers["Authorization"] == f"Bearer {key}"
    monkeypatch.setenv("OPENAI_API_KEY", "sk-one\nsk-two")
    line = error_of(judge_of, server.url, tmp_path)
    assert "OPENAI_API_KEY" in line and "sk-one" not in line


def test_tokens_and_usd(serve):
    """Also of a reply that could not be read: 2 × (100 in, 10 out) at 1 and 5 USD a million; without
    usage a token is four characters."""
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    replies = iter([completion("no", usage=usage), completion(YES, usage=usage), completion(YES)])
    server, judge = serve(lambda request: (200, {}, next(replies)), "--judge-price", "1,5")
    grade(judge, "a")
    assert judge.usd(judge.counts) == pytest.approx(3e-4) and judge.counts["calls"] == 2
    grade(judge, "b")
    sent = "\n".join(message["content"] for message in server.requests[2]["messages"])
    counted = [judge.counts[key] for key in ("tokens_in", "tokens_out")]
    assert counted == [200 + len(sent) // 4, 20 + len(YES) // 4]
