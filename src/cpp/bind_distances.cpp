// Distances and the lattice of rotations for Python.
#include "bind.h"

namespace infssm {
namespace {

constexpr int64_t PAIRS = 1 << 17;
constexpr int64_t POINTS = 96;  // of a typical quadrature of chordal and geodesic

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

}  // namespace

void bind_distances(nb::module_& m) {
    define(m, "distance", distance);
    define(m, "output_distance", output_distance);
    define(m, "chordal", chordal);
    define(m, "geodesic", geodesic);
    define(m, "lattice_forward", lattice_forward);
    define(m, "lattice_backward", lattice_backward);
}

}  // namespace infssm
