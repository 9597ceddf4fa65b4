"""bench/: nobody wins by doing less. The two sides must have the same losses; ratios are of neighbours."""

import sys

import pytest

from case_rows import each
from conftest import REPO

sys.path.insert(0, str(REPO / "bench"))
import run as bench


def fake(script, **more):
    """What a run of ours, two seconds long, or of theirs, three seconds, reports."""
    times = dict.fromkeys(bench.TIMES.values(), 2.0 if script == "ours.py" else 3.0)
    return dict(losses=[0.7, 0.6], peak=500.0, version="trl 1.16.0") | times | more


# 9e-5 is rounding, 1.1e-4 another computation; who stops early would be fast; NaN compares as False
@each("cases", of="bench")
def test_no_ratio_unless_both_did_the_same(losses, same, monkeypatch):
    theirs = {"ours.py": {}, "theirs.py": {"losses": losses}}
    monkeypatch.setattr(bench, "run_child", lambda a, name, **k: fake(name, **theirs[name]))
    args = bench.parse_args(["dpo", "--rounds", "2", "--device-batch", "1"])
    if same:
        assert len(bench.compare(args, {})) == 2
    else:
        with pytest.raises(SystemExit, match="no ratio"):
            bench.compare(args, {})


def test_the_opponent_is_the_fastest_that_was_tried(monkeypatch):
    seconds = iter([5.0, 2.0, 3.0, 4.0, 1.0])
    monkeypatch.setattr(bench, "run_child", lambda *a, **k: {"loop_cpu": next(seconds)})
    args = bench.parse_args(["sft", "--device-batch", "1", "2", "4"])
    found = {"per_device_train_batch_size": 4, "train_sampling_strategy": "batch_rebalance"}
    assert bench.fastest(args, {}) == found


def test_ratios_are_of_neighbours():
    """TRL / ours for time, here 1, 2 and 1.5; ours / TRL for memory; per 1000 drawn tokens."""
    pairs = [(fake("ours.py", cpu=x), fake("theirs.py", cpu=y, peak=1000.0)) for x, y in ((2, 2), (3, 6), (4, 6))]  # fmt: skip
    page = "\n".join(bench.table("dpo", pairs))
    assert "| process, CPU s | 3.0 | 6.0 | **1.50** [1.00, 2.00] |" in page
    assert "| peak memory, MiB | 500.0 | 1000.0 | **0.50**" in page
    drawn = [(fake("ours.py", tokens=2000), fake("theirs.py", tokens=500))]
    assert "| 1.0 | 6.0 | **6.00**" in bench.table("sample", drawn)[2]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["dpo", "sft", "reward", "sample"])
def test_end_to_end(task, capfd):
    for name in ("trl", "datasets"):
        pytest.importorskip(name, reason=f"needs the development dependency {name}")
    bench.main([task, *"--pairs 8 --rounds 1 --device-batch 2 --new-tokens 8".split()])
    printed = capfd.readouterr().out
    assert "| loop, CPU s |" in printed and ("losses agree within" in printed) == (task != "sample")
