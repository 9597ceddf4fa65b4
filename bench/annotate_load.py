"""bench/annotate_load.py: many annotators at once against a real server, which may be killed.

Every annotator votes as fast as the answers come, over one connection per request, and sends every
tenth vote twice. With --kills the server is killed by SIGKILL at random moments and started again;
a vote whose answer did not come is sent again, as the page does. Printed: votes per second,
latencies of a vote until its acknowledgement (fsync included), after an audit: every acknowledged
vote is in the file once, and nothing else is.

Run          python bench/annotate_load.py
             python bench/annotate_load.py --annotators 8 --votes 1250 --kills 20
"""

import argparse
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import requests

REPO = Path(__file__).resolve().parent.parent


class Server:
    """`python annotate.py` on one port, started again after each kill."""

    def __init__(self, out, items):
        self.flags = f"--items {items} --out {out} --overlap 0 --repeat 0 --port".split()
        self.port = 0
        self.start()

    def start(self):
        command = [sys.executable, "annotate.py", *self.flags, str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPO)
        for line in self.process.stdout:
            if found := re.search(r"http://127.0.0.1:(\d+)", line):
                self.port = int(found[1])
                threading.Thread(target=self.process.stdout.read, daemon=True).start()
                return
        raise SystemExit("the server did not start")


def annotate(server, name, votes, acknowledged, seconds):
    """One annotator: appends the id of each acknowledged vote, and the seconds that it took."""
    token, session = None, secrets.token_hex(8)

    def post(path, body):
        """Until an answer comes: a server that is gone comes back, with another page token."""
        nonlocal token
        while True:
            root = f"http://127.0.0.1:{server.port}"
            try:
                if token is None:
                    page = requests.get(root, timeout=60).text
                    token = re.search('data-token="([^"]+)"', page)[1]
                reply = requests.post(
                    root + path, json=body, headers={"X-Token": token}, timeout=60
                )
                if reply.status_code != 403:
                    assert reply.status_code == 200, reply.text
                    return reply.json()
                token = None
            except (requests.RequestException, ValueError, TypeError):
                token = None
                time.sleep(0.05)

    state = post("/next", name)
    for n in range(votes):
        body = dict(
            event="vote",
            event_id=secrets.token_hex(8),
            annotator=name,
            session=session,
            step=state["step"],
            item=state["item"]["item"],
            undoes=None,
            choice="left",
            strength=2,
            reasons=[],
            comment="",
            ms_active=4000,
            ms_wall=5000,
            ts_client="2026-01-01T00:00:00.000Z",
            guidelines_sha256="0" * 64,
        )
        for _ in range(1 + (n % 10 == 0)):
            sent = time.perf_counter()
            state = post("/vote", body)
            seconds.append(time.perf_counter() - sent)
        acknowledged.append(body["event_id"])


def run(annotators=20, votes=200, kills=0, folder=None):
    """One measurement, as a dict."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        items, out = Path(temporary) / "items.jsonl", Path(temporary) / "run"
        rows = [json.loads(line) for line in (REPO / "data/items.jsonl").open(encoding="utf-8")]
        rows = [rows[i % len(rows)] | {"id": f"item-{i}", "gold": None} for i in range(votes + 5)]
        items.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        server, acknowledged, seconds = Server(out, items), [], []
        given = [(server, f"rater{k}", votes, acknowledged, seconds) for k in range(annotators)]
        clients = [threading.Thread(target=annotate, args=one) for one in given]
        start = time.perf_counter()
        for client in clients:
            client.start()
        for kill in range(kills):
            while len(acknowledged) < (kill + 1) * annotators * votes / (kills + 1):
                time.sleep(0.001)
            time.sleep(random.random() * 0.02)
            server.process.kill()
            server.process.wait()
            server.start()
        for client in clients:
            client.join()
        spent = time.perf_counter() - start
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        lines = (out / "annotations.jsonl").read_bytes().split(b"\n")[:-1]
        written = [json.loads(line)["event_id"] for line in lines]
        exported = len((out / "prefs.jsonl").read_bytes().split(b"\n")) - 1
    assert sorted(written) == sorted(acknowledged), "lost or doubled votes"
    assert len(written) == len(set(written)) == annotators * votes == exported
    seconds.sort()
    return dict(
        annotators=annotators,
        votes=len(written),
        kills=kills,
        requests=len(seconds),
        seconds=round(spent, 1),
        votes_per_second=round(len(written) / spent, 1),
        p50_ms=round(1000 * seconds[len(seconds) // 2], 1),
        p99_ms=round(1000 * seconds[int(0.99 * len(seconds))], 1),
        cores=os.cpu_count(),
        load=round(os.getloadavg()[0], 1),
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--annotators", type=int, default=20, help="people at once, 1 to 50 (default 20)")
    add("--votes", type=int, default=200, help="votes of each (default 200)")
    add("--kills", type=int, default=0, help="SIGKILLs of the server, evenly spread (default 0)")
    add("--folder", help="where to write, to measure that disk (default: the temporary folder)")
    args = parser.parse_args(argv)
    print(json.dumps(run(args.annotators, args.votes, args.kills, args.folder)))


if __name__ == "__main__":
    main()
