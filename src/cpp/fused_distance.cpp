// Distances between old and new states (a, c): soft-normalisation where asked, value and derivatives in one pass.
//
// Old poles a and rows c, new poles b and rows d, all normalised. The reciprocals 1 / (1 - x y) are the only expensive
// part; lanes run over the states of one side, a loop over those of the other.
#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "memory.h"
#include "states.h"

namespace infssm {
namespace INFSSM_ISA {
namespace {

// One side of a comparison in float or double vectors; unused lanes are 0 and contribute nothing.
template <class V>
struct Side {
    V *pole, *row, *weight;  // a, c, and c^2 or what stands for it
    V *q, *r;                // per state: a sum over the other side, and its slope in the pole
    V *own_q, *own_r;        // the same against itself
};

// The states of one token after soft-normalisation, and scratch for what is computed from them.
struct Token {
    int64_t n, vectors;
    vf *a, *c, *b, *d, *gap_a, *gap_c;  // old, new, and old - new with full relative precision
    vf *da, *dc;                        // derivatives of one side
    Side<vf> old_side, new_side;
    Side<vd> old_wide, new_wide;

    static int64_t floats(int64_t n) { return round_up(n, W) * (8 + 2 * 5 + 2 * 2 * 7); }
    Token(vf* memory, int64_t states) : n(states), vectors(ceil_div(states, W)) {
        const auto take = [&] { return memory += vectors, memory - vectors; };
        const auto wide = [&] { return memory += 2 * vectors, reinterpret_cast<vd*>(memory - 2 * vectors); };
        a = take(), c = take(), b = take(), d = take(), gap_a = take(), gap_c = take(), da = take(), dc = take();
        old_side = {a, c, take(), take(), take(), take(), take()};
        new_side = {b, d, take(), take(), take(), take(), take()};
        old_wide = {wide(), wide(), wide(), wide(), wide(), wide(), wide()};
        new_wide = {wide(), wide(), wide(), wide(), wide(), wide(), wide()};
    }
};

// Derivatives by the values -> by the states; those of a scalar transition add up.
INFSSM_INLINE void write_derivative(const vf* derivative, const vf* value, int64_t count, int64_t n, bool raw,
                                    float* out) {
    if (!out) return;
    vf sum = {};
    for (int64_t v = 0; v * W < n; ++v) {
        const vf slope = through(derivative[v], value[v], raw);
        const int lanes = lanes_of(n, v);
        if (count == 1) sum += slope * splat(1.f, lanes);
        else store(out + v * W, slope, lanes);
    }
    if (count == 1) out[0] = sum_lanes(sum);
}

// Where the derivatives of one token's value go; null where they are not wanted.
struct Outputs {
    float *a, *c;

    Outputs(float* da, float* dc, int64_t index, const Distance& f)
        : a(da ? da + index * f.poles : nullptr), c(dc ? dc + index * f.n : nullptr) {}
};

// torch.allclose's rule for the soft-normalised states of the token.
INFSSM_INLINE bool all_close(const Token& t) {
    vi apart = {};
    for (int64_t v = 0; v < t.vectors; ++v) {
        apart |= ~(absolute(t.a[v] - t.b[v]) <= 1e-8f + 1e-5f * absolute(t.b[v]));
        apart |= ~(absolute(t.c[v] - t.d[v]) <= 1e-8f + 1e-5f * absolute(t.d[v]));
    }
    return !any(apart);
}

// Masses p = c^2 / (1 - a^2), the diagonal of the Gram matrix, in `weight`; returns their sum, and 1 in place of 0: a
// system whose c is all zero has nothing to compare.
float weigh(const Side<vf>& side, int64_t vectors) {
    vf sum = {};
    for (int64_t v = 0; v < vectors; ++v) {
        side.weight[v] = side.row[v] * side.row[v] * reciprocal((1.f - side.pole[v]) * (1.f + side.pole[v]));
        sum += side.weight[v];
    }
    const float total = sum_lanes(sum);
    return total == 0.f ? 1.f : total;
}

// For each pole x of `mine`, q = sum_i p_i g_i^2 with g_i = (a_i - x) / (1 - a_i x) over the other side, and its slope
// in x times 1 - x^2, from dg/dx = -(1 - g^2) / (1 - x^2); returns the sum over mine of mass * q. The paper's 1 - ratio
// is that over the traces, without cancellation.
template <bool SLOPE>
float spread(const Side<vf>& other, const Side<vf>& mine, int64_t n) {
    const float *poles = scalars(other.pole), *masses = scalars(other.weight);
    vf sum = {};
    for (int64_t v = 0; v * W < n; ++v) {
        const vf x = mine.pole[v];
        vf value = {}, slope = {};
        for (int64_t i = 0; i < n; ++i) {
            const vf gap = (poles[i] - x) * reciprocal(1.f - poles[i] * x), first = masses[i] * gap, second = first * gap;
            value += second;
            if constexpr (SLOPE) slope += first - second * gap;
        }
        mine.q[v] = value;
        if constexpr (SLOPE) mine.r[v] = -2.f * slope;
        sum += mine.weight[v] * value;
    }
    return sum_lanes(sum);
}

// Derivatives for one side, the sum of whose masses is `own`, and that of the other side's `other`.
void simplified_slopes(const Side<vf>& side, int64_t vectors, float own, float other, float value, vf* da, vf* dc) {
    const float by_own = 1 / own, by_both = by_own / other, rest = value * by_own;
    for (int64_t v = 0; v < vectors; ++v) {
        const vf pole = side.pole[v], inverse = reciprocal((1.f - pole) * (1.f + pole));
        const vf by_mass = side.q[v] * by_both - rest;
        dc[v] = 2.f * side.row[v] * inverse * by_mass;
        da[v] = side.weight[v] * inverse * (side.r[v] * by_both + 2.f * pole * by_mass);
    }
}

void simplified(const Distance& f, Token& t, float* value, Outputs to_old, Outputs to_new) {
    const bool close = all_close(t);
    const float own_old = weigh(t.old_side, t.vectors), own_new = weigh(t.new_side, t.vectors);
    const float sum = to_new.a ? spread<true>(t.old_side, t.new_side, t.n) : spread<false>(t.old_side, t.new_side, t.n);
    const float distance = sum / (own_old * own_new);
    *value = close ? 0.f : distance;
    if (to_old.a) spread<true>(t.new_side, t.old_side, t.n);
    const auto write = [&](const Side<vf>& side, float own, float other, Outputs to) {
        if (!to.a) return;
        simplified_slopes(side, t.vectors, own, other, distance, t.da, t.dc);
        if (close) memset(t.da, 0, 2 * t.vectors * sizeof(vf));
        write_derivative(t.da, side.pole, f.poles, t.n, f.raw, to.a);
        write_derivative(t.dc, side.row, f.n, t.n, f.raw, to.c);
    };
    write(t.old_side, own_old, own_new, to_old);
    write(t.new_side, own_new, own_old, to_new);
}

// Old and new in double precision, the new ones as old minus gap, so that tiny gaps survive.
void widen(const Token& t) {
    const auto as_double = [](vd* v) { return reinterpret_cast<double*>(v); };
    double *a = as_double(t.old_wide.pole), *c = as_double(t.old_wide.row), *old_weight = as_double(t.old_wide.weight);
    double *b = as_double(t.new_wide.pole), *d = as_double(t.new_wide.row), *new_weight = as_double(t.new_wide.weight);
    for (int64_t i = 0; i < t.vectors * W; ++i) {
        a[i] = scalars(t.a)[i], c[i] = scalars(t.c)[i];
        b[i] = a[i] - scalars(t.gap_a)[i], d[i] = c[i] - scalars(t.gap_c)[i];
        old_weight[i] = c[i] * c[i], new_weight[i] = d[i] * d[i];
    }
}

// For each state of `mine`, q = sum_i weight_i / (1 - a_i x)^2 over the other side, and r, its slope in the pole x;
// returns the sum over mine of weight * q.
template <bool SLOPE>
double overlap(const Side<vd>& other, const Side<vd>& mine, int64_t n, vd* q, vd* r) {
    const double *poles = reinterpret_cast<double*>(other.pole), *weights = reinterpret_cast<double*>(other.weight);
    vd sum = {};
    for (int64_t v = 0; v * WD < round_up(n, W); ++v) {  // unused lanes too, which are read again
        const vd x = mine.pole[v];
        vd value = {}, slope = {};
        for (int64_t i = 0; i < n; ++i) {
            const vd inverse = reciprocal(1.0 - poles[i] * x);
            const vd term = weights[i] * inverse * inverse;
            value += term;
            if constexpr (SLOPE) slope += term * (inverse * (2.0 * poles[i]));
        }
        q[v] = value;
        if constexpr (SLOPE) r[v] = slope;
        sum += mine.weight[v] * value;
    }
    return sum_lanes(sum);
}
double overlap(bool slope, const Side<vd>& other, const Side<vd>& mine, int64_t n, vd* q, vd* r) {
    return slope ? overlap<true>(other, mine, n, q, r) : overlap<false>(other, mine, n, q, r);
}

// The overlap of a side with itself: the pairs on and after the diagonal's vectors once, those after them doubled.
double self_overlap(const Side<vd>& side, int64_t n) {
    const double *poles = reinterpret_cast<double*>(side.pole), *weights = reinterpret_cast<double*>(side.weight);
    vd sum = {};
    for (int64_t v = 0; v * WD < n; ++v) {
        const vd x = side.pole[v];
        vd value = {};
        const auto add = [&](int64_t i, double times) {
            const vd inverse = reciprocal(1.0 - poles[i] * x);
            value += (times * weights[i]) * inverse * inverse;
        };
        for (int64_t i = 0; i < v * WD; ++i) add(i, 2.0);
        for (int64_t i = v * WD; i < (v + 1) * WD; ++i) add(i, 1.0);  // lanes beyond n weigh 0
        sum += side.weight[v] * value;
    }
    return sum_lanes(sum);
}
double self_overlap(bool slope, const Side<vd>& side, int64_t n) {
    return slope ? overlap<true>(side, side, n, side.own_q, side.own_r) : self_overlap(side, n);
}

bool equal(const Token& t) {
    vi apart = {};
    for (int64_t v = 0; v < t.vectors; ++v) apart |= (t.gap_a[v] != vf{}) | (t.gap_c[v] != vf{});
    return !any(apart);
}

// d(1 - S12 / sqrt(S11 S22)) for one side, whose own Gram has the squared norm `own`; scale = 1 / sqrt(S11 S22).
void aligned_slopes(const Side<vd>& side, int64_t vectors, double scale, double own, double cosine, vf* da, vf* dc) {
    float *by_pole = reinterpret_cast<float*>(da), *by_row = reinterpret_cast<float*>(dc);
    for (int64_t v = 0; v < 2 * vectors; ++v) {
        const vd pole = side.weight[v] * ((cosine / own) * side.own_r[v] - scale * side.r[v]);
        const vd row = 2.0 * side.row[v] * ((cosine / own) * side.own_q[v] - scale * side.q[v]);
        for (int i = 0; i < WD; ++i) {
            by_pole[v * WD + i] = static_cast<float>(pole[i]);
            by_row[v * WD + i] = static_cast<float>(row[i]);
        }
    }
}

void aligned(const Distance& f, Token& t, float* value, Outputs to_old, Outputs to_new) {
    widen(t);
    const Side<vd>&past = t.old_wide, &now = t.new_wide;
    const double own_old = self_overlap(to_old.a, past, t.n), own_new = self_overlap(to_new.a, now, t.n);
    const double cross = overlap(to_new.a, past, now, t.n, now.q, now.r);
    if (to_old.a) overlap<true>(now, past, t.n, past.q, past.r);
    const double scale = 1.0 / __builtin_sqrt(own_old * own_new), cosine = cross * scale;
    // Exactly 0 at equality, and where c is all zero.
    const bool none = own_old * own_new == 0 || equal(t);
    *value = none || cosine > 1 ? 0.f : static_cast<float>(1.0 - cosine);
    const auto write = [&](const Side<vd>& side, const Side<vf>& values, double own, Outputs to) {
        if (!to.a) return;
        aligned_slopes(side, t.vectors, scale, own, cosine, t.da, t.dc);
        if (none) memset(t.da, 0, 2 * t.vectors * sizeof(vf));
        write_derivative(t.da, values.pole, f.poles, t.n, f.raw, to.a);
        write_derivative(t.dc, values.row, f.n, t.n, f.raw, to.c);
    };
    write(past, t.old_side, own_old, to_old);
    write(now, t.new_side, own_new, to_new);
}

// Poles in pairs (a_i, b_i) and their gaps; the result does not depend on the pairing, its precision does.
struct Pairs {
    vf *a, *b, *gap;
};

// sum_ij log1p(gap_i gap_j / ((1 - a_i a_j)(1 - b_i b_j))): pairs within a vector of states as they come, those between
// two vectors once and doubled.
double martin_sum(const Pairs& pairs, int64_t n) {
    const float *a = scalars(pairs.a), *b = scalars(pairs.b), *gap = scalars(pairs.gap);
    vi beyond = {};
    vf sum = {};
    for (int64_t v = 0; v * W < n; ++v) {
        const vf x = pairs.a[v], y = pairs.b[v], own = pairs.gap[v];
        const auto add = [&](int64_t first, int64_t last, vf row) {
            for (int64_t i = first; i < last; ++i) {
                const vf product = gap[i] * own, base = (1.f - a[i] * x) * (1.f - b[i] * y);
                // log1p(x) = 2 atanh(x / (2 + x)), with x = product / base in one division.
                const vf s = product * reciprocal(2.f * base + product), square = s * s;
                vf series = splat(2.f / 9);
                series = series * square + 2.f / 7;
                series = series * square + 2.f / 5;
                series = series * square + 2.f / 3;
                series = series * square + 2.f;
                row += series * s;
                beyond |= ~(absolute(s) <= splat(0.2f));
            }
            return row;
        };
        const vf before = add(0, v * W, vf{});
        sum += add(v * W, n < (v + 1) * W ? n : (v + 1) * W, before + before);
    }
    if (!any(beyond)) return sum_lanes(sum);
    double exact = 0;  // far apart (or NaN): outside the series
    for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < n; ++j) {
            const double base = (1.0 - double(a[i]) * a[j]) * (1.0 - double(b[i]) * b[j]);
            exact += __builtin_log1p(double(gap[i]) * gap[j] / base);
        }
    return exact;
}

// About the sum of the terms with i = j, none of which is negative.
float martin_diagonal(const Pairs& pairs, int64_t n) {
    vf sum = {};
    for (int64_t v = 0; v * W < n; ++v) {
        const vf a = pairs.a[v], b = pairs.b[v], gap = pairs.gap[v];
        sum += at_most(splat(1.f), gap * gap * reciprocal((1.f - a * a) * (1.f - b * b)));
    }
    return sum_lanes(sum);
}

// 2 sum_i gap_i / ((1 - a_i x)(1 - b_i x)) at each pole x of one side; the derivative, up to a factor.
void martin_slopes(const Pairs& pairs, int64_t n, const vf* poles, float factor, vf* out) {
    const float *a = scalars(pairs.a), *b = scalars(pairs.b), *gap = scalars(pairs.gap);
    for (int64_t v = 0; v * W < n; ++v) {
        const vf x = poles[v];
        vf sum = {};
        for (int64_t i = 0; i < n; ++i) sum += gap[i] * reciprocal((1.f - a[i] * x) * (1.f - b[i] * x));
        out[v] = (2.f * factor) * sum;
    }
}

// The smallest old pole with the smallest new one, and so on. The rows, which Martin does not see, lend their memory.
Pairs sorted(const Token& t) {
    memcpy(t.c, t.a, t.vectors * sizeof(vf)), memcpy(t.d, t.b, t.vectors * sizeof(vf));
    std::sort(scalars(t.c), scalars(t.c) + t.n), std::sort(scalars(t.d), scalars(t.d) + t.n);
    for (int64_t v = 0; v < t.vectors; ++v) t.gap_c[v] = t.c[v] - t.d[v];
    return {t.c, t.d, t.gap_c};
}

// The distance as a function of Martin's m, and its slope: m, arccos(e^(-m/2))^2 or 1 - e^-m.
void function_of_martin(Kind kind, double m, double& value, double& slope) {
    if (kind == Kind::binet_cauchy) {
        value = -std::expm1(-m), slope = std::exp(-m);
    } else if (kind == Kind::fubini_study) {
        const double angle = 2 * std::asin(std::sqrt(-std::expm1(-m / 2) / 2));
        value = angle * angle, slope = angle == 0 ? 1 : angle / std::tan(angle);
    } else {
        value = m, slope = 1;
    }
}

bool sees_poles_alone(Kind kind) { return kind != Kind::simplified && kind != Kind::aligned; }

void martin(const Distance& f, Token& t, float* value, Outputs to_old, Outputs to_new) {
    Pairs pairs = {t.a, t.b, t.gap_a};
    double sum = martin_sum(pairs, t.n);
    // Terms that cancel: near systems whose poles come in different orders.
    if (sum < 0.01 * martin_diagonal(pairs, t.n)) pairs = sorted(t), sum = martin_sum(pairs, t.n);
    double distance, slope;
    function_of_martin(f.kind, sum < 0 ? 0 : sum, distance, slope);  // keeps a NaN
    *value = static_cast<float>(distance);
    const auto write = [&](const vf* poles, double sign, Outputs to) {
        if (!to.a) return;
        martin_slopes(pairs, t.n, poles, static_cast<float>(sign * slope), t.da);
        write_derivative(t.da, poles, f.poles, t.n, f.raw, to.a);
        memset(to.c, 0, f.n * sizeof(float));
    };
    write(t.a, 1, to_old);
    write(t.b, -1, to_new);
}

}  // namespace

void distance(const Distance& f) {
    // Where only poles are seen a scalar transition is one state; the others see its pole n times.
    const int64_t n = sees_poles_alone(f.kind) ? f.poles : f.n;
    const auto kernel = f.kind == Kind::simplified ? simplified : f.kind == Kind::aligned ? aligned : martin;
    const bool gaps = f.kind != Kind::simplified;
    const int64_t each = ceil_div(Token::floats(n), W);
    const Buffer memory(each * W * f.threads);
#pragma omp parallel num_threads(f.threads)
    {
        const FlushToZero flush;
        Token t(memory.vectors() + thread_index() * each, n);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < f.tokens; ++i) {
            read_states(f.old_a + i * f.poles, f.new_a + i * f.poles, f.poles, n, f.raw, t.a, t.b,
                        gaps ? t.gap_a : nullptr);
            if (!sees_poles_alone(f.kind))
                read_states(f.old_c + i * f.n, f.new_c + i * f.n, f.n, n, f.raw, t.c, t.d, gaps ? t.gap_c : nullptr);
            kernel(f, t, f.value + i, {f.d_old_a, f.d_old_c, i, f}, {f.d_new_a, f.d_new_c, i, f});
        }
    }
}

}  // namespace INFSSM_ISA
}  // namespace infssm
