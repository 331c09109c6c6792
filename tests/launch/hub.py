"""A server on this machine that speaks as much of the Hugging Face hub as downloads ask for."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = hashlib.sha1(b"the only commit").hexdigest()


class Hub:
    """Serves the folders `datasets/OWNER/NAME` and `models/OWNER/NAME` within a folder.

    Args:
        root: Has these folders.

    Attributes:
        asked: Method and path of every request.
        url: For HF_ENDPOINT.
    """

    def __init__(self, root):
        self.asked = asked = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                """Say nothing."""

            def do_GET(self):
                self._answer()

            def do_HEAD(self):
                self._answer()

            def do_POST(self):
                self._answer()

            def _answer(self):
                size = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(size).decode() if size else ""
                asked.append(f"{self.command} {self.path}")
                found = answer(root, unquote(urlsplit(self.path).path), body)
                status, kind, content, headers = found
                self.send_response(status)
                for name, value in {"Content-Type": kind, **headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def answer(root, path, body):
    """Return status, content type, content and headers for a path of the hub."""
    parts = path.strip("/").split("/")
    if parts[0] == "api" and len(parts) >= 4 and parts[1] in ("datasets", "models"):
        folder = root / parts[1] / parts[2] / parts[3]
        if not folder.is_dir():
            return missing("RepoNotFound", "Repository not found")
        return as_json(about(folder, "/".join(parts[2:4]), parts[4:], body))
    kind = "models"
    if parts[0] == "datasets":
        kind, parts = "datasets", parts[1:]
    if len(parts) < 5 or parts[2] != "resolve":
        return missing("EntryNotFound", "no such page")
    folder = root / kind / parts[0] / parts[1]
    if not folder.is_dir():
        return missing("RepoNotFound", "Repository not found")
    file = folder.joinpath(*parts[4:])
    if not file.is_file():
        return missing("EntryNotFound", "Entry not found")
    content = file.read_bytes()
    headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{digest(content)}"'}
    return 200, "application/octet-stream", content, headers


def about(folder, name, rest, body):
    """Return what the API says of a repository, or of its files."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    names = [str(p.relative_to(folder)) for p in files]
    if rest[:1] == ["tree"]:
        return listed(folder, "/".join(rest[2:]))
    if rest[:1] == ["paths-info"]:
        wanted = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        return [entry(folder, folder / path) for path in wanted if (folder / path).exists()]
    return {"_id": "0", "id": name, "sha": COMMIT, "private": False, "disabled": False,
            "gated": False, "downloads": 0, "likes": 0, "tags": [],
            "lastModified": "2026-01-01T00:00:00.000Z", "createdAt": "2026-01-01T00:00:00.000Z",
            "siblings": [{"rfilename": n} for n in names]}  # fmt: skip


def listed(folder, inside):
    """Return the entries below a folder of a repository."""
    return [entry(folder, p) for p in sorted((folder / inside).rglob("*"))]


def entry(folder, path):
    name = str(path.relative_to(folder))
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": COMMIT, "size": 0}
    content = path.read_bytes()
    return {"type": "file", "path": name, "oid": digest(content), "size": len(content)}


def digest(content):
    """Return git's name of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def as_json(content):
    return 200, "application/json", json.dumps(content).encode(), {}


def missing(code, text):
    _, kind, content, _ = as_json({"error": text})
    return 404, kind, content, {"X-Error-Code": code, "X-Error-Message": text}
