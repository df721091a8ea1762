// What the forward and the backward of the selective scan share: how channels are cut into work, and one step.
//
// Channels are cut into vectors of W within each group, vectors into blocks, and a work item is one (batch, group,
// block). The cut depends only on the shape, never on the number of threads, so results do not either. Tokens are
// walked in chunks in scan order; a reverse scan only walks the pointers the other way.
#pragma once

#include "kernels.h"
#include "memory.h"
#include "simd.h"

namespace infssm::INFSSM_ISA {
namespace {

struct Cut {
    int64_t per_group, vectors, blocks, block_vectors, items, chunks, total_vectors;

    explicit Cut(const ScanSizes& s) {
        // Enough items to keep a few cores busy; fewer, larger blocks mean fewer partial sums of the shared gradients.
        constexpr int64_t wanted_items = 8, least_vectors = 4;
        per_group = s.channels / s.groups;
        vectors = ceil_div(per_group, W);
        const int64_t lanes = s.batch * s.groups > 0 ? s.batch * s.groups : 1;
        const int64_t most = vectors / least_vectors > 1 ? vectors / least_vectors : 1;
        const int64_t wish = ceil_div(wanted_items, lanes);
        blocks = wish < most ? wish : most;
        block_vectors = vectors > 0 ? ceil_div(vectors, blocks) : 0;
        blocks = vectors > 0 ? ceil_div(vectors, block_vectors) : 0;
        items = s.batch * s.groups * blocks;
        chunks = ceil_div(s.tokens, CHUNK);
        total_vectors = s.groups * vectors;
    }
};

struct Item {
    int64_t batch, group, block, first, last;  // vectors [first, last) of the group

    Item(const Cut& cut, const ScanSizes& s, int64_t index) {
        block = index % cut.blocks;
        group = index / cut.blocks % s.groups;
        batch = index / cut.blocks / s.groups;
        first = block * cut.block_vectors;
        last = first + cut.block_vectors < cut.vectors ? first + cut.block_vectors : cut.vectors;
    }
};

struct Lanes {  // one vector of channels
    int64_t vector, channel;
    int count;

    Lanes(const Cut& cut, const Item& item, int64_t v) {
        vector = item.group * cut.vectors + v;
        channel = item.group * cut.per_group + v * W;
        const int64_t rest = cut.per_group - v * W;
        count = rest < W ? static_cast<int>(rest) : W;
    }
};

struct Walk {  // rows of one batch element in scan order
    float* row = nullptr;
    int64_t step = 0;

    Walk() = default;
    Walk(const Tokens& x, const ScanSizes& s, int64_t batch, int64_t group, int64_t first) {
        if (!x.data) return;
        step = s.reverse ? -x.token : x.token;
        row = x.data + batch * x.batch + group * x.group + (s.reverse ? s.tokens - 1 - first : first) * x.token;
    }
    float* at(int64_t t) const { return row + t * step; }

    // Rows lie far apart, so the hardware does not foresee the next vector of channels; ask for it one cache line ahead.
    void expect(int64_t t, int64_t channel, bool write = false) const {
        constexpr int64_t line = 16;
        if (!row) return;
        if (write) __builtin_prefetch(at(t) + channel + line, 1);
        else __builtin_prefetch(at(t) + channel + line, 0);
    }
};

inline int chunk_length(const ScanSizes& s, int64_t chunk) {
    const int64_t rest = s.tokens - chunk * CHUNK;
    return rest < CHUNK ? static_cast<int>(rest) : CHUNK;
}

// A as [vectors][n][W]: times log2(e), as it is, and the largest |A log2(e)| over n per lane.
struct PackedA {
    Buffer scaled, plain, largest;

    PackedA(const Cut& cut, const ScanSizes& s, const float* A, int64_t channel_stride, int64_t state_stride)
        : scaled(cut.total_vectors * s.n * W), plain(cut.total_vectors * s.n * W), largest(cut.total_vectors * W) {
        const Item whole(cut, s, 0);
        for (int64_t g = 0; g < s.groups; ++g)
            for (int64_t v = 0; v < cut.vectors; ++v) {
                Item item = whole;
                item.group = g;
                const Lanes lanes(cut, item, v);
                vf most = {};
                for (int64_t j = 0; j < s.n; ++j) {
                    vf a = {};
                    for (int i = 0; i < lanes.count; ++i) a[i] = A[(lanes.channel + i) * channel_stride + j * state_stride];
                    plain.vectors()[lanes.vector * s.n + j] = a;
                    scaled.vectors()[lanes.vector * s.n + j] = a * LOG2E;
                    // A NaN stays in `most`, so that it never passes for bounded.
                    most = at_least(most, absolute(a * LOG2E));
                    most = a == a ? most : a;
                }
                largest.vectors()[lanes.vector] = most;
            }
    }
};

// [batch, channels, n] <-> [vectors][n][W] of one batch element and one vector.
INFSSM_INLINE void pack_state(const float* source, const Lanes& lanes, int64_t n, vf* h) {
    for (int64_t j = 0; j < n; ++j) {
        h[j] = vf{};
        for (int i = 0; i < lanes.count; ++i) h[j][i] = source[(lanes.channel + i) * n + j];
    }
}
INFSSM_INLINE void unpack_state(const vf* h, const Lanes& lanes, int64_t n, float* target) {
    for (int64_t j = 0; j < n; ++j)
        for (int i = 0; i < lanes.count; ++i) target[(lanes.channel + i) * n + j] = h[j][i];
}

// Add up parts [batch][vectors][width] over the batch, in order, into rows [channels, width].
inline void add_totals(const Cut& cut, const ScanSizes& s, const vf* parts, int64_t width, float* out) {
    const int64_t vectors = cut.total_vectors;
#pragma omp parallel for num_threads(s.threads) schedule(static)
    for (int64_t vector = 0; vector < vectors; ++vector) {
        Item item(cut, s, 0);
        item.group = vector / cut.vectors;
        const Lanes lanes(cut, item, vector % cut.vectors);
        for (int64_t j = 0; j < width; ++j) {
            vf sum = {};
            for (int64_t b = 0; b < s.batch; ++b) sum += parts[(b * vectors + vector) * width + j];
            for (int i = 0; i < lanes.count; ++i) out[(lanes.channel + i) * width + j] = sum[i];
        }
    }
}

// d/dA of (exp(delta A) - 1) / A is delta^2 times this at x = delta A.
INFSSM_INLINE vf zoh_slope(vf x, vf a) {
    vf series = splat(1.f / 45360);
    series = series * x + 1.f / 5760;
    series = series * x + 1.f / 840;
    series = series * x + 1.f / 144;
    series = series * x + 1.f / 30;
    series = series * x + 1.f / 8;
    series = series * x + 1.f / 3;
    series = series * x + 1.f / 2;
    const vf direct = (x * a - (a - 1.f)) / (x * x);
    return absolute(x) < splat(0.5f) ? series : direct;
}

enum class Exp { bounded, any, scalar };  // how exp(delta A) is had; scalar: computed once for all states
enum class States { none, mean, zoh };

// One chunk of one vector of channels.
struct Tile {
    int length;
    int64_t n;
    vf *dl, *x, *y, *abar;  // [length]: delta, delta u, y so far, exp(delta A) of a scalar transition
    const vf *A2, *A;       // [n]
    const float *B, *C;     // rows of n values
    int64_t B_step, C_step;
    const vf* h_in;  // [n]
    vf* h_out;
    vf *acc_a, *acc_zoh;  // [length * n]
    vf weight;            // 1 / channels per group in the lanes in use
    vf *kept_a, *kept_h;  // [length * G], [(length + 1) * G]: what the backward replays
    const bool* starts;   // [length]: whether a token begins a packed sequence; null if there are none
};

// Which tokens of a chunk begin a packed sequence; null where the scan has no packed sequences.
inline const bool* find_starts(const ScanInputs& in, int64_t batch, int64_t first, int length, bool* starts) {
    if (!in.seq.data) return nullptr;
    const Walk seq(in.seq, in.size, batch, 0, first);
    for (int t = 0; t < length; ++t) starts[t] = first + t > 0 && *seq.at(t) != *seq.at(t - 1);
    return starts;
}

// Advance the states j ... j + G - 1 over the chunk.
template <int G, Exp E, States S, bool KEEP, bool PACKED>
INFSSM_INLINE void advance(const Tile& tile, int64_t j) {
    const Tile q = tile;  // a copy that stores through vectors cannot alias stays in registers
    vf h[G], A2[G];
    for (int i = 0; i < G; ++i) h[i] = q.h_in[j + i], A2[i] = q.A2[j + i];
    const float *B = q.B + j, *C = q.C + j;
    for (int t = 0; t < q.length; ++t, B += q.B_step, C += q.C_step) {
        const vf dl = q.dl[t], x = q.x[t];
        vf a[G], y = q.y[t];
#pragma GCC unroll 8
        for (int i = 0; i < G; ++i) {
            if constexpr (E == Exp::bounded) a[i] = exp2_bounded(dl, A2[i]);
            if constexpr (E == Exp::any) a[i] = exp2(dl * A2[i]);
            if constexpr (E == Exp::scalar) a[i] = q.abar[t];
        }
        const bool starts = PACKED && q.starts[t];
#pragma GCC unroll 8
        for (int i = 0; i < G; ++i) {
            if constexpr (KEEP) q.kept_h[t * G + i] = h[i], q.kept_a[t * G + i] = a[i];
            if (starts) h[i] = vf{};
            h[i] = a[i] * h[i] + x * B[i];
            y += h[i] * C[i];
            if constexpr (S != States::none && !KEEP) q.acc_a[t * q.n + j + i] += a[i] * q.weight;
            if constexpr (S == States::zoh && !KEEP) {
                const vf quotient = exp2_minus_1(dl * A2[i]) / q.A[j + i];
                q.acc_zoh[t * q.n + j + i] += (A2[i] == vf{} ? dl : quotient) * q.weight;
            }
        }
        q.y[t] = y;
    }
    for (int i = 0; i < G; ++i) {
        if constexpr (KEEP) q.kept_h[q.length * G + i] = h[i];
        if constexpr (!KEEP) q.h_out[j + i] = h[i];
    }
}

// The instance of Kernel::run for a chunk.
template <class Kernel, Exp E, States S>
auto pick(bool packed) {
    return packed ? Kernel::template run<E, S, true> : Kernel::template run<E, S, false>;
}
template <class Kernel>
auto pick(Exp exp, States states, bool packed) {
    using enum States;
    if (states == zoh) return pick<Kernel, Exp::any, zoh>(packed);
    if (exp == Exp::scalar) return states == mean ? pick<Kernel, Exp::scalar, mean>(packed) : pick<Kernel, Exp::scalar, none>(packed);
    if (exp == Exp::any) return states == mean ? pick<Kernel, Exp::any, mean>(packed) : pick<Kernel, Exp::any, none>(packed);
    return states == mean ? pick<Kernel, Exp::bounded, mean>(packed) : pick<Kernel, Exp::bounded, none>(packed);
}

}  // namespace
}  // namespace infssm::INFSSM_ISA
