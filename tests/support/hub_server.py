# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the Hugging Face Hub: folders served over HTTP on this machine.

    with HubServer({"org/model": folder}) as hub:
        hub.environment          # HF_ENDPOINT and a cache of its own, for another process
        with hub.used():         # the same for huggingface_hub in this process
            LLM("org/model")
    hub.fetched                  # [("org/model", "config.json"), ...]

It speaks the routes that huggingface_hub needs to list and download a model: `/api/models/ID`,
`/api/models/ID/revision/REVISION`, `/api/models/ID/tree/REVISION` and
`/ID/resolve/REVISION/FILE`. Files of weights are redirected to `/cdn/...`, as on the hub. A
repository is a folder, or a mapping from revisions to folders whose first one is the default
branch. Attributes change how it answers, for tests of failures.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

Repository = Path | Mapping[str, Path]


@dataclass
class HubServer:
    """A hub with some models.

    Attributes:
        models: Repositories by id.
        token: The access token that `gated` repositories need.
        gated: Ids of repositories that are shown to holders of the token only.
        status: The status of every answer; None: the right one.
        sizes: Sizes that the listing states, by file name, in place of the true ones.
        extra_names: Further file names in every listing.
        cut: Names of files whose next body ends after half of its bytes, with the connection.
        shrunk: Names of files that are half as long as the listing and the headers say.
        hangs: Whether requests are never answered.
        requests: The method and path of every request.
        fetched: The repository and the name of every file whose body was requested.
        cache: The hub's cache for `environment` and `used`.
    """

    models: Mapping[str, Repository]
    token: str = "hf_test"
    gated: frozenset[str] = frozenset()
    status: int | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    extra_names: tuple[str, ...] = ()
    cut: set[str] = field(default_factory=set)
    shrunk: set[str] = field(default_factory=set)
    hangs: bool = False
    requests: list[tuple[str, str]] = field(default_factory=list)
    fetched: list[tuple[str, str]] = field(default_factory=list)

    def __enter__(self) -> HubServer:
        self.cache = Path(tempfile.mkdtemp(prefix="paceline-hub-"))
        self._released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        # A short interval, because `stop` waits for the next look at its flag.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self._is_running = True
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.cache, ignore_errors=True)

    def stop(self) -> None:
        """Takes the hub off the network; its cache stays."""
        if self._is_running:
            self._is_running = False
            self._released.set()
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make huggingface_hub in another process use this hub."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(self.cache),
            "HF_HUB_CACHE": str(self.cache),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0",
        }

    @contextlib.contextmanager
    def used(self, *, offline: bool = False, token: str | None = None) -> Iterator[HubServer]:
        """Makes huggingface_hub in this process use this hub; it reads its environment only once.

        Args:
            offline: As HF_HUB_OFFLINE.
            token: As HF_TOKEN.
        """
        from huggingface_hub import close_session, constants

        template = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        variables = {"HF_TOKEN": token} if token else {}
        with (
            mock.patch.dict("os.environ", variables),
            mock.patch.multiple(
                constants,
                ENDPOINT=self.url,
                HUGGINGFACE_CO_URL_TEMPLATE=template,
                HF_HUB_CACHE=str(self.cache),
                HF_HUB_OFFLINE=offline,
                HF_HUB_DISABLE_XET=True,
            ),
        ):
            # Connections that are kept alive would reach a hub that was stopped.
            close_session()
            yield self
            close_session()

    # ---- answers -------------------------------------------------------------------------------

    def folder_of(self, model: str, revision: str) -> tuple[str, Path] | None:
        """The commit and the folder of a revision, which may be the commit itself."""
        repository = self.models[model]
        branches = repository if isinstance(repository, Mapping) else {"main": repository}
        for branch, folder in branches.items():
            commit = commit_of(model, folder)
            if revision in (branch, commit, commit[:7]):
                return commit, folder
        return None

    def default_branch(self, model: str) -> str:
        """The revision of a request that names none."""
        repository = self.models[model]
        return next(iter(repository)) if isinstance(repository, Mapping) else "main"

    def listing(self, folder: Path) -> list[dict[str, Any]]:
        """Every file of a repository with its size."""
        names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*"))]
        files = {name: folder / name for name in names if (folder / name).is_file()}
        sizes = {name: path.stat().st_size for name, path in files.items()}
        sizes |= dict.fromkeys(self.extra_names, 100) | self.sizes
        return [{"name": name, "size": size} for name, size in sizes.items()]


def commit_of(model: str, folder: Path) -> str:
    """The commit hash of a folder in a repository."""
    return hashlib.sha1(f"{model} {folder}".encode()).hexdigest()


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Keeps standard error clean."""

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            hub.requests.append((self.command, self.path))
            if hub.hangs:
                hub._released.wait()
                self.close_connection = True
                return
            if hub.status is not None:
                self._send(hub.status, b"the hub is out of order")
                return
            path = urllib.parse.urlsplit(self.path).path
            parts = [urllib.parse.unquote(part) for part in path.strip("/").split("/")]
            is_api = parts[:2] == ["api", "models"]
            is_cdn = parts[:1] == ["cdn"]
            rest = parts[2:] if is_api else parts[is_cdn:]
            # "name/..." or "organization/name/..."
            length = next((n for n in (2, 1) if "/".join(rest[:n]) in hub.models), None)
            if length is None:
                if self.headers.get("Authorization"):
                    self._send(404, b"not found", {"X-Error-Code": "RepoNotFound"})
                else:
                    self._send(401, b"Invalid username or password.")
                return
            model, rest = "/".join(rest[:length]), rest[length:]
            is_allowed = self.headers.get("Authorization") == f"Bearer {hub.token}"
            if model in hub.gated and not is_allowed and not is_cdn:
                code = 403 if self.headers.get("Authorization") else 401
                self._send(code, b"restricted", {"X-Error-Code": "GatedRepo"})
                return
            revision = rest[1] if len(rest) > 1 else hub.default_branch(model)
            found = hub.folder_of(model, revision)
            if found is None:
                self._send(404, b"no revision", {"X-Error-Code": "RevisionNotFound"})
                return
            if is_api:
                self._send_listing(model, *found, is_tree=rest[:1] == ["tree"])
            else:
                self._send_file(model, *found, "/".join(rest[2:]), is_cdn=is_cdn)

        def _send_listing(self, model: str, commit: str, folder: Path, *, is_tree: bool) -> None:
            files = hub.listing(folder)
            values: Any
            if is_tree:
                values = [
                    {"type": "file", "path": file["name"], "size": file["size"], "oid": "0" * 40}
                    for file in files
                ]
            else:
                siblings = [{"rfilename": file["name"], "size": file["size"]} for file in files]
                values = {"id": model, "modelId": model, "sha": commit, "siblings": siblings}
            self._send(200, json.dumps(values).encode(), {"Content-Type": "application/json"})

        def _send_file(
            self, model: str, commit: str, folder: Path, name: str, *, is_cdn: bool
        ) -> None:
            path = folder / name
            if ".." in name.split("/") or not path.is_file():
                headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
                self._send(404, b"no file", headers)
                return
            body = path.read_bytes()
            digest = hashlib.sha256(body).hexdigest()
            if name.endswith(".safetensors") and not is_cdn:
                headers = {
                    "Location": f"{hub.url}/cdn{self.path}",
                    "X-Repo-Commit": commit,
                    "X-Linked-Size": str(len(body)),
                    "X-Linked-Etag": f'"{digest}"',
                }
                self._send(302, b"", headers)
                return
            if self.command == "GET":
                hub.fetched.append((model, name))
            if name in hub.shrunk and self.command == "GET":
                body = body[: len(body) // 2]
            headers = {"ETag": f'"{digest}"', "X-Repo-Commit": commit}
            is_cut = name in hub.cut and self.command == "GET"
            if is_cut:
                hub.cut.remove(name)
            self._send(200, body, headers, is_cut=is_cut)

        def _send(
            self,
            status: int,
            body: bytes,
            headers: Mapping[str, str] | None = None,
            *,
            is_cut: bool = False,
        ) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[: len(body) // 2] if is_cut else body)
            if is_cut:
                self.close_connection = True

    return Handler
