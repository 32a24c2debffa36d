"""The file of the steps that no commit has yet."""

from pathlib import Path

from holdfast.rank.lived_steps import LivedSteps, delete_lived, find_lived, name_lived


def train(folder: Path, attempt: int, after: int, stop: int) -> LivedSteps:
    """Return the file of an attempt whose ranks have trained some steps."""
    lived = LivedSteps(name_lived(folder, attempt))
    lived.restart(after)
    lived.add([{"step": step, "loss": attempt + step / 8} for step in range(after + 1, stop + 1)])
    return lived


def test_the_steps_after_a_commit_are_those_of_the_first_process_that_trained_them(tmp_path: Path) -> None:
    train(tmp_path, 2, after=4, stop=9)
    train(tmp_path, 3, after=6, stop=12)
    assert [line["step"] for line in find_lived(tmp_path, 2, 6)] == [7, 8, 9]
    assert [line["step"] for line in find_lived(tmp_path, 3, 6)] == [*range(7, 13)]
    assert find_lived(tmp_path, 2, 12) == []


def test_a_save_makes_the_steps_before_the_last_one_needless(tmp_path: Path) -> None:
    lived = train(tmp_path, 1, after=0, stop=4)
    lived.note_save(4)
    lived.add([{"step": step, "loss": 0.0} for step in range(5, 9)])
    assert find_lived(tmp_path, 1, 2), "the save of step 4 may fail"
    lived.note_save(8)
    assert not find_lived(tmp_path, 1, 2)
    assert [line["step"] for line in find_lived(tmp_path, 1, 4)] == [5, 6, 7, 8]


def test_a_line_that_is_cut_short_ends_the_steps(tmp_path: Path) -> None:
    train(tmp_path, 1, after=0, stop=4)
    path = name_lived(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-5])
    assert [line["step"] for line in find_lived(tmp_path, 1, 0)] == [1, 2, 3]


def test_only_files_with_steps_beyond_the_newest_commit_stay(tmp_path: Path) -> None:
    train(tmp_path, 1, after=0, stop=9)
    train(tmp_path, 2, after=4, stop=8)
    restarted = train(tmp_path, 3, after=4, stop=8)
    restarted.restart(8)
    restarted.add([{"step": 9, "loss": 0.0}])
    delete_lived(tmp_path, first=2, step=8)
    assert [path.name for path in tmp_path.iterdir()] == [name_lived(tmp_path, 3).name]
