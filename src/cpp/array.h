// Tensors from Python without torch headers: DLPack, through the C exchange table where the tensor type offers one
// (tens of nanoseconds per tensor), else through nanobind's ndarray (microseconds).
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <tuple>

namespace infssm {

namespace nb = nanobind;

// A float32 CPU tensor of N dimensions; without data where Python passed None or a tensor without elements, which is what
// operators pass for what was not asked for. COLLAPSED: the leading dimensions of a contiguous tensor count as one.
template <int N, bool COLLAPSED = false>
struct Array {
    float* data = nullptr;
    int64_t shape[N] = {}, stride[N] = {};
    const char* name = "an argument";  // of the record's field it was read from
};

using Rows = Array<2, true>;    // [..., n]
using Numbers = Array<1, true>;  // [...]

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

// An argument that does not fit; Python gets it as infssm's ConfigError.
struct Refused : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

// The record or the caller keeps the tensor alive.
template <int N, bool COLLAPSED>
void read(nb::handle object, const char* name, Array<N, COLLAPSED>& v) {
    v = {};
    v.name = name;
    if (object.is_none()) return;
    const auto fill = [&](float* data, int ndim, const int64_t* shape, const int64_t* stride) {
        int64_t size = 1;
        bool contiguous = true;
        for (int i = ndim - 1; i >= 0; size *= shape[i--]) contiguous &= shape[i] == 1 || stride[i] == size;
        if (size == 0) return;
        if (COLLAPSED ? ndim < N - 1 : ndim != N)
            throw Refused(std::string(name) + " has " + std::to_string(ndim) + " dimensions, expected " + std::to_string(N));
        v.data = data;
        if (!COLLAPSED) {
            std::copy_n(shape, N, v.shape), std::copy_n(stride, N, v.stride);
            return;
        }
        if (!contiguous) throw Refused(std::string(name) + " is not contiguous");
        v.shape[0] = size;
        for (int i = N - 1, from = ndim - 1; i > 0; --i, --from) v.shape[i] = shape[from], v.shape[0] /= shape[from];
    };
    if (const auto* table = exchange_table(Py_TYPE(object.ptr()))) {
        dlpack::Tensor t;
        if (table->view_of_object(object.ptr(), &t) != 0) throw nb::python_error();
        if (t.device_type != dlpack::CPU || t.code != dlpack::FLOAT || t.bits != 32 || t.lanes != 1)
            throw Refused(std::string(name) + " is not a float32 CPU tensor");
        fill(reinterpret_cast<float*>(static_cast<char*>(t.data) + t.byte_offset), t.ndim, t.shape, t.strides);
    } else {
        const auto array = nb::cast<nb::ndarray<float, nb::device::cpu>>(object, false);
        fill(array.data(), static_cast<int>(array.ndim()), array.shape_ptr(), array.stride_ptr());
    }
}
inline void read(nb::handle object, const char*, bool& flag) { flag = object.is(Py_True); }

// A NamedTuple of Python as a struct: `Fields<T>::list` has the name and the member of each field that is read.
template <class T>
struct Fields;
template <class T, class Member>
struct Field {
    const char* name;
    Member T::*member;
};
template <class T, class Member>
Field(const char*, Member T::*) -> Field<T, Member>;
#define INFSSM_FIELD(name) Field{#name, &T::name}  // of the record T

template <class T>
T read_record(nb::handle record) {
    T value;
    constexpr size_t count = std::tuple_size_v<decltype(Fields<T>::list)>;
    static PyObject* names[count];  // interned, and alive as long as the process
    size_t i = 0;
    const auto one = [&](const auto& field) {
        if (!names[i]) names[i] = PyUnicode_InternFromString(field.name);
        PyObject* const found = PyObject_GetAttr(record.ptr(), names[i++]);
        if (!found) throw nb::python_error();
        read(nb::steal<nb::object>(found), field.name, value.*(field.member));
    };
    std::apply([&](const auto&... field) { (one(field), ...); }, Fields<T>::list);
    return value;
}

template <int N>
std::string text(const int64_t (&shape)[N]) {
    std::string out = "[";
    for (int i = 0; i < N; ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
    return out + "]";
}

// Every kernel trusts sizes and strides: these three are the only ways from an array to a pointer. An array without data
// passes; `given` is for those that may not be left out.
template <int N, bool COLLAPSED>
void expect(const Array<N, COLLAPSED>& x, const int64_t (&shape)[N]) {
    if (x.data && !std::equal(shape, shape + N, x.shape))
        throw Refused(std::string(x.name) + " has shape " + text(x.shape) + ", expected " + text(shape));
}
template <int N, bool COLLAPSED>
const Array<N, COLLAPSED>& given(const Array<N, COLLAPSED>& x) {
    if (!x.data) throw Refused(std::string(x.name) + " is missing or empty");
    return x;
}
// The pointer of a tensor without gaps.
template <int N, bool COLLAPSED>
float* flat(const Array<N, COLLAPSED>& x, const int64_t (&shape)[N]) {
    expect(x, shape);
    int64_t size = 1;
    for (int i = N - 1; !COLLAPSED && x.data && i >= 0; size *= x.shape[i--])
        if (x.shape[i] > 1 && x.stride[i] != size) throw Refused(std::string(x.name) + " is not contiguous");
    return x.data;
}

}  // namespace infssm

namespace nanobind::detail {

template <int N, bool COLLAPSED>
struct type_caster<infssm::Array<N, COLLAPSED>> {
    using Type = infssm::Array<N, COLLAPSED>;
    NB_TYPE_CASTER(Type, const_name("float32 tensor or None"))
    bool from_python(handle source, uint8_t, cleanup_list*) {
        infssm::read(source, "an argument", value);
        return true;
    }
};

template <class T>
    requires requires { infssm::Fields<T>::list; }
struct type_caster<T> {
    NB_TYPE_CASTER(T, const_name("record"))
    bool from_python(handle source, uint8_t, cleanup_list*) {
        value = infssm::read_record<T>(source);
        return true;
    }
};

}  // namespace nanobind::detail
