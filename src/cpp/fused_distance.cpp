// Distances between old and new states from raw (a, c): soft-normalisation, value and derivatives in one pass.
//
// Old poles a and rows c, new poles b and rows d, all after soft-normalisation. The kernels k(x, y) = 1 / (1 - x y)^2
// and 1 / (1 - x y) are the only expensive part; lanes run over the states of one side, a loop over those of the other.
#include "kernels.h"
#include "memory.h"

namespace infssm {
namespace INFSSM_ISA {
namespace {

template <class V>
struct LaneOf;
template <>
struct LaneOf<vf> {
    using type = float;
};
template <>
struct LaneOf<vd> {
    using type = double;
};

// One side of a comparison in float or double vectors; unused lanes are 0 and contribute nothing.
template <class V>
struct Side {
    V *pole, *row, *weight;  // a, c, c^2
    V *q, *r;                // per state: sum over the other side of weight / (1 - x y)^2, and its slope in the pole
    V *own_q, *own_r;        // the same against itself
};

// q and r of each state of `mine` against `other`; returns the sum over mine of weight * q.
template <bool SLOPE, class V>
auto overlap(const Side<V>& other, const Side<V>& mine, int64_t n, V* q, V* r) {
    using T = typename LaneOf<V>::type;
    const T *poles = reinterpret_cast<const T*>(other.pole), *weights = reinterpret_cast<const T*>(other.weight);
    constexpr int64_t lanes = sizeof(V) / sizeof(T);
    V sum = {};
    for (int64_t v = 0; v * lanes < n; ++v) {
        const V x = mine.pole[v];
        V value = {}, slope = {};
        for (int64_t i = 0; i < n; ++i) {
            const V inverse = reciprocal(T(1) - poles[i] * x);
            const V term = weights[i] * inverse * inverse;
            value += term;
            if constexpr (SLOPE) slope += term * (inverse * (T(2) * poles[i]));
        }
        q[v] = value;
        if constexpr (SLOPE) r[v] = slope;
        sum += mine.weight[v] * value;
    }
    return sum_lanes(sum);
}
template <class V>
INFSSM_INLINE auto overlap(bool slope, const Side<V>& other, const Side<V>& mine, int64_t n, V* q, V* r) {
    return slope ? overlap<true>(other, mine, n, q, r) : overlap<false>(other, mine, n, q, r);
}

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

// tanh(x/2) - tanh(y/2) = tanh((x-y)/2) (1 - tanh(x/2) tanh(y/2)): no cancellation for x near y.
INFSSM_INLINE void normalise(const float* old_raw, const float* new_raw, int64_t count, int64_t n, vf* old_value,
                             vf* new_value, vf* gap) {
    for (int64_t v = 0; v * W < n; ++v) {
        const int64_t rest = n - v * W;
        const int lanes = rest < W ? static_cast<int>(rest) : W;
        // A scalar transition repeats its one pole.
        const vf x = count == 1 ? splat(old_raw[0], lanes) : load(old_raw + v * W, lanes);
        const vf y = count == 1 ? splat(new_raw[0], lanes) : load(new_raw + v * W, lanes);
        const vf p = soft_normalize(x), s = soft_normalize(y);
        old_value[v] = p;
        new_value[v] = s;
        gap[v] = soft_normalize(x - y) * (1.f - p * s);
    }
}

// derivative of the soft-normalised value -> derivative of the raw one; a scalar transition adds up.
INFSSM_INLINE void write_derivative(const vf* derivative, const vf* value, int64_t count, int64_t n, float* out) {
    if (!out) return;
    vf sum = {};
    for (int64_t v = 0; v * W < n; ++v) {
        const vf raw = derivative[v] * (0.5f - 0.5f * value[v] * value[v]);
        const int64_t rest = n - v * W;
        const int lanes = rest < W ? static_cast<int>(rest) : W;
        if (count == 1) sum += raw * splat(1.f, lanes);
        else store(out + v * W, raw, lanes);
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

float trace(const Side<vf>& side, int64_t vectors) {  // tr G = sum c^2 / (1 - a^2)
    vf sum = {};
    for (int64_t v = 0; v < vectors; ++v) sum += side.weight[v] * reciprocal(1.f - side.pole[v] * side.pole[v]);
    return sum_lanes(sum);
}

// d(1 - S / (T T')) for one side, whose trace is `own`; ratio = S / (T T').
void simplified_slopes(const Side<vf>& side, int64_t vectors, float traces, float own, float ratio, vf* da, vf* dc) {
    for (int64_t v = 0; v < vectors; ++v) {
        const vf pole = side.pole[v], inverse = reciprocal(1.f - pole * pole);
        const vf by_weight = (ratio / own) * inverse - side.q[v] / traces;
        dc[v] = 2.f * side.row[v] * by_weight;
        da[v] = side.weight[v] * ((2.f * ratio / own) * pole * inverse * inverse - side.r[v] / traces);
    }
}

void simplified(const Distance& f, Token& t, float* value, Outputs to_old, Outputs to_new) {
    for (int64_t v = 0; v < t.vectors; ++v) {
        t.old_side.weight[v] = t.c[v] * t.c[v];
        t.new_side.weight[v] = t.d[v] * t.d[v];
    }
    const bool close = all_close(t);
    const float own_old = trace(t.old_side, t.vectors), own_new = trace(t.new_side, t.vectors);
    const float traces = own_old * own_new;
    const float ratio = overlap(to_new.a, t.old_side, t.new_side, t.n, t.new_side.q, t.new_side.r) / traces;
    *value = close ? 0.f : 1.f - ratio;
    if (to_old.a) overlap<true>(t.new_side, t.old_side, t.n, t.old_side.q, t.old_side.r);
    const auto write = [&](const Side<vf>& side, float own, Outputs to) {
        if (!to.a) return;
        simplified_slopes(side, t.vectors, traces, own, ratio, t.da, t.dc);
        if (close) memset(t.da, 0, 2 * t.vectors * sizeof(vf));
        write_derivative(t.da, side.pole, f.poles, t.n, to.a);
        write_derivative(t.dc, side.row, f.n, t.n, to.c);
    };
    write(t.old_side, own_old, to_old);
    write(t.new_side, own_new, to_new);
}

// Old and new in double precision, the new ones as old minus gap, so that tiny gaps survive.
void widen(const Token& t) {
    const auto as_double = [](vd* v) { return reinterpret_cast<double*>(v); };
    const auto as_float = [](const vf* v) { return reinterpret_cast<const float*>(v); };
    double *a = as_double(t.old_wide.pole), *c = as_double(t.old_wide.row), *old_weight = as_double(t.old_wide.weight);
    double *b = as_double(t.new_wide.pole), *d = as_double(t.new_wide.row), *new_weight = as_double(t.new_wide.weight);
    for (int64_t i = 0; i < t.vectors * W; ++i) {
        a[i] = as_float(t.a)[i], c[i] = as_float(t.c)[i];
        b[i] = a[i] - as_float(t.gap_a)[i], d[i] = c[i] - as_float(t.gap_c)[i];
        old_weight[i] = c[i] * c[i], new_weight[i] = d[i] * d[i];
    }
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
    const double own_old = overlap(to_old.a, past, past, t.n, past.own_q, past.own_r);
    const double own_new = overlap(to_new.a, now, now, t.n, now.own_q, now.own_r);
    const double cross = overlap(to_new.a, past, now, t.n, now.q, now.r);
    if (to_old.a) overlap<true>(now, past, t.n, past.q, past.r);
    const double scale = 1.0 / __builtin_sqrt(own_old * own_new), cosine = cross * scale;
    *value = static_cast<float>(1.0 - cosine);
    const auto write = [&](const Side<vd>& side, const Side<vf>& values, double own, Outputs to) {
        if (!to.a) return;
        aligned_slopes(side, t.vectors, scale, own, cosine, t.da, t.dc);
        write_derivative(t.da, values.pole, f.poles, t.n, to.a);
        write_derivative(t.dc, values.row, f.n, t.n, to.c);
    };
    write(past, t.old_side, own_old, to_old);
    write(now, t.new_side, own_new, to_new);
}

// sum_ij log1p(gap_i gap_j / ((1 - a_i a_j)(1 - b_i b_j))), the pairs i < j once and doubled.
float martin_value(const Token& t) {
    const auto as_float = [](const vf* v) { return reinterpret_cast<const float*>(v); };
    const float *a = as_float(t.a), *b = as_float(t.b), *gap = as_float(t.gap_a);
    vi beyond = {};
    vf sum = {};
    for (int64_t i = 0; i < t.n; ++i) {
        vf times;  // 0 before the diagonal, 1 on it, 2 after
        for (int lane = 0; lane < W; ++lane) times[lane] = lane < i % W ? 0.f : lane == i % W ? 1.f : 2.f;
        vf row = {};
        for (int64_t v = i / W; v < t.vectors; ++v) {
            const vf product = gap[i] * t.gap_a[v];
            const vf base = (1.f - a[i] * t.a[v]) * (1.f - b[i] * t.b[v]);
            // log1p(x) = 2 atanh(x / (2 + x)), with x = product / base in one division.
            const vf s = product * reciprocal(2.f * base + product), square = s * s;
            vf series = splat(2.f / 9);
            series = series * square + 2.f / 7;
            series = series * square + 2.f / 5;
            series = series * square + 2.f / 3;
            series = series * square + 2.f;
            row += series * s * times;
            beyond |= ~(absolute(s) <= splat(0.2f));
            times = splat(2.f);
        }
        sum += row;
    }
    if (!any(beyond)) return sum_lanes(sum);
    double exact = 0;  // far apart (or NaN): outside the series
    for (int64_t i = 0; i < t.n; ++i)
        for (int64_t j = 0; j < t.n; ++j)
            exact += __builtin_log1p(double(gap[i]) * gap[j] / ((1.0 - double(a[i]) * a[j]) * (1.0 - double(b[i]) * b[j])));
    return static_cast<float>(exact);
}

// 2 sum_i gap_i / ((1 - a_i x)(1 - b_i x)) at each pole x of one side; the derivative, up to its sign.
void martin_slopes(const Token& t, const vf* poles, float sign, vf* out) {
    const auto as_float = [](const vf* v) { return reinterpret_cast<const float*>(v); };
    const float *a = as_float(t.a), *b = as_float(t.b), *gap = as_float(t.gap_a);
    for (int64_t v = 0; v < t.vectors; ++v) {
        const vf x = poles[v];
        vf sum = {};
        for (int64_t i = 0; i < t.n; ++i) sum += gap[i] * reciprocal((1.f - a[i] * x) * (1.f - b[i] * x));
        out[v] = (2.f * sign) * sum;
    }
}

void martin(const Distance& f, Token& t, float* value, Outputs to_old, Outputs to_new) {
    *value = martin_value(t);
    const auto write = [&](const vf* poles, float sign, Outputs to) {
        if (!to.a) return;
        martin_slopes(t, poles, sign, t.da);
        write_derivative(t.da, poles, f.poles, t.n, to.a);
        memset(to.c, 0, f.n * sizeof(float));
    };
    write(t.a, 1.f, to_old);
    write(t.b, -1.f, to_new);
}

}  // namespace

void distance(const Distance& f) {
    // Martin sees the poles alone, so a scalar transition is one state; the others see its pole n times.
    const int64_t n = f.kind == Kind::martin ? f.poles : f.n;
    const auto kernel = f.kind == Kind::simplified ? simplified : f.kind == Kind::aligned ? aligned : martin;
    const int64_t each = ceil_div(Token::floats(n), W);
    const Buffer memory(each * W * f.threads);
#pragma omp parallel num_threads(f.threads)
    {
        const FlushToZero flush;
        Token t(memory.vectors() + thread_index() * each, n);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < f.tokens; ++i) {
            normalise(f.old_a + i * f.poles, f.new_a + i * f.poles, f.poles, n, t.a, t.b, t.gap_a);
            if (f.kind != Kind::martin) normalise(f.old_c + i * f.n, f.new_c + i * f.n, f.n, n, t.c, t.d, t.gap_c);
            kernel(f, t, f.value + i, {f.d_old_a, f.d_old_c, i, f}, {f.d_new_a, f.d_new_c, i, f});
        }
    }
}

}  // namespace INFSSM_ISA
}  // namespace infssm
