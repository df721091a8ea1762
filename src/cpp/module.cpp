// The Python module: turns tensors into kernel arguments and calls the best instruction set this machine has.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "kernels.h"
#include "tensor_view.h"

namespace infssm {

namespace baseline {
extern const Kernels kernels;
}
#ifdef INFSSM_X86
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

namespace {

std::vector<const Kernels*> supported() {  // best first
    std::vector<const Kernels*> found;
#ifdef INFSSM_X86
    __builtin_cpu_init();
    const bool avx2_fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2_fma && __builtin_cpu_supports("avx512f")) found.push_back(&avx512::kernels);
    if (avx2_fma) found.push_back(&avx2::kernels);
#endif
    found.push_back(&baseline::kernels);
    return found;
}

const Kernels* named(const std::string& name) {
    std::string known;
    for (const Kernels* kernels : supported()) {
        if (name == kernels->name) return kernels;
        known += std::string(known.empty() ? "" : ", ") + kernels->name;
    }
    throw std::invalid_argument("INFSSM_ISA=" + name + " is not one of what this machine runs: " + known);
}

const Kernels* initial() {
    const char* wish = std::getenv("INFSSM_ISA");
    return wish && *wish ? named(wish) : supported().front();
}

const Kernels* active = nullptr;

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
float* flat(nb::handle object, int ndim, const char* name) { return view(object, ndim, name).data; }

// Waking another thread costs some microseconds; `grain` is the work that is worth it. Results do not depend on it.
int worth(int threads, int64_t work, int64_t grain) {
    const int64_t most = work / grain;
    return most < 1 ? 1 : most < threads ? static_cast<int>(most) : threads;
}
constexpr int64_t EXPONENTIALS = 1 << 17, ELEMENTS = 1 << 15, PAIRS = 1 << 17;
constexpr int64_t POINTS = 96;  // of a typical quadrature of chordal and geodesic

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

void distance(nb::handle old_a, nb::handle old_c, nb::handle new_a, nb::handle new_c, int kind, bool raw,
              int threads, nb::handle value, nb::handle d_old_a, nb::handle d_old_c, nb::handle d_new_a,
              nb::handle d_new_c) {
    const View a = view(old_a, 2, "old_a"), c = view(old_c, 2, "old_c");
    const int useful = worth(threads, c.shape[0] * c.shape[1] * c.shape[1], PAIRS);
    const Distance f{c.shape[0], c.shape[1], a.shape[1], static_cast<Kind>(kind), raw, useful, a.data, c.data,
                     flat(new_a, 2, "new_a"), flat(new_c, 2, "new_c"), flat(value, 1, "value"),
                     flat(d_old_a, 2, "d_old_a"), flat(d_old_c, 2, "d_old_c"), flat(d_new_a, 2, "d_new_a"),
                     flat(d_new_c, 2, "d_new_c")};
    const nb::gil_scoped_release release;
    active->distance(f);
}

void output_distance(nb::handle old_a, nb::handle old_c, nb::handle old_b, nb::handle new_a, nb::handle new_c,
                     nb::handle new_b, bool raw, int threads, nb::handle value, nb::handle d_new_a, nb::handle d_new_c,
                     nb::handle d_new_b) {
    const View a = view(old_a, 2, "old_a");
    const int useful = worth(threads, a.shape[0] * a.shape[1] * a.shape[1], PAIRS);
    const OutputDistance f{a.shape[0], a.shape[1], raw, useful, a.data, flat(old_c, 2, "old_c"),
                           flat(old_b, 2, "old_b"), flat(new_a, 2, "new_a"), flat(new_c, 2, "new_c"),
                           flat(new_b, 2, "new_b"),
                           flat(value, 1, "value"), flat(d_new_a, 2, "d_new_a"), flat(d_new_c, 2, "d_new_c"),
                           flat(d_new_b, 2, "d_new_b")};
    const nb::gil_scoped_release release;
    active->output_distance(f);
}

Subspaces subspaces(nb::handle old_a, nb::handle new_a, bool raw, int threads, nb::handle value, nb::handle d_old,
                    nb::handle d_new) {
    const View a = view(old_a, 2, "old_a");
    const int useful = worth(threads, a.shape[0] * (a.shape[1] + POINTS) * POINTS, PAIRS);
    return {a.shape[0], a.shape[1], raw, useful, a.data, flat(new_a, 2, "new_a"), flat(value, 1, "value"),
            flat(d_old, 2, "d_old"), flat(d_new, 2, "d_new"), nullptr};
}

void chordal(nb::handle old_a, nb::handle new_a, bool raw, int threads, nb::handle value, nb::handle d_old,
             nb::handle d_new) {
    const Subspaces f = subspaces(old_a, new_a, raw, threads, value, d_old, d_new);
    const nb::gil_scoped_release release;
    active->chordal(f);
}

void geodesic(nb::handle old_a, nb::handle new_a, bool raw, int threads, nb::handle value, nb::handle d_old,
              nb::handle d_new, nb::handle sure) {
    Subspaces f = subspaces(old_a, new_a, raw, threads, value, d_old, d_new);
    f.sure = flat(sure, 1, "sure");
    const nb::gil_scoped_release release;
    active->geodesic(f);
}

Lattice lattice(nb::handle old_a, nb::handle new_a, int threads, nb::handle sine, nb::handle cosine) {
    const View a = view(old_a, 2, "old_a");
    Lattice f{};
    f.systems = a.shape[0], f.n = a.shape[1];
    f.threads = worth(threads, f.systems * f.n * f.n * f.n, PAIRS);
    f.old_a = a.data, f.new_a = flat(new_a, 2, "new_a");
    f.sine = flat(sine, 3, "sine"), f.cosine = flat(cosine, 3, "cosine");
    return f;
}

void lattice_forward(nb::handle old_a, nb::handle new_a, int threads, nb::handle sine, nb::handle cosine) {
    const Lattice f = lattice(old_a, new_a, threads, sine, cosine);
    const nb::gil_scoped_release release;
    active->lattice_forward(f);
}

void lattice_backward(nb::handle old_a, nb::handle new_a, int threads, nb::handle sine, nb::handle cosine,
                      nb::handle grad_sine, nb::handle grad_cosine, nb::handle d_old, nb::handle d_new) {
    Lattice f = lattice(old_a, new_a, threads, sine, cosine);
    f.grad_sine = flat(grad_sine, 3, "grad_sine"), f.grad_cosine = flat(grad_cosine, 3, "grad_cosine");
    f.d_old = flat(d_old, 2, "d_old"), f.d_new = flat(d_new, 2, "d_new");
    const nb::gil_scoped_release release;
    active->lattice_backward(f);
}

// Every argument may be None: a tensor that is absent or not wanted.
template <class... Args>
void define(nb::module_& m, const char* name, void (*function)(Args...)) {
    m.def(name, function, (static_cast<void>(sizeof(Args)), nb::arg().none())...);
}

}  // namespace
}  // namespace infssm

NB_MODULE(_native, m) {
    using namespace infssm;
    active = initial();
    m.doc() = "Compiled kernels of infssm; called through infssm.kernels, which checks the arguments.";
    m.attr("CHUNK") = CHUNK;
    m.def("isa", [] { return std::string(active->name); }, "The instruction set in use.");
    m.def("lanes", [] { return active->lanes; }, "Floats per vector of the instruction set in use.");
    m.def("isas", [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : supported()) names.emplace_back(kernels->name);
        return names;
    }, "The instruction sets this machine runs, best first.");
    m.def("use_isa", [](const std::string& name) { active = named(name); }, "Switch the instruction set (for tests).");
    m.def("exp_rate", [](int64_t repeats, int threads) { return active->exp_rate(repeats, threads); },
          "Compute repeats * threads * 4096 exponentials.");
    define(m, "scan_forward", scan_forward);
    define(m, "scan_backward", scan_backward);
    define(m, "mean_states_forward", mean_states_forward);
    define(m, "mean_states_backward", mean_states_backward);
    define(m, "conv_forward", conv_forward);
    define(m, "conv_backward", conv_backward);
    define(m, "norm_forward", norm_forward);
    define(m, "norm_backward", norm_backward);
    define(m, "distance", distance);
    define(m, "output_distance", output_distance);
    define(m, "chordal", chordal);
    define(m, "geodesic", geodesic);
    define(m, "lattice_forward", lattice_forward);
    define(m, "lattice_backward", lattice_backward);
}
