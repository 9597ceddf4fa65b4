"""parts/server.py: a judge behind a server: its address and key, retries, cache, budget.

Any server with OpenAI-compatible chat completions. A call that fails is a `Reply` with an error and
no value; what no other attempt can change (a wrong key, no such model) is a UserError. Whether a
refusal (HTTP 400, 403) is of one answer or of all is found out by asking something harmless, so it
depends neither on the order of the answers nor on what the cache holds.
"""

import hashlib
import os
import random
import re
import threading
import time
from argparse import ArgumentTypeError
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path

import requests

from parts import files
from parts.files import UserError, number
from parts.questions import HARMLESS, canonical, message
from parts.responses import Attempt, count, first_words, read_response, server_words

TIMEOUT = 60  # seconds for one reply, from the request to its last byte
DEADLINE = (
    180  # seconds for a call with its retries and waits; three times a longer --judge-timeout
)
MAX_WAIT = 60  # seconds; a server that asks for more (Retry-After) fails the call
NEW_LIMIT = "max_completion_tokens"  # what OpenAI's newer models call max_tokens, which they refuse
MAX_BODY, MAX_SHOWN = 2**23, 20_000  # bytes of a reply; characters of one that is sent back or kept
LOCAL = re.compile(
    r"https?://(localhost|[^/:]+\.localhost|127\.[\d.]+|0\.0\.0\.0|\[::1\])(:\d+)?(/|$)", re.I
)
CONNECTIONS = {  # what no other attempt changes about a connection: its words, the fix
    "CERTIFICATE_VERIFY_FAILED": "name a file of your company's certificates in REQUESTS_CA_BUNDLE",
    "WRONG_VERSION_NUMBER": "the server does not speak https there; try http://",
    "TLS CA certificate bundle": "REQUESTS_CA_BUNDLE or CURL_CA_BUNDLE names no file",
}


# ---- the flags ----


def price(text):
    """An argparse type: "0.25,2" → [0.25, 2.0]."""
    try:
        prices = [number(at_least=0)(part) for part in text.split(",")]
        if len(prices) == 2:
            return prices
    except ArgumentTypeError:
        pass
    raise ArgumentTypeError(f"{text!r} given, expected IN,OUT, such as 0.25,2")


def add_judge_arguments(parser):
    """The judge's flags, for every stage that asks one."""
    add = parser.add_argument_group("judge").add_argument
    # fmt: off
    add("--judge-model", default="gpt-5-mini", help="model name on the server (default %(default)s)")
    add("--judge-base-url", help="OpenAI-compatible server; key in OPENAI_API_KEY (default: OPENAI_BASE_URL, else OpenAI's)")
    add("--judge-temperature", type=number(at_least=0), help="only sent if given: some models refuse any (default: the server's)")
    add("--judge-max-tokens", type=number(int, at_least=1), help="longest reply; only sent if given (default: the server's)")
    add("--judge-max-retries", type=number(int, at_least=0), default=3, help="retries per call (default %(default)s)")
    add("--judge-timeout", type=number(above=0), default=TIMEOUT, help="seconds for one reply; with retries at most 180, or 3 times this (default %(default)s)")
    add("--judge-concurrency", type=number(int, at_least=1, below=65), default=16, help="parallel calls, 1 to 64 (default %(default)s)")
    add("--judge-price", type=price, metavar="IN,OUT", help="USD per million tokens in and out, such as 0.25,2")
    add("--judge-budget", type=number(above=0), metavar="USD", help="stop before more is spent; needs --judge-price, and --resume with more goes on")
    # fmt: on


# ---- calls and replies ----


@dataclass
class Call:
    """One question to the judge: parse(reply) → (value, complaint or None)."""

    messages: list
    parse: object
    expected: int = 60  # tokens of a reply, for estimates

    def read(self, text):
        """(value, None), or (None, what is wrong with the reply)."""
        try:
            return self.parse(text)
        except RecursionError:
            return None, "nested too deeply"


@dataclass
class Reply:
    value: object = None  # None: the call failed, and error says why
    error: str = None
    cached: bool = False
    attempts: int = 0
    latency: float = 0.0


class Judge:
    """A model behind any server with OpenAI-compatible chat completions.

    judge = Judge("qwen3-32b", "http://localhost:8000/v1");  replies = judge.ask([call, …])
    A failed call has value None; what cannot get better (wrong key, no such model) is a UserError.
    cache: a JSONL file of replies; what could not be read goes into judge_unread.jsonl beside it.
    clock, sleep: for tests.
    """

    def __init__(
        self, model, base_url=None, temperature=None, max_retries=3, concurrency=16, cache=None,
        price=None, budget=None, timeout=TIMEOUT, max_tokens=None, clock=time.monotonic, sleep=None,
    ):  # fmt: skip
        key = os.environ.get("OPENAI_API_KEY", "").strip()
        self.url = chat_address(base_url or os.environ.get("OPENAI_BASE_URL"), key, model)
        self.model, self.max_retries, self.workers = model, max_retries, concurrency
        settings = {"temperature": temperature, "max_tokens": max_tokens}
        self.extra = {key: value for key, value in settings.items() if value is not None}
        self.price, self.budget, self.counts = price, budget, Counter()
        self.timeout, self.deadline = timeout, max(DEADLINE, 3 * timeout)
        self.clock, self._stop = clock, threading.Event()
        self.sleep = sleep or self._stop.wait
        self._lock, self._probing = threading.Lock(), threading.Lock()
        self.reached = False  # has this server ever sent anything?
        self.works = False  # has it completed a chat since the last refusal?
        self.renames_limit = False  # has it refused max_tokens, as OpenAI's newer models do?

        def authorize(request):  # a callable is asked before any .netrc
            if key:
                request.headers["Authorization"] = f"Bearer {key}"
            return request

        # the key lives in two closures alone: no attribute, repr or log can show it
        self._hide = lambda text: text.replace(key, "[key]") if len(key) > 7 else text
        self._session = requests.Session()
        self._session.auth = authorize
        # no proxy between here and here
        self._proxies = {"http": "", "https": ""} if LOCAL.match(self.url) else None
        for scheme in ("http://", "https://"):  # a connection for every worker
            adapter = requests.adapters.HTTPAdapter(pool_maxsize=concurrency)
            self._session.mount(scheme, adapter)
        self.cache = cache and Path(cache)
        self.replies = read_cache(self.cache) if self.cache else {}

    @classmethod
    def from_args(cls, args, folder, world=1, budget=None):
        """The judge of a command line; `folder` is where judge_cache.jsonl goes.

        budget: USD after which nothing is asked; training looks at --judge-budget by itself
        """
        if args.judge_budget and not args.judge_price:
            raise UserError("--judge-budget: needs --judge-price IN,OUT (USD per million tokens)")
        return cls(
            args.judge_model, args.judge_base_url,
            temperature=args.judge_temperature, max_retries=args.judge_max_retries,
            concurrency=max(1, args.judge_concurrency // world), timeout=args.judge_timeout,
            max_tokens=args.judge_max_tokens, cache=Path(folder) / "judge_cache.jsonl",
            price=args.judge_price, budget=budget,
        )  # fmt: skip

    def __repr__(self):
        return f"<judge {self.model} at {self.url}>"

    def ask(self, calls):
        """A Reply for each call, in order; equal calls are asked once, known ones not at all."""
        self._stop.clear()
        keys = [self._key(call) for call in calls]
        once = dict(zip(keys, calls))
        pool = ThreadPoolExecutor(self.workers, "judge")
        try:
            replies = dict(zip(once, pool.map(self._one, once, once.values())))
        finally:  # also after Ctrl-C
            self._stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
        if calls and not self.reached and all(r.value is None for r in replies.values()):
            raise UserError(f"{self}: {replies[keys[0]].error}; is it running?")
        for key, n in Counter(keys).items():
            reply = replies[key]
            sent, answered = min(1, reply.attempts), reply.value is not None
            self.counts.update({
                "requests": n, "calls": sent, "cached": n - sent if answered else 0,
                "failed": 0 if answered else n, "corrected": answered and reply.attempts > 1,
                "latency": reply.latency,
            })  # fmt: skip
        return [replies[key] for key in keys]

    def _key(self, call):
        """All that a reply depends on: the server, the model, its settings, the question."""
        question = [self.url, self.model, self.extra, call.messages]
        return hashlib.sha256(canonical(question).encode("utf-8", "backslashreplace")).hexdigest()

    def _one(self, key, call):
        """A call with its retries, from the cache if it was answered before."""
        value, complaint = call.read(self.replies.get(key, ""))
        if complaint is None:
            return Reply(value, cached=True)
        if self.budget is not None and usd(self.counts, self.price) >= self.budget:
            return Reply(error="--judge-budget is spent: not asked")
        if self._stop.is_set():
            return Reply(error="not asked: another call has ended the run")
        start, messages, reply = self.clock(), call.messages, Reply()
        while True:
            reply.attempts += 1
            left = self.deadline - (self.clock() - start)
            attempt = self._post(messages, max(0.1, min(left, self.timeout)))
            reply.error = attempt.error
            if attempt.text is not None:
                reply.value, complaint = call.read(attempt.text)
                if complaint is None:
                    reply.error = None
                    self._keep(key, attempt.text)
                    break
                reply.error = f"{complaint}, in {first_words(attempt.text)}"
                self._keep_unread(key, complaint, attempt.text)
                again = f"Unusable reply ({complaint}). Send the whole JSON object, and that alone."
                shown = message("assistant", attempt.text[:MAX_SHOWN])
                messages = [*call.messages, shown, message("user", again)]
            elif attempt.body is not None:
                self._keep_unread(key, attempt.error, attempt.body)
            wait = attempt.wait
            if wait is None:
                wait = 0.5 * 2**reply.attempts * random.uniform(0.5, 1)
            elif wait > MAX_WAIT:
                reply.error += f" (it asks to wait {wait:.0f} s, more than {MAX_WAIT})"
            late = wait > MAX_WAIT or self.clock() - start + wait > self.deadline
            spent = reply.attempts > self.max_retries or late or self._stop.is_set()
            if spent or not attempt.again:
                break
            self.sleep(wait)
        if attempt.doubtful:
            self._check_setup(attempt)
        reply.latency = self.clock() - start
        return reply

    def _post(self, messages, seconds):
        """The Attempt of one request; UserError if the setup is wrong."""
        payload = {"model": self.model, "messages": messages} | self.extra
        if self.renames_limit:
            payload[NEW_LIMIT] = payload.pop("max_tokens")
        try:
            status, headers, body = self._send(payload, seconds)
        except Exception as error:  # of requests, urllib3, ssl, the address
            return self._no_response(error)
        self.reached = True
        body = self._hide(body.decode("utf-8-sig", "replace"))
        if status == 400 and NEW_LIMIT in body and "max_tokens" in payload:
            self.renames_limit = True
            return self._post(messages, seconds)
        attempt = read_response(status, headers, body, time.time())
        if status < 300:
            # as the server counts, also for a reply that cannot be read; else characters / 4
            letters = sum(len(message["content"]) for message in messages)
            tokens_in = count(attempt.usage.get("prompt_tokens")) or letters // 4
            tokens_out = count(attempt.usage.get("completion_tokens"))
            if tokens_out is None:
                tokens_out = len(attempt.text or "") // 4
            with self._lock:
                self.counts.update(tokens_in=tokens_in, tokens_out=tokens_out)
        if attempt.hopeless:
            self._end(attempt.error)
        if status < 300 and not attempt.doubtful:
            self.works = True
        return attempt

    def _send(self, payload, seconds):
        """(status, headers, body) within `seconds` in all, however slowly the bytes come."""
        end, result = time.monotonic() + seconds, Future()

        def send():
            try:
                options = {"timeout": seconds, "allow_redirects": False, "proxies": self._proxies}
                with self._session.post(self.url, json=payload, stream=True, **options) as response:
                    body = b""
                    for chunk in response.iter_content(2**16):
                        body += chunk
                        if len(body) > MAX_BODY or time.monotonic() > end:
                            raise requests.Timeout(f"no end after {len(body)} bytes")
                    result.set_result((response.status_code, response.headers, body))
            except Exception as error:
                result.set_exception(error)

        # a thread of its own: nothing else ends a read that gets a byte now and then
        threading.Thread(target=send, daemon=True).start()
        while True:
            try:
                return result.result(min(1.0, max(0.0, end - time.monotonic())))
            except FutureTimeout:
                if self._stop.is_set():  # the run has ended: 5 seconds for what is on its way
                    end = min(end, time.monotonic() + 5)
                if time.monotonic() >= end:
                    text = f"no whole reply within {seconds:.3g} s; --judge-timeout allows more"
                    raise requests.Timeout(text) from None

    def _no_response(self, error):
        """The Attempt of a request that brought nothing; UserError if none can bring anything."""
        root, inner = error, error
        while inner:  # requests and urllib3 wrap the cause several times
            root, parts = inner, (getattr(inner, "reason", None), *inner.args)
            inner = next((part for part in parts if isinstance(part, BaseException)), None)
        words = self._hide(f"{type(error).__name__}: {server_words(str(root))}")
        fixes = [fix for mark, fix in CONNECTIONS.items() if mark in str(root)]
        if fixes or isinstance(error, ValueError):  # of the address itself
            self._end("; ".join([words, *fixes]))
        return Attempt(error=words, again=True)

    def _check_setup(self, refusal):
        """UserError unless the server answers something harmless: then this request was refused."""
        with self._probing:
            if self._stop.is_set():
                return
            if not self.works:
                probe = self._post(HARMLESS, self.timeout)
                if probe.doubtful:
                    self._end(f"{refusal.error}; a harmless question fares no better")
                if probe.again:  # an error of the moment: nothing is known
                    return
            self.works = False  # it counts for one refusal

    def _end(self, words):
        self._stop.set()  # the other calls stop waiting
        raise UserError(f"{self}: {words}")

    def _keep(self, key, text):
        self.replies[key] = text
        if self.cache:  # one write per line: several processes may append
            files.write_jsonl(self.cache, [{"key": key, "reply": text}], append=True)

    def _keep_unread(self, key, complaint, text):
        self.counts["unread"] += 1
        if self.cache:
            row = {"key": key, "complaint": complaint, "reply": text[:MAX_SHOWN]}
            files.write_jsonl(self.unread, [row], append=True)

    @property
    def unread(self):
        """The file of the replies that could not be read, or None."""
        return self.cache and self.cache.with_name("judge_unread.jsonl")

    def metrics(self, since=None):
        """The judge/ and ruler/ keys of metrics.jsonl; `since` an earlier copy of `counts`."""
        from parts import parallel

        new_counts = self.counts - (since or Counter())
        c = sum(parallel.gather([new_counts]), Counter())  # of all processes
        counted = "calls", "cached", "corrected", "tokens_in", "tokens_out"

        def share(part, whole):
            return c[part] / c[whole] if c[whole] else None

        return {f"judge/{key}": c[key] for key in counted} | {
            "judge/failed_frac": share("failed", "requests"),
            "judge/latency_mean": share("latency", "calls"),
            "judge/order_disagreement": share("disagreement", "ordered"),
            "judge/usd": usd(c, self.price),
            "ruler/identical_groups": c["identical_groups"],
        }


def chat_address(url, key, model):
    """The address of chat completions at --judge-base-url; UserError if it is none.

    >>> chat_address("http://localhost:8000", "", "m")
    'http://localhost:8000/v1/chat/completions'
    """
    url = (url or "https://api.openai.com/v1").strip().rstrip("/")
    url = url.removesuffix("/chat/completions")
    address = re.fullmatch(r"https?://[^/?#@\s]+(/[^?#\s]*)?", url)
    if not address:
        expected = "expected an address such as http://localhost:8000/v1"
        raise UserError(f"--judge-base-url {url}: {expected}")
    if not key and url.startswith("https://api.openai.com"):
        raise UserError(
            f"--judge-model {model} needs a judge: give --judge-base-url (a local server needs "
            "no key), set OPENAI_API_KEY, or use checks alone"
        )
    if not re.fullmatch(r"[!-~]*", key):
        raise UserError("OPENAI_API_KEY: holds a blank, a line end or a character beyond ASCII")
    if key and url.startswith("http://") and not LOCAL.match(url):
        host = url.split("/")[2]
        print(f"warning: OPENAI_API_KEY goes to {host} unencrypted (http); use https, or unset it")
    return f"{url}{'' if address[1] else '/v1'}/chat/completions"


def read_cache(path):
    """{key: reply} of a judge_cache.jsonl; lines that a kill has cut, or that hold no text, are
    left out."""
    replies = {}
    if path.exists():
        for line in path.read_bytes().split(b"\n"):
            try:
                row = files.parse_json(line.decode())
                if isinstance(row["key"], str) and isinstance(row["reply"], str):
                    replies[row["key"]] = row["reply"]
            except (ValueError, LookupError, TypeError, RecursionError):
                continue
        with open(path, "ab") as file:
            file.write(b"\n")  # the next line must not join a cut one
    return replies


# ---- what it costs ----


# of the judge's metrics, those that add up over a run
PAID = "judge/calls", "judge/cached", "judge/tokens_in", "judge/tokens_out", "judge/usd"


def estimate(calls):
    """Counts as in `Judge.counts`: equal calls are one, and a token is 4 characters."""
    calls = {canonical(call.messages): call for call in calls}.values()
    letters = sum(len(message["content"]) for call in calls for message in call.messages)
    expected = sum(call.expected for call in calls)
    return Counter(calls=len(calls), tokens_in=letters // 4, tokens_out=expected)


def print_costs(costs, whole, price):
    """One line for each {name: (Calls, how often they are asked)}, and one for their sum."""
    total = Counter()
    for name, (calls, times) in costs.items():
        cost = estimate(calls)
        total.update({key: times * n for key, n in cost.items()})
        print(f"{name}: {cost_line(cost, price)}")
    print(f"{whole}: {cost_line(total, price)}")


def usd(counts, price):
    if price is None:
        return None
    return (counts["tokens_in"] * price[0] + counts["tokens_out"] * price[1]) / 1e6


def cost_line(counts, price):
    cost = "no --judge-price" if price is None else f"{usd(counts, price):.4f} USD"
    tokens = f"about {counts['tokens_in']} tokens in, {counts['tokens_out']} out"
    return f"{counts['calls']} calls, {tokens}, {cost}"
