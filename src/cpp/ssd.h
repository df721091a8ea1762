// What the forward and the backward of Mamba-2's scan share: heads with one transition each, in chunks of tokens.
//
// Within a chunk, with s the running sum of delta A, y_i = sum_{j <= i} exp(s_i - s_j) (C_i . B_j) delta_j u_j; between
// chunks one state [n, head size] is carried. So nearly all work is in products of small matrices, cut into tiles.
//
// Heads of a group are cut into blocks, and a work item is one (batch, group, block). The cut depends only on the
// shape, never on the number of threads, so results do not either.
#pragma once

#include <vector>

#include "kernels.h"
#include "memory.h"
#include "tiles.h"

namespace infssm::INFSSM_ISA {
namespace {

constexpr int SPAN = W == 8 ? 48 : 64;  // tokens of a chunk
static_assert(SPAN % ROWS == 0 && SPAN % PAIR == 0);

struct SsdCut {
    int64_t per_group, size, n, in_block, blocks, items, chunks;  // size, n: rounded up to whole vectors and tiles

    explicit SsdCut(const SsdInputs& in) {
        per_group = in.heads / in.groups;
        size = round_up(in.size, W);
        // Channels of a block: its states and inputs fit the second-level cache. What heads share is done once per block,
        // so half of that is only for few sequences, where there would be too few items for the threads.
        constexpr int64_t most = 512;
        const int64_t wide = in.batch * in.groups * ceil_div(per_group * size, most) >= 4 ? most : most / 2;
        n = round_up(in.n, ROWS);
        blocks = ceil_div(per_group, size < wide ? wide / size : 1);
        in_block = ceil_div(per_group, blocks);
        blocks = ceil_div(per_group, in_block);
        items = in.batch * in.groups * blocks;
        chunks = ceil_div(in.tokens, SPAN);
    }
    int64_t state() const { return size * n; }  // floats of one head's state
};

struct SsdItem {
    int64_t batch, group, block, first, count;  // heads [first, first + count)

    SsdItem(const SsdCut& cut, int64_t groups, int64_t index) {
        block = index % cut.blocks;
        group = index / cut.blocks % groups;
        batch = index / cut.blocks / groups;
        const int64_t skipped = block * cut.in_block;
        first = group * cut.per_group + skipped;
        count = skipped + cut.in_block < cut.per_group ? cut.in_block : cut.per_group - skipped;
    }
};

// Rows of B or C of a chunk: [SPAN][n], filled up with 0.
inline void pack_rows(const Tokens& x, const SsdItem& item, int64_t first, int length, int64_t n, int64_t padded,
                      float* rows) {
    for (int l = 0; l < length; ++l) {
        memcpy(rows + l * padded, x.data + item.batch * x.batch + (first + l) * x.token + item.group * x.group,
               n * sizeof(float));
        memset(rows + l * padded + n, 0, (padded - n) * sizeof(float));
    }
    memset(rows + length * padded, 0, (SPAN - length) * padded * sizeof(float));
}

// What the tokens of a chunk decay by, for each head of a block: [heads][SPAN].
struct Decays {
    float *delta, *slope;     // delta, and its derivative after softplus
    float *high, *low;        // s log2(e) as a sum of two, so that differences are as exact as if it were small
    float *enter, *leave;     // from the state before the chunk, and to the state after it
    float* through;           // [heads]: from the one state to the other
    int begins[SPAN];         // the chunk's token at which a token's packed sequence begins; -1: before the chunk

    static int64_t floats(int64_t heads) { return 6 * heads * SPAN + round_up(heads, W); }
    float* place(float* memory, int64_t heads) {
        for (float** part : {&delta, &slope, &high, &low, &enter, &leave}) *part = memory, memory += heads * SPAN;
        through = memory;
        return memory + round_up(heads, W);
    }

    void find_begins(const SsdInputs& in, const SsdItem& item, int64_t first, int length) {
        const float* const seq = in.seq.data ? in.seq.data + item.batch * in.seq.batch : nullptr;
        const auto number = [&](int64_t t) { return seq[t * in.seq.token]; };
        int begin = -1;
        for (int l = 0; l < SPAN; ++l) {
            if (seq && l < length && first + l > 0 && number(first + l) != number(first + l - 1)) begin = l;
            begins[l] = begin;
        }
    }

    void fill(const SsdInputs& in, const SsdItem& item, int64_t first, int length) {
        find_begins(in, item, first, length);
        const int last_begin = begins[SPAN - 1];
        for (int64_t h = 0; h < item.count; ++h) {
            float *const dt = delta + h * SPAN, *const hi = high + h * SPAN, *const lo = low + h * SPAN;
            const float* raw = in.delta.data + item.batch * in.delta.batch + first * in.delta.token + item.first + h;
            const float bias = in.bias ? in.bias[item.first + h] : 0.f;
            for (int l = 0; l < length; ++l) dt[l] = raw[l * in.delta.token] + bias;
            for (int l = length; l < SPAN; ++l) dt[l] = 0;
            for (int l = 0; l < SPAN; l += W) {
                vf rate = splat(1.f);
                if (in.softplus) store(dt + l, softplus(load(dt + l), rate));
                store(slope + h * SPAN + l, rate);
            }
            for (int l = length; l < SPAN; ++l) dt[l] = 0;
            const double A = in.A[item.first + h] * 1.4426950408889634;
            double s = 0;
            for (int l = 0; l < SPAN; ++l) {
                s += dt[l] * A;
                hi[l] = static_cast<float>(s), lo[l] = static_cast<float>(s - hi[l]);
            }
            const float end_high = hi[SPAN - 1], end_low = lo[SPAN - 1];
            for (int l = 0; l < SPAN; l += W) {
                const vf high_part = load(hi + l), low_part = load(lo + l);
                store(enter + h * SPAN + l, exp2(high_part + low_part));
                store(leave + h * SPAN + l, exp2((end_high - high_part) + (end_low - low_part)));
            }
            through[h] = last_begin < 0 ? enter[h * SPAN + SPAN - 1] : 0.f;
            for (int l = 0; l < SPAN && last_begin >= 0; ++l) {
                if (begins[l] >= 0) enter[h * SPAN + l] = 0;
                if (l < last_begin) leave[h * SPAN + l] = 0;
            }
        }
    }

    // exp(s_row - s_column) for W columns from `column` on; 0 where the column does not reach the row.
    inline __attribute__((always_inline)) vf inside(int64_t h, int row, int column, vf lanes) const {
        const float *const hi = high + h * SPAN, *const lo = low + h * SPAN;
        const vf decay = exp2((hi[row] - load(hi + column)) + (lo[row] - load(lo + column)));
        const vf place = lanes + static_cast<float>(column);
        const vf kept = place <= splat(static_cast<float>(row)) ? decay : vf{};
        return place >= splat(static_cast<float>(begins[row])) ? kept : vf{};
    }
};

INFSSM_INLINE vf counting() {
    vf lanes;
    for (int i = 0; i < W; ++i) lanes[i] = static_cast<float>(i);
    return lanes;
}

// C B^T where a column is not after its row: panels [SPAN / PAIR][SPAN][PAIR]. turned: memory for B in panels [n][PAIR].
inline void pair_products(const float* B, const float* C, int64_t n, float* turned, float* products) {
    for (int column = 0; column < SPAN; column += PAIR) {
        for (int64_t j = 0; j < n; j += W)
            for (int half = 0; half < PAIR; half += W)
                transpose_block(B + (column + half) * n + j, n, turned + j * PAIR + half, PAIR);
        for (int row = column / ROWS * ROWS; row < SPAN; row += ROWS) {
            vf acc[ROWS][2];
            clear(acc);
            multiply<true>(acc, C + row * n, n, turned, n);
            for (int i = 0; i < ROWS; ++i)
                for (int j = 0; j < 2; ++j) store(products + (column / PAIR * SPAN + row + i) * PAIR + j * W, acc[i][j]);
        }
    }
}

// One vector of a head's channels: where it is in panels of N vectors and in a row, and its lanes in use.
struct Slice {
    int64_t head, panel, channel;
    int count;

    Slice(int64_t vector, int N, const SsdInputs& in, const SsdCut& cut, const SsdItem& item) {
        const int64_t per_head = cut.size / W, inside = vector % per_head * W;
        head = vector / per_head;
        panel = vector / N * SPAN * N * W + vector % N * W;
        channel = (item.first + head) * in.size + inside;
        count = static_cast<int>(in.size - inside < W ? in.size - inside : W);
    }
};

// A token's row of a tensor (null: absent) and the lines of a later row, which lies too far away for the hardware to
// foresee it.
struct Row {
    float* data;
    int64_t ahead;

    Row(const Tokens& x, int64_t batch, int64_t token)
        : data(x.data ? x.data + batch * x.batch + token * x.token : nullptr), ahead(2 * x.token) {}
    vf get(const Slice& slice) const {
        __builtin_prefetch(data + ahead + slice.channel);
        return load(data + slice.channel, slice.count);
    }
    void put(const Slice& slice, vf value) const {
        __builtin_prefetch(data + ahead + slice.channel, 1);
        store(data + slice.channel, value, slice.count);
    }
};

// All vectors of an item in the order of a row: rows are read and written whole, as memory likes it.
using Slices = std::vector<Slice>;
inline void find_slices(Slices& slices, int N, const SsdInputs& in, const SsdCut& cut, const SsdItem& item) {
    slices.clear();
    for (int64_t v = 0; v < item.count * cut.size / W; ++v) slices.emplace_back(v, N, in, cut, item);
}

}  // namespace
}  // namespace infssm::INFSSM_ISA
