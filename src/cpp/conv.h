// Shared by the separate convolution and the convolution within Mamba-2's chunks.
#pragma once

#include "scan.h"

namespace infssm::INFSSM_ISA {
namespace {

// weight as [width][padded channels], the current token's tap last; then the bias.
struct Taps {
    int64_t padded;
    Buffer memory;

    explicit Taps(const Conv& f) : padded(round_up(f.channels, W)), memory(padded * (f.width + 1)) {
        memset(memory.get(), 0, padded * (f.width + 1) * sizeof(float));
        for (int64_t c = 0; c < f.channels; ++c) {
            for (int64_t k = 0; k < f.width; ++k) memory.get()[k * padded + c] = f.weight[c * f.width + k];
            if (f.bias) memory.get()[f.width * padded + c] = f.bias[c];
        }
    }
    vf tap(int64_t k, int64_t channel) const { return load(memory.get() + k * padded + channel); }
};

// Tokens that a vector of channels is walked along before the next vector's turn. Where rows do not begin with a cache
// line, a vector lies in two, and the second must still be near when the next vector needs it.
inline int64_t tile(const Conv& f) { return f.x.token % W == 0 ? 64 : 8; }

inline int lanes_from(int64_t channel, int64_t last) { return last - channel < W ? static_cast<int>(last - channel) : W; }

inline ScanSizes sizes(const Conv& f) {
    return {.batch = f.batch, .tokens = f.tokens, .channels = f.channels, .groups = 1, .n = 1, .softplus = false,
            .reverse = f.reverse, .threads = f.threads};
}

// A gradient of x: written, or added to what is there.
INFSSM_INLINE void put(const Conv& f, float* dx, vf value, int count) {
    store(dx, f.add ? value + load(dx, count) : value, count);
}

// Four taps over one sequence, the common case: the window moves along the tokens in registers.
struct Four {
    vf w[4], bias, x1, x2, x3;  // the three tokens before

    Four(const Taps& taps, const Walk& x, int64_t t, int64_t c, int count)
        : bias(taps.tap(4, c)), x1(before(x, t - 1, c, count)), x2(before(x, t - 2, c, count)), x3(before(x, t - 3, c, count)) {
        for (int k = 0; k < 4; ++k) w[k] = taps.tap(k, c);
    }
    static vf before(const Walk& x, int64_t t, int64_t c, int count) {
        return t < 0 ? vf{} : load(x.at(t) + c, count);
    }
    vf value(vf x0) const { return bias + w[0] * x3 + w[1] * x2 + w[2] * x1 + w[3] * x0; }
    void move(vf x0) { x3 = x2, x2 = x1, x1 = x0; }
};

template <bool FULL>
__attribute__((noinline)) void forward_four(const Conv& f, const Taps& taps, const Walk& x, const Walk& y, int64_t first, int64_t last, int64_t c,
                  int lanes) {
    const int count = FULL ? W : lanes;
    Four window(taps, x, first, c, count);
    for (int64_t t = first; t < last; ++t) {
        const vf x0 = load(x.at(t) + c, count);
        const vf value = window.value(x0);
        store(y.at(t) + c, f.silu ? value * sigmoid(value) : value, count);
        x.expect(t, c), y.expect(t, c, true);
        window.move(x0);
    }
}

// Tokens [begin, end) of the channels [first, last) of a batch element.
inline void forward_tokens(const Conv& f, const Taps& taps, int64_t batch, int64_t first, int64_t last, int64_t begin,
                           int64_t end) {
    const ScanSizes size = sizes(f);
    const Walk x(f.x, size, batch, 0, 0), y(f.y, size, batch, 0, 0);
    for (int64_t t = begin, step = tile(f); t < end; t += step)
        for (int64_t c = first; c < last; c += W) {
            const int count = lanes_from(c, last);
            const int64_t stop = t + step < end ? t + step : end;
            (count == W ? forward_four<true> : forward_four<false>)(f, taps, x, y, t, stop, c, count);
        }
}

// Whether chunks of tokens may be taken one after the other, their gradients from the last to the first.
inline bool goes_by_chunks(const Conv& f) { return f.width == 4 && !f.seq.data && !f.reverse && !f.add; }

// Gradients of the tokens [first, last), where those after them are done. totals: [4 taps, bias]; later: the output
// gradients of the three tokens from `last` on, then of those from `first` on.
template <bool FULL>
__attribute__((noinline)) void backward_from_last(const Conv& f, const Taps& taps, const Walk& x, const Walk& grad, const Walk& dx,
                                                  int64_t first, int64_t last, int64_t c, int lanes, vf* totals, vf* later) {
    const int count = FULL ? W : lanes;
    Four window(taps, x, last - 1, c, count);
    vf x0 = load(x.at(last - 1) + c, count), g1 = later[0], g2 = later[1], g3 = later[2];
    vf t0 = totals[0], t1 = totals[1], t2 = totals[2], t3 = totals[3], t4 = totals[4];
    for (int64_t t = last - 1; t >= first; --t) {
        vf g = load(grad.at(t) + c, count);
        if (f.silu) {
            const vf value = window.value(x0), s = sigmoid(value);
            g *= s + value * s * (1.f - s);
        }
        t0 += g * window.x3, t1 += g * window.x2, t2 += g * window.x1, t3 += g * x0, t4 += g;
        x.expect(t, c), grad.expect(t, c);
        store(dx.at(t) + c, window.w[3] * g + window.w[2] * g1 + window.w[1] * g2 + window.w[0] * g3, count);
        g3 = g2, g2 = g1, g1 = g;
        x0 = window.x1, window.x1 = window.x2, window.x2 = window.x3, window.x3 = Four::before(x, t - 4, c, count);
    }
    totals[0] = t0, totals[1] = t1, totals[2] = t2, totals[3] = t3, totals[4] = t4;
    later[0] = g1, later[1] = g2, later[2] = g3;
}

inline int64_t vectors(const Conv& f) { return ceil_div(f.channels, W); }

// totals: [vectors][5]; later: [vectors][3].
inline void backward_tokens(const Conv& f, const Taps& taps, int64_t batch, int64_t begin, int64_t end, vf* totals, vf* later) {
    const ScanSizes size = sizes(f);
    const Walk x(f.x, size, batch, 0, 0), grad(f.grad_y, size, batch, 0, 0), dx(f.dx, size, batch, 0, 0);
    for (int64_t stop = end, step = tile(f); stop > begin; stop -= step)
        for (int64_t v = 0; v < vectors(f); ++v) {
            const int count = lanes_from(v * W, f.channels);
            const int64_t start = stop - step > begin ? stop - step : begin;
            (count == W ? backward_from_last<true> : backward_from_last<false>)(f, taps, x, grad, dx, start, stop, v * W, count,
                                                                               totals + 5 * v, later + 3 * v);
        }
}

// Gradients of weight and bias from the totals of the batch elements: [batch][vectors][5].
inline void finish_taps(const Conv& f, const vf* totals) {
    for (int64_t v = 0; v < vectors(f); ++v)
        for (int k = 0; k < 5; ++k) {
            vf sum = {};
            for (int64_t b = 0; b < f.batch; ++b) sum += totals[(b * vectors(f) + v) * 5 + k];
            const int count = lanes_from(v * W, f.channels);
            if (k == 4 && f.dbias) store(f.dbias + v * W, sum, count);
            for (int i = 0; k < 4 && i < count; ++i) f.dweight[(v * W + i) * 4 + k] = sum[i];
        }
}

}  // namespace
}  // namespace infssm::INFSSM_ISA
