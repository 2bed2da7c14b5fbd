"""StandInHub: as much of a hub's HTTP interface as an upload needs, on this machine."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StandInHub:
    """Repositories in memory. It takes files of any size in the commit itself, which a real hub does not.

    Attributes:
        files: by (repository, branch), path to content.
        commits: (repository, branch, message) in order.
        tokens: that requests came with.
        created: what the requests for new repositories said.
        refuse: answer every request with an error.
        hold: a commit waits until it is set.
    """

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.commits: list[tuple[str, str, str]] = []
        self.tokens: set[str] = set()
        self.created: list[dict[str, Any]] = []
        self.refuse = False
        self.hold = threading.Event()
        self.hold.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON for a request."""
        words = path.partition("?")[0].strip("/").split("/")
        if self.refuse:
            return 403, {"error": "refused"}
        if words == ["api", "validate-yaml"]:
            return 200, {"errors": [], "warnings": []}
        if words == ["api", "repos", "create"]:
            asked = json.loads(body)
            self.created.append(asked)
            name = f"{asked.get('organization') or 'someone'}/{asked['name']}"
            self.files.setdefault((name, "main"), {})
            return 200, {"url": f"{self.url}/{name}", "name": name}
        repo, action = "/".join(words[2:4]), words[4] if len(words) > 4 else "info"
        if action == "branch":
            self.files.setdefault((repo, words[5]), {})
            return 200, {}
        if action == "preupload":
            asked = json.loads(body)["files"]
            plain = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            return 200, {"files": [{"path": f["path"], **plain} for f in asked]}
        if action == "commit":
            return self._commit(repo, words[5], [json.loads(line) for line in body.splitlines()])
        return 200, {"id": repo, "sha": "0" * 40, "siblings": []}

    def _commit(self, repo: str, branch: str, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        assert self.hold.wait(30)
        files = self.files[repo, branch]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.commits.append((repo, branch, value["summary"]))
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/{len(self.commits)}", "commitOid": "1" * 40}


def _handler(hub: StandInHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply()

        def do_POST(self) -> None:
            self._reply()

        def _reply(self) -> None:
            hub.tokens.add(self.headers.get("authorization", ""))
            body = self._body()
            status, content = hub.answer(self.command, self.path, body)
            out = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(out)))
            self.end_headers()
            self.wfile.write(out)

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("content-length", 0)))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
