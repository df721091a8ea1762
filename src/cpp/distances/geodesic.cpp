// Geodesic distance sum theta^2 of the principal angles between two observability subspaces with real poles.
//
//   sum theta^2 = sum sin^2 + sum g(sin^2),  g(x) = arcsin^2(sqrt x) - x = x^2 / 3 + ...
// The first sum is the energy of U (circle.h) and carries all the precision small angles need. The second lives on the
// few largest angles, because the sines of real poles fall geometrically: they are the singular values of the Hankel
// operator f -> P-(U f), and those of its restriction to a few rational functions f (Takenaka-Malmquist, poles spread
// over the range of the token's) are the same to many digits. P- is a Hilbert transform, again a sum over the points.
// What the restriction lost is known, sum sin^2 less its trace, and bounds the error. So FEW functions are tried where
// angles are small, MANY where they are not or where few lost too much; tokens for which MANY lose too much (angles near
// 90 degrees, as of sets of poles far apart) are reported as not sure, for the caller to do by all angles (docs/maths.md,
// eq. 39).
#include <complex>

#include "circle.h"

namespace infssm {
namespace INFSSM_ISA {
namespace {

constexpr int FEW = 4, MANY = 12;           // functions in the restriction
constexpr int ORDER[] = {1, 4, 7, 10, 0, 11, 2, 9, 5, 6, 3, 8};  // of their poles: the first FEW are spread too
constexpr double SMALL = 3e-3;              // sum sin^2 up to which few are tried
constexpr double NONE = 1e-7;               // sum sin^2 up to which g is lost in rounding
constexpr double NARROWEST = 5;             // span of their poles: closer ones would oscillate between the points
constexpr double REACH = 5;                 // beyond the outermost poles (U - 1) f falls as e^-1.5x
constexpr float STEEPEST = 0.95f;           // largest sin^2 for which arcsin keeps its digits
constexpr double TOLERANCE = 1e-5;          // bound of the relative error of a sure value
constexpr int SWEEPS = 12;                  // of rotations, far more than ever needed
constexpr float NEGLIGIBLE = 1e-7f;         // off-diagonal element over the largest of the diagonal

// The rule, the functions and the transform. Functions are times sqrt(s h / 2 pi): sums over points are inner products.
// They fall outwards, so of each variable's points only `inner` take part, from `skipped` on; `row` vectors from
// `start` on hold these of both variables.
struct Restriction : Rule {
    int64_t skipped, inner, start, row;
    vf *transform, *adjoint;  // by distance d, as Rule::near: h / pi e^(-d/2) / sinh(d), and that of -d
    vf *re, *im;              // [MANY][row]

    explicit Restriction(const Grid& grid)
        : Rule(grid),
          skipped(static_cast<int64_t>((MARGIN - REACH) / step)),
          inner(count - 2 * skipped),
          start((count - round_up(inner, W)) / 2),
          row(2 * ceil_div(inner, W)),
          memory_((4 * vectors + 2 * MANY * row) * W) {
        vf* memory = memory_.vectors();
        const auto take = [&](int64_t size) { return memory += size, memory - size; };
        transform = take(2 * vectors), adjoint = take(2 * vectors), re = take(MANY * row), im = take(MANY * row);
        const double span = std::fmax(NARROWEST, grid.span);
        for (int64_t k = 0; k < 2 * count; ++k) {
            const double d = step * (k - count + 0.5), weight = step / PI * std::exp(-d / 2) / std::sinh(d);
            scalars(transform)[k] = static_cast<float>(weight);
            scalars(adjoint)[2 * count - 1 - k] = static_cast<float>(weight);
        }
        for (int64_t i = 0; i < row / 2 * W; ++i) {
            evaluate(start + i, span, i);
            evaluate(start + i + 0.5, span, row / 2 * W + i);
        }
    }

    // Where vector v of a row begins among all points.
    int64_t point(int64_t v) const { return v < row / 2 ? start + v * W : count + start + (v - row / 2) * W; }

  private:
    Buffer memory_;

    // The functions at `steps` from the first point, that is at s = e^x where the middle of the grid is 1.
    void evaluate(double steps, double span, int64_t point) const {
        const double s = std::exp(step * (steps - (count - 0.5) / 2));
        std::complex<double> value = std::sqrt(step / PI * s);
        for (int j = 0; j < MANY; ++j) {
            const double pole = std::exp(span * (static_cast<double>(ORDER[j]) / (MANY - 1) - 0.5));
            const std::complex<double> f = value * std::sqrt(pole) / std::complex<double>(pole, s);
            scalars(re + j * row)[point] = static_cast<float>(f.real());
            scalars(im + j * row)[point] = static_cast<float>(f.imag());
            value *= std::complex<double>(pole, -s) / std::complex<double>(pole, s);
        }
    }
};

// ROWS functions at COLUMNS vectors of points: image = own - sum over the other variable's points of weight * source.
template <int ROWS, int COLUMNS>
INFSSM_INLINE void project(const Restriction& rule, const vf* weights, const vf* own, const vf* source, vf* image,
                           int64_t v, bool second) {
    const int64_t row = rule.row, mine = second ? row / 2 : 0, first = rule.skipped - rule.start;
    const float *theirs = scalars(source + row / 2 - mine), *weight = scalars(weights) + v * W + rule.shift(second);
    vf sum[ROWS][COLUMNS];
    for (int j = 0; j < ROWS; ++j)
        for (int c = 0; c < COLUMNS; ++c) sum[j][c] = own[j * row + mine + v + c];
    for (int64_t i = first; i < first + rule.inner; ++i) {
        vf near[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) near[c] = load(weight + c * W - i);
        for (int j = 0; j < ROWS; ++j)
            for (int c = 0; c < COLUMNS; ++c) sum[j][c] -= near[c] * theirs[j * row * W + i];
    }
    for (int j = 0; j < ROWS; ++j)
        for (int c = 0; c < COLUMNS; ++c) image[j * row + mine + v + c] = sum[j][c];
}

template <int SIZE>
void project(const Restriction& rule, const vf* weights, const vf* own, const vf* source, vf* image) {
    constexpr int ROWS = W == 16 ? SIZE : 4;  // by the number of registers
    for (int64_t offset = 0; offset < SIZE * rule.row; offset += ROWS * rule.row)
        for (const bool second : {false, true}) {
            const auto part = [&](auto columns, int64_t v) {
                project<ROWS, columns>(rule, weights, own + offset, source + offset, image + offset, v, second);
            };
            int64_t v = 0;
            for (; v + 2 <= rule.row / 2; v += 2) part(std::integral_constant<int, 2>(), v);
            for (; v < rule.row / 2; ++v) part(std::integral_constant<int, 1>(), v);
        }
}

// Symmetric matrices of W tokens, one per lane.
template <int SIZE>
struct Matrices {
    vf entry[SIZE][SIZE];
};

// Rotates pairs of rows and columns until all are diagonal, and the rows of `vectors` along. What a lane becomes does
// not depend on the others.
template <int SIZE>
void diagonalize(Matrices<SIZE>& m, Matrices<SIZE>* vectors) {
    for (int sweep = 0; sweep < SWEEPS; ++sweep) {
        vf largest = {};
        for (int i = 0; i < SIZE; ++i) largest = at_least(largest, absolute(m.entry[i][i]));
        const vf bound = largest * NEGLIGIBLE;
        vi turned = {};
        for (int p = 0; p < SIZE; ++p)
            for (int q = p + 1; q < SIZE; ++q) {
                const vf cross = m.entry[p][q], gap = m.entry[q][q] - m.entry[p][p];
                const vi turn = absolute(cross) > bound;
                if (!any(turn)) continue;
                turned |= turn;
                const vf root = square_root(gap * gap + 4.f * cross * cross);
                const vf tangent = turn ? 2.f * cross / (gap + copy_sign(root, gap)) : vf{};
                const vf c = 1.f / square_root(1.f + tangent * tangent), s = c * tangent;
                m.entry[p][p] -= tangent * cross, m.entry[q][q] += tangent * cross;
                m.entry[p][q] = m.entry[q][p] = turn ? vf{} : cross;
                for (int k = 0; k < SIZE; ++k) {
                    if (k != p && k != q) {
                        const vf x = m.entry[p][k], y = m.entry[q][k];
                        m.entry[p][k] = m.entry[k][p] = c * x - s * y;
                        m.entry[q][k] = m.entry[k][q] = s * x + c * y;
                    }
                    if (vectors) {
                        const vf x = vectors->entry[p][k], y = vectors->entry[q][k];
                        vectors->entry[p][k] = c * x - s * y;
                        vectors->entry[q][k] = s * x + c * y;
                    }
                }
            }
        if (!any(turned)) return;
    }
}

// g and its derivative.
struct Excess {
    double value, slope;

    explicit Excess(double x) {
        if (x < 0.02) {
            value = x * x * (1. / 3 + x * (8. / 45 + x * (4. / 35 + x * (128. / 1575))));
            slope = x * (2. / 3 + x * (8. / 15 + x * (16. / 35 + x * (128. / 315))));
        } else {
            const double theta = std::asin(std::sqrt(x));
            value = theta * theta - x, slope = theta / std::sqrt(x * (1 - x)) - 1;
        }
    }
};

// Up to W tokens of one thread.
class Group {
  public:
    void run(const Distance& f, int64_t first, int count) {
        Rules<Restriction>::of_thread().forget_if_many();
        bool few = false, many = false;
        for (int lane = 0; lane < count; ++lane) {
            Member& member = members_[lane];
            member.token.read<Restriction>(f, first + lane);
            member.sines = ENERGY * member.token.energy;
            const bool alone = !member.token.inside || member.sines <= NONE;
            member.functions = alone ? 0 : member.sines <= SMALL ? FEW : MANY;
            few |= member.functions == FEW;
            if (alone) write(f, member, true, 0);
        }
        if (few) restrict_to<FEW>(f, count);
        for (int lane = 0; lane < count; ++lane) many |= members_[lane].functions == MANY;
        if (many) restrict_to<MANY>(f, count);
    }

  private:
    struct Member {
        Token token;
        double sines;   // sum sin^2
        int functions;  // to try next; 0: done
        GrowingBuffer memory;
        vf *re, *im;    // P- of (U - 1) f, for each f: [functions][row]

        const Restriction& rule() const { return static_cast<const Restriction&>(*token.points.rule); }
    };

    Member members_[W];
    GrowingBuffer memory_;
    vf *re_, *im_;  // (U - 1) f of one token

    static void write(const Distance& f, const Member& member, bool sure, double excess) {
        member.token.write(f, member.sines + excess, ENERGY, sure);
    }

    // Does the tokens whose turn it is; those that are not sure by FEW are left for MANY.
    template <int SIZE>
    void restrict_to(const Distance& f, int count) {
        Matrices<SIZE> matrix = {}, vectors = {};
        for (int i = 0; i < SIZE; ++i) vectors.entry[i][i] = splat(1.f);
        for (int lane = 0; lane < count; ++lane)
            if (members_[lane].functions == SIZE) {
                apply<SIZE>(members_[lane]);
                multiply(members_[lane], matrix, lane);
            }
        diagonalize(matrix, f.to_old.a || f.to_new.a ? &vectors : nullptr);
        for (int lane = 0; lane < count; ++lane)
            if (members_[lane].functions == SIZE) finish(f, members_[lane], matrix, vectors, lane);
    }

    template <int SIZE>
    void apply(Member& member) {
        const Points& x = member.token.points;
        const Restriction& rule = member.rule();
        const int64_t row = rule.row, size = SIZE * row;
        re_ = memory_.vectors(2 * size * W), im_ = re_ + size;
        member.re = member.memory.vectors(2 * size * W), member.im = member.re + size;
        for (int64_t v = 0; v < row; ++v) {
            const vf fall = load(scalars(x.fall) + rule.point(v)), sine = load(scalars(x.sine) + rule.point(v));
            for (int64_t offset = v; offset < size; offset += row) {
                re_[offset] = -fall * rule.re[offset] - sine * rule.im[offset];
                im_[offset] = sine * rule.re[offset] - fall * rule.im[offset];
            }
        }
        project<SIZE>(rule, rule.transform, re_, im_, member.re);
        if (member.token.slopes) project<SIZE>(rule, rule.adjoint, im_, re_, member.im);
    }

    // Inner products of the images: with R = P- re - re / 2, half the sum of re R' + re' R + im im'. A tile at a time,
    // so that what is loaded serves TILE products.
    template <int SIZE>
    void multiply(const Member& member, Matrices<SIZE>& matrix, int lane) const {
        constexpr int TILE = SIZE % 3 ? 2 : 3, SIDE = SIZE / TILE, COUNT = SIDE * (SIDE + 1) / 2 * TILE * TILE;
        const int64_t row = member.rule().row;
        vf sums[COUNT + W] = {};
        float products[COUNT + W];
        vf* sum = sums;
        for (int first = 0; first < SIZE; first += TILE)
            for (int second = 0; second <= first; second += TILE, sum += TILE * TILE)
                for (int64_t v = 0; v < row; ++v) {
                    vf re[2][TILE], im[2][TILE], rest[2][TILE];
                    for (int i = 0; i < TILE; ++i)
                        for (const int side : {0, 1}) {
                            const int64_t offset = ((side ? second : first) + i) * row + v;
                            re[side][i] = re_[offset], im[side][i] = im_[offset];
                            rest[side][i] = member.re[offset] - 0.5f * re_[offset];
                        }
                    for (int i = 0; i < TILE; ++i)
                        for (int j = 0; j < TILE; ++j)
                            sum[i * TILE + j] += re[0][i] * rest[1][j] + re[1][j] * rest[0][i] + im[0][i] * im[1][j];
                }
        sum_lanes(sums, COUNT, products);
        const float* product = products;
        for (int first = 0; first < SIZE; first += TILE)
            for (int second = 0; second <= first; second += TILE)
                for (int i = first; i < first + TILE; ++i)
                    for (int j = second; j < second + TILE; ++j)
                        matrix.entry[i][j][lane] = matrix.entry[j][i][lane] = *product++ / 2;
    }

    template <int SIZE>
    void finish(const Distance& f, Member& member, const Matrices<SIZE>& matrix, const Matrices<SIZE>& vectors,
                int lane) const {
        double excess = 0, trace = 0, steepest = 0;
        float slopes[SIZE];
        bool sure = true;
        for (int j = 0; j < SIZE; ++j) {
            const float x = matrix.entry[j][j][lane];
            sure &= x <= STEEPEST;
            const Excess g(x < 0 ? 0 : x > STEEPEST ? STEEPEST : x);
            excess += g.value, trace += x, slopes[j] = static_cast<float>(g.slope);
            steepest = std::fmax(steepest, g.slope);
        }
        sure &= std::fabs(member.sines - trace) * steepest <= TOLERANCE * (member.sines + excess);
        member.functions = sure || SIZE == MANY ? 0 : MANY;
        if (member.functions) return;
        if (member.token.slopes) add_slopes<SIZE>(member, slopes, vectors, lane);
        write(f, member, sure, excess);
    }

    // Derivative of sum g by psi at each point, in units of the energy.
    template <int SIZE>
    static void add_slopes(const Member& member, const float* slopes, const Matrices<SIZE>& vectors, int lane) {
        const Points& x = member.token.points;
        const Restriction& rule = member.rule();
        const int64_t row = rule.row;
        float weights[SIZE][SIZE] = {};
        for (int k = 0; k < SIZE; ++k)
            for (int i = 0; i < SIZE; ++i) {
                const float scaled = slopes[k] * vectors.entry[k][i][lane] / static_cast<float>(ENERGY);
                for (int j = 0; j < SIZE; ++j) weights[i][j] += scaled * vectors.entry[k][j][lane];
            }
        for (int64_t v = 0; v < row; ++v) {
            vf by_fall = {}, by_sine = {};  // of (U - 1) f = -(fall re + sine im) + i (sine re - fall im)
            for (int i = 0; i < SIZE; ++i) {
                vf re = {}, im = {};
                for (int j = 0; j < SIZE; ++j) {
                    re += weights[i][j] * member.re[j * row + v];
                    im += weights[i][j] * member.im[j * row + v];
                }
                by_fall -= re * rule.re[i * row + v] + im * rule.im[i * row + v];
                by_sine += im * rule.re[i * row + v] - re * rule.im[i * row + v];
            }
            const int64_t offset = rule.point(v);
            const vf fall = load(scalars(x.fall) + offset), sine = load(scalars(x.sine) + offset);
            store(scalars(x.slope) + offset, load(scalars(x.slope) + offset) + by_fall * sine + by_sine * (1.f - fall));
        }
    }
};

}  // namespace

void geodesic(const Distance& f) {
    const int64_t share = ceil_div(f.tokens, f.threads), size = share < W ? share : W;
#pragma omp parallel num_threads(f.threads)
    {
        const FlushToZero flush;
        Group group;
#pragma omp for schedule(static)
        for (int64_t first = 0; first < f.tokens; first += size)
            group.run(f, first, static_cast<int>(f.tokens - first < size ? f.tokens - first : size));
    }
}

}  // namespace INFSSM_ISA
}  // namespace infssm
