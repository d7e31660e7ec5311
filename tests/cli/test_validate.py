"""tightkv validate: its statistics, its JSON, and that it fails on what is broken."""

from __future__ import annotations

import io
import json
import math
from contextlib import redirect_stdout
from typing import Any

import pytest
import scipy.special
import scipy.stats
import torch
from torch import Tensor

import json_schemas
from tightkv.config import PRESETS
from tightkv.math import rotation
from tightkv.math.codebook import Codebook
from tightkv.math.lloyd import beta_cdf
from tightkv.math.quantize import TurboQuantProd
from tightkv.math.rotation import make_rotation
from tightkv.paged.cache import PagedKV
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout
from tightkv.tools import validate
from tightkv.tools.cli import main
from tightkv.tools.validate import claims
from tightkv.tools.validate.inputs import UNIT_KINDS, attention_problem, normal, rope, unit_vectors
from tightkv.tools.validate.report import AuditRow, Claim, Options, Report
from tightkv.tools.validate.stats import LEVEL, Z, ks_test, rank_correlation, recall, softmax_kl

QUICK = Options(quick=True)
CLAIM_FIELDS = {
    "section": str,
    "claim": str,
    "setting": str,
    "measured": float,
    "interval": list | None,
    "lower": float | None,
    "upper": float | None,
    "passed": bool,
    "detail": dict,
}
AUDIT_FIELDS = {
    "what": str,
    "setting": str,
    "measured": float,
    "unit": str,
    "reading": str,
    "detail": dict,
}
SECTIONS = [
    "1 distortion",
    "2 inner products",
    "3 scaling",
    "4 rotation",
    "5 retrieval",
    "6 bytes",
]


def failures(found: list[Claim]) -> list[str]:
    return [f"{c.claim} ({c.setting})" for c in found if not c.passed]


def check(section: str) -> list[str]:
    return failures(list(claims.CLAIMS[section](QUICK)))


def keep_alone(monkeypatch: pytest.MonkeyPatch, *sections: str) -> None:
    """Only these sections, and no audit."""
    monkeypatch.setattr(validate, "CLAIMS", {name: claims.CLAIMS[name] for name in sections})
    monkeypatch.setattr(validate, "AUDIT", ())


# --- statistics ---
def test_level_and_z_belong_together() -> None:
    assert pytest.approx(scipy.stats.norm.isf(LEVEL / 2), rel=1e-4) == Z


@pytest.mark.parametrize("n", [150, 4000])
def test_ks_agrees_with_scipy(n: int) -> None:
    x = normal(1, 0, n) * 1.05
    distance, p = ks_test(x, lambda t: torch.special.ndtr(t))
    want = scipy.stats.kstest(x.double().numpy(), scipy.stats.norm.cdf)
    assert distance == pytest.approx(want.statistic, rel=1e-9)
    assert p == pytest.approx(want.pvalue, rel=0.05, abs=2e-3)


def test_ks_p_values_are_uniform_when_the_law_holds() -> None:
    ps = [ks_test(normal(seed, 0, 200), torch.special.ndtr)[1] for seed in range(200)]
    assert scipy.stats.kstest(ps, "uniform").pvalue > 1e-3


def test_rank_correlation_agrees_with_scipy() -> None:
    a, b = normal(2, 0, 3, 50), normal(2, 1, 3, 50)
    b = a + b
    want = [scipy.stats.spearmanr(x, y).statistic for x, y in zip(a, b, strict=True)]
    assert rank_correlation(a, b).tolist() == pytest.approx(want)


def test_recall_counts_the_largest() -> None:
    exact = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    other = torch.tensor([1.0, 9.0, 8.0, 2.0, 0.0])
    assert recall(exact, other, 1) == 0
    assert recall(exact, other, 2) == 0.5
    assert recall(exact, other, 5) == 1


def test_softmax_kl_is_half_the_variance_of_a_small_error() -> None:
    scores = 2 * normal(3, 0, 4, 300)
    error = 0.02 * normal(3, 1, 4, 300)
    p = scores.double().softmax(-1)
    variance = (p * error**2).sum(-1) - (p * error).sum(-1) ** 2
    assert softmax_kl(scores, scores + 7.0).abs().max() < 1e-6
    torch.testing.assert_close(softmax_kl(scores, scores + error), variance / 2, rtol=0.05, atol=0)


# --- inputs ---
@pytest.mark.parametrize("kind", UNIT_KINDS)
def test_unit_vectors_are_of_unit_length_and_seeded(kind: str) -> None:
    x = unit_vectors(kind, 5, 20, 80)
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(20))
    unit_vectors.cache_clear()
    assert torch.equal(x, unit_vectors(kind, 5, 20, 80))
    assert not torch.equal(x, unit_vectors(kind, 6, 20, 80))


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind='odd'; supported: gaussian"):
        unit_vectors("odd", 0, 1, 64)


def test_rope_keeps_lengths_and_knows_distances_alone() -> None:
    q, k = normal(7, 0, 1, 2, 64), normal(7, 1, 1, 2, 64)
    near = (rope(q, torch.tensor([9])) * rope(k, torch.tensor([4]))).sum(-1)
    far = (rope(q, torch.tensor([509])) * rope(k, torch.tensor([504]))).sum(-1)
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rope(q, torch.tensor([77])).norm(dim=-1), q.norm(dim=-1))


def test_no_query_is_a_copy_of_a_key() -> None:
    problem = attention_problem(3, 128, tokens=256, queries=32)
    q, k = problem.query, problem.key
    cosine = (
        torch.einsum("qhd,thd->hqt", q / q.norm(dim=-1, keepdim=True), k)
        / k.norm(dim=-1).T[:, None]
    )
    assert cosine[..., 1:].max() < 0.8  # the sink (token 0) is what all queries share


def test_attention_of_the_problem_is_neither_flat_nor_one_hot() -> None:
    p = attention_problem(4, 128).scores(attention_problem(4, 128).key).softmax(-1)
    effective = 1 / p.square().sum(-1)
    assert 3 < effective.median() < 200
    assert 0.02 < p[..., 0].mean() < 0.6


# --- rows ---
@pytest.mark.parametrize(
    ("measured", "lower", "upper", "passed"),
    [
        (1.0, 1.0, 1.0, True),
        (1.0, None, 0.99, False),
        (1.0, 1.01, None, False),
        (-5.0, None, 0.0, True),
        (math.nan, None, 1.0, False),
        (math.nan, None, None, False),
    ],
)
def test_a_claim_passes_inside_its_bounds(
    measured: float, lower: float | None, upper: float | None, passed: bool
) -> None:
    claim = Claim("s", "c", "x", measured, lower=lower, upper=upper, half_width=0.5)
    assert claim.passed is passed
    assert json.loads(json.dumps(claim.to_dict(), allow_nan=False))["passed"] is passed


def test_audit_rows_never_fail_a_report() -> None:
    bad = AuditRow("w", "s", math.inf, "u", "r")
    report = Report(QUICK, [Claim("s", "c", "x", 1.0, upper=2.0)], [bad], 0.0)
    assert report.passed
    assert report.to_dict()["audit"][0]["measured"] is None


@pytest.mark.parametrize("dim", [63, 48, 512])
def test_dimensions_it_cannot_do_are_refused(dim: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--dim", str(dim)]) == 2
    assert f"dim={dim}; supported: multiples of 16 from 64 to 256" in capsys.readouterr().err


# --- the whole command ---
@pytest.fixture(scope="module")
def command() -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of one quick run."""
    with redirect_stdout(io.StringIO()) as printed:
        code = main(["validate", "--quick", "--json"])
    json_schemas.check("validate", printed.getvalue())
    return code, json.loads(printed.getvalue())


def test_quick_run_passes(command: tuple[int, dict[str, Any]]) -> None:
    code, data = command
    assert [c for c in data["claims"] if not c["passed"]] == []
    assert code == 0


def test_json_schema(command: tuple[int, dict[str, Any]]) -> None:
    data = command[1]
    assert {name: type(value) for name, value in data.items()} == {
        "schema": int,
        "seed": int,
        "dim": int,
        "quick": bool,
        "passed": bool,
        "failed_claims": int,
        "seconds": float,
        "claims": list,
        "audit": list,
    }
    for fields, rows in ((CLAIM_FIELDS, data["claims"]), (AUDIT_FIELDS, data["audit"])):
        for row in rows:
            assert row.keys() == fields.keys()
            for name, kind in fields.items():
                kinds = (kind, int) if kind is float else kind
                assert isinstance(row[name], kinds), (name, row)
    assert list(dict.fromkeys(c["section"] for c in data["claims"])) == SECTIONS
    for claim in data["claims"]:
        assert claim["lower"] is not None or claim["upper"] is not None, claim
        if claim["interval"] is not None:
            low, high = claim["interval"]
            assert low <= claim["measured"] <= high


def test_every_preset_and_width_is_covered(command: tuple[int, dict[str, Any]]) -> None:
    found = command[1]["claims"]
    for section, per_preset in (("5 retrieval", 3), ("6 bytes", 2)):
        for name in PRESETS:
            rows = [c for c in found if c["section"] == section and c["setting"].startswith(name)]
            assert len(rows) == per_preset
    books = {c["setting"] for c in found if c["claim"] == "MSE within 3% of Lloyd-Max"}
    assert {
        f"b={b}, {book} book, hadamard" for b in (1, 2, 3, 4) for book in ("fp8", "beta")
    } < books


def test_audit_finds_the_known_weaknesses(command: tuple[int, dict[str, Any]]) -> None:
    found = command[1]["audit"]

    def rows(what: str) -> list[dict[str, Any]]:
        return [row for row in found if row["what"] == what]

    by_bits = [row["measured"] for row in rows("key bits")]
    assert by_bits == sorted(by_bits)
    for row in rows("key bits"):
        assert row["measured"] == pytest.approx(row["detail"]["predicted_kl"], rel=0.5)
    sweep = {
        (row["detail"]["centered"], row["detail"]["bias"]): row["measured"]
        for row in rows("biased keys")
        if "centered" in row["detail"]
    }
    assert sweep[0.0, 8.0] > 10 * sweep[1.0, 8.0]
    for row in rows("prod (QJL) keys"):
        assert row["measured"] > 2 * row["detail"]["mse"]
    for row in rows("no rotation"):
        assert row["measured"] > 1.2 * row["detail"]["with_rotation"]
    default, least, lost = (row["measured"] for row in rows("no exact window")[:3])
    assert default < least < lost
    one_hot = {row["detail"]["bits"]: row for row in rows("one-hot vectors, Hadamard")}
    assert one_hot[2]["measured"] > 2
    assert one_hot[2]["detail"]["corrected"] < 1e-4


@pytest.mark.thorough
@pytest.mark.slow
def test_another_seed_and_dimension_pass_in_text(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["validate", "--quick", "--seed", "1", "--dim", "80"])
    text = capsys.readouterr().out
    assert code == 0, text
    assert "FAIL" not in text
    assert all(f"Claim {section}" in text for section in SECTIONS)


# --- what must go red ---
def test_a_flipped_sign_makes_the_command_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flipped(self: Codebook, codes: Tensor) -> Tensor:
        return torch.where(codes == 1, -1.0, 1.0) * decode(self, codes)

    decode = Codebook.decode
    monkeypatch.setattr(Codebook, "decode", flipped)
    keep_alone(monkeypatch, "distortion")  # this alone must do
    assert main(["validate", "--quick"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_a_skipped_inverse_rotation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation._Dense, "inverse", lambda self, y: y)
    assert any("haar" in line for line in check("distortion"))


def test_a_wrong_sketch_factor_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def longer(self: TurboQuantProd, fields: dict[str, Tensor]) -> Tensor:
        coarse = self.coarse.decode_rotated(fields)
        return coarse + math.sqrt(2 / math.pi) * (decode(self, fields) - coarse)

    decode = TurboQuantProd.decode_rotated
    monkeypatch.setattr(TurboQuantProd, "decode_rotated", longer)
    assert any("prod unbiased" in line and "y = x" in line for line in check("inner products"))


def test_a_missing_rotation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "make_rotation", lambda kind, dim, seed: make_rotation("none", dim))
    failed = check("rotation")
    assert len(failed) == 6
    assert not any("must reject" in line for line in failed)


def test_a_test_without_power_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "ks_test", lambda samples, cdf: (0.0, 1.0))
    failed = check("rotation")
    assert len(failed) == 2
    assert all("must reject" in line for line in failed)


def test_a_forgotten_centering_flag_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: Codec, fields: dict[str, Tensor], mean: Tensor | None) -> Tensor:
        return self.key.decode_rotated({**fields, "scale": fields["scale"].abs()})

    monkeypatch.setattr(Codec, "decode_keys", forget)
    assert len(check("retrieval")) >= len(PRESETS)


def test_a_byte_too_many_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = PagedKV.allocated_bytes
    monkeypatch.setattr(PagedKV, "allocated_bytes", lambda self: counted(self) + 1)
    assert check("bytes") == [
        "bytes allocated - bytes computed (largest of 32 caches with 1 and 130 tokens)"
    ]


def test_a_layout_that_hides_its_ring_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageLayout, "sequence_bytes", lambda self, tokens: 0)
    assert len(check("bytes")) == 1 + 2 * len(PRESETS)


def test_draws_of_a_wrong_scale_are_rejected() -> None:
    samples = claims.coordinates(QUICK, "hadamard", 64, "uneven", 2000)
    assert ks_test(samples, lambda t: beta_cdf(t, 64))[1] > LEVEL
    assert ks_test(1.3 * samples, lambda t: beta_cdf(t, 64))[1] < LEVEL


def test_run_restores_the_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_alone(monkeypatch)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert validate.run(QUICK).passed
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
