"""A judge on a free port of this machine, for tests: it answers as it is told, fails as it is told,
and keeps what it was asked."""

import contextlib
import http.server
import json
import re
import threading
from argparse import ArgumentParser

import pytest

from parts.judging import Judge, add_judge_arguments


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each reply's body waits 40 ms behind its headers

    def do_POST(self):
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.requests.append(body)
        server.headers.append(dict(self.headers) | {":path": self.path})
        what = server.answer(body)
        status, headers, content = (200, {}, completion(what)) if isinstance(what, str) else what
        content = content if isinstance(content, str) else json.dumps(content)
        content = content.encode("latin-1")
        self.close_connection = not status
        if status:
            self.send_response(status)
            for name, value in ({"Content-Length": len(content)} | headers).items():
                self.send_header(name, str(value))
            self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    """Chat completions. answer(request) → text of a reply, or (status, headers, body): JSON, or a
    text of bytes; with status 0 nothing but this text is sent before hanging up. `requests`,
    `headers`: all that came."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.requests, self.headers = answer, [], []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, *_):
        """The client has hung up."""


def completion(text, finish="stop", **more):
    message = {"role": "assistant", "content": text}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], **more}


def fault(status, message="later", **headers):
    return status, headers, {"error": {"message": message}}


def judge_of(url, folder, *flags):
    """A Judge as a command line makes it; one retry, which does not wait, unless flags say more."""
    parser = ArgumentParser()
    add_judge_arguments(parser)
    known = f"--judge-model m --judge-base-url {url} --judge-max-retries 1".split()
    return Judge(parser.parse_args([*known, *map(str, flags)]), folder)


@pytest.fixture
def serve(tmp_path):
    """(answer, flags) → (server, a judge that asks it)."""
    with contextlib.ExitStack() as servers:

        def start(answer, *flags):
            server = servers.enter_context(Server(answer))
            return server, judge_of(server.url, tmp_path, *flags)

        yield start


def asked(request):
    return request["messages"][1]["content"]


def ratings(request, rate=lambda i: "Yes"):
    """A good reply to a rubric question."""
    ids = re.findall(r"^Rate the \d+ criteria ([\d, ]+), each id once", asked(request), re.M)[-1]
    rows = {i: {"reason": f"r{i}", "rating": rate(int(i))} for i in ids.split(", ")}
    return json.dumps({"ratings": rows})


def attempts(request):
    """{label: text} of a group question, in the order in which the attempts are shown."""
    inner = r'<attempt-(\w+) id="(\w+)">\n<message-.*?>\n(.*?)\n</message[^\n]*\n</attempt-\1>'
    return {label: text for _, label, text in re.findall(inner, asked(request), re.S)}


def scores(request, score):
    """A reply to a group question: score(text, place) of each attempt, last attempt first."""
    rows = [
        {"id": label, "reason": f"r {text}", "score": score(text, place)}
        for place, (label, text) in enumerate(attempts(request).items())
    ]
    return json.dumps({"scores": rows[::-1]})


class Rule(Server):
    """meets(task, criterion, answer) → bool; score(answer) → number for RULER; script(question) →
    None for a good reply, or what `Server` may answer. `asked`: the questions, `paid`: the texts of
    those that got a good reply."""

    def __init__(self, meets=None, score=None, script=lambda question: None):
        self.meets, self.score, self.script = meets, score, script
        self.asked, self.paid = [], []
        super().__init__(self.answer)

    def answer(self, body):
        text = asked(body)
        self.asked.append(text)
        what = self.script(text)
        if what is not None:
            return what
        self.paid.append(text)
        usage = {"prompt_tokens": 1000, "completion_tokens": 10}
        return 200, {}, completion(self.reply(body, text), usage=usage)

    def reply(self, body, text):
        if "<standard-" in text:
            return scores(body, lambda attempt, place: self.score(attempt))
        blocks = dict(re.findall(r"^<(\w+)-\w+>\n(.*?)\n</\1-\w+>$", text, re.S | re.M))
        criteria = dict(re.findall(r"^(\d+)\. (.*)$", blocks["criteria"], re.M))
        met = {i: self.meets(blocks["task"], c, blocks["answer"]) for i, c in criteria.items()}
        rows = {i: {"reason": "by rule", "rating": "Yes" if m else "No"} for i, m in met.items()}
        return json.dumps({"ratings": rows})
