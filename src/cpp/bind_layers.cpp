// Scan, mean states, convolution and norm for Python.
#include "bind.h"

namespace infssm {
namespace {

constexpr int64_t EXPONENTIALS = 1 << 17;

ScanInputs scan_inputs(nb::handle x, int threads) {
    const View u = field<"u">(x, 3), A = field<"A">(x, 2), B = field<"B">(x, 4);
    ScanSizes size{.batch = u.shape[0],
                   .tokens = u.shape[1],
                   .channels = u.shape[2],
                   .groups = B.shape[2],
                   .n = A.shape[1],
                   .softplus = flag<"delta_softplus">(x),
                   .reverse = flag<"reverse">(x),
                   .threads = 1};
    size.threads = worth(threads, size.batch * size.tokens * size.channels * size.n, EXPONENTIALS);
    return {.size = size,
            .u = tokens(u),
            .delta = tokens(field<"delta">(x, 3)),
            .z = tokens(field<"z">(x, 3)),
            .B = grouped(B),
            .C = grouped(field<"C">(x, 4)),
            .seq = tokens(field<"seq_idx">(x, 2)),
            .A = A.data,
            .D = field<"D">(x, 1).data,
            .bias = field<"delta_bias">(x, 1).data,
            .A_channel = A.stride[0],
            .A_state = A.stride[1],
            .initial = field<"initial_state">(x, 3).data};
}

void scan_forward(nb::handle inputs, nb::handle out, int threads, float scale, bool add) {
    const ScanForward f{.in = scan_inputs(inputs, threads),
                        .y = tokens(field<"y">(out, 3)),
                        .last = field<"last">(out, 3).data,
                        .a = grouped(field<"a">(out, 4)),
                        .mean_delta = grouped(field<"delta">(out, 3)),
                        .zoh = grouped(field<"zoh">(out, 4)),
                        .saved = field<"saved">(out, 3).data,
                        .scale = scale,
                        .add = add};
    const nb::gil_scoped_release release;
    active->scan_forward(f);
}

void scan_backward(nb::handle inputs, nb::handle saved, nb::handle grads, nb::handle found, int threads, float scale,
                   bool add) {
    const ScanBackward f{.in = scan_inputs(inputs, threads),
                         .saved = flat(saved, 3, "saved"),
                         .grad_y = tokens(field<"y">(grads, 3)),
                         .grad_last = field<"last">(grads, 3).data,
                         .grad_a = grouped(field<"a">(grads, 4)),
                         .grad_mean_delta = grouped(field<"delta">(grads, 3)),
                         .grad_zoh = grouped(field<"zoh">(grads, 4)),
                         .du = tokens(field<"u">(found, 3)),
                         .ddelta = tokens(field<"delta">(found, 3)),
                         .dz = tokens(field<"z">(found, 3)),
                         .dB = grouped(field<"B">(found, 4)),
                         .dC = grouped(field<"C">(found, 4)),
                         .dA = field<"A">(found, 2).data,
                         .dD = field<"D">(found, 1).data,
                         .dbias = field<"delta_bias">(found, 1).data,
                         .dinitial = field<"initial_state">(found, 3).data,
                         .scale = scale,
                         .add = add};
    const nb::gil_scoped_release release;
    active->scan_backward(f);
}

MeanStates mean_states(nb::handle delta, nb::handle A, nb::handle bias, int64_t groups, bool softplus, int threads,
                       nb::handle a, nb::handle mean_delta, nb::handle zoh) {
    const View x = view(delta, 3, "delta"), p = view(A, 2, "A");
    const int64_t work = x.shape[0] * x.shape[1] * x.shape[2] * p.shape[1];
    return {.size = {.batch = x.shape[0],
                     .tokens = x.shape[1],
                     .channels = x.shape[2],
                     .groups = groups,
                     .n = p.shape[1],
                     .softplus = softplus,
                     .reverse = false,
                     .threads = worth(threads, work, EXPONENTIALS)},
            .delta = tokens(x),
            .A = p.data,
            .bias = flat(bias, 1, "delta_bias"),
            .A_channel = p.stride[0],
            .A_state = p.stride[1],
            .a = grouped(view(a, 4, "a")),
            .mean_delta = grouped(view(mean_delta, 3, "mean_delta")),
            .zoh = grouped(view(zoh, 4, "zoh")),
            .ddelta = {},
            .dA = nullptr,
            .dbias = nullptr};
}

void mean_states_forward(nb::handle delta, nb::handle A, nb::handle bias, int64_t groups, bool softplus, int threads,
                         nb::handle a, nb::handle mean_delta, nb::handle zoh) {
    const MeanStates f = mean_states(delta, A, bias, groups, softplus, threads, a, mean_delta, zoh);
    const nb::gil_scoped_release release;
    active->mean_states_forward(f);
}

void mean_states_backward(nb::handle delta, nb::handle A, nb::handle bias, int64_t groups, bool softplus, int threads,
                          nb::handle a, nb::handle mean_delta, nb::handle zoh, nb::handle ddelta, nb::handle dA,
                          nb::handle dbias) {
    MeanStates f = mean_states(delta, A, bias, groups, softplus, threads, a, mean_delta, zoh);
    f.ddelta = tokens(view(ddelta, 3, "ddelta")), f.dA = flat(dA, 2, "dA"), f.dbias = flat(dbias, 1, "dbias");
    const nb::gil_scoped_release release;
    active->mean_states_backward(f);
}

void conv_forward(nb::handle inputs, nb::handle y, int threads) {
    Conv f = conv_inputs(inputs, threads);
    f.y = tokens(view(y, 3, "y"));
    const nb::gil_scoped_release release;
    active->conv_forward(f);
}

void conv_backward(nb::handle inputs, nb::handle grad_y, nb::handle dx, nb::handle dweight, nb::handle dbias,
                   int threads, bool add) {
    Conv f = conv_inputs(inputs, threads);
    f.add = add;
    f.grad_y = tokens(view(grad_y, 3, "grad_y")), f.dx = tokens(view(dx, 3, "dx"));
    f.dweight = flat(dweight, 2, "dweight"), f.dbias = flat(dbias, 1, "dbias");
    const nb::gil_scoped_release release;
    active->conv_backward(f);
}

Norm norm(nb::handle x, nb::handle weight, float eps, int threads, nb::handle scale) {
    const View in = view(x, 2, "x");
    Norm f{};
    f.rows = in.shape[0], f.channels = in.shape[1], f.eps = eps;
    f.threads = worth(threads, f.rows * f.channels, ELEMENTS);
    f.x = in.data, f.weight = flat(weight, 1, "weight"), f.scale = flat(scale, 1, "scale");
    return f;
}

void norm_forward(nb::handle x, nb::handle residual, nb::handle weight, float eps, int threads, nb::handle normed,
                  nb::handle total, nb::handle scale) {
    Norm f = norm(x, weight, eps, threads, scale);
    f.residual = flat(residual, 2, "residual"), f.normed = flat(normed, 2, "normed"), f.total = flat(total, 2, "total");
    const nb::gil_scoped_release release;
    active->norm_forward(f);
}

void norm_backward(nb::handle total, nb::handle weight, int threads, nb::handle scale, nb::handle grad_normed,
                   nb::handle grad_total, nb::handle dx, nb::handle dweight) {
    Norm f = norm(total, weight, 0.f, threads, scale);
    f.grad_normed = flat(grad_normed, 2, "grad_normed"), f.grad_total = flat(grad_total, 2, "grad_total");
    f.dx = flat(dx, 2, "dx"), f.dweight = flat(dweight, 1, "dweight");
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
