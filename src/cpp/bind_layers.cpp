// Scan, mean states, convolution and norm for Python.
#include "bind.h"

namespace infssm {
namespace {

constexpr int64_t EXPONENTIALS = 1 << 17, ELEMENTS = 1 << 15;

Tokens tokens(nb::handle object, const char* name) {  // [batch, tokens, channels]
    const View v = view(object, 3, name);
    return {v.data, v.stride[0], v.stride[1], 0};
}
Tokens grouped(nb::handle object, const char* name) {  // [batch, tokens, groups, n]
    const View v = view(object, 4, name);
    return {v.data, v.stride[0], v.stride[1], v.stride[2]};
}
Tokens per_group(nb::handle object, const char* name) {  // [batch, tokens, groups]
    const View v = view(object, 3, name);
    return {v.data, v.stride[0], v.stride[1], v.stride[2]};
}

struct Inputs {
    ScanSizes size;
    Tokens u, delta, z, B, C;
    const float *A, *D, *bias;
    int64_t A_channel, A_state;

    Inputs(nb::handle u_, nb::handle delta_, nb::handle A_, nb::handle B_, nb::handle C_, nb::handle D_, nb::handle z_,
           nb::handle bias_, bool softplus, bool reverse, int threads) {
        const View a = view(A_, 2, "A"), b = view(B_, 4, "B"), x = view(u_, 3, "u");
        size = {x.shape[0], x.shape[1], x.shape[2], b.shape[2], a.shape[1], softplus, reverse, threads};
        size.threads = worth(threads, size.batch * size.tokens * size.channels * size.n, EXPONENTIALS);
        u = {x.data, x.stride[0], x.stride[1], 0};
        delta = tokens(delta_, "delta"), z = tokens(z_, "z");
        B = {b.data, b.stride[0], b.stride[1], b.stride[2]}, C = grouped(C_, "C");
        A = a.data, A_channel = a.stride[0], A_state = a.stride[1];
        D = flat(D_, 1, "D"), bias = flat(bias_, 1, "delta_bias");
    }
};

void scan_forward(nb::handle u, nb::handle delta, nb::handle A, nb::handle B, nb::handle C, nb::handle D, nb::handle z,
                  nb::handle bias, nb::handle initial_state, bool softplus, bool reverse, int threads, nb::handle y,
                  nb::handle last, nb::handle a, nb::handle mean_delta, nb::handle zoh, nb::handle saved) {
    const Inputs in(u, delta, A, B, C, D, z, bias, softplus, reverse, threads);
    const ScanForward f{in.size, in.u, in.delta, in.z, in.B, in.C, in.A, in.D, in.bias, in.A_channel, in.A_state,
                        flat(initial_state, 3, "initial_state"), tokens(y, "y"), flat(last, 3, "last"),
                        grouped(a, "a"), per_group(mean_delta, "mean_delta"), grouped(zoh, "zoh"),
                        flat(saved, 3, "saved")};
    const nb::gil_scoped_release release;
    active->scan_forward(f);
}

void scan_backward(nb::handle u, nb::handle delta, nb::handle A, nb::handle B, nb::handle C, nb::handle D, nb::handle z,
                   nb::handle bias, bool softplus, bool reverse, int threads, nb::handle saved, nb::handle grad_y,
                   nb::handle grad_last, nb::handle grad_a, nb::handle grad_mean_delta, nb::handle grad_zoh,
                   nb::handle du, nb::handle ddelta, nb::handle dA, nb::handle dB, nb::handle dC, nb::handle dD,
                   nb::handle dz, nb::handle dbias, nb::handle dinitial) {
    const Inputs in(u, delta, A, B, C, D, z, bias, softplus, reverse, threads);
    const ScanBackward f{in.size, in.u, in.delta, in.z, in.B, in.C, in.A, in.D, in.bias, in.A_channel, in.A_state,
                         flat(saved, 3, "saved"), tokens(grad_y, "grad_y"), flat(grad_last, 3, "grad_last"),
                         grouped(grad_a, "grad_a"), per_group(grad_mean_delta, "grad_mean_delta"),
                         grouped(grad_zoh, "grad_zoh"), tokens(du, "du"), tokens(ddelta, "ddelta"), tokens(dz, "dz"),
                         grouped(dB, "dB"), grouped(dC, "dC"), flat(dA, 2, "dA"), flat(dD, 1, "dD"),
                         flat(dbias, 1, "dbias"), flat(dinitial, 3, "dinitial")};
    const nb::gil_scoped_release release;
    active->scan_backward(f);
}

MeanStates mean_states(nb::handle delta, nb::handle A, nb::handle bias, int64_t groups, bool softplus, int threads,
                       nb::handle a, nb::handle mean_delta, nb::handle zoh) {
    const View x = view(delta, 3, "delta"), p = view(A, 2, "A");
    MeanStates f{};
    f.size = {x.shape[0], x.shape[1], x.shape[2], groups, p.shape[1], softplus, false, threads};
    f.size.threads = worth(threads, f.size.batch * f.size.tokens * f.size.channels * f.size.n, EXPONENTIALS);
    f.delta = {x.data, x.stride[0], x.stride[1], 0};
    f.A = p.data, f.A_channel = p.stride[0], f.A_state = p.stride[1], f.bias = flat(bias, 1, "delta_bias");
    f.a = grouped(a, "a"), f.mean_delta = per_group(mean_delta, "mean_delta"), f.zoh = grouped(zoh, "zoh");
    return f;
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
    f.ddelta = tokens(ddelta, "ddelta"), f.dA = flat(dA, 2, "dA"), f.dbias = flat(dbias, 1, "dbias");
    const nb::gil_scoped_release release;
    active->mean_states_backward(f);
}

Conv conv(nb::handle x, nb::handle weight, nb::handle bias, bool silu, bool reverse, int threads) {
    const View in = view(x, 3, "x"), w = view(weight, 2, "weight");
    Conv f{};
    f.batch = in.shape[0], f.tokens = in.shape[1], f.channels = in.shape[2], f.width = w.shape[1];
    f.silu = silu, f.reverse = reverse, f.threads = worth(threads, f.batch * f.tokens * f.channels, ELEMENTS);
    f.x = {in.data, in.stride[0], in.stride[1], 0};
    f.weight = w.data, f.bias = flat(bias, 1, "bias");
    return f;
}

void conv_forward(nb::handle x, nb::handle weight, nb::handle bias, bool silu, bool reverse, int threads, nb::handle y) {
    Conv f = conv(x, weight, bias, silu, reverse, threads);
    f.y = tokens(y, "y");
    const nb::gil_scoped_release release;
    active->conv_forward(f);
}

void conv_backward(nb::handle x, nb::handle weight, nb::handle bias, bool silu, bool reverse, int threads,
                   nb::handle grad_y, nb::handle dx, nb::handle dweight, nb::handle dbias) {
    Conv f = conv(x, weight, bias, silu, reverse, threads);
    f.grad_y = tokens(grad_y, "grad_y"), f.dx = tokens(dx, "dx");
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
