"""bench/annotate_load.py: many annotators at once against a real server, which may be killed.

Every annotator votes as fast as answers come, with one connection per request, and sends every
tenth vote twice. With --kills the server gets SIGKILL at random moments and is started again; a
vote without an answer is sent again, as the page does. Printed after an audit (every acknowledged
vote is in the file once, and nothing else is): votes per second, fsync included.

Run          python bench/annotate_load.py
             python bench/annotate_load.py --annotators 8 --votes 1250 --kills 20
"""

import argparse
import json
import random
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
from parts import files  # noqa: E402


class Server:
    """`python annotate.py` on one port, started again after each kill."""

    def __init__(self, out, items):
        self.flags = f"--items {items} --out {out} --overlap 0 --port".split()
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


def annotate(server, name, votes, acknowledged):
    """One annotator: appends the id of each acknowledged vote."""
    token, key = None, secrets.token_hex(8)

    def post(path, body):
        """Send until an answer comes; a restarted server has another page token."""
        nonlocal token
        while True:
            root = f"http://127.0.0.1:{server.port}"
            try:
                if token is None:
                    page = requests.get(root, timeout=60).text
                    token = re.search('data-token="([^"]+)"', page)[1]
                headers = {"X-Token": token}
                reply = requests.post(root + path, json=body, headers=headers, timeout=60)
                if reply.status_code == 200:
                    return reply.json()
                assert reply.status_code == 403, reply.text
            except (requests.RequestException, ValueError, TypeError):
                time.sleep(0.05)
            token = None

    state = post("/next", {"annotator": name, "key": key})
    for n in range(votes):
        body = dict(
            event="vote",
            event_id=secrets.token_hex(8),
            annotator=name,
            key=key,
            session=key,
            step=state["step"],
            item=state["item"]["item"],
            sha256=state["item"]["sha256"],
            undoes=None,
            choice="left",
            strength=2,
            reasons=[],
            comment="",
            edit=None,
            ms_active=4000,
            ms_wall=5000,
            ts_client="2026-01-01T00:00:00.000Z",
            guidelines_sha256="0" * 64,
        )
        for _ in range(1 + (n % 10 == 0)):
            state = post("/vote", body)
        acknowledged.append(body["event_id"])


def run(annotators=20, votes=200, kills=0):
    """One measurement, as a dict."""
    with tempfile.TemporaryDirectory() as temporary:
        items, out = Path(temporary) / "items.jsonl", Path(temporary) / "run"
        row = next(files.read_jsonl(REPO / "data/items.jsonl"))
        files.write_jsonl(items, (row | {"id": f"item-{i}"} for i in range(votes + 5)))
        server, acknowledged = Server(out, items), []
        with ThreadPoolExecutor(annotators) as pool:
            start = time.perf_counter()
            clients = [
                pool.submit(annotate, server, f"rater{k}", votes, acknowledged)
                for k in range(annotators)
            ]
            for kill in range(kills):
                while len(acknowledged) < (kill + 1) * annotators * votes / (kills + 1):
                    time.sleep(0.001)
                time.sleep(random.random() * 0.02)
                server.process.kill()
                server.process.wait()
                server.start()
            for client in clients:
                client.result()
        spent = time.perf_counter() - start
        server.process.terminate()
        assert server.process.wait(60) == 0
        written = [row["event_id"] for row in files.read_jsonl(out / "annotations.jsonl")]
        exported = len([*files.read_jsonl(out / "prefs.jsonl")])
    assert sorted(written) == sorted(acknowledged), "lost or doubled votes"
    assert len(set(written)) == annotators * votes == exported
    return dict(
        annotators=annotators,
        votes=len(written),
        kills=kills,
        votes_per_second=round(len(written) / spent, 1),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--annotators", type=int, default=20, help="people at once, 1 to 50 (default 20)")
    add("--votes", type=int, default=200, help="votes per person (default 200)")
    add("--kills", type=int, default=0, help="SIGKILLs of the server, evenly spread (default 0)")
    args = parser.parse_args()
    print(json.dumps(run(args.annotators, args.votes, args.kills)))


if __name__ == "__main__":
    main()
