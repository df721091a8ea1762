// Mamba-2's scan in chunks, forward: y, and the states the backward starts its chunks from.
#include <optional>

#include "conv.h"
#include "ssd.h"

namespace infssm::INFSSM_ISA {

void conv_forward(const Conv&);

namespace {

struct Scratch {
    Decays decays;
    float *B, *C;            // [SPAN][n]
    float *turned;           // [n][PAIR]
    float *products;         // [SPAN / PAIR][SPAN][PAIR]
    float *weights;          // [SPAN][SPAN] of one head
    float *x, *leaving;      // panels [SPAN][N W]: delta u, and as it reaches the state after the chunk
    float *y;                // panels [SPAN][N W]
    float *state;            // panels [n][N W], where states are not saved
    Slices slices;

    static int64_t floats(const SsdCut& cut) {
        const int64_t rows = SPAN * cut.n + W, channels = cut.in_block * cut.size;
        return Decays::floats(cut.in_block) + 2 * rows + round_up(cut.n, W) * PAIR + 2 * SPAN * SPAN +
               3 * SPAN * channels + channels * cut.n;
    }
    void place(float* memory, const SsdCut& cut) {
        const int64_t rows = SPAN * cut.n + W, channels = cut.in_block * cut.size;
        memory = decays.place(memory, cut.in_block);
        B = memory, C = B + rows, turned = C + rows;
        products = turned + round_up(cut.n, W) * PAIR;
        weights = products + SPAN * SPAN;
        x = weights + SPAN * SPAN, leaving = x + SPAN * channels, y = leaving + SPAN * channels;
        state = y + SPAN * channels;
    }
};

template <int N>
__attribute__((noinline)) void pack_inputs(const SsdForward& f, const SsdItem& item, int64_t first, int length, Scratch& s) {
    for (int l = 0; l < length; ++l) {
        const Row u(f.in.u, item.batch, first + l);
        for (const Slice& slice : s.slices) {
            const int64_t place = slice.panel + l * N * W, decay = slice.head * SPAN + l;
            const vf value = u.get(slice) * s.decays.delta[decay];
            store(s.x + place, value);
            store(s.leaving + place, value * s.decays.leave[decay]);
        }
    }
    for (int l = length; l < SPAN; ++l)
        for (const Slice& slice : s.slices)
            for (float* rows : {s.x, s.leaving}) store(rows + slice.panel + l * N * W, vf{});
}

inline void weigh(const Decays& decays, int64_t h, const float* products, float* weights) {
    const vf lanes = counting();
    for (int row = 0; row < SPAN; ++row)
        for (int column = 0; column < row / ROWS * ROWS + ROWS; column += W) {
            const float* product = products + (column / PAIR * SPAN + row) * PAIR + column % PAIR;
            store(weights + row * SPAN + column, decays.inside(h, row, column, lanes) * load(product));
        }
}

// y with skip and gate.
template <int N>
__attribute__((noinline)) void finish(const SsdForward& f, const SsdItem& item, int64_t first, int length, const Scratch& s) {
    for (int l = 0; l < length; ++l) {
        const auto row = [&](const Tokens& x) { return Row(x, item.batch, first + l); };
        const Row u = row(f.in.u), z = row(f.in.z), y = row(f.y), plain = row(f.plain);
        for (const Slice& slice : s.slices) {
            vf value = load(s.y + slice.panel + l * N * W);
            if (plain.data) plain.put(slice, value);
            if (f.in.D) value += f.in.D[item.first + slice.head] * u.get(slice);
            if (z.data) {
                const vf gate = z.get(slice);
                value *= gate * sigmoid(gate);
            }
            y.put(slice, value);
        }
    }
}

// y without skip and gate; state: the one before the chunk, or null where it is 0.
template <int N>
__attribute__((noinline)) void outputs(const SsdCut& cut, const SsdItem& item, int length, const float* state, Scratch& s) {
    const int64_t panels = cut.size / (N * W);
    for (int64_t h = 0; h < item.count; ++h) {
        const float* const enter = s.decays.enter + h * SPAN;
        weigh(s.decays, h, s.products, s.weights);
        for (int64_t q = h * panels; q < (h + 1) * panels; ++q)
            for (int row = 0; row < length; row += ROWS) {
                vf acc[ROWS][N];
                clear(acc);
                if (state) multiply<true>(acc, s.C + row * cut.n, cut.n, state + q * cut.n * N * W, cut.n);
                for (int i = 0; i < ROWS; ++i)
                    for (int j = 0; j < N; ++j) acc[i][j] *= enter[row + i];
                multiply<true>(acc, s.weights + row * SPAN, SPAN, s.x + q * SPAN * N * W, row + ROWS);
                float* const y = s.y + (q * SPAN + row) * N * W;
                for (int i = 0; i < ROWS * N; ++i) store(y + i * W, acc[i / N][i % N]);
            }
    }
}

// The state after the chunk from that before it (null: 0); both may be the same memory.
template <int N>
__attribute__((noinline)) void advance(const SsdCut& cut, const SsdItem& item, const float* before, float* after, const Scratch& s) {
    const int64_t panels = cut.size / (N * W);
    for (int64_t q = 0; q < item.count * panels; ++q)
        for (int64_t j = 0; j < cut.n; j += ROWS) {
            const int64_t place = (q * cut.n + j) * N * W;
            vf acc[ROWS][N];
            clear(acc);
            if (before)
                for (int i = 0; i < ROWS * N; ++i)
                    acc[i / N][i % N] = load(before + place + i * W) * s.decays.through[q / panels];
            multiply<false>(acc, s.B + j, cut.n, s.leaving + q * SPAN * N * W, SPAN);
            for (int i = 0; i < ROWS * N; ++i) store(after + place + i * W, acc[i / N][i % N]);
        }
}

template <int N>
void run(const SsdForward& f, const SsdCut& cut, const SsdItem& item, const Taps* taps, Scratch& s) {
    const float* state = nullptr;
    find_slices(s.slices, N, f.in, cut, item);
    for (int64_t chunk = 0; chunk < cut.chunks; ++chunk) {
        const int64_t first = chunk * SPAN, rest = f.in.tokens - first;
        const int length = static_cast<int>(rest < SPAN ? rest : SPAN);
        if (taps) forward_tokens(*f.conv, *taps, item.batch, 0, f.conv->channels, first, first + length);
        s.decays.fill(f.in, item, first, length);
        pack_rows(f.in.B, item, first, length, f.in.n, cut.n, s.B);
        pack_rows(f.in.C, item, first, length, f.in.n, cut.n, s.C);
        pack_inputs<N>(f, item, first, length, s);
        pair_products(s.B, s.C, cut.n, s.turned, s.products);
        outputs<N>(cut, item, length, state, s);
        finish<N>(f, item, first, length, s);
        if (chunk + 1 == cut.chunks) break;
        const int64_t slot = (item.batch * (cut.chunks - 1) + chunk) * f.in.heads + item.first;
        float* const next = f.saved ? f.saved + slot * cut.state() : s.state;
        advance<N>(cut, item, state, next, s);
        state = next;
    }
}

}  // namespace

extern const int ssd_span, ssd_rows;
const int ssd_span = SPAN, ssd_rows = ROWS;

void ssd_forward(const SsdForward& f) {
    const SsdCut cut(f.in);
    const int64_t scratch = round_up(Scratch::floats(cut), W);
    const Buffer memory(scratch * f.in.threads);
    std::optional<Taps> taps;  // where an item has all channels of its tokens: it convolves a chunk when its turn comes
    if (f.conv && goes_by_chunks(*f.conv) && cut.blocks * f.in.groups == 1) taps.emplace(*f.conv);
    else if (f.conv) conv_forward(*f.conv);
#pragma omp parallel num_threads(f.in.threads)
    {
        const FlushToZero flush;
        Scratch s;
        s.place(memory.get() + thread_index() * scratch, cut);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < cut.items; ++i) {
            const SsdItem item(cut, f.in.groups, i);
            (cut.size % PAIR == 0 ? run<2> : run<1>)(f, cut, item, taps ? &*taps : nullptr, s);
        }
    }
}

}  // namespace infssm::INFSSM_ISA
