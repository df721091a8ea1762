// The squares c^2 that `simplified` and `aligned` see of the output rows, one per pole, free of overflow.
#pragma once

#include "pair.h"

namespace infssm::INFSSM_ISA {
namespace {

struct Weights {
    Values rows;
    vf *old_weight, *new_weight;  // c^2, d^2; all of them in the first lane for a scalar transition
    float old_scale = 1, new_scale = 1;  // powers of two that the rows were multiplied by

    explicit Weights(Arrays& arrays) : rows(arrays.values()), old_weight(arrays.take()), new_weight(arrays.take()) {}

    // False where a side is silent. `NEAR`: differences of the rows have their own precision.
    template <bool NEAR>
    bool read(const Distance& f, int64_t i) {
        rows.read<NEAR>(f.old_states.c + i * f.n, f.new_states.c + i * f.n, f.n, f.soft);
        old_scale = new_scale = 1;
        const auto [old_sum, new_sum] = square(f);
        const auto fine = [](float x) { return x > 1e-12f && x < 1e12f; };
        if (fine(old_sum) && fine(new_sum) && new_sum < 4 * old_sum && old_sum < 4 * new_sum) return true;
        return balance(f);
    }

    // The derivative by the rows of one side, from that by the weights, per pole.
    void write(const Distance& f, const vf* by_weight, bool second, float* out) const {
        if (!out) return;
        const vf* values = second ? rows.y : rows.x;
        const float scale = second ? new_scale : old_scale, back = 1 / scale;
        for (int64_t v = 0; v * W < f.n; ++v) {
            const vf by = f.poles == 1 ? splat(by_weight[0][0]) : by_weight[v];
            store(out + v * W, through(2.f * scale * values[v] * by, values[v] * back, f.soft), lanes_of(f.n, v));
        }
    }

  private:
    Two square(const Distance& f) const {  // fills the weights; returns their sums
        vf x = {}, y = {};
        for (int64_t v = 0; v * W < f.n; ++v) {
            old_weight[v] = rows.x[v] * rows.x[v], new_weight[v] = rows.y[v] * rows.y[v];
            x += old_weight[v], y += new_weight[v];
        }
        const Two total = add_up(x, y);
        if (f.poles == 1) old_weight[0] = splat(total.first, 1), new_weight[0] = splat(total.second, 1);
        return total;
    }

    // Brings the largest entry of each side to about 1. Neither distance depends on the scale of a side; sides of about
    // equal size get the same factor, so that their difference keeps its precision.
    bool balance(const Distance& f) {
        vf x = {}, y = {};
        for (int64_t v = 0; v * W < f.n; ++v) x = at_least(x, absolute(rows.x[v])), y = at_least(y, absolute(rows.y[v]));
        const float old_most = most(x), new_most = most(y);
        if (old_most == 0 || new_most == 0) return false;
        if (!std::isfinite(old_most) || !std::isfinite(new_most)) return true;  // and so is the value
        const int level = std::ilogb(old_most), ratio = static_cast<int>(std::lround(std::log2(double(new_most) / old_most)));
        const auto bounded = [](int power) { return std::ldexp(1.f, power > 126 ? 126 : power < -126 ? -126 : power); };
        old_scale = bounded(-level), new_scale = bounded(-level - ratio);
        for (int64_t v = 0; v * W < f.n; ++v) {
            rows.x[v] *= old_scale, rows.y[v] *= new_scale;
            rows.gap[v] = old_scale == new_scale ? rows.gap[v] * old_scale : rows.x[v] - rows.y[v];
        }
        square(f);
        return true;
    }
};

}  // namespace
}  // namespace infssm::INFSSM_ISA
