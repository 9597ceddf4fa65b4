"""checks/apart.py: an answer's code in one process, its tests in another, for checks/programs.py.

    tests   ── ("ask", "call", 3, ([2], {})) →   the answer's code, in a bare process
            ← ("value", 4, [None]) ─────────────
Values cross as pickles that can name nothing but CARRIED: numbers, texts, lists, dictionaries,
dates. All else (functions, objects of the answer's own classes, generators) stays where it is, and
a `Remote` stands for it.

>>> peer = Peer(None)
>>> peer.decode(peer.encode([1, (2, {"a": {3}}), Fraction(1, 2)]))
[1, (2, {'a': {3}}), Fraction(1, 2)]
"""

import ast
import builtins
import collections
import datetime
import io
import json
import operator
import os
import pickle
import socket
import sys
import types
from decimal import Decimal
from fractions import Fraction
from multiprocessing.connection import Connection

CARRIED = {type(None), bool, int, float, complex, str, bytes, bytearray, range, Decimal, Fraction}
CARRIED |= {list, tuple, set, frozenset, dict, collections.Counter, collections.OrderedDict}
CARRIED |= {collections.defaultdict, collections.deque, datetime.date, datetime.datetime}
CARRIED |= {datetime.time, datetime.timedelta, datetime.timezone}
CHANGING = (list, dict, set, bytearray, collections.deque)
MOST = 1 << 22  # bytes of a message
FORWARDED = """len iter next getitem setitem delitem add sub mul truediv floordiv mod pow neg abs
int float index str repr round bool hash""".split()
COMPARED = "eq ne lt le gt ge".split()
ACTIONS = {
    "call": lambda function, args, kwargs: function(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "instance": lambda kind, value: isinstance(value, kind),
}
for name in (*FORWARDED, *COMPARED):
    ACTIONS[name] = getattr(builtins, name, None) or getattr(operator, name)


class Sender(pickle.Pickler):
    def __init__(self, file, peer):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.peer = peer

    def persistent_id(self, value):
        """None: the value itself is sent; else what stands for it."""
        if type(value) in CARRIED or any(value is known for known in CARRIED):
            return None
        if type(value) is Remote:
            return "yours", value._number, []
        self.peer.objects[id(value)] = value
        bases = (c for c in (int, float, str, tuple, list, set, dict) if isinstance(value, c))
        return "mine", id(value), [base(value) for base in bases]


class Receiver(pickle.Unpickler):
    def __init__(self, file, peer):
        super().__init__(file)
        self.peer = peer

    def find_class(self, module, name):
        return next(c for c in CARRIED if (c.__module__, c.__qualname__) == (module, name))

    def persistent_load(self, reference):
        owner, number, plain = reference
        return self.peer.objects[number] if owner == "yours" else Remote(self.peer, number, plain)


class Peer:
    """One end of the line. self.objects are this end's, which the other end may use by number."""

    def __init__(self, line, guarded=False):
        self.line, self.guarded, self.objects, self.errors = line, guarded, {}, {}
        self.asked = False

    def encode(self, value):
        file = io.BytesIO()
        Sender(file, self).dump(value)
        return file.getvalue()

    def decode(self, data):
        return Receiver(io.BytesIO(data), self).load()

    def send(self, *message):
        self.line.send_bytes(self.encode(message))

    def receive(self):
        """The next message that is no request; requests are answered meanwhile."""
        while True:
            kind, *content = self.decode(self.line.recv_bytes(MOST))
            if kind != "ask":
                return kind, content
            try:
                self.send("value", *self.do(*content))
            except BaseException as error:  # SystemExit of an answer too
                self.send("error", [c.__name__ for c in type(error).__mro__], str(error)[:500])

    def do(self, op, number, args):
        """(result, what a call has left of arguments that can change)"""
        value = self.objects[number]
        if self.guarded and op in ("get", "set", "instance"):
            if type(value).__module__ != "__main__" or str(args[0]).startswith("_"):
                raise PermissionError("of a test's object its own attributes alone")
        result = ACTIONS[op](value, *args)
        after = arguments(args) if op == "call" else ()
        return result, [a if type(a) in CHANGING else None for a in after]

    def ask(self, op, number, *args):
        self.asked = True
        self.send("ask", op, number, args)
        kind, content = self.receive()
        if kind == "error":
            names, text = content
            known = [self.errors.get(name) or getattr(builtins, name, None) for name in names]
            known = [c for c in known if isinstance(c, type) and issubclass(c, Exception)]
            raise (known or [RuntimeError])[0](text)
        result, after = content
        if op == "call":  # what a function did to its arguments
            for old, new in zip(arguments(args), after, strict=True):
                if type(new) in CHANGING and type(new) is type(old) and new != old:
                    old.clear()
                    (old.update if hasattr(old, "update") else old.extend)(new)
        return result


def arguments(call):
    """What a call was given, by place and by name."""
    args, kwargs = call
    return [*args, *kwargs.values()]


class Remote:
    """Stands for an object of the other process. It equals no plain value of this one.

    So `class Yes: __eq__ = lambda self, other: True` is not 4. One that is a number, a text or a
    list by its class (a named tuple, an IntEnum) is compared by that value: plain holds it.
    """

    def __init__(self, peer, number, plain):
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
    return lambda self, *args: self._peer.ask(name, self._number, *args)


def compared(name):
    def compare(self, other):
        remote = type(other) is Remote
        if self._plain:
            plain = other._plain[0] if remote and other._plain else other
            return getattr(operator, name)(self._plain[0], plain)
        if remote:
            return self._peer.ask(name, self._number, other) is True
        return name == "ne" if name in ("eq", "ne") else NotImplemented

    return compare


for name in (*FORWARDED, *COMPARED):
    setattr(Remote, f"__{name}__", (compared if name in COMPARED else forwarded)(name))


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
            path = os.fsdecode(args[0])
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


def answer_process(line):
    """Run the answer's code, then do what the tests ask of it."""
    peer, module = Peer(line), types.ModuleType("answer")
    blocks, seconds = peer.receive()[1]
    limit(seconds)
    sys.modules["answer"] = module
    close_doors()
    for source in blocks:
        try:
            exec(compile(source, "answer.py", "exec"), module.__dict__)
        except BaseException:  # a block that shows how to use another may end in an error
            continue
    names, errors = {}, {}
    for name, value in vars(module).items():
        if isinstance(value, type) and issubclass(value, Exception):
            errors[name] = [base.__name__ for base in value.__mro__[1:]]
        elif not name.startswith("__") and not isinstance(value, types.ModuleType):
            names[name] = value
    peer.send("defines", names, errors)
    peer.receive()


def run(tests, namespace):
    """Run the tests to their end: the file as a script, its test_… functions, Test… classes and
    unittest classes."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__dict__.update(namespace)
    if "unittest" in tests:
        import unittest

        unittest.main = lambda *args, **kwargs: None  # its classes are run below
    exec(compile(tests, "tests.py", "exec"), module.__dict__)
    unittest = sys.modules.get("unittest")
    for name, value in list(vars(module).items()):
        if isinstance(value, types.FunctionType) and name.startswith("test"):
            run_test(value)
        elif isinstance(value, type) and unittest and issubclass(value, unittest.TestCase):
            result, errors = unittest.TestResult(), []
            result.addError = lambda test, error, to=errors: to.append(error[1])
            unittest.defaultTestLoader.loadTestsFromTestCase(value).run(result)
            for error in errors:
                raise error
            assert result.wasSuccessful()
        elif isinstance(value, type) and name.startswith("Test"):
            for method in (m for m in dir(value) if m.startswith("test")):
                case = value()
                for setup in ("setup_class", "setup_method"):  # as pytest calls them
                    if setup := getattr(case, setup, None):
                        setup(*[None][: setup.__code__.co_argcount - 1])
                run_test(getattr(case, method))


def run_test(test):
    """Call a test; what takes arguments is a helper of other tests."""
    code, given = getattr(test, "__code__", None), isinstance(test, types.MethodType)
    if code and code.co_argcount <= given + len(test.__defaults__ or ()):
        result = test()
        if isinstance(result, types.CoroutineType):
            import asyncio

            result = asyncio.run(result)
        assert result is not False


def judge(peer, job):
    """(passed, reason) of the tests; passed None: they cannot tell."""
    peer.send("job", job["blocks"], job["seconds"])
    names, errors = peer.receive()[1]
    used = {node.id for node in ast.walk(ast.parse(job["tests"])) if isinstance(node, ast.Name)}
    for name in sorted(used & set(vars(builtins)) & {*names, *errors}):
        return None, f"the answer has a {name} of its own, which is Python's in the tests"
    for name, bases in errors.items():
        base = next(b for b in map(vars(builtins).get, bases) if b and issubclass(b, Exception))
        peer.errors[name] = type(name, (base,), {})
    names = {name: value for name, value in names.items() if not name.startswith("__")}
    plain = {name for name, value in names.items() if type(value) is not Remote or value._plain}
    try:
        run(job["tests"], {**names, **peer.errors})
        if not peer.asked and not used & {*plain, *errors}:
            return None, "its tests use nothing of the answer's code"
        peer.send("ask", "alive", 0, ())  # an answer that ended itself has lost
        peer.receive()
    except ImportError as error:
        return (None, f"its tests end in: {error}") if error.name else (False, None)
    except SystemExit as error:
        return (False, None) if error.code else (None, "its tests exit before their end")
    except BaseException:
        return False, None
    return True, None


def tests_process(line):
    """Run the tests of the job on stdin; stdout: (passed, reason)."""
    job, report = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    if unbounded := limit(job["seconds"]):
        verdict = None, f"this system sets no limit on {unbounded} for the answer's code"
    else:
        try:
            verdict = judge(Peer(line, guarded=True), job)
        except Exception:  # the answer's process has ended, or sent what nobody can read
            verdict = False, None
    print(json.dumps(verdict), file=report, flush=True)
    os._exit(0)


if __name__ == "__main__":
    process = {"answer": answer_process, "tests": tests_process}[sys.argv[1]]
    process(Connection(int(sys.argv[2])))
