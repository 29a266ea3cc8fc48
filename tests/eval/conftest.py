"""Models whose rounds take as long as a test says."""

import pytest

from eval.speed import speed


@pytest.fixture
def timed(monkeypatch):
    """No clock: rounds take the seconds that are given by batch and by the name of the model; who was asked is written
    down."""
    asked, names = [], {}

    def fake(variant, prompt_tokens, new_tokens, batch=1):
        slow = {"baseline": 2.0, "fast": 1.0, "slow": 8.0}[names[id(variant.source)]]
        asked.append((names[id(variant.source)], batch, prompt_tokens))
        return slow * batch * prompt_tokens / 1000, [slow / 100] * new_tokens

    def models(tiny, *which):
        made = {name: tiny("llama", num_hidden_layers=1) for name in which}
        names.update({id(model): name for name, model in made.items()})
        return made

    def as_written(variant, *lengths):
        return [2 * seconds for seconds in fake(variant, *lengths)[1]]

    monkeypatch.setattr(speed, "_round", fake)
    monkeypatch.setattr(speed, "_written", as_written)
    return models, asked
