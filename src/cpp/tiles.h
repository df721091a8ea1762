// Tiles of products that stay in registers: ROWS x (1 or 2 vectors). What a tile reads by vectors lies in panels: columns
// of one tile's width, row after row, so that rows are never a power of two apart.
#pragma once

#include "simd.h"

namespace infssm::INFSSM_ISA {
namespace {

// Rows of a tile: with two vectors per row, as many sums as registers allow.
constexpr int ROWS = W == 16 ? 8 : W == 8 ? 6 : 4;
constexpr int PAIR = 2 * W;  // columns of a panel of two vectors

// acc[i] += sum over k < depth of a(i, k) times row k of the panel b. ALONG: a(i, k) = a[i stride + k], else
// a[i + k stride].
template <bool ALONG, int N>
INFSSM_INLINE void multiply(vf (&acc)[ROWS][N], const float* a, int64_t stride, const float* b, int64_t depth) {
    for (int64_t k = 0; k < depth; ++k, b += N * W, a += ALONG ? 1 : stride) {
        vf columns[N];
#pragma GCC unroll 2
        for (int j = 0; j < N; ++j) columns[j] = load(b + j * W);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i) {
            const float factor = ALONG ? a[i * stride] : a[i];
#pragma GCC unroll 2
            for (int j = 0; j < N; ++j) acc[i][j] += factor * columns[j];
        }
    }
}

template <int N>
INFSSM_INLINE void clear(vf (&acc)[ROWS][N]) {
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < N; ++j) acc[i][j] = vf{};
}

template <int unit, bool UPPER, int... L>
INFSSM_INLINE vf exchange(vf a, vf b, std::integer_sequence<int, L...>) {
    constexpr auto even = [](int lane) { return (lane / unit) % 2 == 0; };
    if constexpr (UPPER) return shuffle(a, b, std::integer_sequence<int, (even(L) ? L : W + L - unit)...>{});
    else return shuffle(a, b, std::integer_sequence<int, (even(L) ? L + unit : W + L)...>{});
}

template <int unit = 1>
INFSSM_INLINE void transpose(vf (&v)[W]) {
    if constexpr (unit < W) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) {
            if ((i / unit) % 2 != 0) continue;
            const vf a = v[i], b = v[i + unit];
            v[i] = exchange<unit, true>(a, b, std::make_integer_sequence<int, W>{});
            v[i + unit] = exchange<unit, false>(a, b, std::make_integer_sequence<int, W>{});
        }
        transpose<unit * 2>(v);
    }
}

// A block of W x W, rows `from` floats apart, into columns `to` floats apart.
INFSSM_INLINE void transpose_block(const float* source, int64_t from, float* target, int64_t to) {
    vf v[W];
    for (int i = 0; i < W; ++i) v[i] = load(source + i * from);
    transpose(v);
    for (int i = 0; i < W; ++i) store(target + i * to, v[i]);
}

}  // namespace
}  // namespace infssm::INFSSM_ISA
