// Tensors from Python without torch headers: DLPack, through the C exchange table where the tensor type offers one
// (tens of nanoseconds per tensor), else through nanobind's ndarray (microseconds).
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace infssm {

namespace nb = nanobind;

struct View {
    float* data = nullptr;
    int ndim = 0;
    int64_t shape[4] = {}, stride[4] = {};
};

namespace dlpack {  // the parts of DLPack 1.x used here
struct Tensor {
    void* data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};
struct ExchangeTable {
    uint32_t major, minor;
    ExchangeTable* older;
    void *allocator, *from_object, *to_object;
    int (*view_of_object)(void* object, Tensor* out);
    void* current_stream;
};
constexpr int32_t CPU = 1;
constexpr uint8_t FLOAT = 2;
}  // namespace dlpack

inline const dlpack::ExchangeTable* find_exchange_table(PyTypeObject* type) {
    PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
    const dlpack::ExchangeTable* table = nullptr;
    if (capsule) {
        table = static_cast<const dlpack::ExchangeTable*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
        Py_DECREF(capsule);
        while (table && table->major != 1) table = table->older;
        if (table && !table->view_of_object) table = nullptr;
    }
    PyErr_Clear();
    return table;
}

inline const dlpack::ExchangeTable* exchange_table(PyTypeObject* type) {
    struct Entry {
        PyTypeObject* type;
        const dlpack::ExchangeTable* table;
    };
    static Entry known[4] = {};  // Tensor, Parameter and perhaps a subclass; calls hold the GIL
    static unsigned next = 0;
    for (const Entry& entry : known)
        if (entry.type == type) return entry.table;
    Py_INCREF(type);  // a remembered type must not be freed and its address reused
    known[next] = {type, find_exchange_table(type)};
    const auto* table = known[next].table;
    next = (next + 1) % 4;
    return table;
}

// The float32 CPU tensor `object` of `ndim` dimensions with a contiguous last one; None gives an empty view.
inline View view(nb::handle object, int ndim, const char* name) {
    View v;
    if (object.is_none()) return v;
    const auto require = [&](bool condition, const char* what) {
        if (!condition) throw std::invalid_argument(std::string(name) + " " + what);
    };
    v.ndim = ndim;
    if (const auto* table = exchange_table(Py_TYPE(object.ptr()))) {
        dlpack::Tensor t;
        if (table->view_of_object(object.ptr(), &t) != 0) throw nb::python_error();
        require(t.device_type == dlpack::CPU && t.code == dlpack::FLOAT && t.bits == 32 && t.lanes == 1,
                "is not a float32 CPU tensor");
        require(t.ndim == ndim, "has the wrong number of dimensions");
        v.data = reinterpret_cast<float*>(static_cast<char*>(t.data) + t.byte_offset);
        for (int i = 0; i < ndim; ++i) v.shape[i] = t.shape[i], v.stride[i] = t.strides[i];
    } else {
        const auto array = nb::cast<nb::ndarray<float, nb::device::cpu>>(object, false);
        require(static_cast<int>(array.ndim()) == ndim, "has the wrong number of dimensions");
        v.data = array.data();
        for (int i = 0; i < ndim; ++i) v.shape[i] = array.shape(i), v.stride[i] = array.stride(i);
    }
    return v;
}

}  // namespace infssm
