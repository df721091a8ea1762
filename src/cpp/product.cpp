// Products of large matrices: c = a b^T, or a b where b lies the other way round.
//
// b is packed into panels of `deep` rows, which stay in the first-level cache while the tiles of a block of rows of a
// meet them; the block stays in the second. A block is the work of one thread, so threads change no result.
#include "kernels.h"
#include "memory.h"
#include "tiles.h"

namespace infssm {
namespace INFSSM_ISA {
namespace {

constexpr int64_t BLOCK = 64 / ROWS * ROWS;  // rows of a block

struct Cut {
    int64_t parts, deep, panels;  // of the depth, the depth of one, and panels of columns
    int64_t together;             // parts whose share of a block stays in the second-level cache

    explicit Cut(const Product& f) {
        constexpr int64_t most = 3072 / W;  // a panel of this depth leaves room beside it
        parts = ceil_div(f.depth, most);
        deep = round_up(ceil_div(f.depth, parts), W);
        parts = ceil_div(f.depth, deep);
        panels = ceil_div(f.columns, PAIR);
        together = ceil_div(2048, deep);
    }
    int64_t steps() const { return ceil_div(parts, together); }
    int64_t depth_of(const Product& f, int64_t part) const { return part + 1 < parts ? deep : f.depth - part * deep; }
};

// A panel of b: [deep][PAIR], filled up with 0.
void pack_panel(const Product& f, int64_t first_row, int64_t depth, int64_t first_column, float* panel) {
    const int count = static_cast<int>(f.columns - first_column < PAIR ? f.columns - first_column : PAIR);
    if (f.b_column == 1) {
        for (int64_t k = 0; k < depth; ++k) {
            const float* const row = f.b + (first_row + k) * f.b_depth + first_column;
            for (int j = 0; j < PAIR; j += W) {
                const int left = count - j < 0 ? 0 : count - j < W ? count - j : W;
                store(panel + k * PAIR + j, load(row + j, left));
            }
        }
        return;
    }
    int64_t k = 0;
    for (; count == PAIR && k + W <= depth; k += W)
        for (int j = 0; j < PAIR; j += W)
            transpose_block(f.b + (first_column + j) * f.b_column + first_row + k, f.b_column, panel + k * PAIR + j, PAIR);
    for (; k < depth; ++k)
        for (int j = 0; j < PAIR; ++j)
            panel[k * PAIR + j] = j < count ? f.b[(first_column + j) * f.b_column + first_row + k] : 0.f;
}

// Rows of a where its columns are contiguous: [tiles][depth][ROWS], filled up with 0.
void pack_rows(const Product& f, int64_t first, int64_t count, float* rows) {
    for (int64_t k = 0; k < f.depth; ++k) {
        const float* const column = f.a + k * f.a_depth + first;
        for (int64_t i = 0; i < BLOCK; i += 16) __builtin_prefetch(column + 16 * f.a_depth + i);  // rows lie far apart
        for (int64_t tile = 0; tile * ROWS < count; ++tile) {
            float* const to = rows + (tile * f.depth + k) * ROWS;
            if ((tile + 1) * ROWS <= count) memcpy(to, column + tile * ROWS, ROWS * sizeof(float));
            else for (int i = 0; i < ROWS; ++i) to[i] = tile * ROWS + i < count ? column[tile * ROWS + i] : 0.f;
        }
    }
}

template <bool ALONG>
INFSSM_INLINE void tile(const float* a, int64_t stride, const float* panel, int64_t depth, bool add, float* c,
                        int64_t row, int rows, int columns) {
    vf acc[ROWS][2];
    clear(acc);
    const bool whole = rows == ROWS && columns == PAIR;
    if (add && whole)
        for (int i = 0; i < ROWS; ++i)
            for (int j = 0; j < 2; ++j) acc[i][j] = load(c + i * row + j * W);
    else if (!add)
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < PAIR; j += 16) __builtin_prefetch(c + i * row + j, 1);
    multiply<ALONG>(acc, a, stride, panel, depth);
    if (whole) {
        for (int i = 0; i < ROWS; ++i)
            for (int j = 0; j < 2; ++j) store(c + i * row + j * W, acc[i][j]);
        return;
    }
    float sums[ROWS][PAIR];
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < 2; ++j) store(sums[i] + j * W, acc[i][j]);
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < columns; ++j) c[i * row + j] = add ? c[i * row + j] + sums[i][j] : sums[i][j];
}

template <bool ALONG>
void block(const Product& f, const Cut& cut, int64_t first, const float* panels, float* rows) {
    const int64_t count = f.rows - first < BLOCK ? f.rows - first : BLOCK, whole = count / ROWS * ROWS;
    const float* const own = f.a + first * f.a_row;
    if (!ALONG) pack_rows(f, first, count, rows);
    else if (whole < count) {  // the last tile reads past the end
        memset(rows, 0, ROWS * f.depth * sizeof(float));
        for (int64_t i = whole; i < count; ++i) memcpy(rows + (i - whole) * f.depth, own + i * f.a_row, f.depth * sizeof(float));
    }
    for (int64_t step = 0; step < cut.steps() * cut.panels; ++step) {
        const int64_t q = step % cut.panels, begin = step / cut.panels * cut.together;
        const int columns = static_cast<int>(f.columns - q * PAIR < PAIR ? f.columns - q * PAIR : PAIR);
        for (int64_t part = begin; part < cut.parts && part < begin + cut.together; ++part) {
            const float* const panel = panels + (q * cut.parts + part) * cut.deep * PAIR;
            const int64_t skipped = part * cut.deep, depth = cut.depth_of(f, part);
            for (int64_t i = 0; i < count; i += ROWS) {
                float* const c = f.c + (first + i) * f.c_row + q * PAIR;
                const int left = static_cast<int>(count - i < ROWS ? count - i : ROWS);
                if (!ALONG) tile<false>(rows + i * f.depth + skipped * ROWS, ROWS, panel, depth, part > 0, c, f.c_row, left, columns);
                else if (i < whole) tile<true>(own + i * f.a_row + skipped, f.a_row, panel, depth, part > 0, c, f.c_row, left, columns);
                else tile<true>(rows + skipped, f.depth, panel, depth, part > 0, c, f.c_row, left, columns);
            }
        }
    }
}

}  // namespace

void product(const Product& f) {
    const Cut cut(f);
    const int64_t packed = cut.panels * cut.parts * cut.deep * PAIR, rows = round_up((f.a_depth == 1 ? ROWS : BLOCK) * f.depth, W);
    const Buffer panels(packed), scratch(rows * f.threads);
#pragma omp parallel num_threads(f.threads)
    {
        const FlushToZero flush;
        float* const own = scratch.get() + thread_index() * rows;
#pragma omp for schedule(static)
        for (int64_t index = 0; index < cut.panels * cut.parts; ++index) {
            const int64_t q = index / cut.parts, part = index % cut.parts;
            pack_panel(f, part * cut.deep, cut.depth_of(f, part), q * PAIR, panels.get() + index * cut.deep * PAIR);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t first = 0; first < f.rows; first += BLOCK)
            (f.a_depth == 1 ? block<true> : block<false>)(f, cut, first, panels.get(), own);
    }
}

}  // namespace INFSSM_ISA
}  // namespace infssm
