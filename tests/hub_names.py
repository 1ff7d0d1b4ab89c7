"""What tests of names on the hub share: a cache made by hand, and a server on this machine in place of the hub."""

import http.server
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMMIT = "1" * 40
NAME = "somebody/a-small-bert"


def cached(cache: Path, save: Callable[[Path], Any], commit: str = COMMIT, revision: str = "main") -> dict[str, Any]:
    """A cache that holds one revision of the repository, written by `save`; the arguments that find it."""
    repository = cache / ("models--" + NAME.replace("/", "--"))
    save(repository / "snapshots" / commit)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / revision).write_text(commit)
    return {"cache_dir": cache, "local_files_only": True}


class _Hub(http.server.BaseHTTPRequestHandler):
    """Just enough of the hub's protocol: files of one directory, by name and revision."""

    directory: Path
    asked: list[str]

    def _send(self, with_body: bool) -> None:
        prefix = next((p for p in (f"/{NAME}/resolve/{r}/" for r in ("main", COMMIT)) if self.path.startswith(p)), None)
        path = self.directory / self.path.removeprefix(prefix or "")
        found = prefix is not None and path.is_file()
        body = path.read_bytes() if found else b""
        self.send_response(200 if found else 404)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{path.name}-{len(body)}"')
        self.send_header("Content-Length", str(len(body)))
        if not found:
            is_ours = self.path.startswith(f"/{NAME}/")
            self.send_header("X-Error-Code", "EntryNotFound" if is_ours else "RepoNotFound")
        self.end_headers()
        if with_body and found:
            self.asked.append(path.name)
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self._send(False)

    def do_GET(self) -> None:
        self._send(True)

    def log_message(self, *_: Any) -> None:
        pass


def run_beside_hub(code: str, files: Path) -> tuple[str, list[str]]:
    """(what a process prints whose hub has these files, the names of the files that it fetched)."""
    handler = type("Handler", (_Hub,), {"directory": files, "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        environment = {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "PATH": "", "NO_PROXY": "*"}
        command = [sys.executable, "-c", code]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        server.shutdown()
    assert result.returncode == 0, result.stderr
    return result.stdout, handler.asked  # type: ignore[attr-defined]
