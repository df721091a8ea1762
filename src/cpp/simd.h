// Vectors of the widest size the translation unit is compiled for, and the few functions the kernels need on them.
// Every kernel source is compiled once per instruction set; all names live in a namespace of that set, with internal
// linkage where they are inline, so that the linker can never mix code of two sets.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#endif

#ifndef INFSSM_ISA
#define INFSSM_ISA baseline
#endif

#define INFSSM_INLINE static inline __attribute__((always_inline))

namespace infssm::INFSSM_ISA {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef float vf_unaligned __attribute__((vector_size(W * 4), aligned(4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));

INFSSM_INLINE vf splat(float x) { return vf{} + x; }
INFSSM_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
INFSSM_INLINE void store(float* p, vf v) { *reinterpret_cast<vf_unaligned*>(p) = v; }

// The first `count` lanes; the others read as 0 and are not written.
INFSSM_INLINE vf load(const float* p, int count) {
    if (count == W) return load(p);
    vf v = {};
    for (int i = 0; i < count; ++i) v[i] = p[i];
    return v;
}
INFSSM_INLINE void store(float* p, vf v, int count) {
    if (count == W) return store(p, v);
    for (int i = 0; i < count; ++i) p[i] = v[i];
}

// Lanes below `count` hold `x`, the others 0.
INFSSM_INLINE vf splat(float x, int count) {
    vf v = {};
    for (int i = 0; i < count; ++i) v[i] = x;
    return v;
}

// Maximum and minimum that keep a NaN in x.
INFSSM_INLINE vf at_least(vf bound, vf x) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)bound, (__m512)x);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)bound, (__m256)x);
#elif defined(__SSE2__)
    return (vf)_mm_max_ps((__m128)bound, (__m128)x);
#else
    return x < bound ? bound : x;
#endif
}
INFSSM_INLINE vf at_most(vf bound, vf x) {
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)bound, (__m512)x);
#elif defined(__AVX2__)
    return (vf)_mm256_min_ps((__m256)bound, (__m256)x);
#elif defined(__SSE2__)
    return (vf)_mm_min_ps((__m128)bound, (__m128)x);
#else
    return x > bound ? bound : x;
#endif
}

INFSSM_INLINE vf square_root(vf x) {
    for (int i = 0; i < W; ++i) x[i] = __builtin_sqrtf(x[i]);  // one instruction per vector where there is one
    return x;
}

INFSSM_INLINE vf absolute(vf x) { return (vf)((vi)x & 0x7fffffff); }
INFSSM_INLINE vf copy_sign(vf magnitude, vf sign) { return (vf)((vi)magnitude | ((vi)sign & (vi{} + INT32_MIN))); }

INFSSM_INLINE bool any(vi mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    int32_t bits = 0;
    for (int i = 0; i < W; ++i) bits |= mask[i];
    return bits != 0;
#endif
}

template <int... I>
INFSSM_INLINE vf shuffle(vf a, vf b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, I...);
#else
    return __builtin_shuffle(a, b, vi{I...});
#endif
}

// One step of a transposing reduction: units of `unit` lanes of a and b are added pairwise and interleaved.
template <int unit, int... L>
INFSSM_INLINE vf fold(vf a, vf b, std::integer_sequence<int, L...>) {
    constexpr auto even = [](int lane) { return (lane / unit) % 2 == 0; };
    return shuffle(a, b, std::integer_sequence<int, (even(L) ? L : W + L - unit)...>{}) +
           shuffle(a, b, std::integer_sequence<int, (even(L) ? L + unit : W + L)...>{});
}

// Lane i of the result is the sum over the lanes of v[i].
template <int unit = 1>
INFSSM_INLINE vf sum_lanes_of(const vf* v) {
    if constexpr (unit == W) {
        return v[0];
    } else {
        vf half[W / 2 / unit > 0 ? W / 2 / unit : 1];
        for (int i = 0; i < W / 2 / unit; ++i)
            half[i] = fold<unit>(v[2 * i], v[2 * i + 1], std::make_integer_sequence<int, W>{});
        return sum_lanes_of<unit * 2>(half);
    }
}

// Sums over lanes of `count` vectors; v is padded with zeros to the next multiple of W.
INFSSM_INLINE void sum_lanes(const vf* v, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i += W) store(out + i, sum_lanes_of(v + i));
}

INFSSM_INLINE float sum_lanes(vf v) {
    float sum = 0;
    for (int i = 0; i < W; ++i) sum += v[i];
    return sum;
}

constexpr float LOG2E = 1.44269504088896341f;
constexpr float ROUND = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits

// (2^f - 1) / f on [-1/2, 1/2]: minimax for the relative error of 1 + f p(f), which is exactly 1 at 0 (2.6e-9).
INFSSM_INLINE vf exp2_slope(vf f) {
    vf p = splat(0.00015594677015105411f);
    p = p * f + 0.001340664384748006f;
    p = p * f + 0.0096176929761431872f;
    p = p * f + 0.055503105512069806f;
    p = p * f + 0.24022652782876177f;
    return p * f + 0.69314721496788496f;
}

// p * 2^k where rounded = k + ROUND.
INFSSM_INLINE vf scale_by_exponent(vf p, vf rounded, vf k) {
#if defined(__AVX512F__)
    (void)rounded;
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)k);
#else
    (void)k;
    return (vf)((vi)p + ((vi)rounded << 23));
#endif
}

// 2^(x y) where |x y| <= 126 is known. The fused products make the reduced argument exact.
INFSSM_INLINE vf exp2_by_polynomial(vf x, vf y) {
    const vf rounded = x * y + ROUND;
    const vf k = rounded - ROUND;
    const vf f = x * y - k;
    return scale_by_exponent(exp2_slope(f) * f + 1.f, rounded, k);
}

#if defined(__AVX2__)
// The table of exp2_bounded: bits of 2^(k / W) less k << TABLE_SHIFT, which adding all of k + ROUND puts back; and
// (2^f - 1) / f on [-1 / 2W, 1 / 2W], minimax for the relative error of 1 + f p(f) (2e-9).
#if defined(__AVX512F__)
constexpr int TABLE_SHIFT = 19;
constexpr vi ROOTS = {0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3,
                      0x3f7837f0, 0x3f76f532, 0x3f75fed7, 0x3f75583f,
                      0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c,
                      0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};
INFSSM_INLINE vi pick_root(vf k) { return (vi)_mm512_permutexvar_epi32((__m512i)k, (__m512i)ROOTS); }
INFSSM_INLINE vf short_slope(vf f) { return (f * 0.05550595f + 0.240234286f) * f + 0.693147182f; }
#else
constexpr int TABLE_SHIFT = 20;
constexpr vi ROOTS = {0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7,
                      0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7};
INFSSM_INLINE vi pick_root(vf k) { return (vi)_mm256_permutevar8x32_epi32((__m256i)ROOTS, (__m256i)k); }
INFSSM_INLINE vf short_slope(vf f) { return ((f * 0.00961912423f + 0.0555106141f) * f + 0.240226507f) * f + 0.693147182f; }
#endif
#endif

// The same, where one register holds 2^(0 / W) ... 2^((W - 1) / W): half the polynomial is left.
INFSSM_INLINE vf exp2_bounded(vf x, vf y) {
#if defined(__AVX2__)
    constexpr float round = ROUND / W;  // leaves W-ths in the low bits: the lowest choose from the table
    const vf rounded = x * y + round;
    const vf f = x * y - (rounded - round);
    const vf power = (vf)(pick_root(rounded) + ((vi)rounded << TABLE_SHIFT));
    return power * (short_slope(f) * f) + power;
#else
    return exp2_by_polynomial(x, y);
#endif
}

constexpr float EXP2_LIMIT = 126.f;

// 2^x for x in [-126, 127.99].
INFSSM_INLINE vf exp2_inside(vf x) {
    const vf rounded = x + ROUND;
    const vf k = rounded - ROUND;
    const vf f = x - k;
    return scale_by_exponent(exp2_slope(f) * f + 1.f, rounded, k);
}

// 2^x for any x: 0 below 2^-126, infinity above the range, NaN for NaN.
INFSSM_INLINE vf exp2(vf x) {
    vf result = exp2_inside(at_most(splat(127.99f), at_least(splat(-126.f), x)));
    result = x < splat(-126.f) ? vf{} : result;
    result = x > splat(127.99f) ? splat(__builtin_inff()) : result;
    return x == x ? result : x;
}
INFSSM_INLINE vf exp(vf x) { return exp2(x * LOG2E); }

// exp(x) for x <= 0, not below 2^-126. A NaN gives a NaN or any number: callers carry it otherwise.
INFSSM_INLINE vf exp_nonpositive(vf x) { return exp2_inside(at_least(splat(-126.f), x * LOG2E)); }

INFSSM_INLINE vf reciprocal(vf x) {
#if defined(__AVX512F__)
    // The divider is the one slow unit at this width; an estimate of 14 bits and one Newton step is as exact.
    const vf r = (vf)_mm512_rcp14_ps((__m512)x);
    return r * (2.f - x * r);
#else
    return 1.f / x;
#endif
}

// 2^x - 1 without cancellation near 0.
INFSSM_INLINE vf exp2_minus_1(vf x) {
    const vf inside = at_most(splat(127.49f), at_least(splat(-126.f), x));
    const vf rounded = inside + ROUND;
    const vf k = rounded - ROUND;
    const vf f = inside - k;
    const vf power = scale_by_exponent(splat(1.f), rounded, k);
    vf result = power * (exp2_slope(f) * f) + (power - 1.f);
    result = x > splat(127.49f) ? splat(__builtin_inff()) : result;
    return x == x ? result : x;
}

// log(1 + e) for e in [0, 1]: e times a minimax polynomial that is 1 at 0 (relative error 5e-9).
INFSSM_INLINE vf log1p_unit(vf e) {
    vf p = splat(-0.00331847401466f);
    p = p * e + 0.0202045892731f;
    p = p * e - 0.0576644475457f;
    p = p * e + 0.106805552877f;
    p = p * e - 0.153553957837f;
    p = p * e + 0.196954002014f;
    p = p * e - 0.249585873186f;
    p = p * e + 0.333305113057f;
    p = p * e - 0.499999327629f;
    return (p * e + 1.f) * e;
}

INFSSM_INLINE vf sigmoid(vf x) {  // for NaN: see exp_nonpositive
    const vf e = exp_nonpositive(-absolute(x));
    const vf r = reciprocal(1.f + e);
    return x < vf{} ? e * r : r;
}

INFSSM_INLINE vf softplus(vf x) { return at_least(vf{}, x) + log1p_unit(exp_nonpositive(-absolute(x))); }

// softplus(x), and its derivative sigmoid(x) in `slope`.
INFSSM_INLINE vf softplus(vf x, vf& slope) {
    const vf e = exp_nonpositive(-absolute(x));
    const vf r = reciprocal(1.f + e);
    slope = x < vf{} ? e * r : r;
    return at_least(vf{}, x) + log1p_unit(e);
}

// tanh(x / 2) with full relative precision near 0.
INFSSM_INLINE vf soft_normalize(vf x) {
    const vf q = exp2_minus_1(absolute(x) * -LOG2E);
    return copy_sign(-q * reciprocal(2.f + q), x);
}

}  // namespace infssm::INFSSM_ISA
