// Scratch memory and threads.
#pragma once

#include <new>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "simd.h"

namespace infssm::INFSSM_ISA {
namespace {

class Buffer {  // aligned scratch memory
  public:
    explicit Buffer(int64_t floats) : data_(static_cast<float*>(::operator new(floats * 4 + 64, std::align_val_t(64)))) {}
    ~Buffer() { ::operator delete(data_, std::align_val_t(64)); }
    Buffer(const Buffer&) = delete;
    float* get() const { return data_; }
    vf* vectors() const { return reinterpret_cast<vf*>(data_); }

  private:
    float* data_;
};

inline int64_t thread_index() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// Denormal numbers count as 0 while this lives, in its thread. Gradients that decay along a scan end in denormals, on
// which every multiplication takes a hundred times as long.
class FlushToZero {
#if defined(__SSE2__)
  public:
    FlushToZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~FlushToZero() { _mm_setcsr(before_); }
    FlushToZero(const FlushToZero&) = delete;

  private:
    unsigned before_;
#else
  public:
    FlushToZero() {}
#endif
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace
}  // namespace infssm::INFSSM_ISA
