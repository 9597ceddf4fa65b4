"""parts/web.py: a small server for a few browsers: its addresses, and which requests it refuses.

A request is answered only under a host name that the operator chose, so that no other web site can
make a browser send it, and from other machines only with the token of the printed link. No TLS.
"""

import errno
import ipaddress
import re
import secrets
import socket
import sys

from parts.files import UserError, brief

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def listen(host, port):
    """A listening socket at an IPv4 or IPv6 address; UserError with the fix."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, UnicodeError) as error:
        port_fault = getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
        fix = "try --port 0" if port_fault else "expected an address of this machine"
        raise UserError(f"--host {host} --port {port}: {brief(error)}; {fix}") from None


def host_name(text):
    """The name in what people paste for a host: a link, capitals, brackets.

    >>> host_name("https://Tunnel.example/page"), host_name("[::1]")
    ('tunnel.example', '::1')
    """
    return re.sub(r"^\w+://|[/?].*$", "", text.strip()).lower().strip("[]")


def authority(name, port=80):
    """Host and port as a browser writes them: IPv6 in brackets, no port where it is HTTP's own.

    >>> authority("::1", 5050), authority("localhost", 80)
    ('[::1]:5050', 'localhost')
    """
    name = f"[{name}]" if name.count(":") > 1 else name
    return name if port == 80 else f"{name}:{port}"


def is_local(host):
    """Can only browsers of this machine reach it?"""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def guarded_app(name, templates, hosts, token, port):
    """A Flask app that answers what `guard` lets pass; errors are short sentences of JSON.

    hosts: accepted Host headers; token: for browsers off this machine, or None. A page holds
    `app.page_token`, and sends it with every POST.
    """
    from flask import Flask
    from werkzeug.exceptions import HTTPException

    app = Flask(name, static_folder=None, template_folder=templates)
    app.config["MAX_CONTENT_LENGTH"] = 128 * 1024
    app.page_token = secrets.token_urlsafe(32)
    app.before_request(lambda: guard(hosts, token, f"{name}-{port}", app.page_token))
    # KeyError, TypeError, ValueError and RecursionError: a body that the page would not send
    for kind in (HTTPException, OSError, KeyError, TypeError, ValueError, RecursionError):
        app.register_error_handler(kind, explain)

    @app.after_request
    def headers(response):
        response.headers.update(HEADERS)
        return response

    return app


def guard(hosts, token, cookie, page_token):
    """Refuse other web sites, other host names, and visitors without the token."""
    from flask import abort, redirect, request

    def same(given, expected):
        return secrets.compare_digest((given or "").encode(), expected.encode())

    host = request.environ.get("HTTP_HOST", "")
    if host not in hosts:
        abort(400, "unknown Host header")
    if token and not same(request.args.get("token", request.cookies.get(cookie)), token):
        abort(401, "open the link that was printed when the server started")
    if request.method == "POST":
        if request.headers.get("Origin", f"//{host}").partition("//")[2] != host:
            abort(403, "another origin")
        if not same(request.headers.get("X-Token"), page_token):
            abort(403, "the server was restarted; reload the page")
    elif token and "token" in request.args:  # keeps it out of the address bar and the history
        response = redirect("/")
        response.set_cookie(cookie, token, httponly=True, samesite="Lax")
        return response
    return None


def explain(error):
    """An error as one short sentence of JSON."""
    if isinstance(error, OSError):
        print(f"{error}; the vote was not acknowledged", file=sys.stderr)
        return {"error": f"the server cannot write its file ({error.strerror})"}, 507
    return {"error": getattr(error, "description", str(error))}, getattr(error, "code", 400)
