"""A real S3 server on this machine, started for a test: moto's, where it is installed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow.fs import FSSpecHandler

from processes import running

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


@dataclass(frozen=True)
class Server:
    """port: where it listens."""

    port: int
    process: subprocess.Popen[Any]

    @property
    def options(self) -> str:
        """The query of an address that leads to this server."""
        return f"?endpoint_override=127.0.0.1:{self.port}&scheme=http&region=us-east-1"

    def address(self, below: str) -> str:
        """Of bucket/path."""
        return f"s3://{below}{self.options}"

    def client(self, service: str = "s3", **keys: str) -> Any:
        """A client of boto3, as the owner of the server."""
        import boto3

        owner = {"aws_access_key_id": "test", "aws_secret_access_key": "test", **keys}
        return boto3.client(
            service, endpoint_url=f"http://127.0.0.1:{self.port}", region_name="us-east-1", **owner
        )

    def upload(self, folder: Path, bucket: str, prefix: str) -> None:
        """Copy a folder, as `aws s3 cp --recursive` does."""
        client = self.client()
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                key = f"{prefix}/{path.relative_to(folder).as_posix()}"
                client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Keys of a bucket, without the empty ones that stand for folders."""
        found = self.client().list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
        return [item["Key"] for item in found if not item["Key"].endswith("/")]

    def require_rights(self) -> None:
        """From now on, callers may do only what a policy allows them."""
        self._tell("reset-auth", b"0")

    def _tell(self, what: str, content: bytes) -> None:
        url = f"http://127.0.0.1:{self.port}/moto-api/{what}"
        asked = urllib.request.Request(url, content, {"Content-Type": "text/plain"}, method="POST")
        with urllib.request.urlopen(asked) as answer:
            assert json.load(answer)["status"] == "ok"


class InMemory(FSSpecHandler):
    """Object storage in memory, whose objects know when they were written."""

    @staticmethod
    def _create_file_info(path: str, info: dict[str, Any]) -> Any:
        if "created" in info:
            info = {**info, "mtime": info["created"]}
        return FSSpecHandler._create_file_info(path.lstrip("/"), info)


def wait_until_it_answers(process: subprocess.Popen[Any], port: int) -> None:
    """Wait until a server listens; fail if it ends before."""
    deadline = time.monotonic() + 120
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.1)


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def s3_server() -> Iterator[Server]:
    """Start a server, and end it with the block."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with running(command, env={**os.environ, **KEYS}, **quiet) as process:
        wait_until_it_answers(process, port)
        yield Server(port, process)
