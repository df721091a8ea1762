// How fast this machine computes exponentials by a polynomial: the yardstick of the benchmark. It stays what it was
// when the scan has a faster one, so that multiples of it compare.
#include "kernels.h"
#include "simd.h"

namespace infssm {
namespace INFSSM_ISA {

// Computes repeats * threads * 4096 exponentials of L1-resident data; returns a value that depends on all of them.
double exp_rate(int64_t repeats, int threads) {
    double total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
    {
        alignas(64) float x[4096], y[4096];
        for (int i = 0; i < 4096; ++i) x[i] = -0.002f * static_cast<float>(i);
        for (int64_t r = 0; r < repeats; ++r) {
            for (int i = 0; i < 4096; i += W) store(y + i, exp2_by_polynomial(load(x + i), splat(LOG2E)));
            __asm__ volatile("" ::"r"(y) : "memory");
        }
        total += y[17];
    }
    return total;
}

}  // namespace INFSSM_ISA
}  // namespace infssm
