"""Patches: reversible, counted, guarded by digest, everywhere the original is referred to."""

import importlib
import sys
import textwrap
from pathlib import Path

import pytest
from builders import applied

from hwaware.errors import AlpaError
from hwaware.patching.mechanism import Patch, PatchSet, Target, source_digest

PACKAGE = "hostlib_of_this_test"


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A package whose second module imported the function by name."""
    folder = tmp_path / PACKAGE
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "a.py").write_text(
        textwrap.dedent(
            """
            def solve(n):
                return ("theirs", n)

            class Mesh:
                def launch(self):
                    return "theirs"
            """
        )
    )
    (folder / "b.py").write_text(f"from {PACKAGE}.a import solve\n\ndef compile_(n):\n    return solve(n)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module(f"{PACKAGE}.a"), importlib.import_module(f"{PACKAGE}.b")
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]


def make_patch(function, name="solve", digests=None):
    def make(original):
        return lambda *args: ("ours", original(*args))

    return Patch(Target(f"{PACKAGE}.a", name, digests or (source_digest(function),)), make)


def test_every_reference_is_replaced_and_restored(host):
    a, b = host
    original = a.solve
    patch = make_patch(a.solve)
    patch.apply()
    assert b.compile_(1) == ("ours", ("theirs", 1))
    assert patch.applied
    patch.revert()
    assert a.solve is original
    assert b.solve is original
    assert not patch.applied


def test_applying_counts(host):
    a, b = host
    patch = make_patch(a.solve)
    patch.apply()
    patch.apply()
    patch.revert()
    assert b.compile_(1)[0] == "ours"
    patch.revert()
    assert b.compile_(1)[0] == "theirs"
    patch.revert()  # one too many is silent
    patch.apply()
    assert b.compile_(1)[0] == "ours"
    patch.revert()


def test_a_method_is_replaced_and_restored(host):
    a, _ = host
    original = vars(a.Mesh)["launch"]
    patch = make_patch(a.Mesh.launch, "Mesh.launch")
    with applied(PatchSet([patch])):
        assert a.Mesh().launch() == ("ours", "theirs")
    assert vars(a.Mesh)["launch"] is original


def test_an_exception_inside_reverts(host):
    a, b = host
    with pytest.raises(KeyError), applied(PatchSet([make_patch(a.solve)])):
        raise KeyError
    assert b.compile_(1) == ("theirs", 1)


def test_another_source_is_refused_before_anything_is_touched(host):
    a, b = host
    patches = PatchSet([make_patch(a.Mesh.launch, "Mesh.launch"), make_patch(a.solve, digests=("0" * 16,))])
    with pytest.raises(AlpaError, match="expected one of") as caught:
        patches.apply()
    assert "To fix:" in str(caught.value)
    assert a.Mesh().launch() == "theirs"
    assert b.compile_(1) == ("theirs", 1)


def test_a_missing_function_is_refused(host):
    a, _ = host
    with pytest.raises(AlpaError, match="does not exist"):
        make_patch(a.solve, "gone").apply()


def test_a_foreign_patch_on_top_is_not_clobbered(host):
    a, b = host
    patch = make_patch(a.solve)
    patch.apply()
    ours, b.solve = b.solve, lambda n: "foreign"
    with pytest.raises(AlpaError, match="somebody else"):
        patch.revert()
    assert b.solve(1) == "foreign"
    b.solve = ours
    patch.revert()
    assert b.compile_(1) == ("theirs", 1)


def test_what_a_class_lacks_is_added_and_taken_away(host):
    a, _ = host
    patches = PatchSet([Patch(Target(f"{PACKAGE}.a", "Mesh.__len__", ()), lambda _: lambda mesh: 7)])
    with applied(patches):
        assert len(a.Mesh()) == 7
    assert "__len__" not in vars(a.Mesh)
    assert patches.patches == ()
    with pytest.raises(AlpaError, match="this Alpa is not the one that hwaware overrides"):
        Patch(Target(f"{PACKAGE}.a", "Mesh.launch", ()), lambda original: original).check()


def test_every_patch_is_in_the_table():
    """patches/README.md names each function that hwaware replaces."""
    from hwaware import activation

    table = (Path(__file__).parents[2] / "patches" / "README.md").read_text()
    names = [patch.target.name.rpartition(".")[2] for patch in activation.patches()]
    assert [name for name in names if f".{name}`" not in table] == []
    assert len(names) > 10
