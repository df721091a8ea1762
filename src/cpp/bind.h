// What the files that bind kernels to Python share.
#pragma once

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kernels.h"
#include "tensor_view.h"

namespace infssm {

extern const Kernels* active;  // of the instruction set in use

void bind_layers(nb::module_& m);     // scan, mean states, convolution, norm
void bind_distances(nb::module_& m);  // distances and the lattice of rotations

inline float* flat(nb::handle object, int ndim, const char* name) { return view(object, ndim, name).data; }

// Waking another thread costs some microseconds; `grain` is the work that is worth it. Results do not depend on it.
inline int worth(int threads, int64_t work, int64_t grain) {
    const int64_t most = work / grain;
    return most < 1 ? 1 : most < threads ? static_cast<int>(most) : threads;
}

// Every argument may be None: a tensor that is absent or not wanted.
template <class... Args>
void define(nb::module_& m, const char* name, void (*function)(Args...)) {
    m.def(name, function, (static_cast<void>(sizeof(Args)), nb::arg().none())...);
}

}  // namespace infssm
