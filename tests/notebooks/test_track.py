"""Finished runs are sent to MLflow where that was asked for. A module with its functions stands for it: it is no
dependency."""

import contextlib
import json
import math
import re
import sys
import types
from pathlib import Path

import pytest

from notebooks.batch.plan import run_sweep
from notebooks.batch.track import track

PUBLISHED = Path(__file__).resolve().parents[2] / "reports" / "published"


class _Tracker(types.ModuleType):
    """MLflow's functions of one run, which note what they are given."""

    def __init__(self):
        super().__init__("mlflow")
        self.params, self.metrics, self.artifacts, self.runs = {}, {}, [], []

    @contextlib.contextmanager
    def start_run(self, run_name, tags):
        self.runs.append((run_name, tags))
        yield

    def log_params(self, params):
        assert len(params) <= 100 and all(len(value) <= 500 for value in params.values())
        self.params |= params

    def log_metrics(self, metrics):
        assert all(re.fullmatch(r"[\w. /-]+", name) and isinstance(value, float) for name, value in metrics.items())
        self.metrics |= metrics

    def log_artifact(self, path):
        self.artifacts.append(Path(path).name)


@pytest.mark.slow
def test_a_finished_run_is_sent_to_a_tracker_that_was_asked_for(sweep, runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", tracker := _Tracker())
    path = sweep(include=[{"number": 1}, {"number": 2, "does": "1 / 0"}])
    run_sweep(path, runs=runs, tracker="mlflow")
    assert len(tracker.runs) == 1 and tracker.runs[0][1]["workbench.notebook"] == "trivial"
    assert tracker.artifacts == ["report.html", "record.json"]
    run_sweep(path, runs=runs, tracker="mlflow")
    assert len(tracker.runs) == 1, "what was finished before is not sent again"


def test_all_scores_of_a_record_are_metrics_of_the_tracker(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "mlflow", tracker := _Tracker())
    record = next(PUBLISHED.glob("recipe-*.json"))
    (tmp_path / "record.json").write_bytes(record.read_bytes())
    track(tmp_path, "mlflow")
    assert not capsys.readouterr().err
    assert tracker.metrics["compressed/perplexity_wikitext2"] > tracker.metrics["baseline/perplexity_wikitext2"] > 1
    assert tracker.params["recipe"] == "gptq(bits=4)" and tracker.artifacts == ["record.json"]
    assert re.match(r"gptq\(.*bits=4, ", tracker.runs[0][1]["workbench.recipe"])


def test_metrics_that_a_model_lost_are_named(monkeypatch, tmp_path):
    """A tracker shows one that is not sent as if it had never been measured."""
    monkeypatch.setitem(sys.modules, "mlflow", tracker := _Tracker())
    record = json.loads(next(PUBLISHED.glob("recipe-*.json")).read_text())
    record["scores"]["compressed"] |= {"perplexity_wikitext2": math.nan, "kl_wikitext2": math.inf}
    (tmp_path / "record.json").write_text(json.dumps(record))
    track(tmp_path, "mlflow")
    assert "compressed/kl_wikitext2" not in tracker.metrics and "baseline/perplexity_wikitext2" in tracker.metrics
    lost = tracker.runs[0][1]["workbench.not_finite"]
    assert lost == "compressed/perplexity_wikitext2, compressed/kl_wikitext2"


def test_a_tracker_that_fails_leaves_a_line_and_one_that_is_not_there_is_said_at_once(sweep, runs, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mlflow", types.ModuleType("mlflow"))
    (outcome,) = run_sweep(sweep(), runs=runs, tracker="mlflow")
    assert outcome.status == "finished" and "was not sent to mlflow: AttributeError" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ValueError, match=r"`--track` \(='mlflow'\).*`pip install mlflow` brings it"):
        run_sweep(sweep(name="other"), runs=runs, tracker="mlflow")
