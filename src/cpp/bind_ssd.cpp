// Mamba-2's scan in chunks for Python.
#include "bind.h"

namespace infssm {

struct SsdArguments {  // or their gradients
    Array<3> u, delta;
    Array<1> A;
    Array<4> B, C;
    Array<1> D;
    Array<3> z;
    Array<1> delta_bias;
    bool delta_softplus;
    Array<2> seq_idx;
};
template <>
struct Fields<SsdArguments> {
    using T = SsdArguments;
    static constexpr std::tuple list{INFSSM_FIELD(u), INFSSM_FIELD(delta), INFSSM_FIELD(A), INFSSM_FIELD(B),
                                     INFSSM_FIELD(C), INFSSM_FIELD(D), INFSSM_FIELD(z), INFSSM_FIELD(delta_bias),
                                     INFSSM_FIELD(delta_softplus), INFSSM_FIELD(seq_idx)};
};

namespace {

constexpr int64_t PRODUCTS = 1 << 17;

SsdInputs ssd_inputs(const SsdArguments& x, int threads) {
    const auto [batch, tokens, channels] = given(x.u).shape;
    const auto [heads] = given(x.A).shape;
    const int64_t groups = given(x.B).shape[2], n = x.B.shape[3];
    expect_split(channels, heads, "channels");
    expect_split(heads, groups, "heads");
    return {.batch = batch,
            .tokens = tokens,
            .heads = heads,
            .size = channels / heads,
            .groups = groups,
            .n = n,
            .softplus = x.delta_softplus,
            .threads = worth(threads, batch * tokens * channels * n, PRODUCTS),
            .u = rows(x.u, {batch, tokens, channels}),
            .delta = rows(given(x.delta), {batch, tokens, heads}),
            .z = rows(x.z, {batch, tokens, channels}),
            .B = rows(x.B, {batch, tokens, groups, n}),
            .C = rows(given(x.C), {batch, tokens, groups, n}),
            .seq = numbers(x.seq_idx, {batch, tokens}),
            .A = flat(x.A, {heads}),
            .D = flat(x.D, {heads}),
            .bias = flat(x.delta_bias, {heads})};
}

// The state before each chunk but the first, [n, head size] of each head filled up to whole tiles.
float* ssd_saved(const Array<3>& saved, const SsdInputs& s) {
    const auto up = [](int64_t number, int64_t unit) { return (number + unit - 1) / unit * unit; };
    const int64_t state = up(s.size, active->lanes) * up(s.n, active->ssd_rows);
    return flat(named(saved, "saved"), {s.batch, (s.tokens - 1) / active->ssd_span, s.heads * state});
}

// conv: what makes u, B and C, into `convolved`; None: they are there.
void ssd_forward(const SsdArguments& inputs, const Array<3>& y, const Array<3>& plain, const Array<3>& saved, int threads,
                 const std::optional<ConvArguments>& convolution, const Array<3>& convolved) {
    const SsdInputs in = ssd_inputs(inputs, threads);
    Conv first{};
    if (convolution) {
        first = conv(*convolution, threads);
        first.y = rows(given(named(convolved, "convolved")), {first.batch, first.tokens, first.channels});
    }
    const int64_t channels = in.heads * in.size;
    const SsdForward f{.in = in,
                       .y = rows(given(named(y, "y")), {in.batch, in.tokens, channels}),
                       .plain = rows(named(plain, "plain"), {in.batch, in.tokens, channels}),
                       .saved = ssd_saved(saved, in),
                       .conv = convolution ? &first : nullptr};
    const nb::gil_scoped_release release;
    active->ssd_forward(f);
}

void ssd_backward(const SsdArguments& inputs, const Array<3>& plain, const Array<3>& saved, const Array<3>& grad_y,
                  const SsdArguments& found, int threads, const std::optional<ConvArguments>& convolution,
                  const Array<3>& dconvolved, const Array<2>& dweight, const Array<1>& dbias) {
    const SsdInputs in = ssd_inputs(inputs, threads);
    const auto& [batch, tokens, heads, size, groups, n, softplus, _threads, u, delta, z, B, C, seq, A, D, bias] = in;
    const int64_t channels = heads * size;
    Conv last{};
    if (convolution) {  // its gradient takes the place of what it convolved
        last = conv(*convolution, threads);
        last.grad_y = last.dx = rows(given(named(dconvolved, "dconvolved")), {last.batch, last.tokens, last.channels});
        last.dweight = flat(given(named(dweight, "dweight")), {last.channels, last.width});
        last.dbias = flat(named(dbias, "dbias"), {last.channels});
    }
    if (tokens > active->ssd_span) given(named(saved, "saved"));
    if (z.data) given(named(plain, "plain"));
    const SsdBackward f{.in = in,
                        .plain = rows(named(plain, "plain"), {batch, tokens, channels}),
                        .saved = ssd_saved(saved, in),
                        .grad_y = rows(given(named(grad_y, "grad")), {batch, tokens, channels}),
                        .du = rows(given(found.u), {batch, tokens, channels}),
                        .ddelta = rows(given(found.delta), {batch, tokens, heads}),
                        .dz = rows(z.data ? given(found.z) : found.z, {batch, tokens, channels}),
                        .dB = rows(given(found.B), {batch, tokens, groups, n}),
                        .dC = rows(given(found.C), {batch, tokens, groups, n}),
                        .dA = flat(found.A, {heads}),
                        .dD = flat(found.D, {heads}),
                        .dbias = flat(found.delta_bias, {heads}),
                        .conv = convolution ? &last : nullptr};
    const nb::gil_scoped_release release;
    active->ssd_backward(f);
}

}  // namespace

void bind_ssd(nb::module_& m) {
    m.def("ssd_span", [] { return active->ssd_span; }, "Tokens of a chunk of Mamba-2's scan.");
    m.def("ssd_rows", [] { return active->ssd_rows; }, "What n is rounded up to in its saved states.");
    define(m, "ssd_forward", ssd_forward);
    define(m, "ssd_backward", ssd_backward);
}

}  // namespace infssm
