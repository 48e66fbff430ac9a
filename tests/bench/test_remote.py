"""The ratios and the table of bench/remote.py, and that what it times is right on real servers."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from bench.remote import Cost, Turn, failures, markdown, measure, parse
from bench.remote_raw import RawS3, signed


def turn(repetition: int, raw: tuple[float, float], store: tuple[float, float]) -> Turn:
    proved = Cost(1.25 * raw[0], 2 * raw[1])
    return Turn("valkey", 4 << 20, 4, "read", repetition, Cost(*raw), proved, Cost(*store))


def test_ratios_are_of_pairs_and_survive_a_machine_that_slows_down() -> None:
    turns = [turn(n, (k, k / 2), (2 * k, 3 * k)) for n, k in enumerate((1.0, 10.0, 100.0))]
    row = markdown(turns).splitlines()[2]
    assert [cell.strip() for cell in row.split("|")[5:-1]] == [
        *("0.10", "0.08", "0.05", "0.50", "0.62"),  # GB/s and their ratios
        *("5.000", "10.000", "30.000", "6.00", "3.00"),  # CPU seconds a GB and theirs
    ]


@pytest.mark.parametrize(
    ("store", "missed"),
    [((1.11, 1.15), 0), ((1.12, 1.0), 1), ((1.0, 1.16), 1), ((2.0, 2.0), 2)],
)
def test_a_bound_that_is_missed_is_told(store: tuple[float, float], missed: int) -> None:
    found = failures([turn(1, (1.0, 1.0), store)])
    assert len(found) == missed
    assert all("valkey, 4 MiB, read, 4 threads" in line for line in found)


def test_blocks_may_be_smaller_than_a_mebibyte() -> None:
    one, ten = Cost(1.0, 1.0), Cost(10.0, 10.0)
    (line, _) = failures([Turn("s3", 64 << 10, 1, "read", 1, one, one, ten)])
    assert line.startswith("s3, 64 KiB, read, 1 thread:")


def test_writes_and_lookups_have_no_bound() -> None:
    one, ten = Cost(1.0, 1.0), Cost(10.0, 10.0)
    assert not failures([Turn("s3", 1 << 20, 1, "write", 1, one, one, ten)])
    assert not failures([Turn("s3", 1 << 20, 1, "found", 1, None, None, ten)])


def test_requests_are_signed_as_aws_has_it() -> None:
    fields = signed("GET", "examplebucket", "/a", ("AKIDEXAMPLE", "secret"))
    assert fields["authorization"].startswith("AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/")
    assert len(fields["authorization"].rpartition("Signature=")[2]) == 64


class Impatient(BaseHTTPRequestHandler):
    """Ends a connection after each answer and does not say so, as servers do with one that is idle."""

    protocol_version = "HTTP/1.1"

    def do_DELETE(self) -> None:
        self.send_response(204)
        self.end_headers()
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def test_objects_are_removed_though_the_server_has_ended_the_connection() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Impatient) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        raw = RawS3(f"127.0.0.1:{server.server_port}", "bucket", ("key", "secret"))
        try:
            raw.remove(["a"])
            raw.remove(["b"])
        finally:
            raw.close()
            server.shutdown()


@pytest.mark.parametrize("engine", ["valkey", "valkey-unix", "s3", "mooncake"])
def test_every_engine_is_measured_and_its_bytes_are_compared(engine: str) -> None:
    turns = measure(parse(["--engines", engine, "--repetitions", "1", "--turn-mib", "4"]))
    kinds = {(each.block_bytes >> 20, each.threads, each.operation) for each in turns}
    assert {(size, n, way) for size in (1, 4) for n in (1, 4) for way in ("read", "write")} < kinds
    assert {"found", "not there"} < {operation for *_, operation in kinds}
    assert all(each.store.seconds > 0 and each.store.cpu_seconds > 0 for each in turns)
    assert all(cell for cell in markdown(turns).splitlines()[2].split("|")[1:-1])
