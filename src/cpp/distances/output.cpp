// Energy of the difference of two impulse responses, sum_t (c a^t b - c' a'^t b')^2 (docs/maths.md, eq. 28).
//
// With residues R = c b / sqrt(1 - a^2), and S of the new system, it is the energy of sum S e^(i w y) - R e^(i w x) under
// the spectrum of sech (spectrum.h), and every part of that is a difference computed as such.
#include "spectrum.h"

namespace infssm {
namespace INFSSM_ISA {
namespace {

struct Token {
    Poles poles;
    Values rows, columns;
    Waves waves;
    vf *change, *moved;  // S - R, -R
    Buffer memory;
    Transform difference;
    Field field;

    static constexpr int ARRAYS = 3 + 2 * 3 + Waves::ARRAYS + 2 + Field::ARRAYS;
    Token(Arrays arrays, const Distance&)
        : poles(arrays.poles()),
          rows(arrays.values()),
          columns(arrays.values()),
          waves(arrays),
          change(arrays.take()),
          moved(arrays.take()),
          memory(Transform::FLOATS + Field::FLOATS),
          difference(memory.vectors()),
          field(memory.vectors() + Transform::FLOATS / W, arrays) {}
};

INFSSM_INLINE vf half_cosh(vf root) { return 0.5f * (root + 1.f / root); }  // cosh(x / 2) = 1 / sqrt(1 - a^2)

// Residues c b of one side, all of them in the first lane for a scalar transition.
void residues(const Distance& f, const vf* c, const vf* b, vf* out) {
    vf sum = {};
    for (int64_t v = 0; v * W < f.n; ++v) out[v] = c[v] * b[v], sum += out[v];
    if (f.poles == 1) out[0] = splat(add_up(sum), 1);
}

void weigh(const Token& t, const Distance& f) {
    const Values &rows = t.rows, &columns = t.columns;
    vf sum = {};
    for (int64_t v = 0; v * W < f.n; ++v) {
        t.change[v] = -(rows.gap[v] * columns.y[v] + rows.x[v] * columns.gap[v]);
        sum += t.change[v];
    }
    if (f.poles == 1) t.change[0] = splat(add_up(sum), 1);
    residues(f, rows.x, columns.x, t.moved);
    for (int64_t v = 0; v * W < f.poles; ++v) {
        const vf root = square_root(t.poles.r[v]), new_root = square_root(t.poles.s[v]);
        const vf apart = t.poles.shift[v] / (root + new_root);  // of the roots
        t.change[v] = t.change[v] * half_cosh(new_root) + t.moved[v] * (0.5f * apart * (1.f - 1.f / (root * new_root)));
        t.moved[v] *= -half_cosh(root);
    }
}

// Derivatives for one side from the field, which is times the sign of the side already.
void write(const Distance& f, const Token& t, const Band& band, bool second, Slope to) {
    t.field.evaluate(band, second ? t.waves.new_x : t.waves.old_x, f.poles);
    const float sign = second ? 1.f : -1.f;
    const vf *c = second ? t.rows.y : t.rows.x, *b = second ? t.columns.y : t.columns.x;
    const vf* poles = second ? t.poles.s : t.poles.r;
    vf* by_residue = t.field.value;
    residues(f, c, b, t.change);
    for (int64_t v = 0; v * W < f.poles; ++v) {
        const vf r = poles[v], root = square_root(r), value = sign * t.field.value[v], slope = sign * t.field.slope[v];
        const vf by_x = t.change[v] * (half_cosh(root) * slope + 0.25f * (1.f / root - root) * value);
        if (to.a) store(to.a + v * W, by_state(by_x, r, f.raw), lanes_of(f.poles, v));
        by_residue[v] = half_cosh(root) * value;
    }
    for (int64_t v = 0; v * W < f.n; ++v) {
        const vf by = f.poles == 1 ? splat(by_residue[0][0]) : by_residue[v];
        const int lanes = lanes_of(f.n, v);
        if (to.c) store(to.c + v * W, through(by * b[v], c[v], f.raw), lanes);
        if (to.b) store(to.b + v * W, through(by * c[v], b[v], f.raw), lanes);
    }
}

void output(const Distance& f, Token& t, int64_t i) {
    const Slope to_old(f.to_old, i, f), to_new(f.to_new, i, f);
    const float *old_state = f.old_states.a + i * f.poles, *new_state = f.new_states.a + i * f.poles;
    const bool inside = t.poles.read(old_state, new_state, f.poles, f.raw);
    f.value[i] = 0, f.sure[i] = inside;
    if (!inside) return;
    t.rows.read(f.old_states.c + i * f.n, f.new_states.c + i * f.n, f.n, f.raw);
    t.columns.read(f.old_states.b + i * f.n, f.new_states.b + i * f.n, f.n, f.raw);
    const Band& band = t.waves.read(Spectrum::sech, t.poles, old_state, new_state, f.poles, f.raw);
    weigh(t, f);
    transform<false>(t.waves, band, f.poles, t.change, t.moved, nullptr, t.difference, t.difference);
    vf energy = {};
    for (int64_t v = 0; v < band.vectors; ++v) {
        const vf x = t.difference.re[v], y = t.difference.im[v];
        energy += band.weight[v] * (x * x + y * y);
        t.field.re[v] = 2.f * band.weight[v] * x, t.field.im[v] = 2.f * band.weight[v] * y;
    }
    f.value[i] = add_up(energy);
    f.sure[i] = std::isfinite(f.value[i]);
    if (to_old.a || to_new.a) t.field.steepen(band);
    if (to_old.a) write(f, t, band, false, to_old);
    if (to_new.a) write(f, t, band, true, to_new);
}

}  // namespace

void output(const Distance& f) {
    for_tokens<Token>(f, Token::ARRAYS, [&](Token& t, int64_t i) { output(f, t, i); });
}

}  // namespace INFSSM_ISA
}  // namespace infssm
