"""Tests how URLs are recorded, and that a complete run stores no secrets from them."""

import contextlib
import re
import time
from pathlib import Path

import pytest
from data.video import sample_videos
from program import run, train
from storage.file_server import Answer, Server, serving

from jaxtrain import config, main
from jaxtrain.errors import InputError
from jaxtrain.storage import addresses

SECRETS = ("sEcReT0123", "nEwSeCrEt456", "pAsSwOrD789")
SIGNED = "X-Amz-Credential=me&X-Amz-Security-Token={0}&X-Amz-Signature={0}"


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://host/a.tar", "https://host/a.tar"),
        ("https://host/a.tar?part=3", "https://host/a.tar?hidden"),
        (f"https://host/a.tar?part=3&{SIGNED.format('x')}", "https://host/a.tar?hidden"),
        ("https://host/a.tar#token=s", "https://host/a.tar"),
        ("s3://bucket/a#1.tar", "s3://bucket/a#1.tar"),
        ("https://me:s@host/a.tar", "https://***@host/a.tar"),
        ("https://me:s/s@host/a.tar", "https://***@host/a.tar"),
        ("https://host:80/a@b.tar", "https://host:80/a@b.tar"),
        ("/a/b?c=d", "/a/b?c=d"),
    ],
)
def test_recorded_form_of_an_address(address: str, shown: str) -> None:
    found = addresses.public(address)
    assert found == shown
    assert addresses.public(found) == addresses.scrub(address) == found
    assert addresses.scrub(f"no '{address}': start again") == f"no '{found}': start again"
    assert addresses.scrubbed(("--data.path=" + address,)) == ("--data.path=" + found,)


def test_an_address_in_a_text_without_spaces() -> None:
    assert addresses.scrub("ClientError(https:/me:s@h/a?b=s)") == (
        f"ClientError({addresses.public('https:/me:s@h/a?b=s')})"
    )
    assert "zz" not in addresses.scrub("ClientError(https:/h/a?b=zz), url='https://h/a?b=zz'")
    marked = "https://host/a?hidden&X-Amz-Signature=secret"
    assert "secret" not in addresses.scrub(marked)


@pytest.mark.parametrize("unit", ["a.", "a:", "a://b:", "a=b&"])
@pytest.mark.parametrize("start", ["", "https://h?"])
def test_time_is_linear_in_the_length_of_the_text(unit: str, start: str) -> None:
    for text in (start + unit * (100_000 // len(unit)) + end for end in ("", ":/", " @", "://a")):
        began = time.process_time()
        addresses.scrub(text)
        addresses.public(text)
        with contextlib.suppress(InputError):
            addresses.refuse_user(text, "--data.path")
        if addresses.is_address(text):
            with pytest.raises(
                InputError, match=r"has [\d,]+ characters, and the limit|contains a user"
            ):
                addresses.check(text, "--data.path")
        assert time.process_time() - began < 1  # quadratic expressions took more than 20 s


def test_long_secrets_are_removed() -> None:
    for scheme in ("https", "x" * 100, "1https", "_s3"):
        for secret in ("s" * 5000, "s/" * 5000, "s:1/" * 3000):
            text = f"no {scheme}://me:{secret}@host/a: start again"
            assert "s" * 5 not in addresses.scrub(text).replace("https", "")
            assert "s/" not in addresses.scrub(text)
            with pytest.raises(InputError, match=r"contains a user name or password") as caught:
                addresses.refuse_user(text, "--data.path")
            assert len(str(caught.value)) < 300
    plain = "https://h:80/a@b s3://b/a@b https://h/:a@b"
    addresses.refuse_user(plain, "--data.path")
    assert addresses.scrub(plain) == plain


def test_identity_ignores_the_order_of_parameters_but_not_their_values() -> None:
    queries = ("x=1&y=2", "y=2&x=1", "x=2&y=1")
    assert len({addresses.identity(f"https://h/a?{query}") for query in queries}) == 2
    assert len({addresses.name_of(f"https://h/a?{query}") for query in queries}) == 2
    for signature in (
        SIGNED.format("x"),
        "X-Goog-Signature=s&X-Goog-Date=d",
        "Expires=1&Signature=s&Key-Pair-Id=k",
        "AWSAccessKeyId=k&Signature=s",
        "sv=1&sp=r&sig=s",
    ):
        assert addresses.identity(f"https://h/a?x=1&{signature}") == "https://h/a?x=1"
        assert addresses.name_of(f"https://h/a?{signature}") == "h/a"
    assert addresses.identity("https://h/a?sp=r") == "https://h/a?sp=r"
    assert addresses.identity("https://h/a") == "https://h/a"  # as cached by older versions


def test_a_config_is_saved_without_queries_and_passwords() -> None:
    path = f"https://host/a.tar?{SIGNED.format(SECRETS[0])}"
    saved = config.to_dict(config.load("demo", ["--data.path", path]))
    assert saved["data"]["path"] == "https://host/a.tar?hidden"
    for flag in ("--data.path", "--data.val_path", "--data.cache_dir", "--model.init_from"):
        with pytest.raises(InputError, match=r"https://\*\*\*@.*use a presigned URL") as caught:
            config.load("demo", [flag, f"https://me:{SECRETS[2]}@host/a"])
        assert SECRETS[2] not in str(caught.value)
    several = ["--data.path", "a", "--data.more_paths", "b", f"s3://k:{SECRETS[2]}@bucket/a"]
    with pytest.raises(InputError, match=r"data\.more_paths s3://\*\*\*@.*AWS_") as caught:
        config.load("demo_mlm", several)
    assert SECRETS[2] not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "demo", "ADDRESS"],
        ["--config", "ADDRESS"],
        ["--config", "demo", "--output-dir", "ADDRESS"],
        ["prepare", "clips", "ADDRESS", "out"],
        ["prepare", "tokens", "--config", "demo_mlm", "--data.path", "ADDRESS"],
        ["report", "ADDRESS"],
        ["export", "ADDRESS", "out"],
    ],
)
def test_a_wrong_command_line_does_not_repeat_a_secret(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    for address in (f"https://me:{SECRETS[2]}@host/a.mp4", f"ftp://h/a.mp4?k={SECRETS[2]}"):
        assert main.main([address if word == "ADDRESS" else word for word in arguments]) == 2
        said = "".join(capfd.readouterr())
        assert "error: " in said
        assert SECRETS[2] not in said


SMALL = (
    *("--config", "demo", "--model.frames", 4, "--model.height", 16, "--model.width", 16),
    *("--model.encoder_width", 8, "--model.decoder_widths", 16, 8, 8, 8),
    *("--data.batch_size", 4, "--data.workers", 1, "--data.max_bad_share", 0.5),
    *("--loop.log_every", 1, "--loop.eval_every", 2, "--loop.record_examples", True),
    *("--checkpoint.every", 2, "--checkpoint.keep", 2),
)


def _fill(server: Server, place: Path) -> list[str]:
    """Six videos and one invalid file; returns their URLs, which are to be signed."""
    names = [f"{number}.mp4" for number in range(6)]
    for number, name in enumerate(names):
        file = sample_videos.write(place / "made" / name, 20 + number)
        server.files[f"/{name}"] = Answer(file.read_bytes())
    server.files["/none.mp4"] = Answer(b"no video")
    return [f"{server.base}/{name}?{SIGNED}" for name in (*names, "none.mp4")]


def _spilled(place: Path) -> list[str]:
    """Returns files with a secret in their names or contents, except the list."""
    found = []
    for path in place.rglob("*"):
        name = str(path.relative_to(place))
        held = path.read_bytes() if path.is_file() else b""
        own = path == place / "list.txt"
        if any(one in name or (one.encode() in held and not own) for one in SECRETS):
            found.append(name)
    return found


@pytest.mark.long
def test_a_complete_run_stores_no_secret_of_its_addresses(tmp_path: Path) -> None:
    """Preparation, again with other signatures, training, failures, and a report."""
    with serving() as server:
        urls = _fill(server, tmp_path)
        prepare = ("prepare", "clips", "list.txt", "clips", "--height", 16, "--width", 16)
        said, asked = "", []
        for secret in SECRETS[:2]:
            (tmp_path / "list.txt").write_text("\n".join(urls).format(secret))
            before = len(server.asked)
            ended = run(tmp_path, *prepare, "--min-frames", 4)
            assert ended.returncode == 1, ended.stderr  # an invalid file
            said += ended.stdout + ended.stderr
            asked.append([url.partition("?")[0] for url in server.asked[before:]])
            assert all(secret in url for url in server.asked[before:])  # the complete query
        assert len(set(asked[0])) == 7
        assert asked[1] == []  # they are known, whatever their signature
        train_on = (*SMALL, "--data.path", "clips", "--output-dir", "run")
        said += train(tmp_path, *train_on, "--loop.steps", 4)
        asked_before = len(server.asked)
        for url, code in (
            (f"{server.base}/0.mp4?hidden", 2),
            (f"http://me:{SECRETS[2]}@{server.base[7:]}/0.mp4", 2),
            (f"{server.base}/gone.mp4?{SIGNED.format(SECRETS[1])}", 2),
        ):
            ended = run(tmp_path, *train_on, "--data.path", url, "--again")
            assert ended.returncode == code, ended.stderr
            assert ended.stderr.count("error: ") == 1
            said += ended.stdout + ended.stderr
        assert len(server.asked) == asked_before  # runs fetch none
    ended = run(tmp_path, "report", "run")
    assert ended.returncode == 0, ended.stderr
    said += ended.stdout + ended.stderr
    assert not any(secret in said for secret in SECRETS)
    for name in ("config.json", "history.jsonl", "log.txt", "report.html"):
        assert (tmp_path / "run" / name).is_file()
    assert list((tmp_path / "run").glob("examples*.jsonl"))
    assert b"0.mp4" in (tmp_path / "clips/table/names").read_bytes()
    assert _spilled(tmp_path) == []


def test_the_security_policy_lists_every_scheme(checkout: Path) -> None:
    (row,) = re.findall(r"Only (.*) are fetched\.", (checkout / "SECURITY.md").read_text())
    assert set(re.findall(r"`(\w+)`", row)) == set(addresses.SCHEMES)
