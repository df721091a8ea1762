// The paper's distance 1 - tr(G3 G4) / (tr G1 tr G2) as a weighted mean of squared gaps (docs/reference/maths.md, eq. 20):
//   sum_ij p_i q_j g_ij^2 / (sum p sum q),  g = (s - r) / (s + r),  p = c^2 (1 + r)^2 / r.
#include "weights.h"

namespace infssm::INFSSM_ISA {
namespace {

// One side of the comparison.
struct Side {
    const vf *r, *weight;   // poles, squares of the rows
    vf *lift, *mass;        // (1 + r)^2 / r, and p
    vf *mean, *slope;       // per pole: the sum over the other side of p g^2, and its slope in x
    float total = 0;        // of the masses

    Side(Arrays& arrays, const vf* poles, const vf* weights)
        : r(poles), weight(weights), lift(arrays.take()), mass(arrays.take()), mean(arrays.take()), slope(arrays.take()) {}

    vf weigh(int64_t v) const {
        lift[v] = (1.f + r[v]) * (1.f + r[v]) * reciprocal(r[v]);
        return mass[v] = weight[v] * lift[v];
    }
};

struct Token {
    Poles poles;
    Weights weights;
    Side old_side, new_side;
    vf *by_weight, *by_x;

    static constexpr int ARRAYS = 3 + 5 + 2 * 4 + 2;
    Token(Arrays arrays, const Distance&)
        : poles(arrays.poles()),
          weights(arrays),
          old_side(arrays, poles.r, weights.old_weight),
          new_side(arrays, poles.s, weights.new_weight),
          by_weight(arrays.take()),
          by_x(arrays.take()) {}
};

// torch.isclose's rule for the soft-normalised states of the token; a - b = 2 (s - r) / ((1 + r) (1 + s)).
INFSSM_INLINE bool all_close(const Token& t, const Distance& f) {
    vi apart = {};
    for (int64_t v = 0; v * W < f.poles; ++v) {
        const vf r = t.poles.r[v], s = t.poles.s[v];
        apart |= ~(2.f * absolute(t.poles.shift[v]) <= (1.f + r) * (1e-8f * (1.f + s) + 1e-5f * absolute(1.f - s)));
    }
    if (any(apart)) return false;
    const Weights& w = t.weights;
    const vf bound = splat(1e-8f * w.new_scale);
    for (int64_t v = 0; v * W < f.n; ++v) apart |= ~(absolute(w.rows.gap[v]) <= bound + 1e-5f * absolute(w.rows.y[v]));
    return w.old_scale == w.new_scale && !any(apart);
}

// COUNT vectors of states of `mine` from the v-th on, as `spread`.
template <bool SLOPE, int COUNT>
INFSSM_INLINE vf spread(const Side& other, const Side& mine, const vf* shift, float sign, int64_t n, int64_t v) {
    const float *poles = scalars(other.r), *masses = scalars(other.mass);
    vf x[COUNT], value[COUNT] = {}, slope[COUNT] = {}, sum = {};
    for (int k = 0; k < COUNT; ++k) x[k] = mine.r[v + k];
    for (int64_t i = 0; i < n; ++i)
        for (int k = 0; k < COUNT; ++k) {
            const vf inverse = reciprocal(x[k] + poles[i]), gap = (x[k] - poles[i]) * inverse;
            const vf first = masses[i] * gap, second = first * gap;
            value[k] += second;
            if constexpr (SLOPE) slope[k] += first - second * gap;  // dg / dx = -(1 - g^2) / 2 for x = -log r
        }
    for (int k = 0; k < COUNT; ++k) {
        // Between states of equal index the gap has its own precision.
        const vf their = other.r[v + k], inverse = reciprocal(x[k] + their), rounded = (x[k] - their) * inverse;
        const vf gap = sign * shift[v + k] * inverse, error = gap - rounded;
        value[k] += other.mass[v + k] * error * (gap + rounded);
        // (gap - gap^3) - (rounded - rounded^3)
        if constexpr (SLOPE) slope[k] += other.mass[v + k] * error * (1.f - gap * gap - rounded * (gap + rounded));
        mine.mean[v + k] = value[k];
        if constexpr (SLOPE) mine.slope[v + k] = -slope[k];
        sum += mine.mass[v + k] * value[k];
    }
    return sum;
}

// Fills mean and slope of `mine`; `sign` is that of its poles in `shift`. Returns the sum over mine of mass * mean.
template <bool SLOPE>
float spread(const Side& other, const Side& mine, const vf* shift, float sign, int64_t n) {
    vf sum = {};
    int64_t v = 0;
    for (; (v + 1) * W < n; v += 2) sum += spread<SLOPE, 2>(other, mine, shift, sign, n, v);
    if (v * W < n) sum += spread<SLOPE, 1>(other, mine, shift, sign, n, v);
    return add_up(sum);
}

// Derivatives for one side, the masses of whose other side sum to `other`; false where rounding may have taken their
// precision.
bool write(const Distance& f, const Token& t, const Side& side, float other, float value, bool second, Slope to) {
    const float by_own = 1 / side.total, by_both = by_own / other, rest = value * by_own;
    vf largest = {}, error = {};
    for (int64_t v = 0; v * W < f.poles; ++v) {
        const vf r = side.r[v], by_mass = side.mean[v] * by_both - rest;
        t.by_weight[v] = by_mass * side.lift[v];
        // d log mass / dx = (1 - r) / (1 + r), the pole itself
        t.by_x[v] = side.mass[v] * (side.slope[v] * by_both + (1.f - r) * reciprocal(1.f + r) * by_mass);
        const vf slope = by_state(t.by_x[v], r, f.soft);
        if (to.a) store(to.a + v * W, slope, lanes_of(f.poles, v));
        largest = at_least(largest, absolute(slope)), error = at_least(error, by_state(side.mass[v], r, f.soft));
    }
    t.weights.write(f, t.by_weight, second, to.c);
    return f.soft || !(ROUNDING * rest * most(error) > BEARABLE * most(largest));
}

void simplified(const Distance& f, Token& t, int64_t i) {
    const Slope to_old(f.to_old, i, f), to_new(f.to_new, i, f);
    f.sure[i] = t.poles.read(f.old_states.a + i * f.poles, f.new_states.a + i * f.poles, f.poles, f.soft) ? 1.f : 0.f;
    const bool heard = t.weights.read<false>(f, i);
    if (!heard || all_close(t, f)) {
        f.value[i] = 0;
        to_old.zero(f), to_new.zero(f);
        return;
    }
    Side &past = t.old_side, &now = t.new_side;
    vf old_mass = {}, new_mass = {};
    for (int64_t v = 0; v * W < f.poles; ++v) old_mass += past.weigh(v), new_mass += now.weigh(v);
    const Two totals = add_up(old_mass, new_mass);
    past.total = totals.first, now.total = totals.second;
    const float sum = to_new.a ? spread<true>(past, now, t.poles.shift, 1, f.poles)
                               : spread<false>(past, now, t.poles.shift, 1, f.poles);
    const float value = sum / (past.total * now.total);
    bool sure = std::isfinite(value);
    if (to_new.a) sure &= write(f, t, now, past.total, value, true, to_new);
    if (to_old.a) {
        spread<true>(now, past, t.poles.shift, -1, f.poles);
        sure &= write(f, t, past, now.total, value, false, to_old);
    }
    f.value[i] = value, f.sure[i] = f.sure[i] != 0 && sure;
}

}  // namespace

void simplified(const Distance& f) {
    for_tokens<Token>(f, Token::ARRAYS, [&](Token& t, int64_t i) { simplified(f, t, i); });
}

}  // namespace infssm::INFSSM_ISA
