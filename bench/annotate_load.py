"""bench/annotate_load.py: many annotators at once against a real server of annotate.py.

Every annotator votes as fast as the answers come (or at --rate), over a connection of its own per request as the page
does, and sends every tenth vote twice. Printed: votes a second, latencies of a vote until its acknowledgement (fsync
included), and the audit: every acknowledged vote is in the file once, and nothing else is.

Run          python bench/annotate_load.py
             python bench/annotate_load.py --annotators 20 --votes 200 --rate 100
"""

import argparse
import http.client
import json
import multiprocessing
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


def start_server(folder, items):
    """(process, port) of `python annotate.py` on a free port."""
    command = [
        sys.executable,
        str(REPO / "annotate.py"),
        "--items",
        str(items),
        "--out",
        str(folder),
    ]
    process = subprocess.Popen(
        [*command, "--port", "0", "--overlap", "0", "--repeat", "0"], stdout=subprocess.PIPE, text=True, cwd=REPO
    )  # fmt: skip
    for line in process.stdout:
        if found := re.search(r"http://127.0.0.1:(\d+)", line):
            threading.Thread(
                target=process.stdout.read, daemon=True
            ).start()  # the pipe stays empty
            return process, int(found[1])
    raise SystemExit("the server did not start")


def call(port, method, path, body=None, token=""):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json", "X-Token": token}
    connection.request(method, path, json.dumps(body) if body else None, headers)
    reply = connection.getresponse()
    data = json.loads(reply.read())
    connection.close()
    return reply.status, data


def annotate(port, name, votes, pause, begin, results):
    """One annotator: seconds of each vote, and the ids that were acknowledged."""
    options = call(port, "GET", "/api/session")[1]
    token, session = options["token"], secrets.token_hex(8)
    state = call(port, "POST", "/api/next", {"annotator": name, "session": session}, token)[1]
    seconds, acknowledged = [], []
    begin.wait()
    start = time.perf_counter()
    for n in range(votes):
        time.sleep(max(0.0, start + n * pause - time.perf_counter()))
        body = {
            "event": "vote", "event_id": secrets.token_hex(8), "annotator": name, "session": session, "step": state["step"],
            "item": state["item"]["item"], "undoes": None, "choice": "left", "strength": 2, "reasons": [], "comment": "",
            "ms_active": 4000, "ms_wall": 5000, "ts_client": "2026-01-01T00:00:00.000Z", "guidelines_sha256": options["guidelines_sha256"],
        }  # fmt: skip
        for _ in range(1 + (n % 10 == 0)):
            sent = time.perf_counter()
            status, state = call(port, "POST", "/api/vote", body, token)
            seconds.append(time.perf_counter() - sent)
            assert status == 200, state
        acknowledged.append(body["event_id"])
    results.put((seconds, acknowledged, time.perf_counter() - start))


def group(port, names, votes, pause, begin, results):
    """The annotators of one client process: one process for all would measure its own interpreter lock."""
    threads = [
        threading.Thread(target=annotate, args=(port, n, votes, pause, begin, results))
        for n in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def processor_seconds(pid):
    """Seconds that a process has spent on a core so far; 0 where /proc tells nothing."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def run(annotators=20, votes=200, rate=0.0, processes=4, folder=None):
    """One measurement, as a dict."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        items, out = Path(temporary) / "items.jsonl", Path(temporary) / "run"
        rows = [json.loads(line) for line in (REPO / "data/items.jsonl").open(encoding="utf-8")]
        rows = [
            rows[i % len(rows)] | {"id": f"item-{i:05d}", "gold": None} for i in range(votes + 5)
        ]
        items.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        server, port = start_server(out, items)
        names = [f"rater{k}" for k in range(annotators)]
        pause = annotators / rate if rate else 0.0
        begin, results = multiprocessing.Barrier(annotators), multiprocessing.Queue()
        clients = [
            multiprocessing.Process(target=group, args=(port, names[k::processes], votes, pause, begin, results))
            for k in range(processes)
        ]  # fmt: skip
        for client in clients:
            client.start()
        before = processor_seconds(server.pid)
        done = [results.get(timeout=600) for _ in names]
        busy = processor_seconds(server.pid) - before
        for client in clients:
            client.join()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        lines = (out / "annotations.jsonl").read_bytes().split(b"\n")[:-1]
        written = [json.loads(line)["event_id"] for line in lines]
        exported = len((out / "prefs.jsonl").read_bytes().split(b"\n")) - 1
    seconds = sorted(s for part, _, _ in done for s in part)
    acknowledged = [event for _, part, _ in done for event in part]
    assert sorted(written) == sorted(acknowledged), (
        "the file does not hold the acknowledged votes, each once"
    )
    assert exported == len(written)
    spent = max(part for _, _, part in done)

    def at(share):
        return round(1000 * seconds[min(len(seconds) - 1, int(share * len(seconds)))], 1)

    return {
        "annotators": annotators, "votes": len(written), "requests": len(seconds), "rate_asked": rate or None,
        "votes_per_second": round(len(written) / spent, 1), "p50_ms": at(0.5), "p99_ms": at(0.99), "max_ms": at(1),
        "server_cpu_ms_per_request": round(1000 * busy / len(seconds), 2),
        "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--annotators", type=int, default=20, help="people at once, 1 to 50 (default 20)")
    add("--votes", type=int, default=200, help="votes of each (default 200)")
    add(
        "--rate",
        type=float,
        default=0.0,
        help="votes a second of all together; 0: as fast as they can",
    )
    add("--folder", help="where to write, to measure that disk (default: the temporary folder)")
    args = parser.parse_args(argv)
    print(json.dumps(run(args.annotators, args.votes, args.rate, folder=args.folder)))


if __name__ == "__main__":
    main()
