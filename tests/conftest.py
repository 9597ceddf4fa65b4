"""Shared by all tests: the stages are importable, nothing asks the network, CPU sums keep their
order."""

import os

# One thread each, for the processes that tests start as well: two trainings of two threads on two
# cores slow one another tenfold; and with one thread a sum has one order, so that equality to the
# bit can be asked for.
os.environ["OMP_NUM_THREADS"] = "1"

import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the network is a wrong test
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)


@pytest.fixture
def quiet_process(monkeypatch):
    """Trainers take over Ctrl-C and SIGTERM and seed the global generators: tests give both
    back. No key, address or proxy of the developer's is seen."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def browser_or_skip():
    """Chromium through playwright. Where CI_BROWSER=1 says that it must be there, its absence
    fails."""
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


@pytest.fixture(scope="session")
def repo():
    """The root of the project."""
    return REPO


@pytest.fixture(scope="session")
def tokenizer():
    """The plain tiny tokenizer: template, end token, pad != end. Never change it in a test:
    build your own."""
    from tiny import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """family → folder of a tiny random policy, of every family; to be read and never written."""
    from tiny import EXTRA_FAMILIES, FAMILIES, tiny_model

    home = tmp_path_factory.mktemp("policies")
    return {family: tiny_model(family, home) for family in [*FAMILIES, *EXTRA_FAMILIES]}


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    """A tiny random Llama, to be read and never written."""
    from tiny import tiny_model

    return tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def reward_folder(tmp_path_factory):
    """A tiny random reward model of the Llama shape, to be read and never written."""
    from tiny import tiny_reward_model

    return tiny_reward_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def pairs_file(tmp_path):
    """Sixteen separable pairs as message lists."""
    from tiny import write_pairs

    return write_pairs(tmp_path / "pairs.jsonl")
