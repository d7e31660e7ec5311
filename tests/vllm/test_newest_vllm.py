"""benchmarks/newest_vllm.py: what it prints of the tests that broke."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "newest_vllm.py"
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.vllm.a" name="fine"/>
<testcase classname="tests.vllm.a" name="skipped"><skipped message="no GPU"/></testcase>
<testcase classname="tests.vllm.b" name="moved">
<error message="ImportError: gone&#10;more"/></testcase>
<testcase classname="tests.vllm.b" name="worse">
<failure message="assert 1 == 2">long</failure></testcase>
</testsuite></testsuites>"""


def test_what_broke_is_named_with_its_reason(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("newest_vllm", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    (tmp_path / "junit.xml").write_text(JUNIT)
    text, well = script.report(tmp_path / "junit.xml")
    assert not well and text.splitlines() == [
        "2 of 4 tests broke",
        "tests.vllm.b::moved",
        "    ImportError: gone",
        "tests.vllm.b::worse",
        "    assert 1 == 2",
    ]
    (tmp_path / "junit.xml").write_text("<testsuites><testcase name='fine'/></testsuites>")
    assert script.report(tmp_path / "junit.xml") == ("0 of 1 tests broke", True)
