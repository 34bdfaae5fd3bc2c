"""KVLayout and Shard: shapes, sizes, validation, and fingerprints that no process may compute differently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstream.layout
from kvstream.errors import ConfigError
from kvstream.layout import KVLayout, Shard, describe_mismatch

SMOL: dict[str, Any] = {"layers": 30, "kv_heads": 3, "head_dim": 64, "block_tokens": 16, "dtype": "bfloat16"}
MLA: dict[str, Any] = {
    "layers": 61,
    "kv_heads": 1,
    "head_dim": 576,
    "block_tokens": 64,
    "dtype": "float8_e4m3fn",
    "parts": "latent",
}


@pytest.mark.parametrize(
    ("order", "parts", "shape"),
    [
        ("NHD", "split", (2, 16, 3, 64)),
        ("HND", "split", (2, 3, 16, 64)),
        ("NHD", "packed", (16, 3, 128)),
        ("HND", "packed", (3, 16, 128)),
    ],
)
def test_block_shape(order: Any, parts: Any, shape: tuple[int, ...]) -> None:
    layout = KVLayout(**SMOL, order=order, parts=parts)
    assert layout.block_shape == shape
    assert layout.block_bytes == 12288 == np.zeros(shape, ml_dtypes.bfloat16).nbytes
    assert layout.token_bytes == 768


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_latent_block(order: Any) -> None:
    layout = KVLayout(**MLA, order=order)
    assert layout.block_shape == (64, 576)
    assert layout.block_bytes == 64 * 576
    assert layout.token_bytes == 576


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float32", np.float32),
        ("float16", np.float16),
        ("bfloat16", ml_dtypes.bfloat16),
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        ("float8_e5m2", ml_dtypes.float8_e5m2),
        ("int8", np.int8),
        ("uint8", np.uint8),
    ],
)
def test_dtypes(name: str, dtype: Any) -> None:
    layout = KVLayout(**SMOL | {"dtype": name})
    assert layout.np_dtype == np.dtype(dtype)
    assert layout.np_dtype.name == name


def test_sizes_count_whole_blocks() -> None:
    layout = KVLayout(**SMOL)
    assert [layout.blocks_for(tokens) for tokens in (0, 1, 16, 17, 600)] == [0, 1, 1, 2, 38]
    assert layout.bytes(0) == 0
    assert layout.bytes(40) == 30 * 3 * 12288
    for wrong in (-1, 1.0, True):
        with pytest.raises(ConfigError, match="tokens: must be an int of at least 0"):
            layout.blocks_for(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(field, value) for field in ("layers", "kv_heads", "head_dim", "block_tokens") for value in (0, -1, 10**6)],
        ("layers", True),
        ("layers", 2.0),
        ("head_dim", "64"),
        ("block_tokens", np.int64(16)),
        ("dtype", "float64"),
        ("dtype", "bf16"),
        ("dtype", np.float16),
        ("dtype", ["float16"]),
        ("order", "nhd"),
        ("parts", "both"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        KVLayout(**SMOL | {field: value})
    assert caught.value.field == field
    assert str(getattr(value, "__name__", value)) in str(caught.value)


def test_latent_has_no_heads() -> None:
    with pytest.raises(ConfigError, match=r"kv_heads: .* must be 1, not 8"):
        KVLayout(**MLA | {"kv_heads": 8})


def test_a_block_is_bounded() -> None:
    with pytest.raises(ConfigError, match=r"block_tokens: .* above the limit"):
        KVLayout(layers=1, kv_heads=4096, head_dim=65536, block_tokens=65536, dtype="float32")


def test_decoding_validates_too() -> None:
    layout = KVLayout(**MLA)
    encoded = msgspec.msgpack.encode(layout)
    assert msgspec.msgpack.decode(encoded, type=KVLayout) == layout
    with pytest.raises(ConfigError, match="kv_heads"):
        msgspec.convert(MLA | {"kv_heads": 2}, KVLayout)


# Literal on purpose: a change here makes every running worker refuse every new one.
FINGERPRINTS = [
    (SMOL, "0750b06c258c5ac87127dfa6abe0d24a"),
    (MLA, "7daa59738519998c200b47c3e108f057"),
]


@pytest.mark.parametrize(("fields", "expected"), FINGERPRINTS)
def test_fingerprint_is_pinned(fields: dict[str, Any], expected: str) -> None:
    assert KVLayout(**fields).fingerprint() == expected


@pytest.mark.parametrize("seed", ["0", "4711"])
def test_fingerprint_is_the_same_in_every_process(seed: str) -> None:
    script = (
        "from kvstream.layout import KVLayout\n"
        f"for fields in ({SMOL!r}, {MLA!r}):\n"
        "    print(KVLayout(**fields).fingerprint())\n"
    )
    root = Path(kvstream.layout.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=root,
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [expected for _, expected in FINGERPRINTS]


layouts = st.builds(
    KVLayout,
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 3),
    block_tokens=st.integers(1, 3),
    dtype=st.sampled_from(["float16", "bfloat16", "int8", "uint8"]),
    order=st.sampled_from(["NHD", "HND"]),
    parts=st.sampled_from(["split", "packed"]),
)


@given(layouts, layouts)
def test_fingerprints_differ_exactly_where_layouts_do(a: KVLayout, b: KVLayout) -> None:
    assert (a.fingerprint() == b.fingerprint()) == (a == b)
    assert (describe_mismatch(a, b) == "") == (a == b)


@given(layouts)
def test_sizes_agree_with_numpy(layout: KVLayout) -> None:
    array = np.zeros((5, *layout.block_shape), layout.np_dtype)
    assert array.nbytes == 5 * layout.block_bytes
    assert layout.block_bytes == layout.block_tokens * layout.token_bytes
    assert layout.bytes(5 * layout.block_tokens) == layout.layers * array.nbytes


def test_every_field_counts() -> None:
    base = KVLayout(**SMOL)
    changes: dict[str, Any] = {
        "layers": 31,
        "kv_heads": 4,
        "head_dim": 128,
        "block_tokens": 32,
        "dtype": "float16",
        "order": "HND",
        "parts": "packed",
    }
    assert set(changes) == set(KVLayout.__struct_fields__)
    others = [msgspec.structs.replace(base, **{field: value}) for field, value in changes.items()]
    assert len({layout.fingerprint() for layout in (base, *others)}) == len(changes) + 1


def test_describe_mismatch_names_the_fields() -> None:
    a = KVLayout(**SMOL)
    b = KVLayout(**SMOL | {"block_tokens": 32, "dtype": "float16"})
    assert describe_mismatch(a, b) == "block_tokens 16 != 32, dtype bfloat16 != float16"
    assert describe_mismatch(a, a) == ""


def test_shard() -> None:
    assert (Shard().rank, Shard().size) == (0, 1)
    shard = Shard(tp_rank=1, tp_size=4, pp_rank=2, pp_size=3)
    assert (shard.rank, shard.size) == (9, 12)
    everyone = [Shard(tp, 4, pp, 3).rank for pp in range(3) for tp in range(4)]
    assert everyone == list(range(12))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tp_rank": 1}, "tp_rank"),
        ({"tp_rank": -1}, "tp_rank"),
        ({"tp_size": 0}, "tp_size"),
        ({"tp_size": True}, "tp_size"),
        ({"pp_rank": 2, "pp_size": 2}, "pp_rank"),
        ({"pp_size": 10**6}, "pp_size"),
    ],
)
def test_shard_validates(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Shard(**fields)
    assert caught.value.field == field
