// Selective scan, forward: y, last state, mean states, and the states the backward starts its chunks from.
#include "scan.h"

namespace infssm::INFSSM_ISA {
namespace {

constexpr int GROUP = W == 16 ? 4 : 2;  // states held in registers at a time: 32 registers with AVX-512, else 16

struct AdvanceAll {
    template <Exp E, States S, bool PACKED>
    __attribute__((noinline)) static void run(const Tile& q) {
        int64_t j = 0;
        for (; j + GROUP <= q.n; j += GROUP) advance<GROUP, E, S, false, PACKED>(q, j);
        for (; j < q.n; ++j) advance<1, E, S, false, PACKED>(q, j);
    }
};

struct Scratch {
    vf steps[4][CHUNK];
    vf* acc_a;      // [CHUNK * n], then acc_zoh, then the mean of delta [CHUNK]
    vf* acc_zoh;
    vf* acc_delta;
    float* sums;    // [CHUNK * n]
    vf* carry;      // [block_vectors * n]

    static int64_t padded(int64_t n) { return ceil_div(CHUNK * n, W) * W; }
    static int64_t floats(const Cut& cut, int64_t n) {
        return W * (2 * padded(n) + ceil_div(CHUNK, W) * W + cut.block_vectors * n) + padded(n);
    }
    Scratch(vf* memory, const Cut& cut, int64_t n) {
        acc_a = memory;
        acc_zoh = acc_a + padded(n);
        acc_delta = acc_zoh + padded(n);
        carry = acc_delta + ceil_div(CHUNK, W) * W;
        sums = reinterpret_cast<float*>(carry + cut.block_vectors * n);
    }
};

// Delta, delta * u and D * u of the chunk; says whether all exponents are bounded.
template <bool FULL>
__attribute__((noinline)) bool prepare(const ScanForward& f, const Item& item, const Lanes& lanes, int64_t first, const vf largest, Tile& q) {
    const int count = FULL ? W : lanes.count;
    const auto walk = [&](const Tokens& x) { return Walk(x, f.in.size, item.batch, 0, first); };
    const Walk u = walk(f.in.u), delta = walk(f.in.delta), z = walk(f.in.z), y = walk(f.y);
    const vf bias = f.in.bias ? load(f.in.bias + lanes.channel, count) : vf{};
    const vf D = f.in.D ? load(f.in.D + lanes.channel, count) : vf{};
    vi beyond = {};
    for (int t = 0; t < q.length; ++t) {
        const vf ut = load(u.at(t) + lanes.channel, count);
        const vf raw = load(delta.at(t) + lanes.channel, count) + bias;
        const vf dl = f.in.size.softplus ? softplus(raw) : raw;
        q.dl[t] = dl;
        q.x[t] = dl * ut;
        q.y[t] = D * ut;
        u.expect(t, lanes.channel), delta.expect(t, lanes.channel), z.expect(t, lanes.channel);
        y.expect(t, lanes.channel, true);
        beyond |= ~(absolute(dl) * largest <= splat(EXP2_LIMIT));
    }
    return !any(beyond);
}

template <bool FULL>
__attribute__((noinline)) void finish(const ScanForward& f, const Item& item, const Lanes& lanes, int64_t first, const Tile& q) {
    const int count = FULL ? W : lanes.count;
    const Walk y(f.y, f.in.size, item.batch, 0, first), z(f.in.z, f.in.size, item.batch, 0, first);
    for (int t = 0; t < q.length; ++t) {
        vf value = q.y[t] * f.scale;
        if (f.in.z.data) {
            const vf gate = load(z.at(t) + lanes.channel, count);
            value *= gate * sigmoid(gate);
        }
        float* const place = y.at(t) + lanes.channel;
        store(place, f.add ? value + load(place, count) : value, count);
    }
}

// Where a work item puts its share of the mean states: the output itself, or its block's own copy.
struct Shares {
    Tokens a, delta, zoh;
};

void write_means(const Shares& out, const ScanForward& f, const Item& item, int64_t first, int length, Scratch& s) {
    const int64_t n = f.in.size.n;
    const Walk a(out.a, f.in.size, item.batch, item.group, first), zoh(out.zoh, f.in.size, item.batch, item.group, first);
    const Walk delta(out.delta, f.in.size, item.batch, item.group, first);
    sum_lanes(s.acc_a, length * n, s.sums);
    for (int t = 0; t < length; ++t) memcpy(a.at(t), s.sums + t * n, n * sizeof(float));
    if (zoh.row) {
        sum_lanes(s.acc_zoh, length * n, s.sums);
        for (int t = 0; t < length; ++t) memcpy(zoh.at(t), s.sums + t * n, n * sizeof(float));
    }
    for (int t = 0; t < length; ++t) *delta.at(t) = sum_lanes(s.acc_delta[t]);
}

void run(const ScanForward& f, const Cut& cut, const PackedA& A, const Item& item, const Shares& shares, Scratch& s) {
    const int64_t n = f.in.size.n;
    const States states = f.zoh.data ? States::zoh : f.a.data ? States::mean : States::none;
    const bool scalar = f.in.A_state == 0 && n > 1;
    vf* saved = reinterpret_cast<vf*>(f.saved);
    const auto slot = [&](int64_t chunk, const Lanes& lanes, int64_t v) {  // the state before `chunk`
        return saved && chunk < cut.chunks ? saved + ((item.batch * cut.chunks + chunk) * cut.total_vectors + lanes.vector) * n
                                           : s.carry + (v - item.first) * n;
    };
    for (int64_t v = item.first; v < item.last; ++v) {
        const Lanes lanes(cut, item, v);
        vf* h = slot(0, lanes, v);
        if (f.in.initial) pack_state(f.in.initial + item.batch * f.in.size.channels * n, lanes, n, h);
        else memset(h, 0, n * sizeof(vf));
    }
    for (int64_t chunk = 0; chunk < cut.chunks; ++chunk) {
        const int64_t first = chunk * CHUNK;
        const int length = chunk_length(f.in.size, chunk);
        const Walk B(f.in.B, f.in.size, item.batch, item.group, first), C(f.in.C, f.in.size, item.batch, item.group, first);
        bool begins[CHUNK];
        const bool* starts = find_starts(f.in, item.batch, first, length, begins);
        if (states != States::none) memset(s.acc_a, 0, reinterpret_cast<char*>(s.carry) - reinterpret_cast<char*>(s.acc_a));
        for (int64_t v = item.first; v < item.last; ++v) {
            const Lanes lanes(cut, item, v);
            const vf *A2 = A.scaled.vectors() + lanes.vector * n, *plain = A.plain.vectors() + lanes.vector * n;
            Tile q{.length = length,
                   .n = n,
                   .dl = s.steps[0],
                   .x = s.steps[1],
                   .y = s.steps[2],
                   .abar = s.steps[3],
                   .A2 = A2,
                   .A = plain,
                   .B = B.row,
                   .C = C.row,
                   .B_step = B.step,
                   .C_step = C.step,
                   .h_in = slot(chunk, lanes, v),
                   .h_out = slot(chunk + 1, lanes, v),
                   .acc_a = s.acc_a,
                   .acc_zoh = s.acc_zoh,
                   .weight = splat(1.f / static_cast<float>(cut.per_group), lanes.count),
                   .kept_a = nullptr,
                   .kept_h = nullptr,
                   .starts = starts};
            const bool full = lanes.count == W;
            const bool bounded =
                (full ? prepare<true> : prepare<false>)(f, item, lanes, first, A.largest.vectors()[lanes.vector], q);
            if (scalar)
                for (int t = 0; t < length; ++t) q.abar[t] = exp2(q.dl[t] * A2[0]);
            pick<AdvanceAll>(scalar ? Exp::scalar : bounded ? Exp::bounded : Exp::any, states, starts != nullptr)(q);
            if (states != States::none)
                for (int t = 0; t < length; ++t) s.acc_delta[t] += q.dl[t] * q.weight;
            (full ? finish<true> : finish<false>)(f, item, lanes, first, q);
        }
        if (states != States::none) write_means(shares, f, item, first, length, s);
    }
    if (f.last)
        for (int64_t v = item.first; v < item.last; ++v) {
            const Lanes lanes(cut, item, v);
            unpack_state(slot(cut.chunks, lanes, v), lanes, n, f.last + item.batch * f.in.size.channels * n);
        }
}

}  // namespace

void scan_forward(const ScanForward& f) {
    const ScanSizes& size = f.in.size;
    const Cut cut(size);
    if (cut.items == 0) return;
    const PackedA A(cut, size, f.in.A, f.in.A_channel, f.in.A_state);
    const int64_t scratch = ceil_div(Scratch::floats(cut, size.n), W);
    const Buffer memory(scratch * W * size.threads);
    // Means are contiguous: blocks after the first keep their shares apart, to be added in a fixed order.
    const int64_t rows = size.batch * size.tokens * size.groups, count = rows * size.n;
    const int64_t share = f.a.data ? count + rows + (f.zoh.data ? count : 0) : 0;
    const Buffer apart(share * (cut.blocks - 1));
    const auto shares_of = [&](int64_t block) {
        Shares out{f.a, f.mean_delta, f.zoh};
        if (block == 0 || !f.a.data) return out;
        out.a.data = apart.get() + share * (block - 1);
        out.delta.data = out.a.data + count;
        if (out.zoh.data) out.zoh.data = out.delta.data + rows;
        return out;
    };
#pragma omp parallel num_threads(size.threads)
    {
        const FlushToZero flush;
        Scratch s(memory.vectors() + thread_index() * scratch, cut, size.n);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < cut.items; ++i) {
            const Item item(cut, size, i);
            run(f, cut, A, item, shares_of(item.block), s);
        }
    }
    for (int64_t block = 1; f.a.data && block < cut.blocks; ++block) {
        const Shares out = shares_of(block);
        for (int64_t i = 0; i < count; ++i) f.a.data[i] += out.a.data[i];
        for (int64_t i = 0; i < rows; ++i) f.mean_delta.data[i] += out.delta.data[i];
        for (int64_t i = 0; f.zoh.data && i < count; ++i) f.zoh.data[i] += out.zoh.data[i];
    }
}

}  // namespace infssm::INFSSM_ISA
