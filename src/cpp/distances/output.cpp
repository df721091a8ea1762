// Energy of the difference of two impulse responses, sum_t (c a^t b - c' a'^t b')^2 (docs/reference/maths.md, eq. 28).
//
// With residues R = c b / sqrt(1 - a^2), and S of the new system, it is the energy of sum S e^(i w y) - R e^(i w x) under
// the spectrum of sech (spectrum.h) or, where poles are near, of that with powers in place of waves (powers.h), and every
// part of that is a difference computed as such.
#include "powers.h"

namespace infssm::INFSSM_ISA {
namespace {

struct Token {
    Poles poles;
    Values rows, columns;
    Expansion expansion;
    vf *change, *moved;  // S - R, -R
    Buffer memory;
    Transform difference;
    Field field;

    static constexpr int ARRAYS = 3 + 2 * 3 + Expansion::ARRAYS + 2 + Field::ARRAYS;
    Token(Arrays arrays, const Distance&)
        : poles(arrays.poles()),
          rows(arrays.values()),
          columns(arrays.values()),
          expansion(arrays),
          change(arrays.take()),
          moved(arrays.take()),
          memory(Transform::FLOATS + Field::FLOATS),
          difference(memory.vectors()),
          field(memory.vectors() + Transform::FLOATS / W, arrays) {}
};

// Residues c b of one side, all of them in the first lane for a scalar transition.
void residues(const Distance& f, const vf* c, const vf* b, vf* out) {
    vf sum = {};
    for (int64_t v = 0; v * W < f.n; ++v) out[v] = c[v] * b[v], sum += out[v];
    if (f.poles == 1) out[0] = splat(add_up(sum), 1);
}

void weigh(const Token& t, const Distance& f) {
    const Values &rows = t.rows, &columns = t.columns;
    const Factors& factors = t.expansion.factors;
    vf sum = {};
    for (int64_t v = 0; v * W < f.n; ++v) {
        t.change[v] = -(rows.gap[v] * columns.y[v] + rows.x[v] * columns.gap[v]);
        sum += t.change[v];
    }
    if (f.poles == 1) t.change[0] = splat(add_up(sum), 1);
    residues(f, rows.x, columns.x, t.moved);
    for (int64_t v = 0; v * W < f.poles; ++v) {
        t.change[v] = t.change[v] * factors.new_value[v] + t.moved[v] * factors.gap[v];
        t.moved[v] *= -factors.old_value[v];
    }
}

// Derivatives for one side from the field, which is times the sign of the side already.
void write(const Distance& f, const Token& t, bool second, Slope to) {
    t.expansion.evaluate(t.field, f.poles, second);
    const float sign = second ? 1.f : -1.f;
    const vf *c = second ? t.rows.y : t.rows.x, *b = second ? t.columns.y : t.columns.x;
    const Factors& factors = t.expansion.factors;
    const vf *factor = second ? factors.new_value : factors.old_value, *steep = second ? factors.new_slope : factors.old_slope;
    const vf* poles = second ? t.poles.s : t.poles.r;
    vf* by_residue = t.field.value;
    residues(f, c, b, t.change);
    for (int64_t v = 0; v * W < f.poles; ++v) {
        const vf value = sign * t.field.value[v], slope = sign * t.field.slope[v];
        const vf by_x = t.change[v] * (factor[v] * slope + steep[v] * value);
        if (to.a) store(to.a + v * W, by_state(by_x, poles[v], f.soft), lanes_of(f.poles, v));
        by_residue[v] = factor[v] * value;
    }
    for (int64_t v = 0; v * W < f.n; ++v) {
        const vf by = f.poles == 1 ? splat(by_residue[0][0]) : by_residue[v];
        const int lanes = lanes_of(f.n, v);
        if (to.c) store(to.c + v * W, through(by * b[v], c[v], f.soft), lanes);
        if (to.b) store(to.b + v * W, through(by * c[v], b[v], f.soft), lanes);
    }
}

void output(const Distance& f, Token& t, int64_t i) {
    const Slope to_old(f.to_old, i, f), to_new(f.to_new, i, f);
    const float *old_state = f.old_states.a + i * f.poles, *new_state = f.new_states.a + i * f.poles;
    const bool inside = t.poles.read(old_state, new_state, f.poles, f.soft);
    f.value[i] = 0, f.sure[i] = inside;
    if (!inside) return;
    t.rows.read(f.old_states.c + i * f.n, f.new_states.c + i * f.n, f.n, f.soft);
    t.columns.read(f.old_states.b + i * f.n, f.new_states.b + i * f.n, f.n, f.soft);
    t.expansion.read(Spectrum::sech, t.poles, old_state, new_state, f);
    const Band& band = *t.expansion.band;
    weigh(t, f);
    t.expansion.transform<false>(f.poles, t.change, t.moved, nullptr, t.difference, t.difference);
    vf energy = {};
    for (int64_t v = 0; v < band.vectors; ++v) {
        const vf x = t.difference.re[v], y = t.difference.im[v];
        energy += band.weight[v] * (x * x + y * y);
        t.field.re[v] = 2.f * band.weight[v] * x, t.field.im[v] = 2.f * band.weight[v] * y;
    }
    f.value[i] = add_up(energy);
    f.sure[i] = std::isfinite(f.value[i]);
    if (to_old.a || to_new.a) t.field.steepen(band);
    if (to_old.a) write(f, t, false, to_old);
    if (to_new.a) write(f, t, true, to_new);
}

}  // namespace

void output(const Distance& f) {
    for_tokens<Token>(f, Token::ARRAYS, [&](Token& t, int64_t i) { output(f, t, i); });
}

}  // namespace infssm::INFSSM_ISA
