// Scan, mean states, convolution and norm for Python.
#include "bind.h"

namespace infssm {

struct ScanArguments {  // or their gradients
    Array<3> u, delta;
    Array<2> A;
    Array<4> B, C;
    Array<1> D;
    Array<3> z;
    Array<1> delta_bias;
    bool delta_softplus, reverse;
    Array<3> initial_state;
    Array<2> seq_idx;
};
template <>
struct Fields<ScanArguments> {
    using T = ScanArguments;
    static constexpr std::tuple list{INFSSM_FIELD(u), INFSSM_FIELD(delta), INFSSM_FIELD(A), INFSSM_FIELD(B),
                                     INFSSM_FIELD(C), INFSSM_FIELD(D), INFSSM_FIELD(z), INFSSM_FIELD(delta_bias),
                                     INFSSM_FIELD(delta_softplus), INFSSM_FIELD(reverse), INFSSM_FIELD(initial_state),
                                     INFSSM_FIELD(seq_idx)};
};

struct ScanResults {  // or their gradients; of mean states without a scan the last three
    Array<3> y, last;
    Array<4> a;
    Array<3> delta;
    Array<4> zoh;
};
template <>
struct Fields<ScanResults> {
    using T = ScanResults;
    static constexpr std::tuple list{INFSSM_FIELD(y), INFSSM_FIELD(last), INFSSM_FIELD(a), INFSSM_FIELD(delta),
                                     INFSSM_FIELD(zoh)};
};

namespace {

constexpr int64_t EXPONENTIALS = 1 << 17;

ScanSizes sizes(const Array<3>& delta, const Array<2>& A, int64_t groups, bool softplus, bool reverse, int threads) {
    const auto [batch, tokens, channels] = given(delta).shape;
    const int64_t n = given(A).shape[1];
    expect_split(channels, groups, "channels");
    expect(A, {channels, n});
    return {.batch = batch,
            .tokens = tokens,
            .channels = channels,
            .groups = groups,
            .n = n,
            .softplus = softplus,
            .reverse = reverse,
            .threads = worth(threads, batch * tokens * channels * n, EXPONENTIALS)};
}

ScanInputs scan_inputs(const ScanArguments& x, int threads) {
    const ScanSizes size = sizes(x.u, x.A, given(x.B).shape[2], x.delta_softplus, x.reverse, threads);
    const auto& [batch, tokens, channels, groups, n, softplus, reverse, _] = size;
    return {.size = size,
            .u = rows(x.u, {batch, tokens, channels}),
            .delta = rows(given(x.delta), {batch, tokens, channels}),
            .z = rows(x.z, {batch, tokens, channels}),
            .B = rows(x.B, {batch, tokens, groups, n}),
            .C = rows(given(x.C), {batch, tokens, groups, n}),
            .seq = numbers(x.seq_idx, {batch, tokens}),
            .A = x.A.data,
            .D = flat(x.D, {channels}),
            .bias = flat(x.delta_bias, {channels}),
            .A_channel = x.A.stride[0],
            .A_state = x.A.stride[1],
            .initial = flat(x.initial_state, {batch, channels, n})};
}

// States before each chunk, the channels of each group filled up to whole vectors.
float* scan_saved(const Array<3>& saved, const ScanSizes& s) {
    const int64_t lanes = active->lanes, vectors = (s.channels / s.groups + lanes - 1) / lanes;
    return flat(named(saved, "saved"), {s.batch, (s.tokens + CHUNK - 1) / CHUNK, s.groups * vectors * lanes * s.n});
}

void scan_forward(const ScanArguments& inputs, const ScanResults& out, const Array<3>& saved, int threads, float scale,
                  bool add) {
    const ScanInputs in = scan_inputs(inputs, threads);
    const ScanSizes& s = in.size;
    const ScanForward f{.in = in,
                        .y = rows(given(out.y), {s.batch, s.tokens, s.channels}),
                        .last = flat(out.last, {s.batch, s.channels, s.n}),
                        .a = rows(out.a, {s.batch, s.tokens, s.groups, s.n}),
                        .mean_delta = numbers(out.delta, {s.batch, s.tokens, s.groups}),
                        .zoh = rows(out.zoh, {s.batch, s.tokens, s.groups, s.n}),
                        .saved = scan_saved(saved, s),
                        .scale = scale,
                        .add = add};
    const nb::gil_scoped_release release;
    active->scan_forward(f);
}

void scan_backward(const ScanArguments& inputs, const Array<3>& saved, const ScanResults& grads,
                   const ScanArguments& found, int threads, float scale, bool add) {
    const ScanInputs in = scan_inputs(inputs, threads);
    const ScanSizes& s = in.size;
    const ScanBackward f{.in = in,
                         .saved = scan_saved(given(saved), s),
                         .grad_y = rows(given(grads.y), {s.batch, s.tokens, s.channels}),
                         .grad_last = flat(grads.last, {s.batch, s.channels, s.n}),
                         .grad_a = rows(grads.a, {s.batch, s.tokens, s.groups, s.n}),
                         .grad_mean_delta = numbers(grads.delta, {s.batch, s.tokens, s.groups}),
                         .grad_zoh = rows(grads.zoh, {s.batch, s.tokens, s.groups, s.n}),
                         .du = rows(given(found.u), {s.batch, s.tokens, s.channels}),
                         .ddelta = rows(given(found.delta), {s.batch, s.tokens, s.channels}),
                         .dz = rows(found.z, {s.batch, s.tokens, s.channels}),
                         .dB = rows(given(found.B), {s.batch, s.tokens, s.groups, s.n}),
                         .dC = rows(given(found.C), {s.batch, s.tokens, s.groups, s.n}),
                         .dA = flat(given(found.A), {s.channels, s.n}),
                         .dD = flat(found.D, {s.channels}),
                         .dbias = flat(found.delta_bias, {s.channels}),
                         .dinitial = flat(found.initial_state, {s.batch, s.channels, s.n}),
                         .scale = scale,
                         .add = add};
    const nb::gil_scoped_release release;
    active->scan_backward(f);
}

MeanStates mean_states(const Array<3>& delta, const Array<2>& A, const Array<1>& bias, int64_t groups, bool softplus,
                       int threads, const ScanResults& means) {
    const ScanSizes s = sizes(named(delta, "delta"), named(A, "A"), groups, softplus, false, threads);
    return {.size = s,
            .delta = rows(named(delta, "delta"), {s.batch, s.tokens, s.channels}),
            .A = A.data,
            .bias = flat(named(bias, "delta_bias"), {s.channels}),
            .A_channel = A.stride[0],
            .A_state = A.stride[1],
            .a = rows(given(means.a), {s.batch, s.tokens, groups, s.n}),
            .mean_delta = numbers(given(means.delta), {s.batch, s.tokens, groups}),
            .zoh = rows(means.zoh, {s.batch, s.tokens, groups, s.n}),
            .ddelta = {},
            .dA = nullptr,
            .dbias = nullptr};
}

void mean_states_forward(const Array<3>& delta, const Array<2>& A, const Array<1>& bias, int64_t groups, bool softplus,
                         int threads, const ScanResults& means) {
    const MeanStates f = mean_states(delta, A, bias, groups, softplus, threads, means);
    const nb::gil_scoped_release release;
    active->mean_states_forward(f);
}

void mean_states_backward(const Array<3>& delta, const Array<2>& A, const Array<1>& bias, int64_t groups, bool softplus,
                          int threads, const ScanResults& grads, const Array<3>& ddelta, const Array<2>& dA,
                          const Array<1>& dbias) {
    MeanStates f = mean_states(delta, A, bias, groups, softplus, threads, grads);
    f.ddelta = rows(given(ddelta), {f.size.batch, f.size.tokens, f.size.channels});
    f.dA = flat(given(dA), {f.size.channels, f.size.n}), f.dbias = flat(dbias, {f.size.channels});
    const nb::gil_scoped_release release;
    active->mean_states_backward(f);
}

void conv_forward(const ConvArguments& inputs, const Array<3>& y, int threads) {
    Conv f = conv(inputs, threads);
    f.y = rows(given(named(y, "y")), {f.batch, f.tokens, f.channels});
    const nb::gil_scoped_release release;
    active->conv_forward(f);
}

void conv_backward(const ConvArguments& inputs, const Array<3>& grad_y, const Array<3>& dx, const Array<2>& dweight,
                   const Array<1>& dbias, int threads, bool add) {
    Conv f = conv(inputs, threads);
    f.add = add;
    f.grad_y = rows(given(named(grad_y, "grad")), {f.batch, f.tokens, f.channels});
    f.dx = rows(given(named(dx, "dx")), {f.batch, f.tokens, f.channels});
    f.dweight = flat(given(named(dweight, "dweight")), {f.channels, f.width});
    f.dbias = flat(named(dbias, "dbias"), {f.channels});
    const nb::gil_scoped_release release;
    active->conv_backward(f);
}

Norm norm(const Rows& x, const Array<1>& weight, float eps, int threads, const Numbers& scale) {
    const auto [rows, channels] = given(named(x, "x")).shape;
    Norm f{};
    f.rows = rows, f.channels = channels, f.eps = eps;
    f.threads = worth(threads, rows * channels, ELEMENTS);
    f.x = flat(named(x, "x"), {rows, channels});
    f.weight = flat(given(named(weight, "weight")), {channels});
    f.scale = flat(given(named(scale, "scale")), {rows});
    return f;
}

void norm_forward(const Rows& x, const Rows& residual, const Array<1>& weight, float eps, int threads,
                  const Rows& normed, const Rows& total, const Numbers& scale) {
    Norm f = norm(x, weight, eps, threads, scale);
    f.residual = flat(named(residual, "residual"), {f.rows, f.channels});
    f.normed = flat(given(named(normed, "normed")), {f.rows, f.channels});
    f.total = flat(named(total, "total"), {f.rows, f.channels});
    const nb::gil_scoped_release release;
    active->norm_forward(f);
}

void norm_backward(const Rows& total, const Array<1>& weight, int threads, const Numbers& scale,
                   const Rows& grad_normed, const Rows& grad_total, const Rows& dx, const Array<1>& dweight) {
    Norm f = norm(total, weight, 0.f, threads, scale);
    f.grad_normed = flat(given(named(grad_normed, "grad_normed")), {f.rows, f.channels});
    f.grad_total = flat(named(grad_total, "grad_total"), {f.rows, f.channels});
    f.dx = flat(given(named(dx, "dx")), {f.rows, f.channels});
    f.dweight = flat(given(named(dweight, "dweight")), {f.channels});
    const nb::gil_scoped_release release;
    active->norm_backward(f);
}

}  // namespace

void bind_layers(nb::module_& m) {
    define(m, "scan_forward", scan_forward);
    define(m, "scan_backward", scan_backward);
    define(m, "mean_states_forward", mean_states_forward);
    define(m, "mean_states_backward", mean_states_backward);
    define(m, "conv_forward", conv_forward);
    define(m, "conv_backward", conv_backward);
    define(m, "norm_forward", norm_forward);
    define(m, "norm_backward", norm_backward);
}

}  // namespace infssm
