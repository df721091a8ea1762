// What the kernels take: plain pointers, strides and sizes, the same for every instruction set.
#pragma once

#include <cstdint>

namespace infssm {

// A tensor read or written as it lies in memory; the last dimension is contiguous. A null `data` means "absent".
struct Tokens {  // [batch, tokens, channels], or [batch, tokens, groups, n] with its own group stride
    float* data = nullptr;
    int64_t batch = 0, token = 0, group = 0;
};

struct ScanSizes {
    int64_t batch, tokens, channels, groups, n;
    bool softplus, reverse;
    int threads;
};

// Tokens between two saved states; the backward keeps this many steps in the first-level cache.
constexpr int CHUNK = 12;

struct ScanInputs {
    ScanSizes size;
    Tokens u, delta, z, B, C;
    Tokens seq;  // [batch, tokens], the number of a token's sequence; null: one sequence
    const float *A, *D, *bias;
    int64_t A_channel, A_state;  // strides; A_state == 0 is a scalar transition
    const float* initial;        // [batch, channels, n] contiguous, or null
};

struct ScanForward {
    ScanInputs in;
    Tokens y;
    float* last;                // [batch, channels, n] or null
    Tokens a, mean_delta, zoh;  // [batch, tokens, groups, n], [batch, tokens, groups], as the first; or null
    float* saved;               // [batch, chunks, padded channels * n] or null
    float scale;                // of y
    bool add;                   // y is added to what is there
};

struct ScanBackward {
    ScanInputs in;
    const float* saved;
    Tokens grad_y;
    const float* grad_last;
    Tokens grad_a, grad_mean_delta, grad_zoh;
    Tokens du, ddelta, dz, dB, dC;
    float *dA, *dD, *dbias, *dinitial;  // [channels, n], [channels], [channels], [batch, channels, n]
    float scale;                        // as of the forward
    bool add;                           // dz is added to what is there
};

struct SsdInputs {  // Mamba-2's scan: one transition per head; channels = heads x size
    int64_t batch, tokens, heads, size, groups, n;
    bool softplus;
    int threads;
    Tokens u, delta, z, B, C, seq;  // delta: [batch, tokens, heads]
    const float *A, *D, *bias;      // [heads]
};

struct Conv {  // x: [batch, tokens, channels]; weight: [channels, width] contiguous
    int64_t batch, tokens, channels, width;
    bool silu, reverse;
    int threads;
    Tokens x;
    Tokens seq;  // as of ScanInputs
    const float *weight, *bias;
    Tokens y, grad_y, dx;
    float *dweight, *dbias;
    bool add;  // the gradient of x is added to what dx holds
};

struct SsdForward {
    SsdInputs in;
    Tokens y;
    Tokens plain;  // y before skip and gate, or null
    float* saved;  // [batch, chunks - 1, heads * padded head size * padded n]: the state before each chunk, or null
    const Conv* conv;  // what makes u, B and C, to be done first; null: they are there
};

struct SsdBackward {
    SsdInputs in;
    Tokens plain;
    const float* saved;
    Tokens grad_y;
    Tokens du, ddelta, dz, dB, dC;
    float *dA, *dD, *dbias;  // [heads]
    const Conv* conv;        // to be done last, from du, dB and dC; null: nothing
};

struct MeanStates {  // forward: fills a, mean_delta, zoh. backward: reads them as gradients, fills ddelta, dA, dbias
    ScanSizes size;
    Tokens delta;
    const float *A, *bias;
    int64_t A_channel, A_state;
    Tokens a, mean_delta, zoh;
    Tokens ddelta;
    float *dA, *dbias;
};

struct Norm {  // rows x channels, rows contiguous
    int64_t rows, channels;
    float eps;
    int threads;
    const float *x, *residual, *weight;
    float *normed, *total, *scale;  // total: null without a residual; scale: [rows], 1 / rms
    const float *grad_normed, *grad_total;
    float *dx, *dweight;            // backward: x is the sum that was normed
};

struct System {  // a: [tokens, poles], c, b: [tokens, n], contiguous; poles is n or 1 (a scalar transition)
    const float *a, *c, *b;
};

struct Slopes {  // derivatives of each value, as System; null where they are not wanted
    float *a, *c, *b;
};

struct Distance {
    int64_t tokens, n, poles;
    bool soft;  // states are to be soft-normalised
    int threads;
    System old_states, new_states;
    float* value;  // [tokens]
    float* sure;   // [tokens]: 1, or 0 where the caller is to do it again in float64
    Slopes to_old, to_new;
};

// All kernels, by name and argument. Each is defined once, in namespace infssm::INFSSM_ISA of a source file that is compiled
// per instruction set; this list declares them, and makes and fills the table of each instruction set.
#define INFSSM_KERNELS(kernel)                \
    kernel(scan_forward, ScanForward)         \
    kernel(scan_backward, ScanBackward)       \
    kernel(ssd_forward, SsdForward)           \
    kernel(ssd_backward, SsdBackward)         \
    kernel(mean_states_forward, MeanStates)   \
    kernel(mean_states_backward, MeanStates)  \
    kernel(conv_forward, Conv)                \
    kernel(conv_backward, Conv)               \
    kernel(norm_forward, Norm)                \
    kernel(norm_backward, Norm)               \
    kernel(simplified, Distance)              \
    kernel(aligned, Distance)                 \
    kernel(output, Distance)

struct Kernels {
    const char* name;
    int lanes;               // floats of a vector
    int ssd_span, ssd_rows;  // tokens of a chunk of ssd_forward, and what n is rounded up to
#define INFSSM_MEMBER(name, Arguments) void (*name)(const Arguments&);
    INFSSM_KERNELS(INFSSM_MEMBER)
#undef INFSSM_MEMBER
};

}  // namespace infssm
