// Mamba-2's scan and large products for Python.
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

// conv: inputs of the convolution that makes u, B and C, into `convolved`; None: they are there.
void heads_forward(nb::handle inputs, nb::handle y, nb::handle plain, nb::handle saved, int threads, nb::handle conv,
                   nb::handle convolved) {
    Conv first{};
    if (!conv.is_none()) first = conv_inputs(conv, threads), first.y = tokens(view(convolved, 3, "convolved"));
    const HeadsForward f{.in = heads_inputs(inputs, threads),
                         .y = tokens(view(y, 3, "y")),
                         .plain = tokens(view(plain, 3, "plain")),
                         .saved = flat(saved, 3, "saved"),
                         .conv = conv.is_none() ? nullptr : &first};
    const nb::gil_scoped_release release;
    active->heads_forward(f);
}

void heads_backward(nb::handle inputs, nb::handle plain, nb::handle saved, nb::handle grad_y, nb::handle found, int threads,
                    nb::handle conv, nb::handle dconvolved, nb::handle dweight, nb::handle dbias) {
    Conv last{};
    if (!conv.is_none()) {  // its gradient takes the place of what it convolved
        last = conv_inputs(conv, threads);
        last.grad_y = last.dx = tokens(view(dconvolved, 3, "dconvolved"));
        last.dweight = flat(dweight, 2, "dweight"), last.dbias = flat(dbias, 1, "dbias");
    }
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
                          .dbias = field<"delta_bias">(found, 1).data,
                          .conv = conv.is_none() ? nullptr : &last};
    const nb::gil_scoped_release release;
    active->heads_backward(f);
}

// c = a b^T; of each matrix one stride is 1.
void product(nb::handle a, nb::handle b, nb::handle c, int threads) {
    const View x = view(a, 2, "a"), y = view(b, 2, "b"), out = view(c, 2, "c");
    const Product f{.rows = x.shape[0],
                    .columns = y.shape[0],
                    .depth = x.shape[1],
                    .threads = worth(threads, x.shape[0] * x.shape[1] * y.shape[0], PRODUCTS),
                    .a = x.data,
                    .a_row = x.stride[0],
                    .a_depth = x.stride[1],
                    .b = y.data,
                    .b_column = y.stride[0],
                    .b_depth = y.stride[1],
                    .c = out.data,
                    .c_row = out.stride[0]};
    const nb::gil_scoped_release release;
    active->product(f);
}

}  // namespace

void bind_heads(nb::module_& m) {
    m.def("heads_span", [] { return active->heads_span; }, "Tokens of a chunk of Mamba-2's scan.");
    m.def("heads_rows", [] { return active->heads_rows; }, "What n is rounded up to in its saved states.");
    define(m, "product", product);
    define(m, "heads_forward", heads_forward);
    define(m, "heads_backward", heads_backward);
}

}  // namespace infssm
