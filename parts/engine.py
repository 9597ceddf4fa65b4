"""parts/engine.py: rollouts from vLLM servers, on other GPUs or machines.

An `Engine` takes the place of `sampling.sample` in a trainer with --lora-rank: it loads the adapter
into each server. Prompts and answers are token ids: no text passes a tokenizer twice.

The log-probs that train are our own. A server computes by other kernels, often in another precision,
so its draws are of a policy that is not quite ours; each token of the loss is weighted:
w = min(π / π_server, C)     without gradient; C = --is-clip
[Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"]

Left out     all weights over NCCL, which needs the engine's own code inside this process's group
"""

import hashlib
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import requests
import torch

from common import end_ids, pad_rows
from parts import parallel, sampling
from parts.files import UserError, brief, number
from parts.judging import retrying
from parts.parallel import save_adapter

TIMEOUT = 10, 1800  # seconds to connect, and to wait for a reply
IN_FLIGHT = 64  # requests to each server at a time
# else a server takes these from generation_config.json
PLAIN = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
FAILURES = requests.RequestException, ValueError, LookupError, TypeError  # of a server or its reply


def add_engine_arguments(parser):
    """The flags of rollouts that come from servers."""
    add = parser.add_argument
    # fmt: off
    add("--rollouts-from", metavar="URL", nargs="+", help="vLLM servers that answer in place of this process; needs --lora-rank")
    add("--adapter-dir", metavar="FOLDER", help="where adapters are written for the servers, which must see it (default: OUT/adapters)")
    add("--is-clip", type=number(above=0), default=2.0, help="C: a token's weight is π / π of the server, at most this")
    # fmt: on


def sampler(args, run):
    """What draws answers: `sampling.sample`, or an `Engine`."""
    if not args.rollouts_from:
        return sampling.sample
    if not args.lora_rank:
        raise UserError(
            "--rollouts-from: servers take adapters, not whole weights; add --lora-rank 16"
        )
    args.save_every = 1  # adapters are small; if no server is left, the run goes on from here
    return Engine(args, run)


class Engine:
    """Servers that answer with the policy's adapter.

    name      of the adapter that is loaded; it ends in a digest of the sums of its weights
    down      {URL: why it is not asked}; it is tried again when the next adapter is loaded
    waiting   {URL: requests that it has not answered}
    """

    def __init__(self, args, run):
        self.run, self.source, self.name = run, args.model, ""
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in args.rollouts_from]
        self.folder = Path(args.adapter_dir or run.out / "adapters").resolve()
        self.down, self.waiting, self.lock = {}, dict.fromkeys(self.urls, 0), threading.Lock()
        self.session = requests.Session()
        for url in self.urls:
            self.session.mount(url, retrying(3, IN_FLIGHT))

    def __call__(
        self, policy, tokenizer, prompt_ids, n=1, max_new_tokens=128, temperature=1.0, seed=0,
        rows=None, numbers=None,
    ):  # fmt: skip
        """As `sampling.sample`, with the servers' log-probs; one request for each prompt.

        The seed of a request is a function of `seed` and the number of its first answer: a resumed
        run asks the same. The same answers may not come, for a server's sums depend on its load.
        """
        ends, is_first = end_ids(tokenizer), not self.name
        self.load(policy)
        if is_first and not parallel.rank():
            self.check(policy, tokenizer, prompt_ids[0])

        def ask(p):
            key = p * n if numbers is None else numbers[p]
            body = self.request(prompt_ids[p], ends, n, max_new_tokens, temperature)
            return p, self.post(body | {"seed": request_seed(seed, key)})

        every = range(len(prompt_ids))
        mine = every[parallel.rank() :: parallel.world()] if numbers is None else every
        with ThreadPoolExecutor(IN_FLIGHT * len(self.urls)) as pool:
            drawn = list(parallel.progress(pool.map(ask, mine), "asking", len(mine), delay=3))
        drawn = sorted(parallel.gather(drawn) if numbers is None else drawn)
        ids, logps = zip(*(answer for _, answers in drawn for answer in answers))
        return sampling.rollout_of(tokenizer, prompt_ids, n, [*ids], [*logps])

    # ---- the adapter ----

    def load(self, policy):
        """Write the policy's adapter and load it into every server, if it is another than the one
        that is loaded. Its name carries the step and a digest of its weights' sums: the same name
        is the same model, also for keys and values that a server keeps. Every rank must ask."""
        self.vocabulary = policy.model.get_input_embeddings().num_embeddings
        weights = [w for name, w in policy.model.named_parameters() if ".lora_" in name]
        # their sums, not themselves: this is asked before each turn of an episode
        sums = torch.stack([w.detach().sum(dtype=torch.float64) for w in weights]).cpu().numpy()
        digest = parallel.gather([hashlib.sha256(sums).hexdigest()[:12]])[0]
        if self.name.endswith(digest):
            return
        name, old = f"step-{self.run.step}-{digest}", self.name
        if not parallel.rank():
            folder, half = self.folder / name, self.folder / f"{name}.part"
            shutil.rmtree(folder, ignore_errors=True)
            half.mkdir(parents=True, exist_ok=True)
            save_adapter(policy.model, half, self.source)  # PEFT's layout
            half.rename(folder)  # whole, or not there
            for url in self.urls:
                self.exchange(url, name)
            if old:
                shutil.rmtree(self.folder / old, ignore_errors=True)
        self.down, self.name = parallel.gather([self.down])[0], name

    def exchange(self, url, name):
        """Load an adapter into a server, unload the last one. A server that refuses ends the run; one
        that is gone is left out (not at the start), and taken back when it confirms."""
        path = str(self.folder / name)
        try:
            body = {"lora_name": name, "lora_path": path, "load_inplace": True}
            reply = self.session.post(f"{url}/v1/load_lora_adapter", json=body, timeout=TIMEOUT)
            if self.name and reply.ok:  # a server that was started anew has none
                body = {"lora_name": self.name}
                self.session.post(f"{url}/v1/unload_lora_adapter", json=body, timeout=TIMEOUT)
        except requests.RequestException as error:
            if not self.name:
                raise UserError(f"--rollouts-from {url}: {brief(error, 300)}") from None
            return self.leave_out(url, error)
        if not reply.ok:
            raise UserError(
                f"--rollouts-from {url}: did not load {path}: {reply.status_code} "
                f"{brief(reply.text, 300)}; it needs --enable-lora, "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and to see --adapter-dir"
            )
        if self.down.pop(url, None):
            parallel.say(f"engine     {url} answers again")

    def leave_out(self, url, error):
        if url not in self.down:
            parallel.say(f"engine     {url} is left out: {brief(error, 200)}")
        self.down[url] = brief(error, 200)

    # ---- requests ----

    def request(self, prompt, ends, n, max_new_tokens, temperature):
        return {
            "model": self.name, "prompt": prompt, "n": n, "max_tokens": max_new_tokens,
            "temperature": temperature, "stop_token_ids": ends, "logprobs": 0,
            "return_token_ids": True, **PLAIN,
        }  # fmt: skip

    def post(self, body):
        """`read_answers` of the server with the shortest queue. One that fails is asked no more,
        and its prompts are asked of the others."""
        while True:
            with self.lock:
                alive = [url for url in self.urls if url not in self.down]
                if not alive:
                    raise UserError(
                        "--rollouts-from: no server is left; start one, then --resume. "
                        f"{brief(str(self.down), 600)}"
                    )
                url = min(alive, key=self.waiting.get)
                self.waiting[url] += 1
            try:
                return self.complete(url, body)
            except FAILURES as error:
                with self.lock:
                    self.leave_out(url, error)
            finally:
                with self.lock:
                    self.waiting[url] -= 1

    def complete(self, url, body):
        reply = self.session.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT)
        if reply.status_code in (400, 422):  # every other server would say the same
            raise UserError(f"--rollouts-from {url}: {reply.status_code} {brief(reply.text, 300)}")
        if not reply.ok:
            raise ValueError(f"{reply.status_code} {brief(reply.text, 200)}")
        return read_answers(reply.json(), body, self.vocabulary)

    @torch.no_grad()
    def check(self, policy, tokenizer, prompt):
        """UserError unless our forward gives each server's answer to a prompt the log-probs that
        the server gives it."""
        temperature = self.run.args.temperature
        body = self.request(prompt, end_ids(tokenizer), 1, 16, temperature)
        for url in self.urls:
            try:
                ((answer, server_logps),) = self.complete(url, body)
            except FAILURES as error:
                raise UserError(f"--rollouts-from {url}: {brief(error, 300)}") from None
            rows = pad_rows([prompt], [answer], policy.model.device)
            logps = policy(*rows, temperature)[0][rows[2]].cpu()
            gap = (logps - torch.tensor(server_logps)).abs().mean().item()
            if not gap < (1e-3 if policy.dtype == torch.float32 else 0.1):
                raise UserError(
                    f"--rollouts-from {url}: its log-probs differ from ours by {gap:.2g} a token; "
                    f"serve {self.source} with --dtype {policy.dtype} and --logprobs-mode "
                    "processed_logprobs"
                )
            print(f"engine     {url}: log-probs within {gap:.1e} of ours")


def request_seed(seed, number):
    """One int of 31 bits for (seed, number of the answer); answer g of a request has seed + g.

    >>> request_seed(0, 8), request_seed(1, 8)
    (679961476, 105894079)
    """
    return int(np.random.default_rng([seed, number]).integers(2**31 - 2**10))


def read_answers(reply, body, vocabulary):
    """[(ids, log-probs)] of the n answers of a reply; ValueError for one that is not whole."""
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    if [choice["index"] for choice in choices] != [*range(body["n"])]:
        raise ValueError(f"{len(choices)} answers, expected {body['n']}")
    answers = []
    for choice in choices:
        ids, logps = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        ended, most = choice["finish_reason"] == "stop", body["max_tokens"]
        if not 0 < len(ids) == len(logps) <= most:
            raise ValueError(f"{len(ids)} token ids with {len(logps)} log-probs, of at most {most}")
        if not all(type(i) is int and 0 <= i < vocabulary for i in ids) or not min(logps) > -1e9:
            raise ValueError("a token id that the model does not have, or no finite log-prob")
        ends = [i for i in ids if i in body["stop_token_ids"]]
        if ends != ids[-1:] * ended:
            raise ValueError(f"an answer that {choice['finish_reason']!r} ended has end ids {ends}")
        if not ended and len(ids) < most:
            raise ValueError(
                f"an answer is cut at {len(ids)} of {most} tokens: raise --max-model-len"
            )
        answers.append((ids, logps))
    return answers
