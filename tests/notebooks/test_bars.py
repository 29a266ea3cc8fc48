"""What a batch run's log says of the bars within a cell."""

import json
import time

from tqdm import tqdm

from notebooks.batch.job import Job
from notebooks.batch.progress import Progress
from notebooks.batch.run_folder import RunFolder
from notebooks.batch.status import bar_of
from notebooks.study.bars import BARS, Bars, youngest_bar


def test_the_youngest_bar_is_written_and_taken_away(tmp_path, monkeypatch):
    monkeypatch.setattr("notebooks.study.bars.EVERY_S", 0.02)
    bars = Bars(tmp_path)
    bars.start()
    with tqdm(total=4, desc="outer", disable=False), tqdm(total=30, desc="gptq", unit="block", disable=False) as inner:
        inner.update(7)
        deadline = time.monotonic() + 20
        while not (tmp_path / BARS).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        told = json.loads((tmp_path / BARS).read_text())
        assert (told["what"], told["done"], told["total"], told["unit"]) == ("gptq", 7, 30, "block")
        assert told["left_s"] >= 0
    assert youngest_bar() is None
    bars.end()
    assert not list(tmp_path.iterdir()), "nothing is left in the run's folder"


def test_a_bar_is_told_in_words(tmp_path):
    places = RunFolder(tmp_path / "run", "key", "token")
    assert bar_of(places) == ""
    places.part.mkdir(parents=True)
    bar = {"what": "gptq", "done": 7, "total": 30, "unit": "block", "left_s": 150}
    (places.part / BARS).write_text(json.dumps(bar))
    assert bar_of(places) == ", gptq: 7 of 30 blocks, about 2 min left"
    (places.part / BARS).write_text(json.dumps(bar | {"total": 1, "left_s": None}))
    assert bar_of(places) == ", gptq: 7 of 1 block"


def test_the_time_left_of_a_sweep_is_at_least_that_of_the_bar(tmp_path):
    """A run that is slower than expected: the log does not name a shorter time beside that of its bar."""
    job = Job("key", "notebook.ipynb", {}, str(tmp_path / "run"))
    progress = Progress([job], {"key": 60.0}, parallel=1, known=0)
    places = RunFolder(tmp_path / "run", "key", "token")
    places.part.mkdir(parents=True)
    assert progress._estimate() == "about 60 s left"
    progress._begun["key"] = time.monotonic() - 70
    assert progress._estimate() == "longer than expected"
    bar = {"what": "gptq", "done": 1, "total": 30, "unit": "block", "left_s": 600}
    (places.part / BARS).write_text(json.dumps(bar))
    assert progress._estimate() == "about 10 min left"
