"""checks/apart.py: an answer's code in one process, its tests in another, for checks/programs.py.

    tests   ── {"op": "call", "on": 3, "args": [[2], {}]} →   the answer's code, in a bare process
            ← {"value": 4} ─────────────────────────────
Values cross as JSON lines: numbers, texts, lists, dictionaries, dates. All else (functions, objects
of the answer's own classes, generators) stays where it is, and a `Remote` stands for it.

>>> peer = Peer(None)
>>> peer.decode(peer.encode([1, (2, {"a": {3}})]))
[1, (2, {'a': {3}})]
"""

import ast
import builtins
import collections
import datetime
import decimal
import fractions
import json
import operator
import os
import socket
import subprocess
import sys
import types

PLAIN = (type(None), bool, int, float, str)
PARTS = {c.__name__: c for c in (list, tuple, set, frozenset, collections.deque)}
TEXTS = {  # type: (to text, from text)
    bytes: (bytes.hex, bytes.fromhex),
    bytearray: (bytearray.hex, bytearray.fromhex),
    complex: (str, complex),
    decimal.Decimal: (str, decimal.Decimal),
    fractions.Fraction: (str, fractions.Fraction),
    datetime.date: (str, datetime.date.fromisoformat),
    datetime.datetime: (str, datetime.datetime.fromisoformat),
    datetime.time: (str, datetime.time.fromisoformat),
}
DICTS = (dict, collections.Counter, collections.OrderedDict, collections.defaultdict)
CHANGING = (list, dict, set, bytearray, collections.deque)
FORWARDED = (
    "len iter next getitem setitem delitem add sub mul truediv floordiv mod pow neg abs int float"
)
FORWARDED = f"{FORWARDED} index str repr round bool hash".split()
COMPARED = "eq ne lt le gt ge".split()
NOTHING = object()


class Peer:
    """One end of the line. self.objects are this end's, which the other end may use by number."""

    def __init__(self, line, guarded=False):
        self.line, self.guarded, self.objects, self.errors = line, guarded, {}, {}

    def encode(self, value):
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind.__name__ in PARTS and kind in PARTS.values():
            return {kind.__name__: [self.encode(v) for v in value]}
        if kind in DICTS:
            return {"dict": [[self.encode(k), self.encode(v)] for k, v in value.items()]}
        if kind in TEXTS:
            return {kind.__name__: TEXTS[kind][0](value)}
        if kind is range:
            return {"range": [value.start, value.stop, value.step]}
        if kind is Remote and value._peer is self:
            return {"yours": value._number}
        self.objects[id(value)] = value
        base = next(
            (c for c in (int, float, str, tuple, list, set, dict) if isinstance(value, c)), None
        )
        return {"mine": id(value)} | ({"as": self.encode(base(value))} if base else {})

    def decode(self, data):
        if not isinstance(data, dict):
            return data
        if "mine" in data:
            return Remote(self, data["mine"], self.decode(data["as"]) if "as" in data else NOTHING)
        ((kind, value),) = data.items()
        if kind == "yours":
            return self.objects[value]
        if kind == "dict":
            return {self.decode(k): self.decode(v) for k, v in value}
        if kind == "range":
            return range(*value)
        for known, (_, read) in TEXTS.items():
            if known.__name__ == kind:
                return read(value)
        return PARTS[kind](self.decode(v) for v in value)

    def send(self, message):
        self.line.write(json.dumps(message) + "\n")
        self.line.flush()

    def receive(self):
        """The next message that is no request; requests are answered meanwhile."""
        while text := self.line.readline(1 << 22):
            message = json.loads(text)
            if "op" not in message:
                return message
            try:
                self.send(self.do(message))
            except BaseException as error:  # SystemExit of an answer too
                names = [c.__name__ for c in type(error).__mro__]
                self.send({"error": names, "text": str(error)[:500]})
        raise EOFError("the other process has ended")

    def do(self, message):
        if message["op"] == "alive":
            return {"value": True}
        op, value, args = message["op"], self.objects[message["on"]], self.decode(message["args"])
        own = (
            type(value).__module__ == "tests" and not str(args[0]).startswith("_")
            if args
            else False
        )
        if op == "call":
            result = value(*args[0], **args[1])
            after = [a if type(a) in CHANGING else None for a in args[0]]
            return {"value": self.encode(result), "after": self.encode(after)}
        if op in ("get", "set", "instance") and self.guarded and not own:
            raise PermissionError("of a test's object its own attributes alone")
        if op == "get":
            return {"value": self.encode(getattr(value, args[0]))}
        if op == "set":
            return {"value": setattr(value, *args)}
        if op == "instance":
            return {"value": isinstance(args[0], value)}
        if op not in (*FORWARDED, *COMPARED):
            raise ValueError(op)
        action = getattr(builtins, op, None) or getattr(operator, op)
        return {"value": self.encode(action(value, *args))}

    def ask(self, op, number, *args):
        self.send({"op": op, "on": number, "args": self.encode(args)})
        reply = self.receive()
        if "error" in reply:
            known = [
                self.errors.get(name) or getattr(builtins, name, None) for name in reply["error"]
            ]
            known = [c for c in known if isinstance(c, type) and issubclass(c, Exception)]
            raise (known or [RuntimeError])[0](reply["text"])
        if op == "call":  # what a function did to its arguments
            for old, new in zip(args[0], self.decode(reply["after"]), strict=True):
                if type(new) in CHANGING and type(new) is type(old) and new != old:
                    old.clear()
                    (old.update if hasattr(old, "update") else old.extend)(new)
        return self.decode(reply["value"])


class Remote:
    """Stands for an object of the other process. It equals no plain value of this one.

    So `class Yes: __eq__ = lambda self, other: True` is not 4. One that is a number, a text or a
    list by its class (a named tuple, an IntEnum) is compared by that value.
    """

    def __init__(self, peer, number, plain=NOTHING):
        self.__dict__.update(_peer=peer, _number=number, _plain=plain)

    def __call__(self, *args, **kwargs):
        return self._peer.ask("call", self._number, args, kwargs)

    def __getattr__(self, name):
        return self._peer.ask("get", self._number, name)

    def __setattr__(self, name, value):
        self._peer.ask("set", self._number, name, value)

    def __instancecheck__(self, value):
        return type(value) is Remote and self._peer.ask("instance", self._number, value) is True


def forwarded(name):
    def method(self, *args):
        if name not in COMPARED:
            return self._peer.ask(name, self._number, *args)
        if self._plain is not NOTHING:
            return getattr(operator, name)(self._plain, getattr(args[0], "_plain", args[0]))
        if type(args[0]) is Remote:
            return self._peer.ask(name, self._number, *args) is True
        return name == "ne" if name in ("eq", "ne") else NotImplemented

    return method


for name in (*FORWARDED, *COMPARED):
    setattr(Remote, f"__{name}__", forwarded(name))


def limit(seconds):
    """Bound this process; the name of what the system cannot bound, or None."""
    import resource

    limits = {"CPU": seconds, "AS": 1 << 30, "FSIZE": 1 << 20, "NPROC": 0, "CORE": 0}
    if sys.platform == "darwin":  # which has no bound on memory
        del limits["AS"]
    for name, most in limits.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        except (ValueError, OSError, AttributeError):
            return name
    return None


def close_doors():
    """Refuse files outside this folder and Python's, processes, signals, sockets, native code.

    An audit hook: it cannot be taken off in Python, but it is no wall against an attacker.
    """
    import _posixsubprocess

    def refuse(*args, **kwargs):
        raise PermissionError("not for an answer's code")

    _posixsubprocess.fork_exec = refuse
    library, harmless = os.path.dirname(os.__file__) + "/", {"os.listdir", "os.scandir"}
    doors = ("os.", "socket.", "subprocess.", "ctypes.", "shutil.", "pty.", "resource.", "signal.")
    native = {"_ctypes", "_posixsubprocess", "_testcapi", "_xxsubinterpreters", "_interpreters"}
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def hook(event, args):
        if event == "open" and not isinstance(args[0], int):
            path = args[0].decode() if isinstance(args[0], bytes) else str(args[0])
            inside = path.startswith(library) and not args[2] & writing
            if ".." in path or path.startswith("/") and not inside:
                refuse()
        elif event == "socket.__new__" and args[1] == socket.AF_UNIX:
            return  # asyncio's own pair
        elif event.startswith(doors) and event not in harmless:
            refuse()
        elif event == "import" and args[0] in native:
            refuse()

    sys.addaudithook(hook)


def answer_process():
    """Run the answer's code, then do what the tests ask of it."""
    line = socket.socket(fileno=os.dup(0)).makefile("rw", encoding="ascii")
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    job = json.loads(line.readline())
    sys.set_int_max_str_digits(0)
    peer, module = Peer(line), types.ModuleType("answer")
    if unbounded := limit(job["seconds"]):
        return peer.send({"unbounded": unbounded})
    sys.modules["answer"] = module
    close_doors()
    for source in job["blocks"]:
        try:
            exec(compile(source, "answer.py", "exec"), module.__dict__)
        except BaseException:  # a block that shows how to use another may end in an error
            continue
    values = {n: v for n, v in vars(module).items() if not n.startswith("__")}
    values = {n: v for n, v in values.items() if not isinstance(v, types.ModuleType)}
    errors = {n: v for n, v in values.items() if isinstance(v, type) and issubclass(v, Exception)}
    peer.send(
        {
            "names": {n: peer.encode(v) for n, v in values.items() if n not in errors},
            "errors": {n: [c.__name__ for c in v.__mro__[1:]] for n, v in errors.items()},
        }
    )
    peer.receive()


def run(tests, namespace):
    """Run the tests to their end: the file, its test_… functions, its unittest classes."""
    exec(compile(tests, "tests.py", "exec"), namespace)
    for name, value in list(namespace.items()):
        if isinstance(value, types.FunctionType) and name.startswith("test"):
            value()
        unittest = sys.modules.get("unittest")
        if isinstance(value, type) and unittest and issubclass(value, unittest.TestCase):
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(value).run(result)
            assert result.testsRun and result.wasSuccessful()


def judge(peer, job):
    """(passed, reason) of the tests; passed None: they cannot tell."""
    peer.send({"blocks": job["blocks"], "seconds": job["seconds"]})
    first = peer.receive()
    if "unbounded" in first:
        return None, f"this system sets no limit on {first['unbounded']} for the answer's code"
    used = {node.id for node in ast.walk(ast.parse(job["tests"])) if isinstance(node, ast.Name)}
    for name in sorted(used & set(vars(builtins)) & {*first["names"], *first["errors"]}):
        return None, f"the answer has a {name} of its own, which is Python's in the tests"
    for name, bases in first["errors"].items():
        base = next(b for b in map(vars(builtins).get, bases) if b and issubclass(b, Exception))
        peer.errors[name] = type(name, (base,), {})
    plain = {n: v for n, v in first["names"].items() if not n.startswith("__")}  # no __builtins__
    names = {name: peer.decode(value) for name, value in plain.items()}
    try:
        run(job["tests"], {"__name__": "tests", **names, **peer.errors})
        peer.send({"op": "alive", "on": 0, "args": []})  # an answer that ended itself has lost
        peer.receive()
    except BaseException:
        return False, None
    return True, None


def tests_process():
    """Start the answer's process, then run the tests. Stdout: its number, then (passed, reason)."""
    job, report = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    here, there = socket.socketpair()
    command = [sys.executable, "-I", "-S", os.path.abspath(__file__), "answer"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, stdin=there, env={}, **quiet)
    there.close()
    print(process.pid, file=report, flush=True)
    sys.set_int_max_str_digits(0)
    unbounded = limit(job["seconds"])
    try:
        passed, reason = judge(Peer(here.makefile("rw", encoding="ascii"), guarded=True), job)
    except (EOFError, OSError, ValueError, RecursionError, MemoryError):
        passed, reason = False, None
    if unbounded:
        passed, reason = None, f"this system sets no limit on {unbounded}"
    process.kill()
    process.wait()
    print(json.dumps([passed, reason]), file=report, flush=True)
    os._exit(0)


if __name__ == "__main__":
    answer_process() if sys.argv[1] == "answer" else tests_process()
