"""A vLLM server in this process: our own sampler behind vLLM's routes, with adapters and faults."""

import threading
from pathlib import Path

from flask import Flask, jsonify, request
from safetensors.torch import load_file
from werkzeug.serving import make_server

import common
from parts import sampling
from tiny import policy_of


class EngineServer:
    """One server on a free port.

    loaded   names of the adapters that it holds now; history: of all it was ever given
    draws    {request seed: (seed, number of the first answer)}, so that a request gets the random
             numbers that our own sampler would use
    spoil    what turns a right reply, a dict, into a wrong one; or a (text, status)
    """

    def __init__(self, base, rank):
        self.tokenizer, self.base, self.rank = common.load_tokenizer(base), base, rank
        self.loaded, self.history, self.draws, self.prompts = {}, [], {}, []
        self.spoil, self.load_reply, self.lock = None, None, threading.Lock()
        app = Flask(__name__)
        app.post("/v1/load_lora_adapter")(self.load)
        app.post("/v1/unload_lora_adapter")(self.unload)
        app.post("/v1/completions")(self.complete)
        self.server = make_server("127.0.0.1", 0, app, threaded=True)
        self.url = f"http://127.0.0.1:{self.server.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()

    def load(self):
        if self.load_reply:
            return self.load_reply
        name, path = request.json["lora_name"], Path(request.json["lora_path"])
        weights = load_file(path / "adapter_model.safetensors")
        state = {key.removeprefix("base_model.model."): x for key, x in weights.items()}
        with self.lock:
            policy = policy_of(self.base, trainable=True, lora_rank=self.rank)
            assert not policy.model.load_state_dict(state, strict=False).unexpected_keys
            self.loaded[name] = path, policy
            self.history.append(name)
        return "Success"

    def unload(self):
        self.loaded.pop(request.json["lora_name"], None)
        return "Success"

    def complete(self):
        body = request.json
        path, policy = self.loaded.get(body["model"], (Path("none"), None))
        if not path.is_dir():  # vLLM reads an adapter again from its folder once it has evicted it
            return jsonify(error={"message": f"{body['model']} does not exist"}), 404
        seed, number = self.draws.get(body.get("seed"), (0, 0))
        with self.lock:
            self.prompts.append(body["prompt"])
            drawn = sampling.sample(
                policy, self.tokenizer, [body["prompt"]], body["n"], body["max_tokens"],
                body["temperature"], seed, numbers=range(number, number + body["n"]),
            )  # fmt: skip
        reply = {
            "choices": [
                {"index": i, "token_ids": ids, "logprobs": {"token_logprobs": logps},
                 "finish_reason": "stop" if ended else "length"}
                for i, (ids, logps, ended) in enumerate(
                    zip(drawn.answer_ids, drawn.logps, drawn.finished)
                )
            ]
        }  # fmt: skip
        return self.spoil(reply) if self.spoil else reply
