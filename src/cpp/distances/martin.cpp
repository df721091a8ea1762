// Martin's distance -log prod cos^2 of the principal angles, and the two that are functions of it: Fubini-Study and
// Binet-Cauchy (docs/maths.md, eq. 13 and 14).
#include <algorithm>

#include "pair.h"

namespace infssm {
namespace INFSSM_ISA {
namespace {

struct Token {
    Poles poles, sorted;       // as given, and in rising order
    vf *old_state, *new_state;  // scratch for sorting

    static constexpr int ARRAYS = 2 * 3 + 2;
    Token(Arrays arrays, const Distance&)
        : poles(arrays.poles()), sorted(arrays.poles()), old_state(arrays.take()), new_state(arrays.take()) {}
};

// sum_ij log1p(shift_i shift_j / ((r_i + r_j)(s_i + s_j))): pairs within a vector of states as they come, those between
// two vectors once and doubled.
double sum(const Poles& pairs, int64_t n) {
    const float *r = scalars(pairs.r), *s = scalars(pairs.s), *shift = scalars(pairs.shift);
    vi beyond = {};
    vf total = {};
    for (int64_t v = 0; v * W < n; ++v) {
        const vf x = pairs.r[v], y = pairs.s[v], own = pairs.shift[v];
        const auto add = [&](int64_t first, int64_t last, vf row) {
            for (int64_t i = first; i < last; ++i) {
                const vf product = shift[i] * own, base = (r[i] + x) * (s[i] + y);
                // log1p(x) = 2 atanh(x / (2 + x)), with x = product / base in one division.
                const vf t = product * reciprocal(2.f * base + product), square = t * t;
                vf series = splat(2.f / 9);
                series = series * square + 2.f / 7;
                series = series * square + 2.f / 5;
                series = series * square + 2.f / 3;
                series = series * square + 2.f;
                row += series * t;
                beyond |= ~(absolute(t) <= splat(0.2f));
            }
            return row;
        };
        const vf before = add(0, v * W, vf{});
        total += add(v * W, n < (v + 1) * W ? n : (v + 1) * W, before + before);
    }
    if (!any(beyond)) return sum_lanes(total);
    double exact = 0;  // far apart (or NaN): outside the series
    for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < n; ++j) {
            const double base = (double(r[i]) + r[j]) * (double(s[i]) + s[j]);
            exact += std::log1p(double(shift[i]) * shift[j] / base);
        }
    return exact;
}

// About the sum of the terms with i = j, none of which is negative.
float diagonal(const Poles& pairs, int64_t n) {
    vf total = {};
    for (int64_t v = 0; v * W < n; ++v) {
        const vf shift = pairs.shift[v];
        total += at_most(splat(1.f), shift * shift * reciprocal(4.f * pairs.r[v] * pairs.s[v]));
    }
    return sum_lanes(total);
}

// Derivatives by the poles x of one side: 2 x sum_i shift_i / ((r_i + x)(s_i + x)), up to a factor.
void write(const Distance& f, const Poles& pairs, const vf* poles, float factor, float* out) {
    const float *r = scalars(pairs.r), *s = scalars(pairs.s), *shift = scalars(pairs.shift);
    for (int64_t v = 0; v * W < f.poles; ++v) {
        const vf x = poles[v];
        vf total = {};
        for (int64_t i = 0; i < f.poles; ++i) total += shift[i] * reciprocal((r[i] + x) * (s[i] + x));
        store(out + v * W, by_state((2.f * factor) * x * total, x, f.soft), lanes_of(f.poles, v));
    }
}

// The smallest old pole with the smallest new one, and so on: no result depends on the pairing, its precision does.
const Poles& sort(const Token& t, const float* old_state, const float* new_state, const Distance& f) {
    float *x = scalars(t.old_state), *y = scalars(t.new_state);
    memcpy(x, old_state, f.poles * sizeof(float)), memcpy(y, new_state, f.poles * sizeof(float));
    std::sort(x, x + f.poles), std::sort(y, y + f.poles);
    t.sorted.read(x, y, f.poles, f.soft);
    return t.sorted;
}

// Value and slope of a distance that is a function of Martin's.
struct Point {
    double value, slope;
};

template <class Function>
void run(const Distance& f, Function function) {
    for_tokens<Token>(f, Token::ARRAYS, [&](Token& t, int64_t i) {
        const Slope to_old(f.to_old, i, f), to_new(f.to_new, i, f);
        const float *old_state = f.old_states.a + i * f.poles, *new_state = f.new_states.a + i * f.poles;
        const bool inside = t.poles.read(old_state, new_state, f.poles, f.soft);
        f.value[i] = 0, f.sure[i] = inside;
        if (!inside) return;
        const Poles* pairs = &t.poles;
        double m = sum(*pairs, f.poles);
        // Terms that cancel: near systems whose poles come in different orders.
        if (m < 0.01 * diagonal(*pairs, f.poles)) pairs = &sort(t, old_state, new_state, f), m = sum(*pairs, f.poles);
        const Point point = function(m < 0 ? 0 : m);
        f.value[i] = static_cast<float>(point.value), f.sure[i] = std::isfinite(f.value[i]);
        if (to_old.a) write(f, *pairs, t.poles.r, static_cast<float>(point.slope), to_old.a);
        if (to_new.a) write(f, *pairs, t.poles.s, static_cast<float>(-point.slope), to_new.a);
    });
}

}  // namespace

void martin(const Distance& f) {
    run(f, [](double m) -> Point { return {m, 1}; });
}

void fubini_study(const Distance& f) {  // arccos(e^(-m/2))^2
    run(f, [](double m) -> Point {
        const double angle = 2 * std::asin(std::sqrt(-std::expm1(-m / 2) / 2));
        return {angle * angle, angle == 0 ? 1 : angle * std::exp(-m / 2) / std::sin(angle)};
    });
}

void binet_cauchy(const Distance& f) {  // 1 - e^-m
    run(f, [](double m) -> Point { return {-std::expm1(-m), std::exp(-m)}; });
}

}  // namespace INFSSM_ISA
}  // namespace infssm
