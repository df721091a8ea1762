// Old and new states of one token in vectors, and the way back for derivatives.
#pragma once

#include "simd.h"

namespace infssm {
namespace INFSSM_ISA {
namespace {

inline float* scalars(vf* v) { return reinterpret_cast<float*>(v); }
inline const float* scalars(const vf* v) { return reinterpret_cast<const float*>(v); }

inline int lanes_of(int64_t n, int64_t v) { return n - v * W < W ? static_cast<int>(n - v * W) : W; }

// Values of `count` states (n, or 1: a scalar transition repeats its pole), soft-normalised where `raw`, and where wanted
// the gap old - new with full relative precision: tanh(x/2) - tanh(y/2) = tanh((x-y)/2) (1 - tanh(x/2) tanh(y/2)).
INFSSM_INLINE void read_states(const float* old_state, const float* new_state, int64_t count, int64_t n, bool raw,
                               vf* old_value, vf* new_value, vf* gap) {
    for (int64_t v = 0; v * W < n; ++v) {
        const int lanes = lanes_of(n, v);
        const vf x = count == 1 ? splat(old_state[0], lanes) : load(old_state + v * W, lanes);
        const vf y = count == 1 ? splat(new_state[0], lanes) : load(new_state + v * W, lanes);
        old_value[v] = raw ? soft_normalize(x) : x;
        new_value[v] = raw ? soft_normalize(y) : y;
        if (gap) gap[v] = raw ? soft_normalize(x - y) * (1.f - old_value[v] * new_value[v]) : x - y;
    }
}

// Derivative by the state from that by its value.
INFSSM_INLINE vf through(vf derivative, vf value, bool raw) {
    return raw ? derivative * (0.5f - 0.5f * value * value) : derivative;
}

}  // namespace
}  // namespace INFSSM_ISA
}  // namespace infssm
