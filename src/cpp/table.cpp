// The kernels of one instruction set.
#include "kernels.h"
#include "simd.h"

#define INFSSM_TEXT_OF(x) #x
#define INFSSM_TEXT(x) INFSSM_TEXT_OF(x)

namespace infssm::INFSSM_ISA {

#define INFSSM_DECLARE(name, Arguments) void name(const Arguments&);
INFSSM_KERNELS(INFSSM_DECLARE)
extern const int ssd_span, ssd_rows;

extern const Kernels kernels;
#define INFSSM_FILL(name, Arguments) .name = name,
const Kernels kernels{.name = INFSSM_TEXT(INFSSM_ISA),
                      .lanes = W,
                      .ssd_span = ssd_span,
                      .ssd_rows = ssd_rows,
                      INFSSM_KERNELS(INFSSM_FILL)};

}  // namespace infssm::INFSSM_ISA
