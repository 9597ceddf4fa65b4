"""parts/server.py against a real HTTP server that fails in every way one can."""

import json
import logging
import re
import shutil
import ssl
import subprocess
import threading
import time
from email.utils import formatdate

import pytest

from parts import grades, responses
from parts.files import read_jsonl
from parts.server import Judge
from test_judge import (
    NAMES,
    ROW,
    Server,
    asked,
    completion,
    flaky,
    grade,
    make,
    rated,
    ratings,
    run,
    told,
)
from tiny import error_of

pytestmark = pytest.mark.usefixtures("quiet_process")


def ok(**body):
    return 200, {}, body


def says(content=None, finish="stop", **more):
    return ok(choices=[{"message": {"content": content} | more, "finish_reason": finish}])


def drip(head):
    """The bytes that a server sends one at a time, for longer than anybody waits."""

    def send(stream):
        for byte in head + b"x" * 40:
            stream.write(bytes([byte]))
            stream.flush()
            time.sleep(0.05)

    return send


OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
YES = rated("Yes", "Yes")


def fault(text):
    """A response: its status, then a body of JSON or HTML, or "-" for none, or an error's message."""
    status, _, body = text.partition(" ")
    if body[0] in "{<-":
        return int(status), {}, body.removeprefix("-").encode()
    return told(int(status), body)


def table(text, read):
    """[(read(fault), word, …)] of lines "fault | word | …"."""
    rows = [line.split(" | ") for line in text.strip().split("\n")]
    return [(read(first), *words) for first, *words in rows]


# 1: the request is refused and that is its own fault; 3: tried again; 0: the run ends
SERVER_FAULTS = table("""
408 later | 3 | HTTP 408: later
409 later | 3 | HTTP 409: later
425 later | 3 | HTTP 425: later
429 later | 3 | HTTP 429: later
500 later | 3 | HTTP 500: later
529 overloaded | 3 | HTTP 529: overloaded
500 - | 3 | HTTP 500, no text
502 <html><head><style>b {}</style><title>502 Bad Gateway</title></head></html> | 3 | HTTP 502: 502 Bad Gateway
503 {"detail": [{"loc": ["body"], "msg": "busy"}]} | 3 | HTTP 503: busy
500 {"error": DEEP} | 3 | HTTP 500: {"error"
200 {"id": null, "object": null, "choices": null, "error": {"message": "rate limit", "code": 429}} | 3 | HTTP 429: rate limit
200 {"choices": [{"error": {"message": "up", "code": 502}}]} | 3 | HTTP 502: up
200 {"error": {"message": "upstream", "metadata": {"raw": "out of memory"}}} | 3 | upstream; out of
200 <html>Please sign in</html> | 3 | no chat completion in "<html>Please sign
200 - | 3 | HTTP 200: an empty body
200 {"choices": []} | 3 | no chat completion in "{"choices"
400 this input was flagged | 1 | HTTP 400: this input was flagged
403 flagged by moderation | 1 | HTTP 403: flagged by moderation
400 {"error": {"code": "content_filter"}} | 1 | HTTP 400: content_filter
200 {"id": null, "choices": null, "created": null, "error": {"message": "flagged", "code": "403"}} | 1 | HTTP 403: flagged
413 too large | 1 | HTTP 413: too large
422 This model's maximum context length is 8192 tokens | 1 | HTTP 422: This model's maximum context length is 8192 tokens
451 <p>not here</p> | 1 | HTTP 451: not here
401 wrong key LONG | 0 | HTTP 401: wrong key x{190}; is the key in OPENAI_API
401 no\x1b[2J\u2028key\u202e | 0 | HTTP 401: no\\[2J key; is the key
402 Insufficient Balance | 0 | HTTP 402: Insufficient Balance
404 no model m | 0 | HTTP 404: no model m; is --judge-model right
404 - | 0 | HTTP 404, no text; is --judge-model right, and does --judge-base-url
405 {"detail": "Method Not Allowed"} | 0 | HTTP 405: Method Not Allowed; does
302 - | 0 | HTTP 302: redirects, without a Location; give the address
429 {"error": {"message": "x", "code": "insufficient_quota"}} | 0 | HTTP 429: x; insuff
200 {"error": {"message": "No auth", "code": 401}} | 0 | HTTP 401: No auth
""".replace("LONG", "x" * 500).replace("DEEP", "[" * 900 + "]" * 900), fault)  # fmt: skip
SERVER_FAULTS += [
    (b"", 3, "Error"),
    (OK + b"Content-Length: 5000\r\n\r\n{}", 3, "Error"),
    (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 3, "Error"),
    (OK + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc", 3, "Error"),
    (drip(OK), 3, "no whole reply within 0.3 s"),
    (drip(OK + b"Content-Length: 5000\r\n\r\n"), 3, "no whole reply within 0.3 s"),
    ((200, {}, b"\xff"), 3, "no chat completion"),
    ((307, {"Location": "https://b/v1"}, b""), 0, "HTTP 307: redirects to https://b/v1; give"),
]


def reply(text):
    """The text of a reply; or, behind a finish_reason, the message of a completion."""
    finish, _, message = text.partition(": ")
    if finish in ("stop", "length", "content_filter"):
        return says(**{"finish": finish, "content": None} | json.loads(message))
    return text


REPLY_FAULTS = table(r"""
{} | NONE, in "{}"
{"ratings": []} | NONE
{"ratings": "Yes"} | NONE
{"ratings": ["Yes", "No"]} | NONE
Yes, Yes | NONE, in "Yes, Yes"
[1, 2] | NONE
I'm sorry, I can't help with that. | in "I'm sorry, I can't help with that."
<think>YES | NONE
{"ratings": [{"id": 1, "rating": "Yes"}, {"id": 2, "rating": "Yes"} | NONE
{"ratings": [{"id": 1, "rating": "Yes"}, {"id": 2, "rating": "Yes"},]} | NONE
DEEP | NONE
WIDE | NONE
NO The answer claims YES | two lists of ratings that contradict
NO quoted: [{"id": 1, "rating": "Yes"}] | contradict
{"ratings": [{"id": 1, "reason": "It says "YES" alone", "rating": "No"}, {"id": 2, "rating": "No"}]} | NONE
[{"id": 1, "reason": "It says "YES" alone", "rating": "No"}, {"id": 2, "rating": "No"}] | NONE
[{"id": 1, "rating": 1}, {"id": 2, "rating": 1}, {"id": 3, "rating": 1}] | each of the 2 ids is wanted once; not asked for: 3
[{"id": 1, "rating": 1}] | each of the 2 ids is wanted once; missing: 2
[{"id": 1, "rating": 1}, {"id": 2, "rating": 1}, {"id": 1, "rating": 1}] | given twice: 1
[{"id": 1, "rating": 1}, {"id": 1, "rating": 1}] | missing: 2; given twice: 1
[{"id": 1, "rating": "Partial"}, {"id": 2, "rating": "Yes, but"}] | no usable value: 1 (Partial), 2 (Yes, but)
[{"id": 1, "rating": ["Yes"]}, {"id": 2, "rating": 2}] | no usable value: 1 (['Yes']), 2 (2)
[{"id": 1, "rating": 1}, {"id": 2}] | no usable value: 2 (None)
[{"id": true, "rating": 1}, {"id": 2.5, "rating": 1}] | not asked for: TRUE, 2.5
[{"id": "\ud800", "rating": 1}] | not asked for: ?
stop: {} | an empty reply (finish_reason "stop")
stop: {"content": " \n"} | an empty reply
stop: {"refusal": "I cannot assess people."} | the judge refused: "I cannot assess people."
content_filter: {} | the server's content filter withheld the reply
stop: {"reasoning_content": "Long thoughts"} | thoughts without a reply (finish_reason stop): "L
stop: {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Yes"}]}]} | an empty reply
length: {"content": "{ratings"} | the reply was cut at the limit of tokens (the server's, or --judge-max-tokens): "{
stop: {"tool_calls": [{"function": {"name": "rate"}}]} | an empty reply
""".replace("YES", YES).replace("NONE", "no JSON object with a list of ratings was found")
.replace("DEEP", "[" * 50_000).replace("WIDE", '{"a":' * 50_000).replace("NO ", NAMES["@NO"] + " "),
reply)  # fmt: skip


@pytest.mark.parametrize("fault, calls, message", SERVER_FAULTS)
def test_faults_of_servers(fault, calls, message):
    """Good, Bad, Good: only Bad is unscored, after 1 or 3 calls; a setup that is wrong for all ends
    the run with the first call."""
    calls, slow = int(calls), callable(fault)
    how = {"max_retries": 2, "concurrency": 1, "timeout": 0.3 if slow else 60}
    if not calls:
        with Server(lambda request: fault) as server:
            line = error_of(grade, make(server, **how))
        assert re.search(f"^<judge m at {server.url}.*>: .*{message}", line)
        assert len(server.requests) == 1
        return
    graded, requests, subject = run(flaky(fault), ["a", "Bad", "c"], **how)
    assert [(g.score, g.attempts) for g in graded] == [(1.0, 1), (None, calls), (1.0, 1)]
    assert message in graded[1].error and len(requests) == 2 + calls
    assert [c["verdict"] for c in graded[1].criteria] == [None, None], "no verdict is invented"
    assert len(graded[1].error) < 300 and subject.metrics()["judge/failed_frac"] == 1 / 3


@pytest.mark.parametrize("fault, message", REPLY_FAULTS)
def test_faults_of_replies(fault, message, tmp_path):
    """A reply that cannot be read is no verdict, and is asked for again, with what is wrong."""
    how = {"max_retries": 2, "cache": tmp_path / "judge_cache.jsonl"}
    graded, requests, subject = run(flaky(fault), ["a", "Bad", "Once"], **how)
    assert [(g.score, g.attempts) for g in graded] == [(1.0, 1), (None, 3), (1.0, 2)]
    assert len(requests) == 6 and message in graded[1].error
    assert subject.metrics()["judge/corrected"] == 1
    first, second, third = sorted(subject.slept)
    assert 0.5 <= first and second <= 1 <= third <= 2
    again = [r["messages"][3]["content"] for r in requests if len(r["messages"]) == 4]
    unread = list(read_jsonl(subject.unread))
    assert len(again) == 3 * isinstance(fault, str) and len(unread) == 4
    for row in unread:
        assert all(row["complaint"] in text for text in [graded[1].error, *again])
        assert not again or row["reply"][:50] == fault.strip()[:50]
        assert again or json.loads(row["reply"]) == fault[2]


@pytest.mark.parametrize("status", [400, 403])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_refused_answer_wherever_it_stands(status, place, tmp_path):
    """Also the second time, when the others come from the cache; a wrong setup ends at once."""
    answers = ["a", "c"]
    answers.insert(place, "Bad")
    for _ in range(2):
        with Server(flaky(told(status, "flagged"))) as server:
            subject = make(server, cache=tmp_path / "c.jsonl")
            subject._key = lambda call: str(call.messages)  # of any port
            scores = [g.score for g in grade(subject, answers)]
        assert scores == [None if x == "Bad" else 1.0 for x in answers]
    with Server(lambda request: told(status, "no model m")) as server:
        subject = make(server, cache=tmp_path / "c.jsonl")
        subject._key = lambda call: str(call.messages)
        line = error_of(grade, subject, answers)
        assert f"HTTP {status}: no model m; a harmless question fares" in line
        assert len(server.requests) <= 2 + 2


@pytest.mark.parametrize("body", [b"<html>Please sign in</html>", b"", b"[]", b"data: {}\n", b"{}"])
def test_an_address_that_completes_no_chat_ends_the_run(body):
    """A web page, an event stream, another interface: after the retries of the first call."""
    with Server(lambda request: (200, {}, body)) as server:
        line = error_of(grade, make(server, concurrency=1, max_retries=2), ["a", "b", "c"])
        assert re.search("HTTP 200: .*a harmless question fares no better", line)
        assert len(server.requests) == 4


def test_many_refusals_and_a_key_that_is_withdrawn():
    """Every second refusal in a row is looked into; what has become wrong for all ends the run."""
    graded, requests, _ = run(flaky(told(403)), [f"Bad {i}" for i in range(8)], concurrency=1)
    assert {g.score for g in graded} == {None} and len(requests) == 8 + 4
    paid = []
    with Server(lambda r: told(403) if len(paid) > 2 else paid.append(r) or ratings(r)) as server:
        line = error_of(grade, make(server, concurrency=1), [f"a{i}" for i in range(50)])
        assert "HTTP 403" in line and len(server.requests) <= 6


def test_a_judge_that_cannot_be_asked(monkeypatch):
    line = error_of(grade, Judge("m", "http://127.0.0.1:9", max_retries=0))
    assert re.search("judge m at http://127.0.0.1.*refused; is it running", line)
    assert "InvalidURL" in error_of(grade, Judge("m", "http://127.0.0.1:99999"))
    for address in ("localhost:8000", "ftp://x", "http://", "http://x/v1?v=2", "http://me:pw@x"):
        assert "--judge-base-url" in error_of(Judge, "m", address)
    assert re.search("--judge-base-url.*OPENAI_API_KEY.*checks", error_of(Judge, "m"))
    for key in ("sk-one\nsk-two", "schlüssel"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        line = error_of(Judge, "m")
        assert "OPENAI_API_KEY: holds" in line and key not in line


def test_certificates(monkeypatch, tmp_path):
    """One that is not trusted, https to a server of plain http, a file that is not there: the run
    ends at once, with the fix; a trusted certificate is used."""
    openssl = shutil.which("openssl") or pytest.skip("openssl is not installed")
    made = """req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 9 -keyout k
        -out c -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"""
    subprocess.run([openssl, *made.split()], cwd=tmp_path, check=True, capture_output=True)
    with Server(ratings) as server:
        secure = server.url.replace("http:", "https:")
        line = error_of(grade, Judge("m", secure))
        assert re.search("WRONG_VERSION.*does not speak https there; try http:", line)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "c", tmp_path / "k")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        line = error_of(grade, Judge("m", secure))
        assert re.search("CERTIFICATE_VERIFY_FAILED.*REQUESTS_CA_BUNDLE", line)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "c"))
        assert grade(Judge("m", secure))[0].score == 1.0
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "none"))
        assert "CURL_CA_BUNDLE names no file" in error_of(grade, Judge("m", secure))


WAITS = table(
    f"""
{{"Retry-After": "60"}} | Once | 2 | 60
{{"Retry-After": "2.5"}} | Once | 2 | 2.5
{{"Retry-After": "3s"}} | Once | 2 | 3
{{"Retry-After": "0"}} | Once | 2 | 0
{{"retry-after-ms": "1500"}} | Once | 2 | 1.5
{{"Retry-After-Ms": "1500", "Retry-After": "9"}} | Once | 2 | 1.5
{{"retry-after-ms": "soon", "Retry-After": "9"}} | Once | 2 | 9
{{"Retry-After": "90"}} | Once | 1 | 0
{{"Retry-After": "50"}} | Bad | 4 | 150
{{"Retry-After": "-7"}} | Once | 2 | half to one
{{"Retry-After": "soon"}} | Once | 2 | half to one
{{"Retry-After": "nan"}} | Once | 2 | half to one
{{"Retry-After": "1e999"}} | Once | 2 | half to one
{{"Retry-After": ""}} | Once | 2 | half to one
{{"Retry-After": "{formatdate(1e9, usegmt=True)}"}} | Once | 2 | half to one
{{"Retry-After": "Fri, 31 Feb 2025 99:00:00 GMT"}} | Once | 2 | half to one
""",
    json.loads,
)  # fmt: skip  (headers, to which answer; attempts and seconds)


@pytest.mark.parametrize("headers, answer, tries, slept", WAITS)
def test_waits_as_long_as_the_server_asks(headers, answer, tries, slept):
    (found,), _, subject = run(flaky((429, headers, b"")), [answer], max_retries=9)
    tries, half_to_one = int(tries), pytest.approx(0.75, abs=0.25)
    slept = half_to_one if slept == "half to one" else float(slept)
    assert (found.score, found.attempts) == (1.0 if tries == 2 else None, tries)
    assert sum(subject.slept) == slept == subject.metrics()["judge/latency_mean"]
    assert found.error is None or tries == 4 or "asks to wait 90 s, more than 60" in found.error


def test_a_wait_until_a_date():
    """By the server's own clock, and by ours if it sends none."""

    def answer(request):
        once.append(request)
        later = {"Retry-After": formatdate(time.time() + 30, usegmt=True)}
        return (429, later, b"") if len(once) == 1 else ratings(request)

    once = []
    (found,), _, subject = run(answer)
    assert found.score == 1.0 and 28 <= sum(subject.slept) <= 31
    headers = {"Retry-After": formatdate(1e9 + 7, usegmt=True)}
    assert responses.asked_wait(headers | {"Date": formatdate(1e9)}, 5e9) == 7
    assert responses.asked_wait(headers, 1e9 + 2) == 5
    assert responses.asked_wait({"Retry-After": "Sun, 09 Sep 2001 01:46:47 -0000"}, 1e9) == 7


def test_one_call_ends_the_run_of_all():
    later = 500, {"Retry-After": "5"}, b""
    with Server(lambda r: told(401) if "Bad" in asked(r) else later) as server:
        assert "HTTP 401" in error_of(grade, Judge("m", server.url), ["a", "b", "Bad"])
    assert len(server.requests) <= 5


def test_a_dripping_server_holds_nobody(tmp_path):
    """Neither a worker, nor the end of the process, though its header never ends."""
    threads, start = threading.active_count(), time.monotonic()
    with Server(flaky(drip(OK * 400))) as server:
        subject = Judge("m", server.url, timeout=0.2, max_retries=1)
        assert [g.score for g in grade(subject, ["a", "Bad"])] == [1.0, None]
    while threading.active_count() > threads + 4 and time.monotonic() - start < 5:
        time.sleep(0.05)  # idle workers end on their own
    assert time.monotonic() - start < 5


USAGES = """{"prompt_tokens": "12", "completion_tokens": "7"} | "free"
 | {"prompt_tokens": "many", "completion_tokens": null} | {"prompt_tokens": 1e999, "completion_tokens": -3}
 | {"prompt_tokens": true, "completion_tokens": [1]}""".split(" | ")
CONTENTS = [
    [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": YES}],
    [{"type": "text", "text": YES[:9]}, {"type": "output_text", "text": YES[9:]}],
    [YES[:20], YES[20:]],
    [{"type": "text", "text": {"value": YES}}, {"type": "image_url"}, None, 7],
    [{"text": YES}],
    {"type": "text", "text": YES},
    f"\ufeff\n{YES}\n",
]  # fmt: skip
ODD = [  # a paid run ends with none of these, and none is lost
    *map(says, CONTENTS),
    rated("Yes", "Yes", reason="half a pair: \ud800"),  # written as the escape \ud800
    json.dumps(rated("Yes", "Yes", reason="whole: 😀")).replace('\\"', '"')[1:-1],
    rated("Yes", "Yes", reason=["a", {"b": None}]),
    rated("Yes", "Yes", reason=None, extra="\x00"),
    says("\ud83d" + YES),
    *(ok(**completion(YES), usage=json.loads(usage)) for usage in USAGES),
    (200, {}, b"\xef\xbb\xbf" + json.dumps(completion(YES)).encode()),
]


@pytest.mark.parametrize("reply", ODD)
def test_odd_replies_are_read_now_and_from_the_cache(reply, tmp_path):
    path = tmp_path / "c.jsonl"
    with Server(lambda request: reply) as server:
        for cached in (False, True):
            subject = make(server, cache=path, price=(1, 1))
            (found,) = grade(subject)
            assert (found.score, found.cached) == (1.0, cached)
            grades.print_scores([(ROW, "Hello.", None)], [found])
            grades.write_grades(tmp_path / "g.jsonl", [(ROW, "Hello.", None)], [found])
            assert subject.metrics()["judge/usd"] >= 0
        assert len(server.requests) == 1


LINES = ["7", "null", "[]", '{"key": "KEY"}', "[" * 9999, '{"key": "x", "rep', "\ud800"]
LINES += [f'{{"key": "KEY", "reply": {x}}}' for x in ("7", "null", '["a"]', '{"a": 1}', '"no"')]


def test_lines_of_a_cache(tmp_path):
    """What holds no reply is left out, and asked again; a line that a kill cut joins no other."""
    path = tmp_path / "run" / "judge_cache.jsonl"
    with Server(lambda request: NAMES["@BOTH"]) as server:
        first = grade(make(server, cache=path, concurrency=1), ["a", "b"])
        assert [g.score for g in first] == [0.5, 0.5]
        key = next(read_jsonl(path))["key"]
        for line in LINES:
            line = line.replace("KEY", key).encode("utf-8", "surrogatepass")
            path.write_bytes(path.read_bytes() + line)
            assert grade(make(server, cache=path), ["a"])[0].score == 0.5
        server.answer = ratings
        before = len(server.requests)
        again = grade(make(server, cache=path), ["a", "b", "c"])
    assert [(g.score, g.cached) for g in again] == [(0.5, True), (0.5, True), (1.0, False)]
    assert len(server.requests) == before + 1


def test_two_judges_behind_one_name_share_no_cache(tmp_path):
    """Another address, model or temperature is another judge."""
    path = tmp_path / "c.jsonl"
    with Server(lambda r: YES) as one, Server(lambda r: NAMES["@NO"]) as two:
        assert grade(make(one, cache=path))[0].score == 1.0
        assert grade(make(two, cache=path))[0].score == 0.0
        for how in ({"temperature": 0.0}, {"temperature": 1.0}, {"max_tokens": 9}):
            assert not grade(make(one, cache=path, **how))[0].cached
        assert not grade(Judge("other", one.url, cache=path))[0].cached
        assert not grade(Judge("m", f"{one.url}/api", cache=path))[0].cached
        assert grade(Judge("m", f"{one.url}/v1/", cache=path))[0].cached
    assert (len(one.requests), len(two.requests)) == (6, 1)


def test_a_server_that_calls_the_limit_otherwise():
    """OpenAI's newer models refuse max_tokens and name what they take."""
    wrong = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    with Server(lambda r: told(400, wrong) if "max_tokens" in r else YES) as server:
        scores = [g.score for g in grade(make(server, max_tokens=9, concurrency=1), ["a", "b"])]
    assert scores == [1.0, 1.0]
    assert [r.get("max_completion_tokens") for r in server.requests] == [None, 9, 9]


def test_a_connection_for_every_worker(caplog):
    """64 workers open 64 connections at most, and keep them: urllib3 warns if it drops one."""
    with (
        Server(lambda request: time.sleep(0.02) or ratings(request)) as server,
        caplog.at_level(logging.WARNING, "urllib3"),
    ):
        subject = make(server, concurrency=64)
        grade(subject, [f"a{i}" for i in range(256)])
    assert not caplog.records and len(server.requests) == 256


PLACES = [
    ("http://judge.example:8000/v1", "warning: OPENAI_API_KEY goes to judge.example:8000 unenc"),
    ("http://10.0.0.7/v1", "warning: OPENAI_API_KEY goes to 10.0.0.7 unencrypted"),
    ("http://127.evil.example/v1", "warning"),
    ("http://localhost.evil.example", "warning"),
    *((f"http://{x}", "") for x in ("localhost:1", "127.0.0.1:80/v1", "[::1]:8", "a.localhost/v1")),
    ("https://judge.example/v1", ""),
]


@pytest.mark.parametrize("address, warning", PLACES)
def test_the_key_goes_nowhere_unencrypted_without_a_word(address, warning, monkeypatch, capsys):
    Judge("m", address)
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test-1234567890")
    Judge("m", address)
    out = capsys.readouterr().out
    assert out.startswith(warning) and bool(out) == bool(warning) and "1234" not in out


def test_no_proxy_stands_before_this_machine(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert run(ratings)[0][0].score == 1.0


def test_equal_calls_are_asked_once():
    with Server(ratings) as server:
        subject = make(server)
        grade(subject)
        before = subject.counts.copy()
        grade(subject, ["same"] * 8)
    row = subject.metrics(before)
    assert (row["judge/calls"], row["judge/cached"], row["judge/failed_frac"]) == (1, 7, 0)
    assert subject.metrics(subject.counts)["judge/failed_frac"] is None and subject.ask([]) == []


def test_what_is_sent_and_where():
    """A temperature only if it is given: the default judge, a gpt-5 model, refuses one."""
    ways = {"": "/v1", "/": "/v1", "/v1/": "/v1", "/api": "/api", "/v2/chat/completions": "/v2"}
    with Server(ratings) as server:
        for given in ways:
            grade(Judge("m", server.url + given))
        grade(Judge("m", server.url, temperature=0.0))
    paths = [f"{path}/chat/completions" for path in [*ways.values(), "/v1"]]
    assert [sent[":path"] for sent in server.headers] == paths
    plain = {"model", "messages"}
    assert [{*r} for r in server.requests] == [plain] * len(ways) + [plain | {"temperature"}]


def test_the_key_is_sent_and_shown_nowhere(monkeypatch, tmp_path):
    key = "sk-test-1234567890abcdef"
    monkeypatch.setenv("OPENAI_API_KEY", key)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login evil password evil\n")
    echo = rated("Yes", "Yes", reason=f"your key is {key}")
    answers = iter([told(500, f"key {key}"), echo, told(401, f"bad {key}")])
    with Server(lambda r: next(answers)) as server:
        subject = make(server, cache=tmp_path / "c.jsonl")
        shown = [repr(grade(subject)), repr(vars(subject)), (tmp_path / "c.jsonl").read_text()]
        shown.append(error_of(grade, subject, ["b"]))
    assert [h["Authorization"] for h in server.headers] == [f"Bearer {key}"] * 3
    assert key not in "".join(shown) and "[key]" in shown[0]


def test_tokens_and_usd():
    """Also of a reply that could not be read: 2 × (100 in, 10 out) at 1 and 5 USD a million."""
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    replies = iter([completion("no", usage=usage), completion(rated("Yes", "Yes"), usage=usage)])
    *_, subject = run(lambda r: (200, {}, next(replies)), price=(1.0, 5.0))
    assert subject.counts["tokens_in"] == 200
    assert subject.metrics()["judge/usd"] == pytest.approx(3e-4)
    for usage in (None, []):
        body = completion("x" * 40, usage=usage)
        *_, subject = run(lambda r, body=body: (200, {}, body), max_retries=0)
        assert subject.counts["tokens_out"] == 10 and 100 < subject.counts["tokens_in"] < 400
