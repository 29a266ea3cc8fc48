"""A record's code is that of its commit unless the packages have changed; other files of the checkout do not count."""

import subprocess

import pytest

from eval.machine import checkout


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    for package in ("compress", "eval", "kernels", "notebooks", "reports/published"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "a.py").touch()
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for asked in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *asked], cwd=tmp_path, check=True)
    return tmp_path


def test_only_the_packages_count(repository):
    commit, dirty = checkout.checkout()
    assert len(commit) == 40 and dirty is False
    (repository / "gptq-out.ipynb").touch()
    (repository / "reports" / "published" / "new.json").touch()
    assert checkout.checkout() == (commit, False)
    (repository / "compress" / "new.py").touch()
    assert checkout.checkout() == (commit, True)
    (repository / "compress" / "new.py").unlink()
    (repository / "kernels" / "a.py").write_text("changed")
    assert checkout.checkout() == (commit, True)


def test_without_git_nothing_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    assert checkout.checkout() == (None, None)
