"""What runs in a ``Network``: cache servers of nodes, and the engines that they share."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.caches import PATIENCE_SECONDS, eventually
from tests.remote.networks import Network

from kvstrata.core.errors import ServerUnavailable
from kvstrata.server.client import observe
from kvstrata.server.sockets import runtime_directory

Start = Callable[[Network, Path], AbstractContextManager[str]]
"""Starts an engine in the hub; the address of a tier on it, until the context ends."""

_PROGRAMS = Path(sys.executable).parent


@contextmanager
def cache_server(
    network: Network, name: str, tier: str, log: Path, *options: str
) -> Iterator[Path]:
    """The socket of a ``kvstrata server`` of *tier* at *name*; at the end it stops as it should."""
    socket = runtime_directory() / f"node-{os.getpid()}-{name}-{random.randrange(1 << 30)}"
    command = [sys.executable, "-m", "kvstrata", "server", "--socket", str(socket)]
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment |= {"AWS_ACCESS_KEY_ID": "anybody", "AWS_SECRET_ACCESS_KEY": "anything"}
    environment["KVSTRATA_RECOMPUTE"] = "never"  # the tests' models compute faster than any load
    process = network.start(
        name, [*command, "--remote", tier, *options], log, environment=environment
    )

    def answers() -> bool:
        assert process.poll() is None, f"the server has ended: {log.read_text()}"
        try:
            observe(socket).close()
        except (ServerUnavailable, FileNotFoundError):
            return False
        return True

    try:
        eventually(answers, "the server does not start")
        yield socket
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        process.kill()
        process.wait()


@contextmanager
def valkey(network: Network, folder: Path) -> Iterator[str]:
    host = network.host("hub")
    command = ["redis-server", "--bind", host, "--protected-mode", "no", "--port", "6379"]
    command += ["--save", "", "--dir", str(folder)]
    with running(network, "hub", command, folder / "redis.log", (host, 6379)):
        yield f"valkey://{host}:6379"


@contextmanager
def objects(network: Network, folder: Path) -> Iterator[str]:
    host = network.host("hub")
    command = [str(_PROGRAMS / "moto_server"), "-H", host, "-p", "5000"]
    with running(network, "hub", command, folder / "moto.log", (host, 5000)):
        make_bucket = (
            f"import boto3; boto3.client('s3', endpoint_url='http://{host}:5000', "
            "region_name='us-east-1', aws_access_key_id='a', aws_secret_access_key='b')"
            ".create_bucket(Bucket='kv-blocks')"
        )
        subprocess.run([*network.command("hub"), sys.executable, "-c", make_bucket], check=True)
        yield f"s3://kv-blocks/shared?endpoint=http://{host}:5000&region=us-east-1"


@contextmanager
def mooncake(network: Network, folder: Path) -> Iterator[str]:
    host = network.host("hub")
    command = [
        str(_PROGRAMS / "mooncake_master"),
        f"--rpc_address={host}",
        "--rpc_port=51051",
        f"--metrics_host={host}",
        "--metrics_port=51093",
    ]
    with running(network, "hub", command, folder / "master.log", (host, 51051)):
        yield f"mooncake://{host}:51051?segment=64MiB"


@contextmanager
def running(
    network: Network, name: str, command: Sequence[str], log: Path, address: tuple[str, int]
) -> Iterator[None]:
    """*command* at *name* until the context ends; it listens at *address*."""
    process = network.start(name, command, log)
    probe = f"import socket; socket.create_connection({address!r}, 1)"

    def listens() -> bool:
        assert process.poll() is None, f"{command[0]} has ended: {log.read_text()}"
        ask = [*network.command(name), sys.executable, "-c", probe]
        return subprocess.run(ask, check=False, capture_output=True).returncode == 0

    try:
        eventually(listens, f"{command[0]} does not listen: {log.read_text()}")
        yield
    finally:
        process.kill()
        process.wait()
