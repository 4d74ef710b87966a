"""Fingerprints: equal in every form, different if the bytes differ."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from kvledger.audit.engines.content.fingerprint import Fingerprints, odd_numbers  # noqa: E402

KEY = 0x1234_5678_9ABC_DEF0_1122
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int64]


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def fingerprint_by_hand(layers: list[torch.Tensor], key: int, block: int) -> list[int]:
    """The definition, word by word, in Python's integers."""
    words = [_words(layer[block]) for layer in layers]
    keys = [int(number) for number in odd_numbers(key, max(len(row) for row in words))]
    factors = [int(number) for number in odd_numbers(key ^ 0xD6E8FEB86659FD93, len(layers))]
    sums = [sum(word * keys[place] for place, word in enumerate(row)) for row in words]
    by_layer = [factor * total for factor, total in zip(factors, sums, strict=True)]
    return [_signed(value) for value in by_layer]


def _words(block: torch.Tensor) -> list[int]:
    raw = bytes(block.contiguous().view(-1).view(torch.uint8).tolist())
    raw += bytes(-len(raw) % 4)
    return [int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4)]


def _signed(value: int) -> int:
    value %= 1 << 64
    return value - (1 << 64) if value >= 1 << 63 else value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7, 2, 4, 6), (5, 3, 3), (4, 17), (6, 2, 8, 2, 4)], ids=str)
def test_the_fingerprint_is_the_sum_of_words_times_keys(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    layers = [random_bytes(shape, dtype, seed) for seed in range(3)]
    prints = Fingerprints(layers, KEY)
    blocks = [3, 0, 1, 2]
    expected = [fingerprint_by_hand(layers, KEY, block) for block in blocks]
    assert prints.by_layer(blocks).tolist() == expected
    assert prints.by_layer_torch(blocks).tolist() == expected
    assert prints.of(blocks).tolist() == [_signed(sum(row)) for row in expected]


def views(rng: random.Random, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A random view with the block axis first, as runners make them."""
    blocks, heads, tokens, dim = (
        rng.randint(3, 9),
        rng.randint(1, 3),
        rng.choice([4, 16]),
        rng.choice([3, 8, 12]),
    )
    form = rng.randrange(6)
    if form == 0:  # [blocks, heads, tokens, 2 * dim], memory in the order of tokens
        return random_bytes((blocks, tokens, heads, 2 * dim), dtype, seed).permute(0, 2, 1, 3)
    if form == 1:  # [2, blocks, ...]
        return random_bytes((2, blocks, tokens, heads, dim), dtype, seed).transpose(0, 1)
    if form == 2:  # a page with padding after each block
        return random_bytes((blocks, tokens * heads * dim + 8), dtype, seed)[:, : tokens * heads * dim]
    if form == 3:  # heads last in memory
        return random_bytes((blocks, dim, tokens, heads), dtype, seed).permute(0, 3, 2, 1)
    if form == 4:  # two kernel blocks are one block of the manager
        return random_bytes((2 * blocks, tokens, dim), dtype, seed).unflatten(0, (blocks, 2))
    return random_bytes((blocks + 1, heads, tokens, dim), dtype, seed)[1:, :, :, 1:]


def test_torch_and_numpy_give_equal_fingerprints_of_random_views() -> None:
    rng = random.Random(5)
    for seed in range(60):
        dtype = rng.choice(DTYPES)
        layers = [views(rng, dtype, seed + number) for number in range(rng.randint(1, 4))]
        prints = Fingerprints(layers, KEY + seed)
        count = min(len(layer) for layer in layers)
        blocks = [rng.randrange(count) for _ in range(rng.randint(1, 8))]
        by_layer = prints.by_layer(blocks)
        assert torch.equal(by_layer, prints.by_layer_torch(blocks))
        assert by_layer[0].tolist() == fingerprint_by_hand(layers, KEY + seed, blocks[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copy_in_another_memory_order_has_the_same_fingerprint(dtype: torch.dtype) -> None:
    layer = random_bytes((4, 2, 16, 8), dtype)
    other = layer.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    assert other.stride() != layer.stride()
    assert Fingerprints([layer], 9).of([0, 3]).tolist() == Fingerprints([other], 9).of([0, 3]).tolist()


def test_one_changed_bit_changes_the_fingerprint_wherever_it_is() -> None:
    layer = random_bytes((2, 2, 3, 8), torch.bfloat16)
    prints = Fingerprints([layer, random_bytes((2, 5), torch.uint8)], 4)
    before = prints.of([1]).item()
    raw = layer.view(torch.uint8).view(-1)
    for place in range(raw.numel() // 2, raw.numel()):
        for bit in range(8):
            raw[place] ^= 1 << bit
            assert prints.of([1]).item() != before
            raw[place] ^= 1 << bit
    assert prints.of([1]).item() == before


def test_negated_values_and_exchanged_parts_change_the_fingerprint() -> None:
    layer = random_bytes((1, 2, 16, 8), torch.bfloat16)
    prints = Fingerprints([layer, layer.clone()], 4)
    before = prints.of([0]).item()
    prints.layers[0].view(torch.int16).bitwise_xor_(-(1 << 15))  # an even number of signs, each a high bit
    assert prints.of([0]).item() != before
    prints.layers[0].view(torch.int16).bitwise_xor_(-(1 << 15))
    layer.copy_(layer.flip(1))
    assert prints.of([0]).item() != before
    layer.copy_(layer.flip(1))
    other = prints.layers[1]
    other.fill_(0)
    one = prints.of([0]).item()
    layers = layer.clone()
    layer.copy_(other)
    other.copy_(layers)  # the contents of two layers are exchanged
    assert prints.of([0]).item() != one


def test_fingerprints_of_other_keys_have_other_names() -> None:
    layer = random_bytes((2, 8), torch.float32)
    one, other = Fingerprints([layer], 1), Fingerprints([layer], 2)
    assert one.key_name != other.key_name
    assert one.of([0]).item() != other.of([0]).item()
    assert one.key_name == Fingerprints([random_bytes((3, 4), torch.uint8)], 1).key_name


def test_blocks_may_be_none_or_a_tensor() -> None:
    prints = Fingerprints([random_bytes((4, 8), torch.float32)], 1)
    assert prints.of([]).tolist() == []
    assert prints.by_layer_torch([]).shape == (0, 1)
    assert Fingerprints([random_bytes((4, 3), torch.uint8)], 1).of([]).tolist() == []
    assert prints.of(torch.tensor([2, 1])).tolist() == prints.of([2, 1]).tolist()
