"""The claims of the method: a function for each section, whose rows pass or fail."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tightkv.config import PRESETS, KVQuantConfig
from tightkv.math.codebook import get_codebook
from tightkv.math.lloyd import BetaLaw, beta_cdf, expected_distortion
from tightkv.math.quantize import Quantizer, TurboQuantMSE, TurboQuantProd
from tightkv.math.rotation import make_rotation
from tightkv.pages.layout import RING_SLACK, PageLayout
from tightkv.tools.validate import inputs
from tightkv.tools.validate.report import Claim, Options
from tightkv.tools.validate.stats import LEVEL, Z, ks_test, rank_correlation, recall

BITS = (1, 2, 3, 4)
TOLERANCE = 0.03  # of the Lloyd-Max value
UPPER = math.sqrt(3) * math.pi / 2  # Theorem 1: distortion <= UPPER * 4**-bits
VECTORS = 32  # under each rotation
PAIRS = 256  # of inner products
REJECTED = 1e-6  # p-value a control must stay below
HEADS = 8
CONTEXTS = {"1k": 1024, "8k": 8192, "128k": 131072}
# Squared error by the scale mode of a preset's keys, from the distortion (docs/math.md).
KEY_ERRORS: dict[str, Callable[[float], float]] = {
    "corrected": lambda d: 2 - 2 * math.sqrt(1 - d),
    "unbiased": lambda d: d / (1 - d),
}


# --- 1 and 3: the distortion of TurboQuant-MSE, from above and from below ---
def distortion(options: Options) -> Iterator[Claim]:
    """The Lloyd-Max value for every book and both rotations, then Theorems 1 and 3."""
    fast = (("fp8", "hadamard"), ("gaussian", "hadamard"), ("beta", "hadamard"))
    for codebook, rotation in (*fast, ("fp8", "haar")):
        for bits in BITS:
            samples = squared_errors(options, "uneven", bits, codebook=codebook, rotation=rotation)
            want = lloyd_max(codebook, bits, options.dim)
            book = get_codebook(codebook, bits, options.dim).distortion
            claim, setting = "MSE within 3% of Lloyd-Max", f"b={bits}, {codebook} book, {rotation}"
            bounds = {"lower": want * (1 - TOLERANCE), "upper": want * (1 + TOLERANCE)}
            detail = {"bits": bits, "lloyd_max": want, "book_distortion": book}
            yield Claim.of("1 distortion", claim, setting, samples, **bounds, detail=detail)
    for bits in range(1, 7):  # of the book and the rotation that the theorems are about
        errors = squared_errors(options, "sparse", bits, codebook="beta", rotation="haar")
        want = lloyd_max("beta", bits, options.dim) * 4.0**bits
        claim = "MSE * 4^b between 1 and sqrt(3) pi / 2"
        setting = f"b={bits}, beta book, sparse vectors, haar"
        detail = {"bits": bits, "lloyd_max": want}
        bounds = {"lower": 1.0, "upper": UPPER}
        yield Claim.of("3 scaling", claim, setting, errors * 4.0**bits, **bounds, detail=detail)


def squared_errors(
    options: Options,
    kind: str,
    bits: int,
    *,
    codebook: str = "fp8",
    rotation: str = "hadamard",
    scale_mode: str = "norm",
) -> Tensor:
    """Mean squared error of unit vectors of this kind under each of many rotations, [rotations]."""
    count = options.samples(192, 80)  # fewer than the rotations kept in memory
    x = inputs.unit_vectors(kind, options.stream(f"unit {kind}"), count * VECTORS, options.dim)
    x = x.unflatten(0, (count, VECTORS))
    many = inputs.many_rotations(rotation, options.dim, options.stream("rotations"), count)
    quantizer = TurboQuantMSE(
        options.dim, bits, scale_mode=scale_mode, codebook=codebook, rotation=many
    )
    rest = quantizer.decode(quantizer.encode(x)) - x
    return rest.square().sum(-1).mean(-1)


def lloyd_max(codebook: str, bits: int, dim: int) -> float:
    """The distortion this book must have: its cells integrated under the exact law at `dim`."""
    magnitudes = get_codebook(codebook, bits, dim).magnitudes
    return expected_distortion(
        BetaLaw(dim), torch.tensor(magnitudes, dtype=torch.float64, device="cpu")
    )


# --- 2: inner products by TurboQuant-Prod, and what the scale modes do to their bias ---
def inner_products(options: Options) -> Iterator[Claim]:
    """Unbiasedness and variance of Prod, then the bias of MSE under two scale modes."""
    section = "2 inner products"
    for bits in (2, 3, 4):
        own, other, want = _prod_errors(options, bits)
        # An interval that would hide a fifth of the bias MSE has at these bits proves nothing.
        widest = lloyd_max("fp8", bits, options.dim) / 5
        claim = "prod unbiased: mean of <y, x^> - <y, x>"
        yield _unbiased(claim, f"b={bits}, y = x", own.mean(-1), widest)
        setting, squared = f"b={bits}, independent y", other.square().mean(-1)
        yield _unbiased(claim, setting, other.mean(-1), widest)
        claim = "prod variance below sqrt(3) pi^2 / d * 4^-b"
        upper = 2 * math.pi * UPPER / options.dim * 4.0**-bits
        yield Claim.of(section, claim, setting, squared, upper=upper)
        claim = "prod variance within 5% of (pi/2 |r|^2 - <y, r>^2) / d"
        yield Claim.of(section, claim, setting, squared, lower=0.95 * want, upper=1.05 * want)
    for bits in BITS:
        quantizer, x = _over_rotations(options, bits, "norm")
        errors = (quantizer.inner_product(x, quantizer.encode(x)) - 1).mean(-1)
        want = -lloyd_max("beta", bits, options.dim)
        claim = "mse, norm scale: biased low by D(b), within 10%"
        bounds = {"lower": 1.1 * want, "upper": 0.9 * want}
        yield Claim.of(section, claim, f"b={bits}, y = x", errors, **bounds)
    for bits in (2, 4):
        quantizer, x = _over_rotations(options, bits, "unbiased")
        fields = quantizer.encode(x)
        side = _vectors(options, 64)[1]
        side = side - (side * x[0]).sum(-1, keepdim=True) * x[0]
        y = 0.5 * x[0] + math.sqrt(0.75) * side / side.norm(dim=-1, keepdim=True)
        errors = (quantizer.inner_product(y.expand_as(x), fields) - 0.5).mean(-1)
        claim = "mse, unbiased scale: mean of <y, x^> - <y, x>"
        widest = lloyd_max("beta", bits, options.dim) / 10  # a tenth of the norm scale's bias
        yield _unbiased(claim, f"b={bits}, y at 60 degrees to x", errors, widest)


def _vectors(options: Options, count: int) -> tuple[Tensor, Tensor]:
    """Unit vectors x [count, dim] and independent unit queries."""
    x = inputs.unit_vectors("gaussian", options.stream("products x"), count, options.dim)
    return x, inputs.unit_vectors("gaussian", options.stream("products y"), count, options.dim)


def _prod_errors(options: Options, bits: int) -> tuple[Tensor, Tensor, float]:
    """<y, x^> - <y, x> for y = x and for independent y, [sketches, pairs] each.

    And the mean of the variance that the residual of each x predicts for independent y.
    """
    x, y = _vectors(options, PAIRS)
    rotation = make_rotation("hadamard", options.dim, options.seed)
    own, other = [], []
    for i in range(options.samples(400, 64)):
        seed = options.stream("sketches") + i
        quantizer = TurboQuantProd(options.dim, bits, rotation=rotation, seed=seed)
        fields = quantizer.encode(x)
        own.append(quantizer.inner_product(x, fields) - 1)
        other.append(quantizer.inner_product(y, fields) - (x * y).sum(-1))
    coarse = TurboQuantMSE(options.dim, bits - 1, rotation=rotation)
    rest = x - coarse.decode(coarse.encode(x))
    variance = math.pi / 2 * rest.square().sum(-1) - (y * rest).sum(-1).square()
    return torch.stack(own), torch.stack(other), float(variance.mean()) / options.dim


def _unbiased(claim: str, setting: str, errors: Tensor, widest: float) -> Claim:
    """Zero is in the interval of the mean, which may be no wider than so much to each side."""
    row = Claim.of("2 inner products", claim, setting, errors)
    assert row.half_width is not None
    limit = min(row.half_width, widest)
    return replace(row, lower=-limit, upper=limit)


def _over_rotations(options: Options, bits: int, mode: str) -> tuple[Quantizer, Tensor]:
    """A quantizer with many Haar rotations, and its inputs [rotations, 64, dim]."""
    count = options.samples(192, 64)
    many = inputs.many_rotations("haar", options.dim, options.stream("rotations"), count)
    x = _vectors(options, 64)[0].expand(count, -1, -1)
    return TurboQuantMSE(options.dim, bits, scale_mode=mode, codebook="beta", rotation=many), x


# --- 4: a rotated coordinate follows the Beta law, whatever the input ---
def beta_law(options: Options) -> Iterator[Claim]:
    """Kolmogorov-Smirnov tests of both rotations at several sizes, and controls."""
    fast, slow = options.samples(4000, 600), options.samples(1000, 150)
    power_of_two = options.dim & (options.dim - 1) == 0
    for rotation, dim, kind, count in (
        ("hadamard", 64, "uneven", fast),
        ("hadamard", options.dim if power_of_two else 128, "uneven", fast),
        ("hadamard", 256, "uneven", fast),
        ("haar", 64, "one-hot", slow),
        ("haar", 80, "uneven", slow),
        ("haar", options.dim, "one-hot", slow),
        ("none", 80, "uneven", fast),
        ("none", options.dim, "uneven", fast),
    ):
        samples = coordinates(options, rotation, dim, kind, count)
        distance, p_value = ks_test(samples, partial(beta_cdf, dim=dim))
        control = rotation == "none"
        claim = "no rotation: the test must reject (p)" if control else "Beta law not rejected (p)"
        setting = f"{rotation}, {dim} dimensions, {kind} vectors, {count} draws"
        bounds = {"upper": REJECTED} if control else {"lower": LEVEL}
        detail = {"ks_distance": distance, "draws": count}
        yield Claim("4 rotation", claim, setting, p_value, detail=detail, **bounds)


def coordinates(options: Options, rotation: str, dim: int, kind: str, count: int) -> Tensor:
    """sqrt(dim) times one coordinate of each of `count` vectors, each rotated by its own draw.

    One coordinate a draw keeps the samples independent: those of one vector are not.
    """
    seed = options.stream(f"beta {rotation} {dim} {kind}")
    rows = enumerate(inputs.unit_vectors(kind, seed, count, dim))
    picked = [make_rotation(rotation, dim, seed + i)(row)[i % dim] for i, row in rows]
    return torch.stack(picked) * dim**0.5


# --- 5: compressed keys rank like exact ones, for queries that are no copies of keys ---
def retrieval(options: Options) -> Iterator[Claim]:
    """Recall@1, recall@10 and Spearman's correlation of every preset's scores.

    The theory gives more than a threshold: the error of a score is noise of a known variance, so
    each must be what exact scores plus that noise give.
    """
    queries = options.samples(256, 48)
    problem = inputs.attention_problem(options.stream("retrieval"), options.dim, queries=queries)
    exact = problem.scores(problem.key)
    noise = inputs.normal(options.stream("score noise"), 0, *exact.shape)
    predictions: dict[KVQuantConfig, dict[str, Tensor]] = {}  # presets often share their keys
    for name in PRESETS:
        cfg = KVQuantConfig.preset(name, seed=options.seed)
        keys_alone = cfg.replace(value_bits=16)
        if keys_alone not in predictions:
            # A tenth more noise than predicted: the theory leaves out float16 scales and means.
            predicted = exact + 1.1 * noise * predicted_noise(cfg, problem)
            predictions[keys_alone] = _measures(exact, predicted)
        found = _measures(exact, problem.scores(inputs.fill(cfg, problem).dequantize()[0][0]))
        for measure, got in found.items():
            want = predictions[keys_alone][measure]
            half_width = Z * math.sqrt(float(got.var() + want.var()) / got.numel())
            mean = float(want.mean())
            yield Claim(
                "5 retrieval",
                f"{measure} as the predicted noise allows",
                f"{name}, {exact.shape[-1]} keys, {got.numel()} queries",
                float(got.mean()),
                lower=mean - half_width,
                half_width=half_width,
                detail={"predicted": mean},
            )


def _measures(exact: Tensor, approximate: Tensor) -> dict[str, Tensor]:
    """Each measure for every head and query, [heads, queries]."""
    return {
        "recall@1": recall(exact, approximate, 1),
        "recall@10": recall(exact, approximate, 10),
        "rank correlation": rank_correlation(exact, approximate),
    }


def predicted_noise(cfg: KVQuantConfig, problem: inputs.Problem) -> Tensor:
    """Standard deviation of each score's error by the theory, [heads, queries, tokens].

    The scale mode leaves an error of known size relative to |k - mean|, which the rotation
    spreads evenly over the dimensions (docs/math.md).
    """
    tokens, _, dim = problem.key.shape
    pages = problem.key.unflatten(0, (tokens // cfg.page_size, cfg.page_size))
    rest = (pages - pages.mean(1, keepdim=True)).flatten(0, 1)
    squared = torch.minimum(rest.square().sum(-1), problem.key.square().sum(-1))
    error = KEY_ERRORS[cfg.key_scale](lloyd_max(cfg.codebook, cfg.key_bits, dim)) * squared
    query = problem.query.norm(dim=-1).T  # [heads, queries]
    return query[:, :, None] * error.sqrt().T[:, None, :] / dim


# --- 6: the compression ratio, with every byte counted ---
def sizes(options: Options) -> Iterator[Claim]:
    """Allocated bytes against computed ones, and the ratio to bf16, for every preset."""
    section, rows, differences = "6 bytes", list[Claim](), dict[str, float]()
    many = options.samples(1000, 130)
    for dim in (64, 128):
        for name in PRESETS:
            layout = PageLayout(KVQuantConfig.preset(name), HEADS, dim)
            for tokens in (1, many):
                allocated = allocated_bytes(layout, tokens, options.stream("bytes"))
                difference = allocated - layout.total_bytes(tokens)
                differences[f"{name} d{dim} {tokens} tokens"] = difference
            ratios = {
                label: tokens * HEADS * dim * 4 / layout.total_bytes(tokens)
                for label, tokens in CONTEXTS.items()
            }
            want = 16 / _bits_per_element(layout, CONTEXTS["128k"])
            setting = (
                f"{name}, head_dim {dim}; {ratios['1k']:.2f}x at 1k, {ratios['8k']:.2f}x at 8k"
            )
            claim = "ratio to bf16 at 128k, as counted by hand"
            bounds = want * (1 - 1e-9), want * (1 + 1e-9)
            detail = {f"ratio_{label}": ratio for label, ratio in ratios.items()}
            rows.append(Claim(section, claim, setting, ratios["128k"], *bounds, detail=detail))
    worst = max(differences.values(), key=abs)
    setting = f"largest of {len(differences)} caches with 1 and {many} tokens"
    claim = "bytes allocated - bytes computed"
    yield Claim(section, claim, setting, float(worst), 0.0, 0.0, detail=differences)
    yield from rows


def allocated_bytes(layout: PageLayout, tokens: int, seed: int) -> int:
    """Bytes that a real cache with a sequence of `tokens` tokens holds."""
    shape = tokens, layout.num_kv_heads, layout.head_dim
    key, value = (inputs.normal(seed, stream, *shape).to(torch.bfloat16) for stream in range(2))
    return inputs.filled(layout, key, value).allocated_bytes()


def _bits_per_element(layout: PageLayout, tokens: int) -> float:
    """Codes, a 16-bit scale per vector, a mean key per page, the ring, sinks, tables."""
    cfg, dim = layout.cfg, layout.head_dim
    codes = (cfg.key_bits + cfg.value_bits) / 2
    mean_bytes = 2 * dim if cfg.mean_bits == 16 else dim + 16  # int8: a scale, padded to 16 bytes
    scales, means = 16 / dim, 8 * mean_bytes / (2 * dim * cfg.page_size)
    newest = 16 if cfg.window_bits == 16 else (12 + 8) / 2 + 16 / dim
    ring = newest * (cfg.exact_pages * cfg.page_size + RING_SLACK) / tokens
    exact = ring + 16 * cfg.sinks / tokens
    tables = 32 * (tokens / cfg.page_size + 5) / (tokens * HEADS * 2 * dim)
    return codes + scales + means + exact + tables


CLAIMS: dict[str, Callable[[Options], Iterator[Claim]]] = {
    "distortion": distortion,
    "inner products": inner_products,
    "rotation": beta_law,
    "retrieval": retrieval,
    "bytes": sizes,
}
