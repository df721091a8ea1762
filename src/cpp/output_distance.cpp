// Energy of the difference of two impulse responses, sum_t (c a^t b - c' a'^t b')^2.
//
// With residues r = c b (old) and s = c' b' (new), e = s - r, m = r (a' - a), and for a pole x of the new system
//   U(x)  = sum_k e_k B_k + m_k x B_k A_k,               A_k = 1 / (1 - a_k x),  B_k = 1 / (1 - a'_k x),
//   U'(x) = sum_k e_k a'_k B_k^2 + m_k B_k A_k (A_k + B_k - 1),
// the energy is sum_j e_j U(a'_j) + m_j d_j, d_j the divided difference of U between a'_j and a_j, and its derivatives
// are 2 U in s and 2 s U' in a'. Every term is a product of differences: nothing cancels near equality.
#include "kernels.h"
#include "memory.h"
#include "states.h"

namespace infssm {
namespace INFSSM_ISA {
namespace {

struct Token {
    int64_t n, vectors;
    vf *a, *x, *gap_a;          // old poles, new poles, old - new
    vf *c, *d, *gap_c;          // output rows likewise
    vf *b, *g, *gap_b;          // input columns likewise
    vf *e, *m;

    static int64_t floats(int64_t n) { return round_up(n, W) * 11; }
    Token(vf* memory, int64_t states) : n(states), vectors(ceil_div(states, W)) {
        const auto take = [&] { return memory += vectors, memory - vectors; };
        a = take(), x = take(), gap_a = take(), c = take(), d = take(), gap_c = take();
        b = take(), g = take(), gap_b = take(), e = take(), m = take();
    }
};

// The value of the token and, where wanted, its derivatives.
template <bool SLOPE>
float energy(const Token& t, bool raw, float* da, float* dc, float* db) {
    const float *a = scalars(t.a), *x = scalars(t.x), *e = scalars(t.e), *m = scalars(t.m);
    vf total = {};
    for (int64_t v = 0; v < t.vectors; ++v) {
        const vf old_pole = t.a[v], pole = t.x[v], product = old_pole * pole;
        vf value = {}, slope = {}, divided = {};
        for (int64_t k = 0; k < t.n; ++k) {
            const vf A = reciprocal(1.f - a[k] * pole), B = reciprocal(1.f - x[k] * pole);
            const vf old_A = reciprocal(1.f - a[k] * old_pole), old_B = reciprocal(1.f - x[k] * old_pole);
            const vf AB = A * B;
            value += e[k] * B + m[k] * (pole * AB);
            divided += (e[k] * x[k]) * (B * old_B) + m[k] * ((1.f - (a[k] * x[k]) * product) * (AB * (old_A * old_B)));
            if constexpr (SLOPE) slope += (e[k] * x[k]) * (B * B) + m[k] * (AB * (A + B - 1.f));
        }
        total += t.e[v] * value + t.m[v] * divided;
        if constexpr (SLOPE) {
            const vf by_residue = 2.f * value;
            const int lanes = lanes_of(t.n, v);
            store(da + v * W, through(2.f * t.d[v] * t.g[v] * slope, pole, raw), lanes);
            store(dc + v * W, through(by_residue * t.g[v], t.d[v], raw), lanes);
            store(db + v * W, through(by_residue * t.d[v], t.g[v], raw), lanes);
        }
    }
    const float sum = sum_lanes(total);
    return sum < 0.f ? 0.f : sum;  // keeps a NaN
}

}  // namespace

void output_distance(const OutputDistance& f) {
    const int64_t each = ceil_div(Token::floats(f.n), W);
    const Buffer memory(each * W * f.threads);
#pragma omp parallel num_threads(f.threads)
    {
        const FlushToZero flush;
        Token t(memory.vectors() + thread_index() * each, f.n);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < f.tokens; ++i) {
            const int64_t at = i * f.n;
            read_states(f.old_a + at, f.new_a + at, f.n, f.n, f.raw, t.a, t.x, t.gap_a);
            read_states(f.old_c + at, f.new_c + at, f.n, f.n, f.raw, t.c, t.d, t.gap_c);
            read_states(f.old_b + at, f.new_b + at, f.n, f.n, f.raw, t.b, t.g, t.gap_b);
            for (int64_t v = 0; v < t.vectors; ++v) {
                t.e[v] = -(t.gap_c[v] * t.g[v] + t.c[v] * t.gap_b[v]);
                t.m[v] = -t.c[v] * t.b[v] * t.gap_a[v];
            }
            f.value[i] = f.d_new_a ? energy<true>(t, f.raw, f.d_new_a + at, f.d_new_c + at, f.d_new_b + at)
                                   : energy<false>(t, f.raw, nullptr, nullptr, nullptr);
        }
    }
}

}  // namespace INFSSM_ISA
}  // namespace infssm
