// What the files that bind kernels to Python share: the records that Python passes, and their checked conversion.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "array.h"
#include "kernels.h"

namespace infssm {

extern const Kernels* active;  // of the instruction set in use

void bind_layers(nb::module_& m);     // scan, mean states, convolution, norm
void bind_ssd(nb::module_& m);        // Mamba-2's scan in chunks
void bind_distances(nb::module_& m);  // distances

// [batch, tokens, channels] and [batch, tokens, groups, n] as they lie in memory, the last dimension contiguous.
template <int N>
Tokens rows(const Array<N>& x, const int64_t (&shape)[N]) {
    static_assert(N == 3 || N == 4);
    expect(x, shape);
    if (x.data && x.shape[N - 1] > 1 && x.stride[N - 1] != 1)
        throw Refused(std::string(x.name) + " does not have a contiguous last dimension");
    return {x.data, x.stride[0], x.stride[1], N == 4 ? x.stride[2] : 0};
}
// [batch, tokens] and [batch, tokens, groups] with any strides.
template <int N>
Tokens numbers(const Array<N>& x, const int64_t (&shape)[N]) {
    static_assert(N == 2 || N == 3);
    expect(x, shape);
    return {x.data, x.stride[0], x.stride[1], N == 3 ? x.stride[N - 1] : 0};
}

inline void expect_split(int64_t whole, int64_t parts, const char* what) {
    if (parts < 1 || whole % parts)
        throw Refused(std::to_string(whole) + " " + what + " cannot be split into " + std::to_string(parts) +
                                    " equal parts");
}

// Waking another thread costs some microseconds; `grain` is the work that is worth it. Results do not depend on it.
inline int worth(int threads, int64_t work, int64_t grain) {
    const int64_t most = work / grain;
    return most < 1 ? 1 : most < threads ? static_cast<int>(most) : threads;
}

constexpr int64_t ELEMENTS = 1 << 15;  // of convolution or norm: work for a thread

struct ConvArguments {
    Array<3> x;
    Array<2> weight;
    Array<1> bias;
    bool silu, reverse;
    Array<2> seq_idx;
};
template <>
struct Fields<ConvArguments> {
    using T = ConvArguments;
    static constexpr std::tuple list{INFSSM_FIELD(x), INFSSM_FIELD(weight), INFSSM_FIELD(bias), INFSSM_FIELD(silu),
                                     INFSSM_FIELD(reverse), INFSSM_FIELD(seq_idx)};
};

inline Conv conv(const ConvArguments& in, int threads) {
    const auto [batch, tokens, channels] = given(in.x).shape;
    const int64_t width = given(in.weight).shape[1];
    return {.batch = batch,
            .tokens = tokens,
            .channels = channels,
            .width = width,
            .silu = in.silu,
            .reverse = in.reverse,
            .threads = worth(threads, batch * tokens * channels, ELEMENTS),
            .x = rows(in.x, {batch, tokens, channels}),
            .seq = numbers(in.seq_idx, {batch, tokens}),
            .weight = flat(in.weight, {channels, width}),
            .bias = flat(in.bias, {channels}),
            .y = {},
            .grad_y = {},
            .dx = {},
            .dweight = nullptr,
            .dbias = nullptr,
            .add = false};
}

template <int N, bool COLLAPSED>
Array<N, COLLAPSED> named(Array<N, COLLAPSED> x, const char* name) {
    x.name = name;
    return x;
}

// Every argument may be None: a tensor that is absent or not wanted.
template <class Result, class... Args>
void define(nb::module_& m, const char* name, Result (*function)(Args...)) {
    m.def(name, function, (static_cast<void>(sizeof(Args)), nb::arg().none())...);
}

}  // namespace infssm
