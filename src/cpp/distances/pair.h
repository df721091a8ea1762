// Old and new states of one token in vectors, and the way back for derivatives (docs/reference/maths.md, section 3).
//
// A pole a of the unit interval becomes r = (1 - a) / (1 + a); for a raw state x, a = tanh(x / 2), that is e^-x. Sums of
// positive numbers take the place of 1 - a b (eq. 9). Derivatives by poles are taken by x = -log r first.
#pragma once

#include <cmath>

#include "../kernels.h"
#include "../memory.h"
#include "../simd.h"

namespace infssm::INFSSM_ISA {
namespace {

constexpr double PI = 3.14159265358979323846;
constexpr float LARGEST = 1e12f;  // r of a pole that float32 still computes with; squares of it stay finite
constexpr float ROUNDING = 6e-7f;  // of a sum of a few dozen terms, over the sum of their sizes
constexpr float BEARABLE = 1e-3f;  // relative error of a gradient that needs no second look

inline float* scalars(vf* v) { return reinterpret_cast<float*>(v); }
inline const float* scalars(const vf* v) { return reinterpret_cast<const float*>(v); }

inline int lanes_of(int64_t n, int64_t v) { return n - v * W < W ? static_cast<int>(n - v * W) : W; }

template <int STEP, int... L>
INFSSM_INLINE vf rotate_lanes(vf v, std::integer_sequence<int, L...>) {
    return shuffle(v, v, std::integer_sequence<int, ((L + STEP) % W)...>{});
}

// The largest lane, by halves: a few steps where a walk over the lanes would wait for each.
template <int STEP = W / 2>
INFSSM_INLINE float most(vf v) {
    v = at_least(v, rotate_lanes<STEP>(v, std::make_integer_sequence<int, W>{}));
    if constexpr (STEP == 1) return v[0];
    else return most<STEP / 2>(v);
}

// The sum of the lanes likewise.
template <int STEP = W / 2>
INFSSM_INLINE float add_up(vf v) {
    v += rotate_lanes<STEP>(v, std::make_integer_sequence<int, W>{});
    if constexpr (STEP == 1) return v[0];
    else return add_up<STEP / 2>(v);
}

struct Two {
    float first, second;
};

template <int... L>
INFSSM_INLINE vf join_halves(vf a, vf b, std::integer_sequence<int, L...>) {  // sums of two lanes: of a, then of b
    constexpr int half = W / 2;
    return shuffle(a, b, std::integer_sequence<int, (L < half ? L : L + half)...>{}) +
           shuffle(a, b, std::integer_sequence<int, (L < half ? L + half : L + W)...>{});
}
template <int STEP, int... L>
INFSSM_INLINE vf rotate_halves(vf v, std::integer_sequence<int, L...>) {
    constexpr int half = W / 2;
    return shuffle(v, v, std::integer_sequence<int, (L / half * half + (L + STEP) % half)...>{});
}
template <int STEP>
INFSSM_INLINE vf add_halves(vf v) {
    if constexpr (STEP == 0) return v;
    else return add_halves<STEP / 2>(v + rotate_halves<STEP>(v, std::make_integer_sequence<int, W>{}));
}

// Both sums of lanes for little more than the price of one.
INFSSM_INLINE Two add_up(vf a, vf b) {
    const vf sums = add_halves<W / 4>(join_halves(a, b, std::make_integer_sequence<int, W>{}));
    return {sums[0], sums[W / 2]};
}

// Half-plane poles r, s and s - r with its own precision.
struct HalfPlane {
    vf r, s, shift;
};

INFSSM_INLINE HalfPlane half_plane(vf x, vf y, bool soft) {
    if (soft) {
        const vf r = exp(-x);
        return {r, exp(-y), r * exp2_minus_1(LOG2E * (x - y))};
    }
    const vf up = 1.f / (1.f + x), up_new = 1.f / (1.f + y);
    return {(1.f - x) * up, (1.f - y) * up_new, 2.f * (x - y) * up * up_new};
}

// Where the pole is inside the unit interval and not nearer to its ends than float32 bears; not where it is NaN.
INFSSM_INLINE vi inside(vf r) { return (r > splat(1 / LARGEST)) & (r < splat(LARGEST)); }

// The poles of a token. Lanes without one hold 1 on both sides.
struct Poles {
    vf *r, *s, *shift;

    // Whether all of them are inside.
    bool read(const float* old_state, const float* new_state, int64_t n, bool soft) const {
        vi good = {};
        good = ~good;
        for (int64_t v = 0; v * W < n; ++v) {
            const int lanes = lanes_of(n, v);
            const HalfPlane h = half_plane(load(old_state + v * W, lanes), load(new_state + v * W, lanes), soft);
            r[v] = h.r, s[v] = h.s, shift[v] = h.shift;
            good &= inside(h.r) & inside(h.s);
        }
        return !any(~good);
    }
};

// Output rows or input columns of a token, soft-normalised where `soft`, and old - new with its own precision:
// tanh(x/2) - tanh(y/2) = tanh((x-y)/2) (1 - tanh(x/2) tanh(y/2)). Lanes without a state hold 0.
struct Values {
    vf *x, *y, *gap;

    // Without `NEAR` the difference is that of the rounded values.
    template <bool NEAR = true>
    void read(const float* old_state, const float* new_state, int64_t n, bool soft) const {
        for (int64_t v = 0; v * W < n; ++v) {
            const int lanes = lanes_of(n, v);
            const vf old_value = load(old_state + v * W, lanes), new_value = load(new_state + v * W, lanes);
            x[v] = soft ? soft_normalize(old_value) : old_value;
            y[v] = soft ? soft_normalize(new_value) : new_value;
            const vf difference = old_value - new_value;
            gap[v] = !NEAR ? x[v] - y[v] : soft ? soft_normalize(difference) * (1.f - x[v] * y[v]) : difference;
        }
    }
};

// Derivative by the state of a row or column from that by its value.
INFSSM_INLINE vf through(vf derivative, vf value, bool soft) {
    return soft ? derivative * (0.5f - 0.5f * value * value) : derivative;
}

// Derivative by the state of a pole from that by x; dx / da = 2 / (1 - a^2).
INFSSM_INLINE vf by_state(vf by_x, vf r, bool soft) {
    return soft ? by_x : by_x * (0.5f * (1.f + r) * (1.f + r) / r);
}

// Hands out arrays of a number of vectors.
class Arrays {
  public:
    Arrays(vf* memory, int64_t vectors) : memory_(memory), vectors_(vectors) {}
    vf* take() { return memory_ += vectors_, memory_ - vectors_; }
    Poles poles() { return {take(), take(), take()}; }
    Values values() { return {take(), take(), take()}; }

  private:
    vf* memory_;
    int64_t vectors_;
};

// Slopes of one side of token `i`; null where they are not wanted.
struct Slope {
    float *a, *c, *b;

    Slope(const Slopes& to, int64_t i, const Distance& f)
        : a(to.a ? to.a + i * f.poles : nullptr),
          c(to.c ? to.c + i * f.n : nullptr),
          b(to.b ? to.b + i * f.n : nullptr) {}
    void zero(const Distance& f) const {
        if (a) memset(a, 0, f.poles * sizeof(float));
        if (c) memset(c, 0, f.n * sizeof(float));
        if (b) memset(b, 0, f.n * sizeof(float));
    }
};

// Calls `run(token, index)` for every token, with one T(memory, f) per thread; `arrays` vectors of n floats each.
template <class T, class Run>
void for_tokens(const Distance& f, int64_t arrays, Run run) {
    const int64_t vectors = ceil_div(f.n, W), each = arrays * vectors;
    const Buffer memory(each * W * f.threads);
#pragma omp parallel num_threads(f.threads)
    {
        const FlushToZero flush;
        T token(Arrays(memory.vectors() + thread_index() * each, vectors), f);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < f.tokens; ++i) run(token, i);
    }
}

}  // namespace
}  // namespace infssm::INFSSM_ISA
