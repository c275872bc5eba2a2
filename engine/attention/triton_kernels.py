"""One kernel for prefill chunks, decodes and steps that mix them, over block tables.

A program takes a tile of queries of one segment with all query heads that share a key head, so
that a decode under grouped-query attention fills the tile with its heads instead of padding it.
It walks over the keys that the tile sees, a tile at a time, wherever their blocks lie, with the
softmax kept running in float32. When a step has too few tiles to fill the card and its requests
are long, the keys of a tile are split among several programs and a second kernel adds up their
parts.

Sources: online softmax and tiling from "FlashAttention-2" (Dao, 2023); splitting the keys from
"Flash-Decoding for long-context inference" (Dao et al., 2023); block tables from "Efficient
Memory Management for LLM Serving with PagedAttention" (Kwon et al., 2023); heads packed into the
tile and one kernel for all kinds of step from "The Anatomy of a Triton Attention Kernel"
(Ringlein et al., arXiv 2511.11581).
"""

import triton
import triton.language as tl


@triton.jit
def attend_tile(
    query, query_token, query_head, keys, values, slot_stride, head_stride,
    out, out_token, out_head, part_max, part_sum, part_out, num_rows,
    tiles, num_tiles, ragged, num_segments, tables, table_stride,
    scaling, softcap, window,
    GROUP: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """One tile of queries, one key head, one part of the keys."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    segment = tl.load(tiles + tile)
    first = tl.load(tiles + num_tiles + tile)
    first_row = tl.load(ragged + segment)
    context = tl.load(ragged + num_segments + segment)
    length = tl.load(ragged + 2 * num_segments + segment)
    table = tables + segment.to(tl.int64) * table_stride

    row = tl.arange(0, ROWS)
    in_tile = row // GROUP
    token = first + in_tile
    head = kv_head * GROUP + row % GROUP
    is_row = (in_tile < ROWS // GROUP) & (token < length)
    position = context + token
    packed = (first_row + token).to(tl.int64)
    dim = tl.arange(0, SIZE_PADDED)
    is_dim = dim < SIZE
    q = tl.load(
        query + packed[:, None] * query_token + head[:, None] * query_head + dim[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )

    end = context + tl.minimum(first + ROWS // GROUP, length)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(context + first - window + 1, 0) // KEYS * KEYS
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end - begin, KEYS), SPLITS) * KEYS
        begin += split * share
        end = tl.minimum(begin + share, end)

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, SIZE_PADDED], tl.float32)
    for start in range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS)
        # What lies beyond the end was never written, or by someone else: it is not even read.
        is_key = at < end
        block = tl.load(table + at // BLOCK_SIZE, mask=is_key, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE
        place = slot * slot_stride + kv_head * head_stride
        k = tl.load(
            keys + place[None, :] + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0
        )
        logits = tl.dot(q, k, input_precision="ieee") * scaling
        if CAPPED:
            # tanh by an exp that cannot overflow: every backend of Triton has it.
            small = tl.exp(-2.0 * tl.abs(logits / softcap))
            logits = tl.where(logits < 0, -softcap, softcap) * ((1.0 - small) / (1.0 + small))
        seen = is_row[:, None] & is_key[None, :] & (at[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (at[None, :] > position[:, None] - window)
        logits = tl.where(seen, logits * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(highest, tl.max(logits, 1))
        # A row that has seen nothing yet would give inf - inf.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logits - base[:, None])
        fade = tl.exp2(highest - base)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(
            values + place[:, None] + dim[None, :],
            mask=is_key[:, None] & is_dim[None, :],
            other=0.0,
        )
        sums = sums * fade[:, None]
        sums += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = higher

    if SPLITS == 1:
        result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out + packed[:, None] * out_token + head[:, None] * out_head + dim[None, :],
            result.to(out.dtype.element_ty),
            mask=is_row[:, None] & is_dim[None, :],
        )
    else:
        part = (split * num_rows + packed) * HEADS + head
        tl.store(part_max + part, highest, mask=is_row)
        tl.store(part_sum + part, total, mask=is_row)
        tl.store(
            part_out + part[:, None] * SIZE + dim[None, :],
            sums,
            mask=is_row[:, None] & is_dim[None, :],
        )


@triton.jit
def add_parts(
    out, out_token, out_head, part_max, part_sum, part_out, num_rows,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Some heads of one query: the parts of its splits, each weighted by its share."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, SIZE_PADDED)
    is_head = head < HEADS
    mask = is_head[:, None] & (dim < SIZE)[None, :]
    highest = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        part = (split * num_rows + token) * HEADS + head
        highest = tl.maximum(highest, tl.load(part_max + part, mask=is_head, other=float("-inf")))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    sums = tl.zeros([BLOCK_HEADS, SIZE_PADDED], tl.float32)
    for split in tl.static_range(SPLITS):
        part = (split * num_rows + token) * HEADS + head
        share = tl.exp2(tl.load(part_max + part, mask=is_head, other=float("-inf")) - base)
        total += share * tl.load(part_sum + part, mask=is_head, other=0.0)
        own = tl.load(part_out + part[:, None] * SIZE + dim[None, :], mask=mask, other=0.0)
        sums += share[:, None] * own
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + token * out_token + head[:, None] * out_head + dim[None, :],
        result.to(out.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def store_tokens(
    new_keys, key_token, key_head, new_values, value_token, value_head,
    keys, values, slot_stride, head_stride, slots, num_tokens,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Some tokens: all heads of their keys and values into their slots."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    cell = tl.arange(0, WIDTH)
    head, dim = cell // SIZE, cell % SIZE
    is_token = token < num_tokens
    mask = is_token[:, None] & (cell < HEADS * SIZE)[None, :]
    slot = tl.load(slots + token, mask=is_token, other=0).to(tl.int64)
    target = slot[:, None] * slot_stride + (head * head_stride + dim)[None, :]
    at = token.to(tl.int64)[:, None]
    k = tl.load(new_keys + at * key_token + (head * key_head + dim)[None, :], mask=mask)
    v = tl.load(new_values + at * value_token + (head * value_head + dim)[None, :], mask=mask)
    tl.store(keys + target, k.to(keys.dtype.element_ty), mask=mask)
    tl.store(values + target, v.to(values.dtype.element_ty), mask=mask)
