// Distances and the lattice of rotations for Python.
#include "bind.h"

namespace infssm {
namespace {

constexpr int64_t PAIRS = 1 << 17;
constexpr int64_t POINTS = 32;  // frequencies or points that a state meets beside the other states

using Kernel = void (*)(const Distance&);

Kernel named(const std::string& kind) {
#define INFSSM_FIND(name) \
    if (kind == #name) return active->name;
    INFSSM_DISTANCES(INFSSM_FIND)
#undef INFSSM_FIND
    throw std::invalid_argument("no distance " + kind);
}

// Returns how many tokens are not sure.
int64_t distance(const std::string& kind, bool soft, int threads, nb::handle old_a, nb::handle old_c, nb::handle new_a,
                 nb::handle new_c, nb::handle old_b, nb::handle new_b, nb::handle value, nb::handle sure,
                 nb::handle d_old_a, nb::handle d_old_c, nb::handle d_new_a, nb::handle d_new_c, nb::handle d_old_b,
                 nb::handle d_new_b) {
    const View a = view(old_a, 2, "old_a"), c = view(old_c, 2, "old_c");
    Distance f{};
    f.tokens = c.shape[0], f.n = c.shape[1], f.poles = a.shape[1], f.soft = soft;
    f.threads = worth(threads, f.tokens * (f.n + POINTS) * f.n, PAIRS);
    f.old_states = {a.data, c.data, flat(old_b, 2, "old_b")};
    f.new_states = {flat(new_a, 2, "new_a"), flat(new_c, 2, "new_c"), flat(new_b, 2, "new_b")};
    f.value = flat(value, 1, "value"), f.sure = flat(sure, 1, "sure");
    f.to_old = {flat(d_old_a, 2, "d_old_a"), flat(d_old_c, 2, "d_old_c"), flat(d_old_b, 2, "d_old_b")};
    f.to_new = {flat(d_new_a, 2, "d_new_a"), flat(d_new_c, 2, "d_new_c"), flat(d_new_b, 2, "d_new_b")};
    const Kernel kernel = named(kind);
    const nb::gil_scoped_release release;
    kernel(f);
    int64_t unsure = 0;
    for (int64_t i = 0; i < f.tokens; ++i) unsure += f.sure[i] == 0.f;
    return unsure;
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

}  // namespace

void bind_distances(nb::module_& m) {
    define(m, "distance", distance);
    define(m, "lattice_forward", lattice_forward);
    define(m, "lattice_backward", lattice_backward);
}

}  // namespace infssm
