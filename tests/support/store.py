"""An S3 server on the loopback, and a proxy before it that spoils what a test says.

It is moto's server, which keeps everything in memory. Clients are told of it, or of the proxy, by
the variables that they take credentials from.
"""

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from torchmars.storage.objects import connect

BUCKET = "bucket"
SECRETS = {"AWS_ACCESS_KEY_ID": "AKIAOFATEST", "AWS_SECRET_ACCESS_KEY": "secret-of-a-test"}


def variables(address: str) -> dict[str, str]:
    """The environment variables of clients of the store at an address."""
    return SECRETS | {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": address}


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Run a server with an empty bucket; its address. The variables name it meanwhile."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    address = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    # All servers of a process share what they keep, and connections outlive them.
    urllib.request.urlopen(f"{address}/moto-api/reset", data=b"").close()
    before = dict(os.environ)
    os.environ.update(variables(address))
    connect.cache_clear()
    try:
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield address
    finally:
        connect.cache_clear()
        os.environ.clear()
        os.environ.update(before)
        server.stop()


def free_port() -> int:
    """A port of the loopback that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


class ServerProcess:
    """The server in a process of its own, which can be killed. What it kept is gone then."""

    def __init__(self) -> None:
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, without any bucket, and wait until it answers."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", f"{self.port}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> "ServerProcess":
        """Start it with an empty bucket."""
        import boto3

        self.start()
        boto3.client(
            "s3",
            endpoint_url=self.address,
            region_name="us-east-1",
            aws_access_key_id=SECRETS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=SECRETS["AWS_SECRET_ACCESS_KEY"],
        ).create_bucket(Bucket=BUCKET)
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()


@dataclass
class Request:
    """What a client asks for."""

    method: str
    path: str
    number: int
    """How many came before it."""
    body: bytes = b""
    """What is passed on: a fault may change it."""
    headers: Message = field(default_factory=Message)


# What a fault makes of an answer: (status, headers, body), or None for a connection that is cut.
Answer = tuple[int, list[tuple[str, str]], bytes]
Fault = Callable[[Request, Callable[[], Answer]], Answer | None]


@dataclass
class Proxy:
    """What stands before a store, and lets each request pass through a fault."""

    target: str
    fault: Fault = lambda request, passed: passed()
    requests: list[Request] = field(default_factory=list)
    connections: set[socket.socket] = field(default_factory=set)

    def __enter__(self) -> "Proxy":
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                proxy.connections.add(self.connection)

            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):  # of a client that is gone
                    super().handle()

            def finish(self) -> None:
                proxy.connections.discard(self.connection)
                with contextlib.suppress(OSError):
                    super().finish()

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                request = Request(self.command, self.path, len(proxy.requests), body, self.headers)
                proxy.requests.append(request)

                try:
                    self.send(proxy.fault(request, lambda: proxy._pass(request, self.headers)))
                except OSError:  # whoever asked is gone, or the server is
                    self.close_connection = True

            def send(self, answer: Answer | None) -> None:
                if answer is None:
                    self.close_connection = True
                    self.connection.close()
                    return
                status, headers, content = answer
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() not in ("connection", "transfer-encoding"):
                        self.send_header(name, value)
                if not any(name.lower() == "content-length" for name, _ in headers):
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command == "HEAD":
                    return
                self.wfile.write(content)
                said = next((int(each[1]) for each in headers if each[0] == "Content-Length"), 0)
                self.close_connection |= len(content) < said  # cut short

            def log_message(self, *unused: Any) -> None: ...

        for method in ("GET", "PUT", "POST", "HEAD", "DELETE"):
            setattr(Handler, f"do_{method}", Handler.answer)
        self.server = ThreadingHTTPServer(("127.0.0.1", free_port()), Handler)
        self.server.daemon_threads = True
        self._serve()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def _pass(self, request: Request, headers: Message) -> Answer:
        own = dict(headers)
        if "Content-Length" in own:
            own["Content-Length"] = f"{len(request.body)}"
        connection = http.client.HTTPConnection(self.target.removeprefix("http://"))
        connection.request(request.method, request.path, request.body, own)
        got = connection.getresponse()
        content = got.read()
        connection.close()
        return got.status, got.getheaders(), content

    def _serve(self) -> None:
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def refuse(self) -> None:
        """Cut all connections, and refuse new ones until `accept`."""
        self.server.shutdown()
        self.server.socket.shutdown(socket.SHUT_RDWR)  # it still has its port
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def accept(self) -> None:
        """Accept connections again."""
        self.server.socket.listen()
        self._serve()

    @property
    def address(self) -> str:
        """Where clients reach it."""
        return f"http://127.0.0.1:{self.server.server_address[1]}"
