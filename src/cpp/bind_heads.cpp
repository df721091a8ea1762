// Mamba-2's scan for Python.
#include "bind.h"

namespace infssm {
namespace {

constexpr int64_t PRODUCTS = 1 << 17;

HeadsInputs heads_inputs(nb::handle x, int threads) {
    const View u = field<"u">(x, 3), A = field<"A">(x, 1), B = field<"B">(x, 4);
    HeadsInputs in{.batch = u.shape[0],
                   .tokens = u.shape[1],
                   .heads = A.shape[0],
                   .size = u.shape[2] / A.shape[0],
                   .groups = B.shape[2],
                   .n = B.shape[3],
                   .softplus = flag<"delta_softplus">(x),
                   .threads = 1,
                   .u = tokens(u),
                   .delta = tokens(field<"delta">(x, 3)),
                   .z = tokens(field<"z">(x, 3)),
                   .B = grouped(B),
                   .C = grouped(field<"C">(x, 4)),
                   .seq = tokens(field<"seq_idx">(x, 2)),
                   .A = A.data,
                   .D = field<"D">(x, 1).data,
                   .bias = field<"delta_bias">(x, 1).data};
    in.threads = worth(threads, in.batch * in.tokens * u.shape[2] * in.n, PRODUCTS);
    return in;
}

void heads_forward(nb::handle inputs, nb::handle y, nb::handle plain, nb::handle saved, int threads) {
    const HeadsForward f{.in = heads_inputs(inputs, threads),
                         .y = tokens(view(y, 3, "y")),
                         .plain = tokens(view(plain, 3, "plain")),
                         .saved = flat(saved, 3, "saved")};
    const nb::gil_scoped_release release;
    active->heads_forward(f);
}

void heads_backward(nb::handle inputs, nb::handle plain, nb::handle saved, nb::handle grad_y, nb::handle found, int threads) {
    const HeadsBackward f{.in = heads_inputs(inputs, threads),
                          .plain = tokens(view(plain, 3, "plain")),
                          .saved = flat(saved, 3, "saved"),
                          .grad_y = tokens(view(grad_y, 3, "grad_y")),
                          .du = tokens(field<"u">(found, 3)),
                          .ddelta = tokens(field<"delta">(found, 3)),
                          .dz = tokens(field<"z">(found, 3)),
                          .dB = grouped(field<"B">(found, 4)),
                          .dC = grouped(field<"C">(found, 4)),
                          .dA = field<"A">(found, 1).data,
                          .dD = field<"D">(found, 1).data,
                          .dbias = field<"delta_bias">(found, 1).data};
    const nb::gil_scoped_release release;
    active->heads_backward(f);
}

}  // namespace

void bind_heads(nb::module_& m) {
    m.def("heads_span", [] { return active->heads_span; }, "Tokens of a chunk of Mamba-2's scan.");
    m.def("heads_rows", [] { return active->heads_rows; }, "What n is rounded up to in its saved states.");
    define(m, "heads_forward", heads_forward);
    define(m, "heads_backward", heads_backward);
}

}  // namespace infssm
