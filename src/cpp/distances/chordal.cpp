// Chordal distance 2 sum sin^2 of the principal angles between two observability subspaces with real poles.
#include "circle.h"

namespace infssm {
namespace INFSSM_ISA {

void chordal(const Distance& f) {
#pragma omp parallel num_threads(f.threads)
    {
        const FlushToZero flush;
        Token token;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < f.tokens; ++i) {
            Rules<Rule>::of_thread().forget_if_many();
            token.read<Rule>(f, i);
            token.write(f, 2 * ENERGY * token.energy, 2 * ENERGY, true);
        }
    }
}

}  // namespace INFSSM_ISA
}  // namespace infssm
