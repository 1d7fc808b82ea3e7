"""``jaxtrain prepare sets`` lists and deletes what runs have cut from videos."""

import os
import time
from pathlib import Path

import pytest
from data.video import sample_videos as sample

from jaxtrain import main
from jaxtrain.data.video import sets

SMALL = sample.model(frames=4, height=32, width=48)


def test_sets_are_listed_and_old_ones_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    for folder in ("a", "b"):
        for number in range(3):
            sample.write(tmp_path / folder / f"{number}.mp4", 12, title=f"{folder}{number}")
        sample.opened(tmp_path / folder, cache, SMALL)
    folders = {place.source: place.folder for place in sets.cached(cache)}
    assert folders.keys() == {str(tmp_path / "a"), str(tmp_path / "b")}
    week_ago = time.time() - 7.1 * 86_400
    os.utime(folders[str(tmp_path / "a")] / sets._USED, (week_ago, week_ago))

    listing = ["prepare", "sets", "--cache-dir", str(cache)]
    assert main.main(listing) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{folders[str(tmp_path / 'b')]}: 3 videos, ")
    assert lines[0].endswith(", used 0 days ago")
    assert lines[1] == f"  of {tmp_path / 'b'}"
    assert lines[2].endswith(", used 7 days ago")
    assert lines[-1] == f"2 sets in {cache / 'sets'}"

    assert main.main([*listing, "--prune", "7"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"1 set in {cache / 'sets'}, 1 deleted"
    assert not folders[str(tmp_path / "a")].exists()
    sample.opened(tmp_path / "b", cache, SMALL)  # is still complete
    sample.opened(tmp_path / "a", cache, SMALL)  # is cut again
    assert len(list(sets.cached(cache))) == 2
