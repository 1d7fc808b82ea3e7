"""A gate that is not met ends a real run, which a resume does not continue unnoticed."""

from pathlib import Path

import program


def test_a_gate_ends_the_run_saved_and_a_resume_says_why(tmp_path: Path) -> None:
    program.write_corpus(tmp_path)
    words = [*program.TINY_MLM, "--data.path", "corpus", "--loop.steps", "8", "--mesh.fsdp", "1"]
    words += ["--loop.eval_every", "2", "--output-dir", "run"]
    gates = ["--loop.gates", "val/loss < 90 at 2", "val/loss < 0.01 at 3"]
    ended = program.run(tmp_path, *words, *gates)
    assert ended.returncode == 4, ended.stderr
    assert "gate val/loss < 0.01 at 3 is not met: val/loss is" in ended.stdout
    assert "4 of 8 steps are done and saved" in ended.stdout
    assert (tmp_path / "run" / "checkpoints" / "4.json").exists()
    again = program.run(tmp_path, *words, *gates, "--resume", "latest")
    assert again.returncode == 4
    assert "nothing to do: gate val/loss < 0.01 at 3 was not met after 4 steps" in again.stdout
