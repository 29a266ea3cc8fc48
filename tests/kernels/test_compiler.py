"""A library is found again without its compiler, and of its objects only those whose source was edited are new."""

import shutil

import pytest

from kernels import compiler

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Sources of which the first includes a file, and a cache folder of their own."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    sources = tmp_path / "toy"
    sources.mkdir()
    (sources / "one.cpp").write_text('#include "both.inc"\nint one() { return BOTH; }\n')
    (sources / "two.cpp").write_text("int two() { return 2; }\n")
    (sources / "both.inc").write_text("#define BOTH 1\n")
    return sources


def built(folder):
    """Which objects were compiled for the library that is built now."""
    objects = compiler.cache_folder(folder.name) / "objects"
    before = set(objects.glob("*.o"))
    assert compiler.build(folder).exists()
    return sorted(path.name.partition("-")[0] for path in set(objects.glob("*.o")) - before)


def test_only_what_was_edited_is_compiled(folder):
    assert built(folder) == ["one", "two"]
    (folder / "both.inc").write_text("#define BOTH 3\n")
    assert built(folder) == ["one"]
    (folder / "two.cpp").write_text("int two() { return 4; }\n")
    assert built(folder) == ["two"]
    (folder / "both.inc").write_text("#define BOTH 1\n")
    assert built(folder) == []


def test_a_library_is_found_after_its_compiler_has_gone(folder, monkeypatch):
    """Also one without OpenMP, and none that another compiler was asked for, as that of a sanitizer."""
    assert compiler.built_library(folder) is None
    library = compiler.build(folder)
    monkeypatch.setenv("CXX", "g++ -fsanitize=address")
    assert compiler.built_library(folder) is None
    monkeypatch.delenv("CXX")
    assert compiler.built_library(folder) == library
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    assert compiler.built_library(folder) == library
    alone = library.rename(library.with_stem(library.stem + compiler.ONE_THREAD))
    assert compiler.built_library(folder) == alone
    (folder / "two.cpp").write_text("int two() { return 4; }\n")
    assert compiler.built_library(folder) is None
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler"):
        compiler.build(folder)


def test_an_object_whose_source_was_edited_meanwhile_is_not_kept(folder, tmp_path, monkeypatch):
    wrapper = tmp_path / "edits"
    wrapper.write_text(f'#!/bin/sh\n[ "$2" ] && echo \'// more\' >> {folder / "two.cpp"}\nexec g++ "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    with pytest.raises(RuntimeError, match="two.cpp was edited"):
        compiler.build(folder)
    assert not list((compiler.cache_folder("toy") / "objects").glob("two-*"))
