// The Python module, and the choice of the best instruction set this machine has.
#include <cstdlib>
#include <string>
#include <vector>

#include "bind.h"

namespace infssm {

namespace baseline {
extern const Kernels kernels;
}
#ifdef INFSSM_X86
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

namespace {

std::vector<const Kernels*> supported() {  // best first
    std::vector<const Kernels*> found;
#ifdef INFSSM_X86
    __builtin_cpu_init();
    const bool avx2_fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2_fma && __builtin_cpu_supports("avx512f")) found.push_back(&avx512::kernels);
    if (avx2_fma) found.push_back(&avx2::kernels);
#endif
    found.push_back(&baseline::kernels);
    return found;
}

const Kernels* named(const std::string& name) {
    std::string known;
    for (const Kernels* kernels : supported()) {
        if (name == kernels->name) return kernels;
        known += std::string(known.empty() ? "" : ", ") + kernels->name;
    }
    throw std::invalid_argument("INFSSM_ISA=" + name + " is not one of what this machine runs: " + known);
}

const Kernels* initial() {
    const char* wish = std::getenv("INFSSM_ISA");
    return wish && *wish ? named(wish) : supported().front();
}

}  // namespace

const Kernels* active = nullptr;

}  // namespace infssm

NB_MODULE(_native, m) {
    using namespace infssm;
    active = initial();
    m.doc() = "Compiled kernels of infssm; called through infssm.ops, which checks the arguments.";
    m.attr("CHUNK") = CHUNK;
    static PyObject* const config_error = nb::object(nb::module_::import_("infssm.errors").attr("ConfigError")).release().ptr();
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const Refused& error) {
            PyErr_SetString(config_error, error.what());
        }
    });
    m.def("isa", [] { return std::string(active->name); }, "The instruction set in use.");
    m.def("lanes", [] { return active->lanes; }, "Floats per vector of the instruction set in use.");
    m.def("isas", [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : supported()) names.emplace_back(kernels->name);
        return names;
    }, "The instruction sets this machine runs, best first.");
    m.def("use_isa", [](const std::string& name) { active = named(name); }, "Switch the instruction set (for tests).");
    bind_layers(m);
    bind_ssd(m);
    bind_distances(m);
}
