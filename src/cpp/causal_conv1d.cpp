// Causal depthwise convolution with bias and SiLU, forward and backward, in scan order (see scan.h).
#include <vector>

#include "conv.h"

namespace infssm::INFSSM_ISA {
namespace {

constexpr int64_t BLOCK_VECTORS = 16;  // channels of a work item; its rows of the window stay in the first-level cache

struct Part {  // one batch element and one block of channels
    int64_t batch, first, last;

    Part(const Conv& f, int64_t blocks, int64_t index) {
        batch = index / blocks;
        first = index % blocks * BLOCK_VECTORS * W;
        last = first + BLOCK_VECTORS * W < f.channels ? first + BLOCK_VECTORS * W : f.channels;
    }
};

// How many tokens of a token's own sequence lie before it in scan order.
class Reach {
  public:
    Reach(const Conv& f, const ScanSizes& size, int64_t batch) {
        if (!f.seq.data) return;
        const Walk seq(f.seq, size, batch, 0, 0);
        before_.resize(f.tokens);
        for (int64_t t = 1; t < f.tokens; ++t) before_[t] = *seq.at(t) == *seq.at(t - 1) ? before_[t - 1] + 1 : 0;
    }
    int64_t of(int64_t t) const { return before_.empty() ? t : before_[t]; }

    // The first weight that multiplies a token of the sequence.
    int64_t first_tap(int64_t t, int64_t width) const { return of(t) < width - 1 ? width - 1 - of(t) : 0; }

  private:
    std::vector<int64_t> before_;
};

// bias + sum_k weight_k x_{t - width + 1 + k}; tokens before the first of the sequence are 0.
template <int WIDTH>
INFSSM_INLINE vf convolve(const Conv& f, const Taps& taps, const Walk& x, int64_t t, int64_t first, int64_t channel,
                          int count) {
    const int64_t width = WIDTH ? WIDTH : f.width;
    vf sum = taps.tap(width, channel);
    for (int64_t k = first; k < width; ++k)
        sum += taps.tap(k, channel) * load(x.at(t - width + 1 + k) + channel, count);
    return sum;
}

template <int WIDTH>
void forward(const Conv& f) {
    const Taps taps(f);
    const ScanSizes size = sizes(f);
    const int64_t blocks = ceil_div(f.channels, BLOCK_VECTORS * W);
#pragma omp parallel for num_threads(f.threads) schedule(static)
    for (int64_t index = 0; index < f.batch * blocks; ++index) {
        const FlushToZero flush;
        const Part part(f, blocks, index);
        const Walk x(f.x, size, part.batch, 0, 0), y(f.y, size, part.batch, 0, 0);
        const Reach reach(f, size, part.batch);
        for (int64_t t = 0; t < f.tokens; ++t) {
            const int64_t first = reach.first_tap(t, WIDTH ? WIDTH : f.width);
            for (int64_t c = part.first; c < part.last; c += W) {
                const int count = lanes_from(c, part.last);
                vf value = convolve<WIDTH>(f, taps, x, t, first, c, count);
                if (f.silu) value *= sigmoid(value);
                store(y.at(t) + c, value, count);
            }
        }
    }
}

void forward_four(const Conv& f) {
    const Taps taps(f);
    const int64_t blocks = ceil_div(f.channels, BLOCK_VECTORS * W);
#pragma omp parallel for num_threads(f.threads) schedule(static)
    for (int64_t index = 0; index < f.batch * blocks; ++index) {
        const FlushToZero flush;
        const Part part(f, blocks, index);
        forward_tokens(f, taps, part.batch, part.first, part.last, 0, f.tokens);
    }
}

// totals: [4 taps, bias]; late: the output gradients of the three tokens before `first`.
template <bool FULL>
__attribute__((noinline)) void backward_four(const Conv& f, const Taps& taps, const Walk& x, const Walk& grad, const Walk& dx, int64_t first,
                   int64_t last, int64_t c, int lanes, vf* totals, vf* late) {
    const int count = FULL ? W : lanes;
    Four window(taps, x, first < f.tokens ? first : 0, c, count);  // after the last token nothing of x is read
    vf t0 = totals[0], t1 = totals[1], t2 = totals[2], t3 = totals[3], t4 = totals[4];
    vf g1 = late[0], g2 = late[1], g3 = late[2];
    for (int64_t t = first; t < last; ++t) {
        vf g = {};
        if (t < f.tokens) {
            g = load(grad.at(t) + c, count);
            const vf x0 = load(x.at(t) + c, count);
            if (f.silu) {
                const vf value = window.value(x0), s = sigmoid(value);
                g *= s + value * s * (1.f - s);
            }
            t0 += g * window.x3, t1 += g * window.x2, t2 += g * window.x1, t3 += g * x0, t4 += g;
            x.expect(t, c), grad.expect(t, c), dx.expect(t, c, true);
            window.move(x0);
        }
        if (t >= 3)
            put(f, dx.at(t - 3) + c, window.w[0] * g + window.w[1] * g1 + window.w[2] * g2 + window.w[3] * g3, count);
        g3 = g2, g2 = g1, g1 = g;
    }
    totals[0] = t0, totals[1] = t1, totals[2] = t2, totals[3] = t3, totals[4] = t4;
    late[0] = g1, late[1] = g2, late[2] = g3;
}

void backward_part_four(const Conv& f, const Taps& taps, const Part& part, vf* totals, vf* late) {
    const ScanSizes size = sizes(f);
    const Walk x(f.x, size, part.batch, 0, 0), grad(f.grad_y, size, part.batch, 0, 0), dx(f.dx, size, part.batch, 0, 0);
    memset(totals, 0, 5 * BLOCK_VECTORS * sizeof(vf));
    memset(late, 0, 3 * BLOCK_VECTORS * sizeof(vf));
    const int64_t steps = f.tokens + 3;  // the last three gradients of x follow the last token
    for (int64_t t = 0, step = tile(f); t < steps; t += step)
        for (int64_t c = part.first, v = 0; c < part.last; c += W, ++v) {
            const int count = lanes_from(c, part.last);
            const int64_t end = t + step < steps ? t + step : steps;
            (count == W ? backward_four<true> : backward_four<false>)(f, taps, x, grad, dx, t, end, c, count, totals + 5 * v, late + 3 * v);
        }
}

// Gradient of the convolution's output (before SiLU) at token t.
template <int WIDTH>
INFSSM_INLINE vf output_grad(const Conv& f, const Taps& taps, const Walk& x, const Walk& grad, int64_t t,
                             int64_t first, int64_t c, int count) {
    const vf g = load(grad.at(t) + c, count);
    if (!f.silu) return g;
    const vf value = convolve<WIDTH>(f, taps, x, t, first, c, count);
    const vf s = sigmoid(value);
    return g * (s + value * s * (1.f - s));
}

template <int WIDTH>
void backward_part(const Conv& f, const Taps& taps, const Part& part, vf* totals, vf* window) {
    const int64_t width = WIDTH ? WIDTH : f.width;
    const ScanSizes size = sizes(f);
    const Walk x(f.x, size, part.batch, 0, 0), grad(f.grad_y, size, part.batch, 0, 0), dx(f.dx, size, part.batch, 0, 0);
    memset(totals, 0, (width + 1) * BLOCK_VECTORS * sizeof(vf));
    const Reach reach(f, size, part.batch);
    // dx_s needs the output gradients of s ... s + width - 1: a ring of the last `width` of them is kept.
    for (int64_t t = 0; t < f.tokens + width - 1; ++t) {
        const int64_t first = t < f.tokens ? reach.first_tap(t, width) : 0, s = t - width + 1;
        int64_t used = 1;  // of those, how many lie in the sequence of s
        while (s >= 0 && used < width && s + used < f.tokens && reach.of(s + used) >= used) ++used;
        for (int64_t c = part.first, v = 0; c < part.last; c += W, ++v) {
            const int count = lanes_from(c, part.last);
            vf g = {};
            if (t < f.tokens) {
                g = output_grad<WIDTH>(f, taps, x, grad, t, first, c, count);
                for (int64_t k = first; k < width; ++k)
                    totals[v * (width + 1) + k] += g * load(x.at(t - width + 1 + k) + c, count);
                totals[v * (width + 1) + width] += g;
            }
            window[t % width * BLOCK_VECTORS + v] = g;
            if (s < 0) continue;
            vf sum = {};
            for (int64_t k = 0; k < used; ++k) sum += taps.tap(width - 1 - k, c) * window[(s + k) % width * BLOCK_VECTORS + v];
            put(f, dx.at(s) + c, sum, count);
        }
    }
}

template <int WIDTH>
void backward(const Conv& f) {
    const Taps taps(f);
    const int64_t blocks = ceil_div(f.channels, BLOCK_VECTORS * W), parts = f.batch * blocks;
    const int64_t each = (f.width + 1) * BLOCK_VECTORS;
    const Buffer totals(parts * each * W), windows(f.threads * f.width * BLOCK_VECTORS * W);
#pragma omp parallel for num_threads(f.threads) schedule(static)
    for (int64_t index = 0; index < parts; ++index) {
        const FlushToZero flush;
        const Part part(f, blocks, index);
        vf *const total = totals.vectors() + index * each, *const window = windows.vectors() + thread_index() * f.width * BLOCK_VECTORS;
        if (WIDTH == 4 && !f.seq.data) backward_part_four(f, taps, part, total, window);
        else backward_part<WIDTH>(f, taps, part, total, window);
    }
    for (int64_t c = 0; c < f.channels; c += W) {
        const int64_t block = c / (BLOCK_VECTORS * W), v = c % (BLOCK_VECTORS * W) / W;
        const int count = lanes_from(c, f.channels);
        for (int64_t k = 0; k <= f.width; ++k) {
            vf sum = {};
            for (int64_t b = 0; b < f.batch; ++b) sum += totals.vectors()[(b * blocks + block) * each + v * (f.width + 1) + k];
            if (k == f.width && f.dbias) store(f.dbias + c, sum, count);
            for (int i = 0; k < f.width && i < count; ++i) f.dweight[(c + i) * f.width + k] = sum[i];
        }
    }
}

}  // namespace

void conv_forward(const Conv& f) { f.width != 4 ? forward<0>(f) : f.seq.data ? forward<4>(f) : forward_four(f); }
void conv_backward(const Conv& f) { f.width == 4 ? backward<4>(f) : backward<0>(f); }

}  // namespace infssm::INFSSM_ISA
