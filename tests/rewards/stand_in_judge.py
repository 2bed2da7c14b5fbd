"""A stand-in for a judge's server: OpenAI's protocol, no model. Prints its port.

What it does depends on the answer it is to grade: a number is the grade, a word the way it misbehaves.
"""

import json
import re
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REQUESTS: Counter[str] = Counter()


class StandInJudge(BaseHTTPRequestHandler):
    """Grades by rote."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = re.search(r"<answer>\n(.*?)\n</answer>", body["messages"][0]["content"], re.DOTALL)
        answer = found[1] if found else ""
        REQUESTS[answer] += 1
        if self.path != "/v1/chat/completions" or self.headers.get("Authorization") != "Bearer open sesame":
            return self.reply(401, {"error": "who are you"})
        if answer == "busy" and REQUESTS[answer] < 3:
            return self.reply(503, {"error": "busy"})
        if answer == "quota" and REQUESTS[answer] < 2:
            return self.reply(429, {"error": "slow down"}, {"Retry-After": "0.3"})
        if answer == "down":
            return self.reply(500, {"error": "down"})
        if answer == "drops" and REQUESTS[answer] < 2:
            self.close_connection = True
            return None
        if answer == "hangs":
            time.sleep(5)
        text = {"babble": "I would rather not say.", "hundred": "Score: 100"}.get(answer)
        grade = answer if answer.isdigit() else "6"
        text = text or f"A grade of Score: 1 would be unfair.\nNot bad.\nScore: {grade}"
        choice = {"message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        return self.reply(200, {"choices": [choice], "usage": usage})

    def reply(self, status: int, body: dict, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Silence."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandInJudge)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()
