// Scratch memory and threads.
#pragma once

#include <new>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "simd.h"

namespace infssm {
namespace INFSSM_ISA {
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

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace
}  // namespace INFSSM_ISA
}  // namespace infssm
