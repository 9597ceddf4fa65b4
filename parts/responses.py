"""parts/responses.py: what a server's response means: a reply, a wait, a refusal, a broken setup.

Pure functions of status, headers and body, for parts/server.py; nothing is sent from here.
"""

import json
import math
import re
from dataclasses import dataclass, field
from email.utils import mktime_tz, parsedate_tz

from parts.questions import whole_characters

RETRIED = (408, 409, 425, 429)  # and 5xx
REFUSED = (400, 403, 413, 422, 451)  # of one request (a content filter, its length), or of all
ADDRESS = "give the address of the judge itself in --judge-base-url"
HINTS = {  # of statuses that no other attempt can change
    401: "is the key in OPENAI_API_KEY right?",
    404: "is --judge-model right, and does --judge-base-url end as it should, often in /v1?",
    405: "does --judge-base-url end as it should, often in /v1?",
}
CAUSES = """message detail msg error errors raw metadata innererror details reason code type
param choices""".split()  # where servers say what went wrong, the most telling first


@dataclass
class Attempt:
    """What one request brought. text None: there is no reply, and error says why.

    again     another attempt may help, be it that the text cannot be read
    doubtful  this request was refused, or the whole setup is wrong: only another request can tell
    hopeless  the setup is wrong: a key, a model's name, an address
    """

    text: str = None
    error: str = None
    body: str = None  # of a response that is no error and no reply
    usage: dict = field(default_factory=dict)
    wait: float = None  # seconds until the next attempt, if the server says so
    again: bool = False
    doubtful: bool = False
    hopeless: bool = False


def read_response(status, headers, body, now):
    """The Attempt of an HTTP response.   headers  a mapping, case ignored;  now  seconds since 1970

    >>> read_response(429, {"Retry-After": "2.5"}, '{"error": {"message": "slow down"}}', 0).wait
    2.5
    >>> read_response(308, {"Location": "https://b/v1"}, "", 0).error[:41]
    'HTTP 308: redirects to https://b/v1; give'
    """
    if status < 300:
        attempt, status = read_completion(body)
        if status is None:
            return attempt
    words = server_words(body)
    error = f"HTTP {status}: {words}" if words else f"HTTP {status}, no text"
    if status < 400:
        place = headers.get("Location")
        target = f"redirects to {place[:200]}" if place else "redirects, without a Location"
        return Attempt(error=f"HTTP {status}: {target}; {ADDRESS}", hopeless=True)
    if (status in RETRIED or status >= 500) and "insufficient_quota" not in body:
        return Attempt(error=error, wait=asked_wait(headers, now), again=True)
    if status in REFUSED:
        return Attempt(error=error, doubtful=True)
    hint = f"; {HINTS[status]}" if status in HINTS else ""
    return Attempt(error=error + hint, hopeless=True)


def read_completion(body):
    """(Attempt, None) of a body with status 200, or (None, the status of the error in it).

    >>> body = '{"choices": [{"message": {"content": [{"type": "text", "text": " Yes "}]}}]}'
    >>> read_completion(body)[0].text
    'Yes'
    >>> read_completion('{"choices": [{"message": {"content": null, "refusal": "No."}}]}')[0].error
    'the judge refused: "No."'
    """
    data = as_dict(json_or_none(body))
    choices = data.get("choices")
    choice = as_dict(choices[0]) if isinstance(choices, list) and choices else {}
    message, usage = as_dict(choice.get("message")), as_dict(data.get("usage"))
    text, finish = joined(message.get("content")).strip(), choice.get("finish_reason")
    thoughts = joined(message.get("reasoning_content") or message.get("reasoning"))
    fault = data.get("error") or choice.get("error")
    code = count(as_dict(fault).get("code"))
    if finish == "length":
        error = "the reply was cut at the limit of tokens (the server's, or --judge-max-tokens)"
        error += f": {first_words(text or thoughts)}" if text or thoughts else ""
    elif text:
        return Attempt(text, usage=usage, again=True), None
    elif message.get("refusal"):
        error = f"the judge refused: {first_words(joined(message['refusal']))}"
    elif fault:
        if code and 400 <= code < 600:
            return None, code  # some routers wrap a provider's error in a 200
        error = f"no reply but an error: {server_words(body)}"
    elif finish == "content_filter":
        error = "the server's content filter withheld the reply (finish_reason content_filter)"
    elif thoughts:
        error = f"thoughts without a reply (finish_reason {finish}): {first_words(thoughts)}"
    elif choice:
        error = f"an empty reply (finish_reason {first_words(finish)}) in {first_words(body)}"
    else:
        error = f"no chat completion in {first_words(body)}" if body.strip() else "an empty body"
        return Attempt(error=f"HTTP 200: {error}", body=body, again=True, doubtful=True), None
    return Attempt(error=error, body=body, usage=usage, again=True), None


def asked_wait(headers, now):
    """Seconds that a server asks to wait, or None: retry-after-ms, else Retry-After, which is in
    seconds or a date; what is malformed or past counts as absent.

    >>> asked_wait({"Retry-After": "Thu, 01 Jan 1970 00:01:00 GMT"}, now=20)
    40
    >>> asked_wait({"retry-after-ms": "1500", "Retry-After": "2"}, 0), asked_wait({}, 0)
    (1.5, None)
    """
    for name, unit in (("retry-after-ms", 1000), ("Retry-After", 1)):
        value = (headers.get(name) or "").strip().removesuffix("s")
        try:
            date = parsedate_tz(value) if ":" in value else None
            if date:  # from the server's own Date, else from `now`
                sent = parsedate_tz(headers.get("Date") or "")
                seconds = mktime_tz(date) - (mktime_tz(sent) if sent else now)
            else:
                seconds = float(value) / unit
        except (ValueError, OverflowError):
            continue
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    return None


def joined(content):
    """The text of a message's content: text, or the text parts of a list, thoughts left out."""
    if isinstance(content, dict):
        if content.get("type", "text") not in ("text", "output_text"):
            return ""
        text = content.get("text")
        return joined(text.get("value") if isinstance(text, dict) else text)
    if isinstance(content, list):
        return "".join(joined(part) for part in content if not isinstance(part, list))
    return whole_characters(content) if isinstance(content, str) else ""


def server_words(body):
    """What an error's body says, its cause first, in one line of at most 200 characters.

    >>> server_words('{"id": null, "error": {"code": 404, "message": "no such model"}}')
    'no such model; 404'
    >>> server_words("<html><title>502 Bad Gateway</title></html>")
    '502 Bad Gateway'
    """
    data = json_or_none(body)
    if data is None:
        text = re.sub(r"(?is)<(style|script)\b.*?</\1>|<[^>]*>", " ", body[:20_000])
    else:
        text = "; ".join(dict.fromkeys(causes(data))) or body
    return printable(text)[:200]


def causes(value, depth=9):
    """Yield the texts and numbers below the keys of CAUSES, in their order."""
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        yield str(value)
    if isinstance(value, dict):
        value = [value.get(key) for key in CAUSES]
    elif isinstance(value, list):
        value = value[:3]
    if isinstance(value, list) and depth:
        for item in value:
            yield from causes(item, depth - 1)


def first_words(text, most=80):
    """The first words of a text in quotes, on one line."""
    text = printable(str(text))
    return f'"{text[:most]}…"' if len(text) > most else f'"{text}"'


def printable(text):
    return "".join(filter(str.isprintable, " ".join(text[:20_000].split())))


def count(value):
    """A whole number from JSON, where it may be text; None for anything else.

    >>> [count(value) for value in (12, "12", 12.0, -1, True, None, "many", 1e999)]
    [12, 12, 12, None, None, None, None, None]
    """
    try:
        number = -1 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(number) if 0 <= number < 1e12 else None


def as_dict(value):
    return value if isinstance(value, dict) else {}


def json_or_none(text):
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
