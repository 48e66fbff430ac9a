"""`kvstrata clear`, `drain` and `warm`, as a user calls them."""

import json
import socket
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from tests.cli.processes import command, environment, kvstrata, until
from tests.cli.terminal import terminal
from tests.cli.traffic import NAMESPACE, engine, find, prompt, save, serving
from tests.page.model import MODEL, save_tokens

TIERS = ("--host-size", "4MiB", "--disk")
IMPORT_SECONDS = 240.0  # of vLLM, on cores that others use


def wait_written(path: Path, blocks: int) -> None:
    def written() -> bool:
        found = json.loads(kvstrata("stats", "--socket", str(path), "--json").stdout)
        return bool(found["servers"][0]["report"]["tiers"][1]["used_blocks"] == blocks)

    until(written, 30, path.parent / "server.log")


def test_clear_says_first_what_would_go_and_then_takes_it(tmp_path: Path) -> None:
    with serving(tmp_path, *TIERS, f"{tmp_path}/d:64MiB") as path, engine(path) as client:
        save(client, prompt("a", 8))
        wait_written(path, 8)
        where = ("--namespace", NAMESPACE.hex(), "--tier", "host", "--socket", str(path))
        dry = kvstrata("clear", *where, "--dry-run")
        assert find(client, prompt("a", 8)) == 8
        done = kvstrata("clear", *where, "--json")
        everything = kvstrata("clear", "--all", "--socket", str(path), "--json")
        gone = client.get_match(NAMESPACE, prompt("a", 8))
    assert (dry.returncode, dry.stderr) == (0, "")
    assert "would be cleared" in dry.stdout
    assert "512.0 KiB" in dry.stdout
    (row,) = json.loads(done.stdout)["servers"]
    assert row["tiers"] == [{"tier": "host", "blocks": 8, "bytes": 8 * 65536}]
    assert (row["in_use_blocks"], row["lost_blocks"], row["dry_run"]) == (0, 0, False)
    (row,) = json.loads(everything.stdout)["servers"]
    assert [each["blocks"] for each in row["tiers"]] == [0, 8]
    assert gone.matched_blocks == 0


def test_clear_of_a_namespace_that_there_is_not_says_so(tmp_path: Path) -> None:
    unknown = "00" * len(NAMESPACE)
    with serving(tmp_path, *TIERS, f"{tmp_path}/d:64MiB") as path, engine(path):
        at = ("--socket", str(path))
        wrong = kvstrata("clear", "--namespace", unknown, *at)
        empty = kvstrata("clear", "--namespace", NAMESPACE.hex().upper(), *at)
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr == (
        f"error: no server knows a namespace {unknown}\n"
        "  hint: kvstrata inspect shows those that there are\n"
    )
    assert (empty.returncode, empty.stderr) == (0, "")


def test_clear_of_a_tier_that_nodes_share_takes_a_namespace_of_theirs(tmp_path: Path) -> None:
    tiers = ("--host-size", "4MiB", "--shared", f"{tmp_path}/shared:64MiB")
    with serving(tmp_path, *tiers) as path, engine(path):
        result = kvstrata("clear", "--namespace", "00" * len(NAMESPACE), "--socket", str(path))
    assert (result.returncode, result.stderr) == (0, "")


def test_drain_says_when_it_is_safe_and_can_be_undone(tmp_path: Path) -> None:
    with serving(tmp_path, *TIERS, f"{tmp_path}/d:64MiB") as path, engine(path) as client:
        save(client, prompt("a", 8))
        drained = kvstrata("drain", "--socket", str(path))
        refused = client.put_match(NAMESPACE, prompt("b", 2))
        running = kvstrata("drain", "--socket", str(path), "--undo", "--json")
        taken = client.put_match(NAMESPACE, prompt("b", 2))
        client.launch([taken.task_id])
        late = kvstrata("drain", "--socket", str(path), "--timeout", "0.3")
    assert drained.returncode == 0
    assert "safe to stop: all blocks are written" in drained.stdout
    assert refused.task_id == 0
    assert json.loads(running.stdout)["drain"] == "off"
    assert len(taken.slots) == 2
    assert late.returncode == 1
    assert "not safe to stop: 0 blocks wait, 1 saves run\n" in late.stdout


def test_a_tier_that_does_not_answer_is_cleared_later_and_it_is_said_what_is_done(
    tmp_path: Path,
) -> None:
    """Drain waits for it: the next server could find the blocks again."""
    shared = tmp_path / "shared"
    tiers = ("--host-size", "4MiB", "--shared", f"{shared}:64MiB")
    with serving(tmp_path, *tiers) as path, engine(path) as client:
        at = ("--socket", str(path))
        save(client, prompt("a", 8))
        wait_written(path, 8)
        shared.rename(tmp_path / "away")
        shared.touch()
        cleared = kvstrata("clear", "--all", *at)
        stats = kvstrata("stats", *at)
        drained = kvstrata("drain", "--timeout", "0.3", *at)
        plain = kvstrata("drain", "--timeout", "0.3", "--json", *at)
        shared.unlink()
        (tmp_path / "away").rename(shared)
        late = kvstrata("drain", *at)
    done, hint = cleared.stderr.splitlines()
    assert (cleared.returncode, cleared.stdout, hint[:8]) == (1, "", "  hint: ")
    assert done.endswith(
        "; cleared: 8 blocks of host; remote is cleared as soon as it answers: what was to go is not "
        "found any more, but a restart before that can find it again"
    )
    assert "still to be cleared of 1 namespace" in stats.stdout
    assert drained.returncode == 1
    assert drained.stdout.startswith(f"{path}: not safe to stop: ")
    assert drained.stdout.endswith(
        "remote is still to be cleared of 1 namespace: that is done as soon as it answers, and a "
        "restart before that can find them again\n"
    )
    assert "blocks wait" not in drained.stdout
    assert json.loads(plain.stdout)["uncleared_namespaces"] == {"remote": 1}
    assert (late.returncode, "safe to stop: all blocks are written" in late.stdout) == (0, True)


def test_pinned_blocks_are_told_as_kept(tmp_path: Path) -> None:
    with serving(tmp_path, "--host-size", "4MiB") as path, engine(path) as client:
        save(client, prompt("a", 4), request="cmpl-1")
        kvstrata("pin", "--request", "cmpl-1", "--socket", str(path))
        result = kvstrata("clear", "--tier", "host", "--dry-run", "--socket", str(path))
    assert result.stdout.splitlines()[-1] == "in use or pinned, and kept: 4 blocks"


def test_a_server_that_no_engine_has_joined_can_be_stopped_and_all_else_fails(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, *TIERS, f"{tmp_path}/d:64MiB") as path:
        at = ("--socket", str(path))
        drained = kvstrata("drain", *at)
        plain = kvstrata("drain", "--json", *at)
        undone = kvstrata("drain", "--undo", *at)
        others = [
            kvstrata(*words, *at)
            for words in (
                ("clear", "--all"),
                ("warm", "--request", "cmpl-1"),
                ("pin", "--request", "cmpl-1"),
            )
        ]
    assert (drained.returncode, drained.stderr) == (0, "")
    assert "safe to stop: no engine has joined" in drained.stdout
    assert json.loads(plain.stdout)["drain"] == "no tiers"
    assert (undone.returncode, undone.stdout) == (0, f"{path}: saves are taken\n")
    assert [(each.returncode, each.stdout) for each in others] == [(1, "")] * len(others)


def test_warm_brings_a_prompt_up_from_disk_by_request_or_keys(tmp_path: Path) -> None:
    with serving(tmp_path, *TIERS, f"{tmp_path}/d:64MiB") as path, engine(path) as client:
        save(client, prompt("a", 8), request="cmpl-1")
        wait_written(path, 8)
        at = ("--socket", str(path))
        kvstrata("clear", "--tier", "host", *at)
        by_request = kvstrata("warm", "--request", "cmpl-1", *at)
        before = client.get_match(NAMESPACE, prompt("a", 8))
        client.cancel([before.task_id])
        client.ping()
        kvstrata("clear", "--tier", "host", *at)
        listed = tmp_path / "keys"
        listed.write_text("\n".join(key.hex() for key in [*prompt("a", 8), *prompt("x", 1)]))
        by_keys = kvstrata("warm", "--keys-from", str(listed), "--json", *at)
    assert (by_request.returncode, by_request.stderr) == (0, "")
    assert by_request.stdout == "cmpl-1: 8 of 8 blocks are in host memory\n"
    assert before.disk_blocks == 0
    assert by_keys.returncode == 1  # one is nowhere
    (row,) = json.loads(by_keys.stdout)["prompts"]
    assert (row["host_blocks"], row["asked_blocks"]) == (8, 9)


@pytest.mark.parametrize("bar_is_alone", [False, True])
def test_warm_brings_up_the_prompts_of_a_file_and_draws_how_far_it_is(
    tmp_path: Path, bar_is_alone: bool
) -> None:
    """What came of them goes to standard output, line by line: to the terminal of the bar, or not."""
    prompts = [list(range(200)), list(range(7, 140))]
    (tmp_path / "prompts").write_text("".join(f"{tokens}\n" for tokens in prompts))
    with serving(tmp_path, *TIERS, f"{tmp_path}/d:64MiB") as path, engine(path) as client:
        saved = [save_tokens(client, tokens) for tokens in prompts]
        wait_written(path, 5)
        kvstrata("clear", "--tier", "host", "--socket", str(path))
        before = [client.locate(MODEL, keys) for keys in saved]
        words = ("warm", "prompts", "--namespace", MODEL.hex(), "--socket", str(path))
        out = tmp_path / "out"
        with (
            out.open("wb") as file,
            terminal(*words, stdout=file if bar_is_alone else None, cwd=tmp_path) as screen,
        ):
            screen.until(screen.ended, IMPORT_SECONDS)
            while screen.read():
                pass
        after = [client.locate(MODEL, keys) for keys in saved]
    assert screen.process.returncode == 0, screen.seen
    assert (before, after) == ([(0, 3), (0, 2)], [(3, 3), (2, 2)])
    shown = [line.rstrip() for line in screen.screen.display if "prompts" in line]
    assert (out.read_text().splitlines(), shown)[:: 1 if bar_is_alone else -1] == (
        [
            "prompts:1: 3 of 3 blocks are in host memory",
            "prompts:2: 2 of 2 blocks are in host memory",
        ],
        [],
    )
    assert b"prompts:2 " in screen.seen  # the bar, which goes at the end
    assert b"2/2" in screen.seen


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["clear"], "nothing says what to clear"),
        (["clear", "--all", "--tier", "host"], "--all is every namespace"),
        (
            ["clear", "--namespace", "xyz"],
            "'xyz' is not a namespace: 32 hexadecimal digits\n  hint: kvstrata inspect shows",
        ),
        (["clear", "--tier", "tape"], "no tier 'tape'"),
        (
            ["warm"],
            "error: nothing says which prompts\n  hint: give one of FILE, --request and --keys-from",
        ),
        (["warm", "--request", "r", "--keys-from", "f"], "in several ways\n  hint: give one of"),
        (
            ["warm", "--keys-from", "/nowhere/x"],
            "cannot read /nowhere/x: No such file or directory\n  hint: name a text file that exists",
        ),
        (["page", "--listen", "here"], "--listen 'here' is no address and port"),
        (["page", "--listen", "name:80"], "'name' is no IP address"),
        (["page", "--listen", "0.0.0.0:8765"], "needs a token"),
        (["page", "--admin"], "needs a token"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_named(tmp_path: Path, arguments: list[str], said: str) -> None:
    with serving(tmp_path, "--host-size", "4MiB") as path, engine(path):
        result = kvstrata(*arguments, "--socket", str(path))
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr


def test_a_request_that_nobody_knows_and_a_server_that_no_engine_has_used_are_told(
    tmp_path: Path,
) -> None:
    (tmp_path / "prompts").write_text("[1, 2]\n")
    with serving(tmp_path, "--host-size", "4MiB") as path:
        at = ("--socket", str(path))
        nowhere = kvstrata("warm", "/nowhere/x", *at)
        unused = kvstrata("warm", str(tmp_path / "prompts"), *at)
        with engine(path):
            unheard = kvstrata("warm", "--request", "unheard", *at)
    assert (nowhere.returncode, unused.returncode, unheard.returncode) == (2, 2, 1)
    assert "cannot read /nowhere/x" in nowhere.stderr
    assert "no engine has used this server yet" in unused.stderr
    assert "hint: start an engine with it, or name the namespace" in unused.stderr
    assert "is known\n  hint: name keys or prompts instead; known are those" in unheard.stderr


def test_prompts_come_from_standard_input_and_a_wrong_line_is_named(tmp_path: Path) -> None:
    with serving(tmp_path, "--host-size", "4MiB") as path, engine(path):
        at = ("--namespace", NAMESPACE.hex(), "--socket", str(path))
        result = subprocess.run(
            command("warm", "-", *at),
            input="[1, 2]\n[3, 4\n",
            capture_output=True,
            text=True,
            check=False,
            env=environment(),
            timeout=60,
        )
    assert (result.returncode, result.stdout) == (2, "")
    assert "-:2 is no JSON" in result.stderr


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = kvstrata("page", "--listen", address, "--socket", str(tmp_path / "s"))
    assert (result.returncode, result.stdout) == (2, "")
    assert "cannot listen at 127.0.0.1" in result.stderr


def test_short_tokens_are_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("short")
    result = kvstrata("page", "--token-file", str(token), "--socket", str(tmp_path / "s"))
    assert result.returncode == 2
    assert "fewer than 16" in result.stderr
    assert "short" not in result.stderr.replace(str(token), "")
