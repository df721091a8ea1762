// Distances between states for Python.
#include "bind.h"

namespace infssm {

struct StatePair {  // old and new states, or the derivatives by them
    Rows old_a, old_c, new_a, new_c, old_b, new_b;
};
template <>
struct Fields<StatePair> {
    using T = StatePair;
    static constexpr std::tuple list{INFSSM_FIELD(old_a), INFSSM_FIELD(old_c), INFSSM_FIELD(new_a), INFSSM_FIELD(new_c),
                                     INFSSM_FIELD(old_b), INFSSM_FIELD(new_b)};
};

namespace {

constexpr int64_t PAIRS = 1 << 17;
constexpr int64_t POINTS = 32;  // frequencies that a state meets beside the other states

// Returns how many tokens are to be done again in float64.
int64_t distance(const std::string& kind, bool soft, int threads, const StatePair& x, const Numbers& value,
                 const Numbers& sure, const StatePair& slopes) {
    const auto kernel = kind == "simplified" ? active->simplified
                        : kind == "aligned"  ? active->aligned
                        : kind == "output"   ? active->output
                                             : throw Refused("no compiled distance " + kind);
    if (kernel == active->output) given(x.old_b), given(x.new_b);
    const auto [tokens, n] = given(x.old_c).shape;
    const int64_t poles = given(x.old_a).shape[1] == 1 ? 1 : n;
    Distance f{};
    f.tokens = tokens, f.n = n, f.poles = poles, f.soft = soft;
    f.threads = worth(threads, tokens * (n + POINTS) * n, PAIRS);
    f.old_states = {flat(x.old_a, {tokens, poles}), flat(x.old_c, {tokens, n}), flat(x.old_b, {tokens, n})};
    f.new_states = {flat(given(x.new_a), {tokens, poles}), flat(given(x.new_c), {tokens, n}), flat(x.new_b, {tokens, n})};
    f.value = flat(given(named(value, "value")), {tokens}), f.sure = flat(given(named(sure, "sure")), {tokens});
    f.to_old = {flat(slopes.old_a, {tokens, poles}), flat(slopes.old_c, {tokens, n}), flat(slopes.old_b, {tokens, n})};
    f.to_new = {flat(slopes.new_a, {tokens, poles}), flat(slopes.new_c, {tokens, n}), flat(slopes.new_b, {tokens, n})};
    const nb::gil_scoped_release release;
    kernel(f);
    int64_t unsure = 0;
    for (int64_t i = 0; i < tokens; ++i) unsure += f.sure[i] == 0.f;
    return unsure;
}

}  // namespace

void bind_distances(nb::module_& m) { define(m, "distance", distance); }

}  // namespace infssm
