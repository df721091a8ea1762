// What the files that bind kernels to Python share.
#pragma once

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "kernels.h"
#include "tensor_view.h"

namespace infssm {

extern const Kernels* active;  // of the instruction set in use

void bind_layers(nb::module_& m);     // scan, mean states, convolution, norm
void bind_heads(nb::module_& m);      // Mamba-2's scan, large products
void bind_distances(nb::module_& m);  // distances and the lattice of rotations

inline Tokens tokens(const View& v) { return {v.data, v.stride[0], v.stride[1], 0}; }  // [batch, tokens(, channels)]
inline Tokens grouped(const View& v) {  // [batch, tokens, groups(, n)]
    return {v.data, v.stride[0], v.stride[1], v.stride[2]};
}

inline float* flat(nb::handle object, int ndim, const char* name) { return view(object, ndim, name).data; }

// A field of a Python record, by name.
template <size_t N>
struct Name {
    char text[N];
    constexpr Name(const char (&given)[N]) { std::copy_n(given, N, text); }
};
template <Name NAME>
nb::object attribute(nb::handle record) {
    static PyObject* const name = PyUnicode_InternFromString(NAME.text);  // lives as long as the process
    PyObject* const value = PyObject_GetAttr(record.ptr(), name);
    if (!value) throw nb::python_error();
    return nb::steal(value);
}
template <Name NAME>
View field(nb::handle record, int ndim) {  // the record keeps the tensor alive
    return view(attribute<NAME>(record), ndim, NAME.text);
}
template <Name NAME>
bool flag(nb::handle record) {
    return attribute<NAME>(record).is(Py_True);
}

// Waking another thread costs some microseconds; `grain` is the work that is worth it. Results do not depend on it.
inline int worth(int threads, int64_t work, int64_t grain) {
    const int64_t most = work / grain;
    return most < 1 ? 1 : most < threads ? static_cast<int>(most) : threads;
}

constexpr int64_t ELEMENTS = 1 << 15;  // of convolution or norm: work for a thread

inline Conv conv_inputs(nb::handle inputs, int threads) {
    const View x = field<"x">(inputs, 3), weight = field<"weight">(inputs, 2);
    return {.batch = x.shape[0],
            .tokens = x.shape[1],
            .channels = x.shape[2],
            .width = weight.shape[1],
            .silu = flag<"silu">(inputs),
            .reverse = flag<"reverse">(inputs),
            .threads = worth(threads, x.shape[0] * x.shape[1] * x.shape[2], ELEMENTS),
            .x = tokens(x),
            .seq = tokens(field<"seq_idx">(inputs, 2)),
            .weight = weight.data,
            .bias = field<"bias">(inputs, 1).data,
            .y = {},
            .grad_y = {},
            .dx = {},
            .dweight = nullptr,
            .dbias = nullptr,
            .add = false};
}

// Every argument may be None: a tensor that is absent or not wanted.
template <class Result, class... Args>
void define(nb::module_& m, const char* name, Result (*function)(Args...)) {
    m.def(name, function, (static_cast<void>(sizeof(Args)), nb::arg().none())...);
}

}  // namespace infssm
