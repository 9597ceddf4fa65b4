"""parts/server.py: a judge behind a server: addresses, keys, retries, cache, budget.

Any server with OpenAI-compatible chat completions. A call that fails is a `Reply` with an error and
no value; what cannot get better (a wrong key, no such model) is a UserError.
"""

import contextlib
import hashlib
import json
import math
import os
import random
import re
import threading
import time
from argparse import ArgumentTypeError
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import requests

from parts import files
from parts.files import UserError, number
from parts.questions import canonical, said

TIMEOUT = 60  # seconds without a byte from the server
DEADLINE = 180  # seconds for a call with its retries and waits
MAX_WAIT = 60  # seconds; a server that asks for more (Retry-After) fails the call
RETRIED = (408, 409, 425, 429)  # and 5xx


def price(text):
    """An argparse type: "0.25,2" → [0.25, 2.0]."""
    try:
        price_in, price_out = map(float, text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} given, expected IN,OUT, such as 0.25,2") from None
    return [price_in, price_out]


def add_judge_arguments(parser):
    """The judge's flags, for every stage that asks one."""
    add, whole = parser.add_argument_group("judge").add_argument, number(int, at_least=1)
    # fmt: off
    add("--judge-model", default="gpt-5-mini", help="model name on the server (default %(default)s)")
    add("--judge-base-url", help="OpenAI-compatible server, such as http://localhost:8000/v1; its key is read from OPENAI_API_KEY (default: OPENAI_BASE_URL, else OpenAI's)")
    add("--judge-temperature", type=number(at_least=0), help="only sent if given: some models refuse any (default: the server's)")
    add("--judge-max-retries", type=number(int, at_least=0), default=3, help="retries per call (default %(default)s)")
    add("--judge-concurrency", type=whole, default=16, help="parallel calls, 1 to 64 (default %(default)s)")
    add("--judge-price", type=price, metavar="IN,OUT", help="USD per million tokens in and out, such as 0.25,2")
    add("--judge-budget", type=number(above=0), metavar="USD", help="training stops before the step that would cost more, a command when it is spent; needs --judge-price")
    # fmt: on


@dataclass
class Call:
    """One question to the judge: parse(reply) → (value, complaint or None)."""

    messages: list
    parse: object
    expected: int = 60  # tokens of a reply, for estimates


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
    cache: a JSONL file of replies;  clock, sleep: for tests.
    """

    def __init__(
        self, model, base_url=None, temperature=None, max_retries=3, concurrency=16, cache=None,
        price=None, clock=time.monotonic, sleep=None,
    ):  # fmt: skip
        url = base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
        key = os.environ.get("OPENAI_API_KEY", "").strip()
        url = url.strip().rstrip("/").removesuffix("/chat/completions")
        address = re.fullmatch(r"https?://[^/?#]+(/[^?#]*)?", url)
        if not address:
            expected = "expected an address such as http://localhost:8000/v1"
            raise UserError(f"--judge-base-url {url}: {expected}")
        if not key and url.startswith("https://api.openai.com"):
            raise UserError(
                f"--judge-model {model} needs a judge: give --judge-base-url (a local server needs "
                "no key), set OPENAI_API_KEY, or use checks alone"
            )
        self.url = f"{url}{'' if address[1] else '/v1'}/chat/completions"
        self.model, self.max_retries, self.workers = model, max_retries, concurrency
        self.extra = {} if temperature is None else {"temperature": temperature}
        self.price, self.budget, self.counts = price, None, Counter()
        self.clock, self._stop, self._lock = clock, threading.Event(), threading.Lock()
        self.sleep = sleep or self._stop.wait
        self.reached = False  # has this server ever sent anything?

        def authorize(request):  # a callable is asked before any .netrc
            if key:
                request.headers["Authorization"] = f"Bearer {key}"
            return request

        # the key lives in two closures alone: no attribute, repr or log can show it
        self._hide = lambda text: text.replace(key, "[key]") if len(key) > 7 else text
        self._session = requests.Session()
        self._session.auth = authorize
        self.cache, self.replies = cache and Path(cache), {}
        if self.cache and self.cache.exists():
            for line in self.cache.read_bytes().split(b"\n"):
                with contextlib.suppress(ValueError, LookupError, TypeError):  # cut by a kill
                    row = files.parse_json(line)
                    self.replies[row["key"]] = row["reply"]
            with open(self.cache, "ab") as file:
                file.write(b"\n")  # the next line must not join a cut one

    @classmethod
    def from_args(cls, args, folder, world=1):
        """The judge of a command line; `folder` is where judge_cache.jsonl goes."""
        if args.judge_budget and not args.judge_price:
            raise UserError("--judge-budget: needs --judge-price IN,OUT (USD per million tokens)")
        return cls(
            args.judge_model, args.judge_base_url,
            temperature=args.judge_temperature, max_retries=args.judge_max_retries,
            concurrency=max(1, args.judge_concurrency // world),
            cache=Path(folder) / "judge_cache.jsonl", price=args.judge_price,
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

    def _one(self, key, call):
        """A call with its retries, from the cache if it was answered before."""
        value, complaint = call.parse(self.replies.get(key, ""))
        if complaint is None:
            return Reply(value, cached=True)
        if self.budget is not None and usd(self.counts, self.price) >= self.budget:
            return Reply(error="--judge-budget is spent: not asked")
        start, messages, reply = self.clock(), call.messages, Reply()
        while True:
            reply.attempts += 1
            text, reply.error, wait = self._post(messages)
            if text is not None:
                reply.value, reply.error = call.parse(text)
                if reply.error is None:
                    self.replies[key] = text
                    if self.cache:  # one write per line: several processes may append
                        files.write_jsonl(self.cache, [{"key": key, "reply": text}], append=True)
                    break
                again = f"Unusable reply ({reply.error}). Send the JSON object alone."
                messages = [*call.messages, said("assistant", text[:20_000]), said("user", again)]
            if wait is None:
                wait = 0.5 * 2**reply.attempts * random.uniform(0.5, 1)
            late = self.clock() - start + wait > DEADLINE or wait > MAX_WAIT
            if reply.attempts > self.max_retries or late or self._stop.is_set():
                break
            self.sleep(wait)
        reply.latency = self.clock() - start
        return reply

    def _post(self, messages):
        """(reply, None, None), or (None, what went wrong, seconds before the next attempt).

        Seconds: inf if another attempt cannot help, None if the server did not say.
        """
        payload = {"model": self.model, "messages": messages} | self.extra
        try:
            how = {"timeout": TIMEOUT, "allow_redirects": False}
            sent = self._session.post(self.url, json=payload, **how)
        except (requests.RequestException, UnicodeError) as error:
            return None, self._hide(f"{type(error).__name__}: {files.brief(error)}"), None
        self.reached, status = True, sent.status_code
        body = self._hide(sent.content.decode("utf-8", "replace"))
        if status < 300:
            text, usage, finish = read_completion(body)
            # as the server counts, also for a reply that cannot be read; else characters / 4
            letters = sum(len(message["content"]) for message in messages)
            tokens_in = usage.get("prompt_tokens") or letters // 4
            tokens_out = usage.get("completion_tokens") or len(text) // 4
            with self._lock:
                self.counts.update(tokens_in=tokens_in, tokens_out=tokens_out, replies=bool(text))
            if finish == "length":
                return None, "the reply was cut at the server's limit of tokens", None
            return (text, None, None) if text else (None, f"no reply in {body[:60]!r}", None)
        told = f"HTTP {status}: " + "".join(filter(str.isprintable, files.brief(body)))
        if (status in RETRIED or status >= 500) and "insufficient_quota" not in body:
            asked = sent.headers.get("Retry-After", "")
            return None, told, float(asked) if asked.isdecimal() else None
        if status in (400, 413, 422) and self.counts["replies"]:  # too long, or a content filter
            return None, told, math.inf
        self._stop.set()  # the other calls stop waiting
        raise UserError(f"{self}: {told}")

    def metrics(self, since=None):
        """The judge/ and ruler/ keys of metrics.jsonl; `since` an earlier copy of `counts`."""
        from parts import parallel

        mine = self.counts - (since or Counter())
        c = sum(parallel.gather([mine]), Counter())  # of all processes
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

    def _key(self, call):
        """All that the question is made of; not the address, so another port finds the reply."""
        return hashlib.sha256(canonical([self.model, call.messages]).encode()).hexdigest()


def read_completion(body):
    """(text, usage, finish reason) of choices[0]; the text is "" if there is none.

    >>> read_completion('{"choices": [{"message": {"content": " Yes "}, "finish_reason": "stop"}]}')
    ('Yes', {}, 'stop')
    """
    try:
        data = json.loads(body, strict=False)
        choice = data["choices"][0]
        text = choice["message"]["content"].strip()
        return text, dict(data.get("usage") or {}), choice.get("finish_reason")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return "", {}, None


def estimate(calls):
    """Counts as in `Judge.counts`: equal calls are one, and a token is 4 characters."""
    calls = {canonical(call.messages): call for call in calls}.values()
    letters = sum(len(message["content"]) for call in calls for message in call.messages)
    expected = sum(call.expected for call in calls)
    return Counter(calls=len(calls), tokens_in=letters // 4, tokens_out=expected)


def usd(counts, price):
    if price is None:
        return None
    return (counts["tokens_in"] * price[0] + counts["tokens_out"] * price[1]) / 1e6


def cost_line(counts, price):
    cost = "no --judge-price" if price is None else f"{usd(counts, price):.4f} USD"
    tokens = f"about {counts['tokens_in']} tokens in, {counts['tokens_out']} out"
    return f"{counts['calls']} calls, {tokens}, {cost}"
