// Sines and cosines of the principal angles between two observability subspaces: a lattice of n^2 rotations.
//
// The wire `down` of an old pole a_i crosses the wire `right` of every new pole b_k in the cell
//   (d, r) -> (p d + q r, q d - p r),  p = (a - b) / (1 - a b),  q = sqrt((1 - a^2)(1 - b^2)) / (1 - a b).
// A signal has n components; down_i starts as the unit vector e_i and right_k as 0, so only components m <= i exist in
// the cells of a_i. Lanes are systems. A cell is its own inverse and its own transpose: the backward runs the lattice
// from its outputs to its inputs, signals and gradients alike, and stores nothing in between.
#include "kernels.h"
#include "memory.h"

namespace infssm {
namespace INFSSM_ISA {
namespace {

constexpr int64_t ROWS = 2, COLUMNS = 4, BACK = 2;  // cells per step: ROWS x COLUMNS, backward BACK x BACK

vf defect(vf pole) { return (1.f - pole) * (1.f + pole); }  // 1 - a^2

struct Cell {
    vf p, q;
};

INFSSM_INLINE void rotate(const Cell& cell, vf& down, vf& right) {
    const vf before = down;
    down = cell.p * before + cell.q * right;
    right = cell.q * before - cell.p * right;
}

// W systems. Wires are padded to whole steps with poles of -1: such a cell passes the other wire's signal as it is.
struct Block {
    int64_t n, size, lanes;      // size: wires with padding; lanes: systems there are
    vf *a, *b, *a_root, *b_root;  // poles, and sqrt(1 - a^2) of each
    vf *by_a, *by_b;             // derivatives
    vf *down, *right;            // signals: [wire][component]
    vf *grad_down, *grad_right;

    static int64_t padded(int64_t n) { return round_up(n, COLUMNS); }
    static int64_t vectors(int64_t n, bool backward) {
        const int64_t size = padded(n);
        return 6 * size + (backward ? 4 : 1) * size * size + (backward ? 0 : COLUMNS * size);
    }
    Block(vf* memory, int64_t poles, bool backward) : n(poles), size(padded(poles)), lanes(0) {
        const auto take = [&](int64_t count) { return memory += count, memory - count; };
        a = take(size), b = take(size), a_root = take(size), b_root = take(size);
        by_a = take(size), by_b = take(size);
        down = take(size * size);
        right = take(backward ? size * size : COLUMNS * size);
        grad_down = backward ? take(size * size) : nullptr;
        grad_right = backward ? take(size * size) : nullptr;
    }

    void read_poles(const Lattice& f, int64_t first) {
        lanes = f.systems - first < W ? f.systems - first : W;
        for (int64_t i = 0; i < size; ++i) a[i] = b[i] = splat(i < n ? 0.f : -1.f);
        for (int64_t lane = 0; lane < lanes; ++lane)
            for (int64_t i = 0; i < n; ++i) {
                a[i][lane] = f.old_a[(first + lane) * n + i];
                b[i][lane] = f.new_a[(first + lane) * n + i];
            }
        for (int64_t i = 0; i < size; ++i) {
            a_root[i] = square_root(defect(a[i]));
            b_root[i] = square_root(defect(b[i]));
        }
    }

    Cell cell(int64_t i, int64_t k) const {
        const vf distance = (1.f - a[i]) + a[i] * (1.f - b[k]);  // 1 - a b
        const vf scale = reciprocal(at_least(splat(1e-30f), distance));  // it is 0 between two pads
        return {(a[i] - b[k]) * scale, a_root[i] * b_root[k] * scale};
    }

    // [system][component][wire] <-> [wire][component], lanes are systems.
    void write(const vf* wires, int64_t count, int64_t first_wire, float* out) const {
        for (int64_t lane = 0; lane < lanes; ++lane)
            for (int64_t m = 0; m < n; ++m)
                for (int64_t i = 0; i < count; ++i)
                    out[(lane * n + m) * n + first_wire + i] = wires[i * size + m][lane];
    }
    void read(const float* matrices, vf* wires) const {
        memset(wires, 0, size * size * sizeof(vf));
        for (int64_t lane = 0; matrices && lane < lanes; ++lane)
            for (int64_t m = 0; m < n; ++m)
                for (int64_t i = 0; i < n; ++i) wires[i * size + m][lane] = matrices[(lane * n + m) * n + i];
    }
};

// The cells of ROWS wires of a and COLUMNS wires of b, components 0 to `last`.
void forward_step(const Block& t, int64_t i, int64_t k, int64_t last) {
    Cell cells[ROWS][COLUMNS];
    for (int row = 0; row < ROWS; ++row)
        for (int column = 0; column < COLUMNS; ++column) cells[row][column] = t.cell(i + row, k + column);
    for (int64_t m = 0; m <= last; ++m) {
        vf down[ROWS], right[COLUMNS];
        for (int row = 0; row < ROWS; ++row) down[row] = t.down[(i + row) * t.size + m];
        for (int column = 0; column < COLUMNS; ++column) right[column] = t.right[column * t.size + m];
        for (int column = 0; column < COLUMNS; ++column)
            for (int row = 0; row < ROWS; ++row) rotate(cells[row][column], down[row], right[column]);
        for (int row = 0; row < ROWS; ++row) t.down[(i + row) * t.size + m] = down[row];
        for (int column = 0; column < COLUMNS; ++column) t.right[column * t.size + m] = right[column];
    }
}

void forward(Block& t, float* sine, float* cosine) {
    memset(t.down, 0, t.size * t.size * sizeof(vf));
    for (int64_t i = 0; i < t.n; ++i) t.down[i * t.size + i] = splat(1.f);
    for (int64_t k = 0; k < t.n; k += COLUMNS) {
        memset(t.right, 0, COLUMNS * t.size * sizeof(vf));
        for (int64_t i = 0; i < t.n; i += ROWS) forward_step(t, i, k, i + ROWS - 1);
        t.write(t.right, t.n - k < COLUMNS ? t.n - k : COLUMNS, k, cosine);
    }
    t.write(t.down, t.n, 0, sine);
}

// Undoes the cells of BACK x BACK wires and collects the derivatives by their poles.
void backward_step(const Block& t, int64_t i, int64_t k, int64_t last) {
    Cell cells[BACK][BACK], by[BACK][BACK] = {};
    for (int row = 0; row < BACK; ++row)
        for (int column = 0; column < BACK; ++column) cells[row][column] = t.cell(i + row, k + column);
    for (int64_t m = 0; m <= last; ++m) {
        vf down[BACK], right[BACK], grad_down[BACK], grad_right[BACK];
        for (int j = 0; j < BACK; ++j) {
            down[j] = t.down[(i + j) * t.size + m], grad_down[j] = t.grad_down[(i + j) * t.size + m];
            right[j] = t.right[(k + j) * t.size + m], grad_right[j] = t.grad_right[(k + j) * t.size + m];
        }
        for (int column = BACK - 1; column >= 0; --column)
            for (int row = BACK - 1; row >= 0; --row) {
                vf &d = down[row], &r = right[column], &grad_d = grad_down[row], &grad_r = grad_right[column];
                rotate(cells[row][column], d, r);
                by[row][column].p += grad_d * d - grad_r * r;
                by[row][column].q += grad_d * r + grad_r * d;
                rotate(cells[row][column], grad_d, grad_r);
            }
        for (int j = 0; j < BACK; ++j) {
            t.down[(i + j) * t.size + m] = down[j], t.grad_down[(i + j) * t.size + m] = grad_down[j];
            t.right[(k + j) * t.size + m] = right[j], t.grad_right[(k + j) * t.size + m] = grad_right[j];
        }
    }
    // dp/da = q^2 / (1 - a^2), dq/da = -p q / (1 - a^2), and with the opposite sign for b.
    for (int row = 0; row < BACK; ++row)
        for (int column = 0; column < BACK; ++column) {
            const Cell &cell = cells[row][column], &slope = by[row][column];
            const vf turn = cell.q * (slope.p * cell.q - slope.q * cell.p);
            t.by_a[i + row] += turn;
            t.by_b[k + column] -= turn;
        }
}

void backward(Block& t) {
    memset(t.by_a, 0, 2 * t.size * sizeof(vf));
    for (int64_t k = round_up(t.n, BACK) - BACK; k >= 0; k -= BACK)
        for (int64_t i = round_up(t.n, BACK) - BACK; i >= 0; i -= BACK) backward_step(t, i, k, i + BACK - 1);
    for (int64_t i = 0; i < t.n; ++i) t.by_a[i] /= defect(t.a[i]), t.by_b[i] /= defect(t.b[i]);
}

// Calls `run(block, first system)` for every W systems.
template <class Run>
void for_blocks(const Lattice& f, bool backward, Run run) {
    const int64_t each = Block::vectors(f.n, backward);
    const Buffer memory(each * W * f.threads);
#pragma omp parallel num_threads(f.threads)
    {
        const FlushToZero flush;
        Block block(memory.vectors() + thread_index() * each, f.n, backward);
#pragma omp for schedule(static)
        for (int64_t first = 0; first < f.systems; first += W) {
            block.read_poles(f, first);
            run(block, first);
        }
    }
}

}  // namespace

void lattice_forward(const Lattice& f) {
    for_blocks(f, false, [&](Block& t, int64_t first) {
        forward(t, f.sine + first * f.n * f.n, f.cosine + first * f.n * f.n);
    });
}

void lattice_backward(const Lattice& f) {
    for_blocks(f, true, [&](Block& t, int64_t first) {
        const int64_t offset = first * f.n * f.n;
        t.read(f.sine + offset, t.down);
        t.read(f.cosine + offset, t.right);
        t.read(f.grad_sine ? f.grad_sine + offset : nullptr, t.grad_down);
        t.read(f.grad_cosine ? f.grad_cosine + offset : nullptr, t.grad_right);
        backward(t);
        for (int64_t lane = 0; lane < t.lanes; ++lane)
            for (int64_t i = 0; i < f.n; ++i) {
                if (f.d_old) f.d_old[(first + lane) * f.n + i] = t.by_a[i][lane];
                if (f.d_new) f.d_new[(first + lane) * f.n + i] = t.by_b[i][lane];
            }
    });
}

}  // namespace INFSSM_ISA
}  // namespace infssm
