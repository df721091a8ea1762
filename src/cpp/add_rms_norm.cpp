// Residual addition and RMSNorm of rows, forward and backward.
#include "kernels.h"
#include "memory.h"

namespace infssm::INFSSM_ISA {
namespace {

// Calls body(offset, lanes in use) for each vector of a row.
template <class Body>
INFSSM_INLINE void each_vector(int64_t channels, const Body& body) {
    int64_t i = 0;
    for (; i + W <= channels; i += W) body(i, W);
    if (i < channels) body(i, static_cast<int>(channels - i));
}

// Rows per partial sum of the weight's gradient; only the shape decides, so threads do not change the result.
int64_t rows_per_block(int64_t rows) { return rows > 64 * 16 ? ceil_div(rows, 64) : 16; }

}  // namespace

void norm_forward(const Norm& f) {
#pragma omp parallel for num_threads(f.threads) schedule(static)
    for (int64_t row = 0; row < f.rows; ++row) {
        const FlushToZero flush;
        const float* x = f.x + row * f.channels;
        const float* residual = f.residual ? f.residual + row * f.channels : nullptr;
        float* total = f.total ? f.total + row * f.channels : nullptr;
        float* normed = f.normed + row * f.channels;
        vf squares = {};
        each_vector(f.channels, [&](int64_t i, int count) {
            vf value = load(x + i, count);
            if (residual) {
                value += load(residual + i, count);
                store(total + i, value, count);
            }
            squares += value * value;
        });
        const float scale = 1.f / __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(f.channels) + f.eps);
        f.scale[row] = scale;
        const float* sum = residual ? total : x;
        each_vector(f.channels, [&](int64_t i, int count) {
            store(normed + i, load(sum + i, count) * scale * load(f.weight + i, count), count);
        });
    }
}

void norm_backward(const Norm& f) {
    const int64_t per_block = rows_per_block(f.rows), blocks = ceil_div(f.rows, per_block);
    const Buffer parts(blocks * f.channels);
#pragma omp parallel for num_threads(f.threads) schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
        const FlushToZero flush;
        float* dweight = parts.get() + block * f.channels;
        memset(dweight, 0, f.channels * sizeof(float));
        const int64_t end = (block + 1) * per_block < f.rows ? (block + 1) * per_block : f.rows;
        for (int64_t row = block * per_block; row < end; ++row) {
            const float *x = f.x + row * f.channels, *grad = f.grad_normed + row * f.channels;
            const float* grad_total = f.grad_total ? f.grad_total + row * f.channels : nullptr;
            float* dx = f.dx + row * f.channels;
            const float scale = f.scale[row];
            vf dots = {};
            each_vector(f.channels, [&](int64_t i, int count) {
                const vf g = load(grad + i, count), unit = load(x + i, count) * scale;
                dots += g * load(f.weight + i, count) * unit;
                store(dweight + i, load(dweight + i, count) + g * unit, count);
            });
            const float mean = sum_lanes(dots) / static_cast<float>(f.channels);
            each_vector(f.channels, [&](int64_t i, int count) {
                const vf unit = load(x + i, count) * scale;
                vf value = scale * (load(grad + i, count) * load(f.weight + i, count) - unit * mean);
                if (grad_total) value += load(grad_total + i, count);
                store(dx + i, value, count);
            });
        }
    }
    each_vector(f.channels, [&](int64_t i, int count) {
        vf sum = {};
        for (int64_t block = 0; block < blocks; ++block) sum += load(parts.get() + block * f.channels + i, count);
        store(f.dweight + i, sum, count);
    });
}

}  // namespace infssm::INFSSM_ISA
