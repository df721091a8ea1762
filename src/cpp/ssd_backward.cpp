// Mamba-2's scan in chunks, backward: chunks from last to first, each from the state that the forward saved before it.
//
// Names: `later` is the gradient of the state after the chunk. Turned: channels (or states) as rows, tokens as columns.
//
// The gradient of delta_t A is the sum of all that passes token t: what tokens before t send to tokens from t on and to the
// state after the chunk, and what the state before the chunk sends to tokens from t on and to the state after it. Each of
// the four is summed separately. As a difference of larger sums (all that a token receives minus all that it sends), what a
// strong decay leaves would be lost in the rounding of what does not decay: 29 % of dA at A = -16 and delta = 1.3.
#include <optional>

#include "conv.h"
#include "ssd.h"

namespace infssm::INFSSM_ISA {

void conv_backward(const Conv&);

namespace {

struct Scratch {
    Decays decays;
    float *B, *C, *turned, *products, *weights;  // as of the forward
    float *dproducts, *dproducts_turned;         // panels [SPAN / PAIR][SPAN][PAIR], sums over the heads
    float *dy;                                   // panels [SPAN][N W]: gradient of y, then as the state before receives it
    float *dx;                                   // panels [SPAN][N W]: delta u, then its gradient
    float *x_turned;                             // panels [SPAN / PAIR][channels][PAIR]: delta u, then as it leaves the chunk
    float *entered_turned;                       // likewise: the gradient of y as the state before receives it
    float *later;                                // panels [n][N W]
    float *rows;                                 // [n][SPAN], of dB or dC, turned
    float *block;                                // [W][W]
    float *C_turned;                             // [n][SPAN]
    float *pairs;                                // [SPAN][SPAN] of one head: what token j gives token i, times its gradient
    vf *dots_u, *left;                           // [heads][SPAN]: dx u; what a token gives the state after the chunk, times `later`
    float *crossed, *entered;                    // [heads][SPAN]: pairs j < t <= i; what the state before gives a token, times dy
    vf* dots_D;                                  // [heads]
    float* passed;                               // [heads]: what the state before the chunk gives that after it, times `later`
    float *sums_u, *sums_left;                   // [SPAN]
    Slices slices;

    static int64_t each(const SsdCut& cut, float* memory, Scratch* s) {
        const int64_t channels = cut.in_block * cut.size, rows = SPAN * cut.n + W, heads = cut.in_block;
        int64_t used = 0;
        const auto take = [&](float** part, int64_t floats) {
            if (s) *part = memory + used;
            used += round_up(floats, W);
        };
        Scratch none;
        Scratch& t = s ? *s : none;
        for (float** part : {&t.B, &t.C}) take(part, rows);
        take(&t.turned, round_up(cut.n, W) * PAIR);
        for (float** part : {&t.products, &t.weights, &t.pairs, &t.dproducts, &t.dproducts_turned}) take(part, SPAN * SPAN);
        for (float** part : {&t.dy, &t.dx, &t.x_turned, &t.entered_turned})
            take(part, SPAN * channels);
        take(&t.later, channels * cut.n);
        for (float** part : {&t.rows, &t.C_turned}) take(part, round_up(cut.n, W) * SPAN);
        take(&t.block, W * W);
        for (vf** part : {&t.dots_u, &t.left}) take(reinterpret_cast<float**>(part), heads * SPAN * W);
        for (float** part : {&t.crossed, &t.entered}) take(part, heads * SPAN);
        take(reinterpret_cast<float**>(&t.dots_D), heads * W);
        take(&t.passed, heads);
        for (float** part : {&t.sums_u, &t.sums_left}) take(part, SPAN);
        if (s) s->decays.place(memory + used, heads);
        return used + round_up(Decays::floats(heads), W);
    }
};

struct Totals {  // of one batch element: [heads]
    float *A, *D, *bias;
};

// Gradient of y before the gate, the gate's own, and delta u.
template <int N>
__attribute__((noinline)) void pack_inputs(const SsdBackward& f, const SsdItem& item, int64_t first, int length, Scratch& s) {
    memset(s.dots_D, 0, item.count * sizeof(vf));
    for (int l = 0; l < length; ++l) {
        const auto row = [&](const Tokens& x) { return Row(x, item.batch, first + l); };
        const Row u = row(f.in.u), z = row(f.in.z), grad = row(f.grad_y), plain = row(f.plain), dz = row(f.dz);
        for (const Slice& slice : s.slices) {
            const int64_t place = slice.panel + l * N * W, decay = slice.head * SPAN + l;
            const vf input = u.get(slice);
            vf value = grad.get(slice);
            if (z.data) {
                const float D = f.in.D ? f.in.D[item.first + slice.head] : 0.f;
                const vf gate = z.get(slice), rate = sigmoid(gate);
                dz.put(slice, value * (plain.get(slice) + D * input) * (rate * (1.f + gate * (1.f - rate))));
                value *= gate * rate;
            }
            s.dots_D[slice.head] += value * input;
            store(s.dy + place, value);
            store(s.dx + place, input * s.decays.delta[decay]);
        }
    }
    for (int l = length; l < SPAN; ++l)
        for (const Slice& slice : s.slices)
            for (float* rows : {s.dy, s.dx}) store(rows + slice.panel + l * N * W, vf{});
}

// What is read with tokens as columns; dx holds delta u.
template <int N>
__attribute__((noinline)) void turn_inputs(const SsdCut& cut, Scratch& s) {
    const int64_t channels = cut.in_block * cut.size;
    int64_t channel = 0;
    for (const Slice& slice : s.slices) {
        for (int column = 0; column < SPAN; column += W) {
            const int64_t from = slice.panel + column * N * W, to = (column / PAIR * channels + channel) * PAIR + column % PAIR;
            transpose_block(s.dx + from, N * W, s.x_turned + to, PAIR);
            transpose_block(s.dy + from, N * W, s.entered_turned + to, PAIR);
            const vf enter = load(s.decays.enter + slice.head * SPAN + column);
            for (int i = 0; i < W; ++i) store(s.entered_turned + to + i * PAIR, load(s.entered_turned + to + i * PAIR) * enter);
        }
        channel += W;
    }
    for (int64_t j = 0; j < cut.n; j += W)
        for (int column = 0; column < SPAN; column += W)
            transpose_block(s.C + column * cut.n + j, cut.n, s.C_turned + j * SPAN + column, SPAN);
}

// A head's weights, and its share of the gradient of the products C B^T.
template <int N>
__attribute__((noinline)) void pull_weights(const SsdCut& cut, int64_t h, Scratch& s) {
    const int64_t panels = cut.size / (N * W), channels = cut.in_block * cut.size;
    const vf lanes = counting();
    for (int column = 0; column < SPAN; column += PAIR)
        for (int row = column / ROWS * ROWS; row < SPAN; row += ROWS) {
            vf acc[ROWS][2];
            clear(acc);
            const float* const x = s.x_turned + (column / PAIR * channels + h * cut.size) * PAIR;
            for (int64_t q = 0; q < panels; ++q)
                multiply<true>(acc, s.dy + ((h * panels + q) * SPAN + row) * N * W, N * W, x + q * N * W * PAIR, N * W);
            for (int i = 0; i < ROWS; ++i)
                for (int j = 0; j < 2; ++j) {
                    const int64_t place = (column / PAIR * SPAN + row + i) * PAIR + j * W;
                    const vf inside = s.decays.inside(h, row + i, column + j * W, lanes);
                    const vf share = acc[i][j] * inside;
                    const vf product = load(s.products + place);
                    store(s.dproducts + place, h ? load(s.dproducts + place) + share : share);
                    store(s.weights + (row + i) * SPAN + column + j * W, inside * product);
                    store(s.pairs + (row + i) * SPAN + column + j * W, share * product);
                }
        }
}

// What a head's tokens j < t give its tokens i >= t, for every t: sums of columns from the last row up, then over j.
void sum_crossing(int64_t h, Scratch& s) {
    const vf lanes = counting();
    vf columns[SPAN / W] = {}, crossed[SPAN];
    for (int t = SPAN - 1; t >= 0; --t) {
        crossed[t] = vf{};
        for (int v = 0; v * W <= t; ++v) {
            columns[v] += load(s.pairs + t * SPAN + v * W);
            crossed[t] += lanes + static_cast<float>(v * W) < splat(static_cast<float>(t)) ? columns[v] : vf{};
        }
    }
    sum_lanes(crossed, SPAN, s.crossed + h * SPAN);
}

// A head's turned delta u as it leaves the chunk, once its weights are pulled.
void leave_chunk(const SsdCut& cut, int64_t h, Scratch& s) {
    for (int column = 0; column < SPAN; column += W) {
        const vf leave = load(s.decays.leave + h * SPAN + column);
        float* const x = s.x_turned + (column / PAIR * cut.in_block + h) * cut.size * PAIR + column % PAIR;
        for (int64_t c = 0; c < cut.size; ++c) store(x + c * PAIR, load(x + c * PAIR) * leave);
    }
}

// Gradients of delta u into dx, which holds delta u; `later` null: 0.
template <int N>
__attribute__((noinline)) void pull_inputs(const SsdCut& cut, int64_t h, int length, const float* later, Scratch& s) {
    const int64_t panels = cut.size / (N * W);
    const float* const leave = s.decays.leave + h * SPAN;
    vf* const left = s.left + h * SPAN;
    memset(left, 0, SPAN * sizeof(vf));
    for (int64_t q = h * panels; q < (h + 1) * panels; ++q)
        for (int row = 0; row < length; row += ROWS) {
            vf acc[ROWS][N];
            clear(acc);
            if (later) multiply<true>(acc, s.B + row * cut.n, cut.n, later + q * cut.n * N * W, cut.n);
            const int64_t place = (q * SPAN + row) * N * W;
            for (int i = 0; i < ROWS; ++i)
                for (int j = 0; j < N; ++j) {
                    acc[i][j] *= leave[row + i];
                    left[row + i] += acc[i][j] * load(s.dx + place + (i * N + j) * W);
                }
            multiply<false>(acc, s.weights + row * SPAN + row, SPAN, s.dy + place, SPAN - row);
            for (int i = 0; i < ROWS * N; ++i) store(s.dx + place + i * W, acc[i / N][i % N]);
        }
}

// Gradients of u from those of delta u; dy becomes what the state before the chunk receives.
template <int N>
__attribute__((noinline)) void finish(const SsdBackward& f, const SsdItem& item, int64_t first, int length, Scratch& s) {
    memset(s.dots_u, 0, item.count * SPAN * sizeof(vf));
    for (int l = 0; l < length; ++l) {
        const Row u(f.in.u, item.batch, first + l), du(f.du, item.batch, first + l);
        for (const Slice& slice : s.slices) {
            const int64_t place = slice.panel + l * N * W, decay = slice.head * SPAN + l;
            const float D = f.in.D ? f.in.D[item.first + slice.head] : 0.f;
            const vf dx = load(s.dx + place), dy = load(s.dy + place);
            s.dots_u[decay] += dx * u.get(slice);
            du.put(slice, dx * s.decays.delta[decay] + D * dy);
            store(s.dy + place, dy * s.decays.enter[decay]);
        }
    }
}

// dB or dC of the chunk into rows of n: what goes through states (state and turned inputs; null: nothing), and what
// goes through products. `other` is C for dB; LATER: whose tokens are not before the column, else not after it. For dC,
// what a head's state gives each token is formed on the way: the token's C times the head's share of its gradient.
template <int N, bool LATER>
__attribute__((noinline)) void pull_rows(const SsdBackward& f, const SsdCut& cut, const SsdItem& item, int64_t first, int length,
               const float* state, const float* turned, const float* other, const float* dproducts, const Tokens& out,
               Scratch& s) {
    const int64_t panels = cut.size / (N * W), channels = cut.in_block * cut.size;
    if (!LATER) memset(s.entered, 0, item.count * SPAN * sizeof(float));
    for (int64_t j = 0; j < cut.n; j += ROWS)
        for (int column = 0; column < SPAN; column += PAIR) {
            vf acc[ROWS][2];
            clear(acc);
            for (int64_t h = 0; state && h < item.count; ++h) {
                vf own[ROWS][2];  // of this head
                vf(&sums)[ROWS][2] = LATER ? acc : own;
                if (!LATER) clear(own);
                for (int64_t q = h * panels; q < (h + 1) * panels; ++q) {
                    const float* const rows = state + (q * cut.n + j) * N * W;
                    // The next rows, which are read one number at a time and come from far away.
                    for (int i = 0; column == 0 && i < ROWS * N * W; i += 16) __builtin_prefetch(rows + ROWS * N * W + i);
                    multiply<true>(sums, rows, N * W, turned + (column / PAIR * channels + q * N * W) * PAIR, N * W);
                }
                for (int half = 0; !LATER && half < 2; ++half) {
                    float* const entered = s.entered + h * SPAN + column + half * W;
                    vf dot = load(entered);
                    for (int i = 0; i < ROWS; ++i) {
                        acc[i][half] += own[i][half];
                        dot += own[i][half] * load(s.C_turned + (j + i) * SPAN + column + half * W);
                    }
                    store(entered, dot);
                }
            }
            const int begin = LATER ? column / ROWS * ROWS : 0, end = LATER ? SPAN : column + PAIR;
            multiply<false>(acc, other + begin * cut.n + j, cut.n, dproducts + (column / PAIR * SPAN + begin) * PAIR, end - begin);
            for (int i = 0; i < ROWS; ++i)
                for (int half = 0; half < 2; ++half) store(s.rows + (j + i) * SPAN + column + half * W, acc[i][half]);
        }
    float* const target = out.data + item.batch * out.batch + first * out.token + item.group * out.group;
    for (int l = 0; l < length; l += W)
        for (int64_t j = 0; j < f.in.n; j += W) {
            transpose_block(s.rows + j * SPAN + l, SPAN, s.block, W);
            const int count = static_cast<int>(f.in.n - j < W ? f.in.n - j : W);
            for (int i = 0; i < W && l + i < length; ++i) store(target + (l + i) * out.token + j, load(s.block + i * W), count);
        }
}

// Replaces the gradient of the state after the chunk by that before it, and adds what each state contributes to the other;
// `fresh`: the gradient was 0.
template <int N>
__attribute__((noinline)) void pull_state(const SsdCut& cut, const SsdItem& item, const float* before, bool fresh, Scratch& s) {
    const int64_t panels = cut.size / (N * W);
    for (int64_t h = 0; h < item.count; ++h) {
        vf passed = {};
        for (int64_t q = h * panels; q < (h + 1) * panels; ++q)
            for (int64_t j = 0; j < cut.n; j += ROWS) {
                const int64_t place = (q * cut.n + j) * N * W;
                float* const later = s.later + place;
                vf acc[ROWS][N];
                clear(acc);
                if (!fresh)
                    for (int i = 0; i < ROWS * N; ++i) {
                        acc[i / N][i % N] = load(later + i * W) * s.decays.through[h];
                        passed += acc[i / N][i % N] * load(before + place + i * W);
                    }
                multiply<false>(acc, s.C + j, cut.n, s.dy + q * SPAN * N * W, SPAN);
                for (int i = 0; i < ROWS * N; ++i) store(later + i * W, acc[i / N][i % N]);
            }
        s.passed[h] = sum_lanes(passed);
    }
}

// Gradients of delta, A and the bias, from all that passes each token.
void pull_steps(const SsdBackward& f, const SsdItem& item, int64_t first, int length, const Totals& totals, Scratch& s) {
    for (int64_t h = 0; h < item.count; ++h) {
        const int64_t head = item.first + h;
        const float *const delta = s.decays.delta + h * SPAN, *const slope = s.decays.slope + h * SPAN;
        float* const ddelta = f.ddelta.data + item.batch * f.ddelta.batch + first * f.ddelta.token + head;
        sum_lanes(s.dots_u + h * SPAN, SPAN, s.sums_u);
        sum_lanes(s.left + h * SPAN, SPAN, s.sums_left);
        double left[SPAN], sent = 0;  // by the tokens before each
        for (int l = 0; l < length; ++l) left[l] = sent, sent += s.sums_left[l];
        double entered = s.passed[h], dA = 0, dbias = 0;
        for (int l = length - 1; l >= 0; --l) {
            entered += s.entered[h * SPAN + l];
            const double decay = entered + left[l] + s.crossed[h * SPAN + l];
            const double value = (decay * f.in.A[head] + s.sums_u[l]) * slope[l];
            dA += decay * delta[l], dbias += value;
            ddelta[l * f.ddelta.token] = static_cast<float>(value);
        }
        totals.A[head] += static_cast<float>(dA);
        totals.bias[head] += static_cast<float>(dbias);
        totals.D[head] += sum_lanes(s.dots_D[h]);
    }
}

// The convolution's backward, where an item has all channels of its tokens: it follows every chunk.
struct Convolved {
    Taps taps;
    Buffer totals, later;  // [batch][vectors][5] and [batch][vectors][3] vectors

    explicit Convolved(const Conv& f) : taps(f), totals(floats(f, 5)), later(floats(f, 3)) {
        memset(totals.get(), 0, floats(f, 5) * sizeof(float));
        memset(later.get(), 0, floats(f, 3) * sizeof(float));
    }
    static int64_t floats(const Conv& f, int64_t each) { return f.batch * vectors(f) * each * W; }
    void pull(const Conv& f, int64_t batch, int64_t first, int64_t last) const {
        const int64_t skipped = batch * vectors(f);
        backward_tokens(f, taps, batch, first, last, totals.vectors() + 5 * skipped, later.vectors() + 3 * skipped);
    }
};

template <int N>
void run(const SsdBackward& f, const SsdCut& cut, const SsdItem& item, const Tokens& dB, const Tokens& dC,
         const Totals& totals, const Convolved* convolved, Scratch& s) {
    const auto state_before = [&](int64_t chunk) -> const float* {
        const int64_t slot = (item.batch * (cut.chunks - 1) + chunk - 1) * f.in.heads + item.first;
        return chunk > 0 ? f.saved + slot * cut.state() : nullptr;
    };
    find_slices(s.slices, N, f.in, cut, item);
    for (int64_t chunk = cut.chunks - 1; chunk >= 0; --chunk) {
        const int64_t first = chunk * SPAN, rest = f.in.tokens - first;
        const int length = static_cast<int>(rest < SPAN ? rest : SPAN);
        const float *const before = state_before(chunk), *const later = chunk + 1 < cut.chunks ? s.later : nullptr;
        s.decays.fill(f.in, item, first, length);
        pack_rows(f.in.B, item, first, length, f.in.n, cut.n, s.B);
        pack_rows(f.in.C, item, first, length, f.in.n, cut.n, s.C);
        pack_inputs<N>(f, item, first, length, s);
        turn_inputs<N>(cut, s);
        pair_products(s.B, s.C, cut.n, s.turned, s.products);
        for (int64_t h = 0; h < item.count; ++h) {
            pull_weights<N>(cut, h, s);
            sum_crossing(h, s);
            leave_chunk(cut, h, s);
            pull_inputs<N>(cut, h, length, later, s);
        }
        finish<N>(f, item, first, length, s);
        for (int row = 0; row < SPAN; row += W)
            for (int column = 0; column <= row; column += W) {
                const int64_t from = (column / PAIR * SPAN + row) * PAIR + column % PAIR;
                const int64_t to = (row / PAIR * SPAN + column) * PAIR + row % PAIR;
                transpose_block(s.dproducts + from, PAIR, s.dproducts_turned + to, PAIR);
            }
        pull_rows<N, true>(f, cut, item, first, length, later, s.x_turned, s.C, s.dproducts, dB, s);
        pull_rows<N, false>(f, cut, item, first, length, before, s.entered_turned, s.B, s.dproducts_turned, dC, s);
        memset(s.passed, 0, item.count * sizeof(float));
        if (before) pull_state<N>(cut, item, before, later == nullptr, s);
        pull_steps(f, item, first, length, totals, s);
        if (convolved) convolved->pull(*f.conv, item.batch, first, first + length);
    }
}

}  // namespace

void ssd_backward(const SsdBackward& f) {
    const SsdInputs& in = f.in;
    const SsdCut cut(in);
    const int64_t scratch = Scratch::each(cut, nullptr, nullptr);
    const Buffer memory(scratch * in.threads), parts(3 * in.batch * in.heads);
    memset(parts.get(), 0, 3 * in.batch * in.heads * sizeof(float));
    // Blocks after the first keep their shares of dB and dC apart, to be added in a fixed order.
    const int64_t rows = in.batch * in.tokens * in.groups * in.n;
    const Buffer apart(2 * rows * (cut.blocks - 1));
    const auto share = [&](const Tokens& out, int64_t block, int64_t which) {
        if (block == 0) return out;
        const int64_t token = in.groups * in.n;
        return Tokens{apart.get() + (2 * (block - 1) + which) * rows, in.tokens * token, token, in.n};
    };
    std::optional<Convolved> convolved;
    if (f.conv && goes_by_chunks(*f.conv) && cut.blocks * in.groups == 1) convolved.emplace(*f.conv);
#pragma omp parallel num_threads(in.threads)
    {
        const FlushToZero flush;
        Scratch s;
        Scratch::each(cut, memory.get() + thread_index() * scratch, &s);
        memset(s.dproducts_turned, 0, SPAN * SPAN * sizeof(float));  // half of it is never written
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < cut.items; ++i) {
            const SsdItem item(cut, in.groups, i);
            float* const sums = parts.get() + 3 * item.batch * in.heads;
            const Totals totals{sums, sums + in.heads, sums + 2 * in.heads};
            (cut.size % PAIR == 0 ? run<2> : run<1>)(f, cut, item, share(f.dB, item.block, 0), share(f.dC, item.block, 1),
                                                     totals, convolved ? &*convolved : nullptr, s);
        }
    }
#pragma omp parallel for num_threads(in.threads) schedule(static)
    for (int64_t row = 0; row < in.batch * in.tokens * in.groups; ++row)
        for (int64_t block = 1; block < cut.blocks; ++block) {
            const int64_t batch = row / in.groups / in.tokens, token = row / in.groups % in.tokens, group = row % in.groups;
            for (int64_t which = 0; which < 2; ++which) {
                const Tokens &out = which ? f.dC : f.dB, part = share(out, block, which);
                float* const to = out.data + batch * out.batch + token * out.token + group * out.group;
                for (int64_t j = 0; j < in.n; ++j) to[j] += part.data[row * in.n + j];
            }
        }
    if (convolved) finish_taps(*f.conv, convolved->totals.vectors());
    else if (f.conv) conv_backward(*f.conv);
    for (int64_t h = 0; h < in.heads; ++h) {
        double sums[3] = {};
        for (int64_t b = 0; b < in.batch; ++b)
            for (int k = 0; k < 3; ++k) sums[k] += parts.get()[(3 * b + k) * in.heads + h];
        if (f.dA) f.dA[h] = static_cast<float>(sums[0]);
        if (f.dD) f.dD[h] = static_cast<float>(sums[1]);
        if (f.dbias) f.dbias[h] = static_cast<float>(sums[2]);
    }
}

}  // namespace infssm::INFSSM_ISA
