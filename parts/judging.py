"""parts/judging.py: a judge behind a server: its address and key, retries, cache, costs.

Any server with OpenAI-compatible chat completions: vLLM, llama.cpp, Ollama, a provider. Each
question carries the JSON schema of its reply, which most servers enforce. A call that fails is a
`Reply` with an error and no value; a wrong key, model or address ends the run.
"""

import hashlib
import json
import os
import re
import threading
from argparse import ArgumentTypeError
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.exceptions import ChunkedEncodingError, ContentDecodingError
from tqdm import tqdm
from urllib3.util import Retry

from parts.files import PRIVATE, UserError, brief, number, write_jsonl

OPENAI = "https://api.openai.com/v1"
LOCAL = ("localhost", "127.0.0.1", "::1")
RETRIED = {408, 409, 425, 429, *range(500, 600)}
FIXES = {  # of what no other question to the same server can change
    401: "is the key in OPENAI_API_KEY right?",
    404: "is --judge-model right, and does --judge-base-url end as it should, mostly in /v1?",
}
SCHEMA = re.compile("response_format|json.?schema", re.I)  # the field, in a server's refusal
WINDOW = 256  # tokens: no server reads less of a prompt than this


def conversation(prompt, answer):
    """A prompt (text or messages) and an answer as messages."""
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [*prompt, {"role": "assistant", "content": answer}]


# ---- the flags ----


def price(text):
    """An argparse type: "0.25,2" → [0.25, 2.0], USD per million tokens in and out."""
    prices = [number(at_least=0)(part) for part in text.split(",")]
    if len(prices) != 2:
        raise ArgumentTypeError(f"{text} given, expected IN,OUT, such as 0.25,2")
    return prices


def add_judge_arguments(parser):
    """The judge's flags, for every stage that asks one."""
    add, whole = parser.add_argument, number(int, at_least=1)
    # fmt: off
    add("--judge-model", default="gpt-5-mini", help="model name on the server")
    add("--judge-base-url", default=os.environ.get("OPENAI_BASE_URL", OPENAI), help="server, mostly up to /v1; key: OPENAI_API_KEY")
    add("--judge-temperature", type=number(at_least=0), help="only sent if given: some models refuse any (default: the server's)")
    add("--judge-max-tokens", type=whole, help="longest reply; only sent if given (default: the server's)")
    add("--judge-max-retries", type=number(int, at_least=0), default=3, help="retries per request")
    add("--judge-timeout", type=number(above=0), default=60, help="seconds to wait for the server to send something")
    add("--judge-concurrency", type=whole, default=16, help="requests at a time")
    add("--judge-price", type=price, metavar="IN,OUT", help="USD per million tokens in and out, such as 0.25,2")
    add("--judge-budget", type=number(above=0), metavar="USD", help="ask nothing once this is spent; starting again with more goes on")
    # fmt: on


# ---- calls and replies ----


def retrying(retries, connections):
    """What `requests` sends through: it keeps so many connections to a server, and sends again what
    failed on the way or with an HTTP status that may pass, after the wait that the server asks for."""
    retry = Retry(
        retries, status_forcelist=RETRIED, allowed_methods=None, raise_on_status=False,
        backoff_factor=0.5, backoff_jitter=0.5, backoff_max=60, retry_after_max=60,
    )  # fmt: skip
    return HTTPAdapter(pool_maxsize=connections, max_retries=retry)


@dataclass
class Call:
    """One question. read(reply) → its value; a ValueError says why the reply cannot be used."""

    messages: list
    schema: dict  # JSON schema of the reply
    read: object


@dataclass
class Reply:
    value: object = None  # None: the call failed, and error says why
    error: str = None
    cached: bool = False


class Judge:
    """A model behind any server with OpenAI-compatible chat completions.

    replies = Judge(args, folder).ask([call, …])

    args     the flags of `add_judge_arguments`
    folder   of judge_cache.jsonl: a question that was answered before is not asked again
    budget   USD after which nothing is asked; training looks at --judge-budget between its steps
    counts   questions, cached, failed; calls (replies of the server), tokens_in, tokens_out
    """

    def __init__(self, args, folder, budget=None):
        if args.judge_budget and not args.judge_price:
            raise UserError("--judge-budget: needs --judge-price IN,OUT (USD per million tokens)")
        key, url = os.environ.get("OPENAI_API_KEY", ""), args.judge_base_url.rstrip("/")
        if url == OPENAI and not key:
            raise UserError(
                f"--judge-model {args.judge_model}: give --judge-base-url (a local server needs no "
                "key), set OPENAI_API_KEY, or use checks alone"
            )
        if not re.fullmatch("[!-~]*", key):
            raise UserError("OPENAI_API_KEY: has a blank, a line end or a character beyond ASCII")
        self.url = url + "/chat/completions"
        settings = dict(
            model=args.judge_model, temperature=args.judge_temperature,
            max_completion_tokens=args.judge_max_tokens,
        )  # fmt: skip
        self.settings = {key: value for key, value in settings.items() if value is not None}
        self.args, self.budget = args, budget
        self.counts, self.logged, self.lock = Counter(), Counter(), threading.Lock()
        self.enforces = True  # has the server not yet refused a schema?
        self.cache = Path(folder) / "judge_cache.jsonl"
        self.known = read_cache(self.cache)

        def authorize(request):  # asked instead of any .netrc; no repr shows the key
            if key:
                request.headers["Authorization"] = f"Bearer {key}"
            return request

        self.session = requests.Session()
        self.session.auth = authorize
        self.session.trust_env = urlsplit(url).hostname not in LOCAL  # no proxy to this machine
        self.session.mount(url, retrying(args.judge_max_retries, args.judge_concurrency))

    def ask(self, calls):
        """A Reply for each call, in order; equal calls are asked once, known ones not at all.

        UserError if all fail and the server has never completed a chat.
        """
        keys = [self.key(call) for call in calls]
        once = dict(zip(keys, calls))
        with ThreadPoolExecutor(self.args.judge_concurrency) as pool:
            answered = pool.map(self.answer, once, once.values())
            bar = tqdm(answered, "judge", len(once), leave=False, delay=2, disable=None)
            replies = dict(zip(once, bar))
        failed = sum(replies[key].value is None for key in keys)
        if failed == len(keys) > 0 and not self.counts["calls"]:
            raise UserError(f"{self.url}: every call failed: {replies[keys[0]].error}")
        cached = len(keys) - len(once) + sum(reply.cached for reply in replies.values())
        self.counts.update(questions=len(keys), cached=cached, failed=failed)
        return [replies[key] for key in keys]

    def key(self, call):
        """All that a reply depends on: the server, the model, its settings, the question."""
        question = json.dumps([self.url, self.settings, call.messages, call.schema], sort_keys=True)
        return hashlib.sha256(question.encode()).hexdigest()

    def answer(self, key, call):
        """The Reply to one call. What cannot be used is asked for once more, with the reason."""
        if key in self.known:
            with suppress(ValueError):  # of a line that somebody edited
                return Reply(call.read(self.known[key]), cached=True)
        messages, error = call.messages, None
        for _ in range(2):
            text = None
            try:
                text = self.send(messages, call.schema)
                value = call.read(text)
            except UserError:
                raise
            except (ValueError, ChunkedEncodingError, ContentDecodingError) as problem:
                error = brief(problem, 300)
                if text:
                    again = f"Unusable reply ({error}). Send the whole JSON object, and that alone."
                    said = conversation(call.messages, text[:20_000])
                    messages = [*said, {"role": "user", "content": again}]
                    error += f", in {brief(text, 80)!r}"
            except OSError as problem:  # requests' errors are OSErrors, too
                return Reply(error=brief(problem, 300))
            else:
                self.known[key] = text  # one write per line: several processes may append
                line = {"key": key, "reply": text}
                write_jsonl(self.cache, [line], append=True, mode=PRIVATE)
                return Reply(value)
        return Reply(error=error)

    def send(self, messages, schema):
        """The text of one reply. UserError: the run ends; OSError: the call has failed; ValueError:
        it is asked once more."""
        if self.budget is not None and self.usd(self.counts) >= self.budget:
            raise OSError("--judge-budget is spent: not asked")
        body = self.settings | {"messages": messages}
        if self.enforces:
            form = {"name": "reply", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        response = self.session.post(
            self.url, json=body, timeout=self.args.judge_timeout, allow_redirects=False
        )
        status, words = response.status_code, brief(response.text or response.reason, 200)
        if "response_format" in body and status in (400, 422) and SCHEMA.search(response.text):
            with self.lock:
                if self.enforces:
                    print(
                        f"judge: asked without response_format from now on (HTTP {status}: {words})"
                    )
                self.enforces = False
            return self.send(messages, schema)
        if status in FIXES:
            raise UserError(f"{self.url}: HTTP {status}: {words}; {FIXES[status]}")
        if status != 200:
            raise OSError(f"HTTP {status}: {words} {response.headers.get('Location', '')}".strip())
        try:
            data = response.json()
            choice, usage = data["choices"][0], data.get("usage") or {}
            text = choice["message"]["content"].strip()
            text = text.encode("utf-8", "replace").decode()  # no half characters
            read, written = (int(usage.get(f"{x}_tokens") or 0) for x in ("prompt", "completion"))
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
            raise ValueError(f"no chat completion: {words}") from None
        prompt = "\n".join(message["content"] for message in messages)
        least, guess = least_tokens(prompt), len(prompt) // 4  # where the server does not count
        with self.lock:
            paid = {"tokens_in": read or guess, "tokens_out": written or len(text) // 4}
            self.counts.update(paid, calls=1)
        if 0 < read < least / 2 and least > WINDOW:
            raise OSError(
                f"the server read {read} tokens of at least {least}: it cut the prompt. Raise its "
                "context window (Ollama: OLLAMA_CONTEXT_LENGTH; OpenRouter: no middle-out)"
            )
        if choice.get("finish_reason") == "length":
            raise ValueError("the reply was cut at the limit of tokens (--judge-max-tokens)")
        return text

    def usd(self, counts):
        """What calls have cost; None without --judge-price."""
        if self.args.judge_price is None:
            return None
        price_in, price_out = self.args.judge_price
        return (counts["tokens_in"] * price_in + counts["tokens_out"] * price_out) / 1e6

    def metrics(self):
        """The judge/ keys of metrics.jsonl since the last call."""
        c, self.logged = self.counts - self.logged, Counter(self.counts)
        row = {f"judge/{name}": c[name] for name in ("calls", "cached", "tokens_in", "tokens_out")}
        row["judge/failed_frac"] = c["failed"] / c["questions"] if c["questions"] else None
        return row | {"judge/usd": self.usd(c)}

    def describe(self):
        """One line: calls, tokens, cost."""
        c = self.counts
        cost = f", {self.usd(c):.4f} USD" if self.args.judge_price else ""
        return (f"judge: {c['calls']} calls, {c['tokens_in']} tokens in, {c['tokens_out']} out"
                f"{cost}; {c['cached']} from the cache, {c['failed']} failed")  # fmt: skip


def read_cache(path):
    """{key: reply} of a judge_cache.jsonl. Lines that are none are left out; after one that a kill
    has cut a new line begins."""
    known, text = {}, path.read_text("utf-8", "replace") if path.exists() else ""
    for line in text.split("\n"):
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            row = json.loads(line)
            known[row["key"]] = str(row["reply"])
    if text and not text.endswith("\n"):
        with open(path, "a") as file:
            file.write("\n")
    return known


CJK = "\u3040-\u30ff\u4e00-\u9fff"
UNIT = re.compile(rf"(\S)\1{{7,}}|[{CJK}]{{1,2}}|[^\s{CJK}]{{1,16}}")


def least_tokens(text):
    """About the fewest tokens that a tokenizer makes of a text: one per word, of long words one per
    16 characters, of Chinese and Japanese one per two characters; a row of one character is one.

    The counts of seven tokenizers (GPT-2's to Gemma 3's) of 24 kinds of text, from prose to
    base64, were 0.88 to 500 times this, English prose 1.06 to 1.9. So half of it means a cut.
    >>> least_tokens("She led the audit."), least_tokens("=" * 80), least_tokens("职位要求")
    (4, 1, 2)
    """
    return len(UNIT.findall(text))
