// The kernels of one instruction set.
#include "kernels.h"
#include "simd.h"

#define INFSSM_TEXT_OF(x) #x
#define INFSSM_TEXT(x) INFSSM_TEXT_OF(x)

namespace infssm {
namespace INFSSM_ISA {

void scan_forward(const ScanForward&);
void scan_backward(const ScanBackward&);
void product(const Product&);
void heads_forward(const HeadsForward&);
void heads_backward(const HeadsBackward&);
extern const int heads_span, heads_rows;
void mean_states_forward(const MeanStates&);
void mean_states_backward(const MeanStates&);
void conv_forward(const Conv&);
void conv_backward(const Conv&);
void norm_forward(const Norm&);
void norm_backward(const Norm&);
#define INFSSM_DECLARE(name) void name(const Distance&);
INFSSM_DISTANCES(INFSSM_DECLARE)
void lattice_forward(const Lattice&);
void lattice_backward(const Lattice&);
double exp_rate(int64_t repeats, int threads);

extern const Kernels kernels;
const Kernels kernels{INFSSM_TEXT(INFSSM_ISA), W,
                      scan_forward,            scan_backward,
                      heads_span,              heads_rows,
                      product,
                      heads_forward,           heads_backward,
                      mean_states_forward,     mean_states_backward,
                      conv_forward,            conv_backward,
                      norm_forward,            norm_backward,
#define INFSSM_NAME(name) name,
                      INFSSM_DISTANCES(INFSSM_NAME)
                      lattice_forward,         lattice_backward,
                      exp_rate};

}  // namespace INFSSM_ISA
}  // namespace infssm
