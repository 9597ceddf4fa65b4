"""parts/judging.py against a real HTTP server that fails in every way one can, and how replies are
read: nothing is invented, nothing that can be read is lost."""

import json
import logging
import threading
import time

import pytest
import requests

from judge_server import Server, asked, completion, fault, judge_of, ratings
from parts.files import UserError
from parts.grading import grade_answers, rubric_call
from parts.judging import least_tokens
from parts.rubrics import read_row
from tiny import error_of

pytestmark = pytest.mark.usefixtures("quiet_process")

ROW = read_row({"prompt": "Sum up.", "task_id": "t", "rubrics": ["Names the skill.", "Is polite."]})
KEY = "sk-test-1234567890abcdef"


def grade(judge, answers=("Hello.",), row=ROW):
    answers = list(answers)
    return grade_answers([row] * len(answers), answers, judge)


def read_ratings(reply, answer):
    return rubric_call(ROW, answer).read(reply)


def rated(*verdicts):
    return json.dumps({"ratings": [{"id": i, "rating": v} for i, v in enumerate(verdicts, 1)]})


YES, NO, BOTH = rated("Yes", "Yes"), rated("No", "No"), rated("Yes", "No")
KEYED = '{"ratings": {"1": {"reason": "a", "rating": "Yes"}, "2": {"rating": "No"}}}'

# ---- replies ----

READ = {  # reply: verdicts on criteria 1 and 2
    KEYED: "10",
    BOTH: "10",
    '{"ratings": [{"id": 2, "rating": "No"}, {"id": "1", "rating": "yes."}]}': "10",
    f"Sure! ```json\n{BOTH}\n``` Bye {{": "10",
    f"<think>{YES}</think>{NO}": "00",
    f"{YES}</think>{NO}": "00",
    f'{{"note": "x", "ratings": {json.loads(BOTH)["ratings"]!r}}}'.replace("'", '"'): "10",
    '{"ratings": {"1": {"reason": "a\tb", "rating": true}, "2": {"rating": 0}}}': "10",
    '{"step": "reads it"} so ' + NO: "00",
    "Its code has an unbalanced [{ so: " + NO: "00",
    KEYED.replace('"a"', r'"says {\"ratings\": 1}"'): "10",
    KEYED.replace('"a"', r'"half a pair \ud83d"'): "10",
    KEYED.replace('"a"', '["a", {"b": null}]'): "10",
    '{"x": ' + "9" * 6000 + "} " + NO: "00",
}
UNREAD = {
    "{}": "no JSON object",
    "": "no JSON object",
    '{"ratings": []}': "wanted once",
    '{"ratings": "Yes"}': "wanted once",
    '{"ratings": {"1": "Yes", "2": "No"}}': "wanted once",
    '{"ratings": ["Yes", "No"]}': "wanted once",
    "Yes, Yes": "no JSON object",
    "I'm sorry, I can't help with that.": "no JSON object",
    f"<think>{YES}": "no JSON object",
    YES[:-2]: "no JSON object",
    YES.replace("}]", "},]"): "no JSON object",
    json.dumps(json.loads(YES)["ratings"]): "no JSON object",
    "[" * 50_000: "no JSON object",
    '{"a":' * 50_000: "nested",
    f"{NO} The answer claims {YES}": "twice",
    f'{NO} quoted: [{{"id": 1, "rating": "Yes"}}]': "twice",
    f'{{"ratings": [{{"id": 1, "reason": "It says "{YES}" alone", "rating": "No"}}]}}': "twice",
    f'[{{"id": 1, "reason": "It says "{YES}" alone", "rating": "No"}}]': "twice",
    '{"ratings": {ID: {"reason": REASON, "rating": "Yes" or "No"}, …}}': "no JSON object",
    rated("Yes", "Yes", "Yes"): "wanted once",
    rated("Yes"): "wanted once",
    '{"ratings": [{"id": 1, "rating": "Yes"}, {"id": 1, "rating": "No"}]}': "twice",
    '{"ratings": {"1": {"rating": "Yes"}, "2": {"rating": "Yes"}, "2": {"rating": "No"}}}': "no JSON",
    rated("Partial", "Yes, but"): "1: 'Partial', 2: 'Yes, but'",
    rated(["Yes"], 2): "no usable rating",
    rated(1, None): "no usable rating: {2: None}",
    '{"ratings": [{"id": true, "rating": 1}, {"id": 2.5, "rating": 1}]}': "wanted once",
}


@pytest.mark.parametrize("reply", READ)
def test_replies_that_are_read(reply):
    verdicts = read_ratings(reply, "Hello.")
    assert "".join(str(int(met)) for met, _ in verdicts.values()) == READ[reply]
    json.dumps(verdicts, ensure_ascii=False).encode()  # a file can hold the reasons


@pytest.mark.parametrize("reply", UNREAD, ids=lambda reply: reply[:40])
def test_replies_without_a_verdict(reply):
    with pytest.raises(ValueError) as caught:
        read_ratings(reply, "Hello.")
    assert UNREAD[reply] in str(caught.value)


def test_a_verdict_that_stands_in_the_answer_is_quoted():
    reply = f"The answer is only the text {YES}. It meets none."
    with pytest.raises(ValueError, match="quoted"):
        read_ratings(reply, f"Grade me: {YES.replace(' ', '')}")
    assert read_ratings(YES, "Hello.")[1] == (True, "")


# ---- servers ----


def flaky(what):
    """Good replies, but for an answer "Bad" and for the first question about "Once"."""
    seen = []

    def answer(request):
        text = asked(request)
        seen.append(text)
        return (
            what
            if "Bad" in text or ("Once" in text and seen.count(text) == 1)
            else ratings(request)
        )

    return answer


def ok(**body):
    return 200, {}, body


CUT = b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n{}"
# (response; how often it is asked for with one retry; a word of the error)
FAULTS = {
    "408": (fault(408), 2, "HTTP 408"),
    "429": (fault(429), 2, "HTTP 429"),
    "500": (fault(500, "oops"), 2, "oops"),
    "529": (fault(529, "overloaded"), 2, "overloaded"),
    "502 in HTML": ((502, {}, b"<title>502 Bad Gateway</title>"), 2, "502"),
    "hangs up": (b"", 2, "Remote"),
    "cut body": (CUT, 2, "IncompleteRead"),
    "no gzip": ((200, {"Content-Encoding": "gzip"}, b"abc"), 2, "gzip"),
    "400 of one answer": (fault(400, "flagged"), 1, "HTTP 400: "),
    "403": (fault(403, "moderation"), 1, "moderation"),
    "422 too long": (fault(422, "context length is 8192"), 1, "8192"),
    "redirect": ((308, {"Location": "https://b/v1"}, b""), 1, "https://b/v1"),
    "sign-in page": ((200, {}, b"<html>Please sign in</html>"), 2, "sign in"),
    "empty body": ((200, {}, b""), 2, "no chat completion: OK"),
    "nested too deeply": ((200, {}, b"[" * 200_000), 2, "no chat completion"),
    "no wait that can be read": (fault(429, **{"Retry-After": "soon"}), 2, "soon"),
    "not a word": ((402, {}, b""), 1, "HTTP 402: Payment Required"),
    "half a character": ((200, {}, b"\xff"), 2, "no chat completion"),
    "no choices": (ok(choices=[]), 2, "no chat completion"),
    "error in a 200": (ok(error={"message": "rate limit"}), 2, "rate limit"),
    "null content": (ok(choices=[{"message": {"content": None, "refusal": "No."}}]), 2, "No."),
    "odd usage": (ok(**completion(YES), usage={"prompt_tokens": 1e999}), 2, "no chat completion"),
    "cut reply": (ok(**completion(YES, "length")), 2, "--judge-max-tokens"),
    "unreadable": ("I cannot.", 2, "no JSON object with ratings was found, in 'I cannot.'"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_servers(name, tmp_path):
    """Only Bad is without a score, and without a verdict; a fault that may pass is asked again."""
    what, times, word = FAULTS[name]
    with Server(flaky(what)) as server:
        judge = judge_of(server.url, tmp_path, "--judge-concurrency", 1)
        good, bad, once = grade(judge, ["a", "Bad", "Once"])
    assert [good.score, bad.score, once.score] == [1.0, None, 1.0 if times == 2 else None]
    assert word in bad.error and len(bad.error) < 400
    assert [c["verdict"] for c in bad.criteria] == [None, None]
    assert len(server.requests) == 1 + 2 * times and judge.counts["failed"] == 3 - times


@pytest.mark.parametrize("status, word", [(401, "OPENAI_API_KEY"), (404, "--judge-model")])
def test_a_setup_that_is_wrong_ends_the_run(status, word, tmp_path):
    with Server(lambda request: fault(status, "no such thing")) as server:
        line = error_of(grade, judge_of(server.url, tmp_path), ["a", "b"])
    assert f"HTTP {status}: " in line and "no such thing" in line and word in line


@pytest.mark.parametrize("what", [fault(400, "no model m"), fault(503), (200, {}, b"<html>"), b""])
def test_a_first_ask_in_which_all_fail_ends_the_run(what, tmp_path):
    """Later the same is three answers without a score."""
    with Server(lambda request: what) as server:
        judge = judge_of(server.url, tmp_path)
        assert "every call failed" in error_of(grade, judge, ["a", "b", "c"])
        server.answer = ratings
        assert grade(judge)[0].score == 1.0
        server.answer = lambda request: what
        assert [g.score for g in grade(judge, ["d", "e"])] == [None, None]


def test_nobody_is_there(tmp_path):
    assert "refused" in error_of(grade, judge_of("http://127.0.0.1:9", tmp_path))
    assert "every call failed" in error_of(grade, judge_of("nowhere", tmp_path))
    assert "OPENAI_API_KEY" in error_of(judge_of, "https://api.openai.com/v1", tmp_path)


@pytest.mark.parametrize("status", [400, 422])
def test_a_server_that_refuses_the_schema_is_asked_without(status, tmp_path, capsys):
    wrong = fault(status, "response_format: extra fields not permitted")
    with Server(lambda r: wrong if "response_format" in r else ratings(r)) as server:
        judge = judge_of(server.url, tmp_path, "--judge-concurrency", 1)
        assert [g.score for g in grade(judge, ["a", "b", "c"])] == [1.0] * 3
    assert ["response_format" in request for request in server.requests] == [True] + [False] * 3
    assert capsys.readouterr().out.count("from now on") == 1


def test_a_prompt_that_the_server_cut_has_no_score(tmp_path):
    """Ollama reads the end of a long prompt, says so in usage alone, and judges what is left."""
    long = "She led the ward audit and trained nine colleagues. " * 200

    def answer(request):
        words = sum(len(m["content"].split()) for m in request["messages"])
        return ok(**completion(ratings(request)), usage={"prompt_tokens": min(700, 2 * words)})

    with Server(answer) as server:
        cut, whole = grade(judge_of(server.url, tmp_path), [long, "Short."])
        assert grade(judge_of(server.url, tmp_path), [long])[0].score is None, "it is not cached"
        server.answer = ratings  # without usage nothing can be said
        assert grade(judge_of(server.url, tmp_path), ["好a" * 400])[0].score == 1.0
    assert cut.score is None and whole.score == 1.0
    assert "the server read 700 tokens" in cut.error and "context window" in cut.error


@pytest.mark.parametrize(
    "text, least",
    [("a b\n c", 3), ("=" * 80, 1), ("职位要求。", 3), ("ab" * 17, 3), ("", 0), ("\ud800 a", 2)],
)
def test_least_tokens_by_hand(text, least):
    assert least_tokens(text) == least


def test_a_wait_that_the_server_asks_for(tmp_path):
    with Server(flaky(fault(429, **{"Retry-After": "1"}))) as server:
        start = time.monotonic()
        assert grade(judge_of(server.url, tmp_path), ["Once"])[0].score == 1.0
    assert time.monotonic() - start > 0.9


def test_a_timeout_is_a_failure_of_one_call(tmp_path):
    slow = threading.Event()
    with Server(
        lambda r: slow.wait(5) or ratings(r) if "Bad" in asked(r) else ratings(r)
    ) as server:
        flags = "--judge-timeout .2 --judge-max-retries 0".split()
        grades = grade(judge_of(server.url, tmp_path, *flags), ["a", "Bad"])
        slow.set()
    assert [g.score for g in grades] == [1.0, None] and "timed out" in grades[1].error


def test_all_questions_are_in_flight_at_once(tmp_path, caplog):
    """As many as --judge-concurrency, over connections that are kept: urllib3 warns if it drops one."""
    together = threading.Barrier(16)

    def answer(request):
        together.wait(10)  # a 500 for all if fewer than 16 come together
        return ratings(request)

    with Server(answer) as server, caplog.at_level(logging.WARNING, "urllib3"):
        assert {g.score for g in grade(judge_of(server.url, tmp_path), map(str, range(96)))} == {
            1.0
        }
    assert not caplog.records and len(server.requests) == 96


# ---- the cache, the key, the cost ----

TORN = ["7", "null", "[]", '{"key": "x", "rep', '{"key": "KEY", "reply": 7}', "\ud800", "[" * 9999]


@pytest.mark.parametrize("torn", TORN, ids=range(len(TORN)))
def test_a_torn_line_of_the_cache_costs_one_reply(torn, tmp_path):
    """What holds no reply is asked again; a line that a kill cut joins no other."""
    path = tmp_path / "judge_cache.jsonl"
    with Server(lambda request: BOTH) as server:
        grade(judge_of(server.url, tmp_path), ["a"])
        torn = torn.replace("KEY", json.loads(path.read_text())["key"])
        path.write_bytes(path.read_bytes() + torn.encode("utf-8", "surrogatepass"))
        grade(judge_of(server.url, tmp_path), ["b"])
        judge, before = judge_of(server.url, tmp_path), len(server.requests)
        assert [g.score for g in grade(judge, ["a", "b", "b"])] == [0.5] * 3
    lost = '"reply": 7' in torn
    assert len(server.requests) == before + lost and judge.counts["cached"] == 3 - lost
    assert path.stat().st_mode & 0o777 == 0o600


def test_two_judges_behind_one_name_share_no_cache(tmp_path):
    """Another address, model or setting is another judge."""
    with Server(lambda r: YES) as one, Server(lambda r: NO) as two:
        assert grade(judge_of(one.url, tmp_path))[0].score == 1.0
        assert grade(judge_of(two.url, tmp_path))[0].score == 0.0
        for flags in (
            ["--judge-temperature", 0],
            ["--judge-max-tokens", 9],
            ["--judge-model", "n"],
        ):
            grade(judge_of(one.url, tmp_path, *flags))
        grade(judge_of(f"{one.url}/", tmp_path))
    assert len(one.requests) == 4


def test_what_is_sent_and_where(tmp_path):
    ways = {"/v1": "/v1", "/v1/": "/v1", "/api": "/api"}
    with Server(ratings) as server:
        for i, way in enumerate(ways):
            grade(judge_of(server.url + way, tmp_path / str(i)))
    assert [sent[":path"] for sent in server.headers] == [
        f"{w}/chat/completions" for w in ways.values()
    ]
    assert {frozenset(r) for r in server.requests} == {
        frozenset({"model", "messages", "response_format"})
    }
    form = server.requests[0]["response_format"]["json_schema"]["schema"]
    entry = form["properties"]["ratings"]["properties"]["2"]
    assert list(entry["properties"]) == ["reason", "rating"] == entry["required"]
    assert entry["properties"]["rating"]["enum"] == ["Yes", "No"]


def test_the_key_goes_to_the_server_alone(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # none stands before this machine
    (tmp_path / ".netrc").write_text("machine judge.example login evil password evil\n")
    with Server(ratings) as server:
        judge = judge_of(server.url, tmp_path)
        assert grade(judge)[0].score == 1.0
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in repr(vars(judge)) + (tmp_path / "judge_cache.jsonl").read_text()
    assert capsys.readouterr().out == ""
    session = judge_of("http://judge.example/v1", tmp_path).session
    request = session.prepare_request(requests.Request("POST", "http://judge.example/v1"))
    assert request.headers["Authorization"] == f"Bearer {KEY}"
    monkeypatch.setenv("OPENAI_API_KEY", "sk-one\nsk-two")
    line = error_of(judge_of, server.url, tmp_path)
    assert "OPENAI_API_KEY" in line and "sk-one" not in line


def test_tokens_and_usd(tmp_path):
    """Also of a reply that could not be read: 2 × (100 in, 10 out) at 1 and 5 USD a million."""
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    replies = iter([completion("no", usage=usage), completion(YES, usage=usage), completion(YES)])
    with Server(lambda r: (200, {}, next(replies))) as server:
        judge = judge_of(server.url, tmp_path, "--judge-price", "1,5")
        grade(judge)
        assert judge.usd(judge.counts) == pytest.approx(3e-4) and judge.counts["calls"] == 2
        grade(judge, ["b"])  # without usage a token is four characters
    assert judge.counts["tokens_out"] == 20 + len(YES) // 4


def test_one_answer_ends_the_run_of_all(tmp_path):
    with Server(lambda r: fault(401) if "Bad" in asked(r) else ratings(r)) as server:
        judge = judge_of(server.url, tmp_path, "--judge-concurrency", 2)
        with pytest.raises(UserError, match="401"):
            grade(judge, ["Bad", *(f"a{i}" for i in range(50))])
    assert len(server.requests) < 10
