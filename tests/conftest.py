"""Shared by all tests: the stages are importable, nothing asks the network."""

import os

# One thread each, for the processes that tests start as well: two trainings of two threads on two
# cores slow one another tenfold; and with one thread a sum has one order, so that equality to the
# bit can be asked for.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the network is a wrong test
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import shutil
import signal
import sys
import warnings
from pathlib import Path

import pytest
import torch

import tiny

REPO = Path(__file__).resolve().parent.parent
for name in ("MAKEFLAGS", "MAKELEVEL"):  # of `make test`; a make that a test starts is a user's own
    os.environ.pop(name, None)
sys.path.insert(0, str(REPO))
sys.path += [str(REPO / "data"), str(REPO / "examples")]  # scripts that import each other
torch.set_num_threads(1)


# the files that take more than a minute and a half, by their time
LONGEST = "real_model docs annotate_browser audit notebooks distributed half demo".split()


def pytest_collection_modifyitems(items):
    """The longest files first: with one of them among the last, one of two processes would work on
    it alone."""
    order = {f"test_{name}.py": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture
def quiet_process(monkeypatch):
    for name in "OPENAI_API_KEY OPENAI_BASE_URL HTTP_PROXY http_proxy ALL_PROXY".split():
        monkeypatch.delenv(name, raising=False)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def gradients(monkeypatch):
    """The gradient of each optimiser step of a run, flat, before it is clipped."""
    from parts import runs

    found, clip = [], runs.Run.clip

    def spy(run, *given):
        grads = [w.grad.flatten() for w in run.modules.parameters() if w.grad is not None]
        found.append(torch.cat(grads))
        return clip(run, *given)

    monkeypatch.setattr(runs.Run, "clip", spy)
    return found


@pytest.fixture(scope="module")
def fast_half_products():
    """Half-precision matrices are multiplied by the fp32 kernels and the product rounded, which is
    what torch's own CPU kernels compute (test_half.py trains with both). Without instructions for
    bf16 those take fifteen times as long in a backward."""

    def kernel(operation):
        def product(*matrices, **scales):
            dtype = matrices[0].dtype
            if dtype in (torch.bfloat16, torch.float16):
                matrices = [matrix.float() for matrix in matrices]
            out = matrices[0].new_empty(0)  # resized
            return operation(*matrices, **scales, out=out).to(dtype)

        return product

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        for name in ("mm", "bmm", "addmm", "baddbmm"):
            library.impl(name, kernel(getattr(torch, name)), "CPU", allow_override=True)
    yield
    library._destroy()


def browser_or_skip():
    path = os.environ.get("CHROME_BIN") or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    reason = None if path else "no Chromium found: install the package chromium or set CHROME_BIN"
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        reason = "playwright is not installed: pip install playwright"
    if reason and os.environ.get("CI_BROWSER") == "1":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    return sync_playwright, path


@pytest.fixture(scope="module")
def browser():
    sync_playwright, path = browser_or_skip()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def copy_of_the_repository(target):
    """Without what the commands make: nothing that lies in runs/ here may help."""
    made = (".git", ".venv", "runs", ".*_cache", "__pycache__", ".ipynb_checkpoints")
    return shutil.copytree(REPO, target, ignore=shutil.ignore_patterns(*made))


@pytest.fixture(scope="session")
def repo():
    return REPO


@pytest.fixture(scope="session")
def tokenizer():
    """The plain tiny tokenizer: template, end token, pad != end."""
    return tiny.tiny_tokenizer()


class Folders(dict):
    """family → folder of a tiny random model, made when it is asked for; never to be written."""

    def __init__(self, make, home):
        self.make, self.home = make, home

    def __missing__(self, family):
        self[family] = self.make(family, self.home)
        return self[family]


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return Folders(tiny.tiny_model, tmp_path_factory.mktemp("policies"))


@pytest.fixture(scope="session")
def reward_folders(tmp_path_factory):
    return Folders(tiny.tiny_reward_model, tmp_path_factory.mktemp("rewards"))


@pytest.fixture(scope="session")
def llama_folder(folders):
    return folders["llama"]


@pytest.fixture(scope="session")
def reward_folder(reward_folders):
    return reward_folders["llama"]
