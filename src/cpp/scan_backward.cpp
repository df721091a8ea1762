// Selective scan, backward: chunks from last to first, each replayed from its saved state and then pulled back.
#include "scan.h"

namespace infssm::INFSSM_ISA {
namespace {

constexpr int GROUP = 4;  // states held in registers at a time

struct Scratch {
    vf dl[CHUNK], x[CHUNK], y[CHUNK], abar[CHUNK], dy[CHUNK], slope[CHUNK], gate[CHUNK];
    vf ddl[CHUNK], dx[CHUNK];  // gradients of delta (but through delta u) and of delta u
    vf kept_a[CHUNK * GROUP], kept_h[(CHUNK + 1) * GROUP];
    vf *acc_B, *acc_C;  // [CHUNK * n]
    vf* carry;          // [block_vectors * n] gradient of the state after the chunk
    float *grad_a, *grad_zoh, *sums;  // [CHUNK * n]
    float grad_delta[CHUNK];

    static int64_t padded(int64_t n) { return ceil_div(CHUNK * n, W) * W; }
    // From acc_B to acc_C: never whole pages, which would make the processor take a load of one for a store to the other.
    static int64_t distance(int64_t n) { return padded(n) + 8; }
    static int64_t vectors(const Cut& cut, int64_t n) {
        return 2 * distance(n) + cut.block_vectors * n + ceil_div(3 * padded(n), W);
    }
    void place(vf* memory, const Cut& cut, int64_t n) {
        acc_B = memory;
        acc_C = acc_B + distance(n);
        carry = acc_C + distance(n);
        grad_a = reinterpret_cast<float*>(carry + cut.block_vectors * n);
        grad_zoh = grad_a + padded(n);
        sums = grad_zoh + padded(n);
    }
};

// Sums over the tokens that stay apart per batch element: [vectors][n] and [vectors].
struct Totals {
    vf *A, *D, *bias;
};

// Pull the gradients of the states j ... j + G - 1 back through the chunk that `advance` kept.
template <int G, States S, bool PACKED>
INFSSM_INLINE void pull(const Tile& tile, Scratch& s, vf* carry, vf* total_A, int64_t j) {
    const Tile q = tile;  // as in `advance`
    vf *const all_B = s.acc_B, *const all_C = s.acc_C;
    const float *const grad_a = s.grad_a, *const grad_zoh = s.grad_zoh;
    vf k[G], dA[G], A[G], after[G];  // `after`: h_t
    for (int i = 0; i < G; ++i) {
        k[i] = carry[j + i], dA[i] = total_A[j + i], A[i] = q.A[j + i];
        after[i] = q.kept_h[q.length * G + i];
    }
    for (int t = q.length - 1; t >= 0; --t) {
        const float *B = q.B + t * q.B_step + j, *C = q.C + t * q.C_step + j;
        const vf dy = s.dy[t], x = q.x[t], dl = q.dl[t];
        vf ddl = s.ddl[t], dx = s.dx[t];
        vf *acc_B = all_B + t * q.n + j, *acc_C = all_C + t * q.n + j;
#pragma GCC unroll 8
        for (int i = 0; i < G; ++i) {
            const vf a = q.kept_a[t * G + i];
            const vf g = k[i] + dy * C[i];  // gradient of h_t
            const vf before = q.kept_h[t * G + i];
            acc_C[i] += dy * after[i];
            acc_B[i] += x * g;
            dx += g * B[i];
            k[i] = g * a;
            if (PACKED && q.starts[t]) k[i] = vf{};
            vf da = k[i] * before;  // gradient of delta A
            after[i] = before;
            if constexpr (S != States::none) da += a * grad_a[t * q.n + j + i];
            ddl += da * A[i];
            dA[i] += da * dl;
            if constexpr (S == States::zoh) {
                const vf grad = splat(grad_zoh[t * q.n + j + i]);
                ddl += grad * a;
                dA[i] += grad * dl * dl * zoh_slope(dl * A[i], a);
            }
        }
        s.ddl[t] = ddl;
        s.dx[t] = dx;
    }
    for (int i = 0; i < G; ++i) carry[j + i] = k[i], total_A[j + i] = dA[i];
}

struct ReplayAndPull {
    template <Exp E, States S, bool PACKED>
    __attribute__((noinline)) static void run(const Tile& q, Scratch& s, vf* carry, vf* total_A) {
        int64_t j = 0;
        for (; j + GROUP <= q.n; j += GROUP) {
            advance<GROUP, E, S, true, PACKED>(q, j);
            pull<GROUP, S, PACKED>(q, s, carry, total_A, j);
        }
        for (; j < q.n; ++j) {
            advance<1, E, S, true, PACKED>(q, j);
            pull<1, S, PACKED>(q, s, carry, total_A, j);
        }
    }
};

// Everything per token and channel that the states need; says whether all exponents are bounded.
template <bool FULL>
__attribute__((noinline)) bool prepare(const ScanBackward& f, const Item& item, const Lanes& lanes, int64_t first, vf largest, int length,
             Scratch& s, vf& total_D) {
    const int count = FULL ? W : lanes.count;
    const auto walk = [&](const Tokens& x) { return Walk(x, f.in.size, item.batch, 0, first); };
    const Walk u = walk(f.in.u), delta = walk(f.in.delta), z = walk(f.in.z), grad = walk(f.grad_y);
    const Walk du = walk(f.du), ddelta = walk(f.ddelta), dz = walk(f.dz);
    const vf bias = f.in.bias ? load(f.in.bias + lanes.channel, count) : vf{};
    const vf D = f.in.D ? load(f.in.D + lanes.channel, count) : vf{};
    vi beyond = {};
    for (int t = 0; t < length; ++t) {
        const vf ut = load(u.at(t) + lanes.channel, count);
        const vf raw = load(delta.at(t) + lanes.channel, count) + bias;
        const vf g = load(grad.at(t) + lanes.channel, count) * f.scale;
        vf slope = splat(1.f);
        const vf dl = f.in.size.softplus ? softplus(raw, slope) : raw;
        if (f.in.z.data) {
            const vf gate = load(z.at(t) + lanes.channel, count);
            const vf sig = sigmoid(gate), silu = gate * sig;
            s.dy[t] = g * silu;
            s.gate[t] = g * (sig + silu * (1.f - sig));
        } else {
            s.dy[t] = g;
        }
        s.dl[t] = dl;
        s.slope[t] = slope;
        s.x[t] = dl * ut;
        s.y[t] = D * ut;
        s.ddl[t] = splat(s.grad_delta[t]);
        s.dx[t] = vf{};
        total_D += s.dy[t] * ut;
        for (const Walk* input : {&u, &delta, &z, &grad}) input->expect(t, lanes.channel);
        for (const Walk* output : {&du, &ddelta, &dz}) output->expect(t, lanes.channel, true);
        beyond |= ~(absolute(dl) * largest <= splat(EXP2_LIMIT));
    }
    return !any(beyond);
}

template <bool FULL>
__attribute__((noinline)) void finish(const ScanBackward& f, const Item& item, const Lanes& lanes, int64_t first, int length, const Scratch& s,
            vf& total_bias) {
    const int count = FULL ? W : lanes.count;
    const auto walk = [&](const Tokens& x) { return Walk(x, f.in.size, item.batch, 0, first); };
    const Walk u = walk(f.in.u), du = walk(f.du), ddelta = walk(f.ddelta), dz = walk(f.dz);
    const vf D = f.in.D ? load(f.in.D + lanes.channel, count) : vf{};
    for (int t = 0; t < length; ++t) {
        const vf ut = load(u.at(t) + lanes.channel, count);
        const vf draw = (s.ddl[t] + ut * s.dx[t]) * s.slope[t];
        store(ddelta.at(t) + lanes.channel, draw, count);
        total_bias += draw;
        store(du.at(t) + lanes.channel, s.dl[t] * s.dx[t] + D * s.dy[t], count);
        if (!dz.row) continue;
        float* const place = dz.at(t) + lanes.channel;
        const vf gate = s.gate[t] * s.y[t];
        store(place, f.add ? gate + load(place, count) : gate, count);
    }
}

// The gradients of the mean states, divided by the number of channels they average.
void read_grads(const ScanBackward& f, const Cut& cut, const Item& item, int64_t first, int length, Scratch& s) {
    const int64_t n = f.in.size.n;
    const float share = 1.f / static_cast<float>(cut.per_group);
    const auto walk = [&](const Tokens& x) { return Walk(x, f.in.size, item.batch, item.group, first); };
    const Walk a = walk(f.grad_a), zoh = walk(f.grad_zoh), delta = walk(f.grad_mean_delta);
    for (int t = 0; t < length; ++t) {
        s.grad_delta[t] = delta.row ? *delta.at(t) * share : 0.f;
        for (int64_t j = 0; a.row && j < n; ++j) s.grad_a[t * n + j] = a.at(t)[j] * share;
        for (int64_t j = 0; zoh.row && j < n; ++j) s.grad_zoh[t * n + j] = zoh.at(t)[j] * share;
    }
}

void write_sums(const vf* acc, const Tokens& out, const ScanBackward& f, const Item& item, int64_t first, int length,
                float* sums) {
    const int64_t n = f.in.size.n;
    const Walk rows(out, f.in.size, item.batch, item.group, first);
    sum_lanes(acc, length * n, sums);
    for (int t = 0; t < length; ++t) memcpy(rows.at(t), sums + t * n, n * sizeof(float));
}

void run(const ScanBackward& f, const Cut& cut, const PackedA& A, const Item& item, const Tokens& dB, const Tokens& dC,
         const Totals& totals, Scratch& s) {
    const int64_t n = f.in.size.n;
    const States states = f.grad_zoh.data ? States::zoh : f.grad_a.data ? States::mean : States::none;
    const bool scalar = f.in.A_state == 0 && n > 1;
    const auto carry = [&](int64_t v) { return s.carry + (v - item.first) * n; };
    const vf* saved = reinterpret_cast<const vf*>(f.saved) + item.batch * cut.chunks * cut.total_vectors * n;
    for (int64_t v = item.first; v < item.last; ++v) {
        const Lanes lanes(cut, item, v);
        if (f.grad_last) pack_state(f.grad_last + item.batch * f.in.size.channels * n, lanes, n, carry(v));
        else memset(carry(v), 0, n * sizeof(vf));
        memset(totals.A + lanes.vector * n, 0, n * sizeof(vf));
        totals.D[lanes.vector] = totals.bias[lanes.vector] = vf{};
    }
    for (int64_t chunk = cut.chunks - 1; chunk >= 0; --chunk) {
        const int64_t first = chunk * CHUNK;
        const int length = chunk_length(f.in.size, chunk);
        const Walk B(f.in.B, f.in.size, item.batch, item.group, first), C(f.in.C, f.in.size, item.batch, item.group, first);
        bool begins[CHUNK];
        const bool* starts = find_starts(f.in, item.batch, first, length, begins);
        read_grads(f, cut, item, first, length, s);
        memset(s.acc_B, 0, 2 * Scratch::distance(n) * sizeof(vf));
        for (int64_t v = item.first; v < item.last; ++v) {
            const Lanes lanes(cut, item, v);
            const vf *A2 = A.scaled.vectors() + lanes.vector * n, *plain = A.plain.vectors() + lanes.vector * n;
            const bool full = lanes.count == W;
            const bool bounded = (full ? prepare<true> : prepare<false>)(
                f, item, lanes, first, A.largest.vectors()[lanes.vector], length, s, totals.D[lanes.vector]);
            if (scalar)
                for (int t = 0; t < length; ++t) s.abar[t] = exp2(s.dl[t] * A2[0]);
            const Tile q{.length = length,
                         .n = n,
                         .dl = s.dl,
                         .x = s.x,
                         .y = s.y,
                         .abar = s.abar,
                         .A2 = A2,
                         .A = plain,
                         .B = B.row,
                         .C = C.row,
                         .B_step = B.step,
                         .C_step = C.step,
                         .h_in = saved + (chunk * cut.total_vectors + lanes.vector) * n,
                         .h_out = nullptr,
                         .acc_a = nullptr,
                         .acc_zoh = nullptr,
                         .weight = vf{},
                         .kept_a = s.kept_a,
                         .kept_h = s.kept_h,
                         .starts = starts};
            const Exp exp = scalar ? Exp::scalar : bounded ? Exp::bounded : Exp::any;
            pick<ReplayAndPull>(exp, states, starts != nullptr)(q, s, carry(v), totals.A + lanes.vector * n);
            (full ? finish<true> : finish<false>)(f, item, lanes, first, length, s, totals.bias[lanes.vector]);
        }
        write_sums(s.acc_B, dB, f, item, first, length, s.sums);
        write_sums(s.acc_C, dC, f, item, first, length, s.sums);
    }
    for (int64_t v = item.first; f.dinitial && v < item.last; ++v)
        unpack_state(carry(v), Lanes(cut, item, v), n, f.dinitial + item.batch * f.in.size.channels * n);
}

// Add `number` contiguous shares of dB or dC to the first, which lies in the output.
void add_shares(const Tokens& out, const ScanSizes& s, const float* shares, int64_t number) {
    const int64_t rows = s.batch * s.tokens * s.groups;
#pragma omp parallel for num_threads(s.threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t token = row / s.groups;
        float* const sum = out.data + token / s.tokens * out.batch + token % s.tokens * out.token + row % s.groups * out.group;
        for (int64_t k = 0; k < number; ++k)
            for (int64_t j = 0; j < s.n; ++j) sum[j] += shares[(k * rows + row) * s.n + j];
    }
}

}  // namespace

void scan_backward(const ScanBackward& f) {
    const ScanSizes& size = f.in.size;
    const Cut cut(size);
    if (cut.items == 0) return;
    const PackedA A(cut, size, f.in.A, f.in.A_channel, f.in.A_state);
    const int64_t scratch = Scratch::vectors(cut, size.n);
    const Buffer memory(scratch * W * size.threads);
    const int64_t per_batch = cut.total_vectors * (size.n + 2) * W;
    const Buffer parts(per_batch * size.batch);
    Totals all{parts.vectors(), nullptr, nullptr};
    all.D = all.A + size.batch * cut.total_vectors * size.n;
    all.bias = all.D + size.batch * cut.total_vectors;
    // Blocks after the first keep their shares of dB and dC apart, to be added in a fixed order.
    const int64_t count = size.batch * size.tokens * size.groups * size.n;
    const Buffer apart(2 * count * (cut.blocks - 1));
    const auto share = [&](const Tokens& out, int64_t block, int64_t which) {
        const int64_t row = size.groups * size.n;
        return block == 0 ? out : Tokens{apart.get() + (which * (cut.blocks - 1) + block - 1) * count, size.tokens * row, row, size.n};
    };
#pragma omp parallel num_threads(size.threads)
    {
        const FlushToZero flush;
        Scratch s;
        s.place(memory.vectors() + thread_index() * scratch, cut, size.n);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < cut.items; ++i) {
            const Item item(cut, size, i);
            const Totals totals{all.A + item.batch * cut.total_vectors * size.n, all.D + item.batch * cut.total_vectors,
                                all.bias + item.batch * cut.total_vectors};
            run(f, cut, A, item, share(f.dB, item.block, 0), share(f.dC, item.block, 1), totals, s);
        }
    }
    add_totals(cut, size, all.A, size.n, f.dA);
    if (f.dD) add_totals(cut, size, all.D, 1, f.dD);
    if (f.dbias) add_totals(cut, size, all.bias, 1, f.dbias);
    if (cut.blocks > 1) {
        add_shares(f.dB, size, apart.get(), cut.blocks - 1);
        add_shares(f.dC, size, apart.get() + count * (cut.blocks - 1), cut.blocks - 1);
    }
}

}  // namespace infssm::INFSSM_ISA
