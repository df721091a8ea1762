// Mean states without a scan: what `scan_forward` averages, and its gradients.
#include "scan.h"

namespace infssm::INFSSM_ISA {
namespace {

struct Scratch {
    vf dl[CHUNK], slope[CHUNK], ddl[CHUNK];
    vf *acc_a, *acc_zoh;
    float* sums;  // [CHUNK * n], twice: sums of a and of zoh, or their gradients

    static int64_t padded(int64_t n) { return round_up(CHUNK * n, W); }
    static int64_t vectors(int64_t n) { return 2 * padded(n) + ceil_div(2 * padded(n), W); }
    void place(vf* memory, int64_t n) {
        acc_a = memory;
        acc_zoh = acc_a + padded(n);
        sums = reinterpret_cast<float*>(acc_zoh + padded(n));
    }
};

void step_sizes(const MeanStates& f, const Item& item, const Lanes& lanes, int64_t first, int length, Scratch& s) {
    const Walk delta(f.delta, f.size, item.batch, 0, first);
    const vf bias = f.bias ? load(f.bias + lanes.channel, lanes.count) : vf{};
    for (int t = 0; t < length; ++t) {
        const vf raw = load(delta.at(t) + lanes.channel, lanes.count) + bias;
        delta.expect(t, lanes.channel);
        s.slope[t] = splat(1.f);
        s.dl[t] = f.size.softplus ? softplus(raw, s.slope[t]) : raw;
    }
}

void forward_item(const MeanStates& f, const Cut& cut, const PackedA& A, const Item& item, Scratch& s) {
    const int64_t n = f.size.n;
    for (int64_t chunk = 0; chunk < cut.chunks; ++chunk) {
        const int64_t first = chunk * CHUNK;
        const int length = chunk_length(f.size, chunk);
        vf total_delta[CHUNK] = {};
        memset(s.acc_a, 0, 2 * Scratch::padded(n) * sizeof(vf));
        for (int64_t v = 0; v < cut.vectors; ++v) {
            const Lanes lanes(cut, item, v);
            const vf *A2 = A.scaled.vectors() + lanes.vector * n, *plain = A.plain.vectors() + lanes.vector * n;
            const vf weight = splat(1.f / static_cast<float>(cut.per_group), lanes.count);
            step_sizes(f, item, lanes, first, length, s);
            for (int t = 0; t < length; ++t) total_delta[t] += s.dl[t] * weight;
            for (int64_t j = 0; j < n; ++j) {
                const vf exponent = A2[j];
                for (int t = 0; t < length; ++t) s.acc_a[t * n + j] += exp2(s.dl[t] * exponent) * weight;
                for (int t = 0; f.zoh.data && t < length; ++t) {
                    const vf quotient = exp2_minus_1(s.dl[t] * exponent) / plain[j];
                    s.acc_zoh[t * n + j] += (exponent == vf{} ? s.dl[t] : quotient) * weight;
                }
            }
        }
        const auto walk = [&](const Tokens& x) { return Walk(x, f.size, item.batch, item.group, first); };
        const Walk a = walk(f.a), zoh = walk(f.zoh), delta = walk(f.mean_delta);
        sum_lanes(s.acc_a, length * n, s.sums);
        for (int t = 0; t < length; ++t) {
            memcpy(a.at(t), s.sums + t * n, n * sizeof(float));
            *delta.at(t) = sum_lanes(total_delta[t]);
        }
        if (zoh.row) sum_lanes(s.acc_zoh, length * n, s.sums);
        for (int t = 0; zoh.row && t < length; ++t) memcpy(zoh.at(t), s.sums + t * n, n * sizeof(float));
    }
}

void backward_item(const MeanStates& f, const Cut& cut, const PackedA& A, const Item& item, vf* total_A,
                   vf* total_bias, Scratch& s) {
    const int64_t n = f.size.n;
    const float share = 1.f / static_cast<float>(cut.per_group);
    float *grad_a = s.sums, *grad_zoh = s.sums + Scratch::padded(n);
    for (int64_t chunk = 0; chunk < cut.chunks; ++chunk) {
        const int64_t first = chunk * CHUNK;
        const int length = chunk_length(f.size, chunk);
        const auto walk = [&](const Tokens& x) { return Walk(x, f.size, item.batch, item.group, first); };
        const Walk a = walk(f.a), zoh = walk(f.zoh), delta = walk(f.mean_delta);
        for (int t = 0; t < length; ++t)
            for (int64_t j = 0; j < n; ++j) {
                grad_a[t * n + j] = a.at(t)[j] * share;
                if (zoh.row) grad_zoh[t * n + j] = zoh.at(t)[j] * share;
            }
        for (int64_t v = 0; v < cut.vectors; ++v) {
            const Lanes lanes(cut, item, v);
            const vf *A2 = A.scaled.vectors() + lanes.vector * n, *plain = A.plain.vectors() + lanes.vector * n;
            step_sizes(f, item, lanes, first, length, s);
            for (int t = 0; t < length; ++t) s.ddl[t] = splat(*delta.at(t) * share);
            for (int64_t j = 0; j < n; ++j) {
                const vf exponent = A2[j], coefficient = plain[j];
                vf dA = total_A[lanes.vector * n + j];
                for (int t = 0; t < length; ++t) {
                    const vf dl = s.dl[t], value = exp2(dl * exponent);
                    const vf da = value * grad_a[t * n + j];
                    s.ddl[t] += da * coefficient;
                    dA += da * dl;
                    if (zoh.row) {
                        s.ddl[t] += value * grad_zoh[t * n + j];
                        dA += grad_zoh[t * n + j] * dl * dl * zoh_slope(dl * coefficient, value);
                    }
                }
                total_A[lanes.vector * n + j] = dA;
            }
            const Walk ddelta(f.ddelta, f.size, item.batch, 0, first);
            for (int t = 0; t < length; ++t) {
                const vf draw = s.ddl[t] * s.slope[t];
                store(ddelta.at(t) + lanes.channel, draw, lanes.count);
                total_bias[lanes.vector] += draw;
            }
        }
    }
}

// One item per (batch, group): no block shares to add.
Cut whole_groups(const ScanSizes& size) {
    Cut cut(size);
    cut.blocks = 1;
    cut.block_vectors = cut.vectors;
    cut.items = size.batch * size.groups;
    return cut;
}

}  // namespace

void mean_states_forward(const MeanStates& f) {
    const Cut cut = whole_groups(f.size);
    const PackedA A(cut, f.size, f.A, f.A_channel, f.A_state);
    const int64_t scratch = Scratch::vectors(f.size.n);
    const Buffer memory(scratch * W * f.size.threads);
#pragma omp parallel num_threads(f.size.threads)
    {
        const FlushToZero flush;
        Scratch s;
        s.place(memory.vectors() + thread_index() * scratch, f.size.n);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < cut.items; ++i) forward_item(f, cut, A, Item(cut, f.size, i), s);
    }
}

void mean_states_backward(const MeanStates& f) {
    const Cut cut = whole_groups(f.size);
    const PackedA A(cut, f.size, f.A, f.A_channel, f.A_state);
    const int64_t scratch = Scratch::vectors(f.size.n), n = f.size.n, vectors = cut.total_vectors;
    const Buffer memory(scratch * W * f.size.threads), parts(f.size.batch * vectors * (n + 1) * W);
    vf *total_A = parts.vectors(), *total_bias = total_A + f.size.batch * vectors * n;
    memset(parts.get(), 0, f.size.batch * vectors * (n + 1) * sizeof(vf));
#pragma omp parallel num_threads(f.size.threads)
    {
        const FlushToZero flush;
        Scratch s;
        s.place(memory.vectors() + thread_index() * scratch, n);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < cut.items; ++i) {
            const Item item(cut, f.size, i);
            backward_item(f, cut, A, item, total_A + item.batch * vectors * n, total_bias + item.batch * vectors, s);
        }
    }
    add_totals(cut, f.size, total_A, n, f.dA);
    if (f.dbias) add_totals(cut, f.size, total_bias, 1, f.dbias);
}

}  // namespace infssm::INFSSM_ISA
