"""The complete page: its contents, and that no text of a run becomes markup."""

import html.parser
from pathlib import Path
from typing import Any

import pytest
from reporting import written_run

from jaxtrain.errors import InputError
from jaxtrain.reporting import page, run_files, samples


class Parsed(html.parser.HTMLParser):
    """The tags of a page and its text outside of scripts; checks that all elements are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data + " "

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_plotly", lambda: "")  # as large as the rest of the page


def parsed_page(*directories: Path) -> Parsed:
    labels = run_files.labels(directories)
    return Parsed(
        page.page([run_files.read(*pair) for pair in zip(directories, labels, strict=True)])
    )


def text_of(parsed: Parsed) -> str:
    return " ".join(parsed.text.split())


def test_one_run(tmp_path: Path) -> None:
    written_run.write(tmp_path, history=written_run.full_history())
    written_run.add_samples(tmp_path, [50, 100])
    parsed = parsed_page(tmp_path)
    text = text_of(parsed)
    for expected in (
        "tiny done 100 of 100 steps",
        "steps 100 of 100",
        "running time 3m20s in 2 starts",
        "time spent training 48.0%",
        "4 NVIDIA H100 80GB HBM3",
        "repeated training steps trained twice",
        "total 3m20s 100.0%",
        "20 steps were repeated",
        "planned, per device 12.5 GiB",
        "fullest device 11.0 GiB",
        "model FLOP/s, all devices 2 TFLOP/s",
        "dense bf16, all devices 3.956 PFLOP/s",
        "data wait 5.0% planned 0.0% a step without data wait 0.95 s planned 0.9 s to 1.1 s",
        "reconstruction after step 100",
        "step 100 <b>bold</b>",
        "Set on the command line optim.peak_lr 0.01",
        "driver 570.1",
        "killed: no end was recorded",
        "all 2 starts: 3m20s start 1 from step 0: 1m40s; killed: no end was recorded",
        "start 2 from step 40: 1m40s; done: 100 of 100 steps (code 0)",
        "optim.peak_lr: 0.01 -> 0.02",
    ):
        assert expected in text
    assert "Missing" not in text
    for tag, start in (("img", "data:image/png;base64,"), ("video", "data:video/mp4;base64,")):
        earlier, newest = parsed.all(tag)
        assert str(earlier["src"]).startswith(start)
        assert str(newest["src"]).startswith(start)
        assert ("hidden" in earlier, "hidden" in newest) == (True, False)
        assert (earlier["data-step"], newest["data-step"]) == ("50", "100")
    (slider,) = [one for one in parsed.all("input") if one.get("id") == "sample-step"]
    assert (slider["max"], slider["data-steps"]) == ("1", "50 100")


def test_gates_show_how_they_were_decided(tmp_path: Path) -> None:
    gates = ["val/loss < 0.2 at 30", "val/loss < 0.01 at 100", "val/loss < 1 at 101"]
    loop = {"loop": {"gates": gates}}
    text = text_of(parsed_page(written_run.write(tmp_path, config=written_run.CONFIG | loop)))
    assert "gate val/loss < 0.2 at 30 met: 0.09804 at step 50" in text
    assert "gate val/loss < 0.01 at 100 not met: 0.0495" in text
    assert "gate val/loss < 1 at 101 not decided yet" in text


def test_two_runs_are_side_by_side_and_differences_are_highlighted(tmp_path: Path) -> None:
    other = written_run.CONFIG | {"seed": 2}
    one = written_run.write(tmp_path / "one", history=written_run.full_history())
    two = written_run.write(tmp_path / "two", config=other)
    parsed = parsed_page(one, two)
    text = text_of(parsed)
    assert "Differences one two seed 1 2 All" in text
    assert text.index("Differences") < text.index("Curves")  # one asks first what differs
    assert len(parsed.all("mark")) >= 2
    assert "two: history.jsonl is missing" in text
    assert len([one for one in parsed.all("input") if "data-run" in one]) == 2


@pytest.mark.parametrize(
    "missing", [{"history": None}, {"config": None}, {"metrics": None}, {"metrics": []}]
)
def test_missing_files_still_give_a_page(tmp_path: Path, missing: dict[str, Any]) -> None:
    written_run.write(tmp_path, **({"history": written_run.full_history()[:3]} | missing))
    assert "Written" in text_of(parsed_page(tmp_path))


def test_text_of_a_run_never_becomes_markup(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    directory = tmp_path / "<b>&amp;"
    config = written_run.CONFIG | {"name": evil, "note": evil}
    start = written_run.start(written_run.BEGAN, host=evil, device_kind=evil, config=config)
    start["arguments"] = ["--config", evil, "--name", '"; rm -rf ~ #']
    records = [one | {f"val/{evil}": 1.0} for one in written_run.records([50])]
    written_run.write(directory, config=config, metrics=records, history=[start])
    (directory / "samples").mkdir()
    (directory / "samples" / "text_50.txt").write_text(evil)
    written_run.lines(
        directory / "quarantine.jsonl", [{"path": evil, "reason": evil, "found": evil}]
    )
    written_run.lines(directory / "bad_steps.jsonl", [{"step": 1, "position": 2, "loss": evil}])
    parsed = parsed_page(directory)
    assert not parsed.all("img")
    assert not parsed.all("b")[1:]  # only one of the page itself
    assert "Unreadable input files: 1; see quarantine.jsonl. Skipped steps: 1;" in text_of(parsed)
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)
    assert len(parsed.all("script")) == 3


@pytest.mark.parametrize("line", ["7", "{}", '{"event": "start", "time": "noon"}'])
def test_a_damaged_record_is_one_line_with_the_run(tmp_path: Path, line: str) -> None:
    written_run.write(tmp_path, history=written_run.full_history())
    with open(tmp_path / "history.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(InputError, match="a record in its") as caught:
        page.write([tmp_path], tmp_path / "page.html")
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "page.html").exists()


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    written_run.write(tmp_path, history=written_run.full_history())
    written_run.add_samples(tmp_path, [100])
    parsed = parsed_page(tmp_path)
    for _, attributes in parsed.tags:
        for name in ("src", "href", "poster", "action", "srcset"):
            assert str(attributes.get(name, "data:")).startswith("data:")
    (policy,) = [one["content"] for one in parsed.all("meta") if "http-equiv" in one]
    assert policy is not None
    assert policy.startswith("default-src 'none';")


def test_the_slider_has_evenly_spaced_steps_that_fit(tmp_path: Path) -> None:
    written_run.add_samples(tmp_path, range(10, 90, 10))
    groups = samples.stored(tmp_path)
    assert [[one.step for one in group] for group in groups] == [list(range(10, 90, 10))] * 3
    every = [one for group in groups for one in group]
    total = sum(one.size for one in every)
    assert samples.slider_steps(every, total) == list(range(10, 90, 10))
    assert samples.slider_steps(every, total - 1) == [20, 40, 60, 80]
    assert samples.slider_steps(every, total // 8) == [80]
    assert samples.slider_steps(every, 0) == []
    assert samples.slider_steps([], 0) == []


def test_the_page_has_at_most_as_many_bytes_of_samples_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_run.write(tmp_path)
    written_run.add_samples(tmp_path, range(10, 90, 10))
    step = sum(group[0].size for group in samples.stored(tmp_path))
    monkeypatch.setattr(samples, "MOST_EARLIER_BYTES", 4 * step)
    parsed = parsed_page(tmp_path)
    assert [one["data-step"] for one in parsed.all("img")] == ["20", "40", "60", "80"]
    assert "The slider has 4 steps, to keep the page small; samples/ has 4 more." in text_of(parsed)
    monkeypatch.setattr(samples, "MOST_BYTES", step)
    assert [one["data-step"] for one in parsed_page(tmp_path).all("img")] == ["80"]


def test_the_page_contains_all_of_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    import base64
    import gzip

    from plotly.offline import get_plotlyjs

    packed = page._plotly()
    assert gzip.decompress(base64.b64decode(packed)).decode() == get_plotlyjs()
    assert len(packed) < 2.5e6
