// Sums over pairs of poles of a kernel of x - y, as power series about the middle of the poles (docs/reference/maths.md, eq. 34a).
//
// With the middle m and t = (m - r) / (m + r), the kernel 1 / (1 - a b) is h h' / (1 - t t') = h h' sum_k t^k t'^k, with
// h = sqrt(m) (1 + r) / (m + r), and its square is h^2 h'^2 sum_k (k + 1) t^k t'^k. As with frequencies every term of a
// quadratic form is a square, but it is real and follows from the last by products: 10 operations per state and power with
// the sums over lanes and the derivatives, where a frequency takes 24 and a pair of poles 25. Poles of trained models,
// whose raw states are in (0, 1), need 8 or 12 powers; poles that are far apart are left to frequencies.
#pragma once

#include "spectrum.h"

namespace infssm::INFSSM_ISA {
namespace {

struct Powers {
    vf *old_t, *new_t, *gap;  // t of the poles, and old - new with its own precision

    static constexpr int ARRAYS = 3;
    explicit Powers(Arrays& arrays) : old_t(arrays.take()), new_t(arrays.take()), gap(arrays.take()) {}

    // All poles inside. Null where they are too far apart.
    const Band* read(Spectrum kind, const Poles& poles, const float* old_state, const float* new_state, const Distance& f,
                     const Factors& factors) const {
        const int64_t n = f.poles;
        vf low = at_most(poles.r[0], poles.s[0]), high = at_least(poles.r[0], poles.s[0]);
        for (int64_t v = 1; v * W < n; ++v) {  // lanes without a pole hold 1, as in the frequencies
            low = at_most(low, at_most(poles.r[v], poles.s[v])), high = at_least(high, at_least(poles.r[v], poles.s[v]));
        }
        const float least = -most(-low), largest = most(high), middle = std::sqrt(least * largest), root = std::sqrt(middle);
        const Band* band = of(kind, (largest - middle) / (largest + middle));
        if (!band) return nullptr;
        const float rise = (1.f - middle) * root;
        for (int64_t v = 0; v * W < n; ++v) {
            const vf r = poles.r[v], s = poles.s[v], shift = poles.shift[v];
            const vf inverse = reciprocal(r + middle), new_inverse = reciprocal(s + middle), both = inverse * new_inverse;
            old_t[v] = (middle - r) * inverse, new_t[v] = (middle - s) * new_inverse, gap[v] = 2.f * middle * shift * both;
            factors.old_value[v] = root * (1.f + r) * inverse, factors.old_slope[v] = rise * r * inverse * inverse;
            factors.new_value[v] = root * (1.f + s) * new_inverse;
            factors.new_slope[v] = rise * s * new_inverse * new_inverse;
            factors.gap[v] = -rise * shift * both;
        }
        if (f.soft && band->count <= CLOSE) {
            const float x = -std::log(middle);
            for (int64_t v = 0; v * W < n; ++v) {
                old_t[v] = soft_normalize(load(old_state + v * W, lanes_of(n, v)) - x);
                new_t[v] = soft_normalize(load(new_state + v * W, lanes_of(n, v)) - x);
            }
        }
        return band;
    }

    // Adds sum near t'^k + far (t^k - t'^k) to `difference` and, where `ALONE`, sum own t'^k to `alone`.
    template <bool ALONE>
    void transform(const Band& band, int64_t n, const vf* near, const vf* far, const vf* own, const Transform& difference,
                   const Transform& alone) const {
        int64_t v = 0;
        if (W < n) add<2, ALONE, true>(band, near, far, own, v, difference, alone), v = 2;
        else add<1, ALONE, true>(band, near, far, own, v, difference, alone), v = 1;
        for (; (v + 1) * W < n; v += 2) add<2, ALONE, false>(band, near, far, own, v, difference, alone);
        if (v * W < n) add<1, ALONE, false>(band, near, far, own, v, difference, alone);
        close(band, difference);
        if (ALONE) close(band, alone);
    }

    void evaluate(const Band& band, const Field& field, const vf* t, int64_t n) const {
        int64_t v = 0;
        for (; (v + 1) * W < n; v += 2) evaluate<2>(band, field, t, v);
        if (v * W < n) evaluate<1>(band, field, t, v);
    }

  private:
    static constexpr int64_t STEP = 4, COUNTS = 24;  // of the numbers of powers
    static constexpr int64_t CLOSE = STEP;  // poles so near that the rounding of r is much of t; raw states know better
    static constexpr int CHAINS = W == 16 ? 4 : 2;   // of products that do not wait for each other, by the number of registers

    // Where every |t| is within `reach`: a pole that moves changes its k-th power by k t^(k - 1), whose square, times the
    // weight, is e^-16 beyond the last.
    static const Band* of(Spectrum kind, float reach) {
        static thread_local std::optional<Band> kept[2][COUNTS];
        static const std::array<float, COUNTS> sech = reaches(1), sech_squared = reaches(1.5);
        int64_t i = 0;
        for (const float far : kind == Spectrum::sech ? sech : sech_squared) i += reach > far;
        if (i == COUNTS) return nullptr;
        std::optional<Band>& band = kept[kind == Spectrum::sech][i];
        if (band) return &*band;
        return &band.emplace(1, (i + 1) * STEP, [&](double k) { return std::pair(k, kind == Spectrum::sech ? 1 : k + 1); });
    }
    static std::array<float, COUNTS> reaches(double growth) {
        std::array<float, COUNTS> found;
        for (int64_t i = 0; i < COUNTS; ++i) {
            const double k = (i + 1) * STEP;
            found[i] = static_cast<float>(std::exp(-(8 + growth * std::log(k)) / (k - 1)));
        }
        return found;
    }

    // COUNT vectors of states, each in as many chains as there are left, from power to power + PHASES.
    template <int COUNT, bool ALONE, bool FIRST>
    void add(const Band& band, const vf* near, const vf* far, const vf* own, int64_t v, const Transform& difference,
             const Transform& alone) const {
        constexpr int PHASES = CHAINS / COUNT;
        vf still[COUNT][PHASES], moved[COUNT][PHASES], move[COUNT][PHASES], single[COUNT][PHASES], t[COUNT], before[COUNT];
        for (int k = 0; k < COUNT; ++k) {
            vf power = splat(1.f), apart = {};  // t'^j, t^j - t'^j
            for (int j = 0; j < PHASES; ++j) {
                still[k][j] = near[v + k] * power, moved[k][j] = far[v + k] * apart, move[k][j] = far[v + k] * power;
                if constexpr (ALONE) single[k][j] = own[v + k] * power;
                apart = old_t[v + k] * apart + gap[v + k] * power, power *= new_t[v + k];
            }
            for (int j = 0; j < PHASES; ++j) move[k][j] *= apart;
            t[k] = power, before[k] = power + apart;
        }
        for (int64_t l = 0; l < band.count; l += PHASES)
            for (int j = 0; j < PHASES; ++j) {
                vf sum = FIRST ? vf{} : difference.re_lanes[l + j], own_sum = {};
                if constexpr (ALONE && !FIRST) own_sum = alone.re_lanes[l + j];
                for (int k = 0; k < COUNT; ++k) {
                    sum += still[k][j] + moved[k][j];
                    moved[k][j] = before[k] * moved[k][j] + move[k][j], move[k][j] *= t[k], still[k][j] *= t[k];
                    if constexpr (ALONE) own_sum += single[k][j], single[k][j] *= t[k];
                }
                difference.re_lanes[l + j] = sum;
                if constexpr (ALONE) alone.re_lanes[l + j] = own_sum;
            }
    }

    static void close(const Band& band, const Transform& transform) {
        for (int64_t l = band.count; l < band.vectors * W; ++l) transform.re_lanes[l] = vf{};
        sum_lanes(transform.re_lanes, band.vectors * W, scalars(transform.re));
        for (int64_t v = 0; v < band.vectors; ++v) transform.im[v] = vf{};
    }

    // A polynomial in t and its slope in x, dt / dx = (1 - t^2) / 2: by Horner's rule in z = t^PHASES for every PHASES-th
    // coefficient, and again in t for the results.
    template <int COUNT>
    static void evaluate(const Band& band, const Field& field, const vf* points, int64_t v) {
        constexpr int PHASES = CHAINS / COUNT;
        vf value[COUNT][PHASES] = {}, slope[COUNT][PHASES] = {}, z[COUNT], rise[COUNT];
        for (int k = 0; k < COUNT; ++k) {
            rise[k] = splat(PHASES);  // dz / dt
            for (int j = 1; j < PHASES; ++j) rise[k] *= points[v + k];
            z[k] = rise[k] * points[v + k] * (1.f / PHASES);
        }
        const float* u = scalars(field.re);
        for (int64_t l = band.count - PHASES; l >= 0; l -= PHASES)
            for (int j = 0; j < PHASES; ++j)
                for (int k = 0; k < COUNT; ++k) {
                    slope[k][j] = slope[k][j] * z[k] + value[k][j], value[k][j] = value[k][j] * z[k] + u[l + j];
                }
        for (int k = 0; k < COUNT; ++k) {
            const vf t = points[v + k];
            vf sum = {}, outer = {}, inner = {};
            for (int j = PHASES - 1; j >= 0; --j) {
                outer = outer * t + sum, inner = inner * t + slope[k][j], sum = sum * t + value[k][j];
            }
            field.value[v + k] = sum, field.slope[v + k] = (outer + rise[k] * inner) * (0.5f - 0.5f * t * t);
        }
    }
};

// The expansion that suits the poles of a token.
struct Expansion {
    Factors factors;
    const Band* band = nullptr;

    static constexpr int ARRAYS = Factors::ARRAYS + Powers::ARRAYS + Waves::ARRAYS;
    explicit Expansion(Arrays& arrays) : factors(arrays), powers_(arrays), waves_(arrays) {}

    // All poles inside.
    void read(Spectrum kind, const Poles& poles, const float* old_state, const float* new_state, const Distance& f) {
        band = powers_.read(kind, poles, old_state, new_state, f, factors);
        near_ = band;
        if (!near_) band = &waves_.read(kind, poles, old_state, new_state, f.poles, f.soft, factors);
    }

    // Fills sum near e' + far (e - e') over the terms e of the old and e' of the new poles, and sum own e'.
    template <bool ALONE>
    void transform(int64_t n, const vf* near, const vf* far, const vf* own, const Transform& difference,
                   const Transform& alone) const {
        if (near_) powers_.transform<ALONE>(*band, n, near, far, own, difference, alone);
        else infssm::INFSSM_ISA::transform<ALONE>(waves_, *band, n, near, far, own, difference, alone);
    }

    // The field at the poles of one side.
    void evaluate(const Field& field, int64_t n, bool second) const {
        if (near_) powers_.evaluate(*band, field, second ? powers_.new_t : powers_.old_t, n);
        else field.evaluate(*band, second ? waves_.new_x : waves_.old_x, n);
    }

  private:
    Powers powers_;
    Waves waves_;
    bool near_ = false;
};

}  // namespace
}  // namespace infssm::INFSSM_ISA
