// Sums over the principal angles between two observability subspaces with real poles, as integrals over the circle
// (docs/maths.md, section 7).
//
// With the Blaschke products B, B' of the two sets of poles the sines are the singular values of the Hankel operator of
// U = B conj(B'), and the sum of their squares is the energy of U on the unit circle (Douglas),
//   sum sin^2 = 1/2 * double integral of |U(z) - U(w)|^2 / |z - w|^2.
// A pole a becomes r = (1 - a) / (1 + a) on the half-line, the circle becomes s = +-e^x, and U = e^(i psi) with
//   psi(x) / 2 = sum_k atan(s / r_k) - atan(s / r'_k) up to sign, and U(-s) = conj(U(s)).
// In x everything is analytic in a strip, so the trapezoidal rule converges geometrically: a few dozen points give all
// digits of float32, whatever the poles (repeated ones included). Points of the two variables alternate, which avoids
// the diagonal. Every term is positive and proportional to the gaps of the poles: nothing cancels near equality.
#pragma once

#include <cmath>
#include <map>
#include <tuple>

#include "pair.h"

namespace infssm {
namespace INFSSM_ISA {
namespace {

constexpr double EXPONENT = 14;  // the rule's relative error is about e^-14, some roundings of float32
constexpr double MARGIN = 7;   // beyond the outermost poles the rest decays as e^-2x
constexpr double ENERGY = 1 / (4 * PI * PI);  // sum sin^2 over the energy of the points

// Indices of the states in rising order: no result depends on the order, but differences of near poles keep digits that
// those of far ones lose. Each state counts those before it, which beats a sort that branches.
inline void sort_states(const float* x, int64_t n, vi* keys, int32_t* order) {
    const int32_t* key = reinterpret_cast<const int32_t*>(keys);
    for (int64_t v = 0; v * W < n; ++v) {
        const vi bits = (vi)load(x + v * W, lanes_of(n, v));
        keys[v] = bits ^ ((bits >> 31) & 0x7fffffff);  // as integers, bit patterns of negative numbers fall
    }
    vi lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    for (int64_t v = 0; v * W < n; ++v) {
        const int64_t start = v * W, stop = start + lanes_of(n, v);
        const vi mine = keys[v];
        vi rank = {};
        for (int64_t j = 0; j < start; ++j) rank -= vi{} + key[j] <= mine;  // equal ones keep their order
        for (int64_t j = stop; j < n; ++j) rank -= vi{} + key[j] < mine;
        for (int64_t j = start; j < stop; ++j) {
            const vi other = vi{} + key[j];
            rank -= (other < mine) | ((other == mine) & (vi{} + static_cast<int32_t>(j - start) < lane));
        }
        for (int i = 0; i < lanes_of(n, v); ++i) order[rank[i]] = static_cast<int32_t>(start + i);
    }
}

// The poles of one token, sorted; lanes without a pole hold equal ones on both sides, which change nothing.
struct SortedPoles {
    int64_t n = 0, vectors = 0;
    vf *old_r, *new_r, *product, *gap;  // r, r', r r', r' - r
    vf* strain;                         // |r' - r| / sqrt(r r'), at least the distance |log r' - log r|
    vf* spare;
    int32_t *old_order, *new_order;

    void read(const float* old_state, const float* new_state, int64_t count, bool soft) {
        fit(count);
        sort_states(old_state, n, reinterpret_cast<vi*>(spare), old_order);
        sort_states(new_state, n, reinterpret_cast<vi*>(spare), new_order);
        for (int64_t v = 0; v < vectors; ++v) {
            vf x = splat(old_state[0]), y = x;
            for (int i = 0; i < lanes_of(n, v); ++i) {
                x[i] = old_state[old_order[v * W + i]], y[i] = new_state[new_order[v * W + i]];
            }
            const HalfPlane h = half_plane(x, y, soft);
            old_r[v] = h.r, new_r[v] = h.s, gap[v] = h.shift;
            product[v] = old_r[v] * new_r[v];
            strain[v] = absolute(gap[v]) / square_root(product[v]);
        }
    }

  private:
    GrowingBuffer memory_;

    void fit(int64_t count) {
        n = count, vectors = ceil_div(count, W);
        vf* memory = memory_.vectors(8 * vectors * W);
        const auto take = [&] { return memory += vectors, memory - vectors; };
        old_r = take(), new_r = take(), product = take(), gap = take(), strain = take(), spare = take();
        old_order = reinterpret_cast<int32_t*>(take()), new_order = reinterpret_cast<int32_t*>(take());
    }
};

// The points x of the quadrature: `count` steps of size `step` from log `first`.
struct Grid {
    double first, step;
    int64_t count;  // 0: a pole is not inside the unit interval, or NaN
    double span;    // of log r, rounded up; its middle is the grid's
};

// Half the tangent and the inverse hyperbolic tangent of the sine of an angle t.
struct Strip {
    double t;
    float slope, most;
};
constexpr Strip STRIPS[] = {{0.25, 0.12767f, 0.25265f}, {0.6, 0.34207f, 0.63962f}, {1.0, 0.77870f, 1.22619f},
                            {1.3, 1.80105f, 1.99340f},  {1.5, 7.05071f, 3.34068f}};
constexpr int STRIP_COUNT = sizeof(STRIPS) / sizeof(STRIPS[0]);

// In the strip |Im x| < t, |U| grows at most by exp(sum_k min(strain_k tan(t) / 2, atanh(sin t))), and the error of the
// rule is that times exp(-2 pi t / step): the widest step over some t.
inline double widest_step(const SortedPoles& p) {
    double step = 0;
    for (int first = 0; first < STRIP_COUNT; first += W) {
        vf growth[W] = {};
        const int count = STRIP_COUNT - first < W ? STRIP_COUNT - first : W;
        for (int i = 0; i < count; ++i) {
            const Strip& strip = STRIPS[first + i];
            for (int64_t v = 0; v < p.vectors; ++v) growth[i] += at_most(splat(strip.most), p.strain[v] * strip.slope);
        }
        const vf sums = sum_lanes_of(growth);
        for (int i = 0; i < count; ++i) step = std::fmax(step, 2 * PI * STRIPS[first + i].t / (EXPONENT + sums[i]));
    }
    return step;
}

inline Grid grid_for(const SortedPoles& p) {
    vf low = p.old_r[0], high = low, moved = {};
    vi good = {};
    good = ~good;
    for (int64_t v = 0; v < p.vectors; ++v) {
        for (const vf r : {p.old_r[v], p.new_r[v]}) {
            good &= inside(r);
            low = at_most(low, r), high = at_least(high, r);
        }
        moved += at_most(splat(1.f), p.strain[v]);
    }
    if (any(~good)) return {0, 0, 0, 0};
    const float least = -most(-low), largest = most(high);
    // Many poles that moved together hold |U - 1| up further out.
    const double margin = MARGIN + std::log1p(sum_lanes(moved)) / 2;
    const double span = std::log(static_cast<double>(largest) / least), widest = widest_step(p);
    double step = 0.58;
    while (step > widest) step *= 0.84;  // few sizes, so that tokens share their weights
    const int64_t count = round_up(static_cast<int64_t>((span + 2 * margin) / step) + 1, W);
    return {std::sqrt(least) * std::sqrt(largest) * std::exp(-step * (count - 0.5) / 2), step, count,
            std::ceil(2 * span) / 2};
}

// Weights of the quadrature on a grid, by the distance of two points.
struct Rule {
    int64_t count, vectors;  // points of each variable
    double step;
    vf* power;               // e^x over that of the first point: the first variable's, then the second's, half a step on
    vf *near, *far;          // h^2 / (4 sinh^2) and h^2 / (4 cosh^2)
    vf* beyond;              // weight of all points beyond the grid, at each point of the first variable

    explicit Rule(const Grid& grid) : count(grid.count), vectors(grid.count / W), step(grid.step), memory_(8 * count) {
        vf* memory = memory_.vectors();
        const auto take = [&] { return memory += 2 * vectors, memory - 2 * vectors; };
        power = take(), near = take(), far = take(), beyond = take();
        raise();
        weigh();
    }

    // Between point i of one variable and j of the other lies the distance of entry i - j + shift.
    int64_t shift(bool second) const { return count - (second ? 0 : 1); }

  private:
    Buffer memory_;

    // Powers in double precision: a rounded x would move the points.
    void raise() const {
        for (int64_t i = 0; i < count; ++i) {
            scalars(power)[i] = static_cast<float>(std::exp(step * i));
            scalars(power)[count + i] = static_cast<float>(std::exp(step * (i + 0.5)));
        }
    }

    // Entry k + count of near and far belongs to the distance |k + 1/2| steps.
    void weigh() const {
        for (int64_t k = 0; k < count; ++k) {
            const double sinh = std::sinh(step * (k + 0.5) / 2), square = step * step / 4;
            scalars(near)[count + k] = static_cast<float>(square / (sinh * sinh));
            scalars(far)[count + k] = static_cast<float>(square / (1 + sinh * sinh));
        }
        float *to_near = scalars(near), *to_far = scalars(far), *sums = scalars(beyond);
        float rest = static_cast<float>(step / std::sinh(step * count));  // of all distances from k + 1/2 on
        for (int64_t k = 0; k <= count; ++k) sums[k] = 0;
        sums[count] = sums[0] = rest;
        for (int64_t k = count - 1; k >= 0; --k) {
            to_near[count - 1 - k] = to_near[count + k], to_far[count - 1 - k] = to_far[count + k];
            rest += to_near[count + k] + to_far[count + k];
            sums[k] += rest, sums[count - k] += rest;
        }
    }
};

// The rules of the grids a thread has met, wherever they begin: to make one takes longer than to use it.
template <class R>
class Rules {
  public:
    static Rules& of_thread() {
        static thread_local Rules rules;
        return rules;
    }
    const R& at(const Grid& grid) { return rules_.try_emplace({grid.step, grid.count, grid.span}, grid).first->second; }

    // Call it where no token in work refers to a rule.
    void forget_if_many() {
        if (rules_.size() > MOST) rules_.clear();
    }

  private:
    static constexpr size_t MOST = 100;  // some megabytes
    std::map<std::tuple<double, int64_t, double>, R> rules_;
};

// Values at the points of one token: those of the first variable, then those of the second.
struct Points {
    const Rule* rule = nullptr;
    vf *s, *square;   // e^x and its square
    vf *fall, *sine;  // 1 - cos psi, sin psi
    vf* slope;        // derivative of the energy by psi
    vf size = {};     // of the parts of the slopes, which may cancel in them

    void place(const Rule& chosen, double first) {
        rule = &chosen;
        vf* memory = memory_.vectors(10 * chosen.count);
        const auto take = [&] { return memory += 2 * chosen.vectors, memory - 2 * chosen.vectors; };
        s = take(), square = take(), fall = take(), sine = take(), slope = take();
        for (int64_t v = 0; v < 2 * chosen.vectors; ++v) {
            s[v] = static_cast<float>(first) * chosen.power[v];
            square[v] = s[v] * s[v];
        }
    }

  private:
    GrowingBuffer memory_;
};

// psi at UNROLL vectors of points: the argument of prod_k (1 + i t_k), squared.
template <int UNROLL>
void phases(const SortedPoles& p, const Points& x, int64_t first) {
    const float *product = scalars(p.product), *gap = scalars(p.gap);
    vf re[UNROLL], im[UNROLL], s[UNROLL], square[UNROLL];
    for (int u = 0; u < UNROLL; ++u) {
        re[u] = splat(1.f), im[u] = vf{};
        s[u] = x.s[first + u], square[u] = x.square[first + u];
    }
    for (int64_t i = 0; i < p.n; ++i) {
        for (int u = 0; u < UNROLL; ++u) {
            const vf t = (s[u] * gap[i]) * reciprocal(square[u] + product[i]), before = re[u];
            re[u] -= t * im[u];
            im[u] += t * before;
        }
        if (i % 4 == 3) {  // |t| may reach 1e7
            for (int u = 0; u < UNROLL; ++u) {
                const vf scale = reciprocal(absolute(re[u]) + absolute(im[u]));
                re[u] *= scale, im[u] *= scale;
            }
        }
    }
    for (int u = 0; u < UNROLL; ++u) {
        const vf scale = 2.f / (re[u] * re[u] + im[u] * im[u]);
        x.fall[first + u] = im[u] * im[u] * scale;
        x.sine[first + u] = re[u] * im[u] * scale;
    }
}

inline void phases(const SortedPoles& p, const Points& x) {
    int64_t v = 0;
    for (; v + 4 <= 2 * x.rule->vectors; v += 4) phases<4>(p, x, v);
    for (; v < 2 * x.rule->vectors; v += 2) phases<2>(p, x, v);
}

// The derivative of the energy by psi at the points of one variable (lanes); `second` says which. Beyond the grid U is
// 1. Where `VALUE`, returns the energy between all points.
template <bool VALUE, bool SLOPE>
vf interact(Points& x, bool second) {
    const Rule& rule = *x.rule;
    const int64_t mine = second ? rule.vectors : 0, other = (rule.vectors - mine) * W, shift = rule.shift(second);
    const float *near = scalars(rule.near), *far = scalars(rule.far);
    vf total = {};
    for (int64_t v = 0; v < rule.vectors; ++v) {
        const vf fall = x.fall[mine + v], sine = x.sine[mine + v];
        vf energy = {}, by_fall = load(scalars(rule.beyond) + v * W + (second ? 1 : 0)), by_sine = {};
        for (int64_t j = 0; j < rule.count; ++j) {
            const float theirs = scalars(x.fall)[other + j], their_sine = scalars(x.sine)[other + j];
            const vf close = load(near + v * W - j + shift), opposite = load(far + v * W - j + shift);
            const vf drop = fall - theirs, minus = sine - their_sine, plus = sine + their_sine;
            const vf both = (close + opposite) * drop, apart = close * minus, mirrored = opposite * plus;
            if constexpr (VALUE) energy += both * drop + (apart * minus + mirrored * plus);
            if constexpr (SLOPE) by_fall += both, by_sine += apart + mirrored;
        }
        if constexpr (VALUE) total += energy;
        if constexpr (SLOPE) {
            x.slope[mine + v] = 2.f * (by_fall * sine + by_sine * (1.f - fall));
            x.size += absolute(by_fall) + absolute(by_sine);
        }
    }
    return total;
}

// The energy of all points, and its derivative by psi at each.
template <bool SLOPE>
float interact(Points& x) {
    x.size = vf{};
    vf total = interact<true, SLOPE>(x, true);
    if constexpr (SLOPE) interact<false, true>(x, false);
    const Rule& rule = *x.rule;
    for (int64_t v = 0; v < rule.vectors; ++v) {
        const float* beyond = scalars(rule.beyond) + v * W;
        total += 2.f * (x.fall[v] * load(beyond) + x.fall[rule.vectors + v] * load(beyond + 1));
    }
    return sum_lanes(total);
}

// Derivatives by the states of one side: d psi / dx = +-2 s r / (s^2 + r^2), x = -log r. Returns the largest of them, and
// in `error` the largest that rounding may have added.
inline float write_slopes(const Points& x, const SortedPoles& p, const vf* r, const int32_t* order, bool soft, double factor,
                          float size, float* error, float* out) {
    const float *s = scalars(x.s), *square = scalars(x.square), *slope = scalars(x.slope);
    vf largest = {}, rounding = {};
    for (int64_t v = 0; v < p.vectors; ++v) {
        const vf pole = r[v], pole_square = pole * pole;
        vf sum = {};
        for (int64_t j = 0; j < 2 * x.rule->count; ++j) sum += (slope[j] * s[j]) * reciprocal(pole_square + square[j]);
        p.spare[v] = by_state(static_cast<float>(2 * factor) * pole * sum, pole, soft);
        largest = at_least(largest, absolute(p.spare[v])), rounding = at_least(rounding, by_state(splat(size), pole, soft));
    }
    for (int64_t i = 0; i < p.n; ++i) out[order[i]] = scalars(p.spare)[i];
    *error = ROUNDING * static_cast<float>(std::fabs(factor)) * most(rounding);
    return most(largest);
}

// One token: its poles, the points of its quadrature, and the way to its results.
struct Token {
    SortedPoles poles;
    Points points;
    int64_t state = 0;     // of its first state
    bool slopes = false;  // some are wanted
    bool inside = false;  // every pole is in the unit interval
    float energy = 0;     // sum sin^2 is ENERGY times this

    template <class R>
    void read(const Distance& f, int64_t token) {
        state = token * f.poles, slopes = f.to_old.a || f.to_new.a;
        poles.read(f.old_states.a + state, f.new_states.a + state, f.poles, f.soft);
        const Grid grid = grid_for(poles);
        inside = grid.count != 0;
        if (!inside) return;
        points.place(Rules<R>::of_thread().at(grid), grid.first);
        phases(poles, points);
        energy = slopes ? interact<true>(points) : interact<false>(points);
    }

    // The value, and the derivatives from those by psi in `points.slope`, times `factor`. Not sure outside, and where
    // poles so near to +-1 that a tiny x is much of them have gradients that rounding hides.
    void write(const Distance& f, double value, double factor, bool sure) const {
        const int64_t token = state / f.poles;
        f.value[token] = static_cast<float>(value);
        if (inside && f.to_old.a) sure &= write_side(f, poles.old_r, poles.old_order, factor, f.to_old.a + state);
        if (inside && f.to_new.a) sure &= write_side(f, poles.new_r, poles.new_order, -factor, f.to_new.a + state);
        f.sure[token] = inside && sure;
    }

  private:
    bool write_side(const Distance& f, const vf* r, const int32_t* order, double factor, float* out) const {
        float error;
        const float size = sum_lanes(points.size);
        const float largest = write_slopes(points, poles, r, order, f.soft, factor, size, &error, out);
        return f.soft || !(error > BEARABLE * largest);
    }
};

}  // namespace
}  // namespace INFSSM_ISA
}  // namespace infssm
