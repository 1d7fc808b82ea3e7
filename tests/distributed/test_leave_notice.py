"""Notices of providers: of a service on loopback with the rules of theirs, and of a file."""

import collections
import contextlib
import http.server
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from program import TINY_MLM, losses, started, train, wait_for, write_corpus

from jaxtrain.distributed import leave_notice
from jaxtrain.errors import InputError

TOKEN = "AQAEA-token"


class Service:
    """The metadata of a machine, as Amazon's (IMDSv2) and Google's servers answer.

    Attributes:
        answers: how many questions were answered with each status.
    """

    def __init__(self) -> None:
        self.notice = self.broken = False
        self.answers: collections.Counter[int] = collections.Counter()
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                seconds = self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                right = self.path == "/latest/api/token" and 1 <= int(seconds) <= 21600
                self.answer(200 if right else 400, TOKEN)

            def do_GET(self) -> None:
                if service.broken:
                    self.answer(500, "")
                elif self.path == "/latest/meta-data/spot/instance-action":
                    if self.headers["X-aws-ec2-metadata-token"] != TOKEN:
                        self.answer(401, "")
                    elif service.notice:
                        self.answer(200, '{"action": "terminate", "time": "2026-01-31T09:00:00Z"}')
                    else:
                        self.answer(404, "")
                elif self.path == "/computeMetadata/v1/instance/preempted":
                    known = self.headers["Metadata-Flavor"] == "Google"
                    self.answer(200 if known else 403, "TRUE" if service.notice else "FALSE")
                else:
                    self.answer(404, "")

            def answer(self, code: int, text: str) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())
                service.answers[code] += 1

            def log_message(self, *arguments: object) -> None:
                """Prints nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self.env = {
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{self.address}",
            "GCE_METADATA_HOST": self.address,
        }

    @contextlib.contextmanager
    def serving(self) -> Iterator["Service"]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        yield self
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def service() -> Iterator[Service]:
    with Service().serving() as serving:
        yield serving


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leave_notice, "_EVERY_S", 0.02)


@pytest.mark.parametrize("source", ["aws", "gce"])
def test_a_notice_stops_the_run_once(
    source: str, service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    stops: list[str] = []
    with leave_notice.heard(source, lambda: stops.append(source), service.env):
        before = service.answers.total()
        wait_for(lambda: service.answers.total() >= before + 3)
        assert not stops
        service.broken = True  # for a moment, without a notice
        wait_for(lambda: service.answers[500] >= 3)
        assert not stops
        service.broken, service.notice = False, True
        wait_for(lambda: stops)
    assert stops == [source]
    printed = capsys.readouterr().err
    assert printed.count("does not answer") == 1
    assert "this machine will be taken back" in printed
    assert source == "gce" or "terminate at 2026-01-31T09:00:00Z" in printed


def test_a_file_is_a_notice(tmp_path: Path) -> None:
    stops: list[int] = []
    with leave_notice.heard(str(tmp_path / "leave"), lambda: stops.append(1)):
        time.sleep(0.1)
        assert not stops
        (tmp_path / "leave").touch()
        wait_for(lambda: stops)


@pytest.mark.parametrize("source", ["aws", "gce"])
def test_a_start_waits_while_a_notice_stands(
    source: str, service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    service.notice, stops, seen = True, [], []

    def leave() -> None:
        before = service.answers[200]
        seen.append(wait_for(lambda: service.answers[200] >= before + 3))
        service.broken = True  # an error does not end the wait
        seen.append(wait_for(lambda: service.answers[500] >= 3))
        service.broken = service.notice = False

    thread = threading.Thread(target=leave)
    thread.start()
    with leave_notice.heard(source, lambda: stops.append(1), service.env):
        assert seen == [True, True]
        service.notice = True  # the next one stops the run
        wait_for(lambda: stops)
    thread.join()
    assert "does not start before the notice is gone" in capsys.readouterr().err


def test_a_stop_ends_the_wait(tmp_path: Path) -> None:
    (tmp_path / "leave").touch()
    notice = ("--loop.leave_notice", tmp_path / "leave")
    process = started(tmp_path, *TINY_MLM, *notice, "--output-dir", "run")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert f"will be taken back ({tmp_path}/leave: it exists)" in line
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert not (tmp_path / "run").exists()  # nothing had begun


def test_a_machine_without_the_service_is_refused(service: Service) -> None:
    service.broken = True
    for source in ("aws", "gce"):
        with (
            pytest.raises(InputError, match=rf"loop.leave_notice {source}: http://127.* does not"),
            leave_notice.heard(source, lambda: None, service.env),
        ):
            pass
    with leave_notice.heard(None, lambda: None, {}):
        pass


def test_a_notice_shorter_than_a_save_costs_the_steps_since_the_last(
    tmp_path: Path, service: Service
) -> None:
    """The machine is gone while the run saves: it continues from the checkpoint before."""
    write_corpus(tmp_path)
    arguments = [*TINY_MLM, *("--data.path", "corpus", "--output-dir", "run", "--resume", "latest")]
    arguments += ["--loop.eval_every", "None", "--checkpoint.every", 25]
    checkpoints = tmp_path / "run/checkpoints"

    def begun() -> int:
        names = [folder.name for folder in checkpoints.glob("files/*")]
        return max((int(name.partition("-")[0]) for name in names), default=0)

    def complete() -> int:
        return max((int(record.stem) for record in checkpoints.glob("[0-9]*.json")), default=0)

    def stopped_in_a_save(process: subprocess.Popen[str]) -> bool:
        if begun() > complete():
            process.send_signal(signal.SIGSTOP)
            if begun() > complete():
                return True
            process.send_signal(signal.SIGCONT)
        return False

    forever = ("--loop.steps", 10**6, "--loop.leave_notice", "aws")
    while begun() <= complete():  # again if a save was too short to be seen
        service.notice, before = False, complete()
        process = started(tmp_path, *arguments, *forever, **service.env)
        wait_for(lambda before=before: complete() > before, process)
        service.notice = True
        while process.poll() is None and not stopped_in_a_save(process):
            pass
        process.kill()
        process.communicate()
    cut_off, last = begun(), complete()
    assert last < cut_off
    recorded = max(losses(tmp_path / "run"))
    service.notice = False
    output = train(tmp_path, *arguments, "--loop.steps", cut_off + 5)
    assert f"step {last} of {cut_off + 5}, " in output
    assert recorded > last
    assert sorted(losses(tmp_path / "run")) == list(range(1, cut_off + 6))


@pytest.mark.long
@pytest.mark.timeout(1500)  # ten starts, of which each compiles
def test_ten_notices_lose_nothing(tmp_path: Path, service: Service) -> None:
    """Each is heard during training; the run saves, ends with 75, and continues where it was."""
    write_corpus(tmp_path)
    arguments = [*TINY_MLM, *("--data.path", "corpus", "--output-dir", "run", "--resume", "latest")]
    arguments += ["--loop.eval_every", "None", "--loop.steps", 10**6, "--checkpoint.every", 10**6]
    recorded = 0

    def trains() -> bool:
        written = (tmp_path / "run/metrics.jsonl").exists()
        return written and max(losses(tmp_path / "run"), default=0) > recorded

    for number in range(10):
        service.notice = False
        aws = number % 2 == 0
        source = ("--loop.leave_notice", "aws" if aws else "gce")
        process = started(tmp_path, *arguments, *source, **service.env)
        wait_for(trains, process)
        service.notice = True
        began = time.monotonic()
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 75, output
        assert time.monotonic() - began < 30, "Google's notice"
        recorded = max(losses(tmp_path / "run"))
        assert (tmp_path / f"run/checkpoints/{recorded}.json").exists(), output
    assert sorted(losses(tmp_path / "run")) == list(range(1, recorded + 1))
