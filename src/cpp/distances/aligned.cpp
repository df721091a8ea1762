// 1 - cos of the angle between the Gram operators of the two systems (docs/reference/maths.md, eq. 22).
//
// With masses p = c^2 / (1 - a^2) and the transforms F = sum p e^(i w x) of the old and G of the new system (spectrum.h;
// with powers in place of waves where poles are near, powers.h), the distance is half the squared norm of
// D = F / |F| - G / |G|, and every part of D is a difference computed as such:
//   D = (F - G + G (1 - |F| / |G|)) / |F|,  |G|^2 - |F|^2 = -<F - G, 2 G + (F - G)>.
#include "powers.h"
#include "weights.h"

namespace infssm::INFSSM_ISA {
namespace {

struct Token {
    Poles poles;
    Weights weights;
    Expansion expansion;
    vf *change, *old_mass, *new_mass;  // p - q, p, q
    vf* by_weight;
    Buffer memory;
    Transform difference, alone;       // F - G, G
    Field field;

    static constexpr int ARRAYS = 3 + 5 + Expansion::ARRAYS + 4 + Field::ARRAYS;
    Token(Arrays arrays, const Distance&)
        : poles(arrays.poles()),
          weights(arrays),
          expansion(arrays),
          change(arrays.take()),
          old_mass(arrays.take()),
          new_mass(arrays.take()),
          by_weight(arrays.take()),
          memory(2 * Transform::FLOATS + Field::FLOATS),
          difference(memory.vectors()),
          alone(memory.vectors() + Transform::FLOATS / W),
          field(memory.vectors() + 2 * Transform::FLOATS / W, arrays) {}
};

// Masses, and their difference from differences.
void weigh(const Token& t, const Distance& f) {
    const Values& rows = t.weights.rows;
    const Factors& factors = t.expansion.factors;
    vf all = {};
    for (int64_t v = 0; v * W < f.n; ++v) {
        t.change[v] = rows.gap[v] * (rows.x[v] + rows.y[v]);
        all += t.change[v];
    }
    if (f.poles == 1) t.change[0] = splat(add_up(all), 1);
    for (int64_t v = 0; v * W < f.poles; ++v) {
        const vf p = t.weights.old_weight[v], q = t.weights.new_weight[v];
        const vf old_factor = factors.old_value[v], new_factor = factors.new_value[v];
        t.old_mass[v] = p * old_factor * old_factor, t.new_mass[v] = q * new_factor * new_factor;
        t.change[v] = t.change[v] * old_factor * old_factor - q * (factors.gap[v] * (old_factor + new_factor));
    }
}

struct Norms {
    float old_norm, new_norm, value;
};

// Leaves D in `difference` and G / |G| in `alone`.
Norms normalize(const Token& t, const Band& band) {
    vf cross = {}, own = {};
    for (int64_t v = 0; v < band.vectors; ++v) {
        const vf w = band.weight[v], x = t.difference.re[v], y = t.difference.im[v], g = t.alone.re[v], h = t.alone.im[v];
        cross += w * (x * (2.f * g + x) + y * (2.f * h + y));
        own += w * (g * g + h * h);
    }
    const float square = add_up(own), excess = add_up(cross);  // |G|^2, |F|^2 - |G|^2
    const float new_norm = std::sqrt(square), old_norm = std::sqrt(square + excess);
    const float shrink = -excess / (square + old_norm * new_norm);   // 1 - |F| / |G|
    const float by_old = 1 / old_norm, by_new = 1 / new_norm;
    vf value = {};
    for (int64_t v = 0; v < band.vectors; ++v) {
        for (vf* Transform::*part : {&Transform::re, &Transform::im}) {
            vf &d = (t.difference.*part)[v], &g = (t.alone.*part)[v];
            d = (d + shrink * g) * by_old, g *= by_new;
            value += band.weight[v] * d * d;
        }
    }
    return {old_norm, new_norm, 0.5f * add_up(value)};
}

// Derivatives for one side; false where rounding may have taken their precision.
bool write(const Distance& f, const Token& t, const Norms& norms, bool second, Slope to) {
    const Band& band = *t.expansion.band;
    const float sign = second ? 1.f : -1.f, scale = -sign / (second ? norms.new_norm : norms.old_norm);
    const auto unit = [&](const vf* own, const vf* apart, int64_t v) { return second ? own[v] : own[v] + apart[v]; };
    vf sum = {};
    for (int64_t v = 0; v < band.vectors; ++v) {
        const vf x = t.difference.re[v], y = t.difference.im[v];
        sum += band.weight[v] * (x * unit(t.alone.re, t.difference.re, v) + y * unit(t.alone.im, t.difference.im, v));
    }
    const float along = add_up(sum);  // D has this much of the side's own unit vector; the rest is the derivative
    for (int64_t v = 0; v < band.vectors; ++v) {
        const vf w = scale * band.weight[v], x = t.difference.re[v], y = t.difference.im[v];
        t.field.re[v] = w * (x - along * unit(t.alone.re, t.difference.re, v));
        t.field.im[v] = w * (y - along * unit(t.alone.im, t.difference.im, v));
    }
    const float size = t.field.steepen(band);
    t.expansion.evaluate(t.field, f.poles, second);
    const Factors& factors = t.expansion.factors;
    const vf *factor = second ? factors.new_value : factors.old_value, *steep = second ? factors.new_slope : factors.old_slope;
    const vf *poles = second ? t.poles.s : t.poles.r, *masses = second ? t.new_mass : t.old_mass;
    const vf* weights = second ? t.weights.new_weight : t.weights.old_weight;
    vf largest = {}, error = {};
    for (int64_t v = 0; v * W < f.poles; ++v) {
        const vf r = poles[v], value = t.field.value[v];
        t.by_weight[v] = value * factor[v] * factor[v];
        const vf by_x = masses[v] * t.field.slope[v] + 2.f * weights[v] * factor[v] * steep[v] * value;
        const vf slope = by_state(by_x, r, f.soft);
        if (to.a) store(to.a + v * W, slope, lanes_of(f.poles, v));
        largest = at_least(largest, absolute(slope)), error = at_least(error, by_state(masses[v], r, f.soft));
    }
    t.weights.write(f, t.by_weight, second, to.c);
    return f.soft || !(ROUNDING * size * most(error) > BEARABLE * most(largest));
}

void aligned(const Distance& f, Token& t, int64_t i) {
    const Slope to_old(f.to_old, i, f), to_new(f.to_new, i, f);
    const float *old_state = f.old_states.a + i * f.poles, *new_state = f.new_states.a + i * f.poles;
    bool sure = t.poles.read(old_state, new_state, f.poles, f.soft);
    f.value[i] = 0, f.sure[i] = sure;
    if (!sure) return;
    if (!t.weights.read<true>(f, i)) return to_old.zero(f), to_new.zero(f);
    t.expansion.read(Spectrum::sech_squared, t.poles, old_state, new_state, f);
    weigh(t, f);
    t.expansion.transform<true>(f.poles, t.change, t.old_mass, t.new_mass, t.difference, t.alone);
    const Norms norms = normalize(t, *t.expansion.band);
    if (to_old.a) sure &= write(f, t, norms, false, to_old);
    if (to_new.a) sure &= write(f, t, norms, true, to_new);
    f.value[i] = norms.value, f.sure[i] = sure && std::isfinite(norms.value);
}

}  // namespace

void aligned(const Distance& f) {
    for_tokens<Token>(f, Token::ARRAYS, [&](Token& t, int64_t i) { aligned(f, t, i); });
}

}  // namespace infssm::INFSSM_ISA
