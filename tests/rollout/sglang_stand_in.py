"""StandInSGLang: the routes of SGLang's HTTP API that the engine uses, answered by a transformers model.

It is not SGLang. Requests and answers have the fields of SGLang 0.5.23; weights are read from the folder that
it is told, as `from_pretrained` reads them.
"""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

from transformers import LlamaForCausalLM

from lit_rl.batch import RolloutBatch, padded
from lit_rl.rollout.sampling import Sampling

from .tiny import bound, prompts_of


class StandInSGLang:
    """A server on a port that stays the same over restarts; `stop` forgets all weights but the first."""

    def __init__(self, **shape: Any) -> None:
        self.shape, self.port = shape, 0
        self.status: list[int] = []  # of the next answers, where they are not 200
        self.start()

    def start(self) -> None:
        from .tiny import llama

        self.served: list[list[int]] = []
        self.version, self.lock = "default", Lock()
        self.engine = bound(llama(seed=99, **self.shape))
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.reply(200, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    if outer.status:
                        self.reply(outer.status.pop(), {})
                    elif self.path == "/update_weights_from_disk":
                        self.reply(200, outer.update(body))
                    else:
                        assert self.path == "/generate"
                        self.reply(200, outer.generate(body))

            def reply(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self.http.server_address[1]
        Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def update(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["flush_cache"] is True
        self.engine = bound(LlamaForCausalLM.from_pretrained(body["model_path"]))
        self.version = body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights."}

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["return_logprob"] is True
        ids, asked = body["input_ids"], body["sampling_params"]
        self.served.append(ids)
        meta: dict[str, Any] = {"weight_version": self.version, "finish_reason": {"type": "length"}}
        if "logprob_start_len" in body:
            meta |= self.scored(ids, body["top_logprobs_num"])
        else:
            meta |= self.written(ids, asked)
        return {"text": "", "output_ids": [], "meta_info": meta}

    def written(self, ids: list[int], asked: dict[str, Any]) -> dict[str, Any]:
        assert asked["no_stop_trim"] and asked["ignore_eos"]
        sampling = Sampling(
            temperature=asked["temperature"],
            top_p=asked["top_p"],
            top_k=asked["top_k"],
            min_p=asked["min_p"],
            repetition_penalty=asked["repetition_penalty"],
            max_completion_length=asked["max_new_tokens"],
            ignore_eos=True,
            stop_token_ids=asked["stop_token_ids"],
            stop=asked["stop"],
        )
        rows = self.engine.generate(
            prompts_of([ids]), num_generations=1, sampling=sampling, seed=asked["sampling_seed"], step=0
        )
        assert rows.completion_ids is not None and rows.rollout_logps is not None
        assert rows.finish_reason is not None
        tokens, logps = rows.completion_ids[0].tolist(), rows.rollout_logps[0].tolist()
        return {
            "output_token_logprobs": [[logp, token, None] for token, logp in zip(tokens, logps, strict=True)],
            "finish_reason": {"type": rows.finish_reason[0]},
        }

    def scored(self, ids: list[int], topk: int) -> dict[str, Any]:
        rest, length = padded([ids[1:]], "right")
        rows = RolloutBatch(*padded([ids[:1]], "left"), prompt_row=length * 0)
        rows.completion_ids, rows.completion_len = rest, length
        scores = self.engine.score(rows, topk=topk)
        own = zip(scores.logps[0].tolist(), ids[1:], strict=True)
        tops = zip(scores.top_logps[0].tolist(), scores.top_ids[0].tolist(), strict=True)
        return {
            "input_token_logprobs": [[None, ids[0], None], *([logp, token, None] for logp, token in own)],
            "input_top_logprobs": [
                None,
                *([[logp, token, None] for logp, token in zip(*pair, strict=True)] for pair in tops),
            ],
            "output_token_logprobs": [[-1.0, 0, None]],
        }
