// Sums over pairs of poles of a kernel of x - y, as integrals over frequencies (docs/reference/maths.md, section 6).
//
// With x = -log r the kernels 1 / (1 - a b) and 1 / (1 - a b)^2 are, up to factors of either pole, sech((x - y) / 2) and
// its square, whose spectra fall as e^(-pi w) (eq. 31). So a quadratic form of n^2 pairs is a sum over two or three dozen
// frequencies of |sum_i p_i e^(i w x_i)|^2, and every term of it is positive: small differences of two systems keep
// their precision, because e^(i w x) - e^(i w y) is computed as such.
#pragma once

#include <array>
#include <optional>
#include <utility>

#include "pair.h"

namespace infssm::INFSSM_ISA {
namespace {

enum class Spectrum { sech, sech_squared };

// The terms of an expansion: frequencies or powers, and their weights.
struct Band {
    double step;
    int64_t count, vectors;
    vf *frequency, *weight;  // beyond `count` 0

    // `term(l)` gives the l-th frequency and weight.
    template <class Term>
    Band(double turn, int64_t terms, Term term) : step(turn), count(terms), vectors(ceil_div(terms, W)), memory_(2 * MOST) {
        frequency = memory_.vectors(), weight = frequency + MOST / W;
        for (int64_t l = 0; l < MOST; ++l) {
            const std::pair<double, double> found = l < count ? term(l) : std::pair(0.0, 0.0);
            scalars(frequency)[l] = static_cast<float>(found.first), scalars(weight)[l] = static_cast<float>(found.second);
        }
    }

    static constexpr int64_t MOST = 96;  // frequencies of the widest span, in whole vectors

    // Frequencies step (l + 1/2) for poles within a span of x, kept by the thread; spans are rounded up to an even number,
    // at most 2 log LARGEST. The midpoint rule repeats the kernel at distances of 2 pi / step, which is chosen so that
    // repetition and cut-off add about e^-18.
    static const Band& of(Spectrum kind, float span) {
        static thread_local std::optional<Band> kept[2][29];
        const int half = static_cast<int>(std::ceil(span / 2));
        const bool sech = kind == Spectrum::sech;
        std::optional<Band>& band = kept[sech][half];
        if (band) return *band;
        const double step = 2 * PI / (2.0 * half + (sech ? 38 : 20)), last = sech ? 5.8 : 7.0;
        return band.emplace(step, static_cast<int64_t>(last / step) + 1, [&](int64_t l) {
            const double w = step * (l + 0.5);
            return std::pair(w, 2 * step * (sech ? 1 / std::cosh(PI * w) : 2 * w / std::sinh(PI * w)));
        });
    }

  private:
    Buffer memory_;
};

// What the kernels have beside their expansion: for sech, a factor of each pole (cosh(x / 2) = 1 / sqrt(1 - a^2) in that
// over frequencies), its slope in x, and new - old with its own precision; for sech^2, the square of the factor.
struct Factors {
    vf *old_value, *new_value, *gap, *old_slope, *new_slope;

    static constexpr int ARRAYS = 5;
    explicit Factors(Arrays& arrays)
        : old_value(arrays.take()),
          new_value(arrays.take()),
          gap(arrays.take()),
          old_slope(arrays.take()),
          new_slope(arrays.take()) {}
};

struct Complex {
    vf re, im;

    Complex times(const Complex& other) const {
        return {re * other.re - im * other.im, re * other.im + im * other.re};
    }
};

// Sine and cosine on [-pi/2, pi/2]; the sine with full relative precision near 0.
INFSSM_INLINE Complex turn(vf angle) {
    const vf z = angle * angle;
    vf s = splat(-2.5052108e-8f);
    for (const float term : {2.7557319e-6f, -1.9841270e-4f, 8.3333333e-3f, -1.6666667e-1f, 1.f}) s = s * z + term;
    vf c = splat(2.0876757e-9f);
    for (const float term : {-2.7557319e-7f, 2.4801587e-5f, -1.3888889e-3f, 4.1666667e-2f, -0.5f, 1.f}) c = c * z + term;
    return {c, s * angle};
}

// e^(2 i t) and e^(2 i t) - 1 from e^(i t).
INFSSM_INLINE Complex twice_less_1(const Complex& e) { return {-2.f * e.im * e.im, 2.f * e.re * e.im}; }
INFSSM_INLINE Complex plus_1(Complex e) { return {1.f + e.re, e.im}; }

// log x of positive finite numbers.
INFSSM_INLINE vf log_positive(vf x) {
    const vi bits = (vi)x, exponent = (bits - 0x3f3504f3) >> 23;  // leaves a mantissa in [sqrt(1/2), sqrt(2))
    const vf mantissa = (vf)(bits - (exponent << 23)), t = (mantissa - 1.f) / (mantissa + 1.f), z = t * t;
    vf p = splat(2.f / 9);
    for (const float term : {2.f / 7, 2.f / 5, 2.f / 3, 2.f}) p = p * z + term;
    return __builtin_convertvector(exponent, vf) * 0.69314718f + p * t;
}

// The poles as phases: how e^(i w x) starts (at half a step of the frequency) and turns by a step.
struct Waves {
    vf *old_x, *new_x, *gap;          // x, y about the middle of both, and x - y with its own precision
    Complex *start, *step;            // of e^(i w y)
    Complex *gap_start, *gap_step;    // of e^(i w (x - y)) - 1

    static constexpr int ARRAYS = 3 + 4 * 2;
    explicit Waves(Arrays& arrays) : old_x(arrays.take()), new_x(arrays.take()), gap(arrays.take()) {
        const auto pairs = [&] {
            vf* first = arrays.take();
            arrays.take();
            return reinterpret_cast<Complex*>(first);
        };
        start = pairs(), step = pairs(), gap_start = pairs(), gap_step = pairs();
    }

    // All poles inside.
    const Band& read(Spectrum kind, const Poles& poles, const float* old_state, const float* new_state, int64_t n, bool soft,
                     const Factors& factors) const {
        vf low = splat(__builtin_inff()), high = -low;
        for (int64_t v = 0; v * W < n; ++v) {
            const int lanes = lanes_of(n, v);
            vf x, y;
            if (soft) {
                x = load(old_state + v * W, lanes), y = load(new_state + v * W, lanes);
                gap[v] = x - y;
            } else {
                x = -log_positive(poles.r[v]), y = -log_positive(poles.s[v]);
                const vf t = poles.shift[v] / (poles.r[v] + poles.s[v]), z = t * t;  // tanh of half the gap
                vf p = splat(2.f / 11);
                for (const float term : {2.f / 9, 2.f / 7, 2.f / 5, 2.f / 3, 2.f}) p = p * z + term;
                gap[v] = absolute(t) < splat(0.25f) ? p * t : x - y;
            }
            old_x[v] = x, new_x[v] = y;  // lanes without a pole hold 0, which may widen the span but never break it
            low = at_most(low, at_most(x, y)), high = at_least(high, at_least(x, y));
        }
        const float least = -most(-low), largest = most(high), middle = 0.5f * (least + largest);
        const Band& band = Band::of(kind, largest - least);
        for (int64_t v = 0; v * W < n; ++v) {
            old_x[v] -= middle, new_x[v] -= middle;
            place(new_x[v], band, start[v], step[v]);
            const Complex quarter = twist(gap[v], band, 0.25f), half = twice_less_1(quarter);
            gap_start[v] = half, gap_step[v] = twice_less_1(plus_1(half));
            const vf root = square_root(poles.r[v]), new_root = square_root(poles.s[v]);
            const vf inverse = 1.f / root, new_inverse = 1.f / new_root;
            factors.old_value[v] = 0.5f * (root + inverse), factors.old_slope[v] = 0.25f * (inverse - root);
            factors.new_value[v] = 0.5f * (new_root + new_inverse), factors.new_slope[v] = 0.25f * (new_inverse - new_root);
            factors.gap[v] = 0.5f * poles.shift[v] / (root + new_root) * (1.f - inverse * new_inverse);
        }
        return band;
    }

    static Complex twist(vf x, const Band& band, float share) {
        return turn(x * (share * static_cast<float>(band.step)));
    }
    static void place(vf x, const Band& band, Complex& start, Complex& step) {
        start = twist(x, band, 0.5f), step = plus_1(twice_less_1(start));
    }
};

// Transforms at the frequencies of a band: lanes are frequencies after `close`, states before.
struct Transform {
    vf *re_lanes, *im_lanes;  // [frequency], lanes are states
    vf *re, *im;              // lanes are frequencies

    static constexpr int64_t FLOATS = 2 * Band::MOST * W + 2 * Band::MOST;
    explicit Transform(vf* memory)
        : re_lanes(memory), im_lanes(memory + Band::MOST), re(memory + 2 * Band::MOST), im(re + Band::MOST / W) {}

    void open(const Band& band) const {
        memset(re_lanes, 0, band.vectors * W * sizeof(vf));
        memset(im_lanes, 0, band.vectors * W * sizeof(vf));
    }
    void close(const Band& band) const {
        sum_lanes(re_lanes, band.vectors * W, scalars(re));
        sum_lanes(im_lanes, band.vectors * W, scalars(im));
    }
};

constexpr int AT_ONCE = W == 16 ? 2 : 1;  // vectors of states, by the number of registers

// The waves of one vector of states at every PHASES-th frequency: two chains of products do not wait for each other.
template <int PHASES>
struct Chains {
    Complex wave[PHASES], gap[PHASES];    // e^(i w y), e^(i w (x - y)) - 1
    Complex step, gap_less, gap_step;     // their turns, and gap_step - 1

    void start(const Waves& waves, int64_t v) {
        wave[0] = waves.start[v], step = waves.step[v];
        gap[0] = waves.gap_start[v], gap_less = waves.gap_step[v], gap_step = plus_1(gap_less);
        if constexpr (PHASES == 2) {
            wave[1] = wave[0].times(step), gap[1] = turned(gap[0]);
            step = step.times(step), gap_less = turned(gap_less), gap_step = plus_1(gap_less);
        }
    }
    Complex turned(const Complex& from) const {
        return {gap_less.re + gap_step.re * from.re - gap_step.im * from.im,
                gap_less.im + gap_step.re * from.im + gap_step.im * from.re};
    }
};

// Adds sum (near + far (e^(i w (x - y)) - 1)) e^(i w y) to `difference` and, where it is given, sum own e^(i w y) to
// `alone`, over `COUNT` vectors of states from the v-th on.
template <int COUNT, int PHASES, bool ALONE>
INFSSM_INLINE void transform(const Waves& waves, const Band& band, const vf* near, const vf* far, const vf* own, int64_t v,
                             const Transform& difference, const Transform& alone) {
    Chains<PHASES> chain[COUNT];
    for (int k = 0; k < COUNT; ++k) chain[k].start(waves, v + k);
    for (int64_t l = 0; l < band.count; l += PHASES)
        for (int phase = 0; phase < PHASES; ++phase) {
            vf re = difference.re_lanes[l + phase], im = difference.im_lanes[l + phase], own_re = {}, own_im = {};
            if constexpr (ALONE) own_re = alone.re_lanes[l + phase], own_im = alone.im_lanes[l + phase];
            for (int k = 0; k < COUNT; ++k) {
                Complex &wave = chain[k].wave[phase], &gap = chain[k].gap[phase];
                const vf x = near[v + k] + far[v + k] * gap.re, y = far[v + k] * gap.im;
                re += x * wave.re, re -= y * wave.im;
                im += x * wave.im, im += y * wave.re;
                if constexpr (ALONE) own_re += own[v + k] * wave.re, own_im += own[v + k] * wave.im;
                wave = wave.times(chain[k].step), gap = chain[k].turned(gap);
            }
            difference.re_lanes[l + phase] = re, difference.im_lanes[l + phase] = im;
            if constexpr (ALONE) alone.re_lanes[l + phase] = own_re, alone.im_lanes[l + phase] = own_im;
        }
}

template <bool ALONE>
void transform(const Waves& waves, const Band& band, int64_t n, const vf* near, const vf* far, const vf* own,
               const Transform& difference, const Transform& alone) {
    difference.open(band);
    if (ALONE) alone.open(band);
    int64_t v = 0;
    for (; (v + AT_ONCE - 1) * W < n; v += AT_ONCE)
        transform<AT_ONCE, 3 - AT_ONCE, ALONE>(waves, band, near, far, own, v, difference, alone);
    for (; v * W < n; ++v) transform<1, 2, ALONE>(waves, band, near, far, own, v, difference, alone);
    difference.close(band);
    if (ALONE) alone.close(band);
}

// A function of x given by its transform: Re sum conj(u) e^(i w x) and its slope, at the poles of one side.
struct Field {
    vf *re, *im, *slope_re, *slope_im;  // u and w u, lanes are frequencies
    vf *value, *slope;                  // at the poles

    static constexpr int64_t FLOATS = 4 * Band::MOST;
    static constexpr int ARRAYS = 2;
    Field(vf* memory, Arrays& arrays)
        : re(memory),
          im(re + Band::MOST / W),
          slope_re(im + Band::MOST / W),
          slope_im(slope_re + Band::MOST / W),
          value(arrays.take()),
          slope(arrays.take()) {}

    // The sum of |u| (1 + w), which bounds value and slope.
    float steepen(const Band& band) const {
        vf size = {};
        for (int64_t v = 0; v < band.vectors; ++v) {
            slope_re[v] = band.frequency[v] * re[v], slope_im[v] = band.frequency[v] * im[v];
            size += (absolute(re[v]) + absolute(im[v])) * (1.f + band.frequency[v]);
        }
        return add_up(size);
    }

    void evaluate(const Band& band, const vf* x, int64_t n) const {
        int64_t v = 0;
        for (; (v + 1) * W < n; v += 2) evaluate<2, 1>(band, x, v);
        if (v * W < n) evaluate<1, 2>(band, x, v);
    }

  private:
    // COUNT vectors of states, each at every PHASES-th frequency at a time.
    template <int COUNT, int PHASES>
    void evaluate(const Band& band, const vf* x, int64_t v) const {
        Complex wave[COUNT][PHASES], step[COUNT];
        vf sum[COUNT][PHASES] = {}, rise[COUNT][PHASES] = {};
        for (int k = 0; k < COUNT; ++k) {
            Waves::place(x[v + k], band, wave[k][0], step[k]);
            if constexpr (PHASES == 2) wave[k][1] = wave[k][0].times(step[k]), step[k] = step[k].times(step[k]);
        }
        const float *u = scalars(re), *w = scalars(im), *steep_u = scalars(slope_re), *steep_w = scalars(slope_im);
        for (int64_t l = 0; l < band.count; l += PHASES)  // beyond the last u is 0
            for (int phase = 0; phase < PHASES; ++phase)
                for (int k = 0; k < COUNT; ++k) {
                    Complex& turned = wave[k][phase];
                    sum[k][phase] += u[l + phase] * turned.re, sum[k][phase] += w[l + phase] * turned.im;
                    rise[k][phase] += steep_w[l + phase] * turned.re, rise[k][phase] -= steep_u[l + phase] * turned.im;
                    turned = turned.times(step[k]);
                }
        for (int k = 0; k < COUNT; ++k) {
            value[v + k] = sum[k][0] + sum[k][PHASES - 1] * (PHASES - 1.f);
            slope[v + k] = rise[k][0] + rise[k][PHASES - 1] * (PHASES - 1.f);
        }
    }
};

}  // namespace
}  // namespace infssm::INFSSM_ISA
